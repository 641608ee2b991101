//! Spellings that servers route to a limited path, or read as a counted cookie, are counted.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use http::header::{COOKIE, HeaderMap};
use tidegate_core::{Key, Verb};
use tidegate_policy::{KeySeed, Plan, Policy, PolicySources, Query};

fn plan(text: &str) -> std::sync::Arc<Plan> {
    Policy::load(PolicySources::new().file("tidegate.toml", text)).unwrap().plan().clone()
}

/// Asserts that a policy for `/login` and `/auth/login` counts all of these paths.
fn assert_counted(quirks: &str, paths: &[&str]) {
    let plan = plan(&format!(
        "[inbound]\npath_quirks = {quirks}\n[inbound.action.login]\n\
         match = {{ path = [\"/login\", \"/auth/login\"] }}\nlimit = \"5 per 60s\"\n"
    ));
    let is_uncounted = |path: &&str| {
        let actions = plan.matching_actions(&Query { path: Some(path), ..Query::default() }).unwrap();
        actions.first().is_none()
    };
    let uncounted: Vec<&str> = paths.iter().copied().filter(is_uncounted).collect();
    assert!(uncounted.is_empty(), "{quirks}: {uncounted:?}");
}

const DEFAULT: &str = "[\"encoded_slash\"]";
const JAVA: &str = "[\"encoded_slash\", \"parameters\"]";

/// As in Jetty, Tomcat, and Python's `unquote(urlparse(url).path)`.
#[test]
fn parameters_cut_before_decoding_evade_no_limit() {
    let paths = [
        "/auth%2flogin;%2fx",
        "/x;%2fa/..%2flogin",
        "/%2flogin;%2fa",
        "/static%2f..;%2fx/login",
        "/login;%5cx",
        "/login;\\x",
        "/login;%252fx",
        "/auth;%2fx%2fy/login",
        // Parameters cut from the last segment only.
        "/login/..;b/..;c",
        // Parameters cut once before decoding and once after.
        "/login%3bx;%2fy",
    ];
    for quirks in [JAVA, DEFAULT] {
        assert_counted(quirks, &paths);
    }
}

/// As in nginx with a URI in `proxy_pass`, before Tomcat.
#[test]
fn escaped_parameters_evade_no_limit() {
    for quirks in [JAVA, DEFAULT, "[]"] {
        assert_counted(
            quirks,
            &["/login%3bx", "/login%3b", "/login%253bx", "/x/..%3b/login", "/auth%3bx/login%3by", "/login%3bx;y"],
        );
    }
    for quirks in [JAVA, DEFAULT] {
        assert_counted(quirks, &["/login%3b%252fx", "/login%253b%2fx/..", "/x%3b%252fa/..%2flogin"]);
    }
}

/// One server resolves some of the dot segments, and the next server the others.
#[test]
fn chained_servers_path_rewriting_evades_no_limit() {
    assert_counted(
        DEFAULT,
        &["/login/x/..;/../..;", "/login/a/b%2fc/../..%2f", "/a;/../login;/x", "/login/x/..%0a", "/x/..;/../login"],
    );
}

/// As in Fastify 4.
#[test]
fn a_semicolon_ending_paths_evades_no_limit() {
    assert_counted(
        DEFAULT,
        &["/login;/x", "/l%6fgin;x=1/h/y", "/login;", "/login;/../a", "/login%3b/x", "/x/../login;/y/z"],
    );
}

/// In Python's and PCRE's regular expressions, `$` matches before a line feed; in Java's, before other line ends as
/// well.
#[test]
fn trailing_line_ends_evade_no_limit() {
    assert_counted(
        DEFAULT,
        &[
            "/login%0a",
            "/login%0A?x",
            "/login%250a",
            "/login%0d%0a",
            "/login%0d",
            "/login%c2%85",
            "/login%e2%80%a8",
            "/login%0a;x",
            "/login;x%0a",
            "/login%0a%3fx",
            "/login/%0a",
            "/x/../login%0a",
        ],
    );
}

