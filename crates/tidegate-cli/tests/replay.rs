//! `tidegate replay` against running gates.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::IpAddr;
use std::path::Path;
use std::process::{Command, Stdio};

use http::{HeaderMap, HeaderValue};
use serde_json::Value;
use tidegate::Gate;
use tidegate::clock::ManualClock;
use tidegate::policy::Query;
use tidegate_core::{Reason, Time};
use tidegate_policy::{Policy, PolicySources};
use tidegate_testkit::http_client::{HttpClient, get_request};
use tidegate_testkit::random::RandomSource;
use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port, nginx};

/// A policy with every kind of limit, key and list that a log can show.
const POLICY: &str = r#"
[inbound]
upstream = "http://127.0.0.1:3000"
trusted_proxies = ["10.0.0.0/8"]
allow = ["198.51.100.0/28"]
deny = ["198.51.100.16/28"]

[inbound.global]
limit = "40 per 2m"
penalty = { base = "2s", cap = "1m", forgive_after = "5m" }

[inbound.action.login]
match = { method = "POST", path = "/login" }
limit = "5 per 60s"
penalty = { base = "2s", cap = "1h" }

[inbound.action.search]
match = { path = "/search/*" }
limit = ["1 per 20s burst 3", "6 per hour in Europe/Paris"]
key = ["client_ip", "header:user-agent"]

[inbound.action.export]
match = { path = "/export" }
limit = "1 in flight"

[inbound.action.trial]
match = { path = "/trial" }
limit = "1 per 30s"
mode = "shadow"

[inbound.action.path]
match = { path = "/p/*" }
key = ["path", "query:q"]
cost = 2
count = "all"
limit = "7 per 20s"
"#;

const START: u64 = 1_795_000_000;
const AGENTS: [&str; 3] = ["curl/8.5.0", "Mozilla/5.0 (X11; \"quoted\")", ""];

/// A request before it is written into a log.
struct Asked {
    micros: u64,
    peer: IpAddr,
    forwarded: Option<String>,
    method: &'static str,
    path: String,
    agent: &'static str,
    /// True if it is so much older than the newest one that it isn't judged.
    too_late: bool,
}

fn requests(seed: u64, count: usize) -> Vec<Asked> {
    let mut random = RandomSource::from_seed(seed);
    let (mut now, mut newest) = (START * 1_000_000, 0);
    let mut requests = Vec::with_capacity(count);
    for _ in 0..count {
        now += random.below(120_000);
        if random.chance(1) && random.chance(30) {
            now += random.below(200_000_000);
        }
        let mut micros = now;
        if random.chance(3) {
            micros -= random.below(90_000_000).min(micros - START * 1_000_000);
        }
        let mut too_late = false;
        if random.chance(1) {
            micros = START * 1_000_000 - 4_000_000_000 - random.below(1_000_000);
            too_late = true;
        } else {
            newest = newest.max(micros);
        }
        let client = random.below(12);
        let address = match random.below(8) {
            0 => format!("198.51.100.{}", random.below(40)),
            1 => format!("2001:db8:0:{}::{:x}", client % 3, 1 + random.below(9)),
            _ => format!("203.0.113.{client}"),
        };
        let through_proxy = random.chance(30);
        let peer = if through_proxy { "10.1.2.3".to_owned() } else { address.clone() };
        let path = match random.below(9) {
            0 | 1 => "/login".to_owned(),
            2 | 3 => format!("/search/{}", random.below(3)),
            4 => "/export?all".to_owned(),
            5 => "/trial".to_owned(),
            6 => format!("/p/{}?q={}", random.below(2), random.below(2)),
            7 => "/x/..%2Flogin".to_owned(),
            _ => "/".to_owned(),
        };
        requests.push(Asked {
            micros,
            peer: peer.parse().unwrap(),
            forwarded: through_proxy.then(|| format!("6.6.6.6, {address}")),
            method: if random.chance(60) { "POST" } else { "GET" },
            path,
            agent: AGENTS[random.below(3) as usize],
            too_late,
        });
    }
    assert!(newest > 0);
    requests
}

