//! Limits that are unknown until the provider's replies state them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tidegate::Span;
use tidegate::outbound::CallStats;
use tokio::time::Instant;
use tower::Layer as _;

use crate::common::{Api, Arrived, answer, ask, get, layer_of, now};

/// The rest of a service's limits in the current minute, after a request has arrived.
#[derive(Clone, Copy)]
struct Said {
    admitted: bool,
    calls: u64,
    tokens: u64,
    ends: Instant,
}

/// A service that counts each request and 100 tokens for it, in minutes that begin with the first request. It answers
/// after 50 to 950 ms.
fn counting(calls: u64, tokens: u64) -> Api {
    let all: Arc<Mutex<Vec<Said>>> = Arc::default();
    let said = Arc::clone(&all);
    let takes = move |number: usize| {
        let (mut all, now) = (all.lock().unwrap(), now());
        let mut last = all.last().copied().filter(|last| now < last.ends).unwrap_or(Said {
            admitted: true,
            calls,
            tokens,
            ends: now + Duration::from_secs(60),
        });
        last.admitted = last.calls > 0 && last.tokens >= 100;
        if last.admitted {
            (last.calls, last.tokens) = (last.calls - 1, last.tokens - 100);
        }
        all.push(last);
        Duration::from_millis(50 + number as u64 * 7919 % 900)
    };
    let reply = move |number: usize, _: &Arrived| {
        let said = said.lock().unwrap()[number];
        let reset = said.ends.saturating_duration_since(now());
        let headers = [
            ("x-ratelimit-limit-requests", calls.to_string()),
            ("x-ratelimit-remaining-requests", said.calls.to_string()),
            ("x-ratelimit-reset-requests", format!("{}ms", reset.as_millis() + 1)),
            ("x-ratelimit-limit-tokens", tokens.to_string()),
            ("x-ratelimit-remaining-tokens", said.tokens.to_string()),
            ("x-ratelimit-reset-tokens", format!("{}ms", reset.as_millis() + 1)),
        ];
        let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        answer(if said.admitted { 200 } else { 429 }, &headers, "{}")
    };
    Api::new(reply).taking_each(takes)
}

#[tokio::test(start_paused = true)]
async fn calls_respect_the_remaining_allowance_in_replies() {
    for (calls, tokens, each) in [(7, 100_000, 7), (1_000, 1_250, 12)] {
        let text = "[outbound.provider.api]\npreset = \"openai\"\nbase_url = \"https://api.test\"\n\
                    credentials = \"env:KEY\"\ntimeout = \"1h\"\ncost = { reserve = 100 }\n";
        let api = counting(calls, tokens);
        let service = layer_of(text).layer(api.clone());
        let began = now();
        let asked = (0..each * 5).map(|_| async {
            let reply = ask(&service, get("/x")).await.unwrap();
            (reply.status().as_u16(), reply.extensions().get::<CallStats>().unwrap().attempts)
        });
        assert!(join_all(asked).await.into_iter().all(|told| told == (200, 1)));
        assert_eq!(api.count(), each * 5, "none was refused");
        let took = began.elapsed();
        assert!(took < Duration::from_secs(4 * 60 + 10), "{took:?}: all that there is is used");
    }
}

#[tokio::test(start_paused = true)]
async fn replies_without_allowances_delay_no_call() {
    let api = Api::new(|_, _| answer(200, &[], "{}")).taking(Duration::from_millis(100));
    let text =
        "[outbound.provider.api]\npreset = \"anthropic\"\nbase_url = \"https://api.test\"\ncredentials = \"env:KEY\"\n";
    let service = layer_of(text).layer(api.clone());
    let asked = (0..6).map(|_| ask(&service, get("/x")));
    let waited: Vec<Span> = join_all(asked)
        .await
        .into_iter()
        .map(|reply| reply.unwrap().extensions().get::<CallStats>().unwrap().waited)
        .collect();
    let first = waited.iter().filter(|waited| waited.is_zero()).count();
    assert_eq!(first, 1, "one goes to learn what there is: {waited:?}");
    assert!(waited.iter().all(|waited| *waited <= Span::from_millis(130)), "{waited:?}");
}
