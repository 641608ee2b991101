//! One chart: axes with units, a title, a legend, and the series.

use plotters::backend::SVGBackend;
use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::Shift;
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::types::RangedCoordf64;
use plotters::drawing::{DrawingArea, DrawingAreaErrorKind};
use plotters::element::{Circle, Cross, PathElement, Rectangle, Text};
use plotters::series::LineSeries;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontDesc, FontFamily, FontStyle, ShapeStyle, TextStyle};

use crate::theme::{AXIS, Colour, GRID, MUTED, TEXT};

/// A picture, or a part of it, to draw in.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// The reason why a chart cannot be drawn.
pub type DrawError = DrawingAreaErrorKind<<SVGBackend<'static> as plotters::backend::DrawingBackend>::ErrorType>;
type DrawResult = Result<(), DrawError>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// The unit of a time axis: its name and its length in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AxisUnit {
    /// The name on the axis.
    pub name: &'static str,
    /// The length of one unit in seconds.
    pub seconds: f64,
}

impl AxisUnit {
    /// Returns the unit that makes the longest of some times, in seconds, easy to read.
    pub fn for_seconds(longest: f64) -> Self {
        let units = [(7200.0 * 24.0, "d", 86_400.0), (7200.0, "h", 3600.0), (300.0, "min", 60.0), (1.0, "s", 1.0)];
        let found = units.into_iter().find(|(least, ..)| longest >= *least);
        found.map_or(Self { name: "ms", seconds: 1e-3 }, |(_, name, seconds)| Self { name, seconds })
    }

    /// Returns an axis with the name of what it shows, up to a time in seconds.
    pub fn axis(self, what: &str, seconds: f64) -> (f64, String) {
        (seconds / self.seconds, format!("{what} ({})", self.name))
    }
}

/// The title, axes and legend of a chart. An axis is its largest value and its label.
#[derive(Clone, Debug)]
pub struct ChartConfig<'a> {
    /// The line above.
    pub title: &'a str,
    /// The end of the horizontal axis, and its label.
    pub x_axis: (f64, String),
    /// The end of the vertical axis, and its label.
    pub y_axis: (f64, String),
    /// The series: name, colour and form.
    pub legend: &'a [(&'a str, Colour, SeriesMark)],
}

/// The mark of a series in a legend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeriesMark {
    /// A stroke.
    Line,
    /// A filled circle.
    Dot,
    /// Two crossing strokes.
    Cross,
}

/// A line of a chart.
#[derive(Clone, Debug)]
pub struct ChartLine {
    /// The colour of the line.
    pub colour: Colour,
    /// The points that it connects, in units of the axes.
    pub points: Vec<(f64, f64)>,
    /// The width in pixels.
    pub width: u32,
}

/// The width of most lines, in pixels.
pub const THIN_LINE: u32 = 2;
/// The width of a line that stays visible on both sides of another on top of it, in pixels.
pub const WIDE_LINE: u32 = 6;

impl ChartLine {
    /// Creates a line of [`THIN_LINE`]'s width.
    pub fn thin(colour: Colour, points: Vec<(f64, f64)>) -> Self {
        Self { colour, points, width: THIN_LINE }
    }
}

/// Returns the part of an area from this corner on and of this size, in pixels.
pub fn sub_area<'a>(area: &Area<'a>, corner: (i32, i32), size: (i32, i32)) -> Area<'a> {
    area.clone().shrink(corner, (size.0 as u32, size.1 as u32))
}

/// Draws text of this size in pixels.
///
/// # Errors
/// The text cannot be laid out.
pub fn draw_text(area: &Area<'_>, text: &str, at: (i32, i32), size: i32, colour: Colour) -> DrawResult {
    area.draw(&Text::new(text.to_owned(), at, text_style(size, colour)))
}

fn text_style(size: i32, colour: Colour) -> TextStyle<'static> {
    FontDesc::new(FontFamily::SansSerif, f64::from(size), FontStyle::Normal).color(&colour.light)
}

/// Draws lines over each other.
///
/// # Errors
/// The chart cannot be laid out.
pub fn draw_lines(area: &Area<'_>, frame: &ChartConfig<'_>, lines: &[ChartLine]) -> DrawResult {
    let mut chart = build_chart(area, frame)?;
    for line in lines {
        let style = ShapeStyle { color: line.colour.light.to_rgba(), filled: false, stroke_width: line.width };
        chart.draw_series(LineSeries::new(line.points.iter().copied(), style))?;
    }
    Ok(())
}

