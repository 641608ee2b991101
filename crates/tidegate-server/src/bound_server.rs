//! A server with open listeners: running it and shutting it down.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate::clock::SystemClock;
use tidegate::outbound::{Outbound, Snapshot};
use tidegate::store::{Losses, Memory, Store};
use tidegate_core::Clock;
use tidegate_policy::ListenAddress;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::FileWatcher;
use crate::alerts::run_alerts;
use crate::events::{ServerEvent, watch_quotas, watch_store};
use crate::housekeeping;
use crate::listener::{ConnectionHandler, Listener};
use crate::reload::{ReloadHandle, Reloader, reload_on_change, replace_certificates};
use crate::states::{Engine, SharedParts};
use crate::tls::ListenerTls;
use crate::watchdog::Watchdog;

/// The time that aborted connections get to release their permits and sockets.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// A server with open listeners.
pub struct BoundServer<S: Store = Memory, C: Clock = SystemClock> {
    pub(crate) reloader: Reloader<S, C>,
    pub(crate) policy_files: Option<FileWatcher>,
    pub(crate) snapshot: Option<Arc<Snapshot<S, C>>>,
    pub(crate) inbound: Option<OpenListener>,
    pub(crate) outbound: Option<OpenListener>,
    pub(crate) api: Option<OpenListener>,
    pub(crate) rls: Option<OpenListener>,
    pub(crate) resp: Option<OpenListener>,
    pub(crate) admin: Option<OpenListener>,
    pub(crate) followed_clock: Option<SystemClock>,
}

/// An open listener with the service of its connections.
pub(crate) struct OpenListener {
    addresses: Vec<ListenAddress>,
    watchdog: Arc<Watchdog>,
    tls: Option<Arc<ListenerTls>>,
    accept: AcceptTask,
}

/// The task of a listener. It accepts connections until the channel has `true`, or is closed.
type AcceptTask = Box<dyn FnOnce(watch::Receiver<bool>) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

impl OpenListener {
    /// Its TLS, if it has any.
    pub(crate) fn tls(&self) -> Option<&Arc<ListenerTls>> {
        self.tls.as_ref()
    }

    /// The list of its connections.
    pub(crate) fn watchdog(&self) -> &Arc<Watchdog> {
        &self.watchdog
    }

