//! Paths in the form that is matched, so that no other spelling of a path evades a limit.

use std::ops::Deref;

use arrayvec::ArrayVec;

/// Paths up to this length are normalised without allocating.
const INLINE: usize = 256;

/// The upstream's differences from RFC 3986 in the reading of paths: `inbound.path_quirks`. The default is
/// `encoded_slash` alone, because a limit in front of nginx can be evaded without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathQuirks {
    /// `encoded_slash`: `%2F`, `%5C` and `\` separate segments like `/`, as nginx and IIS read them. On by default.
    pub encoded_slash: bool,
    /// `parameters`: text after `;` in a segment is dropped, as Java servers do.
    pub parameters: bool,
    /// `case`: upper and lower case are the same, as for Express.
    pub case: bool,
    /// `caddy`: dots and spaces at the end of a path are dropped, as Caddy's path matchers do before 2.7, and on
    /// Windows. The word also sets `case` and `encoded_slash`, which Caddy's matchers have too.
    pub caddy: bool,
    /// `windows`: dots and spaces at the end of a segment are dropped, as Windows does for files. The word also sets
    /// `case` and `encoded_slash`.
    pub windows: bool,
}

/// The handling of paths that servers may read in several ways: `inbound.ambiguous_paths`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AmbiguousPaths {
    /// `union`: every action that any reading of the path matches applies to the call.
    #[default]
    Union,
    /// `refuse`: a path whose readings match different actions is refused with 400.
    Refuse,
    /// `normalise`: the proxy and the tower layer forward the path in its normal form
    /// ([`Plan::forwarded_path`](crate::Plan::forwarded_path)), which has fewer readings. Those are handled as by
    /// `union`.
    Normalise,
}

impl PathQuirks {
    /// No quirks: paths as in RFC 3986. A policy writes `path_quirks = []`.
    pub const NONE: Self = Self { encoded_slash: false, parameters: false, case: false, caddy: false, windows: false };
}

impl Default for PathQuirks {
    fn default() -> Self {
        Self { encoded_slash: true, ..Self::NONE }
    }
}

/// A path in the one spelling that matchers and keys use. It has no query string or fragment. Escapes are decoded,
/// except `%25` (and `%2F` if that is no separator). Empty and `.` segments are dropped, and `..` is resolved. There is
/// no slash at the end, except in `/`.
#[expect(clippy::large_enum_variant, reason = "the large variant is there to spare an allocation")]
pub(crate) enum NormalisedPath<'a> {
    Borrowed(&'a [u8]),
    Short(ArrayVec<u8, INLINE>),
    Long(Vec<u8>),
}

impl<'a> NormalisedPath<'a> {
    #[inline]
    pub(crate) fn new(path: &'a str, quirks: PathQuirks) -> Self {
        let (bytes, is_plain) = Self::scan(path, quirks);
        if is_plain { Self::Borrowed(bytes) } else { Self::rewrite_path(bytes, quirks) }
    }

    /// True if a path is plain already, so that every reading is the same.
    pub(crate) fn is_plain(path: &'a str, quirks: PathQuirks) -> bool {
        Self::scan(path, quirks).1
    }

    /// Returns the path without its query string or fragment, and true if it is plain.
    #[inline]
    fn scan(path: &'a str, quirks: PathQuirks) -> (&'a [u8], bool) {
        let bytes = path.as_bytes();
        let (mut seen, mut before) = (0, 0);
        let mut end = bytes.len();
        for (at, byte) in bytes.iter().enumerate() {
            let class = CLASSES[usize::from(*byte)];
            if class & ENDS_PATH != 0 {
                seen |= class & REWRITES;
                end = at;
                break;
            }
            seen |= class | (before << 1 & class >> 3 & REWRITES);
            before = class;
        }
        let bytes = &bytes[..end];
        let mut rewrites = REWRITES;
        if quirks.case {
            rewrites |= UPPER;
        }
        if quirks.caddy || quirks.windows {
            rewrites |= MAY_TRIM_AT_END;
        }
        let plain = seen & rewrites == 0 && bytes.first() == Some(&b'/');
        (bytes, plain && (end == 1 || before & SLASH == 0) || bytes == b"*")
    }

    /// True if the path is plain already, so that every reading is the same.
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
    fn rewrite_path(bytes: &[u8], quirks: PathQuirks) -> Self {
        let reading = Reading::normal(quirks);
        // A slash is put before a path that lacks one; nothing else grows.
        let normalised = if bytes.len() < INLINE {
            let (mut short, mut tokens) = (ArrayVec::new(), ArrayVec::<PathByte, INLINE>::new());
            let raw: ArrayVec<PathByte, INLINE> = bytes.iter().map(|byte| (*byte, 0)).collect();
            decode_layer(&raw, |_| true, &mut tokens);
            write_reading(&tokens, &reading, &mut short);
            Self::Short(short)
        } else {
            let (mut long, mut tokens) = (Vec::with_capacity(bytes.len() + 1), Vec::with_capacity(bytes.len()));
            decode_layer(&as_tokens(bytes), |_| true, &mut tokens);
            write_reading(&tokens, &reading, &mut long);
            Self::Long(long)
        };
        match fold_case(normalised.as_bytes(), quirks) {
            Some(folded) => Self::Long(folded),
            None => normalised,
        }
    }
}

