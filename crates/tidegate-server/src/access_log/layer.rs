//! The access log around the services of a listener.

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame};
use pin_project_lite::pin_project;

use super::{AccessEntry, AccessLog};
use crate::body::{BoxError, ResponseBody, is_last};
use crate::local_response::LoggedStatus;
use crate::watchdog::{ConnectionPhase, ConnectionWatch};

/// A request that has no response yet.
struct OpenRequest {
    log: Arc<AccessLog>,
    watch: Arc<ConnectionWatch>,
}

impl AccessLog {
    /// Opens the entry of a request, which is written when its response ends.
    pub(crate) fn log_response<B: Body, F>(
        self: &Arc<Self>,
        listener: &'static str,
        watch: &Arc<ConnectionWatch>,
        request: Request<B>,
        client_ip: impl FnOnce(&Request<B>) -> IpAddr,
        respond: impl FnOnce(Request<B>) -> F,
    ) -> LoggedResponseFuture<F> {
        let open = (!self.is_off()).then(|| {
            watch.access.put(Box::new(AccessEntry::of_request(listener, self.now(), client_ip(&request), &request)));
            OpenRequest { log: Arc::clone(self), watch: Arc::clone(watch) }
        });
        let yielding =
            watch.must_yield(size(&request)).then(|| YieldBeforeResponse { watch: Arc::clone(watch), phase: None });
        LoggedResponseFuture { respond: respond(request), open, yielding }
    }
}

/// The bytes of a request's head, and of its body if it tells them.
fn size<B: Body>(request: &Request<B>) -> usize {
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    let headers = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len());
    let body = usize::try_from(request.body().size_hint().lower()).unwrap_or(usize::MAX);
    headers.fold(body, usize::saturating_add).saturating_add(target)
}

impl OpenRequest {
    /// Writes the line of a response whose body is at hand, otherwise leaves that to the body.
    fn finish(self, response: Response<ResponseBody>) -> Response<ResponseBody> {
        let Some(mut entry) = self.watch.access.take() else { return response };
        let logged = response.extensions().get::<LoggedStatus>();
        entry.note_status(logged.map_or(response.status(), |logged| logged.0));
        if let ResponseBody::Full(bytes) = response.body() {
            if !entry.has_no_body() {
                entry.bytes = bytes.as_ref().map_or(0, Bytes::len) as u64;
            }
            self.log.write(&entry);
            return response;
        }
        let log = Arc::clone(&self.log);
        response.map(|inner| {
            let is_complete = entry.has_no_body() || inner.is_end_stream();
            ResponseBody::Logged(Box::new(LoggedBody { inner, log, entry, is_complete }))
        })
    }
}

impl Drop for OpenRequest {
    /// Writes the line of a request whose client has gone before the response.
    fn drop(&mut self) {
        if let Some(mut entry) = self.watch.access.take() {
            entry.is_aborted = true;
            self.log.write(&entry);
        }
    }
}

/// Lets all other tasks run once before a response.
struct YieldBeforeResponse {
    watch: Arc<ConnectionWatch>,
    /// The phase of the request, while other tasks run.
    phase: Option<ConnectionPhase>,
}

impl YieldBeforeResponse {
    #[cold]
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(phase) = self.phase.take() {
            self.watch.enter(phase);
            return Poll::Ready(());
        }
        // The response may be at hand, so that the connection seems to be between two requests.
        self.phase = Some(self.watch.phase());
        self.watch.enter(ConnectionPhase::Deciding);
        pin!(tokio::task::yield_now()).poll(cx)
    }
}

pin_project! {
    /// The future of a response that the access log notes.
    pub(crate) struct LoggedResponseFuture<F> {
        #[pin]
        respond: F,
        open: Option<OpenRequest>,
        yielding: Option<YieldBeforeResponse>,
    }
}

impl<F: Future<Output = Result<Response<ResponseBody>, Infallible>>> Future for LoggedResponseFuture<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        if let Some(yielding) = this.yielding {
            ready!(yielding.poll(cx));
            *this.yielding = None;
        }
        let response = ready!(this.respond.poll(cx));
        Poll::Ready(match this.open.take() {
            None => response,
            Some(open) => response.map(|response| open.finish(response)),
        })
    }
}

/// A response's body, whose end writes the line of its request.
pub(crate) struct LoggedBody {
    pub(crate) inner: ResponseBody,
    log: Arc<AccessLog>,
    entry: Box<AccessEntry>,
    is_complete: bool,
}

impl LoggedBody {
    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                self.entry.bytes += frame.data_ref().map_or(0, Bytes::len) as u64;
                self.is_complete = is_last(frame, &self.inner);
            }
            Poll::Ready(None) => self.is_complete = true,
            Poll::Ready(Some(Err(_))) | Poll::Pending => {}
        }
        polled
    }
}

impl Drop for LoggedBody {
    fn drop(&mut self) {
        self.entry.is_aborted = !self.is_complete;
        self.log.write(&self.entry);
    }
}
