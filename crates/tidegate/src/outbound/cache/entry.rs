//! A reply that is kept: what may be kept of it, for how long it is good, and how it is told again.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::response::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use http_body::Body;
use http_cache_semantics::{BeforeRequest, CacheOptions, CachePolicy};
use tidegate_core::{Span, Time};
use tidegate_policy::outbound::CacheRules;

use super::asked::{Asked, age, has, has_it, opaque};
use super::body::CacheBody;
use super::key::Key;

/// What an entry takes besides its headers and its body: the store's own, the policy's, and the allocator's.
const OVERHEAD: usize = 1024;
/// The most variants of a page that are kept; the oldest go.
pub(super) const MAX_VARIANTS: usize = 16;
/// What a header takes besides its name and its value.
const HEADER_OVERHEAD: usize = 160;
/// The most headers that a reply may vary by; one that names more isn't kept.
const MAX_VARY: usize = 16;

/// Headers by which freshness is judged.
const JUDGED: [HeaderName; 7] = [
    header::CACHE_CONTROL,
    header::EXPIRES,
    header::PRAGMA,
    header::DATE,
    header::LAST_MODIFIED,
    header::ETAG,
    header::SET_COOKIE,
];

/// Headers that concern one connection or one caller (RFC 9111 §3.1), and the age, which is told anew.
const NOT_KEPT: [HeaderName; 10] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    HeaderName::from_static("proxy-authentication-info"),
    header::SET_COOKIE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::AGE,
];

/// Headers that belong to the body that is kept, whatever a 304 says of them (RFC 9111 §3.2).
const OF_THE_BODY: [HeaderName; 4] =
    [header::CONTENT_LENGTH, header::CONTENT_ENCODING, header::CONTENT_RANGE, header::TRANSFER_ENCODING];

/// Headers that a 304 has (RFC 9110 §15.4.5), and the age.
const OF_A_304: [HeaderName; 8] = [
    header::AGE,
    header::CACHE_CONTROL,
    header::CONTENT_LOCATION,
    header::DATE,
    header::ETAG,
    header::EXPIRES,
    header::VARY,
    header::LAST_MODIFIED,
];

/// The replies that are kept of one page, the newest first: its variants.
#[derive(Clone, Default)]
pub(super) struct Page(Arc<[Arc<Entry>]>);

impl Page {
    /// What it takes in memory, in bytes.
    pub(super) fn weight(&self) -> usize {
        self.0.iter().map(|entry| entry.weight()).sum()
    }

    pub(super) fn entries(&self) -> &[Arc<Entry>] {
        &self.0
    }

    /// The page with this reply instead of the one with that key.
    pub(super) fn with(&self, key: Key, entry: Option<Arc<Entry>>) -> Self {
        let others = self.0.iter().filter(|entry| entry.key != key).cloned();
        Self(entry.into_iter().chain(others).take(MAX_VARIANTS).collect())
    }
}

/// A reply but for its body.
pub(super) struct Head {
    status: StatusCode,
    headers: HeaderMap,
    vary: Arc<[HeaderName]>,
    policy: CachePolicy,
    stored_at: Time,
    /// How old it was when it came.
    age: Duration,
    fresh_until: Time,
    /// Until when it may stand in for one that isn't to be had.
    stale_until: Time,
    no_cache: bool,
}

impl Head {
    /// The head of this reply as it is kept; `None` if it mustn't be.
    pub(super) fn of(rules: &CacheRules, reply: &Parts, now: Time) -> Option<Self> {
        let headers = &reply.headers;
        let vary = vary(headers)?;
        if has(headers, "no-store") || rules.shared && has(headers, "private") || streams(headers) {
            return None;
        }
        let ttl = rules.ttl.filter(|_| reply.status.is_success());
        let mut judged = Response::new(());
        *judged.status_mut() = reply.status;
        *judged.headers_mut() = ttl.map_or_else(|| judged_by(headers), |ttl| lasting(headers, ttl));
        let told = if ttl.is_some() { Duration::ZERO } else { age(headers) };
        judged.headers_mut().insert(header::AGE, HeaderValue::from(told.as_secs()));
        let options = CacheOptions { shared: rules.shared, ..CacheOptions::default() };
        let policy = CachePolicy::new_options(&http::Request::new(()), &judged, system(now), options);
        if !policy.is_storable() {
            return None;
        }
        let fresh_until = now + Span::from_duration(policy.time_to_live(system(now)));
        let no_cache = has(headers, "no-cache");
        let insists = no_cache || has(headers, "must-revalidate") || rules.shared && has(headers, "proxy-revalidate");
        let stale_until = if insists { Time::ZERO } else { fresh_until + Span::from_duration(rules.stale) };
        Some(Self {
            status: reply.status,
            headers: kept(headers),
            vary,
            policy,
            stored_at: now,
            age: age(headers),
            fresh_until,
            stale_until,
            no_cache: no_cache && ttl.is_none(),
        })
    }

