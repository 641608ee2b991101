//! A reader of server-sent events in a stream that passes through.

/// The byte order mark, which the first line of a stream may begin with.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Reads a stream of server-sent events (WHATWG HTML §9.2.6), in pieces of any size. Only the data of an event is read.
///
/// At most twice `limit` bytes are held: the current line, and the data of the event so far. An event that is longer is
/// skipped.
#[derive(Default)]
pub(super) struct SseReader {
    limit: usize,
    line: Vec<u8>,
    /// True if some of the current line has arrived.
    has_line_begun: bool,
    /// True if the last byte was a carriage return, so that a line feed would belong to it.
    after_carriage_return: bool,
    data: Vec<u8>,
    is_too_long: bool,
}

impl SseReader {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Reads more of the stream, and calls `on_data` with the data of each event that has ended.
    pub(super) fn read(&mut self, mut bytes: &[u8], mut on_data: impl FnMut(&[u8])) {
        while let Some(&next) = bytes.first() {
            if std::mem::take(&mut self.after_carriage_return) && next == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let end = bytes.iter().position(|byte| matches!(byte, b'\r' | b'\n'));
            let (line, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
            self.push_line_part(line);
            let Some((ending, rest)) = rest.split_first() else { return };
            self.after_carriage_return = *ending == b'\r';
            self.end_line(&mut on_data);
            bytes = rest;
        }
    }

    fn push_line_part(&mut self, part: &[u8]) {
        self.has_line_begun |= !part.is_empty();
        if self.line.len() + self.data.len() + part.len() > self.limit {
            self.is_too_long = true;
            (self.line, self.data) = (Vec::new(), Vec::new());
        }
        if !self.is_too_long {
            self.line.extend_from_slice(part);
        }
    }

    /// Handles the end of a line. A blank line ends the event.
    fn end_line(&mut self, on_data: &mut impl FnMut(&[u8])) {
        if !std::mem::take(&mut self.has_line_begun) {
            if !self.data.is_empty() {
                on_data(&self.data);
            }
            self.data.clear();
            self.is_too_long = false;
        } else if let Some(data) = parse_data_line(&self.line) {
            if !self.data.is_empty() {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(data);
        }
        self.line.clear();
    }
}

fn parse_data_line(line: &[u8]) -> Option<&[u8]> {
    let line = line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line);
    let data = line.strip_prefix(b"data:")?;
    Some(data.strip_prefix(b" ").unwrap_or(data))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_testkit::property;

    const PIECES: &[&[u8]] =
        &[b"data: ", b"data", b":", b"\n", b"\r", b"\n\n", b"\xef\xbb\xbf", b"\xff", b"a long text"];

    fn read<'a>(limit: usize, chunks: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
        let (mut events, mut found) = (SseReader::new(limit), Vec::new());
        for chunk in chunks {
            events.read(chunk, |data| found.push(String::from_utf8_lossy(data).into_owned()));
            assert!(events.line.len() + events.data.len() <= 2 * limit);
        }
        found
    }

    #[test]
    fn event_data_is_parsed_from_the_stream() {
        for (stream, expected) in [
            ("data: one\n\ndata: two\n\n", &["one", "two"][..]),
            ("data: one\r\n\r\ndata: two\r\n\r\n", &["one", "two"]),
            ("data: one\r\rdata: two\r\r", &["one", "two"]),
            ("\u{feff}data:one\n\n", &["one"]),
            ("data:  one\n\n", &[" one"]),
            ("data: one\ndata: two\n\n", &["one\ntwo"]),
            (": ping\n\nevent: x\nid: 1\ndata: one\nretry: 5\n\n", &["one"]),
            ("event: x\n\n\n\ndata\n\ndata:\n\n", &[]),
            ("database: x\n\n data: x\n\n", &[]),
            ("data: one\n\ndata: cut off", &["one"]),
        ] {
            assert_eq!(read(64, [stream.as_bytes()]), expected, "{stream:?}");
            assert_eq!(read(64, stream.as_bytes().chunks(1)), expected, "{stream:?} byte by byte");
            for split in 0..stream.len() {
                let (first, second) = stream.as_bytes().split_at(split);
                assert_eq!(read(64, [first, &[], second]), expected, "{stream:?} at {split}");
            }
        }
    }

    #[test]
    fn an_event_beyond_the_limit_is_skipped() {
        let stream = format!("data: one\n\ndata: {}\ndata: more\n\ndata: two\n\n", "x".repeat(100));
        for size in [1, 7, 1_000] {
            assert_eq!(read(20, stream.as_bytes().chunks(size)), ["one", "two"], "chunks of {size}");
        }
        let in_lines = format!("{}\ndata: two\n\n", "data: 12345678\n".repeat(3));
        assert_eq!(read(20, [in_lines.as_bytes()]), ["two"]);
    }

    #[test]
    fn chunk_sizes_do_not_change_parsed_events() {
        property::fuzz(120, |mut random| {
            let (limit, size) = (random.below(40) as usize, random.between(1, 20) as usize);
            let stream = random.concat_random(PIECES, 60);
            let (found, expected) = (read(limit, stream.chunks(size)), read(limit, stream.chunks(1)));
            if found == expected { Ok(()) } else { Err(format!("{found:?}, byte by byte {expected:?}")) }
        });
    }
}
