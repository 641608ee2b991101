//! Reservations: instants at which a limit that many callers share keeps room for one of them. A refused caller gets the next
//! one as its own.
//!
//! Only [`KeyState`](crate::KeyState) changes a queue. It keeps each reservation until its caller returns or forfeits it.
//!
//! A limit is never exceeded, whenever within its grace each caller returns:
//!
//! - A rate is charged for a reservation at its instant. Until the caller returns, the charge keeps its part of the burst
//!   from being used by others. A call without a reservation passes if it also leaves room for the next one. Then all
//!   later ones have room, because they are at least as far apart as the rate's calls, and because no more of them wait
//!   for their callers than the burst can hold.
//! - In a window, a reservation counts as made at the end of its grace. The share of the limit bounds how many of them the
//!   window holds. Calls without one have the rest, or more as long as fewer are reserved.
//! - A quota keeps the room of reservations in the period of their instants.
//!
//! A caller that doesn't return forfeits. Until a call of it is admitted that costs as much, it gets reservations only
//! seldom: all callers with a forfeit together take one part in [`FORFEIT_HORIZONS`] of the share. So what callers that
//! never come set aside is bounded, and a caller that many clients share, such as an address, isn't barred for one of them.

mod reserved_usage;

use alloc::vec::Vec;

pub use reserved_usage::ReservedUsage;
use thiserror::Error;

use crate::quota::Period;
use crate::rate::ArrivalTime;
use crate::{LimitKind, PER_MILLE, Rate, Span, Time};

/// The largest number of reservations and forfeits of one key. At the bound, the oldest forfeits are forgotten;
/// without any, refused callers get no reservation.
pub const MAX_RECORDS: usize = 1024;
/// The number of horizons for which a forfeit is remembered, and the part of the share that all callers with a forfeit have.
///
/// A caller that never comes takes at most two reservations in that time, because one is excused as late. So these take at most
/// two horizons of 34, and those that ask again one part of 33: together less than one in eleven.
pub const FORFEIT_HORIZONS: u64 = 33;
/// The time after the grace in which a caller may come without disadvantage, once while its forfeit is remembered: it may know
/// only whole seconds of waiting.
pub const LATENESS: Span = Span::from_secs(1);
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

    /// The time for which a forfeit is remembered.
    pub fn forfeit_time(&self) -> Span {
        self.horizon.times(FORFEIT_HORIZONS)
    }

    /// The part of a limit that may be set aside.
    pub fn part_of(&self, limit: u64) -> u64 {
        (u128::from(limit) * u128::from(self.share) / u128::from(PER_MILLE)) as u64
    }

    /// The part of a burst that may be kept for reservations at once. Others keep a call of it, without which they would have
    /// nothing of the rate.
    pub fn part_of_burst(&self, burst: u64) -> u64 {
        if self.share < PER_MILLE { burst.saturating_sub(1) } else { burst }
    }

    /// The time from now in which callers that are behind get no other reservation, after one of them got one of `cost` until
    /// `ends_at`: the time in which that is their part of what is set aside.
    fn wide_spacing(&self, kind: &LimitKind, cost: u64, ends_at: Time, now: Time) -> Span {
        if let LimitKind::Rate(rate) = kind {
            return self.spacing(rate, cost).times(FORFEIT_HORIZONS);
        }
        let (times, part) = (ends_at.since(now).times(FORFEIT_HORIZONS), self.part_of(kind.capacity()).max(1));
        // A whole number for each unit of the cost, so that all stores find the same.
        Span::from_micros(times.as_micros().div_ceil(part)).times(cost)
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
    /// The end of the grace. No time is kept after `at` if callers are only told different instants.
    pub ends_at: Time,
    /// The caller's [key](crate::batch::BatchContext::caller). 0 once it has returned: a window still counts its call.
    pub caller: u64,
    /// The cost that is set aside.
    pub cost: u64,
    /// True if the caller was admitted before the instant. It doesn't forfeit if it doesn't return.
    pub is_excused: bool,
}

