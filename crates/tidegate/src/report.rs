//! A decision as JSON.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tidegate_core::time::UtcText;
use tidegate_core::{Decision, Span};
use tidegate_policy::{Plan, ReservationToken};

/// A decision in the form for replies and logs. It serialises to JSON and parses back. Times are whole seconds, rounded
/// up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionReport {
    /// True if the call is allowed.
    pub allowed: bool,
    /// The capacity of the limit that bound the decision. `None` if no limit took part.
    pub limit: Option<u64>,
    /// The remaining part of the capacity.
    pub remaining: Option<u64>,
    /// Seconds until that limit has its full capacity again.
    pub reset_after: u64,
    /// After a refusal, seconds to wait. `None` if no wait helps, and on admission.
    pub retry_after: Option<u64>,
    /// True if a penalty is active.
    pub blocked: bool,
    /// The full length of the active block, in seconds. `None` if there is no active block.
    pub backoff_seconds: Option<u64>,
    /// The time from which a blocked client may call again, in UTC: `2026-11-21 12:01:45Z`.
    pub next_allowed_at: Option<String>,
    /// The limit that bound the decision: the one with the longest wait, or with the least capacity left.
    pub bound_by: Option<String>,
    /// `ok`, `unlimited`, `parole`, `reservation`, `allow_list`, `deny_list`, `limit`, `share`, `reserved` or `penalty`.
    pub reason: Cow<'static, str>,
    /// The source of the limit that bound it: `action` or `global`.
    pub source: Option<Cow<'static, str>>,
    /// True if a limit in shadow mode would have refused the call. The other fields then describe that refusal. Omitted
    /// if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shadow: bool,
    /// The reservation that the caller has from now on. Omitted if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reservation: Option<ReservationReport>,
    /// True if the call came by a reservation. Omitted if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_reservation: bool,
    /// True if the call was refused although it presented a reservation: it isn't the caller's, was used or forfeited, is
    /// for a smaller cost, was lost with the state, or isn't due yet while another limit refuses. Omitted if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unknown_reservation: bool,
    /// The permit of a concurrency limit, if the call holds one. It must be released when the call ends. Omitted if
    /// `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permit: Option<PermitId>,
}

impl DecisionReport {
    pub(crate) fn new(plan: &Plan, decision: &Decision) -> Self {
        let bound = decision.bound_by.map(|id| plan.limit_info(id));
        Self {
            allowed: decision.allowed,
            limit: decision.limit,
            remaining: decision.remaining,
            reset_after: decision.reset_after.as_secs_ceil(),
            retry_after: decision.retry_after.map(Span::as_secs_ceil),
            blocked: decision.blocked,
            backoff_seconds: decision.backoff.map(Span::as_secs_ceil),
            next_allowed_at: decision.next_allowed_at.map(|at| UtcText::from(at).to_string()),
            bound_by: bound.map(|info| info.name().to_owned()),
            reason: decision.reason.as_str().into(),
            source: bound.map(|info| info.scope().as_str().into()),
            shadow: decision.shadow,
            reservation: ReservationReport::new(decision),
            by_reservation: decision.allowed && decision.reservation.is_some(),
            unknown_reservation: decision.is_reservation_unknown,
            permit: decision.permit.map(PermitId::new),
        }
    }
}

/// The reservation of a caller that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservationReport {
    /// The token by which the caller is admitted, once.
    pub token: String,
    /// The instant from which it is, in milliseconds since the Unix epoch, rounded up.
    pub at: u64,
    /// The time until then, in milliseconds, rounded up.
    pub wait: u64,
}

impl ReservationReport {
    pub(crate) fn new(decision: &Decision) -> Option<Self> {
        let token = ReservationToken::new(decision.reservation.filter(|_| !decision.allowed)?);
        let wait = decision.retry_after.unwrap_or_default().as_micros().div_ceil(1000);
        Some(Self { token: token.to_string(), at: token.at_millis(), wait })
    }
}

/// The id of the permits that one call holds: sixteen hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct PermitId(u64);

impl PermitId {
    /// The id for the value of a [`Decision::permit`].
    pub const fn new(holder: u64) -> Self {
        Self(holder)
    }

    /// The value of the [`Decision::permit`].
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The error for a text that is not sixteen hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a permit is sixteen hexadecimal digits, as the check that was allowed gave it")]
pub struct PermitIdError;

impl FromStr for PermitId {
    type Err = PermitIdError;
    fn from_str(text: &str) -> Result<Self, PermitIdError> {
        if text.len() != 16 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(PermitIdError);
        }
        u64::from_str_radix(text, 16).map(Self).map_err(|_| PermitIdError)
    }
}

impl TryFrom<String> for PermitId {
    type Error = PermitIdError;
    fn try_from(text: String) -> Result<Self, PermitIdError> {
        text.parse()
    }
}

impl From<PermitId> for String {
    fn from(permit: PermitId) -> Self {
        permit.to_string()
    }
}

impl fmt::Display for PermitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
