//! No trailing window ever contains more than its limit, and a slot becomes free at most W ÷ entries late.

use tidegate_core::window::WindowLog;
use tidegate_core::{Limit, LimitKind, PenaltyMode, Span, Time, Window};
use tidegate_testkit::fixtures::{TestLimiter, doubling_penalty, test_time};
use tidegate_testkit::property;
use tidegate_testkit::random::{RandomSource, case_count};

/// The admitted calls, and the window that limits them.
struct Ledger {
    window: Window,
    admitted: Vec<(Time, u64)>,
}

impl Ledger {
    fn new(window: Window) -> Self {
        Self { window, admitted: Vec::new() }
    }

    /// The sum of the half-open window of this length that ends at `end`.
    fn held(&self, end: Time, length: Span) -> u64 {
        let recent = self.admitted.iter().rev().take_while(|(moment, _)| *moment + length > end);
        recent.map(|(_, cost)| cost).sum()
    }

    fn record(&mut self, now: Time, cost: u64, allowed: bool) -> Result<(), String> {
        let (limit, length) = (self.window.limit(), self.window.window());
        if allowed {
            self.admitted.push((now, cost));
            let held = self.held(now, length);
            if held > limit {
                return Err(format!("{held} in {length} up to {now:?}, limit {limit}"));
            }
        } else if cost <= limit && self.held(now, length + self.window.max_lateness()) + cost <= limit {
            return Err(format!("a call of {cost} at {now:?} was refused for longer than W/B too long"));
        }
        Ok(())
    }
}

fn any_window(random: &mut RandomSource) -> Result<Window, String> {
    let entries = random.pick(&[64, 64, 1, 2, 7, 4096]);
    let limit = random.pick(&[1, 3, 5, 40, 64, 65, 100, 1_000, 100_000]);
    let length = Span::from_micros(random.between(1, 1_000) * random.pick(&[1, 1_000, 100_000]));
    Window::new(limit, length, entries).map_err(|error| error.to_string())
}

fn step(random: &mut RandomSource, window: &Window) -> Span {
    let length = window.window().as_micros();
    Span::from_micros(match random.below(8) {
        0..=2 => 0,
        3..=4 => random.below(length / 64 + 2),
        5 => random.below(length / 4 + 2),
        6 => length,
        _ => random.below(length * 2),
    })
}

#[test]
fn no_trailing_window_exceeds_the_limit() {
    property::check(case_count(800, 20_000), 1_200, |mut random| {
        let window = any_window(&mut random)?;
        let limiter = TestLimiter::new([Limit::new(LimitKind::Window(window))]);
        let mut ledger = Ledger::new(window);
        let mut now = test_time(0);
        while !random.is_exhausted() {
            now = now + step(&mut random, &window);
            let cost = match random.below(4) {
                0..=1 => random.below(window.limit() / 20 + 2),
                2 => 1,
                _ => random.below(window.limit() + 2),
            };
            let decision = limiter.take(1, cost, now);
            ledger.record(now, cost, decision.allowed)?;
            if let Some(wait) = decision.retry_after
                && random.chance(70)
            {
                now = now + wait;
                ledger.record(now, cost, limiter.take(1, cost, now).allowed)?;
            }
        }
        Ok(())
    });
}

/// Single calls at a limit far above the number of entries: tens of thousands.
#[test]
fn limits_above_the_entry_count_hold() {
    property::check(case_count(6, 60), 4, |mut random| {
        let limit = random.between(65, 3_000);
        let window = Window::new(limit, Span::from_secs(60), 64).map_err(|error| error.to_string())?;
        let mut log = WindowLog::default();
        let mut ledger = Ledger::new(window);
        let mut random = RandomSource::from_seed(random.next_u64());
        let pace = 60_000_000 / limit * random.between(1, 4) / 2;
        let mut now = test_time(0);
        for _ in 0..8_000 {
            now = now + Span::from_micros(random.below(pace));
            let judged_at = window.refresh(&mut log, now);
            let allowed = window.status(&log, 1, judged_at).retry_at == judged_at;
            if allowed {
                window.charge(&mut log, 1, judged_at);
            }
            ledger.record(now, 1, allowed)?;
            if log.len() > 98 || log.heap_bytes() > 98 * 8 {
                return Err(format!("a log of {} entries, {} bytes", log.len(), log.heap_bytes()));
            }
        }
        Ok(())
    });
}

