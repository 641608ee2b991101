//! Replies that are kept, so that the same is not asked twice.
//!
//! One [`Cache`] holds the replies of all providers within a fixed number of bytes. [`Cache::call`] stands before
//! whatever makes a call: it answers from what is kept, lets identical calls wait for the one that is under way, asks
//! the provider whether an old reply still holds, and lets an old reply stand in while the provider is unavailable.
//! HTTP's rules (RFC 9111) are [`http_cache_semantics`]'; a provider's [`CacheRules`] say what is done beyond them.
//!
//! # Who may share a reply
//!
//! What a provider answers depends on who asks, so a reply is only ever told again to a call that would have been sent
//! as the same asker:
//!
//! * A provider with one credential, or none, is asked as one user, whoever calls here. The cache is *private* in the
//!   words of RFC 9111: it keeps what is marked `private`, and `s-maxage` doesn't concern it.
//! * With several credentials, which one a call gets is known only when it is sent, after its turn and its place in the
//!   limits have been spent. Until then a kept reply can't be known to be its own. So nothing is kept, and no call
//!   waits for another's, unless the rules say `shared`.
//! * With `shared`, replies don't depend on the credential. The cache is a *shared* one then: it keeps nothing that is
//!   `private`, and `s-maxage` goes before `max-age`.
//! * Credentials that callers bring themselves, in `Authorization`, `Cookie` and the usual headers of API keys, are
//!   part of the key, `shared` or not, unless the provider's own takes their place. So is the whole URL. All of it is in
//!   the key as a keyed hash alone.
//! * `Set-Cookie` goes to the caller whose call brought it, and to nobody else.
//!
//! # What is kept
//!
//! Replies to GET and HEAD without a body, each method for itself. A request with `Range`, `If-Range`, `If-Match`,
//! `If-Unmodified-Since`, `Upgrade` or `no-store` goes by. A successful reply to an unsafe method removes what is kept
//! for its URL (RFC 9111 §4.4).
//!
//! `ttl` overrides `Cache-Control`, `Expires` and `Pragma` of replies with a status of 2xx, in whole seconds, rounded
//! up, counted from when the reply came. It does not override `no-store`, `Vary`, or what the request asks for. Once
//! the time is over, `must-revalidate` and `no-cache` count again: such a reply doesn't stand in.
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

mod asked;
mod body;
mod entry;
mod flight;
mod key;
mod origin;
#[cfg(test)]
mod tests;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Extensions, HeaderMap, Method, Request, Response, StatusCode, header};
use http_body::Body;
use moka::future::Cache as Shelf;
use tidegate_core::{Clock, Span, Time};
use tidegate_policy::outbound::CacheRules;

use self::asked::Asked;
pub use self::body::CacheBody;
use self::body::{Collected, Room, collect};
use self::entry::{Entry, Head, Stored};
use self::flight::{Boarded, Flights, Landing, Seat};
use self::key::{Key, Keys};
pub use self::origin::{Fault, Origin};
use super::{CallOptions, Outbound};
use crate::SystemClock;

/// How often a call waits for others whose reply turns out to be another variant than its own.
const MAX_WAITS: usize = 3;

/// The kept replies of all providers. Cheap to clone; clones are the same.
pub struct Cache<C = SystemClock>(Arc<Kept<C>>);

struct Kept<C> {
    shelf: Shelf<Key, Stored>,
    keys: Keys,
    flights: Arc<Flights>,
    /// What bodies take while they are read: as much again as the replies that are kept.
    room: Arc<Room>,
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
        let shelf = &self.0.shelf;
        f.debug_struct("Cache").field("replies", &shelf.entry_count()).field("bytes", &shelf.weighted_size()).finish()
    }
}

impl<C: Clock + Clone> Cache<C> {
    /// A cache for these providers, of the size that their policy says.
    pub fn of<S: tidegate_store::Store>(outbound: &Outbound<S, C>) -> Self {
        Self::new(outbound.plan().cache_bytes, outbound.0.clock.clone())
    }
}

impl<C: Clock> Cache<C> {
    /// A cache whose replies take at most `max_bytes`, their keys, headers and the store's own needs included. Those
    /// that are asked for least go first.
    ///
    /// Bodies that are just being read may take as many bytes again. Beyond that they are passed on unread.
    pub fn new(max_bytes: u64, clock: C) -> Self {
        let weigher = |_: &Key, stored: &Stored| u32::try_from(stored.weight()).unwrap_or(u32::MAX);
        Self(Arc::new(Kept {
            shelf: Shelf::builder().max_capacity(max_bytes).weigher(weigher).build(),
            keys: Keys::new(),
            flights: Arc::default(),
            room: Room::new(max_bytes),
            clock,
        }))
    }

