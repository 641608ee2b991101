//! Findings as pictures: requests over time, and the share of clients that each value of a limit refuses.

use tidegate_core::Time;

use super::json::CURVE_MAX_SHARE;
use super::tables::format_number;
use crate::{Findings, IntervalCounts, LimitFindings, PolicyFindings, Timeline, format_time};
use tidegate_report::chart::{
    self, Area, AxisUnit, ChartConfig, ChartLine, SeriesMark, THIN_LINE, WIDE_LINE, axis_max, lines_max, sub_area,
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

impl Findings {
    /// Returns the pictures as SVG, light or dark as their reader prefers.
    ///
    /// # Errors
    /// The pictures couldn't be drawn.
    pub fn svg(&self) -> Result<String, PictureError> {
        let charted: Vec<(&PolicyFindings, Vec<&LimitFindings>)> =
            self.policies.iter().map(|policy| (policy, charted_limits(policy))).collect();
        let rows: usize = charted.iter().map(|(_, limits)| limits.len().div_ceil(2)).sum();
        let is_comparison = charted.len() > 1;
        let timelines = if is_comparison { charted.len() + 1 } else { charted.len() };
        let height = TIMELINE_HEIGHT * timelines as i32 + LIMIT_HEIGHT * rows as i32;
        render_svg("What would have been refused", height, |root| {
            let newest = self.input.newest_time;
            let timeline_area = |top| sub_area(root, (0, top), (WIDTH, TIMELINE_HEIGHT));
            let mut top = 0;
            if is_comparison {
                draw_comparison(&timeline_area(top), &self.policies, newest)?;
                top += TIMELINE_HEIGHT;
            }
            for (policy, limits) in &charted {
                let prefix = if is_comparison { format!("{}: ", policy.name) } else { String::new() };
                draw_timeline(&timeline_area(top), policy, newest, &prefix)?;
                top += TIMELINE_HEIGHT;
                for pair in limits.chunks(2) {
                    // The last of an odd number has the full width.
                    let width = WIDTH / pair.len() as i32;
                    for (column, limit) in (0..).zip(pair) {
                        draw_limit(&sub_area(root, (column * width, top), (width, LIMIT_HEIGHT)), limit, &prefix)?;
                    }
                    top += LIMIT_HEIGHT;
                }
            }
            Ok(())
        })
    }
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
        let start = timelines.clone().map(Timeline::start).min().unwrap_or_default();
        let end = |timeline: &Timeline| {
            let length = timeline.width().as_secs_f64() * timeline.intervals().len().max(1) as f64;
            timeline.start().since(start).as_secs_f64() + length
        };
        let whole = timelines.map(end).fold(1.0, f64::max);
        // Logs have times in seconds, and the last second counts until its end.
        let logged = newest.map_or(whole, |newest| newest.since(start).as_secs_f64() + 1.0);
        let seconds = logged.min(whole);
        Self { start, seconds, unit: AxisUnit::for_seconds(seconds) }
    }

    /// Returns the rate of one kind of requests per second, in steps as long as the time that they count.
    fn rate_steps(&self, timeline: &Timeline, count: impl Fn(&IntervalCounts) -> u64) -> Vec<(f64, f64)> {
        let group = timeline.intervals().len().div_ceil(MAX_LINE_POINTS).max(1);
        let (width, first) = (timeline.width().as_secs_f64(), timeline.start().since(self.start).as_secs_f64());
        let steps = timeline.intervals().chunks(group).enumerate().flat_map(|(index, intervals)| {
            let number: u64 = intervals.iter().map(&count).sum();
            let start = first + (index * group) as f64 * width;
            // The log may end within the last interval.
            let length = (intervals.len() as f64 * width).min(self.seconds - start).max(width * 0.05);
            [start, start + length].map(|at| (at / self.unit.seconds, number as f64 / length))
        });
        steps.collect()
    }

    /// Draws rates of requests over time, each with its name.
    fn draw(&self, area: &Area<'_>, title: &str, series: Vec<(&str, ChartLine)>) -> Result<(), PictureError> {
        let (names, lines): (Vec<&str>, Vec<ChartLine>) = series.into_iter().unzip();
        let legend: Vec<_> =
            names.into_iter().zip(&lines).map(|(name, line)| (name, line.colour, SeriesMark::Line)).collect();
        let frame = ChartConfig {
            title,
            x_axis: self.unit.axis(&format!("time since {}", format_time(self.start)), self.seconds),
            y_axis: (lines_max(&lines, 0.1), "requests per second".to_owned()),
            legend: &legend,
        };
        Ok(chart::draw_lines(area, &frame, &lines)?)
    }
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
    prefix: &str,
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
    let occurs = |count: IntervalValue| timeline.intervals().iter().any(|interval| count(interval) > 0);
    let series = SERIES.into_iter().filter(|(.., count)| occurs(*count));
    let series = series.map(|(name, colour, count)| (name, ChartLine::thin(colour, axis.rate_steps(timeline, count))));
    axis.draw(area, &format!("{prefix}requests over time"), series.collect())
}

/// Draws the share of clients that each value of a limit refuses, down to none, and marks the present value.
fn draw_limit(area: &Area<'_>, limit: &LimitFindings, prefix: &str) -> Result<(), PictureError> {
    let Some(peaks) = &limit.peaks else { return Ok(()) };
    let refused_now = limit.current_refused_share().unwrap_or(0.0);
    let max_share = CURVE_MAX_SHARE.max(refused_now * 1.5).min(1.0);
    let capacity = limit.capacity as f64;
    // The highest use is often a hundred times the values of interest.
    let tail = peaks.smallest_value_for_share(TAIL_SHARE).max(MIN_TAIL_VALUE) as f64 * TAIL_FACTOR;
    let right = axis_max([if capacity <= tail * TAIL_FACTOR { capacity.max(tail) } else { tail }], 1.0);
    let top = max_share * 100.0;
    let mut steps: Vec<(f64, f64)> = Vec::new();
    let mut before = top;
    let curve = peaks.curve(max_share).into_iter().map(|(value, share)| (value as f64, (share * 100.0).min(top)));
    for (value, percent) in curve.take_while(|(value, _)| *value <= right) {
        steps.extend([(value, before), (value, percent)]);
        before = percent;
    }
    steps.push((right, before));
    let mut lines = vec![ChartLine::thin(BLUE, steps)];
    let asked = limit.values.first().map(|value| value.share * 100.0);
    if let Some(asked) = asked.filter(|asked| *asked < top) {
        lines.push(ChartLine::thin(GREY, vec![(0.0, asked), (right, asked)]));
    }
    let mut now = format!("the value now, {}", format_number(limit.capacity));
    if capacity <= right {
        lines.push(ChartLine::thin(INK, vec![(capacity, 0.0), (capacity, top)]));
    } else {
        now.push_str(", is further right");
    }
    let frame = ChartConfig {
        title: &format!("{prefix}{}: {} by {}", limit.name, limit.quantity, limit.counted_by),
        x_axis: (right, "value of the limit".to_owned()),
        y_axis: (top, "clients refused (%)".to_owned()),
        legend: &[
            ("clients refused by this value", BLUE, SeriesMark::Line),
            ("1 % of clients", GREY, SeriesMark::Line),
            (&now, INK, SeriesMark::Line),
        ],
    };
    Ok(chart::draw_lines(area, &frame, &lines)?)
}
