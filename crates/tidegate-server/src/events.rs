//! The changes of state that operators watch: blocks of clients, providers, credentials, breakers, the store and quotas.

mod provider_events;
mod stream;
mod watcher;

use std::fmt;
use std::net::IpAddr;

use serde::Serialize;
use serde_json::{Map, Value};
use tidegate::Time;
use tidegate::store::Losses;
use tidegate_core::Key;
use tidegate_core::time::UtcText;
use tidegate_policy::{describe_seconds, printable};
use tidegate_runtime::event_log::EventLog;

pub(crate) use self::provider_events::ProviderEventPublisher;
pub(crate) use self::stream::{EventStream, StreamPlaces, StreamReader};
pub(crate) use self::watcher::{watch_quotas, watch_store};

/// The number of events that are kept.
const CAPACITY: usize = 1024;

/// The events of a server.
pub(crate) type ServerEvents = EventLog<ServerEvent>;

/// Returns an empty log of events. Numbers begin at the time, so that a reader that knows those of an earlier process
/// misses nothing.
pub(crate) fn server_events(now: Time) -> ServerEvents {
    EventLog::new(CAPACITY, now.as_micros() / 1000)
}

/// A change of state.
#[derive(Clone, Debug)]
pub(crate) struct ServerEvent {
    pub(crate) at: Time,
    pub(crate) change: Change,
    /// The number of similar events before this one that weren't published.
    pub(crate) unpublished: u64,
}

