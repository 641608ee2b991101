//! Findings as tables, for a terminal and for an HTML page.

use tidegate_core::Time;
use tidegate_policy::printable;

use crate::{
    ClientFindings, ClientNetwork, Findings, IntervalCounts, PolicyFindings, REFUSED_SHARES, RequestCounts, Timeline,
    format_time,
};
#[cfg(feature = "pictures")]
use tidegate_report::page::escape_xml;
use tidegate_report::table::{align_rows, format_count};

/// The number of intervals in the list of the worst.
const MAX_WORST_INTERVALS: usize = 5;
/// The width of a time line in a terminal, in characters.
const SPARKLINE_WIDTH: usize = 60;
const SPARKLINE_LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A table.
pub(super) struct FindingsTable {
    title: String,
    headers: Vec<String>,
    rows: Vec<Vec<String>>,
    /// The number of columns at the start that hold text, not numbers.
    text_columns: usize,
}

impl FindingsTable {
    fn new(title: impl Into<String>, words: usize, heads: &[&str]) -> Self {
        let heads = heads.iter().map(|head| printable(head).into_owned()).collect();
        Self { title: printable(&title.into()).into_owned(), headers: heads, rows: Vec::new(), text_columns: words }
    }

    /// Adds a row. Cells may hold text of the log or of a file's name, so they are made [`printable`] here.
    fn push_row(&mut self, cells: Vec<String>) {
        self.rows.push(cells.iter().map(|cell| printable(cell).into_owned()).collect());
    }

    pub(super) fn to_text(&self) -> String {
        let heads = Some(&self.headers).filter(|heads| !heads.is_empty());
        let rows: Vec<Vec<String>> = heads.into_iter().chain(&self.rows).cloned().collect();
        let lines: String = align_rows(&rows, self.text_columns).iter().map(|line| format!("  {line}\n")).collect();
        format!("{}\n{lines}", self.title)
    }

    #[cfg(feature = "pictures")]
    pub(super) fn to_html(&self) -> String {
        let align = |column: usize| if column < self.text_columns { " style=\"text-align:left\"" } else { "" };
        let cells = |row: &[String], open: &str, close: &str| -> String {
            let cell =
                |(column, cell): (usize, &String)| format!("<{open}{}>{}</{close}>", align(column), escape_xml(cell));
            row.iter().enumerate().map(cell).collect()
        };
        let rows: String = self.rows.iter().map(|row| format!("<tr>{}</tr>", cells(row, "td", "td"))).collect();
        let head = if self.headers.is_empty() {
            String::new()
        } else {
            format!("<thead><tr>{}</tr></thead>", cells(&self.headers, "th scope=\"col\"", "th"))
        };
        format!("<h2>{}</h2><div><table>{head}<tbody>{rows}</tbody></table></div>", escape_xml(&self.title))
    }
}

/// Returns a summary of the input and the refusals, in a few lines.
pub(super) fn summary_lines(findings: &Findings) -> Vec<String> {
    let input = &findings.input;
    let mut lines = Vec::new();
    let span = match (input.first_time, input.newest_time) {
        (Some(first), Some(newest)) => format!(" from {} to {}", format_time(first), format_time(newest)),
        _ => String::new(),
    };
    lines.push(format!("{} in {}{span}", format_plural(input.requests, "request"), format_plural(input.lines, "line")));
    let mut remarks = Vec::new();
    let mut tell = |number: u64, words: String| {
        if number > 0 {
            remarks.push(format!("{} {words}", format_number(number)));
        }
    };
    tell(input.non_requests, "lines were no requests".to_owned());
    tell(input.broken, "broken".to_owned());
    tell(input.late, format!("late by up to {}, judged at the newest time", input.max_lateness));
    tell(input.too_late, "more than 1 h late, not judged".to_owned());
    tell(input.clock_resets, "times the log's clock went back".to_owned());
    if !remarks.is_empty() {
        lines.push(remarks.join("; "));
    }
    for policy in &findings.policies {
        lines.push(format!(
            "{}: refuses {} of {} ({}), from {} of {}",
            printable(&policy.name),
            format_number(policy.total.refused),
            format_plural(policy.total.requests, "request"),
            format_share(policy.total.refused, policy.total.requests),
            format_number(policy.refused_clients),
            format_plural(policy.clients, "client"),
        ));
    }
    if let Some(changes) = &findings.changes {
        lines.push(format!(
            "refused by both: {}; let through from now on: {}; refused from now on: {}",
            format_number(changes.refused_by_both),
            format_number(changes.only_first),
            format_number(changes.only_second)
        ));
    }
    lines
}

