//! Random plans and random traffic on them.

use std::sync::Arc;

use tidegate_core::quota::Every;
use tidegate_core::{
    Batch, Concurrency, Count, Key, Kind, Limit, LimitId, Limits, MAX_COST, Op, Outcomes, Penalty, PenaltyMode,
    PenaltySpec, Quota, Rate, Span, Time, Verb, Window,
};

use crate::dice::Dice;

/// A random plan, a few keys, and a clock that goes on by steps that find the edges: to the very moment a wait was
/// told for and the microsecond before it, past windows, leases and forgiveness.
#[derive(Clone, Debug)]
pub struct World {
    dice: Dice,
    limits: Arc<Limits>,
    keys: Vec<Key>,
    now: Time,
    told: Vec<Time>,
    wanted: Wanted,
}

/// What a random plan may hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// Everything.
    #[default]
    All,
    /// Nothing in shadow and nothing that counts refused calls.
    Plain,
    /// No time but the store's own: limits that last long enough for a few hundred batches.
    RealTime,
}

impl World {
    /// A plan of 1 to 5 limits and 1 to 4 keys.
    pub fn new(mut dice: Dice, wanted: Wanted) -> Self {
        let count = dice.between(1, 5);
        let limits = (0..count).map(|_| limit(&mut dice, wanted)).collect();
        // Different ones, also where a tape gives nothing but zeros.
        let keys = (0..dice.between(1, 4)).map(|key| Key::new(key, dice.word() ^ ((key << 61) | key))).collect();
        let now = Time::from_micros(1_700_000_000_000_000 + dice.below(86_400_000_000));
        let limits = Arc::new(Limits::new(limits).expect("invariant: at most 5 limits"));
        Self { dice, limits, keys, now, told: Vec::new(), wanted }
    }

    /// The plan.
    pub fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    /// The clock.
    pub fn now(&self) -> Time {
        self.now
    }

    /// The choices that are still to come.
    pub fn dice(&mut self) -> &mut Dice {
        &mut self.dice
    }

    /// Moves the clock on, or leaves it where it is.
    pub fn pass_time(&mut self) -> Time {
        let span = |dice: &mut Dice, most: u64| Span::from_micros(dice.below(most));
        let to = match self.dice.below(20) {
            0..=5 => self.now,
            6..=7 => self.now + Span::from_micros(1),
            8..=10 => self.now + span(&mut self.dice, 5_000),
            11..=12 => self.now + span(&mut self.dice, 500_000),
            13 => self.now + span(&mut self.dice, 20_000_000),
            14 => self.now + span(&mut self.dice, 7_200_000_000),
            _ if self.told.is_empty() => self.now,
            15 => self.dice.pick(&self.told) - Span::from_micros(1),
            _ => self.dice.pick(&self.told),
        };
        self.now = self.now.max(to);
        self.now
    }

    /// A `Take` of 1 to 4 limits, or now and then something else.
    pub fn batch(&mut self) -> Batch {
        let mut pairs = self.pairs();
        let most = self.dice.between(1, 4) as usize;
        let kind = self.dice.below(100);
        let mut batch = Batch::new(self.dice.between(1, 5));
        while batch.ops().len() < most && !pairs.is_empty() {
            let (limit, key) = pairs.swap_remove(self.dice.below(pairs.len() as u64) as usize);
            let verb = match kind {
                0..70 => Verb::Take,
                70..78 => Verb::Peek,
                78..84 => self.dice.pick(&[Verb::Take, Verb::Peek]),
                84..89 => Verb::Refund,
                89..92 => Verb::Release,
                92..94 => Verb::Renew,
                94..96 => Verb::Reset,
                _ => self.dice.pick(&[Verb::Take, Verb::Peek, Verb::Refund, Verb::Release, Verb::Renew, Verb::Reset]),
            };
            let cost = self.cost(limit);
            batch.push(Op::new(limit, verb, key, cost)).expect("invariant: at most 4 operations");
        }
        batch
    }

