//! Connections to a SQL server that are kept for the next group.

use std::ops::{Deref, DerefMut};

use parking_lot::{Mutex, MutexGuard};
use sqlx::{ConnectOptions as _, Connection};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::sql::told;
use super::{CONNECT_WITHIN, Fault};

/// Up to a number of connections, made when they are needed. sqlx's own pool keeps trying for a while where nobody
/// listens, and asks a connection that comes back whether it lives, which is a round trip more for every group.
pub(crate) struct Lines<C: Connection> {
    options: C::Options,
    idle: Mutex<Vec<C>>,
    permits: Semaphore,
}

impl<C: Connection> Lines<C> {
    pub(crate) fn new(options: C::Options, most: usize) -> Self {
        Self { options, idle: Mutex::default(), permits: Semaphore::new(most) }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<C>> {
        self.idle.lock()
    }

    /// A connection that nobody else uses, and whether it is new.
    ///
    /// # Errors
    /// [`Fault::Unreachable`] where none can be made.
    pub(crate) async fn take(&self) -> Result<(Line<'_, C>, bool), Fault> {
        let permit = self.permits.acquire().await.map_err(|_| Fault::Failed("it was closed".into()))?;
        let line = |connection| Line { lines: self, connection: Some(connection), _permit: permit };
        let kept = self.idle().pop();
        if let Some(connection) = kept {
            return Ok((line(connection), false));
        }
        match tokio::time::timeout(CONNECT_WITHIN, self.options.connect()).await {
            Ok(Ok(connection)) => Ok((line(connection), true)),
            Ok(Err(error)) => Err(Fault::Unreachable(told(&error))),
            Err(_) => Err(Fault::Unreachable(format!("no connection within {CONNECT_WITHIN:?}"))),
        }
    }
}

/// A connection in use. Unless it is done it is closed when dropped, lest half a transaction wait in it for the next.
pub(crate) struct Line<'a, C: Connection> {
    lines: &'a Lines<C>,
    connection: Option<C>,
    _permit: SemaphorePermit<'a>,
}

impl<C: Connection> Line<'_, C> {
    /// Keeps it for the next user, where what was done on it came to an end.
    pub(crate) fn done<T>(mut self, result: Result<T, Fault>) -> Result<T, Fault> {
        match result {
            Ok(_) | Err(Fault::Conflict(_)) => self.lines.idle().extend(self.connection.take()),
            Err(Fault::Unreachable(_)) => self.connection = None,
            Err(Fault::Broken(_) | Fault::Failed(_)) => {}
        }
        result
    }
}

impl<C: Connection> Drop for Line<'_, C> {
    /// Where one is broken, or was given up in the middle, those that nobody uses mostly are no better; and where the
    /// server fails for want of its tables, new ones make them.
    fn drop(&mut self) {
        if self.connection.is_some() {
            self.lines.idle().clear();
        }
    }
}

impl<C: Connection> Deref for Line<'_, C> {
    type Target = C;

    fn deref(&self) -> &C {
        self.connection.as_ref().expect("invariant: a line has its connection until it is done")
    }
}

impl<C: Connection> DerefMut for Line<'_, C> {
    fn deref_mut(&mut self) -> &mut C {
        self.connection.as_mut().expect("invariant: a line has its connection until it is done")
    }
}
