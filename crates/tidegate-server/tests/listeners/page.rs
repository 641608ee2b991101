//! The examples of `docs/tls.md`, with addresses and files of the test.

use tidegate_policy::{ListenAddress, Policy, PolicySources};
use tidegate_server::Server;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpStream, UnixListener, UnixStream};

use crate::authority::Authority;
use crate::common::{LAST_REQUEST, REQUEST, ask, echo, start};

const PAGE: &str = include_str!("../../../../docs/tls.md");

/// The policy below this heading.
fn example(heading: &str) -> &'static str {
    let (_, section) = PAGE.split_once(&format!("\n## {heading}\n")).unwrap();
    section.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap()
}

#[test]
fn all_examples_are_valid_policies() {
    let snippets: Vec<&str> = PAGE.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(snippets.len() > 7);
    for snippet in snippets {
        Policy::load(PolicySources::new().file("docs/tls.md", snippet)).unwrap_or_else(|errors| panic!("{errors}"));
    }
}

#[tokio::test]
async fn the_edge_example_enforces_its_limits() {
    let authority = Authority::new();
    authority.issue("fullchain", "a.test", 2099);
    let text = example("At the edge")
        .replace("/etc/tidegate/fullchain.pem", &authority.path("fullchain.pem"))
        .replace("/etc/tidegate/privkey.pem", &authority.path("fullchain.key"));
    let gate = start(&text).await;
    let stream = TcpStream::connect(gate.inbound).await.unwrap();
    let mut stream = authority.client(None).connect("a.test".try_into().unwrap(), stream).await.unwrap();
    let login = REQUEST.replace("GET /", "POST /login");
    for expected in ["200", "200", "200", "200", "200", "429"] {
        let reply = ask(&mut stream, &login).await.unwrap();
        assert!(reply.starts_with(&format!("HTTP/1.1 {expected} ")), "{reply}");
    }
}

#[tokio::test]
async fn the_sidecar_example_serves_by_sockets() {
    let shared = tempfile::tempdir().unwrap();
    let socket = |name: &str| shared.path().join(name);
    let app = UnixListener::bind(socket("app.sock")).unwrap();
    tokio::spawn(async move {
        loop {
            tokio::spawn(echo(app.accept().await.unwrap().0));
        }
    });
    let text = example("As a sidecar").replace("/run/shared", &shared.path().display().to_string());
    let provider = text.replace("https://api.github.com", &format!("unix:{}", socket("app.sock").display()));
    let sources = PolicySources::new().file("test.toml", &provider);
    let sources = sources.env([("TIDEGATE__INBOUND__LISTEN", "127.0.0.1:0"), ("TIDEGATE__API__LISTEN", "off")]);
    let policy = Policy::load(sources).unwrap_or_else(|errors| panic!("{errors}"));
    let bound = Server::new(&policy).bind().unwrap();
    let inbound = bound.inbound().unwrap();
    assert!(matches!(bound.admin_addresses(), [ListenAddress::Unix(path)] if *path == socket("admin.sock")));
    tokio::spawn(bound.run(std::future::pending()));

    let mut client = TcpStream::connect(inbound).await.unwrap();
    let reply = ask(&mut client, &REQUEST.replace("GET /", "GET /api/x")).await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 200 ") && reply.contains("\r\nratelimit: "), "{reply}");
    let mut gateway = UnixStream::connect(socket("gateway.sock")).await.unwrap();
    let call = LAST_REQUEST.replace("GET /", "GET /github/rate_limit").replace("a.test", "localhost");
    let reply = ask(&mut gateway, &call).await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 200 ") && reply.contains("GET /rate_limit HTTP/1.1\r\n"), "{reply}");
    let mut admin = UnixStream::connect(socket("admin.sock")).await.unwrap();
    let reply = ask(&mut admin, "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
    admin.shutdown().await.unwrap();
}
