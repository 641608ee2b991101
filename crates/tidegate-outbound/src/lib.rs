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
mod events;
mod exchange;
mod hedge;
mod login;
#[cfg(feature = "reqwest")]
mod middleware;
mod path;
mod progress_timeout;
mod provider;
mod replay;
mod reply_body;
mod reply_headers;
mod report;
mod service;
mod snapshot;
mod sse;
mod target;
mod urgency;
mod verdict_log;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use attempt_classifier::AttemptClassifier;
pub use attempt_classifier::fault_of;
pub use call_headers::{
    CallHeaderError, IDEMPOTENCY_KEY, TIDEGATE_PRIORITY, TIDEGATE_TIMEOUT, has_idempotency_key, take_call_options,
};
pub use causes::causes;
pub use credential::CredentialError;
use credential::Credentials;
use dispatcher::ProviderInner;
pub use error::{CallError, CallErrorBody, CallErrorKind};
use events::ProviderEvents;
pub use events::{ProviderChange, ProviderEvent};
pub use exchange::{BoxError, SendError};
pub use login::LoginError;
use login::{LoginFailure, LoginToken, Logins};
#[cfg(feature = "reqwest")]
pub use middleware::OutboundMiddleware;
pub use provider::{CompletedCall, InFlightGuard, Provider};
use replay::ReplayBuffer;
pub use replay::{ReplayBody, ReplayError};
pub use reply_body::OutboundBody;
pub use report::{
    BreakerReport, CredentialReport, CredentialStates, DurationReport, LaneReport, LimitUsage, ProviderReport,
};
pub use service::{OutboundError, OutboundLayer, OutboundService};
pub use snapshot::{Snapshot, SnapshotError};
use target::Target;
pub use target::TargetError;
pub use tidegate_core::breaker::BreakerState;
pub use tidegate_core::call::{AttemptReport, CallScope};
pub use tidegate_core::retry::{Delivery, UnreplayableReason};
pub use tidegate_core::{Class, Lane, Scope, Verdict};
use tidegate_core::{Clock, Span};
use tidegate_policy::outbound::{self, UnknownProviderError};
use tidegate_policy::{KeySeed, Policy, StoreUrl};
use tidegate_runtime::clock::SystemClock;
use tidegate_runtime::random::random_bytes;
use tidegate_store::{Losses, Memory, Store, StoreError};
pub use urgency::Urgency;

/// The providers of a policy. Cheap to clone; all clones share one state.
pub struct Outbound<S = Memory, C = SystemClock>(Arc<OutboundInner<S, C>>);

struct OutboundInner<S, C> {
    config: Arc<outbound::OutboundConfig>,
    providers: Vec<Provider<S, C>>,
    local_store: Arc<S>,
    shared_store: Option<Arc<S>>,
    clock: C,
    seed: KeySeed,
    events: Arc<ProviderEvents>,
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
        let events = Arc::default();
        Self::from_parts(config, Arc::new(local_store), shared.map(Arc::new), clock, seed.clone(), events, None)
    }

    /// Providers of these settings, on the state of these ones. A provider whose settings are the same stays as it is.
    /// Another one keeps what its limits have counted and its cool-downs; it starts with a closed breaker and an empty
    /// queue, while calls that began before end by the settings that they began with. `policy` is read with
    /// [`Policy::load_next`].
    ///
    /// # Errors
    /// The policy has no `[outbound]`, or the stores can't go on with its limits.
    pub fn next(&self, policy: &Policy) -> Result<Self, NextOutboundError> {
        let config = policy.outbound().ok_or(NextOutboundError::Section)?.clone();
        if !config.has_ids_of(&self.0.config) {
            return Err(NextOutboundError::OtherIds);
        }
        let OutboundInner { local_store, shared_store, clock, seed, events, .. } = &*self.0;
        if shared_store.is_none()
            && matches!(policy.store().url, StoreUrl::Server(..))
            && config.providers().iter().any(|it| it.shared)
        {
            return Err(NextOutboundError::Store);
        }
        let next_store = |store: &Arc<S>| {
            let next = store.with_limits(Arc::clone(config.limits()), clock.now())?;
            next.map(Arc::new).ok_or(NextOutboundError::Store)
        };
        let local_store = next_store(local_store)?;
        let shared_store = shared_store.as_ref().map(next_store).transpose()?;
        let (clock, seed, events) = (clock.clone(), seed.clone(), Arc::clone(events));
        Ok(Self::from_parts(config, local_store, shared_store, clock, seed, events, Some(self)))
    }

    fn from_parts(
        config: outbound::OutboundConfig,
        local_store: Arc<S>,
        shared_store: Option<Arc<S>>,
        clock: C,
        seed: KeySeed,
        events: Arc<ProviderEvents>,
        earlier: Option<&Self>,
    ) -> Self {
        let config = Arc::new(config);
        let provider = |index: usize| {
            let own = &config.providers()[index];
            let is_same = |it: &&Provider<S, C>| config.has_unchanged(it.config(), &it.0.outbound_config);
            let known = earlier.and_then(|earlier| earlier.provider(&own.name).ok());
            if let Some(same) = known.filter(is_same) {
                return same.clone();
            }
            let store = Arc::clone(shared_store.as_ref().filter(|_| own.shared).unwrap_or(&local_store));
            let (config, events) = (Arc::clone(&config), Arc::clone(&events));
            let earlier = known.map(|known| &known.0);
            Provider(Arc::new(ProviderInner::new(config, index, &seed, store, clock.clone(), events, earlier)))
        };
        let providers = (0..config.providers().len()).map(provider).collect();
        Self(Arc::new(OutboundInner { config, providers, local_store, shared_store, clock, seed, events }))
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

    /// Calls this function after each change of a provider's state. It runs in the task of a call, so it must not wait;
    /// it may call the providers. Returns false, and changes nothing, if there is such a function already. Changes are
    /// logged in any case.
    pub fn observe(&self, observer: impl Fn(&ProviderEvent) + Send + Sync + 'static) -> bool {
        self.0.events.observe(Box::new(observer))
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

/// The reason why providers can't go on by another policy.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NextOutboundError {
    /// The policy has no providers.
    #[error("the policy has no [outbound]")]
    Section,
    /// The policy wasn't read with [`Policy::load_next`] from the policy of the providers.
    #[error("the policy doesn't follow the present one: its limits have other ids")]
    OtherIds,
    /// The stores can't go on with other limits, or the first shared provider needs a store that isn't open.
    #[error("the providers' store can't go on with other limits; a restart is needed")]
    Store,
    /// The store failed.
    #[error(transparent)]
    StoreFailed(#[from] StoreError),
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
    /// The route and the scope of the call. Default: unknown; an [`OutboundLayer`] derives them from the request.
    pub scope: CallScope,
    /// The means to raise its priority while it waits.
    pub urgency: Option<Urgency>,
    /// The time that the caller has already waited, for [`CallStats::waited`]. The timeout doesn't include it. Default
    /// zero.
    pub waited: Span,
}

impl Default for CallOptions {
    fn default() -> Self {
        Self {
            lane: Lane::default(),
            cost: 1,
            timeout: None,
            scope: CallScope::default(),
            urgency: None,
            waited: Span::ZERO,
        }
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
    /// The total wait in the queue, between attempts and, with a cache, for an identical call.
    pub waited: Span,
    /// The index in the provider's list of the last request's credential. After a hedge, that of the reply that counts.
    pub credential: usize,
}
