//! What is remembered of one key under one limit, and how it answers and changes.

use crate::batch::{Ask, Outcome, Terms, Verdict};
use crate::concurrency::Permits;
use crate::cooldown::Gate;
use crate::pacer::Tempo;
use crate::penalty::Record;
use crate::quota::Ledger;
use crate::rate::Arrival;
use crate::window::Log;
use crate::{Kind, Limit, MAX_COST, Op, PenaltyMode, Span, Time, Verb};

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
    /// A cool-down's gate.
    Cooldown(Gate),
    /// What a pacer stands at.
    Pace(Tempo),
}

/// All that is remembered of one key under one limit. The default is a key never seen.
#[derive(Clone, Debug, Default)]
pub struct State {
    usage: Usage,
    record: Record,
}

/// An accessor to the usage as a limit's kind has it; one that is of no kind or another begins anew.
macro_rules! usage {
    ($name:ident, $kind:ident, $usage:ty) => {
        fn $name(&mut self) -> &mut $usage {
            if !matches!(self.usage, Usage::$kind(_)) {
                self.usage = Usage::$kind(Default::default());
            }
            match &mut self.usage {
                Usage::$kind(usage) => usage,
                _ => unreachable!("invariant: the usage was just made one of this kind"),
            }
        }
    };
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
            Usage::None | Usage::Rate(_) | Usage::Quota(_) | Usage::Cooldown(_) | Usage::Pace(_) => 0,
        }
    }

    /// From when on the state is as good as none.
    pub fn idle_at(&self, limit: &Limit) -> Time {
        let usage = match (limit.kind(), &self.usage) {
            (Kind::Window(window), Usage::Window(log)) => window.idle_at(log),
            (Kind::Cooldown(cooldown), Usage::Cooldown(gate)) => cooldown.idle_at(gate),
            (Kind::Pace(pacer), Usage::Pace(tempo)) => pacer.idle_at(tempo),
            (_, Usage::Rate(arrival)) => arrival.idle_at(),
            (_, Usage::Quota(ledger)) => ledger.idle_at(),
            (_, Usage::Concurrency(permits)) => permits.idle_at(),
            _ => Time::ZERO,
        };
        limit.penalty().map_or(usage, |penalty| usage.max(penalty.idle_at(&self.record)))
    }

    /// What a call of `cost` would meet in the limit itself. Forgets what no longer counts, which changes no answer.
    #[inline]
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
            Kind::Cooldown(cooldown) => {
                let Usage::Cooldown(gate) = &mut self.usage else { return cooling(now, now) };
                cooldown.settle(gate, now);
                cooling(cooldown.look(*gate, now), now)
            }
            Kind::Pace(pacer) => {
                let Usage::Pace(tempo) = &mut self.usage else { return pacer.look(&Tempo::default(), now) };
                pacer.settle(tempo, now);
                pacer.look(tempo, now)
            }
        }
    }

    fn arrival(&self) -> Arrival {
        if let Usage::Rate(arrival) = self.usage { arrival } else { Arrival::default() }
    }

    usage!(ledger, Quota, Ledger);
    usage!(log, Window, Log);
    usage!(permits, Concurrency, Permits);
    usage!(gate, Cooldown, Gate);
    usage!(tempo, Pace, Tempo);

    /// What a call meets, its penalty included.
    pub fn judge(&mut self, &Ask { op, limit, terms, now }: &Ask<'_>) -> Outcome {
        let cost = op.cost;
        let look = self.look(limit.kind(), cost, now);
        let mut outcome = Outcome::of(look, now);
        match &self.usage {
            Usage::Concurrency(permits) if permits.holds(terms.holder) => {
                outcome.verdict = Verdict::Admitted;
                outcome.retry_at = now;
            }
            Usage::Cooldown(gate) => outcome.generation = gate.generation,
            _ => {}
        }
        let Some(penalty) = limit.penalty() else { return outcome };
        penalty.settle(&mut self.record, now);
        if self.record == Record::default() {
            return outcome;
        }
        outcome.strikes = penalty.strikes(&self.record, now);
        let paroled = limit.kind().waives() && cost <= self.record.parole;
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
    pub fn peek(&self, ask: &Ask<'_>) -> Outcome {
        self.clone().judge(ask)
    }

    /// Records a call that [`State::judge`] has just admitted, and brings the outcome up to date.
    pub fn charge(&mut self, ask: &Ask<'_>, outcome: &mut Outcome) {
        // Room for the paroled call itself means that the promise is kept without it.
        if outcome.verdict == Verdict::Parole || self.record.parole <= outcome.remaining {
            self.record.parole = 0;
        }
        self.spend(ask, outcome);
    }

    fn spend(&mut self, &Ask { op, limit, terms, now }: &Ask<'_>, outcome: &mut Outcome) {
        let cost = op.cost;
        match limit.kind() {
            Kind::Window(window) => {
                let log = self.log();
                window.charge(log, cost, now + limit.lead(terms.lead));
                outcome.spend(cost);
                outcome.reset_at = window.idle_at(log).max(now);
            }
            Kind::Rate(rate) => {
                let arrival = rate.charge(self.arrival(), cost, now + limit.lead(terms.lead));
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
                concurrency.charge(permits, terms.holder, cost, now);
                outcome.used = permits.used();
                outcome.remaining = concurrency.limit().saturating_sub(permits.used());
                outcome.reset_at = permits.idle_at().max(now);
            }
            Kind::Cooldown(cooldown) => outcome.generation = cooldown.charge(self.gate(), now),
            Kind::Pace(_) => {}
        }
    }

    /// Takes a strike for a call that [`State::judge`] has just refused, and brings the outcome up to date. A limit
    /// without penalty is left as it is, and so is one that could never admit the call, or whose key many networks share.
    pub fn strike(&mut self, &Ask { op, limit, now, .. }: &Ask<'_>, outcome: &mut Outcome) {
        let Some(penalty) = limit.penalty() else { return };
        if outcome.retry_at.is_never() || !op.share.takes_strikes() {
            return;
        }
        penalty.strike(&mut self.record, op.cost, now);
        let until = self.record.until;
        outcome.strikes = self.record.strikes;
        outcome.remaining = 0;
        outcome.block = penalty.block(self.record.strikes);
        outcome.block_until = until;
        outcome.retry_at = if limit.kind().waives() && penalty.mode() == PenaltyMode::Parole {
            until
        } else {
            self.record.parole = 0;
            until.max(outcome.retry_at)
        };
        outcome.reset_at = outcome.reset_at.max(until);
    }

    /// Takes note of what an operation tells: that something is given back, has ended, cost more, was throttled. True
    /// unless it was about a permit that isn't held any more. What a pace comes to is told in the outcome.
    pub fn tell(&mut self, ask: &Ask<'_>, outcome: &mut Outcome) -> bool {
        let &Ask { op, limit, terms, now } = ask;
        match (limit.kind(), op.verb) {
            (Kind::Concurrency(concurrency), Verb::Release | Verb::Renew) => {
                let Usage::Concurrency(permits) = &mut self.usage else { return false };
                concurrency.settle(permits, now);
                if op.verb == Verb::Release {
                    return concurrency.release(permits, terms.holder);
                }
                return concurrency.renew(permits, terms.holder, now);
            }
            (_, Verb::Release | Verb::Renew) => return false,
            (_, Verb::Refund) => self.refund(ask),
            (_, Verb::Penalise { strikes, parole }) => {
                if let Some(penalty) = limit.penalty() {
                    // The whole state is brought to `now`, as a store does that keeps it in one piece.
                    self.look(limit.kind(), 0, now);
                    // Nothing admits what the limit never will.
                    let parole = if limit.kind().waives() { limit.kind().capacity().min(parole.into()) } else { 0 };
                    penalty.bring_back(&mut self.record, strikes, parole, Span::from_micros(op.cost), now);
                }
            }
            (Kind::Concurrency(concurrency), Verb::Debit) => {
                let permits = self.permits();
                concurrency.settle(permits, now);
                concurrency.debit(permits, terms.holder, op.cost, now);
            }
            (Kind::Cooldown(_), Verb::Debit) => {}
            (Kind::Pace(pacer), Verb::Debit) => pacer.at_least(self.tempo(), op.cost, now),
            (Kind::Pace(pacer), Verb::Pace { failed, draw }) => {
                pacer.told(self.tempo(), failed, draw, now).tell(outcome);
            }
            (_, Verb::Debit) => {
                let op = Op { cost: op.cost.min(MAX_COST), ..*op };
                let mut outcome = Outcome::of(self.look(limit.kind(), op.cost, now), now);
                if self.record.blocks(now) {
                    // Nobody could come back for the room there was: the promise stands.
                    outcome.remaining = 0;
                }
                self.charge(&Ask { op: &op, terms: Terms { lead: Span::ZERO, ..terms }, ..*ask }, &mut outcome);
            }
            (Kind::Window(window), Verb::Settle) => {
                if let Usage::Window(log) = &mut self.usage {
                    window.settle(log, now);
                    window.bring_forward(log, op.cost, terms.counted_at, now);
                }
            }
            (Kind::Cooldown(cooldown), Verb::Throttle { generation }) => {
                let retry_after = (op.cost > 0).then(|| Span::from_micros(op.cost));
                cooldown.throttled(self.gate(), generation, retry_after, now);
            }
            (Kind::Cooldown(cooldown), Verb::Succeed { generation }) => {
                cooldown.succeeded(self.gate(), generation, now);
            }
            (Kind::Cooldown(cooldown), Verb::Disable) => {
                let until = if op.cost == 0 { Time::NEVER } else { now + Span::from_micros(op.cost) };
                cooldown.disable(self.gate(), until, now);
            }
            _ => {}
        }
        true
    }

    /// Gives back what a call was charged, never beyond the capacity.
    fn refund(&mut self, &Ask { op, limit, terms, now }: &Ask<'_>) {
        let cost = op.cost;
        match (limit.kind(), &mut self.usage) {
            (Kind::Window(window), Usage::Window(log)) => {
                window.settle(log, now);
                window.refund(log, cost, terms.counted_at, now);
            }
            (Kind::Rate(rate), Usage::Rate(arrival)) => *arrival = rate.refund(*arrival, cost, now),
            (Kind::Quota(quota), Usage::Quota(ledger)) => {
                quota.settle(ledger, now);
                quota.refund(ledger, cost, terms.charged_at, now);
            }
            _ => {}
        }
    }
}

/// A cool-down as a limit: of one, which is taken while it cools.
fn cooling(free_at: Time, now: Time) -> Look {
    let used = u64::from(free_at > now);
    Look { limit: 1, used, remaining: 1 - used, retry_at: free_at, reset_at: free_at }
}
