//! Keys and the order in which they are asked for. They are the same for every subject, and made before anything is
//! timed.

/// The frequency of each key of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyDistribution {
    /// Every key equally often.
    Uniform,
    /// Key number n in proportion to 1 / n.
    Zipf,
    /// One key only; the others remain unused in the store.
    SingleKey,
}

/// Returns the 16-byte text of key number `index`.
pub fn key_text(index: u32) -> String {
    format!("{:016x}", mix(u64::from(index)))
}

/// A long list of keys in the order in which one thread asks for them.
pub struct KeySequence {
    /// The numbers of the keys.
    pub indexes: Vec<u32>,
    /// The texts of the keys, one per step and not one per key. A real caller's key is in its cache, because it was
    /// just read from a request. So a step may miss the cache for the limiter's memory, but not for the benchmark's.
    pub keys: Vec<String>,
}

impl KeySequence {
    /// Draws a sequence over `keys` keys. Two threads take different seeds.
    pub fn new(draw: KeyDistribution, keys: u32, seed: u64) -> Self {
        let steps = if keys > 100_000 { 1 << 20 } else { 1 << 14 };
        let mut state = mix(seed ^ 0x7469_6465);
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(state)
        };
        let indexes: Vec<u32> = match draw {
            KeyDistribution::SingleKey => vec![keys / 2; steps],
            KeyDistribution::Uniform => (0..steps).map(|_| below(keys, next())).collect(),
            KeyDistribution::Zipf => {
                let mut reached = 0.0;
                let heights: Vec<f64> = (1..=keys)
                    .map(|rank| {
                        reached += 1.0 / f64::from(rank);
                        reached
                    })
                    .collect();
                (0..steps)
                    .map(|_| {
                        let drawn = to_unit_interval(next()) * reached;
                        let rank = heights.partition_point(|height| *height < drawn);
                        u32::try_from(rank).unwrap_or(u32::MAX).min(keys - 1)
                    })
                    .collect()
            }
        };
        let keys = indexes.iter().map(|index| key_text(*index)).collect();
        Self { indexes, keys }
    }
}

/// Returns SplitMix64's finalizer of a value. It is a bijection, so distinct numbers give distinct keys.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

fn below(bound: u32, drawn: u64) -> u32 {
    ((u128::from(drawn) * u128::from(bound)) >> 64) as u32
}

fn to_unit_interval(drawn: u64) -> f64 {
    (drawn >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_distinct_and_16_bytes_long() {
        let names: HashSet<String> = (0..50_000).map(key_text).collect();
        assert_eq!(names.len(), 50_000);
        assert!(names.iter().all(|name| name.len() == 16));
    }

    #[test]
    fn uniform_keys_are_drawn_about_equally() {
        let sequence = KeySequence::new(KeyDistribution::Uniform, 10, 1);
        let share = |wanted| {
            let met = sequence.indexes.iter().filter(|index| **index == wanted).count();
            met as f64 / sequence.indexes.len() as f64
        };
        assert!((0..10).all(|key| (0.08..0.12).contains(&share(key))));
    }

    #[test]
    fn zipf_draws_the_second_key_half_as_often() {
        let sequence = KeySequence::new(KeyDistribution::Zipf, 1_000, 1);
        let met = |wanted| sequence.indexes.iter().filter(|index| **index == wanted).count() as f64;
        assert!((1.7..2.3).contains(&(met(0) / met(1))));
        assert!(sequence.indexes.iter().all(|index| *index < 1_000));
    }

    #[test]
    fn different_seeds_give_different_orders() {
        let (one, other) = (
            KeySequence::new(KeyDistribution::Uniform, 1_000, 1),
            KeySequence::new(KeyDistribution::Uniform, 1_000, 2),
        );
        assert_ne!(one.indexes, other.indexes);
    }
}
