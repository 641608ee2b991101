//! The checks of stores whose limits change while they are in use. Stores that can't have other limits skip them.

use std::sync::Arc;

use tidegate_core::{
    Admission, Concurrency, Key, Limit, LimitError, LimitId, LimitKind, Limits, Outcome, Penalty, PenaltySpec, Rate,
    Span, Verb, Window,
};

use super::concurrent::count_admitted;
use super::{Backend, ConformanceOptions, StoreUnderTest, expect_equal, start_time};

const KEY: Key = Key::new(9, 0x0bad_cafe_dead_beef);

/// Limits with a tag for each pair of name and kind, as policies have. The index stands for the name.
fn named_limits(limits: impl IntoIterator<Item = Result<Limit, LimitError>>) -> Result<Arc<Limits>, String> {
    let limits = limits.into_iter().enumerate().map(|(name, limit)| {
        let limit = limit?;
        let tag = 0x1000 + name as u64 * 16 + u64::from(limit.kind().id());
        Ok(limit.with_tag(tag))
    });
    let limits =
        limits.collect::<Result<_, _>>().and_then(Limits::new).map_err(|error: LimitError| error.to_string())?;
    Ok(Arc::new(limits))
}

fn window(limit: u64) -> Result<Limit, LimitError> {
    Window::new(limit, Span::from_secs(60), 64).map(LimitKind::Window).map(Limit::new)
}

fn rate(per_second: u64) -> Result<Limit, LimitError> {
    Rate::new(per_second, Span::from_secs(1), per_second).map(LimitKind::Rate).map(Limit::new)
}

fn concurrency(limit: u64) -> Result<Limit, LimitError> {
    Concurrency::new(limit, Concurrency::DEFAULT_LEASE).map(LimitKind::Concurrency).map(Limit::new)
}

/// The limit with blocks of so many seconds, twice as long the second time.
fn with_penalty(limit: Result<Limit, LimitError>, secs: u64) -> Result<Limit, LimitError> {
    let (base, cap) = (Span::from_secs(secs), Span::from_secs(secs * 2));
    let penalty = Penalty::new(PenaltySpec { base, cap, ..PenaltySpec::default() }, Span::from_secs(60))?;
    Ok(limit?.with_penalty(penalty))
}

impl<B: Backend> StoreUnderTest<'_, B> {
    /// Applies one operation under the limit at this index.
    fn one(&self, verb: Verb, index: usize) -> Result<Outcome, String> {
        let limit = LimitId::from_index(index).ok_or("no such limit")?;
        Ok(self.apply_to_keys(verb, 1, &[(limit, KEY)], start_time())?.list()[0])
    }

    fn is_admitted(&self, index: usize) -> Result<bool, String> {
        Ok(!self.one(Verb::Take, index)?.admission.refuses())
    }

    fn used_and_remaining(&self, index: usize) -> Result<(u64, u64), String> {
        let outcome = self.one(Verb::Peek, index)?;
        Ok((outcome.used, outcome.remaining))
    }
}

/// Returns a handle with other limits. If the store can't have them, the check ends.
macro_rules! reload {
    ($subject:expr, $limits:expr) => {
        match $subject.with_limits(&named_limits($limits)?, start_time())? {
            Some(reloaded) => reloaded,
            None => return Ok(()),
        }
    };
}

/// Checks that used amounts count under new numbers, that a limit can be added, and that handles see each other.
pub(super) fn usage<B: Backend>(backend: &B, _: &ConformanceOptions) -> Result<(), String> {
    let subject = StoreUnderTest::open(backend, &named_limits([window(5)])?);
    subject.set_now(start_time());
    for _ in 0..4 {
        expect_equal("admitted", subject.is_admitted(0)?, true)?;
    }
    let same = reload!(subject, [window(5)]);
    expect_equal("used and left of the same limit", same.used_and_remaining(0)?, (4, 1))?;
    let smaller = reload!(same, [window(3)]);
    expect_equal("admitted by a smaller limit", smaller.is_admitted(0)?, false)?;
    expect_equal("used of a smaller limit", smaller.one(Verb::Peek, 0)?.used, 4)?;
    let larger = reload!(smaller, [window(10), window(2)]);
    expect_equal("used and left of a larger limit", larger.used_and_remaining(0)?, (4, 6))?;
    for expected in [true, true, false] {
        expect_equal("admitted by a new limit", larger.is_admitted(1)?, expected)?;
    }
    expect_equal("admitted by the first handle", subject.is_admitted(0)?, true)?;
    expect_equal("then used and left", larger.used_and_remaining(0)?, (5, 5))?;
    expect_equal("admitted by the last handle", larger.is_admitted(0)?, true)?;
    expect_equal("then used of the first handle", subject.one(Verb::Peek, 0)?.used, 6)?;
    expect_equal("then admitted by the first handle", subject.is_admitted(0)?, false)?;
    larger.one(Verb::Reset, 0)?;
    expect_equal("used and left after a reset", subject.used_and_remaining(0)?, (0, 5))
}

