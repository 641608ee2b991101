//! The lanes, and how their bounds are written.

use core::fmt;

use crate::Span;

/// The most calls that may be let wait in one lane: 2^20.
pub const MAX_WAITING: u32 = 1 << 20;
/// The highest floor, in permille: with both lower lanes waiting, the highest still has a third.
pub const MAX_FLOOR: u16 = 333;

/// How urgent an outbound call is; the greater goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Nobody waits for it: imports, refreshes ahead of time.
    Background,
    /// Somebody waits for it.
    #[default]
    User,
    /// Another system waits for it, and not for long.
    Webhook,
}

impl Lane {
    /// Every lane, the least urgent first.
    pub const ALL: [Self; 3] = [Self::Background, Self::User, Self::Webhook];

    /// The lane's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Background => "background",
            Self::User => "user",
            Self::Webhook => "webhook",
        }
    }
}

/// The bounds of one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneSpec {
    /// How many calls may wait; further ones are refused. Default 1,024; [`MAX_WAITING`] is the most.
    pub max_waiting: u32,
    /// How many calls may be in flight. Default `u32::MAX`, which is no bound.
    pub max_in_flight: u32,
}

impl Default for LaneSpec {
    fn default() -> Self {
        Self { max_waiting: 1024, max_in_flight: u32::MAX }
    }
}

/// How the calls of one provider queue.
///
/// A provider that wants one call at a time has a `max_in_flight` of 1 and a driver that puts every call in the same
/// lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LanesSpec {
    /// The bounds of each lane, in the order of [`Lane::ALL`].
    pub lanes: [LaneSpec; 3],
    /// How many calls of all lanes may be in flight. Default `u32::MAX`, which is no bound.
    pub max_in_flight: u32,
    /// Which share of the granted cost a waiting lane gets at least, in permille. Default 100; [`MAX_FLOOR`] is the
    /// most.
    pub floor: u16,
    /// A waiting lane that had to do without for so long goes before more urgent ones that hadn't, whatever its call
    /// costs: the window of the provider's limit, so that each lane gets at least one call a window through where the
    /// limit has one for each. Default 60 s; [`Span::MAX`] leaves the lanes to their floors.
    pub window: Span,
}

impl Default for LanesSpec {
    fn default() -> Self {
        Self { lanes: [LaneSpec::default(); 3], max_in_flight: u32::MAX, floor: 100, window: Span::from_secs(60) }
    }
}

/// A lane has as many calls waiting as it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFullError {
    /// Which lane.
    pub lane: Lane,
}

impl fmt::Display for QueueFullError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the queue of the {} lane is full", self.lane.name())
    }
}

impl core::error::Error for QueueFullError {}
