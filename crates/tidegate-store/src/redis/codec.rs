//! The encoding of a batch as a script's keys and argument, and the decoding of the script's answer into outcomes.

mod reservations;

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

use self::reservations::DecodedStates;
use super::keys::KeyNames;
use super::script::{HEADER_BYTES, MAX_EXACT_INTEGER, kind_number, verb_number};
use crate::TimeSource;

/// The milliseconds added to a key's expiry, because the server rounds its time down.
const CLOCK_ROUNDING_MILLIS: u64 = 1;
/// The same with the caller's time, which may advance more slowly than the server's.
const CALLER_TIME_MARGIN_MILLIS: u64 = 3_600_000;
/// The bytes of a header's first fields: the time, and the milliseconds added to expiries.
const TIME_HEADER_BYTES: usize = 16;
/// The initial capacity, in bytes, for an operation and its key.
const INITIAL_OP_BYTES: usize = 256;
/// The flag of a limit with reservations, in the place of that of a penalty.
const RESERVES: u8 = 2;
/// The bytes of the largest operation: an update of a pace with a penalty.
const MAX_OP_BYTES: usize = 8 + 20 * 8;

/// The encoding of a header or an operation: bytes and doubles.
#[derive(Default)]
struct ArgumentBuffer(ArrayVec<u8, MAX_OP_BYTES>);

impl ArgumentBuffer {
    fn push_bytes(&mut self, bytes: &[u8]) {
        self.0.try_extend_from_slice(bytes).expect("invariant: the largest operation fits");
    }

    fn push_number(&mut self, number: u64) {
        self.push_bytes(&(number as f64).to_le_bytes());
    }

    fn push_span(&mut self, span: Span) {
        self.push_number(span.as_micros());
    }

    /// Writes nanoseconds. Values above the scripts' largest integer have no effect.
    fn push_nanos(&mut self, duration: Duration) {
        self.push_number(u64::try_from(duration.as_nanos()).unwrap_or(MAX_EXACT_INTEGER).min(MAX_EXACT_INTEGER));
    }

    /// Writes units of 1/1024 µs as whole microseconds and the remainder.
    fn push_units(&mut self, units: u64) {
        self.push_number(units >> 10);
        self.push_number(units & 1023);
    }
}

/// The input of a script for a batch.
pub(super) struct EncodedRequest {
    /// The names, then the argument.
    data: Vec<u8>,
    /// The end of each name: of a state, and after it that of its reservations, if the limit has any.
    name_ends: ArrayVec<usize, { 2 * MAX_OPS }>,
}

impl EncodedRequest {
    pub(super) fn names(&self) -> impl Iterator<Item = &[u8]> + Clone {
        let mut start = 0;
        self.name_ends.iter().map(move |end| {
            let name = &self.data[start..*end];
            start = *end;
            name
        })
    }

    /// The part of the header that quick scripts read: the time, and the milliseconds added to expiries.
    pub(super) fn time_header(&self) -> &[u8] {
        &self.argument()[..TIME_HEADER_BYTES]
    }

    /// The operations in the argument.
    pub(super) fn ops(&self) -> &[u8] {
        &self.argument()[HEADER_BYTES..]
    }

    /// The argument: the header, then the operations.
    pub(super) fn argument(&self) -> &[u8] {
        &self.data[self.name_ends.last().copied().unwrap_or(0)..]
    }
}

/// The command that runs a script: `EVALSHA` with its hash, or `EVAL` with its text.
pub(super) fn script_command<'a>(
    command_name: &str,
    script: &str,
    names: impl Iterator<Item = &'a [u8]> + Clone,
    arguments: impl Iterator<Item = &'a [u8]> + Clone,
) -> Cmd {
    let (count, bytes) =
        names.clone().chain(arguments.clone()).fold((0, 0), |(count, bytes), part| (count + 1, bytes + part.len()));
    let mut command = Cmd::with_capacity(count + 3, script.len() + bytes + INITIAL_OP_BYTES);
    command.arg(command_name).arg(script).arg(names.clone().count());
    for word in names.chain(arguments) {
        command.arg(word);
    }
    command
}

/// A batch, or the part of one with all keys in one slot.
pub(super) struct BatchCodec<'a> {
    pub(super) batch: &'a Batch,
    pub(super) limits: &'a Limits,
    pub(super) key_names: &'a KeyNames,
    pub(super) time_source: TimeSource,
    /// The refusals in other parts of the batch.
    pub(super) other_parts: batch::RefusalSummary,
}

/// The server's time is in none of the periods that were sent for a quota, and nothing was changed. Holds that time.
pub(super) struct PeriodMismatchError(pub(super) Time);

