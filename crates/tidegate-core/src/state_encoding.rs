//! The encoding of a state as bytes, for stores that keep it outside memory.
//!
//! The first byte contains the version and the kind. Numbers follow with seven bits per byte, the lowest first
//! (LEB128). Each time of a window's log is stored as the distance from the previous one, all other times in
//! microseconds. The penalty's record comes last, if it isn't empty. Reservations come before the usage of their limit.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::concurrency::{PermitLease, Permits};
use crate::cooldown::CooldownGate;
use crate::pacer::PacerState;
use crate::penalty::PenaltyRecord;
use crate::quota::{Period, QuotaUsage};
use crate::rate::ArrivalTime;
use crate::reservation::{Forfeit, MAX_RECORDS, Reservation, ReservationQueue, ReservedUsage};
use crate::state::{KeyState, Usage};
use crate::window::{WindowLog, WindowSlot};
use crate::{Span, Time};

/// The upper half of the first byte.
const VERSION: u8 = 1 << 4;
const NONE: u8 = 0;
const WINDOW: u8 = 1;
const COARSE_WINDOW: u8 = 2;
const RATE: u8 = 3;
const QUOTA: u8 = 4;
const CONCURRENCY: u8 = 5;
const COOLDOWN: u8 = 6;
const PACE: u8 = 7;
/// A state with forfeits that have no cost. It is only read.
const RESERVED_WITHOUT_COSTS: u8 = 8;
const RESERVED: u8 = 9;

/// A bound above the number of entries of any state.
const MAX_ENTRIES: u64 = 1 << 17;

impl KeyState {
    /// Appends the state as bytes for [`KeyState::decode`]: about 10 for a rate, 4 for each call in a window.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        write_usage(bytes, self.usage());
        let record = self.penalty_record();
        if *record != PenaltyRecord::default() {
            write_time(bytes, record.blocked_until);
            write_number(bytes, record.parole);
            bytes.push(record.strikes);
        }
    }

    /// Reads the result of [`KeyState::encode`]. `None` for other bytes, including those of another version.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (&first, rest) = bytes.split_first()?;
        let mut input = StateDecoder(rest);
        let usage = match first.checked_sub(VERSION)? {
            form @ (RESERVED_WITHOUT_COSTS | RESERVED) => {
                let queue = input.queue(form == RESERVED)?;
                let kind = input.byte()?.checked_sub(VERSION)?;
                Usage::Reserved(Box::new(ReservedUsage { usage: input.usage(kind)?, queue }))
            }
            kind => input.usage(kind)?,
        };
        let record = match input.0 {
            [] => PenaltyRecord::default(),
            _ => PenaltyRecord { blocked_until: input.time()?, parole: input.number()?, strikes: input.byte()? },
        };
        input.0.is_empty().then(|| Self::new(usage, record))
    }
}

/// Appends a usage: its version and kind, then its numbers.
fn write_usage(bytes: &mut Vec<u8>, usage: &Usage) {
    match usage {
        Usage::None => bytes.push(VERSION | NONE),
        Usage::Window(log) => {
            bytes.push(VERSION | if log.is_merged() { COARSE_WINDOW } else { WINDOW });
            write_number(bytes, log.len() as u64);
            let mut before = Time::ZERO;
            for slot in log.iter() {
                write_number(bytes, slot.at.since(before).as_micros());
                write_number(bytes, slot.count);
                before = slot.at;
            }
        }
        Usage::Reserved(reserved) => {
            let ReservationQueue { reservations, forfeits, last_at, charged_until, .. } = &reserved.queue;
            bytes.push(VERSION | RESERVED);
            write_time(bytes, *last_at);
            write_time(bytes, *charged_until);
            write_number(bytes, reservations.len() as u64);
            let mut before = Time::ZERO;
            for Reservation { at, ends_at, caller, cost, is_excused } in reservations {
                write_number(bytes, at.since(before).as_micros());
                write_number(bytes, ends_at.since(*at).as_micros());
                write_number(bytes, *caller);
                write_number(bytes, *cost);
                bytes.push(u8::from(*is_excused));
                before = *at;
            }
            write_number(bytes, forfeits.len() as u64);
            for Forfeit { ended_at, caller, cost, was_late } in forfeits {
                write_time(bytes, *ended_at);
                write_number(bytes, *caller);
                write_number(bytes, *cost);
                bytes.push(u8::from(*was_late));
            }
            write_time(bytes, reserved.queue.opens_to_forfeiters_at);
            write_number(bytes, reserved.queue.passed as u64);
            write_number(bytes, reserved.queue.passed_until.to_bits());
            write_usage(bytes, &reserved.usage);
        }
        Usage::Rate(arrival) => {
            bytes.push(VERSION | RATE);
            write_number(bytes, arrival.to_bits());
        }
        Usage::Quota(usage) => {
            bytes.push(VERSION | QUOTA);
            write_time(bytes, usage.period.start);
            write_time(bytes, usage.period.end);
            write_number(bytes, usage.used);
        }
        Usage::Concurrency(permits) => {
            bytes.push(VERSION | CONCURRENCY);
            write_number(bytes, permits.iter().len() as u64);
            for permit in permits.iter() {
                write_number(bytes, permit.holder);
                write_number(bytes, permit.count);
                write_time(bytes, permit.expires);
            }
        }
        Usage::Cooldown(gate) => {
            bytes.push(VERSION | COOLDOWN);
            write_time(bytes, gate.opens_at);
            write_time(bytes, gate.last_event_at);
            write_number(bytes, u64::from(gate.generation));
            bytes.push(gate.closings_in_row);
        }
        Usage::Pace(state) => {
            bytes.push(VERSION | PACE);
            write_number(bytes, state.interval);
            write_number(bytes, u64::from(state.successes));
            write_time(bytes, state.updated_at);
        }
    }
}

