//! The frames in the bytes of an HTTP/2 connection, and the joining of small pieces of data.

/// The most bytes of data that are joined, or of a response that are queued at a time, so that each time is progress: the size
/// of a frame.
pub(crate) const MAX_PIECE: usize = 16 << 10;
/// The data of frames with fewer bytes is joined: those that the library counts.
const MAX_JOINED_FRAME: usize = 256;

/// The bytes with which a client begins (RFC 9113 §3.4).
pub(crate) const PREFACE_BYTES: usize = 24;
pub(super) const FRAME_HEAD_BYTES: usize = 9;

pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const END_STREAM: u8 = 1;
pub(super) const PADDED: u8 = 8;

/// The content of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameContent {
    /// The head of a request or a reply, or trailers.
    Head {
        is_last: bool,
    },
    Data,
    /// Neither.
    Control,
}

/// Finds the frames in the bytes of a client or a server, by their heads.
#[derive(Debug)]
pub(crate) struct FrameParser {
    /// The bytes before the next frame.
    skipped: usize,
    /// The beginning of a frame: its head, and the length of its padding.
    head: [u8; FRAME_HEAD_BYTES + 1],
    count: usize,
}

impl FrameParser {
    /// A parser of the frames behind a preface with this number of bytes.
    pub(crate) fn new(preface: usize) -> Self {
        Self { skipped: preface, head: [0; FRAME_HEAD_BYTES + 1], count: 0 }
    }

    /// Processes the next bytes, and returns the content of a frame whose beginning is whole, and the bytes behind it.
    pub(crate) fn next<'b>(&mut self, mut bytes: &'b [u8]) -> Option<(FrameContent, &'b [u8])> {
        while !bytes.is_empty() {
            if self.skipped > 0 {
                let step = self.skipped.min(bytes.len());
                self.skipped -= step;
                bytes = &bytes[step..];
                continue;
            }
            let step = (self.needed() - self.count).min(bytes.len());
            self.head[self.count..self.count + step].copy_from_slice(&bytes[..step]);
            self.count += step;
            bytes = &bytes[step..];
            if self.count == self.needed() {
                self.skipped = FRAME_HEAD_BYTES + self.payload_length() - self.count;
                let content = self.content();
                self.count = 0;
                return Some((content, bytes));
            }
        }
        None
    }

    /// Joins the data of small frames with that of the frame before, as far as both are whole in these bytes, so that none waits
    /// for the rest of another. Passes the content of each frame to `seen`. Returns the number of bytes that are left.
    pub(crate) fn join_data(&mut self, bytes: &mut [u8], mut seen: impl FnMut(FrameContent)) -> usize {
        let (mut read, mut written) = (0, 0);
        // The place of the frame before, and the length of its data.
        let mut joined: Option<(usize, usize)> = None;
        while let Some((content, rest)) = self.next(&bytes[read..]) {
            seen(content);
            let end = bytes.len() - rest.len();
            let (length, is_plain) = (self.payload_length(), self.head[3..5] == [DATA, 0]);
            let before = joined.filter(|(at, total)| {
                let is_same_stream = bytes[at + 5..at + FRAME_HEAD_BYTES] == self.head[5..FRAME_HEAD_BYTES];
                let fits = length < MAX_JOINED_FRAME.min(rest.len() + 1) && total + length <= MAX_PIECE;
                is_plain && is_same_stream && fits
            });
            let kept = read..if before.is_some() { end - FRAME_HEAD_BYTES } else { end };
            let has_head = end - read >= FRAME_HEAD_BYTES;
            written += kept.len();
            bytes.copy_within(kept.clone(), written - kept.len());
            joined = match before {
                Some((at, total)) => {
                    let total = total + length;
                    bytes[at..at + 3].copy_from_slice(&[0, (total >> 8) as u8, total as u8]);
                    Some((at, total))
                }
                None => (is_plain && has_head).then(|| (written - FRAME_HEAD_BYTES, length)),
            };
            read = end;
        }
        bytes.copy_within(read.., written);
        written + bytes.len() - read
    }

    /// The number of bytes that tell a frame's content, as far as it is known.
    fn needed(&self) -> usize {
        let is_padded = self.head[3] == DATA && self.head[4] & PADDED != 0 && self.payload_length() > 0;
        FRAME_HEAD_BYTES + usize::from(self.count >= FRAME_HEAD_BYTES && is_padded)
    }

    fn payload_length(&self) -> usize {
        let [high, middle, low, ..] = self.head;
        usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low)
    }

    fn content(&self) -> FrameContent {
        let padding = if self.count > FRAME_HEAD_BYTES { 1 + usize::from(self.head[FRAME_HEAD_BYTES]) } else { 0 };
        match self.head[3] {
            DATA if self.payload_length() > padding => FrameContent::Data,
            HEADERS => FrameContent::Head { is_last: self.head[4] & END_STREAM != 0 },
            _ => FrameContent::Control,
        }
    }
}
