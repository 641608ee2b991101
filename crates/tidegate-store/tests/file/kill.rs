//! A process that is killed at any moment, again and again.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate_core::{Admission, Limit, LimitKind, Limits, Span, Time, Verb, Window};
use tidegate_store::{FileError, FileStore, FlushMode, Journal};
use tidegate_testkit::fixtures;
use tidegate_testkit::random::{self, RandomSource};

use crate::common::{Place, one};

const INTERVAL: Duration = Duration::from_millis(100);

#[expect(clippy::disallowed_methods, reason = "several processes, one after the other, need one clock")]
fn now() -> Time {
    Time::ZERO + Span::from_duration(SystemTime::now().duration_since(UNIX_EPOCH).unwrap())
}

fn per_hour(limit: u64) -> Arc<Limits> {
    Arc::new(Limits::with_limit(Limit::new(LimitKind::Window(Window::new(limit, Span::from_secs(3600), 64).unwrap()))))
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes()).unwrap();
    out.flush().unwrap();
}

/// Takes one key until it is full, and tells each admission once it has the answer; then says so and waits.
#[test]
#[ignore = "the process that the other tests start and kill"]
fn killed_process_entry_point() {
    let of = |name: &str| std::env::var(name).unwrap();
    let (limit, threads) = (of("HAMMER_LIMIT").parse().unwrap(), of("HAMMER_THREADS").parse().unwrap());
    let flush = if of("HAMMER_FLUSH") == "always" { FlushMode::Always } else { FlushMode::Within(INTERVAL) };
    let journal = match Journal::open(of("HAMMER_PATH").as_ref(), flush) {
        Ok(journal) => journal,
        Err(error) => return say(&format!("\n@failed {error}\n")),
    };
    let store = FileStore::new(per_hour(limit), 1 << 20, &journal, now()).unwrap();
    say(&format!("\n@opened {}\n", one(&store, Verb::Peek, 0, fixtures::client_key(1), now()).used));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let now = now();
                    if one(&store, Verb::Take, 0, fixtures::client_key(1), now).admission != Admission::Admitted {
                        break;
                    }
                    say(&format!("@admitted {}\n", now.as_micros()));
                    thread::sleep(Duration::from_micros(100));
                }
            });
        }
    });
    say("@full 0\n");
    thread::park();
}

/// The output of one process.
#[derive(Debug, Default)]
struct Told {
    used_at_first: Option<u64>,
    /// The time of each admitted call.
    admitted: Vec<u64>,
    full: bool,
}

struct Hammer {
    place: Place,
    limit: u64,
    threads: u32,
    flush: &'static str,
}

impl Hammer {
    /// Of a limit that is never met.
    fn new(threads: u32, flush: &'static str) -> Self {
        Self { place: Place::new(), limit: 1 << 30, threads, flush }
    }

    /// The usage in the file while no process has it open.
    fn used(&self) -> u64 {
        let store = self.place.store(&per_hour(self.limit), FlushMode::Always, now());
        one(&store, Verb::Peek, 0, fixtures::client_key(1), now()).used
    }

    fn start(&self) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "kill::killed_process_entry_point", "--nocapture", "--test-threads=1"])
            .env("HAMMER_PATH", self.place.path())
            .env("HAMMER_LIMIT", self.limit.to_string())
            .env("HAMMER_THREADS", self.threads.to_string())
            .env("HAMMER_FLUSH", self.flush)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Lets a process run for a while, or until the key is full, and kills it.
    fn run(&self, time: Option<Duration>) -> Told {
        let mut child = self.start();
        let out = child.stdout.take().unwrap();
        let (full, filled) = std::sync::mpsc::channel();
        let reader = thread::spawn(move || {
            let mut told = Told::default();
            for line in BufReader::new(out).split(b'\n') {
                let line = String::from_utf8(line.unwrap()).unwrap();
                match line.strip_prefix('@').and_then(|line| line.split_once(' ')) {
                    Some(("opened", used)) => told.used_at_first = Some(used.parse().unwrap()),
                    Some(("admitted", at)) => told.admitted.extend(at.parse::<u64>().ok().filter(|_| at.len() == 16)),
                    Some(("full", _)) => {
                        told.full = true;
                        let _ = full.send(());
                    }
                    Some(("failed", error)) => panic!("{error}"),
                    _ => {}
                }
            }
            told
        });
        match time {
            Some(time) => thread::sleep(time),
            None => drop(filled.recv_timeout(Duration::from_secs(60))),
        }
        child.kill().unwrap();
        child.wait().unwrap();
        reader.join().unwrap()
    }
}

