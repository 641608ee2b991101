//! Keys: the parts that calls are counted by, and their hashes of 128 bits.

mod cookies;
mod credentials;
mod encoder;
mod error;
mod values;

use std::fmt;
use std::hash::Hasher as _;
use std::net::IpAddr;

use arrayvec::ArrayVec;
use http::header::HeaderName;
use siphasher::sip128::{Hasher128 as _, SipHasher13};
use tidegate_core::{Key, LimitKind, MAX_OPS, ShareLevel, Time};

pub use error::{KeyError, MissingPartError, UncountableError, UnknownPlatformError};

use self::encoder::{KeyEncoder, address_key, encode_part, encode_prefix};
use self::values::{PartValues, TooManyValues};
use crate::address::{Ipv6Prefix, canonical_ip, counted_network, shared_network};
use crate::path::PathQuirks;
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
    /// `client_cert`: the subject of the certificate that the client has shown in TLS, such as `CN=alice`.
    ClientCertificate,
    /// `action`: nothing of the request, so that all calls of the action have one count.
    Action,
    /// `path`: the request's path without its query string. Spellings that at least one server reads alike share a
    /// count; a path with several readings counts as each of them.
    Path,
}

impl KeyPart {
    /// The names of the parts; capitals stand for a value.
    pub(crate) const NAMES: [&'static str; 12] = [
        "client_ip",
        "ipv6/LENGTH",
        "key",
        "platform",
        "header:NAME",
        "cookie:NAME",
        "query:NAME",
        "method",
        "host",
        "client_cert",
        "action",
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
        matches!(self, Self::QueryParameter(_) | Self::Ipv6Network(_) | Self::ClientCertificate)
    }

