//! tower-resilience: its circuit breaker, with consecutive failures as in Tidegate's, and its rate limiter.

use super::{Subject, call_once, unkeyed_worker};
use crate::keys::KeySequence;
use crate::measure::Worker;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::time::Duration;
use tower::{Layer, Service, ServiceBuilder};
use tower_resilience_circuitbreaker::{CircuitBreakerLayer, DefaultClassifier};
use tower_resilience_ratelimiter::RateLimiterLayer;

/// Returns a service that succeeds at once.
pub fn immediate() -> impl Service<(), Response = (), Error = Infallible, Future = ImmediateReply> + Clone + Send + Sync
{
    tower::service_fn(|()| ready(Ok(())))
}

/// The reply to a call that succeeds at once.
pub type ImmediateReply = Ready<Result<(), Infallible>>;

/// Returns a closed breaker around a service that replies at once.
pub fn breaker() -> Box<dyn Subject> {
    Box::new(TowerResilienceCalls(circuit_breaker().layer(immediate())))
}

/// Returns the breaker, and inside it a limit that no run reaches.
pub fn breaker_and_limiter() -> Box<dyn Subject> {
    let limiter = RateLimiterLayer::builder().limit_for_period(1_000_000_000).refresh_period(Duration::from_secs(1));
    let limiter = limiter.build().expect("the limit is valid");
    Box::new(TowerResilienceCalls(ServiceBuilder::new().layer(circuit_breaker()).layer(limiter).service(immediate())))
}

fn circuit_breaker() -> CircuitBreakerLayer<DefaultClassifier> {
    let breaker =
        CircuitBreakerLayer::builder().consecutive_failures(5).wait_duration_in_open(Duration::from_secs(300));
    breaker.build().expect("the breaker is valid")
}

struct TowerResilienceCalls<S>(S);

impl<S: Service<()> + Clone + Send + Sync> Subject for TowerResilienceCalls<S> {
    fn name(&self) -> &'static str {
        "tower-resilience"
    }

    fn decide_once(&self, _: &String) -> bool {
        call_once(&mut self.0.clone())
    }

    fn worker<'a>(&'a self, _: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        let mut service = self.0.clone();
        unkeyed_worker(move || call_once(&mut service))
    }
}
