//! The destination of a request, and the form of its credential.

use std::fmt::Write as _;

use bytes::Bytes;
use http::header::{AUTHORIZATION, HOST, USER_AGENT};
use http::request::Parts;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Uri, Version};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use tidegate_policy::outbound::{Auth, BaseUrl, ProviderConfig};
use tidegate_policy::{Secret, may_be_parameter};

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
    /// The host of the base URL, which is found in it only once.
    host: Option<String>,
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
        let host = base.as_ref().map(|base| base.authority().host().to_owned());
        Self { base, auth, user_agent, host }
    }

    /// Returns the target of a provider's requests.
    pub(crate) fn from_provider(provider: &ProviderConfig) -> Self {
        Self::new(provider.base_url.clone(), provider.auth.clone(), provider.user_agent.clone())
    }

    /// Returns the target of requests without a credential. If the base URL's path contains the credential, the new
    /// base ends before that segment.
    pub(super) fn without_credential(&self) -> Self {
        let mut base = self.base.clone();
        if let (Auth::Path, Some(base)) = (&self.auth, &mut base) {
            let public_path = base.path().split(PLACEHOLDER).next().and_then(|path| path.rsplit_once('/'));
            *base = BaseUrl::new(base.is_https(), base.authority().clone(), public_path.map_or("", |(path, _)| path));
        }
        Self::new(base, Auth::None, self.user_agent.clone())
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

    /// Returns the caller's path of a request: that below the base URL.
    pub(super) fn request_path<'u>(&self, uri: &'u Uri) -> &'u str {
        let Some(base) = &self.base else { return uri.path() };
        let below_base = || url_path_below_base(base, uri).ok();
        if uri.authority().is_some() { below_base().unwrap_or(uri.path()) } else { uri.path() }
    }

    /// Returns the host that requests are sent to.
    pub(super) fn host<'u>(&'u self, uri: &'u Uri) -> &'u str {
        self.host.as_deref().or_else(|| uri.host()).unwrap_or_default()
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

    /// Checks that this credential can be sent in its place. Fails with [`TargetError::UnusableCredential`].
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
                let base_path = match secret.filter(|_| self.auth == Auth::Path) {
                    Some(secret) => base.path().replace(PLACEHOLDER, &percent_encode_secret(secret)),
                    None => base.path().to_owned(),
                };
                (scheme, base.authority().clone(), base_path + path)
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
        let path_and_query = PathAndQuery::from_maybe_shared(Bytes::from(target));
        whole.path_and_query = Some(path_and_query.map_err(|_| TargetError::MalformedUrl)?);
        Uri::from_parts(whole).map_err(|_| TargetError::MalformedUrl)
    }

    fn push_query(&self, target: &mut String, query: Option<&str>, secret: Option<&Secret>) {
        let (Auth::Query { name }, Some(secret)) = (&self.auth, secret) else {
            if let Some(query) = query {
                target.extend(["?", query]);
            }
            return;
        };
        target.push('?');
        for pair in query.into_iter().flat_map(|query| query.split('&')) {
            // Some servers end a pair at `;`, too.
            let kept: Vec<&str> = pair.split(';').filter(|pair| !param_has_name(pair, name)).collect();
            if !kept.is_empty() {
                target.extend([&kept.join(";"), "&"]);
            }
        }
        let name = utf8_percent_encode(name, ENCODED_CHARS);
        write!(target, "{name}={}", percent_encode_secret(secret)).expect("invariant: writing to a string can't fail");
    }
}

/// Returns a secret in the encoding of URLs.
pub(super) fn percent_encode_secret(secret: &Secret) -> String {
    utf8_percent_encode(secret.expose(), ENCODED_CHARS).to_string()
}

/// Returns true if a server may read this name from a query's pair.
pub(super) fn param_has_name(pair: &str, name: &str) -> bool {
    may_be_parameter(pair.split_once('=').map_or(pair, |(name, _)| name), name)
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
mod tests;
