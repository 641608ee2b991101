//! What a client reads about a decision: rate-limit headers on every answer of a limited action, and the refusal.
//!
//! The one place where these are formed; the [tower layer](crate) and the gate's servers both use it. Whatever
//! doesn't depend on the call is made once, by [`Replies::new`]; a reply then costs one small allocation a header.
//!
//! | dialect | policy | state |
//! | --- | --- | --- |
//! | [`Draft10`](HeaderDialect::Draft10) | `RateLimit-Policy: "login";q=5;w=60` | `RateLimit: "login";r=4;t=60` |
//! | [`Draft7`](HeaderDialect::Draft7) | `RateLimit-Policy: 5;w=60` | `RateLimit: limit=5, remaining=4, reset=60` |
//!
//! The policy names every limit that the action meets, the state only the one that bound the decision. All times are
//! whole seconds from now, rounded up. On admission `t` is when that limit is whole again; on refusal it is the same
//! as `Retry-After`, since the draft wants `Retry-After` to be no earlier than `t`. `X-RateLimit-Reset` follows `t`.

use std::fmt;
use std::io::Write;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};
use tidegate_core::{Decision, LimitId, Reason, Time};
use tidegate_policy::{ActionId, HeaderDialect, Plan, PolicyItem};

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
/// Holds a place.
const UNKNOWN: HeaderValue = HeaderValue::from_static("0");
const PROBLEM_TYPE: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const PROBLEM_TITLE: &str = "Request cannot be satisfied as assigned quota has been exceeded";
/// What fits on the stack: a limit's name of up to 200 bytes and two numbers.
const SCRATCH: usize = 256;

/// The parts of a plan's replies that don't depend on the call.
#[derive(Clone, Debug)]
pub struct Replies {
    dialect: HeaderDialect,
    x_ratelimit: bool,
    /// By limit.
    limits: Vec<Named>,
    /// By action.
    actions: Vec<Fixed>,
    /// For calls that match no action.
    unmatched: Fixed,
}

/// What is the same in all replies of an action.
#[derive(Clone, Debug)]
struct Fixed {
    /// The `RateLimit-Policy` of its limits and the global ones.
    policy: Option<HeaderValue>,
    /// The headers of a refusal. Copying them and filling in what differs is cheaper than putting each in its place.
    refusal: HeaderMap,
}

#[derive(Clone, Debug)]
struct Named {
    /// `"login";r=`, or nothing where the dialect has no names.
    state: Box<[u8]>,
    /// `"login"`, as JSON.
    json: Box<str>,
}

impl Replies {
    /// Prepares the replies of a plan.
    pub fn new(plan: &Plan, dialect: HeaderDialect, x_ratelimit: bool) -> Self {
        let fixed = |own: &[LimitId]| {
            let items = own.iter().chain(plan.global()).map(|id| policy_item(plan.info(*id).policy_item(), dialect));
            let text = items.collect::<Vec<_>>().join(", ");
            let policy = match dialect {
                HeaderDialect::None => None,
                _ if text.is_empty() => None,
                _ => HeaderValue::from_str(&text).ok(),
            };
            let mut refusal = HeaderMap::with_capacity(8);
            refusal.insert(CONTENT_TYPE, JSON);
            refusal.insert(RETRY_AFTER, UNKNOWN);
            if let Some(policy) = &policy {
                refusal.insert(RATELIMIT_POLICY, policy.clone());
            }
            if dialect != HeaderDialect::None {
                refusal.insert(RATELIMIT, UNKNOWN);
            }
            if x_ratelimit {
                refusal.insert(X_RATELIMIT_LIMIT, UNKNOWN);
                refusal.insert(X_RATELIMIT_REMAINING, UNKNOWN);
                refusal.insert(X_RATELIMIT_RESET, UNKNOWN);
            }
            Fixed { policy, refusal }
        };
        let limits = plan.limits().iter().map(|(id, _)| {
            let name = &plan.info(id).policy_item().name;
            let state = match dialect {
                HeaderDialect::Draft10 => format!("{};r=", Quoted(name)),
                HeaderDialect::Draft7 | HeaderDialect::None => String::new(),
            };
            Named { state: state.into_bytes().into(), json: JsonText(name).to_string().into() }
        });
        Self {
            dialect,
            x_ratelimit,
            limits: limits.collect(),
            actions: plan.actions().map(|(_, action)| fixed(action.limits())).collect(),
            unmatched: fixed(&[]),
        }
    }

