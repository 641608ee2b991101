//! State in MongoDB 4.4 or later, and what speaks its protocol.

mod collections;

use std::sync::Arc;
use std::time::Duration;

use ::mongodb::options::{ClientOptions, ConnectionString, ReadConcern, WriteConcern};
use ::mongodb::{Client, ClientSession};
use tidegate_core::{Batch, Limits, Outcomes, Time};
use tokio::sync::OnceCell;

use self::collections::{Collections, StateDocument, classify_error};
use crate::rows::loaded_rows::RowChange;
use crate::rows::{
    BatchGroup, CLEAN_TIMEOUT, CONNECT_TIMEOUT, DatabaseOptions, DecisionClock, GROUP_TIMEOUT, GroupDriver, GroupError,
    GroupExecutor, LoadedRows, MAX_CLEAN_STEPS, RowKey, with_timeout,
};
use crate::{RemoteFuture, RemoteStore, StoreError};

/// How long a client has the documents of a batch to itself. Whoever dies meanwhile keeps others from them for so long.
const LOCK_DURATION: Duration = Duration::from_secs(1);
/// How often documents are read until two readings in a row agree.
const MAX_READS: u32 = 8;

/// A store in MongoDB 4.4 or later: two collections, `…meta` and `…state`, made when it is first asked, in the database
/// that the URL names, or else in `tidegate`.
///
/// It goes by the clock of the server that answers, to the millisecond; several `mongos` routers count each by its own.
/// A batch over one key is exact wherever it is kept. One over several is a transaction on a replica set or a sharded
/// cluster. A server that stands alone has none: there the keys are taken in order under leases, what is charged is
/// written before the answer, and who dies in between leaves some of the keys charged, and the others taken for a
/// second, in which questions about them fail.
///
/// The driver's tasks live in the tokio runtime that asks first, and the store with them.
pub struct MongoDb(GroupExecutor<MongoDriver>);

impl MongoDb {
    /// A store for these limits. It connects when it is first asked; that nobody answers is told then.
    ///
    /// # Errors
    /// [`StoreError::Failed`] if an option can't be used.
    pub fn new(limits: Arc<Limits>, options: &DatabaseOptions) -> Result<Self, StoreError> {
        let connections = options.validate(&["mongodb"])?;
        let url = ConnectionString::parse(&options.url)
            .map_err(|_| StoreError::Failed("not the URL of a MongoDB database".into()))?;
        let driver = MongoDriver {
            url,
            prefix: options.prefix.clone(),
            connections: options.connections,
            clock: DecisionClock::new(options.time_source),
            collections: OnceCell::new(),
        };
        Ok(Self(GroupExecutor::new(driver, limits, connections)))
    }
}

impl RemoteStore for MongoDb {
    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> RemoteFuture<Outcomes> {
        self.0.apply(batch, now)
    }

    fn get_or_insert_seed(&self, proposal: [u8; 16]) -> RemoteFuture<[u8; 16]> {
        let driver = self.0.driver();
        Box::pin(with_timeout(
            GROUP_TIMEOUT,
            async move { driver.collections().await?.get_or_insert_seed(proposal).await },
        ))
    }

    fn maintain(&self) -> RemoteFuture<()> {
        let driver = self.0.driver();
        Box::pin(with_timeout(CLEAN_TIMEOUT, async move { driver.remove_expired().await }))
    }
}

type BatchResults = Vec<Result<Outcomes, StoreError>>;

/// The server, connected to when it is first asked.
struct MongoDriver {
    url: ConnectionString,
    prefix: String,
    connections: u32,
    clock: DecisionClock,
    collections: OnceCell<Collections>,
}

