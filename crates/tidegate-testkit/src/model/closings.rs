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
    /// A caller was let through that may have waited for the gate to open.
    Through(Time),
    /// The gate closed, or closed for longer.
    Closed { at: Time, until: Time },
    /// A generation began, and whether that was a step.
    Generation { number: u32, step: bool },
    /// A call of the latest generation succeeded.
    Success,
    /// Nobody waited any more for the gate to open, and the last who had done so found it good.
    Deserted,
}

impl Closings {
    /// What a caller meets: one of one is used while it is closed.
    pub(super) fn look(&self, cooldown: &Cooldown, now: Time) -> Look {
        let left = self.remembered(cooldown, now);
        // After a success everybody comes at once in the end.
        let latest = left.until().filter(|_| left.steps() == 0).map(|until| until + cooldown.stagger.times(100));
        let deciding = left.crowded().iter().rev().find_map(|event| match *event {
            Event::Closed { until, .. } => Some(until),
            Event::Through(at) => Some((at + cooldown.stagger).min(latest.unwrap_or(Time::NEVER))),
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
            let steps = self.steps();
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
            self.0.push(Event::Success);
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

    /// How many closings there were since the last success.
    fn steps(&self) -> usize {
        let since = self.0.iter().rev().take_while(|event| !matches!(event, Event::Success));
        since.filter(|event| matches!(event, Event::Generation { step: true, .. })).count()
    }

    /// What happened since nobody waited.
    fn crowded(&self) -> &[Event] {
        let deserted = self.0.iter().rposition(|event| matches!(event, Event::Deserted));
        &self.0[deserted.map_or(0, |deserted| deserted + 1)..]
    }

    /// When the last closing ends or ended, unless nobody waits any more.
    fn until(&self) -> Option<Time> {
        let ends = self.crowded().iter().filter_map(|event| match *event {
            Event::Closed { until, .. } => Some(until),
            _ => None,
        });
        ends.max()
    }

    /// What is left of it at `now`: all or nothing, and whether anybody waits.
    fn remembered(&self, cooldown: &Cooldown, now: Time) -> Self {
        let moments = self.0.iter().filter_map(|event| match *event {
            Event::Closed { at, .. } | Event::Through(at) => Some(at),
            _ => None,
        });
        let idle = moments.chain(self.until()).max().is_some_and(|last| last + cooldown.cap.max(REMEMBERED) <= now);
        if idle {
            return Self::default();
        }
        let mut left = self.clone();
        let released = left.crowded().iter().rev().find_map(|event| match *event {
            Event::Closed { .. } => Some(None),
            Event::Through(at) => Some(Some(at)),
            _ => None,
        });
        let since = |moment: Time, staggers| moment + cooldown.stagger.times(staggers) <= now;
        if let (Some(Some(last)), Some(until), 0) = (released, left.until(), left.steps())
            && (since(last, 2) || since(until, 100))
        {
            left.0.push(Event::Deserted);
        }
        left
    }
}
