//! The caching directives of a request.

use std::time::Duration;

use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, Uri, header};
use http_body::Body;
use http_cache_semantics::RequestLike;

/// Conditions that only the provider can evaluate, and requests for parts of a reply, which aren't stored.
const UNCACHEABLE_HEADERS: [HeaderName; 5] =
    [header::RANGE, header::IF_RANGE, header::IF_MATCH, header::IF_UNMODIFIED_SINCE, header::UPGRADE];

/// The caching directives of a request.
pub(super) struct RequestDirectives {
    /// `Cache-Control` and `Pragma`, which affect freshness.
    directives: HeaderMap,
    /// True if the request is a HEAD.
    pub is_head: bool,
    /// True if the caller wants a stored reply or none: no call is made.
    pub only_if_cached: bool,
    /// True if the reply must come from the provider now.
    pub no_cache: bool,
    /// True if the caller has a copy of its own and asks if that is still valid.
    pub is_conditional: bool,
    /// True if the request limits the age of its reply.
    pub limits_age: bool,
}

impl RequestDirectives {
    /// Reads the directives of this request; `None` if it must bypass the cache.
    pub(super) fn read<Q: Body>(request: &Parts, body: &Q) -> Option<Self> {
        let headers = &request.headers;
        let has_no_body = body.is_end_stream() || body.size_hint().exact() == Some(0);
        let cacheable = matches!(request.method, Method::GET | Method::HEAD)
            && has_no_body
            && !has_directive(headers, "no-store")
            && !UNCACHEABLE_HEADERS.iter().any(|name| headers.contains_key(name));
        if !cacheable {
            return None;
        }
        let mut directives = HeaderMap::new();
        for name in [header::CACHE_CONTROL, header::PRAGMA] {
            for value in headers.get_all(&name) {
                directives.append(name.clone(), value.clone());
            }
        }
        let pragma = headers.get(header::PRAGMA).is_some_and(|value| value.as_bytes() == b"no-cache");
        let no_cache = has_directive(headers, "no-cache") || pragma && !headers.contains_key(header::CACHE_CONTROL);
        Some(Self {
            directives,
            is_head: request.method == Method::HEAD,
            only_if_cached: has_directive(headers, "only-if-cached"),
            no_cache,
            is_conditional: headers.contains_key(header::IF_NONE_MATCH)
                || headers.contains_key(header::IF_MODIFIED_SINCE),
            limits_age: no_cache || has_directive(headers, "max-age") || has_directive(headers, "min-fresh"),
        })
    }
}

/// The request as the freshness policy sees it, without its URL and the rest of its headers, which are part of the key.
impl RequestLike for RequestDirectives {
    fn uri(&self) -> Uri {
        Uri::from_static("/")
    }

    fn is_same_uri(&self, _other: &Uri) -> bool {
        true
    }

    fn method(&self) -> &Method {
        &Method::GET
    }

    fn headers(&self) -> &HeaderMap {
        &self.directives
    }
}

/// Returns true if `Cache-Control` has this directive. The contents of quoted strings count as directives too, which
/// can only make caching stricter.
pub(super) fn has_directive(headers: &HeaderMap, directive: &str) -> bool {
    list_items(headers, header::CACHE_CONTROL).any(|item| {
        let name = item.split(|byte| *byte == b'=').next().unwrap_or_default();
        name.trim_ascii().eq_ignore_ascii_case(directive.as_bytes())
    })
}

/// Returns the items of a header that is a list separated by commas, on all its lines.
pub(super) fn list_items(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &[u8]> {
    let lines = headers.get_all(name).iter();
    lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b',')).map(<[u8]>::trim_ascii)
}

/// Returns true if the caller's own copy is still valid. An entity tag is compared weakly (RFC 9110 §8.8.3.2). A date
/// must equal the `Last-Modified` of the reply.
pub(super) fn is_not_modified(request: &HeaderMap, reply: &HeaderMap) -> bool {
    if request.contains_key(header::IF_NONE_MATCH) {
        let Some(etag) = reply.get(header::ETAG) else { return false };
        return list_items(request, header::IF_NONE_MATCH)
            .any(|tag| opaque_tag(tag) == opaque_tag(etag.as_bytes()) || tag == b"*");
    }
    let since = request.get(header::IF_MODIFIED_SINCE);
    since.is_some() && since == reply.get(header::LAST_MODIFIED)
}

/// Returns an entity tag without the mark of a weak one.
pub(super) fn opaque_tag(tag: &[u8]) -> &[u8] {
    let tag = tag.trim_ascii();
    tag.strip_prefix(b"W/").unwrap_or(tag)
}

/// Returns the age in the `Age` header, at most 2^31 seconds (RFC 9111 §1.2.2); zero without a valid one.
pub(super) fn age_header(headers: &HeaderMap) -> Duration {
    let parsed_age = headers.get(header::AGE).and_then(|age| age.to_str().ok()?.trim().parse().ok());
    Duration::from_secs(parsed_age.unwrap_or(0_u64).min(1 << 31))
}
