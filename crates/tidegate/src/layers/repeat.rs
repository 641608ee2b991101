//! The policy for requests that can be sent again.

use http::Request;
use tidegate_core::retry::is_repeatable;

use tidegate_outbound::has_idempotency_key;

/// Copies requests before they are sent, so that they can be sent again.
///
/// A closure or function `Fn(&Req) -> Option<Req>` is a policy.
pub trait RepeatPolicy<Req> {
    /// Returns a copy of the request; `None` if it can't be sent again.
    fn copy(&self, request: &Req) -> Option<Req>;

    /// Returns true if the request may be sent again without doing its work twice. `was_sent` is true if the service
    /// may have acted on it. The default is always true.
    fn is_repeatable(&self, _request: &Req, _was_sent: bool) -> bool {
        true
    }
}

impl<F: Fn(&Req) -> Option<Req>, Req> RepeatPolicy<Req> for F {
    fn copy(&self, request: &Req) -> Option<Req> {
        self(request)
    }
}

/// Sends every request again: for services where a repeated request does no harm.
#[derive(Clone, Copy, Debug, Default)]
pub struct RepeatAll;

impl<Req: Clone> RepeatPolicy<Req> for RepeatAll {
    fn copy(&self, request: &Req) -> Option<Req> {
        Some(request.clone())
    }
}

/// Sends an HTTP request again if it is idempotent, by its method or by an `Idempotency-Key`. Sends other requests
/// again only if they were never sent: [`is_repeatable`].
#[derive(Clone, Copy, Debug, Default)]
pub struct RepeatIdempotent;

impl<B: Clone> RepeatPolicy<Request<B>> for RepeatIdempotent {
    fn copy(&self, request: &Request<B>) -> Option<Request<B>> {
        Some(request.clone())
    }

    fn is_repeatable(&self, request: &Request<B>, was_sent: bool) -> bool {
        is_repeatable(request.method().as_str(), has_idempotency_key(request.headers()), was_sent)
    }
}
