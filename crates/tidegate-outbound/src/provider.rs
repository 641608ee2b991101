//! A provider as programs call it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::call::{Call, CallFailure, InFlight, NextStep, ProviderState};
use tidegate_core::{Class, Clock, Lane, Span, Time};
use tidegate_policy::outbound;
use tidegate_runtime::clock::SystemClock;
use tidegate_store::{Memory, Store, StoreError};

use crate::dispatcher::{CallSlot, DispatchResult, ProviderInner, StartOutcome};
use crate::{Attempt, AttemptOutcome, CallError, CallErrorKind, CallOptions, CallStats, Upstream, Urgency};

/// An external API. Cheap to clone; clones share limits, queue, breaker, budget and credentials.
pub struct Provider<S = Memory, C = SystemClock>(pub(crate) Arc<ProviderInner<S, C>>);

impl<S, C> Clone for Provider<S, C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S, C> fmt::Debug for Provider<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Provider").field("name", &self.0.config().name).finish_non_exhaustive()
    }
}

/// A call with its reply.
pub struct CompletedCall<T, S: Store = Memory, C: Clock = SystemClock> {
    /// The reply to its last request.
    pub value: T,
    /// The statistics of the call.
    pub stats: CallStats,
    /// The guard to keep until the reply has been read completely.
    pub in_flight_guard: InFlightGuard<S, C>,
}

impl<T: fmt::Debug, S: Store, C: Clock> fmt::Debug for CompletedCall<T, S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletedCall").field("value", &self.value).field("stats", &self.stats).finish_non_exhaustive()
    }
}

/// The guard of a call with a reply that is still being read. Drop it after reading the reply, or to stop reading.
#[must_use = "dropping it ends the call"]
pub struct InFlightGuard<S: Store = Memory, C: Clock = SystemClock> {
    provider: Option<Arc<ProviderInner<S, C>>>,
    in_flight: InFlight,
}

impl<S: Store, C: Clock> InFlightGuard<S, C> {
    /// Reports the real cost, if a limit counts more than calls and the reply states it.
    pub fn correct_cost(mut self, cost: u64) {
        if let Some(provider) = self.provider.take() {
            provider.end_in_flight(&mut self.in_flight, Some(cost));
        }
    }
}

impl<S: Store, C: Clock> fmt::Debug for InFlightGuard<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlightGuard").field("in_flight", &self.in_flight.is_in_flight()).finish_non_exhaustive()
    }
}

impl<S: Store, C: Clock> Drop for InFlightGuard<S, C> {
    fn drop(&mut self) {
        if let Some(provider) = self.provider.take().filter(|_| self.in_flight.is_in_flight()) {
            provider.end_in_flight(&mut self.in_flight, None);
        }
    }
}

impl<S: Store, C: Clock> Provider<S, C> {
    /// The settings of the provider.
    pub fn config(&self) -> &outbound::ProviderConfig {
        self.0.config()
    }

    /// True if both are the same provider, with one state.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The clock that gives the time.
    pub fn clock(&self) -> &C {
        &self.0.clock
    }

    /// Gives access to the current state of its queue, breaker, budget and credentials.
    pub fn inspect<T>(&self, look: impl FnOnce(&ProviderState, Time) -> T) -> T {
        self.0.inspect(look)
    }

