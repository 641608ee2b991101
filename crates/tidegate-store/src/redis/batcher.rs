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

use super::RedisInner;
use super::codec::EncodedRequest;
use super::connection::RedisCommandError;
use super::script::ScriptKind;
use crate::StoreError;

/// How many convoys are under way before others wait.
const MAX_FLUSHES_IN_FLIGHT: usize = 8;
/// How many decisions go at a time: enough to share what a script costs, and few enough that the node can prepare some
/// while the server decides others.
const MAX_FLUSH_REQUESTS: usize = 32;
/// How long they wait where no answer comes: the way there is long, and the server may well be idle.
const MAX_QUEUE_TIME: Duration = Duration::from_millis(2);
/// How many wait at most; more go by themselves, and wait for the connection.
const MAX_WAITING: usize = 16_384;

#[derive(Default)]
pub(super) struct Batcher {
    queue: Mutex<BatcherQueue>,
    /// The server divides its keys, though its address doesn't say so.
    has_cross_slot_error: AtomicBool,
}

/// While nothing is under way, nobody waits.
#[derive(Default)]
struct BatcherQueue {
    in_flight: usize,
    /// Somebody is about to send those on their way who wait.
    is_flush_scheduled: bool,
    waiting: VecDeque<QueuedRequest>,
    next_arrival: u64,
}

/// An empty answer: it is to go by itself.
type BatchedResponse = Result<Vec<u8>, StoreError>;

struct QueuedRequest {
    /// Of the script that it needs.
    script_code: u16,
    request: EncodedRequest,
    /// Of its arrival.
    arrival: u64,
    response_sender: oneshot::Sender<BatchedResponse>,
}

/// How a question goes.
pub(super) enum BatchingOutcome {
    /// By itself; the next ones go when this is dropped.
    SendAlone(Option<BatcherSlot>),
    /// It went with others, and this is its answer.
    Answered(Vec<u8>),
}

/// What came of asking for a place.
enum EnqueueResult {
    SendAlone(Option<BatcherSlot>),
    Queued { response_receiver: oneshot::Receiver<BatchedResponse>, arrival: u64 },
}

/// Counts as under way.
pub(super) struct BatcherSlot {
    redis: Arc<RedisInner>,
    /// Otherwise a runtime that ends drops it.
    is_completed: bool,
}

/// Those who are about to be sent on their way.
struct ScheduledFlush {
    redis: Arc<RedisInner>,
    is_completed: bool,
}

impl Batcher {
    fn queue(&self) -> MutexGuard<'_, BatcherQueue> {
        self.queue.lock()
    }
}

impl QueuedRequest {
    fn can_share_command(&self, other: &Self) -> bool {
        self.script_code == other.script_code && self.request.ops() == other.request.ops()
    }
}

fn return_unsent(waiters: impl IntoIterator<Item = QueuedRequest>) {
    for waiter in waiters {
        // An error says that the caller has gone away.
        let _ = waiter.response_sender.send(Ok(Vec::new()));
    }
}

impl BatcherQueue {
    /// Whether nothing was under way; now one question is.
    fn start_if_idle(&mut self) -> bool {
        if self.in_flight > 0 {
            return false;
        }
        self.in_flight = 1;
        true
    }

    /// Those who have waited longest, by what they ask for. Who went away meanwhile isn't asked for.
    fn take_groups(&mut self) -> Vec<Vec<QueuedRequest>> {
        let (mut groups, mut count) = (Vec::<Vec<QueuedRequest>>::new(), 0);
        while count < MAX_FLUSH_REQUESTS
            && let Some(waiter) = self.waiting.pop_front()
        {
            if waiter.response_sender.is_closed() {
                continue;
            }
            count += 1;
            match groups.iter_mut().find(|group| group.first().is_some_and(|first| first.can_share_command(&waiter))) {
                Some(group) => group.push(waiter),
                None => groups.push(vec![waiter]),
            }
        }
        groups
    }
}

impl RedisInner {
    /// Has a question for a quick script wait for its turn.
    pub(super) async fn send_batched(
        self: &Arc<Self>,
        code: u16,
        encode: impl FnOnce() -> EncodedRequest,
    ) -> Result<BatchingOutcome, StoreError> {
        // In a cluster keys of different batches seldom lie in one slot.
        if self.connection.is_cluster() || self.batcher.has_cross_slot_error.load(Ordering::Relaxed) {
            return Ok(BatchingOutcome::SendAlone(None));
        }
        let (mut receiver, arrival) = match self.enqueue(code, encode) {
            EnqueueResult::SendAlone(place) => return Ok(BatchingOutcome::SendAlone(place)),
            EnqueueResult::Queued { response_receiver: told, arrival: number } => (told, number),
        };
        let answer = match timeout(MAX_QUEUE_TIME, &mut receiver).await {
            Ok(answer) => answer,
            Err(_) => {
                self.flush_through(arrival);
                // It is in others' hands, and their runtime may stand still.
                let timeout_duration = self.timeouts.connect + self.timeouts.answer;
                timeout(timeout_duration, receiver).await.map_err(|_| StoreError::Timeout(timeout_duration))?
            }
        };
        let bytes = answer.map_err(|_| StoreError::Failed("the runtime that asked has ended".into()))??;
        Ok(if bytes.is_empty() { BatchingOutcome::SendAlone(None) } else { BatchingOutcome::Answered(bytes) })
    }

