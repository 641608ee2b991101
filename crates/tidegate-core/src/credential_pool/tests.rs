//! Tests of the order and the time in which a pool returns its credentials.

use super::*;
use crate::Span;
use rand::SeedableRng;
use rand::rngs::SmallRng;

fn at(millis: u64) -> Time {
    Time::from_secs(1_700_000_000) + Span::from_millis(millis)
}

struct Caller {
    pool: CredentialPool,
    rng: SmallRng,
}

impl Caller {
    fn new(balance: Balance, credentials: usize) -> Self {
        Self { pool: CredentialPool::new(balance, credentials).unwrap(), rng: SmallRng::seed_from_u64(11) }
    }

    fn next(&mut self, millis: u64) -> Option<usize> {
        self.pool.next(at(millis), &mut self.rng)
    }

    /// Makes a call at `millis` and returns the credential that it used.
    fn call(&mut self, millis: u64) -> Option<usize> {
        let credential = self.next(millis)?;
        self.pool.record_use(credential);
        Some(credential)
    }

    /// Makes calls one millisecond apart and returns their credentials as letters.
    fn calls(&mut self, millis: core::ops::Range<u64>) -> std::string::String {
        millis.filter_map(|millis| self.call(millis)).map(|credential| (b'A' + credential as u8) as char).collect()
    }
}

#[test]
fn round_robin_uses_credentials_in_order() {
    let mut caller = Caller::new(Balance::RoundRobin, 3);
    assert_eq!(caller.calls(0..6), "ABCABC");
    assert_eq!(caller.next(6), caller.next(6), "naming one takes no turn");
}

#[test]
fn round_robin_skips_cooling_credentials_exactly() {
    let mut caller = Caller::new(Balance::RoundRobin, 3);
    caller.pool.set_cooling_until(1, at(5), at(0));
    assert_eq!(caller.calls(0..4), "ACAC");
    let mut early = caller.pool.clone();
    assert_eq!(caller.calls(4..10), "ABCABC");
    for _ in 0..2 {
        let named = early.next(at(5) - Span::from_micros(1), &mut caller.rng).unwrap();
        assert_ne!(named, 1, "a microsecond early");
        early.record_use(named);
    }
    // After its cooldown, a credential has the turn of its index in the list, also if others were available all the
    // time.
    let mut caller = Caller::new(Balance::RoundRobin, 4);
    caller.pool.set_cooling_until(1, at(2), at(0));
    assert_eq!(caller.calls(0..8), "ACDABCDA");
}

#[test]
fn a_refused_candidate_is_replaced_by_the_next() {
    let mut caller = Caller::new(Balance::RoundRobin, 3);
    assert_eq!(caller.next(0), Some(0));
    caller.pool.set_cooling_until(0, at(100), at(0));
    assert_eq!(caller.next(0), Some(1));
    caller.pool.set_cooling_until(1, at(50), at(0));
    assert_eq!(caller.call(0), Some(2));
    caller.pool.set_cooling_until(2, at(200), at(0));
    assert_eq!((caller.next(0), caller.pool.next_rejoin_at()), (None, at(50)));
    assert_eq!(caller.calls(50..52), "BB");
    caller.pool.set_cooling_until(1, at(300), at(52));
    caller.pool.set_cooling_until(1, at(60), at(53));
    assert_eq!(caller.pool.next_rejoin_at(), at(100), "a later note shortens none");
    for credential in [0, 2] {
        caller.pool.set_cooling_until(credential, at(350), at(54));
    }
    assert_eq!(caller.pool.next_rejoin_at(), at(300), "and lengthens the others");
}

#[test]
fn an_unused_turn_is_not_lost() {
    let mut caller = Caller::new(Balance::RoundRobin, 3);
    caller.pool.record_use(1);
    assert_eq!(caller.calls(0..7), "ACABCAB");
    // A turn that was used isn't used again either.
    let mut caller = Caller::new(Balance::RoundRobin, 3);
    caller.pool.record_use(1);
    caller.pool.reopen(0);
    assert_eq!(caller.call(0), Some(0));
    caller.pool.set_cooling_until(1, at(1), at(0));
    assert_eq!(caller.calls(1..7), "CABCAB");
    let mut caller = Caller::new(Balance::LeastRecentlyUsed, 3);
    caller.pool.record_use(1);
    assert_eq!(caller.calls(0..7), "ACBACBA");
}

