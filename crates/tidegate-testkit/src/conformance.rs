//! The conformance suite that every store must pass, wherever it keeps its state.
//!
//! A store comes with a [`Backend`], which opens it empty and, if possible, sets its time. A closure that makes a store
//! from its limits is a backend already:
//!
//! ```
//! use tidegate_testkit::conformance::{ConformanceOptions, check_conformance};
//! use tidegate_testkit::reference::ReferenceStore;
//!
//! let options = ConformanceOptions { batches: 1_000, tasks: 4, calls_per_task: 100, seed: 1 };
//! check_conformance(&ReferenceStore::new, &options).unwrap();
//! ```

mod announcements;
mod caller_rates;
mod concurrent;
mod random;
mod reload;
mod reservations;

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use tidegate_core::{Admission, Batch, Key, LimitId, Limits, Op, Outcomes, Time, Verb};
use tidegate_store::{Store, StoreResponse};

use crate::random::{case_count, run_seed};

/// A way to open stores of one kind.
pub trait Backend: Sync {
    /// The kind of store.
    type Store: Store;

    /// Opens an empty store. Two opened stores share nothing.
    fn open(&self, limits: Arc<Limits>) -> Self::Store;

    /// Sets the store's time. Returns false if the store's clock can't be set. The suite then takes the time from the
    /// store's outcomes and skips the checks that need time to pass. By default the store uses the `now` of each batch.
    fn set_now(&self, store: &Self::Store, now: Time) -> bool {
        let _ = (store, now);
        true
    }

    /// Waits for a future. By default the thread sleeps until it is ready. A store that needs a runtime waits on that.
    fn wait<F: Future>(&self, answer: F) -> F::Output {
        block_on(answer)
    }
}

impl<S: Store, F: Fn(Arc<Limits>) -> S + Sync> Backend for F {
    type Store = S;

    fn open(&self, limits: Arc<Limits>) -> S {
        self(limits)
    }
}

/// The extent of the suite.
#[derive(Clone, Copy, Debug)]
pub struct ConformanceOptions {
    /// The total number of random batches.
    pub batches: u32,
    /// The number of threads that call at once.
    pub tasks: u32,
    /// The number of calls of each thread.
    pub calls_per_task: u32,
    /// The seed of random choices.
    pub seed: u64,
}

impl Default for ConformanceOptions {
    /// Returns the options for a store in memory: 100,000 random batches (a million if `TIDEGATE_FULL=1`), and 64 ×
    /// 5,000 calls.
    fn default() -> Self {
        Self { batches: case_count(100_000, 1_000_000), tasks: 64, calls_per_task: 5_000, seed: run_seed() }
    }
}

/// The error of a store that fails a check.
#[derive(Clone)]
pub struct ConformanceError {
    check: &'static str,
    seed: u64,
    message: String,
}

impl fmt::Display for ConformanceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}\n  repeat with TIDEGATE_SEED={}", self.check, self.message, self.seed)
    }
}

impl fmt::Debug for ConformanceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for ConformanceError {}

/// Runs every check.
///
/// # Errors
/// The first [`ConformanceError`].
pub fn check_conformance<B: Backend>(backend: &B, options: &ConformanceOptions) -> Result<(), ConformanceError> {
    type CheckFn<B> = fn(&B, &ConformanceOptions) -> Result<(), String>;
    let checks: [(&str, CheckFn<B>); 24] = [
        ("random batches against the model", random::random_batches::<B>),
        ("a hundred a minute under load", concurrent::hundred_a_minute::<B>),
        ("ten of a hundred calls at once", concurrent::ten_of_a_hundred::<B>),
        ("all or nothing over three keys", concurrent::all_or_nothing::<B>),
        ("permits", concurrent::permits::<B>),
        ("calls counted ahead", concurrent::counted_ahead::<B>),
        ("calls throttled together", concurrent::concurrent_throttles::<B>),
        ("calls that keep one pace", concurrent::shared_pace::<B>),
        ("calls with terms of their own", caller_rates::answers::<B>),
        ("reservations against core", reservations::outcomes::<B>),
        ("callers that reserve at once", reservations::concurrent_callers::<B>),
        ("callers that never came, beyond the bound", reservations::many_forfeits::<B>),
        ("reservations while the clock is set back", reservations::clock_steps::<B>),
        ("reservations by gates with wrong clocks", reservations::wrong_clocks::<B>),
        ("peeking changes nothing", random::peek::<B>),
        ("resetting", random::reset::<B>),
        ("a clock that jumps a year and back", random::clock_jump::<B>),
        ("usage under changed limits", reload::usage::<B>),
        ("blocks under changed limits", reload::blocks::<B>),
        ("limits of another kind", reload::other_kinds::<B>),
        ("permits under changed limits", reload::permits::<B>),
        ("calls during a change of limits", reload::concurrent_calls::<B>),
        ("announcements of nodes", announcements::all_nodes_are_listed::<B>),
        ("more nodes than are listed", announcements::the_list_is_bounded::<B>),
    ];
    for (check, run) in checks {
        run(backend, options).map_err(|what| ConformanceError { check, seed: options.seed, message: what })?;
    }
    Ok(())
}

/// A store under test, with simple ways to call it.
struct StoreUnderTest<'a, B: Backend> {
    backend: &'a B,
    store: B::Store,
}

impl<'a, B: Backend> StoreUnderTest<'a, B> {
    fn open(backend: &'a B, limits: &Arc<Limits>) -> Self {
        Self { backend, store: backend.open(Arc::clone(limits)) }
    }

    /// A handle to the same state with these limits. `None` if the store can't have other limits.
    fn with_limits(&self, limits: &Arc<Limits>, now: Time) -> Result<Option<Self>, String> {
        let store = self.store.with_limits(Arc::clone(limits), now).map_err(|error| error.to_string())?;
        Ok(store.map(|store| Self { backend: self.backend, store }))
    }

    fn set_now(&self, now: Time) -> bool {
        self.backend.set_now(&self.store, now)
    }

    fn apply(&self, batch: &Batch, now: Time) -> Result<Outcomes, String> {
        match self.store.apply(batch, now) {
            StoreResponse::Ready(outcomes) => Ok(outcomes),
            StoreResponse::Pending(answer) => self.backend.wait(answer).map_err(|error| error.to_string()),
        }
    }

    /// Applies one operation of cost 1 to each key.
    fn apply_to_keys(&self, verb: Verb, holder: u64, keys: &[(LimitId, Key)], now: Time) -> Result<Outcomes, String> {
        let mut batch = Batch::new(holder);
        for &(limit, key) in keys {
            batch.push(Op::new(limit, verb, key, 1)).map_err(|full| full.to_string())?;
        }
        self.apply(&batch, now)
    }
}

fn admissions(outcomes: &Outcomes) -> Vec<Admission> {
    outcomes.list().iter().map(|outcome| outcome.admission).collect()
}

fn expect_equal<T: PartialEq + fmt::Debug>(what: &str, found: T, expected: T) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{what}: {found:?}, expected {expected:?}")) }
}

/// Returns the moment at which the checks start, for stores with a settable time.
fn start_time() -> Time {
    Time::from_secs(1_700_000_000)
}

/// Waits for a future on this thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct ThreadWaker(Thread);
    impl Wake for ThreadWaker {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(ThreadWaker(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
