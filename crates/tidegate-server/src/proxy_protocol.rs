//! The header of the PROXY protocol, in which a load balancer tells the address of its client: versions 1 and 2.

use std::io;
use std::net::{IpAddr, SocketAddr};

use ppp::{v1, v2};
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// The maximum size of a header of version 1, as the protocol says.
const MAX_V1_BYTES: usize = 107;
/// The maximum size of a header of version 2, with its TLVs. Load balancers send less than 1 KiB.
const MAX_V2_BYTES: usize = 4096;
/// The size of the signature of version 2. No header of version 1 is shorter.
const SIGNATURE_BYTES: usize = 12;
/// The size of version 2's signature and length.
const V2_HEAD_BYTES: usize = 16;

/// The reason for which a connection that begins with a header is refused if none is expected.
pub(crate) const NOT_LISTED: &str = "a header of the PROXY protocol, from a peer that isn't in proxy_protocol";

/// The reason why a header can't be believed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HeaderError {
    #[error("the header isn't complete: {0}")]
    Read(#[from] io::Error),
    #[error("the connection doesn't begin with a header")]
    Missing,
    #[error("the header is longer than {0} bytes")]
    TooLong(usize),
    #[error("the header is invalid: {0}")]
    Invalid(String),
}

/// True if a connection begins with a header, or with what is left of it without its first line ends, as version 2 has.
pub(crate) fn is_header(bytes: &[u8]) -> bool {
    let bytes = bytes.trim_ascii_start();
    bytes.starts_with(b"PROXY ") || bytes.starts_with(v2::PROTOCOL_PREFIX.trim_ascii_start())
}

/// Reads a header, and not one byte more. Returns the address of the client; `None` if the header says that the load
/// balancer itself is the client, or doesn't tell an IP address. TLVs are skipped.
///
/// # Errors
/// The header is missing, truncated, too long or invalid.
pub(crate) async fn read_header(stream: &mut (impl AsyncRead + Unpin)) -> Result<Option<SocketAddr>, HeaderError> {
    let mut header = vec![0; SIGNATURE_BYTES];
    stream.read_exact(&mut header).await?;
    if header == v2::PROTOCOL_PREFIX {
        header.resize(V2_HEAD_BYTES, 0);
        stream.read_exact(&mut header[SIGNATURE_BYTES..]).await?;
        let length = V2_HEAD_BYTES + usize::from(u16::from_be_bytes([header[14], header[15]]));
        if length > MAX_V2_BYTES {
            return Err(HeaderError::TooLong(MAX_V2_BYTES));
        }
        header.resize(length, 0);
        stream.read_exact(&mut header[V2_HEAD_BYTES..]).await?;
        return v2_source(&header);
    }
    if !header.starts_with(b"PROXY ") {
        return Err(HeaderError::Missing);
    }
    // The length isn't known, and the bytes behind the header belong to HTTP or TLS.
    while !header.ends_with(b"\n") {
        if header.len() == MAX_V1_BYTES {
            return Err(HeaderError::TooLong(MAX_V1_BYTES));
        }
        header.push(stream.read_u8().await?);
    }
    v1_source(&header)
}

fn v1_source(header: &[u8]) -> Result<Option<SocketAddr>, HeaderError> {
    let header = v1::Header::try_from(header).map_err(|error| HeaderError::Invalid(error.to_string()))?;
    match header.addresses {
        v1::Addresses::Unknown => Ok(None),
        v1::Addresses::Tcp4(tcp) => client(tcp.source_address.into(), tcp.source_port),
        v1::Addresses::Tcp6(tcp) => client(tcp.source_address.into(), tcp.source_port),
    }
}

fn v2_source(header: &[u8]) -> Result<Option<SocketAddr>, HeaderError> {
    let header = v2::Header::try_from(header).map_err(|error| HeaderError::Invalid(error.to_string()))?;
    match header.addresses {
        _ if header.command == v2::Command::Local => Ok(None),
        v2::Addresses::Unspecified | v2::Addresses::Unix(_) => Ok(None),
        v2::Addresses::IPv4(tcp) => client(tcp.source_address.into(), tcp.source_port),
        v2::Addresses::IPv6(tcp) => client(tcp.source_address.into(), tcp.source_port),
    }
}

