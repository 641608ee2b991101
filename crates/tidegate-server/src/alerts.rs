//! Alerts: events that are sent to people. A [driver] reads events and counts; a [group] decides about messages; a [sink]
//! sends them. Nothing waits for them.

mod driver;
mod group;
mod message;
mod meter;
mod sink;

use std::sync::Arc;

use parking_lot::Mutex;
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tidegate::Time;
use tidegate_policy::alerts::{AlertConfig, TelegramConfig, WebhookError, WebhookUrl};
use tidegate_policy::outbound::BaseUrl;
use tidegate_policy::{Policy, Secret};
use tidegate_runtime::counters::Counters;

pub(crate) use self::driver::{quota_percent, run_alerts};
use self::group::{Group, Message};
pub(crate) use self::sink::SinkResult;
use self::sink::{RemoteSink, SinkForm};
use crate::ServeError;
use crate::gateway::provider_client::tls_config;
use crate::log::EscapedError;
use crate::states::SharedParts;

/// The alerts of a policy.
#[derive(Default)]
pub(crate) struct AlertSet(Vec<Arc<Alert>>);

/// A running alert.
pub(crate) struct Alert {
    config: AlertConfig,
    places: SinkPlaces,
    log_results: Option<Counters>,
    remote: Vec<RemoteSink>,
    group: Mutex<Group>,
}

/// The places of an alert's receivers, with their secrets.
#[derive(PartialEq, Eq)]
struct SinkPlaces {
    webhook: Option<WebhookUrl>,
    /// The path of requests to Telegram, which has the bot's token in it.
    telegram: Option<Secret>,
}

impl AlertSet {
    /// Starts the alerts of a policy. One that is the same as an earlier one goes on. Needs a tokio runtime.
    ///
    /// # Errors
    /// A secret can't be read, or isn't a URL; or the system has no root certificates.
    pub(crate) fn new(policy: &Policy, parts: &SharedParts, earlier: Option<&Self>) -> Result<Self, ServeError> {
        let mut tls = None;
        let alerts = policy.alerts().iter().map(|config| {
            let invalid = |source| ServeError::Alert { alert: config.name.clone(), source };
            let places = SinkPlaces::resolve(config, parts).map_err(invalid)?;
            let is_same = |alert: &&Arc<Alert>| alert.config == *config && alert.places == places;
            if let Some(same) = earlier.and_then(|earlier| earlier.0.iter().find(is_same)) {
                return Ok(Arc::clone(same));
            }
            // Reading the system's root certificates is slow, and some systems have none.
            let tls = match &mut tls {
                Some(tls) => tls,
                None if places.uses_tls(config) => tls.insert(tls_config().map_err(ServeError::RootCertificates)?),
                None => &mut no_tls(),
            };
            Alert::start(config, places, parts, tls).map(Arc::new).map_err(invalid)
        });
        alerts.collect::<Result<_, _>>().map(Self)
    }

    /// The alert with this name.
    pub(crate) fn find(&self, name: &str) -> Option<&Arc<Alert>> {
        self.0.iter().find(|alert| alert.config.name == name)
    }

    /// The names of the alerts.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|alert| alert.config.name.as_str())
    }
}

impl SinkPlaces {
    fn resolve(config: &AlertConfig, parts: &SharedParts) -> Result<Self, WebhookError> {
        let webhook = config.webhook.as_ref().map(|webhook| webhook.place.resolve(&parts.env)).transpose()?;
        let telegram = config.telegram.as_ref().map(|bot| bot.token.resolve(&parts.env)).transpose()?;
        let telegram = telegram.map(|token| Secret::new(format!("/bot{}/sendMessage", token.expose())));
        Ok(Self { webhook, telegram })
    }

    fn uses_tls(&self, config: &AlertConfig) -> bool {
        let webhook = self.webhook.as_ref().map(WebhookUrl::base);
        let telegram = config.telegram.as_ref().map(|bot| &bot.base_url);
        webhook.into_iter().chain(telegram).any(BaseUrl::is_https)
    }
}

/// The TLS settings of clients that don't use TLS.
fn no_tls() -> ClientConfig {
    ClientConfig::builder().with_root_certificates(RootCertStore::empty()).with_no_client_auth()
}

impl Alert {
    fn start(
        config: &AlertConfig,
        places: SinkPlaces,
        parts: &SharedParts,
        tls: &ClientConfig,
    ) -> Result<Self, WebhookError> {
        let results = |sink| parts.metrics.alert_results(&config.name, sink);
        let start = |form: SinkForm, base, target: &Secret| {
            let results = results(form.kind());
            RemoteSink::start(config, form, base, target.clone(), tls.clone(), results)
        };
        let mut remote = Vec::new();
        if let (Some(webhook), Some(url)) = (&config.webhook, &places.webhook) {
            remote.push(start(webhook.format.into(), url.base(), url.target())?);
        }
        if let (Some(TelegramConfig { chat, base_url, .. }), Some(target)) = (&config.telegram, &places.telegram) {
            remote.push(start(SinkForm::Telegram { chat: chat.clone() }, base_url, target)?);
        }
        let log_results = config.log.then(|| results("log"));
        let group = Mutex::new(Group::new(config.group, config.repeat));
        Ok(Self { config: config.clone(), places, log_results, remote, group })
    }

    /// Writes a message to the log, and puts it into the queues of the other receivers.
    fn send(&self, message: &Message, now: Time) {
        let name = &self.config.name;
        self.write_log(&message::text(name, message).replace('\n', "; "));
        for sink in &self.remote {
            sink.send(&sink.form.body(name, message, now));
        }
    }

    fn write_log(&self, text: &str) {
        if let Some(results) = &self.log_results {
            tracing::warn!("{}", EscapedError(text));
            results.add(SinkResult::Sent as usize, 1);
        }
    }

    /// Sends the message of a test to all receivers at the same time, and returns the result of each as JSON.
    pub(crate) async fn test(self: &Arc<Self>) -> Value {
        let name = &self.config.name;
        let tests = (0..self.remote.len()).map(|index| {
            let alert = Arc::clone(self);
            let kind = self.remote[index].form.kind();
            (kind, tokio::spawn(async move { alert.remote[index].test(&alert.config.name).await }))
        });
        let mut sinks = Vec::new();
        if self.log_results.is_some() {
            self.write_log(&format!("tidegate alert {name}: this is a test"));
            sinks.push(json!({ "sink": "log", "sent": true }));
        }
        for (kind, test) in tests.collect::<Vec<_>>() {
            sinks.push(match test.await.unwrap_or_else(|_| Err("the test broke off".to_owned())) {
                Ok(()) => json!({ "sink": kind, "sent": true }),
                Err(why) => json!({ "sink": kind, "sent": false, "error": why }),
            });
        }
        json!({ "alert": name, "sinks": sinks })
    }
}
