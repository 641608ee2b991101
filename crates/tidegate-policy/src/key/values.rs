//! The values that servers read from a header, a cookie or a query parameter, in any spelling.
//!
//! Servers differ in their choice among several values, in the separators, and in what they decode. If only the
//! spelling differs, all spellings count as one value. If servers take different values, the call counts under each
//! of them.
//!
//! | spelling | read as |
//! | --- | --- |
//! | a cookie | see [`cookies`](super::cookies) |
//! | `%78`, `%2578`, `%u0078`, `+` | `x`, `x`, `x`, a space: decoded until no escape is left |
//! | spaces and invisible characters around a value | nothing: Tornado, Laravel and WSGI servers trim |
//! | control characters in a value | spaces, as Tornado reads them |
//! | quotes around a cookie, also escaped or not closed | nothing: Python, Go and Tomcat remove them |
//! | a credential | see [`credentials`](super::credentials) |
//! | two cookies or parameters of one name | each of them |
//! | two lines of a header | each of them, and both joined by `, ` (Node.js) and by `,` (WSGI) |
//! | a line that may be several lines, joined by a front server | the same of its parts |
//! | `?a=x;token=y` | `&` is a separator, and `;` as well (Rack 2, Python before 3.10) |
//! | `?token=y#z` | the query ends at `#`, or `#` is data (Django and Node.js behind a front server that passes it on) |
//! | `Token`, `token[]`, `[token]`, `]token`, `token]`, `to.ken` for `to_ken` | one name, as ASP.NET, Rack 2, Express 4 and PHP read it |
//! | `token.x`, `.token`, `?token`, only for parameters | one name, as `qs` and what removes a leading `?` read it |

use std::borrow::Cow;
use std::ops::ControlFlow;

use arrayvec::ArrayVec;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHORIZATION};

use super::cookies::{self, trim_value, unquoted, without_quotes, without_spaces};
use super::credentials;
use crate::path::{decode_all_escapes, decode_escape, decode_unicode_escape};

/// The most distinct values that one part of a key may have in one call.
pub(crate) const MAX_VALUES: usize = 4;
/// The most times that a request may have one part, all of them with few distinct values. It bounds the work for one part.
const MAX_OCCURRENCES: usize = 64;
/// The separators with which servers join the lines of a header.
const LINE_JOINERS: [&[u8]; 2] = [b", ", b","];

/// The headers of which one line may contain commas, so that joined lines can't be told apart. Names that end in `-` stand for
/// all that begin like that. Clients may add lines to them, so no limit is to count by one of these where lines are joined.
const WITH_COMMAS: [&str; 36] = [
    "accept",
    "accept-",
    "access-control-request-",
    "baggage",
    "cache-control",
    "connection",
    "content-digest",
    "cookie",
    "date",
    "digest",
    "expect",
    "expires",
    "forwarded",
    "if-",
    "keep-alive",
    "last-modified",
    "link",
    "pragma",
    "prefer",
    "priority",
    "range",
    "referer",
    "repr-digest",
    "sec-",
    "signature",
    "signature-input",
    "te",
    "tracestate",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "via",
    "warning",
    "x-forwarded-client-cert",
    "x-forwarded-for",
];

/// The values that servers may read for one part of a key; empty if it is missing.
pub(crate) type PartValues<'q> = ArrayVec<Cow<'q, [u8]>, { MAX_VALUES + LINE_JOINERS.len() }>;

#[derive(Clone, Copy, Debug)]
pub(crate) struct TooManyValues;

/// The value of a header that has one line. `are_joined` is [`Query::headers_are_joined`](crate::Query::headers_are_joined).
#[inline]
pub(crate) fn single_header_value<'q>(headers: &'q HeaderMap, name: &HeaderName, are_joined: bool) -> Option<&'q [u8]> {
    let mut lines = headers.get_all(name).iter();
    let line = lines.next()?.as_bytes();
    let is_plain = has_visible_ends(line) && !(are_joined && line.contains(&b','));
    (lines.next().is_none() && is_plain && (!is_credential(name) || credentials::is_plain(line))).then_some(line)
}

