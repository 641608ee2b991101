//! A report as pictures: an SVG for light and dark, and a PNG of it.

use std::sync::LazyLock;

use plotters::backend::SVGBackend;
use plotters::drawing::IntoDrawingArea;
use plotters::element::Text;
use plotters::style::{FontStyle, register_font};
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg;

use super::chart::{self, Area, DrawError, Frame, Line, Mark, THIN, Unit, headroom, text};
use super::theme::{BLUE, Colour, GREEN, GREY, GROUND, MUTED, ORANGE, SERIES, TEXT, VERMILLION, style_sheet};
use super::{Report, Run};
use crate::tally::{Bucket, End};

/// A free font, by which text is measured and, in a PNG, drawn; see `fonts/README.md`.
const FONT: &[u8] = include_bytes!("../../fonts/Roboto-subset.ttf");
pub(super) const WIDTH: i32 = 1200;
const HEAD: i32 = 78;
const CASE_NAME: i32 = 30;
const CASE_HEAD: i32 = 40;
const OVERVIEW: i32 = 250;
const ROW: i32 = 250;
/// The most points of a line: buckets are put together until there are no more.
const LINE_POINTS: usize = 64;
/// The most calls in one chart of delays.
const MARKS: usize = 1200;
/// The most pixels of a PNG, some 256 MB.
const MAX_PIXELS: u64 = 1 << 26;

/// Why a picture couldn't be drawn.
#[derive(Debug, thiserror::Error)]
pub enum PictureError {
    /// The chart couldn't be laid out.
    #[error("the picture couldn't be drawn: {0}")]
    Drawing(String),
    /// It has too many cases and strategies for one PNG.
    #[error("the picture is too large for a PNG; write it as .svg or .html")]
    TooLarge,
}

impl From<DrawError> for PictureError {
    fn from(error: DrawError) -> Self {
        Self::Drawing(error.to_string())
    }
}

/// Whether the font is there for measuring text. It always is: a test draws with it.
static MEASURED: LazyLock<bool> = LazyLock::new(|| register_font("sans-serif", FontStyle::Normal, FONT).is_ok());

/// Whether a picture says itself what it shows, or stands where that is said already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heading {
    Own,
    Elsewhere,
}

/// The whole report as one SVG that follows the reader's preference for light or dark.
pub(super) fn svg(report: &Report, heading: Heading) -> Result<String, PictureError> {
    let cases = cases(report);
    let head = if heading == Heading::Own { HEAD } else { 0 };
    let named = |runs: &&&[Run]| runs.first().is_some_and(|run| !run.case.is_empty());
    let head_of_names = CASE_NAME * cases.iter().filter(named).count() as i32;
    let height = head
        + head_of_names
        + cases.iter().map(|runs| CASE_HEAD + OVERVIEW + ROW * runs.len() as i32).sum::<i32>()
        + 12;
    let draw = |root: &Area<'_>| {
        if heading == Heading::Own {
            root.draw(&Text::new(report.title.clone(), (12, 12), text(24, TEXT)))?;
            root.draw(&Text::new(report.about.clone(), (12, 48), text(14, MUTED)))?;
        }
        let mut top = head;
        for runs in cases {
            case(root, runs, &mut top)?;
        }
        Ok(())
    };
    drawing(&report.title, height, draw)
}

