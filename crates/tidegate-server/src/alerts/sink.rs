//! The receivers of an alert's messages, and their delivery.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue, USER_AGENT};
use http::{Request, StatusCode};
use http_body_util::Full;
use rustls::ClientConfig;
use serde_json::Value;
use tidegate::Time;
use tidegate::outbound::{
    CallOptions, IDEMPOTENCY_KEY, Outbound, OutboundError, OutboundLayer, OutboundService, ReplayBody,
};
use tidegate_core::Clock as _;
use tidegate_policy::alerts::{AlertConfig, WebhookError, WebhookFormat};
use tidegate_policy::outbound::BaseUrl;
use tidegate_policy::{Policy, ProviderSpec, Secret};
use tidegate_runtime::clock::SystemClock;
use tidegate_runtime::counters::Counters;
use tidegate_runtime::log_throttle::LogThrottle;
use tidegate_runtime::random::random_bytes;
use tokio::sync::{mpsc, watch};
use tower_layer::Layer as _;

use super::group::Message;
use super::message;
use crate::gateway::call_error::{error_chain, reply_error};
use crate::gateway::provider_client::{self, ProviderClient};
use crate::log::EscapedError;

/// The maximum number of messages that wait for a receiver, such as during a pause that it asks for. Further ones are dropped
/// and counted.
const MAX_WAITING: usize = 32;
/// The limit on requests to a receiver, below what Slack and Telegram allow.
const LIMIT: &str = "20 per 60s";
/// The time for a message with all its attempts, and so the longest pause of a receiver that messages wait for. While a
/// longer one lasts, they fail at once.
const TIMEOUT: &str = "1h";
/// The time for the message of a test.
const TEST_TIMEOUT: Duration = Duration::from_secs(8);
/// The maximum number of log lines per second about messages that weren't delivered.
const LINES_PER_SECOND: u32 = 1;
const AGENT: &str = concat!("tidegate/", env!("CARGO_PKG_VERSION"));

/// The result of a message, and its place among the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SinkResult {
    /// The receiver has taken it.
    Sent,
    /// The receiver has refused it, or didn't answer in time.
    Failed,
    /// Too many messages waited.
    Dropped,
}

impl SinkResult {
    /// The names in metrics.
    pub(crate) const NAMES: [&'static str; 3] = ["sent", "failed", "dropped"];
}

/// The form of a receiver's messages.
#[derive(Clone, Debug)]
pub(super) enum SinkForm {
    Json,
    Slack,
    Telegram { chat: String },
}

impl From<WebhookFormat> for SinkForm {
    fn from(format: WebhookFormat) -> Self {
        match format {
            WebhookFormat::Json => Self::Json,
            WebhookFormat::Slack => Self::Slack,
        }
    }
}

impl SinkForm {
    /// The receiver's kind in metrics and answers.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Json | Self::Slack => "webhook",
            Self::Telegram { .. } => "telegram",
        }
    }

    pub(super) fn body(&self, alert: &str, message: &Message, now: Time) -> Value {
        match self {
            Self::Json => message::json(alert, message, now),
            Self::Slack => message::slack(&message::text(alert, message)),
            Self::Telegram { chat } => message::telegram(chat, &message::text(alert, message)),
        }
    }

    /// The body of a test.
    pub(super) fn test_body(&self, alert: &str) -> Value {
        let text = format!("tidegate alert {alert}: this is a test");
        match self {
            Self::Json => serde_json::json!({ "alert": alert, "test": true, "text": text }),
            Self::Slack => message::slack(&text),
            Self::Telegram { chat } => message::telegram(chat, &text),
        }
    }
}

/// A receiver outside this process, and the messages that wait for it.
pub(super) struct RemoteSink {
    pub(super) form: SinkForm,
    receiver: Arc<Receiver>,
    queue: mpsc::Sender<Bytes>,
}

/// The connection to a receiver: calls to a provider of its own.
struct Receiver {
    alert: String,
    kind: &'static str,
    results: Counters,
    /// The number of messages to all receivers that are on their way.
    undelivered: watch::Sender<usize>,
    throttle: LogThrottle,
    service: OutboundService<ProviderClient<ReplayBody<Full<Bytes>>>>,
    /// The path and query of requests.
    target: Secret,
}

