//! Assembles the parsed sections into a plan.

use std::collections::HashMap;
use std::sync::Arc;

use http::header::{COOKIE, HeaderName};
use ipnet::IpNet;
use tidegate_core::{CountMode, LeaseSpec, Limit, LimitId, LimitKind, Limits, MAX_OPS, Sharing, Span};

use super::actions::{LimitGroup, ParsedAction};
use super::limit_list::LimitList;
use super::server::INBOUND;
use super::{DocumentReader, Reported, all_or_none};
use crate::address::{Ipv6Prefix, ListStatus, NetworkMap};
use crate::description;
use crate::document::{TextRange, TomlTable};
use crate::error::quoted;
use crate::key::{KeyPart, KeyTemplate, OnMissing, limit_tag};
use crate::path::{AmbiguousPaths, PathQuirks};
use crate::plan::{Action, ActionId, LimitInfo, LimitPlace, OpStep, OpTemplate, Plan};
use crate::quantity::Quantity;
use crate::router::Router;
use crate::sections::RlsConfig;
use crate::store::StoreConfig;

/// The limits collected so far.
#[derive(Default)]
struct PlanCollector {
    limits: LimitList<LimitInfo>,
    key_templates: Vec<KeyTemplate>,
    /// The limits of `inbound.global`.
    global: Vec<LimitId>,
    /// True if a store keeps all keys of a decision on one server.
    keeps_keys_together: bool,
}

impl PlanCollector {
    /// Returns a collector that begins with the limits of an earlier plan.
    fn following(plan: &Plan) -> Self {
        let infos = plan.limit_infos.iter().map(|info| (info.name.clone(), LimitInfo { action: None, ..info.clone() }));
        Self {
            limits: LimitList::following(&plan.limits, infos),
            key_templates: plan.key_templates.clone(),
            ..Self::default()
        }
    }

    /// Returns the operations of an action's calls: its own limits, then the global ones if it meets them.
    fn op_template(&mut self, own: &[LimitId], meets_global: bool) -> OpTemplate {
        let mut op_template = OpTemplate::default();
        let own = own.iter().map(|id| (id, false));
        let global = self.global.iter().filter(|_| meets_global).map(|id| (id, true));
        for (id, is_global) in own.chain(global) {
            let info = self.limits.info(*id);
            let slot = position_or_push(&mut op_template.key_templates, info.key_template_index);
            let key_template_index = u8::try_from(slot)
                .expect("invariant: an action has at most as many key templates as a batch has operations");
            let is_concurrency = info.is_concurrency;
            let is_text =
                |part: &KeyPart| matches!(part, KeyPart::Header(_) | KeyPart::Cookie(_) | KeyPart::QueryParameter(_));
            op_template.reads_texts |= self.key_parts(*id).iter().any(is_text);
            op_template.steps.push(OpStep { limit: *id, key_template_index, is_concurrency, is_global });
        }
        if self.keeps_keys_together {
            op_template.affinity = self.affinity_template(&op_template);
        }
        op_template
    }

    /// Adds the key template of the parts that all keys of an action share, by which a cluster keeps them on one
    /// server. With a global limit, which every action contains, it must be the global limit's whole key. It is then
    /// the same for all actions. `None` if there is no such template.
    fn affinity_template(&mut self, op_template: &OpTemplate) -> Option<u16> {
        let parts = |limit| self.key_parts(limit);
        let reference_step = op_template.steps.iter().find(|step| step.is_global).or(op_template.steps.first())?;
        let is_in_all_steps = |part: &&KeyPart| op_template.steps.iter().all(|step| parts(step.limit).contains(part));
        let common: Vec<KeyPart> = parts(reference_step.limit).iter().filter(is_in_all_steps).cloned().collect();
        let is_whole_key = !reference_step.is_global || common.len() == parts(reference_step.limit).len();
        if common.is_empty() && op_template.steps.len() > 1 || !is_whole_key {
            return None;
        }
        // With `Share`, all keys of a call have the same affinity, even if the call lacks a part.
        let key_template = KeyTemplate::new(common, OnMissing::Share);
        u16::try_from(position_or_push(&mut self.key_templates, key_template)).ok()
    }

