//! Reads a log as lines, compressed or not.

use std::io::{self, Read};
use std::ops::Range;

use flate2::read::MultiGzDecoder;
use memchr::memchr;

/// The longest line that is read. A longer one is skipped and counted as broken. Web servers cap a request's head at 8
/// to 32 KiB, and JSON may hold it twice.
pub const MAX_LINE: usize = 1 << 16;
/// The number of bytes that are read at a time, which fits a second-level cache beside everything else.
const BUFFER_BYTES: usize = 4 * MAX_LINE;

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// The end of the magic bytes of Zstandard's skippable frames, after a byte with a free low half (RFC 8878 §3.1.2).
const ZSTD_SKIPPABLE: [u8; 3] = [0x2a, 0x4d, 0x18];

/// Returns the content of a compressed log, and of a plain one as it is. The first bytes tell the format (RFC 1952
/// §2.3.1, RFC 8878 §3.1).
///
/// # Errors
/// The log can't be read.
pub(super) fn decompressed<'r>(mut log: impl Read + 'r) -> io::Result<Box<dyn Read + 'r>> {
    let mut start = Vec::with_capacity(ZSTD.len());
    log.by_ref().take(ZSTD.len() as u64).read_to_end(&mut start)?;
    let is_gzip = start.starts_with(&GZIP);
    let is_zstd = start == ZSTD || matches!(*start, [0x50..=0x5f, ref rest @ ..] if *rest == ZSTD_SKIPPABLE);
    let whole = io::Cursor::new(start).chain(log);
    Ok(if is_gzip {
        Box::new(MultiGzDecoder::new(whole))
    } else if is_zstd {
        zstd_decoder(whole)?
    } else {
        Box::new(whole)
    })
}

#[cfg(feature = "zstd")]
fn zstd_decoder<'r>(log: impl Read + 'r) -> io::Result<Box<dyn Read + 'r>> {
    Ok(Box::new(zstd::stream::read::Decoder::new(log)?))
}

#[cfg(not(feature = "zstd"))]
fn zstd_decoder<'r>(_: impl Read + 'r) -> io::Result<Box<dyn Read + 'r>> {
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        "it is compressed with Zstandard, which this build can't read; decompress it, or build with --features simulate",
    ))
}

/// The position of a line, valid until more is read; `None` if the line was too long for the buffer.
pub(super) type LineSpan = Option<Range<usize>>;

/// Reads lines into one buffer that never grows.
pub(super) struct LineReader<R> {
    source: R,
    buffer: Box<[u8]>,
    begin: usize,
    end: usize,
}

impl<R: Read> LineReader<R> {
    pub(super) fn new(source: R) -> Self {
        Self { source, buffer: vec![0; BUFFER_BYTES].into(), begin: 0, end: 0 }
    }

    /// Replaces `spans` by those of the next lines, up to `max` of them, as far as they are read already. At the end
    /// there are none. The last line needn't end with a line break.
    ///
    /// # Errors
    /// The log can't be read, or its compression is broken.
    pub(super) fn read_spans(&mut self, max: usize, spans: &mut Vec<LineSpan>) -> io::Result<()> {
        spans.clear();
        spans.extend(self.next_span()?);
        while !spans.is_empty() && spans.len() < max {
            let Some(found) = memchr(b'\n', &self.buffer[self.begin..self.end]) else { break };
            spans.push(Some(self.begin..self.begin + found));
            self.begin += found + 1;
        }
        Ok(())
    }

    /// Returns a line of the last [`LineReader::read_spans`], without its line break; `None` beyond [`MAX_LINE`].
    pub(super) fn line(&self, span: &LineSpan) -> Option<&[u8]> {
        let line = &self.buffer[span.clone().filter(|span| span.len() <= MAX_LINE)?];
        Some(line.strip_suffix(b"\r").unwrap_or(line))
    }

    fn next_span(&mut self) -> io::Result<Option<LineSpan>> {
        let mut looked_at = self.begin;
        loop {
            if let Some(found) = memchr(b'\n', &self.buffer[looked_at..self.end]) {
                let (begin, end) = (self.begin, looked_at + found);
                self.begin = end + 1;
                return Ok(Some(Some(begin..end)));
            }
            if self.end - self.begin > MAX_LINE {
                self.skip_line()?;
                return Ok(Some(None));
            }
            self.buffer.copy_within(self.begin..self.end, 0);
            self.end -= self.begin;
            self.begin = 0;
            looked_at = self.end;
            if self.fill()? == 0 {
                let end = std::mem::take(&mut self.end);
                return Ok((end > 0).then_some(Some(0..end)));
            }
        }
    }

