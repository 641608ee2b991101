//! The behaviour of a gate, on a clock that the test sets.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::future::{Ready, ready};
use std::net::IpAddr;
use std::sync::{Arc, LazyLock, Mutex};

use http::header::{COOKIE, HeaderMap};
use tidegate::clock::ManualClock;
use tidegate::policy::{KeySeed, Policy, PolicySources, Query, UncountableError};
use tidegate::store::{Memory, Never, Store, StoreError, StoreResponse};
use tidegate::{BlockError, CheckError, Clock, Decision, DecisionReport, Gate, Reason, ResetReport, Span, Time};
use tidegate_core::batch::{BatchStates, OpContext, execute};
use tidegate_core::{Admission, Batch, KeyState, Limits, Op, Outcome, Outcomes, ShareLevel};

fn policy(toml: &str) -> Policy {
    Policy::load(PolicySources::new().file("test.toml", toml)).unwrap_or_else(|errors| panic!("{errors}"))
}

fn gate(toml: &str) -> (Gate<Memory, ManualClock>, ManualClock) {
    let clock = ManualClock::default();
    (Gate::in_memory(&policy(toml), clock.clone()), clock)
}

fn call<'a>(action: &'a str, ip: &str) -> Query<'a> {
    Query { action: Some(action), ip: Some(ip.parse().unwrap()), ..Query::default() }
}

const LOGIN: &str = r#"
[inbound.action.login]
limit = "5 per 60s"
penalty = { base = "2s", cap = "1h" }
"#;

#[test]
fn each_strike_doubles_the_block_up_to_cap() {
    let (gate, clock) = gate(LOGIN);
    let login = call("login", "203.0.113.7");
    for left in (0..5).rev() {
        let decision = gate.check_now(&login).unwrap();
        assert!(decision.allowed && !decision.blocked);
        assert_eq!((decision.remaining, decision.retry_after), (Some(left), None));
    }
    let mut block = 2;
    let mut refused = gate.check_now(&login).unwrap();
    for rung in 1..=14 {
        assert!(!refused.allowed && refused.blocked, "rung {rung}");
        assert_eq!(refused.retry_after, Some(Span::from_secs(block)));
        assert_eq!(refused.backoff, Some(Span::from_secs(block)));
        clock.advance(Span::from_secs(block) - Span::from_millis(1));
        let still = gate.check_now(&login).unwrap();
        assert!(!still.allowed);
        assert_eq!(still.retry_after, Some(Span::from_millis(1)), "calls during a block change nothing");
        clock.advance(Span::from_millis(1));
        let mut admitted = 0;
        refused = loop {
            let decision = gate.check_now(&login).unwrap();
            if !decision.allowed {
                break decision;
            }
            admitted += 1;
        };
        // The first four blocks end while the window is still full. The later ones last longer than the window.
        let expected = if rung <= 4 { 1..=1 } else { 1..=5 };
        assert!(expected.contains(&admitted), "rung {rung}: {admitted}");
        block = (block * 2).min(3600);
    }
    assert_eq!(block, 3600);
}

#[test]
fn the_global_limit_counts_over_all_actions() {
    let (gate, _) = gate(
        r#"
        [inbound.global]
        limit = "1000 per 1h"
        [inbound.action.login]
        limit = "600 per 1h"
        [inbound.action.otp]
        limit = "600 per 1h"
        "#,
    );
    let (login, otp) = (call("login", "203.0.113.7"), call("otp", "203.0.113.7"));
    for _ in 0..500 {
        assert!(gate.check_now(&login).unwrap().allowed && gate.check_now(&otp).unwrap().allowed);
    }
    let refused = gate.report(&gate.check_now(&login).unwrap());
    assert_eq!(
        (refused.allowed, refused.source.as_deref(), refused.bound_by.as_deref()),
        (false, Some("global"), Some("global"))
    );
    let used = block_on(gate.explain(&login)).unwrap().limits.iter().map(|limit| limit.used).collect::<Vec<_>>();
    assert_eq!(used, [500, 1000], "the action's own count is unchanged");
    assert!(gate.check_now(&call("login", "203.0.113.8")).unwrap().allowed, "another address is not affected");
}

#[test]
fn refused_calls_count_globally_only_if_configured() {
    for (count, counted) in [("admitted", 2), ("all", 10)] {
        let (gate, _) = gate(&format!(
            r#"
            [inbound.global]
            limit = "1000 per 1h"
            count = "{count}"
            [inbound.action.login]
            limit = "2 per 60s"
            penalty = {{ base = "2s", cap = "1h" }}
            "#
        ));
        let login = call("login", "203.0.113.7");
        for _ in 0..10 {
            gate.check_now(&login).unwrap();
        }
        assert_eq!(block_on(gate.explain(&login)).unwrap().limits[1].used, counted, "count = {count}");
    }
}

