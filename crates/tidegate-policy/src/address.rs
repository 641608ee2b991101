//! Client addresses in the form that limits count, and sets of networks.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;
use tidegate_core::ShareLevel;

/// Converts an IPv4-mapped address (`::ffff:1.2.3.4`) to IPv4; returns any other address unchanged.
#[inline]
pub fn canonical_ip(ip: IpAddr) -> IpAddr {
    ip.to_canonical()
}

/// The counted bytes of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrefixBytes {
    V4([u8; 4]),
    V6([u8; 8]),
}

/// The length of the counted prefix of an IPv6 address, in bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ipv6Prefix(u8);

impl Ipv6Prefix {
    /// The permitted lengths, in bits. A customer has at least a /64, so a longer prefix would limit nothing.
    pub(crate) const LENGTHS: RangeInclusive<u8> = 32..=64;
    /// The default: a /64, usually the smallest network of one customer.
    pub(crate) const DEFAULT: Self = Self(64);

    /// Creates a prefix of this length; `None` if it is outside [`LENGTHS`](Self::LENGTHS).
    pub(crate) fn new(length: u8) -> Option<Self> {
        Self::LENGTHS.contains(&length).then_some(Self(length))
    }

    pub(crate) fn length(self) -> u8 {
        self.0
    }

    /// The prefix of the surrounding network, which is always larger than the counted one.
    fn parent(self) -> Self {
        Self(if self.0 > 48 { 48 } else { self.0.saturating_sub(16).max(8) })
    }
}

/// The counted bytes of an address: all of an IPv4 address, the prefix of an IPv6 address.
#[inline]
pub(crate) fn counted_network(ip: IpAddr, prefix: Ipv6Prefix) -> PrefixBytes {
    match canonical_ip(ip) {
        IpAddr::V4(ip) => PrefixBytes::V4(ip.octets()),
        IpAddr::V6(ip) => {
            let counted = (ip.to_bits() >> 64) as u64 & u64::MAX << (64 - prefix.0);
            PrefixBytes::V6(counted.to_be_bytes())
        }
    }
}

/// The name of the counted network: an IPv4 address, or an IPv6 network such as `2001:db8::/64`.
pub(crate) fn network_name(ip: IpAddr, prefix: Ipv6Prefix) -> String {
    match IpNet::new(canonical_ip(ip), prefix.0) {
        Ok(IpNet::V6(network)) => network.trunc().to_string(),
        _ => canonical_ip(ip).to_string(),
    }
}

/// The network around an address in which clients share a key: the /24 or the /16 of IPv4, the /48 or the /32 of IPv6.
/// If 48 bits or fewer are counted, the IPv6 prefixes are 16 and 32 bits shorter than that, but at least 8 bits long.
pub(crate) fn shared_network(ip: IpAddr, prefix: Ipv6Prefix, share: ShareLevel) -> PrefixBytes {
    let is_wide = share > ShareLevel::SmallNetwork;
    match counted_network(ip, if is_wide { prefix.parent().parent() } else { prefix.parent() }) {
        PrefixBytes::V4([a, b, c, _]) => PrefixBytes::V4([a, b, if is_wide { 0 } else { c }, 0]),
        v6 => v6,
    }
}

/// Converts an IPv4-mapped network to IPv4; returns any other network unchanged.
pub(crate) fn canonical_network(network: IpNet) -> IpNet {
    if let IpNet::V6(v6) = network
        && v6.prefix_len() >= 96
        && let Some(v4) = v6.addr().to_ipv4_mapped()
        && let Ok(v4) = ipnet::Ipv4Net::new(v4, v6.prefix_len() - 96)
    {
        return IpNet::V4(v4);
    }
    network
}

/// A map from addresses to labels, as sorted ranges without overlap. Each lookup is one binary search.
#[derive(Clone, Debug)]
struct RangeMap<A, L> {
    /// The start and the label of each range. A range ends at the next entry; before the first there is no label.
    starts: Vec<(A, Option<L>)>,
}

