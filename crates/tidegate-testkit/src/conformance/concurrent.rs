//! The checks with many callers at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tidegate_core::pacer::{PaceStep, PacerGrowth};
use tidegate_core::quota::FixedPeriods;
use tidegate_core::{
    Batch, Concurrency, Cooldown, Key, Limit, LimitError, LimitId, LimitKind, Limits, Op, PacerSpec, Quota,
    SharedPacerRules, Span, Verb, Window,
};

use super::{Backend, ConformanceOptions, StoreUnderTest, expect_equal, start_time};

const KEY: Key = Key::new(7, 0xdead_beef_0bad_cafe);

fn build_limits(
    kinds: impl IntoIterator<Item = Result<LimitKind, LimitError>>,
) -> Result<(Arc<Limits>, Vec<LimitId>), String> {
    let limits = kinds.into_iter().map(|kind| kind.map(Limit::new)).collect::<Result<_, _>>();
    let limits = limits.and_then(Limits::new).map_err(|error| error.to_string())?;
    let ids = limits.iter().map(|(id, _)| id).collect();
    Ok((Arc::new(limits), ids))
}

fn minute_window(limit: u64) -> Result<LimitKind, LimitError> {
    Window::new(limit, Span::from_secs(60), 64).map(LimitKind::Window)
}

/// Calls `ask` from `tasks` threads, `calls` times each, and counts how often it returns true.
pub(super) fn count_admitted(
    tasks: u32,
    calls: u32,
    ask: impl Fn(u32, u32) -> Result<bool, String> + Sync,
) -> Result<u64, String> {
    let admitted = AtomicU64::new(0);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..tasks)
            .map(|task| {
                let (ask, admitted) = (&ask, &admitted);
                scope.spawn(move || {
                    for call in 0..calls {
                        if ask(task, call)? {
                            admitted.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    Ok::<(), String>(())
                })
            })
            .collect();
        for thread in threads {
            thread.join().map_err(|_| "a thread panicked".to_string())??;
        }
        Ok::<(), String>(())
    })?;
    Ok(admitted.into_inner())
}

/// Checks that exactly 100 calls pass with one key and 100 per 60 s, all within one window. The callers' clocks differ
/// by less than the time by which one call may overtake another.
pub(super) fn hundred_a_minute<B: Backend>(backend: &B, options: &ConformanceOptions) -> Result<(), String> {
    let (limits, ids) = build_limits([minute_window(100)])?;
    let subject = StoreUnderTest::open(backend, &limits);
    subject.set_now(start_time());
    let admitted = count_admitted(options.tasks, options.calls_per_task, |task, call| {
        let spread = u64::from(task) * 997 % 50_000 + u64::from(call);
        let now = start_time() + Span::from_micros(spread);
        Ok(!subject.apply_to_keys(Verb::Take, u64::from(task), &[(ids[0], KEY)], now)?.refuses())
    })?;
    expect_equal("admitted", admitted, 100.min(u64::from(options.tasks) * u64::from(options.calls_per_task)))
}

pub(super) fn ten_of_a_hundred<B: Backend>(backend: &B, _: &ConformanceOptions) -> Result<(), String> {
    let (limits, ids) = build_limits([minute_window(10)])?;
    for round in 0..20 {
        let subject = StoreUnderTest::open(backend, &limits);
        subject.set_now(start_time());
        let admitted = count_admitted(100, 1, |task, _| {
            Ok(!subject.apply_to_keys(Verb::Take, u64::from(task), &[(ids[0], KEY)], start_time())?.refuses())
        })?;
        expect_equal(&format!("admitted in round {round}"), admitted, 10)?;
    }
    Ok(())
}

/// Checks three limits of 1000, 40 and 1000, asked in every order: 40 calls pass, and each limit is charged for just
/// those.
pub(super) fn all_or_nothing<B: Backend>(backend: &B, options: &ConformanceOptions) -> Result<(), String> {
    const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let (limits, ids) = build_limits([minute_window(1000), minute_window(40), minute_window(1000)])?;
    let subject = StoreUnderTest::open(backend, &limits);
    subject.set_now(start_time());
    let place = |limit: usize| (ids[limit], Key::new(limit as u64, KEY.lo().rotate_left(limit as u32 * 17)));
    let calls = options.calls_per_task.min(1000);
    let admitted = count_admitted(options.tasks.max(2), calls, |task, call| {
        let places = ORDERS[(task + call) as usize % ORDERS.len()].map(place);
        Ok(!subject.apply_to_keys(Verb::Take, u64::from(task), &places, start_time())?.refuses())
    })?;
    let possible = u64::from(options.tasks.max(2)) * u64::from(calls);
    expect_equal("admitted", admitted, 40.min(possible))?;
    for limit in 0..3 {
        let left = subject.apply_to_keys(Verb::Peek, 0, &[place(limit)], start_time())?.list()[0].remaining;
        expect_equal("left", left, [1000, 40, 1000][limit] - admitted)?;
    }
    Ok(())
}

