//! Envoy's rate limit service.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, Request};
use prost::Message;
use serde_json::json;
use tidegate::Span;
use tidegate_testkit::servers::{ScratchDir, free_port};
use tokio::net::TcpStream;

use crate::common::{
    PATIENCE, Peer, Running, body, capture, json as parsed, nobody, once, policy, post, start, status, try_start,
};
pub(crate) use messages::{Code, Descriptor, DescriptorStatus, RateLimitRequest};
use messages::{Entry, HealthRequest, HealthResponse, Override, RateLimitResponse, ServingStatus, Unit};

#[path = "../../src/wire/rls/messages.rs"]
mod messages;

const FILE: &str = r#"
    [inbound.action.login]
    match = { method = "POST", path = "/login" }
    limit = "5 per 60s"
    penalty = { base = "2s", cap = "1h" }
    [inbound.action.tenant]
    key = ["header:x-tenant", "key"]
    limit = "1000 per 1h"
    [inbound.action.slow]
    limit = "3 per 7m"
    [inbound.action.free]
    limit = "unlimited"
    [inbound.action.held]
    limit = "2 in flight"
"#;
const CHECK: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// The error of a call: its gRPC status, or its HTTP status if it isn't 200.
pub(crate) type CallError = (u16, String);

/// A gate with the service, and its address.
async fn serve(more: &str) -> (Running, SocketAddr) {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    (start(nobody(), &format!("{FILE}[rls]\nlisten = \"{address}\"\n{more}")).await, address)
}

pub(crate) async fn connect(address: SocketAddr) -> SendRequest<Bytes> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    client
}

pub(crate) fn framed(message: &impl Message) -> Vec<u8> {
    let encoded = message.encode_to_vec();
    [&[0], &u32::try_from(encoded.len()).unwrap().to_be_bytes()[..], &encoded].concat()
}

/// Makes a call as gRPC over HTTP/2 describes it.
pub(crate) async fn call<O: Message + Default>(
    client: &SendRequest<Bytes>,
    path: &str,
    bytes: Vec<u8>,
    headers: &[(&str, &str)],
) -> Result<O, CallError> {
    let mut request = Request::post(format!("http://a-cluster{path}")).header("te", "trailers");
    request = request.header("content-type", "application/grpc");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let mut client = client.clone().ready().await.unwrap();
    let (response, mut body) = client.send_request(request.body(()).unwrap(), false).unwrap();
    body.send_data(bytes.into(), true).unwrap();
    let (head, mut body) = tokio::time::timeout(PATIENCE, response).await.unwrap().unwrap().into_parts();
    let mut received = Vec::new();
    while let Some(bytes) = body.data().await {
        received.extend_from_slice(&bytes.unwrap());
    }
    let trailers = body.trailers().await.unwrap().unwrap_or_default();
    if head.status != 200 {
        return Err((head.status.as_u16(), String::from_utf8_lossy(&received).into_owned()));
    }
    let told = |name: &str| {
        [&trailers, &head.headers]
            .into_iter()
            .find_map(|map: &HeaderMap| Some(map.get(name)?.to_str().unwrap().to_owned()))
    };
    match told("grpc-status").expect("a status").as_str() {
        "0" => Ok(O::decode(&received[5..]).unwrap()),
        status => {
            let message = told("grpc-message").unwrap_or_default();
            let message = percent_encoding::percent_decode_str(&message).decode_utf8().unwrap();
            Err((status.parse().unwrap(), message.into_owned()))
        }
    }
}

pub(crate) fn descriptor(entries: &[(&str, &str)]) -> Descriptor {
    let entry = |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: value.as_bytes().to_vec() };
    Descriptor { entries: entries.iter().map(entry).collect(), ..Descriptor::default() }
}

pub(crate) fn request(descriptors: impl Into<Vec<Descriptor>>) -> RateLimitRequest {
    RateLimitRequest { domain: "tidegate".to_owned(), descriptors: descriptors.into(), hits_addend: 0 }
}

pub(crate) async fn ask(
    client: &SendRequest<Bytes>,
    request: &RateLimitRequest,
) -> Result<RateLimitResponse, CallError> {
    call(client, CHECK, framed(request), &[]).await
}

async fn status_of(client: &SendRequest<Bytes>, descriptor: Descriptor) -> DescriptorStatus {
    let response = ask(client, &request([descriptor])).await.unwrap();
    assert_eq!(response.overall_code, response.statuses[0].code);
    response.statuses[0].clone()
}

