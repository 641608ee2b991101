//! The tests of replies.

use super::*;
use tidegate_core::{Span, Time};
use tidegate_policy::{Policy, PolicySources};

const FILE: &str = r#"
    [inbound.global]
    limit = "1000 per 1h"
    [inbound.action.login]
    match = { method = "POST", path = "/login" }
    limit = "5 per 60s"
    penalty = { base = "2s", cap = "1h" }
    [inbound.action.feed]
    match = { path = "/feed" }
    limit = "8 in flight"
"#;

fn policy() -> Policy {
    Policy::load(PolicySources::new().file("test.toml", FILE)).unwrap()
}

fn decision(allowed: bool) -> Decision {
    let now = Time::from_secs(1_795_262_489);
    let mut decision = Decision::without_limit(allowed, Reason::Ok, now);
    decision.bound_by = LimitId::from_index(0);
    decision.limit = Some(5);
    decision.remaining = Some(if allowed { 4 } else { 0 });
    decision.reset_after = Span::from_millis(59_001);
    if !allowed {
        decision.reason = Reason::Penalty;
        decision.blocked = true;
        decision.retry_after = Some(Span::from_millis(15_001));
        decision.backoff = Some(Span::from_secs(16));
        decision.next_allowed_at = Some(now + Span::from_millis(15_001));
    }
    decision
}

fn login(policy: &Policy) -> (ActionId, Decision, Decision) {
    let id = policy.plan().find_action("login").unwrap();
    let own = policy.plan().action(id).limits().first().copied();
    let bind = |mut decision: Decision| {
        decision.bound_by = own;
        decision
    };
    (id, bind(decision(true)), bind(decision(false)))
}

fn annotated(dialect: HeaderDialect, x: bool) -> Vec<String> {
    let policy = policy();
    let (id, admitted, _) = login(&policy);
    let mut headers = HeaderMap::new();
    Replies::new(policy.plan(), dialect, x).annotate(Some(id), &admitted, &mut headers);
    headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect()
}

