//! The scopes of a provider: parts of a credential that are closed on their own, such as a resource, a model or a route.
//!
//! A request may name its scope by itself. Otherwise replies name it, for each route. Until then the route is the scope.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use crate::lanes::{Refusal, WaitReason};
use crate::remaining::{EndedTotals, RemainingTracker};
use crate::time::MAX_CLOCK_LAG;
use crate::{Pace, Remaining, Span, Time};

/// The maximum number of scopes of a provider, each with each credential, and of routes with a known scope.
///
/// At the bound, open scopes without calls in flight are forgotten, those that were used longest ago first. No closed one
/// is. If none can be forgotten, a further scope isn't known, and what closes it closes the credential.
pub const MAX_SCOPES: usize = 10_000;

/// The part of the scopes that is forgotten at once, so that a search through all of them is rare.
const FORGOTTEN_AT_ONCE: usize = MAX_SCOPES / 8;

/// The time after a search that found nothing to forget in which there is no other.
const SEARCH_INTERVAL: Span = Span::from_secs(1);

/// The credential with which the pace of a scope is kept.
const PACED_CREDENTIAL: usize = 0;

/// The place of what concerns a scope with all credentials.
pub(super) const ALL_CREDENTIALS: usize = u16::MAX as usize;

/// The time after a closing in which calls of its route still belong to its scope, so that they return one after the
/// other.
const RELEASE_TIME: Span = Span::from_secs(10);

/// The route of a call, and the scope that its request names. The default is none of both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallScope {
    /// A hash of what is called, such as the method and the path without ids; 0 if it is unknown. Failures and rejections
    /// at one route are told from those at several.
    pub route: u64,
    /// The key of the scope that the request names; 0 if it names none. Neither it nor the route has the highest bit.
    pub key: u64,
    /// True if replies name the scope of the route.
    pub is_learnt: bool,
    /// True if the scope is only closed: allowances, limits and the pace are those of the credential.
    pub closes_only: bool,
}

impl CallScope {
    /// The scope of the calls of a route that replies close.
    pub(super) fn of_closed_route(route: u64) -> Self {
        Self { route, key: 0, is_learnt: true, closes_only: true }
    }

    /// The key of the calls that wait together: the scope, or the route if replies name that. 0 if there are no scopes.
    pub(super) fn queue_key(self) -> u64 {
        match self.key {
            0 if self.is_learnt => self.route,
            key => key,
        }
    }
}

/// The bit that keys of scopes and routes don't have.
pub(super) const UNUSED_BIT: u64 = 1 << 63;

/// The scope that an attempt is charged to: its key, and another bit if it is only closed. In few bytes, because calls are
/// moved often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ChargedScope(u64);

const CLOSES_ONLY: u64 = UNUSED_BIT;

impl ChargedScope {
    fn new(key: u64, closes_only: bool) -> Self {
        Self(if closes_only && key != 0 { key | CLOSES_ONLY } else { key })
    }

    /// The key; 0 if there is no scope.
    pub(super) fn key(self) -> u64 {
        self.0 & !CLOSES_ONLY
    }

    /// The key of the scope that limits, allowances and the pace belong to; 0 if they belong to the credential.
    pub(super) fn counted(self) -> u64 {
        if self.0 & CLOSES_ONLY == 0 { self.0 } else { 0 }
    }

    pub(super) fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// A scope with one credential.
#[derive(Clone, Debug, Default)]
struct ScopeState {
    closed_until: Time,
    /// The time until which the credential is left out, because it was rejected there while others were accepted.
    left_out_until: Time,
    /// The refusal of a limit of ours. The default is over.
    full: Refusal,
    remaining: RemainingTracker,
    /// The pace of the scope's calls with all credentials, kept with [`PACED_CREDENTIAL`].
    pace: Option<Box<Pace>>,
    used_at: Time,
    /// True if a reply has named it. Others have names that callers choose.
    is_taught: bool,
}

impl ScopeState {
    fn is_idle(&self, now: Time) -> bool {
        self.closed_until.max(self.left_out_until).max(self.full.until) <= now && self.remaining.is_idle(now)
    }
}

/// The scopes of a provider and the routes that lead to them.
#[derive(Debug, Default)]
pub(super) struct Scopes {
    states: BTreeMap<(u64, u16), ScopeState>,
    routes: BTreeMap<u64, u64>,
    /// The time of the last search for a scope that a caller names, and for one that a reply has named.
    searched_at: [Time; 2],
    routes_searched_at: Time,
}

impl Scopes {
    /// The scope that a call is charged to.
    pub(super) fn charged_to(&self, scope: CallScope) -> ChargedScope {
        let key = match scope.key {
            // Replies close such a route only by teaching it.
            0 if scope.closes_only => self.routes.get(&scope.route).copied().unwrap_or(0),
            0 if scope.is_learnt => self.routes.get(&scope.route).copied().unwrap_or(scope.route),
            key => key,
        };
        ChargedScope::new(key, scope.closes_only)
    }

