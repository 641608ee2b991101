//! The classification of outcomes.

use std::error::Error;
use std::iter;

use http::Response;
use tidegate_core::{Class, Span, Time};

use super::{CircuitError, LimitServiceError};
use tidegate_policy::verdict::Classified;

/// The meaning of an outcome for the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classification {
    /// The class of the outcome.
    pub class: Class,
    /// The time that the service asks callers to wait before the next request. Zero means the same as `None`.
    pub retry_after: Option<Span>,
    /// True if the service may have acted on the request. A request that wasn't sent may always be retried.
    pub was_sent: bool,
    /// True if the service asks callers not to retry.
    pub asks_not_to_retry: bool,
}

impl From<Class> for Classification {
    /// The classification of a request that was sent, without a requested wait.
    fn from(class: Class) -> Self {
        Self { class, retry_after: None, was_sent: true, asks_not_to_retry: false }
    }
}

/// Classifies the outcomes of a service.
///
/// A closure or function `Fn(Result<&Res, &E>) -> Class`, or `-> Classification`, is a classifier.
pub trait Classifier<Res, E: ?Sized> {
    /// Classifies this outcome, which became known at `now`.
    fn classify(&self, outcome: Result<&Res, &E>, now: Time) -> Classification;
}

impl<F, T, Res, E> Classifier<Res, E> for F
where
    F: Fn(Result<&Res, &E>) -> T,
    T: Into<Classification>,
{
    fn classify(&self, outcome: Result<&Res, &E>, _: Time) -> Classification {
        self(outcome).into()
    }
}

/// Classifies HTTP replies by their status ([`Class::from_status`]). Reads from their headers the time that the service
/// asks callers to wait, and a request not to retry: [`Hints`](tidegate_policy::Hints).
///
/// A 403 is throttled if it says that nothing is left, or when to come back. A throttled request was refused and not
/// carried out, so it may be retried whatever its method. An error with [`NotSent`] in its chain of causes is a layer's
/// own refusal: it says nothing about the service and isn't retried ([`Class::Cancelled`]). Any other error means that
/// the connection failed, possibly after part of the request was sent: [`Class::Transient`].
///
/// For boxed errors, as tower's own timeouts and buffers return them, use [`InnerClassifier`]`(StatusClassifier)`.
#[derive(Clone, Copy, Debug, Default)]
pub struct StatusClassifier;

impl StatusClassifier {
    fn classify_any<B>(outcome: Result<&Response<B>, &(dyn Error + 'static)>, now: Time) -> Classification {
        match outcome {
            Ok(reply) => {
                let verdict = Classified::of_head(reply.status(), reply.headers(), now).verdict;
                Classification {
                    class: verdict.class,
                    retry_after: verdict.wait,
                    was_sent: !verdict.was_refused,
                    asks_not_to_retry: verdict.asks_not_to_retry,
                }
            }
            Err(error) if iter::successors(Some(error), |&cause| cause.source()).any(|cause| cause.is::<NotSent>()) => {
                REFUSED
            }
            Err(_) => Class::Transient.into(),
        }
    }
}

impl<B, E: Error + 'static> Classifier<Response<B>, E> for StatusClassifier {
    fn classify(&self, outcome: Result<&Response<B>, &E>, now: Time) -> Classification {
        Self::classify_any(outcome.map_err(|error| error as _), now)
    }
}

impl<B> Classifier<Response<B>, dyn Error + Send + Sync> for StatusClassifier {
    fn classify(
        &self,
        outcome: Result<&Response<B>, &(dyn Error + Send + Sync + 'static)>,
        now: Time,
    ) -> Classification {
        Self::classify_any(outcome.map_err(|error| error as _), now)
    }
}

/// The cause of an error by which a layer refuses a request instead of sending it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request was not sent")]
pub struct NotSent;

/// Classifies the inner outcome of a service behind a [`BreakerLayer`](super::BreakerLayer) or
/// [`LimitLayer`](super::LimitLayer), and errors in a box. The layer's own refusal says nothing about the service and
/// isn't retried: [`Class::Cancelled`]. [`StatusClassifier`] needs it for boxed errors only.
#[derive(Clone, Copy, Debug, Default)]
pub struct InnerClassifier<J>(pub J);

const REFUSED: Classification =
    Classification { class: Class::Cancelled, retry_after: None, was_sent: false, asks_not_to_retry: false };

impl<Res, E, J: Classifier<Res, E>> Classifier<Res, CircuitError<E>> for InnerClassifier<J> {
    fn classify(&self, outcome: Result<&Res, &CircuitError<E>>, now: Time) -> Classification {
        match outcome {
            Ok(reply) => self.0.classify(Ok(reply), now),
            Err(CircuitError::Inner(error)) => self.0.classify(Err(error), now),
            Err(CircuitError::Open(_)) => REFUSED,
        }
    }
}

impl<Res, E, J: Classifier<Res, E>> Classifier<Res, LimitServiceError<E>> for InnerClassifier<J> {
    fn classify(&self, outcome: Result<&Res, &LimitServiceError<E>>, now: Time) -> Classification {
        match outcome {
            Ok(reply) => self.0.classify(Ok(reply), now),
            Err(LimitServiceError::Inner(error)) => self.0.classify(Err(error), now),
            Err(LimitServiceError::Refused(_)) => REFUSED,
        }
    }
}

impl<Res, J> Classifier<Res, Box<dyn Error + Send + Sync>> for InnerClassifier<J>
where
    J: Classifier<Res, dyn Error + Send + Sync>,
{
    fn classify(&self, outcome: Result<&Res, &Box<dyn Error + Send + Sync>>, now: Time) -> Classification {
        self.0.classify(outcome.map_err(|error| &**error), now)
    }
}
