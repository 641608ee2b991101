//! Tokens of the listeners.

use std::net::SocketAddr;

use tidegate_server::ServeError;
use tidegate_testkit::servers::{ScratchDir, free_port};

use crate::common::{PATIENCE, Peer, get, header, nobody, once, policy, post, status, try_start};

fn with_env(rest: &str, variables: &[(&str, &str)]) -> Result<crate::common::Running, ServeError> {
    let policy = policy(nobody(), rest);
    let variables: Vec<(String, String)> =
        variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    try_start(&policy, move |name| variables.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone()))
}

#[tokio::test]
async fn two_tokens_with_one_secret_prevent_the_start() {
    let file = "[admin]\ntokens = { ops = \"env:A\", grafana = { secret = \"env:B\", read_only = true } }\n";
    let error = with_env(file, &[("A", "s3cret"), ("B", "s3cret")]).err().unwrap().to_string();
    assert_eq!(error, "admin: the tokens `ops` and `grafana` are the same secret");
}

#[tokio::test]
async fn each_listener_requires_its_token() {
    let file = "[api]\ntoken = \"env:API\"\n[admin]\ntoken = \"env:ADMIN\"\n";
    let gate = with_env(file, &[("API", "s3cret\n"), ("ADMIN", "other")]).unwrap();
    let ask = |path: &str, line: &str| format!("GET {path} HTTP/1.1\r\nhost: a\r\n{line}\r\n");
    let paths = ["/v1/status?path=/", "/v1/auth", "/v1/nowhere"];
    let mut wrong = 0;
    for path in paths {
        for line in [
            "",
            "authorization: Bearer wrong\r\n",
            "authorization: Basic s3cret\r\n",
            "authorization: Bearer s3cret2\r\n",
            "authorization: Bearer \r\n",
            "authorization: s3cret\r\n",
            "x-tidegate-token: S3cret\r\n",
        ] {
            let answer = once(gate.api, ask(path, line)).await;
            let is_token = line.contains("Bearer w") || line.contains("Bearer s") || line.starts_with("x-");
            wrong += u32::from(is_token);
            let waits = is_token && wrong > 5;
            assert_eq!(status(&answer), if waits { 429 } else { 401 }, "{path} {line}");
            assert_eq!(header(&answer, "www-authenticate").is_some(), !waits);
            assert_eq!(header(&answer, "retry-after").is_some(), waits);
            assert!(!answer.contains("s3cret"));
        }
    }
    for line in ["authorization: Bearer s3cret\r\n", "authorization: bearer s3cret\r\n", "x-tidegate-token: s3cret\r\n"]
    {
        assert_eq!(status(&once(gate.api, ask("/v1/status?path=/", line)).await), 200, "{line}");
    }
    assert_eq!(status(&once(gate.admin, get("/v1/state")).await), 401);
    assert_eq!(status(&once(gate.admin, ask("/v1/state", "authorization: Bearer other\r\n")).await), 200);
    // The request's body is discarded, and the connection stays open.
    let mut client = crate::common::Peer::connect(gate.api).await;
    for _ in 0..2 {
        assert_eq!(status(&client.ask(post("/v1/check", "{}")).await), 401);
    }
}

#[tokio::test]
async fn listening_beyond_loopback_requires_a_token() {
    for listener in ["api", "admin"] {
        for address in ["0.0.0.0:0", "[::]:0"] {
            let file = format!("[{listener}]\n");
            let variable = format!("TIDEGATE__{}__LISTEN", listener.to_uppercase());
            let sources = tidegate_policy::PolicySources::new().file("test.toml", &file).env([
                (variable, address.to_owned()),
                ("TIDEGATE__INBOUND__LISTEN".to_owned(), "127.0.0.1:0".to_owned()),
            ]);
            // The policy may report this first; otherwise the server does.
            let Ok(policy) = tidegate_policy::Policy::load(sources) else { continue };
            let refused = try_start(&policy, |_| None).err().map(|error| error.to_string());
            assert!(
                refused.as_ref().is_some_and(|text| text.contains("beyond loopback") && text.contains(&format!("{listener}.token"))),
                "{refused:?}"
            );
        }
    }
}

#[tokio::test]
async fn an_unavailable_token_prevents_the_start() {
    let error = with_env("[api]\ntoken = \"env:NOBODY_SET_THIS\"\n", &[]).err().unwrap();
    assert!(error.to_string().contains("api.token") && error.to_string().contains("NOBODY_SET_THIS"), "{error}");
    assert!(with_env("[api]\ntoken = \"env:EMPTY\"\n", &[("EMPTY", " ")]).is_err());
    assert!(with_env("[admin]\ntoken = \"file:/nowhere\"\n", &[]).is_err());
}

#[tokio::test]
async fn an_address_in_use_is_reported() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let sources = tidegate_policy::PolicySources::new()
        .file("test.toml", "")
        .env([("TIDEGATE__API__LISTEN".to_owned(), address.to_string())]);
    let policy = tidegate_policy::Policy::load(sources).unwrap();
    let error = try_start(&policy, |_| None).err().unwrap().to_string();
    assert!(error.starts_with(&format!("api.listen: can't listen on {address}")), "{error}");
}

const NAMED: &str = "[admin]\ntoken = \"env:ADMIN\"\ntokens = { dash = { secret = \"env:DASH\", read_only = true } }\n";

