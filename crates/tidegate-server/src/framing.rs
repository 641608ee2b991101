//! The framing of messages in the bytes of a client connection, tracked outside the HTTP parser.
//!
//! *Why here:* if a request has both `Transfer-Encoding` and `Content-Length`, the parser drops the length. RFC 9112
//! §6.3 allows that, but the service never learns that the framing was ambiguous. Servers behind the gate, or in front
//! of it, may choose the other header: that is request smuggling. This tracker sees every head as it was sent and
//! reports which one was ambiguous. So is a line that ends with LF alone: the parser takes it (RFC 9112 §2.2 allows both), and
//! other servers don't. It refuses nothing itself. A wrong guess about the start of a head can only miss a detection, or
//! refuse a request behind one that the parser read in another way.

use memchr::memchr;

/// The number of bytes that are kept of a header line while the rest hasn't arrived. This is enough for the relevant
/// names and for a length of any size.
const MAX_PARTIAL_LINE: usize = 64;

/// Tracks the framing of one connection.
#[derive(Debug)]
pub(crate) struct FramingTracker {
    state: FramingState,
    partial_line: [u8; MAX_PARTIAL_LINE],
    partial_len: usize,
    head: HeadFraming,
    head_count: u32,
    /// True if the line that hasn't arrived whole ends with CR so far.
    has_partial_cr: bool,
    /// The number, from 1, of the first head with both `Transfer-Encoding` and `Content-Length`, or with a line, of its
    /// trailers too, that ends with LF alone; 0 if there is none.
    pub(crate) first_ambiguous_head: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FramingState {
    /// At a line of a head. The first line is the request line.
    Head,
    /// Inside a body of known length. Holds the remaining bytes.
    Body(u64),
    /// At the line with a chunk's size.
    ChunkSize,
    /// Inside a chunk, including its line end. Holds the remaining bytes.
    Chunk(u64),
    /// At a line of the trailers.
    Trailers,
}

#[derive(Clone, Copy, Debug, Default)]
struct HeadFraming {
    has_request_line: bool,
    content_length: Option<u64>,
    has_transfer_encoding: bool,
    has_bare_lf: bool,
}

impl FramingTracker {
    pub(crate) fn new() -> Self {
        Self {
            state: FramingState::Head,
            partial_line: [0; MAX_PARTIAL_LINE],
            partial_len: 0,
            has_partial_cr: false,
            head: HeadFraming::default(),
            head_count: 0,
            first_ambiguous_head: 0,
        }
    }

