//! HTTP/2 of listeners and to the upstream.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use h2::RecvStream;
use h2::client::{ResponseFuture, SendRequest};
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use tidegate_testkit::servers::require_program;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::authority::Authority;
use crate::common::{
    Gate, LAST_REQUEST, PATIENCE, REQUEST, ask, exchange, start, start_before, start_echo, start_until, until,
};

const ALWAYS: &str = "[inbound]\nhttp2 = \"always\"\n";

/// Starts HTTP/2 on a stream.
async fn handshake(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> SendRequest<Bytes> {
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn connect(gate: Gate) -> SendRequest<Bytes> {
    handshake(TcpStream::connect(gate.inbound).await.unwrap()).await
}

fn request(path: &str) -> http::request::Builder {
    Request::builder().uri(format!("http://a.test{path}"))
}

/// Sends a request without a body.
async fn send(client: &SendRequest<Bytes>, request: http::request::Builder) -> ResponseFuture {
    let mut client = client.clone().ready().await.unwrap();
    client.send_request(request.body(()).unwrap(), true).unwrap().0
}

/// Reads the whole of a body, and its trailers.
async fn read(body: &mut RecvStream) -> Result<(String, Option<HeaderMap>), h2::Error> {
    let mut text = Vec::new();
    while let Some(bytes) = body.data().await.transpose()? {
        body.flow_control().release_capacity(bytes.len())?;
        text.extend_from_slice(&bytes);
    }
    Ok((String::from_utf8_lossy(&text).into_owned(), body.trailers().await?))
}

/// Sends a request and reads its response.
async fn fetch(client: &SendRequest<Bytes>, request: http::request::Builder) -> Response<String> {
    let sent = send(client, request).await;
    let response = tokio::time::timeout(PATIENCE, sent).await.expect("a response in time").unwrap();
    let (head, mut body) = response.into_parts();
    Response::from_parts(head, read(&mut body).await.unwrap().0)
}

#[tokio::test]
async fn one_port_serves_both_versions() {
    let gate = start(ALWAYS).await;
    let client = connect(gate).await;
    for _ in 0..2 {
        let pieces = request("/x?y").header("cookie", "a=1").header("cookie", "b=2").header("expect", "100-continue");
        let response = fetch(&client, pieces).await;
        assert_eq!(response.status(), 200);
        let seen = response.body();
        assert!(seen.starts_with("GET /x?y HTTP/1.1\r\n") && seen.contains("\r\nhost: a.test\r\n"), "{seen}");
        assert!(seen.contains("\r\ncookie: a=1; b=2\r\n") && !seen.contains("expect"), "{seen}");
        assert!(seen.contains("\r\nx-forwarded-for: 127.0.0.1\r\nx-forwarded-proto: http\r\n"), "{seen}");
    }
    for head in [REQUEST.to_owned(), REQUEST.replace("GET", "PUT"), REQUEST.replace("GET", "PRIVATE")] {
        let mut stream = TcpStream::connect(gate.inbound).await.unwrap();
        let (start, rest) = head.split_at(2);
        tokio::io::AsyncWriteExt::write_all(&mut stream, start.as_bytes()).await.unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        let reply = ask(&mut stream, rest).await.unwrap();
        assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
    }
}

/// Clients may send each cookie of a line as a field of its own (RFC 9113 §8.2.3).
#[tokio::test]
async fn pieces_of_cookies_are_one_line() {
    let gate = start(&format!("{ALWAYS}caps = {{ headers = 10 }}\n")).await;
    let client = connect(gate).await;
    let with = |cookies: usize, lines: usize| {
        let request = (0..cookies).fold(request("/"), |request, n| request.header("cookie", format!("c{n}={n}")));
        (0..lines).fold(request, |request, n| request.header(format!("x-{n}"), "1"))
    };
    let response = fetch(&client, with(100, 9)).await;
    assert_eq!(response.status(), 200, "{}", response.body());
    let joined = (0..100).map(|n| format!("c{n}={n}")).collect::<Vec<_>>().join("; ");
    let seen = response.body();
    assert!(seen.contains(&format!("\r\ncookie: {joined}\r\n")) && seen.matches("cookie:").count() == 1, "{seen}");
    for (cookies, lines, expected) in [(0, 10, 200), (0, 11, 431), (1, 10, 431), (2, 10, 431)] {
        assert_eq!(fetch(&client, with(cookies, lines)).await.status(), expected, "{cookies} {lines}");
    }
}

#[tokio::test]
async fn pieces_of_cookies_count_as_their_line() {
    for key in ["cookie:id", "header:cookie"] {
        let limit =
            format!("[inbound.action.page]\nmatch = {{ path = \"/*\" }}\nkey = \"{key}\"\nlimit = \"1 per 1h\"\n");
        let gate = start(&format!("{ALWAYS}{limit}")).await;
        let line = LAST_REQUEST.replace("\r\n\r\n", "\r\ncookie: a=1; id=x\r\n\r\n");
        assert!(exchange(gate.inbound, line.as_bytes()).await.starts_with("HTTP/1.1 200 "), "{key}");
        let pieces = |id: &str| request("/").header("cookie", "a=1").header("cookie", format!("id={id}"));
        let client = connect(gate).await;
        assert_eq!(fetch(&client, pieces("x")).await.status(), 429, "{key}");
        assert_eq!(fetch(&client, pieces("y")).await.status(), 200, "{key}");
    }
}

#[tokio::test]
async fn http2_over_tls_is_chosen_by_alpn() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    for (mode, chosen) in [("", Some(&b"h2"[..])), ("http2 = \"never\"\n", Some(&b"http/1.1"[..]))] {
        let gate = start(&format!("[inbound]\n{mode}{}", authority.settings(&["a"], ""))).await;
        let stream = TcpStream::connect(gate.inbound).await.unwrap();
        let client = authority.client_of(&[b"h2", b"http/1.1"]);
        let stream = client.connect(ServerName::try_from("a.test").unwrap(), stream).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), chosen);
        if mode.is_empty() {
            let response = fetch(&handshake(stream).await, request("/")).await;
            let seen = response.body();
            assert!(response.status() == 200 && seen.contains("\r\nx-forwarded-proto: https\r\n"), "{seen}");
        }
    }
}

