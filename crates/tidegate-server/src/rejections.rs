//! The number of requests that are refused before anything is decided about them, by reason.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_policy::{PathError, UncountableError};

/// The reason for a refusal with 400 (by forward-auth with its `deny_status`), or of a web page with 403 or 421.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RejectionReason {
    /// Its host isn't one.
    Host,
    /// Its path can be read in ways that match different actions, and `inbound.ambiguous_paths` is `refuse`.
    AmbiguousPath,
    /// Its path can be read in more ways than one decision can be about.
    TooManyPathReadings,
    /// It lacks a part that a limit counts by, and `missing = "refuse"`.
    MissingPart,
    /// A part that a limit counts by has too many values, or all of them together have.
    TooManyValues,
    /// It has a header that some servers take for one that a limit counts by.
    Lookalike,
    /// It calls a listener by a name that isn't the listener's.
    ForeignHost,
    /// It is a web page's.
    WebPage,
}

impl RejectionReason {
    const COUNT: usize = 8;

    /// Its name in the log.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::AmbiguousPath => "ambiguous_path",
            Self::TooManyPathReadings => "path_readings",
            Self::MissingPart => "missing_part",
            Self::TooManyValues => "values",
            Self::Lookalike => "lookalike",
            Self::ForeignHost => "foreign_host",
            Self::WebPage => "web_page",
        }
    }
}

impl From<&UncountableError> for RejectionReason {
    fn from(why: &UncountableError) -> Self {
        match why {
            UncountableError::Path(PathError::Ambiguous) => Self::AmbiguousPath,
            UncountableError::Path(PathError::TooMany) => Self::TooManyPathReadings,
            UncountableError::Missing(_) => Self::MissingPart,
            UncountableError::TooManyValues(_) | UncountableError::TooManyOperations => Self::TooManyValues,
            UncountableError::SimilarHeader(_) => Self::Lookalike,
            UncountableError::InvalidHost => Self::Host,
        }
    }
}

/// The number of requests that were refused for each reason since the start.
#[derive(Debug, Default)]
pub(crate) struct RejectionCounts([AtomicU64; RejectionReason::COUNT]);

impl RejectionCounts {
    /// Counts one more; how many there are with it.
    pub(crate) fn add(&self, why: RejectionReason) -> u64 {
        self.0[why as usize].fetch_add(1, Ordering::Relaxed) + 1
    }
}
