//! The gateway to other people's APIs as a program, with real servers behind it.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tidegate_testkit::client::{Answer, Client, get};
use tidegate_testkit::dice;
use tidegate_testkit::servers::{Running, Scratch, free_port, nginx};

/// Runs `tidegate serve` with this policy and these variables; gives the gateway's port.
fn gateway(policy: &str, env: &[(&str, &str)]) -> (Running, u16) {
    let port = free_port();
    let scratch = Scratch::new();
    let file = scratch.write("tidegate.toml", policy);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command
        .args(["serve", "--config"])
        .arg(file)
        .env("TIDEGATE__OUTBOUND__LISTEN", format!("127.0.0.1:{port}"))
        .env("TIDEGATE__API__LISTEN", "off")
        .env("TIDEGATE__ADMIN__LISTEN", "off")
        .envs(env.iter().copied());
    (Running::start(command, scratch, port), port)
}

/// A provider at a port of this machine.
fn provider(port: u16, settings: &str) -> String {
    format!("[outbound.provider.api]\nbase_url = \"http://127.0.0.1:{port}\"\n{settings}\n")
}

/// A server that reads requests with a body of known length, tells what it read, and answers as it is told to.
struct Upstream {
    port: u16,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Upstream {
    fn start(answer: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let upstream = Self { port: listener.local_addr().unwrap().port(), seen: Arc::default() };
        let (seen, answer) = (Arc::clone(&upstream.seen), Arc::new(answer));
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (seen, answer) = (Arc::clone(&seen), Arc::clone(&answer));
                thread::spawn(move || {
                    let mut reader = BufReader::new(stream);
                    while let Some(request) = read_request(&mut reader) {
                        seen.lock().unwrap().push(request.clone());
                        if reader.get_mut().write_all(answer(&request).as_bytes()).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        upstream
    }

    fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<String> {
    let head = read_head(reader)?;
    let length = head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).ok()?;
    Some(head + &String::from_utf8_lossy(&body))
}

fn read_head(reader: &mut impl BufRead) -> Option<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    Some(head)
}

fn reply(status: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n{body}", body.len())
}

/// Lets 50 clients ask without pause through a gateway with this limit, before an nginx that takes 10 a second and
/// refuses more with 429; gives what nginx logged, as statuses and seconds.
fn through_nginx(limit_req: &str, limit: &str, seconds: u32) -> Option<Vec<(u16, f64)>> {
    let upstream = free_port();
    let pages = Scratch::new();
    pages.write("page", "a page of nginx");
    // A page from a file, because `return` answers before `limit_req` is asked.
    let server = format!(
        "log_format line '$status $msec';\nlimit_req_zone $server_name zone=api:1m rate=10r/s;\n\
         limit_req_status 429;\nserver {{\n  listen 127.0.0.1:{upstream};\n  access_log access.log line;\n  \
         location / {{ root {}; limit_req zone=api {limit_req}; }}\n}}",
        pages.path().display()
    );
    let server = nginx(&server, upstream)?;
    let settings = format!("limit = \"{limit}\"\ntimeout = \"30s\"\nretry = {{ max_attempts = 1 }}");
    let (_gateway, port) = gateway(&provider(upstream, &settings), &[]);
    let going = Arc::new(AtomicBool::new(true));
    let clients: Vec<_> = (0..50)
        .map(|_| {
            let going = Arc::clone(&going);
            thread::spawn(move || {
                let mut client = Client::connect(port).unwrap();
                while going.load(Ordering::Relaxed) {
                    let answer = client.ask(get("/api/page"));
                    assert_eq!((answer.status, answer.body.as_str()), (200, "a page of nginx"), "{}", answer.head);
                }
            })
        })
        .collect();
    thread::sleep(Duration::from_secs(u64::from(seconds)));
    going.store(false, Ordering::Relaxed);
    let served: Vec<_> = clients.into_iter().map(thread::JoinHandle::join).collect();
    // nginx logs after it has answered.
    thread::sleep(Duration::from_millis(300));
    let log = server.read("access.log");
    let line = |line: &str| {
        let (status, at) = line.split_once(' ').unwrap();
        (status.parse().unwrap(), at.parse().unwrap())
    };
    let log: Vec<(u16, f64)> = log.lines().map(line).collect();
    let refused = log.iter().filter(|(status, _)| *status != 200).count();
    let gaps = log.windows(2).map(|pair| pair[1].1 - pair[0].1);
    let (least, all) = (gaps.clone().fold(f64::MAX, f64::min), gaps.sum::<f64>());
    println!("{} requests in {all:.3} s, at least {least:.3} s apart; {refused} refused", log.len());
    assert_eq!(refused, 0, "nginx refused some: {log:?}");
    assert!(served.into_iter().all(|client| client.is_ok()));
    Some(log)
}

/// How many of these were within so many seconds of the first.
fn within(log: &[(u16, f64)], seconds: u32) -> usize {
    log.iter().filter(|(_, at)| at - log[0].1 < f64::from(seconds)).count()
}

#[test]
fn nginx_without_a_burst_refuses_none_of_a_rate() {
    let seconds = dice::count(10, 60);
    let Some(log) = through_nginx("", "10/s", seconds) else { return };
    let served = within(&log, seconds);
    assert!(served * 100 >= seconds as usize * 10 * 95, "{served} calls got through in {seconds} s");
}

#[test]
fn nginx_with_a_burst_refuses_none_of_a_rate_with_a_burst() {
    let seconds = dice::count(10, 60);
    let Some(log) = through_nginx("burst=10 nodelay", "10/s burst 10", seconds) else { return };
    let served = within(&log, seconds);
    assert!(served * 100 >= (seconds as usize * 10 + 10) * 95, "{served} calls got through in {seconds} s");
}

/// The most memory that a process has had, in KiB.
fn most_memory(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

#[test]
fn a_large_upload_takes_little_memory_and_is_sent_once() {
    const CHUNK: usize = 64 << 10;
    let chunks = u64::from(dice::count(1 << 10, 1 << 14));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let upstream = listener.local_addr().unwrap().port();
    let (requests, arrived) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (counted, bytes) = (Arc::clone(&requests), Arc::clone(&arrived));
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut reader = BufReader::with_capacity(CHUNK, stream);
            while read_head(&mut reader).is_some() {
                counted.fetch_add(1, Ordering::Relaxed);
                // What the client sends meanwhile has to wait for it somewhere.
                thread::sleep(Duration::from_secs(1));
                let mut size = String::new();
                let mut buffer = vec![0; 1 << 20];
                loop {
                    size.clear();
                    if reader.read_line(&mut size).is_err() {
                        return;
                    }
                    let Ok(length) = usize::from_str_radix(size.trim(), 16) else { return };
                    buffer.resize(buffer.len().max(length + 2), 0);
                    if reader.read_exact(&mut buffer[..length + 2]).is_err() {
                        return;
                    }
                    if length == 0 {
                        break;
                    }
                    bytes.fetch_add(length as u64, Ordering::Relaxed);
                }
                let unwell = reply("503 Service Unavailable", "", "not now");
                if reader.get_mut().write_all(unwell.as_bytes()).is_err() {
                    return;
                }
            }
        }
    });
    let settings = "limit = \"100/s\"\ntimeout = \"10m\"\nattempt_timeout = \"10m\"";
    let (gateway, port) = gateway(&provider(upstream, settings), &[]);
    let mut client = Client::connect(port).unwrap();
    // The first brings what a first call costs.
    assert_eq!(client.ask(get("/nobody")).status, 404);
    let before = most_memory(gateway.id());
    client.send("PUT /api/object HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n");
    let mut chunk = format!("{CHUNK:x}\r\n").into_bytes();
    chunk.resize(chunk.len() + CHUNK, 0);
    chunk.extend_from_slice(b"\r\n");
    for _ in 0..chunks {
        client.send(&chunk);
    }
    let answer = client.ask("0\r\n\r\n");
    assert_eq!((answer.status, answer.body.as_str()), (503, "not now"), "{}", answer.head);
    assert_eq!(answer.header("tidegate-attempts"), Some("1"));
    let why = "the request can't be sent again: its body is larger than what is kept for another attempt";
    assert_eq!(answer.header("tidegate-error"), Some(why));
    assert_eq!(requests.load(Ordering::Relaxed), 1);
    assert_eq!(arrived.load(Ordering::Relaxed), chunks * CHUNK as u64, "all of it and nothing besides");
    let grown = most_memory(gateway.id()) - before;
    println!("{} MiB took {grown} KiB", chunks * CHUNK as u64 >> 20);
    assert!(grown < 8 << 10, "{grown} KiB for an upload");
}

#[test]
fn sigterm_loses_no_call() {
    let upstream = Upstream::start(|_| {
        thread::sleep(Duration::from_millis(300));
        reply("200 OK", "", "done")
    });
    let settings = "limit = [\"5/s\", \"4 in flight\"]\ntimeout = \"20s\"";
    let (mut gateway, port) = gateway(&provider(upstream.port, settings), &[]);
    let clients: Vec<_> = (0..10)
        .map(|_| {
            let mut client = Client::connect(port).unwrap();
            client.send(get("/api/x"));
            thread::spawn(move || client.answer())
        })
        .collect();
    // Some are under way and most are queued.
    thread::sleep(Duration::from_millis(400));
    let sent = upstream.seen().len();
    assert!((1..6).contains(&sent), "{sent} sent");
    gateway.signal("TERM");
    let answers: Vec<Answer> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.last), "{answers:?}");
    assert!(gateway.wait().expect("the gateway ends").success());
    let log = gateway.read("stderr");
    assert!(log.contains("stopped cut_off=0"), "{log}");
    assert_eq!(upstream.seen().len(), 10);
}

