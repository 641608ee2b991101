//! Many nodes over one remote store, and life without it.
//!
//! A decision costs one round trip, and none where a node may answer by itself: a key under a block is refused until
//! the block ends (`blocks`), and what the store has lost of it comes back (`returns`); a slice of a limit that was taken in one go is spent here (`leases`). While the store
//! can't be reached (`link`), each limit does what its [`OnOutage`] says; where that is `local`, the node goes on with
//! its share of the limit (`share`), and what it let through meanwhile is told to the store when it is back.

mod blocks;
mod chores;
mod leases;
mod link;
mod returns;
mod share;

use std::future::{Future, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tidegate_core::batch::{Outcome, RefusalSummary};
use tidegate_core::{
    Batch, Clock, Concurrency, Key, Limit, LimitError, LimitId, LimitKind, Limits, OnOutage, Op, Outcomes, ShareLevel,
    Span, Time, Verb,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::{Answer, Losses, Remote, Store, StoreError, Votes, Waiting};
use blocks::Blocks;
use leases::{Leases, Spent};
use link::{Link, Place};
use returns::Resets;
use share::held;

/// How many batches wait to be told to the store; more are dropped, counted and logged.
const TOLD: usize = 4096;

/// How a fleet's node keeps to its store.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct FleetOptions {
    /// How long a decision waits for the store. Default 50 ms.
    pub timeout: Duration,
    /// How many nodes are assumed to share the store until it has told. Default 1.
    pub nodes: u32,
    /// The most memory that counts may take while the store can't be reached, in bytes. Default 64 MiB.
    pub max_bytes: usize,
    /// What this node is known by among the others: a random number.
    pub node: u64,
    /// The secret that keys are hashed under, if the store keeps it: a store that has lost its memory is told it again.
    pub seed: Option<[u8; 16]>,
}

impl FleetOptions {
    /// The defaults, for a node of this number.
    pub fn new(node: u64) -> Self {
        Self { timeout: Duration::from_millis(50), nodes: 1, max_bytes: crate::Memory::MAX_BYTES, node, seed: None }
    }
}

/// The limits of a plan, and two more: one by which the nodes that share a store are counted, and where anything is ever
/// blocked one under which the store keeps when keys were reset. To open the [`Remote`] with that a [`Fleet`] is made of.
///
/// # Errors
/// The plan has 4094 limits or more already.
pub fn fleet_limits(limits: &Limits) -> Result<Limits, LimitError> {
    /// The same in every plan: nodes that count different things are one fleet all the same.
    const TAG: u64 = 0x7469_6465_6761_7465;
    let roll = Limit::new(LimitKind::Concurrency(Concurrency::new(4096, LEASE)?)).with_tag(TAG);
    let resets = returns::limit(limits.iter().map(|(_, limit)| limit))?;
    Limits::new(limits.iter().map(|(_, limit)| limit.clone()).chain(resets).chain([roll]).collect())
}

/// How many links that become suspect within a second of housekeeping are told of.
const STALLS: u64 = 3;
/// How long a node counts that was not heard of.
const LEASE: Span = Span::from_secs(10);
/// Under which key the nodes are counted.
const ROLL: Key = Key::new(0x726f_6c6c, 0x7469_6465_6761_7465);

/// One node's view of a store that many share. Clones are the same node.
#[derive(Clone)]
pub struct Fleet {
    node: Arc<Node>,
    /// Ends with the last clone.
    _chores: Arc<JoinSet<()>>,
}

/// What decisions and chores share.
struct Node {
    remote: Box<dyn Remote>,
    clock: Box<dyn Clock>,
    options: FleetOptions,
    roll: Option<LimitId>,
    links: Box<[Link]>,
    blocks: Blocks,
    resets: Resets,
    leases: Arc<Leases>,
    tells: mpsc::Sender<(Batch, Time)>,
    untold: AtomicU64,
    /// How many links have become suspect since this was last told.
    late: AtomicU64,
    /// How many nodes there were when the store last told; after a start or an outage, what it tells until
    /// `settled_at` may leave some out.
    size: AtomicUsize,
    settled_at: AtomicU64,
    /// Whether the store was found to have another secret, so that the log is told once.
    strange: AtomicBool,
    /// How many links are down, so that the log is told once.
    down: AtomicUsize,
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fleet").field("nodes", &self.nodes()).field("is_up", &self.is_up()).finish_non_exhaustive()
    }
}

