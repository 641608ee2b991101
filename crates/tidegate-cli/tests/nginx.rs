//! The gateway in front of a real nginx that refuses requests that come too fast. It runs alone, because on a machine
//! that is busy with other tests requests are sent late, and a rate doesn't make up for lost time.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tidegate_testkit::http_client::{HttpClient, get_request};
use tidegate_testkit::random;
use tidegate_testkit::servers::{ScratchDir, free_port, nginx};

use crate::common::{gateway, provider};

/// If a thread wakes later than this, the machine has stalled, and delayed requests follow each other closer than they
/// were sent. At 10 a second the gateway compensates for 15 ms, and other threads may have stalled for longer.
const STALLED: Duration = Duration::from_millis(10);

/// The seconds before and after a refusal in which a stall counts as its cause. Calls are 0.1 s apart.
const BEFORE: f64 = 0.3;
const AFTER: f64 = 0.05;

/// The maximum number of runs, in case the machine stalls.
const RUNS: usize = 5;

/// Repeats [`run`] until nginx refuses nothing, and returns that run's result. A refusal without a stall right before
/// it fails the test. So does a machine that stalls in every run.
fn through_nginx(limit_req: &str, limit: &str, seconds: u32) -> Option<Vec<(u16, f64)>> {
    for _ in 0..RUNS {
        let stalls = Stalls::watch();
        let log = run(10, limit_req, &format!("limit = \"{limit}\""), seconds)?;
        let stalls = stalls.end();
        let refused: Vec<usize> = (0..log.len()).filter(|index| log[*index].0 != 200).collect();
        if refused.is_empty() {
            return Some(log);
        }
        for index in refused {
            let (around, at) = (&log[index.saturating_sub(3)..log.len().min(index + 2)], log[index].1);
            let held_up = stalls.iter().any(|woke_at| (at - BEFORE..at + AFTER).contains(woke_at));
            assert!(held_up, "nginx refused: {around:?}; the machine stalled at {stalls:?}");
            println!("nginx refused when the machine had stalled: {around:?}");
        }
    }
    panic!("the machine stalls: nothing can be said of a rate");
}

/// Measures how late the kernel wakes a thread that repeatedly sleeps for a millisecond. One thread per processor,
/// because a virtual processor may stall alone.
struct Stalls {
    going: Arc<AtomicBool>,
    watchers: Vec<thread::JoinHandle<Vec<f64>>>,
}

impl Stalls {
    fn watch() -> Self {
        let going = Arc::new(AtomicBool::new(true));
        let processors = sched_getaffinity(None).unwrap();
        let watchers = (0..CpuSet::MAX_CPU)
            .filter(|processor| processors.is_set(*processor))
            .map(|processor| {
                let going = Arc::clone(&going);
                thread::spawn(move || Self::watch_one(processor, &going))
            })
            .collect();
        Self { going, watchers }
    }

    #[expect(clippy::disallowed_methods, reason = "it is the machine's own time that is watched")]
    fn watch_one(processor: usize, going: &AtomicBool) -> Vec<f64> {
        let mut alone = CpuSet::new();
        alone.set(processor);
        sched_setaffinity(None, &alone).unwrap();
        let (nap, mut stalls) = (Duration::from_millis(1), Vec::new());
        while going.load(Ordering::Relaxed) {
            let began = Instant::now();
            thread::sleep(nap);
            if began.elapsed() - nap > STALLED {
                stalls.push(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64());
            }
        }
        stalls
    }

    /// Returns the times at which a thread woke too late, in seconds as in nginx' log.
    fn end(mut self) -> Vec<f64> {
        self.going.store(false, Ordering::Relaxed);
        let stalls: Vec<f64> = self.watchers.drain(..).flat_map(|watcher| watcher.join().unwrap()).collect();
        println!("the machine stalled {} times", stalls.len());
        stalls
    }
}

impl Drop for Stalls {
    fn drop(&mut self) {
        self.going.store(false, Ordering::Relaxed);
    }
}

