//! Bodies of decision requests, which are small and read whole.

use std::future::poll_fn;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::Body as _;
use hyper::body::Incoming;

use crate::body::ResponseBody;
use crate::local_response::{close_after_response, error};
use crate::watchdog::{ConnectionPhase, ConnectionWatch};

/// The maximum size of a decision request in bytes. One with eight long key parts has a few hundred bytes.
pub(crate) const MAX_BYTES: usize = 16 << 10;

/// Reads the body of a decision request, or returns the response to one that can't be read.
pub(crate) async fn collect_body(
    watch: &ConnectionWatch,
    body: Incoming,
    max_bytes: usize,
) -> Result<Bytes, Response<ResponseBody>> {
    watch.enter(ConnectionPhase::Upload);
    let mut collecting = BodyCollector::new(body, max_bytes);
    let bytes = poll_fn(|cx| collecting.poll(watch, cx)).await;
    let bytes = bytes.map_err(|status| unreadable_body_response(watch, max_bytes, status))?;
    watch.enter(ConnectionPhase::Deciding);
    Ok(bytes)
}

/// The response to a decision request that can't be read.
pub(crate) fn unreadable_body_response(
    watch: &ConnectionWatch,
    max_bytes: usize,
    status: StatusCode,
) -> Response<ResponseBody> {
    close_after_response(watch, error(status, &format!("the body has at most {max_bytes} bytes, and arrives whole")))
}

/// Collects a small body. Copies nothing if the body arrives in one piece.
pub(crate) struct BodyCollector {
    body: Incoming,
    max_bytes: usize,
    first_chunk: Bytes,
    buffer: Vec<u8>,
    /// True after the first wait for the client. From then on the body must keep a minimum rate.
    has_min_rate: bool,
    early_result: Option<Result<Bytes, StatusCode>>,
}

impl BodyCollector {
    fn new(body: Incoming, max_bytes: usize) -> Self {
        Self { body, max_bytes, first_chunk: Bytes::new(), buffer: Vec::new(), has_min_rate: false, early_result: None }
    }

    /// Polls the body at once, while the connection is still reading. Most bodies arrive with their heads and are then
    /// complete without waking a task.
    pub(crate) fn start(body: Incoming, watch: &ConnectionWatch) -> Self {
        let mut collecting = Self::new(body, MAX_BYTES);
        if let Poll::Ready(collected) = collecting.poll(watch, &mut Context::from_waker(Waker::noop())) {
            collecting.early_result = Some(collected);
        }
        collecting
    }

    pub(crate) fn poll(&mut self, watch: &ConnectionWatch, cx: &mut Context<'_>) -> Poll<Result<Bytes, StatusCode>> {
        if let Some(collected) = self.early_result.take() {
            return Poll::Ready(collected);
        }
        if watch.must_end_phase() {
            return Poll::Ready(Err(StatusCode::REQUEST_TIMEOUT));
        }
        if self.body.size_hint().lower() > self.max_bytes as u64 {
            return Poll::Ready(Err(StatusCode::PAYLOAD_TOO_LARGE));
        }
        while !self.body.is_end_stream() {
            let Poll::Ready(polled) = Pin::new(&mut self.body).poll_frame(cx) else {
                if !mem::replace(&mut self.has_min_rate, true) {
                    watch.set_min_rate(true);
                }
                watch.body.waits_on_client.set(true);
                return Poll::Pending;
            };
            watch.body.waits_on_client.set(false);
            let Some(frame) = polled else { break };
            let Ok(frame) = frame else { return Poll::Ready(Err(StatusCode::BAD_REQUEST)) };
            watch.touch();
            let Ok(data) = frame.into_data() else { continue };
            if self.has_min_rate {
                watch.count_body(data.len() as u64);
            }
            if self.first_chunk.len() + self.buffer.len() + data.len() > self.max_bytes {
                return Poll::Ready(Err(StatusCode::PAYLOAD_TOO_LARGE));
            }
            if self.first_chunk.is_empty() && self.buffer.is_empty() {
                self.first_chunk = data;
            } else {
                self.buffer.extend_from_slice(&mem::take(&mut self.first_chunk));
                self.buffer.extend_from_slice(&data);
            }
        }
        if watch.is_ambiguous() {
            return Poll::Ready(Err(StatusCode::BAD_REQUEST));
        }
        let collected =
            if self.buffer.is_empty() { mem::take(&mut self.first_chunk) } else { mem::take(&mut self.buffer).into() };
        Poll::Ready(Ok(collected))
    }
}