#[tokio::test]
async fn limits_are_the_same_for_both_versions() {
    let gate =
        start(&format!("{ALWAYS}[inbound.action.all]\nmatch = {{ path = \"/*\" }}\nlimit = \"4 per 1h\"\n")).await;
    let client = connect(gate).await;
    let mut sent = Vec::new();
    for _ in 0..5 {
        sent.push(send(&client, request("/")).await);
    }
    let mut statuses = Vec::new();
    for sent in sent {
        statuses.push(sent.await.unwrap().status().as_u16());
    }
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 200, 200, 200, 429]);

    let refusal = fetch(&client, request("/")).await;
    let mut stream = TcpStream::connect(gate.inbound).await.unwrap();
    let reply = ask(&mut stream, REQUEST).await.unwrap().to_ascii_lowercase();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("http/1.1 429 "), "{head}");
    let seconds = |text: &str| text.parse::<u64>().unwrap();
    let waits = head.lines().find_map(|line| line.strip_prefix("retry-after: ")).map(seconds).unwrap();
    assert!(seconds(refusal.headers()["retry-after"].to_str().unwrap()).abs_diff(waits) <= 1);
    let mut names: Vec<&str> = head.lines().skip(1).filter_map(|line| Some(line.split_once(':')?.0)).collect();
    let mut over_http2: Vec<&str> = refusal.headers().keys().map(|name| name.as_str()).collect();
    names.sort_unstable();
    over_http2.sort_unstable();
    assert_eq!(over_http2, names);
    let keys = |text: &str| {
        let body: serde_json::Map<String, serde_json::Value> = serde_json::from_str(text).unwrap();
        body.keys().cloned().collect::<Vec<_>>()
    };
    assert_eq!(keys(&refusal.body().to_ascii_lowercase()), keys(body));
}

