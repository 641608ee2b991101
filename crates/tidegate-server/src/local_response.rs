//! The server's own responses: small, fixed, and the same on all listeners.

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use http_body::Body as _;
use hyper::body::Incoming;
use tidegate::reply::grpc_response;

use crate::body::ResponseBody;
use crate::connection::MAX_DRAINED_BYTES;
use crate::watchdog::{ConnectionPhase, ConnectionWatch};

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const CLOSE: HeaderValue = HeaderValue::from_static("close");

/// The reasons for which the server itself answers a request, other than limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HttpError {
    AmbiguousFraming,
    UnsupportedTransferCoding,
    InvalidHost,
    InvalidTarget,
    HostConflict,
    BrokenBody,
    ClientTimeout,
    TooLarge,
    MethodNotAllowed,
    BadGateway,
    GatewayTimeout,
    TooManyHeads,
    StoreUnavailable,
}

impl HttpError {
    /// The status of the response, and a short description of the error.
    pub(crate) fn status_and_message(self) -> (StatusCode, &'static str) {
        match self {
            Self::AmbiguousFraming => (
                StatusCode::BAD_REQUEST,
                "the request has Content-Length and Transfer-Encoding, or a line that ends with LF alone",
            ),
            Self::UnsupportedTransferCoding => {
                (StatusCode::BAD_REQUEST, "the only transfer coding taken is chunked, once")
            }
            Self::InvalidHost => {
                (StatusCode::BAD_REQUEST, "a request has one valid Host: a name or an address, and at most a port")
            }
            Self::InvalidTarget => (StatusCode::BAD_REQUEST, "the request target is a path or a whole http URL"),
            Self::HostConflict => (StatusCode::BAD_REQUEST, "the request target and Host name different hosts"),
            Self::BrokenBody => (StatusCode::BAD_REQUEST, "the request's body broke off or is badly framed"),
            Self::ClientTimeout => (StatusCode::REQUEST_TIMEOUT, "the request took too long to arrive"),
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "the request's body is too large"),
            Self::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, "CONNECT and TRACE are not served"),
            Self::BadGateway => (StatusCode::BAD_GATEWAY, "the upstream refused or broke the connection"),
            Self::GatewayTimeout => (StatusCode::GATEWAY_TIMEOUT, "the upstream did not answer in time"),
            Self::TooManyHeads => (StatusCode::SERVICE_UNAVAILABLE, "too many requests are arriving at once"),
            Self::StoreUnavailable => (StatusCode::SERVICE_UNAVAILABLE, "the store can't be reached or written"),
        }
    }

    /// Returns true if the connection can't be reused: the start of the next request is uncertain, or the client's
    /// framing can't be trusted.
    fn closes_connection(self) -> bool {
        !matches!(self, Self::BadGateway | Self::GatewayTimeout | Self::StoreUnavailable)
    }

    /// The response as bytes on the wire, for a connection that the HTTP library has given up.
    pub(crate) fn raw_response(self) -> Bytes {
        let (status, message) = self.status_and_message();
        raw_error_response(status, message)
    }

    pub(crate) fn response(self) -> Response<ResponseBody> {
        let (status, message) = self.status_and_message();
        let mut response = error(status, message);
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

pub(crate) fn json(status: StatusCode, body: Bytes) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::full(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response
}

/// A response with a plain text.
pub(crate) fn text(status: StatusCode, body: &'static str) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::full(Bytes::from_static(body.as_bytes())));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

/// A response with the JSON of a value.
pub(crate) fn json_response(status: StatusCode, body: &impl serde::Serialize) -> Response<ResponseBody> {
    match serde_json::to_vec(body) {
        Ok(text) => json(status, text.into()),
        // Not reachable: all values written here have string keys and finite numbers, which serde_json always accepts.
        Err(_) => json(StatusCode::INTERNAL_SERVER_ERROR, Bytes::from_static(br#"{"error":"Internal Server Error"}"#)),
    }
}

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

/// The body of an error.
pub(crate) fn error_json(status: StatusCode, message: &str) -> String {
    serde_json::json!({ "error": reason_phrase(status), "message": message }).to_string()
}

fn reason_phrase(status: StatusCode) -> &'static str {
    status.canonical_reason().unwrap_or("Error")
}

/// The status that the access log tells instead of that of a gRPC response, which is always 200.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoggedStatus(pub(crate) StatusCode);

/// Turns a response of the gate itself into the one that a gRPC client reads, if the request has a type of gRPC.
pub(crate) fn for_client(grpc_type: Option<&HeaderValue>, response: Response<ResponseBody>) -> Response<ResponseBody> {
    let Some(kind) = grpc_type else { return response };
    let status = LoggedStatus(response.status());
    let body = |body| if let ResponseBody::Full(text) = body { text.unwrap_or_default() } else { Bytes::new() };
    let mut response = grpc_response(kind, response.map(body)).map(ResponseBody::full);
    response.extensions_mut().insert(status);
    response
}

/// Makes a response the connection's last.
pub(crate) fn set_connection_close<B>(response: &mut Response<B>) {
    response.headers_mut().insert(CONNECTION, CLOSE);
}

/// Ends a request. The connection is idle again, unless its response streams, its request is being discarded, or it was
/// upgraded. While the server drains, or if the connection gives way to others, the response is its last.
pub(crate) fn finish_response(watch: &ConnectionWatch, mut response: Response<ResponseBody>) -> Response<ResponseBody> {
    let phase = watch.phase();
    if !matches!(phase, ConnectionPhase::Linger | ConnectionPhase::Download | ConnectionPhase::Tunnel) {
        watch.enter(ConnectionPhase::Idle);
    }
    let gives_way = watch.gives_way();
    if gives_way {
        // Requests that the client has already sent would reset the connection, and its responses with it.
        watch.response.must_linger.set(true);
    }
    if (watch.is_draining() || gives_way) && phase != ConnectionPhase::Tunnel {
        set_connection_close(&mut response);
    }
    response
}

/// Answers without the request's body. A small body is read and discarded after the response, so that the connection
/// can be reused. With a large one, or if `closes`, the response is the connection's last.
pub(crate) fn discard_body(
    watch: &ConnectionWatch,
    body: Incoming,
    closes: bool,
    response: Response<ResponseBody>,
) -> Response<ResponseBody> {
    // The library discards the rest of a stream's body once it is dropped.
    if body.is_end_stream() || watch.is_stream() {
        watch.enter(ConnectionPhase::Idle);
    } else if body.size_hint().lower() <= MAX_DRAINED_BYTES as u64 && !closes {
        watch.leave_body(body);
    } else {
        return close_after_response(watch, response);
    }
    response
}

/// Makes a response the connection's last, after which the rest of the request is read and discarded.
pub(crate) fn close_after_response(
    watch: &ConnectionWatch,
    mut response: Response<ResponseBody>,
) -> Response<ResponseBody> {
    watch.start_linger(false);
    watch.response.must_linger.set(true);
    set_connection_close(&mut response);
    response
}
