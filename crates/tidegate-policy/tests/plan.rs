//! The operations that a plan asks of a store: the limits and their keys.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::HashSet;
use std::net::IpAddr;

use http::HeaderMap;
use tidegate_core::{Key, Op, ShareLevel, Verb};
use tidegate_policy::{
    ActionSpec, KeyError, KeySeed, LimitSpec, ListStatus, PathError, Plan, Policy, PolicySources, Query,
    UncountableError,
};

fn policy(file: &str) -> Policy {
    Policy::load(PolicySources::new().file("test.toml", file)).unwrap_or_else(|errors| panic!("{errors}"))
}

fn plan(file: &str) -> std::sync::Arc<Plan> {
    policy(file).plan().clone()
}

fn seed() -> KeySeed {
    KeySeed::new(*b"0123456789abcdef")
}

fn ops(plan: &Plan, action: &str, query: &Query<'_>, verb: Verb) -> Result<Vec<Op>, KeyError> {
    let id = plan.find_action(action).unwrap();
    plan.ops(Some(id), query, &seed(), verb, 7).map(|batch| batch.ops().to_vec())
}

fn one_key(parts: &[&str], query: &Query<'_>) -> Key {
    let policy = Policy::builder().action("a", ActionSpec::new("5 per 60s").key(parts)).build().unwrap();
    ops(policy.plan(), "a", query, Verb::Take).unwrap()[0].key
}

fn ip(text: &str) -> Option<IpAddr> {
    Some(text.parse().unwrap())
}

#[test]
fn addresses_count_by_their_network() {
    let key = |text: &str| one_key(&["client_ip"], &Query { ip: ip(text), ..Query::default() });
    assert_eq!(key("::ffff:1.2.3.4"), key("1.2.3.4"));
    assert_ne!(key("1.2.3.4"), key("1.2.3.5"));
    assert_ne!(key("2001:db8:0:1::1"), key("2001:db8:0:2::1"));
    let same: HashSet<Key> = (0..10_000_u32).map(|n| key(&format!("2001:db8:0:1:{:x}:{:x}::1", n % 7, n))).collect();
    assert_eq!(same.len(), 1);
}

#[test]
fn forged_forwarding_headers_share_one_key() {
    let policy =
        Policy::builder().trusted_proxies(["10.0.0.0/8"]).action("a", ActionSpec::new("5 per 60s")).build().unwrap();
    let peer = "203.0.113.9".parse().unwrap();
    let keys: HashSet<Key> = (0..10_000_u32)
        .map(|n| {
            let mut headers = HeaderMap::new();
            let forged = format!("{}, {}", std::net::Ipv4Addr::from(n.wrapping_mul(2_654_435_761)), n % 256);
            headers.insert("x-forwarded-for", forged.parse().unwrap());
            let ip = policy.inbound().forwarding.client_ip(peer, &headers);
            let query = Query { ip: Some(ip), headers: Some(&headers), ..Query::default() };
            ops(policy.plan(), "a", &query, Verb::Take).unwrap()[0].key
        })
        .collect();
    assert_eq!(keys.len(), 1);
}

#[test]
fn key_parts_are_separated_unambiguously() {
    let mut headers = HeaderMap::new();
    let mut key = |one: &str, other: &str| {
        headers.insert("x-one", one.parse().unwrap());
        headers.insert("x-other", other.parse().unwrap());
        one_key(&["header:x-one", "header:x-other"], &Query { headers: Some(&headers), ..Query::default() })
    };
    assert_ne!(key("a_b", "c"), key("a", "b_c"));
    assert_ne!(key("ab", ""), key("a", "b"));
    assert_ne!(key("", "ab"), key("ab", ""));
    assert_eq!(key("a", "b"), key("a", "b"));
}

