//! A limit of one kind, its penalty, and its part in a decision.

use alloc::vec::Vec;
use core::num::NonZeroU16;

use thiserror::Error;

use crate::{Concurrency, Cooldown, Penalty, Quota, Rate, ReservationRules, SharedPacerRules, Span, Window};

/// The largest limit: 2^40.
pub const MAX_LIMIT: u64 = 1 << 40;
/// The largest cost of one call: 2^40.
pub const MAX_COST: u64 = 1 << 40;
/// The maximum number of limits in one plan.
pub const MAX_LIMITS: usize = 4095;

/// Identifies a limit within its plan: 1 to 4095.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LimitId(NonZeroU16);

impl LimitId {
    /// The id of a plan's first limit.
    pub const FIRST: Self = Self(NonZeroU16::MIN);

    /// The id of the limit at `index` of the plan's list. `None` if `index` is 4095 or more.
    pub fn from_index(index: usize) -> Option<Self> {
        let number = u16::try_from(index).ok().filter(|_| index < MAX_LIMITS)? + 1;
        NonZeroU16::new(number).map(Self)
    }

    /// The index of the limit in its plan's list.
    pub const fn index(self) -> usize {
        self.0.get() as usize - 1
    }

    /// The id as a number, 1 to 4095.
    pub const fn get(self) -> u16 {
        self.0.get()
    }
}

/// The kind of a limit, with its amounts.
#[derive(Clone, Debug)]
pub enum LimitKind {
    /// A strict trailing window.
    Window(Window),
    /// GCRA: smooth, with a burst.
    Rate(Rate),
    /// A count per calendar period.
    Quota(Quota),
    /// A number of calls in flight.
    Concurrency(Concurrency),
    /// The cool-down of a credential.
    Cooldown(Cooldown),
    /// The wait between the calls of all callers that share a pacer. It refuses no call.
    Pace(SharedPacerRules),
}

impl LimitKind {
    /// True if a parole can exceed a limit of this kind: not a quota, which another service counts, and not permits.
    pub fn allows_parole(&self) -> bool {
        matches!(self, Self::Window(_) | Self::Rate(_))
    }

    /// True if [`Verb::Settle`](crate::Verb::Settle) has an effect: for a window that keeps the time of every call.
    pub fn settles(&self) -> bool {
        matches!(self, Self::Window(window) if window.is_exact())
    }

    /// The largest amount that can be free at once: the limit or burst. `u64::MAX` for a cool-down or a pace.
    pub fn capacity(&self) -> u64 {
        match self {
            Self::Window(window) => window.limit(),
            Self::Rate(rate) => rate.burst(),
            Self::Quota(quota) => quota.limit(),
            Self::Concurrency(concurrency) => concurrency.limit(),
            Self::Cooldown(_) | Self::Pace(_) => u64::MAX,
        }
    }

    /// The kind's number, from 1 to 6. It never changes, because persisted names and states contain it.
    pub fn id(&self) -> u8 {
        match self {
            Self::Window(_) => 1,
            Self::Rate(_) => 2,
            Self::Quota(_) => 3,
            Self::Concurrency(_) => 4,
            Self::Cooldown(_) => 5,
            Self::Pace(_) => 6,
        }
    }

    /// True if calls are counted in calendar periods, which have a known end.
    pub fn has_periods(&self) -> bool {
        matches!(self, Self::Quota(_))
    }

    /// True if an admitted call holds a permit until it ends.
    pub fn has_permits(&self) -> bool {
        matches!(self, Self::Concurrency(_))
    }

    /// One of `nodes` equal shares, at least 1 unless the whole is 0. A pace, of which each node reports only its own
    /// calls, and a rate that can't be made slower stay whole.
    #[must_use]
    pub fn share(&self, nodes: u64) -> Self {
        let part = |whole: u64| if whole == 0 { 0 } else { (whole / nodes).max(1) };
        let share = match self {
            Self::Window(window) => Window::new(part(window.limit()), window.window(), window.entries())
                .map(|share| Self::Window(share.with_lead(window.lead()))),
            // The same count per a period that is `nodes` times as long, so that a slow rate isn't rounded to 0.
            Self::Rate(rate) => Rate::new(rate.count(), rate.per().times(nodes), part(rate.burst())).map(Self::Rate),
            Self::Quota(quota) => quota.with_limit(part(quota.limit())).map(Self::Quota),
            Self::Concurrency(concurrency) => {
                Concurrency::new(part(concurrency.limit()), concurrency.lease()).map(Self::Concurrency)
            }
            Self::Cooldown(_) | Self::Pace(_) => return self.clone(),
        };
        share.unwrap_or_else(|_| self.clone())
    }
}

