//! The state of one key under one limit, with its decisions and changes.

use alloc::boxed::Box;

use crate::batch::{Admission, BatchContext, OpContext, Outcome};
use crate::caller_rate;
use crate::concurrency::Permits;
use crate::cooldown::CooldownGate;
use crate::pacer::PacerState;
use crate::penalty::PenaltyRecord;
use crate::quota::QuotaUsage;
use crate::rate::ArrivalTime;
use crate::reservation::ReservedUsage;
use crate::window::WindowLog;
use crate::{Limit, LimitKind, MAX_COST, Op, PenaltyMode, ShareLevel, Span, Time, Verb};

/// The status of a limit for a call, without penalties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitStatus {
    /// The limit's capacity.
    pub limit: u64,
    /// The used amount. More than the limit if a parole exceeded it.
    pub used: u64,
    /// The remaining amount.
    pub remaining: u64,
    /// The time at which the call has room: the time of the request if it has room now, [`Time::NEVER`] if never.
    pub retry_at: Time,
    /// The time at which the whole capacity is available again.
    pub reset_at: Time,
}

/// The usage of a limit.
#[derive(Clone, Debug, Default)]
pub enum Usage {
    /// No usage.
    #[default]
    None,
    /// The usage of a window.
    Window(WindowLog),
    /// The usage of a rate.
    Rate(ArrivalTime),
    /// The usage of a quota.
    Quota(QuotaUsage),
    /// The permits in use.
    Concurrency(Permits),
    /// The gate of a cool-down.
    Cooldown(CooldownGate),
    /// The state of a pacer.
    Pace(PacerState),
    /// The usage of a limit with reservations.
    Reserved(Box<ReservedUsage>),
}

impl Usage {
    /// The number of the limit kind that this usage belongs to ([`LimitKind::id`]). `None` if there is no usage.
    pub fn kind_id(&self) -> Option<u8> {
        match self {
            Self::None => None,
            Self::Window(_) => Some(1),
            Self::Rate(_) => Some(2),
            Self::Quota(_) => Some(3),
            Self::Concurrency(_) => Some(4),
            Self::Cooldown(_) => Some(5),
            Self::Pace(_) => Some(6),
            Self::Reserved(reserved) => reserved.usage.kind_id(),
        }
    }
}

/// The whole state of one key under one limit. The default is a key never seen.
#[derive(Clone, Debug, Default)]
pub struct KeyState {
    usage: Usage,
    penalty_record: PenaltyRecord,
}