#[test]
fn every_key_part_changes_the_key() {
    let mut headers = HeaderMap::new();
    headers.insert("x-tenant", "t1".parse().unwrap());
    headers.insert("cookie", "a=1; session=s1; session=s2".parse().unwrap());
    let query = Query {
        ip: ip("1.2.3.4"),
        key: Some("k1"),
        platform: Some("web"),
        method: Some("GET"),
        path: Some("/x/../search?b=2&q=a+b%21"),
        host: Some("Example.org:80"),
        headers: Some(&headers),
        ..Query::default()
    };
    let parts = ["client_ip", "key", "platform", "header:x-tenant", "cookie:session", "query:q", "method", "host"];
    let base = one_key(&parts, &query);
    let mut other = headers.clone();
    other.insert("x-tenant", "t2".parse().unwrap());
    let mut cookies = headers.clone();
    cookies.insert("cookie", "session=s2".parse().unwrap());
    for changed in [
        Query { ip: ip("1.2.3.5"), ..query },
        Query { key: Some("k2"), ..query },
        Query { platform: Some("api"), ..query },
        Query { headers: Some(&other), ..query },
        Query { headers: Some(&cookies), ..query },
        Query { path: Some("/search?q=a"), ..query },
        Query { path: Some("/search"), ..query },
        Query { method: Some("POST"), ..query },
        Query { host: Some("example.com"), ..query },
    ] {
        assert_ne!(one_key(&parts, &changed), base, "{changed:?}");
    }
    // Other spellings of the same request.
    for same in [
        Query { path: Some("/search?%71=a%20b!&q=z#q=y"), ..query },
        Query { host: Some("example.ORG."), ..query },
        Query { ip: ip("::ffff:1.2.3.4"), ..query },
    ] {
        assert_eq!(one_key(&parts, &same), base, "{same:?}");
    }
    assert_eq!(one_key(&["path"], &query), one_key(&["path"], &Query { path: Some("/search/"), ..query }));
}

#[test]
fn a_missing_key_part_is_named() {
    let plan = plan(
        r#"
        [inbound.global]
        limit = "1000 per 1h"
        [inbound.action.a]
        key = ["key", "platform", "header:X-Tenant"]
        limit = "5 per 60s"
        "#,
    );
    let missing = |query: Query<'_>| ops(&plan, "a", &query, Verb::Take).unwrap_err().to_string();
    assert_eq!(missing(Query::default()), "`key` is missing: the limit `a` counts by it");
    let query = Query { key: Some("k"), ..Query::default() };
    assert_eq!(missing(query), "`platform` is missing: the limit `a` counts by it");
    let tv = Query { platform: Some("tv"), ..query };
    assert_eq!(missing(tv), "unknown platform \"tv\": expected web, mobile, api or admin");
    let query = Query { platform: Some("web"), ..query };
    assert_eq!(missing(query), "`header:x-tenant` is missing: the limit `a` counts by it");
    // A request that lacks the header is counted with all others that lack it.
    let headers = HeaderMap::new();
    let query = Query { headers: Some(&headers), ..query };
    assert_eq!(missing(query), "`ip` is missing: the limit `global` counts by it");
    let absent = ops(&plan, "a", &Query { ip: ip("1.2.3.4"), ..query }, Verb::Take).unwrap();
    let mut empty = HeaderMap::new();
    empty.insert("x-tenant", "".parse().unwrap());
    let empty = ops(&plan, "a", &Query { ip: ip("1.2.3.4"), headers: Some(&empty), ..query }, Verb::Take).unwrap();
    assert_ne!(absent[0].key, empty[0].key);
    let KeyError::Missing(part) = ops(&plan, "a", &Query::default(), Verb::Take).unwrap_err() else { panic!() };
    assert_eq!((part.part.as_str(), part.limit.as_str()), ("key", "a"));
    let (limit, part) = plan.part_not_in_requests(plan.find_action("a").ok()).unwrap();
    assert_eq!((plan.limit_info(limit).name(), part.to_string().as_str()), ("a", "key"));
    assert_eq!(plan.part_not_in_requests(None), None);
}

