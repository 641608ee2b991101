//! A node's share of every limit, used while the store can't be reached.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tidegate_core::batch::{OpContext, Outcome, RefusalSummary};
use tidegate_core::state::Usage;
use tidegate_core::{Admission, Batch, Key, KeyState, LimitId, LimitKind, Limits, Op, Outcomes, Quota, Time, Verb};

use super::new_batch;
use super::penalty_restore::{KnownPenalty, parole_cost};
use crate::{ImmediateStore, Memory, Store};

/// The maximum number of keys with changes that are sent to the store when it is back. Other changes are forgotten.
const MAX_UNSYNCED_KEYS: usize = 1 << 16;
/// The most batches that release permits then. Permits of further batches are held until their leases end.
const MAX_RELEASES: usize = 1 << 12;

/// A memory store of a share of each limit, and the changes there that weren't sent to the store.
pub(super) struct LocalFallback {
    pub(super) memory: Memory,
    /// The number of nodes that share the limits.
    pub(super) node_count: usize,
    pub(super) unsynced: Arc<Mutex<HashMap<(LimitId, Key), UnsyncedChange>>>,
    /// Batches that release permits which the store may know.
    pub(super) releases: Arc<Mutex<Vec<Batch>>>,
}

/// The changes of a key during the outage.
#[derive(Clone, Copy, Default)]
pub(super) struct UnsyncedChange {
    was_reset: bool,
    /// The amount charged and not given back, of a limit that counts.
    charged: u64,
    /// The strikes, and the affinity of the key. Reported strikes may not have reached the store.
    pub(super) penalty: KnownPenalty,
}

impl UnsyncedChange {
    /// The penalty alone, after all else was sent.
    pub(super) fn of_penalty(penalty: KnownPenalty) -> Self {
        Self { penalty, ..Self::default() }
    }
}

impl LocalFallback {
    /// A share of one in `node_count`.
    pub(super) fn new(limits: &Limits, node_count: usize, max_bytes: usize) -> Self {
        let memory = Memory::new(Arc::new(shares(limits, node_count)), max_bytes);
        Self { memory, node_count, unsynced: Arc::default(), releases: Arc::default() }
    }

    /// The same counts and changes, under shares of these limits.
    pub(super) fn with_limits(&self, limits: &Limits, now: Time) -> Self {
        Self {
            memory: self.memory.handle_with_limits(Arc::new(shares(limits, self.node_count)), now),
            node_count: self.node_count,
            unsynced: Arc::clone(&self.unsynced),
            releases: Arc::clone(&self.releases),
        }
    }

