//! The times that replies tell: waits, resets and dates, in the many forms in which providers write them.

use std::time::UNIX_EPOCH;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::fmt::rfc2822;
use jiff::fmt::strtime;
use tidegate_core::{Span, Time};

use crate::units::parse_duration;

/// The least number that is read as Unix time if its unit isn't declared: as a wait it would be 31 years.
const EPOCH_SECS: u128 = 1_000_000_000;
/// The least numbers that are read as Unix time in milliseconds, microseconds and nanoseconds.
const EPOCH_MILLIS: u128 = 100_000_000_000;
const EPOCH_MICROS: u128 = 100_000_000_000_000;
const EPOCH_NANOS: u128 = 10_000_000_000_000_000;

/// The most digits of a number that are read.
const MAX_DIGITS: usize = 64;
/// The longest text that is read as a time.
const MAX_TIME_TEXT: usize = 128;

/// The unit or form of a time in a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TimeUnit {
    /// Any: a number is a wait in seconds or a Unix time, by its size.
    #[default]
    Any,
    /// A wait in a unit of this many microseconds.
    Wait(u64),
    /// A Unix time in a unit of this many microseconds.
    Epoch(u64),
    /// A date.
    Date,
    /// A duration with its units.
    Duration,
    /// A rate per second, whose reciprocal is the wait.
    Rate,
}

impl TimeUnit {
    /// The names in policies.
    pub(crate) const NAMES: [(&'static str, Self); 9] = [
        ("s", Self::Wait(1_000_000)),
        ("ms", Self::Wait(1_000)),
        ("min", Self::Wait(60_000_000)),
        ("h", Self::Wait(3_600_000_000)),
        ("epoch", Self::Epoch(1_000_000)),
        ("epoch-ms", Self::Epoch(1_000)),
        ("date", Self::Date),
        ("duration", Self::Duration),
        ("rate", Self::Rate),
    ];
}

/// The local time, and the server's in whole seconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplyClock {
    pub(crate) now: Time,
    pub(crate) server: Option<u64>,
}

impl ReplyClock {
    /// The time until a reset. One that is told as a whole second of Unix time comes within that second, so the end of it
    /// counts.
    pub(crate) fn until_reset(&self, text: &str) -> Option<Span> {
        match parse_digits(text.trim()) {
            Some(secs @ EPOCH_SECS..EPOCH_MILLIS) => Some(self.until((secs + 1) * 1_000_000)),
            _ => self.read(text, TimeUnit::Any),
        }
    }

    /// The time until the moment that a text tells; zero if it is over. `None` if it can't be read.
    pub(crate) fn read(&self, text: &str, unit: TimeUnit) -> Option<Span> {
        let text = text.trim().trim_matches('"').trim();
        if text.is_empty() || text.len() > MAX_TIME_TEXT {
            return None;
        }
        match unit {
            TimeUnit::Any => self.any(text),
            TimeUnit::Wait(micros) => parse_scaled(text, micros).map(|micros| span(micros, 1)),
            TimeUnit::Epoch(micros) => parse_scaled(text, micros).map(|micros| self.until(micros)),
            TimeUnit::Date => self.until_date(text),
            TimeUnit::Duration => duration(text),
            TimeUnit::Rate => {
                let thousandths = parse_scaled(text, 1_000_000_000)?;
                (thousandths > 0).then(|| span(1_000_000_000_000_000_u128.div_ceil(thousandths), 1))
            }
        }
    }

    /// A wait or reset without a declared unit. Of a list as `4, 4`, the longest.
    fn any(&self, text: &str) -> Option<Span> {
        let single = |text: &str| {
            if let Some(number) = parse_scaled(text, 1_000_000) {
                return Some(match number / 1_000_000 {
                    EPOCH_NANOS.. => self.until(number / 1_000_000_000),
                    EPOCH_MICROS.. => self.until(number / 1_000_000),
                    EPOCH_MILLIS.. => self.until(number / 1_000),
                    EPOCH_SECS.. => self.until(number),
                    _ => span(number, 1),
                });
            }
            duration(text).or_else(|| self.until_date(text))
        };
        let whole = single(text);
        if whole.is_some() || !text.contains(',') {
            return whole;
        }
        text.split(',').map(|part| single(part.trim().trim_matches('"'))).collect::<Option<Vec<_>>>()?.into_iter().max()
    }