/// Returns all tables, in the order in which they are shown.
pub(super) fn all_tables(findings: &Findings) -> Vec<FindingsTable> {
    let mut grids = change_tables(findings);
    for policy in &findings.policies {
        let of = |what: &str| match findings.policies.len() {
            1 => what.to_owned(),
            _ => format!("{}: {what}", policy.name),
        };
        grids.extend(policy_tables(policy, &of));
    }
    if !findings.input.first_broken.is_empty() {
        let mut broken = FindingsTable::new("broken lines", 2, &[]);
        for (file, line, why) in &findings.input.first_broken {
            broken.push_row(vec![format!("{file}:{line}"), why.to_string()]);
        }
        let more = findings.input.broken - findings.input.first_broken.len() as u64;
        if more > 0 {
            broken.push_row(vec!["…".to_owned(), format!("and {} more", format_number(more))]);
        }
        grids.push(broken);
    }
    grids
}

fn change_tables(findings: &Findings) -> Vec<FindingsTable> {
    let (Some(changes), [first, second]) = (&findings.changes, &*findings.policies) else { return Vec::new() };
    let mut actions = FindingsTable::new("refused, by action", 1, &["action", &first.name, &second.name, "change"]);
    for action in &changes.actions {
        let refused = |count: Option<RequestCounts>| count.map_or(0, |count| count.refused);
        let (before, after) = (refused(action.first), refused(action.second));
        let cell =
            |count: Option<RequestCounts>| count.map_or_else(|| "–".to_owned(), |count| format_number(count.refused));
        let by = i128::from(after) - i128::from(before);
        let change = if by == 0 {
            "0".to_owned()
        } else {
            format!("{}{}", if by > 0 { "+" } else { "−" }, format_number(before.abs_diff(after)))
        };
        actions.push_row(vec![action_name(action.name.as_ref()), cell(action.first), cell(action.second), change]);
    }
    let clients = |title: &str, clients: &[(ClientNetwork, u64)]| {
        let mut grid = FindingsTable::new(title, 1, &["client", "requests"]);
        for (client, requests) in clients {
            grid.push_row(vec![client.to_string(), format_number(*requests)]);
        }
        grid
    };
    let mut grids = vec![actions];
    for (title, list) in
        [("refused from now on", &changes.newly_refused), ("let through from now on", &changes.newly_admitted)]
    {
        if !list.is_empty() {
            grids.push(clients(title, list));
        }
    }
    grids
}

