//! The log of refusals and failures: at most one line each, and a limited number per second.

use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate::Decision;
use tidegate::outbound::CallStats;
use tidegate::policy::{MatchedActions, Plan, Query};
use tidegate_core::{LimitId, MAX_LIMITS, Time};
use tidegate_runtime::log_throttle::LogThrottle;
use tracing::field::display;

use crate::access_log::AccessSlot;
use crate::audit_log::AuditLog;
use crate::events::{Change, ServerEvent, ServerEvents};
use crate::local_response::HttpError;
use crate::log::{EscapedError, EscapedText, MaskedKey, dropped_lines};
use crate::refused_clients::{RefusedClients, shown_client};
use crate::rejections::RejectionReason;
use crate::trace_context::trace_parent;

/// The interval at which lines that weren't written are summed up.
const SUMMARY_INTERVAL: Duration = Duration::from_secs(5);
/// The maximum number of events about blocks in any second, and again about those in shadow mode, so that a flood doesn't displace other events.
const MAX_BLOCK_EVENTS: u32 = 5;
/// The maximum number of limits that a summary names, those with most refusals. Those of others are summed up.
const MAX_SUMMARY_LIMITS: usize = 32;

/// The log of refusals, of rejected requests, and of failures of the store, the upstream or providers.
pub(crate) struct RefusalLog {
    refusal_throttle: LogThrottle,
    /// The refusals that weren't logged one by one, for each limit that a policy can have, and at last those without a
    /// limit.
    unlogged_refusals: Box<[UnloggedRefusals]>,
    failure_throttle: LogThrottle,
    rejection_throttle: LogThrottle,
    /// The lines that had been dropped until the last summary.
    reported_dropped_lines: AtomicU64,
    /// The changes that operators ask for.
    pub(crate) audit: AuditLog,
    /// The clients that were refused.
    pub(crate) clients: RefusedClients,
    events: Arc<ServerEvents>,
    /// For blocks, and for those that shadow mode doesn't enforce.
    event_throttles: [LogThrottle; 2],
    /// The number of enforced blocks that have begun since the start, and of those from shadow mode that were enforced.
    begun_blocks: AtomicU64,
    /// The number of rejected requests for each reason since the start.
    rejection_counts: [AtomicU64; RejectionReason::COUNT],
}

#[derive(Default)]
struct UnloggedRefusals {
    enforced: AtomicU64,
    shadow: AtomicU64,
}

impl RefusalLog {
    /// Returns a log of at most `lines` of each kind in any second.
    pub(crate) fn new(lines: u32, events: Arc<ServerEvents>) -> Self {
        Self {
            refusal_throttle: LogThrottle::new(lines),
            unlogged_refusals: (0..=MAX_LIMITS).map(|_| UnloggedRefusals::default()).collect(),
            failure_throttle: LogThrottle::new(lines),
            rejection_throttle: LogThrottle::new(lines),
            reported_dropped_lines: AtomicU64::new(0),
            audit: AuditLog::new(lines),
            clients: RefusedClients::default(),
            events,
            event_throttles: [(); 2].map(|()| LogThrottle::new(MAX_BLOCK_EVENTS)),
            begun_blocks: AtomicU64::new(0),
            rejection_counts: Default::default(),
        }
    }

