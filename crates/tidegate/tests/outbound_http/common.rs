//! Services in the place of providers, and the layer in front of them.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tidegate::clock::TokioClock;
use tidegate::outbound::{Outbound, OutboundBody, OutboundError, OutboundLayer, OutboundService, ReplayBody};
use tidegate::policy::{Policy, PolicySources};
use tidegate::store::Memory;
use tower::ServiceExt as _;

pub(crate) const PLANTED: &str = "pl4nted-s3cr3t";

/// A request that the service received.
#[derive(Clone, Debug)]
pub(crate) struct Arrived {
    pub(crate) at: tokio::time::Instant,
    pub(crate) method: String,
    pub(crate) uri: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Arrived {
    pub(crate) fn bearer(&self) -> &str {
        self.headers["authorization"].to_str().unwrap().strip_prefix("Bearer ").unwrap()
    }
}

pub(crate) type Answer = io::Result<Response<Full<Bytes>>>;
pub(crate) type Script = dyn Fn(usize, &Arrived) -> Answer + Send + Sync;

/// A provider that answers the n-th request, counted from 0, as its script says, after a delay.
#[derive(Clone)]
pub(crate) struct Api {
    script: Arc<Script>,
    arrived: Arc<Mutex<Vec<Arrived>>>,
    takes: Arc<dyn Fn(usize) -> Duration + Send + Sync>,
    open: Arc<()>,
}

impl Api {
    pub(crate) fn new(script: impl Fn(usize, &Arrived) -> Answer + Send + Sync + 'static) -> Self {
        Self {
            script: Arc::new(script),
            arrived: Arc::default(),
            takes: Arc::new(|_| Duration::ZERO),
            open: Arc::default(),
        }
    }

    pub(crate) fn taking(self, takes: Duration) -> Self {
        self.taking_each(move |_| takes)
    }

    pub(crate) fn taking_each(mut self, takes: impl Fn(usize) -> Duration + Send + Sync + 'static) -> Self {
        self.takes = Arc::new(takes);
        self
    }

    pub(crate) fn arrived(&self) -> Vec<Arrived> {
        self.arrived.lock().unwrap().clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.arrived.lock().unwrap().len()
    }

    /// The number of requests under way. Each holds a clone of `open`. All other clones come in pairs with `arrived`.
    pub(crate) fn open(&self) -> usize {
        Arc::strong_count(&self.open) - Arc::strong_count(&self.arrived)
    }
}

impl<B> tower::Service<Request<ReplayBody<B>>> for Api
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: std::error::Error + Send + Sync,
{
    type Response = Response<Full<Bytes>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Answer> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<ReplayBody<B>>) -> Self::Future {
        let (api, open) = (self.clone(), Arc::clone(&self.open));
        Box::pin(async move {
            let _open = open;
            let (parts, body) = request.into_parts();
            let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
            let arrived = Arrived {
                at: now(),
                method: parts.method.to_string(),
                uri: parts.uri.to_string(),
                headers: parts.headers,
                body,
            };
            let number = {
                let mut all = api.arrived.lock().unwrap();
                all.push(arrived.clone());
                all.len() - 1
            };
            tokio::time::sleep((api.takes)(number)).await;
            (api.script)(number, &arrived)
        })
    }
}

#[expect(clippy::disallowed_methods, reason = "tokio's paused time is this test's clock")]
pub(crate) fn now() -> tokio::time::Instant {
    tokio::time::Instant::now()
}

pub(crate) fn answer(status: u16, headers: &[(&str, &str)], body: &str) -> Answer {
    let builder =
        headers.iter().fold(Response::builder().status(status), |builder, (name, value)| builder.header(*name, *value));
    Ok(builder.body(Full::new(Bytes::from(body.to_owned()))).unwrap())
}

pub(crate) fn status(status: u16) -> Answer {
    answer(status, &[], "body")
}

pub(crate) fn layer(settings: &str) -> OutboundLayer<Memory, TokioClock> {
    limited("1000/s burst 1000", settings)
}

pub(crate) fn limited(limit: &str, settings: &str) -> OutboundLayer<Memory, TokioClock> {
    layer_of(&format!("[outbound.provider.api]\nbase_url = \"https://api.test/3\"\nlimit = \"{limit}\"\n{settings}"))
}

pub(crate) fn layer_of(text: &str) -> OutboundLayer<Memory, TokioClock> {
    let policy = Policy::load(PolicySources::new().file("test.toml", text)).unwrap_or_else(|errors| panic!("{errors}"));
    let outbound = Outbound::in_memory(&policy, TokioClock::default()).unwrap();
    let provider = outbound.provider("api").unwrap().clone();
    OutboundLayer::with_env(provider, |name| Some(format!("{PLANTED}-{}", name.to_lowercase()))).unwrap()
}

pub(crate) const BEARER: &str = "auth = \"bearer\"\ncredentials = [\"env:A\"]\n";
pub(crate) const PAIR: &str = "auth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]\n";
pub(crate) const LOGIN: &str = "auth = \"bearer\"\ncredentials = [\"env:A\"]\n\
    login = { path = \"/login\", body = '{\"apikey\":\"{credential}\"}', lifetime = \"24h\", refresh_before = \"2h\" }\n";

pub(crate) type Through = OutboundService<Api, Memory, TokioClock>;
pub(crate) type Reply = Response<OutboundBody<Full<Bytes>, Memory, TokioClock>>;

pub(crate) async fn ask(service: &Through, request: Request<Full<Bytes>>) -> Result<Reply, OutboundError> {
    service.clone().oneshot(request).await
}

pub(crate) fn get(path: &str) -> Request<Full<Bytes>> {
    Request::get(path).body(Full::default()).unwrap()
}

pub(crate) fn post(body: &'static str, key: Option<&str>) -> Request<Full<Bytes>> {
    let builder = key.into_iter().fold(Request::post("/x"), |builder, key| builder.header("idempotency-key", key));
    builder.body(Full::new(Bytes::from_static(body.as_bytes()))).unwrap()
}

pub(crate) async fn text(response: Reply) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}
