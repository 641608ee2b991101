//! Random plans, and random traffic for them.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::pacer::{MAX_SHARED_STEP, PacerGrowth, PacerMode};
use tidegate_core::quota::FixedPeriods;
use tidegate_core::{
    Batch, Concurrency, Cooldown, CountMode, Key, Limit, LimitError, LimitId, LimitKind, Limits, MAX_COST, Op,
    Outcomes, PacerSpec, Penalty, PenaltyMode, PenaltySpec, Quota, Rate, SharedPacerRules, Span, Time, Verb, Window,
};

use crate::random::RandomSource;

/// The number of remembered calls that may have follow-ups.
const MAX_TRACKED_CALLS: usize = 8;

/// A generator of random traffic: a random plan, a few keys, and a clock with steps to the edges. It steps to the exact
/// moment of a reported wait and the microsecond before it, and past windows, leases and forgiveness.
#[derive(Clone, Debug)]
pub struct TrafficGenerator {
    random: RandomSource,
    limits: Arc<Limits>,
    keys: Vec<Key>,
    now: Time,
    reported_times: Vec<Time>,
    contents: PlanContents,
    /// The lead by which calls are counted ahead; zero if they aren't.
    lead: Span,
    /// The last batch.
    last_batch: Batch,
    tracked_calls: Vec<TrackedCall>,
}

/// A call that was admitted.
#[derive(Clone, Debug)]
struct TrackedCall {
    ops: Vec<Op>,
    holder: u64,
    charged_at: Time,
    counted_at: Time,
    /// The generation of each operation's cool-down.
    generations: Vec<u32>,
}

/// The possible contents of a random plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlanContents {
    /// Everything.
    #[default]
    All,
    /// No limit in shadow and none that counts refused calls.
    Simple,
    /// For a store with a real clock: limits that last long enough for a few hundred batches.
    RealTime,
}

impl TrafficGenerator {
    /// Creates a generator with a plan of 1 to 5 limits and with 1 to 4 keys.
    pub fn new(mut random: RandomSource, wanted: PlanContents) -> Self {
        let count = random.between(1, 5);
        let lead = match random.below(4) {
            0..=1 => Span::ZERO,
            2 => Span::from_micros(random.below(20_000)),
            _ => Span::from_millis(random.pick(&[500, 60_000])),
        };
        let limits = (0..count).map(|_| random_limit(&mut random, wanted, lead)).collect();
        // Distinct keys, even if all words are zero.
        let keys =
            (0..random.between(1, 4)).map(|key| Key::new(key, random.next_u64() ^ ((key << 61) | key))).collect();
        let now = Time::from_micros(1_700_000_000_000_000 + random.below(86_400_000_000));
        let limits = Arc::new(Limits::new(limits).expect("invariant: at most 5 limits"));
        Self {
            random,
            limits,
            keys,
            now,
            reported_times: Vec::new(),
            contents: wanted,
            lead,
            last_batch: Batch::new(0),
            tracked_calls: Vec::new(),
        }
    }

    /// Returns the limits of the plan.
    pub fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    /// Returns the present time.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Returns the source of further random choices.
    pub fn random(&mut self) -> &mut RandomSource {
        &mut self.random
    }

    /// Advances the clock, or leaves it as it is, and returns the time.
    pub fn advance_clock(&mut self) -> Time {
        let span = |random: &mut RandomSource, most: u64| Span::from_micros(random.below(most));
        let to = match self.random.below(20) {
            0..=5 => self.now,
            6..=7 => self.now + Span::from_micros(1),
            8..=10 => self.now + span(&mut self.random, 5_000),
            11..=12 => self.now + span(&mut self.random, 500_000),
            13 => self.now + span(&mut self.random, 20_000_000),
            14 => self.now + span(&mut self.random, 7_200_000_000),
            _ if self.reported_times.is_empty() => self.now,
            15 => self.random.pick(&self.reported_times) - Span::from_micros(1),
            _ => self.random.pick(&self.reported_times),
        };
        self.now = self.now.max(to);
        self.now
    }

    /// Returns a `Take` of 1 to 4 limits, a follow-up of an admitted call, or now and then something else.
    pub fn next_batch(&mut self) -> Batch {
        self.last_batch = if !self.tracked_calls.is_empty() && self.random.chance(25) {
            self.follow_up_batch()
        } else {
            self.random_batch()
        };
        self.last_batch.clone()
    }

