//! The exact bytes that clients and upstreams read.

use tidegate::Span;

use crate::common::{Echo, HELLO, Peer, body, get, once, start, undated};

const LOGIN: &str = r#"
    [inbound.global]
    limit = "1000 per 1h"
    [inbound.action.login]
    match = { method = "POST", path = "/login" }
    limit = "5 per 60s"
    penalty = { base = "2s", cap = "1h" }
"#;
const POST_LOGIN: &str = "POST /login HTTP/1.1\r\nhost: gate.test\r\ncontent-length: 0\r\n\r\n";

#[tokio::test]
async fn admissions_and_refusals_have_exact_bytes() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, LOGIN).await;
    let mut client = Peer::connect(gate.inbound).await;
    for left in (0..5).rev() {
        assert_eq!(
            undated(&client.ask(POST_LOGIN).await),
            format!(
                "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\
                 ratelimit-policy: \"login\";q=5;w=60, \"global\";q=1000;w=3600\r\n\
                 ratelimit: \"login\";r={left};t=60\r\n\r\nhello"
            )
        );
    }
    gate.clock.advance(Span::from_millis(1));
    assert_eq!(
        undated(&client.ask(POST_LOGIN).await),
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 2\r\n\
         ratelimit-policy: \"login\";q=5;w=60, \"global\";q=1000;w=3600\r\n\
         ratelimit: \"login\";r=0;t=2\r\ncontent-length: 86\r\n\r\n\
         {\"error\":\"Too many requests\",\"retry_after\":2,\"next_allowed_at\":\"2026-01-01 00:00:03Z\"}"
    );
    assert_eq!(upstream.seen().len(), 5, "the upstream never sees the refused one");

    gate.clock.advance(Span::from_millis(1999));
    assert!(client.ask(POST_LOGIN).await.starts_with("HTTP/1.1 429 "));
    gate.clock.advance(Span::from_millis(1));
    assert!(client.ask(POST_LOGIN).await.starts_with("HTTP/1.1 200 "), "the wait that was told is true");
    assert!(client.ask(POST_LOGIN).await.contains("\r\nretry-after: 4\r\n"));
    assert!(client.ask(get("/elsewhere")).await.contains("\r\nratelimit: \"global\";r=993;t=3600\r\n"));
}

#[tokio::test]
async fn the_upstream_receives_exact_request_bytes() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "").await;
    once(gate.inbound, "GET /a%2Fb?c=d&e HTTP/1.1\r\nHost: Gate.Test\r\nX-Case: Kept  \r\n\r\n").await;
    once(gate.inbound, "GET http://gate.test/x?y HTTP/1.1\r\nHost: gate.test\r\n\r\n").await;
    once(gate.inbound, "OPTIONS * HTTP/1.1\r\nHost: gate.test\r\n\r\n").await;
    once(gate.inbound, "GET /old HTTP/1.0\r\n\r\n").await;
    once(gate.inbound, "POST /p HTTP/1.1\r\nHost: gate.test\r\nContent-Length: 3\r\n\r\nabc").await;
    once(gate.inbound, "GET /g HTTP/1.1\r\nHost: gate.test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        .await;
    let told =
        |host: &str| format!("x-forwarded-for: 127.0.0.1\r\nx-forwarded-proto: http\r\nx-forwarded-host: {host}\r\n");
    let gate_test = told("gate.test");
    assert_eq!(
        upstream.seen(),
        [
            format!("GET /a%2Fb?c=d&e HTTP/1.1\r\nhost: Gate.Test\r\nx-case: Kept\r\n{}\r\n", told("Gate.Test")),
            format!("GET /x?y HTTP/1.1\r\nhost: gate.test\r\n{gate_test}\r\n"),
            format!("OPTIONS * HTTP/1.1\r\nhost: gate.test\r\n{gate_test}\r\n"),
            format!(
                "GET /old HTTP/1.1\r\nx-forwarded-for: 127.0.0.1\r\nx-forwarded-proto: http\r\nhost: {}\r\n\r\n",
                upstream.address
            ),
            format!("POST /p HTTP/1.1\r\nhost: gate.test\r\ncontent-length: 3\r\n{gate_test}\r\nabc"),
            format!(
                "GET /g HTTP/1.1\r\nhost: gate.test\r\ntransfer-encoding: chunked\r\n{gate_test}\r\n3\r\nabc\r\n0\r\n\r\n"
            ),
        ]
    );
}

