//! In which order the credentials of one provider are tried by one process.
//!
//! A pool names one credential at a time. Its notes on who is cooling down are hints, taken from what the store or the
//! provider said last; the store decides. A credential that is noted to be cooling isn't named before its moment, and
//! rejoins exactly then, even while others are good.

use alloc::vec::Vec;
use core::fmt;

use rand_core::Rng;

use crate::heap::IndexHeap;
use crate::time::OVERTAKEN;
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
pub struct PoolSize {
    /// How many were given.
    pub found: usize,
}

impl fmt::Display for PoolSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a pool holds 1 to {MAX_CREDENTIALS} credentials, not {}", self.found)
    }
}

impl core::error::Error for PoolSize {}

/// The credentials of one provider, by their place in its list: each is good or cooling down. A number that is no place
/// in the list changes nothing.
///
/// Naming one takes constant time, every change O(log n); nothing is allocated after the first time that all were good
/// and all were cooling.
#[derive(Clone, Debug)]
pub struct Pool {
    balance: Balance,
    /// When each was used last, as a count of uses; 0 is never.
    used: Vec<u64>,
    /// Round robin: how many turns have been had, turn t being that of credential t mod n. Else how many uses.
    count: u64,
    /// The good ones, by the turn that they wait for or by their last use.
    good: IndexHeap<u64>,
    /// The cooling ones, by when they rejoin.
    cooling: IndexHeap<Time>,
    /// Until when each is closed whatever happens.
    closed: Vec<Time>,
    /// The quota of each that is spent, and until when.
    spent: Vec<Option<(LimitId, Time)>>,
    /// When the last note was made.
    noted: Time,
}

impl Pool {
    /// A pool of so many credentials, all good and never used.
    ///
    /// # Errors
    /// None, or more than [`MAX_CREDENTIALS`].
    pub fn new(balance: Balance, credentials: usize) -> Result<Self, PoolSize> {
        if credentials == 0 || credentials > MAX_CREDENTIALS {
            return Err(PoolSize { found: credentials });
        }
        let mut pool = Self {
            balance,
            used: alloc::vec![0; credentials],
            count: 0,
            good: IndexHeap::default(),
            cooling: IndexHeap::default(),
            closed: alloc::vec![Time::ZERO; credentials],
            spent: alloc::vec![None; credentials],
            noted: Time::ZERO,
        };
        for credential in 0..credentials {
            pool.enable(credential);
        }
        Ok(pool)
    }

    /// How many credentials there are, good or not.
    pub fn size(&self) -> usize {
        self.used.len()
    }

    /// The credential to ask for next; `None` if all are cooling. Naming one changes nothing: it is named
    /// again until [`Pool::used`] or [`Pool::not_before`] says what came of it, but that
    /// [`Balance::Random`] draws anew. So to ask until there is nobody left, note each refusal and call again: at most
    /// as often as there are credentials.
    pub fn next(&mut self, now: Time, rng: &mut impl Rng) -> Option<usize> {
        self.rejoin(now);
        let (_, credential) = match self.balance {
            Balance::RoundRobin | Balance::LeastRecentlyUsed => self.good.first(),
            Balance::Random => {
                // Multiplying and shifting favours no place by more than one part in 2^22.
                let place = (u64::from(rng.next_u32()) * self.good.len() as u64) >> 32;
                self.good.nth(place as usize)
            }
        }?;
        Some(credential as usize)
    }

    /// Whether a credential besides this one is good.
    pub fn has_another(&mut self, credential: usize, now: Time) -> bool {
        self.rejoin(now);
        let itself = self.index(credential).is_some_and(|index| self.good.key(index).is_some());
        self.good.len() > usize::from(itself)
    }

    /// When the first of those that cool down rejoins; [`Time::NEVER`] if none does. Where [`Pool::next`] names nobody,
    /// this is how long to wait.
    pub fn earliest(&self) -> Time {
        self.cooling.first().map_or(Time::NEVER, |(rejoins, _)| rejoins)
    }

    /// A call was let through with this credential.
    pub fn used(&mut self, credential: usize) {
        let Some(index) = self.index(credential) else { return };
        let turn = self.good.key(index).unwrap_or_else(|| self.turn(index));
        self.count = match self.balance {
            Balance::RoundRobin => self.count.max(turn + 1),
            Balance::Random | Balance::LeastRecentlyUsed => self.count + 1,
        };
        self.used[credential] = self.count;
        if self.good.key(index).is_some() {
            self.good.set(index, self.rank(index));
        }
    }

