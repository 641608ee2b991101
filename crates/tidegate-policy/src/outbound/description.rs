//! The description of providers in words, with the true bound of every limit.

use std::fmt::Write as _;
use std::time::Duration;

use tidegate_core::call::ProviderLimit;
use tidegate_core::{
    AdaptiveRateSpec, Backoff, Balance, BreakerSpec, BudgetSpec, Growth, Jitter, Lane, LaneSpec, Span, pacer,
};

use super::{Auth, BaseUrl, CacheRules, CostRules, OutboundConfig, PaceConfig, ProviderConfig};
use crate::description::describe_waits;
use crate::secret::SecretSource;
use crate::units::{describe_duration, format_percent};

impl OutboundConfig {
    /// Describes every provider: its URL, each of its limits with its true bound, and the handling of calls that wait
    /// or fail; then the place of their state. Of credentials, only the sources are shown.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for provider in &self.providers {
            // Writing to a string can't fail.
            let _ = writeln!(text, "{}: {}", provider.name, describe_url(provider));
            let mut lines = self.limit_lines(provider);
            lines.extend(lane_lines(provider));
            lines.push(retry_line(provider));
            lines.push(provider.breaker.as_ref().map_or_else(|| "no breaker".to_owned(), breaker_line));
            lines.extend(credential_lines(self, provider));
            lines.extend(reply_lines(provider));
            for line in lines {
                let _ = writeln!(text, "  {line}");
            }
        }
        let _ = match &self.snapshot {
            Some(path) => writeln!(text, "spent quotas and cool-downs outlive a restart in {}", path.display()),
            None => writeln!(text, "spent quotas and cool-downs don't outlive a restart: outbound.snapshot is off"),
        };
        text
    }

    fn limit_lines(&self, provider: &ProviderConfig) -> Vec<String> {
        let rules = &provider.rules_without_keys;
        let mut lines = Vec::new();
        let mut add_limits = |limits: &[ProviderLimit], scope: &str| {
            let descriptions = limits.iter().map(|own| &self.limit_info(own.limit).description);
            lines.extend(descriptions.map(|description| format!("{description} ({scope})")));
        };
        add_limits(&rules.provider_limits, "all calls");
        add_limits(&rules.credential_limits, "each credential");
        for (lane, lane_limits) in Lane::ALL.iter().zip(&rules.lane_limits) {
            add_limits(lane_limits, &format!("{} calls", lane.name()));
        }
        if rules.tracks_remaining {
            lines.push("the remaining amount that replies report (each credential), the first call alone".to_owned());
        }
        // No store counts these, even if the rest is shared.
        let node_note = if provider.shared { ", in each node" } else { "" };
        match rules.lanes.max_in_flight {
            _ if provider.sequential => lines.push(format!("one call at a time{node_note}, first come, first served")),
            u32::MAX => {}
            most => lines.push(format!("at most {most} at the same time (all calls{node_note})")),
        }
        let most = rules.max_in_flight_per_credential;
        if most != u32::MAX {
            lines.push(format!("at most {most} at the same time (each credential{node_note})"));
        }
        if lines.is_empty() && provider.pace == PaceConfig::Limits {
            lines.push("unlimited".to_owned());
        }
        if let Some(spec) = &provider.adaptive_limit {
            let (min, max, initial) = (spec.min, spec.max, spec.initial);
            lines.push(format!("as many at the same time as it can serve, {min} to {max}, at first {initial}"));
        }
        lines.extend(pace_line(&provider.pace));
        lines
    }
}

fn pace_line(pace: &PaceConfig) -> Option<String> {
    match pace {
        PaceConfig::Limits => None,
        PaceConfig::Responsive(spec) => {
            let grows = match spec.growth {
                pacer::PacerGrowth::Exponential { up, down } => {
                    format!("times {} at a throttled call, times {}", format_factor(up), format_factor(u32::from(down)))
                }
                pacer::PacerGrowth::Linear => "one more of it at a throttled call, one less".to_owned(),
            };
            let ([first, last], successes) =
                ([spec.initial, spec.max].map(format_duration), plural(spec.successes, "success"));
            Some(format!("a wait between calls once one is throttled: {first} up to {last}, {grows} after {successes}"))
        }
        PaceConfig::Adaptive(AdaptiveRateSpec { initial, slowest, fastest }) => {
            let [first, least, most] = [initial, slowest, fastest].map(|interval| describe_duration(*interval));
            Some(format!(
                "the accepted rate is found by trials: at first a call each {first}, at least each {least} and at most each \
                 {most}"
            ))
        }
    }
}