#[test]
fn each_verb_asks_its_limits() {
    let plan = plan(
        r#"
        [inbound.global]
        limit = "1000 per 1h"
        [inbound.action.a]
        limit = ["5 per 60s", "8 in flight", "unlimited"]
        cost = 2
        "#,
    );
    let query = Query { ip: ip("1.2.3.4"), ..Query::default() };
    let asked = |verb| -> Vec<(String, u64)> {
        let ops = ops(&plan, "a", &query, verb).unwrap();
        assert!(ops.iter().all(|op| op.verb == verb));
        ops.iter().map(|op| (plan.limit_info(op.limit).name().to_owned(), op.cost)).collect()
    };
    let all = |names: &[(&str, u64)]| names.iter().map(|(name, cost)| ((*name).to_owned(), *cost)).collect::<Vec<_>>();
    assert_eq!(asked(Verb::Take), all(&[("a.1", 2), ("a.2", 1), ("global", 2)]));
    assert_eq!(asked(Verb::Peek), asked(Verb::Take));
    assert_eq!(asked(Verb::Refund), all(&[("a.1", 2), ("global", 2)]));
    assert_eq!(asked(Verb::Release), all(&[("a.2", 1)]));
    assert_eq!(asked(Verb::Renew), all(&[("a.2", 1)]));
    assert_eq!(asked(Verb::Reset), all(&[("a.1", 2), ("a.2", 1)]));
    let unmatched = plan.ops(None, &query, &seed(), Verb::Take, 9).unwrap();
    assert_eq!((unmatched.holder(), unmatched.ops().len(), unmatched.ops()[0].cost), (9, 1, 1));
    assert_eq!(plan.ops(None, &query, &seed(), Verb::Reset, 9).unwrap().ops().len(), 1);
    let action = plan.action(plan.find_action("a").unwrap());
    assert!(action.has_concurrency() && !plan.global_has_concurrency() && !action.is_unlimited());
    // Limits with the same key template share the key, but each limit has entries of its own.
    let ops = ops(&plan, "a", &Query { cost: Some(5), ..query }, Verb::Take).unwrap();
    assert_eq!(ops.iter().map(|op| op.cost).collect::<Vec<_>>(), [5, 1, 5]);
    assert!(ops.iter().all(|op| op.key == ops[0].key));
}

#[test]
fn several_actions_ask_each_limit_once() {
    let plan = plan(
        r#"
        [inbound.global]
        limit = "1000 per 1h"
        [inbound.action.static]
        match = { path = "/static/*" }
        limit = "500 per 1h"
        cost = 3
        mode = "shadow"
        [inbound.action.login]
        match = { path = "/login" }
        limits = [{ limit = "5 per 60s" }, { key = ["path"], limit = "9 per 60s" }]
        "#,
    );
    let asked = |path: &str, verb| -> Vec<(String, u64)> {
        let query = Query { ip: ip("1.2.3.4"), path: Some(path), ..Query::default() };
        let actions = plan.matching_actions(&query).unwrap();
        let batch = plan.ops(actions, &query, &seed(), verb, 7).unwrap();
        batch.ops().iter().map(|op| (plan.limit_info(op.limit).name().to_owned(), op.cost)).collect()
    };
    let all = |names: &[(&str, u64)]| names.iter().map(|(name, cost)| ((*name).to_owned(), *cost)).collect::<Vec<_>>();
    let both = "/static/../login";
    assert_eq!(asked(both, Verb::Take), all(&[("login.1", 1), ("login.2", 1), ("global", 3), ("static", 3)]));
    assert_eq!(asked(both, Verb::Reset), all(&[("login.1", 1), ("login.2", 1), ("static", 3)]));
    assert_eq!(asked("/login", Verb::Take), all(&[("login.1", 1), ("login.2", 1), ("global", 1)]));
    // A path that can be read as two is counted as both.
    let twice = asked("/a%2fb/../login", Verb::Take);
    assert_eq!(twice, all(&[("login.1", 1), ("login.2", 1), ("global", 1), ("login.2", 1)]));
}

