//! The file itself: a redb database of two tables, one of what it is and one of states.
//!
//! A row's key is 128 bits: the limit's tag, then what the memory keeps of the key, 60 bits of a hash under the file's
//! own seed. Its value is when the state becomes idle, eight bytes, and the state as core encodes it. A file is
//! made beside its place and moved there when it is whole, so that there never is half of one.

use std::ffi::OsString;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use redb::backends::FileBackend;
use redb::{
    Builder, Database, Error, ReadableDatabase, ReadableTable, ReadableTableMetadata, StorageError, Table,
    TableDefinition, TableError,
};
use tidegate_core::Time;

use super::FileError;

/// The format that is written, and the latest that is read.
pub(super) const FORMAT: u32 = 1;

const ABOUT: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("tidegate");
const STATES: TableDefinition<'_, u128, &[u8]> = TableDefinition::new("states");
/// In the table of what the file is: its format, and the seed of its keys.
const FORMAT_KEY: &str = "format";
const SEED_KEY: &str = "seed";

/// What redb may keep of the file in memory, in bytes: the file is read at its opening, and then written.
const CACHE_BYTES: usize = 8 << 20;
/// A file below this isn't worth compacting.
const COMPACTED_BYTES: u64 = 4 << 20;
/// How many rows are looked over at once for those that are to go.
const SWEPT_AT_ONCE: usize = 1024;

/// How the database is opened, again after each failure.
type Open = Box<dyn Fn(&Path) -> Result<Database, Error> + Send>;

/// A file that is open, or was until something failed.
pub(super) struct Disk {
    path: PathBuf,
    open: Open,
    database: Option<Database>,
    /// From where on rows are looked over next.
    hand: u128,
}

