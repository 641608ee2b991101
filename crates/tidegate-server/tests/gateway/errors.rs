//! Every kind of failure, in the form that programs read.

use std::time::Duration;

use tidegate::Span;
use tokio::net::TcpListener;

use crate::common::{Answer, Api, FREE, ONCE, closing, get, provider, request, running, standing};
use crate::wire::{Peer, body, header, json, nobody, status, undated};

/// An error response on the wire.
fn error(status: &str, retry_after: Option<u64>, attempts: u32, body: &str) -> String {
    let retry_after = retry_after.map(|seconds| format!("retry-after: {seconds}\r\n")).unwrap_or_default();
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{retry_after}tidegate-attempts: {attempts}\r\n\
         tidegate-waited: 0.000s\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// The message for a connection that ends without a reply.
const BROKEN_OFF: &str =
    "the request got no reply: the connection to the provider broke off: connection closed before message completed";

#[tokio::test]
async fn an_open_breaker_gives_503_with_state() {
    let api = Api::start(|_, _| Answer::new(503, "unwell")).await;
    let gateway = standing(&api.policy(ONCE));
    for _ in 0..5 {
        let answer = gateway.ask(get("/api/x")).await;
        assert_eq!((status(&answer), body(&answer)), (503, "unwell"));
    }
    gateway.clock.advance(Span::from_secs(60));
    let body = "{\"error\":\"ProviderUnavailableError\",\"message\":\"Circuit breaker is open for api\",\
        \"provider\":\"api\",\"state\":\"open\",\"failureCount\":5,\"resetIn\":240000}";
    let expected = error("503 Service Unavailable", Some(240), 0, body);
    assert_eq!(undated(&gateway.ask(get("/api/x")).await), expected);
    let call = get("/api/x").replace("\r\n\r\n", "\r\ncontent-type: application/grpc\r\n\r\n");
    let answer = gateway.ask(call).await;
    let told = [header(&answer, "grpc-status"), header(&answer, "grpc-retry-pushback-ms")];
    assert_eq!((status(&answer), told), (200, [Some("14"), Some("240000")]), "{answer}");
    assert_eq!(api.count(), 5);
}

/// A probe under way ends when it is answered, which is usually long before its lease ends.
#[tokio::test]
async fn a_half_open_breaker_tells_an_estimate() {
    let api = Api::start(|number, _| match number {
        0..5 => Answer::new(503, "unwell"),
        _ => Answer::new(200, "hello").taking(3_000),
    })
    .await;
    let gateway = standing(&api.policy(ONCE));
    for _ in 0..5 {
        assert_eq!(status(&gateway.ask(get("/api/x")).await), 503);
    }
    gateway.clock.advance(Span::from_secs(300));
    let mut probe = Peer::connect(gateway.address).await;
    probe.send(get("/api/x")).await;
    while api.count() < 6 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let answer = gateway.ask(get("/api/x")).await;
    assert_eq!((status(&answer), header(&answer, "retry-after")), (503, Some("1")), "not the lease's 30 s");
    assert_eq!(json(&answer)["state"], "half-open");
}

#[tokio::test]
async fn a_wait_beyond_the_deadline_gives_429() {
    let api = Api::start(|_, _| Answer::new(200, "hello")).await;
    let gateway = standing(&api.policy("limit = \"1 per 60s\"\n"));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    gateway.clock.advance(Span::from_millis(17_500));
    let body = "{\"error\":\"RateLimitedError\",\
        \"message\":\"api: the limit `api` has no room before the deadline\",\"provider\":\"api\",\"limit\":\"api\",\
        \"retry_after\":43,\"earliest\":\"2026-01-01 00:01:00Z\",\"attempts\":0}";
    let answer = undated(&gateway.ask(get("/api/x")).await);
    assert_eq!(answer, error("429 Too Many Requests", Some(43), 0, body));
    assert_eq!(api.count(), 1);
}

#[tokio::test]
async fn errors_have_the_form_of_the_providers_sdk() {
    let api = Api::start(|_, _| Answer::new(200, "hello")).await;
    let message = "api: the limit `api` has no room before the deadline";
    for (format, body) in [
        (
            "openai",
            format!(
                "{{\"error\":{{\"code\":\"rate_limit_exceeded\",\"message\":\"{message}\",\"param\":null,\
                 \"type\":\"rate_limit_error\"}}}}"
            ),
        ),
        (
            "anthropic",
            format!("{{\"error\":{{\"message\":\"{message}\",\"type\":\"rate_limit_error\"}},\"type\":\"error\"}}"),
        ),
    ] {
        let settings = format!("limit = \"1 per 60s\"\nerror_format = \"{format}\"\n");
        let gateway = standing(&api.policy(&settings));
        assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
        let expected = error("429 Too Many Requests", Some(60), 0, &body)
            .replace("tidegate-waited: 0.000s\r\n", "tidegate-waited: 0.000s\r\ntidegate-error: RateLimitedError\r\n");
        assert_eq!(undated(&gateway.ask(get("/api/x")).await), expected, "{format}");
    }
}

#[tokio::test]
async fn failures_have_types_that_sdks_know() {
    let broken = provider(nobody(), "limit = \"2 per 1h\"\nretry = { max_attempts = 1 }\nbreaker = { failures = 2 }\n");
    for (format, types) in [
        ("openai", ["invalid_request_error", "server_error", "server_error", "service_unavailable_error"]),
        ("anthropic", ["invalid_request_error", "api_error", "api_error", "overloaded_error"]),
    ] {
        let gateway = standing(&format!("{broken}error_format = \"{format}\"\n"));
        for (path, status_code, expected) in [
            ("/api/../x", 400, types[0]),
            ("/api/x", 502, types[1]),
            ("/api/x", 502, types[2]),
            ("/api/x", 503, types[3]),
        ] {
            let answer = gateway.ask(get(path)).await;
            assert_eq!((status(&answer), json(&answer)["error"]["type"].as_str()), (status_code, Some(expected)));
        }
        let invalid = gateway.ask(request("GET", "/api/x", "tidegate-timeout: soon\r\n", "")).await;
        assert_eq!(json(&invalid)["error"]["type"], "invalid_request_error");
    }
}

#[tokio::test]
async fn sdks_are_told_not_to_wait_long() {
    let api = Api::start(|_, _| Answer::new(200, "hello")).await;
    for (limit, format, told) in [
        ("1 per calendar day", "openai", Some("false")),
        ("1 per calendar day", "anthropic", Some("false")),
        ("1 per calendar day", "tidegate", None),
        ("1 per 60s", "anthropic", None),
    ] {
        let gateway = standing(&api.policy(&format!("limit = \"{limit}\"\nerror_format = \"{format}\"\n")));
        assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
        let answer = gateway.ask(get("/api/x")).await;
        assert_eq!((status(&answer), header(&answer, "x-should-retry")), (429, told), "{limit} {format}");
    }
}

#[tokio::test]
async fn cooling_credentials_give_429_with_earliest_time() {
    let api = Api::start(|number, _| Answer::new(429, "slow down").with("retry-after", ["5", "3"][number % 2])).await;
    let pair = "auth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]\ntimeout = \"1s\"\n";
    let gateway = standing(&api.policy(&format!("{ONCE}{pair}")));
    let answer = gateway.ask(get("/api/x")).await;
    assert_eq!((status(&answer), body(&answer)), (429, "slow down"), "the last of two credentials' replies");
    assert_eq!(api.count(), 2);
    let body = "{\"error\":\"CredentialsCoolingError\",\"message\":\"api: the provider has asked for \
        pauses: no credential is usable for this call before its deadline\",\
        \"provider\":\"api\",\"retry_after\":3,\"earliest\":\"2026-01-01 00:00:03Z\",\"attempts\":0}";
    let answer = undated(&gateway.ask(get("/api/x")).await);
    assert_eq!(answer, error("429 Too Many Requests", Some(3), 0, body));
    assert_eq!(api.count(), 2, "nothing is sent");
}

#[tokio::test]
async fn credentials_that_are_full_give_429_with_the_limit() {
    let api = Api::start(|_, _| Answer::new(200, "")).await;
    let pair = "auth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]\ncredential_limit = \"1 per 60s\"\n";
    let gateway = standing(&api.policy(&format!("{ONCE}{pair}timeout = \"1s\"\n")));
    for _ in 0..2 {
        assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    }
    let body = "{\"error\":\"RateLimitedError\",\
        \"message\":\"api: the limit `api.credential` has no room before the deadline\",\"provider\":\"api\",\
        \"limit\":\"api.credential\",\"retry_after\":60,\"earliest\":\"2026-01-01 00:01:00Z\",\"attempts\":0}";
    let answer = undated(&gateway.ask(get("/api/x")).await);
    assert_eq!(answer, error("429 Too Many Requests", Some(60), 0, body));
}

/// The gate knows the end of the cool-down that a throttled reply starts, even if the reply names no time.
#[tokio::test]
async fn throttled_replies_are_passed_on_with_a_wait() {
    for (headers, settings, wait) in [
        (&[][..], "cooldown = { base = \"3s\" }\n", "3"),
        (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "60")], "", "60"),
        (&[("retry-after", "7")], "", "7"),
    ] {
        let answer =
            |_, _: &_| headers.iter().fold(Answer::new(429, "slow"), |answer, (name, value)| answer.with(name, *value));
        let api = Api::start(answer).await;
        let gateway = standing(&api.policy(&format!("{ONCE}{settings}timeout = \"1s\"\n")));
        let reply = gateway.ask(get("/api/x")).await;
        assert_eq!((status(&reply), header(&reply, "retry-after")), (429, Some(wait)));
        gateway.clock.advance(Span::from_millis(1));
        let next = json(&gateway.ask(get("/api/x")).await);
        // There are no credentials that could cool down.
        assert_eq!(next["error"], "RateLimitedError");
        assert_eq!(
            next["message"],
            "api: the provider has asked for a pause and takes no such call before the deadline"
        );
        assert_eq!(next["retry_after"].to_string(), wait);
    }
}