#[test]
fn the_mode_of_inbound_is_the_default() {
    let shadows = |inbound: &str| -> Vec<bool> {
        let actions = [("a", ""), ("b", "mode = \"enforce\""), ("c", "mode = \"shadow\"")]
            .map(|(name, mode)| format!("[inbound.action.{name}]\nlimit = \"5/s\"\n{mode}\n"));
        let plan = plan(&format!("[inbound]\n{inbound}\n[inbound.global]\nlimit = \"9/s\"\n{}", actions.concat()));
        plan.limits().iter().map(|(_, limit)| limit.is_shadow()).collect()
    };
    assert_eq!(shadows(""), [false, false, false, true]);
    assert_eq!(shadows("mode = \"shadow\""), [true, true, false, true]);
}

#[test]
fn too_many_limits_for_a_decision_are_errors() {
    let limits = |name: &str, path: &str| {
        let limits: String = (2..7).map(|n| format!("\"{n} per 60s\", ")).collect();
        format!("[inbound.action.{name}]\nmatch = {{ path = \"{path}\" }}\nlimit = [{limits}]\n")
    };
    let plan = plan(&format!("{}{}", limits("a", "/a/*"), limits("b", "/b")));
    let query = Query { ip: ip("1.2.3.4"), path: Some("/a/../b"), ..Query::default() };
    let actions = plan.matching_actions(&query).unwrap();
    assert_eq!(plan.action_names(actions).as_deref(), Some("b+a"));
    assert_eq!(
        plan.ops(actions, &query, &seed(), Verb::Take, 7).unwrap_err(),
        KeyError::Uncountable(UncountableError::Path(PathError::TooMany))
    );
}

#[test]
fn clusters_decide_several_actions_only_within_slots() {
    let plan = |global: &str| {
        plan(&format!(
            "[store]\nurl = \"redis-cluster://127.0.0.1\"\n{global}\
             [inbound.action.a]\nmatch = {{ path = \"/a/*\" }}\nkey = [\"client_ip\", \"method\"]\nlimit = \"5 per 60s\"\n\
             [inbound.action.b]\nmatch = {{ path = \"/b\" }}\nkey = \"client_ip\"\nlimit = \"5 per 60s\"\n"
        ))
    };
    let query = Query { ip: ip("1.2.3.4"), method: Some("GET"), path: Some("/a/../b"), ..Query::default() };
    for (global, together) in [("[inbound.global]\nlimit = \"9 per 60s\"\n", true), ("", false)] {
        let plan = plan(global);
        let asked = plan.ops(plan.matching_actions(&query).unwrap(), &query, &seed(), Verb::Take, 7);
        assert_eq!(asked.is_ok(), together, "{asked:?}");
    }
}

