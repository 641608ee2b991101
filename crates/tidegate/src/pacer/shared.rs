//! A pace that is kept in a store, and the workers of this process that keep to it.
//!
//! The store holds the time between any two calls of all workers, and a list of them: a permit each, with a lease. A
//! worker waits as many times that long as there are workers, so the pace of all is the same whoever comes and goes. While
//! the store can't be reached the process goes on from what it last knew, by the same rules.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tidegate_core::pacer::{PaceStep, PacerMetrics, PacerState};
use tidegate_core::{
    Batch, Clock, Concurrency, Key, Limit, LimitError, LimitId, LimitKind, Limits, OnOutage, Op, Outcomes, PacerError,
    PacerSpec, SharedPacerRules, Sharing, Span, Time, Verb,
};
use tidegate_policy::{KeySeed, limit_tag};
use tidegate_store::{Answer, AnyStore, Store, StoreError};
use tokio::runtime::Handle;

use tidegate_runtime::random::random_u64;

/// How many workers are counted at the most.
const MAX_WORKERS: u64 = 4096;
/// How often a worker that waits says that it is still there.
pub(super) const RENEW_INTERVAL: Duration = Concurrency::RENEW_INTERVAL.as_duration();
/// How long a thread waits for an answer. Stores answer or fail much sooner, but not on a runtime that the thread itself
/// holds up.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// How often the store is looked after.
const MAINTENANCE_INTERVAL: Span = Span::from_secs(1);

/// What a pacer asks of its store: the pace, and who keeps to it.
fn limits(name: &str, rules: SharedPacerRules) -> Result<Limits, LimitError> {
    let limit = |kind: LimitKind, on_outage| {
        let tag = limit_tag("pacer", name, &kind);
        Limit::new(kind).with_tag(tag).with_sharing(Sharing { on_outage, lease: None })
    };
    let workers = Concurrency::new(MAX_WORKERS, Concurrency::DEFAULT_LEASE)?;
    // What this process last knew of the pace is nearer to it than a share of nothing.
    Limits::new(vec![
        limit(LimitKind::Pace(rules), OnOutage::Deny),
        limit(LimitKind::Concurrency(workers), OnOutage::Local),
    ])
}

/// The ids of these.
fn limit_ids() -> (LimitId, LimitId) {
    (LimitId::FIRST, LimitId::from_index(1).expect("invariant: a plan holds more than two"))
}

/// What the workers of a process have in common.
pub(crate) struct SharedPace {
    rules: SharedPacerRules,
    store: AnyStore,
    key: Key,
    clock: Box<dyn Clock>,
    /// Where answers that have to be waited for are, so that nothing hangs on who asked.
    runtime: Option<Handle>,
    /// Workers of this process.
    local_workers: AtomicU32,
    cached: Mutex<CachedPace>,
}

/// What this process knows of the pace.
struct CachedPace {
    state: PacerState,
    workers: u32,
    /// Whether calls have failed that the store may not have been told of.
    unreported_failure: bool,
    metrics: PacerMetrics,
    rng: SmallRng,
    maintained_at: Time,
}

impl SharedPace {
    /// A pace of this name, in the store that `open` opens for the limits that are needed.
    pub(crate) fn open<E: From<PacerError> + From<LimitError>>(
        spec: PacerSpec,
        name: &str,
        seed: &KeySeed,
        clock: impl Clock,
        open: impl FnOnce(Limits) -> Result<AnyStore, E>,
    ) -> Result<Self, E> {
        let rules = SharedPacerRules::new(spec)?;
        let cached = CachedPace {
            state: PacerState::default(),
            workers: 1,
            unreported_failure: false,
            metrics: PacerMetrics::default(),
            rng: SmallRng::seed_from_u64(random_u64()),
            maintained_at: clock.now(),
        };
        Ok(Self {
            rules,
            store: open(limits(name, rules)?)?,
            key: seed.pacer_key(name),
            clock: Box::new(clock),
            runtime: Handle::try_current().ok(),
            local_workers: AtomicU32::new(0),
            cached: Mutex::new(cached),
        })
    }

    pub(crate) fn has_spec(&self, spec: PacerSpec) -> Result<bool, PacerError> {
        Ok(self.rules == SharedPacerRules::new(spec)?)
    }