#[test]
fn blocked_clients_are_admitted_at_the_stated_time() {
    let (gate, clock) = gate(LOGIN);
    let clients: Vec<IpAddr> = (0..1000_u32).map(|n| IpAddr::from((0x0a00_0000 + n * 256).to_be_bytes())).collect();
    let ask = |ip: IpAddr| gate.check_now(&Query { action: Some("login"), ip: Some(ip), ..Query::default() }).unwrap();
    let start = clock.now();
    let mut returns: Vec<(u64, IpAddr)> = Vec::new();
    for (n, ip) in clients.iter().enumerate() {
        clock.set(start + Span::from_micros(n as u64 * 777));
        (0..5).for_each(|_| assert!(ask(*ip).allowed));
        let refused = ask(*ip);
        let raw = clock.now() + refused.retry_after.unwrap();
        assert_eq!(refused.next_allowed_at, Some(raw));
        returns.push((raw.as_micros(), *ip));
    }
    for (raw, ip) in &returns {
        clock.set(tidegate::Time::from_micros(raw - 1000));
        assert!(!ask(*ip).allowed, "a millisecond early");
    }
    for (n, (raw, ip)) in returns.iter().enumerate() {
        let told_at = start + Span::from_micros(n as u64 * 777);
        let told = told_at + Span::from_secs(2);
        assert!(told.as_micros() >= *raw);
        clock.set(told);
        assert!(ask(*ip).allowed, "at the integer Retry-After");
    }
}

#[test]
fn addresses_of_one_network_share_a_key() {
    let (gate, _) = gate("[inbound.action.login]\nlimit = \"10000 per 1h\"\n");
    for n in 0..10_000_u64 {
        let ip = IpAddr::from(std::net::Ipv6Addr::from(0x2001_0db8_0000_0001_u128 << 64 | u128::from(n * 7919)));
        let decision = gate.check_now(&Query { action: Some("login"), ip: Some(ip), ..Query::default() }).unwrap();
        assert_eq!(decision.remaining, Some(9_999 - n));
    }
    assert!(!gate.check_now(&call("login", "2001:db8:0:1::ffff")).unwrap().allowed);
    assert!(gate.check_now(&call("login", "2001:db8:0:2::1")).unwrap().allowed, "the neighbouring /64");
    assert_eq!(gate.check_now(&call("login", "1.2.3.4")).unwrap().remaining, Some(9_999));
    assert_eq!(gate.check_now(&call("login", "::ffff:1.2.3.4")).unwrap().remaining, Some(9_998));
}

#[test]
fn status_changes_nothing_and_reset_clears_one_action() {
    let (gate, clock) = gate(&format!(
        "[inbound.global]\nlimit = \"100 per 1h\"\n{LOGIN}\n[inbound.action.otp]\nlimit = \"3 per 60s\"\n"
    ));
    let (login, otp) = (call("login", "203.0.113.7"), call("otp", "203.0.113.7"));
    for _ in 0..6 {
        gate.check_now(&login).unwrap();
    }
    assert!(gate.check_now(&otp).unwrap().allowed);
    let before = block_on(gate.explain(&login)).unwrap();
    for _ in 0..100 {
        assert!(!block_on(gate.status(&login)).unwrap().allowed);
        assert_eq!(block_on(gate.explain(&login)).unwrap(), before);
    }
    let fresh = call("login", "198.51.100.1");
    assert_eq!(block_on(gate.status(&fresh)).unwrap().remaining, Some(5));
    assert_eq!(gate.store().stats().entries, 3, "asking makes no entries");
    for _ in 0..2 {
        block_on(gate.reset(&login)).unwrap();
        assert_eq!(block_on(gate.status(&login)).unwrap().remaining, Some(5));
        let left = block_on(gate.explain(&otp)).unwrap().limits.iter().map(|limit| limit.used).collect::<Vec<_>>();
        assert_eq!(left, [1, 6], "the other action and the global limit");
    }
    clock.advance(Span::from_secs(1));
    assert!(gate.check_now(&login).unwrap().allowed);
}

