//! Who may use the gateway to other people's APIs.
//!
//! It adds credentials to what it forwards, so that whoever reaches it acts in their name. Beyond loopback it asks for a
//! token. On loopback the danger is a web page in a browser on the same machine: its requests can reach the listener,
//! either by its address, when the browser says in `Origin` or `Sec-Fetch-Site` that they come from elsewhere, or by a
//! name of the page's own that it makes resolve to loopback (DNS rebinding), when that name stands in `Host`.

use std::net::{IpAddr, SocketAddr};

use http::header::{HOST, HeaderMap, HeaderName, ORIGIN, PROXY_AUTHORIZATION};
use http::uri::Authority;
use http::{HeaderValue, Response, StatusCode};
use tidegate_policy::Secret;

use crate::answer::error;
use crate::body::Body;

pub(super) const TIDEGATE_TOKEN: HeaderName = HeaderName::from_static("tidegate-token");
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Lets requests in, or tells why not.
pub(super) struct Door {
    own: IpAddr,
    hosts: Vec<String>,
    /// What nearly every request calls it: names that needn't be taken apart to be known.
    usual: Vec<String>,
    token: Option<Secret>,
}

/// Why a request isn't let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turned {
    /// By a name that isn't the gateway's.
    Host,
    /// On behalf of a web page.
    Origin,
    /// Without the token.
    Token,
}

impl Turned {
    pub(super) fn response(self) -> Response<Body> {
        const ASK: HeaderValue = HeaderValue::from_static("Bearer realm=\"tidegate\"");
        match self {
            Self::Host => error(
                StatusCode::MISDIRECTED_REQUEST,
                "the Host is neither loopback nor the gateway's own address; outbound.hosts names others",
            ),
            Self::Origin => error(
                StatusCode::FORBIDDEN,
                "requests of web pages are not served; outbound.hosts names the hosts whose pages may call",
            ),
            Self::Token => {
                let message = "a token is needed, in Proxy-Authorization: Bearer or in Tidegate-Token";
                let mut response = error(StatusCode::PROXY_AUTHENTICATION_REQUIRED, message);
                response.headers_mut().insert(http::header::PROXY_AUTHENTICATE, ASK);
                response
            }
        }
    }
}

impl Door {
    pub(super) fn new(listens: SocketAddr, hosts: &[String], token: Option<Secret>) -> Self {
        let hosts = hosts.iter().map(|host| host.to_ascii_lowercase()).collect();
        let usual = vec![listens.to_string(), format!("localhost:{}", listens.port())];
        let mut door = Self { own: listens.ip().to_canonical(), hosts, usual: Vec::new(), token };
        door.usual = usual.into_iter().filter(|name| door.is_ours(name)).collect();
        door
    }

    /// Whether a request may pass; its token is taken off it.
    pub(super) fn admit(&self, headers: &mut HeaderMap, target: Option<&Authority>) -> Result<(), Turned> {
        let shown = [bearer(headers.remove(PROXY_AUTHORIZATION)), headers.remove(TIDEGATE_TOKEN)];
        let named = headers.get(HOST).map(|host| host.to_str().unwrap_or("\u{0}"));
        let mut names = named.into_iter().chain(target.map(Authority::as_str));
        if !names.all(|name| self.is_ours(name)) {
            return Err(Turned::Host);
        }
        if self.is_of_a_page(headers) {
            return Err(Turned::Origin);
        }
        let Some(token) = &self.token else { return Ok(()) };
        let good = shown.iter().flatten().any(|shown| token.matches(shown.as_bytes()));
        if good { Ok(()) } else { Err(Turned::Token) }
    }

    /// Whether `host` or `host:port` is a name that only the gateway has. Without any, as HTTP/1.0 may be, nobody can
    /// have been led astray by a name.
    fn is_ours(&self, name: &str) -> bool {
        if self.usual.iter().any(|usual| usual == name) {
            return true;
        }
        let Ok(authority) = name.parse::<Authority>() else { return name.is_empty() };
        let host = authority.host().trim_end_matches('.').to_ascii_lowercase();
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&host);
        if let Ok(ip) = bare.parse::<IpAddr>() {
            let ip = ip.to_canonical();
            return ip.is_loopback() || ip == self.own || self.own.is_unspecified() || self.hosts.contains(&host);
        }
        host == "localhost" || host.ends_with(".localhost") || self.hosts.contains(&host)
    }

    fn is_of_a_page(&self, headers: &HeaderMap) -> bool {
        let origin = headers.get(ORIGIN).map(|origin| {
            let text = origin.to_str().unwrap_or_default();
            text.split_once("://").is_some_and(|(_, authority)| self.is_ours(authority) && !authority.is_empty())
        });
        match origin {
            Some(ours) => !ours,
            None => headers.get(SEC_FETCH_SITE).is_some_and(|site| site == "cross-site"),
        }
    }
}

