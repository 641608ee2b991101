//! A circuit breaker, as a layer.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tidegate_core::breaker::{BreakerPermit, ExclusiveAccess};
use tidegate_core::{Breaker, BreakerError, BreakerRefusal, BreakerSpec, Clock, SharedBreaker, Time};
use tower_layer::Layer;
use tower_service::Service;

use super::Classifier;
use crate::SystemClock;
use crate::random::SharedRng;

/// Stops calling a service that fails, and finds out with a few calls when it is back.
///
/// All services made by one layer and its clones share one breaker: make one layer for each service that fails on its
/// own. What a failure is, is told by the [`Classifier`]; an outcome is known, and a slow call's time over, when the
/// service's future is: for HTTP, at the head of the reply.
///
/// A service whose breaker is open is ready, so that its refusal is had at once, even where the service inside isn't.
/// Being ready holds no probe: leave to send is taken by `call`. A call whose future is dropped or panics gives it back.
///
/// ```
/// use tidegate::core::{BreakerSpec, Class};
/// use tidegate::outbound::layers::{BreakerLayer, CircuitError};
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
pub struct BreakerLayer<J, C = SystemClock>(Arc<Circuit<J, C>>);

#[derive(Debug)]
struct Circuit<J, C> {
    breaker: SharedBreaker<Locked>,
    classifier: J,
    clock: C,
    rng: SharedRng,
}

#[derive(Debug)]
struct Locked(Mutex<Breaker>);

impl ExclusiveAccess<Breaker> for Locked {
    fn with<R>(&self, work: impl FnOnce(&mut Breaker) -> R) -> R {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<J, C> Clone for BreakerLayer<J, C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<J> BreakerLayer<J> {
    /// A closed breaker.
    ///
    /// # Errors
    /// The breaker can't be made: nothing opens it, or a setting is out of its range.
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
        let breaker = SharedBreaker::new(Locked(Mutex::new(Breaker::new(spec)?)));
        Ok(Self(Arc::new(Circuit { breaker, classifier, clock, rng: SharedRng::default() })))
    }

    /// Looks at the breaker as it stands now.
    pub fn look<T>(&self, look: impl FnOnce(&Breaker, Time) -> T) -> T {
        let now = self.0.clock.now();
        self.0.breaker.with(|breaker| look(breaker, now))
    }

    /// Closes the breaker, whatever it has seen.
    pub fn reset(&self) {
        self.0.breaker.with(Breaker::reset);
    }
}

impl<I, J, C> Layer<I> for BreakerLayer<J, C> {
    type Service = BreakerService<I, J, C>;

    fn layer(&self, inner: I) -> Self::Service {
        BreakerService { inner, circuit: Arc::clone(&self.0), ready: Ready::Unasked }
    }
}

/// Why there is no reply from a service behind a [`BreakerLayer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CircuitError<E> {
    /// The service wasn't called: its breaker is open, or all calls that may try it are under way.
    #[error("Circuit breaker is {}", .0.state.name())]
    Open(BreakerRefusal),
    /// The service's own error.
    #[error(transparent)]
    Inner(E),
}

/// A service behind a [`BreakerLayer`].
#[derive(Debug)]
pub struct BreakerService<I, J, C = SystemClock> {
    inner: I,
    circuit: Arc<Circuit<J, C>>,
    ready: Ready,
}

/// For what a service is ready.
#[derive(Clone, Copy, Debug)]
enum Ready {
    /// Nobody asked, or the service inside isn't yet.
    Unasked,
    /// To call the service inside.
    Inside,
    /// To refuse: the service inside wasn't asked, so it mustn't be called, even if the breaker lets a call through by
    /// then.
    Refusing(BreakerRefusal),
}

impl<I: Clone, J, C> Clone for BreakerService<I, J, C> {
    /// A clone is ready for nothing.
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), circuit: Arc::clone(&self.circuit), ready: Ready::Unasked }
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
        if !matches!(self.ready, Ready::Inside) {
            self.ready = match self.circuit.breaker.peek(self.circuit.clock.now()) {
                Err(refusal) => Ready::Refusing(refusal),
                Ok(()) => {
                    self.ready = Ready::Unasked;
                    ready!(self.inner.poll_ready(context)).map_err(CircuitError::Inner)?;
                    Ready::Inside
                }
            };
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let began_at = self.circuit.clock.now();
        let breaker = &self.circuit.breaker;
        let taken = match self.ready {
            Ready::Unasked | Ready::Inside => breaker.take(began_at),
            Ready::Refusing(refusal) => Err(breaker.peek(began_at).err().unwrap_or(refusal)),
        };
        match taken {
            Ok(permit) => {
                self.ready = Ready::Unasked;
                // Before the service is called, which may panic.
                let pass = Pass { circuit: Arc::clone(&self.circuit), permit: Some(permit), began_at };
                BreakerFuture { state: State::Sent { reply: self.inner.call(request), pass } }
            }
            Err(refusal) => {
                // The service inside, if it is ready, stays so for the next call.
                if let Ready::Refusing(_) = self.ready {
                    self.ready = Ready::Unasked;
                }
                BreakerFuture { state: State::Refused { refusal } }
            }
        }
    }
}

/// Leave to send one call: given back when dropped, unless it was reported.
#[derive(Debug)]
struct Pass<J, C> {
    circuit: Arc<Circuit<J, C>>,
    permit: Option<BreakerPermit>,
    began_at: Time,
}

impl<J, C: Clock> Pass<J, C> {
    fn report<Res, E>(&mut self, outcome: &Result<Res, E>)
    where
        J: Classifier<Res, E>,
    {
        let Circuit { breaker, classifier, clock, rng } = &*self.circuit;
        let now = clock.now();
        let class = classifier.classify(outcome.as_ref(), now).class;
        if let Some(permit) = self.permit.take() {
            breaker.report(permit, class, now.since(self.began_at), now, &mut { rng });
        }
    }
}

impl<J, C> Drop for Pass<J, C> {
    fn drop(&mut self) {
        if let Some(permit) = self.permit.take() {
            self.circuit.breaker.give_back(permit);
        }
    }
}

pin_project! {
    /// The reply of a service behind a [`BreakerLayer`].
    #[derive(Debug)]
    pub struct BreakerFuture<F, J, C = SystemClock> {
        #[pin]
        state: State<F, J, C>,
    }
}

pin_project! {
    #[project = StateProjection]
    #[derive(Debug)]
    enum State<F, J, C> {
        Sent { #[pin] reply: F, pass: Pass<J, C> },
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
            StateProjection::Sent { reply, pass } => {
                let outcome = ready!(reply.poll(context));
                pass.report(&outcome);
                Poll::Ready(outcome.map_err(CircuitError::Inner))
            }
            StateProjection::Refused { refusal } => Poll::Ready(Err(CircuitError::Open(*refusal))),
        }
    }
}
