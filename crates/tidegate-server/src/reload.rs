//! The replacement of the policy while the server runs.

use std::collections::HashSet;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use tidegate::NextPolicyError;
use tidegate::outbound::{NextOutboundError, Outbound, OutboundLayer, Snapshot};
use tidegate::store::Store;
use tidegate_core::Clock;
use tidegate_policy::outbound::OutboundConfig;
use tidegate_policy::{Errors, Policy, RlsConfig};
use tidegate_runtime::file_watcher::{FileChange, FileWatcher};
use tokio::sync::{mpsc, oneshot};

use crate::alerts::AlertSet;
use crate::events::{Change, ServerEvent};
use crate::state_cell::StateCell;
use crate::states::{Engine, ListenerStates, SharedParts, StateCells};
use crate::{PolicySource, ServeError};

/// The interval at which watched files are looked at. A file that is written with longer pauses may be read half-written.
/// That reload can't turn watching off, so the file is read once more at its end.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// The maximum number of requests for a reload that wait.
const MAX_WAITING: usize = 16;

/// Asks a running server to read its policy again. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ReloadHandle(mpsc::Sender<ReloadRequest>);

/// A request to reload.
pub(crate) struct ReloadRequest {
    cause: ReloadCause,
    /// The place for the result.
    result: oneshot::Sender<Result<ReloadReport, Arc<ReloadError>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReloadCause {
    /// An operator asked for it.
    Request,
    /// A file has changed. It may be half-written.
    FileChange,
}

/// The result of a reload.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct ReloadReport {
    /// The settings that differ from those that the server was started with, and stay as they were until a restart.
    pub restart_needed: Vec<&'static str>,
}

