//! `[outbound]`: the providers, and the rules for calling them.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use tidegate_core::call::{CallRules, Measure, ProviderLimit, ProviderState};
use tidegate_core::{
    AdaptiveLimit, AdaptiveLimitSpec, AdaptiveRate, AdaptiveRateSpec, Balance, Breaker, BreakerSpec, CredentialPool,
    LimitId, LimitKind, Limits, LocalPacer, MAX_COST, PacerSpec, Time,
};

use crate::address::canonical_ip;
use crate::key::KeySeed;
use crate::listen::ListenConfig;
use crate::nearest::nearest;
use crate::quantity::Quantity;
use crate::secret::{Secret, SecretSource};
use crate::verdict::VerdictRules;

mod description;
mod hours;
pub(crate) mod preset;

pub use hours::HoursOfDay;
pub use preset::preset_names;

/// The invariant of settings that make the state of a provider.
const CHECKED: &str = "invariant: reading the policy checks its settings";

/// `[outbound]`: the gateway to the APIs of other services, and the settings of each.
///
/// Its limits are apart from those of the [`Plan`](crate::Plan). They are counted in a store of their own, so that a
/// flood of unknown clients can't evict the cool-down of a credential.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OutboundConfig {
    /// The addresses on which the gateway listens; none for `listen = "off"`. Default 127.0.0.1:8081.
    pub listen: ListenConfig,
    /// The bearer token that callers must send, in `Proxy-Authorization` or `Tidegate-Token`. Required if the
    /// gateway listens beyond loopback.
    pub token: Option<SecretSource>,
    /// Names that a request's `Host` may have besides those of loopback and the listener's own address. Any other name
    /// is refused, so that a web page can't reach the gateway by a name that it makes resolve to loopback.
    pub hosts: Vec<String>,
    /// The most connections of callers that the gateway holds at once. At the bound, a new one displaces an idle one,
    /// or waits. Default 1024.
    pub connections: usize,
    /// The most of them that one address may have (IPv6: one network of `inbound.ipv6_prefix`); `None` for `"off"`.
    /// Default: a quarter. Loopback and the proxies in `inbound.trusted_proxies` aren't counted.
    pub connections_per_client: Option<usize>,
    /// The most bytes that cached replies of all providers may take. Default 64 MiB.
    pub cache_bytes: u64,
    /// The file that keeps spent quotas and cool-downs over a restart; `None` for `snapshot = "off"`, the default.
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

    /// The providers that a server's gateway passes calls to: those with a base URL, and none if it doesn't listen.
    pub fn served_providers(&self) -> impl Iterator<Item = &ProviderConfig> {
        let is_off = self.listen.is_off();
        self.providers.iter().filter(move |provider| !is_off && provider.base_url.is_some())
    }

    /// The provider of this name.
    ///
    /// # Errors
    /// If there is none; the error has the nearest name.
    pub fn find(&self, name: &str) -> Result<&ProviderConfig, UnknownProviderError> {
        self.providers.iter().find(|provider| provider.name == name).ok_or_else(|| UnknownProviderError {
            found: name.chars().take(128).collect(),
            nearest: nearest(name, self.providers.iter().map(|provider| provider.name.as_str())).map(str::to_owned),
        })
    }

    /// True if each limit of an earlier policy has the same id here.
    pub fn has_ids_of(&self, earlier: &Self) -> bool {
        earlier.limit_infos.len() <= self.limit_infos.len()
            && earlier.limit_infos.iter().zip(&self.limit_infos).all(|(earlier, own)| earlier.name == own.name)
    }

    /// True if a provider of the [earlier policy](crate::Policy::load_next) is the same in this one, with its limits.
    pub fn has_unchanged(&self, provider: &ProviderConfig, earlier: &Self) -> bool {
        // Equal rules have the same ids of limits.
        let is_same_limit = |id| self.limit_info(id) == earlier.limit_info(id);
        let limits = provider.all_provider_limits().map(|own| own.limit).chain([provider.rules_without_keys.cooldown]);
        self.providers.contains(provider) && limits.into_iter().all(is_same_limit)
    }

    /// The limits of all providers.
    pub fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    /// The name, quantity and description of a limit. Panics if the id is of another plan, and this one has fewer limits.
    pub fn limit_info(&self, limit: LimitId) -> &OutboundLimitInfo {
        &self.limit_infos[limit.index()]
    }
}

/// A provider that the policy doesn't have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown provider {found:?}{}", nearest.as_ref().map(|name| format!("; did you mean {name:?}?")).unwrap_or_default())]
pub struct UnknownProviderError {
    /// The unknown name, cut to 128 characters.
    pub found: String,
    /// The most similar name that exists, if any is similar.
    pub nearest: Option<String>,
}