#[test]
fn least_recently_used_picks_the_longest_unused() {
    let mut caller = Caller::new(Balance::LeastRecentlyUsed, 4);
    for credential in [3, 1, 0, 2, 0, 3] {
        caller.pool.record_use(credential);
    }
    assert_eq!(caller.calls(0..5), "BCADB");
    // C cools down and becomes available again at 8. Of all credentials, it was used longest ago.
    caller.pool.set_cooling_until(2, at(8), at(5));
    assert_eq!(caller.calls(5..8), "ADB");
    assert_eq!(caller.calls(8..12), "CADB");
}

/// With 9 degrees of freedom, χ² exceeds 27.88 in one of a thousand draws of a fair die.
#[test]
fn random_choice_is_uniform_over_good_credentials() {
    let mut caller = Caller::new(Balance::Random, 12);
    caller.pool.set_cooling_until(3, Time::NEVER, at(0));
    caller.pool.set_cooling_until(7, at(1), at(0));
    let mut counts = [0_u32; 12];
    // Successive draws must be independent, too. Therefore pairs are also counted.
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
    // With 99 degrees of freedom, χ² exceeds 148.2 once in a thousand.
    assert!(chi_square(&pairs, 100, 1_000.0) < 148.2, "{pairs:?}");
    counts = [0; 12];
    for _ in 0..1_000 {
        counts[caller.call(1).unwrap()] += 1;
    }
    assert!(counts[7] > 0 && counts[3] == 0, "rejoined at its moment: {counts:?}");
}

#[test]
fn a_cooling_pool_states_the_earliest_end() {
    for balance in [Balance::RoundRobin, Balance::Random, Balance::LeastRecentlyUsed] {
        let mut caller = Caller::new(balance, 3);
        caller.pool.set_cooling_until(2, Time::NEVER, at(0));
        caller.pool.set_cooling_until(0, at(5_000), at(0));
        caller.pool.set_cooling_until(1, at(3_000), at(0));
        assert_eq!(caller.next(0), None);
        assert_eq!(caller.pool.next_rejoin_at(), at(3_000), "beyond a deadline of 1 s, so the caller fails with it");
        assert_eq!(caller.next(2_999), None);
        assert_eq!(caller.next(3_000), Some(1));
        assert_eq!(caller.pool.next_rejoin_at(), at(5_000));
        caller.pool.set_cooling_until(1, Time::NEVER, at(3_000));
        assert_eq!(caller.next(3_000), None);
    }
}

#[test]
fn only_certain_ends_count_as_closed() {
    let mut caller = Caller::new(Balance::RoundRobin, 2);
    caller.pool.set_closed_until(0, at(5_000), at(0));
    assert_eq!(caller.pool.all_closed_until(at(0)), None, "one is good");
    caller.pool.set_cooling_until(1, at(9_000), at(0));
    assert_eq!(caller.pool.all_closed_until(at(0)), None, "one may come back earlier");
    caller.pool.set_closed_until(1, at(3_000), at(0));
    assert_eq!(caller.pool.all_closed_until(at(0)), Some(at(3_000)));
    caller.pool.set_closed_until(1, at(7_000), at(0));
    caller.pool.set_closed_until(1, at(6_000), at(0));
    assert_eq!(caller.pool.all_closed_until(at(4_999)), Some(at(5_000)), "the longest of each, and the first of all");
    assert_eq!(caller.pool.all_closed_until(at(5_000)), None);
    let mut mended = caller.pool.clone();
    caller.pool.set_closed_until(0, at(8_000), at(5_000));
    assert_eq!(caller.pool.all_closed_until(at(5_000)), Some(at(7_000)));
    mended.set_closed_until(0, at(8_000), at(5_000));
    mended.reopen(1);
    mended.set_cooling_until(1, at(9_000), at(5_000));
    assert_eq!(mended.all_closed_until(at(5_000)), None, "a credential that was mended starts anew");
    caller.pool.reopen(1);
    caller.pool.set_closed_until(1, Time::ZERO, at(5_000));
    assert_eq!(caller.pool.cooling_until(1), None, "an unknown time");
}

