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
        for uri in ["/movie?a=b", "/movie?key=mine", "https://api.example/3/movie?a=b", "/../4", "https://evil.example"]
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
        ("/x?api_key[]=mine&a=1;api_key=mine&api.key=mine&%20api_key=mine&api_key%00=mine", "?a=1&"),
        ("/x?a=1;b=2", "?a=1;b=2&"),
        ("/x?my_api_key=1&api_key2=2", "?my_api_key=1&api_key2=2&"),
        ("/x?a=api_key%3Dmine", "?a=api_key%3Dmine&"),
    ] {
        assert_eq!(uri(&query, asked).unwrap(), format!("https://api.example/x{sent}api_key={ENCODED}"), "{asked}");
    }
    let spaced = target("https://api.example", Auth::Query { name: "api key".to_owned() });
    assert_eq!(uri(&spaced, "/x?api+key=1&api%20key=2").unwrap(), format!("https://api.example/x?api%20key={ENCODED}"));
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
        let sent = if asked.starts_with("https") { "https://api.example/v1/x" } else { "http://api.example:80/v1/x" };
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
