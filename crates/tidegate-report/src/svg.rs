//! A picture as SVG, for light and dark, and as PNG.

use std::sync::LazyLock;

use plotters::backend::SVGBackend;
use plotters::drawing::IntoDrawingArea;
use plotters::style::{FontStyle, register_font};
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg;

use crate::chart::{Area, DrawError};
use crate::page::escape_xml;
use crate::theme::{BACKGROUND, style_sheet};

/// A free font that measures text and, in a PNG, draws it; see `fonts/README.md`.
const FONT: &[u8] = include_bytes!("../fonts/Roboto-subset.ttf");
/// The width of every picture, in pixels.
pub const WIDTH: i32 = 1200;
/// The largest number of pixels of a PNG, about 256 MB.
const MAX_PIXELS: u64 = 1 << 26;

/// The error of a picture that couldn't be drawn.
#[derive(Debug, thiserror::Error)]
pub enum PictureError {
    /// The chart couldn't be drawn.
    #[error("the picture couldn't be drawn: {0}")]
    Drawing(String),
    /// The report has too many cases and strategies for one PNG.
    #[error("the picture is too large for a PNG; write it as .svg or .html")]
    TooLarge,
}

impl From<DrawError> for PictureError {
    fn from(error: DrawError) -> Self {
        Self::Drawing(error.to_string())
    }
}

/// True if the font is registered for measuring text. A test draws with it, so it always is.
static FONT_REGISTERED: LazyLock<bool> = LazyLock::new(|| register_font("sans-serif", FontStyle::Normal, FONT).is_ok());

/// Returns an SVG of this title and height that follows the reader's preference for light or dark.
///
/// # Errors
/// The picture can't be drawn.
pub fn render_svg(
    title: &str,
    height: i32,
    draw: impl FnOnce(&Area<'_>) -> Result<(), PictureError>,
) -> Result<String, PictureError> {
    if !*FONT_REGISTERED {
        return Err(PictureError::Drawing("its font can't be read".to_owned()));
    }
    let mut drawn = String::new();
    {
        let root = SVGBackend::with_string(&mut drawn, (WIDTH as u32, height as u32)).into_drawing_area();
        root.fill(&BACKGROUND.light)?;
        draw(&root)?;
        root.present()?;
    }
    let (open, rest) = drawn.split_once('>').unwrap_or((&drawn, ""));
    let title = escape_xml(title);
    Ok(format!("{open} role=\"img\"><title>{title}</title><style>{}</style>{rest}", style_sheet()))
}

/// Renders the SVG in light colours as a PNG of twice as many pixels each way, or as many if that is too large.
///
/// # Errors
/// It can't be read, or is too large.
pub fn svg_to_png(svg: &str) -> Result<Vec<u8>, PictureError> {
    let drawing = |error: &dyn std::fmt::Display| PictureError::Drawing(error.to_string());
    let mut options = usvg::Options::default();
    options.fontdb_mut().load_font_data(FONT.to_vec());
    options.fontdb_mut().set_sans_serif_family("Roboto");
    let tree = usvg::Tree::from_str(svg, &options).map_err(|error| drawing(&error))?;
    let size = tree.size().to_int_size();
    let pixels = |scale: u64| u64::from(size.width()) * u64::from(size.height()) * scale * scale;
    let scale = [2_u8, 1].into_iter().find(|scale| pixels(u64::from(*scale)) <= MAX_PIXELS);
    let scale = scale.ok_or(PictureError::TooLarge)?;
    let scaled = |length: u32| length * u32::from(scale);
    let mut pixmap = Pixmap::new(scaled(size.width()), scaled(size.height())).ok_or(PictureError::TooLarge)?;
    resvg::render(&tree, Transform::from_scale(f32::from(scale), f32::from(scale)), &mut pixmap.as_mut());
    pixmap.encode_png().map_err(|error| drawing(&error))
}
