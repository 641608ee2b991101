//! Batching of requests that come faster than the server answers, into one script call: most of a decision's cost for
//! the server is the call itself.
//!
//! A request while no other is in flight is sent alone. A later one is sent together with those that are about to come
//! in the same runtime. While several flushes are in flight, it waits until one of them is answered, but not long.
//! Requests of one flush with equal operations, which differ only in their keys, are one command.

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

/// The number of flushes in flight above which requests wait.
const MAX_FLUSHES_IN_FLIGHT: usize = 8;
/// The maximum number of requests of one flush: enough to share the cost of a script call, and few enough that the node
/// prepares some while the server decides others.
const MAX_FLUSH_REQUESTS: usize = 32;
/// The maximum wait without an answer: with a long round trip, the server may be idle meanwhile.
const MAX_QUEUE_TIME: Duration = Duration::from_millis(2);
/// The maximum number of waiting requests. Further ones are sent alone, and wait for the connection.
const MAX_WAITING: usize = 16_384;

#[derive(Default)]
pub(super) struct Batcher {
    queue: Mutex<BatcherQueue>,
    /// True if the server is a cluster, although its address doesn't say so.
    has_cross_slot_error: AtomicBool,
}

/// The queue. It is empty while nothing is in flight.
#[derive(Default)]
struct BatcherQueue {
    in_flight: usize,
    /// True while a task is about to send the waiting requests.
    is_flush_scheduled: bool,
    waiting: VecDeque<QueuedRequest>,
    next_arrival: u64,
}

/// The answer to a batched request. An empty one means that the request must be sent alone.
type BatchedResponse = Result<Vec<u8>, StoreError>;

struct QueuedRequest {
    /// The code of its script.
    script_code: u16,
    request: EncodedRequest,
    /// The number of its arrival.
    arrival: u64,
    response_sender: oneshot::Sender<BatchedResponse>,
}

/// The outcome of batching a request.
pub(super) enum BatchingOutcome {
    /// It is to be sent alone. When the slot is dropped, the next ones are sent.
    SendAlone(Option<BatcherSlot>),
    /// It was sent with others, and this is its answer.
    Answered(Vec<u8>),
}

/// A slot among the flushes in flight.
pub(super) struct BatcherSlot {
    redis: Arc<RedisInner>,
    /// False if an ending runtime drops it.
    is_completed: bool,
}

/// A task that is about to send the waiting requests.
struct ScheduledFlush {
    redis: Arc<RedisInner>,
    is_completed: bool,
}

fn return_unsent(waiters: impl IntoIterator<Item = QueuedRequest>) {
    for waiter in waiters {
        // An error means that the caller was cancelled.
        let _ = waiter.response_sender.send(Ok(Vec::new()));
    }
}

impl BatcherQueue {
    /// Counts a request as in flight and returns true if nothing was in flight.
    fn start_if_idle(&mut self) -> bool {
        if self.in_flight > 0 {
            return false;
        }
        self.in_flight = 1;
        true
    }

    /// Takes the requests that have waited longest, grouped by equal operations. Cancelled ones are dropped.
    fn take_groups(&mut self) -> Vec<Vec<QueuedRequest>> {
        let (mut groups, mut count) = (Vec::<Vec<QueuedRequest>>::new(), 0);
        while count < MAX_FLUSH_REQUESTS
            && let Some(waiter) = self.waiting.pop_front()
        {
            if waiter.response_sender.is_closed() {
                continue;
            }
            count += 1;
            let can_share_command = |first: &QueuedRequest| {
                first.script_code == waiter.script_code && first.request.ops() == waiter.request.ops()
            };
            match groups.iter_mut().find(|group| group.first().is_some_and(can_share_command)) {
                Some(group) => group.push(waiter),
                None => groups.push(vec![waiter]),
            }
        }
        groups
    }
}

impl RedisInner {
    /// Queues a request for a quick script, and returns its answer or the order to send it alone.
    pub(super) async fn send_batched(
        self: &Arc<Self>,
        code: u16,
        encode: impl FnOnce() -> EncodedRequest,
    ) -> Result<BatchingOutcome, StoreError> {
        // In a cluster, keys of different batches are seldom in one slot.
        if self.connection.is_cluster() || self.batcher.has_cross_slot_error.load(Ordering::Relaxed) {
            return Ok(BatchingOutcome::SendAlone(None));
        }
        let (mut receiver, arrival) = match self.enqueue(code, encode) {
            Ok(queued) => queued,
            Err(slot) => return Ok(BatchingOutcome::SendAlone(slot)),
        };
        let answer = match timeout(MAX_QUEUE_TIME, &mut receiver).await {
            Ok(answer) => answer,
            Err(_) => {
                self.flush_through(arrival);
                // Another task sends it, and its runtime may be blocked.
                let timeout_duration = self.timeouts.connect + self.timeouts.answer;
                timeout(timeout_duration, receiver).await.map_err(|_| StoreError::Timeout(timeout_duration))?
            }
        };
        let bytes = answer.map_err(|_| StoreError::Failed("the runtime that asked has ended".into()))??;
        Ok(if bytes.is_empty() { BatchingOutcome::SendAlone(None) } else { BatchingOutcome::Answered(bytes) })
    }

