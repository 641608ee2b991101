//! What each lane of a provider grants: `background`, `user`, `webhook`.

use tidegate_core::lanes::MAX_WAITING;
use tidegate_core::{Lane, LaneSpec, Span};

use super::Reader;
use super::ceilings::Written;
use super::failures::{MAX_ATTEMPTS, RetryRead};
use super::provider::Section;
use crate::document::{Node, Table, Value};
use crate::error::{Error, quoted};
use crate::outbound::Hours;
use tidegate_core::call::{LaneRules, Measure};

/// A lane as it is written.
pub(super) struct LaneRead {
    pub(super) lane: Lane,
    pub(super) limits: Vec<Written>,
    pub(super) spec: LaneSpec,
    timeout: Option<Span>,
    retries: Option<u32>,
    pub(super) hours: Option<Hours>,
}

impl LaneRead {
    /// How long a call may take and how often it is retried where nothing else says it.
    fn usual(lane: Lane) -> (Span, u32) {
        match lane {
            Lane::Background => (Span::from_secs(60), 5),
            Lane::User | Lane::Webhook => (Span::from_secs(10), 2),
        }
    }

    /// What the lane says, else the provider, else what is usual in the lane.
    pub(super) fn rules(&self, timeout: Option<Span>, read: &RetryRead) -> LaneRules {
        let (usual_timeout, usual_retries) = Self::usual(self.lane);
        let retries = self.retries.map(|retries| retries + 1).or(read.max_attempts);
        let mut retry = read.retry;
        retry.max_attempts = retries.unwrap_or(usual_retries + 1);
        LaneRules { timeout: self.timeout.or(timeout).unwrap_or(usual_timeout), retry }
    }
}

impl Reader<'_> {
    /// The lanes of a provider, in the order of [`Lane::ALL`].
    pub(super) fn lanes(&mut self, section: &Section<'_>, sequential: bool) -> Option<[LaneRead; 3]> {
        if sequential && let Some(entry) = Lane::ALL.iter().find_map(|lane| section.table.get(lane.name())) {
            let message = format!("{} is sequential, so it has no lanes", quoted(section.name));
            let error = Error::new(self.texts, entry.key_at, message, "no rules for a lane, or sequential = false");
            self.push(error.help("a `timeout` beside `sequential` is every call's"));
            return None;
        }
        let [background, user, webhook] = Lane::ALL.map(|lane| self.lane(&section.table, lane));
        Some([background?, user?, webhook?])
    }

    fn lane(&mut self, provider: &Table, lane: Lane) -> Option<LaneRead> {
        let table = self.inner(provider, lane.name())?;
        let default = LaneSpec::default();
        let limits = self.or_default(table, "limit", Vec::new(), |reader, node| {
            let limits = reader.written(node, "limit", Measure::Calls)?;
            let help = format!("write in_flight = … in `{}`", lane.name());
            reader.without_in_flight(&limits, "a lane's `limit`", &help).then_some(limits)
        });
        let max_in_flight = self.or_default(table, "in_flight", default.max_in_flight, |reader, node| {
            reader.small(node, "in_flight", 1, 1_000_000)
        });
        let max_waiting = self.or_default(table, "max_waiting", default.max_waiting, |reader, node| {
            reader.small(node, "max_waiting", 1, MAX_WAITING.into())
        });
        let timeout = self.or_default(table, "timeout", None, |reader, node| reader.call_timeout(node).map(Some));
        let retries = self.or_default(table, "retries", None, |reader, node| {
            reader.small(node, "retries", 0, MAX_ATTEMPTS - 1).map(Some)
        });
        let hours = self.or_default(table, "hours", None, |reader, node| reader.hours(node).map(Some));
        Some(LaneRead {
            lane,
            limits: limits?,
            spec: LaneSpec { max_waiting: max_waiting?, max_in_flight: max_in_flight? },
            timeout: timeout?,
            retries: retries?,
            hours: hours?,
        })
    }

    /// How long a whole call may take.
    pub(super) fn call_timeout(&mut self, node: &Node) -> Option<Span> {
        self.timeout(node, "timeout").map(Span::from_duration)
    }

    fn hours(&mut self, node: &Node) -> Option<Hours> {
        let text = match &node.value {
            Value::Text(text) => text,
            _ => self.text(node, "hours", "hours in quotes, such as \"22:00-06:00 in Europe/Berlin\"")?,
        };
        match text.parse() {
            Ok(hours) => Some(hours),
            Err(error) => {
                self.inside(node, text, "hours", &error);
                None
            }
        }
    }
}
