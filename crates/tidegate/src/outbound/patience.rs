//! How long there is patience with an attempt.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use tokio::time::sleep;

use super::Replay;

/// Waits for what an attempt comes to, until nothing of its request's body has moved for as long as there is `patience`,
/// and never for longer than `time_left`. The attempt is pinned by its caller: taken by value it would be held twice, as it
/// came and as it is pinned.
///
/// # Errors
/// For how long nothing had moved in the end.
pub(super) async fn within<T, B: Body<Data = Bytes>>(
    mut attempt: Pin<&mut impl Future<Output = T>>,
    body: &Replay<B>,
    patience: Duration,
    time_left: Duration,
) -> Result<T, Duration> {
    let first = patience.min(time_left);
    let mut timer = pin!(sleep(first));
    let began_at = timer.deadline() - first;
    let (end, mut quiet_until) = (began_at + time_left, began_at + patience);
    let mut seen = 0;
    poll_fn(|context| {
        if let Poll::Ready(ended) = attempt.as_mut().poll(context) {
            return Poll::Ready(Ok(ended));
        }
        while body.poll_moved(&mut seen, context).is_ready() {
            quiet_until = sleep(patience).deadline();
            timer.as_mut().reset(quiet_until.min(end));
        }
        ready!(timer.as_mut().poll(context));
        Poll::Ready(Err(patience.saturating_sub(quiet_until.saturating_duration_since(end))))
    })
    .await
}
