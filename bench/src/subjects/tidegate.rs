//! Tidegate by its public API, as a Rust program uses it.

use super::backon::TRIES_PER_CALL;
use super::{LimitTerms, OURS, Subject, keyed_worker as keyed_loop, unkeyed_worker};
use crate::keys::{KeySequence, key_text as key_name};
use crate::measure::Worker;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use tidegate::clock::SystemClock;
use tidegate::policy::{Policy, PolicySources, Query};
use tidegate::store::Memory;
use tidegate::{Backoff, Clock, Gate, KeyedLimiter, Limiter, Span, Time};
use tidegate_core::backoff::BackoffState;

/// Returns one rate without a key.
pub fn direct(terms: LimitTerms) -> Box<dyn Subject> {
    Box::new(TidegateDirect(Limiter::new(&rate(terms)).expect("the terms are a rate")))
}

/// Returns a rate per text, in a store of the default size.
pub fn keyed(terms: LimitTerms) -> Box<dyn Subject> {
    Box::new(TidegateKeyed { name: OURS, limiter: KeyedLimiter::new(&rate(terms)).expect("the terms are a rate") })
}

/// Returns a strict window per text, which none of the rivals has, to show the cost of strictness. Its store is larger
/// than the default one, which doesn't hold the windows of a million keys.
pub fn windowed(terms: LimitTerms) -> Box<dyn Subject> {
    const MAX_BYTES: usize = 2 << 30;
    let window = format!("{} per 1h", terms.burst);
    let limiter = KeyedLimiter::with_clock(&window, MAX_BYTES, SystemClock::new());
    Box::new(TidegateKeyed { name: "tidegate (strict window)", limiter: limiter.expect("the terms are a window") })
}

/// The state of an inbound decision's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateFill {
    /// Clients that call four times a minute on average, and none above six times as often. The action's logs are
    /// short, and those of the global limit's hour are long. Time passes quickly, so that this state lasts at any rate
    /// of calls.
    Typical,
    /// Clients that call as fast as they can under limits that none of them reaches. Every window's log is full and
    /// merges neighbouring entries. This is the worst case.
    FullLogs,
    /// No logs: both limits are rates.
    Rates,
    /// Blocked clients.
    Blocked,
}

/// Returns the whole inbound decision, for `clients` that call in no particular order. It has three actions to match, a
/// penalty, the action's limit and the global one.
pub fn inbound(filling: StateFill, clients: u32) -> Box<dyn Subject> {
    let (name, login, global) = match filling {
        StateFill::Typical => (OURS, "100 per 60s", "5000 per 1h"),
        StateFill::FullLogs => ("tidegate (packed logs)", "1000000000 per 60s", "1000000000 per 1h"),
        StateFill::Rates => ("tidegate (rates)", "1 per 10s burst 1000000", "1 per 10s burst 1000000"),
        StateFill::Blocked => (OURS, "2 per 1h", "1000000000 per 1h"),
    };
    let text = format!(
        r#"
[inbound.global]
limit = "{global}"
penalty = {{ base = "2s", cap = "1h" }}

[inbound.action.register]
match = {{ method = "POST", path = "/register" }}
key = ["client_ip"]
limit = "5 per 60s"

[inbound.action.api]
match = {{ path = "/api/*" }}
key = ["client_ip"]
limit = "100 per 60s"

[inbound.action.login]
match = {{ method = "POST", path = "/login" }}
key = ["client_ip"]
limit = "{login}"
penalty = {{ base = "1h", cap = "1h" }}
"#
    );
    let policy = load_policy(&text);
    if filling != StateFill::Typical {
        let gate = Gate::new(&policy);
        return Box::new(InboundSubject { name, gate });
    }
    let clock = FastClock {
        real: SystemClock::new(),
        ahead: AtomicU64::new(0),
        step: Span::from_micros(15_000_000 / u64::from(clients)),
    };
    let gate = Gate::in_memory(&policy, clock);
    let inbound = InboundSubject { name, gate };
    // More than an hour of calls, until as many calls leave the global windows as enter.
    for call in 0..260 * clients {
        let number = call.wrapping_mul(0x9e37_79b1) % clients;
        inbound.decide_once(&key_name(number));
    }
    Box::new(inbound)
}

