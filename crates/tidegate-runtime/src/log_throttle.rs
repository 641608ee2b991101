//! A limit on log lines per second.

use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tidegate_core::batch::execute_take;
use tidegate_core::{Admission, Key, KeyState, Limit, LimitId, LimitKind, Op, Span, Time, Verb, Window};

/// Admits a number of lines per second, by the same strict window that limits clients, and counts the others.
pub struct LogThrottle {
    limit: Limit,
    state: Mutex<KeyState>,
    /// The time, in microseconds, until which every line is suppressed.
    closed_until_micros: AtomicU64,
    suppressed: AtomicU64,
}

impl LogThrottle {
    /// Admits at most `lines` (at least 1) in any second.
    pub fn new(lines: u32) -> Self {
        let lines = lines.max(1);
        let window = Window::new(u64::from(lines), Span::from_secs(1), lines.min(1024))
            .expect("invariant: a window of a second with 1 to 2^32 entries is a valid limit");
        Self {
            limit: Limit::new(LimitKind::Window(window)),
            state: Mutex::default(),
            closed_until_micros: AtomicU64::new(0),
            suppressed: AtomicU64::new(0),
        }
    }

    /// Returns `None` if no line may be written at `now`; otherwise the number of lines that were suppressed before it.
    pub fn admit(&self, now: Time) -> Option<u64> {
        if now.as_micros() < self.closed_until_micros.load(Ordering::Relaxed) {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let line = Op::new(LimitId::FIRST, Verb::Take, Key::default(), 1);
        let outcome = execute_take(&line, &self.limit, 0, slice::from_mut(&mut *self.state.lock()), now);
        if outcome.admission != Admission::Admitted {
            self.closed_until_micros.store(outcome.retry_at.as_micros(), Ordering::Relaxed);
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(self.take_suppressed())
    }

    /// Returns and resets the number of lines that were suppressed since the last written one.
    pub fn take_suppressed(&self) -> u64 {
        self.suppressed.swap(0, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_per_second_are_limited() {
        let throttle = LogThrottle::new(10);
        let at = |millis: u64| Time::from_secs(1_800_000_000) + Span::from_millis(millis);
        let written = (0..1000).filter(|millis| throttle.admit(at(*millis)).is_some()).count();
        assert_eq!(written, 10);
        assert_eq!(throttle.admit(at(1000)), Some(990));
        assert_eq!(throttle.take_suppressed(), 0);
    }
}
