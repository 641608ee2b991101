//! What a policy would have done to the requests of an access log.
//!
//! A [`Replay`] reads logs line by line and has each request decided about by the policy's own plan, matchers, keys and
//! memory store, with the log's times for a clock. What would have been refused is what a gate with that policy refuses
//! to the same requests at the same times. [`Findings`] say whom, when and why, who was spared, and what other values of
//! the limits would have done.
//!
//! # Bounds
//! A log of any length is read in the same memory, apart from the policy's own store (`store.max_bytes`):
//!
//! | what | bound | beyond it |
//! | --- | --- | --- |
//! | a line | 64 KiB | it is broken |
//! | clients | 917,504 | the half with the fewest calls are forgotten |
//! | refused keys other than clients | 4096 | the half with the fewest refusals are forgotten |
//! | highest uses of limits | 917,504 | a fair sample of the keys is measured |
//! | refused keys that are measured on | 16,384 | it is known only that they went above their limit |
//! | intervals | 600 | they are put together |
//!
//! A second policy to compare with has tables of its own.

mod client;
mod common;
mod findings;
mod heaviest;
mod json;
mod judge;
mod lines;
mod meter;
mod moment;
mod request;
mod timeline;

use std::io::{self, Read, Write};

use http::{HeaderMap, HeaderName};
use tidegate_core::{Decision, Span, Time};
use tidegate_policy::{Plan, Policy};

pub use client::{Client, Fate};
pub use findings::{
    ActionChange, ActionFindings, Changes, ClientFindings, Findings, KeyFindings, LimitFindings, PolicyFindings, Value,
};
use heaviest::{Heaviest, Weight};
pub use json::{Names, Role, WrongName};
pub use judge::{Count, Refusals};
use judge::{Judge, Judged};
pub use lines::MAX_LINE;
use lines::{Line, Lines};
pub use meter::{Peaks, SHARES};
use moment::Clf;
pub(crate) use moment::shown;
pub use request::Broken;
use request::{Headers, Request, Said};
pub use timeline::{Interval, Timeline};

/// How far a line may be behind the newest one and still count, at the newest one's time: servers that log when a request
/// began write it when it has ended, and a download may take long.
pub const MAX_LATE: Span = Span::from_secs(3600);
/// So many lines in a row that are further behind than [`MAX_LATE`] mean that the log's clock was set back, or that the
/// logs were given in another order than they were written. Time goes on from there.
pub const TURN_AFTER: u32 = 1000;
/// A line that is further ahead of the newest one than this is believed only until one comes that isn't: a server whose
/// clock isn't set yet, or a wrong unit.
pub const MAX_JUMP: Span = Span::from_secs(86_400);
/// How many broken lines are shown.
pub const SHOWN_BROKEN: usize = 10;
/// How many lines are judged together: memory is slow, and while it brings what one needs, others are read.
const TOGETHER: usize = 32;
/// The most clients that two policies treat differently and that are told apart.
const MAX_CHANGED: usize = 1 << 16;

/// What was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Input {
    /// Lines, blank ones not counted.
    pub lines: u64,
    /// Lines that say a request.
    pub requests: u64,
    /// Lines that say that something else came: a handshake at the wrong port, a server's other news.
    pub others: u64,
    /// Lines that can't be read.
    pub broken: u64,
    /// The first of them: file, line and why.
    pub first_broken: Vec<(String, u64, Broken)>,
    /// Requests that were behind the newest by up to [`MAX_LATE`], and were judged at its time.
    pub late: u64,
    /// How far the latest of them was behind.
    pub latest_by: Span,
    /// Requests that were further behind, and were not judged.
    pub too_late: u64,
    /// How often time went back after all: after [`TURN_AFTER`] such lines in a row, or after a jump ahead.
    pub turns: u64,
    /// The time of the first request that was judged.
    pub first: Option<Time>,
    /// The newest.
    pub newest: Option<Time>,
}

/// Reads logs and judges their requests by one policy, or by two that are compared.
pub struct Replay {
    names: Names,
    headers: Headers,
    /// Those of each line of a group.
    found: Vec<HeaderMap>,
    clf: Clf,
    first: Judge,
    second: Option<Judge>,
    changed: Changed,
    input: Input,
    course: Course,
}

/// How the log's time runs.
#[derive(Default)]
struct Course {
    /// Lines in a row that are too late.
    behind: u32,
    /// The newest time before the last jump ahead.
    before_jump: Option<Time>,
}

/// Where two policies decide differently.
struct Changed {
    refused_by_both: u64,
    only_first: u64,
    only_second: u64,
    clients: Heaviest<Client, Change>,
}

/// How often two policies decided differently about a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) only_first: u32,
    pub(crate) only_second: u32,
}

