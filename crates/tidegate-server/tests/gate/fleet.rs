//! The list of nodes, over a store that other programs write to.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use tidegate::clock::ManualClock;
use tidegate::store::{
    AnnouncedNode, Announcement, Batch, Limits, Memory, Never, Outcomes, Store, StoreError, StoreResponse,
};
use tidegate::{Gate, Span, Time};
use tidegate_policy::{KeySeed, Policy};

use crate::changes::change;
use crate::common::{Running, body, get, json, nobody, once, policy, post, serve, start, status};

const LIMIT: &str =
    "[store]\nnode_name = \"this-one\"\nnode_expiry = \"2s\"\n[inbound.action.a]\nlimit = \"5 per 60s\"\n";

/// A store that tells of other nodes, and can be away.
#[derive(Clone)]
struct Shared {
    memory: Arc<Memory>,
    others: Vec<AnnouncedNode>,
    is_away: Arc<AtomicBool>,
}

impl Store for Shared {
    type Future = Never;

    fn limits(&self) -> &Arc<Limits> {
        self.memory.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Never> {
        self.memory.apply(batch, now)
    }

    fn submit(&self, batch: &Batch, now: Time) {
        self.memory.submit(batch, now);
    }

    fn announce(
        &self,
        announcement: Announcement,
        _: Time,
    ) -> Option<impl Future<Output = Result<Vec<AnnouncedNode>, StoreError>> + Send + 'static> {
        let (node_id, record) = (announcement.node_id(), announcement.record().to_vec());
        let this = AnnouncedNode { node_id, age: Span::ZERO, record };
        let nodes = [self.others.as_slice(), &[this]].concat();
        Some(ready(if self.outage().is_some() { Err(StoreError::Unavailable) } else { Ok(nodes) }))
    }

    async fn inspect(&self, batch: &Batch, now: Time) -> Result<Outcomes, StoreError> {
        if self.outage().is_some() { Err(StoreError::Unavailable) } else { self.memory.inspect(batch, now).await }
    }

    fn fallback_count(&self) -> u64 {
        self.outage().map_or(0, |_| 7)
    }

    fn outage(&self) -> Option<&str> {
        self.is_away.load(Ordering::Relaxed).then_some("redis://db:6379")
    }
}

fn other(node_id: u64, age: u64, record: &str) -> AnnouncedNode {
    AnnouncedNode { node_id, age: Span::from_secs(age), record: record.into() }
}

fn start_shared(others: Vec<AnnouncedNode>) -> (Running, Arc<AtomicBool>) {
    let policy = policy(nobody(), LIMIT);
    let is_away = Arc::new(AtomicBool::new(false));
    let memory = Arc::new(Memory::new(Arc::clone(policy.plan().limits()), 1 << 20));
    let store = Shared { memory, others, is_away: Arc::clone(&is_away) };
    (start_on(store, &policy), is_away)
}

fn start_on(store: Shared, policy: &Policy) -> Running {
    let (plan, clock) = (Arc::clone(policy.plan()), ManualClock::default());
    serve(Gate::from_parts(plan, store, clock, KeySeed::new([7; 16])), policy, |_| None).unwrap()
}

