//! Replies that are kept, so that the same is not asked twice.
//!
//! One [`Cache`] holds the replies of all providers within a fixed number of bytes. [`Cache::call`] stands before
//! whatever makes a call: it answers from what is kept, lets identical calls wait for the one that is under way, asks
//! the provider whether an old reply still holds, and lets an old reply stand in while the provider is unavailable.
//! HTTP's rules (RFC 9111) are [`http_cache_semantics`]'; a provider's [`CacheRules`]
//! say what is done beyond them.
//!
//! # Who may share a reply
//!
//! What a provider answers depends on who asks, so a reply is only ever told again to a call that would have been sent
//! as the same asker:
//!
//! * A provider with one credential, or none, is asked as one user, whoever calls here. The cache is *private* in the
//!   words of RFC 9111: it keeps what is marked `private`, and `s-maxage` doesn't concern it. When the credential becomes
//!   another, what was kept is out of reach: it is kept under a keyed hash of the secret. That takes an [`Origin`] that
//!   knows the secret, such as [`OutboundService`](super::OutboundService).
//! * With several credentials, which one a call gets is known only when it is sent, after its turn and its place in the
//!   limits have been spent. Until then a kept reply can't be known to be its own. So nothing is kept, and no call
//!   waits for another's, unless the rules say `shared`.
//! * With `shared`, replies don't depend on the credential. The cache is a *shared* one then: it keeps nothing that is
//!   `private`, and `s-maxage` goes before `max-age`.
//! * All headers of the request are part of the key, `shared` or not, and so are credentials that callers bring
//!   themselves, unless the provider's own takes their place. Only headers that are known to say nothing of the reply
//!   are left out, such as `User-Agent`, `Traceparent`, `Date` and `Idempotency-Key`; a reply that depends on one of
//!   those says so by `Vary`. The whole URL is part of the key, too. All of it is there as a keyed hash alone.
//! * `Set-Cookie` goes to the caller whose call brought it, and to nobody else.
//!
//! # What is kept
//!
//! Replies to GET and HEAD without a body, each method for itself, and of one URL and caller up to 16 that differ by
//! method, `Accept`, `Accept-Language` and the like. A request with `Range`, `If-Range`, `If-Match`,
//! `If-Unmodified-Since`, `Upgrade` or `no-store` goes by. A successful reply to an unsafe method removes what is kept
//! for its URL and its caller (RFC 9111 §4.4).
//!
//! `ttl` overrides `Cache-Control`, `Expires` and `Pragma` of replies with a status of 2xx, in whole seconds, rounded
//! up, counted from when the reply came. It does not override `no-store`, `Vary`, what the request asks for, or, with
//! `shared`, `private`. Once the time is over, `must-revalidate` and `no-cache` count again: such a reply doesn't stand
//! in.
//!
//! A reply is read whole before its caller gets it, so that others can have it too. One that is longer than `max_body`,
//! pauses for over a second, isn't done by its call's deadline or has trailers is passed on from its beginning, and not
//! kept.
//!
//! # Calls that wait for each other
//!
//! Those who wait for a call that is under way get its reply also where it is fresh for no time at all: none of them
//! could have had a newer one by asking when they did. `no-cache` and `no-store` forbid that, and each calls for itself.
//! They keep their own deadlines, and a more urgent one lifts the call that it waits for. When the caller who leads
//! goes away or runs out of its own time, one of the others leads on.

mod body;
mod cacheable_request;
mod cached_reply;
mod key;
mod origin;
mod request_directives;
mod single_flight;
#[cfg(test)]
mod tests;

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Body;
use moka::future::Cache as MokaCache;
use tidegate_core::{Clock, Span};
use tidegate_policy::outbound::CacheRules;
use tidegate_runtime::clock::SystemClock;

