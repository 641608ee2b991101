//! The body of a reply on its way to the caller.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use tidegate_policy::Secret;
use tidegate_store::{Memory, Store};

use super::Tail;
use super::cost::Price;
use super::location::drop_telling;
use crate::{Clock, SystemClock};

/// The body of a provider's reply. Until it has ended or is dropped, its call is in flight. Trailers that repeat the
/// credential are dropped.
pub struct OutboundBody<B, S: Store = Memory, C: Clock = SystemClock> {
    head: Option<Frame<Bytes>>,
    trailers: Option<Frame<Bytes>>,
    rest: Option<Pin<Box<B>>>,
    secret: Option<Arc<Secret>>,
    tail: Option<Tail<S, C>>,
    price: Option<Price>,
}

/// How much of a body has been read ahead.
pub(super) struct Peeked<B> {
    pub head: Bytes,
    trailers: Option<Frame<Bytes>>,
    rest: Option<Pin<Box<B>>>,
    /// The credential that its request showed.
    pub secret: Option<Arc<Secret>>,
}

impl<B: Body<Data = Bytes>> Peeked<B> {
    /// Reads nothing ahead.
    pub(super) fn unread(body: B) -> Self {
        let rest = (!body.is_end_stream()).then(|| Box::pin(body));
        Self { head: Bytes::new(), trailers: None, rest, secret: None }
    }

    /// Reads a body ahead until it ends, or until more than `limit` bytes of it are there.
    pub(super) async fn read(body: B, limit: usize) -> Result<Self, B::Error> {
        let mut peeked = Self::unread(body);
        let mut read = BytesMut::new();
        while read.len() <= limit {
            let Some(rest) = &mut peeked.rest else { break };
            match std::future::poll_fn(|context| rest.as_mut().poll_frame(context)).await {
                None => peeked.rest = None,
                Some(Err(error)) => return Err(error),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => read.extend_from_slice(&data),
                    Err(trailers) => {
                        peeked.trailers = Some(trailers);
                        peeked.rest = None;
                    }
                },
            }
        }
        peeked.head = read.freeze();
        Ok(peeked)
    }

    /// Whether all of it was read.
    pub(super) fn is_whole(&self) -> bool {
        self.rest.is_none()
    }

    pub(super) fn into_body<S: Store, C: Clock>(self) -> OutboundBody<B, S, C> {
        let head = (!self.head.is_empty()).then(|| Frame::data(self.head));
        OutboundBody { head, trailers: self.trailers, rest: self.rest, secret: self.secret, tail: None, price: None }
    }
}

impl<B, S: Store, C: Clock> OutboundBody<B, S, C> {
    /// Keeps the call in flight until the body ends. What the reply says of its price is told then.
    pub(super) fn hold(&mut self, tail: Tail<S, C>, price: Option<Price>) {
        self.tail = Some(tail);
        self.price = price;
    }

    fn finish(&mut self) {
        let cost = self.price.take().and_then(Price::cost);
        let Some(tail) = self.tail.take() else { return };
        match cost {
            Some(cost) => tail.cost_was(cost),
            None => drop(tail),
        }
    }
}

impl<B: Body<Data = Bytes>, S: Store, C: Clock> Body for OutboundBody<B, S, C> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = &mut *self;
        let mut polled = match (this.head.take(), &mut this.rest) {
            (Some(head), _) => Some(Ok(head)),
            (None, Some(rest)) => match rest.as_mut().poll_frame(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(polled) => polled,
            },
            (None, None) => this.trailers.take().map(Ok),
        };
        match &mut polled {
            Some(Ok(frame)) => {
                if let (Some(price), Some(data)) = (&mut this.price, frame.data_ref()) {
                    price.read(data);
                }
                if let (Some(secret), Some(trailers)) = (&this.secret, frame.trailers_mut()) {
                    drop_telling(trailers, secret);
                }
            }
            Some(Err(_)) => this.price = None,
            None => {}
        }
        if !matches!(polled, Some(Ok(_))) {
            this.rest = None;
        }
        if this.is_end_stream() {
            this.finish();
        }
        Poll::Ready(polled)
    }

    fn is_end_stream(&self) -> bool {
        let rest_ended = self.rest.as_ref().is_none_or(|rest| rest.is_end_stream());
        self.head.is_none() && self.trailers.is_none() && rest_ended
    }

    fn size_hint(&self) -> SizeHint {
        let head = self.head.as_ref().and_then(Frame::data_ref).map_or(0, |head| head.len() as u64);
        let rest = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), |rest| rest.size_hint());
        ahead(head, &rest)
    }
}

/// The size of a body with this many bytes before it.
pub(super) fn ahead(bytes: u64, rest: &SizeHint) -> SizeHint {
    let mut hint = SizeHint::new();
    hint.set_lower(rest.lower().saturating_add(bytes));
    if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(bytes)) {
        hint.set_upper(upper);
    }
    hint
}

impl<B, S: Store, C: Clock> fmt::Debug for OutboundBody<B, S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboundBody").finish_non_exhaustive()
    }
}
