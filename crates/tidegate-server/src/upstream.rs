//! A client of one plain HTTP/1.1 server, with a pool of idle connections.
//!
//! *Why here:* a general client keys its pool by host. It has each request wait both for an idle connection and for a
//! new one, and passes every response through a task of its own. One server and one protocol only need a stack of idle
//! connections under one lock. The newest is used first, and the oldest are closed before the server closes them.

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::uri::Authority;
use http::{HeaderValue, Request, Response, StatusCode, Uri};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::client::legacy::connect::HttpConnector;
use parking_lot::Mutex;
use tidegate_outbound::causes;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tower_service::Service as _;

use crate::body::{Upload, is_last};

/// The time that an idle connection is kept. Node.js, the fastest of the common servers, closes after 5 s.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// The number of steps in which an idle connection ages.
const AGE_STEPS: u32 = 4;

/// A server and the idle connections to it.
pub(crate) struct UpstreamClient {
    address: Uri,
    /// The server's name as a `Host` value.
    pub(crate) host: HeaderValue,
    connector: HttpConnector,
    connect_timeout: Duration,
    /// The maximum number of idle connections.
    max_idle: usize,
    http: http1::Builder,
    idle: Mutex<IdleConnections>,
    not_empty: Notify,
}

#[derive(Default)]
struct IdleConnections {
    current_age: u32,
    stack: Vec<(u32, SendRequest<Upload>)>,
}

/// The reason why there is no response of the server to forward.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpstreamError {
    #[error("can't connect to the upstream: {0}")]
    Connect(io::Error),
    #[error("connecting to the upstream takes too long")]
    ConnectTimeout,
    #[error("the upstream broke off: {0}")]
    Broken(#[source] hyper::Error),
    /// The request was never sent, because its connection ended before that.
    #[error("the upstream broke off: {0}")]
    Unsent(#[source] hyper::Error),
    #[error("the upstream switched protocols, but the request asked for no upgrade")]
    UnexpectedUpgrade,
    #[error("no progress in time")]
    Timeout,
}

impl UpstreamClient {
    /// Returns a client of the server at this host and port. Port 80 may be left out. `connect_timeout` includes the
    /// name look-up; `max_idle` is the maximum number of idle connections.
    pub(crate) fn new(authority: &Authority, connect_timeout: Duration, max_idle: usize) -> Arc<Self> {
        let address = Uri::try_from(format!("http://{authority}")).expect("invariant: an authority is part of a URL");
        // Most clients leave out the default port of HTTP, and some sign the header that way.
        let port = authority.port_u16().filter(|port| *port != 80);
        let host = port.map_or_else(|| authority.host().to_owned(), |port| format!("{}:{port}", authority.host()));
        let host = HeaderValue::try_from(host).expect("invariant: an authority's host is a value of Host");
        Arc::new(Self {
            address,
            host,
            connector: tcp_connector(connect_timeout),
            connect_timeout,
            max_idle,
            http: http1::Builder::new(),
            idle: Mutex::default(),
            not_empty: Notify::new(),
        })
    }

    /// Sends a request and waits for the head of the response.
    ///
    /// An idle connection may turn out to be closed. While nothing was sent, the request is tried on another one.
    #[expect(clippy::manual_async_fn, reason = "one would hold the request twice, as it came and as it goes on")]
    pub(crate) fn send(
        self: Arc<Self>,
        mut request: Request<Upload>,
    ) -> impl Future<Output = Result<Response<UpstreamBody>, UpstreamError>> + Send {
        async move {
            loop {
                let (mut sender, kept) = match self.take_idle() {
                    Some(sender) => (sender, true),
                    // Boxed, because requests over an idle connection would need the space for it too.
                    None => (Box::pin(self.connect()).await?, false),
                };
                match sender.try_send_request(request).await {
                    Ok(response) => {
                        // A connection that has switched protocols takes no further request.
                        let stays = response.status() != StatusCode::SWITCHING_PROTOCOLS;
                        let connection = stays.then_some((sender, self));
                        return Ok(response.map(|body| UpstreamBody::new(body, connection)));
                    }
                    Err(mut error) => match error.take_message() {
                        Some(unsent) if kept => request = unsent,
                        Some(_) => return Err(UpstreamError::Unsent(error.into_error())),
                        None => return Err(UpstreamError::Broken(error.into_error())),
                    },
                }
            }
        }
    }

    async fn connect(&self) -> Result<SendRequest<Upload>, UpstreamError> {
        let connecting = self.connector.clone().call(self.address.clone());
        let stream = match tokio::time::timeout(self.connect_timeout, connecting).await {
            Ok(connected) => connected.map_err(|error| connect_error(&error))?,
            Err(_) => return Err(UpstreamError::ConnectTimeout),
        };
        let (sender, connection) = self.http.handshake(stream).await.map_err(UpstreamError::Unsent)?;
        tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "a connection to the upstream ended");
            }
        });
        Ok(sender)
    }

    fn take_idle(&self) -> Option<SendRequest<Upload>> {
        let mut idle = self.idle.lock();
        while let Some((_, sender)) = idle.stack.pop() {
            if sender.is_ready() {
                return Some(sender);
            }
        }
        None
    }

    fn put_idle(&self, sender: SendRequest<Upload>) {
        let mut idle = self.idle.lock();
        if idle.stack.len() < self.max_idle {
            let age = idle.current_age;
            idle.stack.push((age, sender));
            if idle.stack.len() == 1 {
                self.not_empty.notify_one();
            }
        }
    }

    /// Closes connections that have been idle for too long; never returns.
    pub(crate) async fn run_idle_cleanup(&self) {
        loop {
            while self.idle.lock().stack.is_empty() {
                self.not_empty.notified().await;
            }
            tokio::time::sleep(IDLE_TIMEOUT / AGE_STEPS).await;
            let mut idle = self.idle.lock();
            idle.current_age = idle.current_age.wrapping_add(1);
            let age = idle.current_age;
            idle.stack.retain(|(since, sender)| age.wrapping_sub(*since) < AGE_STEPS && !sender.is_closed());
        }
    }
}

