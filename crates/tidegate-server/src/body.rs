//! Bodies on their way through: never collected, always watched.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use atomic_waker::AtomicWaker;
use bytes::{Buf as _, Bytes};
use http_body::{Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use pin_project_lite::pin_project;
use tokio::time::Sleep;

use crate::permit::Permit;
use crate::upstream::Reply;
use crate::watch::{Fault, Phase, Watch};

/// The body of an answer to a client.
pub(crate) enum Body {
    /// The gate's own.
    Full(Option<Bytes>),
    /// The upstream's.
    Stream(Box<Download>),
    /// That of a reply to a call.
    Relay(UnsyncBoxBody<Bytes, BoxError>),
}

/// Why a body broke off.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Body {
    pub(crate) fn empty() -> Self {
        Self::Full(None)
    }

    pub(crate) fn stream(download: Download) -> Self {
        Self::Stream(Box::new(download))
    }

    /// A provider's, of which something comes at least as often as `patience` says.
    pub(crate) fn relay<B>(inner: B, watch: Arc<Watch>, patience: Duration) -> Self
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self::Relay(UnsyncBoxBody::new(Relay::new(inner, watch, patience)))
    }

    pub(crate) fn full(bytes: Bytes) -> Self {
        Self::Full((!bytes.is_empty()).then_some(bytes))
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut *self {
            Self::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Stream(download) => download.poll_frame(cx).map_err(Into::into),
            Self::Relay(relay) => Pin::new(relay).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(bytes) => bytes.is_none(),
            Self::Stream(download) => download.inner.is_end_stream(),
            Self::Relay(relay) => relay.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Stream(download) => download.inner.size_hint(),
            Self::Relay(relay) => relay.size_hint(),
        }
    }
}

/// Whether nothing of a body comes after this frame, as nothing does after trailers (RFC 9110 §6.5).
pub(crate) fn is_last(frame: &Frame<Bytes>, body: &impl http_body::Body) -> bool {
    frame.is_trailers() || body.is_end_stream()
}

/// Notes what polling an answer's body came to; true if it has ended.
fn follow<E>(polled: &Poll<Option<Result<Frame<Bytes>, E>>>, body: &impl http_body::Body, watch: &Watch) -> bool {
    let ended = match polled {
        Poll::Ready(Some(Ok(frame))) => is_last(frame, body),
        Poll::Ready(None) => true,
        Poll::Ready(Some(Err(_))) | Poll::Pending => return false,
    };
    if ended {
        watch.enter(Phase::Idle)
    } else {
        watch.touch()
    }
    ended
}

pin_project! {
    /// The body of a provider's reply on its way to the client.
    struct Relay<B> {
        #[pin]
        inner: B,
        reading: Reading,
    }
}

/// The reading of a provider's reply.
struct Reading(Arc<Watch>);

impl Drop for Reading {
    /// Not every body is read: an answer to a HEAD has one all the same.
    fn drop(&mut self) {
        self.0.enter_from(Phase::Download, Phase::Idle);
    }
}

impl<B: http_body::Body> Relay<B> {
    fn new(inner: B, watch: Arc<Watch>, patience: Duration) -> Self {
        if inner.is_end_stream() {
            watch.enter(Phase::Idle);
        } else {
            watch.enter_download(patience);
        }
        Self { inner, reading: Reading(watch) }
    }
}

impl<B> http_body::Body for Relay<B>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut this = self.project();
        let polled = this.inner.as_mut().poll_frame(cx);
        follow(&polled, &*this.inner, &this.reading.0);
        polled.map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// The upstream's body on its way to the client.
pub(crate) struct Download {
    inner: Reply<Upload>,
    watch: Arc<Watch>,
    /// What the request holds of limits on calls in flight, until the last byte is through.
    permit: Option<Permit>,
    expectation: Option<Arc<Expectation>>,
}

impl Download {
    pub(crate) fn new(
        inner: Reply<Upload>,
        watch: Arc<Watch>,
        permit: Option<Permit>,
        expectation: Option<Arc<Expectation>>,
    ) -> Self {
        let mut download = Self { inner, watch, permit, expectation };
        if http_body::Body::is_end_stream(&download.inner) {
            download.permit = None;
            download.watch.enter(Phase::Idle);
        } else {
            download.watch.enter(Phase::Download);
        }
        download
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = http_body::Body::poll_frame(Pin::new(&mut self.inner), cx);
        if follow(&polled, &self.inner, &self.watch) {
            self.permit = None;
        }
        polled
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        if let Some(expectation) = &self.expectation {
            expectation.abandon();
        }
    }
}

