//! The list of nodes beside values that other programs write.

use std::sync::Arc;

use tidegate_core::{Limits, Span, Time};
use tidegate_store::{Announcement, Redis, RedisOptions, RemoteStore as _};
use tidegate_testkit::servers::RedisServer;

const NODES: &str = "tidegate:nodes";

async fn announce(store: &Redis, node_id: u64) -> Vec<u64> {
    let announcement = Announcement::new(node_id, Span::from_secs(600), b"node".to_vec()).unwrap();
    let mut listed: Vec<u64> =
        store.announce(announcement, Time::ZERO).await.unwrap().iter().map(|node| node.node_id).collect();
    listed.sort_unstable();
    listed
}

#[tokio::test(flavor = "multi_thread")]
async fn values_of_other_programs_are_removed() {
    let Some(server) = RedisServer::start() else { return };
    let options = RedisOptions::new(format!("redis://127.0.0.1:{}", server.port()));
    let store = Redis::new(options, Arc::new(Limits::new(Vec::new()).unwrap())).unwrap();
    assert_eq!(announce(&store, 1).await, [1]);
    let long = "x".repeat(1 << 20);
    for (name, value) in [("", ""), ("short", "junk"), ("00000000000000ff", "junk"), ("00000000000000fe", &*long)] {
        server.command(&["HSET", NODES, name, value]);
    }
    assert_eq!(announce(&store, 2).await, [1, 2]);
    assert_eq!(server.command(&["HLEN", NODES]), ":2");

    let words: Vec<String> = (0..4000).map(|number| format!("{number:016x}")).collect();
    let words: Vec<&str> = ["HSET", NODES].into_iter().chain(words.iter().map(String::as_str)).collect();
    server.command(&words);
    assert_eq!(announce(&store, 2).await, [2]);
    assert_eq!(server.command(&["HLEN", NODES]), ":1");
    assert_eq!(announce(&store, 1).await, [1, 2]);
}
