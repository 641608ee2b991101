//! Identical calls that are under way at the same time: one leads, the others wait for its reply.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::super::Urgency;
use super::cached_reply::CachedReply;
use super::key::CacheKey;

/// The most flights at a time. Calls beyond that are each sent by themselves.
pub(super) const MAX_FLIGHTS: usize = 4096;
/// The most calls in one flight, its leader included. Calls beyond that are each sent by themselves.
pub(super) const MAX_MEMBERS: usize = 1024;

/// The calls that are under way, by the key of their reply.
#[derive(Default)]
pub(super) struct SingleFlight(Mutex<HashMap<CacheKey, FlightEntry>>);

struct FlightEntry {
    shared: Arc<SharedFlight>,
    members: usize,
}

/// The state that all members of one flight share.
struct SharedFlight {
    urgency: Urgency,
    state: watch::Sender<FlightState>,
}

enum FlightState {
    /// One of the members makes the call.
    HasLeader,
    /// The leader left without a result. The first member that sees it takes the lead, so that a member that isn't
    /// polled can't block the others.
    NoLeader,
    Finished(FlightResult),
}

/// The result of a flight for the calls that waited for it.
#[derive(Clone)]
pub(super) enum FlightResult {
    /// A reply that all of them may have.
    Reply(Arc<CachedReply>),
    /// A stale reply, because the provider is unavailable.
    Stale(Arc<CachedReply>),
    /// No reply that can be shared: each call is sent by itself.
    NotShareable,
}

/// The result of joining a flight.
pub(super) enum JoinOutcome {
    /// This call leads.
    Leader(FlightMember),
    /// This call waits.
    Follower(FlightMember),
    /// The flight, or the number of flights, is at its limit.
    Full,
}

impl SingleFlight {
    fn lock(&self) -> MutexGuard<'_, HashMap<CacheKey, FlightEntry>> {
        self.0.lock()
    }

    /// Joins the flight for this reply: waits with the others, or leads a new one. The leader's urgency handle becomes
    /// the flight's, and later members raise it.
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

/// The membership of a call in a flight. Dropping it leaves the flight. If it was the leader, another member takes the
/// lead.
pub(super) struct FlightMember {
    flights: Arc<SingleFlight>,
    key: CacheKey,
    shared: Arc<SharedFlight>,
    is_leader: bool,
}

impl FlightMember {
    /// The handle that makes the leader's call more urgent.
    pub(super) fn urgency(&self) -> &Urgency {
        &self.shared.urgency
    }

    /// Waits for the result of the flight; `None` if this call becomes the leader.
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

    /// Gives the result to all waiting members. A later call begins another flight.
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
