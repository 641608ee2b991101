//! A circuit breaker, as a layer.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tidegate_core::breaker::{BreakerPermit, ExclusiveAccess};
use tidegate_core::{Breaker, BreakerError, BreakerRefusal, BreakerSpec, Clock, SharedBreaker, Time};
use tidegate_runtime::clock::SystemClock;
use tidegate_runtime::random::SharedRng;
use tower_layer::Layer;
use tower_service::Service;

use super::{Classifier, NotSent};

/// Stops calls to a failing service, and finds out with a few calls when it is back.
///
/// All services made by one layer and its clones share one breaker: make one layer for each service that fails
/// independently. The [`Classifier`] defines a failure. An outcome is known, and the duration of a call ends, when the
/// service's future completes: for HTTP, at the head of the reply.
///
/// A service with an open breaker is ready, even if the inner service isn't, so that it refuses calls at once.
/// Readiness holds no probe: `call` takes the permit. A call gives it back if its future is dropped or panics.
///
/// ```
/// use tidegate::outbound::Class;
/// use tidegate::layers::BreakerSpec;
/// use tidegate::layers::{BreakerLayer, CircuitError};
/// use tower::{Layer, Service};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let down = tower::service_fn(|(): ()| async { Err::<(), _>("connection refused") });
/// let classifier = |outcome: Result<&(), &&str>| outcome.map_or(Class::Transient, |_| Class::Success);
/// let breaker = BreakerLayer::new(BreakerSpec { failures: Some(1), ..BreakerSpec::default() }, classifier)?;
/// let mut service = breaker.layer(down);
/// assert_eq!(service.call(()).await, Err(CircuitError::Inner("connection refused")));
/// let refused = service.call(()).await;
/// assert_eq!(refused.map_err(|error| error.to_string()), Err("Circuit breaker is open".to_owned()));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct BreakerLayer<J, C = SystemClock>(Arc<BreakerLayerInner<J, C>>);

#[derive(Debug)]
struct BreakerLayerInner<J, C> {
    breaker: SharedBreaker<LockedBreaker>,
    classifier: J,
    clock: C,
    rng: SharedRng,
}

#[derive(Debug)]
struct LockedBreaker(Mutex<Breaker>);

impl ExclusiveAccess<Breaker> for LockedBreaker {
    fn with<R>(&self, work: impl FnOnce(&mut Breaker) -> R) -> R {
        work(&mut self.0.lock())
    }
}

impl<J, C> Clone for BreakerLayer<J, C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<J> BreakerLayer<J> {
    /// Returns a layer with a closed breaker.
    ///
    /// # Errors
    /// The settings are invalid: nothing opens the breaker, or one is out of its range.
    pub fn new(spec: BreakerSpec, classifier: J) -> Result<Self, BreakerError> {
        Self::with_clock(spec, classifier, SystemClock::new())
    }
}

impl<J, C: Clock> BreakerLayer<J, C> {
    /// [`BreakerLayer::new`] with a clock of your own.
    ///
    /// # Errors
    /// As [`BreakerLayer::new`].
    pub fn with_clock(spec: BreakerSpec, classifier: J, clock: C) -> Result<Self, BreakerError> {
        let breaker = SharedBreaker::new(LockedBreaker(Mutex::new(Breaker::new(spec)?)));
        Ok(Self(Arc::new(BreakerLayerInner { breaker, classifier, clock, rng: SharedRng::default() })))
    }

    /// Runs a function on the present state of the breaker.
    pub fn inspect<T>(&self, look: impl FnOnce(&Breaker, Time) -> T) -> T {
        let now = self.0.clock.now();
        self.0.breaker.with(|breaker| look(breaker, now))
    }

    /// Closes the breaker, regardless of what it has recorded.
    pub fn reset(&self) {
        self.0.breaker.with(Breaker::reset);
    }
}

impl<I, J, C> Layer<I> for BreakerLayer<J, C> {
    type Service = BreakerService<I, J, C>;

    fn layer(&self, inner: I) -> Self::Service {
        BreakerService { inner, shared: Arc::clone(&self.0), readiness: Readiness::Unknown }
    }
}

/// The reason that a service behind a [`BreakerLayer`] has no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CircuitError<E> {
    /// The service wasn't called: its breaker is open, or all probes are under way.
    Open(BreakerRefusal),
    /// The service's own error.
    Inner(E),
}

impl<E: fmt::Display> fmt::Display for CircuitError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(refusal) => write!(f, "Circuit breaker is {}", refusal.state.name()),
            Self::Inner(error) => error.fmt(f),
        }
    }
}

impl<E: Error> Error for CircuitError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Open(_) => Some(&NotSent),
            Self::Inner(error) => error.source(),
        }
    }
}

