//! Paths and hosts that servers read in different ways, through the proxy, forward-auth and the decision API.

use serde_json::json as value;

use crate::common::{Echo, HELLO, body, capture, get, header, json, nobody, once, post, start, status};

const FILE: &str = r#"
    [inbound]
    trusted_proxies = ["127.0.0.0/8"]
    [inbound.global]
    limit = "1000 per 1h"
    [inbound.action.static]
    match = { path = "/static/*" }
    limit = "500 per 1h"
    [inbound.action.login]
    match = { path = "/login" }
    limit = "5 per 1h"
    [inbound.action.hosted]
    match = { path = "/vhost", host = "example.org" }
    limit = "5 per 1h"
    [inbound.action.pages]
    match = { path = "/pages/*" }
    key = ["client_ip", "path"]
    limit = "2 per 1h"
"#;

fn asked(path: &str) -> String {
    format!(
        "GET /v1/auth HTTP/1.1\r\nhost: gate\r\nx-forwarded-method: GET\r\nx-forwarded-uri: {path}\r\n\
         x-forwarded-host: a\r\nx-forwarded-for: 203.0.113.1\r\n\r\n"
    )
}

#[tokio::test]
async fn a_path_is_charged_under_every_reading() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, FILE).await;
    let both = "/static%2fx/../login";
    let answer = once(gate.inbound, get(both)).await;
    assert_eq!(header(&answer, "ratelimit"), Some("\"login\";r=4;t=3600"), "{answer}");
    // The first policy is that of the action with the least left in its limit.
    assert_eq!(header(&answer, "ratelimit-policy"), Some("\"login\";q=5;w=3600, \"global\";q=1000;w=3600"), "{answer}");
    let explained = json(&once(gate.api, get("/v1/explain?path=/static/..//login&ip=127.0.0.1")).await);
    assert_eq!((&explained["action"], &explained["also"]), (&value!("login"), &value!(["static"])), "{explained}");
    let limits = explained["limits"].as_array().unwrap();
    let used: Vec<_> = limits.iter().map(|limit| (limit["name"].as_str().unwrap(), limit["used"].as_u64())).collect();
    assert_eq!(used, [("login", Some(1)), ("global", Some(1)), ("static", Some(1))], "all of them once");
    for _ in 0..4 {
        assert_eq!(status(&once(gate.inbound, get(both)).await), 200);
    }
    let refused = once(gate.inbound, get(both)).await;
    assert_eq!(status(&refused), 429, "{refused}");
    let left = json(&once(gate.api, get("/v1/status?path=/static/x&ip=127.0.0.1")).await);
    assert_eq!(left["remaining"], value!(495), "who is refused is charged nothing: {left}");
    assert_eq!(upstream.seen().len(), 5);
    assert!(upstream.seen().iter().all(|seen| seen.starts_with("GET /static%2fx/../login HTTP/1.1\r\n")));
}

#[tokio::test]
async fn path_spellings_give_no_fresh_count() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, FILE).await;
    for spelling in ["/pages/1", "/pages/x/../%31"] {
        assert_eq!(status(&once(gate.inbound, get(spelling)).await), 200);
    }
    for spelling in ["/pages/1", "/pages//1", "/pages/1;v=2", "/pages/%2531", "/pages/a%2fb/../1", "/pages/a%2f../1/"] {
        assert_eq!(status(&once(gate.inbound, get(spelling)).await), 429, "{spelling}");
    }
    assert_eq!(status(&once(gate.inbound, get("/pages/2?x=/pages/1")).await), 200);
}