/// The refusals of a running gate, in shadow too, in the format of `replay --refusals`. `resolution` is the log's, in microseconds.
fn refused_by_gate(policy: &str, requests: &[Asked], resolution: u64, log: &str) -> Vec<String> {
    let policy = Policy::load(PolicySources::new().file("tidegate.toml", policy)).unwrap();
    let clock = ManualClock::at(Time::ZERO);
    let gate = Gate::in_memory(&policy, clock.clone());
    let (mut newest, mut refused) = (0, Vec::new());
    for (line, asked) in (1..).zip(requests) {
        if asked.too_late {
            continue;
        }
        newest = newest.max(asked.micros / resolution * resolution);
        clock.set(Time::from_micros(newest));
        let mut headers = HeaderMap::new();
        for (name, value) in [("user-agent", Some(asked.agent)), ("x-forwarded-for", asked.forwarded.as_deref())] {
            if let Some(value) = value.filter(|value| !value.is_empty()) {
                headers.insert(name, HeaderValue::from_str(value).unwrap());
            }
        }
        let query = Query {
            ip: Some(policy.inbound().forwarding.client_ip(asked.peer, &headers)),
            method: Some(asked.method),
            path: Some(&asked.path),
            host: Some("example.com"),
            headers: Some(&headers),
            ..Query::default()
        };
        let actions = gate.actions(&query).unwrap();
        let decision = gate.check_now(&query).unwrap();
        drop(gate.hold_permit(&query, &decision).unwrap());
        if decision.allowed && !decision.shadow {
            continue;
        }
        let report = gate.report(&decision);
        let wait = report.retry_after.map_or_else(|| "-".to_owned(), |wait| wait.to_string());
        let why = match decision.reason {
            Reason::Penalty => "penalty",
            Reason::DenyList => "deny list",
            _ => "limit",
        };
        let action = gate.plan().action_names(actions).unwrap_or_else(|| "-".to_owned());
        let limit = decision.bound_by.map_or("-", |limit| gate.plan().limit_info(limit).name());
        let mode = if decision.shadow { "shadow" } else { "enforce" };
        refused.push(format!("{log}\t{line}\t{action}\t{limit}\t{wait}\t{why}\t{mode}"));
    }
    refused
}

/// nginx' format `main`, in seconds.
fn combined(requests: &[Asked]) -> String {
    let mut log = String::new();
    for Asked { micros, peer, forwarded, method, path, agent, .. } in requests {
        let time = clf_time(micros / 1_000_000);
        let agent = if agent.is_empty() { "-".to_owned() } else { agent.replace('"', "\\x22") };
        let forwarded = forwarded.as_deref().unwrap_or("-");
        writeln!(log, "{peer} - - [{time}] \"{method} {path} HTTP/1.1\" 200 17 \"-\" \"{agent}\" \"{forwarded}\"")
            .unwrap();
    }
    log
}

/// A second in the common log format, made from the HTTP date.
fn clf_time(second: u64) -> String {
    let date = httpdate::fmt_http_date(std::time::UNIX_EPOCH + std::time::Duration::from_secs(second));
    let words: Vec<&str> = date.split([' ', ',']).filter(|word| !word.is_empty()).collect();
    format!("{}/{}/{}:{} +0000", words[1], words[2], words[3], words[4])
}

/// Caddy's format, in microseconds.
fn caddy(requests: &[Asked]) -> String {
    let mut log = String::new();
    for Asked { micros, peer, forwarded, method, path, agent, .. } in requests {
        let mut headers = serde_json::Map::new();
        for (name, value) in [("User-Agent", Some(*agent)), ("X-Forwarded-For", forwarded.as_deref())] {
            if let Some(value) = value.filter(|value| !value.is_empty()) {
                headers.insert(name.to_owned(), serde_json::json!([value]));
            }
        }
        let request = serde_json::json!({
            "remote_ip": peer, "client_ip": "9.9.9.9", "method": method, "host": "example.com", "uri": path, "headers": headers,
        });
        let seconds = format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000);
        writeln!(log, "{{\"level\":\"info\",\"ts\":{seconds},\"request\":{request},\"status\":200}}").unwrap();
    }
    log
}