    /// The headers of the request that it depends on.
    pub(super) fn vary(&self) -> &Arc<[HeaderName]> {
        &self.vary
    }

    /// The whole, under the key of its variant.
    pub(super) fn with(self, key: Key, body: Bytes) -> Entry {
        Entry { head: self, key, body }
    }
}

/// A reply that is kept, or that several calls share.
pub(super) struct Entry {
    head: Head,
    key: Key,
    body: Bytes,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry")
            .field("status", &self.head.status)
            .field("bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

impl Entry {
    pub(super) fn key(&self) -> Key {
        self.key
    }

    pub(super) fn vary(&self) -> &Arc<[HeaderName]> {
        &self.head.vary
    }

    fn weight(&self) -> usize {
        // What freshness is judged by lies in the policy a second time.
        let judged = judged_by(&self.head.headers);
        let headers = self.head.headers.iter().chain(&judged);
        let headers = headers.map(|(name, value)| name.as_str().len() + value.len() + HEADER_OVERHEAD);
        OVERHEAD + headers.sum::<usize>() + self.body.len()
    }

    /// Whether it answers this request as it is.
    pub(super) fn answers(&self, asked: &Asked, now: Time) -> bool {
        matches!(self.head.policy.before_request(asked, system(now)), BeforeRequest::Fresh(_))
    }

    /// Whether calls that waited for it may have it without asking again.
    pub(super) fn is_shareable(&self) -> bool {
        !self.head.no_cache
    }

    /// Whether it may stand in while the provider is unavailable.
    pub(super) fn stands_in(&self, asked: &Asked, now: Time) -> bool {
        !asked.particular && now < self.head.stale_until
    }

    /// Whether it will be of use to anybody after those who wait for it.
    pub(super) fn is_worth_keeping(&self, now: Time) -> bool {
        let headers = &self.head.headers;
        now < self.head.fresh_until.max(self.head.stale_until)
            || headers.contains_key(header::ETAG)
            || headers.contains_key(header::LAST_MODIFIED)
    }

    /// Asks the provider whether it still holds; false if it has nothing to ask by.
    pub(super) fn ask_after(&self, request: &mut HeaderMap) -> bool {
        let validators = [(header::ETAG, header::IF_NONE_MATCH), (header::LAST_MODIFIED, header::IF_MODIFIED_SINCE)];
        let mut asks = false;
        for (validator, condition) in validators {
            if let Some(value) = self.head.headers.get(validator) {
                request.insert(condition, value.clone());
                asks = true;
            }
        }
        asks
    }

    /// The head of the reply with what a 304 brings; `None` if that names another entity tag. The body, for which alone
    /// it was asked, is confirmed then, but not for how long it is good (RFC 9111 §4.3.4).
    pub(super) fn confirmed(&self, not_modified: &HeaderMap) -> Option<Parts> {
        let tags =
            [&self.head.headers, not_modified].map(|headers| headers.get(header::ETAG).map(HeaderValue::as_bytes));
        if let [Some(own), Some(new)] = tags
            && opaque(own) != opaque(new)
        {
            return None;
        }
        let (mut parts, ()) = Response::new(()).into_parts();
        parts.status = self.head.status;
        parts.headers = self.head.headers.clone();
        for name in not_modified.keys().filter(|name| !OF_THE_BODY.contains(name) && *name != header::SET_COOKIE) {
            parts.headers.remove(name);
            for value in not_modified.get_all(name) {
                parts.headers.append(name.clone(), value.clone());
            }
        }
        Some(parts)
    }

    pub(super) fn body(&self) -> &Bytes {
        &self.body
    }

    /// The reply, as old as it is by now.
    pub(super) fn reply<B: Body>(&self, now: Time) -> Response<CacheBody<B>> {
        let mut reply = self.shared();
        let age = self.head.age.saturating_add(now.since(self.head.stored_at).as_duration());
        reply.headers_mut().insert(header::AGE, HeaderValue::from(age.as_secs()));
        reply
    }

    /// The reply as it came.
    pub(super) fn shared<B: Body>(&self) -> Response<CacheBody<B>> {
        let mut reply = Response::new(CacheBody::whole(self.body.clone()));
        *reply.status_mut() = self.head.status;
        *reply.headers_mut() = self.head.headers.clone();
        if !self.head.age.is_zero() {
            reply.headers_mut().insert(header::AGE, HeaderValue::from(self.head.age.as_secs()));
        }
        reply
    }

    /// The reply to a caller who may have it already.
    pub(super) fn reply_to<B: Body>(&self, request: &HeaderMap, now: Time) -> Response<CacheBody<B>> {
        let mut reply = self.reply(now);
        if self.head.status == StatusCode::OK && has_it(request, &self.head.headers) {
            let whole = std::mem::take(reply.headers_mut());
            *reply.status_mut() = StatusCode::NOT_MODIFIED;
            *reply.headers_mut() = only(&whole, &OF_A_304);
            *reply.body_mut() = CacheBody::whole(Bytes::new());
        }
        reply
    }
}

/// The headers that the reply depends on, in order; `None` for one that depends on more than headers, or too many.
fn vary(headers: &HeaderMap) -> Option<Arc<[HeaderName]>> {
    let mut names = Vec::new();
    for value in headers.get_all(header::VARY) {
        for name in value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|name| !name.is_empty())
        {
            names.push(HeaderName::from_bytes(name).ok().filter(|name| name.as_str() != "*")?);
        }
    }
    names.sort_unstable_by(|one, other| one.as_str().cmp(other.as_str()));
    names.dedup();
    (names.len() <= MAX_VARY).then(|| names.into())
}

/// Whether the body is made to be read as it comes, so that nobody may wait for its end.
fn streams(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    ["text/event-stream", "multipart/x-mixed-replace"]
        .iter()
        .any(|stream| kind.get(..stream.len()).is_some_and(|kind| kind.eq_ignore_ascii_case(stream.as_bytes())))
}

fn only<'n>(headers: &HeaderMap, names: impl IntoIterator<Item = &'n HeaderName>) -> HeaderMap {
    let mut found = HeaderMap::new();
    for name in names {
        for value in headers.get_all(name) {
            found.append(name.clone(), owned(value));
        }
    }
    found
}

