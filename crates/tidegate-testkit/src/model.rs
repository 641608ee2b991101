//! The semantics once more, the slow and obvious way.
//!
//! Per limit and key the model keeps all that ever happened and works every answer out from that history: a window
//! counts the events of the last W, a rate replays every arrival, a quota adds up a period. It shares no arithmetic
//! with the core. A window counts a call that is taken ahead from the moment ahead until its end is told, and a gate is
//! closed as the list of its closings, releases and proofs says; a pace follows every call that it was told of. A store's
//! answers are handed to [`Model::check`], which says where they contradict it.
//!
//! Where the semantics leave a store some room the model gives a bracket: a window above the entries that are kept
//! exactly may free a slot up to [`tidegate_core::Window::lateness`] late, and never early. The model then goes on
//! from what the store chose.
//!
//! It expects a clock that never goes back, and no debit of a window that has both merged entries and a penalty: whether
//! that had room for a parole is the store's secret.

mod closings;
mod history;
mod penalty;
mod steps;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tidegate_core::batch::Terms;
use tidegate_core::{
    Batch, Count, Key, Kind, Limit, LimitId, Limits, MAX_COST, Op, Outcome, Outcomes, PenaltyMode, Span, Time, Verb,
    Verdict,
};

use closings::Closings;
use history::{Event, History};
use penalty::Penalties;
use steps::Steps;

/// All that ever happened, per limit and key.
#[derive(Clone, Debug)]
pub struct Model {
    limits: Arc<Limits>,
    cells: BTreeMap<(LimitId, Key), Cell>,
}

/// Where a store's answer contradicts the model.
#[derive(Clone, Debug)]
pub struct Mismatch {
    what: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Mismatch {}

/// One key under one limit.
#[derive(Clone, Debug, Default)]
struct Cell {
    history: History,
    closings: Closings,
    steps: Steps,
    penalties: Penalties,
}

/// What the model expects of one operation before it knows what the others say.
#[derive(Clone, Debug)]
struct Judged {
    soonest: Look,
    latest: Look,
    strikes: u8,
    blocked: Option<(Span, Time)>,
    paroled: bool,
    generation: u32,
}

/// What a call would meet, if everything that counts counts for a given time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Look {
    fits: bool,
    used: u64,
    remaining: u64,
    retry_at: Time,
    reset_at: Time,
}

impl Judged {
    fn allows(&self, verdict: Verdict) -> bool {
        let full = if self.paroled { Verdict::Parole } else { Verdict::Refused };
        match self.blocked {
            Some(_) => verdict == Verdict::Blocked,
            None => verdict == Verdict::Admitted && self.soonest.fits || verdict == full && !self.latest.fits,
        }
    }
}

/// The least and the most that a store may answer.
#[derive(Clone, Copy, Debug)]
struct Bracket {
    used: (u64, u64),
    remaining: (u64, u64),
    retry_at: (Time, Time),
    reset_at: (Time, Time),
    block: (Span, Time),
    strikes: u8,
    generation: u32,
}