fn replay(folder: &ScratchDir, arguments: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("TIDEGATE")) {
        command.env_remove(name);
    }
    let output = command.arg("replay").args(arguments).current_dir(folder.path()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn lines(file: &Path) -> Vec<String> {
    std::fs::read_to_string(file).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn replay_refuses_exactly_what_a_gate_refuses() {
    for seed in 0..4 {
        let folder = ScratchDir::new();
        folder.write("tidegate.toml", POLICY);
        let asked = requests(seed, 4000);
        for (log, text, resolution) in [("access.log", combined(&asked), 1_000_000), ("access.json", caddy(&asked), 1)]
        {
            folder.write(log, &text);
            let (status, out, err) = replay(&folder, &[log, "--refusals", "refusals"]);
            assert_eq!((status, err.as_str()), (0, ""), "{out}");
            let expected = refused_by_gate(POLICY, &asked, resolution, log);
            let found = lines(&folder.path().join("refusals"));
            let differs = found.iter().zip(&expected).find(|(found, expected)| found != expected);
            assert_eq!(differs, None, "seed {seed}, {log}");
            assert_eq!(found.len(), expected.len(), "seed {seed}, {log}");
            // The test is only meaningful if every kind of refusal occurs.
            for kind in [
                "login\tlogin\t",
                "\tglobal\t",
                "search\tsearch.1\t",
                "search\tsearch.2\t",
                "\tpath\t",
                "\t-\t-\tdeny list",
                "\tpenalty\tenforce",
                "trial\ttrial\t",
                "\tlimit\tshadow",
            ] {
                assert!(found.iter().any(|line| line.contains(kind)), "{kind} in {}", found.len());
            }
        }
    }
}

#[test]
fn compressed_logs_stdin_and_several_files_combine() {
    let folder = ScratchDir::new();
    folder.write("tidegate.toml", POLICY);
    let text = combined(&requests(9, 3000).into_iter().filter(|asked| !asked.too_late).collect::<Vec<_>>());
    folder.write("whole.log", &text);
    let half = text[..text.len() / 2].rfind('\n').unwrap() + 1;
    folder.write("second.log", &text[half..]);
    std::fs::write(folder.path().join("first.gz"), by_program("gzip", &text.as_bytes()[..half])).unwrap();
    let summary = |arguments: &[&str]| {
        let (status, out, err) = replay(&folder, &[arguments, &["--out", "x.json"]].concat());
        assert_eq!((status, err.as_str()), (0, ""));
        let found: Value = serde_json::from_slice(&std::fs::read(folder.path().join("x.json")).unwrap()).unwrap();
        assert!(out.contains("requests in "), "{out}");
        found
    };
    let whole = summary(&["whole.log"]);
    assert!(whole["policies"][0]["refused"].as_u64().unwrap() > 100, "{whole}");
    assert_eq!(summary(&["first.gz", "second.log"]), whole);
    let mut child = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["replay", "-", "--out", "x.json"])
        .current_dir(folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    let piped: Value = serde_json::from_slice(&std::fs::read(folder.path().join("x.json")).unwrap()).unwrap();
    assert_eq!(piped, whole);
}

/// Returns the output of a program for this standard input.
fn by_program(program: &str, bytes: &[u8]) -> Vec<u8> {
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&bytes));
    let packed = child.wait_with_output().unwrap().stdout;
    writer.join().unwrap().unwrap();
    packed
}

