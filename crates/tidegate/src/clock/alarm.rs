//! Waking to the tenth of a millisecond.
//!
//! Tokio's timers count whole milliseconds and round up, which would leave a tenth of a rate of 100 a second unused. So
//! the last stretch of a wait is left to a thread of its own, which the kernel wakes more exactly. It sleeps while
//! nobody waits.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::future::poll_fn;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

/// The stretch that tokio's timers are too coarse for: their millisecond, and the rounding up to it.
const LAST_STRETCH: Duration = Duration::from_millis(2);

/// Waits for so long, within a tokio runtime whose timers are enabled.
#[expect(clippy::disallowed_methods, reason = "this is the clock")]
pub(crate) async fn sleep(wait: Duration) {
    let until = Instant::now() + wait;
    if let Some(most) = wait.checked_sub(LAST_STRETCH) {
        tokio::time::sleep(most).await;
    }
    let Some(alarm) = Alarm::get() else { return tokio::time::sleep_until(until.into()).await };
    let mut rung: Option<Arc<Bell>> = None;
    poll_fn(|context| {
        if let Some(bell) = &rung {
            return bell.poll(context.waker());
        }
        if Instant::now() >= until {
            return Poll::Ready(());
        }
        rung = Some(alarm.set(until, context.waker().clone()));
        Poll::Pending
    })
    .await;
}

/// The thread's list. Nothing stays on it for longer than the last stretch.
struct Alarm {
    bells: Mutex<BinaryHeap<Reverse<Entry>>>,
    earlier: Condvar,
}

struct Entry {
    at: Instant,
    bell: Arc<Bell>,
}

/// Who is to be woken; nobody once it has rung.
struct Bell(Mutex<Option<Waker>>);

impl Bell {
    fn poll(&self, waker: &Waker) -> Poll<()> {
        match &mut *lock(&self.0) {
            Some(own) => {
                own.clone_from(waker);
                Poll::Pending
            }
            None => Poll::Ready(()),
        }
    }
}

impl Alarm {
    /// The process' own; `None` if it can have no more threads.
    fn get() -> Option<&'static Self> {
        static ALARM: OnceLock<Option<&'static Alarm>> = OnceLock::new();
        *ALARM.get_or_init(|| {
            let alarm: &'static Self = Box::leak(Box::new(Self { bells: Mutex::default(), earlier: Condvar::new() }));
            thread::Builder::new().name("tidegate-alarm".to_owned()).spawn(|| alarm.run()).ok().map(|_| alarm)
        })
    }

    fn set(&self, at: Instant, waker: Waker) -> Arc<Bell> {
        let bell = Arc::new(Bell(Mutex::new(Some(waker))));
        let mut bells = lock(&self.bells);
        let is_first = bells.peek().is_none_or(|Reverse(first)| at < first.at);
        bells.push(Reverse(Entry { at, bell: Arc::clone(&bell) }));
        drop(bells);
        if is_first {
            self.earlier.notify_one();
        }
        bell
    }

    #[expect(clippy::disallowed_methods, reason = "this is the clock")]
    fn run(&self) {
        let mut bells = lock(&self.bells);
        loop {
            let now = Instant::now();
            bells = match bells.peek().map(|Reverse(first)| first.at.saturating_duration_since(now)) {
                None => self.earlier.wait(bells).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => {
                    let due = bells.pop();
                    drop(bells);
                    if let Some(waker) = due.and_then(|Reverse(due)| lock(&due.bell.0).take()) {
                        waker.wake();
                    }
                    lock(&self.bells)
                }
                Some(wait) => self.earlier.wait_timeout(bells, wait).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }
}

/// A panic can only have come from a waker, which is called without a lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.cmp(&other.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[expect(clippy::disallowed_methods, reason = "it is the clock that is tested")]
    async fn nobody_is_woken_early_and_nobody_is_forgotten() {
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
        let alarm = Alarm::get().unwrap();
        tokio::time::sleep(LAST_STRETCH * 2).await;
        assert!(lock(&alarm.bells).is_empty(), "nothing stays");
    }
}
