//! A number that changes with time: a rate, a share that fails.

use tidegate_core::Span;

/// A number over time, in pieces between which it jumps and in which it keeps or changes evenly. Time counts from the
/// run's start; the last piece goes on for ever.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile(Vec<Piece>);

/// A stretch of a profile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Piece {
    /// Its value at its start.
    pub from: f64,
    /// Its value at its end.
    pub to: f64,
    /// Its end; [`Span::MAX`] for the last.
    pub until: Span,
}

impl Profile {
    /// Always the same.
    pub fn always(value: f64) -> Self {
        Self(vec![Piece { from: value, to: value, until: Span::MAX }])
    }

    /// These pieces, each of which ends after the one before. What is after the last has its last value.
    pub(crate) fn of(pieces: Vec<Piece>) -> Self {
        Self(pieces)
    }

    /// The value at a time.
    pub fn at(&self, time: Span) -> f64 {
        let mut begins = Span::ZERO;
        for piece in &self.0 {
            if time < piece.until {
                if piece.from == piece.to || piece.until == Span::MAX {
                    return piece.from;
                }
                let share = (time - begins).as_micros() as f64 / (piece.until - begins).as_micros() as f64;
                return piece.from + (piece.to - piece.from) * share;
            }
            begins = piece.until;
        }
        self.0.last().map_or(0.0, |piece| piece.to)
    }

    /// When the area under it from a time on comes to so much: with a rate, when so many have come. `None` if never.
    pub(crate) fn comes_to(&self, amount: f64, from: Span) -> Option<Span> {
        let last = self.0.last().map(|last| Piece { from: last.to, to: last.to, until: Span::MAX });
        let (mut left, mut begins) = (amount, Span::ZERO);
        for piece in self.0.iter().copied().chain(last) {
            let start = begins.max(from);
            begins = piece.until;
            if start >= piece.until {
                continue;
            }
            let (first, micros) = (self.at(start), (piece.until - start).as_micros() as f64);
            let area = (first + piece.to) / 2.0 * (micros / 1e6);
            if area >= left {
                // Of first · t + slope / 2 · t² = left the nearer solution, by the formula that loses no digits.
                let slope = (piece.to - first) / (micros / 1e6);
                let after = 2e6 * left / (first + (first * first + 2.0 * slope * left).max(0.0).sqrt());
                return Some(start + Span::from_micros(after.round() as u64));
            }
            left -= area;
        }
        None
    }

    /// Its largest value.
    pub fn max(&self) -> f64 {
        self.0.iter().fold(0.0, |most, piece| most.max(piece.from).max(piece.to))
    }

    /// When it first leaves the value that it has at the start; `None` if it never does.
    pub(crate) fn leaves_at(&self) -> Option<Span> {
        let first = self.0.first()?.from;
        let mut begins = Span::ZERO;
        for piece in &self.0 {
            if piece.from != first || piece.to != first {
                return Some(begins);
            }
            begins = piece.until;
        }
        None
    }

    /// When it last comes to its last value.
    pub(crate) fn settles_at(&self) -> Span {
        let last = self.0.last().map_or(0.0, |piece| piece.to);
        let unsettled = |piece: &&Piece| piece.from != last || piece.to != last;
        self.0.iter().rev().find(unsettled).map_or(Span::ZERO, |piece| piece.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_jump_between_pieces_and_glide_within() {
        let secs = Span::from_secs;
        let profile = Profile::of(vec![
            Piece { from: 40.0, to: 40.0, until: secs(10) },
            Piece { from: 40.0, to: 80.0, until: secs(20) },
            Piece { from: 10.0, to: 10.0, until: Span::MAX },
        ]);
        let at = |millis| profile.at(Span::from_millis(millis));
        assert_eq!(
            [at(0), at(9_999), at(10_000), at(15_000), at(20_000), at(u64::MAX)],
            [40.0, 40.0, 40.0, 60.0, 10.0, 10.0]
        );
        assert_eq!((profile.max(), profile.leaves_at(), profile.settles_at()), (80.0, Some(secs(10)), secs(20)));
        let comes_to = |amount, millis| profile.comes_to(amount, Span::from_millis(millis));
        assert_eq!(comes_to(1.0, 0), Some(Span::from_millis(25)));
        assert_eq!(comes_to(400.0, 0), Some(secs(10)));
        // 0.1 s at 79.8 a second on the mean, and the rest at 10.
        assert_eq!(comes_to(7.98 + 6.0, 19_900), Some(Span::from_millis(20_600)));
        assert_eq!(comes_to(600.0 + 10.0, 10_000), Some(secs(21)));
        let up = Profile::of(vec![Piece { from: 0.0, to: 10.0, until: secs(10) }]);
        assert_eq!((up.comes_to(0.5, Span::ZERO), up.comes_to(50.0, Span::ZERO)), (Some(secs(1)), Some(secs(10))));
        assert_eq!(up.comes_to(60.0, Span::ZERO), Some(secs(11)), "it keeps its last value");
        assert_eq!(Profile::always(0.0).comes_to(1.0, Span::ZERO), None);
        let still = Profile::always(3.0);
        assert_eq!((still.at(secs(5)), still.leaves_at(), still.settles_at()), (3.0, None, Span::ZERO));
    }
}
