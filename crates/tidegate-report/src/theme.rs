//! The colours of pictures, in light and dark.
//!
//! Series have the colours of M. Okabe and K. Ito, "Color Universal Design", 2008, which people with any of the usual
//! kinds of colour vision can distinguish. On a dark background the darkest of them are lightened. A picture is drawn
//! in light colours. Its style sheet replaces each by its dark counterpart if the reader prefers that, so no two roles
//! may share a light colour.

use plotters::style::RGBColor;

/// A colour, on a white and on a dark background.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Colour {
    /// On white.
    pub light: RGBColor,
    dark: RGBColor,
}

const fn colour(light: u32, dark: u32) -> Colour {
    const fn rgb(hex: u32) -> RGBColor {
        RGBColor((hex >> 16) as u8, (hex >> 8) as u8, hex as u8)
    }
    Colour { light: rgb(light), dark: rgb(dark) }
}

/// The page.
pub const BACKGROUND: Colour = colour(0xff_ffff, 0x14_171c);
/// Titles.
pub const TEXT: Colour = colour(0x1f_2328, 0xe6_e9ee);
/// Other words.
pub const MUTED: Colour = colour(0x59_636e, 0xa3_adb8);
/// Lines behind a chart.
pub const GRID: Colour = colour(0xe4_e7eb, 0x2b_3139);
/// A chart's axes.
pub const AXIS: Colour = colour(0x8c_959f, 0x6b_7580);

/// A series in blue.
pub const BLUE: Colour = colour(0x00_72b2, 0x3f_9fdd);
/// A series in vermillion.
pub const VERMILLION: Colour = colour(0xd5_5e00, 0xf2_7a22);
/// A series in green.
pub const GREEN: Colour = colour(0x00_9e73, 0x1c_c094);
/// A series in orange.
pub const ORANGE: Colour = colour(0xe6_9f00, 0xf0_b429);
/// A series in purple.
pub const PURPLE: Colour = colour(0xcc_79a7, 0xdf_93bd);
/// A series in sky.
pub const SKY: Colour = colour(0x56_b4e9, 0x7c_c8f2);
/// A series in grey.
pub const GREY: Colour = colour(0x7a_7a7a, 0xb4_b4b4);
/// A series in ink.
pub const INK: Colour = colour(0x33_3b45, 0xf4_f6f8);

const ALL: [Colour; 13] =
    [BACKGROUND, TEXT, MUTED, GRID, AXIS, BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, GREY, INK];

/// The colours of strategies in one chart, in order. Further strategies start again from the first.
pub const SERIES: [Colour; 8] = [VERMILLION, BLUE, ORANGE, GREEN, PURPLE, SKY, GREY, INK];

/// Returns the style sheet that makes a picture dark if the reader prefers that.
pub fn style_sheet() -> String {
    let hex = |colour: RGBColor| format!("#{:02X}{:02X}{:02X}", colour.0, colour.1, colour.2);
    let rules: String = ALL
        .iter()
        .map(|Colour { light, dark }| {
            let (light, dark) = (hex(*light), hex(*dark));
            format!("[fill=\"{light}\"]{{fill:{dark}}}[stroke=\"{light}\"]{{stroke:{dark}}}")
        })
        .collect();
    format!("@media (prefers-color-scheme:dark){{{rules}}}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_roles_share_a_light_colour() {
        for (index, one) in ALL.iter().enumerate() {
            assert!(ALL[index + 1..].iter().all(|other| one.light != other.light), "{one:?}");
        }
    }
}
