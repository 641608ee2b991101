//! Measures decisions over gRPC, on four connections with 64 streams each: Envoy's rate limit service against a bare server
//! that answers a constant, and against throttlecrab's own service.

use std::process::Command;

use prost::Message;
use tidegate_testkit::servers::free_port;

use super::server::{BenchServer, TempFolder};
use super::tls::parse_h2load;
use super::wrk::RequestCounts;
use super::{CLIENT_CORE, PROXY_CORE, THROTTLECRAB, compare, measure_pair, start_throttlecrab};
use crate::grpc::{Descriptor, Entry, Question, SHOULD_RATE_LIMIT};
use crate::options::Options;
use crate::programs::{ProgramError, bench_program, system_program, tidegate_program};
use crate::rows::BenchRow;
use crate::subjects::OURS;

const THROTTLE: &str = "/throttlecrab.RateLimiter/Throttle";
const BARE: &str = "bare tonic";
const KEY: &str = "user:1234567890";
/// The start of an answer that admits, after the five bytes of gRPC's frame: the field 1 of both services is 1.
const ADMITTED: [u8; 2] = [8, 1];

/// throttlecrab's question.
#[derive(Clone, PartialEq, Message)]
struct ThrottleQuestion {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(int32, tag = "2")]
    max_burst: i32,
    #[prost(int32, tag = "3")]
    count_per_period: i32,
    #[prost(int32, tag = "4")]
    period: i32,
    #[prost(int32, tag = "5")]
    quantity: i32,
}

/// Measures the row, if the options select it.
pub(super) fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    measure_pair(options, on_row, "gate/rls", |rows| run(options, rows));
}

fn run(options: &Options, rows: [&mut BenchRow; 2]) -> Result<(), ProgramError> {
    let folder = TempFolder::new()?;
    let entry = |key: &str, value: &str| Entry { key: key.to_owned(), value: value.to_owned() };
    let entries = vec![entry("action", "ask"), entry("key", KEY)];
    let question = Question { domain: "tidegate".to_owned(), descriptors: vec![Descriptor { entries }] };
    let throttle = ThrottleQuestion {
        key: KEY.to_owned(),
        max_burst: 1_000_000,
        count_per_period: 100_000_000,
        period: 60,
        quantity: 1,
    };
    let ours = folder.write_bytes("rls", &framed(&question))?;
    let theirs = folder.write_bytes("throttle", &framed(&throttle))?;
    let mut servers = Vec::new();
    for (name, start) in [
        (OURS, (|folder| start_tidegate(folder)) as fn(&TempFolder) -> _),
        (BARE, |_| start_bare()),
        (THROTTLECRAB, |_| start_throttlecrab("grpc")),
    ] {
        if options.wants_subject(name) {
            servers.push((name, start(&folder)));
        }
    }
    let seconds = if options.quick { 1 } else { 3 };
    compare(options, servers, rows, |name, server| {
        let (path, body) = if name == THROTTLECRAB { (THROTTLE, &theirs) } else { (SHOULD_RATE_LIMIT, &ours) };
        let url = format!("http://127.0.0.1:{}{path}", server.port);
        let body = body.display().to_string();
        ask_once(&url, &body)?;
        load(&url, &body, seconds)
    })
}

/// A message in gRPC's frame.
fn framed(message: &impl Message) -> Vec<u8> {
    let encoded = message.encode_to_vec();
    let length = u32::try_from(encoded.len()).unwrap_or(u32::MAX);
    [&[0], &length.to_be_bytes()[..], &encoded].concat()
}

/// Makes sure that the server admits, because the client that sends the load doesn't read answers.
fn ask_once(url: &str, body: &str) -> Result<(), ProgramError> {
    let output = Command::new(system_program("curl")?)
        .args(["-s", "--http2-prior-knowledge", "-H", "content-type: application/grpc", "-H", "te: trailers"])
        .args(["--data-binary", &format!("@{body}"), url])
        .output()
        .map_err(|error| ProgramError::new("curl", error))?;
    match output.stdout.get(5..7) {
        Some(start) if start == ADMITTED => Ok(()),
        _ => Err(ProgramError::new(url, format!("answered {:?}", output.stdout))),
    }
}

fn load(url: &str, body: &str, seconds: u32) -> Result<RequestCounts, ProgramError> {
    let program = "h2load";
    let output = Command::new(system_program("taskset")?)
        .args(["-c", CLIENT_CORE])
        .arg(system_program(program)?)
        .args(["-t", "1", "-c", "4", "-m", "64", "-D", &seconds.to_string(), "-d", body])
        .args(["-H", "content-type: application/grpc", "-H", "te: trailers", url])
        .output()
        .map_err(|error| ProgramError::new(program, error))?;
    let listing = String::from_utf8_lossy(&output.stdout);
    parse_h2load(&listing).ok_or_else(|| ProgramError::new(program, listing))
}

fn start_tidegate(folder: &TempFolder) -> Result<BenchServer, ProgramError> {
    let port = free_port();
    let policy = format!(
        "[rls]\nlisten = \"127.0.0.1:{port}\"\n[inbound.action.ask]\nkey = \"key\"\nlimit = \"1000000/s burst 1000000\"\n\
         [api]\nlisten = \"off\"\n[admin]\nlisten = \"off\"\n[log]\nlevel = \"error\"\n"
    );
    let file = folder.write("tidegate.toml", &policy)?;
    let arguments = ["serve".to_owned(), "--config".to_owned(), file.display().to_string()];
    BenchServer::start(PROXY_CORE, OURS, &tidegate_program()?, &arguments, port)
}

fn start_bare() -> Result<BenchServer, ProgramError> {
    let port = free_port();
    BenchServer::start(PROXY_CORE, BARE, &bench_program("bare-rls")?, &[port.to_string()], port)
}
