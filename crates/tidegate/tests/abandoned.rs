//! The permits of calls whose clients go away.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::atomic::{AtomicU8, Ordering};

use tidegate::clock::ManualClock;
use tidegate::policy::{Policy, PolicySources, Query};
use tidegate::store::Memory;
use tidegate::{Decision, Gate, LimitReport, PermitGuard, PermitId, Reason, Span};

type MemoryGate = Gate<Memory, ManualClock>;

const FOUR: &str = "[inbound.action.report]\nlimit = \"4 in flight\"\nkey = [\"action\"]\n";

fn sources(toml: &str) -> PolicySources {
    PolicySources::new().file("test.toml", toml)
}

fn gate(toml: &str) -> (MemoryGate, ManualClock, Policy) {
    let policy = Policy::load(sources(toml)).unwrap_or_else(|errors| panic!("{errors}"));
    let clock = ManualClock::default();
    clock.advance(Span::from_secs(1));
    (Gate::in_memory(&policy, clock.clone()), clock, policy)
}

/// Runs a future that is ready at once.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn query(ip: &str) -> Query<'_> {
    Query { action: Some("report"), ip: Some(ip.parse().unwrap()), ..Query::default() }
}

fn begin(gate: &MemoryGate, ip: &str) -> Result<PermitGuard<Memory, ManualClock>, Box<Decision>> {
    let decision = gate.check_now(&query(ip)).unwrap();
    gate.hold_permit(&query(ip), &decision).unwrap().ok_or_else(|| Box::new(decision))
}

/// Makes a call that lasts this long, and ends.
fn call(gate: &MemoryGate, clock: &ManualClock, millis: u64) {
    let permit = begin(gate, "192.0.2.1").unwrap();
    clock.advance(Span::from_millis(millis));
    drop(permit);
}

/// The number of permits that are free for clients that abandon nothing.
fn free(gate: &MemoryGate) -> usize {
    (1..=9).map_while(|number| begin(gate, &format!("198.51.100.{number}")).ok()).collect::<Vec<_>>().len()
}

/// The number of permits that are free for this client.
fn free_for(gate: &MemoryGate, ip: &str) -> usize {
    (0..9).map_while(|_| begin(gate, ip).ok()).collect::<Vec<_>>().len()
}

/// A call of a client for itself, which it abandons. Returns the milliseconds for which its permit is kept.
fn kept_for(gate: &MemoryGate, clock: &ManualClock, abandoned_after: u64) -> u64 {
    // A client of its own, which has abandoned none.
    static CLIENTS: AtomicU8 = AtomicU8::new(10);
    let client = format!("203.0.113.{}", CLIENTS.fetch_add(1, Ordering::Relaxed));
    let permit = begin(gate, &client).unwrap();
    clock.advance(Span::from_millis(abandoned_after));
    drop(permit.keep());
    let kept = (0..).find(|_| {
        clock.advance(Span::from_millis(100));
        free(gate) == 4
    });
    (kept.unwrap() + 1) * 100
}

/// A client can't abandon one slow call after the other while only fast ones tell how long calls take.
#[test]
fn the_further_abandoned_calls_of_a_client_last_longest() {
    for key in ["action", "client_ip"] {
        let (gate, clock, _) = gate(&FOUR.replace("action\"]", &format!("{key}\"]")));
        for _ in 0..2 {
            call(&gate, &clock, 100);
            clock.advance(Span::from_secs(61));
        }
        drop(begin(&gate, "203.0.113.1").unwrap().keep());
        clock.advance(Span::from_millis(200));
        assert_eq!(free_for(&gate, "203.0.113.1"), if key == "action" { 2 } else { 4 }, "the first one is believed");
        let mut kept = 1;
        for _ in 0..100 {
            clock.advance(Span::from_millis(200));
            if let Ok(permit) = begin(&gate, "203.0.113.1") {
                drop(permit.keep());
                kept += 1;
            }
        }
        // The second one is believed, too, and by address the third one, because four calls have ended since the first.
        assert_eq!(kept, if key == "action" { 4 } else { 7 }, "{key}");
    }
}

