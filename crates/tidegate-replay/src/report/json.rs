//! Findings as JSON.

use serde_json::{Value, json};

use crate::{
    ActionChange, ActionFindings, AlternativeValue, ClientFindings, ClientNetwork, Findings, InputStats,
    IntervalCounts, KeyFindings, LimitFindings, LineError, Peaks, PolicyFindings, RequestCounts, format_time,
};

/// The largest share of clients in a limit's curve.
pub(super) const CURVE_MAX_SHARE: f64 = 0.05;

impl Findings {
    /// Returns all findings as JSON.
    pub fn json(&self) -> String {
        let mut whole = json!({ "input": input_json(&self.input), "policies": array(&self.policies, policy_json) });
        if let Some(changes) = &self.changes {
            let refused = |counts: Option<RequestCounts>| counts.map(|counts| counts.refused);
            let action = |action: &ActionChange| json!({ "action": action.name, "first": refused(action.first), "second": refused(action.second) });
            let client = |(client, requests): &(ClientNetwork, u64)| json!({ "client": client.to_string(), "requests": requests });
            whole["changes"] = json!({
                "refused_by_both": changes.refused_by_both,
                "only_first": changes.only_first,
                "only_second": changes.only_second,
                "actions": array(&changes.actions, action),
                "let_through_from_now_on": array(&changes.newly_admitted, client),
                "refused_from_now_on": array(&changes.newly_refused, client),
            });
        }
        format!("{whole:#}\n")
    }
}

fn array<T>(items: &[T], to_json: impl Fn(&T) -> Value) -> Value {
    items.iter().map(to_json).collect()
}

fn input_json(input: &InputStats) -> Value {
    let broken = |(file, line, error): &(String, u64, LineError)| json!({ "file": file, "line": line, "why": error.to_string() });
    json!({
        "lines": input.lines,
        "requests": input.requests,
        "others": input.non_requests,
        "provider_calls": input.provider_calls,
        "undecided": input.undecided,
        "broken": input.broken,
        "first_broken": array(&input.first_broken, broken),
        "late": input.late,
        "latest_by": input.max_lateness.as_secs_f64(),
        "too_late": input.too_late,
        "turns": input.clock_resets,
        "from": input.first_time.map(format_time),
        "to": input.newest_time.map(format_time),
    })
}

fn policy_json(policy: &PolicyFindings) -> Value {
    let action = |action: &ActionFindings| {
        let RequestCounts { requests, refused, refused_in_shadow } = action.counts;
        json!({ "action": action.name, "shadow": action.shadow, "requests": requests, "refused": refused, "refused_in_shadow": refused_in_shadow })
    };
    let client = |ClientFindings { client, stats }: &ClientFindings| {
        let is_refused = stats.refused > 0;
        json!({
            "client": client.to_string(),
            "admitted": stats.admitted,
            "refused": stats.refused,
            "refused_in_shadow": stats.refused_in_shadow,
            "first_refused": is_refused.then(|| format_time(stats.first_refused_at)),
            "last_refused": is_refused.then(|| format_time(stats.last_refused_at)),
            "by": is_refused.then(|| policy.limit_name(stats.last_limit)),
        })
    };
    let interval = |interval: &IntervalCounts| {
        let IntervalCounts { admitted, refused_by_limit, refused_by_block, refused_by_deny_list } = interval;
        json!([admitted, refused_by_limit, refused_by_block, refused_by_deny_list])
    };
    let timeline = &policy.timeline;
    json!({
        "policy": policy.name,
        "requests": policy.total.requests,
        "refused": policy.total.refused,
        "refused_by_deny_list": policy.refused_by_deny_list,
        "shadow": policy.total.refused_in_shadow,
        "undecided": policy.undecided,
        "clients": policy.clients,
        "refused_clients": policy.refused_clients,
        "actions": array(&policy.actions, action),
        "limits": array(&policy.limits, limit_json),
        "shadow_refused_clients": policy.shadow_refused_clients,
        "most_refused": array(&policy.most_refused, client),
        "most_refused_in_shadow": array(&policy.most_refused_in_shadow, client),
        "largest_never_refused": array(&policy.largest_never_refused, client),
        "timeline": {
            "from": format_time(timeline.start()),
            "interval": timeline.width().as_secs_f64(),
            "columns": ["admitted", "by_limit", "by_block", "by_list"],
            "intervals": array(timeline.intervals(), interval),
        },
        "missing_parts": policy.missing_parts,
        "notes": policy.notes,
    })
}

fn limit_json(limit: &LimitFindings) -> Value {
    let key = |key: &KeyFindings| json!({ "key": key.key, "refused": key.refused, "refused_in_shadow": key.refused_in_shadow });
    let value = |value: &AlternativeValue| json!({ "share": value.share, "value": value.value, "limit": value.quantity, "refused": value.refused });
    let peaks = limit.peaks.as_ref();
    json!({
        "limit": limit.name,
        "allows": limit.quantity,
        "by": limit.counted_by,
        "full": limit.refusals.by_limit,
        "blocked": limit.refusals.by_block,
        "shadow": limit.refusals.in_shadow,
        "most_refused": array(&limit.keys, key),
        "clients": peaks.map(Peaks::key_count),
        "clients_are_counted": peaks.map(Peaks::is_complete),
        "refused_share": limit.current_refused_share(),
        "highest_use": peaks.map(Peaks::highest),
        "values": array(&limit.values, value),
        "curve": peaks.map(|peaks| peaks.curve(CURVE_MAX_SHARE)),
    })
}
