//! Reading files that a policy names.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

/// Reads a file of at most `max_bytes`. Never waits for a writer, as a pipe's reader does.
///
/// # Errors
/// It isn't a regular file, is too large ([`io::ErrorKind::FileTooLarge`]), or can't be read.
pub fn read_regular_file(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it isn't a regular file"));
    }
    let mut body = Vec::new();
    File::open(path)?.take(max_bytes + 1).read_to_end(&mut body)?;
    if body.len() as u64 > max_bytes {
        let message = format!("it has more than {max_bytes} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(body)
}