    /// The number of calls that have failed for each reason of [`CallErrorKind::REASONS`].
    pub fn failures(&self) -> [u64; CallErrorKind::REASONS.len()] {
        self.0.failures.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Stops the calls of this process: those that start or wait fail with [`CallErrorKind::ProviderPaused`], and nothing
    /// more is sent. Requests under way continue. Returns false if the provider is paused already.
    pub fn pause(&self) -> bool {
        self.0.set_paused(true)
    }

    /// Ends a [`pause`](Self::pause). Returns false if there is none.
    pub fn resume(&self) -> bool {
        self.0.set_paused(false)
    }

    /// Forgets the failures of the provider: closes the breaker, ends the cool-downs and rejections of its credentials,
    /// and starts to learn pace and adaptive limit again. Counts of limits and quotas stay, and so does a pause. Nodes
    /// that share the cool-downs notice their end after a while.
    ///
    /// # Errors
    /// The store failed. Cool-downs that it keeps may then last.
    pub async fn reset(&self) -> Result<(), StoreError> {
        self.0.reset().await
    }

    /// Makes a call: waits in the queue, sends, and retries by the provider's rules.
    ///
    /// Dropping the future releases everything that the call holds. Only under a limit on calls in flight, a request that was
    /// sent stays in flight while the provider likely works on it, for at most 30 s.
    ///
    /// ```
    /// use tidegate::outbound::{Attempt, AttemptOutcome, AttemptReport, CallOptions, Class, Delivery, Outbound, Upstream};
    /// use tidegate::policy::{Policy, ProviderSpec};
    ///
    /// /// A table that throttles the first write, as a database's client would report it.
    /// struct PutItem<'a>(&'a str);
    ///
    /// impl Upstream for PutItem<'_> {
    ///     type Reply = String;
    ///
    ///     async fn send(&mut self, attempt: Attempt) -> AttemptOutcome<String> {
    ///         let class = if attempt.number == 1 { Class::Throttled } else { Class::Success };
    ///         let report = AttemptReport { is_repeatable: true, ..AttemptReport::new(class, Delivery::Answered) };
    ///         AttemptOutcome { value: format!("{} {class:?}", self.0), report }
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let table = ProviderSpec::new("https://table.example.com").limit("100/s").set("cooldown.base", "10ms");
    /// let policy = Policy::builder().provider("table", table).build()?;
    /// let outbound = Outbound::new(&policy).ok_or("no [outbound]")?;
    /// let written = outbound.provider("table")?.call(CallOptions::default(), &mut PutItem("a")).await?;
    /// assert_eq!((written.value.as_str(), written.stats.attempts), ("a Success", 2));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The reason that there is no reply, or that the last reply is a failure. In the second case the error contains
    /// the reply, and the call is not in flight.
    pub async fn call<U: Upstream>(
        &self,
        options: CallOptions,
        upstream: &mut U,
    ) -> Result<CompletedCall<U::Reply, S, C>, CallError<U::Reply>> {
        self.call_with_guard(options, upstream).await.map_err(|error| error.map_reply(|(reply, _guard)| reply))
    }

    /// Does a [`call`](Self::call), but the guard of a reply in the error keeps the call in flight.
    pub(crate) async fn call_with_guard<U: Upstream>(
        &self,
        options: CallOptions,
        upstream: &mut U,
    ) -> Result<CompletedCall<U::Reply, S, C>, CallError<(U::Reply, InFlightGuard<S, C>)>> {
        let CallOptions { lane, cost, timeout, scope, urgency, waited } = options;
        let lane = if self.config().sequential { Lane::User } else { lane };
        let started_at = self.0.clock.now();
        let deadline = timeout.map(|timeout| started_at + Span::from_duration(timeout));
        let call = Call::new(&self.0.rules, lane, cost, deadline, started_at);
        let urgency = urgency.as_ref();
        let mut call_guard = CallGuard { provider: &self.0, slot: CallSlot::Owned(call) };
        // In its place, because a call that is changed before would be copied.
        call_guard.slot.call().set_scope(scope);
        let mut stats = CallStats { attempts: 0, waited, credential: 0 };
        let (mut waiting_since, mut just_started_at) = (started_at, Some(started_at));
        loop {
            let (result, now) = call_guard.wait_for_turn(urgency, just_started_at.take()).await;
            stats.waited = stats.waited + now.since(waiting_since);
            let credential = result.map_err(|kind| self.call_error(kind, None, stats))?;
            stats.attempts += 1;
            stats.credential = credential;
            let attempt = self.new_attempt(call_guard.slot.call(), credential, stats, now);
            let outcome = match self.config().hedge_after {
                None => upstream.send(attempt).await,
                // A future with two requests is larger than one, and calls without a hedge would pay for it too.
                Some(after) => Box::pin(self.send_hedged(upstream, after, attempt, &mut call_guard, &mut stats)).await,
            };
            let (next_step, now) = self.0.handle_reply(call_guard.slot.call(), &outcome.report);
            waiting_since = now;
            if outcome.report.is_postponed {
                stats.attempts -= 1;
            }
            match next_step {
                NextStep::Done => return Ok(call_guard.complete(outcome, stats)),
                NextStep::Failed(failure) => {
                    let kind = self.failure_kind(failure, outcome.report.verdict.class, stats);
                    let CompletedCall { value, in_flight_guard, .. } = call_guard.complete(outcome, stats);
                    return Err(self.call_error(kind, Some((value, in_flight_guard)), stats));
                }
                NextStep::RetryAt(at) => {
                    // No task reads this reply, so its connection is released before the wait.
                    drop(outcome);
                    if at > now {
                        tokio::time::sleep(at.since(now).as_duration()).await;
                    }
                }
                NextStep::RenewLogin { credential } => {
                    if let Err(class) = Box::pin(upstream.renew_login(credential)).await
                        && !(class == Class::Auth && self.0.handle_renewal_failure(call_guard.slot.call(), credential))
                    {
                        return Ok(call_guard.complete(outcome, stats));
                    }
                }
            }
        }
    }

    /// The default timeout of a call of this lane.
    pub fn timeout(&self, lane: Lane) -> Duration {
        self.0.rules.lane_rules[lane as usize].timeout.as_duration()
    }

    pub(crate) fn new_attempt(&self, call: &Call, credential: usize, stats: CallStats, now: Time) -> Attempt {
        let time_left = call.deadline().since(now).as_duration();
        let conclusive_after = self.timeout(call.lane()).min(self.config().attempt_timeout) / 2;
        Attempt { credential, number: stats.attempts, time_left, conclusive_after }
    }

    /// Raises the priority of a call to this lane, if it still waits.
    pub fn raise(&self, urgency: &Urgency, lane: Lane) {
        if !self.config().sequential && urgency.raise_to(lane) {
            self.0.raise(urgency);
        }
    }

    /// The kind of a call's failure after its last reply.
    #[cold]
    fn failure_kind(&self, failure: CallFailure, class: Class, stats: CallStats) -> CallErrorKind {
        let mut kind = self.0.error_kind(failure);
        if let CallErrorKind::RetriesExhausted { attempts, earliest } = &mut kind {
            // Attempts with other credentials and hedges are attempts, too.
            *attempts = stats.attempts;
            *earliest = if class.is_refusal() || class == Class::Unavailable { self.0.cooling_until() } else { None };
        }
        kind
    }

    #[cold]
    fn call_error<T>(&self, kind: CallErrorKind, last_reply: Option<T>, stats: CallStats) -> CallError<T> {
        self.0.failures[kind.reason_index()].fetch_add(1, Ordering::Relaxed);
        CallError { provider: self.config().name.clone(), kind, last_reply, stats, failed_at: self.0.clock.now() }
    }
}

/// A running call. Releases what it holds when it is dropped.
pub(crate) struct CallGuard<'a, S: Store, C: Clock> {
    pub(crate) provider: &'a Arc<ProviderInner<S, C>>,
    pub(crate) slot: CallSlot,
}

