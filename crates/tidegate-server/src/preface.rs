//! The bytes before HTTP on a new connection: the header of the PROXY protocol.

use std::net::{IpAddr, SocketAddr};

use tidegate_policy::{Networks, canonical_ip};

use crate::proxy_protocol::{HeaderError, read_header};
use crate::rejections::{HeadRejections, RejectionReason};
use crate::stream::ClientStream;
use crate::watchdog::ConnectionWatch;

/// The expected bytes before HTTP.
pub(crate) struct Preface {
    /// The peers whose connections begin with a header of the PROXY protocol.
    pub(crate) proxies: Networks,
}

/// A connection on which HTTP follows.
pub(crate) struct OpenedStream {
    pub(crate) stream: ClientStream,
    /// The address of the client.
    pub(crate) address: SocketAddr,
}

impl Preface {
    /// True if the connections of this peer begin with something else than HTTP.
    #[inline]
    pub(crate) fn is_expected_from(&self, peer: IpAddr) -> bool {
        self.has_proxy_header(peer)
    }

    /// True if the connections of this peer begin with a header of the PROXY protocol.
    pub(crate) fn has_proxy_header(&self, peer: IpAddr) -> bool {
        !self.proxies.is_empty() && self.proxies.contains(canonical_ip(peer))
    }

    /// Reads what comes before HTTP. `None` if the connection is rejected, or the time for a head is over.
    pub(crate) async fn open(
        &self,
        mut stream: ClientStream,
        mut address: SocketAddr,
        watch: &ConnectionWatch,
        rejections: &HeadRejections,
    ) -> Option<OpenedStream> {
        if self.has_proxy_header(address.ip()) {
            let why = match watch.until_phase_ends(read_header(&mut stream)).await {
                Some(Ok(client)) => {
                    address = client.unwrap_or(address);
                    None
                }
                Some(Err(HeaderError::Closed)) => return None,
                Some(Err(error)) => Some(error.to_string()),
                None => Some("the header takes too long".to_owned()),
            };
            if let Some(why) = why {
                rejections.record(canonical_ip(address.ip()), RejectionReason::ProxyHeader, None, &why);
                return None;
            }
        }
        Some(OpenedStream { stream, address })
    }
}
