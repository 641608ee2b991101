//! A provider's limits, and the rules of its calls.

use tidegate_core::call::{CallRules, MAX_LEAD, Measure, ProviderLimit};
use tidegate_core::{
    Cooldown, Key, Lane, LanesSpec, Limit, LimitError, LimitId, LimitKind, MAX_OPS, Sharing, Span, Window,
};

use super::DocumentReader;
use super::forms::Quantities;
use super::lanes::ParsedLane;
use super::limit_list::LimitList;
use super::provider::{PROVIDER, ProviderSection};
use crate::description;
use crate::document::{TextRange, TomlTable};
use crate::error::quoted;
use crate::key::limit_tag;
use crate::outbound::{CostRules, HoursOfDay, OutboundLimitInfo};
use crate::quantity::Quantity;
use crate::settings::key::SettingKey;

/// A waiting lane goes before more urgent lanes once per window, but at most once in this many calls. Otherwise urgency
/// would have no effect with a limit of one call per window.
const CALLS_PER_LANE_TURN: u64 = 3;
/// The number of calls that a window remembers exactly. Providers count exactly, and there are few keys.
const WINDOW_ENTRIES: u64 = 4096;
/// The shortest time between two callers that are released after a cool-down.
const MIN_STAGGER: Span = Span::from_millis(1);
/// The addition to the spacing of a rate's calls: a share of the spacing in thousandths, and its upper bound.
///
/// A provider with a rate counts arrivals. Of two calls that start one spacing apart, the second may travel faster. It
/// then arrives too early, and a provider that allows no burst refuses it. The addition lowers the rate by the same
/// share. It covers the usual variation of an open connection. The extra time that the last call took is measured and
/// added, as described at `CallRules::jitter`.
const TRANSIT_JITTER: (u64, Span) = (15, Span::from_millis(20));

/// A limit as written in the policy.
pub(super) struct ParsedLimit {
    quantity: Quantity,
    at: TextRange,
    measure: Measure,
    /// True if each scope has its own count.
    by_scope: bool,
}

/// The limits of a provider and of each of its credentials, as written in the policy.
struct ProviderLimits {
    calls: Vec<ParsedLimit>,
    cost: Vec<ParsedLimit>,
    credential_calls: Vec<ParsedLimit>,
    credential_cost: Vec<ParsedLimit>,
}

impl ProviderLimits {
    fn all_calls(&self) -> impl Iterator<Item = &ParsedLimit> {
        self.calls.iter().chain(&self.credential_calls)
    }

    fn costs(&self) -> impl Iterator<Item = &ParsedLimit> {
        self.cost.iter().chain(&self.credential_cost)
    }

    /// The longest window of the limits and of the lanes, each at least as long as a lane's turn needs.
    fn longest_window(&self, lanes: &[ParsedLane]) -> Option<Span> {
        let lane_limits = lanes.iter().flat_map(|lane| &lane.limits);
        let windows = self.all_calls().chain(lane_limits).filter_map(|parsed| match parsed.quantity {
            Quantity::Window { limit, window } => {
                Some(window.max(Span::from_micros(CALLS_PER_LANE_TURN * window.as_micros() / limit.max(1))))
            }
            _ => None,
        });
        windows.max()
    }
}

/// The limits of all providers collected so far.
pub(super) struct OutboundLimits {
    pub(super) limits: LimitList<OutboundLimitInfo>,
    pub(super) sharing: Sharing,
}

impl OutboundLimits {
    /// Returns true if a calendar quota counts calls under these rules.
    pub(super) fn has_quota(&self, rules: &CallRules) -> bool {
        let provider_limits = rules.provider_limits.iter().chain(&rules.credential_limits);
        provider_limits.into_iter().any(|provider_limit| self.limits.limit(provider_limit.limit).kind().has_periods())
    }
}

/// The settings of a provider that its rules depend on.
pub(super) struct ProviderTraits {
    pub(super) credentials: usize,
    pub(super) renews: bool,
    pub(super) sequential: bool,
    /// True if an adaptive pace spaces all calls by the credentials.
    pub(super) is_spaced_by_pace: bool,
}

