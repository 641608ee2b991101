//! The destination of a request, and the form of its credential.

use std::borrow::Cow;
use std::fmt::Write as _;

use bytes::Bytes;
use http::header::{AUTHORIZATION, HOST, USER_AGENT};
use http::request::Parts;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Uri, Version};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode, utf8_percent_encode};
use tidegate_policy::Secret;
use tidegate_policy::outbound::{Auth, BaseUrl, ProviderConfig};

use super::path;
use super::reply_headers::path_below_base;

/// All characters except those that RFC 3986 §2.3 calls unreserved.
const ENCODED_CHARS: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// The placeholder of the credential in a base URL's path.
pub(super) const PLACEHOLDER: &str = "{key}";

/// The destination of a provider's requests, and the place of its credential in them.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(super) base: Option<BaseUrl>,
    pub(super) auth: Auth,
    user_agent: Option<HeaderValue>,
}

/// The reason why a request can't be sent to its provider. Never contains the path or the credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TargetError {
    /// The path doesn't begin with a slash.
    #[error("the path must begin with a slash")]
    NotAPath,
    /// The path has a backslash, which some servers take for a slash.
    #[error("the path must not contain a backslash")]
    Backslash,
    /// The path would begin with two slashes, which some servers take for another host.
    #[error("the path must not begin with two slashes")]
    DoubleSlash,
    /// The path leads outside of the provider's base URL.
    #[error("the path must not lead beyond the base URL")]
    PathTraversal,
    /// The URL is not below the provider's base URL.
    #[error("the URL is not below the base URL")]
    NotBelowBase,
    /// The provider has no base URL, and the request no host.
    #[error("the provider has no base URL, so the request needs a whole URL")]
    NoHost,
    /// The path and query don't form a valid URL.
    #[error("the path or query has a character that a URL can't have")]
    MalformedUrl,
    /// The credential has characters that can't be sent in its place.
    #[error("the credential has characters that can't be sent where it belongs")]
    UnusableCredential,
}

impl Target {
    /// Returns the target of requests below `base`. Without `base`, each request needs a full URL, and is sent there
    /// with the credential.
    pub(crate) fn new(base: Option<BaseUrl>, auth: Auth, user_agent: Option<HeaderValue>) -> Self {
        Self { base, auth, user_agent }
    }

    /// Returns the target of a provider's requests.
    pub(crate) fn from_provider(provider: &ProviderConfig) -> Self {
        Self::new(provider.base_url.clone(), provider.auth.clone(), provider.user_agent.clone())
    }

    /// Returns the target of requests without a credential. If the base URL's path contains the credential, the new
    /// base ends before that segment.
    pub(super) fn without_credential(&self) -> Self {
        let base_before_credential = |base: &BaseUrl| {
            let open = base.path().split(PLACEHOLDER).next().and_then(|path| path.rsplit_once('/'));
            BaseUrl::new(base.is_https(), base.authority().clone(), open.map_or("", |(path, _)| path))
        };
        let base = match self.auth {
            Auth::Path => self.base.as_ref().map(base_before_credential),
            _ => self.base.clone(),
        };
        Self { base, auth: Auth::None, user_agent: self.user_agent.clone() }
    }

    /// Appends a request's path to the base URL, once for all attempts. If the URL contains the credential, each
    /// attempt does this for itself, and this call only checks that it can.
    pub(super) fn resolve_uri(&self, uri: &mut Uri) -> Result<(), TargetError> {
        let resolved = self.target_uri(uri, None)?;
        if !self.has_credential_in_url() {
            *uri = resolved;
        }
        Ok(())
    }

    /// Does the rest of [`prepare_request`](Self::prepare_request) for one attempt, after
    /// [`resolve_uri`](Self::resolve_uri).
    pub(super) fn prepare_attempt(&self, parts: &mut Parts, secret: Option<&Secret>) -> Result<(), TargetError> {
        if self.has_credential_in_url() { self.prepare_request(parts, secret) } else { self.set_headers(parts, secret) }
    }

