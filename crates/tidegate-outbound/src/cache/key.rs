//! What tells one kept reply from another.

use std::fmt;
use std::hash::Hasher;

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use siphasher::sip128::{Hasher128, SipHasher13};
use tidegate_policy::Secret;
use tidegate_runtime::random::random_u64;

use super::Origin;

/// Headers that say nothing of which reply is wanted, or whose: of the connection, of caches, and what tells calls and
/// programs apart. A reply depends on one of them only if it says so itself, by `Vary`. All others count, as a
/// provider whose replies aren't meant to be kept needn't say what they depend on: one too many here shows a reply to
/// who asked for another, one too few costs a call.
const NEUTRAL_HEADERS: [&str; 26] = [
    "b3",
    "baggage",
    "cache-control",
    "connection",
    "content-length",
    "correlation-id",
    "date",
    "host",
    "idempotency-key",
    "if-modified-since",
    "if-none-match",
    "keep-alive",
    "pragma",
    "priority",
    "proxy-connection",
    "request-id",
    "sentry-trace",
    "te",
    "traceparent",
    "tracestate",
    "trailer",
    "transfer-encoding",
    "user-agent",
    "x-amzn-trace-id",
    "x-correlation-id",
    "x-request-id",
];
/// What the names of other such headers begin with.
const NEUTRAL_PREFIXES: [&str; 4] = ["tidegate-", "x-b3-", "x-datadog-", "x-stainless-"];
/// What the names of headers begin with by which a caller chooses among the representations of one thing. A change to the
/// thing concerns all of them, and a request that changes it has others of these than one that reads it.
const NEGOTIATION_PREFIXES: [&str; 3] = ["accept", "content-", "sec-"];

fn is_neutral(name: &HeaderName, headers: &HeaderMap) -> bool {
    NEUTRAL_HEADERS.contains(&name.as_str())
        || has_prefix(name, &NEUTRAL_PREFIXES)
        // As good as none (RFC 9110 §12.5.1).
        || *name == header::ACCEPT && headers.get_all(name).iter().all(|value| value == "*/*")
}

fn has_prefix(name: &HeaderName, families: &[&str]) -> bool {
    families.iter().any(|family| name.as_str().starts_with(family))
}

/// A fingerprint of all that makes a request another one: 128 bits under a secret of this process, so that nobody can
/// choose two that collide, and what a URL or a header holds is nowhere kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct CacheKey(u128);

impl fmt::Debug for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

/// Makes keys.
pub(super) struct CacheKeyFactory(SipHasher13);

impl CacheKeyFactory {
    pub(super) fn new() -> Self {
        Self(SipHasher13::new_with_keys(random_u64(), random_u64()))
    }

    /// The key of what a request is about and who asks: its provider, its URL, and its headers but for those that are
    /// neutral, that choose a representation, or that the provider's own credential replaces.
    pub(super) fn base_key(&self, origin: &impl Origin, request: &Parts) -> CacheKey {
        let mut hasher = CacheKeyHasher(self.0);
        hasher.write_part(origin.name().as_bytes());
        let uri = &request.uri;
        hasher.write_part(uri.scheme_str().unwrap_or_default().as_bytes());
        hasher.write_part(uri.authority().map_or("", |authority| authority.as_str()).as_bytes());
        hasher.write_part(uri.path_and_query().map_or("/", |path| path.as_str()).as_bytes());
        let injected_header = origin.injected_header();
        hasher.write_matching_headers(&request.headers, |name| {
            injected_header.as_ref() != Some(name) && !has_prefix(name, &NEGOTIATION_PREFIXES)
        });
        hasher.finish()
    }

    /// The key of a place for calls that show this credential.
    pub(super) fn resource_key(&self, base_key: CacheKey, secret: Option<&Secret>) -> CacheKey {
        let Some(secret) = secret else { return base_key };
        let mut hasher = CacheKeyHasher(self.0);
        hasher.write_part(&base_key.0.to_le_bytes());
        hasher.write_part(secret.expose().as_bytes());
        hasher.finish()
    }

    /// The key of a request as far as the request itself says: its page, its method, and which representation it wants.
    pub(super) fn request_key(&self, resource_key: CacheKey, request: &Parts) -> CacheKey {
        let mut hasher = CacheKeyHasher(self.0);
        hasher.write_part(&resource_key.0.to_le_bytes());
        hasher.write_part(request.method.as_str().as_bytes());
        hasher.write_matching_headers(&request.headers, |name| has_prefix(name, &NEGOTIATION_PREFIXES));
        hasher.finish()
    }

    /// The key of that variant of a request's reply that depends on these headers.
    pub(super) fn variant_key(&self, request: CacheKey, vary: &[HeaderName], headers: &HeaderMap) -> CacheKey {
        if vary.is_empty() {
            return request;
        }
        let mut hasher = CacheKeyHasher(self.0);
        hasher.write_part(&request.0.to_le_bytes());
        hasher.write_headers(headers, vary);
        hasher.finish()
    }
}

struct CacheKeyHasher(SipHasher13);

impl CacheKeyHasher {
    /// With its length before it, so that two parts can't be divided in another way.
    fn write_part(&mut self, bytes: &[u8]) {
        self.0.write_u64(bytes.len() as u64);
        self.0.write(bytes);
    }

    /// The values of these headers, as many as there are.
    fn write_headers<'n>(&mut self, headers: &HeaderMap, names: impl IntoIterator<Item = &'n HeaderName>) {
        for name in names {
            self.write_part(name.as_str().as_bytes());
            let values = headers.get_all(name);
            self.0.write_u64(values.iter().count() as u64);
            values.iter().map(HeaderValue::as_bytes).for_each(|value| self.write_part(value));
        }
    }

    /// The values of those headers that aren't neutral and are of this kind, whatever their order.
    fn write_matching_headers(&mut self, headers: &HeaderMap, is_included: impl Fn(&HeaderName) -> bool) {
        let mut names: Vec<_> = headers.keys().filter(|name| is_included(name) && !is_neutral(name, headers)).collect();
        names.sort_unstable_by_key(|name| name.as_str());
        self.write_headers(headers, names);
    }

    fn finish(&self) -> CacheKey {
        CacheKey(self.0.finish128().as_u128())
    }
}
