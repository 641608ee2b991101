//! A server with open listeners: running it and shutting it down.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::service::service_fn;
use tidegate::Gate;
use tidegate::clock::SystemClock;
use tidegate::outbound::{Outbound, Snapshot};
use tidegate::store::{Memory, Store};
use tidegate_core::Clock;
use tokio::sync::watch::{self, Sender};
use tokio::task::JoinSet;

use crate::gateway::GatewayState;
use crate::listener::Listener;
use crate::permit_renewer::PermitRenewer;
use crate::proxy::ProxyState;
use crate::refusal_log::RefusalLog;
use crate::watchdog::Watchdog;
use crate::wire::admin::{self, AdminState};
use crate::wire::http_api::{ApiService, ApiState};
use crate::{housekeeping, snapshots};

/// A server with open listeners.
pub struct BoundServer<S: Store = Memory, C: Clock = SystemClock> {
    pub(crate) gate: Gate<S, C>,
    pub(crate) providers: Option<Outbound<S, C>>,
    pub(crate) snapshot: Option<Arc<Snapshot<S, C>>>,
    pub(crate) inbound: Option<OpenListener<ProxyState<S, C>>>,
    pub(crate) outbound: Option<OpenListener<GatewayState<S, C>>>,
    pub(crate) api: Option<OpenListener<ApiState<S, C>>>,
    pub(crate) admin: Option<OpenListener<AdminState<S, C>>>,
    pub(crate) permit_renewer: Arc<PermitRenewer>,
    pub(crate) refusals: Arc<RefusalLog>,
    pub(crate) draining: Arc<AtomicBool>,
    pub(crate) shutdown_timeout: Duration,
    pub(crate) followed_clock: Option<SystemClock>,
}

/// An open listener and the service of its connections.
pub(crate) struct OpenListener<T> {
    pub(crate) listener: Listener,
    pub(crate) service: Arc<T>,
}

/// The result of a shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShutdownSummary {
    /// The number of connections that were still open when the shutdown time was over, and were closed.
    pub cut_off: usize,
}

impl<S: Store, C: Clock + Clone> BoundServer<S, C> {
    /// The address of the proxy's listener. `None` if the policy has no upstream.
    pub fn inbound(&self) -> Option<SocketAddr> {
        self.inbound.as_ref().and_then(|open| open.listener.address().ok())
    }

    /// The address of the gateway to external APIs. `None` if it doesn't listen.
    pub fn outbound(&self) -> Option<SocketAddr> {
        self.outbound.as_ref().and_then(|open| open.listener.address().ok())
    }

    /// The address of the decision API and forward-auth. `None` if they don't listen.
    pub fn api(&self) -> Option<SocketAddr> {
        self.api.as_ref().and_then(|open| open.listener.address().ok())
    }

    /// The address of the health and readiness checks. `None` if they don't listen.
    pub fn admin(&self) -> Option<SocketAddr> {
        self.admin.as_ref().and_then(|open| open.listener.address().ok())
    }

