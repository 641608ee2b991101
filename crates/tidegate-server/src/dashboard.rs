//! The dashboard: pages for a browser on the admin listener.
//!
//! Its pages read the structs that `/v1/…` gives as JSON, and its buttons ask for the same changes. The script loads the
//! present page once a second or two, and replaces the parts that have changed, so that each part is written in one
//! place.

mod assets;
mod chart;
mod events_page;
mod fleet_page;
mod layout;
mod now_page;
mod policy_page;
mod providers_page;
mod sessions;
mod sign_in;
mod try_page;
mod who_page;
mod words;

use std::net::IpAddr;
use std::sync::Arc;

use http::header::{
    ALLOW, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, LOCATION, ORIGIN, REFERRER_POLICY,
};
use http::header::{X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use maud::Markup;
use tidegate::policy::Plan;
use tidegate::store::Store;
use tidegate::{Span, Time};
use tidegate_core::Clock;

use self::assets::Asset;
pub(crate) use self::sessions::{Session, Sessions, remove_session_cookies};
pub(crate) use self::sign_in::{SignInLimiter, sign_in_limiter};
pub(crate) use self::words::count;
use crate::access::{AccessError, Identity};
use crate::body::ResponseBody;
use crate::listener::ConnectionContext;
use crate::local_response::{discard_body, error};
use crate::metrics::ServerSnapshot;
use crate::refused_clients::ClientsReport;
use crate::rejections::RejectionReason;
use crate::states::SharedParts;
use crate::wire::admin::AdminState;

/// The header with the CSRF token of a session.
const CSRF: HeaderName = HeaderName::from_static("x-tidegate-csrf");

/// A page may load scripts, styles and data only from this listener, and no other page may show it in a frame.
const CONTENT_POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
     form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
);

/// A path of the dashboard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DashboardPath {
    Page(Page),
    Asset(&'static Asset),
    SignIn,
    SignOut,
}

/// A page that needs a session if the listener has tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Page {
    Now,
    Who,
    Providers,
    Fleet,
    Policy,
    Try,
    Events,
}

impl Page {
    const ALL: [Self; 7] = [Self::Now, Self::Who, Self::Providers, Self::Fleet, Self::Policy, Self::Try, Self::Events];

    fn path(self) -> &'static str {
        match self {
            Self::Now => "/",
            Self::Who => "/who",
            Self::Providers => "/providers",
            Self::Fleet => "/fleet",
            Self::Policy => "/policy",
            Self::Try => "/try",
            Self::Events => "/events",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Now => "Now",
            Self::Who => "Who",
            Self::Providers => "Providers",
            Self::Fleet => "Fleet",
            Self::Policy => "Policy",
            Self::Try => "Try",
            Self::Events => "Events",
        }
    }

    /// True if it shows the use of the providers' limits.
    fn shows_limits(self) -> bool {
        matches!(self, Self::Now | Self::Providers | Self::Policy)
    }

    /// The time between two updates, in milliseconds.
    fn refresh_millis(self) -> u32 {
        match self {
            Self::Now | Self::Who => 1000,
            Self::Providers | Self::Fleet | Self::Policy | Self::Try | Self::Events => 2000,
        }
    }
}

impl DashboardPath {
    pub(crate) fn from_path(path: &str) -> Option<Self> {
        match path {
            "/sign-in" => Some(Self::SignIn),
            "/sign-out" => Some(Self::SignOut),
            _ => match Page::ALL.into_iter().find(|page| page.path() == path) {
                Some(page) => Some(Self::Page(page)),
                None => Asset::find(path).map(Self::Asset),
            },
        }
    }

    fn allowed_methods(self) -> &'static str {
        match self {
            Self::SignIn | Self::Page(Page::Try) => "GET, HEAD, POST",
            Self::Page(_) | Self::Asset(_) => "GET, HEAD",
            Self::SignOut => "POST",
        }
    }
}

/// The caller of a request, with its session if a cookie names one.
#[derive(Clone, Debug)]
pub(crate) struct Caller<'a> {
    pub(crate) identity: Identity<'a>,
    pub(crate) session: Option<Arc<Session>>,
}

impl<'a> Caller<'a> {
    /// The caller of a request that has a token, needs none, or has the cookie of a session.
    pub(crate) fn authorize<S: Store, C: Clock>(
        admin: &'a AdminState<S, C>,
        request: &Request<Incoming>,
        client: IpAddr,
        now: Time,
    ) -> Result<Self, AccessError> {
        let (access, headers) = (&admin.access, request.headers());
        match access.check(request, client) {
            Ok(identity) => Ok(Self { identity, session: None }),
            // A listener without tokens checks the host before the origin.
            Err(AccessError::Origin) if is_opened_by_link(request) => {
                Ok(Self { identity: Identity::LOCAL, session: None })
            }
            // A session doesn't make up for a wrong token, which may be a guess and is counted.
            Err(AccessError::Token) if !access.has_token(headers) => {
                let session = admin.metrics.parts.sessions.find(access, headers, now);
                let (identity, session) = session.ok_or(AccessError::Token)?;
                if !access.is_same_origin(headers) && !is_opened_by_link(request) {
                    return Err(AccessError::Origin);
                }
                Ok(Self { identity, session: Some(session) })
            }
            Err(denied) => Err(denied),
        }
    }

