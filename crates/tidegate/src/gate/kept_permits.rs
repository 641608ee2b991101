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
/// The maximum number of clients whose calls are counted. Further ones have no share.
const MAX_CLIENTS: usize = 1024;
/// The maximum number of one client's abandoned calls that are kept, under all limits and keys. With so many, its calls are
/// refused: it could otherwise take all places by calls with keys that it invents.
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
    /// By its address or network, each client that has abandoned a call, under whatever limit and key: so it can't be
    /// forgotten for calls with other keys.
    clients: HashMap<IpAddr, Client>,
    /// The counted calls of these clients under each limit.
    shares: HashMap<ShareKey, Share>,
    /// The time of the next look for calls and clients that have ended.
    next_sweep: Time,
}

#[derive(Debug, Default)]
struct Client {
    counted_until: Time,
    /// The number of its calls whose permits are kept.
    kept: usize,
}

/// A client under a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ShareKey {
    limit: LimitId,
    key: Key,
    client: IpAddr,
}

#[derive(Debug, Default)]
struct Share {
    calls: u64,
    /// The likely end of the first of them; zero after a change.
    retry_at: Time,
}

/// A call that is under way or abandoned.
#[derive(Debug)]
struct CountedCall {
    shares: Vec<ShareKey>,
    /// The client in whose number of kept calls it is.
    kept_of: Option<IpAddr>,
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
        calls.clients.retain(|_, client| client.kept > 0 || client.counted_until > now);
        let ends = calls.by_holder.values().map(CountedCall::end);
        let next = ends.chain(calls.clients.values().map(|client| client.counted_until).filter(|at| *at > now)).min();
        calls.next_sweep = next.unwrap_or(Time::NEVER);
        self.is_active.store(!(calls.by_holder.is_empty() && calls.clients.is_empty()), Ordering::Relaxed);
        releases
    }
}

impl Calls {
    /// True if the calls of this client are counted, because it has abandoned one in the last minutes.
    fn counts(&self, client: IpAddr, now: Time) -> bool {
        self.clients.get(&client).is_some_and(|client| client.counted_until > now)
    }

    /// Counts the calls of a client from now on. Returns false if there is no room.
    fn count_client(&mut self, client: IpAddr, now: Time) -> bool {
        if self.clients.len() >= MAX_CLIENTS && !self.clients.contains_key(&client) {
            self.clients.retain(|_, client| client.kept > 0);
        }
        let has_room = self.clients.len() < MAX_CLIENTS || self.clients.contains_key(&client);
        if has_room {
            self.clients.entry(client).or_default().counted_until = now + COUNTED_TIME;
        }
        has_room
    }

    fn insert(&mut self, holder: u64, call: CountedCall) {
        for key in &call.shares {
            let share = self.shares.entry(*key).or_default();
            (share.calls, share.retry_at) = (share.calls + 1, Time::ZERO);
        }
        if let Some(client) = call.kept_of.and_then(|client| self.clients.get_mut(&client)) {
            client.kept += 1;
        }
        self.next_sweep = self.next_sweep.min(call.end());
        self.by_holder.insert(holder, call);
    }

    fn remove(&mut self, holder: u64) -> Option<AbandonedCall> {
        let call = self.by_holder.remove(&holder)?;
        for key in &call.shares {
            if let Entry::Occupied(mut share) = self.shares.entry(*key) {
                let Share { calls, retry_at } = share.get_mut();
                (*calls, *retry_at) = (*calls - 1, Time::ZERO);
                if *calls == 0 {
                    share.remove();
                }
            }
        }
        if let Some(client) = call.kept_of.and_then(|client| self.clients.get_mut(&client)) {
            client.kept -= 1;
        }
        call.abandoned
    }

