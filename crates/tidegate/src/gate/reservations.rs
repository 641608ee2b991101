//! Reservations that callers present, and the signatures of those that they get.

use tidegate_core::decision::decide;
use tidegate_core::{Batch, Clock, Decision, Op, Outcomes, Time};
use tidegate_policy::{Query, ReservationToken};
use tidegate_store::Store;

use super::{Gate, GateInner};

impl<S: Store, C: Clock> Gate<S, C> {
    /// Adds the reservation that the caller presents. One that no gate of this store has given to it for a limit of the batch
    /// admits nothing.
    #[cold]
    pub(super) fn present_reservation(&self, batch: &mut Batch, query: &Query<'_>) {
        let in_headers = || ReservationToken::in_headers(query.headers?);
        let Some(presented) = query.reservation.map(str::parse).or_else(in_headers) else { return };
        let (limits, caller) = (self.0.plan.limits(), batch.context().caller);
        let given = presented.ok().and_then(|token: ReservationToken| {
            let reserving = |op: &&Op| limits.get(op.limit).is_some_and(|limit| limit.reservations().is_some());
            batch
                .ops()
                .iter()
                .filter(reserving)
                .find_map(|op| Some((token.instant_for(&self.0.seed, limits.tag(op.limit), op.key, caller)?, *op)))
        });
        match given {
            Some((at, giver)) => batch.present_reservation(at, &giver),
            None => batch.set_caller(caller, Time::NEVER),
        }
    }

    /// The decision of these outcomes, with a signature of the reservation that it gives.
    #[inline]
    pub(super) fn decide_and_sign(&self, batch: &Batch, outcomes: &Outcomes) -> Decision {
        if batch.context().caller == 0 {
            return decide(batch, self.0.plan.limits(), outcomes);
        }
        self.decide_reserved(batch, outcomes)
    }

    #[cold]
    fn decide_reserved(&self, batch: &Batch, outcomes: &Outcomes) -> Decision {
        let GateInner { plan, seed, .. } = &*self.0;
        let mut decision = decide(batch, plan.limits(), outcomes);
        if let (false, Some(reservation), Some(limit)) =
            (decision.allowed, &mut decision.reservation, decision.bound_by)
        {
            let (tag, caller) = (plan.limits().tag(limit), batch.context().caller);
            reservation.signature = seed.reservation_signature(tag, decision.key, caller, reservation.at);
        }
        decision
    }
}
