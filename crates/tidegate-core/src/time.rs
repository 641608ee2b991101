//! Times and spans in whole microseconds.

use core::fmt;
use core::ops::{Add, Sub};
use core::time::Duration;

use thiserror::Error;

/// The largest number of microseconds: 2^52 − 1. Doubles, and so Redis' Lua, count it exactly. As a time, in 2112.
const MAX_MICROS: u64 = (1 << 52) - 1;

/// The maximum time by which `now` may be before the recorded times because the call was overtaken between reading the
/// clock and reaching the state. A larger difference means that the clock stepped back.
pub const MAX_CLOCK_LAG: Span = Span::from_millis(100);

/// A point in time: microseconds since the Unix epoch, from 0 to 2^52 − 1. Arithmetic saturates at both ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

/// A length of time in microseconds, from 0 to 2^52 − 1 (about 142 years). Arithmetic saturates at both ends.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(u64);

impl Time {
    /// The Unix epoch.
    pub const ZERO: Self = Self(0);
    /// The latest possible time. As an answer, it means never.
    pub const NEVER: Self = Self(MAX_MICROS);

    /// The time `micros` microseconds after the Unix epoch, saturating at [`Time::NEVER`].
    pub const fn from_micros(micros: u64) -> Self {
        Self(if micros > MAX_MICROS { MAX_MICROS } else { micros })
    }

    /// The time `secs` seconds after the Unix epoch, saturating.
    pub const fn from_secs(secs: u64) -> Self {
        Self::from_micros(secs.saturating_mul(1_000_000))
    }

    /// Microseconds since the Unix epoch.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Seconds since the Unix epoch, rounded up, so that a wait until then is long enough.
    pub const fn as_secs_ceil(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    /// The span from `earlier` to this time. Zero if `earlier` is later.
    pub const fn since(self, earlier: Self) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }

    /// True if this is [`Time::NEVER`].
    pub const fn is_never(self) -> bool {
        self.0 == MAX_MICROS
    }
}

/// A time in the format of decisions, in UTC and in whole seconds: `2026-11-21 12:01:45Z`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UtcText([u8; 20]);

impl From<Time> for UtcText {
    /// Rounds up to the second, as for a time that is waited for.
    fn from(at: Time) -> Self {
        Self::from_seconds(at.as_secs_ceil())
    }
}

impl UtcText {
    /// Rounds down to the second, as for a time that has passed.
    pub fn rounded_down(at: Time) -> Self {
        Self::from_seconds(at.as_micros() / 1_000_000)
    }

    /// The conversion is Howard Hinnant's ("chrono-compatible low-level date algorithms").
    fn from_seconds(seconds: u64) -> Self {
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        let year = year_of_era + era * 400 + u64::from(month <= 2);
        let mut text = *b"0000-00-00 00:00:00Z";
        for (start, width, mut number) in [
            (0, 4, year),
            (5, 2, month),
            (8, 2, day),
            (11, 2, second / 3_600),
            (14, 2, second / 60 % 60),
            (17, 2, second % 60),
        ] {
            for digit in (start..start + width).rev() {
                text[digit] = b'0' + (number % 10) as u8;
                number /= 10;
            }
        }
        Self(text)
    }

    /// The 20 characters, in ASCII.
    pub const fn as_bytes(&self) -> &[u8; 20] {
        &self.0
    }
}

impl fmt::Display for UtcText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(str::from_utf8(&self.0).unwrap_or_default())
    }
}

/// The maximum distance between the two times of [`Clock::now_bounds`].
pub const MAX_NOW_SPREAD: Span = Span::from_millis(52);

/// The source of `now`, for the drivers around this crate.
pub trait Clock: Send + Sync + 'static {
    /// The current time.
    fn now(&self) -> Time;

    /// Two times at most [`MAX_NOW_SPREAD`] apart, with the current time between or at them, if these are cheaper.
    #[inline]
    fn now_bounds(&self) -> (Time, Time) {
        let now = self.now();
        (now, now)
    }

    /// True if the clock runs like the machine's own clocks, so that system timers fit it. Default false.
    fn is_system(&self) -> bool {
        false
    }
}

impl Add<Span> for Time {
    type Output = Self;
    fn add(self, span: Span) -> Self {
        Self::from_micros(self.0 + span.0)
    }
}

impl Sub<Span> for Time {
    type Output = Self;
    fn sub(self, span: Span) -> Self {
        Self(self.0.saturating_sub(span.0))
    }
}

impl Span {
    /// A span of no time.
    pub const ZERO: Self = Self(0);
    /// The longest possible span.
    pub const MAX: Self = Self(MAX_MICROS);

    /// `micros` microseconds, saturating at [`Span::MAX`].
    pub const fn from_micros(micros: u64) -> Self {
        Self(if micros > MAX_MICROS { MAX_MICROS } else { micros })
    }

    /// `millis` milliseconds, saturating.
    pub const fn from_millis(millis: u64) -> Self {
        Self::from_micros(millis.saturating_mul(1_000))
    }

