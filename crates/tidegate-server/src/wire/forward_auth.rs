//! Forward-auth: a front server (nginx `auth_request`, Traefik ForwardAuth, Caddy `forward_auth`) asks about each of
//! its requests and obeys the status.
//!
//! The original request is described by `X-Forwarded-Method`, `-Uri` and `-Host`, or by `X-Original-Method` and
//! `X-Original-URI` or `X-Original-URL`. Front servers pass on their clients' headers. So if both sets are present and
//! disagree, one of them is a client's and the response is 400.
//!
//! `/v1/auth/NAME` names the action instead. *Why in the path:* it is the only part of the question that the front
//! server alone controls. Caddy passes on its client's query string, and all of them pass on their clients' headers. A
//! client could name a harmless action in either.

use std::sync::atomic::Ordering;

use http::header::{HeaderMap, HeaderName};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use tidegate::CheckError;
use tidegate::policy::{ListStatus, Query, UncountableError, canonical_ip, is_host};
use tidegate::store::Store;
use tidegate_core::{Clock, Reason};

use crate::body::ResponseBody;
use crate::hop_headers;
use crate::listener::ConnectionContext;
use crate::local_response::error;
use crate::rejections::RejectionReason;
use crate::wire::http_api::{ApiState, check_error_response};

/// The path of forward-auth, or its prefix.
const PATH_PREFIX: &str = "/v1/auth";

const X_FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const X_FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_ORIGINAL_METHOD: HeaderName = HeaderName::from_static("x-original-method");
const X_ORIGINAL_URI: HeaderName = HeaderName::from_static("x-original-uri");
const X_ORIGINAL_URL: HeaderName = HeaderName::from_static("x-original-url");

/// Returns true if a request to this path belongs to forward-auth.
pub(crate) fn is_forward_auth_path(path: &str) -> bool {
    path.strip_prefix(PATH_PREFIX).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Tells a front server if it may serve the original request. The status is 200, or the configured one for a refusal
/// (403 for a client on the deny list). The response has all headers of a refusal, which the front server can copy.
pub(crate) async fn handle<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    client: &ConnectionContext,
    request: &Request<Incoming>,
) -> Response<ResponseBody> {
    if !api.forward_auth {
        let message = "forward-auth is off: api.forward_auth is false, or the policy limits calls in flight, which \
            forward-auth can't keep";
        return error(StatusCode::NOT_FOUND, message);
    }
    let headers = request.headers();
    let peer = canonical_ip(client.address.ip());
    let ip = api.forwarding.client_ip(peer, headers);
    if !api.forwarding.trusted.contains(peer) && !api.untrusted_peer_logged.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            %peer,
            "forward-auth is asked by a peer that is not in inbound.trusted_proxies: all of its clients count as one"
        );
    }
    let action_name = request.uri().path().strip_prefix(PATH_PREFIX).and_then(|rest| rest.strip_prefix('/'));
    let original = match OriginalRequest::from_headers(headers) {
        Ok(described) => described,
        Err(message) => return error(StatusCode::BAD_REQUEST, message),
    };
    if action_name.is_none() && (original.method.is_none() || original.path.is_none()) {
        let message = "no header says which request this is about: X-Forwarded-Method and X-Forwarded-Uri, or \
            X-Original-Method and X-Original-URI, or the path /v1/auth/NAME";
        return error(StatusCode::BAD_REQUEST, message);
    }
    let query = Query {
        action: action_name,
        ip: Some(ip),
        method: original.method,
        path: original.path,
        host: original.host,
        headers: Some(headers),
        ..Query::default()
    };
    if original.host.is_some_and(|host| !is_host(host.as_bytes())) {
        return reject(api, RejectionReason::Host, &query, "the host is no name or address with at most a port");
    }
    let error_response = |error: &CheckError| match error.uncountable() {
        Some(uncountable) => reject(api, uncountable.into(), &query, &uncountable.to_string()),
        None => check_error_response(api, &query, error),
    };
    let actions = match api.gate.actions(&query) {
        Ok(actions) => actions,
        Err(error) => return error_response(&error),
    };
    if actions.iter().any(|id| api.gate.plan().action(id).has_concurrency()) {
        let message = "a limit on calls in flight can't be kept by forward-auth, which never learns when a call ends";
        return error(StatusCode::BAD_REQUEST, message);
    }
    if let [lookalike, ..] = &*hop_headers::lookalikes(headers, api.gate.plan().keyed_headers())
        && api.gate.plan().list_status(ip) == ListStatus::Neither
    {
        let why = UncountableError::SimilarHeader(lookalike.to_string());
        return reject(api, (&why).into(), &query, &why.to_string());
    }
    let decision = match api.gate.check(&Query { actions: Some(actions), ..query }).await {
        Ok(decision) => decision,
        Err(error) => return error_response(&error),
    };
    api.refusals.log_decision(api.gate.plan(), actions, &query, &decision);
    if decision.allowed {
        let mut response = Response::new(ResponseBody::empty());
        api.replies.annotate(actions, &decision, response.headers_mut());
        return response;
    }
    let mut response = api.replies.refusal(actions, &decision, headers).map(ResponseBody::full);
    if decision.reason != Reason::DenyList {
        *response.status_mut() = api.deny_status;
    }
    response
}