    fn enqueue(self: &Arc<Self>, code: u16, encode: impl FnOnce() -> EncodedRequest) -> EnqueueResult {
        let Ok(runtime) = Handle::try_current() else { return EnqueueResult::SendAlone(None) };
        let send_alone = || EnqueueResult::SendAlone(Some(BatcherSlot { redis: Arc::clone(self), is_completed: true }));
        if self.batcher.queue().start_if_idle() {
            return send_alone();
        }
        let (sender, receiver) = oneshot::channel();
        let request = encode();
        let mut queue = self.batcher.queue();
        // Meanwhile all others may have been answered, and nobody would come by.
        if queue.start_if_idle() {
            return send_alone();
        }
        if queue.waiting.len() >= MAX_WAITING {
            return EnqueueResult::SendAlone(None);
        }
        let arrival = queue.next_arrival;
        queue.next_arrival += 1;
        queue.waiting.push_back(QueuedRequest { script_code: code, request, arrival, response_sender: sender });
        if queue.in_flight < MAX_FLUSHES_IN_FLIGHT && !queue.is_flush_scheduled {
            queue.is_flush_scheduled = true;
            drop(queue);
            runtime.spawn(ScheduledFlush { redis: Arc::clone(self), is_completed: false }.run());
        }
        EnqueueResult::Queued { response_receiver: receiver, arrival }
    }

    /// Lets those go who have waited as long as this one.
    fn flush_through(self: &Arc<Self>, last_arrival: u64) {
        let Ok(runtime) = Handle::try_current() else { return };
        loop {
            let queue = self.batcher.queue();
            if queue.waiting.front().is_none_or(|waiter| waiter.arrival > last_arrival) {
                return;
            }
            self.flush(queue, &runtime);
        }
    }

    /// Sends a convoy on its way, whose members may live in other runtimes than this.
    fn flush(self: &Arc<Self>, mut queue: MutexGuard<'_, BatcherQueue>, current_runtime: &Handle) {
        let groups = queue.take_groups();
        if !groups.is_empty() {
            queue.in_flight += 1;
            drop(queue);
            let runtime = self.connection.runtime();
            runtime
                .as_ref()
                .unwrap_or(current_runtime)
                .spawn(BatcherSlot { redis: Arc::clone(self), is_completed: false }.run_groups(groups));
        }
    }

    /// Sends others on their way where there is room now. Who hasn't ended is dropped by a runtime that ends.
    fn continue_flushing(self: &Arc<Self>, mut queue: MutexGuard<'_, BatcherQueue>, is_completed: bool) {
        match Handle::try_current() {
            Ok(runtime) if is_completed => {
                if queue.in_flight < MAX_FLUSHES_IN_FLIGHT {
                    self.flush(queue, &runtime);
                }
            }
            _ => {
                // Nobody might come by for them.
                let unsent = std::mem::take(&mut queue.waiting);
                drop(queue);
                return_unsent(unsent);
            }
        }
    }

    async fn run_group(&self, group: &[QueuedRequest]) -> Result<Vec<Value>, RedisCommandError> {
        let Some(QueuedRequest { script_code: code, request: parcel, .. }) = group.first() else {
            return Ok(Vec::new());
        };
        let names = group.iter().flat_map(|waiter| waiter.request.names());
        let time_headers = group.iter().map(|waiter| waiter.request.time_header());
        let all_times_equal = time_headers.clone().skip(1).zip(time_headers.clone()).all(|(one, other)| one == other);
        let others = time_headers.skip(1).take(if all_times_equal { 0 } else { group.len() });
        let arguments = iter::once(parcel.argument()).chain(others);
        if group.len() == 1 {
            // With the general script behind it.
            return Ok(vec![self.run_script(self.scripts.get(ScriptKind::Quick(*code)), names, arguments).await?]);
        }
        let answer = self.run_script(self.scripts.batched(*code), names, arguments).await;
        answer.map(|answer| if let Value::Array(answers) = answer { answers } else { Vec::new() })
    }

    fn deliver(&self, group: Vec<QueuedRequest>, answers: Result<Vec<Value>, RedisCommandError>) {
        let answers = match answers {
            Ok(answers) => answers,
            // Each by itself is told what is wrong with its own.
            Err(RedisCommandError::Redis(error))
                if group.len() > 1 && matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension) =>
            {
                let is_cross_slot_error = error.kind() == ErrorKind::Server(ServerErrorKind::CrossSlot);
                self.batcher.has_cross_slot_error.fetch_or(is_cross_slot_error, Ordering::Relaxed);
                return return_unsent(group);
            }
            Err(error) => {
                let error = self.to_store_error(error);
                for waiter in group {
                    let _ = waiter.response_sender.send(Err(error.clone()));
                }
                return;
            }
        };
        let mut answers = answers.into_iter();
        for waiter in group {
            let bytes = if let Some(Value::BulkString(bytes)) = answers.next() { bytes } else { Vec::new() };
            let _ = waiter.response_sender.send(Ok(bytes));
        }
    }
}

impl ScheduledFlush {
    /// Lets those come who are about to ask.
    async fn run(mut self) {
        yield_now().await;
        self.is_completed = true;
    }
}

impl Drop for ScheduledFlush {
    fn drop(&mut self) {
        let mut queue = self.redis.batcher.queue();
        queue.is_flush_scheduled = false;
        self.redis.continue_flushing(queue, self.is_completed);
    }
}

impl BatcherSlot {
    async fn run_groups(mut self, groups: Vec<Vec<QueuedRequest>>) {
        let redis = Arc::clone(&self.redis);
        let answers = join_all(groups.iter().map(|group| redis.run_group(group))).await;
        self.is_completed = true;
        // Before those who are told ask anew.
        drop(self);
        for (group, answers) in groups.into_iter().zip(answers) {
            redis.deliver(group, answers);
        }
    }
}

impl Drop for BatcherSlot {
    fn drop(&mut self) {
        let mut queue = self.redis.batcher.queue();
        queue.in_flight -= 1;
        self.redis.continue_flushing(queue, self.is_completed);
    }
}
