//! The body of a reply, with the permit that its call holds.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tidegate_core::Clock;
use tidegate_store::Store;
use tokio::task::AbortHandle;

use crate::PermitGuard;

/// A call's permit, which is renewed in the background. Dropping it gives it back if the call is over, and otherwise keeps
/// it until its work is likely over.
pub(super) struct RenewedPermit {
    permit: Arc<dyn RenewablePermit>,
    renewal_task: AbortHandle,
    is_over: bool,
}

/// A permit of any gate.
trait RenewablePermit: Send + Sync {
    /// Ends the permit of a call that is over, or was abandoned.
    fn end(&self, is_over: bool);
    /// Counts the call as one that its client has abandoned, although it goes on. Returns false if there is no place for it.
    fn count_abandoned(&self) -> bool;
}

impl<S: Store, C: Clock> RenewablePermit for Mutex<Option<PermitGuard<S, C>>> {
    fn end(&self, is_over: bool) {
        match self.lock().take() {
            Some(guard) if is_over => drop(guard),
            Some(guard) => drop(guard.keep()),
            None => {}
        }
    }

    fn count_abandoned(&self) -> bool {
        self.lock().as_ref().is_some_and(PermitGuard::count_abandoned)
    }
}

impl RenewedPermit {
    pub(super) fn start_renewal<S: Store, C: Clock>(guard: PermitGuard<S, C>) -> Self {
        let permit = Arc::new(Mutex::new(Some(guard)));
        let weak_permit = Arc::downgrade(&permit);
        let task = tokio::spawn(async move {
            loop {
                tokio::time::sleep(PermitGuard::<S, C>::RENEW_INTERVAL.as_duration()).await;
                let Some(permit) = weak_permit.upgrade() else { return };
                if let Some(guard) = &*permit.lock() {
                    guard.renew();
                }
            }
        });
        Self { permit, renewal_task: task.abort_handle(), is_over: false }
    }

    /// Counts the call as one that its client has abandoned, although it goes on. Returns false if there is no place for it.
    pub(super) fn count_abandoned(&self) -> bool {
        self.permit.count_abandoned()
    }

    /// Notes that the service has answered, or failed.
    pub(super) fn set_over(&mut self) {
        self.is_over = true;
    }
}

impl Drop for RenewedPermit {
    fn drop(&mut self) {
        self.renewal_task.abort();
        self.permit.end(self.is_over || std::thread::panicking());
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