/// A caller that didn't return in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forfeit {
    /// The end of its reservation.
    pub ended_at: Time,
    /// The caller's key.
    pub caller: u64,
    /// The largest cost that it has forfeited. An admitted call of this cost ends the forfeit.
    pub cost: u64,
    /// True if it has had another reservation since, because it came just after its grace.
    pub was_late: bool,
}

/// The right of a refused caller to a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It has no forfeit.
    Good,
    /// It came just after its grace, for the first time.
    Late,
    /// It was told a later instant, by a node that counted by itself.
    ToldLater,
    /// It has a forfeit, and is behind callers without one.
    Behind,
}

/// The reservations of one key, and the callers that forfeited theirs.
#[derive(Clone, Debug, Default)]
pub struct ReservationQueue {
    /// In the order of their instants and of their ends.
    pub reservations: Vec<Reservation>,
    /// In the order in which they ended. A caller has at most one.
    pub forfeits: Vec<Forfeit>,
    /// The time before which no caller that is behind gets a reservation.
    pub opens_to_forfeiters_at: Time,
    /// The instant of the last reservation that was made.
    pub last_at: Time,
    /// The instant of the last reservation that a rate is charged for.
    pub charged_until: Time,
    /// The number of reservations before those that a rate's burst can hold at once.
    pub passed: usize,
    /// The arrival time of a rate if those come as late as they may.
    pub passed_until: ArrivalTime,
}

impl ReservationQueue {
    /// The number of bytes of heap memory.
    pub fn heap_bytes(&self) -> usize {
        self.reservations.capacity() * size_of::<Reservation>() + self.forfeits.capacity() * size_of::<Forfeit>()
    }

    fn of_caller(&self, caller: u64) -> Option<usize> {
        self.reservations.iter().position(|reservation| reservation.caller == caller)
    }

    fn standing(&self, rules: &ReservationRules, presented: Time, caller: u64, now: Time) -> Standing {
        let forfeit = self.forfeits.iter().find(|forfeit| forfeit.caller == caller);
        match forfeit.filter(|_| rules.is_kept) {
            None => Standing::Good,
            Some(forfeit) if presented > forfeit.ended_at && presented <= now => Standing::ToldLater,
            Some(forfeit) if forfeit.ended_at + LATENESS > now && !forfeit.was_late => Standing::Late,
            Some(_) => Standing::Behind,
        }
    }

    /// Ends the forfeit of a caller that was just admitted, unless the call costs less.
    fn end_forfeits(&mut self, caller: u64, cost: u64) {
        self.forfeits.retain(|forfeit| forfeit.caller != caller || cost == 0 || cost < forfeit.cost);
    }

    /// Forgets the oldest forfeit if there is no room for another record. Returns false if there is none to forget.
    fn make_record_room(&mut self) -> bool {
        if self.reservations.len() + self.forfeits.len() < MAX_RECORDS {
            return true;
        }
        if self.forfeits.is_empty() {
            return false;
        }
        self.forfeits.remove(0);
        true
    }

    /// Forgets reservations of rules that keep room if these don't, and the other way round. Forgets what is more
    /// than two horizons ahead, because the clock was set back or the horizon became shorter.
    fn refresh(&mut self, rules: &ReservationRules, now: Time) {
        if self.reservations.first().is_some_and(|first| (first.ends_at > first.at) != rules.is_kept) {
            self.reservations.clear();
            self.forget_passed();
        }
        let latest = now + rules.horizon.times(2);
        if self.last_at > latest {
            self.reservations.truncate(self.reservations.partition_point(|reservation| reservation.at <= latest));
            self.last_at = self.reservations.last().map_or(now, |last| last.at);
            self.charged_until = self.charged_until.min(self.last_at);
            self.forget_passed();
        }
        if self.forfeits.last().is_some_and(|forfeit| forfeit.ended_at > latest) {
            self.forfeits.clear();
        }
        let ended = self.forfeits.partition_point(|forfeit| forfeit.ended_at + rules.forfeit_time() <= now);
        self.forfeits.drain(..ended);
        if self.forfeits.is_empty() {
            self.opens_to_forfeiters_at = Time::ZERO;
        }
    }

    fn forget_passed(&mut self) {
        (self.passed, self.passed_until) = (0, ArrivalTime::default());
    }

