//! A report as JSON.

use serde_json::{Value, json};

use super::{Report, Run};
use crate::stats::TimeBucket;

pub(super) fn to_json(report: &Report) -> String {
    let runs: Vec<Value> = report.runs.iter().map(run_json).collect();
    let whole = json!({ "title": report.title, "about": report.about, "seed": report.seed, "runs": runs });
    format!("{whole:#}\n")
}

fn run_json(run: &Run) -> Value {
    let numbers = &run.summary;
    let width = run.first_trial.bucket_width().as_micros() as f64 / 1e6;
    let loads: Vec<Value> = run
        .loads
        .iter()
        .zip(run.first_trial.loads())
        .map(|(name, seen)| json!({ "name": name, "offered": seen.offered, "succeeded": seen.succeeded }))
        .collect();
    let buckets: Vec<Value> = run.first_trial.buckets().iter().map(bucket_json).collect();
    json!({
        "case": run.case,
        "strategy": run.strategy,
        "trials": run.trials,
        "recovered": run.recovered(),
        "worst_trial": run.worst_trial.map(|(before, after)| {
            json!({ "success_share_before": before, "success_share_after": after })
        }),
        "means": {
            "offered": numbers.offered,
            "succeeded": numbers.succeeded,
            "failed": numbers.failed,
            "refused": numbers.refused,
            "declined": numbers.declined,
            "attempts": numbers.attempts,
            "throttled": numbers.throttled,
            "success_share": numbers.success_share,
            "attempts_per_call": numbers.attempts_per_call,
            "goodput_per_second": numbers.goodput,
            "mean_delay_seconds": numbers.mean_delay,
            "median_delay_seconds": numbers.p50_delay,
            "p99_delay_seconds": numbers.p99_delay,
            "elapsed_seconds": numbers.elapsed,
            "busiest_100ms": numbers.busiest,
            "success_share_before": numbers.success_share_before,
            "success_share_after": numbers.success_share_after,
        },
        "first_trial": { "bucket_seconds": width, "buckets": buckets, "loads": loads },
    })
}

fn bucket_json(bucket: &TimeBucket) -> Value {
    json!({
        "offered": bucket.offered,
        "attempts": bucket.attempts,
        "admitted": bucket.admitted,
        "throttled": bucket.throttled,
        "succeeded": bucket.succeeded,
        "failed": bucket.failed,
        "refused": bucket.refused,
        "declined": bucket.declined,
        "queue": bucket.queue,
        "working": bucket.working,
        "waiting": bucket.waiting,
    })
}
