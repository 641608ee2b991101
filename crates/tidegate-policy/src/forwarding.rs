//! The address of the client that sent a request.

use std::net::IpAddr;

use http::HeaderMap;
use http::header::{FORWARDED, HeaderName};

use crate::address::{Networks, canonical_ip};

/// The most hops of a forwarding header that are read, from the right. Real chains have fewer than ten. If a header
/// claims more, reading stops, and the last trusted hop counts as the client.
pub const MAX_HOPS: usize = 1024;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The header that lists the hops before a trusted proxy. Only this one is read. A proxy that appends to one header
/// passes the other on as the client sent it, so trusting both would let clients choose their address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ForwardingHeader {
    /// `X-Forwarded-For`, as most proxies send.
    #[default]
    XForwardedFor,
    /// `Forwarded` (RFC 7239).
    Forwarded,
}

impl ForwardingHeader {
    /// The header's name in lower case.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::XForwardedFor => "x-forwarded-for",
            Self::Forwarded => "forwarded",
        }
    }
}

/// The trusted proxies and their header: `inbound.trusted_proxies` and `inbound.forwarded`.
#[derive(Clone, Debug, Default)]
pub struct Forwarding {
    /// The trusted proxies; none by default.
    pub trusted: Networks,
    /// The header that they write. Default `X-Forwarded-For`.
    pub header: ForwardingHeader,
}

impl Forwarding {
    /// Returns the client's address: the socket's peer, unless that is a trusted proxy. Then it is the first untrusted
    /// address from the right of the forwarding header, all lines of which form one list. If all are trusted, it is the
    /// leftmost one.
    ///
    /// Reading stops at an entry that is no address (garbage, `unknown`, `_hidden`) and after [`MAX_HOPS`] entries; the
    /// last good trusted hop then counts. Entries may have ports and brackets: `1.2.3.4:56`, `[::1]:80`. The result is
    /// canonical: an IPv4-mapped address is IPv4.
    pub fn client_ip(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut client = canonical_ip(peer);
        if self.trusted.is_empty() || !self.trusted.contains(client) {
            return client;
        }
        let name = match self.header {
            ForwardingHeader::XForwardedFor => X_FORWARDED_FOR,
            ForwardingHeader::Forwarded => FORWARDED,
        };
        let mut hops = 0;
        for line in headers.get_all(name).iter().rev() {
            let mut rest = Some(line.as_bytes());
            while let Some(bytes) = rest {
                hops += 1;
                if hops > MAX_HOPS {
                    return client;
                }
                let (before, entry) = last_element(bytes, self.header == ForwardingHeader::Forwarded);
                rest = before;
                let entry = entry.trim_ascii();
                // RFC 9110 5.6.1 requires recipients to skip empty list elements.
                if entry.is_empty() {
                    continue;
                }
                let found = match self.header {
                    ForwardingHeader::XForwardedFor => parse_address(unquoted(entry)),
                    ForwardingHeader::Forwarded => forwarded_for(entry).and_then(parse_address),
                };
                let Some(hop) = found else { return client };
                client = canonical_ip(hop);
                if !self.trusted.contains(client) {
                    return client;
                }
            }
        }
        client
    }
}

/// Splits the last element off a list at its last comma, or at its last comma outside quotes. Escaped quotes need no
/// handling: an address or port has no backslash, so an element with an escaped quote isn't an address either way.
fn last_element(list: &[u8], has_quotes: bool) -> (Option<&[u8]>, &[u8]) {
    let mut quoted = false;
    for (at, byte) in list.iter().enumerate().rev() {
        match byte {
            b'"' if has_quotes => quoted = !quoted,
            b',' if !quoted => return (Some(&list[..at]), &list[at + 1..]),
            _ => {}
        }
    }
    (None, list)
}

/// The value of the only `for` parameter of a `Forwarded` element.
fn forwarded_for(element: &[u8]) -> Option<&[u8]> {
    let mut found = None;
    for pair in element.split(|byte| *byte == b';') {
        let equals = pair.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (pair[..equals].trim_ascii(), pair[equals + 1..].trim_ascii());
        if name.eq_ignore_ascii_case(b"for") && found.replace(unquoted(value)).is_some() {
            return None;
        }
    }
    found
}

fn unquoted(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")).unwrap_or(bytes).trim_ascii()
}

/// Parses an address with or without brackets and port.
fn parse_address(bytes: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(bytes).ok()?;
    if let Some(inside) = text.strip_prefix('[') {
        let (ip, after) = inside.split_once(']')?;
        let port_is_good = after.is_empty() || after.strip_prefix(':').is_some_and(is_port);
        return if port_is_good { ip.parse().ok().map(IpAddr::V6) } else { None };
    }
    match text.split_once(':') {
        // More than one colon is an IPv6 address without brackets, which can't have a port.
        Some((_, rest)) if rest.contains(':') => text.parse().ok().map(IpAddr::V6),
        Some((ip, port)) if is_port(port) => ip.parse().ok().map(IpAddr::V4),
        Some(_) => None,
        None => text.parse().ok().map(IpAddr::V4),
    }
}

