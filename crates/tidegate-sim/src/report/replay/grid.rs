//! Findings as tables, for a terminal and for a page.

use tidegate_core::Time;
use tidegate_policy::printable;

use crate::replay::{Client, ClientFindings, Count, Findings, Interval, PolicyFindings, SHARES, Timeline, shown};
use crate::report::picture::escaped;
use crate::report::table::count as count_of;

/// How many intervals the list of the worst shows.
const WORST: usize = 5;
/// How many characters wide a line of time is in a terminal.
const SPARKS: usize = 60;
const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A table.
pub(super) struct Grid {
    title: String,
    heads: Vec<String>,
    rows: Vec<Vec<String>>,
    /// How many columns at the start are words, and not numbers.
    words: usize,
}

impl Grid {
    fn new(title: impl Into<String>, words: usize, heads: &[&str]) -> Self {
        let heads = heads.iter().map(|head| printable(head).into_owned()).collect();
        Self { title: printable(&title.into()).into_owned(), heads, rows: Vec::new(), words }
    }

    /// Adds a row. Cells may hold what the log or a file's name says, so they are made [`printable`] here.
    fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells.iter().map(|cell| printable(cell).into_owned()).collect());
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!("{}\n", self.title);
        let all = || std::iter::once(&self.heads).filter(|heads| !heads.is_empty()).chain(&self.rows);
        let columns = all().map(Vec::len).max().unwrap_or(0);
        let width =
            |column: usize| all().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in all() {
            let mut line = String::from(" ");
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                line.push(' ');
                line.push_str(&if column < self.words { format!("{cell:width$}") } else { format!("{cell:>width$}") });
                line.push(' ');
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }

    pub(super) fn html(&self) -> String {
        let align = |column: usize| if column < self.words { " style=\"text-align:left\"" } else { "" };
        let cells = |row: &[String], open: &str, close: &str| -> String {
            let cell =
                |(column, cell): (usize, &String)| format!("<{open}{}>{}</{close}>", align(column), escaped(cell));
            row.iter().enumerate().map(cell).collect()
        };
        let rows: String = self.rows.iter().map(|row| format!("<tr>{}</tr>", cells(row, "td", "td"))).collect();
        let head = if self.heads.is_empty() {
            String::new()
        } else {
            format!("<thead><tr>{}</tr></thead>", cells(&self.heads, "th scope=\"col\"", "th"))
        };
        format!("<h2>{}</h2><div><table>{head}<tbody>{rows}</tbody></table></div>", escaped(&self.title))
    }
}

/// What was read and what would come of it, in a few lines.
pub(super) fn summary(findings: &Findings) -> Vec<String> {
    let input = &findings.input;
    let mut lines = Vec::new();
    let span = match (input.first, input.newest) {
        (Some(first), Some(newest)) => format!(" from {} to {}", shown(first), shown(newest)),
        _ => String::new(),
    };
    lines.push(format!("{} in {}{span}", several(input.requests, "request"), several(input.lines, "line")));
    let mut aside = Vec::new();
    let mut tell = |number: u64, words: String| {
        if number > 0 {
            aside.push(format!("{} {words}", number_of(number)));
        }
    };
    tell(input.others, "lines were no requests".to_owned());
    tell(input.broken, "broken".to_owned());
    tell(input.late, format!("late by up to {}, judged at the newest time", input.latest_by));
    tell(input.too_late, "more than 1 h late, not judged".to_owned());
    tell(input.turns, "times the log's clock went back".to_owned());
    if !aside.is_empty() {
        lines.push(aside.join("; "));
    }
    for policy in &findings.policies {
        lines.push(format!(
            "{}: refuses {} of {} ({}), from {} of {}",
            printable(&policy.name),
            number_of(policy.total.refused),
            several(policy.total.requests, "request"),
            share(policy.total.refused, policy.total.requests),
            number_of(policy.refused_clients),
            several(policy.clients, "client"),
        ));
    }
    if let Some(changes) = &findings.changes {
        lines.push(format!(
            "refused by both: {}; let through from now on: {}; refused from now on: {}",
            number_of(changes.refused_by_both),
            number_of(changes.only_first),
            number_of(changes.only_second)
        ));
    }
    lines
}

/// All tables, in the order in which they are read.
pub(super) fn grids(findings: &Findings) -> Vec<Grid> {
    let mut grids = changes(findings);
    for policy in &findings.policies {
        let of = |what: &str| match findings.policies.len() {
            1 => what.to_owned(),
            _ => format!("{}: {what}", policy.name),
        };
        grids.extend(of_policy(policy, &of));
    }
    if !findings.input.first_broken.is_empty() {
        let mut broken = Grid::new("broken lines", 2, &[]);
        for (file, line, why) in &findings.input.first_broken {
            broken.row(vec![format!("{file}:{line}"), why.to_string()]);
        }
        let more = findings.input.broken - findings.input.first_broken.len() as u64;
        if more > 0 {
            broken.row(vec!["…".to_owned(), format!("and {} more", number_of(more))]);
        }
        grids.push(broken);
    }
    grids
}

