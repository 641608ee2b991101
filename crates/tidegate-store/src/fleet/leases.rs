//! Slices of limits, taken in one trip and spent here.
//!
//! A slice is charged before any of it is spent, and counts until its lease has ended: a window records it at the
//! lease's end ([`Batch::ahead`]), so that no call counts before it is made. It is spent for as long as this node's clock
//! has run since it was asked for; what is left then is given back. A crash loses a slice and never mints one.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrayvec::ArrayVec;
use tidegate_core::batch::{MAX_OPS, Outcome};
use tidegate_core::{Batch, Key, Kind, LeaseSpec, LimitId, Limits, Op, Outcomes, Span, Time, Verb, Verdict};
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;

use super::Node;
use crate::StoreError;

/// Locks, so that callers seldom meet.
const SHARDS: usize = 16;
/// The most slices under each lock; who doesn't fit asks the store.
const SLICES: usize = 4096;

/// How often a call waits for others' slices, all of which are spent when it gets there, before it asks for itself.
const WAITS: usize = 8;

/// The keys that a slice is of.
type Places = ArrayVec<(LimitId, Key), MAX_OPS>;
type Shard = HashMap<u64, Held, BuildHasherDefault<Spread>>;

pub(super) struct Leases {
    limits: Arc<Limits>,
    /// Whether any limit has leases.
    any: bool,
    shards: [Mutex<Shard>; SHARDS],
}

struct Held {
    places: Places,
    what: What,
}

enum What {
    Slice(Slice),
    /// Refused for a while, without having been asked again.
    Refusal(Told),
    /// Somebody asks for one.
    Asked(Arc<Notify>),
}

/// An answer of the store's and for how long it holds here.
#[derive(Clone)]
struct Told {
    sent: Time,
    until: Time,
    outcomes: Outcomes,
}

struct Slice {
    left: u64,
    told: Told,
    /// When the store counts it.
    counted_at: Time,
    affinity: u64,
}

/// What came of spending.
pub(super) enum Spent {
    /// Decided here.
    Done(Outcomes),
    /// Not for leases: the store decides.
    Exact,
    /// Somebody else asks for a slice: wait for that.
    Wait(OwnedNotified),
    /// The caller is to ask for a slice, of this size at most, and give back what was left of the last one.
    Ask(Errand),
}

/// To ask for a slice. Whoever drops it without having settled it lets the next one ask.
pub(super) struct Errand {
    id: u64,
    places: Places,
    size: u64,
    lease: Span,
    unspent: Option<Batch>,
}

impl Leases {
    pub(super) fn new(limits: Arc<Limits>) -> Self {
        let any = limits.iter().any(|(_, limit)| limit.sharing().lease.is_some());
        Self { limits, any, shards: Default::default() }
    }

    pub(super) fn any(&self) -> bool {
        self.any
    }

