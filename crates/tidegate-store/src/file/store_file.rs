//! The file itself: a redb database with one table about the file and one of states.
//!
//! A row's key is 128 bits: the limit's tag, then the 60 bits of the key that the memory stores, a hash under the
//! file's own seed. The bit above them marks the key's archived state. The row's value is the time when the
//! state becomes idle, eight bytes, and the state as core encodes it. A new file is made beside its path and moved
//! there when it is complete, so that there is never half of one.

use std::fs::{File, TryLockError};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use redb::backends::FileBackend;
use redb::{
    AccessGuard, Builder, Database, Error, ReadableDatabase, ReadableTable, ReadableTableMetadata, StorageError, Table,
    TableDefinition, TableError,
};
use tidegate_core::{KeyState, Time};

use super::FileError;
use crate::files;

/// The format that is written, and the latest one that is read.
pub(super) const FORMAT: u32 = 1;

const METADATA: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("tidegate");
const STATES: TableDefinition<'_, u128, &[u8]> = TableDefinition::new("states");
/// The keys in the table about the file: its format, and the seed of its keys.
const FORMAT_KEY: &str = "format";
const SEED_KEY: &str = "seed";

/// The size of redb's cache, in bytes. It is small because the file is read only when it is opened, and then written.
const CACHE_BYTES: usize = 8 << 20;
/// A file below this isn't worth compacting.
const MIN_COMPACT_BYTES: u64 = 4 << 20;
/// The number of rows that are checked at once, for those to be removed or moved.
const BATCH_ROWS: usize = 1024;
/// The bit of a row's key that marks an archived state.
const ARCHIVED_BIT: u64 = 1 << 60;

/// Opens the database, again after each failure.
type OpenDatabaseFn = Box<dyn Fn(&Path) -> Result<Database, Error> + Send>;

/// A file that is open, or that was open until something failed.
pub(super) struct StoreFile {
    pub(super) path: PathBuf,
    open_database: OpenDatabaseFn,
    database: Option<Database>,
    /// The position where the next check of rows begins.
    sweep_position: u128,
}

