//! Envoy's external authorization service.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::client::SendRequest;
use tidegate_testkit::servers::free_port;

use crate::common::{Running, body, nobody, once, post, start, status};
use crate::rls::{CallError, call, connect, framed};
use messages::{
    Address, AppendAction, Attributes, CheckRequest, CheckResponse, Denied, Extension, Header, HttpRequest,
    HttpResponse, Ok as Admitted, Peer, RawHeaders, Request, SocketAddress,
};

#[path = "../../src/wire/ext_authz/messages.rs"]
mod messages;

const CHECK: &str = "/envoy.service.auth.v3.Authorization/Check";
const FILE: &str = r#"
    [inbound]
    trusted_proxies = ["192.0.2.0/24"]
    deny = ["198.51.100.9"]
    ambiguous_paths = "refuse"
    [inbound.action.login]
    match = { method = "POST", path = "/login" }
    limit = "2 per 60s"
    penalty = { base = "2s", cap = "1h" }
    [inbound.action.held]
    match = { path = "/held" }
    limit = "2 in flight"
"#;
const KEYED: &str = r#"
    [inbound.action.tenant]
    match = { path = "/tenant" }
    key = "header:x-tenant"
    limit = "2 per 60s"
"#;

async fn serve(more: &str) -> (Running, SendRequest<Bytes>) {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let gate = start(nobody(), &format!("{FILE}{more}[rls]\nlisten = \"{address}\"\n")).await;
    let client = connect(address).await;
    (gate, client)
}

fn entries(headers: &[(&str, &str)]) -> Vec<Header> {
    let header = |(name, value): &(&str, &str)| Header {
        key: (*name).to_owned(),
        value: value.as_bytes().to_vec(),
        raw_value: Vec::new(),
    };
    headers.iter().map(header).collect()
}

/// The question about a request of this address, in the form of a filter that joins the values of headers.
fn question(address: &str, line: &str, headers: &[(&str, &str)]) -> CheckRequest {
    let (method, path) = line.split_once(' ').unwrap();
    let socket = Some(SocketAddress { address: address.to_owned() });
    let http = HttpRequest {
        method: method.to_owned(),
        path: path.to_owned(),
        host: "a.test".to_owned(),
        headers: entries(&[&[(":path", path), ("user-agent", "a, b")], headers].concat()),
        ..HttpRequest::default()
    };
    let request = Some(Request { http: Some(http) });
    let source = Some(Peer { address: Some(Address { socket }) });
    CheckRequest { attributes: Some(Attributes { source, request, ..Attributes::default() }) }
}

/// The same with the headers as they came.
fn raw_question(address: &str, line: &str, headers: &[(&str, &str)]) -> CheckRequest {
    let mut question = question(address, line, &[]);
    let http = http_of(&mut question);
    http.headers.clear();
    http.header_map = Some(RawHeaders { headers: entries(headers) });
    question
}

fn http_of(question: &mut CheckRequest) -> &mut HttpRequest {
    question.attributes.as_mut().unwrap().request.as_mut().unwrap().http.as_mut().unwrap()
}

async fn ask(client: &SendRequest<Bytes>, question: &CheckRequest) -> Result<HttpResponse, CallError> {
    let response: CheckResponse = call(client, CHECK, framed(question), &[]).await?;
    let (code, http) = (response.status.unwrap().code, response.http_response.unwrap());
    assert_eq!(code == 0, matches!(http, HttpResponse::Ok(_)), "Envoy goes by the code");
    Ok(http)
}

/// The status of a refusal, or 200.
async fn status_for(client: &SendRequest<Bytes>, question: &CheckRequest) -> i32 {
    match ask(client, question).await.unwrap() {
        HttpResponse::Ok(_) => 200,
        HttpResponse::Denied(denied) => denied.status.unwrap().code,
    }
}

async fn error_of(client: &SendRequest<Bytes>, question: &CheckRequest) -> CallError {
    ask(client, question).await.expect_err("an error")
}

fn header_of(option: &messages::HeaderOption) -> (&str, &str) {
    assert_eq!(option.append_action(), AppendAction::OverwriteOrAdd);
    let Header { key, value, .. } = option.header.as_ref().unwrap();
    (key, str::from_utf8(value).unwrap())
}

fn headers_of(options: &[messages::HeaderOption]) -> Vec<(&str, &str)> {
    options.iter().map(header_of).collect()
}

