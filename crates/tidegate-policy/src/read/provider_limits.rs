//! A provider's limits, and the rules of its calls.

use tidegate_core::call::{CallRules, LaneRules, MAX_LEAD, Measure, ProviderLimit};
use tidegate_core::{
    Cooldown, Key, Lane, LanesSpec, Limit, LimitError, LimitId, LimitKind, MAX_OPS, Sharing, Span, Window,
};

use super::DocumentReader;
use super::provider::ProviderSection;
use crate::description;
use crate::document::{TextRange, TomlNode};
use crate::error::{Error, quoted};
use crate::key::limit_tag;
use crate::outbound::{CostRules, HoursOfDay, OutboundLimitInfo};
use crate::quantity::Quantity;

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
}

/// The limits of all providers collected so far, each with its information.
#[derive(Default)]
pub(super) struct OutboundLimitCollector {
    pub(super) limits: Vec<Limit>,
    pub(super) infos: Vec<OutboundLimitInfo>,
    pub(super) sharing: Sharing,
}

impl OutboundLimitCollector {
    fn add(&mut self, kind: LimitKind, info: OutboundLimitInfo) -> Option<LimitId> {
        let id = LimitId::from_index(self.limits.len())?;
        let tag = limit_tag("outbound", &info.name, &kind);
        self.limits.push(Limit::new(kind).with_tag(tag).with_sharing(self.sharing));
        self.infos.push(info);
        Some(id)
    }

    /// Returns true if a calendar quota counts calls under these rules.
    pub(super) fn has_quota(&self, rules: &CallRules) -> bool {
        let ceilings = rules.provider_limits.iter().chain(&rules.credential_limits);
        ceilings.into_iter().any(|ceiling| self.limits[ceiling.limit.index()].kind().has_periods())
    }
}

