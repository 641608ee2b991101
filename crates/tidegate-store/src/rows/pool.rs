//! A pool of connections to a SQL server.

use parking_lot::Mutex;
use sqlx::{ConnectOptions as _, Connection};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::sql::error_message;
use super::{CONNECT_TIMEOUT, GroupError};

/// A bounded number of connections, opened on demand. sqlx's own pool keeps trying for a while if no server listens. It
/// also tests each returned connection, which costs every group one more round trip.
pub(crate) struct ConnectionPool<C: Connection> {
    options: C::Options,
    idle: Mutex<Vec<C>>,
    permits: Semaphore,
}

impl<C: Connection> ConnectionPool<C> {
    pub(crate) fn new(options: C::Options, max_connections: usize) -> Self {
        Self { options, idle: Mutex::default(), permits: Semaphore::new(max_connections) }
    }

    /// Returns a connection for exclusive use, and true if it is new.
    ///
    /// # Errors
    /// [`GroupError::Unreachable`] if no connection can be opened.
    pub(crate) async fn acquire(&self) -> Result<(PooledConnection<'_, C>, bool), GroupError> {
        let permit = self.permits.acquire().await.map_err(|_| GroupError::Failed("it was closed".into()))?;
        let pooled = |connection| PooledConnection { pool: self, connection: Some(connection), _permit: permit };
        let idle = self.idle.lock().pop();
        if let Some(connection) = idle {
            return Ok((pooled(connection), false));
        }
        match tokio::time::timeout(CONNECT_TIMEOUT, self.options.connect()).await {
            Ok(Ok(connection)) => Ok((pooled(connection), true)),
            Ok(Err(error)) => Err(GroupError::Unreachable(error_message(&error))),
            Err(_) => Err(GroupError::Unreachable(format!("no connection within {CONNECT_TIMEOUT:?}"))),
        }
    }
}

/// A connection in use. If it is dropped without [`PooledConnection::release_after`], it is closed, because a transaction
/// may be open.
pub(crate) struct PooledConnection<'a, C: Connection> {
    pool: &'a ConnectionPool<C>,
    connection: Option<C>,
    _permit: SemaphorePermit<'a>,
}

impl<C: Connection> PooledConnection<'_, C> {
    pub(crate) fn get(&mut self) -> &mut C {
        self.connection.as_mut().expect("invariant: a pooled connection is present until it is released")
    }

    /// Returns the connection to the pool if its work has ended.
    pub(crate) fn release_after<T>(mut self, result: Result<T, GroupError>) -> Result<T, GroupError> {
        match result {
            Ok(_) | Err(GroupError::Conflict(_)) => self.pool.idle.lock().extend(self.connection.take()),
            Err(GroupError::Unreachable(_)) => self.connection = None,
            Err(GroupError::ConnectionLost(_) | GroupError::Failed(_)) => {}
        }
        result
    }
}

impl<C: Connection> Drop for PooledConnection<'_, C> {
    /// If a connection is broken or was dropped in the middle, the idle ones are probably broken too. If the server has
    /// lost its tables, new connections create them.
    fn drop(&mut self) {
        if self.connection.is_some() {
            self.pool.idle.lock().clear();
        }
    }
}
