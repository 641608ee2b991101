//! Calls by a reqwest client over real connections.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that can't go on should stop")]

use std::error::Error as _;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Request};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt as _, stream};
use http::{Extensions, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use reqwest::redirect::Policy as Redirects;
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error, Middleware, Next};
use tidegate::clock::SystemClock;
use tidegate::outbound::cache::CacheStatus;
use tidegate::outbound::{
    CallErrorKind, CallOptions, CallStats, CredentialError, Outbound, OutboundError, OutboundMiddleware, SendError,
};
use tidegate::policy::{Policy, PolicySources};
use tidegate::{Span, Time};
use tidegate_core::retry::UnreplayableReason;
use tidegate_core::{Clock as _, Lane};
use tokio::net::TcpListener;

const PLANTED: &str = "pl4nted-s3cr3t";

/// A request that the server received.
struct Arrived {
    at: Time,
    method: String,
    uri: String,
    authorization: Option<String>,
    api_key: Option<String>,
    reservation: Option<String>,
    length: Option<String>,
    body: Bytes,
}

/// A server on a free port: answers the n-th request, counted from 0, as its script says.
#[derive(Clone)]
struct Server {
    address: SocketAddr,
    arrived: Arc<Mutex<Vec<Arrived>>>,
}

impl Server {
    async fn new(script: impl Fn(usize, &Arrived) -> Response + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self { address: listener.local_addr().unwrap(), arrived: Arc::default() };
        let (arrived, clock, script) = (Arc::clone(&server.arrived), SystemClock::new(), Arc::new(script));
        let answer = async move |request: Request| {
            let at = clock.now();
            let (parts, body) = request.into_parts();
            let Ok(body) = body.collect().await else { return StatusCode::BAD_REQUEST.into_response() };
            let header =
                |name| parts.headers.get(name).map(|value: &http::HeaderValue| value.to_str().unwrap().to_owned());
            let mut arrived = arrived.lock().unwrap();
            arrived.push(Arrived {
                at,
                method: parts.method.to_string(),
                uri: parts.uri.to_string(),
                authorization: header("authorization"),
                api_key: header("x-api-key"),
                reservation: header("tidegate-reservation"),
                length: header("content-length"),
                body: body.to_bytes(),
            });
            script(arrived.len() - 1, arrived.last().unwrap())
        };
        let app = Router::new().fallback(answer).layer(DefaultBodyLimit::disable());
        tokio::spawn(axum::serve(listener, app).into_future());
        server
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    fn count(&self) -> usize {
        self.arrived.lock().unwrap().len()
    }

    fn told<T>(&self, tell: impl Fn(&Arrived) -> T) -> Vec<T> {
        self.arrived.lock().unwrap().iter().map(tell).collect()
    }

    /// The providers of these settings, including `api` below `/v1` of this server.
    fn outbound(&self, settings: &str) -> Outbound {
        let text = format!(
            "[outbound.provider.api]\nbase_url = \"{}\"\nretry = {{ base = \"1ms\", cap = \"2ms\" }}\n{settings}",
            self.url("/v1")
        );
        outbound(&text)
    }
}

fn outbound(text: &str) -> Outbound {
    let policy = Policy::load(PolicySources::new().file("test.toml", text)).unwrap_or_else(|errors| panic!("{errors}"));
    Outbound::new(&policy).unwrap()
}

fn middleware(outbound: &Outbound) -> OutboundMiddleware {
    let env = |name: &str| Some(format!("{PLANTED}-{}", name.to_lowercase()));
    OutboundMiddleware::with_env(outbound.providers().iter().cloned(), env).unwrap()
}

fn builder(outbound: &Outbound) -> ClientBuilder {
    let client = reqwest::Client::builder().redirect(Redirects::none()).no_proxy().build().unwrap();
    ClientBuilder::new(client).with(middleware(outbound))
}

fn client(outbound: &Outbound) -> ClientWithMiddleware {
    builder(outbound).build()
}

fn happened(reply: &reqwest::Response) -> CallStats {
    *reply.extensions().get::<CallStats>().unwrap()
}

fn why(reply: &reqwest::Response) -> CallErrorKind {
    reply.extensions().get::<CallErrorKind>().unwrap().clone()
}

fn outbound_error(error: &Error) -> &OutboundError {
    let Error::Middleware(error) = error else { panic!("{error:?}") };
    error.downcast_ref().unwrap()
}

const BEARER: &str = "auth = \"bearer\"\ncredentials = [\"env:A\"]\nlimit = \"1000/s burst 1000\"\n";
const HEADER: &str = "auth = \"header:x-api-key\"\ncredentials = [\"env:A\"]\nlimit = \"1000/s burst 1000\"\n";
const QUERY: &str = "auth = \"query:k\"\ncredentials = [\"env:A\"]\nlimit = \"1000/s burst 1000\"\n";

#[tokio::test]
async fn only_requests_below_a_base_url_are_governed() {
    let server = Server::new(|_, arrived| arrived.uri.clone().into_response()).await;
    let more = [("twin", "/v1"), ("deep", "/v1/deep")]
        .map(|(name, path)| format!("[outbound.provider.{name}]\nbase_url = \"{}\"\n{HEADER}", server.url(path)));
    let client = client(&server.outbound(&(BEARER.to_owned() + &more.concat())));
    let (bearer, key) = (Some("Bearer pl4nted-s3cr3t-a".to_owned()), Some("pl4nted-s3cr3t-a".to_owned()));
    for (path, authorization, api_key) in [
        ("/v1/movie/603?language=en", &bearer, &None),
        ("/v1", &bearer, &None),
        ("/v1/deep/x", &None, &key),
        ("/v1/deeper", &bearer, &None),
        ("/v2/movie", &None, &None),
        ("/v11", &None, &None),
    ] {
        let reply = client.get(server.url(path)).send().await.unwrap();
        let is_call = authorization.is_some() || api_key.is_some();
        assert_eq!(reply.extensions().get::<CallStats>().map(|happened| happened.attempts), is_call.then_some(1));
        assert_eq!(reply.url().as_str(), server.url(path));
        assert!(reply.remote_addr().is_some());
        assert_eq!(reply.text().await.unwrap(), path);
        let arrived = server.told(|arrived| (arrived.authorization.clone(), arrived.api_key.clone())).pop().unwrap();
        assert_eq!(arrived, (authorization.clone(), api_key.clone()), "{path}");
    }
    let error = client.get(server.url("/v1/..%2fv2")).send().await.unwrap_err();
    assert!(matches!(outbound_error(&error), OutboundError::Target(_)), "{error:?}");
    assert_eq!(server.count(), 6);
}

#[test]
fn a_missing_credential_is_reported_at_startup() {
    let outbound = outbound(&format!("[outbound.provider.api]\nbase_url = \"http://127.0.0.1:1\"\n{BEARER}"));
    let missing = OutboundMiddleware::with_env(outbound.providers().iter().cloned(), |_| None).unwrap_err();
    assert!(matches!(missing, CredentialError::Missing(_)), "{missing}");
}

#[tokio::test]
async fn calls_are_spaced_by_the_limit() {
    let server = Server::new(|_, _| "".into_response()).await;
    let outbound = server.outbound("limit = \"20/s\"");
    let client = client(&outbound);
    let waits = futures_util::future::join_all(
        (0..5).map(|_| async { happened(&client.get(server.url("/v1/x")).send().await.unwrap()).waited }),
    );
    let mut waits = waits.await;
    waits.sort_unstable();
    assert!(waits[4] >= Span::from_millis(150), "{waits:?}");
    let mut times = server.told(|arrived| arrived.at);
    times.sort_unstable();
    let taken = times[4].since(times[0]);
    assert!(taken >= Span::from_millis(150), "{taken}");
}

#[tokio::test]
async fn a_throttled_call_waits_for_retry_after() {
    let server = Server::new(|number, _| match number {
        0 => (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "1")]).into_response(),
        _ => "".into_response(),
    });
    let server = server.await;
    let client = client(&server.outbound(BEARER));
    let reply = client.post(server.url("/v1/x")).body("once").send().await.unwrap();
    assert_eq!((reply.status(), happened(&reply).attempts), (StatusCode::OK, 2));
    let times = server.told(|arrived| arrived.at);
    let waited = times[1].since(times[0]);
    assert!(waited >= Span::from_millis(990), "{waited}");
}