#[tokio::test]
async fn head_gets_no_body() {
    let policy = "[inbound.action.a]\nmatch = { path = \"/a\" }\nlimit = \"0 per 1h\"\n";
    let gate = start(&format!("{ALWAYS}{policy}")).await;
    let client = connect(gate).await;
    let refused = fetch(&client, request("/a").method("HEAD")).await;
    let length: usize = refused.headers()["content-length"].to_str().unwrap().parse().unwrap();
    assert!(refused.status() == 429 && refused.body().is_empty() && length > 0, "{refused:?}");
    let whole = fetch(&client, request("/a")).await;
    assert_eq!((whole.status().as_u16(), whole.body().len()), (429, length));
}

#[tokio::test]
async fn spaces_around_values_change_no_count() {
    let policy = "[inbound.action.all]\nmatch = { path = \"/*\" }\nkey = [\"header:x-key\"]\nlimit = \"1 per 1h\"\n";
    let client = connect(start(&format!("{ALWAYS}{policy}")).await).await;
    for (value, status) in [(" k", 200), ("k", 429), ("k ", 429), ("\tk", 429), (" j ", 200)] {
        assert_eq!(fetch(&client, request("/").header("x-key", value)).await.status(), status, "{value:?}");
    }
}

#[tokio::test]
async fn the_upstream_gets_at_most_one_length() {
    let client = connect(start(ALWAYS).await).await;
    for (lengths, forwarded) in [(&[""][..], 0), (&["0"], 1), (&["0", "0"], 1), (&["", "0"], 0)] {
        let request = lengths.iter().fold(request("/"), |request, length| request.header("content-length", *length));
        let response = fetch(&client, request).await;
        assert_eq!(response.body().matches("content-length").count(), forwarded, "{lengths:?}");
    }
}

/// A server that speaks HTTP/2, and the number of its connections.
pub(crate) struct Http2Server {
    pub(crate) address: SocketAddr,
    connections: Arc<AtomicUsize>,
}

/// Starts an HTTP/2 server that answers with the request's body, and with trailers. To `/hold` it never answers, and to
/// `/lines/N` with N header lines of 900 bytes.
pub(crate) async fn start_server(tls: Option<TlsAcceptor>) -> Http2Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, connections) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let count = Arc::clone(&connections);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            count.fetch_add(1, Ordering::Relaxed);
            let tls = tls.clone();
            tokio::spawn(async move {
                let http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                let service = service_fn(answer);
                let _ = match tls {
                    None => http.serve_connection(TokioIo::new(stream), service).await,
                    Some(tls) => {
                        let stream = tls.accept(stream).await.unwrap();
                        http.serve_connection(TokioIo::new(stream), service).await
                    }
                };
            });
        }
    });
    Http2Server { address, connections }
}

async fn answer(
    request: Request<Incoming>,
) -> Result<Response<impl hyper::body::Body<Data = Bytes, Error = Infallible>>, Infallible> {
    let (head, body) = request.into_parts();
    if head.uri.path() == "/hold" {
        std::future::pending::<()>().await;
    }
    let lines = head.uri.path().strip_prefix("/lines/").and_then(|lines| lines.parse().ok()).unwrap_or(0);
    let collected = body.collect().await.unwrap();
    let mut trailers = collected.trailers().cloned().unwrap_or_default();
    trailers.insert("grpc-status", "0".parse().unwrap());
    let target = format!("{} {} {:?}\n", head.method, head.uri, head.headers.get("te"));
    let frames = [Frame::data(Bytes::from(target)), Frame::data(collected.to_bytes()), Frame::trailers(trailers)];
    let body = StreamBody::new(futures_util::stream::iter(frames.map(Ok)));
    let mut response = Response::builder().header("content-type", "application/grpc").body(body).unwrap();
    for line in 0..lines {
        response.headers_mut().append("x-line", format!("{line:0>900}").parse().unwrap());
    }
    Ok(response)
}

