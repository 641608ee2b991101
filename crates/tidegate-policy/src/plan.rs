//! The plan that the engine runs: limits with their names, actions with their matchers, and the batch of a call.

mod parts;
mod same_requests;

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use http::HeaderName;
use ipnet::IpNet;
use tidegate_core::{Batch, Decision, Key, Limit, LimitId, Limits, Op, Reason, ShareLevel, Time, Verb};

use crate::address::{Ipv6Prefix, ListStatus, NetworkMap, PrefixBytes, counted_network, network_name};
use crate::key::{KeyError, KeyOptions, KeyPart, KeySeed, KeyTemplate, OnMissing, UncountableError};
use crate::matched_actions::{MatchedActions, PathError};
use crate::nearest::nearest;
use crate::path::{AmbiguousPaths, PathQuirks};
use crate::path_encoding::forwarded_path;
use crate::query::Query;
use crate::router::Router;
pub use parts::{Action, ActionId, LimitInfo, LimitScope, RateLimitPolicyItem};
pub(crate) use parts::{LimitPlace, OpStep, OpTemplate};

/// An action that the plan doesn't have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown action {found:?}{}", nearest.as_ref().map(|name| format!("; did you mean {name:?}?")).unwrap_or_default())]
pub struct UnknownActionError {
    /// The unknown name, cut to 128 characters.
    pub found: String,
    /// The most similar name that exists, if any is similar.
    pub nearest: Option<String>,
}

/// The reason why a plan can't decide about a query: a running gate answers 400 or 503.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// The plan has no action of this name.
    #[error(transparent)]
    UnknownAction(#[from] UnknownActionError),
    /// The query lacks a part that a limit counts by, or has it wrong.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// A checked policy in the form that the engine runs: immutable, cheap to share, and without clock or state. A method
/// panics if its [`LimitId`] or [`ActionId`] is of another plan, and this one has fewer of them.
pub struct Plan {
    pub(crate) limits: Arc<Limits>,
    pub(crate) limit_infos: Vec<LimitInfo>,
    /// The limits of earlier policies, in order.
    pub(crate) retired: Vec<LimitId>,
    pub(crate) key_templates: Vec<KeyTemplate>,
    pub(crate) actions: Vec<Action>,
    pub(crate) names: HashMap<String, ActionId>,
    pub(crate) fallback: Option<ActionId>,
    pub(crate) router: Router,
    /// The allow list, then the deny list.
    pub(crate) listed_networks: Vec<(IpNet, ListStatus)>,
    /// The status of each address by the smallest of the listed networks that contain it.
    pub(crate) lists: NetworkMap<ListStatus>,
    pub(crate) global: Vec<LimitId>,
    /// The limit under which calls are counted by their own terms, if the policy has an interface for them.
    pub(crate) caller_rate: Option<LimitId>,
    pub(crate) unmatched: OpTemplate,
    pub(crate) path_quirks: PathQuirks,
    pub(crate) ambiguous_paths: AmbiguousPaths,
    pub(crate) counts_by_path: bool,
    pub(crate) ipv6_prefix: Ipv6Prefix,
    /// The headers that limits count by, `Cookie` included.
    pub(crate) keyed_headers: Vec<HeaderName>,
}

impl fmt::Debug for Plan {
    /// Shows the content of the policy, without the tables that are built from it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan")
            .field("limits", &self.limits)
            .field("limit_infos", &self.limit_infos)
            .field("key_templates", &self.key_templates)
            .field("actions", &self.actions)
            .field("listed_networks", &self.listed_networks)
            .field("global", &self.global)
            .field("path_quirks", &self.path_quirks)
            .field("ambiguous_paths", &self.ambiguous_paths)
            .field("ipv6_prefix", &self.ipv6_prefix)
            .finish_non_exhaustive()
    }
}