/// A client that waits for most of its calls has no reason to choose slow ones.
#[test]
fn permits_of_clients_with_a_timeout_are_kept_for_the_usual_time() {
    let (gate, clock, _) = gate(FOUR);
    for _ in 0..2 {
        call(&gate, &clock, 100);
        clock.advance(Span::from_secs(61));
    }
    let end_calls = |count| {
        for _ in 0..count {
            let permit = begin(&gate, "203.0.113.1").unwrap();
            clock.advance(Span::from_millis(100));
            drop(permit);
        }
    };
    for abandoned in 1..10 {
        drop(begin(&gate, "203.0.113.1").unwrap().keep());
        clock.advance(Span::from_millis(200));
        assert_eq!(free(&gate), 4, "{abandoned}");
        end_calls(3);
    }
    for _ in 0..3 {
        drop(begin(&gate, "203.0.113.1").unwrap().keep());
        clock.advance(Span::from_millis(200));
    }
    clock.advance(Span::from_secs(29));
    assert_eq!(free(&gate), 3, "it abandons more than a fourth of its calls");
}

/// A client can't take the places of abandoned calls from others by keys that it invents.
#[test]
fn one_client_has_a_bounded_number_of_abandoned_calls() {
    let (gate, clock, _) = gate(&FOUR.replace("action\"]", "key\"]"));
    let keep = |ip: &str, key: usize| {
        let key = key.to_string();
        let query = Query { key: Some(&key), ..query(ip) };
        let decision = gate.check_now(&query).unwrap();
        gate.hold_permit(&query, &decision).unwrap().map(|permit| drop(permit.keep())).is_some()
    };
    assert_eq!((0..200).filter(|key| keep("203.0.113.1", *key)).count(), 64);
    assert!(keep("203.0.113.2", 0), "another client");
    clock.advance(Span::from_secs(31));
    assert!(keep("203.0.113.1", 300));
}

/// Calls that a client begins before it abandons the first one fill no table and end no share.
#[test]
fn a_client_is_not_forgotten_for_its_other_keys() {
    let (gate, clock, _) = gate(&format!("{FOUR}[inbound.action.page]\nlimit = \"4 in flight\"\nkey = [\"key\"]\n"));
    let begin_keyed = |key: usize| {
        let key = key.to_string();
        let query = Query { action: Some("page"), key: Some(&key), ..query("203.0.113.1") };
        let decision = gate.check_now(&query).unwrap();
        gate.hold_permit(&query, &decision).unwrap().unwrap()
    };
    let begun: Vec<_> = (0..2_000).map(begin_keyed).collect();
    drop(begin(&gate, "203.0.113.1").unwrap().keep());
    begun.into_iter().for_each(|permit| drop(permit.keep()));
    assert_eq!(gate.kept_permits(), 64);
    clock.advance(Span::from_secs(31));
    assert_eq!(free_for(&gate, "203.0.113.1"), 2);
}

/// Calls that get 400 take a permit of `inbound.global` for a moment, which tells nothing about the time of calls.
#[test]
fn calls_that_cant_be_counted_shorten_no_estimate() {
    let (gate, clock, _) = gate(
        "[inbound.global]\nlimit = \"4 in flight\"\n\
         [inbound.action.report]\nmatch = { path = \"/report\" }\nlimit = \"100/s\"\n",
    );
    let path = "/%253b/a;v/..;/%e2%80%a8%252e".repeat(136);
    let unreadable = Query { action: None, path: Some(&path), ..query("192.0.2.1") };
    for _ in 0..3 {
        assert!(gate.check_now(&unreadable).unwrap_err().uncountable().is_some());
        clock.advance(Span::from_secs(61));
    }
    drop(begin(&gate, "203.0.113.1").unwrap().keep());
    clock.advance(Span::from_secs(29));
    drop(begin(&gate, "198.51.100.1").unwrap());
    assert_eq!(gate.kept_permits(), 1);
}

