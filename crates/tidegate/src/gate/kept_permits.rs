//! The permits of abandoned calls, which are kept until their work is likely over.
//!
//! A call whose client goes away may still be worked on. Its permit is kept, so that no more is worked on at a time than
//! the limit says. A client could thereby take a limit away from others at the cost of a few requests. So the calls of a
//! client that abandons some are counted, and it is refused while it has half of a limit.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tidegate_core::concurrency::Concurrency;
use tidegate_core::{Batch, Clock, Decision, Key, LimitId, LimitKind, Reason, Span, Time, Verb};
use tidegate_policy::{UNIX_PEER, canonical_ip};
use tidegate_store::Store;

use super::{Gate, GateInner};

/// The longest time for which a permit is kept after its call was abandoned. It is that of a lease, which is renewed once.
const MAX_KEPT_TIME: Span = Concurrency::DEFAULT_LEASE;
/// The maximum number of calls that are kept or counted. The permits of further ones end with their lease.
const MAX_CALLS: usize = 4096;
/// The maximum number of clients under limits whose calls are counted. Further ones have no share.
const MAX_CLIENTS: usize = 1024;
/// The maximum number of one client's abandoned calls, under all limits and keys. With more, its calls are refused: it could
/// otherwise take all places by calls with keys that it invents.
const MAX_CALLS_OF_CLIENT: usize = 64;
/// The time for which the calls of a client are counted after it has abandoned one. Ten times the longest for which a permit
/// is kept: calls that a client begins before it abandons the first one are not counted, and it may repeat that.
const COUNTED_TIME: Span = MAX_KEPT_TIME.times(10);
/// One client's share of a limit: one part of this many.
const SHARES: u64 = 2;
/// The shortest wait that a client beyond its share is told.
const MIN_WAIT: Span = Span::from_secs(1);

/// The permits that are kept, and the calls of the clients that abandon some.
#[derive(Debug, Default)]
pub(super) struct KeptPermits {
    /// False while there is nothing to look for.
    is_active: AtomicBool,
    calls: Mutex<Calls>,
}

#[derive(Debug, Default)]
struct Calls {
    by_holder: HashMap<u64, CountedCall>,
    clients: HashMap<ClientKey, Client>,
    /// The number of calls whose permits are kept, in all and of each client.
    kept: usize,
    kept_by_network: HashMap<IpAddr, usize>,
    /// The time of the next look for calls and clients that have ended.
    next_sweep: Time,
}

/// A client under a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ClientKey {
    limit: LimitId,
    key: Key,
    /// The client's address or network, as limits count it.
    network: IpAddr,
}

#[derive(Debug, Default)]
struct Client {
    calls: u64,
    counted_until: Time,
    /// The likely end of the first of its abandoned calls.
    retry_at: Time,
}

/// A call that is under way or abandoned.
#[derive(Debug)]
struct CountedCall {
    clients: Vec<ClientKey>,
    /// The client's address or network, if it is counted.
    network: Option<IpAddr>,
    /// The end of its permit, unless it is renewed.
    ends_at: Time,
    abandoned: Option<AbandonedCall>,
}

#[derive(Debug)]
struct AbandonedCall {
    started_at: Option<Time>,
    /// The batches that give the permit back.
    releases: Vec<Batch>,
    likely_end: Time,
    /// True while its work is observed to go on.
    is_observed: bool,
}

impl CountedCall {
    /// The time at which nothing of it counts.
    fn end(&self) -> Time {
        match &self.abandoned {
            Some(call) if !call.is_observed => call.likely_end,
            _ => self.ends_at,
        }
    }
}

impl KeptPermits {
    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Relaxed)
    }

    fn kept(&self) -> usize {
        if self.is_active() { self.calls.lock().kept } else { 0 }
    }

    /// Takes the batches that give back the permits of the calls that are likely over.
    fn take_ended(&self, calls: &mut Calls, now: Time) -> Vec<Batch> {
        if now < calls.next_sweep {
            return Vec::new();
        }
        let ended: Vec<u64> =
            calls.by_holder.iter().filter(|(_, call)| call.end() <= now).map(|(holder, _)| *holder).collect();
        let releases = ended.into_iter().filter_map(|holder| calls.remove(holder)).flat_map(|call| call.releases);
        let releases = releases.collect();
        calls.clients.retain(|_, client| client.calls > 0 || client.counted_until > now);
        let ends = calls.by_holder.values().map(CountedCall::end);
        let next = ends.chain(calls.clients.values().map(|client| client.counted_until).filter(|at| *at > now)).min();
        calls.next_sweep = next.unwrap_or(Time::NEVER);
        self.is_active.store(!(calls.by_holder.is_empty() && calls.clients.is_empty()), Ordering::Relaxed);
        releases
    }
}