/// The instant is over, so that the call waits for 200 ms.
#[tokio::test]
async fn a_reservation_is_presented_once() {
    let server = Server::new(|number, _| match number {
        0 => {
            let headers = [("retry-after", "1"), ("tidegate-reservation", "rabc;at=1")];
            (StatusCode::TOO_MANY_REQUESTS, headers).into_response()
        }
        _ => "".into_response(),
    });
    let server = server.await;
    let client = client(&server.outbound(BEARER));
    for attempts in [2, 1] {
        let reply = client.get(server.url("/v1/x")).send().await.unwrap();
        assert_eq!((reply.status(), happened(&reply).attempts), (StatusCode::OK, attempts));
    }
    let presented = server.told(|arrived| arrived.reservation.clone());
    assert_eq!(presented, [None, Some("rabc".to_owned()), None]);
    let times = server.told(|arrived| arrived.at);
    let waited = times[1].since(times[0]);
    // The cool-down would be a second.
    assert!(waited >= Span::from_millis(190) && waited < Span::from_millis(900), "{waited}");
}

#[tokio::test]
async fn idempotent_failures_are_retried_with_the_same_body() {
    for (method, key, sends) in [("GET", None, 3), ("PUT", None, 3), ("POST", Some("k1"), 3), ("POST", None, 1)] {
        let server = Server::new(|number, _| match number {
            0 | 1 => (StatusCode::SERVICE_UNAVAILABLE, "down").into_response(),
            _ => "up".into_response(),
        });
        let server = server.await;
        let client = client(&server.outbound(BEARER));
        let mut request = client.request(method.parse().unwrap(), server.url("/v1/x"));
        if method != "GET" {
            request = request.body("{\"a\":1}");
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let reply = request.send().await.unwrap();
        assert_eq!(happened(&reply).attempts, sends, "{method} {key:?}");
        if sends == 1 {
            assert!(matches!(why(&reply), CallErrorKind::NotIdempotent));
            assert_eq!(reply.text().await.unwrap(), "down", "the last reply is passed on");
        } else {
            assert_eq!(reply.text().await.unwrap(), "up");
        }
        let body = if method == "GET" { "" } else { "{\"a\":1}" };
        let length = (method != "GET").then(|| "7".to_owned());
        for arrived in server.told(|arrived| (arrived.method.clone(), arrived.body.clone(), arrived.length.clone())) {
            assert_eq!(arrived, (method.to_owned(), Bytes::from_static(body.as_bytes()), length.clone()));
        }
        assert_eq!(server.count(), sends as usize);
    }
}

fn upload(chunks: usize) -> reqwest::Body {
    let chunk = || Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(&[7; 1024])));
    let chunks = stream::iter((0..chunks).map(move |_| chunk()));
    reqwest::Body::wrap(StreamBody::new(chunks))
}