#[test]
fn overflow_keys_are_shared_by_network() {
    let plan = plan(
        r#"
        [inbound.action.a]
        limits = [{ limit = "5 per 60s" }, { key = ["key"], limit = "5 per 60s" }]
        "#,
    );
    let limits = plan.action(plan.find_action("a").unwrap()).limits().to_vec();
    let shared = |limit: usize, share, text: &str| plan.shared_key(limits[limit], share, ip(text), &seed());
    let near = |text| shared(0, ShareLevel::SmallNetwork, text);
    assert_eq!(near("192.0.2.1"), near("::ffff:192.0.2.200"));
    assert_ne!(near("192.0.2.1"), near("192.0.3.1"));
    assert_eq!(near("2001:db8:1:1::1"), near("2001:db8:1:ffff::1"));
    assert_ne!(near("2001:db8:1:1::1"), near("2001:db8:2:1::1"));
    let wide = |text| shared(0, ShareLevel::LargeNetwork, text);
    assert_eq!(wide("192.0.2.1"), wide("192.0.255.1"));
    assert_ne!(wide("192.0.0.1"), wide("192.1.0.1"));
    assert_ne!(wide("192.0.0.1").1, near("192.0.0.1").1, "a /16 isn't its first /24");
    assert_eq!(wide("2001:db8:1::"), wide("2001:db8:2::"));
    assert_ne!(wide("2001:db8::"), wide("2001:db9::"));
    assert_eq!(shared(0, ShareLevel::All, "192.0.2.1"), shared(0, ShareLevel::All, "2001:db8::1"));
    for (share, key) in [near("192.0.2.1"), wide("192.0.2.1")] {
        assert!(share < ShareLevel::All && key != shared(0, ShareLevel::All, "192.0.2.1").1);
    }
    let everybody = shared(1, ShareLevel::SmallNetwork, "192.0.2.1");
    assert_eq!(everybody, shared(1, ShareLevel::All, "2001:db8::1"));
    assert_eq!(everybody.0, ShareLevel::All, "without an address in the key there is no network to share it with");
    let own = ops(&plan, "a", &Query { ip: ip("192.0.2.0"), key: Some("k"), ..Query::default() }, Verb::Take).unwrap();
    assert_ne!(own[0].key, near("192.0.2.0").1, "a shared key is never somebody's own");
}

#[test]
fn different_seeds_give_different_keys() {
    let plan = plan("[inbound.action.a]\nlimit = \"5 per 60s\"\n");
    let query = Query { ip: ip("1.2.3.4"), ..Query::default() };
    let key =
        |bytes| plan.ops(plan.find_action("a").ok(), &query, &KeySeed::new(bytes), Verb::Take, 0).unwrap().ops()[0].key;
    assert_ne!(key([0; 16]), key([1; 16]));
    assert_eq!(format!("{:?}", KeySeed::new([7; 16])), "KeySeed(…)");
}

#[test]
fn unknown_actions_suggest_names_or_use_default() {
    let policy = Policy::builder()
        .action("login", ActionSpec::preset("login"))
        .action(
            "export",
            ActionSpec::limits([
                LimitSpec::new("1 per 1s").name("burst"),
                LimitSpec::new(["5 per 60s", "9 per calendar day"]).name("long"),
            ]),
        )
        .build()
        .unwrap();
    let plan = policy.plan();
    let unknown = plan.find_action("logn").unwrap_err();
    assert_eq!((unknown.found.as_str(), unknown.nearest.as_deref()), ("logn", Some("login")));
    assert_eq!(unknown.to_string(), "unknown action \"logn\"; did you mean \"login\"?");
    let names: Vec<&str> = plan.limits().iter().map(|(id, _)| plan.limit_info(id).name()).collect();
    assert_eq!(names, ["login", "export.burst", "export.long.1", "export.long.2"]);
    let with_default = Policy::builder().action("default", ActionSpec::new("1 per 1s")).build().unwrap();
    assert_eq!(with_default.plan().find_action("anything").map(|id| id.index()), Ok(0));
}

#[test]
fn action_presets_have_their_documented_limits() {
    for (name, limit, ban) in [
        ("login", "5 per 60s", 600),
        ("otp_request", "3 per 120s", 900),
        ("password_reset", "2 per 5m", 1200),
        ("register", "5 per 60s", 300),
        ("api_call", "5 per 60s", 300),
    ] {
        let policy = Policy::builder().action("a", ActionSpec::preset(name)).build().unwrap();
        let (id, found) = policy.plan().limits().iter().next().unwrap();
        assert_eq!(policy.plan().limit_info(id).quantity().to_string(), limit);
        let penalty = found.penalty().unwrap();
        assert_eq!((penalty.block_length(1).as_secs_ceil(), penalty.max_strikes()), (ban, 1));
    }
}

