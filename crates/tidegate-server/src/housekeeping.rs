//! Periodic work of a running server: store maintenance, and moving the clock towards the wall clock.

use std::time::Duration;

use tidegate::clock::SystemClock;
use tidegate::outbound::Outbound;
use tidegate::store::{Losses, Store};
use tidegate_core::Clock;

/// The interval of all periodic work.
const INTERVAL: Duration = Duration::from_secs(1);

/// Has the store remove idle entries, and logs entries that it had to drop.
pub(crate) async fn run_store_maintenance(tend: impl Fn() -> Losses) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        let lost = tend();
        if lost.has_any() {
            tracing::warn!(
                used = lost.evicted_used,
                full = lost.evicted_exhausted,
                blocked = lost.refused_blocks,
                shared = lost.forced_shares,
                "the store is full: entries that still counted had to go, or new keys share their network's limit and some \
                 aren't blocked; raise store.max_bytes"
            );
        }
    }
}

/// Exchanges findings about providers with other nodes.
pub(crate) async fn run_vote_exchange<S: Store, C: Clock + Clone>(providers: Outbound<S, C>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        providers.run_vote_exchange().await;
    }
}

/// The distance between the wall clock and the gate's clock, in microseconds, above which a warning is logged. Slewing
/// by this much takes half an hour.
const MAX_DRIFT_MICROS: u64 = 1_000_000;

/// Moves a clock towards the wall clock, and logs once when it is far off.
pub(crate) async fn follow_wall_clock(clock: SystemClock) {
    let mut was_far = false;
    loop {
        tokio::time::sleep(INTERVAL).await;
        clock.follow(tidegate::Span::from_duration(INTERVAL));
        let drift = clock.drift();
        let is_far = drift.unsigned_abs() > MAX_DRIFT_MICROS;
        if is_far && !was_far {
            tracing::warn!(
                drift_secs = drift / 1_000_000,
                "the system's clock was set after the gate took its time, which follows it by half a millisecond a \
                 second; until then the times of day that clients are told and the periods of quotas are off by the \
                 drift; a restart takes the system's time over"
            );
        }
        was_far = is_far;
    }
}
