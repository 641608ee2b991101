//! The description of a plan in words, with the true bound of every limit.

use std::fmt::Write as _;

use ipnet::IpNet;
use tidegate_core::{CountMode, LimitId, Penalty, PenaltyMode, Rate, ReservationRules, Span};

use crate::address::{Ipv6Prefix, ListStatus};
use crate::calendar::PeriodUnit;
use crate::key::{KeyPart, OnMissing};
use crate::plan::{Plan, RateLimitPolicyItem};
use crate::quantity::Quantity;
use crate::units::describe_duration;

/// Describes a limit and its penalty: "at most 9 in any 60 s (5, and one after each block); over that, blocks of 2 s, 4 s
/// … 1 h".
pub(crate) fn describe_limit(
    quantity: &Quantity,
    penalty: Option<&Penalty>,
    is_ban: bool,
    count: CountMode,
    cost: u64,
) -> String {
    let mut words = describe_bound(quantity, penalty, cost);
    if count == CountMode::All {
        words.push_str(", including calls that other limits refuse");
    }
    if let Some(penalty) = penalty {
        words.push_str("; over that, ");
        words.push_str(&describe_penalty(penalty, is_ban));
    }
    words
}

/// Describes the reservations that refused callers get.
pub(crate) fn describe_reservations(rules: &ReservationRules, by: &[KeyPart]) -> String {
    let (horizon, by) = (describe_duration(rules.horizon()), join_parts(by, " and "));
    if !rules.is_kept() {
        return format!(
            "; refused callers, told apart by {by}, are told instants one after the other, up to {horizon} ahead"
        );
    }
    let (share, grace) = (rules.share() as f64 / 10.0, describe_duration(rules.grace()));
    format!(
        "; refused callers, told apart by {by}, get reservations, up to {horizon} ahead and for {share} % of it, each kept \
         for {grace}"
    )
}

/// Describes the most that a quantity allows with its penalty, whose paroles admit further calls of this cost.
pub(crate) fn describe_bound(quantity: &Quantity, penalty: Option<&Penalty>, cost: u64) -> String {
    let paroles = |time| penalty.map_or(0, |penalty| penalty.max_paroles(time));
    match quantity {
        Quantity::Window { limit: 0, .. } | Quantity::Quota { limit: 0, .. } | Quantity::InFlight { limit: 0 } => {
            "refuses every call".to_owned()
        }
        Quantity::Window { limit, window } => describe_most(*limit, paroles(*window), cost, *window),
        Quantity::Rate { count, per, burst } => {
            let unit = match per.as_micros() {
                1_000_000 => "second".to_owned(),
                60_000_000 => "minute".to_owned(),
                3_600_000_000 => "hour".to_owned(),
                _ => describe_duration(*per),
            };
            let window = (*per).max(Span::from_secs(60));
            let shape = if *burst == 1 { "evenly spaced".to_owned() } else { format!("bursts of {burst}") };
            let alone = Rate::new(*count, *per, *burst).map_or(0, |rate| rate.max_in(window));
            // A rate has room again at the very end of the time.
            let most = describe_most(alone, paroles(window + Span::from_micros(1)), cost, window);
            format!("{count} per {unit}, {shape}: {most}")
        }
        Quantity::Quota { limit, unit, zone } => {
            let zone = zone.as_deref().unwrap_or("UTC");
            let end = match unit {
                PeriodUnit::Second => "each full second",
                PeriodUnit::Minute => "each full minute",
                PeriodUnit::Hour => "each full hour",
                PeriodUnit::Day => "midnight",
                PeriodUnit::Week => "midnight before Monday",
                PeriodUnit::Month => "the first of the month",
                PeriodUnit::Year => "New Year",
            };
            let twice = limit.saturating_mul(2);
            format!("{limit} per calendar {} in {zone}: up to {twice} around {end}", unit.as_str())
        }
        Quantity::InFlight { limit } => format!("at most {limit} at the same time"),
        Quantity::Unlimited => "unlimited".to_owned(),
    }
}

/// Describes the most calls in a time: those that the limit admits `alone`, and paroles of this cost.
fn describe_most(alone: u64, paroles: u64, cost: u64, time: Span) -> String {
    let most = alone.saturating_add(paroles.saturating_mul(cost));
    let time = describe_duration(time);
    match (paroles, cost) {
        (0, _) => format!("at most {most} in any {time}"),
        (_, 1) => format!("at most {most} in any {time} ({alone}, and one after each block)"),
        _ => format!("at most {most} in any {time} ({alone}, and a call of {cost} after each block)"),
    }
}

