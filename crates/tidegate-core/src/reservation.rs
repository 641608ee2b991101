//! Reservations: instants at which a limit that many callers share keeps room for one of them. A refused caller gets the next
//! one as its own.
//!
//! Only [`KeyState`](crate::KeyState) changes a queue. It keeps each reservation until its caller returns or forfeits it.
//!
//! A limit is never exceeded, whenever within its grace each caller returns:
//!
//! - A rate is charged for a reservation at its instant. Until the caller returns, the charge keeps its part of the burst
//!   from being used by others. A call without a reservation passes if it also leaves room for the next one. Then all
//!   later ones have room, because they are at least as far apart as the rate's calls.
//! - In a window, a reservation counts as made at the end of its grace. The share of the limit bounds how many of them the
//!   window holds. Calls without one have the rest, or more as long as fewer are reserved.
//! - A quota keeps the room of reservations in the period of their instants.

use alloc::vec::Vec;

use thiserror::Error;

use crate::batch::{OpContext, Outcome, Verdict};
use crate::quota::{Period, QuotaUsage};
use crate::rate::ArrivalTime;
use crate::state::{LimitStatus, Usage};
use crate::time::MAX_CLOCK_LAG;
use crate::window::WindowLog;
use crate::{LimitKind, PER_MILLE, Rate, Span, Time, Window};

/// The largest number of reservations and forfeits of one key. At the bound, refused callers get no reservation.
pub const MAX_RECORDS: usize = 1024;
/// The number of horizons from the instant of a reservation that was forfeited to the caller's next one. At least ten follow
/// the grace, and the reservations of callers that never come are set aside in at most one of eleven.
pub const FORFEIT_HORIZONS: u64 = 11;
/// The longest horizon.
pub const MAX_HORIZON: Span = Span::from_secs(3_600);

/// The rules by which a limit gives reservations to refused callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationRules {
    horizon: Span,
    share: u64,
    grace: Span,
    is_kept: bool,
}

/// The reason why rules of reservations can't be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ReservationError {
    /// A horizon of zero or above [`MAX_HORIZON`].
    #[error("a horizon is between 1 µs and one hour")]
    InvalidHorizon,
    /// A share of zero or above the whole.
    #[error("a share is between 0.001 and 1")]
    InvalidShare,
    /// A grace of zero or above the horizon.
    #[error("the grace is between 1 µs and the horizon")]
    InvalidGrace,
}

impl ReservationRules {
    /// Creates rules that keep room: at most `share` thousandths of the limit, at most `horizon` ahead, each until `grace` after
    /// its instant.
    ///
    /// # Errors
    /// A value is out of its range.
    pub fn new(horizon: Span, share: u16, grace: Span) -> Result<Self, ReservationError> {
        if horizon.is_zero() || horizon > MAX_HORIZON {
            return Err(ReservationError::InvalidHorizon);
        }
        if share == 0 || u64::from(share) > PER_MILLE {
            return Err(ReservationError::InvalidShare);
        }
        if grace.is_zero() || grace > horizon {
            return Err(ReservationError::InvalidGrace);
        }
        Ok(Self { horizon, share: share.into(), grace, is_kept: true })
    }

    /// Creates rules that only tell each refused caller another instant, at most `horizon` ahead. No room is kept.
    ///
    /// # Errors
    /// [`ReservationError::InvalidHorizon`].
    pub fn spread(horizon: Span) -> Result<Self, ReservationError> {
        let rules = Self::new(horizon, PER_MILLE as u16, horizon)?;
        Ok(Self { is_kept: false, ..rules })
    }

    /// The longest time ahead for which a reservation is given.
    pub fn horizon(&self) -> Span {
        self.horizon
    }

    /// The share of the limit that may be set aside, in thousandths.
    pub fn share(&self) -> u64 {
        self.share
    }

    /// The time after the instant for which the reservation is kept.
    pub fn grace(&self) -> Span {
        self.grace
    }

    /// True if room is kept, false if callers are only told different instants.
    pub fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// The time for which a forfeit is remembered, from the instant of the reservation.
    pub fn forfeit_time(&self) -> Span {
        self.horizon.times(FORFEIT_HORIZONS)
    }

    /// The part of a limit that may be set aside.
    pub fn part_of(&self, limit: u64) -> u64 {
        (u128::from(limit) * u128::from(self.share) / u128::from(PER_MILLE)) as u64
    }

