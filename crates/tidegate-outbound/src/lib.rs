//! Calls to external APIs: within their limits, by priority, and with retries.
//!
//! An [`Outbound`] holds the providers of a policy. [`Provider::call`] runs one call by the state machine of
//! [`tidegate_core::call`]. It queues the call, sends it through an [`Upstream`], and retries if a retry is useful,
//! safe, possible and in time.
//!
//! The state belongs to this process. A [`Snapshot`] keeps spent quotas and cooldowns in a file.
//!
//! The futures must be polled within a tokio runtime with timers enabled.

mod attempt_classifier;
#[cfg(feature = "cache")]
pub mod cache;
mod call_headers;
mod causes;
mod cost;
mod credential;
mod dispatcher;
mod error;
mod exchange;
mod hedge;
mod login;
#[cfg(feature = "reqwest")]
mod middleware;
mod path;
mod progress_timeout;
mod replay;
mod reply_body;
mod reply_headers;
mod service;
mod snapshot;
mod sse;
mod target;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use attempt_classifier::AttemptClassifier;
pub use attempt_classifier::{HeadClassification, fault_of};
pub use call_headers::{
    CallHeaderError, IDEMPOTENCY_KEY, TIDEGATE_PRIORITY, TIDEGATE_TIMEOUT, has_idempotency_key, take_call_options,
};
pub use causes::causes;
pub use credential::CredentialError;
use credential::Credentials;
use dispatcher::{CallSlot, DispatchResult, ProviderInner, StartOutcome};
pub use error::{CallError, CallErrorBody, CallErrorKind};
pub use exchange::{BoxError, SendError};
pub use login::LoginError;
use login::{LoginToken, Logins};
#[cfg(feature = "reqwest")]
pub use middleware::OutboundMiddleware;
use replay::ReplayBuffer;
pub use replay::{ReplayBody, ReplayError};
pub use reply_body::OutboundBody;
pub use service::{OutboundError, OutboundLayer, OutboundService};
pub use snapshot::{Snapshot, SnapshotError};
use target::Target;
pub use target::TargetError;
pub use tidegate_core::breaker::BreakerState;
pub use tidegate_core::call::AttemptReport;
use tidegate_core::call::{Call, InFlight, NextStep, ProviderState};
pub use tidegate_core::retry::{Delivery, UnreplayableReason};
pub use tidegate_core::{Class, Lane};
use tidegate_core::{Clock, Span, Time};
use tidegate_policy::outbound::{self, UnknownProviderError};
use tidegate_policy::{KeySeed, Policy};
use tidegate_store::{Losses, Memory, Store};

use tidegate_runtime::clock::SystemClock;
use tidegate_runtime::random::random_bytes;

/// The providers of a policy. Cheap to clone; all clones share one state.
pub struct Outbound<S = Memory, C = SystemClock>(Arc<OutboundInner<S, C>>);

struct OutboundInner<S, C> {
    config: Arc<outbound::OutboundConfig>,
    providers: Vec<Provider<S, C>>,
    local_store: Arc<S>,
    shared_store: Option<Arc<S>>,
    clock: C,
}

impl<S, C> Clone for Outbound<S, C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S, C> fmt::Debug for Outbound<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.0.providers).finish()
    }
}

impl Outbound {
    /// The providers of this policy, with state in the memory of this process. `None` if it has no `[outbound]`.
    pub fn new(policy: &Policy) -> Option<Self> {
        Self::in_memory(policy, SystemClock::new())
    }
}

impl<C: Clock + Clone> Outbound<Memory, C> {
    /// The providers of this policy, with state in memory and the given clock. `None` if it has no `[outbound]`.
    pub fn in_memory(policy: &Policy, clock: C) -> Option<Self> {
        let config = policy.outbound()?;
        let max_bytes = usize::try_from(policy.store().max_bytes).unwrap_or(usize::MAX);
        let store = Memory::new(Arc::clone(config.limits()), max_bytes);
        Some(Self::with_store(config.clone(), store, clock, &KeySeed::new(random_bytes())))
    }
}

impl<S: Store, C: Clock + Clone> Outbound<S, C> {
    /// Providers of these parts. The store's limits must be the plan's. `seed` is random if only this process uses the
    /// store, and the same on every node if the store is shared.
    pub fn with_store(config: outbound::OutboundConfig, store: S, clock: C, seed: &KeySeed) -> Self {
        Self::with_stores(config, store, None, clock, seed)
    }

