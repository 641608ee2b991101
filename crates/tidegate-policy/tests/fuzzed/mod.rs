//! Properties that must hold for any text from outside: for the tests of this folder, and for the targets in `fuzz/`.
//!
//! Each function panics if its property is false.

use std::net::IpAddr;
use std::sync::LazyLock;

use http::HeaderMap;
use http::uri::PathAndQuery;
use tidegate_core::{LimitKind, MAX_OPS, Span, Time, Verb};
use tidegate_policy::{
    ActionSpec, Errors, Forwarding, ForwardingHeader, Hints, KeyError, KeySeed, MAX_ACTIONS, Networks, Plan, Policy,
    PolicySources, Quantity, Query, canonical_ip, parse_bytes, parse_duration, printable_lines,
};

/// The most errors that are shown at once, and more bytes than their text ever has.
const MAX_ERRORS: usize = 50;
const MAX_ERROR_TEXT: usize = 256 << 10;

/// Every header that hints are read from, and `Date`.
pub const HINT_HEADERS: [&str; 35] = [
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
    "x-ratelimit-reset-after",
    "x-ratelimit-limit",
    "x-rate-limit-remaining",
    "x-rate-limit-reset",
    "x-rate-limit-limit",
    "ratelimit-remaining",
    "ratelimit-reset",
    "ratelimit-limit",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
    "x-ratelimit-limit-tokens",
    "anthropic-ratelimit-requests-remaining",
    "anthropic-ratelimit-requests-reset",
    "anthropic-ratelimit-requests-limit",
    "anthropic-ratelimit-tokens-remaining",
    "anthropic-ratelimit-tokens-reset",
    "anthropic-ratelimit-tokens-limit",
    "anthropic-ratelimit-input-tokens-remaining",
    "anthropic-ratelimit-input-tokens-reset",
    "anthropic-ratelimit-input-tokens-limit",
    "anthropic-ratelimit-output-tokens-remaining",
    "anthropic-ratelimit-output-tokens-reset",
    "anthropic-ratelimit-output-tokens-limit",
    "x-ms-retry-after-ms",
    "retry-after-ms",
    "grpc-retry-pushback-ms",
    "ratelimit",
    "retry-after",
    "date",
    "x-other",
];

/// The text of errors is bounded, and does nothing to a terminal.
pub fn errors_are_printable(errors: &Errors) {
    let text = errors.to_string();
    assert!(errors.count() > 0 && errors.iter().len() <= MAX_ERRORS);
    assert!(text.len() <= MAX_ERROR_TEXT, "{} bytes", text.len());
    assert_eq!(printable_lines(&text), text);
}

/// Any sources are read as a policy or refused with errors, and twice alike.
pub fn a_policy_is_read_or_refused(sources: PolicySources) {
    let policy = match Policy::load(sources.clone()) {
        Ok(policy) => policy,
        Err(errors) => return errors_are_printable(&errors),
    };
    let again = Policy::load(sources).expect("a policy that was read before");
    assert_eq!(policy.plan().describe(), again.plan().describe());
    let outbound = |policy: &Policy| policy.outbound().map(|outbound| outbound.describe());
    assert_eq!(outbound(&policy), outbound(&again));
    for (id, _) in policy.plan().limits().iter() {
        let quantity = policy.plan().limit_info(id).quantity();
        assert_eq!(quantity.to_string().parse().as_ref(), Ok(quantity));
    }
}

/// A quantity that is read prints and parses back; its periods hold the moment that they are asked for. An error lies
/// within the text.
pub fn a_quantity_parses_back(text: &str, now: Time) {
    let quantity: Quantity = match text.parse() {
        Ok(quantity) => quantity,
        Err(error) => {
            let range = error.range();
            assert!(text.get(range.clone()).is_some(), "{range:?} splits a character or lies outside of {text:?}");
            return;
        }
    };
    assert_eq!(quantity.to_string().parse().as_ref(), Ok(&quantity), "{text:?}");
    if let Some(LimitKind::Quota(quota)) = quantity.to_limit_kind().expect("a limit, since it was read") {
        let period = quota.period(now);
        assert!(period.start <= now && now < period.end, "{now:?} is not in {period:?} of {quantity}");
        assert_eq!(quota.period(period.end).start, period.end, "{quantity}");
    }
}

/// A duration that is read prints and parses back. A number of bytes is below 2^63.
pub fn units_parse_back(text: &str) {
    if let Ok(span) = parse_duration(text) {
        assert_eq!(parse_duration(&span.to_string()), Ok(span), "{text:?}");
    }
    if let Ok(bytes) = parse_bytes(text) {
        assert_eq!(parse_bytes(&bytes.to_string()), Ok(bytes), "{text:?}");
    }
}

