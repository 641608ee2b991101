//! The text of the metrics page.

use http::header::{ACCEPT, HeaderMap};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabel as _, EncodeLabelSet, LabelSetEncoder, MetricEncoder, NoLabelSet, prometheus_text,
    text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use std::fmt;
use tidegate::outbound::cache::CacheStatus;
use tidegate::outbound::{BreakerState, CallErrorKind, Class, CredentialStates, Lane};
use tidegate::store::Losses;
use tidegate_core::DurationHistogram;
use tidegate_core::histogram::BUCKET_BOUNDS;

use super::catalogue::*;
use super::snapshot::{STATUS_CLASSES, ServerSnapshot};
use crate::alerts::SinkResult;
use crate::fleet::NodeState;
use crate::rejections::RejectionReason;
use crate::upstream::UpstreamError;

/// A form of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TextFormat {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' older text format, for readers that ask for it.
    Prometheus,
}

impl TextFormat {
    /// The form that a reader asks for. OpenMetrics, unless it accepts plain text only.
    pub(crate) fn from_accept(headers: &HeaderMap) -> Self {
        let accepted = || headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let has = |kind: &str| accepted().any(|value| value.contains(kind));
        if has("text/plain") && !has("application/openmetrics-text") { Self::Prometheus } else { Self::OpenMetrics }
    }

    pub(crate) const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// A snapshot that is written as text.
pub(super) struct Exposition(ServerSnapshot);

impl fmt::Debug for Exposition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exposition").field("providers", &self.0.providers.len()).finish_non_exhaustive()
    }
}

impl Exposition {
    pub(super) fn text(snapshot: ServerSnapshot, format: TextFormat) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Self(snapshot)));
        let mut page = String::new();
        let written = match format {
            TextFormat::OpenMetrics => text::encode(&mut page, &registry),
            TextFormat::Prometheus => prometheus_text::encode(&mut page, &registry),
        };
        written.expect("invariant: all metrics fit their types, and a string takes any text");
        page
    }
}

impl Collector for Exposition {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let page = &mut Page(&mut encoder);
        let now = &self.0;
        page.info(&BUILD, [env!("CARGO_PKG_VERSION")])?;
        page.gauges(&START_TIME, [([], now.started_at.as_micros() as f64 / 1e6)])?;
        page.gauges(&CONNECTIONS, now.connections.iter().map(|(listener, open)| ([*listener], *open as f64)))?;
        now.encode_inbound(page)?;
        now.encode_providers(page)
    }
}

impl ServerSnapshot {
    fn encode_inbound(&self, page: &mut Page<'_, '_>) -> fmt::Result {
        let decisions = self.decisions.iter().map(|found| {
            let action = found.action.map_or("", |action| self.plan.action(action).name());
            let limit = found.limit.map_or("", |limit| self.plan.limit_info(limit).name());
            ([action, limit, found.outcome.name(), found.reason], found.count)
        });
        page.counters(&DECISIONS, decisions)?;
        let rejections = RejectionReason::ALL.iter().zip(self.rejections);
        page.counters(&REJECTIONS, rejections.map(|(reason, count)| ([reason.as_str()], count)))?;
        page.counters(
            &RELOADS,
            ["failed", "ok"].into_iter().zip(self.reloads).map(|(result, count)| ([result], count)),
        )?;
        page.gauges(&LAST_RELOAD, [([], if self.is_last_reload_ok { 1.0 } else { 0.0 })])?;
        let reloads = self.certificates.iter().flat_map(|of| {
            ["failed", "ok"].into_iter().zip(of.reloads).map(|(result, count)| ([of.listener, result], count))
        });
        page.counters(&CERTIFICATE_RELOADS, reloads)?;
        let files = self.certificates.iter().flat_map(|of| of.expiry.iter().map(|(file, at)| (of.listener, file, *at)));
        let expiry: Vec<_> = files.map(|(listener, file, at)| (listener, file.to_string_lossy(), at as f64)).collect();
        let expiry = expiry.iter().map(|(listener, file, at)| ([*listener, &**file], *at));
        page.gauges(&CERTIFICATE_EXPIRY, expiry)?;
        page.counters(&DROPPED_LOG_LINES, [([], self.dropped_log_lines)])?;
        page.histograms(&DECISION_TIME, [([], &self.decision_times)])?;
        page.gauges(&KEPT_PERMITS, [([], self.kept_permits as f64)])?;
        page.gauges(&OBSERVED_CALLS, [([], self.observed_calls as f64)])?;
        page.gauges(&FINISHING_CALLS, [([], self.finishing_calls as f64)])?;
        page.gauges(&STORE_UP, [([], if self.lost_store.is_none() { 1.0 } else { 0.0 })])?;
        page.histograms(&STORE_TIME, [([], &self.store_times)])?;
        let store_errors = ["none", "without_store"].into_iter().zip(self.store_errors);
        page.counters(&STORE_ERRORS, store_errors.map(|(decision, count)| ([decision], count)))?;
        page.counters(&STORE_LOSSES, Losses::KINDS.iter().zip(self.store_losses).map(|(kind, lost)| ([*kind], lost)))?;
        let nodes = NodeState::ALL.map(|state| ([state.name()], self.fleet.count(state) as f64));
        page.gauges(&FLEET_NODES, nodes)?;
        let alerts = self.alerts.iter().flat_map(|(alert, sink, counts)| {
            SinkResult::NAMES.iter().zip(counts).map(move |(result, count)| ([alert.as_str(), sink, *result], *count))
        });
        page.counters(&ALERTS, alerts)?;
        page.histograms(&UPSTREAM_TIME, [([], &self.upstream_times)])?;
        let replies = STATUS_CLASSES.iter().zip(self.upstream_replies);
        page.counters(&UPSTREAM_REPLIES, replies.map(|(class, count)| ([*class], count)))?;
        let failures = UpstreamError::REASONS.iter().zip(self.upstream_failures);
        page.counters(&UPSTREAM_FAILURES, failures.map(|(reason, count)| ([*reason], count)))
    }

