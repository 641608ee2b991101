//! Requests that two servers might read differently never reach the second one.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

use crate::authority::Authority;
use crate::common::{Echo, HELLO, Peer, Running, header, json, nobody, start, status};

/// The bytes of a request, and the status of the response.
const REFUSED: &[(&str, &str, u16)] = &[
    (
        "both framings",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    (
        "both, the other way round",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        400,
    ),
    ("two lengths", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
    ("a list of lengths", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3, 3\r\n\r\nabc", 400),
    ("a signed length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc", 400),
    ("a negative length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -3\r\n\r\nabc", 400),
    ("a hexadecimal length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x3\r\n\r\nabc", 400),
    ("an endless length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\nabc", 400),
    ("an empty length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\nabc", 400),
    ("an unknown coding", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    ("gzip, chunked", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    ("chunked, gzip", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    (
        "chunked twice",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    (
        "identity and chunked",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    ("a coding of HTTP/1.0", "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ("a quoted coding", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n", 400),
    ("a folded line", "GET / HTTP/1.1\r\nHost: a\r\nX-A: b\r\n c\r\n\r\n", 400),
    ("a folded coding", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400),
    ("a space before the colon", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length : 3\r\n\r\nabc", 400),
    ("a line without a colon", "GET / HTTP/1.1\r\nHost: a\r\nX-A\r\n\r\n", 400),
    ("a NUL in a value", "GET / HTTP/1.1\r\nHost: a\r\nX-A: b\0c\r\n\r\n", 400),
    ("a bare CR in a value", "GET / HTTP/1.1\r\nHost: a\r\nX-A: b\rX-B: c\r\n\r\n", 400),
    ("a bare CR in the target", "GET /a\rb HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("a request line ended by CR", "GET / HTTP/1.1\rHost: a\r\n\r\n", 400),
    ("a NUL in the target", "GET /a\0 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("a NUL in a name", "GET / HTTP/1.1\r\nHost: a\r\nX-\0: b\r\n\r\n", 400),
    ("lines ended by LF", "GET / HTTP/1.1\nHost: a\n\n", 400),
    ("a request line ended by LF", "GET / HTTP/1.1\nHost: a\r\n\r\n", 400),
    ("a header line ended by LF", "GET / HTTP/1.1\r\nHost: a\nX-A: b\r\n\r\n", 400),
    ("a long line ended by LF", LONG_LINE, 400),
    ("a length ended by LF", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\n\r\nabc", 400),
    ("a head ended by LF", "GET / HTTP/1.1\r\nHost: a\r\n\n", 400),
    ("an LF before a request", "\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("no host", "GET / HTTP/1.1\r\n\r\n", 400),
    ("two hosts", "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    ("a host with a path", "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    ("a host with a user", "GET / HTTP/1.1\r\nHost: u@a\r\n\r\n", 400),
    ("a host with two ports", "GET / HTTP/1.1\r\nHost: example.org:80:80\r\n\r\n", 400),
    ("a host with two colons", "GET / HTTP/1.1\r\nHost: example.org::\r\n\r\n", 400),
    ("a host with a port and more", "GET / HTTP/1.1\r\nHost: example.org:80:x\r\n\r\n", 400),
    ("a host with a port and a colon", "GET / HTTP/1.1\r\nHost: example.org:80:\r\n\r\n", 400),
    ("a port without a host", "GET / HTTP/1.1\r\nHost: :80\r\n\r\n", 400),
    ("a port of letters", "GET / HTTP/1.1\r\nHost: example.org:http\r\n\r\n", 400),
    ("an IPv6 address without brackets", "GET / HTTP/1.1\r\nHost: ::1\r\n\r\n", 400),
    ("brackets that don't close", "GET / HTTP/1.1\r\nHost: [::1\r\n\r\n", 400),
    ("brackets and more", "GET / HTTP/1.1\r\nHost: [::1]x:80\r\n\r\n", 400),
    ("an escaped host", "GET / HTTP/1.1\r\nHost: ex%61mple.org\r\n\r\n", 400),
    ("a host of one target and two ports", "GET http://example.org:80:80/ HTTP/1.0\r\n\r\n", 400),
    ("two hosts in one", "GET / HTTP/1.1\r\nHost: a, b\r\n\r\n", 400),
    ("another host in the target", "GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("a user in the target", "GET http://u@a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("another scheme", "GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("an authority as target", "GET a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("a star that isn't OPTIONS'", "GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("a space in the target", "GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("another version", "GET / HTTP/2.0\r\nHost: a\r\n\r\n", 400),
    ("CONNECT", "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", 405),
    ("TRACE", "TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    ("a bad chunk size", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n0\r\n\r\n", 400),
    (
        "a signed chunk size",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n+3\r\nabc\r\n0\r\n\r\n",
        400,
    ),
    (
        "a chunk size with 0x",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
        400,
    ),
    (
        "an endless chunk",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc",
        400,
    ),
    (
        "a chunk longer than it says",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n",
        400,
    ),
    (
        "a chunk line ended by LF",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
        400,
    ),
    (
        "an extension of a chunk ended by LF",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\nabc\r\n0\r\n\r\n",
        400,
    ),
    ("a chunk ended by LF", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\n0\r\n\r\n", 400),
    (
        "a trailer ended by LF",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-A: b\nX-B: c\r\n\r\n",
        400,
    ),
    (
        "trailers ended by LF",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-A: b\r\n\n",
        400,
    ),
    (
        "a bare CR in a trailer",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-A: b\rX-B: c\r\n\r\n",
        400,
    ),
    (
        "a NUL in a trailer",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-A: b\0\r\n\r\n",
        400,
    ),
];

/// A line longer than what is kept of one that hasn't arrived whole.
const LONG_LINE: &str = "GET / HTTP/1.1\r\nHost: a\r\nX-A: \
    aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n\
    X-B: b\r\n\r\n";

/// Starts two gates in front of this upstream, the second one with TLS. Returns also the addresses that take plain bytes
/// for them.
async fn start_plain_and_tls(upstream: SocketAddr, rest: &str) -> [(Running, SocketAddr); 2] {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    let plain = start(upstream, rest).await;
    let secure = start(upstream, &format!("[inbound]\n{}{rest}", authority.settings(&["a"], ""))).await;
    let (client, gate) = (authority.client(None), secure.inbound);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut near, _) = listener.accept().await.unwrap();
            let client = client.clone();
            tokio::spawn(async move {
                let far = TcpStream::connect(gate).await.unwrap();
                let mut far = client.connect("a.test".try_into().unwrap(), far).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });
    let inbound = plain.inbound;
    [(plain, inbound), (secure, address)]
}

const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";

#[tokio::test]
async fn ambiguous_requests_are_refused_and_closed() {
    let upstream = Echo::start(HELLO).await;
    for (_gate, address) in start_plain_and_tls(upstream.address, "").await {
        for (what, bytes, expected) in REFUSED {
            let mut client = Peer::connect(address).await;
            // The bytes that follow must not be read as a request of their own.
            client.send(format!("{bytes}{SMUGGLED}")).await;
            let answer = client.message().await;
            assert_eq!(status(&answer), *expected, "{what}: {answer}");
            assert!(json(&answer)["message"].is_string(), "{what}: {answer}");
            assert!(client.ends().await, "{what}: the connection goes on");
        }
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    let seen = upstream.seen();
    assert!(!seen.iter().any(|request| request.contains("smuggled")), "{seen:#?}");
    assert!(seen.iter().all(|request| request.starts_with("POST / ")), "only bodies that break later: {seen:#?}");
}

#[tokio::test]
async fn unusual_requests_are_forwarded_unambiguously() {
    for over_tls in [false, true] {
        check_unusual_requests(over_tls).await;
    }
}

async fn check_unusual_requests(over_tls: bool) {
    let upstream = Echo::start(HELLO).await;
    let gates = start_plain_and_tls(upstream.address, "").await;
    let mut client = Peer::connect(gates[usize::from(over_tls)].1).await;
    // These are allowed although unusual: they are forwarded in the one form that all servers read alike.
    for bytes in [
        "POST /1 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        "POST /2 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: CHUNKED\r\n\r\n3;ext=1\r\nabc\r\n0\r\n\r\n",
        "\r\nGET /3 HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET HTTP://A:80/4 HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET /5 HTTP/1.1\r\nHost: example.org:\r\n\r\n",
        "GET /6 HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n",
        "GET /7 HTTP/1.1\r\nHost:\r\n\r\n",
    ] {
        assert_eq!(status(&client.ask(bytes).await), 200, "{bytes}");
    }
    let seen = upstream.seen();
    assert_eq!(seen.len(), 7);
    assert_eq!(seen[0].matches("content-length: 3\r\n").count(), 1, "{}", seen[0]);
    assert!(seen[1].contains("transfer-encoding: chunked\r\n") && seen[1].ends_with("\r\n\r\n3\r\nabc\r\n0\r\n\r\n"));
    assert!(seen[2].starts_with("GET /3 HTTP/1.1\r\nhost: a\r\n"));
    assert!(seen[3].starts_with("GET /4 HTTP/1.1\r\nhost: a\r\n"));
}

/// The same bytes in pieces.
#[tokio::test]
async fn lines_without_cr_are_refused_however_they_arrive() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "").await;
    for (what, bytes, expected) in
        REFUSED.iter().filter(|(what, ..)| what.contains("LF") && !what.starts_with("trailers"))
    {
        let mut client = Peer::connect(gate.inbound).await;
        for piece in bytes.as_bytes().chunks(1) {
            // After its answer, the gate doesn't read on for long.
            let _ = tokio::io::AsyncWriteExt::write_all(&mut client.stream, piece).await;
            tokio::task::yield_now().await;
        }
        let answer = client.message().await;
        assert_eq!(status(&answer), *expected, "{what}: {answer}");
        assert!(client.ends().await, "{what}: the connection goes on");
    }
    let seen = upstream.seen();
    assert!(seen.iter().all(|request| request.starts_with("POST / ")), "only bodies that break later: {seen:#?}");
    assert!(!seen.iter().any(|request| request.ends_with("0\r\n\r\n") || request.contains("x-a")), "{seen:#?}");
}

/// A front server may read the same bytes before it asks the decision API.
#[tokio::test]
async fn the_other_listeners_refuse_ambiguous_requests() {
    let gate = start(nobody(), "").await;
    let heads = REFUSED.iter().filter(|(what, bytes, _)| {
        what.starts_with("both") || what.contains("LF") && !bytes.contains("Transfer-Encoding")
    });
    for (what, bytes, expected) in heads {
        for address in [gate.api, gate.admin] {
            let mut client = Peer::connect(address).await;
            client.send(format!("{bytes}{SMUGGLED}")).await;
            let answer = client.message().await;
            assert_eq!(status(&answer), *expected, "{what}: {answer}");
            assert!(answer.contains("LF alone") && client.ends().await, "{what}: {answer}");
        }
    }
    let question = "{\"action\":\"login\",\"ip\":\"192.0.2.7\"}";
    let chunk = format!("Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{question}\r\n0\r\n", question.len());
    for path in ["/v1/check", "/other"] {
        let mut client = Peer::connect(gate.api).await;
        client.send(format!("POST {path} HTTP/1.1\r\nHost: a\r\n{chunk}")).await;
        // This one is answered without its body, and then the next request begins in an uncertain place.
        assert!(path == "/v1/check" || status(&client.message().await) == 404);
        client.send(format!("X-A: b\nX-B: c\r\n\r\n{SMUGGLED}")).await;
        let answer = client.try_message().await;
        assert!(answer.as_deref().map_or(path == "/other", |answer| status(answer) == 400), "{path}: {answer:?}");
        assert!(client.ends().await, "{path}");
    }
}

#[tokio::test]
async fn pipelined_requests_are_kept_separate() {
    let upstream = Echo::start(HELLO).await;
    let gates = start_plain_and_tls(upstream.address, "").await;
    let chunked = "POST /1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    let sized = "POST /2 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nTrans";
    let both = "POST /3 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    for (_, address) in &gates {
        let mut client = Peer::connect(*address).await;
        client.send([chunked, sized, chunked, both, SMUGGLED].concat()).await;
        for expected in [200, 200, 200, 400] {
            assert_eq!(status(&client.message().await), expected);
        }
        assert!(client.ends().await);
    }
    assert_eq!(upstream.seen().len(), 6);
}

#[tokio::test]
async fn an_upstream_cannot_split_responses() {
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nx-a: b\0c\r\ncontent-length: 0\r\n\r\n",
    ] {
        let upstream = Echo::start(answer).await;
        for (_gate, address) in start_plain_and_tls(upstream.address, "").await {
            let mut client = Peer::connect(address).await;
            assert_eq!(status(&client.ask("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await), 502, "{answer:?}");
        }
    }
}

#[tokio::test]
async fn chunked_encoding_overrides_an_upstreams_content_length() {
    let chunked = "transfer-encoding: chunked\r\n";
    for length in ["content-length: 3\r\n", "content-length: 50\r\n"] {
        for both in [format!("{length}{chunked}"), format!("{chunked}{length}")] {
            let answer = format!("HTTP/1.1 200 OK\r\n{both}\r\n5\r\nhello\r\n0\r\n\r\n");
            let upstream = Echo::start(answer.leak()).await;
            for (_gate, address) in start_plain_and_tls(upstream.address, "").await {
                let mut client = Peer::connect(address).await;
                // With any length, the next response begins where the client expects it.
                for _ in 0..2 {
                    let answer = client.ask("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
                    assert!(answer.ends_with("\r\n\r\n5\r\nhello\r\n0\r\n\r\n"), "{answer}");
                    assert_eq!(header(&answer, "transfer-encoding"), Some("chunked"));
                    assert_eq!(header(&answer, "content-length"), None);
                }
            }
        }
    }
}

/// A line of an upstream's head that no reader should need.
const UNREADABLE: [&str; 8] = [
    "X Bad Header: 1",
    "Foo[bar]: x",
    "a line without a colon",
    ": no name",
    "X-Bell: a\u{7}b",
    "X\u{e9}: 1",
    "Transfer-Encoding\u{b}: chunked",
    "\"Content-Length\": 3",
];

#[tokio::test]
async fn unreadable_lines_of_an_upstream_are_dropped() {
    for line in UNREADABLE {
        // A folded line belongs to the dropped one.
        for fold in ["", "\r\n content-length: 3"] {
            let answer = format!("HTTP/1.1 200 OK\r\nx-first: 1\r\n{line}{fold}\r\ncontent-length: 5\r\n\r\nhello");
            let upstream = Echo::start(answer.leak()).await;
            let gate = start(upstream.address, "").await;
            let mut client = Peer::connect(gate.inbound).await;
            for _ in 0..2 {
                let answer = client.ask("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
                let head = answer.strip_suffix("\r\n\r\nhello").unwrap_or_else(|| panic!("{line}: {answer}"));
                let names: Vec<_> = head.lines().skip(1).filter_map(|line| line.split(':').next()).collect();
                assert_eq!(names, ["x-first", "content-length", "date"], "{line}: {answer}");
            }
        }
    }
}

#[tokio::test]
async fn hostile_spellings_of_an_upstreams_framing_count() {
    const CHUNKED: &str = "5\r\nhello\r\n0\r\n\r\n";
    for (lines, body, expected) in [
        ("Transfer-Encoding : chunked", CHUNKED, 200),
        ("content-length: 3\r\nTransfer-Encoding\t : chunked", CHUNKED, 200),
        ("Transfer-Encoding:\r\n chunked", CHUNKED, 200),
        ("content-length: 3\r\ntransfer-encoding:\r\n\t\r\n chunked", CHUNKED, 200),
        ("Content-Length\t: 5", "hello", 200),
        ("Content-Length:\r\n\t5", "hello", 200),
        ("x-a: b\r\n content-length: 3\r\ncontent-length: 5", "hello", 200),
        (" transfer-encoding: chunked\r\ncontent-length: 5", "hello", 200),
        ("content-length: 5\r\n 5", "hello", 502),
        ("content-length: 5\r\nContent-Length : 6", "hello", 502),
        ("content-length: 5\r\nContent-Length:\r\n 6", "hello", 502),
        ("content-length: 5\r\nx-a: b\rx-c: d", "hello", 502),
        ("content-length: 5\r\nx y: b\0c", "hello", 502),
    ] {
        let upstream = Echo::start(format!("HTTP/1.1 200 OK\r\n{lines}\r\n\r\n{body}").leak()).await;
        for (_gate, address) in start_plain_and_tls(upstream.address, "").await {
            let mut client = Peer::connect(address).await;
            // The next response begins where the client expects it.
            for _ in 0..2 {
                let answer = client.ask("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
                assert_eq!(status(&answer), expected, "{lines:?}: {answer}");
                if expected == 200 {
                    let is_chunked = header(&answer, "transfer-encoding") == Some("chunked");
                    let length = header(&answer, "content-length");
                    assert_eq!(
                        (is_chunked, length.is_some()),
                        (body == CHUNKED, body != CHUNKED),
                        "{lines:?}: {answer}"
                    );
                    assert!(answer.ends_with(&format!("\r\n\r\n{body}")), "{lines:?}: {answer}");
                    let folded = lines.starts_with("x-a").then_some("b content-length: 3");
                    assert_eq!(header(&answer, "x-a"), folded, "{answer}");
                }
            }
        }
    }
}

#[tokio::test]
async fn bytes_after_a_response_answer_no_other_request() {
    const REST: &str = "HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\npoisoned";
    for line in ["", "Transfer-Encoding\u{b}: chunked\r\n"] {
        let answer = format!("HTTP/1.1 200 OK\r\n{line}content-length: 5\r\n\r\nhello{REST}");
        let upstream = Echo::start(answer.leak()).await;
        let gate = start(upstream.address, "").await;
        let mut client = Peer::connect(gate.inbound).await;
        for _ in 0..20 {
            let answer = client.ask("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
            assert!(answer.ends_with("\r\n\r\nhello"), "{line:?}: {answer}");
        }
    }
}

#[tokio::test]
async fn heads_of_an_upstream_have_these_bounds() {
    for (lines, length, expected) in [(150, 8, 200), (999, 8, 200), (1000, 8, 502), (250, 1000, 200), (600, 1000, 502)]
    {
        let what = format!("{lines} lines of {length}");
        let lines = (0..lines).map(|line| format!("x-{line}: {}\r\n", "v".repeat(length))).collect::<String>();
        let answer = format!("HTTP/1.1 200 OK\r\n{lines}content-length: 5\r\n\r\nhello");
        let upstream = Echo::start(answer.leak()).await;
        let gate = start(upstream.address, "").await;
        let answer = Peer::connect(gate.inbound).await.ask("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert_eq!(status(&answer), expected, "{what}");
        assert!(expected != 200 || answer.contains(&lines), "{what}");
    }
}
