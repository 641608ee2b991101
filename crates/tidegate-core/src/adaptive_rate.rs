//! An adaptive rate: as many calls per second as a service accepts while it throttles only a few of them.
//!
//! Controllers of this kind raise a rate until a throttle and then cut it. AIMD adds and halves. AWS's SDKs follow TCP
//! CUBIC (RFC 9438), which cuts to seven tenths and stays near the throttled rate. Scrapy's AutoThrottle and Netflix's
//! `Gradient2` use latency, which a limiter that refuses at once doesn't raise. All of them cause a throttle whenever
//! their formula reaches the ceiling. Here the share of calls that may be throttled is fixed, one in a hundred: a rate
//! above the ceiling is tried only when enough credit is earned.
//!
//! Time is divided into monitor intervals of one rate each. An interval is clean after enough successes to reveal an
//! excess of the size of its last step. It ends with the first throttle at its rate, so its throttles count as one.
//!
//! - Until the first throttle, each clean interval doubles the rate.
//! - Later, if no ceiling is known, each raises the rate by 3 %, 9 %, 27 % and then 30 %, or by less if the credit
//!   allows less, because a share of the calls under way is in excess until the first throttled reply arrives.
//! - Below the ceiling, a rate that was throttled, each goes half of the way to it, until 1.5 % are left.
//! - There the rate stays, and tries the ceiling again when the credit allows it. If that is clean, it is forgotten.
//! - Both steps that need credit take two intervals: only a few unanswered calls go at the higher rate in the first.
//! - The first throttle above a clean rate leads back to the clean rate. Each further one cuts by a share that depends
//!   on the few successes before it: by at most 3 % at first, and by up to twice as much each time. A throttle directly
//!   after a cut says nothing about the ceiling: the service may still count earlier calls.
//! - After a cut there is a pause, in which the lower rate compensates for the excess of the higher one.
//!
//! A service may ask for a wait when it throttles, and no call is sent during it. Such a throttle also costs half of
//! one for each call that the rate would have sent in the first 10 s of that time. While the debt is larger than
//! throttles without waits can make it, no rate is raised below a ceiling. As long as the waits keep most calls back, each
//! cut is twice the last one.
//!
//! A rate that the calls don't use is not known to be accepted. A throttle then cuts from the calls' own rate. If they are
//! few, or a higher rate was accepted before, the ceiling stays, and the wait costs nothing.
//!
//! Replies that report a remaining amount and its reset time set a bound, up to which the rate rises without trial.

use thiserror::Error;

use crate::time::MAX_CLOCK_LAG;
use crate::{PER_MILLE, RemainingAmount, Span, Time};

