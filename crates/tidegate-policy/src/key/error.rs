//! Reasons for which a call has no key.

use super::values::MAX_VALUES;
use crate::matched_actions::PathError;

/// A call lacks something that a limit counts by, or has it wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// A part is missing.
    #[error(transparent)]
    Missing(#[from] MissingPartError),
    /// The platform is none of [`PLATFORMS`](super::PLATFORMS).
    #[error(transparent)]
    Platform(#[from] UnknownPlatformError),
    /// The request is such that it can't be counted.
    #[error(transparent)]
    Uncountable(#[from] UncountableError),
}

/// A request that can't be counted as the policy asks. That is its client's doing; servers answer 400.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UncountableError {
    /// A part is missing, and `missing = "refuse"`.
    #[error("`{0}` is missing")]
    Missing(String),
    /// A part has more distinct values than are counted.
    #[error("`{0}` has more than {MAX_VALUES} different values")]
    TooManyValues(String),
    /// A header is there that some servers take for one that limits count by: `X_Api_Key` for `X-Api-Key`.
    #[error("`header:{0}` differs from a header that limits count by in nothing but an underscore")]
    SimilarHeader(String),
    /// It can't be said what a call with this path meets.
    #[error(transparent)]
    Path(#[from] PathError),
    /// Its host is no name or address with at most a port, or it names two.
    #[error("the host is no name or address with at most a port, or there is more than one")]
    InvalidHost,
    /// Together, the parts have more values than one decision asks limits.
    #[error("there are more values to count by than one decision can ask about")]
    TooManyOperations,
}

impl UncountableError {
    /// The part, if it is one: `path`, `header:NAME`, `cookie:NAME` …
    pub fn part(&self) -> Option<&str> {
        match self {
            Self::Missing(part) | Self::TooManyValues(part) => Some(part),
            Self::Path(_) => Some("path"),
            Self::InvalidHost => Some("host"),
            Self::SimilarHeader(_) | Self::TooManyOperations => None,
        }
    }
}

impl From<PathError> for KeyError {
    fn from(error: PathError) -> Self {
        Self::Uncountable(error.into())
    }
}

/// A call lacks something that a limit counts by.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{part}` is missing: the limit `{limit}` counts by it")]
pub struct MissingPartError {
    /// The field of an API query that would fill it: `ip`, `key`, `platform`, `header:NAME` …
    pub part: String,
    /// The limit that needs it.
    pub limit: String,
}

/// A call's platform is none of [`PLATFORMS`](super::PLATFORMS).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown platform {found:?}: expected web, mobile, api or admin")]
pub struct UnknownPlatformError {
    /// The platform of the call, cut to 64 characters.
    pub found: String,
}
