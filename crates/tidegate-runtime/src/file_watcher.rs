//! Changes of files, seen in their metadata.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The metadata by which a changed file is told from the one before. Symbolic links are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    length: u64,
    modified: Option<SystemTime>,
    /// The device and the number of the file, which differ for a file that has replaced another.
    #[cfg(unix)]
    identity: (u64, u64),
}

impl FileStamp {
    /// Reads the stamp of a file; `None` if there is none, or it can't be read.
    pub fn read(path: &Path) -> Option<Self> {
        Some(Self::from(&fs::metadata(path).ok()?))
    }
}

impl From<&fs::Metadata> for FileStamp {
    fn from(metadata: &fs::Metadata) -> Self {
        #[cfg(unix)]
        use std::os::unix::fs::MetadataExt as _;
        Self {
            length: metadata.len(),
            modified: metadata.modified().ok(),
            #[cfg(unix)]
            identity: (metadata.dev(), metadata.ino()),
        }
    }
}

/// Tells when files change, each time it is asked. A change is told once the file has stayed the same between two
/// questions, so that it isn't read while it is being written.
#[derive(Debug)]
pub struct FileWatcher {
    files: Vec<WatchedFile>,
}

#[derive(Debug)]
struct WatchedFile {
    path: PathBuf,
    /// True if [`FileWatcher::follow`] has added it.
    is_followed: bool,
    /// The stamp that was told last.
    told: Option<FileStamp>,
    /// The stamp at the last question.
    seen: Option<FileStamp>,
}

/// A change of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileChange {
    /// The file is new or has another content.
    Changed(PathBuf),
    /// The file is gone.
    Gone(PathBuf),
}

impl FileWatcher {
    /// Watches these files from their present state on. Create it before the files are read: a change in between is then
    /// told. A path may have no file yet.
    pub fn new(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let watched = |path: PathBuf| {
            let stamp = FileStamp::read(&path);
            WatchedFile { path, is_followed: false, told: stamp, seen: stamp }
        };
        Self { files: paths.into_iter().map(watched).collect() }
    }

    /// Watches these files, too, instead of those of the call before. A file that is new here is watched from this stamp
    /// on, which was read before its content.
    pub fn follow(&mut self, files: impl IntoIterator<Item = (PathBuf, FileStamp)>) {
        let (followed, mut kept): (Vec<_>, Vec<_>) = self.files.drain(..).partition(|file| file.is_followed);
        let mut followed: HashMap<PathBuf, WatchedFile> =
            followed.into_iter().map(|file| (file.path.clone(), file)).collect();
        kept.extend(files.into_iter().map(|(path, stamp)| {
            let known = followed.remove(&path);
            known.unwrap_or(WatchedFile { path, is_followed: true, told: Some(stamp), seen: Some(stamp) })
        }));
        self.files = kept;
    }

    /// Looks at the files, and returns the changes that haven't been told. Ask at intervals that are longer than the
    /// pauses of a program that writes such a file: half a second is usual.
    pub fn changes(&mut self) -> Vec<FileChange> {
        self.files.iter_mut().filter_map(WatchedFile::change).collect()
    }
}

impl WatchedFile {
    fn change(&mut self) -> Option<FileChange> {
        let stamp = FileStamp::read(&self.path);
        let is_settled = stamp == self.seen;
        self.seen = stamp;
        if !is_settled || stamp == self.told {
            return None;
        }
        self.told = stamp;
        let path = self.path.clone();
        Some(if stamp.is_some() { FileChange::Changed(path) } else { FileChange::Gone(path) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("tidegate-watch-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn every_kind_of_change_is_told_once() {
        let folder = Folder::new("kinds");
        let at = |name: &str| folder.0.join(name);
        let file = at("file");
        let mut watcher = FileWatcher::new([file.clone(), at("other")]);
        let mut told = |change: &dyn Fn()| {
            change();
            let first = watcher.changes();
            assert!(first.is_empty(), "not yet settled: {first:?}");
            let second = watcher.changes();
            assert_eq!(watcher.changes(), []);
            second
        };
        let changed = || vec![FileChange::Changed(file.clone())];
        assert_eq!(told(&|| {}), []);
        assert_eq!(told(&|| fs::write(&file, "a").unwrap()), changed());
        assert_eq!(told(&|| fs::write(&file, "ab").unwrap()), changed());
        let replace = || {
            fs::write(at("new"), "xy").unwrap();
            let modified = fs::metadata(&file).unwrap().modified().unwrap();
            fs::File::options().write(true).open(at("new")).unwrap().set_modified(modified).unwrap();
            fs::rename(at("new"), &file).unwrap();
        };
        if cfg!(unix) {
            assert_eq!(told(&replace), changed(), "the same length and time");
        }
        assert_eq!(told(&|| fs::remove_file(&file).unwrap()), [FileChange::Gone(file.clone())]);
        assert_eq!(told(&|| fs::write(&file, "ab").unwrap()), changed());
    }

    #[test]
    fn a_file_under_change_is_not_told() {
        let folder = Folder::new("writing");
        let file = folder.0.join("file");
        let mut watcher = FileWatcher::new([file.clone()]);
        for length in 1..10 {
            fs::write(&file, "x".repeat(length)).unwrap();
            assert_eq!(watcher.changes(), []);
        }
        assert_eq!(watcher.changes(), [FileChange::Changed(file)]);
    }

    #[test]
    fn followed_files_are_watched_from_their_stamps() {
        let folder = Folder::new("follow");
        let (first, second) = (folder.0.join("first"), folder.0.join("second"));
        fs::write(&first, "1").unwrap();
        fs::write(&second, "2").unwrap();
        let stamp = |path: &Path| (path.to_owned(), FileStamp::read(path).unwrap());
        let (first_stamp, second_stamp) = (stamp(&first), stamp(&second));
        let mut watcher = FileWatcher::new([]);
        fs::write(&first, "changed").unwrap();
        let mut told = |files: &[&(PathBuf, FileStamp)]| {
            watcher.follow(files.iter().copied().cloned());
            watcher.changes();
            watcher.changes()
        };
        assert_eq!(told(&[&first_stamp]), [FileChange::Changed(first.clone())], "it changed since its stamp");
        assert_eq!(told(&[&first_stamp, &second_stamp]), [], "the change was told");
        fs::write(&first, "again").unwrap();
        assert_eq!(told(&[&second_stamp]), [], "the first is not followed any more");
    }
}
