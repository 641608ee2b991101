//! The API of state: `/v1/state`, `/v1/blocks` and `/v1/events`.

use tidegate::Span;

use crate::common::{Echo, HELLO, Peer, get, header, json, nobody, once, post, start, status};

const PENALTY: &str = r#"
    [inbound.action.login]
    match = { path = "/login" }
    key = ["client_ip"]
    limit = "1 per 60s"
    penalty = { base = "10s", cap = "1h" }
    [inbound.action.account]
    key = ["key", "header:x-device"]
    limit = "1 per 60s"
"#;

/// The number of the first event: numbers begin at the time of the start in milliseconds.
const FIRST: u64 = 1_767_225_600_001;

#[tokio::test]
async fn the_state_has_decisions_and_limits() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, PENALTY).await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..3 {
        client.ask(get("/login")).await;
    }
    gate.clock.advance(Span::from_secs(5));
    let state = json(&once(gate.admin, get("/v1/state")).await);
    assert_eq!((&state["decisions"]["allowed"], &state["decisions"]["refused"]), (&1.into(), &2.into()), "{state}");
    assert_eq!(state["uptime"], 5, "{state}");
    assert_eq!(state["store"]["up"], true, "{state}");
    assert_eq!(state["upstream"]["replies"]["2xx"], 1, "{state}");
    assert_eq!(state["connections"]["inbound"], 1, "{state}");
    assert_eq!(state["limits"][0]["name"], "login", "{state}");
}

#[tokio::test]
async fn blocked_clients_are_listed_until_reset() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, PENALTY).await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..4 {
        client.ask(get("/login")).await;
    }
    let blocks = json(&once(gate.admin, get("/v1/blocks")).await);
    let first = &blocks["clients"][0];
    assert_eq!((&blocks["blocked"], &first["client"]["client_ip"]), (&1.into(), &"127.0.0.1".into()), "{blocks}");
    assert_eq!((&first["strikes"], &first["retry_after"], &first["refusals"]), (&1.into(), &10.into(), &3.into()));
    assert_eq!((&first["limit"], &first["blocked"]), (&"login".into(), &true.into()));

    gate.clock.advance(Span::from_secs(4));
    let blocks = json(&once(gate.admin, get("/v1/blocks?action=login")).await);
    assert_eq!(blocks["clients"][0]["retry_after"], 6, "{blocks}");
    assert_eq!(json(&once(gate.admin, get("/v1/blocks?action=account")).await)["known"], 0);
    assert_eq!(status(&once(gate.admin, get("/v1/blocks?action=unknown")).await), 404);

    once(gate.api, post("/v1/reset", r#"{"action":"login","ip":"127.0.0.1"}"#)).await;
    let blocks = json(&once(gate.admin, get("/v1/blocks")).await);
    assert_eq!((&blocks["blocked"], &blocks["clients"][0]["blocked"]), (&0.into(), &false.into()), "{blocks}");
}

#[tokio::test]
async fn values_of_headers_are_shown_as_hashes() {
    let gate = start(nobody(), PENALTY).await;
    let question = r#"{"action":"account","key":"bob","headers":{"x-device":"s3cret"}}"#;
    for _ in 0..2 {
        once(gate.api, post("/v1/check", question)).await;
    }
    let page = once(gate.admin, get("/v1/blocks")).await;
    let client = &json(&page)["clients"][0]["client"];
    assert_eq!(client["key"], "bob", "{page}");
    assert!(client["header:x-device"].as_str().is_some_and(|hash| hash.starts_with('#')), "{page}");
    assert!(!page.contains("s3cret"), "{page}");
}

#[tokio::test]
async fn rows_tell_the_parts_of_their_key() {
    const PARTS: &str = r#"
        [inbound.global]
        limit = "2 per 60s"
        [inbound.action.page]
        key = ["key", "method", "path", "header:x-device"]
        limit = "1 per 60s"
        penalty = { base = "10s", cap = "1h" }
    "#;
    let gate = start(nobody(), PARTS).await;
    let question = r#"{"action":"page","ip":"192.0.2.1","key":"bob","method":"GET","path":"/a?s3cret",
        "headers":{"x-device":"s3cret"}}"#;
    for _ in 0..2 {
        once(gate.api, post("/v1/check", question)).await;
    }
    let page = once(gate.admin, get("/v1/blocks")).await;
    let row = &json(&page)["clients"][0];
    assert_eq!((&row["action"], &row["client"]["path"]), (&"page".into(), &"/a".into()), "{page}");
    assert_eq!((&row["client"]["key"], &row["client"]["method"]), (&"bob".into(), &"GET".into()), "{page}");
    assert!(!page.contains("s3cret"), "{page}");
    let events = json(&once(gate.admin, get("/v1/events?follow=false")).await);
    let message = events["events"][0]["message"].as_str().unwrap();
    assert!(message.contains("key=bob") && message.contains("header:x-device=#"), "{message}");

    for device in ["1", "2", "3"] {
        let question = format!(
            r#"{{"action":"page","ip":"::1","key":"eve","method":"PUT","path":"/a","headers":{{"x-device":"{device}"}}}}"#
        );
        once(gate.api, post("/v1/check", &question)).await;
    }
    let report = json(&once(gate.admin, get("/v1/blocks")).await);
    let global = report["clients"].as_array().unwrap().iter().find(|row| row["limit"] == "global").unwrap().clone();
    assert_eq!((&global["action"], &global["client"]["client_ip"]), (&().into(), &"::/64".into()), "{report}");
    assert_eq!(json(&once(gate.admin, get("/v1/blocks?action=page")).await)["known"], 1);
}

