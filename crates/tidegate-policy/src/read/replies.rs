//! The settings for a provider's replies: `cache`, `throttled_when`, `cost`.

use std::time::Duration;

use tidegate_core::MAX_COST;

use super::forms::{Bytes, Custom, DURATION, FLAG, Maybe, Whole};
use super::provider::PROVIDER;
use super::{DocumentReader, all_or_none};
use crate::document::{TomlNode, TomlTable};
use crate::outbound::{CacheRules, CostRules, PointerAlternatives};
use crate::settings::SettingType::{Strings, TableOrTables, Text};
use crate::settings::key::{read_struct, setting_keys};
use crate::units::parse_duration;
use crate::verdict::{JsonPath, StatusSet};

/// The most conditions on a body in `contains`.
const MAX_CONTAINS: usize = 8;

const POINTERS: Custom<Vec<PointerAlternatives>> =
    Custom(Strings, "a JSON pointer, or a list of them", |reader, node, key| reader.pointers(node, key));

setting_keys! {
    CACHE: CacheKeys {
        ttl: Option<Duration> = "", Maybe(Custom(Text, "a duration, or `forever`", ttl)),
            "the time for which replies are fresh, or forever; default as HTTP says";
        shared: bool = "false", FLAG, "true if credentials share replies; otherwise several credentials keep none";
        stale: Option<Duration> = "", Maybe(DURATION), "the time after that in which replies may be used while the provider is unavailable";
        max_body: usize = "1MiB", Bytes(1, 1 << 30), "the longest body that is kept";
    }

    THROTTLED: ThrottledKeys {
        status: StatusSet = "200",
            Custom(Strings, "a status such as 429, a class such as 5xx, or a list", |reader, node, _| reader.status_set(node)),
            "the status that they have, or a list";
        contains: Vec<(JsonPath, String)> = "",
            Custom(TableOrTables, "a table of texts by JSON pointers", |reader, node, _| reader.body_conditions(node)),
            "JSON pointers, with a text that each place contains";
        spends_quota: bool = "false", FLAG, "true if the quota is then used up until its period ends";
    }

    COST: CostKeys {
        reserve: u64 = "1", Whole(0, MAX_COST), "the amount reserved for a call before its reply";
        request: Vec<PointerAlternatives> = "", POINTERS,
            "JSON pointers into the request; the first number found there is reserved in addition";
        bytes_per_unit: u64 = "0", Whole(0, MAX_COST), "request bytes for one more unit; 0 for none";
        reply: Vec<PointerAlternatives> = "", POINTERS,
            "JSON pointers into the reply, each as /a or /b; their sum is the real cost";
    }
}

fn ttl(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Duration> {
    if node.is_word("forever") { Some(Duration::MAX) } else { reader.timeout(node, key) }
}

impl DocumentReader<'_> {
    pub(super) fn cache(&mut self, provider: &TomlTable) -> Option<Option<CacheRules>> {
        if let Some(node) = provider.node("cache")
            && let Some(text) = node.as_str()
            && (text == "forever" || parse_duration(text).is_ok())
        {
            let error = self.wrong_text(node, "cache", text, "a table, `off` or `on`");
            return error.help(format!("write cache = {{ ttl = \"{text}\" }}")).none();
        }
        let Some(table) = self.table_unless_off(provider, &PROVIDER.cache, false)? else { return Some(None) };
        let stale = self.value(table, &CACHE.stale).map(Option::unwrap_or_default);
        read_struct!(self, table, CACHE => CacheRules { ttl, shared, max_body; stale: stale? }).map(Some)
    }

    fn body_conditions(&mut self, node: &TomlNode) -> Option<Vec<(JsonPath, String)>> {
        const FORM: &str = "a table of JSON pointers, such as { \"/Error\" = \"limit reached\" }";
        let Some(table) = node.as_table() else {
            return self.wrong_type(node, "contains", FORM).none();
        };
        self.check_length(node.at, "contains", table.entries.len(), MAX_CONTAINS, "")?;
        all_or_none(table.entries.iter().map(|entry| {
            let pointer = self.json_path(&entry.key, entry.key_at, "contains");
            let text = self.string(&entry.node, &entry.key, "a text that the place contains, in quotes")?;
            if text.is_empty() {
                let expected = "a text that the place contains";
                return self.error(entry.node.at, "every text contains nothing", expected).none();
            }
            Some((pointer?, text.to_owned()))
        }))
    }

    pub(super) fn cost_rules(&mut self, provider: &TomlTable) -> Option<Option<CostRules>> {
        let Some(table) = self.provider_section(provider, "cost")? else { return Some(None) };
        let request = self.value(table, &COST.request);
        let rules = read_struct!(self, table, COST => CostRules {
            reserve, bytes_per_unit, reply; request: request?.concat()
        });
        rules.map(Some)
    }
}