/// Rates are counted in millionths of a call per second.
const PER_SECOND: u64 = 1_000_000_000_000;
/// The first step above a known rate. It also sets the length of an interval in which the rate didn't rise.
const SMALL_STEP: u64 = 30;
/// The largest step after the first throttle, and the smallest towards an advertised rate.
const LARGE_STEP: u64 = 300;
const STARTUP_STEP: u64 = 1_000;
/// The distance to a ceiling at which the rate stays.
const CEILING_MARGIN: u64 = 15;
/// The first cut below a rate that was considered clean. Each further one is up to twice as large.
const FIRST_CUT: u64 = 30;
/// The largest cut.
const MAX_CUT: u64 = 250;
/// The smallest number of successes that show that a rate is clean.
const MIN_SUCCESSES: u32 = 8;
/// The number of successes that show it if the step is small.
const MAX_SUCCESSES_TO_SHOW: u32 = (PER_MILLE / SMALL_STEP) as u32;
/// The minimum length of an interval: limiters that count per second don't show an excess earlier.
const MIN_MONITOR_TIME: Span = Span::from_millis(500);
/// Headers give times in whole seconds, so a rate derived from them later than this before a reset is too inaccurate.
const MIN_TIME_TO_RESET: Span = Span::from_secs(5);
/// The maximum number of unanswered calls above the ceiling. A strict limiter would throttle every second of them.
const MAX_PROBE_CALLS: u32 = 3;
/// The longest pause that compensates for an excess.
const MAX_PAUSE: Span = Span::from_millis(250);
/// The credit that a success earns, in thousandths of a throttle: one call in a hundred may be throttled.
const CREDIT_PER_SUCCESS: i64 = 10;
/// The cost of a throttle, in the same unit.
const CREDIT_PER_THROTTLE: i64 = 1_000;
/// The cost of a call that isn't sent because of a wait: half of a throttle, so that waits use about two in a hundred of
/// the calls. With a full throttle, a new capacity is found too late.
const COST_PER_MISSED_CALL: i64 = 500;
/// The largest credit, in the cost of the last throttle: enough for a small step with hundreds of calls under way.
const MAX_CREDIT_IN_THROTTLES: i64 = 10;
/// The largest debt without waits. Without a bound, a long outage would stop trials for an equally long time afterwards.
const MIN_CREDIT: i64 = -20 * CREDIT_PER_THROTTLE;
/// The longest part of a wait that costs credit. The full cost of a minute would delay the next trial by an hour.
const MAX_COUNTED_WAIT: Span = Span::from_secs(10);
/// The longest time over which the rate of the calls is averaged.
const MAX_DEMAND_TIME: Span = Span::from_secs(4);

/// An adaptive pace as written by the user. The bounds are times between two calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptiveRateSpec {
    /// The time between calls before anything is learned. Default 100 ms, ten calls per second.
    pub initial: Span,
    /// The longest time between calls, used for a service that throttles everything. Default 60 s, at most
    /// [`MAX_SLOWEST`].
    pub slowest: Span,
    /// The shortest time between calls, more than 0. Default 1 µs.
    pub fastest: Span,
}

impl Default for AdaptiveRateSpec {
    fn default() -> Self {
        Self { initial: Span::from_millis(100), slowest: Span::from_secs(60), fastest: Span::from_micros(1) }
    }
}

/// The reason why an adaptive pace can't be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AdaptiveRateError {
    /// `fastest` is 0.
    #[error("there must be some time between two calls")]
    ZeroFastest,
    /// `slowest` is more than [`MAX_SLOWEST`], one hour.
    #[error("there may be at most an hour between two calls")]
    TooSlow,
    /// `fastest <= initial <= slowest` doesn't hold.
    #[error("the first pace must lie between the slowest and the fastest")]
    OutOfOrder,
}

/// The largest value of [`AdaptiveRateSpec::slowest`]: one hour.
pub const MAX_SLOWEST: Span = Span::from_secs(3_600);

/// A period of one rate, and the calls that were sent in it.
#[derive(Clone, Copy, Debug)]
struct MonitorInterval {
    started_at: Time,
    last_sent: Time,
    sent: u32,
    succeeded: u32,
    /// The successes that show that the rate is clean: an excess of n thousandths shows once in 1000 / n calls.
    required_successes: u32,
}

impl MonitorInterval {
    const fn starting_at(now: Time, required_successes: u32) -> Self {
        Self { started_at: now, last_sent: now, sent: 0, succeeded: 0, required_successes }
    }
}

/// The calls without a gap of [`MIN_MONITOR_TIME`] between them.
#[derive(Clone, Copy, Debug)]
struct Demand {
    since: Time,
    calls: u32,
}

impl Demand {
    const fn starting_at(now: Time) -> Self {
        Self { since: now, calls: 0 }
    }

    fn record(&mut self, last_sent: Time, now: Time) {
        if last_sent + MIN_MONITOR_TIME <= now {
            *self = Self::starting_at(now);
        } else if self.since + MAX_DEMAND_TIME <= now {
            let half = Span::from_micros(now.since(self.since).as_micros() / 2);
            *self = Self { since: self.since + half, calls: self.calls / 2 };
        }
        self.calls = self.calls.saturating_add(1);
    }

