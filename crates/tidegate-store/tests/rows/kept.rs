//! Kept rows, removed rows, and the errors without a server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate_core::{
    Admission, Batch, Clock, Concurrency, Key, Limit, LimitKind, Op, PenaltyMode, Rate, Span, Time, Verb,
};
use tidegate_store::{
    Announcement, DatabaseOptions, Fleet, FleetOptions, RemoteStore, Store as _, StoreError, StoreResponse, TimeSource,
    fleet_limits,
};
use tidegate_testkit::fixtures;

use super::{Kind, an_hour, batch, options, patiently, plan, runtime};

/// A server that is stopped, killed or frozen and comes back keeps counts, blocks and the seed, and the store finds it.
pub(crate) fn outlives_restarts<K: Kind>() {
    let Some(server) = K::server() else { return };
    let penalty = fixtures::doubling_penalty(600, 3600, PenaltyMode::Parole, Span::from_secs(3600));
    let limits = plan(vec![an_hour(5), an_hour(1).with_penalty(penalty)]);
    let open = || K::open(Arc::clone(&limits), &options(server.url(), "r_", TimeSource::Store)).unwrap();
    let take = |limit| batch(Verb::Take, &[(limit, 1)]);
    runtime().block_on(async {
        let store = open();
        assert_eq!(patiently(&store, &take(1), Time::ZERO).await.list()[0].admission, Admission::Admitted);
        assert_eq!(store.apply(&take(1), Time::ZERO).await.unwrap().list()[0].admission, Admission::Refused);
        let seed = store.get_or_insert_seed([7; 16]).await.unwrap();
        assert_eq!((seed, open().get_or_insert_seed([8; 16]).await.unwrap()), ([7; 16], [7; 16]));
        for round in 0..K::RESTARTS.len() as u64 {
            assert!(!patiently(&store, &take(0), Time::ZERO).await.refuses(), "round {round}");
            K::RESTARTS[round as usize](&server);
            let after = patiently(&store, &batch(Verb::Peek, &[(0, 1), (1, 1)]), Time::ZERO).await;
            assert_eq!(after.list()[0].used, round + 1);
            assert_eq!(after.list()[1].admission, Admission::Blocked);
        }
        assert_eq!(open().get_or_insert_seed([9; 16]).await.unwrap(), [7; 16]);
    });
}

/// After all windows, blocks, rates, permits and announcements have ended, a clean-up leaves no rows. Before, it leaves the rows that
/// count.
pub(crate) fn expires<K: Kind>() {
    let Some(server) = K::server() else { return };
    let limits = plan(vec![
        an_hour(5).with_penalty(fixtures::doubling_penalty(2, 3600, PenaltyMode::Parole, Span::from_secs(3600))),
        Limit::new(LimitKind::Rate(Rate::new(1, Span::from_secs(60), 5).unwrap())),
        Limit::new(LimitKind::Concurrency(Concurrency::new(5, Span::from_secs(30)).unwrap())),
    ]);
    runtime().block_on(async {
        let store = K::open(limits, &options(server.url(), "e_", TimeSource::Caller)).unwrap();
        let take = |client| batch(Verb::Take, &[(0, client), (1, client), (2, client)]);
        let taken = (0..700).map(|client| store.apply(&take(client), fixtures::test_time(0)));
        for outcomes in futures_util::future::join_all(taken).await {
            assert!(!outcomes.unwrap().refuses());
        }
        assert_eq!(K::rows(&server, "e_").await, 2100);
        // The permits are over, the rest isn't.
        store.apply(&Batch::new(0), fixtures::test_time(40_000)).await.unwrap();
        store.maintain().await.unwrap();
        assert_eq!(K::rows(&server, "e_").await, 1400);
        let still = store.apply(&batch(Verb::Peek, &[(0, 3)]), fixtures::test_time(40_000)).await.unwrap();
        assert_eq!(still.list()[0].used, 1);
        // What is given back leaves no row.
        store.apply(&batch(Verb::Refund, &[(0, 3), (1, 3)]), fixtures::test_time(40_000)).await.unwrap();
        assert_eq!(K::rows(&server, "e_").await, 1398);
        let announcement = Announcement::new(1, Span::from_secs(1), b"node".to_vec()).unwrap();
        store.announce(announcement, fixtures::test_time(40_000)).await.unwrap();
        store.apply(&Batch::new(0), fixtures::test_time(3_700_000)).await.unwrap();
        store.maintain().await.unwrap();
        assert_eq!(K::rows(&server, "e_").await, 0);
    });
}

