//! The standard input of each attempt.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsFd as _;
use std::process::Stdio;
use std::sync::Arc;

use rustix::fs::{FileType, fstat};

/// The maximum bytes of input that `--keep-stdin` keeps.
const MAX_BUFFERED_BYTES: u64 = 64 << 20;

/// The kind of standard input.
pub(super) enum StdinSource {
    /// A terminal or another device, which all attempts share.
    Device,
    /// A file, and its position at the start.
    File { file: File, start: u64 },
    /// A pipe, which can be read once.
    Pipe { is_used: bool },
    /// The content of a pipe.
    Buffered(Arc<[u8]>),
}

impl StdinSource {
    /// # Errors
    /// The input must be kept, and can't be read or is too long.
    pub(super) fn new(keep: bool) -> io::Result<Self> {
        let stdin = io::stdin();
        let Ok(stat) = fstat(stdin.as_fd()) else { return Ok(Self::Device) };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let mut file = File::from(stdin.as_fd().try_clone_to_owned()?);
                let start = file.stream_position()?;
                Ok(Self::File { file, start })
            }
            FileType::Fifo | FileType::Socket if keep => {
                let mut kept = Vec::new();
                stdin.lock().take(MAX_BUFFERED_BYTES + 1).read_to_end(&mut kept)?;
                if kept.len() as u64 > MAX_BUFFERED_BYTES {
                    return Err(io::Error::other("standard input is longer than the 64 MiB that --keep-stdin keeps"));
                }
                Ok(Self::Buffered(kept.into()))
            }
            FileType::Fifo | FileType::Socket => Ok(Self::Pipe { is_used: false }),
            _ => Ok(Self::Device),
        }
    }

    /// Returns true if an attempt had the input and the next can't.
    pub(super) fn is_used_up(&self) -> bool {
        matches!(self, Self::Pipe { is_used: true })
    }

    /// Returns the next attempt's input, and the bytes to write into it, if any.
    ///
    /// # Errors
    /// The file can't be repositioned to its start.
    pub(super) fn next_stdin(&mut self) -> io::Result<(Stdio, Option<Arc<[u8]>>)> {
        Ok(match self {
            Self::Device => (Stdio::inherit(), None),
            Self::File { file, start } => {
                // The command shares the file position with this process.
                file.seek(SeekFrom::Start(*start))?;
                (Stdio::inherit(), None)
            }
            Self::Pipe { is_used } => {
                let first = !std::mem::replace(is_used, true);
                (if first { Stdio::inherit() } else { Stdio::null() }, None)
            }
            Self::Buffered(bytes) => (Stdio::piped(), Some(Arc::clone(bytes))),
        })
    }
}