#[tokio::test]
async fn named_tokens_open_the_admin_listener() {
    let gate = with_env(NAMED, &[("ADMIN", "s3cret"), ("DASH", "look")]).unwrap();
    for (token, expected) in [("s3cret", 200), ("look", 200), ("dash", 401), ("", 401)] {
        let asked = format!("GET /v1/state HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {token}\r\n\r\n");
        assert_eq!(status(&once(gate.admin, asked).await), expected, "{token}");
    }
    let counted = "GET /metrics HTTP/1.1\r\nhost: a\r\nx-tidegate-token: look\r\n\r\n";
    let page = once(gate.admin, counted).await;
    assert!(page.contains("tidegate_rejections_total{reason=\"token\"} 2\n"), "{page}");
    let missing = with_env(NAMED, &[("ADMIN", "s3cret")]).err().unwrap().to_string();
    assert!(missing.starts_with("admin.tokens.dash: "), "{missing}");
}

#[tokio::test]
async fn health_checks_need_no_token() {
    let gate = with_env(NAMED, &[("ADMIN", "s3cret"), ("DASH", "look")]).unwrap();
    for path in ["/healthz", "/readyz", "/readyz?probe=1"] {
        assert_eq!(status(&once(gate.admin, get(path)).await), 200, "{path}");
        let asked = format!("GET {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer wrong\r\n\r\n");
        assert_eq!(status(&once(gate.admin, asked).await), 200, "{path}");
        assert_eq!(status(&once(gate.admin, post(path, "{}")).await), 405, "{path}");
    }
}

/// A load balancer on loopback may tell any client by the PROXY protocol.
#[tokio::test]
async fn clients_of_other_machines_need_a_token_on_loopback_too() {
    let proxied = "proxy_protocol = \"127.0.0.1\"\n";
    let [rls, resp] = std::array::from_fn(|_| SocketAddr::from(([127, 0, 0, 1], free_port())));
    let section = |name: &str, address: SocketAddr| format!("[{name}]\nlisten = \"{address}\"\n{proxied}");
    let others = [section("rls", rls), section("resp", resp)].concat();
    let gate = with_env(&format!("[api]\n{proxied}[admin]\n{proxied}{others}"), &[]).unwrap();
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    for (address, request, local, remote) in [
        (gate.api, get("/v1/nowhere"), "HTTP/1.1 404", "HTTP/1.1 401"),
        (gate.api, get("/v1/auth/page"), "HTTP/1.1 200", "HTTP/1.1 401"),
        (gate.admin, get("/v1/state"), "HTTP/1.1 200", "HTTP/1.1 401"),
        (gate.admin, get("/healthz"), "HTTP/1.1 200", "HTTP/1.1 200"),
        (rls, get("/nowhere"), "HTTP/1.1 415", "HTTP/1.1 401"),
        (resp, "ECHO hi\r\nQUIT\r\n".to_owned(), "$2\r\n", "-NOAUTH "),
        (resp, "HELLO 3\r\nQUIT\r\n".to_owned(), "%", "-NOAUTH "),
        (resp, "AUTH x\r\nQUIT\r\n".to_owned(), "-ERR AUTH", "-WRONGPASS "),
    ] {
        for (header, expected) in [
            ("PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\n", local),
            ("PROXY TCP6 ::ffff:127.0.0.1 ::1 1 2\r\n", local),
            ("PROXY UNKNOWN\r\n", local),
            ("PROXY TCP4 203.0.113.7 127.0.0.1 1 2\r\n", remote),
            ("PROXY TCP6 2001:db8::7 ::1 1 2\r\n", remote),
        ] {
            let mut client = Peer::connect(address).await;
            client.send(format!("{header}{request}")).await;
            let answer = client.all().await;
            assert!(answer.starts_with(expected), "{header}{request}{answer}");
        }
    }
}

#[tokio::test]
async fn one_token_holds_at_most_half_of_the_streams() {
    let file = "[admin]\ntokens = { ops = \"env:A\", grafana = { secret = \"env:B\", read_only = true } }\n";
    let gate = with_env(file, &[("A", "s3cret"), ("B", "other")]).unwrap();
    let mut readers = Vec::new();
    for (token, count) in [("s3cret", 8), ("other", 8)] {
        for number in 0..=count {
            let mut reader = Peer::connect(gate.admin).await;
            let lines = format!("host: a\r\nauthorization: Bearer {token}\r\n");
            reader.send(format!("GET /v1/events HTTP/1.1\r\n{lines}\r\n")).await;
            let expected = if number < count { "HTTP/1.1 200" } else { "HTTP/1.1 503" };
            assert_eq!(reader.exactly(expected.len()).await, expected, "{token} {number}");
            readers.push(reader);
        }
    }
}

/// Nobody writes to the FIFO, and the device never ends.
#[tokio::test]
async fn secrets_are_read_from_regular_files_only() {
    let scratch = ScratchDir::new();
    let fifo = scratch.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let gate = with_env("", &[]).unwrap();
    for path in [fifo.to_str().unwrap(), "/dev/zero", "/dev/tty"] {
        let file = format!("[api]\ntoken = \"file:{path}\"\n");
        let error = with_env(&file, &[]).err().expect(path).to_string();
        assert!(error.contains("isn't a regular file"), "{error}");
        file.clone_into(&mut gate.file.lock().unwrap());
        let reload = tokio::time::timeout(PATIENCE, gate.reload.reload()).await.expect(path);
        let error = reload.map(drop).unwrap_err().to_string();
        assert!(error.contains("isn't a regular file"), "{error}");
    }
}
