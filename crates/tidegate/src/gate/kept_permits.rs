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
use tidegate_core::{Batch, Clock, Key, LimitId, LimitKind, Span, Time, Verb};
use tidegate_policy::{UNIX_PEER, canonical_ip};
use tidegate_store::Store;

use super::{Gate, GateInner};

/// The longest time for which a permit is kept after its call was abandoned: one lease, because it is renewed once.
const MAX_KEPT_TIME: Span = Concurrency::DEFAULT_LEASE;
/// The maximum number of calls that are kept, finished or counted. The permits of further ones end with their lease.
const MAX_CALLS: usize = 4096;
/// The maximum number of calls that are finished without their clients
/// ([`PermitGuard::count_abandoned`](crate::PermitGuard::count_abandoned)).
pub const MAX_FINISHED_CALLS: usize = 1024;
/// The maximum number of clients whose calls are counted.
const MAX_CLIENTS: usize = 1024;
/// The least and the largest bound on one client's abandoned calls that are kept or finished, under all limits and keys. At
/// the bound its calls are refused: it could otherwise take all places by calls with keys that it invents.
const MAX_CALLS_OF_CLIENT: (usize, usize) = (64, MAX_CALLS / 16);
/// The time for which the calls of a client are counted after it has abandoned one. Ten times the longest for which a permit
/// is kept: calls that a client begins before it abandons the first one are not counted, and it may repeat that.
const COUNTED_TIME: Span = MAX_KEPT_TIME.times(10);
/// The number of calls that end for each that is abandoned if a client merely has a time-out. Of a client with fewer, permits
/// are kept for the whole time. The first two abandoned calls may be chance.
const MIN_ENDED_PER_ABANDONED: u32 = 3;
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
    /// The number of calls whose permits are kept.
    kept: usize,
    /// The number of calls that are finished without their clients.
    finishing: usize,
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
    /// The number of its abandoned calls that are kept or finished.
    abandoned: usize,
    /// The numbers of its calls that were abandoned, and that ended otherwise, since they are counted.
    abandoned_so_far: u32,
    ended_so_far: u32,
    /// Those under which it has abandoned the last call.
    last_shares: Vec<ShareKey>,
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
    /// The likely time at which the client may call again; zero after a change.
    retry_at: Time,
}

/// A call that is under way or abandoned.
#[derive(Debug)]
struct CountedCall {
    shares: Vec<ShareKey>,
    /// The client in whose number of abandoned calls it is.
    abandoner: Option<IpAddr>,
    /// The end of its permit, unless it is renewed.
    ends_at: Time,
    stage: CallStage,
}

#[derive(Debug)]
enum CallStage {
    Running,
    /// Its client has gone away, and it goes on.
    Finishing,
    Kept {
        /// The batches that give the permit back.
        releases: Vec<Batch>,
        likely_end: Time,
        /// True while its work is observed to go on.
        is_observed: bool,
    },
}

impl CountedCall {
    /// The time at which nothing of it counts.
    fn end(&self) -> Time {
        match self.stage {
            CallStage::Kept { likely_end, is_observed: false, .. } => likely_end,
            _ => self.ends_at,
        }
    }

    fn likely_end(&self, now: Time, usual_time: Span) -> Time {
        match self.stage {
            CallStage::Kept { likely_end, .. } if likely_end > now => likely_end,
            CallStage::Kept { .. } => self.ends_at,
            CallStage::Running | CallStage::Finishing => now + usual_time,
        }
    }
}

