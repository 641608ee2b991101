//! The file behind one process's stores, and the thread that writes it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tidegate_core::{Outcomes, Span, Time};
use tokio::sync::watch;

use super::bell::{Bell, Lag};
use super::disk::{Disk, Fate, Written};
use super::plan::{Plan, Reset, Scratch};
use super::{FileError, Later, aside};
use crate::StoreError;
use crate::memory::Change;

/// How often a writer that nobody called looks over some rows, and how long it leaves a file alone that failed.
const IDLE: Duration = Duration::from_secs(1);
/// How many rows are looked over then.
const SWEPT_IDLE: usize = 16_384;
/// How many rows are looked over for each that was changed, so that rows which the memory has let go of never outnumber
/// the others; and how many at the least.
const SWEPT_PER_CHANGE: usize = 2;
const SWEPT_LEAST: usize = 256;

/// When what has changed is written to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Before a decision is told: a crash loses nothing.
    Always,
    /// This long after a change at the latest: a crash loses what was decided within so much time. Where the disk is
    /// slower, decisions wait for it as with [`Flush::Always`].
    Within(Duration),
}

impl Default for Flush {
    /// Within 100 ms.
    fn default() -> Self {
        Self::Within(Duration::from_millis(100))
    }
}

/// The behaviour while the file can't be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFull {
    /// Decisions go on in memory; a crash then loses what changed since.
    Continue,
    /// A decision that would change something is an error ([`StoreError::Unwritable`]); those that change nothing, as the
    /// refusals by a live block, are told. What is only told ([`Store::tell`](crate::Store::tell)) is taken note of.
    Deny,
}

impl OnFull {
    /// The default: with [`Flush::Always`] nothing is to be lost, so that it denies.
    pub fn of(flush: Flush) -> Self {
        match flush {
            Flush::Always => Self::Deny,
            Flush::Within(_) => Self::Continue,
        }
    }
}

/// How a file is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// Why it can't be written at present; a restart would lose what changed since in memory.
    pub failure: Option<String>,
    /// How often it was written.
    pub commits: u64,
    /// How many states it held then.
    pub rows: u64,
}

/// A file that outlives the process, for one or more [`FileStore`](super::FileStore)s. The last to let go of it writes
/// what is left.
pub struct Journal {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

/// What decisions share with the writer.
struct Shared {
    flush: Flush,
    on_full: OnFull,
    /// How far the file may lag behind decisions that don't wait for it.
    most_lag: Span,
    bell: Bell,
    lag: Lag,
    /// Decisions' time when it was last heard of.
    heard: AtomicU64,
    /// Locked after the disk, where both are.
    plans: Mutex<Vec<Arc<Plan>>>,
    disk: Mutex<(Disk, Scratch)>,
    /// How many writings were begun.
    begun: AtomicU64,
    /// The last that has ended.
    ended: watch::Sender<Ended>,
    failing: AtomicBool,
    health: Mutex<Health>,
}

/// A writing that has ended.
#[derive(Clone, Copy, Debug)]
struct Ended {
    writing: u64,
    /// True if the file has all that was decided before it.
    well: bool,
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal").field("flush", &self.shared.flush).field("health", &self.health()).finish()
    }
}

impl Journal {
    /// [`Journal::open_with`] what holds by default while the file can't be written ([`OnFull::of`]).
    ///
    /// # Errors
    /// [`FileError`]. The file is left as it was.
    pub fn open(path: &Path, flush: Flush) -> Result<Arc<Self>, FileError> {
        Self::open_with(path, flush, OnFull::of(flush))
    }

    /// Opens the file at `path`, and makes it if it isn't there. A symbolic link is followed; anything but a regular file is
    /// an error. The file is its owner's alone, also if it was there and others could read it: it holds a secret.
    ///
    /// # Errors
    /// [`FileError`]. The file is left as it was.
    pub fn open_with(path: &Path, flush: Flush, on_full: OnFull) -> Result<Arc<Self>, FileError> {
        Self::on(Disk::open(path)?, flush, on_full)
    }

