//! Where messages begin and end in the bytes of a client connection, watched from outside the HTTP parser.
//!
//! *Why here:* the parser resolves a request that carries both `Transfer-Encoding` and `Content-Length` by dropping
//! the length, which RFC 9112 §6.3 allows, and so the service never learns that the framing was ambiguous. Servers
//! behind the gate, or others in front of it, may resolve it the other way: that is request smuggling. This follower
//! sees every head as it was sent and tells which one was ambiguous. It refuses nothing itself, so a wrong guess of
//! where a head begins can only cost the detection, never a message.

use memchr::memchr;

/// How much of a header line is kept while the rest of it hasn't arrived: enough for the names that matter and a
/// length of any size.
const CARRY: usize = 64;

/// Follows the framing of one connection.
#[derive(Debug)]
pub(crate) struct Framing {
    at: At,
    carry: [u8; CARRY],
    carried: usize,
    head: Head,
    heads: u32,
    ambiguous: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// At a line of a head; the request line comes first.
    Head,
    /// Inside a body of known length.
    Body(u64),
    /// At the line that gives a chunk's size.
    ChunkSize,
    /// Inside a chunk, its line end included.
    Chunk(u64),
    /// At a line of the trailers.
    Trailers,
}

#[derive(Clone, Copy, Debug, Default)]
struct Head {
    begun: bool,
    length: Option<u64>,
    encoded: bool,
}

impl Framing {
    pub(crate) fn new() -> Self {
        Self { at: At::Head, carry: [0; CARRY], carried: 0, head: Head::default(), heads: 0, ambiguous: 0 }
    }

    /// The number, counted from 1, of the first head with both `Transfer-Encoding` and `Content-Length`; 0 if there
    /// was none.
    pub(crate) fn ambiguous(&self) -> u32 {
        self.ambiguous
    }

    /// Takes the next bytes that the client sent.
    pub(crate) fn follow(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match self.at {
                At::Body(left) | At::Chunk(left) => {
                    let step = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                    bytes = &bytes[step..];
                    let left = left - step as u64;
                    self.at = match (self.at, left) {
                        (At::Body(_), 0) => At::Head,
                        (At::Body(_), _) => At::Body(left),
                        (_, 0) => At::ChunkSize,
                        _ => At::Chunk(left),
                    };
                }
                At::Head if self.carried == 0 && self.head.begun => bytes = self.skip(bytes),
                At::Head | At::ChunkSize | At::Trailers => match memchr(b'\n', bytes) {
                    Some(end) => {
                        if self.carried == 0 {
                            self.line(trim_end(&bytes[..end]));
                        } else {
                            self.keep(&bytes[..end]);
                            let (carry, carried) = (self.carry, self.carried);
                            self.carried = 0;
                            self.line(trim_end(&carry[..carried]));
                        }
                        bytes = &bytes[end + 1..];
                    }
                    None => {
                        self.keep(bytes);
                        bytes = &[];
                    }
                },
            }
        }
    }

    /// Passes over the lines of a head up to its end, to one that says something of its framing, or to one that isn't
    /// whole yet. Nearly all that is ever read goes through here.
    #[inline]
    fn skip<'b>(&mut self, mut bytes: &'b [u8]) -> &'b [u8] {
        while let Some(end) = memchr(b'\n', bytes) {
            match bytes[0] {
                b'c' | b'C' | b't' | b'T' | b'\r' | b'\n' => self.line(trim_end(&bytes[..end])),
                _ => {}
            }
            bytes = &bytes[end + 1..];
            if !self.head.begun || bytes.is_empty() {
                return bytes;
            }
        }
        self.keep(bytes);
        &[]
    }

    fn keep(&mut self, bytes: &[u8]) {
        let step = bytes.len().min(CARRY - self.carried);
        self.carry[self.carried..self.carried + step].copy_from_slice(&bytes[..step]);
        self.carried += step;
    }

    fn line(&mut self, line: &[u8]) {
        match self.at {
            At::Head if line.is_empty() => {
                // Empty lines before a request line are skipped (RFC 9112 §2.2).
                if self.head.begun {
                    self.end_of_head();
                }
            }
            At::Head if !self.head.begun => self.head.begun = true,
            At::Head => match line[0] | 0x20 {
                b'c' => {
                    if let Some(value) = value_of(line, b"content-length") {
                        self.head.length = Some(number(value, 10).unwrap_or(0));
                    }
                }
                b't' if value_of(line, b"transfer-encoding").is_some() => self.head.encoded = true,
                _ => {}
            },
            At::ChunkSize => {
                let digits = line.split(|byte| matches!(byte, b';' | b' ' | b'\t')).next().unwrap_or(line);
                self.at = match number(digits, 16) {
                    Some(0) => At::Trailers,
                    Some(size) => At::Chunk(size.saturating_add(2)),
                    None => At::Head,
                };
            }
            At::Trailers if line.is_empty() => self.at = At::Head,
            At::Trailers | At::Body(_) | At::Chunk(_) => {}
        }
    }

    fn end_of_head(&mut self) {
        let head = std::mem::take(&mut self.head);
        self.heads = self.heads.wrapping_add(1);
        if head.encoded && head.length.is_some() && self.ambiguous == 0 {
            self.ambiguous = self.heads;
        }
        self.at = match head.length {
            _ if head.encoded => At::ChunkSize,
            Some(length) if length > 0 => At::Body(length),
            _ => At::Head,
        };
    }
}

