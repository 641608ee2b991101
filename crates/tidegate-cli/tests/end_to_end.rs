//! The gate as a program, with real servers in front of it and behind it.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tidegate_testkit::http_client::{HttpClient, get_request};
use tidegate_testkit::servers::{ChildProcess, ScratchDir, caddy, free_port, nginx, wrk};
use yaml_rust2::YamlLoader;

/// The ports of a gate.
struct Ports {
    gate: u16,
    api: u16,
    admin: u16,
}

/// Runs `tidegate serve` with this policy in front of `upstream`.
fn gate(policy: &str, upstream: u16) -> (ChildProcess, Ports) {
    gate_by(Command::new(env!("CARGO_BIN_EXE_tidegate")), policy, upstream)
}

/// The same by a command that passes its arguments to `tidegate`.
fn gate_by(mut command: Command, policy: &str, upstream: u16) -> (ChildProcess, Ports) {
    let ports = Ports { gate: free_port(), api: free_port(), admin: free_port() };
    let scratch = ScratchDir::new();
    let file = scratch.write("tidegate.toml", policy);
    command
        .args(["serve", "--config"])
        .arg(file)
        .env("TIDEGATE__INBOUND__LISTEN", format!("127.0.0.1:{}", ports.gate))
        .env("TIDEGATE__INBOUND__UPSTREAM", format!("http://127.0.0.1:{upstream}"))
        .env("TIDEGATE__API__LISTEN", format!("127.0.0.1:{}", ports.api))
        .env("TIDEGATE__ADMIN__LISTEN", format!("127.0.0.1:{}", ports.admin));
    (ChildProcess::start(command, scratch, ports.admin), ports)
}

/// An nginx that serves a page and logs each request. `more` is added to its `http` block.
fn pages(more: &str, port: u16, listens: u16) -> Option<ChildProcess> {
    let server = format!(
        "log_format line '$status $request';\nserver {{\n  listen 127.0.0.1:{port} backlog=1024;\n  \
         access_log access.log line;\n  keepalive_requests 100000000;\n  \
         location / {{ default_type text/plain; return 200 'a page of nginx'; }}\n}}\n{more}"
    );
    nginx(&server, listens)
}

fn lines(log: &str) -> u64 {
    log.lines().count() as u64
}

/// A policy for loads in which one in five requests goes to `/over`, which admits one an hour.
const ONE_IN_FIVE: &str = r#"
    [inbound.action.over]
    match = { path = "/over" }
    limit = "1 per 1h"
    [inbound.action.page]
    match = { path = "/page" }
    limit = "1000000000 per 1h"
"#;

#[test]
fn nginx_receives_exactly_the_admitted_requests() {
    let upstream = free_port();
    let Some(server) = pages("", upstream, upstream) else { return };
    let (_gate, ports) = gate(ONE_IN_FIVE, upstream);
    let threads: Vec<_> = (0..20)
        .map(|_| {
            thread::spawn(move || {
                let mut client = HttpClient::connect(ports.gate).unwrap();
                let (mut admitted, mut refused) = (0, 0);
                for number in 0..1000 {
                    let answer = client.request(get_request(if number % 5 == 0 { "/over" } else { "/page" }));
                    match answer.status {
                        200 => admitted += 1,
                        429 => refused += 1,
                        status => panic!("{status}: {}", answer.body),
                    }
                    assert!(!answer.closes_connection);
                }
                (admitted, refused)
            })
        })
        .collect();
    let (mut admitted, mut refused) = (0, 0);
    for thread in threads {
        let (more, none) = thread.join().unwrap();
        admitted += more;
        refused += none;
    }
    assert_eq!((admitted, refused), (16_001, 3_999));
    // nginx logs after it has answered.
    thread::sleep(Duration::from_millis(300));
    assert_eq!(lines(&server.read_file("access.log")), admitted);
}

