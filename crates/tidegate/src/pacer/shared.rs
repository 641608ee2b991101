//! A pace that is kept in a store, and the workers of this process that share it.
//!
//! The store keeps the time between two calls of all workers, and a permit with a lease for each worker. A worker waits
//! for that time multiplied by the number of workers. So the total pace stays the same when workers join or leave.
//! While the store is unavailable, the process continues by the same rules from the last known state.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tidegate_core::pacer::{PaceStep, PacerMetrics, PacerState};
use tidegate_core::{
    Batch, Clock, Concurrency, Key, Limit, LimitError, LimitId, LimitKind, Limits, OnOutage, Op, Outcomes, PacerError,
    PacerSpec, SharedPacerRules, Sharing, Span, Time, Verb,
};
use tidegate_policy::{KeySeed, limit_tag};
use tidegate_runtime::random::random_u64;
use tidegate_store::{AnyStore, Store, StoreError, StoreResponse};
use tokio::runtime::Handle;

use crate::OpenError;

/// The largest number of workers that are counted.
const MAX_WORKERS: u64 = 4096;
/// The interval at which a waiting worker renews its permit.
pub(super) const RENEW_INTERVAL: Duration = Concurrency::RENEW_INTERVAL.as_duration();
/// The longest time that a blocked thread waits for an answer. Stores answer or fail much sooner, unless the thread
/// itself blocks their runtime.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// The interval of the store's maintenance.
const MAINTENANCE_INTERVAL: Span = Span::from_secs(1);

/// The limits of a pacer in its store: the pace, and the permits of its workers.
fn limits(name: &str, rules: SharedPacerRules) -> Result<Limits, LimitError> {
    let limit = |kind: LimitKind, on_outage| {
        let tag = limit_tag("pacer", name, &kind);
        Limit::new(kind).with_tag(tag).with_sharing(Sharing { on_outage, lease: None })
    };
    let workers = Concurrency::new(MAX_WORKERS, Concurrency::DEFAULT_LEASE)?;
    // On an outage, the last known pace of this process is more accurate than a share of the store's.
    Limits::new(vec![
        limit(LimitKind::Pace(rules), OnOutage::Deny),
        limit(LimitKind::Concurrency(workers), OnOutage::Local),
    ])
}

fn limit_ids() -> (LimitId, LimitId) {
    (LimitId::FIRST, LimitId::from_index(1).expect("invariant: a plan holds more than two"))
}

/// The state that all workers of a process share.
pub(crate) struct SharedPace {
    rules: SharedPacerRules,
    store: AnyStore,
    key: Key,
    clock: Box<dyn Clock>,
    /// The runtime that waits for answers of the store. A result thus survives a cancelled caller.
    runtime: Option<Handle>,
    /// The number of workers in this process.
    local_workers: AtomicU32,
    cached: Mutex<CachedPace>,
}

/// The last known state of the pace in this process.
struct CachedPace {
    state: PacerState,
    workers: u32,
    /// True if calls have failed that the store may not know of.
    unreported_failure: bool,
    metrics: PacerMetrics,
    rng: SmallRng,
    maintained_at: Time,
}

impl SharedPace {
    /// A pace with this name, in the store that `open` opens for the necessary limits.
    pub(crate) fn open(
        spec: PacerSpec,
        name: &str,
        seed: &KeySeed,
        clock: impl Clock,
        open: impl FnOnce(Limits) -> Result<AnyStore, OpenError>,
    ) -> Result<Self, OpenError> {
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

    /// Applies the store's answer to a report, and returns the resulting wait.
    fn apply_answer(&self, call: PaceReport, answer: Result<Outcomes, StoreError>) -> Duration {
        let now = self.clock.now();
        let step = match answer.as_ref().map(Outcomes::list) {
            Ok([pace, workers]) => Some((PaceStep::from_outcome(pace), workers.used.clamp(1, MAX_WORKERS) as u32)),
            _ => None,
        };
        let local_workers = self.local_workers.load(Ordering::Relaxed);
        let (wait, missed) = self.cached.lock().update(&self.rules, call, step, local_workers, now);
        if let Some(missed) = missed {
            self.store.submit(&Batch::with_op(0, Op::new(limit_ids().0, Verb::Debit, self.key, missed)), now);
        }
        wait
    }

    fn maintain_store(&self, now: Time) {
        let mut cached = self.cached.lock();
        let is_due = now.since(cached.maintained_at) >= MAINTENANCE_INTERVAL || now < cached.maintained_at;
        if is_due {
            cached.maintained_at = now;
            drop(cached);
            self.store.maintain(now);
        }
    }
}

/// The result of a call, and the random number for its step.
#[derive(Clone, Copy)]
struct PaceReport {
    failed: bool,
    draw: u32,
}

impl CachedPace {
    /// Returns the wait for a step and a number of workers. If the store didn't answer, the step is computed here. The
    /// second value is the interval that the store missed meanwhile, and is returned with the store's next answer.
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
                // The store's state is newer than the local one, unless a failure was not reported.
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

/// A worker of a pace. It counts from the first call that it reports until it is dropped.
pub(super) struct PaceWorker {
    pace: Arc<SharedPace>,
    /// The id under which its permit is held.
    holder: u64,
    is_counted: AtomicBool,
}

impl PaceWorker {
    pub(super) fn new(pace: Arc<SharedPace>) -> Self {
        Self { pace, holder: random_u64(), is_counted: AtomicBool::new(false) }
    }

