//! Numbers that change with time, such as a rate or a share of failures.

use tidegate_core::Span;

/// A number over time, in segments. It can jump between segments. Within a segment it is constant or changes linearly.
/// Time counts from the run's start; the last segment has no end.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile(Vec<ProfileSegment>);

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

    /// Returns a profile of these segments, each of which ends after the one before. After the last, its end value
    /// stays.
    pub(crate) fn from_segments(pieces: Vec<ProfileSegment>) -> Self {
        Self(pieces)
    }

    /// Returns the value at a time.
    pub fn value_at(&self, time: Span) -> f64 {
        let mut begins = Span::ZERO;
        for piece in &self.0 {
            if time < piece.end {
                if piece.start_value == piece.end_value || piece.end == Span::MAX {
                    return piece.start_value;
                }
                let share = (time - begins).as_micros() as f64 / (piece.end - begins).as_micros() as f64;
                return piece.start_value + (piece.end_value - piece.start_value) * share;
            }
            begins = piece.end;
        }
        self.0.last().map_or(0.0, |piece| piece.end_value)
    }

    /// Returns the time at which the integral from `from` on reaches `amount`; `None` if it never does. For a rate,
    /// that is the time at which `amount` events have arrived.
    pub(crate) fn integral_reaches_at(&self, amount: f64, from: Span) -> Option<Span> {
        let last = self.0.last().map(|last| ProfileSegment {
            start_value: last.end_value,
            end_value: last.end_value,
            end: Span::MAX,
        });
        let (mut left, mut begins) = (amount, Span::ZERO);
        for piece in self.0.iter().copied().chain(last) {
            let start = begins.max(from);
            begins = piece.end;
            if start >= piece.end {
                continue;
            }
            let (first, micros) = (self.value_at(start), (piece.end - start).as_micros() as f64);
            let area = (first + piece.end_value) / 2.0 * (micros / 1e6);
            if area >= left {
                // The smaller solution of first · t + slope / 2 · t² = left, by the formula that loses no digits.
                let slope = (piece.end_value - first) / (micros / 1e6);
                let after = 2e6 * left / (first + (first * first + 2.0 * slope * left).max(0.0).sqrt());
                return Some(start + Span::from_micros(after.round() as u64));
            }
            left -= area;
        }
        None
    }

    /// Returns its largest value.
    pub fn max(&self) -> f64 {
        self.0.iter().fold(0.0, |most, piece| most.max(piece.start_value).max(piece.end_value))
    }

    /// Returns the time at which it first leaves its start value; `None` if it never does.
    pub(crate) fn first_change_at(&self) -> Option<Span> {
        let first = self.0.first()?.start_value;
        let mut begins = Span::ZERO;
        for piece in &self.0 {
            if piece.start_value != first || piece.end_value != first {
                return Some(begins);
            }
            begins = piece.end;
        }
        None
    }

    /// Returns the time at which it reaches its last value for good.
    pub(crate) fn last_change_at(&self) -> Span {
        let last = self.0.last().map_or(0.0, |piece| piece.end_value);
        let unsettled = |piece: &&ProfileSegment| piece.start_value != last || piece.end_value != last;
        self.0.iter().rev().find(unsettled).map_or(Span::ZERO, |piece| piece.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_jump_between_segments_and_interpolate_within() {
        let secs = Span::from_secs;
        let profile = Profile::from_segments(vec![
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
        let up = Profile::from_segments(vec![ProfileSegment { start_value: 0.0, end_value: 10.0, end: secs(10) }]);
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