/// An SVG of this title and height that follows the reader's preference for light or dark.
pub(super) fn drawing(
    title: &str,
    height: i32,
    draw: impl FnOnce(&Area<'_>) -> Result<(), PictureError>,
) -> Result<String, PictureError> {
    if !*MEASURED {
        return Err(PictureError::Drawing("its font can't be read".to_owned()));
    }
    let mut drawn = String::new();
    {
        let root = SVGBackend::with_string(&mut drawn, (WIDTH as u32, height as u32)).into_drawing_area();
        root.fill(&GROUND.light)?;
        draw(&root)?;
        root.present()?;
    }
    let (open, rest) = drawn.split_once('>').unwrap_or((&drawn, ""));
    let title = escaped(title);
    Ok(format!("{open} role=\"img\"><title>{title}</title><style>{}</style>{rest}", style_sheet()))
}

/// The same, in light colours, as a PNG of twice as many pixels each way.
pub(super) fn png(report: &Report) -> Result<Vec<u8>, PictureError> {
    let drawing = |error: &dyn std::fmt::Display| PictureError::Drawing(error.to_string());
    let mut options = usvg::Options::default();
    options.fontdb_mut().load_font_data(FONT.to_vec());
    options.fontdb_mut().set_sans_serif_family("Roboto");
    let tree = usvg::Tree::from_str(&svg(report, Heading::Own)?, &options).map_err(|error| drawing(&error))?;
    let size = tree.size().to_int_size();
    let pixels = |scale: u64| u64::from(size.width()) * u64::from(size.height()) * scale * scale;
    let scale = [2_u8, 1].into_iter().find(|scale| pixels(u64::from(*scale)) <= MAX_PIXELS);
    let scale = scale.ok_or(PictureError::TooLarge)?;
    let scaled = |length: u32| length * u32::from(scale);
    let mut pixmap = Pixmap::new(scaled(size.width()), scaled(size.height())).ok_or(PictureError::TooLarge)?;
    resvg::render(&tree, Transform::from_scale(f32::from(scale), f32::from(scale)), &mut pixmap.as_mut());
    pixmap.encode_png().map_err(|error| drawing(&error))
}

/// The runs of each case.
fn cases(report: &Report) -> Vec<&[Run]> {
    report.runs.chunk_by(|one, other| one.case == other.case).collect()
}

fn case(root: &Area<'_>, runs: &[Run], top: &mut i32) -> Result<(), PictureError> {
    chart::rule(root, *top, WIDTH)?;
    let name = runs.first().map_or("", |run| run.case.as_str());
    if !name.is_empty() {
        root.draw(&Text::new(name.to_owned(), (12, *top + 12), text(18, TEXT)))?;
        *top += CASE_NAME;
    }
    let colours = || SERIES.into_iter().cycle();
    let legend: Vec<_> =
        runs.iter().zip(colours()).map(|(run, colour)| (run.strategy.as_str(), colour, Mark::Line)).collect();
    chart::legend(root, (12, *top + 14), &legend)?;
    *top += CASE_HEAD;
    overview(&root.clone().shrink((0, *top), (WIDTH as u32, OVERVIEW as u32)), runs)?;
    *top += OVERVIEW;
    for run in runs {
        row(&root.clone().shrink((0, *top), (WIDTH as u32, ROW as u32)), run)?;
        *top += ROW;
    }
    Ok(())
}

/// All strategies over each other: what succeeds, what waits, what is amplified.
fn overview(area: &Area<'_>, runs: &[Run]) -> Result<(), PictureError> {
    let longest = runs.iter().map(|run| secs(run.tally.last_end())).fold(1e-3, f64::max);
    let unit = Unit::of_time(longest);
    let series = |of: &dyn Fn(&Bucket, f64) -> f64| -> Vec<Line> {
        let line = |(run, colour): (&Run, Colour)| Line { colour, width: THIN, points: points(run, unit, of) };
        runs.iter().zip(SERIES.into_iter().cycle()).map(line).collect()
    };
    let charts: [(&str, &str, Vec<Line>); 3] = [
        ("Calls that succeed", "calls per second", series(&|bucket, width| bucket.succeeded as f64 / width)),
        (
            "Queue: waiting at clients, and at the service",
            "calls",
            series(&|bucket, _| f64::from(bucket.waiting + bucket.queue + bucket.working)),
        ),
        (
            "Amplification: attempts for each call so far",
            "attempts per call",
            runs.iter().zip(SERIES.into_iter().cycle()).map(|(run, colour)| amplification(run, colour, unit)).collect(),
        ),
    ];
    let third = WIDTH / 3;
    for (index, (title, label, lines)) in charts.into_iter().enumerate() {
        let part = area.clone().shrink((index as i32 * third, 0), (third as u32, OVERVIEW as u32));
        let most = headroom(lines.iter().flat_map(|line| line.points.iter().map(|point| point.1)), 1.0);
        let frame = Frame {
            title,
            x: (longest / unit.size, format!("time ({})", unit.name)),
            y: (most, label.to_owned()),
            legend: &[],
        };
        chart::lines(&part, &frame, &lines)?;
    }
    Ok(())
}

/// One strategy: what its calls and requests come to, and how long each call takes.
fn row(area: &Area<'_>, run: &Run) -> Result<(), PictureError> {
    let longest = secs(run.tally.last_end()).max(1e-3);
    let unit = Unit::of_time(longest);
    let time = (longest / unit.size, format!("time ({})", unit.name));
    let half = WIDTH / 2;
    type Of = fn(&Bucket) -> u64;
    let rates: [(&str, Colour, Of); 4] = [
        ("offered", GREY, |bucket| bucket.offered),
        ("admitted by the service", BLUE, |bucket| bucket.admitted),
        ("refused", ORANGE, |bucket| bucket.throttled + bucket.declined),
        ("succeeded", GREEN, |bucket| bucket.succeeded),
    ];
    let legend = rates.map(|(name, colour, _)| (name, colour, Mark::Line));
    let lines: Vec<Line> = rates
        .iter()
        .map(|(_, colour, of)| Line {
            colour: *colour,
            width: THIN,
            points: points(run, unit, |bucket: &Bucket, width| of(bucket) as f64 / width),
        })
        .collect();
    let most = headroom(lines.iter().flat_map(|line| line.points.iter().map(|point| point.1)), 1.0);
    let title = format!("{}: calls and requests", run.strategy);
    let frame = Frame { title: &title, x: time.clone(), y: (most, "per second".to_owned()), legend: &legend };
    chart::lines(&area.clone().shrink((0, 0), (half as u32, ROW as u32)), &frame, &lines)?;

    let kept = run.tally.points();
    let sparse = kept.len().div_ceil(MARKS).max(1);
    let shown: Vec<_> = kept.iter().step_by(sparse).copied().collect();
    let slowest = shown.iter().map(|point| secs(point.delay)).fold(1e-3, f64::max);
    let delays = Unit::of_time(slowest);
    let legend =
        [("succeeded", GREEN, Mark::Dot), ("failed", VERMILLION, Mark::Cross), ("refused", ORANGE, Mark::Cross)];
    let title = format!("{}: delay of each call", run.strategy);
    let label = format!("delay ({})", delays.name);
    let frame = Frame { title: &title, x: time, y: (headroom([slowest / delays.size], 0.0), label), legend: &legend };
    let part = area.clone().shrink((half, 0), (half as u32, ROW as u32));
    chart::calls(&part, &frame, &shown, (unit, delays), |point| match point.end {
        End::Succeeded => (GREEN, Mark::Dot),
        End::Failed => (VERMILLION, Mark::Cross),
        End::Refused | End::Declined => (ORANGE, Mark::Cross),
    })?;
    Ok(())
}

/// How many attempts there have been for each call that has begun.
fn amplification(run: &Run, colour: Colour, unit: Unit) -> Line {
    let (mut offered, mut attempts) = (0_u64, 0_u64);
    let so_far = |bucket: &Bucket, _: f64| {
        offered += bucket.offered;
        attempts += bucket.attempts;
        attempts as f64 / offered.max(1) as f64
    };
    Line { colour, width: THIN, points: points(run, unit, so_far) }
}

/// A number of each bucket, at the bucket's middle; `of` is told its width in seconds.
fn points(run: &Run, unit: Unit, mut of: impl FnMut(&Bucket, f64) -> f64) -> Vec<(f64, f64)> {
    let (buckets, width) = run.tally.coarse(LINE_POINTS);
    let (width, end) = (secs(width), secs(run.tally.last_end()));
    let place = |(index, bucket): (usize, &Bucket)| {
        let from = index as f64 * width;
        let length = (end - from).min(width);
        // Of the last, the run's end may leave too little for a rate.
        (length * 2.0 >= width || index == 0).then(|| ((from + length / 2.0) / unit.size, of(bucket, length.max(1e-6))))
    };
    buckets.iter().enumerate().filter_map(place).collect()
}

fn secs(span: tidegate_core::Span) -> f64 {
    span.as_micros() as f64 / 1e6
}

/// Text for XML.
pub(super) fn escaped(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut escaped, letter| {
        match letter {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
        escaped
    })
}
