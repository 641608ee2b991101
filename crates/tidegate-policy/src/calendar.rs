//! Calendar periods in any time zone: the start and end of the hours, days and other periods of quotas.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use jiff::civil::{Date, Weekday};
use jiff::tz::{TimeZone, TimeZoneDatabase};
use jiff::{SignedDuration, Span as Calendrical, Timestamp, ToSpan as _, Zoned};
use tidegate_core::{Calendar, Period, Span, Time};

use crate::nearest::nearest;

/// A calendar period that a quota counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeriodUnit {
    /// A second.
    Second,
    /// From one full minute to the next.
    Minute,
    /// From one full hour on the zone's clocks to the next.
    Hour,
    /// From midnight to midnight: 23 or 25 hours if the clocks change.
    Day,
    /// From Monday to Monday.
    Week,
    /// From the first day of one month to that of the next.
    Month,
    /// From 1 January to 1 January.
    Year,
}

impl PeriodUnit {
    /// Every unit.
    pub const ALL: [Self; 7] = [Self::Second, Self::Minute, Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    /// `second`, `minute`, `hour`, `day`, `week`, `month` or `year`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Second => "second",
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// The nominal length, which clock changes leave aside; `None` for months and years, which differ in length.
    pub fn fixed_length(self) -> Option<Span> {
        match self {
            Self::Second => Some(Span::from_secs(1)),
            Self::Minute => Some(Span::from_secs(60)),
            Self::Hour => Some(Span::from_secs(3_600)),
            Self::Day => Some(Span::from_secs(86_400)),
            Self::Week => Some(Span::from_secs(604_800)),
            Self::Month | Self::Year => None,
        }
    }
}

/// Finds the time zone of this IANA name, in any case: in the system's database, then in the built-in one. Returns the
/// zone and the usual spelling of its name. The error is the nearest name, if any.
pub(crate) fn find_zone(name: &str) -> Result<(TimeZone, String), Option<String>> {
    if let Ok(zone) = TimeZone::get(name).or_else(|_| TimeZoneDatabase::bundled().get(name)) {
        let name = zone.iana_name().unwrap_or(name).to_owned();
        return Ok((zone, name));
    }
    let names: Vec<String> = TimeZoneDatabase::bundled().available().map(|name| name.as_str().to_owned()).collect();
    // "Los_Angeles" and "los angeles" resemble no whole name, but the last part of one.
    let wanted = name.replace(' ', "_");
    let whole = nearest(&wanted, names.iter().map(String::as_str));
    let by_city = || {
        let city = nearest(&wanted, names.iter().filter_map(|name| Some(name.rsplit_once('/')?.1)))?;
        names.iter().map(String::as_str).find(|name| name.ends_with(city))
    };
    Err(whole.or_else(by_city).map(str::to_owned))
}

/// The time zone of this name; UTC without a name. UTC also replaces a zone that the system has lost since its name was
/// checked.
pub(crate) fn zone_or_utc(name: Option<&str>) -> TimeZone {
    name.and_then(|name| find_zone(name).ok()).map_or(TimeZone::UTC, |(zone, _)| zone)
}

/// The periods of one unit in one zone.
///
/// The last period is cached in one atomic word, so a further lookup in it costs one load and two comparisons.
pub struct CivilCalendar {
    unit: PeriodUnit,
    zone: TimeZone,
    /// The cached period: its start in seconds above `LENGTH_BITS`, its length in seconds below.
    cached_period: AtomicU64,
}

/// 25 bits hold the seconds of 388 days; the 39 above them hold any start.
const LENGTH_BITS: u32 = 25;

impl CivilCalendar {
    pub(crate) fn new(unit: PeriodUnit, zone: TimeZone) -> Self {
        Self { unit, zone, cached_period: AtomicU64::new(0) }
    }

