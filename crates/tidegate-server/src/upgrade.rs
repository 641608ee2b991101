//! Upgraded connections: WebSocket and every other protocol that `Upgrade` names.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use crate::permit_renewer::PermitHandle;
use crate::watchdog::{ConnectionEntry, ConnectionWatch};

/// Joins both sides until both have ended, no byte has moved for the idle timeout, or the server's shutdown time is
/// over. The tunnel counts as its client's connection, and keeps its request's permit.
pub(crate) fn spawn_tunnel(
    client: OnUpgrade,
    upstream: OnUpgrade,
    watch: Arc<ConnectionWatch>,
    entry: Arc<ConnectionEntry>,
    permit: Option<PermitHandle>,
) {
    tokio::spawn(async move {
        let _entry = entry;
        let _permit = permit;
        let joined = async {
            let (client, upstream) = tokio::try_join!(client, upstream)?;
            let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
            tokio::io::copy_bidirectional(&mut client, &mut upstream).await.map_err(TunnelError::Broken)
        };
        let mut joined = pin!(joined);
        let mut registered = false;
        let ended = poll_fn(|cx| {
            // One registration is enough, because a task's waker stays the same.
            if !std::mem::replace(&mut registered, true) {
                watch.register(cx.waker());
            }
            if watch.must_end_phase() { Poll::Ready(Err(TunnelError::Timeout)) } else { joined.as_mut().poll(cx) }
        });
        if let Err(ended) = ended.await {
            tracing::debug!(%ended, "an upgraded connection ended");
        }
    });
}

#[derive(Debug, thiserror::Error)]
enum TunnelError {
    #[error("nothing moved for too long")]
    Timeout,
    #[error("one side broke off: {0}")]
    Broken(#[source] std::io::Error),
    #[error("one side did not upgrade: {0}")]
    NotUpgraded(#[from] hyper::Error),
}