/// Formats thousandths as a number: "1.5".
fn format_factor(thousandths: u32) -> String {
    let text = format!("{}.{:03}", thousandths / 1_000, thousandths % 1_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn describe_url(provider: &ProviderConfig) -> String {
    let mut text = match &provider.base_url {
        Some(url) => url.to_string(),
        None => "only Rust programs call it, for want of a base_url".to_owned(),
    };
    if let Some(preset) = &provider.preset {
        let _ = write!(text, " (preset {preset})");
    }
    if provider.base_url.as_ref().is_some_and(BaseUrl::is_unencrypted_remote) {
        text.push_str("; warning: http sends everything in the clear, credentials included");
    }
    text
}

fn lane_lines(provider: &ProviderConfig) -> Vec<String> {
    let rules = &provider.rules_without_keys;
    let line = |lane: Lane, name: &str| {
        let LaneSpec { max_waiting, max_in_flight, .. } = rules.lanes.lanes[lane as usize];
        let granted = rules.lane_rules[lane as usize];
        let retries = match granted.retry.max_attempts.saturating_sub(1) {
            1 => "1 retry".to_owned(),
            retries => format!("{retries} retries"),
        };
        let mut text =
            format!("{name}: {} a call, {retries}, up to {max_waiting} waiting", describe_duration(granted.timeout));
        if max_in_flight != u32::MAX {
            let _ = write!(text, ", at most {max_in_flight} at the same time");
        }
        if let (Lane::Background, Some(hours)) = (lane, &provider.hours) {
            let _ = write!(text, ", only {hours}");
        }
        text
    };
    if provider.sequential {
        return vec![line(Lane::User, "all lanes")];
    }
    Lane::ALL.into_iter().rev().map(|lane| line(lane, lane.name())).collect()
}

fn retry_line(provider: &ProviderConfig) -> String {
    let rules = &provider.rules_without_keys;
    let retry = rules.lane_rules[Lane::User as usize].retry;
    let budget = rules.budget;
    let mut text = format!(
        "before a retry {}, or Retry-After up to {}; ",
        describe_backoff(&retry.backoff),
        describe_duration(retry.max_retry_after),
    );
    let _ = match budget {
        BudgetSpec::UNLIMITED => write!(text, "no budget for retries"),
        BudgetSpec { ratio, min, .. } => {
            write!(text, "retries up to {} of first tries, and {min} more", format_percent(ratio))
        }
    };
    if provider.credentials.len() > 1 && retry.max_token_retries > 0 {
        let _ = write!(text, "; up to {} more with another credential", retry.max_token_retries);
    }
    text
}

fn describe_backoff(backoff: &Backoff) -> String {
    let factor = if let Growth::Exponential { factor } = backoff.growth { factor } else { 1 };
    let waits = describe_waits(backoff.base, factor, backoff.cap);
    match backoff.jitter {
        Jitter::None => waits,
        Jitter::Full => format!("up to {waits}"),
        Jitter::Equal => format!("half to all of {waits}"),
        Jitter::Decorrelated => {
            format!("{} to {}, at random", describe_duration(backoff.base), describe_duration(backoff.cap))
        }
        Jitter::Additive(most) => format!("{waits} and up to {} more", describe_duration(most)),
    }
}

fn breaker_line(spec: &BreakerSpec) -> String {
    let mut reasons: Vec<String> =
        spec.failures.map(|failures| format!("{failures} failures in a row")).into_iter().collect();
    let within = format!("of {} calls or more in {}", spec.min_calls, describe_duration(spec.window));
    reasons.extend(spec.failure_rate.map(|rate| format!("{} failures {within}", format_percent(rate))));
    reasons.extend(spec.slow_calls.map(|slow| {
        format!("{} slower than {} {within}", format_percent(slow.rate), describe_duration(slow.threshold))
    }));
    let mut text = format!(
        "breaker opens at {}, for {}; {} at a time, closes after {}",
        reasons.join(" or "),
        describe_backoff(&spec.open),
        plural(spec.probes, "probe"),
        plural(spec.successes, "success")
    );
    let steps: Vec<String> = spec
        .ramp
        .iter()
        .map(|step| format!("{} for {}", format_percent(step.share), describe_duration(step.length)))
        .collect();
    if !steps.is_empty() {
        let _ = write!(text, "; then {} of calls", steps.join(", "));
    }
    text
}

fn credential_lines(outbound: &OutboundConfig, provider: &ProviderConfig) -> Vec<String> {
    let mut rest = outbound.limit_info(provider.rules_without_keys.cooldown).description.clone();
    if provider.pace != PaceConfig::Limits && provider.credentials.len() <= 1 {
        // A throttled reply that asks for no wait slows the pace down instead.
        rest = "waits as long as a throttled reply asks".to_owned();
    }
    let goes = match &provider.auth {
        Auth::None => return vec![format!("no credentials; {rest}")],
        Auth::Bearer => "Authorization: Bearer".to_owned(),
        Auth::Header { name, prefix } => format!("{name} {prefix}").trim_end().to_owned(),
        Auth::Query { name } => format!("the query parameter {name}"),
        Auth::Path => "{key} in the path".to_owned(),
    };
    let sources: Vec<String> = provider.credentials.iter().map(SecretSource::to_string).collect();
    let order = match (sources.len(), provider.balance) {
        (0 | 1, _) => "",
        (_, Balance::RoundRobin) => " in turn",
        (_, Balance::Random) => " at random",
        (_, Balance::LeastRecentlyUsed) => ", the one unused for longest",
    };
    let mut lines = vec![format!("credentials {}{order}, as {goes}; each {rest}", sources.join(", "))];
    if let Some(login) = &provider.login {
        let secrets: Vec<String> = login.secrets.iter().map(|(name, source)| format!("{name} from {source}")).collect();
        let with = if secrets.is_empty() { String::new() } else { format!(" with {}", secrets.join(", ")) };
        let [lifetime, before] = [login.lifetime, login.refresh_before].map(format_duration);
        lines.push(format!("logs in by POST {}{with}, for {lifetime}, renewed {before} before", login.path));
        if sources.is_empty() {
            lines[0] = format!("the token of its login, as {goes}; it {rest}");
        }
    }
    lines
}

fn reply_lines(provider: &ProviderConfig) -> Vec<String> {
    let mut lines = Vec::new();
    lines.extend(provider.verdicts.describe());
    if let Some(after) = provider.hedge_after {
        lines.push(format!("a second request after {} without a reply", format_duration(after)));
    }
    lines.extend(provider.cost.as_ref().map(cost_line));
    lines.push(match &provider.cache {
        None => "nothing is cached".to_owned(),
        Some(rules) if !rules.shared && provider.credentials.len() > 1 => {
            "nothing is cached, because there are several credentials; cache.shared lets them share replies".to_owned()
        }
        Some(rules) => cache_line(rules),
    });
    lines
}

fn cost_line(rules: &CostRules) -> String {
    let mut text = format!("a call reserves a cost of {}", rules.reserve);
    if rules.bytes_per_unit > 0 {
        let _ = write!(text, ", 1 for each {} bytes of its body", rules.bytes_per_unit);
    }
    if !rules.request.is_empty() {
        let _ = write!(text, ", what {} in it says", rules.request.join(" or "));
    }
    if rules.reply.is_empty() {
        return text;
    }
    let told: Vec<String> = rules.reply.iter().map(|pointers| pointers.join(" or ")).collect();
    let _ = write!(text, "; its reply settles that by {}", told.join(" and "));
    text
}

fn cache_line(rules: &CacheRules) -> String {
    let mut text = match rules.ttl {
        None => "replies are cached as their headers say".to_owned(),
        Some(Duration::MAX) => "replies are cached for ever".to_owned(),
        Some(ttl) => format!("replies are cached for {}", format_duration(ttl)),
    };
    text.push_str(if rules.shared { ", for all credentials together" } else { "" });
    if !rules.stale.is_zero() {
        let _ = write!(text, ", and stand in for {} more while it is unavailable", format_duration(rules.stale));
    }
    text
}

fn format_duration(duration: Duration) -> String {
    describe_duration(Span::from_duration(duration))
}

/// Formats a count: "1 probe", "2 successes".
fn plural(count: u32, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        _ if what.ends_with('s') => format!("{count} {what}es"),
        _ => format!("{count} {what}s"),
    }
}