#[tokio::test]
async fn oversized_uploads_are_sent_once_and_whole() {
    let server = Server::new(|_, _| StatusCode::SERVICE_UNAVAILABLE.into_response()).await;
    let outbound = server.outbound(&format!("replay = \"8KiB\"\nbreaker = \"off\"\n{BEARER}"));
    let client = client(&outbound);
    let reply = client.put(server.url("/v1/x")).body(upload(64)).send().await.unwrap();
    assert!(matches!(why(&reply), CallErrorKind::Unreplayable(UnreplayableReason::BodyTooLarge)), "{:?}", why(&reply));
    assert_eq!(server.told(|arrived| arrived.body.len()), [64 << 10], "once, and whole");
    let reply = client.put(server.url("/v1/x")).body(upload(4)).send().await.unwrap();
    assert!(matches!(why(&reply), CallErrorKind::RetriesExhausted { attempts: 3, .. }), "{:?}", why(&reply));
    assert_eq!(server.told(|arrived| arrived.body.len())[1..], [4 << 10; 3], "what was kept is sent again");
}

/// The whole text of an error, with its causes.
fn in_full(error: &Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    let inner = match error {
        Error::Middleware(error) => format!("{error:#} {error:?} {error:#?}"),
        Error::Reqwest(error) => format!("{error} {error:?}"),
    };
    causes.fold(format!("{error} {error:?} {inner}"), |text, cause| format!("{text} {cause} {cause:?}"))
}

#[tokio::test]
async fn errors_contain_no_credential() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let nobody = listener.local_addr().unwrap();
    drop(listener);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let rude = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            drop(stream);
        }
    });
    for (address, auth, path) in [
        (nobody, QUERY, "/v1/x?k=mine"),
        (rude, QUERY, "/v1/x"),
        (nobody, HEADER, "/v1/x"),
        (rude, "auth = \"path\"\ncredentials = [\"env:A\"]\nlimit = \"1000/s\"", "/v1/{key}/x"),
    ] {
        let slot = if auth.contains("path") { "/{key}" } else { "" };
        let settings = format!(
            "[outbound.provider.api]\nbase_url = \"http://{address}/v1{slot}\"\n\
             retry = {{ max_attempts = 2, base = \"1ms\", cap = \"1ms\" }}\n{auth}"
        );
        let outbound = outbound(&settings);
        let client = client(&outbound);
        let error = client.get(format!("http://{address}{path}")).send().await.unwrap_err();
        let OutboundError::Call(failed) = outbound_error(&error) else { panic!("{error:?}") };
        assert!(matches!(failed.kind, CallErrorKind::RetriesExhausted { attempts: 2, .. }), "{error:?}");
        assert!(matches!(failed.last_reply, Some(SendError::Inner(_))), "told, but for its URL: {error:?}");
        let told = format!("{} {client:?} {:?}", in_full(&error), middleware(&outbound));
        assert!(!told.contains(PLANTED), "{told}");
    }
}

