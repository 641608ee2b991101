//! `[outbound]`: other people's APIs, and the rules for calling them.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue, StatusCode};
use tidegate_core::call::{CallRules, Measure, ProviderLimit, ProviderState};
use tidegate_core::{
    AdaptiveLimit, AdaptiveLimitSpec, AdaptiveRate, AdaptiveRateSpec, Balance, Breaker, BreakerSpec, CredentialPool,
    LimitId, LimitKind, Limits, LocalPacer, MAX_COST, PacerSpec, Time,
};

use crate::key::KeySeed;
use crate::nearest::nearest;
use crate::quantity::Quantity;
use crate::secret::{Secret, SecretSource};

mod description;
mod hours;
pub(crate) mod preset;

pub use hours::HoursOfDay;
pub use preset::preset_names;

/// `[outbound]`: the gateway to other people's APIs, and what is known of each.
///
/// Its limits are a table of their own, apart from the [`Plan`](crate::Plan)'s: they are counted in a store of their
/// own, so that a flood of strangers can't push a credential's cool-down out.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OutboundConfig {
    /// Where the gateway listens; `None` for `listen = "off"`. Default 127.0.0.1:8081.
    pub listen: Option<SocketAddr>,
    /// The bearer token callers must show, in `Proxy-Authorization` or `Tidegate-Token`. Required beyond loopback.
    pub token: Option<SecretSource>,
    /// Names that a request's `Host` may have besides loopback's and the listener's own address. A name that isn't
    /// among them is refused, so that a web page can't reach the gateway by a name that it makes resolve to loopback.
    pub hosts: Vec<String>,
    /// The number of callers' connections that the gateway takes at once. At the bound a new one displaces an idle one, or
    /// waits. Default 1024.
    pub connections: usize,
    /// The number of them that one address may have (IPv6: one network of `inbound.ipv6_prefix`); `None` for `"off"`. Default a quarter. Loopback and the
    /// proxies that `inbound.trusted_proxies` names are not counted.
    pub connections_per_client: Option<usize>,
    /// The most bytes that cached replies of all providers may take. Default 64 MiB.
    pub cache_bytes: u64,
    /// The file that spent quotas and cool-downs outlive the process in; `None` for `snapshot = "off"`, the default.
    pub snapshot: Option<PathBuf>,
    pub(crate) providers: Vec<ProviderConfig>,
    pub(crate) limits: Arc<Limits>,
    pub(crate) limit_infos: Vec<OutboundLimitInfo>,
}

impl OutboundConfig {
    /// Every provider, in file order.
    pub fn providers(&self) -> &[ProviderConfig] {
        &self.providers
    }

    /// The provider of this name.
    ///
    /// # Errors
    /// There is none; the nearest name is told.
    pub fn find(&self, name: &str) -> Result<&ProviderConfig, UnknownProviderError> {
        self.providers.iter().find(|provider| provider.name == name).ok_or_else(|| UnknownProviderError {
            found: name.chars().take(128).collect(),
            nearest: nearest(name, self.providers.iter().map(|provider| provider.name.as_str())).map(str::to_owned),
        })
    }

    /// The limits of all providers.
    pub fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    /// What is known of a limit.
    ///
    /// # Panics
    /// If the id is another plan's and this one has fewer limits.
    pub fn limit_info(&self, limit: LimitId) -> &OutboundLimitInfo {
        &self.limit_infos[limit.index()]
    }
}

/// A provider that the policy doesn't have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown provider {found:?}{}", nearest.as_ref().map(|name| format!("; did you mean {name:?}?")).unwrap_or_default())]
pub struct UnknownProviderError {
    /// What was asked for, cut to 128 characters.
    pub found: String,
    /// The most similar name that exists, if any is similar.
    pub nearest: Option<String>,
}

/// What is known of a provider's limit besides its arithmetic.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OutboundLimitInfo {
    /// What errors and `explain` call it: `tmdb`, `tmdb.cost`, `tmdb.credential`, `tmdb.credential.cost`,
    /// `tmdb.background`, `tmdb.cooldown`; where one of them has several limits, each with its number: `tmdb.2`.
    pub name: String,
    /// The quantity as written; `None` for a cool-down.
    pub quantity: Option<Quantity>,
    /// The limit in words with its true bound.
    pub description: String,
    /// Whether each credential has its own, even where only one is there to have it.
    pub per_credential: bool,
}

