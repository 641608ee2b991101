//! The values that servers read for a cookie, from a header that may differ from those of browsers.
//!
//! Servers split the header in two ways, and both are followed at once:
//!
//! - at `;` (Django, Go, Node.js, Rails, PHP): a name is the text before the first `=`, a value all the text after it;
//! - at spaces as well (Python's `http.cookies`, aiohttp), or at commas (Jetty, Rack 1): a name is one word before `=`,
//!   and a value ends where a word does.
//!
//! In both, a value that begins with a quote is the text in quotes. Some servers read up to the closing quote, even
//! past a `;`. Values count without the quotes around them.

use std::borrow::Cow;
use std::ops::{ControlFlow, Range};

use http::header::{COOKIE, HeaderMap};

use super::values::may_be_read_as;
use crate::printable::is_unprintable;

/// The value of a cookie that occurs once, in a header that all servers split alike.
#[inline]
pub(super) fn single_value<'q>(headers: &'q HeaderMap, name: &str) -> Option<&'q [u8]> {
    let mut only = None;
    for piece in lines(headers).flat_map(|line| line.split(|byte| *byte == b';')) {
        let piece = piece.trim_ascii();
        let mut equals = None;
        for (at, byte) in piece.iter().enumerate() {
            match byte {
                b'=' if equals.is_none() => equals = Some(at),
                b' ' | b'\t' | b',' | b'&' | b'"' | 0x80.. => return None,
                _ => {}
            }
        }
        if let Some(at) = equals
            && may_be_read_as(&piece[..at], name.as_bytes(), false)
            && only.replace(&piece[at + 1..]).is_some()
        {
            return None;
        }
    }
    only
}

/// Calls `found` with each value that some server reads for a cookie, until it breaks. Percent escapes stay.
pub(super) fn each_value<'q>(headers: &'q HeaderMap, name: &str, found: ValueCallback<'_, 'q>) {
    let mut trimming = |value: Cow<'q, [u8]>| found(trim_value(value, trimmed));
    // `found` itself knows that it broke.
    let _ = lines(headers).try_for_each(|line| each_value_in_line(line, name.as_bytes(), &mut trimming));
}

fn lines(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    headers.get_all(COOKIE).iter().map(|line| line.as_bytes())
}

type ValueCallback<'f, 'q> = &'f mut dyn FnMut(Cow<'q, [u8]>) -> ControlFlow<()>;

fn each_value_in_line<'q>(line: &'q [u8], name: &[u8], found: ValueCallback<'_, 'q>) -> ControlFlow<()> {
    let mut begin = 0;
    for piece in line.split(|byte| *byte == b';') {
        let behind = begin + piece.len();
        let end = begin + trimmed_end(piece).len();
        let has_spaces = end < behind;
        let odd = piece.iter().rposition(|byte| matches!(byte, b'"' | b'\\' | 0x80..)).map(|at| begin + at);
        let mut has_equals = false;
        // The last word so far.
        let (mut word, mut word_has_equals) = (begin..begin, false);
        for at in begin..end {
            match line[at] {
                b' ' | b'\t' => continue,
                b',' => {
                    (word, word_has_equals) = (at + 1..at + 1, false);
                    continue;
                }
                b'=' => {
                    let is_first_name = !has_equals && may_be_read_as(bare_name(&line[begin..at]), name, false);
                    if is_first_name || !word_has_equals && may_be_read_as(bare_name(&line[word.clone()]), name, false)
                    {
                        // aiohttp also takes the rest of the piece as the value of a word, if the rest has a byte that
                        // no value can have.
                        let may_be_whole = is_first_name || odd > Some(at);
                        let place = ValueLocation { range: at + 1..end, has_spaces, is_first_name, may_be_whole };
                        each_value_at(line, &place, found)?;
                    }
                }
                _ => {}
            }
            if word.end != at {
                (word.start, word_has_equals) = (at, false);
            }
            word.end = at + 1;
            if line[at] == b'=' {
                (has_equals, word_has_equals) = (true, true);
            }
        }
        begin = behind + 1;
    }
    ControlFlow::Continue(())
}