/// Returns a back-off of base 1 s, factor 2, cap one hour and full jitter.
pub fn backoff() -> Box<dyn Subject> {
    Box::new(TidegateBackoff(Backoff::exponential(Span::from_secs(1), Span::from_secs(3600))))
}

/// Returns a policy of this text alone.
///
/// # Panics
///
/// If it isn't valid; the benchmark's own texts are.
pub fn load_policy(text: &str) -> Policy {
    let sources = PolicySources::new().file("bench.toml", text);
    Policy::load(sources).unwrap_or_else(|errors| panic!("{errors}"))
}

/// Returns the query of a log-in from this address.
pub fn login_query(ip: IpAddr) -> Query<'static> {
    Query { ip: Some(ip), method: Some("POST"), path: Some("/login"), host: Some("example.com"), ..Query::default() }
}

fn rate(terms: LimitTerms) -> String {
    let (count, seconds) = terms.count_and_seconds();
    format!("{count} per {seconds}s burst {}", terms.burst)
}

struct TidegateDirect(Limiter);

impl Subject for TidegateDirect {
    fn name(&self) -> &'static str {
        OURS
    }

    fn decide_once(&self, _: &String) -> bool {
        self.0.check().is_admitted()
    }

    fn worker<'a>(&'a self, _: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        unkeyed_worker(|| self.0.check().is_admitted())
    }
}

struct TidegateKeyed {
    name: &'static str,
    limiter: KeyedLimiter<String>,
}

impl Subject for TidegateKeyed {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decide_once(&self, key: &String) -> bool {
        self.limiter.check(key).is_admitted()
    }

    fn worker<'a>(&'a self, sequence: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        keyed_loop(sequence, |key| self.limiter.check(key).is_admitted())
    }
}

/// The machine's clock, which is read on every call, plus a step for every call so far. It is for one thread.
struct FastClock {
    real: SystemClock,
    ahead: AtomicU64,
    step: Span,
}

impl Clock for FastClock {
    fn now(&self) -> Time {
        // A load and a store, because one atomic operation would cost as much as some measured subjects.
        let ahead = self.ahead.load(Ordering::Relaxed) + self.step.as_micros();
        self.ahead.store(ahead, Ordering::Relaxed);
        self.real.now() + Span::from_micros(ahead)
    }
}

struct InboundSubject<C> {
    name: &'static str,
    gate: Gate<Memory, C>,
}

impl<C: Clock> InboundSubject<C> {
    fn decide(&self, ip: IpAddr) -> bool {
        let decision = self.gate.check_now(black_box(&login_query(ip)));
        decision.expect("the query has every part").allowed
    }
}

impl<C: Clock> Subject for InboundSubject<C> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decide_once(&self, key: &String) -> bool {
        self.decide(address(key))
    }

    fn worker<'a>(&'a self, sequence: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        let addresses: Vec<IpAddr> = sequence.keys.iter().map(|key| address(key)).collect();
        let mut at = 0;
        unkeyed_worker(move || {
            at = if at + 1 == addresses.len() { 0 } else { at + 1 };
            self.decide(addresses[at])
        })
    }
}

fn address(key: &str) -> IpAddr {
    let number = u64::from_str_radix(key, 16).expect("keys are hexadecimal");
    IpAddr::V4(Ipv4Addr::from_bits(number as u32))
}

struct TidegateBackoff(Backoff);

impl Subject for TidegateBackoff {
    fn name(&self) -> &'static str {
        OURS
    }

    fn decide_once(&self, _: &String) -> bool {
        true
    }

    fn worker<'a>(&'a self, _: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        let mut rng = SmallRng::seed_from_u64(1);
        let mut waits = BackoffState::default();
        let mut tries = 0;
        unkeyed_worker(move || {
            if tries == TRIES_PER_CALL {
                tries = 0;
                waits = BackoffState::default();
            }
            tries += 1;
            black_box(waits.next(&self.0, &mut rng));
            true
        })
    }
}
