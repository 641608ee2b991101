//! The bytes before HTTP on a new connection: the header of the PROXY protocol, and the TLS handshake.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::StatusCode;
use tidegate_policy::{Networks, canonical_ip};
use tokio::sync::Semaphore;
use tokio_rustls::server::TlsStream;

use crate::proxy_protocol::{HeaderError, read_header};
use crate::rejections::{HeadRejections, RejectionReason};
use crate::stream::ClientStream;
use crate::tls::{HANDSHAKE_RECORD, ListenerTls, client_subject};
use crate::watchdog::ConnectionWatch;

/// The expected bytes before HTTP.
pub(crate) struct Preface {
    /// The peers whose connections begin with a header of the PROXY protocol.
    pub(crate) proxies: Networks,
    /// The TLS of TCP connections.
    pub(crate) tls: Option<Arc<ListenerTls>>,
    /// The permits of handshakes, which may keep 64 KiB each until they end.
    pub(crate) handshakes: Semaphore,
}

/// A connection on which HTTP follows.
pub(crate) struct OpenedStream {
    pub(crate) stream: ClientStream,
    /// The address of the client.
    pub(crate) address: SocketAddr,
    pub(crate) tls: Option<TlsClient>,
}

/// The client of a TLS connection.
pub(crate) struct TlsClient {
    /// The subject of its certificate, if it has one.
    pub(crate) subject: Option<String>,
}

/// A connection that doesn't begin with TLS, as it should.
pub(crate) struct PlainHttp(pub(crate) ClientStream);

impl Preface {
    /// True if the connections of this peer begin with something else than HTTP.
    #[inline]
    pub(crate) fn is_expected(&self, stream: &ClientStream, peer: IpAddr) -> bool {
        self.has_proxy_header(peer) || self.tls_of(stream).is_some()
    }

    fn tls_of(&self, stream: &ClientStream) -> Option<&ListenerTls> {
        self.tls.as_deref().filter(|_| matches!(stream, ClientStream::Tcp(_)))
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
    ) -> Option<Result<OpenedStream, PlainHttp>> {
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
        let Some(tls) = self.tls_of(&stream) else { return Some(Ok(OpenedStream { stream, address, tls: None })) };
        let why = match watch.until_phase_ends(stream.peek_byte()).await {
            Some(Ok(Some(HANDSHAKE_RECORD))) => match watch.until_phase_ends(self.shake_hands(tls, stream)).await {
                Some(Ok(stream)) => {
                    let tls = Some(TlsClient { subject: client_subject(&stream) });
                    return Some(Ok(OpenedStream { stream: ClientStream::Tls(Box::new(stream)), address, tls }));
                }
                Some(Err(error)) => error.to_string(),
                None => "the handshake takes too long".to_owned(),
            },
            Some(Ok(Some(_))) => {
                let why = "the connection doesn't begin with TLS";
                rejections.record(
                    canonical_ip(address.ip()),
                    RejectionReason::PlainHttp,
                    Some(StatusCode::BAD_REQUEST),
                    why,
                );
                return Some(Err(PlainHttp(stream)));
            }
            // Health checks and browsers open connections that they don't use.
            Some(Ok(None) | Err(_)) | None => return None,
        };
        rejections.record(canonical_ip(address.ip()), RejectionReason::TlsHandshake, None, &why);
        None
    }

    async fn shake_hands(&self, tls: &ListenerTls, stream: ClientStream) -> io::Result<TlsStream<ClientStream>> {
        let _permit = self.handshakes.acquire().await;
        tls.accept(stream).await
    }
}
