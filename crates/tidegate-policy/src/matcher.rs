//! Matchers: the methods, paths and hosts of an action's requests.

use std::fmt;
use std::net::Ipv6Addr;
use std::ops::Range;

use http::Method;

use crate::host::{bare_host, is_host};
use crate::path::{NormalisedPath, PathQuirks, decode_escape};
use crate::regex_hint::{is_regex, nearest_pattern};

/// The most segments in a path pattern.
const MAX_SEGMENTS: usize = 32;
/// The longest path pattern, in bytes.
const MAX_PATTERN: usize = 1024;

/// The requests that an action matches, by method, path and host. A property that isn't set matches anything.
///
/// A path pattern has one of these forms:
/// - `/login` is exact.
/// - `/api/*` matches everything from there down: `/api`, `/api/` and `/api/v1/users`, not `/apis`.
/// - `/login*` matches all that begins so, as prefix routers do: `/login`, `/loginx` and `/login/x`.
/// - `/users/*/avatar` has a `*` within a segment for any run of characters there.
///
/// Other spellings of a path match too, so that they can't evade a limit. Servers read them in different ways, so every
/// reading is checked: escapes decoded never, once or twice (`/%6Cogin`); `.` and `..` resolved or kept
/// (`/x/../login`); empty segments merged or kept (`//login`); text after `;` in a segment dropped or kept. `%2F`,
/// `%5C` and `\` separate segments or are data. If they are always data for the upstream, as in RFC 3986, write
/// `inbound.path_quirks = []`. A slash at the end makes no difference. A call whose readings match different actions is
/// charged to all of them; `inbound.ambiguous_paths` has other choices. Letters of different case differ unless
/// `inbound.path_quirks` has `case`. That setting lists every quirk, so it must also name `encoded_slash` to keep it.
/// Hosts match in any case and with any port. The request is forwarded as it came, unless `ambiguous_paths` is
/// `normalise`.
///
/// `GET` matches `HEAD` as well, for which an upstream runs the same handler. An action for `HEAD` alone must come
/// first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matcher {
    pub(crate) methods: Vec<Method>,
    pub(crate) paths: Vec<PathPattern>,
    pub(crate) hosts: Vec<String>,
}

impl Matcher {
    /// The methods that match, as written; empty if any does. With GET, HEAD matches too.
    pub fn methods(&self) -> &[Method] {
        &self.methods
    }

    /// The path patterns as written; empty if any path matches.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &str> {
        self.paths.iter().map(|pattern| pattern.text.as_str())
    }

    /// The hosts that match, in lower case; empty if any does.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    #[inline]
    pub(crate) fn matches_method(&self, method: Option<&str>) -> bool {
        self.methods.is_empty()
            || method.is_some_and(|method| self.methods.iter().any(|own| is_method_match(own, method)))
    }

    #[inline]
    pub(crate) fn matches_host(&self, host: Option<&str>) -> bool {
        self.hosts.is_empty()
            || host.is_some_and(|host| {
                let host = bare_host(host);
                self.hosts.iter().any(|own| own.eq_ignore_ascii_case(host))
            })
    }

    /// True if this matches every request that `later` matches.
    pub(crate) fn covers(&self, later: &Self) -> bool {
        all_covered(&self.methods, &later.methods, |own, method| is_method_match(own, method.as_str()))
            && all_covered(&self.hosts, &later.hosts, String::eq)
            && all_covered(&self.paths, &later.paths, PathPattern::covers)
    }
}

/// True if each of the later items is covered by one's own; no items stand for all.
fn all_covered<T>(own: &[T], later: &[T], covers: impl Fn(&T, &T) -> bool) -> bool {
    let is_covered = |item| own.iter().any(|own| covers(own, item));
    own.is_empty() || !later.is_empty() && later.iter().all(is_covered)
}

/// Several servers take `post` for `POST`, so the case makes no difference.
#[inline]
fn is_method_match(own: &Method, method: &str) -> bool {
    own.as_str().eq_ignore_ascii_case(method) || *own == Method::GET && method.eq_ignore_ascii_case("HEAD")
}

/// Methods as bits, so that a test is one instruction. All methods beyond the registered ones share a bit; if that
/// bit decides, the methods must be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MethodSet(u16);

impl MethodSet {
    const ANY: Self = Self(u16::MAX);
    const OTHER: Self = Self(1 << 9);
    const NONE: Self = Self(1 << 10);

