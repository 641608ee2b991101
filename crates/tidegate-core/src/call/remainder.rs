//! What outlives a call whose reply is there.

use super::{Call, Ceiling, Desk, Measure, Rules, Stage, push};
use crate::{Lane, Op, Time, Verb};

/// What is left to be told of a call that has its last reply: when that has been read, and what it cost. Small, since
/// it goes with the reply.
#[derive(Debug)]
#[must_use = "the call is in flight until its reply has ended"]
pub struct Remainder {
    /// The lane that it is in flight for, until its reply has been read.
    in_flight: Option<Lane>,
    /// The lane whose limits it was charged for.
    charged: Lane,
    credential: usize,
    cost: u64,
    charged_at: Time,
    counted_at: Time,
}

impl Call {
    /// What is left of it after [`Step::Finish`](super::Step::Finish) with a reply to a request with this credential.
    /// The call itself holds nothing any more.
    pub fn remainder(&mut self, credential: usize) -> Remainder {
        let in_flight = if let Stage::Streaming(lane, its) = self.stage {
            debug_assert_eq!(its, credential);
            self.stage = Stage::Idle;
            Some(lane)
        } else {
            None
        };
        let Self { charged, cost, charged_at, counted_at, .. } = *self;
        Remainder { in_flight, charged, credential, cost, charged_at, counted_at }
    }
}

impl Remainder {
    /// Whether the call is in flight until [`Remainder::ended`].
    pub fn is_in_flight(&self) -> bool {
        self.in_flight.is_some()
    }

    /// The reply's body has ended, or nobody reads on.
    pub fn ended(&mut self, desk: &mut Desk) {
        if let Some(lane) = self.in_flight.take() {
            desk.ended(lane, self.credential);
        }
    }

    /// It turned out to cost this much, where its measure is its cost.
    pub fn cost_was(&self, rules: &Rules, desk: &mut Desk, cost: u64) {
        desk.orders.begin();
        desk.orders.tell.set_charged(self.charged_at, self.counted_at);
        let (verb, rest) =
            if cost > self.cost { (Verb::Debit, cost - self.cost) } else { (Verb::Refund, self.cost - cost) };
        let measured = |ceiling: &&Ceiling| ceiling.measure == Measure::Cost;
        let own = rules.lane_ceilings[self.charged as usize].iter();
        let shared = rules.ceilings.iter().chain(own).filter(measured).map(|ceiling| (ceiling, rules.key));
        let key = rules.credential_keys[self.credential];
        let of_credential = rules.credential_ceilings.iter().filter(measured).map(|ceiling| (ceiling, key));
        for (ceiling, key) in shared.chain(of_credential).filter(|_| rest > 0) {
            push(&mut desk.orders.tell, Op::new(ceiling.limit, verb, key, rest));
        }
    }
}
