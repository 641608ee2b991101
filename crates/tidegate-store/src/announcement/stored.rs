//! Announcements as the bytes that a store keeps: the time of writing in microseconds, the node's number and the
//! microseconds for which the store keeps them, each as eight bytes, the lowest first; then the record.

use tidegate_core::{Span, Time};

use super::{AnnouncedNode, Announcement};

/// The bytes without the time at their beginning.
pub(crate) fn encode_untimed(announcement: &Announcement) -> Vec<u8> {
    let header = [announcement.node_id, announcement.kept_for.as_micros()].map(u64::to_le_bytes);
    [header.as_flattened(), &announcement.record].concat()
}

/// The bytes of an announcement at this time.
#[cfg(feature = "rows")]
pub(crate) fn encode(announcement: &Announcement, at: Time) -> Vec<u8> {
    [at.as_micros().to_le_bytes().as_slice(), &encode_untimed(announcement)].concat()
}

/// The nodes of stored announcements.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct StoredNodes {
    /// The nodes that are listed, those heard last first.
    pub(crate) listed: Vec<AnnouncedNode>,
    /// The numbers of nodes whose announcements the store can remove.
    pub(crate) removable: Vec<u64>,
}

impl StoredNodes {
    /// Reads stored bytes at this time. Those that aren't announcements are ignored.
    pub(crate) fn read(values: impl IntoIterator<Item = Vec<u8>>, now: Time) -> Self {
        let mut nodes = Self::default();
        for (node, is_kept) in values.into_iter().filter_map(|bytes| decode(&bytes, now)) {
            if is_kept { nodes.listed.push(node) } else { nodes.removable.push(node.node_id) }
        }
        nodes.listed.sort_unstable_by_key(|node| (node.age, node.node_id));
        let surplus = nodes.listed.split_off(nodes.listed.len().min(AnnouncedNode::MAX_LISTED));
        nodes.removable.extend(surplus.iter().map(|node| node.node_id));
        nodes
    }
}

/// A node, and true if its announcement is kept. A store whose clock was set back keeps one from the future for as long
/// as one from the past.
fn decode(bytes: &[u8], now: Time) -> Option<(AnnouncedNode, bool)> {
    let (at, rest) = split_number(bytes)?;
    let (node_id, rest) = split_number(rest)?;
    let (kept_for, record) = split_number(rest)?;
    let (at, kept_for) = (Time::from_micros(at), Span::from_micros(kept_for));
    let node = AnnouncedNode { node_id, age: now.since(at), record: record.to_vec() };
    let is_kept = node.age.max(at.since(now)) < kept_for;
    (record.len() <= Announcement::MAX_RECORD_BYTES).then_some((node, is_kept))
}

fn split_number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    bytes.split_first_chunk().map(|(number, rest)| (u64::from_le_bytes(*number), rest))
}