impl KeptPermits {
    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Relaxed)
    }

    /// Takes the batches that give back the permits of the calls that are likely over.
    fn take_ended(&self, calls: &mut Calls, now: Time) -> Vec<Batch> {
        if now < calls.next_sweep {
            return Vec::new();
        }
        let ended: Vec<u64> =
            calls.by_holder.iter().filter(|(_, call)| call.end() <= now).map(|(holder, _)| *holder).collect();
        let releases = ended.into_iter().flat_map(|holder| calls.remove(holder)).collect();
        calls.clients.retain(|_, client| client.abandoned > 0 || client.counted_until > now);
        let ends = calls.by_holder.values().map(CountedCall::end);
        let next = ends.chain(calls.clients.values().map(|client| client.counted_until).filter(|at| *at > now)).min();
        calls.next_sweep = next.unwrap_or(Time::NEVER);
        self.is_active.store(!(calls.by_holder.is_empty() && calls.clients.is_empty()), Ordering::Relaxed);
        releases
    }

    /// Inserts an abandoned call, and counts the further calls of its client. Returns false if there is no place for it.
    fn insert_abandoned(
        &self,
        calls: &mut Calls,
        holder: u64,
        mut call: CountedCall,
        max_of_client: usize,
        now: Time,
    ) -> bool {
        calls.remove(holder);
        let of_client =
            call.abandoner.and_then(|client| calls.clients.get(&client)).map_or(0, |client| client.abandoned);
        let is_finished = matches!(call.stage, CallStage::Finishing);
        if calls.by_holder.len() >= MAX_CALLS
            || of_client >= max_of_client
            || is_finished && calls.finishing >= MAX_FINISHED_CALLS
        {
            return false;
        }
        call.abandoner = call.abandoner.filter(|client| calls.count_client(*client, &call.shares, now));
        if call.abandoner.is_none() {
            call.shares.clear();
        }
        calls.insert(holder, call);
        self.is_active.store(true, Ordering::Relaxed);
        true
    }
}

impl Calls {
    /// The client of this address, if its calls are counted because it has abandoned one in the last minutes.
    fn counted(&self, client: IpAddr, now: Time) -> Option<&Client> {
        self.clients.get(&client).filter(|client| client.counted_until > now)
    }

    /// Counts the calls of a client from now on. If there is no room, the client whose calls would be counted for the
    /// shortest time is forgotten, unless it has abandoned calls. Returns false if all have some.
    fn count_client(&mut self, client: IpAddr, shares: &[ShareKey], now: Time) -> bool {
        if self.clients.len() >= MAX_CLIENTS && !self.clients.contains_key(&client) {
            let others = self.clients.iter().filter(|(_, other)| other.abandoned == 0);
            let Some((first, _)) = others.min_by_key(|(_, other)| other.counted_until) else { return false };
            self.clients.remove(&{ *first });
        }
        let client = self.clients.entry(client).or_default();
        (client.counted_until, client.last_shares) = (now + COUNTED_TIME, shares.to_vec());
        client.abandoned_so_far = client.abandoned_so_far.saturating_add(1);
        true
    }

    /// True if a client abandons so many of its calls that it may choose those that take longest.
    fn abandons_many(&self, client: IpAddr, now: Time) -> bool {
        self.counted(client, now).is_some_and(|client| {
            client.ended_so_far < client.abandoned_so_far.saturating_sub(1).saturating_mul(MIN_ENDED_PER_ABANDONED)
        })
    }

    fn insert(&mut self, holder: u64, call: CountedCall) {
        for key in &call.shares {
            let share = self.shares.entry(*key).or_default();
            (share.calls, share.retry_at) = (share.calls + 1, Time::ZERO);
        }
        if let Some(client) = call.abandoner.and_then(|client| self.clients.get_mut(&client)) {
            client.abandoned += 1;
        }
        if let Some(number) = self.number_of(&call.stage) {
            *number += 1;
        }
        self.next_sweep = self.next_sweep.min(call.end());
        self.by_holder.insert(holder, call);
    }

    /// Returns the batches that give its permit back, if that is kept.
    fn remove(&mut self, holder: u64) -> Vec<Batch> {
        let Some(call) = self.by_holder.remove(&holder) else { return Vec::new() };
        for key in &call.shares {
            if let Entry::Occupied(mut share) = self.shares.entry(*key) {
                let Share { calls, retry_at } = share.get_mut();
                (*calls, *retry_at) = (*calls - 1, Time::ZERO);
                if *calls == 0 {
                    share.remove();
                }
            }
        }
        if let Some(client) = call.abandoner.and_then(|client| self.clients.get_mut(&client)) {
            client.abandoned -= 1;
        }
        if let Some(number) = self.number_of(&call.stage) {
            *number -= 1;
        }
        match call.stage {
            CallStage::Kept { releases, .. } => releases,
            CallStage::Running | CallStage::Finishing => Vec::new(),
        }
    }

    fn number_of(&mut self, stage: &CallStage) -> Option<&mut usize> {
        match stage {
            CallStage::Running => None,
            CallStage::Finishing => Some(&mut self.finishing),
            CallStage::Kept { .. } => Some(&mut self.kept),
        }
    }

