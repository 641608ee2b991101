//! How stores in SQL carry out a group: as one transaction, whatever the server calls its steps.

use std::future::Future;
use std::sync::Arc;

use sqlx::error::DatabaseError;
use sqlx::{Connection, Error};
use tidegate_core::{Limits, Outcomes, Time};

use super::ledger::Change;
use super::lines::{Line, Lines};
use super::{
    CLEAN_ROWS, CLEAN_STEPS, CLEAN_WITHIN, Driver, Engine, Fault, GROUP_WITHIN, Group, Ledger, RowKey, RowsOptions,
    Times, check_schema, within,
};
use crate::StoreError;

/// The bytes of states after which a statement takes no more. A server's bound is 16 MiB or more unless it was lowered,
/// and one state has up to a third of a mebibyte.
const STATEMENT: usize = 1 << 20;

/// One server's words for the steps.
pub(crate) trait Dialect: Send + Sync + 'static {
    type Connection: Connection;

    /// What begins a transaction in which every statement sees what was committed before it.
    const BEGIN: &str;

    /// Runs words without parameters.
    fn run(&self, on: &mut Self::Connection, words: &'static str) -> impl Future<Output = Result<(), Error>> + Send;

    /// Sets a new connection up.
    fn greet(&self, on: &mut Self::Connection) -> impl Future<Output = Result<(), Error>> + Send;

    /// Makes the tables, if they aren't there, and tells their version.
    fn schema(&self, on: &mut Self::Connection) -> impl Future<Output = Result<Vec<u8>, Error>> + Send;

    /// Locks rows, which come in key order, in that order; those that don't exist are made, with no bytes.
    fn lock(&self, on: &mut Self::Connection, keys: &[RowKey]) -> impl Future<Output = Result<(), Error>> + Send;

    /// The server's clock, in microseconds since the epoch, read when the statement begins or later, and what is there
    /// of these rows.
    fn read(&self, on: &mut Self::Connection, keys: &[RowKey]) -> impl Future<Output = Result<Found, Error>> + Send;

    /// Writes rows that are locked.
    fn write(&self, on: &mut Self::Connection, rows: &[Written]) -> impl Future<Output = Result<(), Error>> + Send;

    /// Removes rows.
    fn remove(&self, on: &mut Self::Connection, keys: &[RowKey]) -> impl Future<Output = Result<(), Error>> + Send;

    /// Removes up to so many rows that have expired at a moment, by the server's clock unless one is told, and says how
    /// many it found.
    fn clean(
        &self,
        on: &mut Self::Connection,
        at: Option<i64>,
        most: usize,
    ) -> impl Future<Output = Result<u64, Error>> + Send;

    /// Keeps a seed where there is none, and tells the one that is kept.
    fn seed(&self, on: &mut Self::Connection, proposal: &[u8]) -> impl Future<Output = Result<Vec<u8>, Error>> + Send;

    /// Whether an error only says that another transaction was in the way.
    fn is_conflict(&self, error: &dyn DatabaseError) -> bool;

    /// Whether an error says that the server is closing the connection.
    fn is_farewell(&self, error: &dyn DatabaseError) -> bool;
}

/// The server's clock, and rows with their bytes.
pub(crate) type Found = (i64, Vec<(RowKey, Vec<u8>)>);

/// A row, its bytes, and when it expires.
pub(crate) type Written = (RowKey, Vec<u8>, i64);

/// A store in SQL.
pub(crate) struct Sql<D: Dialect> {
    dialect: D,
    lines: Lines<D::Connection>,
    times: Times,
}

impl<D: Dialect> Sql<D> {
    /// A store that connects when it is first asked.
    pub(crate) fn engine(
        dialect: D,
        server: <D::Connection as Connection>::Options,
        limits: Arc<Limits>,
        options: &RowsOptions,
        connections: usize,
    ) -> Engine<Self> {
        let sql = Self { dialect, lines: Lines::new(server, connections), times: Times::new(options.time) };
        Engine::new(sql, limits, connections)
    }