    /// True if replies have taught the scope of any route.
    #[inline]
    pub(super) fn has_routes(&self) -> bool {
        !self.routes.is_empty()
    }

    /// True if the calls of a route belong to a scope that is closed with some credential, or was until just now.
    #[cold]
    pub(super) fn is_route_closed(&mut self, route: u64, now: Time) -> bool {
        let Some(key) = self.routes.get(&route).copied() else { return false };
        let is_closed = self.last_end(key) + RELEASE_TIME > now;
        if !is_closed {
            self.routes.remove(&route);
        }
        is_closed
    }

    /// The last end of the closings of a scope. [`Time::ZERO`] without any.
    fn last_end(&self, key: u64) -> Time {
        self.states_of(key).map(|state| state.closed_until.max(state.left_out_until)).max().unwrap_or(Time::ZERO)
    }

    fn states_of(&self, key: u64) -> impl Iterator<Item = &ScopeState> {
        self.states.range((key, 0)..=(key, u16::MAX)).map(|(_, state)| state)
    }

    /// Learns that the calls of a route belong to a scope, which is closed until a time that may be over. A route keeps a
    /// scope that is closed for longer. Returns false if there is no room for another route.
    pub(super) fn teach(&mut self, route: u64, key: u64, until: Time, now: Time) -> bool {
        if self.routes.get(&route).is_some_and(|known| self.last_end(*known) > until) {
            return true;
        }
        if self.routes.len() >= MAX_SCOPES && !self.routes.contains_key(&route) {
            self.forget_open_routes(now);
            if self.routes.len() >= MAX_SCOPES {
                return false;
            }
        }
        self.routes.insert(route, key);
        true
    }

    /// Forgets the routes whose scopes are open and idle: they are learnt again from their next replies.
    #[cold]
    fn forget_open_routes(&mut self, now: Time) {
        if self.routes_searched_at <= now && now < self.routes_searched_at + SEARCH_INTERVAL {
            return;
        }
        self.routes_searched_at = now;
        let routes = core::mem::take(&mut self.routes);
        let is_used =
            |key: u64| self.last_end(key) + RELEASE_TIME > now || self.states_of(key).any(|it| !it.is_idle(now));
        self.routes = routes.into_iter().filter(|(_, key)| is_used(*key)).collect();
    }

    /// The time at which a call of this cost may use the scope with this credential; `now` if it may.
    pub(super) fn free_at(&mut self, key: u64, credential: usize, cost: u64, tracks: bool, now: Time) -> Time {
        let mut free_at = now;
        for place in [credential, ALL_CREDENTIALS] {
            let Some(state) = self.states.get_mut(&(key, place as u16)) else { continue };
            // The times are in the far future if the clock has stepped back since.
            if state.used_at > now + MAX_CLOCK_LAG {
                (state.closed_until, state.left_out_until) = (Time::ZERO, Time::ZERO);
                (state.full, state.used_at) = (Refusal::default(), now);
            }
            let enough_at = if tracks { state.remaining.free_at(cost, now) } else { now };
            let open_at = state.closed_until.max(state.left_out_until).max(state.full.until);
            free_at = free_at.max(enough_at).max(open_at);
        }
        free_at
    }

    /// The time until which the scope is certainly closed with this credential. [`Time::ZERO`] if it isn't.
    pub(super) fn closed_until(&self, key: u64, credential: usize) -> Time {
        let states = [credential, ALL_CREDENTIALS].map(|place| self.states.get(&(key, place as u16)));
        let ends = states.into_iter().flatten().map(|state| state.closed_until.max(state.full.closed_until));
        ends.max().unwrap_or(Time::ZERO)
    }