    pub(crate) fn new(listener: Listener, handler: impl ConnectionHandler) -> Self {
        Self {
            addresses: listener.addresses(),
            watchdog: Arc::clone(listener.watchdog()),
            tls: listener.tls().cloned(),
            accept: Box::new(|mut stop| {
                Box::pin(async move {
                    let stop = async { drop(stop.wait_for(|stops| *stops).await) };
                    listener.run(Arc::new(handler), stop).await;
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
    /// The IP address of the proxy's listener, the first if it has several. `None` if the policy has no upstream, or if
    /// the proxy listens only on unix sockets.
    pub fn inbound(&self) -> Option<SocketAddr> {
        first_tcp(self.inbound_addresses())
    }

    /// The IP address of the gateway to external APIs, the first if it has several.
    pub fn outbound(&self) -> Option<SocketAddr> {
        first_tcp(self.outbound_addresses())
    }

    /// The IP address of the decision API and forward-auth, the first if they have several.
    pub fn api(&self) -> Option<SocketAddr> {
        first_tcp(self.api_addresses())
    }

    /// The IP address of the rate limit service, the first if it has several. `None` without `[rls]`.
    pub fn rls(&self) -> Option<SocketAddr> {
        first_tcp(self.rls_addresses())
    }

    /// The IP address of the Redis protocol, the first if it has several. `None` without `[resp]`.
    pub fn resp(&self) -> Option<SocketAddr> {
        first_tcp(self.resp_addresses())
    }

    /// The IP address of the admin listener, the first if it has several.
    pub fn admin(&self) -> Option<SocketAddr> {
        first_tcp(self.admin_addresses())
    }

    /// All addresses of the proxy's listener.
    pub fn inbound_addresses(&self) -> &[ListenAddress] {
        addresses(&self.inbound)
    }

    /// All addresses of the gateway to external APIs.
    pub fn outbound_addresses(&self) -> &[ListenAddress] {
        addresses(&self.outbound)
    }

    /// All addresses of the decision API and forward-auth.
    pub fn api_addresses(&self) -> &[ListenAddress] {
        addresses(&self.api)
    }

    /// All addresses of the rate limit service.
    pub fn rls_addresses(&self) -> &[ListenAddress] {
        addresses(&self.rls)
    }

    /// All addresses of the Redis protocol.
    pub fn resp_addresses(&self) -> &[ListenAddress] {
        addresses(&self.resp)
    }

    /// All addresses of the admin listener.
    pub fn admin_addresses(&self) -> &[ListenAddress] {
        addresses(&self.admin)
    }

    /// Asks the running server to read its policy again.
    pub fn reload_handle(&self) -> ReloadHandle {
        self.reloader.parts().reload.clone()
    }

    /// Serves until `stop` ends, and then until every request in flight has its response or the policy's
    /// `timeouts.shutdown` is over. Dropping the future stops accepting and housekeeping at once, and leaves the
    /// connections to the runtime.
    pub async fn run(self, stop: impl Future<Output = ()>) -> ShutdownSummary {
        let clients = ListenerGroup::start([self.inbound, self.outbound, self.api, self.rls, self.resp]);
        let has_admin = self.admin.is_some();
        let admin = ListenerGroup::start([self.admin]);
        let mut housekeeping = JoinSet::new();
        for watchdog in clients.watchdogs.iter().chain(&admin.watchdogs) {
            let watchdog = Arc::clone(watchdog);
            housekeeping.spawn(async move { watchdog.run().await });
        }
        let parts = Arc::clone(self.reloader.parts());
        let engine = Arc::clone(&self.reloader.cells().engine);
        let SharedParts { refusals, metrics, events, permit_renewer, .. } = &*parts;
        if has_admin {
            housekeeping.spawn(housekeeping::record_history(Arc::clone(&engine), Arc::clone(&parts)));
        }
        housekeeping.spawn({
            let permit_renewer = Arc::clone(permit_renewer);
            async move { permit_renewer.run().await }
        });
        housekeeping.spawn({
            let (refusals, engine) = (Arc::clone(refusals), Arc::clone(&engine));
            async move { refusals.run(|| Arc::clone(engine.load().gate.plan())).await }
        });
        let (clock, has_providers, shutdown_timeout) = {
            let Engine { gate, providers, policy, .. } = &*engine.load();
            (gate.clock().clone(), providers.is_some(), policy.inbound().timeouts.shutdown)
        };
        let clock_of_certificates = clock.clone();
        housekeeping.spawn(watch_store(Arc::clone(&engine), Arc::clone(events)));
        housekeeping.spawn(run_alerts(Arc::clone(&engine), Arc::clone(&parts)));
        let on_loss = {
            let (metrics, events, clock) = (Arc::clone(metrics), Arc::clone(events), clock);
            move |losses: &Losses| {
                metrics.record_losses(losses);
                events.publish(ServerEvent::new(clock.now(), losses.into()));
            }
        };
        let maintain = {
            let engine = Arc::clone(&engine);
            move || engine.load().gate.maintain()
        };
        housekeeping.spawn(housekeeping::run_store_maintenance(maintain, on_loss.clone()));
        if has_providers {
            housekeeping.spawn(watch_quotas(Arc::clone(&engine), Arc::clone(events)));
            housekeeping.spawn(housekeeping::run_vote_exchange(Arc::clone(&engine)));
            let engine = Arc::clone(&engine);
            let maintain = move || engine.load().providers.as_ref().map(Outbound::maintain).unwrap_or_default();
            housekeeping.spawn(housekeeping::run_store_maintenance(maintain, on_loss));
        }
        if let Some(files) = self.policy_files {
            housekeeping.spawn(reload_on_change(files, Arc::clone(&engine), parts.reload.clone()));
        }
        housekeeping.spawn(self.reloader.run());
        if parts.tls.get().is_some_and(|tls| !tls.is_empty()) {
            housekeeping.spawn(replace_certificates(Arc::clone(&parts), clock_of_certificates));
        }
        let mut announcing = JoinSet::new();
        announcing.spawn({
            let (parts, engine) = (Arc::clone(&parts), Arc::clone(&engine));
            async move { parts.fleet.run(engine).await }
        });
        if let Some(snapshot) = &self.snapshot {
            housekeeping.spawn(housekeeping::run_snapshots(Arc::clone(snapshot)));
        }
        if let Some(clock) = self.followed_clock {
            housekeeping.spawn(housekeeping::follow_wall_clock(clock));
        }

        stop.await;
        tracing::info!(timeout = ?shutdown_timeout, "stopping: no more connections; requests in flight get their answers");
        parts.draining.store(true, Ordering::Relaxed);
        let summary = shut_down(clients, admin, shutdown_timeout).await;
        announcing.shutdown().await;
        let gate = engine.load().gate.clone();
        parts.fleet.withdraw(&gate).await;
        if let Some(snapshot) = self.snapshot {
            housekeeping::save_snapshot(&snapshot, &mut true).await;
        }
        let engine = engine.load();
        engine.alerts.finish(engine.gate.clock().now()).await;
        refusals.log_summary(engine.gate.plan());
        tracing::info!(cut_off = summary.cut_off, "stopped");
        summary
    }
}

fn addresses(listener: &Option<OpenListener>) -> &[ListenAddress] {
    listener.as_ref().map_or(&[], |listener| &listener.addresses)
}

fn first_tcp(addresses: &[ListenAddress]) -> Option<SocketAddr> {
    addresses.iter().find_map(ListenAddress::tcp)
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
