//! Keys: the parts that calls are counted by, and their hashes of 128 bits.

mod cookies;
mod error;
mod values;

use std::fmt;
use std::hash::Hasher as _;
use std::net::IpAddr;

use arrayvec::ArrayVec;
use http::header::HeaderName;
use siphasher::sip128::{Hasher128 as _, SipHasher13};
use tidegate_core::{Key, LimitKind, MAX_OPS, ShareLevel};

pub use error::{KeyError, MissingPartError, UncountableError, UnknownPlatformError};

use self::values::{PartValues, TooManyValuesError};
use crate::address::{Ipv6Prefix, PrefixBytes, canonical_ip, counted_network, shared_network};
use crate::host::bare_host;
use crate::path::{NormalisedPath, PathQuirks};
use crate::query::Query;

/// The platforms that the key part `platform` knows.
pub const PLATFORMS: [&str; 4] = ["web", "mobile", "api", "admin"];

/// The most parts in one key.
pub(crate) const MAX_PARTS: usize = 8;

/// One property that calls are counted by. A key is a list of them: `key = ["client_ip", "header:x-tenant"]`.
///
/// Clients choose the values of some parts freely (`header:`, `cookie:`, `query:`), and each value has a count of its
/// own. [`inbound.global`](crate::settings) bounds a client that invents many values. Spellings of one value (quotes,
/// backslashes, escapes) count as one. If a request has a part several times, or spelt so that servers read different
/// values, each limit on that part counts the request under each value, all or nothing. With more than four distinct
/// values the result is an [`UncountableError`]. [`OnMissing`] is the rule for requests without the part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KeyPart {
    /// `client_ip`: the client's IPv4 address, or the /64 of its IPv6 address; `inbound.ipv6_prefix` sets another
    /// length.
    ClientIp,
    /// `ipv6/LENGTH`: the network of this length around the client's IPv6 address, such as `ipv6/48`. Clients with
    /// IPv4 addresses lack it.
    Ipv6Network(u8),
    /// `key`: the `key` of a decision-API query.
    Key,
    /// `platform`: web, mobile, api or admin, as given by a decision-API query.
    Platform,
    /// `header:NAME`: the header of this name; if it has several lines, each of them and all of them joined.
    Header(HeaderName),
    /// `cookie:NAME`: the cookie of this name, without quotes and escapes.
    Cookie(String),
    /// `query:NAME`: the parameter of this name in the query string, without escapes.
    QueryParameter(String),
    /// `method`: the request's method.
    Method,
    /// `host`: the request's host, in lower case and without its port.
    Host,
    /// `path`: the request's path without its query string. Spellings that at least one server reads alike share a
    /// count; a path with several readings counts as each of them.
    Path,
}

impl KeyPart {
    /// The names of the parts; capitals stand for a value.
    pub(crate) const NAMES: [&'static str; 10] = [
        "client_ip",
        "ipv6/LENGTH",
        "key",
        "platform",
        "header:NAME",
        "cookie:NAME",
        "query:NAME",
        "method",
        "host",
        "path",
    ];

    /// The part's field in an API query: `ip` for addresses and their networks, otherwise the part's own name.
    pub fn query_field(&self) -> String {
        match self {
            Self::ClientIp | Self::Ipv6Network(_) => "ip".to_owned(),
            other => other.to_string(),
        }
    }

    /// True if a plain HTTP request carries the part, so that a proxy or forward-auth can fill it. `key` and
    /// `platform` come only from the decision API or from a Rust program.
    pub fn is_in_requests(&self) -> bool {
        !matches!(self, Self::Key | Self::Platform)
    }

    /// True if a request lacks the part when its log entry doesn't record it.
    fn is_absent_if_not_logged(&self) -> bool {
        matches!(self, Self::QueryParameter(_) | Self::Ipv6Network(_))
    }

    /// True if a request may lack the part, so that [`OnMissing`] decides.
    pub fn may_be_missing(&self) -> bool {
        let named = matches!(self, Self::Header(_) | Self::Cookie(_) | Self::QueryParameter(_));
        named || matches!(self, Self::Ipv6Network(_) | Self::Host)
    }
}

