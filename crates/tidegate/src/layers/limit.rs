//! A limit with a queue, as a layer.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::hash::RandomState;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tidegate_core::{Clock, Limit, LimitKind, Span, Window};
use tidegate_runtime::clock::SystemClock;
use tokio::sync::Semaphore;
use tower_layer::Layer;
use tower_service::Service;

use super::NotSent;
use crate::limiter::{KeyedLimiter, LimiterDecision, LimiterError, parse_kind};

/// The default number of calls that may wait at a [`LimitLayer`].
pub const DEFAULT_MAX_WAITING: usize = 1024;

/// The most entries that a window keeps of its calls. Up to this limit it is exact. Beyond, capacity returns late by at
/// most the window's length divided by this number.
const MAX_ENTRIES: u64 = 4096;
/// The memory bound of a limiter with one key.
const MAX_BYTES: usize = 1 << 20;

/// Lets calls wait for their turn under one limit, in the order of their arrival.
///
/// All services made by one layer and its clones share one limit and one queue. A call waits within its future, and
/// counts when it is sent, not before. A future that is never polled, or is dropped while it waits, counts nothing, and
/// the calls behind it move up. The order of arrival is the order in which the futures are first polled.
///
/// The inner service is made ready before the call waits, so that no delay separates the call's turn from its start. So
/// a call holds the resources of a ready service while it waits, such as a permit of tower's concurrency limit: such a
/// limit belongs outside of this layer.
///
/// The future must be polled within a tokio runtime with timers enabled. They are exact to about a millisecond, so a
/// rate of hundreds a second needs a burst of some calls to be reached in full.
///
/// ```
/// use std::time::Duration;
/// use tidegate::layers::{LimitLayer, WaitRefusal, LimitServiceError};
/// use tower::{Layer, Service};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let hello = tower::service_fn(|name: &'static str| async move { Ok::<_, std::io::Error>(format!("hello {name}")) });
/// let mut service = LimitLayer::new("2 per 1h")?.max_wait(Duration::from_secs(1)).layer(hello);
/// assert_eq!(service.call("you").await?, "hello you");
/// assert_eq!(service.call("and you").await?, "hello and you");
/// let Err(LimitServiceError::Refused(WaitRefusal::TooLong { wait })) = service.call("all").await else { panic!("three in an hour") };
/// assert_eq!(wait.as_secs_ceil(), 3600);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct LimitLayer<C = SystemClock> {
    queue: Arc<LimitQueue<C>>,
    wait_limits: WaitLimits,
}

#[derive(Clone, Copy, Debug)]
struct WaitLimits {
    max_wait: Span,
    max_waiting: usize,
}

impl<C> Clone for LimitLayer<C> {
    fn clone(&self) -> Self {
        Self { queue: Arc::clone(&self.queue), wait_limits: self.wait_limits }
    }
}

impl LimitLayer {
    /// Returns a layer for a limit in the syntax of policies: `"10/s burst 20"`, `"40 per 10s"`, `"1000 per day in
    /// Europe/Paris"`.
    ///
    /// # Errors
    /// The quantity is invalid, is `unlimited`, or counts calls in flight: tower has a layer for those.
    pub fn new(quantity: &str) -> Result<Self, LimiterError> {
        Self::with_clock(quantity, SystemClock::new())
    }
}

impl<C: Clock> LimitLayer<C> {
    /// [`LimitLayer::new`] with a clock of your own.
    ///
    /// # Errors
    /// As [`LimitLayer::new`].
    pub fn with_clock(quantity: &str, clock: C) -> Result<Self, LimiterError> {
        let kind = match parse_kind(quantity)? {
            LimitKind::Window(window) => {
                let entries = u64::from(window.entries()).max(window.limit().min(MAX_ENTRIES));
                LimitKind::Window(Window::new(window.limit(), window.window(), entries as u32)?)
            }
            kind => kind,
        };
        Self::from_kind(kind, clock)
    }

    /// Returns a layer for this limit.
    ///
    /// # Errors
    /// [`LimiterError::InFlight`].
    pub fn from_kind(kind: LimitKind, clock: C) -> Result<Self, LimiterError> {
        let limiter = KeyedLimiter::from_limit(Limit::new(kind.clone()), MAX_BYTES, clock, RandomState::new())?;
        let queue = LimitQueue { limiter, kind, head_permit: Semaphore::new(1), waiting: AtomicUsize::new(0) };
        Ok(Self {
            queue: Arc::new(queue),
            wait_limits: WaitLimits { max_wait: Span::MAX, max_waiting: DEFAULT_MAX_WAITING },
        })
    }

    /// Sets the longest wait. A call that would have to wait longer is refused at once, with the calls before it taken
    /// into account. Default [`Span::MAX`].
    #[must_use]
    pub fn max_wait(mut self, max_wait: Duration) -> Self {
        self.wait_limits.max_wait = Span::from_duration(max_wait);
        self
    }

    /// Sets the most calls that wait. A call beyond that is refused at once. 0 counts as 1. Default
    /// [`DEFAULT_MAX_WAITING`].
    #[must_use]
    pub fn max_waiting(mut self, max_waiting: usize) -> Self {
        self.wait_limits.max_waiting = max_waiting.max(1);
        self
    }
}

impl<I, C> Layer<I> for LimitLayer<C> {
    type Service = LimitService<I, C>;

    fn layer(&self, inner: I) -> Self::Service {
        LimitService { inner, queue: Arc::clone(&self.queue), wait_limits: self.wait_limits }
    }
}

