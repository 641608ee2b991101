//! The gate: asks a store for a decision on each call, by the rules of a policy.

mod administration;
mod kept_permits;
mod next;
mod observation;
mod reservations;
mod throttle;

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use tidegate_core::decision::move_to_shared_keys;
use tidegate_core::{Admission, Batch, Clock, Decision, MAX_COST, Op, Outcomes, ShareLevel, Span, Time, Verb};
use tidegate_policy::{
    ActionId, KeyError, KeySeed, ListStatus, MatchedActions, Plan, Policy, Query, UncountableError, UnknownActionError,
};
use tidegate_runtime::clock::SystemClock;
use tidegate_runtime::random::{random_bytes, random_u64};
use tidegate_store::{ImmediateStore, Losses, Memory, Store, StoreError, StoreResponse};

use crate::decision_counts::{DecisionCount, DecisionCounts, DecisionOutcome};
use crate::explain::Explanation;
use crate::hold_times::HoldTimes;
use crate::pending_check::{Check, PendingCheck};
use crate::permit_guard::PermitGuard;
use crate::report::{DecisionReport, PermitId};
use kept_permits::KeptPermits;
pub use kept_permits::{KeptPermit, MAX_FINISHED_CALLS};
pub use next::NextPolicyError;
pub use observation::DecidedCall;
use observation::DecisionObserver;

pub use self::administration::BlockError;

/// Decides about inbound calls, from a plan, a store and a clock. Cheap to clone; all clones share one state.
pub struct Gate<S = Memory, C = SystemClock>(Arc<GateInner<S, C>>);

