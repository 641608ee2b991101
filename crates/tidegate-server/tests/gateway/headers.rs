//! Header fields of requests and replies.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::common::{
    Answer, Api, Arrived, BEARER, FREE, ONCE, PLANTED, closing, get, provider, request, running, standing,
};
use crate::wire::{Peer, body, header, json, status, undated};

fn hello(_: usize, _: &Arrived) -> Answer {
    Answer::new(200, "hello")
}

#[tokio::test]
async fn replies_state_attempts_wait_and_credential() {
    let api = Api::start(|number, _| if number == 0 { Answer::new(503, "") } else { Answer::new(200, "hello") }).await;
    let pair = "auth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]\n";
    let gateway = standing(&api.policy(&format!("{FREE}{pair}")));
    let answer = gateway.ask(get("/api/x")).await;
    let expected = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntidegate-attempts: 2\r\ntidegate-waited: 0.000s\r\n\
        tidegate-credential: 1\r\n\r\nhello";
    assert_eq!(undated(&answer), expected);
}

#[tokio::test]
async fn the_credential_header_requires_credentials() {
    let api = Api::start(hello).await;
    for (settings, place) in [(FREE.to_owned(), None), (format!("{FREE}{BEARER}"), Some("0"))] {
        let answer = running(&api.policy(&settings)).ask(get("/api/x")).await;
        assert_eq!(header(&answer, "tidegate-attempts"), Some("1"));
        assert_eq!(header(&answer, "tidegate-credential"), place);
        assert_eq!(header(&answer, "tidegate-cache"), None, "the provider has no cache");
    }
}

#[tokio::test]
async fn hedged_requests_count_as_attempts() {
    let slow_at_first = |number, _: &Arrived| Answer::new(200, "hello").taking(if number == 0 { 60_000 } else { 0 });
    let api = Api::start(slow_at_first).await;
    let gateway = running(&api.policy(&format!("{FREE}hedge_after = \"50ms\"\n")));
    let answer = gateway.ask(get("/api/x")).await;
    assert_eq!((status(&answer), header(&answer, "tidegate-attempts"), api.count()), (200, Some("2"), 2));
}

#[tokio::test]
async fn replies_state_the_time_waited() {
    let api = Api::start(hello).await;
    let gateway = running(&api.policy("limit = \"5/s\"\n"));
    let answers = gateway.ask_at_once(2, &get("/api/x")).await;
    let waited = |answer: &String| {
        let text = header(answer, "tidegate-waited").unwrap().strip_suffix('s').unwrap();
        text.parse::<f64>().unwrap()
    };
    let mut waits: Vec<f64> = answers.iter().map(waited).collect();
    waits.sort_by(f64::total_cmp);
    assert!(waits[0] < 0.1, "{waits:?}");
    assert!((0.19..1.0).contains(&waits[1]), "{waits:?}");
}

#[tokio::test]
async fn priority_and_timeout_headers_are_applied() {
    let api = Api::start(hello).await;
    let settings = "limit = \"1 per 1h\"\nwebhook = { timeout = \"2h\" }\n";
    let gateway = standing(&api.policy(settings));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 200);
    // The limit has capacity again in an hour. That is too late for a user, and for a webhook with a shorter timeout.
    let webhook = "tidegate-priority: Webhook\r\n";
    for lines in [String::new(), format!("{webhook}tidegate-timeout: 59m\r\n")] {
        assert_eq!(status(&gateway.ask(request("GET", "/api/x", &lines, "")).await), 429, "{lines}");
    }
    let waits = gateway.ask(request("GET", "/api/x", webhook, ""));
    assert!(tokio::time::timeout(Duration::from_millis(300), waits).await.is_err(), "it waits for its turn");
}

