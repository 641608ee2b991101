//! Slices of limits, taken in one trip and spent here.
//!
//! A slice is charged before any of it is spent, and counts until its lease has ended: a window records it at the
//! lease's end ([`Batch::with_lead`]), so that no call counts before it is made. It is spent for as long as this node's clock
//! has run since it was asked for; what is left then is given back. A crash loses a slice and never mints one.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

use arrayvec::ArrayVec;
use foldhash::fast::RandomState;
use parking_lot::{Mutex, MutexGuard};
use tidegate_core::batch::{MAX_OPS, Outcome};
use tidegate_core::{Batch, Key, LeaseSpec, LimitId, Limits, Op, Outcomes, Span, Time, Verb, Verdict};
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
type Shard = HashMap<Places, What, RandomState>;

pub(super) struct Leases {
    limits: Arc<Limits>,
    /// Whether any limit has leases.
    any: bool,
    shards: [Mutex<Shard>; SHARDS],
}

enum What {
    Slice(Slice),
    /// A call of this cost was refused: those of the same cost are for a while, without being asked about.
    Refusal(u64, Told),
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
#[expect(clippy::large_enum_variant, reason = "boxing the common answer would allocate on every decision")]
pub(super) enum Spent {
    /// Decided here.
    Done(Outcomes),
    /// Not for leases: the store decides.
    Exact,
    /// Somebody else asks for a slice: wait for that.
    Wait(OwnedNotified),
    /// The caller is to ask for a slice.
    Ask(Errand),
}

/// To ask for a slice, of this size at most. Its caller may go away at any time: dropped before it is settled, it lets
/// the next one ask.
pub(super) struct Errand {
    leases: Arc<Leases>,
    places: Places,
    asked: Arc<Notify>,
    size: u64,
    lease: Span,
}

impl Leases {
    pub(super) fn new(limits: Arc<Limits>) -> Self {
        let any = limits.iter().any(|(_, limit)| limit.sharing().lease.is_some());
        Self { limits, any, shards: Default::default() }
    }

    pub(super) fn any(&self) -> bool {
        self.any
    }