#[test]
fn wrk_load_causes_no_errors() {
    let upstream = free_port();
    let Some(server) = pages("", upstream, upstream) else { return };
    let (gate, ports) = gate(ONE_IN_FIVE, upstream);
    let url = format!("http://127.0.0.1:{}", ports.gate);
    let connections = 25;
    let Some(over) = wrk(&format!("{url}/over"), connections, 3) else { return };
    let Some(page) = wrk(&format!("{url}/page"), 4 * connections, 3) else { return };
    let (over, page) = (over.finish(), page.finish());
    for load in [over, page] {
        assert_eq!(
            (load.server_errors, load.connect_errors, load.read_write_errors, load.timeouts),
            (0, 0, 0, 0),
            "{load:?}"
        );
    }
    assert!(page.answers > 1000 && over.answers > 1000);
    assert_eq!(page.not_ok, 0);
    assert_eq!(over.not_ok, over.answers - 1);
    thread::sleep(Duration::from_millis(300));
    // At its end wrk closes without waiting for its last requests, one per connection.
    let seen = lines(&server.read_file("access.log"));
    let answered = page.answers + 1;
    let left = u64::from(4 * connections);
    assert!((answered..=answered + left).contains(&seen), "{answered} answered, {seen} seen");
    let refusals = gate.read_file("stderr").lines().filter(|line| line.contains("refused ")).count();
    assert!((1..=60).contains(&refusals), "{refusals} lines about {} refusals", over.not_ok);
}

#[test]
fn sigterm_under_load_loses_no_request() {
    let upstream = free_port();
    let Some(server) = pages("", upstream, upstream) else { return };
    let (mut gate, ports) = gate(ONE_IN_FIVE, upstream);
    let (answered, going) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(true)));
    let threads: Vec<_> = (0..30)
        .map(|_| {
            let (answered, going) = (Arc::clone(&answered), Arc::clone(&going));
            thread::spawn(move || {
                while going.load(Ordering::Relaxed) {
                    let Some(mut client) = HttpClient::connect(ports.gate) else { return };
                    let Some(mut answer) = client.try_first_request(&get_request("/page")) else { return };
                    loop {
                        assert_eq!(answer.status, 200);
                        answered.fetch_add(1, Ordering::Relaxed);
                        if answer.closes_connection {
                            break;
                        }
                        answer = client.request(get_request("/page"));
                    }
                }
            })
        })
        .collect();
    thread::sleep(Duration::from_millis(500));
    gate.send_signal("TERM");
    let status = gate.wait().expect("the gate ends");
    assert!(status.success(), "{status}");
    going.store(false, Ordering::Relaxed);
    for thread in threads {
        thread.join().expect("no request is lost");
    }
    let log = gate.read_file("stderr");
    assert!(log.contains("stopped cut_off=0"), "{log}");
    thread::sleep(Duration::from_millis(300));
    let answered = answered.load(Ordering::Relaxed);
    assert!(answered > 100);
    assert_eq!(lines(&server.read_file("access.log")), answered);
}

#[test]
fn a_second_signal_exits_immediately() {
    // An upstream that never answers keeps the gate running.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut gate, ports) = gate("", silent.local_addr().unwrap().port());
    let mut client = HttpClient::connect(ports.gate).unwrap();
    client.send(get_request("/"));
    let _served = silent.accept().unwrap();
    gate.send_signal("TERM");
    thread::sleep(Duration::from_millis(300));
    assert!(TcpStream::connect(("127.0.0.1", ports.gate)).is_err());
    let mut admin = HttpClient::connect(ports.admin).unwrap();
    assert_eq!(admin.request(get_request("/readyz")).status, 503);
    gate.send_signal("INT");
    assert_eq!(gate.wait().and_then(|status| status.code()), Some(130));
}

/// A login with a growing penalty, as every front server enforces it.
const LOGIN: &str = r#"
    [inbound]
    trusted_proxies = ["127.0.0.0/8"]
    [inbound.action.login]
    match = { method = "POST", path = "/login" }
    limit = "5 per 60s"
    penalty = { base = "30s", cap = "1h" }
"#;

