//! What is laid down for calls to one provider.

use alloc::boxed::Box;

use crate::lanes::LanesSpec;
use crate::retry::Retry;
use crate::{BudgetSpec, Key, LimitId, Span};

/// The longest that a call is counted ahead of its reply.
pub const MAX_LEAD: Span = Span::from_secs(60);

/// What a limit counts of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measure {
    /// The call: 1, whatever it costs.
    #[default]
    Calls,
    /// What it costs, in the provider's units: tokens of a language model, points of a query.
    Cost,
}

/// A limit of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderLimit {
    /// Which.
    pub limit: LimitId,
    /// What it counts.
    pub measure: Measure,
    /// Whether it is told when a call ends that it has counted ahead, as its kind [`settles`](crate::LimitKind::settles).
    pub settles: bool,
}

/// What a lane grants its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneRules {
    /// How long a call may take that doesn't say so itself.
    pub timeout: Span,
    /// When it is tried again.
    pub retry: Retry,
}

/// The rules for calls to one provider: all that doesn't change while they run.
///
/// Together, the limits of a call, its lane's, its credential's and the cool-down must fit into one batch
/// ([`MAX_OPS`](crate::MAX_OPS)).
#[derive(Clone, Debug)]
pub struct CallRules {
    /// The limits of all its calls.
    pub provider_limits: Box<[ProviderLimit]>,
    /// The limits of a lane's own, in the order of [`Lane::ALL`](crate::Lane::ALL).
    pub lane_limits: [Box<[ProviderLimit]>; 3],
    /// The limits of each credential.
    pub credential_limits: Box<[ProviderLimit]>,
    /// How many calls each credential may have in flight. Default `u32::MAX`, which is no bound.
    pub max_in_flight_per_credential: u32,
    /// The cool-down of each credential.
    pub cooldown: LimitId,
    /// What the provider's limits count by.
    pub key: Key,
    /// What each credential's limits and its cool-down count by. A provider without credentials has one, anonymous.
    pub credential_keys: Box<[Key]>,
    /// Whether credentials are named by a login that can be repeated.
    pub can_renew_login: bool,
    /// Whether calls keep to what replies say is left of each credential's limits
    /// ([`AttemptReport::remaining`](super::AttemptReport::remaining)). The first of a credential goes alone then.
    pub tracks_remaining: bool,
    /// How far ahead of its start a call is counted by windows, until its reply tells better: the longest that a
    /// request is under way to the provider. Doubled by each throttled reply, up to [`MAX_LEAD`]. Default 500 ms.
    pub lead: Span,
    /// What is added to the wait for a rate, so that calls arrive no closer than they may although some take longer on
    /// their way than others. What the last reply took longer than the quickest is added to it, up to nine times as much
    /// again.
    pub jitter: Span,
    /// How calls queue.
    pub lanes: LanesSpec,
    /// What each lane grants, in the order of [`Lane::ALL`](crate::Lane::ALL).
    pub lane_rules: [LaneRules; 3],
    /// How many retries there may be.
    pub budget: BudgetSpec,
}

impl CallRules {
    /// What a limit counts, if it is one of the provider's.
    pub(super) fn measure(&self, limit: LimitId) -> Option<Measure> {
        let lane_limits = self.lane_limits.iter().flatten();
        let mut all_limits = self.provider_limits.iter().chain(lane_limits).chain(&self.credential_limits);
        all_limits.find(|ceiling| ceiling.limit == limit).map(|ceiling| ceiling.measure)
    }
}
