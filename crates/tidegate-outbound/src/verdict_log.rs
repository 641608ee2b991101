//! The log of verdicts: each kind once, and waits that are longer than the longest pause.

use std::collections::HashSet;

use http::StatusCode;
use parking_lot::Mutex;
use tidegate_core::{Class, Span, Time};
use tidegate_policy::verdict::{Classified, RuleName};
use tidegate_runtime::log_throttle::LogThrottle;

/// The most kinds of verdicts that are remembered. Further ones aren't logged.
const MAX_KINDS: usize = 256;
/// The maximum number of lines per second about long waits.
const LINES_PER_SECOND: u32 = 1;

/// A kind of a verdict.
type Kind = (u16, Class, Option<RuleOrder>);
type RuleOrder = (u8, usize);

/// The kinds of verdicts that were logged.
pub(super) struct VerdictLog {
    kinds: Mutex<HashSet<Kind>>,
    throttle: LogThrottle,
}

impl Default for VerdictLog {
    fn default() -> Self {
        Self { kinds: Mutex::default(), throttle: LogThrottle::new(LINES_PER_SECOND) }
    }
}

impl VerdictLog {
    /// Logs the verdict on a reply, if it is the first of its kind and no plain success, and a wait that was cut.
    #[inline]
    pub(super) fn note(&self, provider: &str, status: StatusCode, found: &Classified, now: Time) {
        if found.verdict.class != Class::Success || found.rule.is_some() {
            self.note_kind(provider, status, found);
        }
        if let Some(asked) = found.cut_wait {
            self.warn(provider, asked, found, now);
        }
    }

    #[cold]
    fn note_kind(&self, provider: &str, status: StatusCode, found: &Classified) {
        let order = |name: RuleName| (name.origin as u8, name.number);
        let kind = (status.as_u16(), found.verdict.class, found.rule.map(order));
        {
            let kinds = &mut *self.kinds.lock();
            if kinds.len() >= MAX_KINDS || !kinds.insert(kind) {
                return;
            }
        }
        let rule = found.rule.map_or_else(|| "the status and the usual headers".to_owned(), |rule| rule.to_string());
        let wait = found.verdict.announced_wait().map(Span::as_secs_f64);
        let (status, class, scope) = (status.as_u16(), found.verdict.class.name(), found.scope_name.as_deref());
        tracing::debug!(provider, status, class, rule, wait, scope, "a reply was understood");
    }

    #[cold]
    fn warn(&self, provider: &str, asked: Span, found: &Classified, now: Time) {
        if let Some(suppressed) = self.throttle.admit(now) {
            let (header, asked) = (found.wait_header.as_ref().map(http::HeaderName::as_str), asked.as_secs_ceil());
            let waits = found.verdict.wait.map_or(0, Span::as_secs_ceil);
            tracing::warn!(
                provider,
                header,
                asked,
                waits,
                suppressed,
                "a reply asks for a longer pause than `max_pause`"
            );
        }
    }
}