/// The name, quantity and description of a provider's limit.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct OutboundLimitInfo {
    /// The name in errors and in `explain`: `tmdb`, `tmdb.cost`, `tmdb.credential`, `tmdb.credential.cost`,
    /// `tmdb.background`, `tmdb.cooldown`. If one of them has several limits, each has its number: `tmdb.2`.
    pub name: String,
    /// The quantity as written; `None` for a cool-down.
    pub quantity: Option<Quantity>,
    /// The limit in words with its true bound.
    pub description: String,
    /// True if each credential has a limit of its own, even if there is only one credential.
    pub per_credential: bool,
}

/// A provider: an API that is called.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ProviderConfig {
    /// Its name in the file, which is also the first segment of paths that lead to it.
    pub name: String,
    /// The preset that it is made from, if any.
    pub preset: Option<String>,
    /// Its root URL; `None` if only Rust programs call it, with URLs of their own.
    pub base_url: Option<BaseUrl>,
    /// The place of the credential in a request.
    pub auth: Auth,
    /// Its credentials; if there are none, one anonymous credential is assumed. The limits of an only credential are
    /// among the limits of all calls in the [`rules`](Self::rules).
    pub credentials: Vec<SecretSource>,
    /// The way in which calls are spread over the credentials.
    pub balance: Balance,
    /// The login that turns a credential into a token, if the provider needs one.
    pub login: Option<Login>,
    /// The `User-Agent` of every request, instead of the caller's.
    pub user_agent: Option<HeaderValue>,
    /// The form of the gateway's own errors about calls to it.
    pub error_format: ErrorFormat,
    /// The settings of the breaker; `None` for `breaker = "off"`.
    pub breaker: Option<BreakerSpec>,
    /// The settings of the adaptive limit on calls in flight; `None` for `adaptive = "off"`.
    pub adaptive_limit: Option<AdaptiveLimitSpec>,
    /// The longest time for connecting. Default 5 s.
    pub connect_timeout: Duration,
    /// The longest time of one attempt until the head of its reply, counted from the last movement of the request's
    /// body. It is also the longest time without any of that body from the caller, and the longest pause in a reply
    /// that the gateway passes on. Default 30 s.
    pub attempt_timeout: Duration,
    /// The longest request body that is kept for another attempt, in bytes. Default 64 KiB.
    pub replay_bytes: usize,
    /// The rules for caching its replies; nothing is cached by default.
    pub cache: Option<CacheRules>,
    /// The rules by which its replies are understood.
    pub verdicts: VerdictRules,
    /// The time without the head of a reply after which a second request is sent beside the first, shorter than
    /// [`attempt_timeout`](Self::attempt_timeout). The first good reply of both is taken. It is sent only if that does
    /// no harm, at most once an attempt, and only if limits, breaker and the retry budget grant it at once. Never by
    /// default.
    pub hedge_after: Option<Duration>,
    /// True if it takes one call at a time, first come, first served; every call is then in the same lane.
    pub sequential: bool,
    /// True if its limits, credentials and breaker are kept in the store that several nodes share. Default false: each
    /// node counts for itself.
    pub shared: bool,
    /// The hours in which background calls run; `None` for always.
    pub hours: Option<HoursOfDay>,
    /// The cost of a call, for limits that count more than calls.
    pub cost: Option<CostRules>,
    /// The way in which the pace is found. Default: as the limits say.
    pub pace: PaceConfig,
    /// The complete rules except the keys, which depend on the seed; [`ProviderConfig::rules`] adds them.
    pub(crate) rules_without_keys: CallRules,
}

impl ProviderConfig {
    /// The rules that the engine runs, with the keys of this seed.
    pub fn rules(&self, seed: &KeySeed) -> CallRules {
        let mut rules = self.rules_without_keys.clone();
        rules.key = seed.provider_key(&self.name);
        rules.credential_keys =
            (0..self.credentials.len().max(1)).map(|index| seed.credential_key(&self.name, index)).collect();
        rules
    }

    /// Creates the state that calls under these [`rules`](Self::rules) share, in production and in simulations alike.
    ///
    /// # Panics
    /// If the rules are of another provider, or a field was set to something that reading a policy refuses.
    pub fn new_state(&self, rules: &CallRules) -> ProviderState {
        let pool = CredentialPool::new(self.balance, rules.credential_keys.len()).expect(CHECKED);
        let breaker = self.breaker.clone();
        let breaker = breaker.map_or_else(Breaker::disabled, |spec| Breaker::new(spec).expect(CHECKED));
        let adaptive_limit = self.adaptive_limit.map(|spec| AdaptiveLimit::new(spec).expect(CHECKED));
        let mut state = ProviderState::new(rules, pool, breaker, adaptive_limit);
        state.pace = self.pace.build();
        state.store_requests.set_affinity(rules.affinity());
        state
    }