use self::body::BufferCapacity;
pub use self::body::CacheBody;
use self::cacheable_request::{CacheableRequest, WaitOutcome};
use self::cached_reply::CachedResource;
use self::key::{CacheKey, CacheKeyFactory};
pub use self::origin::{CacheCallError, Origin};
use self::request_directives::RequestDirectives;
use self::single_flight::SingleFlight;
use super::{CallOptions, Outbound};

/// The kept replies of all providers. Cheap to clone; clones are the same.
pub struct Cache<C = SystemClock>(Arc<CacheInner<C>>);

struct CacheInner<C> {
    replies: MokaCache<CacheKey, CachedResource>,
    key_factory: CacheKeyFactory,
    single_flight: Arc<SingleFlight>,
    /// What bodies take while they are read: as much again as the replies that are kept.
    buffer_capacity: Arc<BufferCapacity>,
    clock: C,
}

/// How a reply came about, as an extension of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheStatus {
    /// It was kept: still fresh, or confirmed by the provider.
    Hit,
    /// The provider was asked.
    Miss,
    /// It was kept and is old; the provider is unavailable.
    Stale,
    /// An identical call was under way already.
    Coalesced,
    /// Caches have no part in this call.
    Bypass,
}

impl CacheStatus {
    /// As the header `Tidegate-Cache` tells it: `hit`, `miss`, `stale`, `coalesced` or `bypass`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Miss => "miss",
            Self::Stale => "stale",
            Self::Coalesced => "coalesced",
            Self::Bypass => "bypass",
        }
    }
}

impl<C> Clone for Cache<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<C> fmt::Debug for Cache<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let replies = &self.0.replies;
        f.debug_struct("Cache")
            .field("replies", &replies.entry_count())
            .field("bytes", &replies.weighted_size())
            .finish()
    }
}

impl<C: Clock + Clone> Cache<C> {
    /// A cache for these providers, of the size that their policy says.
    pub fn for_outbound<S: tidegate_store::Store>(outbound: &Outbound<S, C>) -> Self {
        Self::new(outbound.config().cache_bytes, outbound.0.clock.clone())
    }
}

impl<C: Clock> Cache<C> {
    /// A cache whose replies take at most `max_bytes`, their keys, headers and the store's own needs included. Those
    /// that are asked for least go first.
    ///
    /// Bodies that are just being read may take as many bytes again. Beyond that they are passed on unread.
    pub fn new(max_bytes: u64, clock: C) -> Self {
        let weigher =
            |_: &CacheKey, resource: &CachedResource| u32::try_from(resource.size_bytes()).unwrap_or(u32::MAX);
        Self(Arc::new(CacheInner {
            replies: MokaCache::builder().max_capacity(max_bytes).weigher(weigher).build(),
            key_factory: CacheKeyFactory::new(),
            single_flight: Arc::default(),
            buffer_capacity: BufferCapacity::new(max_bytes),
            clock,
        }))
    }

    /// How many bytes the kept replies take.
    pub fn size_bytes(&self) -> u64 {
        self.0.replies.weighted_size()
    }

