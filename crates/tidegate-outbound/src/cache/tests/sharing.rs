//! The sharing of replies between callers.

use super::super::cached_reply::MAX_VARIANTS;
use super::CacheStatus::{Bypass, Hit, Miss};
use super::*;

fn by(token: &str) -> Request<Full<Bytes>> {
    request("GET", "/me", &[("authorization", token)])
}

#[tokio::test(start_paused = true)]
async fn credentials_share_replies_only_if_allowed() {
    let latency = Duration::from_millis(10);
    let mut api = Api::with(&[("cache-control", "max-age=60")]).slow(latency);
    api.credentials = 2;
    let cache = cache();
    let (one, other) = tokio::join!(call(&cache, &api, get("/me")), call(&cache, &api, get("/me")));
    assert_eq!((one.unwrap().by, other.unwrap().by), (Bypass, Bypass), "neither waits for the other");
    assert_eq!(call(&cache, &api, get("/me")).await.unwrap().body, "reply 3");
    assert_eq!(cache.size_bytes(), 0);
    let only = request("GET", "/me", &[("cache-control", "only-if-cached")]);
    assert_eq!(call(&cache, &api, only).await.unwrap().status, 504);

    let shared = api.ruled(|rules| rules.shared = true);
    call(&cache, &shared, get("/me")).await.unwrap();
    assert_eq!(call(&cache, &shared, get("/me")).await.unwrap().by, Hit);
}