    fn encode_providers(&self, page: &mut Page<'_, '_>) -> fmt::Result {
        let all = &self.providers;
        let lanes = || all.iter().flat_map(|of| of.lanes.iter().map(move |lane| ([of.name.as_str(), lane.lane], lane)));
        page.counters(&PROVIDER_CALLS, lanes().map(|(labels, lane)| (labels, lane.calls)))?;
        let failures = all.iter().flat_map(|of| {
            let count = move |reason| of.failures.get(reason).copied().unwrap_or(0);
            CallErrorKind::REASONS.into_iter().map(move |reason| ([of.name.as_str(), reason], count(reason)))
        });
        page.counters(&PROVIDER_FAILURES, failures)?;
        page.counters(&PROVIDER_FIRST_TRIES, all.iter().map(|of| ([of.name.as_str()], of.first_tries)))?;
        page.counters(&PROVIDER_RETRIES, all.iter().map(|of| ([of.name.as_str()], of.retries)))?;
        let attempts = all.iter().flat_map(|of| {
            let labels = move |class: Class| [of.name.as_str(), class.name()];
            Class::ALL.into_iter().map(move |class| (labels(class), of.stats.attempts[class as usize]))
        });
        page.counters(&PROVIDER_ATTEMPTS, attempts)?;
        page.histograms(&PROVIDER_REPLY_TIME, all.iter().map(|of| ([of.name.as_str()], &of.stats.reply_times)))?;
        let waits = all.iter().flat_map(|of| {
            Lane::ALL.into_iter().map(move |lane| ([of.name.as_str(), lane.name()], &of.stats.waits[lane as usize]))
        });
        page.histograms(&PROVIDER_WAIT, waits)?;
        page.gauges(&PROVIDER_WAITING, lanes().map(|(labels, lane)| (labels, lane.waiting as f64)))?;
        page.gauges(&PROVIDER_IN_FLIGHT, lanes().map(|(labels, lane)| (labels, f64::from(lane.in_flight))))?;
        let breakers = all.iter().flat_map(|of| {
            BreakerState::ALL.into_iter().map(move |state| {
                // A breaker that is off admits all calls, as a closed one.
                let is_closed = state == BreakerState::Closed && of.breaker.state == "off";
                let is_present = is_closed || state.name() == of.breaker.state;
                ([of.name.as_str(), state.name()], if is_present { 1.0 } else { 0.0 })
            })
        });
        page.gauges(&PROVIDER_BREAKER, breakers)?;
        let paused = all.iter().map(|of| ([of.name.as_str()], if of.paused { 1.0 } else { 0.0 }));
        page.gauges(&PROVIDER_PAUSED, paused)?;
        let credentials = all.iter().flat_map(|of| {
            let CredentialStates { usable, full, cooling, rejected, .. } = of.credential_states;
            [("usable", usable), ("full", full), ("cooling", cooling), ("rejected", rejected)]
                .map(|(state, count)| ([of.name.as_str(), state], count as f64))
        });
        page.gauges(&PROVIDER_CREDENTIALS, credentials)?;
        let numbers: Vec<Vec<String>> = all
            .iter()
            .map(|of| {
                let number = |index: usize| index.to_string();
                of.limits.iter().map(|usage| usage.credential.map_or_else(String::new, number)).collect()
            })
            .collect();
        let limits = || {
            all.iter().zip(&numbers).flat_map(|(of, numbers)| {
                let labelled = of.limits.iter().zip(numbers);
                labelled.map(move |(usage, number)| ([of.name.as_str(), usage.name.as_str(), number.as_str()], usage))
            })
        };
        page.gauges(&PROVIDER_LIMIT, limits().map(|(labels, usage)| (labels, usage.limit as f64)))?;
        page.gauges(&PROVIDER_REMAINING, limits().map(|(labels, usage)| (labels, usage.remaining as f64)))?;
        let budgets = all.iter().filter_map(|of| Some(([of.name.as_str()], of.retry_budget? as f64)));
        page.gauges(&PROVIDER_BUDGET, budgets)?;
        let adaptive = all.iter().filter_map(|of| Some(([of.name.as_str()], f64::from(of.adaptive_limit?))));
        page.gauges(&PROVIDER_ADAPTIVE, adaptive)?;
        let paces = all.iter().filter_map(|of| Some(([of.name.as_str()], of.pace_interval?)));
        page.gauges(&PROVIDER_PACE, paces)?;
        let cached = all.iter().zip(self.cache_results.chunks(CacheStatus::ALL.len())).flat_map(|(of, counts)| {
            let results = CacheStatus::ALL.into_iter().zip(counts);
            results.map(move |(status, count)| ([of.name.as_str(), status.name()], *count))
        });
        page.counters(&CACHE_RESULTS, cached)
    }
}

