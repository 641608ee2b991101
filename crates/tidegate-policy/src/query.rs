//! What is known of one call.

use std::net::IpAddr;

use http::HeaderMap;

use crate::matched_actions::MatchedActions;

/// What is known of one call: the names under which it is counted, and what an action's match looks at.
///
/// A proxy fills `ip`, `method`, `path`, `host` and `headers` from the request; the decision API fills `action`, `ip`,
/// `key`, `platform` and `cost` from its JSON. All fields are optional; a part that a limit counts by and that is
/// missing is a [`KeyError`](crate::KeyError).
#[derive(Clone, Copy, Debug, Default)]
pub struct Query<'a> {
    /// The action by name, when the caller says it; see [`Plan::find_action`](crate::Plan::find_action).
    pub action: Option<&'a str>,
    /// The actions, if they are known already: `action`, `method`, `path` and `host` don't choose them then.
    pub actions: Option<MatchedActions>,
    /// The client's address, as [`Forwarding::client_ip`](crate::Forwarding::client_ip) found it.
    pub ip: Option<IpAddr>,
    /// Whatever identifies the caller: an account, an API key, a tenant.
    pub key: Option<&'a str>,
    /// One of [`PLATFORMS`](crate::PLATFORMS).
    pub platform: Option<&'a str>,
    /// How much the call weighs; the action's own `cost` (1 if unsaid) when `None`.
    pub cost: Option<u64>,
    /// The request's method.
    pub method: Option<&'a str>,
    /// The request's path, with or without its query string.
    pub path: Option<&'a str>,
    /// The request's host, with or without a port.
    pub host: Option<&'a str>,
    /// The request's headers. When they are given, what becomes of a request without a header, cookie, query or host part
    /// is for the limit's [`OnMissing`](crate::OnMissing) to say; without them it is a missing part.
    pub headers: Option<&'a HeaderMap>,
    /// True if all this is what a log tells of a request. A header, cookie or host that it doesn't tell may have been
    /// there, so such requests are never counted by address instead.
    pub from_log: bool,
}