    /// Processes the next bytes from the client.
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match self.state {
                FramingState::Body(left) | FramingState::Chunk(left) => {
                    let step = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                    bytes = &bytes[step..];
                    let left = left - step as u64;
                    self.state = match (self.state, left) {
                        (FramingState::Body(_), 0) => FramingState::Head,
                        (FramingState::Body(_), _) => FramingState::Body(left),
                        (_, 0) => FramingState::ChunkSize,
                        _ => FramingState::Chunk(left),
                    };
                }
                FramingState::Head if self.partial_len == 0 && self.head.has_request_line => {
                    bytes = self.skip_header_lines(bytes)
                }
                FramingState::Head | FramingState::ChunkSize | FramingState::Trailers => match memchr(b'\n', bytes) {
                    Some(end) => {
                        if self.partial_len == 0 {
                            self.note_end(&bytes[..end]);
                            self.process_line(trim_end(&bytes[..end]));
                        } else {
                            self.keep_partial_line(&bytes[..end]);
                            let (carry, carried) = (self.partial_line, self.partial_len);
                            self.partial_len = 0;
                            self.head.has_bare_lf |= !self.has_partial_cr;
                            self.process_line(trim_end(&carry[..carried]));
                        }
                        bytes = &bytes[end + 1..];
                    }
                    None => {
                        self.keep_partial_line(bytes);
                        bytes = &[];
                    }
                },
            }
        }
    }

    /// Skips the lines of a head up to its end, to a line that concerns its framing, or to an incomplete line. Nearly
    /// all bytes of all heads pass through this function.
    #[inline]
    fn skip_header_lines<'b>(&mut self, mut bytes: &'b [u8]) -> &'b [u8] {
        while let Some(end) = memchr(b'\n', bytes) {
            self.note_end(&bytes[..end]);
            match bytes[0] {
                b'c' | b'C' | b't' | b'T' | b'\r' | b'\n' => self.process_line(trim_end(&bytes[..end])),
                _ => {}
            }
            bytes = &bytes[end + 1..];
            if !self.head.has_request_line || bytes.is_empty() {
                return bytes;
            }
        }
        self.keep_partial_line(bytes);
        &[]
    }

    /// Notes if a line, without its LF, ends with CR.
    #[inline]
    fn note_end(&mut self, line: &[u8]) {
        self.head.has_bare_lf |= line.last() != Some(&b'\r');
    }

    fn keep_partial_line(&mut self, bytes: &[u8]) {
        if let Some(last) = bytes.last() {
            self.has_partial_cr = *last == b'\r';
        }
        let step = bytes.len().min(MAX_PARTIAL_LINE - self.partial_len);
        self.partial_line[self.partial_len..self.partial_len + step].copy_from_slice(&bytes[..step]);
        self.partial_len += step;
    }

    fn process_line(&mut self, line: &[u8]) {
        match self.state {
            FramingState::Head if line.is_empty() => {
                // RFC 9112 §2.2: a server ignores empty lines before a request line.
                if self.head.has_request_line {
                    self.finish_head();
                }
            }
            FramingState::Head if !self.head.has_request_line => self.head.has_request_line = true,
            FramingState::Head => match line[0] | 0x20 {
                b'c' => {
                    if let Some(value) = header_value(line, b"content-length") {
                        self.head.content_length = Some(parse_number(value, 10).unwrap_or(0));
                    }
                }
                b't' if header_value(line, b"transfer-encoding").is_some() => self.head.has_transfer_encoding = true,
                _ => {}
            },
            FramingState::ChunkSize => {
                let digits = line.split(|byte| matches!(byte, b';' | b' ' | b'\t')).next().unwrap_or(line);
                self.state = match parse_number(digits, 16) {
                    Some(0) => FramingState::Trailers,
                    Some(size) => FramingState::Chunk(size.saturating_add(2)),
                    None => FramingState::Head,
                };
            }
            FramingState::Trailers if line.is_empty() => {
                self.report_if(self.head.has_bare_lf);
                self.head = HeadFraming::default();
                self.state = FramingState::Head;
            }
            FramingState::Trailers | FramingState::Body(_) | FramingState::Chunk(_) => {}
        }
    }

    /// Reports the latest head if it is the first ambiguous one.
    fn report_if(&mut self, is_ambiguous: bool) {
        if is_ambiguous && self.first_ambiguous_head == 0 {
            self.first_ambiguous_head = self.head_count;
        }
    }

    fn finish_head(&mut self) {
        let head = std::mem::take(&mut self.head);
        self.head_count = self.head_count.wrapping_add(1);
        self.report_if(head.has_bare_lf || head.has_transfer_encoding && head.content_length.is_some());
        self.state = match head.content_length {
            _ if head.has_transfer_encoding => FramingState::ChunkSize,
            Some(length) if length > 0 => FramingState::Body(length),
            _ => FramingState::Head,
        };
    }
}

fn trim_end(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\r").unwrap_or(line)
}

fn header_value<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (found, value) = line.split_at_checked(name.len())?;
    let value = value.strip_prefix(b":")?;
    found.eq_ignore_ascii_case(name).then(|| value.trim_ascii())
}