    /// Adds what every answer of a limited action carries. A decision that no limit had a part in (an allow list,
    /// `unlimited`) adds nothing. `RateLimit` fields that are there already, from a server behind the gate, stay:
    /// both are lists.
    pub fn annotate(&self, action: Option<ActionId>, decision: &Decision, headers: &mut HeaderMap) {
        let (Some(id), Some(limit), Some(remaining)) = (decision.bound_by, decision.limit, decision.remaining) else {
            return;
        };
        if self.dialect != HeaderDialect::None {
            if let Some(policy) = &self.fixed(action).policy {
                headers.append(RATELIMIT_POLICY, policy.clone());
            }
            if let Some(state) = self.state(id, limit, remaining, reset(decision)) {
                headers.append(RATELIMIT, state);
            }
        }
        if self.x_ratelimit {
            headers.insert(X_RATELIMIT_LIMIT, number(limit));
            headers.insert(X_RATELIMIT_REMAINING, number(remaining));
            if let Some(seconds) = reset(decision) {
                headers.insert(X_RATELIMIT_RESET, number(seconds));
            }
        }
    }

    fn fixed(&self, action: Option<ActionId>) -> &Fixed {
        action.and_then(|id| self.actions.get(id.index())).unwrap_or(&self.unmatched)
    }

    fn state(&self, id: LimitId, limit: u64, remaining: u64, reset: Option<u64>) -> Option<HeaderValue> {
        let named = self.limits.get(id.index())?;
        let write = |out: &mut dyn Write| -> std::io::Result<()> {
            let reset_key = match self.dialect {
                HeaderDialect::Draft10 => {
                    out.write_all(&named.state)?;
                    b";t=".as_slice()
                }
                _ => {
                    out.write_all(b"limit=")?;
                    out.write_all(Digits::of(limit).as_bytes())?;
                    out.write_all(b", remaining=")?;
                    b", reset="
                }
            };
            out.write_all(Digits::of(remaining).as_bytes())?;
            match reset {
                Some(seconds) => {
                    out.write_all(reset_key)?;
                    out.write_all(Digits::of(seconds).as_bytes())
                }
                // Version 7 requires a reset; a century says "not in your lifetime".
                None if self.dialect == HeaderDialect::Draft7 => out.write_all(b", reset=3155760000"),
                None => Ok(()),
            }
        };
        let mut scratch = [0; SCRATCH];
        let mut free = scratch.as_mut_slice();
        if write(&mut free).is_ok() {
            let used = SCRATCH - free.len();
            return HeaderValue::from_bytes(&scratch[..used]).ok();
        }
        let mut long = Vec::new();
        write(&mut long).ok()?;
        HeaderValue::from_bytes(&long).ok()
    }

    /// The whole answer to a call that was refused: 429 with `Retry-After` and the rate-limit headers, or 403 for a
    /// client on the deny list, which no waiting helps.
    ///
    /// The body is `{"error":"Too many requests","retry_after":16,"next_allowed_at":"2026-11-21 12:01:45Z"}`
    /// (`next_allowed_at` is null unless a penalty lives, `retry_after` is null if no wait will do), or, if
    /// `request` has an `Accept` that names `application/problem+json`, a problem of RFC 9457 of the draft's type
    /// *quota exceeded*.
    pub fn refusal(&self, action: Option<ActionId>, decision: &Decision, request: &HeaderMap) -> Response<Bytes> {
        let problem = wants_problem(request);
        let headers = match self.filled(action, decision) {
            Some(headers) if !problem => headers,
            _ => {
                let mut headers = HeaderMap::with_capacity(8);
                headers.insert(CONTENT_TYPE, if problem { PROBLEM_JSON } else { JSON });
                if let Some(wait) = decision.retry_after {
                    headers.insert(RETRY_AFTER, number(wait.as_secs_ceil()));
                }
                self.annotate(action, decision, &mut headers);
                headers
            }
        };
        let mut response = Response::new(self.refusal_body(decision, problem));
        *response.status_mut() = refusal_status(decision);
        *response.headers_mut() = headers;
        response
    }

