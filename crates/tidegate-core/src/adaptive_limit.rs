//! Adaptive cap on calls in flight: learns from replies how much a provider carries.
//!
//! A provider that carries n calls at once answers the n + 1st later: past that point more calls in flight are a
//! longer queue and no more throughput (Little's law). Comparing round trips under load with those without finds the
//! point, as in TCP Vegas (Brakmo and Peterson, 1994), Netflix's `Gradient2` and Envoy's adaptive concurrency.
//!
//! Two things that those leave open are settled here. The round trip without load is neither the shortest ever seen,
//! which one lucky reply would spoil, nor an average that creeps up with the queue it should reveal: it is taken while
//! at most half of the cap is in flight, and where that doesn't happen by itself the cap is halved for a moment twice a
//! minute, as BBR drains for its `PROBE_RTT`. And no reply, however late, counts as more than twice the usual one.

use core::fmt;

use crate::{Class, Span, Time};

/// A shorter round trip counts as this long, which is what CoDel lets a queue stand for (RFC 8289): nobody notices it, and
/// holding calls back for less costs more than it gains.
const MIN_ROUND_TRIP: Span = Span::from_millis(5);
/// Replies that are judged together.
const SAMPLES_PER_WINDOW: u32 = 32;
/// For how many round trips without load replies aren't counted after a judgement: they belong to calls that were sent
/// before it.
const SKIPPED_ROUND_TRIPS: u64 = 2;
/// How old the round trip without load gets before the cap is halved for a window to learn it anew.
const MAX_BASELINE_AGE: Span = Span::from_secs(30);

/// Bounds of an adaptive cap, as they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptiveLimitSpec {
    /// The cap never falls below this. Default 4.
    pub min: u32,
    /// The cap never rises above this. Default 1000.
    pub max: u32,
    /// The cap before anything was learnt. Default 20.
    pub initial: u32,
}

impl Default for AdaptiveLimitSpec {
    fn default() -> Self {
        Self { min: 4, max: 1_000, initial: 20 }
    }
}

/// Why an adaptive cap can't be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdaptiveLimitError {
    /// A smallest cap of 0: nothing would ever be sent.
    ZeroMin,
    /// Not `min <= initial <= max`.
    OutOfOrder,
}

impl fmt::Display for AdaptiveLimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ZeroMin => "a smallest cap of 0 would never let anything pass",
            Self::OutOfOrder => "the first cap must lie between the smallest and the largest",
        })
    }
}

impl core::error::Error for AdaptiveLimitError {}

/// A provider's cap on calls in flight.
///
/// Round trips of less than 5 ms count as 5 ms. Replies are judged 32 at a time; after each judgement those of the next
/// two round trips are left out, for they tell of the cap that held before. A call that failed (throttled, timed out or
/// transient otherwise) counts as one that took twice as long as usual. Where most calls were sent with more than half
/// of the cap in flight, an average of
///
/// - up to 5/4 of the round trip without load raises the cap by an eighth, unless more than an eighth of the calls failed;
///   at the start less than 4/3 doubles it, until it first doesn't rise;
/// - 4/3 of it or more lowers the cap to what would leave no queue, and a fifth above;
/// - anything between is the queue of a well used provider, and leaves the cap.
///
/// Where fewer were in flight, the cap doesn't bind: it stays, and the round trip without load is learnt. A provider
/// that gets slower for good is taken for a queue at first. Where lowering the cap twice doesn't help, the round trip
/// without load is learnt anew, and the provider is used fully again.
///
/// A provider that gets slower with every call it has in hand, and still does more with more of them, has no round trip
/// without load. There, what is learnt at half of the cap stands for it, and is learnt anew before it is held against a cap
/// that has changed by half. 4/3 between a cap and its half is where twice the calls bring half as much again: the cap at which throughput
/// for each unit of delay, Kleinrock's power, is largest (L. Kleinrock, "Power and deterministic rules of thumb for
/// probabilistic problems in computer communications", 1979).
#[derive(Clone, Debug)]
pub struct AdaptiveLimit {
    spec: AdaptiveLimitSpec,
    cap: u32,
    /// Half of the cap holds for this window, to learn the round trip without load.
    is_draining: bool,
    /// Whether the last window that was judged lowered the cap.
    was_lowered: bool,
    /// Whether every window so far let the cap rise.
    is_starting: bool,
    unloaded_round_trip: Option<Span>,
    baseline_at: Option<Time>,
    /// The cap when it was learnt last.
    baseline_cap: u32,
    evaluated_at: Time,
    window: SampleWindow,
}

