//! A disk that fails.

use std::fs::File;
use std::io;
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};
use tidegate_core::batch::Outcome;
use tidegate_core::{
    Admission, Batch, Key, Limit, LimitId, LimitKind, Limits, Op, Penalty, PenaltySpec, Span, Time, Verb, Window,
};

use super::store_file::{StoreFile, builder};
use super::{FileStore, FlushMode, Journal, OnWriteFailure};
use crate::{Store, StoreError, StoreResponse};

/// A file on a disk that is full, or stops, while a flag says so.
#[derive(Debug)]
struct Faulty {
    file: FileBackend,
    faults: Faults,
}

#[derive(Clone, Debug, Default)]
struct Faults {
    full: Arc<AtomicBool>,
    still: Arc<AtomicBool>,
}

impl StorageBackend for Faulty {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        while self.faults.still.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if self.faults.full.load(SeqCst) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.file.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.file.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.file.try_lock_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.unlock_range(start, end)
    }
}

impl Faults {
    fn journal(&self, path: &Path, flush: FlushMode) -> Arc<Journal> {
        self.journal_with(path, flush, OnWriteFailure::default_for(flush))
    }

    fn journal_with(&self, path: &Path, flush: FlushMode, on_full: OnWriteFailure) -> Arc<Journal> {
        drop(Journal::open(path, flush).unwrap());
        let faults = self.clone();
        let open = move |path: &Path| {
            let file = File::options().read(true).write(true).open(path).map_err(redb::StorageError::Io)?;
            let backend = Faulty { file: FileBackend::new(file)?, faults: faults.clone() };
            Ok(builder().create_with_backend(backend)?)
        };
        Journal::with_file(StoreFile::with_opener(path, Box::new(open)), flush, on_full).unwrap()
    }
}

fn store(journal: &Arc<Journal>) -> FileStore {
    let window = Window::new(100, Span::from_secs(3600), 128).unwrap();
    let limits = Limits::with_limit(Limit::new(LimitKind::Window(window)));
    FileStore::new(Arc::new(limits), 1 << 20, journal, at(0)).unwrap()
}

fn at(millis: u64) -> Time {
    Time::from_secs(1_700_000_000) + Span::from_millis(millis)
}

fn batch(verb: Verb) -> Batch {
    Batch::with_op(1, Op::new(LimitId::FIRST, verb, Key::new(1, 0x1234_5678_9abc_def0), 1))
}

fn ask(store: &FileStore, verb: Verb, now: Time) -> StoreResponse<super::FileStoreFuture> {
    store.apply(&batch(verb), now)
}

fn ready(answer: StoreResponse<super::FileStoreFuture>) -> Outcome {
    answered(answer).now_or_never().expect("it needn't wait for the disk").unwrap()
}

async fn later(answer: StoreResponse<super::FileStoreFuture>) -> Outcome {
    match answer {
        StoreResponse::Ready(_) => panic!("does not wait for the disk"),
        StoreResponse::Pending(later) => later.await.unwrap().list()[0],
    }
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.unwrap_or_else(|_| panic!("never {what}"));
}

/// The log of all tests of this process.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Returns the number of lines about a file that contain `what`.
    fn lines(&self, path: &Path, what: &str) -> usize {
        let path = path.to_str().unwrap();
        let text = self.0.lock();
        String::from_utf8_lossy(&text).lines().filter(|line| line.contains(path) && line.contains(what)).count()
    }
}

/// With [`OnFull::Continue`], decisions go on while the disk is full. The log says so once, and once when writing works
/// again. Then the file has all decisions.
#[tokio::test]
async fn a_full_disk_continues_decisions_if_configured() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("full");
    let faults = Faults::default();
    let journal = faults.journal_with(&path, FlushMode::Always, OnWriteFailure::Continue);
    let kept = store(&journal);
    later(ask(&kept, Verb::Take, at(0))).await;
    assert_eq!(journal.health().failure, None);

    faults.full.store(true, SeqCst);
    // Until the failure is known, the decision waits for a writing.
    let second = match ask(&kept, Verb::Take, at(1)) {
        waits @ StoreResponse::Pending(_) => later(waits).await,
        told @ StoreResponse::Ready(_) => ready(told),
    };
    assert_eq!(second.used, 2);
    assert!(journal.health().failure.is_some());
    for call in 3..=50 {
        assert_eq!(ready(ask(&kept, Verb::Take, at(call))).used, call);
    }
    assert!(journal.flush().is_err() && journal.flush().is_err());
    assert_eq!((log.lines(&path, "can't be written"), log.lines(&path, "is written again")), (1, 0));

    faults.full.store(false, SeqCst);
    until("well again", || journal.health().failure.is_none()).await;
    assert_eq!(later(ask(&kept, Verb::Take, at(60))).await.used, 51);
    assert_eq!((log.lines(&path, "can't be written"), log.lines(&path, "is written again")), (1, 1));
    drop((kept, journal));
    let kept = store(&Journal::open(&path, FlushMode::default()).unwrap());
    assert_eq!(ready(ask(&kept, Verb::Peek, at(61))).used, 51);
}

async fn answered(answer: StoreResponse<super::FileStoreFuture>) -> Result<Outcome, StoreError> {
    match answer {
        StoreResponse::Ready(outcomes) => Ok(outcomes.list()[0]),
        StoreResponse::Pending(later) => later.await.map(|outcomes| outcomes.list()[0]),
    }
}

