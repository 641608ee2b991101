//! The opening of the stores that a policy names.

#[cfg(feature = "outbound")]
use std::collections::HashMap;
use std::sync::Arc;
#[cfg(feature = "outbound")]
use std::sync::Weak;

#[cfg(feature = "outbound")]
use parking_lot::Mutex;
use tidegate_core::{Clock, LimitError, Limits};
#[cfg(feature = "outbound")]
use tidegate_core::{PacerError, PacerSpec};
#[cfg(feature = "remote")]
use tidegate_policy::store::StoreEngine;
#[cfg(feature = "file")]
use tidegate_policy::store::{OnFull, SyncMode};
use tidegate_policy::{KeySeed, Policy, SecretError, StoreConfig, StoreUrl};
use tidegate_store::{AnyStore, Memory, StoreError};
#[cfg(feature = "file")]
use tidegate_store::{FileError, FileStore, FlushMode, Journal};
#[cfg(feature = "remote")]
use tidegate_store::{Fleet, FleetOptions, RemoteStore, fleet_limits};

use crate::Gate;
#[cfg(feature = "outbound")]
use crate::outbound::Outbound;
#[cfg(feature = "outbound")]
use crate::pacer::{Pacer, SharedPace};
use tidegate_runtime::random::{random_bytes, random_u64};

/// The time limit for reading the seed of key hashes from a store when a program starts.
#[cfg(feature = "remote")]
const SEED_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

/// The stores of a policy: in memory, in a file, or on a server that several nodes share. The gate and the providers
/// made from one value share what they can.
pub struct Stores {
    config: StoreConfig,
    seed: KeySeed,
    /// The seed that the server keeps.
    #[cfg(feature = "remote")]
    stored_seed: Option<[u8; 16]>,
    #[cfg(feature = "file")]
    journal: Option<Arc<Journal>>,
    /// The paces in use, by name.
    #[cfg(feature = "outbound")]
    pacers: Mutex<HashMap<String, Weak<SharedPace>>>,
    /// The id of this node among the nodes that share the store.
    #[cfg_attr(not(feature = "remote"), expect(dead_code, reason = "there are no other nodes"))]
    node: u64,
}

impl std::fmt::Debug for Stores {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stores").field("config", &self.config).finish_non_exhaustive()
    }
}

