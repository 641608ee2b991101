//! The limits of limitador's files, for its HTTP API and the rate limit service.
//!
//! All limits that apply to a request decide about it together: each of them counts it, or none does. They are asked
//! before they count. If another request comes between, what was counted is given back.

use std::collections::BTreeMap;

use http::header::{HeaderName, HeaderValue};
use http::{Response, StatusCode};
use serde::Deserialize;
use tidegate::policy::MatchedActions;
use tidegate::store::Store;
use tidegate::{CheckError, Decision, Gate};
use tidegate_core::Clock;
use tidegate_policy::ratelimit_yaml::{Amount, ConditionalLimit, DescriptorLimit};

use crate::access_log::AccessSlot;
use crate::body::ResponseBody;
use crate::local_response::{json, json_response};
use crate::metrics::RequestMetrics;
use crate::refusal_log::RefusalLog;
use crate::wire::compat::read_question;
use crate::wire::decision_request::{DecisionRequest, DecisionRequestError};
use crate::wire::http_api::{ApiState, check_error_response, decide};
use crate::wire::rls::{YamlLimits, strictness};

const X_RATELIMIT_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_RATELIMIT_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RATELIMIT_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// A limit that applies to a request, and the question to it.
pub(crate) struct LimitQuestion<'t> {
    pub(crate) limit: &'t DescriptorLimit,
    pub(crate) actions: MatchedActions,
    pub(crate) request: DecisionRequest<'static>,
}

/// The meaning of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To ask without counting.
    Check,
    /// To count as far as the limits allow.
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
    /// Decides about a request under all limits that apply to it. The decisions are in the order of the questions.
    pub(crate) async fn decide_together(
        &self,
        questions: &[LimitQuestion<'_>],
        purpose: Purpose,
        access: &AccessSlot,
    ) -> Result<Vec<Decision>, CheckError> {
        let mut decisions = Vec::with_capacity(questions.len());
        if questions.len() > 1 || purpose != Purpose::CheckAndReport {
            for question in questions {
                decisions.push(self.gate.status(&question.request.query()).await?);
            }
        }
        if purpose == Purpose::Check {
            return Ok(decisions);
        }
        // One that refuses comes first, so that no other has counted the request.
        let mut order: Vec<usize> = (0..questions.len()).collect();
        order.sort_by_key(|index| decisions.get(*index).is_none_or(|decision| decision.allowed));
        for (place, &index) in order.iter().enumerate() {
            let LimitQuestion { actions, request, .. } = &questions[index];
            let mut query = request.query();
            if purpose == Purpose::Report {
                // What doesn't fit isn't counted, so that a report fills the limit at most.
                query.cost = query.cost.min(decisions[index].remaining.or(query.cost));
                if query.cost == Some(0) {
                    continue;
                }
            }
            let decision = decide(self.gate, self.metrics, &query).await?;
            self.refusals.log_decision(self.gate.plan(), *actions, &query, &decision, access);
            let is_refused = !decision.allowed && purpose == Purpose::CheckAndReport;
            match decisions.get_mut(index) {
                Some(known) => *known = decision,
                None => decisions.push(decision),
            }
            if is_refused {
                // Another request came between the first question and this one. The refusal stands though the store may
                // fail now.
                for &counted in &order[..place] {
                    if let Err(error) = self.gate.refund(&questions[counted].request.query()).await {
                        self.refusals.log_failure(self.gate.clock().now(), &error);
                    }
                }
                break;
            }
        }
        Ok(decisions)
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
pub(super) struct Question {
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
    let asked: Question = read_question(body)?;
    let descriptor = asked.values.iter().map(|(key, value)| (&**key, &**value)).collect();
    let questions = match &api.limits {
        Some(limits) => limits.applying(&asked.namespace, [descriptor], asked.delta)?.unwrap_or_default(),
        None => Vec::new(),
    };
    let decider = Decider { gate: &api.gate, refusals: &api.refusals, metrics: &api.metrics };
    let decisions = match decider.decide_together(&questions, purpose, access).await {
        Ok(decisions) => decisions,
        Err(error) => {
            let query = questions.first().map(|question| question.request.query()).unwrap_or_default();
            return Ok(check_error_response(&api.gate, &api.refusals, &query, &error, access));
        }
    };
    let refuses = is_refused(&decisions) && purpose != Purpose::Report;
    let status = if refuses { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
    let mut response = json(status, "null".into());
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
pub(crate) fn draft_03_headers(questions: &[LimitQuestion<'_>], decisions: &[Decision]) -> Vec<(HeaderName, String)> {
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
    let mut counters = Vec::new();
    let Some(table) = &api.limits else { return Ok(json_response(StatusCode::OK, &counters)) };
    for (index, limit) in table.namespace(namespace).iter().filter(|(_, limit)| limit.variables().next().is_none()) {
        let question = table.question(*index, String::new(), 1)?;
        let query = question.request.query();
        match api.gate.status(&query).await {
            Ok(decision) if decision.remaining == Some(limit.max_value) => {}
            Ok(decision) => counters.push(serde_json::json!({
                "limit": limit_json(limit),
                "set_variables": {},
                "remaining": decision.remaining,
                "expires_in_seconds": decision.reset_after.as_secs_ceil(),
            })),
            Err(error) => return Ok(check_error_response(&api.gate, &api.refusals, &query, &error, access)),
        }
    }
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
    ) -> Result<Option<Vec<LimitQuestion<'_>>>, DecisionRequestError> {
        let Some(found) = self.table().applying(namespace, descriptors) else { return Ok(None) };
        let questions = found.into_iter().map(|found| self.question(found.index, found.key, hits));
        questions.collect::<Result<_, _>>().map(Some)
    }

    fn namespace(&self, namespace: &str) -> &[(usize, ConditionalLimit)] {
        self.table().namespace(namespace).unwrap_or_default()
    }
}
