//! What is counted together: key parts, and how they become 128 bits.

use std::fmt;
use std::hash::Hasher as _;
use std::net::{IpAddr, Ipv6Addr};

use arrayvec::ArrayVec;
use http::header::{COOKIE, HeaderName};
use siphasher::sip128::{Hasher128 as _, SipHasher13};
use tidegate_core::{Key, Kind};

use crate::address::{PrefixBytes, network_of, parent_of};
use crate::path::{Normalised, PathQuirks};
use crate::query::Query;
use crate::several::PathError;

/// The platforms that the key part `platform` knows.
pub const PLATFORMS: [&str; 4] = ["web", "mobile", "api", "admin"];

/// The most parts in one key.
pub(crate) const MAX_PARTS: usize = 8;

/// One thing that calls are counted by. A key is a list of them: `key = ["client_ip", "header:x-tenant"]`.
///
/// Parts that a client chooses freely (`header:`, `cookie:`, `query:`) give each invented value a count of its own;
/// [`inbound.global`](crate::settings) is there to bound a client that invents many. Where a request has such a part
/// twice, the first one counts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KeyPart {
    /// `client_ip`: the client's IPv4 address, or the /64 that its IPv6 address is in.
    ClientIp,
    /// `key`: the `key` of a decision-API query.
    Key,
    /// `platform`: web, mobile, api or admin, as a decision-API query says.
    Platform,
    /// `header:NAME`: the first header of this name.
    Header(HeaderName),
    /// `cookie:NAME`: the first cookie of this name.
    Cookie(String),
    /// `query:NAME`: the first parameter of this name in the query string, percent-decoded.
    QueryParameter(String),
    /// `method`: the request's method.
    Method,
    /// `host`: the request's host, in lower case and without its port.
    Host,
    /// `path`: the request's path without its query string. Spellings that any server reads alike share a count; a path
    /// that can be read as several counts as each of them.
    Path,
}

impl KeyPart {
    /// The plain part names; those with a colon want a name behind it.
    pub(crate) const WORDS: [&'static str; 9] =
        ["client_ip", "key", "platform", "header:NAME", "cookie:NAME", "query:NAME", "method", "host", "path"];

    /// What an API query calls the part: `ip` for `client_ip`, otherwise its own word.
    pub fn field(&self) -> String {
        match self {
            Self::ClientIp => "ip".to_owned(),
            other => other.to_string(),
        }
    }

    /// Whether a plain HTTP request carries the part, so that a proxy or forward-auth can fill it. `key` and
    /// `platform` come only from the decision API or from a Rust program.
    pub fn is_in_requests(&self) -> bool {
        !matches!(self, Self::Key | Self::Platform)
    }
}

impl fmt::Display for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ClientIp => f.write_str("client_ip"),
            Self::Key => f.write_str("key"),
            Self::Platform => f.write_str("platform"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Cookie(name) => write!(f, "cookie:{name}"),
            Self::QueryParameter(name) => write!(f, "query:{name}"),
            Self::Method => f.write_str("method"),
            Self::Host => f.write_str("host"),
            Self::Path => f.write_str("path"),
        }
    }
}

