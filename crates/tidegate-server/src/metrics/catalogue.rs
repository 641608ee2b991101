//! The metrics: names, kinds, labels and meanings. `docs/metrics.md` is written from this list.

/// The kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// A number that only grows. Its name on the page ends in `_total`.
    Counter,
    /// A number that also falls.
    Gauge,
    /// Durations in buckets.
    Histogram,
    /// A constant 1 with labels. Its name on the page ends in `_info`.
    Info,
}

impl MetricKind {
    /// The end of the name of a metric of this kind.
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Info => "_info",
            Self::Gauge | Self::Histogram => "",
        }
    }
}

/// A metric.
#[derive(Clone, Copy, Debug)]
pub struct MetricInfo {
    /// The name, without the unit and the end that its kind adds.
    pub name: &'static str,
    /// The kind.
    pub kind: MetricKind,
    /// True if it is in seconds, which its name then says.
    pub is_in_seconds: bool,
    /// The names of its labels.
    pub labels: &'static [&'static str],
    /// The meaning.
    pub help: &'static str,
}

impl MetricInfo {
    /// The complete name, as Prometheus stores it; for a histogram without `_bucket`, `_sum` and `_count`.
    pub fn full_name(&self) -> String {
        let unit = if self.is_in_seconds { "_seconds" } else { "" };
        format!("{}{unit}{}", self.name, self.kind.suffix())
    }
}