    /// Logs a refusal, or one that shadow mode admitted. If the limit on lines is reached, counts it for the next
    /// summary. A request that gets a line in the access log is only noted there.
    pub(crate) fn log_decision(
        &self,
        plan: &Plan,
        actions: MatchedActions,
        query: &Query<'_>,
        decision: &Decision,
        access: &AccessSlot,
    ) {
        let has_line = access.note(|entry| entry.note_decision(plan, actions, query, decision));
        if decision.allowed && !decision.shadow {
            return;
        }
        let is_enforced_now = self.clients.record(plan, query, decision);
        if decision.begins_block || is_enforced_now {
            self.publish_block(plan, query, decision, false);
        }
        if has_line {
            return;
        }
        if self.refusal_throttle.admit(decision.now).is_some() {
            return write_refusal(plan, actions, query, decision);
        }
        let index = decision.bound_by.map_or(MAX_LIMITS, LimitId::index);
        if let Some(unlogged) = self.unlogged_refusals.get(index) {
            let count = if decision.shadow { &unlogged.shadow } else { &unlogged.enforced };
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Notes a block that an operator has imposed.
    pub(crate) fn note_block(&self, plan: &Plan, query: &Query<'_>, decision: &Decision) {
        self.clients.record_block(plan, query, decision);
        self.publish_block(plan, query, decision, true);
    }

    /// Publishes that a block has begun, or that one from shadow mode is enforced since a reload.
    #[cold]
    fn publish_block(&self, plan: &Plan, query: &Query<'_>, decision: &Decision, by_operator: bool) {
        let Some(limit) = decision.bound_by else { return };
        if !decision.shadow {
            self.begun_blocks.fetch_add(1, Ordering::Relaxed);
        }
        let throttle = &self.event_throttles[usize::from(decision.shadow)];
        let Some(unpublished) = throttle.admit(decision.now) else { return };
        let change = Change::Blocked {
            limit: plan.limit_info(limit).name().to_owned(),
            ip: query.ip,
            client: shown_client(plan, limit, decision.key, query),
            key: decision.key,
            // The block of an operator may be shorter than that of its strikes.
            seconds: if by_operator { decision.retry_after } else { decision.backoff }
                .unwrap_or_default()
                .as_secs_ceil(),
            by_operator,
            strikes: decision.strikes,
            shadow: decision.shadow,
        };
        self.events.publish(ServerEvent::after_unpublished(decision.now, change, unpublished));
    }

    /// The number of enforced blocks that have begun since the start, published or not.
    pub(crate) fn begun_blocks(&self) -> u64 {
        self.begun_blocks.load(Ordering::Relaxed)
    }

    /// Counts a request that was rejected before any decision, notes the reason in its line of the access log, and logs
    /// it unless the limit on lines is reached.
    #[cold]
    pub(crate) fn log_rejection(
        &self,
        now: Time,
        reason: RejectionReason,
        query: &Query<'_>,
        why: &str,
        access: &AccessSlot,
    ) {
        let total = self.count_rejection(reason);
        access.note(|entry| entry.note_rejection(reason));
        let Some(suppressed) = self.rejection_throttle.admit(now) else { return };
        tracing::info!(
            reason = reason.as_str(),
            why = %EscapedText(why),
            total,
            ip = query.ip.map(display),
            host = query.host.map(EscapedText).map(display),
            path = query.path.map(escaped_path).map(display),
            suppressed,
            "rejected"
        );
    }

    /// Counts and logs the rejection of a request that isn't valid HTTP, or asks for what the gate doesn't do. Errors
    /// after the decision are none.
    #[cold]
    pub(crate) fn log_invalid_request(&self, now: Time, error: HttpError, query: &Query<'_>, access: &AccessSlot) {
        if let Some(reason) = RejectionReason::of_head_error(error) {
            self.log_rejection(now, reason, query, error.status_and_message().1, access);
        }
    }

    /// Counts a request that was rejected. Returns the number of those with this reason.
    pub(crate) fn count_rejection(&self, reason: RejectionReason) -> u64 {
        self.rejection_counts[reason as usize].fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The number of rejected requests for each reason since the start, in the order of [`RejectionReason::ALL`].
    pub(crate) fn rejection_counts(&self) -> [u64; RejectionReason::COUNT] {
        self.rejection_counts.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Logs a failure, unless the limit on lines is reached.
    pub(crate) fn log_failure(&self, now: Time, failure: &dyn fmt::Display) {
        if let Some(suppressed) = self.failure_throttle.admit(now) {
            tracing::warn!(suppressed, "{failure}");
        }
    }

    /// Logs a call without a reply, unless the limit on lines is reached. `why` is the reason with its causes. It never
    /// contains a credential or the requested path.
    pub(crate) fn log_failed_call(
        &self,
        now: Time,
        provider: &str,
        why: &str,
        stats: Option<CallStats>,
        traceparent: Option<&str>,
    ) {
        let Some(suppressed) = self.failure_throttle.admit(now) else { return };
        let attempts = stats.map(|stats| stats.attempts);
        let traceparent = traceparent.map(display);
        tracing::warn!(provider, attempts, why = %EscapedError(why), traceparent, suppressed, "a call failed");
    }

    /// Logs the lines that weren't written at every interval; never returns.
    pub(crate) async fn run(&self, plan: impl Fn() -> Arc<Plan>) {
        loop {
            tokio::time::sleep(SUMMARY_INTERVAL).await;
            self.log_summary(&plan());
        }
    }

    /// Logs the number of lines that weren't written since the last summary; refusals by limit.
    pub(crate) fn log_summary(&self, plan: &Plan) {
        let of_limits = plan.limits().iter().map(|(id, _)| (Some(id), &self.unlogged_refusals[id.index()]));
        let mut counts: Vec<(u64, bool, Option<LimitId>)> = of_limits
            .chain([(None, &self.unlogged_refusals[MAX_LIMITS])])
            .flat_map(|(id, unlogged)| [(&unlogged.enforced, false, id), (&unlogged.shadow, true, id)])
            .map(|(count, shadow, id)| (count.swap(0, Ordering::Relaxed), shadow, id))
            .filter(|(count, ..)| *count > 0)
            .collect();
        counts.sort_unstable_by_key(|(count, ..)| Reverse(*count));
        let rest = counts.split_off(counts.len().min(MAX_SUMMARY_LIMITS));
        for (count, shadow, id) in counts {
            let limit = id.map(|id| tracing::field::display(plan.limit_info(id).name()));
            tracing::info!(limit, shadow, count, "refused, not logged one by one");
        }
        for shadow in [false, true] {
            let count: u64 = rest.iter().filter(|found| found.1 == shadow).map(|found| found.0).sum();
            if count > 0 {
                tracing::info!(shadow, count, "refused by further limits, not logged one by one");
            }
        }
        if let suppressed @ 1.. = self.failure_throttle.take_suppressed() {
            tracing::warn!(suppressed, "failures not logged one by one");
        }
        if let suppressed @ 1.. = self.rejection_throttle.take_suppressed() {
            tracing::info!(suppressed, "rejected requests not logged one by one");
        }
        // The total, because this line can be dropped too; it is counted then, and the next summary reports again.
        let total = dropped_lines();
        if total > self.reported_dropped_lines.swap(total, Ordering::Relaxed) {
            tracing::warn!(total, "log lines were dropped, because standard error didn't take them");
        }
        self.audit.log_summary();
    }
}

#[cold]
fn write_refusal(plan: &Plan, actions: MatchedActions, query: &Query<'_>, decision: &Decision) {
    tracing::info!(
        action = plan.action_names(actions).map(display),
        limit = decision.bound_by.map(|id| display(plan.limit_info(id).name())),
        reason = decision.reason.as_str(),
        ip = query.ip.map(display),
        key = query.key.map(MaskedKey).map(display),
        method = query.method.map(EscapedText).map(display),
        path = query.path.map(escaped_path).map(display),
        retry_after = decision.retry_after.map(|wait| wait.as_secs_ceil()),
        blocked = decision.blocked,
        shadow = decision.shadow,
        traceparent = query.headers.and_then(trace_parent).map(display),
        "{}",
        if decision.shadow { "would refuse" } else { "refused" }
    );
}

/// Returns a path without its query string, safe to log.
pub(crate) fn escaped_path(path: &str) -> EscapedText<'_> {
    EscapedText(path.split('?').next().unwrap_or(path))
}
