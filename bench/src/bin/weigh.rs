//! Fills one limiter with keys, in a process of its own, and prints the cost: `weigh bytes|growth SUBJECT KEYS`. `weigh
//! junk|blocked tidegate KEYS` is for a gate under a flood of unknown clients, and `weigh calls SUBJECT CALLS` for the
//! allocations of outbound calls. It is a separate program because it counts every allocation, which must not slow the
//! timed code of the benchmark.

use bench::keys::key_text;
use bench::measure::{pin_to_core, preemptions, resident_bytes};
use bench::subjects::tidegate::{load_policy, login_query};
use bench::subjects::{LimitTerms, Subject, caller_by_name, keyed_by_name};
use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tidegate::Gate;

/// The system's allocator, which also counts the allocated bytes and the allocations.
struct CountingAllocator;

static ALLOCATED_BYTES: AtomicU64 = AtomicU64::new(0);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

impl CountingAllocator {
    fn record_allocation(size: usize) {
        ALLOCATED_BYTES.fetch_add(size as u64, Ordering::Relaxed);
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call is the system allocator's own, with the caller's own arguments.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::record_allocation(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::record_allocation(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::record_allocation(size);
        ALLOCATED_BYTES.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATED_BYTES.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, subject, keys] = arguments.as_slice() else {
        return usage();
    };
    let Ok(keys) = keys.parse::<u32>() else {
        return usage();
    };
    pin_to_core(usize::MAX);
    if let Some(flood) = Flood::of(what) {
        flood.run(keys);
        return ExitCode::SUCCESS;
    }
    if what == "calls" {
        let Some(caller) = caller_by_name(subject) else {
            return usage();
        };
        println!("allocations {}", count_allocations(caller.as_ref(), keys));
        return ExitCode::SUCCESS;
    }
    // Read before the limiter is made, because a limiter may take all its memory at once.
    let (counted, held) = (ALLOCATED_BYTES.load(Ordering::Relaxed), resident_bytes());
    let Some(limiter) = keyed_by_name(subject, LimitTerms::LARGE_KEYED) else {
        return usage();
    };
    match what.as_str() {
        "bytes" => {
            for index in 0..keys {
                assert!(limiter.decide_once(&key_text(index)), "a first call is admitted");
            }
            // Some limiters clean up in the background. Memory that they haven't returned by then is theirs.
            std::thread::sleep(Duration::from_millis(200));
            println!("counted {}", ALLOCATED_BYTES.load(Ordering::Relaxed) - counted);
            println!("resident {}", resident_bytes() - held);
        }
        "growth" => println!("longest {}", longest_insert(limiter.as_ref(), keys).as_nanos()),
        _ => return usage(),
    }
    ExitCode::SUCCESS
}

fn usage() -> ExitCode {
    eprintln!("usage: weigh bytes|growth|junk|blocked|calls SUBJECT COUNT");
    ExitCode::from(2)
}

/// Returns the number of allocations of this many calls, after a warm-up of as many.
fn count_allocations(caller: &dyn Subject, calls: u32) -> u64 {
    let key = key_text(0);
    let call = || assert!(caller.decide_once(&key), "a call is let through");
    (0..calls).for_each(|_| call());
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    (0..calls).for_each(|_| call());
    ALLOCATIONS.load(Ordering::Relaxed) - before
}

/// Returns the time of the longest single insert. An insert during which the thread lost its core is left out, because
/// that time is another program's.
fn longest_insert(limiter: &dyn Subject, keys: u32) -> Duration {
    const SUSPECT: Duration = Duration::from_micros(20);
    let mut longest = Duration::ZERO;
    let mut lost = preemptions();
    for index in 0..keys {
        let key = key_text(index);
        let begin = Instant::now();
        let admitted = limiter.decide_once(&key);
        let taken = begin.elapsed();
        assert!(admitted, "a first call is admitted");
        if taken < SUSPECT || taken <= longest {
            continue;
        }
        let before = std::mem::replace(&mut lost, preemptions());
        if before == lost {
            longest = taken;
        }
    }
    longest
}

/// The flood of a million unknown clients.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flood {
    /// Two calls each, within their limit. A store may drop these entries.
    Junk,
    /// Calls until they are blocked. A store must keep these entries as long as it can.
    Blocked,
}

/// The number of clients that are blocked before the flood.
const BLOCKED_CLIENTS: u32 = 100;

const POLICY: &str = r#"
[store]
max_bytes = "64MiB"

[inbound.global]
limit = "1000 per 1h"
penalty = { base = "2s", cap = "1h" }

[inbound.action.login]
match = { method = "POST", path = "/login" }
key = ["client_ip"]
limit = "LIMIT per 60s"
penalty = { base = "1h", cap = "1h" }
"#;

impl Flood {
    fn of(word: &str) -> Option<Self> {
        match word {
            "junk" => Some(Self::Junk),
            "blocked" => Some(Self::Blocked),
            _ => None,
        }
    }

    fn run(self, keys: u32) {
        let limit: u32 = if self == Self::Junk { 5 } else { 1 };
        let mut taken = vec![0_u32; keys as usize * 2];
        let held = resident_bytes();
        let gate = Gate::new(&load_policy(&POLICY.replace("LIMIT", &limit.to_string())));
        let ask = |address: u32| {
            let decision = gate.check_now(&login_query(Ipv4Addr::from_bits(address).into()));
            decision.expect("the query has every part")
        };
        let guests = 0xc000_0200..0xc000_0200 + BLOCKED_CLIENTS;
        for guest in guests.clone() {
            let last = (0..=limit).fold(None, |_, _| Some(ask(guest)));
            assert!(last.is_some_and(|decision| decision.blocked), "a guest is blocked beforehand");
        }
        for (call, taken) in taken.iter_mut().enumerate() {
            let stranger = 0x0a00_0000 + call as u32 / 2;
            let begin = Instant::now();
            black_box(ask(stranger));
            *taken = u32::try_from(begin.elapsed().as_nanos()).unwrap_or(u32::MAX);
        }
        println!("resident {}", resident_bytes() - held);
        println!("still-blocked {}", guests.filter(|guest| ask(*guest).blocked).count());
        taken.sort_unstable();
        println!("p99 {}", taken[taken.len() / 100 * 99]);
    }
}