#[test]
fn lists_are_checked_first_and_shadow_admits() {
    let (gate, _) = gate(
        r#"
        [inbound]
        allow = ["10.1.0.0/16"]
        deny = ["192.0.2.0/24"]
        ambiguous_paths = "refuse"
        [inbound.action.login]
        match = { path = "/login" }
        limit = "1 per 60s"
        [inbound.action.watched]
        limit = "1 per 60s"
        penalty = { base = "2s", cap = "1h" }
        mode = "shadow"
        "#,
    );
    for _ in 0..3 {
        assert_eq!(gate.check_now(&call("login", "10.1.2.3")).unwrap().reason, Reason::AllowList);
        let denied = gate.check_now(&call("login", "192.0.2.9")).unwrap();
        assert_eq!((denied.allowed, denied.reason, denied.retry_after), (false, Reason::DenyList, None));
    }
    let ambiguous = |ip: &str| Query { action: None, path: Some("/x/../login"), ..call("", ip) };
    assert_eq!(gate.check_now(&ambiguous("10.1.2.3")).unwrap().reason, Reason::AllowList);
    assert_eq!(gate.check_now(&ambiguous("192.0.2.9")).unwrap().reason, Reason::DenyList);
    assert!(gate.check_now(&ambiguous("203.0.113.7")).unwrap_err().uncountable().is_some());
    let watched = call("watched", "203.0.113.7");
    assert!(!gate.check_now(&watched).unwrap().shadow);
    for _ in 0..3 {
        let decision = gate.check_now(&watched).unwrap();
        assert!(decision.allowed && decision.shadow);
        assert_eq!(decision.retry_after, Some(Span::from_secs(2)), "what it would have been told");
    }
}

#[test]
fn permits_are_held_and_returned() {
    let (gate, clock) = gate("[inbound.action.export]\nlimit = \"2 in flight\"\n");
    let export = call("export", "203.0.113.7");
    let first = gate.check_now(&export).unwrap();
    let second = gate.check_now(&export).unwrap();
    assert!(!gate.check_now(&export).unwrap().allowed);
    let hold = gate.hold_permit(&export, &first).unwrap().expect("a permit");
    clock.advance(Span::from_secs(20));
    hold.renew();
    clock.advance(Span::from_secs(20));
    assert_eq!(block_on(gate.status(&export)).unwrap().remaining, Some(1), "the second's lease has ended");
    drop(hold);
    assert_eq!(block_on(gate.status(&export)).unwrap().remaining, Some(2));
    let permit = gate.report(&second).permit.unwrap();
    assert!(!block_on(gate.release(&export, permit)).unwrap());
}

/// Permits that are given back, by guards or by their number, show how soon the next one is free.
#[test]
fn the_wait_for_a_permit_is_estimated() {
    let (gate, clock) = gate("[inbound.action.export]\nlimit = \"1 in flight\"\n");
    let export = call("export", "203.0.113.7");
    let wait = || {
        let decision = gate.check_now(&export).unwrap();
        assert!(!decision.allowed);
        decision.retry_after.unwrap().as_secs_ceil()
    };
    let first = gate.check_now(&export).unwrap();
    assert_eq!(wait(), 30, "nothing is known but the lease");
    clock.advance(Span::from_millis(300));
    drop(gate.hold_permit(&export, &first).unwrap());
    let second = gate.check_now(&export).unwrap();
    assert_eq!(wait(), 1);
    clock.advance(Span::from_secs(5));
    assert!(block_on(gate.release(&export, gate.report(&second).permit.unwrap())).unwrap());
    let _third = gate.check_now(&export).unwrap();
    assert_eq!(wait(), 6, "the longer of two, rounded up");
    let explained = block_on(gate.explain(&export)).unwrap();
    assert_eq!((explained.decision.retry_after, explained.limits[0].retry_after), (Some(6), Some(6)));
    clock.advance(Span::from_secs(26));
    assert_eq!(wait(), 4, "the lease ends before that");
}

#[test]
fn status_and_explain_take_no_permit() {
    let (gate, _) = gate("[inbound.action.export]\nlimit = \"2 in flight\"\n");
    let export = call("export", "203.0.113.7");
    assert_eq!(block_on(gate.status(&export)).unwrap().permit, None);
    assert_eq!(block_on(gate.explain(&export)).unwrap().decision.permit, None);
}

#[test]
fn explain_predicts_the_block_of_a_call() {
    let (gate, clock) = gate(LOGIN);
    let login = call("login", "203.0.113.7");
    let next_block = || block_on(gate.explain(&login)).unwrap().limits[0].next_block;
    assert_eq!(next_block(), None, "a call would pass");
    for _ in 0..5 {
        gate.check_now(&login).unwrap();
    }
    for block in [2, 4, 8] {
        assert_eq!(next_block(), Some(block));
        assert_eq!(gate.check_now(&login).unwrap().retry_after, Some(Span::from_secs(block)));
        assert_eq!(next_block(), None, "a call during a block changes nothing");
        clock.advance(Span::from_secs(block));
        assert_eq!(next_block(), None, "parole");
        assert!(gate.check_now(&login).unwrap().allowed);
    }
}

