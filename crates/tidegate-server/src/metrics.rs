//! The measurements of a running server, and their exposition for Prometheus.

mod catalogue;
mod exposition;
mod history;
mod snapshot;

use std::array;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tidegate::outbound::cache::CacheStatus;
use tidegate::outbound::{Outbound, Provider, ProviderReport};
use tidegate::store::{Losses, Store};
use tidegate::{CheckError, DecisionOutcome, Gate, Time};
use tidegate_core::Clock;
use tidegate_runtime::counters::{Counters, SharedHistogram};

pub use self::catalogue::{METRICS, MetricInfo, MetricKind};
use self::exposition::Exposition;
pub(crate) use self::exposition::TextFormat;
pub(crate) use self::history::{History, LimitRefusals, MAX_SAMPLES, Rates, Totals};
use self::snapshot::STATUS_CLASSES;
pub(crate) use self::snapshot::ServerSnapshot;
use crate::alerts::AlertSet;
use crate::fleet::FleetReport;
use crate::log::dropped_lines;
use crate::states::{Engine, SharedParts};
use crate::upstream::{UpstreamError, observed_calls};

/// The counts and times of the requests that pass through the server, beside the decisions of its gate and the calls of its
/// providers.
pub(crate) struct RequestMetrics {
    /// False if the policy turns metrics off. Times aren't measured then; rare failures are counted all the same.
    is_enabled: bool,
    decision_times: SharedHistogram,
    store_times: SharedHistogram,
    store_errors: Counters,
    /// Failed reloads of the policy, and those that succeeded.
    reloads: Counters,
    is_last_reload_ok: AtomicBool,
    store_losses: Counters,
    upstream_times: SharedHistogram,
    upstream_replies: Counters,
    upstream_failures: Counters,
    /// For each provider by its name, a counter for each [`CacheStatus`].
    cache_results: Mutex<HashMap<String, Counters>>,
}

impl RequestMetrics {
    pub(crate) fn new(is_enabled: bool) -> Self {
        Self {
            is_enabled,
            decision_times: SharedHistogram::default(),
            store_times: SharedHistogram::default(),
            store_errors: Counters::new(1),
            reloads: Counters::new(2),
            is_last_reload_ok: AtomicBool::new(true),
            store_losses: Counters::new(Losses::KINDS.len()),
            upstream_times: SharedHistogram::default(),
            upstream_replies: Counters::new(STATUS_CLASSES.len()),
            upstream_failures: Counters::new(UpstreamError::REASONS.len()),
            cache_results: Mutex::default(),
        }
    }

    /// Records that a decision was made, and returns the present time. Without metrics it returns `started_at`.
    #[inline]
    pub(crate) fn record_decision(&self, started_at: Time, clock: &impl Clock) -> Time {
        if !self.is_enabled {
            return started_at;
        }
        let now = clock.now();
        self.decision_times.record(now.since(started_at));
        now
    }

    /// Records the end of the wait for the store, and returns the present time. Without a decision, nothing is recorded.
    pub(crate) fn record_store_decision(&self, started_at: Time, is_decided: bool, clock: &impl Clock) -> Time {
        if !is_decided {
            return started_at;
        }
        let now = self.record_decision(started_at, clock);
        if self.is_enabled {
            self.store_times.record(now.since(started_at));
        }
        now
    }

    /// Counts a check without a decision, if the store is the reason. Those with a decision are counted by the store.
    #[cold]
    pub(crate) fn record_check_error(&self, error: &CheckError) {
        if matches!(error, CheckError::Store(_)) {
            self.store_errors.add(0, 1);
        }
    }

    pub(crate) fn record_reload(&self, is_ok: bool) {
        self.reloads.add(usize::from(is_ok), 1);
        self.is_last_reload_ok.store(is_ok, Ordering::Relaxed);
    }

    pub(crate) fn record_losses(&self, losses: &Losses) {
        for (index, count) in losses.counts().into_iter().enumerate() {
            self.store_losses.add(index, count);
        }
    }

    /// Records the head of a reply of the upstream to a request that was sent at `sent_at`.
    #[inline]
    pub(crate) fn record_upstream_reply(&self, sent_at: Time, status: http::StatusCode, clock: &impl Clock) {
        if self.is_enabled {
            self.upstream_times.record(clock.now().since(sent_at));
            // A status beyond 599 counts as 5xx, as for providers.
            self.upstream_replies.add(usize::from(status.as_u16() / 100).clamp(1, STATUS_CLASSES.len()) - 1, 1);
        }
    }

    pub(crate) fn record_upstream_failure(&self, failure: &UpstreamError) {
        self.upstream_failures.add(failure.reason_index(), 1);
    }

    /// True if there was no reload yet, or the last one succeeded.
    pub(crate) fn is_last_reload_ok(&self) -> bool {
        self.is_last_reload_ok.load(Ordering::Relaxed)
    }

    /// The counters of the [`CacheStatus`]es of one provider.
    pub(crate) fn cache_results(&self, provider: &str) -> Counters {
        let mut all = self.cache_results.lock();
        all.entry(provider.to_owned()).or_insert_with(|| Counters::new(CacheStatus::ALL.len())).clone()
    }
}

