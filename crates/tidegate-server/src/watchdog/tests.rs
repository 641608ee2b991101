use super::phase::UNCOUNTED_HEAD_BYTES;
use super::*;
use tidegate_policy::Policy;

fn default_timeouts() -> InboundTimeouts {
    Policy::builder().build().unwrap().inbound().timeouts
}

/// The same timeout for each phase.
pub(crate) fn uniform_timeouts(time: Duration) -> InboundTimeouts {
    let mut timeouts = default_timeouts();
    (timeouts.idle, timeouts.header, timeouts.body, timeouts.response) = (time, time, time, time);
    timeouts
}

fn timeouts() -> InboundTimeouts {
    let mut timeouts = default_timeouts();
    timeouts.idle = Duration::from_millis(800);
    timeouts.header = Duration::from_millis(80);
    timeouts.body = Duration::from_millis(160);
    timeouts.response = Duration::from_millis(240);
    timeouts
}

fn new_watchdog(body_rate: Option<u64>) -> Arc<Watchdog> {
    Watchdog::new(&timeouts(), body_rate, 8, true)
}

fn ticks_until_overdue(watchdog: &Arc<Watchdog>, watch: &ConnectionWatch) -> u32 {
    let mut ticks = 0;
    while !watch.must_end_phase() {
        watchdog.sweep_once();
        ticks += 1;
        assert!(ticks < 1000);
    }
    ticks
}

#[test]
fn each_phase_has_its_own_exact_timeout() {
    let tick = new_watchdog(None).tick;
    assert_eq!(tick, Duration::from_millis(10));
    for (phase, whole) in [
        (ConnectionPhase::Head, 8),
        (ConnectionPhase::Upload, 16),
        (ConnectionPhase::AwaitResponse, 24),
        (ConnectionPhase::Idle, 80),
    ] {
        let watchdog = new_watchdog(Some(100));
        let (watch, _entry) = watchdog.add_connection(None);
        watch.enter(phase);
        let ticks = ticks_until_overdue(&watchdog, &watch);
        assert!((whole + 1..=whole + 2).contains(&ticks), "{phase:?}: {ticks}");
    }
}

#[test]
fn progress_restarts_the_timeout() {
    let watchdog = new_watchdog(Some(100));
    let (watch, _entry) = watchdog.add_connection(None);
    watch.enter(ConnectionPhase::Upload);
    for _ in 0..100 {
        watchdog.sweep_once();
        watch.touch();
    }
    assert!(!watch.must_end_phase());
}

#[test]
fn a_decision_never_expires_despite_tick_overflow() {
    let watchdog = new_watchdog(Some(100));
    watchdog.current_tick.store(u32::MAX - 3, Relaxed);
    let (watch, _entry) = watchdog.add_connection(None);
    watch.enter(ConnectionPhase::Deciding);
    for _ in 0..1000 {
        watchdog.sweep_once();
    }
    assert!(!watch.must_end_phase());
    watch.enter(ConnectionPhase::Head);
    watchdog.sweep_once();
    assert!(!watch.must_end_phase());
}

#[test]
fn a_dropped_entry_leaves_the_list() {
    let watchdog = new_watchdog(Some(100));
    let (_watch, entry) = watchdog.add_connection(None);
    assert_eq!(watchdog.len(), 1);
    drop(entry);
    assert_eq!(watchdog.len(), 0);
}

/// A connection that waits for the client's body.
fn upload(watchdog: &Arc<Watchdog>, paced: bool) -> (Arc<ConnectionWatch>, ConnectionEntry) {
    let (watch, entry) = watchdog.add_connection(None);
    watch.enter(ConnectionPhase::Upload);
    watch.begin_body(paced);
    watch.body.waits_on_client.set(true);
    (watch, entry)
}

