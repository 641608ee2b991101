//! The tower layer in front of unchanged axum and tonic services, over real sockets.
#![cfg(all(feature = "axum", feature = "tonic"))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::routing::get;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tidegate::clock::ManualClock;
use tidegate::policy::{ActionSpec, Policy};
use tidegate::store::Memory;
use tidegate::{Decision, Gate, GateLayer, Span};
use tokio::net::TcpListener;
use tower::Service;

fn policy() -> Policy {
    Policy::builder()
        .action("page", ActionSpec::new("2 per 60s").penalty("2s", "1h").path("/page"))
        .action("slow", ActionSpec::new("1 in flight").path("/slow"))
        .action("rpc", ActionSpec::new("1 per 60s").penalty("2s", "1h").path("/test.Echo/*"))
        .build()
        .unwrap()
}

fn layer() -> (GateLayer<Memory, ManualClock>, ManualClock) {
    let policy = policy();
    let clock = ManualClock::default();
    (GateLayer::from_gate(Gate::in_memory(&policy, clock.clone()), &policy), clock)
}

async fn ask(address: SocketAddr, path: &str, headers: &[(&str, &str)]) -> (StatusCode, HeaderMap, String) {
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<bytes::Bytes>>();
    let mut request = Request::get(format!("http://{address}{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = client.request(request.body(Empty::new()).unwrap()).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    (parts.status, parts.headers, String::from_utf8(body.to_vec()).unwrap())
}

async fn serve_axum(layer: GateLayer<Memory, ManualClock>, reached: Arc<AtomicUsize>) -> SocketAddr {
    let page = move |decision: axum::Extension<Decision>| async move {
        reached.fetch_add(1, Ordering::SeqCst);
        format!("{} left", decision.remaining.unwrap())
    };
    let app = Router::new().route("/page", get(page)).route("/free", get(async || "free")).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await.unwrap();
    });
    address
}

#[tokio::test]
async fn axum_requests_are_limited() {
    let (layer, clock) = layer();
    let reached = Arc::new(AtomicUsize::new(0));
    let address = serve_axum(layer, Arc::clone(&reached)).await;
    for left in [1, 0] {
        let (status, headers, body) = ask(address, "/page", &[]).await;
        assert_eq!((status, body), (StatusCode::OK, format!("{left} left")));
        assert_eq!(headers["ratelimit-policy"], r#""page";q=2;w=60"#);
        assert_eq!(headers["ratelimit"], format!(r#""page";r={left};t=60"#));
    }
    let (status, headers, body) = ask(address, "/page", &[]).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(headers["retry-after"], "2");
    assert_eq!(body, r#"{"error":"Too many requests","retry_after":2,"next_allowed_at":"2026-01-01 00:00:02Z"}"#);
    assert_eq!(reached.load(Ordering::SeqCst), 2, "a refused request never reaches the handler");
    let (_, headers, body) = ask(address, "/page", &[("accept", "application/problem+json")]).await;
    assert_eq!(headers["content-type"], "application/problem+json");
    assert!(serde_json::from_str::<serde_json::Value>(&body).unwrap()["violated-policies"][0] == "page", "{body}");
    assert_eq!(ask(address, "/free", &[]).await.0, StatusCode::OK);
    clock.advance(Span::from_secs(2));
    assert_eq!(ask(address, "/page", &[]).await.0, StatusCode::OK);
}

#[tokio::test]
async fn ambiguous_paths_are_counted_refused_or_normalised() {
    for (word, refused) in [("union", None), ("refuse", Some(StatusCode::BAD_REQUEST)), ("normalise", None)] {
        let policy = Policy::builder()
            .setting("inbound.ambiguous_paths", word)
            .action("page", ActionSpec::new("1 per 60s").path("/page"))
            .build()
            .unwrap();
        let layer = GateLayer::from_gate(Gate::in_memory(&policy, ManualClock::default()), &policy);
        let seen = move |request: Request<axum::body::Body>| async move { request.uri().to_string() };
        let app = Router::new().fallback(seen).layer(layer);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await.unwrap();
        });
        let (status, _, body) = ask(address, "/x%2e/%2e%2e/page;v?a=/../b", &[]).await;
        assert_eq!(status, refused.unwrap_or(StatusCode::OK), "{word}: {body}");
        match word {
            "union" => assert_eq!(body, "/x%2e/%2e%2e/page;v?a=/../b"),
            "refuse" => assert!(body.contains("Bad Request"), "{body}"),
            _ => assert_eq!(body, "/page;v?a=/../b"),
        }
        let (status, ..) = ask(address, "/page", &[]).await;
        let charged = if refused.is_some() { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
        assert_eq!(status, charged, "{word}");
        let (status, _, body) = ask(address, "/page;v", &[("content-type", "application/grpc")]).await;
        assert_eq!((status, body.as_str()), (StatusCode::OK, ""), "gRPC has no other status: {word}");
    }
}

#[tokio::test]
async fn an_untrusted_client_cannot_choose_its_address() {
    let (layer, _) = layer();
    let address = serve_axum(layer, Arc::default()).await;
    for (n, forged) in ["198.51.100.1", "198.51.100.2", "198.51.100.3"].iter().enumerate() {
        let status = ask(address, "/page", &[("x-forwarded-for", forged)]).await.0;
        assert_eq!(status.is_success(), n < 2);
    }
}

#[tokio::test]
async fn a_permit_is_held_until_the_body_ends() {
    let (layer, _) = layer();
    let layer = layer.peer(|_| Some([203, 0, 113, 7].into()));
    let service = tower::service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(Response::new(http_body_util::Full::new(bytes::Bytes::from_static(b"slow"))))
    });
    let mut limited = tower::Layer::layer(&layer, service);
    let request = || Request::get("/slow").body(()).unwrap();
    let first = limited.call(request()).await.unwrap();
    assert_eq!(limited.call(request()).await.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(first.into_body().collect().await.unwrap().to_bytes(), "slow");
    let second = limited.call(request()).await.unwrap();
    assert_eq!(second.status(), StatusCode::OK);
    drop(second);
    assert_eq!(limited.call(request()).await.unwrap().status(), StatusCode::OK, "an abandoned body gives back too");
}

#[tokio::test]
async fn the_ready_service_is_the_one_called() {
    let (layer, _) = layer();
    let service = tower::service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(String::new())) });
    // A clone of this service panics if it is called without having been made ready itself.
    let mut limited = tower::Layer::layer(&layer, tower::limit::ConcurrencyLimit::new(service, 1));
    for _ in 0..3 {
        let ready = tower::ServiceExt::ready(&mut limited).await.unwrap();
        assert_eq!(ready.call(Request::get("/free").body(()).unwrap()).await.unwrap().status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_failing_service_returns_the_permit() {
    let (layer, _) = layer();
    let layer = layer.peer(|_| Some([203, 0, 113, 7].into()));
    let service = tower::service_fn(|_: Request<()>| async { Err::<Response<String>, _>("broken") });
    let mut limited = tower::Layer::layer(&layer, service);
    for _ in 0..3 {
        let failed = limited.call(Request::get("/slow").body(()).unwrap()).await;
        assert_eq!(failed.err(), Some("broken"), "not refused for want of a permit");
    }
}

/// A service that any request reaches, behind this layer.
fn behind(
    layer: &GateLayer<Memory, ManualClock>,
) -> impl Service<Request<()>, Response = Response<tidegate::GateBody<String>>, Error = Infallible> {
    let service = tower::service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new("here".to_owned())) });
    tower::Layer::layer(layer, service)
}