/// Rejects a request that the proxy would answer with 400. *Why the status of a refusal:* the error is in the client's
/// request and not in the front server's question, and nginx turns a 400 into a 500.
fn reject<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    reason: RejectionReason,
    query: &Query<'_>,
    why: &str,
) -> Response<ResponseBody> {
    api.refusals.log_rejection(api.gate.clock().now(), reason, query, why);
    error(api.deny_status, why)
}

/// The original request, as the front server describes it.
#[derive(Debug, Default, PartialEq, Eq)]
struct OriginalRequest<'a> {
    method: Option<&'a str>,
    path: Option<&'a str>,
    host: Option<&'a str>,
}

impl<'a> OriginalRequest<'a> {
    fn from_headers(headers: &'a HeaderMap) -> Result<Self, &'static str> {
        let original = match (single_value(headers, &X_ORIGINAL_URL)?, single_value(headers, &X_ORIGINAL_URI)?) {
            (None, uri) => (None, uri),
            (Some(url), uri) => {
                let (host, path) = split_url(url);
                (host, require_same(Some(path), uri)?)
            }
        };
        Ok(Self {
            method: require_same(
                single_value(headers, &X_FORWARDED_METHOD)?,
                single_value(headers, &X_ORIGINAL_METHOD)?,
            )?,
            path: require_same(single_value(headers, &X_FORWARDED_URI)?, original.1)?.map(|uri| split_url(uri).1),
            host: require_same(single_value(headers, &X_FORWARDED_HOST)?, original.0)?,
        })
    }
}

/// The single value of a header. An empty one counts as none, because nginx can only empty a header, not remove it.
fn single_value<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, &'static str> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => match value.to_str() {
            Ok("") => Ok(None),
            Ok(text) => Ok(Some(text)),
            Err(_) => Err("a header that describes the request isn't plain text"),
        },
        _ => Err("a header that describes the request is there twice"),
    }
}

fn require_same<'a>(forwarded: Option<&'a str>, original: Option<&'a str>) -> Result<Option<&'a str>, &'static str> {
    match (forwarded, original) {
        (Some(forwarded), Some(original)) if forwarded != original => {
            Err("X-Forwarded-* and X-Original-* describe different requests: one of them is the client's own; \
                the front server must set or empty both")
        }
        (forwarded, original) => Ok(forwarded.or(original)),
    }
}

/// Returns the host and the path of a URL. A path is returned without a host.
fn split_url(url: &str) -> (Option<&str>, &str) {
    let Some((_, rest)) = url.split_once("://").filter(|(scheme, _)| !scheme.contains('/')) else { return (None, url) };
    match rest.find(['/', '?']) {
        Some(at) if rest[at..].starts_with('/') => (Some(&rest[..at]), &rest[at..]),
        Some(at) => (Some(&rest[..at]), "/"),
        None => (Some(rest), "/"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn described(lines: &[(&'static str, &'static str)]) -> Result<[Option<String>; 3], &'static str> {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let found = OriginalRequest::from_headers(&headers)?;
        Ok([found.method, found.path, found.host].map(|text| text.map(str::to_owned)))
    }

    fn three(method: &str, path: &str, host: Option<&str>) -> Result<[Option<String>; 3], &'static str> {
        Ok([Some(method.to_owned()), Some(path.to_owned()), host.map(str::to_owned)])
    }

    #[test]
    fn header_styles_of_front_servers_are_understood() {
        let traefik =
            [("x-forwarded-method", "POST"), ("x-forwarded-uri", "/login?x=1"), ("x-forwarded-host", "a.example")];
        assert_eq!(described(&traefik), three("POST", "/login?x=1", Some("a.example")));
        let nginx = [("x-original-method", "POST"), ("x-original-uri", "/login")];
        assert_eq!(described(&nginx), three("POST", "/login", None));
        let ingress = [("x-original-method", "POST"), ("x-original-url", "https://a.example:8443/login?x=1")];
        assert_eq!(described(&ingress), three("POST", "/login?x=1", Some("a.example:8443")));
        assert_eq!(described(&[]), Ok([None, None, None]));
    }

    #[test]
    fn contradicting_request_descriptions_are_rejected() {
        let both = [("x-forwarded-uri", "/harmless"), ("x-original-uri", "/login")];
        assert!(described(&both).is_err());
        assert!(described(&[("x-forwarded-method", "GET"), ("x-original-method", "POST")]).is_err());
        assert!(described(&[("x-forwarded-uri", "/a"), ("x-forwarded-uri", "/b")]).is_err());
        let host = [("x-forwarded-host", "app.example"), ("x-original-url", "http://evil/vh")];
        assert!(described(&host).is_err());
        let emptied = [("x-forwarded-uri", "/login"), ("x-original-uri", "")];
        assert_eq!(described(&emptied).unwrap()[1].as_deref(), Some("/login"));
    }

    #[test]
    fn urls_are_split_into_host_and_path() {
        assert_eq!(split_url("http://a"), (Some("a"), "/"));
        assert_eq!(split_url("http://a?x"), (Some("a"), "/"));
        assert_eq!(split_url("/redirect?to=http://b/"), (None, "/redirect?to=http://b/"));
    }
}
