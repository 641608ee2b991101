//! The documents of states, and the atomic operations on them.
//!
//! A document is `{_id, version, state, expires_at}`, and `locked_until` while a client has it locked. Times are
//! microseconds since the epoch. Every change sets a new random version, so that a document that was removed and
//! inserted again isn't mistaken for the old one.

use ::mongodb::bson::{self, Binary, Bson, doc, spec::BinarySubtype};
use ::mongodb::error::{Error, ErrorKind, TRANSIENT_TRANSACTION_ERROR, WriteFailure};
use ::mongodb::options::{IndexOptions, ReturnDocument};
use ::mongodb::{Client, ClientSession, Collection, Database, IndexModel};
use futures_util::TryStreamExt as _;
use tidegate_core::{Span, Time};

use crate::announcement::stored::{MAX_READ, node_name};
use crate::rows::loaded_rows::RowChange;
use crate::rows::{GroupError, MAX_CLEAN_ROWS, RowKey, SCHEMA_VERSION, check_schema, seed_from_bytes};

/// The maximum time for which a client locks the documents of a batch: it may die meanwhile.
const LOCK_DURATION: Span = Span::from_secs(1);
/// The id of the document with the announcements of all nodes, in the collection of the seed. A single document, because
/// not every server with this protocol uses the index for a range of ids.
const NODES: &str = "nodes";

pub(super) struct Collections {
    pub(super) client: Client,
    database: Database,
    meta: Collection<bson::Document>,
    state: Collection<bson::Document>,
    /// The command to which the server replies with its kind and the time.
    hello_command: &'static str,
    pub(super) supports_transactions: bool,
}

/// The document of a key, if there is one.
pub(super) struct StateDocument {
    pub(super) key: RowKey,
    /// `None` if there is no document.
    pub(super) version: Option<i64>,
    pub(super) state: Vec<u8>,
    locked_until: i64,
}

impl StateDocument {
    /// True if no client has it locked, or the lock has expired.
    pub(super) fn is_unlocked(&self, server_time: Time) -> bool {
        self.locked_until <= micros(server_time)
    }

    fn from_bson(document: &bson::Document) -> Option<Self> {
        Some(Self {
            key: RowKey::from_bytes(document.get_binary_generic("_id").ok()?)?,
            version: Some(document.get_i64("version").ok()?),
            state: document.get_binary_generic("state").ok()?.clone(),
            locked_until: document.get_i64("locked_until").unwrap_or(0),
        })
    }
}

impl Collections {
    /// Creates what is missing, and finds out the server's abilities.
    pub(super) async fn new(client: Client, prefix: &str) -> Result<Self, GroupError> {
        let database = client.default_database().unwrap_or_else(|| client.database("tidegate"));
        let (meta, state) =
            (database.collection(&format!("{prefix}meta")), database.collection(&format!("{prefix}state")));
        let mut documents =
            Self { client, database, meta, state, hello_command: "hello", supports_transactions: false };
        let hello = match documents.hello().await {
            // Servers before 4.4.2 know the command only by its older name.
            Err(error) if is_unknown_command(&error) => {
                documents.hello_command = "isMaster";
                documents.hello().await
            }
            hello => hello,
        };
        let hello = hello?;
        documents.supports_transactions =
            hello.contains_key("setName") || hello.get_str("msg").is_ok_and(|msg| msg == "isdbgrid");
        let version = documents.get_or_insert_meta("schema", SCHEMA_VERSION.to_string().as_bytes()).await?;
        check_schema(&version)?;
        let index = IndexModel::builder().keys(doc! { "expires_at": 1 });
        let index = index.options(IndexOptions::builder().name("expires_at".to_owned()).build()).build();
        documents.state.create_index(index).await?;
        Ok(documents)
    }

    async fn hello(&self) -> Result<bson::Document, Error> {
        self.database.run_command(doc! { self.hello_command: 1 }).await
    }

    pub(super) async fn server_time(&self) -> Result<Time, GroupError> {
        let hello = self.hello().await?;
        let clock =
            hello.get_datetime("localTime").map_err(|_| GroupError::Failed("it doesn't tell the time".into()))?;
        let millis = u64::try_from(clock.timestamp_millis()).unwrap_or(0);
        Ok(Time::from_micros(millis.saturating_mul(1000)))
    }

    /// The documents of these keys, in their order, and then the server's time: no earlier than any change in them. If
    /// this is in a transaction, an earlier transaction that commits a change of these documents later fails.
    pub(super) async fn read(
        &self,
        session: Option<&mut ClientSession>,
        keys: &[RowKey],
    ) -> Result<(Time, Vec<StateDocument>), GroupError> {
        let found: Vec<_> = match session {
            _ if keys.is_empty() => Vec::new(),
            Some(session) => {
                let mut cursor = self.state.find(keys_filter(keys)).session(&mut *session).await?;
                cursor.stream(session).try_collect().await?
            }
            None => self.state.find(keys_filter(keys)).await?.try_collect().await?,
        };
        Ok((self.server_time().await?, in_key_order(keys, &found)?))
    }

