//! The settings for a provider's replies: `cache`, `throttled_when`, `cost`.

use std::time::Duration;

use tidegate_core::MAX_COST;

use super::resilience::RequiredKey;
use super::{DocumentReader, TableOrWord};
use crate::document::{TomlNode, TomlTable, TomlValue};
use crate::error::{Error, quoted};
use crate::outbound::{BodyRule, CacheRules, CostRules};
use crate::units::parse_duration;

/// The default limit of a cached body, in bytes.
const MAX_BODY: usize = 1 << 20;
/// The most statuses in `status`.
const MAX_STATUSES: usize = 8;
/// The most conditions on a body in `contains`.
const MAX_CONTAINS: usize = 8;

impl DocumentReader<'_> {
    pub(super) fn cache(&mut self, provider: &TomlTable) -> Option<Option<CacheRules>> {
        let default = CacheRules { ttl: None, shared: false, stale: Duration::ZERO, max_body: MAX_BODY };
        if let Some(TomlValue::String(text)) = provider.node("cache").map(|node| &node.value)
            && (text == "forever" || parse_duration(text).is_ok())
        {
            let at = provider.get("cache")?.node.at;
            let error = Error::new(self.texts, at, format!("`cache` is {}", quoted(text)), "a table, `off` or `on`");
            self.push_error(error.help(format!("write cache = {{ ttl = \"{text}\" }}")));
            return None;
        }
        let words = [("off", false), ("on", true)];
        let table = match self.table_or_word(provider, "cache", "outbound.provider.*.cache", &words)? {
            TableOrWord::Absent | TableOrWord::Word(false) => return Some(None),
            TableOrWord::Word(true) => return Some(Some(default)),
            TableOrWord::Table(table) => table,
        };
        let ttl = self.read_optional(table, "ttl", |reader, node| match &node.value {
            TomlValue::String(text) if text == "forever" => Some(Duration::MAX),
            _ => reader.timeout(node, "ttl"),
        });
        let shared = self.read_or_default(Some(table), "shared", false, |reader, node| reader.boolean(node, "shared"));
        let stale =
            self.read_or_default(Some(table), "stale", default.stale, |reader, node| reader.timeout(node, "stale"));
        let max_body = self.read_or_default(Some(table), "max_body", MAX_BODY, |reader, node| {
            reader.bytes(node, "max_body", 1..=1 << 30).and_then(|bytes| usize::try_from(bytes).ok())
        });
        Some(Some(CacheRules { ttl: ttl?, shared: shared?, stale: stale?, max_body: max_body? }))
    }

    pub(super) fn throttled_when(&mut self, provider: &TomlTable) -> Option<Option<BodyRule>> {
        const FORM: &str = "{ status = 200, contains = { \"/Error\" = \"limit reached\" } }";
        let Some(table) = self.provider_section(provider, "throttled_when")? else { return Some(None) };
        let whole = provider.get("throttled_when")?;
        let statuses = self.read_or_default(Some(table), "status", vec![200], Self::statuses);
        let required = RequiredKey { table: whole, path: "outbound.provider.*.throttled_when", form: FORM };
        let contains = self.required_node(table, "contains", &required).and_then(|node| self.body_conditions(node));
        let spends_quota = self
            .read_or_default(Some(table), "spends_quota", false, |reader, node| reader.boolean(node, "spends_quota"));
        Some(Some(BodyRule { statuses: statuses?, contains: contains?, spends_quota: spends_quota? }))
    }

    /// Reads one status or a list.
    fn statuses(&mut self, node: &TomlNode) -> Option<Vec<u16>> {
        let items = match &node.value {
            TomlValue::List(items) => items.as_slice(),
            _ => std::slice::from_ref(node),
        };
        if items.is_empty() || items.len() > MAX_STATUSES {
            self.report(node.at, format!("`status` has {} items", items.len()), format!("1 to {MAX_STATUSES}"));
            return None;
        }
        let mut status = |item| self.integer(item, "status", 100..=599).and_then(|status| u16::try_from(status).ok());
        let statuses: Vec<Option<u16>> = items.iter().map(&mut status).collect();
        statuses.into_iter().collect()
    }

    fn body_conditions(&mut self, node: &TomlNode) -> Option<Vec<(String, String)>> {
        const FORM: &str = "a table of JSON pointers, such as { \"/Error\" = \"limit reached\" }";
        let Some(table) = node.as_table() else {
            let found = node.describe(self.texts);
            self.report(node.at, format!("`contains` is {found}"), FORM);
            return None;
        };
        if table.entries.is_empty() || table.entries.len() > MAX_CONTAINS {
            let message = format!("`contains` has {} items", table.entries.len());
            self.report(node.at, message, format!("1 to {MAX_CONTAINS}"));
            return None;
        }
        let pairs: Vec<Option<(String, String)>> = table
            .entries
            .iter()
            .map(|entry| {
                let pointer = self.pointer(&entry.key, entry.key_at, "contains");
                let text = self.string(&entry.node, &entry.key, "what the text there contains, in quotes");
                if text == Some("") {
                    self.report(entry.node.at, "every text contains nothing", "what the text there contains");
                    return None;
                }
                Some((pointer?, text?.to_owned()))
            })
            .collect();
        pairs.into_iter().collect()
    }

    pub(super) fn cost_rules(&mut self, provider: &TomlTable) -> Option<Option<CostRules>> {
        let Some(table) = self.provider_section(provider, "cost")? else { return Some(None) };
        let reserve = self
            .read_or_default(Some(table), "reserve", 1, |reader, node| reader.integer(node, "reserve", 0..=MAX_COST));
        let bytes_per_unit = self.read_or_default(Some(table), "bytes_per_unit", 0, |reader, node| {
            reader.integer(node, "bytes_per_unit", 0..=MAX_COST)
        });
        let mut pointers =
            |key: &str| self.read_or_default(Some(table), key, Vec::new(), |reader, node| reader.pointers(node, key));
        let (request, reply) = (pointers("request"), pointers("reply"));
        let request = request?.concat();
        Some(Some(CostRules { reserve: reserve?, request, bytes_per_unit: bytes_per_unit?, reply: reply? }))
    }
}