#[tokio::test]
async fn all_requests_count_as_attempts() {
    let api = Api::start(|_, _| Answer::new(429, "slow down")).await;
    let three = "auth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\", \"env:C\"]\n";
    let gateway = standing(&api.policy(&format!("{ONCE}{three}")));
    let answer = gateway.ask(get("/api/x")).await;
    assert_eq!(header(&answer, "tidegate-attempts"), Some("3"));
    assert_eq!(header(&answer, "tidegate-error"), Some("none of 3 attempts succeeded"));
}

#[tokio::test]
async fn a_quota_that_a_reply_spends_is_named() {
    let rule = "throttled_when = { contains = { \"/error\" = \"limit\" }, spends_quota = true }\n";
    let api = Api::start(|_, _| Answer::new(200, "{\"error\":\"limit\"}")).await;
    for (attempts, requests) in [(3, 1), (1, 2)] {
        let retry = format!("retry = {{ max_attempts = {attempts} }}\n");
        let gateway = standing(&api.policy(&format!("limit = \"1000 per calendar day\"\n{rule}{retry}")));
        gateway.clock.advance(Span::from_secs(3_600));
        let answer = gateway.ask(get("/api/x")).await;
        assert_eq!((status(&answer), header(&answer, "tidegate-error")), (200, Some("the quota `api` is spent")));
        assert_eq!(header(&answer, "retry-after"), Some("82800"));
        let next = json(&gateway.ask(get("/api/x")).await);
        assert_eq!((&next["error"], &next["limit"]), (&"QuotaSpentError".into(), &"api".into()));
        assert_eq!(next["retry_after"], 82_800);
        assert_eq!(api.count(), requests);
    }
}

