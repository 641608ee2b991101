//! Opens and replaces files that a user names, so that no other file is damaged.
//!
//! Only a regular file or a free name is accepted. A device, a FIFO, a socket or a directory is an error that names
//! what was found. A symbolic link at the name itself is followed, since the user put it there ([`resolve`]). At any
//! other name a link is an error. Temporary files have random names beside the file that they replace. Every new file
//! is private to its owner (mode 0600).

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, FileType, Metadata, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use tempfile::Builder;

/// The most symbolic links that are followed from one name, as on Linux.
const MAX_LINKS: usize = 40;
/// The number of random characters in a temporary name.
const RANDOM_CHARS: usize = 12;
/// The end of a temporary name.
const TEMP_SUFFIX: &str = ".new";
/// The retries of a lock that is held, and the wait before each.
const LOCK_RETRIES: u32 = 20;
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The path of the regular file that `path` leads to, or the path where one can be created.
///
/// # Errors
/// It isn't a regular file, links form a cycle, or the path can't be read.
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_symlink() => path = parent_folder(&path).join(fs::read_link(&path)?),
            found => return check_regular_or_missing(found).map(|()| path),
        }
    }
    Err(io::Error::other(format!("it leads through more than {MAX_LINKS} symbolic links")))
}

/// Opens the regular file at a resolved path, and doesn't follow a link. A new file is private to its owner.
///
/// # Errors
/// It isn't a regular file, or it can't be opened.
pub fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    check_regular_or_missing(fs::symlink_metadata(path))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;

        use rustix::fs::OFlags;
        // A link or a FIFO that has replaced the file since the check above is neither followed nor waited for.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        options.mode(0o600).custom_flags(flags.bits().cast_signed());
    }
    let file = options.open(path)?;
    check_regular(file.metadata()?.file_type())?;
    Ok(file)
}

/// Opens the file at a resolved path, or creates an empty one, and locks it for as long as the result lives.
///
/// # Errors
/// Another process has locked it, it isn't a regular file, or it can't be opened.
pub fn lock(path: &Path) -> Result<File, TryLockError> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    let file = open(path, &mut options).map_err(TryLockError::Error)?;
    retry_while_locked(|| file.try_lock(), |error| matches!(error, TryLockError::WouldBlock))?;
    Ok(file)
}

/// Locks the folder of a path for as long as the result lives.
///
/// # Errors
/// Another process has locked it, or it can't be read.
#[cfg(unix)]
pub fn lock_folder(path: &Path) -> Result<File, TryLockError> {
    let folder = File::open(parent_folder(path)).map_err(TryLockError::Error)?;
    retry_while_locked(|| folder.try_lock(), |error| matches!(error, TryLockError::WouldBlock))?;
    Ok(folder)
}

/// Repeats an attempt for a moment while another process holds a lock: a child process has a copy of all locks of its
/// parent until it executes its own program.
pub(crate) fn retry_while_locked<T, E>(
    mut attempt: impl FnMut() -> Result<T, E>,
    is_locked: impl Fn(&E) -> bool,
) -> Result<T, E> {
    for _ in 0..LOCK_RETRIES {
        match attempt() {
            Err(error) if is_locked(&error) => thread::sleep(LOCK_RETRY_INTERVAL),
            result => return result,
        }
    }
    attempt()
}

/// Replaces the file at a resolved path by what `write` writes. Readers find all of the old contents or all of the new
/// ones, also after the machine fails. The caller ensures that no other process replaces the same file meanwhile.
///
/// # Errors
/// It can't be written. The old file is still there.
pub fn replace<E: From<io::Error>>(path: &Path, write: impl FnOnce(&File) -> Result<(), E>) -> Result<(), E> {
    let new = Builder::new()
        .prefix(&temp_prefix(path))
        .rand_bytes(RANDOM_CHARS)
        .suffix(TEMP_SUFFIX)
        .tempfile_in(parent_folder(path))?;
    write(new.as_file())?;
    new.as_file().sync_all()?;
    check_regular_or_missing(fs::symlink_metadata(path))?;
    new.persist(path).map_err(|error| error.error)?;
    // The folder holds the name, so the name survives a power cut only when the folder is written too.
    #[cfg(unix)]
    File::open(parent_folder(path))?.sync_all()?;
    Ok(())
}

/// Removes the files that a process killed in [`replace`] has left, if possible. No process may replace the file now.
pub fn remove_unfinished(path: &Path) {
    let prefix = temp_prefix(path);
    let is_unfinished = |name: &OsStr| {
        let random = name.as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes());
        let random = random.and_then(|name| name.strip_suffix(TEMP_SUFFIX.as_bytes()));
        random.is_some_and(|random| random.len() == RANDOM_CHARS && random.iter().all(u8::is_ascii_alphanumeric))
    };
    let Ok(entries) = fs::read_dir(parent_folder(path)) else { return };
    for entry in entries.flatten().filter(|entry| is_unfinished(&entry.file_name())) {
        // A file that can't be removed does no harm.
        let _ = fs::remove_file(entry.path());
    }
}