/// A call lacks something that a limit counts by, or has it wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// A part is missing.
    #[error(transparent)]
    Missing(#[from] MissingPart),
    /// The platform is none of [`PLATFORMS`].
    #[error(transparent)]
    Platform(#[from] UnknownPlatform),
    /// It can't be said what a call with this path meets.
    #[error(transparent)]
    Path(#[from] PathError),
}

/// A call lacks something that a limit counts by.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{part}` is missing: the limit `{limit}` counts by it")]
pub struct MissingPart {
    /// The field of an API query that would fill it: `ip`, `key`, `platform`, `header:NAME` …
    pub part: String,
    /// The limit that needs it.
    pub limit: String,
}

/// A call's platform is none of [`PLATFORMS`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown platform {found:?}: expected web, mobile, api or admin")]
pub struct UnknownPlatform {
    /// What the call said, cut to 64 characters.
    pub found: String,
}

/// The secret that key parts are hashed under (SipHash-1-3 with 128 bits of output, by Aumasson and Bernstein), so
/// that nobody outside can choose keys that collide. Random for each process when state is its own; shared and kept
/// when state is shared. `Debug` doesn't print it.
#[derive(Clone)]
pub struct KeySeed(SipHasher13);

impl KeySeed {
    /// A seed from 16 bytes, which should be random: `KeySeed::new(rand::random())`.
    pub fn new(bytes: [u8; 16]) -> Self {
        Self(SipHasher13::new_with_key(&bytes))
    }

    /// The seed that a secret of any length means.
    pub fn of_secret(secret: &[u8]) -> Self {
        let mut hasher = SipHasher13::new();
        hasher.write(secret);
        Self::new(hasher.finish128().as_bytes())
    }

    /// What a provider's limits count by.
    pub(crate) fn provider(&self, provider: &str) -> Key {
        self.outbound(provider).finish()
    }

    /// What the limits of the provider's credential at this place count by. It begins as the provider's key does, so that
    /// a store that is divided by keys' first bits finds what a call changes in one place.
    pub(crate) fn credential(&self, provider: &str, credential: usize) -> Key {
        /// The bits in common; more would crowd a thousand credentials together.
        const COMMON: u64 = 0xff << 56;
        let mut encoder = self.outbound(provider);
        encoder.part(31, &(credential as u64).to_le_bytes());
        let (own, whole) = (encoder.finish(), self.provider(provider));
        Key::new(own.hi(), whole.lo() & COMMON | own.lo() & !COMMON)
    }

    /// What a shared pacer's state is kept under.
    pub fn pacer(&self, name: &str) -> Key {
        let mut encoder = Encoder::new(self, DOMAIN_PACER);
        encoder.part(32, name.as_bytes());
        encoder.finish()
    }

    fn outbound(&self, provider: &str) -> Encoder {
        let mut encoder = Encoder::new(self, DOMAIN_OUTBOUND);
        encoder.part(30, provider.as_bytes());
        encoder
    }
}

/// What a limit is called in a store that outlives the plan ([`Limit::tagged`](tidegate_core::Limit::tagged)), of what
/// it is part of and its name there. A limit of another kind is another limit: nothing of what the first remembered would
/// mean anything to it.
pub fn limit_tag(direction: &str, name: &str, kind: &Kind) -> u64 {
    let kind = match kind {
        Kind::Window(_) => 1,
        Kind::Rate(_) => 2,
        Kind::Quota(_) => 3,
        Kind::Concurrency(_) => 4,
        Kind::Cooldown(_) => 5,
        Kind::Pace(_) => 6,
    };
    let mut encoder = Encoder::new(&KeySeed::new([0; 16]), DOMAIN_TAG);
    encoder.part(kind, direction.as_bytes());
    encoder.part(kind, name.as_bytes());
    encoder.finish().lo()
}

impl fmt::Debug for KeySeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeySeed(…)")
    }
}

/// The parts of one key, in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Recipe(Box<[KeyPart]>);

/// Why a recipe can't be followed.
pub(crate) enum Lacking<'r> {
    Part(&'r KeyPart),
    Platform(String),
}

const DOMAIN_KEY: u8 = 0;
const DOMAIN_PARENT: u8 = 1;
const DOMAIN_OUTBOUND: u8 = 2;
const DOMAIN_TAG: u8 = 3;
const DOMAIN_PACER: u8 = 4;
const ABSENT: u8 = 0x80;

impl Recipe {
    pub(crate) fn new(parts: Vec<KeyPart>) -> Self {
        Self(parts.into())
    }

    pub(crate) fn parts(&self) -> &[KeyPart] {
        &self.0
    }

