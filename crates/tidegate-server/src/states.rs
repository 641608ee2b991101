//! The states of the listeners, made from a policy.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Once, OnceLock};

use http::StatusCode;
use tidegate::outbound::Outbound;
use tidegate::reply::Replies;
use tidegate::store::Store;
use tidegate::{Gate, Time};
use tidegate_core::Clock;
use tidegate_policy::{KeyPart, ListenAddress, ListenConfig, NamedToken, Plan, Policy, SecretSource};
use tokio::sync::Semaphore;

use crate::access::{Access, AccessToken, ListenerKind};
use crate::access_log::AccessLog;
use crate::alerts::AlertSet;
use crate::dashboard::{Sessions, SignInLimiter};
use crate::descriptors::ConnectionCaps;
use crate::events::{ServerEvents, StreamPlaces};
use crate::fleet::FleetView;
use crate::gateway::GatewayState;
use crate::metrics::{History, MetricsSource, RequestMetrics};
use crate::permit_renewer::PermitRenewer;
use crate::proxy::ProxyState;
use crate::refusal_log::RefusalLog;
use crate::reload::ReloadHandle;
use crate::request_history::RequestHistory;
use crate::state_cell::StateCell;
use crate::tls::ListenerTls;
use crate::watchdog::Watchdog;
use crate::wire::admin::AdminState;
use crate::wire::forward_auth::ForwardAuthWarnings;
use crate::wire::http_api::ApiState;
use crate::wire::resp::RespState;
use crate::wire::rls::{RlsState, YamlLimits};
use crate::{EnvLookup, ServeError};

/// A policy, and the machines that decide by it.
pub(crate) struct Engine<S: Store, C: Clock> {
    pub(crate) policy: Policy,
    pub(crate) gate: Gate<S, C>,
    pub(crate) providers: Option<Outbound<S, C>>,
    pub(crate) alerts: Arc<AlertSet>,
    /// True while changes of the policy's files reload it. A changed file alone doesn't turn this off.
    pub(crate) is_watched: bool,
}

