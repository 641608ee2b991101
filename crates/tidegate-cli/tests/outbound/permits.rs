//! Calls in flight with each of several credentials, as a provider sees them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tidegate_testkit::http_client::{HttpClient, get_request};

use crate::common::{gateway, provider};
use crate::upstream::{Upstream, reply};

/// The number of calls in flight per token, now and at most so far.
type Tokens = Arc<Mutex<BTreeMap<String, (u32, u32)>>>;

/// A slow provider: each call takes a while, or as long as it is held, and every tenth fails.
fn counting(tokens: &Tokens, held: &Arc<AtomicBool>) -> Upstream {
    let (tokens, held, calls) = (Arc::clone(tokens), Arc::clone(held), AtomicU32::new(0));
    Upstream::start(move |request| {
        let token = request.lines().find_map(|line| line.strip_prefix("authorization: Bearer ")).unwrap().to_owned();
        {
            let mut tokens = tokens.lock().unwrap();
            let (now, most) = tokens.entry(token.clone()).or_default();
            *now += 1;
            *most = (*now).max(*most);
        }
        thread::sleep(Duration::from_millis(50));
        while held.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(5));
        }
        let fails = calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(10);
        // Counted before the reply, because the next call may come as soon as the reply is sent.
        tokens.lock().unwrap().get_mut(&token).unwrap().0 -= 1;
        reply(if fails { "503 Service Unavailable" } else { "200 OK" }, "", "done")
    })
}

#[test]
fn tokens_share_calls_evenly_within_in_flight_limits() {
    let (tokens, held) = (Tokens::default(), Arc::new(AtomicBool::new(false)));
    let upstream = counting(&tokens, &held);
    let settings = "auth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\", \"env:C\"]\nadaptive = \"off\"\n\
                    credential_limit = \"5 in flight\"\ntimeout = \"30s\"\nbreaker = \"off\"\nbudget = { ratio = 1, min = 50 }\n\
                    retry = { base = \"10ms\", cap = \"20ms\", max_attempts = 5 }";
    let (_gateway, port) =
        gateway(&provider(upstream.port, settings), &[("A", "token-a"), ("B", "token-b"), ("C", "token-c")]);
    let counts = || tokens.lock().unwrap().values().copied().unzip::<u32, u32, Vec<_>, Vec<_>>();
    let until = |under_way: u32| {
        let reached = (0..4_000).any(|_| {
            thread::sleep(Duration::from_millis(5));
            counts().0.iter().sum::<u32>() == under_way
        });
        assert!(reached, "{under_way} calls under way: {tokens:?}");
    };
    let send = |clients: usize| -> Vec<HttpClient> {
        let sent = (0..clients).map(|_| {
            let mut client = HttpClient::connect(port).unwrap();
            client.send(get_request("/api/x"));
            client
        });
        sent.collect()
    };
    // Five times the maximum number in flight.
    let clients: Vec<_> = (0..75)
        .map(|_| {
            let mut client = HttpClient::connect(port).unwrap();
            thread::spawn(move || (0..4).all(|_| client.request(get_request("/api/x")).status == 200))
        })
        .collect();
    assert!(clients.into_iter().all(|client| client.join().unwrap()));
    let (_, most) = counts();
    assert!(most.len() == 3 && most.iter().all(|most| *most <= 5), "{most:?}");
    // Of the clients that disconnect, half are in flight and half are queued.
    held.store(true, Ordering::Relaxed);
    let leavers = send(30);
    until(15);
    drop(leavers);
    thread::sleep(Duration::from_millis(100));
    held.store(false, Ordering::Relaxed);
    until(0);
    // Their permits are free again, and no more than those.
    held.store(true, Ordering::Relaxed);
    tokens.lock().unwrap().values_mut().for_each(|(now, most)| *most = *now);
    let clients = send(30);
    until(15);
    thread::sleep(Duration::from_millis(200));
    assert_eq!(counts(), (vec![5; 3], vec![5; 3]));
    held.store(false, Ordering::Relaxed);
    assert!(clients.into_iter().all(|mut client| client.read_response().status == 200));
    assert_eq!(counts(), (vec![0; 3], vec![5; 3]));
}
