//! Keys in spellings that clients choose: no spelling evades the proxy, forward-auth or the decision API.

use crate::common::{Echo, HELLO, Peer, Running, body, capture, json, nobody, once, post, start, status};

const FILE: &str = r#"
    [inbound]
    trusted_proxies = ["127.0.0.0/8"]
    [inbound.action.cookie]
    match = { path = "/cookie" }
    key = "cookie:sid"
    limit = "3 per 60s"
    [inbound.action.header]
    match = { path = "/header" }
    key = "header:x-api-key"
    limit = "3 per 60s"
    [inbound.action.query]
    match = { path = "/query" }
    key = "query:token"
    limit = "3 per 60s"
    [inbound.action.strict]
    match = { path = "/strict" }
    key = "header:x-api-key"
    limit = "3 per 60s"
    missing = "refuse"
"#;

/// A request through the proxy, with a client address of its own.
fn through(path: &str, client: u8, lines: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: gate.test\r\nx-forwarded-for: 203.0.113.{client}\r\n{lines}\r\n")
}

/// The same request as a front server describes it.
fn described(path: &str, client: u8, lines: &str) -> String {
    let about = format!("x-forwarded-method: GET\r\nx-forwarded-uri: {path}\r\nx-forwarded-host: gate.test\r\n");
    through("/v1/auth", client, &format!("{about}{lines}"))
}

/// The same request as Envoy asks about it.
fn appended(path: &str, client: u8, lines: &str) -> String {
    through(&format!("/v1/auth{path}"), client, lines)
}

type Form = fn(&str, u8, &str) -> String;

async fn gate() -> (Running, Echo) {
    let echo = Echo::start(HELLO).await;
    (start(echo.address, FILE).await, echo)
}

const SPELLINGS: [(&str, &str); 29] = [
    ("/cookie", "cookie: sid=\"\\122EAL\"\r\n"),
    ("/cookie", "cookie: sid=\"R\\105AL\"\r\n"),
    ("/cookie", "cookie: sid=%52EAL\r\n"),
    ("/cookie", "cookie: sid=fresh1; sid=REAL\r\n"),
    ("/cookie", "cookie: sid=REAL; sid=fresh2\r\n"),
    ("/cookie", "cookie: sid=fresh3\r\ncookie: sid=REAL\r\n"),
    ("/header", "x-api-key: fresh1\r\nx-api-key: REAL\r\n"),
    ("/header", "x-api-key: REAL\r\nx-api-key: fresh2\r\n"),
    ("/header", "X-API-KEY: REAL\r\nx-api-key: fresh3\r\nx-api-key: fresh4\r\n"),
    ("/header", "x-api-key:   REAL  \r\n"),
    ("/header", "x-api-key: REAL\r\n"),
    ("/header", "x-api-key: REAL\r\nx-other: a\r\n"),
    ("/query?token=a&token=REAL", ""),
    ("/query?token=REAL&token=b", ""),
    ("/query?%74oken=R%45AL", ""),
    ("/query?token[]=REAL", ""),
    ("/query?a=1;token=REAL", ""),
    ("/query?token=REAL;c", ""),
    ("/query?token]=REAL", ""),
    ("/query?[]token=REAL", ""),
    ("/query?%5Dtoken=REAL", ""),
    ("/query??token=REAL", ""),
    ("/query?.token=REAL", ""),
    ("/query?token.x=REAL", ""),
    ("/query?token=REAL+", ""),
    ("/query?token=%0BREAL", ""),
    ("/query?token=%u0052EAL", ""),
    ("/cookie", "cookie: sid=REAL&x\r\n"),
    ("/header", "x-api-key: \u{85}REAL\u{a0}\r\n"),
];

#[tokio::test]
async fn no_key_spelling_gives_a_fresh_count() {
    for (form, via_proxy) in [(through as Form, true), (described as Form, false), (appended as Form, false)] {
        for part in ["/cookie", "/header", "/query"] {
            let (gate, _echo) = gate().await;
            let mut peer = Peer::connect(if via_proxy { gate.inbound } else { gate.api }).await;
            let spellings = SPELLINGS.iter().filter(|(path, _)| path.starts_with(part));
            for (number, (path, lines)) in spellings.enumerate() {
                let answer = peer.ask(form(path, number as u8, lines)).await;
                let expected = if number < 3 { 200 } else { 429 };
                assert_eq!(status(&answer), expected, "{path} {lines}");
            }
        }
    }
}

/// Envoy joins the lines of a header by commas where it asks, and forwards them as they came.
#[tokio::test]
async fn no_line_that_envoy_joins_gives_a_fresh_count() {
    let named: Form = |_, client, lines| {
        through("/v1/auth?action=header", client, &format!("x-envoy-expected-rq-timeout-ms: 250\r\n{lines}"))
    };
    for form in [appended as Form, named] {
        let (gate, _echo) = gate().await;
        let mut envoy = Peer::connect(gate.api).await;
        let mut passed = 0;
        for (number, value) in
            ["m1", "m1,n1", "m1,n2", "m1, n3", "n4,m1", "m1,", ",m1", "n5,m1,n6", "m1,m1"].iter().enumerate()
        {
            let answer = envoy.ask(form("/header", number as u8, &format!("x-api-key: {value}\r\n"))).await;
            passed += usize::from(status(&answer) == 200);
        }
        assert_eq!(passed, 3);
        for (value, expected) in [("n7,n8", 200), ("n1", 200), ("n1", 200), ("n1", 429), ("a,b,c,d,e", 429)] {
            let answer = envoy.ask(form("/header", 1, &format!("x-api-key: {value}\r\n"))).await;
            assert_eq!(status(&answer), expected, "{value}");
        }
    }
    // nginx, Caddy and Traefik pass lines on as they came: a comma in one is the client's own.
    let (gate, _echo) = gate().await;
    let mut front = Peer::connect(gate.api).await;
    for value in ["m1,n1", "m1,n2", "m1,n3", "m1,n4", "a,b,c,d,e"] {
        let answer = front.ask(described("/header", 1, &format!("x-api-key: {value}\r\n"))).await;
        assert_eq!(status(&answer), 200, "{value}");
    }
}

