//! TLS of listeners: certificates by name, their replacement, and certificates of clients.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use tidegate_policy::{Policy, PolicySources};
use tidegate_server::Server;
use tidegate_testkit::servers::require_program;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::authority::Authority;
use crate::common::{
    Gate, LAST_REQUEST, PATIENCE, REQUEST, admin, ask, exchange, metric, read_to_end, rejections, send, start, until,
};

async fn connect(client: &TlsConnector, address: SocketAddr, name: &str) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    client.connect(ServerName::try_from(name.to_owned()).unwrap(), stream).await
}

/// The certificate that the gate shows for this name.
async fn shown(authority: &Authority, gate: Gate, name: &str) -> Vec<u8> {
    let stream = connect(&authority.client(None), gate.inbound, name).await.unwrap();
    stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

#[tokio::test]
async fn certificates_are_chosen_by_name() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    authority.issue("b", "*.b.test", 2099);
    let gate = start(&format!("[inbound]\n{}", authority.settings(&["a", "b"], ""))).await;
    for name in ["a.test", "www.b.test"] {
        let mut stream = connect(&authority.client(None), gate.inbound, name).await.unwrap();
        let reply = ask(&mut stream, REQUEST).await.unwrap();
        assert!(reply.starts_with("HTTP/1.1 200 ") && reply.contains("x-forwarded-proto: https\r\n"), "{reply}");
    }
    let unknown = connect(&authority.client(None), gate.inbound, "c.test").await.unwrap_err().to_string();
    assert!(unknown.contains("NotValidForName") || unknown.contains("not valid for name"), "{unknown}");
}

#[tokio::test]
async fn plain_http_on_a_tls_port_is_refused() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    let gate = start(&format!("[inbound]\n{}", authority.settings(&["a"], ""))).await;
    let mut stream = TcpStream::connect(gate.inbound).await.unwrap();
    let reply = ask(&mut stream, REQUEST).await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 400 ") && reply.contains("https://"), "{reply}");
    assert_eq!(rejections(gate, "plain_http").await, 1);
}

#[tokio::test]
async fn sessions_of_a_tls_listener_are_secure() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    std::fs::write(authority.path("token"), "s3cret").unwrap();
    let token = format!("file:{}", authority.path("token"));
    let gate = start(&format!("[admin]\ntoken = {token:?}\n{}", authority.settings(&["a"], ""))).await;
    let mut stream = connect(&authority.client(None), gate.admin, "a.test").await.unwrap();
    let request = "POST /sign-in HTTP/1.1\r\nhost: localhost\r\ncontent-length: 12\r\n\r\ntoken=s3cret";
    let reply = ask(&mut stream, request).await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 303 ") && reply.contains("; Secure\r\n"), "{reply}");
}

#[tokio::test]
async fn slow_and_broken_handshakes_are_closed() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    let policy = format!("[inbound]\n{}[inbound.timeouts]\nheader = \"1s\"\n", authority.settings(&["a"], ""));
    let gate = start(&policy).await;
    for bytes in [&b"\x16\x03\x01\x02\x00"[..], b"\x16nonsense that isn't a handshake"] {
        exchange(gate.inbound, bytes).await;
    }
    assert_eq!(rejections(gate, "tls_handshake").await, 2);
}

#[tokio::test]
async fn stalled_handshakes_keep_nobody_waiting() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    let rest = "[inbound.timeouts]\nheader = \"5m\"\n[inbound.caps]\nconnections = 8\n";
    let gate = start(&format!("[inbound]\n{}{rest}", authority.settings(&["a"], ""))).await;
    let mut stalled = Vec::new();
    for _ in 0..16 {
        stalled.push(send(gate.inbound, b"\x16").await);
        let served = async {
            let mut stream = connect(&authority.client(None), gate.inbound, "a.test").await.unwrap();
            ask(&mut stream, LAST_REQUEST).await.unwrap()
        };
        let reply = tokio::time::timeout(PATIENCE, served).await.expect("a reply in time");
        assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
    }
    assert!(rejections(gate, "head_displaced").await > 0);
    assert_eq!(rejections(gate, "tls_handshake").await, 0);
}

