//! What a replay has found.

use tidegate_core::{LimitId, LimitKind, Reason};
use tidegate_policy::KeyPart;

use super::client::ClientNetwork;
use super::evaluator::{LimitRefusals, PolicyEvaluator, RequestCounts};
use super::meter::{Peaks, REFUSED_SHARES, with_value};
use super::request::HeaderCollector;
use super::timeline::Timeline;
use super::{ChangeCollector, ClientStats, InputStats};

/// How many clients and keys each list shows.
const TOP_COUNT: usize = 10;

/// What a replay has found.
#[derive(Clone, Debug)]
pub struct Findings {
    /// What was read.
    pub input: InputStats,
    /// What each policy would have done: one, or two that are compared.
    pub policies: Vec<PolicyFindings>,
    /// Where two policies decide differently.
    pub changes: Option<PolicyChanges>,
}

/// What a policy would have done.
#[derive(Clone, Debug)]
pub struct PolicyFindings {
    /// What it was read from.
    pub name: String,
    /// All requests that it decides about.
    pub total: RequestCounts,
    /// Refused because the client is on the deny list.
    pub refused_by_deny_list: u64,
    /// Let through, although a limit in shadow would have refused them.
    pub shadow_refusals: u64,
    /// Requests that it can't decide about; a gate answers them with 503.
    pub undecided: u64,
    /// By action, in file order; last those that match none, if there are any.
    pub actions: Vec<ActionFindings>,
    /// By limit, in the plan's order.
    pub limits: Vec<LimitFindings>,
    /// How many clients there were, as far as they are remembered.
    pub clients: u64,
    /// How many of them were refused at least once.
    pub refused_clients: u64,
    /// The clients with the most refusals.
    pub most_refused: Vec<ClientFindings>,
    /// The clients with the most calls of which none was refused.
    pub largest_never_refused: Vec<ClientFindings>,
    /// What happened when.
    pub timeline: Timeline,
    /// What the log doesn't tell or the bounds leave out, in words.
    pub notes: Vec<String>,
}

/// What came of an action's requests.
#[derive(Clone, Debug)]
pub struct ActionFindings {
    /// Its name; `None` for requests that match none.
    pub name: Option<String>,
    /// Whether it only watches.
    pub shadow: bool,
    /// Its requests.
    pub counts: RequestCounts,
}

/// What is found of a limit.
#[derive(Clone, Debug)]
pub struct LimitFindings {
    /// Its name: the action's, or `global`.
    pub name: String,
    /// The quantity as written.
    pub quantity: String,
    /// What it counts by, in words.
    pub counted_by: String,
    /// What it refused.
    pub refusals: LimitRefusals,
    /// The keys with the most refusals; none if it counts by the client alone.
    pub keys: Vec<KeyFindings>,
    /// Its value: the most that is ever free at once.
    pub capacity: u64,
    /// The highest use that each key made of it; `None` of calls in flight.
    pub peaks: Option<Peaks>,
    /// What other values would have done, for each of [`REFUSED_SHARES`].
    pub values: Vec<AlternativeValue>,
}

/// A value of a limit, and whom it would have refused.
#[derive(Clone, Debug, PartialEq)]
pub struct AlternativeValue {
    /// The share of keys that it was to refuse at the most, 0 to 1.
    pub share: f64,
    /// The value.
    pub value: u64,
    /// The quantity with this value.
    pub quantity: String,
    /// The share that it would have refused.
    pub refused: f64,
}

/// A client of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientFindings {
    /// Who.
    pub client: ClientNetwork,
    /// What came of its calls.
    pub stats: ClientStats,
}

/// A key of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFindings {
    /// Its parts, in words.
    pub key: String,
    /// How often it was refused.
    pub refused: u64,
}

/// Where two policies decide differently.
#[derive(Clone, Debug)]
pub struct PolicyChanges {
    /// Requests that both refuse.
    pub refused_by_both: u64,
    /// Requests that only the first refuses: let through from now on.
    pub only_first: u64,
    /// Requests that only the second refuses: refused from now on.
    pub only_second: u64,
    /// Refusals by action, of those that either policy has.
    pub actions: Vec<ActionChange>,
    /// The clients that are let through more often, with the number of requests.
    pub newly_admitted: Vec<(ClientNetwork, u64)>,
    /// The clients that are refused more often.
    pub newly_refused: Vec<(ClientNetwork, u64)>,
}

