//! The fixed rules for calls to one provider.

use alloc::boxed::Box;

use crate::lanes::LanesSpec;
use crate::retry::Retry;
use crate::{BudgetSpec, Key, Lane, LimitId, MAX_OPS, Span};

/// The longest lead: the time between the start of a call and the time at which windows count it.
pub const MAX_LEAD: Span = Span::from_secs(60);

/// The part of a call that a limit counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measure {
    /// The call: 1, whatever it costs.
    #[default]
    Calls,
    /// Its cost in units of the provider, such as tokens of a language model or points of a query.
    Cost,
}

/// A limit of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderLimit {
    /// The limit.
    pub limit: LimitId,
    /// The part of a call that it counts.
    pub measure: Measure,
    /// True if each scope has its own count. Calls whose scope is unknown aren't counted.
    pub by_scope: bool,
    /// True if it is told when a call that it counted ahead ends, as its kind [`settles`](crate::LimitKind::settles).
    pub settles: bool,
}

/// The rules for the calls of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneRules {
    /// The timeout of a call that doesn't set its own.
    pub timeout: Span,
    /// The retry policy.
    pub retry: Retry,
}

/// The rules for calls to one provider: everything that doesn't change while they run.
///
/// A call's limits, its lane's, its credential's and the cool-down must fit into one batch
/// ([`MAX_OPS`](crate::MAX_OPS)).
#[derive(Clone, Debug, PartialEq)]
pub struct CallRules {
    /// The limits of all its calls.
    pub provider_limits: Box<[ProviderLimit]>,
    /// The additional limits of each lane, in the order of [`Lane::ALL`](crate::Lane::ALL).
    pub lane_limits: [Box<[ProviderLimit]>; 3],
    /// The limits of each credential.
    pub credential_limits: Box<[ProviderLimit]>,
    /// The maximum number of calls in flight with each credential. Default `u32::MAX`, which means no limit.
    pub max_in_flight_per_credential: u32,
    /// The cool-down of each credential.
    pub cooldown: LimitId,
    /// The key of the provider's limits.
    pub key: Key,
    /// The keys of each credential's limits and cool-down. A provider without credentials has one anonymous credential.
    pub credential_keys: Box<[Key]>,
    /// True if credentials come from a login that can be repeated.
    pub can_renew_login: bool,
    /// True if calls respect the remaining amounts that replies report
    /// ([`Verdict::remaining`](crate::Verdict::remaining)). A credential's first call is then sent alone.
    pub tracks_remaining: bool,
    /// The longest time that a request needs to reach the provider. Windows count a call that much after its start,
    /// until its reply tells more. Doubled by a throttled reply, up to [`MAX_LEAD`]. Default 500 ms.
    pub lead: Span,
    /// The extra wait under a rate, because transit times differ. The delay of the last reply compared with the fastest
    /// one is added, up to nine times this value.
    pub jitter: Span,
    /// The queue settings.
    pub lanes: LanesSpec,
    /// The rules of each lane, in the order of [`Lane::ALL`](crate::Lane::ALL).
    pub lane_rules: [LaneRules; 3],
    /// The retry budget.
    pub budget: BudgetSpec,
}

impl CallRules {
    /// The hash of the part that the keys of all batches of the provider share ([`Batch::set_affinity`](crate::Batch)).
    pub fn affinity(&self) -> u64 {
        self.key.lo().max(1)
    }

    /// The key of the cool-down of a scope with this credential.
    pub fn scope_key(&self, credential: usize, scope: u64) -> Key {
        scoped(self.credential_keys[credential], scope)
    }

    /// True if a call of this lane that has a scope fits into one batch. Otherwise calls have none.
    pub(super) fn has_room_for_scope(&self, lane: Lane) -> bool {
        let limits = self.provider_limits.len() + self.credential_limits.len() + self.lane_limits[lane as usize].len();
        limits + 2 <= MAX_OPS
    }

    /// The key of the limits of a scope that all credentials share.
    pub(super) fn shared_scope_key(&self, scope: u64) -> Key {
        scoped(self.key, scope)
    }

    /// The limits of a call of this lane with this credential, with their keys.
    pub(super) fn limits_with_keys(
        &self,
        lane: Lane,
        credential: usize,
        scope: u64,
    ) -> impl Iterator<Item = (&ProviderLimit, Key)> {
        let credential_key = self.credential_keys[credential];
        let credential_limits = self.credential_limits.iter().map(move |limit| (limit, credential_key));
        let shared_limits = self.provider_limits.iter().chain(&self.lane_limits[lane as usize]);
        let limits = credential_limits.chain(shared_limits.map(|limit| (limit, self.key)));
        let with_scope = move |(limit, key): (_, _)| -> Option<(&ProviderLimit, Key)> {
            let limit: &ProviderLimit = limit;
            if !limit.by_scope { Some((limit, key)) } else { (scope != 0).then(|| (limit, scoped(key, scope))) }
        };
        limits.filter_map(with_scope)
    }

    /// The measure of a limit, if it is one of the provider's.
    pub(super) fn measure(&self, limit: LimitId) -> Option<Measure> {
        let lane_limits = self.lane_limits.iter().flatten();
        let mut all_limits = self.provider_limits.iter().chain(lane_limits).chain(&self.credential_limits);
        all_limits.find(|provider_limit| provider_limit.limit == limit).map(|provider_limit| provider_limit.measure)
    }
}

/// The key of a scope below another key. The key of a scope is a hash, so its bits are as good as those of a key.
fn scoped(key: Key, scope: u64) -> Key {
    Key::new(key.hi() ^ scope, key.lo() ^ scope.rotate_left(32))
}
