//! The body of a reply that may be kept: read whole where it ends in time and is small enough, and else passed on as it
//! comes, with nothing of it lost.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

/// How long a body may pause and still be collected. What pauses longer is taken for a stream that its caller reads as
/// it comes.
const PAUSE: Duration = Duration::from_secs(1);

pin_project! {
    /// The body of a reply that came through a cache: the kept one, or the provider's.
    pub struct CacheBody<B: Body> {
        #[pin]
        inner: Inner<B>,
    }
}

pin_project! {
    #[project = InnerProjection]
    enum Inner<B: Body> {
        Whole { bytes: Bytes },
        Passed { #[pin] body: B },
        Begun { begun: Begun<B> },
    }
}

/// A body of which something was read already.
struct Begun<B: Body> {
    read: Bytes,
    /// What came after that and didn't belong to it any more.
    next: Option<Result<Frame<Bytes>, B::Error>>,
    rest: Pin<Box<B>>,
}

impl<B: Body> CacheBody<B> {
    pub(super) fn whole(bytes: Bytes) -> Self {
        Self { inner: Inner::Whole { bytes } }
    }

    pub(super) fn passed(body: B) -> Self {
        Self { inner: Inner::Passed { body } }
    }
}

impl<B: Body> Default for CacheBody<B> {
    fn default() -> Self {
        Self::whole(Bytes::new())
    }
}

impl<B: Body> fmt::Debug for CacheBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CacheBody").finish_non_exhaustive()
    }
}

impl<B: Body<Data = Bytes>> Body for CacheBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match self.project().inner.project() {
            InnerProjection::Whole { bytes } => Poll::Ready(take(bytes).map(Ok)),
            InnerProjection::Passed { body } => body.poll_frame(context),
            InnerProjection::Begun { begun } => match take(&mut begun.read).map(Ok).or_else(|| begun.next.take()) {
                Some(frame) => Poll::Ready(Some(frame)),
                None => begun.rest.as_mut().poll_frame(context),
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Whole { bytes } => bytes.is_empty(),
            Inner::Passed { body } => body.is_end_stream(),
            Inner::Begun { begun } => begun.read.is_empty() && begun.next.is_none() && begun.rest.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Whole { bytes } => SizeHint::with_exact(bytes.len() as u64),
            Inner::Passed { body } => body.size_hint(),
            Inner::Begun { begun } => {
                let next = begun.next.as_ref().and_then(|next| next.as_ref().ok()?.data_ref()).map_or(0, Bytes::len);
                let (read, rest) = ((begun.read.len() + next) as u64, begun.rest.size_hint());
                let mut hint = SizeHint::new();
                hint.set_lower(rest.lower().saturating_add(read));
                if let Some(upper) = rest.upper() {
                    hint.set_upper(upper.saturating_add(read));
                }
                hint
            }
        }
    }
}

fn take(bytes: &mut Bytes) -> Option<Frame<Bytes>> {
    (!bytes.is_empty()).then(|| Frame::data(std::mem::take(bytes)))
}

/// How many bytes all bodies that are being collected may take together.
pub(super) struct Room {
    taken: AtomicU64,
    max: u64,
}

impl Room {
    pub(super) fn new(max: u64) -> Arc<Self> {
        Arc::new(Self { taken: AtomicU64::new(0), max })
    }

    #[cfg(test)]
    pub(super) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }
}

/// What one body takes of the room; given back when dropped.
struct Share {
    room: Arc<Room>,
    taken: u64,
}

impl Share {
    /// Takes more; false, and nothing taken, if there is no more.
    fn grow(&mut self, bytes: usize) -> bool {
        let bytes = bytes as u64;
        let before = self.room.taken.fetch_add(bytes, Ordering::Relaxed);
        self.taken += bytes;
        if before.saturating_add(bytes) <= self.room.max {
            return true;
        }
        self.room.taken.fetch_sub(bytes, Ordering::Relaxed);
        self.taken -= bytes;
        false
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.room.taken.fetch_sub(self.taken, Ordering::Relaxed);
    }
}

/// What came of reading a body.
pub(super) enum Collected<B: Body> {
    /// All of it.
    Whole(Bytes),
    /// It is too long, too slow, broken, or more than bytes: to be passed on from its beginning.
    Part(CacheBody<B>),
}

/// Reads a body of at most `max` bytes within `time`.
pub(super) async fn collect<B: Body<Data = Bytes>>(
    body: B,
    max: usize,
    time: Duration,
    room: &Arc<Room>,
) -> Collected<B> {
    if body.size_hint().lower() > max as u64 {
        return Collected::Part(CacheBody::passed(body));
    }
    let mut share = Share { room: Arc::clone(room), taken: 0 };
    let mut rest = Box::pin(body);
    let mut read = Vec::new();
    let reading = async {
        loop {
            let frame = tokio::time::timeout(PAUSE, poll_fn(|context| rest.as_mut().poll_frame(context)));
            match frame.await.ok()?.transpose() {
                Ok(None) => return Some(Ok(())),
                Ok(Some(frame)) => match frame.data_ref() {
                    Some(data) if data.len() <= max - read.len() && share.grow(data.len()) => {
                        read.extend_from_slice(data);
                    }
                    _ => return Some(Err(Ok(frame))),
                },
                Err(error) => return Some(Err(Err(error))),
            }
        }
    };
    let ended = tokio::time::timeout(time, reading).await.ok().flatten();
    let read = Bytes::from(read.into_boxed_slice());
    let next = match ended {
        Some(Ok(())) => return Collected::Whole(read),
        Some(Err(next)) => Some(next),
        None => None,
    };
    Collected::Part(CacheBody { inner: Inner::Begun { begun: Begun { read, next, rest } } })
}
