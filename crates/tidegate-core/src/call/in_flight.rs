//! The part of a call that remains after its reply has arrived.

use super::{Call, CallRules, CallStage, Measure, ProviderLimit, ProviderState, push_required};
use crate::{Lane, Op, Time, Verb};

/// The data that is still needed after the last reply of a call: to report the end of its body and its real cost.
/// Small, because it travels with the reply.
#[derive(Debug)]
#[must_use = "the call is in flight until its reply has ended"]
pub struct InFlight {
    /// The lane in which it is in flight until its reply has been read.
    streaming_lane: Option<Lane>,
    /// The lane of the limits that were charged.
    charged_lane: Lane,
    credential: usize,
    cost: u64,
    charged_at: Time,
    counted_at: Time,
}

impl Call {
    /// Takes the rest of the call after [`NextStep::Done`](super::NextStep::Done), with a reply to a request with this
    /// credential. The call itself then holds nothing.
    pub fn take_in_flight(&mut self, credential: usize) -> InFlight {
        let in_flight = if let CallStage::Streaming(lane, streaming_credential) = self.stage {
            debug_assert_eq!(streaming_credential, credential);
            self.stage = CallStage::Idle;
            Some(lane)
        } else {
            None
        };
        let Self { charged_lane: charged, cost, charged_at, counted_at, .. } = *self;
        InFlight { streaming_lane: in_flight, charged_lane: charged, credential, cost, charged_at, counted_at }
    }
}

impl InFlight {
    /// True if the call is in flight until [`InFlight::end`].
    pub fn is_in_flight(&self) -> bool {
        self.streaming_lane.is_some()
    }

    /// Called when the body of the reply has ended or isn't read further.
    pub fn end(&mut self, state: &mut ProviderState) {
        if let Some(lane) = self.streaming_lane.take() {
            state.record_end(lane, self.credential);
        }
    }

    /// Corrects the cost to the real one, in limits that measure costs.
    pub fn correct_cost(&self, rules: &CallRules, state: &mut ProviderState, cost: u64) {
        state.store_requests.clear_updates();
        state.store_requests.updates.set_charged(self.charged_at, self.counted_at);
        let (verb, difference) =
            if cost > self.cost { (Verb::Debit, cost - self.cost) } else { (Verb::Refund, self.cost - cost) };
        let counts_cost = |provider_limit: &&ProviderLimit| provider_limit.measure == Measure::Cost;
        let lane_limits = rules.lane_limits[self.charged_lane as usize].iter();
        let provider_limits = rules
            .provider_limits
            .iter()
            .chain(lane_limits)
            .filter(counts_cost)
            .map(|provider_limit| (provider_limit, rules.key));
        let key = rules.credential_keys[self.credential];
        let credential_limits =
            rules.credential_limits.iter().filter(counts_cost).map(|provider_limit| (provider_limit, key));
        for (provider_limit, key) in provider_limits.chain(credential_limits).filter(|_| difference > 0) {
            push_required(&mut state.store_requests.updates, Op::new(provider_limit.limit, verb, key, difference));
        }
    }
}
