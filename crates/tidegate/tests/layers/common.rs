use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

pub(crate) use tidegate::clock::TokioClock;
use tidegate::{Clock as _, Span, Time};
use tidegate_core::Class;
use tower::Service;

/// The start time of the tests on [`TokioClock::default`].
const START: Time = Time::from_secs(1_767_225_600);

/// The time since a test began.
pub(crate) trait Passed {
    fn passed(&self) -> Span;

    /// In whole milliseconds.
    fn millis(&self) -> u64 {
        self.passed().as_micros() / 1_000
    }
}

impl Passed for TokioClock {
    fn passed(&self) -> Span {
        self.now().since(START)
    }
}

/// A scripted reply, and its delay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line(pub Result<u16, u16>, pub Duration);

pub(crate) fn ok(status: u16) -> Line {
    Line(Ok(status), Duration::ZERO)
}

pub(crate) fn failed(status: u16) -> Line {
    Line(Err(status), Duration::ZERO)
}

pub(crate) fn slow(line: Line, seconds: u64) -> Line {
    Line(line.0, Duration::from_secs(seconds))
}

/// A service that replies as its script says, and repeats the last line. It records the time and argument of each call.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    clock: TokioClock,
    lines: Arc<Mutex<VecDeque<Line>>>,
    calls: Arc<Mutex<Vec<(u64, &'static str)>>>,
    under_way: Arc<AtomicUsize>,
}

impl Script {
    pub(crate) fn new(clock: TokioClock, lines: impl IntoIterator<Item = Line>) -> Self {
        Self {
            clock,
            lines: Arc::new(Mutex::new(lines.into_iter().collect())),
            calls: Arc::default(),
            under_way: Arc::default(),
        }
    }

    /// The calls that it received: the time in milliseconds and the argument.
    pub(crate) fn calls(&self) -> Vec<(u64, &'static str)> {
        self.calls.lock().unwrap().clone()
    }

    pub(crate) fn times(&self) -> Vec<u64> {
        self.calls().into_iter().map(|(at, _)| at).collect()
    }

    pub(crate) fn under_way(&self) -> usize {
        self.under_way.load(Ordering::SeqCst)
    }

    pub(crate) fn rewrite(&self, lines: impl IntoIterator<Item = Line>) {
        *self.lines.lock().unwrap() = lines.into_iter().collect();
    }
}

impl Service<&'static str> for Script {
    type Response = u16;
    type Error = Failed;
    type Future = Pin<Box<dyn Future<Output = Result<u16, Failed>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Failed>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: &'static str) -> Self::Future {
        self.calls.lock().unwrap().push((self.clock.millis(), request));
        let Line(reply, after) = {
            let mut lines = self.lines.lock().unwrap();
            if lines.len() > 1 { lines.pop_front().unwrap() } else { lines[0] }
        };
        let guard = UnderWay::new(&self.under_way);
        Box::pin(async move {
            let _guard = guard;
            if !after.is_zero() {
                tokio::time::sleep(after).await;
            }
            reply.map_err(Failed)
        })
    }
}

struct UnderWay(Arc<AtomicUsize>);

impl UnderWay {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An error with the status that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("failed like a {0}")]
pub(crate) struct Failed(pub u16);

/// The number of a call, as its argument.
pub(crate) fn name(number: usize) -> &'static str {
    number.to_string().leak()
}

/// Classifies replies and errors by their status.
pub(crate) fn by_number(outcome: Result<&u16, &Failed>) -> Class {
    Class::from_status(outcome.map_or_else(|failed| failed.0, |status| *status))
}
