//! The findings of a replay, as text, numbers and pictures.

mod json;
#[cfg(feature = "pictures")]
mod picture;
mod tables;

use crate::Findings;
#[cfg(feature = "pictures")]
use tidegate_report::page::{escape_xml, html_page};
#[cfg(feature = "pictures")]
use tidegate_report::svg::PictureError;

impl Findings {
    /// Returns tables for a terminal.
    pub fn table(&self) -> String {
        let grids = tables::all_tables(self);
        let mut text = format!("{}\n", tables::summary_lines(self).join("\n"));
        for grid in grids {
            text.push('\n');
            text.push_str(&grid.to_text());
        }
        text
    }

    /// Returns all findings as JSON.
    pub fn json(&self) -> String {
        json::findings_json(self)
    }

    /// Returns the pictures as SVG, light or dark as their reader prefers.
    ///
    /// # Errors
    /// The pictures couldn't be drawn.
    #[cfg(feature = "pictures")]
    pub fn svg(&self) -> Result<String, PictureError> {
        picture::findings_svg(self)
    }

    /// Returns an HTML page with pictures and tables. It needs no network, and is light or dark as its reader prefers.
    ///
    /// # Errors
    /// The pictures couldn't be drawn.
    #[cfg(feature = "pictures")]
    pub fn html(&self) -> Result<String, PictureError> {
        let names: Vec<&str> = self.policies.iter().map(|policy| policy.name.as_str()).collect();
        let title = escape_xml(&format!("Replay of {}", names.join(" and ")));
        let lines: String =
            tables::summary_lines(self).iter().map(|line| format!("{}<br>", escape_xml(line))).collect();
        let tables: String = tables::all_tables(self).iter().map(tables::FindingsTable::to_html).collect();
        Ok(html_page(&title, &format!("<p>{lines}</p>{}{tables}", picture::findings_svg(self)?)))
    }
}
