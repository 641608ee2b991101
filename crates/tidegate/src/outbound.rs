//! Calls to other people's APIs: inside their limits, in order of importance, and home through failures.
//!
//! An [`Outbound`] holds the providers of a policy. [`Provider::call`] drives one call through the machine of
//! [`tidegate_core::call`]: it waits for its turn, sends by way of your [`Upstream`], and tries again where that is
//! worth it, harmless, possible and in time.
//!
//! State is this process' own. What should outlive it, spent quotas and cool-downs, a [`Snapshot`] keeps in a file.
//!
//! It has to be polled within a tokio runtime whose timers are enabled.

mod answer;
pub mod cache;
mod causes;
mod cost;
mod credential;
mod error;
mod events;
mod exchange;
mod floor;
mod hedge;
mod judge;
#[cfg(feature = "tower")]
pub mod layers;
mod location;
mod login;
#[cfg(feature = "reqwest")]
mod middleware;
mod path;
mod patience;
mod replay;
mod service;
mod snapshot;
mod target;
mod wish;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

pub use answer::OutboundBody;
pub use causes::causes;
pub use credential::{CredentialError, Credentials};
pub use error::{CallError, Problem, Why};
pub use exchange::{BoxError, Trouble};
use floor::{After, Broken, Entered, Hall, Place, Verdict};
pub use judge::{Judge, fault_of};
pub use login::{LoginError, Logins, Token};
#[cfg(feature = "reqwest")]
pub use middleware::OutboundMiddleware;
pub use replay::{Replay, ReplayBody, ReplayError};
pub use service::{OutboundError, OutboundLayer, OutboundService};
pub use snapshot::{Snapshot, SnapshotError};
pub use target::{Target, TargetError};
use tidegate_core::call::{Call, Desk, Remainder, Reply};
use tidegate_core::{Class, Clock, Lane, Span, Time};
use tidegate_policy::outbound::{self, UnknownProviderError};
use tidegate_policy::{KeySeed, Policy};
use tidegate_store::{Losses, Memory, Store};
pub use wish::{IDEMPOTENCY_KEY, PRIORITY, TIMEOUT, WishError, has_idempotency_key, take_wishes};

use crate::SystemClock;
use crate::random::random_seed;

/// The providers of a policy. Cheap to clone; clones are the same.
pub struct Outbound<S = Memory, C = SystemClock>(Arc<Parts<S, C>>);

struct Parts<S, C> {
    plan: Arc<outbound::OutboundConfig>,
    providers: Vec<Provider<S, C>>,
    store: Arc<S>,
    shared: Option<Arc<S>>,
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
    /// The providers of this policy, with state in this process' memory; `None` if it has no `[outbound]`.
    pub fn new(policy: &Policy) -> Option<Self> {
        Self::in_memory(policy, SystemClock::new())
    }
}

impl<C: Clock + Clone> Outbound<Memory, C> {
    /// The providers of this policy, with state in memory and a clock of your own.
    pub fn in_memory(policy: &Policy, clock: C) -> Option<Self> {
        let plan = policy.outbound()?;
        let max_bytes = usize::try_from(policy.store().max_bytes).unwrap_or(usize::MAX);
        let store = Memory::new(Arc::clone(plan.limits()), max_bytes);
        Some(Self::with(plan.clone(), store, clock, &random_seed()))
    }
}

impl<S: Store, C: Clock + Clone> Outbound<S, C> {
    /// Providers of these parts. `seed` is random where the store is this process' own, and the same for every node
    /// where it is shared; the store's limits must be the plan's.
    pub fn with(plan: outbound::OutboundConfig, store: S, clock: C, seed: &KeySeed) -> Self {
        Self::with_stores(plan, store, None, clock, seed)
    }

    /// [`Outbound::with`] and a second store, for the providers that the plan says are shared.
    pub fn with_stores(plan: outbound::OutboundConfig, own: S, shared: Option<S>, clock: C, seed: &KeySeed) -> Self {
        let (plan, store, shared) = (Arc::new(plan), Arc::new(own), shared.map(Arc::new));
        let provider = |index: usize| {
            let store = shared.as_ref().filter(|_| plan.providers()[index].shared).unwrap_or(&store);
            Provider::new(Arc::clone(&plan), index, seed, Arc::clone(store), clock.clone())
        };
        let providers = (0..plan.providers().len()).map(provider).collect();
        Self(Arc::new(Parts { plan, providers, store, shared, clock }))
    }

    /// What they are called by.
    pub fn plan(&self) -> &outbound::OutboundConfig {
        &self.0.plan
    }

