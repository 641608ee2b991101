//! The common and the combined log format, as nginx and Apache write them.
//!
//! `203.0.113.7 - ann [10/Oct/2000:13:55:36 -0700] "GET /a HTTP/1.1" 200 2326 "referer" "user agent"`. A virtual host
//! may come first, as in Apache's `vhost_combined`, and `X-Forwarded-For` last, as in nginx's `main`. Only a line with
//! escapes allocates.

use std::borrow::Cow;

use memchr::{memchr, memchr2, memrchr};

use super::request::{
    HeaderCollector, LineError, LogLine, LoggedRequest, parse_address, parse_request_line, split_target,
};
use super::timestamp::ClfTimeParser;

/// The quoted fields after the request, the status and the size.
const TRAILING_HEADERS: [&str; 3] = ["referer", "user-agent", "x-forwarded-for"];

/// Returns the content of a line.
pub(super) fn parse_line<'l>(
    line: &'l [u8],
    clf: &mut ClfTimeParser,
    headers: &mut HeaderCollector,
) -> Result<LogLine<'l>, LineError> {
    let (before, rest) = split_at_time(line).ok_or(LineError::UnknownFormat)?;
    let bracket = memrchr(b'[', before).ok_or(LineError::UnknownFormat)?;
    let (head, time) = (&before[..bracket], &before[bracket + 1..]);
    let at = clf.parse(time).ok_or(LineError::InvalidTime)?;
    let (request, rest) = split_quoted(rest).ok_or(LineError::UnknownFormat)?;
    // A line that is cut off before the status may be cut within the path too.
    let [b' ', status @ .., b' '] = rest.get(..5).ok_or(LineError::UnknownFormat)? else {
        return Err(LineError::UnknownFormat);
    };
    if !status.iter().all(u8::is_ascii_digit) {
        return Err(LineError::UnknownFormat);
    }
    if !headers.wants_none() {
        read_trailing_headers(&rest[5..], headers);
    }
    let (first, rest) = split_word(head).ok_or(LineError::UnknownFormat)?;
    // A virtual host may be an address too.
    let second = split_word(rest).and_then(|(second, rest)| Some((parse_address(second)?, rest)));
    let (host, peer, rest) = match second {
        Some((peer, rest)) => (Some(first), peer, rest),
        None => (None, parse_address(first).ok_or(LineError::InvalidAddress)?, rest),
    };
    let user = split_word(rest).map(|(_, user)| user.trim_ascii()).filter(|user| !matches!(*user, b"" | b"-"));
    let Some(request) = unescape_str(request) else { return Ok(LogLine::Other) };
    let Some((method, target)) = parse_request_line(&request) else { return Ok(LogLine::Other) };
    let (path, named) = split_target(target);
    Ok(LogLine::Request(LoggedRequest {
        time: at,
        duration: None,
        peer: Some(peer),
        method,
        path,
        host: host.map(Cow::Borrowed).or(named.map(Cow::Owned)),
        user: user.and_then(unescape_str),
        action: None,
    }))
}

/// Splits a line into the part before the end of the time, and the part after the next quote. Any client may choose a
/// user's name, in which quotes are escaped but brackets aren't.
fn split_at_time(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut at = 0;
    loop {
        at += memchr(b']', &line[at..])?;
        if let Some(rest) = line[at + 1..].strip_prefix(b" \"") {
            return Some((&line[..at], rest));
        }
        at += 1;
    }
}

/// Returns the first word, and the text after it and a space.
fn split_word(text: &[u8]) -> Option<(&str, &[u8])> {
    let space = memchr(b' ', text)?;
    let word = str::from_utf8(&text[..space]).ok().filter(|word| !word.is_empty())?;
    Some((word, &text[space + 1..]))
}

/// Returns the text before the next quote that isn't escaped, and the text after it.
fn split_quoted(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut at = 0;
    loop {
        at += memchr2(b'"', b'\\', text.get(at..)?)?;
        if text[at] == b'"' {
            return Some((&text[..at], &text[at + 1..]));
        }
        at += 2;
    }
}