impl Plan {
    /// Every limit, by id; with the retired ones.
    pub fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    /// Every limit that calls can meet, without [`Plan::caller_rate`].
    pub fn active_limits(&self) -> impl Iterator<Item = (LimitId, &Limit)> {
        self.limits.iter().filter(|(id, _)| !self.is_retired(*id) && Some(*id) != self.caller_rate)
    }

    /// The limit under which calls that state their own rate ([`CallerRate`](tidegate_core::CallerRate)) are counted.
    /// `None` without `[resp]`, `[rls]` and throttlecrab in `api.compat`.
    pub fn caller_rate(&self) -> Option<LimitId> {
        self.caller_rate
    }

    /// The key of such a call, for the bytes by which its caller names it.
    pub fn caller_rate_key(&self, name: &[u8], seed: &KeySeed) -> Key {
        crate::key::named_key(name, seed)
    }

    /// True if a limit belongs to an [earlier policy](crate::Policy::load_next). No new call meets it, but calls that
    /// began before end by it.
    pub fn is_retired(&self, limit: LimitId) -> bool {
        self.retired.binary_search(&limit).is_ok()
    }

    /// The name, quantity and description of a limit.
    pub fn limit_info(&self, limit: LimitId) -> &LimitInfo {
        &self.limit_infos[limit.index()]
    }

    /// The parts of the key that a limit counts by.
    pub fn key_parts(&self, limit: LimitId) -> &[KeyPart] {
        &self.key_template(limit).parts
    }

    /// The handling of requests that lack a part of a limit's key; `None` if no part can be missing.
    pub fn on_missing(&self, limit: LimitId) -> Option<OnMissing> {
        let key_template = self.key_template(limit);
        key_template.parts.iter().any(KeyPart::may_be_missing).then_some(key_template.on_missing)
    }

    /// The headers that limits count by, `Cookie` included; without those of shadow limits.
    pub fn keyed_headers(&self) -> &[HeaderName] {
        &self.keyed_headers
    }

    /// The number of bits of a client's IPv6 address that are counted.
    pub fn ipv6_prefix(&self) -> u8 {
        self.ipv6_prefix.length()
    }

    /// The name of the client that this part of a key counts an address as: the IPv4 address, or the IPv6 network, such as
    /// `2001:db8::/64`.
    pub fn client_name(&self, part: &KeyPart, ip: IpAddr) -> String {
        let length = match part {
            KeyPart::Ipv6Network(length) => Ipv6Prefix::new(*length),
            _ => None,
        };
        network_name(ip, length.unwrap_or(self.ipv6_prefix))
    }

    /// The address that stands for a client in counts: the IPv4 address, or the first of the IPv6 network.
    pub fn client_network(&self, ip: IpAddr) -> IpAddr {
        match counted_network(ip, self.ipv6_prefix) {
            PrefixBytes::V4(octets) => octets.into(),
            PrefixBytes::V6(bytes) => Ipv6Addr::from_bits(u128::from(u64::from_be_bytes(bytes)) << 64).into(),
        }
    }

    /// True if a limit counts the calls of each client address or network separately.
    pub fn counts_by_address(&self, limit: LimitId) -> bool {
        self.key_parts(limit).iter().any(|part| matches!(part, KeyPart::ClientIp | KeyPart::Ipv6Network(_)))
    }

    /// Every action in file order.
    pub fn actions(&self) -> impl ExactSizeIterator<Item = (ActionId, &Action)> {
        self.actions.iter().enumerate().map(|(index, action)| (ActionId::from_index(index), action))
    }

    /// One action.
    pub fn action(&self, id: ActionId) -> &Action {
        &self.actions[id.index()]
    }

    /// The limits of `inbound.global`, which apply to every call.
    pub fn global(&self) -> &[LimitId] {
        &self.global
    }

    /// True if `inbound.global` counts calls in flight.
    pub fn global_has_concurrency(&self) -> bool {
        self.global.iter().any(|id| self.limit_info(*id).is_concurrency)
    }

