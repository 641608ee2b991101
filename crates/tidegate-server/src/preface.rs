//! The bytes before the protocol on a new connection: the header of the PROXY protocol, and the TLS handshake.

use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::StatusCode;
use rustix::net::RecvFlags;
use tidegate_policy::{Http2Mode, Networks, canonical_ip};
use tokio::io::ReadBuf;

use crate::http2;
use crate::local_response::HttpError;
use crate::proxy_protocol::{NOT_LISTED, read_header};
use crate::rejections::{HeadRejections, RejectionReason};
use crate::stream::ClientStream;
use crate::tls::{HANDSHAKE_RECORD, ListenerTls, client_subject};
use crate::watchdog::{ConnectionWatch, EndReason};

/// The expected bytes before HTTP.
pub(crate) struct Preface {
    /// The peers whose connections begin with a header of the PROXY protocol.
    pub(crate) proxies: Networks,
    /// The TLS of TCP connections.
    pub(crate) tls: Option<Arc<ListenerTls>>,
    /// The connections that may use HTTP/2.
    pub(crate) http2: Http2Mode,
}

/// Reads the bytes before HTTP on one connection.
pub(crate) struct PrefaceReader<'a> {
    pub(crate) preface: &'a Preface,
    pub(crate) watch: &'a Arc<ConnectionWatch>,
    pub(crate) rejections: &'a HeadRejections,
}

/// A connection on which the listener's protocol follows.
pub(crate) struct OpenedStream {
    pub(crate) stream: ClientStream,
    /// The address of the client.
    pub(crate) address: SocketAddr,
    pub(crate) tls: Option<Arc<TlsClient>>,
    pub(crate) is_http2: bool,
}

/// The client of a TLS connection.
pub(crate) struct TlsClient {
    /// The subject of its certificate, if it has one.
    pub(crate) subject: Option<String>,
}

/// A connection that doesn't begin with TLS, as it should.
pub(crate) struct PlainText(pub(crate) ClientStream);

impl Preface {
    /// True if the connections of this peer begin with something else than HTTP.
    #[inline]
    pub(crate) fn is_expected(&self, stream: &ClientStream, peer: IpAddr) -> bool {
        self.has_proxy_header(peer) || self.tls_of(stream).is_some() || self.http2 == Http2Mode::Always
    }

    /// The TLS with which this connection must begin.
    pub(crate) fn tls_of(&self, stream: &ClientStream) -> Option<&ListenerTls> {
        self.tls.as_deref().filter(|_| matches!(stream, ClientStream::Tcp(_)))
    }

    /// True if the connections of this peer begin with a header of the PROXY protocol.
    pub(crate) fn has_proxy_header(&self, peer: IpAddr) -> bool {
        !self.proxies.is_empty() && self.proxies.contains(canonical_ip(peer))
    }
}

impl PrefaceReader<'_> {
    /// Reads the header of the PROXY protocol, and returns the address of the client. `None` if there is no valid
    /// header in time.
    pub(crate) async fn read_proxy_header(&self, stream: &mut ClientStream, peer: SocketAddr) -> Option<SocketAddr> {
        self.first_byte(stream, peer).await?;
        self.watch.head.has_begun.set(true);
        let client = self.read(read_header(stream), peer, RejectionReason::ProxyHeader, "the header").await?;
        Some(client.unwrap_or(peer))
    }

    /// Does the TLS handshake, if the connection must begin with one. `None` if it fails, or isn't done in time.
    pub(crate) async fn open(
        &self,
        stream: ClientStream,
        address: SocketAddr,
    ) -> Option<Result<OpenedStream, PlainText>> {
        let Some(tls) = self.preface.tls_of(&stream) else {
            let is_http2 = match self.preface.http2 {
                Http2Mode::Always => {
                    self.first_byte(&stream, address).await?;
                    self.until_ended(stream.starts_with(http2::PREFACE_START)).await?
                }
                Http2Mode::Never | Http2Mode::Tls => false,
            };
            return Some(Ok(OpenedStream { stream, address, tls: None, is_http2 }));
        };
        let first = self.first_byte(&stream, address).await?;
        if first != HANDSHAKE_RECORD {
            let is_proxy_header = first == b'P' && self.until_ended(stream.starts_with(b"PROXY ")).await?;
            let why = if is_proxy_header { NOT_LISTED } else { "the connection doesn't begin with TLS" };
            let ip = canonical_ip(address.ip());
            self.rejections.record(ip, RejectionReason::PlainHttp, Some(StatusCode::BAD_REQUEST), why);
            return Some(Err(PlainText(stream)));
        }
        let handshake = tls.accept(stream, Arc::clone(self.watch));
        let stream = self.read(handshake, address, RejectionReason::TlsHandshake, "the handshake").await?;
        let tls = Some(Arc::new(TlsClient { subject: client_subject(&stream) }));
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(http2::ALPN_NAME);
        Some(Ok(OpenedStream { stream: ClientStream::Tls(Box::new(stream)), address, tls, is_http2 }))
    }

    /// Waits for the first byte, and leaves it in the stream. `None` if the client ends without one: health checks and
    /// browsers open connections that they don't use.
    async fn first_byte(&self, stream: &ClientStream, peer: SocketAddr) -> Option<u8> {
        if let Some(byte) = self.until_ended(stream.peek_byte()).await {
            return byte;
        }
        let mut byte = [0];
        let mut buf = ReadBuf::new(&mut byte);
        if !self.watch.is_aborted() {
            stream.read_now(&mut buf, RecvFlags::PEEK);
        }
        if buf.filled().is_empty() {
            if self.watch.is_ended_for(EndReason::Displaced) {
                self.rejections.record_silent(canonical_ip(peer.ip()));
            }
            return None;
        }
        self.watch.note_received(0);
        // The byte has arrived, but the runtime hasn't noticed it yet.
        stream.peek_byte().await.ok()?
    }

    /// Waits for a part that is no failure if it doesn't come. `None` if it takes too long, or the connection ends.
    async fn until_ended<T>(&self, part: impl Future<Output = io::Result<T>>) -> Option<T> {
        self.watch.until_phase_ends(part).await?.ok()
    }

    /// Reads a part that has begun, and records a failure.
    async fn read<T, E: Display>(
        &self,
        part: impl Future<Output = Result<T, E>>,
        address: SocketAddr,
        failed: RejectionReason,
        name: &str,
    ) -> Option<T> {
        let is_ended_for = |why| self.watch.is_ended_for(why);
        let (reason, why) = match self.watch.until_phase_ends(part).await {
            Some(Ok(read)) => {
                self.watch.restart_head();
                return Some(read);
            }
            Some(Err(error)) => (failed, error.to_string()),
            None if self.watch.is_aborted() => return None,
            None if is_ended_for(EndReason::Displaced) || is_ended_for(EndReason::HeadBytes) => {
                (RejectionReason::HeadDisplaced, HttpError::TooManyHeads.status_and_message().1.to_owned())
            }
            None => (failed, format!("{name} takes too long")),
        };
        self.rejections.record(canonical_ip(address.ip()), reason, None, &why);
        None
    }
}
