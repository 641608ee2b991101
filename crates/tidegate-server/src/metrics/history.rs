//! The totals of the last minutes, one sample a second.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tidegate::policy::Plan;
use tidegate::{DecisionCount, DecisionOutcome, Span, Time};
use tidegate_core::LimitId;

/// The maximum number of samples: those of five minutes. A new one displaces the oldest.
pub(crate) const MAX_SAMPLES: usize = 301;
/// The number of samples after which the refusals of each limit are kept, for the time since then.
const SAMPLES_PER_MARK: u64 = 60;
/// The number of samples that a present rate covers.
const RATE_SAMPLES: usize = 3;

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// With those that shadow mode admitted.
    pub(crate) admitted: u64,
    pub(crate) refused: u64,
    pub(crate) shadow: u64,
    /// Decisions without the store, failures and 5xx replies of the upstream, and failed calls to providers.
    pub(crate) errors: u64,
}

/// Numbers a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    pub(crate) admitted: f64,
    pub(crate) refused: f64,
    pub(crate) shadow: f64,
    pub(crate) errors: f64,
}

/// The samples of the last minutes.
#[derive(Debug, Default)]
pub(crate) struct History(Mutex<Samples>);

#[derive(Debug, Default)]
struct Samples {
    taken: u64,
    /// The plan of the last sample.
    plan: Option<Arc<Plan>>,
    kept: VecDeque<(Time, Totals)>,
    /// The refusals of each limit at the last two marks, older first.
    marks: VecDeque<(Time, HashMap<LimitId, LimitRefusals>)>,
}

/// The refusals of a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LimitRefusals {
    /// The number of calls that it has refused.
    pub(crate) refused: u64,
    /// The number of calls that it would have refused if it weren't in shadow.
    pub(crate) shadow: u64,
}

impl History {
    /// Keeps the totals of a time.
    pub(crate) fn record(&self, now: Time, plan: &Arc<Plan>, totals: Totals, decisions: &[DecisionCount]) {
        let samples = &mut *self.0.lock();
        let has_changed = samples.plan.replace(Arc::clone(plan)).is_some_and(|last| !Arc::ptr_eq(&last, plan));
        if has_changed {
            // A limit that an earlier policy had comes with all its refusals.
            samples.marks.clear();
        }
        if has_changed || samples.taken.is_multiple_of(SAMPLES_PER_MARK) {
            samples.marks.push_back((now, refused_by_limit(decisions)));
            keep_latest(&mut samples.marks, 2);
        }
        samples.taken += 1;
        samples.kept.push_back((now, totals));
        keep_latest(&mut samples.kept, MAX_SAMPLES);
    }

    /// The rates between each sample and the next, oldest first.
    pub(crate) fn rates(&self) -> Vec<Rates> {
        let samples = self.0.lock();
        samples.kept.iter().zip(samples.kept.iter().skip(1)).map(|(from, to)| Rates::between(from, to)).collect()
    }

    /// The rates of the last seconds.
    pub(crate) fn present_rates(&self) -> Rates {
        let kept = &self.0.lock().kept;
        let first = kept.len().saturating_sub(RATE_SAMPLES + 1);
        match (kept.get(first), kept.back()) {
            (Some(from), Some(to)) => Rates::between(from, to),
            _ => Rates::default(),
        }
    }

    /// The limits that have refused calls in the last minute or two, also in shadow, most refusals first, and that time.
    pub(crate) fn latest_refusals(
        &self,
        now: Time,
        decisions: &[DecisionCount],
    ) -> (Span, Vec<(LimitId, LimitRefusals)>) {
        let samples = self.0.lock();
        let Some((since, earlier)) = samples.marks.front() else { return (Span::ZERO, Vec::new()) };
        let new = |(limit, LimitRefusals { refused, shadow }): (LimitId, LimitRefusals)| {
            let earlier = earlier.get(&limit).copied().unwrap_or_default();
            let (refused, shadow) = (refused.saturating_sub(earlier.refused), shadow.saturating_sub(earlier.shadow));
            (limit, LimitRefusals { refused, shadow })
        };
        let mut refusals: Vec<_> = refused_by_limit(decisions).into_iter().map(new).collect();
        refusals.retain(|(_, found)| *found != LimitRefusals::default());
        refusals.sort_unstable_by_key(|(limit, found)| (Reverse((found.refused, found.shadow)), limit.index()));
        (now.since(*since), refusals)
    }
}

