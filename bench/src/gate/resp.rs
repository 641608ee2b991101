//! Measures calls with their own rate over the Redis protocol, against a Redis with a script that answers the same.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;

use super::server::{BenchServer, TempFolder, free_port};
use super::{CLIENT_CORE, CONNECTIONS, PROXY_CORE};
use crate::options::Options;
use crate::programs::{ProgramError, system_program, tidegate_program};
use crate::rows::{BenchRow, FigureUnit};
use crate::subjects::OURS;

/// The numbers of requests that each connection sends at once.
const PIPELINES: [u32; 3] = [1, 16, 64];
/// The number of keys.
const KEYS: &str = "100000";
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

/// A server, and the command that its client repeats.
struct Subject {
    name: &'static str,
    server: BenchServer,
    command: Vec<String>,
}

/// Measures the rows that the options select.
pub(super) fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    for pipeline in PIPELINES {
        let names = ["cpu", "requests"].map(|figure| format!("gate/resp-{pipeline}/{figure}"));
        if !names.iter().any(|name| options.wants(name)) {
            continue;
        }
        let [cpu, requests] = names;
        let mut cpu = BenchRow::new(cpu, FigureUnit::CpuSeconds);
        let mut requests = BenchRow::new(requests, FigureUnit::Requests);
        if let Err(failure) = run(options, pipeline, &mut cpu, &mut requests) {
            cpu.skipped.push(failure.to_string());
        }
        on_row(cpu);
        on_row(requests);
    }
}

fn run(options: &Options, pipeline: u32, cpu: &mut BenchRow, requests: &mut BenchRow) -> Result<(), ProgramError> {
    let folder = TempFolder::new()?;
    let mut running = Vec::new();
    for (name, start) in [(OURS, start_tidegate as fn(&TempFolder) -> _), (SCRIPT_NAME, start_redis)] {
        if options.wants_subject(name) {
            running.push((start(&folder)?, Vec::new(), Vec::new()));
        }
    }
    let (rounds, count) = if options.quick { (3, 100_000) } else { (9, 250_000 * pipeline.min(8)) };
    for (subject, ..) in &running {
        load(subject, pipeline, count / 4)?;
    }
    for round in 0..rounds {
        for place in 0..running.len() {
            let place = (place + round) % running.len();
            let (subject, spent, rates) = &mut running[place];
            let before = subject.server.cpu_seconds()?;
            let rate = load(subject, pipeline, count)?;
            spent.push((subject.server.cpu_seconds()? - before) / f64::from(count) * 100_000.0);
            rates.push(rate);
        }
    }
    for (subject, spent, rates) in running {
        cpu.push(subject.name, spent);
        requests.push(subject.name, rates);
    }
    Ok(())
}

/// Sends requests with redis-benchmark, and returns those that were answered per second.
fn load(subject: &Subject, pipeline: u32, count: u32) -> Result<f64, ProgramError> {
    let program = "redis-benchmark";
    let port = subject.server.port.to_string();
    let (connections, pipeline, count) = (CONNECTIONS.to_string(), pipeline.to_string(), count.to_string());
    let options = ["-p", &port, "-c", &connections, "-P", &pipeline, "-n", &count, "-r", KEYS, "--csv"];
    let output = Command::new(system_program("taskset")?)
        .args(["-c", CLIENT_CORE])
        .arg(system_program(program)?)
        .args(options)
        .args(&subject.command)
        .output()
        .map_err(|error| ProgramError::new(program, error))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let figures = text.lines().last().and_then(|line| line.rsplit("\",\"").nth(6).map(str::to_owned));
    figures
        .and_then(|rate| rate.parse().ok())
        .ok_or_else(|| ProgramError::new(program, format!("printed no rate: {text}")))
}

fn words(command: &str) -> Vec<String> {
    command.split(' ').map(str::to_owned).collect()
}

fn start_tidegate(folder: &TempFolder) -> Result<Subject, ProgramError> {
    let port = free_port()?;
    let policy = format!(
        "[resp]\nlisten = \"127.0.0.1:{port}\"\n[api]\nlisten = \"off\"\n[admin]\nlisten = \"off\"\n\
         [log]\nlevel = \"error\"\n"
    );
    let file = folder.write("tidegate.toml", &policy)?;
    let arguments = ["serve".to_owned(), "--config".to_owned(), file.display().to_string()];
    let server = BenchServer::start(PROXY_CORE, OURS, &tidegate_program()?, &arguments, port)?;
    Ok(Subject { name: OURS, server, command: words("CL.THROTTLE key:__rand_int__ 15 30 60") })
}

fn start_redis(folder: &TempFolder) -> Result<Subject, ProgramError> {
    let port = free_port()?;
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
    Ok(Subject { name: SCRIPT_NAME, server, command: words(&format!("EVALSHA {hash} 1 key:__rand_int__ 15 30 60")) })
}
