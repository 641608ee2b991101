//! The reasons for which requests are rejected before any decision, and the record of those that never reach a service.

use std::net::IpAddr;
use std::sync::Arc;

use http::StatusCode;
use tidegate::policy::Query;
use tidegate_policy::{PathError, UncountableError};

use crate::access_log::{AccessLog, AccessSlot};
use crate::local_response::HttpError;
use crate::refusal_log::RefusalLog;

/// The reason for a rejection before any decision. `docs/metrics.md` tells the status of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RejectionReason {
    /// The head of the request can't be read as HTTP.
    Head,
    /// The head of the request has too many bytes or lines, or its target is too long.
    HeadSize,
    /// The head of the request took too long to arrive.
    HeadTimeout,
    /// The unfinished heads and handshakes of all connections took too many bytes, or a new connection needed the place of one
    /// without a request.
    HeadDisplaced,
    /// The body is framed in a way that servers read differently, or in an unknown one.
    Framing,
    /// The target is neither a path nor an http URL.
    Target,
    /// The method is `CONNECT` or `TRACE`.
    Method,
    /// The host is invalid, or the target names another one.
    Host,
    /// The path can be read in ways that match different actions, and `inbound.ambiguous_paths` is `refuse`.
    AmbiguousPath,
    /// The path can be read in more ways than one decision can cover.
    TooManyPathReadings,
    /// The request lacks a part that a limit counts by, and `missing = "refuse"`.
    MissingPart,
    /// A part that a limit counts by has too many values or can't be decoded, or all parts together have too many.
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
    /// The connection doesn't begin with a valid header of the PROXY protocol, or not in time.
    ProxyHeader,
    /// The TLS handshake has failed, or has taken too long.
    TlsHandshake,
    /// The client breaks the rules of HTTP/2, or breaks off most of its requests.
    Http2,
    /// A front server's request about a client's request can't be decided, because it isn't configured for this policy.
    Question,
    /// The client, or the listener, has too many requests at once in streams of HTTP/2.
    Streams,
    /// The connection to a TLS port begins with something else than TLS, such as plain HTTP.
    PlainHttp,
    /// The client's address has the maximum number of connections.
    ClientConnections,
}

impl RejectionReason {
    pub(crate) const ALL: [Self; 24] = [
        Self::Head,
        Self::HeadSize,
        Self::HeadTimeout,
        Self::HeadDisplaced,
        Self::Framing,
        Self::Target,
        Self::Method,
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
        Self::ProxyHeader,
        Self::TlsHandshake,
        Self::Http2,
        Self::Question,
        Self::Streams,
        Self::PlainHttp,
        Self::ClientConnections,
    ];
    pub(crate) const COUNT: usize = Self::ALL.len();

    /// The reason's name in the log and in metrics.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Head => "head",
            Self::HeadSize => "head_size",
            Self::HeadTimeout => "head_timeout",
            Self::HeadDisplaced => "head_displaced",
            Self::Framing => "framing",
            Self::Target => "target",
            Self::Method => "method",
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
            Self::ProxyHeader => "proxy_header",
            Self::TlsHandshake => "tls_handshake",
            Self::Http2 => "http2",
            Self::Question => "question",
            Self::Streams => "streams",
            Self::PlainHttp => "plain_http",
            Self::ClientConnections => "client_connections",
        }
    }
}

impl From<&UncountableError> for RejectionReason {
    fn from(why: &UncountableError) -> Self {
        match why {
            UncountableError::Path(PathError::Ambiguous) => Self::AmbiguousPath,
            UncountableError::Path(PathError::TooMany) => Self::TooManyPathReadings,
            UncountableError::Missing(_) => Self::MissingPart,
            UncountableError::TooManyValues(_)
            | UncountableError::Charset(_)
            | UncountableError::TooLong
            | UncountableError::TooManyOperations => Self::TooManyValues,
            UncountableError::SimilarHeader(_) => Self::Lookalike,
            UncountableError::InvalidHost => Self::Host,
        }
    }
}

impl RejectionReason {
    /// The reason of an error in a request's head. `None` for errors that come after the decision.
    pub(crate) fn of_head_error(error: HttpError) -> Option<Self> {
        match error {
            HttpError::AmbiguousFraming | HttpError::UnsupportedTransferCoding => Some(Self::Framing),
            HttpError::InvalidHost | HttpError::HostConflict => Some(Self::Host),
            HttpError::InvalidTarget => Some(Self::Target),
            HttpError::MethodNotAllowed => Some(Self::Method),
            HttpError::ClientTimeout => Some(Self::HeadTimeout),
            HttpError::TooManyHeads => Some(Self::HeadDisplaced),
            HttpError::BrokenBody
            | HttpError::TooLarge
            | HttpError::BadGateway
            | HttpError::GatewayTimeout
            | HttpError::StoreUnavailable => None,
        }
    }
}

/// The record of a listener's connections and requests whose first bytes can't be read, so that no service answers them.
pub(crate) struct HeadRejections {
    pub(crate) listener: &'static str,
    pub(crate) access_log: Arc<AccessLog>,
    pub(crate) refusals: Arc<RefusalLog>,
}

impl HeadRejections {
    /// Counts and logs such a connection or request. The status is that of the response, if there is one.
    #[cold]
    pub(crate) fn record(&self, ip: IpAddr, reason: RejectionReason, status: Option<StatusCode>, why: &str) {
        let query = Query { ip: Some(ip), ..Query::default() };
        self.refusals.log_rejection(self.access_log.now(), reason, &query, why, &AccessSlot::default());
        self.access_log.log_unread_head(self.listener, ip, reason, status);
    }

    /// Records that a new connection takes the place of one that has sent nothing.
    pub(crate) fn record_silent(&self, ip: IpAddr) {
        self.record(ip, RejectionReason::HeadDisplaced, None, "the connection is silent, and its place is needed");
    }
}
