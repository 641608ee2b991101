//! The requests of the Redis protocol: an array of bulk strings, or an inline command of words in a line.

use std::ops::Range;

use memchr::memchr;

/// The most arguments of a request.
pub(super) const MAX_ARGUMENTS: usize = 256;
/// The most bytes of a request.
pub(super) const MAX_REQUEST_BYTES: usize = 16 << 10;
/// The most bytes of the line of a length.
const MAX_LENGTH_LINE: usize = 32;

/// A request that can't be read. Where the next one begins is then unknown, so the connection must end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ProtocolError {
    #[error("invalid multibulk length")]
    ArrayLength,
    #[error("a request has at most {MAX_ARGUMENTS} arguments")]
    TooManyArguments,
    #[error("expected '$', got '{}'", .0.escape_ascii())]
    NotABulkString(u8),
    #[error("invalid bulk length")]
    BulkLength,
    #[error("a request has at most {MAX_REQUEST_BYTES} bytes")]
    TooLarge,
}

/// A request at the beginning of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ParsedRequest {
    /// The number of its bytes.
    pub(super) length: usize,
    /// True if it is an inline command.
    pub(super) is_inline: bool,
}

/// Reads a request at the beginning of the input, and the places of its arguments. `None` if more bytes must arrive first.
/// A request without arguments asks nothing.
pub(super) fn parse(input: &[u8], arguments: &mut Vec<Range<usize>>) -> Result<Option<ParsedRequest>, ProtocolError> {
    arguments.clear();
    match input.first() {
        None => Ok(None),
        Some(b'*') => parse_array(input, arguments),
        Some(_) => parse_inline(input, arguments),
    }
}

fn parse_array(input: &[u8], arguments: &mut Vec<Range<usize>>) -> Result<Option<ParsedRequest>, ProtocolError> {
    let Some((count, mut at)) = length_line(input, 1).ok_or(ProtocolError::ArrayLength)? else { return Ok(None) };
    if count > MAX_ARGUMENTS as i64 {
        return Err(ProtocolError::TooManyArguments);
    }
    // As in Redis, an array of no or a negative length is ignored.
    for _ in 0..count {
        match input.get(at) {
            None => return Ok(None),
            Some(b'$') => {}
            Some(other) => return Err(ProtocolError::NotABulkString(*other)),
        }
        let Some((length, begin)) = length_line(input, at + 1).ok_or(ProtocolError::BulkLength)? else {
            return Ok(None);
        };
        let length = usize::try_from(length).map_err(|_| ProtocolError::BulkLength)?;
        if length > MAX_REQUEST_BYTES || begin + length > MAX_REQUEST_BYTES {
            return Err(ProtocolError::TooLarge);
        }
        let end = begin + length;
        match input.get(end..end + 2) {
            None => return Ok(None),
            Some(b"\r\n") => {}
            Some(_) => return Err(ProtocolError::BulkLength),
        }
        arguments.push(begin..end);
        at = end + 2;
    }
    Ok(Some(ParsedRequest { length: at, is_inline: false }))
}

/// Reads a number and the end of its line, from `begin` on. Returns the number and the place after the line. `None` if it
/// is no number, `Some(None)` if the line hasn't arrived whole.
#[expect(clippy::option_option, reason = "the two mean different things, and a type for them would be longer")]
fn length_line(input: &[u8], begin: usize) -> Option<Option<(i64, usize)>> {
    let rest = &input[begin..input.len().min(begin + MAX_LENGTH_LINE)];
    let Some(end) = memchr(b'\r', rest) else { return (rest.len() < MAX_LENGTH_LINE).then_some(None) };
    let number = parse_number(&rest[..end])?;
    match rest.get(end + 1) {
        None if rest.len() < MAX_LENGTH_LINE => Some(None),
        Some(b'\n') => Some(Some((number, begin + end + 2))),
        _ => None,
    }
}

/// Reads a whole number in decimal digits, with a minus sign if it is negative.
pub(super) fn parse_number(text: &[u8]) -> Option<i64> {
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    if !digits.first()?.is_ascii_digit() {
        return None;
    }
    str::from_utf8(text).ok()?.parse().ok()
}