impl<A: Ord + Copy, L: Copy + PartialEq> RangeMap<A, L> {
    /// Builds the map from (first address, last address, label). Two networks are nested or disjoint.
    /// `next` returns the address after another, `None` after the last.
    fn new(mut networks: Vec<(A, A, L)>, next: impl Fn(A) -> Option<A>) -> Self {
        // An outer network must come before the inner ones that begin at the same address.
        networks.sort_by(|left, right| left.0.cmp(&right.0).then(right.1.cmp(&left.1)));
        let mut starts: Vec<(A, Option<L>)> = Vec::new();
        let mut open: Vec<(A, L)> = Vec::new();
        let mut put = |at: A, label: Option<L>| match starts.last_mut() {
            Some(last) if last.0 == at => last.1 = label,
            _ => starts.push((at, label)),
        };
        let close_until = |open: &mut Vec<(A, L)>, limit: Option<A>, put: &mut dyn FnMut(A, Option<L>)| {
            while let Some(&(end, _)) = open.last() {
                if limit.is_some_and(|limit| end >= limit) {
                    break;
                }
                open.pop();
                if let Some(after) = next(end) {
                    put(after, open.last().map(|outer| outer.1));
                }
            }
        };
        for (first, last, label) in networks {
            close_until(&mut open, Some(first), &mut put);
            put(first, Some(label));
            open.push((last, label));
        }
        close_until(&mut open, None, &mut put);
        Self { starts }
    }

    #[inline]
    fn find(&self, at: A) -> Option<L> {
        let after = self.starts.partition_point(|(start, _)| *start <= at);
        after.checked_sub(1).and_then(|index| self.starts[index].1)
    }
}

/// Networks with labels, IPv4 and IPv6. If several contain an address, the smallest decides; of two labels for one
/// network, the later.
#[derive(Clone, Debug)]
pub(crate) struct NetworkMap<L> {
    v4: RangeMap<u32, L>,
    v6: RangeMap<u128, L>,
}

impl<L: Copy + PartialEq> NetworkMap<L> {
    pub(crate) fn new(networks: impl IntoIterator<Item = (IpNet, L)>) -> Self {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for (network, label) in networks {
            match canonical_network(network) {
                IpNet::V4(net) => v4.push((u32::from(net.network()), u32::from(net.broadcast()), label)),
                IpNet::V6(net) => v6.push((u128::from(net.network()), u128::from(net.broadcast()), label)),
            }
        }
        Self { v4: RangeMap::new(v4, |at| at.checked_add(1)), v6: RangeMap::new(v6, |at| at.checked_add(1)) }
    }

    #[inline]
    pub(crate) fn find(&self, ip: IpAddr) -> Option<L> {
        match canonical_ip(ip) {
            IpAddr::V4(ip) => self.v4.find(ip.to_bits()),
            IpAddr::V6(ip) => self.v6.find(ip.to_bits()),
        }
    }

    fn is_empty(&self) -> bool {
        self.v4.starts.is_empty() && self.v6.starts.is_empty()
    }
}

/// A set of networks. A lookup is one binary search, for any number of networks.
#[derive(Clone, Debug)]
pub struct Networks(NetworkMap<()>);

impl Default for Networks {
    fn default() -> Self {
        Self::new([])
    }
}

impl Networks {
    /// The union of these networks. IPv4-mapped ones count as IPv4.
    pub fn new(networks: impl IntoIterator<Item = IpNet>) -> Self {
        Self(NetworkMap::new(networks.into_iter().map(|network| (network, ()))))
    }

    /// True if one of the networks contains the address.
    #[inline]
    pub fn contains(&self, ip: IpAddr) -> bool {
        self.0.find(ip).is_some()
    }