fn is_credential(name: &HeaderName) -> bool {
    [AUTHORIZATION, PROXY_AUTHORIZATION].contains(name)
}

/// The value of a cookie that occurs once, and that all servers read alike.
#[inline]
pub(crate) fn single_cookie_value<'q>(headers: &'q HeaderMap, name: &str) -> Option<&'q [u8]> {
    cookies::single_value(headers, name).filter(|value| is_plain(value))
}

/// The value of a query parameter that occurs once, and that all servers read alike.
#[inline]
pub(crate) fn single_parameter_value<'q>(path: &'q str, name: &str) -> Option<&'q [u8]> {
    let (mut value, mut count) = (None, 0);
    each_parameter(path, name, &mut |found| {
        value = Some(found);
        count += 1;
    });
    value.filter(|value| count == 1 && is_plain(value))
}

/// The values that servers may read for a header.
pub(crate) fn header_values<'q>(
    headers: &'q HeaderMap,
    name: &HeaderName,
    are_joined: bool,
) -> Result<PartValues<'q>, TooManyValues> {
    let mut lines: Vec<&[u8]> = headers.get_all(name).iter().map(|line| line.as_bytes()).collect();
    let is_credential = is_credential(name);
    if are_joined && !WITH_COMMAS.iter().any(|known| is_named(name.as_str(), known)) {
        lines = lines.into_iter().flat_map(|line| split_line(line, is_credential)).collect();
    }
    for line in &mut lines {
        *line = without_spaces(line);
    }
    let mut found = FoundValues::default();
    for line in &lines {
        if !is_credential {
            found.add(Cow::Borrowed(line))?;
            continue;
        }
        credentials::each_value(line, |value| found.add(value))?;
        if are_joined && let Some(part) = line.split(|byte| *byte == b',').next() {
            // Another line may follow, which differs in each request.
            credentials::each_value(without_spaces(part), |value| found.add(value))?;
        }
    }
    let mut values = found.values;
    if lines.len() > 1 {
        for joint in LINE_JOINERS {
            let joined = Cow::Owned(lines.join(joint));
            if !values.contains(&joined) {
                values.push(joined);
            }
        }
    }
    Ok(values)
}

/// True if the entry of [`WITH_COMMAS`] stands for a header of this name.
fn is_named(name: &str, known: &str) -> bool {
    name == known || known.ends_with('-') && name.starts_with(known)
}

/// The lines that were joined. Commas in quotes are no exception: a client could open them in one line and end them in the
/// next. The parameters of a credential stay with it.
fn split_line(joined: &[u8], is_credential: bool) -> Vec<&[u8]> {
    let (mut lines, mut start, mut at, mut takes_parameters) = (Vec::new(), 0, 0, false);
    for part in joined.split(|byte| *byte == b',') {
        if !(takes_parameters && is_parameter(part)) {
            if at > 0 {
                lines.push(&joined[start..at - 1]);
            }
            (start, takes_parameters) = (at, is_credential && begins_parameters(part));
        }
        at += part.len() + 1;
    }
    lines.push(&joined[start..]);
    lines
}

/// True for a scheme and a parameter, as in `Digest username="a"`; false for `Bearer TOKEN` and `Basic dXNlcg==`.
fn begins_parameters(part: &[u8]) -> bool {
    let part = part.trim_ascii();
    part.iter().position(|byte| *byte == b' ').is_some_and(|end| is_parameter(&part[end..]))
}

/// True for a name, `=` and a value.
fn is_parameter(part: &[u8]) -> bool {
    let part = part.trim_ascii();
    part.iter().position(|byte| *byte == b'=').is_some_and(|end| {
        let (name, value) = (part[..end].trim_ascii_end(), &part[end..]);
        !name.is_empty() && !name.contains(&b' ') && value.iter().any(|byte| *byte != b'=')
    })
}