    /// How many bytes the kept replies take.
    pub fn bytes(&self) -> u64 {
        self.0.shelf.weighted_size()
    }

    /// Answers a request to `origin`, by `send` where it takes a call. The [`CacheStatus`] is among the response's
    /// extensions; those of the reply by which an answer was confirmed, or found to be needed, are kept.
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
        E: Fault,
        F: FnOnce(CallOptions, Request<Q>) -> R,
        R: Future<Output = Result<Response<B>, E>>,
    {
        let kept = &*self.0;
        let (parts, body) = request.into_parts();
        let Some((rules, asked)) = origin.rules().copied().zip(Asked::read(&parts, &body)) else {
            return kept.go_by(origin, options, Request::from_parts(parts, body), send).await;
        };
        if !rules.shared && origin.credentials() > 1 {
            if asked.only_if_cached {
                return Ok(not_cached());
            }
            return kept.go_by(origin, options, Request::from_parts(parts, body), send).await;
        }
        let timeout = options.timeout.unwrap_or_else(|| origin.timeout(options.lane));
        let key = kept.keys.request(origin, &parts.method, &parts);
        let deadline = kept.clock.now() + Span::from_duration(timeout);
        let mut visit = Visit { kept, rules, asked, key, deadline, headers: parts.headers.clone() };
        match visit.wait(origin, &options).await {
            Waited::Answered(reply) => Ok(reply),
            Waited::Calls { found, seat } => visit.fetch(found, seat, options, (parts, body), send).await,
        }
    }
}

impl<C: Clock> Kept<C> {
    /// Makes a call that caches have no part in, but for what it changes.
    async fn go_by<P: Origin, Q, B: Body, E, R: Future<Output = Result<Response<B>, E>>>(
        &self,
        origin: &P,
        options: CallOptions,
        request: Request<Q>,
        send: impl FnOnce(CallOptions, Request<Q>) -> R,
    ) -> Result<Response<CacheBody<B>>, E> {
        let (parts, body) = request.into_parts();
        let changes = !parts.method.is_safe() && origin.rules().is_some();
        let changed =
            changes.then(|| [Method::GET, Method::HEAD].map(|method| self.keys.request(origin, &method, &parts)));
        let reply = send(options, Request::from_parts(parts, body)).await?;
        if reply.status().is_success() || reply.status().is_redirection() {
            for key in changed.iter().flatten() {
                self.shelf.invalidate(key).await;
            }
        }
        Ok(marked(reply.map(CacheBody::passed), CacheStatus::Bypass))
    }
}

/// A request that may be answered from the cache.
struct Visit<'a, C> {
    kept: &'a Kept<C>,
    rules: CacheRules,
    asked: Asked,
    /// The request's key, whatever its reply depends on.
    key: Key,
    deadline: Time,
    /// The request's headers, as its caller wrote them.
    headers: HeaderMap,
}

/// What is kept for a request.
struct Found {
    /// Where its reply lies, as far as that is known before it has come.
    key: Key,
    entry: Option<Arc<Entry>>,
}

/// What came before a call.
enum Waited<B: Body> {
    /// It isn't needed.
    Answered(Response<CacheBody<B>>),
    /// It is, and others may wait for it.
    Calls { found: Found, seat: Option<Seat> },
}

