use super::phase::UNCOUNTED_HEAD_BYTES;
use super::*;

fn patience() -> PhaseTimeouts {
    PhaseTimeouts {
        idle: Duration::from_millis(800),
        head: Duration::from_millis(80),
        body: Duration::from_millis(160),
        response: Duration::from_millis(240),
        body_rate: Some(100),
        tunnel: Duration::from_secs(3600),
    }
}

fn ticks_until_overdue(sweep: &Arc<Watchdog>, watch: &ConnectionWatch) -> u32 {
    let mut ticks = 0;
    while !watch.must_end_phase() {
        sweep.sweep_once();
        ticks += 1;
        assert!(ticks < 1000);
    }
    ticks
}

#[test]
fn each_phase_has_its_own_exact_timeout() {
    let tick = patience().tick();
    assert_eq!(tick, Duration::from_millis(10));
    for (phase, whole) in [
        (ConnectionPhase::Head, 8),
        (ConnectionPhase::Upload, 16),
        (ConnectionPhase::AwaitResponse, 24),
        (ConnectionPhase::Idle, 80),
    ] {
        let sweep = Watchdog::new(patience(), 8);
        let (watch, _entry) = sweep.add_connection();
        watch.enter(phase);
        let ticks = ticks_until_overdue(&sweep, &watch);
        assert!((whole + 1..=whole + 2).contains(&ticks), "{phase:?}: {ticks}");
    }
}

#[test]
fn progress_restarts_the_timeout() {
    let sweep = Watchdog::new(patience(), 8);
    let (watch, _entry) = sweep.add_connection();
    watch.enter(ConnectionPhase::Upload);
    for _ in 0..100 {
        sweep.sweep_once();
        watch.touch();
    }
    assert!(!watch.must_end_phase());
}

#[test]
fn a_decision_never_expires_despite_tick_overflow() {
    let sweep = Watchdog::new(patience(), 8);
    sweep.current_tick.store(u32::MAX - 3, Ordering::Relaxed);
    let (watch, _entry) = sweep.add_connection();
    watch.enter(ConnectionPhase::Deciding);
    for _ in 0..1000 {
        sweep.sweep_once();
    }
    assert!(!watch.must_end_phase());
    watch.enter(ConnectionPhase::Head);
    sweep.sweep_once();
    assert!(!watch.must_end_phase());
}

#[test]
fn a_dropped_entry_leaves_the_list() {
    let sweep = Watchdog::new(patience(), 8);
    let (_watch, entry) = sweep.add_connection();
    assert_eq!(sweep.len(), 1);
    drop(entry);
    assert_eq!(sweep.len(), 0);
}

/// A connection that waits for the client's body.
fn upload(sweep: &Arc<Watchdog>, paced: bool) -> (Arc<ConnectionWatch>, ConnectionEntry) {
    let (watch, entry) = sweep.add_connection();
    watch.enter(ConnectionPhase::Upload);
    watch.begin_body(paced);
    watch.set_waits_on_client(true);
    (watch, entry)
}

/// Receives so many bytes every second, for a minute of ticks or until the body is overdue.
fn trickle(sweep: &Arc<Watchdog>, watch: &ConnectionWatch, bytes: u64) -> bool {
    let second = (Duration::from_secs(1).as_nanos() / sweep.tick.as_nanos()) as u32;
    (0..60 * second).any(|tick| {
        if tick % second == 0 {
            watch.count_body(bytes);
        }
        watch.touch();
        sweep.sweep_once();
        watch.must_end_phase()
    })
}

#[test]
fn only_slow_bodies_being_waited_for_expire() {
    let sweep = Watchdog::new(patience(), 8);
    for (paced, rate, overdue) in [(true, 1, true), (true, 80, true), (true, 120, false), (false, 1, false)] {
        let (watch, _entry) = upload(&sweep, paced);
        assert_eq!(trickle(&sweep, &watch, rate), overdue, "{paced} {rate}");
    }
    let (watch, _entry) = upload(&sweep, true);
    watch.set_waits_on_client(false);
    assert!(!trickle(&sweep, &watch, 1), "the upstream doesn't take more");
    let (watch, _entry) = upload(&sweep, true);
    assert!(!trickle(&sweep, &watch, 0), "silence has a time of its own");
    let off = Watchdog::new(PhaseTimeouts { body_rate: None, ..patience() }, 8);
    let (watch, _entry) = upload(&off, true);
    assert!(!trickle(&off, &watch, 1));
}

#[test]
fn too_many_unfinished_heads_end_the_oldest() {
    let sweep = Watchdog::new(patience(), 8);
    let (oldest, _a) = sweep.add_connection();
    oldest.note_received(UNCOUNTED_HEAD_BYTES);
    oldest.note_received(1000);
    sweep.sweep_once();
    let (younger, _b) = sweep.add_connection();
    younger.note_received(MAX_HEAD_BYTES - 1000);
    assert!(!oldest.must_end_phase() && !younger.must_end_phase());
    let (whole, _c) = sweep.add_connection();
    whole.note_received(UNCOUNTED_HEAD_BYTES);
    assert!(!oldest.must_end_phase(), "a head in one piece is no burden");
    younger.note_received(1);
    assert!(oldest.is_ended_for(EndReason::HeadBytes) && !younger.must_end_phase());
    younger.enter(ConnectionPhase::AwaitResponse);
    assert_eq!(sweep.head_bytes.load(Ordering::Relaxed), 0, "a whole head gives back what it took");
    let (gone, entry) = sweep.add_connection();
    gone.note_received(UNCOUNTED_HEAD_BYTES + 1);
    drop(entry);
    assert_eq!(sweep.head_bytes.load(Ordering::Relaxed), 0, "and so does a connection that ends");
}

#[test]
fn a_finished_phase_clears_its_end_reason() {
    let sweep = Watchdog::new(patience(), 8);
    let (watch, _entry) = sweep.add_connection();
    watch.note_received(1);
    watch.enter(ConnectionPhase::AwaitResponse);
    watch.end_phase(ConnectionPhase::Head, EndReason::HeadBytes);
    assert!(!watch.must_end_phase(), "the head ended before it was given up");
    watch.enter(ConnectionPhase::Idle);
    watch.note_received(1);
    watch.end_phase(ConnectionPhase::Head, EndReason::HeadBytes);
    assert!(watch.is_ended_for(EndReason::HeadBytes));
    watch.enter(ConnectionPhase::AwaitResponse);
    assert!(!watch.must_end_phase(), "the head ended all the same");
    watch.enter(ConnectionPhase::Head);
    watch.end_phase(ConnectionPhase::Head, EndReason::Timeout);
    assert!(
        watch.is_ended_for(EndReason::Timeout) && !watch.is_ended_for(EndReason::HeadBytes),
        "a later head has a reason of its own"
    );
    watch.enter(ConnectionPhase::Upload);
    watch.end_phase(ConnectionPhase::Upload, EndReason::Timeout);
    watch.enter_from(ConnectionPhase::Upload, ConnectionPhase::AwaitResponse);
    assert_eq!((watch.phase(), watch.must_end_phase()), (ConnectionPhase::AwaitResponse, false));
}

#[test]
fn slow_bodies_expire_during_decisions_and_lingering() {
    let sweep = Watchdog::new(patience(), 8);
    let (watch, _entry) = upload(&sweep, true);
    watch.enter(ConnectionPhase::Deciding);
    assert!(trickle(&sweep, &watch, 1));
    let (watch, _entry) = sweep.add_connection();
    watch.start_linger(true);
    watch.set_waits_on_client(true);
    assert!(trickle(&sweep, &watch, 1));
}