#[tokio::test]
async fn a_spent_quota_gives_429_with_reset() {
    let api = Api::start(|_, _| Answer::new(200, "hello")).await;
    let gateway = standing(&api.policy("limit = \"1 per calendar day\"\n"));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    let body = "{\"error\":\"QuotaSpentError\",\"message\":\"api: the quota `api` is spent\",\
        \"provider\":\"api\",\"limit\":\"api\",\
        \"retry_after\":86400,\"earliest\":\"2026-01-02 00:00:00Z\",\"attempts\":0}";
    let answer = undated(&gateway.ask(get("/api/x")).await);
    assert_eq!(answer, error("429 Too Many Requests", Some(86_400), 0, body));
}

#[tokio::test]
async fn exhausted_retries_forward_the_last_reply() {
    let api = Api::start(|number, _| Answer::new(500 + number as u16, format!("unwell {number}"))).await;
    let gateway = standing(&api.policy(&format!("{FREE}user = {{ retries = 3 }}\n")));
    let answer = undated(&gateway.ask(get("/api/x")).await);
    // 501 is permanent, and the provider's own body is the best explanation.
    assert_eq!((status(&answer), body(&answer)), (501, "unwell 1"));
    assert_eq!(header(&answer, "tidegate-attempts"), Some("2"));
    let api = Api::start(|number, _| Answer::new(502, format!("unwell {number}")).with("x-trace", "7")).await;
    let gateway = standing(&api.policy(&format!("{FREE}user = {{ retries = 2 }}\n")));
    let expected = "HTTP/1.1 502 Bad Gateway\r\nx-trace: 7\r\ncontent-length: 8\r\ntidegate-attempts: 3\r\n\
        tidegate-waited: 0.000s\r\ntidegate-error: none of 3 attempts succeeded\r\n\r\nunwell 2";
    assert_eq!(undated(&gateway.ask(get("/api/x")).await), expected);
}

