//! The access check in front of the gateway, the decision API and the admin listener.
//!
//! Beyond loopback these listeners require a token, and so does a client of another machine that a header of the PROXY
//! protocol tells. On loopback the danger is a web page, of any site, in a browser on
//! the same machine. Its requests can reach a listener in two ways:
//! - by an address: the browser then says in `Origin` or `Sec-Fetch-Site` that they come from another page;
//! - by a name of the page's own that resolves to loopback (DNS rebinding): the name is then in `Host`.
//!
//! A page from another port of this machine is another page too: an upstream or a provider may have written it. A
//! request with the token isn't a web page's, because pages don't know the token.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderName, ORIGIN, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION};
use http::header::{HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use http::uri::Authority;
use http::{Request, Response, StatusCode, Version};
use tidegate::LimiterDecision;
use tidegate::policy::Query;
use tidegate_core::Time;
use tidegate_policy::{ListenConfig, Secret, UNIX_PEER};

use crate::body::ResponseBody;
use crate::dashboard::SignInLimiter;
use crate::listener::ConnectionContext;
use crate::local_response::{HttpError, error};
use crate::refusal_log::RefusalLog;
use crate::rejections::RejectionReason;

const TIDEGATE_TOKEN: HeaderName = HeaderName::from_static("tidegate-token");
const X_TIDEGATE_TOKEN: HeaderName = HeaderName::from_static("x-tidegate-token");
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The listener that a check protects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    Gateway,
    Api,
    Rls,
    Resp,
    Admin,
}

impl ListenerKind {
    /// The headers that carry the token: the first behind `Bearer`, the second alone. The gateway leaves
    /// `Authorization` to the provider; forward-auth passes on the client's `Authorization`.
    pub(crate) fn token_headers(self) -> [HeaderName; 2] {
        match self {
            Self::Gateway => [PROXY_AUTHORIZATION, TIDEGATE_TOKEN],
            Self::Api | Self::Rls | Self::Resp | Self::Admin => [AUTHORIZATION, X_TIDEGATE_TOKEN],
        }
    }

    /// The listener's section in the policy.
    pub(crate) fn section(self) -> &'static str {
        match self {
            Self::Gateway => "outbound",
            Self::Api => "api",
            Self::Rls => "rls",
            Self::Resp => "resp",
            Self::Admin => "admin",
        }
    }
}

/// The access check of one listener.
pub(crate) struct Access {
    listener: ListenerKind,
    own_ips: Box<[IpAddr]>,
    hosts: Vec<String>,
    /// The usual names of the listener, which are compared before a name is parsed.
    usual_names: Box<[String]>,
    /// Empty if programs on this machine may call without one.
    tokens: Box<[AccessToken]>,
    /// True if a client has shown a certificate before its first request.
    has_certificates: bool,
    refusals: Arc<RefusalLog>,
    sign_in_limiter: Arc<SignInLimiter>,
}

/// A token of a listener.
pub(crate) struct AccessToken {
    pub(crate) name: Box<str>,
    pub(crate) secret: Secret,
    pub(crate) read_only: bool,
}

impl AccessToken {
    /// A caller with this token.
    pub(crate) fn identity(&self) -> Identity<'_> {
        Identity { token: Some(&self.name), read_only: self.read_only }
    }
}

/// The caller of a request, as far as its token tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity<'a> {
    /// The name of its token. `None` if the listener has no tokens.
    pub(crate) token: Option<&'a str>,
    /// True if it may not change anything.
    pub(crate) read_only: bool,
}

impl Identity<'_> {
    /// A caller without a token.
    pub(crate) const ANONYMOUS: Self = Self { token: None, read_only: true };

    /// A caller of a listener without tokens.
    pub(crate) const LOCAL: Self = Self { token: None, read_only: false };

    /// The name of its token for the log.
    pub(crate) fn name(&self) -> &str {
        self.token.unwrap_or("none")
    }
}

/// The reason why a request is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessError {
    /// The request names a host that isn't the listener's.
    Host,
    /// The request comes from a web page.
    Origin,
    /// The request doesn't have the token.
    Token,
    /// The request has no `Host`, which HTTP/1.1 requires.
    NoHost,
}

impl Access {
    pub(crate) fn new(
        listener: ListenerKind,
        listen: &ListenConfig,
        hosts: &[String],
        tokens: Vec<AccessToken>,
        refusals: Arc<RefusalLog>,
        sign_in_limiter: Arc<SignInLimiter>,
    ) -> Self {
        let names_of = |address: SocketAddr| [address.to_string(), format!("localhost:{}", address.port())];
        Self {
            listener,
            own_ips: listen.tcp().map(|address| address.ip().to_canonical()).collect(),
            hosts: hosts.to_vec(),
            usual_names: listen.tcp().flat_map(names_of).collect(),
            tokens: tokens.into(),
            has_certificates: listen.requires_client_certificate(),
            refusals,
            sign_in_limiter,
        }
    }