#[test]
fn what_cannot_wait_for_a_shutdown_is_cut_off() {
    let upstream = Upstream::start(|_| reply("200 OK", "", "done"));
    let settings = "limit = \"1 per 1m\"\ntimeout = \"2m\"\n[inbound.timeouts]\nshutdown = \"500ms\"";
    let (mut gateway, port) = gateway(&provider(upstream.port, settings), &[]);
    let mut client = Client::connect(port).unwrap();
    assert_eq!(client.ask(get("/api/x")).status, 200);
    client.send(get("/api/x"));
    thread::sleep(Duration::from_millis(100));
    gateway.signal("TERM");
    assert!(gateway.wait().expect("the gateway ends").success());
    let log = gateway.read("stderr");
    assert!(log.contains("stopped cut_off=1"), "{log}");
    assert_eq!(upstream.seen().len(), 1);
}

#[test]
fn beyond_loopback_it_wants_a_token() {
    let scratch = Scratch::new();
    let settings = "limit = \"1/s\"\n[outbound]\nlisten = \"0.0.0.0:0\"\n";
    let file = scratch.write("tidegate.toml", &provider(1, settings));
    let serve = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["serve", "--config"])
        .arg(file)
        .env("TIDEGATE__API__LISTEN", "off")
        .env("TIDEGATE__ADMIN__LISTEN", "off")
        .output()
        .unwrap();
    assert!(!serve.status.success());
    let told = String::from_utf8(serve.stderr).unwrap();
    let open = "outbound.listen = \"0.0.0.0:0\" is beyond loopback and needs outbound.token = \"env:NAME\"";
    assert!(told.contains(open), "{told}");
}

