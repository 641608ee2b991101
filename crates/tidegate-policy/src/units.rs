//! Durations, byte counts and whole numbers as people write them.

use std::ops::Range;

use tidegate_core::{MAX_LIMIT, Span};

use crate::nearest::nearest;
use crate::quantity::QuantityError;

/// The expected form of a duration, for errors.
const DURATION: &str = "a duration such as \"500ms\", \"30s\", \"1m30s\", \"1.5h\" or \"2d\"";
const BYTES: &str = "a number of bytes such as \"64KiB\", \"10MiB\" or \"1GB\"";

/// Time units: every spelling, and its length in microseconds.
const TIME_UNITS: [(&[&str], u64); 7] = [
    (&["us", "µs", "μs", "usec", "usecs", "microsecond", "microseconds"], 1),
    (&["ms", "msec", "msecs", "millis", "millisecond", "milliseconds"], 1_000),
    (&["s", "sec", "secs", "second", "seconds"], 1_000_000),
    (&["m", "min", "mins", "minute", "minutes"], 60_000_000),
    (&["h", "hr", "hrs", "hour", "hours"], 3_600_000_000),
    (&["d", "day", "days"], 86_400_000_000),
    (&["w", "wk", "wks", "week", "weeks"], 604_800_000_000),
];

const SIZE_UNITS: [(&str, u64); 9] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// Reads a duration in the forms of humantime and Go: `500ms`, `30s`, `1m30s`, `1.5h`, `2d`, `1h 30min`. Units go from
/// `us` to `w`. Fractions of a microsecond are rounded up.
///
/// # Errors
/// The text is no duration, or the duration is longer than 142 years. The error names the place in the text, what was
/// found and what is expected.
pub fn parse_duration(text: &str) -> Result<Span, QuantityError> {
    let mut cursor = Cursor::new(text);
    cursor.skip_space();
    let span = read_duration(&mut cursor)?;
    cursor.expect_end("nothing more after the duration")?;
    Ok(span)
}

/// Reads a whole number of bytes: `512`, `64KiB`, `10MiB`, `1GB`. Here kB, MB, GB are powers of 1000, and KiB, MiB, GiB
/// of 1024.
///
/// # Errors
/// The text is no number of bytes, or the number is 2^63 or more. The error names the place in the text, what was found
/// and what is expected.
pub fn parse_bytes(text: &str) -> Result<u64, QuantityError> {
    let mut cursor = Cursor::new(text);
    cursor.skip_space();
    let number = cursor.number(u64::MAX >> 1, BYTES)?;
    cursor.skip_space();
    let word = cursor.word();
    // No two units differ only in case, so letters in the wrong case are accepted. A bare K, M or G is an error that
    // suggests a unit.
    let unit = SIZE_UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(word.text));
    let size = match unit {
        Some((_, size)) => *size,
        None if word.text.is_empty() => 1,
        None => {
            let error = QuantityError::new(word.range, format!("unknown unit `{}`", word.text), BYTES);
            return Err(error.did_you_mean(suggest_size_unit(word.text)));
        }
    };
    cursor.expect_end("nothing more after the unit")?;
    number
        .checked_mul(size)
        .filter(|bytes| *bytes <= u64::MAX >> 1)
        .ok_or_else(|| QuantityError::new(0..text.len(), "too many bytes", "fewer than 2^63"))
}

/// The unit to suggest for an unknown one.
fn suggest_size_unit(word: &str) -> Option<&'static str> {
    let lower = word.to_ascii_lowercase();
    match lower.as_str() {
        "b" | "byte" | "bytes" => Some("B"),
        "k" | "kilobyte" | "kilobytes" | "kibibyte" | "kibibytes" => Some("KiB"),
        "m" | "megabyte" | "megabytes" | "mebibyte" | "mebibytes" => Some("MiB"),
        "g" | "gigabyte" | "gigabytes" | "gibibyte" | "gibibytes" => Some("GiB"),
        _ => nearest(word, SIZE_UNITS.iter().map(|(name, _)| *name)),
    }
}

