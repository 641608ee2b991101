use super::*;
use proptest::prelude::*;

fn secs(secs: u64) -> Span {
    Span::from_secs(secs)
}

#[test]
fn common_quantity_forms_are_parsed() {
    let window = |limit, window| Quantity::Window { limit, window: secs(window) };
    let rate = |count, per, burst| Quantity::Rate { count, per: secs(per), burst };
    let quota = |limit, unit, zone: Option<&str>| Quantity::Quota { limit, unit, zone: zone.map(str::to_owned) };
    for (text, quantity, printed) in [
        ("5 per 60s", window(5, 60), "5 per 60s"),
        ("5/60s", window(5, 60), "5 per 60s"),
        ("  5  per  1m  ", window(5, 60), "5 per 60s"),
        ("1000 per 1h", window(1000, 3600), "1000 per 1h"),
        ("1_000 per 24 hours", window(1000, 86_400), "1000 per 1d"),
        ("5 per minute", window(5, 60), "5 per 60s"),
        ("5 per 1m 30s", window(5, 90), "5 per 90s"),
        ("0 per 60s", window(0, 60), "0 per 60s"),
        ("1099511627776 per 1s", window(1 << 40, 1), "1099511627776 per 1s"),
        ("10/s", rate(10, 1, 1), "10/s"),
        ("10/s burst 20", rate(10, 1, 20), "10/s burst 20"),
        ("10 per 1s burst 20", rate(10, 1, 20), "10/s burst 20"),
        ("10 per second burst 1", rate(10, 1, 1), "10/s"),
        ("600/min burst 5", rate(600, 60, 5), "600/m burst 5"),
        ("5/60s burst 1", rate(5, 60, 1), "5/m"),
        ("7/10s burst 1", rate(7, 10, 1), "7/10s burst 1"),
        ("1000 per day", window(1000, 86_400), "1000 per 1d"),
        ("5 per hour", window(5, 3600), "5 per 1h"),
        ("5 per week", window(5, 604_800), "5 per 7d"),
        ("100 per day burst 5", rate(100, 86_400, 5), "100/1d burst 5"),
        ("1000 per calendar day", quota(1000, PeriodUnit::Day, None), "1000 per calendar day"),
        ("1000 per calendar day in UTC", quota(1000, PeriodUnit::Day, None), "1000 per calendar day"),
        (
            "1000 per  calendar  hour in Asia/Kolkata",
            quota(1000, PeriodUnit::Hour, Some("Asia/Kolkata")),
            "1000 per hour in Asia/Kolkata",
        ),
        ("1000 per day in UTC", quota(1000, PeriodUnit::Day, None), "1000 per calendar day"),
        (
            "1000 per day in america/los_angeles",
            quota(1000, PeriodUnit::Day, Some("America/Los_Angeles")),
            "1000 per day in America/Los_Angeles",
        ),
        ("3 per calendar month", quota(3, PeriodUnit::Month, None), "3 per calendar month"),
        ("3 per minute in UTC", quota(3, PeriodUnit::Minute, None), "3 per calendar minute"),
        ("3 per calendar second", quota(3, PeriodUnit::Second, None), "3 per calendar second"),
        ("8 in flight", Quantity::InFlight { limit: 8 }, "8 in flight"),
        ("8 in-flight", Quantity::InFlight { limit: 8 }, "8 in flight"),
        ("unlimited", Quantity::Unlimited, "unlimited"),
    ] {
        assert_eq!(text.parse::<Quantity>().as_ref(), Ok(&quantity), "{text}");
        assert_eq!(quantity.to_string(), printed);
        assert_eq!(printed.parse::<Quantity>(), Ok(quantity));
    }
}