    /// The least time between a rate's reservation of `cost` and the one before it.
    pub fn spacing(&self, rate: &Rate, cost: u64) -> Span {
        let units = u128::from(rate.cost_units(cost)) * u128::from(PER_MILLE) / u128::from(self.share);
        Rate::units_to_span(u64::try_from(units).unwrap_or(u64::MAX))
    }
}

/// The reservation of one caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The instant from which the caller is admitted.
    pub at: Time,
    /// The caller's [key](crate::batch::BatchContext::caller). 0 once it has returned: a window still counts its call.
    pub caller: u64,
    /// The cost that is set aside.
    pub cost: u64,
}

/// A caller that didn't return in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forfeit {
    /// The time until which it gets no reservation.
    pub until: Time,
    /// The caller's key.
    pub caller: u64,
}

/// The reservations of one key, and the callers that forfeited theirs.
#[derive(Clone, Debug, Default)]
pub struct ReservationQueue {
    /// In the order of their instants.
    pub reservations: Vec<Reservation>,
    /// In the order of their ends.
    pub forfeits: Vec<Forfeit>,
    /// The instant of the last reservation that was made.
    pub last_at: Time,
    /// The instant of the last reservation that a rate is charged for.
    pub charged_until: Time,
}

/// The usage of a limit with reservations.
#[derive(Clone, Debug, Default)]
pub struct ReservedUsage {
    /// The usage of the limit; for a window, by calls without a reservation.
    pub usage: Usage,
    /// The reservations.
    pub queue: ReservationQueue,
}

impl ReservationQueue {
    /// The number of bytes of heap memory.
    pub fn heap_bytes(&self) -> usize {
        self.reservations.capacity() * size_of::<Reservation>() + self.forfeits.capacity() * size_of::<Forfeit>()
    }

    fn of_caller(&self, caller: u64) -> Option<usize> {
        self.reservations.iter().position(|reservation| reservation.caller == caller)
    }

    fn is_barred(&self, caller: u64) -> bool {
        self.forfeits.iter().any(|forfeit| forfeit.caller == caller)
    }

    fn has_record_room(&self) -> bool {
        self.reservations.len() + self.forfeits.len() < MAX_RECORDS
    }

    /// Forgets reservations and forfeits of a clock that was set back.
    fn refresh(&mut self, rules: &ReservationRules, now: Time) {
        let latest = now + rules.horizon + MAX_CLOCK_LAG;
        if self.charged_until > now + MAX_CLOCK_LAG || self.last_at > latest {
            self.reservations.clear();
            (self.charged_until, self.last_at) = (now, now);
        }
        let latest = latest + rules.forfeit_time();
        if self.forfeits.last().is_some_and(|forfeit| forfeit.until > latest) {
            self.forfeits.clear();
        }
        let ended = self.forfeits.partition_point(|forfeit| forfeit.until <= now);
        self.forfeits.drain(..ended);
    }

    /// Removes the reservation at this index, whose grace has ended.
    fn forfeit(&mut self, index: usize, rules: &ReservationRules) {
        let Reservation { at, caller, .. } = self.reservations.remove(index);
        self.forfeits.push(Forfeit { until: at + rules.forfeit_time(), caller });
    }

    /// Removes what has ended by now, up to `counted` after the grace for the calls that still count.
    fn remove_ended(&mut self, rules: &ReservationRules, counted: Span, now: Time) {
        let mut index = 0;
        while let Some(&Reservation { at, caller, .. }) = self.reservations.get(index)
            && at + rules.grace <= now
        {
            match caller {
                0 if at + rules.grace + counted > now => index += 1,
                0 => drop(self.reservations.remove(index)),
                _ => self.forfeit(index, rules),
            }
        }
    }

    /// The cost of the reservations whose instants a rate has reached.
    fn held_cost(&self) -> u64 {
        total_cost(self.reservations.iter().take_while(|reservation| reservation.at <= self.charged_until))
    }

    /// The cost of the reservations that may be used in this period, up to `grace` after their instants.
    fn cost_in(&self, period: Period, grace: Span) -> u64 {
        let is_within =
            |reservation: &&Reservation| reservation.at < period.end && reservation.at + grace > period.start;
        total_cost(self.reservations.iter().filter(is_within))
    }

    fn upcoming(&self, now: Time) -> Option<&Reservation> {
        let first = self.reservations.partition_point(|reservation| reservation.at <= now);
        self.reservations.get(first)
    }
}