    /// True if a limit on calls in flight can apply to a request that names no action: that of `inbound.global`, or of
    /// an action with a matcher.
    pub fn requests_meet_concurrency(&self) -> bool {
        let matched = |action: &Action| action.has_concurrency && action.matcher.is_some();
        self.global_has_concurrency() || self.actions.iter().any(matched)
    }

    /// The action of this name, otherwise the action `default` if there is one.
    ///
    /// # Errors
    /// If neither exists; the error has the nearest name.
    pub fn find_action(&self, name: &str) -> Result<ActionId, UnknownActionError> {
        self.names.get(name).copied().or(self.fallback).ok_or_else(|| UnknownActionError {
            found: name.chars().take(128).collect(),
            nearest: nearest(name, self.actions.iter().map(Action::name)).map(str::to_owned),
        })
    }

    /// Finds the first action in file order that matches the query's method, host and path, for each reading of the
    /// path; a plain path has one. The query's `action` is ignored. If there is no action, only `inbound.global`
    /// applies to the call.
    ///
    /// # Errors
    /// If the path has too many readings, or `inbound.ambiguous_paths` refuses it.
    #[inline]
    pub fn matching_actions(&self, query: &Query<'_>) -> Result<MatchedActions, PathError> {
        self.router.find(query)
    }

    /// The action of the path's normal form, and true if no server reads the path in another way. It is the first step of
    /// [`Plan::matching_actions`], and takes less time; [`Plan::actions_of_all_readings`] is the second.
    #[inline]
    pub fn action_of_normal_path(&self, query: &Query<'_>) -> (Option<ActionId>, bool) {
        self.router.find_normal(query)
    }

    /// The actions of all readings of a path, after that of its normal form.
    ///
    /// # Errors
    /// As [`Plan::matching_actions`].
    pub fn actions_of_all_readings(
        &self,
        query: &Query<'_>,
        normal: Option<ActionId>,
    ) -> Result<MatchedActions, PathError> {
        self.router.find_all_readings(query, normal)
    }

    /// The path and query with which a request is forwarded; `None` if they stay as they came. If `ambiguous_paths` is
    /// `normalise`, dot segments are resolved, empty segments dropped, unnecessary escapes decoded and all others
    /// written in capitals. `%2F` and the text after `;` or `?` stay.
    #[inline]
    pub fn forwarded_path(&self, path_and_query: &str) -> Option<String> {
        if self.ambiguous_paths == AmbiguousPaths::Normalise { forwarded_path(path_and_query) } else { None }
    }

    /// The status of an address: on the allow list (never limited), on the deny list (always refused), or on neither.
    /// If several networks contain it, the smallest decides.
    pub fn list_status(&self, ip: IpAddr) -> ListStatus {
        // Most policies have no lists.
        let found = if self.listed_networks.is_empty() { None } else { self.lists.find(ip) };
        found.unwrap_or(ListStatus::Neither)
    }

    /// The decision about a call from an address on a list; `None` if the limits decide.
    #[inline]
    pub fn decide_by_list(&self, ip: Option<IpAddr>, now: impl FnOnce() -> Time) -> Option<Decision> {
        match self.list_status(ip?) {
            ListStatus::Neither => None,
            ListStatus::Allow => Some(Decision::without_limit(true, Reason::AllowList, now())),
            ListStatus::Deny => Some(Decision::without_limit(false, Reason::DenyList, now())),
        }
    }

    /// The cost of a call: its own if it states one, otherwise its action's, otherwise 1.
    pub fn cost(&self, action: Option<ActionId>, query: &Query<'_>) -> u64 {
        query.cost.unwrap_or_else(|| action.map_or(1, |id| self.action(id).cost))
    }