    /// The methods that a matcher with this list matches.
    pub(crate) fn new(methods: &[Method]) -> Self {
        if methods.is_empty() {
            return Self::ANY;
        }
        let bits = methods.iter().map(|method| Self::from_method(Some(method.as_str())).0);
        let set = bits.fold(0, |set, bit| set | bit);
        let head = if methods.contains(&Method::GET) { Self::from_method(Some("HEAD")).0 } else { 0 };
        Self(set | head)
    }

    #[inline]
    pub(crate) fn from_method(method: Option<&str>) -> Self {
        let place = match method {
            None => return Self::NONE,
            Some("GET") => 0,
            Some("HEAD") => 1,
            Some("POST") => 2,
            Some("PUT") => 3,
            Some("DELETE") => 4,
            Some("OPTIONS") => 5,
            Some("PATCH") => 6,
            Some("TRACE") => 7,
            Some("CONNECT") => 8,
            Some(other) => return Self::from_unusual_method(other),
        };
        Self(1 << place)
    }

    #[cold]
    fn from_unusual_method(method: &str) -> Self {
        let capitals = method.to_ascii_uppercase();
        if capitals == method { Self::OTHER } else { Self::from_method(Some(&capitals)) }
    }

    /// True if a request's method is among these; `None` if the bits can't decide.
    #[inline]
    pub(crate) fn contains(self, method: Self) -> Option<bool> {
        let unclear = method == Self::OTHER && self != Self::ANY && self.0 & method.0 != 0;
        (!unclear).then_some(self.0 & method.0 != 0)
    }
}

impl fmt::Display for Matcher {
    /// Writes `POST /login`, `GET or HEAD /api/* on example.org` or `any method /`. HEAD is listed wherever GET implies
    /// it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut methods: Vec<&str> = self.methods.iter().map(Method::as_str).collect();
        if let Some(get) = methods.iter().position(|method| *method == "GET")
            && !methods.contains(&"HEAD")
        {
            methods.insert(get + 1, "HEAD");
        }
        let paths: Vec<&str> = self.paths().collect();
        f.write_str(&if methods.is_empty() { "any method".to_owned() } else { methods.join(" or ") })?;
        write!(f, " {}", if paths.is_empty() { "any path".to_owned() } else { paths.join(" or ") })?;
        if self.hosts.is_empty() { Ok(()) } else { write!(f, " on {}", self.hosts.join(" or ")) }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PathPattern {
    text: String,
    pub(crate) segments: Vec<PatternSegment>,
    /// True if it ends in `*`, and so also matches everything below.
    pub(crate) matches_below: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PatternSegment {
    Literal(Vec<u8>),
    /// A segment with at least one `*`.
    Glob(Vec<u8>),
}

/// The error of an invalid pattern, and a valid way to write it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PatternError {
    pub(crate) message: &'static str,
    pub(crate) expected: &'static str,
    pub(crate) suggestion: Option<String>,
    /// The range of the error in the pattern, in bytes; `None` if it is about the whole pattern.
    pub(crate) range: Option<Range<usize>>,
}

impl PathPattern {
    pub(crate) fn new(text: &str, quirks: PathQuirks) -> Result<Self, PatternError> {
        let wrong =
            |message, expected, instead| Err(PatternError { message, expected, suggestion: instead, range: None });
        if text.is_empty() {
            return wrong("the path is empty", "a path such as \"/login\" or \"/api/*\"", None);
        }
        if is_regex(text) {
            let message = "a regular expression; a pattern is a plain path, with `*` as its only wildcard";
            let is_valid = |pattern: &String| !is_regex(pattern) && Self::new(pattern, quirks).is_ok();
            let expected = "a path such as \"/login\", \"/api/*\" or \"/users/*/avatar\", or a list of them";
            return wrong(message, expected, nearest_pattern(text).filter(is_valid));
        }
        if !text.starts_with('/') {
            let message = "the path doesn't begin with a slash";
            return wrong(message, "a path such as \"/login\" or \"/api/*\"", Some(format!("/{text}")));
        }
        if text.len() > MAX_PATTERN {
            return wrong("the path is longer than 1024 bytes", "a shorter one", None);
        }
        if let Some(at) = text.find(['?', '#']) {
            let message = "a path has no query string or fragment: matching doesn't look at them";
            return wrong(message, "a path alone", Some(text[..at].to_owned()));
        }
        if text.contains(|letter: char| letter.is_whitespace() || letter.is_control()) {
            return wrong("the path has white space in it", "a path such as \"/login\" or \"/api/*\"", None);
        }
        if text.contains("**") {
            let message = "`**` is no wildcard here";
            return wrong(message, "`*` within a segment, or `/*` at the end", Some(text.replace("**", "*")));
        }
        let broken = |at: &usize| decode_escape(text.as_bytes(), *at).is_none();
        if let Some(at) = text.match_indices('%').map(|(at, _)| at).find(broken) {
            return Err(PatternError {
                message: "`%` has no two hexadecimal digits behind it",
                expected: "an escape such as %20, or %25 for the sign itself",
                suggestion: None,
                range: Some(at..text.len().min(at + 3)),
            });
        }
        let (head, below) = match text.strip_suffix("/*") {
            Some(head) => (if head.is_empty() { "/" } else { head }, "/*"),
            None => (text, ""),
        };
        let open = text.ends_with('*');
        let normal = NormalisedPath::new(head, quirks);
        let normal = String::from_utf8_lossy(normal.as_bytes());
        let same = if quirks.case { normal.eq_ignore_ascii_case(head) } else { normal == head };
        if !same && head.ends_with('/') && normal == head.trim_end_matches('/') {
            let message = "a slash at the end makes no difference in matching";
            let expected = "the path without it, or with a * for everything below";
            return wrong(message, expected, Some(normal.into_owned()));
        }
        if !same {
            let message = "paths are matched in their plain form, and this one isn't in it";
            return wrong(message, "the plain form", Some(format!("{}{below}", normal.trim_end_matches('/'))));
        }
        let segment = |text: &[u8]| match text.contains(&b'*') {
            true => PatternSegment::Glob(text.to_vec()),
            false => PatternSegment::Literal(text.to_vec()),
        };
        let segments: Vec<PatternSegment> = segments(normal.as_bytes()).map(segment).collect();
        if segments.len() > MAX_SEGMENTS {
            return wrong("the path has more than 32 segments", "fewer; end it with /* to match longer ones", None);
        }
        Ok(Self { text: text.to_owned(), segments, matches_below: open })
    }