// The classes of bytes that decide if a path is plain.
const SLASH: u8 = 1;
const REWRITES: u8 = 1 << 1;
const UPPER: u8 = 1 << 2;
const ENDS_PATH: u8 = 1 << 3;
/// A byte that may begin something to drop after a slash. Three bits above `REWRITES`, so that the test needs no
/// branch.
const MAY_DROP_AFTER_SLASH: u8 = REWRITES << 3;
/// A byte that may be dropped at the end of a segment.
const MAY_TRIM_AT_END: u8 = 1 << 5;
/// A byte that isn't copied as it is in every reading of a path whose escapes are decoded.
const MAY_DIFFER: u8 = 1 << 6;

const CLASSES: [u8; 256] = {
    let mut classes = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        classes[byte] = match byte as u8 {
            b'/' => SLASH | MAY_DROP_AFTER_SLASH | MAY_DIFFER,
            b'.' => MAY_DROP_AFTER_SLASH | MAY_TRIM_AT_END | MAY_DIFFER,
            // A server that parses the path as a URL again leaves control characters and spaces out.
            ..=b' ' | b'%' | b'\\' | b';' => REWRITES | MAY_DIFFER,
            b'A'..=b'Z' | 0x80.. => UPPER,
            b'?' => ENDS_PATH | MAY_DIFFER,
            // A fragment never comes over the wire, and servers that receive one handle it in different ways.
            b'#' => ENDS_PATH | REWRITES | MAY_DIFFER,
            _ => 0,
        };
        byte += 1;
    }
    classes
};

/// A byte of a path, and the number of layers of escapes that it came out of.
pub(crate) type PathByte = (u8, u8);

pub(crate) fn as_tokens(bytes: &[u8]) -> Vec<PathByte> {
    bytes.iter().map(|byte| (*byte, 0)).collect()
}

/// True if servers copy the byte as it is in every reading of a path whose escapes are decoded.
#[inline]
pub(crate) fn is_data(byte: u8) -> bool {
    CLASSES[usize::from(byte)] & MAY_DIFFER == 0
}

/// Decodes one layer of escapes, of those bytes that `which` accepts.
pub(crate) fn decode_layer(tokens: &[PathByte], which: impl Fn(u8) -> bool, out: &mut impl Extend<PathByte>) {
    let digit = |(byte, layers): &PathByte| Some((u8::try_from(char::from(*byte).to_digit(16)?).ok()?, *layers));
    let mut rest = tokens;
    while !rest.is_empty() {
        let run = rest.iter().position(|(byte, _)| *byte == b'%').unwrap_or(rest.len());
        out.extend(rest[..run].iter().copied());
        rest = &rest[run..];
        if let [_, high, low, behind @ ..] = rest
            && let (Some((high, above)), Some((low, below))) = (digit(high), digit(low))
            && which(high << 4 | low)
        {
            out.extend([(high << 4 | low, above.max(below) + 1)]);
            rest = behind;
        } else if let [sign, behind @ ..] = rest {
            out.extend([*sign]);
            rest = behind;
        }
    }
}

/// The handling of empty segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlashMode {
    Kept,
    /// They are dropped before dot segments are resolved: `/a//..` is `/`.
    Merged,
    /// They are dropped after that: `/a//..` is `/a`.
    MergedLast,
}

/// The handling of text after `;` in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParameterMode {
    Kept,
    /// It is dropped before dot segments are resolved: `/a/..;` is `/`.
    Stripped,
    /// It is dropped after that: `/a/..;` is `/a/..`.
    StrippedLast,
    /// It is dropped with all that follows, as in Fastify 4: `/a;/b` is `/a`.
    EndPath,
}

/// Separators of segments besides a plain slash, as bits.
pub(crate) mod separators {
    pub(crate) const ESCAPED_SLASH: u8 = 1;
    pub(crate) const BACKSLASH: u8 = 2;
    pub(crate) const ESCAPED_BACKSLASH: u8 = 4;
    pub(crate) const ALL: u8 = ESCAPED_SLASH | BACKSLASH | ESCAPED_BACKSLASH;
}

