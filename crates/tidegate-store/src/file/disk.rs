//! The file itself: a redb database of two tables, one of what it is and one of states.
//!
//! A row's key is 128 bits: the limit's tag, then what the memory keeps of the key, 60 bits of a hash under the file's
//! own seed; the bit above them marks what is set aside of the key. Its value is when the state becomes idle, eight bytes,
//! and the state as core encodes it. A file is made beside its place and moved there when it is whole, so that there
//! never is half of one.

use std::fs::{File, TryLockError};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use redb::backends::FileBackend;
use redb::{
    AccessGuard, Builder, Database, Error, ReadableDatabase, ReadableTable, ReadableTableMetadata, StorageError, Table,
    TableDefinition, TableError,
};
use tidegate_core::Time;

use super::FileError;
use crate::files;

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
/// The number of rows that are looked over at once for those that are to go, or to be moved.
const SWEPT_AT_ONCE: usize = 1024;
/// The bit of a row's key that marks what is set aside.
const ASIDE: u64 = 1 << 60;

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
        let path = files::resolve(path).map_err(|error| unusable(path, error))?;
        make(&path)?;
        let mut disk = Self::with(&path, Box::new(|path| Ok(builder().create_with_backend(backend(path)?)?)));
        disk.compact()?;
        // Its seed is a secret, and only now it is known to be a store.
        if let Err(error) = files::make_private(&path) {
            tracing::warn!(?path, %error, "others can read the store, which holds a secret");
        }
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

    /// Shows what is kept of a limit: each key by what is kept of it, its state and what is set aside, encoded.
    pub(super) fn read(&mut self, tag: u64, mut show: impl FnMut(u64, Encoded<'_>)) -> Result<(), FileError> {
        self.using(|database| {
            let states = database.begin_read()?.open_table(STATES)?;
            pairs(&states, tag, 0, |of_key, found| {
                show(of_key, found);
                true
            })?;
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

/// The fate of a row that was looked over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Stay,
    Go,
    /// It is set aside.
    Aside,
}

impl Rows<'_> {
    pub(super) fn put(&mut self, key: u128, value: &[u8]) -> Result<(), StorageError> {
        self.changed += 1;
        self.states.insert(key, value).map(drop)
    }

    /// Puts a row; what it was before is set aside if `is_other` says so of the encoded state.
    pub(super) fn put_period(
        &mut self,
        key: u128,
        value: &[u8],
        now: Time,
        is_other: impl FnOnce(&[u8]) -> bool,
    ) -> Result<(), StorageError> {
        self.changed += 1;
        let before = self.states.insert(key, value)?;
        let before = before.filter(|before| is_other(state(before.value()))).map(|before| before.value().to_vec());
        before.map_or(Ok(()), |before| self.put_aside(key, &before, now))
    }

    /// Sets a row's value aside. One that is set aside and to come stays instead: it was used while the clock was ahead.
    fn put_aside(&mut self, key: u128, value: &[u8], now: Time) -> Result<(), StorageError> {
        let key = set_aside(key);
        if self.states.get(key)?.is_some_and(|aside| idle_at(aside.value()) > now) {
            return Ok(());
        }
        self.put(key, value)
    }

    pub(super) fn remove(&mut self, key: u128) -> Result<(), StorageError> {
        if self.states.remove(key)?.is_some() {
            self.changed += 1;
        }
        Ok(())
    }

    /// Removes a row if `is_meant` says so of the encoded state.
    pub(super) fn remove_if(&mut self, key: u128, is_meant: impl FnOnce(&[u8]) -> bool) -> Result<(), StorageError> {
        if self.states.get(key)?.is_some_and(|before| is_meant(state(before.value()))) {
            self.remove(key)?;
        }
        Ok(())
    }

    fn put_or_remove(&mut self, key: u128, value: Option<&[u8]>) -> Result<(), StorageError> {
        match value {
            Some(value) => self.put(key, value),
            None => self.remove(key),
        }
    }

    /// How many rows were changed so far.
    pub(super) fn changed(&self) -> usize {
        self.changed
    }

    /// The number of rows.
    pub(super) fn len(&self) -> Result<u64, StorageError> {
        self.states.len()
    }

    /// Gives each key of a limit the two values that `arrange` says, where it says any.
    pub(super) fn arrange(
        &mut self,
        tag: u64,
        mut arrange: impl FnMut(Encoded<'_>) -> Option<[Option<Vec<u8>>; 2]>,
    ) -> Result<(), StorageError> {
        let mut from = 0;
        loop {
            let mut arranged = Vec::with_capacity(SWEPT_AT_ONCE);
            pairs(&self.states, tag, from, |of_key, found| {
                arranged.extend(arrange(found).map(|values| (of_key, values)));
                arranged.len() < SWEPT_AT_ONCE
            })?;
            for (of_key, [state, aside]) in &arranged {
                let key = row(tag, *of_key);
                self.put_or_remove(key, state.as_deref())?;
                self.put_or_remove(set_aside(key), aside.as_deref())?;
            }
            match arranged.last() {
                Some((last, _)) if arranged.len() == SWEPT_AT_ONCE => from = last + 1,
                _ => return Ok(()),
            }
        }
    }

    /// Looks over the next `rows`, once round at the most, and does with each what `judge` says of it: of a state by its
    /// limit's tag, its key and when it is idle, and of one that is set aside only by the last.
    pub(super) fn sweep(
        &mut self,
        rows: usize,
        now: Time,
        mut judge: impl FnMut(Option<(u64, u64)>, Time) -> Fate,
    ) -> Result<(), StorageError> {
        let mut left = rows.min(usize::try_from(self.states.len()?).unwrap_or(usize::MAX));
        let mut moved = Vec::with_capacity(left.min(SWEPT_AT_ONCE));
        while left > 0 {
            let (mut seen, wanted) = (0, left.min(SWEPT_AT_ONCE));
            for row in self.states.range(*self.hand..)?.take(wanted) {
                let (key, value) = row?;
                let (tag, of_key) = parts(key.value());
                let whose = (of_key & ASIDE == 0).then_some((tag, of_key));
                match judge(whose, idle_at(value.value())) {
                    Fate::Stay => {}
                    Fate::Go => moved.push((key.value(), None)),
                    Fate::Aside => moved.push((key.value(), Some(value.value().to_vec()))),
                }
                *self.hand = key.value().saturating_add(1);
                seen += 1;
            }
            if seen < wanted {
                *self.hand = 0;
            }
            for (key, aside) in moved.drain(..) {
                self.remove(key)?;
                if let Some(aside) = aside {
                    self.put_aside(key, &aside, now)?;
                }
            }
            left -= wanted;
        }
        Ok(())
    }
}

type Row<'a> = (AccessGuard<'a, u128>, AccessGuard<'a, &'static [u8]>);

/// A key's state and what is set aside of it, encoded.
pub(super) type Encoded<'a> = [Option<&'a [u8]>; 2];

/// Shows what is kept of a limit's keys from one on, in order, for as long as `show` says to go on.
fn pairs(
    states: &impl ReadableTable<u128, &'static [u8]>,
    tag: u64,
    from: u64,
    mut show: impl FnMut(u64, Encoded<'_>) -> bool,
) -> Result<(), StorageError> {
    let mut own = states.range(row(tag, from)..row(tag, ASIDE))?;
    let mut aside = states.range(row(tag, ASIDE | from)..row(tag, ASIDE << 1))?;
    let mut next = [own.next().transpose()?, aside.next().transpose()?];
    let of_key = |row: &Option<Row<'_>>| row.as_ref().map(|(key, _)| parts(key.value()).1 & !ASIDE);
    while let Some(first) = next.iter().filter_map(of_key).min() {
        let is_first = [0, 1].map(|at| of_key(&next[at]) == Some(first));
        let value = |at: usize| next[at].as_ref().filter(|_| is_first[at]).map(|(_, value)| state(value.value()));
        if !show(first, [value(0), value(1)]) {
            break;
        }
        if is_first[0] {
            next[0] = own.next().transpose()?;
        }
        if is_first[1] {
            next[1] = aside.next().transpose()?;
        }
    }
    Ok(())
}

/// The key of a row.
pub(super) fn row(tag: u64, of_key: u64) -> u128 {
    u128::from(tag) << 64 | u128::from(of_key)
}

/// The key of the row in which is kept what is set aside beside a row.
pub(super) fn set_aside(row: u128) -> u128 {
    row | u128::from(ASIDE)
}

fn parts(row: u128) -> (u64, u64) {
    ((row >> 64) as u64, row as u64)
}

/// Begins a row's value.
pub(super) fn begin_value(idle_at: Time, value: &mut Vec<u8>) {
    value.extend(idle_at.as_micros().to_le_bytes());
}

/// The state in a row's value, encoded.
fn state(value: &[u8]) -> &[u8] {
    value.get(8..).unwrap_or_default()
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

/// The file as redb takes it. An empty one isn't begun anew: something took away what it held.
fn backend(path: &Path) -> Result<FileBackend, Error> {
    let file = files::open(path, File::options().read(true).write(true)).map_err(StorageError::Io)?;
    if file.metadata().map_err(StorageError::Io)?.len() == 0 {
        return Err(Error::Io(io::ErrorKind::InvalidData.into()));
    }
    Ok(FileBackend::new(file)?)
}

/// Makes an empty store, if there is nothing or an empty file.
fn make(path: &Path) -> Result<(), FileError> {
    let is_made = || match std::fs::metadata(path) {
        Ok(about) => Ok(about.len() > 0),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(unusable(path, error)),
    };
    if is_made()? {
        return Ok(());
    }
    let _lock = match files::lock(path) {
        Ok(lock) => lock,
        Err(TryLockError::WouldBlock) => return Err(FileError::InUse { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => return Err(unusable(path, source)),
    };
    // Another that made it meanwhile has replaced what was locked just now.
    if is_made()? {
        return Ok(());
    }
    files::remove_unfinished(path);
    caught(path, || {
        files::replace(path, |file| {
            let database =
                builder().create_with_backend(FileBackend::new(file.try_clone().map_err(StorageError::Io)?)?)?;
            let write = database.begin_write()?;
            write.open_table(ABOUT)?.insert(FORMAT_KEY, FORMAT.to_le_bytes().as_slice())?;
            write.open_table(STATES)?;
            write.commit()?;
            Ok(())
        })
    })
}

fn unusable(path: &Path, source: io::Error) -> FileError {
    FileError::Unusable { path: path.to_owned(), source }
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