    fn compute(&self, now: Time) -> Option<(u64, u64)> {
        let secs = i64::try_from(now.as_micros() / 1_000_000).ok()?;
        let at = Timestamp::from_second(secs).ok()?;
        let local = at.to_zoned(self.zone.clone());
        let date = local.date();
        let (start, end) = match self.unit {
            // Of these, all zones have the same.
            PeriodUnit::Second => (secs, secs + 1),
            PeriodUnit::Minute => (secs - secs % 60, secs - secs % 60 + 60),
            PeriodUnit::Hour => self.hour(&local)?,
            PeriodUnit::Day => self.days(date, 1.day())?,
            PeriodUnit::Week => {
                let since_monday = i64::from(date.weekday().since(Weekday::Monday));
                self.days(date.checked_sub(since_monday.days()).ok()?, 1.week())?
            }
            PeriodUnit::Month => self.days(date.first_of_month(), 1.month())?,
            PeriodUnit::Year => self.days(date.first_of_year(), 1.year())?,
        };
        // Time begins at the epoch, so a period that began before it is cut there.
        let (start, end) = (start.max(0), end.max(start + 1));
        Some((u64::try_from(start).ok()?, u64::try_from(end).ok()?))
    }

    /// The hour on the zone's clocks, cut where the clocks change. So hours follow each other without gap or
    /// overlap, even if the change isn't a whole hour.
    fn hour(&self, local: &Zoned) -> Option<(i64, i64)> {
        let at = local.timestamp();
        let into = i64::from(local.minute()) * 60 + i64::from(local.second());
        let start = at.as_second() - into;
        let end = start + 3600;
        let changed = self.zone.preceding(at.checked_add(SignedDuration::from_secs(1)).ok()?).next();
        let changes = self.zone.following(at).next();
        let start = changed.map_or(start, |change| change.timestamp().as_second().max(start));
        let end = changes.map_or(end, |change| change.timestamp().as_second().min(end));
        Some((start, end))
    }

