//! Access to the gateway, and the paths that it serves.

use std::time::Duration;

use crate::common::{Answer, Api, BEARER, FREE, PLANTED, get, request, running, standing};
use crate::wire::{Echo, HELLO, Peer, body, header, json, status};

fn hello(_: usize, _: &crate::common::Arrived) -> Answer {
    Answer::new(200, "hello")
}

#[tokio::test]
async fn the_path_cannot_change_the_authority() {
    let (api, evil) = (Api::start(hello).await, Echo::start(HELLO).await);
    let gateway = running(&api.policy(&format!("{FREE}{BEARER}")));
    let there = evil.address;
    for path in [
        format!("/api//{there}/x"),
        format!("/api/http://{there}/x"),
        format!("/api@{there}/x"),
        format!("/api/@{there}/x"),
        format!("/api:x@{there}/"),
        format!("/api/..//{there}/x"),
        format!("/api/%2f%2f{there}/x"),
        format!("/api/\\\\{there}\\x"),
        format!("/api?//{there}/x"),
        format!("//{there}/api/x"),
        "/api/../x".to_owned(),
        "/api/%2e%2e/x".to_owned(),
        "/api/a/..%2f..%2fx".to_owned(),
        "/api/..;/x".to_owned(),
    ] {
        let before = api.count();
        let answer = gateway.ask(get(&path)).await;
        match status(&answer) {
            200 => {
                let arrived = api.arrived().pop().unwrap();
                assert!(arrived.target.starts_with("/v1/"), "{path} became {}", arrived.target);
                assert_eq!(arrived.header("host"), Some(api.address.to_string().as_str()), "{path}");
            }
            400 | 404 => {
                assert_eq!(api.count(), before, "{path}");
                json(&answer);
            }
            other => panic!("{other} for {path}: {answer}"),
        }
    }
    // The gateway is no forward proxy, so a full URL must name the gateway itself.
    let whole = format!("GET http://{there}/api/x HTTP/1.1\r\nhost: {there}\r\n\r\n");
    assert_eq!(status(&gateway.ask(whole).await), 200, "loopback by any port is the gateway");
    assert_eq!(api.arrived().pop().unwrap().target, "/v1/x");
    let whole = "GET http://evil.example/api/x HTTP/1.1\r\nhost: evil.example\r\n\r\n";
    assert_eq!(status(&gateway.ask(whole).await), 421);
    assert_eq!(evil.seen(), Vec::<String>::new());
}

#[tokio::test]
async fn paths_readable_as_leaving_the_base_are_refused() {
    let api = Api::start(hello).await;
    let gateway = running(&api.policy(&format!("{FREE}{BEARER}")));
    for path in [
        "/api/..%00/x",
        "/api/..%20/x",
        "/api/%2e%2e%23/x",
        "/api/%2e%2e%3f/x",
        "/api/..%3bx/y",
        "/api/.%09./x",
        "/api/..%0a/x",
        "/api/.../x",
        "/api/%252e%252e/x",
        "/api/a/..%252f..%252fx",
        "/api/%c0%ae%c0%ae/x",
        "/api/%u002e%u002e/x",
        "/api/%00/../x",
    ] {
        let answer = gateway.ask(get(path)).await;
        assert_eq!(
            (status(&answer), json(&answer)["message"].as_str()),
            (400, Some("the path must not lead beyond the base URL")),
            "{path}"
        );
    }
    assert_eq!(api.count(), 0);
}

#[tokio::test]
async fn paths_and_queries_are_forwarded_unchanged() {
    let api = Api::start(hello).await;
    let gateway = running(&api.policy(FREE));
    for (asked, target) in [
        ("/api", "/v1/"),
        ("/api/", "/v1/"),
        ("/api?a=b", "/v1/?a=b"),
        ("/api/a%20b/c;d?e=f%2Fg&h", "/v1/a%20b/c;d?e=f%2Fg&h"),
        ("/api//twice//", "/v1//twice//"),
    ] {
        assert_eq!(status(&gateway.ask(get(asked)).await), 200);
        assert_eq!(api.arrived().pop().unwrap().target, target, "{asked}");
    }
}

#[tokio::test]
async fn foreign_hosts_and_web_pages_are_rejected() {
    let api = Api::start(hello).await;
    let policy = format!("[outbound]\nhosts = [\"gate.internal\"]\n{}", api.policy(FREE));
    let gateway = running(&policy);
    for (lines, expected) in [
        ("host: 127.0.0.1:8081\r\n", 200),
        ("host: localhost\r\n", 200),
        ("host: gate.internal\r\n", 200),
        ("host: rebound.example\r\n", 421),
        ("host: rebound.example:8081\r\n", 421),
        ("host: 127.0.0.1.rebound.example\r\n", 421),
        ("host: 169.254.169.254\r\n", 421),
        ("host: localhost\r\nhost: rebound.example\r\n", 400),
        ("", 400),
        ("host: localhost:8081\r\norigin: http://localhost:8081\r\n", 200),
        ("host: localhost:8081\r\norigin: https://gate.internal\r\nsec-fetch-site: cross-site\r\n", 200),
        ("host: localhost:8081\r\norigin: http://localhost:3000\r\n", 403),
        ("host: localhost\r\norigin: https://page.example\r\n", 403),
        ("host: localhost\r\norigin: null\r\n", 403),
        ("host: localhost\r\nsec-fetch-site: cross-site\r\n", 403),
        ("host: localhost\r\nsec-fetch-site: same-site\r\n", 403),
    ] {
        let before = api.count();
        let answer = gateway.ask(format!("GET /api/x HTTP/1.1\r\n{lines}\r\n")).await;
        assert_eq!(status(&answer), expected, "{lines}");
        assert_eq!(api.count() - before, usize::from(expected == 200), "{lines}");
    }
}

