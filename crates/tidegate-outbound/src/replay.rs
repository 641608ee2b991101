//! A request's body that can be sent again.

#[cfg(test)]
mod tests;

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tidegate_core::retry::UnreplayableReason;

use super::reply_body::add_prefix_size;

/// A buffer of a call's request body, so that another attempt can send it from the start.
///
/// The first attempt streams the body, and up to `limit` bytes of it are buffered. If it is longer, the buffer is
/// dropped and the body is sent once, with at most one frame of it in memory. Another attempt sends the buffer and then
/// continues the stream where the last one stopped. So it sends the whole body, or there is no other attempt.
///
/// Cheap to clone: clones share the buffer.
pub(crate) struct ReplayBuffer<B>(Arc<Mutex<ReplayState<B>>>);

struct ReplayState<B> {
    /// The frame that was read ahead and exceeds the limit.
    next_frame: Option<Frame<Bytes>>,
    /// The part of the caller's body that hasn't been read.
    remaining: Option<Pin<Box<B>>>,
    buffered: BytesMut,
    trailers: Option<HeaderMap>,
    limit: usize,
    /// The reason why the body can't be sent from the start; `None` if it can.
    unreplayable_reason: Option<UnreplayableReason>,
    /// The number of the attempt that may stream, from 1.
    streaming_attempt: u64,
    /// The number of attempts, including those that sent only the buffer.
    attempt_count: u64,
    is_broken: bool,
    /// The number of times that an attempt received a part of the body.
    progress: u64,
    /// True if the streaming attempt waits for more of the caller's body.
    is_waiting_for_caller: bool,
    /// Wakes the task that waits for progress.
    progress_waker: Option<Waker>,
}

/// A request's body for one attempt.
pub struct ReplayBody<B>(ReplayBodyKind<B>);

enum ReplayBodyKind<B> {
    Buffered { data: Option<Bytes>, trailers: Option<HeaderMap> },
    Streaming { source: Arc<Mutex<ReplayState<B>>>, attempt: u64, head: Option<Bytes>, ended: bool },
}

/// The reason why a body ended early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError<E> {
    /// The caller's body failed.
    #[error(transparent)]
    Caller(E),
    /// Another attempt streams the body now.
    #[error("another attempt sends the body now")]
    Superseded,
}

impl<B: Body<Data = Bytes>> ReplayBuffer<B> {
    /// Returns a buffer of up to `limit` bytes of this body. Buffers nothing if the size hint of the body exceeds the
    /// limit.
    pub(crate) fn new(body: B, limit: usize) -> Self {
        let fits = body.size_hint().lower() <= limit as u64;
        let source = ReplayState {
            next_frame: None,
            remaining: (!body.is_end_stream()).then(|| Box::pin(body)),
            buffered: BytesMut::new(),
            trailers: None,
            limit: if fits { limit } else { 0 },
            unreplayable_reason: None,
            streaming_attempt: 0,
            attempt_count: 0,
            is_broken: false,
            progress: 0,
            is_waiting_for_caller: false,
            progress_waker: None,
        };
        Self(Arc::new(Mutex::new(source)))
    }

    /// Reads ahead all of the body that the limit allows to buffer, and at most one more frame. Returns the whole body
    /// if it is buffered then.
    ///
    /// Nothing is lost if this is cancelled: an attempt continues from there.
    pub(crate) async fn read_ahead(&self) -> Option<Bytes> {
        poll_fn(|context| {
            let mut source = self.0.lock();
            source.poll_read_ahead(context).map(|is_whole| is_whole.then(|| Bytes::copy_from_slice(&source.buffered)))
        })
        .await
    }

    /// Returns the least size of the body in bytes, as far as it is known.
    pub(crate) fn min_size(&self) -> u64 {
        let source = self.0.lock();
        source.size_hint().lower().saturating_add(source.buffered.len() as u64)
    }