#[test]
fn explain_tells_a_clients_share_and_a_reset_ends_it() {
    let (gate, clock, _) = gate(FOUR);
    let abandoner = query("203.0.113.1");
    let kept: Vec<_> = (0..2).map(|_| begin(&gate, "203.0.113.1").unwrap().keep().unwrap()).collect();
    let explained = || block_on(gate.explain(&abandoner)).unwrap().decision;
    let limit = |ip| block_on(gate.explain(&query(ip))).unwrap().limits.remove(0);
    assert!(begin(&gate, "203.0.113.1").is_err());
    assert_eq!((&*explained().reason, explained().bound_by.as_deref()), ("share", Some("report")));
    let LimitReport { allowed, used, remaining, retry_after, share, .. } = limit("203.0.113.1");
    assert_eq!((allowed, used, remaining, retry_after, share), (false, 2, 0, Some(30), Some(2)));
    assert_eq!(limit("203.0.113.2").share, None);
    assert!(block_on(gate.explain(&query("203.0.113.2"))).unwrap().decision.allowed, "the rest is for others");
    block_on(gate.reset(&abandoner)).unwrap();
    assert!(explained().allowed);
    assert_eq!(limit("203.0.113.1").share, None);
    assert!(begin(&gate, "203.0.113.1").is_ok());
    kept.into_iter().for_each(|permit| permit.end());
    clock.advance(Span::from_secs(400));
    assert_eq!((free(&gate), gate.kept_permits()), (4, 0));
}

#[test]
fn a_kept_permit_ends_when_the_longest_recent_call_would() {
    let (gate, clock, _) = gate(FOUR);
    assert_eq!(kept_for(&gate, &clock, 10_000), 20_000, "nothing is known but the lease");
    call(&gate, &clock, 2_000);
    assert_eq!(kept_for(&gate, &clock, 0), 30_000, "a single call may be a short one");
    clock.advance(Span::from_secs(60));
    // The periods begin with the first call that ends in them.
    call(&gate, &clock, 1_000);
    call(&gate, &clock, 3_000);
    call(&gate, &clock, 500);
    assert_eq!(kept_for(&gate, &clock, 0), 3_000);
    assert_eq!(kept_for(&gate, &clock, 1_000), 2_000, "since the start of the call");
    assert_eq!(kept_for(&gate, &clock, 5_000), 100, "it has lasted for longer already");
    for _ in 0..20 {
        begin(&gate, "203.0.113.2").unwrap().cancel();
        drop(begin(&gate, "203.0.113.3").unwrap().keep());
        clock.advance(Span::from_secs(60));
    }
    assert_eq!(kept_for(&gate, &clock, 0), 3_000, "neither abandoned calls nor those without work shorten it");
    for _ in 0..5 {
        clock.advance(Span::from_secs(60));
        call(&gate, &clock, 500);
    }
    assert_eq!(kept_for(&gate, &clock, 0), 500, "longer calls of earlier minutes are forgotten");
}

#[test]
fn a_kept_permit_ends_with_the_work_that_is_observed() {
    let (gate, clock, _) = gate(FOUR);
    call(&gate, &clock, 1_000);
    clock.advance(Span::from_secs(60));
    call(&gate, &clock, 1_000);
    let observed = begin(&gate, "203.0.113.1").unwrap().keep().unwrap();
    clock.advance(Span::from_millis(200));
    observed.end();
    assert_eq!((free(&gate), gate.kept_permits()), (4, 0), "before its likely end");
    let observed = begin(&gate, "203.0.113.2").unwrap().keep();
    clock.advance(Span::from_secs(20));
    assert_eq!((free(&gate), gate.kept_permits()), (3, 1), "it goes on");
    drop(observed);
    assert_eq!((free(&gate), gate.kept_permits()), (4, 0));
    let observed = begin(&gate, "203.0.113.1").unwrap().keep().unwrap();
    clock.advance(Span::from_millis(29_999));
    assert_eq!(free(&gate), 3);
    clock.advance(Span::from_millis(1));
    assert_eq!(free(&gate), 4, "30 s are the most");
    observed.end();
}

