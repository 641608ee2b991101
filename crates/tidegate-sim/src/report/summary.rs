//! The summary of a run.

use tidegate_core::Span;

use crate::stats::RunStats;

/// The summary of a run, or the means of several repetitions.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct RunSummary {
    /// Calls that began.
    pub offered: f64,
    /// Calls that succeeded.
    pub succeeded: f64,
    /// Calls that failed.
    pub failed: f64,
    /// Calls with a refused last request.
    pub refused: f64,
    /// Calls that their own client declined to send.
    pub declined: f64,
    /// Attempts that were sent.
    pub attempts: f64,
    /// Requests that were refused for a limit or a full queue.
    pub throttled: f64,
    /// The share of ended calls that succeeded, from 0 to 1.
    pub success_share: f64,
    /// The number of attempts per call: the amplification of the load.
    pub attempts_per_call: f64,
    /// Calls that succeeded per second, over the measured range.
    #[serde(rename = "goodput_per_second")]
    pub goodput: f64,
    /// The mean delay of successful calls, in seconds; `None` if there are none. Of several repetitions, the mean over
    /// those with successful calls. The same holds for the next two.
    #[serde(rename = "mean_delay_seconds")]
    pub mean_delay: Option<f64>,
    /// The median delay of successful calls, in seconds.
    #[serde(rename = "median_delay_seconds")]
    pub p50_delay: Option<f64>,
    /// The 99th percentile of successful calls' delays, in seconds.
    #[serde(rename = "p99_delay_seconds")]
    pub p99_delay: Option<f64>,
    /// The median delay of the calls that succeeded in the measured range, in seconds. The same holds for the next two.
    #[serde(rename = "measured_median_delay_seconds")]
    pub measured_p50_delay: Option<f64>,
    /// The 99th percentile of their delays, in seconds.
    #[serde(rename = "measured_p99_delay_seconds")]
    pub measured_p99_delay: Option<f64>,
    /// The fairness between clients, by their successful calls, from 0 to 1.
    pub fairness: Option<f64>,
    /// The share of attempts that ended without success, of those that ended in the measured range; from 0 to 1.
    pub wasted_share: f64,
    /// The time of the last call's end, in seconds.
    #[serde(rename = "elapsed_seconds")]
    pub elapsed: f64,
    /// The largest number of requests that arrived at the service within 100 ms.
    #[serde(rename = "busiest_100ms")]
    pub busiest: f64,
    /// The share of calls that succeeded before the first disturbance, from 0 to 1; `None` if nothing disturbs.
    pub success_share_before: Option<f64>,
    /// The share of calls that succeeded after the last disturbance and the recovery time, from 0 to 1.
    pub success_share_after: Option<f64>,
}

impl RunSummary {
    pub(crate) fn from_stats(stats: &RunStats) -> Self {
        let total = &stats.total;
        let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        let recovery = stats.recovery_shares();
        Self {
            offered: total.offered as f64,
            succeeded: total.succeeded as f64,
            failed: total.failed as f64,
            refused: total.refused as f64,
            declined: total.declined as f64,
            attempts: total.attempts as f64,
            throttled: total.throttled as f64,
            success_share: share(total.succeeded, total.succeeded + total.failed + total.refused + total.declined),
            attempts_per_call: share(total.attempts, total.offered),
            goodput: stats.goodput(),
            mean_delay: stats.mean_delay().map(Span::as_secs_f64),
            p50_delay: stats.delay_quantile(0.5).map(Span::as_secs_f64),
            p99_delay: stats.delay_quantile(0.99).map(Span::as_secs_f64),
            measured_p50_delay: stats.measured.delay_quantile(0.5).map(Span::as_secs_f64),
            measured_p99_delay: stats.measured.delay_quantile(0.99).map(Span::as_secs_f64),
            fairness: stats.measured.fairness(),
            wasted_share: share(stats.measured.wasted, stats.measured.attempts),
            elapsed: stats.last_ended_at.as_secs_f64(),
            busiest: stats.busiest as f64,
            success_share_before: recovery.map(|(before, _)| before),
            success_share_after: recovery.map(|(_, after)| after),
        }
    }

    pub(crate) fn mean_of(summaries: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| summaries.iter().map(of).sum::<f64>() / summaries.len().max(1) as f64;
        let known = |of: fn(&Self) -> Option<f64>| {
            let known: Vec<f64> = summaries.iter().filter_map(of).collect();
            (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
        };
        Self {
            offered: mean(|summary| summary.offered),
            succeeded: mean(|summary| summary.succeeded),
            failed: mean(|summary| summary.failed),
            refused: mean(|summary| summary.refused),
            declined: mean(|summary| summary.declined),
            attempts: mean(|summary| summary.attempts),
            throttled: mean(|summary| summary.throttled),
            success_share: mean(|summary| summary.success_share),
            attempts_per_call: mean(|summary| summary.attempts_per_call),
            goodput: mean(|summary| summary.goodput),
            mean_delay: known(|summary| summary.mean_delay),
            p50_delay: known(|summary| summary.p50_delay),
            p99_delay: known(|summary| summary.p99_delay),
            measured_p50_delay: known(|summary| summary.measured_p50_delay),
            measured_p99_delay: known(|summary| summary.measured_p99_delay),
            fairness: known(|summary| summary.fairness),
            wasted_share: mean(|summary| summary.wasted_share),
            elapsed: mean(|summary| summary.elapsed),
            busiest: mean(|summary| summary.busiest),
            success_share_before: known(|summary| summary.success_share_before),
            success_share_after: known(|summary| summary.success_share_after),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_without_success_have_no_delay() {
        let of = |succeeded, delay| RunSummary {
            succeeded,
            mean_delay: delay,
            p50_delay: delay,
            p99_delay: delay,
            ..RunSummary::default()
        };
        let found = RunSummary::mean_of(&[of(10.0, Some(3.0)), of(0.0, None), of(20.0, Some(5.0))]);
        assert_eq!(
            (found.succeeded, found.mean_delay, found.p50_delay, found.p99_delay),
            (10.0, Some(4.0), Some(4.0), Some(4.0))
        );
        assert_eq!(RunSummary::mean_of(&[of(0.0, None)]).p99_delay, None);
    }
}
