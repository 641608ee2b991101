//! The errors of calls that have no key.

use super::values::MAX_VALUES;
use crate::matched_actions::{MAX_KEY_BYTES, PathError};

/// A call lacks something that a limit counts by, or has an invalid value for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// A part is missing.
    #[error(transparent)]
    Missing(#[from] MissingPartError),
    /// The platform isn't one of [`PLATFORMS`](super::PLATFORMS).
    #[error(transparent)]
    Platform(#[from] UnknownPlatformError),
    /// The request can't be counted.
    #[error(transparent)]
    Uncountable(#[from] UncountableError),
}

/// A request that can't be counted as the policy requires. Its client caused that; servers answer 400.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UncountableError {
    /// A part is missing, and `missing = "refuse"`.
    #[error("`{0}` is missing")]
    Missing(String),
    /// A part has more than four distinct values.
    #[error("`{0}` has more than {MAX_VALUES} different values")]
    TooManyValues(String),
    /// The request has a header that some servers take for one that limits count by: `X_Api_Key` for `X-Api-Key`.
    #[error("`header:{0}` differs from a header that limits count by in nothing but its signs")]
    SimilarHeader(String),
    /// The request's `Content-Type` names a charset other than UTF-8, by which some servers decode the query, too.
    #[error(
        "`{0}` can't be read: `content-type` names another charset than UTF-8, and some servers decode the query by it"
    )]
    Charset(String),
    /// The actions of a call with this path can't be determined.
    #[error(transparent)]
    Path(#[from] PathError),
    /// The host isn't a name or an address with at most a port, or there are two hosts.
    #[error("the host is no name or address with at most a port, or there is more than one")]
    InvalidHost,
    /// Together, the parts are longer than 16 KiB.
    #[error("the parts to count by are longer than {} KiB together", MAX_KEY_BYTES >> 10)]
    TooLong,
    /// Together, the parts have more values than one decision can check.
    #[error("there are more values to count by than one decision can ask about")]
    TooManyOperations,
}

impl UncountableError {
    /// The part that the error is about, if it is one: `path`, `header:NAME`, `cookie:NAME` …
    pub fn part(&self) -> Option<&str> {
        match self {
            Self::Missing(part) | Self::TooManyValues(part) | Self::Charset(part) => Some(part),
            Self::Path(_) => Some("path"),
            Self::InvalidHost => Some("host"),
            Self::SimilarHeader(_) | Self::TooLong | Self::TooManyOperations => None,
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
    /// The part's field in an API query: `ip`, `key`, `platform`, `header:NAME` …
    pub part: String,
    /// The limit that counts by it.
    pub limit: String,
}

/// A call's platform isn't one of [`PLATFORMS`](super::PLATFORMS).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown platform {found:?}: expected web, mobile, api or admin")]
pub struct UnknownPlatformError {
    /// The platform of the call, cut to 64 characters.
    pub found: String,
}
