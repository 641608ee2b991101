//! The HTTP/2 connections to one server. Each carries many requests at once.
//!
//! *Why here:* the pool of a general client has one connection per host. Beyond the number of streams that the server
//! accepts, requests would wait, and behind gRPC calls that stay open they would wait without end.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::time::Duration;

use http::header::{CONNECTION, HOST, TRANSFER_ENCODING, UPGRADE};
use http::uri::{Authority, Scheme};
use http::{Request, Uri, Version};
use hyper::client::conn::http2::SendRequest;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::http1_pool::AGE_STEPS;

/// The interval of pings on a connection in use, and the time to answer one.
pub(crate) const PING: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));
/// The most requests on one connection at a time, unless the server takes fewer. It should accept as many (RFC 9113 §6.5.2).
pub(super) const MAX_STREAMS: usize = 100;
/// The bytes of a response that the server may send before its client has read them. All responses of a connection fit
/// in its window, so that slow readers don't hold up the others.
pub(crate) const STREAM_WINDOW: u32 = 128 << 10;
pub(crate) const CONNECTION_WINDOW: u32 = STREAM_WINDOW * MAX_STREAMS as u32;

/// The time that a connection without a request is kept. The server tells when it closes one, so that it can be long.
const IDLE: Duration = Duration::from_secs(60);

/// The open connections.
pub(super) struct Http2Pool<B> {
    connections: Mutex<Vec<Http2Stream<B>>>,
    not_empty: Notify,
    /// Held while connecting, so that requests that come together share a connection.
    pub(super) connecting: tokio::sync::Mutex<()>,
}

/// A place on a connection, for one request.
pub(super) struct Http2Stream<B> {
    pub(super) sender: SendRequest<B>,
    pub(super) usage: Arc<Usage>,
}

/// The use of a connection.
pub(super) struct Usage {
    /// The most requests that the server takes at a time.
    pub(super) max_streams: AtomicUsize,
    /// The requests on the connection, and one for the pool.
    places: AtomicUsize,
    /// The number of steps since the last request began or was seen.
    idle_steps: AtomicU32,
}

impl<B> Default for Http2Pool<B> {
    fn default() -> Self {
        Self { connections: Mutex::default(), not_empty: Notify::new(), connecting: tokio::sync::Mutex::default() }
    }
}

impl<B> Http2Pool<B> {
    /// Returns a place on an open connection. `None` if all are full.
    pub(super) fn take(&self) -> Option<Http2Stream<B>> {
        let mut connections = self.connections.lock();
        connections.retain(|connection| !connection.sender.is_closed());
        connections.iter().find(|connection| connection.usage.has_place()).map(Http2Stream::share)
    }

    /// Adds a new connection, and returns a place on it.
    pub(super) fn add(&self, sender: SendRequest<B>) -> Http2Stream<B> {
        let max_streams = AtomicUsize::new(MAX_STREAMS);
        let usage = Usage { max_streams, places: AtomicUsize::new(1), idle_steps: AtomicU32::new(0) };
        let connection = Http2Stream { sender, usage: Arc::new(usage) };
        let stream = connection.share();
        self.connections.lock().push(connection);
        self.not_empty.notify_one();
        stream
    }

    /// Closes connections that have been idle for too long; never returns.
    pub(super) async fn run_idle_cleanup(self: Arc<Self>) {
        loop {
            while self.connections.lock().is_empty() {
                self.not_empty.notified().await;
            }
            tokio::time::sleep(IDLE / AGE_STEPS).await;
            self.connections.lock().retain(|connection| {
                let Usage { places, idle_steps, .. } = &*connection.usage;
                if places.load(Relaxed) > 1 {
                    idle_steps.store(0, Relaxed);
                }
                idle_steps.fetch_add(1, Relaxed) < AGE_STEPS && !connection.sender.is_closed()
            });
        }
    }
}

impl Usage {
    fn has_place(&self) -> bool {
        // A server that takes none at present would otherwise get a new connection for each request.
        let most = self.max_streams.load(Relaxed).clamp(1, MAX_STREAMS);
        self.places.load(Relaxed) <= most
    }
}

impl<B> Http2Stream<B> {
    fn share(&self) -> Self {
        self.usage.places.fetch_add(1, Relaxed);
        self.usage.idle_steps.store(0, Relaxed);
        Self { sender: self.sender.clone(), usage: Arc::clone(&self.usage) }
    }
}

impl<B> Drop for Http2Stream<B> {
    fn drop(&mut self) {
        self.usage.places.fetch_sub(1, Relaxed);
    }
}

/// Turns a request of HTTP/1.1 into one of HTTP/2, which names the host in its target (RFC 9113 §8.3.1).
pub(super) fn to_http2<B>(request: &mut Request<B>, scheme: Scheme) {
    for name in [CONNECTION, TRANSFER_ENCODING, UPGRADE] {
        request.headers_mut().remove(name);
    }
    let host = request.headers_mut().remove(HOST);
    if let Some(authority) = host.and_then(|host| Authority::try_from(host.as_bytes()).ok()) {
        let mut parts = std::mem::take(request.uri_mut()).into_parts();
        (parts.scheme, parts.authority) = (Some(scheme), Some(authority));
        // A target with all three parts is a valid one.
        *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
    }
    *request.version_mut() = Version::HTTP_2;
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::Empty;
    use hyper::client::conn::http2;
    use hyper_util::rt::{TokioExecutor, TokioIo};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn idle_connections_are_closed() {
        let (client, _server) = tokio::io::duplex(1 << 16);
        let handshake = http2::handshake::<_, _, Empty<Bytes>>(TokioExecutor::new(), TokioIo::new(client));
        let (sender, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        let pool = Arc::new(Http2Pool::default());
        let cleanup = tokio::spawn(Arc::clone(&pool).run_idle_cleanup());
        let request = pool.add(sender);
        tokio::time::sleep(IDLE * 3).await;
        drop(request);
        tokio::time::sleep(IDLE / 2).await;
        assert!(pool.take().is_some(), "a connection in use stays, and is kept for the next request");
        tokio::time::sleep(IDLE / 2).await;
        assert_eq!(pool.connections.lock().len(), 1, "the last request counts");
        tokio::time::sleep(IDLE).await;
        assert!(pool.take().is_none());
        cleanup.abort();
    }
}
