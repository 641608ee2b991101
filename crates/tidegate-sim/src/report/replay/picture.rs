//! Findings as pictures: what happened when, and whom each limit's value refuses.

use tidegate_core::{Span, Time};

use super::grid::number_of;
use crate::replay::{Findings, Interval, LimitFindings, PolicyFindings, Timeline, shown};
use crate::report::chart::{self, Area, Frame, Line, Mark, THIN, Unit, WIDE, headroom};
use crate::report::picture::{PictureError, WIDTH, drawing};
use crate::report::theme::{BLUE, Colour, GREEN, GREY, INK, ORANGE, PURPLE, VERMILLION};

const OVER_TIME: i32 = 300;
const LIMIT: i32 = 260;
/// The most limits that have a chart of their own: those that refuse the most.
const MAX_LIMITS: usize = 12;
/// The most points of a line.
const LINE_POINTS: usize = 200;
/// The largest share of clients that a limit's chart begins with.
const CURVE: f64 = 0.05;
/// A limit's chart ends a few times to the right of the value that refuses this share of clients.
const TAIL: f64 = 0.001;
const TIMES: f64 = 4.0;
/// Which counts as this much at the least.
const LEAST: u64 = 2;

pub(super) fn svg(findings: &Findings) -> Result<String, PictureError> {
    let charted: Vec<(&PolicyFindings, Vec<&LimitFindings>)> =
        findings.policies.iter().map(|policy| (policy, limits(policy))).collect();
    let rows = |limits: &Vec<&LimitFindings>| limits.len().div_ceil(2) as i32;
    let several = charted.len() > 1;
    let both = if several { OVER_TIME } else { 0 };
    let height = both + charted.iter().map(|(_, limits)| OVER_TIME + LIMIT * rows(limits)).sum::<i32>();
    drawing("What would have been refused", height, |root| {
        if several {
            compared(&part(root, (0, 0), (WIDTH, OVER_TIME)), &findings.policies, findings.input.newest)?;
        }
        let mut top = both;
        for (policy, limits) in &charted {
            let name = if several { format!("{}: ", policy.name) } else { String::new() };
            over_time(&part(root, (0, top), (WIDTH, OVER_TIME)), policy, findings.input.newest, &name)?;
            top += OVER_TIME;
            for pair in limits.chunks(2) {
                // The last of an odd number has all of the width.
                let width = WIDTH / pair.len() as i32;
                for (column, limit) in (0..).zip(pair) {
                    of_limit(&part(root, (column * width, top), (width, LIMIT)), limit, &name)?;
                }
                top += LIMIT;
            }
        }
        Ok(())
    })
}

fn part<'a>(root: &Area<'a>, at: (i32, i32), size: (i32, i32)) -> Area<'a> {
    root.clone().shrink(at, (size.0 as u32, size.1 as u32))
}

/// The limits whose charts say something, those that refuse the most first.
fn limits(policy: &PolicyFindings) -> Vec<&LimitFindings> {
    let used = |limit: &&LimitFindings| limit.peaks.as_ref().is_some_and(|peaks| peaks.keys() > 1);
    let mut limits: Vec<&LimitFindings> = policy.limits.iter().filter(used).collect();
    limits.sort_by_key(|limit| std::cmp::Reverse(limit.refusals.full + limit.refusals.blocked));
    limits.truncate(MAX_LIMITS);
    limits
}

/// The time that a chart shows, from its first interval to the newest request.
struct Axis {
    begins: Time,
    longest: f64,
    unit: Unit,
}

impl Axis {
    fn of<'t>(timelines: impl Iterator<Item = &'t Timeline> + Clone, newest: Option<Time>) -> Self {
        let begins = timelines.clone().map(Timeline::begins).min().unwrap_or_default();
        let ends = |timeline: &Timeline| secs(timeline.begins().since(begins)) + wide(timeline) * count(timeline);
        let whole = timelines.map(ends).fold(1.0, f64::max);
        // Logs tell seconds, and the last one is over with its last request.
        let told = newest.map(|newest| secs(newest.since(begins)) + 1.0);
        let longest = told.map_or(whole, |told| told.min(whole));
        Self { begins, longest, unit: Unit::of_time(longest) }
    }

    /// How many requests a second there were of a kind: in steps, each of which lasts as long as what it counts.
    fn steps(&self, timeline: &Timeline, of: impl Fn(&Interval) -> u64) -> Vec<(f64, f64)> {
        let each = timeline.intervals().len().div_ceil(LINE_POINTS).max(1);
        let (width, first) = (wide(timeline), secs(timeline.begins().since(self.begins)));
        let steps = timeline.intervals().chunks(each).enumerate().flat_map(|(place, some)| {
            let number: u64 = some.iter().map(&of).sum();
            let from = first + (place * each) as f64 * width;
            // The log may end within the last interval.
            let long = (some.len() as f64 * width).min(self.longest - from).max(width * 0.05);
            [from, from + long].map(|at| (at / self.unit.size, number as f64 / long))
        });
        steps.collect()
    }

    /// Some numbers of requests over time, each with its name.
    fn draw(&self, area: &Area<'_>, title: &str, series: Vec<(&str, Line)>) -> Result<(), PictureError> {
        let (names, lines): (Vec<&str>, Vec<Line>) = series.into_iter().unzip();
        let legend: Vec<_> =
            names.into_iter().zip(&lines).map(|(name, line)| (name, line.colour, Mark::Line)).collect();
        let most = headroom(lines.iter().flat_map(|line| line.points.iter().map(|point| point.1)), 0.1);
        let frame = Frame {
            title,
            x: (self.longest / self.unit.size, format!("time since {} ({})", shown(self.begins), self.unit.name)),
            y: (most, "requests per second".to_owned()),
            legend: &legend,
        };
        Ok(chart::lines(area, &frame, &lines)?)
    }
}

