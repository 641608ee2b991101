//! A pace that is kept in a store, and the workers of this process that keep to it.
//!
//! The store holds the time between any two calls of all workers, and a list of them: a permit each, with a lease. A
//! worker waits as many times that long as there are workers, so the pace of all is the same whoever comes and goes. While
//! the store can't be reached the process goes on from what it last knew, by the same rules.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tidegate_core::pacer::{Metrics, Step, Tempo};
use tidegate_core::{
    Batch, Clock, Concurrency, Key, Kind, Limit, LimitError, LimitId, Limits, OnOutage, Op, Outcomes, PacerError,
    PacerSpec, SharedPacer, Sharing, Span, Time, Verb,
};
use tidegate_policy::{KeySeed, limit_tag};
use tidegate_store::{Answer, AnyStore, Store, StoreError};
use tokio::runtime::Handle;

use crate::random::random_u64;

/// How many workers are counted at the most.
const MAX_WORKERS: u64 = 4096;
/// How often a worker that waits says that it is still there.
pub(super) const RENEW_EVERY: Duration = Concurrency::RENEW.as_duration();
/// How long a thread waits for an answer. Stores answer or fail much sooner, but not on a runtime that the thread itself
/// holds up.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often the store is looked after.
const TEND_EVERY: Span = Span::from_secs(1);

/// What a pacer asks of its store: the pace, and who keeps to it.
fn limits(name: &str, pacer: SharedPacer) -> Result<Limits, LimitError> {
    let limit = |kind: Kind, on_outage| {
        let tag = limit_tag("pacer", name, &kind);
        Limit::new(kind).tagged(tag).shared(Sharing { on_outage, lease: None })
    };
    let workers = Concurrency::new(MAX_WORKERS, Concurrency::LEASE)?;
    // What this process last knew of the pace is nearer to it than a share of nothing.
    Limits::new(vec![limit(Kind::Pace(pacer), OnOutage::Deny), limit(Kind::Concurrency(workers), OnOutage::Local)])
}

/// The ids of these.
fn ids() -> (LimitId, LimitId) {
    (LimitId::FIRST, LimitId::from_index(1).expect("invariant: a plan holds more than two"))
}

/// What the workers of a process have in common.
pub(crate) struct Together {
    pacer: SharedPacer,
    store: AnyStore,
    key: Key,
    clock: Box<dyn Clock>,
    /// Where answers that have to be waited for are, so that nothing hangs on who asked.
    runtime: Option<Handle>,
    /// Workers of this process.
    own: AtomicU32,
    known: Mutex<Known>,
}

/// What this process knows of the pace.
struct Known {
    tempo: Tempo,
    workers: u32,
    /// Whether calls have failed that the store may not have been told of.
    untold: bool,
    metrics: Metrics,
    rng: SmallRng,
    tended_at: Time,
}

impl Together {
    /// A pace of this name, in the store that `open` opens for the limits that are needed.
    pub(crate) fn open<E: From<PacerError> + From<LimitError>>(
        spec: PacerSpec,
        name: &str,
        seed: &KeySeed,
        clock: impl Clock,
        open: impl FnOnce(Limits) -> Result<AnyStore, E>,
    ) -> Result<Self, E> {
        let pacer = SharedPacer::new(spec)?;
        let known = Known {
            tempo: Tempo::default(),
            workers: 1,
            untold: false,
            metrics: Metrics::default(),
            rng: SmallRng::seed_from_u64(random_u64()),
            tended_at: clock.now(),
        };
        Ok(Self {
            pacer,
            store: open(limits(name, pacer)?)?,
            key: seed.pacer(name),
            clock: Box::new(clock),
            runtime: Handle::try_current().ok(),
            own: AtomicU32::new(0),
            known: Mutex::new(known),
        })
    }

    pub(crate) fn is_of(&self, spec: PacerSpec) -> Result<bool, PacerError> {
        Ok(self.pacer == SharedPacer::new(spec)?)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Nothing under it panics half-way.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what came of telling the store; the wait that it means.
    fn heard(&self, call: Call, answer: Result<Outcomes, StoreError>) -> Duration {
        let now = self.clock.now();
        let step = match answer.as_ref().map(Outcomes::list) {
            Ok([pace, workers]) => Some((Step::of(pace), workers.used.clamp(1, MAX_WORKERS) as u32)),
            _ => None,
        };
        let (wait, missed) = self.known().heard(&self.pacer, call, step, self.own.load(Ordering::Relaxed), now);
        if let Some(missed) = missed {
            self.store.tell(&Batch::one(0, Op::new(ids().0, Verb::Debit, self.key, missed)), now);
        }
        wait
    }

    fn tend(&self, now: Time) {
        let mut known = self.known();
        let is_due = now.since(known.tended_at) >= TEND_EVERY || now < known.tended_at;
        if is_due {
            known.tended_at = now;
            drop(known);
            self.store.tend(now);
        }
    }
}

/// How a call went, and the random number that goes with it.
#[derive(Clone, Copy)]
struct Call {
    failed: bool,
    draw: u32,
}

impl Known {
    /// The wait that a step and a number of workers mean. Without them the step is made here, and told as the interval
    /// that the store has missed once it answers.
    fn heard(
        &mut self,
        pacer: &SharedPacer,
        Call { failed, draw }: Call,
        told: Option<(Step, u32)>,
        own: u32,
        now: Time,
    ) -> (Duration, Option<u64>) {
        let mut missed = None;
        let step = match told {
            Some((step, workers)) => {
                let mut tempo = pacer.tempo(step, now);
                // What only successes led to is the older knowledge.
                if std::mem::take(&mut self.untold) {
                    pacer.settle(&mut self.tempo, now);
                    if self.tempo.interval > tempo.interval {
                        missed = Some(self.tempo.interval);
                        pacer.at_least(&mut tempo, self.tempo.interval, now);
                    }
                }
                (self.tempo, self.workers) = (tempo, workers);
                step
            }
            None => {
                self.untold |= failed;
                self.workers = self.workers.max(own);
                pacer.told(&mut self.tempo, failed, draw, now)
            }
        };
        let wait = self.tempo.wait().saturating_mul(self.workers);
        let waits = failed || step.before > 0 || !wait.is_zero();
        self.metrics.told(failed, !failed && pacer.is_down(step), waits.then_some(wait));
        (wait, missed)
    }
}

/// One of those who keep to a pace. It counts from the first call that it tells of, and is let go when it is dropped.
pub(super) struct Worker {
    together: Arc<Together>,
    /// What its permit is held by.
    holder: u64,
    is_counted: AtomicBool,
}

impl Worker {
    pub(super) fn new(together: Arc<Together>) -> Self {
        Self { together, holder: random_u64(), is_counted: AtomicBool::new(false) }
    }