#[test]
fn tables_show_clients_times_reasons_and_alternatives() {
    let folder = ScratchDir::new();
    folder.write(
        "tidegate.toml",
        "[inbound.action.login]\nmatch = { method = \"POST\", path = \"/login\" }\nlimit = \"5 per 60s\"\n",
    );
    folder.write(
        "other.toml",
        "[inbound.action.login]\nmatch = { method = \"POST\", path = \"/login\" }\nlimit = \"30 per 60s\"\n\n\
         [inbound.action.home]\nmatch = { path = \"/\" }\nlimit = \"1 per 1h\"\n",
    );
    let line = |client: u32, minute: u32, second: u32, request: &str| {
        format!("192.0.2.{client} - - [21/Nov/2026:12:{minute:02}:{second:02} +0000] \"{request} HTTP/1.1\" 200 1\n")
    };
    let mut log = String::new();
    // A hundred clients log in at most client % 10 times a minute; one does so 40 times; one only reads, and often.
    for minute in 0..3 {
        for client in 0..100 {
            for second in 0..client % 10 {
                log += &line(client, minute, second, "POST /login");
            }
        }
        for second in 10..50 {
            log += &line(200, minute, second, "POST /login");
            log += &line(201, minute, second, "GET /");
        }
        log += "not a line of any log\n";
    }
    folder.write("access.log", &log);
    let arguments = ["access.log", "--diff", "other.toml", "--out", "x.json", "--out", "x.html"];
    let (status, out, err) = replay(&folder, &arguments);
    assert_eq!((status, err.as_str()), (0, ""));
    for expected in [
        "1,590 requests in 1,593 lines from 2026-11-21 12:00:00Z to 2026-11-21 12:02:49Z\n",
        "3 broken",
        "access.log:531   neither JSON nor the common or combined log format",
        "tidegate.toml: refuses 405 of 1,590 requests (25.5 %), from 41 of 92 clients\n",
        "other.toml: refuses 149 of 1,590 requests (9.4 %), from 2 of 92 clients\n",
        "  192.0.2.201       120\n",
    ] {
        assert!(out.contains(expected), "{expected}\n{out}");
    }
    let found: Value = serde_json::from_slice(&std::fs::read(folder.path().join("x.json")).unwrap()).unwrap();
    let login = &found["policies"][0]["limits"][0];
    // Of 91 clients that log in, 41 are refused at 5. At 9 only the one with 40 log-ins is; 0.91 clients may be.
    assert_eq!(login["clients"], 91);
    assert!((login["refused_share"].as_f64().unwrap() - 41.0 / 91.0).abs() < 1e-9, "{login}");
    assert_eq!((&login["highest_use"], &login["values"][0]["value"]), (&40.into(), &40.into()));
    assert_eq!(found["policies"][0]["most_refused"][0]["client"], "192.0.2.200");
    assert_eq!(found["policies"][0]["largest_never_refused"][0]["client"], "192.0.2.201");
    let changes = &found["changes"];
    assert_eq!(changes["only_second"], 119);
    assert_eq!(changes["refused_from_now_on"][0]["client"], "192.0.2.201");
    let both = changes["refused_by_both"].as_u64().unwrap() + changes["only_first"].as_u64().unwrap();
    assert_eq!(both, 405);
    let html = std::fs::read_to_string(folder.path().join("x.html")).unwrap();
    assert!(html.contains("<svg") && html.contains("prefers-color-scheme:dark"));
    // One chart of both policies: its legend comes before the charts of each policy.
    let both = html.split("requests refused over time, by each policy").nth(1).unwrap();
    let legend = both.split("requests over time").next().unwrap();
    assert!(["tidegate.toml", "other.toml"].iter().all(|policy| legend.contains(policy)), "{legend}");
    assert!(!html.contains("src=") && !html.contains("href=") && !html.contains("url("), "nothing is fetched");
}