impl Fleet {
    /// A node over a remote store whose limits are [`fleet_limits`]. Needs a tokio runtime with time, in which it looks
    /// after the store for as long as it lives.
    pub fn start(remote: Box<dyn Remote>, clock: impl Clock, options: FleetOptions) -> Self {
        let limits = Arc::clone(remote.limits());
        let (tells, told) = mpsc::channel(TOLD);
        let parts = remote.parts().max(1);
        let resets = remote.resets();
        let settled_at = AtomicU64::new((clock.now() + LEASE).as_micros());
        let node = Arc::new(Node {
            roll: limits.iter().map(|(id, _)| id).last(),
            links: (0..parts).map(|_| Link::default()).collect(),
            blocks: Blocks::new(Arc::clone(&limits), resets.is_some()),
            resets: Resets::new(Arc::clone(&limits)),
            leases: Arc::new(Leases::new(limits)),
            remote,
            clock: Box::new(clock),
            options,
            tells,
            untold: AtomicU64::new(0),
            late: AtomicU64::new(0),
            size: AtomicUsize::new(options.nodes.max(1) as usize),
            settled_at,
            strange: AtomicBool::new(false),
            down: AtomicUsize::new(0),
        });
        let chores = chores::start(&node, told, resets);
        Self { node, _chores: Arc::new(chores) }
    }

    /// How many nodes share the store, as it last told.
    pub fn nodes(&self) -> usize {
        self.node.size.load(Ordering::Relaxed)
    }

    /// Whether the store can be reached, all of it.
    pub fn is_up(&self) -> bool {
        self.node.links.iter().all(Link::is_up)
    }
}

impl Store for Fleet {
    type Later = Waiting<Outcomes>;

    fn limits(&self) -> &Arc<Limits> {
        self.node.remote.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> Answer<Self::Later> {
        let node = &self.node;
        if batch.ops().iter().any(|op| op.verb == Verb::Reset) {
            return Answer::Later(node.reset(batch, now));
        }
        // A key is shared for want of room in this node's memory, and goes on there.
        let is_up = node.link(batch).is_up() && batch.ops().iter().all(|op| op.share_level == ShareLevel::Own);
        if let Some(outcomes) = node.blocks.answer(batch, is_up, now) {
            return Answer::Ready(outcomes);
        }
        let spent = node.spend(batch, now);
        if let Spent::Done(outcomes) = spent {
            return Answer::Ready(outcomes);
        }
        if !is_up {
            return match node.alone(batch, now) {
                Ok(outcomes) => Answer::Ready(outcomes),
                Err(error) => Answer::Later(Box::pin(ready(Err(error)))),
            };
        }
        let (node, batch) = (Arc::clone(node), batch.clone());
        Answer::Later(Box::pin(async move {
            match spent {
                Spent::Exact => node.exact(&batch, now).await,
                spent => leases::take(&node, &batch, spent).await,
            }
        }))
    }

    fn tell(&self, batch: &Batch, now: Time) {
        self.node.tell(batch, now);
    }

    fn vote(&self, topic: Key, yes: bool, now: Time) -> Option<impl Future<Output = Option<Votes>> + Send + 'static> {
        let node = Arc::clone(&self.node);
        let batch = |verb| node.on_roll(verb, topic, topic.lo().max(1));
        if !yes {
            self.node.tell(&batch(Verb::Release), now);
        }
        let batch = batch(if yes { Verb::Take } else { Verb::Peek });
        Some(async move {
            let outcomes = node.ask(&batch, now).await.ok()?;
            let yes = usize::try_from(outcomes.list().first()?.used).ok()?;
            Some(Votes { yes, nodes: node.size.load(Ordering::Relaxed) })
        })
    }

    fn tend(&self, now: Time) -> Losses {
        let untold = self.node.untold.swap(0, Ordering::Relaxed);
        if untold > 0 {
            tracing::warn!(untold, "the store is too slow for what it is told: refunds and the like were dropped");
        }
        let late = self.node.late.swap(0, Ordering::Relaxed);
        if late >= STALLS {
            tracing::warn!(late, "answers of the store come too late: decisions are made without it, time and again");
        }
        self.node.links.iter().fold(Losses::default(), |losses, link| {
            let local = link.local().map(|local| local.memory().tend(now));
            link.tidy();
            losses.and(local.unwrap_or_default())
        })
    }
}

impl Node {
    /// Spends of a slice that is at hand, and gives back what is left of one that isn't enough.
    fn spend(&self, batch: &Batch, now: Time) -> Spent {
        let (spent, unspent) = self.leases.spend(batch, now);
        if let Some(unspent) = unspent {
            self.tell(&unspent, now);
        }
        spent
    }

