//! Signing in with a token, and out.

use std::net::{IpAddr, Ipv6Addr};

use http::header::{HeaderValue, ORIGIN, RETRY_AFTER, SET_COOKIE};
use http::{HeaderMap, Request, Response, StatusCode};
use hyper::body::Incoming;
use maud::html;
use tidegate::store::Store;
use tidegate::{KeyedLimiter, LimiterDecision};
use tidegate_core::Clock;

use super::sessions::{LIFETIME, cookie_name};
use super::{html as html_response, layout, redirect};
use crate::access::AccessError;
use crate::body::ResponseBody;
use crate::listener::ConnectionContext;
use crate::local_response::discard_body;
use crate::states::SharedParts;
use crate::wire::admin::AdminState;
use crate::wire::decision_request::decode;
use crate::wire::small_body::{MAX_BYTES, collect_body};

/// The limit on wrong tokens, for each address or IPv6 network.
const TRIES: &str = "5 per 60s";
/// The size of the memory for them. Beyond it addresses share a limit with their network.
const TRIES_BYTES: usize = 1 << 20;

/// Decides about a wrong token from an address, and counts it if admitted.
pub(crate) type SignInLimiter = Box<dyn Fn(IpAddr) -> LimiterDecision + Send + Sync>;

pub(crate) fn sign_in_limiter(clock: impl Clock) -> SignInLimiter {
    let limiter = KeyedLimiter::<IpAddr, _>::with_clock(TRIES, TRIES_BYTES, clock);
    let limiter = limiter.expect("invariant: the limit is a valid window");
    Box::new(move |address| limiter.check(&network_of(address)))
}

/// An IPv4 address, or the /64 of an IPv6 address.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

/// Answers a try to sign in.
pub(super) async fn respond<S: Store, C: Clock + Clone>(
    admin: &AdminState<S, C>,
    client: &ConnectionContext,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    let (watch, peer, parts) = (&*client.watch, client.address, &*admin.metrics.parts);
    let now = admin.gate.clock().now();
    if !admin.access.is_same_origin(request.headers()) {
        let response = admin.access.denied_response(AccessError::Origin, &request, client, now);
        return discard_body(watch, request.into_body(), false, response);
    }
    let (head, body) = request.into_parts();
    let head = Request::from_parts(head, ());
    let body = match collect_body(watch, body, MAX_BYTES).await {
        Ok(body) => body,
        Err(response) => return response,
    };
    let fields = str::from_utf8(&body).unwrap_or_default().split('&');
    let given = fields.filter_map(|field| decode(field.strip_prefix("token=")?)).next().unwrap_or_default();
    // The right token always passes. Others at the same address could otherwise lock its owner out.
    let Some(token) = admin.access.token_of(given.trim().as_bytes()) else {
        let denied = admin.access.denied_response(AccessError::Token, &head, client, now);
        return wrong_token_response(denied, (parts.sign_in_limiter)(peer.ip()));
    };
    tracing::info!(token = &*token.name, %peer, "admin: signed in");
    let is_https = head.headers().get(ORIGIN).is_some_and(|origin| origin.as_bytes().starts_with(b"https://"));
    let secure = if is_https || client.tls.is_some() { "; Secure" } else { "" };
    let id = parts.sessions.start(token, now);
    let mut response = redirect("/");
    set_cookie(&mut response, head.headers(), &id, LIFETIME.as_secs_ceil(), secure);
    response
}

/// The page for a wrong token, which has been counted and logged.
fn wrong_token_response(mut denied: Response<ResponseBody>, tries: LimiterDecision) -> Response<ResponseBody> {
    if let LimiterDecision::RetryAfter(wait) = tries {
        let seconds = wait.as_secs_ceil();
        let message = format!("Too many wrong tokens from your address. Try again in {seconds} s.");
        let mut response = page(StatusCode::TOO_MANY_REQUESTS, Some(&message));
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
        return response;
    }
    let (head, body) = page(denied.status(), Some("This token isn't valid.")).into_parts();
    denied.headers_mut().extend(head.headers);
    denied.map(|_| body)
}

/// Ends the session of a request.
pub(super) fn sign_out(parts: &SharedParts, headers: &HeaderMap) -> Response<ResponseBody> {
    parts.sessions.end(headers);
    let mut response = redirect("/sign-in");
    set_cookie(&mut response, headers, "", 0, "");
    response
}

fn set_cookie(response: &mut Response<ResponseBody>, asked: &HeaderMap, id: &str, seconds: u64, more: &str) {
    let cookie = format!("{}={id}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{more}", cookie_name(asked));
    if let Ok(cookie) = HeaderValue::from_str(&cookie) {
        response.headers_mut().insert(SET_COOKIE, cookie);
    }
}

/// The page for signing in.
pub(super) fn page(status: StatusCode, message: Option<&str>) -> Response<ResponseBody> {
    let content = html! {
        main id="main" class="sign-in" {
            form class="card" method="post" action="/sign-in" {
                (layout::brand())
                h1 { "Sign in" }
                @if let Some(message) = message {
                    p class="message bad" role="alert" { (message) }
                }
                p {
                    label for="token" { "Token" }
                    input id="token" name="token" type="password" autocomplete="current-password" required autofocus
                        aria-describedby="token-help";
                }
                p class="muted" id="token-help" { "A token of " code { "[admin]" } " in the policy of this gate." }
                button type="submit" class="primary" { "Sign in" }
            }
        }
    };
    html_response(status, layout::document("Sign in", None, content))
}
