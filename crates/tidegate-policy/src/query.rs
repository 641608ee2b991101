//! The properties of one call.

use std::net::IpAddr;

use http::HeaderMap;

use crate::matched_actions::MatchedActions;

/// The properties of one call: the names under which it is counted, and the request parts that an action's match reads.
///
/// A proxy fills `ip`, `method`, `path`, `host` and `headers` from the request. The decision API fills `action`, `ip`,
/// `key`, `platform` and `cost` from its JSON. All fields are optional. If a limit counts by a part that is missing,
/// the result is a [`KeyError`](crate::KeyError).
#[derive(Clone, Copy, Debug, Default)]
pub struct Query<'a> {
    /// The action's name, if the caller gives it; see [`Plan::find_action`](crate::Plan::find_action).
    pub action: Option<&'a str>,
    /// The actions, if they are known already: `action`, `method`, `path` and `host` don't choose them then.
    pub actions: Option<MatchedActions>,
    /// The client's address, as found by [`Forwarding::client_ip`](crate::Forwarding::client_ip).
    pub ip: Option<IpAddr>,
    /// The identity of the caller: an account, an API key or a tenant.
    pub key: Option<&'a str>,
    /// One of [`PLATFORMS`](crate::PLATFORMS).
    pub platform: Option<&'a str>,
    /// The cost of the call; `None` stands for the action's own `cost` (default 1).
    pub cost: Option<u64>,
    /// The reservation that the caller presents, as the refusal gave it. By default that of the header
    /// [`TIDEGATE_RESERVATION`](crate::TIDEGATE_RESERVATION).
    pub reservation: Option<&'a str>,
    /// The request's method.
    pub method: Option<&'a str>,
    /// The request's path, with or without its query string.
    pub path: Option<&'a str>,
    /// The request's host, with or without a port.
    pub host: Option<&'a str>,
    /// The subject of the client's certificate in TLS, if it has shown one.
    pub client_certificate: Option<&'a str>,
    /// The request's headers. If they are given, the limit's [`OnMissing`](crate::OnMissing) decides about a request
    /// without a header, cookie, query or host part. Without them, such a part is a missing part.
    pub headers: Option<&'a HeaderMap>,
    /// True if the sender of `headers` may have joined the lines of each by commas, as Envoy does. A limit then counts the
    /// call under each part, unless one line of the header may contain commas.
    pub headers_are_joined: bool,
    /// True if all fields come from a log. A header, cookie or host that the log lacks may have been in the request, so
    /// such requests are never counted by address instead.
    pub from_log: bool,
    /// True to leave out `inbound.global`, such as for another action of a request that it has counted already.
    pub skips_global: bool,
}
