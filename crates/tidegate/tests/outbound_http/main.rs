//! Calls over HTTP through the tower layer, against services that stand in for providers, on tokio's paused time.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that can't go on should stop")]

mod allowances;
mod common;
mod counting;
mod grpc;
mod hedge;
mod pauses;
mod upload;

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderValue, Request, StatusCode};
use http_body_util::Full;
use tidegate::clock::TokioClock;
use tidegate::outbound::{CallErrorKind, CallOptions, CallStats, OutboundError, OutboundLayer, SendError, TargetError};
use tidegate::policy::{Policy, PolicySources, Query};
use tidegate::store::Memory;
use tidegate::{Gate, Span};
use tidegate_core::Lane;
use tidegate_core::retry::UnreplayableReason;
use tower::Layer as _;

use crate::common::{
    Answer, Api, Arrived, BEARER, LOGIN, PAIR, PLANTED, answer, ask, get, layer, layer_of, limited, now, post, status,
    text,
};

#[tokio::test(start_paused = true)]
async fn requests_reach_the_base_with_the_credential() {
    let api = Api::new(|_, _| answer(200, &[("etag", "x"), ("x-echo", "pl4nted-s3cr3t-a")], "movie"));
    let service = layer(BEARER).layer(api.clone());
    let response = ask(&service, get("/movie/603?language=en")).await.unwrap();
    let happened = *response.extensions().get::<CallStats>().unwrap();
    assert_eq!((happened.attempts, happened.waited, happened.credential), (1, Span::ZERO, 0));
    assert!(response.headers().contains_key("etag") && !response.headers().contains_key("x-echo"));
    assert_eq!(text(response).await, "movie");
    let arrived = api.arrived().remove(0);
    assert_eq!(
        (arrived.uri.as_str(), arrived.bearer()),
        ("https://api.test/3/movie/603?language=en", "pl4nted-s3cr3t-a")
    );
}

