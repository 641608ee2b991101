//! Hours of the day in a time zone.

use std::fmt;
use std::str::FromStr;

use jiff::civil;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan as _, Zoned};
use tidegate_core::Time;

use crate::calendar;
use crate::quantity::{QuantityError, parse_zone_name};
use crate::units::Cursor;

const FORM: &str = "hours such as \"22:00-06:00 in Europe/Berlin\"";

/// Hours of the day, such as `22:00-06:00 in Europe/Berlin`: from the first time up to the second, exclusive. They pass
/// midnight if the second time is earlier. Without a zone they are in UTC.
///
/// They follow the clocks of the zone, so a night in which the clocks change is an hour shorter or longer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoursOfDay {
    from: civil::Time,
    to: civil::Time,
    zone: TimeZone,
    zone_name: Option<String>,
}

impl HoursOfDay {
    /// The first moment from `now` on that is within the hours; `now` itself if it is.
    pub fn next_within(&self, now: Time) -> Time {
        let Some(local) = self.local(now) else { return now };
        if self.contains(&local) {
            return now;
        }
        // They begin when the clocks show their start (once, twice or never on a day), or when the clocks jump into
        // them.
        let days = (-1..=2).filter_map(|days: i64| local.date().checked_add(days.days()).ok());
        let shown = days.flat_map(|day| {
            let begin = self.zone.clone().into_ambiguous_zoned(day.to_datetime(self.from));
            [begin.clone().earlier(), begin.later()].map(|begin| begin.ok().map(|begin| begin.timestamp()))
        });
        let jumps = self.zone.following(local.timestamp()).take(2).map(|change| Some(change.timestamp()));
        let begins = shown.chain(jumps).flatten().filter(|at| *at > local.timestamp());
        let first = begins.filter(|at| self.contains(&at.to_zoned(self.zone.clone()))).min();
        let micros = first.and_then(|at| u64::try_from(at.as_microsecond()).ok());
        micros.map_or(now, Time::from_micros)
    }

    fn local(&self, at: Time) -> Option<Zoned> {
        let micros = i64::try_from(at.as_micros()).ok()?;
        Some(Timestamp::from_microsecond(micros).ok()?.to_zoned(self.zone.clone()))
    }

    fn contains(&self, local: &Zoned) -> bool {
        let time = local.time();
        if self.from < self.to { self.from <= time && time < self.to } else { self.from <= time || time < self.to }
    }
}

impl fmt::Display for HoursOfDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.from.strftime("%H:%M"), self.to.strftime("%H:%M"))?;
        self.zone_name.as_ref().map_or(Ok(()), |zone| write!(f, " in {zone}"))
    }
}

impl FromStr for HoursOfDay {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let mut cursor = Cursor::new(text);
        cursor.skip_space();
        let begin = cursor.position;
        let from = time_of_day(&mut cursor)?;
        cursor.skip_space();
        let (here, found) = cursor.describe_next();
        if !cursor.take_char('-') {
            let error = QuantityError::new(here, format!("found {found} after the first time"), FORM);
            return Err(error.help("a `-` separates the two times"));
        }
        cursor.skip_space();
        let to = time_of_day(&mut cursor)?;
        if from == to {
            let error = QuantityError::new(begin..cursor.position, "both times are the same", FORM);
            return Err(error.help("for the whole day, leave the hours out"));
        }
        cursor.skip_space();
        let (here, found) = cursor.describe_next();
        let zone_name = match cursor.word().text {
            "" => None,
            "in" => parse_zone_name(&mut cursor)?,
            _ => {
                let error = QuantityError::new(here, format!("found {found} after the hours"), FORM);
                return Err(error.help("a time zone is written behind `in`"));
            }
        };
        cursor.expect_end("nothing more after the hours")?;
        Ok(Self { from, to, zone: calendar::zone_or_utc(zone_name.as_deref()), zone_name })
    }
}