    /// True if the calls have come for at least [`MIN_MONITOR_TIME`].
    fn is_long(&self, last_sent: Option<Time>) -> bool {
        last_sent.is_some_and(|last_sent| self.since + MIN_MONITOR_TIME <= last_sent)
    }

    /// The rate of the calls, and a tenth more because they are a small sample: throttles correct a rate that is too high,
    /// but nothing soon corrects one that is too low. A few calls at once are no more than a low rate.
    fn rate(&self, last_sent: Time) -> u64 {
        let elapsed = last_sent.since(self.since).max(MIN_MONITOR_TIME);
        u64::from(self.calls.max(MIN_SUCCESSES)) * (PER_SECOND / 10 * 11) / elapsed.as_micros()
    }
}

/// The rate that the headers of replies allow.
#[derive(Clone, Copy, Debug)]
struct AdvertisedRate {
    received_at: Time,
    until: Time,
    /// 0 if nothing is left until then.
    rate: u64,
}

/// The pace of the calls to one service.
///
/// The sender asks [`next_at`](Self::next_at), reports each call with [`sent`](Self::sent), and then reports its result
/// with [`succeeded`](Self::succeeded) or [`throttled`](Self::throttled). Other results are not reported.
#[derive(Clone, Debug)]
pub struct AdaptiveRate {
    slowest: u64,
    fastest: u64,
    rate: u64,
    sent_at: Option<Time>,
    paused_until: Time,
    monitor: MonitorInterval,
    /// The time since which the rate is the same. Calls sent before say nothing about it.
    rate_since: Time,
    /// The highest rate that was clean, as far as this is still assumed.
    clean_rate: Option<u64>,
    /// The lowest rate that was throttled, as far as this is still assumed.
    throttled_rate: Option<u64>,
    /// The step by which the next clean interval raises the rate, in thousandths.
    next_step: u64,
    /// The next cut, in thousandths.
    next_cut: u64,
    /// True while a rate above the ceiling, or above the last clean rate, is tried.
    is_probing: bool,
    /// The credit for throttles, in thousandths of one.
    credit: i64,
    /// The cost of the last wait that the service asked for, in the same unit.
    wait_cost: i64,
    /// The successes since the rate changed or a call was throttled.
    accepted: u32,
    demand: Demand,
    /// True if the rate is that of few calls, while a higher one may be accepted.
    is_guess: bool,
    /// True if the calls of the last interval were too few to show that the rate is accepted, and before the first one.
    /// False after a throttle.
    is_unused: bool,
    advertised: Option<AdvertisedRate>,
}

impl AdaptiveRate {
    /// Creates a pace that has learned nothing.
    ///
    /// # Errors
    /// `0 < fastest <= initial <= slowest <=` [`MAX_SLOWEST`] doesn't hold.
    pub fn new(spec: AdaptiveRateSpec) -> Result<Self, AdaptiveRateError> {
        if spec.fastest.is_zero() {
            return Err(AdaptiveRateError::ZeroFastest);
        }
        if spec.slowest > MAX_SLOWEST {
            return Err(AdaptiveRateError::TooSlow);
        }
        if !(spec.fastest..=spec.slowest).contains(&spec.initial) {
            return Err(AdaptiveRateError::OutOfOrder);
        }
        Ok(Self {
            slowest: per_second(spec.slowest),
            fastest: per_second(spec.fastest),
            rate: per_second(spec.initial),
            sent_at: None,
            paused_until: Time::ZERO,
            monitor: MonitorInterval::starting_at(Time::ZERO, MIN_SUCCESSES),
            rate_since: Time::ZERO,
            clean_rate: None,
            throttled_rate: None,
            next_step: STARTUP_STEP,
            next_cut: FIRST_CUT,
            is_probing: false,
            credit: CREDIT_PER_THROTTLE,
            wait_cost: 0,
            accepted: 0,
            is_guess: false,
            demand: Demand::starting_at(Time::ZERO),
            is_unused: true,
            advertised: None,
        })
    }

