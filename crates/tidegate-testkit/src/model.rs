//! A model of the semantics, in the slow and obvious way.
//!
//! Per limit and key the model keeps all past events and computes every outcome from them. A window counts the events
//! of the last W, a rate replays every arrival, a quota adds up a period. The model shares no arithmetic with the core.
//! A window counts a call that is taken ahead from its future moment until its end is settled. A cool-down follows its
//! list of closings, releases and proofs. A pace follows every call that was reported to it. [`Model::check`] takes a
//! store's outcomes and returns an error for those that contradict the model.
//!
//! The model gives a range if the semantics give a store some freedom. A window with more entries than it keeps exactly
//! may free a slot up to [`tidegate_core::Window::max_lateness`] late, and never early. The model then continues from
//! the store's choice.
//!
//! The model expects a clock that never goes back. It expects no debit of a window with both merged entries and a
//! penalty: only the store knows if such a window had room for a parole.

mod cooldown;
mod history;
mod pace;
mod penalty;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tidegate_core::batch::BatchContext;
use tidegate_core::{
    Admission, Batch, CountMode, Key, Limit, LimitId, LimitKind, Limits, MAX_COST, Op, Outcome, Outcomes, PenaltyMode,
    Span, Time, Verb,
};

use cooldown::CooldownHistory;
use history::{History, HistoryEvent};
use pace::PaceHistory;
use penalty::PenaltyHistory;

/// All past events, per limit and key.
#[derive(Clone, Debug)]
pub struct Model {
    limits: Arc<Limits>,
    key_models: BTreeMap<(LimitId, Key), KeyModel>,
}

/// The error of a store's outcome that contradicts the model.
#[derive(Clone, Debug)]
pub struct MismatchError {
    message: String,
}

impl fmt::Display for MismatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for MismatchError {}

/// The history of one key under one limit.
#[derive(Clone, Debug, Default)]
struct KeyModel {
    history: History,
    cooldown: CooldownHistory,
    pace: PaceHistory,
    penalties: PenaltyHistory,
}

/// The expected outcome of one operation, without regard to the others of its batch.
#[derive(Clone, Debug)]
struct ExpectedOutcome {
    earliest: ModelStatus,
    latest: ModelStatus,
    strikes: u8,
    block: Option<(Span, Time)>,
    has_parole: bool,
    generation: u32,
}

/// The status for a call, if every counted event counts for a given time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ModelStatus {
    fits: bool,
    used: u64,
    remaining: u64,
    retry_at: Time,
    reset_at: Time,
}

impl ModelStatus {
    /// Returns the least and the most that two histories leave used. A history that counts calls longer may leave less:
    /// a refund of a call that another has forgotten leaves one that is counted ahead whole, so that it can be settled.
    fn sorted(self, other: Self) -> (Self, Self) {
        let least = Self {
            fits: self.fits || other.fits,
            used: self.used.min(other.used),
            remaining: self.remaining.max(other.remaining),
            retry_at: self.retry_at.min(other.retry_at),
            reset_at: self.reset_at.min(other.reset_at),
        };
        let most = Self {
            fits: self.fits && other.fits,
            used: self.used.max(other.used),
            remaining: self.remaining.min(other.remaining),
            retry_at: self.retry_at.max(other.retry_at),
            reset_at: self.reset_at.max(other.reset_at),
        };
        (least, most)
    }
}

impl ExpectedOutcome {
    fn allows(&self, admission: Admission) -> bool {
        let full = if self.has_parole { Admission::Parole } else { Admission::Refused };
        match self.block {
            Some(_) => admission == Admission::Blocked,
            None => admission == Admission::Admitted && self.earliest.fits || admission == full && !self.latest.fits,
        }
    }
}

/// The least and the largest values that a store may return.
#[derive(Clone, Copy, Debug)]
struct OutcomeBounds {
    used: (u64, u64),
    remaining: (u64, u64),
    retry_at: (Time, Time),
    reset_at: (Time, Time),
    block: (Span, Time),
    strikes: u8,
    generation: u32,
}

impl OutcomeBounds {
    fn check(&self, limit: &Limit, found: &Outcome) -> Result<(), String> {
        fn within<T: PartialOrd + fmt::Debug>(name: &str, found: T, (low, high): (T, T)) -> Result<(), String> {
            if found < low || found > high {
                return Err(format!("{name} is {found:?}, expected {low:?} to {high:?}"));
            }
            Ok(())
        }
        let capacity = match limit.kind() {
            // A cool-down counts no costs: it is free or taken.
            LimitKind::Cooldown(_) => 1,
            LimitKind::Pace(pacer) => pace::max_interval_nanos(pacer),
            kind => kind.capacity(),
        };
        within("limit", found.limit, (capacity, capacity))?;
        // An overdrawn limit may count the cost that overdrew it as one, because it is full either way.
        let most = if self.used.1 >= capacity { u64::MAX } else { self.used.1 };
        within("used", found.used, (self.used.0, most))?;
        within("remaining", found.remaining, self.remaining)?;
        within("retry_at", found.retry_at, self.retry_at)?;
        within("reset_at", found.reset_at, self.reset_at)?;
        within("block", found.block, (self.block.0, self.block.0))?;
        within("block_until", found.block_until, (self.block.1, self.block.1))?;
        within("strikes", found.strikes, (self.strikes, self.strikes))?;
        within("generation", found.generation, (self.generation, self.generation))
    }
}

