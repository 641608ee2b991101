//! The chart of the last minutes.

use std::fmt::Write as _;

use maud::{Markup, html};

use super::words;
use crate::metrics::{MAX_SAMPLES, Rates};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 180.0;
/// The free space above the highest point.
const TOP: f64 = 8.0;

/// A line of the chart: its name, its class in the style sheet, and its value in a sample.
struct Series(&'static str, &'static str, fn(&Rates) -> f64);

const SERIES: [Series; 4] = [
    Series("Admitted", "admitted", |rates| rates.admitted),
    Series("Shadow", "shadow", |rates| rates.shadow),
    Series("Errors", "errors", |rates| rates.errors),
    Series("Refused", "refused", |rates| rates.refused),
];

/// Draws rates, of which the last one is that of now.
pub(super) fn render(rates: &[Rates]) -> Markup {
    let highest = SERIES.iter().flat_map(|series| rates.iter().map(series.2)).fold(0.0, f64::max);
    let top = axis_top(highest);
    let minutes = (MAX_SAMPLES - 1) / 60;
    let latest = rates.last().copied().unwrap_or_default();
    let summary =
        SERIES.iter().map(|series| format!("{} {}", series.0.to_lowercase(), words::rate((series.2)(&latest))));
    let label =
        format!("Calls a second in the last {minutes} minutes. Now: {}", summary.collect::<Vec<_>>().join(", "));
    html! {
        figure class="chart" {
            ul class="legend" aria-hidden="true" {
                @for Series(name, class, _) in &SERIES { li class=(class) { (name) } }
            }
            div class="plot" {
                div class="axis y" aria-hidden="true" {
                    span { (top) } span { (top / 2.0) } span { "0" }
                }
                svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } preserveAspectRatio="none" role="img" aria-label=(label) {
                    @for part in 0..=2 {
                        @let y = TOP + (HEIGHT - TOP - 1.0) * f64::from(part) / 2.0;
                        line class="grid" x1="0" x2=(WIDTH) y1=(y) y2=(y) {}
                    }
                    @for Series(_, class, value) in &SERIES {
                        polyline class=(class) points=(points(rates.iter().map(value), top)) {}
                    }
                }
            }
            div class="axis x" aria-hidden="true" {
                @for left in (1..=minutes).rev() { span { (left) " min" } }
                span { "now" }
            }
        }
    }
}

/// The points of a line that ends at the right.
fn points(values: impl ExactSizeIterator<Item = f64>, top: f64) -> String {
    let missing = (MAX_SAMPLES - 1).saturating_sub(values.len());
    let mut points = String::new();
    for (index, value) in values.enumerate() {
        let x = (missing + index) as f64 / (MAX_SAMPLES - 2) as f64 * WIDTH;
        let y = TOP + (HEIGHT - TOP - 1.0) * (1.0 - value / top);
        // Writing to a string can't fail.
        let _ = write!(points, "{x:.0},{y:.1} ");
    }
    points
}

/// The first number of 1, 2, 3 or 5 with zeros that isn't below the highest value, and at least 1.
fn axis_top(highest: f64) -> f64 {
    let scale = 10_f64.powf(highest.max(1.0).log10().floor());
    [1.0, 2.0, 3.0, 5.0, 10.0].into_iter().map(|step| step * scale).find(|top| *top >= highest).unwrap_or(highest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axis_ends_at_a_round_number() {
        assert_eq!([0.0, 0.3, 1.0, 1.1, 21.0, 42.0, 501.0].map(axis_top), [1.0, 1.0, 1.0, 2.0, 30.0, 50.0, 1000.0]);
    }

    #[test]
    fn the_latest_value_is_at_the_right() {
        assert_eq!(points([0.0, 10.0].into_iter(), 10.0), "897,179.0 900,8.0 ");
    }
}
