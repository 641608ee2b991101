//! Bad clocks: what a machine shows while true time goes on evenly.

use tidegate_core::{Span, Time};

use crate::dice::Dice;

/// A clock that can be made to step, jump, drift, run ahead or stand still.
#[derive(Clone, Copy, Debug)]
pub struct BadClock {
    truth: Time,
    shown: Time,
    drift: i64,
    frozen: bool,
}

impl BadClock {
    /// A clock that is right, for now.
    pub fn new(start: Time) -> Self {
        Self { truth: start, shown: start, drift: 0, frozen: false }
    }

    /// What the clock shows.
    pub fn now(&self) -> Time {
        self.shown
    }

    /// What it should show.
    pub fn truth(&self) -> Time {
        self.truth
    }

    /// Lets true time pass.
    pub fn advance(&mut self, span: Span) {
        self.truth = self.truth + span;
        if !self.frozen {
            let micros = i128::from(span.as_micros());
            let shown = micros + micros * i128::from(self.drift) / 1_000_000;
            self.shown = self.shown + Span::from_micros(u64::try_from(shown).unwrap_or(0));
        }
    }

    /// Sets the clock back, saturating at the epoch.
    pub fn step_back(&mut self, by: Span) {
        self.shown = self.shown - by;
    }

    /// Sets the clock ahead.
    pub fn jump_ahead(&mut self, by: Span) {
        self.shown = self.shown + by;
    }

    /// Lets the clock gain this many parts in a million from now on; a negative number loses.
    pub fn drift(&mut self, parts_per_million: i64) {
        self.drift = parts_per_million;
    }

    /// Stops the clock, or lets it go on from where it stopped.
    pub fn freeze(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    /// Puts the clock right.
    pub fn correct(&mut self) {
        *self = Self::new(self.truth);
    }
}

/// What can go wrong with a clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Nothing.
    None,
    /// It is set back by up to 10 s, now and then.
    StepsBack,
    /// It jumps a year ahead and, some readings later, back.
    JumpsAYear,
    /// It is ahead by up to a minute, for good.
    Skewed,
    /// It gains or loses up to 5 %.
    Drifts,
    /// It stands still for some readings.
    Freezes,
}

impl Trouble {
    /// Every trouble there is, none included.
    pub const ALL: [Self; 6] =
        [Self::None, Self::StepsBack, Self::JumpsAYear, Self::Skewed, Self::Drifts, Self::Freezes];
}

/// A reading of a bad clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// True time.
    pub truth: Time,
    /// What the clock showed.
    pub shown: Time,
}

/// `len` readings, up to `pace` of true time apart, of a clock in this trouble.
pub fn readings(trouble: Trouble, start: Time, pace: Span, len: usize, dice: &mut Dice) -> Vec<Reading> {
    const YEAR: Span = Span::from_secs(365 * 86_400);
    let mut clock = BadClock::new(start);
    match trouble {
        Trouble::Skewed => clock.jump_ahead(Span::from_micros(dice.below(60_000_000))),
        Trouble::Drifts => clock.drift(dice.between(0, 100_000) as i64 - 50_000),
        _ => {}
    }
    let mut until_well = 0;
    (0..len)
        .map(|_| {
            clock.advance(Span::from_micros(dice.below(pace.as_micros().saturating_add(1))));
            if until_well > 0 {
                until_well -= 1;
                if until_well == 0 {
                    clock.correct();
                }
            } else if dice.percent(5) {
                match trouble {
                    Trouble::StepsBack => clock.step_back(Span::from_micros(dice.below(10_000_001))),
                    Trouble::JumpsAYear => {
                        clock.jump_ahead(YEAR);
                        until_well = dice.between(1, 10);
                    }
                    Trouble::Freezes => {
                        clock.freeze(true);
                        until_well = dice.between(1, 10);
                    }
                    Trouble::None | Trouble::Skewed | Trouble::Drifts => {}
                }
            }
            Reading { truth: clock.truth(), shown: clock.now() }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_shows_what_was_done_to_it() {
        let mut clock = BadClock::new(Time::from_secs(1000));
        clock.drift(-500_000);
        clock.advance(Span::from_secs(10));
        assert_eq!((clock.truth(), clock.now()), (Time::from_secs(1010), Time::from_secs(1005)));
        clock.step_back(Span::from_secs(3));
        clock.freeze(true);
        clock.advance(Span::from_secs(10));
        assert_eq!((clock.truth(), clock.now()), (Time::from_secs(1020), Time::from_secs(1002)));
        clock.correct();
        assert_eq!(clock.now(), clock.truth());
    }

    #[test]
    fn every_trouble_shows() {
        for trouble in Trouble::ALL {
            let mut dice = Dice::seeded(3);
            let readings = readings(trouble, Time::from_secs(1_000_000), Span::from_secs(1), 300, &mut dice);
            assert!(readings.windows(2).all(|pair| pair[0].truth <= pair[1].truth));
            let wrong = readings.iter().any(|reading| reading.truth != reading.shown);
            assert_eq!(wrong, trouble != Trouble::None, "{trouble:?}");
        }
    }
}
