//! Calls through the gateway to a service behind nginx, whose workers become fewer and then more than before. The gateway
//! knows neither their number nor nginx's bound on connections.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::server::{BenchServer, TempFolder};
use super::viewers::read_response;
use super::{GateWork, PROXY_CORE, start_tidegate};
use crate::options::Options;
use crate::programs::ProgramError;
use crate::rows::{BenchRow, FigureUnit};
use crate::subjects::OURS;

/// The numbers of workers, one after the other.
const STEPS: [u32; 3] = [40, 10, 80];
/// The time that a worker takes for a request.
const WORK: Duration = Duration::from_millis(100);
/// The time after a step from which the throughput is measured.
const SETTLING: Duration = Duration::from_secs(5);
/// More clients than nginx admits connections.
const CLIENTS: u32 = 200;

const NGINX: &str = "\
    location / {
      limit_conn all 100;
      access_log {log} combined;
      proxy_pass http://service;
    }
  }
  limit_conn_zone $server_port zone=all:1m;
  proxy_http_version 1.1;
  proxy_set_header Connection '';
  upstream service {
    server 127.0.0.1:{port};
    keepalive 200;
";

/// Measures both rows, if the options select one.
pub(super) fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    let names = ["gate/steps/throughput", "gate/steps/refused"];
    if !names.iter().any(|name| options.wants(name)) {
        return;
    }
    let [mut throughput, mut refused] = names.map(|name| BenchRow::new(name, FigureUnit::Percent));
    match run(if options.quick { 8 } else { 20 }) {
        Ok((least, refusals)) => {
            throughput.push(OURS, vec![least]);
            refused.push(OURS, vec![refusals]);
        }
        Err(failure) => throughput.skipped.push(failure.to_string()),
    }
    on_row(throughput);
    on_row(refused);
}

/// Returns the least throughput after a step as a share of the capacity, and the share of requests that nginx refused, in
/// per cent.
fn run(seconds: u64) -> Result<(f64, f64), ProgramError> {
    let folder = TempFolder::new()?;
    let log = folder.write("requests.log", "")?;
    let pool = WorkerPool::start().map_err(|error| ProgramError::new("the service", error))?;
    let block = NGINX.replace("{port}", &pool.port.to_string()).replace("{log}", &log.display().to_string());
    let nginx = BenchServer::nginx(&folder, PROXY_CORE, "limit_conn", "", &block)?;
    let gateway = start_tidegate(&folder, GateWork::Outbound, nginx.port)?;
    let stop = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (stop, port) = (Arc::clone(&stop), gateway.port);
            thread::spawn(move || call(port, &stop))
        })
        .collect();
    let mut least = 100.0_f64;
    for workers in STEPS {
        pool.resize(workers);
        thread::sleep(SETTLING);
        let before = pool.load().served;
        let measured = Duration::from_secs(seconds) - SETTLING;
        thread::sleep(measured);
        let capacity = f64::from(workers) * measured.as_secs_f64() / WORK.as_secs_f64();
        least = least.min(f64::from(pool.load().served - before) / capacity * 100.0);
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        let ended = client.join().unwrap_or_else(|_| Err(io::Error::other("panicked")));
        ended.map_err(|error| ProgramError::new("a client", error))?;
    }
    drop(nginx);
    let log = std::fs::read_to_string(&log).map_err(|error| ProgramError::new("nginx's log", error))?;
    let refused = log.lines().filter(|line| line.contains("\" 503 ")).count();
    Ok((least, refused as f64 / log.lines().count().max(1) as f64 * 100.0))
}

/// Sends one request after the other until `stop`.
fn call(port: u16, stop: &AtomicBool) -> io::Result<()> {
    let mut connection = BufReader::new(TcpStream::connect((Ipv4Addr::LOCALHOST, port))?);
    while !stop.load(Ordering::Relaxed) {
        connection
            .get_mut()
            .write_all(format!("GET /api/page HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n").as_bytes())?;
        read_response(&mut connection)?;
    }
    Ok(())
}

#[derive(Default)]
struct PoolLoad {
    workers: u32,
    busy: u32,
    served: u32,
}

/// A service with a number of workers. Requests wait for one.
struct WorkerPool {
    load: Arc<(Mutex<PoolLoad>, Condvar)>,
    port: u16,
}

impl WorkerPool {
    fn start() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let pool = Self { load: Arc::default(), port: listener.local_addr()?.port() };
        let load = Arc::clone(&pool.load);
        thread::spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                let load = Arc::clone(&load);
                // The connection's end ends its thread.
                thread::spawn(move || serve(BufReader::new(connection), &load));
            }
        });
        Ok(pool)
    }

    fn load(&self) -> MutexGuard<'_, PoolLoad> {
        self.load.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn resize(&self, workers: u32) {
        self.load().workers = workers;
        self.load.1.notify_all();
    }
}

fn serve(mut connection: BufReader<TcpStream>, (load, freed): &(Mutex<PoolLoad>, Condvar)) -> io::Result<()> {
    let mut line = String::new();
    loop {
        line.clear();
        if connection.read_line(&mut line)? == 0 {
            return Ok(());
        }
        if line != "\r\n" {
            continue;
        }
        let lock = || load.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = freed.wait_while(lock(), |load| load.busy >= load.workers);
        waited.unwrap_or_else(PoisonError::into_inner).busy += 1;
        thread::sleep(WORK);
        {
            let mut load = lock();
            load.busy -= 1;
            load.served += 1;
        }
        freed.notify_one();
        connection.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")?;
    }
}
