//! Reservations that refused callers get in a shared limit, through the gate.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use tidegate::clock::ManualClock;
use tidegate::policy::{Policy, PolicySources, Query, ReservationToken};
use tidegate::store::Memory;
use tidegate::{Clock as _, DecisionReport, Gate, Span};
use tidegate_testkit::random::{RandomSource, run_seed};

const SHARED: &str = r#"
[inbound.action.report]
limits = [
    { name = "all", key = "action", limit = "2/s burst 2", reserve = { share = 1, grace = "400ms" } },
    { name = "own", limit = "3 per 60s" },
]
"#;

fn gate(toml: &str) -> (Gate<Memory, ManualClock>, ManualClock) {
    let policy = Policy::load(PolicySources::new().file("test.toml", toml)).unwrap_or_else(|errors| panic!("{errors}"));
    let clock = ManualClock::default();
    (Gate::in_memory(&policy, clock.clone()), clock)
}

struct Caller<'a>(&'a Gate<Memory, ManualClock>);

impl Caller<'_> {
    fn call(&self, ip: &str, reservation: Option<&str>) -> DecisionReport {
        let query = Query { action: Some("report"), ip: Some(ip.parse().unwrap()), reservation, ..Query::default() };
        self.0.report(&self.0.check_now(&query).unwrap())
    }
}

#[test]
fn a_reservation_is_the_callers_own_and_admits_once() {
    let (gate, clock) = gate(SHARED);
    let caller = Caller(&gate);
    assert!(caller.call("192.0.2.1", None).allowed && caller.call("192.0.2.2", None).allowed);
    let first = caller.call("192.0.2.3", None);
    let reservation = first.reservation.clone().unwrap();
    assert_eq!((first.retry_after, reservation.at), (Some(1), clock.now().as_micros() / 1000 + 500));
    assert_eq!(first.reason, "reserved");
    assert_eq!(caller.call("192.0.2.3", None).reservation, Some(reservation.clone()), "asked again, it is the same");
    let second = caller.call("192.0.2.4", None).reservation.unwrap();
    assert_eq!(second.at, reservation.at + 500);
    let read_back: DecisionReport = serde_json::from_str(&serde_json::to_string(&first).unwrap()).unwrap();
    assert_eq!(read_back, first);

    clock.advance(Span::from_millis(500));
    let stolen = caller.call("192.0.2.5", Some(&reservation.token));
    assert!(!stolen.allowed && stolen.unknown_reservation, "{stolen:?}");
    let kept = caller.call("192.0.2.3", Some(&reservation.token));
    assert!(kept.allowed && kept.by_reservation && kept.reservation.is_none(), "{kept:?}");
    assert_eq!(kept.reason, "reservation");
    let again = caller.call("192.0.2.3", Some(&reservation.token));
    assert!(!again.allowed && again.unknown_reservation, "{again:?}");
    let next = again.reservation.unwrap();
    assert_eq!(next.at, second.at + 1000);
    clock.advance(Span::from_millis(500));
    let without_token = caller.call("192.0.2.4", None);
    assert!(without_token.allowed && without_token.by_reservation, "{without_token:?}");
    clock.advance(Span::from_secs(1));
    let with_used_token = caller.call("192.0.2.3", Some(&reservation.token));
    assert!(with_used_token.by_reservation, "the next one of its caller admits it: {with_used_token:?}");
    let with_next_token = caller.call("192.0.2.3", Some(&next.token));
    assert!(!with_next_token.by_reservation, "{with_next_token:?}");
}

/// With a share of 0, each caller by its key is told an instant, and nothing is kept.
#[test]
fn a_share_of_none_tells_instants() {
    let (gate, clock) = gate(
        "[inbound.action.report]\nkey = \"action\"\nlimit = \"1/s burst 1\"\nreserve = { share = 0, by = [\"key\"] }\n",
    );
    let call = |key| {
        let query = Query { action: Some("report"), key: Some(key), ..Query::default() };
        gate.report(&gate.check_now(&query).unwrap())
    };
    assert!(call("a").allowed);
    for (key, wait) in [("b", 1), ("c", 2), ("d", 3), ("b", 1)] {
        let refused = call(key);
        assert_eq!((refused.retry_after, refused.reservation, &*refused.reason), (Some(wait), None, "limit"), "{key}");
    }
    clock.advance(Span::from_secs(1));
    assert!(call("e").allowed, "nothing is kept");
}

/// A path that can be read in two ways is counted by both, with one caller.
#[test]
fn a_path_of_two_readings_has_a_reservation() {
    let two = r#"
        [inbound.action.own]
        match = { path = "/own/*" }
        key = "path"
        limit = "9 per 60s"
        [inbound.action.all]
        match = { path = "/*" }
        key = "action"
        limit = "2/s burst 2"
        reserve = { share = 1 }
    "#;
    let (gate, clock) = gate(two);
    let call = |ip: &str, reservation: Option<&str>| {
        let query = Query { ip: Some(ip.parse().unwrap()), path: Some("/own%2Fy"), reservation, ..Query::default() };
        gate.report(&gate.check_now(&query).unwrap())
    };
    assert!(call("192.0.2.1", None).allowed && call("192.0.2.2", None).allowed);
    let reservation = call("192.0.2.3", None).reservation.unwrap();
    clock.advance(Span::from_millis(500));
    assert!(!call("192.0.2.4", None).allowed);
    assert!(call("192.0.2.3", Some(&reservation.token)).by_reservation);
}

