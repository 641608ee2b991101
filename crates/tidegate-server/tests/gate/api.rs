//! The decision API.

use std::sync::Arc;

use serde_json::{Value, json};
use tidegate::clock::ManualClock;
use tidegate::store::{Memory, Never, Store, StoreResponse};
use tidegate::{DecisionReport, Gate, Span};
use tidegate_core::{Batch, Limits, Time};
use tidegate_policy::KeySeed;

use crate::common::{
    Peer, body, get, header, json as parsed, nobody, once, policy, post, serve, start, status, undated,
};

const FILE: &str = r#"
    [inbound.global]
    limit = "1000 per 1h"
    [inbound.action.login]
    match = { method = "POST", path = "/login" }
    limit = "5 per 60s"
    penalty = { base = "2s", cap = "1h" }
    [inbound.action.otp]
    key = ["key", "platform"]
    limit = "3 per 120s"
    [inbound.action.tenant]
    key = ["header:x-tenant", "query:q"]
    limit = "3 per 120s"
"#;

#[tokio::test]
async fn checks_are_answered_exactly_until_refused() {
    let gate = start(nobody(), FILE).await;
    let mut caller = Peer::connect(gate.api).await;
    let check = post("/v1/check", r#"{"action":"login","ip":"203.0.113.7"}"#);
    for left in (0..5).rev() {
        assert_eq!(
            undated(&caller.ask(&check).await),
            format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\
                 ratelimit-policy: \"login\";q=5;w=60, \"global\";q=1000;w=3600\r\nratelimit: \"login\";r={left};t=60\r\n\
                 content-length: 189\r\n\r\n\
                 {{\"allowed\":true,\"limit\":5,\"remaining\":{left},\"reset_after\":60,\"retry_after\":null,\
                 \"blocked\":false,\"backoff_seconds\":null,\"next_allowed_at\":null,\"bound_by\":\"login\",\
                 \"reason\":\"ok\",\"source\":\"action\"}}"
            )
        );
    }
    let refused = caller.ask(&check).await;
    assert_eq!(
        undated(&refused),
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 2\r\n\
         ratelimit-policy: \"login\";q=5;w=60, \"global\";q=1000;w=3600\r\nratelimit: \"login\";r=0;t=2\r\n\
         content-length: 206\r\n\r\n\
         {\"allowed\":false,\"limit\":5,\"remaining\":0,\"reset_after\":60,\"retry_after\":2,\"blocked\":true,\
         \"backoff_seconds\":2,\"next_allowed_at\":\"2026-01-01 00:00:02Z\",\"bound_by\":\"login\",\
         \"reason\":\"penalty\",\"source\":\"action\"}"
    );
    let report: DecisionReport = serde_json::from_str(body(&refused)).unwrap();
    assert_eq!(report.retry_after, Some(2));

    // Reading changes nothing.
    for path in ["/v1/status", "/v1/explain"] {
        let answer = caller.ask(get(&format!("{path}?action=login&ip=203.0.113.7"))).await;
        assert_eq!(status(&answer), 200);
        let decision = if path == "/v1/explain" { parsed(&answer)["decision"].clone() } else { parsed(&answer) };
        assert_eq!(decision, serde_json::to_value(&report).unwrap());
    }
    gate.clock.advance(Span::from_secs(2));
    assert_eq!(status(&caller.ask(&check).await), 200);
    assert_eq!(header(&caller.ask(&check).await, "retry-after"), Some("4"));
}

