//! The reasons for which requests are rejected before any decision.

use tidegate_policy::{PathError, UncountableError};

/// The reason for a rejection with 400 (by forward-auth with its `deny_status`), of a web page with 403 or 421,
/// or of a caller of the admin listener with 401 or 403.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RejectionReason {
    /// The host is invalid.
    Host,
    /// The path can be read in ways that match different actions, and `inbound.ambiguous_paths` is `refuse`.
    AmbiguousPath,
    /// The path can be read in more ways than one decision can cover.
    TooManyPathReadings,
    /// The request lacks a part that a limit counts by, and `missing = "refuse"`.
    MissingPart,
    /// A part that a limit counts by has too many values, or all parts together have.
    TooManyValues,
    /// The request has a header that some servers confuse with one that a limit counts by.
    Lookalike,
    /// The request names a host that isn't the listener's.
    ForeignHost,
    /// The request comes from a web page.
    WebPage,
    /// The request to the admin listener has no valid token.
    Token,
    /// The request to the admin listener may not make the change that it asks for.
    ReadOnly,
}

impl RejectionReason {
    pub(crate) const ALL: [Self; 10] = [
        Self::Host,
        Self::AmbiguousPath,
        Self::TooManyPathReadings,
        Self::MissingPart,
        Self::TooManyValues,
        Self::Lookalike,
        Self::ForeignHost,
        Self::WebPage,
        Self::Token,
        Self::ReadOnly,
    ];
    pub(crate) const COUNT: usize = Self::ALL.len();

    /// The reason's name in the log and in metrics.
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
            Self::Token => "token",
            Self::ReadOnly => "read_only",
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
