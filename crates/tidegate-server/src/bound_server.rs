//! A server with open listeners: running it and shutting it down.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::Gate;
use tidegate::clock::SystemClock;
use tidegate::outbound::{Outbound, Snapshot};
use tidegate::store::{Losses, Memory, Store};
use tidegate_core::Clock;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::connection::ConnectionService;
use crate::events::{ServerEvent, ServerEvents, watch_quotas, watch_store};
use crate::gateway::PlainClient;
use crate::housekeeping;
use crate::listener::{ConnectionContext, Listener};
use crate::metrics::RequestMetrics;
use crate::permit_renewer::PermitRenewer;
use crate::refusal_log::RefusalLog;
use crate::upstream::UpstreamClient;
use crate::watchdog::Watchdog;

/// The time that aborted connections get to release their permits and sockets.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// A server with open listeners.
pub struct BoundServer<S: Store = Memory, C: Clock = SystemClock> {
    pub(crate) gate: Gate<S, C>,
    pub(crate) providers: Option<Outbound<S, C>>,
    pub(crate) snapshot: Option<Arc<Snapshot<S, C>>>,
    pub(crate) upstream: Option<Arc<UpstreamClient>>,
    pub(crate) plain_clients: Vec<Arc<PlainClient>>,
    pub(crate) inbound: Option<OpenListener>,
    pub(crate) outbound: Option<OpenListener>,
    pub(crate) api: Option<OpenListener>,
    pub(crate) admin: Option<OpenListener>,
    pub(crate) permit_renewer: Arc<PermitRenewer>,
    pub(crate) refusals: Arc<RefusalLog>,
    pub(crate) metrics: Arc<RequestMetrics>,
    pub(crate) events: Arc<ServerEvents>,
    pub(crate) draining: Arc<AtomicBool>,
    pub(crate) shutdown_timeout: Duration,
    pub(crate) followed_clock: Option<SystemClock>,
}

/// An open listener with the service of its connections.
pub(crate) struct OpenListener {
    address: Option<SocketAddr>,
    watchdog: Arc<Watchdog>,
    accept: AcceptTask,
}

/// The task of a listener. It accepts connections until the channel has `true`, or is closed.
type AcceptTask = Box<dyn FnOnce(watch::Receiver<bool>) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

impl OpenListener {
    /// The list of its connections.
    pub(crate) fn watchdog(&self) -> &Arc<Watchdog> {
        &self.watchdog
    }

