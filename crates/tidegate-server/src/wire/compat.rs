//! The paths of other servers (`api.compat`), answered as those servers answer.

use http::{Response, StatusCode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tidegate::store::Store;
use tidegate_core::{CallerRate, CallerRateDecision, Clock};
use tidegate_policy::CompatibleServer;

use crate::access_log::AccessSlot;
use crate::body::ResponseBody;
use crate::local_response::{json_response, text};
use crate::wire::decision_request::{DecisionRequestError, decode};
use crate::wire::http_api::{ApiState, check_error_response};
use crate::wire::limitador::{self, Purpose};

const LIMITS: &str = "/limits/";
const COUNTERS: &str = "/counters/";

/// A path of another server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompatiblePath<'p> {
    LimitadorCheck,
    LimitadorReport,
    LimitadorCheckAndReport,
    LimitadorStatus,
    /// The limits of a namespace.
    LimitadorLimits(&'p str),
    /// The counts of a namespace.
    LimitadorCounters(&'p str),
    Throttle,
    ThrottlecrabHealth,
}

impl<'p> CompatiblePath<'p> {
    /// The path of a server, if it is one of these.
    pub(crate) fn find(path: &'p str) -> Option<Self> {
        Some(match path {
            "/check" => Self::LimitadorCheck,
            "/report" => Self::LimitadorReport,
            "/check_and_report" => Self::LimitadorCheckAndReport,
            "/status" => Self::LimitadorStatus,
            "/throttle" => Self::Throttle,
            "/health" => Self::ThrottlecrabHealth,
            _ => match (path.strip_prefix(LIMITS), path.strip_prefix(COUNTERS)) {
                (Some(namespace), _) => Self::LimitadorLimits(namespace),
                (_, Some(namespace)) => Self::LimitadorCounters(namespace),
                (None, None) => return None,
            },
        })
    }

    pub(crate) fn server(self) -> CompatibleServer {
        match self {
            Self::Throttle | Self::ThrottlecrabHealth => CompatibleServer::Throttlecrab,
            _ => CompatibleServer::Limitador,
        }
    }

    pub(crate) fn method(self) -> &'static str {
        match self {
            Self::LimitadorCheck | Self::LimitadorReport | Self::LimitadorCheckAndReport | Self::Throttle => "POST",
            _ => "GET",
        }
    }

    /// Answers a request, whose body is empty for GET.
    pub(crate) async fn answer<S: Store, C: Clock>(
        self,
        api: &ApiState<S, C>,
        body: &[u8],
        access: &AccessSlot,
    ) -> Result<Response<ResponseBody>, DecisionRequestError> {
        match self {
            Self::LimitadorCheck => limitador::answer(api, Purpose::Check, body, access).await,
            Self::LimitadorReport => limitador::answer(api, Purpose::Report, body, access).await,
            Self::LimitadorCheckAndReport => limitador::answer(api, Purpose::CheckAndReport, body, access).await,
            Self::LimitadorStatus => Ok(json_response(StatusCode::OK, &serde_json::json!({}))),
            Self::LimitadorLimits(namespace) => Ok(limitador::limits(api, &decoded(namespace)?)),
            Self::LimitadorCounters(namespace) => limitador::counters(api, &decoded(namespace)?, access).await,
            Self::Throttle => throttle(api, body, access).await,
            Self::ThrottlecrabHealth => Ok(text(StatusCode::OK, "OK")),
        }
    }
}

fn decoded(namespace: &str) -> Result<String, DecisionRequestError> {
    let escaped = namespace.replace('+', "%2B");
    let decoded = decode(&escaped).ok_or_else(|| DecisionRequestError::new("namespace", "the name isn't UTF-8"))?;
    Ok(decoded.into_owned())
}

/// Reads the JSON of a request.
pub(crate) fn read_request<T: DeserializeOwned>(body: &[u8]) -> Result<T, DecisionRequestError> {
    // The library also reads a list as the fields in their order.
    if body.trim_ascii_start().first().is_some_and(|first| *first == b'[') {
        return Err(DecisionRequestError::new(None, "the body is no JSON object"));
    }
    serde_json::from_slice(body).map_err(|error| {
        // The library names the field in its message only.
        let message = error.to_string();
        let field = message.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        DecisionRequestError::new(field, format!("the body isn't a valid request: {message}"))
    })
}

/// throttlecrab's request.
#[derive(Deserialize)]
struct ThrottleRequest {
    key: String,
    max_burst: i64,
    count_per_period: i64,
    period: i64,
    quantity: Option<i64>,
}

/// throttlecrab's response.
#[derive(Serialize)]
struct ThrottleResponse {
    allowed: bool,
    limit: i64,
    remaining: u64,
    reset_after: i64,
    retry_after: i64,
}

/// The seconds to wait, as throttlecrab tells them: 0 if the call is admitted. A call that never is gets those until the key
/// is as new, so that its client doesn't ask at once.
pub(crate) fn wait_secs(decided: &CallerRateDecision) -> i64 {
    match decided.retry_after_secs() {
        wait if wait >= 0 => wait,
        _ if decided.is_limited => decided.reset_after_secs().max(1),
        _ => 0,
    }
}

async fn throttle<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    body: &[u8],
    access: &AccessSlot,
) -> Result<Response<ResponseBody>, DecisionRequestError> {
    let asked: ThrottleRequest = read_request(body)?;
    let unsigned = |field: &str, number: i64| {
        u64::try_from(number).map_err(|_| DecisionRequestError::new(field, format!("`{field}` is negative")))
    };
    let burst = unsigned("max_burst", asked.max_burst)?;
    let count = unsigned("count_per_period", asked.count_per_period)?;
    let period = unsigned("period", asked.period)?;
    for (field, number) in [("max_burst", burst), ("count_per_period", count), ("period", period)] {
        if number == 0 {
            return Err(DecisionRequestError::new(field, format!("`{field}` is 0")));
        }
    }
    let rate = CallerRate::new(burst, count, period)
        .map_err(|error| DecisionRequestError::new("max_burst", error.to_string()))?;
    let decided = match api.gate.throttle(rate, asked.key.as_bytes(), asked.quantity.unwrap_or(1)).await {
        Ok(decided) => decided,
        Err(error) => {
            return Ok(check_error_response(&api.gate, &api.refusals, &Default::default(), &error, access));
        }
    };
    let answer = ThrottleResponse {
        allowed: !decided.is_limited,
        limit: asked.max_burst,
        remaining: decided.remaining,
        reset_after: decided.reset_after_secs(),
        retry_after: wait_secs(&decided),
    };
    Ok(json_response(StatusCode::OK, &answer))
}

