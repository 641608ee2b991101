//! Faulty clocks: the readings of a machine while true time passes evenly.

use tidegate_core::{Span, Time};

use crate::random::RandomSource;

/// A clock that can be made to step back, jump forward, drift or stand still.
#[derive(Clone, Copy, Debug)]
pub struct FaultyClock {
    true_time: Time,
    shown_time: Time,
    drift: i64,
    frozen: bool,
}

impl FaultyClock {
    /// Creates a clock that shows the true time.
    pub fn new(start: Time) -> Self {
        Self { true_time: start, shown_time: start, drift: 0, frozen: false }
    }

    /// Returns the time that the clock shows.
    pub fn now(&self) -> Time {
        self.shown_time
    }

    /// Returns the true time.
    pub fn true_time(&self) -> Time {
        self.true_time
    }

    /// Lets true time pass.
    pub fn advance(&mut self, span: Span) {
        self.true_time = self.true_time + span;
        if !self.frozen {
            let micros = i128::from(span.as_micros());
            let shown = micros + micros * i128::from(self.drift) / 1_000_000;
            self.shown_time = self.shown_time + Span::from_micros(u64::try_from(shown).unwrap_or(0));
        }
    }

    /// Sets the clock back, saturating at the epoch.
    pub fn step_back(&mut self, by: Span) {
        self.shown_time = self.shown_time - by;
    }

    /// Sets the clock forward.
    pub fn jump_ahead(&mut self, by: Span) {
        self.shown_time = self.shown_time + by;
    }

    /// Makes the clock gain this many parts per million from now on; a negative number loses.
    pub fn drift(&mut self, parts_per_million: i64) {
        self.drift = parts_per_million;
    }

    /// Stops the clock, or lets it continue from the time at which it stopped.
    pub fn freeze(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    /// Sets the clock to the true time and removes its faults.
    pub fn reset(&mut self) {
        *self = Self::new(self.true_time);
    }
}

/// A fault of a clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockFault {
    /// No fault.
    None,
    /// It is set back by up to 10 s, now and then.
    StepsBack,
    /// It jumps a year forward and, some readings later, back.
    JumpsAYear,
    /// It is always ahead, by up to a minute.
    Skewed,
    /// It gains or loses up to 5 %.
    Drifts,
    /// It stands still for some readings.
    Freezes,
}

impl ClockFault {
    /// All faults, [`ClockFault::None`] included.
    pub const ALL: [Self; 6] =
        [Self::None, Self::StepsBack, Self::JumpsAYear, Self::Skewed, Self::Drifts, Self::Freezes];
}

/// A reading of a faulty clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReading {
    /// The true time.
    pub true_time: Time,
    /// The time that the clock showed.
    pub shown_time: Time,
}

/// Returns `len` readings of a clock with this fault, up to `max_gap` of true time apart.
pub fn readings(
    fault: ClockFault,
    start: Time,
    max_gap: Span,
    len: usize,
    random: &mut RandomSource,
) -> Vec<ClockReading> {
    const YEAR: Span = Span::from_secs(365 * 86_400);
    let mut clock = FaultyClock::new(start);
    match fault {
        ClockFault::Skewed => clock.jump_ahead(Span::from_micros(random.below(60_000_000))),
        ClockFault::Drifts => clock.drift(random.between(0, 100_000) as i64 - 50_000),
        _ => {}
    }
    let mut readings_until_reset = 0;
    (0..len)
        .map(|_| {
            clock.advance(Span::from_micros(random.below(max_gap.as_micros().saturating_add(1))));
            if readings_until_reset > 0 {
                readings_until_reset -= 1;
                if readings_until_reset == 0 {
                    clock.reset();
                }
            } else if random.chance(5) {
                match fault {
                    ClockFault::StepsBack => clock.step_back(Span::from_micros(random.below(10_000_001))),
                    ClockFault::JumpsAYear => {
                        clock.jump_ahead(YEAR);
                        readings_until_reset = random.between(1, 10);
                    }
                    ClockFault::Freezes => {
                        clock.freeze(true);
                        readings_until_reset = random.between(1, 10);
                    }
                    ClockFault::None | ClockFault::Skewed | ClockFault::Drifts => {}
                }
            }
            ClockReading { true_time: clock.true_time(), shown_time: clock.now() }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faulty_clock_shows_its_faults() {
        let mut clock = FaultyClock::new(Time::from_secs(1000));
        clock.drift(-500_000);
        clock.advance(Span::from_secs(10));
        assert_eq!((clock.true_time(), clock.now()), (Time::from_secs(1010), Time::from_secs(1005)));
        clock.step_back(Span::from_secs(3));
        clock.freeze(true);
        clock.advance(Span::from_secs(10));
        assert_eq!((clock.true_time(), clock.now()), (Time::from_secs(1020), Time::from_secs(1002)));
        clock.reset();
        assert_eq!(clock.now(), clock.true_time());
    }

    #[test]
    fn every_clock_fault_changes_the_readings() {
        for fault in ClockFault::ALL {
            let mut random = RandomSource::from_seed(3);
            let readings = readings(fault, Time::from_secs(1_000_000), Span::from_secs(1), 300, &mut random);
            assert!(readings.windows(2).all(|pair| pair[0].true_time <= pair[1].true_time));
            let wrong = readings.iter().any(|reading| reading.true_time != reading.shown_time);
            assert_eq!(wrong, fault != ClockFault::None, "{fault:?}");
        }
    }
}