    /// The likely time at which the client may call again, when so many of its calls have ended that it has less than its
    /// share. `None` if it has less. A call under way is expected to take as long as others.
    fn retry_at(&mut self, key: &ShareKey, share: u64, now: Time, usual_time: Span) -> Option<Time> {
        let found = self.shares.get_mut(key).filter(|found| found.calls >= share)?;
        if found.retry_at <= now {
            let calls = self.by_holder.values().filter(|call| call.shares.contains(key));
            let mut ends: Vec<Time> = calls.map(|call| call.likely_end(now, usual_time)).collect();
            ends.sort_unstable();
            found.retry_at = usize::try_from(found.calls - share).ok().and_then(|last| ends.get(last).copied())?;
        }
        Some(found.retry_at)
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
        let releases = self.gate.0.kept_permits.calls.lock().remove(self.holder);
        releases.iter().for_each(|batch| self.gate.submit(batch));
    }
}

impl<S: Store, C: Clock> Drop for KeptPermit<S, C> {
    fn drop(&mut self) {
        let calls = &mut *self.gate.0.kept_permits.calls.lock();
        if let Some(call) = calls.by_holder.get_mut(&self.holder)
            && let CallStage::Kept { likely_end, is_observed, .. } = &mut call.stage
        {
            *is_observed = false;
            calls.next_sweep = calls.next_sweep.min(*likely_end);
        }
    }
}

impl<S: Store, C: Clock> Gate<S, C> {
    /// The number of permits that are kept for calls that were abandoned ([`PermitGuard::keep`](crate::PermitGuard::keep)).
    pub fn kept_permits(&self) -> usize {
        self.0.kept_permits.calls.lock().kept
    }