    /// The current time between two calls.
    pub fn interval(&self) -> Span {
        interval_of(self.rate)
    }

    /// The time at which the next call may be sent. If it has passed, the call may be sent at once.
    pub fn next_at(&self, now: Time) -> Time {
        let bound = self.advertised.filter(|bound| now < bound.until && bound.received_at <= now + MAX_CLOCK_LAG);
        if let Some(AdvertisedRate { rate: 0, until, .. }) = bound {
            return until;
        }
        let in_doubt = self.unconfirmed_calls() >= MAX_PROBE_CALLS;
        let rate = self.clean_rate.filter(|_| self.is_probing && in_doubt).unwrap_or(self.rate);
        let spacing = interval_of(bound.map_or(rate, |bound| rate.min(bound.rate)));
        // A time further away is one from before the clock stepped back.
        let next =
            self.sent_at.filter(|sent_at| *sent_at <= now + MAX_CLOCK_LAG).map_or(now, |sent_at| sent_at + spacing);
        let pause = Some(self.paused_until).filter(|until| *until <= now + MAX_PAUSE + MAX_CLOCK_LAG);
        next.max(pause.unwrap_or(now))
    }

    /// Records that a call is sent.
    pub fn sent(&mut self, now: Time) {
        if self.sent_at.is_none_or(|sent_at| sent_at > now + MAX_CLOCK_LAG) {
            self.monitor = MonitorInterval::starting_at(now, MIN_SUCCESSES);
            (self.rate_since, self.demand) = (now, Demand::starting_at(now));
        }
        self.demand.record(self.sent_at.unwrap_or(now), now);
        self.sent_at = Some(now);
        self.monitor.last_sent = now;
        self.monitor.sent = self.monitor.sent.saturating_add(1);
    }

    /// Records that the service accepted a call sent at `sent_at`. `rest` is the remaining amount in its reply.
    pub fn succeeded(&mut self, sent_at: Time, rest: Option<RemainingAmount>, now: Time) {
        self.credit = (self.credit + CREDIT_PER_SUCCESS).min(self.max_credit());
        self.update_advertised(rest, now);
        if sent_at < self.monitor.started_at {
            return;
        }
        self.monitor.succeeded = self.monitor.succeeded.saturating_add(1);
        self.accepted = self.accepted.saturating_add(1);
        if self.monitor.succeeded >= self.monitor.required_successes
            && self.monitor.started_at + MIN_MONITOR_TIME <= now
        {
            self.finish_clean_interval(now);
        }
    }

    /// Records that a call that was sent at `sent_at` was throttled. `rest` is the remaining amount in its reply.
    pub fn throttled(&mut self, sent_at: Time, rest: Option<RemainingAmount>, now: Time) {
        self.charge(CREDIT_PER_THROTTLE);
        self.update_advertised(rest, now);
        if sent_at < self.rate_since {
            return;
        }
        let costs_most_calls = self.costs_most_calls();
        (self.wait_cost, self.accepted) = (0, 0);
        let tried = self.rate;
        self.is_guess = self.is_unused && (self.clean_rate.is_some() || !self.demand.is_long(self.sent_at));
        if let Some(last_sent) = self.sent_at.filter(|_| self.is_unused) {
            self.rate = self.rate.min(self.demand.rate(last_sent).max(self.slowest));
        }
        // Hardly any call has succeeded since the last cut, so the calls before the cut may be the cause.
        let is_right_after_cut = self.next_cut > FIRST_CUT && self.monitor.succeeded < MIN_SUCCESSES;
        if !is_right_after_cut {
            let throttled = if self.is_guess { tried } else { self.rate };
            self.throttled_rate = Some(self.throttled_rate.map_or(throttled, |ceiling| ceiling.min(throttled)));
        }
        self.is_unused = false;
        let lower = match self.clean_rate.filter(|clean| *clean < self.rate) {
            Some(clean) => clean,
            None => {
                let least = if costs_most_calls { self.next_cut } else { FIRST_CUT };
                let share = (PER_MILLE / u64::from(self.monitor.succeeded + 1)).clamp(least, self.next_cut);
                self.next_cut = if share < self.next_cut { FIRST_CUT } else { (self.next_cut * 2).min(MAX_CUT) };
                self.rate * (PER_MILLE - share) / PER_MILLE
            }
        };
        if !self.is_guess {
            self.clean_rate = None;
        }
        self.next_step = SMALL_STEP;
        self.pause_for_excess(lower, now);
        self.start_interval(lower, self.paused_until);
        self.rate_since = self.paused_until;
    }