impl Calls {
    fn remove(&mut self, holder: u64) -> Option<AbandonedCall> {
        let call = self.by_holder.remove(&holder)?;
        for key in &call.clients {
            if let Some(client) = self.clients.get_mut(key) {
                client.calls -= 1;
            }
        }
        if call.abandoned.is_some() {
            self.kept -= 1;
            if let Some(network) = call.network
                && let Some(count) = self.kept_by_network.get_mut(&network)
            {
                *count -= 1;
                if *count == 0 {
                    self.kept_by_network.remove(&network);
                }
            }
        }
        call.abandoned
    }

    /// Counts a call of clients that are known already.
    fn insert(&mut self, holder: u64, mut call: CountedCall) {
        call.clients.retain(|key| self.clients.get_mut(key).map(|client| client.calls += 1).is_some());
        if call.abandoned.is_some() {
            self.kept += 1;
            if let Some(network) = call.network {
                *self.kept_by_network.entry(network).or_default() += 1;
            }
        }
        self.next_sweep = self.next_sweep.min(call.end());
        self.by_holder.insert(holder, call);
    }
}

/// The kept permit of an abandoned call whose work is observed. While this exists, the permit is kept, for at most 30 s.
/// Dropping it leaves the permit to the likely end of the work.
#[derive(Debug)]
#[must_use = "dropping it says that nothing more is known of the work"]
pub struct KeptPermit<S: Store, C: Clock> {
    gate: Gate<S, C>,
    holder: u64,
}

impl<S: Store, C: Clock> KeptPermit<S, C> {
    /// Gives the permit back, because the work is over.
    pub fn end(self) {
        let Some(call) = self.gate.0.kept_permits.calls.lock().remove(self.holder) else { return };
        let now = self.gate.0.clock.now();
        if let (Some(started_at), Some(batch)) = (call.started_at, call.releases.first()) {
            self.gate.0.hold_times.record(batch, started_at, now);
        }
        call.releases.iter().for_each(|batch| self.gate.0.store.submit(batch, now));
    }
}

impl<S: Store, C: Clock> Drop for KeptPermit<S, C> {
    fn drop(&mut self) {
        let calls = &mut *self.gate.0.kept_permits.calls.lock();
        if let Some(call) = calls.by_holder.get_mut(&self.holder)
            && let Some(abandoned) = &mut call.abandoned
        {
            abandoned.is_observed = false;
            calls.next_sweep = calls.next_sweep.min(abandoned.likely_end);
        }
    }
}

impl<S: Store, C: Clock> Gate<S, C> {
    /// The number of permits that are kept for calls that were abandoned ([`PermitGuard::keep`](crate::PermitGuard::keep)).
    pub fn kept_permits(&self) -> usize {
        self.0.kept_permits.kept()
    }

    /// Gives back the permits of the abandoned calls that are likely over.
    #[cold]
    pub(super) fn end_kept_permits(&self) {
        let GateInner { kept_permits, store, clock, .. } = &*self.0;
        let now = clock.now();
        let ended = kept_permits.take_ended(&mut kept_permits.calls.lock(), now);
        ended.iter().for_each(|batch| store.submit(batch, now));
    }

    /// Gives back the permits of the abandoned calls that are likely over, and counts this call if its client abandons
    /// calls. Returns the refusal if the client has its share of a limit.
    #[cold]
    pub(super) fn count_abandoning_client(&self, batch: &Batch, ip: Option<IpAddr>) -> Option<Decision> {
        if !batch.ops().iter().any(|op| self.permits(op.limit).is_some()) {
            return None;
        }
        let GateInner { kept_permits, store, clock, .. } = &*self.0;
        let (clients, now) = (self.client_keys(batch, ip), clock.now());
        let mut calls = kept_permits.calls.lock();
        let ended = kept_permits.take_ended(&mut calls, now);
        let known = |key: &ClientKey| calls.clients.get(key).map(|client| (*key, client.calls, client.retry_at));
        let known: Vec<_> = clients.iter().filter_map(known).collect();
        let network = clients.first().map(|key| key.network);
        let kept = network.and_then(|network| calls.kept_by_network.get(&network));
        let beyond_share = if kept.is_some_and(|kept| *kept >= MAX_CALLS_OF_CLIENT) {
            clients.first().map(|key| (*key, now + MAX_KEPT_TIME))
        } else {
            let beyond = known.iter().find(|(key, calls, _)| *calls >= self.share(key.limit));
            beyond.map(|(key, _, retry_at)| (*key, *retry_at))
        };
        let takes = batch.ops().first().is_some_and(|op| op.verb == Verb::Take);
        if takes && beyond_share.is_none() && !known.is_empty() && calls.by_holder.len() < MAX_CALLS {
            let ends_at = now + Concurrency::DEFAULT_LEASE;
            calls.insert(batch.holder(), CountedCall { clients, network, ends_at, abandoned: None });
        }
        drop(calls);
        ended.iter().for_each(|batch| store.submit(batch, now));
        let (key, retry_at) = beyond_share?;
        let wait = retry_at.since(now).max(MIN_WAIT);
        Some(Decision {
            limit: self.permits(key.limit),
            remaining: Some(0),
            reset_after: wait,
            retry_after: Some(wait),
            bound_by: Some(key.limit),
            key: key.key,
            affinity: batch.context().affinity,
            ..Decision::without_limit(false, Reason::Limit, now)
        })
    }

