//! TLS to the upstream.

use tokio::net::TcpStream;

use crate::authority::Authority;
use crate::common::{LAST_REQUEST, REQUEST, ask, exchange, start_before, start_echo};

#[tokio::test]
async fn an_https_upstream_is_trusted_by_its_authority() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    authority.issue("app", "app.test", 2099);
    authority.issue("gate", "gate", 2099);
    let upstream = format!("https://{}", start_echo(Some(authority.server("app", &[]))).await);
    let pair = format!("certificate = {:?}, key = {:?}", authority.path("gate.pem"), authority.path("gate.key"));
    let policy =
        |ca: &Authority, rest: &str| format!("[inbound]\nupstream_tls = {{ ca = {:?}, {rest} }}\n", ca.path("ca.pem"));

    let trusted = policy(&authority, &format!("server_name = \"app.test\", {pair}"));
    let gate = start_before(&upstream, &trusted).await;
    let mut client = TcpStream::connect(gate.inbound).await.unwrap();
    for _ in 0..2 {
        let reply = ask(&mut client, REQUEST).await.unwrap();
        assert!(reply.starts_with("HTTP/1.1 200 ") && reply.contains("host: a.test\r\n"), "{reply}");
    }

    for wrong in [
        policy(&authority, &format!("server_name = \"other.test\", {pair}")),
        policy(&authority, &pair),
        policy(&stranger, &format!("server_name = \"app.test\", {pair}")),
        policy(&authority, "server_name = \"app.test\""),
    ] {
        let gate = start_before(&upstream, &wrong).await;
        let reply = exchange(gate.inbound, LAST_REQUEST.as_bytes()).await;
        assert!(reply.starts_with("HTTP/1.1 502 "), "{wrong}: {reply}");
    }
}
