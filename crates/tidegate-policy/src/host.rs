//! Hosts in the form that is compared, and their syntax.

use std::net::Ipv6Addr;

/// The host without its port and without a dot at its end. Text that doesn't belong behind a host is left out as well,
/// because servers end a host at its first colon.
pub(crate) fn bare_host(host: &str) -> &str {
    let host = match host.find(if host.starts_with('[') { ']' } else { ':' }) {
        Some(bracket) if host.starts_with('[') => &host[..=bracket],
        Some(colon) if host[colon + 1..].contains(':') && host.parse::<Ipv6Addr>().is_ok() => host,
        Some(colon) => &host[..colon],
        None => host,
    };
    host.strip_suffix('.').unwrap_or(host)
}

/// True if this is a host with an optional port, as `Host` and `:authority` have it (RFC 3986 §3.2.2): letters, digits,
/// `-`, `.`, `_` and `~`, or an IPv6 address in brackets; then optionally a colon and any number of digits. An empty
/// host is valid: the client has no name for the server. The RFC allows further characters, above all percent signs. No
/// host on the Internet has them, and servers read them in different ways.
#[inline]
pub fn is_host(host: &[u8]) -> bool {
    let end = match host {
        [b'[', rest @ ..] => {
            let inner = rest.iter().position(|byte| *byte == b']').unwrap_or(0);
            let is_zone = rest[..inner].iter().all(|byte| is_host_byte(*byte) || matches!(byte, b':' | b'%'));
            if inner == 0 || !is_zone {
                return false;
            }
            inner + 2
        }
        _ => host.iter().position(|byte| !is_host_byte(*byte)).unwrap_or(host.len()),
    };
    match &host[end..] {
        [] => true,
        [b':', port @ ..] => end > 0 && port.iter().all(u8::is_ascii_digit),
        _ => false,
    }
}

/// True if both name the same server over HTTP: `host:80`, `host:` and `host` do, in any case.
pub fn is_same_host(left: &[u8], right: &[u8]) -> bool {
    without_port(left).eq_ignore_ascii_case(without_port(right))
}

fn without_port(host: &[u8]) -> &[u8] {
    host.strip_suffix(b":80").or(host.strip_suffix(b":")).unwrap_or(host)
}

#[inline]
fn is_host_byte(byte: u8) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_is_removed_from_hosts() {
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
    fn valid_hosts_have_at_most_a_port() {
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
}
