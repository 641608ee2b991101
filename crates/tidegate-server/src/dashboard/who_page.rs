//! The page Who: the clients that are blocked or were refused most.

use maud::{Markup, html};
use serde_json::json;

use super::layout::{badge, button, table};
use super::{View, words};
use crate::events::client_text;
use crate::refused_clients::{ClientReport, ClientsReport};

/// The maximum number of shown clients.
pub(super) const MAX_CLIENTS: usize = 100;

pub(super) fn render(view: &View<'_>) -> Markup {
    html! {
        h1 { "Who" }
        @if let Some(report) = &view.clients { (clients(view, report)) }
        div id="block" data-live { @if view.may_change() { (block_form(view)) } }
    }
}

fn clients(view: &View<'_>, report: &ClientsReport) -> Markup {
    let mut head = vec![
        ("", "Client"),
        ("", "State"),
        ("number wide", "Refusals"),
        ("number wide", "In shadow"),
        ("number wide", "Strikes"),
        ("wide", "Last refusal"),
    ];
    if view.may_change() {
        head.push(("action", "Change"));
    }
    let rows = html! { @for client in &report.clients { (row(view, client)) } };
    html! {
        section class="card" {
            div id="clients" data-live {
                p {
                    strong { (words::count(report.blocked as u64)) } " blocked now, "
                    strong { (words::count(report.known as u64)) } " refused lately"
                    @if report.only_shadow > 0 {
                        ", " strong { (words::count(report.only_shadow as u64)) } " of them only in shadow"
                    }
                    @if report.known > MAX_CLIENTS { span class="muted" { "; these are the first " (MAX_CLIENTS) } }
                    @if report.displaced > 0 {
                        span class="muted" { "; " (words::count(report.displaced)) " others were left out" }
                    }
                }
                @if report.local {
                    p class="message warn" { "The store can't be asked: these are the blocks that this node knows." }
                }
                @if report.clients.is_empty() {
                    p class="muted" { "No client was refused." }
                } @else {
                    (table("client-table", "Clients", &head, rows))
                    p class="muted" {
                        "Blocked: refused until its block ends. Refused: its limit is full. Shadow: only a limit in shadow "
                        "would refuse it. Free: it may call again."
                    }
                }
            }
        }
    }
}

fn row(view: &View<'_>, client: &ClientReport) -> Markup {
    let name = client_text(&client.client);
    let left = client.retry_after.filter(|left| *left > 0).map(words::span);
    html! {
        tr data-key={ (client.limit) " " (name) } {
            td class="name" { (name) span class="muted" { "under " (client.limit) } }
            td {
                @match (client.blocked, client.shadow, &left) {
                    (true, _, Some(left)) => { (badge("bad", "Blocked")) " " span class="number left" { (left) } }
                    (true, _, None) => { (badge("bad", "Blocked")) }
                    (false, true, Some(left)) => { (badge("quiet", "Shadow")) " " span class="number left" { (left) } }
                    (false, true, None) => { (badge("quiet", "Shadow")) }
                    (false, false, Some(left)) => { (badge("warn", "Refused")) " " span class="number left" { (left) } }
                    (false, false, None) => { (badge("good", "Free")) }
                }
            }
            td class="number wide" { (words::count(client.refusals)) }
            td class="number wide" { (words::count(client.shadow_refusals)) }
            td class="number wide" { (client.strikes) }
            td class="wide" { time datetime=(client.last.replace(' ', "T")) { (client.last) } }
            @if view.may_change() {
                td class="action" {
                    @match &client.reset {
                        Some(reset) => {
                            @let label = if client.blocked { "Unblock" } else { "Reset" };
                            @let done = format!("{name} starts again under {}.", client.limit);
                            (button(label, "/v1/reset", &json!(reset), &done))
                        }
                        None => span class="muted" { "key is hidden" }
                    }
                }
            }
        }
    }
}

fn block_form(view: &View<'_>) -> Markup {
    html! {
        section class="card" {
            h2 { "Block a client" }
            p class="muted" {
                "Under all limits of the action that have a penalty, or without an action under all that count by the "
                "address or key."
            }
            form class="fields" data-post="/v1/block" data-done="The client is blocked." {
                p {
                    label for="ip" { "Address" }
                    input id="ip" name="ip" autocomplete="off" placeholder="203.0.113.7";
                }
                p {
                    label for="key" { "Key" }
                    input id="key" name="key" autocomplete="off";
                }
                p {
                    label for="action" { "Action" }
                    select id="action" name="action" {
                        option value="" { "all" }
                        @if !view.plan.global().is_empty() { option data-key="global" { "global" } }
                        @for (_, action) in view.plan.actions() { option data-key=(action.name()) { (action.name()) } }
                    }
                }
                p {
                    label for="for" { "Time" }
                    input id="for" name="for" value="10m" required autocomplete="off" size="8";
                }
                p { button type="submit" class="primary" { "Block" } }
            }
        }
    }
}
