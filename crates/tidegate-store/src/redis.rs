//! State in Redis, Valkey or a compatible server (6.2 and later), standalone, in a cluster or behind sentinels.
//!
//! A decision is one round trip. A script in the server does to the states what [`tidegate_core::batch::execute`] does.
//! Its answer has as much of the states as this side needs for the same outcomes. Each state is one key that expires by
//! itself. All requests share one connection, opened at the first request. While it is down, requests fail at once.

mod address;
mod batcher;
mod codec;
mod connection;
mod keys;
mod masters;
mod multi_slot;
mod nodes;
mod script;

use std::fmt;
use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tidegate_core::batch::RefusalSummary;
use tidegate_core::{Batch, Key, Limits, Outcomes, Time, Verb};
use tokio::sync::broadcast;

pub use address::RedisUrlError;

use crate::{AnnouncedNode, Announcement, KeyReset, RemoteFuture, RemoteStore, StoreError, TimeSource};
use address::RedisAddress;
use batcher::{Batcher, BatchingOutcome};
use codec::{BatchCodec, PeriodMismatchError};
use connection::{RedisCommandError, RedisTimeouts, SharedConnection};
use keys::KeyNames;
use masters::SlotMasters;
use redis::{Cmd, ErrorKind, ServerErrorKind, Value};
use script::{Script, ScriptCache, ScriptKind};

/// The maximum number of attempts when a quota's period isn't the expected one. Two are enough in most cases.
const MAX_PERIOD_TRIES: u32 = 4;

/// The options of a Redis store.
#[derive(Clone)]
pub struct RedisOptions {
    /// `SCHEME://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`, user and password percent-encoded. The scheme is `redis`;
    /// `redis-cluster` with one host or more, separated by commas; or `redis-sentinel` with the sentinels' hosts and
    /// `/SERVICE[/DATABASE]` behind them. `rediss` and its like are encrypted.
    pub url: String,
    /// The beginning of all names in the server. Default `tidegate:`. Nodes that share state must agree on it.
    pub prefix: String,
    /// The source of decisions' time. Default the server's clock.
    pub time_source: TimeSource,
    /// In a cluster, true to execute a batch over several slots in parts. A batch that is interrupted, or meets
    /// another, may then be refused although there was room, but no limit is ever exceeded. Default false: such a batch
    /// fails.
    pub reserve: bool,
    /// The maximum time for connecting and logging in. Default 1 s.
    pub connect_timeout: Duration,
    /// The maximum time for an answer; then the connection is closed. Callers bound their own waits. Default 1 s.
    pub answer_timeout: Duration,
    /// The trusted certificate authorities of an encrypted server, as PEM. Default the system's.
    pub authorities: Option<Vec<u8>>,
}

impl RedisOptions {
    /// The defaults for a URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            prefix: "tidegate:".into(),
            time_source: TimeSource::Store,
            reserve: false,
            connect_timeout: Duration::from_secs(1),
            answer_timeout: Duration::from_secs(1),
            authorities: None,
        }
    }
}

impl fmt::Debug for RedisOptions {
    /// Without the URL, which may hold a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisOptions")
            .field("prefix", &self.prefix)
            .field("time_source", &self.time_source)
            .field("reserve", &self.reserve)
            .field("connect_timeout", &self.connect_timeout)
            .field("answer_timeout", &self.answer_timeout)
            .finish_non_exhaustive()
    }
}

/// State in a Redis server, or several.
pub struct Redis {
    inner: Arc<RedisInner>,
}

/// A handle that decides by its own limits. Clones share all else.
#[derive(Clone)]
struct RedisInner {
    limits: Arc<Limits>,
    key_names: Arc<KeyNames>,
    time_source: TimeSource,
    reserve: bool,
    timeouts: RedisTimeouts,
    scripts: Arc<ScriptCache>,
    connection: Arc<SharedConnection>,
    batcher: Arc<Batcher>,
    masters: Arc<SlotMasters>,
    /// The server's time minus the caller's in the last answer, in microseconds. It predicts the period of a quota.
    clock_offset_micros: Arc<AtomicI64>,
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("connection", &self.inner.connection).finish_non_exhaustive()
    }
}