/// Values of other programs in the list of nodes hide no node for longer than a few announcements, and are removed.
pub(crate) fn removes_junk_nodes<K: Kind>() {
    let Some(server) = K::server() else { return };
    let store = K::open(plan(vec![an_hour(5)]), &options(server.url(), "j_", TimeSource::Store)).unwrap();
    runtime().block_on(async {
        let announce = async |node_id| {
            let announcement = Announcement::new(node_id, Span::from_secs(600), b"node".to_vec()).unwrap();
            let nodes = store.announce(announcement, Time::ZERO).await.unwrap();
            let mut ids: Vec<u64> = nodes.into_iter().map(|node| node.node_id).collect();
            ids.sort_unstable();
            ids
        };
        announce(u64::MAX).await;
        K::add_junk_nodes(&server, "j_").await;
        assert!(announce(u64::MAX - 1).await.len() <= 2);
        announce(u64::MAX).await;
        assert_eq!(announce(u64::MAX - 1).await, [u64::MAX - 1, u64::MAX]);
        assert_eq!(K::junk_nodes(&server, "j_").await, 0);
    });
}

/// A server that has lost its tables gets new ones from its clients.
pub(crate) fn comes_back_empty<K: Kind>() {
    let Some(server) = K::server() else { return };
    let store = K::open(plan(vec![an_hour(5)]), &options(server.url(), "l_", TimeSource::Store)).unwrap();
    runtime().block_on(async {
        let ask = batch(Verb::Take, &[(0, 1)]);
        patiently(&store, &ask, Time::ZERO).await;
        K::forget(&server, "l_").await;
        patiently(&store, &ask, Time::ZERO).await;
        assert_eq!(K::rows(&server, "l_").await, 1);
    });
}

