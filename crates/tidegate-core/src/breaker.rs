//! Circuit breaker: stops calling a provider that fails, and finds out with a few calls when it is back.
//!
//! *Closed*, calls pass, and failures are counted. Too many of them *open* it: calls are refused at once, until its
//! time is over. *Half-open*, a few probes pass, whose replies close it or open it again. A closing breaker may let
//! traffic back in step by step, in a *ramp*. Source: M. Nygard, "Release It!", 2007; rates over a window and slow
//! calls as in resilience4j.
//!
//! Of the classes, `transient` is a failure; `success`, `permanent` and `auth` show a provider that works; `throttled`
//! and `cancelled` say nothing about it.

mod call_window;
mod shared;
mod spec;

use alloc::vec::Vec;

use rand_core::Rng;

use crate::backoff::BackoffState;
use crate::time::MAX_CLOCK_LAG;
use crate::{Class, Span, Time};
use call_window::CallWindow;
pub use shared::{ExclusiveAccess, SharedBreaker};
use spec::PER_MILLE;
pub use spec::{BreakerError, BreakerSpec, MAX_PROBES, MAX_RAMP, RampStep, SlowCalls};

/// What a breaker does with calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BreakerState {
    /// All pass.
    Closed,
    /// A share of them passes, on the way to closed.
    Ramping,
    /// None passes.
    Open,
    /// A few pass, as probes.
    HalfOpen,
}

impl BreakerState {
    /// The state as it stands in answers, logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Ramping => "ramping",
            Self::Open => "open",
            Self::HalfOpen => "half-open",
        }
    }
}

/// Why a call may not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerRefusal {
    /// Open, half-open with all probes out, or ramping with the share used up.
    pub state: BreakerState,
    /// As [`Breaker::failures`] tells.
    pub failures: u32,
    /// After how long a call passes, unless another comes first: when the open time, the first probe's lease or the
    /// ramp is over. It may pass sooner where a probe is answered, or the ramp has it next in its share.
    pub reset_in: Span,
}

/// Leave to send one call, to be reported or given back. Forgotten, it holds a probe until its lease ends, and
/// otherwise nothing.
#[derive(Debug)]
#[must_use = "a permit is reported or given back"]
pub struct BreakerPermit {
    generation: u64,
    /// A number from 1 that no other probe has; 0 is a call that is none.
    probe: u64,
}

impl BreakerPermit {
    fn without_probe(generation: u64) -> Self {
        Self { generation, probe: 0 }
    }

    /// The breaker's generation when it was taken.
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

#[derive(Clone, Copy, Debug)]
struct ProbeLease {
    number: u64,
    expires: Time,
}

#[derive(Clone, Debug)]
enum BreakerPhase {
    Closed,
    Ramping { ends: Time, credit: u16 },
    Open { until: Time, length: Span },
    HalfOpen { successes: u32, probes: Vec<ProbeLease> },
}

/// A provider's circuit breaker.
///
/// A call peeks early, so that it doesn't queue in vain, and takes its permit as late as just before it is sent, so
/// that no probe waits in a queue. Opening and closing begin a new *generation*; the report of an older generation's
/// permit changes nothing.
#[derive(Clone, Debug)]
pub struct Breaker {
    spec: BreakerSpec,
    phase: BreakerPhase,
    generation: u64,
    failures: u32,
    call_window: Option<CallWindow>,
    open_backoff: BackoffState,
    probes_sent: u64,
}

impl Breaker {
    /// A usual ramp: half a minute each of 10 %, 25 % and 50 %, then all.
    pub const DEFAULT_RAMP: [RampStep; 3] = [
        RampStep { share: 100, length: Span::from_secs(30) },
        RampStep { share: 250, length: Span::from_secs(30) },
        RampStep { share: 500, length: Span::from_secs(30) },
    ];

    /// A closed breaker.
    ///
    /// # Errors
    /// Nothing that opens it, a setting of 0, a rate or share outside 1 to 1000, too many probes or steps.
    pub fn new(spec: BreakerSpec) -> Result<Self, BreakerError> {
        spec.check()?;
        Ok(Self {
            phase: BreakerPhase::Closed,
            generation: 0,
            failures: 0,
            call_window: spec.has_rates().then(|| CallWindow::new(spec.window)),
            open_backoff: BackoffState::default(),
            probes_sent: 0,
            spec,
        })
    }

    /// A breaker that never opens.
    pub fn disabled() -> Self {
        let spec = BreakerSpec { failures: None, failure_rate: None, slow_calls: None, ..BreakerSpec::default() };
        Self {
            phase: BreakerPhase::Closed,
            generation: 0,
            failures: 0,
            call_window: None,
            open_backoff: BackoffState::default(),
            probes_sent: 0,
            spec,
        }
    }