struct ValueLocation {
    /// From after the `=` to the `;`, without the spaces and commas before the `;`.
    range: Range<usize>,
    /// True if there are spaces or commas before the `;`.
    has_spaces: bool,
    /// True if the text before the `=` is the name for servers that split the header at `;`.
    is_first_name: bool,
    /// True if some servers read the whole range as the value.
    may_be_whole: bool,
}

/// Calls `found` with the values that servers may read at this location.
fn each_value_at<'q>(line: &'q [u8], place: &ValueLocation, found: ValueCallback<'_, 'q>) -> ControlFlow<()> {
    let quoted = quoted(line[place.range.start..].trim_ascii_start());
    let whole = trimmed_start(&line[place.range.clone()]);
    let has_spaces = place.has_spaces || whole.len() < place.range.len();
    if let Some(text) = quoted {
        each_unescaped(text, found)?;
        if whole.len() == text.len() + 2 && !has_spaces {
            return ControlFlow::Continue(());
        }
    }
    if place.may_be_whole {
        match whole {
            [b'"', inner @ .., b'"'] => each_unescaped(inner, found)?,
            [b'"', inner @ .., _] => {
                found(Cow::Borrowed(whole))?;
                // `cookie` of Node.js before 0.7 and Koa take any last byte for the closing quote.
                found(Cow::Borrowed(inner))?;
            }
            // WebOb also undoes backslashes outside of quotes.
            _ => each_unescaped(whole, found)?,
        }
        // Koa takes a space for the closing quote. With a space or a comma around it, a value keeps its quotes.
        if has_spaces && let [b'"', inner @ ..] = whole {
            found(Cow::Borrowed(whole))?;
            found(Cow::Borrowed(inner))?;
        }
    }
    if quoted.is_none() {
        // For CGI.pm and Ruby's CGI, the part before `&` is the first of several values.
        let ends: [fn(&u8) -> bool; 4] = [
            |byte| matches!(byte, b' ' | b'\t' | b','),
            |byte| matches!(byte, b' ' | b'\t'),
            |byte| *byte == b',',
            |byte| *byte == b'&',
        ];
        for is_end in ends {
            let end = whole.iter().position(is_end);
            if end.is_some() || !place.is_first_name {
                each_unescaped(&whole[..end.unwrap_or(whole.len())], found)?;
            }
        }
    }
    ControlFlow::Continue(())
}

/// The text in the quotes at the beginning of a text, if they are closed.
fn quoted(text: &[u8]) -> Option<&[u8]> {
    let inner = text.strip_prefix(b"\"")?;
    let mut is_escaped = false;
    let end = inner.iter().position(|byte| {
        let is_end = *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        is_end
    })?;
    Some(&inner[..end])
}

/// Calls `found` with a text: with `\101` read as `A`, without its backslashes, and unchanged.
fn each_unescaped<'q>(text: &'q [u8], found: ValueCallback<'_, 'q>) -> ControlFlow<()> {
    if text.contains(&b'\\') {
        found(Cow::Owned(unescaped(text, true)))?;
        found(Cow::Owned(unescaped(text, false)))?;
    }
    found(Cow::Borrowed(text))
}

fn unescaped(quoted: &[u8], octal: bool) -> Vec<u8> {
    let mut plain = Vec::with_capacity(quoted.len());
    let mut rest = quoted;
    loop {
        rest = match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', rest @ ..] if octal => {
                plain.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest
            }
            [b'\\', byte, rest @ ..] | [byte, rest @ ..] => {
                plain.push(*byte);
                rest
            }
            [] => return plain,
        };
    }
}

/// A name without the spaces and the quotes that some servers don't count as part of it.
fn bare_name(name: &[u8]) -> &[u8] {
    unquoted(trimmed(name))
}