/// Asks for the list of nodes until it is as expected.
async fn wait_for_fleet(gate: &Running, is_expected: impl Fn(&Value) -> bool) -> Value {
    for _ in 0..1000 {
        let fleet = json(&once(gate.admin, get("/v1/fleet")).await);
        if is_expected(&fleet) {
            return fleet;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{}", once(gate.admin, get("/v1/fleet")).await);
}

fn has_listed(fleet: &Value) -> bool {
    fleet["listed_age"].is_u64()
}

#[tokio::test]
async fn a_node_with_memory_is_alone() {
    let gate = start(nobody(), LIMIT).await;
    let fleet = json(&once(gate.admin, get("/v1/fleet")).await);
    let message = "This node keeps its state in memory: no other node shares it.";
    assert_eq!((&fleet["shared"], &fleet["message"]), (&false.into(), &message.into()), "{fleet}");
    let nodes = fleet["nodes"].as_array().unwrap();
    assert_eq!((nodes.len(), &nodes[0]["name"], &nodes[0]["link"]), (1, &"this-one".into(), &Value::Null), "{fleet}");
    assert!(once(gate.admin, get("/fleet")).await.contains(message));
    let state = json(&once(gate.admin, get("/v1/state")).await);
    assert_eq!(state["fleet"]["nodes"]["live"], 1, "{state}");
    assert_eq!(status(&once(gate.admin, get("/v1/fleet?all=1")).await), 400);
}

#[tokio::test]
async fn names_of_other_nodes_are_escaped() {
    let hostile = r#"{"name":"<img src=x onerror=alert(1)>\u001b[2J","version":"\"><script>","interval_ms":5000}"#;
    let (gate, _) = start_shared(vec![other(7, 1, hostile), other(8, 1, "\0\u{1}{{{")]);
    let fleet = wait_for_fleet(&gate, has_listed).await;
    let names: Vec<&str> =
        fleet["nodes"].as_array().unwrap().iter().map(|node| node["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["this-one", "0000000000000008", "<img src=x onerror=alert(1)>\u{fffd}[2J"], "{fleet}");
    for path in ["/fleet", "/"] {
        let page = once(gate.admin, get(path)).await;
        assert!(!page.contains("<img src=x") && !page.contains("\"><script>") && !page.contains('\u{1b}'), "{page}");
    }
    let page = once(gate.admin, get("/fleet")).await;
    assert!(page.contains("&lt;img src=x onerror=alert(1)&gt;") && page.contains("This node"), "{}", body(&page));
}

#[tokio::test]
async fn silent_nodes_are_a_problem() {
    let record =
        r#"{"name":"web-2","version":"0.0.9","interval_ms":5000,"decisions_per_second":12.34,"is_link_down":true}"#;
    let (gate, _) = start_shared(vec![other(7, 130, record), other(8, 2, record)]);
    let fleet = wait_for_fleet(&gate, has_listed).await;
    let states: Vec<&str> =
        fleet["nodes"].as_array().unwrap().iter().map(|node| node["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["live", "silent", "live"], "{fleet}");
    assert_eq!(fleet["nodes"][2]["link"]["up"], false, "{fleet}");
    let metrics = once(gate.admin, get("/metrics")).await;
    for line in ["tidegate_fleet_nodes{state=\"live\"} 2.0", "tidegate_fleet_nodes{state=\"silent\"} 1.0"] {
        assert!(metrics.contains(line), "{metrics}");
    }
    assert!(once(gate.admin, get("/")).await.contains("The node web-2 was last heard 2m 10s ago"));
    let page = once(gate.admin, get("/fleet")).await;
    assert!(page.contains("2m 10s ago") && page.contains("12.3") && page.contains("0.0.9"), "{}", body(&page));
    assert!(page.contains(">Was down<") && page.contains(">Down<"), "{}", body(&page));
}

#[tokio::test]
async fn a_node_without_its_store_says_so() {
    let (gate, is_away) = start_shared(vec![other(7, 0, r#"{"name":"web-2","interval_ms":5000}"#)]);
    wait_for_fleet(&gate, has_listed).await;
    is_away.store(true, Ordering::Relaxed);
    wait_for_fleet(&gate, |fleet| fleet["error"].is_string() && fleet["nodes"][0]["link"]["up"] == false).await;
    gate.clock.advance(Span::from_secs(60));
    let fleet = json(&once(gate.admin, get("/v1/fleet")).await);
    assert_eq!((&fleet["nodes"][1]["state"], &fleet["nodes"][1]["age"]), (&"unknown".into(), &60.into()), "{fleet}");
    assert_eq!(fleet["nodes"][0]["link"]["seconds"], 60, "{fleet}");
    let page = once(gate.admin, get("/fleet")).await;
    for text in ["link to the store is down", "as they were 1m ago", ">Down<", "Unknown", ">Was up<", "last told"] {
        assert!(page.contains(text), "{text}: {}", body(&page));
    }
    is_away.store(false, Ordering::Relaxed);
    wait_for_fleet(&gate, |fleet| fleet["nodes"][1]["state"] == "live" && fleet["error"].is_null()).await;
}

#[tokio::test]
async fn blocks_reset_elsewhere_are_not_listed() {
    let policy = policy(
        nobody(),
        "[inbound.action.login]\nlimit = \"1 per 60s\"\npenalty = { base = \"600s\", cap = \"1h\" }\n",
    );
    let (memory, is_away) = (Memory::new(Arc::clone(policy.plan().limits()), 1 << 20), Arc::default());
    let store = Shared { memory: Arc::new(memory), others: Vec::new(), is_away: Arc::clone(&is_away) };
    let [this, other] = [(); 2].map(|()| start_on(store.clone(), &policy));
    let of = |client: u8| format!("{{\"action\":\"login\",\"ip\":\"192.0.2.{client}\"}}");
    for client in 0..20 {
        for expected in [200, 429] {
            assert_eq!(status(&once(this.api, post("/v1/check", &of(client))).await), expected);
        }
    }
    for client in 0..10 {
        assert_eq!(status(&once(other.admin, change("/v1/reset", "", &of(client))).await), 200);
    }
    is_away.store(true, Ordering::Relaxed);
    let local = json(&once(this.admin, get("/v1/blocks")).await);
    assert_eq!((&local["blocked"], &local["local"]), (&20.into(), &true.into()), "{local}");
    assert!(once(this.admin, get("/who")).await.contains("can't be asked"));
    is_away.store(false, Ordering::Relaxed);
    let page = once(this.admin, get("/who")).await;
    assert!(page.contains("<strong>10</strong> blocked now") && !page.contains("can't be asked"), "{}", body(&page));
    let blocks = json(&once(this.admin, get("/v1/blocks")).await);
    assert_eq!((&blocks["blocked"], &blocks["known"], &blocks["local"]), (&10.into(), &20.into(), &false.into()));
    let clients = blocks["clients"].as_array().unwrap();
    let free: Vec<_> = clients.iter().filter(|client| client["blocked"] == false).collect();
    assert!(free.iter().all(|client| client["strikes"] == 0 && client["retry_after"].is_null()), "{blocks}");
    assert_eq!(free.len(), 10);
    assert_eq!(clients[0]["strikes"], 1);
}

#[tokio::test]
async fn decisions_without_the_store_are_errors() {
    let (gate, is_away) = start_shared(Vec::new());
    is_away.store(true, Ordering::Relaxed);
    let metrics = once(gate.admin, get("/metrics")).await;
    let counted = |decision: &str, count: u64| {
        metrics.contains(&format!("tidegate_store_errors_total{{decision=\"{decision}\"}} {count}\n"))
    };
    assert!(counted("none", 0) && counted("without_store", 7), "{metrics}");
    assert_eq!(json(&once(gate.admin, get("/v1/state")).await)["store"]["errors"], 7);
}
