//! The page Try: other terms of a limit over the requests of the last hour. It needs no script.

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use maud::{Markup, html};
use tidegate::store::Store;
use tidegate_core::{Clock, LimitId};
use tidegate_replay::format_percent;

use super::chart::{Line, plot};
use super::layout::{frame, table};
use super::{Caller, Page, View, csrf_response, html as html_response, words};
use crate::body::ResponseBody;
use crate::listener::ConnectionContext;
use crate::rejections::RejectionReason;
use crate::trial::{GLOBAL, IntervalReport, MAX_TERMS, TermsReport, TrialError, TrialReport, TrialRequest, run_trial};
use crate::wire::admin::AdminState;
use crate::wire::decision_request::decode;
use crate::wire::small_body::{MAX_BYTES, collect_body};

/// The ends of the time of a chart that have a label, without now.
const TICKS: u64 = 4;

/// The fields of the form.
#[derive(Clone, Debug, Default)]
pub(super) struct Form {
    /// The name of the limit.
    limit: String,
    terms: Option<String>,
    csrf: String,
}

impl Form {
    /// Reads the fields of a form, or of a link to it. Others are left out.
    pub(super) fn from_fields(fields: &str) -> Self {
        let mut form = Self::default();
        for (name, value) in fields.split('&').filter_map(|field| field.split_once('=')) {
            let value = decode(value).unwrap_or_default().into_owned();
            match name {
                "limit" => form.limit = value,
                "terms" => form.terms = Some(value),
                "csrf" => form.csrf = value,
                _ => {}
            }
        }
        form
    }

    fn request(&self, view: &View<'_>) -> TrialRequest {
        let action = self.limit_id(view).and_then(|limit| view.plan.limit_info(limit).action());
        let action = action.map_or(GLOBAL, |action| view.plan.action(action).name()).to_owned();
        TrialRequest { action, limit: self.limit.clone(), terms: self.terms.clone().unwrap_or_default() }
    }

    fn limit_id(&self, view: &View<'_>) -> Option<LimitId> {
        let mut limits = view.plan.active_limits();
        limits.find(|(id, _)| view.plan.limit_info(*id).name() == self.limit).map(|(id, _)| id)
    }
}

/// Answers the form.
pub(super) async fn respond<S: Store, C: Clock + Clone>(
    admin: &AdminState<S, C>,
    client: &ConnectionContext,
    caller: Caller<'_>,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    let body = match collect_body(&client.watch, request.into_body(), MAX_BYTES).await {
        Ok(body) => body,
        Err(response) => return response,
    };
    let form = Form::from_fields(str::from_utf8(&body).unwrap_or_default());
    let parts = &admin.metrics.parts;
    if caller.session.as_ref().is_some_and(|session| !session.csrf.matches(form.csrf.as_bytes())) {
        return csrf_response(parts);
    }
    let view = View::new(admin, caller, Page::Try).await;
    if !view.may_change() {
        parts.refusals.count_rejection(RejectionReason::ReadOnly);
        return html_response(StatusCode::FORBIDDEN, frame(Page::Try, &view, render(&view, &form, None)));
    }
    let tried = run_trial(&admin.policy, parts, &form.request(&view), view.now).await;
    let status = tried.as_ref().err().map_or(StatusCode::OK, TrialError::status);
    html_response(status, frame(Page::Try, &view, render(&view, &form, Some(&tried))))
}

/// The page, with the result of a trial if there was one.
pub(super) fn render(view: &View<'_>, form: &Form, tried: Option<&Result<TrialReport, TrialError>>) -> Markup {
    html! {
        h1 { "Try" }
        p class="muted" {
            "Other terms of a limit, over the requests of the last hour. Nothing changes before they are in the policy."
        }
        @if view.parts.request_history.is_none() {
            p class="message warn" { "No requests are remembered: " code { "admin.history_bytes" } " is off." }
        } @else if !view.may_change() {
            p class="message warn" { "A token that is only for reading can't try limits." }
        } @else if view.plan.active_limits().next().is_none() {
            p class="message warn" { "The policy has no limits." }
        } @else {
            (form_card(view, form, tried))
            @if let Some(Ok(report)) = tried { (result(report)) }
        }
    }
}