    fn shard(&self, id: u64) -> MutexGuard<'_, Shard> {
        self.shards[(id >> 56) as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How large a slice is and how long it may be spent, for a batch whose limits all have leases and that asks for the
    /// same of each.
    fn terms(&self, batch: &Batch) -> Option<(u64, Span)> {
        let cost = batch.ops().first()?.cost;
        let mut terms = (u64::MAX, Span::MAX);
        for op in batch.ops() {
            let limit = self.limits.get(op.limit)?;
            let LeaseSpec { permille, max_age } = limit.sharing().lease?;
            // What is refused here isn't counted, and a slice that the store refuses isn't one call.
            let counts = limit.counts_refused() || limit.penalty().is_some();
            let fits = op.verb == Verb::Take && op.cost == cost && cost > 0 && !counts;
            let age = match limit.kind() {
                Kind::Window(_) | Kind::Rate(_) => limit.lead(max_age),
                Kind::Quota(_) => max_age,
                Kind::Concurrency(_) | Kind::Cooldown(_) => return None,
            };
            if !fits || limit.is_shadow() {
                return None;
            }
            let size = limit.kind().capacity().saturating_mul(u64::from(permille)) / 1000;
            terms = (terms.0.min(size), terms.1.min(age));
        }
        (terms.0 >= cost.saturating_mul(2) && !terms.1.is_zero()).then_some(terms)
    }

    /// Spends what is at hand.
    pub(super) fn spend(&self, batch: &Batch, now: Time) -> Spent {
        if !self.any {
            return Spent::Exact;
        }
        let Some((size, lease)) = self.terms(batch) else { return Spent::Exact };
        let cost = batch.ops()[0].cost;
        let places: Places = batch.ops().iter().map(|op| (op.limit, op.key)).collect();
        let id = spot(&places);
        let mut shard = self.shard(id);
        let mut unspent = None;
        if let Some(held) = shard.get_mut(&id) {
            if held.places != places {
                return Spent::Exact;
            }
            match &mut held.what {
                What::Slice(slice) if slice.told.holds(now) && slice.left >= cost => {
                    slice.left -= cost;
                    return Spent::Done(slice.outcomes(now));
                }
                What::Refusal(told) if told.holds(now) => return Spent::Done(told.again(now)),
                // From now on, so that the end of the errand can't be missed.
                What::Asked(asked) => return Spent::Wait(Arc::clone(asked).notified_owned()),
                What::Slice(slice) => unspent = slice.give_back(&places),
                What::Refusal(_) => {}
            }
        } else if shard.len() >= SLICES {
            return Spent::Exact;
        }
        shard.insert(id, Held { places: places.clone(), what: What::Asked(Arc::default()) });
        Spent::Ask(Errand { id, places, size, lease, unspent })
    }

    /// Ends an errand with what came of it.
    fn settle(&self, id: u64, what: Option<What>) {
        let mut shard = self.shard(id);
        let before = match (shard.get_mut(&id), what) {
            (Some(held), Some(what)) => Some(std::mem::replace(&mut held.what, what)),
            (Some(_), None) => shard.remove(&id).map(|held| held.what),
            // It was reset meanwhile.
            (None, _) => None,
        };
        if let Some(What::Asked(asked)) = before {
            asked.notify_waiters();
        }
    }

    /// Lets go of an errand that can't be done.
    pub(super) fn give_up(&self, spent: Spent) {
        if let Spent::Ask(errand) = spent {
            self.settle(errand.id, None);
        }
    }

    /// Forgets the slices of a key.
    pub(super) fn forget(&self, limit: LimitId, key: Key) {
        if !self.any {
            return;
        }
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.retain(|_, held| {
                let gone = held.places.contains(&(limit, key));
                if let (true, What::Asked(asked)) = (gone, &held.what) {
                    asked.notify_waiters();
                }
                !gone
            });
        }
    }

    /// Lets go of slices whose lease has ended; what the store gets back.
    pub(super) fn sweep(&self, now: Time) -> Vec<Batch> {
        let mut back = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.retain(|_, held| match &mut held.what {
                What::Slice(slice) if !slice.told.holds(now) => {
                    back.extend(slice.give_back(&held.places));
                    false
                }
                What::Refusal(told) => told.holds(now),
                What::Slice(_) | What::Asked(_) => true,
            });
        }
        back
    }
}

impl Told {
    fn holds(&self, now: Time) -> bool {
        self.sent <= now && now < self.until
    }

    /// The store's time when this node's is `now`.
    fn there(&self, now: Time) -> Time {
        self.outcomes.now() + now.since(self.sent)
    }

    fn again(&self, now: Time) -> Outcomes {
        Outcomes::new(self.there(now), self.outcomes.list().iter().copied())
    }
}

impl Slice {
    fn outcomes(&self, now: Time) -> Outcomes {
        let there = self.told.there(now);
        let list = self.told.outcomes.list().iter().map(|outcome| Outcome {
            used: outcome.used.saturating_sub(self.left),
            remaining: outcome.remaining.saturating_add(self.left),
            retry_at: there,
            ..*outcome
        });
        Outcomes::new(there, list)
    }

    fn give_back(&mut self, places: &[(LimitId, Key)]) -> Option<Batch> {
        let left = std::mem::take(&mut self.left);
        if left == 0 {
            return None;
        }
        let mut batch = Batch::new(0).charged_at(self.told.outcomes.now()).counted_at(self.counted_at);
        batch.set_affinity(self.affinity);
        for &(limit, key) in places {
            batch.push(Op::new(limit, Verb::Refund, key, left)).expect("invariant: as many as were taken together");
        }
        Some(batch)
    }
}

