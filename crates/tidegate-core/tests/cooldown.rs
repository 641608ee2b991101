//! The throttle gate: agreement with a simple model, and faulty clocks.

use tidegate_core::cooldown::{Cooldown, CooldownGate};
use tidegate_core::{Span, Time};
use tidegate_testkit::clock::{ClockFault, readings};
use tidegate_testkit::fixtures::test_time;
use tidegate_testkit::property;
use tidegate_testkit::random::{RandomSource, case_count};

fn any_cooldown(random: &mut RandomSource) -> Cooldown {
    Cooldown {
        base: Span::from_millis(random.pick(&[1, 300, 1_000])),
        cap: Span::from_millis(random.pick(&[1_000, 8_000, 20_000])),
        stagger: Span::from_millis(random.pick(&[0, 10, 200])),
        max_release_time: Span::from_millis(random.pick(&[0, 1_000, 20_000])),
    }
}

fn any_wish(random: &mut RandomSource) -> Option<Span> {
    random.chance(30).then(|| Span::from_micros(random.below(10_000_000)))
}

/// The complete history of a gate, searched again for every answer.
#[derive(Debug, Default)]
struct Naive {
    events: Vec<Event>,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A call was admitted.
    Through(Time),
    /// The end of a closing that was a step.
    Step(Time),
    /// The end of a closing that wasn't a step.
    Longer(Time),
    /// A success of a call of the latest generation.
    Success,
    /// The calls that waited for the gate have ended.
    Deserted,
}

impl Naive {
    fn until(&self) -> Time {
        let ends = self.events.iter().filter_map(|event| match event {
            Event::Step(end) | Event::Longer(end) => Some(*end),
            Event::Through(_) | Event::Success | Event::Deserted => None,
        });
        ends.max().unwrap_or(Time::ZERO)
    }

    fn steps(&self) -> u32 {
        let since = self.events.iter().rev().take_while(|event| !matches!(event, Event::Success));
        since.filter(|event| matches!(event, Event::Step(_))).count() as u32
    }

    /// Returns true if the call that was admitted by this event is of the latest generation.
    fn is_current(&self, through: usize) -> bool {
        !self.events[through..].iter().any(|event| matches!(event, Event::Step(_)))
    }

    /// The time of the last call admitted among those that waited for the end of the last closing.
    fn released(&self) -> Option<Time> {
        let waited = self.events.iter().rev().take_while(|event| !matches!(event, Event::Deserted));
        let (mut closed, mut last) = (false, None);
        for event in waited {
            match *event {
                Event::Through(at) if !closed => last = last.or(Some(at)),
                Event::Step(_) | Event::Longer(_) => closed = true,
                Event::Through(_) | Event::Success | Event::Deserted => {}
            }
        }
        last.filter(|_| closed)
    }

    /// Checks if the calls that waited for the gate have ended.
    fn look_around(&mut self, cooldown: &Cooldown, now: Time) {
        let Cooldown { stagger, max_release_time, .. } = *cooldown;
        let gone = |last: Time| last + stagger.times(2) <= now || self.until() + max_release_time <= now;
        if self.steps() == 0 && self.released().is_some_and(gone) {
            self.events.push(Event::Deserted);
        }
    }

    fn free_at(&self, cooldown: &Cooldown, now: Time) -> Time {
        let Cooldown { stagger, max_release_time, .. } = *cooldown;
        let until = self.until();
        if until > now {
            return until;
        }
        let Some(last) = self.released() else { return now };
        if self.steps() > 0 {
            return now.max(last + stagger);
        }
        // One more in a stagger after each twenty staggers.
        let slots = (1..=100).filter(|rise| until + stagger.times(20 * rise) <= last).count() as u64 + 1;
        let slot = Span::from_micros(stagger.as_micros() / slots);
        now.max((until + max_release_time).min(last + slot))
    }
}

