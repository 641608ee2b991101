//! Random plans and random traffic on them.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::pacer::{Growth, MAX_SHARED_STEP, Mode};
use tidegate_core::quota::Every;
use tidegate_core::{
    Batch, Concurrency, Cooldown, Count, Key, Kind, Limit, LimitError, LimitId, Limits, MAX_COST, Op, Outcomes,
    PacerSpec, Penalty, PenaltyMode, PenaltySpec, Quota, Rate, SharedPacer, Span, Time, Verb, Window,
};

use crate::dice::Dice;

/// How many calls are remembered that may still be heard of.
const UNDER_WAY: usize = 8;

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
    /// How far ahead calls are counted, if they are.
    lead: Span,
    /// What was asked last.
    asked: Batch,
    under_way: Vec<UnderWay>,
}

/// A call that was admitted.
#[derive(Clone, Debug)]
struct UnderWay {
    ops: Vec<Op>,
    holder: u64,
    charged_at: Time,
    counted_at: Time,
    /// The generation of each operation's cool-down.
    generations: Vec<u32>,
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
        let lead = match dice.below(4) {
            0..=1 => Span::ZERO,
            2 => Span::from_micros(dice.below(20_000)),
            _ => Span::from_millis(dice.pick(&[500, 60_000])),
        };
        let limits = (0..count).map(|_| limit(&mut dice, wanted, lead)).collect();
        // Different ones, also where a tape gives nothing but zeros.
        let keys = (0..dice.between(1, 4)).map(|key| Key::new(key, dice.word() ^ ((key << 61) | key))).collect();
        let now = Time::from_micros(1_700_000_000_000_000 + dice.below(86_400_000_000));
        let limits = Arc::new(Limits::new(limits).expect("invariant: at most 5 limits"));
        let (told, under_way) = (Vec::new(), Vec::new());
        Self { dice, limits, keys, now, told, wanted, lead, asked: Batch::new(0), under_way }
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

    /// A `Take` of 1 to 4 limits, news of a call that was admitted, or now and then something else.
    pub fn batch(&mut self) -> Batch {
        self.asked = if !self.under_way.is_empty() && self.dice.percent(25) { self.news() } else { self.question() };
        self.asked.clone()
    }

    fn question(&mut self) -> Batch {
        let mut pairs = self.pairs();
        let most = self.dice.between(1, 4) as usize;
        let kind = self.dice.below(100);
        let mut batch = Batch::new(self.dice.between(1, 5)).ahead(self.any_lead());
        if !self.lead.is_zero() && self.dice.percent(10) {
            batch = batch.counted_at(self.now + Span::from_micros(self.dice.below(5_000_000)));
        }
        if kind >= 84 {
            let at = [self.now - Span::from_micros(self.dice.below(20_000_000)), self.now, Time::NEVER, Time::ZERO];
            batch = batch.charged_at(self.dice.pick(&at));
        }
        while batch.ops().len() < most && !pairs.is_empty() {
            let (limit, key) = pairs.swap_remove(self.dice.below(pairs.len() as u64) as usize);
            let verb = match kind {
                0..70 => Verb::Take,
                70..78 => Verb::Peek,
                78..84 => self.dice.pick(&[Verb::Take, Verb::Peek]),
                84..87 => Verb::Refund,
                87..90 => Verb::Release,
                90..92 => Verb::Renew,
                92..94 => Verb::Reset,
                _ => self.any_verb(),
            };
            let (verb, cost) = match verb {
                _ if self.is_pace(limit) && self.dice.percent(70) => self.step(),
                _ if self.is_cooldown(limit) || matches!(verb, Verb::Penalise { .. }) => (verb, self.wait()),
                _ => (verb, self.cost(limit)),
            };
            let verb = self.known(limit, verb);
            batch.push(Op::new(limit, verb, key, cost)).expect("invariant: at most 4 operations");
        }
        batch
    }

