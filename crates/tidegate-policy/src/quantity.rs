//! Quantities: limits as people write them.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use tidegate_core::{Concurrency, LimitError, LimitKind, MAX_LIMIT, Quota, Rate, Span, Window};

use crate::calendar::{self, CivilCalendar, PeriodUnit};
use crate::nearest::nearest;
use crate::units::{Cursor, format_duration, read_duration};

/// The number of calls that a strict window remembers exactly; see [`Window`].
const WINDOW_ENTRIES: u32 = 64;

const NUMBER: &str = "a whole number, as in \"5 per 60s\"";
const FORMS: &str = "\"5 per 60s\", \"10/s burst 20\", \"1000 per calendar day\", \"8 in flight\" or \"unlimited\"";

/// The amount that a limit allows.
///
/// | written | means |
/// | --- | --- |
/// | `5 per 60s`, `5/60s`, `5 per minute` | strict window: no trailing 60 s ever holds more than 5 |
/// | `10/s`, `10/s burst 20`, `10 per 1s burst 20` | rate: smooth, with up to 20 at once (1 if unsaid) |
/// | `1000 per calendar day`, `1000 per day in America/Los_Angeles` | quota: counted by calendar `second`, `minute`, `hour`, `day`, `week` (from Monday), `month` or `year`; UTC if no zone |
/// | `8 in flight` | at most 8 calls at the same time |
/// | `unlimited` | no limit |
///
/// A bare unit after a slash is a rate. A length of time is a window, be it `60s` or one `second`, `minute`, `hour`,
/// `day` or `week`. `calendar` or a time zone makes a quota, and `burst` a rate. `per month` and `per year` alone are
/// errors: months and years differ in length. Numbers go up to 2^40 and may have `_` between digits. A quantity prints
/// in the shortest of these forms, which reads back as the same quantity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// A strict trailing window.
    Window {
        /// The largest count in any window.
        limit: u64,
        /// The window's length.
        window: Span,
    },
    /// GCRA: a smooth rate with a burst.
    Rate {
        /// Calls per `per`.
        count: u64,
        /// The period of the count.
        per: Span,
        /// The largest count that passes at once.
        burst: u64,
    },
    /// A calendar quota.
    Quota {
        /// The largest count in each period.
        limit: u64,
        /// The period.
        unit: PeriodUnit,
        /// The IANA time zone; `None` is UTC.
        zone: Option<String>,
    },
    /// Calls at the same time.
    InFlight {
        /// The most calls at once.
        limit: u64,
    },
    /// No limit.
    Unlimited,
}

/// An error in a text, with its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{message} at column {}: expected {expected}{}",
    range.start + 1,
    help.as_ref().map(|help| format!("; {help}")).unwrap_or_default()
)]
pub struct QuantityError {
    range: Range<usize>,
    message: String,
    expected: String,
    help: Option<String>,
}

impl QuantityError {
    pub(crate) fn new(at: Range<usize>, message: impl Into<String>, expected: impl Into<String>) -> Self {
        Self { range: at, message: message.into(), expected: expected.into(), help: None }
    }

    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Adds "did you mean" if there is a suggestion.
    pub(crate) fn did_you_mean(mut self, meant: Option<&str>) -> Self {
        if let Some(meant) = meant {
            self.help = Some(format!("did you mean `{meant}`?"));
        }
        self
    }

    /// The place of the error in the text, in bytes.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The error in words.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The form that is expected.
    pub fn expected(&self) -> &str {
        &self.expected
    }

    /// The suggested correction; `None` if there is none.
    pub fn help_text(&self) -> Option<&str> {
        self.help.as_deref()
    }
}

impl Quantity {
    /// The time after which a limit has forgotten all calls. The longest period, if its periods differ.
    pub fn forget_time(&self) -> Span {
        match self {
            Self::Window { window, .. } => *window,
            Self::Rate { count, per, burst } => {
                let refill = (u128::from(per.as_micros()) * u128::from(*burst)).div_ceil(u128::from((*count).max(1)));
                Span::from_micros(u64::try_from(refill).unwrap_or(u64::MAX))
            }
            Self::Quota { unit, .. } => unit.fixed_length().unwrap_or_else(|| {
                let days = if *unit == PeriodUnit::Month { 31 } else { 366 };
                Span::from_secs(days * 86_400)
            }),
            Self::InFlight { .. } => Concurrency::DEFAULT_LEASE,
            Self::Unlimited => Span::ZERO,
        }
    }

    /// The most that is ever available at once; `None` for `unlimited`.
    pub fn capacity(&self) -> Option<u64> {
        match self {
            Self::Window { limit, .. } | Self::Quota { limit, .. } | Self::InFlight { limit } => Some(*limit),
            Self::Rate { burst, .. } => Some(*burst),
            Self::Unlimited => None,
        }
    }

