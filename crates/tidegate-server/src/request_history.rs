//! The requests of the last hour, over which other limits are tried.
//!
//! A request is some words of 64 bits in a ring: the time, a hash of the client, the actions, and for each limit the
//! hash of its key and the cost. If an hour has more requests than fit, only clients whose hash begins with some zeros
//! are kept: half of them, a quarter, and so on. All requests of a kept client are kept.

use std::collections::VecDeque;
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicU32, Ordering};

use foldhash::quality::RandomState;
use parking_lot::Mutex;
use tidegate::{DecidedCall, Reason, Span, Time};
use tidegate_core::{Batch, Key, LimitId, MAX_OPS, Op, ShareLevel, Verb};
use tidegate_policy::{ActionId, ListStatus, MAX_ACTIONS, MatchedActions, Plan};
use tidegate_replay::{ClientNetwork, RecordedCall};

/// The time for which requests are remembered.
pub(crate) const REMEMBERED: Span = Span::from_secs(3600);
/// The number of rings, each with a lock of its own.
const SHARDS: usize = 32;
/// The most zeros with which the hash of a kept client begins. If its requests don't fit either, the oldest are dropped.
const MAX_LEVEL: u32 = 24;
/// The most words of an entry: its head, its actions, and two for each operation.
const MAX_WORDS: usize = 2 + MAX_ACTIONS.div_ceil(4) + 2 * MAX_OPS;

/// The ring of remembered requests.
pub(crate) struct RequestHistory {
    shards: Box<[Mutex<Shard>]>,
    /// The most words of a shard.
    capacity: usize,
    /// The number of zeros with which the hash of a kept client begins.
    level: AtomicU32,
    sampling: Mutex<Sampling>,
    hasher: RandomState,
}

/// On a cache line of its own.
#[repr(align(128))]
struct Shard {
    words: VecDeque<u64>,
    /// The lowest level at which its entries were kept.
    level: u32,
    /// The number of changes after which earlier entries were dropped.
    generation: u32,
}

/// The changes of the level.
#[derive(Default)]
struct Sampling {
    /// The highest level within the remembered time before the last change.
    earlier_level: u32,
    changed_at: Time,
}

impl Sampling {
    /// The highest level within the remembered time. The clients that were always kept are those of it.
    fn level_of_all(&self, level: u32, now: Time) -> u32 {
        if now.since(self.changed_at) > REMEMBERED { level } else { level.max(self.earlier_level) }
    }

    fn note_change(&mut self, level: u32, now: Time) {
        *self = Self { earlier_level: self.level_of_all(level, now), changed_at: now };
    }
}

/// An entry as it is kept.
struct Entry {
    words: [u64; MAX_WORDS],
    len: usize,
}

impl Entry {
    fn new(client: u64, call: &DecidedCall<'_>) -> Self {
        let list = match call.decision.reason {
            Reason::AllowList => 1,
            Reason::DenyList => 2,
            _ => 0,
        };
        let mut entry = Self { words: [0; MAX_WORDS], len: 2 };
        let mut actions = 0;
        for action in call.actions.iter() {
            entry.words[entry.len + actions / 4] |= (action.index() as u64) << (actions % 4 * 16);
            actions += 1;
        }
        entry.len += actions.div_ceil(4);
        for op in call.ops {
            let share = op.share_level as u64;
            let limit = op.limit.index() as u64;
            entry.words[entry.len] = op.key.lo();
            entry.words[entry.len + 1] = op.cost << 18 | share << 16 | limit;
            entry.len += 2;
        }
        let counts = (call.ops.len() as u64) << 8 | (actions as u64) << 4 | list;
        entry.words[0] = call.decision.now.as_micros() << 12 | counts;
        entry.words[1] = client;
        entry
    }

    fn words(&self) -> &[u64] {
        &self.words[..self.len]
    }
}

/// The time of an entry with this head.
fn time_of(head: u64) -> Time {
    Time::from_micros(head >> 12)
}

/// The number of words of an entry with this head.
fn len_of(head: u64) -> usize {
    let (ops, actions) = ((head >> 8 & 15) as usize, (head >> 4 & 15) as usize);
    2 + actions.div_ceil(4) + 2 * ops
}