/// The values that servers may read for a cookie.
pub(crate) fn cookie_values<'q>(headers: &'q HeaderMap, name: &str) -> Result<PartValues<'q>, TooManyValues> {
    let mut values = FoundValues::default();
    let mut added = Ok(());
    cookies::each_value(headers, name, &mut |value| {
        added = values.add(trim_value(normal(value), without_quotes));
        if added.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    added.map(|()| values.values)
}

/// The values that servers may read for a query parameter.
pub(crate) fn parameter_values<'q>(path: &'q str, name: &str) -> Result<PartValues<'q>, TooManyValues> {
    let mut values = FoundValues::default();
    let mut added = Ok(());
    each_parameter(path, name, &mut |value| {
        if added.is_ok() {
            added = values.add(normal(Cow::Borrowed(value)));
        }
    });
    added.map(|()| values.values)
}

/// The distinct values so far.
#[derive(Default)]
struct FoundValues<'q> {
    values: PartValues<'q>,
    occurrences: usize,
}

impl<'q> FoundValues<'q> {
    fn add(&mut self, value: Cow<'q, [u8]>) -> Result<(), TooManyValues> {
        self.occurrences += 1;
        let is_known = self.values.contains(&value);
        if self.occurrences > MAX_OCCURRENCES || !is_known && self.values.len() == MAX_VALUES {
            return Err(TooManyValues);
        }
        if !is_known {
            self.values.push(value);
        }
        Ok(())
    }
}

/// Calls `found` with the raw value of each query parameter of this name.
fn each_parameter<'q>(path: &'q str, name: &str, found: &mut dyn FnMut(&'q [u8])) {
    let mut pair = |piece: &'q [u8]| {
        let piece = piece.trim_ascii();
        let at = piece.iter().position(|byte| *byte == b'=');
        let (own, value) = at.map_or((piece, &b""[..]), |at| (&piece[..at], &piece[at + 1..]));
        if may_be_read_as(own.trim_ascii(), name.as_bytes(), true) {
            found(value.trim_ascii());
        }
    };
    let query = path.split_once('?').map_or("", |(_, query)| query);
    for piece in query.as_bytes().split(|byte| *byte == b'&') {
        pair(piece);
        if piece.iter().any(|byte| matches!(byte, b';' | b'#')) {
            piece.split(|byte| matches!(byte, b';' | b'#')).for_each(&mut pair);
        }
    }
}

/// True if a server may take one name for the other. Servers may decode names, ignore their case, read `token[]` as a
/// list `token`, skip brackets around names, or replace spaces, dots and brackets in names by `_`. In names of
/// parameters, dots may be as brackets, and a `?` may precede the first name. Cookies such as `sid.sig` are others than `sid`.
#[inline]
pub(super) fn may_be_read_as(own: &[u8], name: &[u8], is_parameter: bool) -> bool {
    if own == name {
        return true;
    }
    let mut letters = form_decoded(own);
    loop {
        let mut rest = letters.clone();
        let begins = name.iter().all(|wanted| {
            rest.next().is_some_and(|letter| {
                letter.eq_ignore_ascii_case(wanted) || *wanted == b'_' && matches!(letter, b' ' | b'.' | b'[')
            })
        });
        if begins && rest.next().is_none_or(|end| matches!(end, b'[' | b']' | b'\0') || is_parameter && end == b'.') {
            return true;
        }
        match letters.next() {
            Some(b' ' | b'[' | b']') => {}
            Some(b'.' | b'?') if is_parameter => {}
            _ => return false,
        }
    }
}