#[tokio::test]
async fn ambiguous_paths_are_refused_if_configured() {
    let (lines, _guard) = capture("text");
    let upstream = Echo::start(HELLO).await;
    let file = FILE.replacen("[inbound]", "[api]\ndeny_status = 403\n[inbound]\nambiguous_paths = \"refuse\"", 1);
    let gate = start(upstream.address, &file).await;
    let path = "/static/../login";
    let refused = once(gate.inbound, get(path)).await;
    assert_eq!(status(&refused), 400, "{refused}");
    assert!(body(&refused).contains("send its plain form"), "{refused}");
    assert_eq!(header(&refused, "connection"), None, "the connection goes on");
    assert_eq!(status(&once(gate.api, asked(path)).await), 403, "nginx would make a 500 of a 400");
    let answer = once(gate.api, post("/v1/check", &value!({ "path": path, "ip": "203.0.113.1" }).to_string())).await;
    assert_eq!((status(&answer), &json(&answer)["field"]), (400, &value!("path")), "{answer}");
    let answer = once(gate.api, get(&format!("/v1/status?path={path}&ip=203.0.113.2"))).await;
    assert_eq!((status(&answer), &json(&answer)["field"]), (400, &value!("path")), "{answer}");
    for fine in ["/static/a%20b", "/login/", "/x//y"] {
        assert_eq!(status(&once(gate.inbound, get(fine)).await), 200, "{fine}");
        assert_eq!(status(&once(gate.api, asked(fine)).await), 200, "{fine}");
    }
    let text = lines.text();
    let rejected: Vec<&str> = text.lines().filter(|line| line.contains("rejected reason=\"ambiguous_path\"")).collect();
    assert_eq!(rejected.len(), 4, "{text}");
    assert!(rejected[0].contains("total=1") && rejected[0].contains("path=/static/../login"), "{text}");
    assert!(rejected[1].contains("total=2") && rejected[1].contains("ip=203.0.113.1"), "{text}");
    assert!(rejected[2].contains("total=3") && rejected[2].contains("path=/static/../login"), "{text}");
    assert!(rejected[3].contains("total=4") && rejected[3].contains("ip=203.0.113.2"), "{text}");
}

#[tokio::test]
async fn paths_are_forwarded_normalised_if_configured() {
    let upstream = Echo::start(HELLO).await;
    let file = FILE.replacen("[inbound]", "[inbound]\nambiguous_paths = \"normalise\"", 1);
    let gate = start(upstream.address, &file).await;
    for (sent, forwarded, counted) in [
        ("/static/../x//./%6cogin?a=%2e%2f//..", "/x/login?a=%2e%2f//..", "global"),
        ("/static/../login", "/login", "login"),
        ("/@scope%2fpkg", "/@scope%2Fpkg", "global"),
        ("/static%2f..%2flogin", "/static%2F..%2Flogin", "login"),
        ("/x\\..\\login", "/x%5C..%5Clogin", "login"),
        ("/login/", "/login/", "login"),
        ("/plain;v=1/%20", "/plain;v=1/%20", "global"),
        ("/%2541", "/%2541", "global"),
    ] {
        let answer = once(gate.inbound, get(sent)).await;
        assert_eq!(status(&answer), 200, "{answer}");
        assert!(header(&answer, "ratelimit").unwrap().starts_with(&format!("\"{counted}\"")), "{sent} {answer}");
        let seen = upstream.seen();
        assert!(seen.last().unwrap().starts_with(&format!("GET {forwarded} HTTP/1.1\r\n")), "{sent} {seen:?}");
    }
}

#[tokio::test]
async fn paths_with_too_many_readings_are_refused() {
    let (lines, _guard) = capture("text");
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, FILE).await;
    for path in ["/a%2f..;x//%252e%5c\\".repeat(500), "/pages/a%2fb/../c\\d/../e%5cf/../h".to_owned()] {
        let refused = once(gate.inbound, get(&path)).await;
        assert_eq!(status(&refused), 400, "{refused}");
        assert_eq!(status(&once(gate.api, asked(&path)).await), 429, "the status of a refusal");
        let question = value!({ "path": path, "ip": "203.0.113.1" }).to_string();
        assert_eq!(status(&once(gate.api, post("/v1/check", &question)).await), 400);
    }
    let text = lines.text();
    let last = text.lines().rfind(|line| line.contains("rejected")).unwrap();
    assert!(last.contains("reason=\"path_readings\"") && last.contains("total=6"), "{text}");
    assert!(upstream.seen().is_empty());
}

#[tokio::test]
async fn paths_with_too_many_readings_count_globally() {
    let upstream = Echo::start(HELLO).await;
    let file = FILE.replacen("1000 per 1h", "3 per 1h", 1);
    let path = "/%253b/a;v/..;/%e2%80%a8%252e".repeat(136);
    let gate = start(upstream.address, &file).await;
    for expected in [400, 400, 400, 429, 429] {
        let answer = once(gate.inbound, get(&path)).await;
        assert_eq!(status(&answer), expected, "{answer}");
    }
    assert_eq!(status(&once(gate.inbound, get("/")).await), 429, "they have used up the limit");
    let gate = start(upstream.address, &format!("{file}\n[api]\ndeny_status = 403\n")).await;
    let question = value!({ "path": path, "ip": "203.0.113.1" }).to_string();
    for expected in [400, 400, 400, 429] {
        let answer = once(gate.api, post("/v1/check", &question)).await;
        assert_eq!(status(&answer), expected, "{answer}");
        assert!(expected == 400 || json(&answer)["bound_by"] == "global", "{answer}");
    }
    let refused = once(gate.api, asked(&path)).await;
    assert!(status(&refused) == 403 && header(&refused, "retry-after").is_some(), "{refused}");
    assert!(upstream.seen().is_empty());
}