struct GateInner<S, C> {
    plan: Arc<Plan>,
    store: S,
    clock: C,
    seed: KeySeed,
    holder_ids: HolderIds,
    hold_times: HoldTimes,
    kept_permits: Arc<KeptPermits>,
    decision_counts: Option<DecisionCounts>,
    observer: OnceLock<DecisionObserver>,
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

/// The reason that no decision could be made for a call. A refusal is a [`Decision`], never an error.
#[derive(Clone, thiserror::Error)]
pub enum CheckError {
    /// The plan has no such action, and none named `default`.
    #[error(transparent)]
    UnknownAction(#[from] UnknownActionError),
    /// The call lacks a key part that one of its limits counts by, has an invalid one, or can't be counted at all.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The cost is above 2^40.
    #[error("a cost of {found} is above the largest, {MAX_COST}")]
    Cost {
        /// The cost of the call.
        found: u64,
    },
    /// The limits can't block the client as asked.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The message, so that `fn main() -> Result<…>` shows it.
impl std::fmt::Debug for CheckError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl CheckError {
    /// The fault of the request, if it is the reason. A server replies with 400.
    pub fn uncountable(&self) -> Option<&UncountableError> {
        match self {
            Self::Key(KeyError::Uncountable(uncountable)) => Some(uncountable),
            _ => None,
        }
    }
}

impl Gate {
    /// A gate with its state in the memory of this process, within the policy's `store.max_bytes`.
    pub fn new(policy: &Policy) -> Self {
        Self::in_memory(policy, SystemClock::new())
    }
}

impl<C: Clock> Gate<Memory, C> {
    /// A gate in memory with the given clock: a [`ManualClock`](tidegate_runtime::clock::ManualClock) in tests.
    pub fn in_memory(policy: &Policy, clock: C) -> Self {
        let limits = Arc::clone(policy.plan().limits());
        let max_bytes = usize::try_from(policy.store().max_bytes).unwrap_or(usize::MAX);
        let store = Memory::new(limits, max_bytes);
        let seed = KeySeed::new(random_bytes());
        Self::from_parts_counting(Arc::clone(policy.plan()), store, clock, seed, policy.admin().metrics)
    }
}

impl<S: Store> Gate<S> {
    /// A gate with a store that no other process uses, such as one of your own. The store's limits must be the plan's:
    /// `policy.plan().limits()`. [`Stores::gate`](crate::Stores::gate) has the store that the policy names.
    pub fn with_store(policy: &Policy, store: S) -> Self {
        Self::from_parts(Arc::clone(policy.plan()), store, SystemClock::new(), KeySeed::new(random_bytes()))
    }
}

impl<S: Store, C: Clock> Gate<S, C> {
    /// A gate of these parts. The store's limits must be the plan's. `seed` is random if only this process uses the
    /// store, and the same on every node if the store is shared.
    pub fn from_parts(plan: Arc<Plan>, store: S, clock: C, seed: KeySeed) -> Self {
        Self::from_parts_counting(plan, store, clock, seed, true)
    }

    /// As [`Gate::from_parts`]; counts decisions if `counts` is true.
    pub(crate) fn from_parts_counting(plan: Arc<Plan>, store: S, clock: C, seed: KeySeed, counts: bool) -> Self {
        let hold_times = HoldTimes::new(plan.limits());
        let decision_counts = counts.then(|| DecisionCounts::new(&plan));
        let holder_ids = HolderIds::new();
        let (kept_permits, observer) = (Arc::default(), OnceLock::new());
        Self(Arc::new(GateInner {
            plan,
            store,
            clock,
            seed,
            holder_ids,
            hold_times,
            kept_permits,
            decision_counts,
            observer,
        }))
    }

    /// The decisions of [`check`](Self::check) so far, by action, limit, outcome and reason. Each decision is counted
    /// once, when the caller is given it. Empty with `admin.metrics = false`.
    pub fn decision_counts(&self) -> Vec<DecisionCount> {
        self.0.decision_counts.as_ref().map(|counts| counts.list(&self.0.plan)).unwrap_or_default()
    }

    /// The number of decisions with this outcome so far, also by limits and actions that earlier policies had. Unlike
    /// the sum of [`Gate::decision_counts`], it doesn't change when another policy is taken over.
    pub fn decision_total(&self, outcome: DecisionOutcome) -> u64 {
        self.0.decision_counts.as_ref().map_or(0, |counts| counts.total(&self.0.plan, outcome))
    }

    /// The plan by which this gate decides.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.0.plan
    }

    /// The store that keeps the state.
    pub fn store(&self) -> &S {
        &self.0.store
    }

    /// The clock that gives the time.
    pub fn clock(&self) -> &C {
        &self.0.clock
    }

    /// The actions of a query: the one it names, else the first that matches its method, host and path. The path is
    /// tried in each way in which it can be read. A call without an action meets only `inbound.global`, and so does one
    /// whose path can't be decided about; [`check`](Self::check) then fails.
    ///
    /// For an address that is on the deny list, or under a block that is known to this process, the path is tried in its
    /// normal form only, because that suffices to refuse the call.
    ///
    /// # Errors
    /// The query names an action that the plan doesn't have.
    #[inline]
    pub fn actions(&self, query: &Query<'_>) -> Result<MatchedActions, CheckError> {
        match (query.actions, query.action) {
            (Some(actions), _) => Ok(actions),
            (None, Some(name)) => Ok(self.0.plan.find_action(name)?.into()),
            (None, None) => match self.0.plan.action_of_normal_path(query) {
                (action, true) => Ok(action.into()),
                (action, false) => Ok(self.actions_of_all_readings(action, query)),
            },
        }
    }

    /// `normal` is the action of the path's normal form.
    #[cold]
    fn actions_of_all_readings(&self, normal: Option<ActionId>, query: &Query<'_>) -> MatchedActions {
        let plan = &self.0.plan;
        if query.ip.is_some_and(|ip| plan.list_status(ip) == ListStatus::Deny) || self.is_blocked(normal, query) {
            return normal.into();
        }
        plan.actions_of_all_readings(query, normal).unwrap_or_else(MatchedActions::from)
    }

    /// True if the address is under a block that is known to this process.
    #[cold]
    fn is_blocked(&self, action: Option<ActionId>, query: &Query<'_>) -> bool {
        /// A block that ends sooner may have ended when the call is decided.
        const MIN_BLOCK_LEFT: Span = Span::from_secs(1);
        let GateInner { plan, store, clock, seed, .. } = &*self.0;
        let (mut ops, now) = (Batch::new(0), clock.now());
        plan.fill_address_ops(&mut ops, action, query, seed, Verb::Peek);
        store.known_block(&ops, now).is_some_and(|until| until > now + MIN_BLOCK_LEFT)
    }

    /// The actions that [`actions`](Self::actions) returns for addresses that nothing refuses.
    fn all_actions(&self, query: &Query<'_>) -> Result<MatchedActions, CheckError> {
        match (query.actions, query.action) {
            (None, None) => Ok(self.0.plan.matching_actions(query).unwrap_or_else(MatchedActions::from)),
            _ => self.actions(query),
        }
    }

    /// Decides about a call by lists, then penalties and limits. Counts it in all its limits or in none. A call that can't
    /// be counted by its limits, because of its path or a part of a key, is counted by `inbound.global` alone: it is
    /// refused if that is full, and otherwise an error.
    ///
    /// # Errors
    /// The plan can't decide about the query, or the store failed.
    pub async fn check(&self, query: &Query<'_>) -> Result<Decision, CheckError> {
        self.decide(query, Verb::Take).await
    }

    /// Begins a [`Gate::check`]. Decides at once if the store can, without a future.
    ///
    /// # Errors
    /// As [`Gate::check`].
    #[inline]
    pub fn begin_check(&self, query: &Query<'_>) -> Result<Check<S, C>, CheckError> {
        self.begin(query, Verb::Take)
    }

    /// Returns the decision that a check would make. Changes nothing.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub async fn status(&self, query: &Query<'_>) -> Result<Decision, CheckError> {
        self.decide(query, Verb::Peek).await
    }