    /// Changes a document if it has this version, and unlocks it.
    pub(super) async fn write(
        &self,
        session: Option<&mut ClientSession>,
        key: &RowKey,
        version: Option<i64>,
        change: RowChange,
    ) -> Result<(), GroupError> {
        let done = match (change, version) {
            (RowChange::Keep | RowChange::StayAbsent, _) | (RowChange::Remove, None) => return Ok(()),
            (RowChange::Write(bytes, expires_at), None) => {
                let new_document = new_bson_document(key, rand::random(), &bytes, expires_at);
                let insert = self.state.insert_one(new_document);
                let inserted = match session {
                    Some(session) => insert.session(session).await,
                    None => insert.await,
                };
                inserted.map(|_| 1)
            }
            (RowChange::Write(bytes, expires_at), Some(version)) => {
                let update_document = doc! {
                    "$set": { "version": rand::random::<i64>(), "state": binary(&bytes), "expires_at": expires_at },
                    "$unset": { "locked_until": "" },
                };
                let update = self.state.update_one(version_filter(key, version), update_document);
                let updated = match session {
                    Some(session) => update.session(session).await,
                    None => update.await,
                };
                updated.map(|updated| updated.matched_count)
            }
            (RowChange::Remove, Some(version)) => {
                let delete = self.state.delete_one(version_filter(key, version));
                let deleted = match session {
                    Some(session) => delete.session(session).await,
                    None => delete.await,
                };
                deleted.map(|deleted| deleted.deleted_count)
            }
        };
        check_changed_one(done)
    }

    /// Locks a document of this version, or inserts a locked one. Returns its new version.
    pub(super) async fn lock(&self, key: &RowKey, version: Option<i64>, server_time: Time) -> Result<i64, GroupError> {
        let locked_until = micros(server_time + LOCK_DURATION);
        let new_version: i64 = rand::random();
        let done = match version {
            Some(version) => {
                // A locked document must not expire.
                let lock = doc! {
                    "$set": { "version": new_version, "locked_until": locked_until },
                    "$max": { "expires_at": locked_until },
                };
                let taken = self.state.update_one(version_filter(key, version), lock).await;
                taken.map(|taken| taken.matched_count)
            }
            None => {
                let mut made = new_bson_document(key, new_version, &[], locked_until);
                made.insert("locked_until", locked_until);
                self.state.insert_one(made).await.map(|_| 1)
            }
        };
        check_changed_one(done).map(|()| new_version)
    }

    /// Unlocks a document without a change.
    pub(super) async fn unlock(&self, key: &RowKey, version: i64) -> Result<(), GroupError> {
        let unlock = doc! { "$unset": { "locked_until": "" } };
        let freed = self.state.update_one(version_filter(key, version), unlock).await;
        check_changed_one(freed.map(|freed| freed.matched_count))
    }

    /// Removes some documents expired by `cutoff_micros` or else by the server's clock. True if there may be more.
    pub(super) async fn remove_expired(&self, cutoff_micros: Option<i64>) -> Result<bool, GroupError> {
        let cutoff_micros = match cutoff_micros {
            Some(micros) => micros,
            None => micros(self.server_time().await?),
        };
        let expired = doc! { "expires_at": { "$lte": cutoff_micros } };
        let find = self.state.find(expired).projection(doc! { "_id": 1 }).limit(MAX_CLEAN_ROWS);
        let found: Vec<bson::Document> = find.await?.try_collect().await?;
        if found.is_empty() {
            return Ok(false);
        }
        let ids: Vec<Bson> = found.iter().filter_map(|document| document.get("_id").cloned()).collect();
        let still_expired = doc! { "_id": { "$in": ids }, "expires_at": { "$lte": cutoff_micros } };
        self.state.delete_many(still_expired).await?;
        Ok(found.len() == MAX_CLEAN_ROWS as usize)
    }

    /// Returns the stored seed. If there is none, stores this one.
    pub(super) async fn get_or_insert_seed(&self, proposal: [u8; 16]) -> Result<[u8; 16], GroupError> {
        seed_from_bytes(self.get_or_insert_meta("seed", &proposal).await?)
    }

    /// Stores a node's announcement, and returns those of all nodes with their names. What isn't bytes has none.
    pub(super) async fn write_node(
        &self,
        (node_id, announcement): (u64, Vec<u8>),
    ) -> Result<Vec<(String, Vec<u8>)>, GroupError> {
        let set = doc! { "$set": { node_path(&node_name(node_id)): binary(&announcement) } };
        let update = self.meta.find_one_and_update(doc! { "_id": NODES }, set).upsert(true);
        let nodes = update.return_document(ReturnDocument::After).await?.unwrap_or_default();
        let fields = nodes.get_document("nodes").into_iter().flatten();
        Ok(fields.map(|(name, value)| (name.clone(), bytes_of(value).unwrap_or_default())).collect())
    }