/// Somebody else's API.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProviderConfig {
    /// Its name in the file: the first segment of paths that mean it.
    pub name: String,
    /// The preset it was made from.
    pub preset: Option<String>,
    /// Where it is; `None` if only Rust programs call it, with URLs of their own.
    pub base_url: Option<BaseUrl>,
    /// Where a credential goes in a request.
    pub auth: Auth,
    /// Its credentials; none means one that is anonymous. A limit of a credential that is alone is among the limits of all
    /// calls in its [`rules`](Self::rules).
    pub credentials: Vec<SecretSource>,
    /// How calls are spread over them.
    pub balance: Balance,
    /// How a credential becomes a token that the provider takes.
    pub login: Option<Login>,
    /// What `User-Agent` says, whatever the caller's says.
    pub user_agent: Option<HeaderValue>,
    /// When the provider isn't called any more; `None` for `breaker = "off"`.
    pub breaker: Option<BreakerSpec>,
    /// How the number of calls that it bears at a time is found out; `None` for `adaptive = "off"`.
    pub adaptive_limit: Option<AdaptiveLimitSpec>,
    /// How long connecting to it may take. Default 5 s.
    pub connect_timeout: Duration,
    /// How long one attempt may take until the head of its reply, counted from when the last of the request's body moved;
    /// and how long nothing of it may come from the caller. The gateway passes on no reply that pauses for longer. Default
    /// 30 s.
    pub attempt_timeout: Duration,
    /// The longest request body that is kept for another attempt, in bytes. Default 64 KiB.
    pub replay_bytes: usize,
    /// What is kept of its replies; nothing by default.
    pub cache: Option<CacheRules>,
    /// Replies whose body says that there were too many calls, although their status doesn't.
    pub throttled_when: Option<BodyRule>,
    /// After how long without the head of a reply a second request is sent beside the first, shorter than
    /// [`attempt_timeout`](Self::attempt_timeout); the first good reply of both is the call's. Only where twice does no harm,
    /// at most once an attempt, and only if limits, breaker and the retry budget grant it at once. Never by default.
    pub hedge_after: Option<Duration>,
    /// Whether it takes one call at a time, first come, first served: every call goes into the same lane.
    pub sequential: bool,
    /// Whether its limits, credentials and breaker are kept in the store that several nodes share. Default false: each
    /// node counts for itself.
    pub shared: bool,
    /// When background calls run; always if `None`.
    pub hours: Option<HoursOfDay>,
    /// What a call costs where a limit counts more than calls.
    pub cost: Option<CostRules>,
    /// How the pace is found. Default as the limits say.
    pub pace: PaceConfig,
    /// Everything that the machine needs, but for the keys, which depend on the seed: [`ProviderConfig::rules`] fills them in.
    pub(crate) rules_without_keys: CallRules,
}

impl ProviderConfig {
    /// The rules that the machine runs, with the keys that this seed makes.
    pub fn rules(&self, seed: &KeySeed) -> CallRules {
        let mut rules = self.rules_without_keys.clone();
        rules.key = seed.provider_key(&self.name);
        rules.credential_keys =
            (0..self.credentials.len().max(1)).map(|index| seed.credential_key(&self.name, index)).collect();
        rules
    }

    /// The desk that calls by these [`rules`](Self::rules) share, in production and in simulations alike.
    ///
    /// # Panics
    /// If the rules are another provider's, or something was written by hand that reading a policy refuses.
    pub fn new_state(&self, rules: &CallRules) -> ProviderState {
        let pool = CredentialPool::new(self.balance, rules.credential_keys.len());
        let pool = pool.expect("invariant: reading the policy bounds the credentials");
        let breaker = self.breaker.clone().map_or_else(Breaker::disabled, |spec| {
            Breaker::new(spec).expect("invariant: reading the policy checks the breaker")
        });
        let inflight =
            self.adaptive_limit.map(|spec| AdaptiveLimit::new(spec).expect("invariant: reading the policy checks it"));
        let mut desk = ProviderState::new(rules, pool, breaker, inflight);
        desk.pace = self.pace.build();
        desk.store_requests.set_affinity(rules.key.lo().max(1));
        desk
    }

    /// The most that one call may cost for all of its limits to have room for it at some time. `limits` are the
    /// [`OutboundConfig::limits`] that it is of.
    pub fn max_cost(&self, limits: &Limits) -> u64 {
        let ceilings = self.ceilings().filter(|ceiling| ceiling.measure == Measure::Cost);
        let capacities = ceilings.filter_map(|ceiling| Some(limits.get(ceiling.limit)?.kind().capacity()));
        capacities.min().unwrap_or(MAX_COST)
    }

    /// When the first of its calendar quotas begins anew; `None` if it has none. `limits` are the
    /// [`OutboundConfig::limits`] that it is of.
    pub fn next_quota_end(&self, limits: &Limits, now: Time) -> Option<Time> {
        let ends = self.ceilings().filter_map(|ceiling| match limits.get(ceiling.limit)?.kind() {
            LimitKind::Quota(quota) => Some(quota.period(now).end),
            _ => None,
        });
        ends.min()
    }