impl DocumentReader<'_> {
    /// Returns the rules of a provider, whose keys are not set yet, and the hours of the background lane.
    pub(super) fn rules(
        &mut self,
        section: &ProviderSection<'_>,
        collected: &mut OutboundLimits,
        ProviderTraits { credentials, renews, sequential, is_spaced_by_pace }: ProviderTraits,
        cost: Option<&Option<CostRules>>,
    ) -> Option<(CallRules, Option<HoursOfDay>)> {
        let table = &section.table;
        let limits = self.provider_limits(table);
        let lanes = self.lanes(section, sequential);
        let timeout = self.value(table, &PROVIDER.timeout).map(|timeout| timeout.map(Span::from_duration));
        let retry = self.retry(table, section.preset.is_some());
        let budget = self.budget(table);
        let cooldown = self.cooldown(table, credentials, retry.as_ref());
        let (limits, lanes, timeout, retry) = (limits?, lanes?, timeout?, retry?);
        self.check_costs(section, limits.costs(), cost?)?;

        let mut max_in_flight = min_in_flight_limit(&limits.calls).min(if sequential { 1 } else { u32::MAX });
        let mut max_in_flight_per_credential = min_in_flight_limit(&limits.credential_calls);
        // The limits themselves space the calls by more, if they have to.
        let of_credential = limits.all_calls().filter(|limit| !limit.by_scope);
        let shortest_spacing = of_credential.filter_map(|limit| spacing(&limit.quantity)).min();
        let stagger = shortest_spacing.map_or(Cooldown::default().stagger, |spacing| spacing.max(MIN_STAGGER));
        let rates = limits.all_calls().filter(|limit| matches!(limit.quantity, Quantity::Rate { .. }));
        let jitter = rates.filter_map(|limit| spacing(&limit.quantity)).min().map_or(Span::ZERO, transit_jitter);
        let longest_window = limits.longest_window(&lanes);
        // Without a window, no call is counted ahead, so replies have nothing to correct in the store.
        let is_window = |cost: &ParsedLimit| matches!(cost.quantity, Quantity::Window { .. });
        let lead = if longest_window.is_some() || limits.costs().any(is_window) { MAX_LEAD } else { Span::ZERO };

        let name = section.name;
        let mut add = |suffix: &str, limits, per_credential| {
            self.add_provider_limits(collected, &format!("{name}{suffix}"), limits, per_credential)
        };
        let mut provider_limits = add("", limits.calls, false)?;
        provider_limits.extend(add(".cost", limits.cost, false)?);
        let mut credential_limits = add(".credential", limits.credential_calls, true)?;
        credential_limits.extend(add(".credential.cost", limits.credential_cost, true)?);
        if credentials <= 1 {
            // The limit of an only credential is the provider's limit. A full window or a spent quota is then not
            // reported as a pause of all credentials.
            provider_limits.append(&mut credential_limits);
            max_in_flight = max_in_flight.min(std::mem::replace(&mut max_in_flight_per_credential, u32::MAX));
        }
        let hours = lanes[0].hours.clone();
        let specs = lanes.each_ref().map(|lane| lane.spec);
        let mut lane_rules = lanes.each_ref().map(|lane| lane.rules(timeout, &retry));
        let lane_limits = lanes.into_iter().map(|lane| add(&format!(".{}", lane.lane.name()), lane.limits, false));
        let lane_limits: Vec<Box<[ProviderLimit]>> =
            lane_limits.map(|limits| limits.map(Vec::into_boxed_slice)).collect::<Option<_>>()?;
        // The pace spaces the calls instead.
        let max_release_time = if is_spaced_by_pace { Span::ZERO } else { stagger.times(Cooldown::RELEASE_STAGGERS) };
        let (base, cap) = cooldown?;
        let cooldown = self.add_cooldown(section, collected, Cooldown { base, cap, stagger, max_release_time })?;
        self.check_batch_size(section, &provider_limits, &credential_limits, &lane_limits)?;
        if sequential {
            lane_rules = [lane_rules[Lane::User as usize]; 3];
        }
        let default = LanesSpec::default();
        let window = longest_window.unwrap_or(default.window);
        let rules = CallRules {
            provider_limits: provider_limits.into(),
            lane_limits: lane_limits.try_into().ok()?,
            credential_limits: credential_limits.into(),
            max_in_flight_per_credential,
            cooldown,
            key: Key::default(),
            credential_keys: Box::default(),
            can_renew_login: renews,
            tracks_remaining: false,
            lead,
            jitter,
            lanes: LanesSpec { lanes: specs, max_in_flight, window, ..default },
            lane_rules,
            budget: budget?,
        };
        Some((rules, hours))
    }

    fn provider_limits(&mut self, table: &TomlTable) -> Option<ProviderLimits> {
        let mut calls = self.parse_limits(table, &PROVIDER.limit, Measure::Calls);
        let scope_calls = self.parse_scope_limits(table, &PROVIDER.scope_limit);
        let cost = self.parse_cost_limits(table, &PROVIDER.cost_limit, "limit");
        let mut credential_calls = self.parse_limits(table, &PROVIDER.credential_limit, Measure::Calls);
        let credential_scope_calls = self.parse_scope_limits(table, &PROVIDER.credential_scope_limit);
        let credential_cost = self.parse_cost_limits(table, &PROVIDER.credential_cost_limit, "credential_limit")?;
        calls.as_mut()?.extend(scope_calls?);
        credential_calls.as_mut()?.extend(credential_scope_calls?);
        Some(ProviderLimits { calls: calls?, cost: cost?, credential_calls: credential_calls?, credential_cost })
    }

    /// Reads limits of which each scope has its own count.
    fn parse_scope_limits(&mut self, table: &TomlTable, key: &SettingKey<Quantities>) -> Option<Vec<ParsedLimit>> {
        let limits = self.parse_limits(table, key, Measure::Calls)?;
        let name = format!("`{}`", key.name());
        let help = "a limit on calls in flight belongs in `limit` or `credential_limit`";
        if !self.check_no_in_flight(&limits, &name, help) {
            return None;
        }
        if let (Some(limit), None) = (limits.first(), table.get("scope")) {
            let message = format!("there is a {name}, but the provider has no scopes");
            let expected = "its scopes, such as scope = [{ name = [\"request.json /model\"] }]";
            return self.error(limit.at, message, expected).none();
        }
        Some(limits.into_iter().map(|limit| ParsedLimit { by_scope: true, ..limit }).collect())
    }

    fn add_cooldown(
        &mut self,
        section: &ProviderSection<'_>,
        collected: &mut OutboundLimits,
        cooldown: Cooldown,
    ) -> Option<LimitId> {
        let info = OutboundLimitInfo {
            name: format!("{}.cooldown", section.name),
            quantity: None,
            description: format!(
                "cools down for {} when it is throttled",
                description::describe_waits(cooldown.base, 2, cooldown.cap)
            ),
            per_credential: true,
        };
        self.add_outbound_limit(collected, LimitKind::Cooldown(cooldown), info, section.name_at)
    }

    /// Reads quantities of calls or of their cost; none if the key is absent.
    pub(super) fn parse_limits<'n>(
        &mut self,
        table: impl Into<Option<&'n TomlTable>>,
        key: &SettingKey<Quantities>,
        measure: Measure,
    ) -> Option<Vec<ParsedLimit>> {
        let quantities = self.value_or(table, key, Vec::new())?;
        let limit = |(quantity, at)| ParsedLimit { quantity, at, measure, by_scope: false };
        Some(quantities.into_iter().map(limit).collect())
    }

    /// Reads quantities of what calls cost. Calls in flight are counted under `calls_key`.
    fn parse_cost_limits(
        &mut self,
        table: &TomlTable,
        key: &SettingKey<Quantities>,
        calls_key: &str,
    ) -> Option<Vec<ParsedLimit>> {
        let limits = self.parse_limits(table, key, Measure::Cost)?;
        let help = format!("a limit on calls in flight belongs in `{calls_key}`");
        self.check_no_in_flight(&limits, &format!("`{}`", key.name()), &help).then_some(limits)
    }

    /// Reports a limit on calls in flight, which count only for a whole provider, a credential or a lane. Returns true
    /// if there is none.
    pub(super) fn check_no_in_flight(&mut self, limits: &[ParsedLimit], key: &str, help: &str) -> bool {
        let in_flight_limit = limits.iter().find(|parsed| parsed.quantity.is_in_flight());
        if let Some(ParsedLimit { quantity, at, .. }) = in_flight_limit {
            let message = format!("{key} is \"{quantity}\", which is not supported here");
            self.error(*at, message, "a limit such as \"40 per 10s\" or \"10/s\"").help(help);
        }
        in_flight_limit.is_none()
    }

    /// Reports a limit on cost without rules for the cost, or a reservation above the limit, because such a call would
    /// never be sent.
    fn check_costs<'w>(
        &mut self,
        section: &ProviderSection<'_>,
        mut limits: impl Iterator<Item = &'w ParsedLimit>,
        cost: &Option<CostRules>,
    ) -> Option<()> {
        let Some(cost) = cost else {
            let Some(parsed) = limits.find(|parsed| parsed.quantity != Quantity::Unlimited) else { return Some(()) };
            let message = "there is a limit on what calls cost, but nothing says what one costs";
            let help = "such as cost = { request = [\"/max_tokens\"], reply = [\"/usage/total_tokens\"] }";
            return self.error(parsed.at, message, "`cost` in the provider").help(help).none();
        };
        let at = section.table.table("cost").and_then(|table| table.node("reserve")).map(|node| node.at);
        let fits = limits.map(|parsed| self.check_capacity(cost.reserve, at, &parsed.quantity, parsed.at, "the limit"));
        fits.fold(true, |all, fits| all & fits).then_some(())
    }

    /// Adds the limits that a store counts under a name, and returns them. Limits in flight and `unlimited` are left
    /// out.
    fn add_provider_limits(
        &mut self,
        collected: &mut OutboundLimits,
        name: &str,
        mut parsed_limits: Vec<ParsedLimit>,
        per_credential: bool,
    ) -> Option<Vec<ProviderLimit>> {
        parsed_limits.retain(|parsed| !matches!(parsed.quantity, Quantity::InFlight { .. } | Quantity::Unlimited));
        let has_several = parsed_limits.len() > 1;
        let add = |(number, ParsedLimit { quantity, at, measure, by_scope })| {
            let name = if has_several { format!("{name}.{number}") } else { name.to_owned() };
            let kind = limit_kind(&quantity).map_err(|error| self.report(at, error.to_string(), "another limit"));
            let kind = kind.ok()??;
            let settles = kind.settles();
            let mut description = description::describe_bound(&quantity, None, 1);
            if measure == Measure::Cost {
                description.push_str(", by what calls cost");
            }
            if by_scope {
                description.push_str(", of each scope");
            }
            let info = OutboundLimitInfo { name, quantity: Some(quantity), description, per_credential };
            let limit = self.add_outbound_limit(collected, kind, info, at)?;
            Some(ProviderLimit { limit, measure, by_scope, settles })
        };
        (1..).zip(parsed_limits).map(add).collect()
    }

    fn add_outbound_limit(
        &mut self,
        collected: &mut OutboundLimits,
        kind: LimitKind,
        info: OutboundLimitInfo,
        at: TextRange,
    ) -> Option<LimitId> {
        let tag = limit_tag("outbound", &info.name, &kind);
        let limit = Limit::new(kind).with_tag(tag).with_sharing(collected.sharing);
        let id = collected.limits.add(&info.name.clone(), limit, info);
        if id.is_none() {
            self.too_many_limits(at, "with the cool-downs, [outbound]");
        }
        id
    }

    fn check_batch_size(
        &mut self,
        section: &ProviderSection<'_>,
        provider_limits: &[ProviderLimit],
        credential_limits: &[ProviderLimit],
        lane_limits: &[Box<[ProviderLimit]>],
    ) -> Option<()> {
        let max_lane_limits = lane_limits.iter().map(|limits| limits.len()).max().unwrap_or(0);
        // A scope has a cool-down of its own.
        let cooldowns = 1 + usize::from(section.table.get("scope").is_some());
        let operations = provider_limits.len() + credential_limits.len() + max_lane_limits + cooldowns;
        if operations <= MAX_OPS {
            return Some(());
        }
        let (name, limits) = (quoted(section.name), operations - cooldowns);
        let message = format!("a call to {name} meets {limits} limits, those of its lane and its credential included");
        self.error(section.name_at, message, format!("at most {}", MAX_OPS - cooldowns)).none()
    }
}