impl Disk {
    /// Opens the file, and makes it if it isn't there.
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        make(path)?;
        let mut disk = Self::with(path, Box::new(|path| Ok(builder().open(path)?)));
        disk.compact()?;
        Ok(disk)
    }

    pub(super) fn with(path: &Path, open: Open) -> Self {
        Self { path: path.to_owned(), open, database: None, hand: 0 }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The database, opened anew if the last use of it failed.
    fn database(&mut self) -> Result<&mut Database, FileError> {
        let database = match self.database.take() {
            Some(database) => database,
            None => {
                let database = caught(&self.path, || (self.open)(&self.path))?;
                self.check(&database)?;
                database
            }
        };
        Ok(self.database.insert(database))
    }

    /// Uses the database. One that failed is closed: what it holds in memory isn't to be trusted.
    fn using<T>(&mut self, job: impl FnOnce(&mut Database) -> Result<T, Error>) -> Result<T, FileError> {
        let path = self.path.clone();
        let database = self.database()?;
        let result = caught(&path, || job(database));
        if result.is_err() {
            // Closing it may fail in the same way.
            let database = self.database.take();
            let _ = catch_unwind(AssertUnwindSafe(|| drop(database)));
        }
        result
    }

    fn check(&self, database: &Database) -> Result<(), FileError> {
        let found = caught(&self.path, || {
            let read = database.begin_read()?;
            let about = match read.open_table(ABOUT) {
                Err(TableError::TableDoesNotExist(_)) => return Ok(None),
                about => about?,
            };
            let format = about.get(FORMAT_KEY)?;
            Ok(format.and_then(|format| Some(u32::from_le_bytes(format.value().try_into().ok()?))))
        })?;
        match found {
            Some(FORMAT) => Ok(()),
            Some(found) if found > FORMAT => Err(FileError::Newer { path: self.path.clone(), found }),
            _ => Err(FileError::Foreign { path: self.path.clone() }),
        }
    }

    /// Gives back what is empty of a file that mostly is.
    fn compact(&mut self) -> Result<(), FileError> {
        let bytes = std::fs::metadata(&self.path).map_or(0, |about| about.len());
        self.using(|database| {
            if bytes < COMPACTED_BYTES {
                return Ok(());
            }
            let stored = {
                let states = database.begin_read()?.open_table(STATES)?;
                let stats = states.stats()?;
                stats.stored_bytes() + stats.metadata_bytes()
            };
            if stored < bytes / 4 {
                database.compact()?;
            }
            Ok(())
        })
    }

    /// The seed of the file's keys: what it has, or else this, which it then has for good.
    pub(super) fn seed(&mut self, proposal: [u8; 16]) -> Result<[u8; 16], FileError> {
        self.using(|database| {
            let write = database.begin_write()?;
            let seed = {
                let mut about = write.open_table(ABOUT)?;
                let kept = about.get(SEED_KEY)?.and_then(|seed| seed.value().try_into().ok());
                if kept.is_none() {
                    about.insert(SEED_KEY, proposal.as_slice())?;
                }
                kept
            };
            match seed {
                Some(_) => write.abort()?,
                None => write.commit()?,
            }
            Ok(seed.unwrap_or(proposal))
        })
    }

    /// Shows every state that is kept of a limit, by what is kept of its key.
    pub(super) fn read(&mut self, tag: u64, mut show: impl FnMut(u64, &[u8])) -> Result<(), FileError> {
        self.using(|database| {
            let states = database.begin_read()?.open_table(STATES)?;
            for row in states.range(row(tag, 0)..=row(tag, u64::MAX))? {
                let (key, value) = row?;
                if let Some(state) = value.value().get(8..) {
                    show(parts(key.value()).1, state);
                }
            }
            Ok(())
        })
    }

    /// How many states there are.
    pub(super) fn len(&mut self) -> Result<u64, FileError> {
        self.using(|database| Ok(database.begin_read()?.open_table(STATES)?.len()?))
    }

    /// Has `change` change rows, and makes what it did outlive the machine.
    pub(super) fn write(
        &mut self,
        change: impl FnOnce(&mut Rows<'_>) -> Result<(), StorageError>,
    ) -> Result<Written, FileError> {
        let mut hand = self.hand;
        let result = self.using(|database| {
            let write = database.begin_write()?;
            let written = {
                let mut rows = Rows { states: write.open_table(STATES)?, hand: &mut hand, changed: 0 };
                change(&mut rows)?;
                Written { any: rows.changed > 0, rows: rows.states.len()? }
            };
            if written.any {
                write.commit()?
            } else {
                write.abort()?
            }
            Ok(written)
        });
        self.hand = hand;
        result
    }
}

/// What came of a writing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    /// Whether there was anything to write.
    pub any: bool,
    /// How many rows there are.
    pub rows: u64,
}

/// The rows of the file, while some are changed.
pub(super) struct Rows<'a> {
    states: Table<'a, u128, &'static [u8]>,
    hand: &'a mut u128,
    changed: usize,
}

impl Rows<'_> {
    pub(super) fn put(&mut self, key: u128, value: &[u8]) -> Result<(), StorageError> {
        self.changed += 1;
        self.states.insert(key, value).map(drop)
    }

    pub(super) fn remove(&mut self, key: u128) -> Result<(), StorageError> {
        if self.states.remove(key)?.is_some() {
            self.changed += 1;
        }
        Ok(())
    }

    /// How many rows were changed so far.
    pub(super) fn changed(&self) -> usize {
        self.changed
    }

    /// Looks over the next `rows`, once round at the most, and removes those that are not to be kept.
    pub(super) fn sweep(
        &mut self,
        rows: usize,
        mut keep: impl FnMut(u64, u64, Time) -> bool,
    ) -> Result<(), StorageError> {
        let mut left = rows.min(usize::try_from(self.states.len()?).unwrap_or(usize::MAX));
        let mut gone = Vec::with_capacity(left.min(SWEPT_AT_ONCE));
        while left > 0 {
            let (mut seen, wanted) = (0, left.min(SWEPT_AT_ONCE));
            for row in self.states.range(*self.hand..)?.take(wanted) {
                let (key, value) = row?;
                let (tag, of_key) = parts(key.value());
                if !keep(tag, of_key, idle_at(value.value())) {
                    gone.push(key.value());
                }
                *self.hand = key.value().saturating_add(1);
                seen += 1;
            }
            if seen < wanted {
                *self.hand = 0;
            }
            for key in gone.drain(..) {
                self.remove(key)?;
            }
            left -= wanted;
        }
        Ok(())
    }
}

