//! In which order the credentials of one provider are tried by one process.
//!
//! A pool names one credential at a time. Its notes on who is cooling down are hints, taken from what the store or the
//! provider said last; the store decides. A credential that is noted to be cooling isn't named before its moment, and
//! rejoins exactly then, even while others are good. One that has as many calls in flight as it may isn't named either, and
//! rejoins when one of them ends: that the pool knows itself.

use alloc::vec::Vec;
use core::fmt;

use rand_core::Rng;

use crate::heap::IndexHeap;
use crate::time::MAX_CLOCK_LAG;
use crate::{LimitId, Time};

/// The most credentials that one pool holds.
pub const MAX_CREDENTIALS: usize = 1024;

/// How calls are spread over the credentials that are good.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    /// In turn. Who rejoins waits for its turn.
    #[default]
    RoundRobin,
    /// Any, with equal chances.
    Random,
    /// The one that was used longest ago; those never used first.
    LeastRecentlyUsed,
}

/// A pool of no credential, or of more than [`MAX_CREDENTIALS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSizeError {
    /// How many were given.
    pub found: usize,
}

impl fmt::Display for PoolSizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a pool holds 1 to {MAX_CREDENTIALS} credentials, not {}", self.found)
    }
}

impl core::error::Error for PoolSizeError {}

/// The credentials of one provider, by their place in its list: each is cooling down, busy with as many calls as it may
/// have in flight, or good. A number that is no place in the list changes nothing.
///
/// Naming one takes constant time, every change O(log n); nothing is allocated after the first time that all were good
/// and all were cooling.
#[derive(Clone, Debug)]
pub struct CredentialPool {
    balance: Balance,
    /// When each was used last, as a count of uses; 0 is never.
    last_used: Vec<u64>,
    /// Round robin: how many turns have been had, turn t being that of credential t mod n. Else how many uses.
    use_count: u64,
    /// How many calls each has in flight.
    in_flight: Vec<u32>,
    max_in_flight: u32,
    /// The good ones, by the turn that they wait for or by their last use.
    available: IndexHeap<u64>,
    /// The cooling ones, by when they rejoin.
    cooling: IndexHeap<Time>,
    /// Until when each is closed whatever happens.
    closed_until: Vec<Time>,
    /// The quota of each that is spent, and until when.
    spent_quotas: Vec<Option<(LimitId, Time)>>,
    /// When the last note was made.
    updated_at: Time,
}

impl CredentialPool {
    /// A pool of so many credentials, all good and never used, with any number of calls in flight.
    ///
    /// # Errors
    /// None, or more than [`MAX_CREDENTIALS`].
    pub fn new(balance: Balance, credentials: usize) -> Result<Self, PoolSizeError> {
        if credentials == 0 || credentials > MAX_CREDENTIALS {
            return Err(PoolSizeError { found: credentials });
        }
        let mut pool = Self {
            balance,
            last_used: alloc::vec![0; credentials],
            use_count: 0,
            in_flight: alloc::vec![0; credentials],
            max_in_flight: u32::MAX,
            available: IndexHeap::default(),
            cooling: IndexHeap::default(),
            closed_until: alloc::vec![Time::ZERO; credentials],
            spent_quotas: alloc::vec![None; credentials],
            updated_at: Time::ZERO,
        };
        for credential in 0..credentials {
            pool.clear_cooling(credential);
        }
        Ok(pool)
    }

    /// Bounds how many calls each credential may have in flight. Those that are, stay; at 0 none is ever named.
    #[must_use]
    pub fn with_max_in_flight(mut self, max_in_flight: u32) -> Self {
        self.max_in_flight = max_in_flight;
        for index in 0..self.last_used.len() as u32 {
            self.update_availability(index);
        }
        self
    }

    /// How many credentials there are, good or not.
    pub fn size(&self) -> usize {
        self.last_used.len()
    }

    /// The credential to ask for next; `None` if all are cooling or busy. Naming one changes nothing: it is named
    /// again until [`CredentialPool::record_use`] or [`CredentialPool::set_cooling_until`] says what came of it, but that
    /// [`Balance::Random`] draws anew. So to ask until there is nobody left, note each refusal and call again: at most
    /// as often as there are credentials.
    pub fn next(&mut self, now: Time, rng: &mut impl Rng) -> Option<usize> {
        self.end_cooldowns(now);
        let (_, credential) = match self.balance {
            Balance::RoundRobin | Balance::LeastRecentlyUsed => self.available.first(),
            Balance::Random => {
                // Multiplying and shifting favours no place by more than one part in 2^22.
                let position = (u64::from(rng.next_u32()) * self.available.len() as u64) >> 32;
                self.available.nth(position as usize)
            }
        }?;
        Some(credential as usize)
    }

    /// Whether a credential besides this one isn't cooling.
    pub fn has_other_not_cooling(&mut self, credential: usize, now: Time) -> bool {
        self.end_cooldowns(now);
        let counts_itself = self.checked_index(credential).is_some_and(|index| self.cooling.key(index).is_none());
        self.last_used.len() - self.cooling.len() > usize::from(counts_itself)
    }

    /// Whether there is a credential that only waits for one of its calls to end: [`CredentialPool::next`] may name it at any moment.
    pub fn has_busy(&self) -> bool {
        self.available.len() + self.cooling.len() < self.last_used.len()
    }

    /// How many calls a credential has in flight.
    pub fn in_flight(&self, credential: usize) -> u32 {
        self.in_flight.get(credential).copied().unwrap_or(0)
    }

