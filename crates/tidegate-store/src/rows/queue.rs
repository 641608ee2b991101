//! Who waits for a store with rows, and which of them are carried out together.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::future::Future;
use std::sync::Arc;

use arrayvec::ArrayVec;
use parking_lot::{Mutex, MutexGuard};
use tidegate_core::backoff::{Backoff, BackoffState};
use tidegate_core::batch::MAX_OPS;
use tidegate_core::{Batch, LimitId, Limits, Outcomes, Span, Time, Verb};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::{Fault, GROUP_WITHIN, RowKey};
use crate::{StoreError, Waiting};

/// The most callers that wait for their group; who comes then fails at once.
const QUEUE: usize = 4096;
/// The most rows of one group.
pub(crate) const GROUP_ROWS: usize = 256;
/// The most callers of one group.
const GROUP_CALLS: usize = 256;
/// How often a group that met another node's is tried while somebody waits for it, and after which waits: for about a
/// second in all.
const TRIES: u32 = 32;
const BACKOFF: Backoff = Backoff::exponential(Span::from_millis(2), Span::from_millis(64));

/// What carries groups out: one server's way to lock, load and write rows.
pub(crate) trait Driver: Send + Sync + 'static {
    /// Whether only batches over the very same rows go together.
    const SAME_ROWS: bool;

    /// Carries out all batches of a group, as if one after the other, and says what came of each.
    ///
    /// # Errors
    /// A [`Fault`], for all of them.
    fn carry(
        &self,
        limits: &Limits,
        group: &Group,
    ) -> impl Future<Output = Result<Vec<Result<Outcomes, StoreError>>, Fault>> + Send;
}

/// A batch whose caller waits.
pub(crate) struct Call {
    batch: Batch,
    now: Time,
    keys: ArrayVec<(RowKey, LimitId), MAX_OPS>,
    looks: bool,
    answer: oneshot::Sender<Result<Outcomes, StoreError>>,
}

impl Call {
    pub(crate) fn batch(&self) -> &Batch {
        &self.batch
    }

    /// The moment that the caller told.
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// The rows that it is about.
    pub(crate) fn keys(&self) -> &[(RowKey, LimitId)] {
        &self.keys
    }

    /// Whether carrying it out would serve nobody. What gives something back serves others.
    fn is_moot(&self) -> bool {
        self.answer.is_closed() && self.batch.ops().iter().all(|op| matches!(op.verb, Verb::Take | Verb::Peek))
    }
}

/// Batches that are carried out together.
#[expect(clippy::vec_box, reason = "a call is half a kilobyte, and goes from list to list")]
pub(crate) struct Group {
    calls: Vec<Box<Call>>,
    keys: Vec<(RowKey, LimitId)>,
    looks: bool,
}

impl Group {
    pub(crate) fn calls(&self) -> &[Box<Call>] {
        &self.calls
    }

    /// The rows of all its batches, each once, in key order.
    pub(crate) fn keys(&self) -> &[(RowKey, LimitId)] {
        &self.keys
    }

    /// Whether none of its batches changes anything.
    pub(crate) fn looks(&self) -> bool {
        self.looks
    }

    fn answer(self, answers: Vec<Result<Outcomes, StoreError>>) {
        for (call, answer) in self.calls.into_iter().zip(answers) {
            let _ = call.answer.send(answer);
        }
    }

    fn fail(self, error: &StoreError) {
        refuse(self.calls, error);
    }
}

fn refuse(calls: impl IntoIterator<Item = Box<Call>>, error: &StoreError) {
    for call in calls {
        let _ = call.answer.send(Err(error.clone()));
    }
}

/// The callers of a store with rows, and those who carry their batches out.
pub(crate) struct Engine<D>(Arc<Shared<D>>);

struct Shared<D> {
    driver: Arc<D>,
    limits: Arc<Limits>,
    /// The most groups at once.
    most: usize,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Box<Call>>,
    /// The rows of groups under way that change some: a batch over one of them waits for that group and not for the
    /// server's lock.
    busy: HashSet<RowKey>,
    /// Tasks that carry out one group after the other as long as there are any.
    leaders: usize,
}

impl<D: Driver> Engine<D> {
    /// Nothing is started before the first batch.
    pub(crate) fn new(driver: D, limits: Arc<Limits>, most: usize) -> Self {
        Self(Arc::new(Shared { driver: Arc::new(driver), limits, most, queue: Mutex::default() }))
    }

    /// What carries its groups out, to be asked for what is no batch.
    pub(crate) fn driver(&self) -> Arc<D> {
        Arc::clone(&self.0.driver)
    }

    pub(crate) fn limits(&self) -> &Arc<Limits> {
        &self.0.limits
    }

    /// Carries out a batch together with others. It waits in line from the first poll on.
    pub(crate) fn ask(&self, batch: &Batch, now: Time) -> Waiting<Outcomes> {
        let (shared, batch) = (Arc::clone(&self.0), batch.clone());
        Box::pin(async move {
            let (sender, answer) = oneshot::channel();
            shared.line_up(batch, now, sender)?;
            answer.await.unwrap_or_else(|_| Err(StoreError::Failed("nobody was left to ask it".into())))
        })
    }
}

