//! The replies to a client: rate-limit headers on every response of a limited action, and the refusal.
//!
//! They are formed only here; the [tower layer](crate) and the gate's servers both use this module. [`Replies::new`]
//! prepares everything that doesn't depend on the call. A reply then costs one small allocation per header.
//!
//! | dialect | policy | state |
//! | --- | --- | --- |
//! | [`Draft10`](HeaderDialect::Draft10) | `RateLimit-Policy: "login";q=5;w=60` | `RateLimit: "login";r=4;t=60` |
//! | [`Draft7`](HeaderDialect::Draft7) | `RateLimit-Policy: 5;w=60` | `RateLimit: limit=5, remaining=4, reset=60` |
//!
//! The policy names every limit that the action meets, and the state only the limit that bound the decision. If a call
//! has several actions ([`MatchedActions`]), the policy is that of the action with this limit, or else of the first
//! action. All times are whole seconds from now, rounded up. On admission, `t` is the time until that limit has its
//! full capacity again. On refusal it equals `Retry-After`, since the draft requires `Retry-After` to be no earlier
//! than `t`. `X-RateLimit-Reset` equals `t`.

mod grpc;
mod small_buffer;

use std::sync::Arc;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};
use tidegate_core::time::UtcText;
use tidegate_core::{Decision, Limit, LimitId, Reason};
use tidegate_policy::{ActionId, HeaderDialect, MatchedActions, Plan, RateLimitPolicyItem, TIDEGATE_RESERVATION};

pub use self::grpc::{grpc_response, grpc_type};
use self::small_buffer::{DecimalDigits, SmallBuffer, quoted_string};
use crate::{DecisionReport, ReservationReport};

/// `RateLimit-Policy`.
pub const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
/// `RateLimit`.
pub const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
/// `X-RateLimit-Limit`.
pub const X_RATELIMIT_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
/// `X-RateLimit-Remaining`.
pub const X_RATELIMIT_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
/// `X-RateLimit-Reset`, in seconds from now.
pub const X_RATELIMIT_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");
/// A value that is replaced in each reply.
const PLACEHOLDER: HeaderValue = HeaderValue::from_static("0");
const PROBLEM_TYPE: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const PROBLEM_TITLE: &str = "Request cannot be satisfied as assigned quota has been exceeded";
/// The sizes of text buffers on the stack: the state of a limit with a short name, a refusal, a report or a problem.
const STATE_BYTES: usize = 128;
const REFUSAL_BYTES: usize = 128;
const REPORT_BYTES: usize = 512;

/// The parts of a plan's replies that don't depend on the call.
#[derive(Clone, Debug)]
pub struct Replies {
    plan: Arc<Plan>,
    dialect: HeaderDialect,
    x_ratelimit: bool,
    /// The texts of each limit, by its index.
    limits: Vec<LimitTexts>,
    /// The headers of each action, by its index.
    actions: Vec<ActionHeaders>,
    /// The headers for calls that match no action.
    unmatched: ActionHeaders,
}

/// The headers that are the same in all replies of an action.
#[derive(Clone, Debug)]
struct ActionHeaders {
    /// The `RateLimit-Policy` of its limits and the global ones.
    policy_header: Option<HeaderValue>,
    /// The headers of a refusal. Copying them and replacing some values is cheaper than inserting each.
    refusal_template: HeaderMap,
    /// The headers of an admission in the decision API.
    admission_template: HeaderMap,
}

#[derive(Clone, Debug)]
struct LimitTexts {
    /// `"login";r=`, or empty if the dialect has no names.
    state_prefix: Box<[u8]>,
    /// `"login"`, as JSON.
    name_json: Box<str>,
    action: Option<ActionId>,
    capacity: u64,
    shadow: bool,
    /// The report of an ordinary admission: the text before the value of `remaining`, and after that of `reset_after`.
    plain_report: (Box<str>, Box<str>),
}

