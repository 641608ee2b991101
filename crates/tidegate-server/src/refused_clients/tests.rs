use serde_json::json;
use tidegate::Span;
use tidegate::policy::{Policy, PolicySources};

use super::*;

const LIMIT: &str = "[inbound.action.a]\nlimit = \"5/s\"\n";

fn refusal(client: u64, at: u64, blocked: bool) -> Decision {
    Decision {
        bound_by: Some(LimitId::FIRST),
        key: Key::new(0, client),
        reason: if blocked { Reason::Penalty } else { Reason::Limit },
        strikes: if blocked { 1 } else { 0 },
        retry_after: Some(Span::from_secs(1000)),
        ..Decision::without_limit(false, Reason::Limit, Time::from_secs(at))
    }
}

#[test]
fn clients_have_the_names_that_limits_count() {
    let text = "[inbound]\nipv6_prefix = 56\n[inbound.action.a]\nkey = [\"client_ip\", \"ipv6/48\", \"key\"]\nlimit = \"5/s\"\n";
    let policy = load(text);
    let shown = |ip: &str, key: &str, number| {
        let query = Query { ip: ip.parse().ok(), key: Some(key), ..Query::default() };
        let client = RefusedClient::new(policy.plan(), LimitId::FIRST, &query, &refusal(number, 10, true));
        let report = client.report(policy.plan(), Time::from_secs(10));
        let values: Vec<Value> = report.client.into_iter().map(|(_, value)| value).collect();
        (values, report.reset.map(|reset| json!(reset)))
    };
    let (client, reset) = shown("2001:db8:1:2ff::7", "bob", 1);
    assert_eq!(client, ["2001:db8:1:200::/56", "2001:db8:1::/48", "bob"]);
    assert_eq!(reset, Some(json!({ "action": "a", "ip": "2001:db8:1:200::", "key": "bob" })));
    assert_eq!(shown("::ffff:192.0.2.1", "", 1).0[0], "192.0.2.1");
    let long = |end: &str, number: u64| shown("192.0.2.1", &format!("{}{end}", "x".repeat(128)), number << 32);
    assert_ne!(long("a", 1).0, long("b", 2).0);
    assert_eq!(long("a", 1).1, None, "a cut key can't be reset");
    assert!(long("", 1).1.is_some());
}

fn policy() -> Policy {
    load(LIMIT)
}

fn load(text: &str) -> Policy {
    Policy::load(PolicySources::new().file("test.toml", text)).expect("a policy")
}

fn recorded(refusals: impl IntoIterator<Item = Decision>) -> Value {
    let policy = policy();
    let clients = RefusedClients::default();
    for decision in refusals {
        clients.record(policy.plan(), &Query::default(), &decision);
    }
    json!(clients.local_report(policy.plan(), None, MAX_REPORTED, false, Time::from_secs(100)))
}

#[test]
fn blocked_clients_come_first_then_the_most_refused() {
    let report =
        recorded([(1, false), (2, false), (3, true), (2, false)].map(|(key, blocked)| refusal(key, 10, blocked)));
    let refusals: Vec<_> = report["clients"].as_array().expect("a list").iter().map(|it| &it["refusals"]).collect();
    assert_eq!(refusals, [1, 2, 1]);
    assert_eq!((&report["blocked"], &report["known"]), (&json!(1), &json!(3)));
    assert_eq!(report["clients"][0]["strikes"], 1);
}

#[test]
fn shadow_refusals_are_counted_apart() {
    let shadow = |client| Decision { allowed: true, shadow: true, ..refusal(client, 10, true) };
    let report = recorded([shadow(1), refusal(1, 11, true), shadow(2), shadow(2), refusal(3, 10, false)]);
    let clients = report["clients"].as_array().expect("a list");
    let counts: Vec<_> = clients.iter().map(|client| (&client["refusals"], &client["shadow_refusals"])).collect();
    assert_eq!(counts, [(&json!(1), &json!(1)), (&json!(0), &json!(2)), (&json!(1), &json!(0))]);
    assert_eq!((&report["known"], &report["only_shadow"]), (&json!(3), &json!(1)));
}

#[test]
fn a_block_counts_by_the_present_mode() {
    let (enforced, shadow) = (policy(), load("[inbound]\nmode = \"shadow\"\n[inbound.action.a]\nlimit = \"5/s\"\n"));
    let clients = RefusedClients::default();
    let in_shadow = Decision { allowed: true, shadow: true, ..refusal(1, 10, true) };
    clients.record(shadow.plan(), &Query::default(), &in_shadow);
    let report = |policy: &Policy| {
        let now = Time::from_secs(100);
        let report = json!(clients.local_report(policy.plan(), None, MAX_REPORTED, false, now));
        assert_eq!(json!(clients.blocked_by_limit(policy.plan(), now).len()), report["blocked"]);
        (report["blocked"].clone(), report["clients"][0]["shadow"].clone())
    };
    assert_eq!(report(&shadow), (json!(0), json!(true)));
    assert_eq!(report(&enforced), (json!(1), json!(false)));
    // The first refusal since is the one that is told.
    assert!(clients.record(enforced.plan(), &Query::default(), &refusal(1, 11, true)));
}

#[test]
fn a_store_is_asked_in_few_batches() {
    let policy = policy();
    let decisions = (0..20).map(|client| Decision { affinity: client / 10, ..refusal(client, 10, true) });
    let client = |decision| RefusedClient::new(policy.plan(), LimitId::FIRST, &Query::default(), &decision);
    let clients: Vec<_> = decisions.map(client).collect();
    let batches = batches_of(clients.iter());
    let sizes: Vec<_> = batches.iter().map(|batch| (batch.context().affinity, batch.ops().len())).collect();
    assert_eq!(sizes, [(0, 8), (0, 2), (1, 8), (1, 2)]);
}

#[test]
fn a_flood_replaces_clients_that_are_not_blocked() {
    let blocked = (0..256).map(|client| refusal(client, 10, true));
    let flood = (1000..101_000).map(|client| refusal(client, 20, false));
    let report = recorded(blocked.chain(flood));
    assert_eq!((&report["blocked"], &report["known"]), (&json!(256), &json!(SHARDS * SHARD_CAPACITY)));
    assert_eq!(report["clients"].as_array().map(Vec::len), Some(MAX_REPORTED));
}

#[test]
fn a_flood_of_short_blocks_keeps_long_ones() {
    let long = (0..256).map(|client| refusal(client, 10, true));
    let short =
        (1000..101_000).map(|client| Decision { retry_after: Some(Span::from_secs(90)), ..refusal(client, 20, true) });
    let report = recorded(long.chain(short));
    assert_eq!((&report["known"], &report["displaced"]), (&json!(4096), &json!(96_160)));
    let clients = report["clients"].as_array().expect("a list");
    assert!(clients.iter().all(|client| client["blocked"] == true), "{report}");
    assert_eq!(clients.iter().filter(|client| client["retry_after"] == 910).count(), 256, "{report}");
}
