//! Charts of the time until now.

use std::fmt::Write as _;

use maud::{Markup, html};

use super::words;
use crate::metrics::{MAX_SAMPLES, Rates};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 180.0;
/// The free space above the highest point.
const TOP: f64 = 8.0;

/// A line of a chart: its name, its class in the style sheet, and its values, of which the last is at the right.
pub(super) struct Line<'n> {
    pub(super) name: &'n str,
    pub(super) class: &'static str,
    pub(super) values: Vec<f64>,
}

/// Draws rates, of which the last one is that of now.
pub(super) fn render(rates: &[Rates]) -> Markup {
    let line = |name, class, value: fn(&Rates) -> f64| Line { name, class, values: rates.iter().map(value).collect() };
    let lines = [
        line("Admitted", "admitted", |rates| rates.admitted),
        line("Shadow", "shadow", |rates| rates.shadow),
        line("Errors", "errors", |rates| rates.errors),
        line("Refused", "refused", |rates| rates.refused),
    ];
    let minutes = (MAX_SAMPLES - 1) / 60;
    let latest = |line: &Line<'_>| words::rate(line.values.last().copied().unwrap_or_default());
    let summary = lines.iter().map(|line| format!("{} {}", line.name.to_lowercase(), latest(line)));
    let label =
        format!("Calls a second in the last {minutes} minutes. Now: {}", summary.collect::<Vec<_>>().join(", "));
    let ticks: Vec<String> = (1..=minutes).rev().map(|left| format!("{left} min")).collect();
    plot(&lines, &label, MAX_SAMPLES, &ticks)
}

/// Draws lines over the time until now, which has places for this many values. `ticks` are the times below it.
pub(super) fn plot(lines: &[Line<'_>], label: &str, places: usize, ticks: &[String]) -> Markup {
    let highest = lines.iter().flat_map(|line| &line.values).copied().fold(0.0, f64::max);
    let top = axis_top(highest);
    html! {
        figure class="chart" {
            ul class="legend" aria-hidden="true" {
                @for line in lines { li class=(line.class) { (line.name) } }
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
                    @for line in lines {
                        polyline class=(line.class) points=(points(&line.values, top, places)) {}
                    }
                }
            }
            div class="axis x" aria-hidden="true" {
                @for tick in ticks { span { (tick) } }
                span { "now" }
            }
        }
    }
}

/// The points of a line that ends at the right.
fn points(values: &[f64], top: f64, places: usize) -> String {
    let last = places.saturating_sub(2).max(1);
    let missing = (last + 1).saturating_sub(values.len());
    let mut points = String::new();
    for (index, value) in values.iter().enumerate() {
        let x = (missing + index) as f64 / last as f64 * WIDTH;
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
        assert_eq!(points(&[0.0, 10.0], 10.0, MAX_SAMPLES), "897,179.0 900,8.0 ");
    }
}
