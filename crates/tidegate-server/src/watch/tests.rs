use super::*;

fn patience() -> Patience {
    Patience {
        idle: Duration::from_millis(800),
        head: Duration::from_millis(80),
        body: Duration::from_millis(160),
        response: Duration::from_millis(240),
        body_rate: Some(100),
        tunnel: Duration::from_secs(3600),
    }
}

fn ticks_until_overdue(sweep: &Arc<Sweep>, watch: &Watch) -> u32 {
    let mut ticks = 0;
    while !watch.is_overdue() {
        sweep.sweep();
        ticks += 1;
        assert!(ticks < 1000);
    }
    ticks
}

#[test]
fn each_phase_has_its_own_patience_and_is_never_cut_short() {
    let tick = patience().tick();
    assert_eq!(tick, Duration::from_millis(10));
    for (phase, whole) in [(Phase::Head, 8), (Phase::Upload, 16), (Phase::Await, 24), (Phase::Idle, 80)] {
        let sweep = Sweep::new(patience(), 8);
        let (watch, _entry) = sweep.join();
        watch.enter(phase);
        let ticks = ticks_until_overdue(&sweep, &watch);
        assert!((whole + 1..=whole + 2).contains(&ticks), "{phase:?}: {ticks}");
    }
}

#[test]
fn progress_starts_the_wait_anew() {
    let sweep = Sweep::new(patience(), 8);
    let (watch, _entry) = sweep.join();
    watch.enter(Phase::Upload);
    for _ in 0..100 {
        sweep.sweep();
        watch.touch();
    }
    assert!(!watch.is_overdue());
}

#[test]
fn a_decision_is_never_overdue_and_the_tick_count_may_wrap() {
    let sweep = Sweep::new(patience(), 8);
    sweep.now.store(u32::MAX - 3, Ordering::Relaxed);
    let (watch, _entry) = sweep.join();
    watch.enter(Phase::Deciding);
    for _ in 0..1000 {
        sweep.sweep();
    }
    assert!(!watch.is_overdue());
    watch.enter(Phase::Head);
    sweep.sweep();
    assert!(!watch.is_overdue());
}

#[test]
fn leaving_scope_leaves_the_list() {
    let sweep = Sweep::new(patience(), 8);
    let (_watch, entry) = sweep.join();
    assert_eq!(sweep.len(), 1);
    drop(entry);
    assert_eq!(sweep.len(), 0);
}

/// A connection whose body is waited for.
fn upload(sweep: &Arc<Sweep>, paced: bool) -> (Arc<Watch>, Entry) {
    let (watch, entry) = sweep.join();
    watch.enter(Phase::Upload);
    watch.begin_body(paced);
    watch.set_waits_on_client(true);
    (watch, entry)
}

/// Has so many bytes come every second, for a minute of ticks or until the body is overdue.
fn trickle(sweep: &Arc<Sweep>, watch: &Watch, bytes: u64) -> bool {
    let second = (Duration::from_secs(1).as_nanos() / sweep.tick.as_nanos()) as u32;
    (0..60 * second).any(|tick| {
        if tick % second == 0 {
            watch.count_body(bytes);
        }
        watch.touch();
        sweep.sweep();
        watch.is_overdue()
    })
}

#[test]
fn a_body_that_trickles_is_overdue_and_one_that_is_waited_for_by_nobody_is_not() {
    let sweep = Sweep::new(patience(), 8);
    for (paced, rate, overdue) in [(true, 1, true), (true, 80, true), (true, 120, false), (false, 1, false)] {
        let (watch, _entry) = upload(&sweep, paced);
        assert_eq!(trickle(&sweep, &watch, rate), overdue, "{paced} {rate}");
    }
    let (watch, _entry) = upload(&sweep, true);
    watch.set_waits_on_client(false);
    assert!(!trickle(&sweep, &watch, 1), "the upstream doesn't take more");
    let (watch, _entry) = upload(&sweep, true);
    assert!(!trickle(&sweep, &watch, 0), "silence has a time of its own");
    let off = Sweep::new(Patience { body_rate: None, ..patience() }, 8);
    let (watch, _entry) = upload(&off, true);
    assert!(!trickle(&off, &watch, 1));
}

#[test]
fn past_the_bound_on_unfinished_heads_the_oldest_is_given_up() {
    let sweep = Sweep::new(patience(), 8);
    let (oldest, _a) = sweep.join();
    oldest.hear(UNCOUNTED);
    oldest.hear(1000);
    sweep.sweep();
    let (younger, _b) = sweep.join();
    younger.hear(UNFINISHED - 1000);
    assert!(!oldest.is_overdue() && !younger.is_overdue());
    let (whole, _c) = sweep.join();
    whole.hear(UNCOUNTED);
    assert!(!oldest.is_overdue(), "a head in one piece is no burden");
    younger.hear(1);
    assert!(oldest.is_hurried(Hurry::Bytes) && !younger.is_overdue());
    younger.enter(Phase::Await);
    assert_eq!(sweep.unfinished.load(Ordering::Relaxed), 0, "a whole head gives back what it took");
    let (gone, entry) = sweep.join();
    gone.hear(UNCOUNTED + 1);
    drop(entry);
    assert_eq!(sweep.unfinished.load(Ordering::Relaxed), 0, "and so does a connection that ends");
}

#[test]
fn a_phase_that_has_ended_is_not_hurried_and_takes_its_reason_along() {
    let sweep = Sweep::new(patience(), 8);
    let (watch, _entry) = sweep.join();
    watch.hear(1);
    watch.enter(Phase::Await);
    watch.hurry(Phase::Head, Hurry::Bytes);
    assert!(!watch.is_overdue(), "the head ended before it was given up");
    watch.enter(Phase::Idle);
    watch.hear(1);
    watch.hurry(Phase::Head, Hurry::Bytes);
    assert!(watch.is_hurried(Hurry::Bytes));
    watch.enter(Phase::Await);
    assert!(!watch.is_overdue(), "the head ended all the same");
    watch.enter(Phase::Head);
    watch.hurry(Phase::Head, Hurry::Time);
    assert!(watch.is_hurried(Hurry::Time) && !watch.is_hurried(Hurry::Bytes), "a later head has a reason of its own");
    watch.enter(Phase::Upload);
    watch.hurry(Phase::Upload, Hurry::Time);
    watch.enter_from(Phase::Upload, Phase::Await);
    assert_eq!((watch.phase(), watch.is_overdue()), (Phase::Await, false));
}

#[test]
fn a_body_trickles_also_in_a_call_and_behind_an_answer() {
    let sweep = Sweep::new(patience(), 8);
    let (watch, _entry) = upload(&sweep, true);
    watch.enter(Phase::Deciding);
    assert!(trickle(&sweep, &watch, 1));
    let (watch, _entry) = sweep.join();
    watch.begin_lingering(true);
    watch.set_waits_on_client(true);
    assert!(trickle(&sweep, &watch, 1));
}
