//! The state that the connections of a listener share, until another policy replaces it.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::Either;
use http::header::HOST;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::Service;
use parking_lot::RwLock;
use tidegate::policy::{Query, canonical_ip};

use crate::access_log::{AccessLog, LoggedResponseFuture};
use crate::body::ResponseBody;
use crate::connection::ConnectionService;
use crate::listener::ConnectionContext;
use crate::local_response::{HttpError, discard_body, finish_response};
use crate::refusal_log::RefusalLog;

/// A state that can be replaced while it is in use.
pub(crate) struct StateCell<T> {
    state: RwLock<Arc<T>>,
    version: AtomicUsize,
}

impl<T> StateCell<T> {
    pub(crate) fn new(state: T) -> Arc<Self> {
        Arc::new(Self { state: RwLock::new(Arc::new(state)), version: AtomicUsize::new(0) })
    }

    /// The present state.
    pub(crate) fn load(&self) -> Arc<T> {
        Arc::clone(&self.state.read())
    }

    /// Replaces the state. Requests that have begun go on with the one before.
    pub(crate) fn replace(&self, state: T) {
        *self.state.write() = Arc::new(state);
        self.version.fetch_add(1, Ordering::Release);
    }
}

/// The state of a listener.
pub(crate) trait ListenerState: Send + Sync + Sized + 'static {
    /// The service of one connection's requests.
    type Service: ConnectionService;

    fn connection_service(self: Arc<Self>, client: Arc<ConnectionContext>) -> Self::Service;

    /// The address of the client that sent a request, as far as its head tells.
    fn client_ip(&self, peer: IpAddr, _: &Request<Incoming>) -> IpAddr {
        canonical_ip(peer)
    }
}

/// The service of one connection, which takes each request by the listener's present state.
pub(crate) struct CurrentService<T: ListenerState> {
    listener: &'static str,
    cell: Arc<StateCell<T>>,
    access_log: Arc<AccessLog>,
    refusals: Arc<RefusalLog>,
    client: Arc<ConnectionContext>,
    version: Cell<usize>,
    service: RefCell<T::Service>,
}

impl<T: ListenerState> CurrentService<T> {
    pub(crate) fn new(
        listener: &'static str,
        cell: Arc<StateCell<T>>,
        access_log: Arc<AccessLog>,
        refusals: Arc<RefusalLog>,
        client: ConnectionContext,
    ) -> Self {
        let client = Arc::new(client);
        // Read before the state: a replacement in between is then noticed at the next request.
        let version = cell.version.load(Ordering::Acquire);
        let service = cell.load().connection_service(Arc::clone(&client));
        let (version, service) = (Cell::new(version), RefCell::new(service));
        Self { listener, cell, access_log, refusals, client, version, service }
    }

    #[cold]
    fn update(&self, version: usize) {
        self.version.set(version);
        *self.service.borrow_mut() = self.cell.load().connection_service(Arc::clone(&self.client));
    }

    /// Refuses a request that a server in front, or behind, may read in another way.
    #[cold]
    fn refuse_ambiguous(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        let (watch, why) = (&self.client.watch, HttpError::AmbiguousFraming);
        let ip = Some(self.cell.load().client_ip(self.client.address.ip(), &request));
        let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
        let (method, path) = (Some(request.method().as_str()), Some(request.uri().path()));
        let query = Query { ip, method, path, host, ..Query::default() };
        self.refusals.log_invalid_request(self.access_log.now(), why, &query, &watch.access);
        finish_response(watch, discard_body(watch, request.into_body(), true, why.response()))
    }
}

/// The response of a listener's service, or a refusal that comes before it.
type AnyFuture<F> = Either<Ready<Result<Response<ResponseBody>, Infallible>>, F>;

impl<T: ListenerState> Service<Request<Incoming>> for CurrentService<T> {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = LoggedResponseFuture<AnyFuture<<T::Service as Service<Request<Incoming>>>::Future>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let version = self.cell.version.load(Ordering::Acquire);
        if version != self.version.get() {
            self.update(version);
        }
        let ConnectionContext { address, watch, .. } = &*self.client;
        let client_ip = |request: &Request<Incoming>| self.cell.load().client_ip(address.ip(), request);
        watch.count_request();
        self.access_log.log_response(self.listener, watch, request, client_ip, |request| match watch.is_ambiguous() {
            true => Either::Left(ready(Ok(self.refuse_ambiguous(request)))),
            false => Either::Right(self.service.borrow().call(request)),
        })
    }
}