#[derive(Clone, Copy, Debug, Default)]
struct SampleWindow {
    answered: u32,
    failed: u32,
    /// Calls that were sent with more than half of the cap in flight.
    loaded: u32,
    round_trips: Span,
}

impl AdaptiveLimit {
    /// A cap that has learnt nothing.
    ///
    /// # Errors
    /// A smallest cap of 0, or not `min <= initial <= max`.
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

    /// How many calls may be in flight now.
    #[inline]
    pub fn limit(&self) -> u32 {
        if self.is_draining { (self.cap / 2).max(self.spec.min) } else { self.cap }
    }

    /// The round trip without load, as far as it is known: 5 ms where it is shorter.
    pub fn unloaded_round_trip(&self) -> Option<Span> {
        self.unloaded_round_trip
    }

    /// Learns at `now` what became of a call that took `round_trip` and was sent as the `in_flight`-th. Of a call that
    /// was cancelled, or whose credential wasn't accepted, nothing is learnt.
    pub fn sample(&mut self, round_trip: Span, in_flight: u32, class: Class, now: Time) {
        let failed = match class {
            Class::Success | Class::Permanent => false,
            Class::Throttled | Class::Transient => true,
            Class::Auth | Class::Cancelled => return,
        };
        // Or a clock that stepped back would let nothing count for as long.
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
        // At the smallest cap there is no less load to learn from.
        let updates_baseline = !is_cap_reached || self.cap == self.spec.min;
        if updates_baseline {
            (self.baseline_at, self.baseline_cap) = (Some(now), self.cap);
        }
        if let Some(average) = round_trips.as_micros().checked_div(u64::from(answered)) {
            // What is this short under load can't be longer without.
            let lowers_baseline = self.unloaded_round_trip.is_none_or(|unloaded| average * 2 <= unloaded.as_micros());
            if updates_baseline || lowers_baseline {
                self.update_baseline(average);
            }
        }
        if !is_cap_reached {
            return;
        }
        if answered > 0 && self.baseline_at.is_none() {
            // Nothing to compare with yet.
            self.is_draining = true;
            return;
        }
        let unloaded = self.unloaded_round_trip.map_or(1, Span::as_micros);
        let average = (round_trips.as_micros() + u64::from(failed) * 2 * unloaded) / u64::from(SAMPLES_PER_WINDOW);
        let late = average * 3 >= unloaded * 4;
        let (cap, learnt) = (u64::from(self.cap), u64::from(self.baseline_cap));
        // Learnt at a much smaller cap, the round trip without load may be too short to be late by, and at a much larger
        // one too long to be early by.
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
        // Later a margin keeps the noise of so few replies from raising it little by little.
        let short = if self.is_starting { !late } else { average * 4 <= unloaded * 5 };
        let early = short && failed * 8 <= SAMPLES_PER_WINDOW;
        (self.was_lowered, self.is_starting) = (late, self.is_starting && early);
        if early {
            self.raise(average);
        }
        // A queue would be gone by now: what is still late must be the provider itself.
        let lowering_did_not_help = lowered_before && late;
        let stale = self.baseline_at.is_none_or(|at| at > now || now.since(at) >= MAX_BASELINE_AGE);
        self.is_draining = (lowering_did_not_help || stale) && self.cap > self.spec.min;
    }

    /// By an eighth; to twice as many while nothing has held it back. Then what was seen up to now is what half of the
    /// new cap brings, and nothing has to be drained for it.
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
