//! Upgraded connections: WebSocket and every other protocol that `Upgrade` names.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

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
        let mut joined = pin!(joined);
        let mut registered = false;
        let ended = poll_fn(|cx| {
            // One registration is enough, because a task's waker stays the same.
            if !std::mem::replace(&mut registered, true) {
                watch.register(cx.waker());
            }
            match watch.must_end_phase() {
                true => Poll::Ready(Err("nothing moved for too long".to_owned())),
                false => joined.as_mut().poll(cx),
            }
        });
        if let Err(ended) = ended.await {
            tracing::debug!(%ended, "an upgraded connection ended");
        }
    });
}
