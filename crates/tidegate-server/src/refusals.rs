//! One log line a refusal at most, and not more than so many a second.

use std::fmt;
use std::time::Duration;

use tidegate::core::Time;
use tidegate::outbound::Happened;
use tidegate::{Actions, Decision, Plan, Query};

use crate::log::{Escaped, Masked, Throttle, Told};
use crate::rejections::{Rejected, Rejections};

/// How often suppressed lines are summed up, when no line came after them.
const SUM_UP_EVERY: Duration = Duration::from_secs(5);

/// What is logged of refusals, and of failures while asking, forwarding or calling others.
pub(crate) struct Refusals {
    throttle: Throttle,
    failures: Throttle,
    rejected: Throttle,
    rejections: Rejections,
}

/// A refusal (or one that shadow mode let pass).
pub(crate) struct Refusal<'a> {
    pub(crate) actions: Actions,
    pub(crate) query: &'a Query<'a>,
    pub(crate) decision: &'a Decision,
}

/// A call to somebody else's API that has no reply to be passed on.
pub(crate) struct Failed<'a> {
    pub(crate) provider: &'a str,
    /// The reason with its causes. It never tells a credential, nor what was asked for.
    pub(crate) why: &'a str,
    pub(crate) happened: Option<Happened>,
}

impl Refusals {
    /// At most `lines` of each kind in any second.
    pub(crate) fn new(lines: u32) -> Self {
        Self {
            throttle: Throttle::new(lines),
            failures: Throttle::new(lines),
            rejected: Throttle::new(lines),
            rejections: Rejections::default(),
        }
    }

    /// Writes a line, if there is room for one.
    pub(crate) fn note(&self, plan: &Plan, refusal: &Refusal<'_>) {
        if let Some(suppressed) = self.throttle.admit(refusal.decision.now) {
            write(plan, refusal, suppressed);
        }
    }

    /// Counts a request that nothing is decided about, and writes a line if there is room for one.
    #[cold]
    pub(crate) fn note_rejected(&self, now: Time, reason: Rejected, query: &Query<'_>, why: &str) {
        let total = self.rejections.count(reason);
        let Some(suppressed) = self.rejected.admit(now) else { return };
        let host = query.host.map(Escaped);
        let path = query.path.map(|path| Escaped(path.split('?').next().unwrap_or(path)));
        tracing::info!(
            reason = reason.as_str(),
            why = %Escaped(why),
            total,
            ip = query.ip.map(tracing::field::display),
            host = host.map(tracing::field::display),
            path = path.map(tracing::field::display),
            suppressed,
            "rejected"
        );
    }

    /// Writes a line about something that broke, if there is room for one.
    pub(crate) fn note_failure(&self, now: Time, failure: &dyn fmt::Display) {
        if let Some(suppressed) = self.failures.admit(now) {
            tracing::warn!(suppressed, "{failure}");
        }
    }

    /// Writes a line about a call without a reply, if there is room for one.
    pub(crate) fn note_failed(&self, now: Time, failed: &Failed<'_>) {
        let Some(suppressed) = self.failures.admit(now) else { return };
        let Failed { provider, why, happened } = failed;
        let attempts = happened.map(|happened| happened.attempts);
        tracing::warn!(provider, attempts, why = %Told(why), suppressed, "a call failed");
    }

    /// Sums up what was suppressed; runs for ever.
    pub(crate) async fn run(&self) {
        loop {
            tokio::time::sleep(SUM_UP_EVERY).await;
            let suppressed = self.throttle.take_suppressed();
            if suppressed > 0 {
                tracing::info!(suppressed, "refusals not logged one by one");
            }
            let suppressed = self.failures.take_suppressed();
            if suppressed > 0 {
                tracing::warn!(suppressed, "failures not logged one by one");
            }
            let suppressed = self.rejected.take_suppressed();
            if suppressed > 0 {
                tracing::info!(suppressed, "rejected requests not logged one by one");
            }
        }
    }
}

#[cold]
fn write(plan: &Plan, refusal: &Refusal<'_>, suppressed: u64) {
    let Refusal { actions, query, decision } = refusal;
    let action = plan.names(*actions);
    let limit = decision.bound_by.map(|id| plan.info(id).name());
    let path = query.path.map(|path| Escaped(path.split('?').next().unwrap_or(path)));
    let method = query.method.map(Escaped);
    let key = query.key.map(Masked);
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
