//! Assembles the parsed sections into a plan.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use http::header::{COOKIE, HeaderName};
use tidegate_core::{Concurrency, CountMode, LeaseSpec, Limit, LimitId, LimitKind, Limits, MAX_OPS, Span};

use super::DocumentReader;
use super::actions::{LimitGroup, ParsedAction, ParsedGlobal};
use super::server::INBOUND;
use crate::address::{Ipv6Prefix, ListStatus, NetworkMap};
use crate::calendar::PeriodUnit;
use crate::description;
use crate::document::{TextRange, TomlTable};
use crate::error::quoted;
use crate::key::{KeyPart, KeyTemplate, OnMissing, limit_tag};
use crate::path::{AmbiguousPaths, PathQuirks};
use crate::plan::{Action, ActionId, LimitInfo, LimitScope, OpStep, OpTemplate, Plan};
use crate::quantity::Quantity;
use crate::router::Router;
use crate::store::StoreConfig;

/// The limits collected so far, each with its information.
#[derive(Default)]
struct PlanCollector {
    limits: Vec<Limit>,
    infos: Vec<LimitInfo>,
    key_templates: Vec<KeyTemplate>,
}

impl PlanCollector {
    /// Adds the key template of the parts that all keys of an action share, by which a cluster keeps them on one
    /// server. With a global limit, which every action contains, it must be the global limit's whole key. It is then
    /// the same for all actions. `None` if there is no such template.
    fn affinity_template(&mut self, op_template: &OpTemplate) -> Option<u16> {
        let parts =
            |limit: LimitId| self.key_templates[usize::from(self.infos[limit.index()].key_template_index)].parts();
        let reference_step = op_template.steps.iter().find(|step| step.is_global).or(op_template.steps.first())?;
        let is_in_all_steps = |part: &&KeyPart| op_template.steps.iter().all(|step| parts(step.limit).contains(part));
        let common: Vec<KeyPart> = parts(reference_step.limit).iter().filter(is_in_all_steps).cloned().collect();
        let is_whole_key = !reference_step.is_global || common.len() == parts(reference_step.limit).len();
        if common.is_empty() && op_template.steps.len() > 1 || !is_whole_key {
            return None;
        }
        // With `Share`, all keys of a call have the same affinity, even if the call lacks a part.
        u16::try_from(self.add_template(KeyTemplate::new(common, OnMissing::Share))).ok()
    }

    /// Returns the request headers that enforced limits count by.
    fn keyed_headers(&self, limits: &Limits) -> Vec<HeaderName> {
        let mut keyed_headers: Vec<HeaderName> = Vec::new();
        let enforced = limits.iter().filter(|(_, limit)| !limit.is_shadow()).map(|(id, _)| &self.infos[id.index()]);
        for part in enforced.flat_map(|info| self.key_templates[usize::from(info.key_template_index)].parts()) {
            let header = match part {
                KeyPart::Header(name) => name,
                KeyPart::Cookie(_) => &COOKIE,
                _ => continue,
            };
            if !keyed_headers.contains(header) {
                keyed_headers.push(header.clone());
            }
        }
        keyed_headers
    }

    fn has_concurrency(&self, limits: &[LimitId]) -> bool {
        limits.iter().any(|id| self.infos[id.index()].is_concurrency)
    }

    fn add_template(&mut self, key_template: KeyTemplate) -> usize {
        self.key_templates.iter().position(|known| *known == key_template).unwrap_or_else(|| {
            self.key_templates.push(key_template);
            self.key_templates.len() - 1
        })
    }
}

