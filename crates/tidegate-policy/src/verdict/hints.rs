//! The hints of a provider's reply about the time for the next call.

use std::cmp::Reverse;
use std::sync::LazyLock;

use http::header::{AGE, DATE, HeaderMap, HeaderName, RETRY_AFTER};
use sfv::{BareItem, Dictionary, List, ListEntry, Parser};
use tidegate_core::call::Measure;
use tidegate_core::{Class, Remaining, RemainingAmount, Span, Time, Verdict};

use super::times::{ReplyClock, TimeUnit, date_micros, parse_digits, span};
use crate::reservation::{ReplyReservation, TIDEGATE_RESERVATION};

/// gRPC's header for the wait. A negative or unreadable value asks for no retry at all (gRFC A6).
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
/// Headers with waits in milliseconds: Azure's, those of LLM providers, and AWS'.
const MILLISECOND_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-ms-retry-after-ms"),
    HeaderName::from_static("retry-after-ms"),
    HeaderName::from_static("x-amz-retry-after"),
];
/// Headers that forbid a retry, or ask for one: those of LLM providers and Stripe.
const SHOULD_RETRY: [HeaderName; 2] =
    [HeaderName::from_static("x-should-retry"), HeaderName::from_static("stripe-should-retry")];
/// The header of draft-ietf-httpapi-ratelimit-headers.
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
/// The longest difference between a server's clock and ours that is believed.
const MAX_SKEW: Span = Span::from_secs(86_400);
/// The most lines of `RateLimit` that are read; a provider has only a few limits.
const MAX_LINES: usize = 16;

/// Headers that belong together: the amount that is left, the time of the reset, and the amount after it.
struct HeaderFamily {
    remaining: HeaderName,
    reset: HeaderName,
    limit: HeaderName,
    measure: Measure,
}

static HEADER_FAMILIES: LazyLock<Vec<HeaderFamily>> = LazyLock::new(|| {
    let family = |(measure, beginning, reset, end): (Measure, &str, &str, &str)| {
        let name = |word: &str| {
            let name = format!("{beginning}{word}{end}");
            HeaderName::try_from(name).expect("invariant: the names are tested to be valid")
        };
        HeaderFamily { remaining: name("remaining"), reset: name(reset), limit: name("limit"), measure }
    };
    let families = [
        (Measure::Calls, "x-ratelimit-", "reset", ""),
        (Measure::Calls, "x-ratelimit-", "reset-after", ""),
        (Measure::Calls, "x-rate-limit-", "reset", ""),
        (Measure::Calls, "ratelimit-", "reset", ""),
        (Measure::Calls, "x-ratelimit-", "reset", "-requests"),
        (Measure::Cost, "x-ratelimit-", "reset", "-tokens"),
        (Measure::Calls, "anthropic-ratelimit-requests-", "reset", ""),
        (Measure::Cost, "anthropic-ratelimit-tokens-", "reset", ""),
        (Measure::Cost, "anthropic-ratelimit-input-tokens-", "reset", ""),
        (Measure::Cost, "anthropic-ratelimit-output-tokens-", "reset", ""),
    ];
    families.into_iter().map(family).collect()
});