/// The parts of a server that stay when another policy replaces its own.
pub(crate) struct SharedParts {
    pub(crate) env: EnvLookup,
    pub(crate) permit_renewer: Arc<PermitRenewer>,
    pub(crate) refusals: Arc<RefusalLog>,
    pub(crate) access_log: Arc<AccessLog>,
    pub(crate) metrics: Arc<RequestMetrics>,
    pub(crate) history: History,
    pub(crate) fleet: FleetView,
    pub(crate) events: Arc<ServerEvents>,
    pub(crate) reload: ReloadHandle,
    /// The sessions of the dashboard.
    pub(crate) sessions: Sessions,
    /// The limit on tries to sign in to it.
    pub(crate) sign_in_limiter: Arc<SignInLimiter>,
    /// The places for streams of events.
    pub(crate) event_streams: Arc<StreamPlaces>,
    /// The requests of the last hour, if the policy has them remembered.
    pub(crate) request_history: Option<Arc<RequestHistory>>,
    /// The permit of the one trial that may run.
    pub(crate) trials: Arc<Semaphore>,
    pub(crate) draining: Arc<AtomicBool>,
    pub(crate) started_at: Time,
    /// The connections of each listener, by its section in the policy.
    pub(crate) connections: OnceLock<Vec<(&'static str, Arc<Watchdog>)>>,
    /// The TLS of each listener that has it.
    pub(crate) tls: OnceLock<Vec<Arc<ListenerTls>>>,
}

impl SharedParts {
    /// Remembers the calls of a gate, which is of this generation of the history.
    pub(crate) fn remember_requests<S: Store, C: Clock>(&self, gate: &Gate<S, C>, generation: u32) {
        if let Some(history) = self.request_history.clone() {
            gate.observe_decisions(move |call| history.record(generation, call));
        }
    }
}

/// The states of the listeners that a policy opens.
pub(crate) struct ListenerStates<S: Store, C: Clock> {
    pub(crate) proxy: Option<ProxyState<S, C>>,
    pub(crate) gateway: Option<GatewayState<S, C>>,
    pub(crate) api: Option<ApiState<S, C>>,
    pub(crate) rls: Option<RlsState<S, C>>,
    pub(crate) resp: Option<RespState<S, C>>,
    pub(crate) admin: Option<AdminState<S, C>>,
}

/// The present engine, and the present states of open listeners.
pub(crate) struct StateCells<S: Store, C: Clock> {
    pub(crate) engine: Arc<StateCell<Engine<S, C>>>,
    pub(crate) proxy: Option<Arc<StateCell<ProxyState<S, C>>>>,
    pub(crate) gateway: Option<Arc<StateCell<GatewayState<S, C>>>>,
    pub(crate) api: Option<Arc<StateCell<ApiState<S, C>>>>,
    pub(crate) rls: Option<Arc<StateCell<RlsState<S, C>>>>,
    pub(crate) resp: Option<Arc<StateCell<RespState<S, C>>>>,
    pub(crate) admin: Option<Arc<StateCell<AdminState<S, C>>>>,
}

impl<S: Store, C: Clock + Clone> ListenerStates<S, C> {
    /// Makes the states. Connections to other servers are taken over from the present states.
    pub(crate) fn new(
        engine: &Engine<S, C>,
        parts: &Arc<SharedParts>,
        present: Option<&StateCells<S, C>>,
    ) -> Result<Self, ServeError> {
        let proxy = present.and_then(|cells| Some(cells.proxy.as_ref()?.load()));
        let gateway = present.and_then(|cells| Some(cells.gateway.as_ref()?.load()));
        let (api, admin) = (engine.policy.api(), engine.policy.admin());
        let api_access = access(parts, ListenerKind::Api, &api.listen, api.token.as_ref(), &[], &api.hosts)?;
        let (token, tokens) = (admin.token.as_ref(), &admin.tokens);
        let admin_access = access(parts, ListenerKind::Admin, &admin.listen, token, tokens, &admin.hosts)?;
        Ok(Self {
            proxy: proxy_state(engine, parts, proxy.as_deref())?,
            gateway: gateway_state(engine, parts, gateway.as_deref())?,
            api: api_access.map(|access| api_state(engine, parts, access)),
            rls: rls_state(engine, parts)?,
            resp: resp_state(engine, parts)?,
            admin: admin_access.map(|access| admin_state(engine, parts, access)),
        })
    }
}

fn proxy_state<S: Store, C: Clock>(
    engine: &Engine<S, C>,
    parts: &SharedParts,
    earlier: Option<&ProxyState<S, C>>,
) -> Result<Option<ProxyState<S, C>>, ServeError> {
    let inbound = engine.policy.inbound();
    let Some(upstream) = &inbound.upstream else { return Ok(None) };
    check_proxied_key_parts(engine.policy.plan())?;
    Ok(Some(ProxyState::new(
        engine.gate.clone(),
        inbound,
        ProxyState::upstream_client(inbound, upstream, earlier).map_err(ServeError::UpstreamTls)?,
        Arc::clone(&parts.permit_renewer),
        Arc::clone(&parts.refusals),
        Arc::clone(&parts.metrics),
    )))
}

fn gateway_state<S: Store, C: Clock + Clone>(
    engine: &Engine<S, C>,
    parts: &SharedParts,
    earlier: Option<&GatewayState<S, C>>,
) -> Result<Option<GatewayState<S, C>>, ServeError> {
    let (Some(providers), Some(config)) = (&engine.providers, engine.policy.outbound()) else { return Ok(None) };
    let access = access(parts, ListenerKind::Gateway, &config.listen, config.token.as_ref(), &[], &config.hosts)?;
    let max_idle = ConnectionCaps::of(&engine.policy).outbound.max_idle;
    let new_state = |access| {
        let refusals = Arc::clone(&parts.refusals);
        GatewayState::new(providers, access, refusals, &parts.metrics, &parts.env, max_idle, earlier)
    };
    access.map(new_state).transpose()
}

fn api_state<S: Store, C: Clock>(engine: &Engine<S, C>, parts: &SharedParts, access: Access) -> ApiState<S, C> {
    let (inbound, api) = (engine.policy.inbound(), engine.policy.api());
    ApiState {
        gate: engine.gate.clone(),
        replies: Replies::new(engine.gate.plan(), inbound.headers, inbound.x_ratelimit),
        access,
        forwarding: inbound.forwarding.clone(),
        forward_auth: api.forward_auth,
        deny_status: StatusCode::from_u16(api.deny_status).unwrap_or(StatusCode::TOO_MANY_REQUESTS),
        limits: engine.policy.rls().and_then(|rls| YamlLimits::new(rls, engine.gate.plan())),
        compat: api.compat.clone(),
        refusals: Arc::clone(&parts.refusals),
        metrics: Arc::clone(&parts.metrics),
        warnings: ForwardAuthWarnings::default(),
    }
}

fn rls_state<S: Store, C: Clock>(
    engine: &Engine<S, C>,
    parts: &Arc<SharedParts>,
) -> Result<Option<RlsState<S, C>>, ServeError> {
    let (Some(rls), inbound) = (engine.policy.rls(), engine.policy.inbound()) else { return Ok(None) };
    let access = access(parts, ListenerKind::Rls, &rls.listen, rls.token.as_ref(), &[], &[])?;
    Ok(access.map(|access| RlsState {
        gate: engine.gate.clone(),
        replies: Replies::new(engine.gate.plan(), inbound.headers, inbound.x_ratelimit),
        limits: YamlLimits::new(rls, engine.gate.plan()),
        access,
        forwarding: inbound.forwarding.clone(),
        parts: Arc::clone(parts),
        body_timeout: inbound.timeouts.body,
        unknown_domain: Once::new(),
    }))
}

fn resp_state<S: Store, C: Clock>(
    engine: &Engine<S, C>,
    parts: &Arc<SharedParts>,
) -> Result<Option<RespState<S, C>>, ServeError> {
    let Some(resp) = engine.policy.resp() else { return Ok(None) };
    let access = access(parts, ListenerKind::Resp, &resp.listen, resp.token.as_ref(), &[], &[])?;
    Ok(access.map(|access| RespState { gate: engine.gate.clone(), access, parts: Arc::clone(parts) }))
}

fn admin_state<S: Store, C: Clock + Clone>(
    engine: &Engine<S, C>,
    parts: &Arc<SharedParts>,
    access: Access,
) -> AdminState<S, C> {
    let (policy, gate, metrics) = (engine.policy.clone(), engine.gate.clone(), MetricsSource::new(engine, parts));
    AdminState { policy, gate, access, metrics }
}

/// Returns the access check of a listener. `None` if the policy turns it off.
fn access(
    parts: &SharedParts,
    kind: ListenerKind,
    listen: &ListenConfig,
    token: Option<&SecretSource>,
    named: &[NamedToken],
    hosts: &[String],
) -> Result<Option<Access>, ServeError> {
    if listen.is_off() {
        return Ok(None);
    }
    let listener = kind.section();
    let resolve = |setting: String, name: &str, source: &SecretSource, read_only| {
        let secret = source.resolve(&parts.env).map_err(|source| ServeError::Token { setting, source })?;
        Ok(AccessToken { name: name.into(), secret, read_only })
    };
    let token = token.map(|source| resolve(format!("{listener}.token"), "token", source, false));
    let named = named.iter().map(|NamedToken { name, source, read_only, .. }| {
        resolve(format!("{listener}.tokens.{name}"), name, source, *read_only)
    });
    let tokens: Vec<AccessToken> = token.into_iter().chain(named).collect::<Result<_, ServeError>>()?;
    for (index, token) in tokens.iter().enumerate() {
        if let Some(other) = tokens[..index].iter().find(|other| other.secret == token.secret) {
            let (first, second) = (other.name.to_string(), token.name.to_string());
            return Err(ServeError::SameToken { section: listener, first, second });
        }
    }
    if tokens.is_empty()
        && !listen.requires_client_certificate()
        && let Some(address) = listen.addresses.iter().find(|address| address.is_beyond_loopback())
    {
        return Err(ServeError::TokenRequired { listener, address: ListenAddress::clone(address) });
    }
    let (refusals, sign_in_limiter) = (Arc::clone(&parts.refusals), Arc::clone(&parts.sign_in_limiter));
    Ok(Some(Access::new(kind, listen, hosts, tokens, refusals, sign_in_limiter)))
}

fn check_proxied_key_parts(plan: &Plan) -> Result<(), ServeError> {
    let matched = plan.actions().filter(|(_, action)| action.matcher().is_some()).map(|(id, _)| Some(id));
    match matched.chain([None]).find_map(|action| plan.part_not_in_requests(action)) {
        None => Ok(()),
        Some((limit, part)) => {
            let (limit, part) = (plan.limit_info(limit).name().to_owned(), KeyPart::to_string(part));
            Err(ServeError::MissingKeyPart { limit, part })
        }
    }
}