impl Redis {
    /// A store for these limits. It connects at the first request.
    ///
    /// # Errors
    /// An invalid URL. A server that can't be reached is no error here.
    pub fn new(options: RedisOptions, limits: Arc<Limits>) -> Result<Self, RedisUrlError> {
        let key_names = Arc::new(KeyNames::new(&options.prefix));
        let timeouts = RedisTimeouts { connect: options.connect_timeout, answer: options.answer_timeout };
        let address = RedisAddress::parse(&options.url)?;
        let inner = RedisInner {
            limits,
            time_source: options.time_source,
            reserve: options.reserve,
            timeouts,
            scripts: Arc::default(),
            connection: SharedConnection::new(address, options.authorities, timeouts, Arc::clone(&key_names)),
            key_names,
            batcher: Arc::default(),
            masters: Arc::default(),
            clock_offset_micros: Arc::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }
}

impl RemoteStore for Redis {
    fn limits(&self) -> &Arc<Limits> {
        &self.inner.limits
    }

    fn apply(&self, batch: &Batch, now: Time) -> RemoteFuture<Outcomes> {
        let (inner, batch) = (Arc::clone(&self.inner), batch.clone());
        Box::pin(async move { inner.apply(&batch, now).await })
    }

    fn get_or_insert_seed(&self, proposal: [u8; 16]) -> RemoteFuture<[u8; 16]> {
        let inner = Arc::clone(&self.inner);
        Box::pin(async move { inner.get_or_insert_seed(proposal).await })
    }

    fn announce(&self, announcement: Announcement, now: Time) -> RemoteFuture<Vec<AnnouncedNode>> {
        let inner = Arc::clone(&self.inner);
        Box::pin(async move { inner.announce(&announcement, now).await })
    }

    fn partition_count(&self) -> usize {
        if self.inner.connection.is_cluster() { masters::MAX_MASTERS } else { 1 }
    }

    fn partition(&self, affinity: u64, key: Key) -> usize {
        let is_cluster = self.inner.connection.is_cluster();
        if is_cluster { self.inner.masters.index_for_tag(&KeyNames::hash_tag(affinity, key)) } else { 0 }
    }

    fn subscribe_to_resets(&self) -> Option<broadcast::Receiver<Option<KeyReset>>> {
        Some(self.inner.connection.subscribe_to_resets())
    }

    fn with_limits(&self, limits: Arc<Limits>) -> Option<Box<dyn RemoteStore>> {
        Some(Box::new(Self { inner: Arc::new(RedisInner { limits, ..(*self.inner).clone() }) }))
    }

    fn maintain(&self) -> RemoteFuture<()> {
        let inner = Arc::clone(&self.inner);
        Box::pin(async move {
            inner.connection.report_possibly_missed_resets();
            if inner.connection.is_cluster() {
                let mut slots = redis::cmd("CLUSTER");
                inner.masters.update(&inner.send(slots.arg("SLOTS")).await?);
            }
            Ok(())
        })
    }
}

impl RedisInner {
    async fn apply(self: &Arc<Self>, batch: &Batch, now: Time) -> Result<Outcomes, StoreError> {
        if self.connection.is_cluster() && multi_slot::needs_several_slots(batch) {
            if !self.reserve {
                return Err(StoreError::Failed("the keys of the batch lie in several slots of the cluster".into()));
            }
            // Boxed, so that the futures of other calls have no room for it.
            return Box::pin(self.apply_by_slot(batch, now)).await;
        }
        self.apply_in_one_slot(batch, now, RefusalSummary::default()).await
    }