    /// What becomes of a call: how it ended, what it cost, or that it was never sent. It may be heard of again.
    fn news(&mut self) -> Batch {
        // Mostly of the latest, while it still counts ahead.
        let last = self.under_way.len() - 1;
        let place = if self.dice.percent(60) { last } else { self.dice.below(last as u64) as usize };
        let call =
            if self.dice.percent(70) { self.under_way.swap_remove(place) } else { self.under_way[place].clone() };
        let verb = self.dice.pick(&[Verb::Settle, Verb::Settle, Verb::Refund, Verb::Debit, Verb::Release]);
        let known = !self.lead.is_zero() && (verb == Verb::Settle || self.dice.percent(60));
        let mut batch = Batch::new(call.holder).counted_at(if known { call.counted_at } else { Time::ZERO });
        batch = batch.charged_at(if self.dice.percent(90) { call.charged_at } else { Time::ZERO });
        for (op, generation) in call.ops.iter().zip(call.generations) {
            let (verb, cost) = match (self.is_cooldown(op.limit), self.dice.below(8)) {
                (true, 0..=3) => (Verb::Throttle { generation }, self.wait()),
                (true, 4..=6) => (Verb::Succeed { generation }, 0),
                (true, _) => (Verb::Disable, self.wait()),
                (false, _) if self.is_pace(op.limit) => self.step(),
                (false, 0) => match self.any_verb() {
                    verb @ Verb::Penalise { .. } => (verb, self.wait()),
                    verb => (verb, self.cost(op.limit)),
                },
                (false, _) => (verb, op.cost),
            };
            let verb = self.known(op.limit, verb);
            batch.push(Op::new(op.limit, verb, op.key, cost)).expect("invariant: as many as were asked");
        }
        batch
    }

    /// The verb, unless the model couldn't know what came of it.
    fn known(&self, limit: LimitId, verb: Verb) -> Verb {
        let merges = |limit: &Limit| matches!(limit.kind(), Kind::Window(window) if !window.lateness().is_zero());
        let unknown = self.limits.get(limit).is_some_and(|limit| limit.penalty().is_some() && merges(limit));
        if unknown && verb == Verb::Debit { Verb::Settle } else { verb }
    }

    fn any_verb(&mut self) -> Verb {
        let generation = if self.dice.percent(90) { self.dice.below(4) as u32 } else { u32::MAX };
        let penalise = Verb::Penalise { strikes: self.dice.below(5) as u8, parole: self.dice.below(3) as u32 };
        self.dice.pick(&[
            Verb::Take,
            Verb::Peek,
            Verb::Refund,
            Verb::Release,
            Verb::Renew,
            Verb::Reset,
            Verb::Debit,
            Verb::Settle,
            Verb::Throttle { generation },
            Verb::Succeed { generation },
            Verb::Disable,
            Verb::Pace { failed: true, draw: generation },
            penalise,
        ])
    }

    /// News of a call for a pace, whose jitter finds the ends of its range.
    fn step(&mut self) -> (Verb, u64) {
        let draw = match self.dice.below(8) {
            0 => self.dice.pick(&[0, 1, 1 << 31, u32::MAX - 1, u32::MAX]),
            _ => self.dice.word() as u32,
        };
        match self.dice.below(16) {
            0..=6 => (Verb::Pace { failed: true, draw }, 0),
            7..=14 => (Verb::Pace { failed: false, draw }, 0),
            _ => (Verb::Debit, self.dice.below(1 << 40)),
        }
    }

    /// Mostly as all calls have it.
    fn any_lead(&mut self) -> Span {
        match self.dice.below(20) {
            0..=16 => self.lead,
            17 => self.lead.times(2),
            18 => Span::from_micros(self.dice.below(1_000)),
            _ => Span::ZERO,
        }
    }

    /// How long a provider asks to be left alone; seldom for good.
    fn wait(&mut self) -> u64 {
        match self.dice.below(40) {
            0..=15 => 0,
            16..=30 => self.dice.below(100_000),
            31..=38 => self.dice.below(20_000_000),
            _ => self.dice.pick(&[7_200_000_000, MAX_COST, u64::MAX]),
        }
    }

    fn is_cooldown(&self, limit: LimitId) -> bool {
        self.limits.get(limit).is_some_and(|limit| matches!(limit.kind(), Kind::Cooldown(_)))
    }

    fn is_pace(&self, limit: LimitId) -> bool {
        self.limits.get(limit).is_some_and(|limit| matches!(limit.kind(), Kind::Pace(_)))
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
        self.asked = batch.clone();
        batch
    }

