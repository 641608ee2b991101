//! `[alert.*]`: the events that are reported to people, and the receivers of the messages.

use std::fmt;

use http::Uri;
use http::uri::{Authority, PathAndQuery, Scheme};
use tidegate_core::Span;

use crate::outbound::BaseUrl;
use crate::secret::{Secret, SecretError, SecretSource};
use crate::units::{describe_duration, format_percent};

/// An event that an alert can report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum AlertTrigger {
    /// A block of a client has begun.
    Blocked,
    /// More requests per second are refused than [`AlertConfig::flood`].
    Flood,
    /// The circuit breaker of a provider is open.
    BreakerOpen,
    /// A provider has rejected a credential.
    CredentialOut,
    /// All credentials of a provider cool down, so that calls wait.
    AllCooling,
    /// Decisions are made without the store.
    StoreLost,
    /// The store is full and loses state that still counts.
    StoreFull,
    /// The share [`AlertConfig::quota`] of a provider's calendar quota is used.
    Quota,
    /// Retries amplify the traffic to a provider by more than [`AlertConfig::retries`].
    Retries,
    /// A limit in shadow mode would refuse more than the share [`AlertConfig::shadow`].
    Shadow,
    /// The policy was read again, but can't be used.
    ReloadFailed,
}

impl AlertTrigger {
    /// The words of a policy.
    pub(crate) const WORDS: [(&'static str, Self); 11] = [
        ("blocked", Self::Blocked),
        ("flood", Self::Flood),
        ("breaker_open", Self::BreakerOpen),
        ("credential_out", Self::CredentialOut),
        ("all_cooling", Self::AllCooling),
        ("store_lost", Self::StoreLost),
        ("store_full", Self::StoreFull),
        ("quota", Self::Quota),
        ("retries", Self::Retries),
        ("shadow", Self::Shadow),
        ("reload_failed", Self::ReloadFailed),
    ];

    /// The word in the file.
    pub fn name(self) -> &'static str {
        Self::WORDS[self as usize].0
    }
}

/// An alert: its events, its receivers, and the times between messages.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AlertConfig {
    /// The name.
    pub name: String,
    /// The events that it reports, each once.
    pub on: Vec<AlertTrigger>,
    /// The refusals per second, above which there is a flood. Default 100.
    pub flood: u64,
    /// The share of a quota that is reported, in thousandths. Default 80 %. A used-up quota is reported as well.
    pub quota: u16,
    /// The amplification of traffic by retries that is still fine, in thousandths. Default 2.
    pub retries: u32,
    /// The share of an action's calls that a shadow limit may refuse, in thousandths. Default 1 %.
    pub shadow: u16,
    /// The time within which events make one message. Default 10 s.
    pub group: Span,
    /// The time for which the same state isn't reported again. Default 1 h.
    pub repeat: Span,
    /// True if messages are lines of the log.
    pub log: bool,
    /// The webhook that receives messages.
    pub webhook: Option<WebhookConfig>,
    /// The chat that receives messages.
    pub telegram: Option<TelegramConfig>,
}

impl AlertConfig {
    /// Describes the alert in words. Of secrets, only the places are shown.
    pub fn describe(&self) -> String {
        let events: Vec<String> = self.on.iter().map(|trigger| self.describe_trigger(*trigger)).collect();
        let log = self.log.then(|| "the log".to_owned());
        let webhook = self.webhook.as_ref().map(|WebhookConfig { place, format }| match format {
            WebhookFormat::Json => format!("a webhook ({place})"),
            WebhookFormat::Slack => format!("a webhook of Slack ({place})"),
        });
        let telegram = self.telegram.as_ref().map(|it| format!("the chat {} of Telegram ({})", it.chat, it.token));
        let sinks: Vec<String> = log.into_iter().chain(webhook).chain(telegram).collect();
        let [group, repeat] = [self.group, self.repeat].map(describe_duration);
        format!(
            "{}: {}\n  to {}\n  events within {group} in one message, the same again after {repeat}\n",
            self.name,
            events.join(", "),
            sinks.join(" and ")
        )
    }

    fn describe_trigger(&self, trigger: AlertTrigger) -> String {
        let name = trigger.name();
        match trigger {
            AlertTrigger::Flood => format!("{name} (over {} refusals per second)", self.flood),
            AlertTrigger::Quota => format!("{name} ({} used)", format_percent(self.quota)),
            AlertTrigger::Retries => format!("{name} (traffic times {})", f64::from(self.retries) / 1000.0),
            AlertTrigger::Shadow => format!("{name} (over {} of calls)", format_percent(self.shadow)),
            _ => name.to_owned(),
        }
    }
}

/// A webhook: messages are sent as `POST` with JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WebhookConfig {
    /// The place of the URL.
    pub place: WebhookPlace,
    /// The form of the JSON.
    pub format: WebhookFormat,
}

/// The place of a webhook's URL, which often contains a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WebhookPlace {
    /// In the policy.
    Policy(WebhookUrl),
    /// Elsewhere.
    Secret(SecretSource),
}

impl fmt::Display for WebhookPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(url) => write!(f, "{}", url.base.authority),
            Self::Secret(source) => write!(f, "{source}"),
        }
    }
}