#[test]
fn a_client_that_abandons_calls_has_half_of_a_limit() {
    let (gate, clock, _) = gate(FOUR);
    let abandon = |count: usize| {
        let begun: Vec<_> = (0..10).map_while(|_| begin(&gate, "203.0.113.1").ok()).collect();
        assert_eq!(begun.len(), count);
        begun.into_iter().for_each(|permit| drop(permit.keep()));
    };
    abandon(4);
    clock.advance(Span::from_secs(30));
    for _ in 0..5 {
        let long = begin(&gate, "192.0.2.1").unwrap();
        abandon(2);
        clock.advance(Span::from_secs(15));
        abandon(0);
        let refused = begin(&gate, "203.0.113.1").unwrap_err();
        let wait = refused.retry_after.map(Span::as_secs_ceil);
        assert_eq!((refused.limit, refused.remaining, wait), (Some(4), Some(0), Some(15)));
        assert_eq!(free(&gate), 1, "others have the rest");
        clock.advance(Span::from_secs(15));
        drop(long);
    }
    // Calls that end count towards the share while they run.
    let running = [begin(&gate, "203.0.113.1").unwrap(), begin(&gate, "203.0.113.1").unwrap()];
    assert!(begin(&gate, "203.0.113.1").is_err());
    drop(running);
    assert!(begin(&gate, "203.0.113.1").is_ok());
    clock.advance(Span::from_secs(300));
    abandon(4);
}

#[test]
fn calls_that_are_finished_count_towards_the_share() {
    let (gate, ..) = gate(FOUR);
    let finished: Vec<_> = (0..4).map(|_| begin(&gate, "203.0.113.1").unwrap()).collect();
    assert!(finished.iter().all(PermitGuard::count_abandoned));
    assert_eq!(gate.finishing_calls(), 4);
    drop(finished);
    assert_eq!(free_for(&gate, "203.0.113.1"), 2);
    let finished = begin(&gate, "203.0.113.1").unwrap();
    assert!(finished.count_abandoned());
    assert_eq!(free_for(&gate, "203.0.113.1"), 1, "while it goes on");
    assert_eq!((gate.kept_permits(), gate.finishing_calls()), (0, 1));
}

/// A client that always has a call under way isn't halved for longer than an idle one.
#[test]
fn a_busy_client_has_its_share_for_five_minutes() {
    let (gate, clock, _) = gate(FOUR);
    drop(begin(&gate, "203.0.113.1").unwrap().keep());
    clock.advance(Span::from_secs(30));
    let mut running = None;
    for _ in 0..27 {
        clock.advance(Span::from_secs(10));
        running = Some(begin(&gate, "203.0.113.1").unwrap());
    }
    assert!(running.is_some());
    assert_eq!(free_for(&gate, "203.0.113.1"), 3);
}

/// Programs that renew their permits over the decision API have the same share as others.
#[test]
fn renewed_calls_stay_in_the_share() {
    let (gate, clock, _) = gate(FOUR);
    drop(begin(&gate, "203.0.113.1").unwrap().keep());
    clock.advance(Span::from_secs(30));
    let client = query("203.0.113.1");
    let permits = [(); 2].map(|()| gate.check_now(&client).unwrap().permit.unwrap());
    for _ in 0..4 {
        clock.advance(Span::from_secs(20));
        for permit in permits {
            assert!(block_on(gate.renew(&client, PermitId::new(permit))).unwrap());
        }
    }
    assert!(!gate.check_now(&client).unwrap().allowed);
}

/// A client beyond its share is told when the next of its calls likely ends, and not a second again and again.
#[test]
fn the_wait_beyond_a_share_is_that_of_the_next_end() {
    let (gate, clock, _) = gate(FOUR);
    let slow = begin(&gate, "203.0.113.1").unwrap();
    drop(begin(&gate, "203.0.113.1").unwrap().keep());
    drop(slow.keep());
    clock.advance(Span::from_secs(29));
    let wait = || begin(&gate, "203.0.113.1").unwrap_err().retry_after.map(Span::as_secs_ceil);
    assert_eq!(wait(), Some(1));
    clock.advance(Span::from_secs(1));
    let _running = [begin(&gate, "203.0.113.1").unwrap(), begin(&gate, "203.0.113.1").unwrap()];
    assert_eq!(wait(), Some(30), "no call has ended yet, so a lease is the usual time");
}