/// An accessor to the usage of one kind. A usage of another kind is replaced by an empty one.
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
    /// Creates a state of these parts.
    pub fn new(usage: Usage, record: PenaltyRecord) -> Self {
        Self { usage, penalty_record: record }
    }

    /// The usage.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// The penalty's record.
    pub fn penalty_record(&self) -> &PenaltyRecord {
        &self.penalty_record
    }

    /// The number of bytes of heap memory.
    pub fn heap_bytes(&self) -> usize {
        match &self.usage {
            Usage::Window(log) => log.heap_bytes(),
            Usage::Concurrency(permits) => permits.heap_bytes(),
            Usage::None | Usage::Rate(_) | Usage::Quota(_) | Usage::Cooldown(_) | Usage::Pace(_) => 0,
            Usage::Reserved(reserved) => {
                let log = if let Usage::Window(log) = &reserved.usage { log.heap_bytes() } else { 0 };
                size_of::<ReservedUsage>() + log + reserved.queue.heap_bytes()
            }
        }
    }

    /// The time from which the state equals an empty one.
    pub fn idle_at(&self, limit: &Limit) -> Time {
        let usage = match (limit.reservations(), &self.usage) {
            (Some(rules), Usage::Reserved(reserved)) => {
                reserved.idle_at(rules, limit.kind(), Self::usage_idle_at(limit, &reserved.usage))
            }
            (None, Usage::Reserved(reserved)) => Self::usage_idle_at(limit, &reserved.usage),
            (_, usage) => Self::usage_idle_at(limit, usage),
        };
        limit.penalty().map_or(usage, |penalty| usage.max(penalty.idle_at(&self.penalty_record)))
    }

    fn usage_idle_at(limit: &Limit, usage: &Usage) -> Time {
        match (limit.kind(), usage) {
            (LimitKind::Window(window), Usage::Window(log)) => window.idle_at(log),
            (LimitKind::Cooldown(cooldown), Usage::Cooldown(gate)) => cooldown.idle_at(gate),
            (LimitKind::Pace(pacer), Usage::Pace(pacer_state)) => pacer.idle_at(pacer_state),
            (_, Usage::Rate(arrival)) => arrival.idle_at(),
            (_, Usage::Quota(usage)) => usage.idle_at(),
            (_, Usage::Concurrency(permits)) => permits.idle_at(),
            _ => Time::ZERO,
        }
    }

    /// The status of the limit itself for a call of `cost`. Removes expired entries, which changes no answer.
    #[inline]
    fn status(&mut self, kind: &LimitKind, cost: u64, now: Time) -> LimitStatus {
        match kind {
            LimitKind::Window(window) => match &mut self.usage {
                Usage::Window(log) => {
                    let judged_at = window.refresh(log, now);
                    let status = window.status(log, cost, judged_at);
                    LimitStatus { retry_at: if status.retry_at == judged_at { now } else { status.retry_at }, ..status }
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
                let usage = self.quota_usage();
                quota.refresh(usage, now);
                quota.status(usage, cost, now)
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
                let Usage::Pace(pacer_state) = &mut self.usage else {
                    return pacer.status(&PacerState::default(), now);
                };
                pacer.refresh(pacer_state, now);
                pacer.status(pacer_state, now)
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

    /// The usage of a limit with reservations. A plain one is kept.
    fn reserved(&mut self) -> &mut ReservedUsage {
        if !matches!(self.usage, Usage::Reserved(_)) {
            let usage = core::mem::take(&mut self.usage);
            self.usage = Usage::Reserved(Box::new(ReservedUsage { usage, ..ReservedUsage::default() }));
        }
        match &mut self.usage {
            Usage::Reserved(reserved) => reserved,
            _ => unreachable!("invariant: the usage was just made one with reservations"),
        }
    }

    /// Keeps the usage alone, for a limit that gives no reservations any more.
    fn forget_reservations(&mut self) {
        if let Usage::Reserved(reserved) = &mut self.usage {
            self.usage = core::mem::take(&mut reserved.usage);
        }
    }

    /// Evaluates a call under a limit that gives reservations, or has given some by earlier rules.
    #[cold]
    fn evaluate_reserved(&mut self, context: &OpContext<'_>) -> Outcome {
        let Some(rules) = context.limit.reservations() else {
            self.forget_reservations();
            return self.evaluate(context);
        };
        self.reserved().evaluate(rules, context)
    }

    /// Evaluates a call of a key never seen, like [`KeyState::evaluate`] of a default state.
    #[inline]
    pub fn evaluate_unseen(context: &OpContext<'_>) -> Outcome {
        let &OpContext { op, limit, now, .. } = context;
        match limit.kind() {
            LimitKind::Rate(rate) => Outcome::from_status(rate.status(ArrivalTime::default(), op.cost, now), now),
            LimitKind::Cooldown(_) => Outcome::from_status(cooldown_status(now, now), now),
            _ => Self::default().evaluate(context),
        }
    }

    /// Evaluates a call, including the penalty.
    pub fn evaluate(&mut self, context: &OpContext<'_>) -> Outcome {
        let &OpContext { op, limit, batch, now } = context;
        let cost = op.cost;
        if limit.reservations().is_some() || matches!(self.usage, Usage::Reserved(_)) {
            return self.evaluate_reserved(context);
        }
        let status = self.status(limit.kind(), cost, now);
        let mut outcome = Outcome::from_status(status, now);
        match &self.usage {
            Usage::Concurrency(permits) if permits.holds(batch.holder) => {
                outcome.admission = Admission::Admitted;
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
            outcome.admission = Admission::Blocked;
            outcome.remaining = 0;
            outcome.block = penalty.block_length(self.penalty_record.strikes);
            outcome.block_until = self.penalty_record.blocked_until;
            outcome.retry_at = if may_use_parole {
                self.penalty_record.blocked_until
            } else {
                self.penalty_record.blocked_until.max(outcome.retry_at)
            };
            outcome.reset_at = outcome.reset_at.max(self.penalty_record.blocked_until);
        } else if outcome.admission == Admission::Refused && may_use_parole {
            outcome.admission = Admission::Parole;
            outcome.retry_at = now;
        }
        outcome
    }

    /// The result that [`KeyState::evaluate`] would give. The state doesn't change, not even as by a step of the clock.
    pub fn peek(&self, context: &OpContext<'_>) -> Outcome {
        self.clone().evaluate(context)
    }

    /// Charges a call that [`KeyState::evaluate`] has just admitted, and updates the outcome.
    pub fn charge(&mut self, context: &OpContext<'_>, outcome: &mut Outcome) {
        if let Some(rules) = context.limit.reservations() {
            return self.reserved().charge(rules, context, outcome);
        }
        // If the limit has room for the parole's call, the announced wait stays true without the parole.
        if outcome.admission == Admission::Parole || self.penalty_record.parole <= outcome.remaining {
            self.penalty_record.parole = 0;
        }
        self.record_use(context, outcome);
    }

    fn record_use(&mut self, &OpContext { op, limit, batch, now }: &OpContext<'_>, outcome: &mut Outcome) {
        let cost = op.cost;
        match limit.kind() {
            LimitKind::Window(window) => {
                let log = self.window_log();
                window.charge(log, cost, now + limit.lead(batch.lead));
                outcome.record_charge(cost);
                outcome.reset_at = window.idle_at(log).max(now);
            }
            LimitKind::Rate(rate) => {
                let arrival = rate.charge(self.arrival(), cost, now + limit.lead(batch.lead));
                self.usage = Usage::Rate(arrival);
                outcome.record_charge(cost);
                outcome.reset_at = arrival.idle_at();
            }
            LimitKind::Quota(quota) => {
                // A new key was evaluated in a temporary state, so this one isn't refreshed yet.
                let usage = self.quota_usage();
                quota.refresh(usage, now);
                quota.charge(usage, cost, now);
                outcome.record_charge(cost);
                outcome.reset_at = usage.idle_at().max(now);
            }
            LimitKind::Concurrency(concurrency) => {
                let permits = self.permits();
                concurrency.charge(permits, batch.holder, cost, now);
                outcome.used = permits.used();
                outcome.remaining = concurrency.limit().saturating_sub(permits.used());
                outcome.reset_at = permits.idle_at().max(now);
            }
            LimitKind::Cooldown(cooldown) => outcome.generation = cooldown.charge(self.cooldown_gate(), now),
            LimitKind::Pace(_) => {}
        }
    }

    /// Adds a strike for a call that [`KeyState::evaluate`] has just refused, or gives its caller a reservation, and
    /// updates the outcome. Nothing changes without a penalty or reservations, if the limit could never admit the call, or
    /// if many networks share the key. Returns true if it changed.
    pub fn strike(&mut self, context: &OpContext<'_>, outcome: &mut Outcome) -> bool {
        let &OpContext { op, limit, now, .. } = context;
        if let Some(rules) = limit.reservations().filter(|_| op.share_level == ShareLevel::Own) {
            return self.reserved().reserve(rules, context, outcome);
        }
        let Some(penalty) = limit.penalty() else { return false };
        if outcome.retry_at.is_never() || !op.share_level.allows_strikes() {
            return false;
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
        true
    }

    /// Applies the report of an operation, for example a refund, an end, a higher cost or a throttle. Returns false if
    /// it concerns a permit that isn't held. The result of a pace is written to the outcome.
    pub fn apply(&mut self, context: &OpContext<'_>, outcome: &mut Outcome) -> bool {
        let &OpContext { op, limit, batch, now } = context;
        if limit.reservations().is_some() {
            if let (LimitKind::Window(window), Verb::Refund) = (limit.kind(), op.verb) {
                // A call by a reservation isn't in the log, and another one must not be forgotten for it.
                let log = self.reserved().log();
                window.refresh(log, now);
                window.refund_exactly(log, op.cost, batch.counted_at, now);
                return true;
            }
            // A report concerns the calls alone: reservations stay.
            let plain = limit.without_reservations();
            let mut calls = Self::new(core::mem::take(&mut self.reserved().usage), PenaltyRecord::default());
            let applied = calls.apply(&OpContext { limit: &plain, ..*context }, outcome);
            self.reserved().usage = calls.usage;
            return applied;
        }
        self.forget_reservations();
        match (limit.kind(), op.verb) {
            (LimitKind::Concurrency(concurrency), Verb::Release | Verb::Renew) => {
                let Usage::Concurrency(permits) = &mut self.usage else { return false };
                concurrency.refresh(permits, now);
                if op.verb == Verb::Release {
                    return concurrency.release(permits, batch.holder);
                }
                return concurrency.renew(permits, batch.holder, now);
            }
            (_, Verb::Release | Verb::Renew) => return false,
            (_, Verb::Refund) => self.refund(context),
            (_, Verb::RestorePenalty { strikes, parole }) => {
                if let Some(penalty) = limit.penalty() {
                    // The whole state is updated to `now`, as in a store that keeps it as one value.
                    self.status(limit.kind(), 0, now);
                    // A parole must not admit a call that the limit can never admit.
                    let parole =
                        if limit.kind().allows_parole() { limit.kind().capacity().min(parole.into()) } else { 0 };
                    penalty.restore(&mut self.penalty_record, strikes, parole, Span::from_micros(op.cost), now);
                }
            }
            (LimitKind::Rate(_), Verb::TakeByTerms { gives_back, tolerance }) => {
                let (before, after) = caller_rate::take(self.arrival(), (gives_back, op.cost, tolerance.get()), now);
                self.usage = Usage::Rate(after.unwrap_or(self.arrival()));
                outcome.used = before;
                return after.is_some();
            }
            (LimitKind::Concurrency(concurrency), Verb::Debit) => {
                let permits = self.permits();
                concurrency.refresh(permits, now);
                concurrency.debit(permits, batch.holder, op.cost, now);
            }
            (LimitKind::Cooldown(cooldown), Verb::Debit) => {
                cooldown.close(self.cooldown_gate(), Span::from_micros(op.cost), now);
            }
            (LimitKind::Pace(pacer), Verb::Debit) => pacer.raise_to(self.pacer_state(), op.cost, now),
            (LimitKind::Pace(pacer), Verb::Pace { failed, draw }) => {
                pacer.record_call(self.pacer_state(), failed, draw, now).write_to(outcome);
            }
            (_, Verb::Debit) => {
                let op = Op { cost: op.cost.min(MAX_COST), ..*op };
                let mut outcome = Outcome::from_status(self.status(limit.kind(), op.cost, now), now);
                if self.penalty_record.is_blocked(now) {
                    // During a block, no call can use the room. Therefore the parole must remain.
                    outcome.remaining = 0;
                }
                self.charge(
                    &OpContext { op: &op, batch: BatchContext { lead: Span::ZERO, ..batch }, ..*context },
                    &mut outcome,
                );
            }
            (LimitKind::Window(window), Verb::Settle) => {
                if let Usage::Window(log) = &mut self.usage {
                    window.refresh(log, now);
                    window.move_to_now(log, op.cost, batch.counted_at, now);
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

    /// Refunds the charge of a call, at most up to the capacity.
    fn refund(&mut self, &OpContext { op, limit, batch, now }: &OpContext<'_>) {
        let cost = op.cost;
        match (limit.kind(), &mut self.usage) {
            (LimitKind::Window(window), Usage::Window(log)) => {
                window.refresh(log, now);
                window.refund(log, cost, batch.counted_at, now);
            }
            (LimitKind::Rate(rate), Usage::Rate(arrival)) => *arrival = rate.refund(*arrival, cost, now),
            (LimitKind::Quota(quota), Usage::Quota(usage)) => {
                quota.refresh(usage, now);
                quota.refund(usage, cost, batch.charged_at, now);
            }
            _ => {}
        }
    }
}

/// A limit of 1, which is used while the gate is closed.
#[inline]
fn cooldown_status(free_at: Time, now: Time) -> LimitStatus {
    let used = u64::from(free_at > now);
    LimitStatus { limit: 1, used, remaining: 1 - used, retry_at: free_at, reset_at: free_at }
}