/// Receives so many bytes every second, for a minute of ticks or until the body is overdue.
fn trickle(watchdog: &Arc<Watchdog>, watch: &ConnectionWatch, bytes: u64) -> bool {
    let second = (Duration::from_secs(1).as_nanos() / watchdog.tick.as_nanos()) as u32;
    (0..60 * second).any(|tick| {
        if tick % second == 0 {
            watch.count_body(bytes);
        }
        watch.touch();
        watchdog.sweep_once();
        watch.must_end_phase()
    })
}

#[test]
fn only_slow_bodies_being_waited_for_expire() {
    let watchdog = new_watchdog(Some(100));
    for (paced, rate, overdue) in [(true, 1, true), (true, 80, true), (true, 120, false), (false, 1, false)] {
        let (watch, _entry) = upload(&watchdog, paced);
        assert_eq!(trickle(&watchdog, &watch, rate), overdue, "{paced} {rate}");
    }
    let (watch, _entry) = upload(&watchdog, true);
    watch.body.waits_on_client.set(false);
    assert!(!trickle(&watchdog, &watch, 1), "the upstream doesn't take more");
    let (watch, _entry) = upload(&watchdog, true);
    assert!(!trickle(&watchdog, &watch, 0), "silence has a time of its own");
    let off = new_watchdog(None);
    let (watch, _entry) = upload(&off, true);
    assert!(!trickle(&off, &watch, 1));
}

#[test]
fn too_many_unfinished_heads_end_the_oldest() {
    let watchdog = new_watchdog(Some(100));
    let (oldest, _a) = watchdog.add_connection(None);
    oldest.note_received(UNCOUNTED_HEAD_BYTES);
    oldest.note_received(1000);
    watchdog.sweep_once();
    let (younger, _b) = watchdog.add_connection(None);
    younger.note_received(MAX_HEAD_BYTES - 1000);
    assert!(!oldest.must_end_phase() && !younger.must_end_phase());
    let (whole, _c) = watchdog.add_connection(None);
    whole.note_received(UNCOUNTED_HEAD_BYTES);
    assert!(!oldest.must_end_phase(), "a head in one piece is no burden");
    younger.note_received(1);
    assert!(oldest.is_ended_for(EndReason::HeadBytes) && !younger.must_end_phase());
    younger.enter(ConnectionPhase::AwaitResponse);
    assert_eq!(watchdog.head_bytes.load(Relaxed), 0, "a whole head gives back what it took");
    let (gone, entry) = watchdog.add_connection(None);
    gone.note_received(UNCOUNTED_HEAD_BYTES + 1);
    drop(entry);
    assert_eq!(watchdog.head_bytes.load(Relaxed), 0, "and so does a connection that ends");
}

#[test]
fn a_finished_phase_clears_its_end_reason() {
    let watchdog = new_watchdog(Some(100));
    let (watch, _entry) = watchdog.add_connection(None);
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
    let watchdog = new_watchdog(Some(100));
    let (watch, _entry) = upload(&watchdog, true);
    watch.enter(ConnectionPhase::Deciding);
    assert!(trickle(&watchdog, &watch, 1));
    let (watch, _entry) = watchdog.add_connection(None);
    watch.start_linger(true);
    watch.body.waits_on_client.set(true);
    assert!(trickle(&watchdog, &watch, 1));
}

#[test]
fn connections_that_send_requests_at_once_give_way_if_a_place_is_needed() {
    for (forwards, is_full) in [(false, true), (false, false), (true, true)] {
        let watchdog = Watchdog::new(&uniform_timeouts(Duration::from_secs(1)), None, 8, forwards);
        watchdog.is_full.set(is_full);
        let (watch, _entry) = watchdog.add_connection(None);
        for _ in 0..2 {
            watch.note_waiting();
            assert!(!watch.must_yield(20_000) && !watch.gives_way(), "the client waits for its replies");
            watch.must_yield(1);
            assert_eq!(watch.gives_way(), is_full && !forwards, "{forwards} {is_full}");
        }
    }
}
