//! Keys under a block.

use super::*;

fn penalised(limit: u64, secs: u64) -> Limit {
    window(limit, 60).with_penalty(
        Penalty::new(PenaltySpec { base: Span::from_secs(secs), ..PenaltySpec::default() }, Span::from_secs(60))
            .unwrap(),
    )
}

#[tokio::test(start_paused = true)]
async fn a_block_is_told_to_calls_whose_wait_is_known() {
    let clock = Virtual::new();
    let store = remote([penalised(10, 5)], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    assert!(!node.cost(10).await.0.verdict.refuses());
    let waits = async |cost| {
        let (outcome, now) = node.cost(cost).await;
        assert!(outcome.verdict.refuses());
        if outcome.retry_at.is_never() { None } else { Some(outcome.retry_at.since(now)) }
    };
    let secs = |secs| Some(Span::from_secs(secs));
    assert_eq!(waits(2).await, secs(5));
    let asked = store.asks();
    assert_eq!([waits(2).await, waits(1).await], [secs(5); 2]);
    assert_eq!(store.asks(), asked, "a smaller call waits for nothing else");
    assert_eq!(waits(10).await, secs(60), "the block's parole is for two");
    assert_eq!(waits(11).await, None, "no wait mends that");
    assert_eq!([waits(2).await, waits(1).await], [secs(5); 2]);
    sleep(Duration::from_secs(5)).await;
    assert_eq!(node.cost(1).await.0.verdict, Verdict::Parole);
}

#[tokio::test(start_paused = true)]
async fn a_block_lasts_through_an_outage() {
    let clock = Virtual::new();
    for tells_resets in [true, false] {
        let limits = [penalised(1, 90), window(100, 60).counting(Count::All)];
        let store = remote(limits, clock, tells_resets);
        let node = Caller::new(&store, clock, 1);
        settled().await;
        assert!(node.take().await && !node.take().await);
        store.set_mood(Mood::Failing);
        for _ in 0..8 {
            sleep(Duration::from_secs(11)).await;
            assert!(!node.take().await, "told: {tells_resets}");
            assert!(node.one(Verb::Take, &[0, 1], KEY).await.verdict.refuses());
            assert!(node.cost(2).await.0.verdict.refuses());
        }
        sleep(Duration::from_secs(2)).await;
        assert!(node.take().await, "told: {tells_resets}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_block_that_the_store_has_lifted_does_not_come_back() {
    let clock = Virtual::new();
    let store = remote([penalised(2, 90)], clock, false);
    let (one, two) = (Caller::new(&store, clock, 1), Caller::new(&store, clock, 2));
    sleep(Duration::from_secs(3)).await;
    assert!(one.take().await && one.take().await && !one.take().await);
    two.one(Verb::Reset, &[0], KEY).await;
    sleep(Duration::from_secs(1)).await;
    assert!(one.take().await);
    store.set_mood(Mood::Failing);
    assert!(one.take().await, "its share of the limit");
}