/// A port number, or RFC 7239's obfuscated port (`_` and then letters, digits, `.`, `_`, `-`).
fn is_port(text: &str) -> bool {
    match text.strip_prefix('_') {
        Some(hidden) => {
            !hidden.is_empty() && hidden.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        }
        None => !text.is_empty() && text.len() <= 5 && text.bytes().all(|byte| byte.is_ascii_digit()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forwarding(header: ForwardingHeader) -> Forwarding {
        let trusted = ["127.0.0.0/8", "10.0.0.0/8", "fd00::/8"].map(|net| net.parse().unwrap());
        Forwarding { trusted: Networks::new(trusted), header }
    }

    fn headers(name: &'static str, lines: &[&str]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for line in lines {
            map.append(name, http::HeaderValue::from_bytes(line.as_bytes()).unwrap());
        }
        map
    }

    fn check(header: ForwardingHeader, peer: &str, lines: &[&str], expected: &str) {
        let name = header.as_str();
        let found = forwarding(header).client_ip(peer.parse().unwrap(), &headers(name, lines));
        assert_eq!(found, expected.parse::<IpAddr>().unwrap(), "{peer} {lines:?}");
    }

    #[test]
    fn x_forwarded_for_gives_the_client_address() {
        let xff = |peer, lines: &[&str], expected| check(ForwardingHeader::XForwardedFor, peer, lines, expected);
        xff("127.0.0.1", &[], "127.0.0.1");
        xff("127.0.0.1", &["1.2.3.4"], "1.2.3.4");
        xff("1.1.1.1", &["1.2.3.4"], "1.1.1.1");
        xff("::ffff:1.1.1.1", &["1.2.3.4"], "1.1.1.1");
        xff("::ffff:127.0.0.1", &["::ffff:1.2.3.4"], "1.2.3.4");
        xff("127.0.0.1", &["6.6.6.6, 1.2.3.4, 10.0.0.1"], "1.2.3.4");
        xff("127.0.0.1", &["6.6.6.6", "1.2.3.4", "10.0.0.1, 10.0.0.2"], "1.2.3.4");
        xff("127.0.0.1", &["10.0.0.9,10.0.0.8"], "10.0.0.9");
        xff("127.0.0.1", &["1.2.3.4:5678"], "1.2.3.4");
        xff("127.0.0.1", &["[2001:db8::1]:80"], "2001:db8::1");
        xff("127.0.0.1", &["[2001:db8::1]"], "2001:db8::1");
        xff("127.0.0.1", &["2001:db8::1"], "2001:db8::1");
        xff("fd00::1", &["\"1.2.3.4\""], "1.2.3.4");
        xff("127.0.0.1", &["1.2.3.4, garbage, 10.0.0.7"], "10.0.0.7");
        xff("127.0.0.1", &["1.2.3.4, unknown"], "127.0.0.1");
        xff("127.0.0.1", &["1.2.3.4, ,10.0.0.7,"], "1.2.3.4");
        for garbage in
            ["1.2.3.4:", "1.2.3.4:x", "[::1", "[::1]x", "[1.2.3.4]", "1.2.3", "01.2.3.4", "::1%eth0", "ü", "-"]
        {
            xff("127.0.0.1", &["9.9.9.9", garbage], "127.0.0.1");
        }
    }

    #[test]
    fn the_forwarded_header_gives_the_client_address() {
        let forwarded = |lines: &[&str], expected| check(ForwardingHeader::Forwarded, "127.0.0.1", lines, expected);
        forwarded(&["for=192.0.2.60;proto=http;by=203.0.113.43"], "192.0.2.60");
        forwarded(&["For=\"[2001:db8:cafe::17]:4711\""], "2001:db8:cafe::17");
        forwarded(&["for=192.0.2.43, for=198.51.100.17"], "198.51.100.17");
        forwarded(&["for=192.0.2.43, for=10.0.0.1"], "192.0.2.43");
        forwarded(&["for=192.0.2.43", "for=10.0.0.1;host=\"a,b\""], "192.0.2.43");
        forwarded(&["for=\"1.2.3.4:_port\""], "1.2.3.4");
        forwarded(&["for=1.2.3.4, for=unknown"], "127.0.0.1");
        forwarded(&["for=1.2.3.4, for=_hidden, for=10.0.0.1"], "10.0.0.1");
        forwarded(&["for=1.2.3.4, proto=http"], "127.0.0.1");
        forwarded(&["for=1.2.3.4, for=2.2.2.2;for=3.3.3.3"], "127.0.0.1");
        forwarded(&["for=1.2.3.4, nonsense"], "127.0.0.1");
        forwarded(&["for=\"1.2.3.4"], "127.0.0.1");
    }

    #[test]
    fn only_the_chosen_header_is_read() {
        let mut map = headers("x-forwarded-for", &["1.1.1.1"]);
        map.append("forwarded", "for=2.2.2.2".parse().unwrap());
        let peer = "127.0.0.1".parse().unwrap();
        assert_eq!(forwarding(ForwardingHeader::XForwardedFor).client_ip(peer, &map).to_string(), "1.1.1.1");
        assert_eq!(forwarding(ForwardingHeader::Forwarded).client_ip(peer, &map).to_string(), "2.2.2.2");
    }

    #[test]
    fn forwarding_lists_are_bounded() {
        let trusted = vec!["10.0.0.1"; 999].join(", ");
        check(ForwardingHeader::XForwardedFor, "127.0.0.1", &[&format!("1.2.3.4, {trusted}")], "1.2.3.4");
        let elements = vec!["for=10.0.0.1"; 999].join(",");
        check(ForwardingHeader::Forwarded, "127.0.0.1", &[&format!("for=1.2.3.4,{elements}")], "1.2.3.4");
        let untrusted = vec!["6.6.6.6"; 1000].join(",");
        check(ForwardingHeader::XForwardedFor, "127.0.0.1", &[&format!("{untrusted}, 1.2.3.4")], "1.2.3.4");
        let over = vec!["10.0.0.1"; MAX_HOPS].join(",");
        check(ForwardingHeader::XForwardedFor, "127.0.0.1", &[&format!("1.2.3.4,10.0.0.2,{over}")], "10.0.0.1");
    }
}
