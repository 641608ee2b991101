//! The removal of credentials from a reply's headers.
//!
//! A redirect is passed to the caller, without the credential that the provider put there.

use std::borrow::Cow;

use http::HeaderValue;
use http::header::{CONTENT_LOCATION, HeaderMap, HeaderName, LINK, LOCATION};
use percent_encoding::percent_decode;
use tidegate_policy::Secret;
use tidegate_policy::outbound::{Auth, BaseUrl};

use super::path;
use super::target::{PLACEHOLDER, Target, param_has_name};

/// The longest `Link` header that is rewritten. A longer one stays as it is.
const MAX_LINK_BYTES: usize = 16 << 10;
/// The replacement of the credential in a path that is shown.
const ENCODED_PLACEHOLDER: &str = "%7Bkey%7D";

impl Target {
    /// Removes the credential from a reply's headers: from the URLs of `Location`, `Content-Location` and `Link`. Any
    /// other header that repeats it is removed.
    ///
    /// With `mount_path`, such as `tmdb`, URLs below the base URL become paths below `/tmdb`, so that a client that
    /// follows them comes back through the gateway. Other paths of the provider's host become full URLs.
    pub(crate) fn sanitize_reply_headers(
        &self,
        headers: &mut HeaderMap,
        secret: Option<&Secret>,
        mount_path: Option<&str>,
    ) {
        for name in [LOCATION, CONTENT_LOCATION] {
            let Some(value) = headers.get(&name) else { continue };
            let sanitized = value.to_str().ok().and_then(|text| self.sanitize_location(text, secret, mount_path));
            match sanitized.and_then(|text| HeaderValue::try_from(text).ok()) {
                Some(sanitized) => drop(headers.insert(&name, sanitized)),
                None => drop(headers.remove(&name)),
            }
        }
        if headers.contains_key(LINK) {
            let sanitize = |value: &HeaderValue| match value.to_str() {
                Ok(text) if text.len() <= MAX_LINK_BYTES => {
                    HeaderValue::try_from(self.sanitize_links(text, secret, mount_path)?).ok()
                }
                _ => Some(value.clone()),
            };
            let links: Vec<HeaderValue> = headers.get_all(LINK).iter().filter_map(sanitize).collect();
            headers.remove(LINK);
            headers.extend(links.into_iter().map(|value| (LINK, value)));
        }
        if let Some(secret) = secret {
            remove_headers_with_secret(headers, secret);
        }
    }

    /// Returns a `Link` header with its URLs without the credential; `None` if that can't be removed. They stand in
    /// angle brackets outside quoted strings (RFC 8288). A header with an unclosed bracket stays as it is.
    fn sanitize_links(&self, text: &str, secret: Option<&Secret>, mount_path: Option<&str>) -> Option<String> {
        let mut sanitized = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(at) = rest.find(['<', '"']) {
            let (before, found) = rest.split_at(at);
            sanitized += before;
            if let Some(found) = found.strip_prefix('<') {
                let Some((url, after)) = found.split_once('>') else { return Some(text.to_owned()) };
                sanitized += &format!("<{}>", self.sanitize_location(url, secret, mount_path)?);
                rest = after;
            } else {
                let (quoted, after) = found.split_at(quoted_length(found));
                sanitized += quoted;
                rest = after;
            }
        }
        Some(sanitized + rest)
    }

    /// Returns a location without the credential; `None` if the credential can't be removed.
    fn sanitize_location(&self, text: &str, secret: Option<&Secret>, mount_path: Option<&str>) -> Option<String> {
        let (text, fragment) = split_before(text, '#');
        let (text, query) = split_before(text, '?');
        let query = query.map(|query| self.remove_secret_params(&query[1..], secret)).filter(|query| !query.is_empty());
        let rewritten = self.base.as_ref().and_then(|base| rewrite_base(base, text, secret, mount_path));
        let query = query.map(|query| format!("?{query}"));
        let parts = [rewritten.as_deref().unwrap_or(text), query.as_deref().unwrap_or(""), fragment.unwrap_or("")];
        Some(parts.concat()).filter(|location| !secret.is_some_and(|secret| secret.is_in(location.as_bytes())))
    }

    fn remove_secret_params(&self, query: &str, secret: Option<&Secret>) -> String {
        let is_kept = |pair: &&str| match (&self.auth, secret) {
            (Auth::Query { name }, _) if param_has_name(pair, name) => false,
            (_, Some(secret)) => !secret.is_in(pair.as_bytes()),
            (_, None) => true,
        };
        query.split('&').filter(is_kept).collect::<Vec<_>>().join("&")
    }
}