    /// The key of a call. Each part goes in with a tag and its length before it, so no two lists of parts read the
    /// same.
    #[inline]
    pub(crate) fn key(&self, query: &Query<'_>, quirks: PathQuirks, seed: &KeySeed) -> Result<Key, Lacking<'_>> {
        // What most limits count by, without the detour over a buffer.
        if let [KeyPart::ClientIp] = &*self.0
            && let Some(ip) = query.ip
        {
            return Ok(address_key(network_of(ip), seed));
        }
        let mut encoder = Encoder::new(seed, DOMAIN_KEY);
        for part in &self.0 {
            encode(part, query, quirks, &mut encoder)?;
        }
        Ok(encoder.finish())
    }

    /// The key that a call shares with its whole neighbourhood: the /24 or /48 around its address if the recipe has
    /// one, otherwise everybody.
    pub(crate) fn parent(&self, query: &Query<'_>, seed: &KeySeed) -> Key {
        let mut encoder = Encoder::new(seed, DOMAIN_PARENT);
        if self.0.contains(&KeyPart::ClientIp)
            && let Some(ip) = query.ip
        {
            encode_prefix(parent_of(ip), &mut encoder);
        }
        encoder.finish()
    }
}

#[inline]
fn encode<'r>(
    part: &'r KeyPart,
    query: &Query<'_>,
    quirks: PathQuirks,
    encoder: &mut Encoder,
) -> Result<(), Lacking<'r>> {
    let lacking = || Lacking::Part(part);
    // A request that lacks a part which requests may lack is counted with all others that lack it; a query without
    // request headers comes from somebody who forgot the field and is told so.
    let is_request = query.headers.is_some();
    match part {
        KeyPart::ClientIp => encode_ip(query.ip.ok_or_else(lacking)?, encoder),
        KeyPart::Key => encoder.part(16, query.key.ok_or_else(lacking)?.as_bytes()),
        KeyPart::Platform => {
            let found = query.platform.ok_or_else(lacking)?;
            if !PLATFORMS.contains(&found) {
                return Err(Lacking::Platform(found.chars().take(64).collect()));
            }
            encoder.part(17, found.as_bytes());
        }
        KeyPart::Header(name) => match query.headers.ok_or_else(lacking)?.get(name) {
            Some(value) => encoder.part(18, value.as_bytes()),
            None => encoder.absent(18),
        },
        KeyPart::Cookie(name) => match cookie(query, name).ok_or_else(lacking)? {
            Some(value) => encoder.part(19, value),
            None => encoder.absent(19),
        },
        KeyPart::QueryParameter(name) => match query.path.and_then(|path| parameter(path, name)) {
            Some(value) => encoder.decoded(20, value),
            None if is_request => encoder.absent(20),
            None => return Err(lacking()),
        },
        KeyPart::Method => encoder.part(21, query.method.ok_or_else(lacking)?.as_bytes()),
        KeyPart::Host => match query.host {
            Some(host) => encoder.lowered(22, bare_host(host).as_bytes()),
            None if is_request => encoder.absent(22),
            None => return Err(lacking()),
        },
        KeyPart::Path => {
            let path = query.path.ok_or_else(lacking)?;
            encoder.part(23, Normalised::new(path, quirks).as_bytes());
        }
    }
    Ok(())
}

/// The key of an address alone; the same that an [`Encoder`] gives.
#[inline]
fn address_key(prefix: PrefixBytes, seed: &KeySeed) -> Key {
    // Eight bytes, the rest, and in the last word's top byte the length, as SipHash pads.
    let (first, last) = match prefix {
        PrefixBytes::V4([a, b, c, d]) => ([DOMAIN_KEY, 4, 4, 0, 0, 0, a, b], [c, d, 0, 0, 0, 0, 0, 10]),
        PrefixBytes::V6([a, b, c, d, e, f, g, h]) => ([DOMAIN_KEY, 6, 8, 0, 0, 0, a, b], [c, d, e, f, g, h, 0, 14]),
    };
    let (k0, k1) = seed.0.keys();
    sip_two_words(k0, k1, u64::from_le_bytes(first), u64::from_le_bytes(last))
}

/// SipHash-1-3 with 128 bits of output for a message of two padded words, written out so that it can be inlined: half
/// of the time of the general way.
#[inline]
fn sip_two_words(k0: u64, k1: u64, first: u64, last: u64) -> Key {
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
    // "somepseudorandomlygeneratedbytes", and 0xee for the long output.
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
fn encode_ip(ip: IpAddr, encoder: &mut Encoder) {
    encode_prefix(network_of(ip), encoder);
}

#[inline]
fn encode_prefix(prefix: PrefixBytes, encoder: &mut Encoder) {
    match prefix {
        PrefixBytes::V4(bytes) => encoder.part(4, &bytes),
        PrefixBytes::V6(bytes) => encoder.part(6, &bytes),
    }
}

/// The value of the first cookie of this name; `None` outside when there are no headers to look in.
fn cookie<'q>(query: &Query<'q>, name: &str) -> Option<Option<&'q [u8]>> {
    let headers = query.headers?;
    let pairs = headers.get_all(COOKIE).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    for pair in pairs {
        let pair = pair.trim_ascii();
        if let Some(equals) = pair.iter().position(|byte| *byte == b'=')
            && pair[..equals].trim_ascii() == name.as_bytes()
        {
            return Some(Some(pair[equals + 1..].trim_ascii()));
        }
    }
    Some(None)
}

