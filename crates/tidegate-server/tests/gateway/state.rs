//! The state of providers: metrics, reports, events and log lines.

use std::collections::BTreeMap;

use serde_json::Value;
use tidegate::Span;

use crate::common::{Answer, Api, FREE, Gateway, get, running, standing};
use crate::wire::{body, capture, json, once, status};

/// Two credentials, of which the provider throttles or rejects the first.
const TWO: &str = "auth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]\nbalance = \"least-recently-used\"\n";

fn admin_get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
}

async fn ask_admin<C>(gateway: &Gateway<C>, path: &str) -> Value {
    json(&once(gateway.admin, admin_get(path)).await)
}

async fn events<C>(gateway: &Gateway<C>) -> Vec<String> {
    let list = ask_admin(gateway, "/v1/events?follow=false").await;
    list["events"].as_array().unwrap().iter().map(|event| event["message"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn calls_are_counted_by_their_ends() {
    let api = Api::start(|number, _| match number {
        0 => Answer::new(503, "unwell"),
        2 => Answer::new(404, "unknown"),
        _ => Answer::new(200, "hello"),
    })
    .await;
    let gateway = running(&api.policy(&format!("{FREE}breaker = \"off\"\ncache = {{ ttl = \"1h\" }}\n")));
    assert_eq!(status(&gateway.ask(get("/api/a")).await), 200);
    assert_eq!(status(&gateway.ask(get("/api/b")).await), 404);
    assert_eq!(status(&gateway.ask(get("/api/a")).await), 200);
    let page = once(gateway.admin, admin_get("/metrics")).await;
    let lines = body(&page).lines().filter_map(|line| line.rsplit_once(' '));
    let found: BTreeMap<&str, &str> = lines.collect();
    for (name, value) in [
        ("tidegate_provider_calls_total{provider=\"api\",lane=\"user\"}", "2"),
        ("tidegate_provider_first_tries_total{provider=\"api\"}", "2"),
        ("tidegate_provider_retries_total{provider=\"api\"}", "1"),
        ("tidegate_provider_attempts_total{provider=\"api\",class=\"success\"}", "1"),
        ("tidegate_provider_attempts_total{provider=\"api\",class=\"transient\"}", "1"),
        ("tidegate_provider_attempts_total{provider=\"api\",class=\"permanent\"}", "1"),
        ("tidegate_provider_reply_duration_seconds_count{provider=\"api\"}", "3"),
        ("tidegate_provider_wait_duration_seconds_count{provider=\"api\",lane=\"user\"}", "3"),
        ("tidegate_provider_cache_results_total{provider=\"api\",result=\"hit\"}", "1"),
        ("tidegate_provider_cache_results_total{provider=\"api\",result=\"miss\"}", "2"),
        ("tidegate_provider_credentials{provider=\"api\",state=\"usable\"}", "1.0"),
        ("tidegate_provider_breaker_state{provider=\"api\",state=\"closed\"}", "1.0"),
    ] {
        assert_eq!(found.get(name), Some(&value), "{name}: {page}");
    }
}

#[tokio::test]
async fn failed_calls_are_counted_by_reason() {
    let api = Api::start(|_, _| Answer::new(200, "hello")).await;
    let gateway = standing(&api.policy("limit = \"1 per 1h\"\n"));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 429);
    let report = ask_admin(&gateway, "/v1/providers/api").await;
    assert_eq!(report["failures"], serde_json::json!({ "rate_limited": 1 }), "{report}");
    let limit = &report["limits"][0];
    assert_eq!((&limit["limit"], &limit["remaining"], &limit["name"]), (&1.into(), &0.into(), &"api".into()));
}

#[tokio::test]
async fn a_breaker_is_followed_through_its_states() {
    let (lines, _guard) = capture("text");
    let api = Api::start(|number, _| if number < 2 { Answer::new(500, "") } else { Answer::new(200, "") }).await;
    let breaker = "limit = \"100/s burst 100\"\nretry = { max_attempts = 1 }\n\
        breaker = { failures = 2, open = \"60s\", successes = 2 }\n";
    let gateway = standing(&api.policy(breaker));
    for expected in [500, 500, 503] {
        assert_eq!(status(&gateway.ask(get("/api/x")).await), expected);
    }
    let report = ask_admin(&gateway, "/v1/providers/api").await;
    assert_eq!((&report["breaker"]["state"], &report["breaker"]["reset_in"]), (&"open".into(), &60.into()));
    gateway.clock.advance(Span::from_secs(61));
    for _ in 0..2 {
        assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    }
    assert_eq!(
        events(&gateway).await,
        [
            "api: the circuit breaker is open after 2 failures, for 60 s",
            "api: the circuit breaker is half-open",
            "api: the circuit breaker is closed",
        ]
    );
    let text = lines.text();
    let logged = text.lines().filter(|line| line.contains(": the circuit breaker is")).count();
    assert_eq!(logged, 3, "{text}");
}

#[tokio::test]
async fn credentials_that_are_full_are_no_event() {
    let api = Api::start(|_, _| Answer::new(200, "")).await;
    let limits = "limit = \"100/s burst 100\"\ncredential_limit = [\"1 per 60s\", \"3 in flight\"]\ntimeout = \"1s\"";
    let gateway = standing(&api.policy(&format!("{limits}\n{TWO}")));
    for expected in [200, 200, 429] {
        assert_eq!(status(&gateway.ask(get("/api/x")).await), expected);
    }
    let report = ask_admin(&gateway, "/v1/providers/api").await;
    assert_eq!(
        (&report["credentials"][1]["state"], &report["credentials"][1]["usable_in"]),
        (&"full".into(), &60.into())
    );
    let names = report["limits"].as_array().unwrap().iter().map(|limit| limit["name"].as_str().unwrap());
    let own = ["api.credential", "api.credential", "api.credential.in_flight", "api.credential.in_flight"];
    assert_eq!(names.collect::<Vec<_>>(), [&["api"], &own[..]].concat());
    let events = ask_admin(&gateway, "/v1/events?follow=false").await;
    assert_eq!(events["events"], serde_json::json!([]), "{events}");
}

#[tokio::test]
async fn credentials_that_cool_down_or_are_rejected_are_reported() {
    let (lines, _guard) = capture("text");
    let api = Api::start(|number, request| match (number, request.header("authorization")) {
        (0, _) => Answer::new(429, "").with("retry-after", "30"),
        (_, Some(token)) if token.ends_with("-b") && number > 1 => Answer::new(401, ""),
        _ => Answer::new(200, ""),
    })
    .await;
    let gateway = standing(&api.policy(&format!("limit = \"100/s burst 100\"\n{TWO}")));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    let report = ask_admin(&gateway, "/v1/providers/api").await;
    let first = &report["credentials"][0];
    assert_eq!(
        (&first["source"], &first["state"], &first["usable_in"]),
        (&"env:A".into(), &"cooling".into(), &30.into())
    );
    assert_eq!(report["credential_states"], serde_json::json!({ "usable": 1, "full": 0, "cooling": 1, "rejected": 0 }));

    gateway.clock.advance(Span::from_secs(31));
    for _ in 0..2 {
        assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    }
    let report = ask_admin(&gateway, "/v1/providers/api").await;
    assert_eq!(report["credentials"][1]["state"], "rejected", "{report}");
    assert_eq!(
        events(&gateway).await,
        [
            "api: credential 0 was throttled and cools down for 30 s",
            "api: credential 1 was rejected and is left out for 5 min",
        ]
    );
    assert!(!lines.text().contains("pl4nted"), "{}", lines.text());
}

#[tokio::test]
async fn throttles_at_the_same_time_are_one_event() {
    let api = Api::start(|_, _| Answer::new(429, "").taking(100)).await;
    let gateway = running(&api.policy("limit = \"100/s burst 100\"\nretry = { max_attempts = 1 }\n"));
    for reply in gateway.ask_at_once(10, &get("/api/x")).await {
        assert_eq!(status(&reply), 429);
    }
    let told = events(&gateway).await;
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].ends_with("no other is usable, so calls wait"), "{told:?}");
}

