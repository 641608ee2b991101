//! The targets that must be reached. Absolute times are for a machine on which a clock read costs 24 ns, and are scaled
//! by its cost here.

/// The bound of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TargetBound {
    /// At most this many times the figure of the named rival.
    Ratio(&'static str, f64),
    /// At least this many times the figure of the named rival.
    RatioAtLeast(&'static str, f64),
    /// At most this many nanoseconds on the reference machine.
    Nanoseconds(f64),
    /// At most this, in the row's own unit, on any machine.
    AtMost(f64),
    /// At least this, in the row's own unit, on any machine.
    AtLeast(f64),
}

/// The target of one row.
#[derive(Clone, Copy, Debug)]
pub struct RowTarget {
    /// The row's name.
    pub row: &'static str,
    /// The bound that `--check` requires.
    pub bound: TargetBound,
}

const fn target(row: &'static str, bound: TargetBound) -> RowTarget {
    RowTarget { row, bound }
}

/// All bounds that `--check` requires. A row that isn't listed is for information only.
pub const TARGETS: &[RowTarget] = &[
    target("decision/one/allow/T1", TargetBound::Ratio("governor", 0.9)),
    target("decision/one/allow/T2", TargetBound::Ratio("governor", 0.6)),
    target("decision/one/rested/T1", TargetBound::Ratio("governor", 1.0)),
    target("decision/one/deny/T1", TargetBound::Ratio("governor", 1.0)),
    target("decision/1k/uniform/allow/T1", TargetBound::Ratio("governor", 0.7)),
    target("decision/1k/uniform/allow/T2", TargetBound::Ratio("governor", 0.6)),
    target("decision/1k/uniform/rested/T1", TargetBound::Ratio("governor", 1.0)),
    target("decision/1k/uniform/rested/T2", TargetBound::Ratio("governor", 1.0)),
    target("decision/1k/uniform/deny/T1", TargetBound::Ratio("governor", 1.0)),
    target("decision/1k/uniform/deny/T2", TargetBound::Ratio("governor", 1.0)),
    target("decision/1M/uniform/allow/T1", TargetBound::Ratio("governor", 0.42)),
    target("decision/1M/uniform/allow/T2", TargetBound::Ratio("governor", 0.4)),
    target("decision/10k/hot/allow/T2", TargetBound::Ratio("governor", 0.5)),
    target("decision/bytes-per-key", TargetBound::AtMost(29.0)),
    target("decision/longest-insert", TargetBound::Nanoseconds(400_000.0)),
    target("decision/inbound/T1", TargetBound::Nanoseconds(250.0)),
    target("decision/backoff/T1", TargetBound::Ratio("backon", 1.0)),
    target("decision/dearest/path", TargetBound::Nanoseconds(150_000.0)),
    target("decision/dearest/query", TargetBound::Nanoseconds(100_000.0)),
    target("decision/dearest/cookie", TargetBound::Nanoseconds(100_000.0)),
    target("decision/dearest/header", TargetBound::Nanoseconds(100_000.0)),
    target("decision/junk/p99", TargetBound::Nanoseconds(1_000_000.0)),
    target("decision/junk/still-blocked", TargetBound::AtLeast(100.0)),
    target("decision/junk/resident", TargetBound::AtMost(FLOOD_RESIDENT_MIB)),
    target("decision/blocked/resident", TargetBound::AtMost(FLOOD_RESIDENT_MIB)),
    target("outbound/breaker/T1", TargetBound::Nanoseconds(12.0)),
    target("outbound/breaker/T2", TargetBound::Nanoseconds(40.0)),
    target("outbound/call/T1", TargetBound::Nanoseconds(260.0)),
    target("outbound/call/allocations", TargetBound::AtMost(1.0)),
    target("outbound/lanes/enqueue", TargetBound::Nanoseconds(1_000.0)),
    target("outbound/lanes/cancel", TargetBound::Nanoseconds(1_000.0)),
    target("outbound/lanes/wake", TargetBound::Nanoseconds(1_000.0)),
    target("outbound/lanes/growth", TargetBound::AtMost(LANES_GROWTH)),
    target("stores/file/T1", TargetBound::Ratio("memory store", 1.25)),
    target("stores/file/T2", TargetBound::Ratio("memory store", 1.25)),
    target("gate/admitted/cpu", TargetBound::Ratio("bare hyper-util proxy", 1.0)),
    target("gate/refused/cpu", TargetBound::Ratio("bare hyper 429", 1.05)),
    target("gate/decision-api/cpu", TargetBound::Ratio("bare hyper POST", 1.1)),
    target("gate/outbound/cpu", TargetBound::Ratio("bare hyper-util proxy", 1.15)),
    target("gate/metrics-admitted/cpu", TargetBound::Ratio("metrics off", 1.03)),
    target("gate/metrics-refused/cpu", TargetBound::Ratio("metrics off", 1.03)),
    target("gate/tls-http1/cpu", TargetBound::Ratio("nginx limit_req", 1.15)),
    target("gate/tls-http2/cpu", TargetBound::Ratio("nginx limit_req", 1.15)),
    target("gate/tls-handshake/cpu", TargetBound::Ratio("nginx limit_req", 1.15)),
    target("gate/tls-resumed/cpu", TargetBound::Ratio("nginx limit_req", 1.15)),
    target("gate/resp-1/cpu", TargetBound::Ratio("Redis GCRA script", 0.5)),
    target("gate/resp-1/cpu", TargetBound::Ratio("throttlecrab-server", 1.0)),
    target("gate/resp-16/requests", TargetBound::RatioAtLeast("Redis GCRA script", 2.0)),
    target("gate/resp-16/requests", TargetBound::RatioAtLeast("throttlecrab-server", 1.0)),
    target("gate/resp-64/requests", TargetBound::RatioAtLeast("Redis GCRA script", 2.0)),
    target("gate/resp-64/requests", TargetBound::RatioAtLeast("throttlecrab-server", 1.0)),
    target("gate/rls/cpu", TargetBound::Ratio("throttlecrab-server", 0.77)),
    target("gate/rls/cpu", TargetBound::Ratio("bare tonic", 1.5)),
    target("gate/throttle-http/cpu", TargetBound::Ratio("throttlecrab-server", 1.0)),
    target("gate/viewers/idle", TargetBound::AtMost(2.0)),
    target("gate/returns/100/time", TargetBound::AtMost(102.0)),
    target("gate/returns/100/requests", TargetBound::AtMost(2.0)),
    target("gate/returns/1k/time", TargetBound::AtMost(102.0)),
    target("gate/returns/1k/requests", TargetBound::AtMost(2.0)),
    target("gate/returns/half-100/time", TargetBound::AtMost(102.0)),
    target("gate/returns/half-100/requests", TargetBound::AtMost(2.0)),
    target("gate/returns/half-1k/time", TargetBound::AtMost(102.0)),
    target("gate/returns/half-1k/requests", TargetBound::AtMost(2.0)),
    target("gate/steps/throughput", TargetBound::AtLeast(95.0)),
    target("gate/steps/refused", TargetBound::AtMost(1.0)),
    target("gate/one-client-of-redis", TargetBound::AtMost(300_000.0)),
    target("stores/redis/rate", TargetBound::RatioAtLeast("smallest GCRA script", 1.0)),
    target("stores/redis/two-limits-and-penalty", TargetBound::RatioAtLeast("smallest GCRA script", 0.7)),
    target("stores/redis/leases", TargetBound::RatioAtLeast("smallest GCRA script", 30.0)),
    target("stores/redis/leases/trips", TargetBound::AtMost(5.0)),
    target("stores/mariadb", TargetBound::RatioAtLeast("bare upsert", 1.2)),
    target("stores/postgres", TargetBound::RatioAtLeast("bare upsert", 0.45)),
    target("stores/mongodb", TargetBound::RatioAtLeast("bare upsert", 0.3)),
    target("simulate/hour", TargetBound::AtMost(3e9)),
    target("simulate/replay", TargetBound::AtLeast(2.5e6)),
    target("simulate/control/goodput", TargetBound::AtLeast(13.0)),
    target("simulate/control/p99", TargetBound::AtLeast(11.0)),
];

/// The memory in MiB that a store capped at 64 MiB may add to the process's resident memory. It is the cap, and a
/// constant for the policy, the allocator's overhead and the threads.
pub const FLOOD_RESIDENT_MIB: f64 = 64.0 + 8.0;

/// The largest cost of an operation on 100,000 waiting calls over one on 1,000, which distinguishes logarithmic growth
/// from linear. Logarithmic growth is 1.7 times, and leaving the cache costs up to twenty times as much. Linear growth
/// is 100 times, even within the cache.
pub const LANES_GROWTH: f64 = 33.0;

/// Returns the bounds of a row.
pub fn bounds_of(row: &str) -> impl Iterator<Item = TargetBound> {
    TARGETS.iter().filter(move |reach| reach.row == row).map(|reach| reach.bound)
}
