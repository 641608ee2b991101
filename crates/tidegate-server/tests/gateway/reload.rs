//! Reloads: providers come, change and go while calls are made.

use std::time::Duration;

use tidegate::Span;

use crate::common::{Answer, Api, BEARER, get, running, standing};
use crate::operators::{ask, change};
use crate::wire::{once, status};

const FIVE: &str = "limit = \"5 per 1h\"\nretry = { max_attempts = 1 }\n";

#[tokio::test]
async fn counted_calls_stay_counted() {
    let api = Api::start(|_, _| Answer::new(200, "")).await;
    let gateway = standing(&api.policy(FIVE));
    for _ in 0..4 {
        assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    }
    assert_eq!(gateway.reload(&api.policy(FIVE)).await, Ok(vec![]));
    assert_eq!(gateway.reload(&api.policy(&FIVE.replace('5', "6"))).await, Ok(vec![]));
    for expected in [200, 200, 429] {
        assert_eq!(status(&gateway.ask(get("/api/x")).await), expected);
    }
}

#[tokio::test]
async fn an_unchanged_provider_keeps_its_breaker() {
    let api = Api::start(|_, _| Answer::new(500, "")).await;
    let breaker =
        format!("{}breaker = {{ failures = 2, open = \"60s\" }}\n", FIVE.replace("5 per 1h", "100/s burst 9"));
    let gateway = standing(&api.policy(&breaker));
    for expected in [500, 500, 503] {
        assert_eq!(status(&gateway.ask(get("/api/x")).await), expected);
    }
    let other = format!("{}[outbound.provider.other]\nbase_url = \"http://{}\"\n", api.policy(&breaker), api.address);
    assert_eq!(gateway.reload(&other).await, Ok(vec![]));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 503);
    assert_eq!(status(&gateway.ask(get("/other/x")).await), 500);
    assert_eq!(gateway.reload(&api.policy(&breaker)).await, Ok(vec![]));
    assert_eq!(status(&gateway.ask(get("/other/x")).await), 404);
    let report = ask(&gateway, "/v1/providers/api").await;
    assert_eq!(report["breaker"]["state"], "open", "{report}");
}

#[tokio::test]
async fn a_cool_down_outlives_a_changed_provider() {
    let api = Api::start(|_, _| Answer::new(429, "").with("retry-after", "30")).await;
    let limits = "limit = \"100/s burst 9\"\nretry = { max_attempts = 1 }\ntimeout = \"1s\"\n";
    let gateway = standing(&api.policy(limits));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 429);
    assert_eq!(gateway.reload(&api.policy(&limits.replace("100/s", "200/s"))).await, Ok(vec![]));
    let refused = gateway.ask(get("/api/x")).await;
    assert_eq!((status(&refused), api.count()), (429, 1), "{refused}");
    gateway.clock.advance(Span::from_secs(31));
    gateway.ask(get("/api/x")).await;
    assert_eq!(api.count(), 2);
}

#[tokio::test]
async fn calls_in_flight_end_by_the_old_rules() {
    let (first, second) = (
        Api::start(|_, _| Answer::new(200, "old").taking(300)).await,
        Api::start(|_, _| Answer::new(200, "new")).await,
    );
    let gateway = running(&first.policy(FIVE));
    let (slow, changed) = tokio::join!(gateway.ask(get("/api/x")), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let reloaded = gateway.reload(&second.policy(FIVE)).await;
        (reloaded, gateway.ask(get("/api/x")).await)
    });
    assert!(slow.ends_with("old"), "{slow}");
    assert_eq!(changed.0, Ok(vec![]));
    assert!(changed.1.ends_with("new"), "{}", changed.1);
}

#[tokio::test]
async fn a_paused_provider_stays_paused() {
    let api = Api::start(|_, _| Answer::new(200, "")).await;
    let gateway = standing(&api.policy(FIVE));
    let paused = once(gateway.admin, change("/v1/providers/api/pause")).await;
    assert_eq!(status(&paused), 200, "{paused}");
    assert_eq!(gateway.reload(&api.policy(&FIVE.replace('5', "6"))).await, Ok(vec![]));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 503);
}

#[tokio::test]
async fn a_section_that_comes_or_goes_is_named() {
    let api = Api::start(|_, _| Answer::new(200, "")).await;
    let gateway = standing(&api.policy(FIVE));
    let moved = format!("[outbound]\nconnections = 9\ncache_bytes = \"1MiB\"\n{}", api.policy(FIVE));
    assert_eq!(
        gateway.reload(&moved).await,
        Ok(vec!["outbound.connections", "outbound.connections_per_client", "outbound.cache_bytes"])
    );
    let broken = gateway.reload(&api.policy(&FIVE.replace("limit", "limmit"))).await.unwrap_err();
    assert!(broken.contains("did you mean `limit`"), "{broken}");
    assert_eq!(gateway.reload(&api.policy(&format!("{FIVE}{BEARER}"))).await, Ok(vec![]));
    gateway.ask(get("/api/x")).await;
    assert_eq!(api.arrived()[0].header("authorization"), Some("Bearer pl4nted-s3cr3t-a"));
}

#[tokio::test]
async fn credentials_of_unserved_providers_are_not_read() {
    let api = Api::start(|_, _| Answer::new(200, "")).await;
    let gateway = standing(&api.policy(FIVE));
    let policy = |base: &str| {
        let other = "limit = \"9 per 1h\"\nauth = \"bearer\"\ncredentials = \"file:/nowhere/token\"\n";
        format!("[outbound.provider.other]\n{base}{other}{}", api.policy(FIVE))
    };
    assert_eq!(gateway.reload(&policy("")).await, Ok(vec![]));
    let error = gateway.reload(&policy("base_url = \"http://other\"\n")).await.unwrap_err();
    assert!(error.contains("/nowhere/token"), "{error}");
}

#[tokio::test]
async fn providers_stay_if_their_section_goes() {
    let api = Api::start(|_, _| Answer::new(200, "")).await;
    let other = format!("[outbound.provider.other]\nbase_url = \"http://{}\"\nlimit = \"9 per 1h\"\n", api.address);
    let gateway = standing(&format!("{other}{}", api.policy(FIVE)));
    for _ in 0..4 {
        assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    }
    let empty = "[inbound.action.a]\nlimit = \"1 per 1h\"\n[outbound]\nlisten = \"127.0.0.1:0\"\n";
    assert_eq!(
        gateway.reload(&empty.replace("[outbound]\nlisten = \"127.0.0.1:0\"\n", "# listen")).await,
        Ok(vec!["outbound"])
    );
    assert_eq!(gateway.reload(&api.policy(FIVE)).await, Ok(vec![]));
    for expected in [200, 429] {
        assert_eq!(status(&gateway.ask(get("/api/x")).await), expected);
    }
}

#[tokio::test]
async fn a_pause_stops_calls_of_earlier_policies() {
    let api = Api::start(|number, _| Answer::new(if number == 0 { 200 } else { 500 }, "").taking(50)).await;
    let one = "limit = \"1 in flight\"\n";
    let slow = Api::start(|_, _| Answer::new(200, "").taking(500)).await;
    let gateway = running(&slow.policy(one));
    let (first, (second, ())) = tokio::join!(gateway.ask(get("/api/a")), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        tokio::join!(gateway.ask(get("/api/b")), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert_eq!(gateway.reload(&api.policy(one)).await, Ok(vec![]));
            assert_eq!(status(&once(gateway.admin, change("/v1/providers/api/pause")).await), 200);
        })
    });
    assert_eq!((status(&first), status(&second), slow.count()), (200, 503, 1), "{second}");
}
