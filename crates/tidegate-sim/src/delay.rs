//! The distributions of delays.

use rand::RngExt;
use rand_distr::{Exp1, StandardNormal};
use tidegate_core::Span;

use crate::random::SimRng;

/// A distribution of times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Delay {
    /// Always the same time.
    Constant(Span),
    /// An exponential distribution with this mean.
    Exponential(Span),
    /// The absolute value of a normal variable, so that no time is negative.
    Normal {
        /// The mean of the normal variable.
        mean: Span,
        /// The standard deviation of the normal variable.
        deviation: Span,
    },
    /// A log-normal distribution, which has a long tail of slow times.
    LogNormal {
        /// The median: half of all times are longer.
        median: Span,
        /// The standard deviation of the time's logarithm.
        sigma: f64,
    },
    /// Uniform between two times.
    Uniform {
        /// The shortest time.
        low: Span,
        /// The longest time.
        high: Span,
    },
    /// A Pareto distribution, whose tail is heavy: at n times the shortest time, a share of n^-shape is longer.
    Pareto {
        /// The shortest time.
        scale: Span,
        /// The exponent of the tail. The mean is infinite up to 1, and the variance up to 2, without a cap.
        shape: f64,
        /// The longest time; longer ones are cut to it.
        cap: Span,
    },
}

impl Delay {
    /// No delay.
    pub const NONE: Self = Self::Constant(Span::ZERO);

    /// Returns true if a sample can be above zero, so that a loop that waits for it makes progress.
    pub(crate) fn can_be_nonzero(&self) -> bool {
        let longest = match *self {
            Self::Constant(span) | Self::Exponential(span) | Self::LogNormal { median: span, .. } => span,
            Self::Normal { mean, deviation } => mean.max(deviation),
            Self::Uniform { high, .. } => high,
            Self::Pareto { scale, cap, .. } => scale.min(cap),
        };
        !longest.is_zero()
    }

    pub(crate) fn sample(&self, rng: &mut SimRng) -> Span {
        let micros = |span: Span| span.as_micros() as f64;
        let drawn = match *self {
            Self::Constant(span) => return span,
            Self::Exponential(mean) => micros(mean) * rng.sample::<f64, _>(Exp1),
            Self::Normal { mean, deviation } => {
                (micros(mean) + micros(deviation) * rng.sample::<f64, _>(StandardNormal)).abs()
            }
            Self::LogNormal { median, sigma } => micros(median) * (sigma * rng.sample::<f64, _>(StandardNormal)).exp(),
            Self::Uniform { low, high } => micros(low) + (micros(high) - micros(low)) * rng.random::<f64>(),
            // Of [0, 1), 1 - x is never 0.
            Self::Pareto { scale, shape, cap } => {
                (micros(scale) * (1.0 - rng.random::<f64>()).powf(-1.0 / shape)).min(micros(cap))
            }
        };
        // The cast saturates at the integer's bounds, and a span saturates at its own.
        Span::from_micros(drawn.round() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::RngStreams;

    #[test]
    fn delays_have_the_configured_mean_and_median() {
        const DRAWS: usize = 100_000;
        let mut rng = RngStreams::new(1, 0).next_rng();
        let (ten, two) = (Span::from_millis(10), Span::from_millis(2));
        let cases = [
            (Delay::Constant(ten), 10.0, 10.0),
            (Delay::Exponential(ten), 10.0, 10.0 * 2_f64.ln()),
            (Delay::Normal { mean: ten, deviation: two }, 10.0, 10.0),
            (Delay::Normal { mean: Span::ZERO, deviation: ten }, 10.0 * (2.0 / std::f64::consts::PI).sqrt(), 6.745),
            (Delay::LogNormal { median: ten, sigma: 0.5 }, 10.0 * 0.125_f64.exp(), 10.0),
            (Delay::Uniform { low: two, high: ten }, 6.0, 6.0),
            (Delay::Pareto { scale: two, shape: 3.0, cap: Span::MAX }, 3.0, 2.0 * 2_f64.cbrt()),
            // The tail beyond five times the scale has a share of 1/25; it is cut to ten.
            (Delay::Pareto { scale: two, shape: 2.0, cap: ten }, 2.0 * (2.0 - 1.0 / 5.0), 2.0 * 2_f64.sqrt()),
        ];
        for (delay, mean, median) in cases {
            let mut drawn: Vec<f64> = (0..DRAWS).map(|_| delay.sample(&mut rng).as_micros() as f64 / 1e3).collect();
            drawn.sort_by(f64::total_cmp);
            let (average, middle) = (drawn.iter().sum::<f64>() / DRAWS as f64, drawn[DRAWS / 2]);
            assert!((average / mean - 1.0).abs() < 0.02, "{delay:?}: mean {average}, not {mean}");
            assert!((middle / median - 1.0).abs() < 0.02, "{delay:?}: median {middle}, not {median}");
        }
    }
}