impl RemoteSink {
    /// Returns a receiver at this URL, and starts a task for its messages. The task ends after the last message when the
    /// receiver is dropped.
    pub(super) fn start(
        alert: &AlertConfig,
        form: SinkForm,
        base: &BaseUrl,
        target: Secret,
        tls: ClientConfig,
        results: Counters,
        undelivered: watch::Sender<usize>,
    ) -> Result<Self, WebhookError> {
        let scheme = if base.is_https() { "https" } else { "http" };
        let url = format!("{scheme}://{}{}", base.authority(), base.path());
        let provider = ProviderSpec::new(&url)
            .limit(LIMIT)
            .set("timeout", TIMEOUT)
            .set("attempt_timeout", "10s")
            .set("retry.max_attempts", 8)
            .set("retry.base", "500ms")
            .set("retry.cap", "1m")
            .set("retry.max_retry_after", TIMEOUT)
            // Messages are few and bounded, and each is worth its attempts.
            .set("budget", "off")
            .set("breaker", "off");
        // A text of the policy builder's errors could show the URL.
        let policy = Policy::builder().provider(&alert.name, provider).build().map_err(|_| WebhookError::Malformed)?;
        let outbound = Outbound::new(&policy).ok_or(WebhookError::Malformed)?;
        let [provider] = outbound.providers() else { return Err(WebhookError::Malformed) };
        let layer = OutboundLayer::with_env(provider.clone(), |_: &str| None).map_err(|_| WebhookError::Malformed)?;
        let client = provider_client::client(provider.config(), base, tls, 1);
        let service = layer.fault_classifier(provider_client::fault_of).layer(client);
        let (alert, kind, throttle) = (alert.name.clone(), form.kind(), LogThrottle::new(LINES_PER_SECOND));
        let receiver = Arc::new(Receiver { alert, kind, results, undelivered, throttle, service, target });
        let (queue, waiting) = mpsc::channel(MAX_WAITING);
        tokio::spawn(deliver(waiting, Arc::clone(&receiver)));
        Ok(Self { form, receiver, queue })
    }

    /// The counters of the [`SinkResult`]s.
    pub(super) fn results(&self) -> &Counters {
        &self.receiver.results
    }

    /// Puts a message into the queue, or drops it if the queue is full.
    pub(super) fn send(&self, body: &Value) {
        self.receiver.undelivered.send_modify(|messages| *messages += 1);
        if self.queue.try_send(body.to_string().into()).is_err() {
            self.receiver.note_end(SinkResult::Dropped, "too many messages wait");
        }
    }

    /// Sends the message of a test, and waits for its result.
    pub(super) async fn test(&self, alert: &str) -> Result<(), String> {
        let sent = self.receiver.send(self.form.test_body(alert).to_string().into(), Some(TEST_TIMEOUT)).await;
        let result = if sent.is_ok() { SinkResult::Sent } else { SinkResult::Failed };
        self.receiver.results.add(result as usize, 1);
        sent
    }
}

/// Delivers messages one after the other.
async fn deliver(mut waiting: mpsc::Receiver<Bytes>, receiver: Arc<Receiver>) {
    while let Some(body) = waiting.recv().await {
        match receiver.send(body, None).await {
            Ok(()) => receiver.note_end(SinkResult::Sent, ""),
            Err(why) => receiver.note_end(SinkResult::Failed, &why),
        }
    }
}

impl Receiver {
    /// Counts the result of a message, and logs the reason if it wasn't delivered.
    fn note_end(&self, result: SinkResult, why: &str) {
        self.results.add(result as usize, 1);
        self.undelivered.send_modify(|messages| *messages = messages.saturating_sub(1));
        if result == SinkResult::Sent {
            return;
        }
        if let Some(suppressed) = self.throttle.admit(SystemClock::new().now()) {
            let Self { alert, kind: sink, .. } = self;
            tracing::warn!(alert, sink, why = %EscapedError(why), suppressed, "an alert wasn't delivered");
        }
    }

    /// Sends a body, with retries. The error never has the path or the token.
    async fn send(&self, body: Bytes, timeout: Option<Duration>) -> Result<(), String> {
        let json = HeaderValue::from_static("application/json");
        let request = Request::post(self.target.expose())
            .header(CONTENT_TYPE, json)
            .header(USER_AGENT, AGENT)
            // A POST with a key may be sent again.
            .header(IDEMPOTENCY_KEY, format!("{:032x}", u128::from_be_bytes(random_bytes())))
            .body(Full::new(body))
            .map_err(|_| WebhookError::Malformed.to_string())?;
        let options = CallOptions { timeout, ..CallOptions::default() };
        match self.service.send(options, request).await {
            Ok(response) if response.status().is_success() => Ok(()),
            Ok(response) => Err(describe_status(response.status())),
            Err(failed) => Err(describe_failure(&failed)),
        }
    }
}

fn describe_status(status: StatusCode) -> String {
    format!("the receiver answered {status}")
}

fn describe_failure(failed: &OutboundError) -> String {
    match failed {
        OutboundError::Call(call) => format!("{}{}", call.kind, reply_error(call)),
        other => error_chain(other),
    }
}
