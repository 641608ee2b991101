//! State in MongoDB 4.4 or later, or in another server with its protocol.

mod collections;

use std::sync::Arc;

use ::mongodb::options::{ClientOptions, ConnectionString, ReadConcern, WriteConcern};
use ::mongodb::{Client, ClientSession};
use tidegate_core::{Limits, Time};
use tokio::sync::OnceCell;

use self::collections::{Collections, StateDocument};
use crate::announcement::stored::{self, StoredNodes};
use crate::rows::loaded_rows::RowChange;
use crate::rows::{
    BatchGroup, BatchResults, CLEAN_TIMEOUT, CONNECT_TIMEOUT, DatabaseOptions, DecisionClock, GROUP_TIMEOUT,
    GroupDriver, GroupError, GroupExecutor, LoadedRows, MAX_CLEAN_STEPS, impl_remote_store, with_timeout,
};
use crate::{AnnouncedNode, Announcement, StoreError};

/// The maximum number of repeated readings until two in a row agree.
const MAX_READS: u32 = 8;

/// A store in MongoDB 4.4 or later: two collections, `…meta` and `…state`, created at the first request, in the
/// database that the URL names, or else in `tidegate`.
///
/// The time of a decision is that of the server that answers, to the millisecond; each of several `mongos` routers has
/// its own clock. A batch over one key is atomic on every kind of server. A batch over several keys is a transaction on
/// a replica set or a sharded cluster. A standalone server has no transactions: there the keys are locked in order, and
/// charges are written before the answer. A client that dies in between leaves some keys charged, and the others locked
/// for one second, in which requests for them fail.
///
/// The driver's tasks, and the store with them, live in the tokio runtime of the first request.
pub struct MongoDb(GroupExecutor<MongoDriver>);

