//! Trials: the requests of the last hour, decided by other terms of a limit.

use std::fmt;

use http::StatusCode;
use serde::Serialize;
use tidegate::Time;
use tidegate_core::time::UtcText;
use tidegate_core::{LimitId, LimitKind};
use tidegate_policy::document::nearest;
use tidegate_policy::{ActionId, EditedLimit, KeyPart, LimitTermsError, Plan, Policy};
use tidegate_replay::{JudgedCalls, format_percent, judge_calls};
use tokio::sync::OwnedSemaphorePermit;

use crate::request_history::{REMEMBERED, RememberedCalls, RequestHistory};
use crate::states::SharedParts;

/// The most bytes of the terms that are tried.
pub(crate) const MAX_TERMS: usize = 4000;
/// The name of the limits of `inbound.global`, in place of an action.
pub(crate) const GLOBAL: &str = "global";

/// A limit, and the terms that are tried, as a caller names them.
#[derive(Clone, Debug, Default)]
pub(crate) struct TrialRequest {
    pub(crate) action: String,
    /// The name of the limit, with or without the action's. Empty for the only one.
    pub(crate) limit: String,
    /// The terms in the words of a policy.
    pub(crate) terms: String,
}

/// The reason that nothing was tried.
#[derive(Debug)]
pub(crate) enum TrialError {
    /// A field of the request is wrong.
    Field(&'static str, String),
    /// No requests are remembered.
    Off,
    /// Another trial is running.
    Busy,
    /// The trial broke off.
    Failed,
}

impl TrialError {
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Field(..) => StatusCode::BAD_REQUEST,
            Self::Off => StatusCode::NOT_FOUND,
            Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Self::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl fmt::Display for TrialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(_, message) => f.write_str(message),
            Self::Off => f.write_str("no requests are remembered: admin.history_bytes is off"),
            Self::Busy => f.write_str("another trial is running"),
            Self::Failed => f.write_str("the trial has failed"),
        }
    }
}

/// The result of a trial.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TrialReport {
    pub(crate) action: String,
    pub(crate) limit: String,
    pub(crate) summary: String,
    /// The times of the first remembered request and of the trial; `None` without requests.
    pub(crate) from: Option<String>,
    pub(crate) to: String,
    /// The number of remembered requests, of all actions.
    pub(crate) remembered: usize,
    /// The requests of the action, or all for a limit of `inbound.global`.
    pub(crate) requests: u64,
    pub(crate) clients: u64,
    /// The share of clients whose requests are remembered, from 0 to 1.
    pub(crate) share: f64,
    /// The limits that clients share, and that met only the remembered ones. Empty if all are.
    pub(crate) sampled_limits: Vec<String>,
    /// Sentences on what the numbers leave out.
    pub(crate) notes: Vec<String>,
    pub(crate) current: TermsReport,
    pub(crate) edited: TermsReport,
    pub(crate) series: Vec<IntervalReport>,
    /// The length of an interval of the series in seconds.
    pub(crate) interval: u64,
    /// The lines to write in the policy.
    pub(crate) toml: String,
}

/// The decisions by some terms.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TermsReport {
    /// The limit in words.
    pub(crate) description: String,
    pub(crate) refused: u64,
    /// The refused share of requests, from 0 to 1.
    pub(crate) refused_share: f64,
    pub(crate) refused_clients: u64,
    /// The requests that the limit itself refused, as full or by a block.
    pub(crate) refused_by_limit: u64,
    /// The requests that a limit in shadow would have refused.
    pub(crate) refused_in_shadow: u64,
    pub(crate) refused_in_shadow_clients: u64,
}

/// The requests of one interval.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct IntervalReport {
    /// The start, in seconds since the epoch.
    pub(crate) at: u64,
    pub(crate) requests: u64,
    pub(crate) current_refused: u64,
    pub(crate) edited_refused: u64,
}

/// A trial that may run.
struct Trial {
    policy: Policy,
    action: Option<ActionId>,
    limit: LimitId,
    edited: EditedLimit,
}