    fn random_batch(&mut self) -> Batch {
        let mut pairs = self.limit_key_pairs();
        let most = self.random.between(1, 4) as usize;
        let kind = self.random.below(100);
        let mut batch = Batch::new(self.random.between(1, 5)).with_lead(self.random_lead());
        if !self.lead.is_zero() && self.random.chance(10) {
            batch = batch.with_counted_at(self.now + Span::from_micros(self.random.below(5_000_000)));
        }
        if kind >= 84 {
            let at = [self.now - Span::from_micros(self.random.below(20_000_000)), self.now, Time::NEVER, Time::ZERO];
            batch = batch.with_charged_at(self.random.pick(&at));
        }
        while batch.ops().len() < most && !pairs.is_empty() {
            let (limit, key) = pairs.swap_remove(self.random.below(pairs.len() as u64) as usize);
            let verb = match kind {
                0..70 => Verb::Take,
                70..78 => Verb::Peek,
                78..84 => self.random.pick(&[Verb::Take, Verb::Peek]),
                84..87 => Verb::Refund,
                87..90 => Verb::Release,
                90..92 => Verb::Renew,
                92..94 => Verb::Reset,
                _ => self.random_verb(),
            };
            let (verb, cost) = match verb {
                _ if self.is_pace(limit) && self.random.chance(70) => self.random_pace_verb(),
                _ if self.is_cooldown(limit) || matches!(verb, Verb::RestorePenalty { .. }) => {
                    (verb, self.random_wait_micros())
                }
                _ => (verb, self.random_cost(limit)),
            };
            let verb = self.predictable_verb(limit, verb);
            batch.push(Op::new(limit, verb, key, cost)).expect("invariant: at most 4 operations");
        }
        batch
    }

    /// Returns a follow-up of a call: its end, its true cost, or that it was never sent. Further follow-ups may come.
    fn follow_up_batch(&mut self) -> Batch {
        // Mostly the latest call, while it still counts ahead.
        let last = self.tracked_calls.len() - 1;
        let place = if self.random.chance(60) { last } else { self.random.below(last as u64) as usize };
        let call = if self.random.chance(70) {
            self.tracked_calls.swap_remove(place)
        } else {
            self.tracked_calls[place].clone()
        };
        let verb = self.random.pick(&[Verb::Settle, Verb::Settle, Verb::Refund, Verb::Debit, Verb::Release]);
        let known = !self.lead.is_zero() && (verb == Verb::Settle || self.random.chance(60));
        let mut batch = Batch::new(call.holder).with_counted_at(if known { call.counted_at } else { Time::ZERO });
        batch = batch.with_charged_at(if self.random.chance(90) { call.charged_at } else { Time::ZERO });
        for (op, generation) in call.ops.iter().zip(call.generations) {
            let (verb, cost) = match (self.is_cooldown(op.limit), self.random.below(8)) {
                (true, 0..=2) => (Verb::Throttle { generation }, self.random_wait_micros()),
                (true, 3) => (Verb::Debit, self.random_wait_micros()),
                (true, 4..=6) => (Verb::Success { generation }, 0),
                (true, _) => (Verb::Disable, self.random_wait_micros()),
                (false, _) if self.is_pace(op.limit) => self.random_pace_verb(),
                (false, 0) => match self.random_verb() {
                    verb @ Verb::RestorePenalty { .. } => (verb, self.random_wait_micros()),
                    verb => (verb, self.random_cost(op.limit)),
                },
                (false, _) => (verb, op.cost),
            };
            let verb = self.predictable_verb(op.limit, verb);
            batch.push(Op::new(op.limit, verb, op.key, cost)).expect("invariant: as many as were asked");
        }
        batch
    }

    /// Returns the verb, or another one if the model couldn't know its result.
    fn predictable_verb(&self, limit: LimitId, verb: Verb) -> Verb {
        let merges =
            |limit: &Limit| matches!(limit.kind(), LimitKind::Window(window) if !window.max_lateness().is_zero());
        let unknown = self.limits.get(limit).is_some_and(|limit| limit.penalty().is_some() && merges(limit));
        if unknown && verb == Verb::Debit { Verb::Settle } else { verb }
    }

    fn random_verb(&mut self) -> Verb {
        let generation = if self.random.chance(90) { self.random.below(4) as u32 } else { u32::MAX };
        let penalise =
            Verb::RestorePenalty { strikes: self.random.below(5) as u8, parole: self.random.below(3) as u32 };
        self.random.pick(&[
            Verb::Take,
            Verb::Peek,
            Verb::Refund,
            Verb::Release,
            Verb::Renew,
            Verb::Reset,
            Verb::Debit,
            Verb::Settle,
            Verb::Throttle { generation },
            Verb::Success { generation },
            Verb::Disable,
            Verb::Pace { failed: true, draw: generation },
            penalise,
        ])
    }

