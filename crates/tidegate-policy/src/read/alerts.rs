//! `[alert.*]`: the events that are reported to people, and the receivers of the messages.

use tidegate_core::Span;

use super::forms::{Custom, FLAG, Maybe, SECRET, SHARE, TABLE, Whole, Words, names};
use super::{DocumentReader, all_or_none, join_names};
use crate::alerts::{
    AlertConfig, AlertTrigger, TelegramConfig, WebhookConfig, WebhookFormat, WebhookPlace, WebhookUrl,
};
use crate::document::{TextRange, TomlEntry, TomlNode, TomlTable, TomlValue};
use crate::environment::fold_member_name;
use crate::error::quoted;
use crate::nearest::nearest;
use crate::outbound::BaseUrl;
use crate::secret::SecretSource;
use crate::settings::SettingType::{Strings, Text};
use crate::settings::key::{Below, read_keys, setting_keys};

/// The most alerts in a policy.
const MAX_ALERTS: usize = 64;
/// The longest time for which events are collected, and for which a state isn't reported again.
const MAX_GROUP: Span = Span::from_secs(3600);
const MAX_REPEAT: Span = Span::from_secs(30 * 86_400);
/// The highest amplification of traffic.
const MAX_AMPLIFICATION: u32 = 100;
/// The longest name of a chat, in bytes.
const MAX_CHAT: usize = 128;
const PATH: &str = "alert.*";

setting_keys! {
    ALERT: AlertKeys {
        on: Vec<AlertTrigger> = "", Custom(Strings, "an event, or a list of events", |reader, node, _| reader.triggers(node)),
            "the events that it reports: blocked, flood, breaker_open, credential_out, all_cooling, store_lost, store_full, quota, retries, shadow or reload_failed";
        log: bool = "false", FLAG, "true to write its messages to the log";
        webhook: Option<WebhookPlace> = "",
            Maybe(Custom(Text, "a URL as https://HOST/PATH, or env:NAME or file:PATH", |reader, node, _| reader.webhook(node))),
            "the URL that its messages are sent to as JSON, or the place of the URL";
        format: WebhookFormat = "json", Words(&WebhookFormat::WORDS), "the form of a webhook's JSON: json or slack";
        telegram: () = "", TABLE, "", Below::Table(&TELEGRAM);
        group: Span = "10s", Custom(Text, "a duration of at most an hour", |reader, node, key| reader.span_up_to(node, key, MAX_GROUP)),
            "the time within which events make one message; the first is sent at once";
        repeat: Span = "1h", Custom(Text, "a duration of at most 30 days", |reader, node, key| reader.span_up_to(node, key, MAX_REPEAT)),
            "the time for which the same state isn't reported again";
        flood: u64 = "100", Whole(1, 1_000_000_000), "the refusals per second, over ten seconds, above which there is a flood";
        quota: u16 = "80%", SHARE, "the used share of a provider's quota that is reported, as well as all of it";
        retries: u32 = "2", Custom(Text, "a factor from 1.001 to 100", |reader, node, key| reader.factor(node, key, MAX_AMPLIFICATION)),
            "the amplification of a provider's traffic by retries, over a minute, that is still fine";
        shadow: u16 = "1%", SHARE, "the share of calls, over a minute, that a limit in shadow mode may refuse";
    }

    TELEGRAM: TelegramKeys {
        token: Option<SecretSource> = "", Maybe(SECRET), "the place of the bot's token: env:NAME or file:PATH";
        chat: Option<String> = "", Maybe(Custom(Text, "a chat's number, or @NAME of a channel", |reader, node, _| reader.chat(node))),
            "the chat that the bot writes to";
        base_url: BaseUrl = "https://api.telegram.org",
            Custom(Text, "a URL as https://HOST/PATH", |reader, node, _| reader.base_url(node)), "the root of the Bot API";
    }
}

/// The events with a number of their own.
const THRESHOLDS: [(&str, AlertTrigger); 4] = [
    ("flood", AlertTrigger::Flood),
    ("quota", AlertTrigger::Quota),
    ("retries", AlertTrigger::Retries),
    ("shadow", AlertTrigger::Shadow),
];