/// The hints in a reply's headers about the time for the next call.
///
/// In a wait or a reset, these are ignored: zero, negative numbers, unreadable values and moments in the past. Of a wait
/// that occurs several times, the longest counts; another header that occurs twice is ignored, except `RateLimit`. A time
/// beyond [`Span::MAX`] becomes that. If the reply has a `Date`, moments are compared with it, so a difference between the
/// server's clock and ours doesn't matter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hints {
    /// The wait that the server asks for. The first readable of these counts, the most exact first:
    /// `grpc-retry-pushback-ms`, `x-ms-retry-after-ms`, `retry-after-ms`, `x-amz-retry-after` (milliseconds), `Retry-After`
    /// (seconds, a Unix time, a duration or a date).
    pub retry_after: Option<Span>,
    /// The header that gives it.
    pub retry_after_header: Option<HeaderName>,
    /// The time until the instant of `Tidegate-Reservation`, within the last second of `Retry-After`. Means nothing unless
    /// the reply is a refusal. `None` if a more exact header gives the wait.
    pub reserved_in: Option<Span>,
    /// The time until which nothing is left: the latest reset of all allowances at zero. The allowances are `RateLimit`
    /// (`r=0;t=…`, and `remaining=0, reset=…` of earlier drafts), `RateLimit-Remaining`, `X-RateLimit-Remaining`, and
    /// those with which OpenAI and Anthropic count requests and tokens, each with its reset. A reset is a number, a
    /// duration such as `6m0s`, or a date. A number is Unix time in seconds, milliseconds, microseconds or nanoseconds, or
    /// seconds from now, depending on its size. One in whole seconds of Unix time ends with that second.
    pub spent_until: Option<Time>,
    /// The latest reset of allowances without a remaining amount. After a refusal it is the best available guess.
    pub resets_at: Option<Time>,
    /// The header that gives the latest reset.
    pub reset_header: Option<HeaderName>,
    /// True if an allowance is at zero, with or without a known reset.
    pub exhausted: bool,
    /// The amount left of the allowance of calls that has least left, and of that of cost. The allowances are
    /// `RateLimit`, `X-RateLimit-Remaining` and those with which OpenAI and Anthropic count requests and tokens, if
    /// they have resets.
    pub remaining: Remaining,
    /// True if the server asks for no retry: `grpc-retry-pushback-ms` is no whole number from 0 up, or `x-should-retry` or
    /// `stripe-should-retry` is `false`.
    pub asks_not_to_retry: bool,
    /// True if `x-should-retry` or `stripe-should-retry` is `true`.
    pub asks_to_retry: bool,
}

impl Hints {
    /// Reads the headers of a reply that arrived at `now`.
    pub fn read(headers: &HeaderMap, now: Time) -> Self {
        Self::read_except(headers, |_| false, now)
    }

    /// Reads the headers, except for the allowances in those that have another meaning.
    pub(super) fn read_except(headers: &HeaderMap, is_excluded: impl Fn(&HeaderName) -> bool, now: Time) -> Self {
        if !headers.keys().any(is_hint_header) {
            return Self::default();
        }
        let mut hints = Self::read_waits(headers, now);
        hints.read_allowances(headers, is_excluded, reply_clock(headers, now));
        hints
    }

    fn read_waits(headers: &HeaderMap, now: Time) -> Self {
        let clock = reply_clock(headers, now);
        let mut hints = Self::default();
        let pushback = headers.contains_key(&PUSHBACK).then(|| single_value(headers, &PUSHBACK).and_then(parse_digits));
        let says = |word: &str| {
            let says = |name| single_value(headers, name).is_some_and(|value| value.eq_ignore_ascii_case(word));
            SHOULD_RETRY.iter().any(says)
        };
        hints.asks_not_to_retry = pushback == Some(None) || says("false");
        hints.asks_to_retry = says("true");
        let longest = |name: &HeaderName, unit: TimeUnit| {
            let lines = headers.get_all(name).iter().take(MAX_LINES).filter_map(|value| value.to_str().ok());
            lines.filter_map(|text| clock.read(text, unit)).max().map(|wait| (wait, name.clone()))
        };
        let in_millis = || MILLISECOND_HEADERS.iter().find_map(|name| longest(name, TimeUnit::Wait(1_000)));
        let pushback = pushback.flatten().map(|millis| (span(millis, 1_000), PUSHBACK));
        let told = pushback.or_else(in_millis).or_else(|| {
            let (wait, header) = longest(&RETRY_AFTER, TimeUnit::Any)?;
            let reservation = single_value(headers, &TIDEGATE_RESERVATION).and_then(|text| text.parse().ok());
            let wait_within = |reservation: ReplyReservation| reservation.wait_within(wait, now);
            hints.reserved_in = reservation.map(wait_within).filter(|wait| !wait.is_zero());
            Some((wait, header))
        });
        if let Some((wait, header)) = told.filter(|(wait, _)| !wait.is_zero()) {
            (hints.retry_after, hints.retry_after_header) = (Some(wait), Some(header));
        }
        hints
    }

