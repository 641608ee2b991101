//! What a request lets a cache do.

use std::time::Duration;

use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, Uri, header};
use http_body::Body;
use http_cache_semantics::RequestLike;

/// Conditions that only the provider can judge, and parts of a reply, which aren't kept.
const UNCACHEABLE_HEADERS: [HeaderName; 5] =
    [header::RANGE, header::IF_RANGE, header::IF_MATCH, header::IF_UNMODIFIED_SINCE, header::UPGRADE];

/// What a request says about caching.
pub(super) struct RequestDirectives {
    /// `Cache-Control` and `Pragma`, by which freshness is judged.
    directives: HeaderMap,
    /// Whether it asks for a head alone.
    pub is_head: bool,
    /// Whether a reply without a call will do, and if it doesn't, none at all.
    pub only_if_cached: bool,
    /// Whether the reply must be asked of the provider, now.
    pub no_cache: bool,
    /// Whether the caller has a reply of its own, and asks if it still holds.
    pub is_conditional: bool,
    /// Whether the request says how old its reply may be.
    pub limits_age: bool,
}

impl RequestDirectives {
    /// What this request says; `None` if caches have no part in it.
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
        let anew = has_directive(headers, "no-cache") || pragma && !headers.contains_key(header::CACHE_CONTROL);
        Some(Self {
            directives,
            is_head: request.method == Method::HEAD,
            only_if_cached: has_directive(headers, "only-if-cached"),
            no_cache: anew,
            is_conditional: headers.contains_key(header::IF_NONE_MATCH)
                || headers.contains_key(header::IF_MODIFIED_SINCE),
            limits_age: anew || has_directive(headers, "max-age") || has_directive(headers, "min-fresh"),
        })
    }
}

/// The request as freshness is judged by: without its URL and the rest of its headers, which the key stands for.
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

/// Whether `Cache-Control` has this directive. What lies in a quoted string is taken for directives too, which is the
/// careful side.
pub(super) fn has_directive(headers: &HeaderMap, directive: &str) -> bool {
    headers.get_all(header::CACHE_CONTROL).iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b',')).any(
        |part| {
            let name = part.split(|byte| *byte == b'=').next().unwrap_or_default();
            name.trim_ascii().eq_ignore_ascii_case(directive.as_bytes())
        },
    )
}

/// Whether the condition of a request holds no longer, so that the caller's own copy will do: an entity tag by the weak
/// comparison of RFC 9110 §8.8.3.2, a date if it is the reply's own.
pub(super) fn is_not_modified(request: &HeaderMap, reply: &HeaderMap) -> bool {
    if request.contains_key(header::IF_NONE_MATCH) {
        let Some(etag) = reply.get(header::ETAG) else { return false };
        let mut tags = request
            .get_all(header::IF_NONE_MATCH)
            .iter()
            .flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
        return tags.any(|tag| opaque_tag(tag) == opaque_tag(etag.as_bytes()) || tag.trim_ascii() == b"*");
    }
    let since = request.get(header::IF_MODIFIED_SINCE);
    since.is_some() && since == reply.get(header::LAST_MODIFIED)
}

/// An entity tag without the mark of a weak one.
pub(super) fn opaque_tag(tag: &[u8]) -> &[u8] {
    let tag = tag.trim_ascii();
    tag.strip_prefix(b"W/").unwrap_or(tag)
}

/// Seconds as `Age` has them, up to 2^31 as RFC 9111 §1.2.2 says.
pub(super) fn age_header(headers: &HeaderMap) -> Duration {
    let parsed_age = headers.get(header::AGE).and_then(|age| age.to_str().ok()?.trim().parse().ok());
    Duration::from_secs(parsed_age.unwrap_or(0_u64).min(1 << 31))
}
