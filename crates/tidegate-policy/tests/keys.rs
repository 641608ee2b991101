//! The keys under which requests are counted, in all spellings and with missing parts.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::HashSet;

use http::{HeaderMap, HeaderName, HeaderValue};
use tidegate_core::{Key, ShareLevel, Verb};
use tidegate_policy::{KeySeed, Plan, Policy, PolicySources, Query};

fn plan(file: &str) -> std::sync::Arc<Plan> {
    let policy = Policy::load(PolicySources::new().file("test.toml", file)).unwrap_or_else(|errors| panic!("{errors}"));
    policy.plan().clone()
}

/// A plan with one limit by this part.
fn by(part: &str, more: &str) -> std::sync::Arc<Plan> {
    plan(&format!("[inbound.action.a]\nkey = [\"{part}\"]\nlimit = \"5 per 60s\"\n{more}"))
}

fn headers(lines: &[(&str, &str)]) -> HeaderMap {
    let line = |(name, value): &(&str, &str)| {
        (HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_str(value).unwrap())
    };
    let mut map = HeaderMap::new();
    for (name, value) in lines.iter().map(line) {
        map.append(name, value);
    }
    map
}

fn told(plan: &Plan, query: &Query<'_>) -> Result<Vec<Key>, String> {
    let batch = plan.ops(plan.find_action("a").ok(), query, &KeySeed::new([9; 16]), Verb::Take, 7);
    batch.map(|batch| batch.ops().iter().map(|op| op.key).collect()).map_err(|error| error.to_string())
}

/// The keys of a request from 192.0.2.1 with these headers and this path.
fn request(plan: &Plan, lines: &[(&str, &str)], path: &str) -> Result<Vec<Key>, String> {
    let headers = headers(lines);
    let ip = "192.0.2.1".parse().ok();
    told(plan, &Query { ip, path: Some(path), headers: Some(&headers), ..Query::default() })
}

#[test]
fn every_spelling_of_a_cookie_is_counted() {
    let plan = by("cookie:sid", "");
    let real = request(&plan, &[("cookie", "sid=REAL")], "/").unwrap()[0];
    for lines in [
        &[("cookie", "sid=\"REAL\"")][..],
        &[("cookie", "sid=\"\\122EAL\"")],
        &[("cookie", "sid=\"\\R\\E\\A\\L\"")],
        &[("cookie", "sid=%52EAL")],
        &[("cookie", "sid=%25%35%32EAL")],
        &[("cookie", "sid=fresh; sid=REAL")],
        &[("cookie", "sid=REAL; sid=fresh")],
        &[("cookie", "a=b"), ("cookie", "sid=fresh"), ("cookie", "sid=REAL")],
        &[("cookie", "sid=fresh; SID=REAL")],
        &[("cookie", "sid=REAL fresh=1")],
        &[("cookie", "fresh=1,sid=REAL")],
        &[("cookie", "sid=\"REALx")],
    ] {
        let keys = request(&plan, lines, "/").unwrap();
        assert!(keys.contains(&real), "{lines:?}");
        assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len(), "{lines:?}: each value once");
    }
    assert!(!request(&plan, &[("cookie", "sid=REALLY")], "/").unwrap().contains(&real));
    assert_eq!(request(&plan, &[("cookie", "sid=REAL; sid=REAL; sid=\"REAL\"")], "/").unwrap(), [real]);
}

#[test]
fn header_lines_count_separately_and_joined() {
    let plan = by("header:x-api-key", "");
    let one = |value| request(&plan, &[("x-api-key", value)], "/").unwrap()[0];
    let keys = request(&plan, &[("x-api-key", "fresh"), ("x-api-key", "REAL")], "/").unwrap();
    assert_eq!(keys, ["fresh", "REAL", "fresh, REAL", "fresh,REAL"].map(one));
    assert_eq!(request(&plan, &[("x-api-key", "a, b")], "/").unwrap().len(), 1);
}

