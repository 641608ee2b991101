//! What the bare hyper programs share: one core, one thread, a connection a task, no timer and no limit. What a gate adds
//! to this is what it costs.

use hyper::body::{Body, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use tokio::net::TcpListener;

/// The loopback address with the port that argument number `place` names.
///
/// # Errors
///
/// If there is no such argument, or it is no port.
pub fn address_argument(place: usize) -> Result<SocketAddr, Box<dyn Error>> {
    let port = std::env::args().nth(place).ok_or("a port is missing")?;
    Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port.parse()?)))
}

/// Answers every request of every connection with `answer`, for ever, on this thread.
///
/// # Errors
///
/// If the port can't be listened on.
pub fn serve<A, F, B>(listen: SocketAddr, answer: A) -> Result<(), Box<dyn Error>>
where
    A: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(listen).await?;
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            let answer = answer.clone();
            tokio::spawn(async move {
                let service = service_fn(|request| {
                    let answered = answer(request);
                    async move { Ok::<_, Infallible>(answered.await) }
                });
                // A client that goes away mid-request is no matter here.
                let _ =
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
            });
        }
    })
}
