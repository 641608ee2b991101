//! An adaptive limit of calls in flight: it learns the capacity of a provider from its replies.
//!
//! A provider that can process n calls at once answers call n + 1 later. Beyond that, more calls in flight lengthen the
//! queue but don't raise the throughput (Little's law). Comparing round trips with and without load finds that point,
//! as in TCP Vegas (Brakmo and Peterson, 1994), Netflix's `Gradient2` and Envoy's adaptive concurrency.
//!
//! This module adds two rules. First, the round trip without load is measured while at most half of the limit is in
//! flight. If that doesn't happen by itself, the limit is halved for a short time every ten seconds, as BBR drains for
//! its `PROBE_RTT` (draft-ietf-ccwg-bbr): at full multiples of ten seconds since the Unix epoch, so that all clients of
//! a provider drain together. Otherwise each would measure the queue of the others. One lucky reply would spoil a
//! minimum, and a running average grows with the queue that it should reveal. Second, no reply, however late, counts as
//! more than twice the round trip without load.

use thiserror::Error;

use crate::{Class, Span, Time};

/// A shorter round trip counts as this long. CoDel accepts a standing queue of this length (RFC 8289): a delay of 5 ms
/// has no visible effect, and holding calls back for less costs more than it gains.
const MIN_ROUND_TRIP: Span = Span::from_millis(5);
/// The longest round trip that a limit continues from.
const MAX_LEARNT_ROUND_TRIP: Span = Span::from_secs(60);
const SAMPLES_PER_WINDOW: u32 = 32;
/// The least replies in a window of the start.
const MIN_START_SAMPLES: u32 = 16;
/// The least replies in a window after the start: a small limit has few at a time.
const MIN_SAMPLES: u32 = 8;
/// After an evaluation, replies are ignored for this many round trips without load: their calls were sent before it.
const SKIPPED_ROUND_TRIPS: u64 = 2;
/// The longest time for which replies are ignored.
const MAX_SKIPPED_TIME: Span = Span::from_secs(30);
/// The evaluations in a row that raise the limit by an eighth, before others raise it by a third.
const FIRST_RAISES: u32 = 3;
/// The refusals, less the other replies, that prove that the provider refuses calls beyond a number in flight.
const REFUSALS: u32 = 4;
/// The time before a limit that the provider has refused is tried again, by a few calls.
const REFUSED_TIME: Span = Span::from_secs(5);
/// The time between the drains that measure the round trip without load.
const DRAIN_INTERVAL: Span = Span::from_secs(10);
/// The interval is doubled until it is at least this many times as long as a drain.
const DRAINED_PART: u64 = 6;
/// A longer drain counts as this long, because it may have waited for calls.
const MAX_DRAIN_LENGTH: Span = Span::from_secs(60);

