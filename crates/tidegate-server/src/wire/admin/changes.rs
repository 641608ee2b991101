//! The changes that operators make over the admin listener. Each has a line in the log.

use std::net::SocketAddr;
use std::sync::Arc;

use http::header::{CONTENT_TYPE, HeaderMap};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use serde_json::json;
use tidegate::outbound::Provider;
use tidegate::store::Store;
use tidegate_core::Clock;
use tidegate_policy::document::nearest;

use super::{ALERTS, AdminState, PROVIDERS};
use crate::access::Identity;
use crate::access_log::AccessSlot;
use crate::alerts::AlertSet;
use crate::audit_log::AuditEntry;
use crate::body::ResponseBody;
use crate::listener::ConnectionContext;
use crate::local_response::{HttpError, discard_body, error, json_response};
use crate::rejections::RejectionReason;
use crate::reload::{ReloadError, ReloadHandle};
use crate::wire::decision_request::{DecisionRequest, DecisionRequestError};
use crate::wire::http_api::{bad_request, check_error_response, reset, validate};
use crate::wire::small_body::{MAX_BYTES, collect_body};

/// A change, as a path names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// `/v1/reset`: forgets what a client has used, and its blocks.
    Reset,
    /// `/v1/block`: blocks a client.
    Block,
    /// `/v1/reload`: reads the policy again.
    Reload,
    /// `/v1/providers/NAME/COMMAND`.
    Provider(String, ProviderCommand),
    /// `/v1/alerts/NAME/test`: sends a message to the receivers of an alert.
    TestAlert(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProviderCommand {
    Pause,
    Resume,
    Reset,
}

impl Change {
    /// The change that a path names.
    pub(super) fn from_path(path: &str) -> Option<Self> {
        match path {
            "/v1/reset" => Some(Self::Reset),
            "/v1/block" => Some(Self::Block),
            "/v1/reload" => Some(Self::Reload),
            _ if path.starts_with(ALERTS) => {
                let alert = path.strip_prefix(ALERTS)?.strip_suffix("/test")?;
                Some(Self::TestAlert(alert.to_owned()))
            }
            _ => {
                let (provider, command) = path.strip_prefix(PROVIDERS)?.split_once('/')?;
                let command = match command {
                    "pause" => ProviderCommand::Pause,
                    "resume" => ProviderCommand::Resume,
                    "reset" => ProviderCommand::Reset,
                    _ => return None,
                };
                Some(Self::Provider(provider.to_owned(), command))
            }
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Reset => "reset",
            Self::Block => "block",
            Self::Reload => "reload",
            Self::Provider(_, ProviderCommand::Pause) => "pause",
            Self::Provider(_, ProviderCommand::Resume) => "resume",
            Self::Provider(_, ProviderCommand::Reset) => "reset_provider",
            Self::TestAlert(_) => "test_alert",
        }
    }

    /// Reads the body of a request for this change.
    fn read_body<'a>(&self, body: &'a [u8]) -> Result<DecisionRequest<'a>, DecisionRequestError> {
        match self {
            Self::Reset => DecisionRequest::from_json(body),
            Self::Block => DecisionRequest::block_from_json(body),
            Self::Reload | Self::Provider(..) | Self::TestAlert(_) => DecisionRequest::empty_from_json(body),
        }
    }
}

/// A request for a change, as it is logged.
struct ChangeRequest {
    change: Change,
    token: String,
    peer: SocketAddr,
}

/// Makes a change if the caller may, and logs it.
pub(super) async fn respond<S: Store, C: Clock + Clone>(
    admin: &Arc<AdminState<S, C>>,
    client: &ConnectionContext,
    change: Change,
    caller: Identity<'_>,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    let watch = &*client.watch;
    let asked = ChangeRequest { change, token: caller.name().to_owned(), peer: client.address };
    if let Some((status, message)) = denial(admin, caller, request.headers()) {
        asked.log(admin, &DecisionRequest::default(), status);
        return discard_body(watch, request.into_body(), false, error(status, &message));
    }
    let body = match collect_body(watch, request.into_body(), MAX_BYTES).await {
        Ok(body) => body,
        Err(response) => {
            asked.log(admin, &DecisionRequest::default(), response.status());
            return response;
        }
    };
    // A task of its own, so that a change is made and logged even if the client disconnects.
    let admin = Arc::clone(admin);
    let changing = tokio::spawn(async move {
        let read = asked.change.read_body(&body);
        let made = match &read {
            Ok(request) => asked.change.make(&admin, request).await,
            Err(wrong) => Err(wrong.clone()),
        };
        let response = made.unwrap_or_else(bad_request);
        asked.log(&admin, &read.unwrap_or_default(), response.status());
        response
    });
    changing.await.unwrap_or_else(|_| error(StatusCode::INTERNAL_SERVER_ERROR, "the change has failed"))
}

/// The status and the message for a caller that may only read, or for a request that isn't JSON.
pub(super) fn denial<S: Store, C: Clock>(
    admin: &AdminState<S, C>,
    caller: Identity<'_>,
    headers: &HeaderMap,
) -> Option<(StatusCode, String)> {
    if caller.read_only {
        admin.metrics.parts.refusals.count_rejection(RejectionReason::ReadOnly);
        return Some((StatusCode::FORBIDDEN, format!("the token `{}` is only for reading", caller.name())));
    }
    let message = "this path takes JSON, with Content-Type: application/json";
    (!is_json(headers)).then(|| (StatusCode::UNSUPPORTED_MEDIA_TYPE, message.to_owned()))
}

