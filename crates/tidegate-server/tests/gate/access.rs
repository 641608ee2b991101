//! Requests of web pages to the API and the admin listener.

use serde_json::json;

use crate::common::{Running, capture, get, json as parsed, nobody, once, policy, post, start, status, try_start};

const FILE: &str = "[inbound.action.login]\nlimit = \"5 per 60s\"\n";
const ABOUT: &str = r#"{"action":"login","ip":"203.0.113.7"}"#;
/// The original request in a request to `/v1/auth`.
const FORWARDED: &str = "x-forwarded-method: GET\r\nx-forwarded-uri: /\r\n";

fn request(method: &str, path: &str, lines: &str, body: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\n{lines}content-length: {}\r\n\r\n{body}", body.len())
}

async fn used(gate: &Running) -> serde_json::Value {
    parsed(&once(gate.api, get("/v1/explain?action=login&ip=203.0.113.7")).await)["limits"][0]["used"].clone()
}

/// Header lines of requests, and the status for them: an error if they may come from a foreign web page.
fn lines() -> Vec<(String, u16)> {
    let host = |lines: &str| format!("host: 127.0.0.1:8082\r\n{lines}");
    vec![
        (host("origin: https://evil.example\r\nsec-fetch-site: cross-site\r\ncontent-type: text/plain\r\n"), 403),
        (host("origin: https://evil.example\r\n"), 403),
        (host("origin: null\r\n"), 403),
        (host("origin: http://127.0.0.1:8080\r\nsec-fetch-site: same-site\r\n"), 403),
        (host("origin: http://127.0.0.2:8082\r\n"), 403),
        (host("sec-fetch-site: cross-site\r\n"), 403),
        (host("sec-fetch-site: same-site\r\n"), 403),
        ("host: evil.example\r\n".to_owned(), 421),
        (
            "host: evil.example:8082\r\norigin: http://evil.example:8082\r\nsec-fetch-site: same-origin\r\n".to_owned(),
            421,
        ),
        ("host: 127.0.0.1.evil.example\r\n".to_owned(), 421),
        ("host: localhost\r\nhost: evil.example\r\n".to_owned(), 421),
        (host(""), 200),
        // As `curl -d` sends it.
        (host("accept: */*\r\ncontent-type: application/x-www-form-urlencoded\r\n"), 200),
        ("host: [::1]:8082\r\n".to_owned(), 200),
        ("host: LocalHost\r\n".to_owned(), 200),
        ("host: gate.test\r\norigin: http://gate.test:3000\r\nsec-fetch-site: same-site\r\n".to_owned(), 200),
        (host("origin: http://127.0.0.1:8082\r\nsec-fetch-site: same-origin\r\n"), 200),
        (host("sec-fetch-site: none\r\n"), 200),
    ]
}

#[tokio::test]
async fn web_pages_can_neither_reset_nor_read() {
    let gate = start(nobody(), FILE).await;
    for (lines, expected) in lines() {
        assert_eq!(status(&once(gate.api, post("/v1/check", ABOUT)).await), 200);
        let answer = once(gate.api, request("POST", "/v1/reset", &lines, ABOUT)).await;
        assert_eq!(status(&answer), expected, "{lines}");
        assert_eq!(used(&gate).await, json!(if expected == 200 { 0 } else { 1 }), "{lines}");
        if expected != 200 {
            assert!(parsed(&answer)["message"].as_str().unwrap().contains("api.hosts names"), "{answer}");
            once(gate.api, post("/v1/reset", ABOUT)).await;
        }
        for path in ["/v1/explain?action=login&ip=203.0.113.7", "/v1/status?action=login&ip=203.0.113.7"] {
            let answer = once(gate.api, request("GET", path, &lines, "")).await;
            assert_eq!(status(&answer), expected, "{lines}");
            assert_eq!(answer.contains("remaining"), expected == 200, "{answer}");
        }
        let answer = once(gate.api, request("OPTIONS", "/v1/reset", &lines, "")).await;
        assert_eq!(status(&answer), if expected == 200 { 405 } else { expected }, "{lines}");
        assert_eq!(status(&once(gate.admin, request("GET", "/readyz", &lines, "")).await), expected, "{lines}");
    }
    assert_eq!(
        status(
            &once(gate.api, format!("POST /v1/reset HTTP/1.0\r\ncontent-length: {}\r\n\r\n{ABOUT}", ABOUT.len())).await
        ),
        200
    );
}

#[tokio::test]
async fn rejected_web_pages_are_counted_and_logged() {
    let (log, _guard) = capture("text");
    let gate = start(nobody(), FILE).await;
    let page = "host: localhost\r\norigin: https://evil.example\r\n";
    for _ in 0..2 {
        assert_eq!(status(&once(gate.api, request("POST", "/v1/reset", page, ABOUT)).await), 403);
    }
    assert_eq!(status(&once(gate.admin, request("GET", "/readyz?x", "host: evil.example\r\n", "")).await), 421);
    let text = log.text();
    let rejected: Vec<&str> = text.lines().filter(|line| line.contains("rejected reason=")).collect();
    assert_eq!(rejected.len(), 3, "{text}");
    assert!(rejected[1].contains("\"web_page\"") && rejected[1].contains("total=2"), "{text}");
    assert!(rejected[1].contains("ip=127.0.0.1") && rejected[1].contains("path=/v1/reset"), "{text}");
    assert!(rejected[2].contains("\"foreign_host\"") && rejected[2].contains("host=evil.example"), "{text}");
    assert!(rejected[2].contains("admin.hosts") && rejected[2].contains("path=/readyz "), "{text}");
}

#[tokio::test]
async fn forward_auth_accepts_browser_headers() {
    let gate = start(nobody(), FILE).await;
    for (lines, _) in lines() {
        if lines.matches("host: ").count() > 1 {
            continue;
        }
        for path in ["/v1/auth", "/v1/auth?action=login"] {
            let answer = once(gate.api, request("GET", path, &format!("{lines}{FORWARDED}"), "")).await;
            assert!([200, 429].contains(&status(&answer)), "{path} {lines}: {answer}");
        }
    }
    for path in ["/v1/authx", "/v1/auth%2f", "/v1/AUTH", "/v1/auth/../reset"] {
        let asked = request("POST", path, "host: evil.example\r\n", ABOUT);
        // A question about a request to /../reset.
        let expected = if path.starts_with("/v1/auth/") { 200 } else { 421 };
        assert_eq!(status(&once(gate.api, asked).await), expected, "{path}");
    }
}

#[tokio::test]
async fn a_token_makes_origin_checks_unnecessary() {
    let file = format!("[api]\ntoken = \"env:API\"\n[admin]\ntoken = \"env:ADMIN\"\n{FILE}");
    let gate = try_start(&policy(nobody(), &file), |name| Some(name.to_lowercase())).unwrap();
    for (lines, _) in lines() {
        let shown = format!("{lines}authorization: Bearer api\r\n");
        assert_eq!(status(&once(gate.api, request("POST", "/v1/reset", &shown, ABOUT)).await), 200, "{lines}");
        assert_eq!(status(&once(gate.api, request("POST", "/v1/reset", &lines, ABOUT)).await), 401, "{lines}");
        assert_eq!(status(&once(gate.api, request("GET", "/v1/auth", &lines, "")).await), 401, "{lines}");
        let shown = format!("{lines}x-tidegate-token: admin\r\n");
        assert_eq!(status(&once(gate.admin, request("GET", "/v1/state", &shown, "")).await), 200, "{lines}");
        assert_eq!(status(&once(gate.admin, request("GET", "/v1/state", &lines, "")).await), 401, "{lines}");
    }
}