/// The reason why the policy wasn't replaced. The one before is still in force.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// The server was started without [`Server::policy_source`](crate::Server::policy_source).
    #[error("this server can't read its policy again")]
    NoSource,
    /// The policy can't be read, or has errors.
    #[error("{0}")]
    Policy(Box<dyn Error + Send + Sync>),
    /// A changed file lacks these parts of the policy, as one that is half-written does. Only a reload through a
    /// [`ReloadHandle`] applies it.
    #[error("the changed file removes {}; if that is meant, `tidegate reload` applies it", .0.join(", "))]
    Removed(Vec<&'static str>),
    /// The gate can't go on by the new policy.
    #[error(transparent)]
    Gate(#[from] NextPolicyError),
    /// The providers can't go on by the new policy.
    #[error(transparent)]
    Outbound(#[from] NextOutboundError),
    /// A token of the new policy can't be read, or a listener can't serve by it.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The server has stopped, or the reload broke off.
    #[error("the server has stopped")]
    Stopped,
}

impl ReloadError {
    /// The error without lines of the policy, which readers of events may not know.
    fn brief(&self) -> String {
        match self {
            Self::Policy(error) => error.downcast_ref().map_or_else(|| error.to_string(), Errors::brief),
            other => other.to_string(),
        }
    }
}

impl ReloadHandle {
    /// Has the server read its policy again, and waits for the result. The server must be
    /// [running](crate::BoundServer::run). Reloads are done one after the other.
    ///
    /// # Errors
    /// See [`ReloadError`]. Every request goes on by the policy before.
    pub async fn reload(&self) -> Result<ReloadReport, Arc<ReloadError>> {
        self.request(ReloadCause::Request).await
    }

    async fn request(&self, cause: ReloadCause) -> Result<ReloadReport, Arc<ReloadError>> {
        let (result, told) = oneshot::channel();
        let stopped = || Arc::new(ReloadError::Stopped);
        self.0.send(ReloadRequest { cause, result }).await.map_err(|_| stopped())?;
        told.await.unwrap_or_else(|_| Err(stopped()))
    }
}

/// Replaces the policy of a server.
pub(crate) struct Reloader<S: Store, C: Clock> {
    cells: StateCells<S, C>,
    parts: Arc<SharedParts>,
    source: Option<PolicySource>,
    snapshot: Option<Arc<Snapshot<S, C>>>,
    /// The policy that was read last, and used as far as that went. The stores may know the ids of its limits.
    last_policy: Policy,
    requests: mpsc::Receiver<ReloadRequest>,
}

/// Reloads when one of the files has changed, while the policy says so; never returns. The reload reports its own result.
pub(crate) async fn reload_on_change<S: Store, C: Clock>(
    mut files: FileWatcher,
    engine: Arc<StateCell<Engine<S, C>>>,
    reload: ReloadHandle,
) {
    loop {
        tokio::time::sleep(WATCH_INTERVAL).await;
        let present = engine.load();
        let rls_files = present.policy.rls().into_iter().flat_map(RlsConfig::watched_files);
        files.follow(rls_files.map(|(path, metadata)| (path.to_owned(), metadata.into())));
        let changes = files.changes();
        if changes.is_empty() || !present.is_watched {
            continue;
        }
        let mut has_changed = false;
        for change in changes {
            match change {
                FileChange::Changed(_) => has_changed = true,
                FileChange::Gone(path) => tracing::warn!(file = %path.display(), "the file is gone; its policy stays"),
            }
        }
        if has_changed {
            let _ = reload.request(ReloadCause::FileChange).await;
        }
    }
}

/// Replaces the certificates of listeners when their files change; never returns.
pub(crate) async fn replace_certificates<C: Clock>(parts: Arc<SharedParts>, clock: C) {
    loop {
        tokio::time::sleep(WATCH_INTERVAL).await;
        for tls in parts.tls.get().into_iter().flatten() {
            let (now, listener) = (clock.now(), tls.listener);
            let reload = Arc::clone(tls);
            let reloaded = tokio::task::spawn_blocking(move || reload.reload_if_changed(now)).await;
            let change = match reloaded.unwrap_or_default() {
                None => continue,
                Some(Ok(())) => Change::CertificatesReplaced { listener },
                Some(Err(error)) => Change::CertificatesKept { listener, error: error.to_string() },
            };
            match &change {
                Change::CertificatesKept { .. } => tracing::error!("{change}"),
                _ => tracing::info!("{change}"),
            }
            parts.events.publish(ServerEvent::new(now, change));
        }
    }
}

/// Returns a channel for requests to reload.
pub(crate) fn reload_channel() -> (ReloadHandle, mpsc::Receiver<ReloadRequest>) {
    let (sender, receiver) = mpsc::channel(MAX_WAITING);
    (ReloadHandle(sender), receiver)
}

impl<S: Store, C: Clock + Clone> Reloader<S, C> {
    pub(crate) fn new(
        cells: StateCells<S, C>,
        parts: Arc<SharedParts>,
        source: Option<PolicySource>,
        snapshot: Option<Arc<Snapshot<S, C>>>,
        requests: mpsc::Receiver<ReloadRequest>,
    ) -> Self {
        let last_policy = cells.engine.load().policy.clone();
        Self { cells, parts, source, snapshot, last_policy, requests }
    }

    /// Reloads whenever it is asked to; never returns.
    pub(crate) async fn run(mut self) {
        while let Some(ReloadRequest { cause, result: caller }) = self.requests.recv().await {
            let result = self.reload(cause).await;
            self.publish(&result);
            // The caller may have gone.
            let _ = caller.send(result.map_err(Arc::new));
        }
    }

    /// Reads the next policy on a blocking thread, because a file may be slow to read, and a policy large.
    async fn read_policy(&self, cause: ReloadCause) -> Result<Policy, ReloadError> {
        let (source, present) = (self.source.clone().ok_or(ReloadError::NoSource)?, self.last_policy.clone());
        let read = tokio::task::spawn_blocking(move || source(&present)).await;
        let policy = read.map_err(|_| ReloadError::Stopped)?.map_err(ReloadError::Policy)?;
        match (cause, policy.removed()) {
            (ReloadCause::FileChange, removed @ [_, ..]) => Err(ReloadError::Removed(removed.to_vec())),
            _ => Ok(policy),
        }
    }

    async fn reload(&mut self, cause: ReloadCause) -> Result<ReloadReport, ReloadError> {
        let policy = self.read_policy(cause).await?;
        let engine = self.cells.engine.load();
        let is_watched = policy.reload().watch || cause == ReloadCause::FileChange;
        let report = ReloadReport { restart_needed: policy.restart_needed().to_vec() };
        let new_states = |engine: &Engine<S, C>| ListenerStates::new(engine, &self.parts, Some(&self.cells));
        // First with the present machines, because a store may not be able to go back to its earlier limits.
        let alerts = Arc::new(AlertSet::new(&policy, &self.parts, Some(&engine.alerts))?);
        let (gate, providers) = (engine.gate.clone(), engine.providers.clone());
        let present = Engine { policy, gate, providers, alerts, is_watched };
        new_states(&present)?;
        self.check_credentials(&present)?;
        self.last_policy = present.policy.clone();
        let policy = &present.policy;
        let providers = engine.providers.as_ref().map(|providers| providers.next(policy)).transpose()?;
        let next = Engine { gate: engine.gate.next(policy)?, providers, ..present };
        let states = new_states(&next)?;
        if let (Some(snapshot), Some(providers)) = (&self.snapshot, &next.providers) {
            snapshot.follow(providers);
        }
        self.parts.refusals.clients.follow(engine.gate.plan(), next.gate.plan());
        if let Some(history) = &self.parts.request_history {
            self.parts.remember_requests(&next.gate, history.follow(engine.gate.plan(), next.gate.plan()));
        }
        if let Some(admin) = &states.admin {
            self.parts.sessions.follow(&admin.access);
        }
        self.parts.access_log.set_mode(next.policy.log().access);
        let StateCells { engine, proxy, gateway, api, rls, resp, admin } = &self.cells;
        engine.replace(next);
        replace(proxy, states.proxy);
        replace(gateway, states.gateway);
        replace(api, states.api);
        replace(rls, states.rls);
        replace(resp, states.resp);
        replace(admin, states.admin);
        Ok(report)
    }

    /// Checks that the credentials of the providers that the new policy serves can be read.
    fn check_credentials(&self, present: &Engine<S, C>) -> Result<(), ServeError> {
        let Some(providers) = Outbound::in_memory(&present.policy, present.gate.clock().clone()) else { return Ok(()) };
        let served = present.policy.outbound().into_iter().flat_map(OutboundConfig::served_providers);
        let served: HashSet<&str> = served.map(|provider| provider.name.as_str()).collect();
        for provider in providers.providers().iter().filter(|provider| served.contains(&*provider.config().name)) {
            let name = &provider.config().name;
            OutboundLayer::with_env(provider.clone(), &self.parts.env)
                .map_err(|source| ServeError::Credential { provider: name.clone(), source })?;
        }
        Ok(())
    }

    /// Logs, counts and publishes a reload.
    fn publish(&self, result: &Result<ReloadReport, ReloadError>) {
        self.parts.metrics.record_reload(result.is_ok());
        let change = match result {
            Ok(report) => Change::Reloaded { restart_needed: report.restart_needed.clone() },
            Err(error) => Change::ReloadFailed { error: error.brief() },
        };
        match result {
            Ok(_) => tracing::info!("{change}"),
            Err(error) => tracing::error!("the policy wasn't reloaded: {error}"),
        }
        let at = self.cells.engine.load().gate.clock().now();
        self.parts.events.publish(ServerEvent::new(at, change));
    }

    pub(crate) fn cells(&self) -> &StateCells<S, C> {
        &self.cells
    }

    pub(crate) fn parts(&self) -> &Arc<SharedParts> {
        &self.parts
    }
}

/// Replaces the state of an open listener.
fn replace<T>(cell: &Option<Arc<StateCell<T>>>, state: Option<T>) {
    if let (Some(cell), Some(state)) = (cell, state) {
        cell.replace(state);
    }
}
