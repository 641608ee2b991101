//! State in MongoDB 4.4 or later, and what speaks its protocol.

mod documents;

use std::sync::Arc;
use std::time::Duration;

use ::mongodb::options::{ClientOptions, ConnectionString, ReadConcern, WriteConcern};
use ::mongodb::{Client, ClientSession};
use tidegate_core::{Batch, Limits, Outcomes, Time};
use tokio::sync::OnceCell;

use self::documents::{Document, Documents, fault};
use crate::rows::ledger::Change;
use crate::rows::{
    CLEAN_STEPS, CLEAN_WITHIN, CONNECT_WITHIN, Driver, Engine, Fault, GROUP_WITHIN, Group, Ledger, RowKey, RowsOptions,
    Times, within,
};
use crate::{Remote, StoreError, Waiting};

/// How long a client has the documents of a batch to itself. Whoever dies meanwhile keeps others from them for so long.
const LEASE: Duration = Duration::from_secs(1);
/// How often documents are read until two readings in a row agree.
const LOOKS: u32 = 8;

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
pub struct MongoDb(Engine<Server>);

impl MongoDb {
    /// A store for these limits. It connects when it is first asked; that nobody answers is told then.
    ///
    /// # Errors
    /// [`StoreError::Failed`] if an option can't be used.
    pub fn new(limits: Arc<Limits>, options: &RowsOptions) -> Result<Self, StoreError> {
        let connections = options.checked(&["mongodb"])?;
        let url = ConnectionString::parse(&options.url)
            .map_err(|_| StoreError::Failed("not the URL of a MongoDB database".into()))?;
        let server = Server {
            url,
            prefix: options.prefix.clone(),
            connections: options.connections,
            times: Times::new(options.time),
            documents: OnceCell::new(),
        };
        Ok(Self(Engine::new(server, limits, connections)))
    }
}

impl Remote for MongoDb {
    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn ask(&self, batch: &Batch, now: Time) -> Waiting<Outcomes> {
        self.0.ask(batch, now)
    }

    fn seed(&self, proposal: [u8; 16]) -> Waiting<[u8; 16]> {
        let server = self.0.driver();
        Box::pin(within(GROUP_WITHIN, async move { server.documents().await?.seed(proposal).await }))
    }

    fn tend(&self) -> Waiting<()> {
        let server = self.0.driver();
        Box::pin(within(CLEAN_WITHIN, async move { server.clean().await }))
    }
}

type Answers = Vec<Result<Outcomes, StoreError>>;

/// The server, connected to when it is first asked.
struct Server {
    url: ConnectionString,
    prefix: String,
    connections: u32,
    times: Times,
    documents: OnceCell<Documents>,
}

impl Server {
    async fn documents(&self) -> Result<&Documents, Fault> {
        let connect = async || {
            let mut options = ClientOptions::parse(self.url.clone()).await.map_err(|error| fault(&error))?;
            options.app_name.get_or_insert_with(|| "tidegate".into());
            options.connect_timeout = Some(CONNECT_WITHIN);
            options.server_selection_timeout = Some(CONNECT_WITHIN);
            options.max_pool_size = Some(self.connections);
            // What was answered must outlive the loss of the server that answered.
            options.write_concern.get_or_insert_with(WriteConcern::majority);
            let client = Client::with_options(options).map_err(|error| fault(&error))?;
            Documents::open(client, &self.prefix).await
        };
        self.documents.get_or_try_init(connect).await
    }

    fn decide(&self, ledger: &mut Ledger<'_>, group: &Group, clock: Time) -> Answers {
        ledger.settle(group, |call| self.times.decide(call.now(), clock))
    }

    /// Looks at documents without taking them. Two readings in a row that agree show them all at one moment, as every
    /// change gives a document another version.
    async fn look(&self, documents: &Documents, limits: &Limits, group: &Group) -> Result<Answers, Fault> {
        let keys = keys(group);
        let (mut clock, mut found) = documents.read(&keys).await?;
        if keys.len() > 1 {
            let mut tries = LOOKS;
            loop {
                let (later, again) = documents.read(&keys).await?;
                let same = found.iter().map(Document::version).eq(again.iter().map(Document::version));
                (clock, found) = (later, again);
                if same && found.iter().all(|document| document.is_free(clock)) {
                    break;
                }
                tries -= 1;
                if tries == 0 {
                    return Err(Fault::Conflict("what it holds changes too fast".into()));
                }
            }
        }
        let mut ledger = Ledger::new(limits, group, bytes(&found));
        Ok(self.decide(&mut ledger, group, clock))
    }

    /// Changes one document, if it is still as it was read.
    async fn change_one(&self, documents: &Documents, limits: &Limits, group: &Group) -> Result<Answers, Fault> {
        let keys = keys(group);
        let (clock, found) = documents.read(&keys).await?;
        free(&found, clock)?;
        let mut ledger = Ledger::new(limits, group, bytes(&found));
        let answers = self.decide(&mut ledger, group, clock);
        for ((key, change), document) in keys.iter().zip(ledger.changes()).zip(&found) {
            documents.write(None, key, document.version(), change).await?;
        }
        Ok(answers)
    }

