//! Limiters for one resource, or for each key of one kind, without a policy.

use std::hash::{BuildHasher, Hash, RandomState};
use std::hint::spin_loop;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::rate::ArrivalTime;
use tidegate_core::{
    Batch, Clock, Key, Limit, LimitError, LimitId, LimitKind, Limits, MAX_NOW_SPREAD, Op, Rate, Span, Time, Verb,
};
use tidegate_policy::{Quantity, QuantityError};
use tidegate_runtime::clock::SystemClock;
use tidegate_store::{ImmediateStore, Memory};

/// The decision of a limiter on a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a call that is not admitted must not be made"]
pub enum LimiterDecision {
    /// The call is admitted and was counted.
    Admitted,
    /// The call is admitted after this wait, if no other call is admitted first. Nothing was counted. A [`Limiter`] may
    /// tell a wait of over 5 s up to 1 % too long.
    RetryAfter(Span),
    /// The call is never admitted: the cost is above the capacity.
    Never,
}

impl LimiterDecision {
    /// True if the call may be made now.
    pub fn is_admitted(self) -> bool {
        self == Self::Admitted
    }

    #[inline]
    fn from_retry_at(time: Time, now: Time) -> Self {
        if time <= now {
            Self::Admitted
        } else if time.is_never() {
            Self::Never
        } else {
            Self::RetryAfter(time.since(now))
        }
    }
}

/// The reason that a limiter can't be made.
#[derive(Clone, thiserror::Error)]
pub enum LimiterError {
    /// The quantity can't be read.
    #[error(transparent)]
    Quantity(#[from] QuantityError),
    /// The quantity is readable but is not a valid limit.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// A [`Limiter`] keeps one number, which is enough for a rate and for nothing else.
    #[error("`{found}` is not a rate; write one as \"10/s burst 20\", or use a KeyedLimiter")]
    NotARate {
        /// The quantity as given.
        found: String,
    },
    /// A [`KeyedLimiter`] gives no permits, so it can't count calls in flight.
    #[error("calls in flight need a Gate, which takes permits back")]
    InFlight,
    /// `unlimited` limits nothing.
    #[error("`unlimited` limits nothing; leave the limiter out")]
    Unlimited,
}

/// The message, so that `fn main() -> Result<…>` shows it.
impl std::fmt::Debug for LimiterError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// One rate for all calls. It is a single atomic number, without locks.
///
/// ```
/// use tidegate::{Limiter, LimiterDecision};
///
/// let limiter = Limiter::new("10/s burst 2")?;
/// assert!(limiter.check().is_admitted() && limiter.check().is_admitted());
/// assert!(matches!(limiter.check(), LimiterDecision::RetryAfter(wait) if wait.as_micros() <= 100_000));
/// # Ok::<(), tidegate::LimiterError>(())
/// ```
///
/// With the feature `tokio`, a task can wait for its turn: `limiter.until_ready().await`.
#[derive(Debug)]
pub struct Limiter<C = SystemClock> {
    rate: Rate,
    arrival_bits: CacheAligned,
    clock: C,
}

/// The number of pauses after losing a race. Each takes 20 to 50 ns.
const SPIN_PAUSES: u32 = 16;

/// A number on its own cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
struct CacheAligned(AtomicU64);

impl Limiter {
    /// A limiter for a rate in the syntax of policies: `"10/s burst 20"`.
    ///
    /// # Errors
    /// The quantity can't be read, or isn't a rate.
    pub fn new(quantity: &str) -> Result<Self, LimiterError> {
        Self::with_clock(quantity, SystemClock::new())
    }
}

impl<C: Clock> Limiter<C> {
    /// A [`Limiter::new`] with the given clock.
    ///
    /// # Errors
    /// As [`Limiter::new`].
    pub fn with_clock(quantity: &str, clock: C) -> Result<Self, LimiterError> {
        let kind = parse_kind(quantity)?;
        let LimitKind::Rate(rate) = kind else { return Err(LimiterError::NotARate { found: quantity.to_owned() }) };
        Ok(Self::from_rate(rate, clock))
    }