/// An action's refusals under two policies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActionChange {
    /// Its name; `None` for requests that match none.
    pub name: Option<String>,
    /// Under the first; `None` if it has no such action.
    pub first: Option<RequestCounts>,
    /// Under the second.
    pub second: Option<RequestCounts>,
}

impl LimitFindings {
    /// The share of keys that it refuses as it is, by itself and without its penalty; `None` of calls in flight.
    pub fn current_refused_share(&self) -> Option<f64> {
        Some(self.peaks.as_ref()?.refused_share(self.capacity))
    }
}

pub(super) fn reason_text(reason: Reason) -> &'static str {
    match reason {
        Reason::Penalty => "penalty",
        Reason::DenyList => "deny list",
        _ => "limit",
    }
}

pub(super) fn collect_findings(
    input: &InputStats,
    headers: &HeaderCollector,
    first: &PolicyEvaluator,
    second: Option<&PolicyEvaluator>,
    changed: &ChangeCollector,
) -> Findings {
    let policies: Vec<PolicyFindings> =
        std::iter::once(first).chain(second).map(|judge| policy_findings(judge, headers)).collect();
    let changes = match &*policies {
        [first, second] => Some(policy_changes(first, second, changed)),
        _ => None,
    };
    Findings { input: input.clone(), policies, changes }
}

fn policy_findings(judge: &PolicyEvaluator, headers: &HeaderCollector) -> PolicyFindings {
    let plan = &judge.plan;
    let named = plan.actions().map(|(_, action)| (Some(action.name().to_owned()), action.is_shadow()));
    let actions = named
        .chain([(None, false)])
        .zip(&judge.actions)
        .map(|((name, shadow), count)| ActionFindings { name, shadow, counts: *count })
        .filter(|action| action.name.is_some() || action.counts.requests > 0);
    let client = |(client, fate): (ClientNetwork, &ClientStats)| ClientFindings { client, stats: *fate };
    let refused = judge.clients.top(TOP_COUNT, |fate| (fate.refused > 0).then_some(fate.refused));
    let innocent = judge.clients.top(TOP_COUNT, |fate| (fate.refused == 0).then_some(fate.admitted));
    PolicyFindings {
        name: judge.name.clone(),
        total: judge.total,
        refused_by_deny_list: judge.refused_by_deny_list,
        shadow_refusals: judge.shadow_refusals,
        undecided: judge.undecided,
        actions: actions.collect(),
        limits: plan.limits().iter().map(|(id, limit)| limit_findings(judge, id, limit.kind())).collect(),
        clients: judge.clients.len() as u64,
        refused_clients: judge.clients.values().filter(|fate| fate.refused > 0).count() as u64,
        most_refused: refused.into_iter().map(client).collect(),
        largest_never_refused: innocent.into_iter().map(client).collect(),
        timeline: judge.timeline.clone(),
        notes: collect_notes(judge, headers),
    }
}

fn limit_findings(judge: &PolicyEvaluator, id: LimitId, kind: &LimitKind) -> LimitFindings {
    let info = judge.plan.limit_info(id);
    let parts = judge.plan.key_parts(id);
    let peaks = judge.meter.peaks(id);
    let value = |peaks: &Peaks, share: f64| {
        let value = peaks.smallest_value_for_share(share);
        let quantity = with_value(info.quantity(), value).to_string();
        AlternativeValue { share, value, quantity, refused: peaks.refused_share(value) }
    };
    let some = peaks.as_ref().filter(|peaks| peaks.key_count() > 0);
    let keys = judge.refused_keys.top_by_key(TOP_COUNT, |(limit, _), key| (*limit == id).then_some(key.refused));
    LimitFindings {
        name: info.name().to_owned(),
        quantity: info.quantity().to_string(),
        counted_by: key_description(parts),
        refusals: judge.limits[id.index()],
        keys: keys.into_iter().map(|(_, key)| KeyFindings { key: key.label.clone(), refused: key.refused }).collect(),
        capacity: kind.capacity(),
        values: some.map(|peaks| REFUSED_SHARES.map(|share| value(peaks, share)).to_vec()).unwrap_or_default(),
        peaks,
    }
}

