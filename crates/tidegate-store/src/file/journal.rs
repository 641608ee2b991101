//! The file behind one process's stores, and the thread that writes it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tidegate_core::{Outcomes, Span, Time};
use tokio::sync::watch;

use super::persisted_plan::{PersistedPlan, ResetKeys, WriteBuffers};
use super::store_file::{StoreFile, SweepAction, WriteSummary};
use super::wakeup::{WriteLag, WriterWakeup};
use super::{FileError, FileStoreFuture, archive};
use crate::StoreError;
use crate::memory::ChangeFlags;

/// How often a writer that nobody called looks over some rows, and how long it leaves a file alone that failed.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// How many rows are looked over then.
const SWEEP_ROWS_IDLE: usize = 16_384;
/// How many rows are looked over for each that was changed, so that rows which the memory has let go of never outnumber
/// the others; and how many at the least.
const SWEEP_ROWS_PER_CHANGE: usize = 2;
const MIN_SWEEP_ROWS: usize = 256;

/// When what has changed is written to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushMode {
    /// Before a decision is told: a crash loses nothing.
    Always,
    /// This long after a change at the latest: a crash loses what was decided within so much time. Where the disk is
    /// slower, decisions wait for it as with [`FlushMode::Always`].
    Within(Duration),
}

impl Default for FlushMode {
    /// Within 100 ms.
    fn default() -> Self {
        Self::Within(Duration::from_millis(100))
    }
}

/// The behaviour while the file can't be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnWriteFailure {
    /// Decisions go on in memory; a crash then loses what changed since.
    Continue,
    /// A decision that would change something is an error ([`StoreError::Unwritable`]); those that change nothing, as the
    /// refusals by a live block, are told. What is only told ([`Store::submit`](crate::Store::submit)) is taken note of.
    Deny,
}

impl OnWriteFailure {
    /// The default: with [`FlushMode::Always`] nothing is to be lost, so that it denies.
    pub fn default_for(flush: FlushMode) -> Self {
        match flush {
            FlushMode::Always => Self::Deny,
            FlushMode::Within(_) => Self::Continue,
        }
    }
}

/// How a file is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileHealth {
    /// Why it can't be written at present; a restart would lose what changed since in memory.
    pub failure: Option<String>,
    /// How often it was written.
    pub commits: u64,
    /// How many states it held then.
    pub row_count: u64,
}

/// A file that outlives the process, for one or more [`FileStore`](super::FileStore)s. The last to let go of it writes
/// what is left.
pub struct Journal {
    inner: Arc<JournalInner>,
    writer: Option<JoinHandle<()>>,
}

/// What decisions share with the writer.
struct JournalInner {
    flush: FlushMode,
    on_write_failure: OnWriteFailure,
    /// How far the file may lag behind decisions that don't wait for it.
    max_lag: Span,
    wakeup: WriterWakeup,
    write_lag: WriteLag,
    /// Decisions' time when it was last heard of.
    latest_time: AtomicU64,
    /// Locked after the disk, where both are.
    plans: Mutex<Vec<Arc<PersistedPlan>>>,
    store_file: Mutex<(StoreFile, WriteBuffers)>,
    /// How many writings were begun.
    writes_started: AtomicU64,
    /// The last that has ended.
    last_write: watch::Sender<FinishedWrite>,
    is_failing: AtomicBool,
    health: Mutex<FileHealth>,
}

/// A writing that has ended.
#[derive(Clone, Copy, Debug)]
struct FinishedWrite {
    number: u64,
    /// True if the file has all that was decided before it.
    is_ok: bool,
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal").field("flush", &self.inner.flush).field("health", &self.health()).finish()
    }
}

impl Journal {
    /// [`Journal::open_with`] what holds by default while the file can't be written ([`OnWriteFailure::default_for`]).
    ///
    /// # Errors
    /// [`FileError`]. The file is left as it was.
    pub fn open(path: &Path, flush: FlushMode) -> Result<Arc<Self>, FileError> {
        Self::open_with(path, flush, OnWriteFailure::default_for(flush))
    }

    /// Opens the file at `path`, and makes it if it isn't there. A symbolic link is followed; anything but a regular file is
    /// an error. The file is its owner's alone, also if it was there and others could read it: it holds a secret.
    ///
    /// # Errors
    /// [`FileError`]. The file is left as it was.
    pub fn open_with(path: &Path, flush: FlushMode, on_write_failure: OnWriteFailure) -> Result<Arc<Self>, FileError> {
        Self::with_file(StoreFile::open(path)?, flush, on_write_failure)
    }

