//! What a run comes down to.

use crate::tally::Tally;

/// What a run comes down to; of several repetitions, the means.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Numbers {
    /// Calls that began.
    pub offered: f64,
    /// Calls that succeeded.
    pub succeeded: f64,
    /// Calls that failed.
    pub failed: f64,
    /// Calls whose last request was refused.
    pub refused: f64,
    /// Calls that their own side declined to send.
    pub declined: f64,
    /// Attempts that were sent.
    pub attempts: f64,
    /// Requests that were refused for a limit or a full queue: wasted.
    pub throttled: f64,
    /// The share of ended calls that succeeded, from 0 to 1.
    pub success: f64,
    /// Attempts for each call: how much the load is amplified.
    pub load: f64,
    /// Calls that succeeded each second, over the stretch that is measured.
    pub goodput: f64,
    /// The mean delay of calls that succeeded, in seconds; `None` if none did. Of several repetitions, the mean of those in
    /// which any did, and likewise the next two.
    pub mean: Option<f64>,
    /// The delay that half of them didn't exceed, in seconds.
    pub p50: Option<f64>,
    /// The delay that 99 % of them didn't exceed, in seconds.
    pub p99: Option<f64>,
    /// When the last call ended, in seconds.
    pub elapsed: f64,
    /// The most requests that came to the service within 100 ms.
    pub busiest: f64,
    /// The share of calls that succeeded before the first disturbance; `None` if nothing disturbs.
    pub before: Option<f64>,
    /// The share of calls that succeeded after the last disturbance and the time for recovering from it.
    pub after: Option<f64>,
}

impl Numbers {
    pub(crate) fn of(tally: &Tally) -> Self {
        let total = tally.total();
        let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        let secs = |span: tidegate_core::Span| span.as_micros() as f64 / 1e6;
        let recovery = tally.recovery();
        Self {
            offered: total.offered as f64,
            succeeded: total.succeeded as f64,
            failed: total.failed as f64,
            refused: total.refused as f64,
            declined: total.declined as f64,
            attempts: total.attempts as f64,
            throttled: total.throttled as f64,
            success: share(total.succeeded, total.succeeded + total.failed + total.refused + total.declined),
            load: share(total.attempts, total.offered),
            goodput: tally.goodput(),
            mean: tally.mean_delay().map(secs),
            p50: tally.delay_at(0.5).map(secs),
            p99: tally.delay_at(0.99).map(secs),
            elapsed: secs(tally.last_end()),
            busiest: tally.busiest() as f64,
            before: recovery.map(|(before, _)| before),
            after: recovery.map(|(_, after)| after),
        }
    }

    pub(crate) fn mean(results: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| results.iter().map(of).sum::<f64>() / results.len().max(1) as f64;
        let known = |of: fn(&Self) -> Option<f64>| {
            let known: Vec<f64> = results.iter().filter_map(of).collect();
            (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
        };
        Self {
            offered: mean(|numbers| numbers.offered),
            succeeded: mean(|numbers| numbers.succeeded),
            failed: mean(|numbers| numbers.failed),
            refused: mean(|numbers| numbers.refused),
            declined: mean(|numbers| numbers.declined),
            attempts: mean(|numbers| numbers.attempts),
            throttled: mean(|numbers| numbers.throttled),
            success: mean(|numbers| numbers.success),
            load: mean(|numbers| numbers.load),
            goodput: mean(|numbers| numbers.goodput),
            mean: known(|numbers| numbers.mean),
            p50: known(|numbers| numbers.p50),
            p99: known(|numbers| numbers.p99),
            elapsed: mean(|numbers| numbers.elapsed),
            busiest: mean(|numbers| numbers.busiest),
            before: known(|numbers| numbers.before),
            after: known(|numbers| numbers.after),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_without_a_success_have_no_delay() {
        let of = |succeeded, delay| Numbers { succeeded, mean: delay, p50: delay, p99: delay, ..Numbers::default() };
        let found = Numbers::mean(&[of(10.0, Some(3.0)), of(0.0, None), of(20.0, Some(5.0))]);
        assert_eq!((found.succeeded, found.mean, found.p50, found.p99), (10.0, Some(4.0), Some(4.0), Some(4.0)));
        assert_eq!(Numbers::mean(&[of(0.0, None)]).p99, None);
    }
}
