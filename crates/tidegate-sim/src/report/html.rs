//! A report as one page that needs no network.

use tidegate_report::page::{escape_xml, html_page};
use tidegate_report::svg::PictureError;

use super::Report;
use super::table::{COLUMNS, Column, case_title, load_lines};

impl Report {
    /// Returns an HTML page with a table and pictures. It needs no network, and is light or dark as its reader prefers.
    ///
    /// # Errors
    /// The pictures couldn't be drawn.
    pub fn html(&self) -> Result<String, PictureError> {
        let head =
            |(title, meaning, _): &Column| format!("<th scope=\"col\" title=\"{}\">{title}</th>", escape_xml(meaning));
        let heads: String = COLUMNS.iter().map(head).collect();
        let mut tables = String::new();
        for runs in self.runs_by_case() {
            tables.push_str(&format!(
                "<div><table><thead><tr><th scope=\"col\">{}</th>{heads}</tr></thead><tbody>",
                escape_xml(case_title(runs))
            ));
            for run in runs {
                let cell = |(.., cell): &Column| format!("<td>{}</td>", escape_xml(&cell(&run.summary)));
                let cells: String = COLUMNS.iter().map(cell).collect();
                tables.push_str(&format!("<tr><td>{}</td>{cells}</tr>", escape_xml(&run.strategy)));
                for line in load_lines(run) {
                    let columns = COLUMNS.len() + 1;
                    tables.push_str(&format!("<tr><td colspan=\"{columns}\">{}</td></tr>", escape_xml(&line)));
                }
            }
            tables.push_str("</tbody></table></div>");
        }
        let (title, about) = (escape_xml(&self.title), escape_xml(&self.about));
        let picture = self.render_svg(0)?;
        let foot = format!("seed {}; pictures show the first trial", self.seed);
        Ok(html_page(&title, &format!("<p>{about}</p>{tables}{picture}<p>{foot}</p>")))
    }
}
