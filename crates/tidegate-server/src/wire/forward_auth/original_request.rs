//! The request that a question is about.

use http::Request;
use http::header::{HOST, HeaderMap, HeaderName};
use http::uri::{Authority, Uri};

use super::PATH_PREFIX;

const X_FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const X_FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
pub(super) const X_ORIGINAL_METHOD: HeaderName = HeaderName::from_static("x-original-method");
pub(super) const X_ORIGINAL_URI: HeaderName = HeaderName::from_static("x-original-uri");
pub(super) const X_ORIGINAL_URL: HeaderName = HeaderName::from_static("x-original-url");

const OTHER_HEADERS: &str = "X-Forwarded-* and X-Original-* describe different requests: one of them is the client's \
    own; the front server must set or empty both";
const OTHER_TARGET: &str = "the path after /v1/auth, with the question's method and Host, is another request than \
    X-Forwarded-* or X-Original-* describe: one of them is the client's own; /v1/auth alone takes the description from \
    these headers, and /v1/auth?action=NAME names an action";

/// True if the headers describe an original request, as Caddy and Traefik do.
pub(super) fn is_described(headers: &HeaderMap) -> bool {
    headers.contains_key(&X_FORWARDED_URI) || headers.contains_key(&X_FORWARDED_METHOD)
}

/// The path and query that a front server has appended to the path of forward-auth.
pub(super) fn appended_path(question: &Uri) -> Option<&str> {
    let appended = question.path_and_query()?.as_str().strip_prefix(PATH_PREFIX)?;
    appended.starts_with('/').then_some(appended)
}

/// The original request, as the front server describes it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct OriginalRequest<'a> {
    pub(super) method: Option<&'a str>,
    pub(super) path: Option<&'a str>,
    pub(super) host: Option<&'a str>,
}

impl<'a> OriginalRequest<'a> {
    /// Reads the request that a question is about: its own method, host and appended path, or else what its headers
    /// describe.
    pub(super) fn from_question<B>(question: &'a Request<B>) -> Result<Self, &'static str> {
        let described = Self::from_headers(question.headers())?;
        let Some(path) = appended_path(question.uri()) else { return Ok(described) };
        let host = single_value(question.headers(), &HOST)?;
        let host = require_same(host, question.uri().authority().map(Authority::as_str), OTHER_TARGET)?;
        Ok(Self {
            method: require_same(Some(question.method().as_str()), described.method, OTHER_TARGET)?,
            path: require_same(Some(path), described.path, OTHER_TARGET)?,
            host: require_same(host, described.host, OTHER_TARGET)?,
        })
    }

    fn from_headers(headers: &'a HeaderMap) -> Result<Self, &'static str> {
        let original = match (single_value(headers, &X_ORIGINAL_URL)?, single_value(headers, &X_ORIGINAL_URI)?) {
            (None, uri) => (None, uri),
            (Some(url), uri) => {
                let (host, path) = split_url(url);
                (host, require_same(Some(path), uri, OTHER_HEADERS)?)
            }
        };
        Ok(Self {
            method: require_same(
                single_value(headers, &X_FORWARDED_METHOD)?,
                single_value(headers, &X_ORIGINAL_METHOD)?,
                OTHER_HEADERS,
            )?,
            path: require_same(single_value(headers, &X_FORWARDED_URI)?, original.1, OTHER_HEADERS)?
                .map(|uri| split_url(uri).1),
            host: require_same(single_value(headers, &X_FORWARDED_HOST)?, original.0, OTHER_HEADERS)?,
        })
    }
}

/// The single value of a header. An empty one counts as none, because nginx can only empty a header, not remove it.
fn single_value<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, &'static str> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => match std::str::from_utf8(value.as_bytes()) {
            Ok("") => Ok(None),
            Ok(text) => Ok(Some(text)),
            Err(_) => Err("a header that describes the request isn't UTF-8"),
        },
        _ => Err("a header that describes the request is there twice"),
    }
}

/// Returns the one of two descriptions that there is. If there are both and they differ, `conflict` is the error.
fn require_same<'a>(
    one: Option<&'a str>,
    other: Option<&'a str>,
    conflict: &'static str,
) -> Result<Option<&'a str>, &'static str> {
    match (one, other) {
        (Some(one), Some(other)) if one != other => Err(conflict),
        (one, other) => Ok(one.or(other)),
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
    fn an_appended_path_is_described_by_the_question() {
        let question = |target: &str, lines: &[(&'static str, &'static str)]| {
            let mut question = Request::post(target).body(()).unwrap();
            for (name, value) in lines {
                question.headers_mut().append(HeaderName::from_static(name), HeaderValue::from_static(value));
            }
            let found = OriginalRequest::from_question(&question)?;
            Ok::<_, &str>([found.method, found.path, found.host].map(|text| text.map(str::to_owned)))
        };
        let host = ("host", "a.example");
        for (target, path) in [
            ("/v1/auth/login?x=/1", "/login?x=/1"),
            ("/v1/auth/", "/"),
            ("/v1/auth//x/../login", "//x/../login"),
            ("/v1/auth/%2e%2e%2flogin;x", "/%2e%2e%2flogin;x"),
            ("http://a.example/v1/auth/login", "/login"),
            ("/v1/auth/http://b.example/login", "/http://b.example/login"),
        ] {
            assert_eq!(question(target, &[host]), three("POST", path, Some("a.example")), "{target}");
        }
        let same = [host, ("x-forwarded-uri", "/login"), ("x-original-method", "POST"), ("x-original-uri", "/login")];
        assert_eq!(question("/v1/auth/login", &same), three("POST", "/login", Some("a.example")));
        for other in [
            ("x-forwarded-uri", "/harmless"),
            ("x-original-uri", "/login?"),
            ("x-original-url", "http://b.example/login"),
            ("x-forwarded-method", "GET"),
            ("x-forwarded-host", "b.example"),
        ] {
            assert_eq!(question("/v1/auth/login", &[host, other]), Err(OTHER_TARGET), "{other:?}");
        }
        assert_eq!(question("http://b.example/v1/auth/login", &[host]), Err(OTHER_TARGET));
        assert!(question("/v1/auth/login", &[host, ("host", "b.example")]).is_err());
    }

    #[test]
    fn urls_are_split_into_host_and_path() {
        assert_eq!(split_url("http://a"), (Some("a"), "/"));
        assert_eq!(split_url("http://a?x"), (Some("a"), "/"));
        assert_eq!(split_url("/redirect?to=http://b/"), (None, "/redirect?to=http://b/"));
    }
}
