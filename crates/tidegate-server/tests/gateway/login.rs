//! Credentials that log in to get a token.

use tidegate::Span;

use crate::common::{Answer, Api, FREE, get, standing};
use crate::wire::{body, header, status};

const LOGIN: &str = "auth = \"bearer\"\ncredentials = \"env:A\"\nlogin = { path = \"/login\", \
    body = '{\"apikey\":\"{credential}\"}', lifetime = \"24h\", refresh_before = \"2h\" }\n";

/// A provider that gives `token-n` at the n-th login. It accepts tokens from number `good` on.
async fn api(good: usize) -> Api {
    let logins = std::sync::atomic::AtomicUsize::new(0);
    Api::start(move |_, arrived| {
        if arrived.target == "/v1/login" {
            assert_eq!(
                (arrived.method.as_str(), &arrived.body[..]),
                ("POST", &b"{\"apikey\":\"pl4nted-s3cr3t-a\"}"[..])
            );
            let number = logins.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
            return Answer::new(200, format!("{{\"token\":\"token-{number}\"}}")).taking(100);
        }
        let number =
            arrived.header("authorization").and_then(|value| value.strip_prefix("Bearer token-")?.parse().ok());
        if number.is_some_and(|number: usize| number >= good) {
            Answer::new(200, "hello")
        } else {
            Answer::new(401, "no")
        }
    })
    .await
}

fn logins(api: &Api) -> usize {
    api.arrived().iter().filter(|arrived| arrived.target == "/v1/login").count()
}

#[tokio::test]
async fn concurrent_calls_share_one_login() {
    let api = api(1).await;
    let gateway = standing(&api.policy(&format!("{FREE}{LOGIN}")));
    for (hours, expected) in [(0, 1), (21, 1), (2, 2), (22, 3), (25, 4)] {
        // At first there is no token, then a valid one, then twice one that is about to expire, then an expired one.
        gateway.clock.advance(Span::from_secs(hours * 3600));
        for answer in gateway.ask_at_once(20, &get("/api/x")).await {
            assert_eq!((status(&answer), body(&answer)), (200, "hello"));
            assert_eq!(header(&answer, "tidegate-attempts"), Some("1"));
        }
        assert_eq!(logins(&api), expected, "{hours} hours later");
    }
    assert_eq!(api.count(), 104);
}

#[tokio::test]
async fn a_rejected_token_is_renewed_once() {
    let good = api(2).await;
    let gateway = standing(&good.policy(&format!("{FREE}{LOGIN}")));
    let answer = gateway.ask(get("/api/x")).await;
    assert_eq!((status(&answer), body(&answer)), (200, "hello"));
    assert_eq!((header(&answer, "tidegate-attempts"), logins(&good)), (Some("2"), 2));
    assert_eq!(good.count(), 4, "login, 401, login, 200");
    let never = api(usize::MAX).await;
    let gateway = standing(&never.policy(&format!("{FREE}{LOGIN}")));
    let answer = gateway.ask(get("/api/x")).await;
    assert_eq!((status(&answer), body(&answer)), (401, "no"));
    assert_eq!((header(&answer, "tidegate-attempts"), logins(&never)), (Some("2"), 2));
}

#[tokio::test]
async fn a_failed_login_hides_the_login_reply() {
    let api = Api::start(|_, _| Answer::new(403, "the key pl4nted-s3cr3t-a is not known")).await;
    let gateway = standing(&api.policy(&format!("{FREE}{LOGIN}")));
    let answers = gateway.ask_at_once(5, &get("/api/x")).await;
    for answer in answers {
        assert_eq!(status(&answer), 502, "{answer}");
        assert!(!answer.contains("pl4nted"), "{answer}");
        assert!(body(&answer).contains("the login was answered 403"), "{answer}");
    }
    assert_eq!(api.count(), 1, "an account isn't locked out by trying again and again");
}

#[tokio::test]
async fn the_renewed_credential_is_tried_first() {
    // Each first token is rejected, so that the call can only succeed with the credential that has logged in again.
    let logins = std::sync::atomic::AtomicUsize::new(0);
    let api = Api::start(move |_, arrived| {
        if arrived.target == "/v1/login" {
            let key = String::from_utf8_lossy(&arrived.body).contains("-a\"");
            let number = logins.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
            return Answer::new(200, format!("{{\"token\":\"{}-{number}\"}}", if key { "a" } else { "b" }));
        }
        match arrived.header("authorization") {
            Some("Bearer a-1") => Answer::new(401, "no"),
            Some(token) => Answer::new(200, token),
            None => Answer::new(400, "no token"),
        }
    })
    .await;
    let two = LOGIN.replace("\"env:A\"", "[\"env:A\", \"env:B\"]");
    let gateway = standing(&api.policy(&format!("{FREE}{two}")));
    let answer = gateway.ask(get("/api/x")).await;
    assert_eq!((status(&answer), body(&answer)), (200, "Bearer a-2"), "{answer}");
}