/// A node over a store that lost its tables keeps a block that it knows, and tells the store of it; another one learns
/// it there.
#[expect(clippy::disallowed_methods, reason = "the server's clock runs too")]
pub(crate) fn learns_lost_blocks_again<K: Kind>() {
    #[derive(Clone, Copy)]
    struct Monotonic(Instant);
    impl Clock for Monotonic {
        fn now(&self) -> Time {
            Time::from_secs(1_700_000_000) + Span::from_duration(self.0.elapsed())
        }
    }
    let Some(server) = K::server() else { return };
    let penalty = fixtures::doubling_penalty(600, 3600, PenaltyMode::Parole, Span::from_secs(3600));
    let limits = Arc::new(fleet_limits(&plan(vec![an_hour(1).with_penalty(penalty)])).unwrap());
    let clock = Monotonic(Instant::now());
    let node = |number| {
        let store = K::open(Arc::clone(&limits), &options(server.url(), "b_", TimeSource::Store)).unwrap();
        let mut patient = FleetOptions::new(number);
        patient.timeout = Duration::from_secs(2);
        Fleet::start(Box::new(store), clock, patient)
    };
    let ask = async |node: &Fleet, verb| match node.apply(&batch(verb, &[(0, 1)]), clock.now()) {
        StoreResponse::Ready(outcomes) => outcomes.list()[0],
        StoreResponse::Pending(later) => later.await.unwrap().list()[0],
    };
    runtime().block_on(async {
        let (one, two) = (node(1), node(2));
        while !one.is_up() || ask(&one, Verb::Take).await.block_until <= clock.now() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(ask(&one, Verb::Take).await.admission, Admission::Blocked);
        K::forget(&server, "b_").await;
        for _ in 0..100 {
            assert_eq!(ask(&one, Verb::Take).await.admission, Admission::Blocked, "it stays blocked");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let found = ask(&two, Verb::Peek).await;
        assert_eq!((found.admission, found.strikes), (Admission::Blocked, 1), "the store knows it again");
        ask(&two, Verb::Reset).await;
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        assert_eq!(ask(&one, Verb::Take).await.admission, Admission::Admitted, "a reset ends it everywhere");
    });
}

/// Keys that differ in one bit, and tags that do, are others; bytes that mean something elsewhere mean nothing here.
pub(crate) fn keys_apart<K: Kind>() {
    let Some(server) = K::server() else { return };
    let tags = [0, 1, 1 << 63, u64::from_be_bytes(*b"'; DROP "), u64::from_be_bytes(*b"$where\0\0")];
    let limits = plan(tags.iter().map(|tag| an_hour(1).with_tag(*tag)).collect());
    let halves = [0, 1, 1 << 63, u64::MAX, 0x20, 0x2020_2020_2020_2020, u64::from_be_bytes(*b"\"{}\0\\%_'")];
    runtime().block_on(async {
        let store = K::open(limits, &options(server.url(), "h_", TimeSource::Store)).unwrap();
        for limit in 0..tags.len() {
            for key in halves.iter().flat_map(|hi| halves.iter().map(|lo| Key::new(*hi, *lo))) {
                let mut batch = Batch::new(0);
                batch.push(Op::new(fixtures::limit_id(limit), Verb::Take, key, 1)).unwrap();
                assert!(!store.apply(&batch, Time::ZERO).await.unwrap().refuses(), "{limit} {key:?} was another's");
                assert!(store.apply(&batch, Time::ZERO).await.unwrap().refuses(), "{limit} {key:?} was forgotten");
            }
        }
    });
}

/// A program that doesn't know the tables' version reports it, and doesn't change them.
pub(crate) fn leaves_later_versions_alone<K: Kind>() {
    let Some(server) = K::server() else { return };
    let open = || K::open(plan(vec![an_hour(5)]), &options(server.url(), "v_", TimeSource::Store)).unwrap();
    runtime().block_on(async {
        patiently(&open(), &batch(Verb::Take, &[(0, 1)]), Time::ZERO).await;
        K::make_later(&server, "v_").await;
        let error = open().apply(&batch(Verb::Take, &[(0, 1)]), Time::ZERO).await.unwrap_err().to_string();
        assert!(error.contains("version 2"), "{error}");
        assert_eq!(K::rows(&server, "v_").await, 1);
    });
}

/// If no server listens, all calls fail at once, waiting ones too. A frozen server doesn't delay calls for long.
pub(crate) fn tells_of_outages<K: Kind>() {
    let Some(server) = K::server() else { return };
    let store = Arc::new(K::open(plan(vec![an_hour(100)]), &options(server.url(), "g_", TimeSource::Store)).unwrap());
    runtime().block_on(async {
        patiently(&*store, &batch(Verb::Take, &[(0, 1)]), Time::ZERO).await;
        server.freeze();
        let asked: Vec<_> = (0..64).map(|key| store.apply(&batch(Verb::Take, &[(0, key)]), Time::ZERO)).collect();
        for answer in futures_util::future::join_all(
            asked.into_iter().map(|ask| tokio::spawn(tokio::time::timeout(Duration::from_secs(20), ask))),
        )
        .await
        {
            assert!(matches!(answer.unwrap(), Ok(Err(_))), "a frozen server answered, or held callers for ever");
        }
        server.thaw();
        patiently(&*store, &batch(Verb::Take, &[(0, 2)]), Time::ZERO).await;
        server.kill();
        let (first, rest) = (Duration::from_secs(5), Duration::from_secs(5));
        let ask = || store.apply(&batch(Verb::Take, &[(0, 1)]), Time::ZERO);
        assert!(tokio::time::timeout(first, ask()).await.unwrap().is_err());
        let all = async {
            for _ in 0..3 {
                assert!(ask().await.is_err());
            }
        };
        tokio::time::timeout(rest, all).await.unwrap();
    });
}

/// A prefix is an identifier or nothing; and neither errors nor debug output tell the password.
pub(crate) fn refuses_hostile_names<K: Kind>() {
    let hostile = ["", "1a", "a b", "a;--", "a\"", "a`", "a'", "a\0", "é", "$where", "a.b", "A", &"a".repeat(33)];
    let open = |options: &DatabaseOptions| K::open(plan(vec![an_hour(1)]), options).map(drop);
    for prefix in hostile {
        let refused = open(&options(K::NOWHERE, prefix, TimeSource::Store));
        assert!(matches!(refused, Err(StoreError::Failed(_))), "{prefix:?} was taken");
    }
    let fine = DatabaseOptions::new(K::NOWHERE);
    assert!(open(&fine).is_ok());
    assert!(open(&DatabaseOptions { connections: 0, ..fine.clone() }).is_err());
    assert!(!format!("{fine:?}").contains("secret"));
    for url in ["", "secret", "redis://secret@localhost", "://secret"] {
        let error = open(&DatabaseOptions::new(url)).unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
    }
    let store = K::open(plan(vec![an_hour(1)]), &fine).unwrap();
    let error = runtime().block_on(store.apply(&batch(Verb::Take, &[(0, 1)]), Time::ZERO)).unwrap_err().to_string();
    assert!(!error.contains("secret"), "{error}");
}
