//! Decisions that come faster than the server answers are asked together, in one script: most of what a decision costs
//! the server is to be asked at all.
//!
//! Who comes while no question is under way goes by itself. Who comes later goes with those who are about to ask in the
//! same runtime; and while a few convoys are under way, waits until one of them has its answers, or briefly. Of a convoy,
//! those who ask for the same, and differ by their keys alone, are one command.

use std::collections::VecDeque;
use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::{Mutex, MutexGuard};
use redis::{ErrorKind, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::timeout;

use super::Shared;
use super::link::LinkError;
use super::question::Parcel;
use super::script::Parts;
use crate::StoreError;

/// How many convoys are under way before others wait.
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

/// While nothing is under way, nobody waits.
#[derive(Default)]
struct Queue {
    under_way: usize,
    /// Somebody is about to send those on their way who wait.
    is_gathered: bool,
    waiting: VecDeque<Waiter>,
    arrivals: u64,
}

/// An empty answer: it is to go by itself.
type Answer = Result<Vec<u8>, StoreError>;

struct Waiter {
    /// Of the script that it needs.
    code: u16,
    parcel: Parcel,
    /// Of its arrival.
    number: u64,
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
    Waits { told: oneshot::Receiver<Answer>, number: u64 },
}

/// Counts as under way.
pub(super) struct Place {
    shared: Arc<Shared>,
    /// Otherwise a runtime that ends drops it.
    has_ended: bool,
}

/// Those who are about to be sent on their way.
struct Gathering {
    shared: Arc<Shared>,
    has_ended: bool,
}

impl Together {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }
}

impl Waiter {
    fn asks_as(&self, other: &Self) -> bool {
        self.code == other.code && self.parcel.asks() == other.parcel.asks()
    }
}

fn go_alone(waiters: impl IntoIterator<Item = Waiter>) {
    for waiter in waiters {
        // An error says that the caller has gone away.
        let _ = waiter.tells.send(Ok(Vec::new()));
    }
}

impl Queue {
    /// Whether nothing was under way; now one question is.
    fn begins(&mut self) -> bool {
        if self.under_way > 0 {
            return false;
        }
        self.under_way = 1;
        true
    }