    pub(super) fn with_file(
        mut store_file: StoreFile,
        flush: FlushMode,
        on_write_failure: OnWriteFailure,
    ) -> Result<Arc<Self>, FileError> {
        let health = FileHealth { row_count: store_file.row_count()?, ..FileHealth::default() };
        let max_lag = match flush {
            FlushMode::Always => Span::ZERO,
            FlushMode::Within(max_lag) => Span::from_duration(max_lag),
        };
        let path = store_file.path().to_owned();
        let inner = Arc::new(JournalInner {
            flush,
            on_write_failure,
            max_lag,
            wakeup: WriterWakeup::default(),
            write_lag: WriteLag::default(),
            latest_time: AtomicU64::new(0),
            plans: Mutex::default(),
            store_file: Mutex::new((store_file, WriteBuffers::default())),
            writes_started: AtomicU64::new(0),
            last_write: watch::Sender::new(FinishedWrite { number: 0, is_ok: true }),
            is_failing: AtomicBool::new(false),
            health: Mutex::new(health),
        });
        let writer = Arc::clone(&inner);
        let thread = std::thread::Builder::new().name("tidegate-file".to_owned()).spawn(move || writer.run_writer());
        let writer = Some(thread.map_err(|source| FileError::Io { path, source })?);
        Ok(Arc::new(Self { inner, writer }))
    }

    /// The bytes under which keys are hashed that this file keeps: those in it, or if there are none this proposal, which
    /// then is kept there for good.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn get_or_insert_seed(&self, proposal: [u8; 16]) -> Result<[u8; 16], FileError> {
        self.inner.lock_file().0.get_or_insert_seed(proposal)
    }

    /// Writes what has changed, and waits for it.
    ///
    /// # Errors
    /// [`FileError`]: it is still to be written, and is tried again every second.
    pub fn flush(&self) -> Result<(), FileError> {
        self.inner.write_changes(MIN_SWEEP_ROWS)
    }

    /// How the file is doing.
    pub fn health(&self) -> FileHealth {
        self.inner.lock_health().clone()
    }

    /// Has the file keep a plan's states, and gives those that it kept to the plan.
    pub(super) fn add_plan(&self, plan: &Arc<PersistedPlan>, now: Time) -> Result<(), FileError> {
        self.update_time(now);
        let mut store_file = self.inner.lock_file();
        let store_file = &mut store_file.0;
        let mut plans = self.inner.plans.lock();
        let (mut previous_tag, mut unread) = (None, 0_u64);
        for tag in plan.tags() {
            if previous_tag.replace(tag) == Some(tag) || plans.iter().any(|plan| plan.limit_id(tag).is_some()) {
                return Err(FileError::TagInUse { path: store_file.path().to_owned(), tag });
            }
        }
        for tag in plan.tags() {
            if let Some(id) = plan.limit_id(tag) {
                store_file.visit_states(tag, |key_bits, encoded| {
                    if !plan.restore(id, key_bits, encoded) {
                        unread += 1;
                    }
                })?;
            }
        }
        if unread > 0 {
            tracing::warn!(path = ?store_file.path(), unread, "states that can't be read were left out");
        }
        plans.push(Arc::clone(plan));
        Ok(())
    }

    /// Writes a plan's states down for the last time.
    pub(super) fn remove_plan(&self, plan: &Arc<PersistedPlan>) {
        // Told in the log already if it failed.
        let _ = self.inner.write_changes(0);
        self.inner.plans.lock().retain(|kept| !Arc::ptr_eq(kept, plan));
    }

    pub(super) fn update_time(&self, now: Time) {
        self.inner.latest_time.store(now.as_micros(), Relaxed);
    }

    /// Takes note of a decision at `now`, and says which writing it has to wait for, if any.
    #[inline]
    pub(super) fn record_change(&self, flags: ChangeFlags, now: Time) -> Option<u64> {
        let inner = &*self.inner;
        if !flags.any_changed {
            return None;
        }
        if flags.newly_dirty && inner.write_lag.record_change(now) {
            self.update_time(now);
            inner.wakeup.signal(|calls| calls.changed = true);
        }
        let must_wait = inner.flush == FlushMode::Always || inner.write_lag.exceeds(inner.max_lag, now);
        let continues_in_memory =
            || inner.on_write_failure == OnWriteFailure::Continue && inner.is_failing.load(Relaxed);
        (must_wait && !continues_in_memory()).then(|| inner.writes_started.load(Relaxed) + 1)
    }

    /// True while nothing may change.
    #[inline]
    pub(super) fn denies_changes(&self) -> bool {
        self.inner.is_failing.load(Relaxed) && self.inner.on_write_failure == OnWriteFailure::Deny
    }

    /// Answers when the writing of that number has ended.
    pub(super) fn wait_for_write(&self, write_number: u64, outcomes: Outcomes) -> FileStoreFuture {
        self.inner.wakeup.signal(|calls| calls.urgent = true);
        let mut last_write = self.inner.last_write.subscribe();
        let on_write_failure = self.inner.on_write_failure;
        Box::pin(async move {
            match last_write.wait_for(|ended| ended.number >= write_number).await {
                // A later writing that ended well has what an earlier one failed to write.
                Ok(ended) if ended.is_ok => Ok(outcomes),
                _ if on_write_failure == OnWriteFailure::Continue => Ok(outcomes),
                _ => Err(StoreError::Unwritable),
            }
        })
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.inner.wakeup.signal(|calls| calls.closing = true);
        if let Some(writer) = self.writer.take() {
            // A writer that panicked has nothing more to write.
            let _ = writer.join();
        }
    }
}

