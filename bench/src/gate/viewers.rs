//! People that look at the dashboard: each keeps a stream of events open and loads a page every second, as a browser
//! does.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::server::BenchServer;
use crate::programs::ProgramError;

/// The interval at which a browser loads the page again.
const INTERVAL: Duration = Duration::from_secs(1);

/// Viewers that look on until this value is dropped.
pub(super) struct Viewers {
    stop: Arc<AtomicBool>,
    pages: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Viewers {
    /// Starts this many viewers of the dashboard on a port.
    pub(super) fn start(count: u32, port: u16) -> Self {
        let (stop, pages) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let threads = (0..count).map(|number| {
            let (stop, pages) = (Arc::clone(&stop), Arc::clone(&pages));
            // Spread over the interval, as people come at any time.
            let first = INTERVAL * number / count;
            thread::spawn(move || {
                thread::sleep(first);
                // The number of pages shows if a viewer has failed.
                let _ = view(port, &stop, &pages);
            })
        });
        Self { threads: threads.collect(), stop, pages }
    }

    /// Returns an error if the viewers have loaded fewer pages in this time than they should.
    pub(super) fn check(&self, seconds: f64) -> Result<(), ProgramError> {
        let expected = (seconds - 2.0) * self.threads.len() as f64;
        let pages = self.pages.load(Ordering::Relaxed);
        if (pages as f64) < expected {
            return Err(ProgramError::new("the dashboard", format!("answered with {pages} pages")));
        }
        Ok(())
    }
}

impl Drop for Viewers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn view(port: u16, stop: &AtomicBool, pages: &AtomicU64) -> io::Result<()> {
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n");
    let mut events = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    events.write_all(get("/v1/events").as_bytes())?;
    let mut connection = BufReader::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port))?);
    while !stop.load(Ordering::Relaxed) {
        connection.get_mut().write_all(get("/").as_bytes())?;
        if !read_response(&mut connection)?.starts_with("HTTP/1.1 200 ") {
            return Err(io::Error::other("an error page"));
        }
        pages.fetch_add(1, Ordering::Relaxed);
        thread::sleep(INTERVAL);
    }
    Ok(())
}

/// Reads a response with a length. Returns its head.
pub(super) fn read_response(connection: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if connection.read_line(&mut head)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length = length.ok_or_else(|| io::Error::other("no length"))?.trim().parse().map_err(io::Error::other)?;
    io::copy(&mut connection.take(length), &mut io::sink())?;
    Ok(head)
}

/// Returns the share of one core that a server uses while this many viewers look at its dashboard, in per cent.
pub(super) fn cpu_share(server: &BenchServer, admin: u16, viewers: u32, seconds: u32) -> Result<f64, ProgramError> {
    let viewers = Viewers::start(viewers, admin);
    thread::sleep(INTERVAL);
    let before = server.cpu_seconds()?;
    thread::sleep(Duration::from_secs(seconds.into()));
    let after = server.cpu_seconds()?;
    viewers.check(f64::from(seconds) + 1.0)?;
    Ok((after - before) / f64::from(seconds) * 100.0)
}