    /// A `Take` of one to four limits, each with the cost of an ordinary call.
    pub fn call(&mut self) -> Batch {
        let mut pairs = self.pairs();
        let mut batch = Batch::new(self.dice.word());
        for _ in 0..self.dice.between(1, 4) {
            if pairs.is_empty() {
                break;
            }
            let (limit, key) = pairs.swap_remove(self.dice.below(pairs.len() as u64) as usize);
            let cost = self.cost(limit);
            batch.push(Op::new(limit, Verb::Take, key, cost)).expect("invariant: at most 4 operations");
        }
        batch
    }

    /// Remembers what was told, so that time can go there.
    pub fn heard(&mut self, outcomes: &Outcomes) {
        if self.told.len() > 8 {
            self.told.clear();
        }
        for outcome in outcomes.list() {
            for moment in [outcome.retry_at, outcome.reset_at, outcome.block_until] {
                if moment > outcomes.now() && !moment.is_never() {
                    self.told.push(moment);
                }
            }
        }
    }

    fn pairs(&mut self) -> Vec<(LimitId, Key)> {
        let keys = &self.keys;
        let known = self.limits.iter().flat_map(|(limit, _)| keys.iter().map(move |&key| (limit, key)));
        let mut pairs: Vec<_> = known.collect();
        if self.wanted == Wanted::All && self.dice.percent(1) {
            let unknown = LimitId::from_index(self.limits.len()).expect("invariant: a plan of at most 5");
            pairs.push((unknown, keys[0]));
        }
        pairs
    }

    fn cost(&mut self, limit: LimitId) -> u64 {
        let capacity = self.limits.get(limit).map_or(1, |limit| limit.kind().capacity());
        match self.dice.below(40) {
            0..=24 => 1,
            25..=29 => self.dice.between(1, 3),
            30..=35 => self.dice.between(1, capacity.max(1)),
            36 => 0,
            37 => capacity,
            38 => capacity + 1,
            _ => self.dice.pick(&[MAX_COST, u64::MAX, 2]),
        }
    }
}

fn limit(dice: &mut Dice, wanted: Wanted) -> Limit {
    let long = wanted == Wanted::RealTime;
    let length = |dice: &mut Dice| {
        let millis = if long { [3_600_000; 3] } else { [10, 1_000, 60_000] };
        Span::from_millis(dice.between(1, 3) * dice.pick(&millis))
    };
    let period = length(dice);
    let kind = match dice.below(8) {
        0..=2 => Window::new(dice.below(8), period, dice.pick(&[64, 8, 1])).map(Kind::Window),
        3..=4 => Window::new(dice.between(5, 200), period, dice.pick(&[4, 1, 16, 64])).map(Kind::Window),
        5 => Rate::new(dice.between(1, 50), period, dice.between(1, 8)).map(Kind::Rate),
        6 => Quota::new(dice.below(20), Arc::new(Every(period))).map(Kind::Quota),
        _ => Concurrency::new(dice.below(5), period).map(Kind::Concurrency),
    };
    let mut limit = Limit::new(kind.expect("invariant: within every range"));
    if dice.percent(60) {
        limit = limit.with_penalty(penalty(dice, period));
    }
    if wanted != Wanted::Plain {
        if dice.percent(20) {
            limit = limit.counting(Count::All);
        }
        limit = limit.in_shadow(dice.percent(20));
    }
    limit
}

fn penalty(dice: &mut Dice, period: Span) -> Penalty {
    let base = Span::from_millis(dice.pick(&[1, 2, 50, 1_000, 2_000]));
    let spec = PenaltySpec {
        base,
        factor: dice.pick(&[2, 1, 3, 10]),
        cap: base.times(dice.pick(&[1, 2, 7, 64, 1_800])),
        forgive_after: dice.percent(50).then(|| Span::from_millis(dice.pick(&[1, 100, 5_000]))),
        mode: dice.pick(&[PenaltyMode::Parole, PenaltyMode::Parole, PenaltyMode::Strict]),
    };
    Penalty::new(spec, period).expect("invariant: within every range")
}