/// A mark in a chart: its place, colour and form.
pub type Mark = ((f64, f64), Colour, SeriesMark);

/// Draws dots and crosses.
///
/// # Errors
/// The chart cannot be laid out.
pub fn draw_marks(area: &Area<'_>, frame: &ChartConfig<'_>, marks: &[Mark]) -> DrawResult {
    let mut chart = build_chart(area, frame)?;
    let (dots, crosses): (Vec<&Mark>, Vec<&Mark>) = marks.iter().partition(|mark| mark.2 == SeriesMark::Dot);
    chart.draw_series(dots.iter().map(|(at, colour, _)| Circle::new(*at, 2, colour.light.mix(0.75).filled())))?;
    chart.draw_series(crosses.iter().map(|(at, colour, _)| Cross::new(*at, 2, colour.light.stroke_width(1))))?;
    Ok(())
}

fn build_chart<'a, 'b>(area: &'a Area<'b>, frame: &ChartConfig<'_>) -> Result<Chart<'a, 'b>, DrawError> {
    draw_text(area, frame.title, (12, 8), 14, TEXT)?;
    draw_legend(area, (12, 30), frame.legend)?;
    let top = if frame.legend.is_empty() { 34 } else { 52 };
    let (x_most, y_most) = (frame.x_axis.0, frame.y_axis.0);
    let mut chart = ChartBuilder::on(area)
        .margin_top(top)
        .margin_right(18)
        .margin_bottom(6)
        .margin_left(6)
        .x_label_area_size(42)
        .y_label_area_size(62)
        .build_cartesian_2d(0.0..x_most, 0.0..y_most)?;
    chart
        .configure_mesh()
        .light_line_style(GRID.light.mix(0.0))
        .bold_line_style(GRID.light)
        .axis_style(AXIS.light)
        .label_style(text_style(12, MUTED))
        .axis_desc_style(text_style(12, MUTED))
        .x_labels(7)
        .y_labels(5)
        .x_label_formatter(&|value| format_axis_value(*value, x_most))
        .y_label_formatter(&|value| format_axis_value(*value, y_most))
        .x_desc(frame.x_axis.1.as_str())
        .y_desc(frame.y_axis.1.as_str())
        .draw()?;
    Ok(chart)
}

/// Draws the names of series beside their marks, in one line.
///
/// # Errors
/// The chart cannot be laid out.
pub fn draw_legend(area: &Area<'_>, (mut x, y): (i32, i32), entries: &[(&str, Colour, SeriesMark)]) -> DrawResult {
    let style = text_style(12, MUTED).pos(Pos::new(HPos::Left, VPos::Center));
    let middle = y + 6;
    for (name, colour, mark) in entries {
        match mark {
            SeriesMark::Line => {
                area.draw(&PathElement::new([(x, middle), (x + 18, middle)], colour.light.stroke_width(3)))?
            }
            SeriesMark::Dot => area.draw(&Circle::new((x + 9, middle), 4, colour.light.filled()))?,
            SeriesMark::Cross => area.draw(&Cross::new((x + 9, middle), 4, colour.light.stroke_width(2)))?,
        }
        area.draw(&Text::new((*name).to_owned(), (x + 24, middle), style.clone()))?;
        let (width, _) = area.estimate_text_size(name, &style)?;
        x += 24 + width as i32 + 20;
    }
    Ok(())
}

/// Draws a line across the page.
///
/// # Errors
/// The chart cannot be laid out.
pub fn draw_rule(area: &Area<'_>, y: i32, width: i32) -> DrawResult {
    area.draw(&Rectangle::new([(12, y), (width - 12, y + 1)], GRID.light.filled()))
}

/// Formats a number of an axis that ends at `most`.
fn format_axis_value(value: f64, most: f64) -> String {
    let value = if value.abs() < most * 1e-9 { 0.0 } else { value };
    match most {
        most if most >= 20_000.0 => format!("{:.0}k", value / 1000.0),
        most if most >= 8.0 => format!("{value:.0}"),
        most if most >= 0.8 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Returns [`axis_max`] of the heights of some lines.
pub fn lines_max(lines: &[ChartLine], least: f64) -> f64 {
    axis_max(lines.iter().flat_map(|line| line.points.iter().map(|point| point.1)), least)
}

/// Returns a little more than the largest of some numbers and `least`, so that lines don't touch the frame.
pub fn axis_max(numbers: impl IntoIterator<Item = f64>, least: f64) -> f64 {
    numbers.into_iter().fold(least, f64::max) * 1.08
}