    /// Leaves the credential out of the scope until a time.
    pub(super) fn leave_out(&mut self, key: u64, credential: usize, until: Time, now: Time) {
        if let Some(state) = self.state_mut(key, credential, false, now) {
            state.left_out_until = until;
        }
    }

    /// Uses a credential in the scope again that was left out, because it was accepted there.
    pub(super) fn end_leaving_out(&mut self, key: u64, credential: usize) {
        if let Some(state) = self.states.get_mut(&(key, credential as u16)) {
            state.left_out_until = Time::ZERO;
        }
    }

    /// True if the scope is open to the credential, which is only left out.
    pub(super) fn is_only_left_out(&self, key: u64, credential: usize, now: Time) -> bool {
        let state = self.states.get(&(key, credential as u16));
        state.is_some_and(|state| state.left_out_until > now && state.full.until <= now)
            && self.closed_until(key, credential) <= now
    }

    /// True if the credential is left out of the scope.
    pub(super) fn is_left_out(&self, key: u64, credential: usize, now: Time) -> bool {
        self.states.get(&(key, credential as u16)).is_some_and(|state| state.left_out_until > now)
    }

    /// The limit of ours by which the scope is closed with this credential until this time.
    pub(super) fn full_until(&self, key: u64, credential: usize, until: Time) -> Option<WaitReason> {
        let state = self.states.get(&(key, credential as u16))?;
        (state.full.until == until).then_some(state.full.reason)
    }

    /// Records that a limit of ours has no room in the scope with this credential. Returns false if there is no room for
    /// another scope.
    pub(super) fn set_full(&mut self, key: u64, credential: usize, refusal: Refusal, now: Time) -> bool {
        let Some(state) = self.state_mut(key, credential, false, now) else { return false };
        if refusal.until > state.full.until {
            state.full = refusal;
        }
        true
    }

    /// Closes the scope with this credential, if no later end is known. Returns false if there is no room for another scope.
    pub(super) fn close(&mut self, key: u64, credential: usize, until: Time, is_taught: bool, now: Time) -> bool {
        let Some(state) = self.state_mut(key, credential, is_taught, now) else { return false };
        state.closed_until = until.max(state.closed_until);
        true
    }

    /// Closes the scope until exactly this time, because the provider keeps room for a call from then on.
    pub(super) fn close_exactly(&mut self, key: u64, credential: usize, until: Time, now: Time) -> bool {
        let Some(state) = self.state_mut(key, credential, false, now) else { return false };
        state.closed_until = until;
        state.remaining.keep_room();
        true
    }

    pub(super) fn record_sent(&mut self, key: u64, credential: usize, cost: u64, now: Time) -> EndedTotals {
        let state = self.state_mut(key, credential, false, now);
        state.map_or(EndedTotals::default(), |state| state.remaining.record_sent(cost))
    }

    /// Records the end of a request in one scope, and what its reply reports about a scope, which may be another one.
    pub(super) fn record_end(
        &mut self,
        [sent_key, told_key]: [u64; 2],
        credential: usize,
        (cost, sent, answered): (u64, (Time, EndedTotals), bool),
        reported: Remaining,
        now: Time,
    ) {
        let own = if told_key == sent_key { reported } else { Remaining::default() };
        if let Some(state) = self.states.get_mut(&(sent_key, credential as u16)) {
            state.remaining.record_end(cost, sent, answered, own);
        }
        if told_key != sent_key
            && let Some(state) = self.state_mut(told_key, credential, true, now)
        {
            state.remaining.record_report(sent.0, reported, now);
        }
    }

    /// The pace of a scope. `None` until its first call is sent.
    pub(super) fn pace(&self, key: u64) -> Option<&Pace> {
        self.states.get(&(key, PACED_CREDENTIAL as u16))?.pace.as_deref()
    }

    /// The pace of a scope, to be changed: a copy of `initial` if it has none. `None` if there is no room for the scope.
    pub(super) fn pace_mut(&mut self, key: u64, initial: &Pace, now: Time) -> Option<&mut Pace> {
        let state = self.state_mut(key, PACED_CREDENTIAL, false, now)?;
        Some(state.pace.get_or_insert_with(|| Box::new(initial.clone())))
    }

