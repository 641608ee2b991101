//! Identical calls that are under way at the same time: one leads, the others wait for its reply.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::sync::Arc;

use parking_lot::Mutex;
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
pub(super) struct SingleFlight(pub Mutex<HashMap<CacheKey, FlightEntry>>);

pub(super) struct FlightEntry {
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

impl SingleFlight {
    /// Joins the flight for this reply, or leads a new one. `None` if the flight, or the number of flights, is at its
    /// limit. The leader's urgency handle becomes the flight's, and later members raise it.
    pub(super) fn join(self: &Arc<Self>, key: CacheKey, urgency: Option<&Urgency>) -> Option<FlightMember> {
        let mut flights = self.0.lock();
        let is_full = flights.len() >= MAX_FLIGHTS;
        let new_member = |shared: &Arc<SharedFlight>, is_leader| FlightMember {
            flights: Arc::clone(self),
            key,
            shared: Arc::clone(shared),
            is_leader,
        };
        match flights.entry(key) {
            MapEntry::Occupied(entry) if entry.get().members >= MAX_MEMBERS => None,
            MapEntry::Occupied(mut entry) => {
                entry.get_mut().members += 1;
                Some(new_member(&entry.get().shared, false))
            }
            MapEntry::Vacant(_) if is_full => None,
            MapEntry::Vacant(entry) => {
                let urgency = urgency.cloned().unwrap_or_default();
                let shared = Arc::new(SharedFlight { urgency, state: watch::Sender::new(FlightState::HasLeader) });
                let leader = Some(new_member(&shared, true));
                entry.insert(FlightEntry { shared, members: 1 });
                leader
            }
        }
    }
}

/// The membership of a call in a flight. Dropping it leaves the flight. If it was the leader, another member takes the
/// lead.
pub(super) struct FlightMember {
    flights: Arc<SingleFlight>,
    key: CacheKey,
    shared: Arc<SharedFlight>,
    pub is_leader: bool,
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
            state.changed().await.expect("invariant: this member holds the sender");
        }
    }

    /// Gives the result to all waiting members. A later call begins another flight.
    pub(super) fn finish(mut self, result: FlightResult) {
        if std::mem::take(&mut self.is_leader) {
            self.remove_flight_if(|_| true);
            self.shared.state.send_replace(FlightState::Finished(result));
        }
    }

    /// Removes the flight if its entry meets a condition. A later flight with the same key stays as it is.
    fn remove_flight_if(&self, is_over: impl FnOnce(&mut FlightEntry) -> bool) {
        if let MapEntry::Occupied(mut entry) = self.flights.0.lock().entry(self.key)
            && Arc::ptr_eq(&entry.get().shared, &self.shared)
            && is_over(entry.get_mut())
        {
            entry.remove();
        }
    }
}

impl Drop for FlightMember {
    fn drop(&mut self) {
        self.remove_flight_if(|entry| {
            entry.members -= 1;
            entry.members == 0
        });
        if self.is_leader {
            self.shared.state.send_replace(FlightState::NoLeader);
        }
    }
}
