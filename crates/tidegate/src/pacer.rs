//! A pace that many workers keep together.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use tidegate_core::pacer::Metrics;
use tidegate_core::{Clock, PacerError, PacerSpec, Span};

use crate::SystemClock;
use crate::clock::alarm;
use crate::random::random_u64;

/// How often a clock is looked at that isn't the machine's: it may be set at any time, and tells nobody.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Responsive back-off for workers that call a service which throttles: after each call they tell how it went, and wait
/// for as long as the service seems to need. Clones share the pace.
///
/// The rules are [`core::Pacer`](tidegate_core::Pacer)'s. Each pacer draws from a random sequence of its own, which no
/// other has, in this process or any other.
///
/// ```
/// use tidegate::Pacer;
/// use tidegate::core::PacerSpec;
///
/// # async fn call() -> Result<(), ()> { Ok(()) }
/// # async fn work() -> Result<(), Box<dyn std::error::Error>> {
/// let pacer = Pacer::new(PacerSpec::default())?;
/// loop {
///     match call().await {
///         Ok(()) => pacer.on_success().await,
///         Err(()) => pacer.on_failure().await,
///     }
/// #   if pacer.metrics().invocations > 1 { return Ok(()); }
/// }
/// # }
/// ```
///
/// What became of a call counts from the moment when the future is polled first, and before it waits. So a task that is
/// cancelled while it waits has told everything, and holds nothing: no lock, no turn, no place in any queue. A wait that
/// was cut short counts in [`Metrics::slept`] and, in all its length, in [`Metrics::total`]: they say what the pacer asked
/// for.
#[derive(Clone)]
pub struct Pacer<C = SystemClock>(Arc<Shared<C>>);

struct Shared<C> {
    state: Mutex<State>,
    clock: C,
}

struct State {
    pacer: tidegate_core::Pacer,
    rng: SmallRng,
}

impl Pacer {
    /// A pacer that has met no failure yet.
    ///
    /// # Errors
    /// A setting that is out of its range: see [`tidegate_core::Pacer::new`].
    pub fn new(spec: PacerSpec) -> Result<Self, PacerError> {
        Self::with_clock(spec, SystemClock::new())
    }
}

impl<C: Clock> Pacer<C> {
    /// [`Pacer::new`] with a clock of your own. One that isn't the machine's is looked at every 5 ms of tokio's time, or of
    /// the machine's where a thread waits.
    ///
    /// # Errors
    /// As [`Pacer::new`].
    pub fn with_clock(spec: PacerSpec, clock: C) -> Result<Self, PacerError> {
        let state = State { pacer: tidegate_core::Pacer::new(spec)?, rng: SmallRng::seed_from_u64(random_u64()) };
        Ok(Self(Arc::new(Shared { state: Mutex::new(state), clock })))
    }

    /// A call has failed: lengthens the wait, and waits, within a tokio runtime whose timers are enabled.
    pub async fn on_failure(&self) {
        let wait = self.failed();
        self.sleep(wait).await;
    }

    /// A call has succeeded: waits if there is a wait, which every so many successes shorten, within a tokio runtime whose
    /// timers are enabled.
    pub async fn on_success(&self) {
        let wait = self.succeeded();
        self.sleep(wait).await;
    }

    /// [`on_failure`](Self::on_failure) for a thread that may block.
    pub fn on_failure_blocking(&self) {
        let wait = self.failed();
        self.block(wait);
    }

    /// [`on_success`](Self::on_success) for a thread that may block.
    pub fn on_success_blocking(&self) {
        let wait = self.succeeded();
        self.block(wait);
    }

    /// How long calls wait now; zero at first and once enough have succeeded.
    pub fn interval(&self) -> Duration {
        self.lock().pacer.interval()
    }

    /// What it has done since it was made, for all who share it.
    pub fn metrics(&self) -> Metrics {
        self.lock().pacer.metrics()
    }

    fn failed(&self) -> Duration {
        let State { pacer, rng } = &mut *self.lock();
        pacer.failed(rng)
    }

