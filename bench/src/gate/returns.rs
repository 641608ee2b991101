//! Many clients with one call each at a limit that they share: the time until the last is served, and the requests that
//! they need, by the way in which they come back after a refusal.

use std::io::{self, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::server::{BenchServer, TempFolder};
use super::viewers::read_response;
use super::{CLIENT_CORE, GateWork, UPSTREAM, start_tidegate_with};
use crate::options::Options;
use crate::programs::ProgramError;
use crate::rows::{BenchRow, FigureUnit};
use crate::subjects::OURS;

const POLICY: &str = r#"
[inbound]
listen = "127.0.0.1:{proxy}"
upstream = "http://127.0.0.1:{upstream}"

[inbound.action.shared]
match = { path = "/*" }
key = "action"
limit = "{limit}"
{terms}
[api]
listen = "off"

[admin]
listen = "off"
"#;

/// The way in which a client comes back.
#[derive(Clone, Copy, Debug)]
enum Return {
    /// At the instant of its reservation, with the token.
    Reservation,
    RetryAfter,
    /// After a random part of a wait that doubles from 500 ms to 30 s.
    FullJitter,
    EverySecond,
}

/// Measures the rows that the options select: the time until the last client is served, over the least possible in per
/// cent, and the most requests of one client.
pub(super) fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    let whole: &[_] = &[
        (OURS, "reserve = { share = 1, by = \"header:x-client\" }", Return::Reservation),
        ("Retry-After", "", Return::RetryAfter),
        ("full jitter", "", Return::FullJitter),
        ("every second", "", Return::EverySecond),
    ];
    let half: &[_] = &[(OURS, "reserve = { share = 0.5, by = \"header:x-client\" }", Return::Reservation)];
    for (name, clients, rate, least, subjects) in [
        ("100", 100, 10, 9.0, whole),
        ("1k", 1000, 100, 9.0, whole),
        ("half-100", 100, 10, 18.0, half),
        ("half-1k", 1000, 100, 18.0, half),
    ] {
        let names = ["time", "requests"].map(|measure| format!("gate/returns/{name}/{measure}"));
        if !names.iter().any(|name| options.wants(name)) {
            continue;
        }
        let [time, requests] = names;
        let (mut time, mut requests) =
            (BenchRow::new(time, FigureUnit::Percent), BenchRow::new(requests, FigureUnit::Count));
        for (subject, terms, way) in subjects.iter().filter(|(subject, ..)| options.wants_subject(subject)) {
            match run(clients, rate, terms, *way) {
                Ok((seconds, most)) => {
                    time.push(subject, vec![seconds / least * 100.0]);
                    requests.push(subject, vec![f64::from(most)]);
                }
                Err(failure) => time.skipped.push(failure.to_string()),
            }
        }
        on_row(time);
        on_row(requests);
    }
}

/// Returns the seconds until the last client was served, and the most requests of one.
fn run(clients: u32, rate: u32, terms: &str, way: Return) -> Result<(f64, u32), ProgramError> {
    let folder = TempFolder::new()?;
    let upstream = BenchServer::nginx(&folder, CLIENT_CORE, "upstream", "", UPSTREAM)?;
    let policy = POLICY.replace("{limit}", &format!("{rate}/s burst {rate}")).replace("{terms}", terms);
    let gate = start_tidegate_with(&folder, GateWork::Admitted, upstream.port, &policy)?;
    let start = Arc::new(Barrier::new(clients as usize));
    let threads: Vec<_> = (0..clients)
        .map(|client| {
            let (start, port) = (Arc::clone(&start), gate.port);
            thread::spawn(move || call(client, port, way, &start))
        })
        .collect();
    let (mut last, mut most) = (0.0_f64, 0);
    for thread in threads {
        let served = thread.join().unwrap_or_else(|_| Err(io::Error::other("panicked")));
        let (seconds, requests) = served.map_err(|error| ProgramError::new("a client", error))?;
        (last, most) = (last.max(seconds), most.max(requests));
    }
    Ok((last, most))
}

/// Calls until it is served. Returns the time since the start in seconds, and the number of requests.
fn call(client: u32, port: u16, way: Return, start: &Barrier) -> io::Result<(f64, u32)> {
    let mut connection = BufReader::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port))?);
    let mut random = SmallRng::seed_from_u64(client.into());
    let (mut token, mut requests) = (String::new(), 0);
    start.wait();
    let begin = Instant::now();
    loop {
        let request = format!("GET / HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nx-client: {client}\r\n{token}\r\n");
        connection.get_mut().write_all(request.as_bytes())?;
        requests += 1;
        let head = read_response(&mut connection)?;
        let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        if head.starts_with("HTTP/1.1 200 ") {
            return Ok((begin.elapsed().as_secs_f64(), requests));
        }
        let retry_after =
            field("retry-after:").and_then(|text| text.parse().ok()).map_or(Duration::ZERO, Duration::from_secs);
        let wait = match way {
            Return::Reservation => match field("tidegate-reservation:").and_then(|text| text.split_once(";wait=")) {
                Some((given, wait)) => {
                    token = format!("tidegate-reservation: {given}\r\n");
                    Duration::from_millis(wait.parse().map_err(io::Error::other)?)
                }
                None => retry_after,
            },
            Return::RetryAfter => retry_after,
            Return::FullJitter => {
                let most = Duration::from_millis(500 << requests.min(10)).min(Duration::from_secs(30));
                most.mul_f64(random.random())
            }
            Return::EverySecond => Duration::from_secs(1),
        };
        thread::sleep(wait);
    }
}
