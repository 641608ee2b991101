//! A report as JSON.

use serde_json::{Value, json};

use super::{Report, Run};
use crate::tally::Bucket;

pub(super) fn json(report: &Report) -> String {
    let runs: Vec<Value> = report.runs.iter().map(run).collect();
    let whole = json!({ "title": report.title, "about": report.about, "seed": report.seed, "runs": runs });
    format!("{whole:#}\n")
}

fn run(run: &Run) -> Value {
    let numbers = &run.numbers;
    let width = run.tally.width().as_micros() as f64 / 1e6;
    let loads: Vec<Value> = run
        .loads
        .iter()
        .zip(run.tally.loads())
        .map(|(name, seen)| json!({ "name": name, "offered": seen.offered, "succeeded": seen.succeeded }))
        .collect();
    let buckets: Vec<Value> = run.tally.buckets().iter().map(bucket).collect();
    json!({
        "case": run.case,
        "strategy": run.strategy,
        "trials": run.trials,
        "recovered": run.recovered(),
        "worst_trial": run.worst.map(|(before, after)| {
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
            "success_share": numbers.success,
            "attempts_per_call": numbers.load,
            "goodput_per_second": numbers.goodput,
            "mean_delay_seconds": numbers.mean,
            "median_delay_seconds": numbers.p50,
            "p99_delay_seconds": numbers.p99,
            "elapsed_seconds": numbers.elapsed,
            "busiest_100ms": numbers.busiest,
            "success_share_before": numbers.before,
            "success_share_after": numbers.after,
        },
        "first_trial": { "bucket_seconds": width, "buckets": buckets, "loads": loads },
    })
}

fn bucket(bucket: &Bucket) -> Value {
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