    pub(super) fn on(mut disk: Disk, flush: Flush, on_full: OnFull) -> Result<Arc<Self>, FileError> {
        let health = Health { rows: disk.len()?, ..Health::default() };
        let most_lag = match flush {
            Flush::Always => Span::ZERO,
            Flush::Within(most) => Span::from_duration(most),
        };
        let path = disk.path().to_owned();
        let shared = Arc::new(Shared {
            flush,
            on_full,
            most_lag,
            bell: Bell::default(),
            lag: Lag::default(),
            heard: AtomicU64::new(0),
            plans: Mutex::default(),
            disk: Mutex::new((disk, Scratch::default())),
            begun: AtomicU64::new(0),
            ended: watch::Sender::new(Ended { writing: 0, well: true }),
            failing: AtomicBool::new(false),
            health: Mutex::new(health),
        });
        let writer = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("tidegate-file".to_owned()).spawn(move || writer.run());
        let writer = Some(thread.map_err(|source| FileError::Unusable { path, source })?);
        Ok(Arc::new(Self { shared, writer }))
    }

    /// The bytes under which keys are hashed that this file keeps: those in it, or if there are none this proposal, which
    /// then is kept there for good.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn seed(&self, proposal: [u8; 16]) -> Result<[u8; 16], FileError> {
        self.shared.disk().0.seed(proposal)
    }

    /// Writes what has changed, and waits for it.
    ///
    /// # Errors
    /// [`FileError`]: it is still to be written, and is tried again every second.
    pub fn flush(&self) -> Result<(), FileError> {
        self.shared.flush(SWEPT_LEAST)
    }

    /// How the file is doing.
    pub fn health(&self) -> Health {
        self.shared.health().clone()
    }

    /// Has the file keep a plan's states, and gives those that it kept to the plan.
    pub(super) fn admit(&self, plan: &Arc<Plan>, now: Time) -> Result<(), FileError> {
        self.heard(now);
        let mut disk = self.shared.disk();
        let disk = &mut disk.0;
        let mut plans = self.shared.plans.lock();
        let (mut last, mut unread) = (None, 0_u64);
        for tag in plan.tags() {
            if last.replace(tag) == Some(tag) || plans.iter().any(|plan| plan.limit(tag).is_some()) {
                return Err(FileError::Claimed { path: disk.path().to_owned(), tag });
            }
        }
        for tag in plan.tags() {
            if let Some(id) = plan.limit(tag) {
                disk.read(tag, |of_key, kept| {
                    if !plan.restore(id, of_key, kept) {
                        unread += 1;
                    }
                })?;
            }
        }
        if unread > 0 {
            tracing::warn!(path = ?disk.path(), unread, "states that can't be read were left out");
        }
        plans.push(Arc::clone(plan));
        Ok(())
    }

    /// Writes a plan's states down for the last time.
    pub(super) fn dismiss(&self, plan: &Arc<Plan>) {
        // Told in the log already if it failed.
        let _ = self.shared.flush(0);
        self.shared.plans.lock().retain(|kept| !Arc::ptr_eq(kept, plan));
    }

    pub(super) fn heard(&self, now: Time) {
        self.shared.heard.store(now.as_micros(), Relaxed);
    }

    /// Takes note of a decision at `now`, and says which writing it has to wait for, if any.
    #[inline]
    pub(super) fn note(&self, change: Change, now: Time) -> Option<u64> {
        let shared = &*self.shared;
        if !change.any {
            return None;
        }
        if change.new && shared.lag.begins(now) {
            self.heard(now);
            shared.bell.ring(|calls| calls.changed = true);
        }
        let waits = shared.flush == Flush::Always || shared.lag.exceeds(shared.most_lag, now);
        let goes_on = || shared.on_full == OnFull::Continue && shared.failing.load(Relaxed);
        (waits && !goes_on()).then(|| shared.begun.load(Relaxed) + 1)
    }

    /// True while nothing may change.
    #[inline]
    pub(super) fn denies(&self) -> bool {
        self.shared.failing.load(Relaxed) && self.shared.on_full == OnFull::Deny
    }

    /// Answers when the writing of that number has ended.
    pub(super) fn wait(&self, writing: u64, outcomes: Outcomes) -> Later {
        self.shared.bell.ring(|calls| calls.urgent = true);
        let mut ended = self.shared.ended.subscribe();
        let on_full = self.shared.on_full;
        Box::pin(async move {
            match ended.wait_for(|ended| ended.writing >= writing).await {
                // A later writing that ended well has what an earlier one failed to write.
                Ok(ended) if ended.well => Ok(outcomes),
                _ if on_full == OnFull::Continue => Ok(outcomes),
                _ => Err(StoreError::Unwritable),
            }
        })
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.shared.bell.ring(|calls| calls.closing = true);
        if let Some(writer) = self.writer.take() {
            // A writer that panicked has nothing more to write.
            let _ = writer.join();
        }
    }
}

