//! A state as a document, and what can be done with one in a single step.
//!
//! A document is `{_id, version, state, expires_at}`, and `locked_until` while somebody has taken it; moments are
//! microseconds since the epoch. Every change gives it another version, drawn at random, so that one that was removed
//! and made anew isn't taken for the old one.

use std::time::Duration;

use ::mongodb::bson::{self, Binary, Bson, doc, spec::BinarySubtype};
use ::mongodb::error::{Error, ErrorKind, TRANSIENT_TRANSACTION_ERROR, WriteFailure};
use ::mongodb::options::IndexOptions;
use ::mongodb::{Client, ClientSession, Collection, Database, IndexModel};
use futures_util::TryStreamExt as _;
use tidegate_core::Time;

use crate::rows::ledger::Change;
use crate::rows::{CLEAN_ROWS, Fault, RowKey, SCHEMA, check_schema};

/// The collections, and what their server can do.
pub(super) struct Documents {
    client: Client,
    database: Database,
    meta: Collection<bson::Document>,
    state: Collection<bson::Document>,
    /// The command by which the server tells what it is, and the time.
    greeting: &'static str,
    transactions: bool,
}

/// What was found under a key.
pub(super) struct Document {
    key: RowKey,
    /// None, if nothing was.
    version: Option<i64>,
    state: Vec<u8>,
    locked_until: i64,
}

impl Document {
    pub(super) fn key(&self) -> RowKey {
        self.key
    }

    pub(super) fn version(&self) -> Option<i64> {
        self.version
    }

    pub(super) fn state(&self) -> &[u8] {
        &self.state
    }

    /// Whether nobody has taken it, or whoever has did so too long ago.
    pub(super) fn is_free(&self, clock: Time) -> bool {
        self.locked_until <= micros(clock)
    }

    fn absent(key: RowKey) -> Self {
        Self { key, version: None, state: Vec::new(), locked_until: 0 }
    }

    fn of(document: &bson::Document) -> Option<Self> {
        Some(Self {
            key: RowKey::read(document.get_binary_generic("_id").ok()?)?,
            version: Some(document.get_i64("version").ok()?),
            state: document.get_binary_generic("state").ok()?.clone(),
            locked_until: document.get_i64("locked_until").unwrap_or(0),
        })
    }
}

impl Documents {
    /// Makes what isn't there, and looks at what the server can do.
    pub(super) async fn open(client: Client, prefix: &str) -> Result<Self, Fault> {
        let database = client.default_database().unwrap_or_else(|| client.database("tidegate"));
        let (meta, state) =
            (database.collection(&format!("{prefix}meta")), database.collection(&format!("{prefix}state")));
        let mut documents = Self { client, database, meta, state, greeting: "hello", transactions: false };
        let hello = match documents.hello().await {
            // The same by its older name: before 4.4.2 there was no other.
            Err(error) if is_unknown(&error) => {
                documents.greeting = "isMaster";
                documents.hello().await
            }
            hello => hello,
        };
        let hello = hello.map_err(|error| fault(&error))?;
        documents.transactions =
            hello.contains_key("setName") || hello.get_str("msg").is_ok_and(|msg| msg == "isdbgrid");
        let version = documents.keep("schema", SCHEMA.to_string().as_bytes()).await?;
        check_schema(&version)?;
        let index = IndexModel::builder().keys(doc! { "expires_at": 1 });
        let index = index.options(IndexOptions::builder().name("expires_at".to_owned()).build()).build();
        documents.state.create_index(index).await.map_err(|error| fault(&error))?;
        Ok(documents)
    }

    pub(super) fn has_transactions(&self) -> bool {
        self.transactions
    }

    pub(super) async fn session(&self) -> Result<ClientSession, Fault> {
        self.client.start_session().await.map_err(|error| fault(&error))
    }

    async fn hello(&self) -> Result<bson::Document, Error> {
        self.database.run_command(doc! { self.greeting: 1 }).await
    }

    /// The server's clock.
    pub(super) async fn clock(&self) -> Result<Time, Fault> {
        let hello = self.hello().await.map_err(|error| fault(&error))?;
        let clock = hello.get_datetime("localTime").map_err(|_| Fault::Failed("it doesn't tell the time".into()))?;
        let millis = u64::try_from(clock.timestamp_millis()).unwrap_or(0);
        Ok(Time::from_micros(millis.saturating_mul(1000)))
    }