/// Makes a call as gRPC clients do, with trailers.
async fn call(client: &SendRequest<Bytes>) -> (Response<()>, String, HeaderMap) {
    let head = request("/echo.Echo/Say").method("POST").header("te", "trailers");
    let head = head.header("content-type", "application/grpc").body(()).unwrap();
    let mut client = client.clone().ready().await.unwrap();
    let (sent, mut body) = client.send_request(head, false).unwrap();
    body.send_data(Bytes::from_static(b"hello"), false).unwrap();
    body.send_trailers(HeaderMap::from_iter([("x-sum".parse().unwrap(), "5".parse().unwrap())])).unwrap();
    let (head, mut body) = tokio::time::timeout(PATIENCE, sent).await.expect("a response").unwrap().into_parts();
    let (text, trailers) = read(&mut body).await.unwrap();
    (Response::from_parts(head, ()), text, trailers.unwrap())
}

#[tokio::test]
async fn grpc_calls_pass_with_their_trailers() {
    let authority = Authority::new();
    let trust = authority.issue_upstream();
    let plain = start_server(None).await;
    let secure = start_server(Some(authority.server("app", &[b"h2"]))).await;
    for (upstream, trust, scheme) in [
        (format!("http://{}", plain.address), String::new(), "http"),
        (format!("https://{}", secure.address), trust, "https"),
    ] {
        let gate = start_before(&upstream, &format!("{ALWAYS}upstream_http2 = true\n{trust}\n")).await;
        let client = connect(gate).await;
        for _ in 0..2 {
            let (response, text, trailers) = call(&client).await;
            assert_eq!(response.status(), 200);
            assert_eq!(text, format!("POST {scheme}://a.test/echo.Echo/Say Some(\"trailers\")\nhello"));
            assert_eq!((&trailers["x-sum"], &trailers["grpc-status"]), (&"5".parse().unwrap(), &"0".parse().unwrap()));
        }
        // HTTP/1.1 clients are served by the same upstream.
        let mut stream = TcpStream::connect(gate.inbound).await.unwrap();
        let reply =
            ask(&mut stream, &REQUEST.replace("\r\n\r\n", "\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")).await;
        assert!(reply.as_ref().unwrap().starts_with("HTTP/1.1 200 "), "{reply:?}");
    }
    assert_eq!(plain.connections.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn heads_of_the_upstream_have_a_bound_in_bytes() {
    let upstream = format!("http://{}", start_server(None).await.address);
    let gate = start_before(&upstream, &format!("{ALWAYS}upstream_http2 = true\n")).await;
    for (lines, expected) in [(200, 200), (300, 502)] {
        let mut stream = TcpStream::connect(gate.inbound).await.unwrap();
        let reply = ask(&mut stream, &REQUEST.replacen(" / ", &format!(" /lines/{lines} "), 1)).await.unwrap();
        assert!(reply.starts_with(&format!("HTTP/1.1 {expected} ")), "{lines}: {reply}");
    }
}

#[tokio::test]
async fn held_calls_do_not_block_others() {
    let server = start_server(None).await;
    let gate = start_before(&format!("http://{}", server.address), &format!("{ALWAYS}upstream_http2 = true\n")).await;
    let clients = [connect(gate).await, connect(gate).await];
    let mut held = Vec::new();
    for index in 0..110 {
        held.push(tokio::spawn(send(&clients[index % 2], request("/hold")).await));
    }
    until("two connections", async || server.connections.load(Ordering::Relaxed) == 2).await;
    assert_eq!(fetch(&clients[0], request("/")).await.status(), 200);
    for held in held {
        held.abort();
    }
}

#[tokio::test]
async fn a_shutdown_answers_what_it_has_taken() {
    let upstream = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let address = format!("http://{}", upstream.local_addr().unwrap());
    let gate = start_until(&address, ALWAYS, async { stopped.await.unwrap() });
    let client = connect(gate).await;
    let sent = send(&client, request("/")).await;
    let (mut stream, _) = upstream.accept().await.unwrap();
    let idle = connect(gate).await;
    stop.send(()).unwrap();
    until("the listener is closed", async || TcpStream::connect(gate.inbound).await.is_err()).await;
    tokio::io::AsyncWriteExt::write_all(&mut stream, b"HTTP/1.1 204 \r\n\r\n").await.unwrap();
    assert_eq!(sent.await.unwrap().status(), 204);
    for client in [client, idle] {
        until("an end of the connection", async || client.clone().ready().await.is_err()).await;
    }
}

#[tokio::test]
async fn requests_that_were_not_processed_are_sent_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = format!("http://{}", listener.local_addr().unwrap());
    let seen = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&seen);
    tokio::spawn(async move {
        loop {
            let (stream, count) = (listener.accept().await.unwrap().0, Arc::clone(&count));
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                while let Some(Ok((_request, mut respond))) = connection.accept().await {
                    if count.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
                        respond.send_reset(h2::Reason::REFUSED_STREAM);
                    } else {
                        respond.send_response(Response::builder().status(204).body(()).unwrap(), true).unwrap();
                    }
                }
            });
        }
    });
    let gate = start_before(&upstream, &format!("{ALWAYS}upstream_http2 = true\n")).await;
    let client = connect(gate).await;
    assert_eq!(fetch(&client, request("/")).await.status(), 204);
    assert_eq!(seen.load(Ordering::Relaxed), 2);
    // A body may have been sent in part, so only the client can send it again.
    let mut sender = client.clone().ready().await.unwrap();
    let post = request("/").method("POST").body(()).unwrap();
    let (sent, mut body) = sender.send_request(post, false).unwrap();
    body.send_data(Bytes::from_static(b"x"), true).unwrap();
    assert_eq!(sent.await.unwrap().status(), 502);
    assert_eq!(seen.load(Ordering::Relaxed), 3);
}

