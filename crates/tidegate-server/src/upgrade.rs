//! Upgraded connections: WebSocket and every other protocol that `Upgrade` names.

use std::sync::Arc;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use crate::watchdog::{ConnectionEntry, ConnectionWatch};

/// Joins both sides until both have ended, no byte has moved for the idle timeout, or the server's shutdown time is
/// over. The tunnel counts as its client's connection, and keeps `in_flight`, the guard of its request, until it ends.
pub(crate) fn spawn_tunnel(
    client: OnUpgrade,
    upstream: OnUpgrade,
    watch: Arc<ConnectionWatch>,
    entry: Arc<ConnectionEntry>,
    in_flight: impl Send + 'static,
) {
    tokio::spawn(async move {
        let _entry = entry;
        let _in_flight = in_flight;
        let joined = async {
            let upgraded = tokio::try_join!(client, upstream);
            let (client, upstream) = upgraded.map_err(|error| format!("one side did not upgrade: {error}"))?;
            let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
            let copied = tokio::io::copy_bidirectional(&mut client, &mut upstream).await;
            copied.map_err(|error| format!("one side broke off: {error}"))
        };
        let ended =
            watch.until_phase_ends(joined).await.unwrap_or_else(|| Err("nothing moved for too long".to_owned()));
        if let Err(ended) = ended {
            tracing::debug!(%ended, "an upgraded connection ended");
        }
    });
}
