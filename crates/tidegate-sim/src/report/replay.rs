//! What a replay has found, as words, numbers and pictures.

mod grid;
mod json;
mod picture;

use super::html::page;
use super::picture::{PictureError, escaped};
use crate::replay::Findings;

impl Findings {
    /// Tables for a terminal.
    pub fn table(&self) -> String {
        let grids = grid::grids(self);
        let mut text = format!("{}\n", grid::summary(self).join("\n"));
        for grid in grids {
            text.push('\n');
            text.push_str(&grid.text());
        }
        text
    }

    /// All that was found, as JSON.
    pub fn json(&self) -> String {
        json::json(self)
    }

    /// The pictures, light or dark as their reader prefers.
    ///
    /// # Errors
    /// They couldn't be drawn.
    pub fn svg(&self) -> Result<String, PictureError> {
        picture::svg(self)
    }

    /// A page of pictures and tables that needs no network, light or dark as its reader prefers.
    ///
    /// # Errors
    /// The pictures couldn't be drawn.
    pub fn html(&self) -> Result<String, PictureError> {
        let names: Vec<&str> = self.policies.iter().map(|policy| policy.name.as_str()).collect();
        let title = escaped(&format!("Replay of {}", names.join(" and ")));
        let lines: String = grid::summary(self).iter().map(|line| format!("{}<br>", escaped(line))).collect();
        let tables: String = grid::grids(self).iter().map(grid::Grid::html).collect();
        Ok(page(&title, &format!("<p>{lines}</p>{}{tables}", picture::svg(self)?)))
    }
}