    /// Forgets what clients have of these limits, because their keys were reset.
    pub(super) fn forget_shares(&self, reset: &Batch) {
        let is_reset = |key: &ClientKey| reset.ops().iter().any(|op| (op.limit, op.key) == (key.limit, key.key));
        let calls = &mut *self.0.kept_permits.calls.lock();
        calls.clients.retain(|key, _| !is_reset(key));
        calls.by_holder.values_mut().for_each(|call| call.clients.retain(|key| !is_reset(key)));
    }

    /// Counts a call of this holder no more.
    #[cold]
    pub(super) fn uncount_call(&self, holder: u64) {
        self.0.kept_permits.calls.lock().remove(holder);
    }

    /// Counts the call of this holder for another lease.
    pub(crate) fn renew_counted_call(&self, holder: u64) {
        if !self.0.kept_permits.is_active() {
            return;
        }
        if let Some(call) = self.0.kept_permits.calls.lock().by_holder.get_mut(&holder) {
            call.ends_at = self.0.clock.now() + Concurrency::DEFAULT_LEASE;
        }
    }

    /// Keeps the permit of an abandoned call, which these batches renew. The first is that of the caller's own keys.
    pub(crate) fn keep_permit(&self, mut batches: Vec<Batch>, ip: Option<IpAddr>) -> KeptPermit<S, C> {
        let GateInner { kept_permits, hold_times, clock, store, .. } = &*self.0;
        let now = clock.now();
        let (holder, clients) =
            batches.first().map_or((0, Vec::new()), |own| (own.holder(), self.client_keys(own, ip)));
        let started_at = hold_times.take_start(holder);
        let longest = batches.first().map_or(Span::ZERO, |own| hold_times.longest(own));
        let ends_at = now + MAX_KEPT_TIME;
        for batch in &mut batches {
            store.submit(batch, now);
            batch.ops_mut().iter_mut().for_each(|op| op.verb = Verb::Release);
        }
        let calls = &mut *kept_permits.calls.lock();
        let has_abandoned = |key| calls.clients.get(key).is_some_and(|client: &Client| client.counted_until > now);
        // A client that abandons several calls may choose those that take longest.
        let likely_end = match clients.iter().any(has_abandoned) {
            true => ends_at,
            false => (started_at.unwrap_or(now) + longest).min(ends_at),
        };
        calls.remove(holder);
        if calls.by_holder.len() < MAX_CALLS {
            kept_permits.is_active.store(true, Ordering::Relaxed);
            for key in &clients {
                if calls.clients.len() >= MAX_CLIENTS && !calls.clients.contains_key(key) {
                    calls.clients.retain(|_, client| client.calls > 0);
                }
                if calls.clients.len() < MAX_CLIENTS || calls.clients.contains_key(key) {
                    let client = calls.clients.entry(*key).or_default();
                    client.counted_until = now + COUNTED_TIME;
                    client.retry_at = if client.retry_at > now { client.retry_at.min(likely_end) } else { likely_end };
                }
            }
            let abandoned = AbandonedCall { started_at, releases: batches, likely_end, is_observed: true };
            let network = clients.first().map(|key| key.network);
            calls.insert(holder, CountedCall { clients, network, ends_at, abandoned: Some(abandoned) });
        }
        KeptPermit { gate: self.clone(), holder }
    }

    /// The client of a call under each of its limits on calls in flight. Servers on this machine that don't tell their clients
    /// aren't one.
    fn client_keys(&self, batch: &Batch, ip: Option<IpAddr>) -> Vec<ClientKey> {
        let plan = &self.0.plan;
        let client = ip.map(canonical_ip).filter(|ip| !ip.is_loopback() && *ip != UNIX_PEER);
        let Some(network) = client.map(|ip| plan.client_network(ip)) else { return Vec::new() };
        let ops = batch.ops().iter().filter(|op| self.permits(op.limit).is_some() && !plan.is_shadow(op.limit));
        ops.map(|op| ClientKey { limit: op.limit, key: op.key, network }).collect()
    }

    /// The maximum number of calls in flight; `None` for another kind of limit.
    fn permits(&self, limit: LimitId) -> Option<u64> {
        match self.0.plan.limits().get(limit)?.kind() {
            LimitKind::Concurrency(concurrency) => Some(concurrency.limit()),
            _ => None,
        }
    }

    /// The number of calls that a client which abandons some may have: half of a limit that clients of other addresses share.
    fn share(&self, limit: LimitId) -> u64 {
        let permits = self.permits(limit).unwrap_or(0);
        if self.0.plan.counts_by_address(limit) { permits } else { (permits / SHARES).max(1) }
    }
}
