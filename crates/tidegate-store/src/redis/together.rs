//! Decisions that come faster than the server answers are asked together, in one script: most of what a decision costs
//! the server is to be asked at all.
//!
//! A few questions are on their way each by itself. Who comes while they are waits until one of them is answered, or
//! briefly; then those who wait for the same script go as one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{ErrorKind, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::Shared;
use super::link::LinkError;
use super::question::{self, Parcel};
use crate::StoreError;

/// How many commands are on their way before others wait.
const UNDER_WAY: usize = 8;
/// How many decisions one command asks for at most: what they take in the server holds everybody else up.
const TOGETHER: usize = 64;
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
    /// Whether it is a group's that has no answer yet.
    sends: bool,
}

impl Together {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn enter(&mut self) -> bool {
        let is_free = self.under_way < UNDER_WAY;
        self.under_way += usize::from(is_free);
        is_free
    }

    /// Those who go next: who has waited longest, and others who need the same script. Who went away meanwhile isn't asked
    /// for.
    fn next(&mut self) -> Vec<Waiter> {
        let (mut group, mut passed) = (Vec::<Waiter>::new(), Vec::new());
        while group.len() < TOGETHER
            && let Some(waiter) = self.waiting.pop_front()
        {
            if waiter.tells.is_closed() {
                continue;
            }
            let fits = group.first().is_none_or(|first| first.code == waiter.code);
            if fits { group.push(waiter) } else { passed.push(waiter) }
        }
        for waiter in passed.into_iter().rev() {
            self.waiting.push_front(waiter);
        }
        group
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
        let place = || Entry::Alone(Some(Place { shared: Arc::clone(self), sends: false }));
        if self.together.queue().enter() {
            return place();
        }
        let parcel = parcel();
        let (tells, told) = oneshot::channel();
        let mut queue = self.together.queue();
        // Meanwhile the last may have been answered, and nobody would come by.
        if queue.enter() {
            return place();
        }
        let count = queue.waiting.len();
        if count >= WAITING {
            return Entry::Alone(None);
        }
        queue.waiting.push_back(Waiter { code, parcel, tells });
        Entry::Waits { told, is_first: count == 0 }
    }

    /// Lets all go who wait.
    fn hurry(self: &Arc<Self>) {
        loop {
            let mut queue = self.together.queue();
            if queue.waiting.is_empty() {
                return;
            }
            queue.under_way += 1;
            drop(queue);
            drop(Place { shared: Arc::clone(self), sends: false });
        }
    }

    async fn ask_together(&self, group: &[Waiter]) -> Result<Vec<Value>, LinkError> {
        let code = group.first().map_or(0, |waiter| waiter.code);
        let parcels = group.iter().map(|waiter| &waiter.parcel);
        let answer = self
            .run(self.scripts.together(code), |verb, script| question::command(verb, script, parcels.clone()))
            .await;
        answer.map(|answer| if let Value::Array(answers) = answer { answers } else { Vec::new() })
    }
}

impl Place {
    async fn send(mut self, group: Vec<Waiter>) {
        let shared = Arc::clone(&self.shared);
        let answers = shared.ask_together(&group).await;
        self.sends = false;
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
        // What a runtime drops unfinished it drops because it ends.
        if let Ok(runtime) = Handle::try_current()
            && !self.sends
        {
            let group = queue.next();
            if !group.is_empty() {
                drop(queue);
                runtime.spawn(Self { shared: Arc::clone(&self.shared), sends: true }.send(group));
                return;
            }
        }
        queue.under_way -= 1;
        // Nobody would ask for them.
        let stranded = std::mem::take(&mut queue.waiting);
        drop(queue);
        for waiter in stranded {
            let _ = waiter.tells.send(Ok(Vec::new()));
        }
    }
}
