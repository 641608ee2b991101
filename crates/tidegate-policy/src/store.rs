//! `[store]`: where counts live, and what holds while they can't be reached.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tidegate_core::OnOutage;

use crate::secret::{Secret, SecretSource};

/// `[store]`, checked and with every default filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreConfig {
    /// Which engine. Default `memory`.
    pub url: StoreUrl,
    /// The most memory that counts may take, in bytes: all of them in memory or a file; of a shared store, those that
    /// a node goes on with while it can't be reached. Default 64 MiB; at least 64 KiB.
    pub max_bytes: u64,
    /// What holds while the store can't be reached, where an action doesn't say otherwise. Default
    /// [`OnOutage::Local`]. Memory has no outages; for files, see `on_full`.
    pub on_outage: OnOutage,
    /// How long a decision waits for a shared store. Default 50 ms.
    pub timeout: Duration,
    /// What the names of everything in a shared store begin with. Default `tidegate`. Small letters, digits and
    /// underscores, at most 32.
    pub prefix: String,
    /// The secret that keys are hashed under in a store that outlives the process: 16 bytes or more. By default a
    /// random one that is kept in the store itself, which then must be there when a node starts.
    pub hash_key: Option<SecretSource>,
    /// How many nodes share the store until it has told by itself. Default 1.
    pub nodes: u32,
    /// When a file is written. Default: 100 ms after a change at the latest.
    pub sync: SyncMode,
    /// The behaviour while a file can't be written. Default: [`OnFull::Deny`] with [`SyncMode::Always`], else
    /// [`OnFull::Continue`].
    pub on_full: OnFull,
    /// How decisions about several keys are made in a Redis cluster. Default [`ClusterMode::Together`].
    pub cluster: ClusterMode,
}

impl StoreConfig {
    /// Whether the keys of each decision have to be kept together.
    pub(crate) fn keeps_keys_together(&self) -> bool {
        matches!(self.url, StoreUrl::Server(StoreEngine::RedisCluster, _)) && self.cluster == ClusterMode::Together
    }
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            url: StoreUrl::Memory,
            max_bytes: 64 << 20,
            on_outage: OnOutage::Local,
            timeout: Duration::from_millis(50),
            prefix: "tidegate".to_owned(),
            hash_key: None,
            nodes: 1,
            sync: SyncMode::Within(Duration::from_millis(100)),
            on_full: OnFull::Continue,
            cluster: ClusterMode::Together,
        }
    }
}

/// The engine that keeps counts.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreUrl {
    /// This process's memory.
    Memory,
    /// `file:PATH`: this process's memory, and a file that outlives it.
    File(PathBuf),
    /// A server that several nodes share, with the whole URL, which may hold a password.
    Server(StoreEngine, Secret),
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for StoreUrl {
    /// Without whatever could be a secret: `redis://…`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Server(_, url) => write!(f, "{}://…", url.expose().split(':').next().unwrap_or_default()),
        }
    }
}

/// A server that several nodes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreEngine {
    /// `redis://`, `redis-sentinel://`, and over TLS `rediss://`, `rediss-sentinel://`: Redis from 6.2, Valkey, and
    /// servers like them.
    Redis,
    /// `redis-cluster://`, `rediss-cluster://`.
    RedisCluster,
    /// `mysql://`, `mariadb://`: MySQL from 8, MariaDB from 10.6.
    MySql,
    /// `postgres://`, `postgresql://`: from 12.
    Postgres,
    /// `mongodb://`.
    MongoDb,
}

impl StoreEngine {
    /// The Cargo feature that a program needs for it.
    pub fn feature(self) -> &'static str {
        match self {
            Self::Redis | Self::RedisCluster => "redis",
            Self::MySql => "mysql",
            Self::Postgres => "postgres",
            Self::MongoDb => "mongodb",
        }
    }
}

/// The schemes of URLs, and what they mean.
pub(crate) const URL_SCHEMES: [(&str, StoreEngine); 11] = [
    ("redis", StoreEngine::Redis),
    ("rediss", StoreEngine::Redis),
    ("redis-sentinel", StoreEngine::Redis),
    ("rediss-sentinel", StoreEngine::Redis),
    ("redis-cluster", StoreEngine::RedisCluster),
    ("rediss-cluster", StoreEngine::RedisCluster),
    ("mysql", StoreEngine::MySql),
    ("mariadb", StoreEngine::MySql),
    ("postgres", StoreEngine::Postgres),
    ("postgresql", StoreEngine::Postgres),
    ("mongodb", StoreEngine::MongoDb),
];

/// When a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncMode {
    /// `sync = "always"`: before a decision is told. Nothing is lost in a crash.
    Always,
    /// `sync = "100ms"`: this long after a change at the latest. A crash loses what changed since.
    Within(Duration),
}

/// The behaviour while a file can't be written, as on a full disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFull {
    /// `on_full = "continue"`: decisions go on in memory. A crash then loses what changed since.
    Continue,
    /// `on_full = "deny"`: what would change something is refused as by a store that can't be reached.
    Deny,
}

/// How decisions about several keys are made in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterMode {
    /// The limits of each decision have a key part in common, by which their keys are kept on one server.
    Together,
    /// `cluster = "reserve"`: each key is kept anywhere. A decision takes one after the other and gives back what it
    /// took when a later one refuses: it may let too little through, and never too much.
    Reserve,
}