    /// True if there are no networks.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The result of looking an address up in the lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListStatus {
    /// The address is never limited.
    Allow,
    /// The address is always refused.
    Deny,
    /// The address is on neither list; its calls are counted.
    Neither,
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use proptest::prelude::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn lists(
        allow: impl IntoIterator<Item = IpNet>,
        deny: impl IntoIterator<Item = IpNet>,
    ) -> impl Fn(IpAddr) -> ListStatus {
        let allow = allow.into_iter().map(|network| (network, ListStatus::Allow));
        let map = NetworkMap::new(allow.chain(deny.into_iter().map(|network| (network, ListStatus::Deny))));
        move |ip| map.find(ip).unwrap_or(ListStatus::Neither)
    }

    #[test]
    fn ipv4_mapped_addresses_are_treated_as_ipv4() {
        assert_eq!(canonical_ip(ip("::ffff:1.2.3.4")), ip("1.2.3.4"));
        assert_eq!(canonical_ip(ip("::1.2.3.4")), ip("::1.2.3.4"));
        let networks = Networks::new([net("::ffff:10.0.0.0/104")]);
        assert!(networks.contains(ip("10.255.0.1")) && networks.contains(ip("::ffff:10.0.0.1")));
        assert!(!networks.contains(ip("11.0.0.1")));
    }

    #[test]
    fn the_most_specific_network_decides() {
        let status = lists(
            [net("10.1.0.0/16"), net("0.0.0.0/0"), net("2001:db8::/32")],
            [net("10.0.0.0/8"), net("10.1.2.0/24"), net("255.255.255.255/32"), net("2001:db8:1::/48")],
        );
        for (address, listed) in [
            ("10.0.0.1", ListStatus::Deny),
            ("10.1.0.1", ListStatus::Allow),
            ("10.1.2.1", ListStatus::Deny),
            ("10.1.3.1", ListStatus::Allow),
            ("10.2.0.0", ListStatus::Deny),
            ("11.0.0.0", ListStatus::Allow),
            ("255.255.255.254", ListStatus::Allow),
            ("255.255.255.255", ListStatus::Deny),
            ("2001:db8::1", ListStatus::Allow),
            ("2001:db8:1::1", ListStatus::Deny),
            ("2001:db9::1", ListStatus::Neither),
        ] {
            assert_eq!(status(ip(address)), listed, "{address}");
        }
        assert_eq!(lists([net("10.0.0.0/8")], [net("10.0.0.0/8")])(ip("10.0.0.1")), ListStatus::Deny);
    }

    proptest! {
        #[test]
        fn ranges_agree_with_checking_every_network(
            networks in prop::collection::vec((any::<u32>(), 0_u8..=32, any::<bool>()), 0..40),
            probes in prop::collection::vec(any::<u32>(), 20),
        ) {
            let networks: Vec<(IpNet, bool)> = networks
                .into_iter()
                .map(|(bits, length, allow)| {
                    (IpNet::V4(ipnet::Ipv4Net::new(Ipv4Addr::from(bits), length).unwrap().trunc()), allow)
                })
                .collect();
            let of = |want| networks.iter().filter(move |(_, allow)| *allow == want).map(|(network, _)| *network);
            let status = lists(of(true), of(false));
            let edges = networks.iter().flat_map(|(network, _)| match network {
                IpNet::V4(net) => {
                    let (first, last) = (u32::from(net.network()), u32::from(net.broadcast()));
                    [first, last, first.wrapping_sub(1), last.wrapping_add(1)]
                }
                IpNet::V6(_) => unreachable!(),
            });
            for probe in probes.into_iter().chain(edges) {
                let address = IpAddr::V4(Ipv4Addr::from(probe));
                let expected = networks
                    .iter()
                    .filter(|(network, _)| network.contains(&address))
                    .max_by_key(|(network, allow)| (network.prefix_len(), !allow))
                    .map_or(ListStatus::Neither, |(_, allow)| if *allow { ListStatus::Allow } else { ListStatus::Deny });
                prop_assert_eq!(status(address), expected);
            }
        }
    }
}