/// The reason why a call was refused. Nothing was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WaitRefusal {
    /// The wait would exceed the longest wait.
    #[error("the limit has no room for {wait}")]
    TooLong {
        /// The time until the call's turn, with the calls before it taken into account. It is the earliest possible
        /// time for a quota with fewer calls left than wait.
        wait: Span,
    },
    /// The limit never has room.
    #[error("the limit never has room")]
    Never,
    /// The most calls wait already.
    #[error("too many calls wait for their turn")]
    QueueFull,
}

/// The reason that a service behind a [`LimitLayer`] has no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitServiceError<E> {
    /// The service wasn't called.
    Refused(WaitRefusal),
    /// The service's own error.
    Inner(E),
}

impl<E: fmt::Display> fmt::Display for LimitServiceError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => refusal.fmt(f),
            Self::Inner(error) => error.fmt(f),
        }
    }
}

impl<E: Error> Error for LimitServiceError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Refused(_) => Some(&NotSent),
            Self::Inner(error) => error.source(),
        }
    }
}

/// A service behind a [`LimitLayer`].
#[derive(Debug)]
pub struct LimitService<I, C = SystemClock> {
    inner: I,
    queue: Arc<LimitQueue<C>>,
    wait_limits: WaitLimits,
}

impl<I: Clone, C> Clone for LimitService<I, C> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), queue: Arc::clone(&self.queue), wait_limits: self.wait_limits }
    }
}

impl<I, Req, C> Service<Req> for LimitService<I, C>
where
    I: Service<Req> + Clone + Send + 'static,
    I::Future: Send,
    Req: Send + 'static,
    C: Clock,
{
    type Response = I::Response;
    type Error = LimitServiceError<I::Error>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context).map_err(LimitServiceError::Inner)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        // `call` must use the instance that was made ready, not its clone.
        let fresh = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, fresh);
        let (queue, wait_limits) = (Arc::clone(&self.queue), self.wait_limits);
        Box::pin(async move {
            queue.acquire_turn(wait_limits).await.map_err(LimitServiceError::Refused)?;
            inner.call(request).await.map_err(LimitServiceError::Inner)
        })
    }
}

/// The queue before a limit. Only the call at its head checks the limit.
#[derive(Debug)]
struct LimitQueue<C> {
    limiter: KeyedLimiter<(), C>,
    kind: LimitKind,
    /// Held by the head; the semaphore serves in the order of arrival.
    head_permit: Semaphore,
    waiting: AtomicUsize,
}

impl<C: Clock> LimitQueue<C> {
    /// Waits for one call's turn, and counts it.
    async fn acquire_turn(&self, wait_limits: WaitLimits) -> Result<(), WaitRefusal> {
        let (_place, ahead) = self.join(wait_limits.max_waiting).ok_or(WaitRefusal::QueueFull)?;
        if ahead > 0 {
            wait_limits.check_wait(self.estimate_turn(ahead as u64))?;
        }
        let _head = self.head_permit.acquire().await.expect("invariant: nobody closes the semaphore");
        while let Some(wait) = wait_limits.check_wait(self.limiter.check(&()))? {
            tokio::time::sleep(wait.as_duration()).await;
        }
        Ok(())
    }

    /// Joins the end of the queue. Returns the number of calls ahead; `None` if the queue is full.
    fn join(&self, max_waiting: usize) -> Option<(WaitingGuard<'_>, usize)> {
        let ahead = self.waiting.fetch_add(1, Ordering::Relaxed);
        let waiting_guard = WaitingGuard(&self.waiting);
        (ahead < max_waiting).then_some((waiting_guard, ahead))
    }

    /// Estimates the wait of a call with this many calls ahead, if none of them leaves. Up to the limit's capacity, its
    /// turn is when the limit has room for all these calls at once. Beyond, the limit continues at its rate.
    fn estimate_turn(&self, ahead: u64) -> LimiterDecision {
        let capacity = self.kind.capacity().max(1);
        let (cost, extra_wait) = match &self.kind {
            LimitKind::Rate(rate) => {
                let beyond = (ahead + 1).saturating_sub(capacity);
                let micros = u128::from(rate.per().as_micros()) * u128::from(beyond);
                let more = micros.div_ceil(u128::from(rate.count()));
                ((ahead + 1).min(capacity), Span::from_micros(u64::try_from(more).unwrap_or(u64::MAX)))
            }
            LimitKind::Window(window) => (ahead % capacity + 1, window.window().times(ahead / capacity)),
            LimitKind::Quota(_) | LimitKind::Concurrency(_) | LimitKind::Cooldown(_) | LimitKind::Pace(_) => {
                ((ahead + 1).min(capacity), Span::ZERO)
            }
        };
        match self.limiter.peek_cost(&(), cost) {
            LimiterDecision::Admitted if !extra_wait.is_zero() => LimiterDecision::RetryAfter(extra_wait),
            LimiterDecision::RetryAfter(wait) => LimiterDecision::RetryAfter(wait + extra_wait),
            decision => decision,
        }
    }
}

impl WaitLimits {
    /// Returns the time to wait for a turn; `None` if it is now.
    fn check_wait(self, decision: LimiterDecision) -> Result<Option<Span>, WaitRefusal> {
        match decision {
            LimiterDecision::Admitted => Ok(None),
            LimiterDecision::RetryAfter(wait) if wait <= self.max_wait => Ok(Some(wait)),
            LimiterDecision::RetryAfter(wait) => Err(WaitRefusal::TooLong { wait }),
            LimiterDecision::Never => Err(WaitRefusal::Never),
        }
    }
}

/// A position in the queue, given up when dropped.
struct WaitingGuard<'a>(&'a AtomicUsize);

impl Drop for WaitingGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
