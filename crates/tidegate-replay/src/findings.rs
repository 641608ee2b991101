//! The findings of a replay.

use tidegate_core::{LimitId, LimitKind, Reason};
use tidegate_policy::KeyPart;

use super::client::ClientNetwork;
use super::evaluator::{LimitRefusals, PolicyEvaluator, RequestCounts};
use super::meter::{Peaks, REFUSED_SHARES, with_value};
use super::request::HeaderCollector;
use super::timeline::Timeline;
use super::top_k::TopK;
use super::{ChangeCollector, ClientStats, InputStats, LogReplay};

/// The number of clients and keys in each list.
const TOP_COUNT: usize = 10;

/// The findings of a replay.
#[derive(Clone, Debug)]
pub struct Findings {
    /// The statistics of the input.
    pub input: InputStats,
    /// The findings of each policy: one, or two that are compared.
    pub policies: Vec<PolicyFindings>,
    /// The differences between two policies; `None` if there is only one.
    pub changes: Option<PolicyChanges>,
}

/// The findings of one policy.
#[derive(Clone, Debug)]
pub struct PolicyFindings {
    /// The name of the policy, as given to the replay.
    pub name: String,
    /// The counts of all requests that it decides about.
    pub total: RequestCounts,
    /// Requests that were refused because the client is on the deny list.
    pub refused_by_deny_list: u64,
    /// Requests that it can't decide about; a gate answers them with 503.
    pub undecided: u64,
    /// The actions in file order; last the requests that match none, if there are any.
    pub actions: Vec<ActionFindings>,
    /// The limits in the plan's order.
    pub limits: Vec<LimitFindings>,
    /// The number of clients that are remembered.
    pub clients: u64,
    /// The number of those that were refused at least once.
    pub refused_clients: u64,
    /// The number of those that limits in shadow would have refused at least once.
    pub shadow_refused_clients: u64,
    /// The clients with the most refusals.
    pub most_refused: Vec<ClientFindings>,
    /// The clients that limits in shadow would have refused most.
    pub most_refused_in_shadow: Vec<ClientFindings>,
    /// The clients with the most calls of which none was refused.
    pub largest_never_refused: Vec<ClientFindings>,
    /// The counts over time.
    pub timeline: Timeline,
    /// The parts of keys that no line of the log contains, with their limits, in words. The refusals of these limits differ
    /// from those of a gate.
    pub missing_parts: Vec<String>,
    /// Notes, in words, on what else the log doesn't tell or the bounds leave out.
    pub notes: Vec<String>,
}

/// The findings of one action.
#[derive(Clone, Debug)]
pub struct ActionFindings {
    /// Its name; `None` for requests that match none.
    pub name: Option<String>,
    /// True if it is in shadow.
    pub shadow: bool,
    /// The counts of its requests.
    pub counts: RequestCounts,
}

/// The findings of one limit.
#[derive(Clone, Debug)]
pub struct LimitFindings {
    /// The name of the limit: its action's name, or `global`.
    pub name: String,
    /// The quantity as written in the policy.
    pub quantity: String,
    /// The key that it counts by, in words.
    pub counted_by: String,
    /// Its refusals.
    pub refusals: LimitRefusals,
    /// The keys with the most refusals; empty if it counts by the client alone.
    pub keys: Vec<KeyFindings>,
    /// Its value: the largest number of units that are ever free at once.
    pub capacity: u64,
    /// The highest use of it by each key; `None` for calls in flight.
    pub peaks: Option<Peaks>,
    /// The values for each of [`REFUSED_SHARES`].
    pub values: Vec<AlternativeValue>,
}

/// A value of a limit, and the share of keys that it would have refused.
#[derive(Clone, Debug, PartialEq)]
pub struct AlternativeValue {
    /// The largest share of keys that it may refuse, from 0 to 1.
    pub share: f64,
    /// The value.
    pub value: u64,
    /// The quantity with this value.
    pub quantity: String,
    /// The share that it would have refused, from 0 to 1.
    pub refused: f64,
}

/// A client in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientFindings {
    /// The client.
    pub client: ClientNetwork,
    /// The counts of its calls.
    pub stats: ClientStats,
}

/// A key in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFindings {
    /// The parts of the key, in words.
    pub key: String,
    /// The number of its refusals.
    pub refused: u64,
    /// The number of its calls that the limit would have refused if it weren't in shadow.
    pub refused_in_shadow: u64,
}

