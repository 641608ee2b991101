//! Providers from presets over the tower layer, against services that answer as the provider does.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that can't go on should stop")]

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tidegate::clock::TokioClock;
use tidegate::outbound::{
    CallErrorKind, CallOptions, CallStats, Outbound, OutboundBody, OutboundError, OutboundLayer, Provider, ReplayBody,
};
use tidegate::policy::{Policy, PolicySources};
use tidegate::store::Memory;
use tower::util::BoxCloneService;
use tower::{Layer as _, ServiceExt as _};

type Asked = Request<Full<Bytes>>;
type Reply = Response<OutboundBody<Full<Bytes>, Memory, TokioClock>>;
type Answer = (u16, &'static str, &'static str);

/// A provider from a preset, with a service that answers the n-th request, counted from 0, by status, type and body.
struct Ready {
    provider: Provider<Memory, TokioClock>,
    service: BoxCloneService<Asked, Reply, OutboundError>,
    count: Arc<AtomicUsize>,
}

impl Ready {
    fn made(settings: &str, answer: impl Fn(usize) -> Answer + Clone + Send + Sync + 'static) -> Self {
        let text = format!("[outbound.provider.api]\n{settings}\n");
        let policy =
            Policy::load(PolicySources::new().file("test.toml", text)).unwrap_or_else(|errors| panic!("{errors}"));
        let outbound = Outbound::in_memory(&policy, TokioClock::default()).unwrap();
        let provider = outbound.provider("api").unwrap().clone();
        let layer = OutboundLayer::with_env(provider.clone(), |_| Some("key".to_owned())).unwrap();
        let count = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&count);
        let service = tower::service_fn(move |request: Request<ReplayBody<Full<Bytes>>>| {
            let (counter, answer) = (Arc::clone(&counter), answer.clone());
            async move {
                drop(request.into_body().collect().await);
                let (status, kind, body) = answer(counter.fetch_add(1, Ordering::Relaxed));
                let reply = Response::builder().status(status).header("content-type", kind);
                Ok::<_, Infallible>(reply.body(Full::new(Bytes::from_static(body.as_bytes()))).unwrap())
            }
        });
        Self { provider, service: BoxCloneService::new(layer.layer(service)), count }
    }

    async fn ask(&self, request: Asked) -> Result<Reply, OutboundError> {
        self.service.clone().oneshot(request).await
    }

    fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// True if a call of this cost is admitted without waiting.
    async fn has_room_for(&self, cost: u64) -> bool {
        let mut request = get();
        let timeout = Some(Duration::from_millis(1));
        request.extensions_mut().insert(CallOptions { cost, timeout, ..CallOptions::default() });
        match self.ask(request).await {
            Ok(_) => true,
            Err(OutboundError::Call(error)) if matches!(error.kind, CallErrorKind::RateLimited { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    }
}

fn get() -> Asked {
    Request::get("/x").body(Full::default()).unwrap()
}

fn prompt() -> Asked {
    let body = "{\"model\":\"m\",\"max_tokens\":20000,\"stream\":true,\"messages\":[]}";
    let request = Request::post("/x").header("content-type", "application/json");
    request.body(Full::new(Bytes::from_static(body.as_bytes()))).unwrap()
}

const KEY: &str = "credentials = \"env:KEY\"";
const STREAM: &str = "text/event-stream; charset=utf-8";

/// Replies from the documents of each provider, with 4,000 tokens each.
const SAID: [(&str, &str, &str); 6] = [
    (
        "openai",
        "application/json",
        r#"{"id":"c","choices":[],"usage":{"prompt_tokens":1000,"completion_tokens":3000,"total_tokens":4000}}"#,
    ),
    (
        "openai",
        STREAM,
        "data: {\"choices\":[{\"delta\":{\"content\":\"Hi\"}}],\"usage\":null}\n\n\
         data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1000,\"completion_tokens\":3000,\"total_tokens\":4000}}\n\n\
         data: [DONE]\n\n",
    ),
    (
        "openai",
        STREAM,
        "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"usage\":null}}\n\n\
         event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"Hi\"}\n\n\
         event: response.completed\n\
         data: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":1000,\"total_tokens\":4000}}}\n\n",
    ),
    (
        "anthropic",
        "application/json",
        r#"{"type":"message","usage":{"input_tokens":500,"cache_creation_input_tokens":500,
            "cache_read_input_tokens":9000,"output_tokens":3000}}"#,
    ),
    (
        "anthropic",
        STREAM,
        "event: message_start\n\
         data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":1000,\"output_tokens\":1}}}\n\n\
         event: ping\ndata: {\"type\":\"ping\"}\n\n\
         event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":3000}}\n\n\
         event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    ),
    (
        "anthropic",
        STREAM,
        "event: message_start\n\
         data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":1000,\"output_tokens\":3}}}\n\n\
         event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"input_tokens\":1000,\
         \"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":0,\"output_tokens\":3000}}\n\n",
    ),
];