/// A stream in both directions whose reply is overdue ends at once, though its request goes on.
#[tokio::test]
async fn a_silent_reply_resets_a_stream_whose_request_goes_on() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = format!("http://{}", listener.local_addr().unwrap());
    let (ended, upload_ended) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        let stream = listener.accept().await.unwrap().0;
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let (request, mut respond) = connection.accept().await.unwrap().unwrap();
        tokio::spawn(async move { while connection.accept().await.is_some() {} });
        let mut reply = respond.send_response(Response::new(()), false).unwrap();
        reply.send_data(Bytes::from_static(b"x"), false).unwrap();
        let mut body = request.into_body();
        while let Some(Ok(_)) = body.data().await {}
        let _ = ended.send(());
    });
    let policy = format!("{ALWAYS}upstream_http2 = true\ntimeouts = {{ body = \"300ms\" }}\n");
    let gate = start_before(&upstream, &policy).await;
    let mut sender = connect(gate).await.ready().await.unwrap();
    let (sent, mut upload) = sender.send_request(request("/").method("POST").body(()).unwrap(), false).unwrap();
    upload.send_data(Bytes::from_static(b"x"), false).unwrap();
    let mut reply = sent.await.unwrap().into_body();
    assert_eq!(reply.data().await.unwrap().unwrap(), "x");
    let error =
        tokio::time::timeout(PATIENCE, reply.data()).await.expect("the end of the stream").unwrap().unwrap_err();
    assert_eq!(error.reason(), Some(h2::Reason::CANCEL));
    tokio::time::timeout(PATIENCE, upload_ended).await.expect("the upstream's request ends, too").unwrap();
}

#[tokio::test]
async fn a_server_that_takes_one_request_gets_more_connections() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let stream = listener.accept().await.unwrap().0;
            tokio::spawn(async move {
                let mut builder = h2::server::Builder::new();
                let mut connection = builder.max_concurrent_streams(1).handshake::<_, Bytes>(stream).await.unwrap();
                let mut held = Vec::new();
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    match request.uri().path() {
                        "/hold" => held.push(respond),
                        _ => drop(respond.send_response(Response::builder().status(204).body(()).unwrap(), true)),
                    }
                }
            });
        }
    });
    let gate = start_before(&upstream, &format!("{ALWAYS}upstream_http2 = true\n")).await;
    let client = connect(gate).await;
    // The first response shows that the server's settings have arrived. They count from the next request on.
    for _ in 0..2 {
        assert_eq!(fetch(&client, request("/")).await.status(), 204);
    }
    let mut sender = client.clone().ready().await.unwrap();
    let _held = sender.send_request(request("/hold").body(()).unwrap(), true).unwrap();
    let answered = tokio::time::timeout(PATIENCE, fetch(&client, request("/"))).await;
    assert_eq!(answered.expect("another connection").status(), 204);
}

