//! Decisions that come faster than the server answers are asked together, in one script: most of what a decision costs
//! the server is to be asked at all.
//!
//! Who comes while no question is under way goes by itself. Who comes later goes with those who are about to ask in the
//! same runtime; and while a few commands are under way, waits until one of them is answered, or briefly. Those who ask
//! for the same, and differ by their keys alone, go as one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{ErrorKind, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::timeout;

use super::Shared;
use super::link::LinkError;
use super::question::Parcel;
use crate::StoreError;

/// How many commands are on their way before others wait.
const UNDER_WAY: usize = 8;
/// How many decisions go at a time: enough to share what a script costs, and few enough that the node can prepare some
/// while the server decides others.
const TOGETHER: usize = 32;
/// How long they wait where no answer comes: the way there is long, and the server may well be idle.
const BRIEFLY: Duration = Duration::from_millis(2);
/// How many wait at most; more go by themselves, and wait for the connection.
const WAITING: usize = 16_384;

#[derive(Default)]
pub(super) struct Together {
    queue: Mutex<Queue>,
    /// The server divides its keys, though its address doesn't say so.
    is_divided: AtomicBool,
}

#[derive(Default)]
struct Queue {
    under_way: usize,
    waiting: VecDeque<Waiter>,
}

/// An empty answer: it is to go by itself.
type Answer = Result<Vec<u8>, StoreError>;

struct Waiter {
    /// Of the script that it needs.
    code: u16,
    parcel: Parcel,
    tells: oneshot::Sender<Answer>,
}

/// How a question goes.
pub(super) enum Turn {
    /// By itself; the next ones go when this is dropped.
    Alone(Option<Place>),
    /// It went with others, and this is its answer.
    Told(Vec<u8>),
}

/// What came of asking for a place.
enum Entry {
    Alone(Option<Place>),
    Waits { told: oneshot::Receiver<Answer>, is_first: bool },
}

/// One of the commands that may be on their way.
pub(super) struct Place {
    shared: Arc<Shared>,
    /// Whether it is a task's of ours that is dropped before it has ended: its runtime ends.
    is_cut_off: bool,
}

impl Together {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter {
    fn asks_as(&self, other: &Self) -> bool {
        self.code == other.code && self.parcel.asks() == other.parcel.asks()
    }
}

impl Queue {
    /// Those who have waited longest; together those who ask for the same. Who went away meanwhile isn't asked for.
    fn next(&mut self) -> Vec<Vec<Waiter>> {
        let (mut groups, mut count) = (Vec::<Vec<Waiter>>::new(), 0);
        while count < TOGETHER
            && let Some(waiter) = self.waiting.pop_front()
        {
            if waiter.tells.is_closed() {
                continue;
            }
            count += 1;
            match groups.iter_mut().find(|group| group.first().is_some_and(|first| first.asks_as(&waiter))) {
                Some(group) => group.push(waiter),
                None => groups.push(vec![waiter]),
            }
        }
        groups
    }
}

impl Shared {
    /// Has a question for a quick script wait for its turn.
    pub(super) async fn turn(self: &Arc<Self>, code: u16, parcel: impl FnOnce() -> Parcel) -> Result<Turn, StoreError> {
        // In a cluster keys of different batches seldom lie in one slot.
        if self.link.is_divided() || self.together.is_divided.load(Ordering::Relaxed) {
            return Ok(Turn::Alone(None));
        }
        let (mut told, is_first) = match self.enter(code, parcel) {
            Entry::Alone(place) => return Ok(Turn::Alone(place)),
            Entry::Waits { told, is_first } => (told, is_first),
        };
        let answer = async {
            if is_first {
                if let Ok(answer) = timeout(BRIEFLY, &mut told).await {
                    return answer;
                }
                self.hurry();
            }
            told.await
        };
        // It is in others' hands, and their runtime may stand still.
        let patience = self.patience.connect + self.patience.answer;
        let answer = timeout(patience, answer).await.map_err(|_| StoreError::Timeout(patience))?;
        let bytes = answer.map_err(|_| StoreError::Failed("the runtime that asked has ended".into()))??;
        Ok(if bytes.is_empty() { Turn::Alone(None) } else { Turn::Told(bytes) })
    }