/// The bounds of an adaptive limit, as written by the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptiveLimitSpec {
    /// The smallest value of the limit, in calls. A drain halves it, too. Default 4.
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
/// Round trips of less than 5 ms count as 5 ms. Replies are evaluated in windows of four times the limit, from 8 to 32.
/// After each evaluation, the replies of the next two round trips are ignored, because they belong to the previous limit.
/// A failed call (throttled, timed out or transient otherwise) counts as one that took twice the round trip without load.
/// If at least half of the calls were sent with more than half of the limit in flight, the average round trip decides:
///
/// - Up to 5/4 of the round trip without load, the limit rises by an eighth, or by a third after three times, unless more than an eighth of the calls
///   failed, or most were sent with at most three quarters of the limit in flight.
/// - At 4/3 or more, the limit falls to the value that would leave no queue, plus a fifth.
/// - Between these, the provider is well used and its queue is normal: the limit stays.
///
/// At the start, only calls are evaluated that were sent under the present limit with more than three quarters of it in
/// flight: as many as the limit, from 16 to 32. They are compared with the round trip at half as many calls, as the earlier
/// limits have shown it. Less than 8/7 of it doubles the limit. Up to 4/3, the limit rises once to the number of calls at
/// which the ratio would be 4/3, by at most three quarters, and then by an eighth each time. The first window with 4/3 or more, or
/// with many failures, ends the start. TCP's slow start in RFC 9406 (HyStart++) also slows down before it ends.
///
/// If a provider answers calls beyond a number in flight with quick errors, the limit falls below that number at once. It is
/// tried again after 5 s, by one call more, then two, then four.
///
/// If fewer were in flight, the limit has no effect: it stays, and the round trip without load is measured. An average
/// under load that is shorter by a quarter replaces it, too: the provider has become faster, or other clients have
/// left. A provider that becomes slower permanently seems to have a queue at first. If lowering the limit twice doesn't
/// help, it isn't lowered further until the round trip without load is measured again.
///
/// A limit that has been reached is halved for a *drain* of at most 32 replies, to measure the round trip without load. Drains
/// begin at full multiples of 10 s since the Unix epoch, or of 20 s, 40 s and so on if they take more than a sixth of that.
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
    /// True if the limit had an effect since the last drain.
    was_reached: bool,
    /// The length of the last drain.
    drain_length: Span,
    /// True if lowering the limit twice hasn't helped: the provider itself may be slower, which the next drain shows.
    wants_drain: bool,
    was_lowered: bool,
    /// The search for the limit at the start. `None` once it is over.
    start: Option<Start>,
    unloaded_round_trip: Option<Span>,
    baseline_at: Option<Time>,
    /// The limit at the last measurement of the round trip without load.
    baseline_cap: u32,
    evaluated_at: Time,
    window: SampleWindow,
    /// The quick failures of calls that were sent with a nearly full limit, less the other replies.
    refusals: u32,
    ceiling: Option<Ceiling>,
    /// The evaluations in a row that raised the limit.
    raises: u32,
}

/// The number of calls beyond which the provider refused some.
#[derive(Clone, Copy, Debug)]
struct Ceiling {
    limit: u32,
    refused_at: Time,
    /// The calls by which it is raised next.
    step: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct SampleWindow {
    answered: u32,
    failed: u32,
    /// Calls that were sent with more than half of the limit in flight, and with more than three quarters.
    loaded: u32,
    full: u32,
    round_trips: Span,
    /// The calls in flight as each answered call was sent, in all.
    in_flight: u64,
    /// The replies to calls that were sent with at most half of the limit in flight.
    few: u32,
    few_round_trips: Span,
}

/// The round trips at the last two limits of the start, the smaller first.
#[derive(Clone, Copy, Debug, Default)]
struct Start {
    levels: Option<[(u32, Span); 2]>,
    /// True once the round trip rises so much that the limit is no longer doubled.
    is_careful: bool,
}

impl SampleWindow {
    fn few_average(&self) -> Option<Span> {
        self.few_round_trips.as_micros().checked_div(u64::from(self.few)).map(Span::from_micros)
    }
}

impl Start {
    /// The number of calls in flight at which twice the calls have a round trip longer by a third, by the line through both
    /// levels: where the part that load adds is as long as that without load.
    fn knee(&self) -> u32 {
        let Some([(few, short), (many, long)]) = self.levels else { return u32::MAX };
        let (more, rise) = (u64::from(many.saturating_sub(few)), long.as_micros().saturating_sub(short.as_micros()));
        let without_load = short.as_micros().saturating_mul(more).saturating_sub(rise.saturating_mul(few.into()));
        without_load.checked_div(rise).map_or(u32::MAX, |knee| u32::try_from(knee).unwrap_or(u32::MAX))
    }

