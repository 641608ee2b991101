//! The path of one request through the cache.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::response::Parts as ResponseParts;
use http::{Extensions, HeaderMap, HeaderName, Request, Response, StatusCode, header};
use http_body::Body;
use moka::ops::compute::Op;
use tidegate_core::{Clock, Time};
use tidegate_policy::outbound::CacheRules;

use super::super::{CallErrorKind, CallOptions};
use super::body::collect;
use super::cached_reply::{CachedHead, CachedReply, CachedResource};
use super::key::CacheKey;
use super::request_directives::RequestDirectives;
use super::single_flight::{FlightMember, FlightResult};
use super::{CacheBody, CacheCallError, CacheInner, CacheStatus, Origin, not_cached_response, with_status};

/// The number of times that a call waits for others if their reply turns out to be another variant than its own.
const MAX_WAITS: usize = 3;

/// A request that may be answered from the cache.
pub(super) struct CacheableRequest<'a, P, C> {
    pub cache: &'a CacheInner<C>,
    pub origin: &'a P,
    pub rules: CacheRules,
    pub directives: RequestDirectives,
    /// The key of the request's URL and of the credential that its caller sends, without the provider's own credential.
    pub base_key: CacheKey,
    /// The same with the provider's own credential. The replies are stored under this key.
    pub resource_key: CacheKey,
    /// The request's key, without the headers that the `Vary` of a reply adds.
    pub request_key: CacheKey,
    pub deadline: Time,
    /// The request's headers, as its caller wrote them.
    pub headers: HeaderMap,
}

/// The stored reply of a request.
pub(super) struct LookupResult {
    /// The key of its reply, as far as it is known before the reply arrives.
    key: CacheKey,
    cached: Option<Arc<CachedReply>>,
}

/// The result of waiting, before a call is made.
pub(super) enum WaitOutcome<B: Body> {
    /// A call isn't needed.
    Answered(Response<CacheBody<B>>),
    /// A call is needed, and others may wait for it.
    NeedsCall { found: LookupResult, member: Option<FlightMember> },
}

