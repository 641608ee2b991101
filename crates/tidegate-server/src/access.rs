//! The access check in front of the gateway, the decision API and the admin listener.
//!
//! Beyond loopback these listeners require a token. On loopback the danger is a web page, of any site, in a browser on
//! the same machine. Its requests can reach a listener in two ways:
//! - by an address: the browser then says in `Origin` or `Sec-Fetch-Site` that they come from another page;
//! - by a name of the page's own that resolves to loopback (DNS rebinding): the name is then in `Host`.
//!
//! A page from another port of this machine is another page too: an upstream or a provider may have written it. A
//! request with the token isn't a web page's, because pages don't know the token.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderName, ORIGIN, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION};
use http::header::{HeaderValue, WWW_AUTHENTICATE};
use http::uri::Authority;
use http::{Request, Response, StatusCode, Version};
use tidegate::policy::Query;
use tidegate_core::Time;
use tidegate_policy::{ListenConfig, Secret};

use crate::body::ResponseBody;
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
    Admin,
}

impl ListenerKind {
    /// The headers that carry the token: the first behind `Bearer`, the second alone. The gateway leaves
    /// `Authorization` to the provider; forward-auth passes on the client's `Authorization`.
    pub(crate) fn token_headers(self) -> [HeaderName; 2] {
        match self {
            Self::Gateway => [PROXY_AUTHORIZATION, TIDEGATE_TOKEN],
            Self::Api | Self::Admin => [AUTHORIZATION, X_TIDEGATE_TOKEN],
        }
    }

    /// The listener's section in the policy.
    pub(crate) fn section(self) -> &'static str {
        match self {
            Self::Gateway => "outbound",
            Self::Api => "api",
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
    refusals: Arc<RefusalLog>,
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
    ) -> Self {
        let names_of = |address: SocketAddr| [address.to_string(), format!("localhost:{}", address.port())];
        Self {
            listener,
            own_ips: listen.tcp().map(|address| address.ip().to_canonical()).collect(),
            hosts: hosts.to_vec(),
            usual_names: listen.tcp().flat_map(names_of).collect(),
            tokens: tokens.into(),
            refusals,
        }
    }

