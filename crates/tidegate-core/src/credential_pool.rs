//! The order in which one process tries the credentials of one provider.
//!
//! A pool returns one credential at a time. Its entries about closed credentials are hints from the last reply of the
//! store or of the provider; the store decides. A credential is closed while it cools down, as the provider has asked, and
//! while it is full: a limit of ours has no room for it. It becomes available exactly when both are over. One with the
//! maximum number of calls in flight becomes available when one of them ends.

use alloc::vec::Vec;

use rand_core::Rng;
use thiserror::Error;

use crate::heap::IndexHeap;
use crate::time::MAX_CLOCK_LAG;
use crate::{LimitId, Span, Time};

/// The maximum number of credentials in one pool.
pub const MAX_CREDENTIALS: usize = 1024;

/// The time for which other calls wait for the reply to one that tries a credential.
const TRIAL_TIME: Span = Span::from_secs(5);

/// The way in which calls are distributed over the available credentials.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    /// In turn. A credential that becomes available again waits for its turn.
    #[default]
    RoundRobin,
    /// Any available credential, with equal chances.
    Random,
    /// The credential that was used longest ago. Credentials that were never used come first.
    LeastRecentlyUsed,
}

/// The error for a pool of no credential, or of more than [`MAX_CREDENTIALS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a pool holds 1 to {MAX_CREDENTIALS} credentials, not {found}")]
pub struct PoolSizeError {
    /// The number of credentials that were given.
    pub found: usize,
}

/// The credentials of one provider, by their index in its list. Each is closed (cooling or full), busy (with the maximum
/// number of calls in flight) or available. An index outside the list changes nothing.
///
/// Choosing takes constant time, every change O(log n). No change allocates once all were available and all closed.
#[derive(Clone, Debug)]
pub struct CredentialPool {
    balance: Balance,
    /// The last use of each credential, as a count of uses. 0 means never.
    last_used: Vec<u64>,
    /// The number of uses. By round robin: of turns, where turn t belongs to credential t mod n.
    use_count: u64,
    in_flight: Vec<u32>,
    max_in_flight: u32,
    /// True for the credentials that are tried again after a closing that was cut.
    on_trial: Vec<bool>,
    /// The available credentials, by the turn that they wait for or by their last use.
    available: IndexHeap<u64>,
    /// The closed credentials, by the time at which they are free again.
    closed: IndexHeap<Time>,
    closings: Vec<Closings>,
    /// The time of the last entry about a closed credential.
    updated_at: Time,
    /// The end of the last closing that was cut.
    reopened_at: Time,
}

/// The known times of a closed credential. Any of the times may be over.
#[derive(Clone, Copy, Debug, Default)]
struct Closings {
    /// The end of the cool-down that the provider has asked for.
    cooling_until: Time,
    /// The limit of ours without room for longest, and the time until which.
    full: Option<(LimitId, Time)>,
    /// The time until which the credential is certainly closed.
    certain_until: Time,
    /// True if the provider has asked for more.
    is_cut: bool,
    spent_quota: Option<(LimitId, Time)>,
}