impl Model {
    /// Creates a model without events.
    pub fn new(limits: Arc<Limits>) -> Self {
        Self { limits, key_models: BTreeMap::new() }
    }

    /// Returns the number of admitted calls of `cost` 1 under a limit's key in the trailing `span` before `now`. It
    /// includes paroles and ignores refunds.
    pub fn admitted(&self, limit: LimitId, key: Key, span: Span, now: Time) -> u64 {
        self.key_models.get(&(limit, key)).map_or(0, |cell| cell.history.taken_within(span, now))
    }

    /// Compares a store's outcomes with those that the history allows, and continues from them.
    ///
    /// A batch must not name the same limit and key twice, and the store's time must not go back.
    ///
    /// # Errors
    /// [`MismatchError`] if an outcome isn't allowed. The model is unusable then.
    pub fn check(&mut self, batch: &Batch, outcomes: &Outcomes) -> Result<(), MismatchError> {
        let now = outcomes.now();
        if batch.ops().len() != outcomes.list().len() {
            let what = format!("{} answers to {} operations", outcomes.list().len(), batch.ops().len());
            return Err(MismatchError { message: what });
        }
        let limits = Arc::clone(&self.limits);
        let mut judged = Vec::new();
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()) {
            judged.push(self.expected_outcome(&limits, batch, op, outcome, now)?);
        }
        let refused = |counts: &dyn Fn(&Limit) -> bool, which: &dyn Fn(Admission) -> bool| {
            batch.ops().iter().zip(outcomes.list()).any(|(op, outcome)| {
                op.verb == Verb::Take && limits.get(op.limit).is_some_and(counts) && which(outcome.admission)
            })
        };
        for ((op, outcome), judged) in batch.ops().iter().zip(outcomes.list()).zip(judged) {
            let Some(limit) = limits.get(op.limit) else { continue };
            let takes_part = |other: &Limit| limit.is_shadow() || !other.is_shadow();
            let sides = BatchRefusals {
                refused: refused(&takes_part, &Admission::refuses),
                blocked: refused(&takes_part, &|admission| admission == Admission::Blocked),
            };
            let cell = self.key_models.entry((op.limit, op.key)).or_default();
            cell.apply_and_check(limit, batch.context(), op, outcome, judged.as_ref(), sides, now)
                .map_err(|what| mismatch_error(op, outcome, what))?;
        }
        Ok(())
    }

    fn expected_outcome(
        &self,
        limits: &Limits,
        batch: &Batch,
        op: &Op,
        outcome: &Outcome,
        now: Time,
    ) -> Result<Option<ExpectedOutcome>, MismatchError> {
        let limit = limits.get(op.limit).filter(|_| matches!(op.verb, Verb::Take | Verb::Peek));
        let Some(limit) = limit else {
            let gives_back = matches!(op.verb, Verb::Release | Verb::Renew) && limits.get(op.limit).is_some();
            if outcome.admission != Admission::Admitted && !gives_back {
                return Err(mismatch_error(op, outcome, "nothing here could refuse".into()));
            }
            return Ok(None);
        };
        let nothing = KeyModel::default();
        let cell = self.key_models.get(&(op.limit, op.key)).unwrap_or(&nothing);
        let judged = cell.expected_outcome(limit, op.cost, batch.holder(), now);
        if !judged.allows(outcome.admission) {
            return Err(mismatch_error(op, outcome, format!("the admission contradicts {judged:?}")));
        }
        Ok(Some(judged))
    }
}

/// The combined refusals of the limits that take part in an operation's decision.
#[derive(Clone, Copy)]
struct BatchRefusals {
    refused: bool,
    blocked: bool,
}

fn mismatch_error(op: &Op, outcome: &Outcome, what: String) -> MismatchError {
    MismatchError { message: format!("{what}\n  operation {op:?}\n  answered {outcome:?}") }
}

