//! Periodic work of a running server: store maintenance, moving the clock towards the wall clock, and saving outbound
//! state.

use std::sync::Arc;
use std::time::Duration;

use tidegate::clock::SystemClock;
use tidegate::outbound::Snapshot;
use tidegate::store::{Losses, Store};
use tidegate_core::Clock;

use crate::metrics::MetricsSource;
use crate::state_cell::StateCell;
use crate::states::{Engine, SharedParts};

/// The interval of all periodic work.
const INTERVAL: Duration = Duration::from_secs(1);

/// Has the store remove idle entries. Logs and reports entries that it had to drop.
pub(crate) async fn run_store_maintenance(maintain: impl Fn() -> Losses, on_loss: impl Fn(&Losses)) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        let lost = maintain();
        if lost.has_any() {
            on_loss(&lost);
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

/// Keeps the totals of each second for the dashboard, and forgets requests after an hour; never returns.
pub(crate) async fn record_history<S: Store, C: Clock + Clone>(
    engine: Arc<StateCell<Engine<S, C>>>,
    parts: Arc<SharedParts>,
) {
    loop {
        let engine = engine.load();
        MetricsSource::new(&engine, &parts).record_history();
        if let Some(history) = &parts.request_history {
            history.maintain(engine.gate.clock().now());
        }
        drop(engine);
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Exchanges findings about providers with other nodes.
pub(crate) async fn run_vote_exchange<S: Store, C: Clock + Clone>(engine: Arc<StateCell<Engine<S, C>>>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        if let Some(providers) = engine.load().providers.clone() {
            providers.run_vote_exchange().await;
        }
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

/// Saves outbound state periodically; never returns. A killed process loses at most the changes of one interval.
pub(crate) async fn run_snapshots<S: Store, C: Clock + Clone>(snapshot: Arc<Snapshot<S, C>>) {
    let mut last_save_ok = true;
    loop {
        tokio::time::sleep(INTERVAL).await;
        save_snapshot(&snapshot, &mut last_save_ok).await;
    }
}

/// Saves changes on a blocking thread, so that requests don't wait. Logs a failure once, until a save succeeds again.
pub(crate) async fn save_snapshot<S: Store, C: Clock + Clone>(snapshot: &Arc<Snapshot<S, C>>, last_save_ok: &mut bool) {
    let snapshot = Arc::clone(snapshot);
    // Without a result, the runtime is shutting down or the save panicked, which has been logged.
    let Ok(saved) = tokio::task::spawn_blocking(move || snapshot.save()).await else { return };
    match &saved {
        Ok(_) if !*last_save_ok => tracing::info!("outbound state is saved again"),
        Err(error) if *last_save_ok => {
            tracing::error!(%error, "outbound state isn't saved: a restart would grant spent quotas again");
        }
        _ => {}
    }
    *last_save_ok = saved.is_ok();
}