/// Returns a front server's responses to seven logins and one other request: the statuses, and the waits of refusals.
fn enforced(port: u16) -> Vec<(u16, Option<String>)> {
    let mut client = HttpClient::connect(port).unwrap();
    let login = "POST /login?next=/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n\r\na=b".to_owned();
    // A client's own forwarding headers change nothing.
    let lie = "POST /login HTTP/1.1\r\nHost: a.test\r\nX-Forwarded-For: 203.0.113.9\r\nX-Forwarded-Uri: /\r\n\
        X-Forwarded-Method: GET\r\nX-Original-Uri: /\r\nX-Original-Method: GET\r\nContent-Length: 0\r\n\r\n"
        .to_owned();
    let requests = [&login, &login, &lie, &login, &login, &login, &lie, &get_request("/elsewhere")];
    let ask = |request: &&String| {
        let answer = client.request(request.as_str());
        if answer.closes_connection {
            client = HttpClient::connect(port).unwrap();
        }
        let wait = answer.head.lines().find_map(|line| line.strip_prefix("retry-after: "));
        if answer.status == 429 {
            assert!(answer.body.contains("Too many requests"), "{}", answer.body);
        }
        (answer.status, wait.map(str::to_owned))
    };
    requests.iter().map(ask).collect()
}

fn expected() -> Vec<(u16, Option<String>)> {
    let mut expected = vec![(200, None); 5];
    expected.extend([(429, Some("30".to_owned())), (429, Some("30".to_owned())), (200, None)]);
    expected
}

#[test]
fn the_proxy_enforces_limits() {
    let upstream = free_port();
    let Some(_server) = pages("", upstream, upstream) else { return };
    // Here the client itself is the peer, and a trusted peer's headers would be believed.
    let policy = LOGIN.replace("trusted_proxies = [\"127.0.0.0/8\"]", "trusted_proxies = []");
    let (_gate, ports) = gate(&policy, upstream);
    assert_eq!(enforced(ports.gate), expected());
}

#[test]
fn nginx_with_the_snippet_enforces_limits() {
    let (front, upstream) = (free_port(), free_port());
    let (_gate, ports) = gate(&format!("{LOGIN}\n[api]\ndeny_status = 403\n"), upstream);
    let Some(server) = pages(&nginx_snippet(front, ports.api, upstream, false), upstream, front) else { return };
    assert_eq!(enforced(front), expected());
    let seen = server.read_file("access.log");
    assert_eq!(seen.lines().filter(|line| line.contains("POST /login")).count(), 5, "{seen}");
    let answer = HttpClient::connect(front).unwrap().request(get_request("/elsewhere"));
    assert_eq!(answer.body, "a page of nginx");
}

#[test]
fn nginx_with_the_snippet_passes_reservations_on() {
    let (front, upstream, application) = (free_port(), free_port(), free_port());
    let policy = "[inbound]\ntrusted_proxies = [\"127.0.0.0/8\"]\n[api]\ndeny_status = 403\n[inbound.action.all]\n\
        match = { path = \"/*\" }\nkey = \"action\"\nlimit = \"1 per 2s\"\nreserve = { share = 1 }\n";
    let (_gate, ports) = gate(policy, upstream);
    let tells_token = "location / { default_type text/plain; return 200 'token: $http_tidegate_reservation'; }";
    let snippet = nginx_snippet(front, ports.api, application, false);
    let more = format!("{snippet}server {{ listen 127.0.0.1:{application}; {tells_token} }}");
    let Some(_server) = pages(&more, upstream, front) else { return };
    let mut client = HttpClient::connect(front).unwrap();
    assert_eq!(client.request(get_request("/page")).status, 200);
    let refusal = client.request(get_request("/page"));
    let (token, _) = refusal.header("tidegate-reservation").unwrap().split_once(";at=").unwrap();
    assert_eq!(refusal.status, 429);
    let request =
        format!("GET /page HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\nTidegate-Reservation: {token}\r\n\r\n");
    let answer = loop {
        let answer = HttpClient::connect(front).unwrap().request(&request);
        // An early caller is told the same again.
        if answer.status == 200 || !answer.head.contains(token) {
            break answer;
        }
        thread::sleep(Duration::from_millis(100));
    };
    assert_eq!((answer.status, answer.body.as_str()), (200, "token: "), "{}", answer.head);
}

