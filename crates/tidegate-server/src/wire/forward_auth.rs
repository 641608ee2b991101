//! Forward-auth: a front server (nginx `auth_request`, Traefik ForwardAuth, Caddy `forward_auth`) asks about each of
//! its requests and obeys the status.
//!
//! The request is described by `X-Forwarded-Method`, `-Uri` and `-Host`, or by `X-Original-Method` and
//! `X-Original-URI` or `X-Original-URL`. Front servers pass their clients' headers on, so where both are there and
//! disagree, one of them is a client's and the answer is 400.
//!
//! `/v1/auth/NAME` names the action instead. *Why in the path:* it is the one part of the question that is the front
//! server's alone. Caddy sends its client's query string along, and all of them their clients' headers, so that a
//! client could name a harmless action in either.

use std::sync::atomic::Ordering;

use http::header::{HeaderMap, HeaderName};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use tidegate::core::{Clock, Reason};
use tidegate::policy::{Listed, Uncountable, canonical, is_host};
use tidegate::store::Store;
use tidegate::{CheckError, Query};

use crate::answer::error;
use crate::body::Body;
use crate::hop;
use crate::listener::Client;
use crate::refusals::Refusal;
use crate::rejections::Rejected;
use crate::wire::http_api::{Api, refused_to_decide};

/// The path of forward-auth, or the beginning of it.
const PATH: &str = "/v1/auth";

const X_FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const X_FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_ORIGINAL_METHOD: HeaderName = HeaderName::from_static("x-original-method");
const X_ORIGINAL_URI: HeaderName = HeaderName::from_static("x-original-uri");
const X_ORIGINAL_URL: HeaderName = HeaderName::from_static("x-original-url");

/// True if a request to this path is forward-auth's.
pub(crate) fn is_asked(path: &str) -> bool {
    path.strip_prefix(PATH).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Answers whether a front server may serve a request of its own: 200, or the configured status for a refusal (403
/// for a client on the deny list), with all headers that a refusal has, for the front server to copy.
pub(crate) async fn answer<S: Store, C: Clock>(
    api: &Api<S, C>,
    client: &Client,
    request: &Request<Incoming>,
) -> Response<Body> {
    if !api.forward_auth {
        let message = "forward-auth is off: api.forward_auth is false, or the policy limits calls in flight, which \
            forward-auth can't keep";
        return error(StatusCode::NOT_FOUND, message);
    }
    let headers = request.headers();
    let peer = canonical(client.address.ip());
    let ip = api.forwarding.client(peer, headers);
    if !api.forwarding.trusted.contains(peer) && !api.distrust_told.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            %peer,
            "forward-auth is asked by a peer that is not in inbound.trusted_proxies: all of its clients count as one"
        );
    }
    let named = request.uri().path().strip_prefix(PATH).and_then(|rest| rest.strip_prefix('/'));
    let described = match Described::by(headers) {
        Ok(described) => described,
        Err(message) => return error(StatusCode::BAD_REQUEST, message),
    };
    if named.is_none() && (described.method.is_none() || described.path.is_none()) {
        let message = "no header says which request this is about: X-Forwarded-Method and X-Forwarded-Uri, or \
            X-Original-Method and X-Original-URI, or the path /v1/auth/NAME";
        return error(StatusCode::BAD_REQUEST, message);
    }
    let query = Query {
        action: named,
        ip: Some(ip),
        method: described.method,
        path: described.path,
        host: described.host,
        headers: Some(headers),
        ..Query::default()
    };
    if described.host.is_some_and(|host| !is_host(host.as_bytes())) {
        return reject(api, Rejected::Host, &query, "the host is no name or address with at most a port");
    }
    let undecided = |error: &CheckError| match error.uncountable() {
        Some(uncountable) => reject(api, uncountable.into(), &query, &uncountable.to_string()),
        None => refused_to_decide(api, &query, error),
    };
    let actions = match api.gate.actions(&query) {
        Ok(actions) => actions,
        Err(error) => return undecided(&error),
    };
    if actions.iter().any(|id| api.gate.plan().action(id).has_concurrency()) {
        let message = "a limit on calls in flight can't be kept by forward-auth, which never learns when a call ends";
        return error(StatusCode::BAD_REQUEST, message);
    }
    if let [lookalike, ..] = &*hop::lookalikes(headers, api.gate.plan().keyed_headers())
        && api.gate.plan().listed(ip) == Listed::Neither
    {
        let why = Uncountable::Lookalike(lookalike.to_string());
        return reject(api, (&why).into(), &query, &why.to_string());
    }
    let decision = match api.gate.check_as(actions, &query).await {
        Ok(decision) => decision,
        Err(error) => return undecided(&error),
    };
    if !decision.allowed || decision.shadow {
        api.refusals.note(api.gate.plan(), &Refusal { actions, query: &query, decision: &decision });
    }
    if decision.allowed {
        let mut response = Response::new(Body::empty());
        api.replies.annotate(actions, &decision, response.headers_mut());
        return response;
    }
    let mut response = api.replies.refusal(actions, &decision, headers).map(Body::full);
    if decision.reason != Reason::DenyList {
        *response.status_mut() = api.deny_status;
    }
    response
}

