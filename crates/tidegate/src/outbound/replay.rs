//! A request's body that can be sent again.

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

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use http_body_util::{BodyExt, Full, StreamBody};
    use proptest::collection;
    use proptest::prelude::*;
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    type Scripted<E = Infallible> = StreamBody<futures_util::stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, E>>>>;

    fn frames<E>(frames: Vec<Result<Frame<Bytes>, E>>) -> Scripted<E> {
        StreamBody::new(futures_util::stream::iter(frames))
    }

    fn chunks(chunks: &[&'static str]) -> Scripted {
        frames(chunks.iter().map(|chunk| Ok(Frame::data(Bytes::from_static(chunk.as_bytes())))).collect())
    }

    async fn read<B: Body<Data = Bytes>>(body: ReplayBody<B>) -> Result<(Bytes, Option<HeaderMap>), B::Error>
    where
        B::Error: fmt::Debug,
    {
        let whole = body.collect().await.map_err(|error| match error {
            ReplayError::Caller(error) => error,
            ReplayError::Superseded => panic!("superseded"),
        })?;
        let trailers = whole.trailers().cloned();
        Ok((whole.to_bytes(), trailers))
    }

    #[tokio::test]
    async fn every_attempt_sends_the_same() {
        let replay = Replay::new(chunks(&["one ", "", "two ", "three"]), 13);
        for _ in 0..3 {
            assert_eq!(read(replay.attempt().unwrap()).await.unwrap().0, "one two three");
        }
        assert_eq!(replay.unreplayable(), None);
    }

    #[tokio::test]
    async fn an_attempt_that_stopped_midway_is_carried_on() {
        let replay = Replay::new(chunks(&["one ", "two ", "three"]), 64);
        for stop in [0, 1, 2, 1] {
            let mut body = replay.attempt().unwrap();
            for _ in 0..stop {
                body.frame().await.unwrap().unwrap();
            }
        }
        assert_eq!(read(replay.attempt().unwrap()).await.unwrap().0, "one two three");
    }

    #[tokio::test]
    async fn a_body_beyond_the_limit_is_sent_once_and_never_in_part() {
        for limit in [0, 4, 12] {
            let replay = Replay::new(chunks(&["one ", "two ", "three"]), limit);
            drop(replay.attempt().unwrap());
            assert_eq!(replay.unreplayable(), None, "as long as nothing was read, nothing is lost");
            assert_eq!(read(replay.attempt().unwrap()).await.unwrap().0, "one two three");
            assert_eq!(replay.attempt().unwrap_err(), Unreplayable::BodyTooLarge);
            assert_eq!(replay.unreplayable(), Some(Unreplayable::BodyTooLarge));
        }
        let long = Replay::new(Full::new(Bytes::from_static(b"longer")), 5);
        let mut body = long.attempt().unwrap();
        assert_eq!(body.size_hint().exact(), Some(6));
        body.frame().await.unwrap().unwrap();
        assert_eq!(long.attempt().unwrap_err(), Unreplayable::BodyTooLarge);
    }

    #[tokio::test]
    async fn the_earlier_attempt_cannot_take_from_the_later() {
        let replay = Replay::new(chunks(&["one ", "two"]), 64);
        let mut first = replay.attempt().unwrap();
        first.frame().await.unwrap().unwrap();
        let second = replay.attempt().unwrap();
        assert_eq!(first.frame().await.unwrap().unwrap_err(), ReplayError::Superseded);
        assert!(first.frame().await.is_none());
        assert_eq!(read(second).await.unwrap().0, "one two");
    }

    #[tokio::test]
    async fn a_body_that_broke_is_not_sent_again() {
        let replay = Replay::new(frames(vec![Ok(Frame::data(Bytes::from_static(b"half"))), Err("gone")]), 64);
        assert_eq!(read(replay.attempt().unwrap()).await.unwrap_err(), "gone");
        assert!(replay.is_broken());
        assert_eq!(replay.attempt().unwrap_err(), Unreplayable::OneShotBody);
    }

    #[tokio::test]
    async fn trailers_are_sent_again() {
        let trailers = HeaderMap::from_iter([(http::header::ETAG, http::HeaderValue::from_static("x"))]);
        let body = frames::<Infallible>(vec![
            Ok(Frame::data(Bytes::from_static(b"data"))),
            Ok(Frame::trailers(trailers.clone())),
        ]);
        let replay = Replay::new(body, 64);
        for _ in 0..3 {
            assert_eq!(
                read(replay.attempt().unwrap()).await.unwrap(),
                (Bytes::from_static(b"data"), Some(trailers.clone()))
            );
        }
    }

    #[tokio::test]
    async fn an_empty_body_is_empty_every_time() {
        let replay = Replay::new(Full::new(Bytes::new()), 0);
        for _ in 0..3 {
            let body = replay.attempt().unwrap();
            assert!(body.is_end_stream());
            assert_eq!(body.size_hint().exact(), Some(0));
            assert_eq!(read(body).await.unwrap().0, "");
        }
    }

    #[tokio::test]
    async fn what_is_read_ahead_is_sent_all_the_same() {
        for (limit, whole) in [(13, true), (64, true), (12, false), (4, false), (3, false)] {
            let replay = Replay::new(chunks(&["one ", "", "two ", "three"]), limit);
            let read_ahead = replay.read_ahead().await;
            assert_eq!(read_ahead.is_some(), whole, "{limit}");
            assert!(read_ahead.is_none_or(|body| body == "one two three"));
            assert!(lock(&replay.0).kept.len() <= limit);
            assert_eq!(
                replay.size(),
                if limit == 12 || whole {
                    13
                } else if limit == 4 {
                    8
                } else {
                    4
                }
            );
            assert_eq!(replay.read_ahead().await.is_some(), whole, "once more");
            drop(replay.attempt().unwrap());
            let body = replay.attempt().unwrap();
            assert_eq!(body.size_hint().lower(), replay.size());
            assert!(!body.is_end_stream());
            assert_eq!(read(body).await.unwrap().0, "one two three", "{limit}");
            assert_eq!(replay.attempt().is_ok(), whole);
        }
    }

    #[tokio::test]
    async fn what_says_that_it_is_too_long_is_not_read_ahead() {
        let replay = Replay::new(Full::new(Bytes::from_static(b"longer")), 5);
        assert_eq!((replay.read_ahead().await, replay.size()), (None, 6));
        assert!(lock(&replay.0).next.is_none(), "nor is any of it");
        assert_eq!(read(replay.attempt().unwrap()).await.unwrap().0, "longer");
    }

    #[tokio::test]
    async fn a_body_that_breaks_while_it_is_read_ahead() {
        let replay = Replay::new(frames(vec![Ok(Frame::data(Bytes::from_static(b"half"))), Err("gone")]), 64);
        assert_eq!(replay.read_ahead().await, None);
        assert!(replay.is_broken() && replay.attempt().is_err());
    }

    #[tokio::test]
    async fn what_is_kept_as_a_whole_is_sent_beside_itself() {
        let mut trailers = HeaderMap::new();
        trailers.insert("checksum", http::HeaderValue::from_static("1"));
        let replay = Replay::new(
            frames::<Infallible>(vec![
                Ok(Frame::data(Bytes::from_static(b"one "))),
                Ok(Frame::data(Bytes::from_static(b"two"))),
                Ok(Frame::trailers(trailers.clone())),
            ]),
            64,
        );
        let mut first = replay.attempt().unwrap();
        first.frame().await.unwrap().unwrap();
        assert!(!replay.is_whole());
        first.frame().await.unwrap().unwrap();
        first.frame().await.unwrap().unwrap();
        assert!(replay.is_whole());
        let (second, third) = (replay.attempt().unwrap(), replay.attempt().unwrap());
        assert_eq!((second.size_hint().exact(), second.is_end_stream()), (Some(7), false));
        for body in [second, third] {
            assert_eq!(read(body).await.unwrap(), (Bytes::from_static(b"one two"), Some(trailers.clone())));
        }
        assert!(first.frame().await.is_none(), "nobody has taken its place");
        assert_eq!(replay.attempts(), 3);
    }

    #[tokio::test]
    async fn a_known_length_stays_known() {
        let replay = Replay::new(Full::new(Bytes::from_static(b"sized")), 64);
        for _ in 0..2 {
            let mut body = replay.attempt().unwrap();
            assert_eq!(body.size_hint().exact(), Some(5));
            body.frame().await.unwrap().unwrap();
            assert_eq!(body.size_hint().exact(), Some(0));
            assert!(body.is_end_stream());
        }
    }

    proptest! {
        #[test]
        fn an_attempt_sends_all_or_there_is_none(
            parts in collection::vec(collection::vec(any::<u8>(), 0..20), 0..8),
            limit in 0_usize..100,
            stops in collection::vec(0_usize..10, 0..6),
            reads_ahead in any::<bool>(),
        ) {
            let whole = parts.concat();
            let body = frames::<Infallible>(parts.into_iter().map(|part| Ok(Frame::data(Bytes::from(part)))).collect());
            let replay = Replay::new(body, limit);
            if reads_ahead {
                let read_ahead = replay.read_ahead().now_or_never().unwrap();
                prop_assert!(read_ahead.is_none_or(|body| body == whole));
            }
            for stop in stops.into_iter().chain([usize::MAX]) {
                let Ok(mut body) = replay.attempt() else {
                    prop_assert!(whole.len() > limit);
                    prop_assert!(replay.unreplayable().is_some());
                    return Ok(());
                };
                let mut read = Vec::new();
                for _ in 0..stop {
                    let Some(frame) = body.frame().now_or_never().unwrap() else { break };
                    read.extend_from_slice(&frame.unwrap().into_data().unwrap());
                    prop_assert!(lock(&replay.0).kept.len() <= limit);
                }
                prop_assert!(whole.starts_with(&read));
                prop_assert!(stop < usize::MAX || read == whole);
            }
        }
    }

    /// Bytes that count how many of their kind live.
    struct Counted(&'static AtomicUsize, &'static [u8]);

    impl AsRef<[u8]> for Counted {
        fn as_ref(&self) -> &[u8] {
            self.1
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(self.1.len(), Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn a_gibibyte_streams_through_bounded_memory() {
        static ZEROES: [u8; 65_536] = [0; 65_536];
        static LIVE: AtomicUsize = AtomicUsize::new(0);
        let upload = futures_util::stream::iter((0..16_384).map(|_| {
            LIVE.fetch_add(ZEROES.len(), Ordering::Relaxed);
            Ok::<_, Infallible>(Frame::data(Bytes::from_owner(Counted(&LIVE, &ZEROES))))
        }));
        let replay = Replay::new(StreamBody::new(upload), 64 << 10);
        let mut body = replay.attempt().unwrap();
        let (mut read, mut peak) = (0_usize, 0);
        while let Some(frame) = body.frame().await {
            tokio::task::yield_now().await;
            let data = frame.unwrap().into_data().unwrap();
            read += data.len();
            peak = peak.max(LIVE.load(Ordering::Relaxed) + lock(&replay.0).kept.capacity());
        }
        assert_eq!(read, 1 << 30);
        assert!(peak <= 3 * ZEROES.len(), "{peak} bytes at once");
        assert_eq!(replay.attempt().unwrap_err(), Unreplayable::BodyTooLarge);
        assert_eq!(LIVE.load(Ordering::Relaxed), 0);
    }
}
