//! Forward-auth with the requests of nginx, Traefik and Caddy.

use crate::common::{Peer, body, get, header, json, nobody, once, start, status, undated};

const FILE: &str = r#"
    [inbound]
    trusted_proxies = ["127.0.0.0/8"]
    [inbound.action.login]
    match = { method = "POST", path = "/login" }
    limit = "1 per 60s"
    penalty = { base = "2s", cap = "1h" }
    [inbound.action.tenant]
    key = ["header:x-tenant"]
    limit = "1 per 60s"
    [inbound.action.busy]
    limit = "1 in flight"
    [inbound.action.account]
    key = ["key"]
    limit = "1 per 60s"
"#;

fn ask(lines: &[&str]) -> String {
    let lines: String = lines.iter().map(|line| format!("{line}\r\n")).collect();
    format!("GET /v1/auth HTTP/1.1\r\nhost: gate\r\n{lines}\r\n")
}

#[tokio::test]
async fn each_front_server_style_is_answered() {
    for style in [
        &[
            "x-forwarded-method: POST",
            "x-forwarded-proto: https",
            "x-forwarded-host: a",
            "x-forwarded-uri: /login?x=1",
            "x-forwarded-for: 203.0.113.1",
        ][..],
        &["x-original-method: POST", "x-original-uri: /login", "x-forwarded-for: 203.0.113.1"],
        &["x-original-method: POST", "x-original-url: https://a/login", "x-forwarded-for: 203.0.113.1"],
    ] {
        let gate = start(nobody(), FILE).await;
        let mut front = Peer::connect(gate.api).await;
        assert_eq!(
            undated(&front.ask(ask(style)).await),
            "HTTP/1.1 200 OK\r\nratelimit-policy: \"login\";q=1;w=60\r\nratelimit: \"login\";r=0;t=60\r\ncontent-length: 0\r\n\r\n"
        );
        assert_eq!(
            undated(&front.ask(ask(style)).await),
            "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 2\r\n\
             ratelimit-policy: \"login\";q=1;w=60\r\nratelimit: \"login\";r=0;t=2\r\ncontent-length: 86\r\n\r\n\
             {\"error\":\"Too many requests\",\"retry_after\":2,\"next_allowed_at\":\"2026-01-01 00:00:02Z\"}"
        );
        let mut other: Vec<&str> = style.to_vec();
        other.retain(|line| !line.starts_with("x-forwarded-for"));
        other.push("x-forwarded-for: 203.0.113.2");
        assert_eq!(status(&front.ask(ask(&other)).await), 200, "another client");
        assert_eq!(status(&front.ask(ask(&["x-forwarded-method: GET", "x-forwarded-uri: /login"])).await), 200);
    }
}

#[tokio::test]
async fn the_status_of_a_refusal_is_configurable() {
    let gate = start(nobody(), &format!("{FILE}[api]\ndeny_status = 403\n")).await;
    let login = ask(&["x-original-method: POST", "x-original-uri: /login"]);
    assert_eq!(status(&once(gate.api, &login).await), 200);
    let refused = once(gate.api, &login).await;
    assert_eq!((status(&refused), header(&refused, "retry-after")), (403, Some("2")));
    assert!(body(&refused).contains("Too many requests"));
    let problem =
        format!("{}accept: application/problem+json\r\n\r\n", login.trim_end_matches("\r\n").to_owned() + "\r\n");
    assert_eq!(header(&once(gate.api, problem).await, "content-type"), Some("application/problem+json"));
    let denied = start(nobody(), "[inbound]\ndeny = [\"127.0.0.1\"]\n[api]\ndeny_status = 401\n").await;
    assert_eq!(status(&once(denied.api, ask(&["x-forwarded-method: GET", "x-forwarded-uri: /"])).await), 403);
}

#[tokio::test]
async fn the_path_names_actions_headers_give_keys() {
    let gate = start(nobody(), FILE).await;
    let ask =
        |tenant: &str| format!("GET /v1/auth/tenant?action=login HTTP/1.1\r\nhost: gate\r\nx-tenant: {tenant}\r\n\r\n");
    assert_eq!(status(&once(gate.api, ask("a")).await), 200);
    assert_eq!(status(&once(gate.api, ask("b")).await), 200);
    assert_eq!(status(&once(gate.api, ask("a")).await), 429);
    // The client's query string, which Caddy passes on, selects no action.
    let query = "GET /v1/auth?action=tenant HTTP/1.1\r\nhost: gate\r\nx-forwarded-method: POST\r\nx-forwarded-uri: /login?action=tenant\r\n\r\n";
    assert_eq!(header(&once(gate.api, query).await, "ratelimit"), Some("\"login\";r=0;t=60"));
    // The same with any method of the front server.
    let mut front = Peer::connect(gate.api).await;
    let post = "POST /v1/auth/tenant HTTP/1.1\r\nhost: gate\r\nx-tenant: c\r\ncontent-length: 2\r\n\r\n{}";
    assert_eq!(status(&front.ask(post).await), 200);
    assert_eq!(status(&front.ask(post).await), 429);
}

#[tokio::test]
async fn undecidable_requests_state_the_reason() {
    let gate = start(nobody(), FILE).await;
    for (request, expected, says) in [
        (get("/v1/auth"), 400, "X-Forwarded-Method and X-Forwarded-Uri"),
        (ask(&["x-original-uri: /login"]), 400, "X-Forwarded-Method"),
        (ask(&["x-forwarded-method: GET", "x-forwarded-uri: /a", "x-original-uri: /login"]), 400, "different requests"),
        (ask(&["x-forwarded-method: GET", "x-forwarded-uri: /a", "x-forwarded-uri: /b"]), 400, "twice"),
        (get("/v1/auth/busy"), 400, "calls in flight"),
        (get("/v1/auth/account"), 400, "`key` is missing"),
        (get("/v1/auth/logn"), 404, "did you mean \\\"login\\\"?"),
        (get("/v1/auth?action=login"), 400, "/v1/auth/NAME"),
        (get("/v1/author"), 404, "no such path"),
    ] {
        let answer = once(gate.api, &request).await;
        assert_eq!(status(&answer), expected, "{request}{answer}");
        assert!(body(&answer).contains(says), "{request}{answer}");
        assert!(json(&answer)["message"].is_string());
    }
}

#[tokio::test]
async fn forward_auth_is_off_with_in_flight_limits() {
    for file in [
        "[api]\nforward_auth = false\n",
        "[inbound.action.busy]\nmatch = { path = \"/busy\" }\nlimit = \"1 in flight\"\n",
        "[inbound.global]\nlimit = \"1 in flight\"\n",
    ] {
        let gate = start(nobody(), file).await;
        for request in [ask(&["x-forwarded-method: GET", "x-forwarded-uri: /"]), get("/v1/auth/busy")] {
            let answer = once(gate.api, request).await;
            assert_eq!(status(&answer), 404, "{file}{answer}");
            assert!(json(&answer)["message"].as_str().unwrap().starts_with("forward-auth is off: "), "{answer}");
        }
    }
}