    /// Every provider, in file order.
    pub fn providers(&self) -> &[Provider<S, C>] {
        &self.0.providers
    }

    /// The provider of this name.
    ///
    /// # Errors
    /// There is none; the nearest name is told.
    pub fn provider(&self, name: &str) -> Result<&Provider<S, C>, UnknownProviderError> {
        let plan = self.0.plan.find(name)?;
        let found = self.0.providers.iter().find(|provider| provider.plan().name == plan.name);
        Ok(found.expect("invariant: there is a provider for each of the plan's"))
    }

    /// Tells other nodes which providers' breakers are open here, where the policy says that they are shared, and opens
    /// those that are open in more than half of the nodes. To be called about once a second by whoever runs for long.
    pub async fn confer(&self) {
        for provider in self.providers().iter().filter(|provider| provider.plan().shared) {
            provider.0.confer().await;
        }
    }

    /// The store's housekeeping, to be called about once a second by whoever runs for long.
    pub fn tend(&self) -> Losses {
        let now = self.0.clock.now();
        let own = self.0.store.tend(now);
        self.0.shared.as_ref().map_or(own, |shared| own.and(shared.tend(now)))
    }
}

/// Somebody else's API as it is called. Cheap to clone; clones share limits, queue, breaker, budget and credentials.
pub struct Provider<S = Memory, C = SystemClock>(Arc<Hall<S, C>>);

impl<S, C> Clone for Provider<S, C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S, C> fmt::Debug for Provider<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Provider").field("name", &self.0.plan().name).finish_non_exhaustive()
    }
}

/// What a call asks for.
#[derive(Clone, Debug)]
pub struct CallOptions {
    /// How urgent it is. Default [`Lane::User`].
    pub lane: Lane,
    /// What it is expected to cost where a limit counts more than calls. Default 1.
    pub cost: u64,
    /// How long it may take in all. Default as its lane says.
    pub timeout: Option<Duration>,
    /// By which it can be made more urgent while it waits.
    pub urgency: Option<Urgency>,
}

impl Default for CallOptions {
    fn default() -> Self {
        Self { lane: Lane::default(), cost: 1, timeout: None, urgency: None }
    }
}

/// How requests are sent. The driver decides when, with which credential, and what a reply means for other calls.
pub trait Upstream: Send {
    /// What comes back.
    type Reply: Send;

    /// Sends one request, and tells what came of it by the attempt's deadline.
    fn send(&mut self, attempt: Attempt) -> impl Future<Output = Ended<Self::Reply>> + Send;

    /// Another that sends the same request beside this one, where that does no harm and `hedge_after` asks for it. Never
    /// by default.
    fn twin(&self) -> Option<Self>
    where
        Self: Sized,
    {
        None
    }

    /// Whether a [`twin`](Self::twin) could send now, beside a request that has had no reply for `hedge_after`: that one was
    /// sent indeed, and the whole request is at hand.
    fn is_due(&self) -> bool {
        true
    }

    /// Logs a credential in anew that wasn't accepted. Never asked for without a `login`.
    ///
    /// # Errors
    /// What became of the login: [`Class::Auth`] leaves the credential out for a while if there is another.
    fn renew(&mut self, _credential: usize) -> impl Future<Output = Result<(), Class>> + Send {
        std::future::ready(Err(Class::Auth))
    }
}

/// One request to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Attempt {
    /// The place of its credential in the provider's list.
    pub credential: usize,
    /// Which request of the call it is, from 1.
    pub number: u32,
    /// How long there is for its reply: until the call's deadline.
    pub time_left: Duration,
    /// Half of what an attempt is granted otherwise. That a provider doesn't answer, or take more of the request, for less
    /// than this says nothing of it, and is to be told as [`Class::Cancelled`].
    pub enough: Duration,
}

/// How a request ended.
#[derive(Clone, Debug)]
pub struct Ended<T> {
    /// What the call returns if this is its last request.
    pub value: T,
    /// What it means.
    pub reply: Reply,
}

/// What happened on the way to a call's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Happened {
    /// How many requests were sent, those beside others included.
    pub attempts: u32,
    /// For how long it waited for its turn and between attempts.
    pub waited: Span,
    /// The place in the provider's list of the last request's credential; of two beside each other, of that whose reply
    /// counts.
    pub credential: usize,
}

/// A call that has its reply.
pub struct Done<T, S: Store = Memory, C: Clock = SystemClock> {
    /// The reply to its last request.
    pub value: T,
    /// How it came about.
    pub happened: Happened,
    /// To be kept until the reply has been read to its end.
    pub tail: Tail<S, C>,
}