/// A client isn't held to fewer calls than its share of a large limit.
#[test]
fn the_bound_of_a_client_grows_with_its_share() {
    let (gate, ..) = gate("[inbound.action.report]\nlimit = \"400 in flight\"\nkey = [\"action\"]\n");
    let kept = (0..400).map_while(|_| begin(&gate, "203.0.113.1").ok()).filter_map(PermitGuard::keep);
    assert_eq!(kept.map(drop).count(), 200);
}

/// A share also ends by a reset when no call of the client is counted.
#[test]
fn a_reset_ends_the_share_of_a_client_without_calls() {
    let of_nobody = Query { ip: None, ..query("203.0.113.1") };
    for reset in [query("203.0.113.1"), of_nobody] {
        let (gate, ..) = gate(FOUR);
        begin(&gate, "203.0.113.1").unwrap().keep().unwrap().end();
        assert_eq!(free_for(&gate, "203.0.113.1"), 2);
        block_on(gate.reset(&reset)).unwrap();
        assert_eq!(free_for(&gate, "203.0.113.1"), 4);
    }
}

/// A client beyond its share is refused as by a full limit.
#[test]
fn calls_beyond_a_share_count_as_refused() {
    let global =
        "[inbound.global]\nlimit = \"10 per 1h\"\ncount = \"all\"\npenalty = { base = \"2s\", cap = \"1h\" }\n";
    let (gate, ..) = gate(&format!("{global}{FOUR}"));
    let check = || gate.check_now(&query("203.0.113.1")).unwrap();
    for _ in 0..2 {
        drop(begin(&gate, "203.0.113.1").unwrap().keep());
    }
    for _ in 0..8 {
        let refused = check();
        assert_eq!((refused.reason, refused.blocked), (Reason::Share, false));
    }
    assert_eq!(
        [check(), check()].map(|refused| (refused.blocked, refused.begins_block)),
        [(true, true), (true, false)]
    );
    assert_eq!(free(&gate), 2);
}

#[test]
fn a_call_beyond_a_share_is_a_strike() {
    let (gate, clock, _) = gate(&format!("{FOUR}penalty = {{ base = \"2s\", cap = \"1h\" }}\n"));
    for _ in 0..2 {
        drop(begin(&gate, "203.0.113.1").unwrap().keep());
    }
    let refused = begin(&gate, "203.0.113.1").unwrap_err();
    assert_eq!((refused.reason, refused.begins_block, refused.strikes), (Reason::Penalty, true, 1));
    assert_eq!(refused.retry_after, Some(Span::from_secs(30)), "its calls end later than the block");
    clock.advance(Span::from_secs(30));
    assert!(begin(&gate, "203.0.113.1").is_ok());
}

/// Calls that a full limit in shadow lets pass have no permit that would end them.
#[test]
fn calls_beyond_a_shadow_limit_take_no_places() {
    let shadow = "[inbound.action.page]\nlimit = \"1 in flight\"\nkey = [\"action\"]\nmode = \"shadow\"\n";
    let (gate, ..) = gate(&format!("{FOUR}{shadow}"));
    drop(begin(&gate, "203.0.113.1").unwrap().keep());
    let page = Query { action: Some("page"), ..query("203.0.113.1") };
    for _ in 0..5_000 {
        assert!(gate.check_now(&page).unwrap().allowed);
    }
    assert!(begin(&gate, "203.0.113.2").unwrap().keep().is_some());
}

/// After the wait, so many calls have ended that the client has less than its share.
#[test]
fn the_wait_beyond_a_share_covers_all_calls_that_must_end() {
    let (gate, clock, _) = gate(FOUR);
    let begun: Vec<_> = (0..4).map(|_| begin(&gate, "203.0.113.1").unwrap()).collect();
    for permit in begun {
        drop(permit.keep());
        clock.advance(Span::from_secs(5));
    }
    // They end 10, 15, 20 and 25 s from now, and the share is two.
    let refused = begin(&gate, "203.0.113.1").unwrap_err();
    assert_eq!(refused.retry_after, Some(Span::from_secs(20)));
    clock.advance(Span::from_secs(20));
    assert!(begin(&gate, "203.0.113.1").is_ok());
}

