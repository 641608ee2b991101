//! The origin of cached replies: the facts that a cache needs about the provider.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, header};
use tidegate_core::{Clock, Lane};
use tidegate_policy::Secret;
use tidegate_policy::outbound::{Auth, CacheRules};
use tidegate_store::Store;

use super::super::{CallError, CallErrorKind, OutboundError, OutboundService, Provider, SendError, Urgency};

/// A provider with replies that can be stored.
///
/// A [`Provider`] by itself has no secrets. If its credential may change while the program runs, calls with the new one
/// must not get replies to the old one. Then the origin must be the [`OutboundService`], or an implementation of your
/// own.
pub trait Origin {
    /// The provider's name, which keeps its replies apart from those of other providers.
    fn name(&self) -> &str;
    /// The rules for its replies. `None` stores nothing.
    fn rules(&self) -> Option<&CacheRules>;
    /// The number of credentials that its calls may be sent with.
    fn credential_count(&self) -> usize;
    /// The present secret of its only credential; `None` if it has none that could change.
    fn secret(&self) -> impl Future<Output = Option<Arc<Secret>>> + Send;
    /// The header that the provider's own credential replaces, even if the caller set it.
    fn injected_header(&self) -> Option<HeaderName>;
    /// The query parameter that the provider's own credential replaces, even if the caller set it. Default `None`.
    fn injected_parameter(&self) -> Option<&str> {
        None
    }
    /// The default timeout of a call of this lane.
    fn timeout(&self, lane: Lane) -> Duration;
    /// Raises the priority of the call with this handle to this lane, if it still waits.
    fn raise(&self, urgency: &Urgency, lane: Lane);
}

impl<S: Store, C: Clock> Origin for Provider<S, C> {
    fn name(&self) -> &str {
        &self.config().name
    }

    fn rules(&self) -> Option<&CacheRules> {
        self.config().cache.as_ref()
    }

    fn credential_count(&self) -> usize {
        self.0.rules.credential_keys.len()
    }

    async fn secret(&self) -> Option<Arc<Secret>> {
        None
    }

    fn injected_header(&self) -> Option<HeaderName> {
        match &self.config().auth {
            _ if self.config().credentials.is_empty() => None,
            Auth::Bearer => Some(header::AUTHORIZATION),
            Auth::Header { name, .. } => Some(name.clone()),
            Auth::None | Auth::Query { .. } | Auth::Path => None,
        }
    }

    fn injected_parameter(&self) -> Option<&str> {
        match &self.config().auth {
            _ if self.config().credentials.is_empty() => None,
            Auth::Query { name } => Some(name),
            Auth::None | Auth::Bearer | Auth::Header { .. } | Auth::Path => None,
        }
    }

    fn timeout(&self, lane: Lane) -> Duration {
        Self::timeout(self, lane)
    }

    fn raise(&self, urgency: &Urgency, lane: Lane) {
        Self::raise(self, urgency, lane);
    }
}

impl<I: Sync, S: Store, C: Clock> Origin for OutboundService<I, S, C> {
    fn name(&self) -> &str {
        self.provider().name()
    }

    fn rules(&self) -> Option<&CacheRules> {
        self.provider().rules()
    }

    fn credential_count(&self) -> usize {
        self.provider().credential_count()
    }

    async fn secret(&self) -> Option<Arc<Secret>> {
        Self::secret(self).await
    }

    fn injected_header(&self) -> Option<HeaderName> {
        self.provider().injected_header()
    }

    fn injected_parameter(&self) -> Option<&str> {
        self.provider().injected_parameter()
    }

    fn timeout(&self, lane: Lane) -> Duration {
        Origin::timeout(self.provider(), lane)
    }

    fn raise(&self, urgency: &Urgency, lane: Lane) {
        self.provider().raise(urgency, lane);
    }
}

/// The meaning of an error for other calls than the one that failed.
pub trait CacheCallError {
    /// Returns true if the provider is unavailable, so that an old reply is better than none.
    fn is_outage(&self) -> bool;

    /// Returns true if the call failed because of its own deadline or its position in the queue. Another call may then
    /// succeed.
    fn is_call_specific(&self) -> bool;
}

impl<T> CacheCallError for CallError<T> {
    /// True if the breaker is open, all credentials cool down, a quota is spent, or all possible attempts failed with
    /// transient errors.
    fn is_outage(&self) -> bool {
        matches!(
            self.kind,
            CallErrorKind::Unavailable { .. }
                | CallErrorKind::ProviderPaused
                | CallErrorKind::CredentialsCooling { .. }
                | CallErrorKind::QuotaSpent { .. }
                | CallErrorKind::RetriesExhausted { .. }
                | CallErrorKind::RetryAfterTooLong { .. }
                | CallErrorKind::NoTimeLeft { .. }
                | CallErrorKind::BudgetSpent
        )
    }

    fn is_call_specific(&self) -> bool {
        matches!(
            self.kind,
            CallErrorKind::RateLimited { .. }
                | CallErrorKind::QuotaSpent { .. }
                | CallErrorKind::CredentialsCooling { .. }
                | CallErrorKind::LanePaused { .. }
                | CallErrorKind::QueueFull { .. }
                | CallErrorKind::DeadlineExceeded
                | CallErrorKind::NoTimeLeft { .. }
        )
    }
}

impl CacheCallError for OutboundError {
    fn is_outage(&self) -> bool {
        match self {
            Self::Call(call) => call.is_outage(),
            Self::Send(SendError::BrokenBody | SendError::BodyTimeout) | Self::Target(_) => false,
            Self::Send(_) => true,
        }
    }

    fn is_call_specific(&self) -> bool {
        match self {
            Self::Call(call) => call.is_call_specific(),
            Self::Send(_) | Self::Target(_) => false,
        }
    }
}

/// For services that turn every failure into a reply.
impl CacheCallError for Infallible {
    fn is_outage(&self) -> bool {
        match *self {}
    }

    fn is_call_specific(&self) -> bool {
        match *self {}
    }
}