    /// Changes several documents in a transaction.
    async fn transact(&self, documents: &Documents, limits: &Limits, group: &Group) -> Result<Answers, Fault> {
        let mut session = documents.session().await?;
        let begin = session.start_transaction().read_concern(ReadConcern::snapshot());
        begin.write_concern(WriteConcern::majority()).await.map_err(|error| fault(&error))?;
        match self.transact_within(documents, &mut session, limits, group).await {
            Ok((answers, true)) => {
                session.commit_transaction().await.map_err(|error| match fault(&error) {
                    Fault::Broken(what) => Fault::Failed(what),
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
    async fn transact_within(
        &self,
        documents: &Documents,
        session: &mut ClientSession,
        limits: &Limits,
        group: &Group,
    ) -> Result<(Answers, bool), Fault> {
        let keys = keys(group);
        let found = documents.read_within(session, &keys).await?;
        // Read after the snapshot: whoever commits a change of these documents later, by a snapshot of before, fails.
        let clock = documents.clock().await?;
        free(&found, clock)?;
        let mut ledger = Ledger::new(limits, group, bytes(&found));
        let answers = self.decide(&mut ledger, group, clock);
        let mut changed = false;
        for ((key, change), document) in keys.iter().zip(ledger.changes()).zip(&found) {
            changed |= matches!(change, Change::Write(..) | Change::Remove);
            documents.write(Some(&mut *session), key, document.version(), change).await?;
        }
        Ok((answers, changed))
    }

    /// Changes several documents where there are no transactions: each is taken, in key order, before any is changed.
    /// A change gives back what it was made to; whoever was held up beyond the lease fails at it, as others have given
    /// the document another version.
    async fn take_turns(&self, documents: &Documents, limits: &Limits, group: &Group) -> Result<Answers, Fault> {
        let keys = keys(group);
        let (clock, found) = documents.read(&keys).await?;
        free(&found, clock)?;
        let mut held: Vec<(RowKey, i64)> = Vec::with_capacity(keys.len());
        for (key, document) in keys.iter().zip(&found) {
            match documents.take(key, document.version(), clock, LEASE).await {
                Ok(version) => held.push((*key, version)),
                Err(fault) => {
                    for (key, version) in held {
                        let _ = documents.give_back(&key, version).await;
                    }
                    return Err(fault);
                }
            }
        }
        let clock = documents.clock().await?;
        let mut ledger = Ledger::new(limits, group, bytes(&found));
        let answers = self.decide(&mut ledger, group, clock);
        let mut changed = false;
        for ((key, version), change) in held.iter().zip(ledger.changes()) {
            let changes = matches!(change, Change::Write(..) | Change::Remove);
            let done = match change {
                Change::Keep => documents.give_back(key, *version).await,
                // It was made only to be taken.
                Change::Absent => documents.write(None, key, Some(*version), Change::Remove).await,
                change => documents.write(None, key, Some(*version), change).await,
            };
            match done {
                Ok(()) => changed |= changes,
                // Another try would charge what is written once more.
                Err(Fault::Conflict(_) | Fault::Broken(_)) if changed => {
                    return Err(Fault::Failed("the lease ran out halfway".into()));
                }
                Err(fault) => return Err(fault),
            }
        }
        Ok(answers)
    }

    /// Removes what has expired, a bounded number of documents.
    async fn clean(&self) -> Result<(), Fault> {
        let documents = self.documents().await?;
        for _ in 0..CLEAN_STEPS {
            if !documents.clean(self.times.expired()).await? {
                break;
            }
        }
        Ok(())
    }
}

impl Driver for Server {
    const SAME_ROWS: bool = true;

    async fn carry(&self, limits: &Limits, group: &Group) -> Result<Answers, Fault> {
        let documents = self.documents().await?;
        match group.keys().len() {
            _ if group.looks() => self.look(documents, limits, group).await,
            0 | 1 => self.change_one(documents, limits, group).await,
            _ if documents.has_transactions() => self.transact(documents, limits, group).await,
            _ => self.take_turns(documents, limits, group).await,
        }
    }
}

fn keys(group: &Group) -> Vec<RowKey> {
    group.keys().iter().map(|(key, _)| *key).collect()
}

fn bytes(found: &[Document]) -> impl Iterator<Item = (RowKey, Vec<u8>)> {
    found.iter().map(|document| (document.key(), document.state().to_vec()))
}

/// Whether nobody has taken any of these documents.
fn free(found: &[Document], clock: Time) -> Result<(), Fault> {
    match found.iter().all(|document| document.is_free(clock)) {
        true => Ok(()),
        false => Err(Fault::Conflict("another node has taken a key of it".into())),
    }
}
