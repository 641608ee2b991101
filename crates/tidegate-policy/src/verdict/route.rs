//! The paths of requests: patterns with captures, and the route of a request, which leaves ids out.

use std::borrow::Cow;
use std::fmt;
use std::hash::Hasher as _;

use siphasher::sip::SipHasher13;
use tidegate_core::Key;

use super::RequestFacts;
use crate::path::{NormalisedPath, PathQuirks};

/// The most segments of a path that a route tells apart.
const MAX_SEGMENTS: usize = 32;
/// Segments of at least this length with a digit are ids, such as `7fae31cd09b2c6f1`.
const MIN_OPAQUE_ID: usize = 16;
/// The least length of an id in hexadecimal digits.
const MIN_HEX_ID: usize = 8;

/// A path in the spelling with which rules and scopes are compared: escapes are decoded, and dot segments resolved. Another
/// spelling of a closed path would otherwise be open, or close more than its own calls.
pub fn comparable_path(path: &str) -> Cow<'_, str> {
    let bytes = path.as_bytes();
    if !bytes.contains(&b'%') && !bytes.windows(2).any(|pair| pair == b"/.") {
        return Cow::Borrowed(path);
    }
    let normalised = NormalisedPath::new(path, PathQuirks::NONE);
    Cow::Owned(String::from_utf8_lossy(normalised.as_bytes()).into_owned())
}

/// A segment of a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Text(String),
    /// Any segment, with its name if it is captured.
    Any(Option<String>),
}

/// A pattern of paths: `/channels/{channel}/**`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PathTemplate {
    /// The segments before `**`, or all.
    before: Vec<Segment>,
    /// The segments behind `**`, which stands for any number of segments. `None` without it.
    behind: Option<Vec<Segment>>,
}

impl PathTemplate {
    /// Parses a pattern. The error says what is wrong.
    pub(crate) fn new(text: &str) -> Result<Self, &'static str> {
        if !text.starts_with('/') {
            return Err("a path begins with `/`");
        }
        let text = comparable_path(text);
        let mut parts = split(&text).collect::<Vec<_>>();
        let behind = parts.iter().position(|part| *part == "**").map(|place| parts.split_off(place));
        let segment = |segment: &str| match segment {
            "*" => Ok(Segment::Any(None)),
            _ => match segment.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
                Some(name) if !name.is_empty() && !name.contains(['{', '}']) => Ok(Segment::Any(Some(name.to_owned()))),
                _ if segment.contains(['{', '}', '*', '?']) => {
                    Err("a segment is a text, `*` or `{name}`, and `**` stands once")
                }
                _ => Ok(Segment::Text(segment.to_owned())),
            },
        };
        let before = parts.into_iter().map(segment).collect::<Result<_, _>>()?;
        let behind = behind.map(|parts| parts.into_iter().skip(1).map(segment).collect::<Result<_, _>>());
        Ok(Self { before, behind: behind.transpose()? })
    }

    /// The names of its captures.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.before.iter().chain(self.behind.iter().flatten()).filter_map(|segment| match segment {
            Segment::Any(name) => name.as_deref(),
            Segment::Text(_) => None,
        })
    }

    /// The captured segments of a path that it matches, with their names.
    pub(crate) fn captures<'p>(&self, path: &'p str) -> Option<Vec<(&str, &'p str)>> {
        let (found, mut captures) = (split(path).collect::<Vec<_>>(), Vec::new());
        let behind = self.behind.as_deref().unwrap_or_default();
        let is_long_enough = found.len() >= self.before.len() + behind.len();
        let has_fitting_length = is_long_enough && (self.behind.is_some() || found.len() == self.before.len());
        if !has_fitting_length {
            return None;
        }
        let last = &found[found.len() - behind.len()..];
        for (segment, own) in self.before.iter().zip(&found).chain(behind.iter().zip(last)) {
            match segment {
                Segment::Text(text) if text != own => return None,
                Segment::Any(Some(name)) => captures.push((name.as_str(), *own)),
                Segment::Text(_) | Segment::Any(None) => {}
            }
        }
        Some(captures)
    }
}

impl fmt::Display for PathTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let write = |f: &mut fmt::Formatter<'_>, segment: &Segment| match segment {
            Segment::Text(text) => write!(f, "/{text}"),
            Segment::Any(None) => f.write_str("/*"),
            Segment::Any(Some(name)) => write!(f, "/{{{name}}}"),
        };
        self.before.iter().try_for_each(|segment| write(f, segment))?;
        if let Some(behind) = &self.behind {
            f.write_str("/**")?;
            return behind.iter().try_for_each(|segment| write(f, segment));
        }
        if self.before.is_empty() { f.write_str("/") } else { Ok(()) }
    }
}