#[test]
fn every_spelling_of_a_parameter_is_counted() {
    let plan = by("query:token", "");
    let real = request(&plan, &[], "/?token=REAL").unwrap()[0];
    for path in [
        "/?token=a&token=REAL",
        "/?token=REAL&token=a",
        "/?t%6Fken=R%45AL",
        "/?token=%2552EAL",
        "/?token[]=REAL",
        "/?TOKEN=REAL",
        "/?a=1;token=REAL",
        "/?token=REAL;a",
    ] {
        assert!(request(&plan, &[], path).unwrap().contains(&real), "{path}");
    }
}

#[test]
fn too_many_key_values_are_refused_by_name() {
    let cookies = by("cookie:sid", "");
    let four = "sid=1; sid=2; sid=3; sid=4";
    assert_eq!(request(&cookies, &[("cookie", four)], "/").unwrap().len(), 4);
    let five = request(&cookies, &[("cookie", &format!("{four}; sid=5"))], "/");
    assert_eq!(five.unwrap_err(), "`cookie:sid` has more than 4 different values");
    // The values of two parts multiply, and so do limits.
    let both = plan("[inbound.action.a]\nkey = [\"cookie:sid\", \"query:token\"]\nlimit = \"5 per 60s\"\n");
    assert_eq!(request(&both, &[("cookie", four)], "/?token=1&token=2").unwrap().len(), 8);
    let nine = "there are more values to count by than one decision can ask about";
    assert_eq!(request(&both, &[("cookie", four)], "/?token=1&token=2&token=3").unwrap_err(), nine);
    let limits = plan(
        "[inbound.global]\nlimit = \"9 per 1s\"\n[inbound.action.a]\nkey = \"cookie:sid\"\nlimit = [\"5 per 60s\", \"9 per 1h\"]\n",
    );
    assert_eq!(request(&limits, &[("cookie", "sid=1; sid=2; sid=3")], "/").unwrap().len(), 7);
    assert_eq!(request(&limits, &[("cookie", four)], "/").unwrap_err(), nine);
    // A shadow limit refuses nothing.
    let shadow = by("cookie:sid", "mode = \"shadow\"\n");
    assert_eq!(request(&shadow, &[("cookie", &format!("{four}; sid=5"))], "/"), Ok(Vec::new()));
}

#[test]
fn missing_key_parts_follow_the_configured_rule() {
    for part in ["header:x-api-key", "cookie:sid", "query:token", "host", "ipv6/48"] {
        let keys = |more: &str, ip: Option<&str>, from_log| {
            let headers = HeaderMap::new();
            let ip = ip.map(|ip| ip.parse().unwrap());
            let query = Query { ip, path: Some("/"), headers: Some(&headers), from_log, ..Query::default() };
            told(&by(part, more), &query)
        };
        let (one, other) = (Some("192.0.2.1"), Some("192.0.2.2"));
        let shared = keys("missing = \"share\"\n", one, false).unwrap();
        assert_eq!(keys("missing = \"share\"\n", other, false).unwrap(), shared);
        assert_ne!(keys("", one, false).unwrap(), keys("", other, false).unwrap(), "{part}");
        assert_eq!(keys("", one, false), keys("missing = \"by_ip\"\n", one, false));
        assert_ne!(keys("", one, false).unwrap(), shared);
        let told_by_logs = matches!(part, "query:token" | "ipv6/48");
        let in_log = if told_by_logs { keys("", one, false).unwrap() } else { shared.clone() };
        assert_eq!(keys("", one, true).unwrap(), in_log, "{part}: what a log doesn't tell may have been there");
        if part != "ipv6/48" {
            assert_eq!(keys("", None, false).unwrap(), shared, "no address");
        }
        assert_eq!(keys("missing = \"refuse\"\n", one, false).unwrap_err(), format!("`{part}` is missing"));
        assert_eq!(keys("missing = \"skip\"\n", one, false), Ok(Vec::new()));
        assert_eq!(keys("missing = \"refuse\"\nmode = \"shadow\"\n", one, false), Ok(Vec::new()));
    }
}

