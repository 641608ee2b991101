//! The forming of groups, tested with a driver that executes a group only when the test permits it.

use std::future::Future;
use std::sync::Arc;

use parking_lot::Mutex;
use tidegate_core::{Batch, Key, KeyState, Limit, LimitId, LimitKind, Limits, Op, Outcomes, Span, Time, Verb, Window};
use tidegate_testkit::random::RandomSource;
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::{BatchGroup, GroupDriver, GroupExecutor, MAX_WAITING_BATCHES};
use crate::rows::loaded_rows::{LoadedRows, RowChange};
use crate::rows::{DecisionClock, GroupError, RowKey};
use crate::{StoreError, TimeSource};

/// A driver without rows.
#[derive(Default)]
struct Fake<const SAME_ROWS: bool> {
    /// One permit for each group.
    gate: Option<Semaphore>,
    /// The errors of the next groups.
    faults: Mutex<Vec<GroupError>>,
    /// The keys of running groups.
    busy: Mutex<Vec<RowKey>>,
    /// The number of batches and of rows of each group.
    groups: Mutex<Vec<(usize, usize)>>,
}

impl<const SAME_ROWS: bool> Fake<SAME_ROWS> {
    fn shut() -> Self {
        Self { gate: Some(Semaphore::new(0)), ..Self::default() }
    }

    fn groups(&self) -> Vec<(usize, usize)> {
        self.groups.lock().clone()
    }
}

impl<const SAME_ROWS: bool> GroupDriver for Fake<SAME_ROWS> {
    const REQUIRES_SAME_ROWS: bool = SAME_ROWS;

    async fn execute(
        &self,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<Vec<Result<Outcomes, StoreError>>, GroupError> {
        self.groups.lock().push((group.batches.len(), group.keys.len()));
        let keys = group.keys.iter().copied().filter(|_| !group.is_read_only);
        for key in keys.clone() {
            let mut busy = self.busy.lock();
            assert!(!busy.contains(&key), "two groups have one row");
            busy.push(key);
        }
        match &self.gate {
            Some(gate) => gate.acquire().await.unwrap().forget(),
            None => tokio::task::yield_now().await,
        }
        self.busy.lock().retain(|busy| !keys.clone().any(|key| key == *busy));
        if let Some(fault) = self.faults.lock().pop() {
            return Err(fault);
        }
        Ok(LoadedRows::execute(limits, group, [], &caller_clock(), Time::ZERO).0)
    }
}

fn caller_clock() -> DecisionClock {
    DecisionClock::new(TimeSource::Caller)
}

fn engine<const SAME_ROWS: bool>(driver: Fake<SAME_ROWS>, most: usize) -> GroupExecutor<Fake<SAME_ROWS>> {
    let window = Window::new(10, Span::from_secs(60), 64).unwrap();
    GroupExecutor::new(driver, Arc::new(Limits::with_limit(Limit::new(LimitKind::Window(window)))), most)
}

fn batch(verb: Verb, keys: &[u64]) -> Batch {
    let mut batch = Batch::new(0);
    for key in keys {
        batch.push(Op::new(LimitId::FIRST, verb, Key::new(0, *key), 1)).unwrap();
    }
    batch
}

type Asked = JoinHandle<Result<Outcomes, StoreError>>;

/// Sends a batch, and waits until it is queued.
async fn ask<D: GroupDriver>(engine: &GroupExecutor<D>, batch: &Batch) -> Asked {
    let asked = tokio::spawn(engine.apply(batch, Time::from_secs(1)));
    for _ in 0..3 {
        tokio::task::yield_now().await;
    }
    asked
}

fn run(test: impl Future<Output = ()>) {
    Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}

#[test]
fn requests_waiting_for_a_row_are_grouped() {
    run(async {
        let engine = engine(Fake::<false>::shut(), 8);
        let mut asked = vec![ask(&engine, &batch(Verb::Take, &[1])).await];
        for key in 2..12 {
            asked.push(ask(&engine, &batch(Verb::Take, &[1, key])).await);
        }
        assert_eq!(engine.driver().groups(), [(1, 1)]);
        engine.driver().gate.as_ref().unwrap().add_permits(2);
        for asked in asked {
            assert!(asked.await.unwrap().is_ok());
        }
        assert_eq!(engine.driver().groups(), [(1, 1), (10, 11)]);
    });
}

#[test]
fn different_row_sets_are_grouped_separately() {
    run(async {
        let engine = engine(Fake::<true>::shut(), 1);
        let mut asked = Vec::new();
        for keys in [&[9][..], &[1, 2], &[2, 1], &[1, 2, 3], &[1], &[4]] {
            asked.push(ask(&engine, &batch(Verb::Take, keys)).await);
        }
        engine.driver().gate.as_ref().unwrap().add_permits(9);
        for asked in asked {
            assert!(asked.await.unwrap().is_ok());
        }
        // The last but one waits behind the third, because it needs the same row. The last is independent.
        assert_eq!(engine.driver().groups(), [(1, 1), (2, 2), (2, 3), (1, 1)]);
    });
}

#[test]
fn cancelled_takes_are_dropped_but_refunds_kept() {
    run(async {
        let engine = engine(Fake::<false>::shut(), 1);
        let first = ask(&engine, &batch(Verb::Take, &[1])).await;
        let gone = [Verb::Take, Verb::Peek, Verb::Refund, Verb::Release];
        for verb in gone {
            let asked = ask(&engine, &batch(verb, &[1])).await;
            asked.abort();
            assert!(asked.await.unwrap_err().is_cancelled());
        }
        engine.driver().gate.as_ref().unwrap().add_permits(9);
        first.await.unwrap().unwrap();
        ask(&engine, &batch(Verb::Take, &[2])).await.await.unwrap().unwrap();
        assert_eq!(engine.driver().groups(), [(1, 1), (2, 1), (1, 1)]);
    });
}

#[test]
fn a_full_queue_refuses_immediately() {
    run(async {
        let engine = engine(Fake::<false>::shut(), 1);
        let first = ask(&engine, &batch(Verb::Take, &[1])).await;
        let waiting: Vec<Asked> = (0..MAX_WAITING_BATCHES)
            .map(|_| tokio::spawn(engine.apply(&batch(Verb::Take, &[1]), Time::from_secs(1))))
            .collect();
        tokio::task::yield_now().await;
        assert!(matches!(ask(&engine, &batch(Verb::Take, &[1])).await.await.unwrap(), Err(StoreError::Failed(_))));
        engine.driver().gate.as_ref().unwrap().add_permits(MAX_WAITING_BATCHES);
        first.await.unwrap().unwrap();
        for asked in waiting {
            asked.await.unwrap().unwrap();
        }
    });
}

#[test]
fn conflicts_are_retried_and_failures_reported() {
    run(async {
        let engine = engine(Fake::<false>::default(), 1);
        let faults = [GroupError::Conflict("deadlock".into()), GroupError::ConnectionLost("gone".into())];
        engine.driver().faults.lock().extend(faults);
        ask(&engine, &batch(Verb::Take, &[1])).await.await.unwrap().unwrap();
        assert_eq!(engine.driver().groups().len(), 3);
        engine.driver().faults.lock().push(GroupError::Failed("no such table".into()));
        let error = ask(&engine, &batch(Verb::Take, &[1])).await.await.unwrap().unwrap_err();
        assert_eq!(error.to_string(), "the store failed: no such table");
        assert_eq!(engine.driver().groups().len(), 4);
    });
}

#[test]
fn an_unreachable_server_fails_all_waiting_requests() {
    run(async {
        let engine = engine(Fake::<false>::shut(), 1);
        let first = ask(&engine, &batch(Verb::Take, &[1])).await;
        let second = ask(&engine, &batch(Verb::Take, &[1])).await;
        engine.driver().faults.lock().push(GroupError::Unreachable("nobody".into()));
        engine.driver().gate.as_ref().unwrap().add_permits(1);
        assert!(first.await.unwrap().is_err() && second.await.unwrap().is_err());
        assert_eq!(engine.driver().groups().len(), 1);
    });
}

/// A driver that finds one readable row and one unreadable row.
#[derive(Default)]
struct Foreign(Mutex<Vec<RowChange>>);

impl GroupDriver for Foreign {
    const REQUIRES_SAME_ROWS: bool = false;