impl StoreFile {
    /// Opens the file, and creates it if it doesn't exist.
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        let path = files::resolve(path).map_err(|error| io_error(path, error))?;
        create_if_missing(&path)?;
        let open = |path: &Path| -> Result<Database, Error> { Ok(builder().create_with_backend(backend(path)?)?) };
        let is_locked = |error: &Error| matches!(error, Error::DatabaseAlreadyOpen);
        let open = move |path: &Path| files::retry_while_locked(|| open(path), is_locked);
        let mut file = Self::with_opener(&path, Box::new(open));
        file.compact()?;
        // Its seed is a secret. Only here is the file known to be a store.
        if let Err(error) = files::make_private(&path) {
            tracing::warn!(?path, %error, "others can read the store, which holds a secret");
        }
        Ok(file)
    }

    pub(super) fn with_opener(path: &Path, open_database: OpenDatabaseFn) -> Self {
        Self { path: path.to_owned(), open_database, database: None, sweep_position: 0 }
    }

    /// Returns the database. It is opened again if its last use failed.
    fn database(&mut self) -> Result<&mut Database, FileError> {
        let database = match self.database.take() {
            Some(database) => database,
            None => {
                let database = catch_failures(&self.path, || (self.open_database)(&self.path))?;
                self.check_format(&database)?;
                database
            }
        };
        Ok(self.database.insert(database))
    }

    /// Uses the database. It is closed after a failure: its contents in memory can't be trusted.
    fn with_database<T>(&mut self, job: impl FnOnce(&mut Database) -> Result<T, Error>) -> Result<T, FileError> {
        let path = self.path.clone();
        let database = self.database()?;
        let result = catch_failures(&path, || job(database));
        if result.is_err() {
            // Closing it may fail in the same way.
            let database = self.database.take();
            let _ = catch_unwind(AssertUnwindSafe(|| drop(database)));
        }
        result
    }

    fn check_format(&self, database: &Database) -> Result<(), FileError> {
        let found = catch_failures(&self.path, || {
            let read = database.begin_read()?;
            let metadata = match read.open_table(METADATA) {
                Err(TableError::TableDoesNotExist(_)) => return Ok(None),
                about => about?,
            };
            let format = metadata.get(FORMAT_KEY)?;
            Ok(format.and_then(|format| Some(u32::from_le_bytes(format.value().try_into().ok()?))))
        })?;
        match found {
            Some(FORMAT) => Ok(()),
            Some(found) if found > FORMAT => Err(FileError::NewerFormat { path: self.path.clone(), found }),
            _ => Err(FileError::NotAStore { path: self.path.clone() }),
        }
    }

    /// Compacts a file that is mostly empty.
    fn compact(&mut self) -> Result<(), FileError> {
        let bytes = std::fs::metadata(&self.path).map_or(0, |metadata| metadata.len());
        self.with_database(|database| {
            if bytes < MIN_COMPACT_BYTES {
                return Ok(());
            }
            let stats = database.begin_read()?.open_table(STATES)?.stats()?;
            if stats.stored_bytes() + stats.metadata_bytes() < bytes / 4 {
                database.compact()?;
            }
            Ok(())
        })
    }

    /// Returns the seed of the file's keys: the one in the file, or else `proposal`, which is then stored for good.
    pub(super) fn get_or_insert_seed(&mut self, proposal: [u8; 16]) -> Result<[u8; 16], FileError> {
        self.with_database(|database| {
            let write = database.begin_write()?;
            let stored = write.open_table(METADATA)?.get(SEED_KEY)?.and_then(|seed| seed.value().try_into().ok());
            if let Some(seed) = stored {
                write.abort()?;
                return Ok(seed);
            }
            write.open_table(METADATA)?.insert(SEED_KEY, proposal.as_slice())?;
            write.commit()?;
            Ok(proposal)
        })
    }

    /// Passes each stored key of a limit to `visit`: the key's bits, its encoded state and the archived state.
    pub(super) fn visit_states(
        &mut self,
        tag: u64,
        mut visit: impl FnMut(u64, EncodedStates<'_>),
    ) -> Result<(), FileError> {
        self.with_database(|database| {
            let states = database.begin_read()?.open_table(STATES)?;
            visit_pairs(&states, tag, 0, |key_bits, found| {
                visit(key_bits, found);
                true
            })?;
            Ok(())
        })
    }

    pub(super) fn row_count(&mut self) -> Result<u64, FileError> {
        self.with_database(|database| Ok(database.begin_read()?.open_table(STATES)?.len()?))
    }

    /// Lets `change` change rows, and makes the changes durable.
    pub(super) fn write(
        &mut self,
        change: impl FnOnce(&mut RowWriter<'_>) -> Result<(), StorageError>,
    ) -> Result<WriteSummary, FileError> {
        let mut sweep_position = self.sweep_position;
        let result = self.with_database(|database| {
            let write = database.begin_write()?;
            let (states, sweep_position) = (write.open_table(STATES)?, &mut sweep_position);
            let mut rows = RowWriter { states, sweep_position, changed_count: 0 };
            change(&mut rows)?;
            let written = WriteSummary { any_changed: rows.changed_count > 0, row_count: rows.states.len()? };
            drop(rows);
            if written.any_changed {
                write.commit()?
            } else {
                write.abort()?
            }
            Ok(written)
        });
        self.sweep_position = sweep_position;
        result
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct WriteSummary {
    /// True if there was anything to write.
    pub any_changed: bool,
    pub row_count: u64,
}

/// The rows of the file, while some are changed.
pub(super) struct RowWriter<'a> {
    states: Table<'a, u128, &'static [u8]>,
    sweep_position: &'a mut u128,
    /// The number of rows changed so far.
    pub(super) changed_count: usize,
}

/// The action on a row that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SweepAction {
    Keep,
    Remove,
    /// The row is archived.
    Archive,
}

impl RowWriter<'_> {
    pub(super) fn put(&mut self, key: u128, value: &[u8]) -> Result<(), StorageError> {
        self.changed_count += 1;
        self.states.insert(key, value).map(drop)
    }

    /// Puts a row. Its earlier value is archived if `is_other` returns true for the encoded earlier state.
    pub(super) fn put_and_archive_other(
        &mut self,
        key: u128,
        value: &[u8],
        now: Time,
        is_other: impl FnOnce(&[u8]) -> bool,
    ) -> Result<(), StorageError> {
        self.changed_count += 1;
        let other = self.states.insert(key, value)?.filter(|before| is_other(encoded_state(before.value())));
        let other = other.map(|before| before.value().to_vec());
        other.map_or(Ok(()), |before| self.put_archived(key, &before, now))
    }

    /// Archives a row's value. An earlier one that has not ended yet stays: it was used while the clock was ahead.
    fn put_archived(&mut self, key: u128, value: &[u8], now: Time) -> Result<(), StorageError> {
        let key = archived_key(key);
        if self.states.get(key)?.is_some_and(|archived| idle_at(archived.value()) > now) {
            return Ok(());
        }
        self.put(key, value)
    }

    pub(super) fn remove(&mut self, key: u128) -> Result<(), StorageError> {
        if self.states.remove(key)?.is_some() {
            self.changed_count += 1;
        }
        Ok(())
    }

    /// Removes a row if `matches` returns true for the encoded state.
    pub(super) fn remove_matching(
        &mut self,
        key: u128,
        matches: impl FnOnce(&[u8]) -> bool,
    ) -> Result<(), StorageError> {
        if self.states.get(key)?.is_some_and(|before| matches(encoded_state(before.value()))) {
            self.remove(key)?;
        }
        Ok(())
    }

    pub(super) fn row_count(&self) -> Result<u64, StorageError> {
        self.states.len()
    }

    /// Gives each key of a limit the two values that `reconcile` returns, and leaves the key unchanged for `None`.
    pub(super) fn reconcile(
        &mut self,
        tag: u64,
        mut reconcile_one: impl FnMut(EncodedStates<'_>) -> Option<[Option<Vec<u8>>; 2]>,
    ) -> Result<(), StorageError> {
        let mut from = 0;
        loop {
            let mut reconciled = Vec::with_capacity(BATCH_ROWS);
            visit_pairs(&self.states, tag, from, |key_bits, found| {
                reconciled.extend(reconcile_one(found).map(|values| (key_bits, values)));
                reconciled.len() < BATCH_ROWS
            })?;
            for (key_bits, [state, archived]) in &reconciled {
                let key = row_key(tag, *key_bits);
                for (key, value) in [(key, state), (archived_key(key), archived)] {
                    match value {
                        Some(value) => self.put(key, value)?,
                        None => self.remove(key)?,
                    }
                }
            }
            match reconciled.last() {
                Some((last, _)) if reconciled.len() == BATCH_ROWS => from = last + 1,
                _ => return Ok(()),
            }
        }
    }

    /// Checks the next `rows`, each at most once, and does with each what `choose` returns. For a state, `choose` gets
    /// its limit's tag and key, and the time when it is idle. For an archived state, it gets only the time.
    pub(super) fn sweep(
        &mut self,
        rows: usize,
        now: Time,
        mut choose: impl FnMut(Option<(u64, u64)>, Time) -> SweepAction,
    ) -> Result<(), StorageError> {
        let mut rows_left = rows.min(usize::try_from(self.states.len()?).unwrap_or(usize::MAX));
        let mut changes = Vec::with_capacity(rows_left.min(BATCH_ROWS));
        while rows_left > 0 {
            let (mut visited, wanted) = (0, rows_left.min(BATCH_ROWS));
            for row in self.states.range(*self.sweep_position..)?.take(wanted) {
                let (key, value) = row?;
                let (tag, key_bits) = split_row_key(key.value());
                let state_key = (key_bits & ARCHIVED_BIT == 0).then_some((tag, key_bits));
                match choose(state_key, idle_at(value.value())) {
                    SweepAction::Keep => {}
                    SweepAction::Remove => changes.push((key.value(), None)),
                    SweepAction::Archive => changes.push((key.value(), Some(value.value().to_vec()))),
                }
                *self.sweep_position = key.value().saturating_add(1);
                visited += 1;
            }
            if visited < wanted {
                *self.sweep_position = 0;
            }
            for (key, archived) in changes.drain(..) {
                self.remove(key)?;
                if let Some(value) = archived {
                    self.put_archived(key, &value, now)?;
                }
            }
            rows_left -= wanted;
        }
        Ok(())
    }
}

type StoredRow<'a> = (AccessGuard<'a, u128>, AccessGuard<'a, &'static [u8]>);