    fn ceilings(&self) -> impl Iterator<Item = &ProviderLimit> {
        let of_lanes = self.rules_without_keys.lane_limits.iter().flatten();
        self.rules_without_keys.provider_limits.iter().chain(&self.rules_without_keys.credential_limits).chain(of_lanes)
    }
}

/// The root of an API: scheme, authority, and a path that every request's path is put behind.
#[derive(Clone, PartialEq, Eq)]
pub struct BaseUrl {
    pub(crate) https: bool,
    pub(crate) authority: http::uri::Authority,
    pub(crate) path: String,
}

impl BaseUrl {
    /// The root at this host and path; slashes at the path's end don't count.
    pub fn new(https: bool, authority: http::uri::Authority, path: &str) -> Self {
        let path = path.trim_matches('/');
        let path = if path.is_empty() { String::new() } else { format!("/{path}") };
        Self { https, authority, path }
    }

    /// Whether requests go through TLS.
    pub fn is_https(&self) -> bool {
        self.https
    }

    /// Host and port, as `Host` has them.
    pub fn authority(&self) -> &http::uri::Authority {
        &self.authority
    }

    /// Whether requests to it cross a network unencrypted: neither to this machine nor, as far as an address can tell, to a
    /// private network.
    pub fn is_unencrypted_remote(&self) -> bool {
        let host = self.authority.host();
        let is_near = match host.trim_matches(['[', ']']).parse::<IpAddr>().map(|ip| ip.to_canonical()) {
            Ok(IpAddr::V4(ip)) => ip.is_loopback() || ip.is_private() || ip.is_link_local(),
            Ok(IpAddr::V6(ip)) => ip.is_loopback() || ip.is_unique_local() || ip.is_unicast_link_local(),
            Err(_) => host == "localhost" || !host.contains('.'),
        };
        !self.https && !is_near
    }

    /// Whether it is on this machine, by name or address.
    pub fn is_loopback(&self) -> bool {
        let host = self.authority.host();
        let ip = host.trim_matches(['[', ']']).parse::<IpAddr>();
        host == "localhost" || ip.is_ok_and(|ip| ip.to_canonical().is_loopback())
    }

    /// The path before every request's, without a slash at its end; it may be empty. Where [`Auth::Path`] puts a
    /// credential in, `{key}` stands in its place.
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", if self.https { "https" } else { "http" }, self.authority, self.path)
    }
}

impl fmt::Debug for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Where a credential goes in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Auth {
    /// Nowhere.
    None,
    /// `Authorization: Bearer …`.
    Bearer,
    /// A header of this name, such as `x-api-key`; `prefix` comes before the credential.
    Header {
        /// The header.
        name: HeaderName,
        /// What comes before the credential, such as `Token `.
        prefix: String,
    },
    /// A query parameter of this name. A parameter of the same name that the caller sent is dropped.
    Query {
        /// The parameter.
        name: String,
    },
    /// The `{key}` in the base URL's path.
    Path,
}

/// How a credential becomes a token: `POST` of a JSON body, whose reply holds the token.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Login {
    /// The path behind the base URL; with [`Auth::Path`], behind what of it comes before the credential's segment.
    pub path: String,
    /// The JSON body; each string `{credential}` in it is replaced by the credential, and `{NAME}` by the secret of
    /// that name in `secrets`.
    pub body: String,
    /// Further secrets of the body, by name.
    pub secrets: Vec<(String, SecretSource)>,
    /// Where the token is in the reply (RFC 6901). Default `/token`.
    pub pointer: String,
    /// How long a token is good.
    pub lifetime: Duration,
    /// How long before its end it is renewed.
    pub refresh_before: Duration,
}

impl Login {
    /// A login by this body, with the token at `/token`. It is renewed a tenth of its lifetime before its end.
    pub fn new(path: impl Into<String>, body: impl Into<String>, lifetime: Duration) -> Self {
        Self {
            path: path.into(),
            body: body.into(),
            secrets: Vec::new(),
            pointer: "/token".to_owned(),
            lifetime,
            refresh_before: lifetime / 10,
        }
    }

