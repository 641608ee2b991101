//! The common parts of the bare hyper programs: one core, one thread, a task per connection, no timer and no limit. The
//! cost of a gate is the excess over this.

use hyper::body::{Body, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use tokio::net::TcpListener;

/// Returns the loopback address with the port in argument number `place`.
///
/// # Errors
///
/// If there is no such argument, or it isn't a port.
pub fn address_argument(place: usize) -> Result<SocketAddr, Box<dyn Error>> {
    let port = std::env::args().nth(place).ok_or("a port is missing")?;
    Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port.parse()?)))
}

/// Replies to every request of every connection with `answer`, without end, on this thread.
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
                // A client that goes away during a request doesn't matter here.
                let _ =
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
            });
        }
    })
}