    /// [`refusal`](Self::refusal) for a caller that may just have been told the same: who hammers is told the same for
    /// a whole second, and copying the last answer costs less than forming it.
    pub fn refusal_after(
        &self,
        last: &mut LastRefusal,
        action: Option<ActionId>,
        decision: &Decision,
        request: &HeaderMap,
    ) -> Response<Bytes> {
        if wants_problem(request) {
            return self.refusal(action, decision, request);
        }
        let telling = Telling::of(action, decision);
        if let Some((told, response)) = &last.0
            && *told == telling
        {
            let mut again = Response::new(response.body().clone());
            *again.status_mut() = response.status();
            *again.headers_mut() = response.headers().clone();
            return again;
        }
        let response = self.refusal(action, decision, request);
        last.0 = Some((telling, response.clone()));
        response
    }

    /// The action's fixed headers of a refusal, filled in; `None` for a refusal that lacks one of them.
    fn filled(&self, action: Option<ActionId>, decision: &Decision) -> Option<HeaderMap> {
        let (id, limit, remaining) = (decision.bound_by?, decision.limit?, decision.remaining?);
        let wait = decision.retry_after?.as_secs_ceil();
        let mut headers = self.fixed(action).refusal.clone();
        for (name, value) in &mut headers {
            if *name == RETRY_AFTER || *name == X_RATELIMIT_RESET {
                *value = number(wait);
            } else if *name == RATELIMIT {
                *value = self.state(id, limit, remaining, Some(wait))?;
            } else if *name == X_RATELIMIT_LIMIT {
                *value = number(limit);
            } else if *name == X_RATELIMIT_REMAINING {
                *value = number(remaining);
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
                let mut scratch = [0; SCRATCH];
                let mut free = scratch.as_mut_slice();
                let written = write_times(&mut free, br#"{"error":"Too many requests""#, decision);
                written.expect("invariant: the body is shorter than its buffer");
                let used = SCRATCH - free.len();
                Bytes::copy_from_slice(&scratch[..used])
            }
            (true, true) => {
                let mut body = Vec::with_capacity(320);
                body.extend_from_slice(br#"{"type":""#);
                body.extend_from_slice(PROBLEM_TYPE.as_bytes());
                body.extend_from_slice(br#"","title":""#);
                body.extend_from_slice(PROBLEM_TITLE.as_bytes());
                body.extend_from_slice(br#"","status":429"#);
                if let Some(named) = decision.bound_by.and_then(|id| self.limits.get(id.index())) {
                    body.extend_from_slice(br#","violated-policies":["#);
                    body.extend_from_slice(named.json.as_bytes());
                    body.push(b']');
                }
                write_times(&mut body, b"", decision).expect("invariant: a vector takes whatever is written");
                body.into()
            }
        }
    }
}

/// `start`, `retry_after`, `next_allowed_at` and the brace that ends the object.
fn write_times(out: &mut dyn Write, start: &[u8], decision: &Decision) -> std::io::Result<()> {
    out.write_all(start)?;
    out.write_all(br#","retry_after":"#)?;
    match decision.retry_after {
        Some(wait) => out.write_all(Digits::of(wait.as_secs_ceil()).as_bytes())?,
        None => out.write_all(b"null")?,
    }
    out.write_all(br#","next_allowed_at":"#)?;
    match decision.next_allowed_at {
        Some(at) => {
            out.write_all(b"\"")?;
            out.write_all(&Stamp::of(at).0)?;
            out.write_all(b"\"}")
        }
        None => out.write_all(b"null}"),
    }
}

/// The refusal that a connection was told last; see [`Replies::refusal_after`].
#[derive(Debug, Default)]
pub struct LastRefusal(Option<(Telling, Response<Bytes>)>);

/// All that a refusal says, and so all that it depends on.
#[derive(Debug, PartialEq, Eq)]
struct Telling {
    action: Option<ActionId>,
    bound_by: Option<LimitId>,
    limit: Option<u64>,
    remaining: Option<u64>,
    wait: Option<u64>,
    until: Option<u64>,
    denied: bool,
}

impl Telling {
    fn of(action: Option<ActionId>, decision: &Decision) -> Self {
        Self {
            action,
            bound_by: decision.bound_by,
            limit: decision.limit,
            remaining: decision.remaining,
            wait: decision.retry_after.map(|wait| wait.as_secs_ceil()),
            until: decision.next_allowed_at.map(Time::as_secs_ceil),
            denied: decision.reason == Reason::DenyList,
        }
    }
}

/// The status of a refusal: 403 for a client on the deny list, otherwise 429.
pub fn refusal_status(decision: &Decision) -> StatusCode {
    match decision.reason {
        Reason::DenyList => StatusCode::FORBIDDEN,
        _ => StatusCode::TOO_MANY_REQUESTS,
    }
}

/// Whether a request's `Accept` names `application/problem+json` with a weight above 0.
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

/// A moment as decisions write it, in UTC and rounded up to the second: `2026-11-21 12:01:45Z`.
pub fn timestamp(at: Time) -> impl fmt::Display {
    Stamp::of(at)
}

/// A header of one number. `HeaderValue::from` would allocate twice.
pub fn number(number: u64) -> HeaderValue {
    HeaderValue::from_bytes(Digits::of(number).as_bytes()).expect("invariant: digits are valid in a header")
}

/// When the limit that bound the decision has more to give, in seconds rounded up.
fn reset(decision: &Decision) -> Option<u64> {
    let span = if decision.allowed { Some(decision.reset_after) } else { decision.retry_after };
    span.map(|span| span.as_secs_ceil())
}

fn policy_item(item: &PolicyItem, dialect: HeaderDialect) -> String {
    let mut text = match dialect {
        HeaderDialect::Draft7 => item.quota.to_string(),
        _ => format!("{};q={}", Quoted(&item.name), item.quota),
    };
    if let (Some(unit), HeaderDialect::Draft10) = (item.unit, dialect) {
        text += &format!(";qu={}", Quoted(unit));
    }
    if let Some(window) = item.window {
        text += &format!(";w={window}");
    }
    text
}

/// A string of RFC 9651 §3.3.3.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write as _;
        f.write_char('"')?;
        for char in self.0.chars() {
            match char {
                '"' | '\\' => write!(f, "\\{char}")?,
                ' '..='~' => f.write_char(char)?,
                _ => f.write_char('?')?,
            }
        }
        f.write_char('"')
    }
}

/// A string of JSON.
struct JsonText<'a>(&'a str);

impl fmt::Display for JsonText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write as _;
        f.write_char('"')?;
        for char in self.0.chars() {
            match char {
                '"' | '\\' => write!(f, "\\{char}")?,
                char if u32::from(char) < 0x20 => write!(f, "\\u{:04x}", u32::from(char))?,
                _ => f.write_char(char)?,
            }
        }
        f.write_char('"')
    }
}

/// A number in decimal, on the stack.
struct Digits {
    buffer: [u8; 20],
    start: usize,
}

impl Digits {
    fn of(mut number: u64) -> Self {
        let mut digits = Self { buffer: [0; 20], start: 20 };
        loop {
            digits.start -= 1;
            digits.buffer[digits.start] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                return digits;
            }
        }
    }

    fn as_bytes(&self) -> &[u8] {
        &self.buffer[self.start..]
    }
}

/// `2026-11-21 12:01:45Z`.
struct Stamp([u8; 20]);

impl Stamp {
    /// The days-to-civil conversion is Howard Hinnant's ("chrono-compatible low-level date algorithms"), for years
    /// from 1970 on.
    fn of(at: Time) -> Self {
        let seconds = at.as_secs_ceil();
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        let year = year_of_era + era * 400 + u64::from(month <= 2);
        let mut text = *b"0000-00-00 00:00:00Z";
        for (place, width, mut number) in [
            (0, 4, year),
            (5, 2, month),
            (8, 2, day),
            (11, 2, second / 3_600),
            (14, 2, second / 60 % 60),
            (17, 2, second % 60),
        ] {
            for digit in (place..place + width).rev() {
                text[digit] = b'0' + (number % 10) as u8;
                number /= 10;
            }
        }
        Self(text)
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(str::from_utf8(&self.0).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::Span;
    use tidegate_policy::{Policy, Sources};

    const FILE: &str = r#"
        [inbound.global]
        limit = "1000 per 1h"
        [inbound.action.login]
        match = { method = "POST", path = "/login" }
        limit = "5 per 60s"
        penalty = { base = "2s", cap = "1h" }
        [inbound.action.feed]
        match = { path = "/feed" }
        limit = "8 in flight"
    "#;

    fn policy() -> Policy {
        Policy::load(Sources::new().file("test.toml", FILE)).unwrap()
    }

    fn decision(allowed: bool) -> Decision {
        let now = Time::from_secs(1_795_262_489);
        let mut decision = Decision::without_limit(allowed, Reason::Ok, now);
        decision.bound_by = LimitId::from_index(0);
        decision.limit = Some(5);
        decision.remaining = Some(if allowed { 4 } else { 0 });
        decision.reset_after = Span::from_millis(59_001);
        if !allowed {
            decision.reason = Reason::Penalty;
            decision.blocked = true;
            decision.retry_after = Some(Span::from_millis(15_001));
            decision.backoff = Some(Span::from_secs(16));
            decision.next_allowed_at = Some(now + Span::from_millis(15_001));
        }
        decision
    }

    fn login(policy: &Policy) -> (ActionId, Decision, Decision) {
        let id = policy.plan().find("login").unwrap();
        let own = policy.plan().action(id).limits().first().copied();
        let bind = |mut decision: Decision| {
            decision.bound_by = own;
            decision
        };
        (id, bind(decision(true)), bind(decision(false)))
    }

    fn annotated(dialect: HeaderDialect, x: bool) -> Vec<String> {
        let policy = policy();
        let (id, admitted, _) = login(&policy);
        let mut headers = HeaderMap::new();
        Replies::new(policy.plan(), dialect, x).annotate(Some(id), &admitted, &mut headers);
        headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect()
    }

    #[test]
    fn each_dialect() {
        assert_eq!(
            annotated(HeaderDialect::Draft10, false),
            [r#"ratelimit-policy: "login";q=5;w=60, "global";q=1000;w=3600"#, r#"ratelimit: "login";r=4;t=60"#,]
        );
        assert_eq!(
            annotated(HeaderDialect::Draft7, false),
            ["ratelimit-policy: 5;w=60, 1000;w=3600", "ratelimit: limit=5, remaining=4, reset=60",]
        );
        assert_eq!(
            annotated(HeaderDialect::None, true),
            ["x-ratelimit-limit: 5", "x-ratelimit-remaining: 4", "x-ratelimit-reset: 60",]
        );
    }

    #[test]
    fn calls_in_flight_name_their_unit() {
        let policy = policy();
        let id = policy.plan().find("feed").unwrap();
        let mut admitted = decision(true);
        admitted.bound_by = policy.plan().action(id).limits().first().copied();
        let mut headers = HeaderMap::new();
        Replies::new(policy.plan(), HeaderDialect::Draft10, false).annotate(Some(id), &admitted, &mut headers);
        assert_eq!(headers[RATELIMIT_POLICY], r#""feed";q=8;qu="concurrent-requests", "global";q=1000;w=3600"#);
    }

    #[test]
    fn a_refusal_says_when_to_come_back() {
        let policy = policy();
        let (id, _, refused) = login(&policy);
        let response =
            Replies::new(policy.plan(), HeaderDialect::Draft10, true).refusal(Some(id), &refused, &HeaderMap::new());
        assert_eq!(response.status(), 429);
        assert_eq!(response.headers().len(), 7);
        assert_eq!(response.headers()["x-ratelimit-limit"], "5");
        assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
        assert_eq!(response.headers()["x-ratelimit-reset"], "16");
        assert_eq!(response.headers()["ratelimit-policy"], r#""login";q=5;w=60, "global";q=1000;w=3600"#);
        assert_eq!(response.headers()["retry-after"], "16");
        assert_eq!(response.headers()["ratelimit"], r#""login";r=0;t=16"#);
        assert_eq!(response.headers()["content-type"], "application/json");
        assert_eq!(
            response.body(),
            r#"{"error":"Too many requests","retry_after":16,"next_allowed_at":"2026-11-21 12:01:45Z"}"#
        );
    }

    #[test]
    fn the_same_again_is_the_same() {
        let policy = policy();
        let (id, _, first) = login(&policy);
        let replies = Replies::new(policy.plan(), HeaderDialect::Draft10, true);
        let mut last = LastRefusal::default();
        let mut later = first;
        later.retry_after = Some(Span::from_secs(15));
        let mut without = first;
        without.next_allowed_at = None;
        let mut more = first;
        more.remaining = Some(1);
        let denied = Decision::without_limit(false, Reason::DenyList, Time::ZERO);
        for decision in [first, first, later, first, without, more, denied, denied, first] {
            for action in [Some(id), Some(id), None] {
                let expected = replies.refusal(action, &decision, &HeaderMap::new());
                let found = replies.refusal_after(&mut last, action, &decision, &HeaderMap::new());
                assert_eq!(found.status(), expected.status());
                assert_eq!(found.headers(), expected.headers());
                assert_eq!(found.body(), expected.body());
            }
        }
        let mut request = HeaderMap::new();
        request.insert(ACCEPT, PROBLEM_JSON);
        let problem = replies.refusal_after(&mut last, Some(id), &first, &request);
        assert_eq!(problem.headers()[CONTENT_TYPE], PROBLEM_JSON);
    }

    #[test]
    fn a_refusal_for_good_says_so() {
        let policy = policy();
        let (id, _, mut refused) = login(&policy);
        refused.retry_after = None;
        refused.next_allowed_at = None;
        let replies = Replies::new(policy.plan(), HeaderDialect::Draft10, true);
        let response = replies.refusal(Some(id), &refused, &HeaderMap::new());
        assert!(!response.headers().contains_key("retry-after"));
        assert!(!response.headers().contains_key("x-ratelimit-reset"));
        assert_eq!(response.headers()["ratelimit"], r#""login";r=0"#);
        assert_eq!(response.body(), r#"{"error":"Too many requests","retry_after":null,"next_allowed_at":null}"#);
    }

    #[test]
    fn a_problem_for_those_who_accept_one() {
        let policy = policy();
        let (id, _, refused) = login(&policy);
        let replies = Replies::new(policy.plan(), HeaderDialect::Draft10, false);
        let mut request = HeaderMap::new();
        request.insert(ACCEPT, HeaderValue::from_static("text/html, Application/Problem+JSON;q=0.5"));
        let response = replies.refusal(Some(id), &refused, &request);
        assert_eq!(response.headers()["content-type"], "application/problem+json");
        let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
        assert_eq!(
            body,
            serde_json::json!({
                "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
                "title": "Request cannot be satisfied as assigned quota has been exceeded",
                "status": 429,
                "violated-policies": ["login"],
                "retry_after": 16,
                "next_allowed_at": "2026-11-21 12:01:45Z",
            })
        );
        for accept in ["*/*", "application/json", "application/problem+json;q=0", "application/problem+json; Q=0.000"] {
            request.insert(ACCEPT, HeaderValue::from_static(accept));
            assert!(!wants_problem(&request), "{accept}");
        }
    }

    #[test]
    fn the_deny_list_is_forbidden() {
        let policy = policy();
        let denied = Decision::without_limit(false, Reason::DenyList, Time::ZERO);
        let response =
            Replies::new(policy.plan(), HeaderDialect::Draft10, false).refusal(None, &denied, &HeaderMap::new());
        assert_eq!(
            (response.status(), response.body().as_ref()),
            (StatusCode::FORBIDDEN, &br#"{"error":"Forbidden"}"#[..])
        );
        assert_eq!(response.headers().len(), 1);
    }

    #[test]
    fn names_too_long_for_the_stack() {
        let name = "a".repeat(100);
        let file = format!("[inbound.action.{name}]\nmatch = {{ path = \"/\" }}\nlimit = \"5 per 60s\"\n");
        let policy = Policy::load(Sources::new().file("test.toml", file)).ok();
        // A policy may refuse such a name; if it takes it, the header carries all of it.
        if let Some(policy) = policy {
            let id = policy.plan().find(&name).unwrap();
            let mut admitted = decision(true);
            admitted.bound_by = policy.plan().action(id).limits().first().copied();
            let mut headers = HeaderMap::new();
            Replies::new(policy.plan(), HeaderDialect::Draft10, false).annotate(Some(id), &admitted, &mut headers);
            assert!(headers[RATELIMIT].as_bytes().starts_with(format!("\"{name}\";r=4").as_bytes()));
        }
    }

    #[test]
    fn moments_round_up() {
        for (micros, text) in [
            (0, "1970-01-01 00:00:00Z"),
            (1, "1970-01-01 00:00:01Z"),
            (951_782_399_000_001, "2000-02-29 00:00:00Z"),
            (1_709_251_199_000_000, "2024-02-29 23:59:59Z"),
            (1_709_251_200_000_000, "2024-03-01 00:00:00Z"),
            (4_107_542_400_000_000, "2100-03-01 00:00:00Z"),
            (u64::MAX, "2112-09-17 23:53:48Z"),
        ] {
            assert_eq!(timestamp(Time::from_micros(micros)).to_string(), text);
        }
    }

    #[test]
    fn numbers() {
        for number in [0, 9, 10, 1 << 40, u64::MAX] {
            assert_eq!(Digits::of(number).as_bytes(), number.to_string().as_bytes());
        }
    }
}
