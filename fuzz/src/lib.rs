//! The properties that the targets check. Properties of the core and of policies are those of their crates' own tests.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::LazyLock;

use http::header::{COOKIE, HeaderName};
use http::{HeaderMap, HeaderValue};
use tempfile::TempDir;
use tidegate::clock::ManualClock;
use tidegate::outbound::{Outbound, Snapshot, take_call_options};
use tidegate_core::Time;
use tidegate_policy::{ActionSpec, Policy, PolicySources, ProviderSpec, Query, printable_lines};
use tidegate_replay::{FieldNames, LogReplay, MAX_SHOWN_BROKEN};
use tidegate_sim::Scenario;

#[path = "../../crates/tidegate-core/tests/fuzzed/mod.rs"]
pub mod core;
#[path = "../../crates/tidegate-policy/tests/fuzzed/mod.rs"]
pub mod policy;

/// 2026-01-01 00:00:00 UTC.
pub const NOW: Time = Time::from_secs(1_767_225_600);

/// Headers of these names. Each line of the input is one: its first byte chooses the name, the others are the value.
/// Lines that can't be the value of a header are left out.
pub fn headers(names: &[&'static str], lines: &[u8]) -> HeaderMap {
    let header = |line: &[u8]| {
        let (first, value) = line.split_first()?;
        let name = HeaderName::from_static(names[usize::from(*first) % names.len()]);
        Some((name, HeaderValue::from_bytes(value).ok()?))
    };
    lines.split(|byte| *byte == b'\n').filter_map(header).collect()
}

/// The default policy with variables: a line each, `NAME=VALUE`, with or without `#` before it. In
/// `.env.example` there is a line for every variable.
pub fn variables(lines: &str) -> PolicySources {
    let variables = lines.lines().filter_map(|line| line.trim_start_matches('#').split_once('='));
    PolicySources::new().env_prefix("PIXIVFE").env(variables)
}

/// Counts a request: a line each for path, host, key, tenant and cookies.
pub fn a_request_is_keyed(text: &str) {
    let mut lines = text.split('\n');
    let (path, host, key, tenant) = (lines.next(), lines.next(), lines.next(), lines.next());
    let mut headers = HeaderMap::new();
    let mut append = |name: HeaderName, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.append(name, value);
        }
    };
    tenant.into_iter().for_each(|tenant| append(HeaderName::from_static("x-tenant"), tenant));
    lines.for_each(|cookies| append(COOKIE, cookies));
    let key = Some(key.unwrap_or_default());
    policy::a_query_is_keyed_or_uncountable(&Query { path, host, key, headers: Some(&headers), ..Query::default() });
}

/// Headers that are meant for Tidegate are taken out of those that go on to the provider.
pub fn own_headers_are_not_passed_on(headers: &HeaderMap) {
    let mut headers = headers.clone();
    if take_call_options(&mut headers).is_ok() {
        assert!(!headers.keys().any(|name| name.as_str().starts_with("tidegate-")), "{headers:?}");
    }
}

/// Every line of a log is a request, something else, or broken. What is told of it is bounded, does nothing to a
/// terminal, and is the same each time.
pub fn a_log_is_counted_line_by_line(bytes: &[u8]) {
    static POLICY: LazyLock<Policy> = LazyLock::new(|| {
        let search = ActionSpec::new("1 per 60s").key(["header:user-agent", "query:q", "cookie:c", "client_ip"]);
        let policy = Policy::builder()
            .setting("store.max_bytes", "1MiB")
            .global("5 per 60s")
            .action("login", ActionSpec::new("1/s").penalty("2s", "1h").method("POST").path("/login"))
            .action("search", search.path("/*"));
        policy.build().expect("a valid policy")
    });
    let replay = || {
        let mut replay = LogReplay::new("fuzz", &POLICY, FieldNames::default());
        let mut refusals = Vec::new();
        // Compression may be broken, which ends the log.
        let _ = replay.read("log", bytes, Some(&mut refusals));
        (replay.findings(), refusals)
    };
    let (findings, refusals) = replay();
    let input = &findings.input;
    assert_eq!(input.lines, input.requests + input.non_requests + input.broken);
    assert!(input.first_broken.len() <= MAX_SHOWN_BROKEN);
    assert!(refusals.split(|byte| *byte == b'\n').count() as u64 <= input.requests + 1);
    let table = findings.table();
    assert_eq!(printable_lines(&table), table);
    let json = findings.json();
    assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), "{json}");
    let (again, refusals_again) = replay();
    assert_eq!((json, refusals), (again.json(), refusals_again));
}

/// A scenario is read alike twice, or refused with errors. It is not run: it may be as long as its author likes.
pub fn a_scenario_is_read_or_refused(bytes: &[u8]) {
    match Scenario::read("fuzz", bytes) {
        Ok(scenario) => {
            assert!(!scenario.setups.is_empty());
            let again = Scenario::read("fuzz", bytes).expect("a scenario that was read before");
            assert_eq!(format!("{scenario:?}"), format!("{again:?}"));
        }
        Err(errors) => policy::errors_are_printable(&errors),
    }
}

/// The outbound state is restored from a file, which then restores the same again, or the file is left as it was.
pub fn a_snapshot_is_restored_or_left(bytes: &[u8]) {
    static POLICY: LazyLock<Policy> = LazyLock::new(|| {
        let api = ProviderSpec::new("https://api.example.com").auth("bearer").credentials(["env:A", "env:B"]);
        let api = api.limit("1000 per calendar day").credential_limit("100 per month in Europe/Paris");
        Policy::builder().provider("api", api).build().expect("a valid policy")
    });
    thread_local! {
        static FOLDER: RefCell<Option<TempDir>> = const { RefCell::new(None) };
    }
    let path: PathBuf = FOLDER.with_borrow_mut(|folder| {
        let folder = folder.get_or_insert_with(|| {
            // Saving waits for the disk, which this is not.
            let memory = tempfile::tempdir_in("/dev/shm");
            memory.or_else(|_| tempfile::tempdir()).expect("a folder for temporary files")
        });
        folder.path().join("outbound.json")
    });
    std::fs::write(&path, bytes).expect("a file that can be written");
    let restore = || {
        let outbound = Outbound::in_memory(&POLICY, ManualClock::at(NOW)).expect("a policy with a provider");
        Snapshot::restore(&outbound, &path).map(drop)
    };
    let read = || std::fs::read(&path).expect("a file that can be read");
    match restore() {
        Ok(()) => {
            let saved = read();
            restore().expect("a snapshot that was just saved");
            assert_eq!(String::from_utf8_lossy(&saved), String::from_utf8_lossy(&read()));
        }
        Err(_) => assert_eq!(read(), bytes, "a file that isn't a snapshot is left as it is"),
    }
}