#[tokio::test(start_paused = true)]
async fn private_replies_are_cached_for_one_credential_only() {
    for private in ["private, max-age=60", "max-age=60, Private=\"x-account\""] {
        for ttl in [None, Some(Duration::from_secs(3_600))] {
            for (shared, told_again) in [(false, Hit), (true, Miss)] {
                let api =
                    Api::new(move |number, _| Ok(reply(200, &[("cache-control", private)], format!("reply {number}"))));
                let api = api.slow(Duration::from_millis(10)).ruled(|rules| (rules.shared, rules.ttl) = (shared, ttl));
                let cache = cache();
                let (_, joined) = tokio::join!(call(&cache, &api, get("/")), call(&cache, &api, get("/")));
                assert_eq!(joined.unwrap().by == Miss, shared, "nor is it waited for: {private} {ttl:?}");
                assert_eq!(call(&cache, &api, get("/")).await.unwrap().by, told_again, "{private} {ttl:?} {shared}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn callers_with_own_credentials_never_share_replies() {
    for shared in [false, true] {
        for name in ["authorization", "cookie", "x-api-key", "private-token"] {
            let (cache, api) = (cache(), Api::with(&[("cache-control", "public, max-age=60")]));
            let api = api.ruled(|rules| rules.shared = shared).slow(Duration::from_millis(10));
            let by = |token: &str| request("GET", "/me", &[(name, token)]);
            let (one, other) = tokio::join!(call(&cache, &api, by("alice")), call(&cache, &api, by("bob")));
            let (one, other) = (one.unwrap(), other.unwrap());
            assert_eq!((one.by, other.by), (Miss, Miss), "{name}");
            for (token, body) in [("alice", &one.body), ("bob", &other.body)] {
                let got = call(&cache, &api, by(token)).await.unwrap();
                assert_eq!((got.by, &got.body), (Hit, body), "{name}");
            }
            assert_eq!(call(&cache, &api, get("/me")).await.unwrap().by, Miss, "{name}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn headers_replaced_by_the_provider_never_split_entries() {
    let mut api = Api::with(&[("cache-control", "max-age=60")]);
    api.injects = Some(header::AUTHORIZATION);
    let cache = cache();
    call(&cache, &api, by("Bearer unused")).await.unwrap();
    let unlike = [("user-agent", "1"), ("idempotency-key", "1"), ("x-request-id", "1"), ("accept", "*/*")];
    assert_eq!(call(&cache, &api, request("GET", "/me", &unlike)).await.unwrap().by, Hit);
    let mut named = [("x-one-token", "1"), ("x-other-token", "2")];
    assert_eq!(call(&cache, &api, request("GET", "/me", &named)).await.unwrap().by, Miss);
    named.reverse();
    assert_eq!(call(&cache, &api, request("GET", "/me", &named)).await.unwrap().by, Hit);
    let swapped = [("x-one-token", "2"), ("x-other-token", "1")];
    assert_eq!(call(&cache, &api, request("GET", "/me", &swapped)).await.unwrap().by, Miss);
    assert_eq!(call(&cache, &api, by("Bearer other")).await.unwrap().by, Hit);
}

#[tokio::test(start_paused = true)]
async fn providers_urls_and_methods_have_separate_entries() {
    let (cache, api) = (cache(), Api::with(&[("cache-control", "max-age=60")]));
    let mut other = Api::with(&[("cache-control", "max-age=60")]);
    other.name = "tvdb";
    let paths = ["/a?key=1", "/a?key=2", "/a", "/b", "http://one.test/a", "http://two.test/a", "https://one.test/a"];
    for path in paths {
        assert_eq!(call(&cache, &api, get(path)).await.unwrap().by, Miss, "{path}");
        assert_eq!(call(&cache, &api, request("HEAD", path, &[])).await.unwrap().by, Miss, "{path}");
        assert_eq!(call(&cache, &other, get(path)).await.unwrap().by, Miss, "{path}");
    }
    for path in paths {
        assert_eq!(call(&cache, &api, get(path)).await.unwrap().by, Hit, "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn only_plain_get_and_head_are_cached() {
    let (cache, api) = (cache(), Api::with(&[("cache-control", "max-age=60")]));
    for method in ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY"] {
        for _ in 0..2 {
            assert_eq!(call(&cache, &api, request(method, "/", &[])).await.unwrap().by, Bypass, "{method}");
        }
    }
    for name in ["range", "if-range", "if-match", "if-unmodified-since", "upgrade"] {
        let got = call(&cache, &api, request("GET", "/", &[(name, "x")])).await.unwrap();
        assert_eq!((got.by, api.saw(name).as_deref()), (Bypass, Some("x")));
    }
    let body = get("/").map(|_| Full::from("{}"));
    assert_eq!(call(&cache, &api, body).await.unwrap().by, Bypass);
    assert_eq!(cache.size_bytes(), 0);
    let mut off = Api::with(&[("cache-control", "max-age=60")]);
    off.rules = None;
    for _ in 0..2 {
        assert_eq!(call(&cache, &off, get("/")).await.unwrap().by, Bypass);
    }
}

#[tokio::test(start_paused = true)]
async fn only_successful_writes_invalidate_the_cache() {
    let cache = cache();
    let api = Api::new(|number, request| {
        let status = if request.headers.contains_key("x-fail") { 422 } else { 200 };
        Ok(reply(status, &[("cache-control", "max-age=60")], format!("reply {number}")))
    });
    call(&cache, &api, get("/")).await.unwrap();
    call(&cache, &api, request("POST", "/", &[("x-fail", "1")])).await.unwrap();
    assert_eq!(call(&cache, &api, get("/")).await.unwrap().by, Hit);
    call(&cache, &api, request("POST", "/", &[])).await.unwrap();
    assert_eq!(call(&cache, &api, get("/")).await.unwrap().body, "reply 4");
}

#[tokio::test(start_paused = true)]
async fn each_vary_variant_is_cached_once() {
    let cache = cache();
    let api = Api::new(|number, request| {
        let program = request.headers.get("user-agent").map_or("none", |value| value.to_str().unwrap());
        let headers = [("cache-control", "max-age=60"), ("vary", "User-Agent"), ("vary", "accept, user-agent")];
        Ok(reply(200, &headers, format!("{program} {number}")))
    });
    let api = api.slow(Duration::from_millis(10));
    let by = |program| request("GET", "/", &[("user-agent", program)]);
    call_all(&cache, &api, vec![by("curl"), by("wget"), get("/")]).await;
    let again = call_all(&cache, &api, vec![by("curl"), by("wget"), get("/")]).await;
    assert_eq!(again, [(Hit, "curl 1".to_owned()), (Hit, "wget 2".to_owned()), (Hit, "none 3".to_owned())]);

    let calls = (0..40).map(|index| {
        let program = ["curl", "wget"][index % 2];
        let (cache, api) = (&cache, &api);
        async move {
            let got = call(cache, api, request("GET", "/new", &[("user-agent", program)])).await.unwrap();
            assert!(got.body.starts_with(program), "{} for {program}", got.body);
        }
    });
    for_each_at_once(calls).await;
    assert_eq!(api.calls(), 5, "one for each program");
    assert!(is_at_rest(&cache));
}

/// A provider that doesn't expect caching: its replies don't say what they depend on.
fn unaware() -> Api {
    Api::with(&[]).ruled(|rules| rules.ttl = Some(Duration::MAX)).slow(Duration::from_millis(10))
}

#[tokio::test(start_paused = true)]
async fn requests_with_different_headers_never_share_replies() {
    for name in ["accept", "accept-language", "accept-encoding", "stripe-account", "x-tenant", "x-new-in-2040"] {
        let (cache, api) = (cache(), unaware());
        let wants = |what: &str| request("GET", "/", &[(name, what)]);
        let (one, other) = tokio::join!(call(&cache, &api, wants("one")), call(&cache, &api, wants("other")));
        let (one, other) = (one.unwrap(), other.unwrap());
        assert_eq!((one.by, other.by), (Miss, Miss), "{name}");
        let again = call_all(&cache, &api, vec![wants("one"), wants("other"), get("/")]).await;
        assert_eq!(again, [(Hit, one.body), (Hit, other.body), (Miss, "reply 3".to_owned())], "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn tracing_headers_do_not_split_cache_entries() {
    let (cache, api) = (cache(), unaware());
    call(&cache, &api, get("/")).await.unwrap();
    for name in ["traceparent", "x-b3-traceid", "date", "priority", "x-stainless-lang", "tidegate-timeout"] {
        assert_eq!(call(&cache, &api, request("GET", "/", &[(name, "1")])).await.unwrap().by, Hit, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_invalidates_its_callers_every_representation() {
    let (cache, api) = (cache(), unaware());
    let wants = |kind: &'static str, tenant| request("GET", "/", &[("accept", kind), ("x-tenant", tenant)]);
    let all = || vec![wants("xml", "1"), wants("json", "1"), wants("xml", "2")];
    call_all(&cache, &api, all()).await;
    let lines = [("content-type", "application/json"), ("accept", "text/plain"), ("x-tenant", "1")];
    call(&cache, &api, request("PUT", "/", &lines)).await.unwrap();
    let again: Vec<_> = call_all(&cache, &api, all()).await.into_iter().map(|(by, _)| by).collect();
    assert_eq!(again, [Miss, Miss, Hit]);
}

#[tokio::test(start_paused = true)]
async fn the_variants_of_a_url_are_bounded() {
    let (cache, api) = (cache(), unaware());
    let wants = |number: usize| request("GET", "/", &[("accept", &format!("type/{number}"))]);
    call_all(&cache, &api, (0..=MAX_VARIANTS).map(wants).collect()).await;
    let kept = call_all(&cache, &api, (1..=MAX_VARIANTS).map(wants).collect()).await;
    assert!(kept.iter().all(|(by, _)| *by == Hit));
    assert_eq!(call(&cache, &api, wants(0)).await.unwrap().by, Miss, "the oldest went");
}

#[tokio::test(start_paused = true)]
async fn a_replaced_credentials_replies_are_not_reused() {
    for (shared, told_again) in [(false, Miss), (true, Hit)] {
        let (cache, api) = (cache(), unaware().ruled(|rules| rules.shared = shared));
        let becomes = |secret| *api.secret.lock() = Some(secret);
        becomes("old");
        call(&cache, &api, get("/")).await.unwrap();
        assert_eq!(call(&cache, &api, get("/")).await.unwrap().by, Hit);
        becomes("new");
        assert_eq!(call(&cache, &api, get("/")).await.unwrap().by, told_again, "{shared}");
        assert_eq!(call(&cache, &api, get("/")).await.unwrap().by, Hit);
    }
}

#[tokio::test(start_paused = true)]
async fn replies_during_credential_replacement_are_not_cached() {
    let (cache, api) = (cache(), unaware());
    let becomes = |secret| *api.secret.lock() = Some(secret);
    becomes("old");
    let changes = async {
        sleep(Duration::from_millis(5)).await;
        becomes("new");
    };
    let (got, ()) = tokio::join!(call(&cache, &api, get("/")), changes);
    assert_eq!(got.unwrap().by, Miss);
    for secret in ["old", "new"] {
        becomes(secret);
        assert_eq!(call(&cache, &api, get("/")).await.unwrap().by, Miss, "{secret}");
    }
}

#[tokio::test(start_paused = true)]
async fn set_cookie_reaches_only_its_own_caller() {
    let api = Api::with(&[
        ("cache-control", "public, max-age=60"),
        ("set-cookie", "session=s3cret"),
        ("connection", "x-hop"),
        ("x-hop", "1"),
    ]);
    let (cache, api) = (cache(), api.slow(Duration::from_millis(10)));
    let (first, joined) = tokio::join!(call(&cache, &api, get("/")), call(&cache, &api, get("/")));
    assert_eq!(first.unwrap().header("set-cookie"), Some("session=s3cret"));
    for got in [joined.unwrap(), call(&cache, &api, get("/")).await.unwrap()] {
        assert_ne!(got.by, Miss);
        assert_eq!((got.header("set-cookie"), got.header("x-hop"), got.header("connection")), (None, None, None));
    }
}

#[tokio::test(start_paused = true)]
async fn debug_output_contains_no_secret() {
    let (cache, api) =
        (cache(), Api::with(&[("cache-control", "max-age=60"), ("x-token", "s3cret"), ("vary", "authorization")]));
    let asked = request("GET", "/s3cret?api_key=s3cret", &[("authorization", "Bearer s3cret"), ("cookie", "s3cret")]);
    let reply = cache.call(&api, CallOptions::default(), asked, |options, request| api.answer(options, request)).await;
    let mut printed = format!("{cache:?} {:?}", reply.unwrap().body());
    assert_eq!(cache.0.replies.iter().count(), 1);
    for (key, page) in cache.0.replies.iter() {
        printed += &format!("{key:?} {:?}", page.replies());
    }
    assert!(printed.contains("CacheKey(…)") && printed.contains("CachedReply"), "{printed}");
    assert!(!printed.contains("s3cret"), "{printed}");
}