/// Decodes a part of a query string: `+` is a space, `%41` and `%u0041` are `A`, and an invalid escape stays. So does one of
/// `%u` beyond ASCII, because names are compared in ASCII.
fn form_decoded(bytes: &[u8]) -> impl Iterator<Item = u8> + Clone + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        let byte = *bytes.get(at)?;
        if let Some(decoded) = decode_escape(bytes, at) {
            at += 3;
            return Some(decoded);
        }
        if byte == b'%'
            && let Some(letter) = decode_unicode_escape(bytes, at).filter(char::is_ascii)
        {
            at += 6;
            return u8::try_from(letter).ok();
        }
        at += 1;
        Some(if byte == b'+' { b' ' } else { byte })
    })
}

/// True for a value that all servers read unchanged.
fn is_plain(value: &[u8]) -> bool {
    has_visible_ends(value) && !is_encoded(value)
}

/// True if no server removes something at the ends of a value.
fn has_visible_ends(value: &[u8]) -> bool {
    [value.first(), value.last()].into_iter().flatten().all(u8::is_ascii_graphic)
}

/// A value without the differences that some servers don't see: escapes, control characters, and spaces around it.
pub(super) fn normal(value: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
    let is_control = |byte: &u8| matches!(byte, 0..=8 | 14..=31);
    let mut value = fully_decoded(value);
    if value.iter().any(is_control) {
        value.to_mut().iter_mut().filter(|byte| is_control(byte)).for_each(|byte| *byte = b' ');
    }
    trim_value(value, without_spaces)
}

/// True unless `Content-Type` names a charset in which this value of the query may be spelled in another way than in UTF-8.
/// Django and ASP.NET decode the query by it, too: in UTF-7, `+AFI-` is `R`.
pub(super) fn has_one_charset(headers: Option<&HeaderMap>, value: &[u8]) -> bool {
    let is_known = |line: &HeaderValue| charsets_agree(line.as_bytes(), value.is_ascii());
    headers.is_none_or(|headers| headers.get_all(CONTENT_TYPE).iter().all(is_known))
}

/// True if each charset in a `Content-Type` is UTF-8, or one with the same ASCII, if that suffices.
fn charsets_agree(mut content_type: &[u8], ascii_suffices: bool) -> bool {
    const NAME: &[u8] = b"charset";
    const LIKE_ASCII: [&[u8]; 7] = [b"iso-8859-", b"windows-12", b"koi8-", b"shift_jis", b"euc-", b"gb", b"big5"];
    while let Some(at) = content_type.windows(NAME.len()).position(|word| word.eq_ignore_ascii_case(NAME)) {
        let Some(value) = content_type[at + NAME.len()..].trim_ascii_start().strip_prefix(b"=") else { return false };
        let end = value.iter().position(|byte| matches!(byte, b';' | b',')).unwrap_or(value.len());
        let charset = value[..end].trim_ascii().to_ascii_lowercase();
        let charset = unquoted(&charset);
        let is_like_ascii = || ascii_suffices && LIKE_ASCII.iter().any(|known| charset.starts_with(known));
        if !matches!(charset, b"utf-8" | b"utf8" | b"us-ascii") && !is_like_ascii() {
            return false;
        }
        content_type = &value[end..];
    }
    true
}

fn is_encoded(value: &[u8]) -> bool {
    value.iter().any(|byte| matches!(byte, b'%' | b'+'))
}

