//! Findings as pictures: requests over time, and the share of clients that each value of a limit refuses.

use tidegate_core::Time;

use super::json::CURVE_MAX_SHARE;
use super::tables::format_number;
use crate::{Findings, IntervalCounts, LimitFindings, PolicyFindings, Timeline, format_time};
use tidegate_report::chart::{
    self, Area, AxisUnit, ChartConfig, ChartLine, SeriesMark, THIN_LINE, WIDE_LINE, axis_max,
};
use tidegate_report::svg::{PictureError, WIDTH, render_svg};
use tidegate_report::theme::{BLUE, Colour, GREEN, GREY, INK, ORANGE, PURPLE, VERMILLION};

const TIMELINE_HEIGHT: i32 = 300;
const LIMIT_HEIGHT: i32 = 260;
/// The largest number of limits with a chart of their own: those that refuse the most.
const MAX_LIMITS: usize = 12;
/// The largest number of points of a line.
const MAX_LINE_POINTS: usize = 200;
/// A limit's chart ends at the value that refuses this share of clients, times `TAIL_FACTOR`.
const TAIL_SHARE: f64 = 0.001;
const TAIL_FACTOR: f64 = 4.0;
/// The least value for the tail.
const MIN_TAIL_VALUE: u64 = 2;

pub(super) fn findings_svg(findings: &Findings) -> Result<String, PictureError> {
    let charted: Vec<(&PolicyFindings, Vec<&LimitFindings>)> =
        findings.policies.iter().map(|policy| (policy, charted_limits(policy))).collect();
    let rows = |limits: &Vec<&LimitFindings>| limits.len().div_ceil(2) as i32;
    let several = charted.len() > 1;
    let both = if several { TIMELINE_HEIGHT } else { 0 };
    let height = both + charted.iter().map(|(_, limits)| TIMELINE_HEIGHT + LIMIT_HEIGHT * rows(limits)).sum::<i32>();
    render_svg("What would have been refused", height, |root| {
        if several {
            draw_comparison(
                &sub_area(root, (0, 0), (WIDTH, TIMELINE_HEIGHT)),
                &findings.policies,
                findings.input.newest_time,
            )?;
        }
        let mut top = both;
        for (policy, limits) in &charted {
            let name = if several { format!("{}: ", policy.name) } else { String::new() };
            draw_timeline(
                &sub_area(root, (0, top), (WIDTH, TIMELINE_HEIGHT)),
                policy,
                findings.input.newest_time,
                &name,
            )?;
            top += TIMELINE_HEIGHT;
            for pair in limits.chunks(2) {
                // The last of an odd number has the full width.
                let width = WIDTH / pair.len() as i32;
                for (column, limit) in (0..).zip(pair) {
                    draw_limit(&sub_area(root, (column * width, top), (width, LIMIT_HEIGHT)), limit, &name)?;
                }
                top += LIMIT_HEIGHT;
            }
        }
        Ok(())
    })
}

fn sub_area<'a>(root: &Area<'a>, at: (i32, i32), size: (i32, i32)) -> Area<'a> {
    root.clone().shrink(at, (size.0 as u32, size.1 as u32))
}

/// Returns the limits with more than one key, those that refuse the most first.
fn charted_limits(policy: &PolicyFindings) -> Vec<&LimitFindings> {
    let used = |limit: &&LimitFindings| limit.peaks.as_ref().is_some_and(|peaks| peaks.key_count() > 1);
    let mut limits: Vec<&LimitFindings> = policy.limits.iter().filter(used).collect();
    limits.sort_by_key(|limit| std::cmp::Reverse(limit.refusals.by_limit + limit.refusals.by_block));
    limits.truncate(MAX_LIMITS);
    limits
}

/// The time axis of a chart, from its first interval to the newest request.
struct TimeAxis {
    start: Time,
    seconds: f64,
    unit: AxisUnit,
}

impl TimeAxis {
    fn covering<'t>(timelines: impl Iterator<Item = &'t Timeline> + Clone, newest: Option<Time>) -> Self {
        let begins = timelines.clone().map(Timeline::start).min().unwrap_or_default();
        let ends = |timeline: &Timeline| {
            timeline.start().since(begins).as_secs_f64() + width_seconds(timeline) * interval_count(timeline)
        };
        let whole = timelines.map(ends).fold(1.0, f64::max);
        // Logs have times in seconds, and the last second counts until its end.
        let told = newest.map(|newest| newest.since(begins).as_secs_f64() + 1.0);
        let longest = told.map_or(whole, |told| told.min(whole));
        Self { start: begins, seconds: longest, unit: AxisUnit::for_seconds(longest) }
    }

    /// Returns the rate of one kind of requests per second, in steps as long as the time that they count.
    fn rate_steps(&self, timeline: &Timeline, of: impl Fn(&IntervalCounts) -> u64) -> Vec<(f64, f64)> {
        let each = timeline.intervals().len().div_ceil(MAX_LINE_POINTS).max(1);
        let (width, first) = (width_seconds(timeline), timeline.start().since(self.start).as_secs_f64());
        let steps = timeline.intervals().chunks(each).enumerate().flat_map(|(place, some)| {
            let number: u64 = some.iter().map(&of).sum();
            let from = first + (place * each) as f64 * width;
            // The log may end within the last interval.
            let long = (some.len() as f64 * width).min(self.seconds - from).max(width * 0.05);
            [from, from + long].map(|at| (at / self.unit.seconds, number as f64 / long))
        });
        steps.collect()
    }

    /// Draws rates of requests over time, each with its name.
    fn draw(&self, area: &Area<'_>, title: &str, series: Vec<(&str, ChartLine)>) -> Result<(), PictureError> {
        let (names, lines): (Vec<&str>, Vec<ChartLine>) = series.into_iter().unzip();
        let legend: Vec<_> =
            names.into_iter().zip(&lines).map(|(name, line)| (name, line.colour, SeriesMark::Line)).collect();
        let most = axis_max(lines.iter().flat_map(|line| line.points.iter().map(|point| point.1)), 0.1);
        let frame = ChartConfig {
            title,
            x_axis: (
                self.seconds / self.unit.seconds,
                format!("time since {} ({})", format_time(self.start), self.unit.name),
            ),
            y_axis: (most, "requests per second".to_owned()),
            legend: &legend,
        };
        Ok(chart::draw_lines(area, &frame, &lines)?)
    }
}

