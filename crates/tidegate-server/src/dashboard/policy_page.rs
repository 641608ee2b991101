//! The page Policy: every limit in words with its true bound, and its use.

use std::collections::HashMap;

use maud::{Markup, html};
use tidegate::{DecisionCount, DecisionOutcome};
use tidegate_core::LimitId;
use tidegate_policy::KeyPart;

use super::layout::{badge, button, table};
use super::{View, providers_page, words};
use crate::events::Change;

pub(super) fn render(view: &View<'_>) -> Markup {
    let blocked = view.parts.refusals.clients.blocked_by_limit(view.plan, view.now);
    html! {
        div class="heading" {
            h1 { "Policy" }
            div class="buttons" id="reload" data-live {
                @if view.may_change() {
                    (button("Reload", "/v1/reload", &serde_json::json!({}), "The policy was reloaded."))
                }
            }
        }
        div id="reloads" data-live {
            @if !view.state.is_last_reload_ok {
                p class="message bad" {
                    "The last reload has failed: an earlier policy is in force. "
                    a href="/events" { "All events" }
                }
                @if let Some(message) = failed_reload(view) { p class="message bad code" { (message) } }
            }
        }
        div id="actions" data-live {
            @if !view.plan.global().is_empty() {
                section class="card" aria-labelledby="global" {
                    div class="heading" { h2 id="global" { "All actions" } }
                    p class="muted" { "Limits of " code { "inbound.global" } }
                    (limits(view, "global", view.plan.global(), &blocked))
                }
            }
            @for (_, action) in view.plan.actions() {
                @let id = format!("action-{}", action.name());
                section class="card" aria-labelledby=(id) data-key=(id) {
                    div class="heading" {
                        h2 id=(id) { (action.name()) }
                        @if action.is_shadow() { (badge("quiet", "Shadow")) }
                    }
                    p class="muted" {
                        @match action.matcher() {
                            Some(matcher) => (matcher),
                            None => "asked for by name only",
                        }
                        @if action.cost() != 1 { ", each call costs " (action.cost()) }
                    }
                    @if action.is_unlimited() { p { "Unlimited" } }
                    @if !action.limits().is_empty() { (limits(view, action.name(), action.limits(), &blocked)) }
                }
            }
            @for provider in &view.state.providers {
                @let id = format!("provider-{}", provider.name);
                section class="card" aria-labelledby=(id) data-key=(id) {
                    div class="heading" { h2 id=(id) { (provider.name) } (badge("quiet", "Provider")) }
                    (providers_page::limits(provider))
                }
            }
        }
    }
}

/// The message of the last failed reload, if the latest events still have it.
fn failed_reload(view: &View<'_>) -> Option<String> {
    let events = view.parts.events.after(0).events;
    let last = events.iter().rev().find(|event| matches!(event.change, Change::ReloadFailed { .. }));
    last.map(|event| event.message())
}

fn limits(view: &View<'_>, scope: &str, limits: &[LimitId], blocked: &HashMap<LimitId, usize>) -> Markup {
    let mut head = vec![
        ("", "Limit"),
        ("wide", "Counts by"),
        ("", "Mode"),
        ("number", "Refused"),
        ("number wide", "In shadow"),
        ("number wide", "Blocked now"),
    ];
    if view.may_try() {
        head.push(("action", "Other terms"));
    }
    let rows = html! {
        @for id in limits.iter().copied() {
            @let info = view.plan.limit_info(id);
            @let is_shadow = view.plan.limits().get(id).is_some_and(tidegate_core::Limit::is_shadow);
            tr {
                td class="name" {
                    (info.name())
                    span class="muted" { (info.description()) }
                    @if let Some(missing) = view.plan.describe_on_missing(id) { span class="muted" { (missing) } }
                }
                td class="wide" { (key_words(view.plan.key_parts(id))) }
                td { @if is_shadow { (badge("quiet", "Shadow")) } @else { (badge("good", "Enforced")) } }
                @let count = |outcome| words::count(decided(&view.state.decisions, id, outcome));
                td class="number" { (count(DecisionOutcome::Refused)) }
                td class="number wide" { (count(DecisionOutcome::Shadow)) }
                td class="number wide" { (words::count(blocked.get(&id).copied().unwrap_or_default() as u64)) }
                @if view.may_try() {
                    td class="action" {
                        a href={ "/try?limit=" (info.name()) } { "Try" span class="hidden" { " other terms of " (info.name()) } }
                    }
                }
            }
        }
    };
    table(&format!("limits-of-{scope}"), &format!("Limits of {scope}"), &head, rows)
}

fn key_words(parts: &[KeyPart]) -> String {
    if parts.is_empty() {
        "all calls together".to_owned()
    } else {
        parts.iter().map(KeyPart::to_string).collect::<Vec<_>>().join(", ")
    }
}

/// The number of decisions of a limit with this outcome.
fn decided(decisions: &[DecisionCount], limit: LimitId, outcome: DecisionOutcome) -> u64 {
    decisions
        .iter()
        .filter(|found| found.limit == Some(limit) && found.outcome == outcome)
        .map(|found| found.count)
        .sum()
}