impl Weight for Change {
    fn weight(&self) -> u64 {
        u64::from(self.only_first) + u64::from(self.only_second)
    }
}

impl Replay {
    /// A replay by the policy of this name. Fields of JSON lines are found by `names`.
    pub fn new(name: impl Into<String>, policy: &Policy, names: Names) -> Self {
        let changed =
            Changed { refused_by_both: 0, only_first: 0, only_second: 0, clients: Heaviest::new(MAX_CHANGED) };
        let mut replay = Self {
            names,
            headers: Headers::default(),
            found: vec![HeaderMap::new(); TOGETHER],
            clf: Clf::default(),
            first: Judge::new(name.into(), policy),
            second: None,
            changed,
            input: Input::default(),
            course: Course::default(),
        };
        replay.want_headers();
        replay
    }

    /// Compares it with another policy.
    #[must_use]
    pub fn against(mut self, name: impl Into<String>, policy: &Policy) -> Self {
        self.second = Some(Judge::new(name.into(), policy));
        self.want_headers();
        self
    }

    fn want_headers(&mut self) {
        let mut wanted: Vec<HeaderName> =
            self.first.headers().chain(self.second.iter().flat_map(Judge::headers)).collect();
        wanted.sort_unstable_by(|one, other| one.as_str().cmp(other.as_str()));
        wanted.dedup();
        self.headers = Headers::wanting(wanted);
    }

    /// Reads a log to its end: plain, or packed by gzip or Zstandard. `name` is what findings call it. Of each request
    /// that the first policy refuses, a line goes to `refusals`: log, line, action, limit, seconds to stay away (rounded
    /// up, as on the wire; `-` for good) and why, with tabs between them.
    ///
    /// # Errors
    /// The log can't be read, or is packed and broken; or the refusals can't be written.
    pub fn read(&mut self, name: &str, log: impl Read, refusals: Option<&mut dyn Write>) -> io::Result<()> {
        let read = self.judge(name, log, refusals);
        self.first.settle();
        if let Some(second) = &mut self.second {
            second.settle();
        }
        read
    }

    fn judge(&mut self, name: &str, log: impl Read, mut refusals: Option<&mut dyn Write>) -> io::Result<()> {
        let mut lines = Lines::new(lines::unpacked(log)?);
        let mut places = Vec::with_capacity(TOGETHER);
        let mut number = 0;
        loop {
            lines.find(TOGETHER, &mut places)?;
            if places.is_empty() {
                return Ok(());
            }
            let mut said = Vec::with_capacity(places.len());
            self.first.begin();
            self.second.iter_mut().for_each(Judge::begin);
            for place in &places {
                number += 1;
                let Some((request, now)) = self.said((name, number), lines.at(*place)) else { continue };
                let headers = &mut self.found[said.len()];
                // Whose place it takes is emptied before the next line.
                std::mem::swap(headers, &mut self.headers.found);
                self.first.prepare(&request, headers, now);
                if let Some(second) = &mut self.second {
                    second.prepare(&request, headers, now);
                }
                said.push((number, request, now));
            }
            self.first.fetch();
            self.second.iter().for_each(Judge::fetch);
            for (place, ((number, request, now), headers)) in said.iter().zip(&self.found).enumerate() {
                let judged = self.first.judge(place, request, headers, *now);
                if let Some(second) = &mut self.second {
                    self.changed.note(judged.as_ref(), second.judge(place, request, headers, *now).as_ref());
                }
                if let (Some(judged), Some(refusals)) = (&judged, &mut refusals)
                    && !judged.decision.allowed
                {
                    refusal(*refusals, (name, *number), &self.first.plan, judged)?;
                }
            }
        }
    }

    /// The request that a line says, and the time at which it is judged. `None` if there is nothing to judge.
    #[inline]
    fn said<'l>(&mut self, (name, number): (&str, u64), line: Line<'l>) -> Option<(Request<'l>, Time)> {
        let read = match line {
            Line::TooLong => Err(Broken::TooLong),
            Line::Whole(line) if line.trim_ascii().is_empty() => return None,
            Line::Whole(line) => {
                self.headers.clear();
                match line.trim_ascii_start().first() {
                    Some(b'{') => json::read(line, &self.names, &mut self.headers),
                    _ => common::read(line, &mut self.clf, &mut self.headers),
                }
            }
        };
        self.input.lines += 1;
        match read {
            Ok(Said::Request(request)) => {
                self.input.requests += 1;
                let now = self.course.moment_of(&mut self.input, request.at)?;
                Some((request, now))
            }
            Ok(Said::Other) => {
                self.input.others += 1;
                None
            }
            Err(broken) => {
                self.input.broken += 1;
                if self.input.first_broken.len() < SHOWN_BROKEN {
                    self.input.first_broken.push((name.to_owned(), number, broken));
                }
                None
            }
        }
    }

    /// What has been found so far.
    pub fn findings(&self) -> Findings {
        findings::find(&self.input, &self.headers, &self.first, self.second.as_ref(), &self.changed)
    }
}

