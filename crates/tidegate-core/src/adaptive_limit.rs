//! An adaptive limit of calls in flight: it learns the capacity of a provider from its replies.
//!
//! A provider that can process n calls at once answers call n + 1 later. Beyond that, more calls in flight lengthen the
//! queue but don't raise the throughput (Little's law). Comparing round trips with and without load finds that point,
//! as in TCP Vegas (Brakmo and Peterson, 1994), Netflix's `Gradient2` and Envoy's adaptive concurrency.
//!
//! This module adds two rules. First, the round trip without load is measured while at most half of the limit is in
//! flight. If that doesn't happen by itself, the limit is halved for a short time twice a minute, as BBR drains for its
//! `PROBE_RTT`. One lucky reply would spoil a minimum, and a running average grows with the queue that it should
//! reveal. Second, no reply, however late, counts as more than twice the round trip without load.

use thiserror::Error;

use crate::{Class, Span, Time};

/// A shorter round trip counts as this long. CoDel accepts a standing queue of this length (RFC 8289): a delay of 5 ms
/// has no visible effect, and holding calls back for less costs more than it gains.
const MIN_ROUND_TRIP: Span = Span::from_millis(5);
const SAMPLES_PER_WINDOW: u32 = 32;
/// After an evaluation, replies are ignored for this many round trips without load: their calls were sent before it.
const SKIPPED_ROUND_TRIPS: u64 = 2;
/// The age of the round trip without load at which the limit is halved for a window to measure it again.
const MAX_BASELINE_AGE: Span = Span::from_secs(30);

/// The bounds of an adaptive limit, as written by the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptiveLimitSpec {
    /// The smallest value of the limit, in calls. Default 4.
    pub min: u32,
    /// The largest value of the limit, in calls. Default 1000.
    pub max: u32,
    /// The limit before anything is learned, in calls. Default 20.
    pub initial: u32,
}

impl Default for AdaptiveLimitSpec {
    fn default() -> Self {
        Self { min: 4, max: 1_000, initial: 20 }
    }
}

/// The reason why an adaptive limit can't be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AdaptiveLimitError {
    /// `min` is 0: no call would ever be sent.
    #[error("a smallest cap of 0 would never let anything pass")]
    ZeroMin,
    /// `min <= initial <= max` doesn't hold.
    #[error("the first cap must lie between the smallest and the largest")]
    OutOfOrder,
}

/// A provider's limit of calls in flight.
///
/// Round trips of less than 5 ms count as 5 ms. Replies are evaluated in windows of 32. After each evaluation, the
/// replies of the next two round trips are ignored, because they belong to the previous limit. A failed call
/// (throttled, timed out or transient otherwise) counts as one that took twice the round trip without load. If at least
/// half of the calls were sent with more than half of the limit in flight, the average round trip decides:
///
/// - Up to 5/4 of the round trip without load, the limit rises by an eighth, unless more than an eighth of the calls
///   failed. At the start, less than 4/3 doubles the limit, until it doesn't rise for the first time.
/// - At 4/3 or more, the limit falls to the value that would leave no queue, plus a fifth.
/// - Between these, the provider is well used and its queue is normal: the limit stays.
///
/// If fewer were in flight, the limit has no effect: it stays, and the round trip without load is measured. A provider
/// that becomes slower permanently seems to have a queue at first. If lowering the limit twice doesn't help, the round
/// trip without load is measured again.
///
/// Providers that become slower with every call, but have more throughput with more calls, have no round trip without
/// load. There, the round trip at half of the limit is used, measured again before it is compared with a limit that has
/// changed by half. A ratio of 4/3 between a limit and its half means that twice the calls give 1.5 times the
/// throughput. At this limit, throughput divided by delay (Kleinrock's power) is largest (L. Kleinrock, "Power and
/// deterministic rules of thumb for probabilistic problems in computer communications", 1979).
#[derive(Clone, Debug)]
pub struct AdaptiveLimit {
    spec: AdaptiveLimitSpec,
    cap: u32,
    /// True if half of the limit holds for this window, to measure the round trip without load.
    is_draining: bool,
    was_lowered: bool,
    /// True if every window until now raised the limit.
    is_starting: bool,
    unloaded_round_trip: Option<Span>,
    baseline_at: Option<Time>,
    /// The limit at the last measurement of the round trip without load.
    baseline_cap: u32,
    evaluated_at: Time,
    window: SampleWindow,
}

#[derive(Clone, Copy, Debug, Default)]
struct SampleWindow {
    answered: u32,
    failed: u32,
    /// Calls that were sent with more than half of the limit in flight.
    loaded: u32,
    round_trips: Span,
}

impl AdaptiveLimit {
    /// Creates a limit that has learned nothing.
    ///
    /// # Errors
    /// `min` is 0, or `min <= initial <= max` doesn't hold.
    pub fn new(spec: AdaptiveLimitSpec) -> Result<Self, AdaptiveLimitError> {
        if spec.min == 0 {
            return Err(AdaptiveLimitError::ZeroMin);
        }
        if !(spec.min..=spec.max).contains(&spec.initial) {
            return Err(AdaptiveLimitError::OutOfOrder);
        }
        Ok(Self {
            spec,
            cap: spec.initial,
            is_draining: false,
            was_lowered: false,
            is_starting: true,
            unloaded_round_trip: None,
            baseline_at: None,
            baseline_cap: spec.initial,
            evaluated_at: Time::ZERO,
            window: SampleWindow::default(),
        })
    }

