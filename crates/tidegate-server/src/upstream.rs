//! One server that is spoken to in plain HTTP/1.1: connections to it, kept for the next request.
//!
//! *Why here:* a general client keys its pool by host, has each request wait for a connection that stands and for one that
//! is being made, and hands every response back through a task of its own. To one server by one protocol, a stack of
//! idle connections under one lock does; the newest is used first, and the oldest leave before the server closes them.

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::uri::Authority;
use http::{HeaderValue, Request, Response, StatusCode, Uri};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::client::legacy::connect::HttpConnector;
use tidegate::outbound::causes;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tower_service::Service as _;

use crate::body::{BoxError, is_last};
use crate::watch::lock;

/// In how many steps an idle connection ages.
const AGES: u32 = 4;

/// A server and the idle connections to it.
pub(crate) struct Upstream<B> {
    place: Uri,
    host: HeaderValue,
    connector: HttpConnector,
    rules: Rules,
    http: http1::Builder,
    idle: Mutex<Idle<B>>,
    filled: Notify,
}

/// How connections to a server are made and kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// How long making one may take, the look-up of the name included.
    pub(crate) connect: Duration,
    /// How long one is kept without a request.
    pub(crate) kept: Duration,
    /// How many are kept so.
    pub(crate) cap: usize,
}

struct Idle<B> {
    age: u32,
    stack: Vec<(u32, SendRequest<B>)>,
}

impl<B> Default for Idle<B> {
    fn default() -> Self {
        Self { age: 0, stack: Vec::new() }
    }
}

/// Why the server gave no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("can't connect to the upstream: {0}")]
    Connect(io::Error),
    #[error("connecting to the upstream takes too long")]
    ConnectTimeout,
    #[error("the upstream broke off: {0}")]
    Broken(#[source] hyper::Error),
    /// The request was never sent: its connection ended before that.
    #[error("the upstream broke off: {0}")]
    Unsent(#[source] hyper::Error),
}

impl<B> Upstream<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    /// The server at this host and port, where port 80 may be left out.
    pub(crate) fn new(authority: &Authority, rules: Rules) -> Arc<Self> {
        let place = Uri::try_from(format!("http://{authority}")).expect("invariant: an authority is part of a URL");
        // As most clients write it, and as some sign it: without the port that is HTTP's own.
        let port = authority.port_u16().filter(|port| *port != 80);
        let host = port.map_or_else(|| authority.host().to_owned(), |port| format!("{}:{port}", authority.host()));
        let host = HeaderValue::try_from(host).expect("invariant: an authority's host is a value of Host");
        Arc::new(Self {
            place,
            host,
            connector: tcp(rules.connect),
            rules,
            http: http1::Builder::new(),
            idle: Mutex::default(),
            filled: Notify::new(),
        })
    }

    /// Sends a request and waits for the head of the answer.
    ///
    /// A kept connection may turn out to be closed; as long as nothing was sent, the request goes to another one.
    #[expect(clippy::manual_async_fn, reason = "one would hold the request twice, as it came and as it goes on")]
    pub(crate) fn send(
        self: Arc<Self>,
        mut request: Request<B>,
    ) -> impl Future<Output = Result<Response<Reply<B>>, Failure>> + Send {
        async move {
            loop {
                let (mut sender, kept) = match self.take() {
                    Some(sender) => (sender, true),
                    // Boxed, as requests over a kept connection would take the room for it too.
                    None => (Box::pin(self.connect()).await?, false),
                };
                match sender.try_send_request(request).await {
                    Ok(response) => {
                        // A connection that has changed its protocol takes no further request.
                        let stays = response.status() != StatusCode::SWITCHING_PROTOCOLS;
                        let lease = stays.then_some(Lease { sender, upstream: self });
                        return Ok(response.map(|body| Reply::new(body, lease)));
                    }
                    Err(mut error) => match error.take_message() {
                        Some(unsent) if kept => request = unsent,
                        Some(_) => return Err(Failure::Unsent(error.into_error())),
                        None => return Err(Failure::Broken(error.into_error())),
                    },
                }
            }
        }
    }

    async fn connect(&self) -> Result<SendRequest<B>, Failure> {
        let connecting = self.connector.clone().call(self.place.clone());
        let stream = match tokio::time::timeout(self.rules.connect, connecting).await {
            Ok(connected) => connected.map_err(|error| unconnected(&error))?,
            Err(_) => return Err(Failure::ConnectTimeout),
        };
        let (sender, connection) = self.http.handshake(stream).await.map_err(Failure::Unsent)?;
        tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "a connection to the upstream ended");
            }
        });
        Ok(sender)
    }
}

impl<B> Upstream<B> {
    /// The server as `Host` names it.
    pub(crate) fn host(&self) -> &HeaderValue {
        &self.host
    }

