//! Circuit breaker: stops calls to a provider that fails, and uses a few calls to detect its recovery.
//!
//! While *closed*, it admits calls and counts failures. Too many *open* it: it refuses all calls for some time. Then it
//! is *half-open*: it admits a few probes, and their replies close it or open it again. A breaker that closes may
//! restore the traffic in steps, in a *ramp*. Source: M. Nygard, "Release It!", 2007. Rates over a window and slow
//! calls are as in resilience4j.
//!
//! Which classes are failures and which prove that the provider works, [`Class`] defines. Others don't count. Of failures in
//! a row, those of one burst count once: calls that were sent before the last counted failure came back say no more than
//! it did.

mod call_window;
mod shared;
mod spec;

use alloc::vec::Vec;

use rand_core::Rng;

use crate::backoff::BackoffState;
use crate::time::MAX_CLOCK_LAG;
use crate::{Class, PER_MILLE, Span, Time};
use call_window::CallWindow;
pub use shared::{ExclusiveAccess, SharedBreaker};
pub use spec::{BreakerError, BreakerSpec, MAX_PROBES, MAX_RAMP, RampStep, SlowCalls};

/// The states of a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BreakerState {
    /// All calls are admitted.
    Closed,
    /// A share of the calls is admitted, on the way to closed.
    Ramping,
    /// No call is admitted.
    Open,
    /// A few calls are admitted, as probes.
    HalfOpen,
}

impl BreakerState {
    /// All states.
    pub const ALL: [Self; 4] = [Self::Closed, Self::Ramping, Self::Open, Self::HalfOpen];

    /// The name of the state in replies, logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Ramping => "ramping",
            Self::Open => "open",
            Self::HalfOpen => "half-open",
        }
    }
}

/// The refusal of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerRefusal {
    /// Open, half-open with all probes under way, or ramping with the share used up.
    pub state: BreakerState,
    /// The value of [`Breaker::failures`].
    pub failures: u32,
    /// The time until the open time, the first probe's lease or the ramp ends. A call may be admitted earlier if a
    /// probe is answered or as the next one in a ramp's share, or later if another call comes first.
    pub reset_in: Span,
}

/// The permission to send one call, to be reported or given back. A dropped probe stays taken until its lease ends.
#[derive(Debug)]
#[must_use = "a permit is reported or given back"]
pub struct BreakerPermit {
    generation: u64,
    /// The unique number of the probe, from 1. 0 if the call is not a probe.
    probe: u64,
}

impl BreakerPermit {
    /// The generation of the breaker when the permit was taken.
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
    Ramping { ends: Time, credit: u64 },
    Open { until: Time, length: Span },
    HalfOpen { successes: u32, probes: Vec<ProbeLease> },
}

/// The circuit breaker of a provider.
///
/// A call uses [`peek`](Self::peek) before it queues, and takes its permit just before it is sent, so that no probe
/// waits in a queue. Opening and closing start a new *generation*. Reports of older permits change nothing.
#[derive(Clone, Debug)]
pub struct Breaker {
    spec: BreakerSpec,
    phase: BreakerPhase,
    generation: u64,
    /// The number of changes of its phase.
    transitions: u64,
    failures: u32,
    /// The time at which the last counted failure came back.
    failed_at: Time,
    call_window: Option<CallWindow>,
    open_backoff: BackoffState,
    probes_sent: u64,
}

impl Breaker {
    /// A usual ramp: 10 %, 25 % and 50 % for 30 s each, then everything.
    pub const DEFAULT_RAMP: [RampStep; 3] = [
        RampStep { share: 100, length: Span::from_secs(30) },
        RampStep { share: 250, length: Span::from_secs(30) },
        RampStep { share: 500, length: Span::from_secs(30) },
    ];

    /// Creates a closed breaker.
    ///
    /// # Errors
    /// No condition that opens it, a setting of 0, a rate or share outside 1 to 1000, or too many probes or steps.
    pub fn new(spec: BreakerSpec) -> Result<Self, BreakerError> {
        spec.check()?;
        Ok(Self::from_checked(spec))
    }

    /// A breaker that never opens.
    pub fn disabled() -> Self {
        Self::from_checked(BreakerSpec { failures: None, ..BreakerSpec::default() })
    }