    fn enter(self: &Arc<Self>, code: u16, parcel: impl FnOnce() -> Parcel) -> Entry {
        let Ok(runtime) = Handle::try_current() else { return Entry::Alone(None) };
        let mut queue = self.together.queue();
        // Nobody else asks: there is nothing to wait for.
        if queue.under_way == 0 {
            queue.under_way = 1;
            return Entry::Alone(Some(Place { shared: Arc::clone(self), is_cut_off: false }));
        }
        drop(queue);
        let parcel = parcel();
        let (tells, told) = oneshot::channel();
        let mut queue = self.together.queue();
        let count = queue.waiting.len();
        if count >= WAITING {
            return Entry::Alone(None);
        }
        queue.waiting.push_back(Waiter { code, parcel, tells });
        if queue.under_way < UNDER_WAY {
            queue.under_way += 1;
            drop(queue);
            runtime.spawn(Place { shared: Arc::clone(self), is_cut_off: true }.gather());
        }
        Entry::Waits { told, is_first: count == 0 }
    }

    /// Lets all go who wait.
    fn hurry(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        loop {
            let queue = self.together.queue();
            if queue.waiting.is_empty() {
                return;
            }
            self.dispatch(queue, &runtime);
        }
    }

    /// Sends those who go next on their way.
    fn dispatch(self: &Arc<Self>, mut queue: MutexGuard<'_, Queue>, runtime: &Handle) {
        let groups = queue.next();
        queue.under_way += groups.len();
        drop(queue);
        for group in groups {
            runtime.spawn(Place { shared: Arc::clone(self), is_cut_off: true }.send(group));
        }
    }

    async fn ask_together(&self, group: &[Waiter]) -> Result<Vec<Value>, LinkError> {
        let code = group.first().map_or(0, |waiter| waiter.code);
        let names = group.iter().flat_map(|waiter| waiter.parcel.names());
        let moments = group.iter().map(|waiter| waiter.parcel.moment());
        let is_one = moments.clone().skip(1).zip(moments.clone()).all(|(one, other)| one == other);
        let others = moments.skip(1).take(if is_one { 0 } else { group.len() });
        let arguments = group.iter().take(1).map(|waiter| waiter.parcel.bytes()).chain(others);
        let answer = self.run(self.scripts.together(code), names, arguments).await;
        answer.map(|answer| if let Value::Array(answers) = answer { answers } else { Vec::new() })
    }
}

impl Place {
    /// Lets those come who are about to ask.
    async fn gather(mut self) {
        yield_now().await;
        self.is_cut_off = false;
    }

    async fn send(mut self, group: Vec<Waiter>) {
        let shared = Arc::clone(&self.shared);
        let answers = shared.ask_together(&group).await;
        self.is_cut_off = false;
        drop(self);
        let answers = match answers {
            Ok(answers) => answers,
            // Each by itself is told what is wrong with its own.
            Err(LinkError::Redis(error)) if matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension) => {
                let is_divided = error.kind() == ErrorKind::Server(ServerErrorKind::CrossSlot);
                shared.together.is_divided.fetch_or(is_divided, Ordering::Relaxed);
                Vec::new()
            }
            Err(error) => {
                let error = error.into_store_error(shared.patience);
                for waiter in group {
                    let _ = waiter.tells.send(Err(error.clone()));
                }
                return;
            }
        };
        let mut answers = answers.into_iter();
        for waiter in group {
            let bytes = if let Some(Value::BulkString(bytes)) = answers.next() { bytes } else { Vec::new() };
            // An error says that the caller has gone away.
            let _ = waiter.tells.send(Ok(bytes));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut queue = self.shared.together.queue();
        queue.under_way -= 1;
        match Handle::try_current() {
            Ok(runtime) if !self.is_cut_off => {
                if queue.under_way < UNDER_WAY {
                    self.shared.dispatch(queue, &runtime);
                }
            }
            _ => {
                // Nobody would ask for them.
                let stranded = std::mem::take(&mut queue.waiting);
                drop(queue);
                for waiter in stranded {
                    let _ = waiter.tells.send(Ok(Vec::new()));
                }
            }
        }
    }
}