    /// Remembers what was told, so that time can go there, and who was let through, so that there may be news of them.
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
        let ops = self.asked.ops();
        let takes = !ops.is_empty() && ops.iter().all(|op| op.verb == Verb::Take) && ops.len() == outcomes.list().len();
        if takes && !outcomes.refuses() {
            if self.under_way.len() == UNDER_WAY {
                self.under_way.remove(0);
            }
            self.under_way.push(UnderWay {
                ops: ops.to_vec(),
                holder: self.asked.id(),
                charged_at: outcomes.now(),
                counted_at: outcomes.now() + self.asked.terms().lead,
                generations: outcomes.list().iter().map(|outcome| outcome.generation).collect(),
            });
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
        let capacity = self.limits.get(limit).map_or(1, |limit| limit.kind().capacity().min(MAX_COST));
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

fn limit(dice: &mut Dice, wanted: Wanted, lead: Span) -> Limit {
    let long = wanted == Wanted::RealTime;
    let length = |dice: &mut Dice| {
        let millis = if long { [3_600_000; 3] } else { [10, 1_000, 60_000] };
        Span::from_millis(dice.between(1, 3) * dice.pick(&millis))
    };
    let period = length(dice);
    let kind = match dice.below(11) {
        0..=2 => {
            let (limit, entries) = (dice.below(8), dice.pick(&[64, 8, 1]));
            window(dice, limit, period, entries, lead)
        }
        3..=4 => {
            let (limit, entries) = (dice.between(5, 200), dice.pick(&[4, 1, 16, 64]));
            window(dice, limit, period, entries, lead)
        }
        5 => Rate::new(dice.between(1, 50), period, dice.between(1, 8)).map(Kind::Rate),
        6 => Quota::new(dice.below(20), Arc::new(Every(period))).map(Kind::Quota),
        7 => Concurrency::new(dice.below(5), period).map(Kind::Concurrency),
        8 => Ok(Kind::Pace(pacer(dice, period))),
        _ => {
            let base = Span::from_micros(period.as_micros() / dice.pick(&[1, 10, 1_000]));
            let (cap, stagger) = (base.times(dice.pick(&[1, 3, 8])), length(dice));
            Ok(Kind::Cooldown(Cooldown { base, cap, stagger: dice.pick(&[stagger, Span::ZERO, Span::from_millis(1)]) }))
        }
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

/// Steps that come to the longest wait within a few, and to none again.
fn pacer(dice: &mut Dice, period: Span) -> SharedPacer {
    let initial = Duration::from_nanos({
        let most = dice.pick(&[1, 1_000, period.as_micros() * 1_000]);
        dice.between(1, most)
    });
    let most = (MAX_SHARED_STEP / 20).max(initial);
    let growth = match dice.below(4) {
        0 => Growth::Linear,
        1 => Growth::default(),
        _ => Growth::Exponential { up: dice.between(1_001, 20_000) as u32, down: dice.between(1, 999) as u16 },
    };
    let spec = PacerSpec {
        initial,
        max: dice.pick(&[initial, initial * 7, initial * 1_000, most]).min(most),
        growth,
        randomization: dice.pick(&[300, 0, 1, 999, 1_000]),
        max_randomization: Duration::from_nanos(dice.pick(&[1 << 40, 0, 1_000, u64::MAX])),
        successes: dice.pick(&[1, 2, 3, u32::MAX]),
        mode: dice.pick(&[Mode::Steady, Mode::Classic]),
    };
    SharedPacer::new(spec).expect("invariant: within every range")
}

/// A window, in a plan whose calls are counted ahead one that expects it. Those that keep every moment keep them then
/// even where calls cost more than they were taken for: merged, they couldn't be told apart.
fn window(dice: &mut Dice, limit: u64, period: Span, entries: u32, lead: Span) -> Result<Kind, LimitError> {
    if lead.is_zero() {
        return Window::new(limit, period, entries).map(Kind::Window);
    }
    let entries = if limit <= u64::from(entries) { 4_096 } else { entries };
    let lead = dice.pick(&[lead, lead.times(2), Span::ZERO]);
    Window::new(limit, period, entries).map(|window| Kind::Window(window.with_lead(lead)))
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