/// A call that two limits with reservations count: the token of one excuses from no forfeit of the other.
#[test]
fn a_token_excuses_from_no_forfeit_of_another_action() {
    let two = r#"
        [inbound.action.own]
        match = { path = "/own/*" }
        key = "path"
        limit = "1/s burst 1"
        reserve = { share = 1, grace = "400ms" }
        [inbound.action.all]
        match = { path = "/*" }
        key = "action"
        limit = "1/s burst 1"
        reserve = { share = 1, grace = "400ms" }
    "#;
    let (gate, clock) = gate(two);
    let call = |ip: &str, path, reservation: Option<&str>| {
        let query = Query { ip: Some(ip.parse().unwrap()), path: Some(path), reservation, ..Query::default() };
        gate.report(&gate.check_now(&query).unwrap())
    };
    // Two callers forfeit a reservation of the second limit.
    assert!(call("192.0.2.1", "/", None).allowed);
    for ip in ["192.0.2.2", "192.0.2.3"] {
        assert!(call(ip, "/", None).reservation.is_some());
    }
    clock.advance(Span::from_secs(5));
    assert!(call("192.0.2.1", "/own/y", None).allowed);
    let token = call("192.0.2.2", "/own/y", None).reservation.unwrap().token;
    clock.advance(Span::from_secs(1));
    assert!(call("192.0.2.1", "/", None).allowed);
    // The first limit admits it by the token. In the second, it is behind, and the other caller, too, gets no reservation then.
    assert_eq!(call("192.0.2.2", "/own%2Fy", Some(&token)).reason, "reserved");
    assert_eq!(call("192.0.2.3", "/", None).reservation, None);
    assert!(call("192.0.2.4", "/", None).reservation.is_some());
}

#[test]
fn other_limits_outrank_a_reservation() {
    let (gate, clock) = gate(SHARED);
    let caller = Caller(&gate);
    for second in 0..3 {
        assert!(caller.call("192.0.2.1", None).allowed, "{second}");
        clock.advance(Span::from_secs(1));
    }
    assert!(caller.call("192.0.2.2", None).allowed && caller.call("192.0.2.3", None).allowed);
    // Both limits refuse: a reservation in one of them would be of no use.
    let refused = caller.call("192.0.2.1", None);
    assert_eq!((refused.bound_by.as_deref(), refused.reservation), (Some("report.own"), None));
    let reservation = caller.call("192.0.2.4", None).reservation.unwrap();
    assert_eq!(reservation.at, clock.now().as_micros() / 1000 + 500, "no reservation was taken before it");
}

#[test]
fn a_restarted_gate_knows_no_reservation() {
    let (before, _) = gate(SHARED);
    let refused = [0, 1, 2].map(|number| Caller(&before).call(&format!("192.0.2.{number}"), None));
    let reservation = refused[2].reservation.clone().unwrap();
    let (after, clock) = gate(SHARED);
    let caller = Caller(&after);
    assert!(caller.call("192.0.2.8", None).allowed && caller.call("192.0.2.9", None).allowed);
    clock.advance(Span::from_millis(100));
    let returned = caller.call("192.0.2.2", Some(&reservation.token));
    assert!(!returned.allowed && returned.unknown_reservation && returned.reservation.is_some(), "{returned:?}");
}

#[test]
fn forged_tokens_admit_nothing() {
    let (gate, clock) = gate(SHARED);
    let caller = Caller(&gate);
    for number in 1..=2 {
        assert!(caller.call(&format!("192.0.2.{number}"), None).allowed);
    }
    let reservation = caller.call("192.0.2.3", None).reservation.unwrap();
    let genuine: ReservationToken = reservation.token.parse().unwrap();
    let mut random = RandomSource::from_seed(run_seed());
    // Another caller: there is no room until the first one has come or is late.
    clock.advance(Span::from_millis(500));
    for number in 0..100_000 {
        let (at, signature) = (reservation.token.split_at(14).0, random.next_u64());
        let forged = match number % 3 {
            0 => format!("{at}{signature:016x}"),
            1 => format!("r{:013x}{signature:016x}", random.below(1 << 52)),
            _ => {
                String::from_utf8_lossy(&random.concat_random(&[b"r", b"0", b"\xff", b";at=1", b"f"], 40)).into_owned()
            }
        };
        if forged.parse() == Ok(genuine) {
            continue;
        }
        let refused = caller.call("192.0.2.4", Some(&forged));
        assert!(!refused.allowed && refused.unknown_reservation, "{forged}");
        // Its instant is right, and has come.
        let refused = caller.call("192.0.2.3", Some(&forged));
        assert!(!refused.allowed && refused.unknown_reservation, "{forged}");
    }
    assert!(caller.call("192.0.2.3", Some(&reservation.token)).by_reservation);
}

#[test]
fn shadow_and_status_give_no_reservations() {
    let shadow = SHARED.replace("[inbound.action.report]\n", "[inbound.action.report]\nmode = \"shadow\"\n");
    let (in_shadow, _) = gate(&shadow);
    for number in 0..9 {
        let found = Caller(&in_shadow).call(&format!("192.0.2.{number}"), None);
        assert!(found.allowed && found.reservation.is_none(), "{found:?}");
    }
    let (gate, clock) = gate(SHARED);
    let caller = Caller(&gate);
    assert!(caller.call("192.0.2.1", None).allowed && caller.call("192.0.2.2", None).allowed);
    let ip = Some("192.0.2.3".parse().unwrap());
    let query = Query { action: Some("report"), ip, ..Query::default() };
    let status = tidegate_testkit::conformance::block_on(gate.status(&query)).unwrap();
    assert_eq!((status.allowed, status.reservation, status.retry_after), (false, None, Some(Span::from_millis(500))));
    let reservation = caller.call("192.0.2.4", None).reservation.unwrap();
    assert_eq!(reservation.at, clock.now().as_micros() / 1000 + 500);
}