    /// The longest time between two calls of a scope, if there are scopes with a pace.
    pub(super) fn longest_interval(&self) -> Option<Duration> {
        self.states.values().filter_map(|state| state.pace.as_ref()).map(|pace| pace.interval()).max()
    }

    /// Forgets everything that replies have said. The calls in flight are no longer known.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The scopes that were closed, each with its credential (`None` for all) and the end of its closing.
    pub(super) fn closings(&self) -> impl Iterator<Item = (u64, Option<usize>, Time)> {
        let all = self.states.iter().map(|(&(key, credential), state)| {
            let credential = usize::from(credential);
            (
                key,
                Some(credential).filter(|credential| *credential != ALL_CREDENTIALS),
                state.closed_until.max(state.left_out_until),
            )
        });
        all.filter(|(_, _, until)| *until > Time::ZERO)
    }

    /// The state of a scope with a credential, a new one if need be. `None` if there is no room.
    fn state_mut(&mut self, key: u64, credential: usize, is_taught: bool, now: Time) -> Option<&mut ScopeState> {
        let place = (key, credential as u16);
        if self.states.len() >= MAX_SCOPES && !self.states.contains_key(&place) {
            self.forget_idle(is_taught, now);
            if self.states.len() >= MAX_SCOPES {
                return None;
            }
        }
        let state = self.states.entry(place).or_default();
        state.used_at = now;
        state.is_taught |= is_taught;
        Some(state)
    }

