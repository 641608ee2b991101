//! A gRPC server of tonic behind a gate. The service is written by hand, so that the example needs no protoc.
//!
//! `cargo run -p tidegate-examples --example tonic`, and in another terminal:
//!
//! ```console
//! $ for n in 1 2 3; do curl -s -D - -o /dev/null -X POST --http2-prior-knowledge -H 'x-tenant: acme' \
//!       -H 'content-type: application/grpc' http://127.0.0.1:50051/example.Greeter/Hello; done
//! ```
//!
//! Two calls of a tenant pass. The third gets `grpc-status: 8` (RESOURCE_EXHAUSTED) and, in `grpc-retry-pushback-ms`,
//! the time to wait. A call without `x-tenant` gets `grpc-status: 16` (UNAUTHENTICATED).

use std::convert::Infallible;
use std::error::Error;
use std::future::{Ready, ready};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full};
use tidegate::GateLayer;
use tidegate::policy::{ActionSpec, Policy};
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tower_service::Service;

/// Answers every call with an empty message. Code that tonic generates from a .proto file takes its place.
#[derive(Clone)]
struct Greeter;

impl NamedService for Greeter {
    const NAME: &'static str = "example.Greeter";
}

impl Service<Request<Body>> for Greeter {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        // A message in gRPC: a byte for "not compressed", four bytes of length, no content. Then the status.
        let mut status = HeaderMap::new();
        status.insert("grpc-status", HeaderValue::from_static("0"));
        let message = Full::new(Bytes::from_static(&[0; 5])).with_trailers(ready(Some(Ok(status))));
        let mut response = Response::new(Body::new(message));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        ready(Ok(response))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder()
        // A gRPC method is a path: /PACKAGE.SERVICE/METHOD.
        .action("greeter", ActionSpec::new("2 per 60s").key("key").path("/example.Greeter/*"))
        .build()?;
    let gate = GateLayer::new(&policy).key(|request| request.headers.get("x-tenant")?.to_str().ok().map(str::to_owned));
    let incoming = TcpIncoming::bind("127.0.0.1:50051".parse()?)?;
    println!("listening on http://127.0.0.1:50051; stop with Ctrl-C");
    Server::builder().layer(gate).add_service(Greeter).serve_with_incoming(incoming).await?;
    Ok(())
}
