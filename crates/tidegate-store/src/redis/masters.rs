//! The map from a cluster's slots to its masters, so that the loss of one master isn't taken for the loss of all.
//!
//! The client sends each command to the right master, even if this map is outdated.

use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;
use redis::Value;

const SLOT_COUNT: usize = 16_384;
/// The maximum number of distinct masters. With more, some share a number.
pub(super) const MAX_MASTERS: usize = 16;

/// The number of the master of each slot: 0 until it is known.
pub(super) struct SlotMasters {
    slots: Box<[AtomicU8]>,
    /// Their names, by number.
    node_ids: Mutex<Vec<Vec<u8>>>,
}

impl Default for SlotMasters {
    fn default() -> Self {
        Self { slots: (0..SLOT_COUNT).map(|_| AtomicU8::new(0)).collect(), node_ids: Mutex::default() }
    }
}

impl SlotMasters {
    /// The number of the master of a hash tag's slot.
    pub(super) fn index_for_tag(&self, tag: &[u8]) -> usize {
        self.slots[hash_slot(tag)].load(Ordering::Relaxed).into()
    }

    /// Reads the answer to `CLUSTER SLOTS`. Unreadable parts are ignored.
    pub(super) fn update(&self, answer: &Value) {
        let Value::Array(ranges) = answer else { return };
        let mut names = self.node_ids.lock();
        for range in ranges {
            let Some((first, last, name)) = parse_slot_range(range) else { continue };
            // Masters that have left keep their numbers. A master without a free number shares one, always the same.
            let index = names.iter().position(|known| known == name).unwrap_or_else(|| {
                if names.len() == MAX_MASTERS {
                    return hash_slot(name) % MAX_MASTERS;
                }
                names.push(name.to_vec());
                names.len() - 1
            });
            for slot in self.slots.iter().take(last + 1).skip(first) {
                slot.store(index as u8, Ordering::Relaxed);
            }
        }
    }
}

/// A range of slots and the name of its master.
fn parse_slot_range(range: &Value) -> Option<(usize, usize, &[u8])> {
    let Value::Array(parts) = range else { return None };
    let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = parts.as_slice() else { return None };
    let [_, _, Value::BulkString(name), ..] = master.as_slice() else { return None };
    Some((usize::try_from(*first).ok()?, usize::try_from(*last).ok()?, name))
}

/// The slot of a hash tag (Redis cluster specification).
fn hash_slot(tag: &[u8]) -> usize {
    usize::from(crc16::State::<crc16::XMODEM>::calculate(tag)) % SLOT_COUNT
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: i64, last: i64, name: &str) -> Value {
        let bytes = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let node = |name| Value::Array(vec![bytes("127.0.0.1"), Value::Int(7000), bytes(name), Value::Array(vec![])]);
        Value::Array(vec![Value::Int(first), Value::Int(last), node(name), node("a replica")])
    }

    /// The example of the specification, and an answer of `CLUSTER KEYSLOT`.
    #[test]
    fn slots_match_cluster_keyslot() {
        assert_eq!(hash_slot(b"123456789"), 0x31c3);
        assert_eq!(hash_slot(b"foo"), 12_182);
    }

    #[test]
    fn masters_keep_their_numbers_while_slots_move() {
        let masters = SlotMasters::default();
        assert_eq!(masters.index_for_tag(b"foo"), 0);
        masters.update(&Value::Array(vec![range(0, 12_181, "one"), range(12_182, 16_383, "two")]));
        assert_eq!((masters.index_for_tag(b"bar"), masters.index_for_tag(b"foo")), (0, 1));
        masters.update(&Value::Array(vec![range(12_183, 16_383, "two"), range(0, 12_182, "one")]));
        assert_eq!((masters.index_for_tag(b"foo"), masters.index_for_tag(b"bar")), (0, 0));
        masters.update(&Value::Array(vec![range(12_182, 12_182, "three"), Value::Nil]));
        assert_eq!((masters.index_for_tag(b"foo"), masters.index_for_tag(b"bar")), (2, 0));
    }

    #[test]
    fn excess_masters_share_numbers() {
        let masters = SlotMasters::default();
        let ranges = (0..40).map(|at| range(at * 400, at * 400 + 399, &at.to_string())).collect();
        masters.update(&Value::Array(ranges));
        masters.update(&Value::Array(vec![range(-1, 99_999_999, "x"), range(16_000, 99_999_999, "y")]));
        let of_all = || (0..1000_u32).map(|tag| masters.index_for_tag(&tag.to_le_bytes())).collect::<Vec<_>>();
        assert!(of_all().iter().all(|number| *number < MAX_MASTERS));
    }
}