pub(crate) fn header<'r>(response: &'r RateLimitResponse, name: &str) -> Option<&'r str> {
    let headers = &response.response_headers_to_add;
    headers.iter().find(|entry| entry.key == name).map(|entry| str::from_utf8(&entry.value).unwrap())
}

const LOGIN: [(&str, &str); 2] = [("action", "login"), ("ip", "203.0.113.7")];

#[tokio::test]
async fn descriptors_are_decided_until_refused() {
    let (gate, address) = serve("").await;
    let client = connect(address).await;
    for left in (0..5).rev() {
        let response = ask(&client, &request([descriptor(&LOGIN)])).await.unwrap();
        let [status] = &response.statuses[..] else { panic!("{response:?}") };
        assert_eq!((response.overall_code(), status.code()), (Code::Ok, Code::Ok));
        let limit = status.current_limit.as_ref().unwrap();
        assert_eq!((limit.requests_per_unit, limit.unit(), &*limit.name), (5, Unit::Minute, "login"));
        assert_eq!((status.limit_remaining, status.duration_until_reset.as_ref().unwrap().seconds), (left, 60));
        assert_eq!(header(&response, "ratelimit"), Some(&*format!("\"login\";r={left};t=60")));
        assert_eq!(header(&response, "retry-after"), None);
    }
    let response = ask(&client, &request([descriptor(&LOGIN)])).await.unwrap();
    let status = &response.statuses[0];
    assert_eq!((response.overall_code(), status.code(), status.limit_remaining), (Code::OverLimit, Code::OverLimit, 0));
    let wait: u64 = header(&response, "retry-after").unwrap().parse().unwrap();
    assert_eq!(status.duration_until_reset.as_ref().unwrap().seconds, i64::try_from(wait).unwrap());
    assert_eq!(
        (header(&response, "ratelimit-policy"), header(&response, "content-type")),
        (Some("\"login\";q=5;w=60"), None)
    );
    gate.clock.advance(Span::from_secs(wait));
    assert_eq!(status_of(&client, descriptor(&LOGIN)).await.code(), Code::Ok, "the wait is true");
}

