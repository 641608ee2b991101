//! A report as pictures: an SVG in light and dark, and a PNG of it.

use plotters::element::Text;
use tidegate_report::chart::{
    self, Area, AxisUnit, ChartConfig, ChartLine, Mark, SeriesMark, THIN_LINE, axis_max, text_style,
};
use tidegate_report::svg::{PictureError, WIDTH, render_svg};
use tidegate_report::theme::{BLUE, Colour, GREEN, GREY, MUTED, ORANGE, SERIES, TEXT, VERMILLION};

use super::{Report, Run, runs_by_case};
use crate::stats::{CallOutcome, TimeBucket};

const HEADER_HEIGHT: i32 = 78;
const CASE_NAME_HEIGHT: i32 = 30;
const CASE_LEGEND_HEIGHT: i32 = 40;
const OVERVIEW_HEIGHT: i32 = 250;
const STRATEGY_HEIGHT: i32 = 250;
/// The largest number of points of a line. Buckets are merged to stay within it.
const MAX_LINE_POINTS: usize = 64;
/// The largest number of calls in one chart of delays.
const MAX_CALL_MARKS: usize = 1200;

/// The heading of a picture: included, or omitted because the page has it already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heading {
    Included,
    Omitted,
}

/// Returns the whole report as one SVG that follows the reader's preference for light or dark.
pub(super) fn report_svg(report: &Report, heading: Heading) -> Result<String, PictureError> {
    let cases = runs_by_case(report);
    let head = if heading == Heading::Included { HEADER_HEIGHT } else { 0 };
    let named = |runs: &&&[Run]| runs.first().is_some_and(|run| !run.case.is_empty());
    let head_of_names = CASE_NAME_HEIGHT * cases.iter().filter(named).count() as i32;
    let height = head
        + head_of_names
        + cases
            .iter()
            .map(|runs| CASE_LEGEND_HEIGHT + OVERVIEW_HEIGHT + STRATEGY_HEIGHT * runs.len() as i32)
            .sum::<i32>()
        + 12;
    let draw = |root: &Area<'_>| {
        if heading == Heading::Included {
            root.draw(&Text::new(report.title.clone(), (12, 12), text_style(24, TEXT)))?;
            root.draw(&Text::new(report.about.clone(), (12, 48), text_style(14, MUTED)))?;
        }
        let mut top = head;
        for runs in cases {
            draw_case(root, runs, &mut top)?;
        }
        Ok(())
    };
    render_svg(&report.title, height, draw)
}

fn draw_case(root: &Area<'_>, runs: &[Run], top: &mut i32) -> Result<(), PictureError> {
    chart::draw_rule(root, *top, WIDTH)?;
    let name = runs.first().map_or("", |run| run.case.as_str());
    if !name.is_empty() {
        root.draw(&Text::new(name.to_owned(), (12, *top + 12), text_style(18, TEXT)))?;
        *top += CASE_NAME_HEIGHT;
    }
    let colours = || SERIES.into_iter().cycle();
    let legend: Vec<_> =
        runs.iter().zip(colours()).map(|(run, colour)| (run.strategy.as_str(), colour, SeriesMark::Line)).collect();
    chart::draw_legend(root, (12, *top + 14), &legend)?;
    *top += CASE_LEGEND_HEIGHT;
    draw_overview(&root.clone().shrink((0, *top), (WIDTH as u32, OVERVIEW_HEIGHT as u32)), runs)?;
    *top += OVERVIEW_HEIGHT;
    for run in runs {
        draw_strategy(&root.clone().shrink((0, *top), (WIDTH as u32, STRATEGY_HEIGHT as u32)), run)?;
        *top += STRATEGY_HEIGHT;
    }
    Ok(())
}

/// Draws all strategies over each other: successful calls, queues and amplification.
fn draw_overview(area: &Area<'_>, runs: &[Run]) -> Result<(), PictureError> {
    let longest = runs.iter().map(|run| run.first_trial.last_ended_at().as_secs_f64()).fold(1e-3, f64::max);
    let unit = AxisUnit::for_seconds(longest);
    let series = |of: &dyn Fn(&TimeBucket, f64) -> f64| -> Vec<ChartLine> {
        let line =
            |(run, colour): (&Run, Colour)| ChartLine { colour, width: THIN_LINE, points: line_points(run, unit, of) };
        runs.iter().zip(SERIES.into_iter().cycle()).map(line).collect()
    };
    let charts: [(&str, &str, Vec<ChartLine>); 3] = [
        ("Calls that succeed", "calls per second", series(&|bucket, width| bucket.succeeded as f64 / width)),
        (
            "Queue: waiting at clients, and at the service",
            "calls",
            series(&|bucket, _| f64::from(bucket.waiting + bucket.queue + bucket.working)),
        ),
        (
            "Amplification: attempts for each call so far",
            "attempts per call",
            runs.iter()
                .zip(SERIES.into_iter().cycle())
                .map(|(run, colour)| amplification_line(run, colour, unit))
                .collect(),
        ),
    ];
    let third = WIDTH / 3;
    for (index, (title, label, lines)) in charts.into_iter().enumerate() {
        let part = area.clone().shrink((index as i32 * third, 0), (third as u32, OVERVIEW_HEIGHT as u32));
        let most = axis_max(lines.iter().flat_map(|line| line.points.iter().map(|point| point.1)), 1.0);
        let frame = ChartConfig {
            title,
            x_axis: (longest / unit.seconds, format!("time ({})", unit.name)),
            y_axis: (most, label.to_owned()),
            legend: &[],
        };
        chart::draw_lines(&part, &frame, &lines)?;
    }
    Ok(())
}