/// The calls that a limit counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CountMode {
    /// Only calls that every limit of the decision admits.
    #[default]
    Admitted,
    /// Also calls that another limit refuses, if this one has room for them. Calls that this limit itself refuses never
    /// count. A limit of calls in flight counts only admitted ones.
    All,
}

/// The answer while the store that several nodes share can't be reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnOutage {
    /// Each node continues alone with its share of the limit.
    #[default]
    Local,
    /// Every call is allowed, without counting.
    Allow,
    /// Every call is refused. The refusal says that the store can't be reached.
    Deny,
}

/// A slice of a limit that a node takes at once and then spends without asking the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseSpec {
    /// The size of one slice in thousandths of the limit's capacity: 1 to 500.
    pub permille: u16,
    /// The time for which a slice may be spent.
    pub max_age: Span,
}

/// The settings of a limit for several nodes with shared state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// The behaviour while the store can't be reached.
    pub on_outage: OnOutage,
    /// The slices that nodes take. `None` if every decision asks the store.
    pub lease: Option<LeaseSpec>,
}

/// One limit of a plan: its kind, its penalty, its part in a decision, and its sharing.
#[derive(Clone, Debug)]
pub struct Limit {
    kind: LimitKind,
    penalty: Option<Penalty>,
    count_mode: CountMode,
    shadow: bool,
    tag: Option<u64>,
    sharing: Sharing,
    reservations: Option<ReservationRules>,
}

impl Limit {
    /// Creates a limit without penalty that counts admitted calls and is enforced.
    pub fn new(kind: LimitKind) -> Self {
        Self {
            kind,
            penalty: None,
            count_mode: CountMode::Admitted,
            shadow: false,
            tag: None,
            sharing: Sharing::default(),
            reservations: None,
        }
    }

    /// Sets the penalty for exceeding the limit.
    #[must_use]
    pub fn with_penalty(mut self, penalty: Penalty) -> Self {
        self.penalty = Some(penalty);
        self
    }

    /// Sets which calls count.
    #[must_use]
    pub fn with_count_mode(mut self, count: CountMode) -> Self {
        self.count_mode = count;
        self
    }

    /// Sets the shadow mode: the limit counts and decides, but its refusal affects no call and no other limit.
    #[must_use]
    pub fn with_shadow(mut self, shadow: bool) -> Self {
        self.shadow = shadow;
        self
    }

    /// Returns the same limit with another kind or other amounts.
    #[must_use]
    pub fn with_kind(&self, kind: LimitKind) -> Self {
        Self { kind, ..self.clone() }
    }

    /// Sets the name of the limit where its state outlives this plan: in a file, or in a store shared by nodes with
    /// other numbers for their limits. A hash of the limit's name is suitable. Default: its number in the plan.
    #[must_use]
    pub fn with_tag(mut self, tag: u64) -> Self {
        self.tag = Some(tag);
        self
    }

    /// Sets how several nodes share it.
    #[must_use]
    pub fn with_sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    /// Sets how refused callers get reservations of their own. Only windows, rates and quotas without a penalty do that.
    #[must_use]
    pub fn with_reservations(mut self, rules: ReservationRules) -> Self {
        let is_countable = matches!(self.kind, LimitKind::Window(_) | LimitKind::Rate(_) | LimitKind::Quota(_));
        self.reservations = Some(rules).filter(|_| is_countable && self.penalty.is_none());
        self
    }

    /// The same limit, whose refused callers get no reservations of their own.
    #[must_use]
    pub fn without_reservations(&self) -> Self {
        Self { reservations: None, ..self.clone() }
    }

    /// The rules by which refused callers get reservations of their own. `None` if they get none.
    #[inline]
    pub fn reservations(&self) -> Option<&ReservationRules> {
        self.reservations.as_ref()
    }

    /// The settings for several nodes.
    pub fn sharing(&self) -> &Sharing {
        &self.sharing
    }

    /// The kind of the limit, with its amounts.
    pub fn kind(&self) -> &LimitKind {
        &self.kind
    }

    /// The penalty for exceeding the limit. `None` if there is none.
    pub fn penalty(&self) -> Option<&Penalty> {
        self.penalty.as_ref()
    }

    /// The calls that count.
    pub fn count_mode(&self) -> CountMode {
        self.count_mode
    }

