//! TLS to the upstream.

use tidegate_policy::{Policy, PolicySources};
use tidegate_server::Server;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::authority::Authority;
use crate::common::{LAST_REQUEST, REQUEST, ask, exchange, send, start_before, start_echo};

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

#[tokio::test]
async fn a_reload_takes_a_changed_authority() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let trust = authority.issue_upstream();
    let upstream = format!("https://{}", start_echo(Some(authority.server("app", &[]))).await);
    let text = format!("[inbound]\nupstream = \"{upstream}\"\n{trust}[api]\nlisten = \"off\"\n");
    let ports = [("TIDEGATE__INBOUND__LISTEN", "127.0.0.1:0"), ("TIDEGATE__ADMIN__LISTEN", "off")];
    let sources = || PolicySources::new().file("test.toml", &text).env(ports);
    let policy = Policy::load(sources()).unwrap_or_else(|errors| panic!("{errors}"));
    let again = policy.clone();
    let bound = Server::new(&policy).policy_source(move |_| Ok(again.clone())).bind().unwrap();
    let (inbound, reload) = (bound.inbound().unwrap(), bound.reload_handle());
    tokio::spawn(bound.run(std::future::pending()));

    let mut client = TcpStream::connect(inbound).await.unwrap();
    for (ca, status) in [(&authority, "200"), (&stranger, "502"), (&authority, "200")] {
        std::fs::write(authority.path("ca.pem"), ca.issuer.pem()).unwrap();
        reload.reload().await.unwrap();
        let reply = ask(&mut client, REQUEST).await.unwrap();
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{status}: {reply}");
    }
}

#[tokio::test]
async fn upgrades_pass_to_an_https_upstream() {
    let authority = Authority::new();
    let trust = authority.issue_upstream();
    let (listener, tls) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), authority.server("app", &[]));
    let upstream = format!("https://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let mut stream = tls.accept(listener.accept().await.unwrap().0).await.unwrap();
        let mut buffer = [0; 4096];
        let count = stream.read(&mut buffer).await.unwrap();
        assert!(String::from_utf8_lossy(&buffer[..count]).contains("upgrade: tea/1.0\r\n"));
        let switch = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: tea/1.0\r\n\r\nbrew";
        stream.write_all(switch.as_bytes()).await.unwrap();
        let count = stream.read(&mut buffer).await.unwrap();
        stream.write_all(&buffer[..count]).await.unwrap();
    });
    let gate = start_before(&upstream, &format!("[inbound]\n{trust}")).await;
    let head = REQUEST.replace("\r\n\r\n", "\r\nconnection: upgrade\r\nupgrade: tea/1.0\r\n\r\n");
    let mut client = send(gate.inbound, head.as_bytes()).await;
    let mut seen = Vec::new();
    while !seen.ends_with(b"brew") {
        assert!(client.read_buf(&mut seen).await.unwrap() > 0, "{}", String::from_utf8_lossy(&seen));
    }
    client.write_all(b"milk").await.unwrap();
    let mut echoed = [0; 4];
    client.read_exact(&mut echoed).await.unwrap();
    assert_eq!(&echoed, b"milk");
}
