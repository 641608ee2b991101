//! `pace`: how the pace of a provider's calls is found.

use std::fmt::Display;

use tidegate_core::pacer::{Growth, Mode};
use tidegate_core::{Adaptive, AdaptiveSpec, Pacer, PacerSpec, Span};

use super::{Reader, Said, listed};
use crate::document::{Node, Table};
use crate::outbound::Pace;
use crate::units::in_words;

/// The largest factor of a step up.
const MAX_FACTOR: u32 = 1_000;

const WORDS: [(&str, By); 3] = [("limits", By::Limits), ("responsive", By::Responsive), ("adaptive", By::Adaptive)];
const RESPONSIVE: [&str; 9] =
    ["mode", "growth", "initial", "max", "up", "down", "randomization", "max_randomization", "successes"];
const ADAPTIVE: [&str; 3] = ["initial", "slowest", "fastest"];

/// Who finds it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Limits,
    Responsive,
    Adaptive,
}

impl By {
    fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Limits => &[],
            Self::Responsive => &RESPONSIVE,
            Self::Adaptive => &ADAPTIVE,
        }
    }
}

impl Reader<'_> {
    /// The pace that a table's `pace` says, as of a provider: a word, or a table with its settings.
    pub fn pace(&mut self, provider: &Table) -> Option<Pace> {
        let (by, table) = match self.table_or(provider, "pace", "outbound.provider.*.pace", &WORDS)? {
            Said::Nothing => return Some(Pace::Limits),
            Said::Word(by) => (by, None),
            Said::Table(table) => (self.paced_by(provider, table)?, Some(table)),
        };
        match by {
            By::Limits => Some(Pace::Limits),
            By::Responsive => self.responsive(provider, table),
            By::Adaptive => self.adaptive_pace(provider, table),
        }
    }

    /// Who finds the pace of a table, if all that stands in it is theirs.
    fn paced_by(&mut self, provider: &Table, table: &Table) -> Option<By> {
        let Some(node) = table.node("by") else {
            if !self.is_misspelt(table, "outbound.provider.*.pace", "by") {
                let at = provider.get("pace")?.key_at;
                self.wrong(at, "`pace` doesn't say `by` what it is found", "by = \"responsive\" or by = \"adaptive\"");
            }
            return None;
        };
        let by = self.choice(node, "by", &WORDS)?;
        let is_others = |key: &&str| !by.keys().contains(key);
        let others: Vec<&str> = RESPONSIVE.into_iter().chain(ADAPTIVE).filter(is_others).collect();
        let other = table.entries.iter().find(|entry| others.contains(&entry.key.as_str()));
        if let Some(entry) = other {
            let name = WORDS.iter().find(|(_, other)| *other == by).map_or("", |(name, _)| *name);
            let message = format!("a pace by {name} has no `{}`", entry.key);
            let expected = if by.keys().is_empty() { "nothing besides".to_owned() } else { listed(by.keys()) };
            self.wrong(entry.key_at, message, expected);
            return None;
        }
        Some(by)
    }

    fn responsive(&mut self, provider: &Table, table: Option<&Table>) -> Option<Pace> {
        let default = PacerSpec::default();
        let Growth::Exponential { up, down } = Growth::default() else { return None };
        let mode = self.or_default(table, "mode", default.mode, |reader, node| {
            reader.choice(node, "mode", &[("steady", Mode::Steady), ("classic", Mode::Classic)])
        });
        let linear = self.or_default(table, "growth", false, |reader, node| {
            reader.choice(node, "growth", &[("exponential", false), ("linear", true)])
        });
        let mut wait = |key: &str, default| {
            let read = |reader: &mut Self, node: &Node| reader.span(node, key).map(Span::as_duration);
            self.or_default(table, key, default, read)
        };
        let (initial, max) = (wait("initial", default.initial), wait("max", default.max));
        let max_randomization = wait("max_randomization", default.max_randomization);
        let up = self.or_default(table, "up", up, |reader, node| reader.factor(node, "up", MAX_FACTOR));
        let down = self.or_default(table, "down", u32::from(down), |reader, node| {
            let expected = "a share from 0.001 to 0.999 in thousandths, such as 0.9 or \"90%\"";
            reader.thousandths(node, "down", 1..=999, expected)
        });
        let randomization = self.or_default(table, "randomization", default.randomization, |reader, node| {
            reader.share(node, "randomization", 0)
        });
        let successes = self.or_default(table, "successes", default.successes, |reader, node| {
            reader.small(node, "successes", 1, 1_000_000)
        });
        let (initial, max, up, down) = (initial?, max?, up?, u16::try_from(down?).ok()?);
        if max < initial {
            let at = table.and_then(|table| table.node("max").or(table.node("initial")))?.at;
            let [longest, first] = [max, initial].map(|wait| in_words(Span::from_duration(wait)));
            let message = format!("the longest wait, {longest}, is shorter than the first, {first}");
            self.wrong(at, message, "a `max` no shorter than `initial`; if unsaid, they are 15m and 500ms");
            return None;
        }
        let spec = PacerSpec {
            initial,
            max,
            growth: if linear? { Growth::Linear } else { Growth::Exponential { up, down } },
            randomization: randomization?,
            max_randomization: max_randomization?,
            successes: successes?,
            mode: mode?,
        };
        self.goes(provider, Pacer::new(spec).err(), "settings that go together")?;
        Some(Pace::Responsive(spec))
    }

    fn adaptive_pace(&mut self, provider: &Table, table: Option<&Table>) -> Option<Pace> {
        let default = AdaptiveSpec::default();
        let mut interval =
            |key: &str, default| self.or_default(table, key, default, |reader, node| reader.span(node, key));
        let initial = interval("initial", default.initial);
        let (slowest, fastest) = (interval("slowest", default.slowest), interval("fastest", default.fastest));
        let spec = AdaptiveSpec { initial: initial?, slowest: slowest?, fastest: fastest? };
        let AdaptiveSpec { initial, slowest, fastest } = spec;
        let found = [fastest, initial, slowest].map(in_words);
        let error = Adaptive::new(spec).err().map(|error| format!("{error}; they are {}", found.join(", ")));
        self.goes(provider, error, "`fastest` no longer than `initial`, and `initial` no longer than `slowest`")?;
        Some(Pace::Adaptive(spec))
    }

    /// Whether no machine objects.
    fn goes(&mut self, provider: &Table, error: Option<impl Display>, expected: &str) -> Option<()> {
        let Some(error) = error else { return Some(()) };
        self.wrong(provider.get("pace")?.key_at, format!("`pace`: {error}"), expected);
        None
    }
}
