//! Hop-by-hop headers, which are removed in both directions (RFC 9110 §7.6.1), and headers that name the client.
//!
//! | header | towards the upstream | towards the client |
//! | --- | --- | --- |
//! | `Connection` and the headers it names, `Keep-Alive`, `Proxy-Connection`, `Transfer-Encoding` | removed | removed |
//! | `Proxy-Authenticate`, `Proxy-Authorization` | removed: this hop asks for none | removed |
//! | `Upgrade` | kept only while upgrading, never to `h2c` | kept only on 101 |
//! | `TE` | `trailers` kept, all else removed; to an API behind TLS (perhaps HTTP/2) without `Connection` | removed |
//! | `Host`, `Content-Length`, headers that limits count by | kept, even if `Connection` names them | kept |
//! | `X-Forwarded-For` | the peer's address, appended to the value of a trusted peer | |
//! | `X-Forwarded-Proto`, `X-Forwarded-Host` | a trusted peer's, else the connection's scheme and the request's host | |
//! | `Forwarded` | the peer's address appended to the value of a trusted peer; other values are removed | |
//! | a header that differs only in other signs for `-` or `_` from an `X-Forwarded-…` above or from a counted header | removed | |
//! | `Tidegate-…`, `X-Tidegate-…` and `Proxy-Authorization`, also with other signs for `-` | removed by the gateway, and from trailers | |
//! | any header with the gateway's token | removed by the gateway | |
//! | `Tidegate-Reservation` | removed if the call was admitted by it | |
//! | `Via` | none is added, because nginx stops compressing if it sees one | |

