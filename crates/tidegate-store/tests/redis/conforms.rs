//! It answers as every store does.

use tidegate_store::TimeSource;
use tidegate_testkit::conformance::{Effort, conform};
use tidegate_testkit::dice;
use tidegate_testkit::servers::RedisServer;

use crate::common::Stores;

#[test]
fn redis_conforms() {
    let Some(server) = RedisServer::start() else { return };
    let effort = Effort { batches: dice::count(20_000, 100_000), ..Effort::default() };
    conform(&Stores::new(server.url(), TimeSource::Caller), &effort).unwrap();
}

#[test]
fn redis_conforms_by_its_own_time() {
    let Some(server) = RedisServer::start() else { return };
    let effort = Effort { batches: dice::count(5_000, 50_000), tasks: 16, calls: 500, ..Effort::default() };
    conform(&Stores::new(server.url(), TimeSource::Store), &effort).unwrap();
}
