//! URLs of the server behind the gate and of external APIs.

use http::uri::Authority;

use super::DocumentReader;
use crate::document::TomlNode;
use crate::error::{Error, quoted};
use crate::outbound::BaseUrl;
use crate::sections::UpstreamAddress;

/// The placeholder of a credential in a base URL's path.
pub(super) const KEY_PLACEHOLDER: &str = "{key}";

impl DocumentReader<'_> {
    /// Reads the URL of the server behind the gate.
    pub(super) fn upstream(&mut self, node: &TomlNode, key: &str) -> Option<UpstreamAddress> {
        const EXPECTED: &str = "a URL of scheme, host and port, such as \"http://127.0.0.1:3000\"";
        let text = self.string(node, key, EXPECTED)?;
        let error = |message: String| Error::new(self.texts, node.at, message, EXPECTED);
        let error = match UrlParts::parse(text) {
            Ok(UrlParts { scheme: "http", host, port, rest: "" | "/" }) => {
                let (host, explicit_port) = (host.to_ascii_lowercase(), port.is_some());
                return Some(UpstreamAddress { host, port: port.unwrap_or(80), explicit_port });
            }
            Ok(UrlParts { scheme: "https", .. }) => error(format!(
                "`{key}`: https to the upstream is not supported by this version"
            ))
            .help("use http to a server on this machine or in a network of your own, or let a TLS proxy forward to it"),
            Ok(UrlParts { scheme: "http", rest, .. }) => error(format!("`{key}` has the path {} in it", quoted(rest)))
                .help("requests are passed on with the path they came with"),
            Ok(UrlParts { scheme, .. }) => error(format!("`{key}` has the scheme {}", quoted(scheme))),
            Err(UrlError::UserInfo) => {
                error(format!("`{key}` has a user name or password in it; the gate passes on what clients send"))
            }
            Err(wrong) => self.url_error(node, key, text, &wrong, "http", EXPECTED),
        };
        self.add_error(error).none()
    }

    /// Reads the root of an external API.
    pub(super) fn base_url(&mut self, node: &TomlNode) -> Option<BaseUrl> {
        const KEY_NAME: &str = "base_url";
        const EXPECTED: &str = "the root of the API, such as \"https://api.example.com/v1\"";
        let text = self.string(node, KEY_NAME, EXPECTED)?;
        let error = |message: &str| Error::new(self.texts, node.at, format!("`{KEY_NAME}` {message}"), EXPECTED);
        let error = match UrlParts::parse(text) {
            // A query may hold an API key under any name, so the error hides it.
            _ if text.contains('?') => Error::hiding_secret(
                self.texts,
                node.at,
                format!("`{KEY_NAME}` has a query in it, which belongs to each call"),
                EXPECTED,
            )
            .help("for a key that is a query parameter, write auth = \"query:NAME\" and credentials = [\"env:…\"]"),
            Ok(UrlParts { rest, .. }) if rest.contains('#') => error("has a fragment in it, which is never sent"),
            Ok(UrlParts { rest, .. }) if let Some(wrong) = invalid_path_part(rest) => {
                let error = error(&format!("has {} in its path", quoted(wrong)));
                match wrong {
                    "." | ".." => error.help("leave out the segments that it stands for"),
                    "{" | "}" => error.help(format!("a credential's place is written {KEY_PLACEHOLDER}")),
                    _ => error.help("what doesn't belong into a URL is written as %20"),
                }
            }
            Ok(UrlParts { scheme: scheme @ ("http" | "https"), host, port, rest }) => {
                let host = host.to_ascii_lowercase();
                let host = if host.contains(':') { format!("[{host}]") } else { host };
                let authority = port.map_or_else(|| host.clone(), |port| format!("{host}:{port}"));
                match authority.parse::<Authority>() {
                    Ok(authority) => {
                        let path = rest.trim_end_matches('/').to_owned();
                        return Some(BaseUrl { https: scheme == "https", authority, path });
                    }
                    Err(_) => self.url_error(node, KEY_NAME, text, &UrlError::Host, "https", EXPECTED),
                }
            }
            Ok(UrlParts { scheme, .. }) => error(&format!("has the scheme {}", quoted(scheme))),
            Err(UrlError::UserInfo) => error("has a user name or password in it; a secret doesn't belong in a policy")
                .help("write where it is: auth = \"bearer\" and credentials = [\"env:NAME\"]"),
            Err(wrong) => self.url_error(node, KEY_NAME, text, &wrong, "https", EXPECTED),
        };
        self.add_error(error).none()
    }

    fn url_error(
        &self,
        node: &TomlNode,
        key: &str,
        text: &str,
        wrong: &UrlError<'_>,
        scheme: &str,
        expected: &str,
    ) -> Error {
        let error = |message: String| Error::new(self.texts, node.at, message, expected);
        match wrong {
            UrlError::Scheme => error(format!("`{key}` is {}, which has no scheme", quoted(text))).did_you_mean(
                Some(&format!("{scheme}://{text}")).filter(|_| text.contains([':', '.'])).map(String::as_str),
            ),
            UrlError::UserInfo => error(format!("`{key}` has a user name or password in it")),
            UrlError::Host => error(format!("`{key}` is {}, which has no valid host", quoted(text))),
            UrlError::Port(port) => {
                error(format!("`{key}` has the port {}", quoted(port))).help("a port is a number from 1 to 65535")
            }
        }
    }
}