fn policy_tables(policy: &PolicyFindings, title_of: &dyn Fn(&str) -> String) -> Vec<FindingsTable> {
    let mut grids = Vec::new();
    let mut actions = FindingsTable::new(title_of("by action"), 1, &["action", "requests", "refused", "share"]);
    for action in &policy.actions {
        let RequestCounts { requests, refused } = action.counts;
        let mut name = action_name(action.name.as_ref());
        if action.shadow {
            name.push_str(" (shadow)");
        }
        actions.push_row(vec![name, format_number(requests), format_number(refused), format_share(refused, requests)]);
    }
    grids.push(actions);
    grids.push(refusal_reasons_table(policy, title_of));
    grids.extend(limit_values_table(policy, title_of));
    grids.extend(worst_intervals_table(&policy.timeline, title_of));
    grids.extend(clients_table(policy, &policy.most_refused, &title_of("most refused clients")));
    for limit in policy.limits.iter().filter(|limit| !limit.keys.is_empty()) {
        let mut keys = FindingsTable::new(
            title_of(&format!("most refused keys of {}", limit.name)),
            1,
            &[&limit.counted_by, "refused"],
        );
        for key in &limit.keys {
            keys.push_row(vec![key.key.clone(), format_number(key.refused)]);
        }
        grids.push(keys);
    }
    if !policy.largest_never_refused.is_empty() {
        let mut innocent =
            FindingsTable::new(title_of("largest clients without a refusal"), 1, &["client", "requests"]);
        for ClientFindings { client, stats: fate } in &policy.largest_never_refused {
            innocent.push_row(vec![client.to_string(), format_number(fate.admitted.into())]);
        }
        grids.push(innocent);
    }
    if !policy.notes.is_empty() {
        let mut notes = FindingsTable::new(title_of("not covered"), 1, &[]);
        for note in &policy.notes {
            notes.push_row(vec![note.clone()]);
        }
        grids.push(notes);
    }
    grids
}

/// Returns the refusals of each limit, by reason.
fn refusal_reasons_table(policy: &PolicyFindings, of: &dyn Fn(&str) -> String) -> FindingsTable {
    let mut grid = FindingsTable::new(of("by limit"), 3, &["limit", "allows", "by", "full", "blocked", "in shadow"]);
    for limit in &policy.limits {
        let refusals = limit.refusals;
        let numbers = [refusals.by_limit, refusals.by_block, refusals.in_shadow].map(format_number);
        grid.push_row(
            [limit.name.clone(), limit.quantity.clone(), limit.counted_by.clone()].into_iter().chain(numbers).collect(),
        );
    }
    if policy.refused_by_deny_list > 0 {
        grid.push_row(vec![
            "deny list".to_owned(),
            String::new(),
            String::new(),
            format_number(policy.refused_by_deny_list),
        ]);
    }
    grid
}

/// Returns the effect of other values of each limit.
fn limit_values_table(policy: &PolicyFindings, of: &dyn Fn(&str) -> String) -> Option<FindingsTable> {
    let shares = REFUSED_SHARES.map(|share| format!("refuses {}", format_percent(share)));
    let heads: Vec<&str> = ["limit", "allows", "refuses now"]
        .into_iter()
        .chain(shares.iter().map(String::as_str))
        .chain(["highest use"])
        .collect();
    let mut grid =
        FindingsTable::new(of("other values of the limits, by the share of clients that they refuse"), 2, &heads);
    for limit in &policy.limits {
        let (Some(peaks), Some(now)) = (&limit.peaks, limit.current_refused_share()) else { continue };
        if limit.values.is_empty() {
            continue;
        }
        let about = if peaks.is_complete() { "" } else { "about " };
        let mut row = vec![
            limit.name.clone(),
            limit.quantity.clone(),
            format!("{} of {about}{}", format_percent(now), format_number(peaks.key_count())),
        ];
        row.extend(limit.values.iter().map(|value| value.quantity.clone()));
        row.push(format_number(peaks.highest()));
        grid.push_row(row);
    }
    (!grid.rows.is_empty()).then_some(grid)
}

fn worst_intervals_table(timeline: &Timeline, of: &dyn Fn(&str) -> String) -> Option<FindingsTable> {
    let intervals = timeline.intervals();
    let begins = |place: usize| {
        format_time(Time::from_micros(timeline.start().as_micros() + place as u64 * timeline.width().as_micros()))
    };
    let mut worst: Vec<(u64, usize)> = intervals.iter().map(IntervalCounts::refused).zip(0..).collect();
    worst.retain(|(refused, _)| *refused > 0);
    worst.sort_by_key(|(refused, place)| (std::cmp::Reverse(*refused), *place));
    worst.truncate(MAX_WORST_INTERVALS);
    if worst.is_empty() {
        return None;
    }
    let title = format!("refusals over time: {}", sparkline(intervals));
    let interval = format!("{} from", timeline.width());
    let mut grid = FindingsTable::new(of(&title), 1, &[&interval, "requests", "refused", "share"]);
    for (refused, place) in worst {
        let requests = intervals[place].requests();
        grid.push_row(vec![
            begins(place),
            format_number(requests),
            format_number(refused),
            format_share(refused, requests),
        ]);
    }
    Some(grid)
}