    /// As [`Outbound::with_store`], with a second store for the providers that the plan marks as shared.
    pub fn with_stores(
        config: outbound::OutboundConfig,
        local_store: S,
        shared: Option<S>,
        clock: C,
        seed: &KeySeed,
    ) -> Self {
        let (config, store, shared) = (Arc::new(config), Arc::new(local_store), shared.map(Arc::new));
        let provider = |index: usize| {
            let store = shared.as_ref().filter(|_| config.providers()[index].shared).unwrap_or(&store);
            Provider::new(Arc::clone(&config), index, seed, Arc::clone(store), clock.clone())
        };
        let providers = (0..config.providers().len()).map(provider).collect();
        Self(Arc::new(OutboundInner { config, providers, local_store: store, shared_store: shared, clock }))
    }

    /// The settings of the providers.
    pub fn config(&self) -> &outbound::OutboundConfig {
        &self.0.config
    }

    /// All providers, in file order.
    pub fn providers(&self) -> &[Provider<S, C>] {
        &self.0.providers
    }

    /// The provider with this name.
    ///
    /// # Errors
    /// No provider has this name. The error gives the nearest name.
    pub fn provider(&self, name: &str) -> Result<&Provider<S, C>, UnknownProviderError> {
        let config = self.0.config.find(name)?;
        let found = self.0.providers.iter().find(|provider| provider.config().name == config.name);
        Ok(found.expect("invariant: there is a provider for each of the plan's"))
    }

    /// Reports to other nodes which shared providers' breakers are open here. Opens the breakers that are open on more
    /// than half of the nodes. A long-running program calls it about once a second.
    pub async fn run_vote_exchange(&self) {
        for provider in self.providers().iter().filter(|provider| provider.config().shared) {
            provider.0.run_vote_exchange().await;
        }
    }

    /// Maintains the stores. A long-running program calls it about once a second.
    pub fn maintain(&self) -> Losses {
        let now = self.0.clock.now();
        let local_losses = self.0.local_store.maintain(now);
        self.0.shared_store.as_ref().map_or(local_losses, |shared| local_losses.plus(shared.maintain(now)))
    }
}

/// An external API. Cheap to clone; clones share limits, queue, breaker, budget and credentials.
pub struct Provider<S = Memory, C = SystemClock>(Arc<ProviderInner<S, C>>);

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

/// The options of a call.
#[derive(Clone, Debug)]
pub struct CallOptions {
    /// The priority. Default [`Lane::User`].
    pub lane: Lane,
    /// The expected cost, for limits that count more than calls. Default 1.
    pub cost: u64,
    /// The time limit of the whole call. Default: that of its lane.
    pub timeout: Option<Duration>,
    /// The means to raise its priority while it waits.
    pub urgency: Option<Urgency>,
}

impl Default for CallOptions {
    fn default() -> Self {
        Self { lane: Lane::default(), cost: 1, timeout: None, urgency: None }
    }
}

/// The transport of requests. The provider decides on the time, the credential and the effect of each reply.
pub trait Upstream: Send {
    /// The reply to a request.
    type Reply: Send;

    /// Sends one request, and returns its outcome by the attempt's deadline.
    fn send(&mut self, attempt: Attempt) -> impl Future<Output = AttemptOutcome<Self::Reply>> + Send;

    /// Returns a value that can send the same request in parallel, if that is safe and `hedge_after` is set. Default
    /// `None`.
    fn clone_for_hedge(&self) -> Option<Self>
    where
        Self: Sized,
    {
        None
    }

    /// True if a [`clone_for_hedge`](Self::clone_for_hedge) can send now, when the first request has had no reply for
    /// `hedge_after`. The first request must have been sent, and the whole request must be available.
    fn can_hedge(&self) -> bool {
        true
    }

    /// Renews the login of a credential that was rejected. Called only if there is a `login`.
    ///
    /// # Errors
    /// The class of the failure. [`Class::Auth`] disables the credential for a while if there is another one.
    fn renew_login(&mut self, _credential: usize) -> impl Future<Output = Result<(), Class>> + Send {
        std::future::ready(Err(Class::Auth))
    }
}

