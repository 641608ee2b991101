//! The frame of all pages, and the parts that several pages have.

use maud::{DOCTYPE, Markup, html};
use serde_json::Value;
use tidegate::outbound::LimitUsage;

use super::assets::{ICON, SCRIPT, STYLE};
use super::{Page, View};

/// A whole page. `csrf` is the token of its session.
pub(super) fn document(title: &str, csrf: Option<&str>, body: Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                @if let Some(csrf) = csrf { meta name="csrf" content=(csrf) id="csrf" data-live; }
                title { (title) " · Tidegate" }
                link rel="icon" href=(ICON.url());
                link rel="stylesheet" href=(STYLE.url());
                // Not deferred, so that the page is never shown in the other colours first.
                script src=(SCRIPT.url()) {}
            }
            body { (body) }
        }
    }
}

/// The name of the program, which leads to the first page.
pub(super) fn brand() -> Markup {
    html! { a class="brand" href="/" { img src=(ICON.url()) alt="" width="22" height="22"; "Tidegate" } }
}

/// A page with its head and navigation.
pub(super) fn frame(page: Page, view: &View<'_>, content: Markup) -> Markup {
    let identity = &view.caller.identity;
    let csrf = view.caller.session.as_ref().map(|session| session.csrf.expose());
    let body = html! {
        a class="skip" href="#main" { "Skip to content" }
        header {
            div class="bar" {
                (brand())
                nav aria-label="Pages" {
                    @for other in Page::ALL {
                        a href=(other.path()) aria-current=[(other == page).then_some("page")] { (other.title()) }
                    }
                }
                div class="tools" {
                    span id="connection" class="connection" role="status" { "Live" }
                    @if let Some(name) = identity.token {
                        span class="who" id="caller" data-live { (name) @if identity.read_only { " · read only" } }
                    }
                    button type="button" id="theme" hidden { "Dark" }
                    @if view.caller.session.is_some() {
                        button type="button" data-post="/sign-out" data-leave="/sign-in" { "Sign out" }
                    }
                }
            }
        }
        main id="main" tabindex="-1" data-refresh=(page.refresh_millis()) {
            @if page != Page::Try {
                noscript { p class="message warn" { "Without scripts, this page isn't updated, and its buttons don't work." } }
            }
            div id="message" class="message" role="status" hidden {}
            (content)
        }
    };
    document(page.title(), csrf, body)
}

/// A button that posts JSON. `done` is shown when that has succeeded.
pub(super) fn button(label: &str, path: &str, body: &Value, done: &str) -> Markup {
    html! { button type="button" data-post=(path) data-body=(body) data-done=(done) { (label) } }
}

/// As [`button`], but asks first.
pub(super) fn asking_button(label: &str, path: &str, question: &str, done: &str) -> Markup {
    html! {
        button type="button" data-post=(path) data-body="{}" data-done=(done) data-confirm=(question) { (label) }
    }
}

/// A word on a coloured ground: `good`, `warn`, `bad` or `quiet`.
pub(super) fn badge(kind: &str, text: &str) -> Markup {
    html! { span class={ "badge " (kind) } { (text) } }
}

/// A table that scrolls inside its own frame on narrow screens.
pub(super) fn table(id: &str, label: &str, head: &[(&str, &str)], rows: Markup) -> Markup {
    html! {
        div class="scroll" role="region" aria-label=(label) tabindex="0" {
            table id=(id) {
                thead { tr { @for (class, name) in head { th scope="col" class=[class_of(class)] { (name) } } } }
                tbody { (rows) }
            }
        }
    }
}

/// The cell of a limit: its name, what it counts, and its words.
pub(super) fn limit_cell(name: &str, counts: Markup, words: &str) -> Markup {
    html! { td class="name" { (name) " " (counts) span class="muted" { (words) } } }
}

/// A class, unless it is empty.
pub(super) fn class_of(class: &str) -> Option<&str> {
    (!class.is_empty()).then_some(class)
}

/// A bar that shows the used part of a limit, with its number beside it.
pub(super) fn meter(limit: &LimitUsage) -> Markup {
    let percent = limit.percent();
    let level = match percent {
        0..80 => "good",
        80..100 => "warn",
        _ => "bad",
    };
    html! {
        svg class={ "meter " (level) } viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true" {
            rect class="track" width="100" height="8" rx="2" {}
            rect class="fill" width=(percent.min(100)) height="8" rx="2" {}
        }
        span class="number" { (percent) " %" }
    }
}