    /// The time until a moment of the server's clock, given in microseconds since the Unix epoch.
    fn until(&self, micros: u128) -> Span {
        let present = self.server.map_or(u128::from(self.now.as_micros()), |secs| u128::from(secs) * 1_000_000);
        span(micros.saturating_sub(present), 1)
    }

    fn until_date(&self, text: &str) -> Option<Span> {
        date_micros(text).map(|micros| self.until(micros))
    }
}

/// Reads a wait as `Retry-After` tells it: seconds, a duration, a Unix time or a date. Zero if it is over. `None` if it can't
/// be read.
pub fn parse_wait(text: &str, now: Time) -> Option<Span> {
    ReplyClock { now, server: None }.read(text, TimeUnit::Any)
}

/// Converts a date to microseconds since the Unix epoch: an HTTP date (RFC 9110 §5.6.7), also with `UTC` or an offset or
/// without a weekday (RFC 5322), an RFC 3339 time, also without seconds or with a space, and the text of a JavaScript date.
pub(crate) fn date_micros(text: &str) -> Option<u128> {
    if let Ok(date) = httpdate::parse_http_date(text) {
        return date.duration_since(UNIX_EPOCH).ok().map(|since| since.as_micros());
    }
    // An unknown zone, such as CEST, would be read as UTC.
    let zone = text.rsplit(' ').next().unwrap_or_default();
    let is_zone = zone.len() > 1 && zone.bytes().all(|byte| byte.is_ascii_alphabetic());
    if is_zone && !["GMT", "UTC", "UT"].contains(&zone) {
        return None;
    }
    let with_offset = text.strip_suffix(" UTC").or_else(|| text.strip_suffix(" Z"));
    let with_zulu = with_offset.map(|text| format!("{text}Z"));
    let moment: Timestamp = with_zulu
        .as_deref()
        .unwrap_or(text)
        .parse()
        .ok()
        .or_else(|| {
            let with_offset = with_offset.map(|text| format!("{text} +0000"));
            let parser = rfc2822::DateTimeParser::new().relaxed_weekday(true);
            parser.parse_timestamp(with_offset.as_deref().unwrap_or(text)).ok()
        })
        // Without a zone, it is UTC.
        .or_else(|| text.parse::<DateTime>().ok()?.in_tz("UTC").ok().map(|moment| moment.timestamp()))
        .or_else(|| {
            let text = text.split(" (").next().unwrap_or(text);
            strtime::parse("%a %b %d %Y %H:%M:%S GMT%z", text).and_then(|parsed| parsed.to_timestamp()).ok()
        })?;
    u128::try_from(moment.as_microsecond()).ok()
}

/// A duration with units, such as `6m0s`, `900ms`, or as hours, minutes and seconds, such as `00:00:00.033`.
fn duration(text: &str) -> Option<Span> {
    if let Ok(span) = parse_duration(text) {
        return Some(span);
    }
    let mut parts = text.split(':');
    let (hours, minutes, seconds) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    let [hours, minutes] = [hours, minutes].map(parse_digits);
    let micros = parse_scaled(seconds, 1_000_000)?
        .saturating_add(hours?.saturating_mul(60).saturating_add(minutes?).saturating_mul(60_000_000));
    Some(span(micros, 1))
}

/// Parses a whole number, saturating.
pub(crate) fn parse_digits(text: &str) -> Option<u128> {
    let all = !text.is_empty() && text.len() <= MAX_DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
    all.then(|| {
        text.bytes().fold(0_u128, |number, byte| number.saturating_mul(10).saturating_add(u128::from(byte - b'0')))
    })
}

/// Parses a decimal number without exponent, perhaps with a plus sign, and multiplies it by `scale`, rounded up and
/// saturating.
pub(crate) fn parse_scaled(text: &str, scale: u64) -> Option<u128> {
    /// The number of digits after the point that matter.
    const PLACES: usize = 9;
    let text = text.strip_prefix('+').unwrap_or(text);
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    parse_digits(fraction)?;
    let fraction = &fraction[..fraction.len().min(PLACES)];
    let places = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let part = (parse_digits(fraction)? * u128::from(scale)).div_ceil(places);
    Some(parse_digits(whole)?.saturating_mul(u128::from(scale)).saturating_add(part))
}

