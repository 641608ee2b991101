//! The parts of a plan: actions, limits with their names, and the operations of a call.

use tidegate_core::LimitId;

use crate::matcher::Matcher;
use crate::quantity::Quantity;

/// The id of an action within its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ActionId(pub(crate) u16);

impl ActionId {
    pub(crate) fn from_index(index: usize) -> Self {
        Self(u16::try_from(index).expect("invariant: reading the policy bounds the number of actions"))
    }

    /// The index of the action in the file, from 0.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// The scope of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitScope {
    /// The calls of one action.
    Action,
    /// `inbound.global`: the calls of all actions.
    Global,
}

impl LimitScope {
    /// `action` or `global`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Action => "action",
            Self::Global => "global",
        }
    }
}

/// The `RateLimit-Policy` item of a limit (draft-ietf-httpapi-ratelimit-headers-10).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimitPolicyItem {
    /// The item's name: the limit's, printable ASCII without quotes or backslashes.
    pub name: String,
    /// `q`: the number in each window.
    pub quota: u64,
    /// `w`: the window in whole seconds, rounded up; `None` for months, years and calls in flight.
    pub window: Option<u64>,
    /// `qu`: `Some("concurrent-requests")` for calls in flight, else `None`, which means requests.
    pub unit: Option<&'static str>,
}

/// The name, quantity and description of a limit.
#[derive(Clone, Debug)]
pub struct LimitInfo {
    pub(crate) name: String,
    pub(crate) action: Option<ActionId>,
    pub(crate) quantity: Quantity,
    pub(crate) description: String,
    pub(crate) rate_limit_policy: RateLimitPolicyItem,
    pub(crate) key_template_index: u16,
    pub(crate) is_concurrency: bool,
    pub(crate) place: LimitPlace,
}

/// The place of a limit in its section.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LimitPlace {
    /// The index of its group: of the item of `limits`, or 0 for `limit`. That of `ipv6_network` follows.
    pub(crate) group: usize,
    /// The index of its quantity in the group.
    pub(crate) quantity: usize,
}

impl LimitInfo {
    /// The name in decisions and headers: the action's (`login`) or `global`. If there are several limits,
    /// `login.NAME` for named ones and `login.1`, `login.2` … for the others.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The scope: one action or all.
    pub fn scope(&self) -> LimitScope {
        if self.action.is_some() { LimitScope::Action } else { LimitScope::Global }
    }

    /// The action it belongs to; `None` for a global one.
    pub fn action(&self) -> Option<ActionId> {
        self.action
    }

    /// The quantity as written.
    pub fn quantity(&self) -> &Quantity {
        &self.quantity
    }

    /// The limit in words with its true bound: "at most 5 in any 60 s; over that, blocked for 10 min".
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The item for a `RateLimit-Policy` header.
    pub fn rate_limit_policy(&self) -> &RateLimitPolicyItem {
        &self.rate_limit_policy
    }
}

/// One action of the plan.
#[derive(Clone, Debug)]
pub struct Action {
    pub(crate) name: String,
    pub(crate) matcher: Option<Matcher>,
    pub(crate) cost: u64,
    pub(crate) shadow: bool,
    pub(crate) limits: Vec<LimitId>,
    pub(crate) has_concurrency: bool,
    pub(crate) op_template: OpTemplate,
}

impl Action {
    /// Its name in the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The requests that it matches; `None` if only the decision API reaches it.
    pub fn matcher(&self) -> Option<&Matcher> {
        self.matcher.as_ref()
    }

    /// The cost of a call that doesn't state its own.
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// True if it only observes: `mode = "shadow"`.
    pub fn is_shadow(&self) -> bool {
        self.shadow
    }

    /// Its own limits, without the global ones.
    pub fn limits(&self) -> &[LimitId] {
        &self.limits
    }

    /// True if it is `unlimited`, without a limit of its own.
    pub fn is_unlimited(&self) -> bool {
        self.limits.is_empty()
    }

    /// True if one of its own limits counts calls in flight. Forward-auth can't give permits back, so it must not
    /// serve such an action; see also [`Plan::requests_meet_concurrency`](crate::Plan::requests_meet_concurrency).
    pub fn has_concurrency(&self) -> bool {
        self.has_concurrency
    }
}

/// The operations of a call without the keys: the limits, and the template of each one's key.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpTemplate {
    pub(crate) steps: Vec<OpStep>,
    /// The key templates in use, each of which is hashed once.
    pub(crate) key_templates: Vec<u16>,
    /// The template of the part that all keys have in common, if a store needs that.
    pub(crate) affinity: Option<u16>,
    /// The template that tells callers apart, if a limit has reservations.
    pub(crate) caller: Option<u16>,
    /// True if a key has a header, a cookie or a parameter.
    pub(crate) reads_texts: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct OpStep {
    pub(crate) limit: LimitId,
    /// An index into [`OpTemplate::key_templates`].
    pub(crate) key_template_index: u8,
    pub(crate) is_concurrency: bool,
    pub(crate) is_global: bool,
}
