//! A batch as a script's keys and arguments, and the script's answer as what core makes of it.

use std::time::Duration;

use arrayvec::ArrayVec;
use redis::Cmd;
use tidegate_core::batch::{self, BatchContext, MAX_OPS};
use tidegate_core::concurrency::{PermitLease, Permits};
use tidegate_core::cooldown::CooldownGate;
use tidegate_core::pacer::{PacerGrowth, PacerMode, PacerState};
use tidegate_core::penalty::PenaltyRecord;
use tidegate_core::quota::{Period, QuotaUsage};
use tidegate_core::rate::ArrivalTime;
use tidegate_core::state::Usage;
use tidegate_core::window::{WindowLog, WindowSlot};
use tidegate_core::{
    Batch, KeyState, Limit, LimitKind, Limits, MAX_COST, Op, Outcomes, PenaltyMode, Quota, Span, Time, Verb,
};

use super::keys::Keys;
use super::script::{HEAD, Parts, kind_number, verb_number};
use crate::TimeSource;

/// The largest cost that makes a difference: nothing holds more.
const MOST: u64 = 1 << 53;
/// What is added to the milliseconds after which a key expires: the server rounds the present down.
const ROUNDED: u64 = 1;
/// The same where time is the caller's, and may go on more slowly than the server's.
const KEPT: u64 = 3_600_000;
/// Bytes in a head of the moment and what is added where a key expires.
const MOMENT: usize = 16;
/// Bytes to begin with for an operation and its key.
const ROOM: usize = 256;
/// Bytes of the largest operation: a pace's with a penalty, of which it is told.
const ARGUMENT: usize = 8 + 20 * 8;

/// A head or an operation: bytes and doubles, one behind the other.
#[derive(Default)]
struct Packed(ArrayVec<u8, ARGUMENT>);

impl Packed {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.try_extend_from_slice(bytes).expect("invariant: the largest operation fits");
    }

    fn number(&mut self, number: u64) {
        self.bytes(&(number as f64).to_le_bytes());
    }

    fn span(&mut self, span: Span) {
        self.number(span.as_micros());
    }

    /// Nanoseconds, of which more than the scripts count to make no difference.
    fn nanos(&mut self, duration: Duration) {
        self.number(u64::try_from(duration.as_nanos()).unwrap_or(MOST).min(MOST));
    }

    /// Units of 1/1024 µs, as whole microseconds and what is beyond them.
    fn units(&mut self, units: u64) {
        self.number(units >> 10);
        self.number(units & 1023);
    }
}

/// What a script is given of a batch.
pub(super) struct Parcel {
    /// The names, one behind the other, and then the bytes.
    data: Vec<u8>,
    /// Where each name ends.
    ends: ArrayVec<usize, MAX_OPS>,
}

impl Parcel {
    pub(super) fn names(&self) -> impl Iterator<Item = &[u8]> + Clone {
        let mut from = 0;
        self.ends.iter().map(move |end| {
            let name = &self.data[from..*end];
            from = *end;
            name
        })
    }

    /// The moment that is decided for, and what is added where a key expires: as much of the head as quick scripts read.
    pub(super) fn moment(&self) -> &[u8] {
        &self.bytes()[..MOMENT]
    }

    /// What is asked of the limits.
    pub(super) fn asks(&self) -> &[u8] {
        &self.bytes()[HEAD..]
    }

    /// What is known of the batch as a whole, and then of each operation.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.data[self.ends.last().copied().unwrap_or(0)..]
    }
}

/// The command that runs a script on these: `EVALSHA` with a hash, or `EVAL` with a text.
pub(super) fn command<'a>(
    verb: &str,
    script: &str,
    names: impl Iterator<Item = &'a [u8]> + Clone,
    arguments: impl Iterator<Item = &'a [u8]> + Clone,
) -> Cmd {
    let (count, bytes) =
        names.clone().chain(arguments.clone()).fold((0, 0), |(count, bytes), word| (count + 1, bytes + word.len()));
    let mut command = Cmd::with_capacity(count + 3, script.len() + bytes + ROOM);
    command.arg(verb).arg(script).arg(names.clone().count());
    for word in names.chain(arguments) {
        command.arg(word);
    }
    command
}

