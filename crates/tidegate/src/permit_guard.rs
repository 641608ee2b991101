//! The permit of a call in flight.

use std::mem;
use std::net::IpAddr;

use tidegate_core::concurrency::Concurrency;
use tidegate_core::{Batch, Clock, Span, Verb};
use tidegate_store::Store;

use crate::{Gate, KeptPermit};

/// Holds the permit of a call in flight and gives it back when dropped. A call that runs longer than the permit's
/// lease must [renew](PermitGuard::renew) it. If work may go on after the guard, such as that of another server, the permit
/// is to be [kept](PermitGuard::keep).
#[derive(Debug)]
#[must_use = "dropping it gives the permit back"]
pub struct PermitGuard<S: Store, C: Clock> {
    gate: Gate<S, C>,
    /// The address of the caller.
    ip: Option<IpAddr>,
    /// The renewal under the caller's own keys.
    own_keys: Batch,
    /// The same under the shared keys, if the store had no room for the caller's own.
    shared_keys: Vec<Batch>,
    is_kept: bool,
}

impl<S: Store, C: Clock> PermitGuard<S, C> {
    /// The interval between renewals: 10 s, a third of the lease.
    pub const RENEW_INTERVAL: Span = Concurrency::RENEW_INTERVAL;

    pub(crate) fn new(gate: Gate<S, C>, ip: Option<IpAddr>, own: Batch, shared: Vec<Batch>) -> Self {
        Self { gate, ip, own_keys: own, shared_keys: shared, is_kept: false }
    }

    /// Renews the lease.
    pub fn renew(&self) {
        self.gate.renew_counted_call(self.own_keys.holder());
        self.shared_keys.iter().chain([&self.own_keys]).for_each(|batch| self.gate.submit(batch));
    }

    /// Keeps the permit of a call whose caller has gone away, while work on it may go on. If the returned value is
    /// dropped at once, the permit is given back when the longest recent call under its limits would be over, by the time
    /// since this call began. In any case it is given back within 30 s.
    ///
    /// One client's kept permits have at most half of a limit that clients of other addresses share: beyond that,
    /// [`Gate::check`] refuses its further calls under the limit.
    ///
    /// The permit is given back by the next check of this gate under a limit on calls in flight, or by [`Gate::maintain`].
    ///
    /// Returns `None` if there is no place for the permit: 4,096 are kept, and of one client as many as its share, from 64 to
    /// 256. It is then given back after 30 s.
    pub fn keep(mut self) -> Option<KeptPermit<S, C>> {
        self.is_kept = true;
        self.gate.keep_permit(mem::take(&mut self.own_keys), mem::take(&mut self.shared_keys), self.ip)
    }

    /// Counts the call as one that its caller has abandoned, although it goes on. As with [`keep`](Self::keep), such a client
    /// then has at most half of a limit that clients of other addresses share.
    ///
    /// Returns false if there is no place for the call, so that it shouldn't go on: there are
    /// [1,024](crate::MAX_FINISHED_CALLS), within those of `keep`.
    #[must_use = "a call without a place shouldn't go on"]
    pub fn count_abandoned(&self) -> bool {
        self.gate.count_abandoned_call(&self.own_keys, self.ip)
    }

    /// Gives the permit back for a call that caused no work. Its time doesn't count as that of a call.
    pub fn cancel(self) {
        self.gate.forget_hold(&self.own_keys);
    }
}

impl<S: Store, C: Clock> Drop for PermitGuard<S, C> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        self.gate.end_hold(&self.own_keys);
        for batch in self.shared_keys.iter_mut().chain([&mut self.own_keys]) {
            batch.ops_mut().iter_mut().for_each(|op| op.verb = Verb::Release);
            self.gate.submit(batch);
        }
    }
}
