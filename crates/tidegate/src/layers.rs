//! Retry, breaker and limit as independent tower layers, for any service.
//!
//! They use the same algorithms as [`Provider::call`](crate::outbound::Provider::call) and share nothing else with it:
//! they have no queue with lanes, no credentials and no store. A [`Classifier`] defines the meaning of an outcome.
//!
//! Put them in this order, the outermost first:
//!
//! | layer | reason |
//! | --- | --- |
//! | [`RetryLayer`] | the other layers see each attempt |
//! | [`BreakerLayer`] | no request waits in the queue for a service that is down |
//! | [`LimitLayer`] | only requests that are sent count |
//!
//! ```
//! use std::sync::Arc;
//! use http::{Request, Response};
//! use tidegate::layers::{BreakerLayer, BreakerSpec, Budget, BudgetSpec, LimitLayer};
//! use tidegate::layers::{RepeatIdempotent, Retry, RetryLayer, StatusClassifier};
//! use tower::{Service, ServiceBuilder, ServiceExt};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let client = tower::service_fn(|_: Request<()>| async { Ok::<_, std::io::Error>(Response::new("hello")) });
//! let budget = Arc::new(Budget::new(BudgetSpec::default()));
//! let mut service = ServiceBuilder::new()
//!     .layer(RetryLayer::new(Retry::default(), Some(budget), StatusClassifier).repeat_policy(RepeatIdempotent))
//!     .layer(BreakerLayer::new(BreakerSpec::default(), StatusClassifier)?)
//!     .layer(LimitLayer::new("10/s burst 20")?)
//!     .service(client);
//!
//! let reply = service.ready().await?.call(Request::get("http://api.example/").body(())?).await?;
//! assert_eq!(reply.into_body(), "hello");
//! # Ok(())
//! # }
//! ```

mod breaker;
mod classifier;
mod limit;
mod repeat;
mod retry;

pub use breaker::{BreakerFuture, BreakerLayer, BreakerService, CircuitError};
pub use classifier::{Classification, Classifier, InnerClassifier, NotSent, StatusClassifier};
pub use limit::{DEFAULT_MAX_WAITING, LimitLayer, LimitService, LimitServiceError, WaitRefusal};
pub use repeat::{RepeatAll, RepeatIdempotent, RepeatPolicy};
pub use retry::{RetryLayer, RetryService};
pub use tidegate_core::{BreakerSpec, Budget, BudgetSpec, Retry};
