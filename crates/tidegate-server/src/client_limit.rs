//! The limit on connections per client address.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use parking_lot::Mutex;
use tidegate_policy::{Networks, UNIX_PEER, canonical_ip};

use crate::local_response;
use crate::watchdog::Watchdog;

/// The minimum time between two log lines about rejected clients.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The number of connections of each client address, IPv6 by network. Its size is bounded by the cap on connections,
/// because an address is kept only while it has a connection.
pub(crate) struct ClientLimit {
    /// The policy's section of the listener.
    section: &'static str,
    max_connections: usize,
    /// The number of leading bits of an IPv6 address that are counted.
    ipv6_prefix: u8,
    /// Trusted proxies, which aren't counted because their connections carry many clients.
    trusted: Networks,
    state: Mutex<ClientCounts>,
}

#[derive(Default)]
struct ClientCounts {
    counts: HashMap<IpAddr, usize>,
    /// The tick of the last log line.
    last_logged: Option<u32>,
    suppressed: u64,
}

impl ClientLimit {
    pub(crate) fn new(section: &'static str, max_connections: usize, ipv6_prefix: u8, trusted: Networks) -> Arc<Self> {
        let max_connections = max_connections.max(1);
        Arc::new(Self { section, max_connections, ipv6_prefix, trusted, state: Mutex::default() })
    }

    /// Counts a connection of this address and returns its slot. `None` if the address isn't counted.
    ///
    /// # Errors
    /// The address has the maximum number of connections.
    pub(crate) fn acquire(self: &Arc<Self>, ip: IpAddr) -> Result<Option<ClientSlot>, TooManyConnectionsError> {
        let ip = canonical_ip(ip);
        if ip.is_loopback() || ip == UNIX_PEER || self.trusted.contains(ip) {
            return Ok(None);
        }
        let client = self.client_of(ip);
        let mut state = self.state.lock();
        let count = state.counts.entry(client).or_insert(0);
        if *count >= self.max_connections {
            return Err(TooManyConnectionsError);
        }
        *count += 1;
        drop(state);
        Ok(Some(ClientSlot { limit: Arc::clone(self), client }))
    }

    /// Logs a connection over the limit, and answers it with 503, without reading its request.
    #[cold]
    pub(crate) fn reject_connection(&self, stream: Option<&impl AsFd>, ip: IpAddr, watchdog: &Watchdog) {
        if let Some(stream) = stream {
            let why = "too many connections from this address";
            let response = local_response::raw_error_response(StatusCode::SERVICE_UNAVAILABLE, why);
            let socket = socket2::SockRef::from(stream);
            // Unread bytes would reset the connection at its close, before the client reads the response.
            let _ = socket.recv(&mut [MaybeUninit::uninit(); 4096]);
            let _ = socket.send(&response);
            let _ = socket.shutdown(std::net::Shutdown::Write);
        }
        let mut state = self.state.lock();
        if state.last_logged.is_some_and(|last_logged| !watchdog.has_elapsed(last_logged, LOG_INTERVAL)) {
            state.suppressed += 1;
            return;
        }
        state.last_logged = Some(watchdog.current_tick());
        let suppressed = std::mem::take(&mut state.suppressed);
        drop(state);
        tracing::warn!(
            %ip,
            listener = self.section,
            connections_per_client = self.max_connections,
            suppressed,
            "a client address has too many connections"
        );
    }

    /// The address by which a client is counted.
    fn client_of(&self, ip: IpAddr) -> IpAddr {
        let mask = u128::MAX.checked_shl(128_u32.saturating_sub(self.ipv6_prefix.into())).unwrap_or(0);
        match ip {
            IpAddr::V4(_) => ip,
            IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & mask)),
        }
    }
}

/// A client has the maximum number of connections.
#[derive(Debug)]
pub(crate) struct TooManyConnectionsError;

/// One counted connection of a client. Dropping it removes it from the count.
pub(crate) struct ClientSlot {
    limit: Arc<ClientLimit>,
    client: IpAddr,
}

impl ClientSlot {
    /// The address by which the client is counted.
    pub(crate) fn client(&self) -> IpAddr {
        self.client
    }
}

impl Drop for ClientSlot {
    fn drop(&mut self) {
        let mut state = self.limit.state.lock();
        if let Some(count) = state.counts.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                state.counts.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;
    use crate::watchdog::tests::uniform_timeouts;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn connections_are_limited_per_address_or_ipv6_network() {
        for (prefix, one, same, other) in [
            (64, "192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2"),
            (32, "192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2"),
            (64, "2001:db8::1", "2001:db8:0:0:ffff::2", "2001:db8:0:1::1"),
            (56, "2001:db8::1", "2001:db8:0:ff::2", "2001:db8:0:100::1"),
            (32, "2001:db8::1", "2001:db8:ffff::2", "2001:db9::1"),
        ] {
            let clients = ClientLimit::new("inbound", 2, prefix, Networks::new(["10.0.0.0/8".parse().unwrap()]));
            let first = clients.acquire(ip(one)).unwrap();
            let second = clients.acquire(ip(same)).unwrap();
            assert!(clients.acquire(ip(one)).is_err());
            assert!(clients.acquire(ip(other)).is_ok());
            drop(first);
            assert!(clients.acquire(ip(same)).is_ok());
            drop(second);
            assert!(clients.state.lock().counts.is_empty(), "no address is kept past its connections");
        }
    }

    #[tokio::test]
    async fn an_excess_connection_is_answered_and_closed() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let watchdog = Watchdog::new(&uniform_timeouts(Duration::from_secs(1)), None, 8, true);
        ClientLimit::new("inbound", 1, 64, Networks::default()).reject_connection(
            Some(&stream),
            ip("192.0.2.1"),
            &watchdog,
        );
        drop(stream);
        let mut answer = String::new();
        tokio::io::AsyncReadExt::read_to_string(&mut client, &mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("\r\nretry-after: 1\r\n"), "{answer}");
    }

    #[test]
    fn local_peers_and_trusted_proxies_are_not_counted() {
        let clients = ClientLimit::new("inbound", 1, 64, Networks::new(["10.0.0.0/8".parse().unwrap()]));
        for uncounted in ["127.0.0.1", "::1", "10.1.2.3", "::ffff:10.1.2.3", "0.0.0.0"] {
            for _ in 0..3 {
                assert!(clients.acquire(ip(uncounted)).unwrap().is_none(), "{uncounted}");
            }
        }
    }
}
