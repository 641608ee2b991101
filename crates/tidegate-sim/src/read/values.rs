//! The readers of values: numbers, words, delays, profiles over time, time ranges, back-offs and budgets.

use std::ops::RangeInclusive;

use tidegate_core::{Backoff, BudgetSpec, Growth, Jitter, Span};
use tidegate_policy::document::{DocumentReader, TextRange, TomlNode, TomlTable, TomlValue};
use tidegate_policy::parse_duration;

use crate::delay::Delay;
use crate::profile::{Profile, ProfileSegment};
use crate::setup::TimeRange;

/// The largest number of segments of a profile, and of time ranges in a list.
const MAX_SEGMENTS: usize = 1000;

/// Reports an error; there is no value.
pub(super) fn reject<T>(
    reader: &mut DocumentReader<'_>,
    at: TextRange,
    message: impl Into<String>,
    expected: impl Into<String>,
) -> Option<T> {
    reader.report(at, message, expected);
    None
}

/// Reads the value of a key; `default` if the key is absent.
pub(super) fn value_or<'t, T>(
    reader: &mut DocumentReader<'t>,
    table: &TomlTable,
    key: &str,
    default: T,
    read: impl FnOnce(&mut DocumentReader<'t>, &TomlNode, &str) -> Option<T>,
) -> Option<T> {
    table.node(key).map_or(Some(default), |node| read(reader, node, key))
}

/// Reads the value of a key; `None` inside if the key is absent.
pub(super) fn optional<'t, T>(
    reader: &mut DocumentReader<'t>,
    table: &TomlTable,
    key: &str,
    read: impl FnOnce(&mut DocumentReader<'t>, &TomlNode, &str) -> Option<T>,
) -> Option<Option<T>> {
    value_or(reader, table, key, None, |reader, node, key| read(reader, node, key).map(Some))
}

/// Reads a whole number in a range, which is within 32 bits.
pub(super) fn count(range: RangeInclusive<u64>) -> impl Fn(&mut DocumentReader<'_>, &TomlNode, &str) -> Option<u32> {
    move |reader, node, key| reader.integer(node, key, range.clone()).map(|count| count as u32)
}

