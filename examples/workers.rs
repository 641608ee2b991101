//! A pool of workers that share a `Pacer` against a service that throttles.
//!
//! `cargo run -p tidegate-examples --example workers` runs for 4 seconds. The service accepts 200 calls a second, and no
//! worker knows that. Each throttled call makes the shared wait longer, and ten successes make it shorter. So the
//! workers find the rate that the service accepts, and few calls are throttled:
//!
//! ```text
//!   2.5 s:   208 calls/s,   2 throttled; each worker waits 33ms between calls
//! ```

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate::{Limiter, Pacer, PacerGrowth, PacerSpec};

const WORKERS: usize = 8;
const PRINT_INTERVAL: Duration = Duration::from_millis(500);

/// A service that admits a number of calls per second and throttles the others.
struct Service {
    limiter: Limiter,
    throttled: AtomicU64,
}

impl Service {
    async fn call(&self) -> Result<(), &'static str> {
        tokio::time::sleep(Duration::from_millis(1)).await;
        if self.limiter.check().is_admitted() {
            return Ok(());
        }
        self.throttled.fetch_add(1, Ordering::Relaxed);
        Err("429 Too Many Requests")
    }
}

async fn work(service: Arc<Service>, pacer: Pacer) {
    loop {
        // Both wait until the shared pace allows the next call.
        match service.call().await {
            Ok(()) => pacer.on_success().await,
            Err(_) => pacer.on_failure().await,
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let service = Arc::new(Service { limiter: Limiter::new("200/s burst 10")?, throttled: AtomicU64::new(0) });
    // Gentler steps than the default: several workers may be throttled at once, and each of them counts as a step up.
    let growth = PacerGrowth::Exponential { up: 1_200, down: 950 };
    let pacer = Pacer::new(PacerSpec { initial: Duration::from_millis(5), growth, ..PacerSpec::default() })?;
    for _ in 0..WORKERS {
        // Clones of a pacer share its pace.
        tokio::spawn(work(Arc::clone(&service), pacer.clone()));
    }

    let (mut calls, mut throttled) = (0, 0);
    for number in 1..=8_u32 {
        tokio::time::sleep(PRINT_INTERVAL).await;
        let now = (pacer.metrics().calls, service.throttled.load(Ordering::Relaxed));
        let admitted = (now.0 - calls) - (now.1 - throttled);
        println!(
            "{:5.1} s: {:5} calls/s, {:3} throttled; each worker waits {:.0?} between calls",
            (PRINT_INTERVAL * number).as_secs_f64(),
            admitted * 2,
            now.1 - throttled,
            pacer.interval(),
        );
        (calls, throttled) = now;
    }
    Ok(())
}
