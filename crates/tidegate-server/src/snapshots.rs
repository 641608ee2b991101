//! Saves outbound state while the server runs, and when it ends.

use std::sync::Arc;
use std::time::Duration;

use tidegate::outbound::Snapshot;
use tidegate::store::Store;
use tidegate_core::Clock;

/// The interval of saves. A killed process loses at most the changes of this time.
const SAVE_INTERVAL: Duration = Duration::from_secs(1);

/// Saves changes periodically; never returns.
pub(crate) async fn run<S: Store, C: Clock + Clone>(snapshot: Arc<Snapshot<S, C>>) {
    let mut last_save_ok = true;
    loop {
        tokio::time::sleep(SAVE_INTERVAL).await;
        save(&snapshot, &mut last_save_ok).await;
    }
}

/// Saves changes on a blocking thread, so that requests don't wait. Logs a failure once, until a save succeeds again.
pub(crate) async fn save<S: Store, C: Clock + Clone>(snapshot: &Arc<Snapshot<S, C>>, last_save_ok: &mut bool) {
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
