//! Asking a store what a policy says of a call.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::decision::{decide, move_to_shared_keys};
use tidegate_core::{Batch, Clock, Decision, MAX_COST, Op, Outcomes, ShareLevel, Time, Verb, Verdict};
use tidegate_policy::{KeyError, KeySeed, MatchedActions, Plan, Policy, Query, UncountableError, UnknownActionError};
use tidegate_runtime::clock::SystemClock;
use tidegate_runtime::random::{random_bytes, random_u64};
use tidegate_store::{Answer, Immediate, Losses, Memory, Store, StoreError};

use crate::explain::Explanation;
use crate::pending_check::{Check, PendingCheck};
use crate::permit_guard::PermitGuard;
use crate::report::{DecisionReport, PermitId};

/// What decisions and [`Gate::reset`] call the global limit; no action has this name.
const GLOBAL: &str = "global";

/// Decides about inbound calls: a plan, a store, a clock. Cheap to clone; clones are the same gate.
pub struct Gate<S = Memory, C = SystemClock>(Arc<GateInner<S, C>>);

struct GateInner<S, C> {
    plan: Arc<Plan>,
    store: S,
    clock: C,
    seed: KeySeed,
    holder_ids: HolderIds,
}

impl<S, C> Clone for Gate<S, C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S, C> std::fmt::Debug for Gate<S, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("limits", &self.0.plan.limits().len()).finish_non_exhaustive()
    }
}

/// Why a call could not be decided about. A refusal is a [`Decision`], never an error.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CheckError {
    /// The plan has no such action, and none named `default`.
    #[error(transparent)]
    UnknownAction(#[from] UnknownActionError),
    /// The call lacks a part that one of its limits counts by, or has it wrong; or it is such that it can't be counted.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The cost is above 2^40.
    #[error("a cost of {found} is above the largest, {MAX_COST}")]
    Cost {
        /// What the call said.
        found: u64,
    },
    /// The store broke.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl CheckError {
    /// The fault of the request itself, if that is why: a server answers 400.
    pub fn uncountable(&self) -> Option<&UncountableError> {
        match self {
            Self::Key(KeyError::Uncountable(uncountable)) => Some(uncountable),
            _ => None,
        }
    }
}

impl Gate {
    /// A gate whose state lives in this process' memory, within the policy's `store.max_bytes`.
    pub fn new(policy: &Policy) -> Self {
        Self::in_memory(policy, SystemClock::new())
    }
}

impl<C: Clock> Gate<Memory, C> {
    /// A gate in memory with a clock of your own: a [`ManualClock`](tidegate_runtime::clock::ManualClock) in tests.
    pub fn in_memory(policy: &Policy, clock: C) -> Self {
        let limits = Arc::new(policy.plan().limits().clone());
        let max_bytes = usize::try_from(policy.store().max_bytes).unwrap_or(usize::MAX);
        Self::from_parts(Arc::clone(policy.plan()), Memory::new(limits, max_bytes), clock, KeySeed::new(random_bytes()))
    }
}

impl<S: Store, C: Clock> Gate<S, C> {
    /// A gate of these parts. `seed` is random where the store is this process' own, and the same for every node
    /// where it is shared; the store's limits must be the plan's.
    pub fn from_parts(plan: Arc<Plan>, store: S, clock: C, seed: KeySeed) -> Self {
        Self(Arc::new(GateInner { plan, store, clock, seed, holder_ids: HolderIds::new() }))
    }

    /// What this gate decides by.
    pub fn plan(&self) -> &Plan {
        &self.0.plan
    }

    /// Where its state lives.
    pub fn store(&self) -> &S {
        &self.0.store
    }

    /// What it tells the time by.
    pub fn clock(&self) -> &C {
        &self.0.clock
    }

