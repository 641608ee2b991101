//! The checks of the announcements of nodes. Stores that belong to one process skip them.

use std::sync::Arc;

use tidegate_core::{Limits, Span, Time};
use tidegate_store::{AnnouncedNode, Announcement, Store as _};

use super::{Backend, ConformanceOptions, StoreUnderTest, expect_equal, start_time};

/// Longer than the check takes.
const KEPT_FOR: Span = Span::from_secs(600);
/// The longest time by which an announcement of this check is old, where the store has a clock of its own.
const MAX_AGE: Span = Span::from_secs(60);
/// Bytes that are special somewhere: in texts, in statements, in lists.
const HOSTILE_RECORD: &[u8] = b"\0'\"\\;--\r\n{}$.\xff\xfe";

impl<B: Backend> StoreUnderTest<'_, B> {
    /// Sends an announcement. `None` if the store belongs to one process.
    fn announce(
        &self,
        node_id: u64,
        record: &[u8],
        kept_for: Span,
        now: Time,
    ) -> Result<Option<Vec<AnnouncedNode>>, String> {
        let announcement = Announcement::new(node_id, kept_for, record.to_vec()).map_err(|error| error.to_string())?;
        let Some(nodes) = self.store.announce(announcement, now) else { return Ok(None) };
        self.backend.wait(nodes).map(Some).map_err(|error| error.to_string())
    }
}

/// The numbers and the records of nodes, by number.
fn sorted(mut nodes: Vec<AnnouncedNode>) -> Vec<(u64, Vec<u8>)> {
    nodes.sort_unstable_by_key(|node| node.node_id);
    nodes.into_iter().map(|node| (node.node_id, node.record)).collect()
}

fn open<B: Backend>(backend: &B) -> Result<StoreUnderTest<'_, B>, String> {
    let limits = Limits::new(Vec::new()).map_err(|error| error.to_string())?;
    Ok(StoreUnderTest::open(backend, &Arc::new(limits)))
}

/// Each node sees all, with their latest records and with ages by one clock, until they are withdrawn or expire.
pub(super) fn all_nodes_are_listed<B: Backend>(backend: &B, _: &ConformanceOptions) -> Result<(), String> {
    let store = open(backend)?;
    let now = start_time();
    let has_set_clock = store.set_now(now);
    let Some(first) = store.announce(1, b"first", KEPT_FOR, now)? else { return Ok(()) };
    expect_equal("one node", sorted(first), vec![(1, b"first".to_vec())])?;
    store.announce(u64::MAX, b"", KEPT_FOR, now)?;
    store.announce(1, HOSTILE_RECORD, KEPT_FOR, now)?;
    // The caller's time is wrong, where the store has its own.
    let later = now + Span::from_secs(if has_set_clock { 7 } else { 40_000 });
    store.set_now(later);
    let nodes = store.announce(2, &[b'x'; Announcement::MAX_RECORD_BYTES], KEPT_FOR, later)?.unwrap_or_default();
    let ages: Vec<Span> = nodes.iter().map(|node| node.age).collect();
    if has_set_clock {
        expect_equal("heard last", nodes.first().map(|node| node.node_id), Some(2))?;
        expect_equal("ages", ages, [0, 7, 7].map(Span::from_secs).to_vec())?;
    } else if ages.iter().any(|age| *age > MAX_AGE) || !ages.is_sorted() {
        return Err(format!("ages {ages:?}"));
    }
    let longest = (2, vec![b'x'; Announcement::MAX_RECORD_BYTES]);
    let others = [(1, HOSTILE_RECORD.to_vec()), longest];
    expect_equal("three nodes", sorted(nodes), [others.as_slice(), &[(u64::MAX, Vec::new())]].concat())?;
    let rest = store.announce(u64::MAX, b"bye", Span::ZERO, later)?.unwrap_or_default();
    expect_equal("withdrawn", sorted(rest), others.to_vec())?;
    if has_set_clock {
        let at_end = now + KEPT_FOR;
        store.set_now(at_end);
        let kept = store.announce(3, b"", KEPT_FOR, at_end)?.unwrap_or_default();
        expect_equal("expired", kept.iter().map(|node| node.node_id).collect(), vec![3, 2])?;
    }
    Ok(())
}

/// Of many nodes, those that were heard last are listed, and the one that asks is one of them.
pub(super) fn the_list_is_bounded<B: Backend>(backend: &B, _: &ConformanceOptions) -> Result<(), String> {
    let store = open(backend)?;
    let (mut now, mut listed) = (start_time(), Vec::new());
    for node_id in (1..=AnnouncedNode::MAX_LISTED as u64 + 8).rev() {
        now = now + Span::from_millis(1);
        store.set_now(now);
        let Some(nodes) = store.announce(node_id, b"", KEPT_FOR, now)? else { return Ok(()) };
        listed = nodes;
    }
    expect_equal("listed nodes", listed.len(), AnnouncedNode::MAX_LISTED)?;
    expect_equal("the one that asks", listed.iter().any(|node| node.node_id == 1), true)
}