    /// The time ahead of now at which the limit counts takes, if a batch asks for `requested`
    /// ([`Batch::with_lead`](crate::Batch::with_lead)): for a window up to its own lead, for a rate up to the age of
    /// its slices, whose cost counts as spent at the end of the lease. Other kinds: zero.
    pub fn lead(&self, requested: Span) -> Span {
        match &self.kind {
            LimitKind::Window(window) => requested.min(window.lead()),
            LimitKind::Rate(rate) => {
                let most = self.sharing.lease.map_or(Span::ZERO, |lease| lease.max_age.min(rate.refill_time()));
                requested.min(most)
            }
            LimitKind::Quota(_) | LimitKind::Concurrency(_) | LimitKind::Cooldown(_) | LimitKind::Pace(_) => Span::ZERO,
        }
    }

    /// The time for which a node may spend a slice taken for `max_age`. `None` if the limit can't be sliced.
    pub fn lease_age(&self, max_age: Span) -> Option<Span> {
        match &self.kind {
            LimitKind::Window(_) | LimitKind::Rate(_) => Some(self.lead(max_age)),
            LimitKind::Quota(_) => Some(max_age),
            LimitKind::Concurrency(_) | LimitKind::Cooldown(_) | LimitKind::Pace(_) => None,
        }
    }

    /// True if calls that another limit refuses count too.
    pub fn counts_refused(&self) -> bool {
        self.count_mode == CountMode::All && !self.kind.has_permits()
    }

    /// True if the limit is in shadow mode.
    pub fn is_shadow(&self) -> bool {
        self.shadow
    }
}

/// The limits of a plan, found by [`LimitId`].
#[derive(Clone, Debug, Default)]
pub struct Limits(Vec<Limit>);

impl Limits {
    /// Numbers the limits from 1 in their order.
    ///
    /// # Errors
    /// [`LimitError::TooMany`] past 4095.
    pub fn new(limits: Vec<Limit>) -> Result<Self, LimitError> {
        if limits.len() > MAX_LIMITS { Err(LimitError::TooMany { found: limits.len() }) } else { Ok(Self(limits)) }
    }

    /// A plan of one limit, [`LimitId::FIRST`].
    pub fn with_limit(limit: Limit) -> Self {
        Self(alloc::vec![limit])
    }

    /// The limit with this id. `None` if the plan doesn't have it.
    pub fn get(&self, id: LimitId) -> Option<&Limit> {
        self.0.get(id.index())
    }

    /// The name of a limit where its state outlives this plan ([`Limit::with_tag`]).
    pub fn tag(&self, id: LimitId) -> u64 {
        self.get(id).and_then(|limit| limit.tag).unwrap_or(u64::from(id.get()))
    }

    /// All limits with their ids.
    pub fn iter(&self) -> impl Iterator<Item = (LimitId, &Limit)> {
        self.0.iter().enumerate().filter_map(|(index, limit)| Some((LimitId::from_index(index)?, limit)))
    }

    /// The number of limits.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if there are no limits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The reason why a limit or penalty can't be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LimitError {
    /// A limit above 2^40.
    #[error("a limit of {found} is above the largest, {MAX_LIMIT}")]
    LimitTooLarge {
        /// The requested limit.
        found: u64,
    },
    /// A period, lease or base is zero.
    #[error("a period of no length")]
    ZeroPeriod,
    /// A rate is 0. To refuse everything, use a window of 0.
    #[error("a rate of 0; a window of 0 refuses everything")]
    ZeroRate,
    /// A rate's burst is 0: no call could ever pass.
    #[error("a burst of 0 would never let anything pass")]
    ZeroBurst,
    /// The burst of a rate takes longer than 71 years (2^51 µs) to refill.
    #[error("the burst would take more than 71 years to refill")]
    TooSlow,
    /// A window keeps no entries, or more than 32,768.
    #[error("a window keeps 1 to 32768 entries, not {found}")]
    InvalidEntries {
        /// The requested number of entries.
        found: u32,
    },
    /// More than 4,096 permits in flight.
    #[error("{found} in flight is above the largest, 4096")]
    TooManyPermits {
        /// The requested number of permits.
        found: u64,
    },
    /// A penalty's factor is 0.
    #[error("a penalty's factor of 0; 1 keeps blocks at their base")]
    ZeroFactor,
    /// A penalty's cap is below its base.
    #[error("the penalty's cap is below its base")]
    CapBelowBase,
    /// More than 4095 limits in one plan.
    #[error("{found} limits in one plan; at most {MAX_LIMITS}")]
    TooMany {
        /// The number of limits.
        found: usize,
    },
}

pub(crate) fn checked_limit(limit: u64) -> Result<u64, LimitError> {
    if limit > MAX_LIMIT { Err(LimitError::LimitTooLarge { found: limit }) } else { Ok(limit) }
}
