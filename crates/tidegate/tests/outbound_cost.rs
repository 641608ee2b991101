//! The cost of calls over the tower layer: reserved by the request, corrected by the reply.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that can't go on should stop")]

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::{iter, once};
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use tidegate::clock::TokioClock;
use tidegate::outbound::{
    CallErrorKind, CallOptions, Outbound, OutboundBody, OutboundError, OutboundLayer, ReplayBody, SendError,
};
use tidegate::policy::{Policy, PolicySources};
use tidegate::store::Memory;
use tower::util::BoxCloneService;
use tower::{Layer as _, ServiceExt as _};

type Bodied = UnsyncBoxBody<Bytes, io::Error>;
type Reply = Response<OutboundBody<Bodied, Memory, TokioClock>>;
type Through = BoxCloneService<Request<Bodied>, Reply, OutboundError>;

const JSON: (&str, &str) = ("content-type", "application/json");
const EVENTS: (&str, &str) = ("content-type", "text/event-stream; charset=utf-8");
const RULES: &str = "cost_limit = \"1000 per 60s\"\n\
    cost = { reserve = 10, request = [\"/max_completion_tokens\", \"/max_tokens\"], bytes_per_unit = 4, \
    reply = [\"/usage/in or /message/usage/in\", \"/usage/out or /message/usage/out\"] }\n";
/// A stream with a cost of 25 + 15.
const STREAM: &str = "event: message_start\ndata: {\"message\":{\"usage\":{\"in\":25,\"out\":1}}}\n\n: ping\n\n\
    data: {\"delta\":\"\\\"usage\\\":{\\\"in\\\":7}\"}\r\n\r\ndata: {\"usage\":{\"out\":9}}\n\n\
    data: {\"usage\":\ndata: {\"out\":15}}\n\ndata: [DONE]\n\n";

/// A provider that answers calls to `/x` with this body, and records the requests.
#[derive(Clone, Default)]
struct Api {
    arrived: Arc<Mutex<Vec<(HeaderMap, Bytes)>>>,
}

impl Api {
    fn behind(
        &self,
        rules: &str,
        headers: &'static [(&'static str, &'static str)],
        body: impl Fn() -> Bodied + Clone + Send + Sync + 'static,
    ) -> Through {
        let text = format!("[outbound.provider.api]\nbase_url = \"https://api.test\"\n{rules}");
        let policy =
            Policy::load(PolicySources::new().file("test.toml", text)).unwrap_or_else(|errors| panic!("{errors}"));
        let outbound = Outbound::in_memory(&policy, TokioClock::default()).unwrap();
        let layer = OutboundLayer::new(outbound.provider("api").unwrap().clone()).unwrap();
        let api = self.clone();
        BoxCloneService::new(layer.layer(tower::service_fn(move |request: Request<ReplayBody<Bodied>>| {
            let (api, body) = (api.clone(), body.clone());
            async move {
                let (parts, sent) = request.into_parts();
                let sent = sent.collect().await.map_err(io::Error::other)?.to_bytes();
                let is_probe = parts.uri.path() == "/probe";
                if is_probe {
                    return Ok::<_, io::Error>(Response::new(whole("")));
                }
                api.arrived.lock().unwrap().push((parts.headers, sent));
                let reply =
                    headers.iter().fold(Response::builder(), |reply, (name, value)| reply.header(*name, *value));
                Ok(reply.body(body()).unwrap())
            }
        })))
    }

    fn count(&self) -> usize {
        self.arrived.lock().unwrap().len()
    }
}

fn whole(body: &'static str) -> Bodied {
    Full::new(Bytes::from_static(body.as_bytes())).map_err(|never: Infallible| match never {}).boxed_unsync()
}

/// A body of unknown length in these pieces.
fn pieces(pieces: Vec<&'static [u8]>) -> Bodied {
    BodyExt::boxed_unsync(StreamBody::new(iter(pieces).map(|piece| Ok(Frame::data(Bytes::from_static(piece))))))
}

/// A body that begins like this and never ends.
fn unending(beginning: &'static str) -> Bodied {
    let beginning = once(async move { Ok(Frame::data(Bytes::from_static(beginning.as_bytes()))) });
    BodyExt::boxed_unsync(StreamBody::new(beginning.chain(once(pending()))))
}

fn post(headers: &[(&str, &str)], body: Bodied) -> Request<Bodied> {
    let request = headers.iter().fold(Request::post("/x"), |request, (name, value)| request.header(*name, *value));
    request.body(body).unwrap()
}

/// Asserts that this much of the calls' budget is left, and spends it.
async fn assert_left(service: &Through, left: u64) {
    let is_refused = async |cost| {
        let mut request = Request::get("/probe").body(whole("")).unwrap();
        let timeout = Some(Duration::from_millis(1));
        request.extensions_mut().insert(CallOptions { cost, timeout, ..CallOptions::default() });
        match service.clone().oneshot(request).await {
            Ok(_) => false,
            Err(OutboundError::Call(error)) if matches!(error.kind, CallErrorKind::RateLimited { .. }) => true,
            Err(error) => panic!("{error}"),
        }
    };
    assert!(is_refused(left + 1).await, "more than {left} is left");
    assert!(!is_refused(left).await, "less than {left} is left");
}

