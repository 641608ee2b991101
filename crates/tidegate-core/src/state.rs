//! What is remembered of one key under one limit, and how it answers and changes.

use crate::batch::{Outcome, Verdict};
use crate::concurrency::Permits;
use crate::penalty::Record;
use crate::quota::Ledger;
use crate::rate::Arrival;
use crate::window::Log;
use crate::{Kind, Limit, PenaltyMode, Time};

/// What a call would meet in a limit, whatever penalties say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// The limit's capacity.
    pub limit: u64,
    /// What is used of it; more than the limit where a parole overdrew it.
    pub used: u64,
    /// What is left of it.
    pub remaining: u64,
    /// When the call would have room: the moment of the look if it has, [`Time::NEVER`] if it never will.
    pub retry_at: Time,
    /// When the capacity is whole again.
    pub reset_at: Time,
}

/// What is used of a limit.
#[derive(Clone, Debug, Default)]
pub enum Usage {
    /// Nothing.
    #[default]
    None,
    /// Of a window.
    Window(Log),
    /// Of a rate.
    Rate(Arrival),
    /// Of a quota.
    Quota(Ledger),
    /// Of permits.
    Concurrency(Permits),
}

/// All that is remembered of one key under one limit. The default is a key never seen.
#[derive(Clone, Debug, Default)]
pub struct State {
    usage: Usage,
    record: Record,
}

impl State {
    /// A state of these parts.
    pub fn new(usage: Usage, record: Record) -> Self {
        Self { usage, record }
    }

    /// What is used.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// The penalty's record.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Bytes held outside the state itself.
    pub fn heap_bytes(&self) -> usize {
        match &self.usage {
            Usage::Window(log) => log.heap_bytes(),
            Usage::Concurrency(permits) => permits.heap_bytes(),
            Usage::None | Usage::Rate(_) | Usage::Quota(_) => 0,
        }
    }

    /// From when on the state is as good as none.
    pub fn idle_at(&self, limit: &Limit) -> Time {
        let usage = match (limit.kind(), &self.usage) {
            (Kind::Window(window), Usage::Window(log)) => window.idle_at(log),
            (_, Usage::Rate(arrival)) => arrival.idle_at(),
            (_, Usage::Quota(ledger)) => ledger.idle_at(),
            (_, Usage::Concurrency(permits)) => permits.idle_at(),
            _ => Time::ZERO,
        };
        limit.penalty().map_or(usage, |penalty| usage.max(penalty.idle_at(&self.record)))
    }

    /// What a call of `cost` would meet in the limit itself. Forgets what no longer counts, which changes no answer.
    fn look(&mut self, kind: &Kind, cost: u64, now: Time) -> Look {
        match kind {
            Kind::Window(window) => match &mut self.usage {
                Usage::Window(log) => {
                    let judged_at = window.settle(log, now);
                    let look = window.look(log, cost, judged_at);
                    Look { retry_at: if look.retry_at == judged_at { now } else { look.retry_at }, ..look }
                }
                _ => window.look(&Log::default(), cost, now),
            },
            Kind::Rate(rate) => {
                if let Usage::Rate(arrival) = &mut self.usage {
                    *arrival = rate.settle(*arrival, now);
                }
                rate.look(self.arrival(), cost, now)
            }
            Kind::Quota(quota) => {
                let ledger = self.ledger();
                quota.settle(ledger, now);
                quota.look(ledger, cost, now)
            }
            Kind::Concurrency(concurrency) => match &mut self.usage {
                Usage::Concurrency(permits) => {
                    concurrency.settle(permits, now);
                    concurrency.look(permits, cost, now)
                }
                _ => concurrency.look(&Permits::default(), cost, now),
            },
        }
    }

    fn arrival(&self) -> Arrival {
        if let Usage::Rate(arrival) = self.usage { arrival } else { Arrival::default() }
    }

    fn ledger(&mut self) -> &mut Ledger {
        if !matches!(self.usage, Usage::Quota(_)) {
            self.usage = Usage::Quota(Ledger::default());
        }
        match &mut self.usage {
            Usage::Quota(ledger) => ledger,
            _ => unreachable!("invariant: the usage was just made a ledger"),
        }
    }

    fn log(&mut self) -> &mut Log {
        if !matches!(self.usage, Usage::Window(_)) {
            self.usage = Usage::Window(Log::default());
        }
        match &mut self.usage {
            Usage::Window(log) => log,
            _ => unreachable!("invariant: the usage was just made a log"),
        }
    }

    fn permits(&mut self) -> &mut Permits {
        if !matches!(self.usage, Usage::Concurrency(_)) {
            self.usage = Usage::Concurrency(Permits::default());
        }
        match &mut self.usage {
            Usage::Concurrency(permits) => permits,
            _ => unreachable!("invariant: the usage was just made a list of permits"),
        }
    }