#[test]
fn quantity_errors_state_position_and_help() {
    for (text, at, message, help) in [
        ("", 0..0, "the quantity is empty", ""),
        ("five per minute", 0..4, "found `five` where a number should be", ""),
        ("unlimitd", 0..8, "found `unlimitd` where a number should be", "did you mean `unlimited`?"),
        ("5", 1..1, "only a number", "did you mean \"5 per 60s\"?"),
        ("5 pr 60s", 2..4, "found `pr` after the number", "did you mean `per`?"),
        (
            "5 requests per 60s",
            2..10,
            "found `requests` after the number",
            "leave out the counted thing: write \"5 per 60s\"",
        ),
        ("5 per 60", 6..8, "the number 60 has no unit", "did you mean \"60s\" or \"60ms\"?"),
        ("5 per", 5..5, "found nothing where a number should be", ""),
        ("5 per 0s", 6..8, "a period of no length", ""),
        ("5.5 per 60s", 0..3, "5.5 is not a whole number", ""),
        ("-5 per 60s", 0..2, "found `-5`, but it can't be negative", ""),
        ("1,000 per 1h", 0..5, "found a comma in the number 1,000", "write 1_000 or 1000"),
        ("1099511627777 per 1s", 0..13, "1099511627777 is too large", ""),
        ("99999999999999999999999 per 1s", 0..23, "the number has too many digits", ""),
        ("5 per fortnight", 6..15, "unknown period `fortnight`", ""),
        ("5 per dya", 6..9, "unknown period `dya`", "did you mean `day`?"),
        ("5 per h", 6..7, "unknown period `h`", "did you mean \"5 per 1h\", any trailing 1h?"),
        (
            "1000/day",
            5..8,
            "`/day` could mean two things",
            "write \"1000 per calendar day\" for a quota that resets with the calendar, or \"1000 per 24h\" for any trailing 24h",
        ),
        ("10/sceond", 3..9, "unknown unit `sceond` after `/`", "did you mean `second`?"),
        ("10/s bursts 20", 5..11, "found `bursts`", ""),
        ("10/s burst", 10..10, "found nothing where a number should be", ""),
        ("10/s burst 0", 11..12, "a burst of 0, which lets nothing pass", ""),
        ("0/s", 0..3, "a rate of 0", ""),
        (
            "1000 per calendar day burst 5",
            22..27,
            "a calendar quota has no burst",
            "drop the burst, or write a rate: \"1000/h burst 20\"",
        ),
        ("1000 per day in", 15..15, "the time zone is missing", ""),
        (
            "3 per month",
            6..11,
            "`per month` could mean two things",
            "write \"3 per calendar month\" for a quota that resets with the calendar, or \"3 per 30d\" for any trailing 30d",
        ),
        (
            "3 per year burst 2",
            6..10,
            "`per year` could mean two things",
            "write \"3 per calendar year\" for a quota that resets with the calendar, or \"3 per 365d\" for any trailing 365d",
        ),
        ("3 per calendar dya", 15..18, "found `dya` after `calendar`", "did you mean `day`?"),
        ("3 per calendar", 14..14, "found nothing after `calendar`", ""),
        ("1000 per day in Europe/Pariss", 16..29, "unknown time zone `Europe/Pariss`", "did you mean `Europe/Paris`?"),
        (
            "1000 per 24h in Europe/Paris",
            13..15,
            "a time zone after a length of time",
            "write \"1000 per day in …\": calendar periods are second, minute, hour, day, week, month and year",
        ),
        ("8 in filght", 5..11, "found `filght` after `in`", "a number in a length of time is written \"8 per 60s\""),
        ("8 concurrent", 2..12, "found `concurrent`", "calls at the same time are written \"8 in flight\""),
        ("70000 in flight", 0..15, "too many calls in flight", ""),
        (
            "5 per 60s, 100 per day",
            9..10,
            "found more than one limit in one string",
            "write a list, [\"10/s\", \"1000 per calendar day\"]: all of its limits must agree",
        ),
        ("5 per 60s please", 10..16, "found `please`", ""),
    ] {
        let error = text.parse::<Quantity>().expect_err(text);
        assert_eq!((error.range(), error.message(), error.help_text().unwrap_or("")), (at, message, help), "{text}");
    }
}

fn quantities() -> impl Strategy<Value = Quantity> {
    let number = || prop_oneof![0..100_u64, 0..=MAX_LIMIT];
    let span = || prop_oneof![1..1_000_000_u64, 1..1_000_000_000_000_u64].prop_map(Span::from_micros);
    let zones = prop::sample::select(vec![None, Some("America/Los_Angeles"), Some("Asia/Kolkata"), Some("Etc/UTC")]);
    prop_oneof![
        (number(), span()).prop_map(|(limit, window)| Quantity::Window { limit, window }),
        (number(), span(), number()).prop_map(|(count, per, burst)| Quantity::Rate { count, per, burst }),
        (number(), prop::sample::select(&PeriodUnit::ALL[..]), zones).prop_map(|(limit, unit, zone)| Quantity::Quota {
            limit,
            unit,
            zone: zone.map(str::to_owned)
        }),
        (0..100_000_u64).prop_map(|limit| Quantity::InFlight { limit }),
        Just(Quantity::Unlimited),
    ]
}

proptest! {
    #[test]
    fn printed_quantities_parse_back(quantity in quantities()) {
        let reads = quantity.to_string().parse::<Quantity>();
        if quantity.to_limit_kind().is_ok() {
            prop_assert_eq!(reads, Ok(quantity));
        } else {
            prop_assert!(reads.is_err());
        }
    }
}