/// The reason that a policy's store can't be used.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// This program was built without the feature that the store needs.
    #[error(
        "store.url is {url}, but this program was built without the feature `{feature}` of the crate `tidegate`, or of `tidegate-cli`"
    )]
    NotBuilt {
        /// The URL, without its secrets.
        url: String,
        /// The missing feature.
        feature: &'static str,
    },
    /// The secret for the hashes of keys can't be read.
    #[error("store.hash_key: {0}")]
    HashKey(#[from] SecretError),
    /// The secret for the hashes of keys is too short.
    #[error("store.hash_key has {found} bytes; at least {} are needed", StoreConfig::MIN_HASH_KEY_BYTES)]
    HashKeyTooShort {
        /// Its length in bytes.
        found: usize,
    },
    /// The URL can't be used.
    #[error("store.url = \"{url}\": {why}")]
    Url {
        /// The URL, without its secrets.
        url: String,
        /// The fault of the URL.
        why: String,
    },
    /// The store didn't return the secret for the hashes of keys.
    #[error(
        "the store {url} can't be reached: {source}; it holds the secret that keys are hashed under, so a node can't start \
         without it unless store.hash_key says that secret"
    )]
    Unreachable {
        /// The URL, without its secrets.
        url: String,
        /// The error of the store.
        source: StoreError,
    },
    /// The file can't be used.
    #[cfg(feature = "file")]
    #[error(transparent)]
    File(#[from] FileError),
    /// A pacer's settings can't be used, or can't be shared.
    #[cfg(feature = "outbound")]
    #[error(transparent)]
    Pacer(#[from] PacerError),
    /// A pacer of this name is already in use in this process, with other settings.
    #[cfg(feature = "outbound")]
    #[error("the pacer {name:?} is in use already, with other settings")]
    PacerSettingsConflict {
        /// The name of the pacer.
        name: String,
    },
    /// A plan has too many limits.
    #[error("a policy whose store is shared has at most 4094 limits: {0}")]
    Limits(#[from] LimitError),
}

/// The message, so that `fn main() -> Result<…>` shows it.
impl std::fmt::Debug for OpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl Stores {
    /// Opens the store of this policy, and resolves secrets (`env:NAME`) with `env`. If the policy doesn't set the
    /// secret for the hashes of keys, it is read from the server. Servers need a tokio runtime with IO and time.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub async fn open(policy: &Policy, env: impl Fn(&str) -> Option<String>) -> Result<Self, OpenError> {
        let config = policy.store().clone();
        let configured_seed = match &config.hash_key {
            None => None,
            Some(source) => match source.resolve(&env)?.expose().as_bytes() {
                secret if secret.len() < StoreConfig::MIN_HASH_KEY_BYTES => {
                    return Err(OpenError::HashKeyTooShort { found: secret.len() });
                }
                secret => Some(KeySeed::from_secret(secret)),
            },
        };
        let mut stores = Self {
            config,
            seed: KeySeed::new(random_bytes()),
            #[cfg(feature = "remote")]
            stored_seed: None,
            #[cfg(feature = "file")]
            journal: None,
            #[cfg(feature = "outbound")]
            pacers: Mutex::default(),
            node: random_u64(),
        };
        stores.seed = match (configured_seed, &stores.config.url) {
            #[cfg(feature = "file")]
            (configured_seed, StoreUrl::File(path)) => {
                let flush = match stores.config.sync {
                    SyncMode::Always => FlushMode::Always,
                    SyncMode::Within(span) => FlushMode::Within(span),
                };
                let on_full = match stores.config.on_full {
                    OnFull::Continue => tidegate_store::OnWriteFailure::Continue,
                    OnFull::Deny => tidegate_store::OnWriteFailure::Deny,
                };
                let journal = Journal::open_with(path, flush, on_full)?;
                let seed = match configured_seed {
                    Some(seed) => seed,
                    None => KeySeed::new(journal.get_or_insert_seed(random_bytes())?),
                };
                stores.journal = Some(journal);
                seed
            }
            #[cfg(feature = "remote")]
            (None, StoreUrl::Server(engine, url)) => {
                let remote = stores.connect_server(*engine, url.expose(), Arc::default())?;
                let url = stores.config.url.to_string();
                let answer = tokio::time::timeout(SEED_TIMEOUT, remote.get_or_insert_seed(random_bytes())).await;
                let answer = answer.unwrap_or(Err(StoreError::Timeout(SEED_TIMEOUT)));
                let stored_seed = answer.map_err(|source| OpenError::Unreachable { url, source })?;
                stores.stored_seed = Some(stored_seed);
                KeySeed::new(stored_seed)
            }
            (Some(seed), _) => seed,
            _ => stores.seed,
        };
        Ok(stores)
    }

    /// A gate for the policy that these stores were opened for.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn gate<C: Clock + Clone>(&self, policy: &Policy, clock: C) -> Result<Gate<AnyStore, C>, OpenError> {
        let plan = Arc::clone(policy.plan());
        let store = self.open_store(plan.limits(), clock.clone())?;
        Ok(Gate::from_parts_counting(plan, store, clock, self.seed.clone(), policy.admin().metrics))
    }

    /// The providers of the policy that these stores were opened for. `None` if it has none. Providers with `shared`
    /// use the store, the others the memory of this process.
    ///
    /// # Errors
    /// See [`OpenError`].
    #[cfg(feature = "outbound")]
    pub fn outbound<C: Clock + Clone>(
        &self,
        policy: &Policy,
        clock: C,
    ) -> Result<Option<Outbound<AnyStore, C>>, OpenError> {
        let Some(plan) = policy.outbound() else { return Ok(None) };
        let open_store = || self.open_store(plan.limits(), clock.clone());
        let local_store = match &self.config.url {
            StoreUrl::File(_) => open_store()?,
            _ => AnyStore::Memory(self.memory(Arc::clone(plan.limits()))),
        };
        // A store that isn't on a server belongs to this process alone, so the local store already serves.
        let is_shared =
            matches!(self.config.url, StoreUrl::Server(..)) && plan.providers().iter().any(|provider| provider.shared);
        let shared_store = is_shared.then(open_store).transpose()?;
        Ok(Some(Outbound::with_stores(plan.clone(), local_store, shared_store, clock, &self.seed)))
    }

    /// A worker of the pace with this name in these stores ([`Pacer`]). In memory, it is shared by all that open it
    /// with this value. In a file, it also survives the process. On a server, it is shared by all processes with
    /// policies that name the same store. Processes should use the same settings for a name, because each steps by its
    /// own settings.
    ///
    /// # Errors
    /// The settings are out of range, or too long to count exactly in every store: a failure at the longest wait must
    /// amount to at most 26 days, see [`SharedPacerRules::new`](tidegate_core::SharedPacerRules::new). Or a pacer of
    /// this name has other settings in this process. Or another case of [`OpenError`].
    #[cfg(feature = "outbound")]
    pub fn pacer<C: Clock + Clone>(&self, spec: PacerSpec, name: &str, clock: C) -> Result<Pacer<C>, OpenError> {
        let mut pacers = self.pacers.lock();
        pacers.retain(|_, pace| pace.strong_count() > 0);
        if let Some(pace) = pacers.get(name).and_then(Weak::upgrade) {
            if !pace.has_spec(spec)? {
                return Err(OpenError::PacerSettingsConflict { name: name.to_owned() });
            }
            return Ok(Pacer::from_shared(pace, clock));
        }
        let open = |limits: Limits| self.open_store(&limits, clock.clone());
        let pace = Arc::new(SharedPace::open(spec, name, &self.seed, clock.clone(), open)?);
        pacers.insert(name.to_owned(), Arc::downgrade(&pace));
        Ok(Pacer::from_shared(pace, clock))
    }

    fn memory(&self, limits: Arc<Limits>) -> Memory {
        Memory::new(limits, self.max_bytes())
    }

    fn max_bytes(&self) -> usize {
        usize::try_from(self.config.max_bytes).unwrap_or(usize::MAX)
    }

    /// Opens the store that the policy names, for these limits.
    #[cfg_attr(
        not(any(feature = "file", feature = "remote")),
        expect(unused_variables, reason = "nothing here needs the time")
    )]
    fn open_store(&self, limits: &Limits, clock: impl Clock) -> Result<AnyStore, OpenError> {
        match &self.config.url {
            #[cfg(feature = "remote")]
            StoreUrl::Server(engine, url) => {
                let remote = self.connect_server(*engine, url.expose(), Arc::new(fleet_limits(limits)?))?;
                let mut options = FleetOptions::new(self.node);
                options.seed = self.stored_seed;
                options.timeout = self.config.timeout;
                options.nodes = self.config.nodes;
                options.max_bytes = self.max_bytes();
                options.name = self.config.url.to_string();
                Ok(AnyStore::Fleet(Fleet::start(remote, clock, options)))
            }
            #[cfg(feature = "file")]
            StoreUrl::File(_) => {
                let journal = self.journal.as_ref().expect("invariant: the file was opened with these stores");
                let store = FileStore::new(Arc::new(limits.clone()), self.max_bytes(), journal, clock.now())?;
                Ok(AnyStore::File(store))
            }
            #[cfg(not(feature = "file"))]
            StoreUrl::File(_) => Err(self.missing_feature("file")),
            #[cfg(not(feature = "remote"))]
            StoreUrl::Server(engine, _) => Err(self.missing_feature(engine.feature())),
            _ => Ok(AnyStore::Memory(self.memory(Arc::new(limits.clone())))),
        }
    }

    /// Connects to the server that the policy names.
    #[cfg(feature = "remote")]
    #[cfg_attr(
        not(any(feature = "mongodb", feature = "mysql", feature = "postgres", feature = "redis")),
        expect(unused_variables, reason = "there is no server to be reached")
    )]
    fn connect_server(
        &self,
        engine: StoreEngine,
        url: &str,
        limits: Arc<Limits>,
    ) -> Result<Box<dyn RemoteStore>, OpenError> {
        #[cfg(any(feature = "mysql", feature = "postgres", feature = "mongodb"))]
        let rows_options = || {
            let mut options = tidegate_store::DatabaseOptions::new(url);
            options.prefix = format!("{}_", self.config.prefix);
            options
        };
        match engine {
            #[cfg(feature = "redis")]
            StoreEngine::Redis | StoreEngine::RedisCluster => {
                let mut options = tidegate_store::RedisOptions::new(url);
                options.prefix = format!("{}:", self.config.prefix);
                options.reserve = self.config.cluster == tidegate_policy::store::ClusterMode::Reserve;
                self.boxed(tidegate_store::Redis::new(options, limits))
            }
            #[cfg(feature = "mysql")]
            StoreEngine::MySql => self.boxed(tidegate_store::MySql::new(limits, &rows_options())),
            #[cfg(feature = "postgres")]
            StoreEngine::Postgres => self.boxed(tidegate_store::Postgres::new(limits, &rows_options())),
            #[cfg(feature = "mongodb")]
            StoreEngine::MongoDb => self.boxed(tidegate_store::MongoDb::new(limits, &rows_options())),
            #[allow(unreachable_patterns, reason = "a build with all of them misses none")]
            engine => Err(self.missing_feature(engine.feature())),
        }
    }

    #[cfg(feature = "remote")]
    #[allow(dead_code, reason = "a build may have no engine")]
    fn boxed<R: RemoteStore + 'static, E: std::fmt::Display>(
        &self,
        store: Result<R, E>,
    ) -> Result<Box<dyn RemoteStore>, OpenError> {
        let unusable = |error: E| OpenError::Url { url: self.config.url.to_string(), why: error.to_string() };
        Ok(Box::new(store.map_err(unusable)?))
    }

    #[allow(dead_code, reason = "nothing is missing where all features are there")]
    fn missing_feature(&self, feature: &'static str) -> OpenError {
        OpenError::NotBuilt { url: self.config.url.to_string(), feature }
    }
}
