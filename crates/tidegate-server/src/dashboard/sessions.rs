//! The sessions of browsers that have signed in.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};

use http::HeaderMap;
use http::header::COOKIE;
use parking_lot::Mutex;
use tidegate::{Span, Time};
use tidegate_policy::Secret;
use tidegate_runtime::random::random_bytes;

use crate::access::{Access, AccessToken, Identity};

/// The maximum number of sessions. At the bound a new one ends the oldest.
const MAX_SESSIONS: usize = 256;
/// The length of a session.
pub(super) const LIFETIME: Span = Span::from_secs(12 * 3600);
/// The cookie with the id of a session.
pub(super) const COOKIE_NAME: &str = "tidegate_session";

/// The sessions. Their ids are random; the tokens that they were signed in with aren't kept.
#[derive(Default)]
pub(crate) struct Sessions {
    by_id: Mutex<HashMap<String, Session>>,
    fingerprints: RandomState,
}

/// A session.
#[derive(Clone, Debug)]
pub(crate) struct Session {
    /// The fingerprint of the token that it was signed in with. A reload that replaces the token ends the session.
    token: u64,
    /// The proof that a request comes from a page of this session.
    pub(crate) csrf: Secret,
    ends_at: Time,
}

impl Sessions {
    /// Begins a session with this token, and returns its id.
    pub(super) fn start(&self, token: &AccessToken, now: Time) -> String {
        let session =
            Session { token: self.fingerprint(token), csrf: Secret::new(random_id()), ends_at: now + LIFETIME };
        let mut by_id = self.by_id.lock();
        by_id.retain(|_, session| session.ends_at > now);
        if by_id.len() >= MAX_SESSIONS {
            let oldest = by_id.iter().min_by_key(|(_, session)| session.ends_at).map(|(id, _)| id.clone());
            oldest.and_then(|oldest| by_id.remove(&oldest));
        }
        let id = random_id();
        by_id.insert(id.clone(), session);
        id
    }

    /// The session of a request, and its caller.
    pub(super) fn find<'a>(
        &self,
        access: &'a Access,
        headers: &HeaderMap,
        now: Time,
    ) -> Option<(Identity<'a>, Session)> {
        let session = {
            let by_id = self.by_id.lock();
            session_ids(headers).find_map(|id| by_id.get(id).cloned()).filter(|session| session.ends_at > now)?
        };
        let token = access.tokens().iter().find(|token| self.fingerprint(token) == session.token)?;
        Some((token.identity(), session))
    }

    /// Ends the session of a request.
    pub(super) fn end(&self, headers: &HeaderMap) {
        let mut by_id = self.by_id.lock();
        for id in session_ids(headers) {
            by_id.remove(id);
        }
    }

    /// A hash of the token under a random key of this process.
    fn fingerprint(&self, token: &AccessToken) -> u64 {
        self.fingerprints.hash_one((&token.name, token.secret.expose()))
    }
}

/// 256 random bits as text.
fn random_id() -> String {
    random_bytes::<32>().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn session_ids(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let cookies = headers.get_all(COOKIE).iter().filter_map(|line| line.to_str().ok()).flat_map(|line| line.split(';'));
    cookies.filter_map(|cookie| cookie.trim().strip_prefix(COOKIE_NAME)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_session_ends_the_oldest_at_the_bound() {
        let sessions = Sessions::default();
        let token = AccessToken { name: "ops".into(), secret: Secret::new("s3cret"), read_only: false };
        let start = |at: u64| sessions.start(&token, Time::from_secs(at));
        let (first, second) = (start(0), start(1));
        for at in 2..=MAX_SESSIONS as u64 {
            start(at);
        }
        let by_id = sessions.by_id.lock();
        assert_eq!((by_id.len(), by_id.contains_key(&first), by_id.contains_key(&second)), (MAX_SESSIONS, false, true));
    }

    #[test]
    fn ids_are_256_random_bits() {
        let (one, other) = (random_id(), random_id());
        assert_eq!((one.len(), one == other), (64, false));
    }
}