#[tokio::test]
async fn the_oldest_unfinished_handshake_gives_up_its_place() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    let rest = "[inbound.timeouts]\nheader = \"5m\"\n[inbound.caps]\nconnections = 2\n";
    let gate = start(&format!("[inbound]\n{}{rest}", authority.settings(&["a"], ""))).await;
    let name = ServerName::try_from("a.test").unwrap();
    let mut client = rustls::ClientConnection::new(Arc::clone(authority.client(None).config()), name).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    let mut oldest = send(gate.inbound, &hello[..1]).await;
    let mut begun = send(gate.inbound, &hello[..1]).await;
    let _third = send(gate.inbound, b"").await;
    assert_eq!(read_to_end(&mut oldest).await, "", "its place is taken");
    begun.write_all(&hello[1..]).await.unwrap();
    let mut record = [0];
    tokio::time::timeout(PATIENCE, begun.read_exact(&mut record)).await.expect("a reply in time").unwrap();
    assert_eq!(record, [0x16]);
}

#[tokio::test]
async fn replaced_certificates_are_served_without_a_cut() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    let gate = start(&format!("[inbound]\n{}", authority.settings(&["a"], ""))).await;
    let mut open = connect(&authority.client(None), gate.inbound, "a.test").await.unwrap();
    ask(&mut open, REQUEST).await.unwrap();
    let first = shown(&authority, gate, "a.test").await;
    let failed = "tidegate_certificate_reloads_total{listener=\"inbound\",result=\"failed\"}";
    let until_failed = async |count| until("a failed reload", async || metric(gate, failed).await >= count).await;
    // A pipe, a device without end, a file and a chain that are too long, an expired certificate, one with another key, and a
    // file that is no PEM.
    let (path, good) = (authority.path("a.pem"), std::fs::read(authority.path("a.pem")).unwrap());
    std::fs::remove_file(&path).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let mut failures = 0;
    for replace in [
        &(|| ()) as &dyn Fn(),
        &|| std::os::unix::fs::symlink("/dev/zero", &path).unwrap(),
        &|| std::fs::write(&path, [&good, &vec![b'a'; 2 << 20][..]].concat()).unwrap(),
        &|| std::fs::write(&path, good.repeat(17)).unwrap(),
    ] {
        if failures > 0 {
            std::fs::remove_file(&path).unwrap();
        }
        replace();
        until_failed(failures + 1).await;
        failures = metric(gate, failed).await;
        assert_eq!(shown(&authority, gate, "a.test").await, first);
    }
    authority.issue("a", "a.test", 2020);
    until_failed(failures + 1).await;
    assert_eq!(shown(&authority, gate, "a.test").await, first);
    let failures = metric(gate, failed).await;
    std::fs::write(authority.path("a.pem"), authority.issuer.pem()).unwrap();
    until_failed(failures + 1).await;
    let failures = metric(gate, failed).await;
    std::fs::write(authority.path("a.pem"), "nothing").unwrap();
    until_failed(failures + 1).await;
    assert_eq!(shown(&authority, gate, "a.test").await, first);
    let events = admin(gate, "/v1/events?follow=false").await;
    assert!(events.contains("\"kind\":\"certificates_kept\"") && events.contains("a.pem"), "{events}");

    authority.issue("a", "a.test", 2098);
    until("the new certificate", async || shown(&authority, gate, "a.test").await != first).await;
    assert!(ask(&mut open, REQUEST).await.unwrap().starts_with("HTTP/1.1 200 "), "the open connection stays");
    let page = admin(gate, "/metrics").await;
    let expiry =
        format!("tidegate_certificate_expiry_time_seconds{{listener=\"inbound\",file={:?}}} ", authority.path("a.pem"));
    let at: f64 = page.lines().find_map(|line| line.strip_prefix(&expiry)).unwrap().parse().unwrap();
    assert_eq!(at, 4_039_372_800.0, "2098-01-01");
}