    /// The number of calls that go on without their callers
    /// ([`PermitGuard::count_abandoned`](crate::PermitGuard::count_abandoned)).
    pub fn finishing_calls(&self) -> usize {
        self.0.kept_permits.calls.lock().finishing
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
    /// calls. Limits of which the client has its share are made to refuse the call.
    #[cold]
    pub(super) fn count_abandoning_client(&self, batch: &mut Batch, ip: Option<IpAddr>) {
        if !self.has_permits(batch) {
            return;
        }
        let GateInner { kept_permits, hold_times, store, clock, .. } = &*self.0;
        let (client, now) = (self.client(ip), clock.now());
        let mut calls = kept_permits.calls.lock();
        let ended = kept_permits.take_ended(&mut calls, now);
        if let Some(client) = client
            && let Some(abandoned) = calls.counted(client, now).map(|client| client.abandoned)
        {
            let shares = self.share_keys(batch, client);
            let is_full = abandoned >= MAX_CALLS_OF_CLIENT.0 && abandoned >= self.max_calls_of_client();
            let mut is_counted = !shares.is_empty() && calls.by_holder.len() < MAX_CALLS;
            for op in batch.ops_mut() {
                is_counted &= op.verb == Verb::Take;
                let Some(key) = shares.iter().find(|key| (key.limit, key.key) == (op.limit, op.key)) else { continue };
                let retry_at = match is_full {
                    true => Some(now + MAX_KEPT_TIME),
                    false => calls.retry_at(key, self.share(op.limit), now, hold_times.usual(op.limit)),
                };
                if let Some(retry_at) = retry_at {
                    op.cost = Concurrency::refused_cost(retry_at.since(now).max(MIN_WAIT));
                    is_counted = false;
                }
            }
            if is_counted {
                let ends_at = now + Concurrency::DEFAULT_LEASE;
                let call = CountedCall { shares, abandoner: None, ends_at, stage: CallStage::Running };
                calls.insert(batch.holder(), call);
            }
        }
        drop(calls);
        ended.iter().for_each(|batch| store.submit(batch, now));
    }

    /// The number of permits that a client may have, if that is less than a limit's because it has abandoned calls.
    pub(super) fn reduced_share(&self, limit: LimitId, ip: Option<IpAddr>) -> Option<u64> {
        let GateInner { kept_permits, plan, clock, .. } = &*self.0;
        let (share, client) = (self.share(limit), self.client(ip)?);
        let is_reduced = share < self.permits(limit)? && !plan.is_shadow(limit);
        (is_reduced && kept_permits.calls.lock().counted(client, clock.now()).is_some()).then_some(share)
    }

    /// Ends the shares that clients have of these limits, and that of this caller, because keys were reset.
    pub(super) fn forget_shares(&self, reset: &Batch, ip: Option<IpAddr>) {
        if !self.has_permits(reset) {
            return;
        }
        let is_reset = |key: &ShareKey| reset.ops().iter().any(|op| (op.limit, op.key) == (key.limit, key.key));
        let caller = self.client(ip);
        let Calls { by_holder, clients, shares, .. } = &mut *self.0.kept_permits.calls.lock();
        for (address, client) in &mut *clients {
            if caller == Some(*address) || client.last_shares.iter().any(is_reset) {
                client.counted_until = Time::ZERO;
            }
        }
        for key in shares.keys().filter(|key| is_reset(key)) {
            if let Some(client) = clients.get_mut(&key.client) {
                client.counted_until = Time::ZERO;
            }
        }
        shares.retain(|key, _| !is_reset(key));
        for call in by_holder.values_mut().filter(|call| call.shares.iter().any(is_reset)) {
            call.shares.retain(|key| !is_reset(key));
            if let Some(client) = call.abandoner.take().and_then(|client| clients.get_mut(&client)) {
                client.abandoned -= 1;
            }
        }
    }

    /// Counts the call of this batch no more. `has_ended` is false if it was refused.
    #[cold]
    pub(super) fn uncount_call(&self, batch: &Batch, has_ended: bool) {
        if !self.has_permits(batch) {
            return;
        }
        let calls = &mut *self.0.kept_permits.calls.lock();
        if has_ended
            && let Some(share) = calls.by_holder.get(&batch.holder()).and_then(|call| call.shares.first())
            && let Some(client) = calls.clients.get_mut(&share.client)
        {
            client.ended_so_far = client.ended_so_far.saturating_add(1);
        }
        calls.remove(batch.holder());
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

    /// Counts a call that goes on without its caller, and the further calls of its client. Returns false if there is no
    /// place for it.
    pub(crate) fn count_abandoned_call(&self, batch: &Batch, ip: Option<IpAddr>) -> bool {
        let GateInner { kept_permits, clock, .. } = &*self.0;
        let (abandoner, now) = (self.client(ip), clock.now());
        let shares = abandoner.map_or_else(Vec::new, |client| self.share_keys(batch, client));
        let ends_at = now + Concurrency::DEFAULT_LEASE;
        let call = CountedCall { shares, abandoner, ends_at, stage: CallStage::Finishing };
        let (max_of_client, calls) = (self.max_calls_of_client(), &mut kept_permits.calls.lock());
        kept_permits.insert_abandoned(calls, batch.holder(), call, max_of_client, now)
    }

    /// Keeps the permit of an abandoned call. These batches renew it under its own and under shared keys. Returns `None` if
    /// there is no place for it: it ends with its lease.
    pub(crate) fn keep_permit(&self, own: Batch, shared: Vec<Batch>, ip: Option<IpAddr>) -> Option<KeptPermit<S, C>> {
        let GateInner { kept_permits, hold_times, clock, store, .. } = &*self.0;
        let (holder, abandoner, now) = (own.holder(), self.client(ip), clock.now());
        let shares = abandoner.map_or_else(Vec::new, |client| self.share_keys(&own, client));
        let ends_at = now + MAX_KEPT_TIME;
        let begun_at = hold_times.take_start(holder).unwrap_or(now);
        let mut likely_end = (begun_at + hold_times.longest(&own)).min(ends_at);
        let mut releases = vec![own];
        releases.extend(shared);
        for batch in &mut releases {
            store.submit(batch, now);
            batch.ops_mut().iter_mut().for_each(|op| op.verb = Verb::Release);
        }
        let (max_of_client, calls) = (self.max_calls_of_client(), &mut kept_permits.calls.lock());
        if abandoner.is_some_and(|client| calls.abandons_many(client, now)) {
            likely_end = ends_at;
        }
        let stage = CallStage::Kept { releases, likely_end, is_observed: true };
        let call = CountedCall { shares, abandoner, ends_at, stage };
        let is_kept = kept_permits.insert_abandoned(calls, holder, call, max_of_client, now);
        is_kept.then(|| KeptPermit { gate: self.clone(), holder })
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

    /// The maximum number of one client's abandoned calls that are kept or finished: as many as the largest share.
    fn max_calls_of_client(&self) -> usize {
        let largest = self.0.hold_times.limits().map(|limit| self.share(limit)).max().unwrap_or(0);
        usize::try_from(largest).unwrap_or(usize::MAX).clamp(MAX_CALLS_OF_CLIENT.0, MAX_CALLS_OF_CLIENT.1)
    }
}