/// The handling of requests that lack a part of a limit's key: `missing`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnMissing {
    /// `share`: all of them share one count.
    Share,
    /// `by_ip`, the default: each client address has a count of its own, apart from the counts of requests with the
    /// part. Requests without an address share one. So do logged requests without a recorded header, cookie or host.
    #[default]
    ByIp,
    /// `refuse`: they are refused with [`UncountableError`].
    Refuse,
    /// `skip`: the limit doesn't count them.
    Skip,
}

impl fmt::Display for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ClientIp => f.write_str("client_ip"),
            Self::Ipv6Network(length) => write!(f, "ipv6/{length}"),
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

/// The secret under which key parts are hashed (SipHash-1-3 with 128 bits of output, by Aumasson and Bernstein), so
/// that no outsider can choose keys that collide. It is random for each process if the state is the process's own;
/// it is shared and kept if the state is shared. `Debug` doesn't print it.
#[derive(Clone)]
pub struct KeySeed(SipHasher13);

impl KeySeed {
    /// Creates a seed from 16 bytes, which should be random: `KeySeed::new(rand::random())`.
    pub fn new(bytes: [u8; 16]) -> Self {
        Self(SipHasher13::new_with_key(&bytes))
    }

    /// Derives the seed from a secret of any length.
    pub fn from_secret(secret: &[u8]) -> Self {
        let mut hasher = SipHasher13::new();
        hasher.write(secret);
        Self::new(hasher.finish128().as_bytes())
    }

    /// The key of a provider's limits.
    pub(crate) fn provider_key(&self, provider: &str) -> Key {
        self.outbound_encoder(provider).finish()
    }

    /// The key of the limits on the provider's credential at this index. It begins like the provider's key. So a store
    /// that is divided by the keys' first bits has all that one call changes in one place.
    pub(crate) fn credential_key(&self, provider: &str, credential: usize) -> Key {
        /// The bits in common. With more of them, the keys of a thousand credentials would be too close together.
        const COMMON: u64 = 0xff << 56;
        let mut encoder = self.outbound_encoder(provider);
        encoder.part(31, &(credential as u64).to_le_bytes());
        let (own, whole) = (encoder.finish(), self.provider_key(provider));
        Key::new(own.hi(), whole.lo() & COMMON | own.lo() & !COMMON)
    }

    /// The key of a shared pacer's state.
    pub fn pacer_key(&self, name: &str) -> Key {
        let mut encoder = KeyEncoder::new(self, DOMAIN_PACER);
        encoder.part(32, name.as_bytes());
        encoder.finish()
    }

    fn outbound_encoder(&self, provider: &str) -> KeyEncoder {
        let mut encoder = KeyEncoder::new(self, DOMAIN_OUTBOUND);
        encoder.part(30, provider.as_bytes());
        encoder
    }
}

/// The tag of a limit in a store that outlives the plan ([`Limit::with_tag`](tidegate_core::Limit::with_tag)), from the
/// direction that it is part of, its name there and its kind. A limit of another kind has another tag, because it can't
/// read the first one's state.
pub fn limit_tag(direction: &str, name: &str, kind: &LimitKind) -> u64 {
    let mut encoder = KeyEncoder::new(&KeySeed::new([0; 16]), DOMAIN_TAG);
    encoder.part(kind.id(), direction.as_bytes());
    encoder.part(kind.id(), name.as_bytes());
    encoder.finish().lo()
}

impl fmt::Debug for KeySeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeySeed(…)")
    }
}

/// The parts of one key, in order, and the handling of calls that lack one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KeyTemplate {
    parts: Box<[KeyPart]>,
    on_missing: OnMissing,
}

/// The rules for reading addresses and paths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyOptions {
    pub(crate) quirks: PathQuirks,
    pub(crate) ipv6: Ipv6Prefix,
}

