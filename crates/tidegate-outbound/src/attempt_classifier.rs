//! The classification of HTTP replies and of attempts without a reply.

use std::error::Error;
use std::io;

use http::header::{HeaderMap, HeaderName};
use http::{Method, StatusCode};
use serde_json::Value;
use tidegate_core::call::AttemptReport;
use tidegate_core::retry::{Class, Delivery, TransportFault, UnreplayableReason, is_repeatable};
use tidegate_core::{LimitId, Span, Time};
use tidegate_policy::Hints;
use tidegate_policy::outbound::BodyRule;

use super::causes::causes;

/// The status of gRPC. It is in the head of a reply without messages ("Trailers-Only").
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// The classification of a reply's head, independent of the request.
pub struct HeadClassification {
    /// The class of the status; a 403 that says that nothing is left, or when to come back, is throttled.
    pub class: Class,
    /// The waits and allowances in the headers.
    pub hints: Hints,
}

impl HeadClassification {
    /// Reads a reply's head, received `now`.
    pub fn read(status: StatusCode, headers: &HeaderMap, now: Time) -> Self {
        let hints = Hints::read(headers, now);
        let status = effective_status(status, headers);
        let mut class = Class::from_status(status.as_u16());
        if status == StatusCode::FORBIDDEN && (hints.retry_after.is_some() || hints.exhausted) {
            class = Class::Throttled;
        }
        Self { class, hints }
    }

    /// True if the server may have acted on the request. A throttled request was not carried out, so it may be sent
    /// again with any method.
    pub fn may_have_acted(&self) -> bool {
        self.class != Class::Throttled
    }

    /// The wait that the server asks for. A throttled reply without `Retry-After` waits until the allowances are
    /// renewed.
    pub fn requested_wait(&self, now: Time) -> Option<Span> {
        if self.class == Class::Throttled { self.hints.wait(now) } else { self.hints.retry_after }
    }
}

/// Classifies the attempts of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttemptClassifier {
    /// True if a second request is safe although the first may be carried out.
    pub is_idempotent: bool,
}

impl AttemptClassifier {
    pub(crate) fn new(method: &Method, has_idempotency_key: bool) -> Self {
        Self { is_idempotent: is_repeatable(method.as_str(), has_idempotency_key, true) }
    }

    /// Classifies a reply by its status and headers, received at `now`. `unreplayable` is the reason that the request
    /// can't be sent again, if there is one.
    ///
    /// A 403 with an exhausted limit or a time to retry is throttled, as GitHub's secondary limits are. A throttled
    /// request was not carried out, so it may be sent again with any method. Other replies set `spent_until` if the
    /// next call would be throttled. For a 200 with another `grpc-status`, the class follows the HTTP status that
    /// `google.rpc.Code` gives for it: 14 is 503, 8 is 429.
    pub(crate) fn classify_reply(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        unreplayable: Option<UnreplayableReason>,
        now: Time,
    ) -> AttemptReport {
        let head = HeadClassification::read(status, headers, now);
        AttemptReport {
            is_repeatable: self.is_idempotent || !head.may_have_acted(),
            unreplayable_reason: unreplayable,
            asks_not_to_retry: head.hints.asks_not_to_retry,
            rejects_credential: effective_status(status, headers) == StatusCode::UNAUTHORIZED,
            retry_after: head.requested_wait(now),
            has_reservation: head.hints.reserved_in.is_some() && head.class == Class::Throttled,
            spent_until: head.hints.spent_until.filter(|_| head.class != Class::Throttled),
            remaining: head.hints.remaining,
            ..AttemptReport::new(head.class, Delivery::Answered)
        }
    }

    /// Classifies an attempt without a reply.
    pub(crate) fn classify_fault(
        &self,
        fault: TransportFault,
        unreplayable: Option<UnreplayableReason>,
    ) -> AttemptReport {
        AttemptReport {
            is_repeatable: self.is_idempotent || !fault.was_sent(),
            unreplayable_reason: unreplayable,
            ..AttemptReport::new(fault.class(), fault.delivery())
        }
    }
}

/// The report of a reply with a body that says it is throttled; `quota` is the quota that is then spent, and its end.
pub(crate) fn throttled_report(reply: AttemptReport, quota: Option<(LimitId, Time)>, now: Time) -> AttemptReport {
    AttemptReport {
        class: Class::Throttled,
        retry_after: quota.map(|(_, ends)| ends.since(now)).or(reply.retry_after),
        has_reservation: reply.has_reservation && quota.is_none(),
        spent_quota: quota.map(|(quota, _)| quota),
        spent_until: None,
        ..reply
    }
}

