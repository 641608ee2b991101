//! A node's share of every limit, to go on with while the store can't be reached.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use arrayvec::ArrayVec;
use tidegate_core::batch::{Ask, Outcome};
use tidegate_core::{
    Batch, Concurrency, Key, Kind, Limit, LimitId, Limits, Op, Outcomes, Rate, State, Time, Verb, Verdict, Window,
};

use crate::{Immediate, Memory};

/// The most keys whose use is told to the store when it is back. What more were used is forgotten.
const TOUCHED: usize = 1 << 16;

/// A memory store of a share of each limit, and which keys were used in it.
pub(super) struct Local {
    memory: Memory,
    touched: Mutex<HashMap<(LimitId, Key), Touched>>,
}

/// What happened to a key meanwhile.
#[derive(Clone, Copy, Default)]
struct Touched {
    /// What the keys of its batch have in common.
    affinity: u64,
    was_reset: bool,
}

/// What the store has to be told of one key.
pub(super) struct Used {
    /// One after the other.
    pub(super) tells: ArrayVec<Batch, 2>,
    /// What the key met here in the end.
    pub(super) peek: Batch,
    pub(super) met: Outcomes,
}

impl Local {
    /// A share of one in `nodes`.
    pub(super) fn new(limits: &Limits, nodes: usize, max_bytes: usize) -> Self {
        let shares = limits.iter().map(|(_, limit)| share(limit, nodes as u64)).collect();
        let shares = Limits::new(shares).expect("invariant: as many limits as there were");
        Self { memory: Memory::new(Arc::new(shares), max_bytes), touched: Mutex::default() }
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(super) fn apply(&self, batch: &Batch, now: Time) -> Outcomes {
        let mut outcomes = self.memory.apply_now(batch, now);
        if batch.ops().iter().any(|op| op.verb == Verb::Renew) {
            // Its permit is the store's: it lives on until that can be asked.
            let list = outcomes.list().iter().map(|outcome| Outcome { verdict: Verdict::Admitted, ..*outcome });
            outcomes = Outcomes::new(outcomes.now(), list);
        }
        let mut touched = self.touched.lock().unwrap_or_else(PoisonError::into_inner);
        for op in batch.ops().iter().filter(|op| matches!(op.verb, Verb::Take | Verb::Debit | Verb::Reset)) {
            let place = (op.limit, op.key);
            if touched.len() < TOUCHED || touched.contains_key(&place) {
                let touched = touched.entry(place).or_default();
                touched.affinity = batch.terms().affinity;
                touched.was_reset |= op.verb == Verb::Reset;
            }
        }
        outcomes
    }

    /// What was used since this was last asked.
    pub(super) fn used(&self, now: Time) -> Vec<Used> {
        let touched = std::mem::take(&mut *self.touched.lock().unwrap_or_else(PoisonError::into_inner));
        let used = touched.into_iter().map(|((limit, key), Touched { affinity, was_reset })| {
            let batch = |verb, cost| {
                let mut batch = Batch::one(0, Op::new(limit, verb, key, cost));
                batch.set_affinity(affinity);
                batch
            };
            let peek = batch(Verb::Peek, 1);
            let met = self.memory.apply_now(&peek, now);
            let spent = met.list().first().map_or(0, |outcome| outcome.used);
            let tells = [(was_reset, Verb::Reset, 1), (spent > 0, Verb::Debit, spent)];
            let tells = tells.into_iter().filter(|(due, ..)| *due).map(|(_, verb, cost)| batch(verb, cost)).collect();
            Used { tells, peek, met }
        });
        used.collect()
    }
}

/// One of `nodes` equal shares of a limit, of 1 at the least unless the whole is 0.
fn share(limit: &Limit, nodes: u64) -> Limit {
    let of = |whole: u64| if whole == 0 { 0 } else { (whole / nodes).max(1) };
    let kind = match limit.kind() {
        Kind::Window(window) => Window::new(of(window.limit()), window.window(), window.entries())
            .map(|share| Kind::Window(share.with_lead(window.lead()))),
        Kind::Rate(rate) => {
            // The same calls over so many times the period, so that a slow rate isn't rounded away.
            let per = rate.per().times(nodes);
            Rate::new(rate.count(), per, of(rate.burst())).map(Kind::Rate)
        }
        Kind::Quota(quota) => quota.of_limit(of(quota.limit())).map(Kind::Quota),
        Kind::Concurrency(concurrency) => {
            Concurrency::new(of(concurrency.limit()), concurrency.lease()).map(Kind::Concurrency)
        }
        Kind::Cooldown(cooldown) => Ok(Kind::Cooldown(*cooldown)),
    };
    // A share is within the bounds that the whole is; but a very slow rate can't be made slower.
    let kind = kind.unwrap_or_else(|_| limit.kind().clone());
    limit.with_kind(kind)
}

/// The answer for a call that is let through uncounted: that of keys never seen.
pub(super) fn untouched(batch: &Batch, limits: &Limits, now: Time) -> Outcomes {
    let terms = batch.terms();
    let outcomes = batch.ops().iter().map(|op| match limits.get(op.limit) {
        Some(limit) if matches!(op.verb, Verb::Take | Verb::Peek) => {
            let outcome = State::default().judge(&Ask { op, limit, terms, now });
            Outcome { verdict: Verdict::Admitted, retry_at: now, ..outcome }
        }
        _ => Outcome::plain(Verdict::Admitted, now),
    });
    Outcomes::new(now, outcomes)
}