impl MongoDriver {
    async fn collections(&self) -> Result<&Collections, GroupError> {
        let connect = async || {
            let mut options = ClientOptions::parse(self.url.clone()).await.map_err(|error| classify_error(&error))?;
            options.app_name.get_or_insert_with(|| "tidegate".into());
            options.connect_timeout = Some(CONNECT_TIMEOUT);
            options.server_selection_timeout = Some(CONNECT_TIMEOUT);
            options.max_pool_size = Some(self.connections);
            // What was answered must outlive the loss of the server that answered.
            options.write_concern.get_or_insert_with(WriteConcern::majority);
            let client = Client::with_options(options).map_err(|error| classify_error(&error))?;
            Collections::new(client, &self.prefix).await
        };
        self.collections.get_or_try_init(connect).await
    }

    fn execute_group(&self, ledger: &mut LoadedRows<'_>, group: &BatchGroup, server_time: Time) -> BatchResults {
        ledger.execute_all(group, |queued| self.clock.decision_time(queued.now(), server_time))
    }

    /// Looks at documents without taking them. Two readings in a row that agree show them all at one moment, as every
    /// change gives a document another version.
    async fn execute_read_only(
        &self,
        documents: &Collections,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<BatchResults, GroupError> {
        let keys = group_keys(group);
        let (mut server_time, mut found) = documents.read(&keys).await?;
        if keys.len() > 1 {
            let mut reads_left = MAX_READS;
            loop {
                let (later_time, later_found) = documents.read(&keys).await?;
                let is_unchanged =
                    found.iter().map(StateDocument::version).eq(later_found.iter().map(StateDocument::version));
                (server_time, found) = (later_time, later_found);
                if is_unchanged && found.iter().all(|document| document.is_unlocked(server_time)) {
                    break;
                }
                reads_left -= 1;
                if reads_left == 0 {
                    return Err(GroupError::Conflict("what it holds changes too fast".into()));
                }
            }
        }
        let mut ledger = LoadedRows::new(limits, group, stored_states(&found));
        Ok(self.execute_group(&mut ledger, group, server_time))
    }

    /// Changes one document, if it is still as it was read.
    async fn execute_one(
        &self,
        documents: &Collections,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<BatchResults, GroupError> {
        let keys = group_keys(group);
        let (server_time, found) = documents.read(&keys).await?;
        check_unlocked(&found, server_time)?;
        let mut ledger = LoadedRows::new(limits, group, stored_states(&found));
        let answers = self.execute_group(&mut ledger, group, server_time);
        for ((key, change), document) in keys.iter().zip(ledger.changes()).zip(&found) {
            documents.write(None, key, document.version(), change).await?;
        }
        Ok(answers)
    }

    /// Changes several documents in a transaction.
    async fn execute_in_transaction(
        &self,
        documents: &Collections,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<BatchResults, GroupError> {
        let mut session = documents.session().await?;
        let begin = session.start_transaction().read_concern(ReadConcern::snapshot());
        begin.write_concern(WriteConcern::majority()).await.map_err(|error| classify_error(&error))?;
        match self.execute_and_write(documents, &mut session, limits, group).await {
            Ok((answers, true)) => {
                session.commit_transaction().await.map_err(|error| match classify_error(&error) {
                    GroupError::ConnectionLost(what) => GroupError::Failed(what),
                    fault => fault,
                })?;
                Ok(answers)
            }
            other => {
                // An abort that is lost is made up for by the server when the session's next transaction begins, or by
                // its own limit.
                let _ = session.abort_transaction().await;
                other.map(|(answers, _)| answers)
            }
        }
    }

    /// What happens between a transaction's begin and end, and whether it changed anything.
    async fn execute_and_write(
        &self,
        documents: &Collections,
        session: &mut ClientSession,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<(BatchResults, bool), GroupError> {
        let keys = group_keys(group);
        let found = documents.read_in_session(session, &keys).await?;
        // Read after the snapshot: whoever commits a change of these documents later, by a snapshot of before, fails.
        let server_time = documents.server_time().await?;
        check_unlocked(&found, server_time)?;
        let mut ledger = LoadedRows::new(limits, group, stored_states(&found));
        let answers = self.execute_group(&mut ledger, group, server_time);
        let mut is_changed = false;
        for ((key, change), document) in keys.iter().zip(ledger.changes()).zip(&found) {
            is_changed |= matches!(change, RowChange::Write(..) | RowChange::Remove);
            documents.write(Some(&mut *session), key, document.version(), change).await?;
        }
        Ok((answers, is_changed))
    }

    /// Changes several documents where there are no transactions: each is taken, in key order, before any is changed.
    /// A change gives back what it was made to; whoever was held up beyond the lease fails at it, as others have given
    /// the document another version.
    async fn execute_with_locks(
        &self,
        documents: &Collections,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<BatchResults, GroupError> {
        let keys = group_keys(group);
        let (clock, found) = documents.read(&keys).await?;
        check_unlocked(&found, clock)?;
        let mut locked: Vec<(RowKey, i64)> = Vec::with_capacity(keys.len());
        for (key, document) in keys.iter().zip(&found) {
            match documents.lock(key, document.version(), clock, LOCK_DURATION).await {
                Ok(version) => locked.push((*key, version)),
                Err(fault) => {
                    for (key, version) in locked {
                        let _ = documents.unlock(&key, version).await;
                    }
                    return Err(fault);
                }
            }
        }
        let clock = documents.server_time().await?;
        let mut ledger = LoadedRows::new(limits, group, stored_states(&found));
        let answers = self.execute_group(&mut ledger, group, clock);
        let mut has_written = false;
        for ((key, version), change) in locked.iter().zip(ledger.changes()) {
            let changes = matches!(change, RowChange::Write(..) | RowChange::Remove);
            let done = match change {
                RowChange::Keep => documents.unlock(key, *version).await,
                // It was made only to be taken.
                RowChange::StayAbsent => documents.write(None, key, Some(*version), RowChange::Remove).await,
                change => documents.write(None, key, Some(*version), change).await,
            };
            match done {
                Ok(()) => has_written |= changes,
                // Another try would charge what is written once more.
                Err(GroupError::Conflict(_) | GroupError::ConnectionLost(_)) if has_written => {
                    return Err(GroupError::Failed("the lease ran out halfway".into()));
                }
                Err(fault) => return Err(fault),
            }
        }
        Ok(answers)
    }

    /// Removes what has expired, a bounded number of documents.
    async fn remove_expired(&self) -> Result<(), GroupError> {
        let documents = self.collections().await?;
        for _ in 0..MAX_CLEAN_STEPS {
            if !documents.remove_expired(self.clock.expiry_cutoff_micros()).await? {
                break;
            }
        }
        Ok(())
    }
}

impl GroupDriver for MongoDriver {
    const REQUIRES_SAME_ROWS: bool = true;

    async fn execute(&self, limits: &Limits, group: &BatchGroup) -> Result<BatchResults, GroupError> {
        let documents = self.collections().await?;
        match group.keys().len() {
            _ if group.is_read_only() => self.execute_read_only(documents, limits, group).await,
            0 | 1 => self.execute_one(documents, limits, group).await,
            _ if documents.supports_transactions() => self.execute_in_transaction(documents, limits, group).await,
            _ => self.execute_with_locks(documents, limits, group).await,
        }
    }
}

fn group_keys(group: &BatchGroup) -> Vec<RowKey> {
    group.keys().iter().map(|(key, _)| *key).collect()
}

fn stored_states(found: &[StateDocument]) -> impl Iterator<Item = (RowKey, Vec<u8>)> {
    found.iter().map(|document| (document.key(), document.state().to_vec()))
}

/// Whether nobody has taken any of these documents.
fn check_unlocked(found: &[StateDocument], clock: Time) -> Result<(), GroupError> {
    match found.iter().all(|document| document.is_unlocked(clock)) {
        true => Ok(()),
        false => Err(GroupError::Conflict("another node has taken a key of it".into())),
    }
}
