//! A pool agrees with a simple model of it, for all entries in any order.

use rand::SeedableRng;
use rand::rngs::SmallRng;
use tidegate_core::{Balance, CredentialPool, Span, Time};
use tidegate_testkit::fixtures::test_time;
use tidegate_testkit::property;
use tidegate_testkit::random::{RandomSource, case_count};

#[derive(Clone, Copy, Debug, Default)]
struct Credential {
    not_before: Time,
    /// The number of its last use; 0 is never.
    used: usize,
    in_flight: u32,
}

/// The credentials that may be returned next: one by turn or by last use, or any available one at random.
fn choices(balance: Balance, most: u32, credentials: &[Credential], last: Option<usize>, now: Time) -> Vec<usize> {
    let size = credentials.len();
    let good = |&index: &usize| credentials[index].not_before <= now && credentials[index].in_flight < most;
    match balance {
        Balance::Random => (0..size).filter(good).collect(),
        Balance::RoundRobin => {
            let first = last.map_or(0, |last| last + 1);
            (first..first + size).map(|turn| turn % size).find(good).into_iter().collect()
        }
        Balance::LeastRecentlyUsed => {
            (0..size).filter(good).min_by_key(|&index| (credentials[index].used, index)).into_iter().collect()
        }
    }
}

#[test]
fn the_pool_agrees_with_the_model() {
    property::check(case_count(2_000, 40_000), 600, |mut random| {
        let balance = random.pick(&[Balance::RoundRobin, Balance::Random, Balance::LeastRecentlyUsed]);
        let size = random.between(1, 9) as usize;
        let most = random.pick(&[u32::MAX, 1, 3]);
        let mut pool = CredentialPool::new(balance, size).map_err(|error| error.to_string())?.with_max_in_flight(most);
        let mut rng = SmallRng::seed_from_u64(random.next_u64());
        let mut credentials = vec![Credential::default(); size];
        let (mut last, mut uses, mut now) = (None, 0, test_time(0));
        while !random.is_exhausted() {
            let any = random.below(size as u64) as usize;
            let until = now + Span::from_micros(random.below(200_000));
            let named = pool.next(now, &mut rng);
            let expected = choices(balance, most, &credentials, last, now);
            if !named.map_or(expected.is_empty(), |named| expected.contains(&named)) {
                return Err(format!("{balance:?} names {named:?}, expected one of {expected:?}: {credentials:?}"));
            }
            let cooling = credentials.iter().filter(|credential| credential.not_before > now);
            let earliest = cooling.map(|credential| credential.not_before).min().unwrap_or(Time::NEVER);
            if pool.next_rejoin_at() != earliest {
                return Err(format!("earliest {:?}, expected {earliest:?}: {credentials:?}", pool.next_rejoin_at()));
            }
            let busy =
                credentials.iter().any(|credential| credential.not_before <= now && credential.in_flight >= most);
            if pool.has_busy() != busy {
                return Err(format!("busy {}, expected {busy}: {credentials:?}", pool.has_busy()));
            }
            match (random.below(8), named) {
                (0..=3, Some(named)) => {
                    pool.record_use(named);
                    uses += 1;
                    (credentials[named].used, last) = (uses, Some(named));
                    credentials[named].in_flight += 1;
                }
                (4, Some(named)) => {
                    pool.set_cooling_until(named, until, now);
                    credentials[named].not_before = until.max(credentials[named].not_before);
                }
                (5, _) => {
                    pool.set_cooling_until(any, until, now);
                    credentials[any].not_before = until.max(credentials[any].not_before);
                }
                (6, _) if credentials[any].in_flight > 0 => {
                    credentials[any].in_flight -= 1;
                    let waited_for = named.is_none() && credentials[any].not_before <= now;
                    if pool.record_end(any) != waited_for {
                        return Err(format!("{any} was waited for: expected {waited_for}: {credentials:?}"));
                    }
                }
                // No credential is available: the earliest end is waited for.
                (_, None) if !earliest.is_never() => now = earliest,
                _ => now = now + Span::from_micros(random.below(100_000)),
            }
        }
        Ok(())
    });
}

/// Each credential of a large pool is used equally often, even if some cool down for a short time.
#[test]
fn a_large_pool_is_used_evenly() {
    for balance in [Balance::RoundRobin, Balance::LeastRecentlyUsed] {
        let mut random = RandomSource::from_seed(2);
        let mut rng = SmallRng::seed_from_u64(2);
        let mut pool = CredentialPool::new(balance, 1_000).expect("a pool");
        let mut uses = [0_u32; 1_000];
        for millis in 0..100_000 {
            if random.chance(5) {
                pool.set_cooling_until(random.below(1_000) as usize, test_time(millis + 20), test_time(millis));
            }
            let named = pool.next(test_time(millis), &mut rng).expect("a thousand aren't all cooling");
            pool.record_use(named);
            uses[named] += 1;
        }
        let (least, most) = (uses.iter().min(), uses.iter().max());
        assert!(least >= Some(&80) && most <= Some(&102), "{balance:?}: {least:?} to {most:?}");
    }
}