#[tokio::test]
async fn replies_contain_no_credential() {
    let server = Server::new(|_, arrived| match arrived.uri.split('?').next().unwrap() {
        "/v1/broken" => {
            let half = stream::once(async { Ok(Bytes::from_static(b"half")) });
            let half = half.chain(stream::once(async {
                // The first half is sent before the body fails.
                tokio::time::sleep(Duration::from_millis(50)).await;
                Err(std::io::Error::other("gone"))
            }));
            Body::from_stream(half).into_response()
        }
        _ => (StatusCode::NOT_FOUND, [("x-echo", arrived.uri.clone())]).into_response(),
    });
    let server = server.await;
    let client = client(&server.outbound(QUERY));
    let reply = client.get(server.url("/v1/missing?a=b")).send().await.unwrap();
    let uri = server.told(|arrived| arrived.uri.clone()).remove(0);
    assert_eq!(uri, format!("/v1/missing?a=b&k={PLANTED}-a"), "it was there");
    assert!(!reply.headers().contains_key("x-echo"));
    let debug = format!("{reply:?}");
    let told = debug + &in_full(&reply.error_for_status().unwrap_err().into());
    assert!(told.contains("/v1/missing?a=b") && !told.contains(PLANTED), "{told}");
    let reply = client.get(server.url("/v1/broken")).send().await.unwrap();
    let told = in_full(&reply.bytes().await.unwrap_err().into());
    assert!(!told.contains(PLANTED), "{told}");
}

#[tokio::test]
async fn clients_that_follow_redirects_are_rejected() {
    let elsewhere = Server::new(|_, _| "".into_response()).await;
    let to = elsewhere.url("/");
    let server = Server::new(move |_, _| (StatusCode::FOUND, [("location", to.clone())]).into_response()).await;
    let outbound = server.outbound(HEADER);
    let reply = client(&outbound).get(server.url("/v1/x")).send().await.unwrap();
    assert_eq!(
        (reply.status(), reply.headers()["location"].to_str().unwrap()),
        (StatusCode::FOUND, &*elsewhere.url("/"))
    );

    let following = reqwest::Client::builder().no_proxy().build().unwrap();
    let following = ClientBuilder::new(following).with(middleware(&outbound)).build();
    for _ in 0..2 {
        let error = following.get(server.url("/v1/x")).send().await.unwrap_err();
        assert!(matches!(outbound_error(&error), OutboundError::Send(SendError::FollowedRedirect)), "{error:?}");
    }
    assert_eq!((server.count(), elsewhere.count()), (2, 1), "it was found out once, and not tried again");
    assert_eq!(following.get(elsewhere.url("/x")).send().await.unwrap().status(), StatusCode::OK, "no call");

    let to_itself = Server::new(|_, _| (StatusCode::FOUND, [("location", "/v1/x?again")]).into_response()).await;
    let following = ClientBuilder::new(reqwest::Client::builder().no_proxy().build().unwrap())
        .with(middleware(&to_itself.outbound(HEADER)))
        .build();
    let error = following.get(to_itself.url("/v1/x")).send().await.unwrap_err();
    assert!(matches!(outbound_error(&error), OutboundError::Send(SendError::FollowedRedirect)), "{error:?}");
}

#[tokio::test]
async fn a_call_is_in_flight_until_body_read() {
    let server = Server::new(|_, _| "body".into_response()).await;
    let outbound = server.outbound(BEARER);
    let client = client(&outbound);
    let options = CallOptions { lane: Lane::Webhook, ..CallOptions::default() };
    let ask = || client.get(server.url("/v1/x")).with_extension(options.clone()).send();
    let in_flight = || outbound.providers()[0].inspect(|state, _| state.lanes.in_flight(Lane::Webhook));
    let (read, dropped) = (ask().await.unwrap(), ask().await.unwrap());
    assert_eq!(in_flight(), 2);
    assert_eq!(read.content_length(), Some(4));
    assert_eq!(read.text().await.unwrap(), "body");
    assert_eq!(in_flight(), 1);
    drop(dropped);
    assert_eq!(in_flight(), 0);
}