    /// Those who have waited longest, by what they ask for. Who went away meanwhile isn't asked for.
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
        let (mut told, number) = match self.enter(code, parcel) {
            Entry::Alone(place) => return Ok(Turn::Alone(place)),
            Entry::Waits { told, number } => (told, number),
        };
        let answer = match timeout(BRIEFLY, &mut told).await {
            Ok(answer) => answer,
            Err(_) => {
                self.hurry(number);
                // It is in others' hands, and their runtime may stand still.
                let patience = self.patience.connect + self.patience.answer;
                timeout(patience, told).await.map_err(|_| StoreError::Timeout(patience))?
            }
        };
        let bytes = answer.map_err(|_| StoreError::Failed("the runtime that asked has ended".into()))??;
        Ok(if bytes.is_empty() { Turn::Alone(None) } else { Turn::Told(bytes) })
    }

    fn enter(self: &Arc<Self>, code: u16, parcel: impl FnOnce() -> Parcel) -> Entry {
        let Ok(runtime) = Handle::try_current() else { return Entry::Alone(None) };
        let place = || Entry::Alone(Some(Place { shared: Arc::clone(self), has_ended: true }));
        if self.together.queue().begins() {
            return place();
        }
        let (tells, told) = oneshot::channel();
        let parcel = parcel();
        let mut queue = self.together.queue();
        // Meanwhile all others may have been answered, and nobody would come by.
        if queue.begins() {
            return place();
        }
        if queue.waiting.len() >= WAITING {
            return Entry::Alone(None);
        }
        let number = queue.arrivals;
        queue.arrivals += 1;
        queue.waiting.push_back(Waiter { code, parcel, number, tells });
        if queue.under_way < UNDER_WAY && !queue.is_gathered {
            queue.is_gathered = true;
            drop(queue);
            runtime.spawn(Gathering { shared: Arc::clone(self), has_ended: false }.run());
        }
        Entry::Waits { told, number }
    }

    /// Lets those go who have waited as long as this one.
    fn hurry(self: &Arc<Self>, number: u64) {
        let Ok(runtime) = Handle::try_current() else { return };
        loop {
            let queue = self.together.queue();
            if queue.waiting.front().is_none_or(|waiter| waiter.number > number) {
                return;
            }
            self.dispatch(queue, &runtime);
        }
    }

    /// Sends a convoy on its way, whose members may live in other runtimes than this.
    fn dispatch(self: &Arc<Self>, mut queue: MutexGuard<'_, Queue>, here: &Handle) {
        let groups = queue.next();
        if !groups.is_empty() {
            queue.under_way += 1;
            drop(queue);
            let runtime = self.link.runtime();
            runtime.as_ref().unwrap_or(here).spawn(Place { shared: Arc::clone(self), has_ended: false }.send(groups));
        }
    }

    /// Sends others on their way where there is room now. Who hasn't ended is dropped by a runtime that ends.
    fn go_on(self: &Arc<Self>, mut queue: MutexGuard<'_, Queue>, has_ended: bool) {
        match Handle::try_current() {
            Ok(runtime) if has_ended => {
                if queue.under_way < UNDER_WAY {
                    self.dispatch(queue, &runtime);
                }
            }
            _ => {
                // Nobody might come by for them.
                let stranded = std::mem::take(&mut queue.waiting);
                drop(queue);
                go_alone(stranded);
            }
        }
    }

    async fn ask_together(&self, group: &[Waiter]) -> Result<Vec<Value>, LinkError> {
        let Some(Waiter { code, parcel, .. }) = group.first() else { return Ok(Vec::new()) };
        let names = group.iter().flat_map(|waiter| waiter.parcel.names());
        let moments = group.iter().map(|waiter| waiter.parcel.moment());
        let is_one = moments.clone().skip(1).zip(moments.clone()).all(|(one, other)| one == other);
        let others = moments.skip(1).take(if is_one { 0 } else { group.len() });
        let arguments = iter::once(parcel.bytes()).chain(others);
        if group.len() == 1 {
            // With the general script behind it.
            return Ok(vec![self.run(self.scripts.get(Parts::Quick(*code)), names, arguments).await?]);
        }
        let answer = self.run(self.scripts.together(*code), names, arguments).await;
        answer.map(|answer| if let Value::Array(answers) = answer { answers } else { Vec::new() })
    }

    fn tell(&self, group: Vec<Waiter>, answers: Result<Vec<Value>, LinkError>) {
        let answers = match answers {
            Ok(answers) => answers,
            // Each by itself is told what is wrong with its own.
            Err(LinkError::Redis(error))
                if group.len() > 1 && matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension) =>
            {
                let is_divided = error.kind() == ErrorKind::Server(ServerErrorKind::CrossSlot);
                self.together.is_divided.fetch_or(is_divided, Ordering::Relaxed);
                return go_alone(group);
            }
            Err(error) => {
                let error = self.failed(error);
                for waiter in group {
                    let _ = waiter.tells.send(Err(error.clone()));
                }
                return;
            }
        };
        let mut answers = answers.into_iter();
        for waiter in group {
            let bytes = if let Some(Value::BulkString(bytes)) = answers.next() { bytes } else { Vec::new() };
            let _ = waiter.tells.send(Ok(bytes));
        }
    }
}

impl Gathering {
    /// Lets those come who are about to ask.
    async fn run(mut self) {
        yield_now().await;
        self.has_ended = true;
    }
}

impl Drop for Gathering {
    fn drop(&mut self) {
        let mut queue = self.shared.together.queue();
        queue.is_gathered = false;
        self.shared.go_on(queue, self.has_ended);
    }
}

impl Place {
    async fn send(mut self, groups: Vec<Vec<Waiter>>) {
        let shared = Arc::clone(&self.shared);
        let answers = join_all(groups.iter().map(|group| shared.ask_together(group))).await;
        self.has_ended = true;
        // Before those who are told ask anew.
        drop(self);
        for (group, answers) in groups.into_iter().zip(answers) {
            shared.tell(group, answers);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut queue = self.shared.together.queue();
        queue.under_way -= 1;
        self.shared.go_on(queue, self.has_ended);
    }
}