#[tokio::test]
async fn header_dialects_problems_and_lists_are_exact() {
    let upstream = Echo::start(HELLO).await;
    let refuse = "[inbound.action.none]\nmatch = { path = \"/none\" }\nlimit = \"0 per 60s\"\n";
    let gate =
        start(upstream.address, &format!("[inbound]\nheaders = \"draft-7\"\nx_ratelimit = true\n{refuse}")).await;
    assert_eq!(
        undated(&once(gate.inbound, get("/none")).await),
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n\
         ratelimit-policy: 0;w=60\r\nratelimit: limit=0, remaining=0, reset=3155760000\r\n\
         x-ratelimit-limit: 0\r\nx-ratelimit-remaining: 0\r\ncontent-length: 71\r\n\r\n\
         {\"error\":\"Too many requests\",\"retry_after\":null,\"next_allowed_at\":null}"
    );
    let gate = start(upstream.address, &format!("[inbound]\nheaders = \"none\"\n{refuse}")).await;
    assert_eq!(
        undated(&once(gate.inbound, "GET /none HTTP/1.1\r\nhost: a\r\naccept: application/problem+json\r\n\r\n").await),
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/problem+json\r\ncontent-length: 231\r\n\r\n\
         {\"type\":\"https://iana.org/assignments/http-problem-types#quota-exceeded\",\
         \"title\":\"Request cannot be satisfied as assigned quota has been exceeded\",\"status\":429,\
         \"violated-policies\":[\"none\"],\"retry_after\":null,\"next_allowed_at\":null}"
    );
    let gate = start(upstream.address, &format!("[inbound]\nallow = [\"127.0.0.1\"]\n{refuse}")).await;
    assert_eq!(undated(&once(gate.inbound, get("/none")).await), HELLO);
    let gate = start(upstream.address, &format!("[inbound]\ndeny = [\"127.0.0.0/8\"]\n{refuse}")).await;
    assert_eq!(
        undated(&once(gate.inbound, get("/")).await),
        "HTTP/1.1 403 Forbidden\r\ncontent-type: application/json\r\ncontent-length: 21\r\n\r\n{\"error\":\"Forbidden\"}"
    );
    let shadow = format!("{refuse}mode = \"shadow\"\n");
    let gate = start(upstream.address, &shadow).await;
    assert!(once(gate.inbound, get("/none")).await.starts_with("HTTP/1.1 200 OK"));
}

#[tokio::test]
async fn rate_limit_fields_are_valid_structured_fields() {
    let upstream = Echo::start("HTTP/1.1 200 OK\r\nratelimit: \"inner\";r=1;t=2\r\ncontent-length: 0\r\n\r\n").await;
    let file = "[inbound.action.\"a.b-c_d\"]\nmatch = { path = \"/\" }\nlimit = [\"5 per 60s\", \"1000 per calendar day\", \"8 in flight\"]\n";
    let gate = start(upstream.address, file).await;
    let answer = once(gate.inbound, get("/")).await;
    let mut fields = 0;
    for line in answer.lines() {
        let Some((name, value)) = line.split_once(": ") else { continue };
        if !name.starts_with("ratelimit") {
            continue;
        }
        let list = sfv::Parser::new(value).parse::<sfv::List>().unwrap_or_else(|error| panic!("{error}: {line}"));
        for entry in &list {
            let sfv::ListEntry::Item(item) = entry else { panic!("{line}") };
            assert!(item.bare_item.as_string().is_some(), "{line}");
            let needed = if name == "ratelimit" { ["r", "t"] } else { ["q", "q"] };
            for parameter in needed {
                assert!(item.params.get(parameter).is_some_and(|value| value.as_integer().is_some()), "{line}");
            }
        }
        fields += list.len();
    }
    assert_eq!(fields, 5, "three policies, the upstream's state and ours: {answer}");
}

#[tokio::test]
async fn upstream_errors_have_exact_responses() {
    let gate = start(crate::common::nobody(), "").await;
    assert_eq!(
        undated(&once(gate.inbound, get("/")).await),
        "HTTP/1.1 502 Bad Gateway\r\ncontent-type: application/json\r\ncontent-length: 80\r\n\r\n\
         {\"error\":\"Bad Gateway\",\"message\":\"the upstream refused or broke the connection\"}"
    );
    let broken = Echo::start("HTTP/1.1 200 OK\r\ncontent-length: nonsense\r\n\r\n").await;
    let gate = start(broken.address, "").await;
    assert!(once(gate.inbound, get("/")).await.starts_with("HTTP/1.1 502 Bad Gateway\r\n"));
    let asked = "TRACE / HTTP/1.1\r\nhost: a\r\n\r\n";
    assert_eq!(
        undated(&once(gate.inbound, asked).await),
        "HTTP/1.1 405 Method Not Allowed\r\ncontent-type: application/json\r\nconnection: close\r\n\
         allow: GET, HEAD, POST, PUT, DELETE, PATCH, OPTIONS\r\ncontent-length: 75\r\n\r\n\
         {\"error\":\"Method Not Allowed\",\"message\":\"CONNECT and TRACE are not served\"}"
    );
}

#[tokio::test]
async fn an_unreadable_head_is_answered_with_400() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "").await;
    let two_lengths = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd";
    let told = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: 99\r\n\r\n\
        {\"error\":\"Bad Request\",\"message\":\"the request's head can't be read: invalid content-length parsed\"}";
    for address in [gate.inbound, gate.api, gate.admin] {
        assert_eq!(Peer::connect(address).await.ask(two_lengths).await, told);
        // After another request, in the same packet and in one of its own.
        let mut client = Peer::connect(address).await;
        client.send(get("/healthz") + two_lengths).await;
        client.message().await;
        assert_eq!(client.message().await, told);
        assert!(client.ends().await);
        let mut client = Peer::connect(address).await;
        client.ask(get("/healthz")).await;
        assert_eq!(client.ask("nonsense\r\n\r\n").await.split("\r\n").next(), Some("HTTP/1.1 400 Bad Request"));
        assert!(client.ends().await);
    }
    let large = format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "y".repeat(100_000));
    assert_eq!(
        body(&once(gate.api, large).await),
        "{\"error\":\"Request Header Fields Too Large\",\
         \"message\":\"the request's head can't be read: message head is too large\"}"
    );
}

#[tokio::test]
async fn an_upstreams_empty_400_is_forwarded_unchanged() {
    let upstream = Echo::start("HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
    let gate = start(upstream.address, "").await;
    let asked = "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    assert_eq!(
        undated(&once(gate.inbound, asked).await),
        "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    );
}