fn changes(findings: &Findings) -> Vec<Grid> {
    let (Some(changes), [first, second]) = (&findings.changes, &*findings.policies) else { return Vec::new() };
    let mut actions = Grid::new("refused, by action", 1, &["action", &first.name, &second.name, "change"]);
    for action in &changes.actions {
        let refused = |count: Option<Count>| count.map_or(0, |count| count.refused);
        let (before, after) = (refused(action.first), refused(action.second));
        let cell = |count: Option<Count>| count.map_or_else(|| "–".to_owned(), |count| number_of(count.refused));
        let by = i128::from(after) - i128::from(before);
        let change = if by == 0 {
            "0".to_owned()
        } else {
            format!("{}{}", if by > 0 { "+" } else { "−" }, number_of(before.abs_diff(after)))
        };
        actions.row(vec![name_of(action.name.as_ref()), cell(action.first), cell(action.second), change]);
    }
    let clients = |title: &str, clients: &[(Client, u64)]| {
        let mut grid = Grid::new(title, 1, &["client", "requests"]);
        for (client, requests) in clients {
            grid.row(vec![client.to_string(), number_of(*requests)]);
        }
        grid
    };
    let mut grids = vec![actions];
    for (title, list) in [("refused from now on", &changes.struck), ("let through from now on", &changes.relieved)] {
        if !list.is_empty() {
            grids.push(clients(title, list));
        }
    }
    grids
}

fn of_policy(policy: &PolicyFindings, of: &dyn Fn(&str) -> String) -> Vec<Grid> {
    let mut grids = Vec::new();
    let mut actions = Grid::new(of("what"), 1, &["action", "requests", "refused", "share"]);
    for action in &policy.actions {
        let Count { requests, refused } = action.count;
        let mut name = name_of(action.name.as_ref());
        if action.shadow {
            name.push_str(" (shadow)");
        }
        actions.row(vec![name, number_of(requests), number_of(refused), share(refused, requests)]);
    }
    grids.push(actions);
    grids.push(why(policy, of));
    grids.extend(values(policy, of));
    grids.extend(when(&policy.timeline, of));
    grids.extend(who(policy, &policy.most_refused, &of("who: the most refused clients")));
    for limit in policy.limits.iter().filter(|limit| !limit.keys.is_empty()) {
        let mut keys =
            Grid::new(of(&format!("who: the most refused under {}", limit.name)), 1, &[&limit.by, "refused"]);
        for key in &limit.keys {
            keys.row(vec![key.key.clone(), number_of(key.refused)]);
        }
        grids.push(keys);
    }
    if !policy.innocent.is_empty() {
        let mut innocent = Grid::new(of("the largest clients that were never refused"), 1, &["client", "requests"]);
        for ClientFindings { client, fate } in &policy.innocent {
            innocent.row(vec![client.to_string(), number_of(fate.admitted.into())]);
        }
        grids.push(innocent);
    }
    if !policy.notes.is_empty() {
        let mut notes = Grid::new(of("what this doesn't show"), 1, &[]);
        for note in &policy.notes {
            notes.row(vec![note.clone()]);
        }
        grids.push(notes);
    }
    grids
}

/// What each limit refused, for which reason.
fn why(policy: &PolicyFindings, of: &dyn Fn(&str) -> String) -> Grid {
    let mut grid = Grid::new(of("why"), 3, &["limit", "allows", "by", "full", "blocked", "in shadow"]);
    for limit in &policy.limits {
        let refusals = limit.refusals;
        let numbers = [refusals.full, refusals.blocked, refusals.shadow].map(number_of);
        grid.row([limit.name.clone(), limit.quantity.clone(), limit.by.clone()].into_iter().chain(numbers).collect());
    }
    if policy.by_list > 0 {
        grid.row(vec!["deny list".to_owned(), String::new(), String::new(), number_of(policy.by_list)]);
    }
    grid
}

