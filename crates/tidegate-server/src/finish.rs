//! Calls in flight that are finished although their client has gone away: `on_disconnect = "finish"`.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http_body_util::BodyExt as _;
use tokio::runtime::Handle;

use crate::descriptors::place_without_client;
use crate::permit_renewer::PermitHandle;
use crate::upstream::{UpstreamBody, UpstreamError};
use crate::watchdog::ConnectionWatch;

/// The most bytes of a reply that are read without its client. A server may send them fast and without an end.
const MAX_DISCARDED_BYTES: usize = 64 << 20;

type Sent = Result<Response<UpstreamBody>, UpstreamError>;
type Sending = Pin<Box<dyn Future<Output = Sent> + Send>>;

/// A request under way, which is finished if it is dropped.
pub(crate) struct FinishOnDrop {
    /// `None` once it has its response, or must not be finished.
    call: Option<(Sending, PermitHandle)>,
    watch: Arc<ConnectionWatch>,
    has_body: bool,
    timeout: Duration,
}

impl FinishOnDrop {
    /// Returns a call that is finished within this time after its client has gone away.
    pub(crate) fn new(
        sending: impl Future<Output = Sent> + Send + 'static,
        permit: PermitHandle,
        watch: Arc<ConnectionWatch>,
        has_body: bool,
        timeout: Duration,
    ) -> Self {
        Self { call: Some((Box::pin(sending), permit)), watch, has_body, timeout }
    }

    /// Waits for the response. `None` if the phase must end before it comes.
    pub(crate) async fn response(mut self) -> (Option<Sent>, Option<PermitHandle>) {
        let this = &mut self;
        let sent = poll_fn(|cx| match &mut this.call {
            Some((sending, _)) if !this.watch.must_end_phase() => sending.as_mut().poll(cx).map(Some),
            _ => Poll::Ready(None),
        })
        .await;
        (sent, self.call.take().map(|(_, permit)| permit))
    }
}

impl Drop for FinishOnDrop {
    fn drop(&mut self) {
        // The rest of a body went away with its client.
        if !(self.has_body && self.watch.body.is_uploading.get())
            && let Some((sending, permit)) = self.call.take()
        {
            finish(permit, self.timeout, async move {
                let response = sending.await.ok()?;
                discard(response.into_body()).await
            });
        }
    }
}

/// Reads and discards the rest of a response, unless it is too long.
pub(crate) fn finish_response(body: UpstreamBody, permit: PermitHandle, timeout: Duration) {
    finish(permit, timeout, discard(body));
}

async fn discard(mut body: UpstreamBody) -> Option<()> {
    let mut remaining_bytes = MAX_DISCARDED_BYTES;
    while let Some(frame) = body.frame().await {
        let size = frame.ok()?.data_ref().map_or(0, Bytes::len);
        remaining_bytes = remaining_bytes.checked_sub(size)?;
    }
    Some(())
}

/// Runs an exchange to its end, and returns the permit. If there is no place, or no time left, it is abandoned.
fn finish(permit: PermitHandle, timeout: Duration, exchange: impl Future<Output = Option<()>> + Send + 'static) {
    if let (Ok(runtime), Some(place)) = (Handle::try_current(), place_without_client())
        && permit.count_abandoned()
    {
        runtime.spawn(async move {
            let _place = place;
            match tokio::time::timeout(timeout, exchange).await {
                Ok(Some(())) => {}
                Ok(None) => permit.work.cancel(),
                Err(_) => permit.work.break_off_reply(),
            }
        });
    } else {
        permit.work.break_off_reply();
    }
}