    /// Reads the usual headers that tell allowances.
    fn read_allowances(&mut self, headers: &HeaderMap, is_excluded: impl Fn(&HeaderName) -> bool, clock: ReplyClock) {
        let (now, mut latest) = (clock.now, Span::ZERO);
        for family in HEADER_FAMILIES.iter() {
            if [&family.remaining, &family.reset].into_iter().any(&is_excluded) {
                continue;
            }
            // A part of a call is none.
            let whole = |text: &'_ str| parse_digits(text.split('.').next().unwrap_or(text));
            let left = single_value(headers, &family.remaining).and_then(whole);
            let wait = single_value(headers, &family.reset).and_then(|text| clock.until_reset(text));
            let limit = single_value(headers, &family.limit).and_then(parse_digits);
            self.note_reset(&family.reset, left, wait, &mut latest);
            self.add_allowance(family.measure, left, limit, wait, None, now);
        }
        for line in headers.get_all(&RATE_LIMIT).iter().take(MAX_LINES) {
            for (left, wait) in parse_rate_limit(line.as_bytes()) {
                self.note_reset(&RATE_LIMIT, left, wait, &mut latest);
                self.add_allowance(Measure::Calls, left, None, wait, None, now);
            }
        }
    }

    /// Notes the header of the latest reset that calls may have to wait for.
    fn note_reset(&mut self, header: &HeaderName, left: Option<u128>, wait: Option<Span>, latest: &mut Span) {
        if let Some(wait) = wait.filter(|wait| *wait > *latest && left.is_none_or(|left| left == 0)) {
            (*latest, self.reset_header) = (wait, Some(header.clone()));
        }
    }

    /// Adds an allowance: what is left, of how much, and the time until its reset. The length of its window bounds that, but
    /// tells no wait.
    pub(super) fn add_allowance(
        &mut self,
        measure: Measure,
        left: Option<u128>,
        limit: Option<u128>,
        wait: Option<Span>,
        window: Option<Span>,
        now: Time,
    ) {
        let wait = wait.filter(|wait| !wait.is_zero());
        self.update_reset(left.map(|left| left == 0), wait, now);
        if let (Some(left), Some(wait)) = (left, wait.or(window)) {
            self.update_remaining(measure, left, limit, now + wait);
        }
    }

    /// The time without calls after a refusal: until a reservation, otherwise the wait that the server asks for, otherwise
    /// the time until something is left again. `None` without a hint.
    pub fn wait(&self, now: Time) -> Option<Span> {
        let until = |at: Option<Time>| at.map(|at| at.since(now)).filter(|wait| !wait.is_zero());
        let told = self.reserved_in.or(self.retry_after);
        told.or_else(|| until(self.spent_until)).or_else(|| until(self.resets_at))
    }

    /// A verdict of this class with the allowances.
    pub(super) fn verdict(&self, class: Class) -> Verdict {
        let spent_until = self.spent_until.filter(|_| !class.is_refusal());
        Verdict { spent_until, remaining: self.remaining, ..Verdict::new(class) }
    }

    fn update_remaining(&mut self, measure: Measure, left: u128, limit: Option<u128>, until: Time) {
        let number = |number: u128| u64::try_from(number).unwrap_or(u64::MAX);
        let reported = RemainingAmount {
            amount: number(left),
            limit: limit.map(number).filter(|limit| *limit > 0),
            resets_at: until,
        };
        let known = match measure {
            Measure::Calls => &mut self.remaining.calls,
            Measure::Cost => &mut self.remaining.cost,
        };
        if known.is_none_or(|known| {
            (reported.amount, Reverse(reported.resets_at)) < (known.amount, Reverse(known.resets_at))
        }) {
            *known = Some(reported);
        }
    }

    fn update_reset(&mut self, spent: Option<bool>, wait: Option<Span>, now: Time) {
        let at = wait.filter(|wait| !wait.is_zero()).map(|wait| now + wait);
        match spent {
            Some(true) => {
                self.exhausted = true;
                self.spent_until = self.spent_until.max(at);
            }
            Some(false) => {}
            None => self.resets_at = self.resets_at.max(at),
        }
    }
}

/// The clock by which the times of a reply are read: that of its `Date`, to which a cache adds the `Age` (RFC 9111 §4.2.3).
/// A `Date` that differs by more than a day is none.
pub(super) fn reply_clock(headers: &HeaderMap, now: Time) -> ReplyClock {
    let micros = single_value(headers, &DATE).and_then(date_micros);
    let sent = micros.and_then(|micros| u64::try_from(micros / 1_000_000).ok());
    let age = single_value(headers, &AGE).and_then(parse_digits).and_then(|age| u64::try_from(age).ok()).unwrap_or(0);
    let server = sent.map(|sent| sent.saturating_add(age));
    ReplyClock { now, server: server.filter(|server| server.abs_diff(now.as_secs_ceil()) <= MAX_SKEW.as_secs_ceil()) }
}

