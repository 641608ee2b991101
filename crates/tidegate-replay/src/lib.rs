//! Finds out what a policy would have done to the requests of an access log.
//!
//! A [`LogReplay`] reads logs line by line. It decides about each request with the policy's own plan, matchers, keys
//! and memory store, on a clock of the log's times. It refuses what a gate with that policy refuses of the same
//! requests at the same times. [`Findings`] hold the refused clients, the times and reasons, the clients that were
//! never refused, and the effect of other values of the limits.
//!
//! # Bounds
//! A log of any length is read in the same memory, apart from the policy's own store (`store.max_bytes`):
//!
//! | what | bound | beyond it |
//! | --- | --- | --- |
//! | a line | 64 KiB | it is broken |
//! | clients | 917,504 | the half with the fewest calls is dropped |
//! | refused keys other than clients | 4096 | the half with the fewest refusals is dropped |
//! | highest uses of limits | 917,504 | a fair sample of the keys is measured |
//! | refused keys that are measured on | 16,384 | it is only known that they exceeded their limit |
//! | intervals | 600 | they are merged |
//! | requests that wait for others that arrived earlier | 16,384, 16 MiB | the one that arrived first is decided |
//!
//! A second policy, for comparison, has tables of its own.
#![forbid(unsafe_code)]

mod arrival_order;
mod client;
mod common_log;
mod evaluator;
mod findings;
mod json_log;
mod lines;
mod meter;
mod report;
mod request;
mod timeline;
mod timestamp;
mod top_k;
mod trial;
mod virtual_gate;

use std::io::{self, Read, Write};

use http::HeaderName;
use tidegate_core::{Decision, Span, Time};
use tidegate_policy::{Plan, Policy};

use arrival_order::{ArrivalOrder, PendingRequest};
pub use client::{ClientNetwork, ClientStats};
pub use evaluator::{LimitRefusals, RequestCounts};
use evaluator::{PolicyEvaluator, RequestDecision};
pub use findings::{
    ActionChange, ActionFindings, AlternativeValue, ClientFindings, Findings, KeyFindings, LimitFindings,
    PolicyChanges, PolicyFindings,
};
pub use json_log::{FieldNameError, FieldNames};
use lines::LineReader;
pub use lines::MAX_LINE;
pub use meter::{Peaks, REFUSED_SHARES};
pub use report::{format_number, format_percent, format_plural};
pub use request::LineError;
use request::{HeaderCollector, LogLine, LoggedRequest};
pub use timeline::{IntervalCounts, Timeline};
use timestamp::ClfTimeParser;
pub(crate) use timestamp::format_time;
use top_k::TopK;
pub use trial::{JudgedCalls, RecordedCall, judge_calls};

/// The longest time by which a line may be older than the newest one and still count, at the newest one's time. Servers
/// that log the start of a request write the line at its end, and a download may take long.
pub const MAX_LATENESS: Span = Span::from_secs(3600);
/// The number of consecutive lines, each later than [`MAX_LATENESS`], after which time continues from them. The log's
/// clock was set back then, or the logs were given out of order.
pub const CLOCK_RESET_AFTER: u32 = 1000;
/// The longest duration of a request that is believed.
const MAX_DURATION: Span = Span::from_secs(7 * 86_400);
/// The largest forward jump that is trusted at once. A line beyond it counts only until a line comes that isn't beyond
/// it. Its cause may be a server with a clock that isn't set yet, or a wrong unit.
pub const MAX_FORWARD_JUMP: Span = Span::from_secs(86_400);
/// The number of broken lines that are shown.
pub const MAX_SHOWN_BROKEN: usize = 10;
/// The number of lines that are evaluated together. While memory is fetched for one line, others are read.
const BATCH_LINES: usize = 32;
/// The largest number of tracked clients that two policies treat differently.
const MAX_CHANGED_CLIENTS: usize = 1 << 16;

