//! The page Fleet: the nodes that share the store.

use maud::{Markup, html};

use super::layout::{badge, table};
use super::{View, words};
use crate::fleet::{FleetReport, LinkReport, NodeReport, NodeState};

/// The age of the list of nodes, in seconds, from which the page tells it.
const OLD_LIST_SECONDS: u64 = 20;

pub(super) fn render(view: &View<'_>) -> Markup {
    let fleet = &view.state.fleet;
    html! {
        h1 { "Fleet" }
        @match fleet.message {
            Some(message) => p class="muted" { (message) }
            None => p class="muted" { "The nodes that share the store " code { (fleet.store) } "." }
        }
        section class="card" id="fleet" data-live {
            (notes(view, fleet))
            (nodes(fleet))
        }
    }
}

fn notes(view: &View<'_>, fleet: &FleetReport) -> Markup {
    html! {
        @if view.state.lost_store.is_some() {
            p class="message bad" { "This node's link to the store is down: it decides by itself, and doesn't hear the others." }
        } @else if let Some(error) = &fleet.error {
            p class="message warn" { "This node can't announce itself, so others don't see it: " (error) }
        }
        @if fleet.nodes.iter().any(|node| node.state != NodeState::Live) {
            p class="muted" { "Rates, store links and uptimes of nodes that aren't live are those that they last told." }
        }
        @if let Some(age @ OLD_LIST_SECONDS..) = fleet.listed_age {
            p class="muted" { "The other nodes are shown as they were " (words::span(age)) " ago." }
        }
    }
}

fn nodes(fleet: &FleetReport) -> Markup {
    let head = [
        ("", "Node"),
        ("", "State"),
        ("number", "Last heard"),
        ("number", "Decisions a second"),
        ("", "Store link"),
        ("wide", "Version"),
        ("number wide", "Uptime"),
    ];
    table("nodes", "Nodes", &head, html! { @for node in &fleet.nodes { (row(node)) } })
}

fn row(node: &NodeReport) -> Markup {
    html! {
        tr data-key=(node.id) {
            td class="name" {
                (node.name)
                @if node.is_this { " " (badge("quiet", "This node")) }
                span class="muted" { (node.id) }
            }
            td {
                @match node.state {
                    NodeState::Live => (badge("good", "Live")),
                    NodeState::Silent => (badge("bad", "Silent")),
                    NodeState::Unknown => (badge("quiet", "Unknown")),
                }
            }
            td class="number" { @match node.age { Some(age) => { (words::span(age)) " ago" } None => "never" } }
            td class="number" { @match node.decisions_per_second { Some(rate) => (words::rate(rate)), None => "unknown" } }
            td {
                @match node.link {
                    Some(LinkReport { up, seconds }) => {
                        @match (node.state, up) {
                            (NodeState::Live, true) => (badge("good", "Up")),
                            (NodeState::Live, false) => (badge("bad", "Down")),
                            (_, true) => (badge("quiet", "Was up")),
                            (_, false) => (badge("quiet", "Was down")),
                        }
                        " " span class="number muted" { "for " (words::span(seconds)) }
                    }
                    None => "none"
                }
            }
            td class="wide" { @if node.version.is_empty() { "unknown" } @else { (node.version) } }
            td class="number wide" { (words::span(node.uptime)) }
        }
    }
}