    /// Notes at `now` that the credential won't be let through before `until`, whether it is cooling down or a limit of
    /// its own is full. Of several notes the longest counts: each tells of something else.
    pub fn not_before(&mut self, credential: usize, until: Time, now: Time) {
        let Some(index) = self.index(credential) else { return };
        self.rejoin(now);
        let noted = self.cooling.key(index);
        if self.good.remove(index) || noted.is_some() {
            self.cooling.set(index, until.max(noted.unwrap_or(until)));
            self.noted = now;
        }
    }

    /// [`Pool::not_before`] for a moment that can't come earlier: the end of a closing that the provider asked for, or of
    /// a quota's period. So [`Pool::all_closed_until`] may say it to calls that haven't queued yet.
    pub fn closed_until(&mut self, credential: usize, until: Time, now: Time) {
        self.not_before(credential, until, now);
        if let Some(closed) = self.closed.get_mut(credential) {
            *closed = until.max(*closed);
        }
    }

    /// Notes that it is for this quota, whose period ends then, that a credential isn't let through before `until`.
    pub fn spent_until(&mut self, credential: usize, quota: LimitId, until: Time) {
        if let Some(spent) = self.spent.get_mut(credential) {
            *spent = Some((quota, until));
        }
    }

    /// The quota of some credential that is spent until this very moment, as far as it was noted: why nobody goes before,
    /// if that is when the first rejoins. Looks through all of them.
    pub fn quota_that_ends(&self, at: Time) -> Option<LimitId> {
        self.spent.iter().flatten().find(|(_, until)| *until == at).map(|(quota, _)| *quota)
    }

    /// The first moment at which any credential may rejoin, if all are known to be closed ([`Pool::closed_until`]): a call
    /// whose deadline comes before it needn't queue. Looks through all of them where none is good.
    pub fn all_closed_until(&mut self, now: Time) -> Option<Time> {
        self.rejoin(now);
        let first = if self.good.is_empty() { self.closed.iter().copied().min() } else { None };
        first.filter(|first| *first > now)
    }

    /// The credential is good, whatever was noted before.
    fn enable(&mut self, credential: usize) {
        let Some(index) = self.index(credential) else { return };
        self.cooling.remove(index);
        self.closed[credential] = Time::ZERO;
        self.spent[credential] = None;
        if self.good.key(index).is_none() {
            self.good.set(index, self.rank(index));
        }
    }

    /// Lets those rejoin whose moment has come. A clock that has stepped back makes all notes void: their moments may
    /// be far off now, and asking once too often does no harm.
    fn rejoin(&mut self, now: Time) {
        let stepped_back = self.noted > now + OVERTAKEN;
        while let Some((until, index)) = self.cooling.first()
            && (until <= now || stepped_back)
        {
            self.enable(index as usize);
        }
    }

    fn index(&self, credential: usize) -> Option<u32> {
        u32::try_from(credential).ok().filter(|_| credential < self.used.len())
    }

    /// What a good credential is ordered by.
    fn rank(&self, index: u32) -> u64 {
        match self.balance {
            Balance::RoundRobin => self.turn(index),
            Balance::Random | Balance::LeastRecentlyUsed => self.used[index as usize],
        }
    }

