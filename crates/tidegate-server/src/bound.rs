//! A gate whose listeners are open, while it runs and until it has ended.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::service::service_fn;
use tidegate::core::Clock;
use tidegate::outbound::{Outbound, Snapshot};
use tidegate::store::Store;
use tidegate::{Gate, Memory, SystemClock};
use tokio::task::JoinSet;

use crate::gateway::Gateway;
use crate::listener::Listener;
use crate::permit::Keeper;
use crate::proxy::Proxy;
use crate::refusals::Refusals;
use crate::watch::Sweep;
use crate::wire::admin::{self, Admin};
use crate::wire::http_api::{Api, Caller};
use crate::{housekeeping, snapshots};

/// A gate whose listeners are open.
pub struct Bound<S: Store = Memory, C: Clock = SystemClock> {
    pub(crate) gate: Gate<S, C>,
    pub(crate) providers: Option<Outbound<S, C>>,
    pub(crate) snapshot: Option<Arc<Snapshot<S, C>>>,
    pub(crate) inbound: Option<Open<Proxy<S, C>>>,
    pub(crate) outbound: Option<Open<Gateway<S, C>>>,
    pub(crate) api: Option<Open<Api<S, C>>>,
    pub(crate) admin: Option<Open<Admin<S, C>>>,
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) refusals: Arc<Refusals>,
    pub(crate) draining: Arc<AtomicBool>,
    pub(crate) shutdown: Duration,
    pub(crate) clock_follower: Option<SystemClock>,
}

/// An open listener and what serves those who come to it.
pub(crate) struct Open<T> {
    pub(crate) listener: Listener,
    pub(crate) service: Arc<T>,
}

/// How a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Connections that had to be cut off because the time for shutting down was over.
    pub cut_off: usize,
}

impl<S: Store, C: Clock + Clone> Bound<S, C> {
    /// Where the proxy listens, if there is one.
    pub fn inbound(&self) -> Option<SocketAddr> {
        self.inbound.as_ref().and_then(|open| open.listener.address().ok())
    }

    /// Where the gateway to other people's APIs listens, if there is one.
    pub fn outbound(&self) -> Option<SocketAddr> {
        self.outbound.as_ref().and_then(|open| open.listener.address().ok())
    }

    /// Where the decision API and forward-auth listen.
    pub fn api(&self) -> Option<SocketAddr> {
        self.api.as_ref().and_then(|open| open.listener.address().ok())
    }

    /// Where health and readiness are answered.
    pub fn admin(&self) -> Option<SocketAddr> {
        self.admin.as_ref().and_then(|open| open.listener.address().ok())
    }

    /// Serves until `stop` ends, and then until every request in flight has its answer, or the policy's
    /// `timeouts.shutdown` is over. Dropping the future stops accepting and housekeeping at once, and leaves the
    /// connections to the runtime.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Ended {
        let (stopping, stopped) = tokio::sync::watch::channel(false);
        let (ending, ended) = tokio::sync::watch::channel(false);
        let mut housekeeping = JoinSet::new();
        let mut accepting = JoinSet::new();
        let mut admin_accepting = JoinSet::new();
        let mut sweeps: Vec<Arc<Sweep>> = Vec::new();
        let mut admin_sweep = None;
        if let Some(Open { listener, service }) = self.inbound {
            sweeps.push(Arc::clone(&listener.sweep));
            let upstream = Arc::clone(&service.upstream);
            housekeeping.spawn(async move { upstream.age().await });
            let keeper = self.keeper;
            housekeeping.spawn(async move { keeper.run().await });
            let meet = move |client| service.meet(client);
            accepting.spawn(listener.run(meet, told(stopped.clone())));
        }
        if let Some(Open { listener, service }) = self.outbound {
            sweeps.push(Arc::clone(&listener.sweep));
            for upstream in &service.upstreams {
                let upstream = Arc::clone(upstream);
                housekeeping.spawn(async move { upstream.age().await });
            }
            let meet = move |client| service.meet(client);
            accepting.spawn(listener.run(meet, told(stopped.clone())));
        }
        if let Some(Open { listener, service }) = self.api {
            sweeps.push(Arc::clone(&listener.sweep));
            let meet = move |client| Caller::new(&service, client);
            accepting.spawn(listener.run(meet, told(stopped.clone())));
        }
        if let Some(Open { listener, service }) = self.admin {
            admin_sweep = Some(Arc::clone(&listener.sweep));
            let meet = move |client| {
                let (service, client) = (Arc::clone(&service), Arc::new(client));
                service_fn(move |request| admin::serve(Arc::clone(&service), Arc::clone(&client), request))
            };
            admin_accepting.spawn(listener.run(meet, told(ended)));
        }
        for sweep in sweeps.iter().chain(&admin_sweep) {
            let sweep = Arc::clone(sweep);
            housekeeping.spawn(async move { sweep.run().await });
        }
        let refusals = self.refusals;
        housekeeping.spawn(async move { refusals.run().await });
        let gate = self.gate;
        housekeeping.spawn(async move { housekeeping::tend(|| gate.tend()).await });
        if let Some(providers) = self.providers {
            let conferring = providers.clone();
            housekeeping.spawn(async move { housekeeping::confer(&conferring).await });
            housekeeping.spawn(async move { housekeeping::tend(|| providers.tend()).await });
        }
        if let Some(snapshot) = &self.snapshot {
            let snapshot = Arc::clone(snapshot);
            housekeeping.spawn(async move { snapshots::run(snapshot).await });
        }
        if let Some(clock) = self.clock_follower {
            housekeeping.spawn(async move { housekeeping::follow(&clock).await });
        }

        stop.await;
        tracing::info!(patience = ?self.shutdown, "stopping: no more connections; requests in flight get their answers");
        self.draining.store(true, Ordering::Relaxed);
        for sweep in &sweeps {
            sweep.drain();
        }
        let _ = stopping.send(true);
        let emptied = async {
            while accepting.join_next().await.is_some() {}
            for sweep in &sweeps {
                sweep.emptied().await;
            }
        };
        let in_time = tokio::time::timeout(self.shutdown, emptied).await.is_ok();
        let cut_off = sweeps.iter().map(|sweep| sweep.len()).sum();
        if !in_time {
            tracing::warn!(connections = cut_off, "the time for shutting down is over: connections are cut off");
        }
        let _ = ending.send(true);
        for sweep in sweeps.iter().chain(&admin_sweep) {
            sweep.abort();
        }
        while admin_accepting.join_next().await.is_some() {}
        // What was aborted gets a moment to let go of its permits and sockets.
        let gone = async {
            for sweep in sweeps.iter().chain(&admin_sweep) {
                sweep.emptied().await;
            }
        };
        let _ = tokio::time::timeout(Duration::from_secs(1), gone).await;
        if let Some(snapshot) = self.snapshot {
            snapshots::save(&snapshot, &mut true).await;
        }
        tracing::info!(cut_off, "stopped");
        Ended { cut_off }
    }
}

async fn told(mut signal: tokio::sync::watch::Receiver<bool>) {
    // An error means that the sender is gone, which is as good as being told.
    let _ = signal.wait_for(|told| *told).await;
}