/// A batch, or the part of one that lies in one place.
pub(super) struct Question<'a> {
    pub(super) batch: &'a Batch,
    pub(super) limits: &'a Limits,
    pub(super) keys: &'a Keys,
    pub(super) source: TimeSource,
    /// What stands against the call in other parts of its batch.
    pub(super) elsewhere: batch::RefusalSummary,
}

/// None of the periods of a quota that were sent holds the server's present moment, and nothing was changed.
pub(super) struct Elsewhen(pub(super) Time);

impl Question<'_> {
    /// The script that it is for.
    pub(super) fn parts(&self) -> Parts {
        Parts::of(self.batch, self.limits, self.elsewhere == batch::RefusalSummary::default())
    }

    /// The operations that a store has anything to do with.
    fn asked(&self) -> impl Iterator<Item = (&Op, &Limit)> {
        self.batch.ops().iter().filter_map(|op| Some((op, self.limits.get(op.limit)?)))
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.asked().next().is_none()
    }

    /// Whether all nodes are to hear of it.
    pub(super) fn resets(&self) -> bool {
        self.asked().any(|(op, _)| op.verb == Verb::Reset)
    }

    /// The names of its keys and the bytes that a script decides by. `now` is the caller's moment, `around` the one that
    /// the server's is thought to be near.
    pub(super) fn parcel(&self, now: Time, around: Time) -> Parcel {
        let mut data = Vec::with_capacity((self.batch.ops().len() + 1) * ROOM);
        let mut ends = ArrayVec::new();
        let affinity = self.batch.context().affinity;
        for (op, limit) in self.asked() {
            self.keys.write(affinity, self.limits.tag(op.limit), limit.kind(), op.key, &mut data);
            ends.push(data.len());
        }
        data.extend_from_slice(&self.head(now).0);
        for (op, limit) in self.asked() {
            let argument = self.argument(op, limit, around).0;
            data.push(argument.len() as u8);
            data.extend_from_slice(&argument);
        }
        Parcel { data, ends }
    }

    fn head(&self, now: Time) -> Packed {
        let BatchContext { holder, counted_at, .. } = self.batch.context();
        let mut head = Packed::default();
        match self.source {
            TimeSource::Store => {
                head.bytes(&(-1_f64).to_le_bytes());
                head.number(ROUNDED);
            }
            TimeSource::Caller => {
                head.number(batch::clamp_now(now).as_micros());
                head.number(KEPT);
            }
        }
        head.number(counted_at.as_micros());
        let batch::RefusalSummary {
            enforced_refused: refused,
            enforced_blocked: blocked,
            any_refused: watched_refused,
            any_blocked: watched_blocked,
        } = self.elsewhere;
        let bits = [refused, blocked, watched_refused, watched_blocked].into_iter().rev();
        head.bytes(&[bits.fold(0, |byte, bit| byte << 1 | u8::from(bit))]);
        head.bytes(&holder.to_le_bytes());
        head
    }

    fn argument(&self, op: &Op, limit: &Limit, around: Time) -> Packed {
        let mut packed = Packed::default();
        let cost = match (limit.kind(), op.verb) {
            (LimitKind::Cooldown(_), _) => Span::from_micros(op.cost).as_micros(),
            (LimitKind::Pace(_), _) => op.cost.min(MOST),
            (_, Verb::Debit) => op.cost.min(MAX_COST),
            _ => op.cost.min(MOST),
        };
        let penalty = limit.penalty();
        let waives = limit.kind().allows_parole();
        packed.bytes(&[
            kind_number(limit.kind()),
            verb_number(op.verb),
            u8::from(limit.is_shadow()),
            u8::from(limit.counts_refused()),
            u8::from(waives),
            u8::from(waives && penalty.is_some_and(|penalty| penalty.mode() == PenaltyMode::Parole)),
            u8::from(penalty.is_some()),
            u8::from(cost > limit.kind().capacity()),
        ]);
        packed.number(cost);
        if op.verb == Verb::Reset {
            packed.bytes(&self.limits.tag(op.limit).to_le_bytes());
            packed.bytes(&op.key.hi().to_le_bytes());
            packed.bytes(&op.key.lo().to_le_bytes());
        } else {
            self.terms(op, limit, cost, around, &mut packed);
        }
        if let Verb::RestorePenalty { strikes, parole } = op.verb {
            packed.number(u64::from(strikes));
            packed.number(limit.kind().capacity().min(parole.into()));
        }
        if let Some(penalty) = penalty {
            packed.span(penalty.base());
            packed.number(u64::from(penalty.factor()));
            packed.span(penalty.cap());
            packed.span(penalty.forgive_after());
            packed.number(u64::from(penalty.max_strikes()));
        }
        packed
    }

    /// What a limit says, as far as the operation depends on it.
    fn terms(&self, op: &Op, limit: &Limit, cost: u64, around: Time, packed: &mut Packed) {
        let lead = if op.verb == Verb::Debit { Span::ZERO } else { limit.lead(self.batch.context().lead) };
        match limit.kind() {
            LimitKind::Window(window) => {
                packed.number(window.limit());
                packed.span(window.window());
                packed.number(u64::from(window.entries()));
                packed.number(window.slot_capacity() as u64);
                packed.span(window.max_lateness());
                packed.span(window.lead());
                packed.span(lead);
            }
            LimitKind::Rate(rate) => {
                packed.units(rate.cost_units(cost));
                packed.units(rate.refill_units());
                packed.number(rate.burst());
                packed.units(rate.cost_units(1));
                packed.span(lead);
            }
            LimitKind::Quota(quota) => {
                packed.number(quota.limit());
                for bound in bounds(quota, around) {
                    packed.number(bound.as_micros());
                }
                if op.verb == Verb::Refund {
                    packed.number(self.batch.context().charged_at.as_micros());
                }
            }
            LimitKind::Concurrency(concurrency) => {
                packed.number(concurrency.limit());
                packed.span(concurrency.lease());
            }
            LimitKind::Cooldown(cooldown) => {
                packed.span(cooldown.base);
                packed.span(cooldown.cap);
                packed.span(cooldown.stagger);
                packed.span(cooldown.max_release_time());
                packed.span(cooldown.retention());
                packed.number(match op.verb {
                    Verb::Throttle { generation } | Verb::Success { generation } => u64::from(generation),
                    _ => 0,
                });
            }
            LimitKind::Pace(pacer) => {
                let spec = pacer.spec();
                packed.span(pacer.retention());
                packed.nanos(spec.initial);
                packed.nanos(spec.max);
                packed.number(pacer.max_before_jitter());
                let (up, down) = match spec.growth {
                    PacerGrowth::Exponential { up, down } => (up, down),
                    PacerGrowth::Linear => (0, 0),
                };
                packed.number(u64::from(up));
                packed.number(u64::from(down));
                packed.number(u64::from(spec.randomization));
                packed.nanos(spec.max_randomization);
                packed.number(u64::from(spec.successes));
                packed.number(u64::from(spec.mode == PacerMode::Steady));
                let (failed, draw) = match op.verb {
                    Verb::Pace { failed, draw } => (failed, draw),
                    _ => (false, 0),
                };
                packed.number(u64::from(failed));
                packed.number(u64::from(draw));
            }
        }
    }

    /// What a script's answer means. `None` if it can't be one.
    ///
    /// The answers themselves are core's: each state is made anew, a log as the few slots that answer as the whole one
    /// does, and [`batch::execute_part`] judges and changes them as it would have.
    pub(super) fn read(&self, bytes: &[u8]) -> Option<Result<Outcomes, Elsewhen>> {
        let mut input = Input(bytes);
        let now = input.time()?;
        if input.0.is_empty() && self.asked().any(|(_, limit)| limit.kind().has_periods()) {
            return Some(Err(Elsewhen(now)));
        }
        let mut states = ArrayVec::<KeyState, MAX_OPS>::new();
        for op in self.batch.ops() {
            let state = match self.limits.get(op.limit) {
                Some(limit) => self.state(op, limit, &mut input, now)?,
                None => KeyState::default(),
            };
            states.push(state);
        }
        let outcomes = batch::execute_part(self.batch, self.limits, states.as_mut_slice(), now, self.elsewhere);
        input.0.is_empty().then_some(Ok(outcomes))
    }

    fn state(&self, op: &Op, limit: &Limit, input: &mut Input<'_>, now: Time) -> Option<KeyState> {
        let steps = matches!((limit.kind(), op.verb), (LimitKind::Pace(_), Verb::Pace { .. }));
        if !steps && !matches!(op.verb, Verb::Take | Verb::Peek) {
            return self.told(limit, input.byte()? == 1, now);
        }
        let usage = match limit.kind() {
            LimitKind::Window(_) => Usage::Window(input.log()?),
            LimitKind::Rate(_) => {
                let (micros, rest) = (input.number()?, input.number()?);
                Usage::Rate(ArrivalTime::from_bits((micros << 10) + rest))
            }
            LimitKind::Quota(_) => {
                let period = Period { start: input.time()?, end: input.time()? };
                Usage::Quota(QuotaUsage { period, used: input.number()? })
            }
            LimitKind::Concurrency(_) => Usage::Concurrency(input.permits(self.batch.holder())?),
            LimitKind::Cooldown(_) => Usage::Cooldown(CooldownGate {
                opens_at: input.time()?,
                last_event_at: input.time()?,
                generation: input.word()?,
                closings_in_row: u8::try_from(input.word()?).ok()?,
            }),
            LimitKind::Pace(_) => Usage::Pace(PacerState {
                interval: input.number()?,
                successes: u32::try_from(input.number()?).ok()?,
                updated_at: input.time()?,
            }),
        };
        let record = match limit.penalty() {
            Some(_) if !steps => {
                PenaltyRecord { blocked_until: input.time()?, parole: input.number()?, strikes: input.byte()? }
            }
            _ => PenaltyRecord::default(),
        };
        Some(KeyState::new(usage, record))
    }

    /// A state that is told something with the same effect: a permit that is released or renewed must be there.
    fn told(&self, limit: &Limit, done: bool, now: Time) -> Option<KeyState> {
        let LimitKind::Concurrency(concurrency) = limit.kind() else { return Some(KeyState::default()) };
        let expires = now + concurrency.lease();
        let held = PermitLease { holder: self.batch.holder(), count: 1, expires };
        let permits = if done { vec![held] } else { Vec::new() };
        Some(KeyState::new(Usage::Concurrency(Permits::from_leases(permits)), PenaltyRecord::default()))
    }
}

