//! The changes of operators to providers: pauses and resets.

use std::time::Duration;

use serde_json::Value;

use crate::common::{Answer, Api, FREE, Gateway, ONCE, get, running, standing};
use crate::wire::{Peer, body, header, json, once, status};

pub(crate) fn change(path: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}"
    )
}

pub(crate) async fn ask<C>(gateway: &Gateway<C>, path: &str) -> Value {
    json(&once(gateway.admin, format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")).await)
}

#[tokio::test]
async fn a_paused_provider_refuses_new_calls() {
    let api = Api::start(|_, _| Answer::new(200, "hello").taking(300)).await;
    let gateway = running(&api.policy(FREE));
    let mut under_way = Peer::connect(gateway.address).await;
    under_way.send(get("/api/slow")).await;
    while api.count() < 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let paused = json(&once(gateway.admin, change("/v1/providers/api/pause")).await);
    assert_eq!(paused, serde_json::json!({ "provider": "api", "paused": true, "changed": true }));
    let answer = gateway.ask(get("/api/x")).await;
    assert_eq!((status(&answer), header(&answer, "retry-after")), (503, None), "{answer}");
    let problem = json(&answer);
    assert_eq!(problem["error"], "ProviderPausedError");
    assert_eq!(problem["message"], "api: an operator has paused the provider");
    assert_eq!(body(&under_way.message().await), "hello", "it was under way");
    assert_eq!(ask(&gateway, "/v1/providers/api").await["paused"], true);
    let page = once(gateway.admin, "GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n").await;
    assert!(page.contains("tidegate_provider_paused{provider=\"api\"} 1.0\n"), "{page}");
    assert!(page.contains("provider=\"api\",reason=\"provider_paused\"} 1\n"), "{page}");

    assert_eq!(json(&once(gateway.admin, change("/v1/providers/api/resume")).await)["changed"], true);
    assert_eq!(json(&once(gateway.admin, change("/v1/providers/api/resume")).await)["changed"], false);
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    let events = ask(&gateway, "/v1/events?follow=false").await;
    let kinds: Vec<&Value> = events["events"].as_array().unwrap().iter().map(|event| &event["kind"]).collect();
    assert_eq!(kinds, ["paused", "resumed"]);
}

#[tokio::test]
async fn a_pause_ends_waiting_calls() {
    let api = Api::start(|_, _| Answer::new(200, "hello")).await;
    let gateway = running(&api.policy("limit = \"1 per 1h\"\ntimeout = \"2h\"\n"));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    let mut waiting = Peer::connect(gateway.address).await;
    waiting.send(get("/api/y")).await;
    while ask(&gateway, "/v1/providers/api").await["lanes"][1]["waiting"] != 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    once(gateway.admin, change("/v1/providers/api/pause")).await;
    assert_eq!(status(&waiting.message().await), 503);
    assert_eq!(ask(&gateway, "/v1/providers/api").await["lanes"][1]["waiting"], 0);
}

#[tokio::test]
async fn a_reset_closes_breaker_and_ends_cooldowns() {
    let api = Api::start(|number, _| match number {
        0..5 => Answer::new(503, "unwell"),
        5 => Answer::new(429, "slower").with("retry-after", "600"),
        _ => Answer::new(200, "hello"),
    })
    .await;
    let gateway = standing(&api.policy(ONCE));
    for _ in 0..5 {
        assert_eq!(status(&gateway.ask(get("/api/x")).await), 503);
    }
    assert_eq!(ask(&gateway, "/v1/providers/api").await["breaker"]["state"], "open");
    assert_eq!(status(&once(gateway.admin, change("/v1/providers/api/reset")).await), 200);
    assert_eq!(ask(&gateway, "/v1/providers/api").await["breaker"]["state"], "closed");
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 429);
    assert_eq!(ask(&gateway, "/v1/providers/api").await["credential_states"]["cooling"], 1);
    assert_eq!(status(&once(gateway.admin, change("/v1/providers/api/reset")).await), 200);
    assert_eq!(ask(&gateway, "/v1/providers/api").await["credential_states"]["usable"], 1);
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    let answer = once(gateway.admin, change("/v1/providers/apy/reset")).await;
    assert_eq!(status(&answer), 404, "{answer}");
}
