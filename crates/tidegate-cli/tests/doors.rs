//! One count for all ways to ask a gate, and for a program with the library, over each store.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use tidegate::clock::SystemClock;
use tidegate::policy::Policy;
use tidegate::store::AnyStore;
use tidegate::{Gate, Stores};
use tidegate_policy::{PolicySources, Query};
use tidegate_testkit::http_client::HttpClient;
use tidegate_testkit::servers::mariadb::mariadb;
use tidegate_testkit::servers::mongo::mongo;
use tidegate_testkit::servers::postgres::postgres;
use tidegate_testkit::servers::{ChildProcess, RedisServer, ScratchDir, free_port, require_program};

const POLICY: &str = r#"
[inbound]
trusted_proxies = ["127.0.0.0/8"]
[inbound.action.login]
match = { method = "POST", path = "/login" }
limit = "7 per 1h"
"#;
const RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const AUTHORIZE: &str = "/envoy.service.auth.v3.Authorization/Check";

/// A running gate, and the library over the same store, if others can share it.
struct Asked {
    curl: std::path::PathBuf,
    _running: ChildProcess,
    rls: u16,
    resp: u16,
    api: u16,
    library: Option<(tokio::runtime::Runtime, Gate<AnyStore>)>,
}

/// The ways to ask. Each asks about the same client, and returns true if the call is admitted.
const WAYS: [fn(&Asked) -> bool; 6] =
    [by_rate_limit_service, by_authorization_service, by_redis_protocol, by_decision_api, by_forward_auth, by_library];

/// A field of a message that is a text or another message.
fn field(tag: u8, content: impl AsRef<[u8]>) -> Vec<u8> {
    let content = content.as_ref();
    [&[tag << 3 | 2, u8::try_from(content.len()).unwrap()], content].concat()
}

/// Sends a message over gRPC, and returns the reply's.
fn call(asked: &Asked, path: &str, message: &[u8]) -> Vec<u8> {
    let framed = [&[0, 0, 0, 0, u8::try_from(message.len()).unwrap()], message].concat();
    let mut curl = Command::new(&asked.curl)
        .args(["-s", "--http2-prior-knowledge", "-H", "content-type: application/grpc", "-H", "te: trailers"])
        .args(["--data-binary", "@-", &format!("http://127.0.0.1:{}{path}", asked.rls)])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    curl.stdin.take().unwrap().write_all(&framed).unwrap();
    let reply = curl.wait_with_output().unwrap().stdout;
    reply.get(5..).unwrap_or_else(|| panic!("{reply:?}")).to_vec()
}

fn by_rate_limit_service(asked: &Asked) -> bool {
    let entry = |key: &str, value: &str| field(1, [field(1, key), field(2, value)].concat());
    let descriptor = [entry("action", "login"), entry("remote_address", "203.0.113.7")].concat();
    let reply = call(asked, RATE_LIMIT, &[field(1, "tidegate"), field(2, descriptor)].concat());
    // The first field is the code: 1 admits, 2 refuses.
    assert!(matches!(reply[..2], [8, 1 | 2]), "{reply:?}");
    reply[1] == 1
}

fn by_authorization_service(asked: &Asked) -> bool {
    let source = field(1, field(1, field(1, field(2, "203.0.113.7"))));
    let http = [field(2, "POST"), field(4, "/login"), field(5, "a.test")].concat();
    let reply = call(asked, AUTHORIZE, &field(1, [source, field(4, field(2, http))].concat()));
    // The first field is the status, which is empty to admit.
    assert_eq!(reply[0], 10, "{reply:?}");
    reply[1] == 0
}

