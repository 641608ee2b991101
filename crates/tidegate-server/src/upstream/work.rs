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
use tidegate_core::Concurrency;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::ReplyStream;
use crate::descriptors::place_without_client;
use crate::permit_renewer::{AbandonedWork, RequestPermit};

/// The longest time for which a connection is observed after its request was abandoned: that for which a permit is kept.
const MAX_OBSERVED_TIME: Duration = Concurrency::DEFAULT_LEASE.as_duration();
/// The maximum number of connections that are observed. Further ones are closed.
pub(crate) const MAX_OBSERVED: usize = 512;

static OBSERVATIONS: Semaphore = Semaphore::const_new(MAX_OBSERVED);

/// The number of connections that are observed.
pub(crate) fn observed_calls() -> usize {
    MAX_OBSERVED - OBSERVATIONS.available_permits()
}

/// The upstream's work on one request with a permit.
#[derive(Default)]
pub(crate) struct UpstreamWork(Mutex<WorkState>);

#[derive(Default)]
struct WorkState {
    stage: WorkStage,
    /// The number of the last attempt to send the request. Each has a connection of its own.
    attempt: u32,
}

#[derive(Default)]
enum WorkStage {
    /// Nothing was sent, or the upstream has said or shown that it doesn't work on it.
    #[default]
    None,
    /// The connection has the request, which may show when the work is over, and has sent nothing of it.
    Queued,
    /// The request was abandoned before anything of it was sent.
    Dropped,
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
    /// Notes that a connection is given the request. Returns the number of the attempt.
    pub(super) fn begin(&self, is_observed: bool) -> u32 {
        let state = &mut *self.0.lock();
        state.stage = if is_observed { WorkStage::Queued } else { WorkStage::Sent };
        state.attempt += 1;
        state.attempt
    }

    /// Notes that the connection begins to send the request. Returns false if nothing may be sent, because the permit has
    /// been given back.
    fn start_sending(&self, attempt: u32) -> bool {
        let state = &mut *self.0.lock();
        if state.attempt == attempt && matches!(state.stage, WorkStage::Queued) {
            state.stage = WorkStage::Observed;
        }
        state.attempt != attempt || !matches!(state.stage, WorkStage::Dropped)
    }

    /// Notes that the response has begun.
    pub(super) fn answer(&self) {
        self.0.lock().stage = WorkStage::Answered;
    }

    /// Notes that a reply which has begun isn't read to its end. The time until then is not that of a call.
    pub(crate) fn break_off_reply(&self) {
        let stage = &mut self.0.lock().stage;
        if matches!(stage, WorkStage::Answered) {
            *stage = WorkStage::None;
        }
    }

    /// Notes that the upstream doesn't work on the request.
    pub(crate) fn cancel(&self) {
        self.0.lock().stage = WorkStage::None;
    }

    /// Ends the request. Its permit is returned, or kept while the upstream may still work on it.
    pub(crate) fn end_request(&self, permit: Box<dyn RequestPermit>) {
        let stage = &mut self.0.lock().stage;
        match stage {
            WorkStage::None => permit.cancel(),
            WorkStage::Queued | WorkStage::Dropped => {
                *stage = WorkStage::Dropped;
                permit.cancel();
            }
            WorkStage::Answered => drop(permit),
            WorkStage::Observed => *stage = permit.keep().map_or(WorkStage::Sent, WorkStage::Abandoned),
            WorkStage::Sent | WorkStage::Abandoned(_) => drop(permit.keep()),
        }
    }

    fn is_observed(&self, attempt: u32) -> bool {
        let state = self.0.lock();
        state.attempt == attempt && matches!(state.stage, WorkStage::Observed | WorkStage::Abandoned(_))
    }

    /// Notes that the connection of an attempt shows nothing more, and if the upstream has answered.
    fn end_observation(&self, attempt: u32, has_answered: bool) {
        let WorkState { stage, attempt: last } = &mut *self.0.lock();
        if attempt != *last {
            return;
        }
        let next = if has_answered { WorkStage::Answered } else { WorkStage::Sent };
        match mem::replace(stage, next) {
            WorkStage::Abandoned(work) if has_answered => work.end(),
            WorkStage::Observed | WorkStage::Abandoned(_) => {}
            other => *stage = other,
        }
    }
}

/// The work for the present request of a connection, if that has a permit, and the number of the attempt.
pub(super) type CurrentWork = Arc<Mutex<Option<(Arc<UpstreamWork>, u32)>>>;

