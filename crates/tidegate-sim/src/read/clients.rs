//! The reader of strategies and clients.

use tidegate_core::PacerSpec;
use tidegate_policy::Policy;
use tidegate_policy::document::{TomlTable, TomlValue};
use tidegate_policy::outbound::PaceConfig;

use super::{ScenarioReader, TitledSection, values};
use crate::setup::{ClientSpec, PlainClientSpec};

/// The keys of a strategy besides its title.
pub(super) const STRATEGY_KEYS: [&str; 13] = [
    "client",
    "provider",
    "attempts",
    "backoff",
    "pace",
    "budget",
    "in_flight",
    "timeout",
    "honours_retry_after",
    "gate",
    "inbound",
    "outbound",
    "store",
];

/// The keys of a strategy that override the scenario's own sections.
pub(super) const OVERRIDE_KEYS: [&str; 3] = ["inbound", "outbound", "store"];

#[derive(Clone, Copy)]
enum ClientKind {
    Plain,
    Tidegate,
}

const CLIENT_KINDS: [(&str, ClientKind); 2] = [("plain", ClientKind::Plain), ("tidegate", ClientKind::Tidegate)];
/// The keys of plain clients only.
const PLAIN_KEYS: [&str; 7] = ["attempts", "backoff", "pace", "budget", "in_flight", "timeout", "honours_retry_after"];

impl ScenarioReader<'_, '_> {
    /// Reads a strategy's client, over the defaults of `[client]` for all plain ones. A strategy without keys is
    /// Tidegate if there are providers.
    pub(super) fn client(
        &mut self,
        root: &TomlTable,
        strategy: &TitledSection,
        policy: Option<&Policy>,
    ) -> Option<ClientSpec> {
        let common = self.section(root, "client", &PLAIN_KEYS)?.unwrap_or_default();
        let own = &strategy.table;
        let outbound = policy.and_then(Policy::outbound);
        let ways = match own.node("client") {
            Some(node) => self.reader.choice(node, "client", &CLIENT_KINDS)?,
            None if own.entries.is_empty() && outbound.is_some() => ClientKind::Tidegate,
            None => ClientKind::Plain,
        };
        match ways {
            ClientKind::Plain => self.plain(&common.merged_with(own)).map(ClientSpec::Plain),
            ClientKind::Tidegate => {
                if let Some(entry) = own.entries.iter().find(|entry| PLAIN_KEYS.contains(&entry.key.as_str())) {
                    let message = format!("`{}` is of plain clients", entry.key);
                    self.reader.report(entry.key_at, message, "what a provider of [outbound] says");
                    return None;
                }
                self.provider(own, policy)
            }
        }
    }

    fn provider(&mut self, own: &TomlTable, policy: Option<&Policy>) -> Option<ClientSpec> {
        let providers = policy.and_then(Policy::outbound).map_or(&[][..], |outbound| outbound.providers());
        let names: Vec<&str> = providers.iter().map(|provider| provider.name.as_str()).collect();
        let node = own.node("provider");
        let wanted =
            node.map_or(Some(None), |node| self.reader.string(node, "provider", "a provider's name").map(Some))?;
        let found = match wanted {
            Some(wanted) => names.iter().position(|name| *name == wanted),
            None => Some(0).filter(|_| names.len() == 1),
        };
        let Some(provider) = found else {
            match (node, wanted) {
                (Some(node), Some(wanted)) => {
                    self.reader.report_unknown(node.at, &format!("there is no provider `{wanted}`"), wanted, &names);
                }
                _ => self.reader.report_missing(
                    "a strategy's `client` is \"tidegate\", and it isn't said whom it calls",
                    "one [outbound.provider.NAME], or `provider = \"NAME\"` in the strategy",
                ),
            }
            return None;
        };
        if providers[provider].hedge_after.is_some() {
            self.reader.report_missing("`hedge_after` can't be simulated", "a provider without it");
            return None;
        }
        Some(ClientSpec::Tidegate { provider })
    }

    fn plain(&mut self, table: &TomlTable) -> Option<PlainClientSpec> {
        let reader = &mut *self.reader;
        const FOREVER: [(&str, ()); 1] = [("unlimited", ())];
        let attempts = table.node("attempts").map_or(Some(Some(1)), |node| match &node.value {
            TomlValue::String(_) => reader.choice(node, "attempts", &FOREVER).map(|()| None),
            _ => reader.integer(node, "attempts", 1..=1_000_000).map(|count| Some(count as u32)),
        });
        let backoff = match self.section(table, "backoff", &["growth", "base", "cap", "jitter"])? {
            Some(section) => values::backoff(self.reader, &section).map(Some),
            None => Some(None),
        };
        let pacer = self.pacer(table);
        let budget = match self.section(table, "budget", &["ratio", "min", "reserve"])? {
            Some(section) => values::budget(self.reader, &section).map(Some),
            None => Some(None),
        };
        let reader = &mut *self.reader;
        let in_flight = table.node("in_flight").map_or(Some(None), |node| {
            reader.integer(node, "in_flight", 1..=1_000_000).map(|count| Some(count as u32))
        });
        let timeout = table.node("timeout").map_or(Some(None), |node| reader.duration(node, "timeout").map(Some));
        let honours = table.node("honours_retry_after");
        let honours = honours.map_or(Some(false), |node| reader.boolean(node, "honours_retry_after"));
        Some(PlainClientSpec {
            attempts: attempts?,
            backoff: backoff?,
            pacer: pacer?,
            budget: budget?,
            in_flight: in_flight?,
            timeout: timeout?,
            honours_retry_after: honours?,
        })
    }

    /// Reads a plain client's pace, in the words of a provider's `pace`.
    fn pacer(&mut self, table: &TomlTable) -> Option<Option<PacerSpec>> {
        let Some(entry) = table.get("pace") else { return Some(None) };
        if let Some(backoff) = table.get("backoff") {
            let expected = "the `backoff` of each call or the `pace` of all, not both";
            self.reader.report(backoff.key_at, "how long to wait is said twice", expected);
            return None;
        }
        match self.reader.pace(table)? {
            PaceConfig::Responsive(spec) => Some(Some(spec)),
            _ => {
                let message = "a plain client has no such `pace`";
                self.reader.report(entry.node.at, message, "a pace by \"responsive\", or a provider of [outbound]");
                None
            }
        }
    }
}