/// The calls of a further client are counted instead of those of the one whose time ends first.
#[test]
fn counted_clients_are_bounded() {
    let (gate, clock, _) = gate("[inbound.action.report]\nlimit = \"4000 in flight\"\nkey = [\"action\"]\n");
    let address = |client: usize| format!("10.0.{}.{}", client / 250, client % 250);
    let is_counted = |client| block_on(gate.explain(&query(&address(client)))).unwrap().limits[0].share.is_some();
    for client in 0..1024 {
        begin(&gate, &address(client)).unwrap().keep().unwrap().end();
        clock.advance(Span::from_millis(1));
    }
    let _kept = begin(&gate, &address(0)).unwrap().keep();
    let _further = begin(&gate, &address(2000)).unwrap().keep();
    assert_eq!([0, 1, 2, 1023, 2000].map(is_counted), [true, false, true, true, true]);
}

/// One client takes a part of the places for calls that are kept or finished.
#[test]
fn abandoned_calls_without_a_place_are_not_observed() {
    let (gate, ..) = gate(&FOUR.replace("action\"]", "key\"]"));
    let begun = (0..66).map(|key| {
        let key = key.to_string();
        let query = Query { key: Some(&key), ..query("203.0.113.1") };
        let decision = gate.check_now(&query).unwrap();
        gate.hold_permit(&query, &decision).unwrap().unwrap()
    });
    let mut begun = begun.collect::<Vec<_>>().into_iter();
    let finished: Vec<_> = begun.by_ref().take(32).filter(PermitGuard::count_abandoned).collect();
    let kept = begun.by_ref().take(32).filter_map(PermitGuard::keep).map(drop).count();
    assert_eq!((finished.len(), kept), (32, 32));
    let [finished, kept] = begun.collect::<Vec<_>>().try_into().unwrap();
    assert!(!finished.count_abandoned() && kept.keep().is_none());
}

/// A reset also ends the bound on all abandoned calls of a client.
#[test]
fn a_reset_ends_the_bound_of_a_client() {
    let (gate, ..) = gate("[inbound.action.report]\nlimit = \"4000 in flight\"\nkey = [\"action\"]\n");
    let begun: Vec<_> = (0..256).map(|_| begin(&gate, "203.0.113.1").unwrap()).collect();
    begun.into_iter().for_each(|permit| drop(permit.keep()));
    assert!(begin(&gate, "203.0.113.1").is_err());
    block_on(gate.reset(&query("203.0.113.1"))).unwrap();
    assert!(begin(&gate, "203.0.113.1").is_ok());
}

/// A server on the same machine that doesn't tell its clients stands for many.
#[test]
fn a_server_on_this_machine_is_no_client() {
    let (gate, ..) = gate(FOUR);
    for _ in 0..4 {
        drop(begin(&gate, "127.0.0.1").unwrap().keep());
    }
    assert_eq!(free(&gate), 0);
}

#[test]
fn an_ipv6_network_is_one_client() {
    let (gate, ..) = gate(FOUR);
    let begun = ["2001:db8::1", "2001:db8::2", "2001:db8::3"].map(|ip| begin(&gate, ip).unwrap());
    begun.into_iter().for_each(|permit| drop(permit.keep()));
    assert!(begin(&gate, "2001:db8::4").is_err());
    assert!(begin(&gate, "2001:db8:0:1::1").is_ok());
}

#[test]
fn a_limit_of_each_client_has_no_shares() {
    let (gate, ..) = gate("[inbound.action.report]\nlimit = \"4 in flight\"\n");
    for kept in 0..4 {
        assert_eq!(gate.kept_permits(), kept);
        drop(begin(&gate, "203.0.113.1").unwrap().keep());
    }
    assert!(begin(&gate, "203.0.113.1").is_err());
    assert_eq!(free(&gate), 9);
}

