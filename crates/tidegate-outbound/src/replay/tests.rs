//! Bodies that fail, grow, are shared and are sent again.

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
async fn every_attempt_sends_the_same_body() {
    let replay = ReplayBuffer::new(chunks(&["one ", "", "two ", "three"]), 13);
    for _ in 0..3 {
        assert_eq!(read(replay.attempt_body().unwrap()).await.unwrap().0, "one two three");
    }
    assert_eq!(replay.unreplayable_reason(), None);
}

#[tokio::test]
async fn a_partly_read_body_is_replayed_whole() {
    let replay = ReplayBuffer::new(chunks(&["one ", "two ", "three"]), 64);
    for stop in [0, 1, 2, 1] {
        let mut body = replay.attempt_body().unwrap();
        for _ in 0..stop {
            body.frame().await.unwrap().unwrap();
        }
    }
    assert_eq!(read(replay.attempt_body().unwrap()).await.unwrap().0, "one two three");
}

#[tokio::test]
async fn an_oversized_body_is_sent_once_and_whole() {
    for limit in [0, 4, 12] {
        let replay = ReplayBuffer::new(chunks(&["one ", "two ", "three"]), limit);
        drop(replay.attempt_body().unwrap());
        assert_eq!(replay.unreplayable_reason(), None, "as long as nothing was read, nothing is lost");
        assert_eq!(read(replay.attempt_body().unwrap()).await.unwrap().0, "one two three");
        assert_eq!(replay.attempt_body().unwrap_err(), UnreplayableReason::BodyTooLarge);
        assert_eq!(replay.unreplayable_reason(), Some(UnreplayableReason::BodyTooLarge));
    }
    let long = ReplayBuffer::new(Full::new(Bytes::from_static(b"longer")), 5);
    let mut body = long.attempt_body().unwrap();
    assert_eq!(body.size_hint().exact(), Some(6));
    body.frame().await.unwrap().unwrap();
    assert_eq!(long.attempt_body().unwrap_err(), UnreplayableReason::BodyTooLarge);
}

#[tokio::test]
async fn a_superseded_attempt_reads_no_further() {
    let replay = ReplayBuffer::new(chunks(&["one ", "two"]), 64);
    let mut first = replay.attempt_body().unwrap();
    first.frame().await.unwrap().unwrap();
    let second = replay.attempt_body().unwrap();
    assert_eq!(first.frame().await.unwrap().unwrap_err(), ReplayError::Superseded);
    assert!(first.frame().await.is_none());
    assert_eq!(read(second).await.unwrap().0, "one two");
}

#[tokio::test]
async fn a_broken_body_is_not_sent_again() {
    let replay = ReplayBuffer::new(frames(vec![Ok(Frame::data(Bytes::from_static(b"half"))), Err("gone")]), 64);
    assert_eq!(read(replay.attempt_body().unwrap()).await.unwrap_err(), "gone");
    assert!(replay.is_broken());
    assert_eq!(replay.attempt_body().unwrap_err(), UnreplayableReason::OneShotBody);
}

#[tokio::test]
async fn trailers_are_replayed() {
    let trailers = HeaderMap::from_iter([(http::header::ETAG, http::HeaderValue::from_static("x"))]);
    let body =
        frames::<Infallible>(vec![Ok(Frame::data(Bytes::from_static(b"data"))), Ok(Frame::trailers(trailers.clone()))]);
    let replay = ReplayBuffer::new(body, 64);
    for _ in 0..3 {
        assert_eq!(
            read(replay.attempt_body().unwrap()).await.unwrap(),
            (Bytes::from_static(b"data"), Some(trailers.clone()))
        );
    }
}

#[tokio::test]
async fn an_empty_body_stays_empty_when_replayed() {
    let replay = ReplayBuffer::new(Full::new(Bytes::new()), 0);
    for _ in 0..3 {
        let body = replay.attempt_body().unwrap();
        assert!(body.is_end_stream());
        assert_eq!(body.size_hint().exact(), Some(0));
        assert_eq!(read(body).await.unwrap().0, "");
    }
}

#[tokio::test]
async fn a_body_read_ahead_is_still_sent() {
    for (limit, whole) in [(13, true), (64, true), (12, false), (4, false), (3, false)] {
        let replay = ReplayBuffer::new(chunks(&["one ", "", "two ", "three"]), limit);
        let read_ahead = replay.read_ahead().await;
        assert_eq!(read_ahead.is_some(), whole, "{limit}");
        assert!(read_ahead.is_none_or(|body| body == "one two three"));
        assert!(replay.0.lock().buffered.len() <= limit);
        assert_eq!(
            replay.min_size(),
            if limit == 12 || whole {
                13
            } else if limit == 4 {
                8
            } else {
                4
            }
        );
        assert_eq!(replay.read_ahead().await.is_some(), whole, "once more");
        drop(replay.attempt_body().unwrap());
        let body = replay.attempt_body().unwrap();
        assert_eq!(body.size_hint().lower(), replay.min_size());
        assert!(!body.is_end_stream());
        assert_eq!(read(body).await.unwrap().0, "one two three", "{limit}");
        assert_eq!(replay.attempt_body().is_ok(), whole);
    }
}