#[tokio::test(start_paused = true)]
async fn requests_outside_the_base_are_not_counted() {
    let api = Api::new(|_, _| status(200));
    let layer = layer("retry = { max_attempts = 1 }");
    let service = layer.layer(api.clone());
    for path in ["/../4", "https://evil.test/3/x", "/%2e%2e/x"] {
        let error = ask(&service, get(path)).await.unwrap_err();
        assert!(
            matches!(error, OutboundError::Target(TargetError::PathTraversal | TargetError::NotBelowBase)),
            "{error}"
        );
        assert_eq!(error.status(), 400);
    }
    assert_eq!(api.count(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_post_is_retried_only_with_idempotency_key() {
    for (key, sends) in [(None, 1), (Some("k1"), 3)] {
        let api = Api::new(|_, _| answer(503, &[], "down"));
        let service = layer("").layer(api.clone());
        let response = ask(&service, post("{\"a\":1}", key)).await.unwrap();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE, "the last reply is passed on");
        let why = response.extensions().get::<CallErrorKind>().unwrap().clone();
        assert_eq!(response.extensions().get::<CallStats>().unwrap().attempts, sends);
        assert_eq!(text(response).await, "down");
        match key {
            None => assert!(matches!(why, CallErrorKind::NotIdempotent)),
            Some(_) => assert!(matches!(why, CallErrorKind::RetriesExhausted { attempts: 3, .. })),
        }
        let arrived = api.arrived();
        assert_eq!(arrived.len(), sends as usize);
        assert!(arrived.iter().all(|request| request.body == "{\"a\":1}"), "{arrived:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_connection_is_retried_for_any_method() {
    let api = Api::new(|number, _| match number {
        0 => Err(io::ErrorKind::ConnectionRefused.into()),
        1 => status(201),
        _ => Err(io::ErrorKind::ConnectionReset.into()),
    });
    let service = layer("").layer(api.clone());
    assert_eq!(ask(&service, post("once", None)).await.unwrap().status(), StatusCode::CREATED);
    assert_eq!(api.count(), 2);
    let error = ask(&service, post("twice", None)).await.unwrap_err();
    let OutboundError::Call(error) = error else { panic!("{error}") };
    assert!(
        matches!((&error.kind, &error.last_reply), (CallErrorKind::NotIdempotent, Some(SendError::Inner(_)))),
        "{error:?}"
    );
    assert_eq!(api.count(), 3);
}

#[tokio::test(start_paused = true)]
async fn oversized_bodies_are_sent_once_and_explained() {
    let api = Api::new(|_, _| status(503));
    let service = layer("replay = \"8B\"").layer(api.clone());
    let request = |body| Request::put("/x").body(Full::new(Bytes::from_static(body))).unwrap();
    let response = ask(&service, request(b"123456789")).await.unwrap();
    let why = response.extensions().get::<CallErrorKind>().unwrap();
    assert!(matches!(why, CallErrorKind::Unreplayable(UnreplayableReason::BodyTooLarge)), "{why:?}");
    assert_eq!(api.count(), 1);
    ask(&service, request(b"12345678")).await.unwrap();
    assert_eq!(api.count(), 4);
    assert!(api.arrived()[1..].iter().all(|request| request.body == "12345678"));
}

#[tokio::test(start_paused = true)]
async fn retry_after_dates_use_the_servers_clock() {
    let api = Api::new(|number, _| match number {
        0 => answer(
            429,
            &[("date", "Thu, 01 Jan 2026 01:00:00 GMT"), ("retry-after", "Thu, 01 Jan 2026 01:00:20 GMT")],
            "",
        ),
        _ => status(200),
    });
    let service = layer("timeout = \"60s\"").layer(api.clone());
    let response = ask(&service, get("/x")).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let arrived = api.arrived();
    let waited = arrived[1].at - arrived[0].at;
    assert!(waited >= Duration::from_secs(20) && waited < Duration::from_secs(22), "{waited:?}");
}

/// By this clock the instant is over, so that the call waits for 200 ms, and not for the back-off.
#[tokio::test(start_paused = true)]
async fn a_reservation_is_presented_once() {
    let api = Api::new(|number, _| match number {
        0 => answer(429, &[("retry-after", "1"), ("tidegate-reservation", "rabc;at=1")], ""),
        _ => status(200),
    });
    let service = layer("retry = { base = \"5s\", jitter = \"none\" }").layer(api.clone());
    for _ in 0..2 {
        assert_eq!(ask(&service, get("/x")).await.unwrap().status(), StatusCode::OK);
    }
    let arrived = api.arrived();
    let waited = arrived[1].at - arrived[0].at;
    assert!(waited >= Duration::from_millis(200) && waited < Duration::from_millis(250), "{waited:?}");
    let presented = arrived.iter().map(|request| request.headers.get("tidegate-reservation"));
    assert_eq!(presented.collect::<Vec<_>>(), [None, Some(&HeaderValue::from_static("rabc")), None]);
}

#[tokio::test(start_paused = true)]
async fn a_reservation_outlasts_an_attempt_that_was_not_sent() {
    let api = Api::new(|number, _| match number {
        0 => answer(429, &[("retry-after", "1"), ("tidegate-reservation", "rabc;at=1")], ""),
        1 => Err(io::ErrorKind::ConnectionRefused.into()),
        _ => status(200),
    });
    let service = layer("").layer(api.clone());
    assert_eq!(ask(&service, get("/x")).await.unwrap().status(), StatusCode::OK);
    let arrived = api.arrived();
    let presented = arrived.iter().map(|request| request.headers.get("tidegate-reservation"));
    let token = HeaderValue::from_static("rabc");
    assert_eq!(presented.collect::<Vec<_>>(), [None, Some(&token), Some(&token)]);
}

/// Two calls of one client hold the same token. The first uses it. Until the second comes, another client of the key was
/// refused and gave up, so that the key has a next reservation.
#[tokio::test(start_paused = true)]
async fn a_used_token_keeps_the_next_reservation() {
    let text = "[inbound.action.all]\nkey = \"action\"\nlimit = \"1/s burst 1\"\n\
                reserve = { share = 1, grace = \"900ms\", by = [\"key\"] }\n";
    let policy = Policy::load(PolicySources::new().file("test.toml", text)).unwrap_or_else(|errors| panic!("{errors}"));
    let gate = Gate::in_memory(&policy, TokioClock::default());
    let ask_gate = move |key: &str, reservation: Option<&str>| {
        let query = Query { action: Some("all"), key: Some(key), reservation, ..Query::default() };
        gate.report(&gate.check_now(&query).unwrap())
    };
    assert!(ask_gate("other", None).allowed);
    let api = Api::new(move |_, request| {
        let token = request.headers.get("tidegate-reservation").map(|token| token.to_str().unwrap());
        let decided = ask_gate("shared", token);
        let Some(given) = decided.reservation else { return status(if decided.allowed { 200 } else { 429 }) };
        let line = format!("{};at={};wait={}", given.token, given.at, given.wait);
        answer(429, &[("retry-after", &decided.retry_after.unwrap().to_string()), ("tidegate-reservation", &line)], "")
    })
    .taking(Duration::from_millis(10));
    let (service, another) = (limited("40/m burst 2", "").layer(api.clone()), layer("").layer(api.clone()));
    let giving_up = async {
        tokio::time::sleep(Duration::from_millis(1_600)).await;
        tokio::time::timeout(Duration::from_millis(500), ask(&another, get("/x"))).await.unwrap_err();
    };
    let (first, second, _) = tokio::join!(ask(&service, get("/x")), ask(&service, get("/x")), giving_up);
    assert_eq!([first, second].map(|reply| reply.unwrap().status().as_u16()), [200, 200]);
    assert_eq!(api.count(), 5, "each was refused once: {:?}", api.arrived());
}

/// The provider gives a reservation at each refusal, and keeps none.
#[tokio::test(start_paused = true)]
async fn a_useless_reservation_is_backed_off_from() {
    let api = Api::new(|number, _| match number {
        0..3 => answer(429, &[("retry-after", "1"), ("tidegate-reservation", "rabc;at=1")], ""),
        _ => status(200),
    });
    let settings = "timeout = \"60s\"\nretry = { max_attempts = 4, base = \"5s\", jitter = \"none\" }";
    let service = layer(settings).layer(api.clone());
    assert_eq!(ask(&service, get("/x")).await.unwrap().status(), StatusCode::OK);
    let arrived = api.arrived();
    let waits: Vec<_> = arrived.windows(2).map(|pair| (pair[1].at - pair[0].at).as_millis()).collect();
    assert!(waits[0] < 250 && waits[1..].iter().all(|wait| *wait >= 5_000), "{waits:?}");
}

#[tokio::test(start_paused = true)]
async fn a_secondary_limit_selects_another_credential() {
    let api = Api::new(|_, request| match request.bearer() {
        "pl4nted-s3cr3t-a" => answer(403, &[("retry-after", "60")], "secondary rate limit"),
        _ => status(200),
    });
    let service = layer(PAIR).layer(api.clone());
    for _ in 0..3 {
        assert_eq!(ask(&service, get("/x")).await.unwrap().status(), StatusCode::OK);
    }
    let tokens: Vec<_> = api.arrived().iter().map(|request| request.bearer().to_owned()).collect();
    assert_eq!(tokens, ["a", "b", "b", "b"].map(|token| format!("{PLANTED}-{token}")), "the first is left alone");
}

#[tokio::test(start_paused = true)]
async fn a_rejected_token_is_replaced_for_its_call() {
    for (rejected, tokens) in [(401, "abb"), (403, "ab")] {
        let api = Api::new(move |_, request| match request.bearer() {
            "pl4nted-s3cr3t-a" => status(rejected),
            _ => status(200),
        });
        let service = layer(PAIR).layer(api.clone());
        let replies = [ask(&service, post("once", None)).await.unwrap(), ask(&service, get("/x")).await.unwrap()];
        let first = if rejected == 401 { 200 } else { rejected };
        assert_eq!(replies.map(|reply| reply.status().as_u16()), [first, 200]);
        let sent: Vec<_> = api.arrived().iter().map(|request| request.bearer().to_owned()).collect();
        let expected: Vec<_> = tokens.chars().map(|token| format!("{PLANTED}-{token}")).collect();
        assert_eq!(sent, expected, "{rejected}");
    }
}

/// The calls wait for the next login, however few attempts they have.
#[tokio::test(start_paused = true)]
async fn calls_wait_for_a_throttled_login() {
    for (refusal, asked, quiet) in [(429, None, 5), (429, Some("8"), 8), (403, Some("6"), 6), (503, None, 5)] {
        let api = Api::new(move |number, request| {
            let headers: Vec<_> = asked.map(|wait| ("retry-after", wait)).into_iter().collect();
            match number {
                0 => answer(refusal, &headers, ""),
                _ if request.uri.ends_with("/login") => answer(200, &[], r#"{"token":"t"}"#),
                _ => status(200),
            }
        });
        let settings = "retry = { max_attempts = 2 }\ntimeout = \"20s\"\n";
        let service = layer(&format!("{LOGIN}{settings}")).layer(api.clone());
        for reply in join_all((0..2).map(|_| ask(&service, get("/x")))).await {
            assert_eq!(reply.unwrap().status(), StatusCode::OK, "{refusal} {asked:?}");
        }
        let arrived = api.arrived();
        let seconds: Vec<_> = arrived.iter().map(|request| (request.at - arrived[0].at).as_secs()).collect();
        assert_eq!((seconds[0], arrived.len()), (0, 4), "two logins, two calls");
        assert!(
            seconds[1..].iter().all(|second| (quiet..quiet + 2).contains(second)),
            "{refusal} {asked:?}: {seconds:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_spent_allowance_selects_another_credential() {
    let api = Api::new(|_, request| match request.bearer() {
        "pl4nted-s3cr3t-a" => answer(200, &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "60")], ""),
        _ => status(200),
    });
    let service = layer(PAIR).layer(api.clone());
    for _ in 0..3 {
        assert_eq!(ask(&service, get("/x")).await.unwrap().extensions().get::<CallStats>().unwrap().attempts, 1);
    }
    let tokens: Vec<_> = api.arrived().iter().map(|request| request.bearer().to_owned()).collect();
    assert_eq!(tokens, ["a", "b", "b"].map(|token| format!("{PLANTED}-{token}")));
}

#[tokio::test(start_paused = true)]
async fn a_limit_message_spends_the_daily_quota() {
    let reached = r#"{"Response":"False","Error":"Request limit reached!"}"#;
    let api = Api::new(move |number, _| match number {
        0 => answer(200, &[], r#"{"Response":"True","Title":"Heat"}"#),
        1 => answer(200, &[], reached),
        _ => status(200),
    });
    let settings = "auth = \"query:apikey\"\ncredentials = [\"env:A\"]\ncredential_limit = \"1000 per calendar day\"\n\
        throttled_when = { contains = { \"/Response\" = \"False\", \"/Error\" = \"limit reached\" }, spends_quota = true }";
    let service = layer(settings).layer(api.clone());
    let good = ask(&service, get("/?t=Heat&apikey=mine")).await.unwrap();
    assert_eq!(text(good).await, r#"{"Response":"True","Title":"Heat"}"#, "what was read ahead is there");
    assert_eq!(api.arrived()[0].uri, "https://api.test/3/?t=Heat&apikey=pl4nted-s3cr3t-a");
    assert_eq!(api.arrived()[0].headers["accept-encoding"], "identity");
    let spent = ask(&service, get("/?t=Heat")).await.unwrap();
    let why = spent.extensions().get::<CallErrorKind>().unwrap().clone();
    let day = Span::from_secs(86_400);
    assert!(matches!(why, CallErrorKind::QuotaSpent { .. }), "{why:?}");
    assert_eq!(text(spent).await, reached);
    let error = ask(&service, get("/?t=Ran")).await.unwrap_err();
    assert!(
        matches!(&error, OutboundError::Call(error) if matches!(error.kind, CallErrorKind::QuotaSpent { .. })),
        "{error}"
    );
    assert_eq!(api.count(), 2);
    tokio::time::advance(day.as_duration()).await;
    assert_eq!(ask(&service, get("/?t=Ran")).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn oversized_reply_bodies_are_forwarded_unjudged() {
    let long = format!(r#"{{"Error":"limit reached","pad":"{}"}}"#, "x".repeat(64 << 10));
    let sent = long.clone();
    let api = Api::new(move |_, _| answer(200, &[], &sent));
    let service = layer("throttled_when = { contains = { \"/Error\" = \"limit reached\" } }").layer(api.clone());
    assert_eq!(text(ask(&service, get("/x")).await.unwrap()).await, long);
    assert_eq!(api.count(), 1);
}

fn with_login(script: impl Fn(usize, &Arrived) -> Answer + Send + Sync + 'static) -> Api {
    let logins = Mutex::new(0);
    Api::new(move |number, request| {
        if !request.uri.ends_with("/login") {
            return script(number, request);
        }
        assert_eq!((request.method.as_str(), &*request.body), ("POST", &br#"{"apikey":"pl4nted-s3cr3t-a"}"#[..]));
        let mut logins = logins.lock().unwrap();
        *logins += 1;
        answer(200, &[], &format!(r#"{{"token":"t{logins}"}}"#))
    })
    .taking(Duration::from_millis(50))
}

fn logins(api: &Api) -> usize {
    api.arrived().iter().filter(|request| request.uri.ends_with("/login")).count()
}

#[tokio::test(start_paused = true)]
async fn concurrent_calls_with_expiring_token_login_once() {
    let api = with_login(|_, _| status(200));
    let service = layer(LOGIN).layer(api.clone());
    for (hours, count) in [(0, 1), (23, 2), (72, 3)] {
        tokio::time::advance(Duration::from_secs(hours * 3_600)).await;
        for response in join_all((0..20).map(|_| ask(&service, get("/x")))).await {
            assert_eq!(response.unwrap().status(), StatusCode::OK);
        }
        assert_eq!(logins(&api), count, "after {hours} h");
    }
    assert_eq!(api.arrived().last().unwrap().bearer(), "t3");
}

#[tokio::test(start_paused = true)]
async fn a_401_causes_one_login_and_retry() {
    let api = with_login(|_, request| status(if request.bearer() == "t1" { 401 } else { 200 }));
    let service = layer(LOGIN).layer(api.clone());
    let responses = join_all((0..20).map(|_| ask(&service, post("x", None)))).await;
    for response in responses {
        let response = response.unwrap();
        assert_eq!(
            (response.status(), response.extensions().get::<CallStats>().unwrap().attempts),
            (StatusCode::OK, 2)
        );
    }
    assert_eq!(logins(&api), 2);
    let stubborn = with_login(|_, _| answer(401, &[], "no"));
    let service = layer(LOGIN).layer(stubborn.clone());
    let response = ask(&service, get("/x")).await.unwrap();
    assert_eq!((response.status(), text(response).await.as_str()), (StatusCode::UNAUTHORIZED, "no"));
    assert_eq!((logins(&stubborn), stubborn.count()), (2, 4));
}

#[tokio::test(start_paused = true)]
async fn rejected_tokens_do_not_cause_repeated_logins() {
    for code in [401, 403] {
        let api = with_login(move |_, _| answer(code, &[], "no"));
        let service = layer(LOGIN).layer(api.clone());
        for _ in 0..20 {
            let response = ask(&service, get("/x")).await.unwrap();
            assert_eq!((response.status().as_u16(), text(response).await.as_str()), (code, "no"));
        }
        assert_eq!(logins(&api), 2, "the first, and one that might have helped");
        tokio::time::advance(Duration::from_secs(5)).await;
        ask(&service, get("/x")).await.unwrap();
        assert_eq!(logins(&api), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn a_credential_with_rejected_tokens_is_excluded() {
    let count = Mutex::new(0);
    let api = Api::new(move |_, request| {
        if request.uri.ends_with("/login") {
            let mut count = count.lock().unwrap();
            *count += 1;
            let bad = request.body.windows(2).any(|part| part == b"-a");
            return answer(200, &[], &format!(r#"{{"token":"{}-{count}"}}"#, if bad { "bad" } else { "good" }));
        }
        status(if request.bearer().starts_with("bad") { 401 } else { 200 })
    });
    let service = layer(&LOGIN.replace("[\"env:A\"]", "[\"env:A\", \"env:B\"]")).layer(api.clone());
    let mut statuses = Vec::new();
    for _ in 0..20 {
        statuses.push(ask(&service, get("/x")).await.unwrap().status().as_u16());
    }
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    assert_eq!(logins(&api), 3);
}

/// The provider counts requests when they come, and not when they got their turn.
#[tokio::test(start_paused = true)]
async fn calls_that_a_login_holds_up_take_their_turn_after_it() {
    for credentials in ["\"env:A\"", "\"env:A\", \"env:B\""] {
        let api = Api::new(|_, arrived| {
            answer(200, &[], if arrived.uri.ends_with("/login") { r#"{"token":"t"}"# } else { "" })
        });
        let api = api.taking(Duration::from_secs(1));
        let settings = LOGIN.replace("\"env:A\"", credentials) + "timeout = \"20s\"\n";
        let layer = limited("5 per 1s", &settings);
        let service = layer.layer(api.clone());
        let done = join_all((0..12).map(|_| ask(&service, get("/x")))).await;
        assert!(done.iter().all(|done| done.as_ref().is_ok_and(|response| response.status() == 200)));
        let arrived = api.arrived();
        let times: Vec<_> = arrived.iter().filter(|it| it.uri.ends_with("/x")).map(|it| it.at).collect();
        assert_eq!(times.len(), 12);
        assert_eq!(arrived.len(), 12 + credentials.split(',').count(), "one login for each credential");
        let crowded = times.windows(6).filter(|six| six[5] - six[0] < Duration::from_secs(1)).count();
        assert_eq!(crowded, 0, "{times:?}");
        let report = layer.provider().local_report();
        assert_eq!((report.first_tries, report.attempts["cancelled"]), (12, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_login_token_may_be_in_the_path() {
    let api = with_login(|_, request| match request.uri.as_str() {
        "https://path.test/v1/t1/x" => status(401),
        _ => answer(302, &[("location", "/v1/t2/y")], ""),
    });
    let settings = LOGIN.replace("\"bearer\"", "\"path\"");
    let text =
        format!("[outbound.provider.api]\nbase_url = \"https://path.test/v1/{{key}}\"\nlimit = \"1000/s\"\n{settings}");
    let service = layer_of(&text).layer(api.clone());
    let response = ask(&service, get("/x")).await.unwrap();
    assert_eq!(response.headers()["location"], "/v1/%7Bkey%7D/y");
    let uris: Vec<_> = api.arrived().iter().map(|request| request.uri.clone()).collect();
    let sent = ["/v1/login", "/v1/t1/x", "/v1/login", "/v1/t2/x"].map(|path| format!("https://path.test{path}"));
    assert_eq!(uris, sent);
}

#[tokio::test(start_paused = true)]
async fn a_failed_login_reveals_no_secret() {
    let api = Api::new(|_, _| answer(403, &[], PLANTED));
    let service = layer(LOGIN).layer(api.clone());
    let error = ask(&service, get("/x")).await.unwrap_err();
    assert!(matches!(error, OutboundError::Send(SendError::Login(_))), "{error:?}");
    assert_eq!(error.status(), 502);
    assert!(!format!("{error} {error:?}").contains(PLANTED));
    assert_eq!(api.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn redirects_are_forwarded_without_the_credential() {
    let api = Api::new(|number, _| match number {
        0 => answer(302, &[("location", "https://api.test/3/next?k=pl4nted-s3cr3t-a&page=2")], ""),
        _ => answer(302, &[("location", "https://elsewhere.test/?k=pl4nted-s3cr3t-a&page=2")], ""),
    });
    let settings = "auth = \"query:k\"\ncredentials = [\"env:A\"]";
    let service = layer(settings).mount_path("/api/").layer(api.clone());
    for told in ["/api/next?page=2", "https://elsewhere.test/?page=2"] {
        let response = ask(&service, get("/x")).await.unwrap();
        assert_eq!((response.status().as_u16(), response.headers()["location"].to_str().unwrap()), (302, told));
    }
    assert_eq!(api.count(), 2, "nothing is followed");
}

#[tokio::test(start_paused = true)]
async fn a_call_is_in_flight_until_body_read() {
    // The last reply of a failed call is passed on, too.
    for code in [200, 404, 503, 429] {
        let layer = layer("retry = { max_attempts = 2, base = \"1ms\", cap = \"1ms\" }");
        let service = layer.layer(Api::new(move |_, _| status(code)));
        let in_flight = || layer.provider().inspect(|state, _| state.lanes.in_flight(Lane::User));
        let read = ask(&service, get("/x")).await.unwrap();
        let dropped = ask(&service, get("/x")).await.unwrap();
        assert_eq!(in_flight(), 2, "{code}");
        assert_eq!(text(read).await, "body");
        assert_eq!(in_flight(), 1, "{code}");
        drop(dropped);
        assert_eq!(in_flight(), 0, "{code}");
    }
}

#[tokio::test(start_paused = true)]
async fn slow_providers_time_out_and_idempotent_requests_retry() {
    let api = Api::new(|_, _| status(200)).taking(Duration::from_secs(3_600));
    let service = layer("attempt_timeout = \"2s\"").layer(api.clone());
    let error = ask(&service, post("x", None)).await.unwrap_err();
    let OutboundError::Call(error) = error else { panic!("{error}") };
    assert!(
        matches!((&error.kind, &error.last_reply), (CallErrorKind::NotIdempotent, Some(SendError::TimedOut))),
        "{error:?}"
    );
    assert_eq!(api.count(), 1);
    let began = now();
    ask(&service, get("/x")).await.unwrap_err();
    assert_eq!(api.count(), 4);
    assert!(now() - began <= Duration::from_secs(10), "by the call's deadline");
}

#[tokio::test(start_paused = true)]
async fn extensions_set_costs_and_replies_correct_them() {
    let api = Api::new(|_, _| answer(200, &[], r#"{"usage":{"in":30,"out":20}}"#));
    let settings = "cost_limit = \"100 per 60s\"\n\
        cost = { reserve = 60, bytes_per_unit = 4, reply = [\"/usage/in\", \"/usage/out\"] }";
    let layer = layer(settings);
    let service = layer.layer(api.clone());
    // The call reserves 60, and 40 for its 160 bytes, and spends 50.
    let body: &'static str = Box::leak("x".repeat(160).into_boxed_str());
    text(ask(&service, post(body, None)).await.unwrap()).await;
    let costing = |cost, timeout| {
        let mut request = get("/x");
        let timeout = Some(Duration::from_secs(timeout));
        request.extensions_mut().insert(CallOptions { cost, timeout, lane: Lane::Webhook, ..CallOptions::default() });
        request
    };
    let error = ask(&service, costing(51, 1)).await.unwrap_err();
    assert!(
        matches!(&error, OutboundError::Call(error) if matches!(error.kind, CallErrorKind::RateLimited { .. })),
        "{error}"
    );
    let error = ask(&service, costing(1, 1)).await.unwrap_err();
    assert!(
        matches!(&error, OutboundError::Call(error) if matches!(error.kind, CallErrorKind::RateLimited { .. })),
        "60 are reserved"
    );
    let response = ask(&service, costing(50, 1)).await.unwrap();
    assert_eq!(layer.provider().inspect(|state, _| state.lanes.in_flight(Lane::Webhook)), 1);
    drop(response);
}

/// Collects the log output of the library.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn logs_and_errors_contain_no_token() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber =
        tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(move || writer.clone());
    let _guard = tracing::subscriber::set_default(subscriber.finish());
    let mut told = String::new();
    for (settings, script) in [
        (BEARER, "error"),
        (PAIR, "401"),
        (LOGIN, "error"),
        (LOGIN, "401"),
        ("auth = \"query:k\"\ncredentials = [\"env:A\"]", "redirect"),
        ("auth = \"query:k\"\ncredentials = [\"env:A\"]", "error"),
        ("auth = \"header:x-api-key Token\"\ncredentials = [\"env:A\"]", "error"),
    ] {
        let api = Api::new(move |_, request| match script {
            _ if request.uri.ends_with("/login") => answer(200, &[], "{\"token\":\"pl4nted-s3cr3t-token\"}"),
            "error" => {
                let values: Vec<_> = request.headers.values().map(|value| value.to_str().unwrap()).collect();
                Err(io::Error::other(format!("{request:?} {values:?}")))
            }
            "401" => {
                answer(401, &[("www-authenticate", &format!("Bearer error=\"{} is wrong\"", request.bearer()))], "")
            }
            _ => answer(302, &[("location", &request.uri), ("link", &format!("<{}>", request.uri))], ""),
        });
        let layer = layer(settings);
        let service = layer.layer(api.clone());
        for request in [get("/x"), post("x", Some("k"))] {
            let ended = ask(&service, request).await;
            assert!(api.count() > 0);
            told += &format!("{ended:?} {layer:?} {service:?} {:?}", layer.provider().config());
            if let Err(error) = ended {
                let mut cause: Option<&dyn std::error::Error> = Some(&error);
                while let Some(found) = cause {
                    told += &format!(" {found} {found:?}");
                    cause = found.source();
                }
            }
        }
    }
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(told.contains("Redacted"), "the errors that repeat it were seen: {told}");
    assert!(!told.contains(PLANTED), "{told}");
    assert!(!log.contains(PLANTED), "{log}");
}