/// The lines with which the guide lets requests pass while the gate is away: into a block, and beside it.
const NGINX_OPEN: [&str; 2] = [
    "        proxy_connect_timeout 1s;\n        proxy_read_timeout 1s;\n        error_page 502 504 = @tidegate_away;\n",
    "    location @tidegate_away {\n        return 204;\n    }\n",
];
const CADDY_OPEN: [&str; 2] = [
    "\t\ttransport http {\n\t\t\tdial_timeout 1s\n\t\t\tresponse_header_timeout 1s\n\t\t}\n",
    "\thandle_errors {\n\t\t@away {\n\t\t\texpression `{err.status_code} in [502, 504]`\n\t\t\tnot vars tidegate answered\n\t\t}\n\
     \t\treverse_proxy @away 127.0.0.1:3000\n\t}\n",
];

/// The guide's configuration of nginx with these ports, open while the gate is away if `open`.
fn nginx_snippet(front: u16, api: u16, upstream: u16, open: bool) -> String {
    let mut snippet = include_str!("../../../docs/snippets/nginx.conf").to_owned();
    if open {
        let [inside, beside] = NGINX_OPEN;
        let place = "    location = /tidegate-auth {\n";
        snippet = snippet.replace(place, &format!("{beside}{place}{inside}"));
    }
    snippet
        .replace("127.0.0.1:8082", &format!("127.0.0.1:{api}"))
        .replace("127.0.0.1:8000", &format!("127.0.0.1:{front}"))
        .replace("127.0.0.1:3000", &format!("127.0.0.1:{upstream}"))
}

/// The guide's configuration of Caddy, as [`nginx_snippet`].
fn caddy_snippet(front: u16, api: u16, upstream: u16, open: bool) -> String {
    let mut snippet = include_str!("../../../docs/snippets/Caddyfile").to_owned();
    if open {
        let [inside, beside] = CADDY_OPEN;
        let (begin, proxied) = ("\tforward_auth 127.0.0.1:8082 {\n", "\treverse_proxy 127.0.0.1:3000 {\n");
        snippet = snippet.replace(begin, &format!("\troute {{\n{begin}{inside}"));
        snippet = snippet.replace(proxied, &format!("\t\tvars tidegate answered\n{proxied}"));
        let (site, end) = snippet.rsplit_once("}\n").unwrap();
        snippet = format!("{site}\t}}\n{beside}}}\n{end}");
    }
    snippet
        .replace("127.0.0.1:8082", &format!("127.0.0.1:{api}"))
        .replace("http://:8000", &format!("http://:{front}"))
        .replace("127.0.0.1:3000", &format!("127.0.0.1:{upstream}"))
}

/// The status of a request through a front server.
fn through(front: u16, path: &str) -> u16 {
    HttpClient::connect(front).unwrap().request(get_request(path)).status
}

/// A port on which no program listens, and that the system gives to none.
const NO_GATE: u16 = 1;

/// An address that accepts connections and never answers.
fn silent() -> (std::net::TcpListener, u16) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

#[test]
fn nginx_fails_closed_or_open_without_gate() {
    let (front, upstream, (_silent, silent)) = (free_port(), free_port(), silent());
    for (api, open, expected) in [(NO_GATE, false, 500), (NO_GATE, true, 200), (silent, true, 200)] {
        let Some(_nginx) = pages(&nginx_snippet(front, api, upstream, open), upstream, front) else { return };
        assert_eq!(through(front, "/page"), expected, "{open}");
    }
    let (_gate, ports) = gate(&LOGIN.replace("[inbound]", "[inbound]\ndeny = [\"127.0.0.1\"]"), upstream);
    let Some(_nginx) = pages(&nginx_snippet(front, ports.api, upstream, true), upstream, front) else { return };
    assert_eq!(through(front, "/page"), 403, "a refusal stays one");
}

