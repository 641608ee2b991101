//! A stored reply: the parts of it that may be stored, its freshness, and the responses made from it.

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

use super::body::CacheBody;
use super::key::CacheKey;
use super::request_directives::{
    RequestDirectives, age_header, has_directive, is_not_modified, list_items, opaque_tag,
};

/// The bytes that an entry takes besides its headers and its body: in the store, the policy and the allocator.
const REPLY_OVERHEAD: usize = 1024;
/// The most variants of a resource that are stored; the oldest are removed first.
pub(super) const MAX_VARIANTS: usize = 16;
/// The bytes that a header takes besides its name and its value.
const HEADER_OVERHEAD: usize = 160;
/// The most headers that a reply may vary by. A reply that names more isn't stored.
const MAX_VARY: usize = 16;

/// Headers that determine freshness.
const FRESHNESS_HEADERS: [HeaderName; 7] = [
    header::CACHE_CONTROL,
    header::EXPIRES,
    header::PRAGMA,
    header::DATE,
    header::LAST_MODIFIED,
    header::ETAG,
    header::SET_COOKIE,
];

/// Headers that concern one connection or one caller (RFC 9111 §3.1), and the age, which is computed for each response.
const UNCACHED_HEADERS: [HeaderName; 10] = [
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

/// Headers that belong to the stored body, even if a 304 has other values (RFC 9111 §3.2).
const BODY_HEADERS: [HeaderName; 4] =
    [header::CONTENT_LENGTH, header::CONTENT_ENCODING, header::CONTENT_RANGE, header::TRANSFER_ENCODING];

/// Headers that a 304 has (RFC 9110 §15.4.5), and the age.
const NOT_MODIFIED_HEADERS: [HeaderName; 8] = [
    header::AGE,
    header::CACHE_CONTROL,
    header::CONTENT_LOCATION,
    header::DATE,
    header::ETAG,
    header::EXPIRES,
    header::VARY,
    header::LAST_MODIFIED,
];

/// The stored replies of one resource, the newest first: its variants.
#[derive(Clone, Default)]
pub(super) struct CachedResource(Arc<[Arc<CachedReply>]>);

impl CachedResource {
    pub(super) fn size_bytes(&self) -> usize {
        self.0.iter().map(|reply| reply.size_bytes()).sum()
    }

    pub(super) fn replies(&self) -> &[Arc<CachedReply>] {
        &self.0
    }

    /// Returns the resource with this reply, or none, instead of the one with that key.
    pub(super) fn with_replaced(&self, key: CacheKey, reply: Option<Arc<CachedReply>>) -> Self {
        let others = self.0.iter().filter(|other| other.key != key).cloned();
        Self(reply.into_iter().chain(others).take(MAX_VARIANTS).collect())
    }
}

/// A reply without its body.
pub(super) struct CachedHead {
    status: StatusCode,
    headers: HeaderMap,
    /// The headers of the request that the reply depends on.
    pub vary: Arc<[HeaderName]>,
    policy: CachePolicy,
    stored_at: Time,
    /// The age of the reply when it arrived.
    age: Duration,
    fresh_until: Time,
    /// The time until which it may be served stale while the provider is unavailable. Zero if it never may.
    stale_until: Time,
    /// True if even calls that waited for it may not have it without revalidation.
    pub no_cache: bool,
}

impl CachedHead {
    /// Returns the head of this reply in the form that is stored; `None` if it mustn't be stored.
    pub(super) fn from_reply(rules: &CacheRules, reply: &Parts, now: Time) -> Option<Self> {
        let headers = &reply.headers;
        let vary = parse_vary(headers)?;
        if has_directive(headers, "no-store")
            || rules.shared && has_directive(headers, "private")
            || is_streaming(headers)
        {
            return None;
        }
        let ttl = rules.ttl.filter(|_| reply.status.is_success());
        let (mut selected, initial_age) = match ttl {
            Some(ttl) => (ttl_headers(headers, ttl), Duration::ZERO),
            None => (freshness_headers(headers), age_header(headers)),
        };
        selected.insert(header::AGE, HeaderValue::from(initial_age.as_secs()));
        let mut freshness_reply = Response::new(());
        *freshness_reply.status_mut() = reply.status;
        *freshness_reply.headers_mut() = selected;
        let options = CacheOptions { shared: rules.shared, ..CacheOptions::default() };
        let policy = CachePolicy::new_options(&http::Request::new(()), &freshness_reply, system_time(now), options);
        if !policy.is_storable() {
            return None;
        }
        let fresh_until = now + Span::from_duration(policy.time_to_live(system_time(now)));
        let no_cache = has_directive(headers, "no-cache");
        let must_revalidate = no_cache
            || has_directive(headers, "must-revalidate")
            || rules.shared && has_directive(headers, "proxy-revalidate");
        let stale_until = if must_revalidate { Time::ZERO } else { fresh_until + Span::from_duration(rules.stale) };
        Some(Self {
            status: reply.status,
            headers: cacheable_headers(headers),
            vary,
            policy,
            stored_at: now,
            age: age_header(headers),
            fresh_until,
            stale_until,
            no_cache: no_cache && ttl.is_none(),
        })
    }
}

/// A reply that is stored, or that several calls share.
pub(super) struct CachedReply {
    pub head: CachedHead,
    /// The key of its variant.
    pub key: CacheKey,
    pub body: Bytes,
}

impl fmt::Debug for CachedReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedReply")
            .field("status", &self.head.status)
            .field("bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

impl CachedReply {
    fn size_bytes(&self) -> usize {
        // The policy holds a second copy of the headers that determine freshness.
        let selected = freshness_headers(&self.head.headers);
        let headers = self.head.headers.iter().chain(&selected);
        let headers = headers.map(|(name, value)| name.as_str().len() + value.len() + HEADER_OVERHEAD);
        REPLY_OVERHEAD + headers.sum::<usize>() + self.body.len()
    }

    /// Returns true if it answers this request without revalidation.
    pub(super) fn is_fresh_for(&self, directives: &RequestDirectives, now: Time) -> bool {
        matches!(self.head.policy.before_request(directives, system_time(now)), BeforeRequest::Fresh(_))
    }

    /// Returns true if it may be served while the provider is unavailable.
    pub(super) fn can_serve_stale(&self, directives: &RequestDirectives, now: Time) -> bool {
        !directives.limits_age && now < self.head.stale_until
    }

    /// Returns true if it can be of use to later calls, not just to those that wait for it.
    pub(super) fn is_worth_keeping(&self, now: Time) -> bool {
        let headers = &self.head.headers;
        now < self.head.fresh_until.max(self.head.stale_until)
            || headers.contains_key(header::ETAG)
            || headers.contains_key(header::LAST_MODIFIED)
    }

    /// Makes the request conditional on this reply. Returns false if the reply has no validator.
    pub(super) fn add_validators(&self, request: &mut HeaderMap) -> bool {
        let validators = [(header::ETAG, header::IF_NONE_MATCH), (header::LAST_MODIFIED, header::IF_MODIFIED_SINCE)];
        let mut has_validator = false;
        for (validator, condition) in validators {
            if let Some(value) = self.head.headers.get(validator) {
                request.insert(condition, value.clone());
                has_validator = true;
            }
        }
        has_validator
    }

    /// Returns the head of the reply, updated by a 304. `None` if the 304 names another entity tag: it then confirms
    /// the body, but doesn't extend its freshness (RFC 9111 §4.3.4).
    pub(super) fn revalidated_head(&self, not_modified: &HeaderMap) -> Option<Parts> {
        let tags =
            [&self.head.headers, not_modified].map(|headers| headers.get(header::ETAG).map(HeaderValue::as_bytes));
        if let [Some(own), Some(new)] = tags
            && opaque_tag(own) != opaque_tag(new)
        {
            return None;
        }
        let (mut parts, ()) = Response::new(()).into_parts();
        parts.status = self.head.status;
        parts.headers = self.head.headers.clone();
        for name in not_modified.keys().filter(|name| !BODY_HEADERS.contains(name) && *name != header::SET_COOKIE) {
            parts.headers.remove(name);
            for value in not_modified.get_all(name) {
                parts.headers.append(name.clone(), value.clone());
            }
        }
        Some(parts)
    }

    /// Returns the reply with its present age.
    pub(super) fn aged_response<B: Body>(&self, now: Time) -> Response<CacheBody<B>> {
        let mut reply = self.original_response();
        let age = self.head.age.saturating_add(now.since(self.head.stored_at).as_duration());
        reply.headers_mut().insert(header::AGE, HeaderValue::from(age.as_secs()));
        reply
    }

    /// Returns the reply with the age that it arrived with.
    pub(super) fn original_response<B: Body>(&self) -> Response<CacheBody<B>> {
        let mut reply = Response::new(CacheBody::from_bytes(self.body.clone()));
        *reply.status_mut() = self.head.status;
        *reply.headers_mut() = self.head.headers.clone();
        if !self.head.age.is_zero() {
            reply.headers_mut().insert(header::AGE, HeaderValue::from(self.head.age.as_secs()));
        }
        reply
    }

    /// Returns the reply to a caller that may already have it: a 304 if its condition says so.
    pub(super) fn conditional_response<B: Body>(&self, request: &HeaderMap, now: Time) -> Response<CacheBody<B>> {
        let mut reply = self.aged_response(now);
        if self.head.status == StatusCode::OK && is_not_modified(request, &self.head.headers) {
            *reply.status_mut() = StatusCode::NOT_MODIFIED;
            *reply.headers_mut() = select_headers(reply.headers(), &NOT_MODIFIED_HEADERS);
            *reply.body_mut() = CacheBody::default();
        }
        reply
    }
}

/// Returns the headers that the reply depends on, in order. `None` if it depends on more than headers, or on too many.
fn parse_vary(headers: &HeaderMap) -> Option<Arc<[HeaderName]>> {
    let items = list_items(headers, header::VARY).filter(|name| !name.is_empty());
    let parse_name = |name| HeaderName::from_bytes(name).ok().filter(|name| name.as_str() != "*");
    let mut names = items.map(parse_name).collect::<Option<Vec<_>>>()?;
    names.sort_unstable_by(|one, other| one.as_str().cmp(other.as_str()));
    names.dedup();
    (names.len() <= MAX_VARY).then(|| names.into())
}

/// Returns true if the body is meant to be read as it arrives, so that no call may wait for its end.
fn is_streaming(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    ["text/event-stream", "multipart/x-mixed-replace"]
        .iter()
        .any(|stream| kind.get(..stream.len()).is_some_and(|kind| kind.eq_ignore_ascii_case(stream.as_bytes())))
}

fn select_headers<'n>(headers: &HeaderMap, names: impl IntoIterator<Item = &'n HeaderName>) -> HeaderMap {
    let mut found = HeaderMap::new();
    for name in names {
        for value in headers.get_all(name) {
            found.append(name.clone(), copy_value(value));
        }
    }
    found
}

/// Copies the value into memory of its own. A value from a connection keeps the whole buffer that it was read into.
fn copy_value(value: &HeaderValue) -> HeaderValue {
    HeaderValue::from_bytes(value.as_bytes()).expect("invariant: these bytes are a header's value already")
}

/// Returns the headers that determine freshness, as the provider sent them.
fn freshness_headers(headers: &HeaderMap) -> HeaderMap {
    let mut selected = select_headers(headers, &FRESHNESS_HEADERS);
    if selected.contains_key(header::SET_COOKIE) {
        selected.insert(header::SET_COOKIE, HeaderValue::from_static("set"));
    }
    selected
}

/// Returns headers that make a reply fresh for `ttl`, in whole seconds as HTTP counts, rounded up.
fn ttl_headers(headers: &HeaderMap, ttl: Duration) -> HeaderMap {
    let secs = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0));
    let mut selected = select_headers(headers, &[header::ETAG, header::LAST_MODIFIED]);
    let value = HeaderValue::try_from(format!("public, max-age={secs}"));
    selected.insert(header::CACHE_CONTROL, value.expect("invariant: letters and digits make a header's value"));
    selected
}

fn cacheable_headers(headers: &HeaderMap) -> HeaderMap {
    // `Connection` names other headers that concern the connection alone (RFC 9110 §7.6.1).
    let is_named = |name: &HeaderName| {
        list_items(headers, header::CONNECTION).any(|other| other.eq_ignore_ascii_case(name.as_str().as_bytes()))
    };
    let mut kept = HeaderMap::new();
    for (name, value) in headers.iter().filter(|(name, _)| !UNCACHED_HEADERS.contains(name) && !is_named(name)) {
        let name = HeaderName::from_bytes(name.as_str().as_bytes());
        kept.append(name.expect("invariant: these letters are a header's name already"), copy_value(value));
    }
    kept
}

fn system_time(time: Time) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(time.as_micros())
}