    /// The whole path, if the pattern is exact.
    pub(crate) fn exact_path(&self) -> Option<Vec<u8>> {
        let literals = self.segments.iter().map(|segment| match segment {
            PatternSegment::Literal(bytes) => Some(bytes.as_slice()),
            PatternSegment::Glob(_) => None,
        });
        let literals: Vec<&[u8]> = literals.collect::<Option<_>>().filter(|_| !self.matches_below)?;
        Some([b"/", literals.join(&b'/').as_slice()].concat())
    }

    fn covers(&self, later: &Self) -> bool {
        let lengths = if self.matches_below {
            self.segments.len() <= later.segments.len()
        } else {
            !later.matches_below && self.segments.len() == later.segments.len()
        };
        lengths && self.segments.iter().zip(&later.segments).all(|(own, theirs)| own.covers(theirs))
    }
}

impl PatternSegment {
    fn covers(&self, later: &Self) -> bool {
        match (self, later) {
            (Self::Glob(own), Self::Literal(theirs)) => glob_matches(own, theirs),
            (Self::Glob(own), Self::Glob(theirs)) => own == theirs || own == b"*",
            (own, theirs) => own == theirs,
        }
    }
}

/// The segments of a normal path; none for `/`.
pub(crate) fn segments(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.get(1..).unwrap_or_default().split(|byte| *byte == b'/').filter(|segment| !segment.is_empty())
}

/// True if `text` matches the pattern, in which each `*` stands for any run of bytes. It is enough to go back to the
/// last `*`, so the work is bounded by the product of the lengths.
pub(crate) fn glob_matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while t < text.len() {
        if pattern.get(p) == Some(&b'*') {
            retry = Some((p + 1, t));
            p += 1;
        } else if pattern.get(p) == Some(&text[t]) {
            p += 1;
            t += 1;
        } else if let Some((after_star, from)) = retry {
            (p, t) = (after_star, from + 1);
            retry = Some((after_star, t));
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

/// Converts the host of a matcher to the form that is compared, or says why it is invalid.
pub(crate) fn parse_host(text: &str) -> Result<String, &'static str> {
    let bare = bare_host(text).to_ascii_lowercase();
    if bare.is_empty() {
        Err("the host is empty")
    } else if text.contains('/') {
        Err("a host is no URL")
    } else if text.contains('*') {
        Err("hosts have no wildcards")
    } else if !is_host(text.as_bytes()) && text.parse::<Ipv6Addr>().is_err() {
        Err("a host has letters, digits, dots and dashes only")
    } else {
        Ok(bare)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pattern(text: &str) -> PathPattern {
        PathPattern::new(text, PathQuirks::default()).unwrap()
    }

    #[test]
    fn globs_match_the_expected_texts() {
        for (pattern, text, fits) in [
            ("*", "", true),
            ("*", "abc", true),
            ("a*c", "abc", true),
            ("a*c", "ac", true),
            ("a*c", "abd", false),
            ("a*b*c", "aXbYbZc", true),
            ("*.png", "x.png.png", true),
            ("*.png", "x.pngs", false),
            ("v*", "v1", true),
            ("a*a", "a", false),
        ] {
            assert_eq!(glob_matches(pattern.as_bytes(), text.as_bytes()), fits, "{pattern} {text}");
        }
    }

    #[test]
    fn get_rules_also_match_head() {
        let of = |methods: &[Method]| Matcher { methods: methods.to_vec(), paths: Vec::new(), hosts: Vec::new() };
        let (get, head, post) = (of(&[Method::GET]), of(&[Method::HEAD]), of(&[Method::POST]));
        assert!(get.matches_method(Some("GET")) && get.matches_method(Some("HEAD")));
        assert!(get.matches_method(Some("head")) && !get.matches_method(Some("POST")) && !get.matches_method(None));
        assert!(!head.matches_method(Some("GET")) && !post.matches_method(Some("HEAD")));
        assert!(get.covers(&head) && !head.covers(&get) && !post.covers(&head));
        assert!(get.covers(&of(&[Method::GET, Method::HEAD])));
        assert_eq!(of(&[Method::GET, Method::POST]).to_string(), "GET or HEAD or POST any path");
        assert_eq!(of(&[Method::HEAD, Method::GET]).to_string(), "HEAD or GET any path");
    }

    #[test]
    fn pattern_coverage_is_computed_correctly() {
        for (own, theirs, covers) in [
            ("/*", "/login", true),
            ("/*", "/", true),
            ("/api/*", "/api", true),
            ("/api/*", "/api/v1/*", true),
            ("/api/v1/*", "/api/*", false),
            ("/api/*", "/apis", false),
            ("/users/*/avatar", "/users/me/avatar", true),
            ("/users/me/avatar", "/users/*/avatar", false),
            ("/users/a*/avatar", "/users/*/avatar", false),
            ("/a", "/a", true),
            ("/a/*", "/b/*", false),
            ("/login*", "/login", true),
            ("/login*", "/loginx/y", true),
            ("/login*", "/log", false),
            ("/login", "/login*", false),
        ] {
            assert_eq!(pattern(own).covers(&pattern(theirs)), covers, "{own} {theirs}");
        }
    }

    #[test]
    fn non_normal_patterns_are_rejected_with_suggestion() {
        for (text, instead) in [
            ("login", Some("/login")),
            ("/login/", Some("/login")),
            ("//login", Some("/login")),
            ("/a/../login", Some("/login")),
            ("/%6Cogin", Some("/login")),
            ("/login?x=1", Some("/login")),
            ("/api/**", Some("/api/*")),
            ("/a//b/*", Some("/a/b/*")),
            ("", None),
            ("/a b", None),
        ] {
            assert_eq!(
                PathPattern::new(text, PathQuirks::default()).unwrap_err().suggestion.as_deref(),
                instead,
                "{text}"
            );
        }
    }

    #[test]
    fn hosts() {
        assert_eq!(parse_host("Example.ORG:8080"), Ok("example.org".to_owned()));
        assert_eq!(parse_host("example.org."), Ok("example.org".to_owned()));
        assert_eq!(parse_host("[::1]:80"), Ok("[::1]".to_owned()));
        assert!(
            parse_host("http://example.org").is_err()
                && parse_host("*.example.org").is_err()
                && parse_host("").is_err()
        );
        assert_eq!(bare_host("::1"), "::1");
    }

    proptest! {
        #[test]
        fn globs_agree_with_exhaustive_matching(pattern in "[ab*]{0,6}", text in "[ab]{0,8}") {
            fn slow(pattern: &[u8], text: &[u8]) -> bool {
                match pattern.split_first() {
                    None => text.is_empty(),
                    Some((b'*', rest)) => (0..=text.len()).any(|skip| slow(rest, &text[skip..])),
                    Some((byte, rest)) => text.first() == Some(byte) && slow(rest, &text[1..]),
                }
            }
            prop_assert_eq!(glob_matches(pattern.as_bytes(), text.as_bytes()), slow(pattern.as_bytes(), text.as_bytes()));
        }

        #[test]
        fn any_pattern_is_read_without_panic(text in "\\PC*|/[a-z*/%.;?]{0,20}") {
            let _ = PathPattern::new(&text, PathQuirks { encoded_slash: true, parameters: true, case: true, caddy: true, windows: true });
        }
    }
}
