//! Reading files that a policy names.

use std::fs::{self, File, Metadata};
use std::io::{self, Read as _};
use std::path::Path;

/// Reads a file of at most `max_bytes`. Never waits for a writer, as a pipe's reader does, and reads no device.
///
/// # Errors
/// It isn't a regular file, is too large ([`io::ErrorKind::FileTooLarge`]), or can't be read.
pub fn read_regular_file(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    check(&fs::metadata(path)?)?;
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        // A FIFO that has replaced the file since the check above isn't waited for.
        options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    }
    let file = options.open(path)?;
    check(&file.metadata()?)?;
    let mut body = Vec::new();
    file.take(max_bytes + 1).read_to_end(&mut body)?;
    if body.len() as u64 > max_bytes {
        let message = format!("it has more than {max_bytes} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(body)
}

fn check(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() { Ok(()) } else { Err(io::Error::other("it isn't a regular file")) }
}

#[cfg(all(test, unix))]
mod tests {
    use std::process::Command;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, mpsc};
    use std::thread;
    use std::time::Duration;

    use tidegate_testkit::servers::ScratchDir;

    use super::*;

    /// Nobody writes to the FIFO that takes the file's place at any moment.
    #[test]
    fn a_fifo_in_a_files_place_is_never_waited_for() {
        let scratch = ScratchDir::new();
        let at = |name: &str| scratch.path().join(name);
        fs::write(at("file"), "text").unwrap();
        assert!(Command::new("mkfifo").arg(at("fifo")).status().unwrap().success());
        assert!(read_regular_file(&at("fifo"), 9).is_err());
        let is_over = Arc::new(AtomicBool::new(false));
        let swapping = {
            let (is_over, [file, fifo, new, path]) = (is_over.clone(), ["file", "fifo", "new", "path"].map(at));
            thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    for source in [&file, &fifo] {
                        fs::hard_link(source, &new).unwrap();
                        fs::rename(&new, &path).unwrap();
                    }
                }
            })
        };
        let (done, reading) = mpsc::channel();
        let path = at("path");
        thread::spawn(move || {
            let read = (0..20_000).filter_map(|_| read_regular_file(&path, 9).ok()).collect::<Vec<_>>();
            done.send(read.iter().all(|text| text == b"text")).unwrap();
        });
        assert_eq!(reading.recv_timeout(Duration::from_secs(60)), Ok(true), "no read waits");
        is_over.store(true, Ordering::Relaxed);
        swapping.join().unwrap();
    }
}
