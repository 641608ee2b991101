//! Paths that can't leave their base.

use super::TargetError;

/// Checks that a path appended to a base stays below it and within the authority, however a server reads it.
///
/// Servers differ in how often they decode. They differ in the characters that count as a slash (`%2F`, `\`, `%5C`,
/// `%252f`, `%c0%af`, U+FF0F) or end a segment or the path (`;`, `%3f`, `%23`, `%00`). And they differ in what they
/// drop: white space, control characters, invalid UTF-8, dots at the end. The worst of all interpretations counts:
/// anything that a server could take for `..` goes up a level. A segment that a server could take for an empty one goes
/// down none.
pub(super) fn check(path: &str) -> Result<(), TargetError> {
    if !path.is_empty() && !path.starts_with('/') {
        return Err(TargetError::NotAPath);
    }
    if is_plain(path) { Ok(()) } else { check_readings(path) }
}

/// True if no server decodes or drops anything in a path, and no two dots are in a row.
fn is_plain(path: &str) -> bool {
    let bytes = path.as_bytes();
    let is_unambiguous = bytes.iter().all(|byte| matches!(byte, b'!'..=b'~') && !matches!(byte, b'%' | b'\\'));
    is_unambiguous && !bytes.windows(2).any(|pair| pair == b"..")
}

#[cold]
fn check_readings(path: &str) -> Result<(), TargetError> {
    if path.contains('\\') {
        return Err(TargetError::Backslash);
    }
    let mut depth = 0_usize;
    for segment in path.split('/') {
        let decoded = decode_repeatedly(segment);
        let steps_up = split_at_slashes(&decoded).filter(|part| may_lead_up(part)).count();
        depth = depth.checked_sub(steps_up).ok_or(TargetError::PathTraversal)?;
        let before_end = decoded.split(ends_segment).next().unwrap_or_default();
        if steps_up == 0 && split_at_slashes(before_end).any(|part| part.contains(is_name_char)) {
            depth += 1;
        }
    }
    Ok(())
}

fn split_at_slashes(segment: &str) -> impl Iterator<Item = &str> {
    segment.split(['/', '\\'])
}

/// True for a character that cuts off the rest of a segment. These are the start of parameters in Java servers, and of
/// a query or a fragment if the decoded path is parsed as a URL again. The others end a C string or a line.
fn ends_segment(letter: char) -> bool {
    matches!(letter, ';' | '?' | '#') || letter.is_control()
}

/// True for a character that is part of a name everywhere. Some server drops any other one, or ends the name there.
fn is_name_char(letter: char) -> bool {
    letter.is_alphanumeric() || matches!(letter, '-' | '_')
}

/// True if a server could take this for `..`: it begins with two dots, apart from characters that a server may drop,
/// and no name follows directly.
fn may_lead_up(part: &str) -> bool {
    let mut dots = 0;
    for letter in part.chars() {
        match letter {
            '.' => dots += 1,
            // A server that normalises Unicode (NFKC) takes these for dots.
            '\u{2025}' | '\u{2026}' => dots += 2,
            letter if is_name_char(letter) => return false,
            _ if dots >= 2 => return true,
            _ => {}
        }
    }
    dots >= 2
}

/// Returns a segment as decoded by the server that decodes most.
fn decode_repeatedly(segment: &str) -> String {
    let mut read = Vec::with_capacity(segment.len());
    for byte in segment.bytes() {
        read.push(byte);
        // A decoded byte may complete another escape.
        while let Some((length, byte)) = decode_suffix(&read) {
            read.truncate(read.len() - length);
            read.push(byte);
        }
    }
    String::from_utf8_lossy(&read).into_owned()
}

/// Returns the number of bytes at the end that some server takes for one ASCII byte, and that byte. These are an
/// escape, also `%u002e` of IIS; ASCII in an overlong form of UTF-8; and a character that looks like an ASCII one.
/// Overlong forms never become part of a name, because other servers drop them as invalid UTF-8.
fn decode_suffix(read: &[u8]) -> Option<(usize, u8)> {
    match *read {
        [.., b'%', high, low] if let Some(byte) = parse_hex(&[high, low]) => Some((3, u8::try_from(byte).ok()?)),
        [.., b'%', b'u' | b'U', a, b, c, d] if let Some(letter) = parse_hex(&[a, b, c, d]).and_then(char::from_u32) => {
            Some((6, ascii_equivalent(letter)?))
        }
        [.., 0xc0 | 0xc1, 0x80..=0xbf] => decode_overlong(read, 2),
        [.., 0xe0, 0x80 | 0x81, 0x80..=0xbf] => decode_overlong(read, 3),
        [.., 0xf0, 0x80, 0x80 | 0x81, 0x80..=0xbf] => decode_overlong(read, 4),
        _ => [2, 3].into_iter().find_map(|length| {
            let letter = str::from_utf8(read.get(read.len().checked_sub(length)?..)?).ok()?;
            let mut letters = letter.chars().filter(|letter| letter.len_utf8() == length);
            Some((length, ascii_equivalent(letters.next()?)?))
        }),
    }
}