impl KeyModel {
    fn expected_outcome(&self, limit: &Limit, cost: u64, holder: u64, now: Time) -> ExpectedOutcome {
        let (soonest, latest, generation) = match limit.kind() {
            LimitKind::Cooldown(cooldown) => {
                let look = self.cooldown.status(cooldown, now);
                (look, look, self.cooldown.generation(cooldown, now))
            }
            LimitKind::Pace(pacer) => {
                let look = self.pace.status(pacer, now);
                (look, look, 0)
            }
            kind => {
                let look = |late| self.history.status(kind, cost, holder, now, late);
                let (soonest, latest) = look(Span::ZERO).sorted(look(self.max_lateness(kind, now)));
                (soonest, latest, 0)
            }
        };
        let Some(penalty) = limit.penalty() else {
            return ExpectedOutcome {
                earliest: soonest,
                latest,
                strikes: 0,
                block: None,
                has_parole: false,
                generation,
            };
        };
        ExpectedOutcome {
            earliest: soonest,
            latest,
            strikes: self.penalties.strikes(penalty, now),
            block: self.penalties.block(penalty, now),
            has_parole: allows_parole(limit.kind()) && self.penalties.allows_parole(cost),
            generation,
        }
    }

    fn max_lateness(&self, kind: &LimitKind, now: Time) -> Span {
        match kind {
            LimitKind::Window(window) if !window.is_exact() => {
                Span::from_micros(window.window().as_micros().div_ceil(u64::from(window.entries())))
            }
            LimitKind::Window(window) if self.history.may_free_late(window, now) => window.window(),
            _ => Span::ZERO,
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one call site; each is a different part of the question")]
    fn apply_and_check(
        &mut self,
        limit: &Limit,
        terms: BatchContext,
        op: &Op,
        outcome: &Outcome,
        judged: Option<&ExpectedOutcome>,
        sides: BatchRefusals,
        now: Time,
    ) -> Result<(), String> {
        let Some(judged) = judged else { return self.apply_other_verb(limit, terms, op, outcome, now) };
        let refuses = outcome.admission.refuses();
        if op.verb == Verb::Take
            && refuses
            && !sides.blocked
            && !judged.earliest.retry_at.is_never()
            && let Some(penalty) = limit.penalty()
        {
            let parole = allows_parole(limit.kind()) && penalty.mode() == PenaltyMode::Parole;
            let (strikes, block, until) = self.penalties.strike(penalty, parole.then_some(op.cost), now);
            let retry_at = if parole {
                (until, until)
            } else {
                (until.max(judged.earliest.retry_at), until.max(judged.latest.retry_at))
            };
            let reset_at = (until.max(judged.earliest.reset_at), until.max(judged.latest.reset_at));
            let current_bounds = OutcomeBounds { strikes, ..outcome_bounds(judged) };
            let expected =
                OutcomeBounds { remaining: (0, 0), retry_at, reset_at, block: (block, until), ..current_bounds };
            return expected.check(limit, outcome);
        }
        let in_flight = limit.kind().has_permits();
        let counts_anyway =
            outcome.admission == Admission::Admitted && limit.count_mode() == CountMode::All && !in_flight;
        if op.verb == Verb::Take && !refuses && (!sides.refused || counts_anyway) {
            // The store's own remaining units decide if the parole has lapsed; a range can't.
            let room = if self.max_lateness(limit.kind(), now).is_zero() {
                judged.earliest.remaining
            } else {
                outcome.remaining.saturating_add(op.cost)
            };
            self.penalties.record_admitted(outcome.admission == Admission::Parole, room);
            let after = match limit.kind() {
                LimitKind::Cooldown(cooldown) => {
                    // An admitted caller gets the status from before its own call.
                    self.cooldown.record_let_through(cooldown, now);
                    judged.clone()
                }
                LimitKind::Pace(_) => judged.clone(),
                kind => {
                    self.take(kind, op.cost, terms, now);
                    self.expected_outcome(limit, 0, terms.holder, now)
                }
            };
            return OutcomeBounds { retry_at: (now, now), ..outcome_bounds(&after) }.check(limit, outcome);
        }
        let mut expected = outcome_bounds(judged);
        if !refuses {
            expected.retry_at = (now, now);
        } else if let Some((_, until)) = judged.block {
            let room = if judged.has_parole { (until, until) } else { expected.retry_at };
            expected.retry_at = (until.max(room.0), until.max(room.1));
            expected.reset_at = (until.max(expected.reset_at.0), until.max(expected.reset_at.1));
            expected.remaining = (0, 0);
        }
        expected.check(limit, outcome)
    }

    fn take(&mut self, kind: &LimitKind, cost: u64, terms: BatchContext, now: Time) {
        let at = match kind {
            LimitKind::Window(window) => self.history.counts_from(window, terms.lead, now),
            _ => now,
        };
        self.history.push(HistoryEvent::Taken { at, cost, holder: terms.holder });
    }

    fn apply_other_verb(
        &mut self,
        limit: &Limit,
        terms: BatchContext,
        op: &Op,
        outcome: &Outcome,
        now: Time,
    ) -> Result<(), String> {
        let BatchContext { holder, counted_at, charged_at, .. } = terms;
        let held = limit.kind().has_permits() && self.history.holds(limit.kind(), holder, now);
        match (op.verb, limit.kind()) {
            (Verb::Refund, _) => {
                let counted_at = (counted_at > Time::ZERO).then_some(counted_at);
                self.history.push(HistoryEvent::Refunded { at: now, cost: op.cost, counted_at, charged_at });
            }
            (Verb::Reset, _) => *self = Self::default(),
            (Verb::Release, _) if held => self.history.push(HistoryEvent::Released { at: now, holder }),
            (Verb::Renew, _) if held => self.history.push(HistoryEvent::Renewed { at: now, holder }),
            (Verb::Debit, kind @ (LimitKind::Window(_) | LimitKind::Rate(_) | LimitKind::Quota(_))) => {
                let room = self.history.status(kind, 0, holder, now, Span::ZERO).remaining;
                if limit.penalty().is_some_and(|penalty| self.penalties.block(penalty, now).is_none()) {
                    self.penalties.record_admitted(false, room);
                }
                self.take(kind, op.cost.min(MAX_COST), BatchContext { lead: Span::ZERO, ..terms }, now);
            }
            (Verb::Debit, LimitKind::Concurrency(_)) if held => {
                self.history.push(HistoryEvent::Renewed { at: now, holder })
            }
            (Verb::Debit, kind @ LimitKind::Concurrency(_)) => {
                // A debit may not take a permit list beyond 4096 units.
                let used = self.history.status(kind, 0, holder, now, Span::ZERO).used;
                if op.cost <= 4096_u64.saturating_sub(used) {
                    self.take(kind, op.cost, terms, now);
                }
            }
            (Verb::Settle, LimitKind::Window(_)) => {
                self.history.push(HistoryEvent::Settled { at: now, cost: op.cost, counted_at });
            }
            (Verb::Throttle { generation }, LimitKind::Cooldown(cooldown)) => {
                self.cooldown.record_throttled(cooldown, generation, Span::from_micros(op.cost), now);
            }
            (Verb::Success { generation }, LimitKind::Cooldown(cooldown)) => {
                self.cooldown.record_success(cooldown, generation, now);
            }
            (Verb::Debit, LimitKind::Cooldown(cooldown)) => {
                self.cooldown.record_closing(cooldown, Span::from_micros(op.cost), now);
            }
            (Verb::Debit, LimitKind::Pace(_)) => self.pace.raise_to(op.cost, now),
            (Verb::Pace { failed, draw }, LimitKind::Pace(pacer)) => {
                let expected = self.pace.record_call(pacer, failed, draw, now);
                let found = (outcome.limit, outcome.used, outcome.remaining);
                if found != expected {
                    return Err(format!("a step to {found:?}, expected {expected:?}"));
                }
            }
            (Verb::RestorePenalty { strikes, parole }, kind) => {
                if let Some(penalty) = limit.penalty() {
                    let paroles = allows_parole(kind) && penalty.mode() == PenaltyMode::Parole;
                    let parole = paroles.then_some(kind.capacity().min(parole.into()));
                    self.penalties.restore(penalty, (strikes, Span::from_micros(op.cost)), parole, now);
                }
            }
            (Verb::Disable, LimitKind::Cooldown(cooldown)) => {
                let until = if op.cost > 0 { now + Span::from_micros(op.cost) } else { Time::NEVER };
                self.cooldown.record_disabled(cooldown, until, now);
            }
            _ => {}
        }
        let expected = match op.verb {
            Verb::Release | Verb::Renew if !held => Admission::Refused,
            _ => Admission::Admitted,
        };
        if outcome.admission == expected { Ok(()) } else { Err(format!("expected {expected:?}")) }
    }
}

fn outcome_bounds(judged: &ExpectedOutcome) -> OutcomeBounds {
    OutcomeBounds {
        used: (judged.earliest.used, judged.latest.used),
        remaining: (judged.latest.remaining, judged.earliest.remaining),
        retry_at: (judged.earliest.retry_at, judged.latest.retry_at),
        reset_at: (judged.earliest.reset_at, judged.latest.reset_at),
        block: judged.block.unwrap_or((Span::ZERO, Time::ZERO)),
        strikes: judged.strikes,
        generation: judged.generation,
    }
}

/// Returns true if parole applies to this kind of limit: not to a quota or to permits.
fn allows_parole(kind: &LimitKind) -> bool {
    matches!(kind, LimitKind::Window(_) | LimitKind::Rate(_))
}