/// Removes other users' access to a file that holds a secret.
///
/// # Errors
/// The file belongs to another user, or can't be opened.
pub fn make_private(path: &Path) -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;

        // Changes the open file, since the name may lead elsewhere by now.
        let file = open(path, File::options().read(true))?;
        let mode = file.metadata()?.permissions().mode();
        if mode & 0o077 != 0 {
            file.set_permissions(fs::Permissions::from_mode(mode & 0o700))?;
        }
    }
    Ok(())
}

/// A name beside a resolved path.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}

fn parent_folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn temp_prefix(path: &Path) -> OsString {
    let mut prefix = path.file_name().unwrap_or_default().to_owned();
    prefix.push(".");
    prefix
}

fn check_regular_or_missing(found: io::Result<Metadata>) -> io::Result<()> {
    match found {
        Ok(metadata) => check_regular(metadata.file_type()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn check_regular(found: FileType) -> io::Result<()> {
    if found.is_file() {
        return Ok(());
    }
    let found = describe_file_type(found);
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("there is {found}, and only a regular file is taken")))
}

fn describe_file_type(found: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt as _;

        if found.is_char_device() || found.is_block_device() {
            return "a device";
        } else if found.is_fifo() {
            return "a FIFO";
        } else if found.is_socket() {
            return "a socket";
        }
    }
    if found.is_dir() {
        "a directory"
    } else if found.is_symlink() {
        "a symbolic link"
    } else {
        "something else"
    }
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
    use std::os::unix::net::UnixListener;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    fn write(path: &Path, text: &str) -> io::Result<()> {
        replace(path, |mut file| file.write_all(text.as_bytes()))
    }

    fn names(folder: &Path) -> Vec<OsString> {
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    #[test]
    fn only_regular_or_missing_files_are_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("directory")).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(at("fifo")).status().unwrap().success());
        symlink("/dev/null", at("link")).unwrap();
        let found = [("directory", "a directory"), ("socket", "a socket"), ("fifo", "a FIFO"), ("link", "a device")];
        for (name, what) in found {
            let said = resolve(&at(name)).unwrap_err().to_string();
            assert!(said.contains(what), "{said}");
            let said = open(&at(name), File::options().read(true)).unwrap_err().to_string();
            let what = if name == "link" { "a symbolic link" } else { what };
            assert!(said.contains(what), "{said}");
        }
        assert!(resolve(Path::new("/dev/null")).unwrap_err().to_string().contains("a device"));
        fs::write(at("file"), "").unwrap();
        for name in ["file", "nothing"] {
            assert_eq!(resolve(&at(name)).unwrap(), at(name));
        }
    }

    #[test]
    fn links_are_resolved_to_existing_or_missing_targets() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("far")).unwrap();
        symlink("middle", at("link")).unwrap();
        symlink("far/file", at("middle")).unwrap();
        assert_eq!(resolve(&at("link")).unwrap(), at("far/file"));
        write(&resolve(&at("link")).unwrap(), "text").unwrap();
        assert_eq!(resolve(&at("link")).unwrap(), at("far/file"));
        assert_eq!(fs::read_to_string(at("link")).unwrap(), "text");
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
        symlink("two", at("one")).unwrap();
        symlink("one", at("two")).unwrap();
        assert!(resolve(&at("one")).unwrap_err().to_string().contains("links"));
    }

    #[test]
    fn written_files_are_private_to_their_owner() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "old").unwrap();
        fs::set_permissions(at("file"), fs::Permissions::from_mode(0o664)).unwrap();
        let before = fs::metadata(at("file")).unwrap().ino();
        write(&at("file"), "new").unwrap();
        assert_ne!(fs::metadata(at("file")).unwrap().ino(), before, "it is replaced and not overwritten");
        let _lock = lock(&at("lock")).unwrap();
        assert_eq!((mode(&at("file")), mode(&at("lock"))), (0o600, 0o600));
        fs::set_permissions(at("file"), fs::Permissions::from_mode(0o755)).unwrap();
        make_private(&at("file")).unwrap();
        assert_eq!(mode(&at("file")), 0o700);
    }

    #[test]
    fn a_link_beside_the_file_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("precious"), "precious").unwrap();
        for name in ["file.new", "file.lock"] {
            symlink("precious", at(name)).unwrap();
        }
        write(&at("file"), "text").unwrap();
        assert!(matches!(lock(&at("file.lock")), Err(TryLockError::Error(_))));
        assert_eq!(fs::read_to_string(at("precious")).unwrap(), "precious");
        let locked = lock(&at("other.lock")).unwrap();
        assert!(matches!(lock(&at("other.lock")), Err(TryLockError::WouldBlock)));
        drop(locked);
        lock(&at("other.lock")).unwrap();
    }

    #[test]
    fn a_failed_replacement_keeps_only_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write(&path, "old").unwrap();
        let failed = replace(&path, |mut file| {
            file.write_all(b"half")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        });
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(folder.path()), ["file"]);
    }

    #[test]
    fn only_unfinished_replacement_files_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let others = ["file", "file.0123456789a.new", "file.0123456789-b.new", "file.new", "other.0123456789ab.new"];
        for name in others.iter().chain(&["file.0123456789ab.new"]) {
            fs::write(folder.path().join(name), "").unwrap();
        }
        remove_unfinished(&folder.path().join("file"));
        let mut others = others.map(OsString::from);
        others.sort();
        assert_eq!(names(folder.path()), others);
    }
}
