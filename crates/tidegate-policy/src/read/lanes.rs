//! The settings of a provider's lanes: `background`, `user`, `webhook`.

use std::time::Duration;

use tidegate_core::call::{LaneRules, Measure};
use tidegate_core::lanes::MAX_WAITING;
use tidegate_core::{Lane, LaneSpec, Span};

use super::DocumentReader;
use super::forms::{Custom, DURATION, LIMITS, Maybe, Quantities, Whole};
use super::provider::ProviderSection;
use super::provider_limits::ParsedLimit;
use super::resilience::{MAX_ATTEMPTS, ParsedRetry};
use crate::document::{TomlNode, TomlTable};
use crate::error::quoted;
use crate::outbound::HoursOfDay;
use crate::settings::SettingType::Text;
use crate::settings::key::{read_keys, setting_keys};

/// Declares the keys of a lane; the lanes differ in their descriptions.
macro_rules! lane_keys {
    ($group:ident: $keys:ident, $calls:literal, $timeout:literal, $full:literal, $retries:literal $(, $($hours:tt)+)?) => {
        setting_keys! {
            $group: $keys {
                limit: Quantities = "", LIMITS, concat!("the limits of ", $calls, " calls");
                in_flight: Option<u32> = "", Maybe(Whole(1, 1_000_000)), "their maximum number in flight";
                timeout: Option<Duration> = "", Maybe(DURATION),
                    concat!("the time for one call; ", $timeout, " if not set anywhere");
                max_waiting: u32 = "1024", Whole(1, MAX_WAITING as u64),
                    concat!("the maximum number of waiting calls; ", $full);
                retries: Option<u32> = "", Maybe(Whole(0, MAX_ATTEMPTS - 1)),
                    concat!("the number of retries of one call; ", $retries, " if not set anywhere");
                $($($hours)+)?
            }
        }
    };
}

lane_keys!(
    BACKGROUND: BackgroundKeys,
    "background",
    "60s",
    "further ones are refused",
    "5",
    hours: Option<HoursOfDay> = "", Maybe(Custom(Text, "hours of the day", |reader, node, _| reader.hours(node))),
        "the hours in which they run, as 22:00-06:00 in Europe/Berlin";
);
lane_keys!(USER: UserKeys, "user", "10s", "for a further one, the second of them fails", "2");
lane_keys!(WEBHOOK: WebhookKeys, "webhook", "10s", "for a further one, the second of them fails", "2");

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
    /// The rules of the lane: its own values, else the provider's, else the lane's defaults.
    pub(super) fn rules(&self, timeout: Option<Span>, read: &ParsedRetry) -> LaneRules {
        let (default_timeout, default_retries) = match self.lane {
            Lane::Background => (Span::from_secs(60), 5),
            Lane::User | Lane::Webhook => (Span::from_secs(10), 2),
        };
        let retries = self.retries.map(|retries| retries + 1).or(read.max_attempts);
        let mut retry = read.retry;
        retry.max_attempts = retries.unwrap_or(default_retries + 1);
        LaneRules { timeout: self.timeout.or(timeout).unwrap_or(default_timeout), retry }
    }
}

impl DocumentReader<'_> {
    /// Reads the lanes of a provider, in the order of [`Lane::ALL`].
    pub(super) fn lanes(&mut self, section: &ProviderSection<'_>, sequential: bool) -> Option<[ParsedLane; 3]> {
        if sequential && let Some(entry) = Lane::ALL.iter().find_map(|lane| section.table.get(lane.name())) {
            let message = format!("{} is sequential, so it has no lanes", quoted(section.name));
            let error = self.error(entry.key_at, message, "no rules for a lane, or sequential = false");
            return error.help("a `timeout` beside `sequential` is every call's").none();
        }
        // A sequential provider has one queue for all calls, first come, first served.
        let displaces = |lane: Lane| lane != Lane::Background && !sequential;
        let [background, user, webhook] = Lane::ALL.map(|lane| self.lane(&section.table, lane, displaces(lane)));
        Some([background?, user?, webhook?])
    }

    fn lane(&mut self, provider: &TomlTable, lane: Lane, displaces: bool) -> Option<ParsedLane> {
        let table = self.provider_section(provider, lane.name())?;
        // The keys of the lanes have the same forms.
        read_keys!(self, table, BACKGROUND: in_flight, timeout, max_waiting, retries, hours);
        let limits = self.parse_limits(table, &BACKGROUND.limit, Measure::Calls).filter(|limits| {
            let help = format!("write in_flight = … in `{}`", lane.name());
            self.check_no_in_flight(limits, "a lane's `limit`", &help)
        });
        let max_in_flight = in_flight?.unwrap_or(LaneSpec::default().max_in_flight);
        Some(ParsedLane {
            lane,
            limits: limits?,
            spec: LaneSpec { max_waiting: max_waiting?, displaces, max_in_flight },
            timeout: timeout?.map(Span::from_duration),
            retries: retries?,
            hours: hours?,
        })
    }

    fn hours(&mut self, node: &TomlNode) -> Option<HoursOfDay> {
        let text = self.string(node, "hours", "hours in quotes, such as \"22:00-06:00 in Europe/Berlin\"")?;
        self.parsed(text.parse(), node, text, "hours")
    }
}