impl ReservedUsage {
    /// The time from which the usage equals an empty one, if the one below it is idle at `usage_idle_at`.
    pub fn idle_at(&self, rules: &ReservationRules, kind: &LimitKind, usage_idle_at: Time) -> Time {
        let queue = &self.queue;
        let reserved = queue.reservations.last().map_or(Time::ZERO, |last| {
            // Whoever doesn't return is remembered.
            last.at + if rules.is_kept { rules.forfeit_time() } else { Span::ZERO }
        });
        let forfeited = queue.forfeits.last().map_or(Time::ZERO, |forfeit| forfeit.until);
        let lane = match kind {
            LimitKind::Window(window) if queue.last_at > Time::ZERO => queue.last_at + rules.grace + window.window(),
            LimitKind::Rate(rate) if queue.last_at > Time::ZERO => queue.last_at + rules.spacing(rate, 1),
            _ => Time::ZERO,
        };
        usage_idle_at.max(reserved).max(forfeited).max(lane)
    }

    fn arrival(&self) -> ArrivalTime {
        if let Usage::Rate(arrival) = self.usage { arrival } else { ArrivalTime::default() }
    }

    fn quota_usage(&self) -> QuotaUsage {
        if let Usage::Quota(usage) = self.usage { usage } else { QuotaUsage::default() }
    }

    fn log(&mut self) -> &mut WindowLog {
        if !matches!(self.usage, Usage::Window(_)) {
            self.usage = Usage::Window(WindowLog::default());
        }
        match &mut self.usage {
            Usage::Window(log) => log,
            _ => unreachable!("invariant: the usage was just made one of a window"),
        }
    }

    /// Accounts for what has happened since the last call: reservations whose instants have come, and those whose graces
    /// have ended.
    fn advance(&mut self, rules: &ReservationRules, kind: &LimitKind, now: Time) {
        self.queue.refresh(rules, now);
        if !rules.is_kept {
            let passed = self.queue.reservations.partition_point(|reservation| reservation.at <= now);
            self.queue.reservations.drain(..passed);
        }
        match kind {
            LimitKind::Rate(rate) if rules.is_kept => self.advance_rate(rules, rate, now),
            LimitKind::Rate(rate) => self.usage = Usage::Rate(rate.refresh(self.arrival(), now)),
            LimitKind::Window(window) => {
                window.refresh(self.log(), now);
                self.queue.remove_ended(rules, window.window(), now);
            }
            LimitKind::Quota(quota) => {
                self.queue.remove_ended(rules, Span::ZERO, now);
                let mut usage = self.quota_usage();
                quota.refresh(&mut usage, now);
                self.usage = Usage::Quota(usage);
            }
            _ => {}
        }
    }

    /// Charges a rate for each reservation at its instant, and gives the charge back at the end of its grace. Until the
    /// caller returns, the charge is part of what the burst holds.
    fn advance_rate(&mut self, rules: &ReservationRules, rate: &Rate, now: Time) {
        let mut arrival = rate.refresh(self.arrival(), now);
        let queue = &mut self.queue;
        let mut held = queue.held_cost();
        loop {
            let charged_until = queue.charged_until;
            let next = queue.reservations.partition_point(|reservation| reservation.at <= charged_until);
            let next = queue.reservations.get(next).filter(|reservation| reservation.at <= now).copied();
            let ending = queue.reservations.first().map(|first| (first.at + rules.grace, first.cost));
            match (ending, next) {
                (Some((ends_at, cost)), _) if ends_at <= next.map_or(now, |next| next.at) => {
                    arrival = rate.refund_at(rate.hold(arrival, held, ends_at), cost, ends_at);
                    held = held.saturating_sub(cost);
                    queue.forfeit(0, rules);
                }
                (_, Some(Reservation { at, cost, .. })) => {
                    arrival = rate.charge_at(rate.hold(arrival, held, at), cost, at);
                    held = held.saturating_add(cost);
                    queue.charged_until = at;
                }
                _ => break,
            }
        }
        self.usage = Usage::Rate(rate.refresh(rate.hold(arrival, held, now), now));
    }