/// The parts of a URL.
struct UrlParts<'t> {
    /// `http` or `https`. Any other scheme stays as it is written, and the other parts are then empty.
    scheme: &'t str,
    /// A name, an IPv4 address, or an IPv6 address without brackets.
    host: &'t str,
    port: Option<u16>,
    /// Everything after the authority.
    rest: &'t str,
}

enum UrlError<'t> {
    Scheme,
    UserInfo,
    Host,
    Port(&'t str),
}

impl<'t> UrlParts<'t> {
    fn parse(text: &'t str) -> Result<Self, UrlError<'t>> {
        let (scheme, rest) = text.split_once("://").ok_or(UrlError::Scheme)?;
        let usual = ["http", "https"].into_iter().find(|usual| scheme.eq_ignore_ascii_case(usual));
        let Some(scheme) = usual else {
            return Ok(Self { scheme, host: "", port: None, rest: "" });
        };
        let (authority, rest) = rest.find(['/', '?', '#']).map_or((rest, ""), |at| rest.split_at(at));
        if authority.contains('@') {
            return Err(UrlError::UserInfo);
        }
        let (host, port) = match authority.strip_prefix('[') {
            Some(inside) => {
                let (host, after) = inside.split_once(']').ok_or(UrlError::Host)?;
                host.parse::<std::net::Ipv6Addr>().map_err(|_| UrlError::Host)?;
                match after.strip_prefix(':') {
                    Some(port) => (host, Some(port)),
                    None if after.is_empty() => (host, None),
                    None => return Err(UrlError::Host),
                }
            }
            None => {
                let (host, port) =
                    authority.split_once(':').map_or((authority, None), |(host, port)| (host, Some(port)));
                let fits = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
                if host.is_empty() || host.len() > 253 || !host.bytes().all(fits) {
                    return Err(UrlError::Host);
                }
                (host, port)
            }
        };
        let number = |port: &'t str| port.parse().ok().filter(|port| *port > 0).ok_or(UrlError::Port(port));
        Ok(Self { scheme, host, port: port.map(number).transpose()?, rest })
    }
}

/// Returns a part that can't be in a base URL's path (RFC 3986 §3.3); [`KEY_PLACEHOLDER`] is allowed.
fn invalid_path_part(text: &str) -> Option<&str> {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || "/-._~!$&'()*+,;=:@%".contains(letter);
    let letters = text.split(KEY_PLACEHOLDER).find_map(|piece| piece.matches(|letter| !fits(letter)).next());
    letters.or_else(|| text.split('/').find(|segment| matches!(*segment, "." | "..")))
}
