//! Headers of the PROXY protocol.

use tokio::io::AsyncReadExt as _;

use crate::authority::Authority;
use crate::common::{LAST_REQUEST, exchange, rejections, send, start, until};

#[tokio::test]
async fn trusted_peers_tell_the_clients_address() {
    let gate = start("[inbound]\nproxy_protocol = \"127.0.0.1\"\n[inbound.global]\nlimit = \"1 per 1h\"\n").await;
    for (ip, expected) in [("192.0.2.1", "200"), ("192.0.2.2", "200"), ("192.0.2.1", "429")] {
        let header = format!("PROXY TCP4 {ip} 10.0.0.1 4711 443\r\n");
        let reply = exchange(gate.inbound, format!("{header}{LAST_REQUEST}").as_bytes()).await;
        assert!(reply.starts_with(&format!("HTTP/1.1 {expected} ")), "{reply}");
        assert!(expected == "429" || reply.contains(&format!("x-forwarded-for: {ip}\r\n")), "{reply}");
    }
    let signature = b"\r\n\r\n\0\r\nQUIT\n";
    let addresses = [192, 0, 2, 3, 10, 0, 0, 1, 0x12, 0x67, 1, 0xbb];
    let header = [&signature[..], &[0x21, 0x11, 0, 12], &addresses].concat();
    let reply = exchange(gate.inbound, &[&header, LAST_REQUEST.as_bytes()].concat()).await;
    assert!(reply.contains("x-forwarded-for: 192.0.2.3\r\n"), "{reply}");
    assert_eq!(rejections(gate, "proxy_header").await, 0);
}

#[tokio::test]
async fn connections_without_a_valid_header_are_closed() {
    let gate = start("[inbound]\nproxy_protocol = \"127.0.0.1\"\n[inbound.timeouts]\nheader = \"1s\"\n").await;
    let oversized = [b"\r\n\r\n\0\r\nQUIT\n\x21\x11\xff\xff", &[b'x'; 64][..]].concat();
    let long = format!("PROXY UNKNOWN {}", "x".repeat(200));
    let bad: [&[u8]; 5] = [
        LAST_REQUEST.as_bytes(),
        b"PROXY TCP4 1.2.3.4\r\n",
        &oversized,
        long.as_bytes(),
        b"PROXY TCP4 192.0.2.1 10.0.0.1",
    ];
    for (index, bytes) in bad.into_iter().enumerate() {
        assert_eq!(exchange(gate.inbound, bytes).await, "", "{}", bytes.escape_ascii());
        assert_eq!(rejections(gate, "proxy_header").await, index as u64 + 1, "{}", bytes.escape_ascii());
    }
}

#[tokio::test]
async fn headers_of_other_peers_are_not_believed() {
    let gate = start("[inbound]\nproxy_protocol = \"192.0.2.0/24\"\n").await;
    let reply = exchange(gate.inbound, format!("PROXY TCP4 192.0.2.1 10.0.0.1 1 2\r\n{LAST_REQUEST}").as_bytes()).await;
    let hint = "a header of the PROXY protocol, from a peer that isn't in proxy_protocol";
    assert!(reply.starts_with("HTTP/1.1 400 ") && reply.contains(hint), "{reply}");
    let second = [b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c", &[1; 12][..], LAST_REQUEST.as_bytes()].concat();
    let reply = exchange(gate.inbound, &second).await;
    assert!(reply.starts_with("HTTP/1.1 400 ") && reply.contains(hint), "{reply}");
    let reply = exchange(gate.inbound, LAST_REQUEST.as_bytes()).await;
    assert!(reply.starts_with("HTTP/1.1 200 ") && reply.contains("x-forwarded-for: 127.0.0.1\r\n"), "{reply}");
}

#[tokio::test]
async fn connections_per_client_count_the_headers_address() {
    let gate = start(
        "[inbound]\nproxy_protocol = \"127.0.0.1\"\n[inbound.caps]\n\
         connections_per_client = 1\n",
    )
    .await;
    let header = "PROXY TCP4 192.0.2.1 10.0.0.1 4711 443\r\n";
    let mut first = send(gate.inbound, format!("{header}GET / HTTP/1.1\r\nhost: a\r\n\r\n").as_bytes()).await;
    let mut reply = [0; 12];
    first.read_exact(&mut reply).await.unwrap();
    assert_eq!(&reply, b"HTTP/1.1 200");
    let reply = exchange(gate.inbound, format!("{header}{LAST_REQUEST}").as_bytes()).await;
    assert!(reply.starts_with("HTTP/1.1 503 "), "{reply}");
    assert_eq!(rejections(gate, "client_connections").await, 1);
}

#[tokio::test]
async fn unfinished_handshakes_count_per_client() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    let gate = start(&format!(
        "[inbound]\nproxy_protocol = \"127.0.0.1\"\n{}[inbound.timeouts]\nheader = \"5m\"\n[inbound.caps]\n\
         connections_per_client = 1\n",
        authority.settings(&["a"], "")
    ))
    .await;
    let header = "PROXY TCP4 192.0.2.1 10.0.0.1 4711 443\r\n";
    let _first = send(gate.inbound, format!("{header}\x16").as_bytes()).await;
    let second = format!("{header}{LAST_REQUEST}");
    // Without TLS it would get 400, and 503 would be unreadable with TLS.
    until("a close", async || exchange(gate.inbound, second.as_bytes()).await.is_empty()).await;
}

#[tokio::test]
async fn health_checks_are_no_bad_headers() {
    let gate = start("[inbound]\nproxy_protocol = \"127.0.0.1\"\n").await;
    drop(send(gate.inbound, b"").await);
    let reset = send(gate.inbound, b"").await;
    reset.set_zero_linger().unwrap();
    drop(reset);
    let reply = exchange(gate.inbound, format!("PROXY UNKNOWN\r\n{LAST_REQUEST}").as_bytes()).await;
    assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
    assert_eq!(rejections(gate, "proxy_header").await, 0);
}