    /// The operations of a call on the store: the limits of its action, then `inbound.global`. Each of several actions
    /// is charged at its own cost, and `inbound.global` once, at the largest.
    ///
    /// `verb` decides which limits take part. `Take` and `Peek`: all. `Refund`, `Debit` and `Settle`: all but calls in
    /// flight. `Release` and `Renew`: only calls in flight. `Reset`: only the action's own (with no action, the global
    /// ones). A call in flight counts 1, regardless of its cost. `holder` is the batch's id, under which permits are
    /// held.
    ///
    /// If a part of a key has several values, its limits have an operation for each.
    ///
    /// It allocates nothing, except for errors, for several actions, for paths that aren't plain if a limit counts by
    /// them, and for values of key parts that are encoded or joined.
    ///
    /// # Errors
    /// [`KeyError`] if the query lacks a part that one of those limits counts by, can't be counted by it, or has more
    /// operations than a batch holds.
    #[inline]
    pub fn ops(
        &self,
        actions: impl Into<MatchedActions>,
        query: &Query<'_>,
        seed: &KeySeed,
        verb: Verb,
        holder: u64,
    ) -> Result<Batch, KeyError> {
        let mut batch = Batch::new(holder);
        self.fill(&mut batch, actions, query, seed, verb)?;
        Ok(batch)
    }

    /// Does the same as [`Plan::ops`] in an existing empty batch, which saves a copy.
    ///
    /// # Errors
    /// As [`Plan::ops`]; the batch then has some of the operations, and must not be used.
    #[inline]
    pub fn fill(
        &self,
        batch: &mut Batch,
        actions: impl Into<MatchedActions>,
        query: &Query<'_>,
        seed: &KeySeed,
        verb: Verb,
    ) -> Result<(), KeyError> {
        let actions = actions.into();
        if actions.has_multiple() || self.needs_path_readings(query) {
            return self.fill_actions(batch, actions, query, seed, verb);
        }
        self.check_key_bytes(actions.first(), query)?;
        self.fill_action(batch, actions.first(), query, self.key_options(None), seed, verb)
    }

    #[inline]
    pub(crate) fn fill_action(
        &self,
        batch: &mut Batch,
        action: Option<ActionId>,
        query: &Query<'_>,
        rules: KeyOptions<'_>,
        seed: &KeySeed,
        verb: Verb,
    ) -> Result<(), KeyError> {
        let op_template = self.op_template(action);
        let cost = self.cost(action, query);
        if let Some(key_template_index) = op_template.affinity
            && let Some(step) = op_template.steps.first()
        {
            let key_template = &self.key_templates[usize::from(key_template_index)];
            let common = match key_template.key(query, rules, seed) {
                Some(key) => key,
                None => self.affinity_key(key_template, step.limit, query, rules, seed)?,
            };
            batch.set_affinity(common.lo().max(1));
        }
        if let Some(caller) = op_template.caller
            && matches!(verb, Verb::Take | Verb::Peek)
        {
            let key = self.key_templates[usize::from(caller)].key(query, rules, seed);
            batch.set_caller(key.map_or(0, |key| key.lo().max(1)), Time::ZERO);
        }
        let mut keys = [Key::default(); tidegate_core::MAX_OPS];
        let mut hashed = 0_u8;
        for step in &op_template.steps {
            let takes_part = match verb {
                Verb::Take | Verb::Peek => true,
                Verb::Refund | Verb::Debit | Verb::Settle => !step.is_concurrency,
                Verb::Throttle { .. }
                | Verb::Success { .. }
                | Verb::Disable
                | Verb::RestorePenalty { .. }
                | Verb::TakeByTerms { .. }
                | Verb::Pace { .. } => false,
                Verb::Release | Verb::Renew => step.is_concurrency,
                Verb::Reset => !step.is_global || action.is_none(),
            };
            if !takes_part || (step.is_global && query.skips_global) {
                continue;
            }
            let cost = if step.is_concurrency { 1 } else { cost };
            let slot = usize::from(step.key_template_index);
            if hashed & 1 << slot == 0 {
                let key_template = &self.key_templates[usize::from(op_template.key_templates[slot])];
                let Some(key) = key_template.key(query, rules, seed) else {
                    let op = Op::new(step.limit, verb, Key::default(), cost);
                    self.fill_each_key(batch, key_template, query, rules, seed, op)?;
                    continue;
                };
                keys[slot] = key;
                hashed |= 1 << slot;
            }
            let op = Op::new(step.limit, verb, keys[slot], cost);
            batch.push(op).or_else(|_| self.replace_shadow_op(batch, op).ok_or(UncountableError::TooManyOperations))?;
        }
        Ok(())
    }