/// A key's state and its archived state, encoded.
pub(super) type EncodedStates<'a> = [Option<&'a [u8]>; 2];

/// Passes the stored keys of a limit to `visit` in order, starting at `from`, for as long as `visit` returns true.
fn visit_pairs(
    states: &impl ReadableTable<u128, &'static [u8]>,
    tag: u64,
    from: u64,
    mut visit: impl FnMut(u64, EncodedStates<'_>) -> bool,
) -> Result<(), StorageError> {
    let mut state_rows = states.range(row_key(tag, from)..row_key(tag, ARCHIVED_BIT))?;
    let mut archived_rows = states.range(row_key(tag, ARCHIVED_BIT | from)..row_key(tag, ARCHIVED_BIT << 1))?;
    let mut next = [state_rows.next().transpose()?, archived_rows.next().transpose()?];
    let key_bits_of =
        |row: &Option<StoredRow<'_>>| row.as_ref().map(|(key, _)| split_row_key(key.value()).1 & !ARCHIVED_BIT);
    while let Some(first_bits) = next.iter().filter_map(key_bits_of).min() {
        let is_first = [0, 1].map(|at| key_bits_of(&next[at]) == Some(first_bits));
        let value =
            |at: usize| next[at].as_ref().filter(|_| is_first[at]).map(|(_, value)| encoded_state(value.value()));
        if !visit(first_bits, [value(0), value(1)]) {
            break;
        }
        for (at, rows) in [&mut state_rows, &mut archived_rows].into_iter().enumerate() {
            if is_first[at] {
                next[at] = rows.next().transpose()?;
            }
        }
    }
    Ok(())
}

pub(super) fn row_key(tag: u64, key_bits: u64) -> u128 {
    u128::from(tag) << 64 | u128::from(key_bits)
}

/// The key of the row with the archived state beside `row`.
pub(super) fn archived_key(row: u128) -> u128 {
    row | u128::from(ARCHIVED_BIT)
}

fn split_row_key(row: u128) -> (u64, u64) {
    ((row >> 64) as u64, row as u64)
}

/// Appends a row's value to `value`.
pub(super) fn encode_value(state: &KeyState, idle_at: Time, value: &mut Vec<u8>) {
    value.extend(idle_at.as_micros().to_le_bytes());
    state.encode(value);
}

/// The state in a row's value, encoded.
fn encoded_state(value: &[u8]) -> &[u8] {
    value.get(8..).unwrap_or_default()
}

fn idle_at(value: &[u8]) -> Time {
    value.first_chunk().map_or(Time::ZERO, |micros| Time::from_micros(u64::from_le_bytes(*micros)))
}

pub(super) fn builder() -> Builder {
    let mut builder = Database::builder();
    // Detects a file that was tampered with, or torn by a machine that reported a write too early.
    builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true);
    builder
}

