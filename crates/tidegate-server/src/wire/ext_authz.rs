//! Envoy's external authorization service (`envoy.service.auth.v3.Authorization`), on the listener of the rate limit
//! service: forward-auth without its ways around HTTP.
//!
//! A question has the client's whole request, and is decided as the proxy would decide about it. The client's address is
//! the one that Envoy has found; if that is a trusted proxy, it is read from the headers.

mod messages;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, COOKIE, HeaderMap, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use tidegate::policy::{Query, canonical_ip};
use tidegate::store::Store;
use tidegate_core::Clock;
use tonic::{Code, Status};

use self::messages::{
    AppendAction, Denied, Header, HeaderOption, HttpRequest, HttpResponse, HttpStatus, Ok as Admitted, RpcStatus,
};
pub(crate) use self::messages::{CheckRequest, CheckResponse};
use crate::access_log::AccessSlot;
use crate::dashboard::remove_session_cookies;
use crate::local_response::error_json;
use crate::rejections::RejectionReason;
use crate::wire::forward_auth::{IN_FLIGHT, NoDecision, judge};
use crate::wire::rls::RlsState;

pub(crate) const SERVICE: &str = "envoy.service.auth.v3.Authorization";
pub(crate) const CHECK: &str = "/envoy.service.auth.v3.Authorization/Check";
/// The maximum size of a question over gRPC in bytes: room for all headers that Envoy takes by default (60 KiB), and its own.
pub(crate) const MAX_BYTES: usize = 128 << 10;
/// The entry of `context_extensions` that names the action.
const ACTION: &str = "action";

impl<S: Store, C: Clock> RlsState<S, C> {
    /// Decides about a request that Envoy has received.
    pub(crate) async fn authorize(&self, asked: &CheckRequest, access: &AccessSlot) -> Result<CheckResponse, Status> {
        let attributes =
            asked.attributes.as_ref().ok_or_else(|| Status::invalid_argument("`attributes` is missing"))?;
        let request = attributes.request.as_ref().and_then(|request| request.http.as_ref());
        let request = request.ok_or_else(|| Status::invalid_argument("`attributes.request.http` is missing"))?;
        let headers = self.headers_of(request)?;
        let address = attributes.source.as_ref().and_then(|peer| peer.address.as_ref()?.socket.as_ref());
        let peer = address.and_then(|socket| socket.address.parse().ok()).map(canonical_ip);
        let extensions = &attributes.context_extensions;
        let query = Query {
            action: extensions.iter().find(|entry| entry.key == ACTION).map(|entry| &*entry.value),
            ip: peer.map(|peer| headers.as_ref().map_or(peer, |headers| self.forwarding.client_ip(peer, headers))),
            method: Some(&request.method),
            path: Some(&request.path),
            host: Some(&*request.host).filter(|host| !host.is_empty()),
            headers: headers.as_ref(),
            ..Query::default()
        };
        access.note(|entry| entry.note_question(&query));
        let judged = match &headers {
            Some(_) => judge(&self.gate, &self.parts.metrics, &query).await,
            None => Err(NoDecision::Rejected(RejectionReason::Head, "a header isn't valid".to_owned())),
        };
        let (actions, decision) = match judged {
            Ok(judged) => judged,
            Err(NoDecision::Rejected(reason, why)) => {
                self.parts.refusals.log_rejection(self.gate.clock().now(), reason, &query, &why, access);
                let body = error_json(StatusCode::BAD_REQUEST, &why);
                let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
                return Ok(CheckResponse::denied(StatusCode::BAD_REQUEST, &headers, body));
            }
            Err(NoDecision::InFlight) => return Err(Status::failed_precondition(IN_FLIGHT)),
            Err(NoDecision::Failed(error)) => return Err(self.status_of(&error)),
        };
        self.parts.refusals.log_decision(self.gate.plan(), actions, &query, &decision, access);
        let mut annotations = HeaderMap::new();
        if decision.allowed {
            self.replies.annotate(actions, &decision, &mut annotations);
            return Ok(CheckResponse::admitted(&annotations));
        }
        let refusal = self.replies.refusal(actions, &decision, query.headers.unwrap_or(&annotations));
        Ok(CheckResponse::from(refusal))
    }

    /// The request's headers, as the proxy counts them. `None` if one of them isn't valid.
    ///
    /// # Errors
    /// Limits count by headers, and Envoy has joined all values of each.
    fn headers_of(&self, request: &HttpRequest) -> Result<Option<HeaderMap>, Status> {
        let given = match &request.header_map {
            Some(raw) => &raw.headers,
            None if self.gate.plan().keyed_headers().iter().any(|name| name != COOKIE) => {
                let message = "limits count by headers, so the filter must set `encode_raw_headers: true`";
                return Err(Status::failed_precondition(message));
            }
            None => &request.headers,
        };
        let headers = header_map(given).map(|mut headers| {
            remove_session_cookies(&mut headers);
            headers
        });
        Ok(headers)
    }
}