fn read_trailing_headers(mut rest: &[u8], headers: &mut HeaderCollector) {
    for name in TRAILING_HEADERS {
        let Some(open) = memchr(b'"', rest) else { return };
        let Some((value, after)) = split_quoted(&rest[open + 1..]) else { return };
        headers.add_if_wanted(name, &unescape_bytes(value));
        rest = after;
    }
}

/// Returns text without escapes; `None` if it isn't UTF-8.
fn unescape_str(text: &[u8]) -> Option<Cow<'_, str>> {
    Some(match unescape_bytes(text) {
        Cow::Borrowed(text) => str::from_utf8(text).ok()?.into(),
        Cow::Owned(text) => String::from_utf8(text).ok()?.into(),
    })
}

/// Undoes `\x22`, which both servers write, and Apache's `\"`, `\\`, `\n`, `\r` and `\t`.
fn unescape_bytes(text: &[u8]) -> Cow<'_, [u8]> {
    let Some(first) = memchr(b'\\', text) else { return Cow::Borrowed(text) };
    let hex = |digit: u8| char::from(digit).to_digit(16);
    let mut plain = text[..first].to_vec();
    let mut rest = &text[first..];
    loop {
        rest = match rest {
            [] => return Cow::Owned(plain),
            [b'\\', b'x', high, low, rest @ ..] if let (Some(high), Some(low)) = (hex(*high), hex(*low)) => {
                plain.push((high << 4 | low) as u8);
                rest
            }
            [b'\\', escaped, rest @ ..] => {
                plain.push(match escaped {
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    other => *other,
                });
                rest
            }
            [byte, rest @ ..] => {
                plain.push(*byte);
                rest
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate_core::Time;

    use super::*;

    fn request(line: &str) -> Result<LogLine<'_>, LineError> {
        parse_line(line.as_bytes(), &mut ClfTimeParser::default(), &mut HeaderCollector::default())
    }

    #[test]
    fn common_log_lines_of_servers_are_parsed() {
        let plain = |method: &'static str, path: &'static str| LoggedRequest {
            time: Time::from_secs(971_211_336),
            duration: None,
            peer: Some("203.0.113.7".parse().unwrap()),
            method: method.into(),
            path: path.into(),
            host: None,
            user: None,
            action: None,
        };
        let common = r#"203.0.113.7 - - [10/Oct/2000:13:55:36 -0700] "GET /a?b=c HTTP/1.1" 200 2326"#;
        let first = plain("GET", "/a?b=c");
        let ann = LoggedRequest { user: Some("ann b".into()), ..plain("GET", "/a?b=c") };
        let vhost = LoggedRequest { host: Some("example.com:443".into()), ..plain("GET", "/a?b=c") };
        let six = LoggedRequest { peer: Some("2001:db8::1".parse().unwrap()), ..plain("GET", "/a?b=c") };
        for (line, expected) in [
            (common.to_owned(), first),
            (format!(r#"{common} "-" "curl/8 \"x\" [y]""#), plain("GET", "/a?b=c")),
            (format!(r#"{common} "-" "curl/8" "198.51.100.1""#), plain("GET", "/a?b=c")),
            (common.replace("- - [", "- ann b ["), ann),
            (format!("example.com:443 {common}"), vhost),
            (
                format!("127.0.1.1:80 {common}"),
                LoggedRequest { host: Some("127.0.1.1:80".into()), ..plain("GET", "/a?b=c") },
            ),
            (format!("[::1]:80 {common}"), LoggedRequest { host: Some("[::1]:80".into()), ..plain("GET", "/a?b=c") }),
            (
                common.replace("- - [", "- a[b] [c ["),
                LoggedRequest { user: Some("a[b] [c".into()), ..plain("GET", "/a?b=c") },
            ),
            (common.replace("203.0.113.7", "2001:db8::1"), six),
            (common.replace("GET /a?b=c HTTP/1.1", "POST /login HTTP/2.0"), plain("POST", "/login")),
            (common.replace("/a?b=c", "/a b"), plain("GET", "/a b")),
            (common.replace("/a?b=c", r"/\x22\x5c"), plain("GET", "/\"\\")),
            (common.replace("/a?b=c", r#"/\"\\"#), plain("GET", "/\"\\")),
            (common.replace("200 2326", "304 -"), plain("GET", "/a?b=c")),
            (
                common.replace("/a?b=c", "http://example.org/x"),
                LoggedRequest { host: Some("example.org".into()), ..plain("GET", "/x") },
            ),
        ] {
            assert_eq!(request(&line), Ok(LogLine::Request(expected)), "{line}");
        }
    }

    #[test]
    fn non_requests_and_broken_lines_are_distinguished() {
        let with = |request: &str| format!(r#"203.0.113.7 - - [10/Oct/2000:13:55:36 -0700] "{request}" 400 0"#);
        for other in ["-", "", r"\x16\x03\x01", r"\xff\xfe HTTP/1.1", "GET", "GET /", "GET / FTP/1", "G(T / HTTP/1.1"] {
            assert_eq!(request(&with(other)), Ok(LogLine::Other), "{other}");
        }
        let good = with("GET / HTTP/1.1");
        for (line, broken) in [
            (String::new(), LineError::UnknownFormat),
            ("what a day".to_owned(), LineError::UnknownFormat),
            (good.replace("Oct", "Okt"), LineError::InvalidTime),
            (good.replace("203.0.113.7", "crawler.example"), LineError::InvalidAddress),
            (good.replace(" - - ", " "), LineError::UnknownFormat),
            (good.replace("\" 400 0", ""), LineError::UnknownFormat),
            (good.replace("400 0", "4x0 0"), LineError::UnknownFormat),
            (good.replace(" 400 0", " 40"), LineError::UnknownFormat),
            (good.replace(']', ""), LineError::UnknownFormat),
        ] {
            match request(&line) {
                Err(found) => assert_eq!(found, broken, "{line}"),
                // Without names in between, the address is read as usual.
                Ok(_) => assert!(line.starts_with("203.0.113.7 ["), "{line}"),
            }
        }
    }

    #[test]
    fn wanted_headers_are_found() {
        let line = r#"10.0.0.1 - - [10/Oct/2000:13:55:36 -0700] "GET / HTTP/1.1" 200 5 "-" "a \"b\"" "198.51.100.1, 10.0.0.2""#;
        let mut headers = HeaderCollector::for_names(vec![http::header::USER_AGENT, http::header::REFERER]);
        parse_line(line.as_bytes(), &mut ClfTimeParser::default(), &mut headers).unwrap();
        assert_eq!(headers.values.get("user-agent").unwrap(), "a \"b\"");
        assert_eq!(headers.values.len(), 1);
        assert_eq!(headers.never_seen().collect::<Vec<_>>(), ["referer"]);
        let mut headers = HeaderCollector::for_names(vec![http::HeaderName::from_static("x-forwarded-for")]);
        parse_line(line.as_bytes(), &mut ClfTimeParser::default(), &mut headers).unwrap();
        assert_eq!(headers.values.get("x-forwarded-for").unwrap(), "198.51.100.1, 10.0.0.2");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(line in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_line(&line, &mut ClfTimeParser::default(), &mut HeaderCollector::for_names(vec![http::header::REFERER]));
        }

        /// Lines that are nearly right reach further into the reader.
        #[test]
        fn any_changed_line_is_read_without_panic(
            changes in prop::collection::vec((0_usize..110, any::<u8>()), 0..4), cut in 0_usize..130,
        ) {
            let line = br#"203.0.113.7 - - [10/Oct/2000:13:55:36 -0700] "GET /a\x22 HTTP/1.1" 200 2326 "-" "curl \"x\"""#;
            let mut line = line.to_vec();
            for (place, byte) in changes {
                if let Some(there) = line.get_mut(place) {
                    *there = byte;
                }
            }
            line.truncate(cut);
            let mut headers = HeaderCollector::for_names(vec![http::header::USER_AGENT]);
            let _ = parse_line(&line, &mut ClfTimeParser::default(), &mut headers);
        }
    }
}
