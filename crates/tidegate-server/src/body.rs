//! Bodies in transit: streamed and watched, never collected.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use atomic_waker::AtomicWaker;
use bytes::{Buf as _, Bytes};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use tokio::time::Sleep;

use crate::access_log::LoggedBody;
use crate::finish::finish_response;
use crate::hop_headers;
use crate::permit_renewer::PermitHandle;
use crate::upstream::UpstreamBody;
use crate::watchdog::{ConnectionPhase, ConnectionWatch};

pub(crate) enum ResponseBody {
    /// A body of the server's own.
    Full(Option<Bytes>),
    /// The upstream's body.
    Stream(Box<Download>),
    /// The body of a provider's reply to an outbound call.
    Relay(RelayBody),
    /// One of these, for the access log.
    Logged(Box<LoggedBody>),
}

/// The error that interrupted a body.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl ResponseBody {
    pub(crate) fn empty() -> Self {
        Self::Full(None)
    }

    pub(crate) fn full(bytes: Bytes) -> Self {
        Self::Full((!bytes.is_empty()).then_some(bytes))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut *self {
            Self::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Stream(download) => download.poll_frame(cx).map_err(Into::into),
            Self::Relay(relay) => relay.poll_frame(cx),
            Self::Logged(logged) => logged.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(bytes) => bytes.is_none(),
            Self::Stream(download) => download.inner.is_end_stream(),
            Self::Relay(relay) => relay.inner.is_end_stream(),
            Self::Logged(logged) => logged.inner.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Stream(download) => download.inner.size_hint(),
            Self::Relay(relay) => relay.inner.size_hint(),
            Self::Logged(logged) => logged.inner.size_hint(),
        }
    }
}

/// Returns true if this frame is the last of a body. Nothing follows trailers (RFC 9110 §6.5).
pub(crate) fn is_last(frame: &Frame<Bytes>, body: &impl Body) -> bool {
    frame.is_trailers() || body.is_end_stream()
}

/// Notes the result of polling a response's body. Returns true if the body has ended.
fn track_progress<E>(
    polled: &Poll<Option<Result<Frame<Bytes>, E>>>,
    body: &impl Body,
    watch: &ConnectionWatch,
) -> bool {
    let ended = match polled {
        Poll::Ready(Some(Ok(frame))) => is_last(frame, body),
        Poll::Ready(None) => true,
        Poll::Ready(Some(Err(_))) | Poll::Pending => return false,
    };
    if ended {
        watch.enter(ConnectionPhase::Idle)
    } else {
        watch.touch()
    }
    ended
}

/// The body of a provider's reply on its way to the client.
pub(crate) struct RelayBody {
    inner: UnsyncBoxBody<Bytes, BoxError>,
    watch: Arc<ConnectionWatch>,
}

impl RelayBody {
    /// Returns a body that must make progress within every `progress_timeout`.
    pub(crate) fn new<B>(inner: B, watch: Arc<ConnectionWatch>, progress_timeout: Duration) -> Self
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        if inner.is_end_stream() {
            watch.enter(ConnectionPhase::Idle);
        } else {
            watch.enter_download(progress_timeout);
        }
        Self { inner: inner.map_err(Into::into).boxed_unsync(), watch }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        track_progress(&polled, &self.inner, &self.watch);
        polled
    }
}

impl Drop for RelayBody {
    /// Ends the phase here, because not every body is read: the response to a HEAD request can have one.
    fn drop(&mut self) {
        self.watch.enter_from(ConnectionPhase::Download, ConnectionPhase::Idle);
    }
}

/// The upstream's body on its way to the client.
pub(crate) struct Download {
    inner: UpstreamBody,
    watch: Arc<ConnectionWatch>,
    /// The request's permit under limits on calls in flight, held until the last byte has passed.
    permit: Option<PermitHandle>,
    /// The time within which the response is read to its end if the client goes away; `None` if it isn't.
    finish_timeout: Option<Duration>,
    expectation: Option<Arc<ContinueExpectation>>,
}

impl Download {
    pub(crate) fn new(
        inner: UpstreamBody,
        watch: Arc<ConnectionWatch>,
        permit: Option<PermitHandle>,
        finish_timeout: Option<Duration>,
        expectation: Option<Arc<ContinueExpectation>>,
    ) -> Self {
        let mut download = Self { inner, watch, permit, finish_timeout, expectation };
        if download.inner.is_end_stream() {
            download.permit = None;
            download.watch.enter(ConnectionPhase::Idle);
        } else {
            download.watch.enter(ConnectionPhase::Download);
        }
        download
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        if track_progress(&polled, &self.inner, &self.watch) {
            self.permit = None;
        }
        polled
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        if let Some(expectation) = &self.expectation {
            expectation.end_wait(ContinueOutcome::Abandoned);
        }
        match (self.permit.take(), self.finish_timeout) {
            (Some(permit), Some(timeout)) => finish_response(self.inner.take(), permit, timeout),
            // The upstream notices that nobody reads what it writes. The time until then is not that of a call.
            (Some(permit), None) => permit.work.cancel(),
            (None, _) => {}
        }
    }
}

