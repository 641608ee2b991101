//! Calls to other people's APIs: within their limits, by priority, and with retries.
//!
//! An [`Outbound`] holds the providers of a policy. An [`OutboundLayer`] makes a tower service call one of them, and
//! `OutboundMiddleware` (feature `reqwest`) all of them; [`Provider::call`] drives any other client.

#[cfg(feature = "reqwest")]
pub use tidegate_outbound::OutboundMiddleware;
#[cfg(feature = "cache")]
pub use tidegate_outbound::cache;
pub use tidegate_outbound::{
    Attempt, AttemptOutcome, AttemptReport, BreakerReport, BreakerState, CallError, CallErrorBody, CallErrorKind,
    CallHeaderError, CallOptions, CallScope, CallStats, Class, CompletedCall, CredentialError, CredentialReport,
    CredentialStates, Delivery, DurationReport, IDEMPOTENCY_KEY, InFlightGuard, Lane, LaneReport, LimitUsage,
    NextOutboundError, Outbound, OutboundBody, OutboundError, OutboundLayer, OutboundService, Provider, ProviderChange,
    ProviderEvent, ProviderReport, ReplayBody, ReplayError, SendError, Snapshot, SnapshotError, TIDEGATE_PRIORITY,
    TIDEGATE_TIMEOUT, TargetError, UnreplayableReason, Upstream, Urgency, fault_of, take_call_options,
};