impl Replies {
    /// Prepares the replies of a plan.
    pub fn new(plan: &Arc<Plan>, dialect: HeaderDialect, x_ratelimit: bool) -> Self {
        let action_headers = |own: &[LimitId]| {
            // Clients need not obey a limit that never refuses them.
            let enforced = own.iter().chain(plan.global()).filter(|id| !is_shadow(plan, **id));
            let items = enforced.map(|id| format_policy_item(plan.limit_info(*id).rate_limit_policy(), dialect));
            let text = items.collect::<Vec<_>>().join(", ");
            let has_policy = dialect != HeaderDialect::None && !text.is_empty();
            let policy = HeaderValue::from_str(&text).ok().filter(|_| has_policy);
            let template = |refused: bool| {
                let mut headers = HeaderMap::with_capacity(8);
                headers.insert(CONTENT_TYPE, JSON);
                if refused {
                    headers.insert(RETRY_AFTER, PLACEHOLDER);
                }
                if let Some(policy) = &policy {
                    headers.insert(RATELIMIT_POLICY, policy.clone());
                }
                if dialect != HeaderDialect::None {
                    headers.insert(RATELIMIT, PLACEHOLDER);
                }
                if x_ratelimit {
                    headers.insert(X_RATELIMIT_LIMIT, PLACEHOLDER);
                    headers.insert(X_RATELIMIT_REMAINING, PLACEHOLDER);
                    headers.insert(X_RATELIMIT_RESET, PLACEHOLDER);
                }
                headers
            };
            let (refusal_template, admission_template) = (template(true), template(false));
            ActionHeaders { policy_header: policy, refusal_template, admission_template }
        };
        let limits = plan.limits().iter().map(|(id, limit)| {
            let name = &plan.limit_info(id).rate_limit_policy().name;
            let state = match dialect {
                HeaderDialect::Draft10 => quoted_string(name) + ";r=",
                HeaderDialect::Draft7 | HeaderDialect::None => String::new(),
            };
            let (capacity, source) = (limit.kind().capacity(), plan.limit_info(id).scope().as_str());
            let bound_by = serde_json::Value::from(plan.limit_info(id).name());
            let prefix = format!(r#"{{"allowed":true,"limit":{capacity},"remaining":"#);
            let suffix = format!(
                r#","retry_after":null,"blocked":false,"backoff_seconds":null,"next_allowed_at":null,"bound_by":{bound_by},"reason":"ok","source":"{source}"}}"#
            );
            LimitTexts {
                state_prefix: state.into_bytes().into(),
                name_json: serde_json::Value::from(name.as_str()).to_string().into(),
                action: plan.limit_info(id).action(),
                capacity,
                shadow: limit.is_shadow(),
                plain_report: (prefix.into(), suffix.into()),
            }
        });
        Self {
            plan: Arc::clone(plan),
            dialect,
            x_ratelimit,
            limits: limits.collect(),
            actions: plan.actions().map(|(_, action)| action_headers(action.limits())).collect(),
            unmatched: action_headers(&[]),
        }
    }

    /// Adds the rate-limit headers of a limited action. Adds nothing if no limit took part in the decision (an allow
    /// list, `unlimited`), or only a shadow limit bound it. `RateLimit` fields of a server behind the gate stay,
    /// because both fields are lists.
    pub fn annotate(&self, actions: impl Into<MatchedActions>, decision: &Decision, headers: &mut HeaderMap) {
        let (Some(id), Some(limit), Some(remaining)) = (decision.bound_by, decision.limit, decision.remaining) else {
            return;
        };
        if decision.shadow || self.limits.get(id.index()).is_some_and(|named| named.shadow) {
            return;
        }
        if self.dialect != HeaderDialect::None {
            if let Some(policy) = &self.action_headers(actions.into(), id).policy_header {
                headers.append(RATELIMIT_POLICY, policy.clone());
            }
            if let Some(state) = self.state(id, limit, remaining, reset_seconds(decision)) {
                headers.append(RATELIMIT, state);
            }
        }
        if self.x_ratelimit {
            headers.insert(X_RATELIMIT_LIMIT, number_header(limit));
            headers.insert(X_RATELIMIT_REMAINING, number_header(remaining));
            if let Some(seconds) = reset_seconds(decision) {
                headers.insert(X_RATELIMIT_RESET, number_header(seconds));
            }
        }
    }

    fn action_headers(&self, actions: MatchedActions, bound_by: LimitId) -> &ActionHeaders {
        let action = if actions.has_multiple() {
            let owner = self.limits.get(bound_by.index()).and_then(|named| named.action);
            owner.filter(|owner| actions.contains(*owner)).or(actions.first())
        } else {
            actions.first()
        };
        action.and_then(|id| self.actions.get(id.index())).unwrap_or(&self.unmatched)
    }

    fn state(&self, id: LimitId, limit: u64, remaining: u64, reset: Option<u64>) -> Option<HeaderValue> {
        let texts = self.limits.get(id.index())?;
        let mut text = SmallBuffer::<STATE_BYTES>::new();
        let reset_key = match self.dialect {
            HeaderDialect::Draft10 => {
                text.put(&texts.state_prefix);
                ";t="
            }
            _ => {
                text.put("limit=");
                text.put_number(limit);
                text.put(", remaining=");
                ", reset="
            }
        };
        text.put_number(remaining);
        match reset {
            Some(seconds) => {
                text.put(reset_key);
                text.put_number(seconds);
            }
            // Draft 7 requires a reset, so a century stands for "never".
            None if self.dialect == HeaderDialect::Draft7 => text.put(", reset=3155760000"),
            None => {}
        }
        HeaderValue::from_bytes(text.as_bytes()).ok()
    }

    /// Adds the reservation of a refused caller, as `Tidegate-Reservation`.
    fn add_reservation(decision: &Decision, headers: &mut HeaderMap) {
        if let Some(ReservationReport { token, at, wait }) = ReservationReport::new(decision)
            && let Ok(value) = HeaderValue::try_from(format!("{token};at={at};wait={wait}"))
        {
            headers.insert(TIDEGATE_RESERVATION, value);
        }
    }

    /// The complete response to a refused call: 429 with `Retry-After` and the rate-limit headers, or 403 for a client
    /// on the deny list, for which no wait helps.
    ///
    /// The body is `{"error":"Too many requests","retry_after":16,"next_allowed_at":"2026-11-21 12:01:45Z"}`.
    /// `next_allowed_at` is null unless a penalty is active, and `retry_after` is null if no wait helps. A caller with a
    /// reservation finds it in `Tidegate-Reservation` and in `reservation`. If the
    /// `Accept` of `request` names `application/problem+json`, the body is a problem of RFC 9457 with the draft's type
    /// *quota exceeded*.
    pub fn refusal(
        &self,
        actions: impl Into<MatchedActions>,
        decision: &Decision,
        request: &HeaderMap,
    ) -> Response<Bytes> {
        let actions = actions.into();
        let problem = wants_problem(request);
        let mut headers = match self.filled_template(actions, decision) {
            Some(headers) if !problem => headers,
            _ => {
                let mut headers = HeaderMap::with_capacity(8);
                headers.insert(CONTENT_TYPE, if problem { PROBLEM_JSON } else { JSON });
                if let Some(wait) = decision.retry_after {
                    headers.insert(RETRY_AFTER, number_header(wait.as_secs_ceil()));
                }
                self.annotate(actions, decision, &mut headers);
                headers
            }
        };
        Self::add_reservation(decision, &mut headers);
        let mut response = Response::new(self.refusal_body(decision, problem));
        *response.status_mut() = refusal_status(decision);
        *response.headers_mut() = headers;
        response
    }

    /// The JSON of a decision's [`DecisionReport`]. That of an ordinary admission is put together
    /// from prepared parts, because almost all answers of the decision API are one.
    pub fn report(&self, decision: &Decision) -> Bytes {
        let texts = decision.bound_by.and_then(|id| self.limits.get(id.index()));
        if let (Some(named), Some(remaining)) = (texts, decision.remaining)
            && decision.allowed
            && decision.reason == Reason::Ok
            && decision.limit == Some(named.capacity)
            && !(decision.shadow || decision.blocked)
            && decision.permit.is_none()
        {
            let mut text = SmallBuffer::<REPORT_BYTES>::new();
            text.put(&*named.plain_report.0);
            text.put_number(remaining);
            text.put(r#","reset_after":"#);
            text.put_number(decision.reset_after.as_secs_ceil());
            text.put(&*named.plain_report.1);
            return Bytes::copy_from_slice(text.as_bytes());
        }
        let report = DecisionReport::new(&self.plan, decision);
        serde_json::to_vec(&report).expect("invariant: texts and numbers serialise").into()
    }

    /// The response of the decision API: 200 or 429, the decision's [report](Self::report), `Retry-After` and the
    /// rate-limit headers.
    pub fn decision(&self, actions: impl Into<MatchedActions>, decision: &Decision) -> Response<Bytes> {
        let actions = actions.into();
        let mut headers = self.filled_template(actions, decision).unwrap_or_else(|| {
            let mut headers = HeaderMap::with_capacity(8);
            headers.insert(CONTENT_TYPE, JSON);
            self.annotate(actions, decision, &mut headers);
            headers
        });
        Self::add_reservation(decision, &mut headers);
        let mut response = Response::new(self.report(decision));
        *response.headers_mut() = headers;
        if !decision.allowed {
            *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
        }
        response
    }

    /// The prepared headers of the action, with all values. `None` if no limit took part, or a value is missing.
    fn filled_template(&self, actions: MatchedActions, decision: &Decision) -> Option<HeaderMap> {
        let (id, limit, remaining) = (decision.bound_by?, decision.limit?, decision.remaining?);
        let reset = reset_seconds(decision)?;
        let ActionHeaders { admission_template, refusal_template, .. } = self.action_headers(actions, id);
        let mut headers = if decision.allowed { admission_template } else { refusal_template }.clone();
        for (name, value) in &mut headers {
            if *name == RETRY_AFTER || *name == X_RATELIMIT_RESET {
                *value = number_header(reset);
            } else if *name == RATELIMIT {
                *value = self.state(id, limit, remaining, Some(reset))?;
            } else if *name == X_RATELIMIT_LIMIT {
                *value = number_header(limit);
            } else if *name == X_RATELIMIT_REMAINING {
                *value = number_header(remaining);
            }
        }
        Some(headers)
    }

    fn refusal_body(&self, decision: &Decision, problem: bool) -> Bytes {
        let limited = decision.reason != Reason::DenyList;
        match (problem, limited) {
            (false, false) => Bytes::from_static(br#"{"error":"Forbidden"}"#),
            (true, false) => Bytes::from_static(br#"{"type":"about:blank","title":"Forbidden","status":403}"#),
            (false, true) => {
                let mut text = SmallBuffer::<REFUSAL_BYTES>::new();
                text.put(r#"{"error":"Too many requests""#);
                put_times(&mut text, decision);
                Bytes::copy_from_slice(text.as_bytes())
            }
            (true, true) => {
                let mut text = SmallBuffer::<REPORT_BYTES>::new();
                text.put(r#"{"type":""#);
                text.put(PROBLEM_TYPE);
                text.put(r#"","title":""#);
                text.put(PROBLEM_TITLE);
                text.put(r#"","status":429"#);
                if let Some(texts) = decision.bound_by.and_then(|id| self.limits.get(id.index())) {
                    text.put(r#","violated-policies":["#);
                    text.put(&*texts.name_json);
                    text.put("]");
                }
                put_times(&mut text, decision);
                Bytes::copy_from_slice(text.as_bytes())
            }
        }
    }
}

/// `retry_after`, `next_allowed_at`, what there is to say about reservations, and the brace that ends the object.
fn put_times<const N: usize>(text: &mut SmallBuffer<N>, decision: &Decision) {
    text.put(r#","retry_after":"#);
    match decision.retry_after {
        Some(wait) => text.put_number(wait.as_secs_ceil()),
        None => text.put("null"),
    }
    match decision.next_allowed_at {
        Some(at) => {
            text.put(r#","next_allowed_at":""#);
            text.put(UtcText::from(at).as_bytes());
            text.put("\"");
        }
        None => text.put(r#","next_allowed_at":null"#),
    }
    if let Some(ReservationReport { token, at, wait }) = ReservationReport::new(decision) {
        text.put(format!(r#","reservation":{{"token":"{token}","at":{at},"wait":{wait}}}"#));
    }
    if decision.is_reservation_unknown {
        text.put(r#","unknown_reservation":true"#);
    }
    text.put("}");
}

fn is_shadow(plan: &Plan, id: LimitId) -> bool {
    plan.limits().get(id).is_some_and(Limit::is_shadow)
}

/// The status of a refusal: 403 for a client on the deny list, otherwise 429.
pub fn refusal_status(decision: &Decision) -> StatusCode {
    match decision.reason {
        Reason::DenyList => StatusCode::FORBIDDEN,
        _ => StatusCode::TOO_MANY_REQUESTS,
    }
}

/// True if a request's `Accept` names `application/problem+json` with a weight above 0.
pub fn wants_problem(request: &HeaderMap) -> bool {
    request.get_all(ACCEPT).iter().any(|line| {
        line.as_bytes().split(|byte| *byte == b',').any(|range| {
            let mut parts = range.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
            let named = parts.next().is_some_and(|name| name.eq_ignore_ascii_case(PROBLEM_JSON.as_bytes()));
            named && !parts.any(is_zero_weight)
        })
    })
}

fn is_zero_weight(parameter: &[u8]) -> bool {
    let Some((b'q' | b'Q', rest)) = parameter.split_first() else { return false };
    let Some(weight) = rest.trim_ascii_start().strip_prefix(b"=") else { return false };
    weight.trim_ascii().iter().all(|byte| matches!(byte, b'0' | b'.'))
}

/// A header value of one number. `HeaderValue::from` would allocate twice.
pub fn number_header(number: u64) -> HeaderValue {
    HeaderValue::from_bytes(DecimalDigits::from_number(number).as_bytes())
        .expect("invariant: digits are valid in a header")
}

/// Seconds until the limit has its full capacity or, after a refusal, until a retry can succeed. Rounded up.
fn reset_seconds(decision: &Decision) -> Option<u64> {
    let span = if decision.allowed { Some(decision.reset_after) } else { decision.retry_after };
    span.map(|span| span.as_secs_ceil())
}

fn format_policy_item(item: &RateLimitPolicyItem, dialect: HeaderDialect) -> String {
    let mut text = match dialect {
        HeaderDialect::Draft7 => item.quota.to_string(),
        _ => format!("{};q={}", quoted_string(&item.name), item.quota),
    };
    if let (Some(unit), HeaderDialect::Draft10) = (item.unit, dialect) {
        text += &format!(";qu={}", quoted_string(unit));
    }
    if let Some(window) = item.window {
        text += &format!(";w={window}");
    }
    text
}

#[cfg(test)]
mod tests;
