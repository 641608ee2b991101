//! What is remembered of one key under one limit, and how it answers and changes.

use crate::batch::{BatchContext, OpContext, Outcome, Verdict};
use crate::concurrency::Permits;
use crate::cooldown::CooldownGate;
use crate::pacer::PacerState;
use crate::penalty::PenaltyRecord;
use crate::quota::QuotaUsage;
use crate::rate::ArrivalTime;
use crate::window::WindowLog;
use crate::{Limit, LimitKind, MAX_COST, Op, PenaltyMode, Span, Time, Verb};

/// What a call would meet in a limit, whatever penalties say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitStatus {
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
    Window(WindowLog),
    /// Of a rate.
    Rate(ArrivalTime),
    /// Of a quota.
    Quota(QuotaUsage),
    /// Of permits.
    Concurrency(Permits),
    /// A cool-down's gate.
    Cooldown(CooldownGate),
    /// What a pacer stands at.
    Pace(PacerState),
}

impl Usage {
    /// The number of the kind that it is a usage of ([`LimitKind::id`]); `None` if nothing is used.
    pub fn kind_id(&self) -> Option<u8> {
        match self {
            Self::None => None,
            Self::Window(_) => Some(1),
            Self::Rate(_) => Some(2),
            Self::Quota(_) => Some(3),
            Self::Concurrency(_) => Some(4),
            Self::Cooldown(_) => Some(5),
            Self::Pace(_) => Some(6),
        }
    }
}

/// All that is remembered of one key under one limit. The default is a key never seen.
#[derive(Clone, Debug, Default)]
pub struct KeyState {
    usage: Usage,
    penalty_record: PenaltyRecord,
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

impl KeyState {
    /// A state of these parts.
    pub fn new(usage: Usage, record: PenaltyRecord) -> Self {
        Self { usage, penalty_record: record }
    }

    /// What is used.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// The penalty's record.
    pub fn penalty_record(&self) -> &PenaltyRecord {
        &self.penalty_record
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
            (LimitKind::Window(window), Usage::Window(log)) => window.idle_at(log),
            (LimitKind::Cooldown(cooldown), Usage::Cooldown(gate)) => cooldown.idle_at(gate),
            (LimitKind::Pace(pacer), Usage::Pace(tempo)) => pacer.idle_at(tempo),
            (_, Usage::Rate(arrival)) => arrival.idle_at(),
            (_, Usage::Quota(ledger)) => ledger.idle_at(),
            (_, Usage::Concurrency(permits)) => permits.idle_at(),
            _ => Time::ZERO,
        };
        limit.penalty().map_or(usage, |penalty| usage.max(penalty.idle_at(&self.penalty_record)))
    }

    /// What a call of `cost` would meet in the limit itself. Forgets what no longer counts, which changes no answer.
    #[inline]
    fn status(&mut self, kind: &LimitKind, cost: u64, now: Time) -> LimitStatus {
        match kind {
            LimitKind::Window(window) => match &mut self.usage {
                Usage::Window(log) => {
                    let judged_at = window.refresh(log, now);
                    let look = window.status(log, cost, judged_at);
                    LimitStatus { retry_at: if look.retry_at == judged_at { now } else { look.retry_at }, ..look }
                }
                _ => window.status(&WindowLog::default(), cost, now),
            },
            LimitKind::Rate(rate) => {
                if let Usage::Rate(arrival) = &mut self.usage {
                    *arrival = rate.refresh(*arrival, now);
                }
                rate.status(self.arrival(), cost, now)
            }
            LimitKind::Quota(quota) => {
                let ledger = self.quota_usage();
                quota.refresh(ledger, now);
                quota.status(ledger, cost, now)
            }
            LimitKind::Concurrency(concurrency) => match &mut self.usage {
                Usage::Concurrency(permits) => {
                    concurrency.refresh(permits, now);
                    concurrency.status(permits, cost, now)
                }
                _ => concurrency.status(&Permits::default(), cost, now),
            },
            LimitKind::Cooldown(cooldown) => {
                let Usage::Cooldown(gate) = &mut self.usage else { return cooldown_status(now, now) };
                cooldown.refresh(gate, now);
                cooldown_status(cooldown.free_at(*gate, now), now)
            }
            LimitKind::Pace(pacer) => {
                let Usage::Pace(tempo) = &mut self.usage else { return pacer.status(&PacerState::default(), now) };
                pacer.refresh(tempo, now);
                pacer.status(tempo, now)
            }
        }
    }

    fn arrival(&self) -> ArrivalTime {
        if let Usage::Rate(arrival) = self.usage { arrival } else { ArrivalTime::default() }
    }

    usage!(quota_usage, Quota, QuotaUsage);
    usage!(window_log, Window, WindowLog);
    usage!(permits, Concurrency, Permits);
    usage!(cooldown_gate, Cooldown, CooldownGate);
    usage!(pacer_state, Pace, PacerState);

