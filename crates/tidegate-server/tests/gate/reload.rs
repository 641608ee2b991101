//! Reloads: another policy takes over while clients call.

use std::time::Duration;

use tidegate::Span;
use tidegate_testkit::random::case_count;
use tidegate_testkit::servers::wrk;

use crate::common::{Echo, HELLO, Peer, Running, get, header, json, once, policy, post, start, status, try_start};

const LOGIN: &str = "[inbound.action.login]\nmatch = { path = \"/login\" }\nlimit = \"5 per 60s\"\n";
const PENALTY: &str = "penalty = { base = \"10s\", cap = \"1h\" }\n";

impl Running {
    /// Reloads this text, and returns the settings that need a restart, or the error.
    async fn reload(&self, text: &str) -> Result<Vec<&'static str>, String> {
        text.clone_into(&mut self.file.lock().unwrap());
        self.reload.reload().await.map(|report| report.restart_needed).map_err(|error| error.to_string())
    }
}

#[tokio::test]
async fn used_calls_stay_used() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, LOGIN).await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..4 {
        assert_eq!(status(&client.ask(get("/login")).await), 200);
    }
    assert_eq!(gate.reload(LOGIN).await, Ok(vec![]));
    let fifth = client.ask(get("/login")).await;
    assert_eq!((status(&fifth), header(&fifth, "ratelimit")), (200, Some("\"login\";r=0;t=60")), "{fifth}");
    assert_eq!(status(&client.ask(get("/login")).await), 429);

    assert_eq!(gate.reload(&LOGIN.replace("5 per", "7 per")).await, Ok(vec![]));
    let [sixth, seventh, eighth] = [(); 3].map(|()| get("/login"));
    for (request, expected) in [(sixth, 200), (seventh, 200), (eighth, 429)] {
        assert_eq!(status(&client.ask(request).await), expected);
    }
    assert_eq!(gate.reload(&LOGIN.replace("5 per", "3 per")).await, Ok(vec![]));
    assert_eq!(status(&client.ask(get("/login")).await), 429);
    let state = json(&once(gate.admin, get("/v1/state")).await);
    assert_eq!((&state["decisions"]["allowed"], &state["decisions"]["refused"]), (&7.into(), &3.into()), "{state}");
    assert_eq!(state["reloads"]["ok"], 3, "{state}");
}

#[tokio::test]
async fn a_blocked_client_stays_blocked() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, &format!("{LOGIN}{PENALTY}")).await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..6 {
        client.ask(get("/login")).await;
    }
    // Another number, another kind, and other actions before it.
    for text in ["9 per 60s", "9/s burst 9"] {
        let others = "[inbound.action.a]\nmatch = { path = \"/a\" }\nlimit = \"1 per 60s\"\n";
        let text = format!("{others}{}{PENALTY}", LOGIN.replace("5 per 60s", text));
        assert_eq!(gate.reload(&text).await, Ok(vec![]));
        gate.clock.advance(Span::from_secs(1));
        assert_eq!(status(&client.ask(get("/login")).await), 429, "{text}");
        let blocks = json(&once(gate.admin, get("/v1/blocks")).await);
        let first = &blocks["clients"][0];
        assert_eq!(
            (&first["limit"], &first["action"], &first["blocked"]),
            (&"login".into(), &"login".into(), &true.into())
        );
    }
    gate.clock.advance(Span::from_secs(8));
    assert_eq!(status(&client.ask(get("/login")).await), 200);
}

#[tokio::test]
async fn blocks_from_shadow_are_told_when_enforced() {
    let upstream = Echo::start(HELLO).await;
    let enforced = format!("{LOGIN}{PENALTY}");
    let gate = start(upstream.address, &format!("{enforced}mode = \"shadow\"\n")).await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..7 {
        assert_eq!(status(&client.ask(get("/login")).await), 200);
    }
    let blocks = json(&once(gate.admin, get("/v1/blocks")).await);
    let counts = |blocks: &serde_json::Value| {
        let first = &blocks["clients"][0];
        [&blocks["only_shadow"], &first["refusals"], &first["shadow_refusals"]].map(serde_json::Value::as_u64)
    };
    assert_eq!(counts(&blocks), [Some(1), Some(0), Some(2)], "{blocks}");
    for path in ["/who", "/policy"] {
        let page = once(gate.admin, get(path)).await;
        assert!(page.contains("In shadow</th>"), "{page}");
    }

    assert_eq!(gate.reload(&enforced).await, Ok(vec![]));
    for _ in 0..2 {
        assert_eq!(status(&client.ask(get("/login")).await), 429);
    }
    let events = json(&once(gate.admin, get("/v1/events?follow=false")).await);
    let events = events["events"].as_array().unwrap().iter().filter(|event| event["kind"] == "blocked");
    let shadows: Vec<bool> = events.map(|event| event["shadow"].as_bool().unwrap()).collect();
    assert_eq!(shadows.iter().filter(|shadow| !**shadow).count(), 1, "{shadows:?}");
    assert_eq!(shadows.len(), 2);
    let blocks = json(&once(gate.admin, get("/v1/blocks")).await);
    assert_eq!(counts(&blocks), [Some(0), Some(2), Some(2)], "{blocks}");
}