#[cfg(test)]
mod tests {
    use tidegate_testkit::property;

    use super::*;
    use crate::wire::decision_request::DecisionRequest;
    use crate::wire::limitador::CheckRequest;

    /// Parts of JSON: names of fields, values of every kind, and bytes that aren't text.
    const PIECES: [&[u8]; 24] = [
        b"{",
        b"}",
        b"[",
        b"\"key\":",
        b"\"max_burst\":",
        b"\"count_per_period\":",
        b"\"period\":",
        b"\"quantity\":",
        b"\"namespace\":",
        b"\"values\":{\"a\":\"b\"}",
        b"\"delta\":",
        b"\"action\":",
        b"\"headers\":{\"a\":\"b\"}",
        b"\"cost\":",
        b"\"a\"",
        b"\"\\ud800\"",
        b"0",
        b"-1",
        b"1e999",
        b"18446744073709551616",
        b"null",
        b",",
        b"\0",
        b"\xff",
    ];

    #[test]
    fn arbitrary_questions_are_read_or_refused() {
        property::fuzz_cheaply(|random| {
            let inner = random.concat_random(&PIECES, 14);
            let body = if random.chance(80) { [b"{", &*inner, b"}"].concat() } else { inner };
            let (throttle, limitador) = (read_request::<ThrottleRequest>(&body), read_request::<CheckRequest>(&body));
            let ours = DecisionRequest::from_json(&body);
            // Each fault is told in words.
            let faults = [throttle.err(), limitador.err(), ours.err()];
            assert!(faults.iter().flatten().all(|fault| !fault.message.is_empty()));
        });
    }
}
