//! The freshness of replies, and their use after it ends.

use super::CacheStatus::{Bypass, Hit, Miss, Stale};
use super::*;

#[tokio::test(start_paused = true)]
async fn a_cached_reply_is_served_while_fresh() {
    let (cache, api) = (cache(), Api::with(&[("cache-control", "max-age=60"), ("age", "10")]));
    assert_eq!(call(&cache, &api, get("/movie/603")).await.unwrap().by, Miss);
    advance(49).await;
    let got = call(&cache, &api, get("/movie/603")).await.unwrap();
    assert_eq!((got.by, got.body.as_str(), got.header("age")), (Hit, "reply 1", Some("59")));
    advance(1).await;
    let got = call(&cache, &api, get("/movie/603")).await.unwrap();
    assert_eq!((got.by, got.body.as_str()), (Miss, "reply 2"));
    assert_eq!(call(&cache, &api, get("/movie/604")).await.unwrap().by, Miss);
    assert_eq!(api.calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_ttl_overrides_all_but_no_store_vary() {
    for headers in [
        &[][..],
        &[("cache-control", "no-cache, max-age=0, must-revalidate"), ("pragma", "no-cache")],
        &[("expires", "0"), ("age", "86400"), ("set-cookie", "session=1")],
    ] {
        let (cache, api) = (cache(), Api::with(headers).ruled(|rules| rules.ttl = Some(Duration::from_millis(1500))));
        let api = api.ruled(|rules| rules.shared = true);
        call(&cache, &api, get("/")).await.unwrap();
        tokio::time::advance(Duration::from_millis(1999)).await;
        assert_eq!(call(&cache, &api, get("/")).await.unwrap().by, Hit, "{headers:?}");
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(call(&cache, &api, get("/")).await.unwrap().by, Miss, "{headers:?}");
    }
    for headers in [&[("cache-control", "max-age=60, no-store")], &[("vary", "*")]] {
        let (cache, api) = (cache(), Api::with(headers).ruled(|rules| rules.ttl = Some(Duration::MAX)));
        for _ in 0..2 {
            assert_eq!(call(&cache, &api, get("/")).await.unwrap().by, Miss, "{headers:?}");
        }
        assert_eq!(cache.size_bytes(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn an_unlimited_ttl_applies_to_successes_only() {
    let cache = cache();
    let api = Api::new(|number, request| {
        let status = if request.uri.path() == "/gone" { 404 } else { 200 };
        Ok(reply(status, &[], format!("reply {number}")))
    });
    let api = api.ruled(|rules| rules.ttl = Some(Duration::MAX));
    call_all(&cache, &api, vec![get("/there"), get("/gone")]).await;
    advance(50 * 365 * 86_400).await;
    let again = call_all(&cache, &api, vec![get("/there"), get("/gone")]).await;
    assert_eq!(again, [(Hit, "reply 1".to_owned()), (Miss, "reply 3".to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn a_304_makes_a_stale_reply_fresh() {
    let cache = cache();
    let api = Api::new(|number, request| {
        let headers =
            [("cache-control", "max-age=60"), ("etag", "\"v1\""), ("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT")];
        if request.headers.contains_key(header::IF_NONE_MATCH) {
            let mut reply = reply(304, &headers[..2], "");
            reply.headers_mut().insert("x-seen", HeaderValue::from(number));
            reply.extensions_mut().insert(number);
            return Ok(reply);
        }
        let mut reply = reply(200, &headers, format!("reply {number}"));
        for link in ["<a>", "<b>"] {
            reply.headers_mut().append(header::LINK, HeaderValue::from_static(link));
        }
        Ok(reply)
    });
    call(&cache, &api, get("/")).await.unwrap();
    advance(60).await;
    let got = call(&cache, &api, get("/")).await.unwrap();
    assert_eq!((got.status, got.by, got.body.as_str()), (200, Hit, "reply 1"));
    assert_eq!((got.header("age"), got.header("x-seen")), (Some("0"), Some("2")));
    assert_eq!(got.headers.get_all(header::LINK).iter().count(), 2, "a header with several values keeps them all");
    assert_eq!(api.saw("if-none-match").as_deref(), Some("\"v1\""));
    assert_eq!(api.saw("if-modified-since").as_deref(), Some("Thu, 01 Jan 2026 00:00:00 GMT"));
    advance(59).await;
    assert_eq!(call(&cache, &api, get("/")).await.unwrap().by, Hit);
    assert_eq!(api.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_contradicting_304_evicts_the_cached_reply() {
    for (header, value, calls_then) in [("etag", "\"v2\"", 3), ("cache-control", "no-store", 3), ("x-else", "1", 2)] {
        let cache = cache();
        let api = Api::new(move |number, request| {
            if request.headers.contains_key(header::IF_NONE_MATCH) {
                return Ok(reply(304, &[(header, value)], ""));
            }
            Ok(reply(200, &[("cache-control", "max-age=60"), ("etag", "W/\"v1\"")], format!("reply {number}")))
        });
        call(&cache, &api, get("/")).await.unwrap();
        advance(60).await;
        assert_eq!(call(&cache, &api, get("/")).await.unwrap().body, "reply 1", "{header}");
        call(&cache, &api, get("/")).await.unwrap();
        assert_eq!(api.calls(), calls_then, "{header}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_changed_reply_replaces_the_stale_one() {
    let (cache, api) = (cache(), Api::with(&[("cache-control", "max-age=60"), ("etag", "\"v\"")]));
    call(&cache, &api, get("/")).await.unwrap();
    advance(60).await;
    let replies = call_all(&cache, &api, vec![get("/"), get("/")]).await;
    assert_eq!(replies, [(Miss, "reply 2".to_owned()), (Hit, "reply 2".to_owned())]);
}

/// A provider that answers once and is down afterwards.
fn falling(headers: &'static [(&'static str, &'static str)], then: fn() -> Reply) -> Api {
    let api = Api::new(move |number, _| if number == 1 { Ok(reply(200, headers, "reply 1")) } else { then() });
    api.ruled(|rules| rules.stale = Duration::from_secs(100))
}

#[tokio::test(start_paused = true)]
async fn stale_replies_are_served_during_an_outage() {
    let looks_well = || {
        let mut reply = reply(200, &[("cache-control", "max-age=600")], "limit reached");
        reply.extensions_mut().insert(crate::CallErrorKind::Final);
        Ok(reply)
    };
    let downs: [fn() -> Reply; 4] =
        [|| Err(Failed::Outage), || Ok(reply(503, &[], "down")), || Ok(reply(429, &[], "later")), looks_well];
    for down in downs {
        let (cache, api) = (cache(), falling(&[("cache-control", "max-age=60")], down));
        call(&cache, &api, get("/")).await.unwrap();
        advance(159).await;
        let got = call(&cache, &api, get("/")).await.unwrap();
        assert_eq!((got.status, got.by, got.body.as_str(), got.header("age")), (200, Stale, "reply 1", Some("159")));
        let particular = call(&cache, &api, request("GET", "/", &[("cache-control", "no-cache")])).await;
        assert!(particular.is_err() || particular.unwrap().by == Miss, "who wants none from the cache gets none");
        advance(1).await;
        let late = call(&cache, &api, get("/")).await;
        assert!(late.is_err() || late.unwrap().by == Miss, "it is too old");
        assert!(is_at_rest(&cache));
    }
}

#[tokio::test(start_paused = true)]
async fn forbidden_stale_replies_are_never_served() {
    let down: fn() -> Reply = || Err(Failed::Outage);
    for headers in [
        &[("cache-control", "max-age=60, must-revalidate")][..],
        &[("cache-control", "no-cache"), ("etag", "\"v\"")],
        &[("cache-control", "no-store")],
    ] {
        for ttl in [None, Some(Duration::from_secs(60))] {
            let (cache, api) = (cache(), falling(headers, down).ruled(|rules| rules.ttl = ttl));
            call(&cache, &api, get("/")).await.unwrap();
            advance(61).await;
            assert_eq!(call(&cache, &api, get("/")).await.unwrap_err(), Failed::Outage, "{headers:?} {ttl:?}");
        }
    }
    let (cache, api) = (cache(), falling(&[("cache-control", "max-age=60")], || Err(Failed::Otherwise)));
    call(&cache, &api, get("/")).await.unwrap();
    advance(61).await;
    assert_eq!(call(&cache, &api, get("/")).await.unwrap_err(), Failed::Otherwise);
    let never = falling(&[("cache-control", "max-age=60")], down).ruled(|rules| rules.stale = Duration::ZERO);
    call(&cache, &never, get("/never")).await.unwrap();
    advance(60).await;
    assert_eq!(call(&cache, &never, get("/never")).await.unwrap_err(), Failed::Outage);
}

#[tokio::test(start_paused = true)]
async fn request_cache_directives_are_obeyed() {
    let (cache, api) = (cache(), Api::with(&[("cache-control", "max-age=60"), ("etag", "\"v\"")]));
    let asks = |directive| request("GET", "/", &[("cache-control", directive)]);
    let got = call(&cache, &api, asks("only-if-cached")).await.unwrap();
    assert_eq!((got.status, api.calls()), (504, 0));
    call(&cache, &api, get("/")).await.unwrap();
    advance(30).await;
    assert_eq!(call(&cache, &api, asks("only-if-cached")).await.unwrap().by, Hit);
    assert_eq!(call(&cache, &api, asks("max-age=30")).await.unwrap().by, Hit);
    assert_eq!(call(&cache, &api, asks("no-store")).await.unwrap().by, Bypass);
    assert_eq!(api.calls(), 2);
    assert_eq!(call(&cache, &api, asks("no-cache")).await.unwrap().body, "reply 3");
    assert_eq!(api.saw("if-none-match").as_deref(), Some("\"v\""));
    assert_eq!(call(&cache, &api, request("GET", "/", &[("pragma", "no-cache")])).await.unwrap().body, "reply 4");
    advance(30).await;
    assert_eq!(call(&cache, &api, asks("max-age=29")).await.unwrap().body, "reply 5");
    advance(90).await;
    assert_eq!(call(&cache, &api, asks("max-stale=60")).await.unwrap().by, Hit);
    assert_eq!(call(&cache, &api, asks("max-stale=30")).await.unwrap().by, Miss);
    advance(61).await;
    assert_eq!(call(&cache, &api, asks("only-if-cached")).await.unwrap().status, 504);
}

#[tokio::test(start_paused = true)]
async fn matching_conditional_requests_are_answered_with_304() {
    let cache = cache();
    let api = Api::new(|_, request| {
        let headers = [("cache-control", "max-age=60"), ("etag", "W/\"v1\""), ("x-else", "1")];
        let known = request.headers.contains_key(header::IF_NONE_MATCH);
        Ok(if known { reply(304, &headers, "") } else { reply(200, &headers, "reply") })
    });
    let asks = |tag| request("GET", "/", &[("if-none-match", tag)]);
    let got = call(&cache, &api, asks("\"v1\"")).await.unwrap();
    assert_eq!((got.status, got.by), (304, Miss), "the provider judges where nothing is kept");
    call(&cache, &api, get("/")).await.unwrap();
    let got = call(&cache, &api, asks("\"v0\", \"v1\"")).await.unwrap();
    assert_eq!((got.status, got.by, got.body.as_str(), got.header("x-else")), (304, Hit, "", None));
    assert_eq!((got.header("etag"), got.header("age")), (Some("W/\"v1\""), Some("0")));
    let got = call(&cache, &api, asks("\"v2\"")).await.unwrap();
    assert_eq!((got.status, got.by, got.body.as_str()), (200, Hit, "reply"));
    assert_eq!(api.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn malformed_caching_headers_never_panic() {
    for (name, value) in [
        ("age", "18446744073709551615"),
        ("age", "-1"),
        ("cache-control", "max-age=99999999999999999999999"),
        ("cache-control", "max-age=18446744073709551615, max-age=1"),
        ("cache-control", ",=,\"no-store"),
        ("expires", "Mon, 99 Foo 99999 99:99:99 GMT"),
        ("date", "Thu, 01 Jan 1900 00:00:00 GMT"),
        ("last-modified", "Fri, 31 Dec 9999 23:59:59 GMT"),
        ("vary", "a,,b c"),
        ("etag", ""),
    ] {
        let cache = cache();
        let api = Api::new(move |_, _| Ok(reply(200, &[("x-even", "so"), ("etag", "\"v\""), (name, value)], "reply")));
        for directive in ["max-age=0", "max-stale", "min-fresh=18446744073709551615", "max-stale=18446744073709551615"]
        {
            for _ in 0..2 {
                let got = call(&cache, &api, request("GET", "/", &[("cache-control", directive)])).await.unwrap();
                assert_eq!(got.body, "reply", "{name}: {value}");
                advance(1_000_000).await;
            }
        }
    }
}
