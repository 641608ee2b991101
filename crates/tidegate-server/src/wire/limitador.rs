//! The limits of limitador's files, for its HTTP API and the rate limit service.
//!
//! All limits that apply to a request decide about it together: each of them counts it, or none does. There may be more of
//! them than a batch holds, and a cluster keeps their keys on several servers. So they are asked before they count. If
//! another request comes between, what was counted is given back.

use std::collections::BTreeMap;

use futures_util::future::{join_all, try_join_all};
use http::header::{HeaderName, HeaderValue};
use http::{Response, StatusCode};
use serde::Deserialize;
use tidegate::policy::{MatchedActions, Query};
use tidegate::store::Store;
use tidegate::{CheckError, Decision, Gate};
use tidegate_core::Clock;
use tidegate_policy::ratelimit_yaml::{Amount, ConditionalLimit, DescriptorLimit};

use crate::access_log::AccessSlot;
use crate::body::ResponseBody;
use crate::local_response::{json, json_response, text};
use crate::metrics::RequestMetrics;
use crate::refusal_log::RefusalLog;
use crate::wire::compat::read_request;
use crate::wire::decision_request::{DecisionRequest, DecisionRequestError};
use crate::wire::http_api::{ApiState, check_error_response, decide};
use crate::wire::rls::{YamlLimits, strictness};

const X_RATELIMIT_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_RATELIMIT_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RATELIMIT_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// The counters that the store is asked for at a time.
const COUNTERS_AT_ONCE: usize = 32;

/// A limit that applies to a request, and the question to it.
pub(crate) struct LimitCheck<'t> {
    pub(crate) limit: &'t DescriptorLimit,
    pub(crate) actions: MatchedActions,
    pub(crate) request: DecisionRequest<'static>,
}

/// The meaning of a request to the HTTP API.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To ask without counting.
    Check,
    /// To count without asking.
    Report,
    CheckAndReport,
}

/// The parts of a listener's state that decide.
pub(crate) struct Decider<'s, S: Store, C: Clock> {
    pub(crate) gate: &'s Gate<S, C>,
    pub(crate) refusals: &'s RefusalLog,
    pub(crate) metrics: &'s RequestMetrics,
}

