//! The log of the changes that operators ask for on the admin listener.

use std::net::SocketAddr;

use http::StatusCode;
use tidegate::policy::Query;
use tidegate::{Span, Time};
use tidegate_runtime::log_throttle::LogThrottle;
use tracing::field::display;

use crate::log::{EscapedText, MaskedKey};
use crate::refusal_log::escaped_path;

/// Logs every change that was made, and a limited number of those that were refused or have failed.
pub(crate) struct AuditLog {
    refused_throttle: LogThrottle,
}

/// The request for a change. Headers and other parts of the query that may be secrets are left out.
pub(crate) struct AuditEntry<'a> {
    /// The name of the operator's token.
    pub(crate) token: &'a str,
    /// The address of the operator.
    pub(crate) peer: SocketAddr,
    /// `reset`, `block` …
    pub(crate) change: &'a str,
    /// The client that it is about.
    pub(crate) query: Query<'a>,
    /// The length of a block.
    pub(crate) span: Option<Span>,
    /// The provider that it is about.
    pub(crate) provider: Option<&'a str>,
    /// The alert that it is about.
    pub(crate) alert: Option<&'a str>,
    /// The status of the response.
    pub(crate) status: StatusCode,
}

impl AuditLog {
    /// Returns a log of at most `lines` about refused changes in any second.
    pub(crate) fn new(lines: u32) -> Self {
        Self { refused_throttle: LogThrottle::new(lines) }
    }

    /// Logs a change, unless it was refused and the limit on lines is reached.
    pub(crate) fn log(&self, now: Time, entry: &AuditEntry<'_>) {
        let &AuditEntry { token, change, ref query, status, .. } = entry;
        let peer = display(entry.peer);
        let escaped = |text: Option<&'_ str>| text.map(|text| display(EscapedText(text).to_string()));
        let (action, provider) = (escaped(query.action), escaped(entry.provider));
        let key = query.key.map(MaskedKey).map(display);
        let alert = escaped(entry.alert);
        let path = query.path.map(escaped_path).map(display);
        let (ip, span, status_code) = (query.ip.map(display), entry.span.map(display), status.as_u16());
        if status.is_success() {
            tracing::info!(
                token,
                peer,
                change,
                action,
                path,
                ip,
                key,
                span,
                provider,
                alert,
                status = status_code,
                "admin: changed"
            );
        } else if let Some(suppressed) = self.refused_throttle.admit(now) {
            tracing::warn!(
                token,
                peer,
                change,
                action,
                path,
                ip,
                key,
                span,
                provider,
                alert,
                status = status_code,
                suppressed,
                "admin: not changed"
            );
        }
    }

    /// Logs the number of lines that weren't written since the last summary.
    pub(crate) fn log_summary(&self) {
        if let suppressed @ 1.. = self.refused_throttle.take_suppressed() {
            tracing::warn!(suppressed, "admin: not changed, not logged one by one");
        }
    }
}