    /// Records that no call will be sent for a time, because a throttled reply asked for it.
    pub fn record_wait(&mut self, wait: Span, now: Time) {
        let (from, until) = (self.monitor.started_at.max(now), now + wait);
        if from < until {
            self.monitor = MonitorInterval::starting_at(until, self.monitor.required_successes);
            if !self.is_guess {
                self.wait_cost = cost_of_wait(self.rate, wait);
                self.charge(self.wait_cost - cost_of_wait(self.rate, from.since(now)));
            }
        }
    }

    /// Pauses for the time that the lower rate needs to compensate for the excess of this interval.
    fn pause_for_excess(&mut self, lower: u64, now: Time) {
        let sent = u128::from(self.monitor.sent);
        let excess = sent * u128::from(self.rate - lower) * u128::from(PER_SECOND);
        let wait = excess / (u128::from(self.rate) * u128::from(lower.max(1))).max(1);
        let wait = Span::from_micros(u64::try_from(wait).unwrap_or(u64::MAX)).min(MAX_PAUSE);
        self.paused_until = now + wait;
    }

    fn finish_clean_interval(&mut self, now: Time) {
        if !self.costs_most_calls() {
            self.next_cut = FIRST_CUT;
        }
        if self.is_probing {
            // The service accepted the few trial calls: now all calls go at this rate.
            self.is_probing = false;
            self.monitor = MonitorInterval::starting_at(now, self.monitor.required_successes);
            return;
        }
        let due = u128::from(self.rate) * u128::from(self.monitor.last_sent.since(self.monitor.started_at).as_micros());
        // If fewer calls are sent than the rate allows, their success proves nothing.
        self.is_unused = u128::from(self.monitor.sent) * u128::from(PER_SECOND) * 4 < due * 3;
        if self.is_unused {
            return self.start_interval(self.rate, now);
        }
        self.clean_rate = Some(self.rate);
        self.throttled_rate = self.throttled_rate.filter(|ceiling| *ceiling > self.rate);
        let advertised_rate =
            self.advertised.filter(|bound| bound.rate > self.rate && now < bound.until).map(|bound| bound.rate);
        let raised = |by: u64| self.rate + (self.rate * by / PER_MILLE).max(1);
        let next = match (advertised_rate, self.throttled_rate) {
            (Some(promised), _) => {
                self.throttled_rate = None;
                raised(self.next_step.max(LARGE_STEP)).min(promised)
            }
            (None, Some(ceiling)) if ceiling > raised(CEILING_MARGIN) && self.credit >= MIN_CREDIT => {
                (self.rate + (ceiling - self.rate) / 2).min(raised(LARGE_STEP))
            }
            (None, None) if self.next_step == STARTUP_STEP => raised(STARTUP_STEP),
            (None, ceiling) => {
                let (affords, min_step) = (self.affordable_step(), ceiling.map_or(SMALL_STEP, |_| CEILING_MARGIN));
                if affords < min_step {
                    return self.start_interval(self.rate, now);
                }
                let next = ceiling.map_or(raised(self.next_step.min(affords)), |ceiling| ceiling + 1);
                if ceiling.is_none() {
                    self.next_step = (self.next_step * 3).min(LARGE_STEP);
                }
                let under_way = self.unconfirmed_calls();
                self.start_interval(next, now);
                // A large step needs few successes, but the replies to the few trial calls are mixed with those to
                // earlier calls. So at least as many successes as calls under way are required.
                self.monitor.required_successes =
                    self.monitor.required_successes.max(under_way.min(MAX_SUCCESSES_TO_SHOW));
                self.is_probing = true;
                return;
            }
        };
        self.start_interval(next, now);
    }

