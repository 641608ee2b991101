//! The file of a snapshot: read whole, replaced whole, and locked meanwhile.

use std::fs::{File, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tidegate_core::Time;
use tidegate_store::files;

use super::record::{LearntLimit, SnapshotRecord, micros};

/// The largest snapshot in bytes: enough for some hundred thousand quotas and cool-downs.
const MAX_BYTES: u64 = 64 << 20;
/// The version that is written, and the only one that can be read.
const VERSION: u32 = 1;

/// The reason why state can't be stored in a file. It never contains the file's contents, and they are never lost.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The file can't be read, isn't a regular file, or is larger than 64 MiB.
    #[error("the snapshot {path:?} can't be read: {source}")]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The file can't be written. The previous file is still there.
    #[error("the snapshot {path:?} can't be written: {source}")]
    Unwritable {
        /// The path of the file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The file isn't a snapshot.
    #[error("{path:?} is no snapshot of outbound state, and is left as it is: name another file, or move it away")]
    Foreign {
        /// The path of the file.
        path: PathBuf,
    },
    /// The file is damaged.
    #[error(
        "the snapshot {path:?} is broken in line {line}, column {column}, and is left as it is: mend it, or move it away \
         to start with unspent quotas"
    )]
    Broken {
        /// The path of the file.
        path: PathBuf,
        /// The line of the error, counted from 1.
        line: usize,
        /// The column of the error, counted from 1.
        column: usize,
    },
    /// A later version has written the file.
    #[error("the snapshot {path:?} is of format {found}, and this version reads {VERSION}; it is left as it is")]
    Newer {
        /// The path of the file.
        path: PathBuf,
        /// The format of the file.
        found: u32,
    },
    /// Another process, or another gate of this one, uses the file.
    #[error("the snapshot {path:?} is in use by another gate")]
    InUse {
        /// The path of the file.
        path: PathBuf,
    },
}

/// The contents of a snapshot.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SnapshotDocument {
    tidegate_outbound: u32,
    #[serde(with = "micros")]
    pub saved_at: Time,
    pub records: Vec<SnapshotRecord>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub learnt: Vec<LearntLimit>,
}

impl SnapshotDocument {
    pub(super) fn new(saved_at: Time, records: Vec<SnapshotRecord>, learnt: Vec<LearntLimit>) -> Self {
        Self { tidegate_outbound: VERSION, saved_at, records, learnt }
    }
}

/// The mark that distinguishes a snapshot from other files, and its version.
#[derive(Deserialize)]
struct FormatMarker {
    tidegate_outbound: Option<u32>,
}

/// The path of a snapshot. While this value lives, no other can open the same path.
pub(super) struct SnapshotFile {
    path: PathBuf,
    /// A lock on a separate file, because each write replaces the snapshot.
    _lock: File,
}

impl SnapshotFile {
    /// Locks a path, and reads the file.
    pub(super) fn open(path: &Path) -> Result<(Self, Option<SnapshotDocument>), SnapshotError> {
        let unreadable = |source| SnapshotError::Unreadable { path: path.to_owned(), source };
        let unwritable = |source| SnapshotError::Unwritable { path: path.to_owned(), source };
        let path = &files::resolve(path).map_err(unreadable)?;
        let lock = match files::lock(&files::with_suffix(path, ".lock")) {
            Ok(lock) => lock,
            Err(TryLockError::WouldBlock) => return Err(SnapshotError::InUse { path: path.to_owned() }),
            Err(TryLockError::Error(source)) => return Err(unwritable(source)),
        };
        files::remove_unfinished(path);
        let document = match read(path) {
            Ok(bytes) => Some(parse(path, &bytes)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => return Err(unreadable(source)),
        };
        Ok((Self { path: path.to_owned(), _lock: lock }, document))
    }

    /// Replaces the file. A reader, or the next start after a crash, finds all of the old file or all of the new one.
    pub(super) fn write(&self, document: &SnapshotDocument) -> Result<(), SnapshotError> {
        self.replace(document).map_err(|source| SnapshotError::Unwritable { path: self.path.clone(), source })
    }

    fn replace(&self, document: &SnapshotDocument) -> io::Result<()> {
        let mut bytes = serde_json::to_vec_pretty(document)?;
        bytes.push(b'\n');
        if bytes.len() as u64 > MAX_BYTES {
            return Err(too_large());
        }
        files::replace(&self.path, |mut file| file.write_all(&bytes))
    }
}

fn too_large() -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, format!("a snapshot has at most {MAX_BYTES} bytes"))
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    files::open(path, File::options().read(true))?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES { Err(too_large()) } else { Ok(bytes) }
}

fn parse(path: &Path, bytes: &[u8]) -> Result<SnapshotDocument, SnapshotError> {
    let path = path.to_owned();
    match serde_json::from_slice(bytes).map(|FormatMarker { tidegate_outbound }| tidegate_outbound) {
        Ok(Some(VERSION)) => serde_json::from_slice(bytes).map_err(|error| broken(path, &error)),
        Ok(Some(found)) if found > VERSION => Err(SnapshotError::Newer { path, found }),
        Err(error) if !error.is_data() => Err(broken(path, &error)),
        Ok(_) | Err(_) => Err(SnapshotError::Foreign { path }),
    }
}

/// Only the position of serde's error is reported: its message repeats contents of the file, which may be anything.
fn broken(path: PathBuf, error: &serde_json::Error) -> SnapshotError {
    SnapshotError::Broken { path, line: error.line(), column: error.column() }
}