/// Decodes an overlong form of `length` bytes. Its last two hold the bits of the byte.
fn decode_overlong(read: &[u8], length: usize) -> Option<(usize, u8)> {
    let (high, low) = (read[read.len() - 2], read[read.len() - 1]);
    let byte = (high & 1) << 6 | low & 0x3f;
    (!is_name_char(byte.into())).then_some((length, byte))
}

fn parse_hex(digits: &[u8]) -> Option<u32> {
    digits.iter().try_fold(0, |value, digit| Some(value * 16 + char::from(*digit).to_digit(16)?))
}

/// Returns the ASCII character that some servers take a character for: by Unicode's compatibility forms (NFKC), or by
/// the nearest character in a code page.
fn ascii_equivalent(letter: char) -> Option<u8> {
    match letter {
        '\0'..='\u{7f}' => u8::try_from(letter).ok(),
        '\u{ff01}'..='\u{ff5e}' => u8::try_from(u32::from(letter) - 0xfee0).ok(),
        '\u{2024}' | '\u{3002}' | '\u{fe52}' | '\u{ff61}' => Some(b'.'),
        '\u{2044}' | '\u{2215}' | '\u{29f8}' => Some(b'/'),
        '\u{a5}' | '\u{20a9}' | '\u{2216}' | '\u{29f5}' | '\u{29f9}' | '\u{fe68}' => Some(b'\\'),
        '\u{37e}' | '\u{fe54}' => Some(b';'),
        '\u{fe56}' => Some(b'?'),
        '\u{fe5f}' => Some(b'#'),
        '\u{fe6a}' => Some(b'%'),
        _ => None,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use percent_encoding::percent_decode;
    use tidegate_testkit::property;

    /// Returns the results of a path on servers that decode it up to three times. Each may also take `\` for a slash,
    /// and cut off parameters or the rest of the path. Each may drop white space, control characters and invalid UTF-8,
    /// at the ends of segments or everywhere.
    pub(crate) fn readings(path: &str) -> impl Iterator<Item = Vec<String>> {
        const SLASHES: u32 = 1;
        const PARAMETERS: u32 = 2;
        const REST: u32 = 4;
        const TRIM: u32 = 8;
        const LEAVE_OUT: u32 = 16;
        let decode = |path: &String| Some(percent_decode(path.as_bytes()).decode_utf8_lossy().into_owned());
        let decoded: Vec<String> = std::iter::successors(Some(path.to_owned()), decode).take(4).collect();
        decoded.into_iter().flat_map(|path| {
            (0..32_u32).map(move |does| {
                let does = |what| does & what != 0;
                let ends = |letter: char| matches!(letter, '?' | '#') || letter.is_control();
                let path = if does(REST) { path.split(ends).next().unwrap_or_default() } else { &path };
                let path = if does(SLASHES) { path.replace('\\', "/") } else { path.to_owned() };
                let mut stack = Vec::new();
                for segment in path.split('/') {
                    let segment =
                        if does(PARAMETERS) { segment.split(';').next().unwrap_or_default() } else { segment };
                    let left_out = |letter: char| letter.is_whitespace() || letter.is_control() || letter == '\u{fffd}';
                    let trimmed = if does(TRIM) { segment.trim_matches(left_out) } else { segment };
                    let segment: String =
                        trimmed.chars().filter(|letter| !does(LEAVE_OUT) || !left_out(*letter)).collect();
                    match &*segment {
                        "" | "." => {}
                        ".." => drop(stack.pop()),
                        _ => stack.push(segment),
                    }
                }
                stack
            })
        })
    }

    #[test]
    fn paths_below_the_base_are_accepted() {
        for path in [
            "",
            "/",
            "/movie/603",
            "//evil.example/x",
            "/@evil.example",
            "/@scope/package",
            "/a/../b",
            "/a/b/../../c",
            "/a%2fb",
            "/a/%2e%2e/b",
            "/a..b/..c/...",
            "/%2f%2fevil",
            "/a;x=1/b",
            "/.",
            "/./a",
            "/%zz",
            "/search/C%23%20%26%3F/..",
            "/%E4%B8%AD%E6%96%87/../b",
            "/a%252fb/..",
            "/.git/..",
            "/...x/..hidden/../..",
            "/compare/v1...v2",
            "/https%3A%2F%2Fexample.org%2F..x",
            "/%",
            "/%2",
            "/%u12",
            "/%c0",
            "/caf\u{e9}/..",
        ] {
            assert_eq!(check(path), Ok(()), "{path}");
        }
    }

    #[test]
    fn paths_leaving_the_base_are_rejected() {
        for path in [
            "/..",
            "/../x",
            "/a/../..",
            "/%2e%2e/x",
            "/%2E./x",
            "/.%2e",
            "/..%2fx",
            "/a/..%2f..%2fx",
            "/..%5cx",
            "/a%2f..%2f..",
            "/a%2fb/../..",
            "/..;/x",
            "/..;a=b/x",
            "/%2e%2e%3bx/y",
            "/./..",
            "//..",
            "/a//../..",
            "/a%2f../b/..",
            "/%2f/..",
            // Characters that some servers drop, or that end a name.
            "/..%00/x",
            "/..%20/x",
            "/%20../x",
            "/.%20./x",
            "/..%09/x",
            "/.%09./x",
            "/.%0a./x",
            "/..%0d%0a/x",
            "/..%00x/y",
            "/..%0ax/y",
            "/..%c2%a0/x",
            "/.%e2%80%8b./x",
            "/..%ff/x",
            "/.../x",
            "/..%2e/x",
            "/..%20./x",
            "/%2e%2e%23/x",
            "/..%3f/x",
            "/..%3fx/y",
            "/..%3ba=b/x",
            "/..::$INDEX_ALLOCATION/x",
            "/..*/x",
            // Escapes of escapes.
            "/%252e%252e/x",
            "/%25252e%25252e/x",
            "/%2525252525252e./x",
            "/%%32%65%%32%65/x",
            "/%%32e./x",
            "/..%252f",
            "/..%255cx",
            "/..%253bx/y",
            "/..%2500/x",
            "/a/..%252f..%252fx",
            // Overlong UTF-8, other encodings, and characters that look like ASCII.
            "/%c0%ae%c0%ae/x",
            "/%c0%ae./x",
            "/%e0%80%ae%e0%80%ae/x",
            "/%f0%80%80%ae./x",
            "/..%c0%afx/y",
            "/..%c1%9cx/y",
            "/%c0%2e%c0%2e/x",
            "/%c1../x",
            "/a%c0%5c..%c0%5c../x",
            "/%u002e%u002e/x",
            "/..%u2215x",
            "/%uff0e%uff0e/x",
            "/%ef%bc%8e%ef%bc%8e/x",
            "/\u{ff0e}\u{ff0e}/x",
            "/\u{2025}/x",
            "/%e2%80%a6/x",
            "/..\u{ff0f}x",
            "/..%c2%a5x",
            "/\u{ff05}2e./x",
            "/%ef%bc%852e./x",
            // Segments that go down no level.
            "/%00/..",
            "/%20/..",
            "/%2500/..",
            "/%252f/..",
            "/;%2fa/..",
            "/%3fa/..",
            "/%23a/..",
            "/%252e/..",
            "/%c0%ae/..",
            "/%c1%a1/..",
        ] {
            assert_eq!(check(path), Err(TargetError::PathTraversal), "{path}");
        }
    }

    #[test]
    fn targets_that_are_no_path_are_rejected() {
        for path in ["http://evil.example/", "@evil.example", "*", "evil", "..", "%2e"] {
            assert_eq!(check(path), Err(TargetError::NotAPath), "{path}");
        }
        for path in ["/\\evil.example", "/a\\..\\b", "\\\\evil"] {
            assert!(check(path).is_err(), "{path}");
        }
    }

    const PIECES: [&[u8]; 24] = [
        b"/", b".", b"..", b"%2e", b"%252e", b"%2f", b"%252f", b"%5c", b"%", b"%25", b"2e", b"2f", b";", b"%3b",
        b"%3f", b"%23", b"%00", b"%20", b"%09", b"%0a", b"a", b"b", b"%c0%ae", b"%c0",
    ];

    #[test]
    fn accepted_paths_stay_below_the_base_always() {
        property::fuzz(30, |mut random| {
            let path = format!("/{}", String::from_utf8_lossy(&random.concat_random(&PIECES, 10)));
            if check(&path).is_err() {
                return Ok(());
            }
            let base = ["v1".to_owned(), "x".to_owned()];
            let strays = readings(&format!("/v1/x{path}")).find(|stack| !stack.starts_with(&base));
            strays.map_or(Ok(()), |stack| Err(format!("{path} leads to {stack:?}")))
        });
    }
}