    /// Returns the body for one more attempt, from the start. The body of an earlier attempt ends with an error, unless
    /// all of the body [is buffered](Self::is_complete).
    ///
    /// # Errors
    /// The start of the body is dropped, so that only a part of it could be sent.
    pub(crate) fn attempt_body(&self) -> Result<ReplayBody<B>, UnreplayableReason> {
        let mut source = self.0.lock();
        if let Some(why) = source.unreplayable_reason {
            return Err(why);
        }
        source.attempt_count += 1;
        let head = (!source.buffered.is_empty()).then(|| Bytes::copy_from_slice(&source.buffered));
        if source.has_ended() {
            return Ok(ReplayBody(ReplayBodyKind::Buffered { data: head, trailers: source.trailers.clone() }));
        }
        source.streaming_attempt += 1;
        source.is_waiting_for_caller = false;
        let attempt = source.streaming_attempt;
        drop(source);
        Ok(ReplayBody(ReplayBodyKind::Streaming { source: Arc::clone(&self.0), attempt, head, ended: false }))
    }

    pub(crate) fn attempt_count(&self) -> u64 {
        self.0.lock().attempt_count
    }

    /// Returns true if the whole body is buffered, so that several attempts can send it at the same time.
    pub(crate) fn is_complete(&self) -> bool {
        let source = self.0.lock();
        source.unreplayable_reason.is_none() && source.has_ended()
    }

    /// Ready if an attempt received more of the body since `seen_progress`, which is then updated. Otherwise the task
    /// that polled last is woken on the next progress.
    pub(super) fn poll_progress(&self, seen_progress: &mut u64, context: &mut Context<'_>) -> Poll<()> {
        let mut source = self.0.lock();
        if source.progress != *seen_progress {
            *seen_progress = source.progress;
            return Poll::Ready(());
        }
        if !source.has_ended() {
            let own_waker = context.waker();
            source.progress_waker.get_or_insert_with(|| own_waker.clone()).clone_from(own_waker);
        }
        Poll::Pending
    }

    pub(super) fn is_waiting_for_caller(&self) -> bool {
        self.0.lock().is_waiting_for_caller
    }

    pub(crate) fn unreplayable_reason(&self) -> Option<UnreplayableReason> {
        self.0.lock().unreplayable_reason
    }

    /// Returns true if the caller's body failed.
    pub(crate) fn is_broken(&self) -> bool {
        self.0.lock().is_broken
    }
}

impl<B> Clone for ReplayBuffer<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B> ReplayBody<B> {
    /// Returns a body of these bytes.
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Self {
        Self(ReplayBodyKind::Buffered { data: Some(bytes.into()).filter(|bytes| !bytes.is_empty()), trailers: None })
    }
}

impl<B> fmt::Debug for ReplayBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayBody").finish_non_exhaustive()
    }
}

impl<B: Body<Data = Bytes>> ReplayState<B> {
    /// Returns true if the whole body of the caller has been read.
    fn has_ended(&self) -> bool {
        self.next_frame.is_none() && self.remaining.as_ref().is_none_or(|rest| rest.is_end_stream())
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if let Some(frame) = self.next_frame.take() {
            self.push_frame(&frame);
            return Poll::Ready(Some(Ok(frame)));
        }
        let Some(remaining) = &mut self.remaining else {
            return Poll::Ready(self.trailers.clone().map(|trailers| Ok(Frame::trailers(trailers))));
        };
        let polled = ready!(remaining.as_mut().poll_frame(context));
        match &polled {
            None => self.remaining = None,
            Some(Err(_)) => self.record_broken(),
            Some(Ok(frame)) => self.push_frame(frame),
        }
        Poll::Ready(polled)
    }

    /// Reads while the frames can be buffered. Returns true if the whole body is then read.
    fn poll_read_ahead(&mut self, context: &mut Context<'_>) -> Poll<bool> {
        loop {
            if self.next_frame.is_some() || self.unreplayable_reason.is_some() || self.limit == 0 {
                return Poll::Ready(false);
            }
            let Some(remaining) = &mut self.remaining else { return Poll::Ready(true) };
            match ready!(remaining.as_mut().poll_frame(context)) {
                None => self.remaining = None,
                Some(Err(_)) => self.record_broken(),
                Some(Ok(frame)) if self.fits(&frame) => self.push_frame(&frame),
                Some(Ok(frame)) => self.next_frame = Some(frame),
            }
        }
    }