    /// Answers a request to `origin`, by `send` where it takes a call. The [`CacheStatus`] is among the response's
    /// extensions. So are those of the reply that `send` brought, also where its 304 confirmed another, or another
    /// stands in for it. A reply that has a [`CallErrorKind`](super::CallErrorKind) among them, being the last of a call that failed, isn't
    /// kept, whatever it looks like, and an old one stands in for it.
    ///
    /// `send` gets the options of the call that it is to make: with the time that is left, which is none if it ran out
    /// while waiting for another call, and with an urgency by which others lift it. `only-if-cached` without a reply
    /// that will do is answered 504.
    ///
    /// It has to be polled within a tokio runtime whose timers are enabled.
    ///
    /// # Errors
    /// What `send` fails with, unless an old reply stands in.
    pub async fn call<P, Q, B, E, F, R>(
        &self,
        origin: &P,
        options: CallOptions,
        request: Request<Q>,
        send: F,
    ) -> Result<Response<CacheBody<B>>, E>
    where
        P: Origin,
        Q: Body,
        B: Body<Data = Bytes>,
        E: CacheCallError,
        F: FnOnce(CallOptions, Request<Q>) -> R,
        R: Future<Output = Result<Response<B>, E>>,
    {
        let inner = &*self.0;
        let (parts, body) = request.into_parts();
        let cacheable =
            origin.rules().copied().and_then(|rules| Some((rules, RequestDirectives::read(&parts, &body)?)));
        let Some((rules, directives)) = cacheable else {
            return inner.bypass(origin, options, Request::from_parts(parts, body), send).await;
        };
        if !rules.shared && origin.credential_count() > 1 {
            if directives.only_if_cached {
                return Ok(not_cached_response());
            }
            return inner.bypass(origin, options, Request::from_parts(parts, body), send).await;
        }
        // Boxed, as calls of which nothing is kept would take the room for it too.
        let answering = async move {
            let timeout = options.timeout.unwrap_or_else(|| origin.timeout(options.lane));
            let deadline = inner.clock.now() + Span::from_duration(timeout);
            let base_key = inner.key_factory.base_key(origin, &parts);
            let resource_key = inner.resource_key(origin, &rules, base_key).await;
            let key = inner.key_factory.request_key(resource_key, &parts);
            let headers = parts.headers.clone();
            let cacheable_request = CacheableRequest {
                cache: inner,
                origin,
                rules,
                directives,
                base_key,
                resource_key,
                request_key: key,
                deadline,
                headers,
            };
            match cacheable_request.wait_for_reply(&options).await {
                WaitOutcome::Answered(reply) => Ok(reply),
                WaitOutcome::NeedsCall { found, member: seat } => {
                    cacheable_request.fetch(found, seat, options, (parts, body), send).await
                }
            }
        };
        Box::pin(answering).await
    }
}

impl<C: Clock> CacheInner<C> {
    /// The key of what is kept of a place, for calls as they would be sent now.
    async fn resource_key<P: Origin>(&self, origin: &P, rules: &CacheRules, base_key: CacheKey) -> CacheKey {
        let secret = if rules.shared { None } else { origin.secret().await };
        self.key_factory.resource_key(base_key, secret.as_deref())
    }

    /// Makes a call that caches have no part in, but for what it changes.
    async fn bypass<P: Origin, Q, B: Body, E, R: Future<Output = Result<Response<B>, E>>>(
        &self,
        origin: &P,
        options: CallOptions,
        request: Request<Q>,
        send: impl FnOnce(CallOptions, Request<Q>) -> R,
    ) -> Result<Response<CacheBody<B>>, E> {
        let (parts, body) = request.into_parts();
        let changed_resource = match origin.rules().filter(|_| !parts.method.is_safe()) {
            Some(rules) => {
                Some(Box::pin(self.resource_key(origin, rules, self.key_factory.base_key(origin, &parts))).await)
            }
            None => None,
        };
        let reply = send(options, Request::from_parts(parts, body)).await?;
        if let Some(resource_key) =
            changed_resource.filter(|_| reply.status().is_success() || reply.status().is_redirection())
        {
            Box::pin(self.replies.invalidate(&resource_key)).await;
        }
        Ok(with_status(reply.map(CacheBody::pass_through), CacheStatus::Bypass))
    }
}

fn with_status<B>(mut reply: Response<B>, status: CacheStatus) -> Response<B> {
    reply.extensions_mut().insert(status);
    reply
}

/// The answer to who wants no call where one is needed (RFC 9111 §5.2.1.7).
fn not_cached_response<B: Body>() -> Response<CacheBody<B>> {
    let mut reply = Response::new(CacheBody::default());
    *reply.status_mut() = StatusCode::GATEWAY_TIMEOUT;
    with_status(reply, CacheStatus::Miss)
}