    /// When the first of those that cool down rejoins; [`Time::NEVER`] if none does. Where [`CredentialPool::next`] names nobody,
    /// this is how long to wait, unless a call ends before and [`CredentialPool::record_end`] says that it was waited for.
    pub fn next_rejoin_at(&self) -> Time {
        self.cooling.first().map_or(Time::NEVER, |(rejoins, _)| rejoins)
    }

    /// A call was let through with this credential: it is in flight until [`CredentialPool::record_end`].
    pub fn record_use(&mut self, credential: usize) {
        let Some(index) = self.checked_index(credential) else { return };
        let turn = self.available.key(index).unwrap_or_else(|| self.next_turn(index));
        self.use_count = match self.balance {
            Balance::RoundRobin => self.use_count.max(turn + 1),
            Balance::Random | Balance::LeastRecentlyUsed => self.use_count + 1,
        };
        self.last_used[credential] = self.use_count;
        self.in_flight[credential] = self.in_flight[credential].saturating_add(1);
        // It waits for its next turn, if it stays good.
        if self.is_available(index) {
            self.available.set(index, self.sort_key(index));
        } else {
            self.available.remove(index);
        }
    }

    /// A call with this credential is no longer in flight. Whether [`CredentialPool::next`] named nobody before, and now may.
    pub fn record_end(&mut self, credential: usize) -> bool {
        let Some(index) = self.checked_index(credential) else { return false };
        let none_was_available = self.available.is_empty();
        self.in_flight[credential] = self.in_flight[credential].saturating_sub(1);
        self.update_availability(index);
        none_was_available && !self.available.is_empty()
    }

    /// Notes at `now` that the credential won't be let through before `until`, whether it is cooling down or a limit of
    /// its own is full. Of several notes the longest counts: each tells of something else.
    pub fn set_cooling_until(&mut self, credential: usize, until: Time, now: Time) {
        let Some(index) = self.checked_index(credential) else { return };
        self.end_cooldowns(now);
        let known_until = self.cooling.key(index);
        self.cooling.set(index, until.max(known_until.unwrap_or(until)));
        self.updated_at = now;
        self.update_availability(index);
    }

    /// [`CredentialPool::set_cooling_until`] for a moment that can't come earlier: the end of a closing that the provider asked for, or of
    /// a quota's period. So [`CredentialPool::all_closed_until`] may say it to calls that haven't queued yet.
    pub fn set_closed_until(&mut self, credential: usize, until: Time, now: Time) {
        self.set_cooling_until(credential, until, now);
        if let Some(closed) = self.closed_until.get_mut(credential) {
            *closed = until.max(*closed);
        }
    }

    /// Notes that it is for this quota, whose period ends then, that a credential isn't let through before `until`.
    pub fn set_spent_quota(&mut self, credential: usize, quota: LimitId, until: Time) {
        if let Some(spent) = self.spent_quotas.get_mut(credential) {
            *spent = Some((quota, until));
        }
    }

    /// The quota of some credential that is spent until this very moment, as far as it was noted: why nobody goes before,
    /// if that is when the first rejoins. Looks through all of them.
    pub fn quota_spent_until(&self, at: Time) -> Option<LimitId> {
        self.spent_quotas.iter().flatten().find(|(_, until)| *until == at).map(|(quota, _)| *quota)
    }

    /// The first moment at which any credential may rejoin, if all are known to be closed ([`CredentialPool::set_closed_until`]): a call
    /// whose deadline comes before it needn't queue. Looks through all of them where none is good.
    pub fn all_closed_until(&mut self, now: Time) -> Option<Time> {
        self.end_cooldowns(now);
        let first = if self.available.is_empty() { self.closed_until.iter().copied().min() } else { None };
        first.filter(|first| *first > now)
    }

    /// The credential doesn't cool down, whatever was noted before.
    fn clear_cooling(&mut self, credential: usize) {
        let Some(index) = self.checked_index(credential) else { return };
        self.cooling.remove(index);
        self.closed_until[credential] = Time::ZERO;
        self.spent_quotas[credential] = None;
        self.update_availability(index);
    }

    /// Puts it among the good ones, where it keeps the place that it may have, or out of them.
    fn update_availability(&mut self, index: u32) {
        if !self.is_available(index) {
            self.available.remove(index);
        } else if self.available.key(index).is_none() {
            self.available.set(index, self.sort_key(index));
        }
    }

    fn is_available(&self, index: u32) -> bool {
        self.cooling.key(index).is_none() && self.in_flight[index as usize] < self.max_in_flight
    }

    /// Lets those rejoin whose moment has come. A clock that has stepped back makes all notes void: their moments may
    /// be far off now, and asking once too often does no harm.
    fn end_cooldowns(&mut self, now: Time) {
        let stepped_back = self.updated_at > now + MAX_CLOCK_LAG;
        while let Some((until, index)) = self.cooling.first()
            && (until <= now || stepped_back)
        {
            self.clear_cooling(index as usize);
        }
    }

    fn checked_index(&self, credential: usize) -> Option<u32> {
        u32::try_from(credential).ok().filter(|_| credential < self.last_used.len())
    }

    /// What a good credential is ordered by.
    fn sort_key(&self, index: u32) -> u64 {
        match self.balance {
            Balance::RoundRobin => self.next_turn(index),
            Balance::Random | Balance::LeastRecentlyUsed => self.last_used[index as usize],
        }
    }

    /// The credential's first turn that hasn't been had.
    fn next_turn(&self, index: u32) -> u64 {
        let (size, index) = (self.last_used.len() as u64, u64::from(index));
        let turns_this_round = self.use_count % size;
        self.use_count
            + if index < turns_this_round { index + size - turns_this_round } else { index - turns_this_round }
    }
}

#[cfg(test)]
mod tests;