/// Refuses a request that the proxy answers 400. *Why the status of a refusal:* it is the client's request that is wrong
/// and not the front server's question, and nginx makes a 500 of a 400.
fn reject<S: Store, C: Clock>(api: &Api<S, C>, reason: Rejected, query: &Query<'_>, why: &str) -> Response<Body> {
    api.refusals.note_rejected(api.gate.clock().now(), reason, query, why);
    error(api.deny_status, why)
}

/// What the front server says of its request.
#[derive(Debug, Default, PartialEq, Eq)]
struct Described<'a> {
    method: Option<&'a str>,
    path: Option<&'a str>,
    host: Option<&'a str>,
}

impl<'a> Described<'a> {
    fn by(headers: &'a HeaderMap) -> Result<Self, &'static str> {
        let original = match (one(headers, &X_ORIGINAL_URL)?, one(headers, &X_ORIGINAL_URI)?) {
            (None, uri) => (None, uri),
            (Some(url), uri) => {
                let (host, path) = split_url(url);
                (host, agreed(Some(path), uri)?)
            }
        };
        Ok(Self {
            method: agreed(one(headers, &X_FORWARDED_METHOD)?, one(headers, &X_ORIGINAL_METHOD)?)?,
            path: agreed(one(headers, &X_FORWARDED_URI)?, original.1)?.map(|uri| split_url(uri).1),
            host: agreed(one(headers, &X_FORWARDED_HOST)?, original.0)?,
        })
    }
}

/// The one value of a header; an empty one is as good as none, since nginx can only empty a header, not remove it.
fn one<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, &'static str> {
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

fn agreed<'a>(forwarded: Option<&'a str>, original: Option<&'a str>) -> Result<Option<&'a str>, &'static str> {
    match (forwarded, original) {
        (Some(forwarded), Some(original)) if forwarded != original => {
            Err("X-Forwarded-* and X-Original-* describe different requests: one of them is the client's own; \
                the front server must set or empty both")
        }
        (forwarded, original) => Ok(forwarded.or(original)),
    }
}

/// The host and the path of a URL; a path is itself.
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
        let found = Described::by(&headers)?;
        Ok([found.method, found.path, found.host].map(|text| text.map(str::to_owned)))
    }

    fn three(method: &str, path: &str, host: Option<&str>) -> Result<[Option<String>; 3], &'static str> {
        Ok([Some(method.to_owned()), Some(path.to_owned()), host.map(str::to_owned)])
    }

    #[test]
    fn the_styles_of_front_servers() {
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
    fn a_clients_own_description_is_noticed() {
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
    fn urls() {
        assert_eq!(split_url("http://a"), (Some("a"), "/"));
        assert_eq!(split_url("http://a?x"), (Some("a"), "/"));
        assert_eq!(split_url("/redirect?to=http://b/"), (None, "/redirect?to=http://b/"));
    }
}
