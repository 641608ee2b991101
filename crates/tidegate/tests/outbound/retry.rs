//! The number of attempts, and the waits between them.

use std::time::Duration;

use tidegate::outbound::{CallErrorKind, CallOptions};
use tidegate::{Clock as _, Span};
use tidegate_core::call::AttemptReport;
use tidegate_core::{Class, Remaining, RemainingAmount, Verdict};

use crate::common::{Answers, GOOD, Log, THROTTLED, provider, spawn, starts, throttled_for, with_verdict, within};

const SEVEN: &str = "retry = { max_attempts = 7, base = \"1s\", cap = \"30s\", jitter = \"none\" }\nadaptive = \"off\"\n\
                     timeout = \"10m\"\n";

fn waits(log: &Log) -> Vec<u64> {
    starts(log).windows(2).map(|two| two[1].0 - two[0].0).collect()
}

#[tokio::test(start_paused = true)]
async fn repeated_throttling_doubles_the_wait() {
    let asks_for_nothing = with_verdict(Verdict { wait: Some(Span::ZERO), ..THROTTLED.verdict });
    for throttled in [THROTTLED, asks_for_nothing] {
        let (api, log) = (provider(SEVEN), Log::default());
        let mut replies = vec![throttled; 6];
        replies.push(GOOD);
        let done = api.call(CallOptions::default(), &mut Answers::of(&api, &replies, &log, 0)).await.unwrap();
        assert_eq!(done.value, 7);
        assert_eq!(waits(&log), [1_000, 2_000, 4_000, 8_000, 16_000, 30_000]);
    }
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_waited_for() {
    for secs in [7, 20] {
        let (api, log) = (provider(SEVEN), Log::default());
        let replies = [throttled_for(secs), GOOD];
        api.call(CallOptions::default(), &mut Answers::of(&api, &replies, &log, 0)).await.unwrap();
        assert_eq!(waits(&log), [secs * 1_000]);
    }
}

/// Neither the back-off nor a cool-down nor a spent allowance delays a reservation, and calls that came later don't overtake it.
#[tokio::test(start_paused = true)]
async fn reservations_are_used_at_their_instants_in_order() {
    for more in ["", "learn_limits = true\n"] {
        let settings = "adaptive = \"off\"\nretry = { base = \"5s\", jitter = \"none\" }\n\
                        cooldown = { base = \"10s\", cap = \"1m\" }\n";
        let (api, log) = (provider(&format!("{settings}{more}")), Log::default());
        let spent_until = api.clock().now() + Span::from_secs(9);
        let amount = RemainingAmount { amount: 0, limit: None, resets_at: spent_until };
        let remaining = Remaining { calls: Some(amount), cost: None };
        let spent = with_verdict(Verdict { spent_until: Some(spent_until), remaining, ..GOOD.verdict });
        let retry_after = Some(Span::from_millis(70));
        let reserved =
            with_verdict(Verdict { wait: retry_after, remaining, has_reservation: true, ..THROTTLED.verdict });
        let call = |name, replies: &[AttemptReport], millis| {
            let upstream = Answers::of(&api, replies, &log, name).after(Duration::from_millis(millis));
            spawn(&api, CallOptions::default(), upstream)
        };
        // With learnt limits, nothing is sent beside the first call.
        let is_alone = !more.is_empty();
        let mut calls = Vec::new();
        if !is_alone {
            calls.extend([call(8, &[spent], 5), call(9, &[spent], 20)]);
        }
        calls.push(call(1, &[reserved, GOOD], 10));
        tokio::time::sleep(Duration::from_millis(30)).await;
        calls.extend([call(2, &[GOOD], 10), call(3, &[GOOD], 10)]);
        for call in calls {
            call.await.unwrap().unwrap();
        }
        let starts: Vec<_> = starts(&log).into_iter().filter(|(_, name)| *name < 8).collect();
        assert_eq!(starts[..2], [(0, 1), (80, 1)], "{more}");
        assert_eq!(starts[2..].iter().map(|(_, name)| *name).collect::<Vec<_>>(), [2, 3], "{more}");
    }
}

/// A provider whose reservations never admit a call is asked less and less.
#[tokio::test(start_paused = true)]
async fn useless_reservations_are_backed_off_from() {
    let (api, log) =
        (provider("adaptive = \"off\"\ntimeout = \"10m\"\nretry = { max_attempts = 5 }\n"), Log::default());
    let useless =
        with_verdict(Verdict { wait: Some(Span::from_millis(1)), has_reservation: true, ..THROTTLED.verdict });
    let replies = [useless, AttemptReport { presented_reservation: true, ..useless }];
    for name in 0..12 {
        let sent = api.call(CallOptions::default(), &mut Answers::of(&api, &replies, &log, name)).await;
        assert!(sent.is_err(), "{sent:?}");
    }
    let waits = waits(&log);
    assert!(waits[2..5].iter().all(|wait| *wait >= 500) && waits.last() >= Some(&30_000), "{waits:?}");
}

/// Each call has its reservation once. One that is refused at its instant is a throttled call like any other.
#[tokio::test(start_paused = true)]
async fn a_missed_reservation_is_followed_by_the_back_off() {
    let reserved =
        with_verdict(Verdict { wait: Some(Span::from_millis(70)), has_reservation: true, ..THROTTLED.verdict });
    let missed = AttemptReport { presented_reservation: true, ..reserved };
    let settings =
        "adaptive = \"off\"\ntimeout = \"1h\"\nretry = { max_attempts = 5, base = \"5s\", jitter = \"none\" }\n";
    for (replies, expected) in [
        (&[reserved, GOOD][..], &[70, 100, 70, 100, 70][..]),
        (&[reserved, reserved, GOOD], &[70, 70, 100]),
        (&[reserved, missed, missed, GOOD], &[70, 5_000, 8_000]),
    ] {
        let (api, log) = (provider(settings), Log::default());
        for name in 0..3 {
            api.call(CallOptions::default(), &mut Answers::of(&api, replies, &log, name)).await.unwrap();
        }
        assert_eq!(waits(&log)[..expected.len()], *expected, "{replies:?}");
    }
}

/// The reply of a call that was sent before says that one more call is left, and another one is under way.
#[tokio::test(start_paused = true)]
async fn an_older_reply_closes_no_reservation() {
    let (api, log) = (provider("adaptive = \"off\"\nlearn_limits = true\n"), Log::default());
    let left = |amount| {
        let amount = RemainingAmount { amount, limit: None, resets_at: api.clock().now() + Span::from_secs(9) };
        with_verdict(Verdict { remaining: Remaining { calls: Some(amount), cost: None }, ..GOOD.verdict })
    };
    api.call(CallOptions::default(), &mut Answers::of(&api, &[left(5)], &log, 0)).await.unwrap();
    let retry_after = Some(Span::from_millis(70));
    let verdict = Verdict { wait: retry_after, has_reservation: true, ..left(0).verdict };
    let reserved = with_verdict(Verdict { class: Class::Throttled, was_refused: true, ..verdict });
    let calls = [(&[left(1)][..], 30), (&[left(0)], 35), (&[reserved, GOOD], 5)].map(|(replies, millis)| {
        let upstream = Answers::of(&api, replies, &log, millis).after(Duration::from_millis(millis.into()));
        spawn(&api, CallOptions::default(), upstream)
    });
    for call in calls {
        call.await.unwrap().unwrap();
    }
    assert_eq!(starts(&log)[1..], [(0, 30), (0, 35), (0, 5), (75, 5)]);
}

#[tokio::test(start_paused = true)]
async fn a_day_of_retry_after_fails_calls_immediately() {
    let (api, log) = (provider("adaptive = \"off\""), Log::default());
    let began = api.clock().now();
    let mut upstream = Answers::of(&api, &[throttled_for(86_400)], &log, 0);
    let error = api.call(within(Duration::from_secs(60)), &mut upstream).await.unwrap_err();
    assert_eq!((error.retry_after(), api.clock().now()), (Some(Span::from_secs(86_400)), began), "{error:?}");
    let other = api.call(within(Duration::from_secs(60)), &mut upstream).await.unwrap_err();
    assert!(matches!(other.kind, CallErrorKind::CoolingDown { .. }), "{other:?}");
    assert_eq!((other.retry_after(), api.clock().now()), (Some(Span::from_secs(86_400)), began));
    assert_eq!(log.lock().unwrap().len(), 1, "nobody else is sent");
}

#[tokio::test(start_paused = true)]
async fn thirty_throttled_workers_return_in_thirty_slots() {
    let settings = "limit = \"10/s\"\nadaptive = \"off\"\ntimeout = \"1h\"\n\
                    retry = { max_attempts = 2, max_retry_after = \"1h\" }";
    let (api, log) = (provider(settings), Log::default());
    let calls: Vec<_> = (0..30)
        .map(|name| {
            let upstream = Answers::of(&api, &[throttled_for(600), GOOD], &log, name);
            spawn(&api, CallOptions::default(), upstream.after(Duration::from_secs(5)))
        })
        .collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap(), 2);
    }
    let log = log.lock().unwrap();
    assert_eq!(log.len(), 60);
    let latency = Span::from_secs(5);
    assert!(log[29].0 < log[0].0 + latency, "all are under way when the first is throttled");
    // Each reply asks for 600 s, and the credential's cool-down lasts for the longest of them.
    let told = log[29].0 + latency;
    let slots: Vec<_> = log[30..].iter().map(|(at, ..)| *at).collect();
    assert_eq!(slots[0], told + Span::from_secs(600), "none before");
    let close = slots.windows(2).find(|two| two[1].since(two[0]) < Span::from_millis(100));
    assert!(close.is_none(), "each has a slot of its own within the provider's rate: {close:?}");
}