/// The effective status of a reply: the HTTP status, or for a 200 the one that corresponds to `grpc-status`. An unknown
/// gRPC status counts as UNKNOWN.
fn effective_status(status: StatusCode, headers: &HeaderMap) -> StatusCode {
    let Some(grpc) = headers.get(&GRPC_STATUS).filter(|_| status == StatusCode::OK) else { return status };
    match grpc.as_bytes() {
        b"0" => StatusCode::OK,
        // CANCELLED has no status in RFC 9110. If the provider cancelled the call itself, it would cancel a retry too.
        b"1" | b"3" | b"9" | b"11" => StatusCode::BAD_REQUEST,
        b"4" => StatusCode::GATEWAY_TIMEOUT,
        b"5" => StatusCode::NOT_FOUND,
        b"6" | b"10" => StatusCode::CONFLICT,
        b"7" => StatusCode::FORBIDDEN,
        b"8" => StatusCode::TOO_MANY_REQUESTS,
        b"12" => StatusCode::NOT_IMPLEMENTED,
        b"14" => StatusCode::SERVICE_UNAVAILABLE,
        b"16" => StatusCode::UNAUTHORIZED,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// The fault behind a client's error, by the errors of the operating system and of HTTP/2 among its causes. A failure
/// before the connection was established means unsent. So does a request that the provider reports as not processed (a
/// `REFUSED_STREAM`, or a `GOAWAY` that excludes it; RFC 9113 §8.7). Any other request may have arrived.
pub fn fault_of(error: &(dyn Error + 'static)) -> TransportFault {
    causes(error).fold(TransportFault::Reset, |fault, cause| {
        if let Some(error) = cause.downcast_ref::<io::Error>() {
            fault_of_io(error.kind()).unwrap_or(fault)
        } else if cause.downcast_ref::<h2::Error>().is_some_and(is_unprocessed) {
            TransportFault::Unsent
        } else {
            fault
        }
    })
}

/// True if the provider did not process the request. A `GOAWAY` error is given only to requests after the last stream
/// that it names.
fn is_unprocessed(error: &h2::Error) -> bool {
    error.is_remote() && (error.is_go_away() || error.reason() == Some(h2::Reason::REFUSED_STREAM))
}

fn fault_of_io(kind: io::ErrorKind) -> Option<TransportFault> {
    match kind {
        io::ErrorKind::ConnectionRefused
        | io::ErrorKind::NotFound
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::NetworkDown
        | io::ErrorKind::AddrNotAvailable => Some(TransportFault::Unsent),
        io::ErrorKind::TimedOut => Some(TransportFault::TimedOut),
        io::ErrorKind::InvalidData => Some(TransportFault::InvalidReply),
        _ => None,
    }
}

/// True if the body of a reply, to which the rule applies, contains the rule's texts for throttling.
pub(super) fn says_throttled(rule: &BodyRule, body: &[u8]) -> bool {
    let Ok(json) = serde_json::from_slice::<Value>(body) else { return false };
    rule.contains.iter().all(|(pointer, expected)| {
        let found = json.pointer(pointer).and_then(Value::as_str);
        found.is_some_and(|text| text.to_lowercase().contains(&expected.to_lowercase()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-01-01 00:00:00 UTC.
    const NOW: Time = Time::from_secs(1_767_225_600);

    fn reply(method: Method, has_key: bool, status: u16, lines: &[(&'static str, &'static str)]) -> AttemptReport {
        let headers = lines
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), http::HeaderValue::from_static(value)))
            .collect();
        AttemptClassifier::new(&method, has_key).classify_reply(
            StatusCode::from_u16(status).unwrap(),
            &headers,
            None,
            NOW,
        )
    }

    #[test]
    fn a_call_refused_with_429_is_repeatable() {
        assert!(reply(Method::POST, false, 429, &[]).is_repeatable);
        assert!(!reply(Method::POST, false, 503, &[]).is_repeatable);
        assert!(reply(Method::POST, true, 503, &[]).is_repeatable);
    }

    #[test]
    fn a_403_with_limit_headers_counts_as_throttled() {
        let class = |lines: &[_]| reply(Method::GET, false, 403, lines).class;
        assert_eq!(class(&[]), Class::Auth);
        assert_eq!(class(&[("retry-after", "60")]), Class::Throttled);
        assert_eq!(class(&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1767225660")]), Class::Throttled);
        assert_eq!(class(&[("x-ratelimit-remaining", "0")]), Class::Throttled);
        assert_eq!(class(&[("x-ratelimit-remaining", "41"), ("x-ratelimit-reset", "1767225660")]), Class::Auth);
        assert_eq!(class(&[("retry-after", "0")]), Class::Auth);
        assert_eq!(reply(Method::GET, false, 401, &[("retry-after", "60")]).class, Class::Auth);
    }

    #[test]
    fn the_grpc_status_header_decides_the_class() {
        use Class::{Auth, Permanent, Success, Throttled, Transient};
        for (grpc, class) in [
            ("0", Success),
            ("1", Permanent),
            ("2", Transient),
            ("3", Permanent),
            ("4", Transient),
            ("5", Permanent),
            ("6", Permanent),
            ("7", Auth),
            ("8", Throttled),
            ("9", Permanent),
            ("10", Permanent),
            ("11", Permanent),
            ("12", Permanent),
            ("13", Transient),
            ("14", Transient),
            ("15", Transient),
            ("16", Auth),
            ("17", Transient),
            ("", Transient),
            ("ok", Transient),
        ] {
            let report = reply(Method::POST, false, 200, &[("grpc-status", grpc)]);
            assert_eq!((report.class, report.is_repeatable), (class, class == Throttled), "{grpc}");
            let with_key = reply(Method::POST, true, 200, &[("grpc-status", grpc)]);
            assert_eq!((with_key.class, with_key.is_repeatable), (class, true), "{grpc}");
            assert_eq!(reply(Method::POST, false, 404, &[("grpc-status", grpc)]).class, Permanent, "HTTP says more");
        }
    }

    #[test]
    fn grpc_pushback_sets_a_wait_or_stops_retries() {
        let wait = |status, pushback| {
            let reply =
                reply(Method::POST, true, 200, &[("grpc-status", status), ("grpc-retry-pushback-ms", pushback)]);
            (reply.asks_not_to_retry, reply.retry_after)
        };
        for status in ["8", "14"] {
            assert_eq!(wait(status, "1500"), (false, Some(Span::from_millis(1_500))));
            for stop in ["-1", "soon", ""] {
                assert_eq!(wait(status, stop), (true, None), "{stop:?}");
            }
        }
        assert!(!reply(Method::GET, false, 503, &[]).asks_not_to_retry);
    }

    #[test]
    fn refusals_set_retry_after_and_others_spent_until() {
        let spent = [("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "60"), ("retry-after", "7")];
        let minute = Span::from_secs(60);
        for (status, lines, retry_after, spent_until) in [
            (429, &spent[..], Some(Span::from_secs(7)), None),
            (429, &spent[..2], Some(minute), None),
            (429, &spent[1..2], Some(minute), None),
            (429, &[], None, None),
            (503, &spent[2..], Some(Span::from_secs(7)), None),
            (503, &spent[..2], None, Some(NOW + minute)),
            (200, &spent[..2], None, Some(NOW + minute)),
            (404, &spent[..2], None, Some(NOW + minute)),
        ] {
            let reply = reply(Method::GET, false, status, lines);
            assert_eq!((reply.retry_after, reply.spent_until), (retry_after, spent_until), "{status} {lines:?}");
        }
    }

    #[test]
    fn only_unsent_or_idempotent_requests_are_repeatable() {
        assert!(!reply(Method::POST, false, 503, &[]).is_repeatable);
        assert!(reply(Method::POST, true, 503, &[]).is_repeatable);
        assert!(reply(Method::PUT, false, 503, &[]).is_repeatable);
        let post = AttemptClassifier::new(&Method::POST, false);
        assert!(post.classify_fault(TransportFault::Unsent, None).is_repeatable, "nothing was sent");
        assert!(!post.classify_fault(TransportFault::Reset, None).is_repeatable);
        let large = Some(UnreplayableReason::BodyTooLarge);
        assert_eq!(post.classify_fault(TransportFault::Unsent, large).unreplayable_reason, large);
    }

    #[test]
    fn io_errors_map_to_faults() {
        #[derive(Debug, thiserror::Error)]
        #[error("a client's")]
        struct Outer(#[source] io::Error);
        for (kind, fault) in [
            (io::ErrorKind::ConnectionRefused, TransportFault::Unsent),
            (io::ErrorKind::ConnectionReset, TransportFault::Reset),
            (io::ErrorKind::TimedOut, TransportFault::TimedOut),
            (io::ErrorKind::UnexpectedEof, TransportFault::Reset),
        ] {
            assert_eq!(fault_of(&Outer(kind.into())), fault);
        }
        assert_eq!(fault_of(&std::fmt::Error), TransportFault::Reset);
    }

    #[test]
    fn body_rules_recognise_omdbs_limit_message() {
        let contains = [("/Response", "False"), ("/Error", "limit reached")];
        let rule = BodyRule::new(200, contains.map(|(at, text)| (at.to_owned(), text.to_owned())).to_vec());
        let says = |body: &str| says_throttled(&rule, body.as_bytes());
        assert!(rule.matches_status(StatusCode::OK) && !rule.matches_status(StatusCode::UNAUTHORIZED));
        assert!(says(r#"{"Response":"False","Error":"Request limit reached!"}"#));
        assert!(says(r#"{"Response":"false","Error":"LIMIT REACHED"}"#));
        assert!(!says(r#"{"Response":"False","Error":"Movie not found!"}"#));
        assert!(!says(r#"{"Response":"True","Title":"limit reached"}"#));
        assert!(!says(r#"{"Response":"False","Error":"Request limit rea"#));
        let success = reply(Method::GET, false, 200, &[]);
        let throttled =
            throttled_report(success, LimitId::from_index(0).map(|quota| (quota, NOW + Span::from_secs(60))), NOW);
        assert_eq!((throttled.class, throttled.retry_after), (Class::Throttled, Some(Span::from_secs(60))));
    }
}
