//! The part of a call that remains after its reply has arrived.

use super::{Call, CallRules, CallStage, Measure, ProviderState, push_required};
use crate::{Lane, Op, Time, Verb};

/// The data that is needed after a call's last reply, to report the end of its body and its real cost.
#[derive(Debug)]
#[must_use = "the call is in flight until its reply has ended"]
pub struct InFlight {
    /// The lane in which it is in flight until its reply has been read.
    streaming_lane: Option<Lane>,
    is_tunnel: bool,
    charged_lane: Lane,
    credential: usize,
    cost: u64,
    /// The scope whose limits were charged; 0 if it has none.
    scope: u64,
    charged_at: Time,
    counted_at: Time,
}

impl Call {
    /// Takes the rest of the call after [`NextStep::Done`](super::NextStep::Done), with a reply to a request with this
    /// credential. The call itself then holds nothing.
    pub fn take_in_flight(&mut self, credential: usize) -> InFlight {
        let mut streaming_lane = None;
        if let CallStage::Streaming(lane, streaming_credential) = self.stage {
            debug_assert_eq!(streaming_credential, credential);
            (self.stage, streaming_lane) = (CallStage::Idle, Some(lane));
        }
        let Self { is_tunnel, charged_lane, charged_scope, cost, charged_at, counted_at, .. } = *self;
        let scope = charged_scope.counted();
        InFlight { streaming_lane, is_tunnel, charged_lane, credential, cost, scope, charged_at, counted_at }
    }
}

impl InFlight {
    /// True if the call is in flight until [`InFlight::end`].
    pub fn is_in_flight(&self) -> bool {
        self.streaming_lane.is_some()
    }

    /// Called when the body of the reply has ended or isn't read further.
    pub fn end(&mut self, rules: &CallRules, state: &mut ProviderState) {
        let Some(lane) = self.streaming_lane.take() else { return };
        state.record_end(lane, self.credential);
        if self.is_tunnel {
            state.tunnels -= 1;
            state.apply_adaptive_limit(rules);
        }
    }

    /// Corrects the cost to the real one, in limits that measure costs.
    pub fn correct_cost(&self, rules: &CallRules, state: &mut ProviderState, cost: u64) {
        let updates = &mut state.store_requests.updates;
        updates.clear();
        updates.set_charged(self.charged_at, self.counted_at);
        let verb = if cost > self.cost { Verb::Debit } else { Verb::Refund };
        let difference = cost.abs_diff(self.cost);
        for (provider_limit, key) in rules.limits_with_keys(self.charged_lane, self.credential, self.scope) {
            if provider_limit.measure == Measure::Cost && difference > 0 {
                push_required(updates, Op::new(provider_limit.limit, verb, key, difference));
            }
        }
    }
}
