//! Two providers in one reqwest client: one with its limit in the policy, and one that throttles.
//!
//! `cargo run -p tidegate-examples --example reqwest` starts two small servers, calls each five times, and ends. The
//! policy spaces calls to `weather` by 250 ms. `strict` accepts two calls a second and answers further ones with a 429:
//! the client waits as long as its `Retry-After` says, and sends the request again. Every call succeeds:
//!
//! ```text
//! weather 3: 200 OK after 1 request, waited 0.25 s
//! strict  3: 200 OK after 2 requests, waited 1.00 s
//! ```

use std::error::Error;
use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use reqwest::redirect::Policy as Redirects;
use reqwest_middleware::ClientBuilder;
use tidegate::GateLayer;
use tidegate::outbound::{CallStats, Outbound, OutboundMiddleware};
use tidegate::policy::{ActionSpec, HeaderDialect, Policy, ProviderSpec};
use tokio::net::TcpListener;

/// Starts a server on a free port.
async fn start(app: Router) -> Result<SocketAddr, Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).into_future());
    Ok(address)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let data = Router::new().route("/data", get(async || "data"));
    let throttle = Policy::builder().action("data", ActionSpec::new("2 per 1s").path("/data")).build()?;
    // Without rate-limit headers, which would tell the client when to wait before it gets a 429.
    let throttle = GateLayer::new(&throttle).headers(HeaderDialect::None, false);
    let urls =
        [format!("http://{}", start(data.clone()).await?), format!("http://{}", start(data.layer(throttle)).await?)];

    let policy = Policy::builder()
        .provider("weather", ProviderSpec::new(&urls[0]).limit("4/s"))
        // The client doesn't know the limit of this one.
        .provider("strict", ProviderSpec::new(&urls[1]).limit("1000/s"))
        .build()?;
    let outbound = Outbound::new(&policy).ok_or("no provider")?;
    // reqwest would follow redirects below the middleware, uncounted.
    let client = ClientBuilder::new(reqwest::Client::builder().redirect(Redirects::none()).build()?)
        .with(OutboundMiddleware::new(&outbound)?)
        .build();

    for number in 1..=5 {
        for (name, url) in ["weather", "strict "].iter().zip(&urls) {
            let reply = client.get(format!("{url}/data")).send().await?;
            let stats = reply.extensions().get::<CallStats>().ok_or("not a call to a provider")?;
            let requests = if stats.attempts == 1 { "request" } else { "requests" };
            let waited = stats.waited.as_duration().as_secs_f64();
            println!("{name} {number}: {} after {} {requests}, waited {waited:.2} s", reply.status(), stats.attempts);
        }
    }
    Ok(())
}