/// A text without a pair of quotes around it.
pub(super) fn unquoted(text: &[u8]) -> &[u8] {
    text.strip_prefix(b"\"").and_then(|text| text.strip_suffix(b"\"")).unwrap_or(text)
}

/// A text without the spaces around it and the commas at its end.
fn trimmed(text: &[u8]) -> &[u8] {
    trimmed_start(trimmed_end(text))
}

fn trimmed_end(mut text: &[u8]) -> &[u8] {
    loop {
        text = spaceless_end(text);
        match text.strip_suffix(b",") {
            Some(rest) => text = rest,
            None => return text,
        }
    }
}

/// A text without the spaces around it.
pub(super) fn without_spaces(text: &[u8]) -> &[u8] {
    trimmed_start(spaceless_end(text))
}

/// A text without the spaces and quotes around it, closed or not, and the commas at its end.
pub(super) fn without_quotes(text: &[u8]) -> &[u8] {
    let mut inner = trimmed(text);
    while let Some(shorter) = inner.strip_prefix(b"\"").or(inner.strip_suffix(b"\"")) {
        inner = trimmed(shorter);
    }
    inner
}

/// [`without_spaces`] or the like, of a value.
pub(super) fn trim_value<'q>(value: Cow<'q, [u8]>, trim: fn(&[u8]) -> &[u8]) -> Cow<'q, [u8]> {
    match value {
        Cow::Borrowed(value) => Cow::Borrowed(trim(value)),
        Cow::Owned(value) => Cow::Owned(trim(&value).to_vec()),
    }
}

fn trimmed_start(mut text: &[u8]) -> &[u8] {
    loop {
        text = match text {
            [0..=b' ' | 0x7f, rest @ ..] => rest,
            [0x80..=0xff, ..] => {
                let mut starts = SPACE_LENGTHS.into_iter().filter_map(|length| text.split_at_checked(length));
                match starts.find(|(space, _)| is_space(space)) {
                    Some((_, rest)) => rest,
                    None => return text,
                }
            }
            _ => return text,
        };
    }
}

fn spaceless_end(mut text: &[u8]) -> &[u8] {
    loop {
        text = match text {
            [rest @ .., 0..=b' ' | 0x7f] => rest,
            [.., 0x80..=0xff] => {
                let ends = SPACE_LENGTHS.into_iter().filter_map(|length| text.len().checked_sub(length));
                match ends.map(|end| text.split_at(end)).find(|(_, space)| is_space(space)) {
                    Some((rest, _)) => rest,
                    None => return text,
                }
            }
            _ => return text,
        };
    }
}

/// The lengths of spaces. The longest is tried first: a part of a letter of UTF-8 may be a space of Latin-1.
const SPACE_LENGTHS: [usize; 4] = [4, 3, 2, 1];

/// True for spaces, control characters and others that don't show. Those that Python's `strip`, JavaScript's `trim` and
/// Laravel's `Str::trim` remove are included, in UTF-8 and in Latin-1.
fn is_space(text: &[u8]) -> bool {
    // Only a letter's whole length is decoded, because most lengths are wrong.
    let is_letter = |first: &u8| first.leading_ones().max(1) as usize == text.len();
    matches!(text, [0x85 | 0xa0])
        || text.first().is_some_and(is_letter)
            && std::str::from_utf8(text)
                .is_ok_and(|text| text.starts_with(|letter: char| letter.is_whitespace() || is_unprintable(letter)))
}

#[cfg(test)]
mod tests {
    use super::super::values::{cookie_values, normal};
    use super::*;
    use proptest::prelude::*;

    fn read(line: &str) -> Option<Vec<Vec<u8>>> {
        let mut headers = HeaderMap::new();
        headers.insert(COOKIE, line.parse().unwrap());
        Some(cookie_values(&headers, "sid").ok()?.into_iter().map(Cow::into_owned).collect())
    }

    const PUNCTUATION: &[u8] = b"!#%&'~_`><@,:/$*+-.^|)(?}{";