    /// Which actions a query means: the one it names, else the first that matches its method, host and path, in each way
    /// in which the path can be read. A call without any meets only `inbound.global`. A client that is on a list, and whose path
    /// can't be decided about, has none: the list decides.
    ///
    /// # Errors
    /// It names one that the plan doesn't have, or its path can't be decided about.
    pub fn actions(&self, query: &Query<'_>) -> Result<MatchedActions, CheckError> {
        match (query.actions, query.action) {
            (Some(actions), _) => Ok(actions),
            (None, Some(name)) => Ok(self.0.plan.find_action(name)?.into()),
            (None, None) => match self.0.plan.matching_actions(query) {
                Err(_) if self.decide_by_list(query).is_some() => Ok(MatchedActions::NONE),
                found => Ok(found.map_err(KeyError::from)?),
            },
        }
    }

    /// Decides about a call and counts it: lists first, then penalties and limits, all or nothing.
    ///
    /// # Errors
    /// The query is not one that the plan can decide about, or the store broke.
    pub async fn check(&self, query: &Query<'_>) -> Result<Decision, CheckError> {
        self.decide(query, Verb::Take).await
    }

    /// Begins a [`Gate::check`]: decides in place where the store can, without building a future.
    ///
    /// # Errors
    /// As [`Gate::check`].
    #[inline]
    pub fn begin_check(&self, query: &Query<'_>) -> Result<Check<S, C>, CheckError> {
        self.begin(query, Verb::Take)
    }

