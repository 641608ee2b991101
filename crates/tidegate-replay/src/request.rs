//! One request of a line of a log.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};

use http::header::{HeaderMap, HeaderName, HeaderValue};
use tidegate_core::{Span, Time};

/// The content of a line.
#[derive(Debug, PartialEq)]
pub(super) enum LogLine<'l> {
    Request(LoggedRequest<'l>),
    /// A line of Tidegate's own access log about a call to a provider.
    ProviderCall,
    /// A line of that log about a request that no policy has decided about.
    Undecided,
    /// Something else, such as a handshake at the wrong port or another message of a server.
    Other,
}

/// A request of a log.
#[derive(Debug, PartialEq)]
pub(super) struct LoggedRequest<'l> {
    /// The time of its arrival, if the log tells it or a duration, otherwise the time of its line.
    pub(super) time: Time,
    /// The time from its arrival to its line, if the log tells it.
    pub(super) duration: Option<Span>,
    pub(super) peer: Option<IpAddr>,
    pub(super) method: Cow<'l, str>,
    /// The path with its query string, without scheme and host.
    pub(super) path: Cow<'l, str>,
    pub(super) host: Option<Cow<'l, str>>,
    pub(super) user: Option<Cow<'l, str>>,
    pub(super) action: Option<Cow<'l, str>>,
}

impl LoggedRequest<'_> {
    pub(super) fn into_owned(self) -> LoggedRequest<'static> {
        fn own(text: Cow<'_, str>) -> Cow<'static, str> {
            Cow::Owned(text.into_owned())
        }
        LoggedRequest {
            time: self.time,
            duration: self.duration,
            peer: self.peer,
            method: own(self.method),
            path: own(self.path),
            host: self.host.map(own),
            user: self.user.map(own),
            action: self.action.map(own),
        }
    }

    /// Returns the size of its texts.
    pub(super) fn text_bytes(&self) -> usize {
        let optional = [&self.host, &self.user, &self.action].map(|text| text.as_ref().map_or(0, |text| text.len()));
        self.method.len() + self.path.len() + optional.iter().sum::<usize>()
    }
}

/// The reason for which a line can't be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// The line is neither JSON nor in the common or combined log format.
    #[error("neither JSON nor the common or combined log format")]
    UnknownFormat,
    /// The line begins like JSON but isn't.
    #[error("not JSON")]
    InvalidJson,
    /// The line has no time, or none that can be read.
    #[error("no time that can be read")]
    InvalidTime,
    /// The client isn't an IP address; it may be a name.
    #[error("the client isn't an IP address")]
    InvalidAddress,
    /// The path isn't UTF-8.
    #[error("not UTF-8")]
    InvalidUtf8,
    /// The line is longer than [`MAX_LINE`](super::MAX_LINE).
    #[error("longer than 64 KiB")]
    TooLong,
}

/// The headers that a policy reads, with their values of one line.
#[derive(Clone, Debug, Default)]
pub(super) struct HeaderCollector {
    /// The headers, with true for each that any line had.
    wanted: Vec<(HeaderName, bool)>,
    pub(super) values: HeaderMap,
    /// Empty maps for further lines.
    spare: Vec<HeaderMap>,
}

impl HeaderCollector {
    pub(super) fn for_names(wanted: Vec<HeaderName>) -> Self {
        Self { wanted: wanted.into_iter().map(|name| (name, false)).collect(), ..Self::default() }
    }

    pub(super) fn wants_none(&self) -> bool {
        self.wanted.is_empty()
    }

    pub(super) fn clear(&mut self) {
        if !self.wanted.is_empty() {
            self.values.clear();
        }
    }

    /// Returns the headers of the present line.
    pub(super) fn take(&mut self) -> HeaderMap {
        std::mem::replace(&mut self.values, self.spare.pop().unwrap_or_default())
    }