#[test]
fn caddy_fails_closed_or_open_without_gate() {
    let (front, upstream) = (free_port(), free_port());
    let Some(_server) = pages("", upstream, upstream) else { return };
    let (_silent, silent) = silent();
    for (api, open, expected) in [(NO_GATE, false, 502), (NO_GATE, true, 200), (silent, true, 200)] {
        let Some(_caddy) = caddy(&caddy_snippet(front, api, upstream, open), front) else { return };
        assert_eq!(through(front, "/page"), expected, "{open}");
    }
    let (_gate, ports) = gate(&LOGIN.replace("[inbound]", "[inbound]\ndeny = [\"127.0.0.1\"]"), upstream);
    let Some(_caddy) = caddy(&caddy_snippet(front, ports.api, upstream, true), front) else { return };
    assert_eq!(through(front, "/page"), 403, "a refusal stays one");
}

/// The application closes the connection after it has read the request.
#[test]
fn an_open_caddy_repeats_no_request() {
    let front = free_port();
    let application = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (_gate, ports) = gate(LOGIN, free_port());
    let upstream = application.local_addr().unwrap().port();
    let Some(_caddy) = caddy(&caddy_snippet(front, ports.api, upstream, true), front) else { return };
    let requests = std::thread::spawn(move || {
        let mut count = 0;
        application.set_nonblocking(true).unwrap();
        for _ in 0..400 {
            match application.accept() {
                Ok((mut stream, _)) => {
                    let _ = std::io::Read::read(&mut stream, &mut [0; 4096]);
                    count += 1;
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        count
    });
    let answer = HttpClient::connect(front)
        .unwrap()
        .request("POST /order HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\nConnection: close\r\n\r\nabc=1");
    assert_eq!((answer.status, requests.join().unwrap()), (502, 1));
}

/// An application that takes one upload and answers 200. Returns the head of the request.
fn upload_target(size: usize) -> (u16, thread::JoinHandle<String>) {
    let application = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = application.local_addr().unwrap().port();
    let target = thread::spawn(move || {
        let (stream, _) = application.accept().unwrap();
        let mut reader = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            reader.read_line(&mut head).unwrap();
        }
        reader.read_exact(&mut vec![0; size]).unwrap();
        reader.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").unwrap();
        head.to_ascii_lowercase()
    });
    (port, target)
}

/// nginx refuses bodies over 1 MB unless a location takes more, also in the subrequest that asks the gate.
#[test]
fn uploads_pass_through_front_servers_without_the_reservation() {
    const SIZE: usize = 20 << 20;
    let (_gate, ports) = gate(LOGIN, free_port());
    let assert_passes = |front: u16, target: thread::JoinHandle<String>| {
        let head = format!(
            "POST /upload HTTP/1.1\r\nHost: a.test\r\nTidegate-Reservation: r{}\r\nContent-Length: {SIZE}\r\n\r\n",
            "0".repeat(29)
        );
        assert_eq!(HttpClient::connect(front).unwrap().request(head + &"x".repeat(SIZE)).status, 200);
        let head = target.join().unwrap();
        assert!(head.starts_with("post /upload ") && !head.contains("tidegate-"), "{head}");
    };
    let (front, (upstream, target)) = (free_port(), upload_target(SIZE));
    let snippet = nginx_snippet(front, ports.api, upstream, false);
    let snippet = snippet.replace("    location / {\n", "    location / {\n        client_max_body_size 32m;\n");
    let Some(_nginx) = pages(&snippet, free_port(), front) else { return };
    assert_passes(front, target);
    for open in [false, true] {
        let (front, (upstream, target)) = (free_port(), upload_target(SIZE));
        let Some(_caddy) = caddy(&caddy_snippet(front, ports.api, upstream, open), front) else { return };
        assert_passes(front, target);
    }
}

#[test]
fn nginx_may_name_an_action() {
    let (front, upstream) = (free_port(), free_port());
    let (gate, ports) = gate("[inbound.action.any]\nlimit = \"1 per 60s\"\n", upstream);
    let snippet = nginx_snippet(front, ports.api, upstream, false).replace("/v1/auth;", "/v1/auth?action=any;");
    let Some(_nginx) = pages(&snippet, upstream, front) else { return };
    // Without api.deny_status = 403, nginx turns the refusal into a 500.
    assert_eq!(["/a?action=b", "/b", "/c"].map(|path| through(front, path)), [200, 500, 500]);
    gate.wait_for_line("set api.deny_status = 403", Duration::from_secs(10));
    assert_eq!(gate.line_count("set api.deny_status = 403"), 1);
}

/// Caddy passes its client's query string on, unless the guide's `uri` has one.
#[test]
fn clients_of_caddy_evade_no_action_by_query() {
    let (front, upstream) = (free_port(), free_port());
    let Some(_server) = pages("", upstream, upstream) else { return };
    let policy = "[inbound]\ntrusted_proxies = [\"127.0.0.0/8\"]\n\
        [inbound.action.page]\nmatch = { path = \"/page\" }\nlimit = \"1 per 60s\"\n\
        [inbound.action.named]\nlimit = \"1 per 60s\"\n[inbound.action.other]\nlimit = \"unlimited\"\n";
    for (uri, path, expected) in [
        ("uri /v1/auth?", "/page", [200, 429, 429, 429, 429]),
        ("uri /v1/auth?action=named", "/elsewhere", [200, 429, 400, 429, 400]),
        // It passes its client's query string on, so a name in it isn't trusted.
        ("uri /v1/auth", "/page", [200, 400, 400, 429, 400]),
    ] {
        let (_gate, ports) = gate(policy, upstream);
        let snippet = caddy_snippet(front, ports.api, upstream, false).replace("uri /v1/auth?", uri);
        let Some(_caddy) = caddy(&snippet, front) else { return };
        let queries = ["?a=1", "?action=other", "?action=named", "?transaction=other", "?x&action=named"];
        let statuses = queries.map(|query| through(front, &format!("{path}{query}")));
        assert_eq!(statuses, expected, "{uri}");
    }
}

#[test]
fn caddy_with_the_snippet_enforces_limits() {
    let (front, upstream) = (free_port(), free_port());
    let (_gate, ports) = gate(LOGIN, upstream);
    let Some(server) = pages("", upstream, upstream) else { return };
    let Some(_caddy) = caddy(&caddy_snippet(front, ports.api, upstream, false), front) else { return };
    assert_eq!(enforced(front), expected());
    let seen = server.read_file("access.log");
    assert_eq!(seen.lines().filter(|line| line.contains("POST /login")).count(), 5, "{seen}");
}

/// Traefik isn't among Debian's packages, so the test itself sends the requests of its ForwardAuth with the snippet.
/// They have the client's headers, without those that the middleware empties and those that Traefik itself sets.
#[test]
fn simulated_traefik_with_the_snippet_enforces_limits() {
    let snippet = YamlLoader::load_from_str(include_str!("../../../docs/snippets/traefik.yml")).unwrap().remove(0);
    let (http, middlewares) = (&snippet["http"], &snippet["http"]["middlewares"]);
    let app = &http["routers"]["app"];
    let chain: Vec<_> = app["middlewares"].as_vec().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert_eq!(chain, ["undescribed", "tidegate", "used"]);
    let used = &http["middlewares"]["used"]["headers"]["customRequestHeaders"];
    assert_eq!(used["Tidegate-Reservation"].as_str(), Some(""));
    let service = &http["services"][app["service"].as_str().unwrap()];
    assert_eq!(service["loadBalancer"]["servers"][0]["url"].as_str(), Some("http://127.0.0.1:3000"));
    let set = middlewares["undescribed"]["headers"]["customRequestHeaders"].as_hash().unwrap();
    let is_emptied = |name: &str| {
        set.iter().any(|(key, value)| key.as_str().unwrap().eq_ignore_ascii_case(name) && value.as_str() == Some(""))
    };
    let forward_auth = &middlewares["tidegate"]["forwardAuth"];
    assert_eq!(forward_auth["trustForwardHeader"].as_bool(), Some(false));
    let path = forward_auth["address"].as_str().unwrap().strip_prefix("http://127.0.0.1:8082").unwrap();

    let (_gate, ports) = gate(LOGIN, free_port());
    let mut front = HttpClient::connect(ports.api).unwrap();
    let lies = [("X-Original-Method", "GET"), ("X-Original-URI", "/"), ("X-Original-URL", "http://b.test/")];
    let passed_on = lies.iter().filter(|(name, _)| !is_emptied(name));
    let passed_on: String = passed_on.map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let mut ask = |method: &str, uri: &str| {
        let answer = front.request(format!(
            "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{passed_on}X-Forwarded-For: 203.0.113.7\r\n\
             X-Forwarded-Host: a.test\r\nX-Forwarded-Method: {method}\r\nX-Forwarded-Port: 80\r\n\
             X-Forwarded-Proto: http\r\nX-Forwarded-Server: traefik\r\nX-Forwarded-Uri: {uri}\r\n\
             X-Real-Ip: 203.0.113.7\r\nAccept-Encoding: gzip\r\n\r\n"
        ));
        let wait = answer.head.lines().find_map(|line| line.strip_prefix("retry-after: "));
        (answer.status, wait.map(str::to_owned))
    };
    let mut answers: Vec<_> = (0..7).map(|_| ask("POST", "/login?next=/")).collect();
    answers.push(ask("GET", "/elsewhere"));
    assert_eq!(answers, expected());
}

#[test]
fn axum_with_the_layer_enforces_limits() {
    use axum::Router;
    use axum::routing::any;
    use tidegate::GateLayer;
    use tidegate::policy::Policy;
    use tidegate_policy::PolicySources;

    let policy = LOGIN.replace("trusted_proxies = [\"127.0.0.0/8\"]", "trusted_proxies = []");
    let policy = Policy::load(PolicySources::new().file("layer.toml", policy)).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let port = runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let gate = GateLayer::new(&policy);
        let app = Router::new().fallback(any(|| async { "a page of axum" })).layer(gate);
        let service = app.into_make_service_with_connect_info::<SocketAddr>();
        tokio::spawn(async move { axum::serve(listener, service).await });
        port
    });
    assert_eq!(enforced(port), expected());
}