    /// Queues a request, and returns the receiver of its answer and its arrival. An error: it is to be sent alone.
    fn enqueue(
        self: &Arc<Self>,
        code: u16,
        encode: impl FnOnce() -> EncodedRequest,
    ) -> Result<(oneshot::Receiver<BatchedResponse>, u64), Option<BatcherSlot>> {
        let Ok(runtime) = Handle::try_current() else { return Err(None) };
        let new_slot = || BatcherSlot { redis: Arc::clone(self), is_completed: true };
        if self.batcher.queue.lock().start_if_idle() {
            return Err(Some(new_slot()));
        }
        let (sender, receiver) = oneshot::channel();
        let request = encode();
        let mut queue = self.batcher.queue.lock();
        // Meanwhile all others may have been answered, and no task would send this one.
        if queue.start_if_idle() {
            return Err(Some(new_slot()));
        }
        if queue.waiting.len() >= MAX_WAITING {
            return Err(None);
        }
        let arrival = queue.next_arrival;
        queue.next_arrival += 1;
        queue.waiting.push_back(QueuedRequest { script_code: code, request, arrival, response_sender: sender });
        if queue.in_flight < MAX_FLUSHES_IN_FLIGHT && !queue.is_flush_scheduled {
            queue.is_flush_scheduled = true;
            drop(queue);
            runtime.spawn(ScheduledFlush { redis: Arc::clone(self), is_completed: false }.run());
        }
        Ok((receiver, arrival))
    }

    /// Sends all requests that arrived up to this one.
    fn flush_through(self: &Arc<Self>, last_arrival: u64) {
        let Ok(runtime) = Handle::try_current() else { return };
        loop {
            let queue = self.batcher.queue.lock();
            if queue.waiting.front().is_none_or(|waiter| waiter.arrival > last_arrival) {
                return;
            }
            self.flush(queue, &runtime);
        }
    }

    /// Sends a flush. Its callers may be in other runtimes.
    fn flush(self: &Arc<Self>, mut queue: MutexGuard<'_, BatcherQueue>, current_runtime: &Handle) {
        let groups = queue.take_groups();
        if !groups.is_empty() {
            queue.in_flight += 1;
            drop(queue);
            let runtime = self.connection.runtime();
            let slot = BatcherSlot { redis: Arc::clone(self), is_completed: false };
            runtime.as_ref().unwrap_or(current_runtime).spawn(slot.run_groups(groups));
        }
    }

    /// Sends waiting requests if there is room. If `is_completed` is false, an ending runtime has dropped the task.
    fn continue_flushing(self: &Arc<Self>, mut queue: MutexGuard<'_, BatcherQueue>, is_completed: bool) {
        match Handle::try_current() {
            Ok(runtime) if is_completed && queue.in_flight < MAX_FLUSHES_IN_FLIGHT => self.flush(queue, &runtime),
            Ok(_) if is_completed => {}
            _ => {
                // No other task may be left to send them.
                let unsent = std::mem::take(&mut queue.waiting);
                drop(queue);
                return_unsent(unsent);
            }
        }
    }

    async fn run_group(&self, group: &[QueuedRequest]) -> Result<Vec<Value>, RedisCommandError> {
        let Some(QueuedRequest { script_code: code, request, .. }) = group.first() else { return Ok(Vec::new()) };
        let names = group.iter().flat_map(|waiter| waiter.request.names());
        let time_headers = group.iter().map(|waiter| waiter.request.time_header());
        let all_times_equal = time_headers.clone().skip(1).zip(time_headers.clone()).all(|(one, other)| one == other);
        let others = time_headers.skip(1).take(if all_times_equal { 0 } else { group.len() });
        let arguments = iter::once(request.argument()).chain(others);
        if group.len() == 1 {
            // This script has the general one as its fallback.
            return Ok(vec![self.run_script(self.scripts.get(ScriptKind::Quick(*code)), names, arguments).await?]);
        }
        let answer = self.run_script(self.scripts.batched(*code), names, arguments).await;
        answer.map(|answer| if let Value::Array(answers) = answer { answers } else { Vec::new() })
    }

    fn deliver(&self, group: Vec<QueuedRequest>, answers: Result<Vec<Value>, RedisCommandError>) {
        let answers = match answers {
            Ok(answers) => answers,
            // Sent alone, each request gets its own error.
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
    /// Yields once, so that tasks about to send a request can do so.
    async fn run(mut self) {
        yield_now().await;
        self.is_completed = true;
    }
}

impl Drop for ScheduledFlush {
    fn drop(&mut self) {
        let mut queue = self.redis.batcher.queue.lock();
        queue.is_flush_scheduled = false;
        self.redis.continue_flushing(queue, self.is_completed);
    }
}

impl BatcherSlot {
    async fn run_groups(mut self, groups: Vec<Vec<QueuedRequest>>) {
        let redis = Arc::clone(&self.redis);
        let answers = join_all(groups.iter().map(|group| redis.run_group(group))).await;
        self.is_completed = true;
        // Before the callers get their answers and send their next requests.
        drop(self);
        for (group, answers) in groups.into_iter().zip(answers) {
            redis.deliver(group, answers);
        }
    }
}

impl Drop for BatcherSlot {
    fn drop(&mut self) {
        let mut queue = self.redis.batcher.queue.lock();
        queue.in_flight -= 1;
        self.redis.continue_flushing(queue, self.is_completed);
    }
}
