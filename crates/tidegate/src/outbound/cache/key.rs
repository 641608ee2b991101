//! What tells one kept reply from another.

use std::fmt;
use std::hash::Hasher;

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use siphasher::sip128::{Hasher128, SipHasher13};

use super::Origin;
use crate::random::random_u64;

/// Headers by which callers commonly show who they are. What differs in one of them is never answered alike.
const CREDENTIAL_HEADERS: [HeaderName; 8] = [
    header::AUTHORIZATION,
    header::COOKIE,
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static("api-key"),
    HeaderName::from_static("apikey"),
    HeaderName::from_static("x-auth-token"),
    HeaderName::from_static("x-access-token"),
    HeaderName::from_static("x-goog-api-key"),
];

/// A fingerprint of all that makes a request another one: 128 bits under a secret of this process, so that nobody can
/// choose two that collide, and what a URL or a header holds is nowhere kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key(u128);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

/// Makes keys.
#[derive(Clone)]
pub(super) struct Keys(SipHasher13);

impl Keys {
    pub(super) fn new() -> Self {
        Self(SipHasher13::new_with_keys(random_u64(), random_u64()))
    }

    /// The key of a request as far as the request itself says: its provider, its method, its URL, and who calls.
    ///
    /// A header that the provider's own credential replaces says nothing about who calls.
    pub(super) fn request(&self, origin: &impl Origin, method: &http::Method, request: &Parts) -> Key {
        let mut hash = Hash(self.0);
        hash.part(origin.name().as_bytes());
        hash.part(method.as_str().as_bytes());
        let uri = &request.uri;
        hash.part(uri.scheme_str().unwrap_or_default().as_bytes());
        hash.part(uri.authority().map_or("", |authority| authority.as_str()).as_bytes());
        hash.part(uri.path_and_query().map_or("/", |path| path.as_str()).as_bytes());
        let injected = origin.injects();
        for name in CREDENTIAL_HEADERS.iter().filter(|name| injected.as_ref() != Some(*name)) {
            hash.values(&request.headers, name);
        }
        hash.finish()
    }

    /// The key of that variant of a request's reply that depends on these headers.
    pub(super) fn variant(&self, request: Key, vary: &[HeaderName], headers: &HeaderMap) -> Key {
        if vary.is_empty() {
            return request;
        }
        let mut hash = Hash(self.0);
        hash.part(&request.0.to_le_bytes());
        for name in vary {
            hash.part(name.as_str().as_bytes());
            hash.values(headers, name);
        }
        hash.finish()
    }
}

struct Hash(SipHasher13);

impl Hash {
    /// With its length before it, so that two parts can't be divided in another way.
    fn part(&mut self, bytes: &[u8]) {
        self.0.write_u64(bytes.len() as u64);
        self.0.write(bytes);
    }

    fn values(&mut self, headers: &HeaderMap, name: &HeaderName) {
        let values = headers.get_all(name);
        self.0.write_u64(values.iter().count() as u64);
        values.iter().map(HeaderValue::as_bytes).for_each(|value| self.part(value));
    }

    fn finish(&self) -> Key {
        Key(self.0.finish128().as_u128())
    }
}
