//! URLs of the server behind the gate and of external APIs.

use http::uri::Authority;

use super::DocumentReader;
use super::listen::UNIX_SCHEME;
use crate::document::TomlNode;
use crate::error::quoted;
use crate::outbound::BaseUrl;
use crate::sections::UpstreamAddress;

/// The placeholder of a credential in a base URL's path.
pub(super) const KEY_PLACEHOLDER: &str = "{key}";

impl DocumentReader<'_> {
    /// Reads the URL of the server behind the gate.
    pub(super) fn upstream(&mut self, node: &TomlNode, key: &str) -> Option<UpstreamAddress> {
        const EXPECTED: &str = "a URL of scheme, host and port, such as \"http://127.0.0.1:3000\", or \"unix:PATH\"";
        const PATH: &str = "requests are passed on with the path they came with";
        let text = self.string(node, key, EXPECTED)?;
        if let Some(path) = text.strip_prefix(UNIX_SCHEME) {
            let (host, unix_path) = ("localhost".to_owned(), Some(self.unix_path(node, key, path)?));
            return Some(UpstreamAddress { host, port: 80, explicit_port: false, unix_path, https: false });
        }
        let (wrong, help) = match UrlParts::parse(text) {
            Ok(UrlParts { scheme: scheme @ ("http" | "https"), host, port, rest: "" | "/" }) => {
                let (host, explicit_port, https) = (host.to_ascii_lowercase(), port.is_some(), scheme == "https");
                let port = port.unwrap_or(if https { 443 } else { 80 });
                return Some(UpstreamAddress { host, port, explicit_port, unix_path: None, https });
            }
            Ok(UrlParts { scheme: "http" | "https", rest, .. }) => {
                (format!(" has the path {} in it", quoted(rest)), Some(PATH.to_owned()))
            }
            Ok(UrlParts { scheme, .. }) => (format!(" has the scheme {}", quoted(scheme)), None),
            Err(UrlError::UserInfo) => {
                (" has a user name or password in it; the gate passes on what clients send".to_owned(), None)
            }
            Err(error) => error.message_and_help(text, "http"),
        };
        self.error(node.at, format!("`{key}`{wrong}"), EXPECTED).help_if(help).none()
    }

    /// Reads the root of an external API.
    pub(super) fn base_url(&mut self, node: &TomlNode) -> Option<BaseUrl> {
        const EXPECTED: &str = "the root of the API, such as \"https://api.example.com/v1\"";
        const QUERY: &str =
            "for a key that is a query parameter, write auth = \"query:NAME\" and credentials = [\"env:…\"]";
        const PASSWORD: &str = "write where it is: auth = \"bearer\" and credentials = [\"env:NAME\"]";
        let text = self.string(node, "base_url", EXPECTED)?;
        if let Some(path) = text.strip_prefix(UNIX_SCHEME) {
            let unix_path = self.unix_path(node, "base_url", path)?;
            let base = BaseUrl::new(false, Authority::from_static("localhost"), "");
            return Some(BaseUrl { unix_path: Some(unix_path), ..base });
        }
        let (wrong, help) = match UrlParts::parse(text) {
            _ if text.contains('?') => {
                // A query may hold an API key under any name, so the error hides it.
                let message = "`base_url` has a query in it, which belongs to each call";
                return self.hidden_error(node.at, message, EXPECTED).help(QUERY).none();
            }
            Ok(UrlParts { rest, .. }) if rest.contains('#') => {
                (" has a fragment in it, which is never sent".to_owned(), None)
            }
            Ok(UrlParts { rest, .. }) if let Some(part) = invalid_path_part(rest) => {
                let help = match part {
                    "." | ".." => "leave out the segments that it stands for".to_owned(),
                    "{" | "}" => format!("a credential's place is written {KEY_PLACEHOLDER}"),
                    _ => "characters that a URL can't contain are escaped, such as %20".to_owned(),
                };
                (format!(" has {} in its path", quoted(part)), Some(help))
            }
            Ok(UrlParts { scheme: scheme @ ("http" | "https"), host, port, rest }) => {
                let host = host.to_ascii_lowercase();
                let host = if host.contains(':') { format!("[{host}]") } else { host };
                let authority = port.map_or_else(|| host.clone(), |port| format!("{host}:{port}"));
                if let Ok(authority) = authority.parse::<Authority>() {
                    let path = rest.trim_end_matches('/').to_owned();
                    return Some(BaseUrl { https: scheme == "https", authority, path, unix_path: None });
                }
                UrlError::Host.message_and_help(text, "https")
            }
            Ok(UrlParts { scheme, .. }) => (format!(" has the scheme {}", quoted(scheme)), None),
            Err(UrlError::UserInfo) => {
                let wrong = " has a user name or password in it; a secret doesn't belong in a policy";
                (wrong.to_owned(), Some(PASSWORD.to_owned()))
            }
            Err(error) => error.message_and_help(text, "https"),
        };
        self.error(node.at, format!("`base_url`{wrong}"), EXPECTED).help_if(help).none()
    }
}

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

impl UrlError<'_> {
    /// The end of the message that begins with the setting's name, and the help.
    fn message_and_help(&self, text: &str, scheme: &str) -> (String, Option<String>) {
        match self {
            Self::Scheme => {
                let help = text.contains([':', '.']).then(|| format!("did you mean `{scheme}://{text}`?"));
                (format!(" is {}, which has no scheme", quoted(text)), help)
            }
            Self::UserInfo => (" has a user name or password in it".to_owned(), None),
            Self::Host => (format!(" is {}, which has no valid host", quoted(text)), None),
            Self::Port(port) => {
                (format!(" has the port {}", quoted(port)), Some("a port is a number from 1 to 65535".to_owned()))
            }
        }
    }
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