/// A request to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Attempt {
    /// The index of its credential in the provider's list.
    pub credential: usize,
    /// The number of the request within the call, from 1.
    pub number: u32,
    /// The time left for its reply, until the call's deadline.
    pub time_left: Duration,
    /// Half of the usual time of an attempt. A provider that doesn't reply, or doesn't read the request, for a shorter
    /// time is not at fault. Report such an attempt as [`Class::Cancelled`].
    pub conclusive_after: Duration,
}

/// The outcome of a request.
#[derive(Clone, Debug)]
pub struct AttemptOutcome<T> {
    /// The value that the call returns if this is its last request.
    pub value: T,
    /// The result as the state machine needs it.
    pub report: AttemptReport,
}

/// The statistics of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallStats {
    /// The number of requests that were sent, including hedged ones.
    pub attempts: u32,
    /// The total wait in the queue and between attempts.
    pub waited: Span,
    /// The index in the provider's list of the last request's credential. After a hedge, that of the reply that counts.
    pub credential: usize,
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

/// A failed call. If its error comes with a reply, the guard keeps the call in flight.
struct CallErrorWithGuard<T, S: Store, C: Clock> {
    error: CallError<T>,
    in_flight_guard: Option<InFlightGuard<S, C>>,
}

impl<T, S: Store, C: Clock> From<CallError<T>> for CallErrorWithGuard<T, S, C> {
    fn from(error: CallError<T>) -> Self {
        Self { error, in_flight_guard: None }
    }
}

