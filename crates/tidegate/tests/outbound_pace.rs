//! An adaptive pace over real connections, against a server that refuses calls above a rate that it doesn't publish.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that can't go on should stop")]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::routing::get;
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tidegate::clock::SystemClock;
use tidegate::outbound::{Outbound, OutboundLayer};
use tidegate::policy::{Policy, PolicySources};
use tidegate::{Clock as _, Limiter, Span, Time};
use tidegate_testkit::random;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tower::{Layer as _, ServiceExt as _};

/// The number of calls that the server accepts in a second.
const HIDDEN: u64 = 100;
const WORKERS: usize = 24;

/// The server's rate, and the time and the result of each call.
struct Hidden {
    rate: Limiter,
    clock: SystemClock,
    asked: Mutex<Vec<(Time, bool)>>,
}

async fn server(hidden: Arc<Hidden>) -> SocketAddr {
    let answer = async |State(hidden): State<Arc<Hidden>>| {
        let takes = hidden.rate.check().is_admitted();
        hidden.asked.lock().unwrap().push((hidden.clock.now(), takes));
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        if takes { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = Router::new().route("/", get(answer)).with_state(hidden);
    tokio::spawn(axum::serve(listener, app).into_future());
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adaptive_finds_a_real_servers_rate() {
    let (warm_up, seconds) = (u64::from(random::case_count(6, 30)), u64::from(random::case_count(8, 60)));
    let clock = SystemClock::new();
    // A small burst is admitted, so that the test measures the pace and not how evenly the machine wakes tasks.
    let rate = Limiter::new(&format!("{HIDDEN}/s burst 5")).unwrap();
    let hidden = Arc::new(Hidden { rate, clock: clock.clone(), asked: Mutex::default() });
    let address = server(Arc::clone(&hidden)).await;
    let text = format!(
        "[outbound.provider.api]\nbase_url = \"http://{address}\"\nlimit = \"{}/s\"\npace = \"adaptive\"\n\
         timeout = \"60s\"\nretry = {{ max_attempts = 1 }}",
        HIDDEN * 2
    );
    let policy = Policy::load(PolicySources::new().file("test.toml", text)).unwrap_or_else(|errors| panic!("{errors}"));
    let outbound = Outbound::in_memory(&policy, clock.clone()).unwrap();
    let layer = OutboundLayer::with_env(outbound.provider("api").unwrap().clone(), |_| None::<String>).unwrap();
    let service = layer.layer(Client::builder(TokioExecutor::new()).build_http());
    let began = clock.now();
    let from = began + Span::from_secs(warm_up);
    let until = from + Span::from_secs(seconds);
    let mut workers = JoinSet::new();
    for _ in 0..WORKERS {
        let (service, clock) = (service.clone(), clock.clone());
        workers.spawn(async move {
            while clock.now() < until {
                let request = Request::get("/").body(Full::<Bytes>::default()).unwrap();
                if let Ok(response) = service.clone().oneshot(request).await {
                    response.into_body().collect().await.unwrap();
                }
            }
        });
    }
    workers.join_all().await;
    let asked = hidden.asked.lock().unwrap();
    let after: Vec<bool> = asked.iter().filter(|(at, _)| (from..until).contains(at)).map(|(_, takes)| *takes).collect();
    let taken = after.iter().filter(|takes| **takes).count();
    let refused = after.len() - taken;
    println!("{taken} of {} taken, {refused} refused", HIDDEN * seconds);
    // In the short run, a stall of the machine is a larger share of the time.
    let least = u64::from(random::case_count(85, 90));
    assert!(taken as u64 * 100 >= HIDDEN * seconds * least, "{taken} of {} taken", HIDDEN * seconds);
    assert!(refused * 100 < after.len() * 2, "{refused} of {} refused", after.len());
    assert!(asked.iter().any(|(_, takes)| !takes), "it went up to what the server takes");
}