#[tokio::test]
async fn exhausted_retries_without_reply_give_502() {
    let gateway = standing(&provider(nobody(), FREE));
    let body = "{\"error\":\"RetriesExhaustedError\",\"message\":\"api: none of 3 attempts succeeded: \
        the request got no reply: can't connect to the provider: Connection refused (os error 111)\",\
        \"provider\":\"api\",\"attempts\":3}";
    let answer = undated(&gateway.ask(get("/api/x")).await);
    assert_eq!(answer, error("502 Bad Gateway", None, 3, body));
}

#[tokio::test]
async fn too_long_retry_after_is_passed_on() {
    let api = Api::start(|_, _| Answer::new(429, "slow down").with("retry-after", "86400")).await;
    let gateway = standing(&api.policy(FREE));
    let answer = gateway.ask(get("/api/x")).await;
    assert_eq!((status(&answer), body(&answer)), (429, "slow down"));
    assert_eq!(header(&answer, "retry-after"), Some("86400"));
    let why = "the provider takes calls again in 1 d, later than calls wait (`retry.max_retry_after`)";
    assert_eq!(header(&answer, "tidegate-error"), Some(why));
    let next = json(&gateway.ask(get("/api/x")).await);
    assert_eq!((&next["error"], &next["retry_after"]), (&"RateLimitedError".into(), &86_400.into()));
    assert_eq!(api.count(), 1, "the gate is closed");
}

#[tokio::test]
async fn deadlines_in_queue_or_flight_give_504() {
    let api = Api::start(|_, _| Answer::new(200, "hello").taking(3000)).await;
    let gateway = running(&api.policy("limit = [\"1000/s burst 1000\"]\nuser = { in_flight = 1 }\n"));
    let hurried = request("GET", "/api/x", "tidegate-timeout: 300ms\r\n", "");
    let mut first = Peer::connect(gateway.address).await;
    first.send(get("/api/x")).await;
    while api.count() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let queued = gateway.ask(&hurried).await;
    assert_eq!(status(&queued), 504);
    let expected = "{\"error\":\"DeadlineExceededError\",\
        \"message\":\"api: the deadline passed before there was a reply\",\"provider\":\"api\",\"attempts\":0}";
    assert_eq!(body(&queued), expected);
    assert_eq!(api.count(), 1);
    assert_eq!(status(&first.message().await), 200);
    let sent = gateway.ask(&hurried).await;
    assert_eq!((status(&sent), header(&sent, "tidegate-attempts")), (504, Some("1")), "{sent}");
    assert_eq!(json(&sent)["provider"], "api");
}

#[tokio::test]
async fn a_full_queue_is_reported_by_lane() {
    let api = Api::start(|_, _| Answer::new(200, "hello")).await;
    let settings =
        "limit = \"1 per 1h\"\ntimeout = \"9h\"\nuser = { max_waiting = 2 }\nbackground = { max_waiting = 1 }\n";
    let gateway = standing(&api.policy(settings));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    let full = |lane: &str| {
        format!(
            "{{\"error\":\"QueueFullError\",\"message\":\"api: the queue of the {lane} lane is full\",\
             \"provider\":\"api\",\"attempts\":0}}"
        )
    };
    // A new call takes the place of the oldest one behind the first.
    let mut users = Vec::new();
    for _ in 0..3 {
        let mut user = Peer::connect(gateway.address).await;
        user.send(get("/api/x")).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        users.push(user);
    }
    let displaced = users.remove(1).message().await;
    assert_eq!((status(&displaced), body(&displaced)), (503, &*full("user")));
    let background = || request("GET", "/api/x", "tidegate-priority: background\r\n", "");
    let mut first = Peer::connect(gateway.address).await;
    first.send(background()).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let refused = error("503 Service Unavailable", None, 0, &full("background"));
    assert_eq!(undated(&gateway.ask(background()).await), refused);
    for peer in users.iter_mut().chain([&mut first]) {
        assert!(tokio::time::timeout(Duration::from_millis(100), peer.message()).await.is_err(), "it waits");
    }
}