    /// Returns the caller of a request of this client that may pass: it has a token, or, if it needs none, it isn't a web
    /// page's.
    pub(crate) fn check<B>(&self, request: &Request<B>, client: IpAddr) -> Result<Identity<'_>, AccessError> {
        let must_have_host = self.listener != ListenerKind::Gateway && request.version() == Version::HTTP_11;
        if must_have_host && !request.headers().contains_key(HOST) {
            return Err(AccessError::NoHost);
        }
        self.identify(request.headers(), request.uri().authority(), client)
    }

    /// Returns true if this client is served with a token only. That a listener without tokens is on loopback doesn't say
    /// that the client is: a load balancer on this machine may tell the address of another one.
    pub(crate) fn needs_token(&self, client: IpAddr) -> bool {
        let is_local = || client.to_canonical().is_loopback() || client == UNIX_PEER;
        !self.tokens.is_empty() || !self.has_certificates && !is_local()
    }

    fn identify(
        &self,
        headers: &HeaderMap,
        target: Option<&Authority>,
        client: IpAddr,
    ) -> Result<Identity<'_>, AccessError> {
        if !self.needs_token(client) {
            return self.check_web_page(headers, target).map(|()| Identity::LOCAL);
        }
        self.find_token(headers).map(AccessToken::identity).ok_or(AccessError::Token)
    }

    /// The token of a request.
    fn find_token(&self, headers: &HeaderMap) -> Option<&AccessToken> {
        self.given_tokens(headers).find_map(|value| self.token_of(value))
    }

    /// Returns true if a request has a token, right or wrong.
    pub(crate) fn has_token(&self, headers: &HeaderMap) -> bool {
        self.given_tokens(headers).next().is_some()
    }

    fn given_tokens<'h>(&self, headers: &'h HeaderMap) -> impl Iterator<Item = &'h [u8]> + use<'h> {
        let [bearer, plain] = self.listener.token_headers().map(|name| headers.get(name).map(HeaderValue::as_bytes));
        let bearer = bearer.and_then(|value| {
            let (scheme, token) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
        });
        [bearer, plain].into_iter().flatten()
    }

    /// The token with this value. All tokens are compared, so that the time doesn't tell which one is nearly right.
    pub(crate) fn token_of(&self, value: &[u8]) -> Option<&AccessToken> {
        self.tokens.iter().fold(None, |found, token| if token.secret.matches(value) { Some(token) } else { found })
    }

    /// Returns true if a text contains a token.
    pub(crate) fn is_token_in(&self, text: &[u8]) -> bool {
        self.tokens.iter().any(|token| token.secret.is_in(text))
    }

    /// The tokens; empty if programs on this machine may call without one.
    pub(crate) fn tokens(&self) -> &[AccessToken] {
        &self.tokens
    }

    /// Returns true if no header says that a page of another origin has sent the request.
    pub(crate) fn is_same_origin(&self, headers: &HeaderMap) -> bool {
        !self.is_cross_origin(headers, headers.get(HOST).map(HeaderValue::as_bytes))
    }

    fn check_web_page(&self, headers: &HeaderMap, target: Option<&Authority>) -> Result<(), AccessError> {
        let (mut host, mut is_from_browser) = (None, false);
        // Callers name the service as they like, Envoy by its cluster. A browser can't send what it takes.
        let is_own_host = |name: &[u8]| self.listener == ListenerKind::Rls || self.is_own_host(name);
        // One pass over all headers costs less than a lookup of each.
        for (name, value) in headers {
            if name == HOST {
                if !is_own_host(value.as_bytes()) {
                    return Err(AccessError::Host);
                }
                host = Some(value.as_bytes());
            } else {
                is_from_browser |= name == ORIGIN || name == SEC_FETCH_SITE;
            }
        }
        if target.is_some_and(|target| !is_own_host(target.as_str().as_bytes())) {
            return Err(AccessError::Host);
        }
        if is_from_browser && self.is_cross_origin(headers, host) { Err(AccessError::Origin) } else { Ok(()) }
    }

    /// Returns true if `host` or `host:port` is a name that only the listener has. An empty name passes: HTTP/1.0 may
    /// have no `Host`, and then no name can have redirected the client.
    fn is_own_host(&self, name: &[u8]) -> bool {
        if name.is_empty() || self.usual_names.iter().any(|usual| usual.as_bytes() == name) {
            return true;
        }
        let Some(host) = str::from_utf8(name).ok().and_then(host_of) else { return false };
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let is_own = match bare.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
            Ok(ip) => ip.is_loopback() || self.own_ips.contains(&ip),
            // By RFC 6761 §6.3 these names resolve only to loopback.
            Err(_) => host.rsplit('.').next().is_some_and(|last| last.eq_ignore_ascii_case("localhost")),
        };
        is_own || self.is_allowed_host(host)
    }

    fn is_allowed_host(&self, host: &str) -> bool {
        self.hosts.iter().any(|name| name.eq_ignore_ascii_case(host))
    }

    #[cold]
    fn is_cross_origin(&self, headers: &HeaderMap, host: Option<&[u8]>) -> bool {
        let mut origins = headers.get_all(ORIGIN).iter().peekable();
        // `Origin` names the page itself, so `Sec-Fetch-Site` isn't needed then.
        if origins.peek().is_none() {
            return headers.get_all(SEC_FETCH_SITE).iter().any(|site| site != "same-origin" && site != "none");
        }
        !origins.all(|origin| {
            let origin = origin.to_str().unwrap_or_default();
            let page = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://")).unwrap_or_default();
            host.is_some_and(|host| !page.is_empty() && page.as_bytes().eq_ignore_ascii_case(host))
                || host_of(page).is_some_and(|host| self.is_allowed_host(host))
        })
    }

    /// The response to a denied request, which is counted and logged, unless it lacks the token of the gateway.
    #[cold]
    pub(crate) fn denied_response<B>(
        &self,
        denied: AccessError,
        request: &Request<B>,
        client: &ConnectionContext,
        now: Time,
    ) -> Response<ResponseBody> {
        let access = &client.watch.access;
        let (others, pages) = match self.listener {
            ListenerKind::Rls | ListenerKind::Resp => Default::default(),
            listener => (
                format!("; {}.hosts names others", listener.section()),
                format!("; {}.hosts names the hosts whose pages may call", listener.section()),
            ),
        };
        let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
        let (ip, path) = (Some(client.address.ip().to_canonical()), Some(request.uri().path()));
        let query = Query { ip, host, path, ..Query::default() };
        let (status, reason, message) = match denied {
            AccessError::NoHost => {
                self.refusals.log_invalid_request(now, HttpError::InvalidHost, &query, access);
                return HttpError::InvalidHost.response();
            }
            AccessError::Token if self.listener == ListenerKind::Gateway => return self.token_required_response(None),
            AccessError::Token => (StatusCode::UNAUTHORIZED, RejectionReason::Token, "no valid token".to_owned()),
            AccessError::Host => (
                StatusCode::MISDIRECTED_REQUEST,
                RejectionReason::ForeignHost,
                format!("the Host is neither loopback nor this listener's address{others}"),
            ),
            AccessError::Origin => (
                StatusCode::FORBIDDEN,
                RejectionReason::WebPage,
                format!("requests of web pages are not served{pages}"),
            ),
        };
        self.refusals.log_rejection(now, reason, &query, &message, access);
        if denied != AccessError::Token {
            return error(status, &message);
        }
        // The right token always passes. Others at the same address could otherwise lock its owner out.
        if self.has_token(request.headers())
            && let LimiterDecision::RetryAfter(wait) = (self.sign_in_limiter)(client.address.ip())
        {
            let mut response = error(StatusCode::TOO_MANY_REQUESTS, "too many wrong tokens from this address");
            response.headers_mut().insert(RETRY_AFTER, wait.as_secs_ceil().into());
            return response;
        }
        let message = self.has_token(request.headers()).then_some("this token isn't valid");
        self.token_required_response(message)
    }

    fn token_required_response(&self, wrong: Option<&str>) -> Response<ResponseBody> {
        const CHALLENGE: HeaderValue = HeaderValue::from_static("Bearer realm=\"tidegate\"");
        let (status, challenge_header, message) = match self.listener {
            ListenerKind::Gateway => (
                StatusCode::PROXY_AUTHENTICATION_REQUIRED,
                PROXY_AUTHENTICATE,
                "a token is needed, in Proxy-Authorization: Bearer or in Tidegate-Token",
            ),
            ListenerKind::Api | ListenerKind::Rls | ListenerKind::Resp | ListenerKind::Admin => {
                (StatusCode::UNAUTHORIZED, WWW_AUTHENTICATE, "a bearer token is needed")
            }
        };
        let mut response = error(status, wrong.unwrap_or(message));
        response.headers_mut().insert(challenge_header, CHALLENGE);
        response
    }
}

/// Returns the host of `host` or `host:port`, without the final dot of a fully qualified name; IPv6 in its brackets.
fn host_of(name: &str) -> Option<&str> {
    let end = if name.starts_with('[') { name.find(']')? + 1 } else { name.find(':').unwrap_or(name.len()) };
    let (host, port) = name.split_at(end);
    let is_port = match port.strip_prefix(':') {
        Some(digits) => digits.bytes().all(|digit| digit.is_ascii_digit()),
        None => port.is_empty(),
    };
    is_port.then(|| host.strip_suffix('.').unwrap_or(host))
}

#[cfg(test)]
mod tests;
