//! A second request beside one that is slow: a call of its own, so that limits, breaker and credential count it as they
//! count every other.

use core::mem;

use rand_core::Rng;

use super::{AttemptReport, Call, CallRules, CallStage, ProviderState};
use crate::Time;

impl Call {
    /// The call of a second request beside the one that is under way, out of the retry budget; `None` if that is spent
    /// or nothing is under way. It is started as every call is, but goes at once or not at all: see
    /// [`cancel_queued_hedge`](Self::cancel_queued_hedge). What it took of the budget goes back if it isn't sent.
    pub fn new_hedge(&self, state: &ProviderState) -> Option<Self> {
        let sent = matches!(self.stage, CallStage::Sent(_));
        (sent && state.budget.take()).then_some(Self {
            stage: CallStage::Idle,
            holds_budget_retry: true,
            is_hedge: true,
            ..*self
        })
    }

    /// Whether it is a hedge that the lanes haven't named at once: it has left them.
    pub fn cancel_queued_hedge(&mut self, state: &mut ProviderState) -> bool {
        let is_passed_over = self.is_hedge && matches!(self.stage, CallStage::Queued(_));
        if is_passed_over {
            self.leave_queue(state);
        }
        is_passed_over
    }

    /// Goes on with the request of its hedge, which keeps the call's own.
    pub fn swap_request(&mut self, hedge: &mut Self) {
        mem::swap(&mut self.stage, &mut hedge.stage);
    }

    /// Of two requests this one has failed, and the other is still under way: everybody is told, and nothing decided.
    pub fn hedge_lost(
        &mut self,
        rules: &CallRules,
        state: &mut ProviderState,
        reply: &AttemptReport,
        now: Time,
        rng: &mut impl Rng,
    ) {
        state.store_requests.clear_updates();
        if let Some(sent) = self.take_sent() {
            self.finish_attempt(rules, state, sent, reply, now, rng);
            self.end_streaming(state);
        }
    }
}
