//! The readers of values: delays, profiles over time, time ranges, back-offs and budgets.

use tidegate_core::{Backoff, BudgetSpec, Growth, Jitter, Span};
use tidegate_policy::document::{DocumentReader, TomlNode, TomlTable, TomlValue};
use tidegate_policy::parse_duration;

use crate::delay::Delay;
use crate::profile::{Profile, ProfileSegment};
use crate::setup::TimeRange;

/// The largest number of segments of a profile, and of time ranges in a list.
const MAX_SEGMENTS: usize = 1000;

const EXPECTED_DELAY: &str = "a duration such as \"10ms\", or one of { exponential = \"10ms\" }, { normal = \"10ms\", deviation = \
                     \"2ms\" }, { lognormal = \"10ms\", sigma = 0.5 }, { uniform = [\"5ms\", \"15ms\"] }";

/// Reads a duration, which may be zero.
pub(super) fn duration(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Span> {
    match &node.value {
        TomlValue::String(text) if parse_duration(text).is_ok_and(Span::is_zero) => Some(Span::ZERO),
        _ => reader.duration(node, key),
    }
}

pub(super) fn delay(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Delay> {
    let table = match &node.value {
        TomlValue::Table(table) => table,
        TomlValue::String(_) => return duration(reader, node, key).map(Delay::Constant),
        _ => {
            reader.report(node.at, format!("`{key}` is no delay"), EXPECTED_DELAY);
            return None;
        }
    };
    const NAMES: [&str; 6] = ["exponential", "normal", "deviation", "lognormal", "sigma", "uniform"];
    if !reader.check_names(table, &format!("`{key}`"), &NAMES) {
        return None;
    }
    let first = table.entries.first().map(|entry| entry.key.as_str());
    let companions: &[&str] = match first {
        Some("normal") => &["normal", "deviation"],
        Some("lognormal") => &["lognormal", "sigma"],
        Some("exponential") => &["exponential"],
        Some("uniform") => &["uniform"],
        _ => &[],
    };
    if companions.len() != table.entries.len() || !companions.iter().all(|name| table.get(name).is_some()) {
        reader.report(node.at, format!("`{key}` is no delay"), EXPECTED_DELAY);
        return None;
    }
    let mut of = |name: &str| table.node(name).and_then(|node| duration(reader, node, name));
    match first {
        Some("exponential") => of("exponential").map(Delay::Exponential),
        Some("normal") => {
            let (mean, deviation) = (of("normal"), of("deviation"));
            Some(Delay::Normal { mean: mean?, deviation: deviation? })
        }
        Some("lognormal") => {
            let median = of("lognormal");
            let sigma = table.node("sigma").and_then(|node| reader.number(node, "sigma", 0.0..=10.0));
            Some(Delay::LogNormal { median: median?, sigma: sigma? })
        }
        _ => {
            let node = table.node("uniform")?;
            let words = reader.strings(node, "uniform", "two durations, such as [\"5ms\", \"15ms\"]")?;
            let bounds: Vec<Option<Span>> = words.iter().map(|(_, item)| duration(reader, item, "uniform")).collect();
            match bounds.as_slice() {
                [Some(low), Some(high)] if low <= high => Some(Delay::Uniform { low: *low, high: *high }),
                [None, _] | [_, None] => None,
                _ => {
                    reader.report(node.at, "`uniform` doesn't go from a shorter duration to a longer", EXPECTED_DELAY);
                    None
                }
            }
        }
    }
}

/// The unit of a profile's values.
#[derive(Clone, Copy)]
pub(super) enum ProfileUnit {
    /// Calls per second: `40/s`.
    PerSecond,
    /// A share: `20%`.
    Share,
    /// A time, in seconds: `20ms`.
    Time,
}

impl ProfileUnit {
    fn expected(self) -> &'static str {
        match self {
            Self::PerSecond => {
                "a rate such as \"40/s\", or a list such as [\"40/s until 10s\", \"40/s to 80/s until 20s\", \"40/s\"]"
            }
            Self::Share => {
                "a share such as \"20%\", or a list such as [\"0% until 10s\", \"0% to 50% until 20s\", \"0%\"]"
            }
            Self::Time => {
                "a time such as \"20ms\", or a list such as [\"20ms until 10s\", \"20ms to 5ms until 20s\", \"5ms\"]"
            }
        }
    }

    fn parse(self, text: &str) -> Option<f64> {
        let (number, scale, most) = match self {
            Self::PerSecond => (text.strip_suffix("/s")?, 1.0, 1e6),
            Self::Share => (text.strip_suffix('%')?, 0.01, 100.0),
            Self::Time => return parse_duration(text).ok().map(|time| time.as_micros() as f64 / 1e6),
        };
        let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.' || byte == b'_');
        let number = number.trim();
        let value: f64 = Some(number).filter(|text| is_number(text))?.replace('_', "").parse().ok()?;
        (value <= most).then_some(value * scale)
    }
}

pub(super) fn profile(
    reader: &mut DocumentReader<'_>,
    node: &TomlNode,
    key: &str,
    unit: ProfileUnit,
) -> Option<Profile> {
    let words = reader.strings(node, key, unit.expected())?;
    let count = words.len();
    if count == 0 || count > MAX_SEGMENTS {
        reader.report(
            node.at,
            format!("`{key}` has {count} pieces"),
            format!("1 to {MAX_SEGMENTS}, {}", unit.expected()),
        );
        return None;
    }
    let mut pieces: Vec<ProfileSegment> = Vec::with_capacity(count);
    for (index, (text, item)) in words.into_iter().enumerate() {
        let Some(piece) = parse_segment(text, unit) else {
            reader.report(item.at, format!("`{key}`: `{text}` is no piece of it"), unit.expected());
            return None;
        };
        let begins = pieces.last().map_or(Span::ZERO, |piece| piece.end);
        if piece.end <= begins {
            reader.report(
                item.at,
                format!("`{key}`: `{text}` ends before it begins"),
                format!("a time after {begins}"),
            );
            return None;
        }
        if piece.end == Span::MAX && index + 1 < count {
            reader.report(item.at, format!("`{key}`: `{text}` says no end, and another follows"), unit.expected());
            return None;
        }
        pieces.push(piece);
    }
    Some(Profile::from_segments(pieces))
}

fn parse_segment(text: &str, unit: ProfileUnit) -> Option<ProfileSegment> {
    let (values, until) = match text.split_once(" until ") {
        Some((values, until)) => (values, parse_duration(until).ok()?),
        None => (text, Span::MAX),
    };
    let (from, to) = match values.split_once(" to ") {
        // A segment without an end has no end value.
        Some(_) if until == Span::MAX => return None,
        Some((from, to)) => (unit.parse(from.trim())?, unit.parse(to.trim())?),
        None => (unit.parse(values.trim())?, unit.parse(values.trim())?),
    };
    Some(ProfileSegment { start_value: from, end_value: to, end: until })
}

pub(super) fn time_ranges(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Vec<TimeRange>> {
    const EXPECTED: &str = "a stretch of time such as \"10s to 20s\", or a list of them";
    let words = reader.strings(node, key, EXPECTED)?;
    if words.len() > MAX_SEGMENTS {
        reader.report(node.at, format!("`{key}` has {} stretches", words.len()), format!("at most {MAX_SEGMENTS}"));
        return None;
    }
    let read = |text: &str| {
        let (from, until) = text.split_once(" to ")?;
        let stretch = TimeRange { from: parse_duration(from).ok()?, until: parse_duration(until).ok()? };
        (stretch.from < stretch.until).then_some(stretch)
    };
    let mut stretches = Vec::with_capacity(words.len());
    for (text, item) in words {
        match read(text) {
            Some(stretch) => stretches.push(stretch),
            None => {
                reader.report(item.at, format!("`{key}`: `{text}` is no stretch of time"), EXPECTED);
                return None;
            }
        }
    }
    Some(stretches)
}

pub(super) fn backoff(reader: &mut DocumentReader<'_>, table: &TomlTable) -> Option<Backoff> {
    reader.check_names(table, "`backoff`", &["growth", "base", "cap", "jitter"]);
    const GROWTHS: [(&str, Growth); 4] = [
        ("exponential", Growth::Exponential { factor: 2 }),
        ("constant", Growth::Constant),
        ("linear", Growth::Linear),
        ("fibonacci", Growth::Fibonacci),
    ];
    const JITTERS: [(&str, Jitter); 4] = [
        ("full", Jitter::Full),
        ("none", Jitter::None),
        ("equal", Jitter::Equal),
        ("decorrelated", Jitter::Decorrelated),
    ];
    let growth = table.node("growth").map_or(Some(GROWTHS[0].1), |node| reader.choice(node, "growth", &GROWTHS));
    let jitter = table.node("jitter").map_or(Some(Jitter::Full), |node| reader.choice(node, "jitter", &JITTERS));
    let base = table.node("base").map_or(Some(Span::from_millis(500)), |node| reader.duration(node, "base"));
    let cap = table.node("cap").map_or(Some(Span::MAX), |node| reader.duration(node, "cap"));
    Some(Backoff { growth: growth?, base: base?, cap: cap?, jitter: jitter? })
}

pub(super) fn budget(reader: &mut DocumentReader<'_>, table: &TomlTable) -> Option<BudgetSpec> {
    reader.check_names(table, "`budget`", &["ratio", "min", "reserve"]);
    let BudgetSpec { ratio, min, reserve } = BudgetSpec::default();
    let ratio = table.node("ratio").map_or(Some(ratio), |node| reader.share(node, "ratio", 0));
    let mut count = |name: &str, default: u32| {
        let node = table.node(name);
        node.map_or(Some(default), |node| reader.integer(node, name, 0..=1_000_000).map(|count| count as u32))
    };
    let (min, reserve) = (count("min", min), count("reserve", reserve));
    Some(BudgetSpec { ratio: ratio?, min: min?, reserve: reserve? })
}
