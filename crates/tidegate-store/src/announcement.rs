//! The messages by which the nodes that share a store know of each other.

#[cfg(any(feature = "redis", feature = "rows"))]
pub(crate) mod stored;

use tidegate_core::Span;

use crate::StoreError;

/// The message of a node to the others that share its store. It replaces the node's earlier one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    node_id: u64,
    kept_for: Span,
    record: Vec<u8>,
}

impl Announcement {
    /// The maximum length of a record, in bytes.
    pub const MAX_RECORD_BYTES: usize = 1024;
    /// The longest time for which a store keeps a message: a day.
    pub const MAX_KEPT_FOR: Span = Span::from_secs(24 * 3600);

    /// The message of the node with this random number. The store keeps it for this time, but at most for
    /// [`MAX_KEPT_FOR`](Self::MAX_KEPT_FOR). In this time, the node should send the next one. [`Span::ZERO`] withdraws it.
    ///
    /// # Errors
    /// The record is longer than [`MAX_RECORD_BYTES`](Self::MAX_RECORD_BYTES).
    pub fn new(node_id: u64, kept_for: Span, record: Vec<u8>) -> Result<Self, StoreError> {
        if record.len() > Self::MAX_RECORD_BYTES {
            let length = record.len();
            let most = Self::MAX_RECORD_BYTES;
            return Err(StoreError::Failed(format!("a node's record has {length} bytes, and at most {most} are kept")));
        }
        Ok(Self { node_id, kept_for: kept_for.min(Self::MAX_KEPT_FOR), record })
    }

    /// The number of the node.
    pub fn node_id(&self) -> u64 {
        self.node_id
    }

    /// The time for which the store keeps the message.
    pub fn kept_for(&self) -> Span {
        self.kept_for
    }

    /// The content, which the store doesn't read.
    pub fn record(&self) -> &[u8] {
        &self.record
    }
}

/// A node that shares a store, as its last announcement describes it. Another program may have written it, so the
/// record can have any content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnnouncedNode {
    /// The number of the node.
    pub node_id: u64,
    /// The time since the announcement, by the store's clock. If the clock was set back, the time until it.
    pub age: Span,
    /// The content, at most [`Announcement::MAX_RECORD_BYTES`] bytes.
    pub record: Vec<u8>,
}

impl AnnouncedNode {
    /// The maximum number of nodes that a store lists. If there are more, those that were silent longest are left out.
    pub const MAX_LISTED: usize = 256;
}
