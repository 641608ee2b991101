//! What replies say is left of a credential's limits, for limits that only the provider knows.
//!
//! Providers tell by headers how many calls, and how much cost, they would still take and until when. What is under way
//! when a reply comes may or may not be counted in it; it is taken as not counted, so that what is left is never
//! overdrawn. The first call goes alone, because before its reply nothing is known.

use crate::{Span, Time};

/// How long it is until what is left may be known better, while something is under way.
const LOOK_AGAIN: Span = Span::from_millis(20);

/// What a reply says of one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest {
    /// How much is left.
    pub left: u64,
    /// How much there is when it begins anew, if that is told.
    pub limit: Option<u64>,
    /// When it begins anew.
    pub until: Time,
}

/// What a reply says of a credential's limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rests {
    /// Of the number of calls.
    pub calls: Option<Rest>,
    /// Of their cost.
    pub cost: Option<Rest>,
}

/// What is known of one credential.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Allowances {
    calls: Account,
    cost: Account,
    in_flight: u32,
    /// When the request was sent whose reply said most of what is known.
    told_by: Time,
    told: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Account {
    rest: Option<Rest>,
    /// What calls hold that are under way.
    held: u64,
}

impl Account {
    fn take(&mut self, amount: u64) {
        self.held = self.held.saturating_add(amount);
        if let Some(rest) = &mut self.rest {
            rest.left = rest.left.saturating_sub(amount);
        }
    }

    /// Learns from a reply; one to a request that may be older may only say that less is left.
    fn learn(&mut self, told: Option<Rest>, is_older: bool) {
        let Some(mut told) = told else { return };
        told.left = told.left.saturating_sub(self.held);
        self.rest = match self.rest {
            Some(known) if is_older => Some(Rest { left: known.left.min(told.left), ..known }),
            _ => Some(told),
        };
    }

    /// Begins anew when it is time.
    fn settle(&mut self, now: Time) {
        if let Some(rest) = &mut self.rest
            && rest.until <= now
        {
            // Until the next reply tells when that ends, it is taken not to.
            self.rest = rest.limit.map(|limit| Rest {
                left: limit.saturating_sub(self.held),
                limit: Some(limit),
                until: Time::NEVER,
            });
        }
    }

    fn lacks(&self, amount: u64) -> Option<Time> {
        // What costs more than there ever is goes when all of it is there.
        self.rest.filter(|rest| rest.left < amount.min(rest.limit.unwrap_or(u64::MAX))).map(|rest| rest.until)
    }
}

impl Allowances {
    /// When a call of this cost may go: now, or when it is worth looking again.
    pub(crate) fn free_at(&mut self, cost: u64, now: Time) -> Time {
        self.calls.settle(now);
        self.cost.settle(now);
        let lacking = self.calls.lacks(1).max(self.cost.lacks(cost));
        match lacking {
            None if self.told || self.in_flight == 0 => now,
            Some(until) if self.in_flight == 0 && !until.is_never() => until,
            // With nothing under way nothing better will be known.
            Some(_) if self.in_flight == 0 => now,
            Some(until) => until.min(now + LOOK_AGAIN),
            None => now + LOOK_AGAIN,
        }
    }

    pub(crate) fn sent(&mut self, cost: u64) {
        self.in_flight = self.in_flight.saturating_add(1);
        self.calls.take(1);
        self.cost.take(cost);
    }

    /// A request that was sent at this moment has ended, and this is what its reply said.
    pub(crate) fn ended(&mut self, cost: u64, sent_at: Time, answered: bool, told: Rests) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.calls.held = self.calls.held.saturating_sub(1);
        self.cost.held = self.cost.held.saturating_sub(cost);
        let is_older = self.told && sent_at <= self.told_by;
        self.calls.learn(told.calls, is_older);
        self.cost.learn(told.cost, is_older);
        if answered && !is_older {
            (self.told, self.told_by) = (true, sent_at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Time {
        Time::from_secs(1_700_000_000 + secs)
    }

    fn rest(left: u64, until: u64) -> Rests {
        Rests { calls: Some(Rest { left, limit: Some(10), until: at(until) }), cost: None }
    }

    #[test]
    fn the_first_goes_alone_and_what_is_under_way_counts() {
        let mut known = Allowances::default();
        assert_eq!(known.free_at(1, at(0)), at(0));
        known.sent(1);
        assert_eq!(known.free_at(1, at(0)), at(0) + LOOK_AGAIN);
        known.ended(1, at(0), true, rest(2, 60));
        for _ in 0..2 {
            assert_eq!(known.free_at(1, at(1)), at(1));
            known.sent(1);
        }
        assert_eq!(known.free_at(1, at(1)), at(1) + LOOK_AGAIN, "both may yet tell more");
        known.ended(1, at(1), true, rest(1, 60));
        assert_eq!(known.free_at(1, at(1)), at(1) + LOOK_AGAIN, "the one that is left is under way");
        known.ended(1, at(1), true, rest(5, 60));
        assert_eq!(known.free_at(1, at(1)), at(60), "nothing is under way");
        for _ in 0..10 {
            assert_eq!(known.free_at(1, at(60)), at(60));
            known.sent(1);
        }
        assert_eq!(known.free_at(1, at(60)), at(60) + LOOK_AGAIN);
    }

    #[test]
    fn an_older_reply_only_tells_of_less() {
        let mut known = Allowances::default();
        for sent in 0..3 {
            known.sent(sent);
        }
        known.ended(1, at(2), true, rest(5, 60));
        known.ended(1, at(1), true, rest(9, 50));
        assert_eq!(known.calls.rest, Some(Rest { left: 3, limit: Some(10), until: at(60) }), "two were under way");
        known.ended(1, at(0), true, rest(1, 60));
        assert_eq!(known.calls.rest.map(|rest| rest.left), Some(1));
    }

    #[test]
    fn costs_are_held_until_their_replies() {
        let cost = |left| Rests { calls: None, cost: Some(Rest { left, limit: Some(100), until: at(60) }) };
        let mut known = Allowances::default();
        known.sent(10);
        known.ended(10, at(0), true, cost(90));
        known.sent(60);
        assert_eq!(known.free_at(31, at(0)), at(0) + LOOK_AGAIN);
        assert_eq!(known.free_at(30, at(0)), at(0));
        known.ended(60, at(1), true, cost(85));
        assert_eq!(known.free_at(85, at(0)), at(0));
        assert_eq!(known.free_at(86, at(0)), at(60));
        assert_eq!(known.free_at(1_000, at(60)), at(60), "more than there ever is");
    }

    #[test]
    fn a_provider_that_tells_nothing_is_not_held_up() {
        let mut known = Allowances::default();
        known.sent(1);
        known.ended(1, at(0), true, Rests::default());
        for _ in 0..100 {
            assert_eq!(known.free_at(1, at(0)), at(0));
            known.sent(1);
        }
    }

    #[test]
    fn the_first_may_fail() {
        let mut known = Allowances::default();
        known.sent(1);
        known.ended(1, at(0), false, Rests::default());
        assert_eq!(known.free_at(1, at(0)), at(0));
        known.sent(1);
        assert_eq!(known.free_at(1, at(0)), at(0) + LOOK_AGAIN, "the next goes alone");
    }
}
