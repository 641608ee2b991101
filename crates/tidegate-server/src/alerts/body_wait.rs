//! The waits that receivers tell in the bodies of their replies, as Telegram and Discord do.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::header::{HeaderName, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt as _, Empty, Limited};
use serde_json::Value;
use tower_service::Service;

use crate::body::BoxError;

/// The longest body that is searched for a wait. None is found in longer ones.
const MAX_BODY: usize = 16 << 10;
/// The places of the seconds to wait: Telegram's and Discord's.
const POINTERS: [&str; 2] = ["/parameters/retry_after", "/retry_after"];
/// The header with the wait in milliseconds, which counts before `Retry-After`. The number in a body is the more exact.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// A client whose replies tell the wait of their bodies in a header. The bodies themselves are dropped.
#[derive(Clone)]
pub(super) struct BodyWaits<T>(pub(super) T);

impl<T, Q, B> Service<Request<Q>> for BodyWaits<T>
where
    T: Service<Request<Q>, Response = Response<B>, Error = BoxError, Future: Send + 'static>,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send,
{
    type Response = Response<Empty<Bytes>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let sent = self.0.call(request);
        async move {
            let (mut head, body) = sent.await?.into_parts();
            if matches!(head.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
                && let Ok(body) = Limited::new(body, MAX_BODY).collect().await
                && let Some(millis) = told_millis(&body.to_bytes())
            {
                head.headers.insert(RETRY_AFTER_MS, HeaderValue::from(millis));
            }
            Ok(Response::from_parts(head, Empty::new()))
        }
        .boxed()
    }
}

/// The milliseconds that a body asks to wait, rounded up.
fn told_millis(body: &[u8]) -> Option<u64> {
    let json: Value = serde_json::from_slice(body).ok()?;
    let seconds =
        POINTERS.iter().find_map(|pointer| json.pointer(pointer)?.as_f64()).filter(|seconds| *seconds > 0.0)?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, and a cast saturates")]
    Some((seconds * 1000.0).ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_read_from_these_bodies() {
        let telegram = "{\"ok\":false,\"error_code\":429,\"description\":\"Too Many Requests: retry after 5\",\"parameters\":{\"retry_after\":5}}";
        for (body, expected) in [
            (telegram, Some(5000)),
            ("{\"message\":\"You are being rate limited.\",\"retry_after\":0.3125,\"global\":false}", Some(313)),
            ("{\"ok\":false,\"error\":\"ratelimited\"}", None),
            ("{\"retry_after\":0}", None),
            ("{\"retry_after\":-1}", None),
            ("{\"retry_after\":\"5\"}", None),
            ("{\"retry_after\":1e300}", Some(u64::MAX)),
            ("slow down", None),
        ] {
            assert_eq!(told_millis(body.as_bytes()), expected, "{body}");
        }
    }
}