/// Tries terms on a blocking thread, if no other trial is running.
pub(crate) async fn run_trial(
    policy: &Policy,
    parts: &SharedParts,
    request: &TrialRequest,
    now: Time,
) -> Result<TrialReport, TrialError> {
    let history = parts.request_history.clone().ok_or(TrialError::Off)?;
    let permit = parts.trials.clone().try_acquire_owned().map_err(|_| TrialError::Busy)?;
    let (policy, request) = (policy.clone(), request.clone());
    let running = tokio::task::spawn_blocking(move || {
        let _permit: OwnedSemaphorePermit = permit;
        Ok(Trial::new(policy, &request)?.run(&history, now))
    });
    running.await.unwrap_or(Err(TrialError::Failed))
}

impl Trial {
    fn new(policy: Policy, request: &TrialRequest) -> Result<Self, TrialError> {
        let plan = policy.plan();
        let (action, limits) = find_action(plan, &request.action)?;
        let limit = find_limit(plan, limits, &request.action, &request.limit)?;
        let is_concurrency =
            |plan: &Plan| matches!(plan.limits().get(limit).map(|limit| limit.kind()), Some(LimitKind::Concurrency(_)));
        let terms = |message: String| TrialError::Field("terms", message);
        if request.terms.len() > MAX_TERMS {
            return Err(terms(format!("`terms` has {} bytes; at most {MAX_TERMS} are tried", request.terms.len())));
        }
        let edited = policy.with_limit_terms(limit, &request.terms).map_err(|error| match error {
            LimitTermsError::FixedKey { key } => terms(format!(
                "`{key}` can't be tried, because requests are remembered with hashes of their keys only; the terms are \
                 `limit`, `penalty`, `ban`, `count` and `mode`"
            )),
            error => terms(error.to_string().trim_start_matches("error: ").to_owned()),
        })?;
        if !plan.counts_same_requests(edited.policy.plan()) {
            let message = "these terms change the names of limits; name the whole list, or as many limits";
            return Err(terms(format!("{}: {message}", plan.limit_info(limit).name())));
        }
        if is_concurrency(plan) || is_concurrency(edited.policy.plan()) {
            let message = "calls in flight can't be tried, because the lengths of calls aren't remembered";
            return Err(terms(format!("{}: {message}", plan.limit_info(limit).name())));
        }
        Ok(Self { action, limit, edited, policy })
    }

    fn run(&self, history: &RequestHistory, now: Time) -> TrialReport {
        let (plan, calls) = (self.policy.plan(), history.calls(now));
        let judge = |policy: &Policy| judge_calls(policy, self.action, self.limit, calls.iter(plan));
        let (current, edited) = (judge(&self.policy), judge(&self.edited.policy));
        let intervals = current.timeline.intervals().iter().zip(edited.timeline.intervals());
        let (start, interval) =
            (current.timeline.start().as_micros() / 1_000_000, current.timeline.width().as_secs_ceil());
        let series = intervals.zip(0..).map(|((current, edited), index)| IntervalReport {
            at: start + index * interval,
            requests: current.requests(),
            current_refused: current.refused(),
            edited_refused: edited.refused(),
        });
        let sampled_limits = if calls.share() < 1.0 { self.shared_limits() } else { Vec::new() };
        TrialReport {
            action: self.action.map_or(GLOBAL, |action| plan.action(action).name()).to_owned(),
            limit: plan.limit_info(self.limit).name().to_owned(),
            summary: summary(plan.limit_info(self.limit).name(), &edited),
            from: calls.first_time().map(|at| UtcText::rounded_down(at).to_string()),
            to: UtcText::rounded_down(now).to_string(),
            remembered: calls.len(),
            requests: current.requests.requests,
            clients: current.clients,
            share: calls.share(),
            notes: self.notes(&calls, &sampled_limits, current.losses + edited.losses, now),
            sampled_limits,
            series: series.collect(),
            interval,
            toml: self.edited.toml.clone(),
            current: TermsReport::new(plan, self.limit, &current),
            edited: TermsReport::new(self.edited.policy.plan(), self.limit, &edited),
        }
    }

    /// The limits of the action that don't count each client by itself.
    fn shared_limits(&self) -> Vec<String> {
        let plan = self.policy.plan();
        let own = self.action.map_or(&[][..], |action| plan.action(action).limits());
        let is_shared = |limit: &&LimitId| !plan.key_parts(**limit).contains(&KeyPart::ClientIp);
        own.iter()
            .chain(plan.global())
            .filter(is_shared)
            .map(|limit| plan.limit_info(*limit).name().to_owned())
            .collect()
    }