#[test]
fn kept_permits_outlive_a_change_of_the_policy() {
    let (first, clock, policy) = gate(FOUR);
    let begun = [(); 3].map(|()| begin(&first, "203.0.113.1").unwrap());
    begun.into_iter().for_each(|permit| drop(permit.keep()));
    let second = first.next(&policy.load_next(sources(&FOUR.replace('4', "6"))).unwrap()).unwrap();
    assert_eq!((free(&second), second.kept_permits()), (3, 3));
    assert!(begin(&second, "203.0.113.1").is_err(), "half of six");
    clock.advance(Span::from_secs(30));
    second.maintain();
    assert_eq!((second.kept_permits(), free(&second)), (0, 6));
}

/// The permits of many abandoned calls end with their lease.
#[test]
fn kept_permits_are_bounded() {
    let (gate, clock, _) = gate("[inbound.action.report]\nlimit = \"4 in flight\"\n");
    for number in 0..3_000 {
        for _ in 0..4 {
            drop(begin(&gate, &format!("10.0.{}.{}", number / 250, number % 250)).unwrap().keep());
        }
    }
    assert_eq!(gate.kept_permits(), 4096);
    assert!(begin(&gate, "10.0.11.249").is_err(), "the last ones are kept as well");
    clock.advance(Span::from_secs(30));
    assert!(begin(&gate, "10.0.11.249").is_ok() && begin(&gate, "10.0.0.0").is_ok());
    assert_eq!(gate.kept_permits(), 0);
}

/// The layer over real sockets, in front of handlers whose work goes on elsewhere.
#[cfg(feature = "axum")]
mod layer {
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use axum::Router;
    use axum::routing::get;
    use tidegate::GateLayer;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::{Notify, Semaphore};

    use super::{Gate, ManualClock, Span, gate};

    const TWO: &str = "[inbound.action.two]\nmatch = { path = \"/*\" }\nlimit = \"2 in flight\"\n";

    #[derive(Clone)]
    struct Work {
        running: Arc<AtomicUsize>,
        most: Arc<AtomicUsize>,
        begun: Arc<Notify>,
        ends: Arc<Semaphore>,
        answered: Arc<AtomicUsize>,
    }

    impl Work {
        async fn run(self) {
            let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(running, Ordering::SeqCst);
            self.begun.notify_one();
            self.ends.acquire().await.unwrap().forget();
            self.running.fetch_sub(1, Ordering::SeqCst);
        }
    }

    async fn serve(settings: &str) -> (SocketAddr, Work, ManualClock) {
        let work = Work {
            running: Arc::default(),
            most: Arc::default(),
            begun: Arc::default(),
            ends: Arc::new(Semaphore::new(0)),
            answered: Arc::default(),
        };
        let (gate, clock, policy) = gate(&format!("{settings}{TWO}"));
        let started = work.clone();
        let handler = async move || {
            tokio::spawn(started.clone().run()).await.unwrap();
            started.answered.fetch_add(1, Ordering::SeqCst);
            "done"
        };
        let app = Router::new().route("/", get(handler)).layer(GateLayer::from_gate(Gate::clone(&gate), &policy));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await.unwrap();
        });
        (address, work, clock)
    }

    /// Sends a request. Returns the connection if its work has begun, and `None` if it was refused.
    async fn begin(address: SocketAddr, work: &Work) -> Option<TcpStream> {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        let mut head = [0; 12];
        tokio::select! {
            _ = client.read_exact(&mut head) => {
                assert_eq!(&head, b"HTTP/1.1 429");
                None
            }
            () = work.begun.notified() => Some(client),
        }
    }

    async fn abort(address: SocketAddr, work: &Work, calls: usize) {
        for call in 0..calls {
            assert_eq!(begin(address, work).await.is_some(), call < 2);
        }
        assert_eq!(work.most.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn work_that_goes_on_keeps_its_permit() {
        let (address, work, clock) = serve("").await;
        abort(address, &work, 50).await;
        clock.advance(Span::from_secs(30));
        assert!(begin(address, &work).await.is_some());
        assert_eq!(work.answered.load(Ordering::SeqCst), 0);
    }

    #[tokio::test]
    async fn finished_calls_end_with_their_response() {
        let (address, work, _) = serve("[inbound]\non_disconnect = \"finish\"\n").await;
        for round in 1..=3 {
            abort(address, &work, 10).await;
            work.ends.add_permits(2);
            while work.answered.load(Ordering::SeqCst) < 2 * round {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
}
