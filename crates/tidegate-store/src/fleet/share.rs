//! A node's share of every limit, to go on with while the store can't be reached.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tidegate_core::batch::{OpContext, Outcome, RefusalSummary};
use tidegate_core::state::Usage;
use tidegate_core::{Batch, Key, KeyState, LimitId, LimitKind, Limits, Op, Outcomes, Quota, Time, Verb, Verdict};

use super::returns::Known;
use crate::{Immediate, Memory, Store};

/// The most keys of which the store is told when it is back. What happened to more is forgotten.
const UNTOLD: usize = 1 << 16;
/// The most batches that give permits back then; what more were to be are held until their leases end.
const RELEASED: usize = 1 << 12;

/// A memory store of a share of each limit, and what was done there that the store hasn't been told.
pub(super) struct Local {
    memory: Memory,
    nodes: usize,
    untold: Mutex<HashMap<(LimitId, Key), Untold>>,
    /// Batches that give permits back which the store may know of.
    released: Mutex<Vec<Batch>>,
}

/// What happened to a key meanwhile.
#[derive(Clone, Copy, Default)]
pub(super) struct Untold {
    /// What the keys of its batch have in common.
    affinity: u64,
    was_reset: bool,
    /// What was charged and not given back, of a limit that counts.
    charged: u64,
    /// Strikes that the store may have been told of in vain, those included that it had.
    told: u8,
    /// Further strikes that were taken, when the last was, until when its block lasts, and its parole.
    strikes: u8,
    struck: Time,
    ends: Time,
    parole: u64,
}

impl Untold {
    /// The penalty in it, if there is any.
    pub(super) fn penalty(&self, (limit, key): (LimitId, Key)) -> Option<Known> {
        let &Self { affinity, told, strikes, parole, struck, ends, .. } = self;
        (told > 0 || strikes > 0).then_some(Known {
            limit,
            key,
            affinity,
            strikes: told,
            more: strikes,
            parole,
            began: None,
            struck,
            ends,
        })
    }

    /// The penalty alone, once the rest has been told, as far as it was brought back.
    pub(super) fn but_told(self, known: &Known) -> Self {
        Self { charged: 0, was_reset: false, told: known.strikes, strikes: known.more, ..self }
    }

    fn strike(&mut self, op: &Op, outcome: &Outcome, now: Time) {
        self.strikes = self.strikes.saturating_add(1);
        self.struck = now;
        self.ends = outcome.block_until;
        self.parole = if outcome.retry_at <= outcome.block_until { op.cost } else { 0 };
    }
}

impl Local {
    /// A share of one in `nodes`.
    pub(super) fn new(limits: &Limits, nodes: usize, max_bytes: usize) -> Self {
        let shares = limits.iter().map(|(_, limit)| limit.with_kind(limit.kind().share(nodes as u64))).collect();
        let shares = Limits::new(shares).expect("invariant: as many limits as there were");
        Self {
            memory: Memory::new(Arc::new(shares), max_bytes),
            nodes,
            untold: Mutex::default(),
            released: Mutex::default(),
        }
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// One in how many it is a share of.
    pub(super) fn nodes(&self) -> usize {
        self.nodes
    }

    /// Whether nothing here counts any more.
    pub(super) fn is_empty(&self) -> bool {
        self.memory.stats().entries == 0
    }

    pub(super) fn apply(&self, batch: &Batch, now: Time) -> Outcomes {
        let mut outcomes = self.memory.apply_now(batch, now);
        if batch.ops().iter().any(|op| op.verb == Verb::Renew) {
            // Its permit is the store's: it lives on until that can be asked, and takes its place here.
            let list = outcomes.list().iter().map(|outcome| Outcome { verdict: Verdict::Admitted, ..*outcome });
            outcomes = Outcomes::new(outcomes.now(), list);
            self.memory.apply_now(&held(batch), now);
        }
        if batch.ops().iter().any(|op| op.verb == Verb::Release) {
            let mut released = self.released.lock();
            if released.len() < RELEASED {
                released.push(batch.clone());
            }
        }
        let limits = self.memory.limits();
        let mut against = RefusalSummary::default();
        against.add_part(batch, limits, &outcomes);
        let mut untold = self.untold.lock();
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()) {
            let Some(limit) = limits.get(op.limit) else { continue };
            let is_charged = op.verb == Verb::Debit || op.verb == Verb::Take && against.is_charged(limit, outcome);
            let is_struck = op.verb == Verb::Take && outcome.verdict == Verdict::Refused && outcome.block_until > now;
            let is_news = is_charged
                || is_struck
                || matches!(
                    op.verb,
                    Verb::Reset | Verb::Renew | Verb::Throttle { .. } | Verb::Disable | Verb::Pace { failed: true, .. }
                );
            let place = (op.limit, op.key);
            let known = untold.contains_key(&place);
            let is_over = |quota: &Quota| batch.context().charged_at < quota.period(now).start;
            let is_over = matches!(limit.kind(), LimitKind::Quota(quota) if is_over(quota));
            if op.verb == Verb::Refund && known && !is_over || is_news && (known || untold.len() < UNTOLD) {
                let untold = untold.entry(place).or_default();
                untold.affinity = batch.context().affinity;
                untold.was_reset |= op.verb == Verb::Reset;
                if op.verb == Verb::Reset {
                    untold.strikes = 0;
                } else if is_struck {
                    untold.strike(op, outcome, now);
                }
                untold.charged = match op.verb {
                    Verb::Reset => 0,
                    Verb::Refund => untold.charged.saturating_sub(op.cost),
                    _ => untold.charged.saturating_add(if is_charged { op.cost } else { 0 }),
                };
            }
        }
        outcomes
    }