async fn text(response: Response<tidegate::GateBody<String>>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

#[tokio::test]
async fn a_layer_without_peer_address_says_so() {
    let (layer, _) = layer();
    let response = behind(&layer).call(Request::get("/page").body(()).unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let body = text(response).await;
    assert_eq!(body.contains("into_make_service_with_connect_info"), cfg!(debug_assertions), "{body}");
}

fn layer_by_user() -> (GateLayer<Memory, ManualClock>, ManualClock) {
    let action = ActionSpec::new("2 per 60s").key(["key"]).path("/page");
    let policy = Policy::builder().action("page", action).build().unwrap();
    let clock = ManualClock::default();
    let layer = GateLayer::from_gate(Gate::in_memory(&policy, clock.clone()), &policy);
    (layer.key(|request| request.headers.get("x-user").map(|user| user.to_str().unwrap().to_owned())), clock)
}

fn request_of(user: &str) -> Request<()> {
    Request::get("/page").header("x-user", user).body(()).unwrap()
}

#[tokio::test]
async fn each_user_has_a_count() {
    let (layer, clock) = layer_by_user();
    let mut service = behind(&layer);
    for (user, status) in [("ann", 200), ("bob", 200), ("ann", 200), ("ann", 429), ("bob", 200), ("bob", 429)] {
        assert_eq!(service.call(request_of(user)).await.unwrap().status(), status, "{user}");
    }
    clock.advance(Span::from_secs(60));
    assert_eq!(service.call(request_of("ann")).await.unwrap().status(), 200);
    let anonymous = service.call(Request::get("/page").body(()).unwrap()).await.unwrap();
    assert_eq!(anonymous.status(), StatusCode::UNAUTHORIZED);
    let body = text(anonymous).await;
    assert!(body.starts_with(r#"{"error":"Unauthorized""#), "{body}");
    assert_eq!(body.contains("the layer that is added last runs first"), cfg!(debug_assertions), "{body}");
    let elsewhere = service.call(Request::get("/other").body(()).unwrap()).await.unwrap();
    assert_eq!(elsewhere.status(), 200, "no limit there counts by user");
}

#[tokio::test]
async fn exempt_requests_are_not_counted() {
    let (layer, _) = layer_by_user();
    let decisions = Arc::new(AtomicUsize::new(0));
    let layer = layer.allow(|request| request.headers["x-user"] == "root").on_decision({
        let decisions = Arc::clone(&decisions);
        move |request, decision| {
            assert_eq!(request.uri.path(), "/page");
            decisions.fetch_add(1 + 100 * usize::from(!decision.allowed), Ordering::Relaxed);
        }
    });
    let mut service = behind(&layer);
    for _ in 0..5 {
        let response = service.call(request_of("root")).await.unwrap();
        assert_eq!((response.status(), response.headers().len()), (StatusCode::OK, 0));
        assert_eq!(text(response).await, "here");
    }
    assert_eq!(decisions.load(Ordering::Relaxed), 0);
    for status in [200, 200, 429] {
        assert_eq!(service.call(request_of("ann")).await.unwrap().status(), status);
    }
    assert_eq!(decisions.load(Ordering::Relaxed), 103, "two admitted and one refused");
}

#[tokio::test]
async fn refusals_can_be_replaced_and_keep_headers() {
    let (layer, _) = layer_by_user();
    let layer = layer.refusal(|request, decision, standard| {
        let (wait, limit) = (decision.retry_after.unwrap(), decision.bound_by.as_ref().unwrap());
        let (mut parts, _) = standard.into_parts();
        parts.status = StatusCode::SERVICE_UNAVAILABLE;
        Response::from_parts(parts, format!("{}: wait {wait} s for {limit}", request.uri.path()))
    });
    let mut service = behind(&layer);
    for _ in 0..2 {
        assert_eq!(service.call(request_of("ann")).await.unwrap().status(), 200);
    }
    let refused = service.call(request_of("ann")).await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        (&refused.headers()["retry-after"], &refused.headers()["ratelimit"]),
        (&"60".parse().unwrap(), &r#""page";r=0;t=60"#.parse().unwrap())
    );
    assert_eq!(text(refused).await, "/page: wait 60 s for page");
}

#[derive(Clone)]
struct Echo;

impl tonic::server::NamedService for Echo {
    const NAME: &'static str = "test.Echo";
}

impl Service<Request<tonic::body::Body>> for Echo {
    type Response = Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<tonic::body::Body>) -> Self::Future {
        let response = Response::builder().header("content-type", "application/grpc").header("grpc-status", "0");
        std::future::ready(Ok(response.body(tonic::body::Body::empty()).unwrap()))
    }
}

#[tokio::test]
async fn tonic_requests_are_limited() {
    let (layer, _) = layer();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = tonic::transport::server::TcpIncoming::from(listener);
    tokio::spawn(async move {
        tonic::transport::Server::builder().layer(layer).add_service(Echo).serve_with_incoming(incoming).await.unwrap();
    });
    let client = Client::builder(TokioExecutor::new()).http2_only(true).build_http::<Empty<bytes::Bytes>>();
    let call = || {
        let request = Request::post(format!("http://{address}/test.Echo/Say"));
        client.request(request.header("content-type", "application/grpc").body(Empty::new()).unwrap())
    };
    let admitted = call().await.unwrap();
    assert_eq!((admitted.status(), admitted.headers()["grpc-status"].as_bytes()), (StatusCode::OK, &b"0"[..]));
    let refused = call().await.unwrap();
    assert_eq!(refused.status(), StatusCode::OK, "gRPC tells its own status");
    assert_eq!(refused.headers()["grpc-status"], "8", "RESOURCE_EXHAUSTED");
    assert_eq!(refused.headers()["grpc-retry-pushback-ms"], "2000");
}

#[tokio::test]
async fn uri_and_host_header_name_the_same_host() {
    let policy = Policy::builder()
        .action("shop", ActionSpec::new("1 per 60s").path("/page").host("shop.example"))
        .build()
        .unwrap();
    let layer = GateLayer::from_gate(Gate::in_memory(&policy, ManualClock::default()), &policy)
        .peer(|_| Some([203, 0, 113, 7].into()));
    let service = tower::service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(Response::new(http_body_util::Full::new(bytes::Bytes::new())))
    });
    let mut limited = tower::Layer::layer(&layer, service);
    let mut status = async |target: &str, hosts: &[&[u8]]| {
        let mut request = Request::get(target);
        for host in hosts {
            request = request.header("host", http::HeaderValue::from_bytes(host).unwrap());
        }
        limited.call(request.body(()).unwrap()).await.unwrap().status().as_u16()
    };
    assert_eq!(status("/page", &[b"shop.example"]).await, 200);
    for (target, hosts) in [
        ("/page", &[&b"SHOP.example:80"[..]][..]),
        ("/page", &[b"shop.example:"]),
        ("http://shop.example/page", &[b"shop.example:80"]),
        ("http://shop.example/page", &[]),
    ] {
        assert_eq!(status(target, hosts).await, 429, "{target} {hosts:?}");
    }
    for (target, hosts) in [
        ("http://other/page", &[&b"shop.example"[..]][..]),
        ("/page", &[b"shop.example", b"other"]),
        ("/page", &[b"shop.example:80:80"]),
        ("/page", &[b"shop\xe9.example"]),
    ] {
        assert_eq!(status(target, hosts).await, 400, "{target} {hosts:?}");
    }
    assert_eq!(status("/page", &[b"other"]).await, 200);
}
