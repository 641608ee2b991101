//! Outbound state is saved while the server runs, and when it ends.

use std::sync::Arc;
use std::time::Duration;

use tidegate::core::Clock;
use tidegate::outbound::Snapshot;
use tidegate::store::Store;

/// How often outbound state is saved: what a process that is killed forgets at most.
const SAVE_INTERVAL: Duration = Duration::from_secs(1);

/// Saves what has changed, again and again.
pub(crate) async fn run<S: Store, C: Clock + Clone>(snapshot: Arc<Snapshot<S, C>>) {
    let mut last_save_ok = true;
    loop {
        tokio::time::sleep(SAVE_INTERVAL).await;
        save(&snapshot, &mut last_save_ok).await;
    }
}

/// Saves what has changed, apart from those who answer requests. What goes wrong is told once until it is good again.
pub(crate) async fn save<S: Store, C: Clock + Clone>(snapshot: &Arc<Snapshot<S, C>>, last_save_ok: &mut bool) {
    let snapshot = Arc::clone(snapshot);
    // Without a result, the runtime is shutting down or the saving panicked, which has been told.
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
