//! The timeout of an attempt without progress.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use tokio::time::sleep;

use super::ReplayBuffer;

/// Runs an attempt until nothing of its request's body has moved for `progress_timeout`, and never for longer than
/// `time_left`. The caller pins the attempt: by value, it would be held twice, before and after it is pinned.
///
/// # Errors
/// The time for which nothing had moved at the end.
pub(super) async fn with_progress_timeout<T, B: Body<Data = Bytes>>(
    mut attempt: Pin<&mut impl Future<Output = T>>,
    body: &ReplayBuffer<B>,
    progress_timeout: Duration,
    time_left: Duration,
) -> Result<T, Duration> {
    let first_wait = progress_timeout.min(time_left);
    let mut timer = pin!(sleep(first_wait));
    let started_at = timer.deadline() - first_wait;
    let (ends_at, mut progress_deadline) = (started_at + time_left, started_at + progress_timeout);
    let mut seen_progress = 0;
    poll_fn(|context| {
        if let Poll::Ready(ended) = attempt.as_mut().poll(context) {
            return Poll::Ready(Ok(ended));
        }
        while body.poll_progress(&mut seen_progress, context).is_ready() {
            progress_deadline = sleep(progress_timeout).deadline();
            timer.as_mut().reset(progress_deadline.min(ends_at));
        }
        ready!(timer.as_mut().poll(context));
        Poll::Ready(Err(progress_timeout.saturating_sub(progress_deadline.saturating_duration_since(ends_at))))
    })
    .await
}
