//! Calls of a service that are finished although their client has gone away.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::Handle;

use super::body::RenewedPermit;

/// A call with a permit, which is finished within a time if it is dropped.
pub(super) struct FinishOnDrop<F: Future + Send + 'static> {
    /// `None` once the service has answered.
    call: Option<(Pin<Box<F>>, RenewedPermit)>,
    timeout: Duration,
}

impl<F: Future + Send + 'static> FinishOnDrop<F> {
    pub(super) fn new(call: F, permit: RenewedPermit, timeout: Duration) -> Self {
        Self { call: Some((Box::pin(call), permit)), timeout }
    }
}

impl<F: Future + Send + 'static> Future for FinishOnDrop<F> {
    type Output = (F::Output, RenewedPermit);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let (call, _) = self.call.as_mut().expect("invariant: a future that is ready is not polled again");
        let Poll::Ready(response) = call.as_mut().poll(context) else { return Poll::Pending };
        let (_, mut permit) = self.call.take().expect("invariant: it is there under the same borrow");
        permit.set_over();
        Poll::Ready((response, permit))
    }
}

impl<F: Future + Send + 'static> Drop for FinishOnDrop<F> {
    fn drop(&mut self) {
        let Some((call, mut permit)) = self.call.take().filter(|_| !std::thread::panicking()) else { return };
        if let Ok(runtime) = Handle::try_current()
            && permit.count_abandoned()
        {
            let timeout = self.timeout;
            runtime.spawn(async move {
                if tokio::time::timeout(timeout, call).await.is_ok() {
                    permit.set_over();
                }
            });
        }
    }
}
