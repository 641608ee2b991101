//! The changes of providers' states, for logs, metrics and alerts.

use std::fmt;
use std::sync::OnceLock;

use tidegate_core::breaker::BreakerState;
use tidegate_core::{Span, Time};
use tidegate_runtime::log_throttle::LogThrottle;

/// The maximum number of log lines per second about changes of all providers.
const LINES_PER_SECOND: u32 = 10;

/// A change of a provider's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderEvent {
    /// The time of the change.
    pub at: Time,
    /// The name of the provider.
    pub provider: String,
    /// The change.
    pub change: ProviderChange,
}

/// The change of a [`ProviderEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProviderChange {
    /// A reply, or the votes of other nodes, has changed the state of the circuit breaker. A state that was over before
    /// the first reply to a probe isn't reported.
    Breaker {
        /// The new state.
        state: BreakerState,
        /// The failures that it has counted.
        failures: u32,
        /// The time until it admits a call again; zero if it admits calls now.
        reset_in: Span,
    },
    /// The provider has asked for a pause with a credential, which isn't used for a while.
    CoolingDown {
        /// The index of the credential in the policy; 0 if the provider has no credentials.
        credential: usize,
        /// The end of the cool-down. `None` if only a store outside this process knows it.
        until: Option<Time>,
        /// True if all credentials of the provider cool down now, so that calls wait.
        all_cooling: bool,
    },
    /// The provider has rejected a credential, which isn't used for a while.
    CredentialRejected {
        /// The index of the credential in the policy.
        credential: usize,
        /// The time until it is tried again.
        until: Time,
    },
    /// An operator has stopped the calls to the provider.
    Paused,
    /// An operator lets calls to the provider start again.
    Resumed,
    /// An operator has closed the breaker and ended the cool-downs.
    Reset,
}

type Observer = Box<dyn Fn(&ProviderEvent) + Send + Sync>;

/// The log and the observer of events.
pub(crate) struct ProviderEvents {
    observer: OnceLock<Observer>,
    throttle: LogThrottle,
}

impl Default for ProviderEvents {
    fn default() -> Self {
        Self { observer: OnceLock::new(), throttle: LogThrottle::new(LINES_PER_SECOND) }
    }
}

impl fmt::Debug for ProviderEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProviderEvents").field("observed", &self.observer.get().is_some()).finish()
    }
}

impl ProviderEvents {
    /// Sets the observer. Returns false if there is one already.
    pub(crate) fn observe(&self, observer: Observer) -> bool {
        self.observer.set(observer).is_ok()
    }

    /// Logs an event, unless the limit on lines is reached, and tells the observer.
    #[cold]
    pub(crate) fn publish(&self, event: &ProviderEvent) {
        if let Some(suppressed) = self.throttle.admit(event.at) {
            log(event, suppressed);
        }
        if let Some(observer) = self.observer.get() {
            observer(event);
        }
    }
}

/// The least length in seconds of a cool-down that is a warning: calls fail meanwhile.
const LONG_COOLDOWN: u64 = 3_600;
const ONE_COOLING: &str = "the provider has asked for a pause with a credential, which cools down";
const ALL_COOLING: &str = "the provider has asked for a pause, and no other credential is usable: calls wait";

fn log(event: &ProviderEvent, suppressed: u64) {
    let ProviderEvent { at, provider, change } = event;
    let seconds = |until: Time| until.since(*at).as_secs_ceil();
    match *change {
        ProviderChange::Breaker { state: BreakerState::Open, failures, reset_in } => {
            let seconds = reset_in.as_secs_ceil();
            tracing::warn!(provider, failures, seconds, suppressed, "the circuit breaker is open: no call is sent");
        }
        ProviderChange::Breaker { state, .. } => {
            tracing::info!(provider, suppressed, "the circuit breaker is {}", state.name());
        }
        ProviderChange::CoolingDown { credential, until, all_cooling } => {
            let (seconds, what) = (until.map(seconds), if all_cooling { ALL_COOLING } else { ONE_COOLING });
            match seconds {
                Some(LONG_COOLDOWN..) => tracing::warn!(provider, credential, seconds, suppressed, "{what}"),
                _ => tracing::info!(provider, credential, seconds, suppressed, "{what}"),
            }
        }
        ProviderChange::CredentialRejected { credential, until } => {
            let seconds = seconds(until);
            tracing::warn!(provider, credential, seconds, suppressed, "a credential was rejected and is left out");
        }
        ProviderChange::Paused => tracing::warn!(provider, suppressed, "an operator has paused the provider"),
        ProviderChange::Resumed => tracing::info!(provider, suppressed, "an operator has resumed the provider"),
        ProviderChange::Reset => {
            tracing::info!(provider, suppressed, "an operator has closed the breaker and ended the cool-downs");
        }
    }
}