    fn skipped(line: &[u8], at: usize) -> usize {
        at + line[at..].iter().take_while(|byte| byte.is_ascii_whitespace()).count()
    }

    fn run(line: &[u8], at: usize, more: &[u8]) -> usize {
        let is_in = |byte: &u8| byte.is_ascii_alphanumeric() || PUNCTUATION.contains(byte) || more.contains(byte);
        at + line[at..].iter().take_while(|byte| is_in(byte)).count()
    }

    /// `\s*(\s+|;|$)`
    fn ended(line: &[u8], at: usize) -> Option<usize> {
        let next = skipped(line, at);
        match line.get(next) {
            Some(b';') => Some(next + 1),
            None => Some(next),
            Some(_) => (next > at).then_some(next),
        }
    }

    fn python_unquoted(value: &[u8]) -> Vec<u8> {
        match value {
            [b'"', inner @ .., b'"'] => unescaped(inner, true),
            _ => value.to_vec(),
        }
    }

    type Pair<'l> = (&'l [u8], Option<&'l [u8]>, usize);

    /// Matches `\s*=\s*value` and the end of a pair whose key ends at `end`, or only the end of the pair.
    fn value_behind<'l>(line: &'l [u8], begin: usize, end: usize, alternatives: &[usize]) -> Option<Pair<'l>> {
        let key = &line[begin..end];
        let equals = skipped(line, end);
        if line.get(equals) == Some(&b'=') {
            let from = skipped(line, equals + 1);
            let closed = quoted(&line[from..]).map(|inner| from + inner.len() + 2);
            let open = (line.get(from) == Some(&b'"'))
                .then(|| from + 1 + line[from + 1..].iter().take_while(|byte| !b"\";".contains(byte)).count());
            let ends = [closed, open, Some(run(line, from, b"=[]"))];
            for until in alternatives.iter().filter_map(|index| ends[*index]) {
                if let Some(next) = ended(line, until) {
                    return Some((key, Some(&line[from..until]), next));
                }
            }
        }
        ended(line, end).map(|next| (key, None, next))
    }

    /// A model of `SimpleCookie` in Python's `http.cookies`, from its regular expression, except for dates.
    fn http_cookies(line: &[u8]) -> Option<Vec<u8>> {
        let (mut at, mut value, mut has_pair) = (0, None, false);
        while at < line.len() {
            let begin = skipped(line, at);
            // The shortest key that completes a pair.
            let ends = begin + 1..=run(line, begin, b"=").max(begin);
            let Some((key, own, next)) = ends.into_iter().find_map(|end| value_behind(line, begin, end, &[0, 2]))
            else {
                break;
            };
            at = next;
            let name = String::from_utf8_lossy(key).to_lowercase();
            match (name.as_str(), own) {
                (name, _) if name.starts_with('$') => {}
                ("path" | "expires", None) => return None,
                ("secure" | "path" | "expires", _) if has_pair => {}
                ("secure" | "path" | "expires", _) | (_, None) => return None,
                (_, Some(own)) => {
                    has_pair = true;
                    if key == b"sid" {
                        value = Some(python_unquoted(own));
                    }
                }
            }
        }
        value
    }

    /// A model of aiohttp's `parse_cookie_header`, from its regular expression, except for dates.
    fn aiohttp(line: &[u8]) -> Option<Vec<u8>> {
        let (mut at, mut value) = (0, None);
        while at < line.len() {
            let begin = skipped(line, at);
            let end = run(line, begin, b"[]");
            // A shorter key would be followed by another character of a key.
            let pair = if end > begin { value_behind(line, begin, end, &[0, 1, 2]) } else { None };
            if let Some((key, own, next)) = pair {
                if key == b"sid" {
                    value = own.map(python_unquoted);
                }
                at = next;
                continue;
            }
            let end = line[at..].iter().position(|byte| *byte == b';').map_or(line.len(), |end| at + end);
            if let Some(equals) = line[at..end].iter().position(|byte| *byte == b'=')
                && line[at..at + equals].trim_ascii() == b"sid"
            {
                value = Some(python_unquoted(line[at + equals + 1..end].trim_ascii()));
            }
            at = end + 1;
        }
        value
    }

    /// Models of parsers that split the header only at `;`: Django, Starlette and Tornado; Go and PHP; `cookie` of
    /// Node.js, Koa.
    fn at_semicolons(line: &[u8]) -> Vec<Vec<u8>> {
        let mut values = Vec::new();
        for piece in line.split(|byte| *byte == b';') {
            let Some(equals) = piece.iter().position(|byte| *byte == b'=') else { continue };
            if piece[..equals].trim_ascii() != b"sid" {
                continue;
            }
            let (raw, value) = (&piece[equals + 1..], piece[equals + 1..].trim_ascii());
            values.push(python_unquoted(value));
            for value in [raw, value] {
                match value {
                    [b'"', inner @ .., b'"'] => values.push(inner.to_vec()),
                    [b'"', inner @ .., _] => values.extend([value.to_vec(), inner.to_vec()]),
                    _ => values.push(value.to_vec()),
                }
            }
        }
        values
    }

    #[test]
    fn cookie_models_agree_with_the_original_parsers() {
        let text = |value: Option<Vec<u8>>| value.map(|value| String::from_utf8(value).unwrap());
        for (line, by_library, by_aiohttp) in [
            ("sid=REAL", Some("REAL"), Some("REAL")),
            ("sid=REAL xN", None, Some("REAL")),
            ("sid=REAL =x", None, Some("REAL")),
            ("sid=REAL \"x\"=N", Some("REAL"), Some("REAL")),
            ("sid=\"REAL\" \"y\"=", Some("REAL"), Some("REAL")),
            ("sid=jN sid= REAL", Some("REAL"), Some("REAL")),
            ("sid=jN sid =REAL", Some("REAL"), Some("REAL")),
            ("sid=R,E x=1", Some("R,E"), Some("R,E")),
            ("sid=\"a;b\"", Some("a;b"), Some("a;b")),
            ("sid=\"a", None, Some("\"a")),
            ("sid=a\"b; sid=c", None, Some("c")),
            ("path=x; sid=a", None, Some("a")),
        ] {
            assert_eq!(text(http_cookies(line.as_bytes())).as_deref(), by_library, "{line}");
            assert_eq!(text(aiohttp(line.as_bytes())).as_deref(), by_aiohttp, "{line}");
        }
    }

    #[test]
    fn long_cookie_headers_are_read_in_linear_time() {
        for (piece, more) in
            [("=", ""), ("\u{a0}", "="), ("sid=\"", ""), ("sid= \"\\", ""), (",sid =", ";"), ("\u{a0}=", "")]
        {
            read(&format!("{}{}", piece.repeat(200_000 / piece.len()), more.repeat(100_000)));
        }
    }

    const PIECES: [&str; 24] = [
        "sid", "sid", "sid=", "sid=", "sid=REAL", "REAL", "x", "x=1", "=", " ", " ", ";", "; ", ",", "\t", "\"", "\"",
        "\\", "\\122", "%52", "[", "path", "$a", "secure",
    ];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn every_parsers_cookie_value_is_found(
            pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..12),
        ) {
            let line = pieces.concat();
            let line = line.trim_ascii();
            let Some(values) = read(line) else { return Ok(()) };
            let bytes = line.as_bytes();
            let known = [http_cookies(bytes), aiohttp(bytes)].into_iter().flatten().chain(at_semicolons(bytes));
            for value in known {
                let value = normal(Cow::Borrowed(trimmed(&value)));
                let value = without_quotes(&value).to_vec();
                prop_assert!(
                    values.contains(&value),
                    "{:?}: no {:?} among {:?}", line, value.escape_ascii().to_string(),
                    values.iter().map(|value| value.escape_ascii().to_string()).collect::<Vec<_>>()
                );
            }
        }
    }
}