    /// What a check would answer. Changes nothing.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub async fn status(&self, query: &Query<'_>) -> Result<Decision, CheckError> {
        self.decide(query, Verb::Peek).await
    }

    /// Every limit that a check would ask, with what is used, when it is free and what blocks it. Changes nothing.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub async fn explain(&self, query: &Query<'_>) -> Result<Explanation, CheckError> {
        let actions = self.actions(query)?;
        let mut batch = self.batch(actions, query, Verb::Peek, 0)?;
        let answer = self.0.store.apply(&batch, self.0.clock.now());
        let outcomes = self.outcomes(&mut batch, query.ip, answer).await?;
        let decision = self.decide_by_list(query).unwrap_or_else(|| decide(&batch, self.0.plan.limits(), &outcomes));
        Ok(Explanation::new(self, actions, &decision, &batch, &outcomes))
    }

    /// Forgets the caller under the action's own limits: usage, block and strikes. Other actions and the global limit
    /// are left alone, and so is what the caller shares with its network while the store is full. Doing it again
    /// changes nothing. The action `global` is the global limit.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub async fn reset(&self, query: &Query<'_>) -> Result<(), CheckError> {
        let actions = match query.action {
            Some(GLOBAL) => MatchedActions::NONE,
            _ => self.actions(query)?,
        };
        // An action called `default` answers for all that the policy doesn't know, but isn't what was to be reset.
        if let (Some(id), Some(found)) = (actions.first(), query.action)
            && self.0.plan.action(id).name() != found
        {
            return Err(UnknownActionError { found: found.chars().take(128).collect(), nearest: None }.into());
        }
        let batch = self.batch(actions, query, Verb::Reset, 0)?;
        self.apply(&batch).await?;
        Ok(())
    }

    /// Gives back what an admitted call was charged, never beyond the capacity; not what was charged to its network
    /// while the store was full. It must be a call of a quota's present period: what an earlier one was charged is over
    /// with it. Permits are given back by [`Gate::release`].
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub async fn refund(&self, query: &Query<'_>) -> Result<(), CheckError> {
        self.apply_correction(query, Verb::Refund, 0).await.map(drop)
    }

    /// Gives back the permit of a call that has ended; false if its lease had ended before, or it was given back
    /// already.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub async fn release(&self, query: &Query<'_>, permit: PermitId) -> Result<bool, CheckError> {
        self.apply_correction(query, Verb::Release, permit.get()).await
    }

    /// Lengthens the lease of a call that still runs; false if it had ended.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub async fn renew(&self, query: &Query<'_>, permit: PermitId) -> Result<bool, CheckError> {
        self.apply_correction(query, Verb::Renew, permit.get()).await
    }

    /// Holds the permit that an admitted call was given, if its limits gave one, and gives it back when dropped.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub fn hold_permit(&self, query: &Query<'_>, decision: &Decision) -> Result<Option<PermitGuard<S, C>>, CheckError> {
        let Some(permit) = decision.permit else { return Ok(None) };
        let own_batch = self.batch(self.actions(query)?, query, Verb::Renew, permit)?;
        let shared = if decision.share_level == ShareLevel::Own {
            Vec::new()
        } else {
            self.shared_batches(&own_batch, query.ip)
        };
        Ok(Some(PermitGuard::new(self.clone(), own_batch, shared)))
    }

    /// A decision in the form that people and programs read; see [`DecisionReport`].
    pub fn report(&self, decision: &Decision) -> DecisionReport {
        DecisionReport::new(&self.0.plan, decision)
    }

    fn batch(&self, actions: MatchedActions, query: &Query<'_>, verb: Verb, holder: u64) -> Result<Batch, CheckError> {
        let mut batch = Batch::new(holder);
        self.fill(&mut batch, actions, query, verb)?;
        Ok(batch)
    }

    #[inline]
    fn fill(
        &self,
        batch: &mut Batch,
        actions: MatchedActions,
        query: &Query<'_>,
        verb: Verb,
    ) -> Result<(), CheckError> {
        if let Some(found) = query.cost
            && found > MAX_COST
        {
            return Err(CheckError::Cost { found });
        }
        Ok(self.0.plan.fill(batch, actions, query, &self.0.seed, verb)?)
    }

    /// The decision for a client that is on a list.
    #[inline]
    fn decide_by_list(&self, query: &Query<'_>) -> Option<Decision> {
        self.0.plan.decide_by_list(query.ip, || self.0.clock.now())
    }

    #[inline]
    fn begin(&self, query: &Query<'_>, verb: Verb) -> Result<Check<S, C>, CheckError> {
        let actions = self.actions(query)?;
        if let Some(decision) = self.decide_by_list(query) {
            return Ok(Check::Decided(decision));
        }
        let mut batch = Batch::new(self.0.holder_ids.next());
        self.fill(&mut batch, actions, query, verb)?;
        let answer = self.0.store.apply(&batch, self.0.clock.now());
        Ok(match self.ask_again(&mut batch, query.ip, answer) {
            Answer::Ready(outcomes) => Check::Decided(decide(&batch, self.0.plan.limits(), &outcomes)),
            Answer::Later(answer) => Check::Pending(PendingCheck::new(self.clone(), batch, query.ip, answer)),
        })
    }

    async fn decide(&self, query: &Query<'_>, verb: Verb) -> Result<Decision, CheckError> {
        match self.begin(query, verb)? {
            Check::Decided(decision) => Ok(decision),
            Check::Pending(pending) => pending.decision().await,
        }
    }

    /// Asks the store again under shared keys, while it answers in place and has no room for some keys.
    #[inline]
    fn ask_again(&self, batch: &mut Batch, ip: Option<IpAddr>, mut answer: Answer<S::Later>) -> Answer<S::Later> {
        let shared = |limit, share| self.0.plan.shared_key(limit, share, ip, &self.0.seed);
        while let Answer::Ready(outcomes) = &answer
            && move_to_shared_keys(batch, outcomes, shared)
        {
            answer = self.0.store.apply(batch, self.0.clock.now());
        }
        answer
    }

    /// The outcomes of a batch whose first answer is this, under shared keys where the store has no room for others.
    pub(crate) async fn outcomes(
        &self,
        batch: &mut Batch,
        ip: Option<IpAddr>,
        mut answer: Answer<S::Later>,
    ) -> Result<Outcomes, StoreError> {
        loop {
            match self.ask_again(batch, ip, answer) {
                Answer::Ready(outcomes) => return Ok(outcomes),
                Answer::Later(later) => answer = Answer::Ready(later.await?),
            }
        }
    }

    async fn apply_correction(&self, query: &Query<'_>, verb: Verb, holder: u64) -> Result<bool, CheckError> {
        let batch = self.batch(self.actions(query)?, query, verb, holder)?.with_charged_at(Time::NEVER);
        let is_done = |outcomes: &Outcomes| outcomes.list().iter().any(|found| found.verdict == Verdict::Admitted);
        let mut done = is_done(&self.apply(&batch).await?);
        if !done && matches!(verb, Verb::Release | Verb::Renew) {
            for batch in self.shared_batches(&batch, query.ip) {
                done |= is_done(&self.apply(&batch).await?);
            }
        }
        Ok(done)
    }

    /// A batch that gives back or renews permits, under each of the keys that they may have been taken under where the store had
    /// no room for the caller's own.
    #[cold]
    fn shared_batches(&self, own_batch: &Batch, ip: Option<IpAddr>) -> Vec<Batch> {
        let in_flight = |limit| self.0.plan.limits().get(limit).is_some_and(|limit| limit.kind().has_permits());
        let batch_for_level = |share| {
            let mut batch =
                own_batch.with_ops(own_batch.ops().iter().filter(|op| in_flight(op.limit)).filter_map(|op| {
                    let (found, key) = self.0.plan.shared_key(op.limit, share, ip, &self.0.seed);
                    // Only what the caller's own key has lost is taken again.
                    (found == share).then_some(Op { key, share_level: share, cost: 0, ..*op })
                }));
            batch.dedup();
            batch
        };
        let all = [ShareLevel::SmallNetwork, ShareLevel::LargeNetwork, ShareLevel::All].map(batch_for_level);
        all.into_iter().filter(|batch| !batch.ops().is_empty()).collect()
    }

    pub(crate) async fn apply(&self, batch: &Batch) -> Result<Outcomes, StoreError> {
        match self.0.store.apply(batch, self.0.clock.now()) {
            Answer::Ready(outcomes) => Ok(outcomes),
            Answer::Later(later) => later.await,
        }
    }

    /// The store's housekeeping, to be called about once a second by whoever runs a gate for long: forgets a share of
    /// what is idle, and says what still counted but had to go because the store is full.
    pub fn maintain(&self) -> Losses {
        self.0.store.tend(self.0.clock.now())
    }

    pub(crate) fn submit(&self, batch: &Batch) {
        self.0.store.tell(batch, self.0.clock.now());
    }
}

