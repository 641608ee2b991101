//! A model of redis-cell's command `CL.THROTTLE`, written from its documentation and checked against its answers.

use std::collections::HashMap;

use crate::random::RandomSource;

/// The terms of a call, and its quantity.
#[derive(Clone, Copy, Debug)]
pub struct Throttle {
    /// One less than the most calls at once.
    pub max_burst: i64,
    /// The calls per period.
    pub count: i64,
    /// The period in seconds.
    pub period: i64,
    /// The calls that this one counts for.
    pub quantity: i64,
}

impl Throttle {
    /// Returns a call with any terms and a quantity up to more than the burst. Seldom it gives back.
    pub fn random(random: &mut RandomSource) -> Self {
        let max_burst = random.pick(&[-1, 0, 1, 2, 5, 15, 1_000]);
        let quantity = match random.below(10) {
            0 => 0,
            1..=5 => 1,
            6 => max_burst + 1,
            7 => max_burst + 2,
            8 => -1,
            _ => random.below(20).cast_signed(),
        };
        let count = random.pick(&[1, 2, 3, 7, 30, 1_000, 65_521, 2_000_000]);
        Self { max_burst, count, period: random.pick(&[1, 7, 60, 3_600, 86_400]), quantity }
    }
}

/// The five numbers of an answer: limited, limit, remaining, retry after and reset after.
pub type ThrottleAnswer = [i64; 5];

/// The keys of a server.
#[derive(Debug, Default)]
pub struct RedisCell {
    /// The theoretical arrival times in nanoseconds, by key.
    arrivals: HashMap<u64, i128>,
}

impl RedisCell {
    /// Answers a call at a time in nanoseconds. A key that has been given more than it had is as new: redis-cell refuses to
    /// store it.
    pub fn throttle(&mut self, key: u64, call: &Throttle, now: i128) -> ThrottleAnswer {
        let nanos = i128::from(call.period) * 1_000_000_000;
        let interval = (nanos as f64 / call.count as f64) as i128;
        let (limit, quantity) = (i128::from(call.max_burst) + 1, i128::from(call.quantity));
        let (tolerance, increment) = (interval * limit, interval * quantity);
        let arrival = self.arrivals.get(&key).map_or(now, |arrival| *arrival.max(&now));
        let next = arrival + increment;
        let is_limited = next - tolerance > now;
        let mut retry_after = -1_000_000_000;
        if !is_limited {
            self.arrivals.insert(key, next.max(now));
        } else if increment <= tolerance {
            retry_after = next - tolerance - now;
        }
        let reset_after = if is_limited { arrival } else { next.max(now) } - now;
        let room = tolerance - reset_after;
        let remaining = if room > -interval { ((room / 1000) as f64 / (interval / 1000) as f64) as i64 } else { 0 };
        let limited = if is_limited { 1 } else { 0 };
        [limited, call.max_burst + 1, remaining, seconds(retry_after), seconds(reset_after)]
    }
}

/// Whole seconds, one more if there are milliseconds beyond them.
fn seconds(nanos: i128) -> i64 {
    let (whole, rest) = (nanos / 1_000_000_000, nanos % 1_000_000_000);
    let seconds = (whole as f64 + rest as f64 / 1e9) as i64;
    if rest / 1_000_000 > 0 { seconds + 1 } else { seconds }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_gives_the_recorded_answers() {
        let mut server = RedisCell::default();
        let mut now = 1_700_000_000_000_000_000;
        let lines = include_str!("redis_cell_answers.txt").lines().filter(|line| !line.starts_with('#'));
        let mut checked = 0;
        for line in lines {
            let numbers: Vec<i64> = line.split([' ', '|']).filter_map(|word| word.parse().ok()).collect();
            let [key, max_burst, count, period, quantity, answer @ ..] = &numbers[..] else { panic!("{line}") };
            let call = Throttle { max_burst: *max_burst, count: *count, period: *period, quantity: *quantity };
            now += 700_000;
            assert_eq!(server.throttle(key.unsigned_abs(), &call, now), *answer, "{line}");
            checked += 1;
        }
        assert!(checked > 300);
    }
}
