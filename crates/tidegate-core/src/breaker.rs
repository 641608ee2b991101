//! Circuit breaker: stops calling a provider that fails, and finds out with a few calls when it is back.
//!
//! *Closed*, calls pass, and failures are counted. Too many of them *open* it: calls are refused at once, until its
//! time is over. *Half-open*, a few probes pass, whose replies close it or open it again. A closing breaker may let
//! traffic back in step by step, in a *ramp*. Source: M. Nygard, "Release It!", 2007; rates over a window and slow
//! calls as in resilience4j.
//!
//! Of the classes, `transient` is a failure; `success`, `permanent` and `auth` show a provider that works; `throttled`
//! and `cancelled` say nothing about it.

mod calls;
mod shared;
mod spec;

use alloc::vec::Vec;

use rand_core::Rng;

use crate::backoff::Waits;
use crate::time::OVERTAKEN;
use crate::{Class, Span, Time};
use calls::Calls;
pub use shared::{Lock, SharedBreaker};
use spec::WHOLE;
pub use spec::{BreakerError, BreakerSpec, MAX_PROBES, MAX_RAMP, RampStep, SlowCalls};

/// What a breaker does with calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// All pass.
    Closed,
    /// A share of them passes, on the way to closed.
    Ramping,
    /// None passes.
    Open,
    /// A few pass, as probes.
    HalfOpen,
}

impl State {
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
pub struct Refusal {
    /// Open, half-open with all probes out, or ramping with the share used up.
    pub state: State,
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
pub struct Permit {
    generation: u64,
    /// A number from 1 that no other probe has; 0 is a call that is none.
    probe: u64,
}

impl Permit {
    fn plain(generation: u64) -> Self {
        Self { generation, probe: 0 }
    }

    /// The breaker's generation when it was taken.
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

#[derive(Clone, Copy, Debug)]
struct Probe {
    number: u64,
    expires: Time,
}

#[derive(Clone, Debug)]
enum Phase {
    Closed,
    Ramping { ends: Time, credit: u16 },
    Open { until: Time, length: Span },
    HalfOpen { successes: u32, probes: Vec<Probe> },
}

/// A provider's circuit breaker.
///
/// A call peeks early, so that it doesn't queue in vain, and takes its permit as late as just before it is sent, so
/// that no probe waits in a queue. Opening and closing begin a new *generation*; the report of an older generation's
/// permit changes nothing.
#[derive(Clone, Debug)]
pub struct Breaker {
    spec: BreakerSpec,
    phase: Phase,
    generation: u64,
    failures: u32,
    calls: Option<Calls>,
    openings: Waits,
    probes_sent: u64,
}

impl Breaker {
    /// A usual ramp: half a minute each of 10 %, 25 % and 50 %, then all.
    pub const RAMP: [RampStep; 3] = [
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
            phase: Phase::Closed,
            generation: 0,
            failures: 0,
            calls: spec.has_rates().then(|| Calls::new(spec.window)),
            openings: Waits::default(),
            probes_sent: 0,
            spec,
        })
    }

    /// A breaker that never opens.
    pub fn off() -> Self {
        let spec = BreakerSpec { failures: None, failure_rate: None, slow_calls: None, ..BreakerSpec::default() };
        Self {
            phase: Phase::Closed,
            generation: 0,
            failures: 0,
            calls: None,
            openings: Waits::default(),
            probes_sent: 0,
            spec,
        }
    }

    /// How it was written.
    pub fn spec(&self) -> &BreakerSpec {
        &self.spec
    }