    /// Executes a batch with all keys in one slot.
    async fn apply_in_one_slot(
        self: &Arc<Self>,
        batch: &Batch,
        now: Time,
        other_parts: RefusalSummary,
    ) -> Result<Outcomes, StoreError> {
        let (limits, key_names, time_source) = (&*self.limits, &*self.key_names, self.time_source);
        let codec = BatchCodec { batch, limits, key_names, time_source, other_parts };
        if codec.known_ops().next().is_none() {
            let at = self.decision_time(now).await?;
            return Ok(tidegate_core::batch::execute(batch, &self.limits, [].as_mut_slice(), at));
        }
        let script_kind = ScriptKind::for_batch(batch, limits, other_parts == RefusalSummary::default());
        let _slot = match script_kind {
            ScriptKind::Quick(code) => match self.send_batched(code, || codec.encode(now, now)).await? {
                BatchingOutcome::SendAlone(slot) => slot,
                BatchingOutcome::Answered(bytes) => {
                    return self
                        .decode_response(&codec, &bytes, now)?
                        .map_err(|PeriodMismatchError(_)| invalid_response_error());
                }
            },
            _ => None,
        };
        let script = self.scripts.get(script_kind);
        let mut expected_now = match time_source {
            TimeSource::Store => {
                let offset = self.clock_offset_micros.load(Ordering::Relaxed);
                Time::from_micros(now.as_micros().saturating_add_signed(offset))
            }
            TimeSource::Caller => now,
        };
        for _ in 0..MAX_PERIOD_TRIES {
            let request = codec.encode(now, expected_now);
            // Resets are published on a channel, for all nodes.
            let has_reset = codec.known_ops().any(|(op, _)| op.verb == Verb::Reset);
            let arguments = iter::once(request.argument()).chain(has_reset.then(|| key_names.reset_channel()));
            let answer = self.run_script(script, request.names(), arguments).await;
            let Value::BulkString(bytes) = answer.map_err(|error| self.to_store_error(error))? else {
                return Err(StoreError::Failed("the script didn't answer with bytes".into()));
            };
            match self.decode_response(&codec, &bytes, now)? {
                Ok(outcomes) => return Ok(outcomes),
                Err(PeriodMismatchError(at)) => expected_now = at,
            }
        }
        Err(StoreError::Failed("the server's clock is never where it was".into()))
    }

    /// Runs a script by its hash, or by its text if the server doesn't know it.
    async fn run_script<'a>(
        &self,
        script: &Script,
        names: impl Iterator<Item = &'a [u8]> + Clone,
        arguments: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> Result<Value, RedisCommandError> {
        let script_command =
            |command_name, script| codec::script_command(command_name, script, names.clone(), arguments.clone());
        match self.connection.send(&script_command("EVALSHA", &script.hash)).await {
            Err(RedisCommandError::Redis(error)) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                self.connection.send(&script_command("EVAL", &script.text)).await
            }
            answer => answer,
        }
    }

    fn decode_response(
        &self,
        codec: &BatchCodec<'_>,
        bytes: &[u8],
        now: Time,
    ) -> Result<Result<Outcomes, PeriodMismatchError>, StoreError> {
        let decoded = codec.decode(bytes).ok_or_else(invalid_response_error)?;
        let at = decoded.as_ref().map_or_else(|PeriodMismatchError(at)| *at, Outcomes::now);
        // Both times are below 2^52.
        let offset = at.as_micros() as i64 - now.as_micros() as i64;
        self.clock_offset_micros.store(offset, Ordering::Relaxed);
        Ok(decoded)
    }

    /// Returns the time of a decision, after one round trip to the server.
    async fn decision_time(&self, now: Time) -> Result<Time, StoreError> {
        let numbers = match self.send(&redis::cmd("TIME")).await? {
            Value::Array(parts) => parts.into_iter().map(redis::from_redis_value::<u64>).collect(),
            _ => Ok(Vec::new()),
        };
        let Ok(&[seconds, micros]) = numbers.as_deref() else {
            return Err(StoreError::Failed("the server doesn't tell the time".into()));
        };
        Ok(match self.time_source {
            TimeSource::Store => Time::from_micros(seconds.saturating_mul(1_000_000).saturating_add(micros)),
            TimeSource::Caller => now,
        })
    }

    async fn get_or_insert_seed(&self, proposal: [u8; 16]) -> Result<[u8; 16], StoreError> {
        let name = self.key_names.seed_name();
        let mut put = redis::cmd("SET");
        put.arg(name.as_slice()).arg(proposal.as_slice()).arg("NX");
        self.send(&put).await?;
        let mut get = redis::cmd("GET");
        get.arg(name.as_slice());
        match self.send(&get).await? {
            Value::BulkString(bytes) => {
                bytes.try_into().map_err(|_| StoreError::Failed("the seed has no 16 bytes".into()))
            }
            _ => Err(StoreError::Failed("the seed was removed".into())),
        }
    }

    async fn send(&self, command: &Cmd) -> Result<Value, StoreError> {
        self.connection.send(command).await.map_err(|error| self.to_store_error(error))
    }

    fn to_store_error(&self, error: RedisCommandError) -> StoreError {
        match error {
            RedisCommandError::Redis(error) if error.is_timeout() => StoreError::Timeout(self.timeouts.answer),
            RedisCommandError::Redis(error) => StoreError::Failed(error.to_string()),
            RedisCommandError::NotConnected(reason) => StoreError::Failed(reason.to_string()),
        }
    }
}

fn invalid_response_error() -> StoreError {
    StoreError::Failed("the script's answer can't be read".into())
}
