//! The bytes before HTTP: headers of the PROXY protocol.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::net::SocketAddr;
use std::time::Duration;

use tidegate_policy::{Policy, PolicySources};
use tidegate_server::Server;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Longer than any test takes, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running gate, with its proxy and its admin listener.
#[derive(Clone, Copy)]
struct Gate {
    inbound: SocketAddr,
    admin: SocketAddr,
}

fn start(text: &str) -> Gate {
    let ports = [("TIDEGATE__INBOUND__LISTEN", "127.0.0.1:0"), ("TIDEGATE__ADMIN__LISTEN", "127.0.0.1:0")];
    let sources = PolicySources::new().file("test.toml", text).env(ports).env([("TIDEGATE__API__LISTEN", "off")]);
    let policy = Policy::load(sources).unwrap_or_else(|errors| panic!("{errors}"));
    let bound = Server::new(&policy).bind().unwrap();
    let gate = Gate { inbound: bound.inbound().unwrap(), admin: bound.admin().unwrap() };
    tokio::spawn(bound.run(std::future::pending()));
    gate
}

/// Starts an upstream that answers with the head that it receives.
async fn start_echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut buffer = [0; 16 << 10];
                while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                    let head = String::from_utf8_lossy(&buffer[..count]).into_owned();
                    let reply = format!("HTTP/1.1 200 OK\r\ncontent-length: {count}\r\n\r\n{head}");
                    stream.write_all(reply.as_bytes()).await.unwrap();
                }
            });
        }
    });
    address
}

/// Sends bytes over a new connection, and returns all that comes back until its end.
async fn exchange(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut reply = Vec::new();
    // A connection that is closed with unread bytes is reset.
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut reply)).await.expect("an end in time");
    String::from_utf8_lossy(&reply).into_owned()
}

const REQUEST: &str = "GET / HTTP/1.1\r\nhost: a.test\r\nconnection: close\r\n\r\n";

async fn rejections(gate: Gate, reason: &str) -> u64 {
    let request = "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let page = exchange(gate.admin, request.as_bytes()).await;
    let line = format!("tidegate_rejections_total{{reason=\"{reason}\"}} ");
    page.lines().find_map(|found| found.strip_prefix(&line)).map_or(0, |count| count.trim().parse().unwrap())
}

#[tokio::test]
async fn trusted_peers_tell_the_clients_address() {
    let echo = start_echo().await;
    let gate = start(&format!(
        "[inbound]\nupstream = \"http://{echo}\"\nproxy_protocol = \"127.0.0.1\"\n[inbound.global]\nlimit = \"1 per 1h\"\n"
    ));
    for (ip, expected) in [("192.0.2.1", "200"), ("192.0.2.2", "200"), ("192.0.2.1", "429")] {
        let header = format!("PROXY TCP4 {ip} 10.0.0.1 4711 443\r\n");
        let reply = exchange(gate.inbound, format!("{header}{REQUEST}").as_bytes()).await;
        assert!(reply.starts_with(&format!("HTTP/1.1 {expected} ")), "{reply}");
        assert!(expected == "429" || reply.contains(&format!("x-forwarded-for: {ip}\r\n")), "{reply}");
    }
    let signature = b"\r\n\r\n\0\r\nQUIT\n";
    let addresses = [192, 0, 2, 3, 10, 0, 0, 1, 0x12, 0x67, 1, 0xbb];
    let header = [&signature[..], &[0x21, 0x11, 0, 12], &addresses].concat();
    let reply = exchange(gate.inbound, &[&header, REQUEST.as_bytes()].concat()).await;
    assert!(reply.contains("x-forwarded-for: 192.0.2.3\r\n"), "{reply}");
    assert_eq!(rejections(gate, "proxy_header").await, 0);
}

#[tokio::test]
async fn connections_without_a_valid_header_are_closed() {
    let echo = start_echo().await;
    let gate = start(&format!(
        "[inbound]\nupstream = \"http://{echo}\"\nproxy_protocol = \"127.0.0.1\"\n[inbound.timeouts]\nheader = \"1s\"\n"
    ));
    let oversized = [b"\r\n\r\n\0\r\nQUIT\n\x21\x11\xff\xff", &[b'x'; 64][..]].concat();
    let long = format!("PROXY UNKNOWN {}", "x".repeat(200));
    let bad: [&[u8]; 5] =
        [REQUEST.as_bytes(), b"PROXY TCP4 1.2.3.4\r\n", &oversized, long.as_bytes(), b"PROXY TCP4 192.0.2.1 10.0.0.1"];
    for (index, bytes) in bad.into_iter().enumerate() {
        assert_eq!(exchange(gate.inbound, bytes).await, "", "{}", bytes.escape_ascii());
        assert_eq!(rejections(gate, "proxy_header").await, index as u64 + 1, "{}", bytes.escape_ascii());
    }
}

#[tokio::test]
async fn headers_of_other_peers_are_not_believed() {
    let echo = start_echo().await;
    let gate = start(&format!("[inbound]\nupstream = \"http://{echo}\"\nproxy_protocol = \"192.0.2.0/24\"\n"));
    let reply = exchange(gate.inbound, format!("PROXY TCP4 192.0.2.1 10.0.0.1 1 2\r\n{REQUEST}").as_bytes()).await;
    assert!(reply.starts_with("HTTP/1.1 400 "), "{reply}");
    let reply = exchange(gate.inbound, REQUEST.as_bytes()).await;
    assert!(reply.starts_with("HTTP/1.1 200 ") && reply.contains("x-forwarded-for: 127.0.0.1\r\n"), "{reply}");
}

#[tokio::test]
async fn connections_per_client_count_the_headers_address() {
    let echo = start_echo().await;
    let gate = start(&format!(
        "[inbound]\nupstream = \"http://{echo}\"\nproxy_protocol = \"127.0.0.1\"\n[inbound.caps]\n\
         connections_per_client = 1\n"
    ));
    let header = "PROXY TCP4 192.0.2.1 10.0.0.1 4711 443\r\n";
    let mut first = TcpStream::connect(gate.inbound).await.unwrap();
    first.write_all(format!("{header}GET / HTTP/1.1\r\nhost: a\r\n\r\n").as_bytes()).await.unwrap();
    let mut reply = [0; 12];
    first.read_exact(&mut reply).await.unwrap();
    assert_eq!(&reply, b"HTTP/1.1 200");
    let reply = exchange(gate.inbound, format!("{header}{REQUEST}").as_bytes()).await;
    assert!(reply.starts_with("HTTP/1.1 503 "), "{reply}");
}