/// The raw value of the first parameter of this name in the query string; a name counts in its decoded form.
fn parameter<'q>(path: &'q str, name: &str) -> Option<&'q str> {
    let (_, query) = path.split_once('?')?;
    let query = query.split_once('#').map_or(query, |(query, _)| query);
    query.split('&').find_map(|pair| {
        let (found, value) = pair.split_once('=').unwrap_or((pair, ""));
        form_decoded(found).eq(name.bytes()).then_some(value)
    })
}

/// The bytes that a query string's piece stands for: `+` is a space, `%41` is `A`, what is no escape stays.
fn form_decoded(text: &str) -> impl Iterator<Item = u8> + '_ {
    let bytes = text.as_bytes();
    let mut at = 0;
    std::iter::from_fn(move || {
        let byte = *bytes.get(at)?;
        if let Some(decoded) = crate::path::escape(bytes, at) {
            at += 3;
            return Some(decoded);
        }
        at += 1;
        Some(if byte == b'+' { b' ' } else { byte })
    })
}

/// A host without its port and without the dot that may end it. What no host should have behind it is left out as well:
/// servers end a host at its first colon.
pub(crate) fn bare_host(host: &str) -> &str {
    let host = match host.find(if host.starts_with('[') { ']' } else { ':' }) {
        Some(bracket) if host.starts_with('[') => &host[..=bracket],
        Some(colon) if host[colon + 1..].contains(':') && host.parse::<Ipv6Addr>().is_ok() => host,
        Some(colon) => &host[..colon],
        None => host,
    };
    host.strip_suffix('.').unwrap_or(host)
}

/// Whether this is a host and perhaps a port, as `Host` and `:authority` have it (RFC 3986 §3.2.2): letters, digits, `-`,
/// `.`, `_` and `~`, or an IPv6 address in brackets; then perhaps a colon and any number of digits. Empty is one: it says
/// that the client has no name for the server. What else the RFC allows, percent signs above all, no host on the Internet
/// has, and servers read it in different ways.
#[inline]
pub fn is_host(host: &[u8]) -> bool {
    let end = match host {
        [b'[', rest @ ..] => {
            let inner = rest.iter().position(|byte| *byte == b']').unwrap_or(0);
            let is_zone = rest[..inner].iter().all(|byte| is_in_host(*byte) || matches!(byte, b':' | b'%'));
            if inner == 0 || !is_zone {
                return false;
            }
            inner + 2
        }
        _ => host.iter().position(|byte| !is_in_host(*byte)).unwrap_or(host.len()),
    };
    match &host[end..] {
        [] => true,
        [b':', port @ ..] => end > 0 && port.iter().all(u8::is_ascii_digit),
        _ => false,
    }
}

#[inline]
fn is_in_host(byte: u8) -> bool {
    const TABLE: [bool; 256] = {
        let mut table = [false; 256];
        let mut byte = 0;
        while byte < 256 {
            table[byte] = (byte as u8).is_ascii_alphanumeric() || matches!(byte as u8, b'-' | b'.' | b'_' | b'~');
            byte += 1;
        }
        table
    };
    TABLE[usize::from(byte)]
}

/// Collects a key's bytes on the stack and hashes them in one go; longer ones are streamed.
struct Encoder {
    hasher: SipHasher13,
    pending: ArrayVec<u8, 96>,
    spilled: bool,
}

impl Encoder {
    #[inline]
    fn new(seed: &KeySeed, domain: u8) -> Self {
        let mut pending = ArrayVec::new();
        pending.push(domain);
        Self { hasher: seed.0, pending, spilled: false }
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        if self.pending.try_extend_from_slice(bytes).is_err() {
            self.hasher.write(&self.pending);
            self.pending.clear();
            self.spilled = true;
            if self.pending.try_extend_from_slice(bytes).is_err() {
                self.hasher.write(bytes);
            }
        }
    }