#[test]
fn explain_predicts_no_block_during_another_one() {
    let penalty = "penalty = { base = \"2s\", cap = \"1h\" }";
    let (gate, _) = gate(&format!(
        "[inbound.global]\nlimit = \"4 per 1h\"\n{penalty}\n[inbound.action.page]\nlimit = \"100 per 1h\"\n\
         [inbound.action.login]\nlimit = \"3 per 60s\"\n{penalty}\n"
    ));
    let (login, page) = (call("login", "203.0.113.7"), call("page", "203.0.113.7"));
    for query in [&login, &login, &login, &page] {
        assert!(gate.check_now(query).unwrap().allowed);
    }
    let next_blocks = || {
        let explained = block_on(gate.explain(&login)).unwrap();
        explained.limits.into_iter().map(|limit| limit.next_block).collect::<Vec<_>>()
    };
    assert_eq!(next_blocks(), [Some(2), Some(2)]);
    assert!(gate.check_now(&page).unwrap().blocked);
    assert_eq!(next_blocks(), [None, None], "nothing changes while the global block lasts");
}

#[test]
fn a_reset_clears_only_the_named_limit() {
    let (gate, _) = gate(
        r#"
        [inbound.global]
        limit = "1 per 1h"
        penalty = { base = "2s", cap = "1h" }
        [inbound.action.default]
        limit = "100 per 1h"
        "#,
    );
    let anything = call("anything", "203.0.113.7");
    assert!(gate.check_now(&anything).unwrap().allowed && !gate.check_now(&anything).unwrap().allowed);
    assert!(matches!(block_on(gate.reset(&anything)), Err(CheckError::UnknownAction(_))));
    block_on(gate.reset(&call("default", "203.0.113.7"))).unwrap();
    assert!(!gate.check_now(&anything).unwrap().allowed, "the global limit is left alone");
    block_on(gate.reset(&call("global", "203.0.113.7"))).unwrap();
    assert!(gate.check_now(&anything).unwrap().allowed);
}

#[test]
fn a_reset_reports_what_it_found() {
    let (gate, _) = gate(
        r#"
        [inbound.global]
        limit = "4 per 1h"
        penalty = { base = "2s", cap = "1h" }
        [inbound.action.login]
        limit = "2 per 1h"
        penalty = { base = "4s", cap = "1h" }
        [inbound.action.page]
        limit = "9 per 1h"
        [inbound.action.tenant]
        key = ["client_ip", "key"]
        limit = "9 per 1h"
        [inbound.action.site]
        key = ["platform"]
        limit = "9 per 1h"
        "#,
    );
    let reset = |query: &Query<'_>| {
        let ResetReport { limits, still_refusing, skipped, .. } = block_on(gate.reset(query)).unwrap();
        let found = limits.into_iter().map(|limit| (limit.name, limit.used, limit.blocked)).collect::<Vec<_>>();
        (found, still_refusing.into_iter().map(|limit| limit.name).collect::<Vec<_>>(), skipped)
    };
    let call = |action| Query { platform: Some("web"), ..call(action, "203.0.113.7") };
    let spend = || {
        for action in ["login", "login", "page", "site", "login"] {
            gate.check_now(&call(action)).unwrap();
        }
    };
    let found = |name: &str, used, blocked| (name.to_owned(), used, blocked);
    let only = |name: &str| vec![name.to_owned()];
    assert_eq!(reset(&call("login")), (vec![], vec![], vec![]), "nothing was counted");
    spend();
    assert_eq!(reset(&call("login")), (vec![found("login", 2, true)], only("global"), vec![]));
    assert_eq!(reset(&call("global")), (vec![found("global", 4, true)], vec![], vec![]));
    gate.check_now(&call("login")).unwrap();
    let everything = Query { action: None, ..call("login") };
    let all = vec![found("global", 1, false), found("login", 1, false), found("page", 1, false)];
    assert_eq!(reset(&everything), (all, vec![], only("tenant")), "the site is counted for all clients together");
    assert_eq!(block_on(gate.status(&call("site"))).unwrap().remaining, Some(4), "by the global limit");
}

#[test]
fn a_reset_needs_only_its_own_key_parts() {
    let (gate, _) = gate(
        r#"
        [inbound.global]
        limit = "9 per 1h"
        [inbound.action.export]
        key = ["key"]
        limit = "2 per 1h"
        "#,
    );
    let call = Query { key: Some("alice"), ..call("export", "203.0.113.7") };
    let by_key = |action| Query { action, key: Some("alice"), ..Query::default() };
    for (query, skipped) in [(by_key(Some("export")), vec![]), (by_key(None), vec!["global".to_owned()])] {
        gate.check_now(&call).unwrap();
        let report = block_on(gate.reset(&query)).unwrap();
        assert_eq!((report.limits[0].name.as_str(), report.limits[0].used, report.skipped), ("export", 1, skipped));
        assert_eq!(block_on(gate.status(&call)).unwrap().remaining, Some(2));
    }
}