impl DocumentReader<'_> {
    /// Reads all alerts. `has_metrics` is false if decisions aren't counted.
    pub(super) fn alerts(&mut self, root: &TomlTable, has_metrics: bool) -> Option<Vec<AlertConfig>> {
        const FORM: &str = "a section for each alert, [alert.NAME]";
        let Some(entry) = root.get("alert") else { return Some(Vec::new()) };
        let Some(table) = entry.node.as_table() else {
            // The value may be a misplaced secret.
            return self.error(entry.key_at, "`alert` is no table", FORM).none();
        };
        if table.entries.len() > MAX_ALERTS {
            let message = format!("there are {} alerts", table.entries.len());
            return self.error(entry.key_at, message, format!("at most {MAX_ALERTS}")).none();
        }
        all_or_none(table.entries.iter().enumerate().map(|(index, entry)| {
            let folded = fold_member_name(&entry.key);
            let alike = table.entries[..index].iter().find(|other| fold_member_name(&other.key) == folded);
            if let Some(other) = alike {
                self.report_alike((&entry.key, entry.key_at), (&other.key, other.key_at));
            }
            self.alert(entry, has_metrics).filter(|_| alike.is_none())
        }))
    }

    fn alert(&mut self, entry: &TomlEntry, has_metrics: bool) -> Option<AlertConfig> {
        let name = &entry.key;
        self.section_name.clone_from(name);
        let Some(table) = entry.node.as_table() else {
            if crate::settings::table_keys(PATH).contains(&name.as_str()) {
                let message = format!("{} stands outside of any alert", quoted(name));
                let error = self.error(entry.key_at, message, "a section for each alert, [alert.NAME]");
                return error.help("give the alert a name, such as [alert.ops]").none();
            }
            let message = format!("the alert {} is no table", quoted(name));
            return self.error(entry.key_at, message, format!("a section of its own, [alert.{name}]")).none();
        };
        let name_is_valid = self.check_name(name, entry.key_at, "alert");
        self.check_keys(table, PATH);
        read_keys!(self, table, ALERT: on, log, webhook, format, group, repeat, flood, quota, retries, shadow);
        let telegram = self.telegram(table);
        let (on, webhook, format, telegram) = (on?, webhook?, format?, telegram?);
        let is_complete = self.check_alert(table, entry.key_at, &on, has_metrics);
        (name_is_valid && is_complete).then_some(AlertConfig {
            name: name.clone(),
            on,
            log: log?,
            webhook: webhook.map(|place| WebhookConfig { place, format }),
            telegram,
            group: group?,
            repeat: repeat?,
            flood: flood?,
            quota: quota?,
            retries: retries?,
            shadow: shadow?,
        })
    }

    /// Checks that an alert has events and a sink, and no setting without an effect.
    fn check_alert(&mut self, table: &TomlTable, at: TextRange, on: &[AlertTrigger], has_metrics: bool) -> bool {
        let before = self.errors.count();
        let name = quoted(&self.section_name);
        if on.is_empty() && !self.has_misspelling_of(table, PATH, "on") {
            let message = format!("the alert {name} has no event in `on`, so it would report nothing");
            self.report(at, message, "the events that it reports, such as on = [\"blocked\", \"store_lost\"]");
        }
        let sinks = ["log", "webhook", "telegram"];
        let is_sink = |key: &&str| table.node(key).is_some_and(|node| !matches!(node.value, TomlValue::Boolean(false)));
        if !sinks.iter().any(is_sink) && !sinks.iter().any(|key| self.has_misspelling_of(table, PATH, key)) {
            let message = format!("the alert {name} has no receiver");
            let expected =
                "log = true, webhook = \"env:NAME\" or telegram = { token = \"env:NAME\", chat = \"NUMBER\" }";
            self.report(at, message, expected);
        }
        if let Some(entry) = table.get("format").filter(|_| table.get("webhook").is_none()) {
            self.report(entry.key_at, "`format` has no effect without a `webhook`", "a `webhook` beside it");
        }
        for (key, trigger) in THRESHOLDS {
            if let Some(entry) = table.get(key).filter(|_| !on.is_empty() && !on.contains(&trigger)) {
                let message = format!("`{key}` has no effect, because `on` doesn't name that event");
                self.report(entry.key_at, message, format!("\"{key}\" in the list `on`"));
            }
        }
        let counted = on.iter().find(|trigger| matches!(trigger, AlertTrigger::Flood | AlertTrigger::Shadow));
        if let Some(trigger) = counted.filter(|_| !has_metrics) {
            let at = table.node("on").map_or(at, |node| node.at);
            let message = format!("`{}` needs the counts of decisions, which admin.metrics turns off", trigger.name());
            self.report(at, message, "admin.metrics = true from the start of the program, or another event");
        }
        self.errors.count() == before
    }

    fn triggers(&mut self, node: &TomlNode) -> Option<Vec<AlertTrigger>> {
        let words = names(&AlertTrigger::WORDS);
        let expected = join_names(&words);
        let texts = self.strings(node, "on", &expected)?;
        let read = |(text, item): (&'_ str, &TomlNode)| {
            let found = AlertTrigger::WORDS.iter().find(|(word, _)| *word == text).map(|(_, trigger)| *trigger);
            if found.is_none() {
                let error = self.error(item.at, format!("unknown event {}", quoted(text)), &expected);
                error.did_you_mean(nearest(text, words.iter().copied()));
            }
            found
        };
        let triggers = texts.iter().map(|(text, item)| (*text, *item)).map(read).collect::<Vec<_>>();
        let items = triggers.into_iter().zip(texts).map(|(trigger, (text, item))| (trigger, item.at, text)).collect();
        self.distinct(items, |text| format!("`on` has {} twice", quoted(text)), "each event once")
    }

    fn webhook(&mut self, node: &TomlNode) -> Option<WebhookPlace> {
        const EXPECTED: &str =
            "a URL such as \"https://hooks.example.com/…\", or where it is: \"env:NAME\" or \"file:PATH\"";
        match node.as_str() {
            Some(text) if text.starts_with("env:") || text.starts_with("file:") => {
                self.secret_source(node, "webhook").map(WebhookPlace::Secret)
            }
            // A webhook's URL is often a secret, so the error hides it.
            text => match text.and_then(|text| WebhookUrl::parse(text).ok()) {
                Some(url) => Some(WebhookPlace::Policy(url)),
                None => self.hidden_error(node.at, "`webhook` is neither a URL nor the place of one", EXPECTED).none(),
            },
        }
    }

    /// Reads `telegram`; `None` inside if the alert has none.
    fn telegram(&mut self, alert: &TomlTable) -> Option<Option<TelegramConfig>> {
        const FORM: &str = "telegram = { token = \"env:NAME\", chat = \"NUMBER\" }";
        let Some(entry) = alert.get("telegram") else { return Some(None) };
        let path = format!("{PATH}.telegram");
        if entry.node.as_table().is_none() {
            return self.hidden_error(entry.node.at, "`telegram` is no table", FORM).none();
        }
        let table = self.section(Some(alert), "telegram", &path)?;
        read_keys!(self, table, TELEGRAM: token, chat, base_url);
        let (token, chat, base_url) = (token?, chat?, base_url?);
        for (key, is_missing) in [("token", token.is_none()), ("chat", chat.is_none())] {
            if is_missing && !self.has_misspelling_of(table, &path, key) {
                let message = format!("`telegram` has no `{key}`");
                self.report(entry.key_at, message, FORM);
            }
        }
        Some(Some(TelegramConfig { token: token?, chat: chat?, base_url }))
    }

    fn chat(&mut self, node: &TomlNode) -> Option<String> {
        const EXPECTED: &str =
            "a chat's number, such as \"-1001234567890\", or a channel's name, such as \"@my_channel\"";
        if let TomlValue::Integer(Some(number)) = node.value {
            return Some(number.to_string());
        }
        let text = node.as_str().unwrap_or_default();
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let name = text.strip_prefix(['@', '-']).unwrap_or(text);
        let is_chat = text.starts_with('@') || name.bytes().all(|byte| byte.is_ascii_digit());
        if !is_chat || name.is_empty() || !name.bytes().all(fits) || text.len() > MAX_CHAT {
            // The token of the bot may stand in its place.
            return self.hidden_error(node.at, "`chat` is neither a number nor a channel's name", EXPECTED).none();
        }
        Some(text.to_owned())
    }

    fn span_up_to(&mut self, node: &TomlNode, key: &str, most: Span) -> Option<Span> {
        let span = self.duration(node, key)?;
        if span > most {
            return self.error(node.at, format!("`{key}` is longer than {most}"), "a shorter duration").none();
        }
        Some(span)
    }
}
