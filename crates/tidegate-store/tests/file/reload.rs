//! Limits that change while a file store is in use, and what the file has of them later.

use std::sync::Arc;

use tidegate_core::{Admission, Key, Limit, LimitKind, Limits, PenaltyMode, Rate, Span, Time, Verb};
use tidegate_store::{FileStore, FlushMode, Journal, Store as _, StoreError};
use tidegate_testkit::fixtures;

use crate::common::{Place, one};

const KEY: Key = Key::new(5, 0xfeed_0bad_cafe_beef);

/// Limits with a tag for each pair of name and kind, as policies have. The index stands for the name.
fn named(limits: impl IntoIterator<Item = Limit>) -> Arc<Limits> {
    let with_tag = |(name, limit): (usize, Limit)| {
        let tag = 0x1000 + name as u64 * 16 + u64::from(limit.kind().id());
        limit.with_tag(tag)
    };
    Arc::new(Limits::new(limits.into_iter().enumerate().map(with_tag).collect()).unwrap())
}

fn window(limit: u64) -> Limit {
    fixtures::window_limit(limit, 600)
}

fn rate(per_hour: u64) -> Limit {
    Limit::new(LimitKind::Rate(Rate::new(per_hour, Span::from_secs(3600), per_hour).unwrap()))
}

fn now() -> Time {
    fixtures::test_time(0)
}

fn reload(store: &FileStore, limits: &Arc<Limits>) -> FileStore {
    store.with_limits(Arc::clone(limits), now()).unwrap().unwrap()
}

fn take(store: &FileStore, limit: usize, calls: usize) {
    (0..calls).for_each(|_| assert!(!one(store, Verb::Take, limit, KEY, now()).admission.refuses()));
}

fn used(store: &FileStore, limit: usize) -> u64 {
    one(store, Verb::Peek, limit, KEY, now()).used
}

#[test]
fn changed_and_new_limits_survive_a_restart() {
    let place = Place::new();
    let before = place.store(&named([window(5)]), FlushMode::default(), now());
    take(&before, 0, 4);
    let limits = named([window(10), window(3)]);
    let after = reload(&before, &limits);
    drop(before);
    take(&after, 0, 2);
    take(&after, 1, 3);
    drop(after);
    let reopened = place.store(&limits, FlushMode::default(), now());
    assert_eq!((used(&reopened, 0), used(&reopened, 1)), (6, 3));
}

#[test]
fn the_old_handle_writes_new_terms_too() {
    let place = Place::new();
    let before = place.store(&named([window(5)]), FlushMode::default(), now());
    let limits = named([window(10), window(3)]);
    let after = reload(&before, &limits);
    take(&after, 1, 1);
    drop(after);
    take(&before, 0, 2);
    drop(before);
    let reopened = place.store(&limits, FlushMode::default(), now());
    assert_eq!((used(&reopened, 0), used(&reopened, 1)), (2, 1));
}

#[test]
fn rows_of_a_new_limit_are_restored() {
    let place = Place::new();
    let both = named([window(5), window(3)]);
    let store = place.store(&both, FlushMode::default(), now());
    take(&store, 1, 2);
    drop(store);
    let store = place.store(&named([window(5)]), FlushMode::default(), now());
    assert_eq!(used(&reload(&store, &both), 1), 2);
}

#[test]
fn usage_of_a_former_kind_comes_back() {
    let place = Place::new();
    let (windows, rates) = (named([window(5)]), named([rate(7)]));
    let store = place.store(&windows, FlushMode::default(), now());
    take(&store, 0, 3);
    let other_kind = reload(&store, &rates);
    drop(store);
    assert_eq!(used(&other_kind, 0), 0);
    take(&other_kind, 0, 1);
    let back = reload(&other_kind, &windows);
    assert_eq!(used(&back, 0), 3);
    drop((other_kind, back));
    let reopened = place.store(&rates, FlushMode::default(), now());
    assert_eq!(used(&reopened, 0), 1);
}

#[test]
fn a_block_of_another_kind_survives_a_restart() {
    let place = Place::new();
    let penalty = || fixtures::doubling_penalty(600, 3600, PenaltyMode::Parole, Span::from_secs(600));
    let store = place.store(&named([window(1).with_penalty(penalty())]), FlushMode::default(), now());
    take(&store, 0, 1);
    let block_until = one(&store, Verb::Take, 0, KEY, now()).block_until;
    let rates = named([rate(100).with_penalty(penalty())]);
    let reloaded = reload(&store, &rates);
    drop((store, reloaded));
    let outcome = one(&place.store(&rates, FlushMode::default(), now()), Verb::Take, 0, KEY, now());
    assert_eq!((outcome.admission, outcome.block_until), (Admission::Blocked, block_until));
}

#[test]
fn a_reset_after_a_reload_stays() {
    let place = Place::new();
    let limits = named([window(5), window(3)]);
    let store = place.store(&named([window(5)]), FlushMode::default(), now());
    take(&store, 0, 4);
    store.journal().flush().unwrap();
    let reloaded = reload(&store, &limits);
    one(&reloaded, Verb::Reset, 0, KEY, now());
    drop((store, reloaded));
    assert_eq!(used(&place.store(&limits, FlushMode::default(), now()), 0), 0);
}

#[test]
fn tags_of_another_store_are_refused() {
    let place = Place::new();
    let journal = Journal::open(place.path(), FlushMode::default()).unwrap();
    let open = |limits| FileStore::new(limits, 8 << 20, &journal, now()).unwrap();
    let (one_store, _other) = (open(named([window(5)])), open(Arc::new(Limits::with_limit(window(5).with_tag(7)))));
    let with_taken_tag = Limits::new(vec![window(5), window(5).with_tag(7)]).unwrap();
    let refused = one_store.with_limits(Arc::new(with_taken_tag), now());
    assert!(matches!(refused, Err(StoreError::Failed(_))), "{refused:?}");
    take(&one_store, 0, 1);
}

#[test]
fn a_thousand_reloads_grow_nothing() {
    let place = Place::quick();
    let limits = named([window(9), window(3)]);
    let mut store = place.store(&limits, FlushMode::default(), now());
    take(&store, 0, 2);
    let before = store.stats();
    for _ in 0..1_000 {
        store = reload(&store, &limits);
    }
    assert_eq!((store.stats(), used(&store, 0)), (before, 2));
    store.journal().flush().unwrap();
    assert_eq!(Arc::strong_count(&limits), 3, "of this test, of the first handle's plan, and of the last one's");
}