/// Parses one line of `RateLimit`: for each limit, the amount that is left and the time until its reset.
fn parse_rate_limit(line: &[u8]) -> Vec<(Option<u128>, Option<Span>)> {
    let number = |item: Option<&BareItem>| item.and_then(BareItem::as_integer).map(i64::from);
    let left = |left: Option<i64>| left.and_then(|left| u128::try_from(left).ok());
    let wait = |secs: Option<i64>| secs.and_then(|secs| u64::try_from(secs).ok()).map(Span::from_secs);
    if let Ok(list) = Parser::new(line).parse::<List>() {
        let items = list.iter().filter_map(|entry| match entry {
            ListEntry::Item(item) => Some(&item.params),
            ListEntry::InnerList(_) => None,
        });
        return items.map(|params| (left(number(params.get("r"))), wait(number(params.get("t"))))).collect();
    }
    // Drafts up to the seventh define a dictionary.
    let Ok(dictionary) = Parser::new(line).parse::<Dictionary>() else { return Vec::new() };
    let member = |name: &str| match dictionary.get(name) {
        Some(ListEntry::Item(item)) => number(Some(&item.bare_item)),
        _ => None,
    };
    vec![(left(member("remaining")), wait(member("reset")))]
}

/// True if a header may hold a hint. Most replies have none, and one look at the headers that exist is faster than
/// a search for each known name.
fn is_hint_header(name: &HeaderName) -> bool {
    const BEGINNINGS: [&str; 10] = [
        "rate",
        "retry-",
        "x-rate",
        "x-ms-retry-",
        "grpc-retry-",
        "anthropic-ratelimit-",
        "tidegate-reservation",
        "x-amz-retry-",
        "x-should-",
        "stripe-should-",
    ];
    // Most names end here.
    let may_be = matches!(name.as_str().as_bytes().first(), Some(b'r' | b'x' | b'g' | b'a' | b't' | b's'));
    may_be && BEGINNINGS.iter().any(|beginning| name.as_str().starts_with(beginning))
}

