//! An axum application with limits per user and per address, exemptions, and a refusal text of its own.
//!
//! `cargo run -p tidegate-examples --example axum`, and in another terminal:
//!
//! ```console
//! $ for n in 1 2 3 4; do curl -i -H 'Authorization: Bearer ann-token' http://127.0.0.1:3000/api/items; done
//! $ for n in 1 2 3; do curl -i -X POST http://127.0.0.1:3000/login; done
//! ```
//!
//! The fourth call of `ann` gets a 429, while `bob-token` still passes: each user has a limit of their own. Without a
//! token the answer is 401. The third log-in from one address gets a 429. `/health` always passes.

use std::error::Error;
use std::net::SocketAddr;

use axum::extract::Request;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Router};
use http::HeaderValue;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use tidegate::policy::{ActionSpec, Policy};
use tidegate::{Decision, GateLayer};
use tokio::net::TcpListener;

/// The user of a request, as the application's authentication found it.
#[derive(Clone)]
struct User(&'static str);

async fn authenticate(mut request: Request, next: Next) -> Response {
    let user = match request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes) {
        Some(b"Bearer ann-token") => Some(User("ann")),
        Some(b"Bearer bob-token") => Some(User("bob")),
        _ => None,
    };
    if let Some(user) = user {
        request.extensions_mut().insert(user);
    }
    next.run(request).await
}

/// An admitted request carries the gate's decision.
async fn items(Extension(User(name)): Extension<User>, Extension(decision): Extension<Decision>) -> String {
    format!("Hello {name}, you have {} calls left\n", decision.remaining.unwrap_or_default())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder()
        .action("login", ActionSpec::new("2 per 60s").penalty("2s", "1h").method("POST").path("/login"))
        .action("api", ActionSpec::new("3 per 60s").key("key").path("/api/*"))
        // These networks are never limited.
        .allow(["10.0.0.0/8"])
        .build()?;
    let gate = GateLayer::new(&policy)
        .key(|request| request.extensions.get::<User>().map(|user| user.0.to_owned()))
        .allow(|request| request.uri.path() == "/health")
        .refusal(|request, decision, mut standard| {
            // `Retry-After` and the rate-limit headers of the standard answer stay.
            standard.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
            let seconds = decision.retry_after.unwrap_or(0);
            standard.map(|_| format!("Too many calls to {}. Try again in {seconds} s.\n", request.uri.path()))
        });

    let app = Router::new()
        .route("/login", post(async || "welcome\n"))
        .route("/api/items", get(items))
        .route("/health", get(async || "fine\n"))
        .layer(gate)
        // The last layer runs first: the gate counts by the user that it has found.
        .layer(middleware::from_fn(authenticate));
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on http://127.0.0.1:3000; stop with Ctrl-C");
    // The limit per address needs the peer's address.
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