    /// Tells the pace of a call; the wait before the next. The store is told before this future waits for the first time,
    /// and what comes of it counts whether it is waited for or not.
    pub(super) async fn told(&self, failed: bool) -> Duration {
        let call = self.call(failed);
        match self.ask(call) {
            Answer::Ready(outcomes) => self.together.heard(call, Ok(outcomes)),
            Answer::Later(answer) => {
                let Some(runtime) = &self.together.runtime else { return self.together.heard(call, answer.await) };
                let together = Arc::clone(&self.together);
                let heard = runtime.spawn(async move { together.heard(call, answer.await) });
                match heard.await {
                    Ok(wait) => wait,
                    // The runtime that looks after the store is gone.
                    Err(_) => self.together.heard(call, Err(StoreError::Unavailable)),
                }
            }
        }
    }

    /// The same for a thread that may block.
    pub(super) fn told_blocking(&self, failed: bool) -> Duration {
        let call = self.call(failed);
        let answer = match (self.ask(call), &self.together.runtime) {
            (Answer::Ready(outcomes), _) => Ok(outcomes),
            (Answer::Later(_), None) => Err(StoreError::Unavailable),
            (Answer::Later(answer), Some(runtime)) => {
                let (sender, receiver) = sync_channel(1);
                runtime.spawn(async move { sender.send(answer.await) });
                receiver.recv_timeout(PATIENCE).unwrap_or(Err(StoreError::Timeout(PATIENCE)))
            }
        };
        self.together.heard(call, answer)
    }

    fn call(&self, failed: bool) -> Call {
        Call { failed, draw: self.together.known().rng.next_u32() }
    }

    fn ask(&self, Call { failed, draw }: Call) -> Answer<<AnyStore as Store>::Later> {
        let Together { store, key, clock, own, .. } = &*self.together;
        if !self.is_counted.swap(true, Ordering::Relaxed) {
            own.fetch_add(1, Ordering::Relaxed);
        }
        let now = clock.now();
        self.together.tend(now);
        let (pace, workers) = ids();
        let told = Op::new(pace, Verb::Pace { failed, draw }, *key, 0);
        store.apply(&Batch::new(self.holder).part([told, Op::new(workers, Verb::Take, *key, 1)]), now)
    }

    /// Says that it is still there, and that the pace is still kept to: all may wait for longer than it is remembered.
    pub(super) fn renew(&self) {
        let Together { store, key, clock, .. } = &*self.together;
        let (pace, workers) = ids();
        let ops = [Op::new(workers, Verb::Renew, *key, 1), Op::new(pace, Verb::Debit, *key, 0)];
        store.tell(&Batch::new(self.holder).part(ops), clock.now());
    }

    pub(super) fn interval(&self) -> Duration {
        self.together.known().tempo.wait()
    }

    pub(super) fn workers(&self) -> u32 {
        self.together.known().workers
    }

    pub(super) fn metrics(&self) -> Metrics {
        self.together.known().metrics
    }
}

/// Another worker at the same pace.
impl Clone for Worker {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.together))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !*self.is_counted.get_mut() {
            return;
        }
        let Together { store, key, clock, own, runtime, .. } = &*self.together;
        own.fetch_sub(1, Ordering::Relaxed);
        let release = Batch::one(self.holder, Op::new(ids().1, Verb::Release, *key, 1));
        if let (Answer::Later(answer), Some(runtime)) = (store.apply(&release, clock.now()), runtime) {
            // With its last worker the store would go before it has answered.
            let together = Arc::clone(&self.together);
            runtime.spawn(async move {
                // Who can't be let go is when the lease ends.
                let _ = answer.await;
                drop(together);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpenError;
    use crate::clock::ManualClock;
    use tidegate_store::Memory;

    /// Ten workers at the longest wait of 15 min all wait for two hours and a half, and a pace that nobody tells of calls is
    /// forgotten after half of that.
    #[tokio::test]
    async fn a_pace_is_remembered_for_as_long_as_anybody_waits() {
        for (renews, remembered) in [(true, true), (false, false)] {
            let clock = ManualClock::default();
            let open = |limits: Limits| Ok::<_, OpenError>(AnyStore::Memory(Memory::new(Arc::new(limits), 1 << 20)));
            let spec = PacerSpec::default();
            let together = Together::open(spec, "api", &KeySeed::new([1; 16]), clock.clone(), open).unwrap();
            let worker = Worker::new(Arc::new(together));
            assert_eq!(worker.told(true).await, spec.initial);
            for _ in 0..900 {
                clock.advance(Concurrency::RENEW);
                if renews {
                    worker.renew();
                }
            }
            assert_eq!(worker.told(false).await > Duration::ZERO, remembered);
        }
    }
}
