//! The timer of a dispatcher: makes a step when time alone changes something.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use futures_util::future::select;
use tidegate_core::{Clock, Span};
use tidegate_runtime::precise_timer;
use tidegate_store::Store;
use tokio::sync::Notify;

use super::ProviderInner;

/// The shortest sleep. Without it, the timer would spin if the clock is behind the runtime's.
const MIN_SLEEP: Span = Span::from_micros(100);

/// The signals between a dispatcher and its timer that need no lock.
#[derive(Default)]
pub(super) struct TimerSignals {
    /// Notified if the next wake-up is earlier, or the provider was dropped.
    pub reschedule: Notify,
    /// True if a timer runs.
    pub is_running: AtomicBool,
    /// Notified if the timer ended with its runtime.
    pub stopped: Notify,
}

/// Makes a step whenever time alone changes something. Ends when there is nothing to wait for.
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
            // The next step decides what to do, so it doesn't matter which of the two ended the wait.
            select(pin!(sleeping), pin!(self.signals.reschedule.notified())).await;
        }
    }

    /// The time to sleep, and true if the provider uses the system's clock.
    fn next_sleep(&mut self) -> Option<(Span, bool)> {
        let provider = self.provider.upgrade()?;
        let (mut dispatcher, now) = provider.lock_for_step();
        let dispatcher = &mut *dispatcher;
        dispatcher.timer_wakes_at = provider.dispatch_due(dispatcher, None, now);
        if dispatcher.timer_wakes_at.is_never() {
            // Set under the lock and only once, because another timer may start after it.
            self.signals.is_running.store(false, Ordering::Release);
            self.signals = Arc::default();
            return None;
        }
        Some((dispatcher.timer_wakes_at.since(now).max(MIN_SLEEP), provider.clock.is_system()))
    }
}

impl<S, C> Drop for Timer<S, C> {
    /// If the runtime ends before the provider, a call that waits in another runtime starts a new timer there. The
    /// caller may hold the dispatcher's lock.
    fn drop(&mut self) {
        self.signals.is_running.store(false, Ordering::Release);
        self.signals.stopped.notify_waiters();
    }
}