#[test]
fn the_guide_contains_the_tested_snippets() {
    let guide = include_str!("../../../docs/forward-auth.md");
    for snippet in [
        include_str!("../../../docs/snippets/nginx.conf"),
        include_str!("../../../docs/snippets/Caddyfile"),
        include_str!("../../../docs/snippets/traefik.yml"),
        include_str!("../../../docs/snippets/envoy.yaml"),
        include_str!("../../../docs/snippets/envoy-authz.yaml"),
    ]
    .into_iter()
    .chain(NGINX_OPEN)
    .chain(CADDY_OPEN)
    {
        assert!(guide.contains(snippet), "{snippet}");
    }
}

#[test]
fn descriptor_limit_is_raised_and_compared_with_caps() {
    let command = |limits: &str, subcommand: &str, port: u16| {
        let mut command = Command::new("sh");
        command
            .args(["-c", &format!("ulimit {limits}; exec \"$0\" {subcommand}"), env!("CARGO_BIN_EXE_tidegate")])
            .env("TIDEGATE__INBOUND__LISTEN", format!("127.0.0.1:{}", free_port()))
            .env("TIDEGATE__INBOUND__UPSTREAM", "http://127.0.0.1:9")
            .env("TIDEGATE__INBOUND__CAPS__CONNECTIONS", "100")
            .env("TIDEGATE__API__LISTEN", "off")
            .env("TIDEGATE__ADMIN__LISTEN", format!("127.0.0.1:{port}"));
        command
    };
    let served = |limits: &str| {
        let (port, scratch) = (free_port(), ScratchDir::new());
        let mut gate = ChildProcess::start(command(limits, "serve", port), scratch, port);
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", gate.id())).unwrap_or_default();
        let soft = limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next());
        // At its end, all lines of the log are written.
        gate.send_signal("TERM");
        gate.wait().expect("the gate ends");
        (soft.map(str::to_owned), gate.line_count("fewer file descriptors") > 0)
    };
    let linux = |limit: &str| cfg!(target_os = "linux").then(|| limit.to_owned());
    // 100 twice, 64 of the admin listener, 42 for calls whose client has gone away, and 64 others.
    assert_eq!(served("-Sn 100; ulimit -Hn 400"), (linux("400"), false));
    assert_eq!(served("-n 300"), (linux("300"), true));
    let checked = |limits: &str| command(limits, "check", free_port()).current_dir("/").output().unwrap();
    let text = String::from_utf8(checked("-n 300").stdout).unwrap();
    assert!(text.contains("note: fewer file descriptors (300) than all connections may take (1864)"), "{text}");
    assert!(text.contains(", or lower inbound.caps.connections (100)\n"), "{text}");
    assert!(!String::from_utf8(checked("-Sn 100; ulimit -Hn 400").stdout).unwrap().contains("descriptors"));
}