#[tokio::test]
async fn invalid_option_headers_are_reported_by_name() {
    let api = Api::start(hello).await;
    let gateway = standing(&api.policy(FREE));
    let (priority, timeout) = (
        "tidegate-priority must be background, user or webhook",
        "tidegate-timeout must be a duration such as 5s, 500ms or 1m30s",
    );
    for (lines, message) in [
        ("tidegate-priority: urgent\r\n", priority),
        ("Tidegate-Priority: user\r\nTidegate-Priority: user\r\n", priority),
        ("tidegate-timeout: 5\r\n", timeout),
        ("tidegate-timeout: 0s\r\n", timeout),
        ("tidegate-timeout: \r\n", timeout),
        ("tidegate-timeout: soon\r\n", timeout),
    ] {
        let answer = gateway.ask(request("GET", "/api/x", lines, "")).await;
        assert_eq!(status(&answer), 400, "{lines}");
        assert_eq!(json(&answer), serde_json::json!({ "error": "Bad Request", "message": message }), "{lines}");
    }
    assert_eq!(api.count(), 0);
}

#[tokio::test]
async fn gateway_and_hop_headers_are_not_forwarded() {
    let api = Api::start(|_, _| {
        let answer = Answer::new(200, "hello").with("tidegate-attempts", "99").with("tidegate-credential", "7");
        answer.with("keep-alive", "timeout=5").with("x-kept", "yes").with("set-cookie", "a=b")
    })
    .await;
    let gateway = running(&api.policy(&format!("{FREE}user_agent = \"App/1.0 ( me@example.org )\"\n")));
    let lines = "user-agent: curl\r\ntidegate-priority: user\r\ntidegate-timeout: 5s\r\ntidegate-secret: x\r\n\
        x-forwarded-for: 10.0.0.7\r\nx-forwarded-host: inside\r\nx-forwarded-proto: http\r\nforwarded: for=10.0.0.7\r\n\
        x-forwarded-port: 80\r\nx-forwarded-prefix: /x\r\nx-real-ip: 10.0.0.7\r\nvia: 1.1 inside\r\n\
        connection: close, x-hop\r\nx-hop: 1\r\n\
        keep-alive: 5\r\nte: gzip\r\nproxy-connection: close\r\nproxy-authorization: Bearer x\r\n\
        expect: 100-continue\r\nupgrade: websocket\r\n\
        idempotency-key: 8e03978e\r\naccept: text/plain\r\ncookie: c=d; tidegate_session_8083=x\r\n";
    let answer = gateway.ask(request("GET", "/api/x", lines, "")).await;
    assert_eq!((status(&answer), body(&answer)), (200, "hello"));
    let arrived = api.arrived().pop().unwrap();
    let mut names: Vec<&str> = arrived.headers.keys().map(http::HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["accept", "cookie", "host", "idempotency-key", "user-agent"]);
    assert_eq!(arrived.header("cookie"), Some("c=d"), "without the session of the dashboard");
    assert_eq!(arrived.header("user-agent"), Some("App/1.0 ( me@example.org )"));
    assert_eq!(header(&answer, "tidegate-attempts"), Some("1"), "a provider can't speak for the gateway");
    assert_eq!(header(&answer, "tidegate-credential"), None);
    assert_eq!(header(&answer, "keep-alive"), None);
    assert_eq!((header(&answer, "x-kept"), header(&answer, "set-cookie")), (Some("yes"), Some("a=b")));
}

#[tokio::test]
async fn te_trailers_is_forwarded_if_requested() {
    let api = Api::start(hello).await;
    let gateway = running(&api.policy(FREE));
    for (te, told) in [("gzip, trailers;q=0.5", Some("trailers")), ("gzip", None)] {
        let lines = format!("te: {te}\r\nconnection: te, upgrade\r\nupgrade: h2c\r\n");
        assert_eq!(status(&gateway.ask(request("GET", "/api/x", &lines, "")).await), 200);
        let arrived = api.arrived().pop().unwrap();
        assert_eq!((arrived.header("te"), arrived.header("connection")), (told, told.map(|_| "te")));
        assert_eq!(arrived.header("upgrade"), None);
    }
}

#[tokio::test]
async fn informational_replies_are_left_out() {
    let early = "HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </style.css>; rel=preload\r\n\r\n";
    let answer = format!("{early}{early}HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello").leak();
    let gateway = running(&provider(closing(answer).await, ONCE));
    let expected =
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntidegate-attempts: 1\r\ntidegate-waited: 0.000s\r\n\r\nhello";
    assert_eq!(undated(&gateway.ask(get("/api/x")).await), expected);
}

#[tokio::test]
async fn endless_informational_replies_fail_the_call() {
    let endless = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n".repeat(1000).leak();
    let gateway = running(&provider(closing(endless).await, ONCE));
    assert_eq!(status(&gateway.ask(get("/api/x")).await), 502);
}