#[test]
fn changes_leave_out_limits_by_parts_that_were_not_given() {
    let (gate, _) = gate(
        r#"
        [inbound.action.login]
        limits = [
          { name = "address", key = "client_ip", limit = "1 per 1h", penalty = { base = "2s", cap = "1h" } },
          { name = "account", key = "header:x-account", limit = "9 per 1h" },
        ]
        [inbound.action.export]
        key = "key"
        limit = "9 per 1h"
        penalty = { base = "2s", cap = "1h" }
        "#,
    );
    let mut headers = http::HeaderMap::new();
    headers.insert("x-account", "bob".parse().unwrap());
    let client = call("login", "203.0.113.7");
    let login = Query { headers: Some(&headers), ..client };
    for (reset, skipped) in [
        (client, vec!["login.account"]),
        (login, vec![]),
        (Query { action: None, ..client }, vec!["login.account", "export"]),
    ] {
        gate.check_now(&login).unwrap();
        assert!(gate.check_now(&login).unwrap().blocked);
        let report = block_on(gate.reset(&reset)).unwrap();
        assert_eq!((&*report.limits[0].name, report.limits[0].blocked), ("login.address", true));
        assert_eq!(report.skipped, skipped);
    }
    let span = Span::from_secs(60);
    let report = block_on(gate.block(&client, span)).unwrap();
    assert_eq!((report.blocked, report.skipped), (true, vec!["login.account".to_owned()]));
    assert_eq!(gate.check_now(&login).unwrap().retry_after, Some(span));
    let missing =
        |result: CheckError| assert_eq!(result.to_string(), "`key` is missing: the limit `export` counts by it");
    missing(block_on(gate.reset(&call("export", "203.0.113.7"))).unwrap_err());
    missing(block_on(gate.block(&call("export", "203.0.113.7"), span)).unwrap_err());
}

#[test]
fn undecidable_queries_are_errors() {
    let (gate, _) =
        gate(&format!("{LOGIN}\n[inbound.action.api]\nkey = [\"key\", \"platform\"]\nlimit = \"5 per 60s\"\n"));
    let unknown = gate.check_now(&call("logn", "203.0.113.7")).unwrap_err();
    assert_eq!(unknown.to_string(), "unknown action \"logn\"; did you mean \"login\"?");
    let missing = gate.check_now(&call("api", "203.0.113.7")).unwrap_err();
    assert!(matches!(missing, CheckError::Key(_)) && missing.to_string().contains("`key` is missing"), "{missing}");
    let huge = Query { cost: Some(u64::MAX), ..call("login", "203.0.113.7") };
    assert!(matches!(gate.check_now(&huge), Err(CheckError::Cost { found: u64::MAX })));
    let above = Query { cost: Some(6), ..call("login", "203.0.113.7") };
    let refused = gate.check_now(&above).unwrap();
    assert_eq!((refused.allowed, refused.retry_after, refused.blocked), (false, None, false));
    assert_eq!(gate.check_now(&call("login", "203.0.113.7")).unwrap().remaining, Some(4), "nothing was charged");
}

/// A path that servers may read in more ways than one decision covers.
static UNREADABLE: LazyLock<String> = LazyLock::new(|| "/%253b/a;v/..;/%e2%80%a8%252e".repeat(136));

#[test]
fn calls_that_cant_be_counted_count_globally() {
    const POLICY: &str = r#"
        [inbound.global]
        limit = ["1 in flight", "4 per 60s"]
        [inbound.action.all]
        match = { path = "/*" }
        limit = "100 per 60s"
        key = "cookie:sid"
        "#;
    let mut headers = http::HeaderMap::new();
    headers.insert("cookie", "sid=1; sid=2; sid=3; sid=4; sid=5".parse().unwrap());
    let ip = Some("203.0.113.7".parse().unwrap());
    let unreadable = Query { ip, path: Some(&UNREADABLE), ..Query::default() };
    let many_values = Query { path: Some("/login"), headers: Some(&headers), ..unreadable };
    let plan = Arc::clone(policy(POLICY).plan());
    let memory = || Memory::new(Arc::clone(plan.limits()), 1 << 20);
    let now = Gate::from_parts(Arc::clone(&plan), memory(), ManualClock::default(), KeySeed::new([7; 16]));
    let later = Gate::from_parts(Arc::clone(&plan), Later(memory()), ManualClock::default(), KeySeed::new([7; 16]));
    for is_immediate in [true, false] {
        let check = |query: &Query<'_>| if is_immediate { now.check_now(query) } else { block_on(later.check(query)) };
        for query in [&unreadable, &many_values, &unreadable, &many_values] {
            assert!(check(query).unwrap_err().uncountable().is_some(), "the permit of the call before was given back");
        }
        for query in [&unreadable, &many_values] {
            let refused = check(query).unwrap();
            assert_eq!((refused.allowed, refused.retry_after), (false, Some(Span::from_secs(60))));
        }
    }
    assert!(block_on(now.status(&unreadable)).unwrap_err().uncountable().is_some());
}

/// Answers later, from a memory.
struct Later(Memory);