/// Where three periods of a quota begin and the last ends: that which holds a moment, the one before and the next.
fn bounds(quota: &Quota, around: Time) -> [Time; 4] {
    let present = quota.period(around);
    let before =
        if present.start == Time::ZERO { Time::ZERO } else { quota.period(present.start - Span::from_micros(1)).start };
    let next = if present.end.is_never() { Time::NEVER } else { quota.period(present.end).end };
    [before, present.start, present.end, next]
}

/// What is left to read of an answer.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take().map(|[byte]| byte)
    }

    fn word(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    /// A double that holds a whole number.
    fn number(&mut self) -> Option<u64> {
        let number = f64::from_le_bytes(self.take()?);
        (number >= 0.0 && number.fract() == 0.0).then_some(number as u64)
    }

    fn time(&mut self) -> Option<Time> {
        self.number().map(Time::from_micros)
    }

    /// A log that answers as the whole one does: what is free together and when, and the rest at the newest moment.
    fn log(&mut self) -> Option<WindowLog> {
        let (total, newest) = (self.number()?, self.time()?);
        let (free_from, free) = (self.time()?, self.number()?.min(total));
        let slots = [WindowSlot { at: free_from, count: free }, WindowSlot { at: newest, count: total - free }];
        let slots: ArrayVec<WindowSlot, 2> = slots.into_iter().filter(|slot| slot.count > 0).collect();
        WindowLog::from_slots(&slots, false)
    }

    /// Permits that answer as all of them do: the holder's own, and of the others what is free together and when, and
    /// the rest with the last lease.
    fn permits(&mut self, holder: u64) -> Option<Permits> {
        let used = self.number()?;
        let own = PermitLease { holder, count: self.number()?, expires: self.time()? };
        let last = self.time()?;
        let (free_at, free) = (self.time()?, self.number()?);
        let others = used.checked_sub(own.count)?;
        // Who holds a permit needn't wait for others.
        let free = if own.count > 0 { 0 } else { free.min(others) };
        let first = PermitLease { holder: holder.wrapping_add(1), count: free, expires: free_at };
        let rest = PermitLease { holder: holder.wrapping_add(2), count: others - free, expires: last };
        Some(Permits::from_leases([own, first, rest].into_iter().filter(|permit| permit.count > 0).collect()))
    }
}
