//! Calls that a running gate has recorded, decided by a policy with other terms of a limit.

use std::collections::HashMap;

use foldhash::fast::FixedState;
use tidegate_core::{Batch, Decision, LimitId, Reason, Time};
use tidegate_policy::{ActionId, ListStatus, MatchedActions, Policy};

use crate::evaluator::{LimitRefusals, RequestCounts};
use crate::timeline::Timeline;
use crate::virtual_gate::VirtualGate;

/// The largest number of intervals: one a minute for an hour, and its ends.
const MAX_INTERVALS: usize = 62;

/// A call that a gate has decided about. It has hashes instead of addresses and keys.
#[derive(Clone, Debug)]
pub struct RecordedCall {
    /// The time of the decision.
    pub at: Time,
    /// A hash of the client's [network](crate::ClientNetwork), or of its key if it has no address.
    pub client: u64,
    /// The actions of the call.
    pub actions: MatchedActions,
    /// The list that the client is on.
    pub list: ListStatus,
    /// The takes of its limits, with an id of its own.
    pub batch: Batch,
}

/// The decisions of a policy about recorded calls.
#[derive(Clone, Debug)]
pub struct JudgedCalls {
    /// The requests of the action, or all.
    pub requests: RequestCounts,
    /// The refusals of the limit itself.
    pub refusals: LimitRefusals,
    /// The number of clients of those requests.
    pub clients: u64,
    /// The number of clients that were refused at least once.
    pub refused_clients: u64,
    /// The number of clients that a limit in shadow would have refused at least once.
    pub shadow_refused_clients: u64,
    /// The requests over time.
    pub timeline: Timeline,
    /// The entries that the memory of the policy's store had no room for. If there are any, a gate with more memory
    /// might have decided differently.
    pub losses: u64,
}

/// Decides about calls in the order of their times, as a gate with this policy and an empty store. Counts the requests
/// of `action`, or all if there is none, and the refusals of `limit`. Each call has the operations of the policy's own plan, or of an earlier one that
/// [counts the same requests](tidegate_policy::Plan::counts_same_requests); those of retired limits are left out.
pub fn judge_calls(
    policy: &Policy,
    action: Option<ActionId>,
    limit: LimitId,
    calls: impl Iterator<Item = RecordedCall>,
) -> JudgedCalls {
    let gate = VirtualGate::new(policy);
    let mut clients: HashMap<u64, (bool, bool), FixedState> = HashMap::default();
    let (mut requests, mut refusals) = (RequestCounts::default(), LimitRefusals::default());
    let mut timeline = Timeline::new(MAX_INTERVALS);
    for RecordedCall { at, client, actions, list, mut batch } in calls {
        let decision = match list {
            ListStatus::Allow => Decision::without_limit(true, Reason::AllowList, at),
            ListStatus::Deny => Decision::without_limit(false, Reason::DenyList, at),
            ListStatus::Neither => {
                if batch.ops().iter().any(|op| gate.plan.is_retired(op.limit)) {
                    batch = batch.with_ops(batch.ops().iter().filter(|op| !gate.plan.is_retired(op.limit)).copied());
                }
                let outcomes = gate.apply(&mut batch, None, at);
                gate.decide(&mut batch, &outcomes, at)
            }
        };
        if action.is_some_and(|action| !actions.contains(action)) {
            continue;
        }
        requests.record(&decision);
        timeline.interval_at(at).record(&decision);
        if decision.bound_by == Some(limit) {
            refusals.record(&decision);
        }
        let (is_refused, is_in_shadow) = clients.entry(client).or_default();
        *is_refused |= !decision.allowed;
        *is_in_shadow |= decision.shadow;
    }
    JudgedCalls {
        requests,
        refusals,
        clients: clients.len() as u64,
        refused_clients: clients.values().filter(|(is_refused, _)| *is_refused).count() as u64,
        shadow_refused_clients: clients.values().filter(|(_, is_in_shadow)| *is_in_shadow).count() as u64,
        timeline,
        losses: gate.losses(),
    }
}