/// Parses a time such as `6:30` or `22:00`; `24:00` is midnight.
fn time_of_day(cursor: &mut Cursor<'_>) -> Result<civil::Time, QuantityError> {
    let word = cursor.word_while(|letter| letter.is_ascii_digit() || letter == ':');
    if word.text.is_empty() {
        let (here, found) = cursor.describe_next();
        return Err(QuantityError::new(here, format!("found {found} where a time of day should be"), FORM));
    }
    let error = QuantityError::new(word.range, format!("`{}` is no time of day", word.text), FORM);
    let parts = word.text.split_once(':').filter(|(hour, minute)| hour.len() <= 2 && minute.len() == 2);
    let Some((hour, minute)) = parts else { return Err(error.help("a time is written 06:30")) };
    match (hour.parse(), minute.parse()) {
        (Ok(24), Ok(0)) => Ok(civil::Time::midnight()),
        (Ok(hour), Ok(minute)) => {
            civil::Time::new(hour, minute, 0, 0).map_err(|_| error.help("a day has 00:00 to 24:00"))
        }
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(text: &str) -> Time {
        let micros = text.parse::<Timestamp>().unwrap().as_microsecond();
        Time::from_micros(u64::try_from(micros).unwrap())
    }

    fn hours(text: &str) -> HoursOfDay {
        text.parse().unwrap()
    }

    #[test]
    fn hours_may_cross_midnight_or_not() {
        let night = hours("22:00-06:00");
        for (now, next) in [
            ("2026-11-21T21:59:59.999999Z", "2026-11-21T22:00:00Z"),
            ("2026-11-21T22:00:00Z", "2026-11-21T22:00:00Z"),
            ("2026-11-22T05:59:59.999999Z", "2026-11-22T05:59:59.999999Z"),
            ("2026-11-22T06:00:00Z", "2026-11-22T22:00:00Z"),
        ] {
            assert_eq!(night.next_within(at(now)), at(next), "{now}");
        }
        let noon = hours("12:00 - 13:30 in Europe/Berlin");
        for (now, next) in [
            ("2026-11-21T10:59:59Z", "2026-11-21T11:00:00Z"),
            ("2026-11-21T12:29:59Z", "2026-11-21T12:29:59Z"),
            ("2026-11-21T12:30:00Z", "2026-11-22T11:00:00Z"),
        ] {
            assert_eq!(noon.next_within(at(now)), at(next), "{now}");
        }
        assert_eq!(hours("18:00-24:00").next_within(at("2026-11-21T00:00:00Z")), at("2026-11-21T18:00:00Z"));
    }

    #[test]
    fn hours_are_right_when_clocks_go_forward() {
        // On 2026-03-29, the clocks in Berlin go from 02:00 to 03:00, at 01:00 UTC.
        let early = hours("02:30-06:00 in europe/berlin");
        assert_eq!(
            early.next_within(at("2026-03-29T00:10:00Z")),
            at("2026-03-29T01:00:00Z"),
            "the clocks jump into them"
        );
        let missing = hours("02:10-02:50 in Europe/Berlin");
        assert_eq!(missing.next_within(at("2026-03-29T00:10:00Z")), at("2026-03-30T00:10:00Z"), "a day without them");
    }

    #[test]
    fn hours_are_right_when_clocks_go_back() {
        // On 2026-10-25, the clocks in Berlin go from 03:00 to 02:00, at 01:00 UTC: the hour from 02:00 is shown twice.
        let twice = hours("02:10-02:50 in Europe/Berlin");
        for (now, next) in [
            ("2026-10-24T23:00:00Z", "2026-10-25T00:10:00Z"),
            ("2026-10-25T00:50:00Z", "2026-10-25T01:10:00Z"),
            ("2026-10-25T01:50:00Z", "2026-10-26T01:10:00Z"),
        ] {
            assert_eq!(twice.next_within(at(now)), at(next), "{now}");
        }
    }

    #[test]
    fn invalid_hours_are_errors() {
        for (text, message) in [
            ("", "found nothing where a time of day should be"),
            ("22:00", "found nothing after the first time"),
            ("22-06", "`22` is no time of day"),
            ("22:00-06:0", "`06:0` is no time of day"),
            ("25:00-06:00", "`25:00` is no time of day"),
            ("22:00-22:00", "both times are the same"),
            ("24:00-00:00", "both times are the same"),
            ("22:00-06:00 Europe/Berlin", "found `Europe/Berlin` after the hours"),
            ("22:00-06:00 in Europe/Berln", "unknown time zone `Europe/Berln`"),
        ] {
            assert_eq!(text.parse::<HoursOfDay>().unwrap_err().message(), message, "{text}");
        }
        assert_eq!(hours("22:00-6:00 in europe/berlin").to_string(), "22:00-06:00 in Europe/Berlin");
    }

    proptest! {
        /// The returned moment is within the hours, and no moment between now and it is.
        #[test]
        fn next_within_returns_the_earliest_time(now in 0_u64..4_000_000_000, from in 0_u32..1440, length in 1_u32..1440) {
            let to = (from + length) % 1440;
            let text = format!("{:02}:{:02}-{:02}:{:02} in America/New_York", from / 60, from % 60, to / 60, to % 60);
            let hours = hours(&text);
            let now = Time::from_secs(now);
            let next = hours.next_within(now);
            prop_assert!(hours.contains(&hours.local(next).unwrap()));
            let gap = next.since(now).as_micros();
            for step in 0..100 {
                let between = Time::from_micros(now.as_micros() + gap / 100 * step);
                prop_assert!(between == next || !hours.contains(&hours.local(between).unwrap()), "{between:?}");
            }
        }
    }
}
