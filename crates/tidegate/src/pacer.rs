//! A pace for the calls of many workers.

mod shared;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use tidegate_core::pacer::PacerMetrics;
use tidegate_core::{Clock, Limits, PacerError, PacerSpec, Span};
use tidegate_policy::KeySeed;
use tidegate_store::AnyStore;

use crate::{OpenError, Stores};
pub(crate) use shared::SharedPace;
use shared::{PaceWorker, RENEW_INTERVAL};
use tidegate_runtime::clock::SystemClock;
use tidegate_runtime::precise_timer::{self, POLL_INTERVAL};
use tidegate_runtime::random::random_u64;

/// A responsive back-off for workers that call a service which throttles. After each call, a worker reports its result
/// and waits for as long as the service seems to need. Clones share the pace.
///
/// The rules are those of [`tidegate_core::LocalPacer`]. Each pacer has its own random sequence, which differs from
/// that of any other pacer in any process.
///
/// ```
/// use tidegate::Pacer;
/// use tidegate::PacerSpec;
///
/// # async fn call() -> Result<(), ()> { Ok(()) }
/// # async fn work() -> Result<(), Box<dyn std::error::Error>> {
/// let pacer = Pacer::new(PacerSpec::default())?;
/// loop {
///     match call().await {
///         Ok(()) => pacer.on_success().await,
///         Err(()) => pacer.on_failure().await,
///     }
/// #   if pacer.metrics().calls > 1 { return Ok(()); }
/// }
/// # }
/// ```
///
/// Each failure lengthens the interval, also those of calls that were under way together: eight workers that a service
/// throttles at once lengthen it eight times. With many workers, choose a smaller `up` in
/// [`PacerGrowth`](crate::PacerGrowth), such as 1100 thousandths.
///
/// The result of a call counts from the first poll of the future, before the wait. So a task that is cancelled during
/// its wait has reported its call, and holds no lock and no position in a queue. A wait that is cut short counts in
/// [`PacerMetrics::waits`] and, in full length, in [`PacerMetrics::total_wait`]: they count the waits that the pacer
/// asked for.
///
/// # Many processes
///
/// [`Pacer::shared`] makes a named pacer with its pace in the store of a policy. All workers with this name, in any
/// process, keep one pace together. The interval is the average time between two calls of all workers. Each worker
/// waits for the interval times the number of workers. So three workers and thirty call the service equally often. In
/// contrast, each clone of a pacer that isn't shared waits for the interval alone. A single worker waits exactly for
/// the interval, which is the initial one after the first failure.
///
/// A worker is a clone, from the first call that it reports until it is dropped. Give each task its own clone, because
/// tasks that use the same one count as one worker. A worker that ends, or neither reports a call nor waits for 30 s,
/// stops counting until it reports its next call. The length of a wait is fixed when it begins. Up to 4096 workers are
/// counted.
///
/// ```
/// use tidegate::PacerSpec;
/// use tidegate::policy::{Policy, PolicySources};
/// use tidegate::{Pacer, Stores};
///
/// # async fn work(pacer: Pacer) { pacer.on_success().await }
/// # async fn start() -> Result<(), Box<dyn std::error::Error>> {
/// let text = "[store]\nurl = \"memory\"    # or redis://, mysql://, postgres://, mongodb://, file:";
/// let policy = Policy::load(PolicySources::new().file("tidegate.toml", text))?;
/// let stores = Stores::open(&policy, |name| std::env::var(name).ok()).await?;
/// let pacer = Pacer::shared(PacerSpec::default(), "api.example.com", &stores)?;
/// for _ in 0..8 {
///     tokio::spawn(work(pacer.clone()));
/// }
/// # Ok(())
/// # }
/// # tokio::runtime::Runtime::new().unwrap().block_on(start()).unwrap();
/// ```
///
/// Reporting a call takes one round trip to the store. If the store doesn't reply within `store.timeout`, the process
/// continues by the same rules from the last known interval and number of workers. It doesn't wait for the store again
/// until the store is back. Then the interval that failures have led to applies to all workers, if it is longer than
/// the store's. A pace that no worker uses for an hour beyond its longest wait is forgotten.
#[derive(Clone)]
pub struct Pacer<C = SystemClock> {
    backend: PaceBackend,
    clock: C,
}

/// The place that keeps the pace: this process or a store.
#[derive(Clone)]
enum PaceBackend {
    Local(Arc<Mutex<LocalPace>>),
    Shared(PaceWorker),
}

struct LocalPace {
    pacer: tidegate_core::LocalPacer,
    rng: SmallRng,
}

impl Pacer {
    /// A pacer that has seen no failure yet.
    ///
    /// # Errors
    /// A setting that is out of its range: see [`tidegate_core::LocalPacer::new`].
    pub fn new(spec: PacerSpec) -> Result<Self, PacerError> {
        Self::with_clock(spec, SystemClock::new())
    }

