//! Two gates over one Redis, through every kind of its failure.
#![expect(clippy::disallowed_methods, reason = "what a decision takes is real time")]

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use tidegate_testkit::http_client::HttpClient;
use tidegate_testkit::random;
use tidegate_testkit::servers::{
    ChildProcess, RedisCluster, RedisSentinelGroup, RedisServer, RedisServerOptions, ScratchDir, free_port,
};

/// Decisions per second, over both gates.
const LOAD: u32 = 1_000;
/// The number of connections that request them.
const CONNECTIONS: u32 = 4;
/// The limit per second.
const LIMIT: usize = 100;

const POLICY: &str = "
[inbound.action.api]
key = [\"key\"]
limit = \"100 per 1s\"

[inbound.action.day]
key = [\"key\"]
limit = \"1000 per calendar day\"

[inbound.action.careful]
key = [\"key\"]
limit = \"1000000 per 60s\"
on_outage = \"deny\"
";

struct Gate {
    running: ChildProcess,
    port: u16,
}

impl Gate {
    fn start(store: &str) -> Self {
        let port = free_port();
        let scratch = ScratchDir::new();
        let file = scratch.write("tidegate.toml", POLICY);
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command
            .args(["serve", "--config"])
            .arg(file)
            .env("TIDEGATE__STORE__URL", store)
            .env("TIDEGATE__API__LISTEN", format!("127.0.0.1:{port}"))
            .env("TIDEGATE__ADMIN__LISTEN", "off");
        Self { running: ChildProcess::start(command, scratch, port), port }
    }

    fn ask(&self, action: &str, cost: u64) -> (u16, String) {
        let answer = HttpClient::connect(self.port).expect("the gate listens").request(question(action, "k", cost));
        (answer.status, answer.body)
    }

    fn left(&self, action: &str) -> u64 {
        let path = format!("/v1/status?action={action}&key=k");
        let answer = HttpClient::connect(self.port)
            .expect("the gate listens")
            .request(tidegate_testkit::http_client::get_request(&path));
        let decision: serde_json::Value = serde_json::from_str(&answer.body).expect("a decision");
        decision["remaining"].as_u64().expect("what is left")
    }
}

fn question(action: &str, key: &str, cost: u64) -> String {
    let body = format!("{{\"action\":\"{action}\",\"key\":\"{key}\",\"cost\":{cost}}}");
    format!("POST /v1/check HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// A decision: when it was requested, its duration and its status.
#[derive(Clone, Copy)]
struct Asked {
    at: Instant,
    took: Duration,
    status: u16,
}

/// Sends requests to both gates at an even pace until `stop`.
fn load(ports: [u16; 2], stop: &AtomicBool) -> Vec<Asked> {
    thread::scope(|scope| {
        let threads: Vec<_> = (0..CONNECTIONS)
            .map(|connection| {
                scope.spawn(move || {
                    let mut client = HttpClient::connect(ports[connection as usize % 2]).expect("the gate listens");
                    let (start, pace) = (Instant::now(), Duration::from_secs(1) * CONNECTIONS / LOAD);
                    let mut all = Vec::new();
                    for turn in 0.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        sleep((start + pace * turn).saturating_duration_since(Instant::now()));
                        let at = Instant::now();
                        let status = client.request(question("api", "k", 1)).status;
                        all.push(Asked { at, took: at.elapsed(), status });
                    }
                    all
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a client")).collect()
    })
}

/// The time by which responses reach a client closer together than they were sent, on a busy machine.
const BLUR: Duration = Duration::from_millis(100);

/// The maximum number of calls admitted in any second between these times.
fn densest(asked: &[Asked], from: Instant, to: Instant) -> usize {
    let mut admitted: Vec<Instant> = asked
        .iter()
        .filter(|asked| asked.status == 200)
        .map(|asked| asked.at + asked.took)
        .filter(|at| (from..to).contains(at))
        .collect();
    admitted.sort_unstable();
    let second = Duration::from_secs(1) - BLUR;
    let from = |at: usize| admitted[at..].partition_point(|later| *later - admitted[at] < second);
    (0..admitted.len()).map(from).max().unwrap_or(0)
}

/// The failure of the server.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Killed,
    Frozen,
    Full,
    ReadOnly,
    FailedOver,
}

/// The store that the gates share.
enum Shared {
    One(RedisServer),
    Pair(RedisSentinelGroup),
}

impl Shared {
    /// Starts a store for a failure that lasts about this long.
    fn start(failure: Failure, outage: Duration) -> Option<Self> {
        Some(match failure {
            Failure::FailedOver => Self::Pair(RedisSentinelGroup::start(outage)?),
            _ => Self::One(RedisServer::start_with(RedisServerOptions {
                durable: true,
                ..RedisServerOptions::default()
            })?),
        })
    }

    fn url(&self) -> String {
        match self {
            Self::One(redis) => redis.url(),
            Self::Pair(pair) => pair.url(),
        }
    }

    fn inject(&mut self, failure: Failure) {
        let redis = match self {
            Self::One(redis) => redis,
            Self::Pair(pair) => &mut pair.master,
        };
        match failure {
            Failure::Killed | Failure::FailedOver => redis.kill(),
            Failure::Frozen => redis.freeze(),
            Failure::Full => drop(redis.command(&["CONFIG", "SET", "maxmemory", "1"])),
            Failure::ReadOnly => drop(redis.command(&["REPLICAOF", "127.0.0.1", "1"])),
        }
    }

    /// Brings the store back, and returns the time since when it is back.
    fn end(&mut self, failure: Failure) -> Instant {
        let since = Instant::now();
        match (failure, self) {
            (Failure::FailedOver, Self::Pair(pair)) => {
                while !pair.is_failed_over() {
                    assert!(since.elapsed() < Duration::from_secs(20), "no failover");
                    sleep(Duration::from_millis(10));
                }
                return Instant::now();
            }
            (_, Self::Pair(_)) => unreachable!("a pair fails over"),
            (Failure::Killed | Failure::FailedOver, Self::One(redis)) => redis.restart(),
            (Failure::Frozen, Self::One(redis)) => redis.thaw(),
            (Failure::Full, Self::One(redis)) => drop(redis.command(&["CONFIG", "SET", "maxmemory", "0"])),
            (Failure::ReadOnly, Self::One(redis)) => drop(redis.command(&["REPLICAOF", "NO", "ONE"])),
        }
        since
    }
}

/// Ends the load when it is dropped, so that a failed check ends the test instead of waiting for the load.
struct LoadGuard<'a>(&'a AtomicBool);

impl Drop for LoadGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// One test at a time, because the duration of decisions is measured.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn check_survival(failure: Failure) {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let outage = Duration::from_secs(if random::is_full_run() { 10 } else { 4 });
    let Some(mut redis) = Shared::start(failure, outage) else { return };
    let gates = [Gate::start(&redis.url()), Gate::start(&redis.url())];
    // Until both know each other.
    sleep(Duration::from_secs(3));
    assert_eq!(gates[0].ask("day", 10).0, 200);
    // A killed server loses writes of up to the last second.
    sleep(Duration::from_millis(1_500));

    let stop = AtomicBool::new(false);
    let ports = gates.each_ref().map(|gate| gate.port);
    let (asked, failed_at, restored_at) = thread::scope(|scope| {
        let loading = scope.spawn(|| load(ports, &stop));
        let load_guard = LoadGuard(&stop);
        sleep(Duration::from_secs(2));
        let failed_at = Instant::now();
        redis.inject(failure);
        sleep(outage / 2);
        for (gate, cost) in gates.iter().zip([7, 5]) {
            assert_eq!(gate.ask("day", cost).0, 200);
            assert_eq!(gate.ask("careful", 1).0, 503, "{failure:?}");
        }
        sleep(outage / 2);
        let restored_at = redis.end(failure);
        for gate in &gates {
            gate.running.wait_for_line("the store is back", Duration::from_secs(2));
        }
        sleep(Duration::from_secs(2));
        drop(load_guard);
        (loading.join().expect("the load"), failed_at, restored_at)
    });

    let wrong: Vec<u16> =
        asked.iter().map(|asked| asked.status).filter(|status| ![200, 429].contains(status)).collect();
    assert!(wrong.is_empty(), "{failure:?}: {wrong:?}");
    // From the time when the first response was overdue.
    let known = failed_at + Duration::from_millis(60);
    let mut took: Vec<Duration> = asked.iter().filter(|asked| asked.at > known).map(|asked| asked.took).collect();
    took.sort_unstable();
    let p99 = took[took.len() * 99 / 100];
    assert!(p99 <= Duration::from_millis(20), "{failure:?}: p99 {p99:?} of {} decisions", took.len());
    let during = asked.iter().filter(|asked| asked.status == 200 && (known..restored_at).contains(&asked.at)).count();
    let lasted = (restored_at - known).as_secs_f64();
    // A full limit is admitted as each of its windows begins, so the last second counts in full.
    let (least, most) = (60.0 * lasted, 110.0 * lasted.ceil());
    assert!((least..=most).contains(&(during as f64)), "{failure:?}: {during} admitted in {lasted} s");
    let (first, last) = (asked[0].at, Instant::now());
    let most = densest(&asked, first, last);
    assert!(most <= 2 * LIMIT, "{failure:?}: {most} in a second");
    let before = asked.iter().filter(|asked| asked.status == 200 && asked.at < failed_at).count();
    let fair = ((failed_at - first).as_secs_f64() * LIMIT as f64) as usize;
    // One window more, and half of one for a machine that delayed the server's response. Independent gates would
    // together admit twice as much.
    assert!((fair * 8 / 10..=fair + LIMIT * 3 / 2).contains(&before), "{failure:?}: {before} before, of {fair}");
    for gate in &gates {
        assert_eq!(
            (gate.running.line_count("the store is down"), gate.running.line_count("the store is back")),
            (1, 1),
            "{failure:?}"
        );
    }
    assert_eq!(gates[1].left("day"), 1_000 - 10 - 7 - 5, "{failure:?}: what was used meanwhile");
    assert_eq!(gates[0].ask("careful", 1).0, 200, "{failure:?}");
}

#[test]
fn the_gate_survives_a_killed_server() {
    check_survival(Failure::Killed);
}

#[test]
fn the_gate_survives_a_frozen_server() {
    check_survival(Failure::Frozen);
}

#[test]
fn the_gate_survives_a_full_server() {
    check_survival(Failure::Full);
}

#[test]
fn the_gate_survives_a_read_only_server() {
    check_survival(Failure::ReadOnly);
}

#[test]
fn the_gate_survives_a_failover() {
    check_survival(Failure::FailedOver);
}

#[test]
fn a_missing_store_server_is_reported() {
    let scratch = ScratchDir::new();
    let policy = scratch.write("tidegate.toml", POLICY);
    let port = free_port();
    let run = |env: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["serve", "--config"]).arg(&policy).envs(env.iter().copied());
        command
    };
    let url = format!("redis://:hunter2@127.0.0.1:{port}");
    let output = run(&[("TIDEGATE__STORE__URL", &url)]).output().expect("tidegate runs");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{errors}");
    let named = format!("the store redis://127.0.0.1:{port} can't be reached: ");
    assert!(errors.contains(&named) && errors.contains("store.hash_key"), "{errors}");
    assert!(!errors.contains("hunter2"), "{errors}");

    let (api, admin) = (free_port(), free_port());
    let [listen, admin_listen] = [api, admin].map(|port| format!("127.0.0.1:{port}"));
    let env = [
        ("TIDEGATE__STORE__URL", url.as_str()),
        ("TIDEGATE__STORE__HASH_KEY", "env:GATE_HASH_KEY"),
        ("GATE_HASH_KEY", "0123456789abcdef0123"),
        ("TIDEGATE__API__LISTEN", &listen),
        ("TIDEGATE__ADMIN__LISTEN", &admin_listen),
    ];
    let gate = Gate { running: ChildProcess::start(run(&env), ScratchDir::new(), api), port: api };
    assert_eq!(gate.ask("api", 1).0, 200, "a node that knows the secret goes on by itself");
    gate.running.wait_for_line("the store is down", Duration::from_secs(5));
    gate.running.wait_for_line(&format!("store=\"redis://127.0.0.1:{port}\" error=\""), Duration::from_secs(1));
    let mut health = HttpClient::connect(admin).expect("the gate listens");
    let ready = health.request(tidegate_testkit::http_client::get_request("/readyz"));
    let body = format!("{{\"status\":\"degraded\",\"store\":\"redis://127.0.0.1:{port}\"}}");
    assert_eq!((ready.status, ready.body), (200, body));
    let log = gate.running.output();
    assert!(!log.contains("hunter2"), "{log}");
}

/// A cluster loses one master: its keys are refused if the policy says so, and all others are decided as before.
#[test]
fn a_lost_cluster_master_affects_its_keys_only() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(mut cluster) = RedisCluster::start() else { return };
    let gate = Gate::start(&cluster.url());
    let ask = |number: u32| {
        let at = Instant::now();
        let status = HttpClient::connect(gate.port)
            .expect("the gate listens")
            .request(question("careful", &number.to_string(), 1))
            .status;
        (status, at.elapsed())
    };
    assert!((0..60).all(|number| ask(number).0 == 200));
    let kept = cluster.nodes()[1..].iter().map(|node| {
        let count = node.command(&["EVAL", "return #redis.call('KEYS', '*}w*')", "0"]);
        count.trim_start_matches(':').parse::<usize>().expect("a number")
    });
    let kept = kept.sum::<usize>();
    assert!((20..60).contains(&kept), "{kept}");
    // Until the gate knows which master holds which keys.
    sleep(Duration::from_millis(1_500));
    cluster.node_mut(0).kill();
    let lost = Instant::now();
    let (mut took, mut missed, mut asked) = (Vec::new(), 0, 0);
    while lost.elapsed() < Duration::from_secs(if random::is_full_run() { 10 } else { 3 }) {
        let answers: Vec<_> = (0..60).map(ask).collect();
        assert!(answers.iter().all(|(status, _)| matches!(status, 200 | 503)), "{answers:?}");
        let answered = answers.iter().filter(|(status, _)| *status == 200).count();
        assert!(answered <= kept, "{answered} of {kept}");
        // A busy machine may delay a response for longer than a decision waits.
        missed += kept - answered;
        asked += kept;
        took.extend(answers.iter().map(|(_, took)| *took));
    }
    assert!(missed * 50 <= asked, "{missed} of {asked} that other masters hold");
    took.sort_unstable();
    let p99 = took[took.len() * 99 / 100];
    assert!(p99 <= Duration::from_millis(20), "p99 {p99:?} of {} decisions", took.len());
    gate.running.wait_for_line("a part of the store is down", Duration::from_secs(1));
    cluster.node_mut(0).restart();
    gate.running.wait_for_line("the store is back", Duration::from_secs(5));
    assert!((0..60).all(|number| ask(number).0 == 200));
}
