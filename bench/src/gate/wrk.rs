//! wrk: one thread, and a script that prints the counts.

use super::server::TempFolder;
use crate::programs::{ProgramError, system_program};
use std::path::PathBuf;
use std::process::Command;

/// The client's requests, and the expected responses.
#[derive(Clone, Copy, Debug)]
pub(super) enum WrkRequest {
    /// A page, which is refused or not.
    Get { path: &'static str, refused: bool },
    /// A request with a JSON body.
    Post { path: &'static str, body: &'static str },
}

/// The counts of a client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RequestCounts {
    pub(super) requests: f64,
    pub(super) seconds: f64,
}

const REPORT_SCRIPT: &str = r#"
done = function(summary)
  local errors = summary.errors
  print("requests " .. summary.requests)
  print("microseconds " .. summary.duration)
  print("refused " .. errors.status)
  print("lost " .. errors.connect + errors.read + errors.write + errors.timeout)
end
"#;

/// A client that is ready to run.
pub(super) struct WrkClient {
    taskset: PathBuf,
    wrk: PathBuf,
    core: &'static str,
    connections: u32,
    script: PathBuf,
    load: WrkRequest,
    scheme: &'static str,
}

impl WrkClient {
    /// Creates a client of this many connections, each of which sends its next request after a response.
    pub(super) fn new(
        folder: &TempFolder,
        core: &'static str,
        connections: u32,
        load: WrkRequest,
    ) -> Result<Self, ProgramError> {
        let script = match load {
            WrkRequest::Get { .. } => REPORT_SCRIPT.to_owned(),
            WrkRequest::Post { body, .. } => format!(
                "wrk.method = 'POST'\nwrk.body = [[{body}]]\nwrk.headers['Content-Type'] = 'application/json'\n{REPORT_SCRIPT}"
            ),
        };
        Ok(Self {
            taskset: system_program("taskset")?,
            wrk: system_program("wrk")?,
            core,
            connections,
            script: folder.write("client.lua", &script)?,
            load,
            scheme: "http",
        })
    }

    /// The same client with TLS.
    pub(super) fn over_tls(self) -> Self {
        Self { scheme: "https", ..self }
    }

    /// Sends load to the server for some seconds.
    ///
    /// # Errors
    ///
    /// If a request was lost, or got an unexpected response, because the figures are invalid then.
    pub(super) fn run(&self, port: u16, seconds: u32) -> Result<RequestCounts, ProgramError> {
        let (WrkRequest::Get { path, .. } | WrkRequest::Post { path, .. }) = self.load;
        let output = Command::new(&self.taskset)
            .args(["-c", self.core])
            .arg(&self.wrk)
            .args(["-t", "1", "-c", &self.connections.to_string(), "-d", &format!("{seconds}s"), "-s"])
            .arg(&self.script)
            .arg(format!("{}://127.0.0.1:{port}{path}", self.scheme))
            .output()
            .map_err(|error| ProgramError::new("wrk", error))?;
        let listing = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            return Err(ProgramError::new("wrk", String::from_utf8_lossy(&output.stderr)));
        }
        parse_listing(&listing, matches!(self.load, WrkRequest::Get { refused: true, .. }))
    }
}

fn parse_listing(listing: &str, refused: bool) -> Result<RequestCounts, ProgramError> {
    let read = |name| crate::measure::read_field(listing, name) as f64;
    let (requests, lost) = (read("requests "), read("lost "));
    if requests == 0.0 {
        return Err(ProgramError::new("wrk", "no request was answered"));
    }
    if lost > 0.0 {
        return Err(ProgramError::new("wrk", format!("{lost} requests were lost")));
    }
    // The first request of an hour is admitted even if the rest is refused.
    let (met, wanted) = (read("refused "), if refused { requests } else { 0.0 });
    if (met - wanted).abs() > 1.0 {
        return Err(ProgramError::new("wrk", format!("{met} of {requests} were refused, not {wanted}")));
    }
    Ok(RequestCounts { requests, seconds: read("microseconds ") / 1e6 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(refused: u32, lost: u32) -> String {
        format!("Running\nrequests 1000\nmicroseconds 500000\nrefused {refused}\nlost {lost}\n")
    }

    #[test]
    fn wrk_counts_are_parsed() {
        let answered = parse_listing(&listing(0, 0), false).expect("all were admitted");
        assert_eq!((answered.requests, answered.seconds), (1000.0, 0.5));
    }

    #[test]
    fn unexpected_response_counts_are_errors() {
        assert!(parse_listing(&listing(2, 0), false).is_err());
        assert!(parse_listing(&listing(999, 0), true).is_ok());
        assert!(parse_listing(&listing(998, 0), true).is_err());
        assert!(parse_listing(&listing(0, 1), false).is_err());
        assert!(parse_listing("", false).is_err());
    }
}