#[tokio::test]
async fn explain_reports_every_limit() {
    let gate = start(nobody(), FILE).await;
    let check = post("/v1/check", r#"{"action":"login","ip":"203.0.113.7","cost":2}"#);
    once(gate.api, &check).await;
    let answer = parsed(&once(gate.api, get("/v1/explain?action=login&ip=203.0.113.7")).await);
    assert_eq!(answer["action"], "login");
    let limits = answer["limits"].as_array().unwrap();
    assert_eq!(limits.len(), 2);
    assert_eq!(
        (&limits[0]["name"], &limits[0]["used"], &limits[0]["remaining"]),
        (&json!("login"), &json!(2), &json!(3))
    );
    assert_eq!(
        (&limits[1]["name"], &limits[1]["source"], &limits[1]["used"]),
        (&json!("global"), &json!("global"), &json!(2))
    );
    assert_eq!(limits[0]["key"], json!(["client_ip"]));
    assert!(limits[0]["words"].as_str().unwrap().starts_with("at most 9 in any 60 s (5, and one after each block)"));
}

#[tokio::test]
async fn resets_and_refunds_change_the_counts() {
    let gate = start(nobody(), FILE).await;
    let about = r#"{"action":"login","ip":"203.0.113.7"}"#;
    let left =
        async || parsed(&once(gate.api, get("/v1/status?action=login&ip=203.0.113.7")).await)["remaining"].clone();
    for _ in 0..6 {
        once(gate.api, post("/v1/check", about)).await;
    }
    let reset = async |about| once(gate.api, post("/v1/reset", about)).await;
    let report = parsed(&reset(about).await);
    let found = &report["limits"][0];
    assert_eq!((&report["reset"], &found["name"], &found["used"]), (&json!(true), &json!("login"), &json!(5)));
    assert_eq!((&found["blocked"], &report["still_refusing"]), (&json!(true), &json!(null)));
    assert_eq!(left().await, 5);
    assert_eq!(body(&reset(about).await), r#"{"reset":true}"#, "nothing is left to be found");
    assert_eq!(left().await, 5, "idempotent");
    let missing = reset(r#"{"platform":"web"}"#).await;
    assert_eq!((status(&missing), parsed(&missing)["field"].clone()), (400, json!("action")));
    let global = parsed(&once(gate.api, get("/v1/explain?action=login&ip=203.0.113.7")).await);
    assert_eq!(global["limits"][1]["used"], 5, "global is left alone");
    once(gate.api, post("/v1/check", about)).await;
    assert_eq!(left().await, 4);
    let everywhere = parsed(&reset(r#"{"ip":"203.0.113.7"}"#).await);
    let names = everywhere["limits"].as_array().unwrap().iter().map(|limit| limit["name"].clone());
    assert_eq!(names.collect::<Vec<_>>(), ["global", "login"]);
    once(gate.api, post("/v1/check", about)).await;
    assert_eq!(left().await, 4);
    for expected in [5, 5] {
        assert_eq!(body(&once(gate.api, post("/v1/refund", about)).await), r#"{"refunded":true}"#);
        assert_eq!(left().await, expected, "never beyond the capacity");
    }
}

#[tokio::test]
async fn an_action_may_be_found_by_its_request() {
    let gate = start(nobody(), FILE).await;
    let by_path = post("/v1/check", r#"{"method":"POST","path":"/login?next=/","ip":"203.0.113.7"}"#);
    assert_eq!(parsed(&once(gate.api, by_path).await)["bound_by"], "login");
    let tenant = r#"{"action":"tenant","headers":{"X-Tenant":"t"},"path":"/?q=1"}"#;
    let with_ip = tenant.replace("{\"action", "{\"ip\":\"203.0.113.7\",\"action");
    assert_eq!(parsed(&once(gate.api, post("/v1/check", &with_ip)).await)["remaining"], 2);
    let answer = once(gate.api, get("/v1/status?action=tenant&ip=203.0.113.7&header:x-tenant=t&path=/?q=1")).await;
    assert_eq!(parsed(&answer)["remaining"], 2, "{answer}");
}

#[tokio::test]
async fn invalid_api_requests_give_exact_errors() {
    let gate = start(nobody(), FILE).await;
    let table: &[(String, u16, Value, &str)] = &[
        (post("/v1/check", ""), 400, Value::Null, "no JSON"),
        (post("/v1/check", "[]"), 400, Value::Null, "no JSON object"),
        (post("/v1/check", "{}"), 400, json!("action"), "`action` is missing"),
        (post("/v1/check", r#"{"acton":"login"}"#), 400, json!("acton"), "did you mean `action`?"),
        (post("/v1/check", r#"{"action":7}"#), 400, json!("action"), "expected a string"),
        (post("/v1/check", r#"{"action":"login"}"#), 400, json!("ip"), "`ip` is missing"),
        (post("/v1/check", r#"{"action":"login","ip":"here"}"#), 400, json!("ip"), "IPv4 or IPv6"),
        (
            post("/v1/check", r#"{"action":"login","ip":"::1","cost":1.5}"#),
            400,
            json!("cost"),
            "expected a whole number from 0 to",
        ),
        (post("/v1/check", r#"{"action":"login","ip":"::1","cost":-1}"#), 400, json!("cost"), "whole number"),
        (post("/v1/check", r#"{"action":"login","ip":"::1","cost":9223372036854775807}"#), 400, json!("cost"), "2^40"),
        (post("/v1/check", r#"{"action":"login","ip":"::1","cost":NaN}"#), 400, Value::Null, "no JSON"),
        (
            post("/v1/check", r#"{"action":"otp","ip":"::1","key":"k"}"#),
            400,
            json!("platform"),
            "`platform` is missing",
        ),
        (post("/v1/check", r#"{"action":"otp","ip":"::1","platform":"web"}"#), 400, json!("key"), "`key` is missing"),
        (
            post("/v1/check", r#"{"action":"otp","ip":"::1","key":"k","platform":"fax"}"#),
            400,
            json!("platform"),
            "web, mobile, api or admin",
        ),
        (post("/v1/check", r#"{"action":"tenant","ip":"::1"}"#), 400, json!("header:x-tenant"), "is missing"),
        (
            post("/v1/check", r#"{"action":"login","ip":"::1","permit":"0000000000000000"}"#),
            400,
            json!("permit"),
            "belongs to /v1/release",
        ),
        (post("/v1/release", r#"{"action":"login","ip":"::1"}"#), 400, json!("permit"), "`permit` is missing"),
        (
            post("/v1/release", r#"{"action":"login","ip":"::1","permit":"x"}"#),
            400,
            json!("permit"),
            "sixteen hexadecimal digits",
        ),
        (post("/v1/check", r#"{"action":"logn","ip":"::1"}"#), 404, json!("action"), "did you mean \"login\"?"),
        (post("/v1/check", r#"{"action":"zzzzzzzzzz","ip":"::1"}"#), 404, json!("action"), "unknown action"),
        (get("/v1/status?acton=login"), 400, json!("acton"), "did you mean `action`?"),
        (get("/v1/status?action=login&ip=::1&ip=::2"), 400, json!("ip"), "twice"),
        (get("/v1/explain"), 400, json!("action"), "`action` is missing"),
        (get("/v1/check"), 405, Value::Null, "/v1/check takes POST"),
        (post("/v1/status", "{}"), 405, Value::Null, "/v1/status takes GET"),
        (get("/v1/chek"), 404, Value::Null, "did you mean /v1/check?"),
        (get("/"), 404, Value::Null, "there are /v1/check"),
    ];
    let mut caller = Peer::connect(gate.api).await;
    for (request, expected, field, says) in table {
        let answer = caller.ask(request).await;
        assert_eq!(status(&answer), *expected, "{request}: {answer}");
        let told = parsed(&answer);
        assert_eq!(&told["field"], field, "{request}: {answer}");
        assert!(told["message"].as_str().unwrap().contains(says), "{request}: {answer}");
        if *expected == 405 {
            assert!(header(&answer, "allow").is_some());
        }
    }
    let nearest = parsed(&caller.ask(post("/v1/check", r#"{"action":"logn","ip":"::1"}"#)).await);
    assert_eq!(nearest["nearest"], "login");
}

#[tokio::test]
async fn a_default_action_handles_unknown_names() {
    let gate = start(nobody(), "[inbound.action.default]\nlimit = \"2 per 60s\"\n").await;
    for expected in [200, 200, 429] {
        let answer = once(gate.api, post("/v1/check", r#"{"action":"anything","ip":"::1"}"#)).await;
        assert_eq!(status(&answer), expected);
    }
}

#[tokio::test]
async fn api_request_sizes_are_bounded() {
    let gate = start(nobody(), FILE).await;
    let long = format!(r#"{{"action":"login","ip":"::1","key":"{}"}}"#, "k".repeat(15_000));
    assert_eq!(status(&once(gate.api, post("/v1/check", &long)).await), 200);
    let longer = format!(r#"{{"action":"login","ip":"::1","key":"{}"}}"#, "k".repeat(17_000));
    let mut caller = Peer::connect(gate.api).await;
    let answer = caller.ask(post("/v1/check", &longer)).await;
    assert_eq!((status(&answer), header(&answer, "connection")), (413, Some("close")));
    assert!(caller.ends().await);
    let mut caller = Peer::connect(gate.api).await;
    caller.send("POST /v1/check HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n").await;
    for _ in 0..3 {
        caller.send(format!("2000\r\n{}\r\n", "x".repeat(0x2000))).await;
    }
    assert_eq!(status(&caller.message().await), 413);
    // A body in pieces is accepted like one in a single piece.
    let mut caller = Peer::connect(gate.api).await;
    caller
        .send(
            "POST /v1/check HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n12\r\n{\"action\":\"login\",\r\n",
        )
        .await;
    caller.send("b\r\n\"ip\":\"::2\"}\r\n0\r\n\r\n").await;
    assert_eq!(status(&caller.message().await), 200);
}

#[tokio::test]
async fn health_endpoints_answer() {
    let gate = start(nobody(), FILE).await;
    for (path, expected) in [("/healthz", 200), ("/readyz", 200), ("/nowhere", 404)] {
        assert_eq!(status(&once(gate.admin, get(path)).await), expected);
    }
    let refused = once(gate.admin, post("/healthz", "x")).await;
    assert_eq!((status(&refused), header(&refused, "allow")), (405, Some("GET, HEAD")));
}

/// A store that is away, while decisions go on in memory.
struct Away(Memory);

impl Store for Away {
    type Future = Never;

    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Never> {
        self.0.apply(batch, now)
    }

    fn submit(&self, batch: &Batch, now: Time) {
        self.0.submit(batch, now);
    }

    fn outage(&self) -> Option<&str> {
        Some("redis://db:6379")
    }
}

#[tokio::test]
async fn readiness_is_degraded_while_the_store_is_away() {
    let limit = "[inbound.action.a]\nlimit = \"5 per 60s\"\non_outage = ";
    let away = r#"{"status":"the store does not answer"}"#;
    let degraded = r#"{"status":"degraded","store":"redis://db:6379"}"#;
    for (file, expected, answer) in [
        (String::new(), 200, degraded),
        (format!("{limit}\"local\"\n"), 200, degraded),
        (format!("{limit}\"deny\"\n[inbound.global]\nlimit = \"9/s\"\n"), 200, degraded),
        (format!("{limit}\"deny\"\n"), 503, away),
        (format!("{limit}\"local\"\n[inbound.global]\nlimit = \"9/s\"\non_outage = \"deny\"\n"), 503, away),
    ] {
        let policy = policy(nobody(), &file);
        let store = Away(Memory::new(Arc::clone(policy.plan().limits()), 1 << 20));
        let (plan, clock) = (Arc::clone(policy.plan()), ManualClock::default());
        let gate = serve(Gate::from_parts(plan, store, clock, KeySeed::new([7; 16])), &policy, |_| None).unwrap();
        assert!(once(gate.admin, get("/")).await.contains("is away: decisions are made without it"));
        let ready = once(gate.admin, get("/readyz")).await;
        assert_eq!((status(&ready), body(&ready)), (expected, answer), "{file}");
    }
}