#[tokio::test(start_paused = true)]
async fn the_requested_cost_is_reserved() {
    let ask = "{\"max_tokens\":300}    ";
    // 10 for each call, and 5 for a body of 22 bytes.
    for (rules, headers, body, cut, reserved) in [
        ("", &[JSON][..], ask, 0, 315),
        ("", &[("content-type", "application/vnd.x+json; charset=utf-8")], ask, 0, 315),
        ("", &[JSON], ask, 7, 315),
        ("", &[JSON], "{\"max_tokens\":300,\"max_completion_tokens\":20}    ", 0, 42),
        ("", &[JSON], "{\"max_tokens\":999999}  ", 0, 1000),
        ("", &[], ask, 0, 15),
        ("", &[("content-type", "text/plain")], ask, 0, 15),
        ("", &[JSON], "{\"max_tokens\":300  ", 0, 14),
        ("", &[JSON], "", 0, 10),
        ("replay = \"21B\"\n", &[JSON], ask, 0, 15),
        ("replay = \"21B\"\n", &[JSON], ask, 20, 15),
        ("replay = \"22B\"\n", &[JSON], ask, 20, 315),
    ] {
        let api = Api::default();
        let service = api.behind(&format!("{RULES}{rules}"), &[], || unending("{"));
        let (first, second) = body.as_bytes().split_at(cut);
        let sent = if cut > 0 { pieces(vec![first, second]) } else { whole(body) };
        let unread = service.clone().oneshot(post(headers, sent)).await.unwrap();
        assert_eq!(api.arrived.lock().unwrap()[0].1, body, "it arrives whole");
        if reserved < 1000 {
            assert_left(&service, 1000 - reserved).await;
        } else {
            let next = service.clone().oneshot(post(&[], whole(""))).await;
            assert!(next.is_err(), "all is reserved, and no more, or the first would never have been sent");
        }
        drop(unread);
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_broken_before_sending_costs_nothing() {
    let api = Api::default();
    let service = api.behind(RULES, &[], || whole(""));
    let broken = iter([Ok(Frame::data(Bytes::from_static(b"{"))), Err(io::Error::other("the caller is gone"))]);
    let error = service.clone().oneshot(post(&[JSON], BodyExt::boxed_unsync(StreamBody::new(broken)))).await;
    let error = error.map(|_| ()).unwrap_err();
    assert!(matches!(error, OutboundError::Send(SendError::BrokenBody)), "{error:?}");
    assert_eq!((error.status(), api.count()), (400, 0));
    assert_left(&service, 1000).await;
}

#[tokio::test(start_paused = true)]
async fn a_missing_body_ends_at_the_calls_timeout() {
    let api = Api::default();
    let service = api.behind(&format!("{RULES}timeout = \"7s\""), &[], || whole(""));
    let clock = TokioClock::default();
    let began_at = tidegate::Clock::now(&clock);
    let error = service.clone().oneshot(post(&[JSON], unending("{"))).await.map(|_| ()).unwrap_err();
    assert!(matches!(error, OutboundError::Send(SendError::BodyTimeout)), "{error:?}");
    assert_eq!(tidegate::Clock::now(&clock).since(began_at).as_secs_ceil(), 7);
    assert_eq!((error.status(), api.count()), (408, 0));
    assert_left(&service, 1000).await;
}

#[tokio::test(start_paused = true)]
async fn stream_events_settle_the_cost_despite_chunking() {
    for split in 0..=STREAM.len() {
        let api = Api::default();
        let (first, second) = STREAM.as_bytes().split_at(split);
        let service = api.behind(RULES, &[EVENTS], move || pieces(vec![first, second]));
        let reply = service.clone().oneshot(post(&[JSON], whole("{\"max_tokens\":500}"))).await.unwrap();
        let body = reply.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, STREAM, "it passes as it is");
        assert_left(&service, 960).await;
        let arrived = api.arrived.lock().unwrap();
        assert_eq!(arrived[0].0["accept-encoding"], "identity", "so that it can be read");
    }
    let api = Api::default();
    let service = api.behind(RULES, &[EVENTS], || pieces(STREAM.as_bytes().chunks(1).collect()));
    let reply = service.clone().oneshot(post(&[JSON], whole("{\"max_tokens\":500}"))).await.unwrap();
    assert_eq!(reply.into_body().collect().await.unwrap().to_bytes(), STREAM);
    assert_left(&service, 960).await;
}

#[tokio::test(start_paused = true)]
async fn without_a_stated_cost_the_reservation_stands() {
    const SAYS: &str = "{\"usage\":{\"in\":25,\"out\":15}}";
    for (headers, body, left) in [
        (&[JSON][..], SAYS, 960),
        (&[JSON, ("content-encoding", "identity")], SAYS, 960),
        (&[JSON, ("content-encoding", "gzip")], SAYS, 990),
        (&[EVENTS, ("content-encoding", "br")], STREAM, 990),
        (&[EVENTS], SAYS, 990),
        (&[EVENTS], "data: {\"choices\":[],\"usage\":null}\n\ndata: [DONE]\n\n", 990),
        (&[JSON], "{\"error\":\"overloaded\"}", 990),
    ] {
        let service = Api::default().behind(RULES, headers, move || whole(body));
        let reply = service.clone().oneshot(post(&[], whole(""))).await.unwrap();
        drop(reply.into_body().collect().await.unwrap());
        assert_left(&service, left).await;
    }
    let service = Api::default().behind(RULES, &[EVENTS], || unending("data: {\"usage\":{\"in\":25}}\n\n"));
    let mut reply = service.clone().oneshot(post(&[], whole(""))).await.unwrap();
    reply.body_mut().frame().await.unwrap().unwrap();
    drop(reply);
    assert_left(&service, 990).await;
}

#[tokio::test(start_paused = true)]
async fn event_streams_are_not_buffered_for_body_rules() {
    let rule = "throttled_when = { contains = { \"/error\" = \"slow down\" } }\n";
    let service = Api::default().behind(rule, &[EVENTS], || unending("data: {}\n\n"));
    let mut reply = service.oneshot(post(&[], whole(""))).await.unwrap();
    let first = reply.body_mut().frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(first, "data: {}\n\n");
}