/// Rewrites a location without query and fragment; `None` if it stays as it is.
fn rewrite_base(base: &BaseUrl, text: &str, secret: Option<&Secret>, mount_path: Option<&str>) -> Option<String> {
    let scheme = if base.is_https() { "https" } else { "http" };
    // After a slash, it is a URL within a path.
    let after_scheme = match text.split_once("://").filter(|(found, _)| !found.contains('/')) {
        Some((found, _)) if !found.eq_ignore_ascii_case(scheme) => return None,
        Some((_, rest)) => Some(rest),
        None => text.strip_prefix("//"),
    };
    let path = match after_scheme {
        Some(rest) => {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            authority.eq_ignore_ascii_case(base.authority().as_str()).then_some(path)?
        }
        None if text.starts_with('/') => text,
        // Relative to the requested path, which is the same below the base as below the mount path.
        None => return None,
    };
    let is_whole_url = after_scheme.is_some() || mount_path.is_some();
    let root = if is_whole_url { format!("{scheme}://{}", base.authority()) } else { String::new() };
    let below_base = path_below_base(base, path, secret).filter(|rest| path::check(rest).is_ok());
    Some(match (below_base, mount_path) {
        (Some(rest), Some(mount)) => format!("/{mount}{rest}"),
        (Some(rest), None) => format!("{root}{}{rest}", base.path().replace(PLACEHOLDER, ENCODED_PLACEHOLDER)),
        (None, _) => format!("{root}{path}"),
    })
}

/// Returns the rest of a path of the provider's host after the base URL's path, which may contain the credential.
pub(super) fn path_below_base<'p>(base: &BaseUrl, path: &'p str, secret: Option<&Secret>) -> Option<&'p str> {
    let mut rest = path;
    for expected in base.path().split('/').skip(1) {
        let after_slash = rest.strip_prefix('/')?;
        let (segment, after_segment) = after_slash.split_at(after_slash.find('/').unwrap_or(after_slash.len()));
        let expected = match secret {
            Some(secret) => Cow::Owned(expected.replace(PLACEHOLDER, secret.expose())),
            None => Cow::Borrowed(expected),
        };
        if !percent_decode(segment.as_bytes()).eq(percent_decode(expected.as_bytes())) {
            return None;
        }
        rest = after_segment;
    }
    Some(rest)
}

/// Returns the length of the quoted string at the start of a text. A backslash escapes the next character.
fn quoted_length(text: &str) -> usize {
    let mut is_escaped = false;
    let is_end = |(_, char): &(usize, char)| {
        let is_end = *char == '"' && !is_escaped;
        is_escaped = *char == '\\' && !is_escaped;
        is_end
    };
    text.char_indices().skip(1).find(is_end).map_or(text.len(), |(at, _)| at + 1)
}

/// Returns the text before a character, and the text from it on.
fn split_before(text: &str, at: char) -> (&str, Option<&str>) {
    match text.find(at) {
        Some(at) => (&text[..at], Some(&text[at..])),
        None => (text, None),
    }
}

/// Removes the headers that repeat the credential, by value or by name.
pub(super) fn remove_headers_with_secret(headers: &mut HeaderMap, secret: &Secret) {
    let repeats = |(name, value): (&HeaderName, &HeaderValue)| {
        (secret.is_in(value.as_bytes()) || name_contains_secret(name, secret)).then(|| name.clone())
    };
    let names: Vec<HeaderName> = headers.iter().filter_map(repeats).collect();
    for name in names {
        headers.remove(name);
    }
}

/// True if a header's name contains the credential. Names are always in small letters.
fn name_contains_secret(name: &HeaderName, secret: &Secret) -> bool {
    let (name, secret) = (name.as_str().as_bytes(), secret.expose().as_bytes());
    secret.len() >= Secret::MIN_FOUND_LENGTH
        && name.windows(secret.len()).any(|found| found.eq_ignore_ascii_case(secret))
}

#[cfg(test)]
mod tests {
    use super::super::path::tests::readings;
    use super::*;
    use http::Uri;
    use tidegate_testkit::property;

    const TOKEN: &str = "pl4nted-s3cr3t/x";