/// The change of a [`ServerEvent`]. Times are in seconds, rounded up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Change {
    /// A block of a client has begun.
    Blocked {
        limit: String,
        ip: Option<IpAddr>,
        /// The parts of the key, as far as they may be shown.
        client: Map<String, Value>,
        /// The whole key, by which clients are told apart.
        #[serde(skip)]
        key: Key,
        seconds: u64,
        strikes: u8,
        by_operator: bool,
        shadow: bool,
    },
    /// The circuit breaker of a provider has changed its state.
    Breaker { provider: String, state: &'static str, failures: u32, reset_in: u64 },
    /// A provider has throttled a credential.
    CoolingDown { provider: String, credential: usize, seconds: Option<u64>, all_cooling: bool },
    /// A provider has rejected a credential.
    CredentialRejected { provider: String, credential: usize, seconds: u64 },
    /// An operator has stopped the calls to a provider.
    Paused { provider: String },
    /// An operator lets calls to a provider start again.
    Resumed { provider: String },
    /// An operator has closed the breaker of a provider and ended its cool-downs.
    Reset { provider: String },
    /// Decisions are made without the store.
    StoreLost { store: String },
    /// The store answers again.
    StoreBack { store: String, seconds: u64 },
    /// The store is full and has lost state that still counted.
    StoreFull { used: u64, exhausted: u64, unblocked: u64, shared: u64 },
    /// A share of a calendar quota of a provider is used: 80 or 100 per cent, or the share of an alert.
    QuotaUsed {
        provider: String,
        limit: String,
        credential: Option<usize>,
        percent: u64,
        /// The share that was reported before in the same period, in per cent.
        #[serde(skip)]
        reported: u64,
        resets_in: u64,
    },
    /// Another policy is in force. The settings of `restart_needed` changed, too, but are as before until a restart.
    Reloaded { restart_needed: Vec<&'static str> },
    /// The policy was read again, but can't be used, so that the one before goes on.
    ReloadFailed { error: String },
    /// The certificates of a listener were read again.
    CertificatesReplaced { listener: &'static str },
    /// The certificates of a listener have changed, but can't be used, so that those before stay.
    CertificatesKept { listener: &'static str, error: String },
}

impl From<&Losses> for Change {
    fn from(losses: &Losses) -> Self {
        let [used, exhausted, unblocked, shared] = losses.counts();
        Self::StoreFull { used, exhausted, unblocked, shared }
    }
}

impl ServerEvent {
    pub(crate) fn new(at: Time, change: Change) -> Self {
        Self { at, change, unpublished: 0 }
    }

    /// One of many similar events.
    pub(crate) fn after_unpublished(at: Time, change: Change, unpublished: u64) -> Self {
        Self { at, change, unpublished }
    }

    /// The event as a JSON object, with its number.
    pub(crate) fn json(&self, number: u64) -> serde_json::Value {
        let mut object = serde_json::to_value(&self.change).unwrap_or_default();
        object["id"] = number.into();
        object["time"] = self.utc().into();
        object["unix_ms"] = (self.at.as_micros() / 1000).into();
        object["unpublished"] = self.unpublished.into();
        object["message"] = self.message().into();
        object
    }

    /// Its time, such as `2026-11-21 12:01:45Z`.
    pub(crate) fn utc(&self) -> String {
        UtcText::rounded_down(self.at).to_string()
    }

    /// The event in words.
    pub(crate) fn message(&self) -> String {
        match self.unpublished {
            0 => self.change.to_string(),
            1 => format!("{}; another one before it", self.change),
            others => format!("{}; {others} others before it", self.change),
        }
    }
}

/// The parts of a client's key as printable text, such as `203.0.113.7 key=alice`.
pub(crate) fn client_text(client: &Map<String, Value>) -> String {
    let part = |(name, value): (&String, &Value)| {
        let value = printable(value.as_str().unwrap_or_default());
        if name == "client_ip" { value.into_owned() } else { format!("{name}={value}") }
    };
    if client.is_empty() { "all clients".to_owned() } else { client.iter().map(part).collect::<Vec<_>>().join(" ") }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blocked { limit, client, seconds, strikes, by_operator, shadow, .. } => {
                f.write_str(&client_text(client))?;
                f.write_str(if *shadow { " would be" } else { " is" })?;
                write!(f, " blocked under {limit} for {} ", describe_seconds(*seconds))?;
                if *by_operator { f.write_str("by an operator") } else { write!(f, "after strike {strikes}") }
            }
            Self::Breaker { provider, state: "open", failures, reset_in } => {
                let wait = describe_seconds(*reset_in);
                write!(f, "{provider}: the circuit breaker is open after {failures} failures, for {wait}")
            }
            Self::Breaker { provider, state, .. } => write!(f, "{provider}: the circuit breaker is {state}"),
            Self::CoolingDown { provider, credential, seconds, all_cooling } => {
                write!(f, "{provider}: credential {credential} was throttled and cools down")?;
                if let Some(seconds) = seconds {
                    write!(f, " for {}", describe_seconds(*seconds))?;
                }
                if *all_cooling { f.write_str("; no other is usable, so calls wait") } else { Ok(()) }
            }
            Self::CredentialRejected { provider, credential, seconds } => {
                let wait = describe_seconds(*seconds);
                write!(f, "{provider}: credential {credential} was rejected and is left out for {wait}")
            }
            Self::Paused { provider } => write!(f, "{provider}: an operator has paused it, so calls are refused"),
            Self::Resumed { provider } => write!(f, "{provider}: an operator has resumed it"),
            Self::Reset { provider } => {
                write!(f, "{provider}: an operator has closed the circuit breaker and ended the cool-downs")
            }
            Self::StoreLost { store } => write!(f, "the store {store} is away: decisions are made without it"),
            Self::StoreBack { store, seconds } => {
                write!(f, "the store {store} is back after {}", describe_seconds(*seconds))
            }
            Self::StoreFull { used, exhausted, unblocked, shared } => write!(
                f,
                "the store is full: {used} clients with a part of their limit and {exhausted} with none left were \
                 forgotten, {unblocked} weren't blocked, {shared} answers by a network's limit"
            ),
            Self::QuotaUsed { provider, limit, credential, percent, resets_in, .. } => {
                write!(f, "{provider}: {percent} % of {limit} are used")?;
                if let Some(credential) = credential {
                    write!(f, " by credential {credential}")?;
                }
                write!(f, "; it starts again in {}", describe_seconds(*resets_in))
            }
            Self::Reloaded { restart_needed } if restart_needed.is_empty() => f.write_str("the policy was reloaded"),
            Self::Reloaded { restart_needed } => {
                write!(f, "the policy was reloaded; a restart is needed for {}", restart_needed.join(", "))
            }
            Self::ReloadFailed { error } => write!(f, "the policy wasn't reloaded: {error}"),
            Self::CertificatesReplaced { listener } => write!(f, "{listener}: the certificates were replaced"),
            Self::CertificatesKept { listener, error } => {
                write!(f, "{listener}: the new certificates can't be used, and those before stay: {error}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_times_of_an_event_agree() {
        for micros in [1_763_726_505_000_000, 1_763_726_505_000_001, 1_763_726_505_999_999] {
            let event = ServerEvent::new(Time::from_micros(micros), Change::Resumed { provider: "p".to_owned() });
            let json = event.json(1);
            assert_eq!((&json["time"], &json["unix_ms"]), (&"2025-11-21 12:01:45Z".into(), &(micros / 1000).into()));
        }
    }
}