/// Checks that a block survives, unless the key is reset: as long as it was announced under a longer penalty, and no
/// longer than a new block under a shorter one.
pub(super) fn blocks<B: Backend>(backend: &B, _: &ConformanceOptions) -> Result<(), String> {
    let subject = StoreUnderTest::open(backend, &named_limits([with_penalty(window(1), 3600)])?);
    subject.set_now(start_time());
    expect_equal("admitted", [subject.is_admitted(0)?, subject.is_admitted(0)?], [true, false])?;
    let blocked = subject.one(Verb::Peek, 0)?;
    let longer = reload!(subject, [with_penalty(window(100), 5000)]);
    let outcome = longer.one(Verb::Take, 0)?;
    expect_equal("the admission during the block", outcome.admission, Admission::Blocked)?;
    expect_equal("the end of the block", outcome.block_until, blocked.block_until)?;
    let reloaded = reload!(longer, [with_penalty(window(100), 1200)]);
    let outcome = reloaded.one(Verb::Take, 0)?;
    expect_equal("the admission under a shorter penalty", outcome.admission, Admission::Blocked)?;
    expect_equal("a block that isn't longer", outcome.block_until <= blocked.block_until, true)?;
    reloaded.one(Verb::Reset, 0)?;
    expect_equal("admitted after a reset", [subject.is_admitted(0)?, subject.is_admitted(0)?], [true, false])?;
    expect_equal("the admission of the other handle", reloaded.one(Verb::Take, 0)?.admission, Admission::Blocked)
}

/// Checks that the usage starts anew under a limit of another kind, in all directions.
pub(super) fn other_kinds<B: Backend>(backend: &B, _: &ConformanceOptions) -> Result<(), String> {
    let kinds = || [window(1), rate(1), concurrency(1)];
    for first in 0..kinds().len() {
        for second in (0..kinds().len()).filter(|second| *second != first) {
            let limit_of = |index: usize| kinds().into_iter().nth(index).ok_or("no such kind");
            let subject = StoreUnderTest::open(backend, &named_limits([limit_of(first)?, window(4)])?);
            subject.set_now(start_time());
            expect_equal("admitted", [subject.is_admitted(0)?, subject.is_admitted(1)?], [true, true])?;
            let reloaded = reload!(subject, [limit_of(second)?, window(4)]);
            expect_equal("used under another kind", reloaded.one(Verb::Peek, 0)?.used, 0)?;
            expect_equal("admitted by another kind", reloaded.is_admitted(0)?, true)?;
            expect_equal("used and left of an unchanged limit", reloaded.used_and_remaining(1)?, (1, 3))?;
        }
    }
    Ok(())
}

/// Checks that a permit is held and released across a change.
pub(super) fn permits<B: Backend>(backend: &B, _: &ConformanceOptions) -> Result<(), String> {
    let subject = StoreUnderTest::open(backend, &named_limits([concurrency(3)])?);
    subject.set_now(start_time());
    expect_equal("admitted", subject.is_admitted(0)?, true)?;
    let reloaded = reload!(subject, [concurrency(1)]);
    let limit = LimitId::FIRST;
    let other = reloaded.apply_to_keys(Verb::Take, 2, &[(limit, KEY)], start_time())?;
    expect_equal("refused beside the permit", other.refuses(), true)?;
    expect_equal("released", reloaded.one(Verb::Release, 0)?.admission.refuses(), false)?;
    expect_equal("used and left", subject.used_and_remaining(0)?, (0, 3))
}

/// Checks that threads that use handles with old and new limits never exceed the larger limit, nor the smaller one
/// through its own handle.
pub(super) fn concurrent_calls<B: Backend>(backend: &B, options: &ConformanceOptions) -> Result<(), String> {
    let (tasks, calls) = (options.tasks.clamp(2, 16), options.calls_per_task.min(200));
    for (limit, new_limit) in [(100, 100), (100, 60), (60, 100)] {
        let subject = StoreUnderTest::open(backend, &named_limits([window(limit)])?);
        subject.set_now(start_time());
        let reloaded = reload!(subject, [window(new_limit), window(limit)]);
        let admitted =
            count_admitted(
                tasks,
                calls,
                |task, _| {
                    if task % 2 == 0 { subject.is_admitted(0) } else { reloaded.is_admitted(0) }
                },
            )?;
        if admitted > limit.max(new_limit) {
            return Err(format!("{admitted} admitted by limits of {limit} and {new_limit}"));
        }
        expect_equal("used", reloaded.one(Verb::Peek, 0)?.used, admitted)?;
        expect_equal("used of another limit", reloaded.used_and_remaining(1)?, (0, limit))?;
    }
    Ok(())
}