/// Returns the refusals over time as one line of text.
fn sparkline(intervals: &[IntervalCounts]) -> String {
    let each = intervals.len().div_ceil(SPARKLINE_WIDTH).max(1);
    let refused: Vec<u64> = intervals.chunks(each).map(|some| some.iter().map(IntervalCounts::refused).sum()).collect();
    let most = refused.iter().copied().max().unwrap_or(0).max(1);
    let level = |refused: u64| (refused * SPARKLINE_LEVELS.len() as u64).div_ceil(most).saturating_sub(1) as usize;
    refused.into_iter().map(|refused| if refused == 0 { ' ' } else { SPARKLINE_LEVELS[level(refused)] }).collect()
}

fn clients_table(policy: &PolicyFindings, clients: &[ClientFindings], title: &str) -> Option<FindingsTable> {
    let mut grid = FindingsTable::new(title, 1, &["client", "requests", "refused", "share", "first", "last", "by"]);
    for ClientFindings { client, stats: fate } in clients {
        let (refused, requests) = (u64::from(fate.refused), u64::from(fate.refused) + u64::from(fate.admitted));
        let mut row =
            vec![client.to_string(), format_number(requests), format_number(refused), format_share(refused, requests)];
        row.extend([
            format_time(fate.first_refused_at),
            format_time(fate.last_refused_at),
            policy.limit_name(fate.last_limit).to_owned(),
        ]);
        grid.push_row(row);
    }
    (!grid.rows.is_empty()).then_some(grid)
}

fn action_name(action: Option<&String>) -> String {
    action.map_or_else(|| "(no action)".to_owned(), Clone::clone)
}

pub(super) fn format_number(number: u64) -> String {
    format_count(number as f64)
}

fn format_plural(number: u64, what: &str) -> String {
    format!("{} {what}{}", format_number(number), if number == 1 { "" } else { "s" })
}

fn format_share(part: u64, whole: u64) -> String {
    format_percent(part as f64 / whole.max(1) as f64)
}

/// Formats a share in percent, with two significant digits if it is small.
pub(super) fn format_percent(share: f64) -> String {
    let percent = share * 100.0;
    match percent {
        0.0 => "0 %".to_owned(),
        percent if percent >= 10.0 => format!("{percent:.1} %"),
        percent if percent >= 1.0 => format!("{} %", trim_zeros(format!("{percent:.1}"))),
        percent if percent >= 0.01 => format!("{} %", trim_zeros(format!("{percent:.2}"))),
        _ => "under 0.01 %".to_owned(),
    }
}

fn trim_zeros(number: String) -> String {
    number.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_have_suitable_precision() {
        for (share, text) in [
            (0.0, "0 %"),
            (0.00001, "under 0.01 %"),
            (0.0001, "0.01 %"),
            (0.001, "0.1 %"),
            (0.0123, "1.2 %"),
            (0.01, "1 %"),
            (0.5, "50.0 %"),
            (1.0, "100.0 %"),
        ] {
            assert_eq!(format_percent(share), text);
        }
    }

    #[test]
    fn sparklines_show_where_refusals_happened() {
        let refused = |by_limit| IntervalCounts { refused_by_limit: by_limit, ..IntervalCounts::default() };
        assert_eq!(sparkline(&[refused(0), refused(1), refused(8), refused(4), refused(0)]), " ▁█▄ ");
        assert_eq!(sparkline(&[refused(3); 600]), "█".repeat(60));
        assert_eq!(sparkline(&[]), "");
    }
}