    /// Returns a report of a call for a pace. Its jitter reaches the ends of its range.
    fn random_pace_verb(&mut self) -> (Verb, u64) {
        let draw = match self.random.below(8) {
            0 => self.random.pick(&[0, 1, 1 << 31, u32::MAX - 1, u32::MAX]),
            _ => self.random.next_u64() as u32,
        };
        match self.random.below(16) {
            0..=6 => (Verb::Pace { failed: true, draw }, 0),
            7..=14 => (Verb::Pace { failed: false, draw }, 0),
            _ => (Verb::Debit, self.random.below(1 << 40)),
        }
    }

    /// Returns the lead of a call, mostly that of all calls.
    fn random_lead(&mut self) -> Span {
        match self.random.below(20) {
            0..=16 => self.lead,
            17 => self.lead.times(2),
            18 => Span::from_micros(self.random.below(1_000)),
            _ => Span::ZERO,
        }
    }

    /// Returns the wait that a provider asks for, in microseconds; seldom endless.
    fn random_wait_micros(&mut self) -> u64 {
        match self.random.below(40) {
            0..=15 => 0,
            16..=30 => self.random.below(100_000),
            31..=38 => self.random.below(20_000_000),
            _ => self.random.pick(&[7_200_000_000, MAX_COST, u64::MAX]),
        }
    }

    fn is_cooldown(&self, limit: LimitId) -> bool {
        self.limits.get(limit).is_some_and(|limit| matches!(limit.kind(), LimitKind::Cooldown(_)))
    }

    fn is_pace(&self, limit: LimitId) -> bool {
        self.limits.get(limit).is_some_and(|limit| matches!(limit.kind(), LimitKind::Pace(_)))
    }

    /// Returns a `Take` of 1 to 4 limits, each with the cost of an ordinary call.
    pub fn take_batch(&mut self) -> Batch {
        let mut pairs = self.limit_key_pairs();
        let mut batch = Batch::new(self.random.next_u64());
        for _ in 0..self.random.between(1, 4) {
            if pairs.is_empty() {
                break;
            }
            let (limit, key) = pairs.swap_remove(self.random.below(pairs.len() as u64) as usize);
            let cost = self.random_cost(limit);
            batch.push(Op::new(limit, Verb::Take, key, cost)).expect("invariant: at most 4 operations");
        }
        self.last_batch = batch.clone();
        batch
    }

    /// Remembers the reported moments, so that the clock can step to them, and the admitted calls, for follow-ups.
    pub fn record_outcomes(&mut self, outcomes: &Outcomes) {
        if self.reported_times.len() > 8 {
            self.reported_times.clear();
        }
        for outcome in outcomes.list() {
            for moment in [outcome.retry_at, outcome.reset_at, outcome.block_until] {
                if moment > outcomes.now() && !moment.is_never() {
                    self.reported_times.push(moment);
                }
            }
        }
        let ops = self.last_batch.ops();
        let takes = !ops.is_empty() && ops.iter().all(|op| op.verb == Verb::Take) && ops.len() == outcomes.list().len();
        if takes && !outcomes.refuses() {
            if self.tracked_calls.len() == MAX_TRACKED_CALLS {
                self.tracked_calls.remove(0);
            }
            self.tracked_calls.push(TrackedCall {
                ops: ops.to_vec(),
                holder: self.last_batch.holder(),
                charged_at: outcomes.now(),
                counted_at: outcomes.now() + self.last_batch.context().lead,
                generations: outcomes.list().iter().map(|outcome| outcome.generation).collect(),
            });
        }
    }

    fn limit_key_pairs(&mut self) -> Vec<(LimitId, Key)> {
        let keys = &self.keys;
        let known = self.limits.iter().flat_map(|(limit, _)| keys.iter().map(move |&key| (limit, key)));
        let mut pairs: Vec<_> = known.collect();
        if self.contents == PlanContents::All && self.random.chance(1) {
            let unknown = LimitId::from_index(self.limits.len()).expect("invariant: a plan of at most 5");
            pairs.push((unknown, keys[0]));
        }
        pairs
    }

    fn random_cost(&mut self, limit: LimitId) -> u64 {
        let capacity = self.limits.get(limit).map_or(1, |limit| limit.kind().capacity().min(MAX_COST));
        match self.random.below(40) {
            0..=24 => 1,
            25..=29 => self.random.between(1, 3),
            30..=35 => self.random.between(1, capacity.max(1)),
            36 => 0,
            37 => capacity,
            38 => capacity + 1,
            _ => self.random.pick(&[MAX_COST, Concurrency::refused_cost(Span::from_secs(3)), u64::MAX, 2]),
        }
    }
}