    /// A limiter for this rate.
    pub fn from_rate(rate: Rate, clock: C) -> Self {
        Self { rate, arrival_bits: CacheAligned::default(), clock }
    }

    /// Decides about a call with a cost of 1, and counts it if admitted.
    #[inline]
    pub fn check(&self) -> LimiterDecision {
        self.check_cost(1)
    }

    /// Decides about a call with this cost, and counts it if admitted.
    #[inline]
    pub fn check_cost(&self, cost: u64) -> LimiterDecision {
        let bounds = self.rate.can_take_between(MAX_NOW_SPREAD).then(|| self.clock.now_bounds());
        let mut before = self.arrival_bits.0.load(Ordering::Relaxed);
        loop {
            let arrival = ArrivalTime::from_bits(before);
            let after = match bounds.and_then(|about| self.rate.take_between(arrival, cost, about)) {
                Some(after) => after,
                None => {
                    if let Some(wait) = bounds.and_then(|about| self.rate.wait_between(arrival, cost, about)) {
                        return LimiterDecision::RetryAfter(wait);
                    }
                    let now = self.clock.now();
                    let refreshed = self.rate.refresh(arrival, now);
                    let retry_at = self.rate.retry_at(refreshed, cost, now);
                    if retry_at <= now {
                        self.rate.charge(refreshed, cost, now)
                    } else if refreshed == arrival || self.replace(before, refreshed) {
                        return LimiterDecision::from_retry_at(retry_at, now);
                    } else {
                        before = self.arrival_bits.0.load(Ordering::Relaxed);
                        continue;
                    }
                }
            };
            if self.replace(before, after) {
                return LimiterDecision::Admitted;
            }
            // Another thread changed the number first. A short pause lets it keep the cache line for several calls in a
            // row. That costs both threads less than alternating.
            (0..SPIN_PAUSES).for_each(|_| spin_loop());
            before = self.arrival_bits.0.load(Ordering::Relaxed);
        }
    }

    /// Waits until it is a call's turn, and takes it. Calls that wait have no order among themselves; a
    /// [`LimitLayer`](crate::layers::LimitLayer) serves them in the order in which they come. Dropping the future takes
    /// nothing.
    #[cfg(feature = "tokio")]
    pub async fn until_ready(&self) {
        wait_for_turn(&self.clock, || self.check()).await;
    }