/// The statistics of the input.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InputStats {
    /// All lines but blank ones.
    pub lines: u64,
    /// Lines with a request.
    pub requests: u64,
    /// Lines with something else, such as a handshake at the wrong port or other messages of a server.
    pub non_requests: u64,
    /// Lines of Tidegate's own access log about calls to providers.
    pub provider_calls: u64,
    /// Lines of that log about requests that no policy has decided about, such as malformed ones.
    pub undecided: u64,
    /// Lines that can't be read.
    pub broken: u64,
    /// The first of them: file, line number and error, at most [`MAX_SHOWN_BROKEN`].
    pub first_broken: Vec<(String, u64, LineError)>,
    /// Requests that were late by up to [`MAX_LATENESS`]. They were evaluated at the newest time.
    pub late: u64,
    /// The largest lateness of those.
    pub max_lateness: Span,
    /// Requests that were later than that, and were not evaluated.
    pub too_late: u64,
    /// The number of times that time went back: after [`CLOCK_RESET_AFTER`] late lines in a row, or a jump forward.
    pub clock_resets: u64,
    /// The time of the first request that was evaluated.
    pub first_time: Option<Time>,
    /// The newest time of a request.
    pub newest_time: Option<Time>,
}

/// Reads logs and evaluates their requests by one policy, or by two that are compared.
pub struct LogReplay {
    field_names: FieldNames,
    headers: HeaderCollector,
    clf_times: ClfTimeParser,
    /// The evaluator of the policy, and of the one that it is compared with.
    evaluators: Vec<PolicyEvaluator>,
    changes: ChangeCollector,
    input: InputStats,
    clock: LogClock,
}

#[derive(Default)]
struct LogClock {
    /// The number of lines in a row that are too late.
    late_lines_in_row: u32,
    /// The newest time before the last jump forward.
    newest_before_jump: Option<Time>,
}

/// The requests about which two policies decide differently.
struct ChangeCollector {
    refused_by_both: u64,
    only_first: u64,
    only_second: u64,
    clients: TopK<ClientNetwork, ClientChangeCounts>,
}

/// The number of different decisions of two policies about a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClientChangeCounts {
    pub(crate) only_first: u32,
    pub(crate) only_second: u32,
}

impl LogReplay {
    /// Creates a replay by the policy of this name. Fields of JSON lines are found by `names`.
    pub fn new(name: impl Into<String>, policy: &Policy, names: FieldNames) -> Self {
        let changes = ChangeCollector {
            refused_by_both: 0,
            only_first: 0,
            only_second: 0,
            clients: TopK::new(MAX_CHANGED_CLIENTS, |counts: &ClientChangeCounts| {
                u64::from(counts.only_first) + u64::from(counts.only_second)
            }),
        };
        let replay = Self {
            field_names: names,
            headers: HeaderCollector::default(),
            clf_times: ClfTimeParser::default(),
            evaluators: Vec::new(),
            changes,
            input: InputStats::default(),
            clock: LogClock::default(),
        };
        replay.with_policy(name.into(), policy)
    }

    /// Adds a second policy to compare with.
    #[must_use]
    pub fn compare_with(mut self, name: impl Into<String>, policy: &Policy) -> Self {
        self.evaluators.truncate(1);
        self.with_policy(name.into(), policy)
    }

    fn with_policy(mut self, name: String, policy: &Policy) -> Self {
        self.evaluators.push(PolicyEvaluator::new(name, policy));
        let mut wanted: Vec<HeaderName> = self.evaluators.iter().flat_map(PolicyEvaluator::headers).collect();
        wanted.sort_unstable_by(|one, other| one.as_str().cmp(other.as_str()));
        wanted.dedup();
        self.headers = HeaderCollector::for_names(wanted);
        self
    }

    /// Reads a log to its end. The log is plain, or compressed by gzip or Zstandard. Findings call it `name`. For each
    /// request that the first policy refuses, or would refuse if none of its limits were in shadow, a line is written to
    /// `refusals`. Its fields are the log, line, action, limit, seconds to wait, reason and mode (`enforce` or
    /// `shadow`), separated by tabs. The seconds are rounded up, as in a reply, or `-` if the refusal has no end.
    ///
    /// # Errors
    /// The log can't be read, its compression is broken, or the refusals can't be written.
    pub fn read(&mut self, name: &str, log: impl Read, refusals: Option<&mut dyn Write>) -> io::Result<()> {
        let read = self.process_log(name, log, refusals);
        self.evaluators.iter_mut().for_each(PolicyEvaluator::flush);
        read
    }