    fn has_credential_in_url(&self) -> bool {
        matches!(self.auth, Auth::Query { .. } | Auth::Path)
    }

    /// Turns the caller's request into the provider's: appends its path to the base URL, and inserts `secret` in its
    /// place. The caller's value there is removed, also a query parameter with the credential's name in any spelling.
    /// So is the caller's `Authorization`, if a credential is sent.
    ///
    /// A request with a full URL must already be below the base URL, with `{key}` in the same place. A path can never
    /// change the host.
    ///
    /// # Errors
    /// The reason why the request can't be sent. `parts` are unchanged then.
    pub(crate) fn prepare_request(&self, parts: &mut Parts, secret: Option<&Secret>) -> Result<(), TargetError> {
        let uri = self.target_uri(&parts.uri, secret)?;
        self.set_headers(parts, secret)?;
        parts.uri = uri;
        Ok(())
    }

    /// Turns the headers of the caller's request into the provider's.
    fn set_headers(&self, parts: &mut Parts, secret: Option<&Secret>) -> Result<(), TargetError> {
        let header = secret.map(|secret| self.auth_header(secret)).transpose()?.flatten();
        // The client of the next hop chooses the version, and sets the host from the URL.
        parts.version = Version::HTTP_11;
        parts.headers.remove(HOST);
        if secret.is_some() && self.auth != Auth::None {
            parts.headers.remove(AUTHORIZATION);
        }
        match (&self.auth, header) {
            (Auth::Header { name, .. }, Some(value)) => drop(parts.headers.insert(name, value)),
            (_, Some(value)) => drop(parts.headers.insert(AUTHORIZATION, value)),
            (_, None) => {}
        }
        if let Some(user_agent) = &self.user_agent {
            parts.headers.insert(USER_AGENT, user_agent.clone());
        }
        Ok(())
    }

    /// Returns the length of the base URL's path if a full URL is below it. Of several matches, the longest one counts.
    #[cfg(feature = "reqwest")]
    pub(super) fn base_match_length(&self, url: &Uri) -> Option<usize> {
        let base = self.base.as_ref()?;
        url_path_below_base(base, url).ok().map(|_| base.path().len())
    }

    /// Checks that this credential can be sent in its place.
    ///
    /// # Errors
    /// [`TargetError::UnusableCredential`].
    pub(crate) fn check_credential(&self, secret: &Secret) -> Result<(), TargetError> {
        match self.auth {
            Auth::Path if secret.expose().bytes().all(|byte| byte == b'.') => Err(TargetError::UnusableCredential),
            _ => self.auth_header(secret).map(drop),
        }
    }

