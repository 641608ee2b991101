//! What many callers at once can find out.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use tidegate_core::{Concurrency, Key, Kind, Limit, LimitError, LimitId, Limits, Span, Verb, Window};

use super::{Backend, Effort, Subject, expect, passes, start};

const KEY: Key = Key::new(7, 0xdead_beef_0bad_cafe);

fn plan(kinds: impl IntoIterator<Item = Result<Kind, LimitError>>) -> Result<(Arc<Limits>, Vec<LimitId>), String> {
    let limits = kinds.into_iter().map(|kind| kind.map(Limit::new)).collect::<Result<_, _>>();
    let limits = limits.and_then(Limits::new).map_err(|error| error.to_string())?;
    let ids = limits.iter().map(|(id, _)| id).collect();
    Ok((Arc::new(limits), ids))
}

fn minute(limit: u64) -> Result<Kind, LimitError> {
    Window::new(limit, Span::from_secs(60), 64).map(Kind::Window)
}

/// Calls `ask` from `tasks` threads, `calls` times each, and counts how often it said yes.
fn count(tasks: u32, calls: u32, ask: impl Fn(u32, u32) -> Result<bool, String> + Sync) -> Result<u64, String> {
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

/// One key, 100 per 60 s, everything within one window: exactly 100 pass. The callers' clocks differ by less than
/// the time a call may be overtaken by.
pub(super) fn hundred_a_minute<B: Backend>(backend: &B, effort: &Effort) -> Result<(), String> {
    let (limits, ids) = plan([minute(100)])?;
    let subject = Subject::open(backend, &limits);
    subject.set_now(start());
    let admitted = count(effort.tasks, effort.calls, |task, call| {
        let spread = u64::from(task) * 997 % 50_000 + u64::from(call);
        let now = start() + Span::from_micros(spread);
        Ok(passes(&subject.one(Verb::Take, u64::from(task), &[(ids[0], KEY)], now)?))
    })?;
    expect("admitted", admitted, 100.min(u64::from(effort.tasks) * u64::from(effort.calls)))
}

pub(super) fn ten_of_a_hundred<B: Backend>(backend: &B, _: &Effort) -> Result<(), String> {
    let (limits, ids) = plan([minute(10)])?;
    for round in 0..20 {
        let subject = Subject::open(backend, &limits);
        subject.set_now(start());
        let admitted = count(100, 1, |task, _| {
            Ok(passes(&subject.one(Verb::Take, u64::from(task), &[(ids[0], KEY)], start())?))
        })?;
        expect(&format!("admitted in round {round}"), admitted, 10)?;
    }
    Ok(())
}

/// Three limits of 1000, 40 and 1000, asked in every order: 40 calls pass, and each limit was charged for just those.
pub(super) fn all_or_nothing<B: Backend>(backend: &B, effort: &Effort) -> Result<(), String> {
    const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let (limits, ids) = plan([minute(1000), minute(40), minute(1000)])?;
    let subject = Subject::open(backend, &limits);
    subject.set_now(start());
    let place = |limit: usize| (ids[limit], Key::new(limit as u64, KEY.lo().rotate_left(limit as u32 * 17)));
    let calls = effort.calls.min(1000);
    let admitted = count(effort.tasks.max(2), calls, |task, call| {
        let places = ORDERS[(task + call) as usize % ORDERS.len()].map(place);
        Ok(passes(&subject.one(Verb::Take, u64::from(task), &places, start())?))
    })?;
    let possible = u64::from(effort.tasks.max(2)) * u64::from(calls);
    expect("admitted", admitted, 40.min(possible))?;
    for limit in 0..3 {
        let left = subject.one(Verb::Peek, 0, &[place(limit)], start())?.list()[0].remaining;
        expect("left", left, [1000, 40, 1000][limit] - admitted)?;
    }
    Ok(())
}

/// At most three permits are ever held, and all come back.
pub(super) fn permits<B: Backend>(backend: &B, effort: &Effort) -> Result<(), String> {
    let (limits, ids) = plan([Concurrency::new(3, Concurrency::LEASE).map(Kind::Concurrency)])?;
    let subject = Subject::open(backend, &limits);
    subject.set_now(start());
    let place = [(ids[0], KEY)];
    let (held, most) = (AtomicU64::new(0), AtomicU64::new(0));
    let calls = effort.calls.min(500);
    let granted = count(effort.tasks, calls, |task, call| {
        let holder = (u64::from(task) << 32) | (u64::from(call) + 1);
        if !passes(&subject.one(Verb::Take, holder, &place, start())?) {
            return Ok(false);
        }
        most.fetch_max(held.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        thread::yield_now();
        let renewed = passes(&subject.one(Verb::Renew, holder, &place, start())?);
        held.fetch_sub(1, Ordering::SeqCst);
        let released = passes(&subject.one(Verb::Release, holder, &place, start())?);
        expect("renewed and released", (renewed, released), (true, true))?;
        let again = passes(&subject.one(Verb::Release, holder, &place, start())?);
        expect("released twice", again, false)?;
        Ok(true)
    })?;
    if granted == 0 || most.load(Ordering::SeqCst) > 3 {
        return Err(format!("{granted} permits granted, {} held at once", most.into_inner()));
    }
    expect("left in the end", subject.one(Verb::Peek, 0, &place, start())?.list()[0].remaining, 3)
}
