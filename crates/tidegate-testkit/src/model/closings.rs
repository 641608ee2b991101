//! When a credential's gate is closed, from the list of all that ever happened to it.

use tidegate_core::{Cooldown, Span, Time};

use super::Look;

/// For how long a gate is remembered after the last moment that counts, unless its cap is longer.
const REMEMBERED: Span = Span::from_secs(3600);

/// All that happened since the gate was forgotten last, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Closings(Vec<Event>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// A caller was let through an opened gate that hasn't been proved good since.
    Through(Time),
    /// The gate closed, or closed for longer.
    Closed { at: Time, until: Time },
    /// A generation began, and whether that was a step.
    Generation { number: u32, step: bool },
    /// A call of the latest generation succeeded, and whether the gate was open then.
    Proof { open: bool },
}

impl Closings {
    /// What a caller meets: one of one is used while it is closed.
    pub(super) fn look(&self, cooldown: &Cooldown, now: Time) -> Look {
        let deciding = self.remembered(cooldown, now).unproven().iter().rev().find_map(|event| match *event {
            Event::Closed { until, .. } => Some(until),
            Event::Through(at) => Some(at + cooldown.stagger),
            _ => None,
        });
        let free_at = deciding.map_or(now, |free_at| free_at.max(now));
        let used = u64::from(free_at > now);
        Look { fits: used == 0, used, remaining: 1 - used, retry_at: free_at, reset_at: free_at }
    }

    pub(super) fn generation(&self, cooldown: &Cooldown, now: Time) -> u32 {
        let numbers = self.remembered(cooldown, now).0.into_iter().rev().find_map(|event| match event {
            Event::Generation { number, .. } => Some(number),
            _ => None,
        });
        numbers.unwrap_or(0)
    }

    pub(super) fn through(&mut self, cooldown: &Cooldown, now: Time) {
        *self = self.remembered(cooldown, now);
        if self.until().is_some() {
            self.0.push(Event::Through(now));
        }
    }

    pub(super) fn throttled(&mut self, cooldown: &Cooldown, generation: u32, asked: Span, now: Time) {
        *self = self.remembered(cooldown, now);
        let mut wait = asked;
        if generation >= self.generation(cooldown, now) {
            let since_proof = self.0.iter().rev().take_while(|event| !matches!(event, Event::Proof { .. }));
            let steps = since_proof.filter(|event| matches!(event, Event::Generation { step: true, .. })).count();
            let cap = u128::from(cooldown.cap.as_micros());
            let doubled = (0..steps).fold(u128::from(cooldown.base.as_micros()), |length, _| cap.min(length * 2));
            wait = wait.max(Span::from_micros(doubled.min(cap) as u64));
            self.0.push(Event::Generation { number: generation.saturating_add(1), step: true });
        }
        self.close(now + wait, now);
    }

    pub(super) fn succeeded(&mut self, cooldown: &Cooldown, generation: u32, now: Time) {
        *self = self.remembered(cooldown, now);
        if generation == self.generation(cooldown, now) {
            self.0.push(Event::Proof { open: self.until().is_none_or(|until| until <= now) });
        }
    }

    pub(super) fn disabled(&mut self, cooldown: &Cooldown, until: Time, now: Time) {
        *self = self.remembered(cooldown, now);
        let number = self.generation(cooldown, now).saturating_add(1);
        self.0.push(Event::Generation { number, step: false });
        self.close(until, now);
    }

    /// A closing is never shortened.
    fn close(&mut self, until: Time, now: Time) {
        if until > now && self.until().is_none_or(|before| until > before) {
            self.0.push(Event::Closed { at: now, until });
        }
    }

    /// What happened since a success showed that the gate may stay open.
    fn unproven(&self) -> &[Event] {
        let proof = self.0.iter().rposition(|event| matches!(event, Event::Proof { open: true }));
        &self.0[proof.map_or(0, |proof| proof + 1)..]
    }

    /// When the last closing ends or ended, unless the gate was proved good.
    fn until(&self) -> Option<Time> {
        let ends = self.unproven().iter().filter_map(|event| match *event {
            Event::Closed { until, .. } => Some(until),
            _ => None,
        });
        ends.max()
    }

    /// What is left of it at `now`: all or nothing.
    fn remembered(&self, cooldown: &Cooldown, now: Time) -> Self {
        let moments = self.0.iter().filter_map(|event| match *event {
            Event::Closed { at, .. } | Event::Through(at) => Some(at),
            _ => None,
        });
        let idle = moments.chain(self.until()).max().is_some_and(|last| last + cooldown.cap.max(REMEMBERED) <= now);
        if idle { Self::default() } else { self.clone() }
    }
}
