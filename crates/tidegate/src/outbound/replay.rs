//! A request's body that can be sent again.

#[cfg(test)]
mod tests;

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use tidegate_core::retry::Unreplayable;

use super::answer::ahead;

/// What a call keeps of its request's body, so that another attempt can send it from the start.
///
/// The first attempt streams the body; up to `limit` bytes of it are kept on the way. Beyond, they are let go and the
/// body is sent once, never more than one frame of it in memory. Another attempt sends what was kept and then streams
/// on where the last one stopped: it has the whole body, or there is no other attempt.
///
/// Cheap to clone; clones are the same.
pub struct Replay<B>(Arc<Mutex<Source<B>>>);

struct Source<B> {
    /// What was read ahead and is too much to be kept.
    next: Option<Frame<Bytes>>,
    /// What is still to come of the caller's body.
    rest: Option<Pin<Box<B>>>,
    kept: BytesMut,
    trailers: Option<HeaderMap>,
    limit: usize,
    /// Why it can't be sent from the start any more.
    spoilt: Option<Unreplayable>,
    /// The attempt that may stream, counted from 1.
    attempt: u64,
    /// How many attempts there were, those included that had no need to stream.
    made: u64,
    broken: bool,
    /// How often an attempt was given something of it.
    moved: u64,
    /// Whether the attempt that streams wants more than the caller has sent.
    waits: bool,
    /// Who is told when it moves.
    watcher: Option<Waker>,
}

/// A request's body as one attempt sends it.
pub struct ReplayBody<B>(Kind<B>);

enum Kind<B> {
    Whole { data: Option<Bytes>, trailers: Option<HeaderMap> },
    Shared { source: Arc<Mutex<Source<B>>>, attempt: u64, head: Option<Bytes>, ended: bool },
}

/// Why a body ended early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError<E> {
    /// The caller's body did.
    #[error(transparent)]
    Caller(E),
    /// Another attempt has taken its place.
    #[error("another attempt sends the body now")]
    Superseded,
}

impl<B: Body<Data = Bytes>> Replay<B> {
    /// Keeps up to `limit` bytes of this body. One that says that it is longer isn't kept at all.
    pub fn new(body: B, limit: usize) -> Self {
        let fits = body.size_hint().lower() <= limit as u64;
        let source = Source {
            next: None,
            rest: (!body.is_end_stream()).then(|| Box::pin(body)),
            kept: BytesMut::new(),
            trailers: None,
            limit: if fits { limit } else { 0 },
            spoilt: None,
            attempt: 0,
            made: 0,
            broken: false,
            moved: 0,
            waits: false,
            watcher: None,
        };
        Self(Arc::new(Mutex::new(source)))
    }

    /// Reads ahead what is kept of the body: all of it, or as much as the limit lets it keep, and one frame besides. The
    /// whole body if that is at hand then.
    ///
    /// Dropped before it is done, it has lost nothing: an attempt goes on from there.
    pub async fn read_ahead(&self) -> Option<Bytes> {
        poll_fn(|context| {
            let mut source = lock(&self.0);
            source.poll_ahead(context).map(|is_whole| is_whole.then(|| Bytes::copy_from_slice(&source.kept)))
        })
        .await
    }

    /// How many bytes the body has at least, as far as is known.
    pub fn size(&self) -> u64 {
        let source = lock(&self.0);
        source.size_hint().lower().saturating_add(source.kept.len() as u64)
    }

    /// The body for one more attempt, from the start. One that was made before ends with an error, unless all of the body
    /// [is kept](Self::is_whole).
    ///
    /// # Errors
    /// The start of the body is gone, so that only a part of it could be sent.
    pub fn attempt(&self) -> Result<ReplayBody<B>, Unreplayable> {
        let mut source = lock(&self.0);
        if let Some(why) = source.spoilt {
            return Err(why);
        }
        source.made += 1;
        let head = (!source.kept.is_empty()).then(|| Bytes::copy_from_slice(&source.kept));
        if source.has_ended() {
            return Ok(ReplayBody(Kind::Whole { data: head, trailers: source.trailers.clone() }));
        }
        source.attempt += 1;
        source.waits = false;
        let attempt = source.attempt;
        drop(source);
        Ok(ReplayBody(Kind::Shared { source: Arc::clone(&self.0), attempt, head, ended: false }))
    }

    /// How many attempts there were so far.
    pub fn attempts(&self) -> u64 {
        lock(&self.0).made
    }

    /// Whether all of the body has come and is kept, so that attempts can send it beside each other.
    pub fn is_whole(&self) -> bool {
        let source = lock(&self.0);
        source.spoilt.is_none() && source.has_ended()
    }

    /// Whether an attempt was given more of the body than was `seen`; that is seen then. Else the next time wakes whom asked
    /// last.
    pub(super) fn poll_moved(&self, seen: &mut u64, context: &mut Context<'_>) -> Poll<()> {
        let mut source = lock(&self.0);
        if source.moved != *seen {
            *seen = source.moved;
            return Poll::Ready(());
        }
        if !source.has_ended() {
            match &mut source.watcher {
                Some(watcher) => watcher.clone_from(context.waker()),
                watcher => *watcher = Some(context.waker().clone()),
            }
        }
        Poll::Pending
    }

    /// Whether the attempt that streams it is held up by the caller: it wants more than there is.
    pub(super) fn waits(&self) -> bool {
        lock(&self.0).waits
    }

    /// Why the body can't be sent again, if it can't.
    pub fn unreplayable(&self) -> Option<Unreplayable> {
        lock(&self.0).spoilt
    }

    /// Whether it was the caller's body that broke off.
    pub fn is_broken(&self) -> bool {
        lock(&self.0).broken
    }
}