/// Reads one of a few words.
pub(super) fn choice<T: Copy>(
    words: &[(&'static str, T)],
) -> impl Fn(&mut DocumentReader<'_>, &TomlNode, &str) -> Option<T> {
    move |reader, node, key| reader.choice(node, key, words)
}

/// Reads a duration, which may be zero.
pub(super) fn duration(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Span> {
    match &node.value {
        TomlValue::String(text) if parse_duration(text).is_ok_and(Span::is_zero) => Some(Span::ZERO),
        _ => reader.duration(node, key),
    }
}

pub(super) fn delay(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Delay> {
    const EXPECTED: &str = "a duration such as \"10ms\", or one of { exponential = \"10ms\" }, { normal = \"10ms\", \
                            deviation = \"2ms\" }, { lognormal = \"10ms\", sigma = 0.5 }, { uniform = [\"5ms\", \
                            \"15ms\"] }, { pareto = \"10ms\", shape = 1.5, cap = \"2s\" }";
    const NAMES: [&str; 9] =
        ["exponential", "normal", "deviation", "lognormal", "sigma", "uniform", "pareto", "shape", "cap"];
    if let TomlValue::String(_) = node.value {
        return duration(reader, node, key).map(Delay::Constant);
    }
    let table = node.as_table();
    if table.is_some_and(|table| !reader.check_names(table, &format!("`{key}`"), &NAMES)) {
        return None;
    }
    let entries = table.into_iter().flat_map(|table| &table.entries).map(|entry| (&*entry.key, &entry.node));
    match *entries.collect::<Vec<_>>() {
        [("exponential", mean)] => duration(reader, mean, "exponential").map(Delay::Exponential),
        [("normal", mean), ("deviation", deviation)] => {
            let (mean, deviation) = (duration(reader, mean, "normal"), duration(reader, deviation, "deviation"));
            Some(Delay::Normal { mean: mean?, deviation: deviation? })
        }
        [("lognormal", median), ("sigma", sigma)] => {
            let (median, sigma) = (duration(reader, median, "lognormal"), reader.number(sigma, "sigma", 0.0..=10.0));
            Some(Delay::LogNormal { median: median?, sigma: sigma? })
        }
        [("pareto", scale), ("shape", shape), ref rest @ ..] if matches!(rest, [] | [("cap", _)]) => {
            let cap = rest.first().map_or(Some(Span::MAX), |(key, cap)| reader.duration(cap, key));
            let (scale, shape) = (duration(reader, scale, "pareto"), reader.number(shape, "shape", 0.1..=100.0));
            Some(Delay::Pareto { scale: scale?, shape: shape?, cap: cap? })
        }
        [("uniform", bounds)] => {
            let texts = reader.strings(bounds, "uniform", "two durations, such as [\"5ms\", \"15ms\"]")?;
            let spans: Vec<Option<Span>> = texts.iter().map(|(_, item)| duration(reader, item, "uniform")).collect();
            match *spans {
                [Some(low), Some(high)] if low <= high => Some(Delay::Uniform { low, high }),
                [None, _] | [_, None] => None,
                _ => {
                    let message = "`uniform` doesn't go from a shorter duration to a longer";
                    reject(reader, bounds.at, message, EXPECTED)
                }
            }
        }
        _ => reject(reader, node.at, format!("`{key}` is no delay"), EXPECTED),
    }
}

/// The unit of a profile's values.
#[derive(Clone, Copy)]
pub(super) struct ProfileUnit {
    expected: &'static str,
    parse: fn(&str) -> Option<f64>,
}

/// Calls per second: `40/s`.
pub(super) const PER_SECOND: ProfileUnit = ProfileUnit {
    expected: "a rate such as \"40/s\", or a list such as [\"40/s until 10s\", \"40/s to 80/s until 20s\", \"40/s\"]",
    parse: |text| parse_number(text.strip_suffix("/s")?, 1e6),
};
/// A share: `20%`.
pub(super) const SHARE: ProfileUnit = ProfileUnit {
    expected: "a share such as \"20%\", or a list such as [\"0% until 10s\", \"0% to 50% until 20s\", \"0%\"]",
    parse: |text| parse_number(text.strip_suffix('%')?, 100.0).map(|percent| percent * 0.01),
};
/// A time, in seconds: `20ms`.
pub(super) const TIME: ProfileUnit = ProfileUnit {
    expected: "a time such as \"20ms\", or a list such as [\"20ms until 10s\", \"20ms to 5ms until 20s\", \"5ms\"]",
    parse: |text| parse_duration(text).ok().map(Span::as_secs_f64),
};

/// The largest number of workers.
pub(super) const MAX_WORKERS: u64 = 1_000_000;
/// Workers: `20`.
pub(super) const WORKERS: ProfileUnit = ProfileUnit {
    expected: "a number from 1 to 1000000, or a list such as [\"40 until 30s\", \"40 to 20 until 40s\", \"20\"]",
    parse: |text| text.parse().ok().filter(|count| (1..=MAX_WORKERS).contains(count)).map(|count| count as f64),
};

/// Parses a decimal number from 0 to `max`.
fn parse_number(text: &str, max: f64) -> Option<f64> {
    let text = text.trim();
    let is_decimal = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.' || byte == b'_');
    let number = text.replace('_', "").parse().ok().filter(|_| is_decimal)?;
    (number <= max).then_some(number)
}

/// Reads a profile of values in this unit.
pub(super) fn profile(unit: ProfileUnit) -> impl Fn(&mut DocumentReader<'_>, &TomlNode, &str) -> Option<Profile> {
    move |reader, node, key| {
        let texts = reader.strings(node, key, unit.expected)?;
        let count = texts.len();
        if count == 0 || count > MAX_SEGMENTS {
            let expected = format!("1 to {MAX_SEGMENTS}, {}", unit.expected);
            return reject(reader, node.at, format!("`{key}` has {count} pieces"), expected);
        }
        let mut segments: Vec<ProfileSegment> = Vec::with_capacity(count);
        for (index, (text, item)) in texts.into_iter().enumerate() {
            let Some(segment) = parse_segment(text, unit) else {
                return reject(reader, item.at, format!("`{key}`: `{text}` is no piece of it"), unit.expected);
            };
            let start = segments.last().map_or(Span::ZERO, |segment| segment.end);
            if segment.end <= start {
                let message = format!("`{key}`: `{text}` ends before it begins");
                return reject(reader, item.at, message, format!("a time after {start}"));
            }
            if segment.end == Span::MAX && index + 1 < count {
                let message = format!("`{key}`: `{text}` says no end, and another follows");
                return reject(reader, item.at, message, unit.expected);
            }
            segments.push(segment);
        }
        Some(Profile(segments))
    }
}

fn parse_segment(text: &str, unit: ProfileUnit) -> Option<ProfileSegment> {
    let (values, end) = match text.split_once(" until ") {
        Some((values, end)) => (values, parse_duration(end).ok()?),
        None => (text, Span::MAX),
    };
    let (start_value, end_value) = match values.split_once(" to ") {
        // A segment without an end has no end value.
        Some(_) if end == Span::MAX => return None,
        Some((from, to)) => (from, to),
        None => (values, values),
    };
    let parse = |value: &str| (unit.parse)(value.trim());
    Some(ProfileSegment { start_value: parse(start_value)?, end_value: parse(end_value)?, end })
}

pub(super) fn time_ranges(reader: &mut DocumentReader<'_>, node: &TomlNode, key: &str) -> Option<Vec<TimeRange>> {
    const EXPECTED: &str = "a stretch of time such as \"10s to 20s\", or a list of them";
    let texts = reader.strings(node, key, EXPECTED)?;
    if texts.len() > MAX_SEGMENTS {
        let message = format!("`{key}` has {} stretches", texts.len());
        return reject(reader, node.at, message, format!("at most {MAX_SEGMENTS}"));
    }
    let parse = |text: &str| {
        let (from, until) = text.split_once(" to ")?;
        let range = TimeRange { from: parse_duration(from).ok()?, until: parse_duration(until).ok()? };
        (range.from < range.until).then_some(range)
    };
    let ranges = texts.into_iter().map(|(text, item)| {
        let message = || format!("`{key}`: `{text}` is no stretch of time");
        parse(text).or_else(|| reject(reader, item.at, message(), EXPECTED))
    });
    ranges.collect()
}

pub(super) fn backoff(reader: &mut DocumentReader<'_>, table: &TomlTable) -> Option<Backoff> {
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
    let growth = value_or(reader, table, "growth", GROWTHS[0].1, choice(&GROWTHS));
    let jitter = value_or(reader, table, "jitter", Jitter::Full, choice(&JITTERS));
    let base = value_or(reader, table, "base", Span::from_millis(500), DocumentReader::duration);
    let cap = value_or(reader, table, "cap", Span::MAX, DocumentReader::duration);
    Some(Backoff { growth: growth?, base: base?, cap: cap?, jitter: jitter? })
}

pub(super) fn budget(reader: &mut DocumentReader<'_>, table: &TomlTable) -> Option<BudgetSpec> {
    let default = BudgetSpec::default();
    let ratio = value_or(reader, table, "ratio", default.ratio, |reader, node, key| reader.share(node, key, 0));
    let min = value_or(reader, table, "min", default.min, count(0..=1_000_000));
    let reserve = value_or(reader, table, "reserve", default.reserve, count(0..=1_000_000));
    Some(BudgetSpec { ratio: ratio?, min: min?, reserve: reserve? })
}
