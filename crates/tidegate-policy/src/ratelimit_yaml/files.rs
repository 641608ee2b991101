//! The files of a configuration.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The most files of one configuration.
const MAX_FILES: usize = 1000;
/// The largest configuration in bytes, over all files.
const MAX_BYTES: u64 = 16 << 20;

/// A file that can't be read.
#[derive(Debug, thiserror::Error)]
#[error("can't read {}: {error}", .path.display())]
pub struct UnreadableFileError {
    /// Its path.
    pub path: PathBuf,
    /// The reason.
    #[source]
    pub error: io::Error,
}

/// Lists the files at these paths; of a directory, those directly in it that end with `.yaml` or `.yml` and don't begin
/// with a dot, in the order of their names.
///
/// # Errors
/// A directory can't be read or has no such file, or there are more than 1,000 files.
pub fn list_files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, UnreadableFileError> {
    let mut files = Vec::new();
    for path in paths {
        let unreadable = |error| UnreadableFileError { path: path.clone(), error };
        files.extend(files_at(path).map_err(unreadable)?);
        if files.len() > MAX_FILES {
            return Err(unreadable(io::Error::other(format!("there are more than {MAX_FILES} files"))));
        }
    }
    Ok(files)
}

/// Reads these files. `read` reads one file, of at most so many bytes; see [`read_regular_file`](crate::read_regular_file).
///
/// # Errors
/// A file can't be read, or all together are larger than 16 MiB.
pub fn read_files(
    files: Vec<PathBuf>,
    mut read: impl FnMut(&Path, u64) -> io::Result<Vec<u8>>,
) -> Result<Vec<(PathBuf, Vec<u8>)>, UnreadableFileError> {
    let mut left = MAX_BYTES;
    let with_body = |path: PathBuf| match read(&path, left) {
        Ok(body) => {
            left = left.saturating_sub(body.len() as u64);
            Ok((path, body))
        }
        Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            let error = io::Error::other(format!("all files together are larger than {} MiB", MAX_BYTES >> 20));
            Err(UnreadableFileError { path, error })
        }
        Err(error) => Err(UnreadableFileError { path, error }),
    };
    files.into_iter().map(with_body).collect()
}

/// The file itself, or the YAML files of a directory.
fn files_at(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path)? {
        let file = entry?.path();
        let is_yaml = file.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
        let is_hidden = file.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if is_yaml && !is_hidden && file.is_file() {
            files.push(file);
        }
        if files.len() > MAX_FILES {
            break;
        }
    }
    if files.is_empty() {
        return Err(io::Error::other("no file in it ends with .yaml or .yml"));
    }
    files.sort();
    Ok(files)
}