#[tokio::test]
async fn certificates_that_become_valid_are_taken() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    let gate = start(&format!("[inbound]\n{}", authority.settings(&["a"], ""))).await;
    let first = shown(&authority, gate, "a.test").await;
    authority.issue("next", "a.test", 2098);
    std::fs::copy(authority.path("next.pem"), authority.path("a.pem")).unwrap();
    let failed = "tidegate_certificate_reloads_total{listener=\"inbound\",result=\"failed\"}";
    until("a failed reload", async || metric(gate, failed).await == 1).await;
    // The key changes, but not the size, time and number of its file.
    let key = std::fs::File::options().write(true).open(authority.path("a.key")).unwrap();
    let before = key.metadata().unwrap();
    std::fs::copy(authority.path("next.key"), authority.path("a.key")).unwrap();
    key.set_modified(before.modified().unwrap()).unwrap();
    assert_eq!(key.metadata().unwrap().len(), before.len());
    until("the new certificate", async || shown(&authority, gate, "a.test").await != first).await;
    assert_eq!(metric(gate, failed).await, 1, "the same failure is told once");
}

#[tokio::test]
async fn client_certificates_are_required_or_counted() {
    let authority = Authority::new();
    for (file, name) in [("a", "a.test"), ("alice", "alice"), ("bob", "bob")] {
        authority.issue(file, name, 2099);
    }
    let ca = authority.path("ca.pem");
    let required = start(&format!("[inbound]\n{}", authority.settings(&["a"], &format!(", client_ca = {ca:?}")))).await;
    let refused =
        async { ask(&mut connect(&authority.client(None), required.inbound, "a.test").await?, REQUEST).await };
    assert!(refused.await.is_err());
    let mut stream = connect(&authority.client(Some("alice")), required.inbound, "a.test").await.unwrap();
    assert!(ask(&mut stream, REQUEST).await.unwrap().starts_with("HTTP/1.1 200 "));
    assert_eq!(rejections(required, "tls_handshake").await, 1);

    let rest = format!(", client_ca = {ca:?}, client_certificates = \"optional\"");
    let optional = start(&format!(
        "[inbound]\n{}[inbound.action.a]\nmatch = {{ path = \"/\" }}\nkey = [\"client_cert\"]\nlimit = \"1 per 1h\"\n",
        authority.settings(&["a"], &rest)
    ))
    .await;
    for (client, expected) in
        [(Some("alice"), "200"), (Some("bob"), "200"), (Some("alice"), "429"), (None, "200"), (None, "429")]
    {
        let mut stream = connect(&authority.client(client), optional.inbound, "a.test").await.unwrap();
        let reply = ask(&mut stream, REQUEST).await.unwrap();
        assert!(reply.starts_with(&format!("HTTP/1.1 {expected} ")), "{client:?}: {reply}");
    }
}

#[test]
fn unusable_certificates_prevent_the_start() {
    let authority = Authority::new();
    authority.issue("old", "a.test", 2020);
    for (files, expected) in [("old", "expired"), ("none", "none.pem")] {
        let policy = format!(
            "[inbound]\nlisten = \"127.0.0.1:0\"\nupstream = \"http://a\"\n{}",
            authority.settings(&[files], "")
        );
        let policy = Policy::load(PolicySources::new().file("test.toml", &policy)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _entered = runtime.enter();
        let error = Server::new(&policy).bind().err().unwrap().to_string();
        assert!(error.starts_with("inbound.tls: ") && error.contains(expected), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn old_protocol_versions_are_refused() {
    let Some(openssl) = require_program("openssl") else { return };
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    let gate = start(&format!("[inbound]\n{}", authority.settings(&["a"], ""))).await;
    for (version, is_accepted) in [("-tls1", false), ("-tls1_1", false), ("-tls1_2", true), ("-tls1_3", true)] {
        let address = gate.inbound.to_string();
        let mut command = std::process::Command::new(&openssl);
        command.args(["s_client", "-connect", &address, "-servername", "a.test", "-verify_return_error", "-CAfile"]);
        command.arg(authority.path("ca.pem")).args(["-cipher", "ALL:@SECLEVEL=0", "-brief", version]);
        let output = command.stdin(std::process::Stdio::null()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.success(), is_accepted, "{version}: {text}");
        assert_eq!(text.contains("CONNECTION ESTABLISHED"), is_accepted, "{version}: {text}");
    }
}
