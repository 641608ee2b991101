//! Alerts: events that are sent to people. A [driver] reads events and counts; a [group] decides about messages; a [sink]
//! sends them, and obeys the waits in replies. Nothing waits for them.

mod driver;
mod group;
mod message;
mod meter;
mod sink;

use std::array;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tidegate::Time;
use tidegate_policy::alerts::{AlertConfig, TelegramConfig, WebhookError, WebhookUrl};
use tidegate_policy::outbound::BaseUrl;
use tidegate_policy::{Policy, Secret};
use tidegate_runtime::counters::Counters;
use tokio::sync::watch;

pub(crate) use self::driver::{quota_percent, run_alerts};
use self::group::{Group, Message};
pub(crate) use self::sink::SinkResult;
use self::sink::{RemoteSink, SinkForm};
use crate::ServeError;
use crate::gateway::provider_client::tls_config;
use crate::log::EscapedError;
use crate::states::SharedParts;

/// The time for the last messages when the server stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// The alerts of a policy.
pub(crate) struct AlertSet {
    alerts: Vec<Arc<Alert>>,
    /// The number of messages that are on their way, also of alerts of earlier policies.
    undelivered: watch::Sender<usize>,
}

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
        let undelivered = earlier.map(|earlier| earlier.undelivered.clone()).unwrap_or_default();
        let alerts = policy.alerts().iter().map(|config| {
            let invalid = |source| ServeError::Alert { alert: config.name.clone(), source };
            let places = SinkPlaces::resolve(config, parts).map_err(invalid)?;
            let is_same = |alert: &&Arc<Alert>| alert.config == *config && alert.places == places;
            let earlier = earlier.and_then(|earlier| earlier.find(&config.name));
            if let Some(same) = earlier.filter(is_same) {
                return Ok(Arc::clone(same));
            }
            // Reading the system's root certificates is slow, and some systems have none.
            let tls = match &mut tls {
                Some(tls) => tls,
                None if places.uses_tls(config) => tls.insert(tls_config().map_err(ServeError::RootCertificates)?),
                None => &mut no_tls(),
            };
            Alert::start(config, places, tls, &undelivered, earlier).map(Arc::new).map_err(invalid)
        });
        Ok(Self { alerts: alerts.collect::<Result<_, _>>()?, undelivered: undelivered.clone() })
    }

    /// The alert with this name.
    pub(crate) fn find(&self, name: &str) -> Option<&Arc<Alert>> {
        self.alerts.iter().find(|alert| alert.config.name == name)
    }

    /// The names of the alerts.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.alerts.iter().map(|alert| alert.config.name.as_str())
    }

    /// For each alert and each of its receivers, the number of each [`SinkResult`].
    pub(crate) fn results(&self) -> Vec<(String, &'static str, [u64; SinkResult::NAMES.len()])> {
        let of_alert = |alert: &Arc<Alert>| {
            let name = alert.config.name.clone();
            let counts = |counters: &Counters| array::from_fn(|result| counters.get(result));
            alert.results().map(|(sink, counters)| (name.clone(), sink, counts(counters))).collect::<Vec<_>>()
        };
        self.alerts.iter().flat_map(of_alert).collect()
    }

    /// Sends what waits, and gives the last messages a short time to arrive.
    pub(crate) async fn finish(&self, now: Time) {
        self.alerts.iter().for_each(|alert| alert.send_pending(now));
        let mut undelivered = self.undelivered.subscribe();
        let all_delivered = undelivered.wait_for(|messages| *messages == 0);
        if tokio::time::timeout(STOP_TIMEOUT, all_delivered).await.is_err() {
            let messages = *self.undelivered.borrow();
            tracing::warn!(messages, "the last messages of alerts weren't delivered");
        }
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
        tls: &ClientConfig,
        undelivered: &watch::Sender<usize>,
        earlier: Option<&Arc<Self>>,
    ) -> Result<Self, WebhookError> {
        // Counts go on with those of the alert that had the name before.
        let results = |sink| {
            let known = earlier.and_then(|earlier| earlier.results().find(|(found, _)| *found == sink));
            known.map_or_else(|| Counters::new(SinkResult::NAMES.len()), |(_, results)| results.clone())
        };
        let start = |form: SinkForm, base, target: &Secret| {
            let results = results(form.kind());
            RemoteSink::start(config, form, base, target.clone(), tls.clone(), results, undelivered.clone())
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

    /// The counters of its receivers, by kind.
    fn results(&self) -> impl Iterator<Item = (&'static str, &Counters)> {
        let log = self.log_results.as_ref().map(|results| ("log", results));
        log.into_iter().chain(self.remote.iter().map(|sink| (sink.form.kind(), sink.results())))
    }

    /// Goes on with the states that an earlier alert of this name has reported.
    fn follow(&self, earlier: &Self) {
        self.group.lock().take_states(&mut earlier.group.lock(), &self.config.on);
    }

    /// Sends what waits, due or not.
    fn send_pending(&self, now: Time) {
        let pending = self.group.lock().take_pending();
        if let Some(message) = pending {
            self.send(&message, now);
        }
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
            tracing::warn!(text = %EscapedError(text), "alert");
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
