//! A second request beside one that is slow: a call of its own, so that limits, breaker and credential count it as they
//! count every other.

use core::mem;

use rand_core::Rng;

use super::{Call, Desk, Reply, Rules, Stage};
use crate::Time;

impl Call {
    /// The call of a second request beside the one that is under way, out of the retry budget; `None` if that is spent
    /// or nothing is under way. It is started as every call is, but goes at once or not at all: see
    /// [`passed_over`](Self::passed_over). What it took of the budget goes back if it isn't sent.
    pub fn hedge(&self, desk: &Desk) -> Option<Self> {
        let sent = matches!(self.stage, Stage::Sent(_));
        (sent && desk.budget.take()).then_some(Self { stage: Stage::Idle, retries: true, hedges: true, ..*self })
    }

    /// Whether it is a hedge that the lanes haven't named at once: it has left them.
    pub fn passed_over(&mut self, desk: &mut Desk) -> bool {
        let over = self.hedges && matches!(self.stage, Stage::Queued(_));
        if over {
            self.leave(desk);
        }
        over
    }

    /// Goes on with the request of its hedge, which keeps the call's own.
    pub fn change_places(&mut self, hedge: &mut Self) {
        mem::swap(&mut self.stage, &mut hedge.stage);
    }

    /// Of two requests this one has failed, and the other is still under way: everybody is told, and nothing decided.
    pub fn beaten(&mut self, rules: &Rules, desk: &mut Desk, reply: &Reply, now: Time, rng: &mut impl Rng) {
        desk.orders.begin();
        if let Some(sent) = self.take_sent() {
            self.settle(rules, desk, sent, reply, now, rng);
            self.ended(desk);
        }
    }
}