#[tokio::test(start_paused = true)]
async fn language_model_replies_settle_the_calls_cost() {
    for (preset, kind, body) in SAID {
        let settings = format!("preset = \"{preset}\"\n{KEY}\ncost_limit = \"30000 per 60s\"");
        let api = Ready::made(&settings, move |_| (200, kind, body));
        let reply = api.ask(prompt()).await.unwrap();
        assert!(!api.has_room_for(10_001).await, "{body}: 20,000 are reserved of 30,000");
        assert_eq!(reply.into_body().collect().await.unwrap().to_bytes(), body);
        assert!(!api.has_room_for(26_001).await, "{body}");
        assert!(api.has_room_for(26_000).await, "{body}");
    }
}

#[tokio::test(start_paused = true)]
async fn omdbs_limit_message_spends_the_daily_quota() {
    for status in [200, 401] {
        let reached = (status, "application/json", r#"{"Response":"False","Error":"Request limit reached!"}"#);
        let api = Ready::made(&format!("preset = \"omdb-free\"\n{KEY}"), move |_| reached);
        let spent = api.ask(get()).await.unwrap();
        assert_eq!(spent.status(), status);
        assert!(
            matches!(spent.extensions().get::<CallErrorKind>(), Some(CallErrorKind::QuotaSpent { .. })),
            "{spent:?}"
        );
        api.ask(get()).await.unwrap_err();
        assert_eq!(api.count(), 1, "nothing more is sent today");
    }
    let wrong = (401, "application/json", r#"{"Response":"False","Error":"Invalid API key!"}"#);
    let api = Ready::made(&format!("preset = \"omdb-free\"\n{KEY}"), move |_| wrong);
    for _ in 0..2 {
        assert_eq!(api.ask(get()).await.unwrap().status(), StatusCode::UNAUTHORIZED);
    }
    assert_eq!(api.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn musicbrainz_503_throttle_is_no_outage() {
    const MANY: &str = r#"{"error":"Your requests are exceeding the allowable rate limit. Please see …","help":"…"}"#;
    let settings = "preset = \"musicbrainz\"\nuser_agent = \"Tagger/1.2 ( me@example.org )\"\ntimeout = \"1h\"\n\
                    retry = { max_attempts = 20 }\nbudget = { min = 20, reserve = 20 }\nbreaker = { failures = 5 }";
    for (body, fine) in [(MANY, true), (r#"{"error":"The server is down"}"#, false)] {
        let api = Ready::made(settings, move |number| match number {
            0..6 => (503, "application/json", body),
            _ => (200, "application/json", "{}"),
        });
        let reply = api.ask(get()).await;
        match reply {
            Ok(reply) if reply.status().is_success() => {
                assert!(fine, "five failures in a row open the breaker");
                assert_eq!(reply.extensions().get::<CallStats>().unwrap().attempts, 7);
            }
            other => assert!(!fine, "{other:?}"),
        }
        assert_eq!(api.provider.inspect(|state, now| state.breaker.peek(now).is_ok()), fine, "{body}");
    }
}