/// Providers that take a credential in each way there is, and fail in each way there is.
const EVERY_WAY: &str = r#"
    [outbound.provider.bearer]
    base_url = "http://127.0.0.1:PORT/bearer"
    auth = "bearer"
    credentials = ["env:PLANTED_BEARER", "env:PLANTED_SECOND"]
    limit = "1000/s burst 1000"
    retry = { base = "1ms", cap = "1ms" }
    [outbound.provider.header]
    base_url = "http://127.0.0.1:PORT/header"
    auth = "header:x-api-key"
    credentials = "env:PLANTED_HEADER"
    limit = "1000/s burst 1000"
    retry = { base = "1ms", cap = "1ms" }
    cache = "on"
    [outbound.provider.query]
    base_url = "http://127.0.0.1:PORT/query"
    auth = "query:api_key"
    credentials = "env:PLANTED_QUERY"
    limit = "1000/s burst 1000"
    retry = { base = "1ms", cap = "1ms" }
    [outbound.provider.path]
    base_url = "http://127.0.0.1:PORT/path/{key}"
    auth = "path"
    credentials = "env:PLANTED_PATH"
    limit = "1000/s burst 1000"
    retry = { base = "1ms", cap = "1ms" }
    [outbound.provider.login]
    base_url = "http://127.0.0.1:PORT/login"
    auth = "bearer"
    credentials = "env:PLANTED_LOGIN"
    limit = "1000/s burst 1000"
    retry = { base = "1ms", cap = "1ms" }
    login = { path = "/token", body = '{"apikey":"{credential}","pin":"{pin}"}', secrets = { pin = "env:PLANTED_PIN" } }
    [outbound.provider.gone]
    base_url = "http://127.0.0.1:1/{key}"
    auth = "path"
    credentials = "env:PLANTED_PATH"
    limit = "1000/s burst 1000"
    retry = { base = "1ms", cap = "1ms" }
"#;

