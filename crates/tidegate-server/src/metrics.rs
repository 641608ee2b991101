//! The measurements of a running server, and their exposition for Prometheus.

mod catalogue;
mod exposition;
mod snapshot;

use std::array;
use std::sync::Arc;

use tidegate::outbound::cache::CacheStatus;
use tidegate::outbound::{Outbound, ProviderReport};
use tidegate::store::{Losses, Store};
use tidegate::{CheckError, Gate, Time};
use tidegate_core::Clock;
use tidegate_runtime::counters::{Counters, SharedHistogram};

pub use self::catalogue::{METRICS, MetricInfo, MetricKind};
use self::exposition::Exposition;
pub(crate) use self::exposition::TextFormat;
use self::snapshot::{STATUS_CLASSES, ServerSnapshot};
use crate::refusal_log::RefusalLog;
use crate::upstream::UpstreamError;
use crate::watchdog::Watchdog;

/// The counts and times of the requests that pass through the server, beside the decisions of its gate and the calls of its
/// providers.
pub(crate) struct RequestMetrics {
    /// False if the policy turns metrics off. Times aren't measured then; rare failures are counted all the same.
    is_enabled: bool,
    decision_times: SharedHistogram,
    store_times: SharedHistogram,
    store_errors: Counters,
    store_losses: Counters,
    upstream_times: SharedHistogram,
    upstream_replies: Counters,
    upstream_failures: Counters,
    /// For each provider, in file order, a counter for each [`CacheStatus`].
    cache_results: Counters,
}

impl RequestMetrics {
    /// Returns the metrics of a server with this number of providers.
    pub(crate) fn new(is_enabled: bool, providers: usize) -> Self {
        Self {
            is_enabled,
            decision_times: SharedHistogram::default(),
            store_times: SharedHistogram::default(),
            store_errors: Counters::new(1),
            store_losses: Counters::new(Losses::KINDS.len()),
            upstream_times: SharedHistogram::default(),
            upstream_replies: Counters::new(STATUS_CLASSES.len()),
            upstream_failures: Counters::new(UpstreamError::REASONS.len()),
            cache_results: Counters::new(providers * CacheStatus::ALL.len()),
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

    /// Counts a check without a decision, if the store is the reason.
    #[cold]
    pub(crate) fn record_check_error(&self, error: &CheckError) {
        if matches!(error, CheckError::Store(_)) {
            self.store_errors.add(0, 1);
        }
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

    pub(crate) fn record_cache(&self, provider: usize, status: CacheStatus) {
        self.cache_results.add(provider * CacheStatus::ALL.len() + status as usize, 1);
    }
}

/// All that a metrics page reads.
pub(crate) struct MetricsSource<S: Store, C: Clock> {
    pub(crate) gate: Gate<S, C>,
    pub(crate) providers: Option<Outbound<S, C>>,
    pub(crate) requests: Arc<RequestMetrics>,
    pub(crate) refusals: Arc<RefusalLog>,
    /// The connections of each listener, by its section in the policy.
    pub(crate) listeners: Vec<(&'static str, Arc<Watchdog>)>,
    pub(crate) started_at: Time,
}

impl<S: Store, C: Clock + Clone> MetricsSource<S, C> {
    /// The metrics page. `None` if the policy turns metrics off.
    pub(crate) async fn page(&self, format: TextFormat) -> Option<String> {
        if self.requests.is_enabled { Some(Exposition::text(self.snapshot().await, format)) } else { None }
    }

    /// The present state as JSON.
    pub(crate) async fn state(&self) -> serde_json::Value {
        self.snapshot().await.json(self.gate.clock().now())
    }

    /// The present state of each provider.
    pub(crate) async fn providers(&self) -> Vec<ProviderReport> {
        let mut reports = Vec::new();
        for provider in self.providers.iter().flat_map(Outbound::providers) {
            reports.push(provider.report().await);
        }
        reports
    }

    async fn snapshot(&self) -> ServerSnapshot {
        let providers = self.providers().await;
        let (gate, requests) = (&self.gate, &self.requests);
        let cache_results =
            (0..providers.len() * CacheStatus::ALL.len()).map(|index| requests.cache_results.get(index));
        ServerSnapshot {
            plan: Arc::clone(gate.plan()),
            started_at: self.started_at,
            has_metrics: requests.is_enabled,
            decisions: gate.decision_counts(),
            rejections: self.refusals.rejection_counts(),
            decision_times: requests.decision_times.snapshot(),
            store_times: requests.store_times.snapshot(),
            store_errors: requests.store_errors.get(0),
            lost_store: gate.store().outage().map(str::to_owned),
            store_losses: array::from_fn(|index| requests.store_losses.get(index)),
            upstream_times: requests.upstream_times.snapshot(),
            upstream_replies: array::from_fn(|index| requests.upstream_replies.get(index)),
            upstream_failures: array::from_fn(|index| requests.upstream_failures.get(index)),
            connections: self.listeners.iter().map(|(name, watchdog)| (*name, watchdog.len())).collect(),
            cache_results: cache_results.collect(),
            providers,
        }
    }
}