fn key_description(parts: &[KeyPart]) -> String {
    let words: Vec<String> = parts.iter().map(ToString::to_string).collect();
    if words.is_empty() { "all together".to_owned() } else { words.join(" + ") }
}

/// What the reader of the findings has to know to believe them.
fn collect_notes(judge: &PolicyEvaluator, headers: &HeaderCollector) -> Vec<String> {
    let plan = &judge.plan;
    let mut notes = Vec::new();
    if judge.total.requests + judge.undecided == 0 {
        return notes;
    }
    for (id, limit) in plan.limits().iter() {
        let name = plan.limit_info(id).name();
        if matches!(limit.kind(), LimitKind::Concurrency(_)) {
            notes.push(format!("{name}: not judged, since a log doesn't tell which calls are in flight"));
        }
        for part in plan.key_parts(id) {
            let lacks = match part {
                KeyPart::Header(header) => headers.never_seen().any(|unseen| unseen == header),
                KeyPart::Cookie(_) => headers.never_seen().any(|unseen| unseen == http::header::COOKIE),
                KeyPart::Host => !judge.has_seen_host,
                _ => false,
            };
            if lacks {
                notes.push(format!("{name}: the log never tells {part}, so all its calls were counted as if without"));
            }
        }
    }
    for (_, action) in plan.actions() {
        if !judge.has_seen_host && action.matcher().is_some_and(|matcher| !matcher.hosts().is_empty()) {
            notes.push(format!("{}: the log doesn't tell hosts, so nothing matched", action.name()));
        }
    }
    if let Some(error) = &judge.first_undecided {
        notes.push(format!("{} requests couldn't be decided about; the first: {error}", judge.undecided));
    }
    let (forgotten, short) = (judge.clients.evicted(), judge.clients.max_undercount());
    if forgotten > 0 {
        notes.push(format!("{forgotten} clients with few calls were forgotten; others may have up to {short} more"));
    }
    if judge.losses() > 0 {
        notes.push(format!("the policy's store was full and let go {} entries that counted", judge.losses()));
    }
    if judge.meter.unmeasured_calls() > 0 {
        notes.push("too many clients were refused to measure all; values for fewer refusals may be too low".to_owned());
    }
    notes
}

fn policy_changes(first: &PolicyFindings, second: &PolicyFindings, changed: &ChangeCollector) -> PolicyChanges {
    let find = |policy: &PolicyFindings, name: &Option<String>| {
        policy.actions.iter().find(|action| action.name == *name).map(|action| action.counts)
    };
    let new = second.actions.iter().filter(|action| find(first, &action.name).is_none());
    let names = first.actions.iter().chain(new).map(|action| action.name.clone());
    let action = |name: Option<String>| {
        let (first, second) = (find(first, &name), find(second, &name));
        ActionChange { name, first, second }
    };
    let only = |of: fn(&super::ClientChangeCounts) -> u32| {
        let top = changed.clients.top(TOP_COUNT, |change| Some(of(change)).filter(|count| *count > 0));
        top.into_iter().map(|(client, change)| (client, u64::from(of(change)))).collect()
    };
    PolicyChanges {
        refused_by_both: changed.refused_by_both,
        only_first: changed.only_first,
        only_second: changed.only_second,
        actions: names.map(action).collect(),
        newly_admitted: only(|change| change.only_first),
        newly_refused: only(|change| change.only_second),
    }
}

impl PolicyFindings {
    /// The name of a limit of this policy.
    pub fn limit_name(&self, limit: Option<LimitId>) -> &str {
        limit.and_then(|limit| self.limits.get(limit.index())).map_or("deny list", |limit| limit.name.as_str())
    }
}