#[test]
fn allow_and_deny_lists_are_applied() {
    let policy = Policy::builder().allow("10.1.0.0/16").deny(["10.0.0.0/8", "2001:db8::1"]).build().unwrap();
    let listed = |text: &str| policy.plan().list_status(text.parse().unwrap());
    assert_eq!(listed("10.1.2.3"), ListStatus::Allow);
    assert_eq!(listed("::ffff:10.2.2.3"), ListStatus::Deny);
    assert_eq!(listed("2001:db8::1"), ListStatus::Deny);
    assert_eq!(listed("2001:db8::2"), ListStatus::Neither);
}

#[test]
fn the_design_documents_policy_is_valid() {
    let text = r#"
[store]
url = "memory"
on_outage = "local"

[inbound]
listen = "127.0.0.1:8080"
upstream = "http://127.0.0.1:3000"
trusted_proxies = ["127.0.0.0/8"]
allow = ["10.1.0.0/16"]

[inbound.global]
limit = "1000 per 1h"
count = "admitted"
penalty = { base = "2s", cap = "1h", forgive_after = "1h" }

[inbound.action.login]
match = { method = "POST", path = "/login" }
key = ["client_ip"]
limit = "5 per 60s"
penalty = { base = "2s", cap = "1h" }
mode = "enforce"

[api]
listen = "127.0.0.1:8082"

[admin]
listen = "127.0.0.1:8083"
"#;
    assert_eq!(plan(text).actions().len(), 1);
}

#[test]
fn huge_files_are_read_in_bounded_time() {
    let deep = format!("[{}]\n", vec!["a"; 100_000].join("."));
    let dotted = format!("{} = 1\n", vec!["a"; 100_000].join("."));
    let lists = format!("a = {}", "[".repeat(20_000));
    let inline = format!("a = {}", "{a=".repeat(20_000));
    let many_keys: String = (0..20_000).map(|n| format!("key{n} = 1\n")).collect();
    let many_actions: String = (0..5_000).map(|n| format!("[inbound.action.a{n}]\n")).collect();
    for text in [deep, dotted, lists, inline, many_keys, many_actions] {
        assert!(Policy::load(PolicySources::new().file("x", text)).is_err());
    }
}

#[test]
fn thousands_of_actions_are_read() {
    let many: String = (0..4_000)
        .map(|n| format!("[inbound.action.a{n}]\nlimit = \"5 per 60s\"\nmatch = {{ path = \"/x{n}/*\" }}\nkey = \"header:x{n}\"\n"))
        .collect();
    let plan = plan(&many);
    let query = Query { path: Some("/x3999/y"), ..Query::default() };
    assert_eq!(plan.matching_actions(&query).unwrap().first().map(|id| plan.action(id).name()), Some("a3999"));
}

#[test]
fn settings_beside_a_preset_override_it() {
    let words = |beside: &str| {
        let plan = plan(&format!("[inbound.action.a]\npreset = \"login\"\n{beside}\n"));
        plan.limit_info(plan.action(plan.find_action("a").unwrap()).limits()[0]).description().to_owned()
    };
    assert_eq!(words(""), "at most 5 in any 60 s; over that, blocked for 10 min");
    assert_eq!(words("limit = \"9 per 60s\""), "at most 9 in any 60 s; over that, blocked for 10 min");
    assert_eq!(words("ban = \"60s\""), "at most 5 in any 60 s; over that, blocked for 60 s");
    assert_eq!(words("ban = \"none\""), "at most 5 in any 60 s");
    assert!(
        words("penalty = {}")
            .starts_with("at most 9 in any 60 s (5, and one after each block); over that, blocks of 2 s, 4 s … 1 h")
    );
}