    /// The body with its secrets filled in, each as the inside of a JSON string.
    pub fn fill_body(&self, credential: &Secret, named: &[(String, Secret)]) -> Secret {
        let escape = |secret: &Secret| {
            secret.expose().chars().fold(String::new(), |mut text, char| {
                match char {
                    '"' => text.push_str("\\\""),
                    '\\' => text.push_str("\\\\"),
                    control if control < ' ' => text.push_str(&format!("\\u{:04x}", u32::from(control))),
                    other => text.push(other),
                }
                text
            })
        };
        // One pass, so that a secret that looks like a placeholder stays what it is.
        let (mut text, mut rest) = (String::new(), self.body.as_str());
        while let Some(start) = rest.find('{') {
            let (before, from) = rest.split_at(start);
            text.push_str(before);
            let name = from[1..].split_once('}').map(|(name, _)| name);
            let secret = name.and_then(|name| match name {
                "credential" => Some(credential),
                name => named.iter().find(|(other, _)| other == name).map(|(_, secret)| secret),
            });
            match (name, secret) {
                (Some(name), Some(secret)) => {
                    text.push_str(&escape(secret));
                    rest = &from[name.len() + 2..];
                }
                _ => {
                    text.push('{');
                    rest = &from[1..];
                }
            }
        }
        text.push_str(rest);
        Secret::new(text)
    }
}

/// What is kept of a provider's replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheRules {
    /// How long successful replies are fresh, whatever their headers say but `no-store`, and `private` if `shared`;
    /// [`Duration::MAX`] for ever. As HTTP says if `None`.
    pub ttl: Option<Duration>,
    /// Whether replies are shared between credentials. Default false.
    pub shared: bool,
    /// For how long after its freshness a reply may stand in while the provider is unavailable. Default zero: never.
    pub stale: Duration,
    /// The longest body that is kept, in bytes. Default 1 MiB.
    pub max_body: usize,
}

impl Default for CacheRules {
    /// What HTTP says, for each credential apart, up to 1 MiB, and never longer than fresh.
    fn default() -> Self {
        Self { ttl: None, shared: false, stale: Duration::ZERO, max_body: 1 << 20 }
    }
}

/// Replies whose JSON body says that there were too many calls.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BodyRule {
    /// The statuses that they may have.
    pub statuses: Vec<u16>,
    /// JSON pointers (RFC 6901) and what the strings there must contain, in any case; all must.
    pub contains: Vec<(String, String)>,
    /// Whether the credential then has nothing left until the quota's period ends.
    pub spends_quota: bool,
}

impl BodyRule {
    /// Replies of this status whose body contains all of this.
    pub fn new(status: u16, contains: Vec<(String, String)>) -> Self {
        Self { statuses: vec![status], contains, spends_quota: false }
    }

    /// Whether replies of this status have such a body.
    pub fn matches_status(&self, status: StatusCode) -> bool {
        self.statuses.contains(&status.as_u16())
    }
}

/// JSON pointers (RFC 6901) to one number that may be in several places; the first that is there counts.
pub type PointerAlternatives = Vec<String>;

/// What a call costs where a limit counts tokens or points.
///
/// What is reserved is never more than the limits ever have room for: it is an estimate, and must not keep a call from
/// being sent that may turn out to fit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CostRules {
    /// What is reserved before the reply for a call that doesn't say: a fixed number.
    pub reserve: u64,
    /// Where a JSON request body has the number that is reserved besides, such as `/max_tokens`. Only bodies that are
    /// kept for another attempt are looked into.
    pub request: PointerAlternatives,
    /// Bytes of the request body for one unit besides; 0 for none. A token of a language model is about 4 bytes.
    pub bytes_per_unit: u64,
    /// Where the reply has the numbers that, added up, are what it cost, such as `/usage/total_tokens`. Of a stream of
    /// events, the last that is found of each counts.
    pub reply: Vec<PointerAlternatives>,
}

impl CostRules {
    /// A fixed number for every call, up to 2^40.
    pub fn new(reserve: u64) -> Self {
        Self { reserve, request: Vec::new(), bytes_per_unit: 0, reply: Vec::new() }
    }
}

/// How the pace of calls is found. Below the limits always: they hold besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PaceConfig {
    /// As the limits say.
    #[default]
    Limits,
    /// By a wait between calls that grows when one is throttled and shrinks when they succeed.
    Responsive(PacerSpec),
    /// By a rate that is looked for, with about one call in a hundred throttled in the long run, and up to two where replies
    /// take two seconds.
    Adaptive(AdaptiveRateSpec),
}

impl PaceConfig {
    /// What finds it, fresh; `None` where the limits alone say it.
    ///
    /// # Panics
    /// If a spec was made by hand that no machine runs by.
    pub fn build(&self) -> Option<tidegate_core::Pace> {
        match self {
            Self::Limits => None,
            Self::Responsive(spec) => {
                Some(LocalPacer::new(*spec).expect("invariant: reading the policy checks the pace").into())
            }
            Self::Adaptive(spec) => {
                Some(AdaptiveRate::new(*spec).expect("invariant: reading the policy checks the pace").into())
            }
        }
    }
}