fn parse_inline(input: &[u8], arguments: &mut Vec<Range<usize>>) -> Result<Option<ParsedRequest>, ProtocolError> {
    let searched = &input[..input.len().min(MAX_REQUEST_BYTES)];
    let Some(end) = memchr(b'\n', searched) else {
        return if searched.len() < MAX_REQUEST_BYTES { Ok(None) } else { Err(ProtocolError::TooLarge) };
    };
    let mut at = 0;
    for word in input[..end].split(u8::is_ascii_whitespace) {
        if !word.is_empty() {
            if arguments.len() == MAX_ARGUMENTS {
                return Err(ProtocolError::TooManyArguments);
            }
            arguments.push(at..at + word.len());
        }
        at += word.len() + 1;
    }
    Ok(Some(ParsedRequest { length: end + 1, is_inline: true }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate_testkit::property;

    use super::*;

    /// The arguments of a request, and the number of its bytes.
    type Read<'i> = (Vec<&'i [u8]>, usize);

    fn read(input: &[u8]) -> Result<Option<Read<'_>>, ProtocolError> {
        let mut arguments = Vec::new();
        let parsed = parse(input, &mut arguments)?;
        Ok(parsed.map(|parsed| (arguments.into_iter().map(|place| &input[place]).collect(), parsed.length)))
    }

    #[test]
    fn requests_are_read_whole() {
        for (input, arguments, length) in [
            (&b"*1\r\n$4\r\nPING\r\nrest"[..], &[&b"PING"[..]][..], 14),
            (b"*2\r\n$4\r\nECHO\r\n$0\r\n\r\n", &[b"ECHO", b""], 20),
            (b"*2\r\n$4\r\nECHO\r\n$4\r\na\r\nb\r\n", &[b"ECHO", b"a\r\nb"], 24),
            (b"*0\r\nPING", &[], 4),
            (b"*-1\r\n", &[], 5),
            (b"PING\r\n", &[b"PING"], 6),
            (b" set  a\tb \n", &[b"set", b"a", b"b"], 11),
            (b"\r\n", &[], 2),
        ] {
            assert_eq!(read(input), Ok(Some((arguments.to_vec(), length))), "{}", input.escape_ascii());
            for end in 0..length {
                assert_eq!(read(&input[..end]), Ok(None), "{}", input[..end].escape_ascii());
            }
        }
    }

    #[test]
    fn invalid_requests_are_errors() {
        for (input, error) in [
            (&b"*x\r\n"[..], ProtocolError::ArrayLength),
            (b"*+1\r\n", ProtocolError::ArrayLength),
            (b"*1\n$4\r\n", ProtocolError::ArrayLength),
            (b"*1\rx", ProtocolError::ArrayLength),
            (b"*11111111111111111111111111111111", ProtocolError::ArrayLength),
            (b"*1000000000\r\n", ProtocolError::TooManyArguments),
            (b"*1\r\n:4\r\n", ProtocolError::NotABulkString(b':')),
            (b"*1\r\n*1\r\n", ProtocolError::NotABulkString(b'*')),
            (b"*1\r\n$-1\r\n", ProtocolError::BulkLength),
            (b"*1\r\n$\r\n", ProtocolError::BulkLength),
            (b"*1\r\n$4\r\nPINGxx", ProtocolError::BulkLength),
            (b"*1\r\n$536870912\r\n", ProtocolError::TooLarge),
            (b"*1\r\n$9223372036854775807\r\n", ProtocolError::TooLarge),
            (&[b'a'; MAX_REQUEST_BYTES], ProtocolError::TooLarge),
        ] {
            assert_eq!(read(input), Err(error), "{}", input[..input.len().min(40)].escape_ascii());
        }
        let words = "a ".repeat(MAX_ARGUMENTS + 1) + "\n";
        assert_eq!(read(words.as_bytes()), Err(ProtocolError::TooManyArguments));
        let two =
            format!("*2\r\n${0}\r\n{1}\r\n${0}\r\n", MAX_REQUEST_BYTES - 100, "a".repeat(MAX_REQUEST_BYTES - 100));
        assert_eq!(read(two.as_bytes()), Err(ProtocolError::TooLarge));
    }

    proptest! {
        #[test]
        fn written_requests_are_read_back(words in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..20)) {
            let mut input = format!("*{}\r\n", words.len()).into_bytes();
            for word in &words {
                input.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
                input.extend_from_slice(word);
                input.extend_from_slice(b"\r\n");
            }
            let length = input.len();
            input.extend_from_slice(b"*1\r\n");
            let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
            prop_assert_eq!(read(&input), Ok(Some((words, length))));
        }
    }

    /// Parts of requests: lengths right and wrong, ends of lines, words, and bytes that aren't text.
    const PIECES: [&[u8]; 22] = [
        b"*1\r\n",
        b"*2\r\n",
        b"*0\r\n",
        b"*-1\r\n",
        b"*999999999\r\n",
        b"$0\r\n\r\n",
        b"$4\r\nPING\r\n",
        b"$-1\r\n",
        b"$5\r\n",
        b"$16384\r\n",
        b"$536870912\r\n",
        b"$99999999999999999999\r\n",
        b"*",
        b"$",
        b"\r",
        b"\n",
        b"\r\n",
        b" ",
        b"PING",
        b"\"a b\"",
        b"\0",
        b"\xff",
    ];

    #[test]
    fn arbitrary_requests_are_read_or_refused() {
        property::fuzz_cheaply(|random| {
            let input = random.concat_random(&PIECES, 12);
            if let Ok(Some((_, length))) = read(&input) {
                assert_eq!(read(&input[..length]), read(&input));
                assert!(length == 0 || read(&input[..length - 1]) == Ok(None), "{}", input.escape_ascii());
            }
        });
    }
}