impl WebhookPlace {
    /// Fetches the URL; `env` looks up an environment variable.
    ///
    /// # Errors
    /// The secret can't be read, or isn't a URL. The error doesn't show it.
    pub fn resolve(&self, env: impl FnOnce(&str) -> Option<String>) -> Result<WebhookUrl, WebhookError> {
        match self {
            Self::Policy(url) => Ok(url.clone()),
            Self::Secret(source) => WebhookUrl::parse(source.resolve(env)?.expose()),
        }
    }
}

/// The reason why there is no URL of a webhook. Never contains the URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WebhookError {
    /// The secret can't be read.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The text is no URL, or one with a user name.
    #[error("the URL of the webhook isn't one as https://HOST/PATH")]
    Malformed,
}

/// The URL of a webhook. Its path and query are never printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookUrl {
    base: BaseUrl,
    target: Secret,
}

impl WebhookUrl {
    /// Parses an `http` or `https` URL.
    ///
    /// # Errors
    /// [`WebhookError::Malformed`].
    pub fn parse(text: &str) -> Result<Self, WebhookError> {
        let uri: Uri = text.parse().map_err(|_| WebhookError::Malformed)?;
        let is_fine = |authority: &&Authority| !authority.as_str().contains('@') && !authority.host().is_empty();
        let authority = uri.authority().filter(is_fine).ok_or(WebhookError::Malformed)?;
        let https = match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTPS => true,
            Some(scheme) if *scheme == Scheme::HTTP => false,
            _ => return Err(WebhookError::Malformed),
        };
        let target = uri.path_and_query().map_or("/", PathAndQuery::as_str);
        Ok(Self { base: BaseUrl::new(https, authority.clone(), ""), target: Secret::new(target) })
    }

    /// The scheme and the host.
    pub fn base(&self) -> &BaseUrl {
        &self.base
    }

    /// The path and the query.
    pub fn target(&self) -> &Secret {
        &self.target
    }
}

/// The form of a webhook's JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WebhookFormat {
    /// An object with the alert, its events and a text.
    Json,
    /// An object with a `text` for Slack.
    Slack,
}

impl WebhookFormat {
    pub(crate) const WORDS: [(&'static str, Self); 2] = [("json", Self::Json), ("slack", Self::Slack)];
}

/// A chat of Telegram, which a bot writes to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TelegramConfig {
    /// The place of the bot's token.
    pub token: SecretSource,
    /// The chat's number, or a channel's name.
    pub chat: String,
    /// The root of the Bot API.
    pub base_url: BaseUrl,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Policy, PolicySources};

    const ALERTS: &str = r#"
[alert.ops]
on = ["blocked", "flood", "quota", "retries", "shadow"]
log = true
webhook = "https://hooks.example.com/T0/s3cr3t?sig=s3cr3t"
format = "slack"
retries = 1.5
[alert.night]
on = "store_lost"
telegram = { token = "env:BOT", chat = -1001 }
group = "1m"
"#;

    #[test]
    fn alerts_are_described_without_secrets() {
        let policy = Policy::load(PolicySources::new().file("t", ALERTS)).unwrap();
        let words: String = policy.alerts().iter().map(AlertConfig::describe).collect();
        assert_eq!(
            words,
            "ops: blocked, flood (over 100 refusals per second), quota (80 % used), retries (traffic times 1.5), \
             shadow (over 1 % of calls)\n  to the log and a webhook of Slack (hooks.example.com)\n  \
             events within 10 s in one message, the same again after 1 h\n\
             night: store_lost\n  to the chat -1001 of Telegram (env:BOT)\n  \
             events within 60 s in one message, the same again after 1 h\n"
        );
        assert!(!format!("{policy:?}").contains("s3cr3t"));
    }

    #[test]
    fn counts_for_alerts_are_those_of_the_running_program() {
        let read = |text: &str| PolicySources::new().file("t", text);
        let alert = "[alert.ops]\non = \"flood\"\nlog = true\n";
        let (counting, uncounted) = ("", "[admin]\nmetrics = false\n");
        for (present, next, is_fine) in
            [(counting, counting, true), (counting, uncounted, true), (uncounted, counting, false)]
        {
            let present = Policy::load(read(&format!("{present}[api]\n"))).unwrap();
            let next = present.load_next(read(&format!("{next}{alert}")));
            let told = next.as_ref().map_or_else(ToString::to_string, |_| String::new());
            assert_eq!(told.contains("needs the counts of decisions"), !is_fine, "{told}");
            assert_eq!(next.is_ok(), is_fine, "{told}");
        }
        assert!(Policy::load(read(&format!("{uncounted}{alert}"))).is_err());
    }

    #[test]
    fn webhook_urls_keep_their_query() {
        let url = WebhookUrl::parse("https://a.example:8443/in?x=1&y=%20").unwrap();
        assert_eq!((url.base().is_https(), url.base().authority().as_str()), (true, "a.example:8443"));
        assert_eq!(url.target().expose(), "/in?x=1&y=%20");
        assert_eq!(WebhookUrl::parse("http://127.0.0.1").unwrap().target().expose(), "/");
        for wrong in
            ["", "a.example/x", "/x", "ftp://a.example", "https://u:p@a.example/", "https:///x", "https://a b/"]
        {
            assert_eq!(WebhookUrl::parse(wrong), Err(WebhookError::Malformed), "{wrong}");
        }
    }
}