    fn shard(&self, places: &Places) -> MutexGuard<'_, Shard> {
        let first = places.first().map_or(0, |(_, key)| key.lo());
        self.shards[first as usize % SHARDS].lock()
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
            let age = limit.lease_age(max_age)?;
            if !fits || limit.is_shadow() {
                return None;
            }
            let size = limit.kind().capacity().saturating_mul(u64::from(permille)) / 1000;
            terms = (terms.0.min(size), terms.1.min(age));
        }
        (terms.0 >= cost.saturating_mul(2) && !terms.1.is_zero()).then_some(terms)
    }

    /// Spends what is at hand; and what the store gets back of a slice that isn't enough.
    pub(super) fn spend(self: &Arc<Self>, batch: &Batch, now: Time) -> (Spent, Option<Batch>) {
        let Some((size, lease)) = self.any.then(|| self.terms(batch)).flatten() else { return (Spent::Exact, None) };
        let cost = batch.ops()[0].cost;
        let places: Places = batch.ops().iter().map(|op| (op.limit, op.key)).collect();
        let mut shard = self.shard(&places);
        let is_full = shard.len() >= SLICES;
        let mut unspent = None;
        match shard.get_mut(&places) {
            Some(What::Slice(slice)) if slice.told.holds(now) && slice.left >= cost => {
                slice.left -= cost;
                return (Spent::Done(slice.outcomes(now)), None);
            }
            Some(What::Slice(slice)) => unspent = slice.give_back(&places),
            Some(What::Refusal(refused, told)) if told.holds(now) => match cost.cmp(refused) {
                Ordering::Equal => return (Spent::Done(told.again(now)), None),
                // It has to wait for longer, and how long wasn't told.
                Ordering::Greater => return (Spent::Exact, None),
                // What was too little for the other may be enough.
                Ordering::Less => {}
            },
            Some(What::Refusal(..)) => {}
            // From now on, so that the end of the errand can't be missed.
            Some(What::Asked(asked)) => return (Spent::Wait(Arc::clone(asked).notified_owned()), None),
            None if is_full => return (Spent::Exact, None),
            None => {}
        }
        let asked = Arc::<Notify>::default();
        shard.insert(places.clone(), What::Asked(Arc::clone(&asked)));
        (Spent::Ask(Errand { leases: Arc::clone(self), places, asked, size, lease }), unspent)
    }

    /// Forgets the slices of a key.
    pub(super) fn forget(&self, limit: LimitId, key: Key) {
        if !self.any {
            return;
        }
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.retain(|places, what| {
                let gone = places.contains(&(limit, key));
                if let (true, What::Asked(asked)) = (gone, what) {
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
            let mut shard = shard.lock();
            shard.retain(|places, what| match what {
                What::Slice(slice) if !slice.told.holds(now) => {
                    back.extend(slice.give_back(places));
                    false
                }
                What::Refusal(_, told) => told.holds(now),
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
        let mut batch = Batch::new(0).with_charged_at(self.told.outcomes.now()).with_counted_at(self.counted_at);
        batch.set_affinity(self.affinity);
        for &(limit, key) in places {
            batch.push(Op::new(limit, Verb::Refund, key, left)).expect("invariant: as many as were taken together");
        }
        Some(batch)
    }
}

impl Errand {
    /// Ends it with what came of it, unless the keys were reset meanwhile.
    fn settle(&self, what: Option<What>) {
        let mut shard = self.leases.shard(&self.places);
        let is_own = |what: &What| matches!(what, What::Asked(asked) if Arc::ptr_eq(asked, &self.asked));
        if shard.get(&self.places).is_some_and(is_own) {
            match what {
                Some(what) => shard.insert(self.places.clone(), what),
                None => shard.remove(&self.places),
            };
        }
        self.asked.notify_waiters();
    }
}

impl Drop for Errand {
    fn drop(&mut self) {
        self.settle(None);
    }
}

/// Decides about a batch for which there was nothing at hand.
pub(super) async fn take(node: &Node, batch: &Batch, mut spent: Spent) -> Result<Outcomes, StoreError> {
    for waits in 0.. {
        match spent {
            Spent::Done(outcomes) => return Ok(outcomes),
            Spent::Ask(errand) => return ask(node, batch, errand).await,
            Spent::Wait(asked) if waits < WAITS => {
                // Whoever asks is done within a few timeouts; its keys may have been reset meanwhile.
                let _ = tokio::time::timeout(node.options.timeout, asked).await;
                if !node.link(batch).is_up() {
                    return node.alone(batch, node.clock.now());
                }
            }
            Spent::Exact | Spent::Wait(_) => break,
        }
        spent = node.spend(batch, node.clock.now());
    }
    node.exact(batch, node.clock.now()).await
}

/// Asks for a slice and spends of it; near the end of a limit for smaller ones, and at last for this call alone.
async fn ask(node: &Node, batch: &Batch, errand: Errand) -> Result<Outcomes, StoreError> {
    let (mut size, lease) = (errand.size, errand.lease);
    let cost = batch.ops()[0].cost;
    while size >= cost.saturating_mul(2) {
        let wanted = batch.with_ops(batch.ops().iter().map(|op| Op { cost: size, ..*op })).with_lead(lease);
        let sent = node.clock.now();
        let Ok(outcomes) = node.ask(&wanted, sent).await else { break };
        let room = outcomes.list().iter().filter(|outcome| outcome.verdict.refuses()).map(|outcome| outcome.remaining);
        let Some(room) = room.min() else {
            let decided = outcomes.now();
            // A quota's slice is of the period that it was taken in.
            let ends = batch.ops().iter().zip(outcomes.list()).filter_map(|(op, outcome)| {
                let kind = node.leases.limits.get(op.limit)?.kind();
                kind.has_periods().then(|| outcome.reset_at.since(decided))
            });
            let until = sent + ends.min().unwrap_or(Span::MAX).min(lease);
            let affinity = batch.context().affinity;
            let told = Told { sent, until, outcomes };
            let slice = Slice { left: size - cost, told, counted_at: decided + lease, affinity };
            let outcomes = slice.outcomes(sent);
            errand.settle(Some(What::Slice(slice)));
            return Ok(outcomes);
        };
        size = (room / 2).min(size / 2);
    }
    let sent = node.clock.now();
    let outcomes = node.exact(batch, sent).await?;
    let waits = outcomes.list().iter().filter(|outcome| outcome.verdict == Verdict::Refused);
    let wait = waits.map(|outcome| outcome.retry_at.since(outcomes.now())).max();
    // Room that comes sooner, of others' slices, is found when this is over.
    if let Some(wait) = wait.filter(|_| node.link(batch).is_up()) {
        let told = Told { sent, until: sent + wait.min(lease), outcomes: outcomes.clone() };
        errand.settle(Some(What::Refusal(cost, told)));
    }
    Ok(outcomes)
}
