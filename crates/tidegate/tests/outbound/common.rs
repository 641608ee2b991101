//! Providers from short settings, and a substitute for their servers.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::clock::TokioClock;
use tidegate::outbound::{Attempt, AttemptOutcome, CallError, CallOptions, Outbound, Provider, Upstream};
use tidegate::policy::{Policy, PolicySources};
use tidegate::store::{Memory, Store};
use tidegate::{Clock as _, Time};
use tidegate_core::call::AttemptReport;
use tidegate_core::retry::Delivery;
use tidegate_core::{Class, Lane, Verdict};
use tokio::task::JoinHandle;

pub(crate) const GOOD: AttemptReport = with_class(Class::Success);
pub(crate) const FAILED: AttemptReport = with_class(Class::Transient);
pub(crate) const THROTTLED: AttemptReport = with_class(Class::Throttled);
/// A 403.
pub(crate) const FORBIDDEN: AttemptReport = with_class(Class::Auth);
/// A 401.
pub(crate) const UNAUTHORIZED: AttemptReport =
    with_verdict(Verdict { rejects_credential: true, ..Verdict::new(Class::Auth) });
/// A refused connection.
pub(crate) const UNSENT: AttemptReport = AttemptReport { delivery: Delivery::Unsent, ..FAILED };
/// A 404.
pub(crate) const MISSING: AttemptReport = with_class(Class::Permanent);

/// A reply of this class to a request that may be sent again.
pub(crate) const fn with_class(class: Class) -> AttemptReport {
    with_verdict(Verdict::new(class))
}

/// A reply with this verdict to a request that may be sent again.
pub(crate) const fn with_verdict(verdict: Verdict) -> AttemptReport {
    let mut report = AttemptReport::from_verdict(verdict, Delivery::Answered);
    report.is_repeatable = true;
    report
}

/// Answers after a delay with the next of these, and repeats the last one. Records each request.
#[derive(Clone)]
pub(crate) struct Answers {
    replies: Vec<AttemptReport>,
    after: Duration,
    log: Log,
    name: u32,
    /// True if a login can renew a rejected credential.
    pub(crate) logs_in: bool,
    clock: TokioClock,
}

/// The requests: the time, the call and the credential of each.
pub(crate) type Log = Arc<Mutex<Vec<(Time, u32, usize)>>>;

impl Answers {
    pub(crate) fn of(api: &Provider<impl Store, TokioClock>, replies: &[AttemptReport], log: &Log, name: u32) -> Self {
        Self {
            replies: replies.to_vec(),
            after: Duration::ZERO,
            log: Arc::clone(log),
            name,
            logs_in: true,
            clock: *api.clock(),
        }
    }

    pub(crate) fn after(mut self, after: Duration) -> Self {
        self.after = after;
        self
    }
}

impl Upstream for Answers {
    type Reply = u32;

    async fn send(&mut self, attempt: Attempt) -> AttemptOutcome<u32> {
        self.log.lock().unwrap().push((self.clock.now(), self.name, attempt.credential));
        if !self.after.is_zero() {
            tokio::time::sleep(self.after).await;
        }
        let index = (attempt.number as usize - 1).min(self.replies.len() - 1);
        AttemptOutcome { value: attempt.number, report: self.replies[index] }
    }

    async fn renew_login(&mut self, _credential: usize) -> Result<(), Class> {
        if self.logs_in { Ok(()) } else { Err(Class::Auth) }
    }
}

/// A throttled reply that asks for a wait of this many seconds.
pub(crate) fn throttled_for(secs: u64) -> AttemptReport {
    with_verdict(Verdict { wait: Some(tidegate::Span::from_secs(secs)), ..THROTTLED.verdict })
}

pub(crate) fn policy(provider: &str) -> Policy {
    let text = format!("[outbound.provider.api]\nbase_url = \"https://api.test\"\n{provider}");
    Policy::load(PolicySources::new().file("test.toml", text)).unwrap_or_else(|errors| panic!("{errors}"))
}

pub(crate) fn provider(settings: &str) -> Provider<Memory, TokioClock> {
    let outbound = Outbound::in_memory(&policy(settings), TokioClock::default()).unwrap();
    outbound.provider("api").unwrap().clone()
}

pub(crate) fn options(lane: Lane) -> CallOptions {
    CallOptions { lane, ..CallOptions::default() }
}

pub(crate) fn within(timeout: Duration) -> CallOptions {
    CallOptions { timeout: Some(timeout), ..CallOptions::default() }
}

/// Makes one call in a task of its own. Returns the number of requests that it took.
pub(crate) fn spawn(
    api: &Provider<Memory, TokioClock>,
    options: CallOptions,
    mut upstream: Answers,
) -> JoinHandle<Result<u32, CallError<u32>>> {
    let api = api.clone();
    tokio::spawn(async move { api.call(options, &mut upstream).await.map(|done| done.value) })
}

/// The requests: the time of each, in milliseconds since the first, and its call.
pub(crate) fn starts(log: &Log) -> Vec<(u64, u32)> {
    let log = log.lock().unwrap();
    let first = log.first().unwrap().0;
    log.iter().map(|(at, name, _)| (at.since(first).as_micros() / 1000, *name)).collect()
}
