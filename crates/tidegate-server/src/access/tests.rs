use std::net::Ipv4Addr;

use tidegate_policy::{Policy, PolicySources};
use tidegate_runtime::clock::SystemClock;

use super::*;
use crate::dashboard::sign_in_limiter;
use crate::events::server_events;

const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

impl Access {
    fn check_headers(&self, headers: &HeaderMap, target: Option<&Authority>) -> Result<(), AccessError> {
        self.identify(headers, target, LOCAL).map(drop)
    }
}

fn token(name: &str, secret: &str, read_only: bool) -> AccessToken {
    AccessToken { name: name.into(), secret: Secret::new(secret), read_only }
}

fn refusal_log() -> Arc<RefusalLog> {
    Arc::new(RefusalLog::new(1, Arc::new(server_events(Time::ZERO))))
}

fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        headers.append(HeaderName::from_static(name), HeaderValue::from_bytes(value.as_bytes()).unwrap());
    }
    headers
}

fn listens_on(addresses: &str) -> ListenConfig {
    let policy = PolicySources::new().env([
        ("TIDEGATE__API__LISTEN", addresses),
        ("TIDEGATE__API__TOKEN", "env:A"),
        ("TIDEGATE__ADMIN__LISTEN", "off"),
    ]);
    Policy::load(policy).unwrap().api().listen.clone()
}

fn open(listens: &str, hosts: &[&str]) -> Access {
    let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
    Access::new(
        ListenerKind::Api,
        &listens_on(listens),
        &hosts,
        Vec::new(),
        refusal_log(),
        Arc::new(sign_in_limiter(SystemClock::new())),
    )
}

#[test]
fn only_the_listeners_own_host_names_pass() {
    let access = open("127.0.0.1:8082", &["gate.internal", "10.1.2.3"]);
    for host in [
        "127.0.0.1:8082",
        "127.0.0.1",
        "127.0.0.1.",
        "127.8.9.10:1",
        "localhost:8082",
        "localhost:",
        "LOCALHOST.",
        "Api.LocalHost:80",
        "[::1]:8082",
        "[::1]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]:8082",
        "[::ffff:7f00:1]",
        "Gate.Internal:80",
        "gate.internal.",
        "10.1.2.3:8082",
        "",
    ] {
        assert_eq!(access.check_headers(&headers(&[("host", host)]), None), Ok(()), "{host}");
    }
    assert_eq!(access.check_headers(&headers(&[]), None), Ok(()), "HTTP/1.0 may name none");
    for host in [
        "evil.example",
        "evil.example:8082",
        "localhost.evil.example",
        "evil-localhost",
        "127.0.0.1.evil.example",
        "127.0.0.1:8082.evil.example",
        "user@127.0.0.1",
        "127.0.0.1@evil.example",
        "10.0.0.1",
        "169.254.169.254",
        "0.0.0.0:8082",
        "[::]:8082",
        "[::1]x",
        "[::1%lo]",
        "[fe80::1]",
        "[::ffff:10.0.0.1]",
        "::1",
        "[::1",
        "127.1",
        "0x7f000001",
        "localhost:80:80",
        "localhost:x",
        "localhost, evil.example",
        "localhöst",
        "gate.internal.evil.example",
        ":8082",
        ".",
        "a b",
    ] {
        assert_eq!(access.check_headers(&headers(&[("host", host)]), None), Err(AccessError::Host), "{host}");
    }
    for lines in [[("host", "localhost"), ("host", "evil.example")], [("host", "evil.example"), ("host", "localhost")]]
    {
        assert_eq!(access.check_headers(&headers(&lines), None), Err(AccessError::Host), "{lines:?}");
    }
    let whole: Authority = "evil.example".parse().unwrap();
    assert_eq!(access.check_headers(&headers(&[("host", "localhost")]), Some(&whole)), Err(AccessError::Host));
    let public = open("192.0.2.7:8082", &[]);
    assert_eq!(public.check_headers(&headers(&[("host", "192.0.2.7:8082")]), None), Ok(()));
    assert_eq!(public.check_headers(&headers(&[("host", "192.0.2.8")]), None), Err(AccessError::Host));
}

