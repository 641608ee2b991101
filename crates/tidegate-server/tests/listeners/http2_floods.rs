//! HTTP/2 clients that misbehave: each ends in bounded time, and others are served meanwhile.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::common::{Gate, LAST_REQUEST, PATIENCE, exchange, rejections, start, start_before, until};
use crate::http2::start_server;

const ALWAYS: &str = "[inbound]\nhttp2 = \"always\"\n";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PRIORITY: u8 = 2;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const PRIORITY_UPDATE: u8 = 16;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;

/// The head of a GET request for `/` at `a.test`, by the static table of RFC 7541.
const GET: &[u8] = b"\x82\x86\x84\x01\x06a.test";
/// The same with POST.
const POST: &[u8] = b"\x83\x86\x84\x01\x06a.test";

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A client that writes frames as it likes.
struct RawClient(TcpStream);

#[derive(Debug)]
struct RawFrame {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: Vec<u8>,
}

impl RawClient {
    /// Connects, with these settings, each a number and a value.
    async fn connect(gate: Gate, settings: &[(u16, u32)]) -> Self {
        let mut stream = TcpStream::connect(gate.inbound).await.unwrap();
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        let payload: Vec<u8> =
            settings.iter().flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat()).collect();
        stream.write_all(&frame(SETTINGS, 0, 0, &payload)).await.unwrap();
        Self(stream)
    }

    async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> std::io::Result<()> {
        self.0.write_all(&frame(kind, flags, stream, payload)).await
    }

    async fn get(&mut self, stream: u32) {
        self.send(HEADERS, END_STREAM | END_HEADERS, stream, GET).await.unwrap();
    }

    /// Reads a frame. `None` at the end of the connection.
    async fn read(&mut self) -> Option<RawFrame> {
        let read = async {
            let mut head = [0; 9];
            self.0.read_exact(&mut head).await.ok()?;
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            self.0.read_exact(&mut payload).await.ok()?;
            let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            Some(RawFrame { kind: head[3], flags: head[4], stream, payload })
        };
        tokio::time::timeout(PATIENCE, read).await.expect("a frame, or an end, in time")
    }

    /// Reads until a frame of this kind. `None` if the connection ends before.
    async fn read_until(&mut self, kind: u8) -> Option<RawFrame> {
        loop {
            let frame = self.read().await?;
            if frame.kind == kind {
                return Some(frame);
            }
        }
    }

    /// Reads until the connection's end, for at most this number of frames.
    async fn ends_within(&mut self, frames: usize) -> bool {
        for _ in 0..frames {
            if self.read().await.is_none() {
                return true;
            }
        }
        false
    }
}

/// Starts a server that never answers.
async fn start_silent() -> String {
    start_unfinished("").await
}

/// Starts a server that begins each response with this, and never ends it.
async fn start_unfinished(begin: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut held = Vec::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(begin.as_bytes()).await.unwrap();
            held.push(stream);
        }
    });
    format!("http://{address}")
}

/// Sends pieces until the connection ends, while another client is served.
async fn flood(gate: Gate, mut client: RawClient, pieces: impl Iterator<Item = Vec<u8>> + Send + 'static) -> bool {
    let flooding = tokio::spawn(async move {
        for piece in pieces {
            if client.0.write_all(&piece).await.is_err() {
                return true;
            }
        }
        client.ends_within(300_000).await
    });
    for _ in 0..5 {
        let reply = tokio::time::timeout(Duration::from_secs(10), exchange(gate.inbound, LAST_REQUEST.as_bytes()));
        assert!(reply.await.expect("others are served").starts_with("HTTP/1.1 "));
    }
    tokio::time::timeout(PATIENCE, flooding).await.expect("an end in time").unwrap()
}

#[tokio::test]
async fn rapid_resets_end_the_connection() {
    let gate = start_before(&start_silent().await, &format!("{ALWAYS}timeouts = {{ response = \"1s\" }}\n")).await;
    let client = RawClient::connect(gate, &[]).await;
    let pairs = (0..5_000u32).map(|index| {
        let stream = 2 * index + 1;
        [frame(HEADERS, END_STREAM | END_HEADERS, stream, GET), frame(RST_STREAM, 0, stream, &8u32.to_be_bytes())]
            .concat()
    });
    assert!(flood(gate, client, pairs).await);
    assert_eq!(rejections(gate, "http2").await, 1);
}