/// Reads a duration at the start of the remaining text: at least one number with its unit.
pub(crate) fn read_duration(cursor: &mut Cursor<'_>) -> Result<Span, QuantityError> {
    let begin = cursor.position;
    let mut total: u128 = 0;
    let mut last_unit = None;
    loop {
        let number_at = cursor.position;
        if cursor.peek() == Some('-') {
            return Err(QuantityError::new(number_at..number_at + 1, "a duration can't be negative", DURATION));
        }
        let (whole, fraction, digits) = cursor.decimal(DURATION)?;
        let number = number_at..cursor.position;
        let number_text = cursor.slice(number.clone());
        cursor.skip_space();
        let word = cursor.word();
        // "1h30" probably means minutes, the next smaller unit, but the text must say so.
        if word.text.is_empty()
            && let Some(smaller) = last_unit.and_then(next_smaller_unit)
        {
            let written = cursor.slice(begin..number.end).trim_end();
            let error = QuantityError::new(number, format!("the number {number_text} has no unit"), DURATION);
            return Err(error.help(format!("did you mean \"{written}{smaller}\"?")));
        }
        let unit = time_unit(&word, number, number_text)?;
        last_unit = Some(unit);
        let scale = 10_u128.pow(digits);
        let micros = (u128::from(whole) * scale + u128::from(fraction)) * u128::from(unit);
        total = total.saturating_add(micros.div_ceil(scale));
        let after_unit = cursor.position;
        cursor.skip_space();
        if !cursor.peek().is_some_and(|next| next.is_ascii_digit()) {
            cursor.position = after_unit;
            break;
        }
    }
    u64::try_from(total).ok().filter(|micros| *micros <= Span::MAX.as_micros()).map(Span::from_micros).ok_or_else(
        || QuantityError::new(begin..cursor.position, "that is too long", "at most 142 years (52,000 days)"),
    )
}

/// The unit to suggest for a number without one that follows a number of this unit.
fn next_smaller_unit(unit: u64) -> Option<&'static str> {
    let at = TIME_UNITS.iter().position(|(_, micros)| *micros == unit)?;
    TIME_UNITS.get(at.checked_sub(1)?).and_then(|(spellings, _)| spellings.first().copied())
}

fn time_unit(word: &TextWord<'_>, number: Range<usize>, number_text: &str) -> Result<u64, QuantityError> {
    if let Some((_, micros)) = TIME_UNITS.iter().find(|(spellings, _)| spellings.contains(&word.text)) {
        return Ok(*micros);
    }
    if word.text.is_empty() {
        let error = QuantityError::new(number, format!("the number {number_text} has no unit"), DURATION);
        return Err(error.help(format!("did you mean \"{number_text}s\" or \"{number_text}ms\"?")));
    }
    let error = QuantityError::new(word.range.clone(), format!("unknown unit of time `{}`", word.text), DURATION);
    Err(match word.text {
        "ns" | "nsec" | "nanos" => error.help("the smallest unit is us (a millionth of a second)"),
        "M" | "mo" | "month" | "months" | "y" | "yr" | "year" | "years" => error.help(
            "months and years differ in length: give days (\"30d\"), or a calendar quota (\"1000 per calendar month\") where a \
             limit is wanted",
        ),
        other => error.did_you_mean(nearest(other, TIME_UNITS.iter().flat_map(|(spellings, _)| spellings.iter().copied()))),
    })
}

/// A text with a position up to which it is parsed.
pub(crate) struct Cursor<'t> {
    text: &'t str,
    pub(crate) position: usize,
}

/// A run of letters, and its range in the text.
pub(crate) struct TextWord<'t> {
    pub(crate) text: &'t str,
    pub(crate) range: Range<usize>,
}

impl<'t> Cursor<'t> {
    pub(crate) fn new(text: &'t str) -> Self {
        Self { text, position: 0 }
    }

