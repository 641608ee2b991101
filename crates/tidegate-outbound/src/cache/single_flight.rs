//! Identical calls that are under way at the same time: one leads, the others wait for its reply.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::super::Urgency;
use super::cached_reply::CachedReply;
use super::key::CacheKey;

/// The most calls that others can wait for. Beyond, calls go each for themselves.
pub(super) const MAX_FLIGHTS: usize = 4096;
/// The most calls that one reply is waited for by, its leader included. Beyond, calls go each for themselves.
pub(super) const MAX_MEMBERS: usize = 1024;

/// The calls that are under way, by the key of their reply.
#[derive(Default)]
pub(super) struct SingleFlight(Mutex<HashMap<CacheKey, FlightEntry>>);

struct FlightEntry {
    shared: Arc<SharedFlight>,
    members: usize,
}

/// What the calls of one flight share.
struct SharedFlight {
    urgency: Urgency,
    state: watch::Sender<FlightState>,
}

enum FlightState {
    /// Somebody leads.
    HasLeader,
    /// Who led is gone. The first of the others that comes to see it leads on, so that one that isn't polled holds
    /// nobody up.
    NoLeader,
    Finished(FlightResult),
}

/// What a flight brings to those who waited for it.
#[derive(Clone)]
pub(super) enum FlightResult {
    /// A reply that they may have.
    Reply(Arc<CachedReply>),
    /// An old reply, as the provider is unavailable.
    Stale(Arc<CachedReply>),
    /// Nothing that could be shared: each calls for itself.
    NotShareable,
}

/// How a call boards.
pub(super) enum JoinOutcome {
    /// It leads.
    Leader(FlightMember),
    /// It waits.
    Follower(FlightMember),
    /// There is no room.
    Full,
}

impl SingleFlight {
    fn lock(&self) -> MutexGuard<'_, HashMap<CacheKey, FlightEntry>> {
        self.0.lock()
    }

    /// Waits with the others for this reply, or leads. The first brings the urgency by which its call can be lifted.
    pub(super) fn join(self: &Arc<Self>, key: CacheKey, urgency: Option<&Urgency>) -> JoinOutcome {
        let mut flights = self.lock();
        let full = flights.len() >= MAX_FLIGHTS;
        let new_member = |shared: &Arc<SharedFlight>, leads| FlightMember {
            flights: Arc::clone(self),
            key,
            shared: Arc::clone(shared),
            is_leader: leads,
        };
        match flights.entry(key) {
            MapEntry::Occupied(place) if place.get().members >= MAX_MEMBERS => JoinOutcome::Full,
            MapEntry::Occupied(mut entry) => {
                entry.get_mut().members += 1;
                JoinOutcome::Follower(new_member(&entry.get().shared, false))
            }
            MapEntry::Vacant(_) if full => JoinOutcome::Full,
            MapEntry::Vacant(place) => {
                let urgency = urgency.cloned().unwrap_or_default();
                let shared = Arc::new(SharedFlight { urgency, state: watch::Sender::new(FlightState::HasLeader) });
                let leader = new_member(&shared, true);
                place.insert(FlightEntry { shared, members: 1 });
                JoinOutcome::Leader(leader)
            }
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }
}

/// A call's place in a flight. Dropping it leaves, and lets another lead on if it led.
pub(super) struct FlightMember {
    flights: Arc<SingleFlight>,
    key: CacheKey,
    shared: Arc<SharedFlight>,
    is_leader: bool,
}

impl FlightMember {
    /// By which the leader's call is made more urgent.
    pub(super) fn urgency(&self) -> &Urgency {
        &self.shared.urgency
    }

    /// What the flight brings; `None` if this call is the one to lead on.
    pub(super) async fn wait_for_result(&mut self) -> Option<FlightResult> {
        let mut state = self.shared.state.subscribe();
        loop {
            if let FlightState::Finished(result) = &*state.borrow_and_update() {
                return Some(result.clone());
            }
            let became_leader = self.shared.state.send_if_modified(|state| {
                let vacant = matches!(state, FlightState::NoLeader);
                if vacant {
                    *state = FlightState::HasLeader;
                }
                vacant
            });
            if became_leader {
                self.is_leader = true;
                return None;
            }
            state.changed().await.expect("invariant: this seat holds the sender");
        }
    }

    /// Brings this to all who wait. Who comes later begins another flight.
    pub(super) fn finish(mut self, result: FlightResult) {
        if self.is_leader {
            self.is_leader = false;
            let mut flights = self.flights.lock();
            if let MapEntry::Occupied(entry) = flights.entry(self.key)
                && Arc::ptr_eq(&entry.get().shared, &self.shared)
            {
                entry.remove();
            }
            drop(flights);
            self.shared.state.send_replace(FlightState::Finished(result));
        }
    }
}

impl Drop for FlightMember {
    fn drop(&mut self) {
        let mut flights = self.flights.lock();
        if let MapEntry::Occupied(mut entry) = flights.entry(self.key)
            && Arc::ptr_eq(&entry.get().shared, &self.shared)
        {
            entry.get_mut().members -= 1;
            if entry.get().members == 0 {
                entry.remove();
            }
        }
        drop(flights);
        if self.is_leader {
            self.shared.state.send_replace(FlightState::NoLeader);
        }
    }
}