    /// What a call of `cost` meets at `now`, its penalty included. `holder` is who would hold a permit.
    pub fn judge(&mut self, limit: &Limit, cost: u64, holder: u64, now: Time) -> Outcome {
        let look = self.look(limit.kind(), cost, now);
        let mut outcome = Outcome::of(look, now);
        if let Usage::Concurrency(permits) = &self.usage
            && permits.holds(holder)
        {
            outcome.verdict = Verdict::Admitted;
            outcome.retry_at = now;
        }
        let Some(penalty) = limit.penalty() else { return outcome };
        penalty.settle(&mut self.record, now);
        if self.record == Record::default() {
            return outcome;
        }
        outcome.strikes = penalty.strikes(&self.record, now);
        let paroled = waives(limit.kind()) && cost <= self.record.parole;
        if self.record.blocks(now) {
            outcome.verdict = Verdict::Blocked;
            outcome.remaining = 0;
            outcome.block = penalty.block(self.record.strikes);
            outcome.block_until = self.record.until;
            outcome.retry_at = if paroled { self.record.until } else { self.record.until.max(outcome.retry_at) };
            outcome.reset_at = outcome.reset_at.max(self.record.until);
        } else if outcome.verdict == Verdict::Refused && paroled {
            outcome.verdict = Verdict::Parole;
            outcome.retry_at = now;
        }
        outcome
    }

    /// What [`State::judge`] would answer. A peek must leave even what only a clock gone wrong would forget.
    pub fn peek(&self, limit: &Limit, cost: u64, holder: u64, now: Time) -> Outcome {
        self.clone().judge(limit, cost, holder, now)
    }

    /// Records a call of `cost` that [`State::judge`] has just admitted at `now`, and brings the outcome up to date.
    pub fn charge(&mut self, limit: &Limit, cost: u64, holder: u64, now: Time, outcome: &mut Outcome) {
        if self.record.parole > 0 {
            // Room for the paroled call itself means that the promise is kept without it.
            let parole_over = outcome.verdict == Verdict::Parole || self.record.parole <= outcome.remaining;
            if parole_over {
                self.record.parole = 0;
            }
        }
        match limit.kind() {
            Kind::Window(window) => {
                let log = self.log();
                window.charge(log, cost, now);
                outcome.spend(cost);
                outcome.reset_at = window.idle_at(log).max(now);
            }
            Kind::Rate(rate) => {
                let arrival = rate.charge(self.arrival(), cost, now);
                self.usage = Usage::Rate(arrival);
                outcome.spend(cost);
                outcome.reset_at = arrival.idle_at();
            }
            Kind::Quota(quota) => {
                // A new key was judged in a state of its own.
                let ledger = self.ledger();
                quota.settle(ledger, now);
                quota.charge(ledger, cost, now);
                outcome.spend(cost);
                outcome.reset_at = ledger.idle_at().max(now);
            }
            Kind::Concurrency(concurrency) => {
                let permits = self.permits();
                concurrency.charge(permits, holder, cost, now);
                outcome.used = permits.used();
                outcome.remaining = concurrency.limit().saturating_sub(permits.used());
                outcome.reset_at = permits.idle_at().max(now);
            }
        }
    }

    /// Takes a strike for a call that [`State::judge`] has just refused at `now`, and brings the outcome up to date.
    /// A limit without penalty is left as it is, and so is one that could never admit the call.
    pub fn strike(&mut self, limit: &Limit, cost: u64, now: Time, outcome: &mut Outcome) {
        let Some(penalty) = limit.penalty() else { return };
        if outcome.retry_at.is_never() {
            return;
        }
        penalty.strike(&mut self.record, cost, now);
        let until = self.record.until;
        outcome.strikes = self.record.strikes;
        outcome.remaining = 0;
        outcome.block = penalty.block(self.record.strikes);
        outcome.block_until = until;
        outcome.retry_at = if waives(limit.kind()) && penalty.mode() == PenaltyMode::Parole {
            until
        } else {
            self.record.parole = 0;
            until.max(outcome.retry_at)
        };
        outcome.reset_at = outcome.reset_at.max(until);
    }

    /// Gives back what a call of `cost` was charged, never beyond the capacity.
    pub fn refund(&mut self, limit: &Limit, cost: u64, now: Time) {
        match (limit.kind(), &mut self.usage) {
            (Kind::Window(window), Usage::Window(log)) => {
                window.settle(log, now);
                window.refund(log, cost);
            }
            (Kind::Rate(rate), Usage::Rate(arrival)) => *arrival = rate.refund(*arrival, cost, now),
            (Kind::Quota(quota), Usage::Quota(ledger)) => {
                quota.settle(ledger, now);
                quota.refund(ledger, cost, now);
            }
            _ => {}
        }
    }

    /// Takes back what `holder` holds at `now`; false if that is nothing any more.
    pub fn release(&mut self, limit: &Limit, holder: u64, now: Time) -> bool {
        match (limit.kind(), &mut self.usage) {
            (Kind::Concurrency(concurrency), Usage::Concurrency(permits)) => {
                concurrency.settle(permits, now);
                concurrency.release(permits, holder)
            }
            _ => false,
        }
    }

    /// Lengthens the holder's lease; false if it holds nothing any more.
    pub fn renew(&mut self, limit: &Limit, holder: u64, now: Time) -> bool {
        match (limit.kind(), &mut self.usage) {
            (Kind::Concurrency(concurrency), Usage::Concurrency(permits)) => {
                concurrency.settle(permits, now);
                concurrency.renew(permits, holder, now)
            }
            _ => false,
        }
    }
}

/// Whether a parole can waive a limit of this kind. A quota is somebody else's count and a permit is a thing that
/// isn't there, so neither can be overdrawn.
fn waives(kind: &Kind) -> bool {
    matches!(kind, Kind::Window(_) | Kind::Rate(_))
}