fn write_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn write_time(bytes: &mut Vec<u8>, time: Time) {
    write_number(bytes, time.as_micros());
}

struct StateDecoder<'a>(&'a [u8]);

impl StateDecoder<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(byte)
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return None;
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    fn time(&mut self) -> Option<Time> {
        self.number().map(Time::from_micros)
    }

    /// Reads a number of entries. Each of them takes at least two bytes.
    fn count(&mut self) -> Option<usize> {
        let count = self.number().filter(|count| *count <= MAX_ENTRIES)?;
        usize::try_from(count).ok().filter(|count| *count <= self.0.len() / 2)
    }

    fn log(&mut self, coarse: bool) -> Option<WindowLog> {
        let mut before = Time::ZERO;
        let count = self.count()?;
        let mut slots = Vec::with_capacity(count);
        for _ in 0..count {
            before = before + Span::from_micros(self.number()?);
            slots.push(WindowSlot { at: before, count: self.number()? });
        }
        WindowLog::from_slots(&slots, coarse)
    }

    /// Reads the usage of a kind, without reservations.
    fn usage(&mut self, kind: u8) -> Option<Usage> {
        Some(match kind {
            NONE => Usage::None,
            WINDOW | COARSE_WINDOW => Usage::Window(self.log(kind == COARSE_WINDOW)?),
            RATE => Usage::Rate(ArrivalTime::from_bits(self.number()?)),
            QUOTA => {
                let period = Period { start: self.time()?, end: self.time()? };
                Usage::Quota(QuotaUsage { period, used: self.number()? })
            }
            CONCURRENCY => Usage::Concurrency(self.permits()?),
            COOLDOWN => Usage::Cooldown(CooldownGate {
                opens_at: self.time()?,
                last_event_at: self.time()?,
                generation: u32::try_from(self.number()?).ok()?,
                closings_in_row: self.byte()?,
            }),
            PACE => Usage::Pace(PacerState {
                interval: self.number()?,
                successes: u32::try_from(self.number()?).ok()?,
                updated_at: self.time()?,
            }),
            _ => return None,
        })
    }

    fn flag(&mut self) -> Option<bool> {
        self.byte().filter(|byte| *byte <= 1).map(|byte| byte == 1)
    }

    fn queue(&mut self, has_costs: bool) -> Option<ReservationQueue> {
        let mut queue = ReservationQueue { last_at: self.time()?, charged_until: self.time()?, ..Default::default() };
        let mut before = Time::ZERO;
        for _ in 0..self.count().filter(|count| *count <= MAX_RECORDS)? {
            let at = before + Span::from_micros(self.number()?);
            let ends_at = at + Span::from_micros(self.number()?);
            let (caller, cost) = (self.number()?, self.number()?);
            let is_excused = self.flag()?;
            queue.reservations.push(Reservation { at, ends_at, caller, cost, is_excused });
            before = at;
        }
        for _ in 0..self.count().filter(|count| *count <= MAX_RECORDS)? {
            let (ended_at, caller) = (self.time()?, self.number()?);
            let (cost, was_late) = if has_costs { (self.number()?, self.flag()?) } else { (0, false) };
            queue.forfeits.push(Forfeit { ended_at, caller, cost, was_late });
        }
        if has_costs {
            queue.opens_to_forfeiters_at = self.time()?;
            queue.passed = usize::try_from(self.number()?).ok().filter(|count| *count <= queue.reservations.len())?;
            queue.passed_until = ArrivalTime::from_bits(self.number()?);
        }
        Some(queue)
    }

    fn permits(&mut self) -> Option<Permits> {
        let count = self.count()?;
        let mut permits = Vec::with_capacity(count);
        for _ in 0..count {
            permits.push(PermitLease { holder: self.number()?, count: self.number()?, expires: self.time()? });
        }
        Some(Permits::from_leases(permits))
    }
}
