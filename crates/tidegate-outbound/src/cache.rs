//! A cache of replies, so that the same request isn't sent twice.
//!
//! One [`Cache`] holds the replies of all providers within a fixed number of bytes. [`Cache::call`] wraps the function
//! that makes a call. It answers from stored replies and lets identical calls wait for the one that is under way. It
//! revalidates old replies with the provider, and serves an old reply while the provider is unavailable. HTTP's rules
//! (RFC 9111) come from [`http_cache_semantics`]. A provider's [`CacheRules`] define what is done beyond them.
//!
//! # Sharing of replies
//!
//! The reply of a provider depends on the credential of the request. So a stored reply only answers calls that would be
//! sent with the same credential:
//!
//! * With one credential, or none, the provider sees one user, whichever caller made the call. The cache is *private*
//!   in the terms of RFC 9111: it stores replies marked `private`, and ignores `s-maxage`. When the credential changes,
//!   the stored replies become unreachable: their key contains a keyed hash of the secret. This requires an
//!   [`Origin`] that knows the secret, such as [`OutboundService`](super::OutboundService).
//! * With several credentials, the credential of a call is known only when it is sent. By then its turn in the queue
//!   and its share of the limits are spent. Earlier, a stored reply can't be matched to the credential. So nothing is
//!   stored, and no call waits for another one, unless the rules say `shared`.
//! * With `shared`, replies don't depend on the credential. The cache is then *shared* in the terms of RFC 9111: it
//!   stores no reply marked `private`, and `s-maxage` overrides `max-age`.
//! * All headers of the request are part of the key, with or without `shared`. So are credentials that callers bring
//!   themselves, unless the provider's own credential replaces them. Only headers that are known not to affect the
//!   reply are left out, such as `User-Agent`, `Traceparent`, `Date` and `Idempotency-Key`. A reply that depends on one
//!   of those says so by `Vary`. The whole URL is part of the key, too. The key contains only keyed hashes of all
//!   these.
//! * `Set-Cookie` goes only to the caller that the reply was fetched for.
//!
//! # Stored replies
//!
//! The cache stores replies to GET and HEAD without a body, separately for each method. For one URL and caller it
//! stores up to 16 replies that differ by method, `Accept`, `Accept-Language` and the like. A request with `Range`,
//! `If-Range`, `If-Match`, `If-Unmodified-Since`, `Upgrade` or `no-store` bypasses the cache. A successful reply to an
//! unsafe method removes the stored replies for its URL and its caller (RFC 9111 §4.4).
//!
//! `ttl` overrides `Cache-Control`, `Expires` and `Pragma` of replies with a status of 2xx. It is in whole seconds,
//! rounded up, counted from the arrival of the reply. It does not override `no-store`, `Vary`, the directives of the
//! request, or, with `shared`, `private`. After the `ttl`, `must-revalidate` and `no-cache` count again: such a reply
//! isn't served stale.
//!
//! A reply is read whole before its caller gets it, so that other callers can have it too. A reply is passed on from
//! the beginning and not stored if it is longer than `max_body`, pauses for over a second, isn't complete by the
//! deadline of its call or has trailers.
//!
//! # Coalesced calls
//!
//! Calls that wait for an identical call under way get its reply, even if that reply is never fresh. A call of their
//! own at that time would have had no newer one. `no-cache` and `no-store` forbid that, and each such call is sent by
//! itself. Waiting calls keep their own deadlines, and a more urgent one raises the priority of the call that it waits
//! for. When the leading caller is cancelled, runs out of its own time or loses its place in a full lane, one of the others
//! takes the lead.

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
use super::{CallOptions, CallStats, Outbound};

/// The stored replies of all providers. Cheap to clone: clones share the replies.
pub struct Cache<C = SystemClock>(Arc<CacheInner<C>>);

struct CacheInner<C> {
    replies: MokaCache<CacheKey, CachedResource>,
    key_factory: CacheKeyFactory,
    single_flight: Arc<SingleFlight>,
    /// Limits the memory of bodies while they are read: as many bytes again as the stored replies.
    buffer_capacity: Arc<BufferCapacity>,
    clock: C,
}

/// The source of a reply, as an extension of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheStatus {
    /// A stored reply: still fresh, or confirmed by the provider.
    Hit,
    /// The call was sent to the provider.
    Miss,
    /// A stored reply that is old, because the provider is unavailable.
    Stale,
    /// The reply of an identical call that was already under way.
    Coalesced,
    /// The cache took no part in this call.
    Bypass,
}