impl<P: Origin, C: Clock> CacheableRequest<'_, P, C> {
    async fn look_up(&self) -> LookupResult {
        let resource = self.cache.replies.get(&self.resource_key).await.unwrap_or_default();
        let cached = resource.replies().iter().find(|cached| self.matches_request(cached)).cloned();
        // The next reply is likely to depend on the same headers as the newest.
        let vary = resource.replies().first().map_or(&[][..], |newest| &newest.head.vary);
        let key = cached.as_ref().map_or_else(|| self.variant_key(vary), |cached| cached.key);
        LookupResult { key, cached }
    }

    /// Returns true if it is the reply to this request, and not to another variant.
    fn matches_request(&self, cached: &CachedReply) -> bool {
        self.variant_key(&cached.head.vary) == cached.key
    }

    fn variant_key(&self, vary: &[HeaderName]) -> CacheKey {
        self.cache.key_factory.variant_key(self.request_key, vary, &self.headers)
    }

    fn fresh_response<B: Body>(&self, found: &LookupResult) -> Option<Response<CacheBody<B>>> {
        let now = self.cache.clock.now();
        let cached = found.cached.as_ref().filter(|cached| cached.is_fresh_for(&self.directives, now))?;
        Some(with_status(cached.conditional_response(&self.headers, now), CacheStatus::Hit))
    }

    /// Looks for a stored reply, and waits for an identical call that is under way, if there is one. Adds this wait to
    /// the options.
    pub(super) async fn wait_for_reply<B: Body>(&self, options: &mut CallOptions) -> WaitOutcome<B> {
        let mut found = self.look_up().await;
        for _ in 0..MAX_WAITS {
            if let Some(reply) = self.fresh_response(&found) {
                return WaitOutcome::Answered(reply);
            }
            if self.directives.only_if_cached {
                return WaitOutcome::Answered(not_cached_response());
            }
            if self.directives.no_cache || self.directives.is_conditional {
                break;
            }
            let Some(mut member) = self.cache.single_flight.join(found.key, options.urgency.as_ref()) else { break };
            if !member.is_leader {
                self.origin.raise(member.urgency(), options.lane);
                let waiting_since = self.cache.clock.now();
                let result = tokio::time::timeout(self.time_left(), member.wait_for_result()).await;
                options.waited = options.waited + self.cache.clock.now().since(waiting_since);
                // The call itself reports the timeout, as it does when no other call is under way.
                let Ok(flight_result) = result else { break };
                if let Some(flight_result) = flight_result {
                    drop(member);
                    if let Some(reply) = self.response_from_flight(&flight_result) {
                        return WaitOutcome::Answered(reply);
                    }
                    if !matches!(flight_result, FlightResult::Reply(_)) {
                        break;
                    }
                    // The reply was for another variant. Its `Vary` is known now.
                    found = self.look_up().await;
                    continue;
                }
            }
            // Another call may have stored a reply between the lookup and becoming the leader.
            found = self.look_up().await;
            return match self.fresh_response(&found) {
                Some(reply) => WaitOutcome::Answered(reply),
                None => WaitOutcome::NeedsCall { found, member: Some(member) },
            };
        }
        WaitOutcome::NeedsCall { found, member: None }
    }

    /// The reply that another call fetched, if it is one for this request too.
    fn response_from_flight<B: Body>(&self, flight_result: &FlightResult) -> Option<Response<CacheBody<B>>> {
        let now = self.cache.clock.now();
        match flight_result {
            FlightResult::Reply(cached) if self.matches_request(cached) => {
                Some(with_status(cached.original_response(), CacheStatus::Coalesced))
            }
            FlightResult::Stale(cached)
                if self.matches_request(cached) && cached.can_serve_stale(&self.directives, now) =>
            {
                Some(with_status(cached.aged_response(now), CacheStatus::Stale))
            }
            _ => None,
        }
    }

    fn time_left(&self) -> Duration {
        self.deadline.since(self.cache.clock.now()).as_duration()
    }

    /// Makes the call, and stores its reply if that is allowed.
    pub(super) async fn fetch<Q, B, E, R>(
        self,
        found: LookupResult,
        member: Option<FlightMember>,
        mut options: CallOptions,
        (mut request, body): (Parts, Q),
        send: impl FnOnce(CallOptions, Request<Q>) -> R,
    ) -> Result<Response<CacheBody<B>>, E>
    where
        B: Body<Data = Bytes>,
        E: CacheCallError,
        R: Future<Output = Result<Response<B>, E>>,
    {
        let stored_reply = found.cached;
        // A caller with a conditional request gets the answer to its own condition.
        let revalidated_reply = stored_reply
            .as_ref()
            .filter(|cached| !self.directives.is_conditional && cached.add_validators(&mut request.headers))
            .cloned();
        options.timeout = Some(self.time_left());
        if let Some(member) = &member {
            options.urgency = Some(member.urgency().clone());
        }
        let outcome = send(options, Request::from_parts(request, body)).await;
        let now = self.cache.clock.now();
        let stale_reply = stored_reply.filter(|cached| cached.can_serve_stale(&self.directives, now));
        let (mut parts, body) = match (outcome.map(Response::into_parts), stale_reply) {
            (Ok((parts, _)), Some(cached)) if is_outage(&parts) => {
                return Ok(self.serve_stale(cached, member, parts.extensions));
            }
            (Err(error), Some(cached)) if error.is_outage() => {
                return Ok(self.serve_stale(cached, member, Extensions::new()));
            }
            (Ok(reply), _) => reply,
            (Err(error), _) => {
                if !error.is_call_specific() {
                    finish_flight(member, FlightResult::NotShareable);
                }
                return Err(error);
            }
        };
        if let Some(cached) = revalidated_reply.filter(|_| parts.status == StatusCode::NOT_MODIFIED) {
            drop(body);
            let extensions = std::mem::take(&mut parts.extensions);
            let mut reply = self.revalidate(cached, &parts.headers, member, now).await;
            *reply.extensions_mut() = extensions;
            for cookie in parts.headers.get_all(header::SET_COOKIE) {
                reply.headers_mut().append(header::SET_COOKIE, cookie.clone());
            }
            return Ok(with_status(reply, CacheStatus::Hit));
        }
        let body = self.store_fetched(found.key, &parts, body, member, now).await;
        Ok(with_status(Response::from_parts(parts, body), CacheStatus::Miss))
    }

    fn serve_stale<B: Body>(
        &self,
        cached: Arc<CachedReply>,
        member: Option<FlightMember>,
        mut extensions: Extensions,
    ) -> Response<CacheBody<B>> {
        extensions.remove::<CallErrorKind>();
        let mut reply = cached.aged_response(self.cache.clock.now());
        *reply.extensions_mut() = extensions;
        finish_flight(member, FlightResult::Stale(cached));
        with_status(reply, CacheStatus::Stale)
    }

    /// Extends a stored reply that the provider confirmed with a 304.
    async fn revalidate<B: Body>(
        &self,
        cached: Arc<CachedReply>,
        not_modified: &HeaderMap,
        member: Option<FlightMember>,
        now: Time,
    ) -> Response<CacheBody<B>> {
        let Some(parts) = cached.revalidated_head(not_modified) else {
            let reply = cached.aged_response(now);
            finish_flight(member, to_flight_result(cached));
            return reply;
        };
        match CachedHead::from_reply(&self.rules, &parts, now) {
            Some(head) => {
                let fresh = self.store(head, cached.body.clone(), now).await;
                let reply = fresh.aged_response(now);
                finish_flight(member, to_flight_result(fresh));
                reply
            }
            None => {
                self.replace_stored(cached.key, None).await;
                finish_flight(member, FlightResult::NotShareable);
                Response::from_parts(parts, CacheBody::from_bytes(cached.body.clone()))
            }
        }
    }

    /// Stores a reply if that is allowed. Returns its body in any case.
    async fn store_fetched<B: Body<Data = Bytes>>(
        &self,
        key: CacheKey,
        parts: &ResponseParts,
        body: B,
        member: Option<FlightMember>,
        now: Time,
    ) -> CacheBody<B> {
        let Some(head) = CachedHead::from_reply(&self.rules, parts, now).filter(|_| !is_failed_call(parts)) else {
            let is_replacement =
                parts.status.is_success() || matches!(parts.status, StatusCode::NOT_FOUND | StatusCode::GONE);
            if is_replacement && !is_failed_call(parts) {
                self.replace_stored(key, None).await;
            }
            finish_flight(member, FlightResult::NotShareable);
            return CacheBody::pass_through(body);
        };
        // The reply to a HEAD gives the length of a body that it doesn't have.
        let length = parts.headers.get(header::CONTENT_LENGTH).filter(|_| !self.directives.is_head);
        let declared_length = length.and_then(|length| length.to_str().ok()?.parse().ok());
        let (body, flight_result) =
            match collect(body, self.rules.max_body, self.time_left(), &self.cache.buffer_capacity).await {
                Ok(bytes) if declared_length.is_none_or(|length: u64| bytes.len() as u64 == length) => {
                    let cached = self.store(head, bytes.clone(), now).await;
                    (CacheBody::from_bytes(bytes), to_flight_result(cached))
                }
                Ok(bytes) => (CacheBody::from_bytes(bytes), FlightResult::NotShareable),
                Err(body) => (body, FlightResult::NotShareable),
            };
        finish_flight(member, flight_result);
        body
    }

    async fn store(&self, head: CachedHead, body: Bytes, now: Time) -> Arc<CachedReply> {
        let key = self.variant_key(&head.vary);
        let cached = Arc::new(CachedReply { head, key, body });
        // The credential may have changed since the key was computed, if the call waited for long.
        let is_same_credential =
            self.cache.resource_key(self.origin, &self.rules, self.base_key).await == self.resource_key;
        if is_same_credential && cached.is_worth_keeping(now) {
            self.replace_stored(key, Some(Arc::clone(&cached))).await;
        }
        cached
    }

    /// Replaces the stored reply with this key by another one, or removes it.
    async fn replace_stored(&self, key: CacheKey, cached: Option<Arc<CachedReply>>) {
        let replies = &self.cache.replies;
        let change = |resource: Option<moka::Entry<CacheKey, CachedResource>>| {
            let resource = resource.map(moka::Entry::into_value).unwrap_or_default().with_replaced(key, cached);
            std::future::ready(if resource.replies().is_empty() { Op::Remove } else { Op::Put(resource) })
        };
        replies.entry(self.resource_key).and_compute_with(change).await;
        // Evicts other replies now and not at some later call, so that the bound holds.
        replies.run_pending_tasks().await;
    }
}

/// The reply in the form that waiting calls may get.
fn to_flight_result(cached: Arc<CachedReply>) -> FlightResult {
    if cached.head.no_cache { FlightResult::NotShareable } else { FlightResult::Reply(cached) }
}

fn finish_flight(member: Option<FlightMember>, flight_result: FlightResult) {
    if let Some(member) = member {
        member.finish(flight_result);
    }
}

/// Returns true if a reply says that the provider is unavailable.
fn is_outage(reply: &ResponseParts) -> bool {
    reply.status.is_server_error() || reply.status == StatusCode::TOO_MANY_REQUESTS || is_failed_call(reply)
}

fn is_failed_call(reply: &ResponseParts) -> bool {
    reply.extensions.get::<CallErrorKind>().is_some()
}