/// The client's body on its way to the upstream.
pub(crate) struct Upload {
    inner: Incoming,
    /// `None` where there is no body to watch.
    watch: Option<Arc<Watch>>,
    left: u64,
    expectation: Option<(Arc<Expectation>, Pin<Box<Sleep>>)>,
}

/// Why a request's body ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadError {
    #[error("the body is larger than the cap")]
    TooLarge,
    #[error("the client broke off")]
    Broken(#[source] hyper::Error),
    #[error("the upstream has answered without the body")]
    NotWanted,
}

impl Upload {
    /// A body of nothing.
    pub(crate) fn none(inner: Incoming) -> Self {
        Self { inner, watch: None, left: 0, expectation: None }
    }

    /// A body of at most `cap` bytes, of which the watch was told, that waits for `expectation`, if there is one.
    pub(crate) fn new(inner: Incoming, watch: Arc<Watch>, cap: u64, expectation: Option<Arc<Expectation>>) -> Self {
        let expectation = expectation.map(|it| (it, Box::pin(tokio::time::sleep(CONTINUE_AFTER))));
        Self { inner, watch: Some(watch), left: cap, expectation }
    }
}

impl Drop for Upload {
    /// Ends the wait for what isn't read any more.
    fn drop(&mut self) {
        if let Some(watch) = &self.watch {
            watch.set_waits_on_client(false);
        }
    }
}

impl http_body::Body for Upload {
    type Data = Bytes;
    type Error = UploadError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UploadError>>> {
        let this = &mut *self;
        if let Some((expectation, patience)) = &mut this.expectation {
            expectation.waker.register(cx.waker());
            match expectation.state() {
                Expected::Abandoned => return Poll::Ready(Some(Err(UploadError::NotWanted))),
                Expected::Waiting if patience.as_mut().poll(cx).is_pending() => return Poll::Pending,
                Expected::Waiting => expectation.go(),
                Expected::Go => {}
            }
        }
        let polled = http_body::Body::poll_frame(Pin::new(&mut this.inner), cx);
        let Some(watch) = &this.watch else { return polled.map_err(UploadError::Broken) };
        watch.set_waits_on_client(polled.is_pending());
        match polled {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(data) = frame.data_ref() {
                    let size = data.remaining() as u64;
                    if size > this.left {
                        watch.set_fault(Fault::TooLarge);
                        return Poll::Ready(Some(Err(UploadError::TooLarge)));
                    }
                    this.left -= size;
                    watch.count_body(size);
                }
                if http_body::Body::is_end_stream(&this.inner) {
                    watch.enter_from(Phase::Upload, Phase::Await);
                    watch.set_uploading(false);
                } else {
                    watch.touch();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                watch.set_fault(Fault::Broken);
                Poll::Ready(Some(Err(UploadError::Broken(error))))
            }
            Poll::Ready(None) => {
                watch.enter_from(Phase::Upload, Phase::Await);
                watch.set_uploading(false);
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        http_body::Body::is_end_stream(&self.inner)
    }

    fn size_hint(&self) -> SizeHint {
        http_body::Body::size_hint(&self.inner)
    }
}

/// How long a body waits for the upstream's `100 Continue` before it goes all the same: not every server answers
/// `Expect` (RFC 9110 §10.1.1 asks not to wait for ever).
const CONTINUE_AFTER: Duration = Duration::from_secs(1);

/// What became of an `Expect: 100-continue`. The client's body isn't asked for before the upstream wants it.
#[derive(Debug, Default)]
pub(crate) struct Expectation {
    state: AtomicU8,
    waker: AtomicWaker,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    /// Nothing was heard.
    Waiting,
    /// The body is wanted.
    Go,
    /// The final answer came first.
    Abandoned,
}

impl Expectation {
    pub(crate) fn state(&self) -> Expected {
        match self.state.load(Ordering::Acquire) {
            0 => Expected::Waiting,
            1 => Expected::Go,
            _ => Expected::Abandoned,
        }
    }

    pub(crate) fn go(&self) {
        self.settle(1);
    }

    pub(crate) fn abandon(&self) {
        self.settle(2);
    }

    fn settle(&self, to: u8) {
        if self.state.compare_exchange(0, to, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.waker.wake();
        }
    }
}