    pub(crate) fn is_in_flight(&self) -> bool {
        matches!(self, Self::InFlight { .. })
    }

    /// Returns the limit that enforces this quantity; `None` for `unlimited`.
    ///
    /// # Errors
    /// No limit can enforce the quantity, as with a rate of 0.
    pub fn to_limit_kind(&self) -> Result<Option<LimitKind>, LimitError> {
        Ok(Some(match self {
            Self::Window { limit, window } => LimitKind::Window(Window::new(*limit, *window, WINDOW_ENTRIES)?),
            Self::Rate { count, per, burst } => LimitKind::Rate(Rate::new(*count, *per, *burst)?),
            Self::Quota { limit, unit, zone } => {
                let calendar = CivilCalendar::new(*unit, calendar::zone_or_utc(zone.as_deref()));
                LimitKind::Quota(Quota::new(*limit, Arc::new(calendar))?)
            }
            Self::InFlight { limit } => LimitKind::Concurrency(Concurrency::new(*limit, Concurrency::DEFAULT_LEASE)?),
            Self::Unlimited => return Ok(None),
        }))
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Window { limit, window } => write!(f, "{limit} per {}", format_duration(*window)),
            Self::Rate { count, per, burst } => {
                let unit = match per.as_micros() {
                    1_000_000 => Some("s"),
                    60_000_000 => Some("m"),
                    3_600_000_000 => Some("h"),
                    _ => None,
                };
                match unit {
                    Some(unit) if *burst == 1 => write!(f, "{count}/{unit}"),
                    Some(unit) => write!(f, "{count}/{unit} burst {burst}"),
                    None => write!(f, "{count}/{} burst {burst}", format_duration(*per)),
                }
            }
            Self::Quota { limit, unit, zone } => match zone {
                Some(zone) => write!(f, "{limit} per {} in {zone}", unit.as_str()),
                None => write!(f, "{limit} per calendar {}", unit.as_str()),
            },
            Self::InFlight { limit } => write!(f, "{limit} in flight"),
            Self::Unlimited => f.write_str("unlimited"),
        }
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let mut cursor = Cursor::new(text);
        cursor.skip_space();
        let begin = cursor.position;
        let word = cursor.word();
        if word.text == "unlimited" {
            cursor.expect_end("nothing more after \"unlimited\"")?;
            return Ok(Self::Unlimited);
        }
        if !word.text.is_empty() {
            let message = format!("found `{}` where a number should be", word.text);
            return Err(QuantityError::new(word.range, message, FORMS).did_you_mean(nearest(word.text, ["unlimited"])));
        }
        if cursor.rest().is_empty() {
            return Err(QuantityError::new(0..text.len(), "the quantity is empty", FORMS));
        }
        let limit = cursor.number(MAX_LIMIT, NUMBER)?;
        cursor.skip_space();
        let quantity = parse_after_number(limit, &mut cursor)?;
        cursor.skip_space();
        if cursor.rest().starts_with([',', ';']) {
            let at = cursor.position..cursor.position + 1;
            let error = QuantityError::new(at, "found more than one limit in one string", "one limit");
            return Err(error.help("write a list, [\"10/s\", \"1000 per calendar day\"]: all of its limits must agree"));
        }
        cursor.expect_end("nothing more after the quantity")?;
        quantity.to_limit_kind().map_err(|error| range_error(begin..cursor.position, &error))?;
        Ok(quantity)
    }
}

fn range_error(at: Range<usize>, error: &LimitError) -> QuantityError {
    let (message, expected) = match error {
        LimitError::ZeroPeriod => ("a period of no length", "more than 0, as in \"5 per 60s\""),
        LimitError::ZeroRate => ("a rate of 0", "at least 1; to refuse everything, write \"0 per 60s\""),
        LimitError::ZeroBurst => ("a burst of 0, which lets nothing pass", "a burst of at least 1"),
        LimitError::TooManyPermits { .. } => ("too many calls in flight", "at most 4,096"),
        LimitError::TooSlow => ("a burst that takes more than 71 years to refill", "a smaller burst or a faster rate"),
        other => return QuantityError::new(at, other.to_string(), FORMS),
    };
    QuantityError::new(at, message, expected)
}

