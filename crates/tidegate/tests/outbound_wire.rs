//! Calls through the tower layer over real connections, by hyper's client.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that can't go on should stop")]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body as Incoming;
use axum::extract::State;
use axum::routing::put;
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tidegate::clock::SystemClock;
use tidegate::outbound::{CallErrorKind, CallStats, Outbound, OutboundError, OutboundLayer, ReplayBody, SendError};
use tidegate::policy::{Policy, PolicySources};
use tidegate_core::retry::UnreplayableReason;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tower::{Layer as _, ServiceExt as _};

/// The headers and the body length of each request that a provider received.
type Seen = Arc<Mutex<Vec<(HeaderMap, u64)>>>;

/// A provider that reads slowly. It fails the first two requests and accepts later ones.
async fn provider(seen: Seen) -> SocketAddr {
    let answer = async |State(seen): State<Seen>, headers: HeaderMap, mut body: Incoming| {
        let (mut length, mut frames) = (0, 0_u64);
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else { return StatusCode::BAD_REQUEST };
            length += frame.data_ref().map_or(0, |data| data.len() as u64);
            frames += 1;
            if frames.is_multiple_of(1_000) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        let mut seen = seen.lock().unwrap();
        seen.push((headers, length));
        if seen.len() < 3 { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = Router::new().route("/v1/item", put(answer)).layer(axum::extract::DefaultBodyLimit::disable());
    tokio::spawn(axum::serve(listener, app.with_state(seen)).into_future());
    address
}

fn layer(address: SocketAddr) -> OutboundLayer {
    let text = format!(
        "[outbound.provider.api]\nbase_url = \"http://{address}/v1\"\nauth = \"bearer\"\ncredentials = [\"env:A\"]\n\
         limit = \"100/s burst 100\"\ntimeout = \"120s\"\n\
         retry = {{ max_attempts = 3, base = \"1ms\", cap = \"2ms\" }}"
    );
    let policy = Policy::load(PolicySources::new().file("test.toml", text)).unwrap_or_else(|errors| panic!("{errors}"));
    let outbound = Outbound::in_memory(&policy, SystemClock::new()).unwrap();
    OutboundLayer::with_env(outbound.provider("api").unwrap().clone(), |_| Some("token".to_owned())).unwrap()
}

fn client<B>() -> Client<hyper_util::client::legacy::connect::HttpConnector, ReplayBody<B>>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: std::error::Error + Send + Sync + 'static,
{
    Client::builder(TokioExecutor::new()).build_http()
}

#[tokio::test]
async fn retries_send_the_same_request() {
    let seen = Seen::default();
    let address = provider(Arc::clone(&seen)).await;
    let service = layer(address).layer(client());
    let request =
        Request::put("/item").header("host", "127.0.0.1:8081").body(Full::new(Bytes::from_static(b"content")));
    let response = service.oneshot(request.unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.extensions().get::<CallStats>().unwrap().attempts, 3);
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 3);
    for (headers, length) in &*seen {
        assert_eq!((headers["content-length"].as_bytes(), *length), (&b"7"[..], 7));
        assert_eq!(headers["host"], address.to_string());
        assert_eq!(headers["authorization"], "Bearer token");
    }
}

#[tokio::test]
async fn refused_connections_are_retried_even_for_post() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let service = layer(address).layer(client());
    let request = Request::post("/item").body(Full::new(Bytes::from_static(b"content"))).unwrap();
    let error = service.oneshot(request).await.unwrap_err();
    let OutboundError::Call(error) = error else { panic!("{error}") };
    assert!(matches!(
        (&error.kind, &error.last_reply),
        (CallErrorKind::RetriesExhausted { attempts: 3, .. }, Some(SendError::Inner(_)))
    ));
    assert_eq!(error.stats.attempts, 3, "nothing was sent, so that even a POST may be repeated");
}

#[tokio::test]
async fn a_broken_request_body_is_no_provider_failure() {
    let seen = Seen::default();
    let service = layer(provider(Arc::clone(&seen)).await).layer(client());
    let upload = |breaks: bool| {
        let half = || Ok(Frame::data(Bytes::from_static(b"half")));
        let rest = if breaks { Err(std::io::Error::other("the caller is gone")) } else { half() };
        StreamBody::new(futures_util::stream::iter([half(), rest]))
    };
    for _ in 0..6 {
        let request = Request::put("/item").body(upload(true)).unwrap();
        let error = service.clone().oneshot(request).await.unwrap_err();
        assert!(matches!(error, OutboundError::Send(SendError::BrokenBody)), "{error:?}");
        assert_eq!(error.status(), 400);
    }
    assert!(seen.lock().unwrap().is_empty(), "none arrived as a whole");
    let response = service.oneshot(Request::put("/item").body(upload(false)).unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK, "five failures would have opened the breaker");
}

