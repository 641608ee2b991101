//! State in Redis, Valkey or a server that speaks as they do (6.2 and later), alone, in a cluster or behind sentinels.
//!
//! A decision is one round trip: a script in the server does what [`tidegate_core::batch::execute`] does to the states,
//! and answers with as much of them as it takes to give core's own answers here. Each state is one key that expires by
//! itself. All share one connection, which is made when it is first needed; while there is none, who asks is told so at
//! once.

mod address;
mod keys;
mod link;
mod masters;
mod question;
mod script;
mod spread;
mod together;

use std::fmt;
use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tidegate_core::batch::RefusalSummary;
use tidegate_core::{Batch, Key, Limits, Outcomes, Time};
use tokio::sync::broadcast;

pub use address::RedisUrlError;

use crate::{Remote, Reset, StoreError, TimeSource, Waiting};
use address::Address;
use keys::Keys;
use link::{Link, LinkError, Patience};
use masters::Masters;
use question::{Elsewhen, Question};
use redis::{Cmd, ServerErrorKind, Value};
use script::{Parts, Script, Scripts};
use together::{Together, Turn};

/// How often a question is asked again because the server's clock isn't where it was thought to be. Once is enough
/// unless a period ends between.
const QUESTIONS: u32 = 4;

/// Where a Redis store is, and how it is used.
#[derive(Clone)]
pub struct RedisOptions {
    /// `SCHEME://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`, user and password percent-encoded. The scheme is `redis`;
    /// `redis-cluster` with one host or more, separated by commas; or `redis-sentinel` with the sentinels' hosts and
    /// `/SERVICE[/DATABASE]` behind them. `rediss` and its like are encrypted.
    pub url: String,
    /// What all names in the server begin with. Default `tidegate:`. Nodes that share state must agree on it.
    pub prefix: String,
    /// Whose time it decides by. Default the server's.
    pub time: TimeSource,
    /// In a cluster, whether a batch whose keys have nothing in common is carried out in parts: one that is
    /// interrupted, or meets another, may then be refused although there was room, but no limit is ever exceeded. Default
    /// no: it fails.
    pub reserve: bool,
    /// How long connecting and logging in may take. Default 1 s.
    pub connect_timeout: Duration,
    /// How long the server may take to answer before the connection is given up. A backstop: who asks bounds its own
    /// wait. Default 1 s.
    pub answer_timeout: Duration,
    /// The authorities that an encrypted server's certificate is trusted from, as PEM. Default the system's.
    pub authorities: Option<Vec<u8>>,
}

impl RedisOptions {
    /// The defaults for a URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            prefix: "tidegate:".into(),
            time: TimeSource::Store,
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
            .field("time", &self.time)
            .field("reserve", &self.reserve)
            .field("connect_timeout", &self.connect_timeout)
            .field("answer_timeout", &self.answer_timeout)
            .finish_non_exhaustive()
    }
}

/// State in a Redis server, or several.
pub struct Redis {
    shared: Arc<Shared>,
}

struct Shared {
    limits: Arc<Limits>,
    keys: Arc<Keys>,
    time: TimeSource,
    reserve: bool,
    patience: Patience,
    scripts: Scripts,
    link: Link,
    together: Together,
    masters: Masters,
    /// How far the server's clock was ahead of the callers' in the last answer, in microseconds: where to look for the
    /// period of a quota.
    ahead: AtomicI64,
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("link", &self.shared.link).finish_non_exhaustive()
    }
}

impl Redis {
    /// A store for these limits. It connects when it is first asked.
    ///
    /// # Errors
    /// A URL that can't be one. A server that isn't there is no error here.
    pub fn new(options: RedisOptions, limits: Arc<Limits>) -> Result<Self, RedisUrlError> {
        let RedisOptions { url, prefix, time, reserve, connect_timeout, answer_timeout, authorities } = options;
        let keys = Arc::new(Keys::new(&prefix));
        let patience = Patience { connect: connect_timeout, answer: answer_timeout };
        let link = Link::new(Address::parse(&url)?, authorities, patience, Arc::clone(&keys));
        let (scripts, together, masters) = (Scripts::default(), Together::default(), Masters::default());
        let ahead = AtomicI64::new(0);
        let shared = Shared { limits, keys, time, reserve, patience, scripts, link, together, masters, ahead };
        Ok(Self { shared: Arc::new(shared) })
    }
}

impl Remote for Redis {
    fn limits(&self) -> &Arc<Limits> {
        &self.shared.limits
    }

    fn ask(&self, batch: &Batch, now: Time) -> Waiting<Outcomes> {
        let (shared, batch) = (Arc::clone(&self.shared), batch.clone());
        Box::pin(async move { shared.ask(&batch, now).await })
    }

    fn seed(&self, proposal: [u8; 16]) -> Waiting<[u8; 16]> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move { shared.seed(proposal).await })
    }

    fn parts(&self) -> usize {
        if self.shared.link.is_divided() { masters::MOST } else { 1 }
    }

    fn part(&self, affinity: u64, key: Key) -> usize {
        if self.shared.link.is_divided() { self.shared.masters.of(&Keys::tag(affinity, key)) } else { 0 }
    }

    fn resets(&self) -> Option<broadcast::Receiver<Option<Reset>>> {
        Some(self.shared.link.resets())
    }

    fn tend(&self) -> Waiting<()> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            shared.link.admit_deafness();
            if shared.link.is_divided() {
                let mut slots = redis::cmd("CLUSTER");
                shared.masters.learn(&shared.send(slots.arg("SLOTS")).await?);
            }
            Ok(())
        })
    }
}