#[tokio::test]
async fn head_replies_have_length_but_no_body() {
    let api = Api::start(hello).await;
    let gateway = running(&api.policy(FREE));
    let mut client = Peer::connect(gateway.address).await;
    client.send(request("HEAD", "/api/x", "connection: close\r\n", "")).await;
    let answer = client.all().await;
    assert_eq!((status(&answer), header(&answer, "content-length"), body(&answer)), (200, Some("5"), ""));
    assert_eq!(api.arrived()[0].method, "HEAD");
}

#[tokio::test]
async fn the_credential_replaces_the_callers_parameter() {
    let api = Api::start(hello).await;
    let auth = "auth = \"query:api_key\"\ncredentials = \"env:A\"\n";
    let gateway = running(&api.policy(&format!("{FREE}{auth}")));
    gateway.ask(get("/api/x?b=%41&api%5Fkey=mine&&API_KEY=mine&a=+")).await;
    assert_eq!(api.arrived()[0].target, format!("/v1/x?b=%41&&a=+&api_key={PLANTED}"));
}

#[tokio::test]
async fn the_providers_credential_replaces_the_callers() {
    let api = Api::start(hello).await;
    let gateway = running(&api.policy(&format!("{FREE}{BEARER}")));
    gateway.ask(request("GET", "/api/x", "authorization: Basic Zm9v\r\n", "")).await;
    assert_eq!(api.arrived()[0].header("authorization"), Some(format!("Bearer {PLANTED}").as_str()));
    let anonymous = running(&api.policy(FREE));
    anonymous.ask(request("GET", "/api/x", "authorization: Basic Zm9v\r\n", "")).await;
    assert_eq!(api.arrived()[1].header("authorization"), Some("Basic Zm9v"));
}

#[tokio::test]
async fn redirects_are_forwarded_without_the_credential() {
    let elsewhere = Api::start(hello).await;
    let there = elsewhere.address;
    let api = Api::start(move |_, arrived| {
        let own = arrived.header("host").unwrap();
        let location = match arrived.target.split(['?', '/']).nth(2).unwrap() {
            "below" => format!("http://{own}/v1/movie/603?api_key={PLANTED}&page=2"),
            "beside" => format!("http://{own}/v2/movie?api_key={PLANTED}"),
            "relative" => "/v1/movie#top".to_owned(),
            "away" => format!("http://{there}/x?api_key={PLANTED}"),
            _ => format!("http://{there}/{PLANTED}/x"),
        };
        Answer::new(302, "").with("location", location).with("x-echo", PLANTED)
    })
    .await;
    let auth = "auth = \"query:api_key\"\ncredentials = \"env:A\"\n";
    let gateway = running(&api.policy(&format!("{ONCE}{auth}")));
    for (path, location) in [
        ("/api/below", Some("/api/movie/603?page=2".to_owned())),
        ("/api/beside", Some(format!("http://{}/v2/movie", api.address))),
        ("/api/relative", Some("/api/movie#top".to_owned())),
        ("/api/away", Some(format!("http://{there}/x"))),
        ("/api/hidden", None),
    ] {
        let answer = gateway.ask(get(path)).await;
        assert_eq!((status(&answer), header(&answer, "location")), (302, location.as_deref()), "{path}");
        assert!(!answer.contains(PLANTED), "{answer}");
    }
    assert!(api.arrived().iter().all(|arrived| arrived.target.contains(PLANTED)));
    assert_eq!(elsewhere.count(), 0, "the gateway follows nobody");
}

