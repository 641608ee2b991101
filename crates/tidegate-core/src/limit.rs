//! What is allowed: a limit of some kind, what exceeding it costs, and how it takes part in a decision.

use alloc::vec::Vec;
use core::fmt;
use core::num::NonZeroU16;

use crate::{Concurrency, Cooldown, Penalty, Quota, Rate, SharedPacerRules, Span, Window};

/// The largest limit: 2^40.
pub const MAX_LIMIT: u64 = 1 << 40;
/// The largest cost of one call: 2^40.
pub const MAX_COST: u64 = 1 << 40;
/// How many limits one plan holds at most.
pub const MAX_LIMITS: usize = 4095;

/// Names a limit within its plan: 1 to 4095.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LimitId(NonZeroU16);

impl LimitId {
    /// The id of a plan's first limit.
    pub const FIRST: Self = Self(NonZeroU16::MIN);

    /// The id of the limit at `index` of the plan's list, or `None` past the 4095th.
    pub fn from_index(index: usize) -> Option<Self> {
        if index >= MAX_LIMITS {
            return None;
        }
        u16::try_from(index + 1).ok().and_then(NonZeroU16::new).map(Self)
    }

    /// Where the limit stands in its plan's list.
    pub const fn index(self) -> usize {
        self.0.get() as usize - 1
    }

    /// The id as a number, 1 to 4095.
    pub const fn get(self) -> u16 {
        self.0.get()
    }
}

/// How much of what is allowed.
#[derive(Clone, Debug)]
pub enum LimitKind {
    /// A strict trailing window.
    Window(Window),
    /// GCRA: smooth, with a burst.
    Rate(Rate),
    /// A count a calendar period.
    Quota(Quota),
    /// Calls in flight.
    Concurrency(Concurrency),
    /// Whether a credential may be used, or cools down.
    Cooldown(Cooldown),
    /// How long callers that share a pacer wait between calls. It refuses nobody.
    Pace(SharedPacerRules),
}

impl LimitKind {
    /// Whether a parole can waive a limit of this kind. A quota is somebody else's count and a permit is a thing that
    /// isn't there, so neither can be overdrawn.
    pub fn allows_parole(&self) -> bool {
        matches!(self, Self::Window(_) | Self::Rate(_))
    }

    /// Whether [`Verb::Settle`](crate::Verb::Settle) makes a difference: to a window whose moments are all kept, and to
    /// nothing else.
    pub fn settles(&self) -> bool {
        matches!(self, Self::Window(window) if window.is_exact())
    }

    /// The most that is ever free at once: the window's or quota's limit, the rate's burst, the permits. A cool-down and a
    /// pace count no costs and take any.
    pub fn capacity(&self) -> u64 {
        match self {
            Self::Window(window) => window.limit(),
            Self::Rate(rate) => rate.burst(),
            Self::Quota(quota) => quota.limit(),
            Self::Concurrency(concurrency) => concurrency.limit(),
            Self::Cooldown(_) | Self::Pace(_) => u64::MAX,
        }
    }

    /// The kind's number, from 1 to 6. It never changes: names and states that outlive a program hold it.
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

    /// True if calls are counted by calendar periods, which end at a moment that is known.
    pub fn has_periods(&self) -> bool {
        matches!(self, Self::Quota(_))
    }

    /// True if an admitted call holds a permit until it ends.
    pub fn has_permits(&self) -> bool {
        matches!(self, Self::Concurrency(_))
    }

    /// One of `nodes` equal shares: at least 1 unless the whole is 0. A pace stays whole, as each node is told of its own
    /// calls only; so does a rate that can't be made slower.
    #[must_use]
    pub fn share(&self, nodes: u64) -> Self {
        let part = |whole: u64| if whole == 0 { 0 } else { (whole / nodes).max(1) };
        let share = match self {
            Self::Window(window) => Window::new(part(window.limit()), window.window(), window.entries())
                .map(|share| Self::Window(share.with_lead(window.lead()))),
            // The same calls over a period that is longer by `nodes`, so that a slow rate isn't rounded away.
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

/// Which calls a limit counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CountMode {
    /// Only calls that every limit of the decision admits.
    #[default]
    Admitted,
    /// Also calls that another limit refuses, as long as this one has room for them. Of calls in flight only admitted
    /// ones are: a refused call isn't.
    All,
}

/// What to answer while the store that several nodes share can't be reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnOutage {
    /// Each node goes on by itself with its share of the limit.
    #[default]
    Local,
    /// Everything is let through, uncounted.
    Allow,
    /// Nothing is let through: who asks is told that the store is gone.
    Deny,
}

/// A slice of a limit that a node takes in one go and then spends without asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseSpec {
    /// How much of the limit's capacity one slice is, in thousandths: 1 to 500.
    pub permille: u16,
    /// How long a slice may be spent.
    pub max_age: Span,
}

/// How a limit is kept where several nodes share their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// What holds while the store can't be reached.
    pub on_outage: OnOutage,
    /// Whether nodes take slices. `None`: every decision asks the store.
    pub lease: Option<LeaseSpec>,
}

/// One limit of a plan: its kind, the penalty for exceeding it, its part in a decision, and how it is shared.
#[derive(Clone, Debug)]
pub struct Limit {
    kind: LimitKind,
    penalty: Option<Penalty>,
    count_mode: CountMode,
    shadow: bool,
    tag: Option<u64>,
    sharing: Sharing,
}

impl Limit {
    /// A limit without penalty that counts admitted calls and is enforced.
    pub fn new(kind: LimitKind) -> Self {
        Self {
            kind,
            penalty: None,
            count_mode: CountMode::Admitted,
            shadow: false,
            tag: None,
            sharing: Sharing::default(),
        }
    }

