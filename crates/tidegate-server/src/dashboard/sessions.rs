//! The sessions of browsers that have signed in.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Weak};

use http::header::{COOKIE, HOST, HeaderMap, HeaderValue};
use http::uri::Authority;
use memchr::memmem;
use parking_lot::Mutex;
use tidegate::{Span, Time};
use tidegate_policy::Secret;
use tidegate_runtime::random::random_bytes;

use super::Caller;
use crate::access::{Access, AccessToken, Identity};

/// The maximum number of sessions. At the bound a new one ends the oldest.
const MAX_SESSIONS: usize = 256;
/// The length of a session.
pub(super) const LIFETIME: Span = Span::from_secs(12 * 3600);
/// The start of the name of a cookie with the id of a session.
const COOKIE_PREFIX: &str = "tidegate_session";

/// The sessions. Their ids are random; the tokens that they were signed in with aren't kept.
#[derive(Default)]
pub(crate) struct Sessions {
    by_id: Mutex<HashMap<String, Arc<Session>>>,
    /// The fingerprints of the tokens in force.
    tokens: Mutex<Vec<u64>>,
    fingerprints: RandomState,
}

/// A session.
#[derive(Debug)]
pub(crate) struct Session {
    /// The fingerprint of the token that it was signed in with. A reload that replaces the token ends the session.
    token: u64,
    /// The proof that a request comes from a page of this session.
    pub(crate) csrf: Secret,
    ends_at: Time,
}

/// The right of a caller to read on, which ends with its token and with its session.
pub(crate) struct ReadingRight {
    token: Option<u64>,
    session: Option<Weak<Session>>,
}

impl Sessions {
    /// Takes over the tokens of a policy that is about to be in force.
    pub(crate) fn follow(&self, access: &Access) {
        *self.tokens.lock() = access.tokens().iter().map(|token| self.fingerprint(token)).collect();
    }

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
        by_id.insert(id.clone(), Arc::new(session));
        id
    }

    /// The session of a request, and its caller.
    pub(super) fn find<'a>(
        &self,
        access: &'a Access,
        headers: &HeaderMap,
        now: Time,
    ) -> Option<(Identity<'a>, Arc<Session>)> {
        let by_id = self.by_id.lock();
        session_ids(headers).filter_map(|id| by_id.get(id)).filter(|session| session.ends_at > now).find_map(
            |session| {
                let token = access.tokens().iter().find(|token| self.fingerprint(token) == session.token)?;
                Some((token.identity(), Arc::clone(session)))
            },
        )
    }

    /// The right of a caller that `access` lets pass.
    pub(crate) fn reading_right(&self, access: &Access, caller: &Caller<'_>) -> ReadingRight {
        let token = access.tokens().iter().find(|token| caller.identity.token == Some(&*token.name));
        let session = caller.session.as_ref().map(Arc::downgrade);
        ReadingRight { token: token.map(|token| self.fingerprint(token)), session }
    }

    /// Returns true while a right lasts.
    pub(crate) fn is_valid(&self, right: &ReadingRight, now: Time) -> bool {
        let tokens = self.tokens.lock();
        let has_token = right.token.map_or(tokens.is_empty(), |token| tokens.contains(&token));
        let is_going_on = |session: &Weak<Session>| session.upgrade().is_some_and(|session| session.ends_at > now);
        has_token && right.session.as_ref().is_none_or(is_going_on)
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

/// The name of the cookie for a client of this `Host`. All ports of a host share their cookies, so the name has the port
/// that the browser knows.
pub(super) fn cookie_name(headers: &HeaderMap) -> String {
    let host = headers.get(HOST).and_then(|host| Authority::try_from(host.as_bytes()).ok());
    host.and_then(|host| host.port_u16())
        .map_or_else(|| COOKIE_PREFIX.to_owned(), |port| format!("{COOKIE_PREFIX}_{port}"))
}

fn session_ids(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let cookies = headers.get_all(COOKIE).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    let ids = cookies.filter(is_session_cookie).filter_map(|cookie| str::from_utf8(cookie).ok()?.split_once('='));
    ids.map(|(_, id)| id.trim())
}

fn is_session_cookie(cookie: &&[u8]) -> bool {
    cookie.trim_ascii_start().starts_with(COOKIE_PREFIX.as_bytes())
}

/// Removes the cookies of sessions from a request that another server will read. Browsers send them to all ports of the
/// dashboard's host, and their ids would let that server act as the operator.
#[inline]
pub(crate) fn remove_session_cookies(headers: &mut HeaderMap) {
    let has_session = |line: &HeaderValue| memmem::find(line.as_bytes(), COOKIE_PREFIX.as_bytes()).is_some();
    if headers.get_all(COOKIE).iter().any(has_session) {
        remove_from_cookies(headers);
    }
}

#[cold]
fn remove_from_cookies(headers: &mut HeaderMap) {
    let lines: Vec<HeaderValue> = headers.get_all(COOKIE).iter().filter_map(without_sessions).collect();
    headers.remove(COOKIE);
    for line in lines {
        headers.append(COOKIE, line);
    }
}

/// A line of cookies without those of sessions. `None` if there are no others.
fn without_sessions(line: &HeaderValue) -> Option<HeaderValue> {
    let cookies = line.as_bytes().split(|byte| *byte == b';');
    let kept = cookies.filter(|cookie| !is_session_cookie(cookie)).collect::<Vec<_>>().join(&b';');
    HeaderValue::from_bytes(kept.trim_ascii()).ok().filter(|line| !line.is_empty())
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