#[tokio::test]
async fn all_interfaces_share_one_count() {
    let (gate, address) = serve("").await;
    let client = connect(address).await;
    let check = || async { once(gate.api, post("/v1/check", r#"{"action":"login","ip":"203.0.113.7"}"#)).await };
    for _ in 0..2 {
        assert_eq!(status_of(&client, descriptor(&LOGIN)).await.code(), Code::Ok);
        assert_eq!(status(&check().await), 200);
    }
    // The same action, found by the request itself.
    let by_path = [("remote_address", "203.0.113.7"), ("method", "POST"), ("path", "/login")];
    assert_eq!(status_of(&client, descriptor(&by_path)).await.code(), Code::Ok);
    assert_eq!(status(&check().await), 429);
    let auth = "GET /v1/auth?action=login HTTP/1.1\r\nhost: gate.test\r\nx-forwarded-for: 203.0.113.7\r\n\r\n";
    assert_eq!(status(&once(gate.api, auth).await), 200, "the front server isn't trusted, so this is its own count");
    let other = [("action", "login"), ("ip", "203.0.113.8")];
    assert_eq!(status_of(&client, descriptor(&other)).await.code(), Code::Ok);
    let blocked = parsed(&once(gate.admin, "GET /v1/blocks HTTP/1.1\r\nhost: gate.test\r\n\r\n").await);
    assert_eq!(blocked["clients"][0]["client"], json!({ "client_ip": "203.0.113.7" }));
}

#[tokio::test]
async fn each_descriptor_has_a_status() {
    let (_gate, address) = serve("").await;
    let client = connect(address).await;
    let slow = descriptor(&[("action", "slow"), ("ip", "203.0.113.7")]);
    let free = descriptor(&[("action", "free")]);
    let tenant = descriptor(&[("action", "tenant"), ("header:x-tenant", "a"), ("key", "k")]);
    let all = request([slow.clone(), free, tenant]);
    for _ in 0..3 {
        assert_eq!(ask(&client, &all).await.unwrap().overall_code(), Code::Ok);
    }
    let response = ask(&client, &all).await.unwrap();
    let codes: Vec<_> = response.statuses.iter().map(DescriptorStatus::code).collect();
    assert_eq!((response.overall_code(), &codes[..]), (Code::OverLimit, &[Code::OverLimit, Code::Ok, Code::Ok][..]));
    let units: Vec<_> =
        response.statuses.iter().map(|status| status.current_limit.as_ref().map(|it| it.unit())).collect();
    assert_eq!(units, [Some(Unit::Unknown), None, Some(Unit::Hour)]);
    let remaining: Vec<_> = response.statuses.iter().map(|status| status.limit_remaining).collect();
    assert_eq!(remaining, [0, u32::MAX, 996]);
    assert_eq!(
        (header(&response, "ratelimit"), header(&response, "retry-after")),
        (Some("\"slow\";r=0;t=420"), Some("420"))
    );
}

#[tokio::test]
async fn hits_are_costs_questions_and_refunds() {
    let (_gate, address) = serve("").await;
    let client = connect(address).await;
    let tenant = descriptor(&[("action", "tenant"), ("header:x-tenant", "a"), ("key", "k")]);
    let left = async |hits_addend: Option<u64>, is_negative_hits, request_hits| {
        let one = Descriptor { hits_addend, is_negative_hits, ..tenant.clone() };
        let asked = RateLimitRequest { hits_addend: request_hits, ..request([one]) };
        ask(&client, &asked).await.unwrap().statuses[0].limit_remaining
    };
    assert_eq!(left(None, false, 0).await, 999);
    assert_eq!(left(None, false, 100).await, 899);
    assert_eq!(left(Some(9), false, 100).await, 890);
    assert_eq!(left(Some(0), false, 100).await, 890);
    assert_eq!(left(Some(10), true, 0).await, 900);
    assert_eq!(left(Some(1000), true, 0).await, 1000, "a refund never exceeds the capacity");
}

#[tokio::test]
async fn invalid_requests_are_errors_and_count_nothing() {
    let (_gate, address) = serve("").await;
    let client = connect(address).await;
    let login = descriptor(&LOGIN);
    let error = async |asked: RateLimitRequest| ask(&client, &asked).await.expect_err("an error");
    assert_eq!(
        error(RateLimitRequest { domain: String::new(), ..request([login.clone()]) }).await,
        (3, "`domain` is empty".to_owned())
    );
    assert_eq!(error(request([])).await, (3, "`descriptors` is empty".to_owned()));
    for (entries, code, message) in [
        (&[("acton", "login")][..], 3, "descriptor 1: unknown field `acton`; did you mean `action`?"),
        (&[("action", "login"), ("action", "login")], 3, "descriptor 1: `action` is there twice"),
        (&[("action", "lgoin")], 5, "unknown action \"lgoin\"; did you mean \"login\"?"),
        (&[("ip", "203.0.113.7")], 3, "descriptor 1: `action` is missing (or the `method` and `path` that find one)"),
        (
            &[("action", "held"), ("ip", "203.0.113.7")],
            9,
            "descriptor 1: a limit on calls in flight can't be kept here, because the end of a call isn't told",
        ),
        (
            &[("action", "login"), ("permit", "00000000000000aa")],
            3,
            "descriptor 1: `permit` belongs to /v1/release and /v1/renew, not /v1/check",
        ),
    ] {
        let (found, text) = error(request([login.clone(), descriptor(entries)])).await;
        assert_eq!((found, &*text), (code, message), "{entries:?}");
    }
    let limit = Some(Override { requests_per_unit: 5, unit: Unit::Minute.into() });
    assert_eq!(error(request([login.clone(), Descriptor { limit, ..login.clone() }])).await.0, 3);
    let broken =
        call::<RateLimitResponse>(&client, CHECK, vec![0, 0, 0, 0, 2, 0xff, 0xff], &[]).await.expect_err("an error");
    assert_eq!(broken.0, 13);
    let elsewhere =
        call::<RateLimitResponse>(&client, "/a.Service/Method", framed(&request([login.clone()])), &[]).await;
    assert_eq!(elsewhere.expect_err("an error").0, 12);
    assert_eq!(status_of(&client, login).await.limit_remaining, 4, "nothing was counted");
}

#[tokio::test]
async fn uncountable_requests_are_refused() {
    let (_gate, address) = serve("[inbound]\nambiguous_paths = \"refuse\"\n").await;
    let client = connect(address).await;
    let by_path = async |path| {
        status_of(&client, descriptor(&[("ip", "203.0.113.7"), ("method", "POST"), ("path", path)])).await.code()
    };
    assert_eq!(by_path("/login").await, Code::Ok);
    assert_eq!(by_path("/a%2f../login").await, Code::OverLimit);
    for entries in [
        &[("action", "login"), ("ip", "203.0.113")][..],
        &[("action", "login")],
        &[("action", "tenant"), ("header:x-tenant", "a")],
        &[("action", "login"), ("ip", "203.0.113.7"), ("key", &"k".repeat(2 << 20))],
    ] {
        let response = ask(&client, &request([descriptor(&LOGIN), descriptor(entries)])).await.unwrap();
        assert_eq!(response.overall_code(), Code::OverLimit, "{entries:?}");
    }
}

#[tokio::test]
async fn absent_headers_are_the_clients_choice() {
    let (_gate, address) =
        serve("[inbound.action.keyed]\nkey = \"header:x-key\"\nmissing = \"share\"\nlimit = \"1 per 1h\"\n").await;
    let client = connect(address).await;
    let keyed = descriptor(&[("action", "keyed")]);
    for code in [Code::Ok, Code::OverLimit] {
        assert_eq!(status_of(&client, keyed.clone()).await.code(), code);
    }
}

#[tokio::test]
async fn the_global_limit_counts_a_request_once() {
    let (_gate, address) = serve("[inbound.global]\nlimit = \"3 per 1h\"\n").await;
    let client = connect(address).await;
    let tenant = descriptor(&[("action", "tenant"), ("header:x-tenant", "a"), ("key", "k")]);
    for code in [Code::Ok, Code::Ok, Code::Ok, Code::OverLimit] {
        let free = descriptor(&[("action", "free"), ("ip", "203.0.113.7")]);
        let asked = request([tenant.clone(), free.clone(), free]);
        assert_eq!(ask(&client, &asked).await.unwrap().overall_code(), code);
    }
    assert_eq!(status_of(&client, tenant).await.code(), Code::Ok, "without an address");
}

#[tokio::test]
async fn unknown_domains_are_admitted_with_a_warning() {
    let (lines, _guard) = capture("text");
    let (_gate, address) = serve("").await;
    let client = connect(address).await;
    for _ in 0..2 {
        let asked =
            RateLimitRequest { domain: "other".to_owned(), ..request([descriptor(&LOGIN), descriptor(&LOGIN)]) };
        let response = ask(&client, &asked).await.unwrap();
        let is_plain = |status: &DescriptorStatus| status.code() == Code::Ok && status.current_limit.is_none();
        assert!(response.overall_code() == Code::Ok && response.statuses.iter().all(is_plain), "{response:?}");
        assert_eq!(response.statuses.len(), 2);
    }
    assert_eq!(lines.text().matches("unknown domain").count(), 1, "{}", lines.text());
}

const YAML: &str = r"
domain: edge
descriptors:
- key: user
  rate_limit: {unit: hour, requests_per_unit: 5, name: of_user}
- key: staff
  shadow_mode: true
  rate_limit: {unit: minute, requests_per_unit: 1}
- key: robot
  rate_limit: {unlimited: true, replaces: [{name: of_user}]}
- key: gold
  quota_mode: true
  rate_limit: {unit: month, requests_per_unit: 1}
- key: silver
  quota_mode: true
  rate_limit: {unit: year, requests_per_unit: 2}
- key: never
  rate_limit: {unit: second, requests_per_unit: 0}
";

/// A gate with the limits of a file, and its address.
async fn serve_files(more: &str) -> (Running, SocketAddr, ScratchDir) {
    let folder = ScratchDir::new();
    let file = folder.write("edge.yaml", YAML);
    let (gate, address) = serve(&format!("files = [\"{}\"]\n{more}", file.display())).await;
    (gate, address, folder)
}

async fn ask_edge(client: &SendRequest<Bytes>, descriptors: impl Into<Vec<Descriptor>>) -> RateLimitResponse {
    ask(client, &RateLimitRequest { domain: "edge".to_owned(), ..request(descriptors) }).await.unwrap()
}

/// The code, the limit with its unit, and the remaining amount of a status.
type Told = (Code, Option<(u32, Unit)>, u32);

fn told(response: &RateLimitResponse) -> Vec<Told> {
    let limit =
        |status: &DescriptorStatus| Some(status.current_limit.as_ref()?).map(|it| (it.requests_per_unit, it.unit()));
    response.statuses.iter().map(|status| (status.code(), limit(status), status.limit_remaining)).collect()
}

#[tokio::test]
async fn limits_of_files_are_decided() {
    let (gate, address, _folder) = serve_files("").await;
    let client = connect(address).await;
    let alice = descriptor(&[("user", "alice")]);
    let hour = Some((5, Unit::Hour));
    for left in (0..5).rev() {
        assert_eq!(told(&ask_edge(&client, [alice.clone()]).await), [(Code::Ok, hour, left)]);
    }
    let refused = ask_edge(&client, [alice.clone(), descriptor(&[("user", "bob")])]).await;
    assert_eq!(told(&refused), [(Code::OverLimit, hour, 0), (Code::Ok, hour, 4)]);
    assert_eq!((refused.overall_code(), header(&refused, "retry-after")), (Code::OverLimit, Some("3600")));
    // The same count through the API.
    let check = once(gate.api, post("/v1/check", r#"{"action":"edge.user","key":"alice"}"#)).await;
    assert_eq!((status(&check), parsed(&check)["bound_by"].clone()), (429, json!("edge.user")), "{check}");

    let shadow = descriptor(&[("staff", "")]);
    for _ in 0..2 {
        assert_eq!(told(&ask_edge(&client, [shadow.clone()]).await), [(Code::Ok, Some((1, Unit::Minute)), 0)]);
    }
    let replaced =
        ask_edge(&client, [alice.clone(), descriptor(&[("robot", "r")]), descriptor(&[("none", "n")])]).await;
    assert_eq!(told(&replaced), [(Code::Ok, None, 0), (Code::Ok, None, u32::MAX), (Code::Ok, None, 0)]);
    assert_eq!((replaced.overall_code(), &replaced.response_headers_to_add[..]), (Code::Ok, &[][..]));
    let never = ask_edge(&client, [descriptor(&[("never", "n")])]).await;
    assert_eq!(
        (told(&never), header(&never, "retry-after")),
        (vec![(Code::OverLimit, Some((0, Unit::Second)), 0)], None)
    );
}

#[tokio::test]
async fn one_quota_with_room_admits() {
    let (_gate, address, _folder) = serve_files("algorithm = \"fixed\"\n").await;
    let client = connect(address).await;
    let quotas = [descriptor(&[("gold", "g")]), descriptor(&[("silver", "s")])];
    let (gold, silver) = (Some((1, Unit::Month)), Some((2, Unit::Year)));
    for (overall, expected) in [
        (Code::Ok, [(Code::Ok, gold, 0), (Code::Ok, silver, 1)]),
        (Code::Ok, [(Code::OverLimit, gold, 0), (Code::Ok, silver, 0)]),
        (Code::OverLimit, [(Code::OverLimit, gold, 0), (Code::OverLimit, silver, 0)]),
    ] {
        let response = ask_edge(&client, quotas.clone()).await;
        assert_eq!((response.overall_code(), &told(&response)[..]), (overall, &expected[..]));
        assert_eq!(header(&response, "retry-after").is_some(), overall == Code::OverLimit);
    }
    let user = ask_edge(&client, [descriptor(&[("user", "u")]), quotas[0].clone(), quotas[1].clone()]).await;
    assert_eq!(user.overall_code(), Code::OverLimit, "all quotas are over");
}

#[tokio::test]
async fn hits_of_files_are_the_originals() {
    let (_gate, address, _folder) = serve_files("").await;
    let client = connect(address).await;
    let left = async |hits_addend: Option<u64>, is_negative_hits, request_hits| {
        let user = Descriptor { hits_addend, is_negative_hits, ..descriptor(&[("user", "a")]) };
        let asked = RateLimitRequest { domain: "edge".to_owned(), hits_addend: request_hits, ..request([user]) };
        let response = ask(&client, &asked).await.unwrap();
        (response.overall_code(), response.statuses[0].limit_remaining)
    };
    assert_eq!(left(None, false, 0).await, (Code::Ok, 4));
    assert_eq!(left(None, false, 2).await, (Code::Ok, 2));
    assert_eq!(left(Some(0), false, 2).await, (Code::Ok, 2));
    assert_eq!(left(None, false, 3).await, (Code::OverLimit, 0));
    assert_eq!(left(Some(0), false, 0).await, (Code::Ok, 2), "a strict limit counts all or nothing");
    assert_eq!(left(Some(1), true, 0).await, (Code::Ok, 3));
    // At the end of a call, its true cost is told, and the answer isn't read.
    assert_eq!(left(Some(4), false, 0).await, (Code::OverLimit, 0));
    assert_eq!(left(Some(0), false, 0).await, (Code::OverLimit, 0));
    assert_eq!(left(Some(2), true, 0).await, (Code::Ok, 2));
    assert_eq!(left(Some(0), false, 0).await, (Code::Ok, 2));
}

#[tokio::test]
async fn descriptors_may_state_their_limit() {
    let (gate, address, _folder) = serve_files("").await;
    let client = connect(address).await;
    let stating = |user: &str, requests_per_unit, unit: Unit| {
        let limit = Some(Override { requests_per_unit, unit: unit.into() });
        Descriptor { limit, ..descriptor(&[("user", user)]) }
    };
    let alice = stating("alice", 2, Unit::Minute);
    let minute = Some((2, Unit::Minute));
    for left in [1, 0] {
        assert_eq!(told(&ask_edge(&client, [alice.clone()]).await), [(Code::Ok, minute, left)]);
    }
    let refused = ask_edge(&client, [alice.clone(), descriptor(&[("user", "alice")])]).await;
    assert_eq!(
        told(&refused),
        [(Code::OverLimit, minute, 0), (Code::Ok, Some((5, Unit::Hour)), 4)],
        "the file's is apart"
    );
    assert_eq!((refused.overall_code(), header(&refused, "retry-after")), (Code::OverLimit, Some("30")));
    assert_eq!(refused.statuses[0].duration_until_reset.as_ref().unwrap().seconds, 30);
    gate.clock.advance(Span::from_secs(30));
    assert_eq!(told(&ask_edge(&client, [alice.clone()]).await), [(Code::Ok, minute, 0)], "the wait is true");
    assert_eq!(told(&ask_edge(&client, [stating("bob", 2, Unit::Minute)]).await), [(Code::Ok, minute, 1)]);
    let given_back = Descriptor { is_negative_hits: true, ..alice };
    assert_eq!(told(&ask_edge(&client, [given_back]).await), [(Code::Ok, minute, 1)]);
    let never = ask_edge(&client, [stating("carol", 0, Unit::Year)]).await;
    assert_eq!(
        (told(&never), header(&never, "retry-after")),
        (vec![(Code::OverLimit, Some((0, Unit::Year)), 0)], None)
    );
    let asked = RateLimitRequest { domain: "edge".to_owned(), ..request([stating("a", 1, Unit::Unknown)]) };
    assert_eq!(ask(&client, &asked).await.unwrap_err(), (3, "descriptor 0: the limit has no unit".to_owned()));
}

#[tokio::test]
async fn health_is_told_until_the_shutdown() {
    let (mut gate, address) = serve("").await;
    let client = connect(address).await;
    let health = async |service: &str| {
        let asked = HealthRequest { service: service.to_owned() };
        call::<HealthResponse>(&client, "/grpc.health.v1.Health/Check", framed(&asked), &[]).await
    };
    for service in ["", "envoy.service.ratelimit.v3.RateLimitService"] {
        assert_eq!(health(service).await.unwrap().status(), ServingStatus::Serving);
    }
    assert_eq!(health("other").await.expect_err("an error").0, 5);
    let summary = gate.stop().await.unwrap();
    assert_eq!(summary.cut_off, 0);
}

/// After an error, Envoy would let such a request pass.
#[tokio::test]
async fn values_of_clients_are_no_errors() {
    let (_gate, address) = serve("").await;
    let client = connect(address).await;
    let by_path = |host: &str, path: &str| {
        descriptor(&[("remote_address", "203.0.113.7"), ("method", "POST"), ("path", path), ("host", host)])
    };
    for host in ["a!b", "a,b", "*", "u@a.com", "a.com:x", "[::1", "é.com"] {
        assert_eq!(status_of(&client, by_path(host, "/login")).await.code(), Code::OverLimit, "{host}");
    }
    let long = format!("/login?{}", "x".repeat(60 << 10));
    assert_eq!(status_of(&client, by_path("a.test", &long)).await.limit_remaining, 4);
    let tenant = |value: &[u8]| {
        let mut tenant = descriptor(&[("action", "tenant"), ("header:x-tenant", ""), ("key", "k")]);
        tenant.entries[1].value = value.to_vec();
        tenant
    };
    for (value, code, remaining) in [
        (&b"a"[..], Code::Ok, 999),
        (b"a\n", Code::OverLimit, 0),
        (b"\0", Code::OverLimit, 0),
        (b"\xff\xfe", Code::Ok, 999),
        (b"\xfe\xff", Code::Ok, 998),
    ] {
        let status = status_of(&client, tenant(value)).await;
        assert_eq!((status.code(), status.limit_remaining), (code, remaining), "{}", value.escape_ascii());
    }
}

#[tokio::test]
async fn an_action_replaces_a_limit_of_the_files() {
    let replacing = "[inbound.action.\"edge.user\"]\nkey = \"key\"\nlimit = \"1 per 60s\"\n\
        penalty = { base = \"2s\", cap = \"1h\" }\n";
    let (folder, address) = (ScratchDir::new(), SocketAddr::from(([127, 0, 0, 1], free_port())));
    let yaml = "domain: edge\ndescriptors:\n- {key: user, rate_limit: {unlimited: true}}\n";
    let file = folder.write("edge.yaml", yaml);
    let policy = format!("[rls]\nlisten = \"{address}\"\nfiles = \"{}\"\n{replacing}", file.display());
    let gate = start(nobody(), &policy).await;
    let client = connect(address).await;
    let ask_user = async || ask_edge(&client, [descriptor(&[("user", "alice")])]).await;
    assert_eq!(ask_user().await.overall_code(), Code::Ok);
    // Two refusals in a row: the second block is longer than the limit's own wait.
    for wait in ["2", "4"] {
        let refused = ask_user().await;
        assert_eq!((refused.overall_code(), header(&refused, "retry-after")), (Code::OverLimit, Some(wait)));
        gate.clock.advance(Span::from_secs(wait.parse().unwrap()));
        assert_eq!(ask_user().await.overall_code(), Code::Ok, "one call passes after each block");
    }
}

#[tokio::test]
async fn global_limits_on_calls_in_flight_are_errors() {
    let (_gate, address) = serve("[inbound.global]\nlimit = \"8 in flight\"\n").await;
    let client = connect(address).await;
    assert_eq!(ask(&client, &request([descriptor(&LOGIN)])).await.expect_err("an error").0, 9);
}

#[tokio::test]
async fn a_token_is_asked_for() {
    let listen = format!("{FILE}[rls]\ntoken = \"env:RLS\"\nlisten = \"127.0.0.1:{}\"\n", free_port());
    let policy = policy(nobody(), &listen);
    let address = policy.rls().unwrap().listen.tcp().next().unwrap();
    let _gate = try_start(&policy, |name| (name == "RLS").then(|| "a-token-of-the-service".to_owned())).unwrap();
    let client = connect(address).await;
    let with = async |headers: &[(&str, &str)]| {
        call::<RateLimitResponse>(&client, CHECK, framed(&request([descriptor(&LOGIN)])), headers).await
    };
    let (unauthenticated, unavailable) = (16, 14);
    assert_eq!(with(&[]).await.expect_err("an error").0, unauthenticated);
    for number in 0..7 {
        let expected = if number < 5 { unauthenticated } else { unavailable };
        assert_eq!(with(&[("authorization", "Bearer wrong")]).await.expect_err("an error").0, expected);
    }
    assert_eq!(with(&[("authorization", "Bearer a-token-of-the-service")]).await.unwrap().overall_code(), Code::Ok);
}

#[tokio::test]
async fn only_grpc_over_http2_is_answered() {
    let (_gate, address) = serve("").await;
    let mut peer = Peer::connect(address).await;
    let over_http1 =
        format!("POST {CHECK} HTTP/1.1\r\nhost: a\r\ncontent-type: application/grpc\r\ncontent-length: 0\r\n\r\n");
    let answer = peer.ask(over_http1).await;
    assert_eq!(status(&answer), 415, "{}", body(&answer));
    let client = connect(address).await;
    let framed = || framed(&request([descriptor(&LOGIN)]));
    let page = call::<RateLimitResponse>(&client, CHECK, framed(), &[("origin", "http://evil.test")]).await;
    assert_eq!(page.expect_err("an error").0, 403);
}