impl BatchCodec<'_> {
    /// The operations with a known limit.
    pub(super) fn known_ops(&self) -> impl Iterator<Item = (&Op, &Limit)> {
        self.batch.ops().iter().filter_map(|op| Some((op, self.limits.get(op.limit)?)))
    }

    /// Encodes the names of keys and the argument. `expected_now` is the expected time of the server.
    pub(super) fn encode(&self, now: Time, expected_now: Time) -> EncodedRequest {
        let mut data = Vec::with_capacity((self.batch.ops().len() + 1) * INITIAL_OP_BYTES);
        let mut ends = ArrayVec::new();
        let affinity = self.batch.context().affinity;
        for (op, limit) in self.known_ops() {
            let start = data.len();
            self.key_names.append_name(affinity, self.limits.tag(op.limit), limit.kind(), op.key, &mut data);
            ends.push(data.len());
            if limit.reservations().is_some() {
                KeyNames::append_queue_name(start, &mut data);
                ends.push(data.len());
            }
        }
        data.extend_from_slice(&self.encode_header(now).0);
        for (op, limit) in self.known_ops() {
            let argument = self.encode_op(op, limit, expected_now).0;
            data.push(argument.len() as u8);
            data.extend_from_slice(&argument);
        }
        EncodedRequest { data, name_ends: ends }
    }

    fn encode_header(&self, now: Time) -> ArgumentBuffer {
        let BatchContext { holder, counted_at, .. } = self.batch.context();
        let mut head = ArgumentBuffer::default();
        match self.time_source {
            TimeSource::Store => {
                head.push_bytes(&(-1_f64).to_le_bytes());
                head.push_number(CLOCK_ROUNDING_MILLIS);
            }
            TimeSource::Caller => {
                head.push_number(batch::clamp_now(now).as_micros());
                head.push_number(CALLER_TIME_MARGIN_MILLIS);
            }
        }
        head.push_number(counted_at.as_micros());
        let others = &self.other_parts;
        let bits = [others.any_blocked, others.any_refused, others.enforced_blocked, others.enforced_refused];
        head.push_bytes(&[bits.iter().fold(0, |byte, bit| byte << 1 | u8::from(*bit))]);
        head.push_bytes(&holder.to_le_bytes());
        head
    }

    fn encode_op(&self, op: &Op, limit: &Limit, expected_now: Time) -> ArgumentBuffer {
        let mut buffer = ArgumentBuffer::default();
        let cost = match (limit.kind(), op.verb) {
            (LimitKind::Cooldown(_), _) => Span::from_micros(op.cost).as_micros(),
            (LimitKind::Pace(_), _) => op.cost.min(MAX_EXACT_INTEGER),
            (_, Verb::Debit) => op.cost.min(MAX_COST),
            (_, Verb::TakeByTerms { .. }) => 0,
            _ => op.cost.min(MAX_EXACT_INTEGER),
        };
        let penalty = limit.penalty();
        let allows_parole = limit.kind().allows_parole();
        buffer.push_bytes(&[
            kind_number(limit.kind()),
            verb_number(op.verb),
            u8::from(limit.is_shadow()),
            u8::from(limit.counts_refused()),
            u8::from(allows_parole),
            u8::from(allows_parole && penalty.is_some_and(|penalty| penalty.mode() == PenaltyMode::Parole)),
            if limit.reservations().is_some() { RESERVES } else { u8::from(penalty.is_some()) },
            u8::from(cost > limit.kind().capacity()),
        ]);
        buffer.push_number(cost);
        if op.verb == Verb::Reset {
            buffer.push_bytes(&self.limits.tag(op.limit).to_le_bytes());
            buffer.push_bytes(&op.key.hi().to_le_bytes());
            buffer.push_bytes(&op.key.lo().to_le_bytes());
        } else {
            self.encode_limit(op, limit, cost, expected_now, &mut buffer);
        }
        if let Verb::RestorePenalty { strikes, parole } = op.verb {
            buffer.push_number(u64::from(strikes));
            buffer.push_number(limit.kind().capacity().min(parole.into()));
        }
        if let Some(penalty) = penalty {
            buffer.push_span(penalty.base());
            buffer.push_number(u64::from(penalty.factor()));
            buffer.push_span(penalty.cap());
            buffer.push_span(penalty.forgive_after());
            buffer.push_number(u64::from(penalty.max_strikes()));
        }
        if let Some(rules) = limit.reservations() {
            self.encode_reservation_rules(op, limit.kind(), rules, &mut buffer);
        }
        buffer
    }

    /// Writes the fields of a limit that the operation needs.
    fn encode_limit(&self, op: &Op, limit: &Limit, cost: u64, expected_now: Time, buffer: &mut ArgumentBuffer) {
        if let Verb::TakeByTerms { gives_back, tolerance } = op.verb {
            for nanos in [op.cost, tolerance.get()] {
                buffer.push_number(nanos / 1000);
                buffer.push_number(nanos % 1000);
            }
            return buffer.push_number(u64::from(gives_back));
        }
        let lead = if op.verb == Verb::Debit { Span::ZERO } else { limit.lead(self.batch.context().lead) };
        match limit.kind() {
            LimitKind::Window(window) => {
                buffer.push_number(window.limit());
                buffer.push_span(window.window());
                buffer.push_number(u64::from(window.entries()));
                buffer.push_number(window.slot_capacity() as u64);
                buffer.push_span(window.max_lateness());
                buffer.push_span(window.lead());
                buffer.push_span(lead);
            }
            LimitKind::Rate(rate) => {
                buffer.push_units(rate.cost_units(cost));
                buffer.push_units(rate.refill_units());
                buffer.push_number(rate.burst());
                buffer.push_units(rate.cost_units(1));
                buffer.push_span(lead);
            }
            LimitKind::Quota(quota) => {
                buffer.push_number(quota.limit());
                for boundary in period_bounds(quota, expected_now) {
                    buffer.push_number(boundary.as_micros());
                }
                if op.verb == Verb::Refund {
                    buffer.push_number(self.batch.context().charged_at.as_micros());
                }
            }
            LimitKind::Concurrency(concurrency) => {
                buffer.push_number(concurrency.limit());
                buffer.push_span(concurrency.lease());
            }
            LimitKind::Cooldown(cooldown) => {
                buffer.push_span(cooldown.base);
                buffer.push_span(cooldown.cap);
                buffer.push_span(cooldown.stagger);
                buffer.push_span(cooldown.max_release_time);
                buffer.push_span(cooldown.retention());
                buffer.push_number(match op.verb {
                    Verb::Throttle { generation } | Verb::Success { generation } => u64::from(generation),
                    _ => 0,
                });
            }
            LimitKind::Pace(pacer) => {
                let spec = pacer.spec();
                buffer.push_span(pacer.retention());
                buffer.push_nanos(spec.initial);
                buffer.push_nanos(spec.max);
                buffer.push_number(pacer.max_before_jitter());
                let (up, down) = match spec.growth {
                    PacerGrowth::Exponential { up, down } => (up, down),
                    PacerGrowth::Linear => (0, 0),
                };
                buffer.push_number(u64::from(up));
                buffer.push_number(u64::from(down));
                buffer.push_number(u64::from(spec.randomization));
                buffer.push_nanos(spec.max_randomization);
                buffer.push_number(u64::from(spec.successes));
                buffer.push_number(u64::from(spec.mode == PacerMode::Steady));
                let (failed, draw) = match op.verb {
                    Verb::Pace { failed, draw } => (failed, draw),
                    _ => (false, 0),
                };
                buffer.push_number(u64::from(failed));
                buffer.push_number(u64::from(draw));
            }
        }
    }

    /// Decodes a script's answer. `None` if it is invalid.
    ///
    /// The outcomes are core's: each state is rebuilt, a log from the few slots that give the same outcome, and
    /// [`batch::execute_part`] evaluates and changes them.
    pub(super) fn decode(&self, bytes: &[u8]) -> Option<Result<Outcomes, PeriodMismatchError>> {
        let mut decoder = ResponseDecoder(bytes);
        let now = decoder.time()?;
        if decoder.0.is_empty() && self.known_ops().any(|(_, limit)| limit.kind().has_periods()) {
            return Some(Err(PeriodMismatchError(now)));
        }
        let mut states = DecodedStates::default();
        for op in self.batch.ops() {
            let limit = self.limits.get(op.limit);
            states.plain.push(match limit {
                Some(limit) => self.decode_state(op, limit, &mut decoder, now)?,
                None => KeyState::default(),
            });
            states.answers.push(match limit {
                Some(limit) if limit.reservations().is_some() && matches!(op.verb, Verb::Take | Verb::Peek) => {
                    Some(decoder.reservation_answer()?)
                }
                _ => None,
            });
        }
        let outcomes = batch::execute_part(self.batch, self.limits, &mut states, now, self.other_parts);
        decoder.0.is_empty().then_some(Ok(outcomes))
    }

    fn decode_state(&self, op: &Op, limit: &Limit, decoder: &mut ResponseDecoder<'_>, now: Time) -> Option<KeyState> {
        let returns_state_before = matches!(
            (limit.kind(), op.verb),
            (LimitKind::Pace(_), Verb::Pace { .. }) | (LimitKind::Rate(_), Verb::TakeByTerms { .. })
        );
        if !returns_state_before && !matches!(op.verb, Verb::Take | Verb::Peek) {
            return self.state_after_update(limit, decoder.byte()? == 1, now);
        }
        let usage = match limit.kind() {
            LimitKind::Window(_) => Usage::Window(decoder.log()?),
            LimitKind::Rate(_) => {
                let (micros, rest) = (decoder.number()?, decoder.number()?);
                Usage::Rate(ArrivalTime::from_bits((micros << 10) + rest))
            }
            LimitKind::Quota(_) => {
                let period = Period { start: decoder.time()?, end: decoder.time()? };
                Usage::Quota(QuotaUsage { period, used: decoder.number()? })
            }
            LimitKind::Concurrency(_) => Usage::Concurrency(decoder.permits(self.batch.holder())?),
            LimitKind::Cooldown(_) => Usage::Cooldown(CooldownGate {
                opens_at: decoder.time()?,
                last_event_at: decoder.time()?,
                generation: decoder.uint32()?,
                closings_in_row: u8::try_from(decoder.uint32()?).ok()?,
            }),
            LimitKind::Pace(_) => Usage::Pace(PacerState {
                interval: decoder.number()?,
                successes: u32::try_from(decoder.number()?).ok()?,
                updated_at: decoder.time()?,
            }),
        };
        let record = match limit.penalty() {
            Some(_) if !returns_state_before => {
                PenaltyRecord { blocked_until: decoder.time()?, parole: decoder.number()?, strikes: decoder.byte()? }
            }
            _ => PenaltyRecord::default(),
        };
        Some(KeyState::new(usage, record))
    }

    /// A state for an update with the same effect: a permit that is released or renewed must exist.
    fn state_after_update(&self, limit: &Limit, is_applied: bool, now: Time) -> Option<KeyState> {
        let LimitKind::Concurrency(concurrency) = limit.kind() else { return Some(KeyState::default()) };
        let expires = now + concurrency.lease();
        let lease = PermitLease { holder: self.batch.holder(), count: 1, expires };
        let permits = if is_applied { vec![lease] } else { Vec::new() };
        Some(KeyState::new(Usage::Concurrency(Permits::from_leases(permits)), PenaltyRecord::default()))
    }
}