/// Checks that at most three permits are ever held, and that all are released.
pub(super) fn permits<B: Backend>(backend: &B, options: &ConformanceOptions) -> Result<(), String> {
    let (limits, ids) = build_limits([Concurrency::new(3, Concurrency::DEFAULT_LEASE).map(LimitKind::Concurrency)])?;
    let subject = StoreUnderTest::open(backend, &limits);
    subject.set_now(start_time());
    let place = [(ids[0], KEY)];
    let (held, most) = (AtomicU64::new(0), AtomicU64::new(0));
    let calls = options.calls_per_task.min(500);
    let granted = count_admitted(options.tasks, calls, |task, call| {
        let holder = (u64::from(task) << 32) | (u64::from(call) + 1);
        if subject.apply_to_keys(Verb::Take, holder, &place, start_time())?.refuses() {
            return Ok(false);
        }
        most.fetch_max(held.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        thread::yield_now();
        let renewed = !subject.apply_to_keys(Verb::Renew, holder, &place, start_time())?.refuses();
        held.fetch_sub(1, Ordering::SeqCst);
        let released = !subject.apply_to_keys(Verb::Release, holder, &place, start_time())?.refuses();
        expect_equal("renewed and released", (renewed, released), (true, true))?;
        let again = !subject.apply_to_keys(Verb::Release, holder, &place, start_time())?.refuses();
        expect_equal("released twice", again, false)?;
        Ok(true)
    })?;
    if granted == 0 || most.load(Ordering::SeqCst) > 3 {
        return Err(format!("{granted} permits granted, {} held at once", most.into_inner()));
    }
    expect_equal("left in the end", subject.apply_to_keys(Verb::Peek, 0, &place, start_time())?.list()[0].remaining, 3)
}

/// Checks calls that are counted ahead. Each admitted call ends, is never sent, or costs more, while others are
/// admitted in its place. No more are in flight than the window holds. In the end it holds the calls that were sent,
/// each from its own end on.
pub(super) fn counted_ahead<B: Backend>(backend: &B, options: &ConformanceOptions) -> Result<(), String> {
    const LEAD: Span = Span::from_millis(500);
    let window = || Window::new(50, Span::from_secs(60), 4096).map(|window| LimitKind::Window(window.with_lead(LEAD)));
    let spent = Quota::new(0, Arc::new(FixedPeriods(Span::from_secs(86_400)))).map(LimitKind::Quota);
    let (limits, ids) = build_limits([window(), spent])?;
    let subject = StoreUnderTest::open(backend, &limits);
    subject.set_now(start_time());
    let tell = |verb, limit: usize, cost, counted_at| {
        let mut batch = Batch::new(0).with_counted_at(counted_at);
        batch.push(Op::new(ids[limit], verb, KEY, cost)).map_err(|full| full.to_string())?;
        subject.apply(&batch, start_time()).map(drop)
    };
    let (sent, debited) = (AtomicU64::new(0), AtomicU64::new(0));
    let calls = options.calls_per_task.min(500);
    let admitted = count_admitted(options.tasks, calls, |task, call| {
        let mut batch = Batch::new(0).with_lead(LEAD);
        batch.push(Op::new(ids[0], Verb::Take, KEY, 1)).map_err(|full| full.to_string())?;
        let outcomes = subject.apply(&batch, start_time())?;
        if outcomes.refuses() {
            return Ok(false);
        }
        let counted_at = outcomes.now() + LEAD;
        thread::yield_now();
        if (task + call) % 4 > 0 {
            tell(Verb::Refund, 0, 1, counted_at)?;
        } else {
            sent.fetch_add(1, Ordering::SeqCst);
            tell(Verb::Settle, 0, 1, counted_at)?;
            tell(Verb::Debit, 1, 3, counted_at)?;
            debited.fetch_add(3, Ordering::SeqCst);
        }
        Ok(true)
    })?;
    let sent = sent.into_inner();
    if admitted == 0 || sent > 50 {
        return Err(format!("{admitted} admitted, {sent} sent"));
    }
    let left = subject.apply_to_keys(Verb::Peek, 0, &[(ids[0], KEY), (ids[1], KEY)], start_time())?;
    expect_equal("used of the window", left.list()[0].used, sent)?;
    expect_equal("charged without asking", left.list()[1].used, debited.into_inner())?;
    if subject.set_now(start_time()) && sent > 0 {
        expect_equal("whole again", left.list()[0].reset_at, start_time() + Span::from_secs(60))?;
    }
    Ok(())
}

/// Checks that any number of calls that are throttled together make one step, and that one caller at a time is admitted
/// after it.
pub(super) fn concurrent_throttles<B: Backend>(backend: &B, options: &ConformanceOptions) -> Result<(), String> {
    let base = Span::from_secs(3_600);
    let cooldown =
        Cooldown { base, cap: base.times(8), stagger: base, max_release_time: base.times(Cooldown::RELEASE_STAGGERS) };
    let (limits, ids) = build_limits([Ok(LimitKind::Cooldown(cooldown))])?;
    let subject = StoreUnderTest::open(backend, &limits);
    let can_set_time = subject.set_now(start_time());
    let place = [(ids[0], KEY)];
    let mut now = start_time();
    for (round, steps) in [1, 2, 4, 8, 8].into_iter().enumerate() {
        let generation = subject.apply_to_keys(Verb::Peek, 0, &place, now)?.list()[0].generation;
        expect_equal("the generation", generation, round as u32)?;
        let closed = count_admitted(options.tasks, options.calls_per_task.min(50), |_, _| {
            let mut batch = Batch::new(0);
            batch.push(Op::new(ids[0], Verb::Throttle { generation }, KEY, 0)).map_err(|full| full.to_string())?;
            subject.apply(&batch, now)?;
            Ok(subject.apply_to_keys(Verb::Take, 0, &place, now)?.refuses())
        })?;
        let calls = u64::from(options.tasks) * u64::from(options.calls_per_task.min(50));
        expect_equal("refused after a throttled reply", closed, calls)?;
        let looked = subject.apply_to_keys(Verb::Peek, 0, &place, now)?;
        if !can_set_time {
            return expect_equal("one step", looked.list()[0].generation, round as u32 + 1);
        }
        let free_at = looked.list()[0].retry_at;
        expect_equal("one step", free_at, now + base.times(steps))?;
        now = free_at;
        subject.set_now(now);
        let through =
            count_admitted(options.tasks, 3, |_, _| Ok(!subject.apply_to_keys(Verb::Take, 0, &place, now)?.refuses()))?;
        expect_equal("let through at once", through, 1)?;
    }
    let mut good = Batch::new(0);
    good.push(Op::new(ids[0], Verb::Success { generation: 5 }, KEY, 0)).map_err(|full| full.to_string())?;
    subject.apply(&good, now)?;
    let through =
        count_admitted(options.tasks, 3, |_, _| Ok(!subject.apply_to_keys(Verb::Take, 0, &place, now)?.refuses()))?;
    expect_equal("let through beside the one who succeeded", through, 0)?;
    now = now + base.times(2);
    subject.set_now(now);
    let through =
        count_admitted(options.tasks, 3, |_, _| Ok(!subject.apply_to_keys(Verb::Take, 0, &place, now)?.refuses()))?;
    expect_equal("let through after a success, when nobody waits", through, 3 * u64::from(options.tasks))
}

/// Checks that each failure is one step up and every third success one step down, from any caller.
pub(super) fn shared_pace<B: Backend>(backend: &B, options: &ConformanceOptions) -> Result<(), String> {
    const THIRD: u32 = 3;
    let spec = PacerSpec {
        initial: Duration::from_millis(1),
        max: Duration::from_secs(86_400),
        growth: PacerGrowth::Linear,
        randomization: 0,
        successes: THIRD,
        ..PacerSpec::default()
    };
    let pacer = SharedPacerRules::new(spec).map_err(|error| error.to_string())?;
    let (limits, ids) = build_limits([Ok(LimitKind::Pace(pacer))])?;
    let subject = StoreUnderTest::open(backend, &limits);
    subject.set_now(start_time());
    let tell = |failed| {
        let mut batch = Batch::new(0);
        batch.push(Op::new(ids[0], Verb::Pace { failed, draw: 0 }, KEY, 0)).map_err(|full| full.to_string())?;
        Ok::<_, String>(PaceStep::from_outcome(&subject.apply(&batch, start_time())?.list()[0]))
    };
    let calls = options.calls_per_task.min(50);
    let steps = u64::from(options.tasks) * u64::from(calls);
    let up = count_admitted(options.tasks, calls, |_, _| tell(true).map(|step| step.after == step.before + 1_000_000))?;
    expect_equal("steps up", up, steps)?;
    expect_equal(
        "the interval",
        subject.apply_to_keys(Verb::Peek, 0, &[(ids[0], KEY)], start_time())?.list()[0].used,
        steps * 1_000_000,
    )?;
    let down = count_admitted(options.tasks, calls * THIRD, |_, _| tell(false).map(|step| pacer.is_down(step)))?;
    expect_equal("steps down", down, steps)?;
    expect_equal("a success where nobody waits", tell(false)?, PaceStep { before: 0, after: 0, successes_left: 0 })
}