fn by_redis_protocol(asked: &Asked) -> bool {
    let mut stream = TcpStream::connect(("127.0.0.1", asked.resp)).unwrap();
    stream.write_all(b"TG.CHECK login IP 203.0.113.7\r\nQUIT\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (_, rest) = reply.split_once("$7\r\nallowed\r\n:").unwrap_or_else(|| panic!("{reply}"));
    rest.starts_with('1')
}

fn http(port: u16, request: &str) -> bool {
    let answer = HttpClient::connect(port).unwrap().request(request);
    assert!([200, 429].contains(&answer.status), "{}", answer.head);
    answer.status == 200
}

fn by_decision_api(asked: &Asked) -> bool {
    let body = r#"{"action":"login","ip":"203.0.113.7"}"#;
    let length = body.len();
    http(asked.api, &format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}"))
}

fn by_forward_auth(asked: &Asked) -> bool {
    let headers = "x-forwarded-for: 203.0.113.7\r\nx-forwarded-method: POST\r\nx-forwarded-uri: /login";
    http(asked.api, &format!("GET /v1/auth HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n\r\n"))
}

fn by_library(asked: &Asked) -> bool {
    let Some((runtime, gate)) = &asked.library else { return by_decision_api(asked) };
    let query = Query { action: Some("login"), ip: Some([203, 0, 113, 7].into()), ..Query::default() };
    runtime.block_on(gate.check(&query)).unwrap().allowed
}

/// The library over the gate's store.
fn library(text: &str) -> (tokio::runtime::Runtime, Gate<AnyStore>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let policy = Policy::load(PolicySources::new().file("library.toml", text)).unwrap();
    let gate = runtime
        .block_on(async { Stores::open(&policy, |_| None).await.unwrap().gate(&policy, SystemClock::new()).unwrap() });
    (runtime, gate)
}

/// Spends a limit in turns through all ways, beginning with this one. Then each of them refuses.
fn check(store: &str, is_shared: bool, first: usize, scratch: ScratchDir) {
    let Some(curl) = require_program("curl") else { return };
    let [rls, resp, api] = [(); 3].map(|()| free_port());
    let text = format!("[store]\nurl = {store:?}\n{POLICY}");
    let sections = [("rls", rls), ("resp", resp), ("api", api)];
    let listens = sections.map(|(section, port)| format!("[{section}]\nlisten = \"127.0.0.1:{port}\"\n")).concat();
    let file = scratch.write("tidegate.toml", &format!("{text}{listens}[admin]\nlisten = \"off\"\n"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "--config"]).arg(file);
    let running = ChildProcess::start(command, scratch, api);
    let library = is_shared.then(|| library(&text));
    let asked = Asked { curl, _running: running, rls, resp, api, library };
    let in_turn = || WAYS.iter().cycle().skip(first);
    let admitted: Vec<bool> = in_turn().take(7).map(|way| way(&asked)).collect();
    assert_eq!(admitted, [true; 7], "{store}, from way {first} on");
    let refused: Vec<bool> = in_turn().take(6).map(|way| way(&asked)).collect();
    assert_eq!(refused, [false; 6], "{store}, from way {first} on");
}

#[test]
fn memory_is_one_count() {
    (0..WAYS.len()).for_each(|first| check("memory", false, first, ScratchDir::new()));
}

#[test]
fn a_file_is_one_count() {
    let scratch = ScratchDir::new();
    let path: &Path = scratch.path();
    check(&format!("file:{}", path.join("counts").display()), false, 2, scratch);
}

#[test]
fn redis_is_one_count() {
    let Some(server) = RedisServer::start() else { return };
    check(&server.url(), true, 0, ScratchDir::new());
}

#[test]
fn mariadb_is_one_count() {
    let Some(server) = mariadb() else { return };
    check(server.url(), true, 1, ScratchDir::new());
}

#[test]
fn postgres_is_one_count() {
    let Some(server) = postgres() else { return };
    check(server.url(), true, 3, ScratchDir::new());
}

#[test]
fn mongodb_is_one_count() {
    let Some(server) = mongo() else { return };
    check(server.url(), true, 4, ScratchDir::new());
}