    /// How it was written.
    pub fn spec(&self) -> &BreakerSpec {
        &self.spec
    }

    /// The state at `now`.
    pub fn state(&self, now: Time) -> BreakerState {
        match self.phase {
            BreakerPhase::Ramping { ends, .. } if now < ends => BreakerState::Ramping,
            BreakerPhase::Closed | BreakerPhase::Ramping { .. } => BreakerState::Closed,
            BreakerPhase::Open { until, .. } if now < until => BreakerState::Open,
            BreakerPhase::Open { .. } | BreakerPhase::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    /// Failures without a working reply between them. Once it has opened: those that opened it, if its window held more
    /// of them.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// How often it has opened, closed or been reset.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether a call would have a chance at `now`. Holds nothing and changes nothing.
    ///
    /// A ramp's share is counted by [`Breaker::take`] alone, so a peek admits. So it does where only a clock that has
    /// since stepped back can have put any of the ends so far ahead: the take that follows brings it back and tells the
    /// wait, which without that nobody knows.
    ///
    /// # Errors
    /// Why it would be refused.
    #[inline]
    pub fn peek(&self, now: Time) -> Result<(), BreakerRefusal> {
        match self.phase {
            BreakerPhase::Closed | BreakerPhase::Ramping { .. } => Ok(()),
            BreakerPhase::Open { until, length } => self.check_end(until, length, now),
            BreakerPhase::HalfOpen { ref probes, .. } if probes.len() < self.spec.probes as usize => Ok(()),
            BreakerPhase::HalfOpen { ref probes, .. } => {
                let waits = probes.iter().map(|probe| self.check_end(probe.expires, self.spec.probe_lease, now).err());
                // One that isn't to be waited for is less than any wait.
                let first = waits.min_by_key(|refusal| refusal.map(|refusal| refusal.reset_in));
                first.flatten().map_or(Ok(()), Err)
            }
        }
    }

    /// Takes leave to send a call at `now`.
    ///
    /// # Errors
    /// Why it is refused.
    #[inline]
    pub fn take(&mut self, now: Time) -> Result<BreakerPermit, BreakerRefusal> {
        self.refresh(now);
        self.peek(now)?;
        let mut permit = BreakerPermit::without_probe(self.generation);
        match &mut self.phase {
            BreakerPhase::Closed | BreakerPhase::Open { .. } => {}
            BreakerPhase::Ramping { ends, credit } => {
                let ends = *ends;
                // Error diffusion: of n calls, n shares pass, to within one call.
                *credit += self.spec.ramp_share(ends.since(now));
                if *credit < PER_MILLE {
                    return Err(self.refusal(ends, now));
                }
                *credit -= PER_MILLE;
            }
            BreakerPhase::HalfOpen { probes, .. } => {
                self.probes_sent += 1;
                permit.probe = self.probes_sent;
                probes.push(ProbeLease { number: permit.probe, expires: now + self.spec.probe_lease });
            }
        }
        Ok(permit)
    }

    /// Learns at `now` what became of a call that took `elapsed`. A probe whose lease has ended still counts;
    /// randomness is drawn only where it opens.
    pub fn report(&mut self, permit: BreakerPermit, class: Class, elapsed: Span, now: Time, rng: &mut impl Rng) {
        if permit.generation != self.generation {
            return;
        }
        self.give_back(permit);
        if matches!(class, Class::Throttled | Class::Cancelled) {
            return;
        }
        self.refresh(now);
        let failed = is_failure(class);
        let slow = self.spec.slow_calls.is_some_and(|slow| elapsed > slow.threshold);
        self.failures = if failed { self.failures.saturating_add(1) } else { 0 };
        let opens = match &mut self.phase {
            BreakerPhase::HalfOpen { .. } if failed || slow => true,
            BreakerPhase::HalfOpen { successes, .. } => {
                *successes += 1;
                if *successes >= self.spec.successes {
                    self.close(now);
                }
                false
            }
            BreakerPhase::Closed | BreakerPhase::Ramping { .. } => {
                if let Some(calls) = &mut self.call_window {
                    calls.record(failed, slow, now);
                }
                self.should_open()
            }
            BreakerPhase::Open { .. } => false,
        };
        if opens {
            self.open(now, rng);
        }
    }

    /// Takes back a permit whose call was never sent or says nothing.
    pub fn give_back(&mut self, permit: BreakerPermit) {
        if let BreakerPhase::HalfOpen { probes, .. } = &mut self.phase {
            probes.retain(|probe| probe.number != permit.probe);
        }
    }

    /// Opens it at `now`, if it lets calls through, because others have found that the provider fails. False if it
    /// doesn't.
    pub fn trip(&mut self, now: Time, rng: &mut impl Rng) -> bool {
        self.refresh(now);
        let lets_through = matches!(self.phase, BreakerPhase::Closed | BreakerPhase::Ramping { .. });
        if lets_through {
            self.open(now, rng);
        }
        lets_through
    }

    /// Closes it fully, whatever it has seen.
    pub fn reset(&mut self) {
        self.enter_phase(BreakerPhase::Closed);
        self.failures = 0;
        self.open_backoff = BackoffState::default();
    }

    /// The generation, if it is closed and has nothing to remember: until that changes, a take gives a plain permit of
    /// this generation, and nothing but the report of a failure changes the breaker.
    fn clean_generation(&self) -> Option<u64> {
        let clean = matches!(self.phase, BreakerPhase::Closed) && self.failures == 0 && self.call_window.is_none();
        clean.then_some(self.generation)
    }

    fn should_open(&self) -> bool {
        let spec = &self.spec;
        let reaches_rate = |count: u64, calls: u64, rate: u16| {
            u128::from(count) * u128::from(PER_MILLE) >= u128::from(calls) * u128::from(rate)
        };
        spec.failures.is_some_and(|most| self.failures >= most)
            || self.call_window.as_ref().map(CallWindow::totals).is_some_and(|sum| {
                sum.calls >= u64::from(spec.min_calls)
                    && (spec.failure_rate.is_some_and(|rate| reaches_rate(sum.failures, sum.calls, rate))
                        || spec.slow_calls.is_some_and(|slow| reaches_rate(sum.slow, sum.calls, slow.rate)))
            })
    }

    fn open(&mut self, now: Time, rng: &mut impl Rng) {
        if let Some(calls) = &self.call_window {
            self.failures = self.failures.max(u32::try_from(calls.totals().failures).unwrap_or(u32::MAX));
        }
        let length = self.open_backoff.next(&self.spec.open, rng);
        self.enter_phase(BreakerPhase::Open { until: now + length, length });
    }

    fn close(&mut self, now: Time) {
        if let Some(first) = self.spec.ramp.first() {
            // What the first call lacks is granted: it passes, however small the share.
            let credit = PER_MILLE - first.share;
            self.enter_phase(BreakerPhase::Ramping { ends: now + self.spec.ramp_length(), credit });
        } else {
            self.reset();
        }
    }

    fn enter_phase(&mut self, phase: BreakerPhase) {
        self.phase = phase;
        self.generation += 1;
        if let Some(calls) = &mut self.call_window {
            calls.clear();
        }
    }

    /// Brings the phase to `now`: ends what is over, and brings back ends that only a clock which has since stepped
    /// back can have put so far ahead.
    fn refresh(&mut self, now: Time) {
        let clamp_end = |end: &mut Time, length| {
            if is_impossible_end(*end, length, now) {
                *end = now + length;
            }
        };
        match &mut self.phase {
            BreakerPhase::Closed => {}
            BreakerPhase::Ramping { ends, .. } => {
                clamp_end(ends, self.spec.ramp_length());
                if now >= *ends {
                    self.phase = BreakerPhase::Closed;
                    self.open_backoff = BackoffState::default();
                }
            }
            BreakerPhase::Open { until, length } => {
                clamp_end(until, *length);
                if now >= *until {
                    self.phase = BreakerPhase::HalfOpen { successes: 0, probes: Vec::new() };
                }
            }
            BreakerPhase::HalfOpen { probes, .. } => probes.retain_mut(|probe| {
                clamp_end(&mut probe.expires, self.spec.probe_lease);
                probe.expires > now
            }),
        }
    }

    fn check_end(&self, end: Time, length: Span, now: Time) -> Result<(), BreakerRefusal> {
        if now >= end || is_impossible_end(end, length, now) { Ok(()) } else { Err(self.refusal(end, now)) }
    }

    fn refusal(&self, end: Time, now: Time) -> BreakerRefusal {
        BreakerRefusal { state: self.state(now), failures: self.failures, reset_in: end.since(now) }
    }
}

/// Whether the end of a `length` that began by now can't be.
fn is_impossible_end(end: Time, length: Span, now: Time) -> bool {
    end > now + length + MAX_CLOCK_LAG
}

fn is_failure(class: Class) -> bool {
    class == Class::Transient
}