    /// Forgets the scopes that are open and idle and were used longest ago, for one that a reply has named or for one
    /// that a caller names: these never displace the first.
    #[cold]
    fn forget_idle(&mut self, for_taught: bool, now: Time) {
        let searched_at = &mut self.searched_at[usize::from(for_taught)];
        if *searched_at <= now && now < *searched_at + SEARCH_INTERVAL {
            return;
        }
        *searched_at = now;
        let idle = self.states.iter().filter(|(_, state)| state.is_idle(now) && (for_taught || !state.is_taught));
        let mut idle: Vec<_> = idle.map(|(place, state)| (state.is_taught, state.used_at, *place)).collect();
        idle.sort_unstable();
        let found = idle.len();
        for (_, _, place) in idle.into_iter().take(FORGOTTEN_AT_ONCE) {
            self.states.remove(&place);
        }
        if found > 0 {
            *searched_at = Time::ZERO;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AdaptiveRate, AdaptiveRateSpec, RemainingAmount};

    fn at(secs: u64) -> Time {
        Time::from_secs(1_700_000_000 + secs)
    }

    #[test]
    fn a_route_leads_to_its_learnt_scope() {
        let mut scopes = Scopes::default();
        let call = CallScope { route: 7, is_learnt: true, ..CallScope::default() };
        let closed = CallScope::of_closed_route(7);
        let charged = |scopes: &Scopes, call| [scopes.charged_to(call).key(), scopes.charged_to(call).counted()];
        assert_eq!((charged(&scopes, call), call.queue_key()), ([7, 7], 7), "until it is known");
        assert_eq!((charged(&scopes, closed), closed.queue_key()), ([0, 0], 7));
        assert!(scopes.teach(7, 99, at(0), at(0)));
        assert_eq!((charged(&scopes, call), call.queue_key()), ([99, 99], 7));
        assert_eq!((charged(&scopes, closed), closed.queue_key()), ([99, 0], 7));
        assert_eq!(charged(&scopes, CallScope { key: 5, ..call }), [5, 5], "the request names it");
        assert_eq!(charged(&scopes, CallScope { route: 7, ..CallScope::default() }), [0, 0]);
    }

    #[test]
    fn a_closed_route_is_forgotten_once_it_is_open() {
        let mut scopes = Scopes::default();
        assert!(!scopes.is_route_closed(7, at(0)));
        assert!(scopes.teach(7, 7, at(5), at(0)) && scopes.close(7, ALL_CREDENTIALS, at(5), true, at(0)));
        assert_eq!([scopes.free_at(7, 0, 1, false, at(1)), scopes.closed_until(7, 3)], [at(5); 2]);
        assert_eq!([scopes.is_route_closed(7, at(14)), scopes.is_route_closed(8, at(4))], [true, false]);
        assert_eq!([scopes.is_route_closed(7, at(15)), scopes.routes.is_empty()], [false, true]);
    }

    #[test]
    fn a_route_keeps_the_scope_that_is_closed_for_longest_and_at_the_bound_all_that_are_closed() {
        let mut scopes = Scopes::default();
        for (key, until) in [(1, 600), (2, 5), (3, 700)] {
            assert!(scopes.teach(7, key, at(until), at(0)) && scopes.close(key, 0, at(until), true, at(0)));
            assert_eq!(scopes.routes[&7], if key == 3 { 3 } else { 1 });
        }
        for route in 10..10 + MAX_SCOPES as u64 - 1 {
            assert!(scopes.teach(route, 2, at(5), at(0)));
        }
        assert!(!scopes.teach(50_000, 3, at(700), at(0)), "all are closed");
        assert!(scopes.teach(50_000, 3, at(700), at(20)));
        assert_eq!((scopes.routes.len(), scopes.routes[&7]), (2, 3));
    }

    #[test]
    fn closed_scopes_are_never_forgotten_and_chosen_names_displace_no_taught_ones() {
        let mut scopes = Scopes::default();
        for key in 1..=5_000 {
            assert!(scopes.close(key, 0, at(100), true, at(0)));
        }
        for key in 5_001..=10_000 {
            assert!(scopes.close(key, 0, at(1), true, at(0)), "these are open soon");
        }
        assert!(!scopes.close(20_000, 0, at(9), false, at(2)), "a caller's name displaces none");
        for key in 20_000..=25_000 {
            scopes.close(key, 0, at(100), true, at(4));
        }
        assert_eq!(scopes.states.len(), MAX_SCOPES);
        assert!(!scopes.close(30_000, 0, at(9), true, at(6)), "all are closed");
        let closed = |key| scopes.closed_until(key, 0);
        assert!((1..=5_000).all(|key| closed(key) == at(100)));
        assert_eq!(scopes.free_at(1, 0, 1, true, at(5)), at(100));
        assert_eq!(scopes.free_at(1, 1, 1, true, at(5)), at(5), "with another credential");
    }

    #[test]
    fn a_spent_window_says_nothing_about_the_next() {
        let mut scopes = Scopes::default();
        let mut report = |sent_key, sent_at, amount, resets_at| {
            let calls = RemainingAmount { amount, limit: Some(5_000), resets_at: at(resets_at) };
            let request = (1, (at(sent_at), EndedTotals::default()), true);
            scopes.record_end([sent_key, 99], 0, request, Remaining { calls: Some(calls), cost: None }, at(sent_at));
            scopes.free_at(99, 0, 1, true, at(sent_at))
        };
        assert_eq!(report(7, 0, 0, 10), at(10));
        assert_eq!(report(8, 20, 4_999, 3_600), at(20));
    }

    #[test]
    fn each_scope_has_its_own_pace() {
        let initial = Pace::from(AdaptiveRate::new(AdaptiveRateSpec::default()).unwrap());
        let mut scopes = Scopes::default();
        scopes.pace_mut(1, &initial, at(0)).unwrap().sent(at(0));
        scopes.pace_mut(2, &initial, at(0)).unwrap();
        let next_at = |key| scopes.pace(key).map(|pace| pace.next_at(at(0)));
        assert_eq!(next_at(1), Some(at(0) + Span::from_millis(100)));
        assert!(next_at(2).is_some_and(|next_at| next_at <= at(0)));
        assert_eq!(next_at(3), None);
    }

    #[test]
    fn a_credential_that_is_accepted_isnt_left_out() {
        let mut scopes = Scopes::default();
        scopes.leave_out(1, 0, at(300), at(0));
        assert_eq!(scopes.free_at(1, 0, 1, true, at(1)), at(300));
        scopes.end_leaving_out(1, 0);
        assert_eq!(scopes.free_at(1, 0, 1, true, at(1)), at(1));
    }

    #[test]
    fn a_clock_that_steps_back_opens_scopes() {
        let mut scopes = Scopes::default();
        scopes.close(1, 0, at(100_060), true, at(100_000));
        assert_eq!(scopes.free_at(1, 0, 1, true, at(0)), at(0));
    }
}