/// Runs 50 clients without pause through a gateway with these settings. The nginx behind it takes `rate` a second and
/// refuses more with 429. Returns nginx' log as statuses and seconds.
fn run(rate: u32, limit_req: &str, settings: &str, seconds: u32) -> Option<Vec<(u16, f64)>> {
    let upstream = free_port();
    let pages = ScratchDir::new();
    pages.write("page", "a page of nginx");
    // A page from a file, because `return` answers before `limit_req` applies.
    let server = format!(
        "log_format line '$status $msec';\nlimit_req_zone $server_port zone=api:1m rate={rate}r/s;\n\
         limit_req_status 429;\nserver {{\n  listen 127.0.0.1:{upstream};\n  \
         access_log access.log line buffer=64k flush=1s;\n  \
         location / {{ root {}; limit_req zone=api {limit_req}; }}\n}}",
        pages.path().display()
    );
    let server = nginx(&server, upstream)?;
    let settings = format!("{settings}\ntimeout = \"30s\"\nretry = {{ max_attempts = 1 }}");
    let (_gateway, port) = gateway(&provider(upstream, &settings), &[]);
    let going = Arc::new(AtomicBool::new(true));
    let clients: Vec<_> = (0..50)
        .map(|_| {
            let going = Arc::clone(&going);
            thread::spawn(move || {
                let mut client = HttpClient::connect(port).unwrap();
                let mut others = Vec::new();
                while going.load(Ordering::Relaxed) {
                    let answer = client.request(get_request("/api/page"));
                    if (answer.status, answer.body.as_str()) != (200, "a page of nginx") {
                        others.push(answer.head);
                    }
                }
                others
            })
        })
        .collect();
    thread::sleep(Duration::from_secs(u64::from(seconds)));
    going.store(false, Ordering::Relaxed);
    let others: Vec<String> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
    // nginx writes its log once a second, so that it seldom waits for the disk.
    thread::sleep(Duration::from_millis(1_300));
    let log = server.read_file("access.log");
    let line = |line: &str| {
        let (status, at) = line.split_once(' ').unwrap();
        (status.parse().unwrap(), at.parse().unwrap())
    };
    let log: Vec<(u16, f64)> = log.lines().map(line).collect();
    let refused = log.iter().filter(|(status, _)| *status != 200).count();
    let gaps = log.windows(2).map(|pair| pair[1].1 - pair[0].1);
    let (least, all) = (gaps.clone().fold(f64::MAX, f64::min), gaps.sum::<f64>());
    println!("{} requests in {all:.3} s, at least {least:.3} s apart; {refused} refused", log.len());
    assert!(refused > 0 || others.is_empty(), "{others:?}");
    let mut direct = HttpClient::connect(upstream)?;
    let refuses = (0..200).any(|_| direct.request(get_request("/page")).status == 429);
    assert!(refuses, "it refuses what is too fast");
    Some(log)
}

/// Checks that at least 95 % of the calls that nginx permits in this time succeeded; 90 % in the short run, in which
/// one stall of the machine has a larger share.
fn assert_used(log: &[(u16, f64)], seconds: u32, permitted: u32) {
    let served = log.iter().filter(|(_, at)| at - log[0].1 < f64::from(seconds)).count();
    let least = random::case_count(90, 95) * permitted;
    assert!(served * 100 >= least as usize, "{served} of {permitted} calls got through in {seconds} s");
}

#[test]
fn nginx_without_burst_accepts_a_paced_rate() {
    let seconds = random::case_count(10, 60);
    let Some(log) = through_nginx("", "10/s", seconds) else { return };
    assert_used(&log, seconds, seconds * 10);
}

#[test]
fn nginx_with_burst_accepts_a_bursty_rate() {
    let seconds = random::case_count(10, 60);
    let Some(log) = through_nginx("burst=10 nodelay", "10/s burst 10", seconds) else { return };
    assert_used(&log, seconds, seconds * 10 + 10);
}

/// Returns the share of nginx' rate that succeeded after a warm-up, and the share of refused calls then, in per cent.
fn found_pace(rate: u32, limit_req: &str) -> Option<(f64, f64)> {
    let (warm_up, seconds) = (random::case_count(12, 30), random::case_count(20, 60));
    let settings = format!("limit = \"{}/s\"\npace = \"adaptive\"", rate * 2);
    let log = run(rate, limit_req, &settings, warm_up + seconds)?;
    let began = log[0].1 + f64::from(warm_up);
    let after: Vec<u16> = log
        .iter()
        .filter(|(_, at)| (began..began + f64::from(seconds)).contains(at))
        .map(|(status, _)| *status)
        .collect();
    let served = after.iter().filter(|status| **status == 200).count();
    let percent = |part: usize, whole: usize| part as f64 * 100.0 / whole as f64;
    let found = (percent(served, (rate * seconds) as usize), percent(after.len() - served, after.len()));
    println!("after {warm_up} s: {:.1} % of {rate}/s got through, {:.1} % of calls were refused", found.0, found.1);
    Some(found)
}

/// Checks that enough calls succeed and few are refused, in a run without stalls.
fn assert_found(rate: u32, limit_req: &str) {
    for _ in 0..RUNS {
        let stalls = Stalls::watch();
        let Some((through, refused)) = found_pace(rate, limit_req) else { return };
        let stalls = stalls.end();
        if through >= 90.0 && refused < 2.0 {
            return;
        }
        assert!(!stalls.is_empty(), "{through} % through, {refused} % refused");
    }
    panic!("the machine stalls: nothing can be said of a pace");
}

#[test]
fn adaptive_pace_finds_half_the_configured_limit() {
    assert_found(20, "");
}

#[test]
fn adaptive_pace_finds_a_rate_with_burst() {
    assert_found(20, "burst=10 nodelay");
}
