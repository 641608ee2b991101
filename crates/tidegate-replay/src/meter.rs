//! Measures the use that each client would have made of each limit without refusals, and so the clients that each value
//! of the limit would have refused.
//!
//! A limit refuses a client if and only if the client's use of it, counted without refusals, exceeds the limit's value
//! at some time. So the highest use of each client is enough. Until a request of a client is refused, the gate's own
//! store counts that use. From then on a copy of the client's state counts it, under the same kind of limit with a
//! value out of reach.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use tidegate_core::batch::OpContext;
use tidegate_core::{
    Admission, Batch, KeyState, Limit, LimitId, LimitKind, Limits, MAX_LIMIT, Op, Outcome, Outcomes, Rate, ShareLevel,
    Window,
};
use tidegate_policy::Quantity;
use tidegate_store::Memory;

/// The largest number of measured keys under limits: 28 MB in a hash table of 2^20 slots. Beyond it, a random half of
/// them is dropped, and so is half of all later ones. The rest is a fair sample, and each of its peaks is complete (M.
/// Wegman's adaptive sampling; P. Flajolet, "On Adaptive Sampling", Computing 43, 1990).
pub(super) const MAX_PEAKS: usize = (1 << 20) / 8 * 7;
/// The largest number of states that are counted on after a refusal, one per key and limit. Each has up to 1.7 KB, so
/// all have 27 MB. Of further keys it is only known that they exceeded their limit.
const MAX_UNLIMITED_STATES: usize = 1 << 14;
/// The least number of distinct moments in a window. Beyond it, calls count up to a 64th of it longer; see [`Window`].
const MIN_WINDOW_ENTRIES: u32 = 64;
/// The number of uses that are processed together.
const MAX_PENDING_USES: usize = 128;
/// The shares of clients for which findings tell the least value of a limit that refuses no more than this share.
pub const REFUSED_SHARES: [f64; 3] = [0.01, 0.001, 0.0001];
/// The largest number of points of a limit's curve.
const MAX_CURVE_POINTS: usize = 256;

/// A key's highest use of a limit.
#[derive(Clone, Copy, Debug)]
struct Peak {
    /// The highest use; saturates at 2^32 − 1.
    max_used: u32,
    limit: LimitId,
}

/// A hasher that passes on a key that is a hash already.
#[derive(Clone, Copy, Debug, Default)]
struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn write(&mut self, _: &[u8]) {}
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

/// Measures every key under every limit.
pub(super) struct Meter {
    /// The plan's limits, each with its value out of reach. `None` for a kind that can't be measured, such as calls in
    /// flight, because logs don't tell their duration.
    unlimited_limits: Vec<Option<Limit>>,
    unlimited_states: HashMap<u64, KeyState, BuildHasherDefault<IdentityHasher>>,
    /// Calls of keys without room for an unlimited state. It is only known that they exceeded a limit.
    pub(super) unmeasured_calls: u64,
    peaks: HashMap<u64, Peak, BuildHasherDefault<IdentityHasher>>,
    max_peaks: usize,
    /// The fingerprints and uses that aren't processed yet.
    pending: Vec<(u64, Peak)>,
    /// One of 2^level keys is in the sample.
    sample_level: u32,
}

impl Meter {
    /// Creates a meter that measures at most `max_peaks` keys.
    pub(super) fn new(limits: &Limits, max_peaks: usize) -> Self {
        Self {
            unlimited_limits: limits.iter().map(|(_, limit)| unlimited_kind(limit.kind()).map(Limit::new)).collect(),
            unlimited_states: HashMap::default(),
            unmeasured_calls: 0,
            peaks: HashMap::default(),
            max_peaks,
            pending: Vec::with_capacity(MAX_PENDING_USES),
            sample_level: 0,
        }
    }