    /// The documents of these keys, in their order, and then the server's clock: later than every change that was seen.
    pub(super) async fn read(&self, keys: &[RowKey]) -> Result<(Time, Vec<Document>), Fault> {
        let found = match keys {
            [] => Vec::new(),
            keys => {
                let cursor = self.state.find(among(keys)).await.map_err(|error| fault(&error))?;
                cursor.try_collect().await.map_err(|error| fault(&error))?
            }
        };
        Ok((self.clock().await?, sorted(keys, &found)?))
    }

    /// The documents of these keys, in their order, as a transaction sees them.
    pub(super) async fn read_within(
        &self,
        session: &mut ClientSession,
        keys: &[RowKey],
    ) -> Result<Vec<Document>, Fault> {
        let mut cursor = self.state.find(among(keys)).session(&mut *session).await.map_err(|error| fault(&error))?;
        let found: Vec<_> = cursor.stream(session).try_collect().await.map_err(|error| fault(&error))?;
        sorted(keys, &found)
    }

    /// Changes a document if it has this version, and gives it back if it was taken.
    pub(super) async fn write(
        &self,
        session: Option<&mut ClientSession>,
        key: &RowKey,
        version: Option<i64>,
        change: Change,
    ) -> Result<(), Fault> {
        let done = match (change, version) {
            (Change::Keep | Change::Absent, _) | (Change::Remove, None) => return Ok(()),
            (Change::Write(bytes, expires_at), None) => {
                let new = document(key, rand::random(), &bytes, expires_at);
                let insert = self.state.insert_one(new);
                let inserted = match session {
                    Some(session) => insert.session(session).await,
                    None => insert.await,
                };
                inserted.map(|_| 1)
            }
            (Change::Write(bytes, expires_at), Some(version)) => {
                let new = doc! {
                    "$set": { "version": rand::random::<i64>(), "state": binary(&bytes), "expires_at": expires_at },
                    "$unset": { "locked_until": "" },
                };
                let update = self.state.update_one(of_version(key, version), new);
                let updated = match session {
                    Some(session) => update.session(session).await,
                    None => update.await,
                };
                updated.map(|updated| updated.matched_count)
            }
            (Change::Remove, Some(version)) => {
                let delete = self.state.delete_one(of_version(key, version));
                let deleted = match session {
                    Some(session) => delete.session(session).await,
                    None => delete.await,
                };
                deleted.map(|deleted| deleted.deleted_count)
            }
        };
        changed(done)
    }

    /// Takes a document that has this version, or makes one, and tells its new version.
    pub(super) async fn take(
        &self,
        key: &RowKey,
        version: Option<i64>,
        clock: Time,
        lease: Duration,
    ) -> Result<i64, Fault> {
        let until = micros(clock).saturating_add(i64::try_from(lease.as_micros()).unwrap_or(i64::MAX));
        let new: i64 = rand::random();
        let done = match version {
            Some(version) => {
                // What is taken doesn't expire.
                let take = doc! { "$set": { "version": new, "locked_until": until }, "$max": { "expires_at": until } };
                let taken = self.state.update_one(of_version(key, version), take).await;
                taken.map(|taken| taken.matched_count)
            }
            None => {
                let mut made = document(key, new, &[], until);
                made.insert("locked_until", until);
                self.state.insert_one(made).await.map(|_| 1)
            }
        };
        changed(done).map(|()| new)
    }

    /// Gives a document back that was taken and needs no change.
    pub(super) async fn give_back(&self, key: &RowKey, version: i64) -> Result<(), Fault> {
        let free = doc! { "$unset": { "locked_until": "" } };
        let freed = self.state.update_one(of_version(key, version), free).await;
        changed(freed.map(|freed| freed.matched_count))
    }

    /// Removes some of what has expired, by the server's clock unless a moment is told, and says whether there may be
    /// more.
    pub(super) async fn clean(&self, at: Option<i64>) -> Result<bool, Fault> {
        let at = match at {
            Some(at) => at,
            None => micros(self.clock().await?),
        };
        let expired = doc! { "expires_at": { "$lte": at } };
        let most = i64::try_from(CLEAN_ROWS).unwrap_or(i64::MAX);
        let find = self.state.find(expired).projection(doc! { "_id": 1 }).limit(most);
        let found: Vec<bson::Document> =
            find.await.map_err(|error| fault(&error))?.try_collect().await.map_err(|error| fault(&error))?;
        if found.is_empty() {
            return Ok(false);
        }
        let ids: Vec<Bson> = found.iter().filter_map(|document| document.get("_id").cloned()).collect();
        let still = doc! { "_id": { "$in": ids }, "expires_at": { "$lte": at } };
        self.state.delete_many(still).await.map_err(|error| fault(&error))?;
        Ok(found.len() == CLEAN_ROWS)
    }

