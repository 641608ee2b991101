//! The page Events: the latest changes of state.

use maud::{Markup, html};

use super::layout::badge;
use super::{View, words};
use crate::events::Change;

/// The maximum number of shown events.
const MAX_EVENTS: usize = 200;

pub(super) fn render(view: &View<'_>) -> Markup {
    html! {
        h1 { "Events" }
        p class="muted" { "Changes of state, the latest first, in UTC. Programs read them from " code { "/v1/events" } "." }
        section class="card" id="events" data-live data-events=(view.parts.events.after(0).last) {
            (list(view, MAX_EVENTS))
        }
    }
}

/// The latest events, at most this number.
pub(super) fn list(view: &View<'_>, most: usize) -> Markup {
    let news = view.parts.events.after(0);
    let first = news.events.len().saturating_sub(most);
    let mut events: Vec<_> = news.numbered().skip(first).collect();
    events.reverse();
    html! {
        @if events.is_empty() {
            p class="muted" { "Nothing has happened yet." }
        } @else {
            ol class="events" {
                @for (number, event) in events {
                    @let (kind, name) = kind_of(&event.change);
                    @let utc = event.utc();
                    li data-key=(number) {
                        time datetime=(utc.replace(' ', "T")) title=(utc) { (words::time_of_day(&utc)) }
                        (badge(kind, name))
                        span { (event.message()) }
                    }
                }
            }
        }
    }
}

/// The colour and the name of an event.
fn kind_of(change: &Change) -> (&'static str, &'static str) {
    match change {
        Change::Blocked { shadow: true, .. } => ("quiet", "Shadow"),
        Change::Blocked { .. } => ("warn", "Blocked"),
        Change::Breaker { state: "open", .. } => ("bad", "Breaker"),
        Change::Breaker { state: "closed", .. } => ("good", "Breaker"),
        Change::Breaker { .. } => ("quiet", "Breaker"),
        Change::CoolingDown { all_cooling: true, .. } => ("bad", "Cooling"),
        Change::CoolingDown { .. } => ("warn", "Cooling"),
        Change::CredentialRejected { .. } => ("bad", "Credential"),
        Change::Paused { .. } => ("warn", "Paused"),
        Change::Resumed { .. } => ("good", "Resumed"),
        Change::Reset { .. } => ("quiet", "Reset"),
        Change::StoreLost { .. } => ("bad", "Store lost"),
        Change::StoreBack { .. } => ("good", "Store back"),
        Change::StoreFull { .. } => ("bad", "Store full"),
        Change::QuotaUsed { percent: 100.., .. } => ("bad", "Quota"),
        Change::QuotaUsed { .. } => ("warn", "Quota"),
        Change::Reloaded { .. } => ("good", "Reloaded"),
        Change::ReloadFailed { .. } => ("bad", "Reload failed"),
        Change::CertificatesReplaced { .. } => ("good", "Certificates"),
        Change::CertificatesKept { .. } => ("bad", "Certificates"),
    }
}