    /// Drops the part of a line in the buffer and reads up to the line's end.
    fn skip_line(&mut self) -> io::Result<()> {
        loop {
            (self.begin, self.end) = (0, 0);
            if self.fill()? == 0 {
                return Ok(());
            }
            if let Some(found) = memchr(b'\n', &self.buffer[..self.end]) {
                self.begin = found + 1;
                return Ok(());
            }
        }
    }

    fn fill(&mut self) -> io::Result<usize> {
        loop {
            match self.source.read(&mut self.buffer[self.end..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => {
                    let more = read?;
                    self.end += more;
                    return Ok(more);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// A reader that gives a few bytes at a time.
    struct Trickle<'t>(&'t [u8], usize);

    impl Read for Trickle<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let count = self.1.min(self.0.len()).min(into.len());
            let (now, later) = self.0.split_at(count);
            into[..count].copy_from_slice(now);
            self.0 = later;
            Ok(count)
        }
    }

    /// Returns every line; `None` for one that is too long.
    fn lines(text: &[u8], at_a_time: usize) -> Vec<Option<Vec<u8>>> {
        let mut lines = LineReader::new(decompressed(Trickle(text, at_a_time)).unwrap());
        let mut all = Vec::new();
        let mut spans = Vec::new();
        loop {
            lines.read_spans(3, &mut spans).unwrap();
            assert!(spans.len() <= 3);
            if spans.is_empty() {
                return all;
            }
            all.extend(spans.iter().map(|span| lines.line(span).map(<[u8]>::to_vec)));
        }
    }

    #[test]
    fn lines_end_at_a_newline_or_eof() {
        for (text, expected) in
            [("", vec![]), ("\n", vec![""]), ("a", vec!["a"]), ("a\r\n\nbc\nd", vec!["a", "", "bc", "d"])]
        {
            for at_a_time in [1, 3, 100] {
                let read = lines(text.as_bytes(), at_a_time);
                assert_eq!(read, expected.iter().map(|line| Some(line.as_bytes().to_vec())).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn too_long_lines_are_skipped() {
        for length in [MAX_LINE, MAX_LINE + 1, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 5 * BUFFER_BYTES + 7] {
            let long = vec![b'x'; length];
            let text = [b"first\n", &*long, b"\nlast\n"].concat();
            let middle = (length <= MAX_LINE).then_some(long);
            for at_a_time in [1000, usize::MAX] {
                let read = lines(&text, at_a_time);
                assert_eq!(read, [Some(b"first".to_vec()), middle.clone(), Some(b"last".to_vec())], "{length}");
            }
        }
        assert_eq!(lines(&vec![b'x'; 3 * BUFFER_BYTES], 4096), [None]);
    }

    #[test]
    fn compression_is_detected_by_the_first_bytes() {
        let text: Vec<u8> = (0..50_000).flat_map(|number| format!("line {number}\n").into_bytes()).collect();
        let plain = lines(&text, usize::MAX);
        let (first, second) = text.split_at(text.len() / 2);
        let mut gzip = Vec::new();
        for part in [first, second] {
            let mut encoder = flate2::write::GzEncoder::new(&mut gzip, flate2::Compression::fast());
            encoder.write_all(part).unwrap();
            encoder.finish().unwrap();
        }
        let mut zstd = vec![0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
        for part in [first, second] {
            zstd.extend(zstd::encode_all(part, 1).unwrap());
        }
        for at_a_time in [1, 1000] {
            assert!(lines(&gzip, at_a_time) == plain, "{at_a_time}");
            if cfg!(feature = "zstd") {
                assert!(lines(&zstd, at_a_time) == plain, "{at_a_time}");
            }
        }
        assert_eq!(decompressed(&zstd[..]).is_ok(), cfg!(feature = "zstd"));
        let mut cut = LineReader::new(decompressed(&gzip[..gzip.len() - 9]).unwrap());
        let mut spans = Vec::new();
        let ended = loop {
            match cut.read_spans(100, &mut spans) {
                Ok(()) if !spans.is_empty() => {}
                other => break other,
            }
        };
        assert!(ended.is_err(), "a compressed log that breaks off is an error: {ended:?}");
    }
}
