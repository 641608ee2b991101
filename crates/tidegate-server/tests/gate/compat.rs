//! The paths of limitador and throttlecrab, and limitador's limits over the rate limit service.

use std::net::SocketAddr;

use serde_json::{Value, json};
use tidegate::Span;
use tidegate_testkit::servers::{ScratchDir, free_port};

use crate::common::{Running, body, json as parsed, nobody, once, post, start, status};
use crate::rls::{Code, Descriptor, DescriptorStatus, RateLimitRequest, ask, connect, descriptor, header, request};

const LIMITS: &str = "
- namespace: shop
  max_value: 5
  seconds: 60
  name: reads
  conditions: [\"descriptors[0]['req.method'] == 'GET'\"]
  variables: []
- namespace: shop
  max_value: 2
  seconds: 60
  conditions: [\"descriptors[0]['req.method'] == 'GET'\"]
  variables: [\"descriptors[0].user\"]
";

/// A gate with the paths and the limits, and the address of its rate limit service.
async fn serve(more: &str) -> (Running, SocketAddr) {
    let (folder, address) = (ScratchDir::new(), SocketAddr::from(([127, 0, 0, 1], free_port())));
    let file = folder.write("limits.yaml", LIMITS);
    let policy = format!(
        "[rls]\nlisten = \"{address}\"\nfiles = \"{}\"\n[api]\ncompat = [\"limitador\", \"throttlecrab\"]\n{more}",
        file.display()
    );
    (start(nobody(), &policy).await, address)
}

fn asked(user: Option<&str>, delta: u64) -> String {
    let mut values = json!({ "req.method": "GET" });
    if let Some(user) = user {
        values["user"] = user.into();
    }
    json!({ "namespace": "shop", "values": values, "delta": delta, "response_headers": "DraftVersion03" }).to_string()
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")
}

fn has_line(response: &str, line: &str) -> bool {
    response.lines().any(|known| known == line)
}

async fn counters(gate: &Running) -> Value {
    parsed(&once(gate.api, get("/counters/shop")).await)
}

#[tokio::test]
async fn limits_of_limitador_decide_together() {
    let (gate, _) = serve("").await;
    let report = |user, delta| post("/check_and_report", &asked(user, delta));
    let admitted = once(gate.api, report(Some("alice"), 1)).await;
    assert_eq!((status(&admitted), body(&admitted)), (200, "null"));
    for line in
        ["x-ratelimit-limit: 2, 2;w=60, 5;w=60;name=\"reads\"", "x-ratelimit-remaining: 1", "x-ratelimit-reset: 60"]
    {
        assert!(has_line(&admitted, line), "{admitted}");
    }
    assert_eq!(status(&once(gate.api, report(Some("alice"), 1)).await), 200);
    // The refusal of her own limit leaves that of all users as it was.
    gate.clock.advance(Span::from_secs(1));
    for _ in 0..3 {
        let refused = once(gate.api, report(Some("alice"), 1)).await;
        assert_eq!((status(&refused), body(&refused)), (429, "null"));
        assert!(has_line(&refused, "retry-after: 59"), "{refused}");
    }
    assert_eq!(counters(&gate).await[0]["remaining"], 3);
    // And that of all users leaves a user's own.
    assert_eq!(status(&once(gate.api, report(Some("bob"), 2)).await), 200);
    assert_eq!(status(&once(gate.api, report(Some("carol"), 2)).await), 429);
    assert_eq!(status(&once(gate.api, report(Some("carol"), 1)).await), 200);
    gate.clock.advance(Span::from_secs(59));
    assert_eq!(status(&once(gate.api, report(Some("carol"), 2)).await), 429, "she has one in this window");
    assert_eq!(status(&once(gate.api, report(Some("carol"), 1)).await), 200);
}

#[tokio::test]
async fn checks_count_nothing_and_reports_refuse_nothing() {
    let (gate, _) = serve("").await;
    for _ in 0..9 {
        let checked = once(gate.api, post("/check", &asked(Some("alice"), 2))).await;
        assert_eq!((status(&checked), body(&checked)), (200, "null"));
    }
    assert_eq!(counters(&gate).await, json!([]));
    for _ in 0..9 {
        assert_eq!(status(&once(gate.api, post("/report", &asked(Some("alice"), 1))).await), 200);
    }
    assert_eq!(status(&once(gate.api, post("/check", &asked(Some("alice"), 1))).await), 429);
    assert_eq!(status(&once(gate.api, post("/check", &asked(None, 1))).await), 429);
    for other in [
        json!({ "namespace": "unknown", "values": {}, "delta": 1 }),
        json!({ "namespace": "shop", "values": {}, "delta": 1 }),
    ] {
        assert_eq!(status(&once(gate.api, post("/check_and_report", &other.to_string())).await), 200, "{other}");
    }
}

#[tokio::test]
async fn a_report_fills_a_limit_at_most() {
    let (gate, _) = serve("").await;
    for (delta, remaining) in [(3, 2), (4, 0), (4, 0)] {
        assert_eq!(status(&once(gate.api, post("/report", &asked(None, delta))).await), 200);
        assert_eq!(counters(&gate).await[0]["remaining"], remaining);
    }
    assert_eq!(status(&once(gate.api, post("/check", &asked(None, 1))).await), 429);
    assert_eq!(status(&once(gate.api, post("/report", &asked(Some("alice"), 5000))).await), 200);
    gate.clock.advance(Span::from_secs(59));
    assert_eq!(status(&once(gate.api, post("/check", &asked(Some("alice"), 1))).await), 429);
}

#[tokio::test]
async fn limits_and_counters_of_a_namespace_are_listed() {
    let (gate, _) = serve("").await;
    let listed = parsed(&once(gate.api, get("/limits/shop")).await);
    let first = json!({
        "id": null, "namespace": "shop", "max_value": 5, "seconds": 60, "name": "reads",
        "conditions": ["descriptors[0]['req.method'] == 'GET'"], "variables": [],
    });
    assert_eq!((&listed[0], listed.as_array().unwrap().len()), (&first, 2));
    assert_eq!(parsed(&once(gate.api, get("/limits/sh%6Fp")).await), listed);
    assert_eq!(parsed(&once(gate.api, get("/limits/other")).await), json!([]));
    once(gate.api, post("/report", &asked(None, 2))).await;
    let counter = json!({ "limit": first, "set_variables": {}, "remaining": 3, "expires_in_seconds": 60 });
    assert_eq!(counters(&gate).await, json!([counter]));
    assert_eq!(status(&once(gate.api, get("/status")).await), 200);
}

#[tokio::test]
async fn one_count_for_all_interfaces_of_limitador() {
    let (gate, address) = serve("").await;
    let client = connect(address).await;
    let entries = [("req.method", "GET"), ("user", "alice")];
    let shop = RateLimitRequest { domain: "shop".to_owned(), ..request([descriptor(&entries), descriptor(&[])]) };
    assert_eq!(status(&once(gate.api, post("/check_and_report", &asked(Some("alice"), 1))).await), 200);
    let admitted = ask(&client, &shop).await.unwrap();
    let told = |status: &DescriptorStatus| (status.code(), status.limit_remaining);
    let statuses: Vec<_> = admitted.statuses.iter().map(told).collect();
    assert_eq!((admitted.overall_code(), &*statuses), (Code::Ok, &[(Code::Ok, 0); 2][..]));
    let refused = ask(&client, &shop).await.unwrap();
    assert_eq!((refused.overall_code(), header(&refused, "retry-after")), (Code::OverLimit, Some("60")));
    // A single descriptor's own hits.
    for (hits, is_negative_hits, code, remaining) in [
        (Some(2), true, Code::Ok, 2),
        (Some(0), false, Code::Ok, 2),
        (Some(2), false, Code::Ok, 0),
        (Some(3), false, Code::OverLimit, 0),
    ] {
        let one = Descriptor { hits_addend: hits, is_negative_hits, ..descriptor(&entries) };
        let shop = RateLimitRequest { domain: "shop".to_owned(), ..request([one]) };
        let told = ask(&client, &shop).await.unwrap();
        assert_eq!((told.overall_code(), told.statuses[0].limit_remaining), (code, remaining), "{hits:?}");
    }
    let by_action = json!({ "action": "shop.per-60s", "key": "alice" }).to_string();
    assert_eq!(status(&once(gate.api, post("/v1/check", &by_action)).await), 429);
    assert_eq!(counters(&gate).await[0]["remaining"], 3);
}

#[tokio::test]
async fn throttle_answers_as_throttlecrab() {
    let (gate, _) = serve("").await;
    let ask = |quantity: Option<i64>| {
        let mut asked = json!({ "key": "user:123", "max_burst": 2, "count_per_period": 1, "period": 10 });
        if let Some(quantity) = quantity {
            asked["quantity"] = quantity.into();
        }
        post("/throttle", &asked.to_string())
    };
    for (quantity, expected) in [
        (None, r#"{"allowed":true,"limit":2,"remaining":1,"reset_after":10,"retry_after":0}"#),
        (Some(1), r#"{"allowed":true,"limit":2,"remaining":0,"reset_after":20,"retry_after":0}"#),
        (Some(1), r#"{"allowed":false,"limit":2,"remaining":0,"reset_after":20,"retry_after":10}"#),
        (Some(3), r#"{"allowed":false,"limit":2,"remaining":0,"reset_after":20,"retry_after":20}"#),
        (Some(0), r#"{"allowed":true,"limit":2,"remaining":0,"reset_after":20,"retry_after":0}"#),
        (Some(-1), r#"{"allowed":true,"limit":2,"remaining":1,"reset_after":10,"retry_after":0}"#),
        (Some(-9), r#"{"allowed":true,"limit":2,"remaining":2,"reset_after":0,"retry_after":0}"#),
    ] {
        let answer = once(gate.api, ask(quantity)).await;
        assert_eq!((status(&answer), body(&answer)), (200, expected), "{quantity:?}");
    }
    let health = once(gate.api, get("/health")).await;
    assert_eq!((status(&health), body(&health)), (200, "OK"));
}

#[tokio::test]
async fn wrong_questions_are_refused_and_paths_are_off() {
    let (gate, _) = serve("").await;
    for (path, question, part) in [
        ("/throttle", r#"{"key":"a"}"#, "missing field `max_burst`"),
        ("/throttle", r#"{"key":"a","max_burst":-1,"count_per_period":1,"period":1}"#, "`max_burst` is negative"),
        ("/throttle", r#"{"key":"a","max_burst":1,"count_per_period":0,"period":1}"#, "message"),
        ("/check", "{", "the body isn't a valid request"),
        ("/throttle", r#"["a",1,1,1,1]"#, "the body is no JSON object"),
        ("/check", r#"{"namespace":"shop","values":{"a":1},"delta":1}"#, "expected a string"),
        ("/check_and_report", r#"{"namespace":"shop","values":{"req.method":"GET"},"delta":9999999999999}"#, "cost"),
    ] {
        let answer = once(gate.api, post(path, question)).await;
        assert!(status(&answer) == 400 && body(&answer).contains(part), "{path} {question}: {answer}");
    }
    let method = once(gate.api, get("/throttle")).await;
    assert!(status(&method) == 405 && has_line(&method, "allow: POST"), "{method}");
    let off = start(nobody(), "").await;
    let answer = once(off.api, post("/throttle", "{}")).await;
    assert!(status(&answer) == 404 && body(&answer).contains("api.compat"), "{answer}");
}