    /// The likely end of the first call of a share. A call under way is expected to take as long as others.
    fn retry_at(&mut self, key: &ShareKey, now: Time, usual_time: Span) -> Time {
        let Some(share) = self.shares.get_mut(key) else { return now };
        if share.retry_at <= now {
            let calls = self.by_holder.values().filter(|call| call.shares.contains(key));
            share.retry_at = calls.map(|call| call.likely_end(now, usual_time)).min().unwrap_or(now);
        }
        share.retry_at
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
        let (client, now) = (self.client(ip), clock.now());
        let mut calls = kept_permits.calls.lock();
        let ended = kept_permits.take_ended(&mut calls, now);
        let mut beyond_share = None;
        if let Some(client) = client.filter(|client| calls.counts(*client, now)) {
            let shares = self.share_keys(batch, client);
            if calls.clients.get(&client).is_some_and(|client| client.kept >= MAX_CALLS_OF_CLIENT) {
                beyond_share = shares.first().map(|key| (*key, now + MAX_KEPT_TIME));
            } else {
                let is_beyond =
                    |key: &&ShareKey| calls.shares.get(key).is_some_and(|share| share.calls >= self.share(key.limit));
                if let Some(key) = shares.iter().find(is_beyond) {
                    beyond_share = Some((*key, calls.retry_at(key, now, hold_times.usual(key.limit))));
                }
            }
            let takes = batch.ops().first().is_some_and(|op| op.verb == Verb::Take);
            if takes && beyond_share.is_none() && calls.by_holder.len() < MAX_CALLS {
                let ends_at = now + Concurrency::DEFAULT_LEASE;
                calls.insert(batch.holder(), CountedCall { shares, kept_of: None, ends_at, abandoned: None });
            }
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
        let is_reset = |key: &ShareKey| reset.ops().iter().any(|op| (op.limit, op.key) == (key.limit, key.key));
        let Calls { by_holder, clients, shares, .. } = &mut *self.0.kept_permits.calls.lock();
        for key in shares.keys().filter(|key| is_reset(key)) {
            if let Some(client) = clients.get_mut(&key.client) {
                client.counted_until = Time::ZERO;
            }
        }
        shares.retain(|key, _| !is_reset(key));
        for call in by_holder.values_mut().filter(|call| call.shares.iter().any(is_reset)) {
            call.shares.retain(|key| !is_reset(key));
            if let Some(client) = call.kept_of.take().and_then(|client| clients.get_mut(&client)) {
                client.kept -= 1;
            }
        }
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
        let (Some(client), now) = (self.client(ip), clock.now()) else { return };
        let calls = &mut *kept_permits.calls.lock();
        calls.remove(batch.holder());
        if calls.by_holder.len() < MAX_CALLS && calls.count_client(client, now) {
            kept_permits.is_active.store(true, Ordering::Relaxed);
            let (shares, ends_at) = (self.share_keys(batch, client), now + Concurrency::DEFAULT_LEASE);
            calls.insert(batch.holder(), CountedCall { shares, kept_of: None, ends_at, abandoned: None });
        }
    }

    /// Keeps the permit of an abandoned call. These batches renew it under its own and under shared keys.
    pub(crate) fn keep_permit(&self, own: Batch, shared: Vec<Batch>, ip: Option<IpAddr>) -> KeptPermit<S, C> {
        let GateInner { kept_permits, hold_times, clock, store, .. } = &*self.0;
        let (holder, client, now) = (own.holder(), self.client(ip), clock.now());
        let shares = client.map_or_else(Vec::new, |client| self.share_keys(&own, client));
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
        let likely_end = match client.is_some_and(|client| calls.counts(client, now)) {
            true => ends_at,
            false => (started_at.unwrap_or(now) + longest).min(ends_at),
        };
        calls.remove(holder);
        let kept = client.and_then(|client| calls.clients.get(&client)).map_or(0, |client| client.kept);
        if calls.by_holder.len() < MAX_CALLS && kept < MAX_CALLS_OF_CLIENT {
            kept_permits.is_active.store(true, Ordering::Relaxed);
            let kept_of = client.filter(|client| calls.count_client(*client, now));
            let shares = if kept_of.is_some() { shares } else { Vec::new() };
            let abandoned = Some(AbandonedCall { started_at, releases, likely_end, is_observed: true });
            calls.insert(holder, CountedCall { shares, kept_of, ends_at, abandoned });
        }
        KeptPermit { gate: self.clone(), holder }
    }

    /// The client of a call. Servers on this machine that don't tell their clients aren't one.
    fn client(&self, ip: Option<IpAddr>) -> Option<IpAddr> {
        let client = ip.map(canonical_ip).filter(|ip| !ip.is_loopback() && *ip != UNIX_PEER);
        client.map(|ip| self.0.plan.client_network(ip))
    }

    /// The client under each of its limits on calls in flight.
    fn share_keys(&self, batch: &Batch, client: IpAddr) -> Vec<ShareKey> {
        let plan = &self.0.plan;
        let ops = batch.ops().iter().filter(|op| self.permits(op.limit).is_some() && !plan.is_shadow(op.limit));
        ops.map(|op| ShareKey { limit: op.limit, key: op.key, client }).collect()
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