/// All that a metrics page reads.
pub(crate) struct MetricsSource<S: Store, C: Clock> {
    pub(crate) gate: Gate<S, C>,
    pub(crate) providers: Option<Outbound<S, C>>,
    pub(crate) alerts: Arc<AlertSet>,
    pub(crate) parts: Arc<SharedParts>,
}

impl<S: Store, C: Clock + Clone> MetricsSource<S, C> {
    pub(crate) fn new(engine: &Engine<S, C>, parts: &Arc<SharedParts>) -> Self {
        let Engine { gate, providers, alerts, .. } = engine;
        Self { gate: gate.clone(), providers: providers.clone(), alerts: Arc::clone(alerts), parts: Arc::clone(parts) }
    }

    /// The metrics page. `None` if the policy turns metrics off.
    pub(crate) async fn page(&self, format: TextFormat) -> Option<String> {
        if self.parts.metrics.is_enabled { Some(Exposition::text(self.snapshot().await, format)) } else { None }
    }

    /// Keeps the present totals for the history.
    pub(crate) fn record_history(&self) {
        let (requests, gate) = (&self.parts.metrics, &self.gate);
        let failed_calls = self.providers.iter().flat_map(Outbound::providers).flat_map(|provider| provider.failures());
        let upstream_failures = (0..UpstreamError::REASONS.len()).map(|index| requests.upstream_failures.get(index));
        let errors = self.store_errors().iter().sum::<u64>() + requests.upstream_replies.get(STATUS_CLASSES.len() - 1);
        let totals = Totals {
            admitted: gate.decision_total(DecisionOutcome::Allowed) + gate.decision_total(DecisionOutcome::Shadow),
            refused: gate.decision_total(DecisionOutcome::Refused),
            shadow: gate.decision_total(DecisionOutcome::Shadow),
            errors: errors + upstream_failures.chain(failed_calls).sum::<u64>(),
        };
        self.parts.history.record(gate.clock().now(), gate.plan(), totals, &gate.decision_counts());
    }

    /// The number of checks that the store failed to decide: those without a decision, and those decided without it.
    fn store_errors(&self) -> [u64; 2] {
        [self.parts.metrics.store_errors.get(0), self.gate.store().fallback_count()]
    }

    /// The present state as JSON.
    pub(crate) async fn state(&self) -> serde_json::Value {
        self.snapshot().await.json(self.gate.clock().now())
    }

    /// The nodes that share the store.
    pub(crate) fn fleet(&self) -> FleetReport {
        self.parts.fleet.report(self.gate.store().outage().is_some(), self.gate.clock().now())
    }

    /// The present state of each provider.
    pub(crate) async fn providers(&self) -> Vec<ProviderReport> {
        let mut reports = Vec::new();
        for provider in self.providers.iter().flat_map(Outbound::providers) {
            reports.push(provider.report().await);
        }
        reports
    }

    /// The present state of each provider without the use of its limits, which a store may have to be asked for.
    pub(crate) fn local_providers(&self) -> Vec<ProviderReport> {
        self.providers.iter().flat_map(Outbound::providers).map(Provider::local_report).collect()
    }

    /// The values of all metrics.
    async fn snapshot(&self) -> ServerSnapshot {
        self.snapshot_with(self.providers().await)
    }

    /// The values of all metrics, with these of the providers.
    pub(crate) fn snapshot_with(&self, providers: Vec<ProviderReport>) -> ServerSnapshot {
        let (gate, requests, parts) = (&self.gate, &*self.parts.metrics, &*self.parts);
        let connections = parts.connections.get().into_iter().flatten();
        let cache_results = providers.iter().flat_map(|provider| {
            let counters = requests.cache_results(&provider.name);
            CacheStatus::ALL.map(|status| counters.get(status as usize))
        });
        ServerSnapshot {
            plan: Arc::clone(gate.plan()),
            started_at: parts.started_at,
            has_metrics: requests.is_enabled,
            decisions: gate.decision_counts(),
            rejections: parts.refusals.rejection_counts(),
            decision_times: requests.decision_times.snapshot(),
            store_times: requests.store_times.snapshot(),
            kept_permits: gate.kept_permits(),
            observed_calls: observed_calls(),
            finishing_calls: gate.finishing_calls(),
            reloads: [0, 1].map(|result| requests.reloads.get(result)),
            is_last_reload_ok: requests.is_last_reload_ok(),
            certificates: parts.tls.get().into_iter().flatten().map(|tls| tls.report()).collect(),
            dropped_log_lines: dropped_lines(),
            store_errors: self.store_errors(),
            lost_store: gate.store().outage().map(str::to_owned),
            fleet: self.fleet(),
            store_losses: array::from_fn(|index| requests.store_losses.get(index)),
            upstream_times: requests.upstream_times.snapshot(),
            upstream_replies: array::from_fn(|index| requests.upstream_replies.get(index)),
            upstream_failures: array::from_fn(|index| requests.upstream_failures.get(index)),
            connections: connections.map(|(name, watchdog)| (*name, watchdog.len())).collect(),
            cache_results: cache_results.collect(),
            alerts: self.alerts.results(),
            providers,
        }
    }
}