    fn key_parts(&self, limit: LimitId) -> &[KeyPart] {
        &self.key_templates[usize::from(self.limits.info(limit).key_template_index)].parts
    }

    /// The limits that calls of these actions meet.
    fn active_limits<'c>(&'c self, actions: &'c [Action]) -> impl Iterator<Item = LimitId> + 'c {
        self.global.iter().chain(actions.iter().flat_map(|action| &action.limits)).copied()
    }

    /// Returns the request headers that enforced limits count by.
    fn keyed_headers(&self, actions: &[Action]) -> Vec<HeaderName> {
        let mut keyed_headers = Vec::new();
        let enforced = self.active_limits(actions).filter(|id| !self.limits.limit(*id).is_shadow());
        for part in enforced.flat_map(|id| self.key_parts(id)) {
            match part {
                KeyPart::Header(name) => position_or_push(&mut keyed_headers, name.clone()),
                KeyPart::Cookie(_) => position_or_push(&mut keyed_headers, COOKIE),
                _ => continue,
            };
        }
        keyed_headers
    }

    fn has_concurrency(&self, limits: &[LimitId]) -> bool {
        limits.iter().any(|id| self.limits.info(*id).is_concurrency)
    }
}

/// Returns the index of an item that is in the list, or else is added to it.
fn position_or_push<T: PartialEq>(list: &mut Vec<T>, item: T) -> usize {
    list.iter().position(|known| *known == item).unwrap_or_else(|| {
        list.push(item);
        list.len() - 1
    })
}