    fn lock_cached(&self) -> MutexGuard<'_, CachedPace> {
        // Nothing under it panics half-way.
        self.cached.lock()
    }

    /// Takes in what came of telling the store; the wait that it means.
    fn apply_answer(&self, call: PaceReport, answer: Result<Outcomes, StoreError>) -> Duration {
        let now = self.clock.now();
        let step = match answer.as_ref().map(Outcomes::list) {
            Ok([pace, workers]) => Some((PaceStep::from_outcome(pace), workers.used.clamp(1, MAX_WORKERS) as u32)),
            _ => None,
        };
        let (wait, missed) =
            self.lock_cached().update(&self.rules, call, step, self.local_workers.load(Ordering::Relaxed), now);
        if let Some(missed) = missed {
            self.store.tell(&Batch::with_op(0, Op::new(limit_ids().0, Verb::Debit, self.key, missed)), now);
        }
        wait
    }

    fn maintain_store(&self, now: Time) {
        let mut cached = self.lock_cached();
        let is_due = now.since(cached.maintained_at) >= MAINTENANCE_INTERVAL || now < cached.maintained_at;
        if is_due {
            cached.maintained_at = now;
            drop(cached);
            self.store.tend(now);
        }
    }
}

/// How a call went, and the random number that goes with it.
#[derive(Clone, Copy)]
struct PaceReport {
    failed: bool,
    draw: u32,
}

impl CachedPace {
    /// The wait that a step and a number of workers mean. Without them the step is made here, and told as the interval
    /// that the store has missed once it answers.
    fn update(
        &mut self,
        rules: &SharedPacerRules,
        PaceReport { failed, draw }: PaceReport,
        answer: Option<(PaceStep, u32)>,
        local_workers: u32,
        now: Time,
    ) -> (Duration, Option<u64>) {
        let mut missed_interval = None;
        let step = match answer {
            Some((step, workers)) => {
                let mut state = rules.state_after(step, now);
                // What only successes led to is the older knowledge.
                if std::mem::take(&mut self.unreported_failure) {
                    rules.refresh(&mut self.state, now);
                    if self.state.interval > state.interval {
                        missed_interval = Some(self.state.interval);
                        rules.raise_to(&mut state, self.state.interval, now);
                    }
                }
                (self.state, self.workers) = (state, workers);
                step
            }
            None => {
                self.unreported_failure |= failed;
                self.workers = self.workers.max(local_workers);
                rules.record_call(&mut self.state, failed, draw, now)
            }
        };
        let wait = self.state.wait().saturating_mul(self.workers);
        let waits = failed || step.before > 0 || !wait.is_zero();
        self.metrics.record(failed, !failed && rules.is_down(step), waits.then_some(wait));
        (wait, missed_interval)
    }
}

/// One of those who keep to a pace. It counts from the first call that it tells of, and is let go when it is dropped.
pub(super) struct PaceWorker {
    pace: Arc<SharedPace>,
    /// What its permit is held by.
    holder: u64,
    is_counted: AtomicBool,
}

impl PaceWorker {
    pub(super) fn new(pace: Arc<SharedPace>) -> Self {
        Self { pace, holder: random_u64(), is_counted: AtomicBool::new(false) }
    }

    /// Tells the pace of a call; the wait before the next. The store is told before this future waits for the first time,
    /// and what comes of it counts whether it is waited for or not.
    pub(super) async fn report_call(&self, failed: bool) -> Duration {
        let call = self.new_report(failed);
        match self.send_report(call) {
            Answer::Ready(outcomes) => self.pace.apply_answer(call, Ok(outcomes)),
            Answer::Later(answer) => {
                let Some(runtime) = &self.pace.runtime else { return self.pace.apply_answer(call, answer.await) };
                let pace = Arc::clone(&self.pace);
                let task = runtime.spawn(async move { pace.apply_answer(call, answer.await) });
                match task.await {
                    Ok(wait) => wait,
                    // The runtime that looks after the store is gone.
                    Err(_) => self.pace.apply_answer(call, Err(StoreError::Unavailable)),
                }
            }
        }
    }

