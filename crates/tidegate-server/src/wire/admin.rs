//! The admin listener: `/healthz` (the process is alive) and `/readyz` (it can take requests).

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::header::{ALLOW, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use tidegate::Gate;
use tidegate::policy::Plan;
use tidegate::store::{Store, StoreResponse};
use tidegate_core::{Batch, Clock, Limit, OnOutage};

use crate::access::Access;
use crate::body::ResponseBody;
use crate::listener::ConnectionContext;
use crate::local_response::{discard_body, error, finish_response, json};
use crate::watchdog::ConnectionPhase;

/// The time in which the store must answer, or the gate counts as not ready.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);

/// The state that all connections of the admin listener share.
pub(crate) struct AdminState<S: Store, C: Clock> {
    pub(crate) gate: Gate<S, C>,
    pub(crate) access: Access,
    pub(crate) draining: Arc<AtomicBool>,
}

/// Answers one request of a connection.
pub(crate) async fn serve<S: Store, C: Clock>(
    admin: Arc<AdminState<S, C>>,
    client: Arc<ConnectionContext>,
    request: Request<Incoming>,
) -> Result<Response<ResponseBody>, Infallible> {
    let watch = &*client.watch;
    watch.enter(ConnectionPhase::Deciding);
    let response = if let Err(denied) = admin.access.check(&request) {
        admin.access.denied_response(denied, &request, client.address, admin.gate.clock().now())
    } else if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut response = error(StatusCode::METHOD_NOT_ALLOWED, "this listener takes GET and HEAD");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        response
    } else {
        match request.uri().path() {
            "/healthz" => json(StatusCode::OK, r#"{"status":"alive"}"#.into()),
            "/readyz" => readiness_response(&admin).await,
            _ => error(StatusCode::NOT_FOUND, "no such path; there are /healthz and /readyz"),
        }
    };
    Ok(finish_response(watch, discard_body(watch, request.into_body(), false, response)))
}

async fn readiness_response<S: Store, C: Clock>(admin: &AdminState<S, C>) -> Response<ResponseBody> {
    if admin.draining.load(Ordering::Relaxed) {
        return json(StatusCode::SERVICE_UNAVAILABLE, r#"{"status":"draining"}"#.into());
    }
    let store = admin.gate.store();
    let answers = match store.outage() {
        Some(_) if denies_in_outages(admin.gate.plan()) => false,
        Some(name) => {
            let body = serde_json::json!({ "status": "degraded", "store": name });
            return json(StatusCode::OK, body.to_string().into());
        }
        None => match store.apply(&Batch::new(0), admin.gate.clock().now()) {
            StoreResponse::Ready(_) => true,
            StoreResponse::Pending(later) => matches!(tokio::time::timeout(STORE_TIMEOUT, later).await, Ok(Ok(_))),
        },
    };
    match answers {
        true => json(StatusCode::OK, r#"{"status":"ready"}"#.into()),
        false => json(StatusCode::SERVICE_UNAVAILABLE, r#"{"status":"the store does not answer"}"#.into()),
    }
}

/// True if the plan admits no call while the store is away: a global limit denies them, or all limits do.
fn denies_in_outages(plan: &Plan) -> bool {
    let denies = |limit: &Limit| !limit.is_shadow() && limit.sharing().on_outage == OnOutage::Deny;
    let (limits, global) = (plan.limits(), plan.global());
    global.iter().filter_map(|id| limits.get(*id)).any(denies)
        || (!limits.is_empty() && limits.iter().all(|(_, limit)| denies(limit)))
}