impl Bracket {
    fn check(&self, limit: &Limit, found: &Outcome) -> Result<(), String> {
        fn within<T: PartialOrd + fmt::Debug>(name: &str, found: T, (low, high): (T, T)) -> Result<(), String> {
            if found < low || found > high {
                return Err(format!("{name} is {found:?}, expected {low:?} to {high:?}"));
            }
            Ok(())
        }
        let capacity = match limit.kind() {
            // A cool-down counts no costs: it is free or taken.
            Kind::Cooldown(_) => 1,
            Kind::Pace(pacer) => steps::longest(pacer),
            kind => kind.capacity(),
        };
        within("limit", found.limit, (capacity, capacity))?;
        // An overdrawn limit may count what overdrew it as one: it is full either way.
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
    /// A model in which nothing has happened yet.
    pub fn new(limits: Arc<Limits>) -> Self {
        Self { limits, cells: BTreeMap::new() }
    }

    /// How many calls of `cost` 1 the model holds admitted under a limit's key in the trailing `span` before `now`,
    /// parole included and refunds left out of account.
    pub fn admitted(&self, limit: LimitId, key: Key, span: Span, now: Time) -> u64 {
        self.cells.get(&(limit, key)).map_or(0, |cell| cell.history.taken_within(span, now))
    }

    /// Compares a store's answers with what the history allows, and goes on from them.
    ///
    /// A batch must not name the same limit and key twice, and the store's time must not go back.
    ///
    /// # Errors
    /// [`Mismatch`] where an answer isn't allowed; the model is of no further use then.
    pub fn check(&mut self, batch: &Batch, outcomes: &Outcomes) -> Result<(), Mismatch> {
        let now = outcomes.now();
        if batch.ops().len() != outcomes.list().len() {
            let what = format!("{} answers to {} operations", outcomes.list().len(), batch.ops().len());
            return Err(Mismatch { what });
        }
        let limits = Arc::clone(&self.limits);
        let mut judged = Vec::new();
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()) {
            judged.push(self.judge(&limits, batch, op, outcome, now)?);
        }
        let refused = |counts: &dyn Fn(&Limit) -> bool, which: &dyn Fn(Verdict) -> bool| {
            batch.ops().iter().zip(outcomes.list()).any(|(op, outcome)| {
                op.verb == Verb::Take && limits.get(op.limit).is_some_and(counts) && which(outcome.verdict)
            })
        };
        for ((op, outcome), judged) in batch.ops().iter().zip(outcomes.list()).zip(judged) {
            let Some(limit) = limits.get(op.limit) else { continue };
            let takes_part = |other: &Limit| limit.is_shadow() || !other.is_shadow();
            let sides = Sides {
                refused: refused(&takes_part, &Verdict::refuses),
                blocked: refused(&takes_part, &|verdict| verdict == Verdict::Blocked),
            };
            let cell = self.cells.entry((op.limit, op.key)).or_default();
            cell.carry_out(limit, batch.terms(), op, outcome, judged.as_ref(), sides, now)
                .map_err(|what| mismatch(op, outcome, what))?;
        }
        Ok(())
    }

    fn judge(
        &self,
        limits: &Limits,
        batch: &Batch,
        op: &Op,
        outcome: &Outcome,
        now: Time,
    ) -> Result<Option<Judged>, Mismatch> {
        let limit = limits.get(op.limit).filter(|_| matches!(op.verb, Verb::Take | Verb::Peek));
        let Some(limit) = limit else {
            let gives_back = matches!(op.verb, Verb::Release | Verb::Renew) && limits.get(op.limit).is_some();
            if outcome.verdict != Verdict::Admitted && !gives_back {
                return Err(mismatch(op, outcome, "nothing here could refuse".into()));
            }
            return Ok(None);
        };
        let nothing = Cell::default();
        let cell = self.cells.get(&(op.limit, op.key)).unwrap_or(&nothing);
        let judged = cell.judge(limit, op.cost, batch.id(), now);
        if !judged.allows(outcome.verdict) {
            return Err(mismatch(op, outcome, format!("the verdict contradicts {judged:?}")));
        }
        Ok(Some(judged))
    }
}

/// What the limits that an operation listens to say together.
#[derive(Clone, Copy)]
struct Sides {
    refused: bool,
    blocked: bool,
}

fn mismatch(op: &Op, outcome: &Outcome, what: String) -> Mismatch {
    Mismatch { what: format!("{what}\n  operation {op:?}\n  answered {outcome:?}") }
}

impl Cell {
    fn judge(&self, limit: &Limit, cost: u64, holder: u64, now: Time) -> Judged {
        let (soonest, latest, generation) = match limit.kind() {
            Kind::Cooldown(cooldown) => {
                let look = self.closings.look(cooldown, now);
                (look, look, self.closings.generation(cooldown, now))
            }
            Kind::Pace(pacer) => {
                let look = self.steps.look(pacer, now);
                (look, look, 0)
            }
            kind => {
                let look = |late| self.history.look(kind, cost, holder, now, late);
                (look(Span::ZERO), look(self.lateness(kind, now)), 0)
            }
        };
        let Some(penalty) = limit.penalty() else {
            return Judged { soonest, latest, strikes: 0, blocked: None, paroled: false, generation };
        };
        Judged {
            soonest,
            latest,
            strikes: self.penalties.strikes(penalty, now),
            blocked: self.penalties.block(penalty, now),
            paroled: waives(limit.kind()) && self.penalties.paroles(cost),
            generation,
        }
    }

