//! The errors of the file store.

use std::io;
use std::path::PathBuf;

use super::store_file::FORMAT;

/// A reason why state can't be kept in a file. A file that can't be read is never replaced by an empty one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file can't be opened, read or written.
    #[error("the store {path:?} can't be used: {source}")]
    Io {
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file holds something else.
    #[error("{path:?} is no store of limits, and is left as it is: name another file, or move it away")]
    NotAStore {
        /// The file's path.
        path: PathBuf,
    },
    /// The file is broken.
    #[error("the store {path:?} is broken: bring an earlier copy back, or move it away to start anew ({what})")]
    Corrupt {
        /// The file's path.
        path: PathBuf,
        /// The defect that was found.
        what: String,
    },
    /// A later version has written the file.
    #[error("the store {path:?} is of format {found}, and this version reads {FORMAT}; it is left as it is")]
    NewerFormat {
        /// The file's path.
        path: PathBuf,
        /// Its format.
        found: u32,
    },
    /// Another process, or another store of this process, uses the file.
    #[error("the store {path:?} is in use")]
    InUse {
        /// The file's path.
        path: PathBuf,
    },
    /// Two limits have the same [tag](tidegate_core::Limits::tag), and would be kept as one.
    #[error("the store {path:?} keeps a limit of tag {tag:016x} already")]
    TagInUse {
        /// The file's path.
        path: PathBuf,
        /// The limit's tag.
        tag: u64,
    },
}
