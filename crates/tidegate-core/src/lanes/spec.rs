//! The lanes and their settings.

use thiserror::Error;

use crate::Span;

/// The maximum number of calls that may wait in one lane: 2^20.
pub const MAX_WAITING: u32 = 1 << 20;
/// The highest floor, in permille. With both lower lanes waiting, the highest lane still has a third.
pub const MAX_FLOOR: u16 = 333;

/// The urgency of an outbound call. Greater values go first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// No user waits for it: imports, refreshes ahead of time.
    Background,
    /// A user waits for it.
    #[default]
    User,
    /// Another system waits for it, but only for a short time.
    Webhook,
}

impl Lane {
    /// All lanes, the least urgent first.
    pub const ALL: [Self; 3] = [Self::Background, Self::User, Self::Webhook];

    /// The lane's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Background => "background",
            Self::User => "user",
            Self::Webhook => "webhook",
        }
    }

    /// A place in this lane for the calls of a scope: a part of the provider's API that may be closed on its own. The
    /// scope is a key of the caller's choice, for example a hash of its name; 0 means none.
    pub const fn with_scope(self, scope: u64) -> ScopedLane {
        ScopedLane { lane: self, scope }
    }
}

/// A lane, and the scope of a call in it. A lane alone is that of a call without a scope.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScopedLane {
    /// The lane.
    pub lane: Lane,
    /// The key of the scope. 0 means none.
    pub scope: u64,
}

impl From<Lane> for ScopedLane {
    fn from(lane: Lane) -> Self {
        lane.with_scope(0)
    }
}

/// The limits of one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneSpec {
    /// The maximum number of waiting calls. Default 1,024, at most [`MAX_WAITING`].
    pub max_waiting: u32,
    /// True if a call in the full lane gives its place to a new one ([`Lanes::make_room`](super::Lanes::make_room)). Default
    /// false: the new one is refused.
    pub displaces: bool,
    /// The maximum number of calls in flight. Default `u32::MAX`, which means no limit.
    pub max_in_flight: u32,
}

impl Default for LaneSpec {
    fn default() -> Self {
        Self { max_waiting: 1024, displaces: false, max_in_flight: u32::MAX }
    }
}

/// The queue settings of one provider.
///
/// For a provider that accepts one call at a time, set `max_in_flight` to 1 and put every call in the same lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LanesSpec {
    /// The limits of each lane, in the order of [`Lane::ALL`].
    pub lanes: [LaneSpec; 3],
    /// The maximum number of calls of all lanes in flight. Default `u32::MAX`, which means no limit.
    pub max_in_flight: u32,
    /// The minimum share of the granted cost of a waiting lane, in permille. Default 100, at most [`MAX_FLOOR`].
    pub floor: u16,
    /// A lane that has waited this long without a grant goes before more urgent lanes that haven't, whatever its call
    /// costs. Use the window of the provider's limit: if the limit has room for one call of each lane, each gets at
    /// least one per window. Default 60 s. With [`Span::MAX`], only the floors protect the lanes.
    pub window: Span,
}

impl Default for LanesSpec {
    fn default() -> Self {
        Self { lanes: [LaneSpec::default(); 3], max_in_flight: u32::MAX, floor: 100, window: Span::from_secs(60) }
    }
}

/// The error of a call that finds no place in a full lane, or loses it to a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the queue of the {} lane is full", lane.name())]
pub struct QueueFullError {
    /// The full lane.
    pub lane: Lane,
}