#[tokio::test]
async fn one_refused_key_value_charges_no_other() {
    let (gate, _echo) = gate().await;
    let mut peer = Peer::connect(gate.inbound).await;
    for _ in 0..3 {
        assert_eq!(status(&peer.ask(through("/cookie", 1, "cookie: sid=REAL\r\n")).await), 200);
    }
    for _ in 0..5 {
        assert_eq!(status(&peer.ask(through("/cookie", 1, "cookie: sid=other; sid=REAL\r\n")).await), 429);
    }
    for _ in 0..3 {
        assert_eq!(status(&peer.ask(through("/cookie", 1, "cookie: sid=other\r\n")).await), 200);
    }
}

#[tokio::test]
async fn clients_without_the_key_count_separately() {
    let (gate, _echo) = gate().await;
    for (address, form) in [(gate.inbound, through as Form), (gate.api, described as Form)] {
        let mut peer = Peer::connect(address).await;
        let path = if address == gate.inbound { "/header" } else { "/query" };
        for client in 0..40 {
            assert_eq!(status(&peer.ask(form(path, client, "")).await), 200);
        }
        for expected in [200, 200, 429] {
            assert_eq!(status(&peer.ask(form(path, 1, "")).await), expected);
        }
    }
}

#[tokio::test]
async fn uncountable_requests_are_answered_with_400() {
    let (lines, _guard) = capture("text");
    let (gate, echo) = gate().await;
    let five = "cookie: sid=1; sid=2; sid=3; sid=4; sid=5\r\n";
    let mut peer = Peer::connect(gate.inbound).await;
    for (path, lines, says) in [
        ("/cookie", five, "`cookie:sid` has more than 4 different values"),
        ("/strict", "", "`header:x-api-key` is missing"),
    ] {
        let answer = peer.ask(through(path, 1, lines)).await;
        assert_eq!(status(&answer), 400);
        assert_eq!(json(&answer)["message"], says);
        let answer = once(gate.api, described(path, 1, lines)).await;
        assert_eq!(status(&answer), 429, "at forward-auth as any refusal");
        assert_eq!(json(&answer)["message"], says);
    }
    let asked = r#"{"action":"cookie","ip":"192.0.2.1","headers":{"cookie":"sid=1; sid=2; sid=3; sid=4; sid=5"}}"#;
    let answer = once(gate.api, post("/v1/check", asked)).await;
    assert_eq!((status(&answer), json(&answer)["field"].as_str()), (400, Some("cookie:sid")), "{answer}");
    let answer = once(gate.api, post("/v1/check", r#"{"action":"strict","ip":"192.0.2.1","headers":{}}"#)).await;
    assert_eq!((status(&answer), json(&answer)["field"].as_str()), (400, Some("header:x-api-key")));
    assert!(echo.seen().is_empty());
    let log = lines.text();
    assert!(log.contains("rejected reason=\"values\"") && log.contains("path=/cookie"), "{log}");
    assert_eq!(log.matches("why=\"`header:x-api-key` is missing\"").count(), 3, "at each door: {log}");
}

#[tokio::test]
async fn uncountable_forward_auth_requests_use_deny_status() {
    let gate = start(nobody(), &format!("{FILE}[api]\ndeny_status = 403\n")).await;
    assert_eq!(status(&once(gate.api, described("/strict", 1, "")).await), 403);
    for name in ["x_api_key", "x.api.key", "x-api|key"] {
        let lookalike = once(gate.api, described("/header", 1, &format!("x-api-key: a\r\n{name}: REAL\r\n"))).await;
        assert_eq!(status(&lookalike), 403);
        assert!(body(&lookalike).contains(&format!("`header:{name}` differs")), "{lookalike}");
    }
}

#[tokio::test]
async fn lookalikes_of_key_headers_are_not_forwarded() {
    let (gate, echo) = gate().await;
    let lines = "x-api-key: a\r\nX_Api_Key: REAL\r\nX_Api-Key: REAL\r\nx.api~key: REAL\r\nx_other: kept\r\n";
    assert_eq!(status(&once(gate.inbound, through("/header", 1, lines)).await), 200);
    let seen = echo.seen().concat();
    assert!(!seen.contains("REAL") && seen.contains("x-api-key: a") && seen.contains("x_other: kept"), "{seen}");
}

#[tokio::test]
async fn connection_cannot_remove_key_headers() {
    let (gate, echo) = gate().await;
    let lines = "connection: x-api-key, cookie\r\nx-api-key: fresh\r\ncookie: sid=1\r\n";
    assert_eq!(status(&once(gate.inbound, through("/header", 1, lines)).await), 200);
    let seen = echo.seen().concat();
    assert!(seen.contains("x-api-key: fresh") && seen.contains("cookie: sid=1"), "{seen}");
}
