//! Announcements as the bytes that a store keeps: the time of writing in microseconds, the node's number and the
//! microseconds for which the store keeps them, each as eight bytes, the lowest first; then the record. Other programs
//! can write there as well.

use tidegate_core::{Span, Time};

use super::{AnnouncedNode, Announcement};

/// The maximum number of stored announcements that are read. More nodes than are listed may have started and died lately.
pub(crate) const MAX_READ: usize = 1024;
/// The maximum length of a stored announcement, in bytes.
pub(crate) const MAX_BYTES: usize = 3 * size_of::<u64>() + Announcement::MAX_RECORD_BYTES;

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

/// The name of a node's announcement, where names are texts.
pub(crate) fn node_name(node_id: u64) -> String {
    format!("{node_id:016x}")
}

/// The nodes of stored announcements, whose names in the store are of the type `N`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StoredNodes<N> {
    /// The nodes that are listed, those heard last first.
    pub(crate) listed: Vec<AnnouncedNode>,
    /// The names that the store can remove, in order: of announcements that have expired or are too many, and of
    /// everything else that isn't the announcement of the node with this name.
    pub(crate) removable: Vec<N>,
}

impl<N: Ord> StoredNodes<N> {
    /// Reads stored bytes at this time. `name_of` is the name of a node's announcement.
    pub(crate) fn read(values: impl IntoIterator<Item = (N, Vec<u8>)>, name_of: impl Fn(u64) -> N, now: Time) -> Self {
        let (mut listed, mut removable) = (Vec::new(), Vec::new());
        for (name, bytes) in values {
            match decode(&bytes, now).filter(|node| name_of(node.node_id) == name) {
                Some(node) => listed.push(node),
                None => removable.push(name),
            }
        }
        listed.sort_unstable_by_key(|node| (node.age, node.node_id));
        let surplus = listed.split_off(listed.len().min(AnnouncedNode::MAX_LISTED));
        removable.extend(surplus.iter().map(|node| name_of(node.node_id)));
        removable.sort_unstable();
        Self { listed, removable }
    }
}

/// The node of an announcement, unless that has expired or is none. A store whose clock was set back keeps an announcement
/// from the future for as long as one from the past.
fn decode(bytes: &[u8], now: Time) -> Option<AnnouncedNode> {
    let (at, rest) = split_number(bytes)?;
    let (node_id, rest) = split_number(rest)?;
    let (kept_for, record) = split_number(rest)?;
    let at = Time::from_micros(at);
    let age = now.since(at).max(at.since(now));
    let is_kept = age < Span::from_micros(kept_for).min(Announcement::MAX_KEPT_FOR);
    (is_kept && record.len() <= Announcement::MAX_RECORD_BYTES).then(|| AnnouncedNode {
        node_id,
        age,
        record: record.to_vec(),
    })
}

fn split_number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    bytes.split_first_chunk().map(|(number, rest)| (u64::from_le_bytes(*number), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time::from_secs(1_000_000);

    fn announced(node_id: u64, at: Time, kept_for: u64) -> (String, Vec<u8>) {
        let numbers = [at.as_micros(), node_id, kept_for].map(u64::to_le_bytes);
        (node_name(node_id), [numbers.as_flattened(), b"{}"].concat())
    }

    fn read(values: Vec<(String, Vec<u8>)>) -> StoredNodes<String> {
        StoredNodes::read(values, node_name, NOW)
    }

    #[test]
    fn foreign_values_are_removable_by_name() {
        let hour = Span::from_secs(3600).as_micros();
        let mut values = vec![announced(1, NOW, hour), announced(2, NOW - Span::from_secs(3601), hour)];
        let (_, other_node) = announced(3, NOW, hour);
        let long = [other_node.as_slice(), &[0; MAX_BYTES]].concat();
        let junk = [("", vec![]), ("junk", b"junk".to_vec()), ("x", other_node), ("0000000000000003", long)];
        values.extend(junk.map(|(name, bytes)| (name.to_owned(), bytes)));
        let nodes = read(values);
        assert_eq!(nodes.listed.iter().map(|node| node.node_id).collect::<Vec<_>>(), [1]);
        assert_eq!(nodes.removable, ["", "0000000000000002", "0000000000000003", "junk", "x"]);
    }

    #[test]
    fn future_announcements_displace_no_live_node() {
        let future = (100..1000).map(|id| announced(id, NOW + Span::from_secs(60), u64::MAX));
        let live = announced(1, NOW - Span::from_secs(5), Span::from_secs(600).as_micros());
        let nodes = read(future.chain([live]).collect());
        assert_eq!((nodes.listed.len(), nodes.listed[0].node_id), (AnnouncedNode::MAX_LISTED, 1));
        assert_eq!(nodes.listed[1].age, Span::from_secs(60));
        assert_eq!(nodes.removable.len(), 901 - AnnouncedNode::MAX_LISTED);
        let nodes = read(vec![announced(7, Time::NEVER, u64::MAX), announced(8, Time::ZERO, u64::MAX)]);
        assert_eq!((nodes.listed.len(), nodes.removable.len()), (0, 2));
    }
}