/// The address of a client is canonical. The headers of a peer that isn't trusted are ignored.
pub fn a_client_address_is_canonical(header: ForwardingHeader, headers: &HeaderMap) {
    let trusted = ["127.0.0.0/8", "10.0.0.0/8", "fd00::/8"].map(|network| network.parse().expect("a network"));
    let forwarding = Forwarding { trusted: Networks::new(trusted), header };
    let client = forwarding.client_ip(IpAddr::from([127, 0, 0, 1]), headers);
    assert_eq!(client, canonical_ip(client));
    let stranger = IpAddr::from([203, 0, 113, 9]);
    assert_eq!(forwarding.client_ip(stranger, headers), stranger);
}

/// Times in a reply's headers are in the future.
pub fn hints_are_about_the_future(headers: &HeaderMap, now: Time) {
    let hints = Hints::read(headers, now);
    let ahead = |at: Option<Time>| at.is_none_or(|at| at > now || at.is_never());
    let sound = hints.retry_after != Some(Span::ZERO)
        && ahead(hints.spent_until)
        && ahead(hints.resets_at)
        && (hints.exhausted || hints.spent_until.is_none());
    assert!(sound, "{hints:?} at {now:?} of {headers:?}");
}

/// Any query is counted, by the same keys each time, or refused as one that can't be counted.
pub fn a_query_is_keyed_or_uncountable(query: &Query<'_>) {
    static POLICY: LazyLock<Policy> = LazyLock::new(|| {
        let key = ["path", "host", "key", "cookie:c", "query:q", "header:x-tenant"];
        let action = ActionSpec::new("5 per 60s").path("/a/*").key(key);
        let policy = Policy::builder().setting("inbound.path_quirks", "case").action("a", action);
        policy.build().expect("a valid policy")
    });
    let plan = POLICY.plan();
    let _ = plan.matching_actions(query);
    let id = plan.find_action("a").expect("an action of the policy");
    let ops = |verb| plan.ops(Some(id), query, &KeySeed::new([7; 16]), verb, 7).map(|batch| batch.ops().to_vec());
    match (ops(Verb::Take), ops(Verb::Peek)) {
        (Ok(takes), Ok(peeks)) => {
            assert!(!takes.is_empty() && takes.len() <= MAX_OPS);
            assert!(takes.iter().map(|op| op.key).eq(peeks.iter().map(|op| op.key)));
        }
        (Err(KeyError::Uncountable(_)), Err(KeyError::Uncountable(_))) => {}
        unexpected => panic!("{unexpected:?} of {query:?}"),
    }
}

/// A path meets few actions. The form in which it is forwarded is final, has no detours, and, of a path that HTTP
/// allows, meets no action that the path doesn't meet.
pub fn a_path_is_matched_and_forwarded(path: &str) {
    static POLICIES: LazyLock<Vec<Policy>> = LazyLock::new(|| {
        let quirks = ["[]", "[\"case\"]", "[\"encoded_slash\", \"parameters\", \"case\", \"caddy\", \"windows\"]"];
        let policies = quirks.map(|quirks| {
            let paths = ["/a/b", "/a/*/b", "/a/*", "/b", "/*"];
            let actions: String = (0..)
                .zip(paths)
                .map(|(n, path)| format!("[inbound.action.a{n}]\nlimit = \"5/s\"\nmatch = {{ path = \"{path}\" }}\n"))
                .collect();
            let text = format!("[inbound]\nambiguous_paths = \"normalise\"\npath_quirks = {quirks}\n{actions}");
            Policy::load(PolicySources::new().file("fuzz", text)).expect("a valid policy")
        });
        policies.into()
    });
    for policy in POLICIES.iter() {
        let plan = policy.plan();
        let form = plan.forwarded_path(path).unwrap_or_else(|| path.to_owned());
        assert_eq!(plan.forwarded_path(&form), None, "{form:?} of {path:?}");
        if path.starts_with('/') {
            let path = form.split(['?', '#']).next().unwrap_or_default();
            let has = |segment: &str| path.split('/').any(|one| one == segment);
            assert!(!has(".") && !has("..") && !path.contains("//") && !path.contains('\\'), "{path:?}");
        }
        let (Some(met), Some(met_by_form)) = (matched(plan, path), matched(plan, &form)) else { continue };
        assert!(met.len() <= MAX_ACTIONS);
        let meets_no_more = met_by_form.iter().all(|name| met.contains(name));
        assert!(meets_no_more || path.parse::<PathAndQuery>().is_err(), "{path:?} {met:?}, {form:?} {met_by_form:?}");
    }
}

fn matched(plan: &Plan, path: &str) -> Option<Vec<String>> {
    let actions = plan.matching_actions(&Query { path: Some(path), ..Query::default() }).ok()?;
    Some(actions.iter().map(|id| plan.action(id).name().to_owned()).collect())
}