    /// The most that one call may cost so that each of its limits can have room for it. `limits` are those of the
    /// [`OutboundConfig::limits`] that it belongs to.
    pub fn max_cost(&self, limits: &Limits) -> u64 {
        let cost_limits = self.all_provider_limits().filter(|own| own.measure == Measure::Cost);
        cost_limits.filter_map(|own| Some(limits.get(own.limit)?.kind().capacity())).min().unwrap_or(MAX_COST)
    }

    /// The first of its calendar quotas to start again, and the time of that; `None` if it has none. `limits` are those
    /// of the [`OutboundConfig::limits`] that it belongs to.
    pub fn next_quota_end(&self, limits: &Limits, now: Time) -> Option<(LimitId, Time)> {
        let ends = self.all_provider_limits().filter_map(|own| match limits.get(own.limit)?.kind() {
            LimitKind::Quota(quota) => Some((own.limit, quota.period(now).end)),
            _ => None,
        });
        ends.min_by_key(|(_, end)| *end)
    }

    fn all_provider_limits(&self) -> impl Iterator<Item = &ProviderLimit> {
        let rules = &self.rules_without_keys;
        rules.provider_limits.iter().chain(&rules.credential_limits).chain(rules.lane_limits.iter().flatten())
    }
}

/// The root of an API: scheme, authority, and a path that precedes every request's path.
#[derive(Clone, PartialEq, Eq)]
pub struct BaseUrl {
    pub(crate) https: bool,
    pub(crate) authority: http::uri::Authority,
    pub(crate) path: String,
    pub(crate) unix_path: Option<PathBuf>,
}

impl BaseUrl {
    /// Creates the root at this host and path; slashes at the path's ends are ignored.
    pub fn new(https: bool, authority: http::uri::Authority, path: &str) -> Self {
        let path = path.trim_matches('/');
        let path = if path.is_empty() { String::new() } else { format!("/{path}") };
        Self { https, authority, path, unix_path: None }
    }

    /// The path of a unix socket, if the API is behind one. Its authority is then `localhost`.
    pub fn unix_path(&self) -> Option<&Path> {
        self.unix_path.as_deref()
    }

    /// True if requests use TLS.
    pub fn is_https(&self) -> bool {
        self.https
    }

    /// Host and port, in the form of `Host`.
    pub fn authority(&self) -> &http::uri::Authority {
        &self.authority
    }

    /// True if requests to it cross a network unencrypted: they go neither to this machine nor, as far as an address
    /// can tell, to a private network.
    pub fn is_unencrypted_remote(&self) -> bool {
        let host = self.authority.host();
        let is_near = match self.ip() {
            Some(IpAddr::V4(ip)) => ip.is_loopback() || ip.is_private() || ip.is_link_local(),
            Some(IpAddr::V6(ip)) => ip.is_loopback() || ip.is_unique_local() || ip.is_unicast_link_local(),
            None => host == "localhost" || !host.contains('.'),
        };
        !self.https && !is_near
    }

    /// True if it is on this machine, by name or address.
    pub fn is_loopback(&self) -> bool {
        self.authority.host() == "localhost" || self.ip().is_some_and(|ip| ip.is_loopback())
    }

    /// The host without the brackets of IPv6.
    pub(crate) fn bare_host(&self) -> &str {
        self.authority.host().trim_matches(['[', ']'])
    }

    fn ip(&self) -> Option<IpAddr> {
        self.bare_host().parse().ok().map(canonical_ip)
    }

    /// The path that precedes every request's, without a slash at its end; it may be empty. With [`Auth::Path`] it has
    /// `{key}` in place of the credential.
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.unix_path {
            return write!(f, "unix:{}", path.display());
        }
        write!(f, "{}://{}{}", if self.https { "https" } else { "http" }, self.authority, self.path)
    }
}

impl fmt::Debug for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The place of the credential in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Auth {
    /// No credential is sent.
    None,
    /// `Authorization: Bearer …`.
    Bearer,
    /// A header of this name, such as `x-api-key`; `prefix` comes before the credential.
    Header {
        /// The header.
        name: HeaderName,
        /// The text before the credential, such as `Token `.
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

/// The form of an error that the gateway reports itself, in place of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorFormat {
    /// Tidegate's own JSON.
    Tidegate,
    /// The JSON that the SDKs of OpenAI read: `{"error":{"message":…,"type":…,"code":…,"param":null}}`.
    OpenAi,
    /// The JSON that the SDKs of Anthropic read: `{"type":"error","error":{"type":…,"message":…}}`.
    Anthropic,
}

/// The exchange of a credential for a token: a `POST` of a JSON body, whose reply has the token.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Login {
    /// The path below the base URL; with [`Auth::Path`], below the part of it that precedes the credential's segment.
    pub path: String,
    /// The JSON body; each string `{credential}` in it is replaced by the credential, and `{NAME}` by the secret of
    /// that name in `secrets`.
    pub body: String,
    /// Further secrets of the body, by name.
    pub secrets: Vec<(String, SecretSource)>,
    /// The place of the token in the reply, as a JSON pointer (RFC 6901). Default `/token`.
    pub pointer: String,
    /// The lifetime of a token.
    pub lifetime: Duration,
    /// The time before its end at which it is renewed.
    pub refresh_before: Duration,
}

