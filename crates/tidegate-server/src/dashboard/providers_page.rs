//! The page Providers: the state of the calls to other people's APIs.

use maud::{Markup, html};
use tidegate::outbound::{LimitUsage, ProviderReport};

use super::layout::{asking_button, badge, button, limit_cell, meter, table};
use super::{View, words};

pub(super) fn render(view: &View<'_>) -> Markup {
    html! {
        h1 { "Providers" }
        div id="providers" data-live {
            @if view.state.providers.is_empty() {
                p class="muted" { "The policy has no providers." }
            }
            @for provider in &view.state.providers { (card(view, provider)) }
        }
    }
}

fn card(view: &View<'_>, provider: &ProviderReport) -> Markup {
    let id = format!("provider-{}", provider.name);
    html! {
        section class="card" aria-labelledby=(id) data-key=(id) {
            div class="heading" {
                h2 id=(id) { (provider.name) }
                (state(provider))
                @if view.may_change() { div class="buttons" { (buttons(provider)) } }
            }
            (numbers(provider))
            @if !provider.limits.is_empty() { h3 { "Limits" } (limits(provider)) }
            h3 { "Lanes" }
            (lanes(provider))
            @if !provider.credentials.is_empty() { h3 { "Credentials" } (credentials(provider)) }
        }
    }
}

fn state(provider: &ProviderReport) -> Markup {
    let left = words::span(provider.breaker.reset_in);
    html! {
        @if provider.paused { (badge("warn", "Paused")) }
        @match provider.breaker.state {
            "closed" => (badge("good", "Breaker closed")),
            "open" => { (badge("bad", "Breaker open")) span class="muted number" { "for " (left) } }
            "off" => (badge("quiet", "No breaker")),
            other => (badge("warn", &format!("Breaker {other}"))),
        }
    }
}

fn buttons(provider: &ProviderReport) -> Markup {
    let name = &provider.name;
    let path = |command: &str| format!("/v1/providers/{name}/{command}");
    let pause = format!("Refuse all calls to {name} until it is resumed?");
    let reset = format!("Close the breaker of {name}, end its cool-downs, and learn pace and adaptive limit again?");
    html! {
        @if provider.paused {
            (button("Resume", &path("resume"), &serde_json::json!({}), &format!("Calls to {name} start again.")))
        } @else {
            (asking_button("Pause", &path("pause"), &pause, &format!("Calls to {name} are refused.")))
        }
        (asking_button("Reset", &path("reset"), &reset, &format!("{name} was reset.")))
    }
}

fn numbers(provider: &ProviderReport) -> Markup {
    let sent = provider.first_tries + provider.retries;
    let amplification = match provider.first_tries {
        0 => "–".to_owned(),
        calls => format!("{:.2}", sent as f64 / calls as f64),
    };
    let failed: u64 = provider.failures.values().sum();
    let reasons =
        provider.failures.iter().map(|(reason, count)| format!("{} {}", words::failure(reason), words::count(*count)));
    let reasons: Vec<String> = reasons.collect();
    let fact = |name: &str, value: String| html! { div { dt { (name) } dd class="number" { (value) } } };
    html! {
        dl class="facts" {
            (fact("Calls sent", words::count(provider.first_tries)))
            (fact("Requests per call", amplification))
            (fact("Failed", words::count(failed)))
            (fact("Reply, median", words::percentile(&provider.reply_time, |times| times.p50)))
            (fact("Reply, 99 %", words::percentile(&provider.reply_time, |times| times.p99)))
            @if let Some(retries) = provider.retry_budget { (fact("Retry budget", words::count(retries))) }
            @if let Some(limit) = provider.adaptive_limit { (fact("Adaptive limit", words::count(limit.into()))) }
            @if let Some(interval) = provider.pace_interval { (fact("Pace", words::duration(interval))) }
        }
        @if !reasons.is_empty() { p class="muted" { "Failed: " (reasons.join(", ")) } }
    }
}

/// A table of limits with their use.
pub(super) fn limits(provider: &ProviderReport) -> Markup {
    let head = [("", "Limit"), ("", "Used"), ("number", "Left"), ("number wide", "Full in")];
    let rows = html! {
        @for limit in &provider.limits {
            tr {
                (limit_cell(&limit.name, credential_of(limit), &limit.words))
                td class="use" { (meter(limit)) }
                td class="number" { (words::count(limit.remaining)) " of " (words::count(limit.limit)) }
                td class="number wide" { (words::span(limit.reset_after)) }
            }
        }
    };
    table(&format!("limits-{}", provider.name), &format!("Limits of {}", provider.name), &head, rows)
}

/// The credential whose calls a limit counts.
fn credential_of(limit: &LimitUsage) -> Markup {
    html! { @if let Some(credential) = limit.credential { "(credential " (credential) ")" } }
}

fn lanes(provider: &ProviderReport) -> Markup {
    let head = [
        ("", "Lane"),
        ("number", "Waiting"),
        ("number", "In flight"),
        ("number wide", "Requests sent"),
        ("number", "Wait, 90 %"),
    ];
    let rows = html! {
        @for lane in provider.lanes.iter().rev() {
            tr {
                td { (lane.lane) }
                td class="number" { (words::count(lane.waiting as u64)) }
                td class="number" { (words::count(lane.in_flight.into())) }
                td class="number wide" { (words::count(lane.wait.count)) }
                td class="number" { (words::percentile(&lane.wait, |times| times.p90)) }
            }
        }
    };
    table(&format!("lanes-{}", provider.name), &format!("Lanes of {}", provider.name), &head, rows)
}

fn credentials(provider: &ProviderReport) -> Markup {
    let head = [("", "Credential"), ("", "State"), ("number", "In flight")];
    let rows = html! {
        @for (number, credential) in provider.credentials.iter().enumerate() {
            tr {
                td { (number) " · " code { (credential.source) } }
                td {
                    @match credential.state {
                        "usable" => (badge("good", "Usable")),
                        "full" => (badge("quiet", "Full")),
                        "cooling" => (badge("warn", "Cooling")),
                        _ => (badge("bad", "Rejected")),
                    }
                    @if credential.usable_in > 0 {
                        " " span class="number left" { (words::span(credential.usable_in)) }
                    }
                }
                td class="number" { (words::count(credential.in_flight.into())) }
            }
        }
    };
    table(&format!("credentials-{}", provider.name), &format!("Credentials of {}", provider.name), &head, rows)
}