impl Store for Later {
    type Future = Ready<Result<Outcomes, StoreError>>;

    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        let StoreResponse::Ready(outcomes) = self.0.apply(batch, now);
        StoreResponse::Pending(ready(Ok(outcomes)))
    }

    fn submit(&self, batch: &Batch, now: Time) {
        self.0.submit(batch, now);
    }
}

#[test]
fn refused_clients_cost_no_readings_of_their_paths() {
    let (gate, clock) = gate(
        r#"
        [inbound]
        deny = ["192.0.2.0/24"]
        [inbound.action.rest]
        match = { path = "/*" }
        limits = [
            { name = "client", limit = "1 per 60s", penalty = { base = "10s", cap = "1h" } },
            { name = "page", limit = "100 per 60s", key = ["path"] },
        ]
        "#,
    );
    let unreadable = |ip: &str| Query { path: Some(&UNREADABLE), ip: Some(ip.parse().unwrap()), ..Query::default() };
    let denied = unreadable("192.0.2.9");
    assert_eq!(gate.actions(&denied).unwrap().path_error(), None);
    assert_eq!(gate.check_now(&denied).unwrap().reason, Reason::DenyList);
    let client = unreadable("203.0.113.7");
    assert!(gate.actions(&client).unwrap().path_error().is_some());
    assert!(gate.check_now(&client).unwrap_err().uncountable().is_some());
    let plain = Query { path: Some("/x"), ..client };
    assert!(gate.check_now(&plain).unwrap().allowed);
    assert!(gate.check_now(&plain).unwrap().blocked);
    clock.advance(Span::from_millis(8_900));
    let refused = gate.check_now(&client).unwrap();
    assert_eq!((refused.blocked, refused.retry_after), (true, Some(Span::from_millis(1_100))));
    assert!(gate.actions(&unreadable("203.0.113.8")).unwrap().path_error().is_some(), "another client");
    clock.advance(Span::from_millis(200));
    assert!(gate.actions(&client).unwrap().path_error().is_some(), "the block may end before the decision");
}

/// A block comes before the work on long keys, and very long ones aren't read.
#[test]
fn the_work_on_keys_is_bounded() {
    let (gate, _) = gate(
        r#"
        [inbound.action.session]
        match = { path = "/*" }
        limits = [
            { name = "client", limit = "1 per 60s", penalty = { base = "10s", cap = "1h" } },
            { name = "session", limit = "100 per 60s", key = ["cookie:sid"] },
        ]
        "#,
    );
    let check = |ip: &str, cookies: &str| {
        let headers = HeaderMap::from_iter([(COOKIE, cookies.parse().unwrap())]);
        let ip = Some(ip.parse().unwrap());
        gate.check_now(&Query { path: Some("/"), headers: Some(&headers), ip, ..Query::default() })
    };
    let many = (0..100).map(|number| format!("sid=value{number}")).collect::<Vec<_>>().join("; ");
    let is_uncountable = |checked: Result<Decision, CheckError>, expected: &UncountableError| {
        assert_eq!(checked.unwrap_err().uncountable(), Some(expected));
    };
    is_uncountable(check("203.0.113.7", &many), &UncountableError::TooManyValues("cookie:sid".to_owned()));
    is_uncountable(check("203.0.113.7", &"x=y; ".repeat(3_500)), &UncountableError::TooLong);
    assert!(check("203.0.113.7", "sid=a").unwrap().allowed);
    assert!(check("203.0.113.7", "sid=b").unwrap().blocked);
    assert!(check("203.0.113.7", &many).unwrap().blocked);
}

/// A call that is blocked while it runs gives back the permits of all readings of its path.
#[test]
fn permits_of_blocked_clients_are_released() {
    let (gate, _) = gate(
        r#"
        [inbound.action.login]
        match = { path = "/login" }
        limit = "1 in flight"
        [inbound.action.rest]
        match = { path = "/*" }
        limit = "2 per 60s"
        penalty = { base = "10s", cap = "1h" }
        "#,
    );
    let ip = Some("203.0.113.7".parse().unwrap());
    let call = Query { path: Some("/login%2fx/.."), ip, ..Query::default() };
    let other = Query { action: Some("login"), path: None, ..call };
    let admitted = gate.check_now(&call).unwrap();
    assert!(!gate.check_now(&other).unwrap().allowed, "the only permit is taken");
    let rest = Query { path: Some("/x"), ..call };
    assert!((0..3).any(|_| gate.check_now(&rest).unwrap().blocked));
    drop(gate.hold_permit(&call, &admitted).unwrap());
    assert!(gate.check_now(&other).unwrap().allowed);
}