#[tokio::test]
async fn limits_come_and_go() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, LOGIN).await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..5 {
        client.ask(get("/login")).await;
    }
    let search = LOGIN.replace("login", "search").replace("5 per", "1 per");
    assert_eq!(gate.reload(&search).await, Ok(vec![]));
    let answers = [get("/login"), get("/search"), get("/search")];
    for (request, expected) in answers.into_iter().zip([200, 200, 429]) {
        assert_eq!(status(&client.ask(request).await), expected);
    }
    let limits = json(&once(gate.admin, get("/v1/state")).await)["limits"].clone();
    assert_eq!((limits.as_array().unwrap().len(), &limits[0]["name"]), (1, &"search".into()), "{limits}");
    let blocks = json(&once(gate.admin, get("/v1/blocks")).await);
    assert_eq!((&blocks["known"], &blocks["clients"][0]["limit"]), (&1.into(), &"search".into()), "{blocks}");
    assert_eq!(gate.reload(&format!("{search}{LOGIN}")).await, Ok(vec![]));
    assert_eq!(status(&client.ask(get("/login")).await), 429, "what was used is still known");
}

#[tokio::test]
async fn a_broken_file_changes_nothing() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, LOGIN).await;
    let mut client = Peer::connect(gate.inbound).await;
    let error = gate.reload(&LOGIN.replace("limit", "limmit")).await.unwrap_err();
    assert!(error.contains("test.toml:3:1") && error.contains("did you mean `limit`"), "{error}");
    let missing = format!("{LOGIN}[api]\ntoken = \"env:MISSING\"\n");
    let error = gate.reload(&missing).await.unwrap_err();
    assert!(error.contains("api.token") && error.contains("MISSING"), "{error}");
    let part = format!("{LOGIN}key = [\"platform\"]\n");
    let error = gate.reload(&part).await.unwrap_err();
    assert!(error.contains("platform"), "{error}");
    for expected in [200, 200, 200, 200, 200, 429] {
        assert_eq!(status(&client.ask(get("/login")).await), expected);
    }
    let state = json(&once(gate.admin, get("/v1/state")).await);
    assert_eq!((&state["reloads"]["failed"], &state["reloads"]["last_ok"]), (&3.into(), &false.into()), "{state}");
    let events = json(&once(gate.admin, get("/v1/events?follow=false")).await);
    assert_eq!(events["events"].as_array().unwrap().len(), 3, "{events}");
}

#[tokio::test]
async fn settings_that_need_a_restart_are_named() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, LOGIN).await;
    let changed = format!(
        "{LOGIN}[inbound.caps]\nconnections = 7\n[store]\nmax_bytes = \"8MiB\"\n[log]\nrefusals_per_second = 3\n"
    );
    assert_eq!(gate.reload(&changed).await, Ok(vec!["store", "inbound.caps", "log"]));
    assert_eq!(gate.reload(&changed).await, Ok(vec!["store", "inbound.caps", "log"]));
    let per_client = ["api", "admin"].map(|section| format!("[{section}]\nconnections_per_client = 7\n"));
    let named = Ok(vec!["api.connections_per_client", "admin.connections_per_client"]);
    assert_eq!(gate.reload(&format!("{LOGIN}{}", per_client.concat())).await, named);
    assert_eq!(gate.reload(LOGIN).await, Ok(vec![]));
}

#[tokio::test]
async fn an_open_connection_uses_the_new_upstream() {
    let first = Echo::start(HELLO).await;
    let second = Echo::start("HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecond").await;
    let gate = start(first.address, LOGIN).await;
    let mut client = Peer::connect(gate.inbound).await;
    assert!(client.ask(get("/")).await.ends_with("hello"));
    let text = format!("[inbound]\nupstream = \"http://{}\"\n{LOGIN}", second.address);
    assert_eq!(gate.reload(&text).await, Ok(vec![]));
    assert!(client.ask(get("/")).await.ends_with("second"));
}

#[tokio::test]
async fn tokens_are_read_anew() {
    let token = |number: u32| format!("{LOGIN}[api]\ntoken = \"env:TOKEN{number}\"\n");
    let gate = try_start(&policy(crate::common::nobody(), &token(1)), |name| Some(name.to_lowercase())).unwrap();
    let ask = |token: &str| {
        post("/v1/check", r#"{"action":"login","ip":"203.0.113.1"}"#).replacen(
            "\r\n",
            &format!("\r\nauthorization: Bearer {token}\r\n"),
            1,
        )
    };
    assert_eq!(status(&once(gate.api, ask("token1")).await), 200);
    assert_eq!(gate.reload(&token(2)).await, Ok(vec![]));
    assert_eq!(status(&once(gate.api, ask("token1")).await), 401);
    assert_eq!(status(&once(gate.api, ask("token2")).await), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_fails_while_policies_change() {
    let upstream = Echo::start(HELLO).await;
    let open = "[inbound.action.all]\nmatch = { path = \"/\" }\nlimit = \"1000000000 per 60s\"\n";
    let gate = start(upstream.address, open).await;
    let seconds = case_count(4, 20);
    let Some(load) = wrk(&format!("http://{}/", gate.inbound), 50, seconds) else { return };
    let finished = tokio::task::spawn_blocking(move || load.finish());
    for number in 1.. {
        if finished.is_finished() {
            break;
        }
        let text = if number % 10 == 0 {
            open.replace("limit", "lmit")
        } else {
            open.replace("60s", &format!("{}s", 60 + number % 5))
        };
        assert_eq!(gate.reload(&text).await.is_ok(), number % 10 != 0);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let counts = finished.await.unwrap();
    assert!(counts.answers > 1000, "{counts:?}");
    assert_eq!((counts.not_ok, counts.read_write_errors, counts.timeouts), (0, 0, 0), "{counts:?}");
    let state = json(&once(gate.admin, get("/v1/state")).await);
    let allowed = state["decisions"]["allowed"].as_u64().unwrap();
    // wrk gives up the requests that are in flight when its time is over.
    assert!((counts.answers..=counts.answers + 50).contains(&allowed), "{allowed} of {counts:?}");
}
