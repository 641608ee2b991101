//! Connections that stop being HTTP: WebSocket and every other protocol that `Upgrade` names.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use crate::permit::Permit;
use crate::watch::{Entry, Watch};

/// Joins both sides until both have ended, nothing has moved for the idle time, or the server's time is up. The
/// tunnel counts as its client's connection, and holds its request's permit.
pub(crate) fn splice(
    client: OnUpgrade,
    upstream: OnUpgrade,
    watch: Arc<Watch>,
    entry: Arc<Entry>,
    permit: Option<Permit>,
) {
    tokio::spawn(async move {
        let _entry = entry;
        let _permit = permit;
        let joined = async {
            let (client, upstream) = tokio::try_join!(client, upstream)?;
            let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
            tokio::io::copy_bidirectional(&mut client, &mut upstream).await.map_err(Ended::Broken)
        };
        let mut joined = pin!(joined);
        let mut registered = false;
        let ended = poll_fn(|cx| {
            // A task's waker stays the same.
            if !std::mem::replace(&mut registered, true) {
                watch.register(cx.waker());
            }
            if watch.is_overdue() { Poll::Ready(Err(Ended::Overdue)) } else { joined.as_mut().poll(cx) }
        });
        if let Err(ended) = ended.await {
            tracing::debug!(%ended, "an upgraded connection ended");
        }
    });
}

#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("nothing moved for too long")]
    Overdue,
    #[error("one side broke off: {0}")]
    Broken(#[source] std::io::Error),
    #[error("one side did not upgrade: {0}")]
    NotUpgraded(#[from] hyper::Error),
}