/// The value in memory of its own: one that was read from a connection holds on to all that was read with it.
fn owned(value: &HeaderValue) -> HeaderValue {
    HeaderValue::from_bytes(value.as_bytes()).expect("invariant: these bytes are a header's value already")
}

/// The headers by which freshness is judged, as the provider sent them.
fn judged_by(headers: &HeaderMap) -> HeaderMap {
    let mut judged = only(headers, &JUDGED);
    if judged.contains_key(header::SET_COOKIE) {
        judged.insert(header::SET_COOKIE, HeaderValue::from_static("set"));
    }
    judged
}

/// The headers by which a reply is fresh for `ttl`, in whole seconds as HTTP counts, rounded up.
fn lasting(headers: &HeaderMap, ttl: Duration) -> HeaderMap {
    let secs = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0));
    let mut judged = only(headers, &[header::ETAG, header::LAST_MODIFIED]);
    let value = HeaderValue::try_from(format!("public, max-age={secs}"));
    judged.insert(header::CACHE_CONTROL, value.expect("invariant: letters and digits make a header's value"));
    judged
}

/// The headers that are told again.
fn kept(headers: &HeaderMap) -> HeaderMap {
    // What else concerns the connection alone is named there (RFC 9110 §7.6.1).
    let connection = headers.get_all(header::CONNECTION);
    let named = |name: &HeaderName| {
        let mut names = connection.iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
        names.any(|other| other.trim_ascii().eq_ignore_ascii_case(name.as_str().as_bytes()))
    };
    let mut kept = HeaderMap::new();
    for (name, value) in headers.iter().filter(|(name, _)| !NOT_KEPT.contains(name) && !named(name)) {
        let name = HeaderName::from_bytes(name.as_str().as_bytes());
        kept.append(name.expect("invariant: these letters are a header's name already"), owned(value));
    }
    kept
}

fn system(time: Time) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(time.as_micros())
}