    /// The values of [`Self::passed`] and [`Self::passed_until`] before another reservation of `cost`, and the part of a burst's
    /// `part` that is free beside it and those that aren't passed.
    fn passed_before(&self, rate: &Rate, part: u64, cost: u64) -> (usize, ArrivalTime, u64) {
        let (mut passed, mut until) = (self.passed, self.passed_until);
        let mut together = total_cost(&self.reservations[passed..]).saturating_add(cost);
        while let Some(earlier) = self.reservations.get(passed).filter(|_| together > part) {
            until = rate.charge_at(until, earlier.cost, earlier.ends_at);
            together -= earlier.cost;
            passed += 1;
        }
        (passed, until, part.saturating_sub(together))
    }

    fn remove(&mut self, index: usize) -> Reservation {
        if index < self.passed {
            self.passed -= 1;
            if self.passed == 0 {
                self.forget_passed();
            }
        }
        self.reservations.remove(index)
    }

    /// Adds a reservation. Returns its end.
    fn add(&mut self, rules: &ReservationRules, at: Time, caller: u64, cost: u64) -> Time {
        let ends_at = if rules.is_kept { at + rules.grace } else { at };
        let ends_at = self.reservations.last().map_or(ends_at, |last| last.ends_at.max(ends_at));
        self.reservations.push(Reservation { at, ends_at, caller, cost, is_excused: false });
        self.last_at = at;
        ends_at
    }

    /// Removes the reservation at this index, whose grace has ended.
    fn forfeit(&mut self, index: usize) {
        let Reservation { at, ends_at, caller, cost, is_excused } = self.remove(index);
        if ends_at > at && !is_excused {
            let earlier = self.forfeits.iter().position(|forfeit| forfeit.caller == caller);
            let earlier = earlier.map(|earlier| self.forfeits.remove(earlier));
            let (most, was_late) = earlier.map_or((0, false), |earlier| (earlier.cost, earlier.was_late));
            self.forfeits.push(Forfeit { ended_at: ends_at, caller, cost: cost.max(most), was_late });
        }
    }

    /// Removes what has ended by now, up to `counted` after the grace for the calls that still count.
    fn remove_ended(&mut self, counted: Span, now: Time) {
        let mut index = 0;
        while let Some(&Reservation { ends_at, caller, .. }) = self.reservations.get(index)
            && ends_at <= now
        {
            match caller {
                0 if ends_at + counted > now => index += 1,
                0 => drop(self.remove(index)),
                _ => self.forfeit(index),
            }
        }
    }

    /// The cost of the reservations whose instants a rate has reached.
    fn held_cost(&self) -> u64 {
        total_cost(self.reservations.iter().take_while(|reservation| reservation.at <= self.charged_until))
    }

    /// The cost of the reservations that may be used in this period.
    fn cost_in(&self, period: Period) -> u64 {
        let is_within = |reservation: &&Reservation| reservation.at < period.end && reservation.ends_at > period.start;
        total_cost(self.reservations.iter().filter(is_within))
    }

    /// The cost that calls without a reservation leave free in a window: of all reservations, but not above `part`, unless
    /// more of them may be used within one window because they were given by other rules.
    fn cost_in_window(&self, part: u64, window: Span) -> u64 {
        let total = total_cost(&self.reservations);
        if total <= part {
            return total;
        }
        let (mut next, mut together, mut most) = (0, 0_u64, part);
        for first in &self.reservations {
            while let Some(later) = self.reservations.get(next).filter(|later| later.at < first.ends_at + window) {
                together = together.saturating_add(later.cost);
                next += 1;
            }
            most = most.max(together);
            together = together.saturating_sub(first.cost);
        }
        most.min(total)
    }

    fn upcoming(&self, now: Time) -> Option<&Reservation> {
        let first = self.reservations.partition_point(|reservation| reservation.at <= now);
        self.reservations.get(first)
    }
}

fn total_cost<'a>(reservations: impl IntoIterator<Item = &'a Reservation>) -> u64 {
    reservations.into_iter().map(|reservation| reservation.cost).fold(0, u64::saturating_add)
}