/// A call that has failed, and the end of the reply that comes with its error, if one does.
struct Failed<T, S: Store, C: Clock> {
    error: CallError<T>,
    tail: Option<Tail<S, C>>,
}

impl<T, S: Store, C: Clock> From<CallError<T>> for Failed<T, S, C> {
    fn from(error: CallError<T>) -> Self {
        Self { error, tail: None }
    }
}

impl<T: fmt::Debug, S: Store, C: Clock> fmt::Debug for Done<T, S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Done").field("value", &self.value).field("happened", &self.happened).finish_non_exhaustive()
    }
}

/// The end of a call whose reply is still being read; dropping it says that it has been, or that nobody reads on.
#[must_use = "dropping it ends the call"]
pub struct Tail<S: Store = Memory, C: Clock = SystemClock> {
    hall: Option<Arc<Hall<S, C>>>,
    remainder: Remainder,
}

impl<S: Store, C: Clock> Tail<S, C> {
    /// Tells what it cost, where a limit counts more than calls and the reply says so.
    pub fn cost_was(mut self, cost: u64) {
        if let Some(hall) = self.hall.take() {
            hall.ended(&mut self.remainder, Some(cost));
        }
    }
}

impl<S: Store, C: Clock> fmt::Debug for Tail<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tail").field("in_flight", &self.remainder.is_in_flight()).finish_non_exhaustive()
    }
}

impl<S: Store, C: Clock> Drop for Tail<S, C> {
    fn drop(&mut self) {
        if let Some(hall) = self.hall.take().filter(|_| self.remainder.is_in_flight()) {
            hall.ended(&mut self.remainder, None);
        }
    }
}

impl<S: Store, C: Clock> Provider<S, C> {
    fn new(whole: Arc<outbound::OutboundConfig>, index: usize, seed: &KeySeed, store: Arc<S>, clock: C) -> Self {
        let plan = &whole.providers()[index];
        let rules = plan.rules(seed);
        let desk = plan.new_state(&rules);
        Self(Arc::new(Hall::new(whole, index, rules, desk, store, clock)))
    }

    /// What the policy says of it.
    pub fn plan(&self) -> &outbound::ProviderConfig {
        self.0.plan()
    }

    /// What it tells the time by.
    pub fn clock(&self) -> &C {
        &self.0.clock
    }

    /// Looks at its queue, breaker, budget and credentials as they stand now.
    pub fn look<T>(&self, look: impl FnOnce(&Desk, Time) -> T) -> T {
        self.0.look(look)
    }

    /// Makes a call: waits for its turn, sends, and tries again as the provider's rules say.
    ///
    /// Dropping the future gives everything back that the call holds.
    ///
    /// # Errors
    /// Why there is no reply, or why the last one, which comes with the error, is not a good one. That one is in flight no
    /// more.
    pub async fn call<U: Upstream>(
        &self,
        options: CallOptions,
        upstream: &mut U,
    ) -> Result<Done<U::Reply, S, C>, CallError<U::Reply>> {
        self.drive(options, upstream).await.map_err(|failed| failed.error)
    }

    /// [`call`](Self::call), but a reply that comes with the error is in flight until it has been read.
    async fn drive<U: Upstream>(
        &self,
        options: CallOptions,
        upstream: &mut U,
    ) -> Result<Done<U::Reply, S, C>, Failed<U::Reply, S, C>> {
        let CallOptions { lane, cost, timeout, urgency } = options;
        let lane = if self.plan().sequential { Lane::User } else { lane };
        let began_at = self.0.clock.now();
        let deadline = timeout.map(|timeout| began_at + Span::from_duration(timeout));
        let call = Call::new(&self.0.rules, lane, cost, deadline, began_at);
        let urgency = urgency.as_ref();
        let mut live = Live { hall: &self.0, place: Place::Held(call) };
        let mut happened = Happened { attempts: 0, waited: Span::ZERO, credential: 0 };
        let mut waits_since = began_at;
        loop {
            let (verdict, now) = live.turn(urgency, Some(began_at).filter(|_| happened.attempts == 0)).await;
            happened.waited = happened.waited + now.since(waits_since);
            let credential = verdict.map_err(|broken| self.error(broken, None, happened))?;
            happened.attempts += 1;
            happened.credential = credential;
            let attempt = self.attempt_of(live.place.call(), credential, happened, now);
            let ended = match self.plan().hedge_after {
                None => upstream.send(attempt).await,
                // Two requests take more room than one, which calls without a hedge would pay for too.
                Some(after) => Box::pin(self.race(upstream, after, attempt, &mut live, &mut happened)).await,
            };
            let (after, now) = self.0.replied(live.place.call(), &ended.reply);
            waits_since = now;
            match after {
                After::Done => return Ok(live.done(ended, happened)),
                After::Failed(failure) => {
                    let Done { value, tail, .. } = live.done(ended, happened);
                    let error = self.error(Broken::Failed(failure), Some(value), happened);
                    return Err(Failed { error, tail: Some(tail) });
                }
                After::Again(at) => {
                    // A reply that nobody will read holds its connection no longer.
                    drop(ended);
                    if at > now {
                        tokio::time::sleep(at.since(now).as_duration()).await;
                    }
                }
                After::Renew => {
                    if let Err(class) = Box::pin(upstream.renew(happened.credential)).await {
                        if class == Class::Auth {
                            self.0.not_renewed(live.place.call(), happened.credential);
                        }
                        return Ok(live.done(ended, happened));
                    }
                }
            }
        }
    }

