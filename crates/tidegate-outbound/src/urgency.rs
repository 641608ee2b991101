//! The priority of a waiting call, which others may raise.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use tidegate_core::Lane;

/// A handle that raises the priority of a waiting call, for example if a more urgent caller joins it.
#[derive(Clone, Debug)]
pub struct Urgency(pub(crate) Arc<UrgencyInner>);

#[derive(Debug)]
pub(crate) struct UrgencyInner {
    lane: AtomicU8,
    /// The index of its waiting call plus one; 0 if it doesn't wait. Written under the dispatcher's lock.
    waiting_index_plus_1: AtomicUsize,
}

impl Default for Urgency {
    /// Leaves the priority to the options of the call.
    fn default() -> Self {
        Self(Arc::new(UrgencyInner {
            lane: AtomicU8::new(Lane::Background as u8),
            waiting_index_plus_1: AtomicUsize::new(0),
        }))
    }
}

impl Urgency {
    pub(crate) fn lane(&self) -> Lane {
        Lane::ALL[usize::from(self.0.lane.load(Ordering::Relaxed))]
    }

    /// Raises the lane. Returns true if the new lane is more urgent than the old one.
    pub(crate) fn raise_to(&self, lane: Lane) -> bool {
        self.0.lane.fetch_max(lane as u8, Ordering::Relaxed) < lane as u8
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