#[test]
fn a_reservation_replaces_other_entries() {
    let mut pool = Caller::new(Balance::RoundRobin, 1).pool;
    pool.set_cooling_until(0, at(9_000), at(0));
    pool.set_closed_until(0, at(1_000), at(0));
    pool.set_reserved_at(0, at(70), at(0));
    assert_eq!((pool.cooling_until(0), pool.all_closed_until(at(0))), (Some(at(70)), Some(at(70))));
    pool.set_cooling_until(0, at(500), at(10));
    assert_eq!(pool.cooling_until(0), Some(at(500)), "a later entry counts");
}

#[test]
fn the_quota_delaying_the_first_credential_is_named() {
    let mut caller = Caller::new(Balance::RoundRobin, 2);
    let quota = LimitId::from_index(3).unwrap();
    for (credential, until) in [(0, at(5_000)), (1, at(3_000))] {
        caller.pool.set_closed_until(credential, until, at(0));
    }
    caller.pool.set_spent_quota(0, quota, at(5_000));
    caller.pool.set_spent_quota(9, quota, at(3_000));
    assert_eq!(caller.pool.quota_spent_until(caller.pool.next_rejoin_at()), None, "the first cools down");
    caller.pool.set_spent_quota(1, quota, at(3_000));
    assert_eq!(caller.pool.quota_spent_until(caller.pool.next_rejoin_at()), Some(quota));
    assert_eq!(caller.next(3_000), Some(1));
    assert_eq!(caller.pool.quota_spent_until(at(3_000)), None, "it is over");
    assert_eq!(caller.pool.quota_spent_until(at(5_000)), Some(quota));
}

#[test]
fn a_full_credential_is_not_cooling() {
    let mut caller = Caller::new(Balance::RoundRobin, 2);
    let (own, other) = (LimitId::from_index(3).unwrap(), LimitId::from_index(4).unwrap());
    caller.pool.set_full_until(0, own, at(3_000), at(2_500), at(0));
    assert_eq!((caller.pool.full_until(0), caller.pool.cooling_until(0)), (Some((own, at(3_000))), None));
    assert!(!caller.pool.has_other_open(1, at(0)));
    caller.pool.set_closed_until(1, at(5_000), at(0));
    assert_eq!((caller.pool.next_rejoin_at(), caller.pool.next_rejoin_limit()), (at(3_000), Some(own)));
    assert_eq!(caller.pool.all_closed_until(at(0)), Some(at(2_500)));
    // Of a credential's reasons, the one that lasts longest counts.
    caller.pool.set_full_until(0, other, at(1_000), Time::ZERO, at(0));
    assert_eq!(caller.pool.full_until(0), Some((own, at(3_000))));
    caller.pool.set_cooling_until(0, at(4_000), at(0));
    assert_eq!((caller.pool.full_until(0), caller.pool.next_rejoin_limit()), (None, None));
    assert_eq!((caller.next(3_999), caller.next(4_000)), (None, Some(0)));
    assert_eq!(caller.pool.cooling_until(0), None, "a new beginning");
}

#[test]
fn a_busy_credential_is_skipped_until_freed() {
    let mut caller = Caller::new(Balance::RoundRobin, 3);
    caller.pool = caller.pool.with_max_in_flight(2);
    assert_eq!(caller.calls(0..4), "ABCA");
    assert_eq!((caller.pool.has_busy(), caller.next(4)), (true, Some(1)), "A is");
    assert_eq!(caller.calls(4..6), "BC");
    assert_eq!((caller.next(6), caller.pool.has_busy(), caller.pool.next_rejoin_at()), (None, true, Time::NEVER));
    assert!(caller.pool.has_other_open(0, at(6)), "the others are accepted all the same");
    assert!(caller.pool.record_end(1), "somebody may wait for it");
    assert!(!caller.pool.record_end(1) && !caller.pool.record_end(2), "nobody needs to");
    assert_eq!(caller.calls(6..9), "BCB");
    assert_eq!([0, 1, 2, 3].map(|credential| caller.pool.in_flight(credential)), [2, 2, 2, 0]);
}