    pub(super) fn apply(&self, batch: &Batch, now: Time) -> Outcomes {
        let mut outcomes = self.memory.apply_now(batch, now);
        if batch.ops().iter().any(|op| op.verb == Verb::Renew) {
            // The store holds this permit. It stays valid until the store can be asked, and is counted here too.
            let list = outcomes.list().iter().map(|outcome| Outcome { admission: Admission::Admitted, ..*outcome });
            outcomes = Outcomes::new(outcomes.now(), list);
            self.memory.apply_now(&retake_permits_batch(batch), now);
        }
        if batch.ops().iter().any(|op| op.verb == Verb::Release) {
            let mut releases = self.releases.lock();
            if releases.len() < MAX_RELEASES {
                releases.push(batch.clone());
            }
        }
        let limits = self.memory.limits();
        let mut refusals = RefusalSummary::default();
        refusals.add_part(batch, limits, &outcomes);
        let mut unsynced = self.unsynced.lock();
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()) {
            let Some(limit) = limits.get(op.limit) else { continue };
            let is_charged = op.verb == Verb::Debit || op.verb == Verb::Take && refusals.is_charged(limit, outcome);
            let is_struck =
                op.verb == Verb::Take && outcome.admission == Admission::Refused && outcome.block_until > now;
            let must_sync = is_charged
                || is_struck
                || matches!(
                    op.verb,
                    Verb::Reset | Verb::Renew | Verb::Throttle { .. } | Verb::Disable | Verb::Pace { failed: true, .. }
                );
            let limit_and_key = (op.limit, op.key);
            let is_present = unsynced.contains_key(&limit_and_key);
            let is_period_over = |quota: &Quota| batch.context().charged_at < quota.period(now).start;
            let is_period_over = matches!(limit.kind(), LimitKind::Quota(quota) if is_period_over(quota));
            if op.verb == Verb::Refund && is_present && !is_period_over
                || must_sync && (is_present || unsynced.len() < MAX_UNSYNCED_KEYS)
            {
                let change = unsynced.entry(limit_and_key).or_default();
                let penalty = &mut change.penalty;
                penalty.affinity = batch.context().affinity;
                if is_struck {
                    penalty.unreported_strikes = penalty.unreported_strikes.saturating_add(1);
                    penalty.parole_cost = parole_cost(op, outcome);
                    (penalty.last_strike_at, penalty.block_ends_at) = (now, outcome.block_until);
                }
                match op.verb {
                    Verb::Reset => {
                        (change.was_reset, change.charged) = (true, 0);
                        penalty.unreported_strikes = 0;
                    }
                    Verb::Refund => change.charged = change.charged.saturating_sub(op.cost),
                    _ if is_charged => change.charged = change.charged.saturating_add(op.cost),
                    _ => {}
                }
            }
        }
        outcomes
    }

    /// Forgets a key that was reset elsewhere.
    pub(super) fn forget(&self, limit: LimitId, key: Key, now: Time) {
        self.memory.apply_now(&Batch::with_op(0, Op::new(limit, Verb::Reset, key, 1)), now);
        self.unsynced.lock().remove(&(limit, key));
    }

    /// Puts a key's changes back that could not be sent to the store.
    pub(super) fn restore_unsynced(&self, limit_and_key: (LimitId, Key), change: UnsyncedChange) {
        let mut unsynced = self.unsynced.lock();
        let newer = unsynced.entry(limit_and_key).or_default();
        if !newer.was_reset {
            newer.charged = newer.charged.saturating_add(change.charged);
            let (new, old) = (newer.penalty, change.penalty);
            newer.penalty = KnownPenalty {
                strikes: new.strikes.max(old.strikes),
                unreported_strikes: new.unreported_strikes.saturating_add(old.unreported_strikes),
                ..if new.unreported_strikes > 0 { new } else { old }
            };
        }
        newer.was_reset |= change.was_reset;
    }

    /// The batches that send the store the changes of one key, in order. Its penalty is sent separately.
    pub(super) fn sync_batches(
        &self,
        (limit, key): (LimitId, Key),
        change: UnsyncedChange,
        now: Time,
    ) -> impl Iterator<Item = Batch> + Send + use<> {
        let affinity = change.penalty.affinity;
        let batch = move |holder, verb, cost| new_batch(holder, affinity, [Op::new(limit, verb, key, cost)]);
        let peek = batch(0, Verb::Peek, 1);
        let outcomes = self.memory.apply_now(&peek, now);
        let state = self.memory.clone_state(&peek.ops()[0]);
        let batches = match state.as_ref().map(KeyState::usage) {
            Some(Usage::Cooldown(gate)) if gate.opens_at.is_never() => vec![batch(0, Verb::Disable, 0)],
            // It closes for as long as here, and takes no further step.
            Some(Usage::Cooldown(gate)) if gate.opens_at > now => {
                vec![batch(0, Verb::Debit, gate.opens_at.since(now).as_micros())]
            }
            Some(Usage::Cooldown(_)) => Vec::new(),
            Some(Usage::Pace(pacer)) if pacer.interval > 0 => vec![batch(0, Verb::Debit, pacer.interval)],
            Some(Usage::Concurrency(permits)) => {
                let live = permits.iter().filter(|permit| permit.expires > now);
                live.map(|permit| batch(permit.holder, Verb::Debit, permit.count)).collect()
            }
            _ => {
                let used = outcomes.list().first().map_or(0, |outcome| outcome.used);
                // Usage that has left its window meanwhile doesn't count.
                let charged = change.charged.min(used);
                if charged > 0 { vec![batch(0, Verb::Debit, charged)] } else { Vec::new() }
            }
        };
        let reset = change.was_reset.then(|| batch(0, Verb::Reset, 1));
        reset.into_iter().chain(batches)
    }
}

fn shares(limits: &Limits, node_count: usize) -> Limits {
    let shares = limits.iter().map(|(_, limit)| limit.with_kind(limit.kind().share(node_count as u64))).collect();
    Limits::new(shares).expect("invariant: as many limits as there were")
}

/// A batch that holds the permits that `renew` was to renew.
pub(super) fn retake_permits_batch(renew: &Batch) -> Batch {
    renew.with_ops(renew.ops().iter().filter(|op| op.verb == Verb::Renew).map(|op| Op { verb: Verb::Debit, ..*op }))
}

/// The outcomes of a call that is admitted uncounted: those of new keys.
pub(super) fn uncounted_outcomes(batch: &Batch, limits: &Limits, now: Time) -> Outcomes {
    let context = batch.context();
    let outcomes = batch.ops().iter().map(|op| match limits.get(op.limit) {
        Some(limit) if matches!(op.verb, Verb::Take | Verb::Peek) => {
            let outcome = KeyState::evaluate_unseen(&OpContext { op, limit, batch: context, now });
            Outcome { admission: Admission::Admitted, retry_at: now, ..outcome }
        }
        _ => Outcome::without_limit(Admission::Admitted, now),
    });
    Outcomes::new(now, outcomes)
}
