//! What may be wrong with a file.

use std::io;
use std::path::PathBuf;

use super::store_file::FORMAT;

/// Why state can't be kept in a file. Nothing is ever started anew in place of what can't be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file can't be opened, read or written.
    #[error("the store {path:?} can't be used: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file holds something else.
    #[error("{path:?} is no store of limits, and is left as it is: name another file, or move it away")]
    NotAStore {
        /// Which.
        path: PathBuf,
    },
    /// The file is broken.
    #[error("the store {path:?} is broken: bring an earlier copy back, or move it away to start anew ({what})")]
    Corrupt {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A later version has written the file.
    #[error("the store {path:?} is of format {found}, and this version reads {FORMAT}; it is left as it is")]
    NewerFormat {
        /// Which.
        path: PathBuf,
        /// Its format.
        found: u32,
    },
    /// Another process, or this one elsewhere, keeps its state there.
    #[error("the store {path:?} is in use")]
    InUse {
        /// Which.
        path: PathBuf,
    },
    /// Two limits of the same [tag](tidegate_core::Limits::tag) would be kept as one.
    #[error("the store {path:?} keeps a limit of tag {tag:016x} already")]
    TagInUse {
        /// Which.
        path: PathBuf,
        /// The limit's tag.
        tag: u64,
    },
}