#[test]
fn requests_of_other_origins_are_rejected() {
    let access = open("127.0.0.1:8082", &["app.internal"]);
    let check = |lines: &[(&'static str, &'static str)]| {
        access.check_headers(&headers(&[&[("host", "127.0.0.1:8082")], lines].concat()), None)
    };
    for lines in [
        &[("origin", "https://evil.example")][..],
        &[("origin", "null")],
        &[("origin", "")],
        &[("origin", "file://")],
        &[("origin", "http://")],
        &[("origin", "http://127.0.0.1:3000")],
        &[("origin", "http://127.0.0.1")],
        &[("origin", "http://127.0.0.2:8082")],
        &[("origin", "http://localhost:8082")],
        &[("origin", "http://[::1]:8082")],
        &[("origin", "http://app.internal.evil.example")],
        &[("origin", "http://app.internal@evil.example")],
        &[("origin", "chrome-extension://127.0.0.1:8082")],
        &[("origin", "http://127.0.0.1:8082"), ("origin", "http://evil.example")],
        &[("origin", "http://127.0.0.1:8082, http://evil.example")],
        &[("origin", "https://evil.example"), ("sec-fetch-site", "same-origin")],
        &[("sec-fetch-site", "cross-site")],
        &[("sec-fetch-site", "same-site")],
        &[("sec-fetch-site", "Same-Origin")],
        &[("sec-fetch-site", "none"), ("sec-fetch-site", "cross-site")],
    ] {
        assert_eq!(check(lines), Err(AccessError::Origin), "{lines:?}");
    }
    for lines in [
        &[("origin", "http://127.0.0.1:8082")][..],
        &[("origin", "http://127.0.0.1:8082"), ("sec-fetch-site", "same-origin")],
        &[("origin", "https://app.internal:8443"), ("sec-fetch-site", "cross-site")],
        &[("origin", "http://App.Internal")],
        &[("sec-fetch-site", "none")],
        &[("sec-fetch-site", "same-origin")],
    ] {
        assert_eq!(check(lines), Ok(()), "{lines:?}");
    }
    assert_eq!(
        access.check_headers(&headers(&[("origin", "http://127.0.0.1:8082")]), None),
        Err(AccessError::Origin),
        "no Host"
    );
}

#[test]
fn a_valid_token_suffices_in_either_header() {
    let with = |listener| {
        let tokens = vec![token("token", "s3cret", false)];
        Access::new(
            listener,
            &listens_on("0.0.0.0:8082"),
            &[],
            tokens,
            refusal_log(),
            Arc::new(sign_in_limiter(SystemClock::new())),
        )
    };
    let (gateway, api) = (with(ListenerKind::Gateway), with(ListenerKind::Api));
    for (name, value, passes_gateway, passes_api) in [
        ("proxy-authorization", "Bearer s3cret", true, false),
        ("proxy-authorization", "bearer s3cret", true, false),
        ("tidegate-token", "s3cret", true, false),
        ("authorization", "Bearer s3cret", false, true),
        ("authorization", "BEARER s3cret", false, true),
        ("x-tidegate-token", "s3cret", false, true),
        ("proxy-authorization", "Basic s3cret", false, false),
        ("proxy-authorization", "s3cret", false, false),
        ("authorization", "Bearer s3cret2", false, false),
        ("tidegate-token", "s3cre", false, false),
        ("x-tidegate-token", "", false, false),
    ] {
        let lines = headers(&[(name, value), ("host", "evil.example"), ("origin", "http://evil.example")]);
        for (access, passes) in [(&gateway, passes_gateway), (&api, passes_api)] {
            let expected = if passes { Ok(()) } else { Err(AccessError::Token) };
            assert_eq!(access.check_headers(&lines, None), expected, "{name}: {value}");
        }
    }
    assert_eq!(api.check_headers(&headers(&[("host", "10.1.2.3")]), None), Err(AccessError::Token));
}

#[test]
fn tokens_tell_the_callers_name_and_rights() {
    let tokens = vec![token("token", "s3cret", false), token("ops", "s3cret2", false), token("dash", "look", true)];
    let access = Access::new(
        ListenerKind::Admin,
        &listens_on("0.0.0.0:8083"),
        &[],
        tokens,
        refusal_log(),
        Arc::new(sign_in_limiter(SystemClock::new())),
    );
    for (secret, token, read_only) in
        [("Bearer s3cret", "token", false), ("Bearer s3cret2", "ops", false), ("Bearer look", "dash", true)]
    {
        let found = access.identify(&headers(&[("authorization", secret)]), None, LOCAL);
        assert_eq!(found, Ok(Identity { token: Some(token), read_only }));
    }
    let both = headers(&[("authorization", "Bearer wrong"), ("x-tidegate-token", "look")]);
    assert_eq!(access.identify(&both, None, LOCAL).map(|caller| caller.token), Ok(Some("dash")));
    assert_eq!(access.identify(&headers(&[("authorization", "Bearer ops")]), None, LOCAL), Err(AccessError::Token));
}
