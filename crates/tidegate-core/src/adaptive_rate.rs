//! A rate that is found: as many calls a second as a service takes without throttling more than a few of them.
//!
//! Controllers of this kind raise a rate until a throttle and then cut it. AIMD adds and halves; AWS's SDKs follow TCP
//! CUBIC (RFC 9438), which cuts to seven tenths and lingers near where it was throttled; Scrapy's AutoThrottle and
//! Netflix's `Gradient2` go by latency, which a limiter that refuses at once doesn't raise. All of them pay for what they
//! find in throttled calls, as often as their formula comes by the ceiling. Here that is turned round: the share of calls
//! that may be throttled is given, one in a hundred, and the ceiling is only looked for when it has been earned.
//!
//! Time is cut into eras of one rate each. An era is clean once so many of its calls have succeeded that an excess of the
//! size of its last step would have shown. It ends with the first throttle of a call that was sent in it, so that many
//! that were under way together count as one.
//!
//! - As long as nothing was throttled, each clean era doubles the rate.
//! - Later, with no ceiling in sight, each raises it by 3 %, 9 %, 27 % and then 30 %, or by as much as there is credit for:
//!   until a throttle is heard of, a share of all calls under way is sent too much.
//! - Below a rate that was throttled, the ceiling, each clean era goes half of the way to it, until 1.5 % are left.
//! - There it stays, and tries the ceiling again when it has credit for that. If that is clean, there is no ceiling any more.
//! - Both are done in two eras: in the first, only a few calls whose replies aren't known go at the higher rate, and in the
//!   second all.
//! - The first throttle above a clean rate leads back to that. Each further one cuts by as much as the few successes
//!   before it suggest, at first by 3 % at most and then by twice as much each time. A throttle so soon after a cut that
//!   hardly any call has succeeded says nothing of where the ceiling is: the service may still count what went before.
//! - After a cut there is a pause in which the lower rate makes good what the higher one has sent too much.
//!
//! Replies that tell what is left and until when set an upper bound, and up to it the rate is raised without a trial.

use core::fmt;

use crate::time::MAX_CLOCK_LAG;
use crate::{RemainingAmount, Span, Time};

/// Rates are counted in millionths of a call a second.
const PER_SECOND: u64 = 1_000_000_000_000;
/// Shares are counted in thousandths.
const PER_MILLE: u64 = 1_000;
/// The first step beyond a rate that is known, and what the length of an era goes by in which the rate didn't rise.
const SMALL_STEP: u64 = 30;
/// The largest step once something was throttled, and towards what replies promise.
const LARGE_STEP: u64 = 300;
/// Every step as long as nothing was throttled.
const STARTUP_STEP: u64 = 1_000;
/// How close to a ceiling it stays.
const CEILING_MARGIN: u64 = 15;
/// The first cut below a rate that was thought to be clean; each further one is twice as much, up to half.
const FIRST_CUT: u64 = 30;
/// The fewest calls that show that a rate is clean.
const MIN_SUCCESSES: u32 = 8;
/// How many show it where a step is small.
const MAX_SUCCESSES_TO_SHOW: u32 = (PER_MILLE / SMALL_STEP) as u32;
/// An era lasts for this at least: limiters that count by the second show an excess no sooner.
const MIN_MONITOR_TIME: Span = Span::from_millis(500);
/// Headers tell times in whole seconds: how much may be sent in the last few isn't known well enough to slow down for it.
const MIN_TIME_TO_RESET: Span = Span::from_secs(5);
/// How many calls that aren't answered yet may have gone at a rate above the ceiling: one that refuses all that come too
/// close would throttle every other of them.
const MAX_PROBE_CALLS: u32 = 3;
/// How long it keeps quiet at most to make good what it sent too much.
const MAX_PAUSE: Span = Span::from_millis(250);
/// What a success earns of a throttle, in thousandths: one call in a hundred may be throttled.
const CREDIT_PER_SUCCESS: i64 = 10;
/// What a throttle costs.
const CREDIT_PER_THROTTLE: i64 = 1_000;
/// The most credit that is kept: what a small step costs where hundreds of calls are under way.
const MAX_CREDIT: i64 = 10 * CREDIT_PER_THROTTLE;
/// The most debt, or a service that has fallen for long would be given up for as long.
const MIN_CREDIT: i64 = -20 * CREDIT_PER_THROTTLE;