    /// Keeps the memory of a map that isn't needed any more.
    pub(super) fn recycle(&mut self, mut values: HeaderMap) {
        if !self.wants_none() {
            values.clear();
            self.spare.push(values);
        }
    }

    /// Adds a header if it is wanted. Logs write `-` or an empty value for a missing header.
    pub(super) fn add_if_wanted(&mut self, name: &str, value: &[u8]) {
        let found = self.wanted.iter_mut().find(|(wanted, _)| wanted.as_str().eq_ignore_ascii_case(name));
        if let Some((name, is_seen)) = found
            && !matches!(value, b"" | b"-")
            && let Ok(value) = HeaderValue::from_bytes(value)
        {
            self.values.append(name.clone(), value);
            *is_seen = true;
        }
    }

    /// Returns the wanted headers that no line had.
    pub(super) fn never_seen(&self) -> impl Iterator<Item = &HeaderName> {
        self.wanted.iter().filter(|(_, is_seen)| !is_seen).map(|(name, _)| name)
    }
}

/// Reads an address, with or without a port.
pub(super) fn parse_address(text: &str) -> Option<IpAddr> {
    let bare = || text.strip_prefix('[')?.strip_suffix(']')?.parse().ok();
    text.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|found| found.ip())).or_else(bare)
}

/// Returns the method and target of a request line; `None` if it is none (RFC 9112 §3).
pub(super) fn parse_request_line<'l>(line: &Cow<'l, str>) -> Option<(Cow<'l, str>, Cow<'l, str>)> {
    fn split(line: &str) -> Option<(&str, &str)> {
        let (method, rest) = line.split_once(' ')?;
        let (target, version) = rest.rsplit_once(' ')?;
        (is_method(method) && version.starts_with("HTTP/") && !target.is_empty()).then_some((method, target))
    }
    match line {
        Cow::Borrowed(line) => split(line).map(|(method, target)| (method.into(), target.into())),
        Cow::Owned(line) => split(line).map(|(method, target)| (method.to_owned().into(), target.to_owned().into())),
    }
}

/// Returns true if the text can be a method: a token (RFC 9110 §5.6.2).
pub(super) fn is_method(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
}

/// Returns a request's path, and its host if the target names one. Targets are `/x?y`, `*`, `http://host/x?y` or, for
/// `CONNECT`, `host:port` (RFC 9112 §3.2).
pub(super) fn split_target(target: Cow<'_, str>) -> (Cow<'_, str>, Option<String>) {
    if target.starts_with('/') || target == "*" {
        return (target, None);
    }
    let Some((_, rest)) = target.split_once("://") else { return (Cow::Borrowed("/"), Some(target.into_owned())) };
    let (host, path) = rest.find(['/', '?']).map_or((rest, "/"), |at| rest.split_at(at));
    let path = if path.starts_with('?') { format!("/{path}") } else { path.to_owned() };
    (Cow::Owned(path), Some(host.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_with_or_without_port() {
        for (text, expected) in [
            ("1.2.3.4", Some("1.2.3.4")),
            ("1.2.3.4:5678", Some("1.2.3.4")),
            ("::1", Some("::1")),
            ("[::1]", Some("::1")),
            ("[::1]:80", Some("::1")),
            ("localhost", None),
            ("-", None),
            ("", None),
        ] {
            assert_eq!(parse_address(text), expected.map(|text| text.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn request_targets_split_into_path_and_host() {
        for (target, path, host) in [
            ("/a?b", "/a?b", None),
            ("*", "*", None),
            ("http://example.com:81/a?b", "/a?b", Some("example.com:81")),
            ("http://example.com", "/", Some("example.com")),
            ("http://example.com?b", "/?b", Some("example.com")),
            ("example.com:443", "/", Some("example.com:443")),
        ] {
            assert_eq!(split_target(Cow::Borrowed(target)), (path.into(), host.map(str::to_owned)), "{target}");
        }
    }
}