    fn succeeded(&self) -> Duration {
        let State { pacer, rng } = &mut *self.lock();
        pacer.succeeded(rng).unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under it panics half-way.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn sleep(&self, wait: Duration) {
        if wait.is_zero() {
            return;
        }
        if self.0.clock.is_system() {
            return alarm::sleep(wait).await;
        }
        let until = self.0.clock.now() + Span::from_duration(wait);
        while let Some(left) = self.left(until) {
            tokio::time::sleep(left.min(LOOK_AGAIN)).await;
        }
    }

    fn block(&self, wait: Duration) {
        if self.0.clock.is_system() {
            return std::thread::sleep(wait);
        }
        let until = self.0.clock.now() + Span::from_duration(wait);
        while let Some(left) = self.left(until) {
            std::thread::sleep(left.min(LOOK_AGAIN));
        }
    }

    fn left(&self, until: tidegate_core::Time) -> Option<Duration> {
        let left = until.since(self.0.clock.now());
        (!left.is_zero()).then(|| left.as_duration())
    }
}

impl<C> fmt::Debug for Pacer<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pacer").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{ManualClock, TokioClock};
    use tidegate_core::Time;
    use tidegate_core::pacer::{Growth, Mode};
    use tokio::task::JoinSet;
    use tokio::time::timeout;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    /// Every wait is a millisecond once there was a failure, and stays so.
    fn constant() -> PacerSpec {
        PacerSpec { initial: MS(1), max: MS(1), randomization: 0, successes: u32::MAX, ..PacerSpec::default() }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn totals_of_64_tasks_are_exact_whoever_is_cancelled() {
        const EACH: u64 = 50;
        let pacer = Pacer::new(constant()).unwrap();
        pacer.on_failure().await;
        let mut tasks = JoinSet::new();
        for task in 0..64_u64 {
            let pacer = pacer.clone();
            tasks.spawn(async move {
                let mut cancelled = 0_u64;
                for call in 0..EACH {
                    // Some are given up before, some while and some after they wait.
                    let most = Duration::from_micros((task * 31 + call * 17) % 40 * 50);
                    let told =
                        async { if call % 2 == 0 { pacer.on_failure().await } else { pacer.on_success().await } };
                    cancelled += u64::from(timeout(most, told).await.is_err());
                }
                cancelled
            });
        }
        let cancelled: u64 = tasks.join_all().await.into_iter().sum();
        assert!(cancelled > 100 && cancelled < 64 * EACH, "{cancelled}");
        let calls = 64 * EACH + 1;
        let expected = Metrics { invocations: calls, up: 32 * EACH + 1, down: 0, slept: calls, total: MS(calls) };
        assert_eq!(pacer.metrics(), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn waits_last_as_long_as_they_should() {
        let growth = Growth::Exponential { up: 2_000, down: 500 };
        let spec = PacerSpec { growth, randomization: 0, successes: 1, mode: Mode::Classic, ..PacerSpec::default() };
        let clock = TokioClock::default();
        let pacer = Pacer::with_clock(spec, clock).unwrap();
        let took = async |began: Time| clock.now().since(began).as_micros() / 1_000;
        for (succeeds, millis) in [(true, 0), (false, 500), (false, 1_000), (true, 500), (true, 0), (false, 500)] {
            let began = clock.now();
            if succeeds {
                pacer.on_success().await
            } else {
                pacer.on_failure().await
            }
            let took = took(began).await;
            assert!((millis..millis + 10).contains(&took), "{took} for {millis}");
        }
        assert_eq!((pacer.metrics().down, pacer.metrics().up), (2, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_is_set_by_hand_ends_the_wait() {
        let clock = ManualClock::default();
        let pacer = Pacer::with_clock(PacerSpec::default(), clock.clone()).unwrap();
        let waits = tokio::spawn({
            let pacer = pacer.clone();
            async move { pacer.on_failure().await }
        });
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!waits.is_finished());
        clock.advance(Span::from_millis(500));
        waits.await.unwrap();
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "it is the real wait that is measured")]
    fn a_thread_waits_as_a_task_does() {
        let pacer = Pacer::new(PacerSpec { initial: MS(20), ..PacerSpec::default() }).unwrap();
        let began = std::time::Instant::now();
        pacer.on_success_blocking();
        pacer.on_failure_blocking();
        pacer.on_success_blocking();
        assert!(began.elapsed() >= MS(40), "{:?}", began.elapsed());
        assert_eq!((pacer.metrics().slept, pacer.interval()), (2, MS(20)));

        let clock = ManualClock::default();
        let pacer = Pacer::with_clock(constant(), clock.clone()).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| pacer.on_failure_blocking());
            std::thread::sleep(MS(20));
            assert!(!waits.is_finished());
            clock.advance(Span::from_millis(1));
        });
    }

    #[test]
    fn no_two_draw_the_same_waits() {
        let waits = || {
            let pacer = Pacer::with_clock(PacerSpec::default(), ManualClock::default()).unwrap();
            (0..8).map(|_| pacer.failed()).collect::<Vec<_>>()
        };
        assert_ne!(waits(), waits());
    }
}
