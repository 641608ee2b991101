//! A sleep that is precise to about a tenth of a millisecond.
//!
//! Tokio's timers count whole milliseconds and round up. At a rate of 100 per second, that would leave a tenth of the
//! rate unused. So a separate thread times the last 2 ms of each wait, because the kernel wakes it more precisely. The
//! thread sleeps while no task waits.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::future::poll_fn;
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tidegate_core::{Clock, Span};

/// The last part of a wait, for which tokio's timers are too coarse: their millisecond, and the rounding up to it.
const PRECISE_PART: Duration = Duration::from_millis(2);

/// Sleeps for the given time. Must be called within a tokio runtime with timers enabled.
#[expect(clippy::disallowed_methods, reason = "this is the clock")]
pub async fn sleep(wait: Duration) {
    let until = Instant::now() + wait;
    if let Some(coarse_part) = wait.checked_sub(PRECISE_PART) {
        tokio::time::sleep(coarse_part).await;
    }
    let Some(timer) = PreciseTimer::get() else { return tokio::time::sleep_until(until.into()).await };
    let mut registered: Option<Arc<TimerWaker>> = None;
    poll_fn(|context| {
        if let Some(timer_waker) = &registered {
            return timer_waker.poll(context.waker());
        }
        if Instant::now() >= until {
            return Poll::Ready(());
        }
        registered = Some(timer.register(until, context.waker().clone()));
        Poll::Pending
    })
    .await;
}

/// The polling interval for a clock that isn't the machine's: it may be set at any time, and wakes no task.
pub const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Sleeps for the given time by this clock. Must be called within a tokio runtime with timers enabled.
pub async fn sleep_by(clock: &impl Clock, wait: Duration) {
    if clock.is_system() {
        return sleep(wait).await;
    }
    let until = clock.now() + Span::from_duration(wait);
    while let left = until.since(clock.now()).as_duration()
        && !left.is_zero()
    {
        tokio::time::sleep(left.min(POLL_INTERVAL)).await;
    }
}

/// The waiters of the timer thread. No entry stays for longer than `PRECISE_PART`.
struct PreciseTimer {
    entries: Mutex<BinaryHeap<Reverse<TimerEntry>>>,
    first_changed: Condvar,
}

struct TimerEntry {
    at: Instant,
    waker: Arc<TimerWaker>,
}

/// The waker of one sleep. `None` once it was woken.
struct TimerWaker(Mutex<Option<Waker>>);

impl TimerWaker {
    fn poll(&self, waker: &Waker) -> Poll<()> {
        match &mut *self.0.lock() {
            Some(stored) => {
                stored.clone_from(waker);
                Poll::Pending
            }
            None => Poll::Ready(()),
        }
    }
}

impl PreciseTimer {
    /// Returns the timer of the process, or `None` if its thread could not be started.
    fn get() -> Option<&'static Self> {
        static TIMER: OnceLock<Option<&'static PreciseTimer>> = OnceLock::new();
        *TIMER.get_or_init(|| {
            let timer: &'static Self =
                Box::leak(Box::new(Self { entries: Mutex::default(), first_changed: Condvar::new() }));
            thread::Builder::new().name("tidegate-timer".to_owned()).spawn(|| timer.run()).ok().map(|_| timer)
        })
    }

    fn register(&self, at: Instant, waker: Waker) -> Arc<TimerWaker> {
        let timer_waker = Arc::new(TimerWaker(Mutex::new(Some(waker))));
        let mut entries = self.entries.lock();
        let is_first = entries.peek().is_none_or(|Reverse(first)| at < first.at);
        entries.push(Reverse(TimerEntry { at, waker: Arc::clone(&timer_waker) }));
        drop(entries);
        if is_first {
            self.first_changed.notify_one();
        }
        timer_waker
    }

    #[expect(clippy::disallowed_methods, reason = "this is the clock")]
    fn run(&self) {
        let mut entries = self.entries.lock();
        loop {
            let now = Instant::now();
            match entries.peek().map(|Reverse(first)| first.at.saturating_duration_since(now)) {
                None => self.first_changed.wait(&mut entries),
                Some(Duration::ZERO) => {
                    let due = entries.pop();
                    MutexGuard::unlocked(&mut entries, || {
                        if let Some(waker) = due.and_then(|Reverse(due)| due.waker.0.lock().take()) {
                            waker.wake();
                        }
                    });
                }
                Some(wait) => drop(self.first_changed.wait_for(&mut entries, wait)),
            }
        }
    }
}

impl PartialEq for TimerEntry {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for TimerEntry {}

impl PartialOrd for TimerEntry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for TimerEntry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.cmp(&other.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[expect(clippy::disallowed_methods, reason = "it is the clock that is tested")]
    async fn no_sleeper_wakes_early_or_is_missed() {
        let mut sleepers = tokio::task::JoinSet::new();
        for number in 0..200_u64 {
            sleepers.spawn(async move {
                let (began, wait) = (Instant::now(), Duration::from_micros(number * 137 % 9_000));
                let given_up = tokio::time::timeout(Duration::from_micros(number % 7 * 500), sleep(wait)).await;
                if given_up.is_err() {
                    sleep(wait.saturating_sub(began.elapsed())).await;
                }
                assert!(began.elapsed() >= wait, "{wait:?}");
            });
        }
        while let Some(slept) = sleepers.join_next().await {
            slept.unwrap();
        }
        let timer = PreciseTimer::get().unwrap();
        tokio::time::sleep(PRECISE_PART * 2).await;
        assert!(timer.entries.lock().is_empty(), "nothing stays");
    }
}
