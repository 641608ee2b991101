//! `pace`: the method that sets the pace of a provider's calls.

use std::fmt::Display;

use tidegate_core::pacer::{PacerGrowth, PacerMode};
use tidegate_core::{AdaptiveRate, AdaptiveRateSpec, LocalPacer, PacerSpec, Span};

use super::{DocumentReader, TableOrWord, join_names};
use crate::document::{TomlNode, TomlTable};
use crate::outbound::PaceConfig;
use crate::units::describe_duration;

/// The largest factor of an increase.
const MAX_FACTOR: u32 = 1_000;

const PACE_KINDS: [(&str, PaceKind); 3] =
    [("limits", PaceKind::Limits), ("responsive", PaceKind::Responsive), ("adaptive", PaceKind::Adaptive)];
const RESPONSIVE_KEYS: [&str; 9] =
    ["mode", "growth", "initial", "max", "up", "down", "randomization", "max_randomization", "successes"];
const ADAPTIVE_KEYS: [&str; 3] = ["initial", "slowest", "fastest"];

/// The method that sets the pace.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PaceKind {
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
        let (by, table) = match self.table_or_word(provider, "pace", "outbound.provider.*.pace", &PACE_KINDS)? {
            TableOrWord::Absent => return Some(PaceConfig::Limits),
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
            if !self.has_misspelling_of(table, "outbound.provider.*.pace", "by") {
                let at = provider.get("pace")?.key_at;
                self.report(at, "`pace` doesn't say `by` what it is found", "by = \"responsive\" or by = \"adaptive\"");
            }
            return None;
        };
        let by = self.choice(node, "by", &PACE_KINDS)?;
        let is_others = |key: &&str| !by.allowed_keys().contains(key);
        let others: Vec<&str> = RESPONSIVE_KEYS.into_iter().chain(ADAPTIVE_KEYS).filter(is_others).collect();
        let other = table.entries.iter().find(|entry| others.contains(&entry.key.as_str()));
        if let Some(entry) = other {
            let name = PACE_KINDS.iter().find(|(_, other)| *other == by).map_or("", |(name, _)| *name);
            let message = format!("a pace by {name} has no `{}`", entry.key);
            let expected =
                if by.allowed_keys().is_empty() { "nothing besides".to_owned() } else { join_names(by.allowed_keys()) };
            self.report(entry.key_at, message, expected);
            return None;
        }
        Some(by)
    }

    fn responsive_pace(&mut self, provider: &TomlTable, table: Option<&TomlTable>) -> Option<PaceConfig> {
        let default = PacerSpec::default();
        let PacerGrowth::Exponential { up, down } = PacerGrowth::default() else { return None };
        let mode = self.read_or_default(table, "mode", default.mode, |reader, node| {
            reader.choice(node, "mode", &[("steady", PacerMode::Steady), ("classic", PacerMode::Classic)])
        });
        let linear = self.read_or_default(table, "growth", false, |reader, node| {
            reader.choice(node, "growth", &[("exponential", false), ("linear", true)])
        });
        let mut wait = |key: &str, default| {
            let read = |reader: &mut Self, node: &TomlNode| reader.duration(node, key).map(Span::as_duration);
            self.read_or_default(table, key, default, read)
        };
        let (initial, max) = (wait("initial", default.initial), wait("max", default.max));
        let max_randomization = wait("max_randomization", default.max_randomization);
        let up = self.read_or_default(table, "up", up, |reader, node| reader.factor(node, "up", MAX_FACTOR));
        let down = self.read_or_default(table, "down", u32::from(down), |reader, node| {
            let expected = "a share from 0.001 to 0.999 in thousandths, such as 0.9 or \"90%\"";
            reader.thousandths(node, "down", 1..=999, expected)
        });
        let randomization = self.read_or_default(table, "randomization", default.randomization, |reader, node| {
            reader.share(node, "randomization", 0)
        });
        let successes = self.read_or_default(table, "successes", default.successes, |reader, node| {
            reader.integer_u32(node, "successes", 1, 1_000_000)
        });
        let (initial, max, up, down) = (initial?, max?, up?, u16::try_from(down?).ok()?);
        if max < initial {
            let at = table.and_then(|table| table.node("max").or(table.node("initial")))?.at;
            let [longest, first] = [max, initial].map(|wait| describe_duration(Span::from_duration(wait)));
            let message = format!("the longest wait, {longest}, is shorter than the first, {first}");
            self.report(at, message, "a `max` no shorter than `initial`; if unsaid, they are 15m and 500ms");
            return None;
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
        let mut interval =
            |key: &str, default| self.read_or_default(table, key, default, |reader, node| reader.duration(node, key));
        let initial = interval("initial", default.initial);
        let (slowest, fastest) = (interval("slowest", default.slowest), interval("fastest", default.fastest));
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
        self.report(provider.get("pace")?.key_at, format!("`pace`: {error}"), expected);
        None
    }
}