/// Describes growing waits: "1 s, 2 s … 30 s".
pub(crate) fn describe_waits(base: Span, factor: u32, cap: Span) -> String {
    let second = base.times(factor.into());
    let (first, last) = (describe_duration(base.min(cap)), describe_duration(cap));
    if base >= cap || factor <= 1 {
        first
    } else if second >= cap {
        format!("{first}, then {last}")
    } else {
        format!("{first}, {} … {last}", describe_duration(second))
    }
}

fn describe_penalty(penalty: &Penalty, is_ban: bool) -> String {
    let blocks = describe_waits(penalty.base(), penalty.factor(), penalty.cap());
    let all_are_equal = penalty.max_strikes() == 1;
    let mut words = match is_ban {
        true => format!("blocked for {blocks}"),
        false => format!("blocks of {blocks}{}", if all_are_equal { " each" } else { "" }),
    };
    if penalty.mode() == PenaltyMode::Strict {
        words.push_str(", or until there is room if that is longer");
    }
    if !all_are_equal {
        let step = describe_duration(penalty.forgive_after());
        let _ = write!(words, "; one strike less after each {step} without a refusal");
    }
    words
}

/// The `RateLimit-Policy` item of a quantity; `None` for `unlimited`.
pub(crate) fn rate_limit_policy(name: &str, quantity: &Quantity) -> Option<RateLimitPolicyItem> {
    let (quota, window, unit) = match quantity {
        Quantity::Window { limit, window } => (*limit, Some(window.as_secs_ceil()), None),
        // The number that refills in the window. A client that keeps to it is never refused, and the rest of a burst
        // never exceeds it.
        Quantity::Rate { count, per, burst } => {
            let per = u128::from(per.as_micros());
            let refill = u128::from(*burst) * per;
            let secs = refill.div_ceil(u128::from((*count).max(1)) * 1_000_000).max(1);
            let quota = (secs * 1_000_000 * u128::from(*count) / per.max(1)).max(u128::from(*burst));
            let fit = |number: u128| u64::try_from(number).unwrap_or(u64::MAX);
            (fit(quota), Some(fit(secs)), None)
        }
        Quantity::Quota { limit, unit, .. } => (*limit, unit.fixed_length().map(Span::as_secs_ceil), None),
        Quantity::InFlight { limit } => (*limit, None, Some("concurrent-requests")),
        Quantity::Unlimited => return None,
    };
    Some(RateLimitPolicyItem { name: name.to_owned(), quota, window, unit })
}

/// Joins the parts of a key: "client_ip and header:x-tenant".
pub(crate) fn join_parts<'p>(parts: impl IntoIterator<Item = &'p KeyPart>, word: &str) -> String {
    parts.into_iter().map(KeyPart::to_string).collect::<Vec<_>>().join(word)
}

impl Plan {
    /// Describes the whole plan: each action with its match, its keys, and every limit with its true bound.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        // Writing to a string can't fail.
        if self.global.is_empty() {
            let _ = writeln!(text, "inbound.global: no limit");
        } else {
            let _ = writeln!(text, "inbound.global, over all actions");
            self.limit_lines(&self.global, &mut text);
        }
        for (_, action) in self.actions() {
            let reached = match action.matcher() {
                Some(matcher) => matcher.to_string(),
                None => "asked for by name only".to_owned(),
            };
            let shadow = if action.is_shadow() { ", in shadow: logged, never refused" } else { "" };
            let weight =
                if action.cost() == 1 { String::new() } else { format!(", each call costs {}", action.cost()) };
            let _ = writeln!(text, "{}: {reached}{weight}{shadow}", action.name());
            if action.is_unlimited() {
                let _ = writeln!(text, "    unlimited");
            }
            self.limit_lines(action.limits(), &mut text);
        }
        if self.ipv6_prefix() != Ipv6Prefix::DEFAULT.length() {
            let _ = writeln!(text, "an IPv6 client is its /{}", self.ipv6_prefix());
        }
        for (what, listed) in [("never limited", ListStatus::Allow), ("always refused", ListStatus::Deny)] {
            let networks = self.listed_networks.iter().filter(|(_, status)| *status == listed);
            let networks: Vec<String> = networks.map(|(network, _)| format_network(*network)).collect();
            if !networks.is_empty() {
                let _ = writeln!(text, "{what}: {}", networks.join(", "));
            }
        }
        text
    }

    /// Describes the handling of requests that lack a part of a limit's key: "requests without header:x-api-key are
    /// counted by their address". `None` if no part can be missing.
    pub fn describe_on_missing(&self, limit: LimitId) -> Option<String> {
        let missing = self.on_missing(limit)?;
        let (lackable, rest): (Vec<_>, Vec<_>) = self.key_parts(limit).iter().partition(|part| part.may_be_missing());
        let who = match &*lackable {
            [KeyPart::Ipv6Network(_)] => "IPv4 clients".to_owned(),
            _ => format!("requests without {}", join_parts(lackable, " or ")),
        };
        let what = match missing {
            OnMissing::Share if rest.is_empty() => "share one count".to_owned(),
            OnMissing::Share => format!("share one count for each {}", join_parts(rest, " and ")),
            OnMissing::ByIp => "are counted by their address".to_owned(),
            OnMissing::Refuse => "are refused with 400".to_owned(),
            OnMissing::Skip => "don't meet it".to_owned(),
        };
        Some(format!("{who} {what}"))
    }

    fn limit_lines(&self, limits: &[LimitId], text: &mut String) {
        for id in limits {
            let info = self.limit_info(*id);
            let parts = join_parts(self.key_parts(*id), " and ");
            let _ = writeln!(text, "    {}, by {parts}: {}", info.name(), info.description());
            if let Some(words) = self.describe_on_missing(*id) {
                let _ = writeln!(text, "        {words}");
            }
        }
    }
}