impl MongoDb {
    /// A store for these limits. It connects at the first request, which fails if no server answers.
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

impl_remote_store!(MongoDb);

/// The server, connected at the first request.
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
            let mut options = ClientOptions::parse(self.url.clone()).await?;
            options.app_name.get_or_insert_with(|| "tidegate".into());
            options.connect_timeout = Some(CONNECT_TIMEOUT);
            options.server_selection_timeout = Some(CONNECT_TIMEOUT);
            options.max_pool_size = Some(self.connections);
            // A decision that was answered must survive the loss of the server that answered.
            options.write_concern.get_or_insert_with(WriteConcern::majority);
            Collections::new(Client::with_options(options)?, &self.prefix).await
        };
        self.collections.get_or_try_init(connect).await
    }

    /// Decides the batches of a group over the documents that were found.
    fn execute_loaded<'a>(
        &self,
        limits: &'a Limits,
        group: &'a BatchGroup,
        found: &[StateDocument],
        server_time: Time,
    ) -> (BatchResults, LoadedRows<'a>) {
        let stored = found.iter().map(|document| (document.key, document.state.clone()));
        LoadedRows::execute(limits, group, stored, &self.clock, server_time)
    }

    /// Reads documents without locking them. Every change sets a new version, so two readings in a row that agree show
    /// all documents at one time.
    async fn execute_read_only(
        &self,
        documents: &Collections,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<BatchResults, GroupError> {
        let (mut server_time, mut found) = documents.read(None, &group.keys).await?;
        if group.keys.len() > 1 {
            let mut reads_left = MAX_READS;
            loop {
                let (later_time, later_found) = documents.read(None, &group.keys).await?;
                let is_unchanged = found.iter().zip(&later_found).all(|(one, later)| one.version == later.version);
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
        Ok(self.execute_loaded(limits, group, &found, server_time).0)
    }

    async fn execute_in_transaction(
        &self,
        documents: &Collections,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<BatchResults, GroupError> {
        let mut session = documents.client.start_session().await?;
        let begin = session.start_transaction().read_concern(ReadConcern::snapshot());
        begin.write_concern(WriteConcern::majority()).await?;
        match self.execute_and_write(documents, Some(&mut session), limits, group).await {
            Ok((results, true)) => {
                session.commit_transaction().await.map_err(|error| GroupError::from(error).of_commit())?;
                Ok(results)
            }
            other => {
                // If the abort is lost, the server ends the transaction at the session's next one or at a time limit.
                let _ = session.abort_transaction().await;
                other.map(|(results, _)| results)
            }
        }
    }

    /// Reads, decides and changes documents: in a transaction, or else one document, if it hasn't changed since it was
    /// read. Returns the results, and true if anything changed.
    async fn execute_and_write(
        &self,
        documents: &Collections,
        mut session: Option<&mut ClientSession>,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<(BatchResults, bool), GroupError> {
        let (server_time, found) = documents.read(session.as_deref_mut(), &group.keys).await?;
        check_unlocked(&found, server_time)?;
        let (results, rows) = self.execute_loaded(limits, group, &found, server_time);
        let mut is_changed = false;
        for (document, change) in found.iter().zip(rows.changes()) {
            is_changed |= change.is_change();
            documents.write(session.as_deref_mut(), &document.key, document.version, change).await?;
        }
        Ok((results, is_changed))
    }

    /// Changes several documents without a transaction: each is locked, in key order, before any is changed. A change
    /// unlocks its document. A client that was delayed beyond its lock fails, because others have set a new version.
    async fn execute_with_locks(
        &self,
        documents: &Collections,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<BatchResults, GroupError> {
        let (read_at, found) = documents.read(None, &group.keys).await?;
        check_unlocked(&found, read_at)?;
        let mut lock_versions = Vec::with_capacity(found.len());
        for document in &found {
            match documents.lock(&document.key, document.version, read_at).await {
                Ok(version) => lock_versions.push(version),
                Err(error) => {
                    for (document, version) in found.iter().zip(lock_versions) {
                        let _ = documents.unlock(&document.key, version).await;
                    }
                    return Err(error);
                }
            }
        }
        let server_time = documents.server_time().await?;
        let (results, rows) = self.execute_loaded(limits, group, &found, server_time);
        let mut has_written = false;
        for ((key, version), change) in group.keys.iter().zip(lock_versions).zip(rows.changes()) {
            let is_change = change.is_change();
            let written = match change {
                RowChange::Keep => documents.unlock(key, version).await,
                // It was inserted only to be locked.
                RowChange::StayAbsent => documents.write(None, key, Some(version), RowChange::Remove).await,
                change => documents.write(None, key, Some(version), change).await,
            };
            match written {
                Ok(()) => has_written |= is_change,
                // A retry would charge the written documents twice.
                Err(GroupError::Conflict(_) | GroupError::ConnectionLost(_)) if has_written => {
                    return Err(GroupError::Failed("the lease ran out halfway".into()));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(results)
    }

    async fn get_or_insert_seed(&self, proposal: [u8; 16]) -> Result<[u8; 16], StoreError> {
        with_timeout(GROUP_TIMEOUT, async { self.collections().await?.get_or_insert_seed(proposal).await }).await
    }

    /// Keeps a node's announcement, and returns those of all nodes.
    async fn announce(&self, announcement: &Announcement, now: Time) -> Result<Vec<AnnouncedNode>, StoreError> {
        let announce = async {
            let documents = self.collections().await?;
            let now = self.clock.decision_time(now, documents.server_time().await?);
            let node = (announcement.node_id(), stored::encode(announcement, now));
            let nodes = StoredNodes::read(documents.write_node(node).await?, stored::node_name, now);
            if !nodes.removable.is_empty() {
                documents.remove_nodes(&nodes.removable).await?;
            }
            Ok(nodes.listed)
        };
        with_timeout(GROUP_TIMEOUT, announce).await
    }

    async fn remove_expired(&self) -> Result<(), StoreError> {
        let clean = async {
            let documents = self.collections().await?;
            for _ in 0..MAX_CLEAN_STEPS {
                if !documents.remove_expired(self.clock.expiry_cutoff_micros()).await? {
                    break;
                }
            }
            Ok(())
        };
        with_timeout(CLEAN_TIMEOUT, clean).await
    }
}

impl GroupDriver for MongoDriver {
    const REQUIRES_SAME_ROWS: bool = true;

    async fn execute(&self, limits: &Limits, group: &BatchGroup) -> Result<BatchResults, GroupError> {
        let documents = self.collections().await?;
        match group.keys.len() {
            _ if group.is_read_only => self.execute_read_only(documents, limits, group).await,
            0 | 1 => self.execute_and_write(documents, None, limits, group).await.map(|(results, _)| results),
            _ if documents.supports_transactions => self.execute_in_transaction(documents, limits, group).await,
            _ => self.execute_with_locks(documents, limits, group).await,
        }
    }
}

fn check_unlocked(found: &[StateDocument], server_time: Time) -> Result<(), GroupError> {
    match found.iter().all(|document| document.is_unlocked(server_time)) {
        true => Ok(()),
        false => Err(GroupError::Conflict("another node has taken a key of it".into())),
    }
}
