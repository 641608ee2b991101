//! The decisions and changes of a limit with reservations.

use super::{Reservation, ReservationQueue, ReservationRules, Standing, total_cost};
use crate::batch::{Admission, OpContext, Outcome};
use crate::quota::QuotaUsage;
use crate::rate::ArrivalTime;
use crate::state::{LimitStatus, Usage};
use crate::window::WindowLog;
use crate::{LimitKind, Rate, Span, Time, Window};

/// The usage of a limit with reservations.
#[derive(Clone, Debug, Default)]
pub struct ReservedUsage {
    /// The usage of the limit; for a window, by calls without a reservation.
    pub usage: Usage,
    /// The reservations.
    pub queue: ReservationQueue,
}

impl ReservedUsage {
    /// The time from which the usage equals an empty one, if the one below it is idle at `usage_idle_at`.
    pub fn idle_at(&self, rules: &ReservationRules, kind: &LimitKind, usage_idle_at: Time) -> Time {
        let queue = &self.queue;
        let reserved = queue.reservations.last().map_or(Time::ZERO, |last| {
            // A caller that doesn't return is remembered.
            last.ends_at + if rules.is_kept { rules.forfeit_time() } else { Span::ZERO }
        });
        let forfeited = queue.forfeits.last().map_or(Time::ZERO, |last| last.ended_at + rules.forfeit_time());
        let next = match kind {
            LimitKind::Window(window) => self.reserved_until(window).max(queue.last_at),
            LimitKind::Rate(rate) if queue.last_at > Time::ZERO => queue.last_at + rules.spacing(rate, rate.burst()),
            _ => queue.last_at,
        };
        usage_idle_at.max(reserved).max(forfeited).max(next)
    }

    fn arrival(&self) -> ArrivalTime {
        if let Usage::Rate(arrival) = self.usage { arrival } else { ArrivalTime::default() }
    }

    fn quota_usage(&self) -> QuotaUsage {
        if let Usage::Quota(usage) = self.usage { usage } else { QuotaUsage::default() }
    }

    /// The time from which a window counts no reservation.
    fn reserved_until(&self, window: &Window) -> Time {
        self.queue.reservations.last().map_or(Time::ZERO, |last| last.ends_at + window.window())
    }

    pub(crate) fn log(&mut self) -> &mut WindowLog {
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
        match kind {
            LimitKind::Rate(rate) if rules.is_kept => self.advance_rate(rate, now),
            LimitKind::Rate(rate) => {
                self.queue.remove_ended(Span::ZERO, now);
                self.usage = Usage::Rate(rate.refresh(self.arrival(), now));
            }
            LimitKind::Window(window) => {
                window.refresh(self.log(), now);
                self.queue.remove_ended(window.window(), now);
            }
            LimitKind::Quota(quota) => {
                self.queue.remove_ended(Span::ZERO, now);
                let mut usage = self.quota_usage();
                quota.refresh(&mut usage, now);
                self.usage = Usage::Quota(usage);
            }
            _ => {}
        }
    }