    /// A worker of the pace with this name in these stores. See [`Stores::pacer`].
    ///
    /// # Errors
    /// As [`Stores::pacer`].
    pub fn shared(spec: PacerSpec, name: &str, stores: &Stores) -> Result<Self, OpenError> {
        stores.pacer(spec, name, SystemClock::new())
    }
}

impl<C: Clock> Pacer<C> {
    /// A [`Pacer::new`] with the given clock. A clock that isn't the machine's is read every 5 ms, in tokio's time or,
    /// in a blocking wait, in the machine's.
    ///
    /// # Errors
    /// As [`Pacer::new`].
    pub fn with_clock(spec: PacerSpec, clock: C) -> Result<Self, PacerError> {
        let state =
            LocalPace { pacer: tidegate_core::LocalPacer::new(spec)?, rng: SmallRng::seed_from_u64(random_u64()) };
        Ok(Self { backend: PaceBackend::Local(Arc::new(Mutex::new(state))), clock })
    }

    /// A [`Pacer::shared`] over a store that `open` makes for the limits of the pacer. Keys are hashed with `seed`,
    /// which must be the same for all processes that share the pace.
    ///
    /// # Errors
    /// Settings that can't be shared, see [`tidegate_core::SharedPacerRules::new`], and the errors of `open`.
    pub fn with_store(
        spec: PacerSpec,
        name: &str,
        clock: C,
        seed: &KeySeed,
        open: impl FnOnce(Limits) -> Result<AnyStore, OpenError>,
    ) -> Result<Self, OpenError>
    where
        C: Clone,
    {
        let shared_pace = SharedPace::open(spec, name, seed, clock.clone(), open)?;
        Ok(Self::from_shared(Arc::new(shared_pace), clock))
    }

    pub(crate) fn from_shared(shared_pace: Arc<SharedPace>, clock: C) -> Self {
        Self { backend: PaceBackend::Shared(PaceWorker::new(shared_pace)), clock }
    }

    /// Reports a failed call, lengthens the wait, and waits. Must be called within a tokio runtime with timers enabled.
    pub async fn on_failure(&self) {
        self.report_call(true).await;
    }

    /// Reports a successful call, and waits if there is a wait. A certain number of successes shortens the wait. Must
    /// be called within a tokio runtime with timers enabled.
    pub async fn on_success(&self) {
        self.report_call(false).await;
    }

    /// Does [`on_failure`](Self::on_failure) on a thread that may block.
    pub fn on_failure_blocking(&self) {
        self.report_call_blocking(true);
    }

    /// Does [`on_success`](Self::on_success) on a thread that may block.
    pub fn on_success_blocking(&self) {
        self.report_call_blocking(false);
    }

    /// The current wait after a call. Zero at first, and again after enough successes. For a shared pacer it is the
    /// time between two calls of all workers, as last known to this process.
    pub fn interval(&self) -> Duration {
        match &self.backend {
            PaceBackend::Local(state) => state.lock().pacer.interval(),
            PaceBackend::Shared(worker) => worker.interval(),
        }
    }

    /// The number of workers that share the pace, as last known to this process. 1 if the pacer isn't shared.
    pub fn workers(&self) -> u32 {
        match &self.backend {
            PaceBackend::Local(_) => 1,
            PaceBackend::Shared(worker) => worker.workers(),
        }
    }

    /// The totals since the pacer was made, over all clones in this process.
    pub fn metrics(&self) -> PacerMetrics {
        match &self.backend {
            PaceBackend::Local(state) => state.lock().pacer.metrics(),
            PaceBackend::Shared(worker) => worker.metrics(),
        }
    }

    async fn report_call(&self, failed: bool) {
        match &self.backend {
            PaceBackend::Local(state) => self.sleep(report_local(state, failed)).await,
            PaceBackend::Shared(worker) => {
                let mut wait = worker.report_call(failed).await;
                while wait > RENEW_INTERVAL {
                    self.sleep(RENEW_INTERVAL).await;
                    worker.renew();
                    wait -= RENEW_INTERVAL;
                }
                self.sleep(wait).await;
            }
        }
    }

    fn report_call_blocking(&self, failed: bool) {
        match &self.backend {
            PaceBackend::Local(state) => self.block(report_local(state, failed)),
            PaceBackend::Shared(worker) => {
                let mut wait = worker.report_call_blocking(failed);
                while wait > RENEW_INTERVAL {
                    self.block(RENEW_INTERVAL);
                    worker.renew();
                    wait -= RENEW_INTERVAL;
                }
                self.block(wait);
            }
        }
    }

    async fn sleep(&self, wait: Duration) {
        if !wait.is_zero() {
            precise_timer::sleep_by(&self.clock, wait).await;
        }
    }