#[test]
fn abandoned_calls_leave_descriptors_to_others() {
    for on_disconnect in ["close", "finish"] {
        let upstream = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = upstream.local_addr().unwrap().port();
        let (accepted, calls) = std::sync::mpsc::channel();
        thread::spawn(move || upstream.incoming().try_for_each(|stream| accepted.send(stream)));
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -n 256; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_tidegate")]);
        let policy = format!(
            "[inbound]\non_disconnect = \"{on_disconnect}\"\ntrusted_proxies = [\"127.0.0.1\"]\n\
             [inbound.action.all]\nmatch = {{ path = \"/\" }}\nlimit = \"1000 in flight\"\n"
        );
        let (gate, ports) = gate_by(command, &policy, port);
        let _held: Vec<_> = (0..300)
            .map(|number| {
                let mut client = HttpClient::connect(ports.gate).unwrap();
                client.send(format!("GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 2001:db8:{number:x}::1\r\n\r\n"));
                calls.recv_timeout(Duration::from_secs(10)).expect("the gate can connect").unwrap()
            })
            .collect();
        assert_eq!(HttpClient::connect(ports.admin).unwrap().request(get_request("/healthz")).status, 200);
        let open = std::fs::read_dir(format!("/proc/{}/fd", gate.id())).unwrap().count();
        assert!((30..200).contains(&open), "{open} descriptors are open");
        assert_eq!(gate.line_count("can't accept connections"), 0, "{}", gate.output());
    }
}

#[test]
fn health_is_told_when_connections_take_all_descriptors() {
    let upstream = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 256; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_tidegate")]);
    let (gate, ports) = gate_by(command, "", upstream.local_addr().unwrap().port());
    // Requests that never end, to an upstream that answers none, and connections without a request.
    let flood: Vec<_> = (0..400)
        .map(|number| {
            let mut client = HttpClient::connect([ports.gate, ports.api][number % 4 / 3]).unwrap();
            if number % 2 == 0 {
                client.send("POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\n1");
            }
            client
        })
        .collect();
    for _ in 0..5 {
        let answer = HttpClient::connect(ports.admin).unwrap().request(get_request("/healthz"));
        assert_eq!(answer.status, 200);
        let open = std::fs::read_dir(format!("/proc/{}/fd", gate.id())).unwrap().count();
        assert!(open < 240, "{open} descriptors are open");
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(gate.line_count("can't accept connections"), 0, "{}", gate.output());
    assert_eq!(gate.line_count("fewer file descriptors"), 1, "{}", gate.output());
    drop(flood);
}
