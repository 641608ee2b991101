//! The body of a reply, with the permit that its call holds.

use std::any::Any;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tidegate_core::Clock;
use tidegate_store::Store;
use tokio::task::AbortHandle;

use crate::PermitGuard;

/// A permit that is renewed in the background and given back when dropped.
pub(super) struct RenewedPermit {
    _guard: Arc<dyn Any + Send + Sync>,
    renewal_task: AbortHandle,
}

impl RenewedPermit {
    pub(super) fn start_renewal<S: Store, C: Clock>(guard: PermitGuard<S, C>) -> Self {
        let guard = Arc::new(guard);
        let weak_guard = Arc::downgrade(&guard);
        let task = tokio::spawn(async move {
            loop {
                tokio::time::sleep(PermitGuard::<S, C>::RENEW_INTERVAL.as_duration()).await;
                let Some(guard) = weak_guard.upgrade() else { return };
                guard.renew();
            }
        });
        Self { _guard: guard, renewal_task: task.abort_handle() }
    }
}

impl Drop for RenewedPermit {
    fn drop(&mut self) {
        self.renewal_task.abort();
    }
}

pin_project! {
    /// The body of a response from a [`GateLayer`]: the service's own, or that of the refusal.
    pub struct GateBody<B> {
        #[pin]
        inner: GateBodyInner<B>,
        permit: Option<RenewedPermit>,
    }
}

pin_project! {
    #[project = GateBodyInnerProjection]
    enum GateBodyInner<B> {
        Forwarded { #[pin] body: B },
        Refused { body: Option<Bytes> },
    }
}

impl<B> GateBody<B> {
    pub(super) fn forwarded(body: B, permit: Option<RenewedPermit>) -> Self {
        Self { inner: GateBodyInner::Forwarded { body }, permit }
    }

    pub(super) fn refused(body: Bytes) -> Self {
        Self { inner: GateBodyInner::Refused { body: Some(body).filter(|body| !body.is_empty()) }, permit: None }
    }
}

impl<B: Default> Default for GateBody<B> {
    fn default() -> Self {
        Self::forwarded(B::default(), None)
    }
}

impl<B> std::fmt::Debug for GateBody<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GateBody").finish_non_exhaustive()
    }
}

impl<B: Body<Data = Bytes>> Body for GateBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        match this.inner.project() {
            GateBodyInnerProjection::Forwarded { body } => {
                let frame = body.poll_frame(context);
                if matches!(frame, Poll::Ready(None)) {
                    *this.permit = None;
                }
                frame
            }
            GateBodyInnerProjection::Refused { body } => Poll::Ready(body.take().map(|bytes| Ok(Frame::data(bytes)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            GateBodyInner::Forwarded { body } => body.is_end_stream(),
            GateBodyInner::Refused { body } => body.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            GateBodyInner::Forwarded { body } => body.size_hint(),
            GateBodyInner::Refused { body } => {
                SizeHint::with_exact(body.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
        }
    }
}
