//! The refusals of the store, as far as they apply to later calls.

use crate::lanes::Lane;
use crate::time::MAX_CLOCK_LAG;
use crate::{LimitId, Span, Time};

/// The calls that a refusal applies to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RefusalScope {
    /// The call's lane: a limit of the lane itself is among those that refuse. The other lanes continue.
    Lane,
    /// All calls: only limits that all lanes share refuse. The call keeps its turn.
    #[default]
    Provider,
}

/// The reason why no call can be sent before a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WaitReason {
    /// A limit has no room. From then on, it admits at most `calls` in each `every`.
    Limit {
        /// The limit.
        limit: LimitId,
        /// The number of calls, at least 1.
        calls: u64,
        /// The time in which it admits them. Zero if it is unknown.
        every: Span,
    },
    /// A calendar quota is spent.
    Quota(LimitId),
    /// All credentials are cooling down.
    Credentials,
    /// The provider's pace has no room.
    #[default]
    Pace,
}

/// A refusal of a call's turn. The default applies to no call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    /// The time of the next attempt.
    pub until: Time,
    /// The time before which no such call can be sent, unless a request under way turns out unsent. At most `until`;
    /// [`Time::ZERO`] if it is unknown.
    pub closed_until: Time,
    /// The reason.
    pub reason: WaitReason,
    /// The calls that it applies to.
    pub scope: RefusalScope,
}

impl Refusal {
    /// The same refusal for a call behind `ahead` others.
    pub(super) fn behind(self, ahead: usize) -> Self {
        let wait = match self.reason {
            WaitReason::Limit { calls, every, .. } => every.times(ahead as u64 / calls),
            WaitReason::Quota(_) | WaitReason::Credentials | WaitReason::Pace => Span::ZERO,
        };
        let is_known = self.closed_until > Time::ZERO;
        let closed_until = if is_known { self.closed_until + wait } else { Time::ZERO };
        Self { until: self.until + wait, closed_until, ..self }
    }
}

/// A refusal with its call. The default applies to no call.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RefusedCall {
    pub refusal: Refusal,
    pub refused_at: Time,
    pub lane: Lane,
    pub cost: u64,
}

impl RefusedCall {
    /// True if this refusal also applies to such a call. A more urgent call may have reserves, and a cheaper one may
    /// fit. If the clock has stepped back since the refusal, another attempt is worthwhile.
    pub(super) fn applies_to(&self, lane: Lane, cost: u64, now: Time) -> bool {
        let is_current = now < self.refusal.until && self.refused_at <= now + MAX_CLOCK_LAG;
        is_current && lane <= self.lane && cost >= self.cost
    }
}