    /// The largest step that the credit allows, in thousandths: the share of the calls under way that may be throttled.
    fn affordable_step(&self) -> u64 {
        let cost = CREDIT_PER_THROTTLE + self.wait_cost;
        let throttles = if self.credit < cost { 0 } else { (self.credit * CREDIT_PER_THROTTLE / cost) as u64 };
        let under_way = u64::from(self.unconfirmed_calls().max(1));
        // The credit can't grow further, so waiting for more is useless.
        let least = if self.credit == self.max_credit() { SMALL_STEP } else { 0 };
        (throttles / under_way).max(least)
    }

    /// True if four times the calls that were accepted since the last wait are fewer than those that it kept back.
    fn costs_most_calls(&self) -> bool {
        i64::from(self.accepted) * 4 * COST_PER_MISSED_CALL < self.wait_cost
    }

    fn charge(&mut self, cost: i64) {
        self.credit = (self.credit - cost).max(MIN_CREDIT - self.wait_cost);
    }

    fn max_credit(&self) -> i64 {
        (CREDIT_PER_THROTTLE + self.wait_cost) * MAX_CREDIT_IN_THROTTLES
    }

    /// The number of calls of this interval without a success yet.
    fn unconfirmed_calls(&self) -> u32 {
        self.monitor.sent.saturating_sub(self.monitor.succeeded)
    }

    fn start_interval(&mut self, rate: u64, now: Time) {
        let excess = rate.saturating_sub(self.rate) * PER_MILLE / self.rate.max(1);
        let rate = rate.clamp(self.slowest, self.fastest);
        if self.rate != rate {
            (self.rate, self.rate_since, self.accepted) = (rate, now, 0);
        }
        self.is_probing = false;
        self.monitor =
            MonitorInterval::starting_at(now, ((PER_MILLE / excess.max(SMALL_STEP)) as u32).max(MIN_SUCCESSES));
    }

    fn update_advertised(&mut self, rest: Option<RemainingAmount>, now: Time) {
        let Some(rest) = rest.filter(|rest| rest.resets_at > now && !rest.resets_at.is_never()) else { return };
        if rest.amount > 0 && rest.resets_at.since(now) < MIN_TIME_TO_RESET {
            return;
        }
        // Replies that were under way when the last one reported an amount of 0 are older than that one.
        if self.advertised.is_some_and(|bound| bound.rate == 0 && bound.until > now && rest.amount > 0) {
            return;
        }
        let rate =
            u128::from(rest.amount) * u128::from(PER_SECOND) / u128::from(rest.resets_at.since(now).as_micros().max(1));
        // As long as anything is left, calls are sent at least as often as to a service that throttles everything.
        let least = if rest.amount > 0 { self.slowest } else { 0 };
        let rate = u64::try_from(rate).unwrap_or(u64::MAX).clamp(least, self.fastest);
        self.advertised = Some(AdvertisedRate { received_at: now, until: rest.resets_at, rate });
    }
}

fn per_second(interval: Span) -> u64 {
    PER_SECOND.div_ceil(interval.as_micros().max(1))
}

/// The cost of the calls that a rate would send during a wait.
fn cost_of_wait(rate: u64, wait: Span) -> i64 {
    let micros = wait.min(MAX_COUNTED_WAIT).as_micros();
    let cost = u128::from(rate) * u128::from(micros) * COST_PER_MISSED_CALL as u128 / u128::from(PER_SECOND);
    i64::try_from(cost).expect("invariant: at most 10^12 * 10^7 * 500 / 10^12")
}

fn interval_of(rate: u64) -> Span {
    Span::from_micros(PER_SECOND.div_ceil(rate.max(1)))
}