fn parse_after_number(limit: u64, cursor: &mut Cursor<'_>) -> Result<Quantity, QuantityError> {
    const EXPECTED: &str = "`per`, `/` or `in flight`";
    if cursor.take_char('/') {
        cursor.skip_space();
        return if cursor.peek().is_some_and(char::is_alphabetic) {
            parse_rate_per_unit(limit, cursor)
        } else {
            parse_window_or_rate(limit, cursor)
        };
    }
    let (here, found) = cursor.describe_next();
    let word = cursor.word_while(|letter| letter.is_alphabetic() || letter == '-');
    match word.text {
        "per" => {
            cursor.skip_space();
            if cursor.peek().is_some_and(char::is_alphabetic) {
                parse_period(limit, cursor)
            } else {
                parse_window_or_rate(limit, cursor)
            }
        }
        "in" => {
            cursor.skip_space();
            let (here, found) = cursor.describe_next();
            let flight = cursor.word();
            if flight.text == "flight" {
                return Ok(Quantity::InFlight { limit });
            }
            let error =
                QuantityError::new(here, format!("found {found} after `in`"), "`flight`, as in \"8 in flight\"");
            Err(error.help(format!("a number in a length of time is written \"{limit} per 60s\"")))
        }
        "in-flight" | "inflight" => Ok(Quantity::InFlight { limit }),
        "" if found == "nothing" => {
            let error = QuantityError::new(here, "only a number", format!("{limit} per what? {FORMS}"));
            Err(error.help(format!("did you mean \"{limit} per 60s\"?")))
        }
        "concurrent" | "parallel" | "simultaneous" => {
            let error = QuantityError::new(here, format!("found {found}"), EXPECTED);
            Err(error.help(format!("calls at the same time are written \"{limit} in flight\"")))
        }
        other => {
            // Common mistakes are "5 60s" and "5 requests per 60s".
            let error = QuantityError::new(here, format!("found {found} after the number"), EXPECTED);
            Err(match cursor.rest().find("per").filter(|_| !other.is_empty()) {
                Some(at) => {
                    error.help(format!("leave out the counted thing: write \"{limit} {}\"", &cursor.rest()[at..]))
                }
                None => error.did_you_mean(nearest(other, ["per", "in flight"])),
            })
        }
    }
}

/// Parses a length of time after `per` or `/`: a window, or a rate if `burst` follows.
fn parse_window_or_rate(limit: u64, cursor: &mut Cursor<'_>) -> Result<Quantity, QuantityError> {
    let begin = cursor.position;
    let per = read_duration(cursor)?;
    if per.is_zero() {
        return Err(range_error(begin..cursor.position, &LimitError::ZeroPeriod));
    }
    if let Some(burst) = parse_burst(cursor)? {
        return Ok(Quantity::Rate { count: limit, per, burst });
    }
    let mark = cursor.position;
    cursor.skip_space();
    let word = cursor.word();
    if word.text == "in" {
        let message = "a time zone after a length of time";
        let error = QuantityError::new(word.range, message, "a calendar period before the zone");
        let help = format!(
            "write \"{limit} per day in …\": calendar periods are second, minute, hour, day, week, month and year"
        );
        return Err(error.help(help));
    }
    cursor.position = mark;
    Ok(Quantity::Window { limit, window: per })
}

/// Parses a bare unit after `/`: a rate.
fn parse_rate_per_unit(count: u64, cursor: &mut Cursor<'_>) -> Result<Quantity, QuantityError> {
    let word = cursor.word();
    let per = match word.text {
        "s" | "sec" | "second" => Span::from_secs(1),
        "m" | "min" | "minute" => Span::from_secs(60),
        "h" | "hr" | "hour" => Span::from_secs(3600),
        "ms" => Span::from_millis(1),
        "d" | "day" | "w" | "week" | "month" | "y" | "year" => {
            let (calendar, window) = match word.text {
                "d" | "day" => ("day", "24h"),
                "w" | "week" => ("week", "7d"),
                "month" => ("month", "30d"),
                _ => ("year", "365d"),
            };
            let message = format!("`/{}` could mean two things", word.text);
            let error = QuantityError::new(word.range, message, "a rate per s, m or h, as in \"10/s burst 20\"");
            return Err(error.help(quota_or_window(count, calendar, window)));
        }
        other => {
            let expected = "s, m or h, as in \"10/s\", or a length of time, as in \"5/60s\"";
            let error = QuantityError::new(word.range, format!("unknown unit `{other}` after `/`"), expected);
            return Err(error.did_you_mean(nearest(other, ["sec", "second", "min", "minute", "hour"])));
        }
    };
    Ok(Quantity::Rate { count, per, burst: parse_burst(cursor)?.unwrap_or(1) })
}

fn quota_or_window(count: u64, period: &str, window: &str) -> String {
    format!(
        "write \"{count} per calendar {period}\" for a quota that resets with the calendar, or \"{count} per {window}\" \
         for any trailing {window}"
    )
}