fn random_limit(random: &mut RandomSource, wanted: PlanContents, lead: Span) -> Limit {
    let long = wanted == PlanContents::RealTime;
    let length = |random: &mut RandomSource| {
        let millis = if long { [3_600_000; 3] } else { [10, 1_000, 60_000] };
        Span::from_millis(random.between(1, 3) * random.pick(&millis))
    };
    let period = length(random);
    let kind = match random.below(11) {
        0..=2 => {
            let (limit, entries) = (random.below(8), random.pick(&[64, 8, 1]));
            random_window(random, limit, period, entries, lead)
        }
        3..=4 => {
            let (limit, entries) = (random.between(5, 200), random.pick(&[4, 1, 16, 64]));
            random_window(random, limit, period, entries, lead)
        }
        5 => Rate::new(random.between(1, 50), period, random.between(1, 8)).map(LimitKind::Rate),
        6 => Quota::new(random.below(20), Arc::new(FixedPeriods(period))).map(LimitKind::Quota),
        7 => Concurrency::new(random.below(5), period).map(LimitKind::Concurrency),
        8 => Ok(LimitKind::Pace(random_pacer(random, period))),
        _ => {
            let base = Span::from_micros(period.as_micros() / random.pick(&[1, 10, 1_000]));
            let (cap, stagger) = (base.times(random.pick(&[1, 3, 8])), length(random));
            Ok(LimitKind::Cooldown(Cooldown {
                base,
                cap,
                stagger: random.pick(&[stagger, Span::ZERO, Span::from_millis(1)]),
                max_release_time: random.pick(&[stagger.times(100), stagger.times(10), Span::ZERO]),
            }))
        }
    };
    let mut limit = Limit::new(kind.expect("invariant: within every range"));
    if random.chance(60) {
        limit = limit.with_penalty(random_penalty(random, period));
    }
    if wanted != PlanContents::Simple {
        if random.chance(20) {
            limit = limit.with_count_mode(CountMode::All);
        }
        limit = limit.with_shadow(random.chance(20));
    }
    limit
}

/// Returns a pacer that reaches its longest wait within a few steps, and zero again.
fn random_pacer(random: &mut RandomSource, period: Span) -> SharedPacerRules {
    let initial = Duration::from_nanos({
        let most = random.pick(&[1, 1_000, period.as_micros() * 1_000]);
        random.between(1, most)
    });
    let most = (MAX_SHARED_STEP / 20).max(initial);
    let growth = match random.below(4) {
        0 => PacerGrowth::Linear,
        1 => PacerGrowth::default(),
        _ => PacerGrowth::Exponential { up: random.between(1_001, 20_000) as u32, down: random.between(1, 999) as u16 },
    };
    let spec = PacerSpec {
        initial,
        max: random.pick(&[initial, initial * 7, initial * 1_000, most]).min(most),
        growth,
        randomization: random.pick(&[300, 0, 1, 999, 1_000]),
        max_randomization: Duration::from_nanos(random.pick(&[1 << 40, 0, 1_000, u64::MAX])),
        successes: random.pick(&[1, 2, 3, u32::MAX]),
        mode: random.pick(&[PacerMode::Steady, PacerMode::Classic]),
    };
    SharedPacerRules::new(spec).expect("invariant: within every range")
}

/// Returns a window. In a plan with calls counted ahead, it mostly has such a lead. A window that keeps every call then
/// has more entries. It keeps them even if calls cost more than they were taken for, because merged calls can't be
/// distinguished.
fn random_window(
    random: &mut RandomSource,
    limit: u64,
    period: Span,
    entries: u32,
    lead: Span,
) -> Result<LimitKind, LimitError> {
    if lead.is_zero() {
        return Window::new(limit, period, entries).map(LimitKind::Window);
    }
    let entries = if limit <= u64::from(entries) { 4_096 } else { entries };
    let lead = random.pick(&[lead, lead.times(2), Span::ZERO]);
    Window::new(limit, period, entries).map(|window| LimitKind::Window(window.with_lead(lead)))
}

fn random_penalty(random: &mut RandomSource, period: Span) -> Penalty {
    let base = Span::from_millis(random.pick(&[1, 2, 50, 1_000, 2_000]));
    let spec = PenaltySpec {
        base,
        factor: random.pick(&[2, 1, 3, 10]),
        cap: base.times(random.pick(&[1, 2, 7, 64, 1_800])),
        forgive_after: random.chance(50).then(|| Span::from_millis(random.pick(&[1, 100, 5_000]))),
        mode: random.pick(&[PenaltyMode::Parole, PenaltyMode::Parole, PenaltyMode::Strict]),
    };
    Penalty::new(spec, period).expect("invariant: within every range")
}