    /// The links to what holds a batch's keys, one for each.
    fn links(&self, batch: &Batch) -> impl Iterator<Item = (&Link, Place)> {
        let affinity = batch.context().affinity;
        batch.ops().iter().map(move |op| (self.link_to(affinity, op.key), Place { affinity, key: op.key }))
    }

    fn link_to(&self, affinity: u64, key: Key) -> &Link {
        self.links.get(self.remote.part(affinity, key)).unwrap_or(&self.links[0])
    }

    /// The link that a batch's fate hangs on: one that isn't up, if there is any.
    fn link(&self, batch: &Batch) -> &Link {
        let mut links = self.links(batch).map(|(link, _)| link);
        let first = links.next().unwrap_or(&self.links[0]);
        if first.is_up() { links.find(|link| !link.is_up()).unwrap_or(first) } else { first }
    }

    /// The link to where the roll is.
    fn home(&self) -> &Link {
        self.link_to(0, ROLL)
    }

    /// Asks the store, and if it doesn't answer goes on without it.
    async fn exact(&self, batch: &Batch, sent: Time) -> Result<Outcomes, StoreError> {
        if let Ok(outcomes) = self.ask(batch, sent).await {
            return Ok(outcomes);
        }
        let now = self.clock.now();
        let alone = self.blocks.answer(batch, false, now).map_or_else(|| self.alone(batch, now), Ok);
        // The store may have granted what nobody holds now. Who is let through here gives it back there in the end.
        if alone.as_ref().map_or(true, Outcomes::refuses)
            && let Some(release) = batch.to_release(self.remote.limits())
        {
            self.tell(&release, now);
        }
        alone
    }

    /// Asks the store for as long as its link holds. An answer that knows nothing of a block that should live is believed only
    /// if the key was reset since.
    async fn ask(&self, batch: &Batch, sent: Time) -> Result<Outcomes, StoreError> {
        let outcomes = self.ask_only(batch, sent).await?;
        if self.blocks.learn(batch, &outcomes, sent) {
            return Ok(Box::pin(self.doubt(batch, outcomes)).await);
        }
        Ok(outcomes)
    }

    /// The answer in place of one that knows nothing of a block. What that charged is given back.
    async fn doubt(&self, batch: &Batch, outcomes: Outcomes) -> Outcomes {
        for op in batch.ops() {
            self.settle_doubt(op.limit, op.key).await;
        }
        let now = self.clock.now();
        let Some(blocked) = self.blocks.answer(batch, false, now) else { return outcomes };
        let limits = self.remote.limits();
        if let Some(release) = batch.to_release(limits) {
            self.tell(&release, now);
        }
        let mut against = RefusalSummary::default();
        against.add_part(batch, limits, &outcomes);
        let counts = |limit: &Limit| !limit.kind().has_permits();
        let charged = batch.ops().iter().zip(outcomes.list()).filter(|(op, outcome)| {
            op.verb == Verb::Take
                && limits
                    .get(op.limit)
                    .is_some_and(|limit| counts(limit) && against.must_refund_if_refused(limit, outcome))
        });
        let (charged_at, lead) = (outcomes.now(), batch.context().lead);
        let refund = batch.with_ops(charged.map(|(op, _)| Op { verb: Verb::Refund, ..*op }));
        if !refund.ops().is_empty() {
            self.tell(&refund.with_charged_at(charged_at).with_counted_at(charged_at + lead), now);
        }
        blocked
    }

    /// Asks the store for as long as its link holds, and learns nothing of the answer.
    async fn ask_only(&self, batch: &Batch, sent: Time) -> Result<Outcomes, StoreError> {
        let link = self.link(batch);
        let outcomes = link.wait(self.remote.ask(batch, sent), self.options.timeout).await;
        match &outcomes {
            Ok(_) => {}
            // It fell for another's failure, or isn't up.
            Err(StoreError::Unavailable) => {}
            // Which of them it was is found out by looking at each.
            Err(_) => {
                self.late.fetch_add(1, Ordering::Relaxed);
                self.links(batch).for_each(|(link, place)| link.suspect(|| self.local(), place));
            }
        }
        outcomes
    }