#[tokio::test]
async fn broken_off_calls_end_the_connection() {
    let gate = start_before(&start_silent().await, ALWAYS).await;
    let mut client = RawClient::connect(gate, &[]).await;
    let mut ended = false;
    for index in 0..600u32 {
        let stream = 2 * index + 1;
        let head = frame(HEADERS, END_STREAM | END_HEADERS, stream, GET);
        let sent = client.0.write_all(&[head, frame(PING, 0, 0, &[0; 8])].concat()).await;
        // With the answer to the ping, the gate has taken the request.
        ended |= sent.is_err() || client.read_until(PING).await.is_none();
        ended |= client.send(RST_STREAM, 0, stream, &8u32.to_be_bytes()).await.is_err();
    }
    assert!(ended);
    assert_eq!(rejections(gate, "http2").await, 1);
}

#[tokio::test]
async fn endless_heads_end_the_connection() {
    let gate = start(ALWAYS).await;
    let client = RawClient::connect(gate, &[]).await;
    let head = std::iter::once(frame(HEADERS, END_STREAM, 1, GET));
    // Each piece is a header line of its own.
    let line = [b"\x00\x01x\x7f\x81\x7f".as_slice(), &[b'y'; 256]].concat();
    let pieces = head.chain((0..100_000).map(move |_| frame(CONTINUATION, 0, 1, &line)));
    assert!(flood(gate, client, pieces).await);
    assert_eq!(rejections(gate, "http2").await, 1);
}

