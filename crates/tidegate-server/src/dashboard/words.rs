//! Numbers, times and reasons in words.

use tidegate::outbound::DurationReport;

/// A number in groups of three digits.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() * 4 / 3 + 1);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// A number a second: with one decimal below 100.
pub(super) fn rate(rate: f64) -> String {
    match rate {
        rate if rate < 0.05 => "0".to_owned(),
        rate if rate < 100.0 => format!("{rate:.1}"),
        rate => count(rate.round() as u64),
    }
}

/// A length of time in its two largest units: `3h 12m`, `45s`.
pub(super) fn span(seconds: u64) -> String {
    let units = [(86_400, "d"), (3600, "h"), (60, "m"), (1, "s")];
    let Some(first) = units.iter().position(|(length, _)| seconds >= *length) else { return "0s".to_owned() };
    let (length, unit) = units[first];
    let text = format!("{}{unit}", seconds / length);
    match units.get(first + 1).map(|(length, unit)| (seconds % units[first].0 / length, unit)) {
        Some((rest @ 1.., unit)) => format!("{text} {rest}{unit}"),
        _ => text,
    }
}

/// A duration in seconds as milliseconds or seconds.
pub(super) fn duration(seconds: f64) -> String {
    match seconds * 1000.0 {
        millis if millis < 0.0005 => "0 ms".to_owned(),
        millis if millis < 10.0 => format!("{millis:.1} ms"),
        millis if millis < 1000.0 => format!("{millis:.0} ms"),
        millis => format!("{:.1} s", millis / 1000.0),
    }
}

/// A percentile of measured durations; a dash if there are none.
pub(super) fn percentile(durations: &DurationReport, of: impl Fn(&DurationReport) -> f64) -> String {
    if durations.count == 0 { "–".to_owned() } else { duration(of(durations)) }
}

/// The reason of failed calls to a provider, from [`CallErrorKind::REASONS`](tidegate::outbound::CallErrorKind::REASONS).
pub(super) fn failure(reason: &str) -> &str {
    match reason {
        "breaker" => "breaker open",
        "rate_limited" => "no room in a limit",
        "paced" => "no room in the pace",
        "quota_spent" => "quota spent",
        "credentials_cooling" => "all credentials cooling down",
        "cooling_down" => "provider cooling down",
        "lane_paused" => "outside the hours of the lane",
        "queue_full" => "queue full",
        "deadline_exceeded" => "deadline passed",
        "retries_exhausted" => "all attempts failed",
        "retry_after_too_long" => "asked to wait too long",
        "no_time_left" => "no time left for another attempt",
        "not_idempotent" => "not safe to repeat",
        "unreplayable" => "body not kept for another attempt",
        "budget_spent" => "retry budget spent",
        "final" => "told not to retry",
        "store" => "store failed",
        "provider_paused" => "paused by an operator",
        other => other,
    }
}

/// The time of day of a UTC text such as `2026-11-21 12:01:45Z`.
pub(super) fn time_of_day(utc: &str) -> &str {
    utc.split_once(' ').map_or(utc, |(_, time)| time)
}

/// `one thing` or `3 things`.
pub(super) fn plural(number: usize, thing: &str) -> String {
    format!("{} {thing}{}", count(number as u64), if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use tidegate::outbound::CallErrorKind;

    use super::*;

    #[test]
    fn every_reason_has_words() {
        assert!(
            CallErrorKind::REASONS.iter().all(|reason| failure(reason) != *reason && !failure(reason).contains('_'))
        );
    }

    #[test]
    fn numbers_and_times_are_short() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0.0, 0.33, 99.94, 100.4, 12_345.6].map(rate), ["0", "0.3", "99.9", "100", "12,346"]);
        assert_eq!([0, 9, 60, 61, 3600, 90_061].map(span), ["0s", "9s", "1m", "1m 1s", "1h", "1d 1h"]);
        assert_eq!([0.0, 0.0012, 0.25, 2.5].map(duration), ["0 ms", "1.2 ms", "250 ms", "2.5 s"]);
    }
}