impl Course {
    /// The time at which a request is judged: its own, or that of the newest before it. `None` if it is too late.
    #[inline]
    fn moment_of(&mut self, input: &mut Input, at: Time) -> Option<Time> {
        let newest = *input.newest.get_or_insert(at);
        input.first.get_or_insert(at);
        if at >= newest {
            if at.since(newest) > MAX_JUMP {
                self.before_jump = Some(newest);
            }
            input.newest = Some(at);
        } else if newest.since(at) <= MAX_LATE {
            input.late += 1;
            input.latest_by = input.latest_by.max(newest.since(at));
        } else {
            // It may go on where it was before the jump.
            let near = |before: Time| before.since(at) <= MAX_LATE && at.since(before) <= MAX_JUMP;
            let goes_on = self.before_jump.is_some_and(near);
            self.behind += 1;
            if !goes_on && self.behind < TURN_AFTER {
                input.too_late += 1;
                return None;
            }
            input.turns += 1;
            input.newest = Some(self.before_jump.take().filter(|_| goes_on).map_or(at, |before| before.max(at)));
        }
        self.behind = 0;
        input.newest
    }
}

impl Changed {
    fn note(&mut self, first: Option<&Judged>, second: Option<&Judged>) {
        let (Some(first), Some(second)) = (first, second) else { return };
        let change = match (first.decision.allowed, second.decision.allowed) {
            (true, true) => return,
            (false, false) => {
                self.refused_by_both += 1;
                return;
            }
            (false, true) => Change { only_first: 1, only_second: 0 },
            (true, false) => Change { only_first: 0, only_second: 1 },
        };
        self.only_first += u64::from(change.only_first);
        self.only_second += u64::from(change.only_second);
        // Whose call it was may depend on the policy too, by the proxies that it trusts; the second is the one to come.
        if let Some(client) = second.client {
            let known = self.clients.entry(client, Change::default);
            known.only_first = known.only_first.saturating_add(change.only_first);
            known.only_second = known.only_second.saturating_add(change.only_second);
        }
    }
}

fn refusal(to: &mut dyn Write, (log, line): (&str, u64), plan: &Plan, judged: &Judged) -> io::Result<()> {
    let Judged { actions, decision, .. } = judged;
    let Decision { bound_by, retry_after, reason, .. } = decision;
    let action = plan.names(*actions).unwrap_or_else(|| "-".to_owned());
    let limit = bound_by.map_or("-", |limit| plan.info(limit).name());
    let wait = retry_after.map_or_else(|| "-".to_owned(), |wait| wait.as_secs_ceil().to_string());
    writeln!(to, "{log}\t{line}\t{action}\t{limit}\t{wait}\t{}", findings::reason(*reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_from_the_future_is_believed_until_one_comes_that_is_not() {
        let (mut course, mut input) = (Course::default(), Input::default());
        let at = |secs: u64| Time::from_secs(1_700_000_000 + secs);
        let mut judged = |secs: u64| course.moment_of(&mut input, at(secs));
        assert_eq!(judged(0), Some(at(0)));
        assert_eq!(judged(300_000_000), Some(at(300_000_000)));
        assert_eq!(judged(10), Some(at(10)));
        assert_eq!(judged(5), Some(at(10)), "late as ever");
        // Nobody was there for three days; a line of before is too late then.
        assert_eq!(judged(300_000), Some(at(300_000)));
        assert_eq!(judged(300_001), Some(at(300_001)));
        assert_eq!(judged(150_000), None);
        assert_eq!((input.turns, input.late, input.too_late), (1, 1, 1));
    }

    #[test]
    fn requests_whose_log_does_not_tell_the_keyed_header_share_a_count() {
        let text = "[inbound.action.a]\nmatch = { path = \"/\" }\nkey = \"header:x-api-key\"\nlimit = \"5 per 60s\"\n";
        let policy = Policy::load(tidegate_policy::Sources::new().file("x", text)).unwrap();
        let mut replay = Replay::new("x", &policy, Names::default());
        let line =
            |client: u32| format!("203.0.113.{client} - - [22/Nov/2026:10:00:00 +0000] \"GET / HTTP/1.1\" 200 5\n");
        let log: String = (0..8).map(line).collect();
        let mut refused = Vec::new();
        replay.read("log", log.as_bytes(), Some(&mut refused)).unwrap();
        assert_eq!(String::from_utf8(refused).unwrap().lines().count(), 3);
    }
}