/// Frames that carry neither a request nor data, by their names.
fn control_frames() -> [(&'static str, Vec<u8>); 10] {
    [
        ("PING", frame(PING, 0, 0, &[0; 8])),
        ("an answered PING", frame(PING, 1, 0, &[0; 8])),
        ("SETTINGS", frame(SETTINGS, 0, 0, &[])),
        ("PRIORITY", frame(PRIORITY, 0, 5, &[0, 0, 0, 0, 9])),
        ("PRIORITY_UPDATE", frame(PRIORITY_UPDATE, 0, 0, b"\0\0\0\x01u=1")),
        ("a WINDOW_UPDATE of the connection", frame(WINDOW_UPDATE, 0, 0, &1u32.to_be_bytes())),
        ("a WINDOW_UPDATE of a stream", frame(WINDOW_UPDATE, 0, 1, &1u32.to_be_bytes())),
        ("empty DATA", frame(DATA, 0, 1, &[])),
        ("padded DATA", frame(DATA, PADDED, 1, &[3, 0, 0, 0])),
        ("an unknown frame", frame(99, 0, 0, b"x")),
    ]
}

#[tokio::test]
async fn frames_beyond_requests_and_data_end_the_connection() {
    let gate = start_before(&start_silent().await, &format!("{ALWAYS}timeouts = {{ response = \"200ms\" }}\n")).await;
    for (index, (what, piece)) in control_frames().into_iter().enumerate() {
        let mut client = RawClient::connect(gate, &[]).await;
        client.send(HEADERS, END_HEADERS, 1, POST).await.unwrap();
        // What the gate reads at once may hold more frames than it takes.
        let pieces = std::iter::repeat_n(piece.clone(), 5_000);
        assert!(flood(gate, client, pieces).await, "{what}");
        let ended = async || rejections(gate, "http2").await == index as u64 + 1;
        until(what, ended).await;
    }
    // Empty pieces of a head count, too.
    let client = RawClient::connect(gate, &[]).await;
    let head = std::iter::once(frame(HEADERS, END_STREAM, 1, GET));
    assert!(flood(gate, client, head.chain((0..5_000).map(|_| frame(CONTINUATION, 0, 1, b"")))).await);
}

/// The library ignores what comes on a stream that the gate has reset.
#[tokio::test]
async fn empty_data_on_refused_streams_ends_the_connection() {
    let limit = "[inbound.action.all]\nmatch = { path = \"/*\" }\nlimit = \"0 per 1h\"\n";
    let gate = start(&format!("{ALWAYS}{limit}")).await;
    let mut client = RawClient::connect(gate, &[]).await;
    client.send(HEADERS, END_HEADERS, 1, POST).await.unwrap();
    client.read_until(RST_STREAM).await.expect("the end of a refused upload");
    assert!(flood(gate, client, std::iter::repeat_n(frame(DATA, END_STREAM, 1, &[]), 5_000)).await);
    assert_eq!(rejections(gate, "http2").await, 1);
}

#[tokio::test]
async fn a_usual_number_of_control_frames_is_served() {
    let gate = start(ALWAYS).await;
    let mut client = RawClient::connect(gate, &[]).await;
    // Some clients give back the windows after each piece of data, and measure the connection by pings.
    for index in 0..2_000u32 {
        let stream = 2 * index + 1;
        client.get(stream).await;
        let update = |stream| frame(WINDOW_UPDATE, 0, stream, &100u32.to_be_bytes());
        let frames = [frame(PRIORITY, 0, stream, &[0, 0, 0, 0, 9]), update(0), update(0), frame(PING, 0, 0, &[0; 8])];
        client.0.write_all(&frames.concat()).await.unwrap();
        assert!(client.read_until(PING).await.is_some(), "after {index} requests");
    }
    for (what, piece) in control_frames().into_iter().filter(|(what, _)| !what.contains("DATA")) {
        let mut client = RawClient::connect(gate, &[]).await;
        client.get(1).await;
        client.0.write_all(&piece.repeat(500)).await.unwrap();
        client.get(3).await;
        let answered = async { while client.read_until(HEADERS).await.expect("an answer").stream != 3 {} };
        tokio::time::timeout(PATIENCE, answered).await.expect(what);
    }
    assert_eq!(rejections(gate, "http2").await, 0);
}

#[tokio::test]
async fn each_piece_of_a_response_allows_updates_of_its_windows() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let chunks = "1\r\nx\r\n".repeat(3_000);
        let reply = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{chunks}");
        stream.write_all(reply.as_bytes()).await.unwrap();
        std::future::pending::<()>().await;
    });
    let gate = start_before(&upstream, ALWAYS).await;
    let mut client = RawClient::connect(gate, &[]).await;
    client.get(1).await;
    let update = |stream| frame(WINDOW_UPDATE, 0, stream, &1u32.to_be_bytes());
    for index in 0..3_000 {
        let data = client.read_until(DATA).await.unwrap_or_else(|| panic!("piece {index}"));
        assert_eq!(data.payload, b"x");
        client.0.write_all(&[update(0), update(1)].concat()).await.unwrap();
    }
    assert_eq!(rejections(gate, "http2").await, 0);
}

#[tokio::test]
async fn downloads_through_small_windows_go_on() {
    const BYTES: usize = 128 << 10;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let reply = format!("HTTP/1.1 200 OK\r\ncontent-length: {BYTES}\r\n\r\n{}", "x".repeat(BYTES));
            tokio::spawn(async move {
                while stream.read(&mut [0; 999]).await.is_ok_and(|count| count > 0)
                    && stream.write_all(reply.as_bytes()).await.is_ok()
                {}
            });
        }
    });
    let gate = start_before(&upstream, ALWAYS).await;
    for window in [64, 255] {
        let mut client = RawClient::connect(gate, &[(4, window)]).await;
        client.get(1).await;
        client.get(3).await;
        let mut left = 2 * BYTES;
        while left > 0 {
            let data = client.read_until(DATA).await.unwrap_or_else(|| panic!("{left} bytes left of {window}"));
            left -= data.payload.len();
            let step = u32::try_from(data.payload.len()).unwrap().to_be_bytes();
            let updates = [0, data.stream].map(|stream| frame(WINDOW_UPDATE, 0, stream, &step));
            client.0.write_all(&updates[..if step == [0; 4] { 0 } else { 2 }].concat()).await.unwrap();
        }
    }
    assert_eq!(rejections(gate, "http2").await, 0);
}