impl<D: Driver> Shared<D> {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    fn line_up(
        self: &Arc<Self>,
        batch: Batch,
        now: Time,
        answer: oneshot::Sender<Result<Outcomes, StoreError>>,
    ) -> Result<(), StoreError> {
        let runtime = Handle::try_current().map_err(|_| StoreError::Failed("asked outside a tokio runtime".into()))?;
        let known = batch.ops().iter().filter(|op| self.limits.get(op.limit).is_some());
        let keys: ArrayVec<_, MAX_OPS> =
            known.map(|op| (RowKey::new(self.limits.tag(op.limit), op.key), op.limit)).collect();
        // What is about no row can change none.
        let looks = keys.is_empty() || batch.ops().iter().all(|op| op.verb == Verb::Peek);
        let call = Box::new(Call { batch, now, keys, looks, answer });
        let mut queue = self.queue();
        if queue.waiting.len() >= QUEUE {
            return Err(StoreError::Failed(format!("{QUEUE} calls wait for it already")));
        }
        // Whoever has a busy row looks into the queue again when it is done with it.
        let wants_leader = queue.leaders < self.most && (looks || !queue.is_busy(&call));
        queue.waiting.push_back(call);
        if wants_leader {
            queue.leaders += 1;
            let leader = Leader { shared: Arc::clone(self), leads: true, rows: Vec::new() };
            drop(queue);
            runtime.spawn(leader.lead());
        }
        Ok(())
    }
}

impl Queue {
    fn is_busy(&self, call: &Call) -> bool {
        call.keys.iter().any(|(key, _)| self.busy.contains(key))
    }

    /// The first call whose rows nobody has, and those behind it that go with it. Nobody who changes a row overtakes
    /// another who does.
    fn next_group(&mut self, same_rows: bool) -> Option<Group> {
        let mut calls: Vec<Box<Call>> = Vec::new();
        let mut keys = BTreeMap::new();
        let mut passed_over = Vec::new();
        let mut wanted = HashSet::new();
        while let Some(call) = self.waiting.pop_front() {
            if call.is_moot() {
                continue;
            }
            let new = call.keys.iter().filter(|(key, _)| !keys.contains_key(key)).count();
            let fits = calls.first().is_none_or(|first| {
                let alike = first.looks == call.looks && (new == 0 || !same_rows);
                alike && keys.len() + new <= GROUP_ROWS
            });
            let free = call.looks || !call.keys.iter().any(|(key, _)| self.busy.contains(key) || wanted.contains(key));
            if fits && free {
                keys.extend(call.keys.iter().copied());
                calls.push(call);
                if calls.len() == GROUP_CALLS {
                    break;
                }
            } else {
                if !call.looks {
                    wanted.extend(call.keys.iter().map(|(key, _)| *key));
                }
                passed_over.push(call);
            }
        }
        for call in passed_over.into_iter().rev() {
            self.waiting.push_front(call);
        }
        let looks = calls.first()?.looks;
        if !looks {
            self.busy.extend(keys.keys());
        }
        Some(Group { calls, keys: keys.into_iter().collect(), looks })
    }
}

/// A task that carries out groups, and the rows that it has.
struct Leader<D: Driver> {
    shared: Arc<Shared<D>>,
    leads: bool,
    rows: Vec<RowKey>,
}

impl<D: Driver> Leader<D> {
    async fn lead(mut self) {
        while let Some(group) = self.next() {
            self.carry(group).await;
        }
    }

    fn next(&mut self) -> Option<Group> {
        let mut queue = self.shared.queue();
        for row in self.rows.drain(..) {
            queue.busy.remove(&row);
        }
        let Some(group) = queue.next_group(D::SAME_ROWS) else {
            // Under the same lock, so that whoever lines up next sees that nobody leads.
            queue.leaders -= 1;
            self.leads = false;
            return None;
        };
        if !group.looks {
            self.rows.extend(group.keys.iter().map(|(key, _)| *key));
        }
        Some(group)
    }

    async fn carry(&self, group: Group) {
        let mut waits = BackoffState::default();
        let mut tries = TRIES;
        let fault = loop {
            let carried = tokio::time::timeout(GROUP_WITHIN, self.shared.driver.carry(&self.shared.limits, &group));
            tries -= 1;
            match carried.await {
                Ok(Ok(answers)) => return group.answer(answers),
                Err(_) => return group.fail(&StoreError::Timeout(GROUP_WITHIN)),
                Ok(Err(Fault::Conflict(_))) if tries > 0 && !group.calls.iter().all(|call| call.is_moot()) => {
                    let wait = waits.next(&BACKOFF, &mut rand::rng());
                    tokio::time::sleep(wait.as_duration()).await;
                }
                Ok(Err(Fault::Broken(_))) if tries > 0 => {}
                Ok(Err(fault)) => break fault,
            }
        };
        let unreachable = matches!(fault, Fault::Unreachable(_));
        let error = StoreError::from(fault);
        group.fail(&error);
        if unreachable {
            let waiting = std::mem::take(&mut self.shared.queue().waiting);
            refuse(waiting, &error);
        }
    }
}

impl<D: Driver> Drop for Leader<D> {
    fn drop(&mut self) {
        if !self.leads {
            return;
        }
        let mut queue = self.shared.queue();
        queue.leaders -= 1;
        for row in &self.rows {
            queue.busy.remove(row);
        }
    }
}

#[cfg(test)]
mod tests;