#[tokio::test]
async fn a_spent_quota_is_reported_twice() {
    let api = Api::start(|_, _| Answer::new(200, "")).await;
    let gateway = running(&api.policy("limit = \"10 per calendar day\"\n"));
    let mut told = Vec::new();
    for (calls, expected) in [(7, 0), (2, 1), (1, 2)] {
        for _ in 0..calls {
            assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
        }
        tokio::time::sleep(std::time::Duration::from_millis(2_600)).await;
        told = events(&gateway).await;
        assert_eq!(told.len(), expected, "{told:?}");
    }
    assert!(told[0].starts_with("api: 80 % of api are used") && told[1].starts_with("api: 100 % of api are used"));
}

#[tokio::test]
async fn a_throttled_hedge_is_reported() {
    // The first request hangs, so that the second is sent, which is throttled.
    let api = Api::start(|number, _| match number {
        0 => Answer::new(200, "late").taking(500),
        _ => Answer::new(429, ""),
    })
    .await;
    let hedged = format!("limit = \"100/s burst 100\"\nhedge_after = \"50ms\"\n{TWO}");
    let gateway = running(&api.policy(&hedged));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    let told = events(&gateway).await;
    assert!(told.iter().any(|message| message.contains("was throttled and cools down")), "{told:?}");
}