const PLANTED: [(&str, &str); 6] = [
    ("PLANTED_BEARER", "pl4nted-bearer-7f3a/x+y"),
    ("PLANTED_SECOND", "pl4nted-second-7f3a/x+y"),
    ("PLANTED_HEADER", "pl4nted-header-7f3a/x+y"),
    ("PLANTED_QUERY", "pl4nted-query-7f3a/x+y"),
    ("PLANTED_PATH", "pl4nted-path-7f3a/x+y"),
    ("PLANTED_LOGIN", "pl4nted-login-7f3a/x+y"),
];
const PIN: (&str, &str) = ("PLANTED_PIN", "pl4nted-pin-7f3a/x+y");
const ENTRY: (&str, &str) = ("PLANTED_ENTRY", "pl4nted-entry-7f3a");
/// What the provider's login gives.
const TOKEN: &str = "pl4nted-token-7f3a";

/// A provider that repeats what it is told in headers, redirects, fails, breaks off and talks nonsense.
fn telltale(request: &str) -> String {
    let (line, _) = request.split_once("\r\n").unwrap();
    let target = line.split(' ').nth(1).unwrap();
    let shown = request.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        ["authorization", "x-api-key"].contains(&name.to_ascii_lowercase().as_str()).then(|| value.trim())
    });
    let shown = shown.unwrap_or("nothing");
    let echo = format!("x-echo: {shown}\r\nlink: <{target}>; rel=next\r\nset-cookie: seen={shown}\r\n");
    if line.starts_with("POST /login/token") {
        return reply("200 OK", &echo, &format!("{{\"token\":\"{TOKEN}\"}}"));
    }
    match target {
        _ if target.contains("/redirect") => {
            reply("302 Found", &format!("{echo}location: http://127.0.0.1:1{target}\r\n"), "")
        }
        _ if target.contains("/unwell") => reply("503 Service Unavailable", &echo, "unwell"),
        _ if target.contains("/many") => reply("429 Too Many Requests", &format!("{echo}retry-after: 1\r\n"), "many"),
        _ if target.contains("/auth") => reply("401 Unauthorized", &echo, "no"),
        _ if target.contains("/nonsense") => format!("HTTP/9.9 {shown} {target}\r\n\r\n"),
        _ => reply("200 OK", &format!("{echo}cache-control: max-age=60\r\n"), "fine"),
    }
}

#[test]
fn no_token_is_ever_told() {
    for format in ["text", "json"] {
        let upstream = Upstream::start(telltale);
        let policy = EVERY_WAY.replace("PORT", &upstream.port.to_string());
        let policy = format!(
            "[log]\nlevel = \"trace\"\nformat = \"{format}\"\n[outbound]\ntoken = \"env:PLANTED_ENTRY\"\n{policy}"
        );
        let env: Vec<_> = PLANTED.into_iter().chain([PIN, ENTRY]).collect();
        let (mut gateway, port) = gateway(&policy, &env);
        let mut told = String::new();
        for provider in ["bearer", "header", "query", "path", "login", "gone"] {
            for path in ["fine", "fine", "redirect?a=b", "unwell", "auth", "nonsense", "many", "../up", "fine"] {
                let request = format!(
                    "GET /{provider}/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nProxy-Authorization: Bearer {}\r\n\
                     Tidegate-Timeout: 500ms\r\n\r\n",
                    ENTRY.1
                );
                let answer = Client::connect(port).unwrap().ask(request);
                told += &format!("{provider}/{path}: {}\n{}\n", answer.head, answer.body);
            }
        }
        let answer = Client::connect(port).unwrap().ask(get("/bearer/x"));
        assert_eq!(answer.status, 407);
        told += &answer.head;
        told += &answer.body;
        gateway.signal("TERM");
        gateway.wait().expect("the gateway ends");
        let log = gateway.read("stderr");
        assert!(log.contains(if format == "json" { "\"level\":\"TRACE\"" } else { " TRACE " }), "{log}");
        let check = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .arg("check")
            .arg(Scratch::new().write("tidegate.toml", &policy))
            .envs(env.iter().copied())
            .output()
            .unwrap();
        assert!(!check.stdout.is_empty());
        let check = String::from_utf8_lossy(&check.stdout).into_owned() + &String::from_utf8_lossy(&check.stderr);
        // The provider was told: what isn't found below was there to be found.
        let seen = upstream.seen().join("\n");
        for name in ["bearer", "second", "header", "query", "path", "login", "pin", "token"] {
            assert!(seen.contains(&format!("pl4nted-{name}-7f3a")), "{name} was never sent: {seen}");
        }
        assert!(!seen.contains(ENTRY.1), "the gateway's own token is not the provider's business");
        for (place, text) in [("answers", &told), ("log", &log), ("output", &gateway.read("stdout")), ("check", &check)] {
            let lines: Vec<&str> = text.lines().filter(|line| line.contains("pl4nted") || line.contains("7f3a")).collect();
            assert!(lines.is_empty(), "the {place} tell:\n{}", lines.join("\n"));
        }
    }
}