    pub(crate) fn rest(&self) -> &'t str {
        &self.text[self.position..]
    }

    pub(crate) fn slice(&self, range: Range<usize>) -> &'t str {
        &self.text[range]
    }

    pub(crate) fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    pub(crate) fn skip_space(&mut self) {
        self.skip_while(|letter| letter == ' ' || letter == '\t');
    }

    /// Takes this character if it is next.
    pub(crate) fn take_char(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        if found {
            self.position += wanted.len_utf8();
        }
        found
    }

    fn skip_while(&mut self, holds: impl Fn(char) -> bool) {
        let rest = self.rest();
        self.position += rest.find(|letter| !holds(letter)).unwrap_or(rest.len());
    }

    /// Takes a run of letters, perhaps empty.
    pub(crate) fn word(&mut self) -> TextWord<'t> {
        self.word_while(char::is_alphabetic)
    }

    pub(crate) fn word_while(&mut self, holds: impl Fn(char) -> bool) -> TextWord<'t> {
        let begin = self.position;
        self.skip_while(holds);
        TextWord { text: &self.text[begin..self.position], range: begin..self.position }
    }

    /// Describes the next text for errors: up to a space, a tab or a comma, or `nothing` at the end.
    pub(crate) fn describe_next(&self) -> (Range<usize>, String) {
        let length = self.rest().find([' ', '\t', ',']).unwrap_or(self.rest().len());
        let length = if length == 0 { self.peek().map_or(0, char::len_utf8) } else { length };
        let at = self.position..self.position + length;
        let found = if length == 0 { "nothing".to_owned() } else { format!("`{}`", self.slice(at.clone())) };
        (at, found)
    }

    /// Fails unless only white space follows.
    pub(crate) fn expect_end(&mut self, expected: &str) -> Result<(), QuantityError> {
        self.skip_space();
        if self.rest().is_empty() {
            return Ok(());
        }
        let (at, found) = self.describe_next();
        Err(QuantityError::new(at, format!("found {found}"), expected))
    }

    /// Takes a whole number up to `most`; `_` may be between digits.
    pub(crate) fn number(&mut self, most: u64, expected: &str) -> Result<u64, QuantityError> {
        let begin = self.position;
        let (whole, _, fraction_digits) = self.decimal(expected)?;
        let at = begin..self.position;
        let text = self.slice(at.clone());
        if fraction_digits > 0 {
            return Err(QuantityError::new(at, format!("{text} is not a whole number"), expected));
        }
        if whole > most {
            let limit = if most == MAX_LIMIT { "2^40 (1,099,511,627,776)".to_owned() } else { most.to_string() };
            return Err(QuantityError::new(at, format!("{text} is too large"), format!("at most {limit}")));
        }
        Ok(whole)
    }

    /// Takes a number that may have a fraction: the whole part, the fraction's digits as a number, and their count.
    fn decimal(&mut self, expected: &str) -> Result<(u64, u64, u32), QuantityError> {
        let begin = self.position;
        let whole = self.digits();
        if whole.is_empty() {
            let (at, found) = self.describe_next();
            let message = if self.peek() == Some('-') {
                format!("found {found}, but it can't be negative")
            } else {
                format!("found {found} where a number should be")
            };
            return Err(QuantityError::new(at, message, expected));
        }
        let mut fraction = String::new();
        if self.take_char('.') {
            fraction = self.digits();
            if fraction.is_empty() {
                return Err(QuantityError::new(begin..self.position, "digits are missing after the point", expected));
            }
        }
        if self.peek() == Some(',') && self.rest()[1..].starts_with(|next: char| next.is_ascii_digit()) {
            self.word_while(|next| next.is_ascii_digit() || next == ',');
            let text = self.slice(begin..self.position);
            let plain = text.replace(',', "_");
            let message = format!("found a comma in the number {text}");
            let error = QuantityError::new(begin..self.position, message, expected);
            return Err(error.help(format!("write {plain} or {}", text.replace(',', ""))));
        }
        let too_long = |at: usize| QuantityError::new(begin..at, "the number has too many digits", expected);
        let digits =
            u32::try_from(fraction.len()).ok().filter(|digits| *digits <= 9).ok_or_else(|| too_long(self.position))?;
        let whole = whole.parse().map_err(|_| too_long(self.position))?;
        let fraction = if digits == 0 { 0 } else { fraction.parse().map_err(|_| too_long(self.position))? };
        Ok((whole, fraction, digits))
    }

    /// Takes digits and drops each `_` between them. A `_` that isn't between digits ends them.
    fn digits(&mut self) -> String {
        let mut digits = String::new();
        while let Some(next) = self.peek() {
            let follows_digit = self.rest()[next.len_utf8()..].starts_with(|after: char| after.is_ascii_digit());
            if next.is_ascii_digit() {
                digits.push(next);
            } else if next != '_' || digits.is_empty() || !follows_digit {
                break;
            }
            self.position += 1;
        }
        digits
    }
}