impl KeyFindings {
    pub(super) fn all_refusals(&self) -> u64 {
        self.refused + self.refused_in_shadow
    }
}

/// The differences between two policies.
#[derive(Clone, Debug)]
pub struct PolicyChanges {
    /// Requests that both refuse.
    pub refused_by_both: u64,
    /// Requests that only the first refuses.
    pub only_first: u64,
    /// Requests that only the second refuses.
    pub only_second: u64,
    /// The refusals of each action that either policy has.
    pub actions: Vec<ActionChange>,
    /// The clients that the second admits more often, with the number of requests.
    pub newly_admitted: Vec<(ClientNetwork, u64)>,
    /// The clients that the second refuses more often, with the number of requests.
    pub newly_refused: Vec<(ClientNetwork, u64)>,
}

/// An action's refusals under two policies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActionChange {
    /// Its name; `None` for requests that match none.
    pub name: Option<String>,
    /// The counts under the first; `None` if it has no such action.
    pub first: Option<RequestCounts>,
    /// The counts under the second; `None` if it has no such action.
    pub second: Option<RequestCounts>,
}

impl LimitFindings {
    /// Returns the share of keys that it refuses at its present value, without its penalty; `None` for calls in flight.
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

impl LogReplay {
    /// Returns the findings so far.
    pub fn findings(&self) -> Findings {
        let policies: Vec<PolicyFindings> =
            self.evaluators.iter().map(|evaluator| policy_findings(evaluator, &self.headers)).collect();
        let changes = match &*policies {
            [first, second] => Some(policy_changes(first, second, &self.changes)),
            _ => None,
        };
        Findings { input: self.input.clone(), policies, changes }
    }
}

fn policy_findings(evaluator: &PolicyEvaluator, headers: &HeaderCollector) -> PolicyFindings {
    let plan = &evaluator.gate.plan;
    let named = plan.actions().map(|(_, action)| (Some(action.name().to_owned()), action.is_shadow()));
    let actions = named
        .chain([(None, false)])
        .zip(&evaluator.actions)
        .map(|((name, shadow), count)| ActionFindings { name, shadow, counts: *count })
        .filter(|action| action.name.is_some() || action.counts.requests > 0);
    let client = |(client, stats): (ClientNetwork, &ClientStats)| ClientFindings { client, stats: *stats };
    let refused = evaluator.clients.top(TOP_COUNT, |_, stats| (stats.refused > 0).then_some(stats.refused));
    let in_shadow = |stats: &ClientStats| (stats.refused_in_shadow > 0).then_some(stats.refused_in_shadow);
    let refused_in_shadow = evaluator.clients.top(TOP_COUNT, |_, stats| in_shadow(stats));
    let is_never_refused = |stats: &ClientStats| stats.refused == 0 && stats.refused_in_shadow == 0;
    let never_refused = evaluator.clients.top(TOP_COUNT, |_, stats| is_never_refused(stats).then_some(stats.admitted));
    PolicyFindings {
        name: evaluator.name.clone(),
        total: evaluator.total,
        refused_by_deny_list: evaluator.refused_by_deny_list,
        undecided: evaluator.undecided,
        actions: actions.collect(),
        limits: plan.limits().iter().map(|(id, limit)| limit_findings(evaluator, id, limit.kind())).collect(),
        clients: evaluator.clients.len() as u64,
        refused_clients: evaluator.clients.values().filter(|stats| stats.refused > 0).count() as u64,
        shadow_refused_clients: evaluator.clients.values().filter(|stats| stats.refused_in_shadow > 0).count() as u64,
        most_refused: refused.into_iter().map(client).collect(),
        most_refused_in_shadow: refused_in_shadow.into_iter().map(client).collect(),
        largest_never_refused: never_refused.into_iter().map(client).collect(),
        timeline: evaluator.timeline.clone(),
        missing_parts: missing_parts(evaluator, headers),
        notes: collect_notes(evaluator),
    }
}

fn limit_findings(evaluator: &PolicyEvaluator, id: LimitId, kind: &LimitKind) -> LimitFindings {
    let info = evaluator.gate.plan.limit_info(id);
    let parts = evaluator.gate.plan.key_parts(id);
    let peaks = evaluator.meter.peaks(id);
    let value = |peaks: &Peaks, share: f64| {
        let value = peaks.smallest_value_for_share(share);
        let quantity = with_value(info.quantity(), value).to_string();
        AlternativeValue { share, value, quantity, refused: peaks.refused_share(value) }
    };
    let some = peaks.as_ref().filter(|peaks| peaks.key_count() > 0);
    let keys = evaluator.refused_keys.top(TOP_COUNT, |(limit, _), key| (*limit == id).then_some(key.all_refusals()));
    LimitFindings {
        name: info.name().to_owned(),
        quantity: info.quantity().to_string(),
        counted_by: key_description(parts),
        refusals: evaluator.limits[id.index()],
        keys: keys.into_iter().map(|(_, key)| key.clone()).collect(),
        capacity: kind.capacity(),
        values: some.map(|peaks| REFUSED_SHARES.map(|share| value(peaks, share)).to_vec()).unwrap_or_default(),
        peaks,
    }
}

fn key_description(parts: &[KeyPart]) -> String {
    let words: Vec<String> = parts.iter().map(ToString::to_string).collect();
    if words.is_empty() { "all together".to_owned() } else { words.join(" + ") }
}

/// Returns the parts of keys that no line contains, with their limits.
fn missing_parts(evaluator: &PolicyEvaluator, headers: &HeaderCollector) -> Vec<String> {
    let plan = &evaluator.gate.plan;
    let is_missing = |part: &&KeyPart| match part {
        KeyPart::Header(header) => headers.never_seen().any(|unseen| unseen == header),
        KeyPart::Cookie(_) => headers.never_seen().any(|unseen| unseen == http::header::COOKIE),
        KeyPart::Host => !evaluator.has_seen_host,
        KeyPart::ClientCertificate => true,
        _ => false,
    };
    let describe = |id: LimitId, part: &KeyPart| {
        let name = plan.limit_info(id).name();
        format!("{name}: the log doesn't contain {part}, so all calls were counted as calls without it")
    };
    let limits = plan.limits().iter().filter(|_| evaluator.has_requests());
    limits
        .flat_map(|(id, _)| plan.key_parts(id).iter().filter(is_missing).map(move |part| describe(id, part)))
        .collect()
}

/// Returns the other notes that a reader needs in order to judge the findings.
fn collect_notes(evaluator: &PolicyEvaluator) -> Vec<String> {
    let plan = &evaluator.gate.plan;
    let mut notes = Vec::new();
    if !evaluator.has_requests() {
        return notes;
    }
    for (id, limit) in plan.limits().iter() {
        if limit.kind().has_permits() {
            let name = plan.limit_info(id).name();
            notes.push(format!("{name}: not judged, since a log doesn't tell which calls are in flight"));
        }
    }
    for (_, action) in plan.actions() {
        if !evaluator.has_seen_host && action.matcher().is_some_and(|matcher| !matcher.hosts().is_empty()) {
            notes.push(format!("{}: the log doesn't tell hosts, so nothing matched", action.name()));
        }
    }
    if let Some(error) = &evaluator.first_undecided {
        notes.push(format!("{} requests couldn't be decided about; the first: {error}", evaluator.undecided));
    }
    let TopK { evicted, max_undercount, .. } = evaluator.clients;
    if evicted > 0 {
        notes.push(format!(
            "{evicted} clients with few calls were forgotten; others may have up to {max_undercount} more"
        ));
    }
    if evaluator.gate.losses() > 0 {
        notes.push(format!("the policy's store was full and let go {} entries that counted", evaluator.gate.losses()));
    }
    if evaluator.meter.unmeasured_calls > 0 {
        notes.push("too many clients were refused to measure all; values for fewer refusals may be too low".to_owned());
    }
    notes
}

fn policy_changes(first: &PolicyFindings, second: &PolicyFindings, changes: &ChangeCollector) -> PolicyChanges {
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
        let top = changes.clients.top(TOP_COUNT, |_, change| Some(of(change)).filter(|count| *count > 0));
        top.into_iter().map(|(client, change)| (client, u64::from(of(change)))).collect()
    };
    PolicyChanges {
        refused_by_both: changes.refused_by_both,
        only_first: changes.only_first,
        only_second: changes.only_second,
        actions: names.map(action).collect(),
        newly_admitted: only(|change| change.only_first),
        newly_refused: only(|change| change.only_second),
    }
}

impl PolicyFindings {
    /// Returns the name of a limit of this policy; `deny list` for `None`.
    pub fn limit_name(&self, limit: Option<LimitId>) -> &str {
        limit.and_then(|limit| self.limits.get(limit.index())).map_or("deny list", |limit| limit.name.as_str())
    }
}