impl JournalInner {
    fn lock_file(&self) -> MutexGuard<'_, (StoreFile, WriteBuffers)> {
        self.store_file.lock()
    }

    fn lock_health(&self) -> MutexGuard<'_, FileHealth> {
        self.health.lock()
    }

    /// The writer's thread.
    fn run_writer(&self) {
        loop {
            let delay = match self.flush {
                _ if self.is_failing.load(Relaxed) => IDLE_INTERVAL,
                FlushMode::Always => Duration::ZERO,
                // The other half is for the writing itself.
                FlushMode::Within(max_lag) => max_lag / 2,
            };
            let signals = self.wakeup.wait(IDLE_INTERVAL, delay);
            let sweep_rows = if signals.changed || signals.urgent { MIN_SWEEP_ROWS } else { SWEEP_ROWS_IDLE };
            // Told in the log and in `health`.
            let _ = self.write_changes(sweep_rows);
            if signals.closing {
                return;
            }
        }
    }

    /// Writes what has changed, and looks over some rows.
    fn write_changes(&self, sweep_rows: usize) -> Result<(), FileError> {
        let mut locked = self.lock_file();
        let (store_file, buffers) = &mut *locked;
        // A decision that doesn't see this yet waits for this writing, and has let go of its shards, which are locked only
        // after this line. One that sees it waits for the next.
        let write_number = self.writes_started.fetch_add(1, Relaxed) + 1;
        self.write_lag.start_write();
        let plans = self.plans.lock().clone();
        let now = Time::from_micros(self.latest_time.load(Relaxed));
        let resets: Vec<ResetKeys> = plans.iter().map(|plan| plan.take_resets()).collect();
        let written = store_file.write(|rows| {
            for (plan, reset) in plans.iter().zip(&resets) {
                plan.write_changes(rows, buffers, reset, now)?;
            }
            let sweep_rows = sweep_rows.max(rows.changed_count() * SWEEP_ROWS_PER_CHANGE);
            let can_archive = can_archive(rows.row_count()?, &plans);
            rows.sweep(sweep_rows, now, |whose, idle_at| sweep_action(whose, idle_at, &plans, can_archive, now))
        });
        for (plan, reset) in plans.iter().zip(resets) {
            match written {
                Ok(_) => plan.set_reconciled(),
                Err(_) => {
                    plan.shards.mark_all_dirty();
                    plan.add_resets(reset);
                }
            }
        }
        let result = self.record_result(store_file, written);
        self.write_lag.finish_write();
        self.last_write.send_replace(FinishedWrite { number: write_number, is_ok: result.is_ok() });
        result
    }

    /// Says how it went: in the log when that is new.
    fn record_result(&self, store_file: &StoreFile, written: Result<WriteSummary, FileError>) -> Result<(), FileError> {
        let mut health = self.lock_health();
        let was_failing = self.is_failing.swap(written.is_err(), Relaxed);
        match written {
            Ok(WriteSummary { any_changed: any, row_count: rows }) => {
                if was_failing {
                    tracing::warn!(path = ?store_file.path(), "the store is written again");
                }
                *health = FileHealth { failure: None, commits: health.commits + u64::from(any), row_count: rows };
                Ok(())
            }
            Err(error) => {
                if !was_failing {
                    let then = match self.on_write_failure {
                        OnWriteFailure::Continue => "decisions go on in memory",
                        OnWriteFailure::Deny => "nothing is admitted until it can",
                    };
                    tracing::error!(%error, "the store can't be written: {then}");
                }
                health.failure = Some(error.to_string());
                Err(error)
            }
        }
    }
}

/// True if more rows past their end may be kept.
fn can_archive(rows: u64, plans: &[Arc<PersistedPlan>]) -> bool {
    let live_entries = || plans.iter().map(|plan| plan.shards.stats().entries as u64).sum::<u64>();
    rows <= archive::MAX_ARCHIVED_ROWS || rows - archive::MAX_ARCHIVED_ROWS <= live_entries()
}

/// The fate of a row: of a state, by its limit's tag and its key, or of one that is set aside.
fn sweep_action(
    state_key: Option<(u64, u64)>,
    idle_at: Time,
    plans: &[Arc<PersistedPlan>],
    can_archive: bool,
    now: Time,
) -> SweepAction {
    let is_over = idle_at <= now;
    let is_kept = !is_over || can_archive && idle_at + archive::ARCHIVE_DURATION > now;
    let owner =
        state_key.and_then(|(tag, key_bits)| plans.iter().find_map(|plan| Some((plan, plan.limit_id(tag)?, key_bits))));
    match owner {
        Some((plan, id, of_key)) if plan.has_live_entry(id, of_key, now) => SweepAction::Keep,
        Some((plan, id, _)) if is_over && is_kept && plan.is_quota(id) => SweepAction::Archive,
        Some(_) => SweepAction::Remove,
        // Set aside, or of a policy that may come back.
        None if is_kept => SweepAction::Keep,
        None => SweepAction::Remove,
    }
}