    /// Returns every limit that a check would ask: its usage, the time until it is free, its block. Changes nothing.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub async fn explain(&self, query: &Query<'_>) -> Result<Explanation, CheckError> {
        let actions = self.all_actions(query)?;
        let mut batch = self.batch(actions, query, Verb::Peek, 0)?;
        if self.0.kept_permits.is_active() {
            self.count_abandoning_client(&mut batch, query.ip);
        }
        let answer = self.0.store.apply(&batch, self.0.clock.now());
        let mut outcomes = self.outcomes(&mut batch, query.ip, answer).await?;
        let decided = self.decide_outcomes(&batch, &mut outcomes);
        let decision = self.decide_by_list(query).unwrap_or(decided);
        let mut explanation = Explanation::new(self, actions, &decision, &batch, &outcomes);
        for (limit, op) in explanation.limits.iter_mut().zip(batch.ops()) {
            limit.share = self.reduced_share(op.limit, query.ip);
        }
        Ok(explanation)
    }

    /// Gives back the cost of an admitted call, never beyond the capacity. A cost charged to the caller's network while
    /// the store was full is not given back. The call must be of a quota's present period, because earlier charges
    /// ended with their period. [`Gate::release`] gives back permits.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub async fn refund(&self, query: &Query<'_>) -> Result<(), CheckError> {
        self.apply_correction(query, Verb::Refund, 0).await.map(drop)
    }

    /// Charges the cost of a call that has been made already, even if there is no room. With a cost beyond what remains,
    /// further calls are refused until the excess has left the window, or is refilled. Takes no permits.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub async fn charge(&self, query: &Query<'_>) -> Result<(), CheckError> {
        self.apply_correction(query, Verb::Debit, 0).await.map(drop)
    }

    /// Gives back the permit of a call that has ended. Returns false if its lease has ended or it was already given
    /// back.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub async fn release(&self, query: &Query<'_>, permit: PermitId) -> Result<bool, CheckError> {
        self.apply_correction(query, Verb::Release, permit.get()).await
    }

    /// Renews the lease of a call that still runs. Returns false if the lease had ended.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub async fn renew(&self, query: &Query<'_>, permit: PermitId) -> Result<bool, CheckError> {
        self.apply_correction(query, Verb::Renew, permit.get()).await
    }

    /// Returns a guard for the permit of an admitted call, if its limits gave one. The guard releases it when dropped.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub fn hold_permit(&self, query: &Query<'_>, decision: &Decision) -> Result<Option<PermitGuard<S, C>>, CheckError> {
        let Some(permit) = decision.permit else { return Ok(None) };
        let own_batch = self.batch(self.all_actions(query)?, query, Verb::Renew, permit)?;
        let shared = if decision.share_level == ShareLevel::Own {
            Vec::new()
        } else {
            self.shared_batches(&own_batch, query.ip)
        };
        Ok(Some(PermitGuard::new(self.clone(), query.ip, own_batch, shared)))
    }

    /// Returns a decision in the form for replies and logs; see [`DecisionReport`].
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
        self.0.plan.fill(batch, actions, query, &self.0.seed, verb)?;
        if batch.context().caller != 0 {
            self.present_reservation(batch, query);
        }
        Ok(())
    }

    /// The decision for a client that is on a list.
    #[inline]
    fn decide_by_list(&self, query: &Query<'_>) -> Option<Decision> {
        self.0.plan.decide_by_list(query.ip, || self.0.clock.now())
    }

    #[inline]
    fn begin(&self, query: &Query<'_>, verb: Verb) -> Result<Check<S, C>, CheckError> {
        let actions = self.actions(query)?;
        let mut counted = (verb == Verb::Take).then_some(actions);
        if let Some(decision) = self.decide_by_list(query) {
            self.count(counted, query.ip, &[], &decision);
            return Ok(Check::Decided(decision));
        }
        let mut batch = Batch::new(self.0.holder_ids.next());
        let mut uncountable = None;
        if self.0.plan.has_long_keys(actions.first(), query) && self.is_blocked(actions.first(), query) {
            // The block refuses the call, so it needn't be read for its keys.
            self.0.plan.fill_address_ops(&mut batch, actions.first(), query, &self.0.seed, verb);
        } else if let Err(error) = self.fill(&mut batch, actions, query, verb) {
            let Some(global) = self.batch_of_uncountable(&error, query, verb) else { return Err(error) };
            (batch, counted, uncountable) = (global, Some(MatchedActions::NONE), Some(error));
        }
        if self.0.kept_permits.is_active() {
            self.count_abandoning_client(&mut batch, query.ip);
        }
        let mut answer = self.0.store.apply(&batch, self.0.clock.now());
        self.ask_again(&mut batch, query.ip, &mut answer);
        match answer {
            // By reference: moving them would copy them.
            StoreResponse::Ready(ref mut outcomes) => {
                self.conclude(&batch, outcomes, query.ip, counted, uncountable).map(Check::Decided)
            }
            StoreResponse::Pending(answer) => {
                Ok(Check::Pending(PendingCheck::new(self.clone(), batch, query.ip, counted, uncountable, answer)))
            }
        }
    }

    /// Decides by these outcomes, and counts the decision. A call that is `uncountable` fails if it isn't refused.
    #[inline]
    pub(crate) fn conclude(
        &self,
        batch: &Batch,
        outcomes: &mut Outcomes,
        ip: Option<IpAddr>,
        counted: Option<MatchedActions>,
        uncountable: Option<CheckError>,
    ) -> Result<Decision, CheckError> {
        let decision = self.decide_outcomes(batch, outcomes);
        if let Some(error) = uncountable.filter(|_| decision.allowed) {
            self.release_unused(batch);
            return Err(error);
        }
        self.count(counted, ip, batch.ops(), &decision);
        Ok(decision)
    }

    /// The batch of a call that counts under `inbound.global` alone, because its other limits can't count it for this reason.
    #[cold]
    fn batch_of_uncountable(&self, reason: &CheckError, query: &Query<'_>, verb: Verb) -> Option<Batch> {
        reason.uncountable().filter(|_| verb == Verb::Take)?;
        let batch = self.batch(MatchedActions::NONE, query, verb, self.0.holder_ids.next()).ok()?;
        (!batch.ops().is_empty()).then_some(batch)
    }

    /// Gives back the permits that a batch may have taken for no call. Their time isn't that of a call.
    pub(crate) fn release_unused(&self, batch: &Batch) {
        self.forget_hold(batch);
        if let Some(release) = batch.to_release(self.0.plan.limits()) {
            if self.0.kept_permits.is_active() {
                self.uncount_call(&release, false);
            }
            self.submit(&release);
        }
    }

    /// The decision of these outcomes. Waits for calls in flight are estimated.
    #[inline]
    pub(crate) fn decide_outcomes(&self, batch: &Batch, outcomes: &mut Outcomes) -> Decision {
        let hold_times = &self.0.hold_times;
        if hold_times.is_empty() {
            return self.decide_and_sign(batch, outcomes);
        }
        hold_times.estimate_waits(batch, outcomes);
        let decision = self.decide_and_sign(batch, outcomes);
        if let Some(holder) = decision.permit {
            hold_times.begin(holder, self.0.clock.now());
        } else if self.0.kept_permits.is_active() {
            self.uncount_call(batch, false);
        }
        decision
    }

    async fn decide(&self, query: &Query<'_>, verb: Verb) -> Result<Decision, CheckError> {
        match self.begin(query, verb)? {
            Check::Decided(decision) => Ok(decision),
            Check::Pending(pending) => pending.decision().await,
        }
    }

    /// Applies the batch again under shared keys, while the store answers at once and has no room for some keys. The
    /// answer stays in its place, because it is large.
    #[inline]
    fn ask_again(&self, batch: &mut Batch, ip: Option<IpAddr>, answer: &mut StoreResponse<S::Future>) {
        let shared = |limit, share| self.0.plan.shared_key(limit, share, ip, &self.0.seed);
        while let StoreResponse::Ready(outcomes) = answer
            && move_to_shared_keys(batch, outcomes, shared)
        {
            *answer = self.0.store.apply(batch, self.0.clock.now());
        }
    }

    /// The outcomes of a batch with this first answer, under shared keys if the store has no room for others.
    pub(crate) async fn outcomes(
        &self,
        batch: &mut Batch,
        ip: Option<IpAddr>,
        mut answer: StoreResponse<S::Future>,
    ) -> Result<Outcomes, StoreError> {
        loop {
            self.ask_again(batch, ip, &mut answer);
            match answer {
                StoreResponse::Ready(outcomes) => return Ok(outcomes),
                StoreResponse::Pending(later) => answer = StoreResponse::Ready(later.await?),
            }
        }
    }

    async fn apply_correction(&self, query: &Query<'_>, verb: Verb, holder: u64) -> Result<bool, CheckError> {
        let batch = self.batch(self.all_actions(query)?, query, verb, holder)?.with_charged_at(Time::NEVER);
        let is_done = |outcomes: &Outcomes| outcomes.list().iter().any(|found| found.admission == Admission::Admitted);
        let mut done = is_done(&self.apply(&batch).await?);
        if !done && matches!(verb, Verb::Release | Verb::Renew) {
            for batch in self.shared_batches(&batch, query.ip) {
                done |= is_done(&self.apply(&batch).await?);
            }
        }
        match verb {
            Verb::Release if done => self.end_hold(&batch),
            Verb::Renew if done => self.renew_counted_call(holder),
            _ => {}
        }
        Ok(done)
    }

    /// The batches that release or renew permits under shared keys. Permits may have been taken under these keys while
    /// the store had no room for the caller's own keys.
    #[cold]
    fn shared_batches(&self, own_batch: &Batch, ip: Option<IpAddr>) -> Vec<Batch> {
        let in_flight = |limit| self.0.plan.limits().get(limit).is_some_and(|limit| limit.kind().has_permits());
        let batch_for_level = |share| {
            let mut batch =
                own_batch.with_ops(own_batch.ops().iter().filter(|op| in_flight(op.limit)).filter_map(|op| {
                    let (found, key) = self.0.plan.shared_key(op.limit, share, ip, &self.0.seed);
                    // The cost is 0, because only a permit lost under the caller's own key is taken again.
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
            StoreResponse::Ready(outcomes) => Ok(outcomes),
            StoreResponse::Pending(later) => later.await,
        }
    }

    /// Maintains the store: forgets a share of its idle entries. Returns the entries that still counted but were
    /// removed because the store is full. A long-running program calls it about once a second.
    pub fn maintain(&self) -> Losses {
        if self.0.kept_permits.is_active() {
            self.end_kept_permits();
        }
        self.0.store.maintain(self.0.clock.now())
    }

    /// Measures the time for which the holder of this batch had its permits.
    pub(crate) fn end_hold(&self, batch: &Batch) {
        self.0.hold_times.end(batch, self.0.clock.now());
        if self.0.kept_permits.is_active() {
            self.uncount_call(batch, true);
        }
    }

    /// Measures the permit of this holder no further.
    pub(crate) fn forget_hold(&self, batch: &Batch) {
        self.0.hold_times.take_start(batch.holder());
    }

    pub(crate) fn submit(&self, batch: &Batch) {
        self.0.store.submit(batch, self.0.clock.now());
    }
}

impl<S: ImmediateStore, C: Clock> Gate<S, C> {
    /// Does a [`Gate::check`] with a store that answers at once: no future, no allocation.
    ///
    /// # Errors
    /// The plan can't decide about the query.
    pub fn check_now(&self, query: &Query<'_>) -> Result<Decision, CheckError> {
        let Check::Decided(decision) = self.begin(query, Verb::Take)?;
        Ok(decision)
    }
}

/// Generates the ids of permit holders: unique, and hard to guess.
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
        // The output function of SplitMix64 (Steele, Lea and Flood 2014) is a bijection: ids repeat only after 2^64.
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