/// Lets the next one ask if this errand isn't finished: its caller may go away.
struct Unsettled<'a> {
    node: &'a Node,
    id: u64,
    open: bool,
}

impl Unsettled<'_> {
    fn settle(mut self, what: Option<What>) {
        self.open = false;
        self.node.leases.settle(self.id, what);
    }
}

impl Drop for Unsettled<'_> {
    fn drop(&mut self) {
        if self.open {
            self.node.leases.settle(self.id, None);
        }
    }
}

/// Decides about a batch for which there was nothing at hand.
pub(super) async fn take(node: &Node, batch: &Batch, mut spent: Spent) -> Result<Outcomes, StoreError> {
    for _ in 0..WAITS {
        match spent {
            Spent::Done(outcomes) => return Ok(outcomes),
            Spent::Exact => return node.exact(batch, node.clock.now()).await,
            Spent::Ask(errand) => return ask(node, batch, errand).await,
            Spent::Wait(asked) => {
                // Whoever asks is done within a few timeouts; its keys may have been reset meanwhile.
                let _ = tokio::time::timeout(node.options.timeout, asked).await;
                if !node.link(batch).is_up() {
                    return node.alone(batch, node.clock.now());
                }
            }
        }
        spent = node.leases.spend(batch, node.clock.now());
    }
    node.leases.give_up(spent);
    node.exact(batch, node.clock.now()).await
}

/// Asks for a slice and spends of it; near the end of a limit for smaller ones, and at last for this call alone.
async fn ask(node: &Node, batch: &Batch, errand: Errand) -> Result<Outcomes, StoreError> {
    let Errand { id, places, mut size, lease, unspent } = errand;
    let unsettled = Unsettled { node, id, open: true };
    let cost = batch.ops()[0].cost;
    if let Some(unspent) = unspent {
        node.tell(&unspent, node.clock.now());
    }
    while size >= cost.saturating_mul(2) {
        let wanted = batch.part(batch.ops().iter().map(|op| Op { cost: size, ..*op })).ahead(lease);
        let sent = node.clock.now();
        let Ok(outcomes) = node.ask(&wanted, sent).await else { break };
        let room = outcomes.list().iter().filter(|outcome| outcome.verdict.refuses()).map(|outcome| outcome.remaining);
        let Some(room) = room.min() else {
            let decided = outcomes.now();
            // A quota's slice is of the period that it was taken in.
            let ends = places.iter().zip(outcomes.list()).filter_map(|((limit, _), outcome)| {
                let kind = node.leases.limits.get(*limit)?.kind();
                matches!(kind, Kind::Quota(_)).then(|| outcome.reset_at.since(decided))
            });
            let until = sent + ends.min().unwrap_or(Span::MAX).min(lease);
            let affinity = batch.terms().affinity;
            let told = Told { sent, until, outcomes };
            let slice = Slice { left: size - cost, told, counted_at: decided + lease, affinity };
            let outcomes = slice.outcomes(sent);
            unsettled.settle(Some(What::Slice(slice)));
            return Ok(outcomes);
        };
        size = (room / 2).min(size / 2);
    }
    let sent = node.clock.now();
    let outcomes = node.exact(batch, sent).await?;
    let waits = outcomes.list().iter().filter(|outcome| outcome.verdict == Verdict::Refused);
    let wait = waits.map(|outcome| outcome.retry_at.since(outcomes.now())).max();
    // Room that comes sooner, of others' slices, is found when this is over.
    let refusal = wait
        .filter(|_| node.link(batch).is_up())
        .map(|wait| What::Refusal(Told { sent, until: sent + wait.min(lease), outcomes: outcomes.clone() }));
    unsettled.settle(refusal);
    Ok(outcomes)
}

/// Which slice the keys have: they are hashes already.
fn spot(places: &[(LimitId, Key)]) -> u64 {
    places.iter().fold(0, |spot: u64, (limit, key)| {
        (spot.rotate_left(23) ^ key.lo() ^ u64::from(limit.get())).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    })
}

/// Takes a number that is spread already as its own hash.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(self.0.rotate_left(8) ^ u64::from(byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}
