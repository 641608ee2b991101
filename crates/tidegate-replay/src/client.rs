//! The clients of a log, and the statistics of each.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tidegate_core::{LimitId, Time};
use tidegate_policy::{KeyPart, Plan, Query, canonical_ip, printable};

/// The longest label of a key, in characters.
const MAX_LABEL: usize = 120;

/// A client as the gate usually counts it: an IPv4 address, or the /64 network of an IPv6 address.
///
/// IPv4 addresses use the values from ffff:ffff:0:0::/64 on, which are multicast and belong to no client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientNetwork(u64);

const IPV4_BASE: u64 = 0xffff_ffff << 32;

impl From<IpAddr> for ClientNetwork {
    fn from(ip: IpAddr) -> Self {
        match canonical_ip(ip) {
            IpAddr::V4(ip) => Self(IPV4_BASE | u64::from(ip.to_bits())),
            IpAddr::V6(ip) => Self((ip.to_bits() >> 64) as u64),
        }
    }
}

impl fmt::Display for ClientNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bits if bits >= IPV4_BASE => write!(f, "{}", Ipv4Addr::from_bits(bits as u32)),
            bits => write!(f, "{}/64", Ipv6Addr::from_bits(u128::from(bits) << 64)),
        }
    }
}

/// The counts of one client's calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientStats {
    /// Calls that were admitted. This and the next two counts saturate at 2^32 − 1.
    pub admitted: u32,
    /// Calls that were refused.
    pub refused: u32,
    /// Calls that were admitted, although a limit in shadow would have refused them.
    pub refused_in_shadow: u32,
    /// The time of the first refusal.
    pub first_refused_at: Time,
    /// The time of the last refusal.
    pub last_refused_at: Time,
    /// The limit of the last refusal; `None` if it was the deny list.
    pub last_limit: Option<LimitId>,
}

impl ClientStats {
    /// Returns the number of all calls.
    pub(super) fn calls(&self) -> u64 {
        u64::from(self.admitted) + u64::from(self.refused)
    }

    pub(super) fn record_refusal(&mut self, limit: Option<LimitId>, now: Time) {
        if self.refused == 0 {
            self.first_refused_at = now;
        }
        self.refused = self.refused.saturating_add(1);
        (self.last_refused_at, self.last_limit) = (now, limit);
    }
}

/// Returns a key as text. A part that may be a secret (a header, a cookie, a parameter) is shown only as a hash. Equal
/// hashes mean equal secrets.
pub(super) fn key_label(plan: &Plan, parts: &[KeyPart], query: &Query<'_>, hash: u64) -> String {
    let is_hidden =
        |part: &KeyPart| matches!(part, KeyPart::Header(_) | KeyPart::Cookie(_) | KeyPart::QueryParameter(_));
    let describe = |part: &KeyPart| {
        let value = match part {
            KeyPart::ClientIp => query.ip.map(|ip| network(ip, plan.ipv6_prefix())),
            KeyPart::Ipv6Network(length) => query.ip.map(|ip| network(ip, *length)),
            KeyPart::Key => query.key.map(str::to_owned),
            KeyPart::Platform => query.platform.map(str::to_owned),
            KeyPart::Method => query.method.map(str::to_owned),
            KeyPart::Host => query.host.map(str::to_owned),
            KeyPart::ClientCertificate => query.client_certificate.map(str::to_owned),
            KeyPart::Action => Some("all calls".to_owned()),
            KeyPart::Path => query.path.map(|path| path.split(['?', '#']).next().unwrap_or(path).to_owned()),
            KeyPart::Header(_) | KeyPart::Cookie(_) | KeyPart::QueryParameter(_) => Some(part.to_string()),
        };
        value.unwrap_or_else(|| format!("no {part}"))
    };
    let words: Vec<String> = parts.iter().map(describe).collect();
    let mut label: String = printable(&words.join(" + ")).chars().take(MAX_LABEL).collect();
    if parts.iter().any(is_hidden) {
        label.push_str(&format!(" #{:08x}", hash >> 32));
    }
    if label.is_empty() { "everybody".to_owned() } else { label }
}

/// Returns an IPv4 address, or the network of this length of an IPv6 address.
fn network(ip: IpAddr, length: u8) -> String {
    match canonical_ip(ip) {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(length)).unwrap_or_default();
            format!("{}/{length}", Ipv6Addr::from_bits(ip.to_bits() & mask))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_grouped_as_the_gate_counts() {
        for (ip, shown) in [
            ("203.0.113.7", "203.0.113.7"),
            ("::ffff:203.0.113.7", "203.0.113.7"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
            ("::1", "::/64"),
            ("255.255.255.255", "255.255.255.255"),
            ("0.0.0.0", "0.0.0.0"),
        ] {
            assert_eq!(ClientNetwork::from(ip.parse::<IpAddr>().unwrap()).to_string(), shown);
        }
    }

    #[test]
    fn secret_key_parts_are_shown_hashed() {
        use tidegate_policy::Policy;
        let header = KeyPart::Header(http::HeaderName::from_static("x-api-key"));
        let query = Query { ip: "203.0.113.7".parse().ok(), path: Some("/a?token=1"), ..Query::default() };
        let policy = Policy::builder().build().unwrap();
        let plan = policy.plan();
        let shown =
            key_label(plan, &[KeyPart::ClientIp, header, KeyPart::Path, KeyPart::Key], &query, 0x1234_5678_9abc_def0);
        assert_eq!(shown, "203.0.113.7 + header:x-api-key + /a + no key #12345678");
        assert_eq!(key_label(plan, &[], &query, 1), "everybody");
    }
}
