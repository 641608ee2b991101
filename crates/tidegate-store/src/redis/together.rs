//! Decisions that come faster than the server answers are asked together, in one script: most of what a decision costs
//! the server is to be asked at all.
//!
//! A few questions are on their way each by itself, and who comes while they are waits until the first of them is answered;
//! then all who wait go as one. So nobody waits longer than for one answer, nor at all where there is little to do.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::Shared;
use super::link::LinkError;
use super::question::Parcel;
use super::script::Script;
use crate::StoreError;

/// How many commands are on their way before others wait.
const UNDER_WAY: usize = 8;
/// How many decisions one command asks for at most: what they take in the server holds everybody else up.
const TOGETHER: usize = 64;
/// How many wait at most; more go by themselves.
const WAITING: usize = 16_384;

#[derive(Default)]
pub(super) struct Together(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    under_way: usize,
    waiting: VecDeque<Waiter>,
}

type Told = oneshot::Receiver<Result<Vec<u8>, StoreError>>;

struct Waiter {
    /// Of the script that it needs.
    code: u16,
    parcel: Parcel,
    tells: oneshot::Sender<Result<Vec<u8>, StoreError>>,
}

/// How a question goes.
pub(super) enum Turn {
    /// By itself; the next ones go when this is dropped.
    Alone(Option<Place>),
    /// It went with others, and this is its answer.
    Told(Vec<u8>),
}

/// One of the commands that may be on their way.
pub(super) struct Place(Arc<Shared>);

impl Together {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn enter(&mut self) -> bool {
        let is_free = self.under_way < UNDER_WAY;
        self.under_way += usize::from(is_free);
        is_free
    }

    /// Those who go next: all that need the script of who has waited longest. Who went away meanwhile isn't asked for.
    fn next(&mut self) -> Vec<Waiter> {
        self.waiting.retain(|waiter| !waiter.tells.is_closed());
        let Some(code) = self.waiting.front().map(|waiter| waiter.code) else { return Vec::new() };
        let mut group = Vec::with_capacity(self.waiting.len().min(TOGETHER));
        for _ in 0..self.waiting.len() {
            let Some(waiter) = self.waiting.pop_front() else { break };
            if waiter.code == code && group.len() < TOGETHER {
                group.push(waiter);
            } else {
                self.waiting.push_back(waiter);
            }
        }
        group
    }
}

impl Shared {
    /// Has a question for a quick script wait for its turn.
    pub(super) async fn turn(self: &Arc<Self>, code: u16, parcel: impl FnOnce() -> Parcel) -> Result<Turn, StoreError> {
        match self.wait(code, parcel) {
            Ok(place) => Ok(Turn::Alone(place)),
            // Without an answer, or with an empty one, it goes by itself after all.
            Err(told) => {
                let bytes = told.await.unwrap_or(Ok(Vec::new()))?;
                Ok(if bytes.is_empty() { Turn::Alone(None) } else { Turn::Told(bytes) })
            }
        }
    }

    /// Its place, or what it hears its answer by.
    fn wait(self: &Arc<Self>, code: u16, parcel: impl FnOnce() -> Parcel) -> Result<Option<Place>, Told> {
        let place = || Ok(Some(Place(Arc::clone(self))));
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
        if queue.waiting.len() >= WAITING {
            return Ok(None);
        }
        queue.waiting.push_back(Waiter { code, parcel, tells });
        Err(told)
    }

    async fn ask_together(&self, group: &[Waiter]) -> Result<Vec<Value>, LinkError> {
        let code = group.first().map_or(0, |waiter| waiter.code);
        let script = self.scripts.together(code);
        let answer = match self.link.send(&command("EVALSHA", &script.hash, group)).await {
            Err(error) if error.is(ServerErrorKind::NoScript) => {
                let Script { text, .. } = script;
                self.link.send(&command("EVAL", text, group)).await
            }
            answer => answer,
        };
        answer.map(|answer| if let Value::Array(answers) = answer { answers } else { Vec::new() })
    }
}

fn command(verb: &str, script: &str, group: &[Waiter]) -> Cmd {
    let parcels = || group.iter().map(|waiter| &waiter.parcel);
    let names: usize = parcels().map(|parcel| parcel.names().count()).sum();
    let bytes: usize = parcels().map(Parcel::len).sum();
    let mut command = Cmd::with_capacity(names + group.len() + 3, script.len() + bytes + 32);
    command.arg(verb).arg(script).arg(names);
    for name in parcels().flat_map(Parcel::names) {
        command.arg(name);
    }
    for parcel in parcels() {
        command.arg(parcel.bytes());
    }
    command
}

/// Whether the server said that something is wrong, rather than nothing.
fn is_answer(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension)
}

impl Place {
    async fn send(self, group: Vec<Waiter>) {
        let shared = Arc::clone(&self.0);
        let answers = shared.ask_together(&group).await;
        drop(self);
        match answers {
            Ok(answers) => {
                for (waiter, answer) in group.into_iter().zip(answers) {
                    if let Value::BulkString(bytes) = answer {
                        // An error says that the caller has gone away.
                        let _ = waiter.tells.send(Ok(bytes));
                    }
                }
            }
            // Each by itself is told what is wrong with its own.
            Err(LinkError::Redis(error)) if is_answer(&error) => {}
            Err(error) => {
                let error = error.into_store_error(shared.patience);
                for waiter in group {
                    let _ = waiter.tells.send(Err(error.clone()));
                }
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut queue = self.0.together.queue();
        let group = queue.next();
        let runtime = Handle::try_current().ok();
        if let (Some(runtime), false) = (runtime, group.is_empty()) {
            drop(queue);
            runtime.spawn(Self(Arc::clone(&self.0)).send(group));
            return;
        }
        queue.under_way -= 1;
        // Without a runtime nobody would ask for them.
        let stranded = std::mem::take(&mut queue.waiting);
        drop(queue);
        drop((group, stranded));
    }
}
