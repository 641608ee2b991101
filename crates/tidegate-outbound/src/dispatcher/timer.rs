//! Who enters the floor when time alone changes something.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use futures_util::future::select;
use tidegate_core::{Clock, Span};
use tidegate_runtime::precise_timer;
use tidegate_store::Store;
use tokio::sync::Notify;

use super::ProviderInner;

/// Less than this isn't waited for, or a clock that is behind the runtime's would make the timer spin.
const MIN_SLEEP: Span = Span::from_micros(100);

/// What the floor and its timer tell each other without a lock.
#[derive(Default)]
pub(super) struct TimerSignals {
    /// There is an earlier moment to wake at, or nobody to wake any more.
    pub reschedule: Notify,
    /// Whether a timer runs.
    pub is_running: AtomicBool,
    /// The timer has gone with its runtime.
    pub stopped: Notify,
}

/// Enters the floor whenever time alone changes something. Ends when there is nothing to wait for.
pub(super) struct Timer<S, C> {
    provider: Weak<ProviderInner<S, C>>,
    signals: Arc<TimerSignals>,
}

impl<S: Store, C: Clock> Timer<S, C> {
    pub(super) fn new(provider: &Arc<ProviderInner<S, C>>) -> Self {
        Self { provider: Arc::downgrade(provider), signals: Arc::clone(&provider.timer_signals) }
    }

    pub(super) async fn run(mut self) {
        while let Some((wait, uses_system_clock)) = self.next_sleep() {
            let wait = wait.as_duration();
            let sleeping = async move {
                match uses_system_clock {
                    true => precise_timer::sleep(wait).await,
                    false => tokio::time::sleep(wait).await,
                }
            };
            // Whether it is time or there is an earlier moment: the floor says what is next.
            select(pin!(sleeping), pin!(self.signals.reschedule.notified())).await;
        }
    }

    /// How long to sleep, and whether by the system's time.
    fn next_sleep(&mut self) -> Option<(Span, bool)> {
        let provider = self.provider.upgrade()?;
        let (mut dispatcher, now) = provider.lock_for_step();
        let dispatcher = &mut *dispatcher;
        dispatcher.timer_wakes_at = provider.dispatch_due(dispatcher, None, now);
        if dispatcher.timer_wakes_at.is_never() {
            // Said under the lock, and only once: after it there may be another timer.
            self.signals.is_running.store(false, Ordering::Release);
            self.signals = Arc::default();
            return None;
        }
        Some((dispatcher.timer_wakes_at.since(now).max(MIN_SLEEP), provider.clock.is_system()))
    }
}

impl<S, C> Drop for Timer<S, C> {
    /// The runtime may end before the provider does: then whoever waits in another starts one there. This may be within
    /// the floor's lock.
    fn drop(&mut self) {
        self.signals.is_running.store(false, Ordering::Release);
        self.signals.stopped.notify_waiters();
    }
}
