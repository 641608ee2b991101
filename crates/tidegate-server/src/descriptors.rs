//! File descriptors: the number that a policy's connections may need, the limit of the process, and the caps on connections
//! within it. Connections to an upstream that are kept although their client has gone away have a share of their own.

use std::fmt::{self, Display, Formatter};

use rustix::process::{Resource, getrlimit, setrlimit};
use tidegate::MAX_FINISHED_CALLS;
use tidegate_policy::{Http2Mode, ListenConfig, Policy};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::upstream::MAX_OBSERVED;
use crate::{ADMIN_CONNECTIONS, API_CONNECTIONS, RESP_CONNECTIONS, RLS_CONNECTIONS};

/// The descriptors of a process besides its connections: listeners, files of the store and the log, the runtime's own.
const OTHER_DESCRIPTORS: u64 = 64;

/// The maximum number of connections to an upstream whose client has gone away.
const MAX_WITHOUT_CLIENT: usize = MAX_FINISHED_CALLS + MAX_OBSERVED;
/// They take at most one in this number of the descriptors for connections.
const WITHOUT_CLIENT_DIVISOR: u64 = 8;

static WITHOUT_CLIENT: Semaphore = Semaphore::const_new(MAX_WITHOUT_CLIENT);

/// Returns a place for a connection to an upstream whose client has gone away. `None` if the descriptors of the process
/// leave none.
pub(crate) fn place_without_client() -> Option<SemaphorePermit<'static>> {
    let place = WITHOUT_CLIENT.try_acquire().ok()?;
    let used = MAX_WITHOUT_CLIENT - WITHOUT_CLIENT.available_permits();
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    (used as u64 <= places_without_client(limit)).then_some(place)
}

/// The number of these places in a process that may have this number of descriptors.
fn places_without_client(limit: u64) -> u64 {
    (limit.saturating_sub(OTHER_DESCRIPTORS) / WITHOUT_CLIENT_DIVISOR).min(MAX_WITHOUT_CLIENT as u64)
}

/// The maximum number of idle connections in a pool of a provider's.
const MAX_IDLE: usize = 128;

/// The admin listener keeps one in this number of the descriptors for connections, before the other listeners share the rest.
const ADMIN_DIVISOR: u64 = 4;

/// The maximum numbers of connections of the listeners, which all together don't need more descriptors than the process may
/// have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionCaps {
    pub(crate) inbound: ConnectionCap,
    pub(crate) outbound: ConnectionCap,
    pub(crate) api: ConnectionCap,
    pub(crate) rls: ConnectionCap,
    pub(crate) resp: ConnectionCap,
    pub(crate) admin: ConnectionCap,
}

/// The maximum number of connections of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionCap {
    pub(crate) connections: usize,
    /// The number without a limit on descriptors; 0 if the listener is off.
    configured: usize,
    /// The descriptors of a connection: two if it is forwarded, and three if its requests may be streams, of which there are
    /// as many beside it.
    descriptors: u64,
    /// The pools of connections that are kept for further requests.
    pools: u64,
    /// The maximum number of idle connections in each of them.
    pub(crate) max_idle: usize,
}

impl ConnectionCap {
    /// The maximum number of one client's connections: as configured, and no more than half of a cap that is lowered.
    pub(crate) fn of_client(self, configured: usize) -> usize {
        if self.connections < self.configured { configured.min((self.connections / 2).max(1)) } else { configured }
    }

    fn needed(self) -> u64 {
        self.connections as u64 * self.descriptors + self.pools * self.max_idle as u64
    }

    fn lower_to(&mut self, descriptors: u64) {
        if descriptors >= self.needed() {
            return;
        }
        let lower = |number: u64, most: usize| usize::try_from(number).map_or(most, |number| number.min(most));
        // With pools, each connection leaves one descriptor to them. No listener is closed for lack of descriptors.
        let connections = descriptors / (self.descriptors + u64::from(self.pools > 0));
        self.connections = lower(connections.max(1), self.connections);
        let left = descriptors.saturating_sub(self.connections as u64 * self.descriptors);
        self.max_idle = lower(left.checked_div(self.pools).unwrap_or(0), self.max_idle);
    }
}

impl ConnectionCaps {
    /// Returns the caps of a policy in this process.
    pub(crate) fn of(policy: &Policy) -> Self {
        Shortage::of(policy).map_or_else(|| Self::configured(policy), |shortage| shortage.caps)
    }