#[test]
fn encoded_slashes_evade_no_match_by_default() {
    let policy = |quirks: &str| {
        plan(&format!(
            "[inbound]\n{quirks}\n[inbound.action.login]\nlimit = \"5 per 60s\"\n\
             match = {{ method = \"POST\", path = \"/login\" }}\n"
        ))
    };
    let (default, off, case) =
        (policy(""), policy("path_quirks = []"), policy("path_quirks = [\"case\", \"encoded_slash\"]"));
    for path in ["/%2flogin", "/%2Flogin", "/x%2f..%2flogin", "/login%2f", "/x/..%5Clogin"] {
        let query = Query { method: Some("POST"), path: Some(path), ..Query::default() };
        let meets = |plan: &Plan| plan.matching_actions(&query).unwrap().first().is_some();
        assert!(meets(&default) && meets(&case) && !meets(&off), "{path}");
    }
}

#[test]
fn caddy_and_windows_quirks_include_related_quirks() {
    for quirk in ["caddy", "windows"] {
        let plan = plan(&format!(
            "[inbound]\npath_quirks = [\"{quirk}\"]\n[inbound.action.login]\nlimit = \"5 per 60s\"\n\
             match = {{ path = \"/login\" }}\n"
        ));
        for path in ["/LOGIN", "/login.", "/login%20", "/Login%2e", "/x%2f..%2flogin. ", "/lOg%C4%B0n", "/login"] {
            let query = Query { path: Some(path), ..Query::default() };
            assert!(plan.matching_actions(&query).unwrap().first().is_some(), "{quirk}: {path}");
        }
    }
}

#[test]
fn refused_calls_are_never_counted_in_flight() {
    let words = plan("[inbound.action.a]\nlimit = [\"8 in flight\", \"5 per 60s\"]\ncount = \"all\"\n").describe();
    assert!(words.contains("a.1, by client_ip: at most 8 at the same time\n"), "{words}");
    assert!(
        words.contains("a.2, by client_ip: at most 5 in any 60 s, including calls that other limits refuse\n"),
        "{words}"
    );
}

#[test]
fn unavailable_key_parts_are_allowed_without_proxy() {
    let action = "[inbound.action.a]\nmatch = { path = \"/a\" }\nkey = \"key\"\nlimit = \"5 per 60s\"\n";
    assert_eq!(plan(action).actions().len(), 1);
    let told = |sources: PolicySources| Policy::load(sources).map(|_| ()).unwrap_err().to_string();
    let proxy = ("TIDEGATE__INBOUND__UPSTREAM", "http://127.0.0.1:3000");
    assert!(told(PolicySources::new().file("x", action).env([proxy])).contains("--> x:3:7"));
    let keyless = action.replace("key = \"key\"\n", "");
    let key = ("TIDEGATE__INBOUND__ACTION__A__KEY", "client_ip, platform");
    assert!(told(PolicySources::new().file("x", keyless).env([proxy, key])).contains("counts by `platform`"));
}

#[test]
fn in_flight_limits_disable_forward_auth() {
    for (toml, answered) in [
        ("", true),
        ("[api]\nforward_auth = false\n", false),
        ("[inbound.action.a]\nmatch = { path = \"/\" }\nlimit = \"5 per 60s\"\n", true),
        ("[inbound.action.a]\nlimit = \"8 in flight\"\n[api]\nforward_auth = true\n", true),
        ("[inbound.action.a]\nmatch = { path = \"/\" }\nlimit = \"8 in flight\"\n", false),
        ("[inbound.global]\nlimit = [\"5 per 60s\", \"8 in flight\"]\n", false),
        ("[inbound.global]\nlimit = \"8 in flight\"\n[api]\nlisten = \"off\"\nforward_auth = true\n", false),
        ("[inbound.global]\nlimit = \"8 in flight\"\n[api]\nforward_auth = false\ndeny_status = 403\n", false),
    ] {
        assert_eq!(policy(toml).api().forward_auth, answered, "{toml}");
    }
}
