//! Findings as tables, for a terminal and for an HTML page.

use std::cmp::Ordering;

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
    /// Creates a table. Cells may hold text of the log or of a file's name, so all text is made [`printable`] here.
    fn new(title: &str, text_columns: usize, headers: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Self {
        let printable = |text: &str| printable(text).into_owned();
        Self {
            title: printable(title),
            headers: headers.iter().map(|header| printable(header)).collect(),
            rows: rows.into_iter().map(|row| row.iter().map(|cell| printable(cell)).collect()).collect(),
            text_columns,
        }
    }

    /// Returns the table, or `None` if it has no rows.
    fn with_rows(self) -> Option<Self> {
        (!self.rows.is_empty()).then_some(self)
    }

    pub(super) fn to_text(&self) -> String {
        let headers = Some(&self.headers).filter(|headers| !headers.is_empty());
        let rows: Vec<Vec<String>> = headers.into_iter().chain(&self.rows).cloned().collect();
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
    let span = match (input.first_time, input.newest_time) {
        (Some(first), Some(newest)) => format!(" from {} to {}", format_time(first), format_time(newest)),
        _ => String::new(),
    };
    let (requests, in_lines) = (format_plural(input.requests, "request"), format_plural(input.lines, "line"));
    let mut lines = vec![format!("{requests} in {in_lines}{span}")];
    let late = format!("late by up to {}, judged at the newest time", input.max_lateness);
    let remarks = [
        (input.non_requests, "lines were no requests"),
        (input.provider_calls, "calls to providers left out"),
        (input.undecided, "without a decision (rejected or answered), left out"),
        (input.broken, "broken"),
        (input.late, &late),
        (input.too_late, "more than 1 h late, not judged"),
        (input.clock_resets, "times the log's clock went back"),
    ];
    let remarks = remarks.iter().filter(|(count, _)| *count > 0);
    let remarks: Vec<String> = remarks.map(|(count, words)| format!("{} {words}", format_number(*count))).collect();
    lines.extend((!remarks.is_empty()).then(|| remarks.join("; ")));
    for policy in &findings.policies {
        let in_shadow = policy.total.refused_in_shadow;
        let in_shadow = (in_shadow > 0).then(|| {
            let clients = format_plural(policy.shadow_refused_clients, "client");
            format!("; would refuse {} more in shadow, from {clients}", format_number(in_shadow))
        });
        lines.push(format!(
            "{}: refuses {} of {} ({}), from {} of {}{}",
            printable(&policy.name),
            format_number(policy.total.refused),
            format_plural(policy.total.requests, "request"),
            format_share(policy.total.refused, policy.total.requests),
            format_number(policy.refused_clients),
            format_plural(policy.clients, "client"),
            in_shadow.unwrap_or_default(),
        ));
        lines.extend(policy.missing_parts.iter().map(|missing| printable(missing).into_owned()));
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
    let mut tables = change_tables(findings);
    for policy in &findings.policies {
        let prefix = if findings.policies.len() > 1 { format!("{}: ", policy.name) } else { String::new() };
        tables.extend(policy_tables(policy, &prefix));
    }
    let input = &findings.input;
    let broken = input.first_broken.iter().map(|(file, line, error)| vec![format!("{file}:{line}"), error.to_string()]);
    let more = input.broken - input.first_broken.len() as u64;
    let more = (more > 0).then(|| vec!["…".to_owned(), format!("and {} more", format_number(more))]);
    tables.extend(FindingsTable::new("broken lines", 2, &[], broken.chain(more)).with_rows());
    tables
}

fn change_tables(findings: &Findings) -> Vec<FindingsTable> {
    let (Some(changes), [first, second]) = (&findings.changes, &*findings.policies) else { return Vec::new() };
    let actions = changes.actions.iter().map(|action| {
        let [before, after] = [action.first, action.second].map(|counts| counts.map(|counts| counts.refused));
        let cell = |refused: Option<u64>| refused.map_or_else(|| "–".to_owned(), format_number);
        let [old, new] = [before, after].map(Option::unwrap_or_default);
        let sign = match new.cmp(&old) {
            Ordering::Less => "−",
            Ordering::Equal => "",
            Ordering::Greater => "+",
        };
        let change = format!("{sign}{}", format_number(old.abs_diff(new)));
        vec![action_name(action.name.as_ref()), cell(before), cell(after), change]
    });
    let headers = ["action", &first.name, &second.name, "change"];
    let mut tables = vec![FindingsTable::new("refused, by action", 1, &headers, actions)];
    tables.extend(client_counts_table("refused from now on", changes.newly_refused.iter().copied()));
    tables.extend(client_counts_table("let through from now on", changes.newly_admitted.iter().copied()));
    tables
}

fn client_counts_table(title: &str, counts: impl Iterator<Item = (ClientNetwork, u64)>) -> Option<FindingsTable> {
    let rows = counts.map(|(client, requests)| vec![client.to_string(), format_number(requests)]);
    FindingsTable::new(title, 1, &["client", "requests"], rows).with_rows()
}

/// Returns the tables of a policy; `prefix` comes before their titles.
fn policy_tables(policy: &PolicyFindings, prefix: &str) -> Vec<FindingsTable> {
    let actions = policy.actions.iter().map(|action| {
        let RequestCounts { requests, refused, refused_in_shadow } = action.counts;
        let shadow = if action.shadow { " (shadow)" } else { "" };
        let name = format!("{}{shadow}", action_name(action.name.as_ref()));
        let share = format_share(refused, requests);
        vec![name, format_number(requests), format_number(refused), share, format_number(refused_in_shadow)]
    });
    let headers = ["action", "requests", "refused", "share", "in shadow"];
    let mut tables = vec![FindingsTable::new(&format!("{prefix}by action"), 1, &headers, actions)];
    tables.push(refusal_reasons_table(policy, prefix));
    tables.extend(limit_values_table(policy, prefix));
    tables.extend(worst_intervals_table(&policy.timeline, prefix));
    tables.extend(clients_table(policy, prefix));
    tables.extend(shadow_clients_table(policy, prefix));
    for limit in &policy.limits {
        let rows = limit
            .keys
            .iter()
            .map(|key| vec![key.key.clone(), format_number(key.refused), format_number(key.refused_in_shadow)]);
        let title = format!("{prefix}most refused keys of {}", limit.name);
        tables.extend(FindingsTable::new(&title, 1, &[&limit.counted_by, "refused", "in shadow"], rows).with_rows());
    }
    let never_refused = policy.largest_never_refused.iter().map(|found| (found.client, found.stats.admitted.into()));
    tables.extend(client_counts_table(&format!("{prefix}largest clients without a refusal"), never_refused));
    let notes = policy.notes.iter().map(|note| vec![note.clone()]);
    tables.extend(FindingsTable::new(&format!("{prefix}not covered"), 1, &[], notes).with_rows());
    tables
}

/// Returns the refusals of each limit, by reason.
fn refusal_reasons_table(policy: &PolicyFindings, prefix: &str) -> FindingsTable {
    let limits = policy.limits.iter().map(|limit| {
        let names = [&limit.name, &limit.quantity, &limit.counted_by].map(String::clone);
        let refusals = limit.refusals;
        let counts = [refusals.by_limit, refusals.by_block, refusals.in_shadow].map(format_number);
        [names, counts].concat()
    });
    let by_list = policy.refused_by_deny_list;
    let deny_list =
        (by_list > 0).then(|| vec!["deny list".to_owned(), String::new(), String::new(), format_number(by_list)]);
    let headers = ["limit", "allows", "by", "full", "blocked", "in shadow"];
    FindingsTable::new(&format!("{prefix}by limit"), 3, &headers, limits.chain(deny_list))
}

/// Returns the effect of other values of each limit.
fn limit_values_table(policy: &PolicyFindings, prefix: &str) -> Option<FindingsTable> {
    let shares = REFUSED_SHARES.map(|share| format!("refuses {}", format_percent(share)));
    let mut headers = vec!["limit", "allows", "refuses now"];
    headers.extend(shares.iter().map(String::as_str));
    headers.push("highest use");
    let rows = policy.limits.iter().filter(|limit| !limit.values.is_empty()).filter_map(|limit| {
        let (peaks, now) = (limit.peaks.as_ref()?, limit.current_refused_share()?);
        let about = if peaks.is_complete() { "" } else { "about " };
        let now = format!("{} of {about}{}", format_percent(now), format_number(peaks.key_count()));
        let mut row = vec![limit.name.clone(), limit.quantity.clone(), now];
        row.extend(limit.values.iter().map(|value| value.quantity.clone()));
        row.push(format_number(peaks.highest()));
        Some(row)
    });
    let title = format!("{prefix}other values of the limits, by the share of clients that they refuse");
    FindingsTable::new(&title, 2, &headers, rows).with_rows()
}

fn worst_intervals_table(timeline: &Timeline, prefix: &str) -> Option<FindingsTable> {
    let mut worst: Vec<(u64, &IntervalCounts)> =
        (0..).zip(timeline.intervals()).filter(|(_, interval)| interval.refused() > 0).collect();
    worst.sort_by_key(|(_, interval)| std::cmp::Reverse(interval.refused()));
    worst.truncate(MAX_WORST_INTERVALS);
    let rows = worst.into_iter().map(|(index, interval)| {
        let start = timeline.start() + timeline.width().times(index);
        let (requests, refused) = (interval.requests(), interval.refused());
        vec![format_time(start), format_number(requests), format_number(refused), format_share(refused, requests)]
    });
    let title = format!("{prefix}refusals over time: {}", sparkline(timeline.intervals()));
    let interval = format!("{} from", timeline.width());
    FindingsTable::new(&title, 1, &[&interval, "requests", "refused", "share"], rows).with_rows()
}

/// Returns the refusals over time as one line of text.
fn sparkline(intervals: &[IntervalCounts]) -> String {
    let group = intervals.len().div_ceil(SPARKLINE_WIDTH).max(1);
    let refused: Vec<u64> =
        intervals.chunks(group).map(|some| some.iter().map(IntervalCounts::refused).sum()).collect();
    let max = refused.iter().copied().max().unwrap_or(0).max(1);
    let level = |refused: u64| (refused * SPARKLINE_LEVELS.len() as u64).div_ceil(max).saturating_sub(1) as usize;
    refused.into_iter().map(|refused| if refused == 0 { ' ' } else { SPARKLINE_LEVELS[level(refused)] }).collect()
}

fn clients_table(policy: &PolicyFindings, prefix: &str) -> Option<FindingsTable> {
    let rows = policy.most_refused.iter().map(|ClientFindings { client, stats }| {
        let (refused, requests) = (u64::from(stats.refused), stats.calls());
        vec![
            client.to_string(),
            format_number(requests),
            format_number(refused),
            format_share(refused, requests),
            format_time(stats.first_refused_at),
            format_time(stats.last_refused_at),
            policy.limit_name(stats.last_limit).to_owned(),
        ]
    });
    let headers = ["client", "requests", "refused", "share", "first", "last", "by"];
    FindingsTable::new(&format!("{prefix}most refused clients"), 1, &headers, rows).with_rows()
}

fn shadow_clients_table(policy: &PolicyFindings, prefix: &str) -> Option<FindingsTable> {
    let rows = policy.most_refused_in_shadow.iter().map(|ClientFindings { client, stats }| {
        let (in_shadow, requests) = (u64::from(stats.refused_in_shadow), stats.calls());
        vec![client.to_string(), format_number(requests), format_number(in_shadow), format_share(in_shadow, requests)]
    });
    let headers = ["client", "requests", "in shadow", "share"];
    FindingsTable::new(&format!("{prefix}clients that limits in shadow would refuse most"), 1, &headers, rows)
        .with_rows()
}

fn action_name(action: Option<&String>) -> String {
    action.map_or_else(|| "(no action)".to_owned(), Clone::clone)
}

/// Formats a number with a comma at each thousand.
pub fn format_number(number: u64) -> String {
    format_count(number as f64)
}

/// Formats a number of things, of which `what` is the singular: `1 client`, `3,012 clients`.
pub fn format_plural(number: u64, what: &str) -> String {
    format!("{} {what}{}", format_number(number), if number == 1 { "" } else { "s" })
}

fn format_share(part: u64, whole: u64) -> String {
    format_percent(part as f64 / whole.max(1) as f64)
}

/// Formats a share from 0 to 1 in percent, with two significant digits if it is small: `25.5 %`, `0.12 %`.
pub fn format_percent(share: f64) -> String {
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