/// An adaptive pace as it is written: bounds in terms of the time between two calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptiveRateSpec {
    /// The time between calls before anything was learnt. Default 100 ms: ten a second.
    pub initial: Span,
    /// The longest time between calls: so often a service is tried that throttles everything. Default 60 s.
    pub slowest: Span,
    /// The shortest time between calls. Default 1 µs.
    pub fastest: Span,
}

impl Default for AdaptiveRateSpec {
    fn default() -> Self {
        Self { initial: Span::from_millis(100), slowest: Span::from_secs(60), fastest: Span::from_micros(1) }
    }
}

/// Why an adaptive pace can't be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdaptiveRateError {
    /// No time at all between calls.
    ZeroFastest,
    /// More than an hour between calls.
    TooSlow,
    /// Not `fastest <= initial <= slowest`.
    OutOfOrder,
}

/// The longest [`AdaptiveRateSpec::slowest`].
pub const MAX_SLOWEST: Span = Span::from_secs(3_600);

impl fmt::Display for AdaptiveRateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ZeroFastest => "there must be some time between two calls",
            Self::TooSlow => "there may be at most an hour between two calls",
            Self::OutOfOrder => "the first pace must lie between the slowest and the fastest",
        })
    }
}

impl core::error::Error for AdaptiveRateError {}

/// Calls of one rate.
#[derive(Clone, Copy, Debug)]
struct MonitorInterval {
    started_at: Time,
    last_sent: Time,
    sent: u32,
    succeeded: u32,
    /// How many successes show that its rate is clean: an excess of so many thousandths shows once in as many calls.
    required_successes: u32,
}

impl MonitorInterval {
    const fn starting_at(now: Time, enough: u32) -> Self {
        Self { started_at: now, last_sent: now, sent: 0, succeeded: 0, required_successes: enough }
    }
}

/// What the headers of replies say may be sent.
#[derive(Clone, Copy, Debug)]
struct AdvertisedRate {
    received_at: Time,
    until: Time,
    /// 0 if nothing is left until then.
    rate: u64,
}

/// The pace of the calls to one service.
///
/// Whoever sends asks [`next_at`](Self::next_at), says when it has [`sent`](Self::sent), and tells what became of the
/// call. Calls that say nothing about the service's limits, as failures don't, aren't told.
#[derive(Clone, Debug)]
pub struct AdaptiveRate {
    slowest: u64,
    fastest: u64,
    rate: u64,
    sent_at: Option<Time>,
    paused_until: Time,
    monitor: MonitorInterval,
    /// The highest rate that was clean, as far as it is still believed.
    clean_rate: Option<u64>,
    /// The lowest rate that was throttled, as far as it is still believed.
    throttled_rate: Option<u64>,
    /// What the next clean era raises the rate by, in thousandths.
    next_step: u64,
    /// The next cut, in thousandths.
    next_cut: u64,
    /// Whether a rate above the ceiling is tried.
    is_probing: bool,
    /// How many throttles may be risked, in thousandths.
    credit: i64,
    advertised: Option<AdvertisedRate>,
}

