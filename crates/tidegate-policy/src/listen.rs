//! The addresses on which a listener accepts connections.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use ipnet::IpNet;

/// The address that stands for the peer of a unix socket, which has none. No TCP connection comes from it.
pub const UNIX_PEER: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// An address to listen on or to connect to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ListenAddress {
    /// An IP address and a port; port 0 is any free one.
    Tcp(SocketAddr),
    /// The absolute path of a unix socket: `unix:PATH`.
    Unix(PathBuf),
}

impl ListenAddress {
    /// True if every host that reaches the machine may reach the address.
    pub fn is_beyond_loopback(&self) -> bool {
        self.tcp().is_some_and(|address| !address.ip().to_canonical().is_loopback())
    }

    /// The IP address and port; `None` for a unix socket.
    pub fn tcp(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(address) => Some(*address),
            Self::Unix(_) => None,
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The addresses of a listener, and the treatment of connections to them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenConfig {
    /// The addresses; none if the listener is off. At most 16.
    pub addresses: Vec<ListenAddress>,
    /// The permissions of the unix sockets among them.
    pub unix: UnixSocketConfig,
    /// The peers whose connections begin with a header of the PROXY protocol. By default none.
    pub proxy_protocol: Vec<IpNet>,
    /// TLS on the IP addresses among the addresses. `None` is plain HTTP; unix sockets always speak plain HTTP.
    pub tls: Option<TlsConfig>,
    /// The connections that may use HTTP/2. Default [`Http2Mode::Tls`].
    pub http2: Http2Mode,
}

impl ListenConfig {
    /// True if the policy turns the listener off.
    pub fn is_off(&self) -> bool {
        self.addresses.is_empty()
    }

    /// True if no client connects without a certificate.
    pub fn requires_client_certificate(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some() && !tls.client_optional)
    }

    /// The IP addresses and ports among the addresses.
    pub fn tcp(&self) -> impl Iterator<Item = SocketAddr> {
        self.addresses.iter().filter_map(ListenAddress::tcp)
    }
}

impl fmt::Display for ListenConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, address) in self.addresses.iter().enumerate() {
            write!(f, "{}{address}", if index > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

/// `unix` in the section of a listener: the permissions of its unix sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnixSocketConfig {
    /// The permission bits. Default 0660; a client needs the right to write.
    pub mode: u32,
    /// The name or number of the owner. Default the user of the process.
    pub owner: Option<String>,
    /// The name or number of the group. Default the group of the process.
    pub group: Option<String>,
}

/// `http2` in the section of a listener: the connections that may use HTTP/2. HTTP/1.1 is always served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Http2Mode {
    /// None.
    Never,
    /// Those with TLS, by ALPN.
    #[default]
    Tls,
    /// Also those without TLS, if the client begins with HTTP/2 (RFC 9113 §3.3, "prior knowledge").
    Always,
}

/// `tls` in the section of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TlsConfig {
    /// The certificates, of which clients choose by name. The first one is for clients that name none of them. 1 to 64.
    pub certificates: Vec<CertificateFiles>,
    /// The PEM file of the certificates that sign those of clients. `None` asks no client for a certificate.
    pub client_ca: Option<PathBuf>,
    /// True if clients may have no certificate. Default false.
    pub client_optional: bool,
}

/// The PEM files of a certificate with its chain, and of its private key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CertificateFiles {
    /// The certificate, followed by those that sign it.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
}