/// The value of a header that occurs exactly once.
fn single_value<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?.trim();
    values.next().is_none().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    /// 2026-01-01 00:00:00 UTC.
    const NOW: Time = Time::from_secs(1_767_225_600);

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let line = |(name, value): &(&'static str, &str)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
        };
        lines.iter().map(line).collect()
    }

    fn read(lines: &[(&'static str, &str)]) -> Hints {
        Hints::read(&headers(lines), NOW)
    }

    fn waits(lines: &[(&'static str, &str)]) -> Option<u64> {
        read(lines).retry_after.map(|wait| wait.as_micros() / 1_000)
    }

    #[test]
    fn every_used_header_is_a_hint_header() {
        let families = HEADER_FAMILIES.iter().flat_map(|family| [family.remaining.clone(), family.reset.clone()]);
        let waits = MILLISECOND_HEADERS.into_iter().chain(SHOULD_RETRY);
        for name in families.chain(waits).chain([PUSHBACK, RATE_LIMIT, RETRY_AFTER, TIDEGATE_RESERVATION]) {
            assert!(is_hint_header(&name), "{name}");
        }
    }

    #[test]
    fn a_reservation_refines_the_wait_and_never_shortens_it_much() {
        let at = |millis: u64| format!("r0;at={}", NOW.as_micros() / 1000 + millis);
        let reserved = |lines: &[(&'static str, &str)]| read(lines).reserved_in.map(|wait| wait.as_micros() / 1_000);
        for (millis, seconds, expected) in [
            (6_500, "7", 6_500),
            (7_000, "7", 7_000),
            // The server's clock differs from ours.
            (1_000, "7", 6_000),
            (90_000, "7", 7_000),
            (0, "1", 200),
        ] {
            let wait = reserved(&[("tidegate-reservation", &at(millis)), ("retry-after", seconds)]);
            assert_eq!(wait, Some(expected), "{millis} {seconds}");
        }
        // The time that the server tells doesn't depend on our clock.
        for (wait, expected) in [(6_500, 6_500), (1_000, 6_000), (90_000, 7_000)] {
            let lines = [("tidegate-reservation", &*format!("{};wait={wait}", at(0))), ("retry-after", "7")];
            // Only a refusal gives a reservation.
            assert_eq!([reserved(&lines), waits(&lines)], [Some(expected), Some(7_000)], "{wait}");
            assert_eq!(read(&lines).wait(NOW), Some(Span::from_millis(expected)));
        }
        // Nothing bounds the wait by a clock that may be wrong.
        assert_eq!(waits(&[("tidegate-reservation", &at(6_500))]), None);
        assert_eq!(waits(&[("tidegate-reservation", "nonsense"), ("retry-after", "7")]), Some(7_000));
        // Another wait isn't that of the reservation.
        let reservation = ("tidegate-reservation", &*at(500));
        for other in [("ratelimit", "\"a\";r=0;t=3600"), ("retry-after", "0"), ("retry-after-ms", "900")] {
            assert_eq!(reserved(&[reservation, other]), None, "{other:?}");
        }
        assert_eq!(reserved(&[reservation, ("retry-after-ms", "900"), ("retry-after", "1")]), None);
    }

    #[test]
    fn retry_after_may_be_seconds_or_date() {
        for (text, millis) in [
            ("7", Some(7_000)),
            ("86400", Some(86_400_000)),
            (" 7 ", Some(7_000)),
            ("0.25", Some(250)),
            ("Thu, 01 Jan 2026 00:00:20 GMT", Some(20_000)),
            ("Thursday, 01-Jan-26 00:00:20 GMT", Some(20_000)),
            ("99999999999999999999999999999999999999999999999999", Some(Span::MAX.as_micros() / 1_000)),
            ("Fri, 31 Dec 9999 23:59:59 GMT", Some(Span::MAX.as_micros() / 1_000)),
            ("Wed, 31 Dec 2025 23:59:59 GMT", None),
            ("Thu, 01 Jan 2026 00:00:00 GMT", None),
            ("0", None),
            ("0.0", None),
            ("-1", None),
            ("+7", Some(7_000)),
            ("1e999", None),
            ("1e3", None),
            ("inf", None),
            ("NaN", None),
            ("", None),
            (".", None),
            ("7.", None),
            ("7.0.1", None),
            ("7, 7", Some(7_000)),
            ("7s", Some(7_000)),
            ("\"7\"", Some(7_000)),
            ("1767225607", Some(7_000)),
            ("soon", None),
            ("Thu, 01 Jan 2026 00:00:20 CEST", None),
            ("Thu, 01 Jan 2026 00:00:20 UTC", Some(20_000)),
        ] {
            assert_eq!(waits(&[("retry-after", text)]), millis, "{text:?}");
        }
        assert_eq!(waits(&[("retry-after", "7"), ("retry-after", "9")]), Some(9_000), "the longest");
        let mut raw = HeaderMap::new();
        raw.insert(RETRY_AFTER, HeaderValue::from_bytes(b"7\xff").unwrap());
        assert_eq!(Hints::read(&raw, NOW), Hints::default());
    }

    #[test]
    fn dates_are_relative_to_the_servers_clock() {
        let (date, ahead) = ("Thu, 01 Jan 2026 01:00:00 GMT", "Thu, 01 Jan 2026 01:00:20 GMT");
        assert_eq!(waits(&[("date", date), ("retry-after", ahead)]), Some(20_000));
        assert_eq!(waits(&[("date", ahead), ("retry-after", date)]), None);
        assert_eq!(waits(&[("date", "yesterday"), ("retry-after", ahead)]), Some(3_620_000), "an unreadable Date");
        assert_eq!(waits(&[("date", date), ("date", date), ("retry-after", ahead)]), Some(3_620_000), "two of them");
        let cached = [("date", date), ("age", "10"), ("retry-after", ahead)];
        assert_eq!(waits(&cached), Some(10_000), "a cache has kept the reply for ten seconds");
        let wrong = [("date", "Thu, 01 Jan 1970 00:00:00 GMT"), ("retry-after", ahead)];
        assert_eq!(waits(&wrong), Some(3_620_000), "no clock");
        let spent = read(&[("date", date), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1767229220")]);
        assert_eq!(spent.spent_until, Some(NOW + Span::from_secs(21)));
    }

    #[test]
    fn the_most_precise_wait_is_used() {
        let all = [
            ("retry-after", "7"),
            ("retry-after-ms", "6500"),
            ("x-ms-retry-after-ms", "6400"),
            ("grpc-retry-pushback-ms", "6300"),
        ];
        for (count, millis) in [(1, 7_000), (2, 6_500), (3, 6_400), (4, 6_300)] {
            assert_eq!(waits(&all[..count]), Some(millis));
        }
        assert_eq!(waits(&[("retry-after-ms", "0.5")]), Some(0));
        assert_eq!(read(&[("retry-after-ms", "0.5")]).retry_after, Some(Span::from_micros(500)));
        assert_eq!(waits(&[("retry-after-ms", "nonsense"), ("retry-after", "7")]), Some(7_000));
    }

    #[test]
    fn pushback_may_forbid_retries() {
        for (text, stop) in [("0", false), ("150", false), ("-1", true), ("-9999999999999", true), ("never", true)] {
            let hints = read(&[("grpc-retry-pushback-ms", text)]);
            assert_eq!(hints.asks_not_to_retry, stop, "{text}");
            assert_eq!(hints.retry_after, (text == "150").then_some(Span::from_millis(150)));
        }
        assert!(!read(&[]).asks_not_to_retry);
        for (name, value, stop, go) in
            [("x-should-retry", "true", false, true), ("stripe-should-retry", "False", true, false)]
        {
            let hints = read(&[(name, value)]);
            assert_eq!((hints.asks_not_to_retry, hints.asks_to_retry), (stop, go), "{name} {value}");
        }
        let part = [("x-ratelimit-remaining", "0.4"), ("x-ratelimit-reset", "30")];
        assert!(read(&part).exhausted, "a part of a call is none");
        let named = read(&[
            ("x-ratelimit-remaining-requests", "99"),
            ("x-ratelimit-reset-requests", "6m0s"),
            ("x-ratelimit-remaining-tokens", "0"),
            ("x-ratelimit-reset-tokens", "1s"),
        ]);
        assert_eq!(named.reset_header.unwrap(), "x-ratelimit-reset-tokens");
    }

    #[test]
    fn spent_allowances_last_until_their_reset() {
        let secs = |secs| Some(NOW + Span::from_secs(secs));
        type Row<'a> = (&'static str, &'a str, &'static str, &'a str, Option<Time>);
        let rows: [Row<'_>; 22] = [
            ("x-ratelimit-remaining", "0", "x-ratelimit-reset", "1767225660", secs(61)),
            ("x-ratelimit-remaining", "0", "x-ratelimit-reset", "1767225660.5", Some(NOW + Span::from_millis(60_500))),
            ("x-ratelimit-remaining", "0", "x-ratelimit-reset", "1767225660000", secs(60)),
            ("x-ratelimit-remaining", "0", "x-ratelimit-reset", "60", secs(60)),
            ("x-ratelimit-remaining", "0", "x-ratelimit-reset-after", "0.5", Some(NOW + Span::from_millis(500))),
            ("x-ratelimit-remaining", "0", "x-ratelimit-reset", "2026-01-01T00:01:00Z", secs(60)),
            ("x-ratelimit-remaining", "0", "x-ratelimit-reset", "Thu, 01 Jan 2026 00:01:00 GMT", secs(60)),
            ("x-rate-limit-remaining", "0", "x-rate-limit-reset", "1767225660", secs(61)),
            ("ratelimit-remaining", "0", "ratelimit-reset", "60", secs(60)),
            ("ratelimit-remaining", "0", "ratelimit-reset", "1767225660", secs(61)),
            ("x-ratelimit-remaining-requests", "0", "x-ratelimit-reset-requests", "1s", secs(1)),
            ("x-ratelimit-remaining-requests", "0", "x-ratelimit-reset-requests", "6m0s", secs(360)),
            (
                "x-ratelimit-remaining-tokens",
                "0",
                "x-ratelimit-reset-tokens",
                "8.64s",
                Some(NOW + Span::from_millis(8_640)),
            ),
            (
                "anthropic-ratelimit-requests-remaining",
                "0",
                "anthropic-ratelimit-requests-reset",
                "2026-01-01T00:01:00Z",
                secs(60),
            ),
            ("x-ratelimit-remaining", "1", "x-ratelimit-reset", "1767225660", None),
            ("x-ratelimit-remaining", "0", "x-ratelimit-reset", "1767225600", secs(1)),
            ("x-ratelimit-remaining", "0", "x-ratelimit-reset", "1767225540", None),
            ("x-ratelimit-remaining", "0", "x-ratelimit-reset", "0", None),
            ("x-ratelimit-remaining", "0", "x-ratelimit-reset", "-60", None),
            ("x-ratelimit-remaining", "0", "x-ratelimit-reset", "1e999", None),
            ("x-ratelimit-remaining", "-1", "x-ratelimit-reset", "60", None),
            (
                "x-ratelimit-remaining",
                "0",
                "x-ratelimit-reset",
                "99999999999999999999999999999999999999999",
                Some(Time::NEVER),
            ),
        ];
        for (remaining, left, reset, text, until) in rows {
            let hints = read(&[(remaining, left), (reset, text)]);
            assert_eq!((hints.spent_until, hints.retry_after), (until, None), "{remaining}: {left}, {reset}: {text}");
            assert_eq!(hints.exhausted, left == "0");
        }
        let both = read(&[
            ("x-ratelimit-remaining-requests", "0"),
            ("x-ratelimit-reset-requests", "1s"),
            ("x-ratelimit-remaining-tokens", "0"),
            ("x-ratelimit-reset-tokens", "3s"),
        ]);
        assert_eq!(both.spent_until, secs(3), "the latest of those that are spent");
    }

    #[test]
    fn ratelimit_header_drafts_are_read() {
        let secs = |secs| Some(NOW + Span::from_secs(secs));
        let rest =
            |left, secs| Some(RemainingAmount { amount: left, limit: None, resets_at: NOW + Span::from_secs(secs) });
        for (line, exhausted, spent_until, resets_at, calls) in [
            (r#""default";r=0;t=30"#, true, secs(30), None, rest(0, 30)),
            (r#""burst";r=4;t=1, "daily";r=0;t=600"#, true, secs(600), None, rest(0, 600)),
            (r#""default";r=12;t=30"#, false, None, None, rest(12, 30)),
            (r#""default";t=30"#, false, None, secs(30), None),
            (r#""default";r=0"#, true, None, None, None),
            (r#""default";r=0;t=0"#, true, None, None, None),
            (r#""default";r=0;t=-5"#, true, None, None, None),
            (r#""default";r=-1;t=30"#, false, None, secs(30), None),
            (r#""default";r="0";t=30"#, false, None, secs(30), None),
            (r#"("a" "b");r=0;t=30"#, false, None, None, None),
            ("limit=100, remaining=0, reset=50", true, secs(50), None, rest(0, 50)),
            ("limit=100, remaining=7, reset=50", false, None, None, rest(7, 50)),
            (r#""default";r=0;t=999999999999999"#, true, Some(Time::NEVER), None, rest(0, u64::MAX)),
            (r#""default";r=0;t=99999999999999999999"#, false, None, None, None),
            (r#""default;r=0;t=30"#, false, None, None, None),
        ] {
            let rests = Remaining { calls, cost: None };
            let has_reset = spent_until.or(resets_at).is_some();
            let reset_header = has_reset.then_some(RATE_LIMIT);
            let expected =
                Hints { spent_until, resets_at, reset_header, exhausted, remaining: rests, ..Hints::default() };
            assert_eq!(read(&[("ratelimit", line)]), expected, "{line}");
        }
        let lines = [("ratelimit", r#""a";r=0;t=30"#), ("ratelimit", r#""b";r=0;t=40"#)];
        assert_eq!(read(&lines).spent_until, secs(40), "several lines are one list");
    }

    #[test]
    fn a_refusals_wait_prefers_retry_after() {
        let spent = [("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "3600"), ("retry-after", "7")];
        assert_eq!(read(&spent).wait(NOW), Some(Span::from_secs(7)));
        assert_eq!(read(&spent[..2]).wait(NOW), Some(Span::from_secs(3600)));
        assert_eq!(read(&spent[1..2]).wait(NOW), Some(Span::from_secs(3600)));
        assert_eq!(read(&[("x-ratelimit-remaining", "9"), ("x-ratelimit-reset", "3600")]).wait(NOW), None);
        assert_eq!(read(&spent[..2]).wait(NOW + Span::from_secs(3600)), None);
    }
}