/// The reason why a template gives no key.
pub(crate) enum KeyTemplateError<'r> {
    Part(&'r KeyPart),
    Platform(String),
    Uncountable(UncountableError),
}

const DOMAIN_KEY: u8 = 0;
const DOMAIN_PARENT: u8 = 1;
const DOMAIN_OUTBOUND: u8 = 2;
const DOMAIN_TAG: u8 = 3;
const DOMAIN_PACER: u8 = 4;
/// Marks a missing part.
const MISSING_FLAG: u8 = 0x80;
/// Marks a missing part; the client's address follows in its place.
const MISSING_BY_IP_FLAG: u8 = 0xc0;

impl KeyTemplate {
    pub(crate) fn new(parts: Vec<KeyPart>, missing: OnMissing) -> Self {
        // If no part can be missing, the word has no effect; the default lets equal templates be hashed once.
        let missing = if parts.iter().any(KeyPart::may_be_missing) { missing } else { OnMissing::default() };
        Self { parts: parts.into(), on_missing: missing }
    }

    pub(crate) fn parts(&self) -> &[KeyPart] {
        &self.parts
    }

    pub(crate) fn on_missing(&self) -> OnMissing {
        self.on_missing
    }

    /// The key of a call. Each part follows its tag and its length, so no two lists of parts give the same bytes.
    /// `None` if a part is missing, has several values or is spelt unusually; [`KeyTemplate::keys`] then decides.
    #[inline]
    pub(crate) fn key(&self, query: &Query<'_>, rules: KeyOptions, seed: &KeySeed) -> Option<Key> {
        // Most limits count by address alone, which needs no buffer.
        if let [KeyPart::ClientIp] = &*self.parts
            && let Some(ip) = query.ip
        {
            return Some(address_key(counted_network(ip, rules.ipv6), seed));
        }
        let mut encoder = KeyEncoder::new(seed, DOMAIN_KEY);
        for part in &self.parts {
            encode_part(part, query, rules, &mut encoder)?;
        }
        Some(encoder.finish())
    }

    /// All keys of a call: one for each combination of its parts' values; none if the limit doesn't count the call.
    #[cold]
    pub(crate) fn keys(
        &self,
        query: &Query<'_>,
        rules: KeyOptions,
        seed: &KeySeed,
    ) -> Result<ArrayVec<Key, MAX_OPS>, KeyTemplateError<'_>> {
        let mut encoders = ArrayVec::<KeyEncoder, MAX_OPS>::new();
        encoders.push(KeyEncoder::new(seed, DOMAIN_KEY));
        for part in &self.parts {
            match part_values(part, query)?.as_deref() {
                None => {
                    for encoder in &mut encoders {
                        encode_part(part, query, rules, encoder).ok_or_else(|| missing_part_error(part, query))?;
                    }
                }
                Some([]) => {
                    let by_ip = match self.on_missing {
                        OnMissing::Share => None,
                        OnMissing::ByIp => query.ip.filter(|_| !query.from_log || part.is_absent_if_not_logged()),
                        OnMissing::Refuse => {
                            return Err(KeyTemplateError::Uncountable(UncountableError::Missing(part.to_string())));
                        }
                        OnMissing::Skip => return Ok(ArrayVec::new()),
                    };
                    for encoder in &mut encoders {
                        encoder.missing_part(part_tag(part), by_ip.map(|ip| counted_network(ip, rules.ipv6)));
                    }
                }
                Some(values) if encoders.len() * values.len() > MAX_OPS => {
                    return Err(KeyTemplateError::Uncountable(UncountableError::TooManyOperations));
                }
                Some(values) => {
                    for encoder in std::mem::take(&mut encoders) {
                        encoders.extend(values.iter().map(|value| encoder.clone().with_part(part_tag(part), value)));
                    }
                }
            }
        }
        Ok(encoders.into_iter().map(KeyEncoder::finish).collect())
    }

    /// The key that a call shares at this level or a wider one, and the actual level. If the template has an address
    /// part, the key is that of a network around the address; otherwise all calls share it.
    pub(crate) fn shared_key(
        &self,
        share: ShareLevel,
        ip: Option<IpAddr>,
        rules: KeyOptions,
        seed: &KeySeed,
    ) -> (ShareLevel, Key) {
        let mut encoder = KeyEncoder::new(seed, DOMAIN_PARENT);
        let prefix = self.parts.iter().find_map(|part| match part {
            KeyPart::ClientIp => Some(rules.ipv6),
            KeyPart::Ipv6Network(length) => Ipv6Prefix::new(*length),
            _ => None,
        });
        let network = prefix.zip(ip).filter(|_| share < ShareLevel::All);
        if let Some((prefix, ip)) = network {
            encoder.part(33, &[share as u8]);
            encode_prefix(shared_network(ip, prefix, share), &mut encoder);
        }
        (if network.is_some() { share } else { ShareLevel::All }, encoder.finish())
    }
}

