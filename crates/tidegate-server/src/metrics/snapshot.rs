//! The values of all metrics at one time, and as JSON.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};
use tidegate::outbound::cache::CacheStatus;
use tidegate::outbound::{DurationReport, ProviderReport};
use tidegate::policy::Plan;
use tidegate::store::Losses;
use tidegate::{DecisionCount, DecisionOutcome, Time};
use tidegate_core::DurationHistogram;
use tidegate_core::time::UtcText;

use crate::alerts::SinkResult;
use crate::fleet::FleetReport;
use crate::rejections::RejectionReason;
use crate::tls::CertificateReport;
use crate::upstream::UpstreamError;

/// The classes of HTTP statuses.
pub(super) const STATUS_CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// The values of all metrics at one time.
pub(crate) struct ServerSnapshot {
    pub(crate) plan: Arc<Plan>,
    pub(crate) started_at: Time,
    /// False if the policy turns metrics off.
    pub(crate) has_metrics: bool,
    pub(crate) connections: Vec<(&'static str, usize)>,
    pub(crate) decisions: Vec<DecisionCount>,
    pub(crate) rejections: [u64; RejectionReason::COUNT],
    pub(crate) decision_times: DurationHistogram,
    pub(crate) store_times: DurationHistogram,
    /// The permits that are kept for calls whose clients went away.
    pub(crate) kept_permits: usize,
    /// The connections that are observed for them.
    pub(crate) observed_calls: usize,
    /// The calls that are finished without their clients.
    pub(crate) finishing_calls: usize,
    /// Failed reloads of the policy, and those that succeeded.
    pub(crate) reloads: [u64; 2],
    pub(crate) is_last_reload_ok: bool,
    pub(crate) certificates: Vec<CertificateReport>,
    pub(crate) dropped_log_lines: u64,
    /// Checks that the store failed to decide: those without a decision, and those decided without it.
    pub(crate) store_errors: [u64; 2],
    /// The name of the store while it is away.
    pub(crate) lost_store: Option<String>,
    pub(crate) fleet: FleetReport,
    pub(crate) store_losses: [u64; Losses::KINDS.len()],
    pub(crate) upstream_times: DurationHistogram,
    pub(crate) upstream_replies: [u64; STATUS_CLASSES.len()],
    pub(crate) upstream_failures: [u64; UpstreamError::REASONS.len()],
    /// For each provider, a count for each [`CacheStatus`].
    pub(crate) cache_results: Vec<u64>,
    /// For each alert and each of its receivers, a count for each [`SinkResult`].
    pub(crate) alerts: Vec<(String, &'static str, [u64; SinkResult::NAMES.len()])>,
    pub(crate) providers: Vec<ProviderReport>,
}

impl ServerSnapshot {
    /// The number of decisions with this outcome since the start.
    pub(crate) fn decided(&self, outcome: DecisionOutcome) -> u64 {
        self.decisions.iter().filter(|found| found.outcome == outcome).map(|found| found.count).sum()
    }

    /// The state as JSON, with totals since the start. Without metrics, there are no decisions and no times.
    pub(super) fn json(&self, now: Time) -> Value {
        let by_limit = self.decisions.iter().map(|found| {
            json!({
                "action": found.action.map(|action| self.plan.action(action).name()),
                "limit": found.limit.map(|limit| self.plan.limit_info(limit).name()),
                "outcome": found.outcome.name(),
                "reason": found.reason,
                "count": found.count,
            })
        });
        let limits = self.plan.active_limits().map(|(id, limit)| {
            let info = self.plan.limit_info(id);
            json!({
                "name": info.name(),
                "action": info.action().map(|action| self.plan.action(action).name()),
                "words": info.description(),
                "shadow": limit.is_shadow(),
            })
        });
        let providers = self.providers.iter().zip(self.cache_results.chunks(CacheStatus::ALL.len()));
        let providers = providers.map(|(report, cache)| {
            let mut provider = json!(report);
            provider["cache"] = json!(counts(CacheStatus::ALL.map(CacheStatus::name), cache));
            provider
        });
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "started_at": UtcText::rounded_down(self.started_at).to_string(),
            "now": UtcText::rounded_down(now).to_string(),
            "uptime": now.since(self.started_at).as_secs_ceil(),
            "connections": self.connections.iter().copied().collect::<BTreeMap<_, _>>(),
            "metrics": self.has_metrics,
            "decisions": {
                "allowed": self.decided(DecisionOutcome::Allowed),
                "refused": self.decided(DecisionOutcome::Refused),
                "shadow": self.decided(DecisionOutcome::Shadow),
                "time": DurationReport::from(&self.decision_times),
                "by_limit": by_limit.collect::<Vec<_>>(),
            },
            "rejections": counts(RejectionReason::ALL.map(RejectionReason::as_str), &self.rejections),
            "reloads": { "failed": self.reloads[0], "ok": self.reloads[1], "last_ok": self.is_last_reload_ok },
            "limits": limits.collect::<Vec<_>>(),
            "store": {
                "up": self.lost_store.is_none(),
                "lost": self.lost_store,
                "time": DurationReport::from(&self.store_times),
                "errors": self.store_errors.iter().sum::<u64>(),
                "losses": counts(Losses::KINDS, &self.store_losses),
            },
            "fleet": self.fleet.summary(),
            "upstream": {
                "time": DurationReport::from(&self.upstream_times),
                "replies": counts(STATUS_CLASSES, &self.upstream_replies),
                "failures": counts(UpstreamError::REASONS, &self.upstream_failures),
            },
            "providers": providers.collect::<Vec<_>>(),
        })
    }
}

/// Counts by their names.
fn counts<const N: usize>(names: [&'static str; N], counts: &[u64]) -> BTreeMap<&'static str, u64> {
    names.into_iter().zip(counts.iter().copied()).collect()
}