impl<S: Immediate, C: Clock> Gate<S, C> {
    /// [`Gate::check`] for a store that answers in place: no future, no allocation.
    ///
    /// # Errors
    /// The query is not one that the plan can decide about.
    pub fn check_now(&self, query: &Query<'_>) -> Result<Decision, CheckError> {
        let Check::Decided(decision) = self.begin(query, Verb::Take)?;
        Ok(decision)
    }
}

/// Hands out the ids under which permits are held: never the same twice, and hard to guess.
#[derive(Debug)]
struct HolderIds {
    secret: u64,
    next: AtomicU64,
}

impl HolderIds {
    fn new() -> Self {
        Self { secret: random_u64(), next: AtomicU64::new(random_u64()) }
    }

    #[inline]
    fn next(&self) -> u64 {
        // SplitMix64's output function (Steele, Lea and Flood 2014): a bijection, so that ids repeat only after 2^64.
        let mut id = self.next.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed) ^ self.secret;
        id = (id ^ (id >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        id = (id ^ (id >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        id ^ (id >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holder_ids_are_unique() {
        let holders = HolderIds::new();
        let ids: std::collections::HashSet<u64> = (0..100_000).map(|_| holders.next()).collect();
        assert_eq!(ids.len(), 100_000);
    }
}