#[test]
fn a_substituted_address_never_equals_a_value() {
    let plan = by("header:x-api-key", "");
    let missing = request(&plan, &[], "/").unwrap()[0];
    for value in ["", "192.0.2.1", "\u{c0}\u{0}\u{2}"] {
        if let Ok(value) = HeaderValue::from_bytes(value.as_bytes()) {
            let mut headers = HeaderMap::new();
            headers.insert("x-api-key", value);
            let query = Query { ip: "192.0.2.1".parse().ok(), headers: Some(&headers), ..Query::default() };
            assert_ne!(told(&plan, &query).unwrap()[0], missing);
        }
    }
    let by_both = plan_of_both();
    assert_ne!(request(&by_both, &[], "/").unwrap()[0], missing);
    // A part that the caller doesn't give at all is the caller's mistake.
    let ip = "192.0.2.1".parse().ok();
    let forgotten = told(&plan, &Query { ip, ..Query::default() }).unwrap_err();
    assert_eq!(forgotten, "`header:x-api-key` is missing: the limit `a` counts by it");
}

fn plan_of_both() -> std::sync::Arc<Plan> {
    plan("[inbound.action.a]\nkey = [\"header:x-api-key\", \"client_ip\"]\nlimit = \"5 per 60s\"\n")
}

#[test]
fn a_limit_may_override_the_missing_rule() {
    let plan = plan(
        r#"
        [inbound.action.a]
        missing = "skip"
        limits = [
            { name = "x", key = ["header:x-api-key"], limit = "5 per 60s" },
            { name = "y", key = ["header:x-api-key"], limit = "9 per 1h", missing = "by_ip" },
            { name = "z", limit = "99 per 1h" },
        ]
        "#,
    );
    assert_eq!(request(&plan, &[], "/").unwrap().len(), 2);
    assert_eq!(request(&plan, &[("x-api-key", "k")], "/").unwrap().len(), 3);
    let words = plan.describe();
    assert!(words.contains("requests without header:x-api-key don't meet it\n"), "{words}");
    assert!(words.contains("requests without header:x-api-key are counted by their address\n"), "{words}");
    assert_eq!(words.matches("requests without").count(), 2, "{words}");
}

#[test]
fn a_single_slot_cluster_accepts_one_value() {
    let file = "[store]\nurl = \"redis-cluster://127.0.0.1\"\n[inbound.action.a]\nkey = \"cookie:sid\"\nlimit = \"5 per 60s\"\n";
    let plan = plan(file);
    assert_eq!(request(&plan, &[("cookie", "sid=1")], "/").unwrap().len(), 1);
    assert_eq!(request(&plan, &[], "/").unwrap().len(), 1);
    assert!(request(&plan, &[("cookie", "sid=1; sid=2")], "/").is_err());
}

#[test]
fn the_documented_policy_is_valid() {
    let text = include_str!("../../../docs/keys.md");
    let snippets: Vec<&str> = text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert_eq!(snippets.len(), 1);
    assert_eq!(plan(snippets[0]).limits().len(), 2);
}

fn address(plan: &Plan, ip: &str) -> Vec<Key> {
    told(plan, &Query { ip: ip.parse().ok(), ..Query::default() }).unwrap()
}

#[test]
fn ipv6_clients_count_by_the_configured_prefix() {
    let plan = |prefix: &str| plan(&format!("[inbound]\n{prefix}\n[inbound.action.a]\nlimit = \"5 per 60s\"\n"));
    for (prefix, within, beyond) in [
        ("", "2001:db8:1:2::9", "2001:db8:1:3::1"),
        ("ipv6_prefix = 64", "2001:db8:1:2::9", "2001:db8:1:3::1"),
        ("ipv6_prefix = 56", "2001:db8:1:ff::1", "2001:db8:1:100::1"),
        ("ipv6_prefix = 48", "2001:db8:1:ffff::1", "2001:db8:2:2::1"),
        ("ipv6_prefix = 32", "2001:db8:ffff::1", "2001:db9:1:2::1"),
    ] {
        let plan = plan(prefix);
        assert_eq!(address(&plan, within), address(&plan, "2001:db8:1:2::1"), "{prefix}");
        assert_ne!(address(&plan, beyond), address(&plan, "2001:db8:1:2::1"), "{prefix}");
        assert_ne!(address(&plan, "192.0.2.1"), address(&plan, "192.0.2.2"));
        // The shared key for a full store covers more than one client.
        let parent = |ip: &str| {
            let limit = plan.limits().iter().next().unwrap().0;
            plan.shared_key(limit, ShareLevel::SmallNetwork, ip.parse().ok(), &KeySeed::new([9; 16]))
        };
        let neighbour = if plan.ipv6_prefix() > 48 { beyond } else { "2001:db8:ffff:2::1" };
        assert_eq!(parent(neighbour), parent("2001:db8:1:2::1"), "{prefix}");
    }
    assert!(plan("ipv6_prefix = 56").describe().contains("an IPv6 client is its /56\n"));
}

