//! Numbers that change with time, such as a rate or a share of failures.

use tidegate_core::Span;

/// A number over time, in segments of rising ends. It can jump between segments; within one it is constant or changes
/// linearly. Time counts from the run's start. After the last segment, its end value stays.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile(pub(crate) Vec<ProfileSegment>);

/// One segment of a profile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProfileSegment {
    /// The value at its start.
    pub start_value: f64,
    /// The value at its end.
    pub end_value: f64,
    /// The end; [`Span::MAX`] for the last segment.
    pub end: Span,
}

impl Profile {
    /// Returns a profile that is always `value`.
    pub fn constant(value: f64) -> Self {
        Self(vec![ProfileSegment { start_value: value, end_value: value, end: Span::MAX }])
    }

    /// Returns the value at a time.
    pub fn value_at(&self, time: Span) -> f64 {
        let mut start = Span::ZERO;
        for segment in &self.0 {
            if time < segment.end {
                if segment.start_value == segment.end_value || segment.end == Span::MAX {
                    return segment.start_value;
                }
                let share = (time - start).as_micros() as f64 / (segment.end - start).as_micros() as f64;
                return segment.start_value + (segment.end_value - segment.start_value) * share;
            }
            start = segment.end;
        }
        self.0.last().map_or(0.0, |segment| segment.end_value)
    }

    /// Returns the time at which the integral from `from` on reaches `amount`; `None` if it never does. For a rate,
    /// that is the time at which `amount` events have arrived.
    pub(crate) fn integral_reaches_at(&self, amount: f64, from: Span) -> Option<Span> {
        let last = self.0.last().map(|last| ProfileSegment {
            start_value: last.end_value,
            end_value: last.end_value,
            end: Span::MAX,
        });
        let (mut left, mut segment_start) = (amount, Span::ZERO);
        for segment in self.0.iter().copied().chain(last) {
            let start = segment_start.max(from);
            segment_start = segment.end;
            if start >= segment.end {
                continue;
            }
            let (first, micros) = (self.value_at(start), (segment.end - start).as_micros() as f64);
            let area = (first + segment.end_value) / 2.0 * (micros / 1e6);
            if area >= left {
                // The smaller solution of first · t + slope / 2 · t² = left, by the formula that loses no digits.
                let slope = (segment.end_value - first) / (micros / 1e6);
                let after = 2e6 * left / (first + (first * first + 2.0 * slope * left).max(0.0).sqrt());
                return Some(start + Span::from_micros(after.round() as u64));
            }
            left -= area;
        }
        None
    }

    /// Returns its largest value.
    pub fn max(&self) -> f64 {
        self.0.iter().fold(0.0, |max, segment| max.max(segment.start_value).max(segment.end_value))
    }

    /// Returns the time at which it first leaves its start value; `None` if it never does.
    pub(crate) fn first_change_at(&self) -> Option<Span> {
        let first = self.0.first()?.start_value;
        let index = self.0.iter().position(|segment| segment.start_value != first || segment.end_value != first)?;
        Some(self.0[..index].last().map_or(Span::ZERO, |segment| segment.end))
    }

    /// Returns the time at which it reaches its last value for good.
    pub(crate) fn last_change_at(&self) -> Span {
        let last = self.0.last().map_or(0.0, |segment| segment.end_value);
        let unsettled = |segment: &&ProfileSegment| segment.start_value != last || segment.end_value != last;
        self.0.iter().rev().find(unsettled).map_or(Span::ZERO, |segment| segment.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_jump_between_segments_and_interpolate_within() {
        let secs = Span::from_secs;
        let profile = Profile(vec![
            ProfileSegment { start_value: 40.0, end_value: 40.0, end: secs(10) },
            ProfileSegment { start_value: 40.0, end_value: 80.0, end: secs(20) },
            ProfileSegment { start_value: 10.0, end_value: 10.0, end: Span::MAX },
        ]);
        let at = |millis| profile.value_at(Span::from_millis(millis));
        assert_eq!(
            [at(0), at(9_999), at(10_000), at(15_000), at(20_000), at(u64::MAX)],
            [40.0, 40.0, 40.0, 60.0, 10.0, 10.0]
        );
        assert_eq!(
            (profile.max(), profile.first_change_at(), profile.last_change_at()),
            (80.0, Some(secs(10)), secs(20))
        );
        let comes_to = |amount, millis| profile.integral_reaches_at(amount, Span::from_millis(millis));
        assert_eq!(comes_to(1.0, 0), Some(Span::from_millis(25)));
        assert_eq!(comes_to(400.0, 0), Some(secs(10)));
        // 0.1 s at 79.8 a second on average, and the rest at 10.
        assert_eq!(comes_to(7.98 + 6.0, 19_900), Some(Span::from_millis(20_600)));
        assert_eq!(comes_to(600.0 + 10.0, 10_000), Some(secs(21)));
        let up = Profile(vec![ProfileSegment { start_value: 0.0, end_value: 10.0, end: secs(10) }]);
        assert_eq!(
            (up.integral_reaches_at(0.5, Span::ZERO), up.integral_reaches_at(50.0, Span::ZERO)),
            (Some(secs(1)), Some(secs(10)))
        );
        assert_eq!(up.integral_reaches_at(60.0, Span::ZERO), Some(secs(11)), "it keeps its last value");
        assert_eq!(Profile::constant(0.0).integral_reaches_at(1.0, Span::ZERO), None);
        let still = Profile::constant(3.0);
        assert_eq!((still.value_at(secs(5)), still.first_change_at(), still.last_change_at()), (3.0, None, Span::ZERO));
    }
}
