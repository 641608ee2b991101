//! It answers as every store does.

use tidegate_store::TimeSource;
use tidegate_testkit::conformance::{ConformanceOptions, check_conformance};
use tidegate_testkit::random;
use tidegate_testkit::servers::RedisServer;

use crate::common::Stores;

#[test]
fn the_redis_store_conforms() {
    let Some(server) = RedisServer::start() else { return };
    let effort = ConformanceOptions { batches: random::case_count(20_000, 100_000), ..ConformanceOptions::default() };
    check_conformance(&Stores::new(server.url(), TimeSource::Caller), &effort).unwrap();
}

#[test]
fn the_redis_store_conforms_with_server_time() {
    let Some(server) = RedisServer::start() else { return };
    let effort = ConformanceOptions {
        batches: random::case_count(5_000, 50_000),
        tasks: 16,
        calls_per_task: 500,
        ..ConformanceOptions::default()
    };
    check_conformance(&Stores::new(server.url(), TimeSource::Store), &effort).unwrap();
}