/// With [`OnFull::Deny`], a full disk admits nothing. Operations that change nothing are answered, and told refunds are
/// counted. Afterwards the file has all that was admitted. Free space is noticed without a call.
#[tokio::test]
async fn a_full_disk_admits_nothing_under_deny() {
    for flush in [FlushMode::Always, FlushMode::Within(Duration::from_millis(20))] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("denies");
        let faults = Faults::default();
        let journal = faults.journal_with(&path, flush, OnWriteFailure::Deny);
        let kept = store(&journal);
        let mut admitted = 0;
        for call in 0..10 {
            admitted += u64::from(answered(ask(&kept, Verb::Take, at(call))).await.is_ok());
        }
        assert_eq!(admitted, 10);

        faults.full.store(true, SeqCst);
        let mut counted = 10;
        // Until the failure is known, a decision waits for a writing, or is returned although it may be lost.
        while !journal.denies_changes() {
            counted += 1;
            admitted += u64::from(answered(ask(&kept, Verb::Take, at(counted))).await.is_ok());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if flush == FlushMode::Always {
            assert_eq!((admitted, counted), (10, 11), "it isn't told what the file doesn't have");
        }
        for call in 0..100 {
            for verb in [Verb::Take, Verb::Refund, Verb::Reset, Verb::Debit] {
                let denied = answered(ask(&kept, verb, at(100 + call))).await;
                assert!(matches!(denied, Err(StoreError::Unwritable)), "{verb:?}: {denied:?}");
            }
        }
        assert_eq!(ready(ask(&kept, Verb::Peek, at(200))).used, counted, "a look is answered, and nothing was changed");
        kept.submit(&batch(Verb::Refund), at(200));
        assert_eq!(ready(ask(&kept, Verb::Peek, at(201))).used, counted - 1);

        faults.full.store(false, SeqCst);
        until("well again", || !journal.denies_changes()).await;
        answered(ask(&kept, Verb::Take, at(300))).await.unwrap();
        drop((kept, journal));
        let kept = store(&Journal::open(&path, FlushMode::default()).unwrap());
        assert_eq!(ready(ask(&kept, Verb::Peek, at(400))).used, counted);
    }
}

/// A refusal that changes nothing is returned while the disk is full, and so is a refusal by a live block.
#[tokio::test]
async fn refusals_are_answered_despite_a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let journal = faults.journal(&folder.path().join("refuses"), FlushMode::Always);
    let window = || LimitKind::Window(Window::new(1, Span::from_secs(3600), 8).unwrap());
    let penalty = Penalty::new(PenaltySpec::default(), Span::from_secs(3600)).unwrap();
    let limits =
        Limits::new(vec![Limit::new(window()).with_tag(1), Limit::new(window()).with_tag(2).with_penalty(penalty)]);
    let kept = FileStore::new(Arc::new(limits.unwrap()), 1 << 20, &journal, at(0)).unwrap();
    let take = |limit: usize, key: u64, now| {
        let limit = LimitId::from_index(limit).unwrap();
        kept.apply(&Batch::with_op(1, Op::new(limit, Verb::Take, Key::new(1, key << 48 | key), 1)), now)
    };
    for key in [1, 2] {
        for limit in [0, 1] {
            later(take(limit, key, at(0))).await;
        }
    }
    // The second limit has a block of the first key; of the second key it is only full.
    assert!(later(take(1, 1, at(1))).await.admission.refuses());
    faults.full.store(true, SeqCst);
    assert!(matches!(answered(take(0, 3, at(2))).await, Err(StoreError::Unwritable)));
    assert_eq!(ready(take(0, 1, at(3))).admission, Admission::Refused);
    assert_eq!(ready(take(1, 1, at(4))).admission, Admission::Blocked);
    let strike = answered(take(1, 2, at(5))).await;
    assert!(matches!(strike, Err(StoreError::Unwritable)), "{strike:?}");
}

/// Of decisions that wait together, none is returned before the file has all of them. A refusal doesn't wait.
#[tokio::test]
async fn durable_decisions_wait_for_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let journal = faults.journal(&folder.path().join("slow"), FlushMode::Always);
    let kept = store(&journal);
    faults.still.store(true, SeqCst);
    let answers: Vec<_> = (0..100).map(|_| tokio::spawn(later(ask(&kept, Verb::Take, at(0))))).collect();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(answers.iter().all(|answer| !answer.is_finished()));
    assert!(ready(ask(&kept, Verb::Take, at(0))).admission.refuses());
    assert_eq!(ready(ask(&kept, Verb::Peek, at(0))).used, 100);
    faults.still.store(false, SeqCst);
    for answer in answers {
        answer.await.unwrap();
    }
    let commits = journal.health().commits;
    assert!((1..=3).contains(&commits), "a hundred decisions in {commits} writings");
}

/// A disk that falls behind by more than may be lost makes decisions wait. They go on when it has caught up.
#[tokio::test]
async fn a_slow_disk_delays_decisions() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let journal = faults.journal(&folder.path().join("behind"), FlushMode::Within(Duration::from_millis(100)));
    let kept = store(&journal);
    faults.still.store(true, SeqCst);
    for call in 0..=100 {
        if call % 10 == 0 {
            ready(ask(&kept, Verb::Peek, at(call)));
        } else {
            ready(ask(&kept, Verb::Take, at(call)));
        }
    }
    let waits = tokio::spawn(later(ask(&kept, Verb::Take, at(102))));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!waits.is_finished());
    faults.still.store(false, SeqCst);
    assert_eq!(waits.await.unwrap().used, 91);
    until("caught up", || {
        journal.flush().is_ok() && matches!(ask(&kept, Verb::Take, at(300)), StoreResponse::Ready(_))
    })
    .await;
}