    fn notes(&self, calls: &RememberedCalls, sampled: &[String], losses: u64, now: Time) -> Vec<String> {
        let mut notes = Vec::new();
        if calls.share() < 1.0 {
            let share = 1.0 / calls.share();
            notes.push(format!("One client in {share} is remembered, because not all requests fit in memory."));
        }
        if !sampled.is_empty() {
            notes.push(format!(
                "Clients share {}, which met only the remembered ones here: in truth it refuses more.",
                sampled.join(", ")
            ));
        }
        let known = calls.first_time().map_or(REMEMBERED, |from| now.since(from));
        let period = |plan: &Plan| plan.limit_info(self.limit).quantity().forget_time();
        if period(self.policy.plan()).max(period(self.edited.policy.plan())) > known {
            notes.push(format!(
                "{} counts for longer than requests are remembered. Both terms begin with nothing used.",
                self.policy.plan().limit_info(self.limit).name()
            ));
        }
        if losses > 0 {
            notes.push(
                "The memory of `store.max_bytes` was too small for the trial, so some counts are shared.".to_owned(),
            );
        }
        notes
    }
}

impl TermsReport {
    fn new(plan: &Plan, limit: LimitId, judged: &JudgedCalls) -> Self {
        let description =
            if plan.is_retired(limit) { "unlimited" } else { plan.limit_info(limit).description() }.to_owned();
        Self {
            description,
            refused: judged.requests.refused,
            refused_share: share(judged.requests.refused, judged.requests.requests),
            refused_clients: judged.refused_clients,
            refused_by_limit: judged.refusals.by_limit + judged.refusals.by_block,
            refused_in_shadow: judged.requests.refused_in_shadow,
            refused_in_shadow_clients: judged.shadow_refused_clients,
        }
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// The result in a sentence, with the limit.
fn summary(limit: &str, judged: &JudgedCalls) -> String {
    let JudgedCalls { requests, clients, refused_clients, .. } = judged;
    if requests.requests == 0 {
        return format!("{limit}: no request of its action in the last {} min", REMEMBERED.as_secs_ceil() / 60);
    }
    let count = crate::dashboard::count;
    let sentence = format!(
        "{limit} would have refused {} of requests, {} of {} client{}",
        format_percent(share(requests.refused, requests.requests)),
        count(*refused_clients),
        count(*clients),
        if *clients == 1 { "" } else { "s" },
    );
    match requests.refused_in_shadow {
        0 => sentence,
        shadow => format!(
            "{sentence}; in shadow, {} more, {} of them",
            format_percent(share(shadow, requests.requests)),
            count(judged.shadow_refused_clients)
        ),
    }
}

fn find_action<'p>(plan: &'p Plan, name: &str) -> Result<(Option<ActionId>, &'p [LimitId]), TrialError> {
    let wrong = |message| Err(TrialError::Field("action", message));
    if name.is_empty() {
        return wrong("`action` is missing: the name of an action, or `global`".to_owned());
    }
    if name == GLOBAL && !plan.global().is_empty() {
        return Ok((None, plan.global()));
    }
    match plan.actions().find(|(_, action)| action.name() == name) {
        Some((id, action)) => Ok((Some(id), action.limits())),
        None => {
            let names = plan.actions().map(|(_, action)| action.name());
            let meant = nearest(name, names).map(|meant| format!("; did you mean `{meant}`?")).unwrap_or_default();
            let name: String = name.chars().take(128).collect();
            wrong(format!("the policy has no action {name:?}{meant}"))
        }
    }
}

/// The limit of this name among those of an action. Its name may lack that of the action.
fn find_limit(plan: &Plan, limits: &[LimitId], action: &str, name: &str) -> Result<LimitId, TrialError> {
    let name_of = |limit: LimitId| plan.limit_info(limit).name();
    let is_named = |limit: &&LimitId| {
        let own = name_of(**limit);
        own == name || own.strip_prefix(action).and_then(|own| own.strip_prefix('.')) == Some(name)
    };
    match (limits, limits.iter().find(is_named)) {
        (_, Some(limit)) => Ok(*limit),
        ([only], None) if name.is_empty() => Ok(*only),
        ([], None) => Err(TrialError::Field("action", format!("`{action}` has no limit"))),
        (_, None) => {
            let names: Vec<&str> = limits.iter().map(|limit| name_of(*limit)).collect();
            Err(TrialError::Field(
                "limit",
                format!("`limit` is the name of a limit of `{action}`: {}", names.join(", ")),
            ))
        }
    }
}