/// Starts a server that sends the number of informational replies that the path says before each reply.
async fn start_informing() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let mut connection = h2::server::handshake(listener.accept().await.unwrap().0).await.unwrap();
            tokio::spawn(async move {
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    for _ in 0..request.uri().path()[1..].parse().unwrap() {
                        respond.send_informational(Response::builder().status(103).body(()).unwrap()).unwrap();
                    }
                    respond.send_response(Response::builder().status(204).body(()).unwrap(), true).unwrap();
                }
            });
        }
    });
    address
}

#[tokio::test]
async fn informational_replies_over_http2_have_a_bound() {
    let upstream = format!("http://{}", start_informing().await);
    let client = connect(start_before(&upstream, &format!("{ALWAYS}upstream_http2 = true\n")).await).await;
    for (path, expected) in [("/34", 502), ("/32", 204), ("/0", 204), ("/32", 204), ("/200", 502), ("/1", 204)] {
        assert_eq!(fetch(&client, request(path)).await.status(), expected, "{path}");
    }
}

#[tokio::test]
async fn an_upstream_without_http2_is_a_bad_gateway() {
    let authority = Authority::new();
    let trust = authority.issue_upstream();
    let upstream = start_echo(Some(authority.server("app", &[b"http/1.1"]))).await;
    let policy = format!("{ALWAYS}upstream_http2 = true\n{trust}\n");
    let gate = start_before(&format!("https://{upstream}"), &policy).await;
    assert_eq!(fetch(&connect(gate).await, request("/")).await.status(), 502);
}

#[tokio::test]
async fn curl_speaks_http2() {
    let Some(curl) = require_program("curl") else { return };
    let gate = start(ALWAYS).await;
    for version in ["--http2-prior-knowledge", "--http1.1"] {
        let url = format!("http://{}/", gate.inbound);
        let mut command = std::process::Command::new(&curl);
        command.args([
            "--silent",
            "--max-time",
            "20",
            version,
            "--data",
            "x=1",
            "--write-out",
            "%{http_version}",
            &url,
        ]);
        let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let ends = if version == "--http1.1" { "1.1" } else { "2" };
        assert!(text.starts_with("POST / HTTP/1.1\r\n") && text.ends_with(ends), "{version}: {text}");
    }
}

#[tokio::test]
async fn refused_uploads_leave_the_connection_usable() {
    let limit = "[inbound.action.a]\nmatch = { path = \"/a\" }\nlimit = \"1 per 1h\"\n";
    let gate = start(&format!("{ALWAYS}{limit}")).await;
    let client = connect(gate).await;
    assert_eq!(fetch(&client, request("/a")).await.status(), 200);
    // A whole body, a part of one, and more than is ever discarded.
    for (size, is_whole) in [(10, true), (10, false), (200 << 10, true)] {
        for _ in 0..20 {
            let mut ready = client.clone().ready().await.unwrap();
            let (response, mut upload) =
                ready.send_request(request("/a").method("POST").body(()).unwrap(), false).unwrap();
            upload.send_data(Bytes::from(vec![b'x'; size]), is_whole).unwrap();
            let response = tokio::time::timeout(PATIENCE, response).await.unwrap().unwrap();
            assert_eq!(response.status(), 429, "{size} {is_whole}");
            let (text, _) = read(&mut response.into_body()).await.unwrap();
            assert!(text.contains("Too many requests"), "{text}");
        }
    }
    assert_eq!(fetch(&client, request("/b")).await.status(), 200);
}