/// A connection that is observed to the end of the work on its last request, if that was abandoned.
pub(super) struct ObservedStream<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> {
    /// `None` while it is being dropped.
    stream: Option<TokioIo<ReplyStream<T>>>,
    work: CurrentWork,
}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> ObservedStream<T> {
    pub(super) fn new(stream: T, work: CurrentWork) -> Self {
        Self { stream: Some(TokioIo::new(ReplyStream::new(stream))), work }
    }

    fn stream(&mut self) -> Pin<&mut TokioIo<ReplyStream<T>>> {
        Pin::new(self.stream.as_mut().expect("invariant: it is there until it is dropped"))
    }

    /// Fails if the request was abandoned before anything of it was sent. The HTTP library may not know that yet.
    fn start_sending(&self) -> std::io::Result<()> {
        match &*self.work.lock() {
            Some((work, attempt)) if !work.start_sending(*attempt) => Err(std::io::ErrorKind::BrokenPipe.into()),
            _ => Ok(()),
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> Drop for ObservedStream<T> {
    fn drop(&mut self) {
        let current = self.work.lock().take();
        let Some((work, attempt)) = current.filter(|(work, attempt)| work.is_observed(*attempt)) else { return };
        let places = (OBSERVATIONS.try_acquire(), place_without_client());
        match (self.stream.take(), Handle::try_current(), places) {
            (Some(stream), Ok(runtime), (Ok(place), Some(descriptor))) => {
                runtime.spawn(async move {
                    let _places = (place, descriptor);
                    let answer = tokio::time::timeout(MAX_OBSERVED_TIME, wait_for_answer(stream.into_inner())).await;
                    work.end_observation(attempt, answer.unwrap_or(false));
                });
            }
            _ => work.end_observation(attempt, false),
        }
    }
}

/// Closes a connection in the direction of the server. Returns true if the server answers, false if it closes as well.
async fn wait_for_answer(mut stream: ReplyStream<impl AsyncRead + AsyncWrite + Unpin>) -> bool {
    // Fails if it was closed before.
    let _ = stream.shutdown().await;
    let mut buffer = [0; 1024];
    // After an informational reply, the work goes on.
    while !stream.has_final_reply() {
        if let Ok(0) | Err(_) = stream.read(&mut buffer).await {
            return false;
        }
    }
    true
}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> Read for ObservedStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        self.stream().poll_read(cx, buffer)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> Write for ObservedStream<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        self.start_sending()?;
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
        self.start_sending()?;
        self.stream().poll_write_vectored(cx, parts)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A permit for which there is no place among those that are kept.
    struct UnkeptPermit(Arc<AtomicBool>);

    impl RequestPermit for UnkeptPermit {
        fn renew(&self) {}
        fn keep(self: Box<Self>) -> Option<Box<dyn AbandonedWork>> {
            None
        }
        fn cancel(self: Box<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
        fn count_abandoned(&self) -> bool {
            false
        }
    }

    /// Otherwise a client that goes away at once would hold a permit for a lease without any work.
    #[test]
    fn a_request_of_which_nothing_was_sent_gives_its_permit_back() {
        let (work, cancelled) = (UpstreamWork::default(), Arc::new(AtomicBool::new(false)));
        let attempt = work.begin(true);
        work.end_request(Box::new(UnkeptPermit(Arc::clone(&cancelled))));
        assert!(cancelled.load(Ordering::Relaxed) && !work.is_observed(attempt));
        assert!(!work.start_sending(attempt), "it must not be sent any more");
        assert!(work.start_sending(attempt + 1), "the connection's next request");
    }

    #[test]
    fn work_without_a_kept_permit_is_not_observed() {
        let work = UpstreamWork::default();
        let attempt = work.begin(true);
        assert!(work.start_sending(attempt));
        work.end_request(Box::new(UnkeptPermit(Arc::default())));
        assert!(!work.is_observed(attempt));
    }

    /// The time of a reply that was broken off is not that of a call.
    #[test]
    fn a_reply_that_is_broken_off_is_not_measured() {
        for is_broken_off in [false, true] {
            let (work, cancelled) = (UpstreamWork::default(), Arc::<AtomicBool>::default());
            work.begin(true);
            work.answer();
            if is_broken_off {
                work.break_off_reply();
            }
            work.end_request(Box::new(UnkeptPermit(Arc::clone(&cancelled))));
            assert_eq!(cancelled.load(Ordering::Relaxed), is_broken_off);
        }
    }

    #[tokio::test]
    async fn an_ended_connection_ends_only_its_own_observation() {
        let (work, current) = (Arc::<UpstreamWork>::default(), CurrentWork::default());
        let (near, far) = tokio::io::duplex(64);
        let send = || {
            let attempt = work.begin(true);
            assert!(work.start_sending(attempt));
            attempt
        };
        *current.lock() = Some((Arc::clone(&work), send()));
        drop((ObservedStream::new(near, current), far));
        let second = send();
        tokio::task::yield_now().await;
        assert!(work.is_observed(second), "the first connection has ended");
        work.end_observation(second, false);
        assert!(!work.is_observed(second));
    }

    #[tokio::test]
    async fn informational_replies_are_no_answers() {
        for (pieces, is_answer) in [
            (&["HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200"][..], true),
            (&["HTTP/1.1 1", "03 Early Hints\r\na: b\r\n", "\r\n"], false),
            (&["HTTP/1.1 103 Early Hints\r\n\r\n", "HTTP/1.1 2"], true),
            (&[], false),
        ] {
            let (near, mut far) = tokio::io::duplex(1024);
            let sending = async move {
                for piece in pieces {
                    far.write_all(piece.as_bytes()).await.unwrap();
                    tokio::task::yield_now().await;
                }
            };
            assert_eq!(tokio::join!(wait_for_answer(ReplyStream::new(near)), sending).0, is_answer, "{pieces:?}");
        }
    }
}
