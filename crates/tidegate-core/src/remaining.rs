//! The remaining amounts of a credential's limits as replies report them, for limits that only the provider knows.
//!
//! Providers report in headers how many calls and how much cost they still accept, and until when. Calls in flight are
//! assumed to be not included, so that no amount is exceeded. The first call is sent alone: nothing is known before.

use crate::{Span, Time};

/// The time until the next check for new information while calls are in flight.
const RECHECK_INTERVAL: Span = Span::from_millis(20);

/// The report of a reply about one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemainingAmount {
    /// The remaining amount.
    pub amount: u64,
    /// The full amount after a reset. `None` if it isn't reported.
    pub limit: Option<u64>,
    /// The time of the reset.
    pub resets_at: Time,
}

/// The report of a reply about a credential's limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remaining {
    /// The remaining number of calls.
    pub calls: Option<RemainingAmount>,
    /// The remaining cost.
    pub cost: Option<RemainingAmount>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RemainingTracker {
    calls: AmountTracker,
    cost: AmountTracker,
    in_flight: u32,
    /// The send time of the request with the newest known reply.
    newest_sent_at: Time,
    has_reply: bool,
    /// True if the provider keeps room for the next call.
    has_room: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct AmountTracker {
    remaining: Option<RemainingAmount>,
    in_flight_amount: u64,
}

impl AmountTracker {
    fn reserve(&mut self, amount: u64) {
        self.in_flight_amount = self.in_flight_amount.saturating_add(amount);
        if let Some(remaining) = &mut self.remaining {
            remaining.amount = remaining.amount.saturating_sub(amount);
        }
    }

    /// Learns from a reply. If its request may be older than the newest one, it may only lower the amount.
    fn update(&mut self, reported: Option<RemainingAmount>, is_older: bool) {
        let Some(mut reported) = reported else { return };
        reported.amount = reported.amount.saturating_sub(self.in_flight_amount);
        self.remaining = match self.remaining {
            Some(known) if is_older => Some(RemainingAmount { amount: known.amount.min(reported.amount), ..known }),
            _ => Some(reported),
        };
    }

    fn refresh(&mut self, now: Time) {
        if let Some(remaining) = &mut self.remaining
            && remaining.resets_at <= now
        {
            // Until a reply reports the next reset, none is assumed.
            self.remaining = remaining.limit.map(|limit| RemainingAmount {
                amount: limit.saturating_sub(self.in_flight_amount),
                limit: Some(limit),
                resets_at: Time::NEVER,
            });
        }
    }

    fn exhausted_until(&self, amount: u64) -> Option<Time> {
        // A call that costs more than the whole limit may go when the whole limit is available.
        self.remaining
            .filter(|remaining| remaining.amount < amount.min(remaining.limit.unwrap_or(u64::MAX)))
            .map(|remaining| remaining.resets_at)
    }
}

impl RemainingTracker {
    /// The time at which a call of this cost may be sent: `now`, or the time of the next check.
    pub(crate) fn free_at(&mut self, cost: u64, now: Time) -> Time {
        self.calls.refresh(now);
        self.cost.refresh(now);
        let calls_exhausted_until = self.calls.exhausted_until(1).filter(|_| !self.has_room);
        let exhausted_until = calls_exhausted_until.max(self.cost.exhausted_until(cost));
        match exhausted_until {
            None if self.has_reply || self.in_flight == 0 => now,
            Some(until) if self.in_flight == 0 && !until.is_never() => until,
            // Without calls in flight, no better information will come.
            Some(_) if self.in_flight == 0 => now,
            Some(until) => until.min(now + RECHECK_INTERVAL),
            None => now + RECHECK_INTERVAL,
        }
    }

    pub(crate) fn record_sent(&mut self, cost: u64) {
        self.in_flight = self.in_flight.saturating_add(1);
        self.has_room = false;
        self.calls.reserve(1);
        self.cost.reserve(cost);
    }

    /// Forgets the number of calls that are left, and ignores it until the next call: the provider keeps room for that.
    pub(crate) fn keep_room(&mut self) {
        (self.calls.remaining, self.has_room) = (None, true);
    }

    /// True if no call that it counts is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Records the report of a reply to a request that isn't counted here.
    pub(crate) fn record_report(&mut self, sent_at: Time, reported: Remaining) {
        let is_older = self.has_reply && sent_at <= self.newest_sent_at;
        self.calls.update(reported.calls, is_older);
        self.cost.update(reported.cost, is_older);
        if !is_older {
            (self.has_reply, self.newest_sent_at) = (true, sent_at);
        }
    }

    /// Records the end of a request that was sent at `sent_at`, with the report of its reply.
    pub(crate) fn record_end(&mut self, cost: u64, sent_at: Time, answered: bool, reported: Remaining) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.calls.in_flight_amount = self.calls.in_flight_amount.saturating_sub(1);
        self.cost.in_flight_amount = self.cost.in_flight_amount.saturating_sub(cost);
        if answered {
            self.record_report(sent_at, reported);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Time {
        Time::from_secs(1_700_000_000 + secs)
    }

    fn remaining(left: u64, until: u64) -> Remaining {
        Remaining { calls: Some(RemainingAmount { amount: left, limit: Some(10), resets_at: at(until) }), cost: None }
    }

    #[test]
    fn the_first_call_probes_and_unanswered_calls_count() {
        let mut known = RemainingTracker::default();
        assert_eq!(known.free_at(1, at(0)), at(0));
        known.record_sent(1);
        assert_eq!(known.free_at(1, at(0)), at(0) + RECHECK_INTERVAL);
        known.record_end(1, at(0), true, remaining(2, 60));
        for _ in 0..2 {
            assert_eq!(known.free_at(1, at(1)), at(1));
            known.record_sent(1);
        }
        assert_eq!(known.free_at(1, at(1)), at(1) + RECHECK_INTERVAL, "both may yet tell more");
        known.record_end(1, at(1), true, remaining(1, 60));
        assert_eq!(known.free_at(1, at(1)), at(1) + RECHECK_INTERVAL, "the one that is left is under way");
        known.record_end(1, at(1), true, remaining(5, 60));
        assert_eq!(known.free_at(1, at(1)), at(60), "nothing is under way");
        for _ in 0..10 {
            assert_eq!(known.free_at(1, at(60)), at(60));
            known.record_sent(1);
        }
        assert_eq!(known.free_at(1, at(60)), at(60) + RECHECK_INTERVAL);
    }

    #[test]
    fn an_older_reply_can_only_lower_allowances() {
        let mut known = RemainingTracker::default();
        for sent in 0..3 {
            known.record_sent(sent);
        }
        known.record_end(1, at(2), true, remaining(5, 60));
        known.record_end(1, at(1), true, remaining(9, 50));
        assert_eq!(
            known.calls.remaining,
            Some(RemainingAmount { amount: 3, limit: Some(10), resets_at: at(60) }),
            "two were under way"
        );
        known.record_end(1, at(0), true, remaining(1, 60));
        assert_eq!(known.calls.remaining.map(|remaining| remaining.amount), Some(1));
    }

    #[test]
    fn costs_are_reserved_until_their_replies() {
        let cost = |left| Remaining {
            calls: None,
            cost: Some(RemainingAmount { amount: left, limit: Some(100), resets_at: at(60) }),
        };
        let mut known = RemainingTracker::default();
        known.record_sent(10);
        known.record_end(10, at(0), true, cost(90));
        known.record_sent(60);
        assert_eq!(known.free_at(31, at(0)), at(0) + RECHECK_INTERVAL);
        assert_eq!(known.free_at(30, at(0)), at(0));
        known.record_end(60, at(1), true, cost(85));
        assert_eq!(known.free_at(85, at(0)), at(0));
        assert_eq!(known.free_at(86, at(0)), at(60));
        assert_eq!(known.free_at(1_000, at(60)), at(60), "more than there ever is");
    }

    #[test]
    fn replies_without_allowances_delay_no_call() {
        let mut known = RemainingTracker::default();
        known.record_sent(1);
        known.record_end(1, at(0), true, Remaining::default());
        for _ in 0..100 {
            assert_eq!(known.free_at(1, at(0)), at(0));
            known.record_sent(1);
        }
    }

    #[test]
    fn a_failed_first_call_is_repeated_alone() {
        let mut known = RemainingTracker::default();
        known.record_sent(1);
        known.record_end(1, at(0), false, Remaining::default());
        assert_eq!(known.free_at(1, at(0)), at(0));
        known.record_sent(1);
        assert_eq!(known.free_at(1, at(0)), at(0) + RECHECK_INTERVAL, "the next goes alone");
    }
}