/// After `per`, a word: a length of time, or a calendar period, which `calendar` or a time zone tells.
fn parse_period(limit: u64, cursor: &mut Cursor<'_>) -> Result<Quantity, QuantityError> {
    const CALENDAR_PERIODS: &str = "a calendar period: second, minute, hour, day, week, month or year";
    const WORDS: [&str; 8] = ["second", "minute", "hour", "day", "week", "month", "year", "calendar"];
    let mut word = cursor.word();
    let says_calendar = word.text == "calendar";
    if says_calendar {
        cursor.skip_space();
        let (here, found) = cursor.describe_next();
        word = cursor.word();
        if !PeriodUnit::ALL.iter().any(|unit| unit.as_str() == word.text) {
            let error = QuantityError::new(here, format!("found {found} after `calendar`"), CALENDAR_PERIODS);
            return Err(error.did_you_mean(nearest(word.text, PeriodUnit::ALL.map(PeriodUnit::as_str))));
        }
    }
    let Some(unit) = PeriodUnit::ALL.into_iter().find(|unit| unit.as_str() == word.text) else {
        let expected = "a length of time (60s, 1h, day) or a calendar period (\"calendar month\")";
        let error = QuantityError::new(word.range, format!("unknown period `{}`", word.text), expected);
        return Err(match word.text {
            "s" | "m" | "h" | "d" | "w" => {
                error.help(format!("did you mean \"{limit} per 1{0}\", any trailing 1{0}?", word.text))
            }
            other => error.did_you_mean(nearest(other, WORDS)),
        });
    };
    let mark = cursor.position;
    cursor.skip_space();
    let next = cursor.word();
    match (next.text, unit.fixed_length()) {
        ("in", _) => Ok(Quantity::Quota { limit, unit, zone: parse_zone_name(cursor)? }),
        ("burst", _) if says_calendar => {
            let error = QuantityError::new(next.range, "a calendar quota has no burst", "a quota or a rate");
            Err(error.help(format!("drop the burst, or write a rate: \"{limit}/h burst 20\"")))
        }
        _ if says_calendar => {
            cursor.position = mark;
            Ok(Quantity::Quota { limit, unit, zone: None })
        }
        (_, Some(span)) => {
            cursor.position = mark;
            Ok(match parse_burst(cursor)? {
                Some(burst) => Quantity::Rate { count: limit, per: span, burst },
                None => Quantity::Window { limit, window: span },
            })
        }
        (_, None) => {
            let days = if word.text == "month" { "30d" } else { "365d" };
            let message = format!("`per {}` could mean two things", word.text);
            let expected = format!("`per calendar {}`, a time zone, or a length of time", word.text);
            let error = QuantityError::new(word.range, message, expected);
            Err(error.help(quota_or_window(limit, word.text, days)))
        }
    }
}

/// The unit of a window that is written as one word, such as the day of `1000 per day`, if it could be taken for a
/// calendar period.
pub(crate) fn ambiguous_unit(quantity: &Quantity, text: &str) -> Option<PeriodUnit> {
    let Quantity::Window { .. } = quantity else { return None };
    let last = text.split_whitespace().next_back()?;
    let is_meant =
        |unit: &PeriodUnit| unit.as_str() == last && !matches!(unit, PeriodUnit::Second | PeriodUnit::Minute);
    PeriodUnit::ALL.into_iter().find(is_meant)
}

/// Parses the rest of a text as the name of a time zone; `None` for UTC.
pub(crate) fn parse_zone_name(cursor: &mut Cursor<'_>) -> Result<Option<String>, QuantityError> {
    const ZONE: &str = "a time zone from the IANA database, such as Europe/Paris";
    cursor.skip_space();
    let begin = cursor.position;
    let name = cursor.rest().trim_end_matches([' ', '\t']);
    cursor.position += name.len();
    let at = begin..cursor.position;
    if name.is_empty() {
        return Err(QuantityError::new(at, "the time zone is missing", ZONE));
    }
    match calendar::find_zone(name) {
        Ok((_, name)) => Ok(Some(name).filter(|name| name != "UTC")),
        Err(meant) => {
            Err(QuantityError::new(at, format!("unknown time zone `{name}`"), ZONE).did_you_mean(meant.as_deref()))
        }
    }
}

fn parse_burst(cursor: &mut Cursor<'_>) -> Result<Option<u64>, QuantityError> {
    let mark = cursor.position;
    cursor.skip_space();
    if cursor.word().text != "burst" {
        cursor.position = mark;
        return Ok(None);
    }
    cursor.skip_space();
    let begin = cursor.position;
    let burst = cursor.number(MAX_LIMIT, "how many may pass at once, as in \"burst 20\"")?;
    if burst == 0 {
        return Err(range_error(begin..cursor.position, &LimitError::ZeroBurst));
    }
    Ok(Some(burst))
}

#[cfg(test)]
mod tests;