impl Shared {
    async fn ask(self: &Arc<Self>, batch: &Batch, now: Time) -> Result<Outcomes, StoreError> {
        if self.link.is_divided() && spread::is_spread(batch) {
            if !self.reserve {
                return Err(StoreError::Failed("the keys of the batch lie in several slots of the cluster".into()));
            }
            // Apart, so that those who don't need it don't make room for it.
            return Box::pin(self.ask_in_parts(batch, now)).await;
        }
        self.ask_one(batch, now, RefusalSummary::default()).await
    }

    /// Asks what lies in one place.
    async fn ask_one(
        self: &Arc<Self>,
        batch: &Batch,
        now: Time,
        elsewhere: RefusalSummary,
    ) -> Result<Outcomes, StoreError> {
        let (limits, keys, source) = (&*self.limits, &*self.keys, self.time);
        let question = Question { batch, limits, keys, source, elsewhere };
        if question.is_empty() {
            let at = self.present(now).await?;
            return Ok(tidegate_core::batch::execute(batch, &self.limits, [].as_mut_slice(), at));
        }
        let parts = question.parts();
        let _place = match parts {
            Parts::Quick(code) => match self.turn(code, || question.parcel(now, now)).await? {
                Turn::Alone(place) => place,
                Turn::Told(bytes) => {
                    return self.read(&question, &bytes, now)?.map_err(|Elsewhen(_)| unreadable());
                }
            },
            _ => None,
        };
        let script = self.scripts.get(parts);
        let mut around = match source {
            TimeSource::Store => Time::from_micros(now.as_micros().saturating_add_signed(self.ahead())),
            TimeSource::Caller => now,
        };
        for _ in 0..QUESTIONS {
            let parcel = question.parcel(now, around);
            // Resets are told on a channel.
            let arguments = iter::once(parcel.bytes()).chain(question.resets().then(|| keys.resets()));
            let answer = self.run(script, parcel.names(), arguments).await;
            let Value::BulkString(bytes) = answer.map_err(|error| self.failed(error))? else {
                return Err(StoreError::Failed("the script didn't answer with bytes".into()));
            };
            match self.read(&question, &bytes, now)? {
                Ok(outcomes) => return Ok(outcomes),
                Err(Elsewhen(at)) => around = at,
            }
        }
        Err(StoreError::Failed("the server's clock is never where it was".into()))
    }

    /// Runs a script by its hash, or by its text where the server doesn't know it.
    async fn run<'a>(
        &self,
        script: &Script,
        names: impl Iterator<Item = &'a [u8]> + Clone,
        arguments: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> Result<Value, LinkError> {
        let command = |verb, script| question::command(verb, script, names.clone(), arguments.clone());
        match self.link.send(&command("EVALSHA", &script.hash)).await {
            Err(error) if error.is(ServerErrorKind::NoScript) => self.link.send(&command("EVAL", &script.text)).await,
            answer => answer,
        }
    }

    fn read(&self, question: &Question<'_>, bytes: &[u8], now: Time) -> Result<Result<Outcomes, Elsewhen>, StoreError> {
        let read = question.read(bytes).ok_or_else(unreadable)?;
        let at = read.as_ref().map_or_else(|Elsewhen(at)| *at, Outcomes::now);
        self.note(at, now);
        Ok(read)
    }

    fn ahead(&self) -> i64 {
        self.ahead.load(Ordering::Relaxed)
    }

    fn note(&self, at: Time, now: Time) {
        // Both are below 2^52.
        self.ahead.store(at.as_micros() as i64 - now.as_micros() as i64, Ordering::Relaxed);
    }

    /// The present moment, from a server that is there.
    async fn present(&self, now: Time) -> Result<Time, StoreError> {
        let time = redis::cmd("TIME");
        let Value::Array(parts) = self.send(&time).await? else { return Err(no_time()) };
        let numbers = parts.into_iter().map(redis::from_redis_value::<u64>).collect::<Result<Vec<_>, _>>();
        let Ok(&[seconds, micros]) = numbers.as_deref() else { return Err(no_time()) };
        Ok(match self.time {
            TimeSource::Store => Time::from_micros(seconds.saturating_mul(1_000_000).saturating_add(micros)),
            TimeSource::Caller => now,
        })
    }

    async fn seed(&self, proposal: [u8; 16]) -> Result<[u8; 16], StoreError> {
        let name = self.keys.seed();
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
        self.link.send(command).await.map_err(|error| self.failed(error))
    }

    fn failed(&self, error: LinkError) -> StoreError {
        error.into_store_error(self.patience)
    }
}

fn unreadable() -> StoreError {
    StoreError::Failed("the script's answer can't be read".into())
}

fn no_time() -> StoreError {
    StoreError::Failed("the server doesn't tell the time".into())
}