    /// Removes these names. If they are too many for a statement, or other programs have written names that a path can't
    /// have, removes all: each node announces itself again.
    pub(super) async fn remove_nodes(&self, names: &[String]) -> Result<(), GroupError> {
        let is_plain = |name: &String| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let update = if names.len() <= MAX_READ && names.iter().all(is_plain) {
            let paths: bson::Document = names.iter().map(|name| (node_path(name), Bson::from(""))).collect();
            doc! { "$unset": paths }
        } else {
            doc! { "$set": { "nodes": {} } }
        };
        self.meta.update_one(doc! { "_id": NODES }, update).await?;
        Ok(())
    }

    /// Stores a value under a name that has none, and returns the stored one.
    async fn get_or_insert_meta(&self, name: &str, value: &[u8]) -> Result<Vec<u8>, GroupError> {
        match check_changed_one(self.meta.insert_one(doc! { "_id": name, "value": binary(value) }).await.map(|_| 1)) {
            Ok(()) | Err(GroupError::Conflict(_)) => {}
            Err(error) => return Err(error),
        }
        let stored = self.meta.find_one(doc! { "_id": name }).await?;
        let value = stored.as_ref().and_then(|stored| stored.get_binary_generic("value").ok());
        value.cloned().ok_or_else(|| GroupError::Failed(format!("its {name} is none of this program's")))
    }
}

fn micros(time: Time) -> i64 {
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX)
}

fn binary(bytes: &[u8]) -> Binary {
    Binary { subtype: BinarySubtype::Generic, bytes: bytes.to_vec() }
}

fn new_bson_document(key: &RowKey, version: i64, state: &[u8], expires_at: i64) -> bson::Document {
    doc! { "_id": binary(key.as_bytes()), "version": version, "state": binary(state), "expires_at": expires_at }
}

/// The path of a node's announcement in the document of nodes.
fn node_path(name: &str) -> String {
    format!("nodes.{name}")
}

fn bytes_of(value: &Bson) -> Option<Vec<u8>> {
    match value {
        Bson::Binary(binary) => Some(binary.bytes.clone()),
        _ => None,
    }
}

fn version_filter(key: &RowKey, version: i64) -> bson::Document {
    doc! { "_id": binary(key.as_bytes()), "version": version }
}

fn keys_filter(keys: &[RowKey]) -> bson::Document {
    // Not every server with this protocol uses the index for a list, so a single key is no list.
    if let [key] = keys {
        return doc! { "_id": binary(key.as_bytes()) };
    }
    let ids: Vec<Bson> = keys.iter().map(|key| Bson::Binary(binary(key.as_bytes()))).collect();
    doc! { "_id": { "$in": ids } }
}

/// The documents in the keys' order, with a missing one for each key without a document.
fn in_key_order(keys: &[RowKey], found: &[bson::Document]) -> Result<Vec<StateDocument>, GroupError> {
    let missing = |key| StateDocument { key, version: None, state: Vec::new(), locked_until: 0 };
    let mut documents: Vec<StateDocument> = keys.iter().copied().map(missing).collect();
    for document in found {
        let read = StateDocument::from_bson(document)
            .ok_or_else(|| GroupError::Failed("a document is none of this program's".into()))?;
        if let Ok(index) = keys.binary_search(&read.key) {
            documents[index] = read;
        }
    }
    Ok(documents)
}

/// Checks the result of a write that must change exactly one document.
fn check_changed_one(done: Result<u64, Error>) -> Result<(), GroupError> {
    match done {
        Ok(0) => Err(GroupError::Conflict("another node was quicker".into())),
        Ok(_) => Ok(()),
        Err(error) => Err(GroupError::from(error).of_commit()),
    }
}

/// True if the server doesn't know the command.
fn is_unknown_command(error: &Error) -> bool {
    const COMMAND_NOT_FOUND: i32 = 59;
    matches!(&*error.kind, ErrorKind::Command(error) if error.code == COMMAND_NOT_FOUND)
}

impl From<Error> for GroupError {
    fn from(error: Error) -> Self {
        const DUPLICATE_KEY: i32 = 11_000;
        const WRITE_CONFLICT: i32 = 112;
        let is_conflict = |code| code == DUPLICATE_KEY || code == WRITE_CONFLICT;
        let what = error.kind.to_string();
        match &*error.kind {
            _ if error.contains_label(TRANSIENT_TRANSACTION_ERROR) => Self::Conflict(what),
            ErrorKind::Write(WriteFailure::WriteError(error)) if is_conflict(error.code) => {
                Self::Conflict(error.message.clone())
            }
            ErrorKind::Command(error) if is_conflict(error.code) => Self::Conflict(error.message.clone()),
            ErrorKind::ServerSelection { .. } => Self::Unreachable("no server answers".into()),
            ErrorKind::Io(_) | ErrorKind::ConnectionPoolCleared { .. } => Self::ConnectionLost(what),
            _ => Self::Failed(what),
        }
    }
}