fn is_json(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/json")
}

impl ChangeRequest {
    fn log<S: Store, C: Clock>(&self, admin: &AdminState<S, C>, request: &DecisionRequest<'_>, status: StatusCode) {
        let (provider, alert) = match &self.change {
            Change::Provider(name, _) => (Some(name.as_str()), None),
            Change::TestAlert(name) => (None, Some(name.as_str())),
            Change::Reset | Change::Block | Change::Reload => (None, None),
        };
        let entry = AuditEntry {
            token: &self.token,
            peer: self.peer,
            change: self.change.name(),
            query: request.query(),
            span: request.block_length,
            provider,
            alert,
            status,
        };
        admin.metrics.parts.refusals.audit.log(admin.gate.clock().now(), &entry);
    }
}

impl Change {
    async fn make<S: Store, C: Clock + Clone>(
        &self,
        admin: &AdminState<S, C>,
        request: &DecisionRequest<'_>,
    ) -> Result<Response<ResponseBody>, DecisionRequestError> {
        match self {
            // This listener has no access log.
            Self::Reset => reset(&admin.gate, &admin.metrics.parts.refusals, request, &AccessSlot::default()).await,
            Self::Block => block(admin, request).await,
            Self::Reload => Ok(reload(&admin.metrics.parts.reload).await),
            Self::TestAlert(name) => Ok(test_alert(&admin.metrics.alerts, name).await),
            Self::Provider(name, command) => {
                let Some(providers) = &admin.metrics.providers else {
                    return Ok(error(StatusCode::NOT_FOUND, "the policy has no providers"));
                };
                Ok(match providers.provider(name) {
                    Ok(provider) => command.make(admin, provider).await,
                    Err(unknown) => error(StatusCode::NOT_FOUND, &unknown.to_string()),
                })
            }
        }
    }
}

/// Blocks a client.
async fn block<S: Store, C: Clock + Clone>(
    admin: &AdminState<S, C>,
    request: &DecisionRequest<'_>,
) -> Result<Response<ResponseBody>, DecisionRequestError> {
    let (gate, refusals) = (&admin.gate, &admin.metrics.parts.refusals);
    // This listener has no access log.
    let access = &AccessSlot::default();
    validate(gate, refusals, "/v1/block", request, access)?;
    let Some(length) = request.block_length else {
        return Err(DecisionRequestError::new(
            "for",
            "`for` is missing: the time to block the client, such as \"10m\"",
        ));
    };
    let query = &request.query();
    Ok(match gate.block(query, length).await {
        Ok(report) => {
            report.decisions.iter().for_each(|decision| refusals.note_block(gate.plan(), query, decision));
            let status = if report.blocked { StatusCode::OK } else { StatusCode::INSUFFICIENT_STORAGE };
            json_response(status, &report)
        }
        Err(error) => check_error_response(gate, refusals, query, &error, access),
    })
}

/// Sends a message to the receivers of an alert.
async fn test_alert(alerts: &AlertSet, name: &str) -> Response<ResponseBody> {
    match alerts.find(name) {
        Some(alert) => json_response(StatusCode::OK, &alert.test().await),
        None => {
            let meant = nearest(name, alerts.names()).map(|meant| format!("; did you mean `{meant}`?"));
            let known = || match alerts.names().collect::<Vec<_>>() {
                names if names.is_empty() => String::new(),
                names => format!(": it has {}", names.join(", ")),
            };
            let message = format!("the policy has no such alert{}", meant.unwrap_or_else(known));
            error(StatusCode::NOT_FOUND, &message)
        }
    }
}

/// Reads the policy again.
async fn reload(server: &ReloadHandle) -> Response<ResponseBody> {
    match server.reload().await {
        Ok(report) => {
            json_response(StatusCode::OK, &json!({ "reloaded": true, "restart_needed": report.restart_needed }))
        }
        Err(failure) => {
            let status = match &*failure {
                ReloadError::NoSource => StatusCode::NOT_IMPLEMENTED,
                ReloadError::Stopped => StatusCode::SERVICE_UNAVAILABLE,
                _ => StatusCode::UNPROCESSABLE_ENTITY,
            };
            error(status, &failure.to_string())
        }
    }
}

impl ProviderCommand {
    /// Makes the change. Repeating it changes nothing.
    async fn make<S: Store, C: Clock + Clone>(
        self,
        admin: &AdminState<S, C>,
        provider: &Provider<S, C>,
    ) -> Response<ResponseBody> {
        let name = &provider.config().name;
        let body = match self {
            Self::Pause => json!({ "provider": name, "paused": true, "changed": provider.pause() }),
            Self::Resume => json!({ "provider": name, "paused": false, "changed": provider.resume() }),
            Self::Reset => match provider.reset().await {
                Ok(()) => json!({ "provider": name, "reset": true }),
                Err(failure) => {
                    admin.metrics.parts.refusals.log_failure(admin.gate.clock().now(), &failure);
                    return HttpError::StoreUnavailable.response();
                }
            },
        };
        json_response(StatusCode::OK, &body)
    }
}
