//! Hedging: a second request beside a slow one, counted by limits, breaker and credential like every other call.

use core::mem;

use rand_core::Rng;

use super::{AttemptReport, Call, CallRules, CallStage, ProviderState};
use crate::Time;

impl Call {
    /// Creates the call of a second request beside the one that is under way. It uses a retry of the budget, which is
    /// given back if it isn't sent. `None` if the budget is spent or no request is under way. It is started like every
    /// call, but is sent at once or not at all: see [`cancel_queued_hedge`](Self::cancel_queued_hedge).
    pub fn new_hedge(&self, state: &ProviderState) -> Option<Self> {
        let sent = matches!(self.stage, CallStage::Sent(..));
        (sent && state.budget.take()).then_some(Self {
            stage: CallStage::Idle,
            holds_budget_retry: true,
            is_hedge: true,
            has_reservation: false,
            keeps_place: false,
            ..*self
        })
    }

    /// Removes a hedge from the lanes if they haven't chosen it at once. Returns true if it was removed.
    pub fn cancel_queued_hedge(&mut self, state: &mut ProviderState) -> bool {
        let is_passed_over = self.is_hedge && matches!(self.stage, CallStage::Queued(_));
        if is_passed_over {
            self.leave_queue(state);
        }
        is_passed_over
    }

    /// Continues with the request of its hedge. The hedge gets the call's own request.
    pub fn swap_request(&mut self, hedge: &mut Self) {
        mem::swap(&mut self.stage, &mut hedge.stage);
    }

    /// Reports that this one of two requests has failed while the other is still under way. Decides nothing.
    pub fn hedge_lost(
        &mut self,
        rules: &CallRules,
        state: &mut ProviderState,
        reply: &AttemptReport,
        now: Time,
        rng: &mut impl Rng,
    ) {
        state.store_requests.updates.clear();
        if self.finish_attempt(rules, state, reply, now, rng).is_some() {
            self.end_streaming(state);
        }
    }
}