    /// The number of calls that may be in flight now.
    #[inline]
    pub fn limit(&self) -> u32 {
        if self.is_draining { (self.cap / 2).max(self.spec.min) } else { self.cap }
    }

    /// The round trip without load, at least 5 ms. `None` until it is measured.
    pub fn unloaded_round_trip(&self) -> Option<Span> {
        self.unloaded_round_trip
    }

    /// Learns at `now` from the result of a call that took `round_trip` and was the `in_flight`-th call in flight when
    /// it was sent. Cancelled calls, and calls with a rejected credential, are ignored.
    pub fn sample(&mut self, round_trip: Span, in_flight: u32, class: Class, now: Time) {
        let failed = match class {
            Class::Success | Class::Permanent => false,
            Class::Throttled | Class::Transient => true,
            Class::Auth | Class::Cancelled => return,
        };
        // If the clock stepped back, replies would otherwise be ignored for as long as the step.
        self.evaluated_at = self.evaluated_at.min(now);
        let skip_time = self
            .unloaded_round_trip
            .map_or(Span::ZERO, |unloaded| unloaded.times(SKIPPED_ROUND_TRIPS).min(MAX_BASELINE_AGE));
        if now < self.evaluated_at + skip_time {
            return;
        }
        let window = &mut self.window;
        if in_flight > self.cap / 2 {
            window.loaded += 1;
        }
        if failed {
            window.failed += 1;
        } else {
            let most = self.unloaded_round_trip.map_or(Span::MAX, |unloaded| unloaded.times(2));
            window.answered += 1;
            window.round_trips = window.round_trips + round_trip.max(MIN_ROUND_TRIP).min(most);
        }
        if window.answered + window.failed >= SAMPLES_PER_WINDOW {
            self.evaluate_window(now);
        }
    }

    fn evaluate_window(&mut self, now: Time) {
        let SampleWindow { answered, failed, loaded, round_trips } = core::mem::take(&mut self.window);
        let is_cap_reached = !core::mem::take(&mut self.is_draining) && loaded * 2 >= SAMPLES_PER_WINDOW;
        let lowered_before = core::mem::take(&mut self.was_lowered);
        self.evaluated_at = now;
        // At the smallest limit, the load can't be lowered further to measure it.
        let updates_baseline = !is_cap_reached || self.cap == self.spec.min;
        if updates_baseline {
            (self.baseline_at, self.baseline_cap) = (Some(now), self.cap);
        }
        if let Some(average) = round_trips.as_micros().checked_div(u64::from(answered)) {
            // An average this short under load can't be longer without load.
            let lowers_baseline = self.unloaded_round_trip.is_none_or(|unloaded| average * 2 <= unloaded.as_micros());
            if updates_baseline || lowers_baseline {
                self.update_baseline(average);
            }
        }
        if !is_cap_reached {
            return;
        }
        if answered > 0 && self.baseline_at.is_none() {
            // There is no round trip without load to compare with yet.
            self.is_draining = true;
            return;
        }
        let unloaded = self.unloaded_round_trip.map_or(1, Span::as_micros);
        let average = (round_trips.as_micros() + u64::from(failed) * 2 * unloaded) / u64::from(SAMPLES_PER_WINDOW);
        let late = average * 3 >= unloaded * 4;
        let (cap, learnt) = (u64::from(self.cap), u64::from(self.baseline_cap));
        // If measured at a much smaller limit, the round trip without load may be too short to prove lateness. If
        // measured at a much larger one, it may be too long to prove the opposite.
        let needs_new_baseline = if late { cap * 2 >= learnt * 3 } else { cap * 3 <= learnt * 2 };
        if needs_new_baseline && cap > u64::from(self.spec.min) {
            self.is_draining = true;
            return;
        }
        if late {
            let without_queue = u128::from(self.cap) * u128::from(unloaded) / u128::from(average);
            let lower = u32::try_from(without_queue * 6 / 5).unwrap_or(u32::MAX);
            self.cap = lower.clamp(self.spec.min, self.cap);
        }
        // After the start, a margin prevents that the noise of so few replies raises the limit little by little.
        let short = if self.is_starting { !late } else { average * 4 <= unloaded * 5 };
        let early = short && failed * 8 <= SAMPLES_PER_WINDOW;
        (self.was_lowered, self.is_starting) = (late, self.is_starting && early);
        if early {
            self.raise(average);
        }
        // Two reductions remove a queue. If replies are still late, the provider itself is slower.
        let lowering_did_not_help = lowered_before && late;
        let stale = self.baseline_at.is_none_or(|at| at > now || now.since(at) >= MAX_BASELINE_AGE);
        self.is_draining = (lowering_did_not_help || stale) && self.cap > self.spec.min;
    }

    /// Raises the limit by an eighth, or doubles it if it has risen in every window until now. After doubling, the
    /// average of this window belongs to half of the new limit, so that nothing must be drained to measure it.
    fn raise(&mut self, average: u64) {
        if !self.is_starting {
            self.cap = self.cap.saturating_add((self.cap / 8).max(1)).min(self.spec.max);
            return;
        }
        self.cap = self.cap.saturating_mul(2).min(self.spec.max);
        self.baseline_cap = self.cap;
        self.unloaded_round_trip = Some(Span::from_micros(average));
    }

    fn update_baseline(&mut self, average: u64) {
        let usual = self.unloaded_round_trip.map_or(average, Span::as_micros);
        self.unloaded_round_trip = Some(Span::from_micros((usual + average) / 2));
    }
}