    /// The moments at which the day `first` and the day `length` after it begin, in seconds since the epoch.
    fn days(&self, first: Date, length: Calendrical) -> Option<(i64, i64)> {
        let begin = |date: Date| Some(date.to_zoned(self.zone.clone()).ok()?.timestamp().as_second());
        Some((begin(first)?, begin(first.checked_add(length).ok()?)?))
    }
}

impl Calendar for CivilCalendar {
    fn period(&self, now: Time) -> Period {
        // One word holds both ends, so no ordering with other memory is needed.
        let last = self.cached_period.load(Ordering::Relaxed);
        let start = last >> LENGTH_BITS;
        let end = start + (last & ((1 << LENGTH_BITS) - 1));
        if (Time::from_secs(start)..Time::from_secs(end)).contains(&now) {
            return Period { start: Time::from_secs(start), end: Time::from_secs(end) };
        }
        let (start, end) = self.compute(now).unwrap_or_else(|| {
            // jiff has no civil date beyond its range of years, which no `Time` reaches.
            let day = now.as_micros() / 86_400_000_000;
            (day * 86_400, (day + 1) * 86_400)
        });
        if end - start < 1 << LENGTH_BITS {
            self.cached_period.store(start << LENGTH_BITS | (end - start), Ordering::Relaxed);
        }
        Period { start: Time::from_secs(start), end: Time::from_secs(end) }
    }
}

impl fmt::Debug for CivilCalendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "per {} in {}", self.unit.as_str(), self.zone.iana_name().unwrap_or("?"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn calendar(unit: PeriodUnit, name: &str) -> CivilCalendar {
        CivilCalendar::new(unit, find_zone(name).unwrap().0)
    }

    fn check(unit: PeriodUnit, name: &str, at: &str, start: &str, end: &str) {
        let secs = |text: &str| u64::try_from(text.parse::<Timestamp>().unwrap().as_second()).unwrap();
        let calendar = calendar(unit, name);
        for _ in 0..2 {
            let period = calendar.period(Time::from_secs(secs(at)));
            let expected = Period { start: Time::from_secs(secs(start)), end: Time::from_secs(secs(end)) };
            assert_eq!(period, expected, "{unit:?} {name} {at}");
        }
    }

    #[test]
    fn days_may_have_23_or_25_hours() {
        let zone = "America/Los_Angeles";
        check(PeriodUnit::Day, zone, "2026-03-08T12:00:00Z", "2026-03-08T08:00:00Z", "2026-03-09T07:00:00Z");
        check(PeriodUnit::Day, zone, "2026-11-01T12:00:00Z", "2026-11-01T07:00:00Z", "2026-11-02T08:00:00Z");
        check(PeriodUnit::Day, zone, "2026-07-01T06:59:59Z", "2026-06-30T07:00:00Z", "2026-07-01T07:00:00Z");
    }

    #[test]
    fn periods_are_right_in_unusual_zones() {
        // Samoa skipped 30 December 2011; Lord Howe moves its clocks by half an hour.
        check(PeriodUnit::Day, "Pacific/Apia", "2011-12-30T09:59:59Z", "2011-12-29T10:00:00Z", "2011-12-30T10:00:00Z");
        check(PeriodUnit::Day, "Pacific/Apia", "2011-12-30T10:00:00Z", "2011-12-30T10:00:00Z", "2011-12-31T10:00:00Z");
        let howe = "Australia/Lord_Howe";
        check(PeriodUnit::Hour, howe, "2026-10-03T15:40:00Z", "2026-10-03T15:30:00Z", "2026-10-03T16:00:00Z");
        check(
            PeriodUnit::Hour,
            "Asia/Kathmandu",
            "2026-01-01T00:00:00Z",
            "2025-12-31T23:15:00Z",
            "2026-01-01T00:15:00Z",
        );
        check(PeriodUnit::Day, "Asia/Beirut", "2022-03-26T23:00:00Z", "2022-03-26T22:00:00Z", "2022-03-27T21:00:00Z");
    }

    #[test]
    fn weeks_months_and_years_have_exact_bounds() {
        check(PeriodUnit::Week, "UTC", "2026-11-21T08:00:00Z", "2026-11-16T00:00:00Z", "2026-11-23T00:00:00Z");
        check(PeriodUnit::Month, "UTC", "2028-02-29T23:59:59Z", "2028-02-01T00:00:00Z", "2028-03-01T00:00:00Z");
        check(PeriodUnit::Year, "Europe/Paris", "2026-12-31T23:30:00Z", "2026-12-31T23:00:00Z", "2027-12-31T23:00:00Z");
    }

    #[test]
    fn the_first_and_last_times_have_periods() {
        for unit in PeriodUnit::ALL {
            for name in ["UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago"] {
                let calendar = calendar(unit, name);
                for now in [Time::ZERO, Time::from_secs(1), Time::from_micros(Time::NEVER.as_micros() - 1)] {
                    let period = calendar.period(now);
                    assert!(period.start <= now && now < period.end, "{unit:?} {name} {now:?} {period:?}");
                }
            }
        }
    }

    #[test]
    fn unknown_zones_suggest_the_nearest_name() {
        assert_eq!(find_zone("america/los_angeles").unwrap().1, "America/Los_Angeles");
        assert_eq!(find_zone("America/Los_Angles").unwrap_err().as_deref(), Some("America/Los_Angeles"));
        assert_eq!(find_zone("Los Angeles").unwrap_err().as_deref(), Some("America/Los_Angeles"));
        assert_eq!(find_zone("the moon").unwrap_err(), None);
    }

    proptest! {
        #[test]
        fn periods_are_contiguous(
            secs in 1_u64..4_000_000_000,
            unit in prop::sample::select(&PeriodUnit::ALL[..]),
            name in prop::sample::select(vec![
                "UTC", "America/Los_Angeles", "Europe/Paris", "Asia/Kolkata", "Australia/Lord_Howe", "America/Sao_Paulo",
                "America/Havana", "Pacific/Apia", "Africa/Casablanca", "Antarctica/Troll", "Asia/Tehran",
            ]),
        ) {
            let calendar = calendar(unit, name);
            let now = Time::from_secs(secs);
            let period = calendar.period(now);
            prop_assert!(period.start <= now && now < period.end);
            let next = calendar.period(period.end);
            prop_assert_eq!(next.start, period.end);
            prop_assert_eq!(calendar.period(now), period);
            if period.start > Time::ZERO {
                let before = calendar.period(Time::from_micros(period.start.as_micros() - 1));
                prop_assert_eq!(before.end, period.start);
            }
        }
    }
}
