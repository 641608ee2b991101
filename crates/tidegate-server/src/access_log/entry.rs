//! One line of the access log.

use std::fmt;
use std::net::IpAddr;

use http::header::{HOST, HeaderValue};
use http::{Method, Request, Uri};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use tidegate::Decision;
use tidegate::outbound::{CallErrorKind, CallStats, OutboundError};
use tidegate::policy::{MatchedActions, Plan, Query};
use tidegate_core::{Span, Time};

use crate::log::{ACCESS_TARGET, EscapedText, MaskedKey};
use crate::rejections::RejectionReason;
use crate::trace_context::trace_id;

/// The maximum number of bytes of a path in a line, after its encoding. The rest is left out.
const MAX_PATH_BYTES: usize = 2048;
/// The bytes of a path that are encoded, so that it is the same in text and JSON: those that URLs can't have, and `\`.
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'\\').add(b'<').add(b'>').add(b'`').add(b'|').add(b'^');

/// The gate's decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It was passed on, or told that it may pass.
    Admitted,
    /// The same, but a limit in shadow mode would have refused it.
    Shadow,
    Refused,
    /// Its call got no reply.
    Failed,
    /// It asked the decision API for something other than a decision.
    Answered,
}

impl Outcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::Shadow => "shadow",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Answered => "answered",
        }
    }
}

/// One line of the access log, from a request's arrival to its end.
pub(crate) struct AccessEntry {
    listener: &'static str,
    began_at: Time,
    ip: IpAddr,
    /// The method and the target; `None` if the head can't be read.
    request_line: Option<(Method, Uri)>,
    host: Option<HeaderValue>,
    trace_id: Option<String>,
    /// The request that forward-auth or a check is about, if the question describes one.
    asked: Option<AskedRequest>,
    outcome: Option<Outcome>,
    refusal: Option<Refusal>,
    /// The action that the caller has named.
    action: Option<String>,
    /// The actions that the request matches.
    actions: Option<String>,
    key: Option<String>,
    call: Option<CallStats>,
    upstream_time: Option<Span>,
    status: Option<u16>,
    pub(super) bytes: u64,
    /// True if the client has gone before the end of the response, or the response broke off.
    pub(super) is_aborted: bool,
}

struct AskedRequest {
    method: Option<Method>,
    path: Option<String>,
    host: Option<String>,
}

/// The cause of a refusal, or of one that shadow mode has admitted.
struct Refusal {
    limit: Option<String>,
    reason: &'static str,
    retry_after: Option<Span>,
    is_blocked: Option<bool>,
}

impl AccessEntry {
    pub(super) fn new(listener: &'static str, began_at: Time, ip: IpAddr) -> Self {
        Self {
            listener,
            began_at,
            ip,
            request_line: None,
            host: None,
            trace_id: None,
            asked: None,
            outcome: None,
            refusal: None,
            action: None,
            actions: None,
            key: None,
            call: None,
            upstream_time: None,
            status: None,
            bytes: 0,
            is_aborted: false,
        }
    }

    pub(super) fn of_request<B>(listener: &'static str, began_at: Time, ip: IpAddr, request: &Request<B>) -> Self {
        let headers = request.headers();
        Self {
            request_line: Some((request.method().clone(), request.uri().clone())),
            host: headers.get(HOST).cloned(),
            trace_id: trace_id(headers).map(str::to_owned),
            ..Self::new(listener, began_at, ip)
        }
    }

    fn note_client(&mut self, query: &Query<'_>) {
        self.ip = query.ip.unwrap_or(self.ip);
        self.key = query.key.map(|key| MaskedKey(key).to_string());
    }

    /// Shows no target, because it holds a secret.
    pub(crate) fn hide_target(&mut self) {
        if let Some((_, target)) = &mut self.request_line {
            *target = Uri::from_static("/hidden");
        }
    }

    /// Notes the client and the action of a question that decides nothing.
    pub(crate) fn note_subject(&mut self, query: &Query<'_>, actions: Option<String>) {
        self.note_client(query);
        self.actions = actions;
    }

    /// Notes the client and the request that a decision is asked about.
    pub(crate) fn note_question(&mut self, query: &Query<'_>) {
        self.note_client(query);
        if query.method.is_some() || query.path.is_some() {
            self.asked = Some(AskedRequest {
                method: query.method.and_then(|method| method.parse().ok()),
                path: query.path.map(str::to_owned),
                host: query.host.map(str::to_owned),
            });
        }
    }

    /// Notes the reason for which there is no decision.
    pub(crate) fn note_rejection(&mut self, reason: RejectionReason) {
        self.refusal = Some(Refusal { limit: None, reason: reason.as_str(), retry_after: None, is_blocked: None });
    }