    #[inline]
    fn head(&mut self, tag: u8, length: usize) {
        let mut head = [tag, 0, 0, 0, 0];
        head[1..].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
        self.write(&head);
    }

    #[inline]
    fn part(&mut self, tag: u8, bytes: &[u8]) {
        self.head(tag, bytes.len());
        self.write(bytes);
    }

    fn lowered(&mut self, tag: u8, bytes: &[u8]) {
        self.head(tag, bytes.len());
        for byte in bytes {
            self.write(&[byte.to_ascii_lowercase()]);
        }
    }

    fn decoded(&mut self, tag: u8, text: &str) {
        self.head(tag, form_decoded(text).count());
        for byte in form_decoded(text) {
            self.write(&[byte]);
        }
    }

    fn absent(&mut self, tag: u8) {
        self.write(&[tag | ABSENT]);
    }

    #[inline]
    fn finish(mut self) -> Key {
        let hash = if self.spilled {
            self.hasher.write(&self.pending);
            self.hasher.finish128()
        } else {
            self.hasher.hash(&self.pending)
        };
        Key::new(hash.h1, hash.h2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_ends_at_its_port() {
        for (host, bare) in [
            ("example.org", "example.org"),
            ("example.org.", "example.org"),
            ("example.org:80", "example.org"),
            ("example.org.:80", "example.org"),
            ("example.org:", "example.org"),
            ("example.org:80:80", "example.org"),
            ("example.org::", "example.org"),
            ("example.org:80:x", "example.org"),
            ("[::1]", "[::1]"),
            ("[::1]:80", "[::1]"),
            ("[::1]x:80", "[::1]"),
            ("::1", "::1"),
            ("", ""),
        ] {
            assert_eq!(bare_host(host), bare, "{host}");
        }
    }

    #[test]
    fn hosts_are_names_or_addresses_with_a_port_at_most() {
        for host in [
            "",
            "a",
            "example.org",
            "example.org.",
            "a-b_c.~d:8080",
            "example.org:",
            "10.0.0.1:80",
            "[::1]",
            "[::1]:80",
            "[fe80::1%25eth0]:",
            "a:99999",
        ] {
            assert!(is_host(host.as_bytes()), "{host}");
        }
        for host in [
            "example.org:80:80",
            "example.org::",
            "example.org:80:x",
            "example.org:80:",
            ":80",
            ":",
            "example.org:x",
            "example.org:-1",
            "::1",
            "[::1",
            "[::1]x",
            "[]",
            "[]:80",
            "a[b]",
            "ex%61mple.org",
            "a,b",
            "a b",
            "a/b",
            "u@a",
            "example.org\\",
            "a;b",
            "caf\u{e9}",
        ] {
            assert!(!is_host(host.as_bytes()), "{host}");
        }
    }

    #[test]
    fn the_short_way_gives_the_same_key() {
        for number in 0..1000_u128 {
            let bits = number.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
            let seed = KeySeed::new(bits.swap_bytes().to_le_bytes());
            let v6 = IpAddr::V6(bits.into());
            let prefix = network_of(if number % 2 == 0 { v6 } else { IpAddr::V4(((bits >> 96) as u32).into()) });
            let mut encoder = Encoder::new(&seed, DOMAIN_KEY);
            encode_prefix(prefix, &mut encoder);
            assert_eq!(address_key(prefix, &seed), encoder.finish());
        }
    }

    #[test]
    fn long_keys_are_streamed_to_the_same_hash() {
        let seed = KeySeed::new([3; 16]);
        let text = "x".repeat(1000);
        let mut whole = vec![DOMAIN_KEY, 16];
        whole.extend(1000_u32.to_le_bytes());
        whole.extend(text.as_bytes());
        let hash = seed.0.hash(&whole);
        let recipe = Recipe::new(vec![KeyPart::Key]);
        let query = Query { key: Some(&text), ..Query::default() };
        let key = recipe.key(&query, PathQuirks::default(), &seed).unwrap_or_default();
        assert_eq!(key, Key::new(hash.h1, hash.h2));
    }
}
