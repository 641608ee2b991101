//! Pauses that replies name, failures of one burst and of one path, rejected credentials, and scopes.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::common::Through;
use tidegate::outbound::{BreakerState, CallScope};

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn breaker(layer: &OutboundLayer<Memory, TokioClock>) -> BreakerState {
    layer.provider().inspect(|state, now| state.breaker.state(now))
}

/// Asks for a path, and returns the status.
async fn status_of(service: &Through, path: &str) -> u16 {
    ask(service, get(path)).await.map_or_else(|error| error.status(), |response| response.status().as_u16())
}

#[tokio::test(start_paused = true)]
async fn an_announced_pause_is_waited_out_in_order() {
    for callers in [1, 3, 10, 100] {
        let began = now();
        let api = Api::new(move |_, _| {
            if now() - began < secs(5) { answer(503, &[("retry-after", "5")], "closed") } else { status(200) }
        });
        let api = api.taking(Duration::from_millis(20));
        let layer = limited("50/s burst 100", "timeout = \"60s\"\nadaptive = \"off\"");
        let service = layer.layer(api.clone());
        let early = (0..callers).map(|_| status_of(&service, "/early"));
        let late = async {
            tokio::time::sleep(secs(3)).await;
            status_of(&service, "/late").await
        };
        let (early, late) = tokio::join!(join_all(early), late);
        assert!(early.iter().all(|status| *status == 200) && late == 200, "{early:?} {late}");
        let arrived = api.arrived();
        assert_eq!(arrived.len(), 2 * callers + 1, "each is sent twice, and the late one once");
        let after: Vec<_> = arrived[callers..].iter().map(|arrived| (arrived.at - began).as_millis()).collect();
        assert!(after[0] >= 5_000 && after[0] <= 5_200, "{callers}: {after:?}");
        assert!(arrived.last().unwrap().uri.ends_with("/late"), "a later call waits its turn");
        // At most the provider's rate, and not much less.
        let spread = after.last().unwrap() - after[0];
        assert!(spread + 20 >= callers as u128 * 10 && spread <= callers as u128 * 40 + 100, "{callers}: {spread} ms");
        assert_eq!(breaker(&layer), BreakerState::Closed);
        assert!(layer.provider().inspect(|state, _| state.breaker.failures()) <= 1, "one event");
    }
}

#[tokio::test(start_paused = true)]
async fn a_provider_that_stays_closed_opens_the_breaker() {
    let api = Api::new(|_, _| answer(503, &[("retry-after", "1")], "closed"));
    let layer = layer("timeout = \"60s\"\nretry = { max_attempts = 2 }");
    let service = layer.layer(api.clone());
    let mut calls = 0;
    while breaker(&layer) == BreakerState::Closed {
        join_all((0..10).map(|_| status_of(&service, "/x"))).await;
        calls += 1;
        assert!(calls <= 5, "{}", api.count());
    }
    let before = api.count();
    assert_eq!(status_of(&service, "/x").await, 503);
    assert_eq!(api.count(), before, "nothing is sent");
}

#[tokio::test(start_paused = true)]
async fn an_outage_isnt_repeated_for_a_post() {
    for (code, headers, requests) in [
        (503, &[("retry-after", "1")][..], 1),
        (529, &[], 1),
        (429, &[("retry-after", "1")], 2),
        (429, &[("retry-after", "1"), ("x-should-retry", "false")], 1),
    ] {
        let api = Api::new(move |number, _| if number == 0 { answer(code, headers, "no") } else { status(200) });
        let service = layer("").layer(api.clone());
        let _ = ask(&service, post("{}", None)).await;
        assert_eq!(api.count(), requests, "{code} {headers:?}");
        let api = Api::new(move |number, _| if number == 0 { answer(code, headers, "no") } else { status(200) });
        let service = layer("").layer(api.clone());
        let _ = ask(&service, post("{}", Some("key"))).await;
        assert_eq!(api.count(), if headers.len() == 2 { 1 } else { 2 }, "{code} {headers:?} with a key");
    }
}