fn split(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|segment| !segment.is_empty())
}

/// Collects texts into the key of a scope or a route. With the provider's key in it, no caller can choose texts that collide.
pub(crate) struct ScopeHasher(SipHasher13);

impl ScopeHasher {
    pub(crate) fn new(provider: Key) -> Self {
        Self(SipHasher13::new_with_keys(provider.hi(), provider.lo()))
    }

    pub(crate) fn add(&mut self, text: &str) {
        self.0.write(text.as_bytes());
        // No text has this byte, so the end of one can't be taken for the beginning of the next.
        self.0.write_u8(0xff);
    }

    /// The key: never 0, and without the highest bit, which marks calls that wait alone.
    pub(crate) fn finish(self) -> u64 {
        (self.0.finish() >> 1).max(1)
    }

    /// Adds the method and the path without ids.
    pub(crate) fn add_route(&mut self, method: &str, path: &str) {
        self.add(method);
        for segment in split(path).take(MAX_SEGMENTS) {
            self.add(if is_id(segment) { "{}" } else { segment });
        }
    }
}

/// The method and the path without ids, as a text.
pub(crate) fn route_name(request: &RequestFacts<'_>) -> String {
    let mut name = request.method.to_string();
    for segment in split(request.path).take(MAX_SEGMENTS) {
        name.extend(["/", if is_id(segment) { "{}" } else { segment }]);
    }
    name
}

/// True if a segment of a path is probably an id: digits, hexadecimal digits, or a long text with digits.
fn is_id(segment: &str) -> bool {
    let bytes = segment.as_bytes();
    let digits = bytes.iter().filter(|byte| byte.is_ascii_digit()).count();
    if digits == 0 {
        return false;
    }
    let is_hex = || bytes.iter().all(|byte| byte.is_ascii_hexdigit() || *byte == b'-');
    digits == bytes.len() || bytes.len() >= MIN_OPAQUE_ID || bytes.len() >= MIN_HEX_ID && is_hex()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_capture_segments() {
        let captures = |pattern: &str, path: &str| {
            let template = PathTemplate::new(pattern).unwrap();
            template.captures(path).map(|found| {
                found.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(",")
            })
        };
        for (pattern, path, expected) in [
            ("/channels/{channel}/**", "/channels/7/messages/8", Some("channel=7")),
            ("/channels/{channel}/**", "/channels/7", Some("channel=7")),
            ("/channels/{channel}/**", "/channels", None),
            ("/channels/{channel}", "/channels/7/messages", None),
            ("/a/*/b", "//a/x/b/", Some("")),
            ("/**", "/", Some("")),
            ("/", "/", Some("")),
            ("/", "/a", None),
            ("/**/graphql", "/graphql", Some("")),
            ("/**/graphql", "/admin/api/2026-01/graphql", Some("")),
            ("/a/**/{last}", "/a/b", Some("last=b")),
            ("/a/**/{last}", "/a", None),
            ("/webhooks/{id}/{token}", "/webhooks/1/x", Some("id=1,token=x")),
            ("/.well-known/%61%20b/**", "/.well-known/a b/c", Some("")),
        ] {
            assert_eq!(captures(pattern, path).as_deref(), expected, "{pattern} {path}");
        }
        for wrong in ["search", "/a*", "/{", "/{}", "/**/a/**"] {
            assert!(PathTemplate::new(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn paths_are_compared_in_one_spelling() {
        for path in ["/a b/c", "/%61%20b/c", "/./a%20b//c/", "/x/../a%20b/c"] {
            assert_eq!(comparable_path(path), "/a b/c", "{path}");
        }
        assert_eq!(comparable_path("/a%2Fb"), "/a%2Fb", "one segment");
    }

    #[test]
    fn routes_leave_ids_out() {
        let route = |method: &str, path: &str| {
            let mut hasher = ScopeHasher::new(Key::new(1, 2));
            hasher.add_route(method, path);
            hasher.finish()
        };
        let same = |left: &str, right: &str| route("GET", left) == route("GET", right);
        assert!(same("/movie/603", "/movie/11"));
        assert!(same("/u/550e8400-e29b-41d4-a716-446655440000", "/u/7fae31cd09b2c6f1"));
        assert!(!same("/movie/603", "/tv/603"));
        assert!(!same("/v1/x", "/v2/x"));
        assert!(!same("/search/popular", "/search/latest"));
        assert!(!same("/ab", "/a/b"));
        assert_ne!(route("GET", "/a"), route("POST", "/a"));
    }
}