impl DocumentReader<'_> {
    pub(super) fn plan(
        &mut self,
        root: &TomlTable,
        (path_quirks, ambiguous_paths): (PathQuirks, AmbiguousPaths),
        store: Option<&StoreConfig>,
        rls: Option<&RlsConfig>,
        has_caller_rates: bool,
    ) -> Option<Plan> {
        let inbound = root.table("inbound");
        self.in_shadow = self.value(inbound, &INBOUND.mode).unwrap_or_default();
        let lists = self.lists(inbound);
        let forward_auth = self.forward_auth_range(root);
        let global = self.global(inbound, forward_auth);
        let global_op_count = global.iter().flatten().map(LimitGroup::op_count).sum();
        if global_op_count > MAX_OPS
            && let Some(entry) = inbound.and_then(|inbound| inbound.get("global"))
        {
            let message = format!("[inbound.global] has {global_op_count} limits");
            return self.error(entry.key_at, message, format!("at most {MAX_OPS}")).none();
        }
        let actions = self.actions(inbound, path_quirks, global_op_count, forward_auth);
        let (lists, global, mut actions) = (lists?, global?, actions?);
        if let Some(rls) = rls {
            let limits = self.yaml_actions(root, rls, &mut actions)?;
            actions.extend(limits);
        }
        let keeps_keys_together = store.is_some_and(StoreConfig::keeps_keys_together);
        let mut collector = self.predecessor.map(|policy| PlanCollector::following(policy.plan())).unwrap_or_default();
        collector.keeps_keys_together = keeps_keys_together;
        let actions = self.assemble(&mut collector, global, actions)?;
        let caller_rate = match has_caller_rates {
            true => Some(self.add_caller_rate(&mut collector)?),
            false => None,
        };
        let counts_by_path =
            collector.active_limits(&actions).any(|id| collector.key_parts(id).contains(&KeyPart::Path));
        let keyed_headers = collector.keyed_headers(&actions);
        let unmatched = collector.op_template(&[], true);
        let (limits, limit_infos, retired) = collector.limits.into_parts();
        let limits = self.numbered_limits(limits)?;
        let ids = || (0..).map(ActionId::from_index);
        let names: HashMap<String, ActionId> = actions.iter().map(|action| action.name.clone()).zip(ids()).collect();
        let matchers = ids().zip(&actions).filter_map(|(id, action)| Some((id, action.matcher.clone()?)));
        Some(Plan {
            fallback: names.get("default").copied(),
            names,
            router: Router::new(matchers, path_quirks, ambiguous_paths, counts_by_path),
            actions,
            lists: NetworkMap::new(lists.iter().copied()),
            listed_networks: lists,
            caller_rate,
            unmatched,
            counts_by_path,
            keyed_headers,
            global: collector.global,
            limits,
            limit_infos,
            retired,
            key_templates: collector.key_templates,
            path_quirks,
            ambiguous_paths,
            ipv6_prefix: Ipv6Prefix::DEFAULT,
        })
    }

    fn lists(&mut self, inbound: Option<&TomlTable>) -> Option<Vec<(IpNet, ListStatus)>> {
        let (allow, deny) = (self.value(inbound, &INBOUND.allow), self.value(inbound, &INBOUND.deny));
        let (allow, deny) = (allow?, deny?);
        let mut is_valid = true;
        for (network, at) in &deny {
            if let Some((_, other)) = allow.iter().find(|(known, _)| known == network) {
                let help = format!("`allow` has it {}", self.texts.describe_location(*other));
                self.error(*at, format!("{network} is on both lists"), "each network on one list").help(help);
                is_valid = false;
            }
        }
        let allow = allow.into_iter().map(|(network, _)| (network, ListStatus::Allow));
        let deny = deny.into_iter().map(|(network, _)| (network, ListStatus::Deny));
        is_valid.then(|| allow.chain(deny).collect())
    }

    /// Assembles all actions, after the global limits.
    fn assemble(
        &mut self,
        collector: &mut PlanCollector,
        global: Option<LimitGroup>,
        parsed_actions: Vec<ParsedAction>,
    ) -> Option<Vec<Action>> {
        let mut is_valid = true;
        let mut global_quantities = Vec::new();
        if let Some(group) = global {
            global_quantities.clone_from(&group.quantities);
            let ids = self.add_limits(collector, "global", None, 1, vec![group]);
            is_valid &= ids.is_some();
            collector.global = ids.unwrap_or_default();
        }
        let actions = all_or_none(parsed_actions.into_iter().enumerate().map(|(index, parsed)| {
            for (quantity, _) in global_quantities.iter().filter(|_| parsed.meets_global) {
                let limit = "[inbound.global]'s limit";
                is_valid &= self.check_capacity(parsed.cost, parsed.cost_at, quantity, parsed.name_at, limit);
            }
            self.assemble_action(collector, ActionId::from_index(index), parsed)
        }));
        actions.filter(|_| is_valid)
    }

    fn assemble_action(&mut self, collector: &mut PlanCollector, id: ActionId, parsed: ParsedAction) -> Option<Action> {
        let ParsedAction { name, name_at, matcher, cost, cost_at, shadow, groups, meets_global, .. } = parsed;
        let mut is_valid = true;
        for (quantity, at) in groups.iter().flat_map(|group| &group.quantities) {
            is_valid &= self.check_capacity(cost, cost_at, quantity, *at, "the limit");
        }
        let by = groups.iter().find_map(|group| Some(group.reservations.as_ref()?.by.clone()));
        let limits = self.add_limits(collector, &name, Some(id), cost, groups)?;
        let mut op_template = collector.op_template(&limits, meets_global);
        if let Some(by) = by {
            let key_template = KeyTemplate::new(by, OnMissing::default());
            op_template.caller = u16::try_from(position_or_push(&mut collector.key_templates, key_template)).ok();
        }
        if collector.keeps_keys_together && !op_template.steps.is_empty() && op_template.affinity.is_none() {
            let of_global = if collector.global.is_empty() { "" } else { " with [inbound.global]'s `client_ip`" };
            let message = format!(
                "the limits of the action {} have no key part in common{of_global}, so a Redis cluster would keep \
                 them on different servers",
                quoted(&name),
            );
            let error = self.error(name_at, message, "a part that all of them count by");
            error.help("or write cluster = \"reserve\" in [store]: decisions then take one key after the other");
            is_valid = false;
        }
        is_valid.then(|| Action {
            name,
            matcher: matcher.map(|(matcher, _)| matcher),
            cost,
            shadow,
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

    /// Reports that the ids of limits are used up.
    pub(super) fn too_many_limits(&mut self, at: TextRange, owner: &str) -> Reported<'_> {
        let help = self.predecessor.map(|_| "the limits of earlier policies count until a restart");
        self.error(at, format!("{owner} has more than 4095 limits"), "at most 4095").help_if(help)
    }

    /// Adds the limit of calls with terms of their own. Its terms have no effect.
    fn add_caller_rate(&mut self, collector: &mut PlanCollector) -> Option<LimitId> {
        const NAME: &str = "CL.THROTTLE";
        let quantity = Quantity::Rate { count: 1, per: Span::from_secs(1), burst: 1 };
        let kind = quantity.to_limit_kind().ok().flatten()?;
        let key_template = KeyTemplate::new(vec![KeyPart::Key], OnMissing::default());
        let key_template_index = u16::try_from(position_or_push(&mut collector.key_templates, key_template)).ok()?;
        let tag = limit_tag("inbound", NAME, &kind);
        let sharing = Sharing { on_outage: self.on_outage, lease: None };
        let info = LimitInfo {
            name: NAME.to_owned(),
            action: None,
            description: "the terms of each call".to_owned(),
            rate_limit_policy: description::rate_limit_policy(NAME, &quantity)?,
            quantity,
            key_template_index,
            is_concurrency: false,
            place: LimitPlace { group: 0, quantity: 0 },
        };
        let limit = Limit::new(kind).with_tag(tag).with_sharing(sharing);
        let id = collector.limits.add(NAME, limit, info);
        id.or_else(|| self.too_many_limits(self.full_range, "the policy").none())
    }

    /// Adds the limits of an action or of `inbound.global`, and returns their ids.
    fn add_limits(
        &mut self,
        collector: &mut PlanCollector,
        owner: &str,
        action: Option<ActionId>,
        cost: u64,
        groups: Vec<LimitGroup>,
    ) -> Option<Vec<LimitId>> {
        let is_only_limit = groups.iter().map(LimitGroup::op_count).sum::<usize>() == 1;
        let mut ids = Vec::new();
        for (group_index, group) in groups.into_iter().enumerate() {
            let has_several = group.op_count() > 1;
            let key_template = KeyTemplate::new(group.key, group.missing);
            let key_template_index =
                u16::try_from(position_or_push(&mut collector.key_templates, key_template)).ok()?;
            let quantities = group.quantities.into_iter().enumerate();
            let counted = quantities.filter(|(_, (quantity, _))| *quantity != Quantity::Unlimited);
            for (number, (index, (quantity, at))) in (1..).zip(counted) {
                let name = match &group.name {
                    Some(name) if has_several => format!("{owner}.{name}.{number}"),
                    Some(name) => format!("{owner}.{name}"),
                    None if is_only_limit => owner.to_owned(),
                    None => format!("{owner}.{}", ids.len() + 1),
                };
                let kind = quantity.to_limit_kind().ok().flatten()?;
                let (penalty, is_ban) = self.build_penalty(group.penalty, &quantity)?;
                let is_concurrency = kind.has_permits();
                // A refused call is never in flight.
                let count = if is_concurrency { CountMode::Admitted } else { group.count };
                let reservations = match &group.reservations {
                    Some(parsed) => {
                        let rules = self.build_reservations(parsed, (&quantity, &kind), cost, group.shadow)?;
                        Some((rules, &parsed.by))
                    }
                    None => None,
                };
                let mut description = description::describe_limit(&quantity, penalty.as_ref(), is_ban, count, cost);
                if let Some((rules, by)) = reservations.as_ref().filter(|_| !group.shadow) {
                    description.push_str(&description::describe_reservations(rules, by));
                }
                let rate_limit_policy = description::rate_limit_policy(&name, &quantity)?;
                let tag = limit_tag("inbound", &name, &kind);
                let mut limit = Limit::new(with_lease_lead(kind, group.sharing.lease))
                    .with_tag(tag)
                    .with_sharing(group.sharing)
                    .with_count_mode(count)
                    .with_shadow(group.shadow);
                if let Some(penalty) = penalty {
                    limit = limit.with_penalty(penalty);
                }
                if let Some((rules, _)) = reservations {
                    limit = limit.with_reservations(rules);
                }
                let info = LimitInfo {
                    name: name.clone(),
                    action,
                    quantity,
                    description,
                    rate_limit_policy,
                    key_template_index,
                    is_concurrency,
                    place: LimitPlace { group: group_index, quantity: index },
                };
                let Some(id) = collector.limits.add(&name, limit, info) else {
                    return self.too_many_limits(at, "the policy").none();
                };
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