    /// True if a request may lack the part, so that [`OnMissing`] decides.
    pub fn may_be_missing(&self) -> bool {
        let named = matches!(self, Self::Header(_) | Self::Cookie(_) | Self::QueryParameter(_));
        named || matches!(self, Self::Ipv6Network(_) | Self::Host | Self::ClientCertificate)
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
            Self::ClientCertificate => f.write_str("client_cert"),
            Self::Action => f.write_str("action"),
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

    /// The signature of a caller's reservation in a limit, which is named by its tag, under this key.
    pub fn reservation_signature(&self, limit: u64, key: Key, caller: u64, at: Time) -> u64 {
        let mut encoder = KeyEncoder::new(self, DOMAIN_RESERVATION);
        for number in [limit, key.hi(), key.lo(), caller, at.as_micros()] {
            encoder.part(34, &number.to_le_bytes());
        }
        encoder.finish().hi()
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
    pub(crate) parts: Box<[KeyPart]>,
    pub(crate) on_missing: OnMissing,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyOptions<'p> {
    pub(crate) quirks: PathQuirks,
    pub(crate) ipv6: Ipv6Prefix,
    /// The path to count by, of several; `None` for the normal form of the query's path.
    pub(crate) path: Option<&'p [u8]>,
}

const DOMAIN_KEY: u8 = 0;

/// The key of a client that its caller names by these bytes. It is that of [`KeyPart::Key`].
pub(crate) fn named_key(name: &[u8], seed: &KeySeed) -> Key {
    let mut encoder = KeyEncoder::new(seed, DOMAIN_KEY);
    encoder.part(encoder::KEY_PART, name);
    encoder.finish()
}

const DOMAIN_PARENT: u8 = 1;
const DOMAIN_OUTBOUND: u8 = 2;
const DOMAIN_TAG: u8 = 3;
const DOMAIN_PACER: u8 = 4;
const DOMAIN_RESERVATION: u8 = 5;
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

    /// The key of a call. Each part follows its tag and its length, so no two lists of parts give the same bytes.
    /// `None` if a part is missing, has several values or is spelt unusually; [`KeyTemplate::keys`] then decides.
    #[inline]
    pub(crate) fn key(&self, query: &Query<'_>, rules: KeyOptions<'_>, seed: &KeySeed) -> Option<Key> {
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
    /// Errors name the limit.
    #[cold]
    pub(crate) fn keys(
        &self,
        query: &Query<'_>,
        rules: KeyOptions<'_>,
        seed: &KeySeed,
        limit: &str,
    ) -> Result<ArrayVec<Key, MAX_OPS>, KeyError> {
        let mut encoders = ArrayVec::<KeyEncoder, MAX_OPS>::new();
        encoders.push(KeyEncoder::new(seed, DOMAIN_KEY));
        for part in &self.parts {
            match part_values(part, query, limit)?.as_deref() {
                None => {
                    for encoder in &mut encoders {
                        encode_part(part, query, rules, encoder)
                            .ok_or_else(|| missing_part_error(part, query, limit))?;
                    }
                }
                Some([]) => {
                    let by_ip = match self.on_missing {
                        OnMissing::Share => None,
                        OnMissing::ByIp => query.ip.filter(|_| !query.from_log || part.is_absent_if_not_logged()),
                        OnMissing::Refuse => return Err(UncountableError::Missing(part.to_string()).into()),
                        OnMissing::Skip => return Ok(ArrayVec::new()),
                    };
                    for encoder in &mut encoders {
                        encoder.missing_part(part_tag(part), by_ip.map(|ip| counted_network(ip, rules.ipv6)));
                    }
                }
                Some(values) if encoders.len() * values.len() > MAX_OPS => {
                    return Err(UncountableError::TooManyOperations.into());
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
        rules: KeyOptions<'_>,
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
fn missing_part_error(part: &KeyPart, query: &Query<'_>, limit: &str) -> KeyError {
    match (part, query.platform) {
        (KeyPart::Platform, Some(found)) => UnknownPlatformError { found: found.chars().take(64).collect() }.into(),
        _ => MissingPartError { part: part.query_field(), limit: limit.to_owned() }.into(),
    }
}

/// The values of a part that a call may lack or have several times; `None` for other parts.
fn part_values<'q>(part: &KeyPart, query: &Query<'q>, limit: &str) -> Result<Option<PartValues<'q>>, KeyError> {
    let missing = || missing_part_error(part, query, limit);
    // Requests often lack a part. But a query without request headers comes from a caller that forgot the field, and
    // is an error.
    let headers = || query.headers.ok_or_else(missing);
    let too_many = |TooManyValues| UncountableError::TooManyValues(part.to_string());
    Ok(match part {
        KeyPart::Header(name) => {
            Some(values::header_values(headers()?, name, query.headers_are_joined).map_err(too_many)?)
        }
        KeyPart::Cookie(name) => Some(values::cookie_values(headers()?, name).map_err(too_many)?),
        KeyPart::QueryParameter(name) => {
            let values = values::parameter_values(query.path.unwrap_or_default(), name).map_err(too_many)?;
            if values.is_empty() {
                headers()?;
            }
            if values.iter().any(|value| !values::has_one_charset(query.headers, value)) {
                return Err(UncountableError::Charset(part.to_string()).into());
            }
            Some(values)
        }
        KeyPart::Host if query.host.is_none() => headers().map(|_| Some(PartValues::new()))?,
        KeyPart::ClientCertificate if query.client_certificate.is_none() => {
            headers().map(|_| Some(PartValues::new()))?
        }
        KeyPart::Ipv6Network(_) => canonical_ip(query.ip.ok_or_else(missing)?).is_ipv4().then(PartValues::new),
        _ => None,
    })
}

/// True if a server may take this name in a query for that of the parameter, as limits by `query:NAME` read it.
pub fn may_be_parameter(found: &str, name: &str) -> bool {
    values::may_be_read_as(found.trim_ascii().as_bytes(), name.as_bytes(), true)
}

fn part_tag(part: &KeyPart) -> u8 {
    match part {
        KeyPart::Header(_) => 18,
        KeyPart::Cookie(_) => 19,
        KeyPart::QueryParameter(_) => 20,
        KeyPart::Host => 22,
        KeyPart::ClientCertificate => 25,
        _ => 24,
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
        let rules = KeyOptions { quirks: PathQuirks::default(), ipv6: Ipv6Prefix::DEFAULT, path: None };
        let key = recipe.key(&query, rules, &seed).unwrap_or_default();
        assert_eq!(key, Key::new(hash.h1, hash.h2));
    }
}