    /// Forgets keys, here and in the store. While that is away, it is told when it is back, whatever else passes uncounted.
    #[cold]
    fn reset(self: &Arc<Self>, batch: &Batch, now: Time) -> Waiting<Outcomes> {
        let (node, batch) = (Arc::clone(self), batch.clone());
        Box::pin(async move {
            let forget =
                || batch.ops().iter().filter(|op| op.verb == Verb::Reset).for_each(|op| node.forget(op.limit, op.key));
            // What fails changes nothing. What succeeds is forgotten again afterwards: a call on the way may have met the block.
            if node.on_outage(&batch) != OnOutage::Deny {
                forget();
            }
            let (mut decided, mut list) = (now, Vec::with_capacity(batch.ops().len()));
            for (part, asked) in node.resets.noted(&batch) {
                match node.ask(&part, now).await {
                    Ok(outcomes) => {
                        decided = outcomes.now();
                        list.extend(outcomes.list().iter().take(asked));
                    }
                    Err(_) if node.on_outage(&batch) == OnOutage::Deny => return Err(StoreError::Unavailable),
                    Err(_) => return Ok(node.keep(&batch, node.clock.now())),
                }
            }
            forget();
            Ok(Outcomes::new(decided, list))
        })
    }

    /// What a node goes on with when a part of the store is gone.
    fn local(&self) -> share::Local {
        let bytes = self.options.max_bytes / self.links.len();
        share::Local::new(self.remote.limits(), self.size.load(Ordering::Relaxed), bytes)
    }

    /// Decides without the store.
    fn alone(&self, batch: &Batch, now: Time) -> Result<Outcomes, StoreError> {
        match self.on_outage(batch) {
            OnOutage::Deny => Err(StoreError::Unavailable),
            OnOutage::Allow => Ok(share::untouched(batch, self.remote.limits(), now)),
            OnOutage::Local => Ok(self.keep(batch, now)),
        }
    }

    fn on_outage(&self, batch: &Batch) -> OnOutage {
        let first = batch.ops().first().and_then(|op| self.remote.limits().get(op.limit));
        first.map_or(OnOutage::Local, |limit| limit.sharing().on_outage)
    }

    /// Tells the store, and if it doesn't answer keeps it in mind until it is back.
    async fn ask_or_keep(self: Arc<Self>, batch: Batch, sent: Time) {
        // The store may have lost a permit of a call that still runs.
        let lost = |(op, outcome): (&Op, &Outcome)| op.verb == Verb::Renew && outcome.verdict.refuses();
        let is_told = match self.ask(&batch, sent).await {
            Err(_) => false,
            Ok(outcomes) => {
                !batch.ops().iter().zip(outcomes.list()).any(lost) || self.ask(&held(&batch), sent).await.is_ok()
            }
        };
        if !is_told {
            self.keep(&batch, self.clock.now());
        }
    }

    /// Carries a batch out with this node's share. If the store is there, it is told soon.
    fn keep(&self, batch: &Batch, now: Time) -> Outcomes {
        let link = self.link(batch);
        let outcomes = link.local_or(|| self.local()).apply(batch, now);
        self.blocks.impose(batch, &outcomes, now);
        if link.is_up() {
            link.poked.notify_one();
        }
        outcomes
    }

    fn tell(&self, batch: &Batch, now: Time) {
        let link = self.link(batch);
        if !link.is_up() {
            self.keep(batch, now);
        } else if self.tells.try_send((batch.clone(), now)).is_err() {
            self.untold.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Forgets what this node knows of a key that was reset.
    fn forget(&self, limit: LimitId, key: Key) {
        let now = self.clock.now();
        self.blocks.forget(limit, key, now);
        self.leases.forget(limit, key);
        self.links.iter().filter_map(Link::local).for_each(|local| local.forget(limit, key, now));
    }

    /// The batch by which this node says that it is there.
    fn roll_call(&self) -> Batch {
        self.on_roll(Verb::Take, ROLL, 0)
    }

    /// A batch by which the part of the store behind a link shows that it takes writes.
    fn look(&self, link: &Link) -> Batch {
        match link.failed() {
            // What is in one part has the roll in it too.
            Some(Place { affinity, key }) if self.links.len() > 1 => {
                self.on_roll(Verb::Take, Key::new(ROLL.hi(), key.lo()), affinity)
            }
            _ => self.roll_call(),
        }
    }

    /// The roll was answered.
    fn count(&self, outcomes: &Outcomes) {
        let nodes = outcomes.list().first().and_then(|outcome| usize::try_from(outcome.used).ok()).unwrap_or(1).max(1);
        if self.clock.now().as_micros() < self.settled_at.load(Ordering::Relaxed) {
            self.size.fetch_max(nodes, Ordering::Relaxed);
        } else {
            self.size.store(nodes, Ordering::Relaxed);
        }
    }

    /// A batch about a list of nodes.
    fn on_roll(&self, verb: Verb, list: Key, affinity: u64) -> Batch {
        let op = self.roll.map(|roll| Op::new(roll, verb, list, 1));
        let mut batch = Batch::new(self.options.node).with_ops(op);
        batch.set_affinity(affinity);
        batch
    }
}