    /// What a call meets, its penalty included.
    pub fn evaluate(&mut self, &OpContext { op, limit, batch: terms, now }: &OpContext<'_>) -> Outcome {
        let cost = op.cost;
        let look = self.status(limit.kind(), cost, now);
        let mut outcome = Outcome::from_status(look, now);
        match &self.usage {
            Usage::Concurrency(permits) if permits.holds(terms.holder) => {
                outcome.verdict = Verdict::Admitted;
                outcome.retry_at = now;
            }
            Usage::Cooldown(gate) => outcome.generation = gate.generation,
            _ => {}
        }
        let Some(penalty) = limit.penalty() else { return outcome };
        penalty.refresh(&mut self.penalty_record, now);
        if self.penalty_record == PenaltyRecord::default() {
            return outcome;
        }
        outcome.strikes = penalty.strikes(&self.penalty_record, now);
        let may_use_parole = limit.kind().allows_parole() && cost <= self.penalty_record.parole;
        if self.penalty_record.is_blocked(now) {
            outcome.verdict = Verdict::Blocked;
            outcome.remaining = 0;
            outcome.block = penalty.block_length(self.penalty_record.strikes);
            outcome.block_until = self.penalty_record.blocked_until;
            outcome.retry_at = if may_use_parole {
                self.penalty_record.blocked_until
            } else {
                self.penalty_record.blocked_until.max(outcome.retry_at)
            };
            outcome.reset_at = outcome.reset_at.max(self.penalty_record.blocked_until);
        } else if outcome.verdict == Verdict::Refused && may_use_parole {
            outcome.verdict = Verdict::Parole;
            outcome.retry_at = now;
        }
        outcome
    }

    /// What [`KeyState::evaluate`] would answer. A peek must leave even what only a clock gone wrong would forget.
    pub fn peek(&self, ask: &OpContext<'_>) -> Outcome {
        self.clone().evaluate(ask)
    }

    /// Records a call that [`KeyState::evaluate`] has just admitted, and brings the outcome up to date.
    pub fn charge(&mut self, ask: &OpContext<'_>, outcome: &mut Outcome) {
        // Room for the paroled call itself means that the promise is kept without it.
        if outcome.verdict == Verdict::Parole || self.penalty_record.parole <= outcome.remaining {
            self.penalty_record.parole = 0;
        }
        self.record_use(ask, outcome);
    }

    fn record_use(&mut self, &OpContext { op, limit, batch: terms, now }: &OpContext<'_>, outcome: &mut Outcome) {
        let cost = op.cost;
        match limit.kind() {
            LimitKind::Window(window) => {
                let log = self.window_log();
                window.charge(log, cost, now + limit.lead(terms.lead));
                outcome.record_charge(cost);
                outcome.reset_at = window.idle_at(log).max(now);
            }
            LimitKind::Rate(rate) => {
                let arrival = rate.charge(self.arrival(), cost, now + limit.lead(terms.lead));
                self.usage = Usage::Rate(arrival);
                outcome.record_charge(cost);
                outcome.reset_at = arrival.idle_at();
            }
            LimitKind::Quota(quota) => {
                // A new key was judged in a state of its own.
                let ledger = self.quota_usage();
                quota.refresh(ledger, now);
                quota.charge(ledger, cost, now);
                outcome.record_charge(cost);
                outcome.reset_at = ledger.idle_at().max(now);
            }
            LimitKind::Concurrency(concurrency) => {
                let permits = self.permits();
                concurrency.charge(permits, terms.holder, cost, now);
                outcome.used = permits.used();
                outcome.remaining = concurrency.limit().saturating_sub(permits.used());
                outcome.reset_at = permits.idle_at().max(now);
            }
            LimitKind::Cooldown(cooldown) => outcome.generation = cooldown.charge(self.cooldown_gate(), now),
            LimitKind::Pace(_) => {}
        }
    }

    /// Takes a strike for a call that [`KeyState::evaluate`] has just refused, and brings the outcome up to date. A limit
    /// without penalty is left as it is, and so is one that could never admit the call, or whose key many networks share.
    pub fn strike(&mut self, &OpContext { op, limit, now, .. }: &OpContext<'_>, outcome: &mut Outcome) {
        let Some(penalty) = limit.penalty() else { return };
        if outcome.retry_at.is_never() || !op.share_level.allows_strikes() {
            return;
        }
        penalty.strike(&mut self.penalty_record, op.cost, now);
        let until = self.penalty_record.blocked_until;
        outcome.strikes = self.penalty_record.strikes;
        outcome.remaining = 0;
        outcome.block = penalty.block_length(self.penalty_record.strikes);
        outcome.block_until = until;
        outcome.retry_at = if limit.kind().allows_parole() && penalty.mode() == PenaltyMode::Parole {
            until
        } else {
            self.penalty_record.parole = 0;
            until.max(outcome.retry_at)
        };
        outcome.reset_at = outcome.reset_at.max(until);
    }