/// The span of a number of units of this many microseconds.
pub(crate) fn span(number: u128, micros: u128) -> Span {
    Span::from_micros(u64::try_from(number.saturating_mul(micros)).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-01-01 00:00:00 UTC.
    const CLOCK: ReplyClock = ReplyClock { now: Time::from_secs(1_767_225_600), server: None };

    fn millis(text: &str, unit: TimeUnit) -> Option<u64> {
        CLOCK.read(text, unit).filter(|wait| !wait.is_zero()).map(|wait| wait.as_micros() / 1_000)
    }

    #[test]
    fn times_are_read_in_any_form() {
        for (text, expected) in [
            ("4", Some(4_000)),
            ("+4", Some(4_000)),
            ("\"4\"", Some(4_000)),
            ("2.0", Some(2_000)),
            ("4s", Some(4_000)),
            ("34.07s", Some(34_070)),
            ("900ms", Some(900)),
            ("6m0s", Some(360_000)),
            ("4, 4", Some(4_000)),
            ("4, 6", Some(6_000)),
            ("00:00:00.033", Some(33)),
            ("999999999", Some(999_999_999_000)),
            ("1767225660", Some(60_000)),
            ("1767225660000", Some(60_000)),
            ("1767225660000000", Some(60_000)),
            ("1767225660000000000", Some(60_000)),
            ("Thu, 01 Jan 2026 00:01:00 GMT", Some(60_000)),
            ("Thu, 01 Jan 2026 00:01:00 UTC", Some(60_000)),
            ("Thu, 01 Jan 2026 00:01:00 +0000", Some(60_000)),
            ("Thu, 01 Jan 2026 01:01:00 +0100", Some(60_000)),
            ("01 Jan 2026 00:01:00 GMT", Some(60_000)),
            ("01 Jan 2026 00:01:00 +0000", Some(60_000)),
            ("2026-01-01T00:01:00Z", Some(60_000)),
            ("2026-01-01T00:01Z", Some(60_000)),
            ("2026-01-01T00:01:00.5+00:00", Some(60_500)),
            ("2026-01-01 00:01:00 UTC", Some(60_000)),
            ("2026-01-01 00:01:00Z", Some(60_000)),
            ("2026-01-01 00:01:00", Some(60_000)),
            ("Thu Jan 01 2026 01:01:00 GMT+0100 (Central European Standard Time)", Some(60_000)),
            ("0", None),
            ("-4", None),
            ("", None),
            ("soon", None),
            ("4, soon", None),
            ("Thu, 01 Jan 2026 00:01:00 CEST", None),
            ("1767225599", None),
            ("2025-12-31T23:59:59Z", None),
            ("1e3", None),
            ("NaN", None),
        ] {
            assert_eq!(millis(text, TimeUnit::Any), expected, "{text}");
        }
        assert!(millis(&"9".repeat(60), TimeUnit::Any) > Some(1_000_000_000_000), "far in the future, and saturated");
        assert_eq!(millis(&"9".repeat(200), TimeUnit::Any), None, "too long");
    }

    #[test]
    fn declared_units_win() {
        for (text, unit, expected) in [
            ("2", "min", Some(120_000)),
            ("600000", "ms", Some(600_000)),
            ("1767225660", "epoch", Some(60_000)),
            ("1767225660000", "epoch-ms", Some(60_000)),
            ("1767225660.25", "epoch", Some(60_250)),
            ("60", "epoch", None),
            ("0.5", "rate", Some(2_000)),
            ("0.0167", "rate", Some(59_880)),
            ("0", "rate", None),
            ("1", "h", Some(3_600_000)),
            ("2m59.56s", "duration", Some(179_560)),
            ("2026-01-01T00:01:00Z", "date", Some(60_000)),
            ("60", "date", None),
        ] {
            let unit = TimeUnit::NAMES.into_iter().find(|(name, _)| *name == unit).unwrap().1;
            assert_eq!(millis(text, unit), expected, "{text}");
        }
    }
}