    /// Returns true if the request comes from a page of this session, or if there is no session.
    pub(crate) fn has_csrf_token(&self, headers: &HeaderMap) -> bool {
        let Some(session) = &self.session else { return true };
        headers.get(CSRF).is_some_and(|value| session.csrf.matches(value.as_bytes()))
    }
}

/// Returns true for a page that a link of another page opens in the browser's window. That page can't read or frame it.
fn is_opened_by_link(request: &Request<Incoming>) -> bool {
    let headers = request.headers();
    let path = DashboardPath::from_path(request.uri().path());
    let is_page = matches!(path, Some(DashboardPath::Page(_) | DashboardPath::SignIn));
    let says = |name: &str, value: &str| headers.get(name).is_some_and(|found| found == value);
    is_page && says("sec-fetch-mode", "navigate") && says("sec-fetch-dest", "document") && !headers.contains_key(ORIGIN)
}

/// The response to a change by a page that doesn't send the token of its session.
pub(crate) fn csrf_response(parts: &SharedParts) -> Response<ResponseBody> {
    parts.refusals.count_rejection(RejectionReason::WebPage);
    error(StatusCode::FORBIDDEN, "the request lacks the X-Tidegate-CSRF of its session; load the page again")
}

/// Answers a request for a path of the dashboard. `caller` is `None` without a token or a session.
pub(crate) async fn respond<S: Store, C: Clock + Clone>(
    admin: &AdminState<S, C>,
    client: &ConnectionContext,
    caller: Option<Caller<'_>>,
    path: DashboardPath,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    let (method, allowed) = (request.method(), path.allowed_methods());
    let response = if !allowed.split(", ").any(|allowed| allowed == method) {
        let mut response = error(StatusCode::METHOD_NOT_ALLOWED, &format!("this path takes {allowed}"));
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
        response
    } else {
        match (path, caller) {
            (DashboardPath::Asset(asset), _) => asset.response(request.headers()),
            (DashboardPath::SignIn, None) if method == Method::POST => {
                return sign_in::respond(admin, client, request).await;
            }
            (DashboardPath::SignIn, None) => sign_in::page(StatusCode::OK, None),
            (DashboardPath::SignIn, Some(_)) => redirect("/"),
            (DashboardPath::Page(_) | DashboardPath::SignOut, None) => redirect("/sign-in"),
            (DashboardPath::SignOut, Some(caller)) if caller.has_csrf_token(request.headers()) => {
                sign_in::sign_out(&admin.metrics.parts, request.headers())
            }
            (DashboardPath::SignOut, Some(_)) => csrf_response(&admin.metrics.parts),
            (DashboardPath::Page(Page::Try), Some(caller)) if method == Method::POST => {
                return try_page::respond(admin, client, caller, request).await;
            }
            (DashboardPath::Page(page), Some(caller)) => {
                let query = request.uri().query();
                let view = View { query, ..View::new(admin, caller, page).await };
                html(StatusCode::OK, layout::frame(page, &view, page_content(page, &view)))
            }
        }
    };
    discard_body(&client.watch, request.into_body(), false, response)
}

/// All that a page shows.
struct View<'a> {
    caller: Caller<'a>,
    /// The query string of the page.
    query: Option<&'a str>,
    parts: &'a SharedParts,
    plan: &'a Plan,
    state: ServerSnapshot,
    /// The refused clients, on the page that shows them.
    clients: Option<ClientsReport>,
    now: Time,
}

impl<'a> View<'a> {
    async fn new<S: Store, C: Clock + Clone>(admin: &'a AdminState<S, C>, caller: Caller<'a>, page: Page) -> Self {
        let metrics = &admin.metrics;
        let providers = if page.shows_limits() { metrics.providers().await } else { metrics.local_providers() };
        let state = metrics.snapshot_with(providers);
        let (parts, plan, now) = (&*metrics.parts, &**admin.gate.plan(), admin.gate.clock().now());
        let clients = match page {
            Page::Who => Some(parts.refusals.clients.report(&admin.gate, None, who_page::MAX_CLIENTS).await),
            _ => None,
        };
        Self { caller, query: None, parts, plan, state, clients, now }
    }

    /// True if the caller may try other terms of limits.
    fn may_try(&self) -> bool {
        self.may_change() && self.parts.request_history.is_some()
    }

    /// False if the caller may only read.
    fn may_change(&self) -> bool {
        !self.caller.identity.read_only
    }

    fn uptime(&self) -> Span {
        self.now.since(self.state.started_at)
    }
}

fn page_content(page: Page, view: &View<'_>) -> Markup {
    match page {
        Page::Now => now_page::render(view),
        Page::Who => who_page::render(view),
        Page::Providers => providers_page::render(view),
        Page::Fleet => fleet_page::render(view),
        Page::Policy => policy_page::render(view),
        Page::Try => try_page::render(view, &try_page::Form::from_fields(view.query.unwrap_or_default()), None),
        Page::Events => events_page::render(view),
    }
}

fn html(status: StatusCode, page: Markup) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::full(page.into_string().into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    protect(&mut response);
    response
}

/// Sends a browser to another page.
fn redirect(path: &'static str) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::empty());
    *response.status_mut() = StatusCode::SEE_OTHER;
    response.headers_mut().insert(LOCATION, HeaderValue::from_static(path));
    response
}

/// Adds the headers that bind a browser to this listener.
fn protect(response: &mut Response<ResponseBody>) {
    let headers = response.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, CONTENT_POLICY);
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    // With `no-referrer`, browsers would hide the origin of the form for signing in.
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("same-origin"));
}
