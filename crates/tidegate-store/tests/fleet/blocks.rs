//! Keys under a block.

use tidegate_store::ImmediateStore as _;

use super::*;

fn penalised(limit: u64, secs: u64) -> Limit {
    window(limit, 60).with_penalty(
        Penalty::new(PenaltySpec { base: Span::from_secs(secs), ..PenaltySpec::default() }, Span::from_secs(60))
            .unwrap(),
    )
}

#[tokio::test(start_paused = true)]
async fn known_waits_are_answered_without_the_store() {
    let clock = Virtual::new();
    let store = remote([penalised(10, 5)], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    assert!(!node.cost(10).await.0.admission.refuses());
    let waits = async |cost| {
        let (outcome, now) = node.cost(cost).await;
        assert!(outcome.admission.refuses());
        if outcome.retry_at.is_never() { None } else { Some(outcome.retry_at.since(now)) }
    };
    let secs = |secs| Some(Span::from_secs(secs));
    assert_eq!(waits(2).await, secs(5));
    let asked = store.request_count();
    assert_eq!([waits(2).await, waits(1).await], [secs(5); 2]);
    assert_eq!(store.request_count(), asked, "a smaller call waits for nothing else");
    assert_eq!(waits(10).await, secs(60), "the block's parole is for two");
    assert_eq!(waits(11).await, None, "no wait mends that");
    assert_eq!([waits(2).await, waits(1).await], [secs(5); 2]);
    sleep(Duration::from_secs(5)).await;
    assert_eq!(node.cost(1).await.0.admission, Admission::Parole);
}

#[tokio::test(start_paused = true)]
async fn a_block_persists_through_an_outage() {
    let clock = Virtual::new();
    for tells_resets in [true, false] {
        let limits = [penalised(1, 90), window(100, 60).with_count_mode(CountMode::All)];
        let store = remote(limits, clock, tells_resets);
        let node = Caller::new(&store, clock, 1);
        settled().await;
        assert!(node.take().await && !node.take().await);
        store.set_behaviour(RemoteBehaviour::Failing);
        for _ in 0..8 {
            sleep(Duration::from_secs(11)).await;
            assert!(!node.take().await, "told: {tells_resets}");
            assert!(node.one(Verb::Take, &[0, 1], KEY).await.admission.refuses());
            assert!(node.cost(2).await.0.admission.refuses());
        }
        sleep(Duration::from_secs(2)).await;
        assert!(node.take().await, "told: {tells_resets}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_block_lifted_by_the_store_stays_lifted() {
    let clock = Virtual::new();
    let store = remote([penalised(2, 90)], clock, false);
    let (one, two) = (Caller::new(&store, clock, 1), Caller::new(&store, clock, 2));
    sleep(Duration::from_secs(3)).await;
    assert!(one.take().await && one.take().await && !one.take().await);
    two.one(Verb::Reset, &[0], KEY).await;
    sleep(Duration::from_secs(1)).await;
    assert!(one.take().await);
    store.set_behaviour(RemoteBehaviour::Failing);
    assert!(one.take().await, "its share of the limit");
}

/// However long the store takes to answer when it is asked again, and however its clock was set since the strike or the
/// reset, a reset that may be later than the strike ends the block: here it came one millisecond later.
#[tokio::test(start_paused = true)]
async fn a_reset_block_stays_reset_despite_late_replies() {
    for (after_strike, after_reset) in [(0, 0), (-5, 0), (5, 0), (0, -5), (0, 5)] {
        for late in [0, 2, 8, 40] {
            let clock = Virtual::new();
            let there = Settable { clock, secs: Arc::default() };
            let store = remote([penalised(2, 90)], there.clone(), false);
            let (one, two) = (Caller::new(&store, clock, 1), Caller::new(&store, clock, 2));
            sleep(Duration::from_secs(3)).await;
            assert!(one.take().await && one.take().await && !one.take().await);
            there.set(after_strike);
            sleep(Duration::from_millis(1)).await;
            two.one(Verb::Reset, &[0], KEY).await;
            there.set(after_reset);
            store.set_behaviour(RemoteBehaviour::SlowExecution(Duration::from_millis(late)));
            for second in 0..3 {
                sleep(Duration::from_secs(1)).await;
                for caller in [&one, &two] {
                    let (outcome, _) = caller.cost(0).await;
                    let what = format!("{late} ms, {after_strike} s, {after_reset} s, after {second} s: {outcome:?}");
                    assert_eq!((outcome.admission, outcome.strikes), (Admission::Admitted, 0), "{what}");
                }
            }
        }
    }
}

/// The time that a question and its answer take is all that is given to the reset: a later block is brought back.
#[tokio::test(start_paused = true)]
async fn a_block_newer_than_the_reset_is_restored() {
    for late in [0, 2, 8, 40] {
        let clock = Virtual::new();
        let store = remote([penalised(1, 90)], clock, false);
        let (one, two) = (Caller::new(&store, clock, 1), Caller::new(&store, clock, 2));
        sleep(Duration::from_secs(3)).await;
        store.set_behaviour(RemoteBehaviour::SlowExecution(Duration::from_millis(late)));
        two.one(Verb::Reset, &[0], KEY).await;
        sleep(Duration::from_millis(late + 1)).await;
        assert!(one.take().await && !one.take().await);
        lose(&store, KEY);
        sleep(Duration::from_secs(2)).await;
        assert!(!one.take().await && !two.take().await, "{late} ms");
    }
}

/// A store that was restarted without its data, or is another one now: it knows neither the key nor that it was reset.
fn lose(store: &FlakyRemote, key: Key) {
    store.store().apply_now(&batch(Verb::Reset, &[0], key), Time::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_block_lost_in_an_outage_is_restored() {
    let clock = Virtual::new();
    for tells_resets in [true, false] {
        for answer in [OnOutage::Local, OnOutage::Allow, OnOutage::Deny] {
            let store = remote([penalised(1, 600).with_sharing(on_outage(answer))], clock, tells_resets);
            let (one, two) = (Caller::new(&store, clock, 1), Caller::new(&store, clock, 2));
            settled().await;
            assert!(one.take().await && !one.take().await);
            let told = one.one(Verb::Peek, &[0], KEY).await;
            for outage in 0..3 {
                store.set_behaviour(RemoteBehaviour::Failing);
                for _ in 0..40 {
                    assert!(!one.take().await, "{answer:?}, told: {tells_resets}, outage {outage}");
                    sleep(Duration::from_millis(100)).await;
                }
                lose(&store, KEY);
                store.set_behaviour(RemoteBehaviour::Normal);
                while !one.fleet.is_up() || !two.fleet.is_up() {
                    sleep(Duration::from_millis(1)).await;
                }
                assert!(!one.take().await, "{answer:?}, told: {tells_resets}, after outage {outage}");
                sleep(Duration::from_millis(1)).await;
                let found = two.one(Verb::Peek, &[0], KEY).await;
                assert_eq!(
                    (found.admission, found.strikes, found.block),
                    (Admission::Blocked, 1, told.block),
                    "{answer:?}"
                );
                assert!(found.block_until <= told.block_until, "it is no longer than it was");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_silently_lost_block_is_restored_on_request() {
    let clock = Virtual::new();
    for tells_resets in [true, false] {
        let limits = [penalised(1, 600), window(100, 600), window(100, 600).with_count_mode(CountMode::All)];
        let store = remote(limits, clock, tells_resets);
        let (one, two) = (Caller::new(&store, clock, 1), Caller::new(&store, clock, 2));
        settled().await;
        assert!(one.take().await && !one.take().await);
        lose(&store, KEY);
        sleep(Duration::from_secs(61)).await;
        assert!(one.one(Verb::Take, &[0, 1, 2], KEY).await.admission.refuses(), "told: {tells_resets}");
        assert!(!two.take().await, "told: {tells_resets}");
        settled().await;
        assert_eq!(two.one(Verb::Peek, &[1], KEY).await.used, 0, "a refused call is charged to none of its limits");
        assert_eq!(two.one(Verb::Peek, &[2], KEY).await.used, 1, "but to those that count every call");
    }
}

#[tokio::test(start_paused = true)]
async fn a_missed_reset_clears_only_older_blocks() {
    let clock = Virtual::new();
    let store = remote([penalised(1, 600).with_sharing(on_outage(OnOutage::Allow))], clock, false);
    let (one, two) = (Caller::new(&store, clock, 1), Caller::new(&store, clock, 2));
    settled().await;
    assert!(one.take().await && !one.take().await);
    sleep(Duration::from_millis(100)).await;
    two.one(Verb::Reset, &[0], KEY).await;
    store.set_behaviour(RemoteBehaviour::Failing);
    sleep(Duration::from_secs(3)).await;
    assert!(!one.take().await, "it hasn't heard of it");
    store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_secs(1)).await;
    assert!(one.take().await && !one.take().await, "a new block, which is newer than the reset");
    store.set_behaviour(RemoteBehaviour::Failing);
    sleep(Duration::from_secs(3)).await;
    lose(&store, KEY);
    store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_secs(1)).await;
    assert!(!two.take().await && !one.take().await);
}

#[tokio::test(start_paused = true)]
async fn a_reset_during_an_outage_reaches_others_later() {
    let clock = Virtual::new();
    let store = remote([penalised(1, 600).with_sharing(on_outage(OnOutage::Allow))], clock, true);
    let (one, two) = (Caller::new(&store, clock, 1), Caller::new(&store, clock, 2));
    settled().await;
    assert!(one.take().await && !one.take().await && !two.take().await);
    store.set_behaviour(RemoteBehaviour::Failing);
    sleep(Duration::from_secs(3)).await;
    one.one(Verb::Reset, &[0], KEY).await;
    assert!(one.take().await && !two.take().await);
    store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_secs(1)).await;
    assert!(two.take().await);
}

#[tokio::test(start_paused = true)]
async fn outage_strikes_are_restored_afterwards() {
    let clock = Virtual::new();
    let store = remote([penalised(1, 2)], clock, true);
    let (one, two) = (Caller::new(&store, clock, 1), Caller::new(&store, clock, 2));
    sleep(Duration::from_secs(11)).await;
    assert!(one.take().await && !one.take().await);
    assert_eq!(two.one(Verb::Peek, &[0], KEY).await.strikes, 1);
    sleep(Duration::from_secs(3)).await;
    store.set_behaviour(RemoteBehaviour::Failing);
    let mut strikes = 0;
    for _ in 0..400 {
        let outcome = one.one(Verb::Take, &[0], KEY).await;
        strikes += u8::from(outcome.admission == Admission::Refused);
        sleep(Duration::from_millis(100)).await;
    }
    assert!(strikes >= 3, "{strikes}");
    store.set_behaviour(RemoteBehaviour::LostPenaltyReply);
    sleep(Duration::from_secs(3)).await;
    store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(two.one(Verb::Peek, &[0], KEY).await.strikes, 1 + strikes);
    store.set_behaviour(RemoteBehaviour::Failing);
    sleep(Duration::from_secs(3)).await;
    store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(two.one(Verb::Peek, &[0], KEY).await.strikes, 1 + strikes, "they are told once");
}

#[tokio::test(start_paused = true)]
async fn a_reset_overrides_an_older_pending_reply() {
    let clock = Virtual::new();
    let store = remote([penalised(1, 600)], clock, true);
    let (one, two) = (Caller::new(&store, clock, 1), Caller::new(&store, clock, 2));
    settled().await;
    assert!(one.take().await);
    store.set_behaviour(RemoteBehaviour::SlowReply(Duration::from_millis(20)));
    let reset = async {
        sleep(Duration::from_millis(10)).await;
        two.one(Verb::Reset, &[0], KEY).await
    };
    let (is_admitted, _) = tokio::join!(one.take(), reset);
    assert!(!is_admitted);
    store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_secs(2)).await;
    assert!(one.take().await);
}

#[tokio::test(start_paused = true)]
async fn many_limits_of_a_key_are_reset_together() {
    let clock = Virtual::new();
    let store = remote((0..8).map(|_| penalised(1, 600)), clock, false);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    let all: Vec<usize> = (0..8).collect();
    assert!(!node.one(Verb::Take, &all, KEY).await.admission.refuses());
    assert!(node.one(Verb::Take, &all, KEY).await.admission.refuses());
    let outcomes = node.ask(&batch(Verb::Reset, &all, KEY)).await.unwrap();
    assert_eq!(outcomes.list().len(), 8);
    assert!(!node.one(Verb::Take, &all, KEY).await.admission.refuses());
}

#[tokio::test(start_paused = true)]
async fn an_inspection_tells_what_the_store_knows() {
    let clock = Virtual::new();
    for tells_resets in [true, false] {
        let store = remote([penalised(1, 90)], clock, tells_resets);
        let (one, two) = (Caller::new(&store, clock, 1), Caller::new(&store, clock, 2));
        settled().await;
        let peek = batch(Verb::Peek, &[0], KEY);
        let is_blocked = async || {
            let outcomes = one.fleet.inspect(&peek, clock.now()).await?;
            Ok::<bool, StoreError>(outcomes.list()[0].block_until > outcomes.now())
        };
        assert!(one.take().await && !one.take().await && is_blocked().await.unwrap());
        store.set_behaviour(RemoteBehaviour::Failing);
        assert!(is_blocked().await.is_err());
        assert_eq!(one.fleet.outage(), None, "an inspection has no influence on decisions");
        store.set_behaviour(RemoteBehaviour::Normal);
        two.one(Verb::Reset, &[0], KEY).await;
        assert!(!is_blocked().await.unwrap(), "told: {tells_resets}");
        assert!(one.take().await);
    }
}

#[tokio::test(start_paused = true)]
async fn decisions_without_the_store_are_counted() {
    let clock = Virtual::new();
    let denies = window(5, 60).with_sharing(on_outage(OnOutage::Deny));
    let store = remote([window(5, 60), denies], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    assert!(node.take().await);
    assert_eq!(node.fleet.fallback_count(), 0);
    store.set_behaviour(RemoteBehaviour::Failing);
    for _ in 0..3 {
        node.take().await;
    }
    node.one(Verb::Peek, &[0], KEY).await;
    assert!(node.ask(&batch(Verb::Take, &[1], KEY)).await.is_err());
    assert_eq!(node.fleet.fallback_count(), 3);
}