    fn auth_header(&self, secret: &Secret) -> Result<Option<HeaderValue>, TargetError> {
        let prefix = match &self.auth {
            Auth::Bearer => "Bearer ",
            Auth::Header { prefix, .. } => prefix,
            Auth::None | Auth::Query { .. } | Auth::Path => return Ok(None),
        };
        let value = Bytes::from([prefix, secret.expose()].concat());
        let mut value = HeaderValue::from_maybe_shared(value).map_err(|_| TargetError::UnusableCredential)?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    fn target_uri(&self, requested: &Uri, secret: Option<&Secret>) -> Result<Uri, TargetError> {
        let (path, query) = (requested.path(), requested.query());
        let (scheme, authority, mut target) = match &self.base {
            Some(base) => {
                let path = if requested.authority().is_some() { url_path_below_base(base, requested)? } else { path };
                path::check(path)?;
                let scheme = if base.is_https() { Scheme::HTTPS } else { Scheme::HTTP };
                (scheme, base.authority().clone(), self.base_path(base, secret).into_owned() + path)
            }
            None => {
                let scheme = requested.scheme().cloned().ok_or(TargetError::NoHost)?;
                let authority = requested.authority().cloned().ok_or(TargetError::NoHost)?;
                (scheme, authority, path.to_owned())
            }
        };
        match target.as_bytes() {
            [] => target.push('/'),
            [b'/', b'/', ..] => return Err(TargetError::DoubleSlash),
            _ => {}
        }
        self.push_query(&mut target, query, secret);
        let mut whole = http::uri::Parts::default();
        whole.scheme = Some(scheme);
        whole.authority = Some(authority);
        whole.path_and_query =
            Some(PathAndQuery::from_maybe_shared(Bytes::from(target)).map_err(|_| TargetError::MalformedUrl)?);
        Uri::from_parts(whole).map_err(|_| TargetError::MalformedUrl)
    }

    /// Returns the base URL's path, with the credential in it if it belongs there.
    fn base_path<'a>(&self, base: &'a BaseUrl, secret: Option<&Secret>) -> Cow<'a, str> {
        match secret.filter(|_| self.auth == Auth::Path) {
            Some(secret) => Cow::Owned(base.path().replace(PLACEHOLDER, &percent_encode_secret(secret))),
            None => Cow::Borrowed(base.path()),
        }
    }

    fn push_query(&self, target: &mut String, query: Option<&str>, secret: Option<&Secret>) {
        let (Auth::Query { name }, Some(secret)) = (&self.auth, secret) else {
            if let Some(query) = query {
                target.extend(["?", query]);
            }
            return;
        };
        target.push('?');
        for pair in query.into_iter().flat_map(|query| query.split('&')).filter(|pair| !param_has_name(pair, name)) {
            target.extend([pair, "&"]);
        }
        let name = utf8_percent_encode(name, ENCODED_CHARS);
        write!(target, "{name}={}", percent_encode_secret(secret)).expect("invariant: writing to a string can't fail");
    }
}

/// Returns a secret in the encoding of URLs.
pub(super) fn percent_encode_secret(secret: &Secret) -> String {
    utf8_percent_encode(secret.expose(), ENCODED_CHARS).to_string()
}

/// Returns true if a query's pair has this name, in any spelling. Some servers ignore the case.
pub(super) fn param_has_name(pair: &str, name: &str) -> bool {
    let found = pair.split_once('=').map_or(pair, |(name, _)| name).replace('+', " ");
    percent_decode(found.as_bytes())
        .map(|byte| byte.to_ascii_lowercase())
        .eq(name.bytes().map(|byte| byte.to_ascii_lowercase()))
}

/// Returns the rest of a full URL's path after the base URL's path.
fn url_path_below_base<'a>(base: &BaseUrl, requested: &'a Uri) -> Result<&'a str, TargetError> {
    let (scheme, port) = if base.is_https() { ("https", 443) } else { ("http", 80) };
    let is_same_authority = |authority: &Authority| {
        // Some clients leave out the scheme's default port. A user name means another account.
        authority.host().eq_ignore_ascii_case(base.authority().host())
            && authority.port_u16().unwrap_or(port) == base.authority().port_u16().unwrap_or(port)
            && !authority.as_str().contains('@')
    };
    let is_here = requested.scheme_str() == Some(scheme) && requested.authority().is_some_and(is_same_authority);
    is_here.then(|| path_below_base(base, requested.path(), None)).flatten().ok_or(TargetError::NotBelowBase)
}

#[cfg(test)]
mod tests {
    use super::super::path::tests::readings;
    use super::*;
    use http::header::HeaderName;
    use http::{HeaderMap, Request};
    use tidegate_testkit::property;

    const TOKEN: &str = "s3cr3t+/=&?#%~x";
    const ENCODED: &str = "s3cr3t%2B%2F%3D%26%3F%23%25~x";

    fn target(base: &str, auth: Auth) -> Target {
        let uri: Uri = base.parse().unwrap();
        let base = BaseUrl::new(uri.scheme_str() == Some("https"), uri.authority().unwrap().clone(), uri.path());
        Target::new(Some(base), auth, None)
    }

