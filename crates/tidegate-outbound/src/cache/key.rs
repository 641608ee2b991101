//! The keys of stored replies.

use std::fmt;
use std::hash::Hasher;

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use siphasher::sip128::{Hasher128, SipHasher13};
use tidegate_policy::Secret;
use tidegate_runtime::random::random_u64;

use super::super::target::param_has_name;
use super::Origin;

/// Headers that affect neither the choice of the reply nor its caller: those of the connection and of caches, and those
/// that identify calls and programs. A reply depends on one of them only if it says so by `Vary`. All others are part
/// of the key, because a provider that doesn't expect its replies to be stored needn't say what they depend on. One
/// header too many here gives a reply to a caller that asked for another one. One too few costs a call.
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
/// Prefixes of the names of other such headers.
const NEUTRAL_PREFIXES: [&str; 4] = ["tidegate-", "x-b3-", "x-datadog-", "x-stainless-"];
/// Prefixes of the names of headers by which a caller chooses among the representations of one resource. A change to
/// the resource concerns all of them, and the request that changes it has other values of these headers than one that
/// reads it.
const NEGOTIATION_PREFIXES: [&str; 3] = ["accept", "content-", "sec-"];

fn is_neutral(name: &HeaderName, headers: &HeaderMap) -> bool {
    NEUTRAL_HEADERS.contains(&name.as_str())
        || has_prefix(name, &NEUTRAL_PREFIXES)
        // `*/*` means the same as no `Accept` (RFC 9110 §12.5.1).
        || *name == header::ACCEPT && headers.get_all(name).iter().all(|value| value == "*/*")
}

fn has_prefix(name: &HeaderName, families: &[&str]) -> bool {
    families.iter().any(|family| name.as_str().starts_with(family))
}

/// A fingerprint of everything that distinguishes requests: 128 bits, keyed with a secret of this process. So no caller
/// can choose two requests that collide, and the contents of URLs and headers are stored nowhere.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct CacheKey(u128);

impl fmt::Debug for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CacheKey(…)")
    }
}

pub(super) struct CacheKeyFactory(SipHasher13);

impl CacheKeyFactory {
    pub(super) fn new() -> Self {
        Self(SipHasher13::new_with_keys(random_u64(), random_u64()))
    }

    /// Returns the key of the resource and the caller of a request: its provider, its URL, and its headers. Left out
    /// are headers that are neutral or choose a representation, and the header or the parameter of the URL that the
    /// provider's own credential replaces.
    pub(super) fn base_key(&self, origin: &impl Origin, request: &Parts) -> CacheKey {
        let mut hasher = CacheKeyHasher(self.0);
        hasher.write_part(origin.name().as_bytes());
        let uri = &request.uri;
        hasher.write_part(uri.scheme_str().unwrap_or_default().as_bytes());
        hasher.write_part(uri.authority().map_or("", |authority| authority.as_str()).as_bytes());
        match origin.injected_parameter() {
            Some(name) => {
                let pairs = uri.query().unwrap_or_default().split('&').filter(|pair| !param_has_name(pair, name));
                hasher.write_part(uri.path().as_bytes());
                hasher.write_part(pairs.collect::<Vec<_>>().join("&").as_bytes());
            }
            None => hasher.write_part(uri.path_and_query().map_or("/", |path| path.as_str()).as_bytes()),
        }
        let injected_header = origin.injected_header();
        hasher.write_matching_headers(&request.headers, |name| {
            injected_header.as_ref() != Some(name) && !has_prefix(name, &NEGOTIATION_PREFIXES)
        });
        hasher.finish()
    }

    /// Returns the key of a resource for calls with this credential.
    pub(super) fn resource_key(&self, base_key: CacheKey, secret: Option<&Secret>) -> CacheKey {
        let Some(secret) = secret else { return base_key };
        let mut hasher = CacheKeyHasher(self.0);
        hasher.write_part(&base_key.0.to_le_bytes());
        hasher.write_part(secret.expose().as_bytes());
        hasher.finish()
    }

    /// Returns the key of a request as far as the request itself defines it: its resource, its method, and the
    /// representation that it asks for.
    pub(super) fn request_key(&self, resource_key: CacheKey, request: &Parts) -> CacheKey {
        let mut hasher = CacheKeyHasher(self.0);
        hasher.write_part(&resource_key.0.to_le_bytes());
        hasher.write_part(request.method.as_str().as_bytes());
        hasher.write_matching_headers(&request.headers, |name| has_prefix(name, &NEGOTIATION_PREFIXES));
        hasher.finish()
    }

    /// Returns the key of the variant of a request's reply that depends on these headers.
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
    /// Writes a part after its length, so that no two sequences of parts look the same.
    fn write_part(&mut self, bytes: &[u8]) {
        self.0.write_u64(bytes.len() as u64);
        self.0.write(bytes);
    }

    /// Writes all values of these headers.
    fn write_headers<'n>(&mut self, headers: &HeaderMap, names: impl IntoIterator<Item = &'n HeaderName>) {
        for name in names {
            self.write_part(name.as_str().as_bytes());
            let values = headers.get_all(name);
            self.0.write_u64(values.iter().count() as u64);
            values.iter().map(HeaderValue::as_bytes).for_each(|value| self.write_part(value));
        }
    }

    /// Writes the values of the headers that match and aren't neutral. The order of the names in the request doesn't
    /// matter.
    fn write_matching_headers(&mut self, headers: &HeaderMap, is_included: impl Fn(&HeaderName) -> bool) {
        let mut names: Vec<_> = headers.keys().filter(|name| is_included(name) && !is_neutral(name, headers)).collect();
        names.sort_unstable_by_key(|name| name.as_str());
        self.write_headers(headers, names);
    }

    fn finish(&self) -> CacheKey {
        CacheKey(self.0.finish128().as_u128())
    }
}
