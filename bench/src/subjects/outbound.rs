//! Tidegate around outbound calls: the breaker alone, as a layer, and the whole code path.

use super::tidegate::load_policy;
use super::tower_resilience::immediate;
use super::{OURS, Subject, call_once, spin_until_ready, unkeyed_worker};
use crate::keys::KeySequence;
use crate::measure::Worker;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::convert::Infallible;
use std::hint::black_box;
use std::sync::{Mutex, PoisonError};
use tidegate::clock::SystemClock;
use tidegate::layers::BreakerLayer;
use tidegate::outbound::{Attempt, AttemptOutcome, CallOptions, CallScope, Outbound, Provider, Upstream};
use tidegate::{Clock, Time};
use tidegate_core::breaker::ExclusiveAccess;
use tidegate_core::call::AttemptReport;
use tidegate_core::retry::Delivery;
use tidegate_core::{Breaker, BreakerSpec, Class, SharedBreaker};
use tokio::runtime::{Builder, Runtime};
use tower::Layer;

/// The source of a breaker's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockUse {
    /// The driver passes the time, which it has read for other reasons. This shows the cost of the breaker itself.
    GivenTime,
    /// A clock is read for the breaker, before the call and after.
    ReadsClock,
}

/// Returns a closed breaker around a call that succeeds at once.
pub fn breaker(clock_use: ClockUse) -> Box<dyn Subject> {
    let breaker = Breaker::new(BreakerSpec::default()).expect("the defaults are valid");
    Box::new(BreakerSubject {
        breaker: SharedBreaker::new(MutexBreaker(Mutex::new(breaker))),
        clock_use,
        clock: SystemClock::new(),
    })
}

/// Returns the same breaker as a layer around a tower service that replies at once.
pub fn breaker_layer() -> Box<dyn Subject> {
    let classify = |outcome: Result<&(), &Infallible>| outcome.map_or(Class::Transient, |()| Class::Success);
    let layer = BreakerLayer::new(BreakerSpec::default(), classify).expect("the defaults are valid");
    Box::new(BreakerLayerSubject(layer.layer(immediate())))
}

/// The limit of a provider, which no run reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitChoice {
    /// A strict window of more calls than it keeps individually. Calls are counted ahead of their replies.
    Window,
    /// A rate.
    Rate,
    /// The window, for calls that have a scope.
    Scoped,
}

/// Returns whole calls to a provider with a limit, two credentials and defaults for the rest, around an upstream that
/// replies at once.
pub fn calls(choice: LimitChoice) -> Box<dyn Subject> {
    let (name, limit) = match choice {
        LimitChoice::Window => (OURS, "1000000000 per 10s"),
        LimitChoice::Rate => ("tidegate (rate)", "1 per 1s burst 1000000000"),
        LimitChoice::Scoped => ("tidegate (scope)", "1000000000 per 10s"),
    };
    let key = if choice == LimitChoice::Scoped { 7 } else { 0 };
    let scope = CallScope { route: key, key, ..CallScope::default() };
    let text = format!(
        "[outbound.provider.api]\nlimit = \"{limit}\"\ncredentials = [\"env:BENCH_A\", \"env:BENCH_B\"]\nauth = \"bearer\"\n"
    );
    let outbound = Outbound::new(&load_policy(&text)).expect("the policy has providers");
    let provider = outbound.provider("api").expect("the policy has this one").clone();
    let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime can be made");
    Box::new(TidegateCalls { name, provider, scope, runtime })
}

struct MutexBreaker(Mutex<Breaker>);

impl ExclusiveAccess<Breaker> for MutexBreaker {
    fn with<R>(&self, work: impl FnOnce(&mut Breaker) -> R) -> R {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

struct BreakerSubject {
    breaker: SharedBreaker<MutexBreaker>,
    clock_use: ClockUse,
    clock: SystemClock,
}

impl BreakerSubject {
    fn call(&self, at_hand: Time, rng: &mut SmallRng) -> bool {
        let now = || if self.clock_use == ClockUse::ReadsClock { self.clock.now() } else { black_box(at_hand) };
        let began_at = now();
        let Ok(permit) = self.breaker.take(began_at) else { return false };
        let ended_at = now();
        self.breaker.report(permit, black_box(Class::Success), ended_at.since(began_at), ended_at, rng);
        true
    }
}

impl Subject for BreakerSubject {
    fn name(&self) -> &'static str {
        match self.clock_use {
            ClockUse::GivenTime => OURS,
            ClockUse::ReadsClock => "tidegate (clock read)",
        }
    }

    fn decide_once(&self, _: &String) -> bool {
        self.call(self.clock.now(), &mut SmallRng::seed_from_u64(1))
    }

    fn worker<'a>(&'a self, _: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        let (at_hand, mut rng) = (self.clock.now(), SmallRng::seed_from_u64(1));
        unkeyed_worker(move || self.call(at_hand, &mut rng))
    }
}

struct BreakerLayerSubject<S>(S);

impl<S: tower::Service<()> + Clone + Send + Sync> Subject for BreakerLayerSubject<S> {
    fn name(&self) -> &'static str {
        OURS
    }

    fn decide_once(&self, _: &String) -> bool {
        call_once(&mut self.0.clone())
    }

    fn worker<'a>(&'a self, _: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        let mut service = self.0.clone();
        unkeyed_worker(move || call_once(&mut service))
    }
}

struct TidegateCalls {
    name: &'static str,
    provider: Provider,
    scope: CallScope,
    runtime: Runtime,
}

impl TidegateCalls {
    fn call(&self) -> bool {
        let options = CallOptions { scope: self.scope, ..CallOptions::default() };
        let done = spin_until_ready(self.provider.call(options, &mut ImmediateUpstream));
        done.is_ok_and(|done| done.stats.attempts == 1)
    }
}

/// An upstream that replies at once.
struct ImmediateUpstream;

impl Upstream for ImmediateUpstream {
    type Reply = ();

    async fn send(&mut self, attempt: Attempt) -> AttemptOutcome<()> {
        black_box(attempt);
        let reply = AttemptReport { is_repeatable: true, ..AttemptReport::new(Class::Success, Delivery::Answered) };
        AttemptOutcome { value: (), report: reply }
    }
}

impl Subject for TidegateCalls {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decide_once(&self, _: &String) -> bool {
        let _entered = self.runtime.enter();
        self.call()
    }

    fn worker<'a>(&'a self, _: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        Box::new(TidegateCallsWorker(self))
    }
}

/// A worker within the runtime, which is entered once and not per call.
struct TidegateCallsWorker<'a>(&'a TidegateCalls);

impl Worker for TidegateCallsWorker<'_> {
    fn run(&mut self, steps: usize) -> usize {
        let _entered = self.0.runtime.enter();
        (0..steps).map(|_| usize::from(black_box(self.0.call()))).sum()
    }
}
