//! The body of a reply that may be stored. It is read whole if it is small enough and ends in time. Otherwise it is
//! passed on as it arrives, and nothing of it is lost.

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

use super::super::reply_body::{add_prefix_size, take_frame};

/// The longest pause of a body that is collected. A longer pause means a stream, and the caller reads it as it arrives.
const MAX_PAUSE: Duration = Duration::from_secs(1);

pin_project! {
    /// The body of a reply from a cache: stored, or from the provider.
    pub struct CacheBody<B: Body> {
        #[pin]
        inner: CacheBodyInner<B>,
    }
}

pin_project! {
    #[project = InnerProjection]
    enum CacheBodyInner<B: Body> {
        Whole { bytes: Bytes },
        PassedThrough { #[pin] body: B },
        PartlyRead { begun: PartlyReadBody<B> },
    }
}

/// A body that is partly read.
struct PartlyReadBody<B: Body> {
    buffered: Bytes,
    /// The first frame after `buffered`, which didn't fit into it, or the error that ended it.
    next_frame: Option<Result<Frame<Bytes>, B::Error>>,
    remaining: Pin<Box<B>>,
}

impl<B: Body> CacheBody<B> {
    pub(super) fn from_bytes(bytes: Bytes) -> Self {
        Self { inner: CacheBodyInner::Whole { bytes } }
    }

    pub(super) fn pass_through(body: B) -> Self {
        Self { inner: CacheBodyInner::PassedThrough { body } }
    }

    /// Returns the body, unless it has already broken off.
    ///
    /// # Errors
    /// The error that broke it off. The part before it is dropped.
    pub fn unless_broken(mut self) -> Result<Self, B::Error> {
        if let CacheBodyInner::PartlyRead { begun } = &mut self.inner
            && let Some(Err(error)) = begun.next_frame.take_if(|next| next.is_err())
        {
            return Err(error);
        }
        Ok(self)
    }
}

impl<B: Body> Default for CacheBody<B> {
    fn default() -> Self {
        Self::from_bytes(Bytes::new())
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
            InnerProjection::Whole { bytes } => Poll::Ready(take_frame(bytes).map(Ok)),
            InnerProjection::PassedThrough { body } => body.poll_frame(context),
            InnerProjection::PartlyRead { begun } => {
                match take_frame(&mut begun.buffered).map(Ok).or_else(|| begun.next_frame.take()) {
                    Some(frame) => Poll::Ready(Some(frame)),
                    None => begun.remaining.as_mut().poll_frame(context),
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            CacheBodyInner::Whole { bytes } => bytes.is_empty(),
            CacheBodyInner::PassedThrough { body } => body.is_end_stream(),
            CacheBodyInner::PartlyRead { begun } => {
                begun.buffered.is_empty() && begun.next_frame.is_none() && begun.remaining.is_end_stream()
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            CacheBodyInner::Whole { bytes } => SizeHint::with_exact(bytes.len() as u64),
            CacheBodyInner::PassedThrough { body } => body.size_hint(),
            // With the size of what arrived, a caller would take that for the whole body.
            CacheBodyInner::PartlyRead { begun: PartlyReadBody { next_frame: Some(Err(_)), .. } } => SizeHint::new(),
            CacheBodyInner::PartlyRead { begun } => {
                let next_frame = begun.next_frame.as_ref().and_then(|next| next.as_ref().ok()?.data_ref());
                let buffered = begun.buffered.len() + next_frame.map_or(0, Bytes::len);
                add_prefix_size(buffered, begun.remaining.size_hint())
            }
        }
    }
}

/// The limit of the bytes that all bodies being collected take together.
pub(super) struct BufferCapacity {
    pub reserved: AtomicU64,
    max: u64,
}

impl BufferCapacity {
    pub(super) fn new(max: u64) -> Arc<Self> {
        Arc::new(Self { reserved: AtomicU64::new(0), max })
    }
}

/// The bytes that one body takes of the capacity; given back when dropped.
struct BufferReservation {
    capacity: Arc<BufferCapacity>,
    reserved: u64,
}

impl BufferReservation {
    /// Reserves more bytes. Returns false, and reserves nothing, if the capacity is exhausted.
    fn reserve(&mut self, bytes: usize) -> bool {
        let bytes = bytes as u64;
        let before = self.capacity.reserved.fetch_add(bytes, Ordering::Relaxed);
        let fits = before.saturating_add(bytes) <= self.capacity.max;
        if fits {
            self.reserved += bytes;
        } else {
            self.capacity.reserved.fetch_sub(bytes, Ordering::Relaxed);
        }
        fits
    }
}

impl Drop for BufferReservation {
    fn drop(&mut self) {
        self.capacity.reserved.fetch_sub(self.reserved, Ordering::Relaxed);
    }
}

/// Reads a body of at most `max` bytes within `time_left`.
///
/// # Errors
/// The body is too long, too slow, broken, or has frames other than data. It is to be passed on from its beginning.
pub(super) async fn collect<B: Body<Data = Bytes>>(
    body: B,
    max: usize,
    time_left: Duration,
    capacity: &Arc<BufferCapacity>,
) -> Result<Bytes, CacheBody<B>> {
    if body.size_hint().lower() > max as u64 {
        return Err(CacheBody::pass_through(body));
    }
    let mut reservation = BufferReservation { capacity: Arc::clone(capacity), reserved: 0 };
    let mut remaining = Box::pin(body);
    let mut buffered = Vec::new();
    let reading = async {
        loop {
            let frame = tokio::time::timeout(MAX_PAUSE, poll_fn(|context| remaining.as_mut().poll_frame(context)));
            let frame = frame.await.ok()?;
            match frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
                Some(data) if data.len() <= max - buffered.len() && reservation.reserve(data.len()) => {
                    buffered.extend_from_slice(data);
                }
                _ => return Some(frame),
            }
        }
    };
    let last_read = tokio::time::timeout(time_left, reading).await.ok().flatten();
    let buffered = Bytes::from(buffered.into_boxed_slice());
    if let Some(None) = last_read {
        return Ok(buffered);
    }
    let begun = PartlyReadBody { buffered, next_frame: last_read.flatten(), remaining };
    Err(CacheBody { inner: CacheBodyInner::PartlyRead { begun } })
}
