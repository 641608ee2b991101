//! Clients of servers with TLS: h2load for HTTP/2, and OpenSSL's s_time for handshakes.

use std::path::PathBuf;
use std::process::Command;

use super::server::TempFolder;
use super::wrk::RequestCounts;
use crate::programs::{ProgramError, system_program};

/// The streams of each connection of HTTP/2 at one time, and the connections.
const STREAMS: u32 = 10;
const CONNECTIONS: u32 = 5;

/// A client that connects by TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TlsLoad {
    /// Requests over HTTP/2, on connections that stay open.
    Http2,
    /// A connection for each request, one after the other, with a whole handshake.
    Handshakes,
    /// The same with a resumed session.
    ResumedHandshakes,
}

/// The files of a server's certificate and key.
pub(super) struct TlsFiles {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

impl TlsFiles {
    /// Makes a certificate of ECDSA P-256, which signs itself.
    pub(super) fn new(folder: &TempFolder) -> Result<Self, ProgramError> {
        let files = Self { certificate: folder.write("gate.pem", "")?, key: folder.write("gate.key", "")? };
        let output = Command::new(system_program("openssl")?)
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"])
            .args(["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout"])
            .arg(&files.key)
            .arg("-out")
            .arg(&files.certificate)
            .output()
            .map_err(|error| ProgramError::new("openssl", error))?;
        if !output.status.success() {
            return Err(ProgramError::new("openssl", String::from_utf8_lossy(&output.stderr)));
        }
        Ok(files)
    }
}

impl TlsLoad {
    /// Sends load to the page of a server for some seconds.
    ///
    /// # Errors
    ///
    /// If a request was lost or got another response, because the figures are invalid then.
    pub(super) fn run(self, core: &str, port: u16, path: &str, seconds: u32) -> Result<RequestCounts, ProgramError> {
        let name = if self == Self::Http2 { "h2load" } else { "openssl" };
        let mut command = Command::new(system_program("taskset")?);
        command.args(["-c", core]).arg(system_program(name)?);
        let (seconds, host) = (seconds.to_string(), format!("127.0.0.1:{port}"));
        match self {
            Self::Http2 => command
                .args(["-t", "1", "-c", &CONNECTIONS.to_string(), "-m", &STREAMS.to_string(), "-D", &seconds])
                .arg(format!("https://{host}{path}")),
            Self::Handshakes | Self::ResumedHandshakes => command
                .args(["s_time", "-tls1_3", "-connect", &host, "-time", &seconds, "-www", path])
                .arg(if self == Self::Handshakes { "-new" } else { "-reuse" }),
        };
        let output = command.output().map_err(|error| ProgramError::new(name, error))?;
        let listing = String::from_utf8_lossy(&output.stdout);
        let counts = if self == Self::Http2 { parse_h2load(&listing) } else { parse_s_time(&listing) };
        counts.ok_or_else(|| ProgramError::new(name, format!("{listing}{}", String::from_utf8_lossy(&output.stderr))))
    }
}

/// Reads `finished in 3.00s, 41150.00 req/s, …` and `requests: … 123450 succeeded, 0 failed, …`.
pub(super) fn parse_h2load(listing: &str) -> Option<RequestCounts> {
    let line = |start: &str| listing.lines().find_map(|line| line.strip_prefix(start));
    let seconds = line("finished in ")?.split_once("s,")?.0.parse().ok()?;
    let count = |name: &str| {
        let (before, _) = line("requests: ")?.split_once(name)?;
        before.rsplit([' ', ',']).find(|word| !word.is_empty())?.parse::<f64>().ok()
    };
    let is_answered = line("status codes: ")?.trim_end().ends_with("0 3xx, 0 4xx, 0 5xx");
    (is_answered && count("failed")? == 0.0).then_some(RequestCounts { requests: count("succeeded")?, seconds })
}

/// Reads `1234 connections in 4 real seconds, 321 bytes read per connection`. The page has at least 128 bytes.
fn parse_s_time(listing: &str) -> Option<RequestCounts> {
    let line = listing.lines().find(|line| line.contains(" real seconds, "))?;
    let mut words = line.split_whitespace();
    let requests = words.next()?.parse().ok()?;
    let seconds = words.nth(2)?.parse().ok()?;
    let bytes: f64 = words.nth(2)?.parse().ok()?;
    (requests > 0.0 && bytes >= 128.0).then_some(RequestCounts { requests, seconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    const H2LOAD: &str = "\
finished in 3.00s, 41150.00 req/s, 7.50MB/s
requests: 123450 total, 123500 started, 123450 done, 123450 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 123450 2xx, 0 3xx, 0 4xx, 0 5xx
";

    #[test]
    fn counts_of_tls_clients_are_parsed() {
        assert_eq!(parse_h2load(H2LOAD), Some(RequestCounts { requests: 123_450.0, seconds: 3.0 }));
        assert_eq!(parse_h2load(&H2LOAD.replace("0 failed", "1 failed")), None);
        assert_eq!(parse_h2load(&H2LOAD.replace("0 4xx", "1 4xx")), None);
        let listing = "\n4210 connections in 1.93s; 2181.35 connections/user sec, bytes read 1\n\
            4210 connections in 4 real seconds, 293 bytes read per connection\n";
        assert_eq!(parse_s_time(listing), Some(RequestCounts { requests: 4210.0, seconds: 4.0 }));
        assert_eq!(parse_s_time(&listing.replace("293 bytes", "0 bytes")), None);
    }
}