/// The file as redb takes it. An empty file is an error and isn't initialised: its contents were removed.
fn backend(path: &Path) -> Result<FileBackend, Error> {
    let file = files::open(path, File::options().read(true).write(true)).map_err(StorageError::Io)?;
    if file.metadata().map_err(StorageError::Io)?.len() == 0 {
        return Err(Error::Io(io::ErrorKind::InvalidData.into()));
    }
    Ok(FileBackend::new(file)?)
}

/// Creates an empty store if the file is missing or empty.
fn create_if_missing(path: &Path) -> Result<(), FileError> {
    let is_created = || match std::fs::metadata(path) {
        Ok(metadata) => Ok(metadata.len() > 0),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io_error(path, error)),
    };
    if is_created()? {
        return Ok(());
    }
    let _lock = match files::lock(path) {
        Ok(lock) => lock,
        Err(TryLockError::WouldBlock) => return Err(FileError::InUse { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => return Err(io_error(path, source)),
    };
    // Another process that created it in the meantime has replaced the file that was just locked.
    if is_created()? {
        return Ok(());
    }
    files::remove_unfinished(path);
    catch_failures(path, || {
        files::replace(path, |file| {
            let database =
                builder().create_with_backend(FileBackend::new(file.try_clone().map_err(StorageError::Io)?)?)?;
            let write = database.begin_write()?;
            write.open_table(METADATA)?.insert(FORMAT_KEY, FORMAT.to_le_bytes().as_slice())?;
            write.open_table(STATES)?;
            write.commit()?;
            Ok(())
        })
    })
}

fn io_error(path: &Path, source: io::Error) -> FileError {
    FileError::Io { path: path.to_owned(), source }
}

/// Runs `job` on the file at `path`. redb panics on some contents of a broken file.
fn catch_failures<T>(path: &Path, job: impl FnOnce() -> Result<T, Error>) -> Result<T, FileError> {
    let path = || path.to_owned();
    let broken = |what: String| FileError::Corrupt { path: path(), what };
    match catch_unwind(AssertUnwindSafe(job)) {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(match error {
            Error::DatabaseAlreadyOpen | Error::LockProtocolMismatch => FileError::InUse { path: path() },
            // redb's error for a file that doesn't begin as its own files do.
            Error::Io(source) if source.kind() == io::ErrorKind::InvalidData => FileError::NotAStore { path: path() },
            Error::Io(source) if source.kind() == io::ErrorKind::UnexpectedEof => broken(source.to_string()),
            Error::Io(source) => FileError::Io { path: path(), source },
            Error::PreviousIo => FileError::Io { path: path(), source: io::Error::other("an earlier use failed") },
            error => broken(error.to_string()),
        }),
        Err(_) => Err(broken("it can't be read to its end".to_owned())),
    }
}
