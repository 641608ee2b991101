//! The file behind one process's stores, and the thread that writes it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use tidegate_core::{Limits, Outcomes, Span, Time};
use tokio::sync::watch;

use super::persisted_plan::{PersistedPlan, ResetKeys, WriteBuffers};
use super::store_file::{StoreFile, SweepAction, WriteSummary};
use super::wakeup::{WriteLag, WriterWakeup};
use super::{FileError, FileStoreFuture, archive};
use crate::StoreError;
use crate::memory::ChangeFlags;

/// The interval at which an idle writer checks some rows, and the delay before a file that failed is tried again.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// The number of rows that are checked then.
const SWEEP_ROWS_IDLE: usize = 16_384;
/// The number of rows checked for each changed row, so that dropped rows never outnumber the others; the least number.
const SWEEP_ROWS_PER_CHANGE: usize = 2;
const MIN_SWEEP_ROWS: usize = 256;

/// The time at which changes are written to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushMode {
    /// Before a decision is returned: a crash loses nothing.
    Always,
    /// This long after a change at the latest: a crash loses the decisions of so much time. Where the disk is slower,
    /// decisions wait for it as with [`FlushMode::Always`].
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
    /// Decisions go on in memory. A crash then loses what has changed since the failure.
    Continue,
    /// A decision that would change something is an error ([`StoreError::Unwritable`]). Decisions that change nothing,
    /// such as refusals by a live block, are returned. Changes through [`Store::submit`](crate::Store::submit) are
    /// still noted.
    Deny,
}

impl OnWriteFailure {
    /// The default for `flush`: [`OnWriteFailure::Deny`] with [`FlushMode::Always`], since nothing may be lost, else
    /// [`OnWriteFailure::Continue`].
    pub fn default_for(flush: FlushMode) -> Self {
        match flush {
            FlushMode::Always => Self::Deny,
            FlushMode::Within(_) => Self::Continue,
        }
    }
}

/// The condition of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileHealth {
    /// The reason why the file can't be written now. A restart would lose the changes since the failure.
    pub failure: Option<String>,
    /// The number of times that it was written.
    pub commits: u64,
    /// The number of rows after the last writing.
    pub row_count: u64,
}

/// A file that outlives the process, for one or more [`FileStore`](super::FileStore)s. When the last owner drops it,
/// the remaining changes are written.
pub struct Journal {
    inner: Arc<JournalInner>,
    writer: Option<JoinHandle<()>>,
}

/// The parts that decisions share with the writer.
struct JournalInner {
    flush: FlushMode,
    on_write_failure: OnWriteFailure,
    /// The most time by which the file may lag behind decisions that don't wait for it.
    max_lag: Span,
    wakeup: WriterWakeup,
    write_lag: WriteLag,
    /// The latest known time of decisions, in microseconds.
    latest_time: AtomicU64,
    /// Locked after the disk, where both are locked.
    plans: Mutex<Vec<Arc<PersistedPlan>>>,
    store_file: Mutex<(StoreFile, WriteBuffers)>,
    writes_started: AtomicU64,
    last_write: watch::Sender<FinishedWrite>,
    is_failing: AtomicBool,
    health: Mutex<FileHealth>,
}

/// A writing that has ended.
#[derive(Clone, Copy, Debug)]
struct FinishedWrite {
    number: u64,
    /// True if the file has all decisions made before it.
    is_ok: bool,
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal").field("flush", &self.inner.flush).field("health", &self.health()).finish()
    }
}

impl Journal {
    /// Opens the file as [`Journal::open_with`] does, with the default behaviour of [`OnWriteFailure::default_for`].
    ///
    /// # Errors
    /// [`FileError`]. The file is left as it was.
    pub fn open(path: &Path, flush: FlushMode) -> Result<Arc<Self>, FileError> {
        Self::open_with(path, flush, OnWriteFailure::default_for(flush))
    }

    /// Opens the file at `path`, and creates it if it doesn't exist. A symbolic link is followed; anything but a
    /// regular file is an error. Only its owner may read the file, even if others could before, because it holds a
    /// secret.
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
        let path = store_file.path.clone();
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

