//! The cheapest answer of tonic to Envoy's rate limit service: a constant of the size of a decision. `bare-rls
//! LISTEN-PORT`.

use std::convert::Infallible;
use std::error::Error;
use std::task::{Context, Poll};

use bench::bare;
use bench::grpc::{Answer, Entry, Question, Status};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic_prost::ProstCodec;

#[derive(Clone)]
struct RateLimitService;

impl NamedService for RateLimitService {
    const NAME: &'static str = "envoy.service.ratelimit.v3.RateLimitService";
}

impl Service<http::Request<Body>> for RateLimitService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move { Ok(Grpc::new(ProstCodec::default()).unary(Constant, request).await) })
    }
}

struct Constant;

impl UnaryService<Question> for Constant {
    type Response = Answer;
    type Future = std::future::Ready<Result<tonic::Response<Answer>, tonic::Status>>;

    fn call(&mut self, asked: tonic::Request<Question>) -> Self::Future {
        let status = |_| Status { code: 1, limit_remaining: 999_999 };
        let header = |key: &str, value: &str| Entry { key: key.to_owned(), value: value.to_owned() };
        std::future::ready(Ok(tonic::Response::new(Answer {
            overall_code: 1,
            statuses: asked.into_inner().descriptors.into_iter().map(status).collect(),
            response_headers_to_add: vec![
                header("ratelimit-policy", "\"ask\";q=1000000;w=1"),
                header("ratelimit", "\"ask\";r=999999;t=1"),
            ],
        })))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let address = bare::address_argument(1)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let server = tonic::transport::Server::builder().tcp_nodelay(true).add_service(RateLimitService);
    Ok(runtime.block_on(server.serve(address))?)
}