impl Shared {
    fn disk(&self) -> MutexGuard<'_, (Disk, Scratch)> {
        self.disk.lock()
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock()
    }

    /// The writer's thread.
    fn run(&self) {
        loop {
            let delay = match self.flush {
                _ if self.failing.load(Relaxed) => IDLE,
                Flush::Always => Duration::ZERO,
                // The other half is for the writing itself.
                Flush::Within(most) => most / 2,
            };
            let calls = self.bell.wait(IDLE, delay);
            let sweep = if calls.changed || calls.urgent { SWEPT_LEAST } else { SWEPT_IDLE };
            // Told in the log and in `health`.
            let _ = self.flush(sweep);
            if calls.closing {
                return;
            }
        }
    }

    /// Writes what has changed, and looks over some rows.
    fn flush(&self, sweep: usize) -> Result<(), FileError> {
        let mut disk = self.disk();
        let (disk, scratch) = &mut *disk;
        // A decision that doesn't see this yet waits for this writing, and has let go of its shards, which are locked only
        // after this line. One that sees it waits for the next.
        let writing = self.begun.fetch_add(1, Relaxed) + 1;
        self.lag.writing();
        let plans = self.plans.lock().clone();
        let now = Time::from_micros(self.heard.load(Relaxed));
        let resets: Vec<Reset> = plans.iter().map(|plan| plan.take_resets()).collect();
        let written = disk.write(|rows| {
            for (plan, reset) in plans.iter().zip(&resets) {
                plan.write(rows, scratch, reset, now)?;
            }
            let sweep = sweep.max(rows.changed() * SWEPT_PER_CHANGE);
            let has_room = has_room(rows.len()?, &plans);
            rows.sweep(sweep, now, |whose, idle_at| fate(whose, idle_at, &plans, has_room, now))
        });
        for (plan, reset) in plans.iter().zip(resets) {
            match written {
                Ok(_) => plan.is_arranged(),
                Err(_) => {
                    plan.shards.note_all();
                    plan.keep_resets(reset);
                }
            }
        }
        let result = self.tell(disk, written);
        self.lag.written();
        self.ended.send_replace(Ended { writing, well: result.is_ok() });
        result
    }

    /// Says how it went: in the log when that is new.
    fn tell(&self, disk: &Disk, written: Result<Written, FileError>) -> Result<(), FileError> {
        let mut health = self.health();
        let was_failing = self.failing.swap(written.is_err(), Relaxed);
        match written {
            Ok(Written { any, rows }) => {
                if was_failing {
                    tracing::warn!(path = ?disk.path(), "the store is written again");
                }
                *health = Health { failure: None, commits: health.commits + u64::from(any), rows };
                Ok(())
            }
            Err(error) => {
                if !was_failing {
                    let then = match self.on_full {
                        OnFull::Continue => "decisions go on in memory",
                        OnFull::Deny => "nothing is admitted until it can",
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
fn has_room(rows: u64, plans: &[Arc<Plan>]) -> bool {
    let held = || plans.iter().map(|plan| plan.shards.stats().entries as u64).sum::<u64>();
    rows <= aside::MOST || rows - aside::MOST <= held()
}

/// The fate of a row: of a state, by its limit's tag and its key, or of one that is set aside.
fn fate(whose: Option<(u64, u64)>, idle_at: Time, plans: &[Arc<Plan>], has_room: bool, now: Time) -> Fate {
    let is_over = idle_at <= now;
    let is_kept = !is_over || has_room && idle_at + aside::KEPT > now;
    let known = whose.and_then(|(tag, of_key)| plans.iter().find_map(|plan| Some((plan, plan.limit(tag)?, of_key))));
    match known {
        Some((plan, id, of_key)) if plan.holds(id, of_key, now) => Fate::Stay,
        Some((plan, id, _)) if is_over && is_kept && plan.counts_periods(id) => Fate::Aside,
        Some(_) => Fate::Go,
        // Set aside, or of a policy that may come back.
        None if is_kept => Fate::Stay,
        None => Fate::Go,
    }
}