#[test]
fn shadow_refusals_are_counted_and_listed_apart() {
    let folder = ScratchDir::new();
    folder.write(
        "tidegate.toml",
        "[inbound.action.login]\nmatch = { path = \"/login\" }\nlimit = \"2 per 60s\"\n\n\
         [inbound.action.trial]\nmatch = { path = \"/trial\" }\nlimit = \"1 per 60s\"\nmode = \"shadow\"\n",
    );
    let line = |second: u32, path: &str| {
        format!("192.0.2.1 - - [21/Nov/2026:12:00:{second:02} +0000] \"GET {path} HTTP/1.1\" 200 1\n")
    };
    let log: String = (0..4).map(|second| line(second, "/login") + &line(second, "/trial")).collect();
    folder.write("access.log", &log);
    let arguments = ["access.log", "--refusals", "refusals", "--out", "x.json"];
    let (status, out, err) = replay(&folder, &arguments);
    assert_eq!((status, err.as_str()), (0, ""));
    for expected in [
        "refuses 2 of 8 requests (25.0 %), from 1 of 1 client; would refuse 3 more in shadow, from 1 client\n",
        "  action          requests  refused   share  in shadow\n",
        "  login                  4        2  50.0 %          0\n",
        "  trial (shadow)         4        0     0 %          3\n",
    ] {
        assert!(out.contains(expected), "{expected}\n{out}");
    }
    let refusals = ["login\tlogin\t58\tlimit\tenforce", "trial\ttrial\t58\tlimit\tshadow"];
    let found = lines(&folder.path().join("refusals"));
    for (line, refusal) in [(5, refusals[0]), (6, refusals[1])] {
        assert!(found.contains(&format!("access.log\t{line}\t{refusal}")), "{found:?}");
    }
    assert_eq!(found.len(), 5);
    let json: Value = serde_json::from_slice(&std::fs::read(folder.path().join("x.json")).unwrap()).unwrap();
    assert_eq!(json["policies"][0]["actions"][1]["refused_in_shadow"], 3);
}

#[test]
fn ten_broken_lines_are_shown_and_all_counted() {
    let folder = ScratchDir::new();
    let mut log = String::new();
    for number in 0..25 {
        log += &format!("192.0.2.1 - - [21/Nov/2026:12:00:{number:02} +0000] \"GET / HTTP/1.1\" 200 1\n");
        log += "{\"ts\":1\n";
    }
    log += &"x".repeat(70_000);
    folder.write("access.log", &log);
    let (status, out, err) = replay(&folder, &["access.log"]);
    assert_eq!((status, err.as_str()), (0, ""));
    assert!(out.contains("25 requests in 51 lines") && out.contains("26 broken"), "{out}");
    let shown = out.lines().filter(|line| line.contains("access.log:")).count();
    assert_eq!(shown, 10, "{out}");
    assert!(out.contains("access.log:20  not JSON\n  …              and 16 more\n"), "{out}");
}

/// A truncated log loses only the part that can't be read.
#[test]
fn a_truncated_logs_readable_part_is_reported() {
    let folder = ScratchDir::new();
    let text = combined(&requests(9, 3000).into_iter().filter(|asked| !asked.too_late).collect::<Vec<_>>());
    let packed = by_program("gzip", text.as_bytes());
    std::fs::write(folder.path().join("cut.gz"), &packed[..packed.len() / 2]).unwrap();
    folder.write("access.log", text.lines().last().unwrap());
    let (status, out, err) = replay(&folder, &["cut.gz", "access.log", "--out", "found.json"]);
    assert_eq!(status, 1, "{err}");
    assert!(err.contains("can't read cut.gz"), "{err}");
    let requests: u64 = out.split(' ').next().unwrap().replace(',', "").parse().unwrap();
    assert!((1000..3000).contains(&requests), "{out}");
    assert!(folder.path().join("found.json").exists());
}

#[test]
fn wrong_arguments_and_missing_files_are_reported() {
    let folder = ScratchDir::new();
    folder.write("access.log", "");
    for (arguments, status, told) in [
        (&["access.log", "--out", "x.pdf"][..], 2, "findings end with .html, .svg or .json"),
        (&["access.log", "--field", "tme=ts"], 2, "names no field"),
        (&["-", "-"], 2, "can be read once"),
        (&["missing.log"], 1, "can't read missing.log"),
        (&["access.log", "--config", "missing.toml"], 1, "can't read missing.toml"),
    ] {
        let (found, _, err) = replay(&folder, arguments);
        assert_eq!(found, status, "{arguments:?}: {err}");
        assert!(err.contains(told), "{arguments:?}: {err}");
    }
    let (status, out, _) = replay(&folder, &["access.log"]);
    assert_eq!(status, 0);
    assert!(out.starts_with("0 requests in 0 lines\n"), "{out}");
}