    #[inline]
    fn replace(&self, before: u64, after: ArrivalTime) -> bool {
        let cell = &self.arrival_bits.0;
        cell.compare_exchange(before, after.to_bits(), Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// One limit for each key, in memory of a bounded size.
///
/// ```
/// use tidegate::KeyedLimiter;
///
/// let limiter = KeyedLimiter::new("2 per 60s")?;
/// assert!(limiter.check("alice").is_admitted());
/// assert!(limiter.check("alice").is_admitted());
/// assert!(!limiter.check("alice").is_admitted(), "a third call within a minute");
/// assert!(limiter.check("bob").is_admitted(), "each key has a count of its own");
/// # Ok::<(), tidegate::LimiterError>(())
/// ```
///
/// Any `Hash` type is a key: `KeyedLimiter<IpAddr>`, `KeyedLimiter<(TenantId, UserId)>`. With the feature `tokio`, a
/// task can wait for its turn: `limiter.until_ready("alice").await`.
#[derive(Debug)]
pub struct KeyedLimiter<K: ?Sized, C = SystemClock, S = RandomState> {
    memory: Memory,
    clock: C,
    hasher: S,
    keys: PhantomData<fn(&K)>,
}

impl<K: Hash + ?Sized> KeyedLimiter<K> {
    /// A limiter for any quantity that policies accept, within [`Memory::DEFAULT_MAX_BYTES`].
    ///
    /// # Errors
    /// The quantity can't be read, is not a valid limit, is `unlimited`, or counts calls in flight.
    pub fn new(quantity: &str) -> Result<Self, LimiterError> {
        Self::with_clock(quantity, Memory::DEFAULT_MAX_BYTES, SystemClock::new())
    }
}

impl<K: Hash + ?Sized, C: Clock> KeyedLimiter<K, C> {
    /// A [`KeyedLimiter::new`] with the given size, in bytes, and clock.
    ///
    /// # Errors
    /// As [`KeyedLimiter::new`].
    pub fn with_clock(quantity: &str, max_bytes: usize, clock: C) -> Result<Self, LimiterError> {
        Self::from_limit(Limit::new(parse_kind(quantity)?), max_bytes, clock, RandomState::new())
    }
}

impl<K: Hash + ?Sized, C: Clock, S: BuildHasher> KeyedLimiter<K, C, S> {
    /// A limiter for this limit, with its penalty. The hasher needs a random key if untrusted clients choose keys.
    ///
    /// # Errors
    /// [`LimiterError::InFlight`] if the limit counts calls in flight.
    pub fn from_limit(limit: Limit, max_bytes: usize, clock: C, hasher: S) -> Result<Self, LimiterError> {
        if let LimitKind::Concurrency(_) = limit.kind() {
            return Err(LimiterError::InFlight);
        }
        let memory = Memory::new(Arc::new(Limits::with_limit(limit)), max_bytes);
        Ok(Self { memory, clock, hasher, keys: PhantomData })
    }

    /// Decides about a call with a cost of 1 for this key, and counts it if admitted.
    #[inline]
    pub fn check(&self, key: &K) -> LimiterDecision {
        self.check_cost(key, 1)
    }

    /// Decides about a call with this cost for this key, and counts it if admitted.
    #[inline]
    pub fn check_cost(&self, key: &K, cost: u64) -> LimiterDecision {
        let (retry_at, now) = self.memory.take_with_clock(&self.op(Verb::Take, key, cost), &self.clock);
        LimiterDecision::from_retry_at(retry_at, now)
    }

    /// Waits until it is the turn of a call for a key, and takes it. Calls that wait have no order among themselves.
    /// Dropping the future takes nothing. Under a penalty each turn that comes too early is a strike, as with
    /// [`check`](Self::check); this waits exactly as long as the strike asks.
    #[cfg(feature = "tokio")]
    pub async fn until_ready(&self, key: &K) {
        wait_for_turn(&self.clock, || self.check(key)).await;
    }

    /// Returns the decision that a call with this cost would get. Counts nothing.
    pub fn peek_cost(&self, key: &K, cost: u64) -> LimiterDecision {
        let now = self.clock.now();
        let outcomes = self.memory.apply_now(&Batch::with_op(0, self.op(Verb::Peek, key, cost)), now);
        LimiterDecision::from_retry_at(outcomes.list().first().map_or(now, |outcome| outcome.retry_at), now)
    }

    #[inline]
    fn op(&self, verb: Verb, key: &K, cost: u64) -> Op {
        let mut op = Op::new(LimitId::FIRST, verb, Key::new(0, self.hasher.hash_one(key)), cost);
        op.must_fit = true;
        op
    }

    /// The store of the limiter, for its statistics.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}

/// Repeats the check after each wait until the call is admitted. Never returns if no wait helps.
#[cfg(feature = "tokio")]
async fn wait_for_turn(clock: &impl Clock, check: impl Fn() -> LimiterDecision) {
    loop {
        match check() {
            LimiterDecision::Admitted => return,
            LimiterDecision::RetryAfter(wait) => {
                tidegate_runtime::precise_timer::sleep_by(clock, wait.as_duration()).await;
            }
            LimiterDecision::Never => std::future::pending().await,
        }
    }
}

pub(crate) fn parse_kind(quantity: &str) -> Result<LimitKind, LimiterError> {
    let quantity: Quantity = quantity.parse()?;
    quantity.to_limit_kind()?.ok_or(LimiterError::Unlimited)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_runtime::clock::ManualClock;

    #[test]
    fn a_limiter_is_exact_under_concurrency() {
        let limiter = Limiter::with_clock("1/h burst 1000", ManualClock::default()).unwrap();
        let admitted: usize = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..4).map(|_| scope.spawn(|| (0..1000).filter(|_| limiter.check().is_admitted()).count())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(admitted, 1000);
    }

    #[test]
    fn a_call_is_admitted_exactly_after_its_wait() {
        let clock = ManualClock::default();
        let limiter = Limiter::with_clock("10/s burst 2", clock.clone()).unwrap();
        assert!(limiter.check_cost(2).is_admitted());
        let LimiterDecision::RetryAfter(wait) = limiter.check() else { panic!("admitted beyond the burst") };
        clock.advance(wait - Span::from_micros(1));
        assert!(!limiter.check().is_admitted());
        clock.advance(Span::from_micros(1));
        assert!(limiter.check().is_admitted());
        assert_eq!(limiter.check_cost(3), LimiterDecision::Never);
    }

    #[test]
    fn a_clock_step_back_locks_out_no_caller() {
        let clock = ManualClock::default();
        let start = clock.now();
        let limiter = Limiter::with_clock("10/s burst 1", clock.clone()).unwrap();
        clock.advance(Span::from_secs(3600));
        assert!(limiter.check().is_admitted());
        clock.set(start);
        let LimiterDecision::RetryAfter(wait) = limiter.check() else { panic!("a full burst is owed") };
        clock.advance(wait);
        assert!(limiter.check().is_admitted());
    }

    #[test]
    fn keys_are_counted_separately() {
        let limiter = KeyedLimiter::with_clock("2 per 60s", 1 << 20, ManualClock::default()).unwrap();
        for key in ["a", "b"] {
            assert!(limiter.check(key).is_admitted() && limiter.check(key).is_admitted());
            assert_eq!(limiter.check(key), LimiterDecision::RetryAfter(Span::from_secs(60)));
        }
    }

    #[test]
    fn a_peek_predicts_the_decision_and_charges_nothing() {
        let clock = ManualClock::default();
        for (quantity, second) in [("2 per 60s", 60), ("1 per 30s burst 2", 30)] {
            let limiter = KeyedLimiter::with_clock(quantity, 1 << 20, clock.clone()).unwrap();
            assert_eq!(limiter.peek_cost("a", 2), LimiterDecision::Admitted);
            assert_eq!(limiter.peek_cost("a", 3), LimiterDecision::Never);
            assert!(limiter.check("a").is_admitted());
            assert_eq!(limiter.peek_cost("a", 1), LimiterDecision::Admitted);
            assert_eq!(limiter.peek_cost("a", 2), LimiterDecision::RetryAfter(Span::from_secs(second)));
            assert!(limiter.check("a").is_admitted(), "two peeks later it is still free");
        }
    }

    #[cfg(feature = "tokio")]
    #[tokio::test(start_paused = true)]
    async fn tasks_wait_for_their_turn() {
        let clock = tidegate_runtime::clock::TokioClock::default();
        let start = clock.now();
        let limiter = Limiter::with_clock("10/s", clock).unwrap();
        for _ in 0..11 {
            limiter.until_ready().await;
        }
        let took = clock.now().since(start);
        assert!(took >= Span::from_secs(1) && took < Span::from_millis(1_100), "{took}");
        let keyed = KeyedLimiter::with_clock("2 per 60s", 1 << 20, clock).unwrap();
        for key in ["a", "b", "a", "b", "a"] {
            keyed.until_ready(key).await;
        }
        let took = clock.now().since(start) - took;
        assert!(took >= Span::from_secs(60) && took < Span::from_secs(61), "{took}");
    }

    #[test]
    fn unusable_limits_are_rejected() {
        assert!(matches!(Limiter::new("5 per 60s"), Err(LimiterError::NotARate { .. })));
        assert!(matches!(KeyedLimiter::<str>::new("unlimited"), Err(LimiterError::Unlimited)));
        assert!(matches!(KeyedLimiter::<str>::new("2 in flight"), Err(LimiterError::InFlight)));
        assert!(matches!(KeyedLimiter::<str>::new("0/s"), Err(LimiterError::Limit(_) | LimiterError::Quantity(_))));
    }
}