    /// The same for a thread that may block.
    pub(super) fn report_call_blocking(&self, failed: bool) -> Duration {
        let call = self.new_report(failed);
        let answer = match (self.send_report(call), &self.pace.runtime) {
            (Answer::Ready(outcomes), _) => Ok(outcomes),
            (Answer::Later(_), None) => Err(StoreError::Unavailable),
            (Answer::Later(answer), Some(runtime)) => {
                let (sender, receiver) = sync_channel(1);
                runtime.spawn(async move { sender.send(answer.await) });
                receiver.recv_timeout(ANSWER_TIMEOUT).unwrap_or(Err(StoreError::Timeout(ANSWER_TIMEOUT)))
            }
        };
        self.pace.apply_answer(call, answer)
    }

    fn new_report(&self, failed: bool) -> PaceReport {
        PaceReport { failed, draw: self.pace.lock_cached().rng.next_u32() }
    }

    fn send_report(&self, PaceReport { failed, draw }: PaceReport) -> Answer<<AnyStore as Store>::Later> {
        let SharedPace { store, key, clock, local_workers: own_workers, .. } = &*self.pace;
        if !self.is_counted.swap(true, Ordering::Relaxed) {
            own_workers.fetch_add(1, Ordering::Relaxed);
        }
        let now = clock.now();
        self.pace.maintain_store(now);
        let (pace, workers) = limit_ids();
        let report_op = Op::new(pace, Verb::Pace { failed, draw }, *key, 0);
        store.apply(&Batch::new(self.holder).with_ops([report_op, Op::new(workers, Verb::Take, *key, 1)]), now)
    }

    /// Says that it is still there, and that the pace is still kept to: all may wait for longer than it is remembered.
    pub(super) fn renew(&self) {
        let SharedPace { store, key, clock, .. } = &*self.pace;
        let (pace, workers) = limit_ids();
        let ops = [Op::new(workers, Verb::Renew, *key, 1), Op::new(pace, Verb::Debit, *key, 0)];
        store.tell(&Batch::new(self.holder).with_ops(ops), clock.now());
    }

    pub(super) fn interval(&self) -> Duration {
        self.pace.lock_cached().state.wait()
    }

    pub(super) fn workers(&self) -> u32 {
        self.pace.lock_cached().workers
    }

    pub(super) fn metrics(&self) -> PacerMetrics {
        self.pace.lock_cached().metrics
    }
}

/// Another worker at the same pace.
impl Clone for PaceWorker {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.pace))
    }
}

impl Drop for PaceWorker {
    fn drop(&mut self) {
        if !*self.is_counted.get_mut() {
            return;
        }
        let SharedPace { store, key, clock, local_workers: own_workers, runtime, .. } = &*self.pace;
        own_workers.fetch_sub(1, Ordering::Relaxed);
        let release = Batch::with_op(self.holder, Op::new(limit_ids().1, Verb::Release, *key, 1));
        if let (Answer::Later(answer), Some(runtime)) = (store.apply(&release, clock.now()), runtime) {
            // With its last worker the store would go before it has answered.
            let pace = Arc::clone(&self.pace);
            runtime.spawn(async move {
                // Who can't be let go is when the lease ends.
                let _ = answer.await;
                drop(pace);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpenError;
    use tidegate_runtime::clock::ManualClock;
    use tidegate_store::Memory;

    /// Ten workers at the longest wait of 15 min all wait for two hours and a half, and a pace that nobody tells of calls is
    /// forgotten after half of that.
    #[tokio::test]
    async fn a_pace_is_retained_while_workers_wait() {
        for (renews, remembered) in [(true, true), (false, false)] {
            let clock = ManualClock::default();
            let open = |limits: Limits| Ok::<_, OpenError>(AnyStore::Memory(Memory::new(Arc::new(limits), 1 << 20)));
            let spec = PacerSpec::default();
            let together = SharedPace::open(spec, "api", &KeySeed::new([1; 16]), clock.clone(), open).unwrap();
            let worker = PaceWorker::new(Arc::new(together));
            assert_eq!(worker.report_call(true).await, spec.initial);
            for _ in 0..900 {
                clock.advance(Concurrency::RENEW_INTERVAL);
                if renews {
                    worker.renew();
                }
            }
            assert_eq!(worker.report_call(false).await > Duration::ZERO, remembered);
        }
    }
}