/// The unspecified address can't be a client's; it stands for the peers of unix sockets.
fn client(ip: IpAddr, port: u16) -> Result<Option<SocketAddr>, HeaderError> {
    if ip.to_canonical().is_unspecified() {
        return Err(HeaderError::Invalid("the client's address is unspecified".to_owned()));
    }
    Ok(Some(SocketAddr::new(ip, port)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reads a header, and returns the client and the bytes behind the header.
    fn read(bytes: &[u8]) -> Result<(Option<SocketAddr>, usize), HeaderError> {
        let mut rest = bytes;
        let client = futures_util::FutureExt::now_or_never(read_header(&mut rest)).unwrap()?;
        Ok((client, rest.len()))
    }

    fn v2_header(command: v2::Command, source: SocketAddr, tlv_bytes: usize) -> Vec<u8> {
        let destination: SocketAddr = match source {
            SocketAddr::V4(_) => "10.0.0.1:443".parse().unwrap(),
            SocketAddr::V6(_) => "[2001:db8::1]:443".parse().unwrap(),
        };
        let addresses: v2::Addresses = (source, destination).into();
        let header = v2::Builder::with_addresses(v2::Version::Two | command, v2::Protocol::Stream, addresses);
        let header = if tlv_bytes > 0 { header.write_tlv(0xe0_u8, &vec![7; tlv_bytes]).unwrap() } else { header };
        header.build().unwrap()
    }

    #[test]
    fn both_versions_tell_the_client() {
        let v4: SocketAddr = "192.0.2.7:4711".parse().unwrap();
        let v6: SocketAddr = "[2001:db8::7]:4711".parse().unwrap();
        for (header, expected) in [
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 4711 443\r\n".to_vec(), Some(v4)),
            (b"PROXY TCP6 2001:db8::7 2001:db8::1 4711 443\r\n".to_vec(), Some(v6)),
            (b"PROXY UNKNOWN\r\n".to_vec(), None),
            (v2_header(v2::Command::Proxy, v4, 0), Some(v4)),
            (v2_header(v2::Command::Proxy, v6, 1000), Some(v6)),
            (v2_header(v2::Command::Local, v4, 3), None),
        ] {
            let whole = [&header[..], b"GET / HTTP/1.1\r\n"].concat();
            assert_eq!(read(&whole).unwrap(), (expected, 16), "{}", header.escape_ascii());
            for length in 1..header.len() {
                let error = read(&header[..length]).unwrap_err();
                assert!(matches!(error, HeaderError::Read(_)), "{length}: {error}");
            }
        }
    }

    #[test]
    fn invalid_headers_are_refused() {
        let long = format!("PROXY UNKNOWN {}\r\n", "x".repeat(MAX_V1_BYTES));
        let unspecified = v2_header(v2::Command::Proxy, "0.0.0.0:1".parse().unwrap(), 0);
        let oversized = v2_header(v2::Command::Proxy, "192.0.2.7:1".parse().unwrap(), MAX_V2_BYTES);
        let mut version3 = v2_header(v2::Command::Proxy, "192.0.2.7:1".parse().unwrap(), 0);
        version3[12] = 0x31;
        for (bytes, expected) in [
            (&b"GET / HTTP/1.1\r\n"[..], "doesn't begin"),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x00", "doesn't begin"),
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 4711\r\n", "invalid"),
            (b"PROXY TCP4 192.0.2.256 10.0.0.1 1 2\r\n", "invalid"),
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 4711 443\n", "invalid"),
            (b"PROXY TCP4 0.0.0.0 10.0.0.1 4711 443\r\n", "unspecified"),
            (long.as_bytes(), "longer than 107"),
            (&oversized, "longer than 4096"),
            (&unspecified, "unspecified"),
            (&version3, "invalid"),
        ] {
            let error = read(bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{}: {error}", bytes.escape_ascii());
        }
    }

    proptest! {
        #[test]
        fn written_headers_are_read_back(ip: IpAddr, port: u16, tlv_bytes in 0..3000_usize, rest: Vec<u8>) {
            prop_assume!(!ip.to_canonical().is_unspecified());
            let source = SocketAddr::new(ip, port);
            let header = [v2_header(v2::Command::Proxy, source, tlv_bytes), rest.clone()].concat();
            prop_assert_eq!(read(&header).unwrap(), (Some(source), rest.len()));
        }

        #[test]
        fn any_bytes_are_read_without_panic(start in 0..3_usize, head: [u8; 4], rest: Vec<u8>) {
            let start = [&b""[..], b"PROXY TCP4 ", v2::PROTOCOL_PREFIX][start];
            // A header that can be read is within the bounds.
            if let Ok((_, unread)) = read(&[start, &head, &rest].concat()) {
                prop_assert!(start.len() + head.len() + rest.len() - unread <= MAX_V2_BYTES);
            }
        }
    }
}