    fn block(&self, wait: Duration) {
        if self.clock.is_system() {
            return std::thread::sleep(wait);
        }
        let until = self.clock.now() + Span::from_duration(wait);
        while let left = until.since(self.clock.now())
            && !left.is_zero()
        {
            std::thread::sleep(left.as_duration().min(POLL_INTERVAL));
        }
    }
}

fn report_local(state: &Mutex<LocalPace>, failed: bool) -> Duration {
    let LocalPace { pacer, rng } = &mut *state.lock();
    if failed { pacer.failed(rng) } else { pacer.succeeded(rng).unwrap_or_default() }
}

impl<C> fmt::Debug for Pacer<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pacer").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::Time;
    use tidegate_core::pacer::{PacerGrowth, PacerMode};
    use tidegate_runtime::clock::{ManualClock, TokioClock};
    use tokio::task::JoinSet;
    use tokio::time::sleep;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    /// Every wait after the first failure is one millisecond.
    fn constant() -> PacerSpec {
        PacerSpec { initial: MS(1), max: MS(1), randomization: 0, successes: u32::MAX, ..PacerSpec::default() }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn totals_stay_exact_when_tasks_are_cancelled() {
        const EACH: u64 = 50;
        let pacer = Pacer::new(constant()).unwrap();
        pacer.on_failure().await;
        let mut tasks = JoinSet::new();
        for task in 0..64_u64 {
            let pacer = pacer.clone();
            tasks.spawn(async move {
                let mut cancelled = 0_u64;
                for call in 0..EACH {
                    // Some tasks are cancelled at once, some during their wait and some after it.
                    let turn = (task * 31 + call * 17) % 40;
                    let given_up = async {
                        if turn >= 4 {
                            sleep(Duration::from_micros(turn * 50)).await;
                        }
                    };
                    let told =
                        async { if call % 2 == 0 { pacer.on_failure().await } else { pacer.on_success().await } };
                    tokio::select! {
                        biased;
                        _ = told => {}
                        () = given_up => cancelled += 1,
                    }
                }
                cancelled
            });
        }
        let cancelled: u64 = tasks.join_all().await.into_iter().sum();
        assert!(cancelled > 100 && cancelled < 64 * EACH, "{cancelled}");
        let calls = 64 * EACH + 1;
        let expected =
            PacerMetrics { calls, steps_up: 32 * EACH + 1, steps_down: 0, waits: calls, total_wait: MS(calls) };
        assert_eq!(pacer.metrics(), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn waits_last_exactly_the_pacers_interval() {
        let growth = PacerGrowth::Exponential { up: 2_000, down: 500 };
        let spec =
            PacerSpec { growth, randomization: 0, successes: 1, mode: PacerMode::Classic, ..PacerSpec::default() };
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
        assert_eq!((pacer.metrics().steps_down, pacer.metrics().steps_up), (2, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn advancing_a_manual_clock_ends_the_wait() {
        let clock = ManualClock::default();
        let pacer = Pacer::with_clock(PacerSpec::default(), clock.clone()).unwrap();
        let waits = tokio::spawn({
            let pacer = pacer.clone();
            async move { pacer.on_failure().await }
        });
        sleep(Duration::from_secs(60)).await;
        assert!(!waits.is_finished());
        clock.advance(Span::from_millis(500));
        waits.await.unwrap();
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "it is the real wait that is measured")]
    fn blocking_calls_wait_like_async_calls() {
        let pacer = Pacer::new(PacerSpec { initial: MS(20), ..PacerSpec::default() }).unwrap();
        let began = std::time::Instant::now();
        pacer.on_success_blocking();
        pacer.on_failure_blocking();
        pacer.on_success_blocking();
        assert!(began.elapsed() >= MS(40), "{:?}", began.elapsed());
        assert_eq!((pacer.metrics().waits, pacer.interval()), (2, MS(20)));

        let clock = ManualClock::default();
        let pacer = Pacer::with_clock(constant(), clock.clone()).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| pacer.on_failure_blocking());
            std::thread::sleep(MS(20));
            assert!(!waits.is_finished());
            // The first step may come before the thread begins its wait.
            while !waits.is_finished() {
                clock.advance(Span::from_millis(1));
                std::thread::sleep(MS(1));
            }
        });
    }

    #[test]
    fn each_pacer_draws_different_random_waits() {
        let waits = || {
            let pacer = Pacer::with_clock(PacerSpec::default(), ManualClock::default()).unwrap();
            let PaceBackend::Local(state) = &pacer.backend else { unreachable!("made for this process") };
            (0..8).map(|_| report_local(state, true)).collect::<Vec<_>>()
        };
        assert_ne!(waits(), waits());
    }
}