fn parse_number(digits: &[u8], radix: u32) -> Option<u64> {
    let text = std::str::from_utf8(digits).ok()?;
    u64::from_str_radix(text, radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ambiguous(bytes: &[u8]) -> u32 {
        let mut whole = FramingTracker::new();
        whole.feed(bytes);
        let mut pieces = FramingTracker::new();
        for byte in bytes {
            pieces.feed(std::slice::from_ref(byte));
        }
        assert_eq!(whole.first_ambiguous_head, pieces.first_ambiguous_head, "the same however the bytes arrive");
        assert_eq!(whole.state, pieces.state);
        whole.first_ambiguous_head
    }

    #[test]
    fn both_length_headers_are_ambiguous_in_any_order() {
        assert_eq!(
            ambiguous(b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            1
        );
        assert_eq!(ambiguous(b"POST / HTTP/1.1\r\ntransfer-encoding:chunked\r\ncONTENT-LENGTH:3\r\n\r\n0\r\n\r\n"), 1);
        assert_eq!(ambiguous(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), 0);
        assert_eq!(ambiguous(b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"), 0);
    }

    #[test]
    fn only_the_ambiguous_head_is_reported() {
        let first = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nTrailer: x\r\n\r\n";
        let second = b"POST / HTTP/1.1\r\nContent-Length: 40\r\n\r\nTransfer-Encoding: chunked\r\nAAAAAAAAAA\r\n";
        let third = b"\r\nPOST / HTTP/1.1\nContent-Length: 1\nTransfer-Encoding: chunked\n\n0\n\n";
        assert_eq!(ambiguous(&[first.as_slice(), second].concat()), 0);
        assert_eq!(ambiguous(&[first.as_slice(), second, third].concat()), 3);
    }

    #[test]
    fn lines_that_end_with_lf_alone_are_reported() {
        let chunked = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
        for (what, bytes, expected) in [
            ("none", "GET / HTTP/1.1\r\nA: b\r\n\r\n".to_owned(), 0),
            ("a request line", "GET / HTTP/1.1\nA: b\r\n\r\n".to_owned(), 1),
            ("a header line", "GET / HTTP/1.1\r\nA: b\nC: d\r\n\r\n".to_owned(), 1),
            ("the end", "GET / HTTP/1.1\r\nA: b\r\n\n".to_owned(), 1),
            ("a long line", format!("GET / HTTP/1.1\r\nA: {}\n\r\n", "b".repeat(200)), 1),
            ("a long line with CR", format!("GET / HTTP/1.1\r\nA: {}\r\n\r\n", "b".repeat(200)), 0),
            ("before a head", "GET / HTTP/1.1\r\n\r\n\nGET / HTTP/1.1\r\n\r\n".to_owned(), 2),
            ("a body", "POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\na\nb\nGET / HTTP/1.1\r\n\r\n".to_owned(), 0),
            ("a chunk", format!("{chunked}4\r\na\nb\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n"), 0),
            ("a trailer", format!("{chunked}1\r\na\r\n0\r\nA: b\nC: d\r\n\r\n"), 1),
            ("the end of trailers", format!("{chunked}0\r\nA: b\r\n\n"), 1),
        ] {
            assert_eq!(ambiguous(bytes.as_bytes()), expected, "{what}");
        }
    }

    #[test]
    fn bodies_resembling_heads_are_ignored() {
        let body = b"\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n";
        let head = format!("POST / HTTP/1.1\r\nContent-Length: {}\r\n\r\n", body.len());
        assert_eq!(ambiguous(&[head.as_bytes(), body, b"GET / HTTP/1.1\r\n\r\n"].concat()), 0);
    }

    #[test]
    fn malformed_requests_never_panic() {
        for bytes in
            [&b"\r\n\r\n\r\n"[..], b"\xff\xff\n\xff", b"x\r\ncontent-length: 99999999999999999999999\r\n\r\nabc"]
        {
            ambiguous(bytes);
        }
        ambiguous(b"P / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nabc");
        ambiguous(&[b"GET /".as_slice(), &[b'a'; 4096], b" HTTP/1.1\r\n\r\n"].concat());
    }
}