fn bearer(value: Option<HeaderValue>) -> Option<HeaderValue> {
    let value = value?;
    let (scheme, token) = value.as_bytes().split_at_checked(7)?;
    if !scheme.eq_ignore_ascii_case(b"bearer ") {
        return None;
    }
    HeaderValue::from_bytes(token).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admit(door: &Door, lines: &[(&'static str, &'static str)]) -> Result<(), Turned> {
        let pairs = lines.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        let mut headers: HeaderMap = pairs.collect();
        let admitted = door.admit(&mut headers, None);
        assert!(!headers.contains_key(PROXY_AUTHORIZATION) && !headers.contains_key(TIDEGATE_TOKEN));
        admitted
    }

    #[test]
    fn only_names_of_its_own_are_answered() {
        let loopback = Door::new("127.0.0.1:8081".parse().unwrap(), &["Gate.Internal".to_owned()], None);
        for host in
            ["127.0.0.1:8081", "127.0.0.1", "localhost:8081", "LOCALHOST.", "api.localhost", "[::1]:8081", "[::1]", ""]
        {
            assert_eq!(admit(&loopback, &[("host", host)]), Ok(()), "{host}");
        }
        assert_eq!(admit(&loopback, &[("host", "gate.internal:80")]), Ok(()));
        assert_eq!(admit(&loopback, &[]), Ok(()));
        for host in [
            "evil.example",
            "evil.example:8081",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "user@127.0.0.1.evil.example",
            "10.0.0.1",
            "169.254.169.254",
            "[2001:db8::1]",
            "a b",
            "..",
        ] {
            assert_eq!(admit(&loopback, &[("host", host)]), Err(Turned::Host), "{host}");
        }
        let public = Door::new("192.0.2.7:8081".parse().unwrap(), &[], None);
        assert_eq!(admit(&public, &[("host", "192.0.2.7:8081")]), Ok(()));
        assert_eq!(admit(&public, &[("host", "192.0.2.8")]), Err(Turned::Host));
        let mut none = HeaderMap::new();
        assert_eq!(public.admit(&mut none, Some(&"evil.example".parse().unwrap())), Err(Turned::Host));
    }

    #[test]
    fn web_pages_from_elsewhere_are_turned_away() {
        let door = Door::new("127.0.0.1:8081".parse().unwrap(), &[], None);
        for (name, value) in [
            ("origin", "https://evil.example"),
            ("origin", "null"),
            ("origin", "file://"),
            ("sec-fetch-site", "cross-site"),
        ] {
            assert_eq!(admit(&door, &[("host", "127.0.0.1"), (name, value)]), Err(Turned::Origin), "{name}: {value}");
        }
        for (name, value) in
            [("origin", "http://localhost:3000"), ("sec-fetch-site", "none"), ("sec-fetch-site", "same-origin")]
        {
            assert_eq!(admit(&door, &[("host", "127.0.0.1"), (name, value)]), Ok(()), "{name}: {value}");
        }
    }

    #[test]
    fn the_token_may_come_in_two_headers() {
        let door = Door::new("0.0.0.0:8081".parse().unwrap(), &[], Some(Secret::new("s3cret")));
        for (name, value, expected) in [
            ("proxy-authorization", "Bearer s3cret", Ok(())),
            ("proxy-authorization", "bearer s3cret", Ok(())),
            ("tidegate-token", "s3cret", Ok(())),
            ("proxy-authorization", "Basic s3cret", Err(Turned::Token)),
            ("proxy-authorization", "s3cret", Err(Turned::Token)),
            ("tidegate-token", "s3cre", Err(Turned::Token)),
            ("authorization", "Bearer s3cret", Err(Turned::Token)),
        ] {
            assert_eq!(admit(&door, &[("host", "10.1.2.3"), (name, value)]), expected, "{name}: {value}");
        }
    }
}