macro_rules! metrics {
    ($($(#[$unit:ident])? $id:ident: $kind:ident $name:literal [$($label:literal),*] $help:literal;)+) => {
        $(pub(super) static $id: MetricInfo = MetricInfo {
            name: concat!("tidegate_", $name),
            kind: MetricKind::$kind,
            is_in_seconds: metrics!(@unit $($unit)?),
            labels: &[$($label),*],
            help: $help,
        };)+

        /// All metrics, in the order of the page.
        pub static METRICS: &[&MetricInfo] = &[$(&$id),+];
    };
    (@unit seconds) => { true };
    (@unit) => { false };
}

metrics! {
    BUILD: Info "build" ["version"] "The version of the running program";
    #[seconds]
    START_TIME: Gauge "start_time" [] "The time at which the server started, since 1970";
    CONNECTIONS: Gauge "connections" ["listener"] "Open connections of clients";

    RELOADS: Counter "policy_reloads" ["result"] "Reloads of the policy, by result: ok or failed";
    LAST_RELOAD: Gauge "policy_last_reload_ok" [] "0 if the last reload failed, so that the policy before goes on; else 1";
    CERTIFICATE_RELOADS: Counter "certificate_reloads" ["listener", "result"]
        "Changes of a listener's certificates, by result: ok, or failed, so that the certificates before stay";
    #[seconds]
    CERTIFICATE_EXPIRY: Gauge "certificate_expiry_time" ["listener", "file"]
        "The time at which a listener's certificate in use expires, since 1970";
    DROPPED_LOG_LINES: Counter "log_lines_dropped" [] "Log lines that were dropped, because standard error didn't take them";

    DECISIONS: Counter "decisions" ["action", "limit", "outcome", "reason"]
        "Decisions that clients were given, each counted once. The outcome is allowed, refused, or shadow: admitted, but a limit in shadow mode would have refused it. Labels are empty if no action or no limit took part";
    REJECTIONS: Counter "rejections" ["reason"]
        "Requests that were rejected before any decision, by the reasons below";
    #[seconds]
    DECISION_TIME: Histogram "decision_duration" [] "The time of a decision, including the wait for the store";
    KEPT_PERMITS: Gauge "kept_permits" []
        "Permits of calls in flight whose clients went away, kept until the work is likely over";
    OBSERVED_CALLS: Gauge "observed_calls" []
        "Those of them whose connection to the upstream is observed until the work is over";
    FINISHING_CALLS: Gauge "finishing_calls" []
        "Calls in flight whose clients went away, and which are finished without them, by on_disconnect = finish";

    STORE_UP: Gauge "store_up" [] "1 if the store answers, 0 while decisions are made without it";
    #[seconds]
    STORE_TIME: Histogram "store_duration" [] "The time of decisions that waited for a store outside this process";
    STORE_ERRORS: Counter "store_errors" ["decision"]
        "Decisions that the store failed to make: made without_store, as on_outage says, or none at all";
    STORE_LOSSES: Counter "store_losses" ["kind"]
        "Losses of a full store. used, exhausted: dropped entries that had used a part, or all, of their limit; unblocked: blocks that weren't imposed; shared: answers by which a new key shares its network's limit";
    FLEET_NODES: Gauge "fleet_nodes" ["state"]
        "Nodes that share the store: live, silent, or unknown because this node's own list is old. A node whose state is its own counts itself as live";

    ALERTS: Counter "alerts" ["alert", "sink", "result"]
        "Messages of alerts to each receiver (log, webhook, telegram), by result: sent, failed after all attempts, or dropped because too many waited";

    #[seconds]
    UPSTREAM_TIME: Histogram "upstream_duration" [] "The time from a decision to the head of the upstream's reply";
    UPSTREAM_REPLIES: Counter "upstream_replies" ["status"] "Replies of the upstream by class of status: 2xx and so on";
    UPSTREAM_FAILURES: Counter "upstream_failures" ["reason"] "Forwarded requests without a reply of the upstream";

    PROVIDER_CALLS: Counter "provider_calls" ["provider", "lane"] "Calls that have started";
    PROVIDER_FAILURES: Counter "provider_failures" ["provider", "reason"] "Calls that have failed";
    PROVIDER_FIRST_TRIES: Counter "provider_first_tries" ["provider"] "First requests of calls that were sent";
    PROVIDER_RETRIES: Counter "provider_retries" ["provider"]
        "Further requests of calls that were sent: retries and hedges. Divided by the first tries, the amplification of traffic minus 1";
    PROVIDER_ATTEMPTS: Counter "provider_attempts" ["provider", "class"]
        "Requests that have ended, by class: success, throttled, quota, unavailable, transient, unknown, permanent, auth, cancelled";
    #[seconds]
    PROVIDER_REPLY_TIME: Histogram "provider_reply_duration" ["provider"]
        "The time from sending a request to the head of its reply";
    #[seconds]
    PROVIDER_WAIT: Histogram "provider_wait_duration" ["provider", "lane"]
        "The time for which sent requests had waited in the queue, by the lane of their callers";
    PROVIDER_WAITING: Gauge "provider_waiting_calls" ["provider", "lane"] "Calls that wait in the queue";
    PROVIDER_IN_FLIGHT: Gauge "provider_calls_in_flight" ["provider", "lane"] "Calls in flight";
    PROVIDER_BREAKER: Gauge "provider_breaker_state" ["provider", "state"]
        "1 for the present state of the circuit breaker, 0 for the others";
    PROVIDER_PAUSED: Gauge "provider_paused" ["provider"] "1 while an operator has paused the provider, else 0";
    PROVIDER_CREDENTIALS: Gauge "provider_credentials" ["provider", "state"]
        "Credentials by state: usable, full (without room under a limit of its own), cooling (the provider has asked for a pause) or rejected. A provider without credentials has one anonymous credential";
    PROVIDER_LIMIT: Gauge "provider_limit" ["provider", "limit", "credential"]
        "The capacity of a limit. The credential is its number in the policy, from 0; empty if the limit counts the calls of all";
    PROVIDER_REMAINING: Gauge "provider_limit_remaining" ["provider", "limit", "credential"]
        "The remaining part of the capacity of a limit";
    PROVIDER_BUDGET: Gauge "provider_retry_budget" ["provider"] "Retries that the retry budget grants now";
    PROVIDER_ADAPTIVE: Gauge "provider_adaptive_limit" ["provider"] "The present adaptive limit on calls in flight";
    #[seconds]
    PROVIDER_PACE: Gauge "provider_pace_interval" ["provider"] "The present time between two calls by a pace";
    CACHE_RESULTS: Counter "provider_cache_results" ["provider", "result"]
        "Replies through a cache, by result: hit, miss, stale, coalesced or bypass";
}