/// Formats a network as people write it: a single address has no prefix.
fn format_network(network: IpNet) -> String {
    if network.prefix_len() == network.max_prefix_len() { network.addr().to_string() } else { network.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::PenaltySpec;

    #[test]
    fn descriptions_state_true_bounds() {
        for (quantity, words) in [
            ("5 per 60s", "at most 5 in any 60 s"),
            ("1000 per 1h", "at most 1000 in any 1 h"),
            ("10/s burst 20", "10 per second, bursts of 20: at most 620 in any 60 s"),
            ("100/h", "100 per hour, evenly spaced: at most 101 in any 1 h"),
            ("7/10s burst 7", "7 per 10 s, bursts of 7: at most 49 in any 60 s"),
            (
                "1000 per day in America/Los_Angeles",
                "1000 per calendar day in America/Los_Angeles: up to 2000 around midnight",
            ),
            ("9 per calendar month", "9 per calendar month in UTC: up to 18 around the first of the month"),
            ("8 in flight", "at most 8 at the same time"),
            ("0 per 60s", "refuses every call"),
            ("unlimited", "unlimited"),
        ] {
            assert_eq!(describe_bound(&quantity.parse().unwrap(), None, 1), words);
        }
    }

    #[test]
    fn penalties_are_described_in_words() {
        let window = Span::from_secs(60);
        let words = |spec: PenaltySpec| describe_penalty(&Penalty::new(spec, window).unwrap(), false);
        let spec = PenaltySpec::default();
        assert_eq!(words(spec), "blocks of 2 s, 4 s … 1 h; one strike less after each 1 h without a refusal");
        assert_eq!(
            words(PenaltySpec { cap: Span::from_secs(3), mode: PenaltyMode::Strict, ..spec }),
            "blocks of 2 s, then 3 s, or until there is room if that is longer; one strike less after each 60 s without \
             a refusal"
        );
        assert_eq!(words(PenaltySpec { factor: 1, ..spec }), "blocks of 2 s each");
        let ban = Penalty::ban(Span::from_secs(600), window).unwrap();
        let quantity = "5 per 60s".parse().unwrap();
        assert_eq!(
            describe_limit(&quantity, Some(&ban), true, CountMode::All, 1),
            "at most 5 in any 60 s, including calls that other limits refuse; over that, blocked for 10 min"
        );
    }

    #[test]
    fn ratelimit_policy_items_state_quota_and_window() {
        for (quantity, quota, window) in [
            ("5 per 60s", 5, Some(60)),
            ("10/s", 10, Some(1)),
            ("10/s burst 20", 20, Some(2)),
            ("10/s burst 15", 20, Some(2)),
            ("1/m burst 3", 3, Some(180)),
            ("5 per 500ms", 5, Some(1)),
            ("1000 per calendar day", 1000, Some(86_400)),
            ("1000 per calendar month", 1000, None),
            ("8 in flight", 8, None),
        ] {
            let item = rate_limit_policy("x", &quantity.parse().unwrap()).unwrap();
            assert_eq!((item.quota, item.window), (quota, window), "{quantity}");
        }
    }
}