#[test]
fn a_busy_credential_can_cool_down() {
    let mut caller = Caller::new(Balance::LeastRecentlyUsed, 2);
    caller.pool = caller.pool.with_max_in_flight(1);
    assert_eq!(caller.calls(0..2), "AB");
    caller.pool.set_closed_until(0, at(50), at(2));
    assert_eq!(
        (caller.next(2), caller.pool.has_busy(), caller.pool.next_rejoin_at()),
        (None, true, at(50)),
        "B is busy"
    );
    assert!(!caller.pool.record_end(0), "it cools down");
    caller.pool.set_closed_until(1, at(90), at(3));
    assert_eq!((caller.pool.has_busy(), caller.pool.all_closed_until(at(3))), (false, Some(at(50))));
    assert_eq!((caller.call(50), caller.next(90), caller.pool.has_busy()), (Some(0), None, true), "both are busy");
    assert_eq!((caller.pool.record_end(1), caller.next(91)), (true, Some(1)));
    let none = CredentialPool::new(Balance::Random, 2).unwrap().with_max_in_flight(0);
    assert!(none.has_busy() && none.clone().next(at(0), &mut caller.rng).is_none());
}

#[test]
fn a_clock_step_back_excludes_no_credential() {
    let mut caller = Caller::new(Balance::RoundRobin, 2);
    let year = 365 * 86_400_000;
    caller.pool.set_cooling_until(0, at(year + 10), at(year));
    assert_eq!(caller.calls(year..year + 2), "BB");
    caller.pool.set_cooling_until(1, at(year + 500), at(year));
    assert_eq!(caller.next(year - 100), None, "overtaken between reading the clock and getting here");
    let mut noted = caller.pool.clone();
    assert!(caller.next(0).is_some());
    // Entries made after that count, and don't make the old ones look new.
    noted.set_cooling_until(0, at(10), at(0));
    assert_eq!(noted.next(at(0), &mut caller.rng), Some(1));
    noted.set_cooling_until(1, at(10), at(0));
    assert_eq!(noted.next(at(0), &mut caller.rng), None);
}

#[test]
fn a_clock_step_back_lengthens_no_trial() {
    let mut caller = Caller::new(Balance::RoundRobin, 1);
    let day = 86_400_000;
    caller.pool.set_closed_until(0, at(2 * day), at(day));
    caller.pool.set_cut(0);
    assert_eq!((caller.next(day - 600_000), caller.pool.is_on_trial(0)), (Some(0), true));
    assert!(!caller.pool.record_trial_end(0, at(day - 700_000), true), "sent before");
    assert!(caller.pool.record_trial_end(0, at(day - 600_000), true));
}

#[test]
fn pool_size_and_indexes_are_bounded() {
    for found in [0, MAX_CREDENTIALS + 1] {
        assert_eq!(CredentialPool::new(Balance::RoundRobin, found).unwrap_err(), PoolSizeError { found });
    }
    let mut caller = Caller::new(Balance::RoundRobin, MAX_CREDENTIALS);
    for beyond in [MAX_CREDENTIALS, usize::MAX] {
        caller.pool.record_use(beyond);
        assert_eq!((caller.pool.record_end(beyond), caller.pool.in_flight(beyond)), (false, 0));
        caller.pool.reopen(beyond);
        caller.pool.set_cooling_until(beyond, at(1), at(0));
    }
    for round in 0..2_048 {
        assert_eq!(caller.call(0), Some(round % MAX_CREDENTIALS));
    }
    assert_eq!((caller.pool.size(), caller.pool.next_rejoin_at()), (MAX_CREDENTIALS, Time::NEVER));
}