/// Kills processes at random times. Then one process fills the key, with a limit a little above the usage. `check` gets
/// the usage before each process, its output, and the usage after it. Returns the number of all admissions, and the
/// limit.
fn rounds(hammer: &mut Hammer, mut check: impl FnMut(u64, &Told, u64)) -> (u64, u64) {
    let rounds = random::case_count(20, 200);
    let mut random = RandomSource::from_seed(random::run_seed());
    let (mut before, mut admitted, mut at_work) = (0, 0, 0);
    let mut last = Told::default();
    for _ in 0..rounds {
        let told = hammer.run(Some(Duration::from_millis(random.below(250))));
        admitted += told.admitted.len() as u64;
        at_work += u32::from(!told.admitted.is_empty());
        if let Some(after) = told.used_at_first {
            check(before, &last, after);
            (before, last) = (after, told);
        }
    }
    assert!(at_work >= rounds / 4, "only {at_work} of {rounds} processes were killed at work");
    let used = hammer.used();
    check(before, &last, used);
    hammer.limit = used + 300;
    let told = hammer.run(None);
    admitted += told.admitted.len() as u64;
    assert!(told.full, "the last process did not fill the key: {told:?}");
    check(used, &told, hammer.used());
    (admitted, hammer.limit)
}

/// A crash loses what was admitted within one interval, of its own process, and nothing else.
#[test]
fn a_kill_loses_at_most_one_interval() {
    let mut lost_in_all = 0;
    let (admitted, limit) = rounds(&mut Hammer::new(1, "interval"), |before, told, after| {
        // One may be counted that was killed before it could be told.
        let lost = (before + told.admitted.len() as u64).saturating_sub(after) as usize;
        lost_in_all += lost as u64;
        assert!(lost <= told.admitted.len(), "{lost} lost, some of an earlier process");
        if lost > 0 {
            let gone = &told.admitted[told.admitted.len() - lost..];
            let span = Duration::from_micros(gone[lost - 1] - gone[0]);
            assert!(span <= INTERVAL, "{lost} lost, over {span:?}");
        }
    });
    println!("{admitted} admitted of {limit}, {lost_in_all} lost");
    assert!(lost_in_all > 0, "no process was killed before it had written");
    assert!(admitted <= limit + lost_in_all, "{admitted} admitted of {limit}, {lost_in_all} lost");
}

/// With nothing to lose, never more than the limit pass, however many processes it takes.
#[test]
fn a_kill_loses_no_durable_decision() {
    let (admitted, limit) = rounds(&mut Hammer::new(4, "always"), |before, told, after| {
        let told = told.admitted.len() as u64;
        assert!(after >= before + told, "{told} admitted after {before}, and then {after}");
    });
    println!("{admitted} admitted of {limit}");
    assert!(admitted <= limit, "{admitted} admitted of {limit}");
}

/// One process at a time, and the other is told so.
#[test]
fn only_one_process_can_use_a_file() {
    let hammer = Hammer::new(0, "always");
    let journal = hammer.place.journal(FlushMode::default());
    assert!(matches!(Journal::open(hammer.place.path(), FlushMode::default()), Err(FileError::InUse { .. })));
    let output = hammer.start().wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("@failed the store") && said.contains("is in use"), "{said}");
    drop(journal);
    assert_eq!(hammer.run(None).used_at_first, Some(0));
}

/// Processes that start at the same moment, where there is no file yet: one has it, and it is whole.
#[test]
fn concurrent_starts_create_one_file() {
    for _ in 0..10 {
        let hammer = Hammer { limit: 5, ..Hammer::new(1, "always") };
        let mut children: Vec<_> = (0..4).map(|_| hammer.start()).collect();
        thread::sleep(Duration::from_millis(300));
        children.iter_mut().for_each(|child| child.kill().unwrap());
        let said = children.into_iter().map(|child| child.wait_with_output().unwrap().stdout);
        let said: Vec<_> = said.map(|out| String::from_utf8(out).unwrap()).collect();
        let admitted = said.iter().flat_map(|out| out.lines()).filter(|line| line.starts_with("@admitted ")).count();
        assert!(said.iter().all(|out| !out.contains("@failed") || out.contains("is in use")), "{said:?}");
        let used = hammer.used();
        assert!(admitted as u64 <= used && used <= 5, "{admitted} admitted, {used} used: {said:?}");
    }
}
