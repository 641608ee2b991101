//! What a cache has to know of the provider that it stands before.

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

/// Whose replies are kept.
///
/// A [`Provider`] by itself has no secrets. Where its credential may change while the program runs, what is kept must
/// not be told to calls with the new one: there the [`OutboundService`] is the origin, or one of your own.
pub trait Origin {
    /// Its name, which keeps its replies apart from other providers'.
    fn name(&self) -> &str;
    /// What is kept of its replies; nothing if `None`.
    fn rules(&self) -> Option<&CacheRules>;
    /// How many credentials its calls may be sent with.
    fn credential_count(&self) -> usize;
    /// The secret of its only credential as it stands now; `None` if it has none that could change.
    fn secret(&self) -> impl Future<Output = Option<Arc<Secret>>> + Send;
    /// The header of a request that its own credential replaces, whatever the caller wrote there.
    fn injected_header(&self) -> Option<HeaderName>;
    /// How long a call of this lane may take that doesn't say so itself.
    fn timeout(&self, lane: Lane) -> Duration;
    /// Makes a call that is under way as urgent as this.
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

    fn timeout(&self, lane: Lane) -> Duration {
        Origin::timeout(self.provider(), lane)
    }

    fn raise(&self, urgency: &Urgency, lane: Lane) {
        self.provider().raise(urgency, lane);
    }
}

/// What an error says beyond the call that it failed.
pub trait CacheCallError {
    /// Whether the provider is unavailable, so that an old reply is better than none.
    fn is_outage(&self) -> bool;

    /// Whether it was this call's own deadline or place in the queue that failed it, so that another call may fare
    /// better.
    fn is_call_specific(&self) -> bool;
}

impl<T> CacheCallError for CallError<T> {
    /// The breaker is open, all credentials cool down, a quota is spent, or the attempts that there could be have failed
    /// by faults that pass.
    fn is_outage(&self) -> bool {
        matches!(
            self.kind,
            CallErrorKind::Unavailable { .. }
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

/// For services that tell every failure as a reply.
impl CacheCallError for Infallible {
    fn is_outage(&self) -> bool {
        match *self {}
    }

    fn is_call_specific(&self) -> bool {
        match *self {}
    }
}
