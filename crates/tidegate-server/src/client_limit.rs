//! The limit on connections per client address.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsFd;
use std::sync::Arc;

use http::StatusCode;
use parking_lot::Mutex;
use tidegate_policy::{Networks, UNIX_PEER, canonical_ip};

use crate::local_response;

/// The number of connections of each client address, IPv6 by network. Its size is bounded by the cap on connections,
/// because an address is kept only while it has a connection.
pub(crate) struct ClientLimit {
    pub(crate) max_connections: usize,
    /// The number of leading bits of an IPv6 address that are counted.
    ipv6_prefix: u8,
    /// Trusted proxies, which aren't counted because their connections carry many clients.
    trusted: Networks,
    counts: Mutex<HashMap<IpAddr, usize>>,
}

impl ClientLimit {
    pub(crate) fn new(max_connections: usize, ipv6_prefix: u8, trusted: Networks) -> Arc<Self> {
        let max_connections = max_connections.max(1);
        Arc::new(Self { max_connections, ipv6_prefix, trusted, counts: Mutex::default() })
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
        let mut counts = self.counts.lock();
        let count = counts.entry(client).or_insert(0);
        if *count >= self.max_connections {
            return Err(TooManyConnectionsError);
        }
        *count += 1;
        drop(counts);
        Ok(Some(ClientSlot { limit: Arc::clone(self), client }))
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

/// Answers a connection over the limit with 503, without reading its request.
#[cold]
pub(crate) fn reject_connection(stream: &impl AsFd, why: &str) {
    let response = local_response::raw_error_response(StatusCode::SERVICE_UNAVAILABLE, why);
    let socket = socket2::SockRef::from(stream);
    // Unread bytes would reset the connection at its close, before the client reads the response.
    let _ = socket.recv(&mut [MaybeUninit::uninit(); 4096]);
    let _ = socket.send(&response);
    let _ = socket.shutdown(std::net::Shutdown::Write);
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
        let mut counts = self.limit.counts.lock();
        if let Some(count) = counts.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;

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
            let clients = ClientLimit::new(2, prefix, Networks::new(["10.0.0.0/8".parse().unwrap()]));
            let first = clients.acquire(ip(one)).unwrap();
            let second = clients.acquire(ip(same)).unwrap();
            assert!(clients.acquire(ip(one)).is_err());
            assert!(clients.acquire(ip(other)).is_ok());
            drop(first);
            assert!(clients.acquire(ip(same)).is_ok());
            drop(second);
            assert!(clients.counts.lock().is_empty(), "no address is kept past its connections");
        }
    }

    #[tokio::test]
    async fn an_excess_connection_is_answered_and_closed() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        reject_connection(&stream, "too many");
        drop(stream);
        let mut answer = String::new();
        tokio::io::AsyncReadExt::read_to_string(&mut client, &mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("\r\nretry-after: 1\r\n"), "{answer}");
    }

    #[test]
    fn local_peers_and_trusted_proxies_are_not_counted() {
        let clients = ClientLimit::new(1, 64, Networks::new(["10.0.0.0/8".parse().unwrap()]));
        for uncounted in ["127.0.0.1", "::1", "10.1.2.3", "::ffff:10.1.2.3", "0.0.0.0"] {
            for _ in 0..3 {
                assert!(clients.acquire(ip(uncounted)).unwrap().is_none(), "{uncounted}");
            }
        }
    }
}