/// The client's body on its way to the upstream.
pub(crate) struct Upload {
    /// `None` if there is no body.
    body: Option<WatchedBody>,
}

struct WatchedBody {
    inner: Incoming,
    watch: Arc<ConnectionWatch>,
    remaining_bytes: u64,
    expectation: Option<(Arc<ContinueExpectation>, Pin<Box<Sleep>>)>,
}

/// The reason why a request's body ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadError {
    #[error("the body is larger than the cap")]
    TooLarge,
    #[error("the client broke off")]
    Broken(#[source] hyper::Error),
    #[error("a line of the trailers ends with LF alone")]
    AmbiguousTrailers,
    #[error("the upstream has answered without the body")]
    BodyNotNeeded,
}

impl Upload {
    pub(crate) fn empty() -> Self {
        Self { body: None }
    }

    /// Returns a body of at most `cap` bytes, already announced to `watch`. It waits for `expectation`, if there is
    /// one.
    pub(crate) fn new(
        inner: Incoming,
        watch: Arc<ConnectionWatch>,
        cap: u64,
        expectation: Option<Arc<ContinueExpectation>>,
    ) -> Self {
        let expectation = expectation.map(|it| (it, Box::pin(tokio::time::sleep(CONTINUE_TIMEOUT))));
        Self { body: Some(WatchedBody { inner, watch, remaining_bytes: cap, expectation }) }
    }
}

impl Drop for Upload {
    /// Ends the wait for a body that isn't read further.
    fn drop(&mut self) {
        if let Some(body) = &self.body {
            body.watch.body.waits_on_client.set(false);
        }
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = UploadError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UploadError>>> {
        let Some(this) = &mut self.body else { return Poll::Ready(None) };
        if let Some((expectation, timeout)) = &mut this.expectation {
            expectation.waker.register(cx.waker());
            match expectation.outcome() {
                Some(ContinueOutcome::Abandoned) => return Poll::Ready(Some(Err(UploadError::BodyNotNeeded))),
                None if timeout.as_mut().poll(cx).is_pending() => return Poll::Pending,
                None => expectation.end_wait(ContinueOutcome::Proceed),
                Some(ContinueOutcome::Proceed) => {}
            }
        }
        let polled = Pin::new(&mut this.inner).poll_frame(cx);
        let watch = &this.watch;
        watch.body.waits_on_client.set(polled.is_pending());
        match polled {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(Ok(frame))) if frame.is_trailers() && watch.is_ambiguous() => {
                watch.body.is_broken.set(true);
                Poll::Ready(Some(Err(UploadError::AmbiguousTrailers)))
            }
            Poll::Ready(Some(Ok(mut frame))) => {
                if let Some(trailers) = frame.trailers_mut() {
                    hop_headers::strip_trailers(trailers);
                }
                if let Some(data) = frame.data_ref() {
                    let size = data.remaining() as u64;
                    if size > this.remaining_bytes {
                        watch.body.is_too_large.set(true);
                        return Poll::Ready(Some(Err(UploadError::TooLarge)));
                    }
                    this.remaining_bytes -= size;
                    watch.count_body(size);
                }
                if this.inner.is_end_stream() {
                    watch.end_body();
                } else {
                    watch.touch();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                watch.body.is_broken.set(true);
                Poll::Ready(Some(Err(UploadError::Broken(error))))
            }
            Poll::Ready(None) => {
                watch.end_body();
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(|body| body.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), |body| body.inner.size_hint())
    }
}

/// The time that a body waits for the upstream's `100 Continue` before it is sent without it. Not every server answers
/// `Expect` (RFC 9110 §10.1.1 asks not to wait without limit).
const CONTINUE_TIMEOUT: Duration = Duration::from_secs(1);

/// An `Expect: 100-continue`. The client's body isn't requested before the upstream wants it.
#[derive(Debug, Default)]
pub(crate) struct ContinueExpectation {
    outcome: OnceLock<ContinueOutcome>,
    waker: AtomicWaker,
}

/// The end of the wait for the upstream's answer to an `Expect: 100-continue`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContinueOutcome {
    /// The upstream wants the body, or the wait for its answer timed out.
    Proceed,
    /// The final response came first.
    Abandoned,
}

impl ContinueExpectation {
    /// `None` while the upstream hasn't answered.
    pub(crate) fn outcome(&self) -> Option<ContinueOutcome> {
        self.outcome.get().copied()
    }

    /// Ends the wait. Changes nothing if it has ended already.
    pub(crate) fn end_wait(&self, outcome: ContinueOutcome) {
        if self.outcome.set(outcome).is_ok() {
            self.waker.wake();
        }
    }
}
