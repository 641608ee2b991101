//! The limits of `rls.files`, as questions to the plan.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

use tidegate::policy::{ActionId, MatchedActions, Plan};
use tidegate_policy::RlsConfig;
use tidegate_policy::ratelimit_yaml::{DescriptorLimit, FoundLimit, LimitTable};
use tonic::Status;

use super::descriptors::{DescriptorCheck, Hits, entries, size};
use super::inline_limit::InlineLimit;
use super::messages::{Descriptor, DescriptorStatus, RateLimitRequest};
use crate::turn::Turn;
use crate::wire::decision_request::{DecisionRequest, DecisionRequestError};
use crate::wire::limitador::LimitCheck;

/// The limits, each with its action in the plan.
pub(crate) struct YamlLimits {
    table: Arc<LimitTable>,
    /// For each limit its action, and true if that has no limit. One of the policy may replace that of the files.
    actions: Vec<(ActionId, bool)>,
}

impl YamlLimits {
    /// Finds the actions of the limits. `None` if the policy has no files.
    pub(crate) fn new(config: &RlsConfig, plan: &Plan) -> Option<Self> {
        let table = Arc::clone(config.limits.as_ref()?);
        let find = |limit: &DescriptorLimit| {
            let id = plan.find_action(&limit.action).ok()?;
            Some((id, plan.action(id).is_unlimited()))
        };
        let actions = table.limits().iter().map(find).collect::<Option<_>>()?;
        Some(Self { table, actions })
    }

    pub(crate) fn table(&self) -> &LimitTable {
        &self.table
    }

    /// The question to a limit about calls with this key.
    ///
    /// # Errors
    /// There are too many hits.
    pub(crate) fn question(
        &self,
        index: usize,
        key: String,
        hits: u64,
    ) -> Result<LimitCheck<'_>, DecisionRequestError> {
        let mut request = DecisionRequest::default();
        let actions = MatchedActions::from(Some(self.actions[index].0));
        request.set_actions(actions);
        request.set_text("key", Cow::Owned(key))?;
        request.set_text("cost", hits.to_string().into())?;
        Ok(LimitCheck { limit: &self.table.limits()[index], actions, request })
    }

    pub(super) fn has_domain(&self, domain: &str) -> bool {
        self.table.has_domain(domain)
    }

    /// The question of each descriptor. One without a limit, or whose limit another one replaces, is admitted.
    pub(super) async fn questions<'a>(
        &self,
        asked: &'a RateLimitRequest,
        turn: &mut Turn,
    ) -> Result<Vec<DescriptorCheck<'a>>, Status> {
        let mut found: Vec<Option<FoundLimit<'_>>> = Vec::with_capacity(asked.descriptors.len());
        for descriptor in &asked.descriptors {
            turn.count(size(descriptor)).await;
            let entries = entries(descriptor);
            let limit = self.table.find(&asked.domain, entries.iter().map(|(key, value)| (*key, &**value)));
            found.push(limit.filter(|_| descriptor.limit.is_none()));
        }
        let replaced: HashSet<&str> =
            found.iter().flatten().flat_map(|found| &found.limit.limit.replaces).map(String::as_str).collect();
        let mut questions = Vec::with_capacity(found.len());
        for (index, (found, descriptor)) in found.into_iter().zip(&asked.descriptors).enumerate() {
            turn.count(size(descriptor)).await;
            let question = self.descriptor_question(asked, descriptor, found, &replaced);
            let invalid = |message| Status::invalid_argument(format!("descriptor {index}: {message}"));
            questions.push(question.map_err(invalid)?);
        }
        Ok(questions)
    }

    fn descriptor_question<'a>(
        &self,
        asked: &RateLimitRequest,
        descriptor: &'a Descriptor,
        found: Option<FoundLimit<'_>>,
        replaced: &HashSet<&str>,
    ) -> Result<DescriptorCheck<'a>, String> {
        let hits = descriptor.hits_addend.unwrap_or_else(|| asked.hits_addend.max(1).into());
        if let Some(limit) = &descriptor.limit {
            return InlineLimit::new(&asked.domain, descriptor, limit, hits).map(DescriptorCheck::Inline);
        }
        let Some(found) = found else { return Ok(DescriptorCheck::Decided(DescriptorStatus::admitted())) };
        let limit = &found.limit.limit;
        if self.actions[found.index].1 {
            let status = DescriptorStatus { limit_remaining: u32::MAX, ..DescriptorStatus::admitted() };
            return Ok(DescriptorCheck::Decided(status));
        }
        if limit.name.as_deref().is_some_and(|name| replaced.contains(name)) {
            return Ok(DescriptorCheck::Decided(DescriptorStatus::admitted()));
        }
        let is_quota = found.limit.quota_mode;
        let question = self.question(found.index, found.key, hits).map_err(|error| error.message)?;
        let LimitCheck { actions, request, .. } = question;
        let name = Some(limit.name.clone().unwrap_or_default());
        Ok(DescriptorCheck::Ask { request, actions, hits: Hits::of(descriptor, Some(hits)), is_quota, name })
    }
}