    /// How long a call of this lane may take that doesn't say so itself.
    pub fn timeout(&self, lane: Lane) -> Duration {
        self.0.rules.lane_rules[lane as usize].timeout.as_duration()
    }

    fn attempt_of(&self, call: &Call, credential: usize, happened: Happened, now: Time) -> Attempt {
        let time_left = call.deadline().since(now).as_duration();
        let enough = self.timeout(call.lane()).min(self.plan().attempt_timeout) / 2;
        Attempt { credential, number: happened.attempts, time_left, enough }
    }

    /// Makes a call that is under way as urgent as this, if it still waits.
    pub fn raise(&self, urgency: &Urgency, lane: Lane) {
        if urgency.at_least(lane) && !self.plan().sequential {
            self.0.raise(urgency);
        }
    }

    fn error<T>(&self, broken: Broken, value: Option<T>, happened: Happened) -> CallError<T> {
        CallError::new(&self.0.whole, &self.plan().name, broken, value, happened, self.0.clock.now())
    }
}

/// A call under way: gives back what it holds when it is dropped.
struct Live<'a, S: Store, C: Clock> {
    hall: &'a Arc<Hall<S, C>>,
    place: Place,
}

impl<S: Store, C: Clock> Live<'_, S, C> {
    /// Waits until the call may be sent, or is over.
    async fn turn(&mut self, urgency: Option<&Urgency>, began_at: Option<Time>) -> (Verdict, Time) {
        match self.hall.start(&mut self.place, urgency, began_at) {
            Entered::Decided(verdict, now) => (verdict, now),
            Entered::Parked(place) => {
                let (call, verdict, now) = self.hall.verdict(place).await;
                self.place = Place::Held(call);
                (verdict, now)
            }
        }
    }

    fn done<T>(&mut self, ended: Ended<T>, happened: Happened) -> Done<T, S, C> {
        let remainder = self.place.call().remainder(happened.credential);
        self.place = Place::Gone;
        let tail = Tail { hall: Some(Arc::clone(self.hall)), remainder };
        Done { value: ended.value, happened, tail }
    }
}

impl<S: Store, C: Clock> Drop for Live<'_, S, C> {
    fn drop(&mut self) {
        match &mut self.place {
            Place::Held(call) => self.hall.abandoned(call),
            Place::Parked(place) => self.hall.forsaken(*place),
            Place::Gone => {}
        }
    }
}

/// By which a call can be made more urgent while it waits: for when somebody joins who can't wait as long.
#[derive(Clone, Debug)]
pub struct Urgency(Arc<Joined>);

#[derive(Debug)]
struct Joined {
    lane: AtomicU8,
    /// One more than the place where its call is parked; 0 if it isn't. Written under the floor's lock.
    place: AtomicUsize,
}

impl Default for Urgency {
    /// As urgent as its call says.
    fn default() -> Self {
        Self(Arc::new(Joined { lane: AtomicU8::new(Lane::Background as u8), place: AtomicUsize::new(0) }))
    }
}

impl Urgency {
    fn lane(&self) -> Lane {
        Lane::ALL[usize::from(self.0.lane.load(Ordering::Relaxed))]
    }

    /// Whether that is more than it was.
    fn at_least(&self, lane: Lane) -> bool {
        self.0.lane.fetch_max(lane as u8, Ordering::Relaxed) < lane as u8
    }

    fn parked(&self, place: usize) {
        self.0.place.store(place + 1, Ordering::Relaxed);
    }

    fn unparked(&self) {
        self.0.place.store(0, Ordering::Relaxed);
    }

    fn place(&self) -> Option<usize> {
        self.0.place.load(Ordering::Relaxed).checked_sub(1)
    }
}