/// The page while it is written.
struct Page<'p, 'e>(&'p mut DescriptorEncoder<'e>);

/// The labels of a value: the metric's names, and its own values.
struct Labels<'a, const N: usize>(&'static MetricInfo, [&'a str; N]);

impl<const N: usize> EncodeLabelSet for Labels<'_, N> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        self.0.labels.iter().zip(self.1).try_for_each(|(name, value)| (*name, value).encode(encoder.encode_label()))
    }
}

impl Page<'_, '_> {
    fn values<'l, const N: usize, T>(
        &mut self,
        metric: &'static MetricInfo,
        values: impl IntoIterator<Item = ([&'l str; N], T)>,
        write: impl Fn(&mut MetricEncoder<'_>, &T) -> fmt::Result,
    ) -> fmt::Result {
        debug_assert_eq!(metric.labels.len(), N);
        let mut values = values.into_iter().peekable();
        if values.peek().is_none() {
            return Ok(());
        }
        let kind = match metric.kind {
            MetricKind::Counter => MetricType::Counter,
            MetricKind::Gauge => MetricType::Gauge,
            MetricKind::Histogram => MetricType::Histogram,
            MetricKind::Info => MetricType::Info,
        };
        let unit = metric.is_in_seconds.then_some(Unit::Seconds);
        let mut family = self.0.encode_descriptor(metric.name, metric.help, unit.as_ref(), kind)?;
        for (labels, value) in values {
            match N {
                0 => write(&mut family, &value)?,
                _ => write(&mut family.encode_family(&Labels(metric, labels))?, &value)?,
            }
        }
        Ok(())
    }

    fn info<const N: usize>(&mut self, metric: &'static MetricInfo, labels: [&str; N]) -> fmt::Result {
        let mut family = self.0.encode_descriptor(metric.name, metric.help, None, MetricType::Info)?;
        family.encode_info(&Labels(metric, labels))
    }

    fn counters<'l, const N: usize>(
        &mut self,
        metric: &'static MetricInfo,
        values: impl IntoIterator<Item = ([&'l str; N], u64)>,
    ) -> fmt::Result {
        self.values(metric, values, |encoder, count| encoder.encode_counter::<NoLabelSet, u64, f64>(count, None))
    }

    fn gauges<'l, const N: usize>(
        &mut self,
        metric: &'static MetricInfo,
        values: impl IntoIterator<Item = ([&'l str; N], f64)>,
    ) -> fmt::Result {
        self.values(metric, values, |encoder, value| encoder.encode_gauge(value))
    }

    fn histograms<'l, 'h, const N: usize>(
        &mut self,
        metric: &'static MetricInfo,
        values: impl IntoIterator<Item = ([&'l str; N], &'h DurationHistogram)>,
    ) -> fmt::Result {
        self.values(metric, values, |encoder, histogram| {
            let bounds = BUCKET_BOUNDS.iter().map(|bound| bound.as_secs_f64()).chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> = bounds.zip(histogram.counts().iter().copied()).collect();
            encoder.encode_histogram::<NoLabelSet>(histogram.sum().as_secs_f64(), histogram.count(), &buckets, None)
        })
    }
}
