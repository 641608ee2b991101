//! The cheapest reply to a POST on hyper: reads the body to its end and replies with a constant. `bare-api
//! LISTEN-PORT`.

use bench::bare;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode};
use std::error::Error;

const BODY: &[u8] = br#"{"allowed":true,"limit":1000000000,"remaining":999999999,"reset_after":60,"retry_after":null,"blocked":false,"backoff_seconds":null,"next_allowed_at":null,"bound_by":"ask","reason":"ok","source":"action"}"#;

fn main() -> Result<(), Box<dyn Error>> {
    bare::serve(bare::address_argument(1)?, |request: Request<Incoming>| async {
        let mut response = Response::new(Full::new(Bytes::from_static(BODY)));
        let read = request.into_body().collect().await;
        if read.is_ok_and(|body| std::hint::black_box(body.to_bytes()).is_empty()) {
            *response.status_mut() = StatusCode::BAD_REQUEST;
        }
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response
    })
}
