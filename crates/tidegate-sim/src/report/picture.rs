//! A report as pictures: an SVG in light and dark, and a PNG of it.

use tidegate_report::chart::{
    self, Area, AxisUnit, ChartConfig, ChartLine, Mark, SeriesMark, axis_max, draw_text, lines_max, sub_area,
};
use tidegate_report::svg::{PictureError, WIDTH, render_svg, svg_to_png};
use tidegate_report::theme::{BLUE, Colour, GREEN, GREY, MUTED, ORANGE, SERIES, TEXT, VERMILLION};

use super::{Report, Run};
use crate::stats::{CallOutcome, CallSample, TimeBucket};

const HEADER_HEIGHT: i32 = 78;
const CASE_NAME_HEIGHT: i32 = 30;
const CASE_LEGEND_HEIGHT: i32 = 40;
const OVERVIEW_HEIGHT: i32 = 250;
const STRATEGY_HEIGHT: i32 = 250;
/// The largest number of points of a line. Buckets are merged to stay within it.
const MAX_LINE_POINTS: usize = 64;
/// The largest number of calls in one chart of delays.
const MAX_CALL_MARKS: usize = 1200;

impl Report {
    /// Returns the pictures as SVG, light or dark as their reader prefers.
    ///
    /// # Errors
    /// The pictures couldn't be drawn.
    pub fn svg(&self) -> Result<String, PictureError> {
        self.render_svg(HEADER_HEIGHT)
    }

    /// Returns the pictures as PNG, in light colours.
    ///
    /// # Errors
    /// The pictures couldn't be drawn, or are too large.
    pub fn png(&self) -> Result<Vec<u8>, PictureError> {
        svg_to_png(&self.svg()?)
    }

    /// Returns the pictures as SVG, below a heading of this height. Without height, there is no heading.
    pub(super) fn render_svg(&self, heading: i32) -> Result<String, PictureError> {
        let case_height = |runs: &[Run]| {
            let name = if has_case_name(runs) { CASE_NAME_HEIGHT } else { 0 };
            name + CASE_LEGEND_HEIGHT + OVERVIEW_HEIGHT + STRATEGY_HEIGHT * runs.len() as i32
        };
        let height = heading + self.runs_by_case().map(case_height).sum::<i32>() + 12;
        render_svg(&self.title, height, |root| {
            if heading > 0 {
                draw_text(root, &self.title, (12, 12), 24, TEXT)?;
                draw_text(root, &self.about, (12, 48), 14, MUTED)?;
            }
            let mut top = heading;
            for runs in self.runs_by_case() {
                draw_case(root, runs, top)?;
                top += case_height(runs);
            }
            Ok(())
        })
    }
}

fn has_case_name(runs: &[Run]) -> bool {
    runs.first().is_some_and(|run| !run.case.is_empty())
}

fn draw_case(root: &Area<'_>, runs: &[Run], mut top: i32) -> Result<(), PictureError> {
    chart::draw_rule(root, top, WIDTH)?;
    if has_case_name(runs) {
        draw_text(root, &runs[0].case, (12, top + 12), 18, TEXT)?;
        top += CASE_NAME_HEIGHT;
    }
    let legend: Vec<_> =
        with_colours(runs).map(|(run, colour)| (run.strategy.as_str(), colour, SeriesMark::Line)).collect();
    chart::draw_legend(root, (12, top + 14), &legend)?;
    top += CASE_LEGEND_HEIGHT;
    draw_overview(&sub_area(root, (0, top), (WIDTH, OVERVIEW_HEIGHT)), runs)?;
    top += OVERVIEW_HEIGHT;
    for run in runs {
        draw_strategy(&sub_area(root, (0, top), (WIDTH, STRATEGY_HEIGHT)), run)?;
        top += STRATEGY_HEIGHT;
    }
    Ok(())
}

fn with_colours(runs: &[Run]) -> impl Iterator<Item = (&Run, Colour)> {
    runs.iter().zip(SERIES.into_iter().cycle())
}

