//! The gate's log.

use std::time::Duration;

use tidegate::clock::SystemClock;
use tidegate::{Clock as _, Gate, Span};
use tidegate_server::Server;

use crate::common::{Echo, HELLO, capture, once, post, start, status};

const NO: &str = r#"
    [inbound.action.no]
    match = { path = ["/no", "/no/*"] }
    limit = "0 per 1s"
    [inbound.action.account]
    key = ["key"]
    limit = "0 per 1s"
"#;

#[tokio::test]
async fn hostile_text_is_escaped_and_secrets_are_masked() {
    for format in ["text", "json"] {
        let (lines, _guard) = capture(format);
        let upstream = Echo::start(HELLO).await;
        let gate = start(upstream.address, NO).await;
        let hostile = "GET /no/%0A\u{9b}31m?token=s3cret HTTP/1.1\r\nhost: a\r\nauthorization: Bearer s3cret\r\n\r\n";
        assert_eq!(status(&once(gate.inbound, hostile).await), 429);
        let key = r#"{"action":"account","key":"sk\u001b[2J\nINFO forged s3cret"}"#;
        assert_eq!(status(&once(gate.api, post("/v1/check", key)).await), 429);
        let text = lines.text();
        let refused: Vec<&str> = text.lines().filter(|line| line.contains("refused")).collect();
        assert_eq!(refused.len(), 2, "{text}");
        assert!(!text.contains("s3cret") && !text.contains("forged"), "{text}");
        assert!(text.bytes().all(|byte| byte >= b' ' || byte == b'\n'), "{text}");
        assert!(!text.contains('\u{9b}'), "{text}");
        if format == "json" {
            let line: serde_json::Value = serde_json::from_str(refused[0]).unwrap();
            assert_eq!((&line["action"], &line["method"], &line["limit"]), (&"no".into(), &"GET".into(), &"no".into()));
            assert_eq!(line["ip"], "127.0.0.1");
        }
    }
}

#[tokio::test]
async fn refusals_log_their_reason() {
    let (lines, _guard) = capture("text");
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, &format!("[inbound]\ndeny = [\"127.0.0.1\"]\n{NO}")).await;
    assert_eq!(status(&once(gate.inbound, crate::common::get("/")).await), 403);
    let text = lines.text();
    let refused = text.lines().find(|line| line.contains("refused ")).unwrap();
    assert!(refused.contains("reason=\"deny_list\""), "{refused}");
}

#[tokio::test]
async fn refusals_log_at_most_ten_lines_per_second() {
    let (lines, _guard) = capture("text");
    let upstream = Echo::start(HELLO).await;
    let shadow = "[inbound.action.watched]\nmatch = { path = \"/watched\" }\nlimit = \"0 per 1s\"\nmode = \"shadow\"\n";
    let mut gate = start(upstream.address, &format!("{NO}{shadow}")).await;
    let mut client = crate::common::Peer::connect(gate.inbound).await;
    for _ in 0..200 {
        assert_eq!(status(&client.ask(crate::common::get("/no")).await), 429);
    }
    let refused = |text: &str| text.lines().filter(|line| line.contains("refused ")).count();
    assert_eq!(refused(&lines.text()), 10);
    for _ in 0..5 {
        assert_eq!(status(&client.ask(crate::common::get("/watched")).await), 200);
    }
    gate.clock.advance(Span::from_secs(1));
    client.ask(crate::common::get("/no")).await;
    assert_eq!(refused(&lines.text()), 11);
    gate.stop().await.unwrap();
    let text = lines.text();
    for summary in ["limit=no shadow=false count=190", "limit=watched shadow=true count=5"] {
        assert!(text.lines().any(|line| line.contains("not logged one by one") && line.contains(summary)), "{text}");
    }
}

#[tokio::test]
async fn a_wrong_clock_is_reported_once() {
    let (lines, _guard) = capture("text");
    let run = |off: Span| {
        let clock = SystemClock::at(SystemClock::new().now() - off);
        let policy = crate::common::policy(crate::common::nobody(), "");
        let server = Server::from_gate(Gate::in_memory(&policy, clock.clone()), &policy).follow_clock(clock);
        server.bind().unwrap().run(tokio::time::sleep(Duration::from_millis(2500)))
    };
    tokio::join!(run(Span::ZERO), run(Span::from_secs(3600)));
    let text = lines.text();
    let told: Vec<&str> = text.lines().filter(|line| line.contains("drift_secs=")).collect();
    assert_eq!(told.len(), 1, "{text}");
    // The system may correct its time meanwhile.
    let is_an_hour = ["drift_secs=3599", "drift_secs=3600"].iter().any(|drift| told[0].contains(drift));
    assert!(told[0].contains(" WARN ") && is_an_hour, "{}", told[0]);
}

#[tokio::test]
async fn refusals_name_their_trace() {
    const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let (lines, _guard) = capture("text");
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, NO).await;
    let traced = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: a\r\ntraceparent: {TRACE}\r\n\r\n");
    assert_eq!(status(&once(gate.inbound, traced("/no")).await), 429);
    assert_eq!(status(&once(gate.inbound, traced("/yes")).await), 200);
    assert!(upstream.seen()[0].contains(&format!("traceparent: {TRACE}\r\n")), "it passes unchanged");
    assert!(lines.text().contains(&format!("traceparent={TRACE}")), "{}", lines.text());
}