fn width_seconds(timeline: &Timeline) -> f64 {
    timeline.width().as_secs_f64()
}

fn interval_count(timeline: &Timeline) -> f64 {
    timeline.intervals().len().max(1) as f64
}

/// Draws the refusals of each policy over each other.
fn draw_comparison(area: &Area<'_>, policies: &[PolicyFindings], newest: Option<Time>) -> Result<(), PictureError> {
    let axis = TimeAxis::covering(policies.iter().map(|policy| &policy.timeline), newest);
    // Often both policies refuse the same requests, and neither line may hide the other.
    let styles = [(ORANGE, WIDE_LINE), (BLUE, THIN_LINE)];
    let series = policies.iter().zip(styles).map(|(policy, (colour, width))| {
        (&*policy.name, ChartLine { colour, width, points: axis.rate_steps(&policy.timeline, IntervalCounts::refused) })
    });
    axis.draw(area, "requests refused over time, by each policy", series.collect())
}

fn draw_timeline(
    area: &Area<'_>,
    policy: &PolicyFindings,
    newest: Option<Time>,
    name: &str,
) -> Result<(), PictureError> {
    type IntervalValue = fn(&IntervalCounts) -> u64;
    const SERIES: [(&str, Colour, IntervalValue); 4] = [
        ("let through", GREEN, |interval| interval.admitted),
        ("refused, limit full", ORANGE, |interval| interval.refused_by_limit),
        ("refused, blocked", VERMILLION, |interval| interval.refused_by_block),
        ("refused, deny list", PURPLE, |interval| interval.refused_by_deny_list),
    ];
    let timeline = &policy.timeline;
    let axis = TimeAxis::covering(std::iter::once(timeline), newest);
    let there = SERIES.iter().filter(|(_, _, of)| timeline.intervals().iter().any(|interval| of(interval) > 0));
    let series = there.map(|(kind, colour, of)| {
        (*kind, ChartLine { colour: *colour, width: THIN_LINE, points: axis.rate_steps(timeline, of) })
    });
    axis.draw(area, &format!("{name}requests over time"), series.collect())
}

/// Draws the share of clients that each value of a limit refuses, down to none, and marks the present value.
fn draw_limit(area: &Area<'_>, limit: &LimitFindings, name: &str) -> Result<(), PictureError> {
    let Some(peaks) = &limit.peaks else { return Ok(()) };
    let now = limit.current_refused_share().unwrap_or(0.0);
    let most = CURVE_MAX_SHARE.max(now * 1.5).min(1.0);
    let curve = peaks.curve(most);
    let capacity = limit.capacity as f64;
    // The highest use is often a hundred times the values of interest.
    let tail = peaks.smallest_value_for_share(TAIL_SHARE).max(MIN_TAIL_VALUE) as f64 * TAIL_FACTOR;
    let right = axis_max([if capacity <= tail * TAIL_FACTOR { capacity.max(tail) } else { tail }], 1.0);
    let top = most * 100.0;
    let mut steps: Vec<(f64, f64)> = Vec::with_capacity(curve.len() * 2 + 2);
    let mut before = top;
    for (value, share) in &curve {
        let (value, share) = (*value as f64, (share * 100.0).min(top));
        if value > right {
            break;
        }
        steps.extend([(value, before), (value, share)]);
        before = share;
    }
    steps.push((right, before));
    let mut lines = vec![ChartLine { colour: BLUE, width: THIN_LINE, points: steps }];
    let asked = limit.values.first().map(|value| value.share * 100.0);
    if let Some(one) = asked.filter(|one| *one < top) {
        lines.push(ChartLine { colour: GREY, width: THIN_LINE, points: vec![(0.0, one), (right, one)] });
    }
    let mut legend =
        vec![("clients refused by this value", BLUE, SeriesMark::Line), ("1 % of clients", GREY, SeriesMark::Line)];
    let now = format!(
        "the value now, {}{}",
        format_number(limit.capacity),
        if capacity > right { ", is further right" } else { "" }
    );
    if capacity <= right {
        lines.push(ChartLine { colour: INK, width: THIN_LINE, points: vec![(capacity, 0.0), (capacity, top)] });
    }
    legend.push((&now, INK, SeriesMark::Line));
    let title = format!("{name}{}: {} by {}", limit.name, limit.quantity, limit.counted_by);
    let frame = ChartConfig {
        title: &title,
        x_axis: (right, "value of the limit".to_owned()),
        y_axis: (top, "clients refused (%)".to_owned()),
        legend: &legend,
    };
    chart::draw_lines(area, &frame, &lines)?;
    Ok(())
}