#[tokio::test]
async fn invalid_hosts_are_refused_by_every_listener() {
    let (lines, _guard) = capture("text");
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, FILE).await;
    for host in ["example.org", "EXAMPLE.org:", "example.org.:8080"] {
        let answer = once(gate.inbound, format!("GET /vhost HTTP/1.1\r\nHost: {host}\r\n\r\n")).await;
        assert!(header(&answer, "ratelimit").unwrap().starts_with("\"hosted\""), "{host} {answer}");
    }
    for host in ["example.org:80:80", "example.org::", "example.org:80:x", "example.org:80:", ":80:"] {
        // The log writes at most ten lines a second.
        gate.clock.advance(tidegate::Span::from_secs(1));
        let answer = once(gate.inbound, format!("GET /vhost HTTP/1.1\r\nHost: {host}\r\n\r\n")).await;
        assert_eq!(status(&answer), 400, "{host} {answer}");
        let front = asked("/vhost").replace("x-forwarded-host: a", &format!("x-forwarded-host: {host}"));
        let answer = once(gate.api, front).await;
        assert_eq!((status(&answer), header(&answer, "ratelimit")), (429, None), "{host} {answer}");
        let original = format!(
            "GET /v1/auth HTTP/1.1\r\nhost: gate\r\nx-original-method: GET\r\nx-original-url: http://{host}/vhost\r\n\r\n"
        );
        assert_eq!(status(&once(gate.api, original).await), 429, "{host}");
        let appended = format!("GET /v1/auth/vhost HTTP/1.1\r\nhost: {host}\r\n\r\n");
        assert_eq!(status(&once(gate.api, appended).await), 429, "{host}");
        let question = value!({ "path": "/vhost", "host": host, "ip": "203.0.113.1" }).to_string();
        let answer = once(gate.api, post("/v1/check", &question)).await;
        assert_eq!((status(&answer), &json(&answer)["field"]), (400, &value!("host")), "{answer}");
    }
    let text = lines.text();
    let last = text.lines().rfind(|line| line.contains("rejected")).unwrap();
    assert!(last.contains("reason=\"host\"") && last.contains("total=25") && last.contains("host=:80:"), "{text}");
    // HTTP/1.0 may omit the host. Such a request is counted under the host that the upstream receives.
    assert_eq!(status(&once(gate.inbound, "GET /vhost HTTP/1.0\r\n\r\n").await), 200);
}

#[tokio::test]
async fn requests_without_host_count_under_the_upstreams() {
    let upstream = Echo::start(HELLO).await;
    let file = "[inbound.action.a]\nmatch = { host = \"127.0.0.1\" }\nlimit = \"1 per 1h\"\n";
    let gate = start(upstream.address, file).await;
    let statuses = [200, 429];
    for expected in statuses {
        assert_eq!(status(&once(gate.inbound, "GET / HTTP/1.0\r\n\r\n").await), expected);
    }
    assert!(upstream.seen()[0].contains("host: 127.0.0.1"), "{:?}", upstream.seen());
}

#[tokio::test]
async fn forward_auth_counts_the_front_servers_path_readings() {
    let gate = start(nobody(), &FILE.replacen("[inbound]", "[inbound]\npath_quirks = [\"caddy\"]", 1)).await;
    for path in ["/LOGIN", "/login.", "/login%20", "/Login%2e", "/x#/../login", "/lOg%C4%B0n", "//x/login"] {
        let answer = once(gate.api, asked(path)).await;
        let limit = header(&answer, "ratelimit").unwrap_or_default();
        assert!(limit.starts_with("\"login\""), "{path} {answer}");
        once(gate.api, post("/v1/reset", r#"{"action":"login","ip":"203.0.113.1"}"#)).await;
        // The front server itself ends a path at a `#`, as a gate does.
        if !path.contains('#') {
            let answer = once(gate.api, get(&format!("/v1/auth{path}"))).await;
            let limit = header(&answer, "ratelimit").unwrap_or_default();
            assert!(limit.starts_with("\"login\""), "{path} {answer}");
            once(gate.api, post("/v1/reset", r#"{"action":"login","ip":"127.0.0.1"}"#)).await;
        }
    }
}
