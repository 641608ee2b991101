//! The HTTP/2 connections to one server. Each carries many requests at once.
//!
//! *Why here:* the pool of a general client has one connection per host. Beyond the number of streams that the server
//! accepts, requests would wait, and behind gRPC calls that stay open they would wait without end.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use http::header::{CONNECTION, HOST, TRANSFER_ENCODING, UPGRADE};
use http::uri::{Authority, Scheme};
use http::{Request, Uri, Version};
use hyper::client::conn::http2::SendRequest;
use parking_lot::Mutex;

/// The interval of pings on a connection in use, and the time to answer one.
pub(crate) const PING: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));
/// The most requests on one connection at a time. A server should accept as many (RFC 9113 §6.5.2).
const MAX_STREAMS: usize = 100;
/// The bytes of a response that the server may send before its client has read them. All responses of a connection fit
/// in its window, so that slow readers don't hold up the others.
pub(crate) const STREAM_WINDOW: u32 = 128 << 10;
pub(crate) const CONNECTION_WINDOW: u32 = STREAM_WINDOW * MAX_STREAMS as u32;

/// The open connections.
pub(super) struct Http2Pool<B> {
    connections: Mutex<Vec<Http2Stream<B>>>,
    /// Held while connecting, so that requests that come together share a connection.
    pub(super) connecting: tokio::sync::Mutex<()>,
}

/// A place on a connection, for one request.
pub(super) struct Http2Stream<B> {
    pub(super) sender: SendRequest<B>,
    /// The requests on the connection, and one for the pool.
    in_use: Arc<AtomicUsize>,
}

impl<B> Default for Http2Pool<B> {
    fn default() -> Self {
        Self { connections: Mutex::default(), connecting: tokio::sync::Mutex::default() }
    }
}

impl<B> Http2Pool<B> {
    /// Returns a place on an open connection. `None` if all are full.
    pub(super) fn take(&self) -> Option<Http2Stream<B>> {
        let mut connections = self.connections.lock();
        connections.retain(|connection| !connection.sender.is_closed());
        connections.iter().find(|connection| connection.in_use.load(Relaxed) <= MAX_STREAMS).map(Http2Stream::share)
    }

    /// Adds a new connection, and returns a place on it.
    pub(super) fn add(&self, sender: SendRequest<B>) -> Http2Stream<B> {
        let connection = Http2Stream { sender, in_use: Arc::new(AtomicUsize::new(1)) };
        let stream = connection.share();
        self.connections.lock().push(connection);
        stream
    }
}

impl<B> Http2Stream<B> {
    fn share(&self) -> Self {
        self.in_use.fetch_add(1, Relaxed);
        Self { sender: self.sender.clone(), in_use: Arc::clone(&self.in_use) }
    }
}

impl<B> Drop for Http2Stream<B> {
    fn drop(&mut self) {
        self.in_use.fetch_sub(1, Relaxed);
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