impl DocumentReader<'_> {
    /// Returns the rules of a provider, whose keys are not set yet, and the hours of the background lane.
    pub(super) fn rules(
        &mut self,
        section: &ProviderSection<'_>,
        collected: &mut OutboundLimitCollector,
        credentials: usize,
        renews: bool,
        sequential: bool,
        cost: Option<&Option<CostRules>>,
    ) -> Option<(CallRules, Option<HoursOfDay>)> {
        let table = &section.table;
        let provider_limits = self.parse_limits_at(section, "limit", Measure::Calls);
        let own_cost = self.parse_limits_at(section, "cost_limit", Measure::Cost);
        let credential_limits = self.parse_limits_at(section, "credential_limit", Measure::Calls);
        let of_credential_cost = self.parse_limits_at(section, "credential_cost_limit", Measure::Cost);
        let lanes = self.lanes(section, sequential);
        let timeout =
            self.read_or_default(Some(table), "timeout", None, |reader, node| reader.call_timeout(node).map(Some));
        let retry = self.retry(table, section.preset.is_some());
        let budget = self.budget(table);
        let cooldown = self.cooldown(table, credentials, retry.as_ref());
        let (own, own_cost) = (provider_limits?, own_cost?);
        let (of_credential, of_credential_cost) = (credential_limits?, of_credential_cost?);
        let (lanes, timeout, retry) = (lanes?, timeout?, retry?);
        let measured = [&own_cost, &of_credential_cost];
        self.check_costs(section, measured.into_iter().flatten(), cost?)?;

        let mut max_in_flight = min_in_flight_limit(&own).min(if sequential { 1 } else { u32::MAX });
        let mut credential_in_flight = min_in_flight_limit(&of_credential);
        let all = || own.iter().chain(&of_credential);
        let paced = all().filter_map(|written| spacing(&written.quantity));
        let stagger = paced.max().map_or(Cooldown::default().stagger, |spacing| spacing.max(MIN_STAGGER));
        let rates = all().filter(|written| matches!(written.quantity, Quantity::Rate { .. }));
        let jitter = rates.filter_map(|written| spacing(&written.quantity)).min().map_or(Span::ZERO, transit_jitter);
        let lanes_of_own = lanes.iter().flat_map(|lane| &lane.limits);
        let windows = all().chain(lanes_of_own).filter_map(|written| match written.quantity {
            Quantity::Window { limit, window } => {
                Some(window.max(Span::from_micros(CALLS_PER_LANE_TURN * window.as_micros() / limit.max(1))))
            }
            _ => None,
        });
        let longest = windows.max();
        let window = longest.unwrap_or(LanesSpec::default().window);
        // Without a window, no call is counted ahead, so replies have nothing to correct in the store.
        let mut costs = own_cost.iter().chain(&of_credential_cost);
        let has_windows = longest.is_some() || costs.any(|cost| matches!(cost.quantity, Quantity::Window { .. }));

        let name = section.name;
        let mut ceilings = self.ceilings(collected, name, own, false)?;
        ceilings.extend(self.ceilings(collected, &format!("{name}.cost"), own_cost, false)?);
        let mut credential_ceilings = self.ceilings(collected, &format!("{name}.credential"), of_credential, true)?;
        credential_ceilings.extend(self.ceilings(
            collected,
            &format!("{name}.credential.cost"),
            of_credential_cost,
            true,
        )?);
        if credentials <= 1 {
            // The limit of an only credential is the provider's limit. A full window or a spent quota is then not
            // reported as a pause of all credentials.
            ceilings.append(&mut credential_ceilings);
            max_in_flight = max_in_flight.min(std::mem::replace(&mut credential_in_flight, u32::MAX));
        }
        let hours = lanes[0].hours.clone();
        let (mut specs, mut lane_rules) = (Vec::new(), Vec::new());
        let mut lane_ceilings = Vec::new();
        for lane in lanes {
            specs.push(lane.spec);
            lane_rules.push(lane.rules(timeout, &retry));
            let own = format!("{name}.{}", lane.lane.name());
            lane_ceilings.push(self.ceilings(collected, &own, lane.limits, false)?.into_boxed_slice());
        }
        let (base, cap) = cooldown?;
        let rest = LimitKind::Cooldown(Cooldown { base, cap, stagger });
        let words = description::describe_cooldown(base, cap);
        let info = OutboundLimitInfo {
            name: format!("{name}.cooldown"),
            quantity: None,
            description: words,
            per_credential: true,
        };
        let Some(cooldown) = collected.add(rest, info) else {
            self.report_too_many_limits(section.name_at);
            return None;
        };
        self.check_batch_size(section, &ceilings, &credential_ceilings, &lane_ceilings)?;
        let mut lane_rules: [LaneRules; 3] = lane_rules.try_into().ok()?;
        if sequential {
            lane_rules = [lane_rules[Lane::User as usize]; 3];
        }
        let lanes = LanesSpec { lanes: specs.try_into().ok()?, max_in_flight, window, ..LanesSpec::default() };
        let rules = CallRules {
            provider_limits: ceilings.into(),
            lane_limits: lane_ceilings.try_into().ok()?,
            credential_limits: credential_ceilings.into(),
            max_in_flight_per_credential: credential_in_flight,
            cooldown,
            key: Key::default(),
            credential_keys: Box::default(),
            can_renew_login: renews,
            tracks_remaining: false,
            lead: if has_windows { MAX_LEAD } else { Span::ZERO },
            jitter,
            lanes,
            lane_rules,
            budget: budget?,
        };
        Some((rules, hours))
    }

    fn parse_limits_at(
        &mut self,
        section: &ProviderSection<'_>,
        key: &str,
        measure: Measure,
    ) -> Option<Vec<ParsedLimit>> {
        self.read_or_default(Some(&section.table), key, Vec::new(), |reader, node| {
            let written = reader.parse_limits(node, key, measure)?;
            let whose = format!("`{key}`");
            let of_calls = if key == "cost_limit" { "limit" } else { "credential_limit" };
            let help = format!("what is in flight is counted in calls: `{of_calls}`");
            let fits = measure == Measure::Calls || reader.check_no_in_flight(&written, &whose, &help);
            fits.then_some(written)
        })
    }

    /// Reads quantities of calls or of their cost.
    pub(super) fn parse_limits(&mut self, node: &TomlNode, key: &str, measure: Measure) -> Option<Vec<ParsedLimit>> {
        let quantities = self.quantities(node, key)?;
        Some(quantities.into_iter().map(|(quantity, at)| ParsedLimit { quantity, at, measure }).collect())
    }

    /// Reports a limit on calls in flight, which count only for a whole provider, a credential or a lane. Returns true
    /// if there is none.
    pub(super) fn check_no_in_flight(&mut self, limits: &[ParsedLimit], whose: &str, help: &str) -> bool {
        let wrong = limits.iter().find(|written| matches!(written.quantity, Quantity::InFlight { .. }));
        if let Some(ParsedLimit { quantity, at, .. }) = wrong {
            let message = format!("{whose} is \"{quantity}\", which is not supported here");
            let error = Error::new(self.texts, *at, message, "a limit such as \"40 per 10s\" or \"10/s\"");
            self.push_error(error.help(help));
        }
        wrong.is_none()
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
            let Some(written) = limits.find(|written| written.quantity != Quantity::Unlimited) else { return Some(()) };
            let message = "there is a limit on what calls cost, but nothing says what one costs";
            let error = Error::new(self.texts, written.at, message, "`cost` in the provider");
            self.push_error(
                error.help("such as cost = { request = [\"/max_tokens\"], reply = [\"/usage/total_tokens\"] }"),
            );
            return None;
        };
        let at = section.table.table("cost").and_then(|table| table.node("reserve")).map(|node| node.at);
        let fits: Vec<bool> = limits
            .map(|written| self.check_capacity(cost.reserve, at, &written.quantity, written.at, "the limit"))
            .collect();
        fits.into_iter().all(|fits| fits).then_some(())
    }

    /// Adds the limits that a store counts under a name, and returns them. Limits in flight and `unlimited` are left
    /// out.
    fn ceilings(
        &mut self,
        collected: &mut OutboundLimitCollector,
        name: &str,
        written: Vec<ParsedLimit>,
        per_credential: bool,
    ) -> Option<Vec<ProviderLimit>> {
        let counted = |quantity: &Quantity| !matches!(quantity, Quantity::InFlight { .. } | Quantity::Unlimited);
        let several = written.iter().filter(|written| counted(&written.quantity)).count() > 1;
        let mut ceilings = Vec::new();
        for ParsedLimit { quantity, at, measure } in written.into_iter().filter(|written| counted(&written.quantity)) {
            let name = if several { format!("{name}.{}", ceilings.len() + 1) } else { name.to_owned() };
            let kind = match limit_kind(&quantity) {
                Ok(kind) => kind?,
                Err(error) => {
                    self.report(at, error.to_string(), "another limit");
                    return None;
                }
            };
            let settles = kind.settles();
            let mut words = description::describe_bound(&quantity);
            if measure == Measure::Cost {
                words.push_str(", by what calls cost");
            }
            let info = OutboundLimitInfo { name, quantity: Some(quantity), description: words, per_credential };
            let Some(limit) = collected.add(kind, info) else {
                self.report_too_many_limits(at);
                return None;
            };
            ceilings.push(ProviderLimit { limit, measure, settles });
        }
        Some(ceilings)
    }

    fn report_too_many_limits(&mut self, at: TextRange) {
        self.report(at, "[outbound] has more than 4095 limits, cool-downs included", "at most 4095");
    }

    fn check_batch_size(
        &mut self,
        section: &ProviderSection<'_>,
        ceilings: &[ProviderLimit],
        of_credential: &[ProviderLimit],
        of_lanes: &[Box<[ProviderLimit]>],
    ) -> Option<()> {
        let most = of_lanes.iter().map(|ceilings| ceilings.len()).max().unwrap_or(0);
        let operations = ceilings.len() + of_credential.len() + most + 1;
        if operations <= MAX_OPS {
            return Some(());
        }
        let message = format!(
            "a call to {} meets {} limits, those of its lane and its credential included",
            quoted(section.name),
            operations - 1
        );
        self.report(section.name_at, message, format!("at most {}", MAX_OPS - 1));
        None
    }
}

/// The lowest limit on calls in flight; `u32::MAX` if there is none.
fn min_in_flight_limit(limits: &[ParsedLimit]) -> u32 {
    let most = limits.iter().filter_map(|written| match written.quantity {
        Quantity::InFlight { limit } => u32::try_from(limit).ok(),
        _ => None,
    });
    most.min().unwrap_or(u32::MAX)
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