/// The error for a part that [`encode_part`] can't encode, and that is never treated as missing.
fn missing_part_error<'r>(part: &'r KeyPart, query: &Query<'_>) -> KeyTemplateError<'r> {
    match (part, query.platform) {
        (KeyPart::Platform, Some(found)) => KeyTemplateError::Platform(found.chars().take(64).collect()),
        _ => KeyTemplateError::Part(part),
    }
}

/// The values of a part that a call may lack or have several times; `None` for other parts.
fn part_values<'q, 'r>(part: &'r KeyPart, query: &Query<'q>) -> Result<Option<PartValues<'q>>, KeyTemplateError<'r>> {
    // Requests often lack a part. But a query without request headers comes from a caller that forgot the field, and
    // is an error.
    let headers = query.headers.ok_or(KeyTemplateError::Part(part));
    let too_many =
        |TooManyValuesError| KeyTemplateError::Uncountable(UncountableError::TooManyValues(part.to_string()));
    Ok(match part {
        KeyPart::Header(name) => Some(values::header_values(headers?, name).map_err(too_many)?),
        KeyPart::Cookie(name) => Some(values::cookie_values(headers?, name).map_err(too_many)?),
        KeyPart::QueryParameter(name) => {
            let values = values::parameter_values(query.path.unwrap_or_default(), name).map_err(too_many)?;
            if values.is_empty() {
                headers?;
            }
            Some(values)
        }
        KeyPart::Host if query.host.is_none() => headers.map(|_| Some(PartValues::new()))?,
        KeyPart::Ipv6Network(_)
            if matches!(canonical_ip(query.ip.ok_or(KeyTemplateError::Part(part))?), IpAddr::V4(_)) =>
        {
            Some(PartValues::new())
        }
        _ => None,
    })
}

/// The tag of a part that may be missing.
fn part_tag(part: &KeyPart) -> u8 {
    match part {
        KeyPart::Header(_) => 18,
        KeyPart::Cookie(_) => 19,
        KeyPart::QueryParameter(_) => 20,
        KeyPart::Host => 22,
        _ => 24,
    }
}

/// Encodes a part that a call has in one usual spelling; `None` otherwise.
#[inline]
fn encode_part(part: &KeyPart, query: &Query<'_>, rules: KeyOptions, encoder: &mut KeyEncoder) -> Option<()> {
    match part {
        KeyPart::ClientIp => encode_prefix(counted_network(query.ip?, rules.ipv6), encoder),
        KeyPart::Ipv6Network(length) => match counted_network(query.ip?, Ipv6Prefix::new(*length)?) {
            PrefixBytes::V4(_) => return None,
            v6 => encode_prefix(v6, encoder),
        },
        KeyPart::Key => encoder.part(16, query.key?.as_bytes()),
        KeyPart::Platform => {
            let platform = query.platform.filter(|found| PLATFORMS.contains(found))?;
            encoder.part(17, platform.as_bytes());
        }
        KeyPart::Header(name) => encoder.part(18, values::single_header_value(query.headers?, name)?),
        KeyPart::Cookie(name) => encoder.part(19, values::single_cookie_value(query.headers?, name)?),
        KeyPart::QueryParameter(name) => encoder.part(20, values::single_parameter_value(query.path?, name)?),
        KeyPart::Method => encoder.part(21, query.method?.as_bytes()),
        KeyPart::Host => encoder.lowercase_part(22, bare_host(query.host?).as_bytes()),
        KeyPart::Path => encoder.part(23, NormalisedPath::new(query.path?, rules.quirks).as_bytes()),
    }
    Some(())
}

