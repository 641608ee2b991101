//! The reports of attempts, with a reply or without one.

use std::error::Error;
use std::io;

use http::{HeaderMap, Method};
use tidegate_core::Verdict;
use tidegate_core::call::AttemptReport;
use tidegate_core::retry::{Delivery, TransportFault, UnreplayableReason, is_repeatable};

use super::call_headers::has_idempotency_key;
use super::causes::causes;

/// Classifies the attempts of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttemptClassifier {
    /// True if a second request is safe although the first may be carried out.
    pub is_idempotent: bool,
}

impl AttemptClassifier {
    pub(crate) fn new(method: &Method, headers: &HeaderMap) -> Self {
        Self { is_idempotent: is_repeatable(method.as_str(), false, true) || has_idempotency_key(headers) }
    }

    /// The report of a reply with this verdict. `unreplayable` is the reason that the request can't be sent again, if there is
    /// one. A request that was not carried out may be sent again with any method.
    pub(crate) fn reply_report(&self, verdict: Verdict, unreplayable: Option<UnreplayableReason>) -> AttemptReport {
        AttemptReport {
            is_repeatable: self.is_idempotent || verdict.was_refused,
            unreplayable_reason: unreplayable,
            ..AttemptReport::from_verdict(verdict, Delivery::Answered)
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
            is_abandoned: fault == TransportFault::TimedOut,
            ..AttemptReport::new(fault.class(), fault.delivery())
        }
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

#[cfg(test)]
mod tests {
    use super::super::call_headers::IDEMPOTENCY_KEY;
    use super::*;
    use http::{HeaderName, StatusCode};
    use tidegate_core::{Class, Span, Time};
    use tidegate_policy::verdict::Classified;

    /// 2026-01-01 00:00:00 UTC.
    const NOW: Time = Time::from_secs(1_767_225_600);

    fn reply(method: Method, has_key: bool, status: u16, lines: &[(&'static str, &'static str)]) -> AttemptReport {
        let headers = lines
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), http::HeaderValue::from_static(value)))
            .collect();
        let found = Classified::of_head(StatusCode::from_u16(status).unwrap(), &headers, NOW);
        let key = has_key.then(|| (IDEMPOTENCY_KEY, http::HeaderValue::from_static("8e03978e")));
        AttemptClassifier::new(&method, &key.into_iter().collect()).reply_report(found.verdict, None)
    }

    #[test]
    fn a_call_refused_with_429_is_repeatable() {
        assert!(reply(Method::POST, false, 429, &[]).is_repeatable);
        assert!(!reply(Method::POST, false, 503, &[]).is_repeatable);
        assert!(reply(Method::POST, true, 503, &[]).is_repeatable);
    }

    #[test]
    fn a_403_with_limit_headers_counts_as_throttled() {
        let class = |lines: &[_]| reply(Method::GET, false, 403, lines).verdict.class;
        assert_eq!(class(&[]), Class::Auth);
        assert_eq!(class(&[("retry-after", "60")]), Class::Throttled);
        assert_eq!(class(&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1767225660")]), Class::Throttled);
        assert_eq!(class(&[("x-ratelimit-remaining", "0")]), Class::Throttled);
        assert_eq!(class(&[("x-ratelimit-remaining", "41"), ("x-ratelimit-reset", "1767225660")]), Class::Auth);
        assert_eq!(class(&[("retry-after", "0")]), Class::Auth);
        assert_eq!(reply(Method::GET, false, 401, &[("retry-after", "60")]).verdict.class, Class::Auth);
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
            assert_eq!((report.verdict.class, report.is_repeatable), (class, class == Throttled), "{grpc}");
            let with_key = reply(Method::POST, true, 200, &[("grpc-status", grpc)]);
            assert_eq!((with_key.verdict.class, with_key.is_repeatable), (class, true), "{grpc}");
            assert_eq!(
                reply(Method::POST, false, 404, &[("grpc-status", grpc)]).verdict.class,
                Permanent,
                "HTTP says more"
            );
        }
    }

    #[test]
    fn grpc_pushback_sets_a_wait_or_stops_retries() {
        let wait = |status, pushback| {
            let reply =
                reply(Method::POST, true, 200, &[("grpc-status", status), ("grpc-retry-pushback-ms", pushback)]);
            (reply.verdict.asks_not_to_retry, reply.verdict.wait)
        };
        for status in ["8", "14"] {
            assert_eq!(wait(status, "1500"), (false, Some(Span::from_millis(1_500))));
            for stop in ["-1", "soon", ""] {
                assert_eq!(wait(status, stop), (true, None), "{stop:?}");
            }
        }
        assert!(!reply(Method::GET, false, 503, &[]).verdict.asks_not_to_retry);
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
            assert_eq!(
                (reply.verdict.wait, reply.verdict.spent_until),
                (retry_after, spent_until),
                "{status} {lines:?}"
            );
        }
    }

    #[test]
    fn only_unsent_or_idempotent_requests_are_repeatable() {
        assert!(!reply(Method::POST, false, 503, &[]).is_repeatable);
        assert!(reply(Method::POST, true, 503, &[]).is_repeatable);
        assert!(reply(Method::PUT, false, 503, &[]).is_repeatable);
        let post = AttemptClassifier::new(&Method::POST, &HeaderMap::new());
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
}
