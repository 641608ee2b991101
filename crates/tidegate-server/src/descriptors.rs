//! File descriptors: the number that a policy's connections may need, the limit of the process, and the caps on connections
//! within it.

use rustix::process::{Resource, getrlimit, setrlimit};
use tidegate_policy::{Http2Mode, ListenConfig, Policy};

use crate::{ADMIN_CONNECTIONS, API_CONNECTIONS, RESP_CONNECTIONS, RLS_CONNECTIONS};

/// The descriptors of a process besides its connections: listeners, files of the store and the log, the runtime's own.
const OTHER_DESCRIPTORS: u64 = 64;

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
}

impl ConnectionCap {
    /// The maximum number of one client's connections: as configured, and no more than half of a cap that is lowered.
    pub(crate) fn of_client(self, configured: usize) -> usize {
        if self.connections < self.configured { configured.min((self.connections / 2).max(1)) } else { configured }
    }

    fn needed(self) -> u64 {
        self.configured as u64 * self.descriptors
    }

    fn lower_to(&mut self, descriptors: u64) {
        let connections = usize::try_from(descriptors / self.descriptors).unwrap_or(usize::MAX);
        // No listener is closed for lack of descriptors.
        self.connections = self.connections.min(connections.max(1));
    }
}

impl ConnectionCaps {
    /// Returns the caps of a policy in this process.
    pub(crate) fn of(policy: &Policy) -> Self {
        let mut caps = Self::configured(policy);
        if let Some(limit) = getrlimit(Resource::Nofile).current {
            caps.lower_to(limit);
        }
        caps
    }

    fn configured(policy: &Policy) -> Self {
        let cap = |listen: Option<&ListenConfig>, connections: usize, descriptors| {
            let connections = if listen.is_some_and(|listen| !listen.is_off()) { connections } else { 0 };
            ConnectionCap { connections, configured: connections, descriptors }
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
        Self {
            inbound: forwarded(proxy, inbound.caps.connections as usize),
            outbound: forwarded(outbound.map(|it| &it.listen), outbound.map_or(0, |it| it.connections)),
            api: cap(Some(&policy.api().listen), API_CONNECTIONS, 1),
            rls: cap(policy.rls().map(|rls| &rls.listen), RLS_CONNECTIONS, 1),
            resp: cap(policy.resp().map(|resp| &resp.listen), RESP_CONNECTIONS, 1),
            admin: cap(Some(&policy.admin().listen), ADMIN_CONNECTIONS, 1),
        }
    }

    /// The number of open descriptors when every listener is at its cap.
    fn needed(&self) -> u64 {
        let Self { inbound, outbound, api, rls, resp, admin } = self;
        [inbound, outbound, api, rls, resp, admin].map(|cap| cap.needed()).iter().sum::<u64>() + OTHER_DESCRIPTORS
    }

    /// Lowers the caps so that they need no more than this number of descriptors. The listeners share equally what the
    /// admin listener leaves; what one of them doesn't need is the others'.
    fn lower_to(&mut self, limit: u64) {
        if self.needed() <= limit {
            return;
        }
        let mut left = limit.saturating_sub(OTHER_DESCRIPTORS);
        self.admin.lower_to(left / ADMIN_DIVISOR);
        left = left.saturating_sub(self.admin.connections as u64);
        let mut others = [&mut self.inbound, &mut self.outbound, &mut self.api, &mut self.rls, &mut self.resp];
        others.sort_by_key(|cap| cap.needed());
        let count = others.len() as u64;
        for (cap, sharing) in others.into_iter().zip((1..=count).rev()) {
            cap.lower_to(left / sharing);
            left = left.saturating_sub(cap.connections as u64 * cap.descriptors);
        }
    }
}

/// Raises the process' limit on descriptors (`RLIMIT_NOFILE`) to its hard limit. Warns if that is less than the
/// policy's connections may need. `tidegate serve` calls this at its start; other programs can decide for themselves. A
/// server has as many connections as the limit allows at its start.
pub fn raise_limit(policy: &Policy) {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let soft = std::mem::replace(&mut limit.current, limit.maximum);
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::warn!(%error, "the limit on file descriptors can't be raised");
            limit.current = soft;
        }
    }
    let caps = ConnectionCaps::configured(policy);
    let needed = caps.needed();
    if let Some(limit) = limit.current.filter(|limit| *limit < needed) {
        let mut lowered = caps;
        lowered.lower_to(limit);
        tracing::warn!(
            limit,
            needed,
            inbound = lowered.inbound.connections,
            outbound = lowered.outbound.connections,
            admin = lowered.admin.connections,
            "fewer file descriptors than connections may take, so there will be fewer connections: raise the hard limit \
             (ulimit -Hn), or lower inbound.caps.connections or outbound.connections"
        );
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
        assert_eq!(none.needed(), OTHER_DESCRIPTORS);
        assert_eq!(caps("[admin]\nlisten = \"off\"\n").needed(), OTHER_DESCRIPTORS + 1024);
        assert_eq!(caps(PROXY).needed(), OTHER_DESCRIPTORS + 1024 + 64 + 1000);
        let with_http2 = PROXY.replace("[inbound]\n", "[inbound]\nhttp2 = \"always\"\n");
        assert_eq!(caps(&with_http2).needed(), OTHER_DESCRIPTORS + 1024 + 64 + 1500);
    }

    #[test]
    fn caps_stay_within_the_limit_on_descriptors() {
        let everything =
            format!("{PROXY}[rls]\n[resp]\n[outbound.provider.tmdb]\nbase_url = \"https://a.test\"\nauth = \"none\"\n");
        for file in [PROXY, &everything] {
            for limit in [80, 128, 256, 1000, 1024, 2152, 4096, 1 << 16] {
                let mut lowered = caps(file);
                lowered.lower_to(limit);
                let ConnectionCaps { inbound, outbound, api, rls, resp, admin } = lowered;
                let used: u64 = [inbound, outbound, api, rls, resp, admin]
                    .map(|cap| cap.connections as u64 * cap.descriptors)
                    .iter()
                    .sum();
                assert!(used + OTHER_DESCRIPTORS <= limit, "{limit}: {lowered:?}");
                assert!(limit < 2152 || file != PROXY || lowered == caps(file), "{limit}: {lowered:?}");
            }
        }
        let mut lowered = caps(PROXY);
        lowered.lower_to(256);
        let ConnectionCaps { inbound, api, admin, .. } = lowered;
        assert_eq!((inbound.connections, api.connections, admin.connections), (36, 72, 48));
        assert_eq!((inbound.of_client(125), api.of_client(512), admin.of_client(2)), (18, 36, 2));
        lowered.lower_to(1);
        assert_eq!((lowered.inbound.connections, lowered.admin.connections), (1, 1), "every listener stays open");
    }
}
