//! One request's way through the cache.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Extensions, HeaderMap, Request, Response, StatusCode, header};
use http_body::Body;
use moka::ops::compute::Op;
use tidegate_core::{Clock, Time};
use tidegate_policy::outbound::CacheRules;

use super::super::CallOptions;
use super::super::Why;
use super::asked::Asked;
use super::body::{Collected, collect};
use super::entry::{Entry, Head, Page};
use super::flight::{Boarded, Landing, Seat};
use super::key::Key;
use super::{CacheBody, CacheStatus, Fault, Kept, Origin, marked, not_cached};

/// How often a call waits for others whose reply turns out to be another variant than its own.
const MAX_WAITS: usize = 3;

/// A request that may be answered from the cache.
pub(super) struct Visit<'a, P, C> {
    pub kept: &'a Kept<C>,
    pub origin: &'a P,
    pub rules: CacheRules,
    pub asked: Asked,
    /// The key of what it is about and who asks, whatever the provider's own credential is.
    pub place: Key,
    /// The same with that credential: what is kept lies there.
    pub page: Key,
    /// The request's key, whatever else its reply says that it depends on.
    pub key: Key,
    pub deadline: Time,
    /// The request's headers, as its caller wrote them.
    pub headers: HeaderMap,
}

/// What is kept for a request.
pub(super) struct Found {
    /// Where its reply lies, as far as that is known before it has come.
    key: Key,
    entry: Option<Arc<Entry>>,
}

/// What came before a call.
pub(super) enum Waited<B: Body> {
    /// It isn't needed.
    Answered(Response<CacheBody<B>>),
    /// It is, and others may wait for it.
    Calls { found: Found, seat: Option<Seat> },
}

impl<P: Origin, C: Clock> Visit<'_, P, C> {
    async fn find(&self) -> Found {
        let page = self.kept.shelf.get(&self.page).await.unwrap_or_default();
        let entry = page.entries().iter().find(|entry| self.is_for(entry)).cloned();
        // What the newest depends on, the next is likely to depend on too.
        let vary = page.entries().first().map_or(&[][..], |newest| newest.vary());
        let key = || self.kept.keys.variant(self.key, vary, &self.headers);
        Found { key: entry.as_ref().map_or_else(key, |entry| entry.key()), entry }
    }

    /// Whether it is the reply to this request, and not to another variant.
    fn is_for(&self, entry: &Entry) -> bool {
        self.kept.keys.variant(self.key, entry.vary(), &self.headers) == entry.key()
    }

    fn answer<B: Body>(&self, found: &Found) -> Option<Response<CacheBody<B>>> {
        let now = self.kept.clock.now();
        let entry = found.entry.as_ref().filter(|entry| entry.answers(&self.asked, now))?;
        Some(marked(entry.reply_to(&self.headers, now), CacheStatus::Hit))
    }

    /// Looks for a reply, and waits for the call that brings it, if there is one.
    pub(super) async fn wait<B: Body>(&self, options: &CallOptions) -> Waited<B> {
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
                    self.origin.raise(seat.urgency(), options.lane);
                    match tokio::time::timeout(self.time_left(), seat.landing()).await {
                        Ok(None) => seat,
                        Ok(Some(landing)) => {
                            drop(seat);
                            if let Some(reply) = self.landed(&landing) {
                                return Waited::Answered(reply);
                            }
                            if !matches!(landing, Landing::Reply(_)) {
                                break;
                            }
                            // It was another variant's. What this one's depends on is known now.
                            found = self.find().await;
                            continue;
                        }
                        // The call itself says that it is late, as it does where nobody else is under way.
                        Err(_) => break,
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

    /// The reply that another's call brought, if it is one for this request too.
    fn landed<B: Body>(&self, landing: &Landing) -> Option<Response<CacheBody<B>>> {
        let now = self.kept.clock.now();
        let (Landing::Reply(entry) | Landing::Stale(entry)) = landing else { return None };
        if !self.is_for(entry) {
            return None;
        }
        match landing {
            Landing::Stale(_) => {
                entry.stands_in(&self.asked, now).then(|| marked(entry.reply(now), CacheStatus::Stale))
            }
            _ => Some(marked(entry.shared(), CacheStatus::Coalesced)),
        }
    }

    fn time_left(&self) -> Duration {
        self.deadline.since(self.kept.clock.now()).as_duration()
    }

    /// Makes the call, and keeps what may be kept of its reply.
    pub(super) async fn fetch<Q, B, E, R>(
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
            Ok(reply) => {
                let (parts, body) = reply.into_parts();
                match stands_in.filter(|_| is_outage(&parts)) {
                    Some(entry) => return Ok(self.stand_in(entry, seat, parts.extensions)),
                    None => (parts, body),
                }
            }
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
        mut extensions: Extensions,
    ) -> Response<CacheBody<B>> {
        extensions.remove::<Why>();
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
                self.replace(entry.key(), None).await;
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
        let Some(head) = Head::of(&self.rules, parts, now).filter(|_| !is_failed(parts)) else {
            let replaces =
                parts.status.is_success() || matches!(parts.status, StatusCode::NOT_FOUND | StatusCode::GONE);
            if replaces && !is_failed(parts) {
                self.replace(key, None).await;
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
        let key = self.kept.keys.variant(self.key, head.vary(), &self.headers);
        let entry = Arc::new(head.with(key, body));
        // A call that waited for long may have been sent with another credential than it was asked with.
        let is_own = self.kept.page(self.origin, &self.rules, self.place).await == self.page;
        if is_own && entry.is_worth_keeping(now) {
            self.replace(key, Some(Arc::clone(&entry))).await;
        }
        entry
    }

    /// Keeps a reply, or nothing, instead of the one with this key.
    async fn replace(&self, key: Key, entry: Option<Arc<Entry>>) {
        let shelf = &self.kept.shelf;
        let change = |page: Option<moka::Entry<Key, Page>>| {
            let page = page.map(moka::Entry::into_value).unwrap_or_default().with(key, entry);
            std::future::ready(if page.entries().is_empty() { Op::Remove } else { Op::Put(page) })
        };
        shelf.entry(self.page).and_compute_with(change).await;
        // The store lets go of others now and not at some later call, so that the bound holds.
        shelf.run_pending_tasks().await;
    }
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
fn is_outage(reply: &http::response::Parts) -> bool {
    reply.status.is_server_error() || reply.status == StatusCode::TOO_MANY_REQUESTS || is_failed(reply)
}

fn is_failed(reply: &http::response::Parts) -> bool {
    reply.extensions.get::<Why>().is_some()
}