/// Draws one strategy: the rates of its calls and requests, and the delay of each call.
fn draw_strategy(area: &Area<'_>, run: &Run) -> Result<(), PictureError> {
    let longest = run.first_trial.last_ended_at().as_secs_f64().max(1e-3);
    let unit = AxisUnit::for_seconds(longest);
    let time = (longest / unit.seconds, format!("time ({})", unit.name));
    let half = WIDTH / 2;
    type BucketValue = fn(&TimeBucket) -> u64;
    let rates: [(&str, Colour, BucketValue); 4] = [
        ("offered", GREY, |bucket| bucket.offered),
        ("admitted by the service", BLUE, |bucket| bucket.admitted),
        ("refused", ORANGE, |bucket| bucket.throttled + bucket.declined),
        ("succeeded", GREEN, |bucket| bucket.succeeded),
    ];
    let legend = rates.map(|(name, colour, _)| (name, colour, SeriesMark::Line));
    let lines: Vec<ChartLine> = rates
        .iter()
        .map(|(_, colour, of)| ChartLine {
            colour: *colour,
            width: THIN_LINE,
            points: line_points(run, unit, |bucket: &TimeBucket, width| of(bucket) as f64 / width),
        })
        .collect();
    let most = axis_max(lines.iter().flat_map(|line| line.points.iter().map(|point| point.1)), 1.0);
    let title = format!("{}: calls and requests", run.strategy);
    let frame =
        ChartConfig { title: &title, x_axis: time.clone(), y_axis: (most, "per second".to_owned()), legend: &legend };
    chart::draw_lines(&area.clone().shrink((0, 0), (half as u32, STRATEGY_HEIGHT as u32)), &frame, &lines)?;

    let kept = run.first_trial.samples();
    let sparse = kept.len().div_ceil(MAX_CALL_MARKS).max(1);
    let shown: Vec<_> = kept.iter().step_by(sparse).collect();
    let slowest = shown.iter().map(|call| call.delay.as_secs_f64()).fold(1e-3, f64::max);
    let delays = AxisUnit::for_seconds(slowest);
    let legend = [
        ("succeeded", GREEN, SeriesMark::Dot),
        ("failed", VERMILLION, SeriesMark::Cross),
        ("refused", ORANGE, SeriesMark::Cross),
    ];
    let title = format!("{}: delay of each call", run.strategy);
    let label = format!("delay ({})", delays.name);
    let frame = ChartConfig {
        title: &title,
        x_axis: time,
        y_axis: (axis_max([slowest / delays.seconds], 0.0), label),
        legend: &legend,
    };
    let part = area.clone().shrink((half, 0), (half as u32, STRATEGY_HEIGHT as u32));
    let marks: Vec<Mark> = shown
        .iter()
        .map(|call| {
            let at = (call.ended_at.as_secs_f64() / unit.seconds, call.delay.as_secs_f64() / delays.seconds);
            match call.outcome {
                CallOutcome::Succeeded => (at, GREEN, SeriesMark::Dot),
                CallOutcome::Failed => (at, VERMILLION, SeriesMark::Cross),
                CallOutcome::Refused | CallOutcome::Declined => (at, ORANGE, SeriesMark::Cross),
            }
        })
        .collect();
    chart::draw_marks(&part, &frame, &marks)?;
    Ok(())
}

/// Returns the line of attempts per call so far.
fn amplification_line(run: &Run, colour: Colour, unit: AxisUnit) -> ChartLine {
    let (mut offered, mut attempts) = (0_u64, 0_u64);
    let so_far = |bucket: &TimeBucket, _: f64| {
        offered += bucket.offered;
        attempts += bucket.attempts;
        attempts as f64 / offered.max(1) as f64
    };
    ChartLine { colour, width: THIN_LINE, points: line_points(run, unit, so_far) }
}

/// Returns a number of each bucket, at the bucket's middle. `of` gets the bucket's width in seconds.
fn line_points(run: &Run, unit: AxisUnit, mut of: impl FnMut(&TimeBucket, f64) -> f64) -> Vec<(f64, f64)> {
    let (buckets, width) = run.first_trial.merged_buckets(MAX_LINE_POINTS);
    let (width, end) = (width.as_secs_f64(), run.first_trial.last_ended_at().as_secs_f64());
    let place = |(index, bucket): (usize, &TimeBucket)| {
        let from = index as f64 * width;
        let length = (end - from).min(width);
        // The last bucket may be cut too short for a rate by the run's end.
        (length * 2.0 >= width || index == 0)
            .then(|| ((from + length / 2.0) / unit.seconds, of(bucket, length.max(1e-6))))
    };
    buckets.iter().enumerate().filter_map(place).collect()
}
