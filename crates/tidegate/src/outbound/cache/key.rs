//! What tells one kept reply from another.

use std::fmt;
use std::hash::Hasher;

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue};
use siphasher::sip128::{Hasher128, SipHasher13};

use super::Origin;
use crate::random::random_u64;

/// What names of headers have in them by which callers show who they are: `Authorization`, `Cookie`, `X-Api-Key`,
/// `Private-Token` … Replies to requests that differ in one of them are never told to each other's callers. A name too
/// many costs a call, a name too few shows somebody else's reply.
const CREDENTIAL: [&str; 8] = ["auth", "cookie", "credential", "key", "password", "secret", "session", "token"];

fn is_credential(name: &HeaderName) -> bool {
    // That one tells calls apart, not callers.
    name != "idempotency-key" && CREDENTIAL.iter().any(|word| name.as_str().contains(word))
}

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
        let shows = |name: &&HeaderName| is_credential(name) && injected.as_ref() != Some(*name);
        let mut names: Vec<_> = request.headers.keys().filter(shows).collect();
        names.sort_unstable_by_key(|name| name.as_str());
        hash.named(&request.headers, names);
        hash.finish()
    }

    /// The key of that variant of a request's reply that depends on these headers.
    pub(super) fn variant(&self, request: Key, vary: &[HeaderName], headers: &HeaderMap) -> Key {
        if vary.is_empty() {
            return request;
        }
        let mut hash = Hash(self.0);
        hash.part(&request.0.to_le_bytes());
        hash.named(headers, vary);
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

    /// The values of these headers, as many as there are.
    fn named<'n>(&mut self, headers: &HeaderMap, names: impl IntoIterator<Item = &'n HeaderName>) {
        for name in names {
            self.part(name.as_str().as_bytes());
            let values = headers.get_all(name);
            self.0.write_u64(values.iter().count() as u64);
            values.iter().map(HeaderValue::as_bytes).for_each(|value| self.part(value));
        }
    }

    fn finish(&self) -> Key {
        Key(self.0.finish128().as_u128())
    }
}