    fn configured(policy: &Policy) -> Self {
        let cap = |listen: Option<&ListenConfig>, connections: usize, descriptors| {
            let connections = if listen.is_some_and(|listen| !listen.is_off()) { connections } else { 0 };
            ConnectionCap { connections, configured: connections, descriptors, pools: 0, max_idle: 0 }
        };
        let forwarded = |listen: Option<&ListenConfig>, connections| {
            let has_http2 = listen.is_some_and(|listen| match listen.http2 {
                Http2Mode::Never => false,
                Http2Mode::Tls => listen.tls.is_some(),
                Http2Mode::Always => true,
            });
            cap(listen, connections, if has_http2 { 3 } else { 2 })
        };
        let (inbound, outbound) = (policy.inbound(), policy.outbound());
        let proxy = inbound.upstream.as_ref().map(|_| &inbound.listen);
        let gateway = forwarded(outbound.map(|it| &it.listen), outbound.map_or(0, |it| it.connections));
        // With TLS there are two pools, one of HTTP/1.1 for upgrades.
        let pools = outbound.iter().flat_map(|it| it.providers()).filter_map(|provider| provider.base_url.as_ref());
        let pools = pools.map(|base| if base.is_https() { 2 } else { 1 }).sum();
        Self {
            inbound: forwarded(proxy, inbound.caps.connections as usize),
            outbound: ConnectionCap { pools, max_idle: MAX_IDLE.min(gateway.connections), ..gateway },
            api: cap(Some(&policy.api().listen), API_CONNECTIONS, 1),
            rls: cap(policy.rls().map(|rls| &rls.listen), RLS_CONNECTIONS, 1),
            resp: cap(policy.resp().map(|resp| &resp.listen), RESP_CONNECTIONS, 1),
            admin: cap(Some(&policy.admin().listen), ADMIN_CONNECTIONS, 1),
        }
    }

    /// The number of open descriptors when every listener is at its cap, in a process with this limit.
    fn needed(&self, limit: u64) -> u64 {
        let connections = self.listeners().map(|(_, cap)| cap.needed()).iter().sum::<u64>();
        connections + self.without_client(limit) + OTHER_DESCRIPTORS
    }

    fn without_client(&self, limit: u64) -> u64 {
        let forwards = self.inbound.configured + self.outbound.configured > 0;
        if forwards { places_without_client(limit) } else { 0 }
    }

    fn listeners(&self) -> [(&'static str, ConnectionCap); 6] {
        let Self { inbound, outbound, api, rls, resp, admin } = *self;
        [("inbound", inbound), ("outbound", outbound), ("api", api), ("rls", rls), ("resp", resp), ("admin", admin)]
    }

    /// Lowers the caps so that they need no more than this number of descriptors. The listeners share equally what the
    /// admin listener leaves; what one of them doesn't need is the others'.
    fn lower_to(&mut self, limit: u64) {
        let mut left = limit.saturating_sub(OTHER_DESCRIPTORS + self.without_client(limit));
        self.admin.lower_to(left / ADMIN_DIVISOR);
        left = left.saturating_sub(self.admin.connections as u64);
        let mut others = [&mut self.inbound, &mut self.outbound, &mut self.api, &mut self.rls, &mut self.resp];
        others.sort_by_key(|cap| cap.needed());
        let count = others.len() as u64;
        for (cap, sharing) in others.into_iter().zip((1..=count).rev()) {
            cap.lower_to(left / sharing);
            left = left.saturating_sub(cap.needed());
        }
    }
}

/// The lack of descriptors in a process: it may have fewer than all connections of a policy take.
#[derive(Debug)]
pub struct Shortage {
    limit: u64,
    needed: u64,
    caps: ConnectionCaps,
    /// The settings that can be lowered instead of raising the limit.
    settings: Vec<(&'static str, usize)>,
}

impl Shortage {
    /// Returns the lack of descriptors in this process with this policy. `None` if there are enough.
    pub fn of(policy: &Policy) -> Option<Self> {
        Self::under(getrlimit(Resource::Nofile).current?, ConnectionCaps::configured(policy))
    }

    fn under(limit: u64, configured: ConnectionCaps) -> Option<Self> {
        if limit >= configured.needed(limit) {
            return None;
        }
        let mut caps = configured;
        caps.lower_to(limit);
        // No setting changes the needs of the other listeners.
        let others = configured.needed(limit) - configured.inbound.needed() - configured.outbound.needed();
        let settings =
            [("inbound.caps.connections", caps.inbound), ("outbound.connections", caps.outbound)].into_iter();
        let is_lowered = |(_, cap): &(_, ConnectionCap)| cap.connections < cap.configured && others < limit;
        let settings = settings.filter(is_lowered).map(|(name, cap)| (name, cap.configured)).collect();
        Some(Self { limit, needed: configured.needed(u64::MAX), caps, settings })
    }
}

impl Display for Shortage {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { limit, needed, caps, settings } = self;
        write!(f, "fewer file descriptors ({limit}) than all connections may take ({needed}). So there are at most")?;
        let open = caps.listeners().into_iter().filter(|(_, cap)| cap.configured > 0);
        for (index, (name, cap)) in open.enumerate() {
            write!(f, "{} {} at {name}", if index == 0 { "" } else { "," }, cap.connections)?;
        }
        write!(f, ". Raise the hard limit (ulimit -Hn, LimitNOFILE=)")?;
        for (name, configured) in settings {
            write!(f, ", or lower {name} ({configured})")?;
        }
        Ok(())
    }
}

/// Raises the process' limit on descriptors (`RLIMIT_NOFILE`) to its hard limit. `tidegate serve` calls this at its start;
/// other programs can decide for themselves. A server has as many connections as the limit allows at its start, and warns if
/// they are fewer than the policy says.
pub fn raise_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::warn!(%error, "the limit on file descriptors can't be raised");
        }
    }
}