#[tokio::test]
async fn bursts_of_small_messages_wait_for_a_slow_upstream() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        let (mut seen, mut buffer) = (Vec::new(), [0; 4096]);
        while !seen.ends_with(b"\r\n0\r\n\r\n") {
            let count = stream.read(&mut buffer).await.unwrap();
            seen.extend_from_slice(&buffer[..count]);
        }
        let count = seen.iter().filter(|byte| **byte == 7).count();
        stream.write_all(format!("HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n{count}").as_bytes()).await.unwrap();
    });
    let gate = start_before(&upstream, ALWAYS).await;
    let mut client = RawClient::connect(gate, &[]).await;
    // The gate's windows hold from the acknowledgement on.
    client.read_until(SETTINGS).await.expect("the gate's settings");
    client.send(SETTINGS, 1, 0, &[]).await.unwrap();
    client.send(HEADERS, END_HEADERS, 1, POST).await.unwrap();
    client.0.write_all(&frame(DATA, 0, 1, &[7; 10]).repeat(20_000)).await.unwrap();
    client.send(DATA, END_STREAM, 1, &[]).await.unwrap();
    assert_eq!(client.read_until(DATA).await.expect("a response").payload, b"200000");
}

#[tokio::test]
async fn unread_responses_end_by_their_timeout() {
    let gate = start(&format!("{ALWAYS}timeouts = {{ body = \"1s\" }}\n")).await;
    // Without a window, the response waits, and its stream ends.
    let mut client = RawClient::connect(gate, &[(4, 0)]).await;
    client.get(1).await;
    let reset = client.read_until(RST_STREAM).await.unwrap();
    assert_eq!(reset.stream, 1);
    // With a small one, the whole response is queued, and only the end of the connection takes it back.
    let mut client = RawClient::connect(gate, &[(4, 1)]).await;
    client.get(1).await;
    assert!(client.read_until(DATA).await.is_some_and(|data| data.payload.len() == 1));
    assert!(client.ends_within(5).await);
}

#[tokio::test]
async fn streams_beyond_the_cap_end_unread() {
    let gate = start_before(&start_silent().await, &format!("{ALWAYS}caps = {{ connections = 1 }}\n")).await;
    let mut client = RawClient::connect(gate, &[(4, 0)]).await;
    client.get(1).await;
    for stream in [3, 5] {
        client.get(stream).await;
        let refused = client.read_until(HEADERS).await.unwrap();
        assert!(refused.stream == stream && refused.flags & END_STREAM != 0, "{refused:?}");
    }
}

#[tokio::test]
async fn idle_connections_end_and_pings_do_not_delay_it() {
    let gate = start(&format!("{ALWAYS}timeouts = {{ idle = \"1s\", header = \"1s\" }}\n")).await;
    let mut silent = RawClient::connect(gate, &[]).await;
    let mut idle = RawClient::connect(gate, &[]).await;
    idle.get(1).await;
    assert!(idle.read_until(GOAWAY).await.is_some() && idle.ends_within(9).await);
    assert!(silent.ends_within(9).await);
    let mut pinging = RawClient::connect(gate, &[]).await;
    let ended = async { while pinging.send(PING, 0, 0, &[0; 8]).await.is_ok() && !pinging.ends_within(1).await {} };
    tokio::time::timeout(PATIENCE, ended).await.expect("an end in time");
    let mut unfinished = RawClient::connect(gate, &[]).await;
    unfinished.send(HEADERS, END_STREAM, 1, GET).await.unwrap();
    assert!(unfinished.ends_within(9).await);
}

#[tokio::test]
async fn a_slow_upload_ends_alone() {
    let upstream = format!("http://{}", start_server(None).await.address);
    let gate =
        start_before(&upstream, &format!("{ALWAYS}upstream_http2 = true\ntimeouts = {{ body = \"1s\" }}\n")).await;
    let mut client = RawClient::connect(gate, &[]).await;
    client.send(HEADERS, END_HEADERS, 1, POST).await.unwrap();
    client.send(DATA, 0, 1, b"x").await.unwrap();
    client.get(3).await;
    let mut statuses = Vec::new();
    while statuses.len() < 2 {
        let head = client.read_until(HEADERS).await.expect("two responses");
        // 200 is in the static table, 408 isn't.
        let is_ok = head.payload[0] == 0x88;
        if head.flags & END_STREAM == 0 {
            statuses.push((head.stream, is_ok));
        }
    }
    assert_eq!(statuses, [(3, true), (1, false)]);
    client.get(5).await;
    assert!(client.read_until(HEADERS).await.is_some_and(|head| head.stream == 5));
}

