//! Retries, as a layer.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tidegate_core::{Budget, Clock, FailedAttempt, Retry, RetryTracker, Span, Time, UnreplayableReason};
use tidegate_runtime::clock::SystemClock;
use tidegate_runtime::random::SharedRng;
use tower_layer::Layer;
use tower_service::Service;

use super::{Classifier, RepeatAll, RepeatPolicy};

/// Retries failed calls if a retry can help, does no harm, is possible and can start in time.
///
/// [`tidegate_core::retry`] decides if and when. It considers the class from the [`Classifier`], the attempts and waits
/// of the [`Retry`], and the wait that the service asks for. The [`Budget`] bounds retries as a share of first
/// attempts, and the [timeout](Self::timeout), if there is one, bounds their time. A call returns its last outcome
/// unchanged. But if the service fails to become ready for another attempt, the call returns that error instead.
///
/// Every request counts as safe to repeat, unless [`RetryLayer::repeat_policy`] says otherwise: for HTTP, use
/// [`RepeatIdempotent`](super::RepeatIdempotent).
///
/// The future must be polled within a tokio runtime with timers enabled. A call that is dropped while it waits gives
/// its retry back to the budget.
///
/// ```
/// use tidegate::outbound::Class;
/// use tidegate::layers::Retry;
/// use tidegate::layers::RetryLayer;
/// use tower::{Layer, Service};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// let mut calls = 0;
/// let flaky = tower::service_fn(move |name: &'static str| {
///     calls += 1;
///     let reply = if calls < 3 { Err("connection reset") } else { Ok(format!("hello {name}")) };
///     std::future::ready(reply)
/// });
/// let classifier = |outcome: Result<&String, &&str>| outcome.map_or(Class::Transient, |_| Class::Success);
/// let mut service = RetryLayer::new(Retry::default(), None, classifier).layer(flaky);
/// assert_eq!(service.call("you").await.as_deref(), Ok("hello you"));
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RetryLayer<J, P = RepeatAll, C = SystemClock> {
    retry: Retry,
    budget: Option<Arc<Budget>>,
    timeout: Option<Span>,
    classifier: J,
    repeat_policy: P,
    clock: C,
}

impl<J> RetryLayer<J> {
    /// Returns a layer that retries by the rules of `retry` and while `budget` lasts. Layers may share a budget. With
    /// `None`, only the attempts are bounded.
    pub fn new(retry: Retry, budget: Option<Arc<Budget>>, classifier: J) -> Self {
        Self::with_clock(retry, budget, classifier, SystemClock::new())
    }
}

impl<J, C: Clock> RetryLayer<J, RepeatAll, C> {
    /// [`RetryLayer::new`] with a clock of your own.
    pub fn with_clock(retry: Retry, budget: Option<Arc<Budget>>, classifier: J, clock: C) -> Self {
        Self { retry, budget, timeout: None, classifier, repeat_policy: RepeatAll, clock }
    }
}

impl<J, P, C> RetryLayer<J, P, C> {
    /// Sets the time after which no attempt of a call begins. An attempt under way isn't cancelled: use a timeout layer
    /// inside of this layer for that. Default none.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(Span::from_duration(timeout));
        self
    }

    /// Sets the policy that decides which requests can be sent again, and copies them. Default [`RepeatAll`]: all.
    #[must_use]
    pub fn repeat_policy<Q>(self, repeat_policy: Q) -> RetryLayer<J, Q, C> {
        let Self { retry, budget, timeout, classifier, clock, .. } = self;
        RetryLayer { retry, budget, timeout, classifier, repeat_policy, clock }
    }
}

impl<I, J: Clone, P: Clone, C: Clone> Layer<I> for RetryLayer<J, P, C> {
    type Service = RetryService<I, J, P, C>;

    fn layer(&self, inner: I) -> Self::Service {
        let shared = RetryServiceInner { layer: self.clone(), rng: SharedRng::default() };
        RetryService { inner, shared: Arc::new(shared) }
    }
}

/// A service behind a [`RetryLayer`].
#[derive(Debug)]
pub struct RetryService<I, J, P = RepeatAll, C = SystemClock> {
    inner: I,
    shared: Arc<RetryServiceInner<J, P, C>>,
}

#[derive(Debug)]
struct RetryServiceInner<J, P, C> {
    layer: RetryLayer<J, P, C>,
    rng: SharedRng,
}

impl<I: Clone, J, P, C> Clone for RetryService<I, J, P, C> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<I, Req, J, P, C> Service<Req> for RetryService<I, J, P, C>
where
    I: Service<Req> + Clone + Send + 'static,
    I::Future: Send,
    I::Response: Send,
    I::Error: Send,
    Req: Send + 'static,
    J: Classifier<I::Response, I::Error> + Send + Sync + 'static,
    P: RepeatPolicy<Req> + Send + Sync + 'static,
    C: Clock,
{
    type Response = I::Response;
    type Error = I::Error;
    type Future = Pin<Box<dyn Future<Output = Result<I::Response, I::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), I::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        // `call` must use the instance that was made ready, not its clone.
        let fresh = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, fresh);
        let shared = Arc::clone(&self.shared);
        let deadline = shared.layer.timeout.map_or(Time::NEVER, |timeout| shared.layer.clock.now() + timeout);
        Box::pin(async move { shared.run(inner, request, deadline).await })
    }
}

impl<J, P, C: Clock> RetryServiceInner<J, P, C> {
    /// Sends a request to a service that is ready for it, and retries it.
    async fn run<I, Req>(&self, mut inner: I, mut request: Req, deadline: Time) -> Result<I::Response, I::Error>
    where
        I: Service<Req>,
        J: Classifier<I::Response, I::Error>,
        P: RepeatPolicy<Req>,
    {
        let RetryLayer { retry, budget, classifier, repeat_policy, clock, .. } = &self.layer;
        let budget = budget.as_deref();
        let mut retry_tracker = RetryTracker::new(deadline);
        let mut budget_guard = BudgetGuard(None);
        if let Some(budget) = budget {
            budget.record_first_try();
        }
        loop {
            let copy = repeat_policy.copy(&request);
            budget_guard.0 = None;
            let outcome = inner.call(request).await;
            let now = clock.now();
            let classified = classifier.classify(outcome.as_ref(), now);
            let attempt = FailedAttempt {
                class: classified.class,
                is_repeatable: copy.as_ref().is_none_or(|copy| repeat_policy.is_repeatable(copy, classified.was_sent)),
                unreplayable_reason: copy.is_none().then_some(UnreplayableReason::OneShotBody),
                asks_not_to_retry: classified.asks_not_to_retry,
                retry_after: classified.retry_after,
                has_reservation: false,
                has_other_credential: false,
            };
            let (Ok(at), Some(repeated_request)) =
                (retry_tracker.next_attempt_at(retry, &attempt, budget, now, &mut &self.rng), copy)
            else {
                return outcome;
            };
            budget_guard.0 = budget.filter(|_| attempt.spends_budget());
            // Frees the connection of a reply that is never read.
            drop(outcome);
            if at > now {
                tokio::time::sleep(at.since(now).as_duration()).await;
            }
            poll_fn(|context| inner.poll_ready(context)).await?;
            request = repeated_request;
        }
    }
}

/// The budget of a retry that hasn't been sent yet. The retry is given back when this is dropped.
struct BudgetGuard<'a>(Option<&'a Budget>);

impl Drop for BudgetGuard<'_> {
    fn drop(&mut self) {
        if let Some(budget) = self.0 {
            budget.give_back();
        }
    }
}