    fn lateness(&self, kind: &Kind, now: Time) -> Span {
        match kind {
            Kind::Window(window) if !window.is_exact() => {
                Span::from_micros(window.window().as_micros().div_ceil(u64::from(window.entries())))
            }
            Kind::Window(window) if self.history.is_blurred(window, now) => window.window(),
            _ => Span::ZERO,
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one call site; each is a different part of the question")]
    fn carry_out(
        &mut self,
        limit: &Limit,
        terms: Terms,
        op: &Op,
        outcome: &Outcome,
        judged: Option<&Judged>,
        sides: Sides,
        now: Time,
    ) -> Result<(), String> {
        let Some(judged) = judged else { return self.tell(limit, terms, op, outcome, now) };
        let refuses = outcome.verdict.refuses();
        if op.verb == Verb::Take
            && refuses
            && !sides.blocked
            && !judged.soonest.retry_at.is_never()
            && let Some(penalty) = limit.penalty()
        {
            let parole = waives(limit.kind()) && penalty.mode() == PenaltyMode::Parole;
            let (strikes, block, until) = self.penalties.strike(penalty, parole.then_some(op.cost), now);
            let retry_at = if parole {
                (until, until)
            } else {
                (until.max(judged.soonest.retry_at), until.max(judged.latest.retry_at))
            };
            let reset_at = (until.max(judged.soonest.reset_at), until.max(judged.latest.reset_at));
            let untold = Bracket { strikes, ..bracket(judged) };
            let expected = Bracket { remaining: (0, 0), retry_at, reset_at, block: (block, until), ..untold };
            return expected.check(limit, outcome);
        }
        let in_flight = matches!(limit.kind(), Kind::Concurrency(_));
        let own = outcome.verdict == Verdict::Admitted && limit.count() == Count::All && !in_flight;
        if op.verb == Verb::Take && !refuses && (!sides.refused || own) {
            // What the store has left decides whether the parole has lapsed: a bracket can't.
            let room = if self.lateness(limit.kind(), now).is_zero() {
                judged.soonest.remaining
            } else {
                outcome.remaining.saturating_add(op.cost)
            };
            self.penalties.admitted(outcome.verdict == Verdict::Parole, room);
            let after = match limit.kind() {
                Kind::Cooldown(cooldown) => {
                    // Who was let through is told what it met.
                    self.closings.through(cooldown, now);
                    judged.clone()
                }
                Kind::Pace(_) => judged.clone(),
                kind => {
                    self.take(kind, op.cost, terms, now);
                    self.judge(limit, 0, terms.holder, now)
                }
            };
            return Bracket { retry_at: (now, now), ..bracket(&after) }.check(limit, outcome);
        }
        let mut expected = bracket(judged);
        if !refuses {
            expected.retry_at = (now, now);
        } else if let Some((_, until)) = judged.blocked {
            let room = if judged.paroled { (until, until) } else { expected.retry_at };
            expected.retry_at = (until.max(room.0), until.max(room.1));
            expected.reset_at = (until.max(expected.reset_at.0), until.max(expected.reset_at.1));
            expected.remaining = (0, 0);
        }
        expected.check(limit, outcome)
    }

    fn take(&mut self, kind: &Kind, cost: u64, terms: Terms, now: Time) {
        let at = match kind {
            Kind::Window(window) => self.history.counted_from(window, terms.lead, now),
            _ => now,
        };
        self.history.push(Event::Taken { at, cost, holder: terms.holder });
    }

    fn tell(&mut self, limit: &Limit, terms: Terms, op: &Op, outcome: &Outcome, now: Time) -> Result<(), String> {
        let Terms { holder, counted_at, charged_at, .. } = terms;
        let held = matches!(limit.kind(), Kind::Concurrency(_)) && self.history.holds(limit.kind(), holder, now);
        match (op.verb, limit.kind()) {
            (Verb::Refund, _) => {
                let counted_at = (counted_at > Time::ZERO).then_some(counted_at);
                self.history.push(Event::Refunded { at: now, cost: op.cost, counted_at, charged_at });
            }
            (Verb::Reset, _) => *self = Self::default(),
            (Verb::Release, _) if held => self.history.push(Event::Released { at: now, holder }),
            (Verb::Renew, _) if held => self.history.push(Event::Renewed { at: now, holder }),
            (Verb::Debit, kind @ (Kind::Window(_) | Kind::Rate(_) | Kind::Quota(_))) => {
                let room = self.history.look(kind, 0, holder, now, Span::ZERO).remaining;
                if limit.penalty().is_some_and(|penalty| self.penalties.block(penalty, now).is_none()) {
                    self.penalties.admitted(false, room);
                }
                self.take(kind, op.cost.min(MAX_COST), Terms { lead: Span::ZERO, ..terms }, now);
            }
            (Verb::Debit, Kind::Concurrency(_)) if held => self.history.push(Event::Renewed { at: now, holder }),
            (Verb::Debit, kind @ Kind::Concurrency(_)) => {
                // No more than can be looked over.
                let used = self.history.look(kind, 0, holder, now, Span::ZERO).used;
                if op.cost <= 4096_u64.saturating_sub(used) {
                    self.take(kind, op.cost, terms, now);
                }
            }
            (Verb::Settle, Kind::Window(_)) => {
                self.history.push(Event::Settled { at: now, cost: op.cost, counted_at });
            }
            (Verb::Throttle { generation }, Kind::Cooldown(cooldown)) => {
                self.closings.throttled(cooldown, generation, Span::from_micros(op.cost), now);
            }
            (Verb::Succeed { generation }, Kind::Cooldown(cooldown)) => {
                self.closings.succeeded(cooldown, generation, now);
            }
            (Verb::Debit, Kind::Pace(_)) => self.steps.at_least(op.cost, now),
            (Verb::Pace { failed, draw }, Kind::Pace(pacer)) => {
                let expected = self.steps.call(pacer, failed, draw, now);
                let found = (outcome.limit, outcome.used, outcome.remaining);
                if found != expected {
                    return Err(format!("a step to {found:?}, expected {expected:?}"));
                }
            }
            (Verb::Penalise { strikes, parole }, kind) => {
                if let Some(penalty) = limit.penalty() {
                    let paroles = waives(kind) && penalty.mode() == PenaltyMode::Parole;
                    let parole = paroles.then_some(kind.capacity().min(parole.into()));
                    self.penalties.bring_back(penalty, (strikes, Span::from_micros(op.cost)), parole, now);
                }
            }
            (Verb::Disable, Kind::Cooldown(cooldown)) => {
                let until = if op.cost > 0 { now + Span::from_micros(op.cost) } else { Time::NEVER };
                self.closings.disabled(cooldown, until, now);
            }
            _ => {}
        }
        let expected = match op.verb {
            Verb::Release | Verb::Renew if !held => Verdict::Refused,
            _ => Verdict::Admitted,
        };
        if outcome.verdict == expected { Ok(()) } else { Err(format!("expected {expected:?}")) }
    }
}

fn bracket(judged: &Judged) -> Bracket {
    Bracket {
        used: (judged.soonest.used, judged.latest.used),
        remaining: (judged.latest.remaining, judged.soonest.remaining),
        retry_at: (judged.soonest.retry_at, judged.latest.retry_at),
        reset_at: (judged.soonest.reset_at, judged.latest.reset_at),
        block: judged.blocked.unwrap_or((Span::ZERO, Time::ZERO)),
        strikes: judged.strikes,
        generation: judged.generation,
    }
}

/// Parole never applies to a quota or to permits.
fn waives(kind: &Kind) -> bool {
    matches!(kind, Kind::Window(_) | Kind::Rate(_))
}