#[tokio::test]
async fn requests_are_decided_as_by_the_proxy() {
    let (gate, client) = serve("").await;
    let login = question("203.0.113.7", "POST /login?next=%2F", &[]);
    for left in ["1", "0"] {
        let HttpResponse::Ok(Admitted { response_headers_to_add }) = ask(&client, &login).await.unwrap() else {
            panic!("refused")
        };
        let rate_limit = format!("\"login\";r={left};t=60");
        let expected = [("ratelimit-policy", "\"login\";q=2;w=60"), ("ratelimit", &*rate_limit)];
        assert_eq!(headers_of(&response_headers_to_add), expected);
    }
    let HttpResponse::Denied(Denied { status: refused, headers, body: text }) = ask(&client, &login).await.unwrap()
    else {
        panic!("admitted")
    };
    assert_eq!(refused.unwrap().code, 429);
    let by_proxy = once(gate.api, post("/v1/check", r#"{"action":"login","ip":"203.0.113.7"}"#)).await;
    assert_eq!(status(&by_proxy), 429, "one count");
    let headers = headers_of(&headers);
    assert!(headers.contains(&("retry-after", "2")) && headers.contains(&("content-type", "application/json")));
    assert!(text.starts_with(r#"{"error":"Too many requests","retry_after":2"#), "{text}, {}", body(&by_proxy));
    assert_eq!(status_for(&client, &question("203.0.113.8", "POST /login", &[])).await, 200, "another client");
    assert_eq!(status_for(&client, &question("198.51.100.9", "GET /", &[])).await, 403);
    // A problem for those that take one.
    let problem = question("203.0.113.7", "POST /login", &[("accept", "application/problem+json")]);
    let HttpResponse::Denied(Denied { headers, .. }) = ask(&client, &problem).await.unwrap() else {
        panic!("admitted")
    };
    assert!(headers_of(&headers).contains(&("content-type", "application/problem+json")));
}

#[tokio::test]
async fn the_client_is_behind_trusted_proxies() {
    let (_gate, client) = serve("").await;
    let behind = |proxy, forwarded| question(proxy, "POST /login", &[("x-forwarded-for", forwarded)]);
    for (proxy, forwarded, expected) in [
        ("192.0.2.1", "203.0.113.7", 200),
        ("192.0.2.2", "10.0.0.1, 203.0.113.7, 192.0.2.1", 200),
        ("192.0.2.1", "203.0.113.7", 429),
        ("203.0.113.7", "203.0.113.99", 429),
        ("192.0.2.1", "203.0.113.8", 200),
    ] {
        assert_eq!(status_for(&client, &behind(proxy, forwarded)).await, expected, "{proxy} for {forwarded}");
    }
}

#[tokio::test]
async fn the_route_may_name_the_action() {
    let (_gate, client) = serve("").await;
    let mut named = question("203.0.113.7", "GET /elsewhere", &[]);
    let extension = |key: &str, value: &str| Extension { key: key.to_owned(), value: value.to_owned() };
    named.attributes.as_mut().unwrap().context_extensions = vec![extension("other", "x"), extension("action", "login")];
    let mut statuses = Vec::new();
    for _ in 0..3 {
        statuses.push(status_for(&client, &named).await);
    }
    assert_eq!(statuses, [200, 200, 429]);
    named.attributes.as_mut().unwrap().context_extensions = vec![extension("action", "logni")];
    let (code, message) = error_of(&client, &named).await;
    assert!(code == 5 && message.contains("login"), "{message}");
}

#[tokio::test]
async fn headers_count_as_they_came() {
    let (_gate, client) = serve(KEYED).await;
    let tenants = |names: &[&'static str]| {
        let headers: Vec<_> = names.iter().map(|name| ("x-tenant", *name)).collect();
        raw_question("203.0.113.7", "GET /tenant", &headers)
    };
    for (names, expected) in
        [(&["a"][..], 200), (&["a", "1"], 200), (&["a", "2"], 429), (&["1", "a"], 429), (&["b"], 200)]
    {
        assert_eq!(status_for(&client, &tenants(names)).await, expected, "{names:?}");
    }
    let (code, message) = error_of(&client, &question("203.0.113.7", "GET /tenant", &[("x-tenant", "a,3")])).await;
    assert!(code == 9 && message.contains("encode_raw_headers"), "{message}");
}

#[tokio::test]
async fn invalid_requests_are_denied() {
    let (_gate, client) = serve("").await;
    let get = |headers: &[(&str, &str)]| question("203.0.113.7", "GET /", headers);
    for headers in [[("x-a", "b\nc")], [("x a", "b")], [("", "b")]] {
        assert_eq!(status_for(&client, &get(&headers)).await, 400, "{headers:?}");
    }
    let many = raw_question("203.0.113.7", "GET /", &[("", ""); 25_000]);
    assert_eq!(status_for(&client, &many).await, 400);
    let mut wrong_host = get(&[]);
    http_of(&mut wrong_host).host = "a b".to_owned();
    assert_eq!(status_for(&client, &wrong_host).await, 400);
    assert_eq!(status_for(&client, &question("203.0.113.7", "POST /a/../login", &[])).await, 400);
    let large = "a".repeat(60 << 10);
    assert_eq!(status_for(&client, &get(&[("x-large", &large)])).await, 200);
    let too_large = "a".repeat(130 << 10);
    assert_eq!(error_of(&client, &get(&[("x-large", &too_large)])).await.0, 413);
}

#[tokio::test]
async fn unanswerable_questions_are_errors() {
    let (_gate, client) = serve("").await;
    let (code, message) = error_of(&client, &CheckRequest::default()).await;
    assert!(code == 3 && message.contains("attributes"), "{message}");
    let (code, message) = error_of(&client, &question("203.0.113.7", "GET /held", &[])).await;
    assert!(code == 9 && message.contains("in flight"), "{message}");
    // A client without an IP address, such as that of a unix socket.
    let mut local = question("203.0.113.7", "POST /login", &[]);
    local.attributes.as_mut().unwrap().source = None;
    let (code, message) = error_of(&client, &local).await;
    assert!(code == 3 && message.contains("ip"), "{message}");
}