impl DocumentReader<'_> {
    pub(super) fn plan(
        &mut self,
        root: &TomlTable,
        (path_quirks, ambiguous_paths): (PathQuirks, AmbiguousPaths),
        store: Option<&StoreConfig>,
    ) -> Option<Plan> {
        let inbound = root.table("inbound");
        let lists = self.lists(inbound);
        let forward_auth = self.forward_auth_range(root);
        let keep_keys_together = store.is_some_and(StoreConfig::keeps_keys_together);
        let global = self.global(inbound, forward_auth);
        let global_op_count = global.as_ref().and_then(|global| global.group.as_ref()).map_or(0, LimitGroup::op_count);
        if global_op_count > MAX_OPS
            && let Some(entry) = inbound.and_then(|inbound| inbound.get("global"))
        {
            let message = format!("[inbound.global] has {global_op_count} limits");
            return self.error(entry.key_at, message, format!("at most {MAX_OPS}")).none();
        }
        let actions = self.actions(inbound, path_quirks, global_op_count, forward_auth);
        let (lists, global, actions) = (lists?, global?, actions?);
        self.assemble(global, actions, lists, (path_quirks, ambiguous_paths), keep_keys_together)
    }

    fn lists(&mut self, inbound: Option<&TomlTable>) -> Option<Vec<(ipnet::IpNet, ListStatus)>> {
        let mut all: Vec<(ipnet::IpNet, ListStatus, TextRange)> = Vec::new();
        let mut is_valid = true;
        for (key, listed) in [(&INBOUND.allow, ListStatus::Allow), (&INBOUND.deny, ListStatus::Deny)] {
            let Some(networks) = self.value(inbound, key) else {
                is_valid = false;
                continue;
            };
            for (network, at) in networks {
                if let Some((_, _, other)) = all.iter().find(|(known, label, _)| *known == network && *label != listed)
                {
                    let help = format!("`allow` has it {}", self.texts.describe_location(*other));
                    self.error(at, format!("{network} is on both lists"), "each network on one list").help(help);
                    is_valid = false;
                }
                all.push((network, listed, at));
            }
        }
        is_valid.then(|| all.into_iter().map(|(network, listed, _)| (network, listed)).collect())
    }

    fn assemble(
        &mut self,
        global: ParsedGlobal,
        parsed_actions: Vec<ParsedAction>,
        lists: Vec<(ipnet::IpNet, ListStatus)>,
        (path_quirks, ambiguous_paths): (PathQuirks, AmbiguousPaths),
        keep_keys_together: bool,
    ) -> Option<Plan> {
        let mut collector = PlanCollector::default();
        let mut is_valid = true;
        let mut global_ids = Vec::new();
        let mut global_quantities = Vec::new();
        if let Some(group) = global.group {
            global_quantities.clone_from(&group.quantities);
            let ids = self.add_limits(&mut collector, "global", None, global.shadow, vec![group]);
            is_valid &= ids.is_some();
            global_ids = ids.unwrap_or_default();
        }
        let mut actions = Vec::new();
        let mut matchers = Vec::new();
        for (index, parsed) in parsed_actions.into_iter().enumerate() {
            let id = ActionId::from_index(index);
            for (quantity, _) in &global_quantities {
                let limit = "[inbound.global]'s limit";
                is_valid &= self.check_capacity(parsed.cost, parsed.cost_at, quantity, parsed.name_at, limit);
            }
            let Some(action) = self.assemble_action(&mut collector, id, parsed, &global_ids, keep_keys_together) else {
                is_valid = false;
                continue;
            };
            matchers.extend(action.matcher.clone().map(|matcher| (id, matcher)));
            actions.push(action);
        }
        if !is_valid {
            return None;
        }
        let mut unmatched = op_template(&collector, &[], &global_ids);
        if keep_keys_together {
            unmatched.affinity = collector.affinity_template(&unmatched);
        }
        let global_has_concurrency = collector.has_concurrency(&global_ids);
        let names: HashMap<String, ActionId> = actions
            .iter()
            .enumerate()
            .map(|(index, action)| (action.name.clone(), ActionId::from_index(index)))
            .collect();
        let limits = self.numbered_limits(mem::take(&mut collector.limits))?;
        let counts_by_path =
            collector.key_templates.iter().any(|key_template| key_template.parts().contains(&KeyPart::Path));
        let keyed_headers = collector.keyed_headers(&limits);
        Some(Plan {
            limits,
            limit_infos: collector.infos,
            key_templates: collector.key_templates,
            fallback: names.get("default").copied(),
            names,
            actions,
            router: Router::new(matchers, path_quirks, ambiguous_paths),
            lists: NetworkMap::new(lists.iter().copied()),
            listed_networks: lists,
            global: global_ids,
            global_has_concurrency,
            unmatched,
            path_quirks,
            ambiguous_paths,
            counts_by_path,
            ipv6_prefix: Ipv6Prefix::DEFAULT,
            keyed_headers,
        })
    }

    fn assemble_action(
        &mut self,
        collector: &mut PlanCollector,
        id: ActionId,
        parsed: ParsedAction,
        global_ids: &[LimitId],
        keep_keys_together: bool,
    ) -> Option<Action> {
        let ParsedAction { name, name_at, matcher, preset, cost, cost_at, shadow, groups, .. } = parsed;
        let mut is_valid = true;
        for (quantity, at) in groups.iter().flat_map(|group| &group.quantities) {
            is_valid &= self.check_capacity(cost, cost_at, quantity, *at, "the limit");
        }
        let limits = self.add_limits(collector, &name, Some(id), shadow, groups)?;
        let mut op_template = op_template(collector, &limits, global_ids);
        if keep_keys_together && !op_template.steps.is_empty() {
            op_template.affinity = collector.affinity_template(&op_template);
            if op_template.affinity.is_none() {
                let of_global = if global_ids.is_empty() { "" } else { " with [inbound.global]'s `client_ip`" };
                let message = format!(
                    "the limits of the action {} have no key part in common{of_global}, so a Redis cluster would keep \
                     them on different servers",
                    quoted(&name),
                );
                self.error(name_at, message, "a part that all of them count by")
                    .help("or write cluster = \"reserve\" in [store]: decisions then take one key after the other");
                is_valid = false;
            }
        }
        is_valid.then(|| Action {
            name,
            matcher: matcher.map(|(matcher, _)| matcher),
            preset,
            cost,
            shadow,
            unlimited: limits.is_empty(),
            has_concurrency: collector.has_concurrency(&limits),
            limits,
            op_template,
        })
    }

    /// Gives each limit its id.
    pub(super) fn numbered_limits(&mut self, limits: Vec<Limit>) -> Option<Arc<Limits>> {
        let limits = Limits::new(limits).map(Arc::new);
        limits.map_err(|error| self.report(self.full_range, error.to_string(), "fewer limits")).ok()
    }

    /// Adds the limits of an action or of `inbound.global`, and returns their ids.
    fn add_limits(
        &mut self,
        collector: &mut PlanCollector,
        owner: &str,
        action: Option<ActionId>,
        shadow: bool,
        groups: Vec<LimitGroup>,
    ) -> Option<Vec<LimitId>> {
        let is_only_limit = groups.iter().map(LimitGroup::op_count).sum::<usize>() == 1;
        let mut ids = Vec::new();
        let mut number = 0;
        for group in groups {
            let has_several = group.op_count() > 1;
            let key_template_index = collector.add_template(KeyTemplate::new(group.key, group.missing));
            for (index, (quantity, at)) in
                group.quantities.into_iter().filter(|(quantity, _)| *quantity != Quantity::Unlimited).enumerate()
            {
                number += 1;
                let name = match &group.name {
                    Some(name) if has_several => format!("{owner}.{name}.{}", index + 1),
                    Some(name) => format!("{owner}.{name}"),
                    None if is_only_limit => owner.to_owned(),
                    None => format!("{owner}.{number}"),
                };
                let kind = quantity.to_limit_kind().ok().flatten()?;
                let (penalty, is_ban) = self.build_penalty(group.penalty, forget_time(&quantity))?;
                let is_concurrency = kind.has_permits();
                // A refused call is never in flight.
                let count = if is_concurrency { CountMode::Admitted } else { group.count };
                let description = description::describe_limit(&quantity, penalty.as_ref(), is_ban, count);
                let policy_item = description::rate_limit_policy(&name, &quantity)?;
                let tag = limit_tag("inbound", &name, &kind);
                let mut limit = Limit::new(with_lease_lead(kind, group.sharing.lease))
                    .with_tag(tag)
                    .with_sharing(group.sharing)
                    .with_count_mode(count)
                    .with_shadow(shadow);
                if let Some(penalty) = penalty {
                    limit = limit.with_penalty(penalty);
                }
                let Some(id) = LimitId::from_index(collector.limits.len()) else {
                    return self.error(at, "the policy has more than 4095 limits", "at most 4095").none();
                };
                let scope = if action.is_some() { LimitScope::Action } else { LimitScope::Global };
                let key_template_index = u16::try_from(key_template_index).ok()?;
                collector.limits.push(limit);
                collector.infos.push(LimitInfo {
                    name,
                    scope,
                    action,
                    quantity,
                    description,
                    rate_limit_policy: policy_item,
                    key_template_index,
                    is_concurrency,
                });
                ids.push(id);
            }
        }
        Some(ids)
    }
}

