//! `pace`: the method that sets the pace of a provider's calls.

use std::fmt::Display;

use tidegate_core::pacer::{PacerGrowth, PacerMode};
use tidegate_core::{AdaptiveRate, AdaptiveRateSpec, LocalPacer, PacerSpec, Span};

use super::forms::{Custom, SHARE_OR_ZERO, SPAN, Whole, Words};
use super::provider::{PROVIDER, PROVIDER_PATH};
use super::{DocumentReader, TableOrWord, join_names};
use crate::document::TomlTable;
use crate::outbound::PaceConfig;
use crate::settings::SettingType::Text;
use crate::settings::key::setting_keys;
use crate::units::describe_duration;

/// The largest factor of an increase.
const MAX_FACTOR: u32 = 1_000;

pub(super) const PACE_KINDS: [(&str, PaceKind); 3] =
    [("limits", PaceKind::Limits), ("responsive", PaceKind::Responsive), ("adaptive", PaceKind::Adaptive)];
const RESPONSIVE_KEYS: [&str; 9] =
    ["mode", "growth", "initial", "max", "up", "down", "randomization", "max_randomization", "successes"];
const ADAPTIVE_KEYS: [&str; 3] = ["initial", "slowest", "fastest"];

setting_keys! {
    /// The keys of `pace`. Their defaults are the core's, and depend on `by`.
    PACE: PaceKeys {
        by: PaceKind = "", Words(&PACE_KINDS), "the way in which it is found: responsive, adaptive or limits";
        initial: Span = "", SPAN, "the first time between two calls; 500ms, by adaptive 100ms";
        max: Span = "", SPAN, "by responsive: the longest wait; default 15m";
        growth: bool = "", Words(&[("exponential", false), ("linear", true)]),
            "by responsive: exponential (default) or linear";
        up: u32 = "",
            Custom(Text, "a factor from 1.001 to 1000, such as 1.5", |reader, node, key| reader.factor(node, key, MAX_FACTOR)),
            "by responsive: the factor of the wait after a throttled call; default 1.5";
        down: u32 = "",
            Custom(Text, "a share from 0.001 to 0.999, such as 0.9", |reader, node, key| {
                let expected = "a share from 0.001 to 0.999 in thousandths, such as 0.9 or \"90%\"";
                reader.thousandths(node, key, 1..=999, expected)
            }),
            "by responsive: the factor of the wait after successes; default 0.9";
        successes: u32 = "", Whole(1, 1_000_000), "by responsive: the number of successes that shorten the wait; default 10";
        randomization: u16 = "", SHARE_OR_ZERO, "by responsive: the random share of a wait; default 0.3";
        max_randomization: Span = "", SPAN, "by responsive: the largest random part of a wait; default 2m";
        mode: PacerMode = "", Words(&[("steady", PacerMode::Steady), ("classic", PacerMode::Classic)]),
            "by responsive: steady (default) or classic";
        slowest: Span = "", SPAN, "by adaptive: the longest time between two calls; default 60s";
        fastest: Span = "", SPAN, "by adaptive: the shortest time between two calls; default 1us";
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PaceKind {
    Limits,
    Responsive,
    Adaptive,
}

impl PaceKind {
    fn allowed_keys(self) -> &'static [&'static str] {
        match self {
            Self::Limits => &[],
            Self::Responsive => &RESPONSIVE_KEYS,
            Self::Adaptive => &ADAPTIVE_KEYS,
        }
    }
}

impl DocumentReader<'_> {
    /// Reads `pace` of a table such as a provider's: a word, or a table with settings.
    pub fn pace(&mut self, provider: &TomlTable) -> Option<PaceConfig> {
        let (by, table) = match self.table_or_word(provider, &PROVIDER.pace, PaceKind::Limits)? {
            TableOrWord::Word(by) => (by, None),
            TableOrWord::Table(table) => (self.pace_kind(provider, table)?, Some(table)),
        };
        match by {
            PaceKind::Limits => Some(PaceConfig::Limits),
            PaceKind::Responsive => self.responsive_pace(provider, table),
            PaceKind::Adaptive => self.adaptive_pace(provider, table),
        }
    }

    /// Returns the method that `by` names, if all other keys of the table belong to that method.
    fn pace_kind(&mut self, provider: &TomlTable, table: &TomlTable) -> Option<PaceKind> {
        let Some(node) = table.node("by") else {
            if self.has_misspelling_of(table, &format!("{PROVIDER_PATH}.pace"), "by") {
                return None;
            }
            let (at, expected) = (provider.get("pace")?.key_at, "by = \"responsive\" or by = \"adaptive\"");
            return self.error(at, "`pace` doesn't say `by` what it is found", expected).none();
        };
        let by = self.parse(node, &PACE.by)?;
        let is_others = |key: &&str| !by.allowed_keys().contains(key);
        let others: Vec<&str> = RESPONSIVE_KEYS.into_iter().chain(ADAPTIVE_KEYS).filter(is_others).collect();
        if let Some(entry) = table.entries.iter().find(|entry| others.contains(&entry.key.as_str())) {
            let name = PACE_KINDS.iter().find(|(_, other)| *other == by).map_or("", |(name, _)| *name);
            let message = format!("a pace by {name} has no `{}`", entry.key);
            let allowed = by.allowed_keys();
            let expected = if allowed.is_empty() { "nothing besides".to_owned() } else { join_names(allowed) };
            return self.error(entry.key_at, message, expected).none();
        }
        Some(by)
    }

    fn responsive_pace(&mut self, provider: &TomlTable, table: Option<&TomlTable>) -> Option<PaceConfig> {
        let default = PacerSpec::default();
        let PacerGrowth::Exponential { up, down } = PacerGrowth::default() else { return None };
        let mode = self.value_or(table, &PACE.mode, default.mode);
        let linear = self.value_or(table, &PACE.growth, false);
        let mut wait = |key, default| self.value_or(table, key, Span::from_duration(default)).map(Span::as_duration);
        let (initial, max) = (wait(&PACE.initial, default.initial), wait(&PACE.max, default.max));
        let max_randomization = wait(&PACE.max_randomization, default.max_randomization);
        let (up, down) = (self.value_or(table, &PACE.up, up), self.value_or(table, &PACE.down, down.into()));
        let randomization = self.value_or(table, &PACE.randomization, default.randomization);
        let successes = self.value_or(table, &PACE.successes, default.successes);
        let (initial, max, up, down) = (initial?, max?, up?, u16::try_from(down?).ok()?);
        if max < initial {
            let at = table.and_then(|table| table.node("max").or(table.node("initial")))?.at;
            let [longest, first] = [max, initial].map(|wait| describe_duration(Span::from_duration(wait)));
            let message = format!("the longest wait, {longest}, is shorter than the first, {first}");
            let expected = "a `max` no shorter than `initial`; if unsaid, they are 15m and 500ms";
            return self.error(at, message, expected).none();
        }
        let spec = PacerSpec {
            initial,
            max,
            growth: if linear? { PacerGrowth::Linear } else { PacerGrowth::Exponential { up, down } },
            randomization: randomization?,
            max_randomization: max_randomization?,
            successes: successes?,
            mode: mode?,
        };
        self.check_pace(provider, LocalPacer::new(spec).err(), "settings that go together")?;
        Some(PaceConfig::Responsive(spec))
    }

    fn adaptive_pace(&mut self, provider: &TomlTable, table: Option<&TomlTable>) -> Option<PaceConfig> {
        let default = AdaptiveRateSpec::default();
        let initial = self.value_or(table, &PACE.initial, default.initial);
        let slowest = self.value_or(table, &PACE.slowest, default.slowest);
        let fastest = self.value_or(table, &PACE.fastest, default.fastest);
        let spec = AdaptiveRateSpec { initial: initial?, slowest: slowest?, fastest: fastest? };
        let AdaptiveRateSpec { initial, slowest, fastest } = spec;
        let found = [fastest, initial, slowest].map(describe_duration);
        let error = AdaptiveRate::new(spec).err().map(|error| format!("{error}; they are {}", found.join(", ")));
        self.check_pace(provider, error, "`fastest` no longer than `initial`, and `initial` no longer than `slowest`")?;
        Some(PaceConfig::Adaptive(spec))
    }

    /// Reports the error of the pacer's own check, if there is one.
    fn check_pace(&mut self, provider: &TomlTable, error: Option<impl Display>, expected: &str) -> Option<()> {
        let Some(error) = error else { return Some(()) };
        self.error(provider.get("pace")?.key_at, format!("`pace`: {error}"), expected).none()
    }
}
