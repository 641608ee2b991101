//! The routes at which a provider works and fails: what tells an outage from one bad path, and a rejected credential from
//! one that may not use a path.

use alloc::vec::Vec;

use crate::{Span, Time};

/// The number of routes that are remembered.
const MAX_ROUTES: usize = 8;
/// The time for which a good reply at a route is remembered.
const MEMORY: Span = Span::from_secs(300);
/// A credential with a good reply in the last time of this length works.
const WORKING_TIME: Span = Span::from_secs(1);
/// The least number of rejections in a row, over at least [`WORKING_TIME`], after which a credential isn't used at a route.
const MIN_REJECTIONS: u32 = 3;

/// The routes of the failures since the last good reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum FailingRoutes {
    #[default]
    None,
    One(u64),
    /// Several, or one that is unknown.
    Several,
}

/// A good reply.
#[derive(Clone, Copy, Debug, Default)]
struct GoodReply {
    route: u64,
    credential: usize,
    at: Time,
}

/// The last replies with one credential of several.
#[derive(Clone, Copy, Debug, Default)]
struct CredentialRecord {
    succeeded_at: Time,
    disabled_until: Time,
    /// A route at which it was rejected since, although others have succeeded there.
    rejected_at: u64,
    /// The number of its rejections since, and the time of the first.
    rejections: u32,
    rejected_since: Time,
}

/// The meaning of the rejection of a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rejection {
    /// Unknown: no other credential is known to be accepted there, or there is no other.
    Unknown,
    /// It may not be used at this route: for a while, it has only been rejected, while others have succeeded there.
    AtRoute,
    /// It was rejected at two routes at which others succeed, since its last success. Or the route is unknown, so that
    /// routes can't tell.
    OfCredential,
}

/// The latest replies by route.
#[derive(Debug, Default)]
pub(super) struct Routes {
    good: [GoodReply; MAX_ROUTES],
    newest: usize,
    failing: FailingRoutes,
    /// Empty for a single credential.
    credentials: Vec<CredentialRecord>,
}

impl Routes {
    pub(super) fn new(credentials: usize) -> Self {
        let records = if credentials > 1 { credentials } else { 0 };
        Self { credentials: alloc::vec![CredentialRecord::default(); records], ..Self::default() }
    }

    /// Records a reply that proves that the provider works; `accepts` if it accepts the credential, too.
    #[inline]
    pub(super) fn record_good(&mut self, route: u64, credential: usize, accepts: bool, now: Time) {
        self.failing = FailingRoutes::None;
        if !accepts {
            return;
        }
        if let Some(record) = self.credentials.get_mut(credential) {
            (record.succeeded_at, record.rejected_at, record.rejections) = (now, 0, 0);
        }
        let newest = &mut self.good[self.newest];
        if newest.route == route && newest.credential == credential {
            newest.at = now;
        } else if route != 0 {
            self.record_other(route, credential, now);
        }
    }

    #[cold]
    fn record_other(&mut self, route: u64, credential: usize, now: Time) {
        let known = self.good.iter().position(|good| (good.route, good.credential) == (route, credential));
        let oldest = || self.good.iter().enumerate().min_by_key(|(_, good)| good.at).map_or(0, |(place, _)| place);
        self.newest = known.unwrap_or_else(oldest);
        self.good[self.newest] = GoodReply { route, credential, at: now };
    }

    /// Records a failure. Returns true if nothing else has failed since the last good reply, while other routes work: one
    /// bad route must not close the others.
    #[cold]
    pub(super) fn record_failure(&mut self, route: u64, now: Time) -> bool {
        self.failing = match self.failing {
            _ if route == 0 => FailingRoutes::Several,
            FailingRoutes::None => FailingRoutes::One(route),
            FailingRoutes::One(known) if known == route => FailingRoutes::One(route),
            FailingRoutes::One(_) | FailingRoutes::Several => FailingRoutes::Several,
        };
        self.is_only_failing(route, now)
    }

    /// True if nothing but this route has failed since the last good reply, while other routes work.
    #[inline]
    pub(super) fn is_only_failing(&self, route: u64, now: Time) -> bool {
        self.failing == FailingRoutes::One(route) && self.works_beside(route, now)
    }

    #[cold]
    fn works_beside(&self, route: u64, now: Time) -> bool {
        let is_recent = |good: &&GoodReply| good.route != 0 && good.at <= now && now < good.at + MEMORY;
        self.good.iter().filter(is_recent).any(|good| good.route != route)
    }