    /// The credential's first turn that hasn't been had.
    fn turn(&self, index: u32) -> u64 {
        let size = self.used.len() as u64;
        self.count + (u64::from(index) + size - self.count % size) % size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Span;
    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    fn at(millis: u64) -> Time {
        Time::from_secs(1_700_000_000) + Span::from_millis(millis)
    }

    struct Caller {
        pool: Pool,
        rng: SmallRng,
    }

    impl Caller {
        fn new(balance: Balance, credentials: usize) -> Self {
            Self { pool: Pool::new(balance, credentials).unwrap(), rng: SmallRng::seed_from_u64(11) }
        }

        fn next(&mut self, millis: u64) -> Option<usize> {
            self.pool.next(at(millis), &mut self.rng)
        }

        /// A call at some moment: the credential that it used.
        fn call(&mut self, millis: u64) -> Option<usize> {
            let credential = self.next(millis)?;
            self.pool.used(credential);
            Some(credential)
        }

        /// Calls a millisecond apart, as letters.
        fn calls(&mut self, millis: core::ops::Range<u64>) -> std::string::String {
            millis.filter_map(|millis| self.call(millis)).map(|credential| (b'A' + credential as u8) as char).collect()
        }
    }

    #[test]
    fn round_robin_goes_round() {
        let mut caller = Caller::new(Balance::RoundRobin, 3);
        assert_eq!(caller.calls(0..6), "ABCABC");
        assert_eq!(caller.next(6), caller.next(6), "naming one takes no turn");
    }

    #[test]
    fn round_robin_skips_who_cools_down_until_its_exact_moment() {
        let mut caller = Caller::new(Balance::RoundRobin, 3);
        caller.pool.not_before(1, at(5), at(0));
        assert_eq!(caller.calls(0..4), "ACAC");
        let mut early = caller.pool.clone();
        assert_eq!(caller.calls(4..10), "ABCABC");
        for _ in 0..2 {
            let named = early.next(at(5) - Span::from_micros(1), &mut caller.rng).unwrap();
            assert_ne!(named, 1, "a microsecond early");
            early.used(named);
        }
        // Rejoined, it has its turn where it stands in the list, while others are good all along.
        let mut caller = Caller::new(Balance::RoundRobin, 4);
        caller.pool.not_before(1, at(2), at(0));
        assert_eq!(caller.calls(0..8), "ACDABCDA");
    }

    #[test]
    fn a_refused_candidate_makes_room_for_the_next() {
        let mut caller = Caller::new(Balance::RoundRobin, 3);
        assert_eq!(caller.next(0), Some(0));
        caller.pool.not_before(0, at(100), at(0));
        assert_eq!(caller.next(0), Some(1));
        caller.pool.not_before(1, at(50), at(0));
        assert_eq!(caller.call(0), Some(2));
        caller.pool.not_before(2, at(200), at(0));
        assert_eq!((caller.next(0), caller.pool.earliest()), (None, at(50)));
        assert_eq!(caller.calls(50..52), "BB");
        caller.pool.not_before(1, at(300), at(52));
        caller.pool.not_before(1, at(60), at(53));
        assert_eq!(caller.pool.earliest(), at(100), "a later note shortens none");
        for credential in [0, 2] {
            caller.pool.not_before(credential, at(350), at(54));
        }
        assert_eq!(caller.pool.earliest(), at(300), "and lengthens the others");
    }

    #[test]
    fn a_turn_that_was_not_taken_is_not_lost() {
        let mut caller = Caller::new(Balance::RoundRobin, 3);
        caller.pool.used(1);
        assert_eq!(caller.calls(0..7), "ACABCAB");
        // Nor is one that was taken had again.
        let mut caller = Caller::new(Balance::RoundRobin, 3);
        caller.pool.used(1);
        caller.pool.enable(0);
        assert_eq!(caller.call(0), Some(0));
        caller.pool.not_before(1, at(1), at(0));
        assert_eq!(caller.calls(1..7), "CABCAB");
        let mut caller = Caller::new(Balance::LeastRecentlyUsed, 3);
        caller.pool.used(1);
        assert_eq!(caller.calls(0..7), "ACBACBA");
    }

    #[test]
    fn least_recently_used_picks_who_was_unused_longest() {
        let mut caller = Caller::new(Balance::LeastRecentlyUsed, 4);
        for credential in [3, 1, 0, 2, 0, 3] {
            caller.pool.used(credential);
        }
        assert_eq!(caller.calls(0..5), "BCADB");
        // C cools down and rejoins at 8: of all, it was used longest ago.
        caller.pool.not_before(2, at(8), at(5));
        assert_eq!(caller.calls(5..8), "ADB");
        assert_eq!(caller.calls(8..12), "CADB");
    }

    /// χ² with 9 degrees of freedom is above 27.88 once in a thousand draws of a fair die.
    #[test]
    fn random_is_uniform_over_the_good_ones() {
        let mut caller = Caller::new(Balance::Random, 12);
        caller.pool.not_before(3, Time::NEVER, at(0));
        caller.pool.not_before(7, at(1), at(0));
        let mut counts = [0_u32; 12];
        // Two draws in a row are as independent as two credentials are: pairs are counted, too.
        let (mut pairs, mut before) = ([0_u32; 12 * 12], None);
        for _ in 0..100_000 {
            let credential = caller.call(0).unwrap();
            counts[credential] += 1;
            if let Some(before) = before {
                pairs[before * 12 + credential] += 1;
            }
            before = Some(credential);
        }
        assert_eq!((counts[3], counts[7]), (0, 0));
        let chi_square = |counts: &[u32], of: u32, expected: f64| -> f64 {
            let cells = counts.iter().filter(|&&count| count > 0);
            assert_eq!(cells.clone().count() as u32, of);
            cells.map(|&count| (f64::from(count) - expected).powi(2) / expected).sum()
        };
        assert!(chi_square(&counts, 10, 10_000.0) < 27.88, "{counts:?}");
        // 99 degrees of freedom: above 148.2 once in a thousand.
        assert!(chi_square(&pairs, 100, 1_000.0) < 148.2, "{pairs:?}");
        counts = [0; 12];
        for _ in 0..1_000 {
            counts[caller.call(1).unwrap()] += 1;
        }
        assert!(counts[7] > 0 && counts[3] == 0, "rejoined at its moment: {counts:?}");
    }

    #[test]
    fn all_cooling_tells_the_earliest() {
        for balance in [Balance::RoundRobin, Balance::Random, Balance::LeastRecentlyUsed] {
            let mut caller = Caller::new(balance, 3);
            caller.pool.not_before(2, Time::NEVER, at(0));
            caller.pool.not_before(0, at(5_000), at(0));
            caller.pool.not_before(1, at(3_000), at(0));
            assert_eq!(caller.next(0), None);
            assert_eq!(caller.pool.earliest(), at(3_000), "beyond a deadline of 1 s, so the caller fails with it");
            assert_eq!(caller.next(2_999), None);
            assert_eq!(caller.next(3_000), Some(1));
            assert_eq!(caller.pool.earliest(), at(5_000));
            caller.pool.not_before(1, Time::NEVER, at(3_000));
            assert_eq!(caller.next(3_000), None);
        }
    }

    #[test]
    fn only_what_cannot_come_earlier_is_said_to_be_closed() {
        let mut caller = Caller::new(Balance::RoundRobin, 2);
        caller.pool.closed_until(0, at(5_000), at(0));
        assert_eq!(caller.pool.all_closed_until(at(0)), None, "one is good");
        caller.pool.not_before(1, at(9_000), at(0));
        assert_eq!(caller.pool.all_closed_until(at(0)), None, "one may come back earlier");
        caller.pool.closed_until(1, at(3_000), at(0));
        assert_eq!(caller.pool.all_closed_until(at(0)), Some(at(3_000)));
        caller.pool.closed_until(1, at(7_000), at(0));
        caller.pool.closed_until(1, at(6_000), at(0));
        assert_eq!(
            caller.pool.all_closed_until(at(4_999)),
            Some(at(5_000)),
            "the longest of each, and the first of all"
        );
        assert_eq!(caller.pool.all_closed_until(at(5_000)), None);
        let mut mended = caller.pool.clone();
        caller.pool.closed_until(0, at(8_000), at(5_000));
        assert_eq!(caller.pool.all_closed_until(at(5_000)), Some(at(7_000)));
        mended.closed_until(0, at(8_000), at(5_000));
        mended.enable(1);
        mended.not_before(1, at(9_000), at(5_000));
        assert_eq!(mended.all_closed_until(at(5_000)), None, "a credential that was mended starts anew");
    }

    #[test]
    fn the_quota_is_told_that_keeps_the_first_from_rejoining() {
        let mut caller = Caller::new(Balance::RoundRobin, 2);
        let quota = LimitId::from_index(3).unwrap();
        for (credential, until) in [(0, at(5_000)), (1, at(3_000))] {
            caller.pool.closed_until(credential, until, at(0));
        }
        caller.pool.spent_until(0, quota, at(5_000));
        caller.pool.spent_until(9, quota, at(3_000));
        assert_eq!(caller.pool.quota_that_ends(caller.pool.earliest()), None, "the first cools down");
        caller.pool.spent_until(1, quota, at(3_000));
        assert_eq!(caller.pool.quota_that_ends(caller.pool.earliest()), Some(quota));
        assert_eq!(caller.next(3_000), Some(1));
        assert_eq!(caller.pool.quota_that_ends(at(3_000)), None, "it is over");
        assert_eq!(caller.pool.quota_that_ends(at(5_000)), Some(quota));
    }

    #[test]
    fn a_step_back_locks_nobody_out() {
        let mut caller = Caller::new(Balance::RoundRobin, 2);
        let year = 365 * 86_400_000;
        caller.pool.not_before(0, at(year + 10), at(year));
        assert_eq!(caller.calls(year..year + 2), "BB");
        caller.pool.not_before(1, at(year + 500), at(year));
        assert_eq!(caller.next(year - 100), None, "overtaken between reading the clock and getting here");
        let mut noted = caller.pool.clone();
        assert!(caller.next(0).is_some());
        // Notes made since then count, and don't make the old ones look new.
        noted.not_before(0, at(10), at(0));
        assert_eq!(noted.next(at(0), &mut caller.rng), Some(1));
        noted.not_before(1, at(10), at(0));
        assert_eq!(noted.next(at(0), &mut caller.rng), None);
    }

    #[test]
    fn bounds() {
        for found in [0, MAX_CREDENTIALS + 1] {
            assert_eq!(Pool::new(Balance::RoundRobin, found).unwrap_err(), PoolSize { found });
        }
        let mut caller = Caller::new(Balance::RoundRobin, MAX_CREDENTIALS);
        for beyond in [MAX_CREDENTIALS, usize::MAX] {
            caller.pool.used(beyond);
            caller.pool.enable(beyond);
            caller.pool.not_before(beyond, at(1), at(0));
        }
        for round in 0..2_048 {
            assert_eq!(caller.call(0), Some(round % MAX_CREDENTIALS));
        }
        assert_eq!((caller.pool.size(), caller.pool.earliest()), (MAX_CREDENTIALS, Time::NEVER));
    }
}