    /// Forgets a key that was reset elsewhere.
    pub(super) fn forget(&self, limit: LimitId, key: Key, now: Time) {
        self.memory.apply_now(&Batch::with_op(0, Op::new(limit, Verb::Reset, key, 1)), now);
        self.untold.lock().remove(&(limit, key));
    }

    /// What the store has to be told. Whoever asks tells it.
    pub(super) fn take_untold(&self) -> HashMap<(LimitId, Key), Untold> {
        std::mem::take(&mut *self.untold.lock())
    }

    /// What is to be given back there.
    pub(super) fn take_released(&self) -> Vec<Batch> {
        std::mem::take(&mut *self.released.lock())
    }

    /// The store wasn't told after all.
    pub(super) fn put_back(&self, place: (LimitId, Key), untold: Untold) {
        let mut all = self.untold.lock();
        let since = all.entry(place).or_insert(Untold { affinity: untold.affinity, ..Untold::default() });
        if !since.was_reset {
            since.charged = since.charged.saturating_add(untold.charged);
            let latest = if since.strikes > 0 { *since } else { untold };
            since.told = since.told.max(untold.told);
            since.strikes = since.strikes.saturating_add(untold.strikes);
            (since.struck, since.ends, since.parole) = (latest.struck, latest.ends, latest.parole);
        }
        since.was_reset |= untold.was_reset;
    }

    /// The batches that tell the store of one key, in order; its penalty is told apart.
    pub(super) fn news(
        &self,
        (limit, key): (LimitId, Key),
        untold: Untold,
        now: Time,
    ) -> impl Iterator<Item = Batch> + Send + use<> {
        let batch = move |holder, verb, cost| {
            let mut batch = Batch::with_op(holder, Op::new(limit, verb, key, cost));
            batch.set_affinity(untold.affinity);
            batch
        };
        let peek = batch(0, Verb::Peek, 1);
        let met = self.memory.apply_now(&peek, now);
        let state = self.memory.state(&peek.ops()[0]);
        let news = match state.as_ref().map(KeyState::usage) {
            Some(Usage::Cooldown(gate)) if gate.opens_at.is_never() => vec![batch(0, Verb::Disable, 0)],
            // Of no generation that the store knows, so that it closes there for as long as here, and takes no further
            // step.
            Some(Usage::Cooldown(gate)) if gate.opens_at > now => {
                vec![batch(0, Verb::Throttle { generation: 0 }, gate.opens_at.since(now).as_micros())]
            }
            Some(Usage::Pace(tempo)) if tempo.interval > 0 => vec![batch(0, Verb::Debit, tempo.interval)],
            Some(Usage::Concurrency(permits)) => {
                let live = permits.iter().filter(|permit| permit.expires > now);
                live.map(|permit| batch(permit.holder, Verb::Debit, permit.count)).collect()
            }
            _ => {
                let used = met.list().first().map_or(0, |outcome| outcome.used);
                // What has left its window meanwhile counts no more.
                let charged = untold.charged.min(used);
                if charged > 0 { vec![batch(0, Verb::Debit, charged)] } else { Vec::new() }
            }
        };
        let reset = untold.was_reset.then(|| batch(0, Verb::Reset, 1));
        reset.into_iter().chain(news)
    }
}

/// A batch that holds the permits which another was to renew.
pub(super) fn held(renew: &Batch) -> Batch {
    renew.with_ops(renew.ops().iter().filter(|op| op.verb == Verb::Renew).map(|op| Op { verb: Verb::Debit, ..*op }))
}

/// The answer for a call that is let through uncounted: that of keys never seen.
pub(super) fn untouched(batch: &Batch, limits: &Limits, now: Time) -> Outcomes {
    let terms = batch.context();
    let outcomes = batch.ops().iter().map(|op| match limits.get(op.limit) {
        Some(limit) if matches!(op.verb, Verb::Take | Verb::Peek) => {
            let outcome = KeyState::default().evaluate(&OpContext { op, limit, batch: terms, now });
            Outcome { verdict: Verdict::Admitted, retry_at: now, ..outcome }
        }
        _ => Outcome::without_limit(Verdict::Admitted, now),
    });
    Outcomes::new(now, outcomes)
}