    /// Returns the size of the rest, without the buffer.
    fn size_hint(&self) -> SizeHint {
        let remaining = self.remaining.as_ref().map_or_else(|| SizeHint::with_exact(0), |rest| rest.size_hint());
        let next = self.next_frame.as_ref().and_then(Frame::data_ref).map_or(0, Bytes::len);
        add_prefix_size(next, remaining)
    }

    fn record_progress(&mut self) {
        self.progress += 1;
        if let Some(waker) = &self.progress_waker {
            waker.wake_by_ref();
        }
    }

    fn record_broken(&mut self) {
        self.remaining = None;
        self.is_broken = true;
        self.set_unreplayable(UnreplayableReason::OneShotBody);
    }

    fn push_frame(&mut self, frame: &Frame<Bytes>) {
        if frame.is_trailers() {
            // No frame follows trailers (RFC 9110 §6.5).
            self.remaining = None;
        }
        if !self.fits(frame) {
            self.set_unreplayable(UnreplayableReason::BodyTooLarge);
        } else if let Some(data) = frame.data_ref() {
            // Copied, because a frame may keep a much larger buffer alive.
            self.buffered.extend_from_slice(data);
        } else {
            self.trailers = frame.trailers_ref().cloned();
        }
    }

    /// Returns true if the limit allows to buffer this frame too.
    fn fits(&self, frame: &Frame<Bytes>) -> bool {
        let trailers = frame.trailers_ref().into_iter().flatten();
        let trailers: usize = trailers.map(|(name, value)| name.as_str().len() + value.len()).sum();
        self.buffered.len() + frame.data_ref().map_or(0, Bytes::len) + trailers <= self.limit
    }

    fn set_unreplayable(&mut self, reason: UnreplayableReason) {
        self.unreplayable_reason.get_or_insert(reason);
        self.limit = 0;
        self.buffered = BytesMut::new();
    }
}

impl<B: Body<Data = Bytes>> Body for ReplayBody<B> {
    type Data = Bytes;
    type Error = ReplayError<B::Error>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut self.0 {
            ReplayBodyKind::Buffered { data, trailers } => {
                let data = data.take().map(Frame::data);
                Poll::Ready(data.or_else(|| trailers.take().map(Frame::trailers)).map(Ok))
            }
            ReplayBodyKind::Streaming { ended: true, .. } => Poll::Ready(None),
            ReplayBodyKind::Streaming { source, attempt, head, ended } => {
                let mut source = source.lock();
                if source.streaming_attempt != *attempt {
                    *ended = true;
                    return Poll::Ready(Some(Err(ReplayError::Superseded)));
                }
                if let Some(head) = head.take() {
                    source.record_progress();
                    return Poll::Ready(Some(Ok(Frame::data(head))));
                }
                let polled = source.poll(context);
                source.is_waiting_for_caller = polled.is_pending();
                let polled = ready!(polled);
                source.record_progress();
                *ended = !matches!(&polled, Some(Ok(frame)) if frame.is_data());
                Poll::Ready(polled.map(|frame| frame.map_err(ReplayError::Caller)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            ReplayBodyKind::Buffered { data, trailers } => data.is_none() && trailers.is_none(),
            ReplayBodyKind::Streaming { ended: true, .. } => true,
            ReplayBodyKind::Streaming { source, attempt, head, .. } => {
                let source = source.lock();
                source.streaming_attempt == *attempt
                    && head.is_none()
                    && source.trailers.is_none()
                    && !source.is_broken
                    && source.has_ended()
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            ReplayBodyKind::Buffered { data, .. } => {
                SizeHint::with_exact(data.as_ref().map_or(0, |data| data.len() as u64))
            }
            ReplayBodyKind::Streaming { source, head, .. } => {
                add_prefix_size(head.as_ref().map_or(0, Bytes::len), source.lock().size_hint())
            }
        }
    }
}
