//! Paths in the form that is matched, so that no other spelling of a path evades a limit.

use std::borrow::Cow;

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
pub(crate) struct NormalisedPath<'a>(Cow<'a, [u8]>);

impl<'a> NormalisedPath<'a> {
    #[inline]
    pub(crate) fn new(path: &'a str, quirks: PathQuirks) -> Self {
        let (bytes, is_plain) = Self::scan(path, quirks);
        Self(if is_plain { Cow::Borrowed(bytes) } else { Self::rewrite_path(bytes, quirks) })
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
        matches!(self.0, Cow::Borrowed(_))
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    #[cold]
    fn rewrite_path(bytes: &[u8], quirks: PathQuirks) -> Cow<'a, [u8]> {
        let mut text = PathText::new(bytes.to_vec()).decode_layer(|_| true);
        if quirks.case {
            text = text.folded();
        }
        let mut normalised = Vec::with_capacity(bytes.len() + 1);
        text.write_reading(&Reading::normal(quirks), &mut normalised);
        Cow::Owned(normalised)
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

/// True if servers copy the byte as it is in every reading of a path whose escapes are decoded.
#[inline]
pub(crate) fn is_data(byte: u8) -> bool {
    CLASSES[usize::from(byte)] & MAY_DIFFER == 0
}

/// A byte of a path that servers may read in several ways.
#[derive(Clone, Copy)]
pub(crate) struct PathSign {
    pub(crate) at: usize,
    pub(crate) byte: u8,
    /// The number of layers of escapes that the byte came out of.
    pub(crate) layers: u8,
}

/// A path, with the places of the bytes that servers may read in several ways. All others are copied in runs.
pub(crate) struct PathText {
    pub(crate) bytes: Vec<u8>,
    /// All bytes that aren't data, and hexadecimal digits that came out of escapes.
    signs: Vec<PathSign>,
}

impl PathText {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        let signs = bytes.iter().enumerate().filter(|(_, byte)| !is_data(**byte));
        let signs = signs.map(|(at, byte)| PathSign { at, byte: *byte, layers: 0 }).collect();
        Self { bytes, signs }
    }

    /// The bytes that aren't data.
    pub(crate) fn signs(&self) -> impl Iterator<Item = &PathSign> + Clone {
        self.signs.iter().filter(|sign| !is_data(sign.byte))
    }

    /// The number of layers of escapes that this byte came out of, if it may be of importance.
    pub(crate) fn layers(&self, at: usize) -> u8 {
        self.signs.binary_search_by_key(&at, |sign| sign.at).map_or(0, |index| self.signs[index].layers)
    }

    /// An empty text with room for a form of this one.
    fn empty(&self) -> Self {
        Self { bytes: Vec::with_capacity(self.bytes.len()), signs: Vec::with_capacity(self.signs.len()) }
    }

    fn push(&mut self, byte: u8, layers: u8) {
        if !is_data(byte) || layers > 0 && byte.is_ascii_hexdigit() {
            self.signs.push(PathSign { at: self.bytes.len(), byte, layers });
        }
        self.bytes.push(byte);
    }

    /// Returns the path with one more layer of escapes decoded, of those bytes that `which` accepts.
    pub(crate) fn decode_layer(&self, which: impl Fn(u8) -> bool) -> Self {
        let mut decoded = self.empty();
        let (mut copied, mut rest) = (0, self.signs.as_slice());
        while let [sign, behind @ ..] = rest {
            rest = behind;
            let Some(byte) = decode_escape(&self.bytes, sign.at).filter(|byte| which(*byte)) else {
                decoded.signs.push(PathSign { at: decoded.bytes.len() + sign.at - copied, ..*sign });
                continue;
            };
            decoded.bytes.extend_from_slice(&self.bytes[copied..sign.at]);
            copied = sign.at + 3;
            let mut layers = 0;
            while let [digit, behind @ ..] = rest
                && digit.at < copied
            {
                layers = layers.max(digit.layers);
                rest = behind;
            }
            decoded.push(byte, layers + 1);
        }
        decoded.bytes.extend_from_slice(&self.bytes[copied..]);
        decoded
    }

    /// Returns the path in lower case, as [`fold_case`] does.
    pub(crate) fn folded(&self) -> Self {
        let mut folded = self.empty();
        let mut copied = 0;
        for sign in &self.signs {
            fold_case(&self.bytes[copied..sign.at], &mut folded.bytes);
            folded.push(sign.byte.to_ascii_lowercase(), sign.layers);
            copied = sign.at + 1;
        }
        fold_case(&self.bytes[copied..], &mut folded.bytes);
        folded
    }

    /// Returns the path without parameters: each goes from a `;` to the next slash.
    pub(crate) fn without_parameters(&self, quirks: PathQuirks) -> Self {
        let mut left = self.empty();
        let (mut copied, mut is_in) = (0, false);
        for sign in &self.signs {
            if !is_in {
                left.bytes.extend_from_slice(&self.bytes[copied..sign.at]);
            }
            copied = sign.at + 1;
            is_in = match sign.byte {
                b';' => true,
                b'/' if sign.layers == 0 || quirks.encoded_slash => false,
                _ => is_in,
            };
            if !is_in {
                left.push(sign.byte, sign.layers);
            }
        }
        if !is_in {
            left.bytes.extend_from_slice(&self.bytes[copied..]);
        }
        left
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

    fn is_separator(&self, sign: &PathSign) -> bool {
        let bit = match (sign.byte, sign.layers) {
            (b'/', 0) => return true,
            (b'/', _) => separators::ESCAPED_SLASH,
            (b'\\', 0) => separators::BACKSLASH,
            (b'\\', _) => separators::ESCAPED_BACKSLASH,
            _ => return false,
        };
        self.separators & bit != 0
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

impl PathText {
    /// Writes the path in this reading. An escaped slash or percent sign that is data becomes `%2F` or `%25`. There is no
    /// slash at the end, except in `/`.
    pub(crate) fn write_reading(&self, reading: &Reading, out: &mut Vec<u8>) {
        out.push(b'/');
        let mut segment = OpenSegment { begin: 1, ..OpenSegment::default() };
        let (mut copied, mut in_parameter, mut is_cut) = (0, false, false);
        for sign in &self.signs {
            let PathSign { at, byte, layers } = *sign;
            let is_separator = reading.is_separator(sign);
            let is_left_out = !is_separator
                && match byte {
                    b'?' | b'#' => reading.is_reparsed && layers > 0,
                    b'\t' | b'\n' | b'\r' => reading.is_reparsed,
                    b';' => reading.parameters != ParameterMode::Kept && layers <= reading.max_semicolon_layers,
                    _ => false,
                };
            if byte == b'.' {
                segment.layers = segment.layers.max(layers);
            }
            let is_escaped = layers > 0 && matches!(byte, b'/' | b'%');
            if !(is_separator || is_left_out || is_escaped) {
                continue;
            }
            if !in_parameter {
                out.extend_from_slice(&self.bytes[copied..at]);
            }
            copied = at + 1;
            if is_separator {
                // The output already has the first slash.
                if at > 0 {
                    end_segment(out, &segment, reading, false);
                    segment = OpenSegment { begin: out.len(), ..OpenSegment::default() };
                }
                in_parameter = false;
            } else if is_left_out {
                match (byte, reading.parameters) {
                    (b'?' | b'#', _) | (b';', ParameterMode::EndPath) => {
                        is_cut = true;
                        break;
                    }
                    (b';', ParameterMode::Stripped) => in_parameter = true,
                    (b';', _) => {
                        segment.parameters.get_or_insert(out.len());
                        out.push(byte);
                    }
                    _ => {}
                }
            } else if !in_parameter {
                out.extend_from_slice(if byte == b'%' {
                    b"%25"
                } else if reading.folds_case {
                    b"%2f"
                } else {
                    b"%2F"
                });
            }
        }
        if !in_parameter && !is_cut {
            out.extend_from_slice(&self.bytes[copied..]);
        }
        end_segment(out, &segment, reading, true);
        if out.len() > 1 {
            out.pop();
        }
    }
}

/// Ends the segment at the end of `out` with a slash, or removes a segment that is dropped.
fn end_segment(out: &mut Vec<u8>, segment: &OpenSegment, reading: &Reading, is_last: bool) {
    let begin = segment.begin;
    if begin == out.len() && !is_last {
        if reading.slashes != SlashMode::Merged {
            out.push(b'/');
        }
        return;
    }
    if is_last && reading.trims_end {
        trim(out, begin);
    }
    while is_last && reading.is_reparsed && matches!(&out[begin..], [.., ..=b' ']) {
        out.truncate(out.len() - 1);
    }
    let resolves = reading.max_dot_layers.is_some_and(|most| segment.layers <= most);
    match &out[begin..] {
        b"." if resolves => out.truncate(begin),
        b".." if resolves => {
            let parent = out[..begin.saturating_sub(1)].iter().rposition(|byte| *byte == b'/').unwrap_or(0);
            out.truncate(parent + 1);
        }
        text => {
            let is_dots = matches!(text, b"." | b"..");
            if let Some(at) = segment.parameters {
                out.truncate(at.max(begin));
            }
            if reading.trims_segments && !is_dots {
                trim(out, begin);
            }
            let is_empty = out.len() == begin;
            if !is_empty || !is_last && reading.slashes != SlashMode::Merged {
                out.push(b'/');
            }
        }
    }
}

/// Drops the dots and spaces at the end of `out`, down to `begin`.
fn trim(out: &mut Vec<u8>, begin: usize) {
    while let [.., b'.' | b' '] = &out[begin..] {
        out.truncate(out.len() - 1);
    }
}

/// Appends letters in lower case, as servers compare them that ignore the case.
pub(crate) fn fold_case(letters: &[u8], folded: &mut Vec<u8>) {
    if letters.is_ascii() {
        folded.extend(letters.iter().map(u8::to_ascii_lowercase));
        return;
    }
    for chunk in letters.utf8_chunks() {
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