    /// Takes note of what an operation tells: that something is given back, has ended, cost more, was throttled. True
    /// unless it was about a permit that isn't held any more. What a pace comes to is told in the outcome.
    pub fn apply(&mut self, ask: &OpContext<'_>, outcome: &mut Outcome) -> bool {
        let &OpContext { op, limit, batch: terms, now } = ask;
        match (limit.kind(), op.verb) {
            (LimitKind::Concurrency(concurrency), Verb::Release | Verb::Renew) => {
                let Usage::Concurrency(permits) = &mut self.usage else { return false };
                concurrency.refresh(permits, now);
                if op.verb == Verb::Release {
                    return concurrency.release(permits, terms.holder);
                }
                return concurrency.renew(permits, terms.holder, now);
            }
            (_, Verb::Release | Verb::Renew) => return false,
            (_, Verb::Refund) => self.refund(ask),
            (_, Verb::RestorePenalty { strikes, parole }) => {
                if let Some(penalty) = limit.penalty() {
                    // The whole state is brought to `now`, as a store does that keeps it in one piece.
                    self.status(limit.kind(), 0, now);
                    // Nothing admits what the limit never will.
                    let parole =
                        if limit.kind().allows_parole() { limit.kind().capacity().min(parole.into()) } else { 0 };
                    penalty.restore(&mut self.penalty_record, strikes, parole, Span::from_micros(op.cost), now);
                }
            }
            (LimitKind::Concurrency(concurrency), Verb::Debit) => {
                let permits = self.permits();
                concurrency.refresh(permits, now);
                concurrency.debit(permits, terms.holder, op.cost, now);
            }
            (LimitKind::Cooldown(_), Verb::Debit) => {}
            (LimitKind::Pace(pacer), Verb::Debit) => pacer.raise_to(self.pacer_state(), op.cost, now),
            (LimitKind::Pace(pacer), Verb::Pace { failed, draw }) => {
                pacer.record_call(self.pacer_state(), failed, draw, now).write_to(outcome);
            }
            (_, Verb::Debit) => {
                let op = Op { cost: op.cost.min(MAX_COST), ..*op };
                let mut outcome = Outcome::from_status(self.status(limit.kind(), op.cost, now), now);
                if self.penalty_record.is_blocked(now) {
                    // Nobody could come back for the room there was: the promise stands.
                    outcome.remaining = 0;
                }
                self.charge(
                    &OpContext { op: &op, batch: BatchContext { lead: Span::ZERO, ..terms }, ..*ask },
                    &mut outcome,
                );
            }
            (LimitKind::Window(window), Verb::Settle) => {
                if let Usage::Window(log) = &mut self.usage {
                    window.refresh(log, now);
                    window.move_to_now(log, op.cost, terms.counted_at, now);
                }
            }
            (LimitKind::Cooldown(cooldown), Verb::Throttle { generation }) => {
                let retry_after = (op.cost > 0).then(|| Span::from_micros(op.cost));
                cooldown.record_throttle(self.cooldown_gate(), generation, retry_after, now);
            }
            (LimitKind::Cooldown(cooldown), Verb::Success { generation }) => {
                cooldown.record_success(self.cooldown_gate(), generation, now);
            }
            (LimitKind::Cooldown(cooldown), Verb::Disable) => {
                let until = if op.cost == 0 { Time::NEVER } else { now + Span::from_micros(op.cost) };
                cooldown.disable(self.cooldown_gate(), until, now);
            }
            _ => {}
        }
        true
    }

    /// Gives back what a call was charged, never beyond the capacity.
    fn refund(&mut self, &OpContext { op, limit, batch: terms, now }: &OpContext<'_>) {
        let cost = op.cost;
        match (limit.kind(), &mut self.usage) {
            (LimitKind::Window(window), Usage::Window(log)) => {
                window.refresh(log, now);
                window.refund(log, cost, terms.counted_at, now);
            }
            (LimitKind::Rate(rate), Usage::Rate(arrival)) => *arrival = rate.refund(*arrival, cost, now),
            (LimitKind::Quota(quota), Usage::Quota(ledger)) => {
                quota.refresh(ledger, now);
                quota.refund(ledger, cost, terms.charged_at, now);
            }
            _ => {}
        }
    }
}

/// A cool-down as a limit: of one, which is taken while it cools.
fn cooldown_status(free_at: Time, now: Time) -> LimitStatus {
    let used = u64::from(free_at > now);
    LimitStatus { limit: 1, used, remaining: 1 - used, retry_at: free_at, reset_at: free_at }
}
