//! The page Now: rates, and the most urgent problems first.

use maud::{Markup, html};
use tidegate::DecisionOutcome::{Allowed, Refused, Shadow};

use super::layout::{badge, limit_cell, table};
use super::{View, chart, events_page, words};
use crate::fleet::NodeState;
use crate::metrics::LimitRefusals;

/// The used part of a quota, in per cent, from which it is a problem.
const QUOTA_WARNING: u64 = 80;
/// The maximum number of listed limits, and of listed events.
const MAX_ROWS: usize = 5;

/// A problem: its urgency, its words, and the page that tells more.
struct Problem {
    kind: &'static str,
    text: String,
    page: &'static str,
}

impl Problem {
    fn name(&self) -> &'static str {
        match self.kind {
            "bad" => "Error",
            "warn" => "Warning",
            _ => "Note",
        }
    }
}

pub(super) fn render(view: &View<'_>) -> Markup {
    html! {
        h1 { "Now" }
        p id="summary" class="muted" data-live {
            "Up for " (words::span(view.uptime().as_secs_ceil())) ". Open connections:"
            @for (index, (listener, number)) in view.state.connections.iter().enumerate() {
                @if index > 0 { "," }
                " " (words::count(*number as u64)) " " (listener)
            }
            ". Tidegate " (env!("CARGO_PKG_VERSION"))
        }
        (problem_list(view))
        (tiles(view))
        section class="card" {
            h2 { "Calls a second" }
            div id="chart" data-live { (chart::render(&view.parts.history.rates())) }
        }
        div class="columns" {
            (top_limits(view))
            section class="card" {
                h2 { "Latest events" }
                div id="latest-events" data-live { (events_page::list(view, MAX_ROWS)) }
                p { a href="/events" { "All events" } }
            }
        }
    }
}

fn problem_list(view: &View<'_>) -> Markup {
    let problems = problems(view);
    html! {
        section id="problems" aria-labelledby="problems-title" data-live {
            h2 id="problems-title" class="hidden" { "Problems" }
            @if problems.is_empty() {
                p class="problem good" { (badge("good", "OK")) " Nothing needs attention." }
            } @else {
                ul class="problems" {
                    @for problem in &problems {
                        li class={ "problem " (problem.kind) } {
                            (badge(problem.kind, problem.name()))
                            " " a href=(problem.page) { (problem.text) }
                        }
                    }
                }
            }
        }
    }
}

/// The present problems, most urgent first.
fn problems(view: &View<'_>) -> Vec<Problem> {
    let (mut bad, mut warn) = (Vec::new(), Vec::new());
    if let Some(store) = &view.state.lost_store {
        bad.push((format!("The store {store} is away: decisions are made without it"), "/events"));
    }
    for node in view.state.fleet.nodes.iter().filter(|node| node.state == NodeState::Silent) {
        let age = words::span(node.age.unwrap_or(0));
        warn.push((format!("The node {} was last heard {age} ago", node.name), "/fleet"));
    }
    for provider in &view.state.providers {
        let name = &provider.name;
        let states = &provider.credential_states;
        if provider.breaker.state == "open" {
            let left = words::span(provider.breaker.reset_in);
            bad.push((format!("{name}: the circuit breaker is open for {left}"), "/providers"));
        }
        if states.usable == 0 && states.cooling + states.rejected > 0 {
            bad.push((format!("{name}: no credential is usable"), "/providers"));
        } else if states.rejected > 0 {
            let rejected = words::plural(states.rejected, "credential");
            warn.push((format!("{name}: {rejected} rejected by the provider"), "/providers"));
        }
        if provider.paused {
            warn.push((format!("{name}: paused by an operator"), "/providers"));
        }
        for limit in provider.limits.iter().filter(|limit| limit.is_quota) {
            let used = limit.percent();
            if used >= QUOTA_WARNING {
                let again = words::span(limit.reset_after);
                let text = format!("{name}: {used} % of {} are used; it starts again in {again}", limit.name);
                (if used >= 100 { &mut bad } else { &mut warn }).push((text, "/providers"));
            }
        }
    }
    if !view.state.is_last_reload_ok {
        bad.push(("The last reload of the policy has failed: an earlier one is in force".to_owned(), "/policy"));
    }
    let (time, refusals) = view.parts.history.latest_refusals(view.now, &view.state.decisions);
    let note = refusals.first().map(|(limit, LimitRefusals { refused, shadow })| {
        let (name, time) = (view.plan.limit_info(*limit).name(), words::span(time.as_secs_ceil()));
        let (verb, count) = if *refused > 0 { ("refuses", refused) } else { ("would refuse", shadow) };
        (format!("{name} {verb} most: {} calls in the last {time}", words::count(*count)), "/who")
    });
    let (bad, warn) = (bad.into_iter().map(|found| ("bad", found)), warn.into_iter().map(|found| ("warn", found)));
    bad.chain(warn)
        .chain(note.map(|found| ("quiet", found)))
        .map(|(kind, (text, page))| Problem { kind, text, page })
        .collect()
}

fn tiles(view: &View<'_>) -> Markup {
    let rates = view.parts.history.present_rates();
    let total = |outcomes: &[_]| words::count(outcomes.iter().map(|outcome| view.state.decided(*outcome)).sum());
    let lanes = view.state.providers.iter().flat_map(|provider| &provider.lanes);
    let waiting = lanes.map(|lane| lane.waiting as u64).sum();
    let tile = |id: &str, name: &str, value: String, unit: &str, detail: Markup| {
        html! {
            div class="tile" id=(id) {
                dt { (name) }
                dd { span class="value" { (value) } @if !unit.is_empty() { " " span class="unit" { (unit) } } }
                dd class="muted" { (detail) }
            }
        }
    };
    let since_start = |outcomes: &[_]| html! { (total(outcomes)) " since the start" };
    html! {
        dl id="tiles" class="tiles" data-live {
            (tile("admitted", "Admitted", words::rate(rates.admitted), "/s", since_start(&[Allowed, Shadow])))
            (tile("refused", "Refused", words::rate(rates.refused), "/s", since_start(&[Refused])))
            (tile("shadow", "Admitted only by shadow mode", words::rate(rates.shadow), "/s", since_start(&[Shadow])))
            (tile("waiting", "Waiting", words::count(waiting), "", html! { "calls to providers" }))
            (tile("errors", "Errors", words::rate(rates.errors), "/s", html! { "store, upstream, providers" }))
        }
        @if !view.state.has_metrics {
            p class="message warn" { "Decisions aren't counted: " code { "admin.metrics" } " is false." }
        }
    }
}

fn top_limits(view: &View<'_>) -> Markup {
    let (time, refusals) = view.parts.history.latest_refusals(view.now, &view.state.decisions);
    let rows = html! {
        @for (limit, found) in refusals.iter().take(MAX_ROWS) {
            @let info = view.plan.limit_info(*limit);
            tr {
                (limit_cell(info.name(), html! {}, info.description()))
                td class="number" { (words::count(found.refused)) }
                td class="number" { (words::count(found.shadow)) }
            }
        }
    };
    let head = [("", "Limit"), ("number", "Refused"), ("number", "In shadow")];
    html! {
        section class="card" {
            h2 { "Limits that refuse most" }
            div id="top-limits" data-live {
                @if refusals.is_empty() {
                    p class="muted" { "No call was refused in the last minute, nor would have been by a limit in shadow." }
                } @else {
                    p class="muted" { "In the last " (words::span(time.as_secs_ceil())) }
                    (table("top", "Limits that refuse most", &head, rows))
                }
            }
            p { a href="/who" { "Blocked and refused clients" } }
        }
    }
}
