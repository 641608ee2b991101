//! A provider goes down under load and comes back.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::clock::TokioClock;
use tidegate::outbound::{Attempt, AttemptOutcome, CallOptions, Upstream};
use tidegate::{Clock as _, Span, Time};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::common::{FAILED, GOOD, provider};

/// A provider that answers 100 calls a second within 20 ms, and none while it is down.
#[derive(Clone)]
struct Server {
    clock: TokioClock,
    down: (Time, Time),
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    arrivals: Mutex<Vec<Time>>,
    first_tries: AtomicU32,
    retries: AtomicU32,
}

impl Upstream for Server {
    type Reply = ();

    async fn send(&mut self, attempt: Attempt) -> AttemptOutcome<()> {
        let tries = if attempt.number == 1 { &self.seen.first_tries } else { &self.seen.retries };
        tries.fetch_add(1, Ordering::Relaxed);
        let now = self.clock.now();
        self.seen.arrivals.lock().unwrap().push(now);
        let is_down = self.down.0 <= now && now < self.down.1;
        sleep(Duration::from_millis(20)).await;
        AttemptOutcome { value: (), report: if is_down { FAILED } else { GOOD } }
    }
}

/// The shortest wait of a worker after a failed call.
const PATIENCE: Duration = Duration::from_millis(100);

#[tokio::test(start_paused = true)]
async fn a_recovering_provider_is_neither_overloaded_nor_idle() {
    let settings = "limit = \"100 per 1s\"\nbreaker = { failures = 5, open = \"2s\" }\ntimeout = \"30s\"\n\
                    budget = { ratio = 0.2, min = 3 }";
    let api = provider(settings);
    let began = api.clock().now();
    let down = (began + Span::from_secs(10), began + Span::from_secs(70));
    let server = Server { clock: *api.clock(), down, seen: Arc::default() };
    let mut workers = JoinSet::new();
    for _ in 0..1_000 {
        let (api, mut server) = (api.clone(), server.clone());
        workers.spawn(async move {
            loop {
                if let Err(error) = api.call(CallOptions::default(), &mut server).await {
                    let told = error.retry_after().unwrap_or(Span::ZERO).as_duration();
                    sleep(told.max(PATIENCE)).await;
                }
            }
        });
    }
    sleep(Duration::from_secs(100)).await;
    workers.shutdown().await;

    let arrivals = server.seen.arrivals.lock().unwrap();
    let crowded = arrivals.windows(111).find(|some| some[110].since(some[0]) < Span::from_secs(1));
    assert!(crowded.is_none(), "more than 110 within a second from {:?}", crowded.map(|some| some[0].since(began)));
    let within = |from: u64, to: u64| {
        let (from, to) = (began + Span::from_secs(from), began + Span::from_secs(to));
        arrivals.iter().filter(|at| from <= **at && **at < to).count()
    };
    assert!(within(1, 10) >= 9 * 95, "before: {}", within(1, 10));
    assert!(within(12, 70) <= 58 * 3, "down, it is probed and no more: {}", within(12, 70));
    // The calls of a window come in bursts a little more than a second apart, so that some seconds have none.
    assert!(within(70, 80) >= 8 * 95, "within ten seconds it is used again: {}", within(70, 80));
    assert!(within(73, 100) >= 27 * 95, "{}", within(73, 100));

    let [first_tries, retries] =
        [&server.seen.first_tries, &server.seen.retries].map(|tries| tries.load(Ordering::Relaxed));
    assert!(f64::from(retries) <= 0.2 * f64::from(first_tries) + 3.0, "{retries} retries of {first_tries}");
}