#[test]
fn a_report_parses_back() {
    let (gate, _) = gate(LOGIN);
    let login = call("login", "203.0.113.7");
    (0..8).for_each(|_| drop(gate.check_now(&login)));
    let refused = gate.check_now(&login).unwrap();
    let json = serde_json::to_string(&gate.report(&refused)).unwrap();
    assert_eq!(
        json,
        r#"{"allowed":false,"limit":5,"remaining":0,"reset_after":60,"retry_after":2,"blocked":true,"backoff_seconds":2,"next_allowed_at":"2026-01-01 00:00:02Z","bound_by":"login","reason":"penalty","source":"action"}"#
    );
    assert_eq!(serde_json::from_str::<DecisionReport>(&json).unwrap(), gate.report(&refused));
}

#[test]
fn exactly_ten_of_hundred_concurrent_calls_pass() {
    let (gate, _) = gate("[inbound.action.login]\nlimit = \"10 per 60s\"\n");
    let admitted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..100)
            .map(|_| scope.spawn(|| usize::from(gate.check_now(&call("login", "203.0.113.7")).unwrap().allowed)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(admitted, 10);
}

/// A store with capacity only for keys that are shared at least this widely. It reports one full key at a time.
struct Cramped {
    limits: Arc<Limits>,
    fits: ShareLevel,
    /// True if it is full for the widest keys too, which no store may report.
    hopeless: bool,
    asked: Mutex<Vec<Batch>>,
}

impl Cramped {
    fn execute(&self, batch: &Batch, now: Time) -> Outcomes {
        self.asked.lock().unwrap().push(batch.clone());
        let full = batch.ops().iter().position(|op| op.share_level < self.fits).or(self.hopeless.then_some(0));
        execute(batch, &self.limits, &mut Full(full), now)
    }
}

/// Answers synchronously.
struct InPlace(Arc<Cramped>);

impl Store for InPlace {
    type Future = Never;

    fn limits(&self) -> &Arc<Limits> {
        &self.0.limits
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        StoreResponse::Ready(self.0.execute(batch, now))
    }

    fn submit(&self, _batch: &Batch, _now: Time) {}
}

/// Answers asynchronously.
struct Delayed(Arc<Cramped>);

impl Store for Delayed {
    type Future = Ready<Result<Outcomes, StoreError>>;

    fn limits(&self) -> &Arc<Limits> {
        &self.0.limits
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        StoreResponse::Pending(ready(Ok(self.0.execute(batch, now))))
    }

    fn submit(&self, _batch: &Batch, _now: Time) {}
}

/// The states of a batch with no capacity for the operation at this index. The others are unused.
struct Full(Option<usize>);

impl BatchStates for Full {
    fn evaluate(&mut self, index: usize, ask: &OpContext<'_>) -> Outcome {
        let admission = if self.0 == Some(index) { Admission::NoRoom } else { Admission::Admitted };
        Outcome::without_limit(admission, ask.now)
    }
    fn charge(&mut self, _: usize, _: &OpContext<'_>, _: &mut Outcome) {}
    fn strike(&mut self, _: usize, _: &OpContext<'_>, _: &mut Outcome) {}
    fn modify(&mut self, _: usize, _: &OpContext<'_>, _: bool, _: &mut dyn FnMut(&mut KeyState)) {}
    fn reset(&mut self, _: usize, _: &Op) {}
}

#[test]
fn a_full_store_shares_keys_over_wider_networks() {
    let policy = policy(
        "[inbound.global]\nlimit = \"9 per 60s\"\n[inbound.action.a]\nlimit = [\"5 per 60s\", \"6 per 60s\", \"7/s\"]\n",
    );
    let plan = policy.plan();
    let limits = Arc::clone(plan.limits());
    let store =
        |fits, hopeless| Arc::new(Cramped { limits: Arc::clone(&limits), fits, hopeless, asked: Mutex::default() });
    let seed = KeySeed::new([7; 16]);
    let query = call("a", "203.0.113.7");
    let shares = [ShareLevel::SmallNetwork, ShareLevel::LargeNetwork, ShareLevel::All];
    for (wider, hopeless) in [(1, false), (2, false), (3, false), (3, true)] {
        let store = store(shares[wider - 1], hopeless);
        let clock = ManualClock::default();
        let now = Gate::from_parts(Arc::clone(plan), InPlace(Arc::clone(&store)), clock.clone(), seed.clone());
        let later = Gate::from_parts(Arc::clone(plan), Delayed(Arc::clone(&store)), clock, seed.clone());
        let ways: [&dyn Fn() -> Result<Decision, CheckError>; 3] =
            [&|| now.check_now(&query), &|| block_on(later.check(&query)), &|| block_on(later.status(&query))];
        for ask in ways {
            assert_eq!(ask().unwrap().allowed, !hopeless);
            let asked = std::mem::take(&mut *store.asked.lock().unwrap());
            assert_eq!(asked.len(), 1 + 4 * wider, "four keys are shared, one after the other");
            for (times, batch) in asked.iter().enumerate() {
                assert_eq!(batch.holder(), asked[0].holder(), "it stays the same question");
                for (place, op) in batch.ops().iter().enumerate() {
                    let (share, key) = match times.saturating_sub(place * wider).min(wider) {
                        0 => (ShareLevel::Own, asked[0].ops()[place].key),
                        wider => plan.shared_key(op.limit, shares[wider - 1], query.ip, &seed),
                    };
                    assert_eq!((op.share_level, op.key, op.must_fit), (share, key, share == ShareLevel::All));
                }
            }
        }
    }
}

#[test]
fn values_sharing_a_key_are_charged_once() {
    let policy = policy("[inbound.action.a]\nkey = \"cookie:sid\"\nlimit = \"5 per 60s\"\n");
    let plan = policy.plan();
    let store = Arc::new(Cramped {
        limits: Arc::clone(plan.limits()),
        fits: ShareLevel::All,
        hopeless: false,
        asked: Mutex::default(),
    });
    let (clock, seed) = (ManualClock::default(), KeySeed::new([7; 16]));
    let now = Gate::from_parts(Arc::clone(plan), InPlace(Arc::clone(&store)), clock.clone(), seed.clone());
    let later = Gate::from_parts(Arc::clone(plan), Delayed(Arc::clone(&store)), clock, seed);
    let mut headers = http::HeaderMap::new();
    headers.insert("cookie", http::HeaderValue::from_static("sid=1; sid=2; sid=3"));
    let query = Query { headers: Some(&headers), ..call("a", "203.0.113.7") };
    let ways: [&dyn Fn() -> Result<Decision, CheckError>; 2] =
        [&|| now.check_now(&query), &|| block_on(later.status(&query))];
    for ask in ways {
        assert!(ask().unwrap().allowed);
        let asked = std::mem::take(&mut *store.asked.lock().unwrap());
        let sizes: Vec<usize> = asked.iter().map(|batch| batch.ops().len()).collect();
        assert_eq!(sizes, [3, 3, 2, 1]);
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => panic!("memory answers in place"),
    }
}

#[test]
fn a_block_refuses_with_a_true_wait() {
    let (gate, clock) = gate(LOGIN);
    let login = call("login", "203.0.113.7");
    let report = block_on(gate.block(&login, Span::from_secs(600))).unwrap();
    assert_eq!((report.blocked, report.limits[0].retry_after, report.limits[0].strikes), (true, Some(600), 10));
    let refused = gate.check_now(&login).unwrap();
    assert_eq!((refused.reason, refused.retry_after), (Reason::Penalty, Some(Span::from_secs(600))));
    assert!(gate.check_now(&call("login", "203.0.113.8")).unwrap().allowed);
    block_on(gate.block(&login, Span::from_secs(5))).unwrap();
    assert_eq!(gate.check_now(&login).unwrap().retry_after, Some(Span::from_secs(600)), "it isn't shortened");
    clock.advance(Span::from_secs(600));
    assert!(gate.check_now(&login).unwrap().allowed);
}

#[test]
fn a_blocks_wait_covers_a_full_window() {
    let (gate, clock) =
        gate("[inbound.action.login]\nlimit = \"1 per 1h\"\npenalty = { base = \"2s\", cap = \"1h\" }\n");
    let login = call("login", "203.0.113.7");
    gate.check_now(&login).unwrap();
    block_on(gate.block(&login, Span::from_secs(60))).unwrap();
    assert_eq!(gate.check_now(&login).unwrap().retry_after, Some(Span::from_secs(3600)));
    clock.advance(Span::from_secs(3600));
    assert!(gate.check_now(&login).unwrap().allowed);
}

#[test]
fn only_enforced_penalties_can_block() {
    let (gate, _) = gate(
        r#"
        [inbound.action.page]
        limit = "9 per 60s"
        [inbound.action.trial]
        limit = "9 per 60s"
        mode = "shadow"
        penalty = { base = "2s", cap = "1h" }
        [inbound.action.login]
        limits = [
            { name = "short", limit = "5 per 60s", penalty = { base = "2s", cap = "10s" } },
            { name = "long", limit = "50 per 1h", ban = "2h" },
        ]
        "#,
    );
    let block = |action, seconds| block_on(gate.block(&call(action, "203.0.113.7"), Span::from_secs(seconds)));
    for action in ["page", "trial"] {
        assert!(matches!(block(action, 60), Err(CheckError::Block(BlockError::NoPenalty))), "{action}");
    }
    let too_long = block("login", 7201).unwrap_err().to_string();
    assert!(too_long.contains("2h") && too_long.contains("login.long"), "{too_long}");
    let waits = block("login", 7200).unwrap().limits.into_iter().map(|limit| limit.retry_after).collect::<Vec<_>>();
    assert_eq!(waits, [Some(10), Some(7200)]);
    let everything = Query { action: None, ..call("", "203.0.113.9") };
    let report = block_on(gate.block(&everything, Span::from_secs(10))).unwrap();
    assert_eq!(report.limits.len(), 2, "{report:?}");
}
