//! The body of a reply on its way to the caller.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use tidegate_policy::Secret;
use tidegate_store::{Memory, Store};

use super::InFlightGuard;
use super::cost::CostReader;
use super::reply_headers::remove_headers_with_secret;
use tidegate_core::Clock;
use tidegate_runtime::clock::SystemClock;

/// The body of a provider's reply. Its call is in flight until the body ends or is dropped. Trailers that repeat the
/// credential are removed.
pub struct OutboundBody<B, S: Store = Memory, C: Clock = SystemClock> {
    read_ahead: Option<Frame<Bytes>>,
    trailers: Option<Frame<Bytes>>,
    remaining: Option<Pin<Box<B>>>,
    secret: Option<Arc<Secret>>,
    in_flight_guard: Option<InFlightGuard<S, C>>,
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

    /// Reads a body ahead until it ends, or until more than `limit` bytes of it are read.
    pub(super) async fn read(body: B, limit: usize) -> Result<Self, B::Error> {
        let mut peeked = Self::unread(body);
        let mut buffer = BytesMut::new();
        while buffer.len() <= limit {
            let Some(remaining) = &mut peeked.remaining else { break };
            match std::future::poll_fn(|context| remaining.as_mut().poll_frame(context)).await {
                None => peeked.remaining = None,
                Some(Err(error)) => return Err(error),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => buffer.extend_from_slice(&data),
                    Err(trailers) => {
                        peeked.trailers = Some(trailers);
                        peeked.remaining = None;
                    }
                },
            }
        }
        peeked.read_ahead = buffer.freeze();
        Ok(peeked)
    }

    /// Returns true if the whole body was read.
    pub(super) fn is_complete(&self) -> bool {
        self.remaining.is_none()
    }

    pub(super) fn into_body<S: Store, C: Clock>(self) -> OutboundBody<B, S, C> {
        let head = (!self.read_ahead.is_empty()).then(|| Frame::data(self.read_ahead));
        OutboundBody {
            read_ahead: head,
            trailers: self.trailers,
            remaining: self.remaining,
            secret: self.secret,
            in_flight_guard: None,
            cost_reader: None,
        }
    }
}

impl<B, S: Store, C: Clock> OutboundBody<B, S, C> {
    /// Keeps the call in flight until the body ends. The cost that the reply states is reported then.
    pub(super) fn attach_guard(&mut self, in_flight_guard: InFlightGuard<S, C>, cost_reader: Option<CostReader>) {
        self.in_flight_guard = Some(in_flight_guard);
        self.cost_reader = cost_reader;
    }

    fn finish(&mut self) {
        let cost = self.cost_reader.take().and_then(CostReader::into_cost);
        let Some(tail) = self.in_flight_guard.take() else { return };
        match cost {
            Some(cost) => tail.correct_cost(cost),
            None => drop(tail),
        }
    }
}

impl<B: Body<Data = Bytes>, S: Store, C: Clock> Body for OutboundBody<B, S, C> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = &mut *self;
        let mut polled = match (this.read_ahead.take(), &mut this.remaining) {
            (Some(head), _) => Some(Ok(head)),
            (None, Some(rest)) => match rest.as_mut().poll_frame(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(polled) => polled,
            },
            (None, None) => this.trailers.take().map(Ok),
        };
        match &mut polled {
            Some(Ok(frame)) => {
                if let (Some(price), Some(data)) = (&mut this.cost_reader, frame.data_ref()) {
                    price.read(data);
                }
                if let (Some(secret), Some(trailers)) = (&this.secret, frame.trailers_mut()) {
                    remove_headers_with_secret(trailers, secret);
                }
            }
            Some(Err(_)) => this.cost_reader = None,
            None => {}
        }
        if !matches!(polled, Some(Ok(_))) {
            this.remaining = None;
        }
        if this.is_end_stream() {
            this.finish();
        }
        Poll::Ready(polled)
    }

    fn is_end_stream(&self) -> bool {
        let rest_ended = self.remaining.as_ref().is_none_or(|rest| rest.is_end_stream());
        self.read_ahead.is_none() && self.trailers.is_none() && rest_ended
    }

    fn size_hint(&self) -> SizeHint {
        let head = self.read_ahead.as_ref().and_then(Frame::data_ref).map_or(0, |head| head.len() as u64);
        let remaining = self.remaining.as_ref().map_or_else(|| SizeHint::with_exact(0), |rest| rest.size_hint());
        add_prefix_size(head, &remaining)
    }
}

/// Returns the size of a body with this many bytes before it.
pub(super) fn add_prefix_size(bytes: u64, remaining: &SizeHint) -> SizeHint {
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
