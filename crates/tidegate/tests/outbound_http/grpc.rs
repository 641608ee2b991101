//! gRPC replies with the final status in their head.

use std::time::Duration;

use http::StatusCode;
use tidegate::outbound::{CallErrorKind, CallStats};
use tower::Layer as _;

use crate::common::{Answer, Api, PAIR, answer, ask, layer, now, post, status};

/// A reply with only this status and more headers.
fn ended(grpc: &str, headers: &[(&str, &str)]) -> Answer {
    let mut all = vec![("content-type", "application/grpc"), ("grpc-status", grpc)];
    all.extend(headers);
    answer(200, &all, "")
}

#[tokio::test(start_paused = true)]
async fn unavailable_replies_are_retried_if_idempotent() {
    for (key, sends, last) in [(None, 1, "14"), (Some("k1"), 2, "0")] {
        let api = Api::new(|number, _| if number == 0 { ended("14", &[]) } else { ended("0", &[]) });
        let layer = layer("breaker = { failures = 2 }");
        let response = ask(&layer.layer(api.clone()), post("x", key)).await.unwrap();
        assert_eq!((response.status(), api.count()), (StatusCode::OK, sends), "passed on as it is");
        assert_eq!(response.headers()["grpc-status"], last);
        assert_eq!(matches!(response.extensions().get(), Some(CallErrorKind::NotIdempotent)), key.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn only_provider_failures_open_the_breaker() {
    for (grpc, opens) in [("14", true), ("4", true), ("13", true), ("5", false), ("3", false), ("8", false)] {
        let api = Api::new(move |_, _| ended(grpc, &[]));
        let layer = layer("breaker = { failures = 1 }\nretry = { max_attempts = 1 }");
        ask(&layer.layer(api.clone()), post("x", None)).await.unwrap();
        assert_eq!(layer.provider().inspect(|state, now| state.breaker.peek(now).is_err()), opens, "{grpc}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_exhausted_resource_selects_another_credential() {
    let api = Api::new(|_, request| match request.bearer() {
        "pl4nted-s3cr3t-a" => ended("8", &[("grpc-retry-pushback-ms", "60000")]),
        _ => status(200),
    });
    let service = layer(PAIR).layer(api.clone());
    for _ in 0..3 {
        let response = ask(&service, post("x", None)).await.unwrap();
        assert_eq!(response.extensions().get::<CallStats>().unwrap().credential, 1);
    }
    assert_eq!(api.count(), 4, "the first is left alone");
}

#[tokio::test(start_paused = true)]
async fn pushback_sets_the_wait_or_stops_retries() {
    for (pushback, sends) in [("3000", 2), ("-1", 1), ("later", 1)] {
        let api = Api::new(move |number, _| match number {
            0 => ended("14", &[("grpc-retry-pushback-ms", pushback)]),
            _ => ended("0", &[]),
        });
        let began = now();
        let response = ask(&layer("").layer(api.clone()), post("x", Some("k1"))).await.unwrap();
        assert_eq!(api.count(), sends, "{pushback}");
        if sends == 1 {
            let why = response.extensions().get::<CallErrorKind>().unwrap();
            assert!(matches!(why, CallErrorKind::Final), "{why:?}");
            assert_eq!(why.to_string(), "the reply says that another attempt would fare no better");
        } else {
            assert!(now() - began >= Duration::from_secs(3));
        }
    }
}