    /// Serves until `stop` ends, and then until every request in flight has its response or the policy's
    /// `timeouts.shutdown` is over. Dropping the future stops accepting and housekeeping at once, and leaves the
    /// connections to the runtime.
    pub async fn run(self, stop: impl Future<Output = ()>) -> ShutdownSummary {
        let (stopping, stopped) = watch::channel(false);
        let (ending, ended) = watch::channel(false);
        let mut housekeeping = JoinSet::new();
        let mut accepting = JoinSet::new();
        let mut admin_accepting = JoinSet::new();
        let mut watchdogs: Vec<Arc<Watchdog>> = Vec::new();
        let mut admin_watchdog = None;
        if let Some(OpenListener { listener, service }) = self.inbound {
            watchdogs.push(Arc::clone(&listener.watchdog));
            let upstream = Arc::clone(&service.upstream);
            housekeeping.spawn(async move { upstream.run_idle_cleanup().await });
            let permit_renewer = self.permit_renewer;
            housekeeping.spawn(async move { permit_renewer.run().await });
            let new_service = move |client| service.connection_service(client);
            accepting.spawn(listener.run(new_service, wait_for_signal(stopped.clone())));
        }
        if let Some(OpenListener { listener, service }) = self.outbound {
            watchdogs.push(Arc::clone(&listener.watchdog));
            let new_service = move |client| service.connection_service(client);
            accepting.spawn(listener.run(new_service, wait_for_signal(stopped.clone())));
        }
        if let Some(OpenListener { listener, service }) = self.api {
            watchdogs.push(Arc::clone(&listener.watchdog));
            let new_service = move |client| ApiService::new(&service, client);
            accepting.spawn(listener.run(new_service, wait_for_signal(stopped.clone())));
        }
        if let Some(OpenListener { listener, service }) = self.admin {
            admin_watchdog = Some(Arc::clone(&listener.watchdog));
            let new_service = move |client| {
                let (service, client) = (Arc::clone(&service), Arc::new(client));
                service_fn(move |request| admin::serve(Arc::clone(&service), Arc::clone(&client), request))
            };
            admin_accepting.spawn(listener.run(new_service, wait_for_signal(ended)));
        }
        for watchdog in watchdogs.iter().chain(&admin_watchdog) {
            let watchdog = Arc::clone(watchdog);
            housekeeping.spawn(async move { watchdog.run().await });
        }
        let refusals = self.refusals;
        housekeeping.spawn(async move { refusals.run().await });
        let gate = self.gate;
        housekeeping.spawn(async move { housekeeping::run_store_maintenance(|| gate.maintain()).await });
        if let Some(providers) = self.providers {
            let providers_for_votes = providers.clone();
            housekeeping.spawn(async move { housekeeping::run_vote_exchange(&providers_for_votes).await });
            housekeeping.spawn(async move { housekeeping::run_store_maintenance(|| providers.maintain()).await });
        }
        if let Some(snapshot) = &self.snapshot {
            let snapshot = Arc::clone(snapshot);
            housekeeping.spawn(async move { snapshots::run(snapshot).await });
        }
        if let Some(clock) = self.followed_clock {
            housekeeping.spawn(async move { housekeeping::follow_wall_clock(&clock).await });
        }

        let shutdown = Shutdown {
            watchdogs,
            admin_watchdog,
            accepting,
            admin_accepting,
            stopping,
            ending,
            timeout: self.shutdown_timeout,
        };
        stop.await;
        tracing::info!(patience = ?self.shutdown_timeout, "stopping: no more connections; requests in flight get their answers");
        self.draining.store(true, Ordering::Relaxed);
        let summary = shutdown.run().await;
        if let Some(snapshot) = self.snapshot {
            snapshots::save(&snapshot, &mut true).await;
        }
        tracing::info!(cut_off = summary.cut_off, "stopped");
        summary
    }
}

/// The parts of a running server that a shutdown ends.
struct Shutdown {
    watchdogs: Vec<Arc<Watchdog>>,
    admin_watchdog: Option<Arc<Watchdog>>,
    accepting: JoinSet<()>,
    admin_accepting: JoinSet<()>,
    stopping: Sender<bool>,
    ending: Sender<bool>,
    timeout: Duration,
}

impl Shutdown {
    /// Ends all listeners: first those of clients, which may finish their requests, then the admin's.
    async fn run(mut self) -> ShutdownSummary {
        for watchdog in &self.watchdogs {
            watchdog.drain();
        }
        let _ = self.stopping.send(true);
        let emptied = async {
            while self.accepting.join_next().await.is_some() {}
            for watchdog in &self.watchdogs {
                watchdog.wait_until_empty().await;
            }
        };
        let in_time = tokio::time::timeout(self.timeout, emptied).await.is_ok();
        let cut_off = self.watchdogs.iter().map(|watchdog| watchdog.len()).sum();
        if !in_time {
            tracing::warn!(connections = cut_off, "the time for shutting down is over: connections are cut off");
        }
        let _ = self.ending.send(true);
        for watchdog in self.watchdogs.iter().chain(&self.admin_watchdog) {
            watchdog.abort();
        }
        while self.admin_accepting.join_next().await.is_some() {}
        // Aborted connections get up to 1 s to release their permits and sockets.
        let all_closed = async {
            for watchdog in self.watchdogs.iter().chain(&self.admin_watchdog) {
                watchdog.wait_until_empty().await;
            }
        };
        let _ = tokio::time::timeout(Duration::from_secs(1), all_closed).await;
        ShutdownSummary { cut_off }
    }
}

async fn wait_for_signal(mut signal: watch::Receiver<bool>) {
    // An error means that the sender was dropped, which also means stop.
    let _ = signal.wait_for(|is_signalled| *is_signalled).await;
}
