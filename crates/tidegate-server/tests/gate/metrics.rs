//! The metrics page of a gate.

use std::collections::BTreeMap;

use tidegate_server::metrics::METRICS;

use crate::common::{Echo, HELLO, Peer, body, get, header, once, policy, post, start, status, try_start};

const LIMITED: &str = r#"
    [inbound]
    deny = ["203.0.113.9"]
    [inbound.action.login]
    match = { path = "/login" }
    limit = "3 per 1h"
    [inbound.action.watched]
    match = { path = "/watched" }
    limit = "1 per 1h"
    mode = "shadow"
"#;

/// The values of a page, by name and labels.
fn values(page: &str) -> BTreeMap<String, f64> {
    let lines = body(page).lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, value)| (name.into(), value.parse().unwrap()))
        .collect()
}

/// The sum of the values whose names begin so.
fn sum(values: &BTreeMap<String, f64>, start: &str) -> f64 {
    values.iter().filter(|(name, _)| name.starts_with(start)).map(|(_, value)| value).sum()
}

#[tokio::test]
async fn each_decision_is_counted_by_its_result() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, LIMITED).await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..5 {
        client.ask(get("/login")).await;
    }
    for _ in 0..4 {
        assert_eq!(status(&client.ask(get("/watched")).await), 200);
    }
    client.ask(get("/free")).await;
    assert_eq!(status(&once(gate.inbound, "GET / HTTP/1.1\r\nhost: a b\r\n\r\n").await), 400);
    for (path, question) in [
        ("/v1/check", r#"{"action":"login","ip":"192.0.2.1"}"#),
        ("/v1/check", r#"{"action":"login","ip":"203.0.113.9"}"#),
        ("/v1/refund", r#"{"action":"login","ip":"192.0.2.1"}"#),
    ] {
        once(gate.api, post(path, question)).await;
    }
    // Questions that change nothing aren't decisions.
    once(gate.api, get("/v1/status?action=login&ip=192.0.2.1")).await;
    once(gate.api, get("/v1/explain?action=login&ip=192.0.2.1")).await;

    let page = once(gate.admin, get("/metrics")).await;
    let found = values(&page);
    let decisions = |action: &str, limit: &str, outcome: &str, reason: &str| {
        let labels = format!("action=\"{action}\",limit=\"{limit}\",outcome=\"{outcome}\",reason=\"{reason}\"");
        found.get(&format!("tidegate_decisions_total{{{labels}}}")).copied().unwrap_or_default()
    };
    assert_eq!(decisions("login", "login", "allowed", "ok"), 4.0, "{page}");
    assert_eq!(decisions("login", "login", "refused", "limit"), 2.0, "{page}");
    assert_eq!(decisions("login", "", "refused", "deny_list"), 1.0, "{page}");
    assert_eq!(decisions("watched", "watched", "allowed", "ok"), 1.0, "{page}");
    assert_eq!(decisions("watched", "watched", "shadow", "limit"), 3.0, "{page}");
    assert_eq!(decisions("", "", "allowed", "unlimited"), 1.0, "{page}");
    assert_eq!(sum(&found, "tidegate_decisions_total"), 12.0, "{page}");
    assert_eq!(sum(&found, "tidegate_rejections_total"), 1.0, "{page}");
    assert_eq!(found["tidegate_decision_duration_seconds_count"], 12.0, "{page}");
    assert_eq!(found["tidegate_upstream_replies_total{status=\"2xx\"}"], 8.0, "{page}");
    assert_eq!(found["tidegate_upstream_duration_seconds_count"], 8.0, "{page}");
    assert!(found["tidegate_connections{listener=\"inbound\"}"] >= 1.0, "{page}");
}

#[tokio::test]
async fn the_reader_selects_the_format() {
    let gate = start(crate::common::nobody(), "").await;
    let asked = |accept: &str| format!("GET /metrics HTTP/1.1\r\nhost: gate.test\r\naccept: {accept}\r\n\r\n");
    for (accept, kind, last) in [
        ("*/*", "application/openmetrics-text; version=1.0.0; charset=utf-8", "# EOF"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "application/openmetrics-text", "# EOF"),
        ("text/plain;version=0.0.4", "text/plain; version=0.0.4; charset=utf-8", ""),
    ] {
        let page = once(gate.admin, asked(accept)).await;
        assert!(header(&page, "content-type").unwrap().starts_with(kind), "{accept}: {page}");
        assert!(body(&page).trim_end().ends_with(last), "{accept}: {page}");
    }
}

#[tokio::test]
async fn metrics_can_be_turned_off() {
    let upstream = Echo::start(HELLO).await;
    let gate = try_start(&policy(upstream.address, "[admin]\nmetrics = false\n"), |_| None).unwrap();
    assert_eq!(status(&once(gate.inbound, get("/")).await), 200);
    assert_eq!(status(&once(gate.admin, get("/metrics")).await), 404);
    assert_eq!(status(&once(gate.admin, get("/healthz")).await), 200);
}

#[tokio::test]
async fn metrics_need_the_token_of_their_listener() {
    let policy = policy(crate::common::nobody(), "[admin]\ntoken = \"env:ADMIN\"\n");
    let gate = try_start(&policy, |_| Some("s3cret".to_owned())).unwrap();
    assert_eq!(status(&once(gate.admin, get("/metrics")).await), 401);
    let with_token = "GET /metrics HTTP/1.1\r\nhost: gate.test\r\nauthorization: Bearer s3cret\r\n\r\n";
    assert_eq!(status(&once(gate.admin, with_token).await), 200);
}

#[tokio::test]
async fn the_page_has_only_listed_metrics() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, LIMITED).await;
    let page = once(gate.admin, get("/metrics")).await;
    let listed: Vec<String> = METRICS.iter().map(|metric| metric.full_name()).collect();
    for line in body(&page).lines().filter(|line| line.starts_with("# TYPE ")) {
        let mut words = line.split(' ').skip(2);
        let (name, kind) = (words.next().unwrap(), words.next().unwrap());
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        assert!(listed.contains(&format!("{name}{suffix}")), "{line}");
    }
}

#[tokio::test]
async fn broken_uploads_are_no_failures_of_the_upstream() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "").await;
    let broken = "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n";
    assert_eq!(status(&once(gate.inbound, broken).await), 400);
    let found = values(&once(gate.admin, get("/metrics")).await);
    assert_eq!(sum(&found, "tidegate_upstream_failures_total"), 0.0);
    assert!(found.contains_key("tidegate_upstream_failures_total{reason=\"broken\"}"));
}