    fn take(&self) -> Option<SendRequest<B>> {
        let mut idle = lock(&self.idle);
        while let Some((_, sender)) = idle.stack.pop() {
            if sender.is_ready() {
                return Some(sender);
            }
        }
        None
    }

    fn keep(&self, sender: SendRequest<B>) {
        let mut idle = lock(&self.idle);
        if idle.stack.len() < self.rules.cap {
            let age = idle.age;
            idle.stack.push((age, sender));
            if idle.stack.len() == 1 {
                self.filled.notify_one();
            }
        }
    }

    /// Lets go of connections that nobody wanted for a while; runs for ever.
    pub(crate) async fn age(&self) {
        loop {
            while lock(&self.idle).stack.is_empty() {
                self.filled.notified().await;
            }
            tokio::time::sleep(self.rules.kept / AGES).await;
            let mut idle = lock(&self.idle);
            idle.age = idle.age.wrapping_add(1);
            let age = idle.age;
            idle.stack.retain(|(since, sender)| age.wrapping_sub(*since) < AGES && !sender.is_closed());
        }
    }
}

/// Makes connections, each in this time, of which each of a name's addresses has its share.
pub(crate) fn tcp(connect: Duration) -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(connect));
    connector
}

/// Why no connection came about, by what the system says.
fn unconnected(error: &(dyn Error + 'static)) -> Failure {
    let cause = causes(error).find_map(|cause| cause.downcast_ref::<io::Error>());
    match cause.map(io::Error::kind) {
        Some(io::ErrorKind::TimedOut) => Failure::ConnectTimeout,
        kind => {
            let text = cause.map_or_else(|| error.to_string(), io::Error::to_string);
            Failure::Connect(io::Error::new(kind.unwrap_or(io::ErrorKind::Other), text))
        }
    }
}

/// A connection in use.
struct Lease<B> {
    sender: SendRequest<B>,
    upstream: Arc<Upstream<B>>,
}

impl<B: Send + 'static> Lease<B> {
    /// Keeps the connection for the next request. For one whose last message hasn't quite ended on the wire, a task
    /// waits; under load that is rare.
    fn give_back(self) {
        let Self { mut sender, upstream } = self;
        if sender.is_ready() {
            upstream.keep(sender);
        } else if !sender.is_closed()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(async move {
                if sender.ready().await.is_ok() {
                    upstream.keep(sender);
                }
            });
        }
    }
}

/// An answer's body. Its end gives the connection back for the next request, where it came over one of an [`Upstream`]'s.
/// Dropped before, it does so if what is left of it has come already; else that takes the connection down, which tells
/// the server that nobody reads on.
pub(crate) struct Reply<B: Send + 'static> {
    /// `None` once it is being dropped.
    inner: Option<Incoming>,
    lease: Option<Lease<B>>,
}

impl<B: Send + 'static> Reply<B> {
    /// One that came over another's connection.
    pub(crate) fn foreign(inner: Incoming) -> Self {
        Self { inner: Some(inner), lease: None }
    }

    fn new(inner: Incoming, lease: Option<Lease<B>>) -> Self {
        let mut reply = Self { inner: Some(inner), lease };
        if reply.is_end_stream() {
            reply.give_back();
        }
        reply
    }

    fn give_back(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.give_back();
        }
    }
}

impl<B: Send + 'static> Drop for Reply<B> {
    fn drop(&mut self) {
        // Before the connection is asked whether it is ready: it reads away what has come of a body that is gone.
        self.inner = None;
        self.give_back();
    }
}

impl<B: Send + 'static> Body for Reply<B> {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(inner) = &mut self.inner else { return Poll::Ready(None) };
        let polled = Pin::new(inner).poll_frame(cx);
        match &polled {
            Poll::Ready(Some(Ok(frame))) if is_last(frame, &*self) => self.give_back(),
            Poll::Ready(None) => self.give_back(),
            Poll::Ready(Some(Err(_))) => self.lease = None,
            Poll::Ready(Some(Ok(_))) | Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.as_ref().map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::Upload;

    #[test]
    fn the_host_is_named_as_most_clients_do() {
        let rules = Rules { connect: Duration::from_secs(1), kept: Duration::from_secs(4), cap: 1 };
        for (authority, host) in [
            ("a.example", "a.example"),
            ("a.example:80", "a.example"),
            ("a.example:8080", "a.example:8080"),
            ("[::1]:80", "[::1]"),
            ("[::80]", "[::80]"),
            ("[::1]:81", "[::1]:81"),
            ("user@a.example:81", "a.example:81"),
        ] {
            assert_eq!(Upstream::<Upload>::new(&authority.parse().unwrap(), rules).host(), host, "{authority}");
        }
    }
}
