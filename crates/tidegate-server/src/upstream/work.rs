//! The upstream's work on a request, as far as it shows.
//!
//! *Why:* a server that doesn't watch its connection works on for a client that has gone away. A closed connection says
//! nothing of that. So the connection of an abandoned request is only closed in the direction of the server. A server that
//! watches it ends, as with any closed connection. Another one answers when its work is over.

use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use crate::permit_renewer::{AbandonedWork, RequestPermit};

/// The longest time for which a connection is observed after its request was abandoned: that for which a permit is kept.
const MAX_OBSERVED_TIME: Duration = Duration::from_secs(30);
/// The maximum number of connections that are observed. Further ones are closed.
const MAX_OBSERVED: usize = 512;

static OBSERVATIONS: Semaphore = Semaphore::const_new(MAX_OBSERVED);

/// The upstream's work on one request with a permit.
#[derive(Default)]
pub(crate) struct UpstreamWork(Mutex<WorkStage>);

#[derive(Default)]
enum WorkStage {
    /// Nothing was sent, or the upstream has said or shown that it doesn't work on it.
    #[default]
    None,
    /// The request was sent, and nothing shows when the work is over.
    Sent,
    /// The request was sent over a connection that shows it.
    Observed,
    /// The head of the response has arrived.
    Answered,
    /// The request was abandoned, and its connection shows when the work is over.
    Abandoned(Box<dyn AbandonedWork>),
}

impl UpstreamWork {
    /// Notes that the request is being sent.
    pub(super) fn begin(&self, is_observed: bool) {
        *self.0.lock() = if is_observed { WorkStage::Observed } else { WorkStage::Sent };
    }

    /// Notes that the response has begun.
    pub(super) fn answer(&self) {
        *self.0.lock() = WorkStage::Answered;
    }

    /// Notes that the upstream doesn't work on the request.
    pub(crate) fn cancel(&self) {
        *self.0.lock() = WorkStage::None;
    }

    /// Ends the request. Its permit is returned, or kept while the upstream may still work on it.
    pub(crate) fn end_request(&self, permit: Box<dyn RequestPermit>) {
        let stage = &mut *self.0.lock();
        match stage {
            WorkStage::None => permit.cancel(),
            WorkStage::Answered => drop(permit),
            WorkStage::Observed => *stage = WorkStage::Abandoned(permit.keep()),
            WorkStage::Sent | WorkStage::Abandoned(_) => drop(permit.keep()),
        }
    }

    fn is_observed(&self) -> bool {
        matches!(*self.0.lock(), WorkStage::Observed | WorkStage::Abandoned(_))
    }

    /// Notes that the connection shows nothing more, and if the upstream has answered.
    fn end_observation(&self, has_answered: bool) {
        let stage = &mut *self.0.lock();
        let next = if has_answered { WorkStage::Answered } else { WorkStage::Sent };
        match mem::replace(stage, next) {
            WorkStage::Abandoned(work) if has_answered => work.end(),
            WorkStage::Observed | WorkStage::Abandoned(_) => {}
            other => *stage = other,
        }
    }
}

/// The work for the present request of a connection, if that has a permit.
pub(super) type CurrentWork = Arc<Mutex<Option<Arc<UpstreamWork>>>>;

/// A connection that is observed to the end of the work on its last request, if that was abandoned.
pub(super) struct ObservedStream<T: Read + Write + Unpin + Send + 'static> {
    /// `None` while it is being dropped.
    stream: Option<T>,
    work: CurrentWork,
}

impl<T: Read + Write + Unpin + Send + 'static> ObservedStream<T> {
    pub(super) fn new(stream: T, work: CurrentWork) -> Self {
        Self { stream: Some(stream), work }
    }

    fn stream(&mut self) -> Pin<&mut T> {
        Pin::new(self.stream.as_mut().expect("invariant: it is there until it is dropped"))
    }
}

impl<T: Read + Write + Unpin + Send + 'static> Drop for ObservedStream<T> {
    fn drop(&mut self) {
        let Some(work) = self.work.lock().take().filter(|work| work.is_observed()) else { return };
        match (self.stream.take(), Handle::try_current(), OBSERVATIONS.try_acquire()) {
            (Some(stream), Ok(runtime), Ok(place)) => {
                runtime.spawn(async move {
                    let _place = place;
                    let answer = tokio::time::timeout(MAX_OBSERVED_TIME, wait_for_answer(stream)).await;
                    work.end_observation(answer.unwrap_or(false));
                });
            }
            _ => work.end_observation(false),
        }
    }
}

/// Closes a connection in the direction of the server. Returns true if the server answers, false if it closes as well.
async fn wait_for_answer(stream: impl Read + Write + Unpin) -> bool {
    let mut stream = TokioIo::new(stream);
    // Fails if it was closed before.
    let _ = stream.shutdown().await;
    let mut buffer = [0; 1024];
    loop {
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => return false,
            // After an informational response, the work goes on.
            Ok(count) if buffer[..count].starts_with(b"HTTP/1.1 1") => {}
            Ok(_) => return true,
        }
    }
}

impl<T: Read + Write + Unpin + Send + 'static> Read for ObservedStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        self.stream().poll_read(cx, buffer)
    }
}

impl<T: Read + Write + Unpin + Send + 'static> Write for ObservedStream<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        self.stream().poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.stream().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.stream().poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(Write::is_write_vectored)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        self.stream().poll_write_vectored(cx, parts)
    }
}
