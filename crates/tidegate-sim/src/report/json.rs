//! A report as JSON.

use serde_json::{Value, json};

use super::{Report, Run};
use crate::stats::LoadCounts;

impl Report {
    /// Returns all numbers as JSON.
    pub fn json(&self) -> String {
        let runs: Vec<Value> = self.runs.iter().map(run_json).collect();
        let whole = json!({ "title": self.title, "about": self.about, "seed": self.seed, "runs": runs });
        format!("{whole:#}\n")
    }
}

fn run_json(run: &Run) -> Value {
    let stats = &run.first_trial;
    let load = |(name, counts): (&String, &LoadCounts)| json!({ "name": name, "offered": counts.offered, "succeeded": counts.succeeded });
    let loads: Vec<Value> = run.loads.iter().zip(&stats.loads).map(load).collect();
    json!({
        "case": run.case,
        "strategy": run.strategy,
        "trials": run.trials,
        "recovered": run.recovered(),
        "worst_trial": run.worst_trial.map(|(before, after)| {
            json!({ "success_share_before": before, "success_share_after": after })
        }),
        "means": run.summary,
        "first_trial": {
            "bucket_seconds": stats.bucket_width.as_secs_f64(),
            "buckets": stats.buckets,
            "loads": loads,
        },
    })
}