/// Gives a window a lead of the lease's longest age, because it counts leased permits at the end of the lease.
fn with_lease_lead(kind: LimitKind, lease: Option<LeaseSpec>) -> LimitKind {
    match (kind, lease) {
        (LimitKind::Window(window), Some(lease)) => LimitKind::Window(window.with_lead(lease.max_age)),
        (kind, _) => kind,
    }
}

/// Returns the operations of an action's calls: its own limits, then the global ones.
fn op_template(collector: &PlanCollector, own: &[LimitId], global: &[LimitId]) -> OpTemplate {
    let mut op_template = OpTemplate::default();
    let own = own.iter().map(|id| (id, false));
    for (id, is_global) in own.chain(global.iter().map(|id| (id, true))) {
        let info = &collector.infos[id.index()];
        let slot =
            op_template.key_templates.iter().position(|known| *known == info.key_template_index).unwrap_or_else(|| {
                op_template.key_templates.push(info.key_template_index);
                op_template.key_templates.len() - 1
            });
        let key_template_index = u8::try_from(slot)
            .expect("invariant: an action has at most as many key templates as a batch has operations");
        op_template.steps.push(OpStep {
            limit: *id,
            key_template_index,
            is_concurrency: info.is_concurrency,
            is_global,
        });
    }
    op_template
}

/// The time after which a limit has forgotten all calls.
fn forget_time(quantity: &Quantity) -> Span {
    const DAY: u64 = 86_400;
    match quantity {
        Quantity::Window { window, .. } => *window,
        Quantity::Rate { count, per, burst } => {
            let refill = (u128::from(per.as_micros()) * u128::from(*burst)).div_ceil(u128::from((*count).max(1)));
            Span::from_micros(u64::try_from(refill).unwrap_or(u64::MAX))
        }
        Quantity::Quota { unit, .. } => Span::from_secs(match unit {
            PeriodUnit::Hour => 3600,
            PeriodUnit::Day => DAY,
            PeriodUnit::Week => 7 * DAY,
            PeriodUnit::Month => 31 * DAY,
            PeriodUnit::Year => 366 * DAY,
        }),
        Quantity::InFlight { .. } => Concurrency::DEFAULT_LEASE,
        Quantity::Unlimited => Span::ZERO,
    }
}
