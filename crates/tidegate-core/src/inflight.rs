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
const SHORTEST: Span = Span::from_millis(5);
/// Replies that are judged together.
const WINDOW: u32 = 32;
/// For how many round trips without load replies aren't counted after a judgement: they belong to calls that were sent
/// before it.
const SETTLE: u64 = 2;
/// How old the round trip without load gets before the cap is halved for a window to learn it anew.
const LESSON: Span = Span::from_secs(30);

/// Bounds of an adaptive cap, as they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightSpec {
    /// The cap never falls below this. Default 4.
    pub min: u32,
    /// The cap never rises above this. Default 1000.
    pub max: u32,
    /// The cap before anything was learnt. Default 20.
    pub initial: u32,
}

impl Default for InflightSpec {
    fn default() -> Self {
        Self { min: 4, max: 1_000, initial: 20 }
    }
}

/// Why an adaptive cap can't be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InflightError {
    /// A smallest cap of 0: nothing would ever be sent.
    ZeroMin,
    /// Not `min <= initial <= max`.
    OutOfOrder,
}

impl fmt::Display for InflightError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ZeroMin => "a smallest cap of 0 would never let anything pass",
            Self::OutOfOrder => "the first cap must lie between the smallest and the largest",
        })
    }
}

impl core::error::Error for InflightError {}

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
pub struct Inflight {
    spec: InflightSpec,
    cap: u32,
    /// Half of the cap holds for this window, to learn the round trip without load.
    draining: bool,
    /// Whether the last window that was judged lowered the cap.
    lowered: bool,
    /// Whether every window so far let the cap rise.
    starting: bool,
    unloaded: Option<Span>,
    learnt_at: Option<Time>,
    /// The cap when it was learnt last.
    learnt_cap: u32,
    judged_at: Time,
    window: Window,
}

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    answered: u32,
    failed: u32,
    /// Calls that were sent with more than half of the cap in flight.
    loaded: u32,
    round_trips: Span,
}

impl Inflight {
    /// A cap that has learnt nothing.
    ///
    /// # Errors
    /// A smallest cap of 0, or not `min <= initial <= max`.
    pub fn new(spec: InflightSpec) -> Result<Self, InflightError> {
        if spec.min == 0 {
            return Err(InflightError::ZeroMin);
        }
        if !(spec.min..=spec.max).contains(&spec.initial) {
            return Err(InflightError::OutOfOrder);
        }
        Ok(Self {
            spec,
            cap: spec.initial,
            draining: false,
            lowered: false,
            starting: true,
            unloaded: None,
            learnt_at: None,
            learnt_cap: spec.initial,
            judged_at: Time::ZERO,
            window: Window::default(),
        })
    }

    /// How many calls may be in flight now.
    #[inline]
    pub fn limit(&self) -> u32 {
        if self.draining { (self.cap / 2).max(self.spec.min) } else { self.cap }
    }

    /// The round trip without load, as far as it is known: 5 ms where it is shorter.
    pub fn unloaded(&self) -> Option<Span> {
        self.unloaded
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
        self.judged_at = self.judged_at.min(now);
        let settle = self.unloaded.map_or(Span::ZERO, |unloaded| unloaded.times(SETTLE).min(LESSON));
        if now < self.judged_at + settle {
            return;
        }
        let window = &mut self.window;
        if in_flight > self.cap / 2 {
            window.loaded += 1;
        }
        if failed {
            window.failed += 1;
        } else {
            let most = self.unloaded.map_or(Span::MAX, |unloaded| unloaded.times(2));
            window.answered += 1;
            window.round_trips = window.round_trips + round_trip.max(SHORTEST).min(most);
        }
        if window.answered + window.failed >= WINDOW {
            self.judge(now);
        }
    }

    fn judge(&mut self, now: Time) {
        let Window { answered, failed, loaded, round_trips } = core::mem::take(&mut self.window);
        let binds = !core::mem::take(&mut self.draining) && loaded * 2 >= WINDOW;
        let lowered_before = core::mem::take(&mut self.lowered);
        self.judged_at = now;
        // At the smallest cap there is no less load to learn from.
        let teaches = !binds || self.cap == self.spec.min;
        if teaches {
            (self.learnt_at, self.learnt_cap) = (Some(now), self.cap);
        }
        if let Some(average) = round_trips.as_micros().checked_div(u64::from(answered)) {
            // What is this short under load can't be longer without.
            let refutes = self.unloaded.is_none_or(|unloaded| average * 2 <= unloaded.as_micros());
            if teaches || refutes {
                self.learn(average);
            }
        }
        if !binds {
            return;
        }
        if answered > 0 && self.learnt_at.is_none() {
            // Nothing to compare with yet.
            self.draining = true;
            return;
        }
        let unloaded = self.unloaded.map_or(1, Span::as_micros);
        let average = (round_trips.as_micros() + u64::from(failed) * 2 * unloaded) / u64::from(WINDOW);
        let late = average * 3 >= unloaded * 4;
        let (cap, learnt) = (u64::from(self.cap), u64::from(self.learnt_cap));
        // Learnt at a much smaller cap, the round trip without load may be too short to be late by, and at a much larger
        // one too long to be early by.
        let doubtful = if late { cap * 2 >= learnt * 3 } else { cap * 3 <= learnt * 2 };
        if doubtful && cap > u64::from(self.spec.min) {
            self.draining = true;
            return;
        }
        if late {
            let without_queue = u128::from(self.cap) * u128::from(unloaded) / u128::from(average);
            let lower = u32::try_from(without_queue * 6 / 5).unwrap_or(u32::MAX);
            self.cap = lower.clamp(self.spec.min, self.cap);
        }
        // Later a margin keeps the noise of so few replies from raising it little by little.
        let short = if self.starting { !late } else { average * 4 <= unloaded * 5 };
        let early = short && failed * 8 <= WINDOW;
        (self.lowered, self.starting) = (late, self.starting && early);
        if early {
            self.raise(average);
        }
        // A queue would be gone by now: what is still late must be the provider itself.
        let puzzled = lowered_before && late;
        let stale = self.learnt_at.is_none_or(|at| at > now || now.since(at) >= LESSON);
        self.draining = (puzzled || stale) && self.cap > self.spec.min;
    }

    /// By an eighth; to twice as many while nothing has held it back. Then what was seen up to now is what half of the
    /// new cap brings, and nothing has to be drained for it.
    fn raise(&mut self, average: u64) {
        if !self.starting {
            self.cap = self.cap.saturating_add((self.cap / 8).max(1)).min(self.spec.max);
            return;
        }
        self.cap = self.cap.saturating_mul(2).min(self.spec.max);
        self.learnt_cap = self.cap;
        self.unloaded = Some(Span::from_micros(average));
    }

    fn learn(&mut self, average: u64) {
        let usual = self.unloaded.map_or(average, Span::as_micros);
        self.unloaded = Some(Span::from_micros((usual + average) / 2));
    }
}
