//! The changes of operators: resets and blocks over the admin listener, their rights, and their log.

use tidegate::Span;

use crate::common::{Peer, Running, capture, get, header, json, nobody, once, policy, post, start, status, try_start};

const FILE: &str = r#"
    [inbound.action.login]
    limit = "5 per 60s"
    penalty = { base = "2s", cap = "1h" }
    [inbound.action.page]
    limit = "1 per 60s"
"#;
const ABOUT: &str = r#"{"action":"login","ip":"203.0.113.7"}"#;
const BLOCK: &str = r#"{"action":"login","ip":"203.0.113.7","for":"10m"}"#;

/// A POST request with JSON and further header lines.
pub(crate) fn change(path: &str, lines: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{lines}content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

async fn check(gate: &Running, body: &str) -> serde_json::Value {
    json(&once(gate.api, post("/v1/check", body)).await)
}

#[tokio::test]
async fn a_blocked_client_is_refused_and_listed() {
    let gate = start(nobody(), FILE).await;
    let report = json(&once(gate.admin, change("/v1/block", "", BLOCK)).await);
    assert_eq!((&report["blocked"], &report["limits"][0]["retry_after"]), (&true.into(), &600.into()), "{report}");
    let refused = check(&gate, ABOUT).await;
    assert_eq!((&refused["reason"], &refused["retry_after"]), (&"penalty".into(), &600.into()), "{refused}");
    let blocks = json(&once(gate.admin, get("/v1/blocks")).await);
    let client = &blocks["clients"][0];
    assert_eq!((&client["blocked"], &client["retry_after"]), (&true.into(), &600.into()), "{blocks}");
    assert_eq!(client["client"]["client_ip"], "203.0.113.7", "{blocks}");
    let events = json(&once(gate.admin, get("/v1/events?follow=false")).await);
    let message = events["events"][0]["message"].as_str().unwrap();
    assert_eq!(message, "203.0.113.7 is blocked under login for 10 min by an operator");
    gate.clock.advance(Span::from_secs(600));
    assert_eq!(check(&gate, ABOUT).await["allowed"], true);
}

#[tokio::test]
async fn both_listeners_reset_alike() {
    let gate = start(nobody(), FILE).await;
    let reset = change("/v1/reset", "", ABOUT);
    for body in [ABOUT, r#"{"ip":"203.0.113.7"}"#, r#"{"action":"logn"}"#, r#"{"actoin":"login"}"#, "{}", "", "[]"] {
        let mut answers = Vec::new();
        for address in [gate.api, gate.admin] {
            once(gate.admin, &reset).await;
            check(&gate, ABOUT).await;
            let answer = once(address, change("/v1/reset", "", body)).await;
            answers.push((status(&answer), json(&answer)));
        }
        assert_eq!(answers[0], answers[1], "{body}");
    }
}

#[tokio::test]
async fn the_listed_reset_of_a_client_ends_its_block_beside_limits_by_other_parts() {
    let file = "[inbound.action.login]\nlimits = [\n\
        { name = \"address\", limit = \"0 per 1h\", penalty = { base = \"1h\", cap = \"1h\" } },\n\
        { name = \"account\", key = \"header:x-account\", limit = \"9 per 1h\" },\n]\n";
    let gate = start(nobody(), file).await;
    let block = r#"{"action":"login","ip":"203.0.113.7","for":"10m"}"#;
    assert_eq!(json(&once(gate.admin, change("/v1/block", "", block)).await)["skipped"][0], "login.account");
    let blocks = json(&once(gate.admin, get("/v1/blocks")).await);
    let reset = blocks["clients"][0]["reset"].to_string();
    let report = json(&once(gate.admin, change("/v1/reset", "", &reset)).await);
    assert_eq!((&report["reset"], &report["limits"][0]["blocked"]), (&true.into(), &true.into()), "{report}");
    assert_eq!(report["skipped"][0], "login.account");
}

#[tokio::test]
async fn wrong_blocks_are_explained() {
    let gate = start(nobody(), FILE).await;
    for (body, field, part) in [
        (r#"{"action":"login","ip":"203.0.113.7"}"#, "for", "such as \"10m\""),
        (r#"{"action":"login","ip":"203.0.113.7","for":"0s"}"#, "for", "from 1 s to 30 days"),
        (r#"{"action":"login","ip":"203.0.113.7","for":2592001}"#, "for", "from 1 s to 30 days"),
        (r#"{"action":"login","ip":"203.0.113.7","for":"2h"}"#, "for", "the longest block is 1h"),
        (r#"{"action":"page","ip":"203.0.113.7","for":"10m"}"#, "action", "has a penalty"),
        (r#"{"action":"login","ip":"203.0.113.7","fro":"10m"}"#, "fro", "did you mean `for`?"),
        (r#"{"action":"login","ip":"203.0.113.7","permit":"1","for":"10m"}"#, "permit", "the fields are action, ip"),
        (r#"{"for":"10m"}"#, "action", "then blocked under all actions"),
    ] {
        let answer = once(gate.admin, change("/v1/block", "", body)).await;
        let wrong = json(&answer);
        assert_eq!((status(&answer), &wrong["field"]), (400, &field.into()), "{body}: {answer}");
        assert!(wrong["message"].as_str().unwrap().contains(part), "{answer}");
    }
    let seconds = change("/v1/block", "", r#"{"ip":"203.0.113.7","for":60}"#);
    assert_eq!(status(&once(gate.admin, seconds).await), 200);
    let large = format!(r#"{{"key":"{}","for":"10m"}}"#, "k".repeat(17_000));
    assert_eq!(status(&once(gate.admin, change("/v1/block", "", &large)).await), 413);
}

#[tokio::test]
async fn each_path_tells_its_methods() {
    let gate = start(nobody(), FILE).await;
    let mut client = Peer::connect(gate.admin).await;
    for (method, path, allow) in [
        ("GET", "/v1/reset", "POST"),
        ("PUT", "/v1/block", "POST"),
        ("DELETE", "/v1/providers/x/pause", "POST"),
        ("POST", "/v1/blocks", "GET, HEAD"),
        ("POST", "/healthz", "GET, HEAD"),
        ("OPTIONS", "/v1/reset", "POST"),
    ] {
        let asked = format!("{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n");
        let answer = client.ask(asked).await;
        assert_eq!((status(&answer), header(&answer, "allow")), (405, Some(allow)), "{method} {path}");
    }
    for lines in ["", "content-type: text/plain\r\n", "content-type: application/x-www-form-urlencoded\r\n"] {
        let asked = format!(
            "POST /v1/reset HTTP/1.1\r\nhost: 127.0.0.1\r\n{lines}content-length: {}\r\n\r\n{ABOUT}",
            ABOUT.len()
        );
        assert_eq!(status(&client.ask(asked).await), 415, "{lines}");
    }
    assert_eq!(status(&client.ask(change("/v1/providers/x/pause", "", "{}")).await), 404);
}

#[tokio::test]
async fn foreign_web_pages_can_change_nothing() {
    let gate = start(nobody(), FILE).await;
    for (lines, expected) in [
        ("origin: https://evil.example\r\n", 403),
        ("origin: null\r\n", 403),
        ("sec-fetch-site: cross-site\r\n", 403),
        ("host: evil.example\r\n", 421),
    ] {
        for (path, body) in [("/v1/block", BLOCK), ("/v1/reset", ABOUT), ("/v1/providers/x/pause", "{}")] {
            assert_eq!(status(&once(gate.admin, change(path, lines, body)).await), expected, "{path} {lines}");
        }
    }
    assert_eq!(check(&gate, ABOUT).await["allowed"], true);
}

#[tokio::test]
async fn a_read_only_token_can_change_nothing() {
    let (log, _guard) = capture("text");
    let named = "[admin]\ntokens = { ops = \"env:OPS\", dash = { secret = \"env:DASH\", read_only = true } }\n";
    let policy = policy(nobody(), &format!("{FILE}\n{named}"));
    let gate = try_start(&policy, |name| Some(format!("{}-s3cret", name.to_lowercase()))).unwrap();
    let with = |token: &str, body: &str| change("/v1/block", &format!("authorization: Bearer {token}\r\n"), body);
    assert_eq!(status(&once(gate.admin, with("dash-s3cret", BLOCK)).await), 403);
    assert_eq!(status(&once(gate.admin, with("wrong", BLOCK)).await), 401);
    assert_eq!(check(&gate, ABOUT).await["allowed"], true);
    let block = r#"{"action":"login","ip":"203.0.113.7","headers":{"x-k":"s3cret"},"for":"10m"}"#;
    assert_eq!(status(&once(gate.admin, with("ops-s3cret", block)).await), 200);
    let text = log.text();
    let audit: Vec<&str> = text.lines().filter(|line| line.contains("admin: ")).collect();
    assert_eq!(audit.len(), 2, "{text}");
    assert!(audit[0].contains("not changed token=\"dash\"") && audit[0].contains("status=403"), "{text}");
    for part in
        ["admin: changed token=\"ops\" peer=127.0.0.1:", "change=\"block\" action=login ip=203.0.113.7 span=10m"]
    {
        assert!(audit[1].contains(part), "{text}");
    }
    assert!(text.contains("reason=\"token\"") && !text.contains("s3cret"), "{text}");
}

#[tokio::test]
async fn refused_changes_dont_flood_the_log() {
    let (log, _guard) = capture("text");
    let gate = start(nobody(), FILE).await;
    let mut client = Peer::connect(gate.admin).await;
    for _ in 0..50 {
        assert_eq!(status(&client.ask(change("/v1/reset", "", "{}")).await), 400);
    }
    for _ in 0..50 {
        assert_eq!(status(&client.ask(change("/v1/reset", "", ABOUT)).await), 200);
    }
    let text = log.text();
    let count = |part: &str| text.lines().filter(|line| line.contains(part)).count();
    assert_eq!((count("admin: not changed"), count("admin: changed token=\"none\"")), (10, 50), "{text}");
}

#[tokio::test]
async fn unknown_parameters_are_named() {
    let gate = start(nobody(), FILE).await;
    for (path, field, nearest) in [
        ("/v1/blocks?acton=login", "acton", Some("action")),
        ("/v1/events?folow=false", "folow", Some("follow")),
        ("/v1/state?verbose", "verbose", None),
        ("/v1/blocks?action=login&action=page", "action", None),
    ] {
        let answer = once(gate.admin, get(path)).await;
        let wrong = json(&answer);
        assert_eq!((status(&answer), &wrong["field"]), (400, &field.into()), "{path}: {answer}");
        assert_eq!(wrong["nearest"].as_str(), nearest, "{path}");
    }
    let answer = once(gate.admin, get("/v1/blocks?%61ction=l%6Fgin")).await;
    assert_eq!((status(&answer), header(&answer, "cache-control")), (200, Some("no-store")));
    for address in [gate.api, gate.admin] {
        assert_eq!(status(&once(address, "GET /v1/state HTTP/1.1\r\n\r\n").await), 400, "no Host");
    }
}