impl<C: Clock> Visit<'_, C> {
    async fn find(&self) -> Found {
        let (shelf, keys) = (&self.kept.shelf, &self.kept.keys);
        let mut key = self.key;
        let mut stored = shelf.get(&key).await;
        if let Some(Stored::Varies(names)) = &stored {
            key = keys.variant(key, names, &self.headers);
            stored = shelf.get(&key).await;
        }
        let entry = match stored {
            Some(Stored::Reply(entry)) => Some(entry),
            Some(Stored::Varies(_)) | None => None,
        };
        Found { key, entry }
    }

    fn answer<B: Body>(&self, found: &Found) -> Option<Response<CacheBody<B>>> {
        let now = self.kept.clock.now();
        let entry = found.entry.as_ref().filter(|entry| entry.answers(&self.asked, now))?;
        Some(marked(entry.reply_to(&self.headers, now), CacheStatus::Hit))
    }

    /// Looks for a reply, and waits for the call that brings it, if there is one.
    async fn wait<B: Body>(&mut self, origin: &impl Origin, options: &CallOptions) -> Waited<B> {
        let mut found = self.find().await;
        for _ in 0..MAX_WAITS {
            if let Some(reply) = self.answer(&found) {
                return Waited::Answered(reply);
            }
            if self.asked.only_if_cached {
                return Waited::Answered(not_cached());
            }
            if self.asked.anew || self.asked.conditional {
                break;
            }
            let seat = match self.kept.flights.board(found.key, options.urgency.as_ref()) {
                Boarded::Full => break,
                Boarded::Leads(seat) => seat,
                Boarded::Waits(mut seat) => {
                    origin.raise(seat.urgency(), options.lane);
                    match tokio::time::timeout(self.time_left(), seat.landing()).await {
                        Ok(None) => seat,
                        Ok(Some(landing)) => {
                            drop(seat);
                            match self.landed(landing) {
                                Landed::Answers(reply) => return Waited::Answered(reply),
                                Landed::Another => {
                                    found = self.find().await;
                                    continue;
                                }
                                Landed::Nothing => break,
                            }
                        }
                        Err(_) => {
                            // The call itself says so, as it does where nobody else is under way.
                            self.deadline = Time::ZERO;
                            break;
                        }
                    }
                }
            };
            // Another call may have stored it between the look and the lead.
            found = self.find().await;
            return match self.answer(&found) {
                Some(reply) => Waited::Answered(reply),
                None => Waited::Calls { found, seat: Some(seat) },
            };
        }
        Waited::Calls { found, seat: None }
    }

    fn landed<B: Body>(&self, landing: Landing) -> Landed<B> {
        let now = self.kept.clock.now();
        let own = |entry: &Entry| self.kept.keys.variant(self.key, entry.vary(), &self.headers) == entry.key();
        match landing {
            Landing::Reply(entry) if own(&entry) => Landed::Answers(marked(entry.shared(), CacheStatus::Coalesced)),
            Landing::Reply(_) => Landed::Another,
            Landing::Stale(entry) if own(&entry) && entry.stands_in(&self.asked, now) => {
                Landed::Answers(marked(entry.reply(now), CacheStatus::Stale))
            }
            Landing::Stale(_) | Landing::Nothing => Landed::Nothing,
        }
    }

    fn time_left(&self) -> Duration {
        self.deadline.since(self.kept.clock.now()).as_duration()
    }

    /// Makes the call, and keeps what may be kept of its reply.
    async fn fetch<Q, B, E, R>(
        self,
        found: Found,
        seat: Option<Seat>,
        mut options: CallOptions,
        (mut request, body): (Parts, Q),
        send: impl FnOnce(CallOptions, Request<Q>) -> R,
    ) -> Result<Response<CacheBody<B>>, E>
    where
        B: Body<Data = Bytes>,
        E: Fault,
        R: Future<Output = Result<Response<B>, E>>,
    {
        let old = found.entry;
        // A caller who has a reply of its own is told of that one.
        let asked_after =
            old.as_ref().filter(|entry| !self.asked.conditional && entry.ask_after(&mut request.headers)).cloned();
        options.timeout = Some(self.time_left());
        if let Some(seat) = &seat {
            options.urgency = Some(seat.urgency().clone());
        }
        let outcome = send(options, Request::from_parts(request, body)).await;
        let now = self.kept.clock.now();
        let stands_in = old.filter(|entry| entry.stands_in(&self.asked, now));
        let (mut parts, body) = match outcome {
            Ok(reply) if !is_outage(reply.status()) => reply.into_parts(),
            Ok(reply) => match stands_in {
                Some(entry) => {
                    return Ok(self.stand_in(entry, seat, std::mem::take(&mut reply.into_parts().0.extensions)));
                }
                None => reply.into_parts(),
            },
            Err(error) => {
                if let Some(entry) = stands_in.filter(|_| error.is_outage()) {
                    return Ok(self.stand_in(entry, seat, Extensions::new()));
                }
                if !error.is_own() {
                    land(seat, Landing::Nothing);
                }
                return Err(error);
            }
        };
        if let Some(entry) = asked_after.filter(|_| parts.status == StatusCode::NOT_MODIFIED) {
            drop(body);
            let extensions = std::mem::take(&mut parts.extensions);
            let mut reply = self.confirm(entry, &parts.headers, seat, now).await;
            *reply.extensions_mut() = extensions;
            for cookie in parts.headers.get_all(header::SET_COOKIE) {
                reply.headers_mut().append(header::SET_COOKIE, cookie.clone());
            }
            return Ok(marked(reply, CacheStatus::Hit));
        }
        let body = self.keep_fetched(found.key, &parts, body, seat, now).await;
        Ok(marked(Response::from_parts(parts, body), CacheStatus::Miss))
    }

    fn stand_in<B: Body>(
        &self,
        entry: Arc<Entry>,
        seat: Option<Seat>,
        extensions: Extensions,
    ) -> Response<CacheBody<B>> {
        let mut reply = entry.reply(self.kept.clock.now());
        *reply.extensions_mut() = extensions;
        land(seat, Landing::Stale(entry));
        marked(reply, CacheStatus::Stale)
    }

    /// The provider says that the reply still holds.
    async fn confirm<B: Body>(
        &self,
        entry: Arc<Entry>,
        not_modified: &HeaderMap,
        seat: Option<Seat>,
        now: Time,
    ) -> Response<CacheBody<B>> {
        let Some(parts) = entry.confirmed(not_modified) else {
            let reply = entry.reply(now);
            land(seat, share(entry));
            return reply;
        };
        match Head::of(&self.rules, &parts, now) {
            Some(head) => {
                let fresh = self.keep(head, entry.body().clone(), now).await;
                let reply = fresh.reply(now);
                land(seat, share(fresh));
                reply
            }
            None => {
                self.kept.shelf.invalidate(&entry.key()).await;
                land(seat, Landing::Nothing);
                Response::from_parts(parts, CacheBody::whole(entry.body().clone()))
            }
        }
    }

    /// Keeps a reply, if it may be; its body, whether or not.
    async fn keep_fetched<B: Body<Data = Bytes>>(
        &self,
        key: Key,
        parts: &http::response::Parts,
        body: B,
        seat: Option<Seat>,
        now: Time,
    ) -> CacheBody<B> {
        let Some(head) = Head::of(&self.rules, parts, now) else {
            if parts.status.is_success() || matches!(parts.status, StatusCode::NOT_FOUND | StatusCode::GONE) {
                self.kept.shelf.invalidate(&key).await;
            }
            land(seat, Landing::Nothing);
            return CacheBody::passed(body);
        };
        // The reply to a HEAD has the length of a body that it doesn't have.
        let length = parts.headers.get(header::CONTENT_LENGTH).filter(|_| !self.asked.head);
        let promised = length.and_then(|length| length.to_str().ok()?.parse().ok());
        match collect(body, self.rules.max_body, self.time_left(), &self.kept.room).await {
            Collected::Part(body) => {
                land(seat, Landing::Nothing);
                body
            }
            Collected::Whole(bytes) if promised.is_some_and(|length: u64| bytes.len() as u64 != length) => {
                land(seat, Landing::Nothing);
                CacheBody::whole(bytes)
            }
            Collected::Whole(bytes) => {
                land(seat, share(self.keep(head, bytes.clone(), now).await));
                CacheBody::whole(bytes)
            }
        }
    }

    async fn keep(&self, head: Head, body: Bytes, now: Time) -> Arc<Entry> {
        let shelf = &self.kept.shelf;
        let vary = Arc::clone(head.vary());
        let key = self.kept.keys.variant(self.key, &vary, &self.headers);
        let entry = Arc::new(head.with(key, body));
        if entry.is_worth_keeping(now) {
            shelf.insert(key, Stored::Reply(Arc::clone(&entry))).await;
            if !vary.is_empty() {
                shelf.insert(self.key, Stored::Varies(vary)).await;
            }
            // The store lets go of others now and not at some later call, so that the bound holds.
            shelf.run_pending_tasks().await;
        }
        entry
    }
}

/// What another's call brought.
enum Landed<B: Body> {
    Answers(Response<CacheBody<B>>),
    /// A reply that isn't this call's, as it varies.
    Another,
    Nothing,
}

/// The reply as those who wait may have it.
fn share(entry: Arc<Entry>) -> Landing {
    if entry.is_shareable() { Landing::Reply(entry) } else { Landing::Nothing }
}

fn land(seat: Option<Seat>, landing: Landing) {
    if let Some(seat) = seat {
        seat.lands(landing);
    }
}

/// Whether a reply says that the provider is unavailable.
fn is_outage(status: StatusCode) -> bool {
    status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS
}

fn marked<B>(mut reply: Response<B>, status: CacheStatus) -> Response<B> {
    reply.extensions_mut().insert(status);
    reply
}

/// The answer to who wants no call where one is needed (RFC 9111 §5.2.1.7).
fn not_cached<B: Body>() -> Response<CacheBody<B>> {
    let mut reply = Response::new(CacheBody::default());
    *reply.status_mut() = StatusCode::GATEWAY_TIMEOUT;
    marked(reply, CacheStatus::Miss)
}