/// Decodes the escapes of a value until none is left, and replaces `+` by spaces. All spellings that one server reads
/// alike give the same, whether it decodes never, once or twice.
pub(super) fn fully_decoded(value: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
    if !is_encoded(&value) {
        return value;
    }
    let mut decoded = decode_all_escapes(&value);
    for byte in &mut decoded {
        if *byte == b'+' {
            *byte = b' ';
        }
    }
    Cow::Owned(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::header::COOKIE;
    use proptest::prelude::*;

    fn texts(values: Result<PartValues<'_>, TooManyValues>) -> Option<Vec<String>> {
        Some(values.ok()?.iter().map(|value| String::from_utf8_lossy(value).into_owned()).collect())
    }

    fn cookie(line: &str) -> Option<Vec<String>> {
        let mut headers = HeaderMap::new();
        headers.insert(COOKIE, line.parse().unwrap());
        texts(cookie_values(&headers, "sid"))
    }

    #[test]
    fn cookies_are_read_as_servers_read_them() {
        for (line, values) in [
            ("sid=REAL", &["REAL"][..]),
            ("a=b; sid = REAL ;c=d", &["REAL"]),
            ("sid=\"REAL\"", &["REAL"]),
            ("sid=\"\\122EAL\"", &["REAL", "122EAL", "\\122EAL"]),
            ("sid=\"R\\EAL\"", &["REAL", "R\\EAL"]),
            ("sid=R\\105AL; sid=REAL%2C", &["REAL", "R105AL", "R\\105AL"]),
            ("sid=\"REAL\" N", &["REAL", "REAL\" N"]),
            ("sid=\"a;b\"", &["a;b", "a", ""]),
            ("sid=\"REALx", &["REALx", "REAL"]),
            ("sid=%22REAL%22; sid=\"%22REAL\"; sid=REAL%22+", &["REAL"]),
            ("sid=\"REAL", &["REAL", "REA"]),
            ("sid=%52EAL", &["REAL"]),
            ("sid=%2552%45AL", &["REAL"]),
            ("sid=%2%35%352EAL", &["REAL"]),
            ("sid=a+b%20c%2Bd%1Fe", &["a b c d e"]),
            ("sid=100%", &["100%"]),
            ("sid=\"", &[""]),
            ("sid=", &[""]),
            ("sid=x; sid=REAL", &["x", "REAL"]),
            ("sid=x; SID=REAL; s%69d=y; sid[]=z", &["x", "REAL", "y", "z"]),
            ("sid=x; sid=\"x\"; sid=%78", &["x"]),
            ("a=b,sid=REAL", &["REAL"]),
            ("a=b sid=REAL", &["REAL"]),
            ("sid=REAL j=1", &["REAL j=1", "REAL"]),
            ("sid={\"v\":1, \"u\":\"x=\"}", &["{\"v\":1, \"u\":\"x=\"}", "{\"v\":1"]),
            ("sid=v1, abc", &["v1, abc", "v1"]),
            ("sid=v 1,abc", &["v 1,abc", "v", "v 1"]),
            ("sid=REAL&x", &["REAL&x", "REAL"]),
            ("sid=REAL &x", &["REAL &x", "REAL"]),
            ("sid=REAL%0A; sid=%20REAL+; sid=%u0052EAL", &["REAL"]),
            ("sid=x; sid.sig=y", &["x"]),
            ("x=sid=a; sid=b=c==; y==sid=", &["b=c=="]),
            ("sid", &[]),
            ("asid=x; sidx=y; =z", &[]),
        ] {
            assert_eq!(cookie(line).unwrap(), values, "{line}");
        }
        assert_eq!(cookie("sid=1; sid=2; sid=3; sid=4; sid=4").unwrap().len(), 4);
        assert_eq!(cookie("sid=1; sid=2; sid=3; sid=4; sid=5"), None);
    }

    #[test]
    fn parameters_are_read_as_servers_read_them() {
        for (query, values) in [
            ("token=REAL", &["REAL"][..]),
            ("token=a&token=REAL", &["a", "REAL"]),
            ("token=R%45AL&t%6Fken=REAL#x", &["REAL", "REAL#x"]),
            ("token=x#&token=REAL", &["x#", "x", "REAL"]),
            ("Token=a&token[]=b&token[0]=c&+token=d", &["a", "b", "c", "d"]),
            ("a=1;token=REAL", &["REAL"]),
            ("[token]=a&%5Btoken%5D=b&[token][]=c&[token]x=d", &["a", "b", "c", "d"]),
            ("[tok]=a&[token", &[""]),
            ("token]=a&]token=b&[]token=c&%5Dtoken=d", &["a", "b", "c", "d"]),
            ("?token=a&.token=b&token.x=c&%u0074oken=d", &["a", "b", "c", "d"]),
            (
                "token=REAL+&token=%20REAL&token=REAL%0A&token=%0BREAL&token=REAL%00&token=%C2%A0REAL%E2%80%8B",
                &["REAL"],
            ),
            ("token=%u0052EAL&token=%%7500%352EAL&token=%25u0052EAL&token=REAL%u00A0", &["REAL"]),
            ("token=%uD800", &["%uD800"]),
            ("token=REAL;x", &["REAL;x", "REAL"]),
            ("token", &[""]),
            ("tokens=a&atoken=b&tok=c", &[]),
            ("", &[]),
        ] {
            assert_eq!(texts(parameter_values(&format!("/x?{query}"), "token")).unwrap(), values, "{query}");
        }
        assert_eq!(texts(parameter_values("/?api.key=a&api%20key=b&api[key=c&api_key=d", "api_key")).unwrap().len(), 4);
        assert_eq!(texts(parameter_values("/?api-key=a&apikey=b", "api_key")).unwrap().len(), 0);
        assert_eq!(texts(parameter_values("/?.key=a&[_key]=b&._key=c", "_key")).unwrap().len(), 3);
    }

    #[test]
    fn a_charset_of_the_content_type_must_not_matter() {
        for (content_type, ascii, all) in [
            ("text/plain", true, true),
            ("application/json; charset=utf-8", true, true),
            ("text/html; Charset = \"UTF-8\"; boundary=x", true, true),
            ("text/xml; charset=ISO-8859-1", true, false),
            ("text/xml;charset=windows-1252", true, false),
            ("a/b; charset=utf-8; charset=utf-7", false, false),
            ("a/b; charset=unicode_escape", false, false),
            ("a/b; charset=iso2022_jp", false, false),
            ("a/b; charset*=utf-8''utf-7", false, false),
            ("a/b; charset=utf-8\"", false, false),
            ("a/b; charset=utf_16", false, false),
        ] {
            let headers = HeaderMap::from_iter([(CONTENT_TYPE, content_type.parse().unwrap())]);
            let agree = |value: &str| has_one_charset(Some(&headers), value.as_bytes());
            assert_eq!((agree("REAL"), agree("né")), (ascii, all), "{content_type}");
        }
        assert!(has_one_charset(None, b"x"));
    }

    #[test]
    fn header_lines_count_separately_and_joined() {
        let name = HeaderName::from_static("x-api-key");
        let mut headers = HeaderMap::new();
        let values = |headers: &HeaderMap| texts(header_values(headers, &name, false));
        headers.append(&name, "a, b".parse().unwrap());
        assert_eq!(values(&headers).unwrap(), ["a, b"]);
        headers.append(&name, "REAL".parse().unwrap());
        assert_eq!(values(&headers).unwrap(), ["a, b", "REAL", "a, b, REAL", "a, b,REAL"]);
        for more in ["c", "d"] {
            headers.append(&name, more.parse().unwrap());
        }
        assert_eq!(values(&headers).unwrap().len(), MAX_VALUES + 2);
        headers.append(&name, "e".parse().unwrap());
        assert_eq!(values(&headers), None);
        for line in [&b"REAL\xa0"[..], b"\xa0REAL", b"REAL\x85\xa0", b" REAL\t", "REAL\u{3000}".as_bytes()] {
            headers.insert(&name, http::HeaderValue::from_bytes(line).unwrap());
            assert_eq!(values(&headers).unwrap(), ["REAL"], "{}", line.escape_ascii());
            assert_eq!(single_header_value(&headers, &name, false), None);
        }
    }

    #[test]
    fn joined_lines_count_as_the_lines() {
        let values = |name: &'static str, line: &str| {
            let (mut headers, name) = (HeaderMap::new(), HeaderName::from_static(name));
            headers.append(&name, line.parse().unwrap());
            let single = single_header_value(&headers, &name, true).map(|value| String::from_utf8_lossy(value).into());
            let values = texts(header_values(&headers, &name, true));
            assert!(
                single.is_none() || single == values.as_ref().map(|values: &Vec<String>| values.concat()),
                "{line}"
            );
            values
        };
        for (name, line, expected) in [
            ("x-api-key", "REAL", &["REAL"][..]),
            ("x-api-key", "REAL,n1", &["REAL", "n1", "REAL, n1", "REAL,n1"]),
            ("x-api-key", "n1 , REAL", &["n1", "REAL", "n1, REAL", "n1,REAL"]),
            ("x-api-key", ",REAL", &["", "REAL", ", REAL", ",REAL"]),
            ("x-api-key", "REAL,REAL", &["REAL", "REAL, REAL", "REAL,REAL"]),
            ("x-api-key", "\"a,b\"", &["\"a", "b\"", "\"a, b\"", "\"a,b\""]),
            ("authorization", "bearer REAL,x=1", &["Bearer REAL", "x=1", "bearer REAL, x=1", "bearer REAL,x=1"]),
            (
                "authorization",
                "Basic YQ==,Basic Yg==",
                &["Basic a", "Basic b", "Basic YQ==, Basic Yg==", "Basic YQ==,Basic Yg=="],
            ),
            (
                "authorization",
                "Digest username=\"a\", uri=\"/\", nc=1,qop=auth, x=1",
                &["digest username=\"a\", uri=\"/\", nc=1,qop=auth, x=1", "digest username=\"a\""],
            ),
            (
                "authorization",
                "Token token=\"R\", x=n1",
                &["Bearer token=\"R\", x=n1", "Bearer R", "Bearer token=\"R\""],
            ),
            (
                "proxy-authorization",
                "Digest a=b, c=d,Bearer R",
                &["digest a=b, c=d", "digest a=b", "Bearer R", "Digest a=b, c=d, Bearer R", "Digest a=b, c=d,Bearer R"],
            ),
            ("x-token", "Digest a=b,c=d", &["Digest a=b", "c=d", "Digest a=b, c=d", "Digest a=b,c=d"]),
            ("user-agent", "A (KHTML, like B), c, d, e, f", &["A (KHTML, like B), c, d, e, f"]),
            ("accept-language", "de, en", &["de, en"]),
            ("if-modified-since", "Thu, 01 Jan 2026 00:00:00 GMT", &["Thu, 01 Jan 2026 00:00:00 GMT"]),
        ] {
            assert_eq!(values(name, line).unwrap(), expected, "{name}: {line}");
        }
        assert_eq!(values("x-api-key", "a,b,c,d,a").unwrap().len(), MAX_VALUES + 2);
        assert_eq!(values("x-api-key", "a,b,c,d,e"), None);
    }

    proptest! {
        #[test]
        fn the_fast_path_equals_the_full_parse(
            text in "[ab=;&,%+\"\\\\ \\[.5su0?\\]]{0,24}",
        ) {
            let mut headers = HeaderMap::new();
            headers.insert(COOKIE, text.parse().unwrap());
            if let Some(only) = single_cookie_value(&headers, "a") {
                prop_assert_eq!(texts(cookie_values(&headers, "a")).unwrap(), [String::from_utf8_lossy(only)]);
            }
            let path = format!("/?{text}");
            if let Some(only) = single_parameter_value(&path, "a") {
                prop_assert_eq!(texts(parameter_values(&path, "a")).unwrap(), [String::from_utf8_lossy(only)]);
            }
        }

        #[test]
        fn full_decoding_is_idempotent(text in "[%25841+xu0]{0,32}") {
            let once = fully_decoded(Cow::Borrowed(text.as_bytes()));
            prop_assert_eq!(&fully_decoded(once.clone()), &once);
            // A server that decodes once before it compares can't tell them apart.
            let form: Vec<u8> = form_decoded(text.as_bytes()).collect();
            prop_assert_eq!(&fully_decoded(Cow::Owned(form)), &once);
        }
    }
}
