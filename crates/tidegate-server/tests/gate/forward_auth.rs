//! Forward-auth with the requests of nginx, Traefik, Caddy and Envoy.

use crate::common::{Peer, body, capture, get, header, json, nobody, once, start, status, undated};

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

/// Caddy asks with its client's target if that is no path, such as `x:http://localhost/v1/openapi.json`.
#[tokio::test]
async fn a_client_cannot_choose_the_path_of_a_question() {
    let gate = start(nobody(), FILE).await;
    let described = "x-forwarded-method: GET\r\nx-forwarded-uri: x:http://localhost/v1/openapi.json\r\n";
    for target in ["/v1/openapi.json", "http://localhost/v1/openapi.json", "http://localhost/v1/auth?action=account"] {
        let ask = async |lines| {
            let request = format!("GET {target} HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n");
            Peer::connect(gate.api).await.ask(request).await
        };
        let asked = ask(described).await;
        assert_eq!(status(&asked), 400, "{target}: {asked}");
        if target.ends_with("json") {
            assert_eq!(status(&ask("").await), 200, "{target}");
        }
    }
    let page = once(gate.admin, get("/metrics")).await;
    assert!(page.contains("tidegate_rejections_total{reason=\"question\"} 3\n"), "{page}");
}

/// nginx and Caddy pass raw letters on.
#[tokio::test]
async fn letters_beyond_ascii_are_judged() {
    let gate = start(nobody(), &format!("{FILE}[inbound.global]\nlimit = \"2 per 1h\"\n")).await;
    let mut front = Peer::connect(gate.api).await;
    for expected in [200, 200, 429] {
        let asked = front.ask(ask(&["x-forwarded-method: GET", "x-forwarded-uri: /\u{e9}"])).await;
        assert_eq!(status(&asked), expected, "{asked}");
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
async fn the_query_names_actions_headers_give_keys() {
    let gate = start(nobody(), FILE).await;
    let ask = |tenant: &str| format!("GET /v1/auth?action=tenant HTTP/1.1\r\nhost: gate\r\nx-tenant: {tenant}\r\n\r\n");
    assert_eq!(status(&once(gate.api, ask("a")).await), 200);
    assert_eq!(status(&once(gate.api, ask("b")).await), 200);
    assert_eq!(status(&once(gate.api, ask("a")).await), 429);
    // The same with any method of the front server.
    let mut front = Peer::connect(gate.api).await;
    let post = "POST /v1/auth?action=tenant HTTP/1.1\r\nhost: gate\r\nx-tenant: c\r\ncontent-length: 2\r\n\r\n{}";
    assert_eq!(status(&front.ask(post).await), 200);
    assert_eq!(status(&front.ask(post).await), 429);
}

/// A front server may pass on its client's query string, as Caddy does, or ask with one of its own.
#[tokio::test]
async fn a_clients_query_evades_no_action() {
    let about = |query: &str, uri: &str| {
        format!(
            "GET /v1/auth?{query} HTTP/1.1\r\nhost: gate\r\nx-tenant: a\r\nx-forwarded-proto: http\r\n\
             x-forwarded-method: POST\r\nx-forwarded-uri: {uri}\r\n\r\n"
        )
    };
    for (query, uri, expected, charged) in [
        // The client may have written the name.
        ("action=tenant", "/login?action=tenant", 400, None),
        ("action=tenant", "/login?action=tenant#x", 400, None),
        ("action=tenant", "/login?a&%61ction=tenant", 400, None),
        ("action=tenant", "/login?a;action=tena%6Et", 400, None),
        ("action=login&action=tenant", "/other?action=login", 400, None),
        ("action=nothing", "/login?action=nothing", 400, None),
        // The front server has written it.
        ("action=login", "/other?action=tenant", 200, Some("login")),
        ("action=tenant", "/login?a=1", 200, Some("tenant")),
        ("action=tenant", "/login?transaction=tenant", 200, Some("tenant")),
        ("action=tenant", "/login?action=tenants", 200, Some("tenant")),
        ("action=nothing", "/login?action=login", 404, None),
        ("action=busy", "/login?action=login", 400, None),
        ("action=login&action=tenant", "/other?action=other", 400, None),
        ("actions=tenant", "/login", 200, Some("login")),
    ] {
        let gate = start(nobody(), FILE).await;
        assert_eq!(status(&once(gate.api, about(query, uri)).await), expected, "{query} {uri}");
        for action in ["login", "tenant"] {
            let left = get(&format!("/v1/status?action={action}&ip=127.0.0.1&header:x-tenant=a"));
            let expected = if charged == Some(action) { 0 } else { 1 };
            assert_eq!(json(&once(gate.api, left).await)["remaining"], expected, "{query} {uri}: {action}");
        }
    }
}

/// Envoy's `ext_authz` over HTTP sends the original method, Host and path behind `path_prefix`, no body, the allowed
/// headers, and at the end of `x-forwarded-for` its own address.
fn envoy(method: &str, path: &str, lines: &str) -> String {
    format!(
        "{method} /v1/auth{path} HTTP/1.1\r\nhost: app.example\r\ncontent-length: 0\r\n{lines}\
         x-forwarded-for: 203.0.113.1,127.0.0.1\r\nx-envoy-internal: true\r\n\
         x-envoy-expected-rq-timeout-ms: 200\r\n\r\n"
    )
}

#[tokio::test]
async fn a_path_of_envoy_is_judged() {
    let file = "[inbound]\ntrusted_proxies = [\"127.0.0.0/8\"]\n\
        [inbound.action.login]\nmatch = { method = \"POST\", path = \"/login\", host = \"app.example\" }\n\
        key = [\"client_ip\", \"query:user\"]\nlimit = \"1 per 60s\"\n\
        [inbound.action.reading]\nlimit = \"0 per 60s\"\n";
    for path in [
        "/login",
        "//login",
        "/./login",
        "/x/../login",
        "/x%2f../login",
        "/%6cogin",
        "/login/",
        "/login;x",
        "/..//login",
        "//app.example/login",
        "/http://app.example/../../login",
    ] {
        let gate = start(nobody(), file).await;
        let mut front = Peer::connect(gate.api).await;
        let asked = front.ask(envoy("POST", "/login?user=a", "")).await;
        assert_eq!((status(&asked), header(&asked, "ratelimit")), (200, Some("\"login\";r=0;t=60")));
        let refused = front.ask(envoy("POST", &format!("{path}?user=a"), "")).await;
        assert_eq!((status(&refused), header(&refused, "retry-after")), (429, Some("60")), "{path}");
        assert_eq!(status(&front.ask(envoy("POST", &format!("{path}?user=b"), "")).await), 200, "{path}");
    }
    let gate = start(nobody(), file).await;
    for (method, path) in [("GET", "/login"), ("POST", "/"), ("POST", "/reading"), ("POST", "/other?action=reading")] {
        let asked = once(gate.api, envoy(method, path, "")).await;
        assert_eq!((status(&asked), header(&asked, "ratelimit")), (200, None), "{method} {path}");
    }
    for lines in ["x-forwarded-uri: /other\r\n", "x-original-uri: /login?\r\n", "x-forwarded-method: GET\r\n"] {
        let answer = once(gate.api, envoy("POST", "/login", lines)).await;
        assert_eq!(status(&answer), 400, "{lines}{answer}");
        assert!(body(&answer).contains("/v1/auth?action=NAME"), "{answer}");
    }
    let absolute = envoy("POST", "/login", "").replace("/v1/", "http://other.example/v1/");
    assert_eq!(status(&once(gate.api, absolute).await), 400);
}

#[tokio::test]
async fn an_action_name_as_path_is_logged_once() {
    let (lines, _guard) = capture("text");
    let gate = start(nobody(), FILE).await;
    let told = |lines: &crate::common::Lines| lines.text().matches("ask at /v1/auth?action=tenant").count();
    assert_eq!(status(&once(gate.api, envoy("POST", "/login", "")).await), 200);
    assert_eq!(status(&once(gate.api, envoy("GET", "/tenants", "")).await), 200);
    assert_eq!(told(&lines), 0, "{}", lines.text());
    assert_eq!(status(&once(gate.api, envoy("GET", "/tenant", "")).await), 200);
    assert_eq!(status(&once(gate.api, envoy("GET", "/tenant", "x-forwarded-uri: /login\r\n")).await), 400);
    assert_eq!(told(&lines), 1, "{}", lines.text());
}

#[tokio::test]
async fn a_status_that_nginx_rejects_is_logged() {
    let old_nginx = |lines: &[&str]| ask(lines).replace("HTTP/1.1", "HTTP/1.0");
    let proto = ["x-forwarded-proto: https", "x-forwarded-method: POST", "x-forwarded-uri: /login"];
    let original = ["x-forwarded-proto: https", "x-original-method: POST", "x-original-uri: /login"];
    for (question, deny_status, is_told) in [
        (ask(&proto[1..]), 429, true),
        (ask(&original), 429, true),
        (old_nginx(&proto), 429, true),
        (ask(&proto), 429, false),
        (envoy("POST", "/login", ""), 429, false),
        (ask(&proto[1..]), 403, false),
        (ask(&proto[1..]), 401, false),
    ] {
        let (lines, _guard) = capture("text");
        let gate = start(nobody(), &format!("{FILE}[api]\ndeny_status = {deny_status}\n")).await;
        let statuses = [&question, &question, &question].map(|question| once(gate.api, question));
        for (answer, expected) in statuses.into_iter().zip([200, deny_status, deny_status]) {
            assert_eq!(status(&answer.await), expected, "{question}");
        }
        let count = lines.text().matches("set api.deny_status = 403").count();
        assert_eq!(count, usize::from(is_told), "{question}{}", lines.text());
    }
}

#[tokio::test]
async fn undecidable_requests_state_the_reason() {
    let gate = start(nobody(), FILE).await;
    for (request, expected, says) in [
        (get("/v1/auth"), 400, "X-Forwarded-Method and X-Forwarded-Uri"),
        (ask(&["x-original-uri: /login"]), 400, "X-Forwarded-Method"),
        (ask(&["x-forwarded-method: GET", "x-forwarded-uri: /a", "x-original-uri: /login"]), 400, "different requests"),
        (ask(&["x-forwarded-method: GET", "x-forwarded-uri: /a", "x-forwarded-uri: /b"]), 400, "twice"),
        (get("/v1/auth?action=busy"), 400, "calls in flight"),
        (get("/v1/auth?action=account"), 400, "`key` is missing"),
        (get("/v1/auth?action=logn"), 404, "did you mean \\\"login\\\"?"),
        (get("/v1/auth?actions=login"), 400, "/v1/auth?action=NAME"),
        (get("/v1/auth?action=login&action=tenant"), 400, "more than one action"),
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
        for request in [ask(&["x-forwarded-method: GET", "x-forwarded-uri: /"]), get("/v1/auth?action=busy")] {
            let answer = once(gate.api, request).await;
            assert_eq!(status(&answer), 404, "{file}{answer}");
            assert!(json(&answer)["message"].as_str().unwrap().starts_with("forward-auth is off: "), "{answer}");
        }
    }
}
