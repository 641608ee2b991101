//! Floods from more networks than fit into the store: blocked clients stay blocked, and networks are never banned.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use tidegate::clock::ManualClock;
use tidegate::policy::{KeySeed, Policy, PolicySources, Query};
use tidegate::store::Memory;
use tidegate::{Decision, Gate, Span};
use tidegate_core::ShareLevel;

const LOGIN: &str = r#"
[inbound.action.login]
limit = "5 per 60s"
ban = "600s"
"#;
const MIB: usize = 1 << 20;
const BLOCKED: u32 = 200;
/// The number of calls by which a client becomes blocked.
const CALLS: u32 = 6;

fn gate(toml: &str, max_bytes: usize) -> (Gate<Memory, ManualClock>, ManualClock) {
    let policy = Policy::load(PolicySources::new().file("test.toml", toml)).unwrap_or_else(|errors| panic!("{errors}"));
    let limits = Arc::clone(policy.plan().limits());
    let clock = ManualClock::default();
    let store = Memory::new(limits, max_bytes);
    (Gate::from_parts(Arc::clone(policy.plan()), store, clock.clone(), KeySeed::new([5; 16])), clock)
}

fn login(gate: &Gate<Memory, ManualClock>, ip: IpAddr) -> Decision {
    gate.check_now(&Query { action: Some("login"), ip: Some(ip), ..Query::default() }).unwrap()
}

/// An address in a separate /24, which begins with 100.
fn v4(number: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from(100 << 24 | number << 8 | 7))
}

/// An address in a separate /48.
fn v6(number: u32) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(0x2001_0db8_u128 << 96 | u128::from(number) << 80 | 7))
}

fn victim(number: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from(198 << 24 | 51 << 16 | number << 3))
}

fn blocked(gate: &Gate<Memory, ManualClock>) -> usize {
    (0..BLOCKED).filter(|number| login(gate, victim(*number)).blocked).count()
}

#[test]
fn blocked_clients_stay_blocked_during_a_flood() {
    let floods = [(MIB, 8_000, v4 as fn(u32) -> IpAddr), (MIB, 20_000, v6), (4 * MIB, 33_000, v4)];
    for (bytes, networks, address) in floods {
        let (gate, clock) = gate(LOGIN, bytes);
        for number in 0..BLOCKED {
            (0..CALLS).for_each(|_| _ = login(&gate, victim(number)));
        }
        assert_eq!(blocked(&gate), BLOCKED as usize);
        for number in 0..networks {
            (0..CALLS).for_each(|_| _ = login(&gate, address(number)));
        }
        let stats = gate.store().stats();
        assert_eq!(blocked(&gate), BLOCKED as usize, "{bytes} bytes, {networks} networks: {stats:?}");
        assert!(stats.losses.forced_shares > 0 && stats.bytes <= bytes, "{stats:?}");
        clock.advance(Span::from_secs(600));
        assert_eq!(blocked(&gate), 0, "a block ends by its time");
    }
}

/// Clients that share their limit with a network larger than a /24 or /48 are refused by that limit, and never blocked.
#[test]
fn clients_sharing_a_limit_are_never_blocked() {
    for address in [v4, v6] {
        let (gate, _) = gate(LOGIN, MIB);
        let (mut alone, mut refused) = (0, 0);
        for number in (0..40_000).step_by(2) {
            (0..CALLS).for_each(|_| _ = login(&gate, address(number)));
            let fresh = login(&gate, address(number + 1));
            assert!(!fresh.blocked, "{} is blocked for what {} did", address(number + 1), address(number));
            if fresh.allowed {
                alone += 1;
            } else {
                refused += 1;
            }
        }
        assert!(alone > 1_000 && refused > 10_000, "{alone} had a limit of their own, {refused} were refused");
    }
}

/// A call under a limit on calls in flight gives back its permits, under whichever key they are.
#[test]
fn permits_shared_by_a_network_are_returned() {
    let policy = "[inbound.action.login]\nlimit = \"5 per 60s\"\nban = \"600s\"\n\
                  [inbound.action.export]\nlimit = \"3 in flight\"\n";
    let (gate, _) = gate(policy, MIB);
    (0..30_000).for_each(|number| (0..CALLS).for_each(|_| _ = login(&gate, v4(number))));
    let mut widest = ShareLevel::Own;
    for number in 0..2_000 {
        let query = Query { action: Some("export"), ip: Some(v4(1 << 16 | number)), ..Query::default() };
        let begun: Vec<_> = (0..3).map(|_| gate.check_now(&query).unwrap()).collect();
        assert!(begun.iter().all(|decision| decision.allowed), "the call before has ended: {number}");
        assert!(!gate.check_now(&query).unwrap().allowed, "three are in flight");
        widest = begun.iter().map(|decision| decision.share_level).fold(widest, ShareLevel::max);
        begun.iter().for_each(|decision| drop(gate.hold_permit(&query, decision).unwrap()));
    }
    assert!(widest > ShareLevel::Own, "some had to share");
}
