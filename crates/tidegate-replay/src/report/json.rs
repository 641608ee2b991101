//! Findings as JSON.

use serde_json::{Value, json};
use tidegate_core::Time;

use crate::{ClientFindings, ClientNetwork, Findings, LimitFindings, PolicyFindings, RequestCounts, format_time};

/// The largest share of clients in a limit's curve.
pub(super) const CURVE_MAX_SHARE: f64 = 0.05;

pub(super) fn findings_json(findings: &Findings) -> String {
    let input = &findings.input;
    let broken: Vec<Value> = input
        .first_broken
        .iter()
        .map(|(file, line, why)| json!({ "file": file, "line": line, "why": why.to_string() }))
        .collect();
    let read = json!({
        "lines": input.lines,
        "requests": input.requests,
        "others": input.non_requests,
        "broken": input.broken,
        "first_broken": broken,
        "late": input.late,
        "latest_by": input.max_lateness.as_secs_f64(),
        "too_late": input.too_late,
        "turns": input.clock_resets,
        "from": input.first_time.map(format_time),
        "to": input.newest_time.map(format_time),
    });
    let policies: Vec<Value> = findings.policies.iter().map(policy_json).collect();
    let mut whole = json!({ "input": read, "policies": policies });
    if let Some(changes) = &findings.changes {
        let refused = |count: Option<RequestCounts>| count.map(|count| count.refused);
        let actions: Vec<Value> = changes
            .actions
            .iter()
            .map(|action| json!({ "action": action.name, "first": refused(action.first), "second": refused(action.second) }))
            .collect();
        let clients = |clients: &[(ClientNetwork, u64)]| -> Vec<Value> {
            let client = |(client, requests): &(ClientNetwork, u64)| json!({ "client": client.to_string(), "requests": requests });
            clients.iter().map(client).collect()
        };
        whole["changes"] = json!({
            "refused_by_both": changes.refused_by_both,
            "only_first": changes.only_first,
            "only_second": changes.only_second,
            "actions": actions,
            "let_through_from_now_on": clients(&changes.newly_admitted),
            "refused_from_now_on": clients(&changes.newly_refused),
        });
    }
    format!("{whole:#}\n")
}

fn policy_json(policy: &PolicyFindings) -> Value {
    let actions: Vec<Value> = policy
        .actions
        .iter()
        .map(|action| {
            let RequestCounts { requests, refused } = action.counts;
            json!({ "action": action.name, "shadow": action.shadow, "requests": requests, "refused": refused })
        })
        .collect();
    let limits: Vec<Value> = policy.limits.iter().map(limit_json).collect();
    let client = |found: &ClientFindings| {
        let fate = found.stats;
        let time = |time: Time| (fate.refused > 0).then(|| format_time(time));
        json!({
            "client": found.client.to_string(),
            "admitted": fate.admitted,
            "refused": fate.refused,
            "first_refused": time(fate.first_refused_at),
            "last_refused": time(fate.last_refused_at),
            "by": (fate.refused > 0).then(|| policy.limit_name(fate.last_limit)),
        })
    };
    let clients = |list: &[ClientFindings]| -> Vec<Value> { list.iter().map(client).collect() };
    let timeline = &policy.timeline;
    let intervals: Vec<Value> = timeline
        .intervals()
        .iter()
        .map(|interval| {
            json!([
                interval.admitted,
                interval.refused_by_limit,
                interval.refused_by_block,
                interval.refused_by_deny_list
            ])
        })
        .collect();
    json!({
        "policy": policy.name,
        "requests": policy.total.requests,
        "refused": policy.total.refused,
        "refused_by_deny_list": policy.refused_by_deny_list,
        "shadow": policy.shadow_refusals,
        "undecided": policy.undecided,
        "clients": policy.clients,
        "refused_clients": policy.refused_clients,
        "actions": actions,
        "limits": limits,
        "most_refused": clients(&policy.most_refused),
        "largest_never_refused": clients(&policy.largest_never_refused),
        "timeline": {
            "from": format_time(timeline.start()),
            "interval": timeline.width().as_secs_f64(),
            "columns": ["admitted", "by_limit", "by_block", "by_list"],
            "intervals": intervals,
        },
        "notes": policy.notes,
    })
}

fn limit_json(limit: &LimitFindings) -> Value {
    let keys: Vec<Value> = limit.keys.iter().map(|key| json!({ "key": key.key, "refused": key.refused })).collect();
    let values: Vec<Value> = limit
        .values
        .iter()
        .map(|value| json!({ "share": value.share, "value": value.value, "limit": value.quantity, "refused": value.refused }))
        .collect();
    json!({
        "limit": limit.name,
        "allows": limit.quantity,
        "by": limit.counted_by,
        "full": limit.refusals.by_limit,
        "blocked": limit.refusals.by_block,
        "shadow": limit.refusals.in_shadow,
        "most_refused": keys,
        "clients": limit.peaks.as_ref().map(|peaks| peaks.key_count()),
        "clients_are_counted": limit.peaks.as_ref().map(|peaks| peaks.is_complete()),
        "refused_share": limit.current_refused_share(),
        "highest_use": limit.peaks.as_ref().map(|peaks| peaks.highest()),
        "values": values,
        "curve": limit.peaks.as_ref().map(|peaks| peaks.curve(CURVE_MAX_SHARE)),
    })
}