#[tokio::test(start_paused = true)]
async fn no_reply_closes_a_provider_for_longer_than_the_longest_pause() {
    for (settings, longest) in [("", 86_400), ("max_pause = \"10m\"\n", 600)] {
        let began = now();
        let api = Api::new(
            |number, _| {
                if number == 0 { answer(429, &[("retry-after", "99999999")], "no") } else { status(200) }
            },
        );
        let service = layer(settings).layer(api.clone());
        assert_eq!(status_of(&service, "/x").await, 429);
        tokio::time::sleep(secs(longest - 20)).await;
        assert_eq!((status_of(&service, "/x").await, api.count()), (429, 1));
        tokio::time::sleep(secs(15)).await;
        assert_eq!((status_of(&service, "/x").await, api.count()), (200, 2));
        assert!(now() - began <= secs(longest + 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_success_may_ask_for_a_pause() {
    let api = Api::new(|number, _| answer(200, if number == 0 { &[("retry-after", "3")] } else { &[] }, "done"));
    let rule = "rule = [{ when = { status = 200, header = { retry-after = { present = true } } }, is = \"success\", wait = \"header retry-after\" }]";
    let service = layer(rule).layer(api.clone());
    let began = now();
    assert_eq!([status_of(&service, "/x").await, status_of(&service, "/x").await], [200, 200]);
    assert_eq!((api.count(), (now() - began).as_secs()), (2, 3));
}

/// Three of four credentials have little room, and the fourth was revoked.
#[tokio::test(start_paused = true)]
async fn a_revoked_credential_is_left_out_although_the_others_are_nearly_full() {
    let began = now();
    let api = Api::new(|_, arrived| if arrived.bearer().ends_with("-d") { status(401) } else { status(200) });
    let api = api.taking(Duration::from_millis(30));
    let layer = layer(
        "timeout = \"20s\"\nauth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\", \"env:C\", \"env:D\"]\n\
         credential_limit = \"5 per 1s\"\n",
    );
    let service = layer.layer(api.clone());
    let rejected = AtomicUsize::new(0);
    let worker = |number: usize| {
        let (service, rejected) = (&service, &rejected);
        async move {
            while now() - began < secs(20) {
                let status = status_of(service, &format!("/part{}", number % 4)).await;
                if status == 401 && now() - began > secs(2) {
                    rejected.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    };
    join_all((0..16).map(worker)).await;
    assert_eq!(rejected.load(Ordering::Relaxed), 0);
    let revoked = api.arrived().iter().filter(|arrived| arrived.bearer().ends_with("-d")).count();
    assert!(revoked <= 20, "{revoked} requests");
}

#[tokio::test(start_paused = true)]
async fn a_path_that_one_credential_may_not_use_disables_none() {
    for refusal in [401, 403] {
        let api = Api::new(move |_, arrived| {
            if arrived.uri.contains("admin") && !arrived.bearer().ends_with("-a") {
                status(refusal)
            } else {
                status(200)
            }
        });
        let layer = layer(PAIR);
        let service = layer.layer(api.clone());
        for _ in 0..50 {
            assert_eq!(status_of(&service, "/open").await, 200);
            assert_eq!(status_of(&service, "/open").await, 200);
            status_of(&service, "/admin").await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let states = layer.provider().local_report().credential_states;
        assert_eq!((states.usable, states.rejected), (2, 0), "{refusal}");
    }
}

#[tokio::test(start_paused = true)]
async fn one_bad_path_doesnt_close_the_others() {
    let api = Api::new(|_, arrived| if arrived.uri.contains("/bad") { status(500) } else { status(200) });
    let layer = layer("retry = { max_attempts = 1 }");
    let service = layer.layer(api.clone());
    assert_eq!(status_of(&service, "/good").await, 200);
    for number in 0..30 {
        assert_eq!(status_of(&service, &format!("/bad/{number}")).await, 500);
        tokio::time::sleep(secs(2)).await;
    }
    assert_eq!((status_of(&service, "/good").await, breaker(&layer)), (200, BreakerState::Closed));
    // Two that fail are no bad path.
    let api = Api::new(|_, _| status(500));
    let service = layer.layer(api.clone());
    for _ in 0..5 {
        for path in ["/bad/1", "/good"] {
            status_of(&service, path).await;
            tokio::time::sleep(secs(2)).await;
        }
    }
    assert_eq!(breaker(&layer), BreakerState::Open);
}

#[tokio::test(start_paused = true)]
async fn one_bad_path_keeps_no_breaker_open() {
    let is_outage = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let fails = Arc::clone(&is_outage);
    let api = Api::new(move |_, arrived| match arrived.uri.contains("/bad") || fails.load(Ordering::Relaxed) {
        true => status(500),
        false => status(200),
    });
    let layer = layer("retry = { max_attempts = 1 }");
    let service = layer.layer(api.clone());
    while breaker(&layer) == BreakerState::Closed {
        for path in ["/good", "/bad"] {
            status_of(&service, path).await;
            tokio::time::sleep(secs(2)).await;
        }
    }
    is_outage.store(false, Ordering::Relaxed);
    while breaker(&layer) == BreakerState::Open {
        tokio::time::sleep(secs(1)).await;
    }
    for (path, expected) in [("/good", 200), ("/bad", 500), ("/bad", 503), ("/good", 200), ("/bad", 500)] {
        assert_eq!(status_of(&service, path).await, expected, "{path}");
    }
    assert_eq!(breaker(&layer), BreakerState::Closed);
}

const RESOURCES: &str = "learn_limits = true\ntimeout = \"90s\"\n\
    rule = [{ when = { status = 403, header = { x-ratelimit-remaining = \"0\" } }, is = \"quota\", wait = \"header x-ratelimit-reset\" }]\n\
    scope = [{ path = \"/search/**\", name = [\"search\"] }, { name = [\"header x-ratelimit-resource\"] }]\n";

#[tokio::test(start_paused = true)]
async fn a_closed_scope_holds_up_no_other() {
    let began = now();
    let api = Api::new(move |_, arrived| {
        let is_closed = arrived.uri.contains("/search") && now() - began < secs(60);
        let reset = (60_u64.saturating_sub((now() - began).as_secs())).max(1).to_string();
        match is_closed {
            true => answer(
                403,
                &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", &reset), ("x-ratelimit-resource", "search")],
                "",
            ),
            false => answer(
                200,
                &[("x-ratelimit-remaining", "100"), ("x-ratelimit-reset", &reset), ("x-ratelimit-resource", "core")],
                "",
            ),
        }
    });
    let layer = layer(RESOURCES);
    let service = layer.layer(api.clone());
    let search = |number: u64| {
        let service = &service;
        async move {
            tokio::time::sleep(Duration::from_millis(number)).await;
            status_of(service, &format!("/search/code?q={number}")).await
        }
    };
    let core = async {
        tokio::time::sleep(secs(1)).await;
        for number in 0..50 {
            assert_eq!(status_of(&service, &format!("/repos/a{number}")).await, 200);
        }
        now() - began
    };
    let (searches, core_took) = tokio::join!(join_all((0..10).map(search)), core);
    assert!(core_took < secs(3), "{core_took:?}");
    assert!(searches.iter().all(|status| *status == 200), "{searches:?}");
    let arrived = api.arrived();
    let searched: Vec<&str> = arrived.iter().map(|it| it.uri.as_str()).filter(|uri| uri.contains("/search")).collect();
    assert_eq!(searched.len(), 11, "one met the end");
    let order: Vec<&str> = searched[1..].iter().map(|uri| uri.rsplit('=').next().unwrap()).collect();
    assert_eq!(order, ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"], "in the order of arrival");
    assert_eq!(layer.provider().local_report().credential_states.usable, 1, "the credential is not closed");
}

/// Replies name a bucket for each route and channel, as those of Discord do.
#[tokio::test(start_paused = true)]
async fn scopes_are_learnt_by_route() {
    let began = now();
    let closed = Arc::new(Mutex::new(None));
    let api = Api::new(move |_, arrived| {
        let is_send = arrived.uri.contains("/channels/1/messages");
        let until = *closed.lock().unwrap();
        if is_send && until.is_some_and(|until| now() < until) {
            return answer(429, &[("x-bucket", "send")], r#"{"retry_after": 1.5, "global": false}"#);
        }
        if is_send {
            *closed.lock().unwrap() = Some(now() + secs(2));
        }
        answer(200, &[("x-bucket", if is_send { "send" } else { "read" })], "")
    });
    let settings = "timeout = \"60s\"\n\
        rule = [{ when = { status = 429 }, is = \"throttled\", wait = \"json /retry_after s\" }]\n\
        scope = [{ path = \"/channels/{channel}/**\", name = [\"header x-bucket\", \"path {channel}\"] }]\n";
    let service = layer(settings).layer(api.clone());
    let send = || status_of(&service, "/channels/1/messages");
    assert_eq!(send().await, 200);
    let other = async {
        for number in 2..40 {
            assert_eq!(status_of(&service, &format!("/channels/{number}/messages")).await, 200, "another channel");
            assert_eq!(status_of(&service, "/channels/1/pins").await, 200, "another bucket");
        }
        now() - began
    };
    let (sent, others_took) = tokio::join!(send(), other);
    assert_eq!(sent, 200);
    assert!(others_took < secs(1), "{others_took:?}");
    assert!(now() - began >= Duration::from_millis(1_500));
}

#[tokio::test(start_paused = true)]
async fn spent_money_leaves_the_credential_out() {
    let api = Api::new(|_, arrived| {
        if arrived.bearer().ends_with("-b") {
            return status(200);
        }
        answer(
            429,
            &[("content-type", "application/json")],
            r#"{"error":{"type":"insufficient_quota","code":"insufficient_quota"}}"#,
        )
    });
    let layer = layer(PAIR);
    let service = layer.layer(api.clone());
    for _ in 0..20 {
        assert_eq!(status_of(&service, "/x").await, 200);
    }
    let spent = api.arrived().iter().filter(|arrived| arrived.bearer().ends_with("-a")).count();
    assert_eq!(spent, 1);
    let only = Api::new(|_, _| {
        answer(429, &[("content-type", "application/json")], r#"{"error":{"code":"insufficient_quota"}}"#)
    });
    let service = limited("10/s burst 10", BEARER).layer(only.clone());
    assert_eq!([status_of(&service, "/x").await, status_of(&service, "/x").await], [429, 429]);
    assert_eq!(only.count(), 1, "it isn't sent again");
}

/// The scope of a rule is told by the request, or learnt by the route of the reply that names it.
#[tokio::test(start_paused = true)]
async fn the_scope_of_a_rule_closes_only_its_calls() {
    let by_path = "request = { path = \"/device/{token}\" }";
    for (condition, name, same, other) in [
        ("", "\"orders\"", "/orders/2", "/items/1"),
        ("", "\"header x-part\"", "/orders/2", "/items/1"),
        (by_path, "\"path {token}\"", "/device/a", "/device/b"),
        (by_path, "\"devices\"", "/device/b", "/items/1"),
    ] {
        let api = Api::new(|number, _| {
            answer(if number == 0 { 403 } else { 200 }, &[("x-part", "one"), ("x-ratelimit-remaining", "9")], "slow")
        });
        let rule = format!(
            "timeout = \"60s\"\nlearn_limits = true\n\
             rule = [{{ when = {{ status = 403, {condition} }}, is = \"throttled\", wait = \"5s\", scope = [{name}] }}]"
        );
        let layer = layer(&rule);
        let service = layer.layer(api.clone());
        let began = now();
        let first = if by_path == condition { "/device/a" } else { "/orders/1" };
        let others = async {
            tokio::time::sleep(secs(1)).await;
            assert_eq!(status_of(&service, other).await, 200);
            let passed = (now() - began).as_secs();
            assert_eq!(layer.provider().local_report().closed_scopes, 1);
            (passed, status_of(&service, same).await, (now() - began).as_secs())
        };
        let (first, others) = tokio::join!(status_of(&service, first), others);
        assert_eq!((first, others), (200, (1, 200, 5)), "{condition} {name}");
        assert_eq!(api.count(), 4);
        let report = layer.provider().local_report();
        assert_eq!((report.credential_states.usable, report.closed_scopes), (1, 0));
    }
}

/// The calls after a pause are as far apart as the provider's own limits ask for, and not those of its scopes.
#[tokio::test(start_paused = true)]
async fn the_limit_of_a_scope_spaces_no_other_calls() {
    let api = Api::new(|number, _| answer(if number == 0 { 429 } else { 200 }, &[("retry-after", "1")], ""));
    let scope = "scope = [{ name = [\"path {part}\"], path = \"/track/{part}\" }]\ntimeout = \"15s\"";
    let layer = limited("300 per 60s", &format!("scope_limit = \"2 per 10s\"\n{scope}"));
    let service = layer.layer(api.clone());
    let statuses = join_all((0..80).map(async |number| status_of(&service, &format!("/other/{number}")).await)).await;
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
}

#[tokio::test(start_paused = true)]
async fn an_operator_opens_closed_scopes() {
    let api = Api::new(|number, _| answer(if number == 0 { 429 } else { 200 }, &[("retry-after", "3000")], ""));
    let scope = "scope = [{ name = [\"path {part}\"], path = \"/{part}/**\" }]";
    let layer = layer(scope);
    let service = layer.layer(api.clone());
    assert_eq!([status_of(&service, "/a/1").await, status_of(&service, "/a/1").await], [429, 429]);
    layer.provider().reset().await.unwrap();
    assert_eq!((status_of(&service, "/a/1").await, api.count()), (200, 2));
}

/// A limit of ours says so, also if each scope has its own count.
#[tokio::test(start_paused = true)]
async fn a_scope_that_is_full_by_an_own_limit_names_it() {
    for limit in ["scope_limit", "credential_scope_limit"] {
        let api = Api::new(|_, _| status(200));
        let scope = "scope = [{ name = [\"path {part}\"], path = \"/{part}/**\" }]\ntimeout = \"1s\"";
        let layer = layer(&format!("{limit} = \"1 per 60s\"\n{BEARER}\n{scope}"));
        let service = layer.layer(api.clone());
        assert_eq!([status_of(&service, "/a/1").await, status_of(&service, "/b/1").await], [200, 200]);
        for _ in 0..2 {
            let error = ask(&service, get("/a/2")).await.unwrap_err();
            let names_limit =
                matches!(&error, OutboundError::Call(error) if matches!(error.kind, CallErrorKind::RateLimited { .. }));
            assert!(names_limit, "{limit}: {error}");
        }
        assert_eq!(layer.provider().local_report().closed_scopes, 0, "the provider closes nothing");
    }
}

/// Without `learn_limits`, a report that nothing is left closes the scope that it is about.
#[tokio::test(start_paused = true)]
async fn a_spent_scope_is_closed_also_if_limits_are_not_learnt() {
    let api = Api::new(|number, _| {
        answer(200, if number == 0 { &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "5")] } else { &[] }, "")
    });
    let service = layer("timeout = \"60s\"\nscope = [{ name = [\"path {part}\"], path = \"/{part}/**\" }]");
    let service = service.layer(api.clone());
    let began = now();
    for (path, at) in [("/a/1", 0), ("/b/1", 0), ("/a/1", 5)] {
        assert_eq!((status_of(&service, path).await, (now() - began).as_secs()), (200, at), "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn one_closed_path_doesnt_close_the_others() {
    let is_outage = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let fails = Arc::clone(&is_outage);
    let api = Api::new(move |_, arrived| match arrived.uri.contains("/bad") || fails.load(Ordering::Relaxed) {
        true => answer(503, &[("retry-after", "600")], "closed"),
        false => status(200),
    });
    let layer = layer(PAIR);
    let service = layer.layer(api.clone());
    assert_eq!(status_of(&service, "/good").await, 200);
    for told in [503, 429, 429] {
        assert_eq!([status_of(&service, "/bad/1").await, status_of(&service, "/good").await], [told, 200]);
    }
    assert_eq!(api.count(), 5, "the bad path is asked once");
    tokio::time::sleep(secs(601)).await;
    assert_eq!([status_of(&service, "/good").await, status_of(&service, "/bad/1").await], [200, 503]);
    assert_eq!(api.count(), 7, "and again after its pause");
    is_outage.store(true, Ordering::Relaxed);
    assert_eq!([status_of(&service, "/good").await, status_of(&service, "/other").await], [503, 429]);
    assert_eq!(api.count(), 8, "two paths that fail are an outage");
}

/// Also if calls have a scope by a rule, many limits, or many wait for the end.
#[tokio::test(start_paused = true)]
async fn the_pause_of_one_path_is_kept_by_all_its_calls() {
    let rule = "rule = [{ when = { status = 403, request = { path = \"/bad/{part}\" } }, is = \"throttled\", scope = [\"path {part}\"] }]";
    let many = (1..=7).map(|number| format!("\"{number}000 per {number}s\"")).collect::<Vec<_>>().join(", ");
    for (limit, settings) in [
        ("\"20/s burst 20\"".to_owned(), String::new()),
        ("\"20/s burst 20\"".to_owned(), rule.to_owned()),
        (format!("[{many}]"), String::new()),
    ] {
        let began = now();
        let api = Api::new(move |_, arrived| match arrived.uri.contains("/bad") && now() - began < secs(6) {
            true => answer(503, &[("retry-after", "5")], "closed"),
            false => status(200),
        });
        let api = api.taking(Duration::from_millis(20));
        let settings = format!("limit = {limit}\ntimeout = \"60s\"\nadaptive = \"off\"\n{settings}\n");
        let settings = format!("[outbound.provider.api]\nbase_url = \"https://api.test\"\n{settings}");
        let service = layer_of(&settings).layer(api.clone());
        assert_eq!(status_of(&service, "/good").await, 200);
        tokio::time::sleep(secs(1)).await;
        assert_eq!(join_all((0..3).map(|_| status_of(&service, "/bad/a"))).await, [200; 3], "{settings}");
        let times: Vec<_> = api.arrived().iter().map(|arrived| (arrived.at - began).as_millis()).collect();
        assert!(times[1..4].iter().all(|at| *at < 1_300) && times.len() == 7, "{settings}{times:?}");
        assert!(times[4..].iter().all(|at| *at >= 6_000), "{settings}{times:?}");
        // One call after the other.
        let is_alone = times[4..].windows(2).all(|pair| pair[1] - pair[0] >= 20);
        assert!(is_alone || limit.starts_with('['), "{settings}{times:?}");
    }
}

/// Paths that only one of two credentials may use each: a caller takes none of them away from others.
#[tokio::test(start_paused = true)]
async fn a_credential_that_is_left_out_at_a_route_is_tried_last() {
    let api = Api::new(|_, arrived| {
        let may = match arrived.bearer().ends_with("-a") {
            true => !arrived.uri.ends_with("/users/6"),
            false => !arrived.uri.ends_with("/users/5"),
        };
        status(if may { 200 } else { 401 })
    });
    let layer = layer(PAIR);
    let service = layer.layer(api.clone());
    for _ in 0..10 {
        for path in ["/a", "/a", "/users/5", "/users/6"] {
            assert_eq!(status_of(&service, path).await, 200, "{path}");
        }
        for _ in 0..8 {
            assert_eq!(status_of(&service, "/users/5").await, 200);
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert_eq!(status_of(&service, "/users/6").await, 200);
        }
    }
}

/// Only one path is called, and the good credentials are full for longer than any call waits.
#[tokio::test(start_paused = true)]
async fn a_revoked_credential_is_left_out_at_the_only_path() {
    let began = now();
    let api = Api::new(|_, arrived| if arrived.bearer().ends_with("-b") { status(401) } else { status(200) });
    let api = api.taking(Duration::from_millis(30));
    let layer = layer(&format!("timeout = \"300ms\"\ncredential_limit = \"5 per 1s\"\n{PAIR}"));
    let service = layer.layer(api.clone());
    let mut rejected = 0;
    while now() - began < secs(20) {
        if status_of(&service, "/only").await == 401 && now() - began > secs(2) {
            rejected += 1;
        }
        // A call that can't be sent in time fails at once.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(rejected, 0);
    let revoked = api.arrived().iter().filter(|arrived| arrived.bearer().ends_with("-b")).count();
    assert!(revoked <= 5, "{revoked} requests");
}

#[tokio::test(start_paused = true)]
async fn a_mutation_that_was_carried_out_in_part_isnt_sent_again() {
    for (data, sends) in [("", 2), ("\"data\":null,", 2), ("\"data\":{\"a\":{\"id\":1},\"b\":null},", 1)] {
        let body = format!("{{{data}\"errors\":[{{\"extensions\":{{\"code\":\"THROTTLED\"}}}}]}}");
        let api = Api::new(move |number, _| {
            let body = if number == 0 { &*body } else { "{}" };
            answer(200, &[("content-type", "application/json")], body)
        });
        let service = layer("timeout = \"60s\"").layer(api.clone());
        let request = Request::post("/graphql").body(Full::new(Bytes::from_static(b"{}"))).unwrap();
        assert_eq!(ask(&service, request).await.unwrap().status(), 200);
        assert_eq!(api.count(), sends, "{data}");
    }
}

/// The cool-down of a scope is an operation more.
#[tokio::test(start_paused = true)]
async fn calls_that_meet_all_limits_that_fit_have_no_scope() {
    let api = Api::new(|_, _| status(200));
    let limits = (1..=7).map(|number| format!("\"{number}0 per {number}s\"")).collect::<Vec<_>>().join(", ");
    let settings = "[outbound.provider.api]\nbase_url = \"https://api.test\"\nlimit = [".to_owned() + &limits + "]\n";
    let service = layer_of(&settings).layer(api.clone());
    let mut request = get("/x");
    let scope = CallScope { route: 7, key: 9, ..CallScope::default() };
    request.extensions_mut().insert(CallOptions { scope, ..CallOptions::default() });
    assert_eq!(ask(&service, request).await.unwrap().status(), 200);
}

/// A provider that asks for more than the longest pause is tried by one call a day.
#[tokio::test(start_paused = true)]
async fn one_call_at_a_time_tries_a_credential_after_a_long_pause() {
    let is_over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let over = Arc::clone(&is_over);
    let api = Api::new(move |_, _| match over.load(Ordering::Relaxed) {
        true => status(200),
        false => answer(429, &[("retry-after", "99999999")], "no"),
    });
    let api = api.taking(Duration::from_millis(500));
    let service = layer("").layer(api.clone());
    let callers = async || join_all((0..100).map(|_| status_of(&service, "/x"))).await;
    callers().await;
    for day in 1..=4 {
        tokio::time::sleep(secs(86_400 - 3)).await;
        let before = api.count();
        is_over.store(day == 4, Ordering::Relaxed);
        let statuses = callers().await;
        let sent = if day == 4 { 100 } else { 1 };
        assert_eq!((api.count() - before, statuses.contains(&200)), (sent, day == 4), "day {day}");
    }
}

/// The other parts of the credential are known to be open.
#[tokio::test(start_paused = true)]
async fn a_long_pause_of_a_scope_puts_no_credential_on_trial() {
    let api = Api::new(|_, arrived| match arrived.uri.contains("/closed") {
        true => answer(429, &[("retry-after", "99999999")], "no"),
        false => status(200),
    });
    let api = api.taking(secs(2));
    let scope = "scope = [{ path = \"/{part}/**\", name = [\"path {part}\"] }]\ncredential_limit = \"2 per 1s\"\n";
    let service = layer(&format!("{scope}{PAIR}")).layer(api.clone());
    assert_eq!(status_of(&service, "/closed/1").await, 429);
    tokio::time::sleep(secs(5)).await;
    let asked = now();
    assert_eq!(join_all((0..8).map(|_| status_of(&service, "/open/1"))).await, [200; 8]);
    assert!(
        now() - asked < Duration::from_millis(3_900),
        "no call waits for the reply of another: {:?}",
        now() - asked
    );
}

#[tokio::test(start_paused = true)]
async fn a_reset_in_the_body_is_read_also_if_the_amounts_are_in_headers() {
    let api = Api::new(|number, _| match number {
        0 => answer(200, &[("content-type", "application/json"), ("x-left", "0")], "{\"reset_in\":5}"),
        _ => answer(200, &[("x-left", "9")], ""),
    });
    let allowance = "allowance = [{ remaining = \"header x-left\", reset = \"json /reset_in s\" }]";
    let service = layer(&format!("learn_limits = true\ntimeout = \"60s\"\n{allowance}")).layer(api.clone());
    let began = now();
    assert_eq!([status_of(&service, "/x").await, status_of(&service, "/x").await], [200, 200]);
    assert_eq!((now() - began).as_secs(), 5);
}

/// Also if there is no time for another attempt, or the request must not be sent again.
#[tokio::test(start_paused = true)]
async fn a_caller_learns_the_wait_that_a_body_or_a_rule_tells() {
    let rules = "timeout = \"10s\"\nrule = [\
        { when = { status = 400, json = { \"/code\" = \"E-THROTTLE\" } }, is = \"throttled\", wait = \"json /retryIn ms\" },\
        { when = { status = 503 }, is = \"unavailable\", wait = \"header x-back-at\" }]";
    for (code, name, body, wait) in
        [(400, "x-none", "{\"code\":\"E-THROTTLE\",\"retryIn\":53800}", "54"), (503, "x-back-at", "{}", "14")]
    {
        let api = Api::new(move |_, _| answer(code, &[("content-type", "application/json"), (name, "14")], body));
        let service = layer(rules).layer(api.clone());
        for request in [get("/x"), post("{}", None)] {
            let response = ask(&service, request).await.unwrap();
            assert_eq!(response.headers().get("retry-after").map(|wait| wait.to_str().unwrap()), Some(wait), "{code}");
            tokio::time::sleep(secs(60)).await;
        }
    }
}

/// A reply that proves nothing makes room for another trial at once.
#[tokio::test(start_paused = true)]
async fn a_trial_ends_with_its_reply() {
    let api = Api::new(|number, arrived| match number {
        0 => answer(429, &[("retry-after", "99999999")], "no"),
        _ if arrived.uri.contains("/bad") => status(500),
        _ => status(200),
    });
    let service = layer("max_pause = \"10s\"\nbreaker = \"off\"\nretry = { max_attempts = 1 }").layer(api.clone());
    assert_eq!(status_of(&service, "/good").await, 429);
    tokio::time::sleep(secs(10)).await;
    let began = now();
    assert_eq!([status_of(&service, "/bad").await, status_of(&service, "/good").await], [500, 200]);
    assert!(now() - began < secs(1), "{:?}", now() - began);
}

/// The known scope of a route stays closed, whatever a slower reply says.
#[tokio::test(start_paused = true)]
async fn a_slow_success_opens_no_closed_scope() {
    let api = Api::new(|number, _| match number {
        0 => answer(200, &[("x-bucket", "b2")], ""),
        1 => answer(429, &[("x-bucket", "b1"), ("retry-after", "100")], ""),
        _ => status(200),
    });
    let api = api.taking_each(|number| secs(if number == 0 { 2 } else { 0 }));
    let service = layer("scope = [{ name = [\"header x-bucket\"] }]\nretry = { max_attempts = 1 }").layer(api.clone());
    let closing = async {
        tokio::time::sleep(secs(1)).await;
        status_of(&service, "/a/2").await
    };
    let (slow, closed) = tokio::join!(status_of(&service, "/a/1"), closing);
    assert_eq!([slow, closed, status_of(&service, "/a/3").await], [200, 429, 429]);
    assert_eq!(api.count(), 2);
}

/// `%61` is `a`.
#[tokio::test(start_paused = true)]
async fn another_spelling_of_a_path_has_the_same_scope() {
    let rule = "rule = [{ when = { status = 429, request = { path = \"/device/{token}\" } }, is = \"throttled\", scope = [\"path {token}\"] }]";
    for closed in ["/device/abc", "/devic%65/%61bc", "/./device/abc"] {
        let api = Api::new(|_, arrived| match arrived.uri.ends_with("bc") {
            true => answer(429, &[("retry-after", "30")], "no"),
            false => status(200),
        });
        let service = layer(&format!("{rule}\nretry = {{ max_attempts = 1 }}")).layer(api.clone());
        assert_eq!(status_of(&service, closed).await, 429, "{closed}");
        for (path, expected, count) in [("/device/abc", 429, 1), ("/device/ab%63", 429, 1), ("/device/zzz", 200, 2)] {
            assert_eq!((status_of(&service, path).await, api.count()), (expected, count), "{closed} {path}");
        }
    }
}