/// A load balancer on loopback may tell any client by the PROXY protocol.
#[tokio::test]
async fn clients_of_other_machines_need_a_token_on_loopback_too() {
    let api = Api::start(hello).await;
    let proxied = "[outbound]\nlisten = \"127.0.0.1:0\"\nproxy_protocol = \"127.0.0.1\"\n";
    let gateway = running(&format!("{proxied}{}", api.policy(&format!("{FREE}{BEARER}"))));
    for (client, expected) in [("127.0.0.1", 200), ("203.0.113.7", 407)] {
        let header = format!("PROXY TCP4 {client} 127.0.0.1 1 2\r\n");
        let answer = gateway.ask([header, request("GET", "/api/x", "", "")].concat()).await;
        assert_eq!(status(&answer), expected, "{client}");
    }
    assert_eq!(api.count(), 1);
}

#[tokio::test]
async fn a_configured_token_is_required() {
    let api = Api::start(hello).await;
    let policy = format!(
        "[outbound]\nlisten = \"0.0.0.0:0\"\ntoken = \"env:ENTRY\"\n{}",
        api.policy(&format!("{FREE}{BEARER}"))
    );
    let gateway = running(&policy);
    let entry = "pl4nted-s3cr3t-entry";
    for (lines, expected) in [
        (String::new(), 407),
        (format!("authorization: Bearer {entry}\r\n"), 407),
        (format!("proxy-authorization: Bearer {entry}x\r\n"), 407),
        (format!("proxy-authorization: Basic {entry}\r\n"), 407),
        (format!("proxy-authorization: Bearer {entry}\r\n"), 200),
        (format!("tidegate-token: {entry}\r\n"), 200),
    ] {
        let before = api.count();
        let answer = gateway.ask(request("GET", "/api/x", &lines, "")).await;
        assert_eq!(status(&answer), expected, "{lines}");
        assert_eq!(api.count() - before, usize::from(expected == 200), "{lines}");
        assert!(!answer.contains(entry));
        if expected == 407 {
            assert_eq!(header(&answer, "proxy-authenticate"), Some("Bearer realm=\"tidegate\""));
        }
    }
    for arrived in api.arrived() {
        assert_eq!(arrived.header("authorization"), Some(format!("Bearer {PLANTED}").as_str()));
        assert!(!format!("{arrived:?}").contains(entry), "the provider isn't told the gateway's token");
    }
}

#[tokio::test]
async fn an_unknown_provider_suggests_the_nearest_name() {
    let api = Api::start(hello).await;
    let gateway = standing(&format!("{}\n[outbound.provider.rust-only]\npreset = \"local\"\n", api.policy(FREE)));
    for (path, message) in [
        ("/", "paths are /PROVIDER/PATH; the providers are api, rust-only"),
        ("/apo/x", "unknown provider \"apo\"; did you mean \"api\"?"),
        ("/API/x", "unknown provider \"API\"; did you mean \"api\"?"),
        ("/nothing-like-it", "unknown provider \"nothing-like-it\""),
        ("/rust-only/x", "the provider rust-only has no base_url, so only Rust programs call it"),
    ] {
        let answer = gateway.ask(get(path)).await;
        assert_eq!(status(&answer), 404);
        assert_eq!(json(&answer), serde_json::json!({ "error": "Not Found", "message": message }), "{}", body(&answer));
    }
    assert_eq!(api.count(), 0);
    assert_eq!(gateway.stop().await.cut_off, 0);
}

#[tokio::test]
async fn concurrent_connections_are_capped() {
    // The first two replies take longer than the test.
    let slow = |number: usize, _: &crate::common::Arrived| {
        let answer = Answer::new(200, "hello");
        if number < 2 { answer.taking(2000) } else { answer }
    };
    let api = Api::start(slow).await;
    let gateway = running(&format!("[outbound]\nconnections = 2\n{}", api.policy(FREE)));
    let mut inside = [Peer::connect(gateway.address).await, Peer::connect(gateway.address).await];
    for peer in &mut inside {
        peer.send(get("/api/x")).await;
    }
    let mut waits = Peer::connect(gateway.address).await;
    waits.send(get("/api/x")).await;
    assert!(tokio::time::timeout(Duration::from_millis(300), waits.message()).await.is_err());
    for peer in &mut inside {
        assert_eq!(status(&peer.message().await), 200);
    }
    // A connection that waits for its next request is displaced.
    assert_eq!(status(&waits.message().await), 200);
}
