//! File descriptors: the number that a policy's connections may need, and the limit of the process.

use rustix::process::{Resource, getrlimit, setrlimit};
use tidegate_policy::Policy;

use crate::{ADMIN_CONNECTIONS, API_CONNECTIONS, RESP_CONNECTIONS, RLS_CONNECTIONS};

/// The descriptors of a process besides its connections: listeners, files of the store and the log, the runtime's own.
const OTHER_DESCRIPTORS: u64 = 64;

/// The number of open descriptors when every listener is at its cap. A forwarded connection counts twice.
fn needed(policy: &Policy) -> u64 {
    let inbound = policy.inbound();
    let outbound = policy.outbound().filter(|outbound| !outbound.listen.is_off());
    let forwarded = inbound.upstream.as_ref().map_or(0, |_| u64::from(inbound.caps.connections))
        + outbound.map_or(0, |outbound| outbound.connections as u64);
    let internal = [(&policy.api().listen, API_CONNECTIONS), (&policy.admin().listen, ADMIN_CONNECTIONS)];
    let rls = policy.rls().map(|rls| (&rls.listen, RLS_CONNECTIONS));
    let resp = policy.resp().map(|resp| (&resp.listen, RESP_CONNECTIONS));
    let internal: usize =
        internal.iter().chain(&rls).chain(&resp).filter(|(listen, _)| !listen.is_off()).map(|(_, most)| most).sum();
    2 * forwarded + internal as u64 + OTHER_DESCRIPTORS
}

/// Raises the process' limit on descriptors (`RLIMIT_NOFILE`) to its hard limit. Warns if that is less than the
/// policy's connections may need. `tidegate serve` calls this at its start; other programs can decide for themselves.
pub fn raise_limit(policy: &Policy) {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let soft = std::mem::replace(&mut limit.current, limit.maximum);
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::warn!(%error, "the limit on file descriptors can't be raised");
            limit.current = soft;
        }
    }
    let needed = needed(policy);
    if let Some(limit) = limit.current.filter(|limit| *limit < needed) {
        tracing::warn!(
            limit,
            needed,
            "fewer file descriptors than connections may take: raise the hard limit (ulimit -Hn), or lower \
             inbound.caps.connections or outbound.connections"
        );
    }
}

#[cfg(test)]
mod tests {
    use tidegate_policy::PolicySources;

    use super::*;

    #[test]
    fn proxied_connections_need_two_descriptors() {
        let of = |file: &str| needed(&Policy::load(PolicySources::new().file("t", file)).unwrap());
        let none = of("[admin]\nlisten = \"off\"\n[api]\nlisten = \"off\"\n");
        assert_eq!(none, OTHER_DESCRIPTORS);
        assert_eq!(of("[admin]\nlisten = \"off\"\n"), OTHER_DESCRIPTORS + 1024);
        let proxy = "[inbound]\nupstream = \"http://127.0.0.1:3000\"\n[inbound.caps]\nconnections = 500\n";
        assert_eq!(of(proxy), OTHER_DESCRIPTORS + 1024 + 64 + 1000);
    }
}