    /// Records a call that a store has just decided about. It counts after [`Meter::flush`].
    #[inline]
    pub(super) fn record(&mut self, batch: &Batch, limits: &Limits, outcomes: &Outcomes, store: &Memory) {
        if self.pending.len() + batch.ops().len() > MAX_PENDING_USES {
            self.flush();
        }
        let refuses = |(op, outcome): (&Op, &Outcome), shadow: bool| {
            outcome.admission.refuses() && (shadow || limits.get(op.limit).is_some_and(|limit| !limit.is_shadow()))
        };
        let any_refuses = batch.ops().iter().zip(outcomes.list()).any(|both| refuses(both, true));
        let any_enforced_refuses =
            any_refuses && batch.ops().iter().zip(outcomes.list()).any(|both| refuses(both, false));
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()) {
            let Some(Some(unlimited)) = self.unlimited_limits.get(op.limit.index()) else { continue };
            let fingerprint = fingerprint(op);
            // A shared key counts no client's own use.
            if op.share_level != ShareLevel::Own || !is_sampled(fingerprint, self.sample_level) {
                continue;
            }
            let context = OpContext { op, limit: unlimited, batch: batch.context(), now: outcomes.now() };
            let state =
                if self.unlimited_states.is_empty() { None } else { self.unlimited_states.get_mut(&fingerprint) };
            let used = if let Some(state) = state {
                charge_and_measure(state, &context)
            } else if any_refuses {
                let limit = limits.get(op.limit);
                let other_refuses =
                    if limit.is_some_and(Limit::is_shadow) { any_refuses } else { any_enforced_refuses };
                let counts_anyway =
                    limit.is_some_and(Limit::counts_refused) && outcome.admission == Admission::Admitted;
                let was_charged = !outcome.admission.refuses() && (!other_refuses || counts_anyway);
                if was_charged {
                    outcome.used
                } else if self.unlimited_states.len() < MAX_UNLIMITED_STATES {
                    let mut state = store.clone_state(op).unwrap_or_default();
                    let used = charge_and_measure(&mut state, &context);
                    self.unlimited_states.insert(fingerprint, state);
                    used
                } else {
                    self.unmeasured_calls += 1;
                    outcome.limit.max(outcome.used) + 1
                }
            } else {
                outcome.used
            };
            let max_used = u32::try_from(used).unwrap_or(u32::MAX);
            self.pending.push((fingerprint, Peak { max_used, limit: op.limit }));
        }
    }

    /// Processes the recorded uses together, so that their cache misses overlap.
    pub(super) fn flush(&mut self) {
        let mut pending = std::mem::take(&mut self.pending);
        for (fingerprint, peak) in pending.drain(..) {
            match self.peaks.get_mut(&fingerprint) {
                Some(known) => known.max_used = known.max_used.max(peak.max_used),
                None => self.insert_peak(fingerprint, peak),
            }
        }
        self.pending = pending;
    }

    fn insert_peak(&mut self, fingerprint: u64, peak: Peak) {
        while self.peaks.len() >= self.max_peaks {
            self.sample_level += 1;
            let level = self.sample_level;
            self.peaks.retain(|print, _| is_sampled(*print, level));
        }
        if is_sampled(fingerprint, self.sample_level) {
            self.peaks.insert(fingerprint, peak);
        }
    }

    /// Returns the peaks of one limit's keys; `None` if the limit can't be measured.
    pub(super) fn peaks(&self, limit: LimitId) -> Option<Peaks> {
        self.unlimited_limits.get(limit.index())?.as_ref()?;
        let peaks = self.peaks.values().filter(|peak| peak.limit == limit);
        let mut descending: Vec<u32> = peaks.map(|peak| peak.max_used).collect();
        descending.sort_unstable_by_key(|used| Reverse(*used));
        Some(Peaks { descending, sample_level: self.sample_level })
    }
}

/// Counts a call and returns the use with it.
fn charge_and_measure(state: &mut KeyState, context: &OpContext<'_>) -> u64 {
    let mut outcome = state.evaluate(context);
    state.charge(context, &mut outcome);
    outcome.used
}