#[cfg(test)]
mod tests {
    use tidegate_policy::PolicySources;

    use super::*;

    fn caps(file: &str) -> ConnectionCaps {
        ConnectionCaps::configured(&Policy::load(PolicySources::new().file("t", file)).unwrap())
    }

    const PROXY: &str = "[inbound]\nupstream = \"http://127.0.0.1:3000\"\n[inbound.caps]\nconnections = 500\n";

    #[test]
    fn proxied_connections_need_two_descriptors() {
        let none = caps("[admin]\nlisten = \"off\"\n[api]\nlisten = \"off\"\n");
        assert_eq!(none.needed(1 << 16), OTHER_DESCRIPTORS);
        assert_eq!(caps("[admin]\nlisten = \"off\"\n").needed(1 << 16), OTHER_DESCRIPTORS + 1024);
        assert_eq!(caps(PROXY).needed(1 << 16), OTHER_DESCRIPTORS + 1024 + 64 + 1000 + 1536);
        let with_http2 = PROXY.replace("[inbound]\n", "[inbound]\nhttp2 = \"always\"\n");
        assert_eq!(caps(&with_http2).needed(1 << 16), OTHER_DESCRIPTORS + 1024 + 64 + 1500 + 1536);
    }

    #[test]
    fn idle_connections_to_providers_are_counted() {
        let provider = |name: &str, url: &str| {
            format!("[outbound.provider.{name}]\nbase_url = \"{url}\"\nauth = \"none\"\nlimit = \"1/s\"\n")
        };
        let gateway = format!(
            "[admin]\nlisten = \"off\"\n[api]\nlisten = \"off\"\n[outbound]\nconnections = 200\n{}{}",
            provider("a", "http://a.test"),
            provider("b", "https://b.test")
        );
        let caps = caps(&gateway);
        assert_eq!(caps.needed(1 << 16), OTHER_DESCRIPTORS + 400 + 1536 + 3 * 128);
        let mut lowered = caps;
        lowered.lower_to(OTHER_DESCRIPTORS + 400);
        assert_eq!((lowered.outbound.connections, lowered.outbound.max_idle), (116, 39));
        lowered.lower_to(1);
        assert_eq!((lowered.outbound.connections, lowered.outbound.max_idle), (1, 0));
    }

    #[test]
    fn the_shortage_names_each_cap_and_what_helps() {
        let shortage = |limit, file: &str| Shortage::under(limit, caps(file)).map(|shortage| shortage.to_string());
        assert_eq!(shortage(4096, PROXY), None);
        assert_eq!(
            shortage(1300, PROXY).unwrap(),
            "fewer file descriptors (1300) than all connections may take (3688). So there are at most 254 at inbound, 510 at \
             api, 64 at admin. Raise the hard limit (ulimit -Hn, LimitNOFILE=)"
        );
        let help = ", or lower inbound.caps.connections (5000)";
        let large = PROXY.replace("500", "5000");
        assert!(shortage(4096, &large).unwrap().ends_with(help));
    }

    #[test]
    fn caps_stay_within_the_limit_on_descriptors() {
        let everything =
            format!("{PROXY}[rls]\n[resp]\n[outbound.provider.tmdb]\nbase_url = \"https://a.test\"\nauth = \"none\"\n");
        for file in [PROXY, &everything] {
            for limit in [80, 128, 256, 1000, 1024, 2452, 4096, 1 << 16] {
                let mut lowered = caps(file);
                lowered.lower_to(limit);
                let ConnectionCaps { inbound, outbound, api, rls, resp, admin } = lowered;
                let used: u64 = [inbound, outbound, api, rls, resp, admin].map(ConnectionCap::needed).iter().sum();
                assert!(used + places_without_client(limit) + OTHER_DESCRIPTORS <= limit, "{limit}: {lowered:?}");
                assert!(limit < 2452 || file != PROXY || lowered == caps(file), "{limit}: {lowered:?}");
            }
        }
        let mut lowered = caps(PROXY);
        lowered.lower_to(256);
        let ConnectionCaps { inbound, api, admin, .. } = lowered;
        assert_eq!((inbound.connections, api.connections, admin.connections), (31, 64, 42));
        assert_eq!((inbound.of_client(125), api.of_client(512), admin.of_client(2)), (15, 32, 2));
        lowered.lower_to(1);
        assert_eq!((lowered.inbound.connections, lowered.admin.connections), (1, 1), "every listener stays open");
    }
}
