//! The findings of a replay, as text, numbers and pictures.

mod json;
#[cfg(feature = "pictures")]
mod picture;
mod tables;

pub use self::tables::{format_number, format_percent, format_plural};
use crate::Findings;
#[cfg(feature = "pictures")]
use tidegate_report::page::{escape_xml, html_page};
#[cfg(feature = "pictures")]
use tidegate_report::svg::PictureError;

impl Findings {
    /// Returns tables for a terminal.
    pub fn table(&self) -> String {
        let tables: String = tables::all_tables(self).iter().map(|table| format!("\n{}", table.to_text())).collect();
        format!("{}\n{tables}", tables::summary_lines(self).join("\n"))
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
        Ok(html_page(&title, &format!("<p>{lines}</p>{}{tables}", self.svg()?)))
    }
}