#[tokio::test]
async fn the_stream_has_each_event_once() {
    let gate = start(nobody(), PENALTY).await;
    let refuse = |ip: &'static str| async move {
        for _ in 0..2 {
            once(gate.api, post("/v1/check", &format!(r#"{{"action":"login","ip":"{ip}"}}"#))).await;
        }
    };
    refuse("192.0.2.1").await;
    let list = json(&once(gate.admin, get("/v1/events?follow=false")).await);
    assert_eq!((&list["last"], &list["missed"]), (&FIRST.into(), &0.into()), "{list}");
    let event = &list["events"][0];
    assert_eq!((&event["kind"], &event["ip"], &event["seconds"]), (&"blocked".into(), &"192.0.2.1".into(), &10.into()));

    let mut reader = Peer::connect(gate.admin).await;
    reader.send(get("/v1/events")).await;
    let mut text = read_until(&mut reader, &format!("id: {FIRST}")).await;
    assert_eq!(header(&text, "content-type"), Some("text/event-stream"), "{text}");
    refuse("192.0.2.2").await;
    text += &read_until(&mut reader, &format!("id: {}", FIRST + 1)).await;
    assert_eq!(text.matches("\"ip\":\"192.0.2.1\"").count(), 1, "{text}");

    let mut resumed = Peer::connect(gate.admin).await;
    let resume = format!("GET /v1/events HTTP/1.1\r\nhost: gate.test\r\nlast-event-id: {FIRST}\r\n\r\n");
    resumed.send(resume).await;
    let text = read_until(&mut resumed, &format!("id: {}", FIRST + 1)).await;
    assert!(!text.contains(&format!("id: {FIRST}\n")), "{text}");
    // A number of an earlier process.
    let all = json(&once(gate.admin, get("/v1/events?follow=false&after=2")).await);
    assert_eq!((all["events"].as_array().map(Vec::len), &all["missed"]), (Some(2), &0.into()), "{all}");
}

#[tokio::test]
async fn a_flood_of_blocks_publishes_few_events() {
    let gate = start(nobody(), PENALTY).await;
    let mut client = Peer::connect(gate.api).await;
    for number in 0..50 {
        for _ in 0..2 {
            client.ask(post("/v1/check", &format!(r#"{{"action":"login","ip":"192.0.2.{number}"}}"#))).await;
        }
    }
    gate.clock.advance(Span::from_secs(2));
    for _ in 0..2 {
        client.ask(post("/v1/check", r#"{"action":"login","ip":"192.0.2.77"}"#)).await;
    }
    let list = json(&once(gate.admin, get("/v1/events?follow=false")).await);
    assert_eq!((&list["last"], &list["events"][5]["unpublished"]), (&(FIRST + 5).into(), &45.into()), "{list}");
}

#[tokio::test]
async fn a_stream_ends_when_the_server_stops() {
    let mut gate = start(nobody(), "").await;
    let mut reader = Peer::connect(gate.admin).await;
    reader.send(get("/v1/events")).await;
    read_until(&mut reader, ":\n\n").await;
    let stopped = gate.stop();
    reader.all().await;
    assert_eq!(stopped.await.unwrap().cut_off, 0);
}

#[tokio::test]
async fn unusable_questions_say_why() {
    let gate = start(nobody(), "").await;
    for (path, expected) in [
        ("/v1/stats", "did you mean /v1/state?"),
        ("/v1/events?after=x", "`after` is the number of an event"),
        ("/v1/events?follow=maybe", "`follow` is true or false"),
        ("/v1/providers/tmdb", "the policy has no providers"),
    ] {
        let reply = once(gate.admin, get(path)).await;
        assert!(json(&reply)["message"].as_str().unwrap().contains(expected), "{path}: {reply}");
    }
}

/// Reads a stream until this text has arrived.
async fn read_until(reader: &mut Peer, expected: &str) -> String {
    let mut text = String::new();
    while !text.contains(expected) {
        text += &reader.exactly(1).await;
    }
    text
}

#[tokio::test]
async fn each_kind_of_limit_publishes_its_blocks() {
    const KINDS: &str = r#"
        [inbound.action.strict]
        limit = "1 per 60s"
        penalty = { base = "2s", cap = "1h", mode = "strict" }
        [inbound.action.quota]
        limit = "1 per calendar day"
        penalty = { base = "2s", cap = "1h" }
        [inbound.action.both]
        limit = ["1 per 60s", "1 per calendar day"]
        penalty = { base = "2s", cap = "1h" }
    "#;
    let gate = start(nobody(), KINDS).await;
    for (number, action) in ["strict", "quota", "both"].into_iter().enumerate() {
        for _ in 0..3 {
            once(gate.api, post("/v1/check", &format!(r#"{{"action":"{action}","ip":"192.0.2.1"}}"#))).await;
        }
        let list = json(&once(gate.admin, get("/v1/events?follow=false")).await);
        let events = list["events"].as_array().unwrap();
        assert_eq!(events.len(), number + 1, "{action}: {list}");
        assert_eq!(
            (&events[number]["seconds"], &events[number]["strikes"]),
            (&2.into(), &1.into()),
            "{action}: {list}"
        );
    }
}

#[tokio::test]
async fn a_reset_frees_only_its_client_in_the_list() {
    const BY_HEADER: &str = r#"
        [inbound.action.device]
        key = ["header:x-device"]
        limit = "1 per 60s"
        penalty = { base = "10s", cap = "1h" }
    "#;
    let gate = start(nobody(), BY_HEADER).await;
    let question = |device: &str| format!(r#"{{"action":"device","headers":{{"x-device":"{device}"}}}}"#);
    for device in ["a", "a", "b", "b"] {
        once(gate.api, post("/v1/check", &question(device))).await;
    }
    assert_eq!(json(&once(gate.admin, get("/v1/blocks")).await)["blocked"], 2);
    assert_eq!(status(&once(gate.api, post("/v1/reset", &question("a"))).await), 200);
    assert_eq!(json(&once(gate.admin, get("/v1/blocks")).await)["blocked"], 1);
}

#[tokio::test]
async fn open_streams_leave_connections_to_health_checks() {
    let gate = start(nobody(), "").await;
    let mut readers = Vec::new();
    // One address has at most half of the places.
    for (address, places) in [("127.0.0.1", 8), ("127.0.0.2", 8), ("127.0.0.3", 0)] {
        for number in 0..=places {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(format!("{address}:0").parse().unwrap()).unwrap();
            let mut reader = Peer::over(socket.connect(gate.admin).await.unwrap());
            reader.send(get("/v1/events")).await;
            let expected = if number < places { "HTTP/1.1 200 OK" } else { "HTTP/1.1 503 Service Unavailable" };
            assert_eq!(reader.exactly(expected.len()).await, expected, "{address} {number}");
            readers.push(reader);
        }
    }
    // More than there are connections. Those of open pages, which are idle between two updates, leave first.
    let mut pages = Vec::new();
    for _ in 0..70 {
        let mut page = Peer::connect(gate.admin).await;
        assert_eq!(status(&page.ask(get("/")).await), 200);
        pages.push(page);
    }
    assert_eq!(status(&once(gate.admin, get("/healthz")).await), 200);
    drop((readers, pages));
    for _ in 0..100 {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        let mut reader = Peer::connect(gate.admin).await;
        reader.send(get("/v1/events")).await;
        if reader.exactly(15).await == "HTTP/1.1 200 OK" {
            return;
        }
    }
    panic!("ended streams give back their places");
}