    /// The status for a call without a reservation.
    fn status(&mut self, rules: &ReservationRules, kind: &LimitKind, cost: u64, now: Time) -> LimitStatus {
        match kind {
            LimitKind::Rate(rate) => {
                let arrival = self.arrival();
                let mut status = rate.status(arrival, cost, now);
                let (upcoming, last) = (self.queue.upcoming(now), self.queue.reservations.last());
                if let (true, Some(first), Some(last)) = (rules.is_kept && cost > 0, upcoming, last) {
                    let after = rate.charge(arrival, cost, now);
                    let leaves_room = rate.retry_at(after, first.cost, first.at) <= first.at;
                    if status.retry_at > now || !leaves_room {
                        status.remaining = status.remaining.min(cost - 1);
                        status.retry_at = status.retry_at.max(last.at + Rate::units_to_span(rate.cost_units(cost)));
                    }
                }
                status
            }
            LimitKind::Window(window) => {
                let held = self.held_in_window(rules, window);
                let ends_at = self.queue.last_at + rules.grace + window.window();
                let log = self.log();
                let status = window.status(log, cost.saturating_add(held), now);
                with_held(status, held, cost, ends_at)
            }
            LimitKind::Quota(quota) => {
                let usage = self.quota_usage();
                let period = quota.period(now);
                let held = if rules.is_kept { self.queue.cost_in(period, rules.grace) } else { 0 };
                let status = quota.status(&usage, cost.saturating_add(held), now);
                with_held(status, held, cost, period.end)
            }
            _ => LimitStatus { limit: 0, used: 0, remaining: 0, retry_at: now, reset_at: now },
        }
    }

    /// The part of a window that is kept from calls without a reservation.
    fn held_in_window(&self, rules: &ReservationRules, window: &Window) -> u64 {
        if rules.is_kept { total_cost(&self.queue.reservations).min(rules.part_of(window.limit())) } else { 0 }
    }

    /// The next free instant; `None` if it is beyond the horizon, or if the share has no room for the cost.
    fn next_instant(&mut self, rules: &ReservationRules, kind: &LimitKind, cost: u64, now: Time) -> Option<Time> {
        let last_at = self.queue.last_at;
        let at = match kind {
            LimitKind::Rate(rate) => {
                let free_at = rate.retry_at(self.arrival(), cost, now);
                let after_last = if last_at > Time::ZERO { last_at + rules.spacing(rate, cost) } else { now };
                let mut at = free_at.max(after_last);
                let mut together = cost;
                for earlier in self.queue.reservations.iter().rev().take_while(|_| rules.is_kept) {
                    together = together.saturating_add(earlier.cost);
                    if together > rate.burst() {
                        // The burst can't hold all of them at once.
                        let excess = rate.cost_units(together - rate.burst());
                        at = at.max(earlier.at + rules.grace + Rate::units_to_span(excess));
                        break;
                    }
                }
                at
            }
            LimitKind::Window(window) if rules.is_kept => {
                let part = rules.part_of(window.limit());
                let reserved = total_cost(&self.queue.reservations).saturating_add(cost);
                if cost > part {
                    return None;
                }
                let mut excess = reserved.saturating_sub(part);
                let last_to_end = self.queue.reservations.iter().take_while(|earlier| {
                    let is_needed = excess > 0;
                    excess = excess.saturating_sub(earlier.cost);
                    is_needed
                });
                let free_at = last_to_end.last().map_or(now, |last| last.at + rules.grace + window.window());
                window.status(self.log(), reserved.min(part), now).retry_at.max(free_at).max(last_at)
            }
            LimitKind::Window(window) => {
                // Each window has room for the whole limit.
                let ahead = Period { start: Time::ZERO, end: Time::NEVER };
                let ahead = self.queue.cost_in(ahead, Span::ZERO).saturating_add(cost).max(1) - 1;
                let (cycles, rest) = (ahead / window.limit().max(1), ahead % window.limit().max(1) + 1);
                window.status(self.log(), rest, now).retry_at + window.window().times(cycles)
            }
            LimitKind::Quota(quota) => {
                let period = quota.period(now);
                let reserved = self.queue.cost_in(quota.period(period.end), rules.grace);
                let has_room = reserved.saturating_add(cost) <= rules.part_of(quota.limit());
                if rules.is_kept && !has_room {
                    return None;
                }
                period.end
            }
            _ => return None,
        };
        (at > now && at.since(now) <= rules.horizon).then_some(at)
    }

