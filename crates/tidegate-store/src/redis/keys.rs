//! What things are called in the server.

use std::io::Write as _;

use tidegate_core::{Key, Kind};

use crate::Reset;

/// Names under one prefix.
///
/// A key is `PREFIX{PLACE}kTAGKEY`: the place that decides on its slot in a cluster, a letter for the kind of limit, the
/// limit's tag, and of the key what the place doesn't say. All but the prefix and the letter are hexadecimal, so the last
/// brace ends the prefix, and whatever a prefix holds, no two names under different ones are the same.
#[derive(Debug)]
pub(super) struct Keys {
    prefix: Vec<u8>,
    resets: Vec<u8>,
}

impl Keys {
    pub(super) fn new(prefix: &str) -> Self {
        let resets = [prefix.as_bytes(), b"resets"].concat();
        Self { prefix: prefix.as_bytes().to_vec(), resets }
    }

    /// Where the bytes are that nodes hash keys under.
    pub(super) fn seed(&self) -> Vec<u8> {
        [self.prefix.as_slice(), b"seed"].concat()
    }

    /// The channel that resets are told on.
    pub(super) fn resets(&self) -> &[u8] {
        &self.resets
    }

    /// What a batch's operations have to share for their keys to lie in one slot.
    pub(super) fn place(affinity: u64, key: Key) -> u64 {
        if affinity == 0 { key.lo() } else { affinity }
    }

    /// Writes the name of a key's state into `name`. Another kind under the same tag is another plan's, and has a state
    /// of its own.
    pub(super) fn write(&self, affinity: u64, tag: u64, kind: &Kind, key: Key, name: &mut Vec<u8>) {
        let letter = match kind {
            Kind::Window(_) => 'w',
            Kind::Rate(_) => 'r',
            Kind::Quota(_) => 'q',
            Kind::Concurrency(_) => 'c',
            Kind::Cooldown(_) => 'g',
        };
        name.clear();
        name.extend_from_slice(&self.prefix);
        let place = Self::place(affinity, key);
        // Writing to memory doesn't fail.
        let _ = write!(name, "{{{place:016x}}}{letter}{tag:016x}{:016x}", key.hi());
        if affinity != 0 {
            let _ = write!(name, "{:016x}", key.lo());
        }
    }

    /// Reads what a script told of a reset.
    pub(super) fn reset(message: &[u8]) -> Option<Reset> {
        let (tag, rest) = message.split_first_chunk()?;
        let (hi, rest) = rest.split_first_chunk()?;
        let lo = rest.try_into().ok()?;
        Some(Reset { tag: u64::from_le_bytes(*tag), key: Key::new(u64::from_le_bytes(*hi), u64::from_le_bytes(lo)) })
    }
}