/// One way in which a server may read a path after its escapes are decoded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    /// The most layers of escapes from which the dots of a resolved dot segment may come; `None` keeps all dot
    /// segments.
    pub(crate) max_dot_layers: Option<u8>,
    pub(crate) slashes: SlashMode,
    pub(crate) parameters: ParameterMode,
    /// The most layers of escapes from which a `;` that begins parameters may come.
    pub(crate) max_semicolon_layers: u8,
    pub(crate) separators: u8,
    /// True if the path is parsed as a URL again after decoding. Escaped `?` and `#` then end it; tabs and line ends
    /// are left out, and so are control characters and spaces at its end.
    pub(crate) is_reparsed: bool,
    /// True if dots and spaces at the end of the path are dropped.
    pub(crate) trims_end: bool,
    /// True if dots and spaces at the end of each segment are dropped.
    pub(crate) trims_segments: bool,
    pub(crate) folds_case: bool,
}

impl Reading {
    /// The reading of RFC 3986 with these quirks.
    pub(crate) fn normal(quirks: PathQuirks) -> Self {
        Self {
            max_dot_layers: Some(1),
            slashes: SlashMode::Merged,
            parameters: if quirks.parameters { ParameterMode::Stripped } else { ParameterMode::Kept },
            max_semicolon_layers: 0,
            separators: if quirks.encoded_slash { separators::ALL } else { 0 },
            is_reparsed: false,
            trims_end: quirks.caddy,
            trims_segments: quirks.windows,
            folds_case: quirks.case,
        }
    }

    /// The reading that merges the most spellings of one path.
    pub(crate) fn coarsest(quirks: PathQuirks) -> Self {
        Self {
            max_dot_layers: Some(2),
            parameters: ParameterMode::Stripped,
            max_semicolon_layers: 2,
            ..Self::normal(quirks)
        }
    }

    fn is_separator(&self, (byte, layers): PathByte) -> bool {
        let bit = match (byte, layers) {
            (b'/', 0) => return true,
            (b'/', _) => separators::ESCAPED_SLASH,
            (b'\\', 0) => separators::BACKSLASH,
            (b'\\', _) => separators::ESCAPED_BACKSLASH,
            _ => return false,
        };
        self.separators & bit != 0
    }
}

/// The operations on a buffer that rewriting needs.
pub(crate) trait ByteBuffer: Deref<Target = [u8]> + Extend<u8> {
    fn push_byte(&mut self, byte: u8);
    fn truncate_to(&mut self, length: usize);
}

impl ByteBuffer for Vec<u8> {
    fn push_byte(&mut self, byte: u8) {
        self.push(byte);
    }
    fn truncate_to(&mut self, length: usize) {
        self.truncate(length);
    }
}

impl ByteBuffer for ArrayVec<u8, INLINE> {
    fn push_byte(&mut self, byte: u8) {
        self.push(byte);
    }
    fn truncate_to(&mut self, length: usize) {
        self.truncate(length);
    }
}

/// The segment that is being written.
#[derive(Default)]
struct OpenSegment {
    begin: usize,
    /// The most layers of escapes that its dots came out of, if it has nothing else.
    layers: u8,
    /// The start of its parameters, if they are dropped at its end.
    parameters: Option<usize>,
}

/// Writes a path in this reading. An escaped slash or percent sign that is data becomes `%2F` or `%25`. There is no
/// slash at the end, except in `/`. Returns the number of bytes that it looked at one by one.
pub(crate) fn write_reading(tokens: &[PathByte], reading: &Reading, out: &mut impl ByteBuffer) -> usize {
    out.push_byte(b'/');
    let mut segment = OpenSegment { begin: 1, ..OpenSegment::default() };
    let (mut at, mut steps, mut in_parameter) = (0, 0, false);
    let fold = |byte: u8| if reading.folds_case { byte.to_ascii_lowercase() } else { byte };
    loop {
        let run = tokens[at..].iter().position(|(byte, _)| !is_data(*byte)).unwrap_or(tokens.len() - at);
        if !in_parameter {
            out.extend(tokens[at..at + run].iter().map(|(byte, _)| fold(*byte)));
        }
        at += run;
        let Some(&(byte, layers)) = tokens.get(at) else { break };
        at += 1;
        steps += 1;
        if reading.is_separator((byte, layers)) {
            // The output already has the first slash.
            if at > 1 {
                end_segment(out, &segment, reading, false);
                segment = OpenSegment { begin: out.len(), ..OpenSegment::default() };
            }
            in_parameter = false;
            continue;
        }
        if reading.is_reparsed {
            match byte {
                b'?' | b'#' if layers > 0 => break,
                b'\t' | b'\n' | b'\r' => continue,
                _ => {}
            }
        }
        if byte == b';' && layers <= reading.max_semicolon_layers {
            match reading.parameters {
                ParameterMode::Kept => {}
                ParameterMode::EndPath => break,
                ParameterMode::Stripped => in_parameter = true,
                ParameterMode::StrippedLast => {
                    segment.parameters.get_or_insert(out.len());
                }
            }
        }
        if in_parameter {
            continue;
        }
        segment.layers = segment.layers.max(layers);
        match byte {
            b'/' | b'%' if layers > 0 => {
                let digits = if byte == b'/' { *b"%2F" } else { *b"%25" };
                digits.into_iter().for_each(|digit| out.push_byte(fold(digit)));
            }
            _ => out.push_byte(byte),
        }
    }
    end_segment(out, &segment, reading, true);
    let length = out.len();
    if length > 1 {
        out.truncate_to(length - 1);
    }
    steps
}