fn form_card(view: &View<'_>, form: &Form, tried: Option<&Result<TrialReport, TrialError>>) -> Markup {
    let selected = form.limit_id(view).or_else(|| view.plan.active_limits().next().map(|(id, _)| id));
    let present = selected.map(|limit| view.plan.limit_info(limit).quantity().to_string()).unwrap_or_default();
    let error = tried.and_then(|tried| tried.as_ref().err());
    html! {
        form class="card terms" method="post" action="/try" {
            @if let Some(session) = &view.caller.session {
                input type="hidden" name="csrf" value=(session.csrf.expose());
            }
            @if let Some(error) = error {
                p class="message bad code" role="alert" id="terms-error" { (error) }
            }
            p {
                label for="limit" { "Limit" }
                select id="limit" name="limit" {
                    @for (id, _) in view.plan.active_limits() {
                        @let info = view.plan.limit_info(id);
                        option value=(info.name()) selected[Some(id) == selected] { (info.name()) ": " (info.quantity()) }
                    }
                }
            }
            p {
                label for="terms" { "Terms" }
                textarea id="terms" name="terms" rows="3" required maxlength=(MAX_TERMS) spellcheck="false" autocomplete="off"
                    aria-describedby={ "terms-help" @if error.is_some() { " terms-error" } }
                    aria-invalid=[error.map(|_| "true")] { (form.terms.as_deref().unwrap_or(&present)) }
                span class="muted" id="terms-help" {
                    "A quantity, or lines of the policy: " code { "limit" } ", " code { "penalty" } ", " code { "ban" } ", "
                    code { "count" } " and " code { "mode" } ". Terms that aren't given stay."
                }
            }
            p { button type="submit" class="primary" { "Try" } }
        }
    }
}

fn result(report: &TrialReport) -> Markup {
    let head = [
        ("", "Terms"),
        ("number", "Refused"),
        ("number", "Share"),
        ("number", "Clients"),
        ("number wide", "By this limit"),
        ("number wide", "In shadow"),
    ];
    let rows = html! { (row("Present", &report.current)) (row("Tried", &report.edited)) };
    html! {
        section class="card" aria-labelledby="result" {
            h2 id="result" tabindex="-1" autofocus { (report.summary) }
            p class="muted" {
                (words::count(report.requests)) " requests of " (words::plural(report.clients as usize, "client"))
                @if let Some(from) = &report.from { " from " (words::time_of_day(from)) " to " (words::time_of_day(&report.to)) }
            }
            @for note in &report.notes { p class="message warn" { (note) } }
            (table("trial", "Refusals by the present terms and those tried", &head, rows))
            @if report.series.len() > 1 { (chart(report)) }
            h3 { "To write in the policy" }
            pre class="code" { (report.toml) }
        }
    }
}

fn row(name: &str, terms: &TermsReport) -> Markup {
    html! {
        tr {
            td class="name" { (name) span class="muted" { (terms.description) } }
            td class="number" { (words::count(terms.refused)) }
            td class="number" { (format_percent(terms.refused_share)) }
            td class="number" { (words::count(terms.refused_clients)) }
            td class="number wide" { (words::count(terms.refused_by_limit)) }
            td class="number wide" { (words::count(terms.refused_in_shadow)) }
        }
    }
}

fn chart(report: &TrialReport) -> Markup {
    let line = |name, class, value: fn(&IntervalReport) -> u64| {
        let values = report.series.iter().map(|interval| value(interval) as f64).collect();
        Line { name, class, values }
    };
    let lines = [
        line("Requests", "admitted", |interval| interval.requests),
        line("Refused by the present terms", "shadow", |interval| interval.current_refused),
        line("Refused by those tried", "refused", |interval| interval.edited_refused),
    ];
    let (interval, count) = (report.interval, report.series.len() as u64);
    let label = format!(
        "Requests in each {} of the last {}: {}, of which the present terms refuse {} and those tried {}",
        words::span(interval),
        words::span(interval * count),
        words::count(report.requests),
        words::count(report.current.refused),
        words::count(report.edited.refused),
    );
    let ticks: Vec<String> = (1..=TICKS).rev().map(|tick| words::span(interval * count * tick / TICKS)).collect();
    plot(&lines, &label, report.series.len() + 1, &ticks)
}