    /// The seed in the store, or this one, which is kept then.
    pub(super) async fn seed(&self, proposal: [u8; 16]) -> Result<[u8; 16], Fault> {
        let kept = self.keep("seed", &proposal).await?;
        kept.try_into().map_err(|_| Fault::Failed("the seed in it isn't 16 bytes long".into()))
    }

    /// Keeps a value under a name that has none, and tells the one that is kept.
    async fn keep(&self, name: &str, value: &[u8]) -> Result<Vec<u8>, Fault> {
        match changed(self.meta.insert_one(doc! { "_id": name, "value": binary(value) }).await.map(|_| 1)) {
            Ok(()) | Err(Fault::Conflict(_)) => {}
            Err(fault) => return Err(fault),
        }
        let kept = self.meta.find_one(doc! { "_id": name }).await.map_err(|error| fault(&error))?;
        let value = kept.as_ref().and_then(|kept| kept.get_binary_generic("value").ok());
        value.cloned().ok_or_else(|| Fault::Failed(format!("its {name} is none of this program's")))
    }
}

fn micros(time: Time) -> i64 {
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX)
}

fn binary(bytes: &[u8]) -> Binary {
    Binary { subtype: BinarySubtype::Generic, bytes: bytes.to_vec() }
}

fn document(key: &RowKey, version: i64, state: &[u8], expires_at: i64) -> bson::Document {
    doc! { "_id": binary(key.as_bytes()), "version": version, "state": binary(state), "expires_at": expires_at }
}

fn of_version(key: &RowKey, version: i64) -> bson::Document {
    doc! { "_id": binary(key.as_bytes()), "version": version }
}

fn among(keys: &[RowKey]) -> bson::Document {
    // One key is asked for by itself: not every server that speaks the protocol looks a list up in its index.
    if let [key] = keys {
        return doc! { "_id": binary(key.as_bytes()) };
    }
    let ids: Vec<Bson> = keys.iter().map(|key| Bson::Binary(binary(key.as_bytes()))).collect();
    doc! { "_id": { "$in": ids } }
}

/// What was found, in the order of the keys, with a place for each that wasn't.
fn sorted(keys: &[RowKey], found: &[bson::Document]) -> Result<Vec<Document>, Fault> {
    let mut documents: Vec<Document> = keys.iter().copied().map(Document::absent).collect();
    for document in found {
        let read =
            Document::of(document).ok_or_else(|| Fault::Failed("a document is none of this program's".into()))?;
        if let Ok(index) = keys.binary_search(&read.key) {
            documents[index] = read;
        }
    }
    Ok(documents)
}

/// What a write that should have changed one document says.
fn changed(done: Result<u64, Error>) -> Result<(), Fault> {
    match done {
        Ok(0) => Err(Fault::Conflict("another node was quicker".into())),
        Ok(_) => Ok(()),
        Err(error) => Err(match fault(&error) {
            // It may have been carried out.
            Fault::Broken(what) => Fault::Failed(what),
            fault => fault,
        }),
    }
}

/// Whether the server doesn't know a command.
fn is_unknown(error: &Error) -> bool {
    const COMMAND_NOT_FOUND: i32 = 59;
    matches!(&*error.kind, ErrorKind::Command(error) if error.code == COMMAND_NOT_FOUND)
}

/// What an error says, and whether it is worth another try.
pub(super) fn fault(error: &Error) -> Fault {
    const DUPLICATE_KEY: i32 = 11_000;
    const WRITE_CONFLICT: i32 = 112;
    let again = |code| code == DUPLICATE_KEY || code == WRITE_CONFLICT;
    let what = error.kind.to_string();
    match &*error.kind {
        _ if error.contains_label(TRANSIENT_TRANSACTION_ERROR) => Fault::Conflict(what),
        ErrorKind::Write(WriteFailure::WriteError(error)) if again(error.code) => {
            Fault::Conflict(error.message.clone())
        }
        ErrorKind::Command(error) if again(error.code) => Fault::Conflict(error.message.clone()),
        ErrorKind::ServerSelection { .. } => Fault::Unreachable("no server answers".into()),
        ErrorKind::Io(_) | ErrorKind::ConnectionPoolCleared { .. } => Fault::Broken(what),
        _ => Fault::Failed(what),
    }
}