/// Ends the segment at the end of `out` with a slash, or removes a segment that is dropped.
fn end_segment(out: &mut impl ByteBuffer, segment: &OpenSegment, reading: &Reading, is_last: bool) {
    let begin = segment.begin;
    if is_last && reading.trims_end {
        trim(out, begin);
    }
    while is_last && reading.is_reparsed && matches!(&out[begin..], [.., ..=b' ']) {
        out.truncate_to(out.len() - 1);
    }
    let resolves = reading.max_dot_layers.is_some_and(|most| segment.layers <= most);
    match &out[begin..] {
        b"." if resolves => out.truncate_to(begin),
        b".." if resolves => {
            let parent = out[..begin.saturating_sub(1)].iter().rposition(|byte| *byte == b'/').unwrap_or(0);
            out.truncate_to(parent + 1);
        }
        text => {
            let is_dots = matches!(text, b"." | b"..");
            if let Some(at) = segment.parameters {
                out.truncate_to(at.max(begin));
            }
            if reading.trims_segments && !is_dots {
                trim(out, begin);
            }
            let is_empty = out.len() == begin;
            if !is_empty || !is_last && reading.slashes != SlashMode::Merged {
                out.push_byte(b'/');
            }
        }
    }
}

/// Drops the dots and spaces at the end of `out`, down to `begin`.
fn trim(out: &mut impl ByteBuffer, begin: usize) {
    while let [.., b'.' | b' '] = &out[begin..] {
        out.truncate_to(out.len() - 1);
    }
}

/// Folds the letters beyond ASCII; `None` if the path has none or case makes a difference.
pub(crate) fn fold_case(path: &[u8], quirks: PathQuirks) -> Option<Vec<u8>> {
    if !quirks.case || path.is_ascii() {
        return None;
    }
    let mut folded = Vec::with_capacity(path.len());
    for chunk in path.utf8_chunks() {
        for letter in chunk.valid().chars() {
            match letter {
                // Some servers treat these as the ASCII letter, in one direction or the other.
                'İ' | 'ı' => folded.push(b'i'),
                'ſ' => folded.push(b's'),
                _ => {
                    for lower in letter.to_lowercase() {
                        folded.extend_from_slice(lower.encode_utf8(&mut [0; 4]).as_bytes());
                    }
                }
            }
        }
        folded.extend_from_slice(chunk.invalid());
    }
    Some(folded)
}

/// The byte that the escape `%XX` at this index stands for.
pub(crate) fn decode_escape(bytes: &[u8], at: usize) -> Option<u8> {
    let digit = |index: usize| char::from(*bytes.get(index)?).to_digit(16);
    if bytes.get(at) != Some(&b'%') {
        return None;
    }
    u8::try_from(digit(at + 1)? * 16 + digit(at + 2)?).ok()
}

/// The character that the escape `%uXXXX` at this index stands for. Perl's CGI.pm decodes these.
pub(crate) fn decode_unicode_escape(bytes: &[u8], at: usize) -> Option<char> {
    let digits = bytes.get(at..at + 6)?.strip_prefix(b"%u")?;
    let digit = |code, digit: &u8| Some(code * 16 + char::from(*digit).to_digit(16)?);
    digits.iter().try_fold(0, digit).and_then(char::from_u32)
}

/// Decodes escapes until none is left, in one pass: those that the decoding itself gives are at the end of `decoded`.
pub(crate) fn decode_all_escapes(bytes: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(bytes.len());
    for byte in bytes {
        decoded.push(*byte);
        loop {
            let end = decoded.len();
            if let Some(at) = end.checked_sub(3)
                && let Some(byte) = decode_escape(&decoded, at)
            {
                decoded.truncate(at);
                decoded.push(byte);
            } else if let Some(at) = end.checked_sub(6)
                && let Some(letter) = decode_unicode_escape(&decoded, at)
            {
                decoded.truncate(at);
                decoded.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
            } else {
                break;
            }
        }
    }
    decoded
}

#[cfg(test)]
mod tests;