    /// The round trip at this number of calls in flight, by the line through both levels.
    fn round_trip_at(&self, in_flight: u32) -> Option<Span> {
        let [(few, short), (many, long)] = self.levels?;
        let rise = long.as_micros().saturating_sub(short.as_micros());
        let distance = u64::from(in_flight.saturating_sub(few));
        let part = rise.saturating_mul(distance) / u64::from(many.saturating_sub(few).max(1));
        Some(short + Span::from_micros(part))
    }
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
            was_reached: false,
            drain_length: Span::ZERO,
            wants_drain: false,
            was_lowered: false,
            start: Some(Start::default()),
            unloaded_round_trip: None,
            baseline_at: None,
            baseline_cap: spec.initial,
            evaluated_at: Time::ZERO,
            window: SampleWindow::default(),
            refusals: 0,
            ceiling: None,
            raises: 0,
        })
    }

    /// The number of calls that may be in flight now.
    #[inline]
    pub fn limit(&self) -> u32 {
        if self.is_draining { (self.cap / 2).max(1) } else { self.cap }
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
            Class::Throttled | Class::Unavailable | Class::Transient | Class::Unknown => true,
            // A spent quota says nothing about the load.
            Class::Quota | Class::Auth | Class::Cancelled => return,
        };
        // If the clock stepped back, replies would otherwise be ignored for as long as the step.
        self.evaluated_at = self.evaluated_at.min(now);
        if self.start.is_none() && self.needs_drain(now) {
            (self.is_draining, self.evaluated_at, self.window) = (true, now, SampleWindow::default());
        }
        let is_full = u64::from(in_flight) * 4 > u64::from(self.cap) * 3;
        if is_full {
            let is_quick = self.unloaded_round_trip.is_some_and(|unloaded| round_trip.times(2) < unloaded);
            self.note_refusal(failed && is_quick, in_flight, now);
        }
        // A limit that has only risen leaves no queue behind, so that calls sent under it tell of it at once.
        let skip_time = if self.start.is_some() && !failed { round_trip } else { self.skip_time() };
        if now.since(self.evaluated_at) < skip_time {
            return;
        }
        let window = &mut self.window;
        if self.start.is_some() && !is_full {
            if in_flight <= self.cap / 2 && !failed {
                window.few += 1;
                window.few_round_trips = window.few_round_trips + round_trip.max(MIN_ROUND_TRIP);
            }
            if window.few >= SAMPLES_PER_WINDOW {
                self.unloaded_round_trip = window.few_average();
                (self.baseline_at, self.baseline_cap, self.evaluated_at) = (Some(now), self.cap, now);
                self.window = SampleWindow::default();
            }
            return;
        }
        if in_flight > self.cap / 2 {
            window.loaded += 1;
        }
        if is_full {
            window.full += 1;
        }
        if failed {
            window.failed += 1;
        } else {
            let unloaded = self.unloaded_round_trip.or(window.few_average());
            let most = unloaded.map_or(Span::MAX, |unloaded| unloaded.times(2));
            window.answered += 1;
            let round_trip = round_trip.max(MIN_ROUND_TRIP).min(most);
            window.round_trips = window.round_trips + round_trip;
            window.in_flight += u64::from(in_flight);
        }
        let (ended, limit) = (window.answered + window.failed, self.limit());
        let samples = match self.start {
            Some(_) => limit.clamp(MIN_START_SAMPLES, SAMPLES_PER_WINDOW),
            None => limit.saturating_mul(4).clamp(MIN_SAMPLES, SAMPLES_PER_WINDOW),
        };
        if ended >= samples {
            self.evaluate_window(now);
        }
    }

    /// The limit and the round trip without load, once the start is over and both are known.
    pub fn learnt(&self) -> Option<(u32, Span)> {
        self.unloaded_round_trip.filter(|_| self.start.is_none()).map(|round_trip| (self.cap, round_trip))
    }

    /// Continues from what another limit has [learnt](Self::learnt), instead of a start.
    pub fn resume(&mut self, (cap, round_trip): (u32, Span), now: Time) {
        (self.cap, self.start) = (cap.clamp(self.spec.min, self.spec.max), None);
        self.unloaded_round_trip = Some(round_trip.clamp(MIN_ROUND_TRIP, MAX_LEARNT_ROUND_TRIP));
        (self.baseline_at, self.baseline_cap, self.evaluated_at) = (Some(now), self.cap, now);
        self.window = SampleWindow::default();
    }

    /// The time after an evaluation for which replies are ignored.
    fn skip_time(&self) -> Span {
        let round_trips = self.unloaded_round_trip.unwrap_or(Span::ZERO).times(SKIPPED_ROUND_TRIPS);
        round_trips.min(MAX_SKIPPED_TIME)
    }

    #[cold]
    fn evaluate_window(&mut self, now: Time) {
        let window = core::mem::take(&mut self.window);
        let SampleWindow { answered, failed, loaded, full, round_trips, .. } = window;
        let samples = answered + failed;
        let was_draining = core::mem::take(&mut self.is_draining);
        let is_cap_reached = !was_draining && loaded * 2 >= samples;
        let lowered_before = core::mem::take(&mut self.was_lowered);
        let began_at = core::mem::replace(&mut self.evaluated_at, now);
        self.was_reached = is_cap_reached || self.was_reached && !was_draining;
        if was_draining {
            self.drain_length = now.since(began_at).min(MAX_DRAIN_LENGTH);
        }
        let updates_baseline = !is_cap_reached || !self.can_drain();
        if updates_baseline {
            self.wants_drain = false;
            // A drain across a moment at which all clients drain doesn't replace theirs.
            (self.baseline_at, self.baseline_cap) = (Some(if was_draining { began_at } else { now }), self.cap);
        }
        if let Some(average) = round_trips.as_micros().checked_div(u64::from(answered)) {
            // An average this short under load can't be longer without load. The difference is as large as that which
            // proves lateness, so that noise doesn't count.
            let lowers_baseline =
                self.unloaded_round_trip.is_none_or(|unloaded| average * 4 <= unloaded.as_micros() * 3);
            if updates_baseline || lowers_baseline {
                self.update_baseline(average);
            }
        }
        if !is_cap_reached {
            return;
        }
        if self.start.is_some() {
            return self.search(&window);
        }
        let unloaded = self.unloaded_round_trip.map_or(1, Span::as_micros);
        let average = (round_trips.as_micros() + u64::from(failed) * 2 * unloaded) / u64::from(samples);
        let late = average * 3 >= unloaded * 4;
        let (cap, learnt) = (u64::from(self.cap), u64::from(self.baseline_cap));
        // If measured at a much smaller limit, the round trip without load may be too short to prove lateness. If
        // measured at a much larger one, it may be too long to prove the opposite.
        let needs_new_baseline = if late { cap * 2 >= learnt * 3 } else { cap * 2 <= learnt };
        if needs_new_baseline && self.can_drain() {
            self.is_draining = true;
            return;
        }
        let few_failed = failed * 8 <= samples;
        if late && !(self.wants_drain && few_failed) {
            self.lower(unloaded, average);
        }
        // A margin prevents that the noise of so few replies raises the limit little by little. A limit that few calls have
        // reached isn't raised, because it would be too high when more come.
        let early = average * 4 <= unloaded * 5 && few_failed && full * 2 >= samples;
        self.was_lowered = late;
        if early {
            // A provider that has become much larger is reached in a few steps more.
            let part = if self.raises < FIRST_RAISES { 8 } else { 3 };
            let raised = self.cap.saturating_add((self.cap / part).max(1));
            self.cap = self.allowed_by_ceiling(raised, now).min(self.spec.max);
        }
        self.raises = if early { self.raises.saturating_add(1) } else { 0 };
        // Two reductions remove a queue.
        self.wants_drain |= lowered_before && late && few_failed && self.can_drain();
    }

    /// True if the limit can be halved to measure the round trip without load.
    fn can_drain(&self) -> bool {
        self.cap > 1 && self.spec.min < self.spec.max
    }

    /// True if the limit has had an effect, and the round trip without load hasn't been measured since the last moment at
    /// which all clients drain.
    fn needs_drain(&self, now: Time) -> bool {
        if self.is_draining || !self.can_drain() {
            return false;
        }
        let mut interval = DRAIN_INTERVAL;
        while !self.wants_drain && interval < self.drain_length.times(DRAINED_PART) {
            // Clients whose intervals differ still have every second one in common.
            interval = interval.times(2);
        }
        let last_drain = now - Span::from_micros(now.as_micros() % interval.as_micros());
        self.baseline_at.is_none_or(|at| at > now || self.was_reached && at < last_drain)
    }

    /// Lowers the limit at once if a provider refuses what comes beyond a number of calls. Its refusals are quick, so that the
    /// calls behind them would be refused by the hundred until the next evaluation.
    fn note_refusal(&mut self, is_refusal: bool, in_flight: u32, now: Time) {
        if !is_refusal {
            self.refusals = self.refusals.saturating_sub(1);
            return;
        }
        self.refusals = (self.refusals + 1).min(REFUSALS);
        if self.refusals == REFUSALS && in_flight <= self.cap {
            self.cap = in_flight.saturating_sub(1).max(self.spec.min);
            self.start = None;
            self.ceiling = Some(Ceiling { limit: self.cap, refused_at: now, step: 1 });
        }
    }

    /// Returns as much of a raised limit as the ceiling allows. It rises by steps that double.
    fn allowed_by_ceiling(&mut self, raised: u32, now: Time) -> u32 {
        let Some(ceiling) = self.ceiling.as_mut().filter(|ceiling| raised > ceiling.limit) else { return raised };
        ceiling.refused_at = ceiling.refused_at.min(now);
        if now.since(ceiling.refused_at) >= REFUSED_TIME {
            ceiling.limit = ceiling.limit.saturating_add(ceiling.step);
            (ceiling.refused_at, ceiling.step) = (now, ceiling.step.saturating_mul(2));
        }
        raised.min(ceiling.limit)
    }

    /// Lowers the limit to the value that would leave no queue, plus a fifth.
    fn lower(&mut self, unloaded: u64, loaded: u64) {
        let without_queue = u128::from(self.cap) * u128::from(unloaded) / u128::from(loaded.max(1));
        let lower = u32::try_from(without_queue * 6 / 5).unwrap_or(u32::MAX);
        self.cap = lower.clamp(self.spec.min, self.cap);
    }

    /// Judges a window of the start, whose calls were all sent with more than three quarters of the limit in flight. Raises
    /// the limit, or ends the start.
    fn search(&mut self, window: &SampleWindow) {
        let Some(mut start) = self.start else { return };
        let SampleWindow { answered, failed, round_trips, in_flight, .. } = *window;
        let samples = answered + failed;
        // The first calls after a raise have fewer others beside them than the later ones.
        let present =
            in_flight.checked_div(u64::from(answered)).and_then(|mean| u32::try_from(mean).ok()).unwrap_or(self.cap);
        let half = present / 2;
        let average = round_trips.as_micros().checked_div(u64::from(answered)).map(Span::from_micros);
        // The first calls are sent one after the other, so that some had few others beside them.
        let known = self.unloaded_round_trip.filter(|_| self.baseline_at.is_some());
        let measured = start.round_trip_at(half).or(known).or(window.few_average()).or(average);
        // If nothing was ever answered, only the failures count.
        let unloaded = measured.unwrap_or(Span::from_micros(1));
        let average = average.unwrap_or(unloaded.times(2));
        let loaded = (round_trips.as_micros() + u64::from(failed) * 2 * unloaded.as_micros()) / u64::from(samples);
        let is_late = loaded * 3 >= unloaded.as_micros() * 4;
        if measured.is_some() {
            (self.unloaded_round_trip, self.baseline_cap) = (measured, self.cap);
            self.baseline_at = Some(self.evaluated_at);
        }
        if is_late || failed * 8 > samples {
            self.start = None;
            if is_late {
                self.lower(unloaded.as_micros(), loaded);
                self.was_lowered = true;
            }
            return;
        }
        if self.cap == self.spec.max {
            self.start = None;
            return;
        }
        let is_doubled = start.levels.is_none_or(|[_, (many, _)]| u64::from(present) * 3 >= u64::from(many) * 5);
        if is_doubled {
            let lower = start.levels.map_or((half, unloaded), |[_, upper]| upper);
            start.levels = Some([lower, (present, average.max(lower.1))]);
        }
        let becomes_careful = is_doubled && !start.is_careful && loaded * 7 >= unloaded.as_micros() * 8;
        start.is_careful |= becomes_careful;
        let step = match (start.is_careful, becomes_careful) {
            (false, _) => self.cap,
            (true, false) => (self.cap / 8).max(1),
            (true, true) => {
                let more = start.knee().saturating_sub(self.cap);
                more.clamp((self.cap / 8).max(1), (self.cap - self.cap / 4).max(1))
            }
        };
        self.cap = self.cap.saturating_add(step).min(self.spec.max);
        self.start = Some(start);
        // The next window is compared with the round trip at half of the new limit.
        (self.unloaded_round_trip, self.baseline_cap) = (start.round_trip_at(self.cap / 2), self.cap);
    }

    fn update_baseline(&mut self, average: u64) {
        let usual = self.unloaded_round_trip.map_or(average, Span::as_micros);
        let usual = usual.min(average);
        self.unloaded_round_trip = Some(Span::from_micros((usual + average) / 2));
    }
}