/// The key of a row.
pub(super) fn row(tag: u64, of_key: u64) -> u128 {
    u128::from(tag) << 64 | u128::from(of_key)
}

fn parts(row: u128) -> (u64, u64) {
    ((row >> 64) as u64, row as u64)
}

/// Begins a row's value.
pub(super) fn begin_value(idle_at: Time, value: &mut Vec<u8>) {
    value.extend(idle_at.as_micros().to_le_bytes());
}

fn idle_at(value: &[u8]) -> Time {
    value.first_chunk().map_or(Time::ZERO, |micros| Time::from_micros(u64::from_le_bytes(*micros)))
}

pub(super) fn builder() -> Builder {
    let mut builder = Database::builder();
    // A file that was tampered with, or torn by a machine that lied about having written it, is found out here.
    builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true);
    builder
}

/// Makes an empty store, if there is nothing.
fn make(path: &Path) -> Result<(), FileError> {
    let unusable = |source| FileError::Unusable { path: path.to_owned(), source };
    let is_there = || match std::fs::metadata(path) {
        Ok(about) => Ok(about.len() > 0),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(unusable(error)),
    };
    if is_there()? {
        return Ok(());
    }
    let new = beside(path, ".new");
    let file = options().open(&new).map_err(unusable)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(FileError::InUse { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => return Err(unusable(source)),
    }
    // Whoever made it meanwhile has moved what was locked just now.
    if is_there()? {
        return Ok(());
    }
    file.set_len(0).map_err(unusable)?;
    caught(path, || {
        let database = builder().create_with_backend(FileBackend::new(file)?)?;
        let write = database.begin_write()?;
        write.open_table(ABOUT)?.insert(FORMAT_KEY, FORMAT.to_le_bytes().as_slice())?;
        write.open_table(STATES)?;
        write.commit()?;
        std::fs::rename(&new, path).map_err(StorageError::Io)?;
        // The name is kept by the folder, and survives a power cut only when that is written too.
        #[cfg(unix)]
        File::open(path.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new(".")))
            .and_then(|folder| folder.sync_all())
            .map_err(StorageError::Io)?;
        Ok(())
    })
}

/// How a new file is opened: by its owner alone, since its seed is a secret.
fn options() -> OpenOptions {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}

/// Runs `job` on the file at `path`. redb panics at some of what a broken file may hold.
fn caught<T>(path: &Path, job: impl FnOnce() -> Result<T, Error>) -> Result<T, FileError> {
    let path = || path.to_owned();
    let broken = |what: String| FileError::Broken { path: path(), what };
    match catch_unwind(AssertUnwindSafe(job)) {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(match error {
            Error::DatabaseAlreadyOpen | Error::LockProtocolMismatch => FileError::InUse { path: path() },
            // What redb says of a file that doesn't begin as its own do.
            Error::Io(source) if source.kind() == io::ErrorKind::InvalidData => FileError::Foreign { path: path() },
            Error::Io(source) if source.kind() == io::ErrorKind::UnexpectedEof => broken(source.to_string()),
            Error::Io(source) => FileError::Unusable { path: path(), source },
            Error::PreviousIo => {
                FileError::Unusable { path: path(), source: io::Error::other("an earlier use failed") }
            }
            error => broken(error.to_string()),
        }),
        Err(_) => Err(broken("it can't be read to its end".to_owned())),
    }
}