    /// Returns the seed under which this file's keys are hashed: the one in the file, or else `proposal`, which is then
    /// stored in it for good.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn get_or_insert_seed(&self, proposal: [u8; 16]) -> Result<[u8; 16], FileError> {
        self.inner.store_file.lock().0.get_or_insert_seed(proposal)
    }

    /// Writes what has changed, and waits for it.
    ///
    /// # Errors
    /// [`FileError`]: the changes are still to be written. The writer tries again every second.
    pub fn flush(&self) -> Result<(), FileError> {
        self.inner.write_changes(MIN_SWEEP_ROWS)
    }

    /// Returns the condition of the file.
    pub fn health(&self) -> FileHealth {
        self.inner.health.lock().clone()
    }

    /// Registers a plan, and restores the plan's states from the file.
    pub(super) fn add_plan(&self, plan: &Arc<PersistedPlan>, now: Time) -> Result<(), FileError> {
        self.update_time(now);
        let store_file = &mut self.inner.store_file.lock().0;
        let mut plans = self.inner.plans.lock();
        restore_plan(store_file, &plans, plan)?;
        plans.push(Arc::clone(plan));
        Ok(())
    }

    /// Replaces the plan of a store by one with these limits, and restores the states of its new tags from the file.
    pub(super) fn replace_plan(
        &self,
        plan: &PersistedPlan,
        limits: Arc<Limits>,
        now: Time,
    ) -> Result<Arc<PersistedPlan>, FileError> {
        self.update_time(now);
        // The latest plan, which another handle may have put there.
        let latest = self.inner.plans.lock().iter().find(|kept| kept.is_same_store(plan)).cloned();
        let latest_tags = latest.iter().flat_map(|latest| &latest.by_tag);
        let changes_a_tag = latest_tags.into_iter().any(|(tag, id)| limits.tag(*id) != *tag);
        if changes_a_tag {
            // The states under the old tag, which may come back. A failure is in the log already.
            let _ = self.inner.write_changes(0);
        }
        let store_file = &mut self.inner.store_file.lock().0;
        let mut plans = self.inner.plans.lock();
        let index = plans.iter().position(|kept| kept.is_same_store(plan));
        let index = index.expect("invariant: a store's plan is registered while it has a handle");
        let mut new_plan = plans[index].with_limits(limits, now);
        restore_plan(store_file, &plans, &new_plan)?;
        if changes_a_tag {
            // A penalty that the memory keeps belongs into the rows of the new tag.
            new_plan.shards.mark_all_dirty();
        }
        new_plan.take_over_rows(&plans[index]);
        let new_plan = Arc::new(new_plan);
        plans[index] = Arc::clone(&new_plan);
        Ok(new_plan)
    }

    /// Writes the states of a plan's store for the last time.
    pub(super) fn remove_plan(&self, plan: &PersistedPlan) {
        // A failure is in the log already.
        let _ = self.inner.write_changes(0);
        self.inner.plans.lock().retain(|kept| !kept.is_same_store(plan));
    }

    pub(super) fn update_time(&self, now: Time) {
        self.inner.latest_time.store(now.as_micros(), Relaxed);
    }

    /// Takes note of a decision at `now`, and returns the writing that it has to wait for, if any.
    #[inline]
    pub(super) fn record_change(&self, flags: ChangeFlags, now: Time) -> Option<u64> {
        let inner = &*self.inner;
        if !flags.any_changed {
            return None;
        }
        if flags.newly_dirty && inner.write_lag.record_change(now) {
            self.update_time(now);
            inner.wakeup.signal(|signals| signals.changed = true);
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

    /// Returns the outcomes when the writing of that number has ended.
    pub(super) fn wait_for_write(&self, write_number: u64, outcomes: Outcomes) -> FileStoreFuture {
        self.inner.wakeup.signal(|signals| signals.urgent = true);
        let mut last_write = self.inner.last_write.subscribe();
        let on_write_failure = self.inner.on_write_failure;
        Box::pin(async move {
            match last_write.wait_for(|ended| ended.number >= write_number).await {
                // A later successful writing has what an earlier one failed to write.
                Ok(ended) if ended.is_ok => Ok(outcomes),
                _ if on_write_failure == OnWriteFailure::Continue => Ok(outcomes),
                _ => Err(StoreError::Unwritable),
            }
        })
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.inner.wakeup.signal(|signals| signals.closing = true);
        if let Some(writer) = self.writer.take() {
            // A writer that panicked has nothing more to write.
            let _ = writer.join();
        }
    }
}

impl JournalInner {
    fn run_writer(&self) {
        loop {
            let delay = match self.flush {
                _ if self.is_failing.load(Relaxed) => IDLE_INTERVAL,
                FlushMode::Always => Duration::ZERO,
                // The other half is left for the writing itself.
                FlushMode::Within(max_lag) => max_lag / 2,
            };
            let signals = self.wakeup.wait(IDLE_INTERVAL, delay);
            let sweep_rows = if signals.changed || signals.urgent { MIN_SWEEP_ROWS } else { SWEEP_ROWS_IDLE };
            // A failure is in the log and in `health`.
            let _ = self.write_changes(sweep_rows);
            if signals.closing {
                return;
            }
        }
    }

    /// Writes the changes, and checks some rows.
    fn write_changes(&self, sweep_rows: usize) -> Result<(), FileError> {
        let mut locked = self.store_file.lock();
        let (store_file, buffers) = &mut *locked;
        // A decision that doesn't see this number yet waits for this writing. It has released its shards by then, since
        // they are locked only after this line. A decision that sees the number waits for the next writing.
        let write_number = self.writes_started.fetch_add(1, Relaxed) + 1;
        self.write_lag.start_write();
        let plans = self.plans.lock().clone();
        let now = Time::from_micros(self.latest_time.load(Relaxed));
        let resets: Vec<ResetKeys> =
            plans.iter().map(|plan| std::mem::take(&mut *plan.pending_resets.lock())).collect();
        let written = store_file.write(|rows| {
            for (plan, reset) in plans.iter().zip(&resets) {
                plan.write_changes(rows, buffers, reset, now)?;
            }
            let sweep_rows = sweep_rows.max(rows.changed_count * SWEEP_ROWS_PER_CHANGE);
            let can_archive = can_archive(rows.row_count()?, &plans);
            rows.sweep(sweep_rows, now, |state_key, idle_at| sweep_action(state_key, idle_at, &plans, can_archive, now))
        });
        for (plan, reset) in plans.iter().zip(resets) {
            match written {
                Ok(_) => plan.is_reconciled.store(true, Relaxed),
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

    /// Updates `health` with the result, and logs each change between success and failure.
    fn record_result(&self, store_file: &StoreFile, written: Result<WriteSummary, FileError>) -> Result<(), FileError> {
        let mut health = self.health.lock();
        let was_failing = self.is_failing.swap(written.is_err(), Relaxed);
        match written {
            Ok(WriteSummary { any_changed, row_count }) => {
                if was_failing {
                    tracing::warn!(path = ?store_file.path, "the store is written again");
                }
                let commits = health.commits + u64::from(any_changed);
                *health = FileHealth { failure: None, commits, row_count };
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

/// Restores the states of the tags that are new in a plan. No other store among `plans` may have one of its tags.
fn restore_plan(
    store_file: &mut StoreFile,
    plans: &[Arc<PersistedPlan>],
    plan: &PersistedPlan,
) -> Result<(), FileError> {
    let others = plans.iter().filter(|other| !other.is_same_store(plan));
    let has_other = |tag| others.clone().any(|other| other.limit_id(tag).is_some());
    let repeated = plan.by_tag.windows(2).find(|pair| pair[0].0 == pair[1].0).map(|pair| pair[0].0);
    if let Some(tag) = repeated.or_else(|| plan.by_tag.iter().map(|(tag, _)| *tag).find(|tag| has_other(*tag))) {
        return Err(FileError::TagInUse { path: store_file.path.clone(), tag });
    }
    let mut unread = 0_u64;
    for &(tag, id, now) in &plan.restored_tags {
        store_file.visit_states(tag, |key_bits, encoded| {
            if !plan.restore(id, key_bits, encoded, now) {
                unread += 1;
            }
        })?;
    }
    if unread > 0 {
        tracing::warn!(path = ?store_file.path, unread, "states that can't be read were left out");
    }
    Ok(())
}

/// True if more rows past their end may be kept.
fn can_archive(rows: u64, plans: &[Arc<PersistedPlan>]) -> bool {
    let live_entries = || plans.iter().map(|plan| plan.shards.stats().entries as u64).sum::<u64>();
    rows <= archive::MAX_ARCHIVED_ROWS || rows - archive::MAX_ARCHIVED_ROWS <= live_entries()
}

/// Returns the action on a row: on a state, by its limit's tag and its key, or on an archived one.
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
        Some((plan, id, key_bits)) if plan.has_live_entry(id, key_bits, now) => SweepAction::Keep,
        Some((plan, id, _)) if is_over && is_kept && plan.is_quota(id) => SweepAction::Archive,
        Some(_) => SweepAction::Remove,
        // Archived, or of a policy that may come back.
        None if is_kept => SweepAction::Keep,
        None => SweepAction::Remove,
    }
}