/// The headers of a request, without the names of HTTP/2 for the method, path and host, which begin with a colon. `None`
/// if one of them isn't valid.
fn header_map(given: &[Header]) -> Option<HeaderMap> {
    let mut headers = HeaderMap::try_with_capacity(given.len()).ok()?;
    for entry in given.iter().filter(|entry| !entry.key.starts_with(':')) {
        let value = if entry.raw_value.is_empty() { &entry.value } else { &entry.raw_value };
        headers.try_append(HeaderName::try_from(&*entry.key).ok()?, HeaderValue::from_bytes(value).ok()?).ok()?;
    }
    Some(headers)
}

impl CheckResponse {
    fn admitted(annotations: &HeaderMap) -> Self {
        let admitted = Admitted { response_headers_to_add: header_options(annotations) };
        Self { status: Some(RpcStatus { code: Code::Ok.into() }), http_response: Some(HttpResponse::Ok(admitted)) }
    }

    fn denied(status: StatusCode, headers: &HeaderMap, body: String) -> Self {
        let code = match status {
            StatusCode::TOO_MANY_REQUESTS => Code::ResourceExhausted,
            StatusCode::FORBIDDEN => Code::PermissionDenied,
            _ => Code::InvalidArgument,
        };
        let status = Some(HttpStatus { code: status.as_u16().into() });
        let denied = Denied { status, headers: header_options(headers), body };
        Self { status: Some(RpcStatus { code: code.into() }), http_response: Some(HttpResponse::Denied(denied)) }
    }
}

impl From<Response<Bytes>> for CheckResponse {
    fn from(refusal: Response<Bytes>) -> Self {
        let body = String::from_utf8_lossy(refusal.body()).into_owned();
        Self::denied(refusal.status(), refusal.headers(), body)
    }
}

/// The headers that Envoy sets in the client's response, in place of others with their names.
fn header_options(headers: &HeaderMap) -> Vec<HeaderOption> {
    let header = |(name, value): (&HeaderName, &HeaderValue)| HeaderOption {
        header: Some(Header { key: name.to_string(), value: value.as_bytes().to_vec(), raw_value: Vec::new() }),
        append_action: AppendAction::OverwriteOrAdd.into(),
    };
    headers.iter().map(header).collect()
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use tidegate_testkit::property;
    use tidegate_testkit::random::RandomSource;

    use super::*;
    use crate::wire::rls::messages::RateLimitRequest;

    /// Parts of messages: fields with their kinds, lengths right and wrong, and bytes that aren't text.
    const PIECES: [&[u8]; 18] = [
        b"\x0a\x03abc",
        b"\x0a\x00",
        b"\x0a\x05\x0a\x03\x0a\x01a",
        b"\x12\x02\x0a\x00",
        b"\x12\x01x",
        b"\x12\xff\xff\xff\xff\x0f",
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x1a\x03\x0a\x01k",
        b"\x22\x08\x12\x06\x12\x04POST",
        b"\x18\x01",
        b"\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x20\x01",
        b"\x6a\x06\x0a\x04\x0a\x02\xc3\x28",
        b"\x0b",
        b"\x0c",
        b"\x00",
        b"\xff",
        b"cookie",
    ];

    /// A message, at best nested in another one.
    fn bytes(random: &mut RandomSource) -> Vec<u8> {
        let mut bytes = random.concat_random(&PIECES, 6);
        for _ in 0..random.between(0, 3) {
            let tag = random.pick(&[0x0a, 0x12, 0x1a, 0x22, 0x52, 0x6a]);
            let length = u8::try_from(bytes.len()).unwrap_or(u8::MAX).min(127);
            bytes.splice(..0, [tag, length]);
        }
        bytes
    }

    #[test]
    fn arbitrary_messages_are_read_or_refused() {
        property::fuzz_cheaply(|random| {
            let bytes = bytes(random);
            if let Ok(asked) = RateLimitRequest::decode(&*bytes) {
                assert_eq!(RateLimitRequest::decode(&*asked.encode_to_vec()), Ok(asked));
            }
            if let Ok(asked) = CheckRequest::decode(&*bytes) {
                let request = asked.attributes.and_then(|attributes| attributes.request?.http);
                let headers = request.map(|http| [http.headers, http.header_map.unwrap_or_default().headers].concat());
                if let Some(known) = headers.as_deref().and_then(header_map) {
                    assert!(known.len() <= headers.map_or(0, |headers| headers.len()));
                }
            }
        });
    }
}
