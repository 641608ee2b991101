//! The cool-down of a credential, computed from the list of all its events.

use tidegate_core::{Cooldown, Span, Time};

use super::ModelStatus;

/// The time for which a cool-down is kept after its last relevant moment, unless its cap is longer.
const RETENTION: Span = Span::from_secs(3600);

/// All events since the cool-down was last dropped, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct CooldownHistory(Vec<CooldownEvent>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CooldownEvent {
    /// A caller was admitted that may have waited for the end of a closing.
    LetThrough(Time),
    /// The cool-down closed, or closed for longer.
    Closed { at: Time, until: Time },
    /// A generation began; `step` is true if that was a back-off step.
    Generation { number: u32, step: bool },
    /// A call of the latest generation succeeded.
    Success,
    /// No caller waits for the end of a closing, and the last one that waited succeeded.
    NobodyWaits,
}

impl CooldownHistory {
    /// Returns the status for a caller: one of one is used while it is closed.
    pub(super) fn status(&self, cooldown: &Cooldown, now: Time) -> ModelStatus {
        let left = self.as_of(cooldown, now);
        // After a success, slots become shorter with the time from the closing's end, and all callers are admitted at once
        // from the release time after it.
        let proven_since = left.closed_until().filter(|_| left.backoff_steps() == 0);
        let slot_end = |at: Time| match proven_since {
            None => at + cooldown.stagger,
            Some(until) => {
                let rises = at.since(until).as_micros() / cooldown.stagger.times(20).as_micros().max(1);
                let slot = Span::from_micros(cooldown.stagger.as_micros() / (1 + rises));
                (at + slot).min(until + cooldown.max_release_time)
            }
        };
        let deciding = left.events_since_nobody_waited().iter().rev().find_map(|event| match *event {
            CooldownEvent::Closed { until, .. } => Some(until),
            CooldownEvent::LetThrough(at) => Some(slot_end(at)),
            _ => None,
        });
        let free_at = deciding.map_or(now, |free_at| free_at.max(now));
        let used = u64::from(free_at > now);
        ModelStatus { fits: used == 0, used, remaining: 1 - used, retry_at: free_at, reset_at: free_at }
    }

    pub(super) fn generation(&self, cooldown: &Cooldown, now: Time) -> u32 {
        let numbers = self.as_of(cooldown, now).0.into_iter().rev().find_map(|event| match event {
            CooldownEvent::Generation { number, .. } => Some(number),
            _ => None,
        });
        numbers.unwrap_or(0)
    }

    pub(super) fn record_let_through(&mut self, cooldown: &Cooldown, now: Time) {
        *self = self.as_of(cooldown, now);
        if self.closed_until().is_some() {
            self.0.push(CooldownEvent::LetThrough(now));
        }
    }

    pub(super) fn record_throttled(&mut self, cooldown: &Cooldown, generation: u32, requested_wait: Span, now: Time) {
        *self = self.as_of(cooldown, now);
        let mut wait = requested_wait;
        if generation >= self.generation(cooldown, now) {
            let steps = self.backoff_steps();
            let cap = u128::from(cooldown.cap.as_micros());
            let doubled = (0..steps).fold(u128::from(cooldown.base.as_micros()), |length, _| cap.min(length * 2));
            if steps > 0 || wait == Span::ZERO {
                wait = wait.max(Span::from_micros(doubled.min(cap) as u64));
            }
            self.0.push(CooldownEvent::Generation { number: generation.saturating_add(1), step: true });
        }
        self.extend_closing(now + wait, now);
    }

    pub(super) fn record_closing(&mut self, cooldown: &Cooldown, wait: Span, now: Time) {
        *self = self.as_of(cooldown, now);
        self.extend_closing(now + wait, now);
    }

    pub(super) fn record_success(&mut self, cooldown: &Cooldown, generation: u32, now: Time) {
        *self = self.as_of(cooldown, now);
        if generation == self.generation(cooldown, now) {
            self.0.push(CooldownEvent::Success);
        }
    }

    pub(super) fn record_disabled(&mut self, cooldown: &Cooldown, until: Time, now: Time) {
        *self = self.as_of(cooldown, now);
        let number = self.generation(cooldown, now).saturating_add(1);
        self.0.push(CooldownEvent::Generation { number, step: false });
        self.extend_closing(until, now);
    }

    /// Extends a closing, which is never shortened.
    fn extend_closing(&mut self, until: Time, now: Time) {
        if until > now && self.closed_until().is_none_or(|before| until > before) {
            self.0.push(CooldownEvent::Closed { at: now, until });
        }
    }

    /// Returns the number of back-off steps since the last success.
    fn backoff_steps(&self) -> usize {
        let since = self.0.iter().rev().take_while(|event| !matches!(event, CooldownEvent::Success));
        since.filter(|event| matches!(event, CooldownEvent::Generation { step: true, .. })).count()
    }

    /// Returns the events since no caller waited.
    fn events_since_nobody_waited(&self) -> &[CooldownEvent] {
        let deserted = self.0.iter().rposition(|event| matches!(event, CooldownEvent::NobodyWaits));
        &self.0[deserted.map_or(0, |deserted| deserted + 1)..]
    }

    /// Returns the end of the latest closing; `None` if no caller waits.
    fn closed_until(&self) -> Option<Time> {
        let ends = self.events_since_nobody_waited().iter().filter_map(|event| match *event {
            CooldownEvent::Closed { until, .. } => Some(until),
            _ => None,
        });
        ends.max()
    }

    /// Returns its state at `now`: empty if it is idle, else with a note if no caller waits.
    fn as_of(&self, cooldown: &Cooldown, now: Time) -> Self {
        let moments = self.0.iter().filter_map(|event| match *event {
            CooldownEvent::Closed { at, .. } | CooldownEvent::LetThrough(at) => Some(at),
            _ => None,
        });
        let idle =
            moments.chain(self.closed_until()).max().is_some_and(|last| last + cooldown.cap.max(RETENTION) <= now);
        if idle {
            return Self::default();
        }
        let mut left = self.clone();
        let released = left.events_since_nobody_waited().iter().rev().find_map(|event| match *event {
            CooldownEvent::Closed { .. } => Some(None),
            CooldownEvent::LetThrough(at) => Some(Some(at)),
            _ => None,
        });
        if let (Some(Some(last)), Some(until), 0) = (released, left.closed_until(), left.backoff_steps())
            && (last + cooldown.stagger.times(2) <= now || until + cooldown.max_release_time <= now)
        {
            left.0.push(CooldownEvent::NobodyWaits);
        }
        left
    }
}
