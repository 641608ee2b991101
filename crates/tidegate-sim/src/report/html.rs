//! A report as one page that needs no network.

use tidegate_report::page::escape_xml;
use tidegate_report::page::html_page;
use tidegate_report::svg::PictureError;

use super::picture::{Heading, report_svg};
use super::table::{COLUMNS, load_lines};
use super::{Report, runs_by_case};

pub(super) fn to_html(report: &Report) -> Result<String, PictureError> {
    let title = escape_xml(&report.title);
    let about = escape_xml(&report.about);
    let heads: String = COLUMNS
        .iter()
        .map(|column| format!("<th scope=\"col\" title=\"{}\">{}</th>", escape_xml(column.meaning), column.title))
        .collect();
    let mut tables = String::new();
    for runs in runs_by_case(report) {
        let case = runs.first().map_or("", |run| run.case.as_str());
        let case = if case.is_empty() { "strategy" } else { case };
        tables.push_str(&format!(
            "<div><table><thead><tr><th scope=\"col\">{}</th>{heads}</tr></thead><tbody>",
            escape_xml(case)
        ));
        for run in runs {
            let cells: String =
                COLUMNS.iter().map(|column| format!("<td>{}</td>", escape_xml(&column.cell(run)))).collect();
            tables.push_str(&format!("<tr><td>{}</td>{cells}</tr>", escape_xml(&run.strategy)));
            for line in load_lines(run) {
                let columns = COLUMNS.len() + 1;
                tables.push_str(&format!("<tr><td colspan=\"{columns}\">{}</td></tr>", escape_xml(&line)));
            }
        }
        tables.push_str("</tbody></table></div>");
    }
    let picture = report_svg(report, Heading::Omitted)?;
    let foot = format!("seed {}; pictures show the first trial", report.seed);
    Ok(html_page(&title, &format!("<p>{about}</p>{tables}{picture}<p>{foot}</p>")))
}
