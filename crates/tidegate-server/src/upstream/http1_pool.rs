//! The idle HTTP/1.1 connections to one server.

use std::sync::Arc;

use hyper::client::conn::http1::SendRequest;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::PoolSettings;
use super::work::CurrentWork;

/// The number of steps in which an idle connection ages.
pub(super) const AGE_STEPS: u32 = 4;

pub(super) struct Http1Pool<B> {
    settings: PoolSettings,
    idle: Mutex<IdleConnections<B>>,
    not_empty: Notify,
}

struct IdleConnections<B> {
    current_age: u32,
    stack: Vec<(u32, Http1Connection<B>)>,
}

/// A connection, which takes one request at a time.
pub(super) struct Http1Connection<B> {
    pub(super) sender: SendRequest<B>,
    pub(super) work: CurrentWork,
}

impl<B> Http1Pool<B> {
    pub(super) fn new(settings: PoolSettings) -> Self {
        let idle = Mutex::new(IdleConnections { current_age: 0, stack: Vec::new() });
        Self { settings, idle, not_empty: Notify::new() }
    }

    /// Returns the connection that was used last.
    pub(super) fn take(&self) -> Option<Http1Connection<B>> {
        let mut idle = self.idle.lock();
        while let Some((_, connection)) = idle.stack.pop() {
            if connection.sender.is_ready() {
                return Some(connection);
            }
        }
        None
    }

    /// Keeps a connection for the next request, if there is room.
    pub(super) fn put(&self, connection: Http1Connection<B>) {
        let mut idle = self.idle.lock();
        if idle.stack.len() < self.settings.max_idle {
            let age = idle.current_age;
            idle.stack.push((age, connection));
            if idle.stack.len() == 1 {
                self.not_empty.notify_one();
            }
        }
    }

    /// Closes connections that have been idle for too long; never returns.
    pub(super) async fn run_idle_cleanup(self: Arc<Self>) {
        loop {
            while self.idle.lock().stack.is_empty() {
                self.not_empty.notified().await;
            }
            tokio::time::sleep(self.settings.idle_timeout / AGE_STEPS).await;
            let mut idle = self.idle.lock();
            idle.current_age = idle.current_age.wrapping_add(1);
            let age = idle.current_age;
            idle.stack
                .retain(|(since, connection)| age.wrapping_sub(*since) < AGE_STEPS && !connection.sender.is_closed());
        }
    }
}