    async fn line(&self) -> Result<Line<'_, D::Connection>, Fault> {
        let (mut line, new) = self.lines.take().await?;
        if new {
            self.dialect.greet(&mut line).await.map_err(|error| Fault::Unreachable(told(&error)))?;
            // A server may come back without its tables.
            let version = self.dialect.schema(&mut line).await.map_err(|error| self.fault(&error))?;
            check_schema(&version)?;
        }
        Ok(line)
    }

    /// An error before anything was changed for good.
    fn fault(&self, error: &Error) -> Fault {
        match error {
            Error::Database(database) if self.dialect.is_conflict(&**database) => Fault::Conflict(told(error)),
            Error::Database(database) if self.dialect.is_farewell(&**database) => Fault::Broken(told(error)),
            Error::Io(_) => Fault::Broken(told(error)),
            _ => Fault::Failed(told(error)),
        }
    }

    /// An error of a commit: unless the server itself says no, it may have been carried out.
    fn uncertain(&self, error: &Error) -> Fault {
        match self.fault(error) {
            Fault::Broken(what) => Fault::Failed(what),
            fault => fault,
        }
    }

    async fn look(&self, on: &mut D::Connection, limits: &Limits, group: &Group) -> Result<Answers, Fault> {
        let keys: Vec<RowKey> = group.keys().iter().map(|(key, _)| *key).collect();
        let (clock, found) = self.dialect.read(on, &keys).await.map_err(|error| self.fault(&error))?;
        Ok(self.decide(&mut Ledger::new(limits, group, found), group, clock))
    }

    fn decide(&self, ledger: &mut Ledger<'_>, group: &Group, clock: i64) -> Answers {
        let server = Time::from_micros(u64::try_from(clock).unwrap_or(0));
        ledger.settle(group, |call| self.times.decide(call.now(), server))
    }

    async fn change(&self, on: &mut D::Connection, limits: &Limits, group: &Group) -> Result<Answers, Fault> {
        self.dialect.run(on, D::BEGIN).await.map_err(|error| self.fault(&error))?;
        let done = self.change_within(on, limits, group).await;
        let (answers, changed) = match done {
            Ok(done) => done,
            Err(fault) => {
                if matches!(fault, Fault::Conflict(_)) {
                    self.dialect.run(on, "ROLLBACK").await.map_err(|error| self.fault(&error))?;
                }
                return Err(fault);
            }
        };
        // Where nothing changed, a commit would wait for the disk for the sake of locks alone.
        let end = if changed { "COMMIT" } else { "ROLLBACK" };
        self.dialect.run(on, end).await.map_err(|error| self.uncertain(&error))?;
        Ok(answers)
    }

    /// What happens between a transaction's begin and end, and whether it changed anything.
    async fn change_within(
        &self,
        on: &mut D::Connection,
        limits: &Limits,
        group: &Group,
    ) -> Result<(Answers, bool), Fault> {
        let keys: Vec<RowKey> = group.keys().iter().map(|(key, _)| *key).collect();
        self.dialect.lock(on, &keys).await.map_err(|error| self.fault(&error))?;
        let (clock, found) = self.dialect.read(on, &keys).await.map_err(|error| self.fault(&error))?;
        let mut ledger = Ledger::new(limits, group, found);
        let answers = self.decide(&mut ledger, group, clock);
        let (mut writes, mut removes, mut changed) = (Vec::new(), Vec::new(), false);
        for (key, change) in keys.iter().zip(ledger.changes()) {
            changed |= matches!(change, Change::Write(..) | Change::Remove);
            match change {
                Change::Write(bytes, expires_at) => writes.push((*key, bytes, expires_at)),
                // What was made only to be locked would stay.
                Change::Remove | Change::Absent => removes.push(*key),
                Change::Keep => {}
            }
        }
        if !changed {
            return Ok((answers, false));
        }
        for some in portions(&writes) {
            self.dialect.write(on, some).await.map_err(|error| self.fault(&error))?;
        }
        if !removes.is_empty() {
            self.dialect.remove(on, &removes).await.map_err(|error| self.fault(&error))?;
        }
        Ok((answers, true))
    }

    /// The seed in the store, or this one, which is kept then.
    pub(crate) async fn seed(&self, proposal: [u8; 16]) -> Result<[u8; 16], StoreError> {
        let seed = async {
            let mut line = self.line().await?;
            let kept = self.dialect.seed(&mut line, &proposal).await.map_err(|error| self.fault(&error));
            let kept = line.done(kept)?;
            kept.try_into().map_err(|_| Fault::Failed("the seed in it isn't 16 bytes long".into()))
        };
        within(GROUP_WITHIN, seed).await
    }

    /// Removes expired rows, a bounded number of them.
    pub(crate) async fn clean(&self) -> Result<(), StoreError> {
        let clean = async {
            let at = self.times.expired();
            for _ in 0..CLEAN_STEPS {
                let mut line = self.line().await?;
                let found = self.dialect.clean(&mut line, at, CLEAN_ROWS).await.map_err(|error| self.fault(&error));
                if line.done(found)? < CLEAN_ROWS as u64 {
                    break;
                }
            }
            Ok(())
        };
        within(CLEAN_WITHIN, clean).await
    }
}

/// The rows in parts that one statement bears.
fn portions(rows: &[Written]) -> impl Iterator<Item = &[Written]> {
    let mut size = 0;
    rows.chunk_by(move |(_, state, _), _| {
        size += state.len();
        let goes_on = size < STATEMENT;
        if !goes_on {
            size = 0;
        }
        goes_on
    })
}

type Answers = Vec<Result<Outcomes, StoreError>>;

impl<D: Dialect> Driver for Sql<D> {
    const SAME_ROWS: bool = false;

    async fn carry(&self, limits: &Limits, group: &Group) -> Result<Answers, Fault> {
        let mut line = self.line().await?;
        let carried = match group.looks() {
            true => self.look(&mut line, limits, group).await,
            false => self.change(&mut line, limits, group).await,
        };
        line.done(carried)
    }
}

/// What an error says, without what the statement was given.
pub(crate) fn told(error: &Error) -> String {
    match error {
        Error::Database(error) => match error.code() {
            Some(code) => format!("{} ({code})", error.message()),
            None => error.message().to_owned(),
        },
        // Its text may quote the URL.
        Error::Configuration(_) => "the URL can't be used".into(),
        error => error.to_string(),
    }
}
