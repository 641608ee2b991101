//! Tokens are shown only to the provider.

use std::process::Command;

use tidegate_testkit::http_client::{HttpClient, get_request};
use tidegate_testkit::servers::ScratchDir;

use crate::common::gateway;
use crate::upstream::{Upstream, reply};

/// Providers that take a credential in every supported way, and fail in every way.
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
/// The token from the provider's login.
const TOKEN: &str = "pl4nted-token-7f3a";

/// A provider that repeats its request in headers, redirects, fails, closes early and sends invalid replies.
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
fn logs_and_replies_contain_no_token() {
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
                let answer = HttpClient::connect(port).unwrap().request(request);
                told += &format!("{provider}/{path}: {}\n{}\n", answer.head, answer.body);
            }
        }
        let answer = HttpClient::connect(port).unwrap().request(get_request("/bearer/x"));
        assert_eq!(answer.status, 407);
        told += &answer.head;
        told += &answer.body;
        gateway.send_signal("TERM");
        gateway.wait().expect("the gateway ends");
        let log = gateway.read_file("stderr");
        assert!(log.contains(if format == "json" { "\"level\":\"TRACE\"" } else { " TRACE " }), "{log}");
        let check = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .arg("check")
            .arg(ScratchDir::new().write("tidegate.toml", &policy))
            .envs(env.iter().copied())
            .output()
            .unwrap();
        assert!(!check.stdout.is_empty());
        let check = String::from_utf8_lossy(&check.stdout).into_owned() + &String::from_utf8_lossy(&check.stderr);
        // The provider received the credentials, so the checks below could find them.
        let seen = upstream.seen().join("\n");
        for name in ["bearer", "second", "header", "query", "path", "login", "pin", "token"] {
            assert!(seen.contains(&format!("pl4nted-{name}-7f3a")), "{name} was never sent: {seen}");
        }
        assert!(!seen.contains(ENTRY.1), "the gateway's own token is not the provider's business");
        for (place, text) in
            [("answers", &told), ("log", &log), ("output", &gateway.read_file("stdout")), ("check", &check)]
        {
            let lines: Vec<&str> =
                text.lines().filter(|line| line.contains("pl4nted") || line.contains("7f3a")).collect();
            assert!(lines.is_empty(), "the {place} tell:\n{}", lines.join("\n"));
        }
    }
}