    /// The key under which a call from this address is counted for this limit if the store has no room for a less
    /// shared key. It is the key of the network around the address or, if the limit doesn't count by address, one key
    /// of all calls. It comes with the level at which it is shared. Shared keys never equal other keys.
    pub fn shared_key(
        &self,
        limit: LimitId,
        share: ShareLevel,
        ip: Option<IpAddr>,
        seed: &KeySeed,
    ) -> (ShareLevel, Key) {
        self.key_template(limit).shared_key(share, ip, self.key_options(None), seed)
    }

    /// The first part of the keys of the action (or `inbound.global`) that no plain HTTP request carries, with its
    /// limit. A proxy or forward-auth can't serve such an action.
    pub fn part_not_in_requests(&self, action: Option<ActionId>) -> Option<(LimitId, &KeyPart)> {
        let op_template = self.op_template(action);
        op_template.steps.iter().find_map(|step| {
            let part = self.key_parts(step.limit).iter().find(|part| !part.is_in_requests())?;
            Some((step.limit, part))
        })
    }

    #[inline]
    pub(crate) fn op_template(&self, action: Option<ActionId>) -> &OpTemplate {
        action.map_or(&self.unmatched, |id| &self.action(id).op_template)
    }

    pub(crate) fn key_template(&self, limit: LimitId) -> &KeyTemplate {
        &self.key_templates[usize::from(self.limit_info(limit).key_template_index)]
    }

    /// The rules of keys, with the path to count by if it is one of several.
    pub(crate) fn key_options<'p>(&self, path: Option<&'p [u8]>) -> KeyOptions<'p> {
        KeyOptions { quirks: self.path_quirks, ipv6: self.ipv6_prefix, path }
    }

    /// Adds an operation like `op` for each key that the call has under its limit. A shadow limit only observes: it
    /// skips calls that can't be counted.
    #[cold]
    fn fill_each_key(
        &self,
        batch: &mut Batch,
        key_template: &KeyTemplate,
        query: &Query<'_>,
        rules: KeyOptions<'_>,
        seed: &KeySeed,
        op: Op,
    ) -> Result<(), KeyError> {
        let keys = match key_template.keys(query, rules, seed, self.limit_info(op.limit).name()) {
            Err(KeyError::Uncountable(_)) if self.is_shadow(op.limit) => return Ok(()),
            // A reset is of what was named, which may be a part of a client only.
            Err(KeyError::Missing(_) | KeyError::Uncountable(UncountableError::Missing(_)))
                if op.verb == Verb::Reset =>
            {
                return Ok(());
            }
            keys => keys,
        };
        for key in keys? {
            let op = Op { key, ..op };
            batch.push(op).or_else(|_| self.replace_shadow_op(batch, op).ok_or(UncountableError::TooManyOperations))?;
        }
        Ok(())
    }

    /// True if a limit only observes.
    pub fn is_shadow(&self, limit: LimitId) -> bool {
        self.limits.get(limit).is_some_and(Limit::is_shadow)
    }

    /// The only key of the part that all keys of a call have in common; several can't be kept on one server.
    #[cold]
    fn affinity_key(
        &self,
        key_template: &KeyTemplate,
        limit: LimitId,
        query: &Query<'_>,
        rules: KeyOptions<'_>,
        seed: &KeySeed,
    ) -> Result<Key, KeyError> {
        let keys = key_template.keys(query, rules, seed, self.limit_info(limit).name())?;
        match keys.as_slice() {
            [key] => Ok(*key),
            _ => Err(UncountableError::TooManyOperations.into()),
        }
    }
}