/// As in `new URL()` and `urlsplit()` of a path that is already decoded.
#[test]
fn characters_ignored_by_parsers_evade_no_limit() {
    assert_counted(DEFAULT, &["/lo%0agin", "/%09login", "/login%0d%09", "/login%20%20", "/login%01"]);
}

/// As in Jetty 9.4 and IIS.
#[test]
fn four_digit_escapes_evade_no_limit() {
    assert_counted(
        DEFAULT,
        &[
            "/%u006cogin",
            "/%U006Cogin",
            "/%u002e/login",
            "/x/%u002e%u002e/login",
            "/auth%u002flogin",
            "/login%u003bx",
            "/%25u006cogin",
            "/%u002e/log%69n",
        ],
    );
}

#[test]
fn other_paths_do_not_match_login() {
    let plan = plan("[inbound.action.login]\nmatch = { path = \"/login\" }\nlimit = \"5 per 60s\"\n");
    for path in ["/a;/login", "/login%0ax", "/x%0a/login", "/%u006", "/%u006xlogin", "/logi%u6e", "/a%3b/login"] {
        let query = Query { path: Some(path), ..Query::default() };
        assert_eq!(plan.matching_actions(&query).unwrap().first(), None, "{path}");
    }
}

/// The keys of a request with this `Cookie` header, in a policy that counts by `sid`.
fn keys(cookie: &str) -> Result<Vec<Key>, String> {
    let plan = plan("[inbound.action.a]\nkey = [\"cookie:sid\"]\nmissing = \"skip\"\nlimit = \"5 per 60s\"\n");
    let mut headers = HeaderMap::new();
    headers.insert(COOKIE, http::HeaderValue::from_bytes(cookie.as_bytes()).unwrap());
    let query = Query { path: Some("/"), headers: Some(&headers), ..Query::default() };
    let batch = plan.ops(plan.find_action("a").ok(), &query, &KeySeed::new([7; 16]), Verb::Take, 1);
    batch.map(|batch| batch.ops().iter().map(|op| op.key).collect()).map_err(|error| error.to_string())
}

#[test]
fn cookies_read_by_any_server_are_counted() {
    let real = keys("sid=REAL").unwrap();
    assert_eq!(real.len(), 1);
    for cookie in [
        // aiohttp
        "sid=REAL xN",
        "sid=REAL , xN",
        "sid=REAL\txN",
        "sid=REAL =x",
        // http.cookies
        "sid=REAL \"x\"=N",
        "sid=REAL \"x=N",
        "sid=\"REAL\" \"y\"=",
        "sid=jN sid= REAL",
        "sid=jN sid =REAL",
        "x=1 sid =REAL",
        "x=1 sid\t= \"REAL\" y",
        "x=\"a; y\" sid=REAL",
        // The cookies of Koa.
        "sid=\"REAL ; x=1",
        "sid=\"REAL  ",
        "a=b;sid=\"REAL \t; N",
        // Jetty, Rack 1
        "x=1,sid=REAL",
        "x=1, sid = REAL, y=N",
        "sid=REAL,N",
        // Spaces beyond ASCII, which Python and JavaScript also trim.
        "sid=REAL\u{a0}",
        "sid=\u{2003}REAL\u{3000}; x=1",
        "\u{a0}sid\u{a0}=REAL",
    ] {
        let found = keys(cookie).unwrap();
        assert!(found.contains(&real[0]), "{cookie:?}");
    }
}

#[test]
fn ordinary_browser_cookies_have_one_value() {
    let real = keys("sid=REAL").unwrap();
    for cookie in
        ["a=1; sid=REAL; b=2", "sid=REAL", "p={\"v\":1, \"u\":\"sid\"}; sid=REAL; q=a b, c", "sid=\"REAL\"; a=\"b c\""]
    {
        assert_eq!(keys(cookie).as_ref(), Ok(&real), "{cookie}");
    }
}
