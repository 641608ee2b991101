//! What must be reached, as PERFORMANCE.md has it. Absolute times are for a machine on
//! which reading the clock costs 24 ns, and are scaled by what it costs here.

/// What a figure is held against.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// At most so many times the figure of the rival named.
    Ratio(&'static str, f64),
    /// At least so many times the figure of the rival named.
    RatioAtLeast(&'static str, f64),
    /// At most so many nanoseconds on the reference machine.
    Nanoseconds(f64),
    /// At most this, in the row's own unit, on any machine.
    AtMost(f64),
    /// At least this, in the row's own unit, on any machine.
    AtLeast(f64),
}

/// One row's bound.
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    /// The row's name.
    pub row: &'static str,
    /// What `--check` demands.
    pub bound: Bound,
}

const fn reach(row: &'static str, bound: Bound) -> Reach {
    Reach { row, bound }
}

/// Every bound that `--check` asserts. A row that is not listed informs only.
pub const REACHES: &[Reach] = &[
    reach("decision/one/allow/T1", Bound::Ratio("governor", 0.9)),
    reach("decision/one/allow/T2", Bound::Ratio("governor", 0.6)),
    reach("decision/one/rested/T1", Bound::Ratio("governor", 1.0)),
    reach("decision/one/deny/T1", Bound::Ratio("governor", 1.0)),
    reach("decision/1k/uniform/allow/T1", Bound::Ratio("governor", 0.7)),
    reach("decision/1k/uniform/allow/T2", Bound::Ratio("governor", 0.6)),
    reach("decision/1k/uniform/rested/T1", Bound::Ratio("governor", 1.0)),
    reach("decision/1k/uniform/rested/T2", Bound::Ratio("governor", 1.0)),
    reach("decision/1k/uniform/deny/T1", Bound::Ratio("governor", 1.0)),
    reach("decision/1k/uniform/deny/T2", Bound::Ratio("governor", 1.0)),
    reach("decision/1M/uniform/allow/T1", Bound::Ratio("governor", 0.42)),
    reach("decision/1M/uniform/allow/T2", Bound::Ratio("governor", 0.4)),
    reach("decision/10k/hot/allow/T2", Bound::Ratio("governor", 0.5)),
    reach("decision/bytes-per-key", Bound::AtMost(29.0)),
    reach("decision/longest-insert", Bound::Nanoseconds(400_000.0)),
    reach("decision/inbound/T1", Bound::Nanoseconds(250.0)),
    reach("decision/backoff/T1", Bound::Ratio("backon", 1.0)),
    reach("decision/junk/p99", Bound::Nanoseconds(1_000_000.0)),
    reach("decision/junk/still-blocked", Bound::AtLeast(100.0)),
    reach("decision/junk/resident", Bound::AtMost(FLOOD_RESIDENT_MIB)),
    reach("decision/blocked/resident", Bound::AtMost(FLOOD_RESIDENT_MIB)),
    reach("outbound/breaker/T1", Bound::Nanoseconds(12.0)),
    reach("outbound/breaker/T2", Bound::Nanoseconds(40.0)),
    reach("outbound/call/T1", Bound::Nanoseconds(260.0)),
    reach("outbound/call/allocations", Bound::AtMost(1.0)),
    reach("outbound/lanes/enqueue", Bound::Nanoseconds(1_000.0)),
    reach("outbound/lanes/cancel", Bound::Nanoseconds(1_000.0)),
    reach("outbound/lanes/wake", Bound::Nanoseconds(1_000.0)),
    reach("outbound/lanes/growth", Bound::AtMost(LANES_GROWTH)),
    reach("stores/file/T1", Bound::Ratio("memory store", 1.25)),
    reach("stores/file/T2", Bound::Ratio("memory store", 1.25)),
    reach("gate/admitted/cpu", Bound::Ratio("bare hyper-util proxy", 1.0)),
    reach("gate/refused/cpu", Bound::Ratio("bare hyper 429", 1.05)),
    reach("gate/decision-api/cpu", Bound::Ratio("bare hyper POST", 1.1)),
    reach("gate/outbound/cpu", Bound::Ratio("bare hyper-util proxy", 1.15)),
    reach("gate/one-client-of-redis", Bound::AtMost(300_000.0)),
    reach("stores/redis/rate", Bound::RatioAtLeast("smallest GCRA script", 1.0)),
    reach("stores/redis/two-limits-and-penalty", Bound::RatioAtLeast("smallest GCRA script", 0.7)),
    reach("stores/redis/leases", Bound::RatioAtLeast("smallest GCRA script", 30.0)),
    reach("stores/redis/leases/trips", Bound::AtMost(5.0)),
    reach("stores/mariadb", Bound::RatioAtLeast("bare upsert", 1.2)),
    reach("stores/postgres", Bound::RatioAtLeast("bare upsert", 0.45)),
    reach("stores/mongodb", Bound::RatioAtLeast("bare upsert", 0.3)),
    reach("simulate/hour", Bound::AtMost(3e9)),
    reach("simulate/replay", Bound::AtLeast(2.5e6)),
];

/// What a store capped at 64 MiB may add to the process's resident memory: the cap, and a constant for the policy, the
/// allocator's slack and the threads.
pub const FLOOD_RESIDENT_MIB: f64 = 64.0 + 8.0;

/// What an operation on 100,000 waiting calls may cost over one on 1,000, to tell a logarithm from a line. The logarithm
/// grows 1.7 times, and leaving the cache costs up to twenty times as much; a line grows 100 times before it leaves the
/// cache.
pub const LANES_GROWTH: f64 = 33.0;

/// The bound of a row, if it has one.
pub fn of(row: &str) -> Option<Bound> {
    REACHES.iter().find(|reach| reach.row == row).map(|reach| reach.bound)
}