/// The bounds of three periods of a quota: the one before a time, the one around it, and the next.
fn period_bounds(quota: &Quota, now: Time) -> [Time; 4] {
    let current = quota.period(now);
    let previous_start =
        if current.start == Time::ZERO { Time::ZERO } else { quota.period(current.start - Span::from_micros(1)).start };
    let next_end = if current.end.is_never() { Time::NEVER } else { quota.period(current.end).end };
    [previous_start, current.start, current.end, next_end]
}

/// The unread rest of an answer.
struct ResponseDecoder<'a>(&'a [u8]);

impl ResponseDecoder<'_> {
    fn take_bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take_bytes().map(|[byte]| byte)
    }

    fn uint32(&mut self) -> Option<u32> {
        self.take_bytes().map(u32::from_le_bytes)
    }

    /// Reads a double that holds a whole number.
    fn number(&mut self) -> Option<u64> {
        let number = f64::from_le_bytes(self.take_bytes()?);
        (number >= 0.0 && number.fract() == 0.0).then_some(number as u64)
    }

    fn time(&mut self) -> Option<Time> {
        self.number().map(Time::from_micros)
    }

    /// Rebuilds a log with the same outcomes: the slots that become free together, and the rest at the newest time.
    fn log(&mut self) -> Option<WindowLog> {
        let (total, newest) = (self.number()?, self.time()?);
        let (free_from, free) = (self.time()?, self.number()?.min(total));
        let slots = [WindowSlot { at: free_from, count: free }, WindowSlot { at: newest, count: total - free }];
        let slots: ArrayVec<WindowSlot, 2> = slots.into_iter().filter(|slot| slot.count > 0).collect();
        WindowLog::from_slots(&slots, false)
    }

    /// Rebuilds permits with the same outcomes: the holder's, those that become free together, and the rest.
    fn permits(&mut self, holder: u64) -> Option<Permits> {
        let used = self.number()?;
        let own = PermitLease { holder, count: self.number()?, expires: self.time()? };
        let last = self.time()?;
        let (free_at, free) = (self.time()?, self.number()?);
        let others = used.checked_sub(own.count)?;
        // A holder of a permit needn't wait for others.
        let free = if own.count > 0 { 0 } else { free.min(others) };
        let next_to_expire = PermitLease { holder: holder.wrapping_add(1), count: free, expires: free_at };
        let remaining = PermitLease { holder: holder.wrapping_add(2), count: others - free, expires: last };
        let leases = [own, next_to_expire, remaining].into_iter().filter(|permit| permit.count > 0);
        Some(Permits::from_leases(leases.collect()))
    }
}
