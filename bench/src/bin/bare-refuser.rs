//! The cheapest refusal on hyper: `bare-refuser LISTEN-PORT`.

use bench::bare;
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use std::error::Error;

const BODY: &[u8] = br#"{"error":"Too many requests","retry_after":16,"next_allowed_at":"2026-11-21 12:01:45Z"}"#;

fn main() -> Result<(), Box<dyn Error>> {
    bare::serve(bare::address_argument(1)?, |_| async {
        let mut response = Response::new(Full::new(Bytes::from_static(BODY)));
        *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(RETRY_AFTER, HeaderValue::from_static("16"));
        response
    })
}
