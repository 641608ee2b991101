//! Connections to a SQL server that are kept for the next group.

use std::ops::{Deref, DerefMut};

use parking_lot::{Mutex, MutexGuard};
use sqlx::{ConnectOptions as _, Connection};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::sql::error_message;
use super::{CONNECT_TIMEOUT, GroupError};

/// Up to a number of connections, made when they are needed. sqlx's own pool keeps trying for a while where nobody
/// listens, and asks a connection that comes back whether it lives, which is a round trip more for every group.
pub(crate) struct ConnectionPool<C: Connection> {
    options: C::Options,
    idle: Mutex<Vec<C>>,
    permits: Semaphore,
}

impl<C: Connection> ConnectionPool<C> {
    pub(crate) fn new(options: C::Options, max_connections: usize) -> Self {
        Self { options, idle: Mutex::default(), permits: Semaphore::new(max_connections) }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<C>> {
        self.idle.lock()
    }

    /// A connection that nobody else uses, and whether it is new.
    ///
    /// # Errors
    /// [`GroupError::Unreachable`] where none can be made.
    pub(crate) async fn acquire(&self) -> Result<(PooledConnection<'_, C>, bool), GroupError> {
        let permit = self.permits.acquire().await.map_err(|_| GroupError::Failed("it was closed".into()))?;
        let pooled = |connection| PooledConnection { pool: self, connection: Some(connection), _permit: permit };
        let idle = self.idle().pop();
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

/// A connection in use. Unless it is done it is closed when dropped, lest half a transaction wait in it for the next.
pub(crate) struct PooledConnection<'a, C: Connection> {
    pool: &'a ConnectionPool<C>,
    connection: Option<C>,
    _permit: SemaphorePermit<'a>,
}

impl<C: Connection> PooledConnection<'_, C> {
    /// Keeps it for the next user, where what was done on it came to an end.
    pub(crate) fn release_after<T>(mut self, result: Result<T, GroupError>) -> Result<T, GroupError> {
        match result {
            Ok(_) | Err(GroupError::Conflict(_)) => self.pool.idle().extend(self.connection.take()),
            Err(GroupError::Unreachable(_)) => self.connection = None,
            Err(GroupError::ConnectionLost(_) | GroupError::Failed(_)) => {}
        }
        result
    }
}

impl<C: Connection> Drop for PooledConnection<'_, C> {
    /// Where one is broken, or was given up in the middle, those that nobody uses mostly are no better; and where the
    /// server fails for want of its tables, new ones make them.
    fn drop(&mut self) {
        if self.connection.is_some() {
            self.pool.idle().clear();
        }
    }
}

impl<C: Connection> Deref for PooledConnection<'_, C> {
    type Target = C;

    fn deref(&self) -> &C {
        self.connection.as_ref().expect("invariant: a line has its connection until it is done")
    }
}

impl<C: Connection> DerefMut for PooledConnection<'_, C> {
    fn deref_mut(&mut self) -> &mut C {
        self.connection.as_mut().expect("invariant: a line has its connection until it is done")
    }
}