    fn process_log(&mut self, name: &str, log: impl Read, mut refusals: Option<&mut dyn Write>) -> io::Result<()> {
        let mut lines = LineReader::new(lines::decompressed(log)?);
        let mut line_spans = Vec::with_capacity(BATCH_LINES);
        let mut order = ArrivalOrder::default();
        let mut number = 0;
        let read = loop {
            if let Err(error) = lines.read_spans(BATCH_LINES, &mut line_spans) {
                break Err(error);
            }
            if line_spans.is_empty() {
                break Ok(());
            }
            let mut ready = Vec::with_capacity(line_spans.len());
            for span in &line_spans {
                number += 1;
                let Some(request) = self.parse_line((name, number), lines.line(span)) else { continue };
                let headers = self.headers.take();
                order.push(PendingRequest { line: number, request, headers }, &mut ready);
            }
            self.evaluate(name, ready, &mut refusals)?;
        };
        self.evaluate(name, order.into_rest(), &mut refusals)?;
        read
    }

    /// Decides about requests in this order.
    fn evaluate(
        &mut self,
        log: &str,
        mut requests: Vec<PendingRequest<'_>>,
        refusals: &mut Option<&mut dyn Write>,
    ) -> io::Result<()> {
        for batch in requests.chunks(BATCH_LINES) {
            self.evaluators.iter_mut().for_each(PolicyEvaluator::clear_batch);
            let mut timed = Vec::with_capacity(batch.len());
            for pending in batch {
                let Some(now) = self.clock.decision_time(&mut self.input, pending.request.time) else { continue };
                for evaluator in &mut self.evaluators {
                    evaluator.prepare(&pending.request, &pending.headers, now);
                }
                timed.push((pending, now));
            }
            self.evaluators.iter().for_each(PolicyEvaluator::prefetch_states);
            let [first, others @ ..] = &mut *self.evaluators else { return Ok(()) };
            for (index, (PendingRequest { line, request, headers }, now)) in timed.into_iter().enumerate() {
                let decided = first.evaluate(index, request, headers, now);
                for second in &mut *others {
                    self.changes.record(decided.as_ref(), second.evaluate(index, request, headers, now).as_ref());
                }
                if let (Some(decided), Some(refusals)) = (&decided, &mut *refusals)
                    && (!decided.decision.allowed || decided.decision.shadow)
                {
                    write_refusal(*refusals, (log, *line), &first.gate.plan, decided)?;
                }
            }
        }
        requests.drain(..).for_each(|pending| self.headers.recycle(pending.headers));
        Ok(())
    }

    /// Returns the request of a line; `None` if there is none to decide about.
    #[inline]
    fn parse_line<'l>(&mut self, (name, number): (&str, u64), line: Option<&'l [u8]>) -> Option<LoggedRequest<'l>> {
        let read = match line {
            None => Err(LineError::TooLong),
            Some(line) => {
                let first = line.trim_ascii_start().first()?;
                self.headers.clear();
                match first {
                    b'{' => json_log::parse_line(line, &self.field_names, &mut self.headers),
                    _ => common_log::parse_line(line, &mut self.clf_times, &mut self.headers),
                }
            }
        };
        let input = &mut self.input;
        input.lines += 1;
        let count = match read {
            Ok(LogLine::Request(request)) => {
                input.requests += 1;
                return Some(request);
            }
            Ok(LogLine::ProviderCall) => &mut input.provider_calls,
            Ok(LogLine::Undecided) => &mut input.undecided,
            Ok(LogLine::Other) => &mut input.non_requests,
            Err(broken) => {
                if input.first_broken.len() < MAX_SHOWN_BROKEN {
                    input.first_broken.push((name.to_owned(), number, broken));
                }
                &mut input.broken
            }
        };
        *count += 1;
        None
    }
}

impl LogClock {
    /// Returns the time at which a request is evaluated: its own, or the newest before it. `None` if it is too late.
    #[inline]
    fn decision_time(&mut self, input: &mut InputStats, at: Time) -> Option<Time> {
        let newest = *input.newest_time.get_or_insert(at);
        input.first_time.get_or_insert(at);
        if at >= newest {
            if at.since(newest) > MAX_FORWARD_JUMP {
                self.newest_before_jump = Some(newest);
            }
            input.newest_time = Some(at);
        } else if newest.since(at) <= MAX_LATENESS {
            input.late += 1;
            input.max_lateness = input.max_lateness.max(newest.since(at));
        } else {
            // Time may continue from before the jump.
            let near = |before: Time| before.since(at) <= MAX_LATENESS && at.since(before) <= MAX_FORWARD_JUMP;
            let goes_on = self.newest_before_jump.is_some_and(near);
            self.late_lines_in_row += 1;
            if !goes_on && self.late_lines_in_row < CLOCK_RESET_AFTER {
                input.too_late += 1;
                return None;
            }
            input.clock_resets += 1;
            input.newest_time =
                Some(self.newest_before_jump.take().filter(|_| goes_on).map_or(at, |before| before.max(at)));
        }
        self.late_lines_in_row = 0;
        input.newest_time
    }
}

