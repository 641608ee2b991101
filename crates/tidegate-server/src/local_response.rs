//! The server's own responses: small, fixed, and the same on all listeners.

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};

use crate::body::ResponseBody;

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const CLOSE: HeaderValue = HeaderValue::from_static("close");

/// The reasons for which the server itself answers a request, other than limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HttpError {
    /// `Content-Length` and `Transfer-Encoding` in one request.
    ConflictingFraming,
    /// A transfer coding other than one `chunked`.
    UnsupportedTransferCoding,
    /// No `Host`, several, or one that isn't a host.
    InvalidHost,
    /// A request target that is neither a path nor a full http URL.
    InvalidTarget,
    /// The request target names another host than `Host`.
    HostConflict,
    /// The body ended early or has bad framing.
    BrokenBody,
    /// The client took too long to send its request.
    ClientTimeout,
    /// The body is over the cap.
    TooLarge,
    /// CONNECT or TRACE.
    MethodNotAllowed,
    /// The upstream refuses connections or closes them early.
    BadGateway,
    /// The upstream doesn't answer in time.
    GatewayTimeout,
    /// Too many unfinished heads.
    TooManyHeads,
    /// The store can't be read or written, and the policy says to refuse.
    StoreUnavailable,
}

impl HttpError {
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::ConflictingFraming
            | Self::UnsupportedTransferCoding
            | Self::InvalidHost
            | Self::InvalidTarget
            | Self::HostConflict
            | Self::BrokenBody => StatusCode::BAD_REQUEST,
            Self::ClientTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::BadGateway => StatusCode::BAD_GATEWAY,
            Self::GatewayTimeout => StatusCode::GATEWAY_TIMEOUT,
            Self::TooManyHeads | Self::StoreUnavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// A short description of the error.
    pub(crate) fn message(self) -> &'static str {
        match self {
            Self::ConflictingFraming => "Content-Length and Transfer-Encoding in one request",
            Self::UnsupportedTransferCoding => "the only transfer coding taken is chunked, once",
            Self::InvalidHost => "a request has one valid Host: a name or an address, and at most a port",
            Self::InvalidTarget => "the request target is a path or a whole http URL",
            Self::HostConflict => "the request target and Host name different hosts",
            Self::BrokenBody => "the request's body broke off or is badly framed",
            Self::ClientTimeout => "the request took too long to arrive",
            Self::TooLarge => "the request's body is too large",
            Self::MethodNotAllowed => "CONNECT and TRACE are not served",
            Self::BadGateway => "the upstream refused or broke the connection",
            Self::GatewayTimeout => "the upstream did not answer in time",
            Self::TooManyHeads => "too many requests are arriving at once",
            Self::StoreUnavailable => "the store can't be reached or written",
        }
    }

    /// Returns true if the connection can't be reused: the start of the next request is uncertain, or the client's
    /// framing can't be trusted.
    fn closes_connection(self) -> bool {
        !matches!(self, Self::BadGateway | Self::GatewayTimeout | Self::StoreUnavailable)
    }

    /// The response as bytes on the wire, for a connection that the HTTP library has given up.
    pub(crate) fn raw_response(self) -> Bytes {
        raw_error_response(self.status(), self.message())
    }

    pub(crate) fn response(self) -> Response<ResponseBody> {
        let mut response = error(self.status(), self.message());
        if self.closes_connection() {
            set_connection_close(&mut response);
        }
        if self == Self::MethodNotAllowed {
            const ALLOW: HeaderValue = HeaderValue::from_static("GET, HEAD, POST, PUT, DELETE, PATCH, OPTIONS");
            response.headers_mut().insert(http::header::ALLOW, ALLOW);
        }
        response
    }
}

/// A response with a JSON body.
pub(crate) fn json(status: StatusCode, body: Bytes) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::full(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response
}

/// A small error response in JSON.
pub(crate) fn error(status: StatusCode, message: &str) -> Response<ResponseBody> {
    json(status, error_json(status, message).into())
}

/// A small error response as bytes on the wire, for a connection that the HTTP library has given up. It is the last
/// response.
pub(crate) fn raw_error_response(status: StatusCode, message: &str) -> Bytes {
    let (reason, body) = (reason_phrase(status), error_json(status, message));
    let length = body.len();
    let retry = if status == StatusCode::SERVICE_UNAVAILABLE { "\r\nretry-after: 1" } else { "" };
    let head = "content-type: application/json\r\nconnection: close";
    format!("HTTP/1.1 {} {reason}\r\n{head}{retry}\r\ncontent-length: {length}\r\n\r\n{body}", status.as_u16()).into()
}

fn error_json(status: StatusCode, message: &str) -> String {
    serde_json::json!({ "error": reason_phrase(status), "message": message }).to_string()
}

fn reason_phrase(status: StatusCode) -> &'static str {
    status.canonical_reason().unwrap_or("Error")
}

/// Makes a response the connection's last.
pub(crate) fn set_connection_close<B>(response: &mut Response<B>) {
    response.headers_mut().insert(CONNECTION, CLOSE);
}