    pub(crate) fn new<T: ConnectionService>(
        listener: Listener,
        new_service: impl Fn(ConnectionContext) -> T + Send + Sync + 'static,
    ) -> Self {
        Self {
            address: listener.address().ok(),
            watchdog: Arc::clone(listener.watchdog()),
            accept: Box::new(|mut stop| {
                Box::pin(async move {
                    let stop = async { drop(stop.wait_for(|stops| *stops).await) };
                    listener.run(new_service, stop).await;
                })
            }),
        }
    }
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
        self.inbound.as_ref()?.address
    }

    /// The address of the gateway to external APIs. `None` if it doesn't listen.
    pub fn outbound(&self) -> Option<SocketAddr> {
        self.outbound.as_ref()?.address
    }

    /// The address of the decision API and forward-auth. `None` if they don't listen.
    pub fn api(&self) -> Option<SocketAddr> {
        self.api.as_ref()?.address
    }

    /// The address of the health and readiness checks. `None` if they don't listen.
    pub fn admin(&self) -> Option<SocketAddr> {
        self.admin.as_ref()?.address
    }

    /// Serves until `stop` ends, and then until every request in flight has its response or the policy's
    /// `timeouts.shutdown` is over. Dropping the future stops accepting and housekeeping at once, and leaves the
    /// connections to the runtime.
    pub async fn run(self, stop: impl Future<Output = ()>) -> ShutdownSummary {
        let clients = ListenerGroup::start([self.inbound, self.outbound, self.api]);
        let admin = ListenerGroup::start([self.admin]);
        let mut housekeeping = JoinSet::new();
        for watchdog in clients.watchdogs.iter().chain(&admin.watchdogs) {
            let watchdog = Arc::clone(watchdog);
            housekeeping.spawn(async move { watchdog.run().await });
        }
        if let Some(upstream) = self.upstream {
            housekeeping.spawn(async move { upstream.run_idle_cleanup().await });
        }
        for client in self.plain_clients {
            housekeeping.spawn(async move { client.run_idle_cleanup().await });
        }
        let permit_renewer = self.permit_renewer;
        housekeeping.spawn(async move { permit_renewer.run().await });
        let (refusals, plan) = (Arc::clone(&self.refusals), Arc::clone(self.gate.plan()));
        housekeeping.spawn(async move { refusals.run(&plan).await });
        housekeeping.spawn(watch_store(self.gate.clone(), Arc::clone(&self.events)));
        if let Some(providers) = &self.providers {
            housekeeping.spawn(watch_quotas(providers.clone(), Arc::clone(&self.events)));
        }
        let (gate, clock) = (self.gate.clone(), self.gate.clock().clone());
        let on_loss = move |losses: &Losses| {
            self.metrics.record_losses(losses);
            self.events.publish(ServerEvent::new(clock.now(), losses.into()));
        };
        housekeeping.spawn(housekeeping::run_store_maintenance(move || gate.maintain(), on_loss.clone()));
        if let Some(providers) = self.providers {
            housekeeping.spawn(housekeeping::run_vote_exchange(providers.clone()));
            housekeeping.spawn(housekeeping::run_store_maintenance(move || providers.maintain(), on_loss));
        }
        if let Some(snapshot) = &self.snapshot {
            housekeeping.spawn(housekeeping::run_snapshots(Arc::clone(snapshot)));
        }
        if let Some(clock) = self.followed_clock {
            housekeeping.spawn(housekeeping::follow_wall_clock(clock));
        }

        stop.await;
        tracing::info!(timeout = ?self.shutdown_timeout, "stopping: no more connections; requests in flight get their answers");
        self.draining.store(true, Ordering::Relaxed);
        let summary = shut_down(clients, admin, self.shutdown_timeout).await;
        if let Some(snapshot) = self.snapshot {
            housekeeping::save_snapshot(&snapshot, &mut true).await;
        }
        self.refusals.log_summary(self.gate.plan());
        tracing::info!(cut_off = summary.cut_off, "stopped");
        summary
    }
}

/// Running listeners that stop together.
struct ListenerGroup {
    watchdogs: Vec<Arc<Watchdog>>,
    accepting: JoinSet<()>,
    stop: watch::Sender<bool>,
}

impl ListenerGroup {
    fn start(listeners: impl IntoIterator<Item = Option<OpenListener>>) -> Self {
        let mut group = Self { watchdogs: Vec::new(), accepting: JoinSet::new(), stop: watch::Sender::new(false) };
        for OpenListener { watchdog, accept, .. } in listeners.into_iter().flatten() {
            group.watchdogs.push(watchdog);
            group.accepting.spawn(accept(group.stop.subscribe()));
        }
        group
    }

    /// Waits until no listener accepts and no connection is open.
    async fn wait_until_closed(&mut self) {
        while self.accepting.join_next().await.is_some() {}
        for watchdog in &self.watchdogs {
            watchdog.wait_until_empty().await;
        }
    }
}

/// Ends all listeners: first those of clients, which may finish their requests, then the admin's.
async fn shut_down(mut clients: ListenerGroup, mut admin: ListenerGroup, timeout: Duration) -> ShutdownSummary {
    for watchdog in &clients.watchdogs {
        watchdog.drain();
    }
    clients.stop.send_replace(true);
    let in_time = tokio::time::timeout(timeout, clients.wait_until_closed()).await.is_ok();
    let cut_off = clients.watchdogs.iter().map(|watchdog| watchdog.len()).sum();
    if !in_time {
        tracing::warn!(connections = cut_off, "the time for shutting down is over: connections are cut off");
    }
    admin.stop.send_replace(true);
    for watchdog in clients.watchdogs.iter().chain(&admin.watchdogs) {
        watchdog.abort();
    }
    let all_closed = async {
        clients.wait_until_closed().await;
        admin.wait_until_closed().await;
    };
    let _ = tokio::time::timeout(ABORT_TIMEOUT, all_closed).await;
    ShutdownSummary { cut_off }
}
