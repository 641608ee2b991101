//! The access log of the proxy, forward-auth and the decision API.

use serde_json::{Value, json};

use crate::common::{Echo, HELLO, Lines, Peer, capture, get, nobody, once, post, start, status};

const POLICY: &str = r#"
    [inbound.action.no]
    match = { path = ["/no", "/no/*"] }
    limit = "0 per 1s"
    [inbound.action.watched]
    match = { path = "/watched" }
    limit = "0 per 1s"
    mode = "shadow"
    [inbound.action.account]
    key = ["key"]
    limit = "0 per 1s"
    [log]
    access = "#;
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

impl Lines {
    /// The values of these fields in each line of the access log.
    fn access(&self, fields: &[&str]) -> Vec<Value> {
        let lines = self.text();
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let lines = lines.filter(|line| line["target"] == "access");
        lines.map(|line| fields.iter().map(|field| line[field].clone()).collect()).collect()
    }
}

#[tokio::test]
async fn every_request_gets_a_line() {
    let (lines, _guard) = capture("json");
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, &format!("{POLICY}\"all\"\n")).await;
    let mut client = Peer::connect(gate.inbound).await;
    for (path, expected) in [("/yes?token=s3cret", 200), ("/watched", 200), ("/no/x", 429)] {
        let traced =
            format!("GET {path} HTTP/1.1\r\nhost: shop.test\r\ntraceparent: 00-{TRACE}-00f067aa0ba902b7-01\r\n\r\n");
        assert_eq!(status(&client.ask(traced).await), expected);
    }
    let mut client = Peer::connect(gate.inbound).await;
    client.send("HEAD /yes HTTP/1.1\r\nhost: a b\r\n\r\n").await;
    assert_eq!(status(&client.all().await), 400);
    let check = r#"{"action":"account","key":"sk_s3cret","ip":"192.0.2.7"}"#;
    assert_eq!(status(&once(gate.api, post("/v1/check", check)).await), 429);
    let auth = "GET /v1/auth HTTP/1.1\r\nhost: 127.0.0.1\r\nx-forwarded-method: PUT\r\nx-forwarded-uri: /no/1?q=s3cret\r\n\r\n";
    assert_eq!(status(&once(gate.api, auth).await), 429);
    assert_eq!(status(&once(gate.admin, get("/v1/state")).await), 200);

    let fields = ["listener", "method", "path", "status", "outcome", "actions", "limit", "reason"];
    assert_eq!(
        lines.access(&fields),
        [
            json!(["inbound", "GET", "/yes", 200, "admitted", null, null, null]),
            json!(["inbound", "GET", "/watched", 200, "shadow", "watched", "watched", "limit"]),
            json!(["inbound", "GET", "/no/x", 429, "refused", "no", "no", "limit"]),
            json!(["inbound", "HEAD", "/yes", 400, "rejected", null, null, "host"]),
            json!(["api", "POST", "/v1/check", 429, "refused", null, "account", "limit"]),
            json!(["api", "PUT", "/no/1", 429, "refused", "no", "no", "limit"]),
        ]
    );
    let fields = ["ip", "host", "trace_id", "action", "key", "bytes", "aborted"];
    let details = lines.access(&fields);
    assert_eq!(details[0], json!(["127.0.0.1", "shop.test", TRACE, null, null, 5, null]));
    assert_eq!(details[3][5], 0, "a HEAD request gets no body");
    assert_eq!(details[4].as_array().unwrap()[..1], [json!("192.0.2.7")]);
    assert_eq!(details[4].as_array().unwrap()[3..5], [json!("account"), json!("sk_s…(9)")]);
    let times = lines.access(&["upstream_us", "duration_us"]);
    assert!(times[0][0].is_u64() && times[0][1].is_u64() && times[2][0].is_null(), "{times:?}");
    assert!(!lines.text().contains("s3cret"), "{}", lines.text());
    let of_refusals = lines.text().lines().filter(|line| line.contains(r#""message":"refused""#)).count();
    assert_eq!(of_refusals, 0, "a refusal has one line");
}

#[tokio::test]
async fn refused_grpc_calls_are_logged_as_others_are() {
    let (lines, _guard) = capture("json");
    let gate = start(nobody(), &format!("{POLICY}\"all\"\n")).await;
    for path in ["/no", "/yes"] {
        let call = get(path).replace("\r\n\r\n", "\r\ncontent-type: application/grpc\r\n\r\n");
        assert_eq!(status(&once(gate.inbound, call).await), 200);
    }
    assert_eq!(lines.access(&["path", "status"]), [json!(["/no", 429]), json!(["/yes", 502])]);
}

#[tokio::test]
async fn rejected_requests_show_the_forwarded_client() {
    let (lines, _guard) = capture("json");
    let policy = POLICY.replacen("[inbound", "[inbound]\ntrusted_proxies = [\"127.0.0.1\"]\n[inbound", 1);
    let gate = start(nobody(), &format!("{policy}\"all\"\n")).await;
    let forwarded = "x-forwarded-for: 198.51.100.1, 192.0.2.7\r\n";
    let ask = async |at, head: &str| status(&once(at, format!("{head}{forwarded}\r\n")).await);
    assert_eq!(ask(gate.inbound, "GET / HTTP/1.1\r\nhost: a b\r\n").await, 400);
    assert_eq!(ask(gate.inbound, "TRACE / HTTP/1.1\r\nhost: a\r\n").await, 405);
    assert_eq!(ask(gate.api, "GET /v1/auth HTTP/1.1\r\nhost: a\r\n").await, 400);
    // A question of a program is about the client that it names.
    assert_eq!(ask(gate.api, "GET /v1/nothing HTTP/1.1\r\nhost: 127.0.0.1\r\n").await, 404);
    let check = r#"{"action":"unknown","key":"sk_s3cret","ip":"192.0.2.8"}"#;
    assert_eq!(status(&once(gate.api, post("/v1/check", check)).await), 404);
    assert_eq!(
        lines.access(&["ip", "outcome", "key"]),
        [
            json!(["192.0.2.7", "rejected", null]),
            json!(["192.0.2.7", "rejected", null]),
            json!(["192.0.2.7", "rejected", null]),
            json!(["127.0.0.1", "rejected", null]),
            json!(["192.0.2.8", "rejected", "sk_s…(9)"]),
        ]
    );
}

#[tokio::test]
async fn requests_without_an_answer_of_the_upstream_are_counted() {
    let (lines, _guard) = capture("json");
    let gate = start(nobody(), &format!("{POLICY}\"refused\"\n")).await;
    let many = format!("GET / HTTP/1.1\r\nhost: a\r\n{}\r\n", "x: y\r\n".repeat(200));
    let both = "content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n";
    let rejected = [
        ("GET /a b HTTP/1.1\r\nhost: a\r\n\r\n", 400, "head"),
        ("GET / HTTP/1.1\r\nhost: a\r\nx\r\n\r\n", 400, "head"),
        ("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n", 400, "head"),
        (&many, 431, "head_size"),
        (&format!("POST / HTTP/1.1\r\nhost: a\r\n{both}"), 400, "framing"),
        ("GET a:80 HTTP/1.1\r\nhost: a\r\n\r\n", 400, "target"),
        ("TRACE / HTTP/1.1\r\nhost: a\r\n\r\n", 405, "method"),
        ("GET http://b/ HTTP/1.1\r\nhost: a\r\n\r\n", 400, "host"),
    ];
    for (request, expected, reason) in rejected {
        assert_eq!(status(&once(gate.inbound, request).await), expected, "{reason}");
    }
    assert_eq!(status(&once(gate.api, "GET\r\n\r\n").await), 400);
    assert_eq!(status(&once(gate.admin, "GET\r\n\r\n").await), 400);
    let of_inbound =
        rejected.iter().map(|(_, status, reason)| json!(["inbound", "127.0.0.1", status, "rejected", reason]));
    let expected: Vec<Value> = of_inbound.chain([json!(["api", "127.0.0.1", 400, "rejected", "head"])]).collect();
    assert_eq!(lines.access(&["listener", "ip", "status", "outcome", "reason"]), expected);
    assert_eq!(lines.access(&["method", "path"])[0], json!([null, null]), "a head that can't be read has neither");
    let text = lines.text();
    assert_eq!(text.lines().filter(|line| line.contains(r#""message":"rejected""#)).count(), 10, "{text}");
    let counts = &crate::common::json(&once(gate.admin, get("/v1/state")).await)["rejections"];
    let count = |reason: &str| counts[reason].as_u64().unwrap();
    let reasons = ["head", "head_size", "framing", "target", "method", "host"];
    assert_eq!(reasons.map(count), [5, 1, 1, 1, 1, 1]);
}

#[tokio::test]
async fn answers_without_a_decision_are_marked() {
    for mode in ["all", "refused"] {
        let (lines, _guard) = capture("json");
        let gate = start(nobody(), &format!("{POLICY}\"{mode}\"\n")).await;
        for question in
            ["/v1/status?action=account&key=sk_s3cret&ip=192.0.2.7", "/v1/explain?path=/no&method=GET&ip=192.0.2.9"]
        {
            assert_eq!(status(&once(gate.api, get(question)).await), 200);
        }
        let reset = r#"{"ip":"192.0.2.8"}"#;
        assert_eq!(status(&once(gate.api, post("/v1/reset", reset)).await), 200);
        let expected = [
            json!(["GET", "/v1/status", "answered", "192.0.2.7", "sk_s…(9)", null, "account"]),
            json!(["GET", "/v1/explain", "answered", "192.0.2.9", null, null, "no"]),
            json!(["POST", "/v1/reset", "answered", "192.0.2.8", null, null, null]),
        ];
        let found = lines.access(&["method", "path", "outcome", "ip", "key", "action", "actions"]);
        assert_eq!(found, if mode == "all" { &expected[..] } else { &[] });
    }
}

#[tokio::test]
async fn a_reload_switches_the_access_log() {
    let (lines, _guard) = capture("json");
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, &format!("{POLICY}\"off\"\n")).await;
    let mut client = Peer::connect(gate.inbound).await;
    let refused = |mode: &str| match mode {
        "off" => json!([]),
        "refused" => json!([["/watched"], ["/no"], ["/bad"]]),
        _ => json!([["/yes"], ["/watched"], ["/no"], ["/bad"]]),
    };
    for mode in ["off", "refused", "all", "off"] {
        *gate.file.lock().unwrap() = format!("{POLICY}\"{mode}\"\n");
        assert!(gate.reload.reload().await.unwrap().restart_needed.is_empty());
        let before = lines.access(&["path"]).len();
        for path in ["/yes", "/watched", "/no"] {
            client.ask(get(path)).await;
        }
        assert_eq!(status(&client.ask("GET /bad HTTP/1.1\r\nhost: a b\r\n\r\n").await), 400);
        client = Peer::connect(gate.inbound).await;
        assert_eq!(json!(lines.access(&["path"])[before..]), refused(mode), "{mode}");
    }
}

#[tokio::test]
async fn hostile_requests_forge_no_line() {
    for format in ["text", "json"] {
        let (lines, _guard) = capture(format);
        let upstream = Echo::start(HELLO).await;
        let gate = start(upstream.address, &format!("{POLICY}\"all\"\n")).await;
        for request in [
            "GET /%0A\u{9b}31m\"\\ HTTP/1.1\r\nhost: a\r\n\r\n",
            "GET / HTTP/1.1\r\nhost: a\u{9b}\"\r\ntraceparent: 00-\x1b[2J\r\n\r\n",
            "FORGED\u{9b} / HTTP/1.1\r\nhost: a\r\n\r\n",
        ] {
            once(gate.inbound, request).await;
        }
        let key = r#"{"action":"account","key":"k\n\u001b[2J","path":"/\nforged","method":"A\nB","host":"h\n"}"#;
        once(gate.api, post("/v1/check", key)).await;
        let text = lines.text();
        assert!(text.contains("31m"), "{text}");
        assert!(text.bytes().all(|byte| byte >= b' ' || byte == b'\n') && !text.contains('\u{9b}'), "{text}");
        let forged = |line: &&str| !line.starts_with("20") && !line.starts_with("{\"timestamp\":");
        assert_eq!(text.lines().find(forged), None);
    }
}

#[tokio::test]
async fn failed_and_abandoned_requests_are_marked() {
    let (lines, _guard) = capture("json");
    let gate = start(nobody(), &format!("{POLICY}\"all\"\n")).await;
    assert_eq!(status(&once(gate.inbound, get("/yes")).await), 502);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gate = start(listener.local_addr().unwrap(), &format!("{POLICY}\"all\"\n")).await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send(get("/gone")).await;
    let _silent = listener.accept().await.unwrap();
    drop(client);
    while lines.access(&[]).len() < 2 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let fields = ["path", "status", "outcome", "aborted"];
    assert_eq!(
        lines.access(&fields),
        [json!(["/yes", 502, "admitted", null]), json!(["/gone", null, "admitted", true])]
    );
}