    /// Returns the caller of a request that may pass: it has a token, or, if there are no tokens, it isn't a web page's.
    pub(crate) fn check<B>(&self, request: &Request<B>) -> Result<Identity<'_>, AccessError> {
        let must_have_host = self.listener != ListenerKind::Gateway && request.version() == Version::HTTP_11;
        if must_have_host && !request.headers().contains_key(HOST) {
            return Err(AccessError::NoHost);
        }
        self.identify(request.headers(), request.uri().authority())
    }

    fn identify(&self, headers: &HeaderMap, target: Option<&Authority>) -> Result<Identity<'_>, AccessError> {
        if self.tokens.is_empty() {
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
        // One pass over all headers costs less than a lookup of each.
        for (name, value) in headers {
            if name == HOST {
                if !self.is_own_host(value.as_bytes()) {
                    return Err(AccessError::Host);
                }
                host = Some(value.as_bytes());
            } else {
                is_from_browser |= name == ORIGIN || name == SEC_FETCH_SITE;
            }
        }
        if target.is_some_and(|target| !self.is_own_host(target.as_str().as_bytes())) {
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

    /// The response to a denied request, which is counted and logged, unless it lacks the token of the API or the gateway.
    #[cold]
    pub(crate) fn denied_response<B>(
        &self,
        denied: AccessError,
        request: &Request<B>,
        client: &ConnectionContext,
        now: Time,
    ) -> Response<ResponseBody> {
        let (section, access) = (self.listener.section(), &client.watch.access);
        let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
        let (ip, path) = (Some(client.address.ip().to_canonical()), Some(request.uri().path()));
        let query = Query { ip, host, path, ..Query::default() };
        let (status, reason, message) = match denied {
            AccessError::NoHost => {
                self.refusals.log_invalid_request(now, HttpError::InvalidHost, &query, access);
                return HttpError::InvalidHost.response();
            }
            AccessError::Token if self.listener != ListenerKind::Admin => return self.token_required_response(),
            AccessError::Token => (StatusCode::UNAUTHORIZED, RejectionReason::Token, "no valid token".to_owned()),
            AccessError::Host => (
                StatusCode::MISDIRECTED_REQUEST,
                RejectionReason::ForeignHost,
                format!("the Host is neither loopback nor this listener's address; {section}.hosts names others"),
            ),
            AccessError::Origin => (
                StatusCode::FORBIDDEN,
                RejectionReason::WebPage,
                format!("requests of web pages are not served; {section}.hosts names the hosts whose pages may call"),
            ),
        };
        self.refusals.log_rejection(now, reason, &query, &message, access);
        if denied == AccessError::Token { self.token_required_response() } else { error(status, &message) }
    }

    fn token_required_response(&self) -> Response<ResponseBody> {
        const CHALLENGE: HeaderValue = HeaderValue::from_static("Bearer realm=\"tidegate\"");
        let (status, challenge_header, message) = match self.listener {
            ListenerKind::Gateway => (
                StatusCode::PROXY_AUTHENTICATION_REQUIRED,
                PROXY_AUTHENTICATE,
                "a token is needed, in Proxy-Authorization: Bearer or in Tidegate-Token",
            ),
            ListenerKind::Api | ListenerKind::Admin => {
                (StatusCode::UNAUTHORIZED, WWW_AUTHENTICATE, "a bearer token is needed")
            }
        };
        let mut response = error(status, message);
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
mod tests {
    use tidegate_policy::{Policy, PolicySources};

    use super::*;
    use crate::events::server_events;

    impl Access {
        fn check_headers(&self, headers: &HeaderMap, target: Option<&Authority>) -> Result<(), AccessError> {
            self.identify(headers, target).map(drop)
        }
    }

    fn token(name: &str, secret: &str, read_only: bool) -> AccessToken {
        AccessToken { name: name.into(), secret: Secret::new(secret), read_only }
    }

    fn refusal_log() -> Arc<RefusalLog> {
        Arc::new(RefusalLog::new(1, Arc::new(server_events(Time::ZERO))))
    }

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(HeaderName::from_static(name), HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        headers
    }

    fn listens_on(addresses: &str) -> ListenConfig {
        let policy = PolicySources::new().env([
            ("TIDEGATE__API__LISTEN", addresses),
            ("TIDEGATE__API__TOKEN", "env:A"),
            ("TIDEGATE__ADMIN__LISTEN", "off"),
        ]);
        Policy::load(policy).unwrap().api().listen.clone()
    }

    fn open(listens: &str, hosts: &[&str]) -> Access {
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        Access::new(ListenerKind::Api, &listens_on(listens), &hosts, Vec::new(), refusal_log())
    }

    #[test]
    fn only_the_listeners_own_host_names_pass() {
        let access = open("127.0.0.1:8082", &["gate.internal", "10.1.2.3"]);
        for host in [
            "127.0.0.1:8082",
            "127.0.0.1",
            "127.0.0.1.",
            "127.8.9.10:1",
            "localhost:8082",
            "localhost:",
            "LOCALHOST.",
            "Api.LocalHost:80",
            "[::1]:8082",
            "[::1]",
            "[0:0:0:0:0:0:0:1]",
            "[::ffff:127.0.0.1]:8082",
            "[::ffff:7f00:1]",
            "Gate.Internal:80",
            "gate.internal.",
            "10.1.2.3:8082",
            "",
        ] {
            assert_eq!(access.check_headers(&headers(&[("host", host)]), None), Ok(()), "{host}");
        }
        assert_eq!(access.check_headers(&headers(&[]), None), Ok(()), "HTTP/1.0 may name none");
        for host in [
            "evil.example",
            "evil.example:8082",
            "localhost.evil.example",
            "evil-localhost",
            "127.0.0.1.evil.example",
            "127.0.0.1:8082.evil.example",
            "user@127.0.0.1",
            "127.0.0.1@evil.example",
            "10.0.0.1",
            "169.254.169.254",
            "0.0.0.0:8082",
            "[::]:8082",
            "[::1]x",
            "[::1%lo]",
            "[fe80::1]",
            "[::ffff:10.0.0.1]",
            "::1",
            "[::1",
            "127.1",
            "0x7f000001",
            "localhost:80:80",
            "localhost:x",
            "localhost, evil.example",
            "localhöst",
            "gate.internal.evil.example",
            ":8082",
            ".",
            "a b",
        ] {
            assert_eq!(access.check_headers(&headers(&[("host", host)]), None), Err(AccessError::Host), "{host}");
        }
        for lines in
            [[("host", "localhost"), ("host", "evil.example")], [("host", "evil.example"), ("host", "localhost")]]
        {
            assert_eq!(access.check_headers(&headers(&lines), None), Err(AccessError::Host), "{lines:?}");
        }
        let whole: Authority = "evil.example".parse().unwrap();
        assert_eq!(access.check_headers(&headers(&[("host", "localhost")]), Some(&whole)), Err(AccessError::Host));
        let public = open("192.0.2.7:8082", &[]);
        assert_eq!(public.check_headers(&headers(&[("host", "192.0.2.7:8082")]), None), Ok(()));
        assert_eq!(public.check_headers(&headers(&[("host", "192.0.2.8")]), None), Err(AccessError::Host));
    }

    #[test]
    fn requests_of_other_origins_are_rejected() {
        let access = open("127.0.0.1:8082", &["app.internal"]);
        let check = |lines: &[(&'static str, &'static str)]| {
            access.check_headers(&headers(&[&[("host", "127.0.0.1:8082")], lines].concat()), None)
        };
        for lines in [
            &[("origin", "https://evil.example")][..],
            &[("origin", "null")],
            &[("origin", "")],
            &[("origin", "file://")],
            &[("origin", "http://")],
            &[("origin", "http://127.0.0.1:3000")],
            &[("origin", "http://127.0.0.1")],
            &[("origin", "http://127.0.0.2:8082")],
            &[("origin", "http://localhost:8082")],
            &[("origin", "http://[::1]:8082")],
            &[("origin", "http://app.internal.evil.example")],
            &[("origin", "http://app.internal@evil.example")],
            &[("origin", "chrome-extension://127.0.0.1:8082")],
            &[("origin", "http://127.0.0.1:8082"), ("origin", "http://evil.example")],
            &[("origin", "http://127.0.0.1:8082, http://evil.example")],
            &[("origin", "https://evil.example"), ("sec-fetch-site", "same-origin")],
            &[("sec-fetch-site", "cross-site")],
            &[("sec-fetch-site", "same-site")],
            &[("sec-fetch-site", "Same-Origin")],
            &[("sec-fetch-site", "none"), ("sec-fetch-site", "cross-site")],
        ] {
            assert_eq!(check(lines), Err(AccessError::Origin), "{lines:?}");
        }
        for lines in [
            &[("origin", "http://127.0.0.1:8082")][..],
            &[("origin", "http://127.0.0.1:8082"), ("sec-fetch-site", "same-origin")],
            &[("origin", "https://app.internal:8443"), ("sec-fetch-site", "cross-site")],
            &[("origin", "http://App.Internal")],
            &[("sec-fetch-site", "none")],
            &[("sec-fetch-site", "same-origin")],
        ] {
            assert_eq!(check(lines), Ok(()), "{lines:?}");
        }
        assert_eq!(
            access.check_headers(&headers(&[("origin", "http://127.0.0.1:8082")]), None),
            Err(AccessError::Origin),
            "no Host"
        );
    }

    #[test]
    fn a_valid_token_suffices_in_either_header() {
        let with = |listener| {
            let tokens = vec![token("token", "s3cret", false)];
            Access::new(listener, &listens_on("0.0.0.0:8082"), &[], tokens, refusal_log())
        };
        let (gateway, api) = (with(ListenerKind::Gateway), with(ListenerKind::Api));
        for (name, value, passes_gateway, passes_api) in [
            ("proxy-authorization", "Bearer s3cret", true, false),
            ("proxy-authorization", "bearer s3cret", true, false),
            ("tidegate-token", "s3cret", true, false),
            ("authorization", "Bearer s3cret", false, true),
            ("authorization", "BEARER s3cret", false, true),
            ("x-tidegate-token", "s3cret", false, true),
            ("proxy-authorization", "Basic s3cret", false, false),
            ("proxy-authorization", "s3cret", false, false),
            ("authorization", "Bearer s3cret2", false, false),
            ("tidegate-token", "s3cre", false, false),
            ("x-tidegate-token", "", false, false),
        ] {
            let lines = headers(&[(name, value), ("host", "evil.example"), ("origin", "http://evil.example")]);
            for (access, passes) in [(&gateway, passes_gateway), (&api, passes_api)] {
                let expected = if passes { Ok(()) } else { Err(AccessError::Token) };
                assert_eq!(access.check_headers(&lines, None), expected, "{name}: {value}");
            }
        }
        assert_eq!(api.check_headers(&headers(&[("host", "10.1.2.3")]), None), Err(AccessError::Token));
    }

    #[test]
    fn tokens_tell_the_callers_name_and_rights() {
        let tokens = vec![token("token", "s3cret", false), token("ops", "s3cret2", false), token("dash", "look", true)];
        let access = Access::new(ListenerKind::Admin, &listens_on("0.0.0.0:8083"), &[], tokens, refusal_log());
        for (secret, token, read_only) in
            [("Bearer s3cret", "token", false), ("Bearer s3cret2", "ops", false), ("Bearer look", "dash", true)]
        {
            let found = access.identify(&headers(&[("authorization", secret)]), None);
            assert_eq!(found, Ok(Identity { token: Some(token), read_only }));
        }
        let both = headers(&[("authorization", "Bearer wrong"), ("x-tidegate-token", "look")]);
        assert_eq!(access.identify(&both, None).map(|caller| caller.token), Ok(Some("dash")));
        assert_eq!(access.identify(&headers(&[("authorization", "Bearer ops")]), None), Err(AccessError::Token));
    }
}