/// A service behind a [`BreakerLayer`].
#[derive(Debug)]
pub struct BreakerService<I, J, C = SystemClock> {
    inner: I,
    shared: Arc<BreakerLayerInner<J, C>>,
    readiness: Readiness,
}

/// The call that a service is ready for.
#[derive(Clone, Copy, Debug)]
enum Readiness {
    /// `poll_ready` wasn't called, or the inner service isn't ready yet.
    Unknown,
    /// Ready to call the inner service.
    Inner,
    /// Ready to refuse. The inner service wasn't polled for readiness, so it mustn't be called, even if the breaker has
    /// become half-open since.
    Refusing(BreakerRefusal),
}

impl<I: Clone, J, C> Clone for BreakerService<I, J, C> {
    /// Clones without the readiness.
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared), readiness: Readiness::Unknown }
    }
}

impl<I, Req, J, C> Service<Req> for BreakerService<I, J, C>
where
    I: Service<Req>,
    J: Classifier<I::Response, I::Error>,
    C: Clock,
{
    type Response = I::Response;
    type Error = CircuitError<I::Error>;
    type Future = BreakerFuture<I::Future, J, C>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        if !matches!(self.readiness, Readiness::Inner) {
            self.readiness = match self.shared.breaker.peek(self.shared.clock.now()) {
                Err(refusal) => Readiness::Refusing(refusal),
                Ok(()) => {
                    self.readiness = Readiness::Unknown;
                    ready!(self.inner.poll_ready(context)).map_err(CircuitError::Inner)?;
                    Readiness::Inner
                }
            };
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let started_at = self.shared.clock.now();
        let breaker = &self.shared.breaker;
        let permit = match self.readiness {
            Readiness::Unknown | Readiness::Inner => breaker.take(started_at),
            Readiness::Refusing(refusal) => Err(breaker.peek(started_at).err().unwrap_or(refusal)),
        };
        match permit {
            Ok(permit) => {
                self.readiness = Readiness::Unknown;
                // Made before the service is called, because that may panic.
                let guard = BreakerPermitGuard { shared: Arc::clone(&self.shared), permit: Some(permit), started_at };
                BreakerFuture { state: BreakerFutureState::Sent { reply: self.inner.call(request), guard } }
            }
            Err(refusal) => {
                // If the inner service is ready, it stays ready for the next call.
                if let Readiness::Refusing(_) = self.readiness {
                    self.readiness = Readiness::Unknown;
                }
                BreakerFuture { state: BreakerFutureState::Refused { refusal } }
            }
        }
    }
}

/// The permit to send one call. It is given back when dropped, unless it was reported.
#[derive(Debug)]
struct BreakerPermitGuard<J, C> {
    shared: Arc<BreakerLayerInner<J, C>>,
    permit: Option<BreakerPermit>,
    started_at: Time,
}

impl<J, C: Clock> BreakerPermitGuard<J, C> {
    fn report<Res, E>(&mut self, outcome: &Result<Res, E>)
    where
        J: Classifier<Res, E>,
    {
        let BreakerLayerInner { breaker, classifier, clock, rng } = &*self.shared;
        let now = clock.now();
        let class = classifier.classify(outcome.as_ref(), now).class;
        if let Some(permit) = self.permit.take() {
            breaker.report(permit, class, now.since(self.started_at), now, &mut { rng });
        }
    }
}

impl<J, C> Drop for BreakerPermitGuard<J, C> {
    fn drop(&mut self) {
        if let Some(permit) = self.permit.take() {
            self.shared.breaker.give_back(permit);
        }
    }
}

pin_project! {
    /// The reply of a service behind a [`BreakerLayer`].
    #[derive(Debug)]
    pub struct BreakerFuture<F, J, C = SystemClock> {
        #[pin]
        state: BreakerFutureState<F, J, C>,
    }
}

pin_project! {
    #[project = StateProjection]
    #[derive(Debug)]
    enum BreakerFutureState<F, J, C> {
        Sent { #[pin] reply: F, guard: BreakerPermitGuard<J, C> },
        Refused { refusal: BreakerRefusal },
    }
}

impl<F, Res, E, J, C> Future for BreakerFuture<F, J, C>
where
    F: Future<Output = Result<Res, E>>,
    J: Classifier<Res, E>,
    C: Clock,
{
    type Output = Result<Res, CircuitError<E>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProjection::Sent { reply, guard: pass } => {
                let outcome = ready!(reply.poll(context));
                pass.report(&outcome);
                Poll::Ready(outcome.map_err(CircuitError::Inner))
            }
            StateProjection::Refused { refusal } => Poll::Ready(Err(CircuitError::Open(*refusal))),
        }
    }
}
