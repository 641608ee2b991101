//! The cheapest reverse proxy on hyper: `bare-proxy LISTEN-PORT UPSTREAM-PORT`.

use bench::bare;
use http_body_util::{BodyExt, Empty, combinators::UnsyncBoxBody};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, StatusCode, Uri, http::uri::Scheme};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let upstream = bare::address_argument(2)?.to_string().parse::<hyper::http::uri::Authority>()?;
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client: Client<_, Incoming> = Client::builder(TokioExecutor::new()).build(connector);
    bare::serve(bare::address_argument(1)?, move |mut request: Request<Incoming>| {
        let mut parts = std::mem::take(request.uri_mut()).into_parts();
        parts.scheme = Some(Scheme::HTTP);
        parts.authority = Some(upstream.clone());
        let client = client.clone();
        async move {
            let Ok(uri) = Uri::from_parts(parts) else {
                return failed(StatusCode::BAD_REQUEST);
            };
            *request.uri_mut() = uri;
            match client.request(request).await {
                Ok(response) => response.map(BodyExt::boxed_unsync),
                Err(_) => failed(StatusCode::BAD_GATEWAY),
            }
        }
    })
}

fn failed(status: StatusCode) -> Response<UnsyncBoxBody<Bytes, hyper::Error>> {
    let nothing = Empty::new().map_err(|never| match never {});
    let mut response = Response::new(nothing.boxed_unsync());
    *response.status_mut() = status;
    response
}
