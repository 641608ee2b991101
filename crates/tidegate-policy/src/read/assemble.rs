//! Assembles the parsed sections into a plan.

use std::collections::HashMap;

use http::header::{COOKIE, HeaderName};
use tidegate_core::{Concurrency, CountMode, LeaseSpec, Limit, LimitId, LimitKind, Limits, MAX_OPS, Span};

use super::DocumentReader;
use super::actions::{LimitGroup, ParsedAction, ParsedGlobal};
use crate::address::{AddressLists, Ipv6Prefix, ListStatus};
use crate::calendar::PeriodUnit;
use crate::description;
use crate::document::{TextRange, TomlTable};
use crate::error::{Error, quoted};
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
    recipes: Vec<KeyTemplate>,
}

impl PlanCollector {
    /// Adds the key template of the parts that all keys of a program share, by which a cluster keeps them on one
    /// server. With a global limit, which every program contains, it must be the global limit's whole key. It is then
    /// the same in all programs. `None` if there is no such template.
    fn affinity_template(&mut self, program: &OpTemplate) -> Option<u16> {
        let parts = |limit: LimitId| self.recipes[usize::from(self.infos[limit.index()].key_template_index)].parts();
        let reference_step = program.steps.iter().find(|step| step.is_global).or(program.steps.first())?;
        let everywhere = |part: &&KeyPart| program.steps.iter().all(|step| parts(step.limit).contains(part));
        let common: Vec<KeyPart> = parts(reference_step.limit).iter().filter(everywhere).cloned().collect();
        let whole = !reference_step.is_global || common.len() == parts(reference_step.limit).len();
        if common.is_empty() && program.steps.len() > 1 || !whole {
            return None;
        }
        // With `Share`, all keys of a call have the same affinity, even if the call lacks a part.
        u16::try_from(self.add_template(KeyTemplate::new(common, OnMissing::Share))).ok()
    }

    fn add_template(&mut self, recipe: KeyTemplate) -> usize {
        self.recipes.iter().position(|known| *known == recipe).unwrap_or_else(|| {
            self.recipes.push(recipe);
            self.recipes.len() - 1
        })
    }
}