#[tokio::test]
async fn declared_oversized_bodies_are_not_read_ahead() {
    let replay = ReplayBuffer::new(Full::new(Bytes::from_static(b"longer")), 5);
    assert_eq!((replay.read_ahead().await, replay.min_size()), (None, 6));
    assert!(replay.0.lock().next_frame.is_none(), "nor is any of it");
    assert_eq!(read(replay.attempt_body().unwrap()).await.unwrap().0, "longer");
}

#[tokio::test]
async fn a_body_broken_during_read_ahead_is_unreplayable() {
    let replay = ReplayBuffer::new(frames(vec![Ok(Frame::data(Bytes::from_static(b"half"))), Err("gone")]), 64);
    assert_eq!(replay.read_ahead().await, None);
    assert!(replay.is_broken() && replay.attempt_body().is_err());
}

#[tokio::test]
async fn a_complete_body_serves_attempts_in_parallel() {
    let mut trailers = HeaderMap::new();
    trailers.insert("checksum", http::HeaderValue::from_static("1"));
    let replay = ReplayBuffer::new(
        frames::<Infallible>(vec![
            Ok(Frame::data(Bytes::from_static(b"one "))),
            Ok(Frame::data(Bytes::from_static(b"two"))),
            Ok(Frame::trailers(trailers.clone())),
        ]),
        64,
    );
    let mut first = replay.attempt_body().unwrap();
    first.frame().await.unwrap().unwrap();
    assert!(!replay.is_complete());
    first.frame().await.unwrap().unwrap();
    first.frame().await.unwrap().unwrap();
    assert!(replay.is_complete());
    let (second, third) = (replay.attempt_body().unwrap(), replay.attempt_body().unwrap());
    assert_eq!((second.size_hint().exact(), second.is_end_stream()), (Some(7), false));
    for body in [second, third] {
        assert_eq!(read(body).await.unwrap(), (Bytes::from_static(b"one two"), Some(trailers.clone())));
    }
    assert!(first.frame().await.is_none(), "nobody has taken its place");
    assert_eq!(replay.attempt_count(), 3);
}

#[tokio::test]
async fn a_known_body_length_is_preserved() {
    let replay = ReplayBuffer::new(Full::new(Bytes::from_static(b"sized")), 64);
    for _ in 0..2 {
        let mut body = replay.attempt_body().unwrap();
        assert_eq!(body.size_hint().exact(), Some(5));
        body.frame().await.unwrap().unwrap();
        assert_eq!(body.size_hint().exact(), Some(0));
        assert!(body.is_end_stream());
    }
}

proptest! {
    #[test]
    fn every_started_attempt_sends_the_whole_body(
        parts in collection::vec(collection::vec(any::<u8>(), 0..20), 0..8),
        limit in 0_usize..100,
        stops in collection::vec(0_usize..10, 0..6),
        reads_ahead in any::<bool>(),
    ) {
        let whole = parts.concat();
        let body = frames::<Infallible>(parts.into_iter().map(|part| Ok(Frame::data(Bytes::from(part)))).collect());
        let replay = ReplayBuffer::new(body, limit);
        if reads_ahead {
            let read_ahead = replay.read_ahead().now_or_never().unwrap();
            prop_assert!(read_ahead.is_none_or(|body| body == whole));
        }
        for stop in stops.into_iter().chain([usize::MAX]) {
            let Ok(mut body) = replay.attempt_body() else {
                prop_assert!(whole.len() > limit);
                prop_assert!(replay.unreplayable_reason().is_some());
                return Ok(());
            };
            let mut read = Vec::new();
            for _ in 0..stop {
                let Some(frame) = body.frame().now_or_never().unwrap() else { break };
                read.extend_from_slice(&frame.unwrap().into_data().unwrap());
                prop_assert!(replay.0.lock().buffered.len() <= limit);
            }
            prop_assert!(whole.starts_with(&read));
            prop_assert!(stop < usize::MAX || read == whole);
        }
    }
}

/// Bytes that count the live instances of their type.
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
    let replay = ReplayBuffer::new(StreamBody::new(upload), 64 << 10);
    let mut body = replay.attempt_body().unwrap();
    let (mut read, mut peak) = (0_usize, 0);
    while let Some(frame) = body.frame().await {
        tokio::task::yield_now().await;
        let data = frame.unwrap().into_data().unwrap();
        read += data.len();
        peak = peak.max(LIVE.load(Ordering::Relaxed) + replay.0.lock().buffered.capacity());
    }
    assert_eq!(read, 1 << 30);
    assert!(peak <= 3 * ZEROES.len(), "{peak} bytes at once");
    assert_eq!(replay.attempt_body().unwrap_err(), UnreplayableReason::BodyTooLarge);
    assert_eq!(LIVE.load(Ordering::Relaxed), 0);
}