/// True if a client is kept at this level.
fn is_kept(client: u64, level: u32) -> bool {
    client.leading_zeros() >= level
}

impl Shard {
    fn push(&mut self, entry: &Entry, level: u32, capacity: usize) -> bool {
        let fits = self.words.len() + entry.len <= capacity;
        if fits {
            self.words.extend(entry.words());
            self.level = self.level.min(level);
        }
        fits
    }

    fn drop_oldest(&mut self) {
        let len = self.words.front().map_or(0, |head| len_of(*head));
        self.words.drain(..len);
    }

    fn drop_before(&mut self, start: Time) {
        while self.words.front().is_some_and(|head| time_of(*head) < start) {
            self.drop_oldest();
        }
    }

    /// Drops the clients that this level doesn't keep.
    fn thin_out(&mut self, level: u32) {
        let words = self.words.make_contiguous();
        let (mut read, mut write) = (0, 0);
        while read < words.len() {
            let len = len_of(words[read]);
            if is_kept(words[read + 1], level) {
                words.copy_within(read..read + len, write);
                write += len;
            }
            read += len;
        }
        self.words.truncate(write);
        self.level = level;
    }
}

impl RequestHistory {
    /// An empty history of at most these bytes. Memory is taken when there are requests.
    pub(crate) fn new(max_bytes: usize) -> Self {
        let capacity = (max_bytes / SHARDS / size_of::<u64>()).max(MAX_WORDS);
        let shard = || Mutex::new(Shard { words: VecDeque::with_capacity(capacity), level: 0, generation: 0 });
        Self {
            shards: (0..SHARDS).map(|_| shard()).collect(),
            capacity,
            level: AtomicU32::new(0),
            sampling: Mutex::default(),
            hasher: RandomState::default(),
        }
    }

    /// Remembers a call that was decided about. `generation` is that of its gate.
    #[inline]
    pub(crate) fn record(&self, generation: u32, call: &DecidedCall<'_>) {
        let client = match (call.ip, call.ops.first()) {
            (Some(ip), _) => self.hasher.hash_one(ClientNetwork::from(ip)),
            (None, op) => op.map_or(0, |op| op.key.lo()),
        };
        if is_kept(client, self.level.load(Ordering::Relaxed)) && is_limited(call) {
            self.keep(generation, client, call);
        }
    }

    fn keep(&self, generation: u32, client: u64, call: &DecidedCall<'_>) {
        let (entry, now) = (Entry::new(client, call), call.decision.now);
        // By the time, so that the requests of a client are spread.
        let mixed = (now.as_micros() ^ client).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let shard = &self.shards[(mixed >> 32) as usize % SHARDS];
        loop {
            let level = self.level.load(Ordering::Relaxed);
            let mut shard = shard.lock();
            if shard.generation != generation || !is_kept(client, level) || shard.push(&entry, level, self.capacity) {
                return;
            }
            shard.drop_before(now - REMEMBERED);
            if shard.level < level {
                shard.thin_out(level);
            }
            while level == MAX_LEVEL && shard.words.len() + entry.len > self.capacity {
                shard.drop_oldest();
            }
            if shard.push(&entry, level, self.capacity) {
                return;
            }
            drop(shard);
            self.raise_level(level, now);
        }
    }

    /// Halves the share of kept clients. Shards drop the others when they are full.
    #[cold]
    fn raise_level(&self, from: u32, now: Time) {
        let mut sampling = self.sampling.lock();
        if self.level.load(Ordering::Relaxed) == from && from < MAX_LEVEL {
            sampling.note_change(from, now);
            self.level.store(from + 1, Ordering::Relaxed);
        }
    }