impl CacheStatus {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Hit, Self::Miss, Self::Stale, Self::Coalesced, Self::Bypass];

    /// The value of the header `Tidegate-Cache`: `hit`, `miss`, `stale`, `coalesced` or `bypass`.
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
    /// Returns a cache for these providers, of the size that their policy says.
    pub fn for_outbound<S: tidegate_store::Store>(outbound: &Outbound<S, C>) -> Self {
        Self::new(outbound.config().cache_bytes, outbound.0.clock.clone())
    }
}

impl<C: Clock> Cache<C> {
    /// Returns a cache that takes at most `max_bytes`, including keys, headers and the store's own overhead. The
    /// replies that are requested least are removed first.
    ///
    /// Bodies that are being read may take as many bytes again. Beyond that they are passed on without buffering.
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

    /// The number of bytes that the stored replies take.
    pub fn size_bytes(&self) -> u64 {
        self.0.replies.weighted_size()
    }

    /// Answers a request to `origin`, and calls `send` only if a call is needed. The [`CacheStatus`] is among the
    /// response's extensions. So are the extensions of the reply that `send` returned, even if that was a 304 that
    /// confirmed a stored reply, or a stale reply replaces it. A call that only waited for another one has
    /// [`CallStats`] without attempts there. A reply with a [`CallErrorKind`](super::CallErrorKind)
    /// in its extensions is the last reply of a failed call. It is never stored, and a stale reply replaces it.
    ///
    /// `send` gets the options of the call that it makes. Their timeout is the time left: zero if it ran out while
    /// waiting for another call. Other calls can raise the call's priority by their urgency handle. `only-if-cached`
    /// without a usable reply is answered 504.
    ///
    /// The future must be polled within a tokio runtime with timers enabled.
    ///
    /// # Errors
    /// The error of `send`, unless a stale reply replaces it.
    pub async fn call<P, Q, B, E, F, R>(
        &self,
        origin: &P,
        mut options: CallOptions,
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
        let (rules, directives) = match cacheable {
            Some((rules, directives)) if rules.shared || origin.credential_count() <= 1 => (rules, directives),
            Some((_, directives)) if directives.only_if_cached => return Ok(not_cached_response()),
            _ => return inner.bypass(origin, options, Request::from_parts(parts, body), send).await,
        };
        // Boxed, because calls that bypass the cache would take the memory for it too.
        let answering = async move {
            let timeout = options.timeout.unwrap_or_else(|| origin.timeout(options.lane));
            let deadline = inner.clock.now() + Span::from_duration(timeout);
            let base_key = inner.key_factory.base_key(origin, &parts);
            let resource_key = inner.resource_key(origin, &rules, base_key).await;
            let cacheable_request = CacheableRequest {
                cache: inner,
                origin,
                rules,
                directives,
                base_key,
                resource_key,
                request_key: inner.key_factory.request_key(resource_key, &parts),
                deadline,
                headers: parts.headers.clone(),
            };
            match cacheable_request.wait_for_reply(&mut options).await {
                WaitOutcome::Answered(mut reply) => {
                    if !options.waited.is_zero() {
                        let stats = CallStats { attempts: 0, waited: options.waited, credential: 0 };
                        reply.extensions_mut().insert(stats);
                    }
                    Ok(reply)
                }
                WaitOutcome::NeedsCall { found, member } => {
                    cacheable_request.fetch(found, member, options, (parts, body), send).await
                }
            }
        };
        Box::pin(answering).await
    }
}

impl<C: Clock> CacheInner<C> {
    /// The key of the replies stored for a resource, for calls as they would be sent now.
    async fn resource_key<P: Origin>(&self, origin: &P, rules: &CacheRules, base_key: CacheKey) -> CacheKey {
        let secret = if rules.shared { None } else { origin.secret().await };
        self.key_factory.resource_key(base_key, secret.as_deref())
    }

    /// Makes a call without the cache, and invalidates the stored replies that an unsafe method changes.
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

/// The reply to a request with `only-if-cached` if a call would be needed (RFC 9111 §5.2.1.7).
fn not_cached_response<B: Body>() -> Response<CacheBody<B>> {
    let mut reply = Response::new(CacheBody::default());
    *reply.status_mut() = StatusCode::GATEWAY_TIMEOUT;
    with_status(reply, CacheStatus::Miss)
}