#[tokio::test]
async fn credentials_echoed_in_headers_or_trailers_are_removed() {
    const REPEATS: &str = "key pl4nted-s3cr3t-a is unknown\r\nconnection: close\r\nx-pl4nted-s3cr3t-a: unknown\r\n\
        x-told: Bearer pl4nted-s3cr3t-a\r\ntransfer-encoding: chunked\r\ntrailer: x-told, grpc-message, x-kept\r\n\r\n\
        5\r\nhello\r\n0\r\nx-told: pl4nted-s3cr3t-a\r\ngrpc-message: key pl4nted%2Ds3cr3t%2Da\r\nx-kept: yes\r\n\r\n";
    for (status, line) in [
        (200, "HTTP/1.1 200 OK"),
        (401, "HTTP/1.1 401 Unauthorized"),
        (404, "HTTP/1.1 404 Not Found"),
        (429, "HTTP/1.1 429 Too Many Requests"),
        (503, "HTTP/1.1 503 Service Unavailable"),
    ] {
        let answer = format!("HTTP/1.1 {status} {REPEATS}").leak();
        for cache in ["", "cache = { ttl = \"1h\" }\n"] {
            let gateway = running(&provider(closing(answer).await, &format!("{ONCE}{BEARER}{cache}")));
            let told = gateway.ask(request("GET", "/api/x", "te: trailers\r\nconnection: te\r\n", "")).await;
            assert!(told.starts_with(&format!("{line}\r\n")), "{told}");
            assert!(told.contains("hello") && told.ends_with("0\r\nx-kept: yes\r\n\r\n"), "{told}");
            assert!(!told.contains("pl4nted"), "{told}");
        }
    }
}

#[tokio::test]
async fn no_header_or_url_tells_a_provider_the_gateways_token() {
    let api = Api::start(hello).await;
    let outbound = "[outbound]\nlisten = \"127.0.0.1:0\"\ntoken = \"env:A\"\n";
    let gateway = running(&format!("{outbound}{}", api.policy(FREE)));
    let token = format!("tidegate-token: {PLANTED}\r\n");
    let lines = format!(
        "{token}x-tidegate-token: other\r\nHTTP_TIDEGATE_TOKEN: {PLANTED}\r\nx-original-authorization: Bearer {PLANTED}\r\n\
         authorization: Bearer {PLANTED}\r\ncookie: a=b; c={PLANTED}\r\nx-kept: yes\r\n"
    );
    assert_eq!(status(&gateway.ask(request("GET", "/api/x", &lines, "")).await), 200);
    let arrived = api.arrived().pop().unwrap();
    let mut names: Vec<&str> = arrived.headers.keys().map(http::HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["host", "x-kept"]);
    for path in
        [format!("/api/{PLANTED}"), format!("/api/x?a=b&t={PLANTED}"), "/api/x?t=pl4nted%2Ds3cr3t%2da".to_owned()]
    {
        let answer = gateway.ask(request("GET", &path, &token, "")).await;
        assert_eq!(status(&answer), 400, "{path}");
        assert!(!answer.contains(PLANTED), "{answer}");
    }
    assert_eq!(api.count(), 1);
}

/// CGI programs read other signs as `-`, and servers may add trailers to the head.
#[tokio::test]
async fn no_spelling_of_the_gateways_token_reaches_a_provider() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let provider = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut seen = Vec::new();
        while !seen.ends_with(b"x-kept: trailer\r\n\r\n") {
            assert!(stream.read_buf(&mut seen).await.unwrap() > 0, "{}", seen.escape_ascii());
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello").await.unwrap();
        String::from_utf8(seen).unwrap().to_ascii_lowercase()
    });
    let outbound = "[outbound]\nlisten = \"127.0.0.1:0\"\ntoken = \"env:A\"\n";
    let gateway = running(&format!("{outbound}{}", crate::common::provider(address, FREE)));
    let names = ["Tidegate-Token", "Tidegate_Token", "Tidegate.Token", "Proxy-Authorization", "Proxy_Authorization"];
    let lines = names.map(|name| match name.starts_with('P') {
        true => format!("{name}: Bearer {PLANTED}\r\n"),
        false => format!("{name}: {PLANTED}\r\n"),
    });
    let lines = lines.concat();
    let body = format!("3\r\nabc\r\n0\r\n{lines}x-kept: trailer\r\n\r\n");
    let told = format!("trailer: x-kept, {}\r\n", names.join(", "));
    let head = format!("POST /api/x HTTP/1.1\r\nhost: localhost\r\n{lines}{told}");
    let answer = gateway.ask(format!("{head}transfer-encoding: chunked\r\n\r\n{body}")).await;
    let seen = provider.await.unwrap();
    assert_eq!(status(&answer), 200, "{answer}");
    assert!(!seen.contains(PLANTED) && !seen.contains("token:") && !seen.contains("authorization:"), "{seen}");
}
