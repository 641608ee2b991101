//! Slow request bodies, and the side that causes the delay.

use std::convert::Infallible;
use std::io;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};
use tidegate::clock::TokioClock;
use tidegate::outbound::{CallErrorKind, OutboundError, OutboundLayer, ReplayBody, SendError};
use tidegate::store::Memory;
use tidegate_core::Lane;
use tower::{Layer as _, ServiceExt as _};

use crate::common::{Api, ask, get, layer, now, status};

type Upload = StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>;

/// A stream of this many pieces, with this delay between them.
fn pieces(count: usize, millis: u64) -> BoxStream<'static, Result<Frame<Bytes>, Infallible>> {
    let piece = move |number| async move {
        if number > 0 {
            tokio::time::sleep(Duration::from_millis(millis)).await;
        }
        Ok(Frame::data(Bytes::from_static(b"piece")))
    };
    stream::iter(0..count).then(piece).boxed()
}

fn put(body: BoxStream<'static, Result<Frame<Bytes>, Infallible>>) -> Request<Upload> {
    Request::put("/x").body(StreamBody::new(body)).unwrap()
}

/// A request with a body that stops after this many pieces, without an end.
fn stalling(pieces_before: usize) -> Request<Upload> {
    put(pieces(pieces_before, 100).chain(stream::pending()).boxed())
}

fn is_open(layer: &OutboundLayer<Memory, TokioClock>) -> bool {
    layer.provider().inspect(|state, now| state.breaker.peek(now).is_err())
}

fn is_stalled(error: &OutboundError) -> bool {
    match error {
        OutboundError::Send(trouble) => matches!(trouble, SendError::BodyTimeout),
        OutboundError::Call(call) => matches!(call.last_reply, Some(SendError::BodyTimeout)),
        _ => false,
    }
}

#[tokio::test(start_paused = true)]
async fn a_stalled_caller_is_no_provider_failure() {
    // Once by the timeout of the attempt, and once by that of the call, which is 10 s.
    for (settings, secs) in [("attempt_timeout = \"2s\"\n", 2), ("", 10)] {
        let api = Api::new(|_, _| status(200));
        let layer = layer(&format!("{settings}breaker = {{ failures = 1 }}\n"));
        let limit = || layer.provider().inspect(|state, _| state.adaptive_limit.as_ref().unwrap().limit());
        let before = limit();
        for sent in [0, 1, 3] {
            let began = now();
            let error = layer.layer(api.clone()).oneshot(stalling(sent)).await.unwrap_err();
            assert!(is_stalled(&error), "{error:?}");
            assert_eq!(error.status(), 408);
            let took = now() - began;
            let moved = if secs == 2 { Duration::from_millis(100) * (sent.max(1) - 1) as u32 } else { Duration::ZERO };
            assert!(took.abs_diff(Duration::from_secs(secs) + moved) <= Duration::from_millis(5), "{took:?}");
        }
        assert!(!is_open(&layer), "one failure would have opened it");
        assert_eq!(limit(), before);
        assert_eq!(layer.provider().inspect(|state, _| state.lanes.in_flight(Lane::User)), 0);
        assert_eq!(ask(&layer.layer(api), get("/x")).await.unwrap().status(), StatusCode::OK);
    }
}

#[tokio::test(start_paused = true)]
async fn a_progressing_upload_may_exceed_attempt_timeout() {
    let api = Api::new(|_, request| status(if request.body.len() == 500 { 200 } else { 400 }));
    let layer = layer("attempt_timeout = \"2s\"\ntimeout = \"2m\"\nbreaker = { failures = 1 }\n");
    let began = now();
    let response = layer.layer(api).oneshot(put(pieces(100, 1_000))).await.unwrap();
    assert_eq!((response.status(), (now() - began).as_secs()), (StatusCode::OK, 99));
}

#[tokio::test(start_paused = true)]
async fn after_the_upload_the_attempt_timeout_applies() {
    let api = Api::new(|_, _| status(200)).taking(Duration::from_secs(3_600));
    let layer = layer("attempt_timeout = \"2s\"\ntimeout = \"2m\"\nretry = { max_attempts = 1 }\n");
    let began = now();
    let error = layer.layer(api).oneshot(put(pieces(4, 1_000))).await.unwrap_err();
    let OutboundError::Call(error) = error else { panic!("{error:?}") };
    assert!(matches!(error.last_reply, Some(SendError::TimedOut)), "{error:?}");
    assert_eq!((now() - began).as_secs(), 5, "3 s of sending and 2 s of silence");
}

/// A provider that reads this many pieces of a body, and then stops.
#[derive(Clone)]
struct Sated(usize);

impl tower::Service<Request<ReplayBody<Upload>>> for Sated {
    type Response = Response<Full<Bytes>>;
    type Error = io::Error;
    type Future = futures_util::future::BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<ReplayBody<Upload>>) -> Self::Future {
        let takes = self.0;
        Box::pin(async move {
            let mut body = request.into_body();
            for _ in 0..takes {
                body.frame().await.unwrap().unwrap();
            }
            std::future::pending().await
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_provider_that_stops_reading_has_failed() {
    for takes in [0, 1, 2] {
        let layer = layer("attempt_timeout = \"2s\"\nbreaker = { failures = 1 }\nretry = { max_attempts = 1 }\n");
        let error = layer.layer(Sated(takes)).oneshot(put(pieces(100, 0))).await.unwrap_err();
        let OutboundError::Call(error) = error else { panic!("{error:?}") };
        assert!(matches!(error.last_reply, Some(SendError::TimedOut)), "{error:?}");
        assert!(is_open(&layer), "after {takes} pieces");
    }
}

#[tokio::test(start_paused = true)]
async fn uploads_too_slow_are_no_provider_failure() {
    /// A provider that reads one piece in a second.
    #[derive(Clone)]
    struct Slow;
    impl tower::Service<Request<ReplayBody<Upload>>> for Slow {
        type Response = Response<Full<Bytes>>;
        type Error = io::Error;
        type Future = futures_util::future::BoxFuture<'static, io::Result<Self::Response>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: Request<ReplayBody<Upload>>) -> Self::Future {
            Box::pin(async move {
                let mut body = request.into_body();
                while body.frame().await.is_some() {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                status(200)
            })
        }
    }
    let layer = layer("breaker = { failures = 1 }\n");
    let error = layer.layer(Slow).oneshot(put(pieces(100, 0))).await.unwrap_err();
    let OutboundError::Call(error) = error else { panic!("{error:?}") };
    assert!(
        matches!((&error.kind, &error.last_reply), (CallErrorKind::DeadlineExceeded, Some(SendError::TimedOut))),
        "{error:?}"
    );
    assert!(!is_open(&layer));
}