    /// Records that a credential was rejected, and returns what that says about it. `is_certain` if the reply is about the
    /// credential and not about what it asks for.
    ///
    /// Callers may choose a path that one credential may not use, or none. So a rejection at one route counts only if the
    /// credential hasn't succeeded anywhere for a while.
    #[cold]
    pub(super) fn record_rejection(&mut self, route: u64, credential: usize, is_certain: bool, now: Time) -> Rejection {
        let Some(record) = self.credentials.get_mut(credential) else { return Rejection::Unknown };
        if route == 0 {
            return Rejection::OfCredential;
        }
        let of_others = self.good.iter().filter(|good| good.route == route && good.credential != credential);
        let Some(good_at) = of_others.map(|good| good.at).filter(|at| *at <= now && now < *at + MEMORY).max() else {
            return Rejection::Unknown;
        };
        let before = core::mem::replace(&mut record.rejected_at, route);
        if record.rejections == 0 || now < record.rejected_since {
            (record.rejections, record.rejected_since) = (0, now);
        }
        if is_certain {
            record.rejections = record.rejections.saturating_add(1);
        }
        let is_lasting = record.rejections >= MIN_REJECTIONS && record.rejected_since + WORKING_TIME <= now;
        match before {
            0 => Rejection::Unknown,
            _ if before != route => Rejection::OfCredential,
            _ if is_certain && is_lasting && good_at >= record.rejected_since => Rejection::AtRoute,
            _ => Rejection::Unknown,
        }
    }

    /// True if the credential has just been accepted for another request.
    pub(super) fn works(&self, credential: usize, now: Time) -> bool {
        let record = self.credentials.get(credential);
        record.is_some_and(|record| record.succeeded_at <= now && now < record.succeeded_at + WORKING_TIME)
    }

    /// Records that a credential isn't used until a time. Returns false if it is disabled already or is the last.
    pub(super) fn disable(&mut self, credential: usize, until: Time, min_rest: Span, now: Time) -> bool {
        let is_last = !self.has_other(|other| other == credential, now);
        let Some(record) = self.credentials.get_mut(credential) else { return false };
        if is_last || record.disabled_until.since(now) > min_rest {
            return false;
        }
        record.disabled_until = until;
        true
    }

    /// True if a credential is neither disabled nor among these.
    pub(super) fn has_other(&self, is_excluded: impl Fn(usize) -> bool, now: Time) -> bool {
        let records = self.credentials.iter().enumerate();
        records.into_iter().any(|(credential, record)| record.disabled_until <= now && !is_excluded(credential))
    }

    /// True if a credential isn't disabled.
    pub(super) fn is_enabled(&self, credential: usize, now: Time) -> bool {
        self.credentials.get(credential).is_none_or(|record| record.disabled_until <= now)
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.credentials.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Time {
        Time::from_secs(1_700_000_000 + secs)
    }

    #[test]
    fn one_bad_route_is_told_from_an_outage() {
        let mut routes = Routes::new(1);
        assert!(!routes.record_failure(1, at(0)), "nothing else is known to work");
        routes.record_good(2, 0, true, at(1));
        assert!(routes.record_failure(1, at(2)));
        assert!(!routes.record_failure(2, at(3)), "two routes");
        assert!(!routes.record_failure(1, at(4)));
        routes.record_good(2, 0, true, at(5));
        assert!(routes.record_failure(1, at(6)));
        assert!(!routes.record_failure(1, at(305)), "the other one hasn't worked for a long time");
        routes.record_good(2, 0, true, at(400));
        assert!(!routes.record_failure(0, at(401)), "an unknown route");
    }

    #[test]
    fn a_credential_is_rejected_at_two_routes_at_which_others_succeed() {
        let mut routes = Routes::new(2);
        let unknown = Rejection::Unknown;
        let reject = |routes: &mut Routes, route, secs| routes.record_rejection(route, 1, true, at(secs));
        assert_eq!(reject(&mut routes, 1, 0), unknown, "no other credential succeeds there");
        routes.record_good(1, 0, true, at(0));
        routes.record_good(2, 0, true, at(0));
        assert_eq!(reject(&mut routes, 1, 1), unknown);
        assert_eq!(reject(&mut routes, 1, 1), unknown, "a path of the caller's choice");
        assert_eq!(reject(&mut routes, 3, 3), unknown, "no other credential succeeds there");
        assert_eq!(reject(&mut routes, 1, 3), unknown, "the others haven't succeeded since");
        routes.record_good(1, 0, true, at(3));
        assert_eq!(reject(&mut routes, 1, 3), Rejection::AtRoute);
        assert_eq!(routes.record_rejection(1, 1, false, at(3)), unknown, "another refusal");
        assert_eq!(reject(&mut routes, 2, 4), Rejection::OfCredential);
        routes.record_good(1, 1, true, at(5));
        assert_eq!(reject(&mut routes, 2, 6), unknown, "it has succeeded since");
        assert!(routes.works(1, at(5)) && !routes.works(1, at(6)));
    }

    #[test]
    fn the_last_credential_is_never_disabled() {
        let minute = Span::from_secs(60);
        let mut routes = Routes::new(2);
        assert!(routes.disable(0, at(300), minute, at(0)));
        assert!(!routes.disable(0, at(300), minute, at(1)), "it is already");
        assert!(!routes.disable(1, at(300), minute, at(1)), "the last");
        assert!(routes.disable(1, at(600), minute, at(301)));
        assert!(!Routes::new(1).disable(0, at(300), minute, at(0)));
    }
}