impl DocumentReader<'_> {
    pub(super) fn plan(
        &mut self,
        root: &TomlTable,
        (path_quirks, ambiguous_paths): (PathQuirks, AmbiguousPaths),
        store: Option<&StoreConfig>,
        whole: TextRange,
    ) -> Option<Plan> {
        let inbound = root.table("inbound");
        let lists = self.lists(inbound);
        let forward_auth = self.forward_auth_range(root);
        let keep_keys_together = store.is_some_and(StoreConfig::keeps_keys_together);
        let global = self.global(inbound, forward_auth);
        let taken = global.as_ref().and_then(|global| global.group.as_ref()).map_or(0, LimitGroup::op_count);
        if taken > MAX_OPS
            && let Some(entry) = inbound.and_then(|inbound| inbound.get("global"))
        {
            self.report(entry.key_at, format!("[inbound.global] has {taken} limits"), format!("at most {MAX_OPS}"));
            return None;
        }
        let actions = self.actions(inbound, path_quirks, taken, forward_auth);
        let (lists, global, actions) = (lists?, global?, actions?);
        self.assemble(global, actions, lists, (path_quirks, ambiguous_paths), keep_keys_together, whole)
    }

    fn lists(&mut self, inbound: Option<&TomlTable>) -> Option<Vec<(ipnet::IpNet, ListStatus)>> {
        let mut all: Vec<(ipnet::IpNet, ListStatus, TextRange)> = Vec::new();
        let mut fine = true;
        for (key, listed) in [("allow", ListStatus::Allow), ("deny", ListStatus::Deny)] {
            let Some(node) = inbound.and_then(|inbound| inbound.node(key)) else {
                continue;
            };
            let Some(networks) = self.networks(node, key) else {
                fine = false;
                continue;
            };
            for (network, at) in networks {
                if let Some((_, _, other)) = all.iter().find(|(known, label, _)| *known == network && *label != listed)
                {
                    let pointer = self.texts.describe_location(*other);
                    let error =
                        Error::new(self.texts, at, format!("{network} is on both lists"), "each network on one list");
                    self.push_error(error.help(format!("`allow` has it {pointer}")));
                    fine = false;
                }
                all.push((network, listed, at));
            }
        }
        fine.then(|| all.into_iter().map(|(network, listed, _)| (network, listed)).collect())
    }

    fn assemble(
        &mut self,
        global: ParsedGlobal,
        read: Vec<ParsedAction>,
        lists: Vec<(ipnet::IpNet, ListStatus)>,
        (path_quirks, ambiguous_paths): (PathQuirks, AmbiguousPaths),
        together: bool,
        whole: TextRange,
    ) -> Option<Plan> {
        let mut all = PlanCollector::default();
        let mut fine = true;
        let mut global_ids = Vec::new();
        let mut global_quantities = Vec::new();
        if let Some(group) = global.group {
            global_quantities.clone_from(&group.quantities);
            let ids = self.add_limits(&mut all, "global", None, global.shadow, vec![group]);
            fine &= ids.is_some();
            global_ids = ids.unwrap_or_default();
        }
        let mut actions = Vec::new();
        let mut matchers = Vec::new();
        for (index, read) in read.into_iter().enumerate() {
            let id = ActionId::from_index(index);
            let ParsedAction { name, name_at, matcher, preset, cost, cost_at, shadow, groups, .. } = read;
            for (quantity, at) in groups.iter().flat_map(|group| &group.quantities) {
                fine &= self.check_capacity(cost, cost_at, quantity, *at, "the limit");
            }
            for (quantity, _) in &global_quantities {
                fine &= self.check_capacity(cost, cost_at, quantity, name_at, "[inbound.global]'s limit");
            }
            let Some(limits) = self.add_limits(&mut all, &name, Some(id), shadow, groups) else {
                fine = false;
                continue;
            };
            if let Some((matcher, _)) = &matcher {
                matchers.push((id, matcher.clone()));
            }
            let has_concurrency = limits.iter().any(|id| all.infos[id.index()].is_concurrency);
            let mut program = op_template(&all, &limits, &global_ids);
            if together && !program.steps.is_empty() {
                program.affinity = all.affinity_template(&program);
                if program.affinity.is_none() {
                    let message = format!(
                        "the limits of the action {} have no key part in common{}, so a Redis cluster would keep them \
                         on different servers",
                        quoted(&name),
                        if global_ids.is_empty() { "" } else { " with [inbound.global]'s `client_ip`" },
                    );
                    let error = Error::new(self.texts, name_at, message, "a part that all of them count by");
                    self.push_error(error.help(
                        "or write cluster = \"reserve\" in [store]: decisions then take one key after the other",
                    ));
                    fine = false;
                }
            }
            actions.push(Action {
                name,
                matcher: matcher.map(|(matcher, _)| matcher),
                preset,
                cost,
                shadow,
                unlimited: limits.is_empty(),
                limits,
                has_concurrency,
                op_template: program,
            });
        }
        if !fine {
            return None;
        }
        let mut unmatched = op_template(&all, &[], &global_ids);
        if together {
            unmatched.affinity = all.affinity_template(&unmatched);
        }
        let global_has_concurrency = global_ids.iter().any(|id| all.infos[id.index()].is_concurrency);
        let names: HashMap<String, ActionId> = actions
            .iter()
            .enumerate()
            .map(|(index, action)| (action.name.clone(), ActionId::from_index(index)))
            .collect();
        let of =
            |label: ListStatus| lists.iter().filter(move |(_, listed)| *listed == label).map(|(network, _)| *network);
        let limits = match Limits::new(all.limits) {
            Ok(limits) => limits,
            Err(error) => {
                self.report(whole, error.to_string(), "fewer limits");
                return None;
            }
        };
        let counts_by_path = all.recipes.iter().any(|recipe| recipe.parts().contains(&KeyPart::Path));
        let mut keyed_headers: Vec<HeaderName> = Vec::new();
        let enforced = limits.iter().filter(|(_, limit)| !limit.is_shadow()).map(|(id, _)| &all.infos[id.index()]);
        for part in enforced.flat_map(|info| all.recipes[usize::from(info.key_template_index)].parts()) {
            let header = match part {
                KeyPart::Header(name) => name,
                KeyPart::Cookie(_) => &COOKIE,
                _ => continue,
            };
            if !keyed_headers.contains(header) {
                keyed_headers.push(header.clone());
            }
        }
        Some(Plan {
            limits,
            limit_infos: all.infos,
            key_templates: all.recipes,
            fallback: names.get("default").copied(),
            names,
            actions,
            router: Router::new(matchers, path_quirks, ambiguous_paths),
            lists: AddressLists::new(of(ListStatus::Allow), of(ListStatus::Deny)),
            listed_networks: lists.iter().map(|(network, listed)| (format_network(*network), *listed)).collect(),
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

    /// Adds the limits of an action or of `inbound.global`, and returns their ids.
    fn add_limits(
        &mut self,
        all: &mut PlanCollector,
        owner: &str,
        action: Option<ActionId>,
        shadow: bool,
        groups: Vec<LimitGroup>,
    ) -> Option<Vec<LimitId>> {
        let alone = groups.iter().map(LimitGroup::op_count).sum::<usize>() == 1;
        let mut ids = Vec::new();
        let mut number = 0;
        for group in groups {
            let several = group.op_count() > 1;
            let recipe = all.add_template(KeyTemplate::new(group.key, group.missing));
            for (index, (quantity, at)) in
                group.quantities.into_iter().filter(|(quantity, _)| *quantity != Quantity::Unlimited).enumerate()
            {
                number += 1;
                let name = match &group.name {
                    Some(name) if several => format!("{owner}.{name}.{}", index + 1),
                    Some(name) => format!("{owner}.{name}"),
                    None if alone => owner.to_owned(),
                    None => format!("{owner}.{number}"),
                };
                let kind = quantity.to_limit_kind().ok().flatten()?;
                let (penalty, is_ban) = self.build_penalty(group.penalty, forget_time(&quantity))?;
                let concurrency = kind.has_permits();
                // A refused call is never in flight.
                let count = if concurrency { CountMode::Admitted } else { group.count };
                let words = description::describe_limit(&quantity, penalty.as_ref(), is_ban, count);
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
                let Some(id) = LimitId::from_index(all.limits.len()) else {
                    self.report(at, "the policy has more than 4095 limits", "at most 4095");
                    return None;
                };
                let source = if action.is_some() { LimitScope::Action } else { LimitScope::Global };
                let recipe = u16::try_from(recipe).ok()?;
                all.limits.push(limit);
                all.infos.push(LimitInfo {
                    name,
                    scope: source,
                    action,
                    quantity,
                    description: words,
                    rate_limit_policy: policy_item,
                    key_template_index: recipe,
                    is_concurrency: concurrency,
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
fn op_template(all: &PlanCollector, own: &[LimitId], global: &[LimitId]) -> OpTemplate {
    let mut program = OpTemplate::default();
    let own = own.iter().map(|id| (id, false));
    for (id, is_global) in own.chain(global.iter().map(|id| (id, true))) {
        let info = &all.infos[id.index()];
        let slot =
            program.key_templates.iter().position(|known| *known == info.key_template_index).unwrap_or_else(|| {
                program.key_templates.push(info.key_template_index);
                program.key_templates.len() - 1
            });
        let recipe =
            u8::try_from(slot).expect("invariant: a program has at most as many recipes as a batch has operations");
        program.steps.push(OpStep {
            limit: *id,
            key_template_index: recipe,
            is_concurrency: info.is_concurrency,
            is_global,
        });
    }
    program
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

/// Formats a network as people write it: a single address has no prefix.
fn format_network(network: ipnet::IpNet) -> String {
    if network.prefix_len() == network.max_prefix_len() { network.addr().to_string() } else { network.to_string() }
}