impl CredentialPool {
    /// Creates a pool of available credentials without a limit of calls in flight.
    ///
    /// # Errors
    /// `credentials` is 0 or more than [`MAX_CREDENTIALS`].
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
            on_trial: alloc::vec![false; credentials],
            available: IndexHeap::default(),
            closed: IndexHeap::default(),
            closings: alloc::vec![Closings::default(); credentials],
            updated_at: Time::ZERO,
            reopened_at: Time::ZERO,
        };
        for credential in 0..credentials {
            pool.reopen(credential);
        }
        Ok(pool)
    }

    /// Limits the calls in flight of each credential. Those in flight continue. At 0, no credential is ever returned.
    #[must_use]
    pub fn with_max_in_flight(mut self, max_in_flight: u32) -> Self {
        self.max_in_flight = max_in_flight;
        for index in 0..self.last_used.len() as u32 {
            self.update_availability(index);
        }
        self
    }

    /// The number of credentials, in any state.
    pub fn size(&self) -> usize {
        self.last_used.len()
    }

    /// The credential to try next. `None` if all are closed or busy. It stays the same, except by [`Balance::Random`],
    /// until [`CredentialPool::record_use`] or an entry about a closed credential reports the result.
    pub fn next(&mut self, now: Time, rng: &mut impl Rng) -> Option<usize> {
        self.end_closings(now);
        let (_, credential) = match self.balance {
            Balance::RoundRobin | Balance::LeastRecentlyUsed => self.available.first(),
            Balance::Random => {
                // Favours none of at most 1024 credentials by more than one part in 2^22.
                let position = (u64::from(rng.next_u32()) * self.available.len() as u64) >> 32;
                self.available.nth(position as usize)
            }
        }?;
        Some(credential as usize)
    }

    /// The credential to try next, except those that are excluded.
    pub fn next_except(
        &mut self,
        mut is_excluded: impl FnMut(usize) -> bool,
        now: Time,
        rng: &mut impl Rng,
    ) -> Option<usize> {
        let next = self.next(now, rng)?;
        if !is_excluded(next) {
            return Some(next);
        }
        let available = (0..self.available.len()).filter_map(|place| self.available.nth(place));
        let others = available.filter(|(_, credential)| !is_excluded(*credential as usize));
        others.min().map(|(_, credential)| credential as usize)
    }

    /// True if this credential is available.
    pub fn is_free(&mut self, credential: usize, now: Time) -> bool {
        self.end_closings(now);
        self.checked_index(credential).is_some_and(|index| self.is_available(index))
    }

    /// True if any other credential isn't closed.
    pub fn has_other_open(&mut self, credential: usize, now: Time) -> bool {
        self.end_closings(now);
        let counts_itself = self.checked_index(credential).is_some_and(|index| self.closed.key(index).is_none());
        self.last_used.len() - self.closed.len() > usize::from(counts_itself)
    }

    /// True if a credential only waits for one of its calls to end, so that it may become available at any time.
    pub fn has_busy(&self) -> bool {
        self.available.len() + self.closed.len() < self.last_used.len()
    }

    /// True if this credential has the maximum number of calls in flight.
    pub fn is_busy(&self, credential: usize) -> bool {
        self.in_flight(credential) >= self.max_in_flight
    }

    /// The time at which this credential is free again; `None` if it isn't closed.
    pub fn closing_end(&self, credential: usize) -> Option<Time> {
        self.closed.key(self.checked_index(credential)?)
    }

    /// The number of calls in flight of a credential. 0 if the index is outside the list.
    pub fn in_flight(&self, credential: usize) -> u32 {
        self.in_flight.get(credential).copied().unwrap_or(0)
    }

    /// The end of this credential's cool-down, which may be over; `None` if it has none.
    pub fn cooling_until(&self, credential: usize) -> Option<Time> {
        self.closings.get(credential).map(|closings| closings.cooling_until).filter(|until| *until > Time::ZERO)
    }

    /// The limit of ours that has no room for this credential, and the time until which, which may be over. `None` if
    /// there is none, or the credential cools down for longer.
    pub fn full_until(&self, credential: usize) -> Option<(LimitId, Time)> {
        let closings = self.closings.get(credential)?;
        closings.full.filter(|(_, until)| *until > closings.cooling_until)
    }

    /// The time at which the first closed credential is free again. [`Time::NEVER`] if none is closed. If
    /// [`CredentialPool::next`] returns `None`, wait until then, or until [`CredentialPool::record_end`] returns true.
    pub fn next_rejoin_at(&self) -> Time {
        self.closed.first().map_or(Time::NEVER, |(rejoins, _)| rejoins)
    }

    /// The limit of ours that keeps the first credential closed that is free again; `None` if that one cools down.
    pub fn next_rejoin_limit(&self) -> Option<LimitId> {
        let (_, first) = self.closed.first()?;
        self.full_until(first as usize).map(|(limit, _)| limit)
    }

    /// Records an allowed call with this credential. It is in flight until [`CredentialPool::record_end`].
    pub fn record_use(&mut self, credential: usize) {
        let Some(index) = self.checked_index(credential) else { return };
        let turn = self.available.key(index).unwrap_or_else(|| self.next_turn(index));
        self.use_count = match self.balance {
            Balance::RoundRobin => self.use_count.max(turn + 1),
            Balance::Random | Balance::LeastRecentlyUsed => self.use_count + 1,
        };
        self.last_used[credential] = self.use_count;
        self.in_flight[credential] = self.in_flight[credential].saturating_add(1);
        // If it stays available, it waits for its next turn.
        if self.is_available(index) {
            self.available.set(index, self.sort_key(index));
        } else {
            self.available.remove(index);
        }
    }

    /// Records the end of a call with this credential. Returns true if it is now the only available one.
    pub fn record_end(&mut self, credential: usize) -> bool {
        let Some(index) = self.checked_index(credential) else { return false };
        let none_was_available = self.available.is_empty();
        self.in_flight[credential] = self.in_flight[credential].saturating_sub(1);
        self.update_availability(index);
        none_was_available && !self.available.is_empty()
    }

    /// Records that the provider refuses calls with the credential before `until`. Of several entries the longest counts,
    /// because each has another reason.
    pub fn set_cooling_until(&mut self, credential: usize, until: Time, now: Time) {
        if let Some(closings) = self.close(credential, until, now) {
            closings.cooling_until = closings.cooling_until.max(until);
        }
    }

    /// Records that the present closing of a credential ends before the provider has asked for. From its end on, the
    /// credential is on trial until [`record_trial_end`](Self::record_trial_end) tells that it was accepted.
    pub fn set_cut(&mut self, credential: usize) {
        if let Some(closings) = self.closings.get_mut(credential) {
            closings.is_cut = true;
        }
    }

    /// True if the credential is on trial: one call tries it, and the others wait for its reply, but not for long.
    #[inline]
    pub fn is_on_trial(&self, credential: usize) -> bool {
        self.on_trial.get(credential).is_some_and(|on_trial| *on_trial)
    }

    /// Records that a call tries a credential that is on trial. It is closed to others for a short time.
    pub fn record_trial(&mut self, credential: usize, now: Time) {
        self.close(credential, now + TRIAL_TIME, now);
    }

    /// Records the end of a call with the credential that was sent at this time. Returns true if that opens the credential:
    /// the call has tried it. If the provider has accepted it, it is on trial no longer.
    #[inline]
    pub fn record_trial_end(&mut self, credential: usize, sent_at: Time, is_accepted: bool) -> bool {
        let was_trial = self.is_on_trial(credential) && sent_at >= self.reopened_at;
        if was_trial {
            self.on_trial[credential] = !is_accepted;
            self.reopen(credential);
        }
        was_trial
    }

    /// Like [`CredentialPool::set_cooling_until`], for a time that can't become earlier, so that
    /// [`CredentialPool::all_closed_until`] may report it. [`Time::ZERO`], for an unknown time, changes nothing.
    pub fn set_closed_until(&mut self, credential: usize, until: Time, now: Time) {
        if until == Time::ZERO {
            return;
        }
        self.set_cooling_until(credential, until, now);
        if let Some(closings) = self.closings.get_mut(credential) {
            closings.certain_until = closings.certain_until.max(until);
        }
    }

    /// Records that this limit of ours has no room for the credential before `until`. Unless a request under way turns out
    /// unsent, it has none before `certain_until` either, which [`CredentialPool::all_closed_until`] may report:
    /// the time at which a quota, rate or window that counts calls has room again, or [`Time::ZERO`] if that is unknown.
    pub fn set_full_until(&mut self, credential: usize, limit: LimitId, until: Time, certain_until: Time, now: Time) {
        if let Some(closings) = self.close(credential, until, now) {
            if closings.full.is_none_or(|(_, known)| known < until) {
                closings.full = Some((limit, until));
            }
            closings.certain_until = closings.certain_until.max(certain_until);
        }
    }

    /// Closes the credential, at least until this time.
    fn close(&mut self, credential: usize, until: Time, now: Time) -> Option<&mut Closings> {
        let index = self.checked_index(credential)?;
        self.end_closings(now);
        let known_until = self.closed.key(index);
        self.closed.set(index, until.max(known_until.unwrap_or(until)));
        self.updated_at = now;
        self.update_availability(index);
        self.closings.get_mut(credential)
    }

    /// [Closes](CredentialPool::set_closed_until) the credential until exactly `at`, because the provider keeps room for a call
    /// from then on. Other entries are deleted: it knows best, and the store knows its own.
    pub fn set_reserved_at(&mut self, credential: usize, at: Time, now: Time) {
        let Some(index) = self.checked_index(credential) else { return };
        self.closed.remove(index);
        let spent_quota = self.closings[credential].spent_quota;
        self.closings[credential] = Closings { spent_quota, ..Closings::default() };
        self.set_closed_until(credential, at, now);
    }

    /// Records that the credential is refused because of this quota until its period ends.
    pub fn set_spent_quota(&mut self, credential: usize, quota: LimitId, until: Time) {
        if let Some(closings) = self.closings.get_mut(credential) {
            closings.spent_quota = Some((quota, until));
        }
    }

    /// A quota that is spent until `at`: the reason for a wait until then. Searches all credentials.
    pub fn quota_spent_until(&self, at: Time) -> Option<LimitId> {
        // The store's clock may differ from the clock of the entry.
        let ends_then = |until: Time| until <= at + MAX_CLOCK_LAG && at <= until + MAX_CLOCK_LAG;
        let mut spent = self.closings.iter().filter_map(|closings| closings.spent_quota);
        spent.find(|(_, until)| ends_then(*until)).map(|(quota, _)| quota)
    }

    /// The earliest certain end of a closing, if all credentials have one. A call with an earlier deadline needn't queue. Searches all credentials if none is available.
    pub fn all_closed_until(&mut self, now: Time) -> Option<Time> {
        self.end_closings(now);
        let certain = self.closings.iter().map(|closings| closings.certain_until);
        let first = if self.available.is_empty() { certain.min() } else { None };
        first.filter(|first| *first > now)
    }

    /// Makes every credential available that isn't busy.
    pub fn end_all_cooldowns(&mut self) {
        for credential in 0..self.size() {
            (self.closings[credential].is_cut, self.on_trial[credential]) = (false, false);
            self.reopen(credential);
        }
    }

    /// Opens the credential and deletes all entries about it.
    fn reopen(&mut self, credential: usize) {
        let Some(index) = self.checked_index(credential) else { return };
        let until = self.closed.key(index);
        self.closed.remove(index);
        if core::mem::take(&mut self.closings[credential]).is_cut {
            (self.on_trial[credential], self.reopened_at) = (true, until.unwrap_or(self.reopened_at));
        }
        self.update_availability(index);
    }

    /// Adds the credential to the available ones, where it may have a position already, or removes it from them.
    fn update_availability(&mut self, index: u32) {
        if !self.is_available(index) {
            self.available.remove(index);
        } else if self.available.key(index).is_none() {
            self.available.set(index, self.sort_key(index));
        }
    }

    fn is_available(&self, index: u32) -> bool {
        self.closed.key(index).is_none() && self.in_flight[index as usize] < self.max_in_flight
    }

    /// Ends the closings that are over. If the clock stepped back, all end, because their times may be far in the
    /// future now. One unnecessary attempt does no harm.
    fn end_closings(&mut self, now: Time) {
        let stepped_back = self.updated_at > now + MAX_CLOCK_LAG;
        while let Some((until, index)) = self.closed.first()
            && (until <= now || stepped_back)
        {
            self.reopen(index as usize);
            // A clock that has stepped back.
            self.reopened_at = self.reopened_at.min(now);
        }
    }

    fn checked_index(&self, credential: usize) -> Option<u32> {
        u32::try_from(credential).ok().filter(|_| credential < self.last_used.len())
    }

    fn sort_key(&self, index: u32) -> u64 {
        match self.balance {
            Balance::RoundRobin => self.next_turn(index),
            Balance::Random | Balance::LeastRecentlyUsed => self.last_used[index as usize],
        }
    }

    fn next_turn(&self, index: u32) -> u64 {
        let (size, index) = (self.last_used.len() as u64, u64::from(index));
        let turns_this_round = self.use_count % size;
        self.use_count
            + if index < turns_this_round { index + size - turns_this_round } else { index - turns_this_round }
    }
}

#[cfg(test)]
mod tests;