    /// Adds what exceeding the limit costs.
    #[must_use]
    pub fn with_penalty(mut self, penalty: Penalty) -> Self {
        self.penalty = Some(penalty);
        self
    }

    /// Chooses which calls count.
    #[must_use]
    pub fn with_count_mode(mut self, count: CountMode) -> Self {
        self.count_mode = count;
        self
    }

    /// In shadow, the limit is counted and judged but its refusal stops no call and no other limit's charge.
    #[must_use]
    pub fn with_shadow(mut self, shadow: bool) -> Self {
        self.shadow = shadow;
        self
    }

    /// The same limit but for how much of what it allows.
    #[must_use]
    pub fn with_kind(&self, kind: LimitKind) -> Self {
        Self { kind, ..self.clone() }
    }

    /// Names the limit wherever its state outlives this plan: in a file, or in a store that other nodes share, whose
    /// plans may number their limits differently. A hash of its name does. Unless said, its number in the plan.
    #[must_use]
    pub fn with_tag(mut self, tag: u64) -> Self {
        self.tag = Some(tag);
        self
    }

    /// Chooses how several nodes share it.
    #[must_use]
    pub fn with_sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    /// How several nodes share it.
    pub fn sharing(&self) -> &Sharing {
        &self.sharing
    }

    /// How much of what is allowed.
    pub fn kind(&self) -> &LimitKind {
        &self.kind
    }

    /// What exceeding the limit costs.
    pub fn penalty(&self) -> Option<&Penalty> {
        self.penalty.as_ref()
    }

    /// Which calls count.
    pub fn count_mode(&self) -> CountMode {
        self.count_mode
    }

    /// How far ahead of the present it counts what is taken, of what a batch asks for ([`Batch::with_lead`](crate::Batch::with_lead)).
    /// A window does as far as it expects; a rate only where slices are taken of it, for what is spent until a lease ends
    /// counts as spent then.
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

    /// How long a slice of it may be spent that a node takes for `max_age`; `None` if it can't be sliced.
    pub fn lease_age(&self, max_age: Span) -> Option<Span> {
        match &self.kind {
            LimitKind::Window(_) | LimitKind::Rate(_) => Some(self.lead(max_age)),
            LimitKind::Quota(_) => Some(max_age),
            LimitKind::Concurrency(_) | LimitKind::Cooldown(_) | LimitKind::Pace(_) => None,
        }
    }

    /// Whether calls that another limit refuses count too.
    pub fn counts_refused(&self) -> bool {
        self.count_mode == CountMode::All && !self.kind.has_permits()
    }

    /// Whether the limit is only watched.
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

    /// The limit of this id, if the plan has it.
    pub fn get(&self, id: LimitId) -> Option<&Limit> {
        self.0.get(id.index())
    }

    /// What a limit is called wherever its state outlives this plan ([`Limit::with_tag`]).
    pub fn tag(&self, id: LimitId) -> u64 {
        self.get(id).and_then(|limit| limit.tag).unwrap_or(u64::from(id.get()))
    }

    /// Every limit with its id.
    pub fn iter(&self) -> impl Iterator<Item = (LimitId, &Limit)> {
        self.0.iter().enumerate().filter_map(|(index, limit)| Some((LimitId::from_index(index)?, limit)))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Why a limit or penalty can't be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitError {
    /// A limit above 2^40.
    LimitTooLarge {
        /// What was asked.
        found: u64,
    },
    /// A period, lease or base of zero length.
    ZeroPeriod,
    /// A rate of 0 events: write a window of 0 to refuse everything.
    ZeroRate,
    /// A rate's burst of 0: nothing could ever pass.
    ZeroBurst,
    /// A rate whose burst takes longer than 71 years (2^51 µs) to refill.
    TooSlow,
    /// A window that keeps no entries, or more than 32,768.
    InvalidEntries {
        /// What was asked.
        found: u32,
    },
    /// More than 4,096 permits in flight.
    TooManyPermits {
        /// What was asked.
        found: u64,
    },
    /// A penalty's factor of 0.
    ZeroFactor,
    /// A penalty's cap below its base.
    CapBelowBase,
    /// More than 4095 limits in one plan.
    TooMany {
        /// How many there were.
        found: usize,
    },
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LimitTooLarge { found } => write!(f, "a limit of {found} is above the largest, {MAX_LIMIT}"),
            Self::ZeroPeriod => f.write_str("a period of no length"),
            Self::ZeroRate => f.write_str("a rate of 0; a window of 0 refuses everything"),
            Self::ZeroBurst => f.write_str("a burst of 0 would never let anything pass"),
            Self::TooSlow => f.write_str("the burst would take more than 71 years to refill"),
            Self::InvalidEntries { found } => write!(f, "a window keeps 1 to 32768 entries, not {found}"),
            Self::TooManyPermits { found } => write!(f, "{found} in flight is above the largest, 4096"),
            Self::ZeroFactor => f.write_str("a penalty's factor of 0; 1 keeps blocks at their base"),
            Self::CapBelowBase => f.write_str("the penalty's cap is below its base"),
            Self::TooMany { found } => write!(f, "{found} limits in one plan; at most {MAX_LIMITS}"),
        }
    }
}

impl core::error::Error for LimitError {}

pub(crate) fn checked_limit(limit: u64) -> Result<u64, LimitError> {
    if limit > MAX_LIMIT { Err(LimitError::LimitTooLarge { found: limit }) } else { Ok(limit) }
}