#[test]
fn each_header_dialect_has_its_own_fields() {
    assert_eq!(
        annotated(HeaderDialect::Draft10, false),
        [r#"ratelimit-policy: "login";q=5;w=60, "global";q=1000;w=3600"#, r#"ratelimit: "login";r=4;t=60"#,]
    );
    assert_eq!(
        annotated(HeaderDialect::Draft7, false),
        ["ratelimit-policy: 5;w=60, 1000;w=3600", "ratelimit: limit=5, remaining=4, reset=60",]
    );
    assert_eq!(
        annotated(HeaderDialect::None, true),
        ["x-ratelimit-limit: 5", "x-ratelimit-remaining: 4", "x-ratelimit-reset: 60",]
    );
}

#[test]
fn in_flight_limits_name_their_unit() {
    let policy = policy();
    let id = policy.plan().find_action("feed").unwrap();
    let mut admitted = decision(true);
    admitted.bound_by = policy.plan().action(id).limits().first().copied();
    let mut headers = HeaderMap::new();
    Replies::new(policy.plan(), HeaderDialect::Draft10, false).annotate(Some(id), &admitted, &mut headers);
    assert_eq!(headers[RATELIMIT_POLICY], r#""feed";q=8;qu="concurrent-requests", "global";q=1000;w=3600"#);
}

#[test]
fn a_refusal_states_when_to_retry() {
    let policy = policy();
    let (id, _, refused) = login(&policy);
    let response =
        Replies::new(policy.plan(), HeaderDialect::Draft10, true).refusal(Some(id), &refused, &HeaderMap::new());
    assert_eq!(response.status(), 429);
    assert_eq!(response.headers().len(), 7);
    assert_eq!(response.headers()["x-ratelimit-limit"], "5");
    assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
    assert_eq!(response.headers()["x-ratelimit-reset"], "16");
    assert_eq!(response.headers()["ratelimit-policy"], r#""login";q=5;w=60, "global";q=1000;w=3600"#);
    assert_eq!(response.headers()["retry-after"], "16");
    assert_eq!(response.headers()["ratelimit"], r#""login";r=0;t=16"#);
    assert_eq!(response.headers()["content-type"], "application/json");
    assert_eq!(
        response.body(),
        r#"{"error":"Too many requests","retry_after":16,"next_allowed_at":"2026-11-21 12:01:45Z"}"#
    );
}

#[test]
fn written_reports_equal_their_serialised_form() {
    let policy = policy();
    let gate = crate::Gate::new(&policy);
    let replies = Replies::new(policy.plan(), HeaderDialect::Draft10, false);
    let (_, admitted, refused) = login(&policy);
    let mut decisions =
        vec![admitted, refused, Decision { limit: Some(6), ..admitted }, Decision { remaining: None, ..admitted }];
    decisions.extend([Decision { shadow: true, ..admitted }, Decision { permit: Some(1), ..admitted }]);
    for reason in [
        Reason::Ok,
        Reason::Unlimited,
        Reason::Parole,
        Reason::Reservation,
        Reason::AllowList,
        Reason::DenyList,
        Reason::Limit,
        Reason::Penalty,
    ] {
        decisions.push(Decision::without_limit(reason == Reason::AllowList, reason, Time::ZERO));
        decisions.push(Decision { reason, shadow: true, permit: Some(0xab), ..admitted });
        decisions.push(Decision { reason, retry_after: None, backoff: None, limit: Some(u64::MAX), ..refused });
    }
    for decision in decisions {
        let expected = serde_json::to_string(&gate.report(&decision)).unwrap();
        assert_eq!(replies.report(&decision), expected);
    }
}

#[test]
fn api_decisions_carry_headers_and_report() {
    let policy = policy();
    let (id, admitted, refused) = login(&policy);
    let listed = Decision::without_limit(true, Reason::AllowList, Time::ZERO);
    let for_good = Decision { retry_after: None, ..refused };
    for dialect in [HeaderDialect::Draft10, HeaderDialect::Draft7, HeaderDialect::None] {
        for x in [false, true] {
            let replies = Replies::new(policy.plan(), dialect, x);
            for decision in [admitted, refused, listed, for_good] {
                let response = replies.decision(Some(id), &decision);
                let mut expected = HeaderMap::new();
                expected.insert(CONTENT_TYPE, JSON);
                if let Some(wait) = decision.retry_after {
                    expected.insert(RETRY_AFTER, number_header(wait.as_secs_ceil()));
                }
                replies.annotate(Some(id), &decision, &mut expected);
                assert_eq!(response.headers(), &expected);
                assert_eq!(response.status(), if decision.allowed { 200 } else { 429 });
                assert_eq!(response.body(), &replies.report(&decision));
            }
        }
    }
}

#[test]
fn a_permanent_refusal_has_no_retry_time() {
    let policy = policy();
    let (id, _, mut refused) = login(&policy);
    refused.retry_after = None;
    refused.next_allowed_at = None;
    let replies = Replies::new(policy.plan(), HeaderDialect::Draft10, true);
    let response = replies.refusal(Some(id), &refused, &HeaderMap::new());
    assert!(!response.headers().contains_key("retry-after"));
    assert!(!response.headers().contains_key("x-ratelimit-reset"));
    assert_eq!(response.headers()["ratelimit"], r#""login";r=0"#);
    assert_eq!(response.body(), r#"{"error":"Too many requests","retry_after":null,"next_allowed_at":null}"#);
}

#[test]
fn problem_json_is_sent_where_accepted() {
    let policy = policy();
    let (id, _, refused) = login(&policy);
    let replies = Replies::new(policy.plan(), HeaderDialect::Draft10, false);
    let mut request = HeaderMap::new();
    request.insert(ACCEPT, HeaderValue::from_static("text/html, Application/Problem+JSON;q=0.5"));
    let response = replies.refusal(Some(id), &refused, &request);
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
    assert_eq!(
        body,
        serde_json::json!({
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "title": "Request cannot be satisfied as assigned quota has been exceeded",
            "status": 429,
            "violated-policies": ["login"],
            "retry_after": 16,
            "next_allowed_at": "2026-11-21 12:01:45Z",
        })
    );
    for accept in ["*/*", "application/json", "application/problem+json;q=0", "application/problem+json; Q=0.000"] {
        request.insert(ACCEPT, HeaderValue::from_static(accept));
        assert!(!wants_problem(&request), "{accept}");
    }
}

#[test]
fn denied_clients_receive_403() {
    let policy = policy();
    let denied = Decision::without_limit(false, Reason::DenyList, Time::ZERO);
    let response = Replies::new(policy.plan(), HeaderDialect::Draft10, false).refusal(None, &denied, &HeaderMap::new());
    assert_eq!(
        (response.status(), response.body().as_ref()),
        (StatusCode::FORBIDDEN, &br#"{"error":"Forbidden"}"#[..])
    );
    assert_eq!(response.headers().len(), 1);
}

#[test]
fn long_limit_names_are_written_completely() {
    let name = "a".repeat(100);
    let file = format!("[inbound.action.{name}]\nmatch = {{ path = \"/\" }}\nlimit = \"5 per 60s\"\n");
    let policy = Policy::load(PolicySources::new().file("test.toml", file)).ok();
    // A policy may refuse such a name; if it accepts the name, the header contains it completely.
    if let Some(policy) = policy {
        let id = policy.plan().find_action(&name).unwrap();
        let mut admitted = decision(true);
        admitted.bound_by = policy.plan().action(id).limits().first().copied();
        let mut headers = HeaderMap::new();
        Replies::new(policy.plan(), HeaderDialect::Draft10, false).annotate(Some(id), &admitted, &mut headers);
        assert!(headers[RATELIMIT].as_bytes().starts_with(format!("\"{name}\";r=4").as_bytes()));
    }
}