    fn from_checked(spec: BreakerSpec) -> Self {
        let has_rates = spec.failure_rate.is_some() || spec.slow_calls.is_some();
        Self {
            phase: BreakerPhase::Closed,
            generation: 0,
            transitions: 0,
            failures: 0,
            failed_at: Time::ZERO,
            call_window: has_rates.then(|| CallWindow::new(spec.window)),
            open_backoff: BackoffState::default(),
            probes_sent: 0,
            spec,
        }
    }

    /// The settings.
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

    /// The failures since the last reply that proves a working provider; after opening, at least those in the window.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// The number of times it has opened, closed or been reset.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The number of changes of its state that its steps have made. The state also changes without a step, by time
    /// alone; the next step then counts it.
    #[inline]
    pub fn transitions(&self) -> u64 {
        self.transitions
    }

    /// Checks if a call may be admitted, and changes nothing.
    ///
    /// A peek admits calls during a ramp, because only [`Breaker::take`] counts its share. It also admits if an end is
    /// so far ahead that the clock must have stepped back. The next take then corrects the end and returns the wait.
    ///
    /// # Errors
    /// The reason of the refusal.
    #[inline]
    pub fn peek(&self, now: Time) -> Result<(), BreakerRefusal> {
        match self.phase {
            BreakerPhase::Closed | BreakerPhase::Ramping { .. } => Ok(()),
            BreakerPhase::Open { until, length } => self.check_end(until, length, now),
            BreakerPhase::HalfOpen { ref probes, .. } if probes.len() < self.spec.probes as usize => Ok(()),
            BreakerPhase::HalfOpen { ref probes, .. } => {
                let waits = probes.iter().map(|probe| self.check_end(probe.expires, self.spec.probe_lease, now).err());
                // `None` means no wait, and is less than any wait.
                let first = waits.min_by_key(|refusal| refusal.map(|refusal| refusal.reset_in));
                first.flatten().map_or(Ok(()), Err)
            }
        }
    }

    /// Takes the permit to send a call at `now`.
    ///
    /// # Errors
    /// The reason of the refusal.
    #[inline]
    pub fn take(&mut self, now: Time) -> Result<BreakerPermit, BreakerRefusal> {
        self.take_for(self.spec.probe_lease, now)
    }

    /// Does the same for a call that usually ends within `usual_time`. A probe then has a lease of this time, but no longer
    /// one than others: a caller that sends slowly could otherwise keep all probes.
    ///
    /// # Errors
    /// The reason of the refusal.
    #[inline]
    pub fn take_for(&mut self, usual_time: Span, now: Time) -> Result<BreakerPermit, BreakerRefusal> {
        self.refresh(now);
        self.peek(now)?;
        let mut permit = BreakerPermit { generation: self.generation, probe: 0 };
        match &mut self.phase {
            BreakerPhase::Closed | BreakerPhase::Open { .. } => {}
            BreakerPhase::Ramping { ends, credit } => {
                let ends = *ends;
                // Error diffusion: with share s, s · n of n calls pass, with an error of at most one call.
                *credit += self.spec.ramp_share(ends.since(now));
                if *credit < PER_MILLE {
                    return Err(self.refusal(ends, now));
                }
                *credit -= PER_MILLE;
            }
            BreakerPhase::HalfOpen { probes, .. } => {
                self.probes_sent += 1;
                permit.probe = self.probes_sent;
                probes.push(ProbeLease { number: permit.probe, expires: now + usual_time.min(self.spec.probe_lease) });
            }
        }
        Ok(permit)
    }

    /// Records the result of a call that took `elapsed`. A probe counts even after its lease. Only opening uses `rng`.
    pub fn report(&mut self, permit: BreakerPermit, class: Class, elapsed: Span, now: Time, rng: &mut impl Rng) {
        self.report_beside(permit, (class, elapsed), true, now, rng);
    }