/// Returns a hash of an operation's key and limit. Keys are hashes already.
fn fingerprint(op: &Op) -> u64 {
    op.key.lo() ^ u64::from(op.limit.get()).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Returns true if a key is in the sample of this level. It uses bits that the hash table doesn't place its entries by.
fn is_sampled(fingerprint: u64, level: u32) -> bool {
    (fingerprint >> 28) & ((1 << level.min(28)) - 1) == 0
}

/// Returns the same limit with its value out of reach; `None` if it can't be measured.
fn unlimited_kind(kind: &LimitKind) -> Option<LimitKind> {
    Some(match kind {
        LimitKind::Window(window) => {
            LimitKind::Window(Window::new(MAX_LIMIT, window.window(), MIN_WINDOW_ENTRIES).ok()?)
        }
        LimitKind::Rate(rate) => {
            let burst = ((1 << 60) / rate.cost_units(1).max(1)).clamp(1, MAX_LIMIT);
            LimitKind::Rate(Rate::new(rate.count(), rate.per(), burst).ok()?)
        }
        LimitKind::Quota(quota) => LimitKind::Quota(quota.with_limit(MAX_LIMIT).ok()?),
        LimitKind::Concurrency(_) | LimitKind::Cooldown(_) | LimitKind::Pace(_) => return None,
    })
}

/// The highest use of one limit by each key, or by each of a sample of the keys.
#[derive(Clone, Debug)]
pub struct Peaks {
    /// The highest uses in descending order.
    descending: Vec<u32>,
    sample_level: u32,
}

impl Peaks {
    /// Returns the number of keys; an estimate if only a sample was measured.
    pub fn key_count(&self) -> u64 {
        (self.descending.len() as u64) << self.sample_level
    }

    /// Returns true if all keys were measured.
    pub fn is_complete(&self) -> bool {
        self.sample_level == 0
    }

    /// Returns the highest use of all keys; 0 without keys.
    pub fn highest(&self) -> u64 {
        self.descending.first().copied().map_or(0, u64::from)
    }

    /// Returns the share of keys that a value would have refused, from 0 to 1.
    pub fn refused_share(&self, value: u64) -> f64 {
        let above = self.descending.partition_point(|peak| u64::from(*peak) > value);
        above as f64 / self.descending.len().max(1) as f64
    }

    /// Returns the least value that would have refused no more than this share of the keys, from 0 to 1.
    pub fn smallest_value_for_share(&self, share: f64) -> u64 {
        let refused_count = (self.descending.len() as f64 * share) as usize;
        self.descending.get(refused_count).copied().map_or(0, u64::from)
    }

    /// Returns values with the share of keys that each would have refused, from a share of `max_share` down to none.
    pub fn curve(&self, max_share: f64) -> Vec<(u64, f64)> {
        let mut points: Vec<(u64, f64)> = Vec::new();
        for equal in self.descending.chunk_by(u32::eq) {
            let value = u64::from(equal[0]);
            let share = self.refused_share(value);
            points.push((value, share));
            if share > max_share {
                break;
            }
        }
        points.reverse();
        let stride = points.len().div_ceil(MAX_CURVE_POINTS).max(1);
        let last = points.last().copied();
        let mut points: Vec<_> = points.into_iter().step_by(stride).collect();
        points.extend(last.filter(|last| points.last() != Some(last)));
        points
    }
}

/// Returns the quantity with another value: the limit of a window or quota, or the burst of a rate.
pub(crate) fn with_value(quantity: &Quantity, value: u64) -> Quantity {
    // A rate without a burst would admit nothing.
    let value = value.max(1);
    match quantity.clone() {
        Quantity::Window { window, .. } => Quantity::Window { limit: value, window },
        Quantity::Rate { count, per, .. } => Quantity::Rate { count, per, burst: value },
        Quantity::Quota { unit, zone, .. } => Quantity::Quota { limit: value, unit, zone },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use std::sync::Arc;
    use tidegate_core::{Key, Span, Time, Verb};
    use tidegate_store::ImmediateStore as _;

    use super::*;

    /// Takes each call of a key at its second from a store, and returns the meter.
    fn measured(kind: LimitKind, calls: &[(u64, u64)], most: usize) -> Meter {
        let limits = Limits::with_limit(Limit::new(kind));
        let mut meter = Meter::new(&limits, most);
        let store = Memory::new(Arc::new(limits.clone()), Memory::DEFAULT_MAX_BYTES);
        for (key, second) in calls {
            let mut batch = Batch::new(0);
            let key = Key::new(
                0,
                key.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31).wrapping_mul(0xbf58_476d_1ce4_e5b9),
            );
            batch.push(Op::new(LimitId::FIRST, Verb::Take, key, 1)).unwrap();
            let outcomes = store.apply_now(&batch, Time::from_secs(1_000_000 + second));
            meter.record(&batch, &limits, &outcomes, &store);
        }
        meter.flush();
        meter
    }

    /// Returns the largest number of calls of each key in any trailing window.
    fn exact(calls: &[(u64, u64)], window: u64) -> Vec<u64> {
        let mut by_key: HashMap<u64, Vec<u64>> = HashMap::new();
        for (key, second) in calls {
            by_key.entry(*key).or_default().push(*second);
        }
        let peak = |seconds: &Vec<u64>| {
            let within =
                |last: &u64| seconds.iter().filter(|second| **second <= *last && **second + window > *last).count();
            seconds.iter().map(within).max().unwrap_or(0) as u64
        };
        let mut peaks: Vec<u64> = by_key.values().map(peak).collect();
        peaks.sort_unstable_by(|one, other| other.cmp(one));
        peaks
    }

    fn calls(seed: u64, keys: u64, count: usize) -> Vec<(u64, u64)> {
        let mut random = rand_xoshiro::Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut second = 0;
        (0..count)
            .map(|_| {
                if random.random_range(0..4_u32) == 0 {
                    second += 1;
                }
                let key = (random.random::<f64>().powi(3) * keys as f64) as u64;
                (key, second)
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        /// Calls at one moment are kept as one entry. So peaks are exact if a window holds up to 64 moments: a minute
        /// of a log with times in seconds.
        #[test]
        fn peaks_and_values_equal_an_exact_count(seed in any::<u64>(), keys in 20_u64..300) {
            let calls = calls(seed, keys, 3000);
            let window = Window::new(5, Span::from_secs(30), MIN_WINDOW_ENTRIES).unwrap();
            let found = measured(LimitKind::Window(window), &calls, MAX_PEAKS).peaks(LimitId::FIRST).unwrap();
            let exact = exact(&calls, 30);
            prop_assert_eq!(found.descending.iter().map(|peak| u64::from(*peak)).collect::<Vec<_>>(), exact.clone());
            for share in [0.5, 0.1, 0.01, 0.0] {
                let value = found.smallest_value_for_share(share);
                let refused = |value| exact.iter().filter(|peak| **peak > value).count() as f64 / exact.len() as f64;
                prop_assert!(refused(value) <= share);
                prop_assert!(value == 0 || refused(value - 1) > share, "{} is not the least for {}", value, share);
                prop_assert_eq!(found.refused_share(value), refused(value));
            }
        }
    }

    #[test]
    fn a_bounded_sample_is_representative() {
        let calls = calls(7, 20_000, 60_000);
        let window = Window::new(5, Span::from_secs(3600), MIN_WINDOW_ENTRIES).unwrap();
        let meter = measured(LimitKind::Window(window), &calls, 2000);
        assert!(meter.peaks.len() <= 2000 && meter.sample_level >= 3, "{} {}", meter.peaks.len(), meter.sample_level);
        let (found, exact) = (meter.peaks(LimitId::FIRST).unwrap(), exact(&calls, 3600));
        let keys = exact.len() as f64;
        assert!((found.key_count() as f64 / keys - 1.0).abs() < 0.1, "{} of {keys}", found.key_count());
        for share in [0.5, 0.2, 0.05] {
            let value = found.smallest_value_for_share(share);
            let refused = exact.iter().filter(|peak| **peak > value).count() as f64 / keys;
            let below = exact.iter().filter(|peak| **peak > value.saturating_sub(1)).count() as f64 / keys;
            assert!(
                refused < share * 1.3 && below > share * 0.7,
                "{share}: {value} refuses {refused}, one less {below}"
            );
        }
        assert!(!found.is_complete());
    }

    #[test]
    fn rates_measure_bursts_and_quotas_measure_periods() {
        let rate = Rate::new(1, Span::from_secs(1), 1).unwrap();
        let calls: Vec<(u64, u64)> = [0, 0, 0, 1, 2, 10, 10].into_iter().map(|second| (1, second)).collect();
        let peaks = measured(LimitKind::Rate(rate), &calls, 10).peaks(LimitId::FIRST).unwrap();
        assert_eq!((peaks.highest(), peaks.refused_share(2), peaks.refused_share(3)), (3, 1.0, 0.0));
        let quota: Quantity = "2 per calendar hour".parse().unwrap();
        let calls: Vec<(u64, u64)> = [0, 1, 7200, 7201, 7202].into_iter().map(|second| (1, second)).collect();
        let peaks = measured(quota.to_limit_kind().unwrap().unwrap(), &calls, 10).peaks(LimitId::FIRST).unwrap();
        assert_eq!(peaks.highest(), 3);
        let flights: Quantity = "2 in flight".parse().unwrap();
        assert!(measured(flights.to_limit_kind().unwrap().unwrap(), &calls, 10).peaks(LimitId::FIRST).is_none());
    }

    #[test]
    fn the_refusal_curve_falls_to_zero() {
        let peaks = Peaks { descending: (0..10_000_u32).rev().map(|peak| peak / 10).collect(), sample_level: 0 };
        let curve = peaks.curve(0.1);
        assert!(curve.len() <= MAX_CURVE_POINTS + 1);
        assert!(curve.windows(2).all(|two| two[0].0 < two[1].0 && two[0].1 > two[1].1), "{curve:?}");
        assert_eq!(curve.last(), Some(&(999, 0.0)));
        assert!(curve[0].1 > 0.1 && curve[0].1 < 0.11, "{:?}", curve[0]);
    }
}