    /// Notes the decision about an inbound request.
    pub(crate) fn note_decision(
        &mut self,
        plan: &Plan,
        actions: MatchedActions,
        query: &Query<'_>,
        decision: &Decision,
    ) {
        match query.action {
            Some(action) => self.action = Some(EscapedText(action).to_string()),
            None => self.actions = plan.action_names(actions),
        }
        self.outcome = Some(match (decision.allowed, decision.shadow) {
            (true, false) => Outcome::Admitted,
            (true, true) => Outcome::Shadow,
            (false, _) => Outcome::Refused,
        });
        if !decision.allowed || decision.shadow {
            self.refusal = Some(Refusal {
                limit: decision.bound_by.map(|id| plan.limit_info(id).name().to_owned()),
                reason: decision.reason.as_str(),
                retry_after: decision.retry_after,
                is_blocked: Some(decision.blocked),
            });
        }
    }

    /// Notes the end of an outbound call that has a reply.
    pub(crate) fn note_reply(&mut self, stats: Option<CallStats>) {
        (self.outcome, self.call) = (Some(Outcome::Admitted), stats);
    }

    /// Notes the end of an outbound call without a reply. It was refused if nothing was sent.
    pub(crate) fn note_failed_call(&mut self, failed: &OutboundError) {
        let OutboundError::Call(call) = failed else {
            self.outcome = Some(Outcome::Failed);
            return;
        };
        let limit = match &call.kind {
            CallErrorKind::RateLimited { limit, .. } | CallErrorKind::QuotaSpent { limit, .. } => Some(limit.clone()),
            _ => None,
        };
        self.call = Some(call.stats);
        self.outcome = Some(if call.stats.attempts == 0 { Outcome::Refused } else { Outcome::Failed });
        let (reason, retry_after) = (call.to_body().error, call.retry_after());
        self.refusal = Some(Refusal { limit, reason, retry_after, is_blocked: Some(false) });
    }

    /// Notes the time from the decision to the head of the upstream's response.
    pub(crate) fn note_upstream_time(&mut self, time: Span) {
        self.upstream_time = Some(time);
    }

    pub(super) fn note_status(&mut self, status: http::StatusCode) {
        self.status = Some(status.as_u16());
        if status.is_success() {
            self.outcome.get_or_insert(Outcome::Answered);
        }
    }

    /// True if the body of a response isn't sent.
    pub(super) fn has_no_body(&self) -> bool {
        matches!(&self.request_line, Some((Method::HEAD, _)))
    }

    /// True unless it was admitted, or asked for no decision.
    pub(super) fn is_refusal(&self) -> bool {
        !matches!(self.outcome, Some(Outcome::Admitted | Outcome::Answered))
    }

    #[cold]
    pub(super) fn write(&self, now: Time) {
        let own = self.request_line.as_ref();
        let (method, path, host) = match &self.asked {
            Some(asked) => (asked.method.as_ref(), asked.path.as_deref(), asked.host.as_deref()),
            None => (
                own.map(|(method, _)| method),
                own.map(|(_, uri)| uri.path()),
                self.host.as_ref().and_then(|host| host.to_str().ok()),
            ),
        };
        let refusal = self.refusal.as_ref();
        let outcome = self.outcome.map_or("rejected", Outcome::as_str);
        tracing::info!(
            target: ACCESS_TARGET,
            listener = %self.listener,
            ip = %self.ip,
            key = self.key.as_deref().map(display),
            method = method.map(|method| display(EscapedText(method.as_str()))),
            path = path.map(EncodedPath).map(display),
            host = host.map(EscapedText).map(display),
            status = self.status,
            outcome = %outcome,
            action = self.action.as_deref().map(display),
            actions = self.actions.as_deref().map(display),
            limit = refusal.and_then(|refusal| refusal.limit.as_deref()).map(display),
            reason = refusal.map(|refusal| display(refusal.reason)),
            retry_after = refusal.and_then(|refusal| refusal.retry_after).map(Span::as_secs_ceil),
            blocked = refusal.and_then(|refusal| refusal.is_blocked),
            attempts = self.call.map(|call| call.attempts),
            waited_us = self.call.map(|call| call.waited.as_micros()),
            upstream_us = self.upstream_time.map(Span::as_micros),
            duration_us = now.since(self.began_at).as_micros(),
            bytes = self.bytes,
            aborted = Some(true).filter(|_| self.is_aborted),
            trace_id = self.trace_id.as_deref().map(display),
            "request"
        );
    }
}

/// A path without its query string, in a form that a URL can have.
struct EncodedPath<'a>(&'a str);

impl fmt::Display for EncodedPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.0.split(['?', '#']).next().unwrap_or(self.0);
        let mut left = MAX_PATH_BYTES;
        for part in utf8_percent_encode(path, ENCODED) {
            let part = part.get(..left.min(part.len())).unwrap_or_default();
            f.write_str(part)?;
            left -= part.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_encoded_and_shortened() {
        let shown = |path: &str| EncodedPath(path).to_string();
        assert_eq!(shown("/a/%41;v=1/ü\n\"\\?token=s3cret"), "/a/%41;v=1/%C3%BC%0A%22%5C");
        assert_eq!(shown("/a\u{1b}[2J#b"), "/a%1B[2J");
        assert_eq!(shown(&"/".repeat(1 << 20)).len(), MAX_PATH_BYTES);
    }
}
