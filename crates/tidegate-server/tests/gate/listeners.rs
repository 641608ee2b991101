//! Addresses of listeners and of the upstream: unix sockets, and several at once.

use std::net::SocketAddr;
use std::path::Path;

use tidegate_policy::{Policy, PolicySources};
use tidegate_server::Server;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::common::{Echo, HELLO, get, once, status};

/// A running gate of exactly this policy.
struct Gate {
    inbound: Option<SocketAddr>,
    addresses: Vec<String>,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<()>,
}

fn start(text: &str) -> Gate {
    let policy = Policy::load(PolicySources::new().file("test.toml", text)).unwrap_or_else(|errors| panic!("{errors}"));
    let bound = Server::new(&policy).bind().unwrap();
    let addresses = bound.inbound_addresses().iter().map(ToString::to_string).collect();
    let (inbound, (stop, stopped)) = (bound.inbound(), oneshot::channel::<()>());
    let ended = tokio::spawn(async {
        bound.run(async { drop(stopped.await) }).await;
    });
    Gate { inbound, addresses, stop, ended }
}

/// Sends a request over a connection of its own, which the answer ends.
async fn ask(path: &Path, request: &str) -> String {
    let mut stream = UnixStream::connect(path).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

fn request(lines: &str) -> String {
    format!("GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{lines}\r\n")
}

#[tokio::test]
async fn every_listener_serves_on_a_unix_socket() {
    let echo = Echo::start(HELLO).await;
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(format!("{name}.sock"));
    let listen = |name: &str| format!("listen = \"unix:{}\"\n", path(name).display());
    let gate = start(&format!(
        "[inbound]\n{}upstream = \"http://{}\"\n[api]\n{}[admin]\n{}[outbound]\n{}[outbound.provider.echo]\n\
         base_url = \"http://{}\"\n",
        listen("gate"),
        echo.address,
        listen("api"),
        listen("admin"),
        listen("outbound"),
        echo.address,
    ));
    assert_eq!(gate.inbound, None);
    let close = "host: localhost\r\nconnection: close\r\n\r\n";
    for (name, target) in [("gate", "/"), ("api", "/v1/status?path=/"), ("admin", "/healthz"), ("outbound", "/echo/")] {
        let answer = ask(&path(name), &format!("GET {target} HTTP/1.1\r\n{close}")).await;
        assert_eq!(status(&answer), 200, "{name}: {answer}");
    }
    gate.stop.send(()).unwrap();
    gate.ended.await.unwrap();
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn unix_peers_share_one_client_address() {
    let echo = Echo::start(HELLO).await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gate.sock");
    let policy = |trusted: &str| {
        let (path, upstream) = (path.display(), echo.address);
        format!(
            "[inbound]\nlisten = \"unix:{path}\"\nupstream = \"http://{upstream}\"\n{trusted}[inbound.global]\n\
             limit = \"1 per 1h\"\n[api]\nlisten = \"off\"\n[admin]\nlisten = \"off\"\n"
        )
    };
    let gate = start(&policy("trusted_proxies = \"127.0.0.1\"\n"));
    let forwarded = |ip: &str| request(&format!("x-forwarded-for: {ip}\r\n"));
    assert_eq!(status(&ask(&path, &forwarded("192.0.2.1")).await), 200);
    assert_eq!(status(&ask(&path, &forwarded("192.0.2.2")).await), 429, "the header isn't trusted");
    gate.stop.send(()).unwrap();
    gate.ended.await.unwrap();

    let _gate = start(&policy("trusted_proxies = \"unix\"\n"));
    for (ip, expected) in [("192.0.2.1", 200), ("192.0.2.2", 200), ("192.0.2.1", 429)] {
        assert_eq!(status(&ask(&path, &forwarded(ip)).await), expected, "{ip}");
    }
    let seen = echo.seen();
    assert!(seen[0].contains("x-forwarded-for: unknown\r\n"), "{}", seen[0]);
    assert!(seen[1].contains("x-forwarded-for: 192.0.2.1, unknown\r\n"), "{}", seen[1]);
}

#[tokio::test]
async fn upstream_and_provider_are_unix_sockets() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("app.sock");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut buffer = [0; 4096];
                while stream.read(&mut buffer).await.is_ok_and(|count| count > 0) {
                    stream.write_all(HELLO.as_bytes()).await.unwrap();
                }
            });
        }
    });
    let policy = format!(
        "[inbound]\nlisten = \"127.0.0.1:0\"\nupstream = \"unix:{0}\"\n[api]\nlisten = \"off\"\n[admin]\nlisten = \"off\"\n\
         [outbound]\nlisten = \"unix:{1}/out.sock\"\n[outbound.provider.app]\nbase_url = \"unix:{0}\"\n",
        path.display(),
        directory.path().display(),
    );
    let gate = start(&policy);
    assert_eq!(status(&once(gate.inbound.unwrap(), get("/")).await), 200);
    let request = "GET /app/ HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    assert_eq!(status(&ask(&directory.path().join("out.sock"), request).await), 200);
}

#[tokio::test]
async fn one_listener_serves_on_several_addresses() {
    let echo = Echo::start(HELLO).await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gate.sock");
    let policy = format!(
        "[inbound]\nlisten = [\"127.0.0.1:0\", \"[::1]:0\", \"unix:{}\"]\nupstream = \"http://{}\"\n[api]\n\
         listen = \"off\"\n[admin]\nlisten = \"off\"\n",
        path.display(),
        echo.address
    );
    let gate = start(&policy);
    let [v4, v6, unix] = &gate.addresses[..] else { panic!("{:?}", gate.addresses) };
    assert!(v4.starts_with("127.0.0.1:") && v6.starts_with("[::1]:") && unix.starts_with("unix:/"));
    for address in [v4, v6].map(|address| address.parse::<SocketAddr>().unwrap()) {
        assert_eq!(status(&once(address, get("/")).await), 200, "{address}");
    }
    assert_eq!(status(&ask(&path, &request("")).await), 200);
}

#[tokio::test]
async fn an_address_in_use_closes_the_others() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gate.sock");
    let (unix, taken) = (format!("unix:{}", path.display()), taken.local_addr().unwrap().to_string());
    let policy = format!("[inbound]\nlisten = [\"{unix}\", \"{taken}\"]\nupstream = \"http://127.0.0.1:1\"\n");
    let policy = Policy::load(PolicySources::new().file("test.toml", &policy)).unwrap();
    let error = Server::new(&policy).bind().err().unwrap().to_string();
    assert!(error.starts_with(&format!("inbound.listen: can't listen on {taken}: ")), "{error}");
    assert!(!path.exists());
}