    fn target(base: &str, auth: Auth) -> Target {
        let uri: Uri = base.parse().unwrap();
        let base = BaseUrl::new(uri.scheme_str() == Some("https"), uri.authority().unwrap().clone(), uri.path());
        Target::new(Some(base), auth, None)
    }

    fn sanitized(target: &Target, location: &str, mount: Option<&str>) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(LOCATION, HeaderValue::from_str(location).unwrap());
        target.sanitize_reply_headers(&mut headers, Some(&Secret::new(TOKEN)), mount);
        headers.get(LOCATION).map(|value| value.to_str().unwrap().to_owned())
    }

    #[test]
    fn redirects_are_rewritten_to_the_gateway() {
        let tmdb = target("https://api.example/3", Auth::Bearer);
        for (location, mounted, plain) in [
            ("https://api.example/3/movie?a=b#c", "/tmdb/movie?a=b#c", "https://api.example/3/movie?a=b#c"),
            ("HTTPS://API.example/3/movie", "/tmdb/movie", "https://api.example/3/movie"),
            ("//api.example/3/movie", "/tmdb/movie", "https://api.example/3/movie"),
            ("/3/movie", "/tmdb/movie", "/3/movie"),
            ("/3", "/tmdb", "/3"),
            ("/4/movie", "https://api.example/4/movie", "/4/movie"),
            ("/4/https://x", "https://api.example/4/https://x", "/4/https://x"),
            ("/3/https://x", "/tmdb/https://x", "/3/https://x"),
            ("/3/../4", "https://api.example/3/../4", "/3/../4"),
            ("https://api.example/33", "https://api.example/33", "https://api.example/33"),
            ("https://other.example/3/movie", "https://other.example/3/movie", "https://other.example/3/movie"),
            (
                "https://api.example@evil.example/3/x",
                "https://api.example@evil.example/3/x",
                "https://api.example@evil.example/3/x",
            ),
            ("http://api.example/3/movie", "http://api.example/3/movie", "http://api.example/3/movie"),
            ("movie?page=2", "movie?page=2", "movie?page=2"),
            ("?page=2", "?page=2", "?page=2"),
        ] {
            assert_eq!(sanitized(&tmdb, location, Some("tmdb")).as_deref(), Some(mounted), "{location}");
            assert_eq!(sanitized(&tmdb, location, None).as_deref(), Some(plain), "{location}");
        }
    }

    #[test]
    fn credentials_are_removed_from_redirect_urls() {
        let query = target("https://api.example", Auth::Query { name: "api_key".to_owned() });
        for (location, expected) in [
            ("https://api.example/x?api_key=pl4nted-s3cr3t%2Fx&a=b", "https://api.example/x?a=b"),
            ("https://other.example/x?%61pi_key=pl4nted-s3cr3t%2fx", "https://other.example/x"),
            ("https://other.example/x?forwarded=pl4nted%2ds3cr3t%2fx&a=b", "https://other.example/x?a=b"),
            ("https://other.example/x?next=%2F%3Fapi_key%3Dpl4nted-s3cr3t%252Fx&a=b", "https://other.example/x?a=b"),
        ] {
            assert_eq!(sanitized(&query, location, None).as_deref(), Some(expected));
        }
        assert_eq!(sanitized(&query, "https://other.example/pl4nted-s3cr3t/x", None), None);
        assert_eq!(sanitized(&query, "https://other.example/#pl4nted-s3cr3t/x", None), None);
        let path = target("https://api.example/json/{key}", Auth::Path);
        let location = "https://api.example/json/pl4nted-s3cr3t%2fx/album?m=1";
        assert_eq!(sanitized(&path, location, Some("audio")).as_deref(), Some("/audio/album?m=1"));
        assert_eq!(sanitized(&path, location, None).as_deref(), Some("https://api.example/json/%7Bkey%7D/album?m=1"));
        assert_eq!(sanitized(&path, "https://api.example/xml/pl4nted-s3cr3t%2Fx/album", Some("audio")), None);
    }

    #[test]
    fn links_lead_back_through_the_gateway() {
        let github = target("https://api.example", Auth::Query { name: "k".to_owned() });
        for (link, expected) in [
            (
                "<https://api.example/x?page=2>; rel=\"next\", <https://api.example/x?page=9>; rel=\"last\"",
                Some("</github/x?page=2>; rel=\"next\", </github/x?page=9>; rel=\"last\""),
            ),
            ("<https://other.example/x>; rel=next", Some("<https://other.example/x>; rel=next")),
            (
                "</x,y>;title=\"<https://api.example/z> \\\"<\"",
                Some("</github/x,y>;title=\"<https://api.example/z> \\\"<\""),
            ),
            ("<https://api.example/x?k=pl4nted-s3cr3t%2Fx&page=2>", Some("</github/x?page=2>")),
            ("<https://api.example/pl4nted-s3cr3t%2Fx>", None),
            ("<https://api.example/x", Some("<https://api.example/x")),
            ("</x>; title=\"open", Some("</github/x>; title=\"open")),
        ] {
            let mut headers = HeaderMap::new();
            headers.append(LINK, HeaderValue::from_static("</first>"));
            headers.append(LINK, HeaderValue::from_static(link));
            github.sanitize_reply_headers(&mut headers, Some(&Secret::new(TOKEN)), Some("github"));
            let links: Vec<&str> = headers.get_all(LINK).iter().map(|value| value.to_str().unwrap()).collect();
            assert_eq!(links, ["</github/first>"].into_iter().chain(expected).collect::<Vec<_>>(), "{link}");
        }
    }

    #[test]
    fn reply_headers_repeating_the_credential_are_dropped() {
        let mut headers = HeaderMap::new();
        headers.insert("x-echo", HeaderValue::from_static("Bearer pl4nted-s3cr3t/x"));
        headers.append("link", HeaderValue::from_static("</x?page=1>"));
        headers.append("link", HeaderValue::from_static("</x?k=pl4nted-s3cr3t%2Fx>"));
        headers.insert("etag", HeaderValue::from_static("\"pl4nted\""));
        let secret = Secret::new("Pl4nted-S3cr3t");
        headers.insert("x-pl4nted-s3cr3t", HeaderValue::from_static("unknown"));
        remove_headers_with_secret(&mut headers, &secret);
        assert!(!headers.contains_key("x-pl4nted-s3cr3t"));
        let query = target("https://api.example", Auth::Query { name: "k".to_owned() });
        query.sanitize_reply_headers(&mut headers, Some(&Secret::new(TOKEN)), None);
        assert_eq!(headers.len(), 3, "with the etag: {headers:?}");
        assert_eq!(headers.get_all(LINK).iter().collect::<Vec<_>>(), ["</x?page=1>", "</x>"]);
        let mut headers = HeaderMap::new();
        headers.insert("etag", HeaderValue::from_static("\"22\""));
        query.sanitize_reply_headers(&mut headers, Some(&Secret::new("2")), None);
        assert!(headers.contains_key("etag"), "a key of one digit is no secret");
    }

    const PIECES: [&[u8]; 22] = [
        b"/",
        b"3",
        b"movie",
        b"..",
        b"%2e",
        b"%2f",
        b"%5c",
        b"\\",
        b"//",
        b";",
        b"@",
        b"%",
        b"?",
        b"#",
        b"&",
        b"k=",
        b"api.example",
        b"evil.example",
        b"https://",
        b"pl4nted-s3cr3t/x",
        b"pl4nted%2ds3cr3t%2Fx",
        b"{key}",
    ];

    #[test]
    fn locations_leak_no_credential_or_other_provider() {
        let query = Auth::Query { name: "k".to_owned() };
        let targets = [
            target("https://api.example/3", Auth::Bearer),
            target("https://api.example", query),
            target("https://api.example/3/{key}", Auth::Path),
        ];
        property::fuzz(30, |mut random| {
            let target = &targets[random.below(3) as usize];
            let begins = random.pick(&["/", "/3/", "https://api.example/3/", "//api.example", "https://", ""]);
            let location = begins.to_owned() + &String::from_utf8_lossy(&random.concat_random(&PIECES, 12));
            let Some(written) = sanitized(target, &location, Some("tmdb")) else { return Ok(()) };
            let decoded = percent_decode(written.as_bytes()).decode_utf8_lossy();
            if [&*written, &decoded].iter().any(|text| text.contains(TOKEN)) {
                return Err(format!("{location} contains the credential: {written}"));
            }
            let path = written.split(['?', '#']).next().unwrap_or_default();
            let is_here = path.starts_with('/') && !path.starts_with("//");
            if is_here && readings(path).any(|stack| stack.first().is_none_or(|first| first != "tmdb")) {
                return Err(format!("{location} leads to {written}"));
            }
            Ok(())
        });
    }
}