fn secs(span: Span) -> f64 {
    span.as_micros() as f64 / 1e6
}

fn wide(timeline: &Timeline) -> f64 {
    secs(timeline.width())
}

fn count(timeline: &Timeline) -> f64 {
    timeline.intervals().len().max(1) as f64
}

/// What each policy refuses, over each other.
fn compared(area: &Area<'_>, policies: &[PolicyFindings], newest: Option<Time>) -> Result<(), PictureError> {
    let axis = Axis::of(policies.iter().map(|policy| &policy.timeline), newest);
    // Often both refuse the same, and neither line may hide the other.
    let styles = [(ORANGE, WIDE), (BLUE, THIN)];
    let series = policies.iter().zip(styles).map(|(policy, (colour, width))| {
        (&*policy.name, Line { colour, width, points: axis.steps(&policy.timeline, Interval::refused) })
    });
    axis.draw(area, "requests refused over time, by each policy", series.collect())
}

fn over_time(area: &Area<'_>, policy: &PolicyFindings, newest: Option<Time>, name: &str) -> Result<(), PictureError> {
    type Of = fn(&Interval) -> u64;
    const KINDS: [(&str, Colour, Of); 4] = [
        ("let through", GREEN, |interval| interval.admitted),
        ("refused, limit full", ORANGE, |interval| interval.by_limit),
        ("refused, blocked", VERMILLION, |interval| interval.by_block),
        ("refused, deny list", PURPLE, |interval| interval.by_list),
    ];
    let timeline = &policy.timeline;
    let axis = Axis::of(std::iter::once(timeline), newest);
    let there = KINDS.iter().filter(|(_, _, of)| timeline.intervals().iter().any(|interval| of(interval) > 0));
    let series = there
        .map(|(kind, colour, of)| (*kind, Line { colour: *colour, width: THIN, points: axis.steps(timeline, of) }));
    axis.draw(area, &format!("{name}requests over time"), series.collect())
}

/// The share of clients that each value of a limit refuses, down to none, and where the value is now.
fn of_limit(area: &Area<'_>, limit: &LimitFindings, name: &str) -> Result<(), PictureError> {
    let Some(peaks) = &limit.peaks else { return Ok(()) };
    let now = limit.refused_now().unwrap_or(0.0);
    let most = CURVE.max(now * 1.5).min(1.0);
    let curve = peaks.curve(most);
    let capacity = limit.capacity as f64;
    // The highest use is often a hundred times what the chart is about.
    let tail = peaks.value_for(TAIL).max(LEAST) as f64 * TIMES;
    let right = headroom([if capacity <= tail * TIMES { capacity.max(tail) } else { tail }], 1.0);
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
    let mut lines = vec![Line { colour: BLUE, width: THIN, points: steps }];
    let asked = limit.values.first().map(|value| value.share * 100.0);
    if let Some(one) = asked.filter(|one| *one < top) {
        lines.push(Line { colour: GREY, width: THIN, points: vec![(0.0, one), (right, one)] });
    }
    let mut legend = vec![("clients refused by this value", BLUE, Mark::Line), ("1 % of clients", GREY, Mark::Line)];
    let now = format!(
        "the value now, {}{}",
        number_of(limit.capacity),
        if capacity > right { ", is further right" } else { "" }
    );
    if capacity <= right {
        lines.push(Line { colour: INK, width: THIN, points: vec![(capacity, 0.0), (capacity, top)] });
    }
    legend.push((&now, INK, Mark::Line));
    let title = format!("{name}{}: {} by {}", limit.name, limit.quantity, limit.by);
    let frame = Frame {
        title: &title,
        x: (right, "value of the limit".to_owned()),
        y: (top, "clients refused (%)".to_owned()),
        legend: &legend,
    };
    chart::lines(area, &frame, &lines)?;
    Ok(())
}