/// nginx in front of a running gate: a replay of its log refuses the same requests as the gate. The windows are so long
/// that the log's resolution of seconds doesn't matter.
#[test]
fn replaying_an_nginx_log_matches_the_gate() {
    let (upstream, gate_port, front) = (free_port(), free_port(), free_port());
    let Some(_pages) = nginx(&format!("server {{ listen 127.0.0.1:{upstream}; return 200 ok; }}"), upstream) else {
        return;
    };
    let policy = format!(
        "[inbound]\nlisten = \"127.0.0.1:{gate_port}\"\nupstream = \"http://127.0.0.1:{upstream}\"\n\
         trusted_proxies = [\"127.0.0.0/8\"]\n\
         [inbound.global]\nlimit = \"40 per 1h\"\n\
         [inbound.action.login]\nmatch = {{ method = \"GET\", path = \"/login\" }}\nlimit = \"5 per 30m\"\n\
         [inbound.action.agent]\nmatch = {{ path = \"/agent/*\" }}\nkey = [\"client_ip\", \"header:user-agent\"]\n\
         limit = \"3 per 30m\"\n"
    );
    let folder = ScratchDir::new();
    let file = folder.write("tidegate.toml", &policy);
    let scratch = ScratchDir::new();
    let mut serve = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    serve
        .args(["serve", "--config"])
        .arg(file)
        .envs([("TIDEGATE__API__LISTEN", "off"), ("TIDEGATE__ADMIN__LISTEN", "off")]);
    let _gate = ChildProcess::start(serve, scratch, gate_port);
    // A header sets the client's address, so that there are many clients.
    let server = format!(
        "log_format main '$http_x_client - $remote_user [$time_local] \"$request\" $status $body_bytes_sent \
         \"$http_referer\" \"$http_user_agent\"';\n\
         server {{ listen 127.0.0.1:{front}; access_log access.log main; location / {{ proxy_pass http://127.0.0.1:{gate_port}; \
         proxy_set_header X-Forwarded-For $http_x_client; }} }}"
    );
    let Some(proxy) = nginx(&server, front) else { return };
    let (mut random, mut client) = (RandomSource::from_seed(5), HttpClient::connect(front).unwrap());
    let mut statuses: HashMap<u16, usize> = HashMap::new();
    for _ in 0..600 {
        let path = ["/", "/login", "/agent/x?y"][random.below(3) as usize];
        let (address, agent) = (1 + random.below(15), AGENTS[random.below(2) as usize]);
        let request = get_request(path).replacen(
            "\r\n",
            &format!("\r\nx-client: 203.0.113.{address}\r\nuser-agent: {agent}\r\n"),
            1,
        );
        *statuses.entry(client.request(request).status).or_default() += 1;
    }
    assert!(statuses[&200] > 50 && statuses[&429] > 50 && statuses.len() == 2, "{statuses:?}");
    std::thread::sleep(std::time::Duration::from_millis(300));
    let log = proxy.read_file("access.log");
    // Without the front server's address, which the gate trusted; the log has the client's address itself.
    folder.write("access.log", &log);
    let (status, out, err) = replay(&folder, &["access.log", "--refusals", "refusals"]);
    assert_eq!((status, err.as_str()), (0, ""), "{out}");
    let refused: Vec<usize> =
        (1..).zip(log.lines()).filter(|(_, line)| line.contains("\" 429 ")).map(|(number, _)| number).collect();
    let replayed: Vec<usize> = lines(&folder.path().join("refusals"))
        .iter()
        .map(|line| line.split('\t').nth(1).unwrap().parse().unwrap())
        .collect();
    assert_eq!(replayed, refused);
}
