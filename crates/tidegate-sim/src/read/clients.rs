//! The reader of strategies and clients.

use tidegate_core::PacerSpec;
use tidegate_policy::Policy;
use tidegate_policy::document::{DocumentReader, TomlTable, TomlValue};
use tidegate_policy::outbound::PaceConfig;

use super::values::{self, choice, count, optional, reject, value_or};
use super::{TitledSection, section};
use crate::setup::{ClientSpec, ControllerKind, PlainClientSpec};

/// The keys of a strategy that override the scenario's own sections.
pub(super) const OVERRIDE_KEYS: [&str; 3] = ["inbound", "outbound", "store"];

/// The keys of plain clients only.
const PLAIN_KEYS: [&str; 10] = [
    "attempts",
    "backoff",
    "pace",
    "budget",
    "in_flight",
    "control",
    "queue",
    "timeout",
    "deadline",
    "honours_retry_after",
];

/// Returns the keys of a strategy besides its title.
pub(super) fn strategy_keys() -> Vec<&'static str> {
    [&["client", "provider"][..], &PLAIN_KEYS, &["gate"], &OVERRIDE_KEYS].concat()
}

/// Reads a strategy's client, over the defaults of `[client]` for plain ones. A strategy without keys is Tidegate if
/// there are providers.
pub(super) fn client(
    reader: &mut DocumentReader<'_>,
    root: &TomlTable,
    strategy: &TitledSection,
    policy: Option<&Policy>,
) -> Option<ClientSpec> {
    const KINDS: [(&str, bool); 2] = [("plain", false), ("tidegate", true)];
    let common = section(reader, root, "client", &PLAIN_KEYS)?.unwrap_or_default();
    let own = &strategy.table;
    let is_default = own.entries.is_empty() && policy.is_some_and(|policy| policy.outbound().is_some());
    if !value_or(reader, own, "client", is_default, choice(&KINDS))? {
        return plain(reader, &common.merged_with(own)).map(ClientSpec::Plain);
    }
    if let Some(entry) = own.entries.iter().find(|entry| PLAIN_KEYS.contains(&entry.key.as_str())) {
        let message = format!("`{}` is of plain clients", entry.key);
        return reject(reader, entry.key_at, message, "what a provider of [outbound] says");
    }
    provider(reader, own, policy)
}

fn provider(reader: &mut DocumentReader<'_>, own: &TomlTable, policy: Option<&Policy>) -> Option<ClientSpec> {
    let providers = policy.and_then(Policy::outbound).map_or(&[][..], |outbound| outbound.providers());
    let names: Vec<&str> = providers.iter().map(|provider| provider.name.as_str()).collect();
    let provider = match own.node("provider") {
        Some(node) => {
            let name = reader.string(node, "provider", "a provider's name")?;
            let found = names.iter().position(|known| *known == name);
            if found.is_none() {
                reader.report_unknown(node.at, &format!("there is no provider `{name}`"), name, &names);
            }
            found?
        }
        None if names.len() == 1 => 0,
        None => {
            reader.report_missing(
                "a strategy's `client` is \"tidegate\", but the provider that it calls is missing",
                "one [outbound.provider.NAME], or `provider = \"NAME\"` in the strategy",
            );
            return None;
        }
    };
    if providers[provider].hedge_after.is_some() {
        reader.report_missing("`hedge_after` can't be simulated", "a provider without it");
        return None;
    }
    Some(ClientSpec::Tidegate { provider })
}

fn plain(reader: &mut DocumentReader<'_>, table: &TomlTable) -> Option<PlainClientSpec> {
    let attempts = value_or(reader, table, "attempts", Some(1), |reader, node, key| match &node.value {
        TomlValue::String(_) => reader.choice(node, key, &[("unlimited", None)]),
        _ => count(1..=1_000_000)(reader, node, key).map(Some),
    });
    let backoff = section(reader, table, "backoff", &["growth", "base", "cap", "jitter"])?;
    let backoff = backoff.map_or(Some(None), |section| values::backoff(reader, &section).map(Some));
    let pacer = pacer(reader, table);
    let budget = section(reader, table, "budget", &["ratio", "min", "reserve"])?;
    let budget = budget.map_or(Some(None), |section| values::budget(reader, &section).map(Some));
    let in_flight = optional(reader, table, "in_flight", count(1..=1_000_000));
    let control = optional(reader, table, "control", choice(&ControllerKind::ALL));
    let queue = value_or(reader, table, "queue", 1000, count(1..=1_000_000));
    let timeout = optional(reader, table, "timeout", DocumentReader::duration);
    let deadline = optional(reader, table, "deadline", DocumentReader::duration);
    let honours_retry_after = value_or(reader, table, "honours_retry_after", false, DocumentReader::boolean);
    if let (Some(entry), Some(_)) = (table.get("in_flight"), table.get("control")) {
        let expected = "the number `in_flight` or the `control` that finds it, not both";
        return reject(reader, entry.key_at, "how many calls may be in flight is said twice", expected);
    }
    Some(PlainClientSpec {
        attempts: attempts?,
        backoff: backoff?,
        pacer: pacer?,
        budget: budget?,
        in_flight: in_flight?,
        control: control?,
        queue: queue?,
        timeout: timeout?,
        deadline: deadline?,
        honours_retry_after: honours_retry_after?,
    })
}

/// Reads a plain client's pace, in the form of a provider's `pace`.
fn pacer(reader: &mut DocumentReader<'_>, table: &TomlTable) -> Option<Option<PacerSpec>> {
    let Some(entry) = table.get("pace") else { return Some(None) };
    if let Some(backoff) = table.get("backoff") {
        let expected = "the `backoff` of each call or the `pace` of all, not both";
        return reject(reader, backoff.key_at, "how long to wait is said twice", expected);
    }
    match reader.pace(table)? {
        PaceConfig::Responsive(spec) => Some(Some(spec)),
        _ => {
            let expected = "a pace by \"responsive\", or a provider of [outbound]";
            reject(reader, entry.node.at, "a plain client has no such `pace`", expected)
        }
    }
}