#[tokio::test]
async fn unread_responses_give_up_their_places() {
    let gate = start(&format!("{ALWAYS}caps = {{ connections = 8 }}\n")).await;
    let is_served = async |stream| {
        let mut client = RawClient::connect(gate, &[]).await;
        client.get(stream).await;
        client.read_until(HEADERS).await.unwrap().payload[0] == 0x88
    };
    // Its windows have no room for a response, or for one byte, and then the whole response is queued.
    for window in [0, 1] {
        let mut hoarder = RawClient::connect(gate, &[(4, window)]).await;
        for stream in 0..8 {
            hoarder.get(2 * stream + 1).await;
        }
        for _ in 0..8 {
            hoarder.read_until(HEADERS).await.unwrap();
        }
        assert!(!is_served(1).await, "a client may be about to read what has just begun");
        until("the places of the unread", async || is_served(1).await).await;
        assert!(is_served(3).await && is_served(5).await);
        match window {
            0 => assert!(hoarder.read_until(RST_STREAM).await.is_some(), "the oldest streams are reset"),
            _ => assert!(hoarder.ends_within(20).await, "only its end takes back what is queued"),
        }
    }
}

#[tokio::test]
async fn responses_that_wait_for_events_keep_their_places() {
    let upstream = start_unfinished("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n").await;
    let gate = start_before(&upstream, &format!("{ALWAYS}caps = {{ connections = 8 }}\n")).await;
    let mut reader = RawClient::connect(gate, &[]).await;
    for stream in 0..8 {
        reader.get(2 * stream + 1).await;
    }
    for _ in 0..8 {
        reader.read_until(DATA).await.unwrap();
    }
    // More than two ticks.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut other = RawClient::connect(gate, &[]).await;
    other.get(1).await;
    assert_ne!(other.read_until(HEADERS).await.unwrap().payload[0], 0x88, "all places are taken");
    reader.send(PING, 0, 0, &[0; 8]).await.unwrap();
    assert_eq!(reader.read().await.map(|frame| frame.kind), Some(PING), "no stream was reset");
}

#[tokio::test]
async fn streams_count_as_connections_of_their_client() {
    let policy = format!("{ALWAYS}proxy_protocol = [\"127.0.0.0/8\"]\ncaps = {{ connections_per_client = 2 }}\n");
    let gate = start_before(&start_silent().await, &policy).await;
    let mut stream = TcpStream::connect(gate.inbound).await.unwrap();
    stream.write_all(b"PROXY TCP4 203.0.113.7 192.0.2.1 1 2\r\n").await.unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let mut client = RawClient(stream);
    client.send(SETTINGS, 0, 0, &[]).await.unwrap();
    client.get(1).await;
    client.get(3).await;
    client.get(5).await;
    let refused = client.read_until(HEADERS).await.unwrap();
    assert_eq!(refused.stream, 5, "the connection and its first stream count as one");
    assert_eq!(rejections(gate, "streams").await, 1);
    client.send(RST_STREAM, 0, 1, &8u32.to_be_bytes()).await.unwrap();
    until("the place of a stream that was broken off", async || {
        let stream = TcpStream::connect(gate.inbound).await.unwrap();
        let mut client = RawClient(stream);
        client.0.write_all(b"PROXY TCP4 203.0.113.7 192.0.2.1 1 2\r\n").await.unwrap();
        client.0.write_all(b"GET / HTTP/1.1\r\nhost: a.test\r\n\r\n").await.unwrap();
        let mut reply = [0; 12];
        let answered = tokio::time::timeout(Duration::from_millis(100), client.0.read_exact(&mut reply)).await;
        answered.is_err()
    })
    .await;
}
