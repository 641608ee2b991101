//! `[store]`: the place of counts, and the behaviour while it can't be reached.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tidegate_core::{OnOutage, Span};

use crate::host::is_host;
use crate::secret::{Secret, SecretSource};

/// `[store]`, checked and with every default filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreConfig {
    /// The engine that keeps counts. Default `memory`.
    pub url: StoreUrl,
    /// The most memory for counts, in bytes: all counts in memory or a file; for a shared store, the counts that a node
    /// keeps while the store can't be reached. Default 64 MiB; 64 KiB to 16 TiB.
    pub max_bytes: u64,
    /// The behaviour while the store can't be reached, where an action sets none of its own. Default
    /// [`OnOutage::Local`]. Memory has no outages; for files, see `on_full`.
    pub on_outage: OnOutage,
    /// The time that a decision waits for a shared store. Default 50 ms.
    pub timeout: Duration,
    /// The prefix of all names in a shared store. Default `tidegate`. 1 to 32 lowercase letters, digits and
    /// underscores, without a digit at the start.
    pub prefix: String,
    /// The secret under which keys are hashed in a store that outlives the process: 16 bytes or more. By default it is
    /// a random one that is kept in the store itself. The store must then be available when a node starts.
    pub hash_key: Option<SecretSource>,
    /// The number of nodes that share the store, until the store itself reports it. Default 1; 1 to 4096.
    pub nodes: u32,
    /// The name of this node in the list of nodes that share the store: 1 to 64 letters, digits and `.`, `_`, `:`, `/`,
    /// `-`. By default its host name and the number of its process.
    pub node_name: Option<String>,
    /// The time for which a node that has fallen silent stays in the list of nodes. Default 10 minutes; 2 seconds to a
    /// day.
    pub node_expiry: Span,
    /// The time at which a file is written. Default: 100 ms after a change at the latest.
    pub sync: SyncMode,
    /// The behaviour while a file can't be written. Default: [`OnFull::Deny`] with [`SyncMode::Always`], else
    /// [`OnFull::Continue`].
    pub on_full: OnFull,
    /// The method for decisions about several keys in a Redis cluster. Default [`ClusterMode::Together`].
    pub cluster: ClusterMode,
}

impl StoreConfig {
    /// The length that the value of [`hash_key`](Self::hash_key) has at least, in bytes.
    pub const MIN_HASH_KEY_BYTES: usize = 16;

    /// Returns true if the keys of each decision must be kept together.
    pub(crate) fn keeps_keys_together(&self) -> bool {
        matches!(self.url, StoreUrl::Server(StoreEngine::RedisCluster, _)) && self.cluster == ClusterMode::Together
    }
}

/// The engine that keeps counts.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreUrl {
    /// The memory of this process.
    Memory,
    /// `file:PATH`: the memory of this process, and a file that outlives it.
    File(PathBuf),
    /// A server that several nodes share, with its whole URL, which may hold a password.
    Server(StoreEngine, Secret),
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for StoreUrl {
    /// Writes a server's kind, hosts and ports, such as `redis://127.0.0.1:6379`, and leaves out all that could be a
    /// secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Server(_, url) => {
                let (scheme, rest) = url.expose().split_once("://").unwrap_or_default();
                write!(f, "{scheme}://{}", addresses(scheme, rest).as_deref().unwrap_or("…"))
            }
        }
    }
}

/// The hosts and ports of a URL. `None` if they can't be told from a log-in with certainty, as when a password has a
/// slash that isn't escaped.
fn addresses(scheme: &str, rest: &str) -> Option<String> {
    let default_port = match scheme {
        "redis-sentinel" | "rediss-sentinel" => 26379,
        "mysql" | "mariadb" => 3306,
        "postgres" | "postgresql" => 5432,
        "mongodb" => 27017,
        _ => 6379,
    };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let hosts = authority.rsplit_once('@').map_or(authority, |(_, hosts)| hosts);
    let address = |host: &str| {
        let has_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
        let is_certain = !path.contains('@') && !host.is_empty() && is_host(host.as_bytes());
        is_certain.then(|| if has_port { host.to_owned() } else { format!("{host}:{default_port}") })
    };
    let addresses: Option<Vec<String>> = hosts.split(',').map(address).collect();
    addresses.map(|addresses| addresses.join(","))
}

/// A server that several nodes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreEngine {
    /// `redis://`, `redis-sentinel://`, and over TLS `rediss://`, `rediss-sentinel://`: Redis from 6.2, Valkey and
    /// compatible servers.
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

/// The schemes of URLs and their engines.
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

/// The time at which a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncMode {
    /// `sync = "always"`: before a decision is returned. A crash loses nothing.
    Always,
    /// `sync = "100ms"`: at most this long after a change. A crash loses the changes since the last write.
    Within(Duration),
}

/// The behaviour while a file can't be written, as on a full disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFull {
    /// `on_full = "continue"`: decisions continue in memory. A crash then loses the changes since the last write.
    Continue,
    /// `on_full = "deny"`: a decision that would change a count is refused, as if the store couldn't be reached.
    Deny,
}

/// The method for decisions about several keys in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterMode {
    /// The limits of each decision have a key part in common, which keeps their keys on one server.
    Together,
    /// `cluster = "reserve"`: each key is kept on any server. A decision takes one key after the other, and gives back
    /// the taken ones if a later one refuses. It may admit too little, but never too much.
    Reserve,
}