/// The key of an address alone, equal to that of a [`KeyEncoder`].
#[inline]
fn address_key(prefix: PrefixBytes, seed: &KeySeed) -> Key {
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
fn encode_prefix(prefix: PrefixBytes, encoder: &mut KeyEncoder) {
    match prefix {
        PrefixBytes::V4(bytes) => encoder.part(4, &bytes),
        PrefixBytes::V6(bytes) => encoder.part(6, &bytes),
    }
}

/// Collects a key's bytes on the stack and hashes them at once; longer keys are streamed.
#[derive(Clone)]
struct KeyEncoder {
    hasher: SipHasher13,
    pending: ArrayVec<u8, 96>,
    is_streaming: bool,
}

impl KeyEncoder {
    #[inline]
    fn new(seed: &KeySeed, domain: u8) -> Self {
        let mut pending = ArrayVec::new();
        pending.push(domain);
        Self { hasher: seed.0, pending, is_streaming: false }
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) {
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
    fn part_header(&mut self, tag: u8, length: usize) {
        let mut head = [tag, 0, 0, 0, 0];
        head[1..].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
        self.write(&head);
    }

    #[inline]
    fn part(&mut self, tag: u8, bytes: &[u8]) {
        self.part_header(tag, bytes.len());
        self.write(bytes);
    }

    fn lowercase_part(&mut self, tag: u8, bytes: &[u8]) {
        self.part_header(tag, bytes.len());
        for byte in bytes {
            self.write(&[byte.to_ascii_lowercase()]);
        }
    }

    fn with_part(mut self, tag: u8, bytes: &[u8]) -> Self {
        self.part(tag, bytes);
        self
    }

    fn missing_part(&mut self, tag: u8, instead: Option<PrefixBytes>) {
        match instead {
            None => self.write(&[tag | MISSING_FLAG]),
            Some(prefix) => {
                self.write(&[tag | MISSING_BY_IP_FLAG]);
                encode_prefix(prefix, self);
            }
        }
    }

    #[inline]
    fn finish(mut self) -> Key {
        let hash = if self.is_streaming {
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
    fn the_fast_address_key_equals_the_encoded() {
        for number in 0..1000_u128 {
            let bits = number.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
            let seed = KeySeed::new(bits.swap_bytes().to_le_bytes());
            let v6 = IpAddr::V6(bits.into());
            let ip = if number % 2 == 0 { v6 } else { IpAddr::V4(((bits >> 96) as u32).into()) };
            let prefix = counted_network(ip, Ipv6Prefix::DEFAULT);
            let mut encoder = KeyEncoder::new(&seed, DOMAIN_KEY);
            encode_prefix(prefix, &mut encoder);
            assert_eq!(address_key(prefix, &seed), encoder.finish());
        }
    }

    #[test]
    fn streamed_long_keys_hash_the_same() {
        let seed = KeySeed::new([3; 16]);
        let text = "x".repeat(1000);
        let mut whole = vec![DOMAIN_KEY, 16];
        whole.extend(1000_u32.to_le_bytes());
        whole.extend(text.as_bytes());
        let hash = seed.0.hash(&whole);
        let recipe = KeyTemplate::new(vec![KeyPart::Key], OnMissing::default());
        let query = Query { key: Some(&text), ..Query::default() };
        let rules = KeyOptions { quirks: PathQuirks::default(), ipv6: Ipv6Prefix::DEFAULT };
        let key = recipe.key(&query, rules, &seed).unwrap_or_default();
        assert_eq!(key, Key::new(hash.h1, hash.h2));
    }
}