#[tokio::test]
async fn the_requests_timeout_becomes_the_calls_timeout() {
    let server = Server::new(|_, _| StatusCode::SERVICE_UNAVAILABLE.into_response()).await;
    let text = format!(
        "[outbound.provider.api]\nbase_url = \"{}\"\nretry = {{ base = \"5s\", jitter = \"none\" }}\n{BEARER}",
        server.url("/v1")
    );
    let client = client(&outbound(&text));
    let reply = client.get(server.url("/v1/x")).timeout(Duration::from_secs(2)).send().await.unwrap();
    assert!(matches!(why(&reply), CallErrorKind::NoTimeLeft { .. }), "{:?}", why(&reply));
    assert_eq!(server.count(), 1);
}

#[tokio::test]
async fn logins_are_sent_by_the_same_client() {
    let server = Server::new(|_, arrived| match arrived.uri.as_str() {
        "/v1/login" => "{\"token\":\"t1\"}".into_response(),
        _ => "".into_response(),
    });
    let server = server.await;
    let login = "login = { path = \"/login\", body = '{\"apikey\":\"{credential}\"}' }\n";
    let client = client(&server.outbound(&(BEARER.to_owned() + login)));
    for _ in 0..2 {
        assert_eq!(client.get(server.url("/v1/x")).send().await.unwrap().status(), StatusCode::OK);
    }
    let arrived = server.told(|arrived| (arrived.uri.clone(), arrived.authorization.clone(), arrived.body.clone()));
    let call = ("/v1/x".to_owned(), Some("Bearer t1".to_owned()), Bytes::new());
    let login = ("/v1/login".to_owned(), None, Bytes::from_static(br#"{"apikey":"pl4nted-s3cr3t-a"}"#));
    assert_eq!(arrived, [login, call.clone(), call]);
}

/// Counts the requests that pass, in a counter and in the extensions.
#[derive(Clone, Default)]
struct Counting(Arc<AtomicUsize>);

#[derive(Clone)]
struct Passed(usize);

#[async_trait::async_trait]
impl Middleware for Counting {
    async fn handle(
        &self,
        request: reqwest::Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        self.0.fetch_add(1, Ordering::Relaxed);
        let before = extensions.get::<Passed>().map_or(0, |passed| passed.0);
        extensions.insert(Passed(before + 1));
        next.run(request, extensions).await
    }
}

#[tokio::test]
async fn inner_middleware_sees_every_attempt() {
    let server = Server::new(|_, _| StatusCode::SERVICE_UNAVAILABLE.into_response()).await;
    let counting = Counting::default();
    let client = builder(&server.outbound(BEARER)).with(counting.clone()).build();
    let mut extensions = Extensions::new();
    let request = client.get(server.url("/v1/x")).build().unwrap();
    client.execute_with_extensions(request, &mut extensions).await.unwrap();
    assert_eq!(counting.0.load(Ordering::Relaxed), 3);
    assert_eq!(extensions.get::<Passed>().unwrap().0, 3, "they share its extensions");
}

#[tokio::test]
async fn a_providers_cache_is_honoured() {
    let server =
        Server::new(|index, _| ([("cache-control", "max-age=60")], format!("reply {index}")).into_response()).await;
    let cached = format!(
        "{BEARER}cache = {{ ttl = \"60s\" }}\n[outbound.provider.plain]\nbase_url = \"{}\"\n{HEADER}",
        server.url("/v2")
    );
    let client = client(&server.outbound(&cached));
    let status = |reply: &reqwest::Response| reply.extensions().get::<CacheStatus>().copied();
    for (path, text, cache) in [
        ("/v1/movie", "reply 0", Some(CacheStatus::Miss)),
        ("/v1/movie", "reply 0", Some(CacheStatus::Hit)),
        ("/v1/other", "reply 1", Some(CacheStatus::Miss)),
        ("/v2/movie", "reply 2", None),
        ("/v2/movie", "reply 3", None),
        ("/v1/movie", "reply 0", Some(CacheStatus::Hit)),
    ] {
        let reply = client.get(server.url(path)).send().await.unwrap();
        assert_eq!((status(&reply), reply.url().as_str()), (cache, server.url(path).as_str()));
        assert_eq!(reply.text().await.unwrap(), text);
    }
    assert_eq!(server.count(), 4);
}