impl<S: Store, C: Clock> Decider<'_, S, C> {
    /// The present decisions of the limits, in their order. Counts nothing.
    pub(crate) async fn ask(&self, limits: &[LimitCheck<'_>]) -> Result<Vec<Decision>, CheckError> {
        try_join_all(limits.iter().map(|limit| self.status(limit))).await
    }

    /// Decides about a request under all limits that apply to it. The decisions are in the order of the limits.
    pub(crate) async fn decide_together(
        &self,
        limits: &[LimitCheck<'_>],
        access: &AccessSlot,
    ) -> Result<Vec<Decision>, CheckError> {
        let mut decisions = if limits.len() > 1 { self.ask(limits).await? } else { Vec::new() };
        if let Some(index) = decisions.iter().position(|decision| !decision.allowed) {
            decisions[index] = self.decide_one(&limits[index], access).await?;
            if !decisions[index].allowed {
                return Ok(decisions);
            }
            self.give_back(&limits[index]).await;
        }
        let decided = join_all(limits.iter().map(|limit| self.decide_one(limit, access))).await;
        let is_refused = decided.iter().any(|decided| decided.as_ref().is_ok_and(|decision| !decision.allowed));
        // Another request came between, or the store has failed.
        if is_refused || decided.iter().any(Result::is_err) {
            let admitted = |decided: &Result<Decision, _>| decided.as_ref().is_ok_and(|decision| decision.allowed);
            let counted = limits.iter().zip(&decided).filter(|(_, decided)| admitted(decided));
            join_all(counted.map(|(limit, _)| self.give_back(limit))).await;
        }
        decided.into_iter().collect()
    }

    async fn decide_one(&self, limit: &LimitCheck<'_>, access: &AccessSlot) -> Result<Decision, CheckError> {
        let query = limit.request.query();
        let decision = decide(self.gate, self.metrics, &query).await?;
        self.refusals.log_decision(self.gate.plan(), limit.actions, &query, &decision, access);
        Ok(decision)
    }

    /// Gives back what a limit has counted. The decision stands if the store fails now.
    async fn give_back(&self, limit: &LimitCheck<'_>) {
        if let Err(error) = self.gate.refund(&limit.request.query()).await {
            self.refusals.log_failure(self.gate.clock().now(), &error);
        }
    }

    /// Gives back what was counted, and returns the decisions about nothing more.
    pub(crate) async fn refund(&self, limits: &[LimitCheck<'_>]) -> Result<Vec<Decision>, CheckError> {
        try_join_all(limits.iter().map(|limit| self.refund_one(limit))).await
    }

    async fn status(&self, limit: &LimitCheck<'_>) -> Result<Decision, CheckError> {
        self.gate.status(&limit.request.query()).await
    }

    async fn refund_one(&self, limit: &LimitCheck<'_>) -> Result<Decision, CheckError> {
        let query = limit.request.query();
        self.gate.refund(&query).await?;
        self.gate.status(&Query { cost: Some(0), ..query }).await
    }

    async fn charge(&self, limit: &LimitCheck<'_>) -> Result<(), CheckError> {
        self.gate.charge(&limit.request.query()).await
    }

    /// Counts what has happened already, even if there is no room.
    pub(crate) async fn report(&self, limits: &[LimitCheck<'_>]) -> Result<(), CheckError> {
        try_join_all(limits.iter().map(|limit| self.charge(limit))).await.map(drop)
    }
}

/// True if one of several decisions refuses.
pub(crate) fn is_refused(decisions: &[Decision]) -> bool {
    decisions.iter().any(|decision| !decision.allowed)
}

/// The index of the decision that binds most.
pub(crate) fn tightest(decisions: &[Decision]) -> Option<usize> {
    (0..decisions.len()).max_by_key(|index| strictness(&decisions[*index]))
}

/// A question to the HTTP API.
#[derive(Deserialize)]
pub(super) struct CheckRequest {
    namespace: String,
    values: BTreeMap<String, String>,
    delta: u64,
    response_headers: Option<String>,
}

/// Answers a question as limitador does: `null` with the status 200 or 429.
pub(crate) async fn answer<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    purpose: Purpose,
    body: &[u8],
    access: &AccessSlot,
) -> Result<Response<ResponseBody>, DecisionRequestError> {
    let asked: CheckRequest = read_request(body)?;
    let descriptor = asked.values.iter().map(|(key, value)| (&**key, &**value)).collect();
    let questions = match &api.limits {
        Some(limits) => limits.applying(&asked.namespace, [descriptor], asked.delta)?.unwrap_or_default(),
        None => Vec::new(),
    };
    let decider = Decider { gate: &api.gate, refusals: &api.refusals, metrics: &api.metrics };
    let decided = match purpose {
        Purpose::Check => decider.ask(&questions).await,
        Purpose::Report => decider.report(&questions).await.map(|()| Vec::new()),
        Purpose::CheckAndReport => decider.decide_together(&questions, access).await,
    };
    let decisions = match decided {
        Ok(decisions) => decisions,
        Err(error) => {
            let query = questions.first().map(|question| question.request.query()).unwrap_or_default();
            return Ok(check_error_response(&api.gate, &api.refusals, &query, &error, access));
        }
    };
    let refuses = is_refused(&decisions);
    let status = if refuses { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
    let mut response = match (purpose, refuses) {
        (Purpose::Check, true) => text(status, "Too many requests"),
        _ => json(status, "null".into()),
    };
    if asked.response_headers.as_deref() == Some("DraftVersion03") && purpose == Purpose::CheckAndReport {
        let headers = response.headers_mut();
        for (name, value) in draft_03_headers(&questions, &decisions) {
            if let Ok(value) = HeaderValue::try_from(value) {
                headers.insert(name, value);
            }
        }
    }
    if let Some(index) = tightest(&decisions).filter(|_| refuses) {
        let refusal = api.replies.refusal(questions[index].actions, &decisions[index], &http::HeaderMap::new());
        if let Some(wait) = refusal.headers().get(http::header::RETRY_AFTER) {
            response.headers_mut().insert(http::header::RETRY_AFTER, wait.clone());
        }
    }
    Ok(response)
}

/// The headers of version 3 of the draft: all limits, the tightest first.
pub(crate) fn draft_03_headers(questions: &[LimitCheck<'_>], decisions: &[Decision]) -> Vec<(HeaderName, String)> {
    let Some(first) = tightest(decisions) else { return Vec::new() };
    let mut order: Vec<usize> = (0..decisions.len()).collect();
    order.sort_by_key(|index| decisions[*index].remaining);
    let window = |index: &usize| {
        let DescriptorLimit { limit, .. } = questions[*index].limit;
        let Amount::PerSeconds { hits, seconds } = limit.amount else { return String::new() };
        let name = limit.name.as_ref().map(|name| format!(";name=\"{}\"", name.replace('"', "'"))).unwrap_or_default();
        format!(", {hits};w={seconds}{name}")
    };
    let windows: String = order.iter().map(window).collect();
    let tightest = &decisions[first];
    let reset = tightest.retry_after.unwrap_or(tightest.reset_after);
    vec![
        (X_RATELIMIT_LIMIT, format!("{}{windows}", tightest.limit.unwrap_or_default())),
        (X_RATELIMIT_REMAINING, tightest.remaining.unwrap_or_default().to_string()),
        (X_RATELIMIT_RESET, reset.as_secs_ceil().to_string()),
    ]
}

/// Answers `/limits/NAMESPACE`.
pub(crate) fn limits<S: Store, C: Clock>(api: &ApiState<S, C>, namespace: &str) -> Response<ResponseBody> {
    let limits = api.limits.as_ref().map_or(&[][..], |limits| limits.namespace(namespace));
    let limits: Vec<_> = limits.iter().map(|(_, limit)| limit_json(limit)).collect();
    json_response(StatusCode::OK, &limits)
}

/// Answers `/counters/NAMESPACE`, with the counts of limits without variables. Stores have no list of the others.
pub(crate) async fn counters<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    namespace: &str,
    access: &AccessSlot,
) -> Result<Response<ResponseBody>, DecisionRequestError> {
    let Some(table) = &api.limits else { return Ok(json_response(StatusCode::OK, &[(); 0])) };
    let limits = table.namespace(namespace).iter().filter(|(_, limit)| limit.variables().next().is_none());
    let (mut questions, mut counted) = (Vec::new(), Vec::new());
    for (index, limit) in limits {
        questions.push(table.question(*index, String::new(), 1)?);
        counted.push(limit);
    }
    let decider = Decider { gate: &api.gate, refusals: &api.refusals, metrics: &api.metrics };
    let mut decisions = Vec::with_capacity(questions.len());
    for some in questions.chunks(COUNTERS_AT_ONCE) {
        match decider.ask(some).await {
            Ok(decided) => decisions.extend(decided),
            Err(error) => {
                let query = some[0].request.query();
                return Ok(check_error_response(&api.gate, &api.refusals, &query, &error, access));
            }
        }
    }
    let counters: Vec<_> = decisions
        .iter()
        .zip(counted)
        .filter(|(decision, limit)| decision.remaining != Some(limit.max_value))
        .map(|(decision, limit)| {
            serde_json::json!({
                "limit": limit_json(limit),
                "set_variables": {},
                "remaining": decision.remaining,
                "expires_in_seconds": decision.reset_after.as_secs_ceil(),
            })
        })
        .collect();
    Ok(json_response(StatusCode::OK, &counters))
}

fn limit_json(limit: &ConditionalLimit) -> serde_json::Value {
    serde_json::json!({
        "id": limit.id,
        "namespace": limit.namespace,
        "max_value": limit.max_value,
        "seconds": limit.seconds,
        "name": limit.name,
        "conditions": limit.conditions().collect::<Vec<_>>(),
        "variables": limit.variables().collect::<Vec<_>>(),
    })
}

impl YamlLimits {
    /// The questions to all limits of a namespace that apply to a request with these descriptors. `None` if no file has the
    /// namespace.
    pub(crate) fn applying<'e>(
        &self,
        namespace: &str,
        descriptors: impl IntoIterator<Item = Vec<(&'e str, &'e str)>>,
        hits: u64,
    ) -> Result<Option<Vec<LimitCheck<'_>>>, DecisionRequestError> {
        let Some(found) = self.table().applying(namespace, descriptors) else { return Ok(None) };
        let questions = found.into_iter().map(|found| self.question(found.index, found.key, hits));
        questions.collect::<Result<_, _>>().map(Some)
    }

    fn namespace(&self, namespace: &str) -> &[(usize, ConditionalLimit)] {
        self.table().namespace(namespace).unwrap_or_default()
    }
}
