//! Alerts about providers.

use std::time::Duration;

use serde_json::Value;

use crate::common::{Answer, Api, BEARER, get, running};

/// A policy with this provider, and an alert that a webhook receives.
fn policy(api: &Api, settings: &str, webhook: &Api, on: &str) -> String {
    let provider = api.policy(&format!("limit = \"1000/s burst 1000\"\n{settings}\n"));
    format!("{provider}[alert.ops]\n{on}\ngroup = \"100ms\"\nwebhook = \"http://{}/\"\n", webhook.address)
}

/// Waits for messages until there are this many, and returns them.
async fn messages(webhook: &Api, count: usize) -> Vec<Value> {
    let waiting = async {
        while webhook.count() < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(20), waiting).await;
    let arrived: Vec<Value> =
        webhook.arrived().iter().map(|request| serde_json::from_slice(&request.body).unwrap()).collect();
    assert!(waited.is_ok(), "{count} messages, but there are {arrived:?}");
    arrived
}

/// The message of the first event in a list.
fn first<'m>(message: &'m Value, list: &str) -> &'m str {
    message[list]["events"][0]["message"].as_str().unwrap_or_else(|| panic!("nothing {list}: {message}"))
}

#[tokio::test]
async fn an_open_breaker_is_reported_until_it_closes() {
    let webhook = Api::start(|_, _| Answer::new(200, "")).await;
    let api = Api::start(|number, _| Answer::new(if number < 2 { 500 } else { 200 }, "")).await;
    let settings = "retry = { max_attempts = 1 }\nbreaker = { failures = 2, open = \"1s\", successes = 1, ramp = [{ share = 0.5, for = \"2s\" }] }";
    let gateway = running(&policy(&api, settings, &webhook, "on = \"breaker_open\""));
    for _ in 0..2 {
        gateway.ask(get("/api/x")).await;
    }
    let open = messages(&webhook, 1).await;
    assert_eq!(first(&open[0], "new"), "api: the circuit breaker is open after 2 failures, for 1 s");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(webhook.count(), 1);
    gateway.ask(get("/api/x")).await;
    let closed = messages(&webhook, 2).await;
    assert_eq!(first(&closed[1], "resolved"), "api: the circuit breaker is closed");
}

#[tokio::test]
async fn a_new_alert_reports_states_that_began_before() {
    let breaker = "breaker = { failures = 1, open = \"1h\" }";
    for (status, settings, on, expected) in [
        (500, breaker, "breaker_open", "api: the circuit breaker is open"),
        (429, BEARER, "all_cooling", "api: no credential is usable, so calls wait"),
    ] {
        let webhook = Api::start(|_, _| Answer::new(200, "")).await;
        let api = Api::start(move |_, _| Answer::new(status, "").with("retry-after", "60")).await;
        let settings = format!("retry = {{ max_attempts = 1 }}\n{settings}");
        let with_alert = policy(&api, &settings, &webhook, &format!("on = \"{on}\""));
        let gateway = running(&with_alert[..with_alert.find("[alert").unwrap()]);
        gateway.ask(get("/api/x")).await;
        // The event is read before the alert is there.
        tokio::time::sleep(Duration::from_millis(600)).await;
        assert_eq!(gateway.reload(&with_alert).await, Ok(vec![]));
        assert_eq!(first(&messages(&webhook, 1).await[0], "new"), expected);
    }
}

#[tokio::test]
async fn cooling_and_rejected_credentials_are_reported() {
    let webhook = Api::start(|_, _| Answer::new(200, "")).await;
    let api = Api::start(|_, request| match (request.target.as_str(), request.header("authorization")) {
        ("/v1/busy", _) => Answer::new(429, "").with("retry-after", "2"),
        (_, Some(token)) if token.ends_with("-b") => Answer::new(401, ""),
        _ => Answer::new(200, ""),
    });
    let api = api.await;
    let settings = format!("retry = {{ max_attempts = 1 }}\n{BEARER}");
    let on = "on = [\"all_cooling\", \"credential_out\"]";
    let gateway = running(&policy(&api, &settings, &webhook, on));
    gateway.ask(get("/api/busy")).await;
    let cooling = messages(&webhook, 1).await;
    assert!(first(&cooling[0], "new").contains("no other is usable, so calls wait"), "{cooling:?}");
    let over = messages(&webhook, 2).await;
    assert_eq!(first(&over[1], "resolved"), "api: a credential is usable again");

    let two = BEARER.replace("\"env:A\"", "[\"env:A\", \"env:B\"]");
    let gateway = running(&policy(&api, &two, &webhook, on));
    for _ in 0..4 {
        gateway.ask(get("/api/x")).await;
    }
    let rejected = messages(&webhook, 3).await;
    assert!(first(&rejected[2], "new").contains("was rejected and is left out"), "{rejected:?}");
}

#[tokio::test]
async fn used_quotas_are_reported() {
    let webhook = Api::start(|_, _| Answer::new(200, "")).await;
    let api = Api::start(|_, _| Answer::new(200, "")).await;
    let settings = "credential_limit = \"4 per calendar month\"";
    let gateway = running(&policy(&api, settings, &webhook, "on = \"quota\"\nquota = 0.5"));
    for _ in 0..2 {
        gateway.ask(get("/api/x")).await;
    }
    let half = messages(&webhook, 1).await;
    assert!(first(&half[0], "new").starts_with("api: 50 % of "), "{half:?}");
    for _ in 0..2 {
        gateway.ask(get("/api/x")).await;
    }
    let all = messages(&webhook, 2).await;
    assert!(first(&all[1], "new").starts_with("api: 100 % of "), "{all:?}");
}

#[tokio::test]
async fn many_retries_are_reported() {
    let webhook = Api::start(|_, _| Answer::new(200, "")).await;
    let api = Api::start(|_, _| Answer::new(500, "")).await;
    let settings = "retry = { max_attempts = 3, base = \"1ms\", cap = \"1ms\" }\nbudget = \"off\"\nbreaker = \"off\"";
    let gateway = running(&policy(&api, settings, &webhook, "on = \"retries\"\nretries = 1.5"));
    // The first measurement comes before the calls.
    tokio::time::sleep(Duration::from_millis(300)).await;
    gateway.ask_at_once(25, &get("/api/x")).await;
    let many = messages(&webhook, 1).await;
    assert_eq!(first(&many[0], "new"), "api: 50 retries of 25 calls in the last minute");
}