impl<T: fmt::Debug, S: Store, C: Clock> fmt::Debug for CompletedCall<T, S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Done").field("value", &self.value).field("happened", &self.stats).finish_non_exhaustive()
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
        f.debug_struct("Tail").field("in_flight", &self.in_flight.is_in_flight()).finish_non_exhaustive()
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
    fn new(
        outbound_config: Arc<outbound::OutboundConfig>,
        index: usize,
        seed: &KeySeed,
        store: Arc<S>,
        clock: C,
    ) -> Self {
        let config = &outbound_config.providers()[index];
        let rules = config.rules(seed);
        let state = config.new_state(&rules);
        Self(Arc::new(ProviderInner::new(outbound_config, index, rules, state, store, clock)))
    }

    /// The settings of the provider.
    pub fn config(&self) -> &outbound::ProviderConfig {
        self.0.config()
    }

    /// The clock that gives the time.
    pub fn clock(&self) -> &C {
        &self.0.clock
    }

    /// Gives access to the current state of its queue, breaker, budget and credentials.
    pub fn inspect<T>(&self, look: impl FnOnce(&ProviderState, Time) -> T) -> T {
        self.0.inspect(look)
    }

    /// Makes a call: waits in the queue, sends, and retries by the provider's rules.
    ///
    /// Dropping the future releases everything that the call holds.
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
        self.call_with_guard(options, upstream).await.map_err(|failed| failed.error)
    }

    /// Does a [`call`](Self::call), but a reply in the error keeps the call in flight until it has been read.
    async fn call_with_guard<U: Upstream>(
        &self,
        options: CallOptions,
        upstream: &mut U,
    ) -> Result<CompletedCall<U::Reply, S, C>, CallErrorWithGuard<U::Reply, S, C>> {
        let CallOptions { lane, cost, timeout, urgency } = options;
        let lane = if self.config().sequential { Lane::User } else { lane };
        let started_at = self.0.clock.now();
        let deadline = timeout.map(|timeout| started_at + Span::from_duration(timeout));
        let call = Call::new(&self.0.rules, lane, cost, deadline, started_at);
        let urgency = urgency.as_ref();
        let mut call_guard = CallGuard { provider: &self.0, slot: CallSlot::Owned(call) };
        let mut stats = CallStats { attempts: 0, waited: Span::ZERO, credential: 0 };
        let mut waiting_since = started_at;
        loop {
            let (result, now) =
                call_guard.wait_for_turn(urgency, Some(started_at).filter(|_| stats.attempts == 0)).await;
            stats.waited = stats.waited + now.since(waiting_since);
            let credential = result.map_err(|why| self.call_error(why, None, stats))?;
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
            match next_step {
                NextStep::Done => return Ok(call_guard.complete(outcome, stats)),
                NextStep::Failed(failure) => {
                    let CompletedCall { value, in_flight_guard, .. } = call_guard.complete(outcome, stats);
                    let error =
                        self.call_error(CallErrorKind::new(&self.0.outbound_config, failure), Some(value), stats);
                    return Err(CallErrorWithGuard { error, in_flight_guard: Some(in_flight_guard) });
                }
                NextStep::RetryAt(at) => {
                    // No task reads this reply, so its connection is released before the wait.
                    drop(outcome);
                    if at > now {
                        tokio::time::sleep(at.since(now).as_duration()).await;
                    }
                }
                NextStep::RenewLogin { credential } => {
                    if let Err(class) = Box::pin(upstream.renew_login(credential)).await {
                        if class == Class::Auth {
                            self.0.handle_renewal_failure(call_guard.slot.call(), credential);
                        }
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

    fn new_attempt(&self, call: &Call, credential: usize, stats: CallStats, now: Time) -> Attempt {
        let time_left = call.deadline().since(now).as_duration();
        let conclusive_after = self.timeout(call.lane()).min(self.config().attempt_timeout) / 2;
        Attempt { credential, number: stats.attempts, time_left, conclusive_after }
    }

    /// Raises the priority of a call to this lane, if it still waits.
    pub fn raise(&self, urgency: &Urgency, lane: Lane) {
        if urgency.raise_to(lane) && !self.config().sequential {
            self.0.raise(urgency);
        }
    }

    fn call_error<T>(&self, why: CallErrorKind, value: Option<T>, stats: CallStats) -> CallError<T> {
        CallError {
            provider: self.config().name.clone(),
            kind: why,
            last_reply: value,
            stats,
            failed_at: self.0.clock.now(),
        }
    }
}

/// A running call. Releases what it holds when it is dropped.
struct CallGuard<'a, S: Store, C: Clock> {
    provider: &'a Arc<ProviderInner<S, C>>,
    slot: CallSlot,
}

impl<S: Store, C: Clock> CallGuard<'_, S, C> {
    /// Waits until the call may be sent, or has ended.
    async fn wait_for_turn(&mut self, urgency: Option<&Urgency>, started_at: Option<Time>) -> (DispatchResult, Time) {
        match self.provider.start(&mut self.slot, urgency, started_at) {
            StartOutcome::Decided(verdict, now) => (verdict, now),
            StartOutcome::Waiting(place) => {
                let (call, result, now) = self.provider.wait_for_result(place).await;
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
            CallSlot::Waiting(place) => self.provider.cancel_waiting(*place),
            CallSlot::Finished => {}
        }
    }
}

/// A handle that raises the priority of a waiting call, for example if a more urgent caller joins it.
#[derive(Clone, Debug)]
pub struct Urgency(Arc<UrgencyInner>);

#[derive(Debug)]
struct UrgencyInner {
    lane: AtomicU8,
    /// The index of its waiting call plus one; 0 if it doesn't wait. Written under the dispatcher's lock.
    waiting_index_plus_1: AtomicUsize,
}

impl Default for Urgency {
    /// Leaves the priority to the options of the call.
    fn default() -> Self {
        Self(Arc::new(UrgencyInner {
            lane: AtomicU8::new(Lane::Background as u8),
            waiting_index_plus_1: AtomicUsize::new(0),
        }))
    }
}

impl Urgency {
    fn lane(&self) -> Lane {
        Lane::ALL[usize::from(self.0.lane.load(Ordering::Relaxed))]
    }

    /// Raises the lane. Returns true if the new lane is more urgent than the old one.
    fn raise_to(&self, lane: Lane) -> bool {
        self.0.lane.fetch_max(lane as u8, Ordering::Relaxed) < lane as u8
    }

    fn set_waiting_index(&self, index: usize) {
        self.0.waiting_index_plus_1.store(index + 1, Ordering::Relaxed);
    }

    fn clear_waiting_index(&self) {
        self.0.waiting_index_plus_1.store(0, Ordering::Relaxed);
    }

    fn waiting_index(&self) -> Option<usize> {
        self.0.waiting_index_plus_1.load(Ordering::Relaxed).checked_sub(1)
    }
}