/// Makes connections with a timeout of `connect` each, which is divided among the addresses of a name.
pub(crate) fn tcp_connector(connect: Duration) -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(connect));
    connector
}

/// Classifies a failure to connect by the system's error.
fn connect_error(error: &(dyn Error + 'static)) -> UpstreamError {
    let cause = causes(error).find_map(|cause| cause.downcast_ref::<io::Error>());
    match cause.map(io::Error::kind) {
        Some(io::ErrorKind::TimedOut) => UpstreamError::ConnectTimeout,
        kind => {
            let text = cause.map_or_else(|| error.to_string(), io::Error::to_string);
            UpstreamError::Connect(io::Error::new(kind.unwrap_or(io::ErrorKind::Other), text))
        }
    }
}

/// The body of a response. Its end returns the connection to the pool. Dropping the body early does the same if the rest
/// of it has already arrived. Otherwise the connection is closed, which tells the server that the rest isn't read.
pub(crate) struct UpstreamBody {
    /// `None` while it is being dropped.
    inner: Option<Incoming>,
    /// The connection in use, and the client whose pool it returns to.
    connection: Option<(SendRequest<Upload>, Arc<UpstreamClient>)>,
}

impl UpstreamBody {
    fn new(inner: Incoming, connection: Option<(SendRequest<Upload>, Arc<UpstreamClient>)>) -> Self {
        let mut body = Self { inner: Some(inner), connection };
        if body.is_end_stream() {
            body.return_to_pool();
        }
        body
    }

    /// Keeps the connection for the next request. If its last message hasn't quite ended on the wire, a task waits for
    /// that; this is rare under load.
    fn return_to_pool(&mut self) {
        let Some((mut sender, upstream)) = self.connection.take() else { return };
        if sender.is_ready() {
            upstream.put_idle(sender);
        } else if !sender.is_closed()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(async move {
                if sender.ready().await.is_ok() {
                    upstream.put_idle(sender);
                }
            });
        }
    }
}

impl Drop for UpstreamBody {
    fn drop(&mut self) {
        // Dropped first: the connection can then discard the rest of the body that has already arrived, and become
        // ready.
        self.inner = None;
        self.return_to_pool();
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(inner) = &mut self.inner else { return Poll::Ready(None) };
        let polled = Pin::new(inner).poll_frame(cx);
        match &polled {
            Poll::Ready(Some(Ok(frame))) if is_last(frame, &*self) => self.return_to_pool(),
            Poll::Ready(None) => self.return_to_pool(),
            Poll::Ready(Some(Err(_))) => self.connection = None,
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

    #[test]
    fn the_host_header_omits_the_default_port() {
        for (authority, host) in [
            ("a.example", "a.example"),
            ("a.example:80", "a.example"),
            ("a.example:8080", "a.example:8080"),
            ("[::1]:80", "[::1]"),
            ("[::80]", "[::80]"),
            ("[::1]:81", "[::1]:81"),
            ("user@a.example:81", "a.example:81"),
        ] {
            let client = UpstreamClient::new(&authority.parse().unwrap(), Duration::from_secs(1), 1);
            assert_eq!(client.host, host, "{authority}");
        }
    }
}
