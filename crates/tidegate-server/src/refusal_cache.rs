//! The last refusal of a connection. A client that keeps calling gets the same refusal for a whole second, and copying
//! it costs less than building it again.

use bytes::Bytes;
use http::{HeaderMap, Response};
use tidegate::policy::MatchedActions;
use tidegate::reply::{Replies, wants_problem};
use tidegate::{Decision, Reason, Time};
use tidegate_core::LimitId;

/// The refusal that a connection got last.
#[derive(Debug, Default)]
pub(crate) struct RefusalCache(Option<(RefusalKey, Response<Bytes>)>);

/// All that the text of a refusal depends on.
#[derive(Debug, PartialEq, Eq)]
struct RefusalKey {
    actions: MatchedActions,
    bound_by: Option<LimitId>,
    limit: Option<u64>,
    remaining: Option<u64>,
    wait: Option<u64>,
    until: Option<u64>,
    denied: bool,
}

impl RefusalKey {
    fn new(actions: MatchedActions, decision: &Decision) -> Self {
        Self {
            actions,
            bound_by: decision.bound_by,
            limit: decision.limit,
            remaining: decision.remaining,
            wait: decision.retry_after.map(|wait| wait.as_secs_ceil()),
            until: decision.next_allowed_at.map(Time::as_secs_ceil),
            denied: decision.reason == Reason::DenyList,
        }
    }
}

impl RefusalCache {
    /// [`Replies::refusal`], from the cache if it is the same as the last.
    pub(crate) fn refusal(
        &mut self,
        replies: &Replies,
        actions: MatchedActions,
        decision: &Decision,
        request: &HeaderMap,
    ) -> Response<Bytes> {
        // A reservation is one caller's own.
        if wants_problem(request) || decision.reservation.is_some() || decision.is_reservation_unknown {
            return replies.refusal(actions, decision, request);
        }
        let key = RefusalKey::new(actions, decision);
        if let Some((cached_key, response)) = &self.0
            && *cached_key == key
        {
            return response.clone();
        }
        let response = replies.refusal(actions, decision, request);
        self.0 = Some((key, response.clone()));
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use http::header::{ACCEPT, CONTENT_TYPE};
    use tidegate::Span;
    use tidegate::policy::{ActionSpec, HeaderDialect, Policy};

    const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");

    #[test]
    fn a_cached_refusal_equals_a_new_one() {
        let policy = Policy::builder().action("login", ActionSpec::new("5 per 60s")).build().unwrap();
        let id = policy.plan().find_action("login").unwrap();
        let limit = policy.plan().action(id).limits()[0];
        let first = Decision {
            bound_by: Some(limit),
            limit: Some(5),
            remaining: Some(0),
            retry_after: Some(Span::from_secs(14)),
            next_allowed_at: Some(Time::from_secs(1_767_225_600)),
            ..Decision::without_limit(false, Reason::Limit, Time::ZERO)
        };
        let replies = Replies::new(policy.plan(), HeaderDialect::Draft10, true);
        let mut last = RefusalCache::default();
        let later = Decision { retry_after: Some(Span::from_secs(15)), ..first };
        let without = Decision { next_allowed_at: None, ..first };
        let more = Decision { remaining: Some(1), ..first };
        let denied = Decision::without_limit(false, Reason::DenyList, Time::ZERO);
        for decision in [first, first, later, first, without, more, denied, denied, first] {
            for actions in [id.into(), id.into(), MatchedActions::NONE] {
                let expected = replies.refusal(actions, &decision, &HeaderMap::new());
                let found = last.refusal(&replies, actions, &decision, &HeaderMap::new());
                assert_eq!(found.status(), expected.status());
                assert_eq!(found.headers(), expected.headers());
                assert_eq!(found.body(), expected.body());
            }
        }
        let mut request = HeaderMap::new();
        request.insert(ACCEPT, PROBLEM_JSON);
        let problem = last.refusal(&replies, id.into(), &first, &request);
        assert_eq!(problem.headers()[CONTENT_TYPE], PROBLEM_JSON);
    }
}