/// Calls that were overtaken between reading the clock and reaching the state count at the time of the last one.
#[test]
fn overtaken_calls_never_exceed_the_limit() {
    property::check(case_count(400, 10_000), 600, |mut random| {
        let limit = random.between(1, 12);
        let window =
            Window::new(limit, Span::from_millis(random.between(1, 400)), 64).map_err(|error| error.to_string())?;
        let limiter = TestLimiter::new([Limit::new(LimitKind::Window(window))]);
        let mut ledger = Ledger::new(window);
        let mut latest = test_time(0);
        while !random.is_exhausted() {
            latest = latest + Span::from_micros(random.below(window.window().as_micros() / 2));
            for _ in 0..random.between(1, 6) {
                let now = latest - Span::from_micros(random.below(100_000));
                if limiter.call(1, now).allowed {
                    let newest = ledger.admitted.last().map_or(now, |&(moment, _)| moment.max(now));
                    ledger.record(newest, 1, true)?;
                }
            }
        }
        Ok(())
    });
}

/// Paroles overfill a log of exact entries. Only they may exceed the limit, and slots become free exactly afterwards.
#[test]
fn a_log_overfilled_by_paroles_stays_exact() {
    property::check(case_count(400, 10_000), 500, |mut random| {
        let limit = random.between(1, 8);
        let window = Window::new(limit, Span::from_secs(60), limit as u32).map_err(|error| error.to_string())?;
        let penalty = doubling_penalty(1, 16, PenaltyMode::Parole, window.window());
        let limiter = TestLimiter::new([Limit::new(LimitKind::Window(window)).with_penalty(penalty)]);
        let mut ledger = Ledger::new(window);
        let mut now = test_time(0);
        while !random.is_exhausted() {
            let look = limiter.peek(1, now);
            let held = ledger.held(now, window.window());
            let paroled = look.reason == tidegate_core::Reason::Parole;
            if !look.blocked && (held < limit) != (look.allowed && !paroled) {
                return Err(format!("{held} of {limit} held, but {look:?}"));
            }
            let decision = limiter.call(1, now);
            if decision.allowed {
                ledger.admitted.push((now, 1));
            }
            now = match decision.retry_after {
                Some(wait) if random.chance(80) => now + wait,
                _ => now + Span::from_micros(random.below(10_000_000)),
            };
        }
        Ok(())
    });
}

/// Refunds remove the oldest calls. They never admit more calls than were kept and given back.
#[test]
fn refunds_never_admit_extra_calls() {
    property::check(case_count(300, 5_000), 600, |mut random| {
        let window = any_window(&mut random)?;
        let limit = Limit::new(LimitKind::Window(window));
        let limiter = TestLimiter::new([limit]);
        let mut kept = Ledger::new(window);
        let mut now = test_time(0);
        while !random.is_exhausted() {
            now = now + step(&mut random, &window);
            let cost = random.between(1, window.limit() / 3 + 1);
            if !limiter.take(1, cost, now).allowed {
                continue;
            }
            if random.chance(40) {
                let place = [(tidegate_testkit::fixtures::limit_id(0), 1)];
                limiter.apply(tidegate_core::Verb::Refund, &place, cost, now);
            } else {
                kept.admitted.push((now, cost));
                let held = kept.held(now, window.window());
                if held > window.limit() {
                    return Err(format!("{held} kept calls in {}, limit {}", window.window(), window.limit()));
                }
            }
        }
        Ok(())
    });
}

/// A log that once had a count too large for its short form continues in the long one.
#[test]
fn short_and_long_log_forms_decide_alike() {
    property::check(case_count(600, 20_000), 1_200, |mut random| {
        let window = any_window(&mut random)?;
        let mut logs = [WindowLog::default(), WindowLog::with_call(test_time(0) - window.window(), 5_000)];
        window.refresh(&mut logs[1], test_time(0));
        let mut now = test_time(0);
        while !random.is_exhausted() {
            now = if random.chance(3) { now - step(&mut random, &window) } else { now + step(&mut random, &window) };
            let cost = match random.below(10) {
                0..=5 => 1,
                6..=7 => random.between(1_000, 4_100).min(window.limit()),
                _ => random.below(window.limit() + 2),
            };
            let (turn, before) = (random.below(6), now - Span::from_micros(random.below(window.window().as_micros())));
            let answers = logs.each_mut().map(|log| {
                let now = window.refresh(log, now);
                let look = window.status(log, cost, now);
                match turn {
                    0 => window.refund(log, cost, Time::ZERO, now),
                    1 => window.refund(log, cost, before, now),
                    2 => window.move_to_now(log, cost, log.iter().last().map_or(now, |slot| slot.at), before),
                    _ if look.retry_at == now || turn == 3 => window.charge(log, cost, now),
                    _ => {}
                }
                (look, log.is_merged(), log.total(), log.iter().collect::<Vec<_>>())
            });
            if answers[0] != answers[1] {
                return Err(format!("short {:?}, long {:?}", answers[0], answers[1]));
            }
            if answers[0].2 != answers[0].3.iter().map(|slot| slot.count).sum::<u64>() {
                return Err(format!("not the sum of its slots: {:?}", answers[0]));
            }
        }
        Ok(())
    });
}