impl Login {
    /// Creates a login by this body, with the token at `/token`. It is renewed a tenth of its lifetime before its end.
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

    /// The body with its secrets filled in, each escaped for a JSON string.
    pub fn fill_body(&self, credential: &Secret, named: &[(String, Secret)]) -> Secret {
        let escape = |text: &mut String, secret: &Secret| {
            for letter in secret.expose().chars() {
                match letter {
                    '"' | '\\' => text.extend(['\\', letter]),
                    control if control < ' ' => text.push_str(&format!("\\u{:04x}", u32::from(control))),
                    other => text.push(other),
                }
            }
        };
        // One pass, so that a secret that looks like a placeholder isn't replaced.
        let (mut text, mut rest) = (String::new(), self.body.as_str());
        while let Some(start) = rest.find('{') {
            let (before, from) = rest.split_at(start);
            text.push_str(before);
            let placeholder = from[1..].split_once('}').and_then(|(name, after)| {
                let secret = named.iter().find(|(other, _)| other == name).map(|(_, secret)| secret);
                Some((if name == "credential" { credential } else { secret? }, after))
            });
            if let Some((secret, after)) = placeholder {
                escape(&mut text, secret);
                rest = after;
            } else {
                text.push('{');
                rest = &from[1..];
            }
        }
        text.push_str(rest);
        Secret::new(text)
    }
}

/// The rules for caching a provider's replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheRules {
    /// The time for which successful replies are fresh, regardless of their headers except `no-store`, and `private` if
    /// `shared`; [`Duration::MAX`] for ever. `None`: as HTTP defines.
    pub ttl: Option<Duration>,
    /// True if replies are shared between credentials. Default false.
    pub shared: bool,
    /// The time after its freshness in which a reply may be used while the provider is unavailable. Default zero:
    /// never.
    pub stale: Duration,
    /// The longest body that is cached, in bytes. Default 1 MiB.
    pub max_body: usize,
}

impl Default for CacheRules {
    /// As HTTP defines, separately for each credential, up to 1 MiB, and only while fresh.
    fn default() -> Self {
        Self { ttl: None, shared: false, stale: Duration::ZERO, max_body: 1 << 20 }
    }
}

/// JSON pointers (RFC 6901) to one number that may be in several places; the first that exists counts.
pub type PointerAlternatives = Vec<String>;

/// The cost of a call, for limits that count tokens or points.
///
/// A reservation is never more than the limits can ever have room for. It is only an estimate, and must not prevent a
/// call that may turn out to fit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CostRules {
    /// The fixed number that is reserved before the reply for a call that doesn't state its cost.
    pub reserve: u64,
    /// The place of a further number to reserve, in a JSON request body, such as `/max_tokens`. Only bodies that are
    /// kept for another attempt are read.
    pub request: PointerAlternatives,
    /// The bytes of the request body for each further unit; 0 for none. A token of a language model is about 4 bytes.
    pub bytes_per_unit: u64,
    /// The places of the numbers in the reply whose sum is the actual cost, such as `/usage/total_tokens`. In a stream
    /// of events, the last value of each counts.
    pub reply: Vec<PointerAlternatives>,
}

impl CostRules {
    /// Reserves a fixed number for every call, up to 2^40.
    pub fn new(reserve: u64) -> Self {
        Self { reserve, request: Vec::new(), bytes_per_unit: 0, reply: Vec::new() }
    }
}

/// The way in which the pace of calls is found. The limits always apply as well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PaceConfig {
    /// By the limits alone.
    #[default]
    Limits,
    /// By a wait between calls that grows when a call is throttled and shrinks when calls succeed.
    Responsive(PacerSpec),
    /// By a search for the rate. In the long run about one call in a hundred is throttled, and up to two if replies
    /// take two seconds.
    Adaptive(AdaptiveRateSpec),
}

impl PaceConfig {
    /// Creates its state; `None` if the limits alone decide.
    ///
    /// # Panics
    /// If a spec was made by hand and is invalid.
    pub fn build(&self) -> Option<tidegate_core::Pace> {
        match self {
            Self::Limits => None,
            Self::Responsive(spec) => Some(LocalPacer::new(*spec).expect(CHECKED).into()),
            Self::Adaptive(spec) => Some(AdaptiveRate::new(*spec).expect(CHECKED).into()),
        }
    }
}