/// The lowest limit on calls in flight; `u32::MAX` if there is none.
fn min_in_flight_limit(limits: &[ParsedLimit]) -> u32 {
    let in_flight_limits = limits.iter().filter_map(|parsed| match parsed.quantity {
        Quantity::InFlight { limit } => u32::try_from(limit).ok(),
        _ => None,
    });
    in_flight_limits.min().unwrap_or(u32::MAX)
}

/// Returns the limit that enforces a quantity; `None` for `unlimited`.
fn limit_kind(quantity: &Quantity) -> Result<Option<LimitKind>, LimitError> {
    let Quantity::Window { limit, window } = quantity else { return quantity.to_limit_kind() };
    let entries = u32::try_from((*limit).clamp(1, WINDOW_ENTRIES)).unwrap_or(u32::MAX);
    Ok(Some(LimitKind::Window(Window::new(*limit, *window, entries)?.with_lead(MAX_LEAD))))
}

/// The average time between two calls that a limit allows. `None` for calendar quotas and for quantities that set no
/// pace.
fn spacing(quantity: &Quantity) -> Option<Span> {
    let (per, count) = match quantity {
        Quantity::Window { limit, window } => (*window, *limit),
        Quantity::Rate { count, per, .. } => (*per, *count),
        Quantity::Quota { .. } | Quantity::InFlight { .. } | Quantity::Unlimited => return None,
    };
    (count > 0).then(|| Span::from_micros(per.as_micros().div_ceil(count)))
}

fn transit_jitter(spacing: Span) -> Span {
    let (permille, most) = TRANSIT_JITTER;
    Span::from_micros((spacing.as_micros() * permille).div_ceil(1000)).min(most)
}