impl<B> Clone for Replay<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B> fmt::Debug for Replay<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = lock(&self.0);
        f.debug_struct("Replay")
            .field("kept", &source.kept.len())
            .field("spoilt", &source.spoilt)
            .finish_non_exhaustive()
    }
}

impl<B> ReplayBody<B> {
    /// A body that is at hand as a whole.
    pub fn whole(bytes: impl Into<Bytes>) -> Self {
        Self(Kind::Whole { data: Some(bytes.into()).filter(|bytes| !bytes.is_empty()), trailers: None })
    }
}

impl<B> fmt::Debug for ReplayBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayBody").finish_non_exhaustive()
    }
}

impl<B: Body<Data = Bytes>> Source<B> {
    /// Whether nothing of the caller's body is still to come.
    fn has_ended(&self) -> bool {
        self.next.is_none() && self.rest.as_ref().is_none_or(|rest| rest.is_end_stream())
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if let Some(frame) = self.next.take() {
            self.keep(&frame);
            return Poll::Ready(Some(Ok(frame)));
        }
        let Some(rest) = &mut self.rest else {
            return Poll::Ready(self.trailers.clone().map(|trailers| Ok(Frame::trailers(trailers))));
        };
        let Poll::Ready(polled) = rest.as_mut().poll_frame(context) else { return Poll::Pending };
        match &polled {
            None => self.rest = None,
            Some(Err(_)) => self.broke_off(),
            Some(Ok(frame)) => self.keep(frame),
        }
        Poll::Ready(polled)
    }

    /// Reads on while what comes can be kept; whether that is all of it.
    fn poll_ahead(&mut self, context: &mut Context<'_>) -> Poll<bool> {
        loop {
            if self.next.is_some() || self.spoilt.is_some() || self.limit == 0 {
                return Poll::Ready(false);
            }
            let Some(rest) = &mut self.rest else { return Poll::Ready(true) };
            match rest.as_mut().poll_frame(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => self.rest = None,
                Poll::Ready(Some(Err(_))) => self.broke_off(),
                Poll::Ready(Some(Ok(frame))) if self.kept.len() + size(&frame) <= self.limit => self.keep(&frame),
                Poll::Ready(Some(Ok(frame))) => self.next = Some(frame),
            }
        }
    }

    /// How much is to come besides what is kept.
    fn size_hint(&self) -> SizeHint {
        let rest = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), |rest| rest.size_hint());
        let next = self.next.as_ref().and_then(Frame::data_ref).map_or(0, |data| data.len() as u64);
        ahead(next, &rest)
    }

    fn moves(&mut self) {
        self.moved += 1;
        if let Some(watcher) = &self.watcher {
            watcher.wake_by_ref();
        }
    }

    fn broke_off(&mut self) {
        self.rest = None;
        self.broken = true;
        self.spoil(Unreplayable::OneShotBody);
    }

    fn keep(&mut self, frame: &Frame<Bytes>) {
        if let Some(trailers) = frame.trailers_ref() {
            // Nothing comes after them (RFC 9110 §6.5).
            self.rest = None;
            if self.kept.len() + size(frame) > self.limit {
                self.spoil(Unreplayable::BodyTooLarge);
            } else {
                self.trailers = Some(trailers.clone());
            }
        } else if let Some(data) = frame.data_ref().filter(|data| !data.is_empty()) {
            if self.kept.len() + size(frame) > self.limit {
                self.spoil(Unreplayable::BodyTooLarge);
            } else {
                // Copied, because a frame may hold on to a much larger buffer.
                self.kept.extend_from_slice(data);
            }
        }
    }

    fn spoil(&mut self, why: Unreplayable) {
        self.spoilt.get_or_insert(why);
        self.limit = 0;
        self.kept = BytesMut::new();
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
            Kind::Whole { data, trailers } => {
                let data = data.take().map(Frame::data);
                Poll::Ready(data.or_else(|| trailers.take().map(Frame::trailers)).map(Ok))
            }
            Kind::Shared { ended: true, .. } => Poll::Ready(None),
            Kind::Shared { source, attempt, head, ended } => {
                let mut source = lock(source);
                if source.attempt != *attempt {
                    *ended = true;
                    return Poll::Ready(Some(Err(ReplayError::Superseded)));
                }
                if let Some(head) = head.take() {
                    source.moves();
                    return Poll::Ready(Some(Ok(Frame::data(head))));
                }
                let polled = source.poll(context);
                source.waits = polled.is_pending();
                let polled = ready!(polled);
                source.moves();
                *ended = !matches!(&polled, Some(Ok(frame)) if frame.is_data());
                Poll::Ready(polled.map(|frame| frame.map_err(ReplayError::Caller)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Whole { data, trailers } => data.is_none() && trailers.is_none(),
            Kind::Shared { ended: true, .. } => true,
            Kind::Shared { source, attempt, head, .. } => {
                let source = lock(source);
                source.attempt == *attempt
                    && head.is_none()
                    && source.trailers.is_none()
                    && !source.broken
                    && source.has_ended()
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Whole { data, .. } => SizeHint::with_exact(data.as_ref().map_or(0, |data| data.len() as u64)),
            Kind::Shared { source, head, .. } => {
                let head = head.as_ref().map_or(0, |head| head.len() as u64);
                ahead(head, &lock(source).size_hint())
            }
        }
    }
}

/// What a frame adds to what is kept.
fn size(frame: &Frame<Bytes>) -> usize {
    let trailers = frame.trailers_ref().into_iter().flatten();
    let trailers: usize = trailers.map(|(name, value)| name.as_str().len() + value.len()).sum();
    frame.data_ref().map_or(0, Bytes::len) + trailers
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
