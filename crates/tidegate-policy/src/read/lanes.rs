//! The settings of a provider's lanes: `background`, `user`, `webhook`.

use tidegate_core::lanes::MAX_WAITING;
use tidegate_core::{Lane, LaneSpec, Span};

use super::DocumentReader;
use super::provider::ProviderSection;
use super::provider_limits::ParsedLimit;
use super::resilience::{MAX_ATTEMPTS, ParsedRetry};
use crate::document::{TomlNode, TomlTable, TomlValue};
use crate::error::{Error, quoted};
use crate::outbound::HoursOfDay;
use tidegate_core::call::{LaneRules, Measure};

/// A lane as written in the policy.
pub(super) struct ParsedLane {
    pub(super) lane: Lane,
    pub(super) limits: Vec<ParsedLimit>,
    pub(super) spec: LaneSpec,
    timeout: Option<Span>,
    retries: Option<u32>,
    pub(super) hours: Option<HoursOfDay>,
}

impl ParsedLane {
    /// The default timeout of a call and the default number of its retries.
    fn default_timeout_and_retries(lane: Lane) -> (Span, u32) {
        match lane {
            Lane::Background => (Span::from_secs(60), 5),
            Lane::User | Lane::Webhook => (Span::from_secs(10), 2),
        }
    }

    /// The rules of the lane: its own values, else the provider's, else the lane's defaults.
    pub(super) fn rules(&self, timeout: Option<Span>, read: &ParsedRetry) -> LaneRules {
        let (usual_timeout, usual_retries) = Self::default_timeout_and_retries(self.lane);
        let retries = self.retries.map(|retries| retries + 1).or(read.max_attempts);
        let mut retry = read.retry;
        retry.max_attempts = retries.unwrap_or(usual_retries + 1);
        LaneRules { timeout: self.timeout.or(timeout).unwrap_or(usual_timeout), retry }
    }
}

impl DocumentReader<'_> {
    /// Reads the lanes of a provider, in the order of [`Lane::ALL`].
    pub(super) fn lanes(&mut self, section: &ProviderSection<'_>, sequential: bool) -> Option<[ParsedLane; 3]> {
        if sequential && let Some(entry) = Lane::ALL.iter().find_map(|lane| section.table.get(lane.name())) {
            let message = format!("{} is sequential, so it has no lanes", quoted(section.name));
            let error = Error::new(self.texts, entry.key_at, message, "no rules for a lane, or sequential = false");
            self.push_error(error.help("a `timeout` beside `sequential` is every call's"));
            return None;
        }
        let [background, user, webhook] = Lane::ALL.map(|lane| self.lane(&section.table, lane));
        Some([background?, user?, webhook?])
    }

    fn lane(&mut self, provider: &TomlTable, lane: Lane) -> Option<ParsedLane> {
        let table = self.provider_section(provider, lane.name())?;
        let default = LaneSpec::default();
        let limits = self.read_or_default(table, "limit", Vec::new(), |reader, node| {
            let limits = reader.parse_limits(node, "limit", Measure::Calls)?;
            let help = format!("write in_flight = … in `{}`", lane.name());
            reader.check_no_in_flight(&limits, "a lane's `limit`", &help).then_some(limits)
        });
        let max_in_flight = self.read_or_default(table, "in_flight", default.max_in_flight, |reader, node| {
            reader.integer_u32(node, "in_flight", 1, 1_000_000)
        });
        let max_waiting = self.read_or_default(table, "max_waiting", default.max_waiting, |reader, node| {
            reader.integer_u32(node, "max_waiting", 1, MAX_WAITING.into())
        });
        let timeout = self.read_or_default(table, "timeout", None, |reader, node| reader.call_timeout(node).map(Some));
        let retries = self.read_or_default(table, "retries", None, |reader, node| {
            reader.integer_u32(node, "retries", 0, MAX_ATTEMPTS - 1).map(Some)
        });
        let hours = self.read_or_default(table, "hours", None, |reader, node| reader.hours(node).map(Some));
        Some(ParsedLane {
            lane,
            limits: limits?,
            spec: LaneSpec { max_waiting: max_waiting?, max_in_flight: max_in_flight? },
            timeout: timeout?,
            retries: retries?,
            hours: hours?,
        })
    }

    /// Reads the timeout of a whole call.
    pub(super) fn call_timeout(&mut self, node: &TomlNode) -> Option<Span> {
        self.timeout(node, "timeout").map(Span::from_duration)
    }

    fn hours(&mut self, node: &TomlNode) -> Option<HoursOfDay> {
        let text = match &node.value {
            TomlValue::String(text) => text,
            _ => self.string(node, "hours", "hours in quotes, such as \"22:00-06:00 in Europe/Berlin\"")?,
        };
        match text.parse() {
            Ok(hours) => Some(hours),
            Err(error) => {
                self.report_in_string(node, text, "hours", &error);
                None
            }
        }
    }
}