fn trim_end(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\r").unwrap_or(line)
}

fn value_of<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (found, value) = line.split_at_checked(name.len())?;
    let value = value.strip_prefix(b":")?;
    found.eq_ignore_ascii_case(name).then(|| value.trim_ascii())
}

fn number(digits: &[u8], radix: u32) -> Option<u64> {
    let text = std::str::from_utf8(digits).ok()?;
    u64::from_str_radix(text, radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ambiguous(bytes: &[u8]) -> u32 {
        let mut whole = Framing::new();
        whole.follow(bytes);
        let mut pieces = Framing::new();
        for byte in bytes {
            pieces.follow(std::slice::from_ref(byte));
        }
        assert_eq!(whole.ambiguous(), pieces.ambiguous(), "the same however the bytes arrive");
        assert_eq!(whole.at, pieces.at);
        whole.ambiguous()
    }

    #[test]
    fn both_lengths_in_either_order() {
        assert_eq!(
            ambiguous(b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            1
        );
        assert_eq!(ambiguous(b"POST / HTTP/1.1\r\ntransfer-encoding:chunked\r\ncONTENT-LENGTH:3\r\n\r\n0\r\n\r\n"), 1);
        assert_eq!(ambiguous(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), 0);
        assert_eq!(ambiguous(b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"), 0);
    }

    #[test]
    fn only_the_head_that_has_both_is_named() {
        let first = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nTrailer: x\r\n\r\n";
        let second = b"POST / HTTP/1.1\r\nContent-Length: 40\r\n\r\nTransfer-Encoding: chunked\r\nAAAAAAAAAA\r\n";
        let third = b"\r\nPOST / HTTP/1.1\nContent-Length: 1\nTransfer-Encoding: chunked\n\n0\n\n";
        assert_eq!(ambiguous(&[first.as_slice(), second].concat()), 0);
        assert_eq!(ambiguous(&[first.as_slice(), second, third].concat()), 3);
    }

    #[test]
    fn bodies_that_look_like_heads_are_not_read() {
        let body = b"\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n";
        let head = format!("POST / HTTP/1.1\r\nContent-Length: {}\r\n\r\n", body.len());
        assert_eq!(ambiguous(&[head.as_bytes(), body, b"GET / HTTP/1.1\r\n\r\n"].concat()), 0);
    }

    #[test]
    fn nonsense_never_panics() {
        for bytes in
            [&b"\r\n\r\n\r\n"[..], b"\xff\xff\n\xff", b"x\r\ncontent-length: 99999999999999999999999\r\n\r\nabc"]
        {
            ambiguous(bytes);
        }
        ambiguous(b"P / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nabc");
        ambiguous(&[b"GET /".as_slice(), &[b'a'; 4096], b" HTTP/1.1\r\n\r\n"].concat());
    }
}
