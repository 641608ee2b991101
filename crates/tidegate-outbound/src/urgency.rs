//! The priority of a waiting call, which others may raise.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use tidegate_core::Lane;

/// A handle that raises the priority of a waiting call, for example if a more urgent caller joins it. A call that was raised,
/// to whichever lane, also keeps its place in a full lane. Each call needs a handle of its own.
#[derive(Clone, Debug)]
pub struct Urgency(pub(crate) Arc<UrgencyInner>);

#[derive(Debug)]
pub(crate) struct UrgencyInner {
    /// The lane of the most urgent caller that has joined, plus one; 0 if none has.
    lane_plus_1: AtomicU8,
    /// The index of its waiting call plus one; 0 if it doesn't wait. Written under the dispatcher's lock.
    waiting_index_plus_1: AtomicUsize,
}

impl Default for Urgency {
    /// Leaves the priority to the options of the call.
    fn default() -> Self {
        Self(Arc::new(UrgencyInner { lane_plus_1: AtomicU8::new(0), waiting_index_plus_1: AtomicUsize::new(0) }))
    }
}

impl Urgency {
    /// The lane of the most urgent caller that has joined the call. `None` if none has.
    pub(crate) fn lane(&self) -> Option<Lane> {
        self.0.lane_plus_1.load(Ordering::Relaxed).checked_sub(1).map(|lane| Lane::ALL[usize::from(lane)])
    }

    /// Notes a caller that joins the call. Returns true if it is the first or more urgent than those before.
    pub(crate) fn raise_to(&self, lane: Lane) -> bool {
        let lane_plus_1 = lane as u8 + 1;
        self.0.lane_plus_1.fetch_max(lane_plus_1, Ordering::Relaxed) < lane_plus_1
    }

    pub(crate) fn set_waiting_index(&self, index: usize) {
        self.0.waiting_index_plus_1.store(index + 1, Ordering::Relaxed);
    }

    pub(crate) fn clear_waiting_index(&self) {
        self.0.waiting_index_plus_1.store(0, Ordering::Relaxed);
    }

    pub(crate) fn waiting_index(&self) -> Option<usize> {
        self.0.waiting_index_plus_1.load(Ordering::Relaxed).checked_sub(1)
    }
}