#[tokio::test]
async fn a_joined_call_keeps_its_place() {
    let api = Api::start(|_, _| Answer::new(200, "hello")).await;
    let settings = "limit = \"1 per 1h\"\ntimeout = \"9h\"\nuser = { max_waiting = 3 }\ncache = \"on\"\n";
    let gateway = running(&api.policy(settings));
    assert_eq!(status(&gateway.ask(get("/api/first")).await), 200);
    let mut waiting = Vec::new();
    for path in ["/api/a", "/api/b", "/api/c", "/api/c", "/api/d", "/api/e"] {
        let mut peer = Peer::connect(gateway.address).await;
        peer.send(get(path)).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        waiting.push((path, peer));
    }
    for (path, mut peer) in waiting {
        let answer = tokio::time::timeout(Duration::from_millis(100), peer.message()).await;
        let answer = answer.ok().map(|answer| status(&answer));
        // The fourth displaces the second. The third is waited for twice, so that the fifth doesn't displace it.
        assert_eq!(answer, ["/api/b", "/api/e"].contains(&path).then_some(503), "{path}");
    }
}

#[tokio::test]
async fn unreplayable_bodies_are_reported() {
    let large = "x".repeat(100 << 10);
    let api = Api::start(|_, _| Answer::new(503, "unwell")).await;
    let answer = running(&api.policy(FREE)).ask(request("PUT", "/api/x", "", &large)).await;
    assert_eq!((status(&answer), body(&answer)), (503, "unwell"));
    let why = "the request can't be sent again: its body is larger than what is kept for another attempt";
    assert_eq!(header(&answer, "tidegate-error"), Some(why));
    assert_eq!(api.count(), 1);
    // The same without a reply.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gateway = standing(&provider(listener.local_addr().unwrap(), FREE));
    let breaking = tokio::spawn(async move {
        for number in 0.. {
            let mut peer = Peer::over(listener.accept().await.unwrap().0);
            peer.message().await;
            assert_eq!(number, 0, "it came again");
        }
    });
    let body = format!(
        "{{\"error\":\"UnreplayableBodyError\",\"message\":\"api: {why}: {BROKEN_OFF}\",\
         \"provider\":\"api\",\"attempts\":1}}"
    );
    let answer = undated(&gateway.ask(request("PUT", "/api/x", "", &large)).await);
    assert_eq!(answer, error("502 Bad Gateway", None, 1, &body));
    assert!(!breaking.is_finished());
}

#[tokio::test]
async fn non_idempotent_requests_without_reply_give_502() {
    let gateway = standing(&provider(closing("").await, FREE));
    let why = "the request isn't idempotent and has no idempotency key, so it isn't sent again";
    let body = format!(
        "{{\"error\":\"NotIdempotentError\",\"message\":\"api: {why}: {BROKEN_OFF}\",\
         \"provider\":\"api\",\"attempts\":1}}"
    );
    let answer = undated(&gateway.ask(request("POST", "/api/x", "", "order")).await);
    assert_eq!(answer, error("502 Bad Gateway", None, 1, &body));
}

#[tokio::test]
async fn replies_with_long_waits_stop_sdks() {
    for (wait, format, told) in [
        ("61", "openai", Some("false")),
        ("59", "openai", None),
        ("61", "tidegate", None),
        ("61", "anthropic", Some("false")),
    ] {
        let api = Api::start(move |_, _| Answer::new(429, "slow down").with("retry-after", wait)).await;
        let gateway = standing(&api.policy(&format!("{ONCE}error_format = \"{format}\"\n")));
        let answer = gateway.ask(get("/api/x")).await;
        assert_eq!((status(&answer), body(&answer)), (429, "slow down"), "{wait} {format}");
        assert_eq!(header(&answer, "x-should-retry"), told, "{wait} {format}");
    }
}

#[tokio::test]
async fn a_timeout_that_is_not_retried_is_504() {
    let api = Api::start(|_, _| Answer::new(200, "late").taking(2_000)).await;
    let gateway = running(&api.policy("limit = \"100/s\"\nattempt_timeout = \"100ms\"\ntimeout = \"1s\"\n"));
    let answer = gateway.ask(request("POST", "/api/x", "", "order")).await;
    assert_eq!((status(&answer), &json(&answer)["error"]), (504, &"NotIdempotentError".into()), "{answer}");
    assert_eq!(api.count(), 1);
}
