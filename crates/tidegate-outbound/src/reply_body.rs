//! The body of a reply on its way to the caller.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use tidegate_core::Clock;
use tidegate_policy::Secret;
use tidegate_runtime::clock::SystemClock;
use tidegate_store::{Memory, Store};

use super::InFlightGuard;
use super::cost::CostReader;
use super::reply_headers::remove_headers_with_secret;

/// The body of a provider's reply. Its call is in flight until the body ends or is dropped. Trailers that repeat the
/// credential are removed.
pub struct OutboundBody<B, S: Store = Memory, C: Clock = SystemClock> {
    peeked: PeekedBody<B>,
    in_flight_guard: Option<InFlightGuard<S, C>>,
    /// Reads the cost that the reply states, to report it at the end.
    cost_reader: Option<CostReader>,
}

/// A body of which a part has been read ahead.
pub(super) struct PeekedBody<B> {
    pub read_ahead: Bytes,
    trailers: Option<Frame<Bytes>>,
    remaining: Option<Pin<Box<B>>>,
    /// The credential that the request was sent with.
    pub secret: Option<Arc<Secret>>,
}

impl<B: Body<Data = Bytes>> PeekedBody<B> {
    /// Returns the body without reading ahead.
    pub(super) fn unread(body: B) -> Self {
        let remaining = (!body.is_end_stream()).then(|| Box::pin(body));
        Self { read_ahead: Bytes::new(), trailers: None, remaining, secret: None }
    }

    /// Reads a body ahead until it ends, until more than `limit` bytes of it are read, or for `max_time`.
    pub(super) async fn read(body: B, limit: usize, max_time: Option<Duration>) -> Result<Self, B::Error> {
        let mut peeked = Self::unread(body);
        let mut buffer = BytesMut::new();
        let reading = async {
            while buffer.len() <= limit {
                let Some(remaining) = &mut peeked.remaining else { break };
                match std::future::poll_fn(|context| remaining.as_mut().poll_frame(context)).await {
                    None => peeked.remaining = None,
                    Some(frame) => match frame?.into_data() {
                        Ok(data) => buffer.extend_from_slice(&data),
                        Err(trailers) => {
                            peeked.trailers = Some(trailers);
                            peeked.remaining = None;
                        }
                    },
                }
            }
            Ok::<(), B::Error>(())
        };
        match max_time {
            None => reading.await?,
            // What has come until then is kept.
            Some(max_time) => tokio::time::timeout(max_time, reading).await.unwrap_or(Ok(()))?,
        }
        peeked.read_ahead = buffer.freeze();
        Ok(peeked)
    }

    pub(super) fn is_complete(&self) -> bool {
        self.remaining.is_none()
    }

    /// Returns the body for the caller, which keeps the call in flight.
    pub(super) fn into_body<S: Store, C: Clock>(
        self,
        guard: InFlightGuard<S, C>,
        cost_reader: Option<CostReader>,
    ) -> OutboundBody<B, S, C> {
        OutboundBody { peeked: self, in_flight_guard: Some(guard), cost_reader }
    }
}

impl<B: Body<Data = Bytes>, S: Store, C: Clock> Body for OutboundBody<B, S, C> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let Self { peeked: body, cost_reader, .. } = &mut *self;
        let mut polled = match (take_frame(&mut body.read_ahead), &mut body.remaining) {
            (Some(frame), _) => Some(Ok(frame)),
            (None, Some(remaining)) => ready!(remaining.as_mut().poll_frame(context)),
            (None, None) => body.trailers.take().map(Ok),
        };
        match &mut polled {
            Some(Ok(frame)) => {
                if let (Some(cost_reader), Some(data)) = (cost_reader, frame.data_ref()) {
                    cost_reader.read(data);
                }
                if let (Some(secret), Some(trailers)) = (&body.secret, frame.trailers_mut()) {
                    remove_headers_with_secret(trailers, secret);
                }
            }
            Some(Err(_)) => {
                body.remaining = None;
                *cost_reader = None;
            }
            None => body.remaining = None,
        }
        if self.is_end_stream() {
            let cost = self.cost_reader.take().and_then(CostReader::into_cost);
            if let (Some(guard), Some(cost)) = (self.in_flight_guard.take(), cost) {
                guard.correct_cost(cost);
            }
        }
        Poll::Ready(polled)
    }

    fn is_end_stream(&self) -> bool {
        let PeekedBody { read_ahead, trailers, remaining, .. } = &self.peeked;
        read_ahead.is_empty() && trailers.is_none() && remaining.as_ref().is_none_or(|rest| rest.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let PeekedBody { read_ahead, remaining, .. } = &self.peeked;
        add_prefix_size(read_ahead.len(), remaining.as_ref().map_or(SizeHint::with_exact(0), |rest| rest.size_hint()))
    }
}

/// Takes the bytes as a frame, if there are any.
pub(super) fn take_frame(bytes: &mut Bytes) -> Option<Frame<Bytes>> {
    (!bytes.is_empty()).then(|| Frame::data(std::mem::take(bytes)))
}

/// Returns the size of a body with this many bytes before it.
pub(super) fn add_prefix_size(bytes: usize, remaining: SizeHint) -> SizeHint {
    let bytes = bytes as u64;
    let mut hint = SizeHint::new();
    hint.set_lower(remaining.lower().saturating_add(bytes));
    if let Some(upper) = remaining.upper().and_then(|upper| upper.checked_add(bytes)) {
        hint.set_upper(upper);
    }
    hint
}

impl<B, S: Store, C: Clock> fmt::Debug for OutboundBody<B, S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboundBody").finish_non_exhaustive()
    }
}