impl AdaptiveRate {
    /// A pace that has learnt nothing.
    ///
    /// # Errors
    /// Not `0 < fastest <= initial <= slowest <=` [`MAX_SLOWEST`].
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
            clean_rate: None,
            throttled_rate: None,
            next_step: STARTUP_STEP,
            next_cut: FIRST_CUT,
            is_probing: false,
            credit: CREDIT_PER_THROTTLE,
            advertised: None,
        })
    }

    /// The time between two calls now.
    pub fn interval(&self) -> Span {
        interval_of(self.rate)
    }

    /// When the next call may be sent; a moment that has passed means at once.
    pub fn next_at(&self, now: Time) -> Time {
        let told = self.advertised.filter(|told| now < told.until && told.received_at <= now + MAX_CLOCK_LAG);
        if let Some(AdvertisedRate { rate: 0, until, .. }) = told {
            return until;
        }
        let in_doubt = self.unconfirmed_calls() >= MAX_PROBE_CALLS;
        let rate = self.clean_rate.filter(|_| self.is_probing && in_doubt).unwrap_or(self.rate);
        let spacing = interval_of(told.map_or(rate, |told| rate.min(told.rate)));
        // Further off only if the clock has stepped back.
        let next = self.sent_at.map_or(now, |sent_at| (sent_at + spacing).min(now + spacing));
        next.max(self.paused_until.min(now + MAX_PAUSE))
    }

    /// A call is sent.
    pub fn sent(&mut self, now: Time) {
        if self.sent_at.is_none_or(|sent_at| sent_at > now + MAX_CLOCK_LAG) {
            self.monitor = MonitorInterval::starting_at(now, MIN_SUCCESSES);
        }
        self.sent_at = Some(now);
        self.monitor.last_sent = now;
        self.monitor.sent = self.monitor.sent.saturating_add(1);
    }

    /// A call that was sent at `sent_at` was taken by the service; `rest` is what its reply says is left.
    pub fn succeeded(&mut self, sent_at: Time, rest: Option<RemainingAmount>, now: Time) {
        self.credit = (self.credit + CREDIT_PER_SUCCESS).min(MAX_CREDIT);
        self.update_advertised(rest, now);
        if sent_at < self.monitor.started_at {
            return;
        }
        self.monitor.succeeded = self.monitor.succeeded.saturating_add(1);
        if self.monitor.succeeded >= self.monitor.required_successes
            && self.monitor.started_at + MIN_MONITOR_TIME <= now
        {
            self.finish_clean_interval(now);
        }
    }

    /// A call that was sent at `sent_at` was throttled; `rest` is what its reply says is left.
    pub fn throttled(&mut self, sent_at: Time, rest: Option<RemainingAmount>, now: Time) {
        self.credit = (self.credit - CREDIT_PER_THROTTLE).max(MIN_CREDIT);
        self.update_advertised(rest, now);
        if sent_at < self.monitor.started_at {
            return;
        }
        // Hardly any was taken since the last cut: that may still be paid for what went before it.
        let is_right_after_cut = self.next_cut > FIRST_CUT && self.monitor.succeeded < MIN_SUCCESSES;
        if !is_right_after_cut {
            self.throttled_rate = Some(self.throttled_rate.map_or(self.rate, |ceiling| ceiling.min(self.rate)));
        }
        let lower = match self.clean_rate.filter(|clean| *clean < self.rate) {
            Some(clean) => clean,
            None => {
                let share = (PER_MILLE / u64::from(self.monitor.succeeded + 1)).clamp(FIRST_CUT, self.next_cut);
                self.next_cut = if share < self.next_cut { FIRST_CUT } else { (self.next_cut * 2).min(PER_MILLE / 2) };
                self.rate * (PER_MILLE - share) / PER_MILLE
            }
        };
        self.clean_rate = None;
        self.next_step = SMALL_STEP;
        self.pause_for_excess(lower, now);
        self.start_interval(lower, self.paused_until);
    }

    /// Keeps quiet for as long as it takes a lower rate to make good what this era has sent too much.
    fn pause_for_excess(&mut self, lower: u64, now: Time) {
        let sent = u128::from(self.monitor.sent);
        let excess = sent * u128::from(self.rate - lower) * u128::from(PER_SECOND);
        let wait = excess / (u128::from(self.rate) * u128::from(lower.max(1))).max(1);
        let wait = Span::from_micros(u64::try_from(wait).unwrap_or(u64::MAX)).min(MAX_PAUSE);
        self.paused_until = now + wait;
    }

    fn finish_clean_interval(&mut self, now: Time) {
        self.next_cut = FIRST_CUT;
        if self.is_probing {
            // The few that were risked were taken: now all go at that rate.
            self.is_probing = false;
            self.monitor = MonitorInterval::starting_at(now, self.monitor.required_successes);
            return;
        }
        let due = u128::from(self.rate) * u128::from(self.monitor.last_sent.since(self.monitor.started_at).as_micros());
        // Where less is sent than may be, nothing is shown.
        if u128::from(self.monitor.sent) * u128::from(PER_SECOND) * 4 < due * 3 {
            return self.start_interval(self.rate, now);
        }
        self.clean_rate = Some(self.rate);
        self.throttled_rate = self.throttled_rate.filter(|ceiling| *ceiling > self.rate);
        let advertised_rate =
            self.advertised.filter(|told| told.rate > self.rate && now < told.until).map(|told| told.rate);
        let raised = |by: u64| self.rate + (self.rate * by / PER_MILLE).max(1);
        let next = match (advertised_rate, self.throttled_rate) {
            (Some(promised), _) => {
                self.throttled_rate = None;
                raised(self.next_step.max(LARGE_STEP)).min(promised)
            }
            (None, Some(ceiling)) if ceiling > raised(CEILING_MARGIN) => {
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
                // However large the step: replies to the few that are risked come among those to others.
                self.monitor.required_successes =
                    self.monitor.required_successes.max(under_way.min(MAX_SUCCESSES_TO_SHOW));
                self.is_probing = true;
                return;
            }
        };
        self.start_interval(next, now);
    }

    /// How many thousandths faster the credit lets it go. All that are under way when the first is throttled may be too many
    /// by that share.
    fn affordable_step(&self) -> u64 {
        let credit = u64::try_from(self.credit).ok().filter(|_| self.credit >= CREDIT_PER_THROTTLE).unwrap_or(0);
        let under_way = u64::from(self.unconfirmed_calls().max(1));
        // With all the credit there is, there is nothing more to wait for.
        let least = if self.credit == MAX_CREDIT { SMALL_STEP } else { 0 };
        (credit / under_way).max(least)
    }

    /// How many calls of the era aren't known to have been taken.
    fn unconfirmed_calls(&self) -> u32 {
        self.monitor.sent.saturating_sub(self.monitor.succeeded)
    }

    fn start_interval(&mut self, rate: u64, now: Time) {
        let excess = rate.saturating_sub(self.rate) * PER_MILLE / self.rate.max(1);
        self.rate = rate.clamp(self.slowest, self.fastest);
        self.is_probing = false;
        self.monitor =
            MonitorInterval::starting_at(now, ((PER_MILLE / excess.max(SMALL_STEP)) as u32).max(MIN_SUCCESSES));
    }

    fn update_advertised(&mut self, rest: Option<RemainingAmount>, now: Time) {
        let Some(rest) = rest.filter(|rest| rest.resets_at > now && !rest.resets_at.is_never()) else { return };
        if rest.amount > 0 && rest.resets_at.since(now) < MIN_TIME_TO_RESET {
            return;
        }
        // Replies that were under way when the last was told to wait know less than it does.
        if self.advertised.is_some_and(|told| told.rate == 0 && told.until > now && rest.amount > 0) {
            return;
        }
        let rate =
            u128::from(rest.amount) * u128::from(PER_SECOND) / u128::from(rest.resets_at.since(now).as_micros().max(1));
        // As long as anything is left, it is tried as often as a service that throttles everything.
        let least = if rest.amount > 0 { self.slowest } else { 0 };
        let rate = u64::try_from(rate).unwrap_or(u64::MAX).clamp(least, self.fastest);
        self.advertised = Some(AdvertisedRate { received_at: now, until: rest.resets_at, rate });
    }
}

fn per_second(interval: Span) -> u64 {
    PER_SECOND.div_ceil(interval.as_micros().max(1))
}

fn interval_of(rate: u64) -> Span {
    Span::from_micros(PER_SECOND.div_ceil(rate.max(1)))
}