use http::header::{
    CONNECTION, CONTENT_LENGTH, FORWARDED, HOST, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
pub(crate) const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
/// The scheme of a connection with TLS.
pub(crate) const HTTPS: HeaderValue = HeaderValue::from_static("https");
/// The scheme of a connection without TLS.
pub(crate) const HTTP: HeaderValue = HeaderValue::from_static("http");
const TRAILERS: HeaderValue = HeaderValue::from_static("trailers");
const CHUNKED: HeaderValue = HeaderValue::from_static("chunked");
const CONNECTION_TE: HeaderValue = HeaderValue::from_static("te");
const CONNECTION_UPGRADE: HeaderValue = HeaderValue::from_static("upgrade");
const CONNECTION_TE_UPGRADE: HeaderValue = HeaderValue::from_static("te, upgrade");

/// The options that the removed headers requested.
#[derive(Debug, Default)]
pub(crate) struct HopOptions {
    /// The protocol that the client wants to switch to.
    pub(crate) upgrade: Option<HeaderValue>,
    /// True if the client accepts trailers.
    trailers: bool,
}

/// True for the protocol HTTP/2 in `Upgrade`, with or without a version: `h2c`, `h2c/1.0`, `HTTP/2.0`.
fn is_http2(protocol: &[u8]) -> bool {
    let mut parts = protocol.split(|byte| *byte == b'/');
    let name = parts.next().unwrap_or_default();
    name.eq_ignore_ascii_case(b"h2c")
        || (name.eq_ignore_ascii_case(b"http") && parts.next().is_some_and(|version| version.starts_with(b"2")))
}

/// Removes the hop-by-hop headers of a request and returns their options. Keeps `counted_headers`, the headers that
/// limits count by, so that the upstream receives the values that were counted.
pub(crate) fn strip_request(headers: &mut HeaderMap, counted_headers: &[HeaderName]) -> HopOptions {
    let mut hop = HopOptions::default();
    let Some(found) = HopHeaders::find(headers) else { return hop };
    if found.te {
        hop.trailers = tokens(headers, &TE)
            .any(|token| token.split(|byte| *byte == b';').next().is_some_and(|name| name.trim_ascii() == b"trailers"));
    }
    if found.upgrade && tokens(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case(b"upgrade")) {
        // Over an h2c connection a client could send requests that the gate doesn't see.
        let to_h2c = tokens(headers, &UPGRADE).any(is_http2);
        hop.upgrade = headers.get(UPGRADE).filter(|_| !to_h2c).cloned();
    }
    strip(headers, &found, counted_headers);
    hop
}

/// Removes the hop-by-hop headers of a response and returns its `Upgrade`.
pub(crate) fn strip_response(headers: &mut HeaderMap) -> Option<HeaderValue> {
    let found = HopHeaders::find(headers)?;
    // A response with both headers is framed by its chunks (RFC 9112 §6.3), and the length could cut it short.
    if found.other && headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    let upgrade = if found.upgrade { headers.get(UPGRADE).cloned() } else { None };
    strip(headers, &found, &[]);
    upgrade
}

/// Adds the hop-by-hop headers of a request to the upstream.
pub(crate) fn add_request_headers(headers: &mut HeaderMap, hop: &HopOptions, chunked: bool) {
    if chunked {
        // Without this header the HTTP client treats a GET of unknown length as one without a body.
        headers.insert(TRANSFER_ENCODING, CHUNKED);
    }
    let connection = match (&hop.upgrade, hop.trailers) {
        (None, false) => return,
        (None, true) => CONNECTION_TE,
        (Some(_), false) => CONNECTION_UPGRADE,
        (Some(_), true) => CONNECTION_TE_UPGRADE,
    };
    headers.insert(CONNECTION, connection);
    if hop.trailers {
        headers.insert(TE, TRAILERS);
    }
    if let Some(protocol) = &hop.upgrade {
        headers.insert(UPGRADE, protocol.clone());
    }
}

/// Adds the headers of a protocol switch to a 101 response.
pub(crate) fn add_switch_headers(headers: &mut HeaderMap, protocol: Option<HeaderValue>) {
    headers.insert(CONNECTION, CONNECTION_UPGRADE);
    if let Some(protocol) = protocol {
        headers.insert(UPGRADE, protocol);
    }
}

/// Sets the headers with the client's address for the upstream. `peer` is the peer's address as a header value, `scheme`
/// that of its connection. Earlier values of these headers count only if the peer is trusted. `keyed` are the headers
/// that limits count by.
pub(crate) fn set_forwarded_headers(
    headers: &mut HeaderMap,
    peer: &HeaderValue,
    peer_is_trusted: bool,
    scheme: HeaderValue,
    keyed: &[HeaderName],
) {
    for name in lookalikes(headers, keyed) {
        headers.remove(name);
    }
    let earlier = if peer_is_trusted { join_values(headers, &X_FORWARDED_FOR, peer) } else { None };
    if headers.contains_key(FORWARDED) {
        let element = if peer_is_trusted { join_values(headers, &FORWARDED, &forwarded_for(peer)) } else { None };
        match element {
            Some(element) => headers.insert(FORWARDED, element),
            None => headers.remove(FORWARDED),
        };
    }
    headers.insert(X_FORWARDED_FOR, earlier.unwrap_or_else(|| peer.clone()));
    if !peer_is_trusted || !headers.contains_key(X_FORWARDED_PROTO) {
        headers.insert(X_FORWARDED_PROTO, scheme);
    }
    if !peer_is_trusted || !headers.contains_key(X_FORWARDED_HOST) {
        match headers.get(HOST).cloned() {
            Some(host) => headers.insert(X_FORWARDED_HOST, host),
            None => headers.remove(X_FORWARDED_HOST),
        };
    }
}

/// Returns the headers that some upstreams would confuse with the gate's own or with those that limits count by. CGI
/// programs read every sign but letters and digits as the same; PHP and WSGI do so with `_` and `-`.
pub(crate) fn lookalikes(headers: &HeaderMap, keyed: &[HeaderName]) -> Vec<HeaderName> {
    let written = [X_FORWARDED_FOR, X_FORWARDED_PROTO, X_FORWARDED_HOST];
    let own = || written.iter().chain(keyed);
    let is_like = |name: &HeaderName| own().any(|own| is_like(name.as_str(), own.as_str()));
    headers.keys().filter(|name| is_like(name) && !own().any(|own| own == *name)).cloned().collect()
}

/// True if two names differ at most in their signs.
fn is_like(name: &str, own: &str) -> bool {
    let same = |(a, b): (u8, u8)| a == b || !(a.is_ascii_alphanumeric() || b.is_ascii_alphanumeric());
    name.len() == own.len() && name.bytes().zip(own.bytes()).all(same)
}

/// True for a header that only the gate reads, such as the one with the gateway's token, and for one that a server may
/// take for it: CGI programs read every sign but letters and digits as the same.
pub(crate) fn is_own(name: &HeaderName) -> bool {
    let name = name.as_str();
    let starts_with = |own: &str| name.get(..own.len()).is_some_and(|start| is_like(start, own));
    starts_with("tidegate-") || starts_with("x-tidegate-") || is_like(name, PROXY_AUTHORIZATION.as_str())
}

/// Removes from trailers what only the gate reads.
pub(crate) fn strip_trailers(trailers: &mut HeaderMap) {
    let own: Vec<HeaderName> = trailers.keys().filter(|name| is_own(name)).cloned().collect();
    for name in own {
        trailers.remove(name);
    }
}

/// Returns `for=192.0.2.7` or `for="[2001:db8::7]"` (RFC 7239 §6).
fn forwarded_for(peer: &HeaderValue) -> HeaderValue {
    let address = peer.to_str().unwrap_or("unknown");
    let element = if address.contains(':') { format!("for=\"[{address}]\"") } else { format!("for={address}") };
    HeaderValue::try_from(element).unwrap_or_else(|_| HeaderValue::from_static("for=unknown"))
}

/// Joins all values of a list header and `last` in one line. `None` if the header has no value yet.
fn join_values(headers: &HeaderMap, name: &HeaderName, last: &HeaderValue) -> Option<HeaderValue> {
    let mut line = Vec::new();
    for value in headers.get_all(name) {
        line.extend_from_slice(value.as_bytes());
        line.extend_from_slice(b", ");
    }
    if line.is_empty() {
        return None;
    }
    line.extend_from_slice(last.as_bytes());
    HeaderValue::from_bytes(&line).ok()
}

/// The kinds of hop-by-hop headers that are present, found in one pass instead of a search for each.
#[derive(Default)]
struct HopHeaders {
    connection: bool,
    upgrade: bool,
    te: bool,
    other: bool,
}

impl HopHeaders {
    fn find(headers: &HeaderMap) -> Option<Self> {
        let mut found = Self::default();
        let mut any = false;
        for name in headers.keys() {
            let flag = if name == CONNECTION {
                &mut found.connection
            } else if name == UPGRADE {
                &mut found.upgrade
            } else if name == TE {
                &mut found.te
            } else if name == TRANSFER_ENCODING
                || name == PROXY_AUTHENTICATE
                || name == PROXY_AUTHORIZATION
                || name == KEEP_ALIVE
                || name == PROXY_CONNECTION
                || name == HTTP2_SETTINGS
            {
                &mut found.other
            } else {
                continue;
            };
            *flag = true;
            any = true;
        }
        any.then_some(found)
    }
}

fn strip(headers: &mut HeaderMap, found: &HopHeaders, keyed: &[HeaderName]) {
    if found.connection {
        // Nearly all name nothing else, and the search in them would cost more than the rest.
        let is_usual = |line: &HeaderValue| line == "keep-alive" || line == "close";
        let lines = headers.get_all(CONNECTION).iter().filter(|line| !is_usual(line));
        let named: Vec<HeaderName> = lines
            .flat_map(tokens_of_line)
            .filter(|token| !token.eq_ignore_ascii_case(b"close") && !token.eq_ignore_ascii_case(b"keep-alive"))
            .filter_map(|token| HeaderName::from_bytes(token).ok())
            .filter(|name| name != HOST && name != CONTENT_LENGTH && !keyed.contains(name))
            .collect();
        for name in named {
            headers.remove(name);
        }
        headers.remove(CONNECTION);
    }
    if found.upgrade {
        headers.remove(UPGRADE);
    }
    if found.te {
        headers.remove(TE);
    }
    if found.other {
        for name in
            [TRANSFER_ENCODING, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, KEEP_ALIVE, PROXY_CONNECTION, HTTP2_SETTINGS]
        {
            headers.remove(name);
        }
    }
}

fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a [u8]> {
    headers.get_all(name).iter().flat_map(tokens_of_line)
}

fn tokens_of_line(line: &HeaderValue) -> impl Iterator<Item = &[u8]> {
    line.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    fn shown(headers: &HeaderMap) -> Vec<String> {
        let mut lines: Vec<_> =
            headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        lines.sort();
        lines
    }

    fn forwarded(lines: &[(&'static str, &'static str)]) -> Vec<String> {
        let mut map = headers(&[]);
        for (name, value) in lines {
            map.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let hop = strip_request(&mut map, &[]);
        add_request_headers(&mut map, &hop, false);
        shown(&map)
    }

    #[test]
    fn own_headers_are_recognised_in_other_spellings() {
        for name in [
            "tidegate-token",
            "tidegate_token",
            "tidegate.token",
            "tidegate-x",
            "x-tidegate_token",
            "proxy-authorization",
            "proxy_authorization",
        ] {
            assert!(is_own(&HeaderName::from_static(name)), "{name}");
        }
        for name in [
            "tidegate",
            "tidegates-token",
            "x-tidegates",
            "authorization",
            "proxy-authorization-info",
            "proxyxauthorization",
        ] {
            assert!(!is_own(&HeaderName::from_static(name)), "{name}");
        }
    }

    #[test]
    fn hop_headers_are_removed_from_requests() {
        assert_eq!(forwarded(&[("host", "a"), ("accept", "*/*")]), ["accept: */*", "host: a"]);
        assert_eq!(
            forwarded(&[
                ("host", "a"),
                ("connection", "close, X-Private"),
                ("connection", "Authorization"),
                ("x-private", "1"),
                ("authorization", "2"),
                ("keep-alive", "timeout=5"),
                ("proxy-connection", "keep-alive"),
                ("proxy-authorization", "Basic x"),
                ("transfer-encoding", "chunked"),
                ("x-kept", "3"),
            ]),
            ["host: a", "x-kept: 3"]
        );
    }

    #[test]
    fn connection_cannot_remove_host_or_content_length() {
        assert_eq!(
            forwarded(&[("host", "a"), ("content-length", "3"), ("connection", "host, content-length, , \"")]),
            ["content-length: 3", "host: a"]
        );
    }

    #[test]
    fn key_headers_are_forwarded_without_lookalikes() {
        let keyed = [HeaderName::from_static("x-api-key"), HeaderName::from_static("user_id")];
        let mut map = headers(&[
            ("connection", "X-Api-Key, x-other"),
            ("x-api-key", "1"),
            ("x_api-key", "2"),
            ("x_api_key", "3"),
            ("user_id", "4"),
            ("user-id", "5"),
            ("x-other", "6"),
            ("x_other", "7"),
            ("x_forwarded_for", "8"),
            ("x.api~key", "9"),
            ("x!forwarded`host", "10"),
            ("x-apixkey", "11"),
        ]);
        strip_request(&mut map, &keyed);
        set_forwarded_headers(&mut map, &HeaderValue::from_static("192.0.2.7"), false, HTTP, &keyed);
        assert_eq!(
            shown(&map),
            [
                "user_id: 4",
                "x-api-key: 1",
                "x-apixkey: 11",
                "x-forwarded-for: 192.0.2.7",
                "x-forwarded-proto: http",
                "x_other: 7"
            ]
        );
    }

    #[test]
    fn only_te_trailers_and_upgrades_are_forwarded() {
        assert_eq!(
            forwarded(&[("te", "gzip, trailers;q=0.5"), ("connection", "TE")]),
            ["connection: te", "te: trailers"]
        );
        assert!(forwarded(&[("te", "gzip")]).is_empty());
        assert_eq!(
            forwarded(&[("upgrade", "websocket"), ("connection", "keep-alive, Upgrade")]),
            ["connection: upgrade", "upgrade: websocket"]
        );
        assert!(forwarded(&[("upgrade", "websocket")]).is_empty(), "not named by Connection");
        assert!(
            forwarded(&[("upgrade", "h2c/1.0"), ("connection", "Upgrade")]).is_empty()
                && forwarded(&[("upgrade", "HTTP/2.0"), ("connection", "Upgrade")]).is_empty()
        );
        assert!(
            forwarded(&[("upgrade", "h2c"), ("http2-settings", "AAA"), ("connection", "Upgrade, HTTP2-Settings")])
                .is_empty()
        );
    }

    #[test]
    fn hop_headers_are_removed_from_responses() {
        let mut map = headers(&[
            ("connection", "x-hop"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("proxy-authenticate", "Basic"),
            ("upgrade", "h2"),
            ("trailer", "grpc-status"),
            ("server", "nginx"),
        ]);
        assert_eq!(strip_response(&mut map).unwrap(), "h2");
        assert_eq!(shown(&map), ["server: nginx", "trailer: grpc-status"]);
        let mut both = headers(&[("content-length", "3"), ("transfer-encoding", "chunked"), ("server", "nginx")]);
        assert_eq!(strip_response(&mut both), None);
        assert_eq!(shown(&both), ["server: nginx"], "the chunks frame it");
    }

    #[test]
    fn forwarded_headers_state_the_caller() {
        let peer = HeaderValue::from_static("192.0.2.7");
        let spoofed = [
            ("host", "a"),
            ("x-forwarded-for", "1.1.1.1"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "b"),
            ("forwarded", "for=1.1.1.1"),
        ];
        let mut map = headers(&spoofed);
        set_forwarded_headers(&mut map, &peer, false, HTTP, &[]);
        assert_eq!(
            shown(&map),
            ["host: a", "x-forwarded-for: 192.0.2.7", "x-forwarded-host: a", "x-forwarded-proto: http"]
        );
        let mut map = headers(&spoofed);
        map.append(X_FORWARDED_FOR, HeaderValue::from_static("2.2.2.2"));
        set_forwarded_headers(&mut map, &peer, true, HTTP, &[]);
        assert_eq!(
            shown(&map),
            [
                "forwarded: for=1.1.1.1, for=192.0.2.7",
                "host: a",
                "x-forwarded-for: 1.1.1.1, 2.2.2.2, 192.0.2.7",
                "x-forwarded-host: b",
                "x-forwarded-proto: https"
            ]
        );
    }
}