impl<S: Store, C: Clock> CallGuard<'_, S, C> {
    /// Waits until the call may be sent, or has ended.
    pub(crate) async fn wait_for_turn(
        &mut self,
        urgency: Option<&Urgency>,
        started_at: Option<Time>,
    ) -> (DispatchResult, Time) {
        match self.provider.start(&mut self.slot, urgency, started_at) {
            StartOutcome::Decided(result, now) => (result, now),
            StartOutcome::Waiting(index) => {
                let (call, result, now) = self.provider.wait_for_result(index).await;
                self.slot = CallSlot::Owned(call);
                (result, now)
            }
        }
    }

    fn complete<T>(&mut self, outcome: AttemptOutcome<T>, stats: CallStats) -> CompletedCall<T, S, C> {
        let in_flight = self.slot.call().take_in_flight(stats.credential);
        self.slot = CallSlot::Finished;
        let in_flight_guard = InFlightGuard { provider: Some(Arc::clone(self.provider)), in_flight };
        CompletedCall { value: outcome.value, stats, in_flight_guard }
    }
}

impl<S: Store, C: Clock> Drop for CallGuard<'_, S, C> {
    fn drop(&mut self) {
        match &mut self.slot {
            CallSlot::Owned(call) => self.provider.cancel(call),
            CallSlot::Waiting(index) => self.provider.cancel_waiting(*index),
            CallSlot::Finished => {}
        }
    }
}