    async fn execute(
        &self,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<Vec<Result<Outcomes, StoreError>>, GroupError> {
        let mut known = Vec::new();
        KeyState::default().encode(&mut known);
        let bytes = [known, vec![0xff, 1]];
        let stored = group.keys.iter().copied().zip(bytes);
        let (answers, rows) = LoadedRows::execute(limits, group, stored, &caller_clock(), Time::ZERO);
        *self.0.lock() = rows.changes();
        Ok(answers)
    }
}

#[test]
fn an_unreadable_row_is_an_error_and_unchanged() {
    run(async {
        let window = Window::new(10, Span::from_secs(60), 64).unwrap();
        let limits = Arc::new(Limits::with_limit(Limit::new(LimitKind::Window(window))));
        let engine = GroupExecutor::new(Foreign::default(), limits, 1);
        let both = engine.apply(&batch(Verb::Take, &[1, 2]), Time::from_secs(1)).await;
        assert!(matches!(both, Err(StoreError::Failed(_))));
        assert_eq!(*engine.driver().0.lock(), [RowChange::Keep, RowChange::Keep]);
        engine.apply(&batch(Verb::Take, &[1]), Time::from_secs(1)).await.unwrap();
        assert!(matches!(engine.driver().0.lock()[..], [RowChange::Write(..)]));
    });
}

/// Many callers over few rows: each gets an answer. The driver checks that no row is in two groups at a time.
#[test]
fn every_request_is_answered() {
    run(async {
        let engine = engine(Fake::<false>::default(), 4);
        let mut random = RandomSource::from_seed(1);
        let mut asked = Vec::new();
        for _ in 0..2_000 {
            let keys: Vec<u64> = (0..random.between(1, 4)).map(|_| random.below(12)).collect();
            let verb = random.pick(&[Verb::Take, Verb::Take, Verb::Peek]);
            asked.push(tokio::spawn(engine.apply(&batch(verb, &keys), Time::from_secs(1))));
            if random.chance(20) {
                tokio::task::yield_now().await;
            }
        }
        for asked in asked {
            asked.await.unwrap().unwrap();
        }
    });
}