    /// Charges a rate for each reservation at its instant, and gives the charge back at the end of its grace. Until the
    /// caller returns, the charge is part of what the burst holds.
    fn advance_rate(&mut self, rate: &Rate, now: Time) {
        let mut arrival = rate.refresh(self.arrival(), now);
        let queue = &mut self.queue;
        let mut held = queue.held_cost();
        loop {
            let charged_until = queue.charged_until;
            let next = queue.reservations.partition_point(|reservation| reservation.at <= charged_until);
            let next = queue.reservations.get(next).filter(|reservation| reservation.at <= now).copied();
            let ending = queue.reservations.first().map(|first| (first.ends_at, first.cost));
            match (ending, next) {
                (Some((ends_at, cost)), _) if ends_at <= next.map_or(now, |next| next.at) => {
                    arrival = rate.refund_at(rate.hold(arrival, held, ends_at), cost, ends_at);
                    held = held.saturating_sub(cost);
                    queue.forfeit(0);
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
                let reserved_until = self.reserved_until(window);
                let status = window.status(self.log(), beside(held, cost), now);
                with_held(status, held, cost, reserved_until)
            }
            LimitKind::Quota(quota) => {
                let usage = self.quota_usage();
                let period = quota.period(now);
                let held = if rules.is_kept { self.queue.cost_in(period) } else { 0 };
                let status = quota.status(&usage, beside(held, cost), now);
                with_held(status, held, cost, period.end)
            }
            _ => LimitStatus { limit: 0, used: 0, remaining: 0, retry_at: now, reset_at: now },
        }
    }

    /// The part of a window that is kept from calls without a reservation.
    fn held_in_window(&self, rules: &ReservationRules, window: &Window) -> u64 {
        if rules.is_kept { self.queue.cost_in_window(rules.part_of(window.limit()), window.window()) } else { 0 }
    }

    /// The next free instant; `None` if it is beyond the horizon, or if the share has no room for the cost.
    fn next_instant(&mut self, rules: &ReservationRules, kind: &LimitKind, cost: u64, now: Time) -> Option<Time> {
        let last_at = self.queue.last_at;
        let at = match kind {
            LimitKind::Rate(rate) => {
                let part = rules.part_of_burst(rate.burst());
                if rules.is_kept && cost > part {
                    return None;
                }
                let free_at = rate.retry_at(self.arrival(), cost, now);
                let after_last = if last_at > Time::ZERO { last_at + rules.spacing(rate, cost) } else { now };
                let mut at = free_at.max(after_last);
                if rules.is_kept {
                    // The burst can't hold all of them at once.
                    let (_, until, free) = self.queue.passed_before(rate, part, cost);
                    at = at.max(rate.refund_at(until, free, Time::ZERO).idle_at());
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
                let free_at = last_to_end.last().map_or(now, |last| last.ends_at + window.window());
                let together = reserved.min(part.max(self.held_in_window(rules, window)));
                window.status(self.log(), together, now).retry_at.max(free_at)
            }
            LimitKind::Window(window) => {
                // Each window has room for the whole limit.
                let ahead = total_cost(&self.queue.reservations).saturating_add(cost).max(1) - 1;
                let (cycles, rest) = (ahead / window.limit().max(1), ahead % window.limit().max(1) + 1);
                window.status(self.log(), rest, now).retry_at + window.window().times(cycles)
            }
            LimitKind::Quota(quota) => {
                let period = quota.period(now);
                let reserved = self.queue.cost_in(quota.period(period.end));
                let has_room = reserved.saturating_add(cost) <= rules.part_of(quota.limit());
                if last_at > period.end || rules.is_kept && !has_room {
                    return None;
                }
                period.end
            }
            _ => return None,
        };
        let at = at.max(last_at);
        (at > now && at.since(now) <= rules.horizon).then_some(at)
    }

    /// The index of the caller's reservation, whose instant hasn't come.
    fn upcoming_of(&self, caller: u64, now: Time) -> Option<usize> {
        self.queue.of_caller(caller).filter(|&index| caller != 0 && self.queue.reservations[index].at > now)
    }

    /// The index of the caller's reservation, if it admits this call.
    fn admitting(&self, rules: &ReservationRules, context: &OpContext<'_>) -> Option<usize> {
        let &OpContext { op, batch, now, .. } = context;
        let index = self.queue.of_caller(batch.caller).filter(|_| batch.caller != 0 && rules.is_kept)?;
        let Reservation { at, cost, .. } = self.queue.reservations[index];
        // A call without cost needs no room.
        (!context.presented().is_never() && at <= now && (1..=cost).contains(&op.cost)).then_some(index)
    }

    /// Evaluates a call.
    pub(crate) fn evaluate(&mut self, rules: &ReservationRules, context: &OpContext<'_>) -> Outcome {
        let &OpContext { op, limit, batch, now } = context;
        self.advance(rules, limit.kind(), now);
        let mut outcome = Outcome::from_status(self.status(rules, limit.kind(), op.cost, now), now);
        if let Some(index) = self.admitting(rules, context) {
            outcome.reserved_at = self.queue.reservations[index].at;
            (outcome.admission, outcome.retry_at) = (Admission::Admitted, now);
        } else if outcome.admission == Admission::Refused
            && let Some(index) = self.upcoming_of(batch.caller, now)
        {
            let at = self.queue.reservations[index].at;
            outcome.retry_at = at;
            outcome.reserved_at = if rules.is_kept { at } else { Time::ZERO };
        }
        outcome
    }

    /// Charges a call that was just admitted.
    pub(crate) fn charge(&mut self, rules: &ReservationRules, context: &OpContext<'_>, outcome: &mut Outcome) {
        let &OpContext { op, limit, batch, now } = context;
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
                outcome.reset_at = window.idle_at(self.log()).max(self.reserved_until(window)).max(now);
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
            // A reservation counts as used before.
            (Some(index), LimitKind::Window(_)) => self.queue.reservations[index].caller = 0,
            (Some(index), _) => drop(self.queue.remove(index)),
            (None, _) => outcome.record_charge(op.cost),
        }
        if batch.caller != 0 {
            self.queue.end_forfeits(batch.caller, op.cost);
        }
        if let Some(index) = self.upcoming_of(batch.caller, now).filter(|_| used.is_none()) {
            let reservation = &mut self.queue.reservations[index];
            // A cheaper call isn't the one that was refused.
            reservation.is_excused |= op.cost >= reservation.cost;
        }
    }

    /// Gives a caller that was just refused the next free instant, unless it has one, or is behind and others were so lately.
    /// Returns true if it got one.
    pub(crate) fn reserve(&mut self, rules: &ReservationRules, context: &OpContext<'_>, outcome: &mut Outcome) -> bool {
        let &OpContext { op, limit, batch, now } = context;
        let (queue, caller) = (&self.queue, batch.caller);
        let may_reserve = caller != 0 && op.cost > 0 && op.cost <= limit.kind().capacity();
        let standing = queue.standing(rules, context.presented(), caller, now);
        let is_too_early = standing == Standing::Behind && now < queue.opens_to_forfeiters_at;
        if !may_reserve || is_too_early || queue.of_caller(caller).is_some() {
            return false;
        }
        let Some(at) = self.next_instant(rules, limit.kind(), op.cost, now) else { return false };
        let queue = &mut self.queue;
        if !queue.make_record_room() {
            return false;
        }
        if let LimitKind::Rate(rate) = limit.kind()
            && rules.is_kept
        {
            let part = rules.part_of_burst(rate.burst());
            (queue.passed, queue.passed_until, _) = queue.passed_before(rate, part, op.cost);
        }
        let ends_at = queue.add(rules, at, caller, op.cost);
        match standing {
            Standing::Good => {}
            Standing::ToldLater => queue.forfeits.retain(|forfeit| forfeit.caller != caller),
            Standing::Late => {
                let own = queue.forfeits.iter_mut().find(|forfeit| forfeit.caller == caller);
                own.into_iter().for_each(|forfeit| forfeit.was_late = true);
            }
            Standing::Behind => {
                queue.opens_to_forfeiters_at = now + rules.wide_spacing(limit.kind(), op.cost, ends_at, now);
            }
        }
        outcome.retry_at = at;
        outcome.reserved_at = if rules.is_kept { at } else { Time::ZERO };
        outcome.reset_at = outcome.reset_at.max(at);
        true
    }
}

/// The cost that must have room for a call of `cost`. A call that costs nothing needs none.
fn beside(held: u64, cost: u64) -> u64 {
    if cost == 0 { 0 } else { cost.saturating_add(held) }
}

/// The status of a limit of which `held` is kept for others. If that leaves too little for `cost`, there is room at
/// `ends_at`.
fn with_held(status: LimitStatus, held: u64, cost: u64, ends_at: Time) -> LimitStatus {
    let used = status.used.saturating_add(held);
    let retry_at = if status.retry_at.is_never() && cost <= status.limit { ends_at } else { status.retry_at };
    LimitStatus { used, remaining: status.limit.saturating_sub(used), retry_at, ..status }
}
