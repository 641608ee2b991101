//! The times of requests, in the formats of logs.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::{Offset, TimeZone};
use tidegate_core::Time;

/// The length of `10/Oct/2000:13:55:36 -0700`.
const CLF_LENGTH: usize = 26;
const MONTHS: [&[u8; 3]; 12] =
    [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];

/// Reads the common log format's times. Lines of the same second have the same text, so the last one is cached.
#[derive(Clone, Debug, Default)]
pub(super) struct ClfTimeParser {
    text: [u8; CLF_LENGTH],
    time: Option<Time>,
}

impl ClfTimeParser {
    /// Reads a time such as `10/Oct/2000:13:55:36 -0700`.
    #[inline]
    pub(super) fn parse(&mut self, text: &[u8]) -> Option<Time> {
        let text = <&[u8; CLF_LENGTH]>::try_from(text).ok()?;
        if self.time.is_none() || self.text != *text {
            self.time = None;
            self.time = Some(parse_clf(text)?);
            self.text = *text;
        }
        self.time
    }
}

fn parse_clf(text: &[u8; CLF_LENGTH]) -> Option<Time> {
    let [d1, d2, b'/', m1, m2, m3, b'/', y1, y2, y3, y4, b':', h1, h2, b':', n1, n2, b':', s1, s2, b' ', sign, z @ ..] =
        text
    else {
        return None;
    };
    let month = MONTHS.iter().position(|name| **name == [*m1, *m2, *m3])? as i8 + 1;
    let year = two_digits(*y1, *y2)? as i16 * 100 + two_digits(*y3, *y4)? as i16;
    let sign = match sign {
        b'+' => 1,
        b'-' => -1,
        _ => return None,
    };
    let [z1, z2, z3, z4] = *z;
    let offset = sign * (i32::from(two_digits(z1, z2)?) * 3600 + i32::from(two_digits(z3, z4)?) * 60);
    // A leap second counts as the last second of its minute.
    let second = two_digits(*s1, *s2)?.min(59);
    let civil =
        DateTime::new(year, month, two_digits(*d1, *d2)?, two_digits(*h1, *h2)?, two_digits(*n1, *n2)?, second, 0)
            .ok()?;
    to_time(Offset::from_seconds(offset).ok()?.to_timestamp(civil).ok()?)
}

fn two_digits(tens: u8, ones: u8) -> Option<i8> {
    (tens.is_ascii_digit() && ones.is_ascii_digit()).then(|| ((tens - b'0') * 10 + (ones - b'0')) as i8)
}

/// Reads a time as text: ISO 8601 with or without a zone (then UTC), with `/` for `-` as Go's log writes it, a number,
/// or the common log format.
pub(super) fn parse_text(text: &str) -> Option<Time> {
    let text = text.trim_ascii();
    let text = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    if let Ok(number) = text.parse::<f64>() {
        return from_epoch_number(number);
    }
    if let Ok(bytes) = text.as_bytes().try_into()
        && let Some(time) = parse_clf(bytes)
    {
        return Some(time);
    }
    let read = |text: &str| {
        let stamp = text.parse::<Timestamp>().ok();
        let civil = || text.parse::<DateTime>().ok()?.to_zoned(TimeZone::UTC).ok().map(|zoned| zoned.timestamp());
        stamp.or_else(civil)
    };
    to_time(
        read(text)
            .or_else(|| text.get(4..5).filter(|mark| *mark == "/").and_then(|_| read(&text.replace('/', "-"))))?,
    )
}

/// Returns the time of a number since the Unix epoch. Its size tells if it is in seconds, milli-, micro- or
/// nanoseconds. Numbers are seconds up to the year 5138, and milliseconds from March 1973 on.
pub(super) fn from_epoch_number(number: f64) -> Option<Time> {
    let micros = match number {
        number if !(0.0..1e20).contains(&number) => return None,
        number if number < 1e11 => number * 1e6,
        number if number < 1e14 => number * 1e3,
        number if number < 1e17 => number,
        number => number / 1e3,
    };
    Some(Time::from_micros(micros.round() as u64))
}

fn to_time(stamp: Timestamp) -> Option<Time> {
    u64::try_from(stamp.as_microsecond()).ok().map(Time::from_micros)
}

/// Formats a time for a reader, in UTC to the second.
pub(crate) fn format_time(time: Time) -> String {
    let stamp = Timestamp::from_microsecond(time.as_micros().cast_signed()).unwrap_or_default();
    stamp.strftime("%Y-%m-%d %H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn common_log_times_are_parsed() {
        let mut clf = ClfTimeParser::default();
        for (text, secs) in [
            ("10/Oct/2000:13:55:36 -0700", Some(971_211_336)),
            ("10/Oct/2000:13:55:36 -0700", Some(971_211_336)),
            ("29/Feb/2024:23:59:59 +0530", Some(1_709_231_399)),
            ("31/Dec/2016:23:59:60 +0000", Some(1_483_228_799)),
            ("01/Jan/1970:00:00:00 +0000", Some(0)),
            ("31/Dec/1969:23:59:59 +0000", None),
            ("30/Feb/2024:23:59:59 +0000", None),
            ("10/Okt/2000:13:55:36 -0700", None),
            ("10/Oct/2000:13:55:36 *0700", None),
            ("10/Oct/2000:24:55:36 -0700", None),
            ("10/Oct/2000:13:55:36 -070", None),
            ("+1/Oct/2000:13:55:36 -0700", None),
            ("", None),
        ] {
            assert_eq!(clf.parse(text.as_bytes()), secs.map(Time::from_secs), "{text}");
        }
    }

    #[test]
    fn other_time_formats_are_parsed() {
        let micros = 1_700_000_000_250_000;
        for text in [
            "2023-11-14T22:13:20.25Z",
            "2023-11-14T23:13:20.250+01:00",
            "2023-11-14T22:13:20.25",
            "2023-11-14 22:13:20.25",
            "2023/11/14 22:13:20.25",
            "1700000000.250",
            "1700000000250",
            "1700000000250000",
            "1700000000250000000",
        ] {
            assert_eq!(parse_text(text), Some(Time::from_micros(micros)), "{text}");
        }
        assert_eq!(parse_text("14/Nov/2023:22:13:20 +0000"), Some(Time::from_secs(1_700_000_000)));
        assert_eq!(parse_text("[14/Nov/2023:22:13:20 +0000]"), Some(Time::from_secs(1_700_000_000)));
        for text in ["", "yesterday", "-1", "NaN", "inf", "2023-13-14T22:13:20Z", "22:13:20"] {
            assert_eq!(parse_text(text), None, "{text}");
        }
        assert_eq!(format_time(Time::from_micros(micros)), "2023-11-14 22:13:20Z");
    }

    proptest! {
        #[test]
        fn formatted_times_parse_back(secs in 0_u64..4_000_000_000, offset in -14 * 60_i32..=14 * 60) {
            let stamp = Timestamp::from_second(secs.cast_signed()).unwrap();
            let zoned = stamp.to_zoned(TimeZone::fixed(Offset::from_seconds(offset * 60).unwrap()));
            let text = zoned.strftime("%d/%b/%Y:%H:%M:%S %z").to_string();
            prop_assert_eq!(ClfTimeParser::default().parse(text.as_bytes()), Some(Time::from_secs(secs)));
        }

        #[test]
        fn any_time_text_is_read_without_panic(text in ".{0,40}") {
            let _ = parse_text(&text);
        }
    }
}