/// What other values of each limit would do.
fn values(policy: &PolicyFindings, of: &dyn Fn(&str) -> String) -> Option<Grid> {
    let shares = SHARES.map(|share| format!("refuses {}", percent(share)));
    let heads: Vec<&str> = ["limit", "allows", "refuses now"]
        .into_iter()
        .chain(shares.iter().map(String::as_str))
        .chain(["highest use"])
        .collect();
    let mut grid = Grid::new(of("values: what would refuse which share of clients"), 2, &heads);
    for limit in &policy.limits {
        let (Some(peaks), Some(now)) = (&limit.peaks, limit.refused_now()) else { continue };
        if limit.values.is_empty() {
            continue;
        }
        let about = if peaks.is_whole() { "" } else { "about " };
        let mut row = vec![
            limit.name.clone(),
            limit.quantity.clone(),
            format!("{} of {about}{}", percent(now), number_of(peaks.keys())),
        ];
        row.extend(limit.values.iter().map(|value| value.quantity.clone()));
        row.push(number_of(peaks.highest()));
        grid.row(row);
    }
    (!grid.rows.is_empty()).then_some(grid)
}

fn when(timeline: &Timeline, of: &dyn Fn(&str) -> String) -> Option<Grid> {
    let intervals = timeline.intervals();
    let begins = |place: usize| {
        shown(Time::from_micros(timeline.begins().as_micros() + place as u64 * timeline.width().as_micros()))
    };
    let mut worst: Vec<(u64, usize)> = intervals.iter().map(Interval::refused).zip(0..).collect();
    worst.retain(|(refused, _)| *refused > 0);
    worst.sort_by_key(|(refused, place)| (std::cmp::Reverse(*refused), *place));
    worst.truncate(WORST);
    if worst.is_empty() {
        return None;
    }
    let title = format!("when: {}", sparks(intervals));
    let interval = format!("{} from", timeline.width());
    let mut grid = Grid::new(of(&title), 1, &[&interval, "requests", "refused", "share"]);
    for (refused, place) in worst {
        let requests = intervals[place].requests();
        grid.row(vec![begins(place), number_of(requests), number_of(refused), share(refused, requests)]);
    }
    Some(grid)
}

/// Refusals over time in one line of text.
fn sparks(intervals: &[Interval]) -> String {
    let each = intervals.len().div_ceil(SPARKS).max(1);
    let refused: Vec<u64> = intervals.chunks(each).map(|some| some.iter().map(Interval::refused).sum()).collect();
    let most = refused.iter().copied().max().unwrap_or(0).max(1);
    let level = |refused: u64| (refused * LEVELS.len() as u64).div_ceil(most).saturating_sub(1) as usize;
    refused.into_iter().map(|refused| if refused == 0 { ' ' } else { LEVELS[level(refused)] }).collect()
}

fn who(policy: &PolicyFindings, clients: &[ClientFindings], title: &str) -> Option<Grid> {
    let mut grid = Grid::new(title, 1, &["client", "requests", "refused", "share", "first", "last", "by"]);
    for ClientFindings { client, fate } in clients {
        let (refused, requests) = (u64::from(fate.refused), u64::from(fate.refused) + u64::from(fate.admitted));
        let mut row = vec![client.to_string(), number_of(requests), number_of(refused), share(refused, requests)];
        row.extend([shown(fate.first), shown(fate.last), policy.limit_name(fate.limit).to_owned()]);
        grid.row(row);
    }
    (!grid.rows.is_empty()).then_some(grid)
}

fn name_of(action: Option<&String>) -> String {
    action.map_or_else(|| "(no action)".to_owned(), Clone::clone)
}

pub(super) fn number_of(number: u64) -> String {
    count_of(number as f64)
}

fn several(number: u64, what: &str) -> String {
    format!("{} {what}{}", number_of(number), if number == 1 { "" } else { "s" })
}

fn share(part: u64, whole: u64) -> String {
    percent(part as f64 / whole.max(1) as f64)
}

/// A share with two digits that say something, where it is small.
pub(super) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    match percent {
        0.0 => "0 %".to_owned(),
        percent if percent >= 10.0 => format!("{percent:.1} %"),
        percent if percent >= 1.0 => format!("{} %", trimmed(format!("{percent:.1}"))),
        percent if percent >= 0.01 => format!("{} %", trimmed(format!("{percent:.2}"))),
        _ => "under 0.01 %".to_owned(),
    }
}

fn trimmed(number: String) -> String {
    number.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_told_with_what_matters() {
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
            assert_eq!(percent(share), text);
        }
    }

    #[test]
    fn sparks_show_where_refusals_are() {
        let refused = |by_limit| Interval { by_limit, ..Interval::default() };
        assert_eq!(sparks(&[refused(0), refused(1), refused(8), refused(4), refused(0)]), " ▁█▄ ");
        assert_eq!(sparks(&[refused(3); 600]), "█".repeat(60));
        assert_eq!(sparks(&[]), "");
    }
}