/// Bytes that count the live instances of their type.
struct Counted(&'static [u8]);

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

impl Counted {
    fn new(bytes: &'static [u8]) -> Self {
        let live = LIVE.fetch_add(bytes.len(), Ordering::Relaxed) + bytes.len();
        PEAK.fetch_max(live, Ordering::Relaxed);
        Self(bytes)
    }
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        LIVE.fetch_sub(self.0.len(), Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gibibyte_upload_uses_bounded_memory() {
    static ZEROES: [u8; 65_536] = [0; 65_536];
    static MADE: AtomicU64 = AtomicU64::new(0);
    let seen = Seen::default();
    let service = layer(provider(Arc::clone(&seen)).await).layer(client());
    let upload = futures_util::stream::iter((0..16_384).map(|_| {
        MADE.fetch_add(ZEROES.len() as u64, Ordering::Relaxed);
        Ok::<_, Infallible>(Frame::data(Bytes::from_owner(Counted::new(&ZEROES))))
    }));
    let response = service.oneshot(Request::put("/item").body(StreamBody::new(upload)).unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let why = response.extensions().get::<CallErrorKind>().unwrap();
    assert!(matches!(why, CallErrorKind::Unreplayable(UnreplayableReason::BodyTooLarge)), "{why:?}");
    let lengths: Vec<u64> = seen.lock().unwrap().iter().map(|(_, length)| *length).collect();
    assert_eq!(lengths, [1 << 30], "once, and whole");
    assert_eq!(MADE.load(Ordering::Relaxed), 1 << 30);
    let peak = PEAK.load(Ordering::Relaxed);
    assert!(peak <= 1 << 20, "{peak} bytes of it at once");
}

/// A frame of HTTP/2 (RFC 9113 §4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A provider over HTTP/2. It answers its first request with this frame and all others with 200. Also returns the
/// number of its requests.
async fn answering_first(refusal: impl Fn(u32) -> Vec<u8> + Send + Sync + 'static) -> (SocketAddr, Arc<AtomicUsize>) {
    const HEADERS: u8 = 1;
    const SETTINGS: u8 = 4;
    const PREFACE: usize = 24;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (requests, refusal) = (Arc::new(AtomicUsize::new(0)), Arc::new(refusal));
    let seen = Arc::clone(&requests);
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let (seen, refusal) = (Arc::clone(&seen), Arc::clone(&refusal));
            tokio::spawn(async move {
                stream.read_exact(&mut [0; PREFACE]).await.unwrap();
                stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
                let mut head = [0; 9];
                while stream.read_exact(&mut head).await.is_ok() {
                    let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
                    stream.read_exact(&mut payload).await.unwrap();
                    if head[3] != HEADERS {
                        continue;
                    }
                    let number = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
                    let answer = match seen.fetch_add(1, Ordering::Relaxed) {
                        0 => refusal(number),
                        // Ends the stream; 0x88 is ":status: 200" (RFC 7541, appendix A).
                        _ => frame(HEADERS, 5, number, &[0x88]),
                    };
                    stream.write_all(&answer).await.unwrap();
                }
            });
        }
    });
    (address, requests)
}

#[tokio::test]
async fn unprocessed_http2_requests_are_retried_for_any_method() {
    const RESET: u8 = 3;
    const GOAWAY: u8 = 7;
    let reset = |reason: u32| move |number| frame(RESET, 0, number, &reason.to_be_bytes());
    let go_away = |last: u32| move |_| frame(GOAWAY, 0, 0, &[last.to_be_bytes(), [0; 4]].concat());
    type Refusal = Box<dyn Fn(u32) -> Vec<u8> + Send + Sync>;
    let cases: [(&str, Refusal, usize); 4] = [
        ("refused", Box::new(reset(7)), 2),
        ("left out by a GOAWAY", Box::new(go_away(0)), 2),
        ("broken off, perhaps midway", Box::new(reset(2)), 1),
        ("cancelled", Box::new(reset(8)), 1),
    ];
    for (case, refusal, sends) in cases {
        let (address, seen) = answering_first(refusal).await;
        let client = Client::builder(TokioExecutor::new()).http2_only(true).build_http();
        let service = layer(address).layer(client);
        let request = Request::post("/item").body(Full::new(Bytes::from_static(b"order"))).unwrap();
        let answered = service.oneshot(request).await;
        assert_eq!((answered.is_ok(), seen.load(Ordering::Relaxed)), (sends == 2, sends), "{case}: {answered:?}");
        match answered {
            Ok(response) => assert_eq!(response.extensions().get::<CallStats>().unwrap().attempts, 2, "{case}"),
            Err(OutboundError::Call(error)) => {
                assert!(matches!(error.kind, CallErrorKind::NotIdempotent), "{case}: {error:?}")
            }
            Err(error) => panic!("{case}: {error:?}"),
        }
    }
}
