//! Cached replies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate::Span;

use crate::common::{Answer, Api, BEARER, FREE, ONCE, closing, get, provider, request, running, standing};
use crate::wire::{body, header, json, status};

fn told(answer: &str) -> Option<&str> {
    header(answer, "tidegate-cache")
}

#[tokio::test]
async fn a_second_get_is_a_cache_hit() {
    let api = Api::start(|number, _| Answer::new(200, format!("reply {number}"))).await;
    let gateway = standing(&api.policy(&format!("{FREE}{BEARER}cache = {{ ttl = \"1h\" }}\n")));
    let first = gateway.ask(get("/api/x")).await;
    assert_eq!((body(&first), told(&first)), ("reply 0", Some("miss")));
    assert_eq!(header(&first, "tidegate-credential"), Some("0"));
    let second = gateway.ask(get("/api/x")).await;
    assert_eq!((body(&second), told(&second)), ("reply 0", Some("hit")));
    assert_eq!((header(&second, "tidegate-attempts"), header(&second, "tidegate-credential")), (None, None));
    assert_eq!(api.count(), 1);
    let other = gateway.ask(get("/api/x?page=2")).await;
    assert_eq!((body(&other), told(&other)), ("reply 1", Some("miss")));
    let post = gateway.ask(request("POST", "/api/x", "", "x")).await;
    assert_eq!((body(&post), told(&post)), ("reply 2", None));
    assert_eq!(told(&gateway.ask(get("/api/x")).await), Some("miss"), "what was changed is asked for again");
    gateway.clock.advance(Span::from_secs(3601));
    assert_eq!(told(&gateway.ask(get("/api/x")).await), Some("miss"));
}

#[tokio::test]
async fn cached_replies_are_separate_per_account() {
    let api = Api::start(|_, arrived| Answer::new(200, arrived.header("authorization").unwrap_or_default())).await;
    let token = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&token, "account-a").unwrap();
    let credential = format!("auth = \"bearer\"\ncredentials = \"file:{}\"\n", token.path().display());
    let gateway = standing(&api.policy(&format!("{FREE}{credential}cache = {{ ttl = \"1h\" }}\n")));
    for from in ["miss", "hit"] {
        let answer = gateway.ask(get("/api/me")).await;
        assert_eq!((body(&answer), told(&answer)), ("Bearer account-a", Some(from)));
    }
    std::fs::write(&token, "the account b").unwrap();
    gateway.clock.advance(Span::from_secs(1));
    for from in ["miss", "hit"] {
        let answer = gateway.ask(get("/api/me")).await;
        assert_eq!((body(&answer), told(&answer)), ("Bearer the account b", Some(from)));
    }
}

#[tokio::test]
async fn a_replaced_parameter_separates_no_replies() {
    let api = Api::start(|number, _| Answer::new(200, format!("reply {number}"))).await;
    let auth = "auth = \"query:api_key\"\ncredentials = \"env:A\"\ncache = { ttl = \"1h\" }\n";
    let gateway = standing(&api.policy(&format!("{FREE}{auth}")));
    for (path, expected) in [
        ("/api/x", ("reply 0", Some("miss"))),
        ("/api/x?api%5Fkey=mine", ("reply 0", Some("hit"))),
        ("/api/x?api_key=yours&page=2", ("reply 1", Some("miss"))),
        ("/api/x?page=2", ("reply 1", Some("hit"))),
    ] {
        let answer = gateway.ask(get(path)).await;
        assert_eq!((body(&answer), told(&answer)), expected, "{path}");
    }
}

#[tokio::test]
async fn concurrent_calls_are_coalesced() {
    let api = Api::start(|_, _| Answer::new(200, "reply").taking(300)).await;
    let gateway = running(&api.policy(&format!("{FREE}cache = \"on\"\n")));
    let answers = gateway.ask_at_once(20, &get("/api/x")).await;
    assert!(answers.iter().all(|answer| (status(answer), body(answer)) == (200, "reply")));
    let count = |status| answers.iter().filter(|answer| told(answer) == Some(status)).count();
    assert_eq!((count("miss"), count("coalesced"), api.count()), (1, 19, 1));
    for answer in &answers {
        let attempts = if told(answer) == Some("miss") { "1" } else { "0" };
        assert_eq!(
            (header(answer, "tidegate-attempts"), header(answer, "tidegate-waited").is_some()),
            (Some(attempts), true)
        );
    }
}

#[tokio::test]
async fn a_stale_reply_is_served_during_outages() {
    let unwell = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&unwell);
    let api = Api::start(move |_, _| match seen.load(Ordering::Relaxed) {
        true => Answer::new(503, "unwell"),
        false => Answer::new(200, "reply"),
    })
    .await;
    let gateway = standing(&api.policy(&format!("{ONCE}cache = {{ ttl = \"1m\", stale = \"1d\" }}\n")));
    assert_eq!(told(&gateway.ask(get("/api/kept")).await), Some("miss"));
    unwell.store(true, Ordering::Relaxed);
    gateway.clock.advance(Span::from_secs(120));
    // One bad path alone would open no breaker.
    for path in ["/api/another", "/api/other", "/api/other", "/api/other", "/api/other"] {
        assert_eq!(status(&gateway.ask(get(path)).await), 503);
    }
    let before = api.count();
    let kept = gateway.ask(get("/api/kept")).await;
    assert_eq!((status(&kept), body(&kept), told(&kept)), (200, "reply", Some("stale")));
    let other = gateway.ask(get("/api/other")).await;
    assert_eq!((status(&other), &json(&other)["error"]), (503, &"ProviderUnavailableError".into()));
    assert_eq!(api.count(), before);
}

#[tokio::test]
async fn replies_that_break_off_are_errors() {
    for framing in ["transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", "content-length: 100\r\n\r\nhello"] {
        let reply = format!("HTTP/1.1 200 OK\r\ncache-control: max-age=60\r\n{framing}");
        let api = closing(String::leak(reply)).await;
        let gateway = running(&provider(api, &format!("{FREE}cache = \"on\"\n")));
        for answer in gateway.ask_at_once(3, &get("/api/x")).await {
            assert_eq!((status(&answer), header(&answer, "tidegate-attempts")), (502, Some("1")), "{framing}");
            assert_eq!(json(&answer)["error"], "RetriesExhaustedError");
        }
    }
}