/// Keeps the latest elements, at most this number.
fn keep_latest<T>(elements: &mut VecDeque<T>, most: usize) {
    elements.drain(..elements.len().saturating_sub(most));
}

impl Rates {
    fn between((start, from): &(Time, Totals), (end, to): &(Time, Totals)) -> Self {
        let seconds = end.since(*start).as_secs_f64();
        // The errors of a provider that is gone aren't counted any more.
        let rate = |from: u64, to: u64| if seconds > 0.0 { to.saturating_sub(from) as f64 / seconds } else { 0.0 };
        Self {
            admitted: rate(from.admitted, to.admitted),
            refused: rate(from.refused, to.refused),
            shadow: rate(from.shadow, to.shadow),
            errors: rate(from.errors, to.errors),
        }
    }
}

fn refused_by_limit(decisions: &[DecisionCount]) -> HashMap<LimitId, LimitRefusals> {
    let mut refusals: HashMap<LimitId, LimitRefusals> = HashMap::new();
    for found in decisions {
        let Some(limit) = found.limit else { continue };
        match found.outcome {
            DecisionOutcome::Allowed => {}
            DecisionOutcome::Refused => refusals.entry(limit).or_default().refused += found.count,
            DecisionOutcome::Shadow => refusals.entry(limit).or_default().shadow += found.count,
        }
    }
    refusals
}

#[cfg(test)]
mod tests {
    use tidegate_policy::{Policy, PolicySources};

    use super::*;

    fn plan() -> Arc<Plan> {
        let text = "[inbound.action.a]\nlimit = \"1 per 1s\"\n";
        Arc::clone(Policy::load(PolicySources::new().file("t", text)).unwrap().plan())
    }

    /// Refusals of one limit, with one in shadow for every two.
    fn refusals(count: u64) -> [DecisionCount; 3] {
        let counts =
            [(DecisionOutcome::Refused, count), (DecisionOutcome::Shadow, count / 2), (DecisionOutcome::Allowed, 7)];
        let limit = Some(LimitId::FIRST);
        counts.map(|(outcome, count)| DecisionCount { action: None, limit, outcome, reason: "limit", count })
    }

    fn new_refusals(refused: u64) -> Vec<(LimitId, LimitRefusals)> {
        vec![(LimitId::FIRST, LimitRefusals { refused, shadow: refused / 2 })]
    }

    #[test]
    fn rates_are_those_of_the_last_seconds() {
        let (history, plan) = (History::default(), plan());
        assert_eq!(history.present_rates(), Rates::default());
        for (at, admitted) in [(0, 0), (1, 100), (2, 100), (3, 110), (5, 150)] {
            history.record(Time::from_secs(at), &plan, Totals { admitted, ..Totals::default() }, &[]);
        }
        let admitted: Vec<f64> = history.rates().iter().map(|rates| rates.admitted).collect();
        assert_eq!(admitted, [100.0, 0.0, 10.0, 20.0]);
        assert_eq!(history.present_rates().admitted, 12.5);
    }

    #[test]
    fn refusals_count_since_the_minute_before() {
        let (history, plan) = (History::default(), plan());
        for second in 0..1000 {
            history.record(Time::from_secs(second), &plan, Totals::default(), &refusals(second));
        }
        let found = history.latest_refusals(Time::from_secs(1000), &refusals(1000));
        assert_eq!(found, (Span::from_secs(100), new_refusals(100)));
        assert_eq!(history.rates().len(), MAX_SAMPLES - 1);
    }

    #[test]
    fn a_returning_limit_has_no_old_refusals() {
        let (history, (first, second)) = (History::default(), (plan(), plan()));
        for (at, plan, counts) in
            [(0, &first, &refusals(1_000_000)[..]), (1, &second, &[]), (2, &first, &refusals(1_000_000))]
        {
            history.record(Time::from_secs(at), plan, Totals::default(), counts);
        }
        let found = history.latest_refusals(Time::from_secs(3), &refusals(1_000_002));
        assert_eq!(found, (Span::from_secs(1), new_refusals(2)));
    }
}