/// Formats a duration for people: `60 s`, `10 min`, `1 h 30 min`, `500 ms`. Whole seconds up to two minutes stay in
/// seconds.
pub(crate) fn describe_duration(span: Span) -> String {
    const UNITS: [(&str, u64); 6] =
        [("d", 86_400_000_000), ("h", 3_600_000_000), ("min", 60_000_000), ("s", 1_000_000), ("ms", 1_000), ("µs", 1)];
    let mut rest = span.as_micros();
    if rest.is_multiple_of(1_000_000) && rest <= 120_000_000 {
        return format!("{} s", rest / 1_000_000);
    }
    let mut pieces = Vec::new();
    for (unit, size) in UNITS {
        if rest >= size {
            pieces.push(format!("{} {unit}", rest / size));
            rest %= size;
        }
    }
    pieces.join(" ")
}

/// Formats seconds for people: `120 s`, `10 min`, `15 h 1 min 39 s`.
///
/// ```
/// assert_eq!(tidegate_policy::describe_seconds(54_099), "15 h 1 min 39 s");
/// ```
pub fn describe_seconds(seconds: u64) -> String {
    describe_duration(Span::from_secs(seconds))
}

/// Formats a duration as a policy writes it, so that [`parse_duration`] reads it back: `60s`, `10m`, `1h30m`.
pub(crate) fn format_duration(span: Span) -> String {
    let micros = span.as_micros();
    if micros.is_multiple_of(1_000_000) && micros <= 120_000_000 {
        format!("{}s", micros / 1_000_000)
    } else {
        span.to_string()
    }
}

/// Formats thousandths as a percentage: "20 %", "12.5 %".
pub(crate) fn format_percent(thousandths: u16) -> String {
    match thousandths % 10 {
        0 => format!("{} %", thousandths / 10),
        tenths => format!("{}.{tenths} %", thousandths / 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations_are_parsed() {
        for (text, micros) in [
            ("500ms", 500_000),
            ("30s", 30_000_000),
            ("1m30s", 90_000_000),
            ("1.5h", 5_400_000_000),
            ("2d", 172_800_000_000),
            ("1h 30min", 5_400_000_000),
            ("1h15m30.918273645s", 4_530_918_274),
            ("0s", 0),
            ("3 us", 3),
            ("0.1us", 1),
            ("1_000ms", 1_000_000),
            ("1w", 604_800_000_000),
            ("2 days", 172_800_000_000),
        ] {
            assert_eq!(parse_duration(text).map(Span::as_micros), Ok(micros), "{text}");
        }
    }

    #[test]
    fn duration_errors_state_their_position() {
        for (text, at, message) in [
            ("60", 0..2, "the number 60 has no unit"),
            ("", 0..0, "found nothing where a number should be"),
            ("5sx", 1..3, "unknown unit of time `sx`"),
            ("10 minuts", 3..9, "unknown unit of time `minuts`"),
            ("-5s", 0..1, "a duration can't be negative"),
            ("1.s", 0..2, "digits are missing after the point"),
            ("5s!", 2..3, "found `!`"),
            ("1,000s", 0..5, "found a comma in the number 1,000"),
            ("99999999d", 0..9, "that is too long"),
            ("99999999999999999999999s", 0..23, "the number has too many digits"),
            ("NaN", 0..3, "found `NaN` where a number should be"),
            ("2 months", 2..8, "unknown unit of time `months`"),
        ] {
            let error = parse_duration(text).unwrap_err();
            assert_eq!((error.range(), error.message()), (at, message), "{text}");
        }
        assert_eq!(parse_duration("10 minuts").unwrap_err().help_text(), Some("did you mean `minute`?"));
    }

    #[test]
    fn byte_sizes_are_parsed() {
        for (text, bytes) in [
            ("512", 512),
            ("64KiB", 65_536),
            ("64 kib", 65_536),
            ("10MiB", 10 << 20),
            ("1GB", 1_000_000_000),
            ("1_000 B", 1000),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "1.5MiB", "10MiBB", "KiB", "-1", "9223372036854775808", "9999999999 TiB", "1 K", "1 MiB x"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_are_described_in_words() {
        for (secs, words) in [(2, "2 s"), (60, "60 s"), (600, "10 min"), (3600, "1 h"), (5400, "1 h 30 min")] {
            assert_eq!(describe_duration(Span::from_secs(secs)), words);
        }
        assert_eq!(describe_duration(Span::from_millis(1500)), "1 s 500 ms");
    }

    proptest! {
        #[test]
        fn formatted_durations_parse_back(micros in 0_u64..1 << 52) {
            let span = Span::from_micros(micros);
            prop_assert_eq!(parse_duration(&format_duration(span)), Ok(span));
        }
    }
}
