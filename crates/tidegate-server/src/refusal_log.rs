//! One log line a refusal at most, and not more than so many a second.

use std::fmt;
use std::time::Duration;

use tidegate::core::Time;
use tidegate::outbound::CallStats;
use tidegate::{Decision, MatchedActions, Plan, Query};

use crate::log::{EscapedError, EscapedText, LogThrottle, MaskedKey};
use crate::rejections::{RejectionCounts, RejectionReason};

/// How often suppressed lines are summed up, when no line came after them.
const SUMMARY_INTERVAL: Duration = Duration::from_secs(5);

/// What is logged of refusals, and of failures while asking, forwarding or calling others.
pub(crate) struct RefusalLog {
    refusal_throttle: LogThrottle,
    failure_throttle: LogThrottle,
    rejection_throttle: LogThrottle,
    rejection_counts: RejectionCounts,
}

/// A refusal (or one that shadow mode let pass).
pub(crate) struct RefusalRecord<'a> {
    pub(crate) actions: MatchedActions,
    pub(crate) query: &'a Query<'a>,
    pub(crate) decision: &'a Decision,
}

/// A call to somebody else's API that has no reply to be passed on.
pub(crate) struct FailedCall<'a> {
    pub(crate) provider: &'a str,
    /// The reason with its causes. It never tells a credential, nor what was asked for.
    pub(crate) why: &'a str,
    pub(crate) stats: Option<CallStats>,
}

impl RefusalLog {
    /// At most `lines` of each kind in any second.
    pub(crate) fn new(lines: u32) -> Self {
        Self {
            refusal_throttle: LogThrottle::new(lines),
            failure_throttle: LogThrottle::new(lines),
            rejection_throttle: LogThrottle::new(lines),
            rejection_counts: RejectionCounts::default(),
        }
    }

    /// Writes a line, if there is room for one.
    pub(crate) fn log_refusal(&self, plan: &Plan, refusal: &RefusalRecord<'_>) {
        if let Some(suppressed) = self.refusal_throttle.admit(refusal.decision.now) {
            write_refusal(plan, refusal, suppressed);
        }
    }

    /// Counts a request that nothing is decided about, and writes a line if there is room for one.
    #[cold]
    pub(crate) fn log_rejection(&self, now: Time, reason: RejectionReason, query: &Query<'_>, why: &str) {
        let total = self.rejection_counts.add(reason);
        let Some(suppressed) = self.rejection_throttle.admit(now) else { return };
        let host = query.host.map(EscapedText);
        let path = query.path.map(|path| EscapedText(path.split('?').next().unwrap_or(path)));
        tracing::info!(
            reason = reason.as_str(),
            why = %EscapedText(why),
            total,
            ip = query.ip.map(tracing::field::display),
            host = host.map(tracing::field::display),
            path = path.map(tracing::field::display),
            suppressed,
            "rejected"
        );
    }

    /// Writes a line about something that broke, if there is room for one.
    pub(crate) fn log_failure(&self, now: Time, failure: &dyn fmt::Display) {
        if let Some(suppressed) = self.failure_throttle.admit(now) {
            tracing::warn!(suppressed, "{failure}");
        }
    }

    /// Writes a line about a call without a reply, if there is room for one.
    pub(crate) fn log_failed_call(&self, now: Time, failed: &FailedCall<'_>) {
        let Some(suppressed) = self.failure_throttle.admit(now) else { return };
        let FailedCall { provider, why, stats: happened } = failed;
        let attempts = happened.map(|happened| happened.attempts);
        tracing::warn!(provider, attempts, why = %EscapedError(why), suppressed, "a call failed");
    }

    /// Sums up what was suppressed; runs for ever.
    pub(crate) async fn run(&self) {
        loop {
            tokio::time::sleep(SUMMARY_INTERVAL).await;
            let suppressed = self.refusal_throttle.take_suppressed();
            if suppressed > 0 {
                tracing::info!(suppressed, "refusals not logged one by one");
            }
            let suppressed = self.failure_throttle.take_suppressed();
            if suppressed > 0 {
                tracing::warn!(suppressed, "failures not logged one by one");
            }
            let suppressed = self.rejection_throttle.take_suppressed();
            if suppressed > 0 {
                tracing::info!(suppressed, "rejected requests not logged one by one");
            }
        }
    }
}

#[cold]
fn write_refusal(plan: &Plan, refusal: &RefusalRecord<'_>, suppressed: u64) {
    let RefusalRecord { actions, query, decision } = refusal;
    let action = plan.action_names(*actions);
    let limit = decision.bound_by.map(|id| plan.limit_info(id).name());
    let path = query.path.map(|path| EscapedText(path.split('?').next().unwrap_or(path)));
    let method = query.method.map(EscapedText);
    let key = query.key.map(MaskedKey);
    let ip = query.ip;
    tracing::info!(
        action = action.map(tracing::field::display),
        limit = limit.map(tracing::field::display),
        ip = ip.map(tracing::field::display),
        key = key.map(tracing::field::display),
        method = method.map(tracing::field::display),
        path = path.map(tracing::field::display),
        retry_after = decision.retry_after.map(|wait| wait.as_secs_ceil()),
        blocked = decision.blocked,
        shadow = decision.shadow,
        suppressed,
        "refused"
    );
}
