//! Measures calls with their own rate over the Redis protocol, against a Redis with a script that answers the
//! same, and throttlecrab's server.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;

use tidegate_testkit::servers::free_port;

use super::server::{BenchServer, TempFolder};
use super::wrk::RequestCounts;
use super::{CLIENT_CORE, CONNECTIONS, PROXY_CORE, THROTTLECRAB, compare, measure_pair, start_throttlecrab};
use crate::options::Options;
use crate::programs::{ProgramError, system_program, tidegate_program};
use crate::rows::BenchRow;
use crate::subjects::OURS;

/// The numbers of requests that each connection sends at once.
const PIPELINES: [u32; 3] = [1, 16, 64];
/// The number of keys.
const KEYS: &str = "100000";
/// The key, the burst, the count and the period.
const ARGUMENTS: [&str; 4] = ["key:__rand_int__", "15", "30", "60"];
const SCRIPT_NAME: &str = "Redis GCRA script";

/// A script with the arguments and the answer of `CL.THROTTLE`, in whole microseconds.
const SCRIPT: &str = "\
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local limit, interval, quantity = ARGV[1] + 1, math.floor(ARGV[3] * 1000000 / ARGV[2]), tonumber(ARGV[4] or 1)
local tat = tonumber(redis.call('GET', KEYS[1]) or now)
if tat < now then tat = now end
local tolerance, increment = interval * limit, interval * quantity
local next, limited, retry_after = tat + increment, 0, -1
if next - tolerance > now then
  limited = 1
  if increment <= tolerance then retry_after = math.ceil((next - tolerance - now) / 1000000) end
  next = tat
else
  redis.call('SET', KEYS[1], string.format('%.0f', next), 'PX', math.ceil((next - now) / 1000) + 1)
end
local remaining = math.floor((tolerance - (next - now)) / interval)
return {limited, limit, remaining, retry_after, math.ceil((next - now) / 1000000)}";

/// Measures the rows that the options select.
pub(super) fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    for pipeline in PIPELINES {
        measure_pair(options, on_row, &format!("gate/resp-{pipeline}"), |rows| run(options, pipeline, rows));
    }
}

fn run(options: &Options, pipeline: u32, rows: [&mut BenchRow; 2]) -> Result<(), ProgramError> {
    let folder = TempFolder::new()?;
    let mut script = String::new();
    let mut servers = Vec::new();
    if options.wants_subject(OURS) {
        servers.push((OURS, start_tidegate(&folder)));
    }
    if options.wants_subject(SCRIPT_NAME) {
        let redis = start_redis(&folder).map(|(server, hash)| {
            script = format!("EVALSHA {hash} 1");
            server
        });
        servers.push((SCRIPT_NAME, redis));
    }
    if options.wants_subject(THROTTLECRAB) {
        servers.push((THROTTLECRAB, start_throttlecrab("redis")));
    }
    let count = if options.quick { 100_000 } else { 250_000 * pipeline.min(8) };
    compare(options, servers, rows, |name, server| {
        let command = match name {
            SCRIPT_NAME => &script,
            THROTTLECRAB => "THROTTLE",
            _ => "CL.THROTTLE",
        };
        load(server, command, pipeline, count)
    })
}

/// Sends requests with redis-benchmark.
fn load(server: &BenchServer, command: &str, pipeline: u32, count: u32) -> Result<RequestCounts, ProgramError> {
    let program = "redis-benchmark";
    let port = server.port.to_string();
    let (connections, pipeline, requests) = (CONNECTIONS.to_string(), pipeline.to_string(), count.to_string());
    let options = ["-p", &port, "-c", &connections, "-P", &pipeline, "-n", &requests, "-r", KEYS, "--csv"];
    let output = Command::new(system_program("taskset")?)
        .args(["-c", CLIENT_CORE])
        .arg(system_program(program)?)
        .args(options)
        .args(command.split(' '))
        .args(ARGUMENTS)
        .output()
        .map_err(|error| ProgramError::new(program, error))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let figures = text.lines().last().and_then(|line| line.rsplit("\",\"").nth(6).map(str::to_owned));
    let rate: f64 = figures
        .and_then(|rate| rate.parse().ok())
        .ok_or_else(|| ProgramError::new(program, format!("printed no rate: {text}")))?;
    Ok(RequestCounts { requests: count.into(), seconds: f64::from(count) / rate })
}

fn start_tidegate(folder: &TempFolder) -> Result<BenchServer, ProgramError> {
    let port = free_port();
    let policy = format!(
        "[resp]\nlisten = \"127.0.0.1:{port}\"\n[api]\nlisten = \"off\"\n[admin]\nlisten = \"off\"\n\
         [log]\nlevel = \"error\"\n"
    );
    let file = folder.write("tidegate.toml", &policy)?;
    let arguments = ["serve".to_owned(), "--config".to_owned(), file.display().to_string()];
    BenchServer::start(PROXY_CORE, OURS, &tidegate_program()?, &arguments, port)
}

/// Starts a Redis, and returns the hash of its script.
fn start_redis(folder: &TempFolder) -> Result<(BenchServer, String), ProgramError> {
    let port = free_port();
    let file = folder.write("redis.conf", &format!("port {port}\nbind 127.0.0.1\nsave \"\"\n"))?;
    let program = system_program("redis-server")?;
    let server = BenchServer::start(PROXY_CORE, SCRIPT_NAME, &program, &[file.display().to_string()], port)?;
    let failed = |error| ProgramError::new("redis-server", error);
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).map_err(failed)?;
    let request = format!("*3\r\n$6\r\nSCRIPT\r\n$4\r\nLOAD\r\n${}\r\n{SCRIPT}\r\n", SCRIPT.len());
    stream.write_all(request.as_bytes()).map_err(failed)?;
    let mut reply = [0; 47];
    stream.read_exact(&mut reply).map_err(failed)?;
    let hash = String::from_utf8_lossy(&reply[5..45]).into_owned();
    Ok((server, hash))
}