    /// The index of the caller's reservation, if it admits this call.
    fn admitting(&self, rules: &ReservationRules, context: &OpContext<'_>) -> Option<usize> {
        let &OpContext { op, batch, now, .. } = context;
        let index = self.queue.of_caller(batch.caller).filter(|_| batch.caller != 0 && rules.is_kept)?;
        let Reservation { at, cost, .. } = self.queue.reservations[index];
        let is_presented = batch.reservation == Time::ZERO || batch.reservation == at;
        (is_presented && at <= now && op.cost <= cost).then_some(index)
    }

    /// Evaluates a call.
    pub(crate) fn evaluate(&mut self, rules: &ReservationRules, context: &OpContext<'_>) -> Outcome {
        let &OpContext { op, limit, batch, now } = context;
        self.advance(rules, limit.kind(), now);
        let mut outcome = Outcome::from_status(self.status(rules, limit.kind(), op.cost, now), now);
        if let Some(index) = self.admitting(rules, context) {
            outcome.reserved_at = self.queue.reservations[index].at;
            (outcome.verdict, outcome.retry_at) = (Verdict::Admitted, now);
        } else if outcome.verdict == Verdict::Refused
            && let Some(index) = self.queue.of_caller(batch.caller)
            && let at = self.queue.reservations[index].at
            && at > now
        {
            outcome.retry_at = at;
            outcome.reserved_at = if rules.is_kept { at } else { Time::ZERO };
        }
        outcome
    }

    /// Charges a call that was just admitted.
    pub(crate) fn charge(&mut self, rules: &ReservationRules, context: &OpContext<'_>, outcome: &mut Outcome) {
        let &OpContext { op, limit, now, .. } = context;
        let used = self.admitting(rules, context);
        match limit.kind() {
            LimitKind::Rate(rate) => {
                if used.is_none() {
                    self.usage = Usage::Rate(rate.charge(self.arrival(), op.cost, now));
                }
                outcome.reset_at = self.arrival().idle_at().max(now);
            }
            LimitKind::Window(window) => {
                if used.is_none() {
                    window.charge(self.log(), op.cost, now);
                }
                let reserved_until =
                    self.queue.reservations.last().map_or(now, |last| last.at + rules.grace + window.window());
                outcome.reset_at = window.idle_at(self.log()).max(reserved_until).max(now);
            }
            LimitKind::Quota(quota) => {
                let mut usage = self.quota_usage();
                quota.charge(&mut usage, op.cost, now);
                self.usage = Usage::Quota(usage);
                outcome.reset_at = usage.idle_at().max(now);
            }
            _ => {}
        }
        match (used, limit.kind()) {
            // What is reserved counts as used before.
            (Some(index), LimitKind::Window(_)) => self.queue.reservations[index].caller = 0,
            (Some(index), _) => drop(self.queue.reservations.remove(index)),
            (None, _) => outcome.record_charge(op.cost),
        }
    }

    /// Gives a caller that was just refused the next free instant, unless it has one, or has forfeited one.
    pub(crate) fn reserve(&mut self, rules: &ReservationRules, context: &OpContext<'_>, outcome: &mut Outcome) {
        let &OpContext { op, limit, batch, now } = context;
        let queue = &self.queue;
        let may_reserve =
            batch.caller != 0 && op.cost > 0 && op.cost <= limit.kind().capacity() && queue.has_record_room();
        if !may_reserve || queue.of_caller(batch.caller).is_some() || queue.is_barred(batch.caller) {
            return;
        }
        let Some(at) = self.next_instant(rules, limit.kind(), op.cost, now) else { return };
        let queue = &mut self.queue;
        queue.reservations.push(Reservation { at, caller: batch.caller, cost: op.cost });
        queue.last_at = at;
        outcome.retry_at = at;
        outcome.reserved_at = if rules.is_kept { at } else { Time::ZERO };
        outcome.reset_at = outcome.reset_at.max(at);
    }
}

fn total_cost<'a>(reservations: impl IntoIterator<Item = &'a Reservation>) -> u64 {
    reservations.into_iter().map(|reservation| reservation.cost).fold(0, u64::saturating_add)
}

/// The status of a limit of which `held` is kept for others. If that leaves too little for `cost`, there is room at
/// `ends_at`.
fn with_held(status: LimitStatus, held: u64, cost: u64, ends_at: Time) -> LimitStatus {
    let used = status.used.saturating_add(held);
    let retry_at = if status.retry_at.is_never() && cost <= status.limit { ends_at } else { status.retry_at };
    LimitStatus { used, remaining: status.limit.saturating_sub(used), retry_at, ..status }
}
