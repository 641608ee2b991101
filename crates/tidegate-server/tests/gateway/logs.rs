//! The gateway's log.

use tidegate::Span;

use crate::common::{Answer, Api, BEARER, ONCE, PLANTED, get, provider, request, standing};
use crate::wire::{Peer, capture, nobody, status};

#[tokio::test]
async fn failed_calls_are_logged_without_the_request() {
    let (lines, _guard) = capture("json");
    let gateway = standing(&provider(nobody(), &format!("{ONCE}{BEARER}")));
    let call = request(
        "GET",
        "/api/path?key=qu3ry",
        "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n",
        "",
    );
    assert_eq!(status(&gateway.ask(call).await), 502);
    let text = lines.text();
    let failed: Vec<&str> = text.lines().filter(|line| line.contains("a call failed")).collect();
    assert_eq!(failed.len(), 1, "{text}");
    let line: serde_json::Value = serde_json::from_str(failed[0]).unwrap();
    assert_eq!((&line["provider"], &line["attempts"], &line["level"]), (&"api".into(), &1.into(), &"WARN".into()));
    assert_eq!(line["traceparent"], "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
    let why = line["why"].as_str().unwrap();
    let told = "the only attempt failed: the request got no reply: can't connect to the \
                provider: Connection refused (os error 111)";
    assert_eq!(why, told);
    for secret in [PLANTED, "qu3ry", "path?"] {
        assert!(!text.contains(secret), "{text}");
    }
}

#[tokio::test]
async fn failures_log_at_most_ten_lines_per_second() {
    let (lines, _guard) = capture("text");
    let api = Api::start(|_, _| Answer::new(200, "hello")).await;
    let gateway = standing(&api.policy("limit = \"1 per 1h\"\n"));
    let mut client = Peer::connect(gateway.address).await;
    assert_eq!(status(&client.ask(get("/api/x")).await), 200);
    for _ in 0..50 {
        assert_eq!(status(&client.ask(get("/api/x")).await), 429);
    }
    let failed = |text: &str| text.lines().filter(|line| line.contains("a call failed")).count();
    assert_eq!(failed(&lines.text()), 10);
    gateway.clock.advance(Span::from_secs(1));
    client.ask(get("/api/x")).await;
    let text = lines.text();
    assert_eq!(failed(&text), 11);
    let last = text.lines().last().unwrap();
    assert!(last.contains("suppressed=40") && last.contains("the limit `api` has no room"), "{last}");
}

#[tokio::test]
async fn provider_replies_and_caller_errors_are_not_logged() {
    let (lines, _guard) = capture("text");
    let api = Api::start(|_, _| Answer::new(503, "unwell")).await;
    let gateway = standing(&api.policy(ONCE));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 503);
    assert_eq!(status(&gateway.ask(get("/api/..%2fx")).await), 400);
    let broken = request("PUT", "/api/x", "transfer-encoding: chunked\r\n", "");
    assert_eq!(status(&gateway.ask(format!("{broken}nonsense\r\n")).await), 400);
    assert!(!lines.text().contains("a call failed"), "{}", lines.text());
}

#[tokio::test]
async fn rejected_web_pages_are_logged() {
    let (lines, _guard) = capture("text");
    let gateway = standing(&provider(nobody(), ONCE));
    let page = request("GET", "/api/x?key=qu3ry", "origin: https://evil.example\r\n", "");
    assert_eq!(status(&gateway.ask(page).await), 403);
    let text = lines.text();
    let told = text.lines().filter(|line| line.contains("rejected reason=\"web_page\"")).count();
    assert!(told == 1 && text.contains("outbound.hosts") && !text.contains("qu3ry"), "{text}");
}