#[test]
fn random_histories_agree_with_the_model() {
    property::check(case_count(2_000, 40_000), 400, |mut random| {
        let cooldown = any_cooldown(&mut random);
        let (mut gate, mut naive, mut now) = (CooldownGate::default(), Naive::default(), test_time(0));
        // Calls in flight: their generation, and the event that admitted them.
        let mut calls: Vec<(u32, usize)> = Vec::new();
        while !random.is_exhausted() {
            naive.look_around(&cooldown, now);
            let free_at = naive.free_at(&cooldown, now);
            if cooldown.free_at(gate, now) != free_at {
                return Err(format!("{:?}, expected {free_at:?} at {now:?} of {gate:?}", cooldown.free_at(gate, now)));
            }
            match random.below(8) {
                0..=2 if free_at == now => {
                    calls.push((cooldown.charge(&mut gate, now), naive.events.len()));
                    naive.events.push(Event::Through(now));
                }
                3..=4 if !calls.is_empty() => {
                    let (generation, through) = calls.swap_remove(random.below(calls.len() as u64) as usize);
                    let wish = any_wish(&mut random);
                    cooldown.record_throttle(&mut gate, generation, wish, now);
                    let asked = wish.unwrap_or(Span::ZERO);
                    if naive.is_current(through) {
                        let doubled = cooldown.base.times(1 << naive.steps().min(30)).min(cooldown.cap);
                        let is_as_asked = naive.steps() == 0 && !asked.is_zero();
                        naive.events.push(Event::Step(now + if is_as_asked { asked } else { doubled.max(asked) }));
                    } else if now + asked > naive.until().max(now) {
                        naive.events.push(Event::Longer(now + asked));
                    }
                }
                5 if !calls.is_empty() => {
                    let (generation, through) = calls.swap_remove(random.below(calls.len() as u64) as usize);
                    cooldown.record_success(&mut gate, generation, now);
                    if naive.is_current(through) {
                        naive.events.push(Event::Success);
                    }
                }
                6 => now = free_at,
                _ => now = now + Span::from_micros(random.below(2_000_000)),
            }
        }
        Ok(())
    });
}

/// Whatever the clock does, the announced wait is never longer than the longest closing. With a clock that only loses
/// time, no call is admitted before the true length of the closing has passed.
#[test]
fn faulty_clocks_neither_block_nor_open_early() {
    const OVERTAKEN: Span = Span::from_millis(100);
    property::check(case_count(2_000, 40_000), 8, |mut random| {
        let cooldown = any_cooldown(&mut random);
        let trouble = random.pick(&ClockFault::ALL);
        let loses_time = matches!(trouble, ClockFault::None | ClockFault::StepsBack);
        let mut random = RandomSource::from_seed(random.next_u64());
        let mut gate = CooldownGate::default();
        let (mut opens, mut longest) = (test_time(0), cooldown.stagger);
        for reading in readings(trouble, test_time(0), Span::from_secs(2), 300, &mut random) {
            let now = reading.shown_time;
            let free_at = cooldown.free_at(gate, now);
            if free_at.since(now) > longest + OVERTAKEN {
                return Err(format!("told to wait {} in {trouble:?}: {gate:?}", free_at.since(now)));
            }
            if free_at > now {
                continue;
            }
            if loses_time && reading.true_time < opens {
                return Err(format!("{} early in {trouble:?}: {gate:?}", opens.since(reading.true_time)));
            }
            let generation = cooldown.charge(&mut gate, now);
            if random.chance(60) {
                let wish = any_wish(&mut random);
                cooldown.record_throttle(&mut gate, generation, wish, now);
                let asked = wish.unwrap_or(Span::ZERO);
                let is_as_asked = gate.closings_in_row == 1 && !asked.is_zero();
                let length = cooldown.closing_length(gate.closings_in_row);
                let length = if is_as_asked { asked } else { length.max(asked) };
                (opens, longest) = (reading.true_time + length, longest.max(length));
            } else {
                cooldown.record_success(&mut gate, generation, now);
            }
        }
        Ok(())
    });
}