    fn aimed(target: &Target, uri: &str, lines: &[(&'static str, &str)]) -> Result<Parts, TargetError> {
        let mut request = Request::get(uri);
        for (name, value) in lines {
            request = request.header(*name, *value);
        }
        let (mut parts, ()) = request.body(()).unwrap().into_parts();
        target.prepare_request(&mut parts, Some(&Secret::new(TOKEN))).map(|()| parts)
    }

    fn uri(target: &Target, path: &str) -> Result<String, TargetError> {
        aimed(target, path, &[]).map(|parts| parts.uri.to_string())
    }

    #[test]
    fn paths_are_appended_to_the_base() {
        let deep = target("https://api.example/3/", Auth::None);
        let flat = target("http://api.example:8080", Auth::None);
        for (path, below_deep, below_flat) in [
            ("/movie/603?a=b&c", "/3/movie/603?a=b&c", "/movie/603?a=b&c"),
            ("/", "/3/", "/"),
            ("/@evil.example/x", "/3/@evil.example/x", "/@evil.example/x"),
            ("/a%2Fb", "/3/a%2Fb", "/a%2Fb"),
            ("/a?x=http://evil.example/../..", "/3/a?x=http://evil.example/../..", "/a?x=http://evil.example/../.."),
        ] {
            assert_eq!(uri(&deep, path).unwrap(), format!("https://api.example{below_deep}"));
            assert_eq!(uri(&flat, path).unwrap(), format!("http://api.example:8080{below_flat}"));
        }
        assert_eq!(uri(&deep, "//evil.example/x").unwrap(), "https://api.example/3//evil.example/x");
        assert_eq!(uri(&flat, "//evil.example/x"), Err(TargetError::DoubleSlash));
    }

    #[test]
    fn a_prepared_request_is_aimed_like_others() {
        let header = Auth::Header { name: HeaderName::from_static("x-api-key"), prefix: String::new() };
        for auth in [Auth::None, Auth::Bearer, header, Auth::Query { name: "key".to_owned() }] {
            let deep = target("https://api.example/3", auth.clone());
            for uri in
                ["/movie?a=b", "/movie?key=mine", "https://api.example/3/movie?a=b", "/../4", "https://evil.example"]
            {
                let parts = || Request::get(uri).header("host", "localhost").body(()).unwrap().into_parts().0;
                let mut led = parts();
                let leads = deep.resolve_uri(&mut led.uri);
                for secret in [TOKEN, "another-token"].map(Secret::new) {
                    let (mut aimed, mut attempt) = (parts(), led.clone());
                    let expected = deep.prepare_request(&mut aimed, Some(&secret));
                    assert_eq!(
                        leads.and_then(|()| deep.prepare_attempt(&mut attempt, Some(&secret))),
                        expected,
                        "{auth:?} {uri}"
                    );
                    if expected.is_ok() {
                        assert_eq!((attempt.uri, attempt.headers), (aimed.uri, aimed.headers), "{auth:?} {uri}");
                    }
                }
            }
        }
    }

    #[test]
    fn requests_outside_the_base_are_rejected() {
        let deep = target("https://api.example/3", Auth::Bearer);
        for (path, error) in [
            ("/../4", TargetError::PathTraversal),
            ("/%2e%2e/4", TargetError::PathTraversal),
            ("/a/..%2f..%5c4", TargetError::PathTraversal),
            ("/\\evil.example", TargetError::Backslash),
            ("https://evil.example/3/movie", TargetError::NotBelowBase),
            ("http://api.example/3/movie", TargetError::NotBelowBase),
            ("https://api.example:8443/3/movie", TargetError::NotBelowBase),
            ("https://user@api.example/3/movie", TargetError::NotBelowBase),
            ("https://api.example/4/movie", TargetError::NotBelowBase),
            ("https://api.example/33", TargetError::NotBelowBase),
            ("https://api.example/3/../4", TargetError::PathTraversal),
            ("*", TargetError::NotAPath),
        ] {
            assert_eq!(uri(&deep, path), Err(error), "{path}");
        }
        assert_eq!(uri(&deep, "https://api.example/3/movie?x").unwrap(), "https://api.example/3/movie?x");
        assert_eq!(uri(&deep, "https://API.example/3").unwrap(), "https://api.example/3");
        let anywhere = Target::new(None, Auth::Bearer, None);
        assert_eq!(uri(&anywhere, "/movie"), Err(TargetError::NoHost));
        assert_eq!(uri(&anywhere, "https://api.example/3").unwrap(), "https://api.example/3");
    }

    #[test]
    fn the_providers_credential_replaces_the_callers() {
        let callers = [("authorization", "Basic Zm9v"), ("x-api-key", "mine"), ("host", "127.0.0.1:8081")];
        let headers = |auth| aimed(&target("https://api.example", auth), "/x", &callers).unwrap().headers;
        let shown = |headers: &HeaderMap, name: &'static str| {
            headers
                .get_all(HeaderName::from_static(name))
                .iter()
                .map(|value| value.to_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        let bearer = headers(Auth::Bearer);
        assert_eq!(shown(&bearer, "authorization"), [format!("Bearer {TOKEN}")]);
        assert!(bearer["authorization"].is_sensitive());
        assert!(!bearer.contains_key("host"));
        let key = headers(Auth::Header { name: HeaderName::from_static("x-api-key"), prefix: "Token ".to_owned() });
        assert_eq!(shown(&key, "x-api-key"), [format!("Token {TOKEN}")]);
        assert!(!key.contains_key("authorization"));
        assert!(!headers(Auth::Query { name: "key".to_owned() }).contains_key("authorization"));
        assert_eq!(shown(&headers(Auth::None), "authorization"), ["Basic Zm9v"]);
        let anonymous = target("https://api.example", Auth::Bearer);
        let (mut parts, ()) = Request::get("/x").header("authorization", "Basic Zm9v").body(()).unwrap().into_parts();
        anonymous.prepare_request(&mut parts, None).unwrap();
        assert_eq!(shown(&parts.headers, "authorization"), ["Basic Zm9v"], "there is nothing to inject");
        let agent = Target::new(None, Auth::None, Some(HeaderValue::from_static("App/1.0 ( me@example.org )")));
        let parts = aimed(&agent, "https://api.example/", &[("user-agent", "curl")]).unwrap();
        assert_eq!(parts.headers["user-agent"], "App/1.0 ( me@example.org )");
    }

    #[test]
    fn the_credential_parameter_replaces_every_spelling() {
        let query = target("https://api.example", Auth::Query { name: "api_key".to_owned() });
        for (asked, sent) in [
            ("/x", "?"),
            ("/x?a=b", "?a=b&"),
            ("/x?api_key=mine", "?"),
            ("/x?api_key", "?"),
            ("/x?a=b&api_key=mine&c=d&api_key=again", "?a=b&c=d&"),
            ("/x?%61pi_key=mine&api%5Fkey=mine&API_KEY=mine&a=b", "?a=b&"),
            ("/x?my_api_key=1&api_key2=2", "?my_api_key=1&api_key2=2&"),
            ("/x?a=api_key%3Dmine", "?a=api_key%3Dmine&"),
        ] {
            assert_eq!(uri(&query, asked).unwrap(), format!("https://api.example/x{sent}api_key={ENCODED}"), "{asked}");
        }
        let spaced = target("https://api.example", Auth::Query { name: "api key".to_owned() });
        assert_eq!(
            uri(&spaced, "/x?api+key=1&api%20key=2").unwrap(),
            format!("https://api.example/x?api%20key={ENCODED}")
        );
    }

    #[test]
    fn the_credential_is_escaped_in_the_path() {
        let path = target("https://theaudiodb.example/api/v1/json/{key}", Auth::Path);
        let sent = format!("https://theaudiodb.example/api/v1/json/{ENCODED}/album.php?m=1");
        for asked in ["/album.php?m=1", "https://theaudiodb.example/api/v1/json/%7Bkey%7D/album.php?m=1"] {
            assert_eq!(uri(&path, asked).unwrap(), sent);
        }
    }

    #[test]
    fn anonymous_paths_end_before_the_credentials_place() {
        for (base, auth, login) in [
            ("https://api.example/v1/json/{key}", Auth::Path, "https://api.example/v1/json/login"),
            ("https://api.example/v1/bot{key}/send", Auth::Path, "https://api.example/v1/login"),
            ("https://api.example/{key}", Auth::Path, "https://api.example/login"),
            ("https://api.example/v1", Auth::Bearer, "https://api.example/v1/login"),
        ] {
            let (mut parts, ()) = Request::post("/login").body(()).unwrap().into_parts();
            target(base, auth).without_credential().prepare_request(&mut parts, None).unwrap();
            assert_eq!(parts.uri, *login);
        }
    }

    #[test]
    fn equivalent_absolute_urls_are_accepted() {
        let plain = target("http://api.example:80/v1", Auth::None);
        let tls = target("https://api.example/v1", Auth::None);
        for (target, asked) in [
            (&plain, "http://api.example/v1/x"),
            (&plain, "http://API.example:80/v1/x"),
            (&tls, "https://api.example:443/v1/x"),
            (&tls, "https://api.example/%761/x"),
        ] {
            let sent =
                if asked.starts_with("https") { "https://api.example/v1/x" } else { "http://api.example:80/v1/x" };
            assert_eq!(uri(target, asked).unwrap(), sent, "{asked}");
        }
        for asked in ["https://api.example:80/v1/x", "https://me@api.example/v1/x", "https://api.example/v1x"] {
            assert_eq!(uri(&tls, asked), Err(TargetError::NotBelowBase), "{asked}");
        }
    }

    #[test]
    fn credentials_unfit_for_their_place_are_rejected() {
        let bearer = target("https://api.example", Auth::Bearer);
        assert_eq!(bearer.check_credential(&Secret::new("line\nbreak")), Err(TargetError::UnusableCredential));
        assert_eq!(bearer.check_credential(&Secret::new(TOKEN)), Ok(()));
        let path = target("https://api.example/{key}", Auth::Path);
        assert_eq!(path.check_credential(&Secret::new("..")), Err(TargetError::UnusableCredential));
        assert_eq!(path.check_credential(&Secret::new("2")), Ok(()));
    }

    const PIECES: [&[u8]; 23] = [
        b"/",
        b"a",
        b"..",
        b".",
        b"%2e",
        b"%2E",
        b"%2f",
        b"%5c",
        b"%3b",
        b"\\",
        b"//",
        b";",
        b"@",
        b":",
        b"%",
        b"?",
        b"#",
        b"&",
        b"key=mine",
        b"evil.example",
        b"api.example",
        b"/v1/x",
        b"https://",
    ];

    #[test]
    fn no_request_uri_changes_the_base() {
        property::fuzz(30, |mut random| {
            let deep = target("https://api.example/v1/x", Auth::Query { name: "key".to_owned() });
            let begins = random.pick(&["/", "", "https://api.example/v1/x", "https://api.example"]);
            let asked = begins.to_owned() + &String::from_utf8_lossy(&random.concat_random(&PIECES, 12));
            let Ok(sent) = asked.parse::<Uri>().map_err(drop).and_then(|asked| {
                let (mut parts, ()) = Request::new(()).into_parts();
                parts.uri = asked;
                deep.prepare_request(&mut parts, Some(&Secret::new(TOKEN))).map_err(drop).map(|()| parts.uri)
            }) else {
                return Ok(());
            };
            let host = (sent.scheme_str(), sent.authority().map(Authority::as_str));
            let stays = host == (Some("https"), Some("api.example"))
                && readings(sent.path()).all(|stack| stack.starts_with(&["v1".to_owned(), "x".to_owned()]));
            let keys =
                sent.query().into_iter().flat_map(|query| query.split('&')).filter(|pair| param_has_name(pair, "key"));
            if stays && keys.count() == 1 { Ok(()) } else { Err(format!("{asked} leads to {sent}")) }
        });
    }
}