    /// Does the same as [`Breaker::report`] while other calls are in flight. Consecutive failures open it only if those calls
    /// would have ended by now: among a hundred calls, five quick failures in a row aren't an outage.
    pub fn report_beside(
        &mut self,
        permit: BreakerPermit,
        (class, elapsed): (Class, Span),
        others_would_have_ended: bool,
        now: Time,
        rng: &mut impl Rng,
    ) {
        if permit.generation != self.generation {
            return;
        }
        self.give_back(permit);
        let failed = class.is_failure();
        if !failed && !class.proves_provider() {
            return;
        }
        self.refresh(now);
        let slow = self.spec.slow_calls.is_some_and(|slow| elapsed > slow.threshold);
        if !failed {
            self.failures = 0;
        } else if !self.has_failed_since(now - elapsed, now) {
            (self.failures, self.failed_at) = (self.failures.saturating_add(1), now);
        }
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
                self.should_open(others_would_have_ended)
            }
            BreakerPhase::Open { .. } => false,
        };
        if opens {
            self.open(now, rng);
        }
    }

    /// True if a counted failure came back after this time, so that a call sent then says no more.
    pub fn has_failed_since(&self, sent_at: Time, now: Time) -> bool {
        // If the clock stepped back, failures would otherwise not count for as long as the step.
        self.failures > 0 && sent_at < self.failed_at && self.failed_at <= now + MAX_CLOCK_LAG
    }

    /// Gives back a permit if its call was never sent or proves nothing.
    pub fn give_back(&mut self, permit: BreakerPermit) {
        if let BreakerPhase::HalfOpen { probes, .. } = &mut self.phase {
            probes.retain(|probe| probe.number != permit.probe);
        }
    }

    /// Opens it because others have found that the provider fails. Returns false if it is open or half-open already.
    pub fn trip(&mut self, now: Time, rng: &mut impl Rng) -> bool {
        self.refresh(now);
        let lets_through = matches!(self.phase, BreakerPhase::Closed | BreakerPhase::Ramping { .. });
        if lets_through {
            self.open(now, rng);
        }
        lets_through
    }

    /// Closes it completely, without a ramp, and clears its failures.
    pub fn reset(&mut self) {
        self.enter_phase(BreakerPhase::Closed);
        self.failures = 0;
        self.open_backoff = BackoffState::default();
    }

    /// Returns the generation if the breaker is closed and has nothing recorded. Until that changes, a take returns a
    /// plain permit of this generation, and only the report of a failure changes the breaker.
    fn clean_generation(&self) -> Option<u64> {
        let clean = matches!(self.phase, BreakerPhase::Closed) && self.failures == 0 && self.call_window.is_none();
        clean.then_some(self.generation)
    }

    fn should_open(&self, others_would_have_ended: bool) -> bool {
        let spec = &self.spec;
        if others_would_have_ended && spec.failures.is_some_and(|most| self.failures >= most) {
            return true;
        }
        let Some(sum) = self.call_window.as_ref().map(CallWindow::totals) else { return false };
        let reaches = |count: u64, rate: u16| {
            u128::from(count) * u128::from(PER_MILLE) >= u128::from(sum.calls) * u128::from(rate)
        };
        sum.calls >= u64::from(spec.min_calls)
            && (spec.failure_rate.is_some_and(|rate| reaches(sum.failures, rate))
                || spec.slow_calls.is_some_and(|slow| reaches(sum.slow, slow.rate)))
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
            // The initial credit lets the first call pass, however small the share is.
            let credit = PER_MILLE - u64::from(first.share);
            self.enter_phase(BreakerPhase::Ramping { ends: now + self.spec.ramp_length(), credit });
        } else {
            self.reset();
        }
    }

    fn enter_phase(&mut self, phase: BreakerPhase) {
        self.set_phase(phase);
        self.generation += 1;
        if let Some(calls) = &mut self.call_window {
            calls.clear();
        }
    }

    fn set_phase(&mut self, phase: BreakerPhase) {
        self.phase = phase;
        self.transitions += 1;
    }

    /// Ends everything that is over at `now`, and corrects ends that are impossible.
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
                    self.set_phase(BreakerPhase::Closed);
                    self.open_backoff = BackoffState::default();
                }
            }
            BreakerPhase::Open { until, length } => {
                clamp_end(until, *length);
                if now >= *until {
                    self.set_phase(BreakerPhase::HalfOpen { successes: 0, probes: Vec::new() });
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

/// True if a period of `length` that has begun can't end as late as `end`, because the clock has stepped back since.
fn is_impossible_end(end: Time, length: Span, now: Time) -> bool {
    end > now + length + MAX_CLOCK_LAG
}