impl ChangeCollector {
    fn record(&mut self, first: Option<&RequestDecision>, second: Option<&RequestDecision>) {
        let (Some(first), Some(second)) = (first, second) else { return };
        let (by_first, by_second) = (!first.decision.allowed, !second.decision.allowed);
        self.refused_by_both += u64::from(by_first && by_second);
        if by_first == by_second {
            return;
        }
        self.only_first += u64::from(by_first);
        self.only_second += u64::from(by_second);
        // The client may depend on the policy too, by the proxies that it trusts. The second policy is the future one.
        if let Some(client) = second.client {
            let known = self.clients.entry(client, ClientChangeCounts::default);
            known.only_first = known.only_first.saturating_add(by_first.into());
            known.only_second = known.only_second.saturating_add(by_second.into());
        }
    }
}

fn write_refusal(
    to: &mut dyn Write,
    (log, line): (&str, u64),
    plan: &Plan,
    decided: &RequestDecision,
) -> io::Result<()> {
    let RequestDecision { actions, decision, .. } = decided;
    let Decision { bound_by, retry_after, reason, shadow, .. } = decision;
    let action = plan.action_names(*actions).unwrap_or_else(|| "-".to_owned());
    let limit = bound_by.map_or("-", |limit| plan.limit_info(limit).name());
    let wait = retry_after.map_or_else(|| "-".to_owned(), |wait| wait.as_secs_ceil().to_string());
    let (reason, mode) = (findings::reason_text(*reason), if *shadow { "shadow" } else { "enforce" });
    writeln!(to, "{log}\t{line}\t{action}\t{limit}\t{wait}\t{reason}\t{mode}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn implausible_future_times_are_corrected_by_later_lines() {
        let (mut clock, mut input) = (LogClock::default(), InputStats::default());
        let at = |secs: u64| Time::from_secs(1_700_000_000 + secs);
        let mut decided_at = |secs: u64| clock.decision_time(&mut input, at(secs));
        assert_eq!(decided_at(0), Some(at(0)));
        assert_eq!(decided_at(300_000_000), Some(at(300_000_000)));
        assert_eq!(decided_at(10), Some(at(10)));
        assert_eq!(decided_at(5), Some(at(10)), "late by a few seconds");
        // No requests for three days; a line from before is too late then.
        assert_eq!(decided_at(300_000), Some(at(300_000)));
        assert_eq!(decided_at(300_001), Some(at(300_001)));
        assert_eq!(decided_at(150_000), None);
        assert_eq!((input.clock_resets, input.late, input.too_late), (1, 1, 1));
    }

    #[test]
    fn unlogged_key_headers_share_one_count() {
        let text = "[inbound.action.a]\nmatch = { path = \"/\" }\nkey = \"header:x-api-key\"\nlimit = \"5 per 60s\"\n";
        let policy = Policy::load(tidegate_policy::PolicySources::new().file("x", text)).unwrap();
        let mut replay = LogReplay::new("x", &policy, FieldNames::default());
        let line =
            |client: u32| format!("203.0.113.{client} - - [22/Nov/2026:10:00:00 +0000] \"GET / HTTP/1.1\" 200 5\n");
        let log: String = (0..8).map(line).collect();
        let mut refused = Vec::new();
        replay.read("log", log.as_bytes(), Some(&mut refused)).unwrap();
        assert_eq!(String::from_utf8(refused).unwrap().lines().count(), 3);
        // The report tells it before all tables.
        let table = replay.findings().table();
        let missing = "\na: the log doesn't contain header:x-api-key, so all calls were counted as calls without it\n";
        assert!(table.find(missing).is_some_and(|at| at < table.find("by action").unwrap()), "{table}");
    }

    #[test]
    fn clients_refused_in_shadow_are_listed_apart() {
        let text = "[inbound.action.a]\nmatch = { path = \"/\" }\nlimits = [{ name = \"each\", limit = \"3 per 60s\" }, \
                    { name = \"agent\", key = [\"header:user-agent\"], limit = \"1 per 60s\", missing = \"share\" }]\n\
                    mode = \"shadow\"\n";
        let policy = Policy::load(tidegate_policy::PolicySources::new().file("x", text)).unwrap();
        let mut replay = LogReplay::new("x", &policy, FieldNames::default());
        let line = |client: u32, agent: &str| {
            format!("203.0.113.{client} - - [22/Nov/2026:10:00:00 +0000] \"GET / HTTP/1.1\" 200 5 \"-\" \"{agent}\"\n")
        };
        let log = [line(1, "one"), line(2, "two"), line(2, "two"), line(2, "two"), line(3, "two")].concat();
        replay.read("log", log.as_bytes(), None).unwrap();
        let findings = replay.findings();
        let policy = &findings.policies[0];
        assert_eq!((policy.total.refused, policy.shadow_refused_clients), (0, 2));
        let counts = policy.most_refused_in_shadow.iter().map(|found| found.stats.refused_in_shadow);
        assert_eq!(counts.collect::<Vec<_>>(), [2, 1]);
        assert!(policy.most_refused.is_empty());
        let keys = &policy.limits[1].keys;
        assert_eq!((keys.len(), keys[0].refused, keys[0].refused_in_shadow), (1, 0, 3));
        let table = findings.table();
        assert!(table.contains("would refuse 3 more in shadow, from 2 clients"), "{table}");
        assert!(table.contains("clients that limits in shadow would refuse most"), "{table}");
    }

    /// Each request is decided at its arrival, in whatever order the lines are written.
    #[test]
    fn requests_are_decided_in_order_of_arrival() {
        let text = "[inbound.action.a]\nmatch = { path = \"/\" }\nlimit = \"2 per 10s\"\n";
        let policy = Policy::load(tidegate_policy::PolicySources::new().file("x", text)).unwrap();
        // The number, arrival and duration of each request, in microseconds.
        let mut requests: Vec<(u64, u64, u64)> =
            (0..300).map(|id| (id, 1_700_000_000_000_000 + id * 700_000, id * 7_919_000 % 40_000_000)).collect();
        let refused = |requests: &[(u64, u64, u64)], has_duration: bool| {
            let line = |(id, arrival, duration): &(u64, u64, u64)| {
                let time = if has_duration { arrival + duration } else { *arrival };
                let duration = if has_duration { format!(",\"duration_us\":{duration}") } else { String::new() };
                let client = id % 3;
                format!(
                    "{{\"timestamp\":{time},\"target\":\"access\",\"listener\":\"inbound\",\"ip\":\"192.0.2.{client}\",\
                     \"method\":\"GET\",\"path\":\"/\",\"outcome\":\"admitted\"{duration}}}\n"
                )
            };
            let log: String = requests.iter().map(line).collect();
            let mut replay = LogReplay::new("x", &policy, FieldNames::default());
            let mut refused = Vec::new();
            replay.read("log", log.as_bytes(), Some(&mut refused)).unwrap();
            assert_eq!((replay.input.requests, replay.input.late), (300, 0));
            let refused = String::from_utf8(refused).unwrap();
            let lines = refused.lines().map(|line| line.split('\t').nth(1).unwrap().parse::<usize>().unwrap());
            lines.map(|line| requests[line - 1].0).collect::<Vec<u64>>()
        };
        let expected = refused(&requests, false);
        assert!((100..200).contains(&expected.len()), "{}", expected.len());
        requests.sort_by_key(|(_, arrival, duration)| arrival + duration);
        assert_eq!(refused(&requests, true), expected);
    }

    #[test]
    fn lines_of_provider_calls_are_left_out() {
        let policy = Policy::builder().build().unwrap();
        let mut replay = LogReplay::new("x", &policy, FieldNames::default());
        let line = |listener: &str, outcome: &str| {
            format!(
                "{{\"timestamp\":1700000000,\"target\":\"access\",\"listener\":\"{listener}\",\"ip\":\"192.0.2.1\",\
                 \"method\":\"GET\",\"path\":\"/\",\"outcome\":\"{outcome}\"}}\n"
            )
        };
        let lines = [("inbound", "shadow"), ("outbound", "admitted"), ("outbound", "failed"), ("api", "rejected")];
        let log: String = lines.map(|(listener, outcome)| line(listener, outcome)).concat();
        replay.read("log", log.as_bytes(), None).unwrap();
        let findings = replay.findings();
        assert_eq!((findings.input.requests, findings.policies[0].total.requests), (1, 1));
        let table = findings.table();
        assert!(
            table.contains("2 calls to providers left out; 1 without a decision (rejected or answered), left out"),
            "{table}"
        );
    }
}
