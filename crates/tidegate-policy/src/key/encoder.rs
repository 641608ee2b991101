//! The bytes of a key, and their hash.

use std::hash::Hasher as _;

use arrayvec::ArrayVec;
use siphasher::sip128::{Hasher128 as _, SipHasher13};
use tidegate_core::Key;

use super::{DOMAIN_KEY, KeyOptions, KeyPart, KeySeed, MISSING_BY_IP_FLAG, MISSING_FLAG, PLATFORMS, values};
use crate::address::{Ipv6Prefix, PrefixBytes, counted_network};
use crate::host::bare_host;
use crate::path::NormalisedPath;
use crate::query::Query;

/// The number of [`KeyPart::Key`] in keys.
pub(super) const KEY_PART: u8 = 16;

/// Encodes a part that a call has in one usual spelling; `None` otherwise.
#[inline]
pub(super) fn encode_part(
    part: &KeyPart,
    query: &Query<'_>,
    rules: KeyOptions<'_>,
    encoder: &mut KeyEncoder,
) -> Option<()> {
    match part {
        KeyPart::ClientIp => encode_prefix(counted_network(query.ip?, rules.ipv6), encoder),
        KeyPart::Ipv6Network(length) => match counted_network(query.ip?, Ipv6Prefix::new(*length)?) {
            PrefixBytes::V4(_) => return None,
            v6 => encode_prefix(v6, encoder),
        },
        KeyPart::Key => encoder.part(KEY_PART, query.key?.as_bytes()),
        KeyPart::Platform => {
            let platform = query.platform.filter(|found| PLATFORMS.contains(found))?;
            encoder.part(17, platform.as_bytes());
        }
        KeyPart::Header(name) => {
            encoder.part(18, values::single_header_value(query.headers?, name, query.headers_are_joined)?);
        }
        KeyPart::Cookie(name) => encoder.part(19, values::single_cookie_value(query.headers?, name)?),
        KeyPart::QueryParameter(name) => {
            let value = values::single_parameter_value(query.path?, name)?;
            encoder.part(20, Some(value).filter(|value| values::has_one_charset(query.headers, value))?);
        }
        KeyPart::Method => encoder.lowercase_part(21, query.method?.as_bytes()),
        KeyPart::Host => encoder.lowercase_part(22, bare_host(query.host?).as_bytes()),
        KeyPart::Action => encoder.part(26, &[]),
        KeyPart::ClientCertificate => encoder.part(25, query.client_certificate?.as_bytes()),
        KeyPart::Path => match rules.path {
            Some(path) => encoder.part(23, path),
            None => encoder.part(23, NormalisedPath::new(query.path?, rules.quirks).as_bytes()),
        },
    }
    Some(())
}

/// The key of an address alone, equal to that of a [`KeyEncoder`].
#[inline]
pub(super) fn address_key(prefix: PrefixBytes, seed: &KeySeed) -> Key {
    // SipHash's padding: the first eight bytes, then the rest with the length in the last word's top byte.
    let (first, last) = match prefix {
        PrefixBytes::V4([a, b, c, d]) => ([DOMAIN_KEY, 4, 4, 0, 0, 0, a, b], [c, d, 0, 0, 0, 0, 0, 10]),
        PrefixBytes::V6([a, b, c, d, e, f, g, h]) => ([DOMAIN_KEY, 6, 8, 0, 0, 0, a, b], [c, d, e, f, g, h, 0, 14]),
    };
    let (k0, k1) = seed.0.keys();
    siphash_two_words(k0, k1, u64::from_le_bytes(first), u64::from_le_bytes(last))
}

/// SipHash-1-3 with 128 bits of output for a message of two padded words. It is written out so that it can be inlined,
/// and takes half the time of the general function.
#[inline]
fn siphash_two_words(k0: u64, k1: u64, first: u64, last: u64) -> Key {
    #[inline(always)]
    fn round([a, b, c, d]: &mut [u64; 4]) {
        *a = a.wrapping_add(*b);
        *c = c.wrapping_add(*d);
        *b = b.rotate_left(13) ^ *a;
        *d = d.rotate_left(16) ^ *c;
        *a = a.rotate_left(32);
        *c = c.wrapping_add(*b);
        *a = a.wrapping_add(*d);
        *b = b.rotate_left(17) ^ *c;
        *d = d.rotate_left(21) ^ *a;
        *c = c.rotate_left(32);
    }
    // SipHash's constant "somepseudorandomlygeneratedbytes", and 0xee for the long output.
    let mut state = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d ^ 0xee,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    for word in [first, last] {
        state[3] ^= word;
        round(&mut state);
        state[0] ^= word;
    }
    let mut finish = |index: usize, mark: u64| {
        state[index] ^= mark;
        for _ in 0..3 {
            round(&mut state);
        }
        state[0] ^ state[1] ^ state[2] ^ state[3]
    };
    let hi = finish(2, 0xee);
    let lo = finish(1, 0xdd);
    Key::new(hi, lo)
}

#[inline]
pub(super) fn encode_prefix(prefix: PrefixBytes, encoder: &mut KeyEncoder) {
    match prefix {
        PrefixBytes::V4(bytes) => encoder.part(4, &bytes),
        PrefixBytes::V6(bytes) => encoder.part(6, &bytes),
    }
}

/// Collects a key's bytes on the stack and hashes them at once; longer keys are streamed.
#[derive(Clone)]
pub(super) struct KeyEncoder {
    hasher: SipHasher13,
    pending: ArrayVec<u8, 96>,
    is_streaming: bool,
}

impl KeyEncoder {
    #[inline]
    pub(super) fn new(seed: &KeySeed, domain: u8) -> Self {
        let mut pending = ArrayVec::new();
        pending.push(domain);
        Self { hasher: seed.0, pending, is_streaming: false }
    }

    #[inline]
    pub(super) fn write(&mut self, bytes: &[u8]) {
        if self.pending.try_extend_from_slice(bytes).is_err() {
            self.hasher.write(&self.pending);
            self.pending.clear();
            self.is_streaming = true;
            if self.pending.try_extend_from_slice(bytes).is_err() {
                self.hasher.write(bytes);
            }
        }
    }

    #[inline]
    pub(super) fn part_header(&mut self, tag: u8, length: usize) {
        let mut head = [tag, 0, 0, 0, 0];
        head[1..].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
        self.write(&head);
    }

    #[inline]
    pub(super) fn part(&mut self, tag: u8, bytes: &[u8]) {
        self.part_header(tag, bytes.len());
        self.write(bytes);
    }

    pub(super) fn lowercase_part(&mut self, tag: u8, bytes: &[u8]) {
        self.part_header(tag, bytes.len());
        for byte in bytes {
            self.write(&[byte.to_ascii_lowercase()]);
        }
    }

    pub(super) fn with_part(mut self, tag: u8, bytes: &[u8]) -> Self {
        self.part(tag, bytes);
        self
    }

    pub(super) fn missing_part(&mut self, tag: u8, instead: Option<PrefixBytes>) {
        match instead {
            None => self.write(&[tag | MISSING_FLAG]),
            Some(prefix) => {
                self.write(&[tag | MISSING_BY_IP_FLAG]);
                encode_prefix(prefix, self);
            }
        }
    }

    #[inline]
    pub(super) fn finish(mut self) -> Key {
        let hash = if self.is_streaming {
            self.hasher.write(&self.pending);
            self.hasher.finish128()
        } else {
            self.hasher.hash(&self.pending)
        };
        Key::new(hash.h1, hash.h2)
    }
}
