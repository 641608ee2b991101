//! Paths as they are matched, so that no other spelling of the same path slips by.

use arrayvec::ArrayVec;

/// Paths up to this length are normalised without allocating.
const INLINE: usize = 256;

/// What the upstream takes for the same path beyond RFC 3986: `inbound.path_quirks`. By default `encoded_slash` alone,
/// since a limit in front of nginx is evaded without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathQuirks {
    /// `encoded_slash`: `%2F`, `%5C` and `\` separate segments like `/`, as nginx and IIS read them. On by default.
    pub encoded_slash: bool,
    /// `parameters`: what follows `;` in a segment is dropped, as Java servers do.
    pub parameters: bool,
    /// `case`: ASCII letters of either case are the same, as for Express and on Windows.
    pub case: bool,
}

impl PathQuirks {
    /// None of them: paths as RFC 3986 has them. A policy says so with `path_quirks = []`.
    pub const NONE: Self = Self { encoded_slash: false, parameters: false, case: false };
}

impl Default for PathQuirks {
    fn default() -> Self {
        Self { encoded_slash: true, ..Self::NONE }
    }
}

/// A path in the one spelling that matches and keys use: without query string and fragment; escapes decoded, but for
/// `%25` (and `%2F` where that is no slash); empty and `.` segments dropped, `..` resolved; no slash at the end (but `/` alone).
#[expect(clippy::large_enum_variant, reason = "the large variant is there to spare an allocation")]
pub(crate) enum Normalised<'a> {
    Borrowed(&'a [u8]),
    Short(ArrayVec<u8, INLINE>),
    Long(Vec<u8>),
}

impl<'a> Normalised<'a> {
    #[inline]
    pub(crate) fn new(path: &'a str, quirks: PathQuirks) -> Self {
        let bytes = path.as_bytes();
        let (mut seen, mut before) = (0, 0);
        let mut end = bytes.len();
        for (at, byte) in bytes.iter().enumerate() {
            let class = CLASSES[usize::from(*byte)];
            if class == ENDS {
                end = at;
                break;
            }
            seen |= class | (before << 1 & class >> 3 & REWRITES);
            before = class;
        }
        let bytes = &bytes[..end];
        let rewrites = if quirks.case { REWRITES | UPPER } else { REWRITES };
        let plain = seen & rewrites == 0 && bytes.first() == Some(&b'/');
        if plain && (end == 1 || before & SLASH == 0) || bytes == b"*" {
            return Self::Borrowed(bytes);
        }
        Self::rewritten(bytes, quirks)
    }

    /// Whether it was plain already, so that every reading is the same.
    pub(crate) fn is_borrowed(&self) -> bool {
        matches!(self, Self::Borrowed(_))
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Short(bytes) => bytes,
            Self::Long(bytes) => bytes,
        }
    }

    #[cold]
    fn rewritten(bytes: &[u8], quirks: PathQuirks) -> Self {
        // A slash is put before a path that lacks one; nothing else grows.
        if bytes.len() < INLINE {
            let mut short = ArrayVec::new();
            rewrite(bytes, quirks, &mut short);
            Self::Short(short)
        } else {
            let mut long = Vec::with_capacity(bytes.len() + 1);
            rewrite(bytes, quirks, &mut long);
            Self::Long(long)
        }
    }
}

// What a byte means for whether a path is plain.
const SLASH: u8 = 1;
const REWRITES: u8 = 1 << 1;
const UPPER: u8 = 1 << 2;
const ENDS: u8 = 1 << 3;
/// Behind a slash it may be something to drop. Three bits above what that means, so that it takes no branch to see.
const DROPS: u8 = REWRITES << 3;

const CLASSES: [u8; 256] = {
    let mut classes = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        classes[byte] = match byte as u8 {
            b'/' => SLASH | DROPS,
            b'.' => DROPS,
            b'%' | b'\\' | b';' => REWRITES,
            b'A'..=b'Z' => UPPER,
            b'?' | b'#' => ENDS,
            _ => 0,
        };
        byte += 1;
    }
    classes
};

/// What the rewriting needs of a buffer.
trait Buffer {
    fn put(&mut self, byte: u8);
    fn cut(&mut self, length: usize);
    fn bytes(&self) -> &[u8];
}

impl Buffer for Vec<u8> {
    fn put(&mut self, byte: u8) {
        self.push(byte);
    }
    fn cut(&mut self, length: usize) {
        self.truncate(length);
    }
    fn bytes(&self) -> &[u8] {
        self
    }
}

impl Buffer for ArrayVec<u8, INLINE> {
    fn put(&mut self, byte: u8) {
        self.push(byte);
    }
    fn cut(&mut self, length: usize) {
        self.truncate(length);
    }
    fn bytes(&self) -> &[u8] {
        self
    }
}

fn rewrite(bytes: &[u8], quirks: PathQuirks, out: &mut impl Buffer) {
    out.put(b'/');
    let mut in_parameter = false;
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let escaped = escape(bytes, at);
        at += if escaped.is_some() { 3 } else { 1 };
        let decoded = escaped.unwrap_or(byte);
        let separates = match (decoded, escaped.is_some()) {
            (b'/', false) => true,
            (b'/', true) | (b'\\', _) => quirks.encoded_slash,
            _ => false,
        };
        if separates {
            end_segment(out);
            in_parameter = false;
        } else if in_parameter {
        } else if byte == b';' && quirks.parameters {
            in_parameter = true;
        } else if escaped.is_some() && matches!(decoded, b'/' | b'%') {
            let digits = if decoded == b'/' { *b"%2F" } else { *b"%25" };
            for digit in digits {
                out.put(if quirks.case { digit.to_ascii_lowercase() } else { digit });
            }
        } else {
            out.put(if quirks.case { decoded.to_ascii_lowercase() } else { decoded });
        }
    }
    end_segment(out);
    let length = out.bytes().len();
    if length > 1 {
        out.cut(length - 1);
    }
}

