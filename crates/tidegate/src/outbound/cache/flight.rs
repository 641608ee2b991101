//! Identical calls that are under way at the same time: one leads, the others wait for its reply.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Place;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::super::Urgency;
use super::entry::Entry;
use super::key::Key;

/// The most calls that others can wait for. Beyond, calls go each for themselves.
pub(super) const MAX_FLIGHTS: usize = 4096;
/// The most calls that one reply is waited for by, its leader included. Beyond, calls go each for themselves.
pub(super) const MAX_SEATS: usize = 1024;

/// The calls that are under way, by the key of their reply.
#[derive(Default)]
pub(super) struct Flights(Mutex<HashMap<Key, Flight>>);

struct Flight {
    shared: Arc<Shared>,
    seats: usize,
}

/// What the calls of one flight share.
struct Shared {
    urgency: Urgency,
    state: watch::Sender<State>,
}

enum State {
    /// Somebody leads.
    Led,
    /// Who led is gone. The first of the others that comes to see it leads on, so that one that isn't polled holds
    /// nobody up.
    Vacant,
    Landed(Landing),
}

/// What a flight brings to those who waited for it.
#[derive(Clone)]
pub(super) enum Landing {
    /// A reply that they may have.
    Reply(Arc<Entry>),
    /// An old reply, as the provider is unavailable.
    Stale(Arc<Entry>),
    /// Nothing that could be shared: each calls for itself.
    Nothing,
}

/// How a call boards.
pub(super) enum Boarded {
    /// It leads.
    Leads(Seat),
    /// It waits.
    Waits(Seat),
    /// There is no room.
    Full,
}

impl Flights {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Flight>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits with the others for this reply, or leads. The first brings the urgency by which its call can be lifted.
    pub(super) fn board(self: &Arc<Self>, key: Key, urgency: Option<&Urgency>) -> Boarded {
        let mut flights = self.lock();
        let full = flights.len() >= MAX_FLIGHTS;
        let seat =
            |shared: &Arc<Shared>, leads| Seat { flights: Arc::clone(self), key, shared: Arc::clone(shared), leads };
        match flights.entry(key) {
            Place::Occupied(place) if place.get().seats >= MAX_SEATS => Boarded::Full,
            Place::Occupied(mut place) => {
                place.get_mut().seats += 1;
                Boarded::Waits(seat(&place.get().shared, false))
            }
            Place::Vacant(_) if full => Boarded::Full,
            Place::Vacant(place) => {
                let urgency = urgency.cloned().unwrap_or_default();
                let shared = Arc::new(Shared { urgency, state: watch::Sender::new(State::Led) });
                let leader = seat(&shared, true);
                place.insert(Flight { shared, seats: 1 });
                Boarded::Leads(leader)
            }
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }
}

/// A call's place in a flight. Dropping it leaves, and lets another lead on if it led.
pub(super) struct Seat {
    flights: Arc<Flights>,
    key: Key,
    shared: Arc<Shared>,
    leads: bool,
}

impl Seat {
    /// By which the leader's call is made more urgent.
    pub(super) fn urgency(&self) -> &Urgency {
        &self.shared.urgency
    }

    /// What the flight brings; `None` if this call is the one to lead on.
    pub(super) async fn landing(&mut self) -> Option<Landing> {
        let mut state = self.shared.state.subscribe();
        loop {
            if let State::Landed(landing) = &*state.borrow_and_update() {
                return Some(landing.clone());
            }
            let leads = self.shared.state.send_if_modified(|state| {
                let vacant = matches!(state, State::Vacant);
                if vacant {
                    *state = State::Led;
                }
                vacant
            });
            if leads {
                self.leads = true;
                return None;
            }
            state.changed().await.expect("invariant: this seat holds the sender");
        }
    }

    /// Brings this to all who wait. Who comes later begins another flight.
    pub(super) fn lands(mut self, landing: Landing) {
        if self.leads {
            self.leads = false;
            let mut flights = self.flights.lock();
            if let Place::Occupied(place) = flights.entry(self.key)
                && Arc::ptr_eq(&place.get().shared, &self.shared)
            {
                place.remove();
            }
            drop(flights);
            self.shared.state.send_replace(State::Landed(landing));
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut flights = self.flights.lock();
        if let Place::Occupied(mut place) = flights.entry(self.key)
            && Arc::ptr_eq(&place.get().shared, &self.shared)
        {
            place.get_mut().seats -= 1;
            if place.get().seats == 0 {
                place.remove();
            }
        }
        drop(flights);
        if self.leads {
            self.shared.state.send_replace(State::Vacant);
        }
    }
}
