//! The meaning of `[store]`.
#![expect(clippy::unwrap_used, reason = "a test's errors are its failures")]

use std::path::Path;
use std::time::Duration;

use tidegate_core::{LeaseSpec, LimitKind, OnOutage, Span, Verb};
use tidegate_policy::store::{ClusterMode, OnFull, StoreEngine, SyncMode};
use tidegate_policy::{KeySeed, Plan, Policy, PolicySources, Query, StoreUrl};

fn load(text: &str) -> Policy {
    Policy::load(PolicySources::new().file("tidegate.toml", text)).unwrap()
}

fn affinity(plan: &Plan, action: Option<&str>, query: &Query<'_>) -> u64 {
    let action = action.map(|name| plan.find_action(name).unwrap());
    plan.ops(action, query, &KeySeed::new([7; 16]), Verb::Take, 0).unwrap().context().affinity
}

#[test]
fn store_urls_select_the_engine() {
    for (url, engine) in [
        ("redis://127.0.0.1", StoreEngine::Redis),
        ("rediss://gate:word@redis.example:6380/2", StoreEngine::Redis),
        ("redis-sentinel://a:26379,b:26379/main", StoreEngine::Redis),
        ("redis-cluster://a:7000,b:7000", StoreEngine::RedisCluster),
        ("mysql://gate@db/limits", StoreEngine::MySql),
        ("mariadb://gate@db/limits", StoreEngine::MySql),
        ("postgres://gate@db/limits", StoreEngine::Postgres),
        ("mongodb://gate:word@db/limits", StoreEngine::MongoDb),
    ] {
        let policy = load(&format!("[store]\nurl = \"{url}\"\n"));
        let StoreUrl::Server(found, whole) = &policy.store().url else { panic!("{url}") };
        assert_eq!((*found, whole.expose()), (engine, url));
        let shown = format!("{:?} {}", policy.store(), policy.store().url);
        assert!(!shown.contains("word") && !shown.contains("gate@"), "{shown}");
    }
    for (url, path) in [("file:state.redb", "state.redb"), ("file:///var/lib/x", "/var/lib/x"), ("file:/x", "/x")] {
        let policy = load(&format!("[store]\nurl = \"{url}\"\n"));
        assert_eq!(policy.store().url, StoreUrl::File(Path::new(path).to_owned()));
    }
}

#[test]
fn shown_urls_have_hosts_and_no_login() {
    for (url, shown) in [
        ("redis://127.0.0.1", "redis://127.0.0.1:6379"),
        ("redis://[::1]", "redis://[::1]:6379"),
        ("rediss://hunter2:hunter2@redis.example:6380/2", "rediss://redis.example:6380"),
        ("redis://:hunter2@[::1]:6379", "redis://[::1]:6379"),
        ("redis-sentinel://:hunter2@a:1,b/main", "redis-sentinel://a:1,b:26379"),
        ("mysql://hunter2:hunt@er2@db/limits?tls=hunter2", "mysql://db:3306"),
        ("redis://:9/hunter2@db", "redis://…"),
        ("postgres://db/limits?password=@hunter2", "postgres://…"),
    ] {
        assert_eq!(load(&format!("[store]\nurl = \"{url}\"\n")).store().url.to_string(), shown, "{url}");
    }
}

#[test]
fn store_settings_are_applied() {
    let policy = load(
        "[store]\nurl = \"redis://127.0.0.1\"\non_outage = \"deny\"\ntimeout = \"20ms\"\nprefix = \"shop\"\nnodes = 3\n\
         node_name = \"web-1:8080\"\nnode_expiry = \"90s\"\n\
         sync = \"always\"\non_full = \"continue\"\ncluster = \"reserve\"\n\
         [inbound.action.a]\nlimit = \"100 per 60s\"\non_outage = \"allow\"\nlease = { share = \"20%\", max_age = \"1s\" }\n\
         [inbound.action.b]\nlimit = \"100 per 60s\"\n",
    );
    let store = policy.store();
    assert_eq!((store.timeout, store.prefix.as_str(), store.nodes), (Duration::from_millis(20), "shop", 3));
    assert_eq!((store.node_name.as_deref(), store.node_expiry), (Some("web-1:8080"), Span::from_secs(90)));
    assert_eq!((store.sync, store.cluster, store.on_full), (SyncMode::Always, ClusterMode::Reserve, OnFull::Continue));
    let limits: Vec<_> = policy.plan().limits().iter().map(|(_, limit)| limit).collect();
    assert_eq!(limits[0].sharing().on_outage, OnOutage::Allow);
    assert_eq!(limits[1].sharing().on_outage, OnOutage::Deny);
    let lease = LeaseSpec { permille: 200, max_age: Span::from_secs(1) };
    assert_eq!((limits[0].sharing().lease, limits[1].sharing().lease), (Some(lease), None));
    let LimitKind::Window(window) = limits[0].kind() else { panic!("{:?}", limits[0]) };
    assert_eq!(window.lead(), Span::from_secs(1), "a slice counts when its lease ends");
}

