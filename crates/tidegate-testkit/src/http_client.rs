//! An HTTP client of one connection that sends exact bytes.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// The longest wait for a response.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// A keep-alive client of one connection.
#[derive(Debug)]
pub struct HttpClient(TcpStream);

/// A response.
#[derive(Clone, Debug)]
pub struct HttpResponse {
    /// The status.
    pub status: u16,
    /// True if it is the connection's last response.
    pub closes_connection: bool,
    /// The head in lower case.
    pub head: String,
    /// The body as it is on the wire.
    pub body: String,
}

impl HttpResponse {
    /// Returns a header's value in lower case, the first if there are several. `name` must be in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .find_map(|line| line.split_once(": ").filter(|(found, _)| *found == name))
            .map(|(_, value)| value)
    }
}

impl HttpClient {
    /// Connects on loopback; `None` if no process listens.
    ///
    /// # Panics
    /// If the connection's options can't be set.
    pub fn connect(port: u16) -> Option<Self> {
        let stream = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).ok()?;
        stream.set_nodelay(true).expect("a connection without delay");
        stream.set_read_timeout(Some(READ_TIMEOUT)).expect("a connection with a time-out");
        Some(Self(stream))
    }

    /// Sends these bytes.
    ///
    /// # Panics
    /// If the connection has ended.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.write_all(bytes.as_ref()).expect("a connection that wasn't said to be over takes a request");
    }

    /// Sends a request and reads its response.
    ///
    /// # Panics
    /// If there is no response in time.
    pub fn request(&mut self, request: impl AsRef<[u8]>) -> HttpResponse {
        self.send(request);
        self.read_response()
    }

    /// Sends the first request on a connection and reads its response. `None` if the server hadn't accepted the
    /// connection yet. The system makes connections for a listener until it closes, and resets those that the listener
    /// hadn't accepted.
    ///
    /// # Panics
    /// If there is no response in time.
    pub fn try_first_request(&mut self, request: &str) -> Option<HttpResponse> {
        let reset = |error: io::Error| matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe);
        if self.0.write_all(request.as_bytes()).is_err_and(reset) || self.0.peek(&mut [0]).is_err_and(reset) {
            return None;
        }
        Some(self.read_response())
    }

    /// Reads the next response.
    ///
    /// # Panics
    /// If there is no response in time.
    pub fn read_response(&mut self) -> HttpResponse {
        let mut bytes = Vec::new();
        let mut buffer = [0; 16 << 10];
        loop {
            if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
                let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
                let body = &bytes[end + 4..];
                let chunked = head.contains("transfer-encoding: chunked");
                let length = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
                if (chunked && body.ends_with(b"0\r\n\r\n")) || (!chunked && body.len() >= length.unwrap_or(0)) {
                    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
                    return HttpResponse {
                        status,
                        closes_connection: head.contains("connection: close"),
                        body: String::from_utf8_lossy(body).into_owned(),
                        head,
                    };
                }
            }
            let count = match self.0.read(&mut buffer) {
                // A read with a timeout isn't continued after a signal.
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                read => read.expect("an answer in time"),
            };
            assert!(count > 0, "the connection ended without the answer: {}", String::from_utf8_lossy(&bytes));
            bytes.extend_from_slice(&buffer[..count]);
        }
    }
}

/// Returns a GET request with a `Host` header only.
pub fn get_request(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
}
