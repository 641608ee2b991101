//! Who enters the floor when time alone changes something.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use futures_util::future::select;
use tidegate_core::{Clock, Span};
use tidegate_store::Store;
use tokio::sync::Notify;

use super::Hall;
use crate::clock::precise_timer;

/// Less than this isn't waited for, or a clock that is behind the runtime's would make the timer spin.
const SHORTEST: Span = Span::from_micros(100);

/// What the floor and its timer tell each other without a lock.
#[derive(Default)]
pub(super) struct Timing {
    /// There is an earlier moment to wake at, or nobody to wake any more.
    pub earlier: Notify,
    /// Whether a timer runs.
    pub runs: AtomicBool,
    /// The timer has gone with its runtime.
    pub gone: Notify,
}

/// Enters the floor whenever time alone changes something. Ends when there is nothing to wait for.
pub(super) struct Timer<S, C> {
    hall: Weak<Hall<S, C>>,
    timing: Arc<Timing>,
}

impl<S: Store, C: Clock> Timer<S, C> {
    pub(super) fn new(hall: &Arc<Hall<S, C>>) -> Self {
        Self { hall: Arc::downgrade(hall), timing: Arc::clone(&hall.timing) }
    }

    pub(super) async fn run(mut self) {
        while let Some((wait, by_system)) = self.next() {
            let wait = wait.as_duration();
            let slept = async move {
                match by_system {
                    true => precise_timer::sleep(wait).await,
                    false => tokio::time::sleep(wait).await,
                }
            };
            // Whether it is time or there is an earlier moment: the floor says what is next.
            select(pin!(slept), pin!(self.timing.earlier.notified())).await;
        }
    }

    /// How long to sleep, and whether by the system's time.
    fn next(&mut self) -> Option<(Span, bool)> {
        let hall = self.hall.upgrade()?;
        let (mut floor, now) = hall.enter_now();
        let floor = &mut *floor;
        floor.wakes_at = hall.name(floor, None, now);
        if floor.wakes_at.is_never() {
            // Said under the lock, and only once: after it there may be another timer.
            self.timing.runs.store(false, Ordering::Release);
            self.timing = Arc::default();
            return None;
        }
        Some((floor.wakes_at.since(now).max(SHORTEST), hall.clock.is_system()))
    }
}

impl<S, C> Drop for Timer<S, C> {
    /// The runtime may end before the provider does: then whoever waits in another starts one there. This may be within
    /// the floor's lock.
    fn drop(&mut self) {
        self.timing.runs.store(false, Ordering::Release);
        self.timing.gone.notify_waiters();
    }
}