/// Ends the segment at the end of `out` with a slash, or takes it back if it stands for nothing.
fn end_segment(out: &mut impl Buffer) {
    let begin = last_slash(out.bytes()) + 1;
    match &out.bytes()[begin..] {
        b"" => {}
        b"." => out.cut(begin),
        b".." => {
            let parent = last_slash(&out.bytes()[..begin.saturating_sub(1)]);
            out.cut(parent + 1);
        }
        _ => out.put(b'/'),
    }
}

fn last_slash(bytes: &[u8]) -> usize {
    bytes.iter().rposition(|byte| *byte == b'/').unwrap_or(0)
}

/// The byte that the escape `%XX` at this place stands for.
pub(crate) fn escape(bytes: &[u8], at: usize) -> Option<u8> {
    let digit = |index: usize| char::from(*bytes.get(index)?).to_digit(16);
    if bytes.get(at) != Some(&b'%') {
        return None;
    }
    u8::try_from(digit(at + 1)? * 16 + digit(at + 2)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PLAIN: PathQuirks = PathQuirks::NONE;

    fn normal(path: &str, quirks: PathQuirks) -> String {
        String::from_utf8_lossy(Normalised::new(path, quirks).as_bytes()).into_owned()
    }

    #[test]
    fn other_spellings_of_a_path_are_the_same() {
        for spelling in [
            "/login",
            "/login/",
            "//login",
            "/./login",
            "/x/../login",
            "/%6Cogin",
            "/%6c%6F%67%69%6e",
            "/login?next=/",
            "/login#top",
            "/../../login",
            "/login/.",
            "/login/x/..",
            "/%2e/login",
            "/x/%2E%2e/login",
            "/login//",
            "/login/%2e",
            "login",
            "///x//..//login///",
        ] {
            assert_eq!(normal(spelling, PLAIN), "/login", "{spelling}");
        }
    }

    #[test]
    fn what_differs_stays_different() {
        for (path, expected) in [
            ("/", "/"),
            ("", "/"),
            ("//", "/"),
            ("/..", "/"),
            ("*", "*"),
            ("/a/b", "/a/b"),
            ("/a%2fb", "/a%2Fb"),
            ("/a%252Fb", "/a%252Fb"),
            ("/100%", "/100%"),
            ("/%zz", "/%zz"),
            ("/a;b=c/d", "/a;b=c/d"),
            ("/A", "/A"),
            ("/a\\b", "/a\\b"),
            ("/.well-known/x", "/.well-known/x"),
            ("/...", "/..."),
            ("/..a/b", "/..a/b"),
            ("/caf%C3%A9", "/café"),
        ] {
            assert_eq!(normal(path, PLAIN), expected, "{path}");
        }
    }

    #[test]
    fn an_encoded_slash_separates_by_default() {
        for spelling in ["/%2flogin", "/x%2f..%2flogin", "/%2Flogin%2F", "/x/..%5clogin", "/\\login", "/%2f%2e%2flogin"]
        {
            assert_eq!(normal(spelling, PathQuirks::default()), "/login", "{spelling}");
            assert_ne!(normal(spelling, PLAIN), "/login", "{spelling}");
        }
    }

    #[test]
    fn quirks_join_more_spellings() {
        let slashes = PathQuirks { encoded_slash: true, ..PLAIN };
        assert_eq!(normal("/x%2F..%2flogin", slashes), "/login");
        assert_eq!(normal("/x\\..%5Clogin", slashes), "/login");
        let parameters = PathQuirks { parameters: true, ..PLAIN };
        assert_eq!(normal("/x/..;v=1/login;jsessionid=3", parameters), "/login");
        assert_eq!(normal("/a%3Bb", parameters), "/a;b");
        let both = PathQuirks { encoded_slash: true, parameters: true, case: false };
        assert_eq!(normal("/x;%2F..%2Flogin", both), "/login");
        let case = PathQuirks { case: true, ..PLAIN };
        assert_eq!(normal("/LogIn", case), "/login");
        assert_eq!(normal("/%4Cogin", case), "/login");
    }

    proptest! {
        #[test]
        fn the_normal_form_is_stable(path in "[/.%;a-zA-Z25eEfF\\\\?]{0,300}", slash: bool, parameters: bool, case: bool) {
            let quirks = PathQuirks { encoded_slash: slash, parameters, case };
            let once = Normalised::new(&path, quirks).as_bytes().to_vec();
            prop_assert!(once == b"*" || once[0] == b'/');
            // A decoded `;`, `?`, `#` or `\` is data, and would be read anew.
            if let Ok(text) = String::from_utf8(once.clone())
                && !text.contains([';', '?', '#', '\\', '%'])
            {
                let twice = Normalised::new(&text, quirks).as_bytes().to_vec();
                prop_assert_eq!(once, twice);
            }
        }

        #[test]
        fn never_panics(path in "\\PC*") {
            Normalised::new(&path, PathQuirks { encoded_slash: true, parameters: true, case: true });
        }
    }
}