    /// Drops what is older than an hour. Keeps more clients again, if an hour after the last change there is room.
    pub(crate) fn maintain(&self, now: Time) {
        let mut used = 0;
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.drop_before(now - REMEMBERED);
            used += shard.words.len();
        }
        let mut sampling = self.sampling.lock();
        let level = self.level.load(Ordering::Relaxed);
        if now.since(sampling.changed_at) <= REMEMBERED {
            return;
        }
        let mut next = level;
        while next > 0 && used * 4 <= self.capacity * SHARDS {
            (next, used) = (next - 1, used * 2);
        }
        if next != level {
            sampling.note_change(level, now);
            self.level.store(next, Ordering::Relaxed);
        }
    }

    /// Follows a reload. Drops all requests, if the next policy would count them otherwise. Returns the generation for
    /// the calls of the next gate.
    pub(crate) fn follow(&self, plan: &Plan, next: &Plan) -> u32 {
        let generation = self.shards.first().map_or(0, |shard| shard.lock().generation);
        if plan.counts_same_requests(next) {
            return generation;
        }
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.words.clear();
            shard.generation = generation.wrapping_add(1);
        }
        generation.wrapping_add(1)
    }

    /// The remembered requests of the last hour, in the order of their times.
    pub(crate) fn calls(&self, now: Time) -> RememberedCalls {
        let level = self.sampling.lock().level_of_all(self.level.load(Ordering::Relaxed), now);
        let start = now - REMEMBERED;
        let shards: Vec<Vec<u64>> =
            self.shards.iter().map(|shard| shard.lock().words.iter().copied().collect()).collect();
        let mut order = Vec::new();
        for (shard, words) in shards.iter().enumerate() {
            let mut place = 0;
            while let Some([head, client]) = words.get(place..place + 2) {
                if time_of(*head) >= start && is_kept(*client, level) {
                    order.push((time_of(*head), shard as u32, place as u32));
                }
                place += len_of(*head);
            }
        }
        // Stable, so that calls of one client at the same time stay in their order.
        order.sort_by_key(|(at, ..)| *at);
        RememberedCalls { shards, order, level }
    }
}

/// True if a call is one of those of a limit. It may have no operation, if a list decides or the limit skips it.
fn is_limited(call: &DecidedCall<'_>) -> bool {
    let is_unlimited = |action: ActionId| call.plan.action(action).is_unlimited();
    !call.ops.is_empty() || !call.plan.global().is_empty() || call.actions.iter().any(|action| !is_unlimited(action))
}

/// A copy of the remembered requests.
pub(crate) struct RememberedCalls {
    shards: Vec<Vec<u64>>,
    /// The time, shard and place of each.
    order: Vec<(Time, u32, u32)>,
    level: u32,
}

impl RememberedCalls {
    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    /// The share of clients whose requests are remembered.
    pub(crate) fn share(&self) -> f64 {
        0.5_f64.powi(self.level as i32)
    }

    /// The time of the first request.
    pub(crate) fn first_time(&self) -> Option<Time> {
        self.order.first().map(|(at, ..)| *at)
    }

    /// The requests under a plan that counts them.
    pub(crate) fn iter<'c>(&'c self, plan: &Plan) -> impl Iterator<Item = RecordedCall> + use<'c> {
        let actions: Vec<ActionId> = plan.actions().map(|(id, _)| id).collect();
        self.order.iter().zip(1..).map(move |((at, shard, place), holder)| {
            read_call(*at, &self.shards[*shard as usize][*place as usize..], &actions, holder)
        })
    }
}

fn read_call(at: Time, words: &[u64], ids: &[ActionId], holder: u64) -> RecordedCall {
    let head = words[0];
    let count = (head >> 4 & 15) as usize;
    let mut actions = MatchedActions::NONE;
    for place in 0..count {
        let index = words[2 + place / 4] >> (place % 4 * 16) & 0xffff;
        if let Some(id) = ids.get(index as usize) {
            // As many as there were.
            let _ = actions.insert(*id);
        }
    }
    let mut batch = Batch::new(holder);
    for op in words[2 + count.div_ceil(4)..len_of(head)].chunks_exact(2) {
        let Some(limit) = LimitId::from_index(op[1] as usize & 0xffff) else { continue };
        let share_level = match op[1] >> 16 & 3 {
            0 => ShareLevel::Own,
            1 => ShareLevel::SmallNetwork,
            2 => ShareLevel::LargeNetwork,
            _ => ShareLevel::All,
        };
        let take = Op::new(limit, Verb::Take, Key::new(0, op[0]), op[1] >> 18);
        // As many as there were.
        let _ = batch.push(Op { share_level, ..take });
    }
    let list = match head & 3 {
        1 => ListStatus::Allow,
        2 => ListStatus::Deny,
        _ => ListStatus::Neither,
    };
    RecordedCall { at, client: words[1], actions, list, batch }
}

#[cfg(test)]
mod tests;