    /// Reports a call, and returns the wait before the next one. The report is sent before the future first waits. The
    /// answer is applied even if the future is cancelled.
    pub(super) async fn report_call(&self, failed: bool) -> Duration {
        let call = self.new_report(failed);
        match self.send_report(call) {
            StoreResponse::Ready(outcomes) => self.pace.apply_answer(call, Ok(outcomes)),
            StoreResponse::Pending(answer) => {
                let Some(runtime) = &self.pace.runtime else { return self.pace.apply_answer(call, answer.await) };
                let pace = Arc::clone(&self.pace);
                let task = runtime.spawn(async move { pace.apply_answer(call, answer.await) });
                // An error means that the runtime of the store has shut down.
                task.await.unwrap_or_else(|_| self.pace.apply_answer(call, Err(StoreError::Unavailable)))
            }
        }
    }

    /// Does the same on a thread that may block.
    pub(super) fn report_call_blocking(&self, failed: bool) -> Duration {
        let call = self.new_report(failed);
        let answer = match (self.send_report(call), &self.pace.runtime) {
            (StoreResponse::Ready(outcomes), _) => Ok(outcomes),
            (StoreResponse::Pending(_), None) => Err(StoreError::Unavailable),
            (StoreResponse::Pending(answer), Some(runtime)) => {
                let (sender, receiver) = sync_channel(1);
                runtime.spawn(async move { sender.send(answer.await) });
                receiver.recv_timeout(ANSWER_TIMEOUT).unwrap_or(Err(StoreError::Timeout(ANSWER_TIMEOUT)))
            }
        };
        self.pace.apply_answer(call, answer)
    }

    fn new_report(&self, failed: bool) -> PaceReport {
        PaceReport { failed, draw: self.pace.cached.lock().rng.next_u32() }
    }

    fn send_report(&self, PaceReport { failed, draw }: PaceReport) -> StoreResponse<<AnyStore as Store>::Future> {
        let SharedPace { store, key, clock, local_workers, .. } = &*self.pace;
        if !self.is_counted.swap(true, Ordering::Relaxed) {
            local_workers.fetch_add(1, Ordering::Relaxed);
        }
        let now = clock.now();
        self.pace.maintain_store(now);
        let (pace, workers) = limit_ids();
        let report_op = Op::new(pace, Verb::Pace { failed, draw }, *key, 0);
        store.apply(&Batch::new(self.holder).with_ops([report_op, Op::new(workers, Verb::Take, *key, 1)]), now)
    }

    /// Renews the permit and the pace. A wait of all workers can be longer than the time after which the pace is
    /// forgotten.
    pub(super) fn renew(&self) {
        let SharedPace { store, key, clock, .. } = &*self.pace;
        let (pace, workers) = limit_ids();
        let ops = [Op::new(workers, Verb::Renew, *key, 1), Op::new(pace, Verb::Debit, *key, 0)];
        store.submit(&Batch::new(self.holder).with_ops(ops), clock.now());
    }

    pub(super) fn interval(&self) -> Duration {
        self.pace.cached.lock().state.wait()
    }

    pub(super) fn workers(&self) -> u32 {
        self.pace.cached.lock().workers
    }

    pub(super) fn metrics(&self) -> PacerMetrics {
        self.pace.cached.lock().metrics
    }
}

/// A clone is another worker of the same pace.
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
        let SharedPace { store, key, clock, local_workers, runtime, .. } = &*self.pace;
        local_workers.fetch_sub(1, Ordering::Relaxed);
        let release = Batch::with_op(self.holder, Op::new(limit_ids().1, Verb::Release, *key, 1));
        if let (StoreResponse::Pending(answer), Some(runtime)) = (store.apply(&release, clock.now()), runtime) {
            // The pace must outlive the request, because the store is dropped with its last worker.
            let pace = Arc::clone(&self.pace);
            runtime.spawn(async move {
                // A permit that can't be released ends with its lease.
                let _ = answer.await;
                drop(pace);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_runtime::clock::ManualClock;
    use tidegate_store::Memory;

    /// Ten workers at the longest wait of 15 min wait for two and a half hours. A pace without any report is forgotten
    /// after half of that time.
    #[tokio::test]
    async fn a_pace_is_retained_while_workers_wait() {
        for (renews, remembered) in [(true, true), (false, false)] {
            let clock = ManualClock::default();
            let open = |limits: Limits| Ok(AnyStore::Memory(Memory::new(Arc::new(limits), 1 << 20)));
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