    /// The state at `now`.
    pub fn state(&self, now: Time) -> State {
        match self.phase {
            Phase::Ramping { ends, .. } if now < ends => State::Ramping,
            Phase::Closed | Phase::Ramping { .. } => State::Closed,
            Phase::Open { until, .. } if now < until => State::Open,
            Phase::Open { .. } | Phase::HalfOpen { .. } => State::HalfOpen,
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
    pub fn peek(&self, now: Time) -> Result<(), Refusal> {
        match self.phase {
            Phase::Closed | Phase::Ramping { .. } => Ok(()),
            Phase::Open { until, length } => self.wait_for(until, length, now),
            Phase::HalfOpen { ref probes, .. } if probes.len() < self.spec.probes as usize => Ok(()),
            Phase::HalfOpen { ref probes, .. } => {
                let waits = probes.iter().map(|probe| self.wait_for(probe.expires, self.spec.probe_lease, now).err());
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
    pub fn take(&mut self, now: Time) -> Result<Permit, Refusal> {
        self.settle(now);
        self.peek(now)?;
        let mut permit = Permit::plain(self.generation);
        match &mut self.phase {
            Phase::Closed | Phase::Open { .. } => {}
            Phase::Ramping { ends, credit } => {
                let ends = *ends;
                // Error diffusion: of n calls, n shares pass, to within one call.
                *credit += self.spec.ramp_share(ends.since(now));
                if *credit < WHOLE {
                    return Err(self.refusal(ends, now));
                }
                *credit -= WHOLE;
            }
            Phase::HalfOpen { probes, .. } => {
                self.probes_sent += 1;
                permit.probe = self.probes_sent;
                probes.push(Probe { number: permit.probe, expires: now + self.spec.probe_lease });
            }
        }
        Ok(permit)
    }

    /// Learns at `now` what became of a call that took `elapsed`. A probe whose lease has ended still counts;
    /// randomness is drawn only where it opens.
    pub fn report(&mut self, permit: Permit, class: Class, elapsed: Span, now: Time, rng: &mut impl Rng) {
        if permit.generation != self.generation {
            return;
        }
        self.give_back(permit);
        if matches!(class, Class::Throttled | Class::Cancelled) {
            return;
        }
        self.settle(now);
        let failed = is_failure(class);
        let slow = self.spec.slow_calls.is_some_and(|slow| elapsed > slow.threshold);
        self.failures = if failed { self.failures.saturating_add(1) } else { 0 };
        let opens = match &mut self.phase {
            Phase::HalfOpen { .. } if failed || slow => true,
            Phase::HalfOpen { successes, .. } => {
                *successes += 1;
                if *successes >= self.spec.successes {
                    self.close(now);
                }
                false
            }
            Phase::Closed | Phase::Ramping { .. } => {
                if let Some(calls) = &mut self.calls {
                    calls.record(failed, slow, now);
                }
                self.is_too_much()
            }
            Phase::Open { .. } => false,
        };
        if opens {
            self.open(now, rng);
        }
    }

    /// Takes back a permit whose call was never sent or says nothing.
    pub fn give_back(&mut self, permit: Permit) {
        if let Phase::HalfOpen { probes, .. } = &mut self.phase {
            probes.retain(|probe| probe.number != permit.probe);
        }
    }

    /// Opens it at `now`, if it lets calls through, because others have found that the provider fails. False if it
    /// doesn't.
    pub fn trip(&mut self, now: Time, rng: &mut impl Rng) -> bool {
        self.settle(now);
        let lets_through = matches!(self.phase, Phase::Closed | Phase::Ramping { .. });
        if lets_through {
            self.open(now, rng);
        }
        lets_through
    }

    /// Closes it fully, whatever it has seen.
    pub fn reset(&mut self) {
        self.begin(Phase::Closed);
        self.failures = 0;
        self.openings = Waits::default();
    }

    /// The generation, if it is closed and has nothing to remember: until that changes, a take gives a plain permit of
    /// this generation, and nothing but the report of a failure changes the breaker.
    fn clean(&self) -> Option<u64> {
        let clean = matches!(self.phase, Phase::Closed) && self.failures == 0 && self.calls.is_none();
        clean.then_some(self.generation)
    }

    fn is_too_much(&self) -> bool {
        let spec = &self.spec;
        let too_often = |count: u64, calls: u64, rate: u16| {
            u128::from(count) * u128::from(WHOLE) >= u128::from(calls) * u128::from(rate)
        };
        spec.failures.is_some_and(|most| self.failures >= most)
            || self.calls.as_ref().map(Calls::sum).is_some_and(|sum| {
                sum.calls >= u64::from(spec.min_calls)
                    && (spec.failure_rate.is_some_and(|rate| too_often(sum.failures, sum.calls, rate))
                        || spec.slow_calls.is_some_and(|slow| too_often(sum.slow, sum.calls, slow.rate)))
            })
    }

    fn open(&mut self, now: Time, rng: &mut impl Rng) {
        if let Some(calls) = &self.calls {
            self.failures = self.failures.max(u32::try_from(calls.sum().failures).unwrap_or(u32::MAX));
        }
        let length = self.openings.next(&self.spec.open, rng);
        self.begin(Phase::Open { until: now + length, length });
    }

    fn close(&mut self, now: Time) {
        if let Some(first) = self.spec.ramp.first() {
            // What the first call lacks is granted: it passes, however small the share.
            let credit = WHOLE - first.share;
            self.begin(Phase::Ramping { ends: now + self.spec.ramp_length(), credit });
        } else {
            self.reset();
        }
    }

    fn begin(&mut self, phase: Phase) {
        self.phase = phase;
        self.generation += 1;
        if let Some(calls) = &mut self.calls {
            calls.clear();
        }
    }

    /// Brings the phase to `now`: ends what is over, and brings back ends that only a clock which has since stepped
    /// back can have put so far ahead.
    fn settle(&mut self, now: Time) {
        let bring_back = |end: &mut Time, length| {
            if is_astray(*end, length, now) {
                *end = now + length;
            }
        };
        match &mut self.phase {
            Phase::Closed => {}
            Phase::Ramping { ends, .. } => {
                bring_back(ends, self.spec.ramp_length());
                if now >= *ends {
                    self.phase = Phase::Closed;
                    self.openings = Waits::default();
                }
            }
            Phase::Open { until, length } => {
                bring_back(until, *length);
                if now >= *until {
                    self.phase = Phase::HalfOpen { successes: 0, probes: Vec::new() };
                }
            }
            Phase::HalfOpen { probes, .. } => probes.retain_mut(|probe| {
                bring_back(&mut probe.expires, self.spec.probe_lease);
                probe.expires > now
            }),
        }
    }

    fn wait_for(&self, end: Time, length: Span, now: Time) -> Result<(), Refusal> {
        if now >= end || is_astray(end, length, now) { Ok(()) } else { Err(self.refusal(end, now)) }
    }

    fn refusal(&self, end: Time, now: Time) -> Refusal {
        Refusal { state: self.state(now), failures: self.failures, reset_in: end.since(now) }
    }
}

/// Whether the end of a `length` that began by now can't be.
fn is_astray(end: Time, length: Span, now: Time) -> bool {
    end > now + length + OVERTAKEN
}

fn is_failure(class: Class) -> bool {
    class == Class::Transient
}
