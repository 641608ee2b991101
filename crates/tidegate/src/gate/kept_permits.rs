//! The permits of abandoned calls, which are kept until their work is likely over.
//!
//! A call whose client goes away may still be worked on. Its permit is kept, so that no more is worked on at a time than
//! the limit says. A client could thereby take a limit away from others at the cost of a few requests. So the calls of a
//! client that abandons some are counted, and it is refused while it has half of a limit.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tidegate_core::concurrency::Concurrency;
use tidegate_core::{Batch, Clock, Decision, Key, LimitId, LimitKind, Reason, Span, Time, Verb};
use tidegate_policy::{UNIX_PEER, canonical_ip};
use tidegate_store::Store;

use super::{Gate, GateInner};

/// The longest time for which a permit is kept after its call was abandoned: one lease, because it is renewed once.
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
    /// The number of each client's calls whose permits are kept.
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
    /// The likely end of the first of its calls; zero after a change of them.
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

    fn likely_end(&self, now: Time, usual_time: Span) -> Time {
        match &self.abandoned {
            Some(call) if call.likely_end > now => call.likely_end,
            Some(_) => self.ends_at,
            None => now + usual_time,
        }
    }
}

impl KeptPermits {
    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Relaxed)
    }

    fn kept(&self) -> usize {
        let is_kept = |call: &&CountedCall| call.abandoned.is_some();
        if self.is_active() { self.calls.lock().by_holder.values().filter(is_kept).count() } else { 0 }
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
                client.retry_at = Time::ZERO;
            }
        }
        if let Some(network) = call.network.filter(|_| call.abandoned.is_some()) {
            self.uncount_kept(network);
        }
        call.abandoned
    }

    fn uncount_kept(&mut self, network: IpAddr) {
        if let Entry::Occupied(mut kept) = self.kept_by_network.entry(network) {
            *kept.get_mut() -= 1;
            if *kept.get() == 0 {
                kept.remove();
            }
        }
    }

    /// The client, if its calls are counted.
    fn counted_client(&mut self, key: &ClientKey, now: Time) -> Option<&mut Client> {
        self.clients.get_mut(key).filter(|client| client.counted_until > now)
    }

    /// Counts a call of the clients whose calls are counted.
    fn insert(&mut self, holder: u64, mut call: CountedCall, now: Time) {
        call.clients.retain(|key| {
            let client = self.counted_client(key, now);
            client.map(|client| (client.calls, client.retry_at) = (client.calls + 1, Time::ZERO)).is_some()
        });
        if let Some(network) = call.network.filter(|_| call.abandoned.is_some()) {
            *self.kept_by_network.entry(network).or_default() += 1;
        }
        self.next_sweep = self.next_sweep.min(call.end());
        self.by_holder.insert(holder, call);
    }

    /// Counts the calls of these clients from now on, because they have abandoned one.
    fn count_clients(&mut self, clients: &[ClientKey], now: Time) {
        for key in clients {
            if self.clients.len() >= MAX_CLIENTS && !self.clients.contains_key(key) {
                self.clients.retain(|_, client| client.calls > 0);
            }
            if self.clients.len() < MAX_CLIENTS || self.clients.contains_key(key) {
                self.clients.entry(*key).or_default().counted_until = now + COUNTED_TIME;
            }
        }
    }

    /// The likely end of the first call of a client. A call under way is expected to take as long as others.
    fn retry_at(&mut self, key: &ClientKey, now: Time, usual_time: Span) -> Time {
        let Some(client) = self.clients.get_mut(key) else { return now };
        if client.retry_at <= now {
            let calls = self.by_holder.values().filter(|call| call.clients.contains(key));
            client.retry_at = calls.map(|call| call.likely_end(now, usual_time)).min().unwrap_or(now);
        }
        client.retry_at
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
        if !self.has_permits(batch) {
            return None;
        }
        let GateInner { kept_permits, hold_times, store, clock, .. } = &*self.0;
        let (clients, now) = (self.client_keys(batch, ip), clock.now());
        let mut calls = kept_permits.calls.lock();
        let ended = kept_permits.take_ended(&mut calls, now);
        let network = clients.first().map(|key| key.network);
        let kept = network.and_then(|network| calls.kept_by_network.get(&network));
        let (mut is_counted, mut beyond_share) = (false, None);
        if kept.is_some_and(|kept| *kept >= MAX_CALLS_OF_CLIENT) {
            beyond_share = clients.first().map(|key| (*key, now + MAX_KEPT_TIME));
        } else {
            for key in &clients {
                let Some(client) = calls.counted_client(key, now) else { continue };
                is_counted = true;
                if client.calls >= self.share(key.limit) {
                    let usual_time = hold_times.usual(key.limit);
                    beyond_share = Some((*key, calls.retry_at(key, now, usual_time)));
                    break;
                }
            }
        }
        let takes = batch.ops().first().is_some_and(|op| op.verb == Verb::Take);
        if takes && beyond_share.is_none() && is_counted && calls.by_holder.len() < MAX_CALLS {
            let ends_at = now + Concurrency::DEFAULT_LEASE;
            calls.insert(batch.holder(), CountedCall { clients, network, ends_at, abandoned: None }, now);
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
        let mut kept_networks = Vec::new();
        for call in calls.by_holder.values_mut() {
            let counted = call.clients.len();
            call.clients.retain(|key| !is_reset(key));
            if call.clients.len() < counted && call.abandoned.is_some() {
                kept_networks.extend(call.network.take());
            }
        }
        kept_networks.into_iter().for_each(|network| calls.uncount_kept(network));
    }

    /// Counts the call of this batch no more.
    #[cold]
    pub(super) fn uncount_call(&self, batch: &Batch) {
        if self.has_permits(batch) {
            self.0.kept_permits.calls.lock().remove(batch.holder());
        }
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

    /// Counts a call that goes on without its caller, and the further calls of its client.
    pub(crate) fn count_abandoned_call(&self, batch: &Batch, ip: Option<IpAddr>) {
        let GateInner { kept_permits, clock, .. } = &*self.0;
        let (clients, now) = (self.client_keys(batch, ip), clock.now());
        let calls = &mut *kept_permits.calls.lock();
        calls.remove(batch.holder());
        if calls.by_holder.len() < MAX_CALLS {
            kept_permits.is_active.store(true, Ordering::Relaxed);
            calls.count_clients(&clients, now);
            let ends_at = now + Concurrency::DEFAULT_LEASE;
            calls.insert(batch.holder(), CountedCall { clients, network: None, ends_at, abandoned: None }, now);
        }
    }

    /// Keeps the permit of an abandoned call. These batches renew it under its own and under shared keys.
    pub(crate) fn keep_permit(&self, own: Batch, shared: Vec<Batch>, ip: Option<IpAddr>) -> KeptPermit<S, C> {
        let GateInner { kept_permits, hold_times, clock, store, .. } = &*self.0;
        let (holder, clients, now) = (own.holder(), self.client_keys(&own, ip), clock.now());
        let started_at = hold_times.take_start(holder);
        let longest = hold_times.longest(&own);
        let ends_at = now + MAX_KEPT_TIME;
        let mut releases = vec![own];
        releases.extend(shared);
        for batch in &mut releases {
            store.submit(batch, now);
            batch.ops_mut().iter_mut().for_each(|op| op.verb = Verb::Release);
        }
        let calls = &mut *kept_permits.calls.lock();
        // A client that abandons several calls may choose those that take longest.
        let likely_end = match clients.iter().any(|key| calls.counted_client(key, now).is_some()) {
            true => ends_at,
            false => (started_at.unwrap_or(now) + longest).min(ends_at),
        };
        calls.remove(holder);
        if calls.by_holder.len() < MAX_CALLS {
            kept_permits.is_active.store(true, Ordering::Relaxed);
            calls.count_clients(&clients, now);
            let abandoned = Some(AbandonedCall { started_at, releases, likely_end, is_observed: true });
            let network = clients.first().map(|key| key.network);
            calls.insert(holder, CountedCall { clients, network, ends_at, abandoned }, now);
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

    fn has_permits(&self, batch: &Batch) -> bool {
        batch.ops().iter().any(|op| self.permits(op.limit).is_some())
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
