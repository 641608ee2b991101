//! The names of keys in the server.

use tidegate_core::{Key, LimitKind};

use crate::KeyReset;

/// The letters of kinds, by their number.
const KIND_LETTERS: &[u8; 6] = b"wrqcgp";

/// Names under one prefix.
///
/// A key is `PREFIX{HASHTAG}kTAGKEY`: the hash tag, which decides its slot in a cluster; a letter for the kind of
/// limit; the limit's tag; and the part of the key that the hash tag lacks. All but the prefix and the letter are
/// digits of base 64. So names under different prefixes are never equal. Scripts handle names of up to 64 bytes faster;
/// with a prefix of up to 17 bytes, these are.
#[derive(Debug)]
pub(super) struct KeyNames {
    prefix: Vec<u8>,
    reset_channel: Vec<u8>,
}

impl KeyNames {
    pub(super) fn new(prefix: &str) -> Self {
        let resets = [prefix.as_bytes(), b"resets"].concat();
        Self { prefix: prefix.as_bytes().to_vec(), reset_channel: resets }
    }

    /// The name of the seed under which nodes hash keys.
    pub(super) fn seed_name(&self) -> Vec<u8> {
        [self.prefix.as_slice(), b"seed"].concat()
    }

    /// The name of the hash of nodes' announcements.
    pub(super) fn nodes_name(&self) -> Vec<u8> {
        [self.prefix.as_slice(), b"nodes"].concat()
    }

    pub(super) fn reset_channel(&self) -> &[u8] {
        &self.reset_channel
    }

    /// The value that a batch's operations must share so that their keys are in one slot.
    pub(super) fn slot_affinity(affinity: u64, key: Key) -> u64 {
        if affinity == 0 { key.lo() } else { affinity }
    }

    /// The hash tag by which a cluster finds the slot of a key.
    pub(super) fn hash_tag(affinity: u64, key: Key) -> [u8; 11] {
        base64_digits(Self::slot_affinity(affinity, key))
    }

    /// Appends the name of a key's state to `name`. Kinds under the same tag have states of their own.
    pub(super) fn append_name(&self, affinity: u64, tag: u64, kind: &LimitKind, key: Key, name: &mut Vec<u8>) {
        let letter = KIND_LETTERS[usize::from(kind.id() - 1)];
        name.extend_from_slice(&self.prefix);
        name.push(b'{');
        name.extend_from_slice(&Self::hash_tag(affinity, key));
        name.extend_from_slice(&[b'}', letter]);
        name.extend_from_slice(&base64_digits(tag));
        name.extend_from_slice(&base64_digits(key.hi()));
        if affinity != 0 {
            name.extend_from_slice(&base64_digits(key.lo()));
        }
    }

    /// Appends the name of the reservations of the state whose name begins at `start`. No state has it: it is longer. An
    /// `r` at its end names the reservations of an earlier form, which are never read.
    pub(super) fn append_queue_name(start: usize, names: &mut Vec<u8>) {
        names.extend_from_within(start..);
        names.push(b'q');
    }

    /// Parses a script's message about a reset.
    pub(super) fn parse_reset(message: &[u8]) -> Option<KeyReset> {
        let (tag, rest) = message.split_first_chunk()?;
        let (hi, rest) = rest.split_first_chunk()?;
        let lo = rest.try_into().ok()?;
        Some(KeyReset { tag: u64::from_le_bytes(*tag), key: Key::new(u64::from_le_bytes(*hi), u64::from_le_bytes(lo)) })
    }
}

/// Eleven digits of base 64 (RFC 4648 §5), the highest first.
fn base64_digits(number: u64) -> [u8; 11] {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut digits = [0; 11];
    for (index, digit) in digits.iter_mut().rev().enumerate() {
        *digit = DIGITS[(number >> (6 * index)) as usize & 63];
    }
    digits
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::{Rate, Span};

    #[test]
    fn key_names_encode_slot_limit_and_key() {
        let keys = KeyNames::new("gate:");
        let kind = LimitKind::Rate(Rate::new(1, Span::from_secs(1), 1).unwrap());
        let name = |affinity| {
            let mut name = Vec::new();
            keys.append_name(affinity, 0xfeed, &kind, Key::new(0x12, 0xabcd_ef01_2345_6789), &mut name);
            String::from_utf8(name).unwrap()
        };
        assert_eq!(name(0), "gate:{KvN7wEjRWeJ}rAAAAAAAAP7tAAAAAAAAAAS");
        assert_eq!(name(7), "gate:{AAAAAAAAAAH}rAAAAAAAAP7tAAAAAAAAAASKvN7wEjRWeJ");
    }

    #[test]
    fn only_valid_reset_messages_are_parsed() {
        let message = [7_u64, 1, u64::MAX].map(u64::to_le_bytes).concat();
        assert_eq!(KeyNames::parse_reset(&message), Some(KeyReset { tag: 7, key: Key::new(1, u64::MAX) }));
        assert_eq!(KeyNames::parse_reset(&message[1..]), None);
        assert_eq!(KeyNames::parse_reset(&[message.as_slice(), b"x"].concat()), None);
    }
}