    /// `secs` seconds, saturating.
    pub const fn from_secs(secs: u64) -> Self {
        Self::from_micros(secs.saturating_mul(1_000_000))
    }

    /// A [`Duration`], rounded up to the next microsecond and saturating.
    pub fn from_duration(duration: Duration) -> Self {
        Self::try_from(duration).unwrap_or(Self::MAX)
    }

    /// The span in microseconds.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// The span in seconds, rounded up, so that an announced wait is never too short.
    pub const fn as_secs_ceil(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    /// The span in seconds, with fractions.
    pub const fn as_secs_f64(self) -> f64 {
        self.as_micros() as f64 / 1e6
    }

    /// The span as a [`Duration`].
    pub const fn as_duration(self) -> Duration {
        Duration::from_micros(self.0)
    }

    /// True if the span is zero.
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// The span multiplied by `times`, saturating.
    pub const fn times(self, times: u64) -> Self {
        Self::from_micros(self.0.saturating_mul(times))
    }
}

impl From<Span> for Duration {
    fn from(span: Span) -> Self {
        span.as_duration()
    }
}

impl TryFrom<Duration> for Span {
    type Error = SpanTooLongError;

    /// Rounds up to the next microsecond. Returns an error if the result is beyond [`Span::MAX`].
    fn try_from(duration: Duration) -> Result<Self, SpanTooLongError> {
        let micros = u64::try_from(duration.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX);
        if micros > MAX_MICROS { Err(SpanTooLongError) } else { Ok(Self(micros)) }
    }
}

/// The error for a duration beyond [`Span::MAX`], about 142 years.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the duration is longer than {}", Span::MAX)]
pub struct SpanTooLongError;

impl Add for Span {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self::from_micros(self.0 + other.0)
    }
}

impl Sub for Span {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Span {
    /// The exact value from days to microseconds, without units that are 0: `2s`, `1m30s`, `500ms`, `1h`, `1d`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 6] = [
            (86_400_000_000, "d"),
            (3_600_000_000, "h"),
            (60_000_000, "m"),
            (1_000_000, "s"),
            (1_000, "ms"),
            (1, "us"),
        ];
        if self.0 == 0 {
            return f.write_str("0s");
        }
        let mut rest = self.0;
        for (size, unit) in UNITS {
            if rest >= size {
                write!(f, "{}{unit}", rest / size)?;
                rest %= size;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn timestamps_have_whole_seconds() {
        let passed = |micros| UtcText::rounded_down(Time::from_micros(micros)).to_string();
        assert_eq!(passed(951_782_399_999_999), "2000-02-28 23:59:59Z");
        assert_eq!(passed(951_782_400_000_000), "2000-02-29 00:00:00Z");
        for (micros, text) in [
            (0, "1970-01-01 00:00:00Z"),
            (1, "1970-01-01 00:00:01Z"),
            (951_782_399_000_001, "2000-02-29 00:00:00Z"),
            (1_709_251_199_000_000, "2024-02-29 23:59:59Z"),
            (1_709_251_200_000_000, "2024-03-01 00:00:00Z"),
            (4_107_542_400_000_000, "2100-03-01 00:00:00Z"),
            (u64::MAX, "2112-09-17 23:53:48Z"),
        ] {
            assert_eq!(UtcText::from(Time::from_micros(micros)).to_string(), text);
        }
    }

    #[test]
    fn arithmetic_saturates_at_both_ends() {
        assert_eq!(Time::from_micros(u64::MAX), Time::NEVER);
        assert_eq!(Time::NEVER + Span::MAX, Time::NEVER);
        assert_eq!(Time::from_secs(u64::MAX), Time::NEVER);
        assert_eq!(Time::ZERO - Span::MAX, Time::ZERO);
        assert_eq!(Time::ZERO.since(Time::NEVER), Span::ZERO);
        assert_eq!(Span::MAX + Span::MAX, Span::MAX);
        assert_eq!(Span::from_secs(3).times(u64::MAX), Span::MAX);
        assert_eq!(Span::from_duration(Duration::MAX), Span::MAX);
    }

    #[test]
    fn conversions_round_up() {
        assert_eq!(Span::from_duration(Duration::from_nanos(1)).as_micros(), 1);
        assert_eq!(Span::from_micros(1).as_secs_ceil(), 1);
        assert_eq!(Span::from_secs(2).as_secs_ceil(), 2);
        assert_eq!(Time::from_micros(1_000_001).as_secs_ceil(), 2);
    }

    #[test]
    fn spans_print_in_readable_units() {
        for (micros, text) in [
            (0, "0s"),
            (1, "1us"),
            (500_000, "500ms"),
            (90_000_000, "1m30s"),
            (3_600_000_000, "1h"),
            (86_400_000_000, "1d"),
            (1_500_000, "1s500ms"),
        ] {
            assert_eq!(Span::from_micros(micros).to_string(), text);
        }
    }
}