/// Draws all strategies over each other: successful calls, queues and amplification.
fn draw_overview(area: &Area<'_>, runs: &[Run]) -> Result<(), PictureError> {
    let longest = runs.iter().map(run_seconds).fold(1e-3, f64::max);
    let unit = AxisUnit::for_seconds(longest);
    let series = |points: &dyn Fn(&Run) -> Vec<(f64, f64)>| -> Vec<ChartLine> {
        with_colours(runs).map(|(run, colour)| ChartLine::thin(colour, points(run))).collect()
    };
    let succeeded = series(&|run| line_points(run, unit, |bucket, width| bucket.succeeded as f64 / width));
    let queues =
        series(&|run| line_points(run, unit, |bucket, _| f64::from(bucket.waiting + bucket.queue + bucket.working)));
    let amplification = series(&|run| {
        let (mut offered, mut attempts) = (0_u64, 0_u64);
        line_points(run, unit, |bucket, _| {
            offered += bucket.offered;
            attempts += bucket.attempts;
            attempts as f64 / offered.max(1) as f64
        })
    });
    let charts = [
        ("Calls that succeed", "calls per second", succeeded),
        ("Queue: waiting at clients, and at the service", "calls", queues),
        ("Amplification: attempts for each call so far", "attempts per call", amplification),
    ];
    let third = WIDTH / 3;
    for (column, (title, label, lines)) in (0..).zip(charts) {
        let part = sub_area(area, (column * third, 0), (third, OVERVIEW_HEIGHT));
        let frame = ChartConfig {
            title,
            x_axis: unit.axis("time", longest),
            y_axis: (lines_max(&lines, 1.0), label.to_owned()),
            legend: &[],
        };
        chart::draw_lines(&part, &frame, &lines)?;
    }
    Ok(())
}

/// Draws one strategy: the rates of its calls and requests, and the delay of each call.
fn draw_strategy(area: &Area<'_>, run: &Run) -> Result<(), PictureError> {
    let longest = run_seconds(run).max(1e-3);
    let unit = AxisUnit::for_seconds(longest);
    let half = WIDTH / 2;
    type BucketValue = fn(&TimeBucket) -> u64;
    let rates: [(&str, Colour, BucketValue); 4] = [
        ("offered", GREY, |bucket| bucket.offered),
        ("admitted by the service", BLUE, |bucket| bucket.admitted),
        ("refused", ORANGE, |bucket| bucket.throttled + bucket.declined),
        ("succeeded", GREEN, |bucket| bucket.succeeded),
    ];
    let lines = rates.map(|(_, colour, count)| {
        ChartLine::thin(colour, line_points(run, unit, |bucket, width| count(bucket) as f64 / width))
    });
    let frame = ChartConfig {
        title: &format!("{}: calls and requests", run.strategy),
        x_axis: unit.axis("time", longest),
        y_axis: (lines_max(&lines, 1.0), "per second".to_owned()),
        legend: &rates.map(|(name, colour, _)| (name, colour, SeriesMark::Line)),
    };
    chart::draw_lines(&sub_area(area, (0, 0), (half, STRATEGY_HEIGHT)), &frame, &lines)?;

    let samples = &run.first_trial.samples;
    let stride = samples.len().div_ceil(MAX_CALL_MARKS).max(1);
    let shown = samples.iter().step_by(stride);
    let slowest = shown.clone().map(|call| call.delay.as_secs_f64()).fold(1e-3, f64::max);
    let delay_unit = AxisUnit::for_seconds(slowest);
    let (delay_end, delay_label) = delay_unit.axis("delay", slowest);
    let frame = ChartConfig {
        title: &format!("{}: delay of each call", run.strategy),
        x_axis: unit.axis("time", longest),
        y_axis: (axis_max([delay_end], 0.0), delay_label),
        legend: &[
            ("succeeded", GREEN, SeriesMark::Dot),
            ("failed", VERMILLION, SeriesMark::Cross),
            ("refused", ORANGE, SeriesMark::Cross),
        ],
    };
    let mark = |call: &CallSample| -> Mark {
        let at = (call.ended_at.as_secs_f64() / unit.seconds, call.delay.as_secs_f64() / delay_unit.seconds);
        match call.outcome {
            CallOutcome::Succeeded => (at, GREEN, SeriesMark::Dot),
            CallOutcome::Failed => (at, VERMILLION, SeriesMark::Cross),
            CallOutcome::Refused | CallOutcome::Declined => (at, ORANGE, SeriesMark::Cross),
        }
    };
    let part = sub_area(area, (half, 0), (half, STRATEGY_HEIGHT));
    Ok(chart::draw_marks(&part, &frame, &shown.map(mark).collect::<Vec<_>>())?)
}

fn run_seconds(run: &Run) -> f64 {
    run.first_trial.last_ended_at.as_secs_f64()
}

/// Returns a number of each bucket, at the bucket's middle. `of` gets the bucket's width in seconds.
fn line_points(run: &Run, unit: AxisUnit, mut of: impl FnMut(&TimeBucket, f64) -> f64) -> Vec<(f64, f64)> {
    let (buckets, width) = run.first_trial.merged_buckets(MAX_LINE_POINTS);
    let (width, end) = (width.as_secs_f64(), run_seconds(run));
    let place = |(index, bucket): (usize, &TimeBucket)| {
        let from = index as f64 * width;
        let length = (end - from).min(width);
        // The last bucket may be cut too short for a rate by the run's end.
        (length * 2.0 >= width || index == 0)
            .then(|| ((from + length / 2.0) / unit.seconds, of(bucket, length.max(1e-6))))
    };
    buckets.iter().enumerate().filter_map(place).collect()
}