#[test]
fn sync_always_denies_when_full_by_default() {
    let on_full = |text: &str| load(&format!("[store]\nurl = \"file:state\"\n{text}")).store().on_full;
    for (text, expected) in [
        ("", OnFull::Continue),
        ("sync = \"1s\"", OnFull::Continue),
        ("sync = \"always\"", OnFull::Deny),
        ("on_full = \"deny\"", OnFull::Deny),
        ("sync = \"always\"\non_full = \"continue\"", OnFull::Continue),
    ] {
        assert_eq!(on_full(text), expected, "{text}");
    }
}

/// All keys of a decision are on one server of a cluster. The keys of the global limit are on it in every decision.
#[test]
fn a_decisions_keys_share_a_cluster_slot() {
    let cluster = "[store]\nurl = \"redis-cluster://127.0.0.1:7000\"\n";
    let global = "[inbound.global]\nlimit = \"1000 per 1h\"\n";
    let actions = "[inbound.action.login]\nkey = [\"key\", \"client_ip\"]\nlimit = \"5 per 60s\"\n\
                   [inbound.action.search]\nlimit = \"50 per 60s\"\n";
    let query = |ip: &str, key| Query { ip: Some(ip.parse().unwrap()), key: Some(key), ..Query::default() };
    let with_global = load(&format!("{cluster}{global}{actions}"));
    let plan = with_global.plan();
    let first = affinity(plan, Some("login"), &query("192.0.2.1", "a"));
    assert_ne!(first, 0);
    assert_eq!(first, affinity(plan, Some("login"), &query("192.0.2.1", "b")));
    assert_eq!(first, affinity(plan, Some("search"), &query("192.0.2.1", "a")));
    assert_eq!(first, affinity(plan, None, &query("192.0.2.1", "a")));
    assert_ne!(first, affinity(plan, Some("login"), &query("192.0.2.2", "a")));
    let alone = load(&format!("{cluster}{actions}"));
    let of = |key| affinity(alone.plan(), Some("login"), &query("192.0.2.1", key));
    assert_ne!(of("a"), of("b"), "without a global limit nothing ties the keys of one address together");
    let elsewhere = load(&format!("{global}{actions}"));
    assert_eq!(affinity(elsewhere.plan(), Some("login"), &query("192.0.2.1", "a")), 0);
}

/// Nodes whose files have other limits, or another order, share the limits that are the same.
#[test]
fn equal_limits_have_equal_tags_across_plans() {
    let one = load("[inbound.action.a]\nlimit = \"5 per 60s\"\n[inbound.action.b]\nlimit = \"1/s\"\n");
    let two = load(
        "[inbound.global]\nlimit = \"9 per 60s\"\n[inbound.action.b]\nlimit = \"2/s\"\n[inbound.action.a]\nlimit = \"7 per 1h\"\n",
    );
    let tags = |policy: &Policy| {
        let plan = policy.plan();
        let named = plan.limits().iter().map(|(id, _)| (plan.limit_info(id).name().to_owned(), plan.limits().tag(id)));
        named.collect::<std::collections::BTreeMap<_, _>>()
    };
    let (one, two) = (tags(&one), tags(&two));
    assert_eq!((one["a"], one["b"]), (two["a"], two["b"]));
    assert!(two["global"] != two["a"] && two["a"] != two["b"]);
    let other_kind = tags(&load("[inbound.action.a]\nlimit = \"5/s\"\n"));
    assert_ne!(one["a"], other_kind["a"], "a rate remembers nothing that a window could use");
}

#[test]
fn a_login_that_is_not_utf8_is_refused() {
    for scheme in ["redis", "redis-cluster", "redis-sentinel", "mysql", "postgres", "mongodb"] {
        let read = |login: &str| {
            let url = format!("{scheme}://{login}@h/0");
            Policy::load(PolicySources::new().file("t.toml", format!("[store]\nurl = \"{url}\"\n")))
        };
        assert!(read("u:%C3%A9").is_ok(), "{scheme}");
        for login in ["u:hunter2pw%ff", "hunter2pw%ff:p"] {
            let error = read(login).expect_err(scheme).to_string();
            assert!(error.contains("isn't UTF-8") && !error.contains("hunter2pw"), "{error}");
        }
    }
}

#[test]
fn errors_of_urls_show_no_password() {
    for url in [
        "redis:/u:hunter2pw@h",
        "redis//u:hunter2pw@h",
        "mysql:u:hunter2pw@h/db",
        "u:hunter2pw@h:1",
        "memory u:hunter2pw@h",
    ] {
        let file = PolicySources::new().file("t.toml", format!("[store]\nurl = \"{url}\"\n"));
        let variable = PolicySources::new().file("t.toml", "").env([("TIDEGATE__STORE__URL", url)]);
        for sources in [file, variable] {
            let error = Policy::load(sources).unwrap_err().to_string();
            assert!(!error.contains("hunter2pw") && error.contains("URL"), "{error}");
        }
    }
}