#[test]
fn ipv6_network_adds_a_limit_per_prefix() {
    let of = |more: &str| plan(&format!("[inbound.action.a]\npreset = \"login\"\n{more}"));
    assert_eq!(address(&of(""), "2001:db8::1").len(), 1);
    for (more, words) in [
        (
            "ipv6_network = \"preset\"\n",
            "a.ipv6, by ipv6/48: at most 50 in any 60 s\n        IPv4 clients don't meet it\n",
        ),
        ("ipv6_network = \"20 per 60s\"\n", "a.ipv6, by ipv6/48: at most 20 in any 60 s\n"),
    ] {
        let plan = of(more);
        let (one, other) = (address(&plan, "2001:db8:1:1::1"), address(&plan, "2001:db8:1:2::1"));
        assert!(one[0] != other[0] && one[1] == other[1], "{more}");
        assert_ne!(address(&plan, "2001:db8:2:1::1")[1], one[1]);
        assert_eq!(address(&plan, "192.0.2.1").len(), 1);
        assert!(plan.describe().contains(words), "{}", plan.describe());
    }
}

/// The names of the limits that apply to the calls of a path.
fn met(plan: &Plan, path: &str) -> Result<Vec<String>, String> {
    let query = Query { ip: "192.0.2.1".parse().ok(), path: Some(path), ..Query::default() };
    let actions = plan.matching_actions(&query).map_err(|error| error.to_string())?;
    let batch = plan.ops(actions, &query, &KeySeed::new([9; 16]), Verb::Take, 7).map_err(|error| error.to_string())?;
    Ok(batch.ops().iter().map(|op| plan.limit_info(op.limit).name().to_owned()).collect())
}

#[test]
fn shadow_limits_refuse_no_path() {
    let limits = |name: &str, mode: &str, count: u32, path: &str| {
        let list: Vec<String> = (1..=count).map(|n| format!("{{ limit = \"{n} per 60s\" }}")).collect();
        format!(
            "[inbound.action.{name}]\nmatch = {{ path = \"{path}\" }}\nmode = \"{mode}\"\nlimits = [{}]\n",
            list.join(", ")
        )
    };
    for (login, pages) in [("enforce", "shadow"), ("shadow", "enforce")] {
        let plan = plan(&(limits("login", login, 4, "/login") + &limits("pages", pages, 5, "/static/*")));
        let met = met(&plan, "/static/../login").unwrap();
        let of = |name: &str| met.iter().filter(|limit| limit.starts_with(name)).count();
        let enforced = if login == "enforce" { (of("login"), 4) } else { (of("pages"), 5) };
        assert_eq!((met.len(), enforced.0), (8, enforced.1), "{met:?}");
    }
    let plan = plan(&(limits("login", "enforce", 4, "/login") + &limits("pages", "enforce", 5, "/static/*")));
    assert!(met(&plan, "/static/../login").is_err(), "what counts and doesn't fit is refused");
}

#[test]
fn path_limits_refuse_no_paths_of_other_actions() {
    let plan = plan(
        "[inbound.action.pages]\nmatch = { path = \"/pages/*\" }\nkey = [\"path\"]\nlimit = \"5 per 60s\"\n\
         [inbound.action.other]\nmatch = { path = \"/other/*\" }\nlimit = \"5 per 60s\"",
    );
    let spelled = "a%2fb/../c\\d/../e%5cf/../h";
    assert_eq!(met(&plan, &format!("/other/{spelled}")).unwrap(), ["other"]);
    assert!(met(&plan, &format!("/pages/{spelled}")).is_err(), "its paths are too many to count");
}
