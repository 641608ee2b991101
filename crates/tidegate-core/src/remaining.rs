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

/// The number of requests that have ended so far, and their cost. A request keeps that of its start: those that end while it
/// is under way may or may not be included in its reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EndedTotals {
    calls: u64,
    cost: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RemainingTracker {
    calls: AmountTracker,
    cost: AmountTracker,
    in_flight: u32,
    ended: EndedTotals,
    /// The send time of the request with the newest known reply.
    newest_sent_at: Time,
    has_reply: bool,
    /// True if the provider keeps room for the next call.
    has_room: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct AmountTracker {
    /// The last known amount. What is in flight isn't subtracted.
    remaining: Option<RemainingAmount>,
    in_flight_amount: u64,
}

impl AmountTracker {
    fn record_sent(&mut self, amount: u64) {
        self.in_flight_amount = self.in_flight_amount.saturating_add(amount);
    }

    fn record_end(&mut self, amount: u64, has_report: bool) {
        self.in_flight_amount = self.in_flight_amount.saturating_sub(amount);
        if let Some(remaining) = self.remaining.as_mut().filter(|_| !has_report) {
            remaining.amount = remaining.amount.saturating_sub(amount);
        }
    }

    /// Learns from a reply. If its request may be older than the newest one, it may only lower the amount.
    ///
    /// Requests overtake each other on their way, and so do replies. So the lowest report is the latest, unless something
    /// came back in the meantime. `overlapping` is the amount of the requests that have ended since this one was sent: the
    /// provider may have counted them after it. Only what is reported beyond them has certainly come back.
    fn learn(&mut self, reported: RemainingAmount, overlapping: u64, is_older: bool) {
        self.remaining = Some(match self.remaining {
            Some(known) if is_older => RemainingAmount { amount: known.amount.min(reported.amount), ..known },
            Some(known) => {
                let least = reported.amount.saturating_sub(overlapping);
                RemainingAmount { amount: known.amount.min(reported.amount).max(least), ..reported }
            }
            None => reported,
        });
    }

    fn refresh(&mut self, now: Time) {
        if let Some(remaining) = &mut self.remaining
            && remaining.resets_at <= now
        {
            // Until a reply reports the next reset, none is assumed.
            self.remaining = remaining.limit.map(|limit| RemainingAmount {
                amount: limit,
                limit: Some(limit),
                resets_at: Time::NEVER,
            });
        }
    }

    fn exhausted_until(&self, amount: u64) -> Option<Time> {
        // A call that costs more than the whole limit may go when the whole limit is available.
        let is_exhausted = |remaining: &RemainingAmount| {
            let left = remaining.amount.saturating_sub(self.in_flight_amount);
            left < amount.min(remaining.limit.unwrap_or(u64::MAX))
        };
        self.remaining.filter(is_exhausted).map(|remaining| remaining.resets_at)
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

    /// Records that a request is sent. Returns what its end needs.
    pub(crate) fn record_sent(&mut self, cost: u64) -> EndedTotals {
        self.in_flight = self.in_flight.saturating_add(1);
        self.has_room = false;
        self.calls.record_sent(1);
        self.cost.record_sent(cost);
        self.ended
    }

    /// Forgets the number of calls that are left, and ignores it until the next call: the provider keeps room for that.
    pub(crate) fn keep_room(&mut self) {
        (self.calls.remaining, self.has_room) = (None, true);
    }

    /// True if no call that it counts is in flight and nothing is known to be spent.
    pub(crate) fn is_idle(&self, now: Time) -> bool {
        let is_spent = |amount: &AmountTracker| amount.exhausted_until(1).is_some_and(|until| until > now);
        self.in_flight == 0 && !is_spent(&self.calls) && !is_spent(&self.cost)
    }

    /// Records the report of a reply to a request that isn't counted here.
    pub(crate) fn record_report(&mut self, sent_at: Time, reported: Remaining, now: Time) {
        // What is over says nothing about a new window.
        self.calls.refresh(now);
        self.cost.refresh(now);
        let unknown = EndedTotals { calls: u64::MAX, cost: u64::MAX };
        self.learn(sent_at, reported, unknown);
    }

    /// Records the end of a request that was sent at `sent_at`, with the report of its reply. `ended_before` is what
    /// [`record_sent`](Self::record_sent) has returned for it.
    pub(crate) fn record_end(
        &mut self,
        cost: u64,
        (sent_at, ended_before): (Time, EndedTotals),
        answered: bool,
        reported: Remaining,
    ) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.calls.record_end(1, answered && reported.calls.is_some());
        self.cost.record_end(cost, answered && reported.cost.is_some());
        if answered {
            // After an operator's reset, the totals begin again.
            let overlapping = EndedTotals {
                calls: self.ended.calls.saturating_sub(ended_before.calls),
                cost: self.ended.cost.saturating_sub(ended_before.cost),
            };
            self.learn(sent_at, reported, overlapping);
        }
        self.ended.calls = self.ended.calls.saturating_add(1);
        self.ended.cost = self.ended.cost.saturating_add(cost);
    }

    fn learn(&mut self, sent_at: Time, reported: Remaining, overlapping: EndedTotals) {
        let is_older = self.has_reply && sent_at <= self.newest_sent_at;
        if let Some(reported) = reported.calls {
            self.calls.learn(reported, overlapping.calls, is_older);
        }
        if let Some(reported) = reported.cost {
            self.cost.learn(reported, overlapping.cost, is_older);
        }
        if !is_older {
            (self.has_reply, self.newest_sent_at) = (true, sent_at);
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
        known.record_end(1, (at(0), EndedTotals::default()), true, remaining(2, 60));
        for _ in 0..2 {
            assert_eq!(known.free_at(1, at(1)), at(1));
            known.record_sent(1);
        }
        assert_eq!(known.free_at(1, at(1)), at(1) + RECHECK_INTERVAL, "both may yet tell more");
        known.record_end(1, (at(1), EndedTotals::default()), true, remaining(1, 60));
        assert_eq!(known.free_at(1, at(1)), at(1) + RECHECK_INTERVAL, "the one that is left is under way");
        known.record_end(1, (at(1), EndedTotals::default()), true, remaining(0, 60));
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
        let sent = [0, 1, 2].map(|secs| (at(secs), known.record_sent(1)));
        let left = |known: &RemainingTracker| known.calls.remaining.map(|left| (left.amount, left.resets_at));
        known.record_end(1, sent[2], true, remaining(5, 60));
        assert_eq!(left(&known), Some((5, at(60))));
        known.record_end(1, sent[1], true, remaining(9, 50));
        assert_eq!(left(&known), Some((5, at(60))));
        known.record_end(1, sent[0], true, remaining(1, 60));
        assert_eq!(left(&known), Some((1, at(60))));
    }

    /// The second request is counted first, and its reply comes last. So the last reply doesn't include the first request.
    #[test]
    fn a_newer_request_that_was_counted_earlier_raises_no_allowance() {
        let mut known = RemainingTracker::default();
        let probe = (at(0), known.record_sent(1));
        known.record_end(1, probe, true, remaining(2, 60));
        let [first, second] = [1, 2].map(|secs| (at(secs), known.record_sent(1)));
        known.record_end(1, first, true, remaining(0, 60));
        known.record_end(1, second, true, remaining(1, 60));
        assert_eq!(known.free_at(1, at(3)), at(60));
        let third = (at(3), known.record_sent(1));
        known.record_end(1, third, true, remaining(1, 60));
        assert_eq!(known.free_at(1, at(4)), at(4), "it was sent after all others: something has come back");
    }

    #[test]
    fn a_request_without_a_report_is_subtracted() {
        let mut known = RemainingTracker::default();
        let probe = (at(0), known.record_sent(1));
        known.record_end(1, probe, true, remaining(1, 60));
        let lost = (at(1), known.record_sent(1));
        known.record_end(1, lost, false, Remaining::default());
        assert_eq!(known.free_at(1, at(2)), at(60));
    }

    #[test]
    fn costs_are_reserved_until_their_replies() {
        let cost = |left| Remaining {
            calls: None,
            cost: Some(RemainingAmount { amount: left, limit: Some(100), resets_at: at(60) }),
        };
        let mut known = RemainingTracker::default();
        known.record_sent(10);
        known.record_end(10, (at(0), EndedTotals::default()), true, cost(90));
        known.record_sent(60);
        assert_eq!(known.free_at(31, at(0)), at(0) + RECHECK_INTERVAL);
        assert_eq!(known.free_at(30, at(0)), at(0));
        known.record_end(60, (at(1), EndedTotals::default()), true, cost(85));
        assert_eq!(known.free_at(85, at(0)), at(0));
        assert_eq!(known.free_at(86, at(0)), at(60));
        assert_eq!(known.free_at(1_000, at(60)), at(60), "more than there ever is");
    }

    #[test]
    fn replies_without_allowances_delay_no_call() {
        let mut known = RemainingTracker::default();
        known.record_sent(1);
        known.record_end(1, (at(0), EndedTotals::default()), true, Remaining::default());
        for _ in 0..100 {
            assert_eq!(known.free_at(1, at(0)), at(0));
            known.record_sent(1);
        }
    }

    #[test]
    fn a_failed_first_call_is_repeated_alone() {
        let mut known = RemainingTracker::default();
        known.record_sent(1);
        known.record_end(1, (at(0), EndedTotals::default()), false, Remaining::default());
        assert_eq!(known.free_at(1, at(0)), at(0));
        known.record_sent(1);
        assert_eq!(known.free_at(1, at(0)), at(0) + RECHECK_INTERVAL, "the next goes alone");
    }
}
