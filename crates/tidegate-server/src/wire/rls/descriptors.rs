//! The descriptors of a request to the rate limit service, and the decision about each.

use std::borrow::Cow;

use http::header::RETRY_AFTER;
use tidegate::policy::{KeyError, MatchedActions, Query, is_host};
use tidegate::store::Store;
use tidegate::{CheckError, Decision};
use tidegate_core::{CallerRateDecision, Clock};
use tonic::Status;

use super::inline_limit::InlineLimit;
use super::messages::{Code, Descriptor, DescriptorStatus, Entry, RateLimitRequest, RateLimitResponse};
use super::status::{descriptor_status, strictness};
use super::{POLICY_DOMAIN, RlsState, YamlLimits};
use crate::access_log::AccessSlot;
use crate::rejections::RejectionReason;
use crate::turn::Turn;
use crate::wire::decision_request::{DecisionRequest, DecisionRequestError};
use crate::wire::forward_auth::{IN_FLIGHT, meets_concurrency};
use crate::wire::http_api::{decide, validate};
use crate::wire::limitador::{self, Decider, is_refused};

/// The start of a field that is a header.
const HEADER_FIELD: &str = "header:";

impl Entry {
    /// The value as text. All bytes that are no text are the same character.
    pub(super) fn text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.value)
    }
}

/// The meaning of a descriptor's hits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Hits {
    Take,
    /// To take what is left if they don't fit: a descriptor's own hits are often told after the call.
    TakeAll,
    /// To ask for room for one.
    Peek,
    Refund,
}

impl Hits {
    pub(super) fn of(descriptor: &Descriptor, addend: Option<u64>) -> Self {
        match addend {
            _ if descriptor.is_negative_hits => Self::Refund,
            Some(0) => Self::Peek,
            _ if descriptor.hits_addend.is_some() => Self::TakeAll,
            _ => Self::Take,
        }
    }
}

/// A descriptor, read.
#[expect(clippy::large_enum_variant, reason = "nearly all are of the large kind")]
pub(super) enum DescriptorCheck<'a> {
    /// Its status is known, since no limit has to be asked.
    Decided(DescriptorStatus),
    /// The limits of these actions decide. If `is_quota`, they refuse the request only if all such descriptors are over
    /// their limits.
    Ask {
        request: DecisionRequest<'a>,
        actions: MatchedActions,
        hits: Hits,
        is_quota: bool,
        /// The name that a file gives the limit; empty if none. `None` for a limit of the policy.
        name: Option<String>,
    },
    /// The descriptor states its own limit.
    Inline(InlineLimit),
}

impl<S: Store, C: Clock> RlsState<S, C> {
    pub(super) async fn decide(
        &self,
        asked: &RateLimitRequest,
        access: &AccessSlot,
    ) -> Result<RateLimitResponse, Status> {
        if asked.domain.is_empty() {
            return Err(Status::invalid_argument("`domain` is empty"));
        }
        if asked.descriptors.is_empty() {
            return Err(Status::invalid_argument("`descriptors` is empty"));
        }
        let mut turn = Turn::default();
        // All are read before any is counted.
        let questions = match &self.limits {
            _ if asked.domain == POLICY_DOMAIN => {
                let mut questions = Vec::with_capacity(asked.descriptors.len());
                for (index, descriptor) in asked.descriptors.iter().enumerate() {
                    turn.count(size(descriptor)).await;
                    questions.push(self.question(index, descriptor, asked.hits_addend, access)?);
                }
                questions
            }
            Some(limits) if limits.has_domain(&asked.domain) => {
                match Box::pin(self.decide_together(limits, asked, access)).await? {
                    Some(response) => return Ok(response),
                    None => limits.questions(asked, &mut turn).await?,
                }
            }
            _ => self.admit_unknown_domain(asked),
        };
        let plan = self.gate.plan();
        // The address that a request comes from is counted once, though several descriptors may have it.
        let mut is_global_counted = false;
        let mut statuses = Vec::with_capacity(questions.len());
        let mut tightest: Option<(MatchedActions, Decision)> = None;
        let (mut is_over, mut quotas, mut quotas_over, mut inline_wait) = (false, 0, 0, None);
        for (question, descriptor) in questions.into_iter().zip(&asked.descriptors) {
            turn.count(size(descriptor)).await;
            let (request, actions, hits, is_quota, name) = match question {
                DescriptorCheck::Ask { request, actions, hits, is_quota, name } => {
                    (request, actions, hits, is_quota, name)
                }
                DescriptorCheck::Decided(status) => {
                    is_over |= status.code() == Code::OverLimit;
                    statuses.push(status);
                    continue;
                }
                DescriptorCheck::Inline(inline) => {
                    let decided = Box::pin(self.decide_inline(&inline)).await;
                    let decided = decided.map_err(|error| self.status_of(&error))?;
                    is_over |= decided.is_limited;
                    inline_wait = inline_wait.max(decided.retry_after.map(|_| decided.retry_after_secs()));
                    statuses.push(inline.status(&decided));
                    continue;
                }
            };
            let query = request.query();
            let skips_global = is_global_counted || query.ip.is_none();
            is_global_counted |= !skips_global;
            let query = Query { actions: Some(actions), skips_global, ..query };
            let decision = match self.decide_one(&query, hits).await {
                Ok(decision) => decision,
                Err(error) if self.log_uncountable(&error, &query, access) => {
                    is_over = true;
                    statuses.push(DescriptorStatus::refused());
                    continue;
                }
                Err(error) => return Err(self.status_of(&error)),
            };
            self.parts.refusals.log_decision(plan, actions, &query, &decision, access);
            statuses.push(descriptor_status(plan, &decision, name.as_deref()));
            if is_quota {
                quotas += 1;
                if !decision.allowed {
                    quotas_over += 1;
                }
            } else {
                is_over |= !decision.allowed;
            }
            if tightest.is_none_or(|(_, other)| strictness(&decision) > strictness(&other)) {
                tightest = Some((actions, decision));
            }
        }
        is_over |= quotas > 0 && quotas == quotas_over;
        // The refusal of one quota among several is not the request's.
        let told = tightest.filter(|(_, decision)| decision.allowed || is_over);
        let mut headers = told.map(|(actions, decision)| self.headers(actions, &decision)).unwrap_or_default();
        if let Some(wait) = inline_wait {
            add_wait(&mut headers, wait);
        }
        Ok(RateLimitResponse {
            overall_code: if is_over { Code::OverLimit } else { Code::Ok }.into(),
            statuses,
            response_headers_to_add: headers,
        })
    }

    /// Decides about a request whose domain is a namespace of limitador's. Each descriptor has the status of the limit that
    /// binds most. `None` if the domain isn't one.
    async fn decide_together(
        &self,
        limits: &YamlLimits,
        asked: &RateLimitRequest,
        access: &AccessSlot,
    ) -> Result<Option<RateLimitResponse>, Status> {
        // The hits of several descriptors can't be told apart here, because all limits see all descriptors.
        let own_hits = match &asked.descriptors[..] {
            [one] => one.hits_addend,
            _ => None,
        };
        let is_refund = asked.descriptors.iter().any(|descriptor| descriptor.is_negative_hits);
        if is_refund && !asked.descriptors.iter().all(|descriptor| descriptor.is_negative_hits) {
            let message = "the hits of some descriptors are negative: here all are, or none, as they are counted once";
            return Err(Status::invalid_argument(message));
        }
        let hits = own_hits.unwrap_or_else(|| asked.hits_addend.max(1).into());
        let descriptors: Vec<_> = asked.descriptors.iter().map(entries).collect();
        let questions = limits.applying(&asked.domain, descriptors.iter().map(borrow), hits);
        let questions = questions.map_err(|error| Status::invalid_argument(error.message))?;
        let Some(questions) = questions else { return Ok(None) };
        let decider = Decider { gate: &self.gate, refusals: &self.parts.refusals, metrics: &self.parts.metrics };
        let decided = match (is_refund, hits) {
            (true, _) => decider.refund(&questions).await,
            (false, 0) => decider.ask(&questions).await,
            (false, _) => decider.decide_together(&questions, access).await,
        };
        let decisions = decided.map_err(|error| self.status_of(&error))?;
        let tightest = limitador::tightest(&decisions).map(|index| (&questions[index], &decisions[index]));
        let status = tightest.map_or_else(DescriptorStatus::admitted, |(asked, decision)| {
            let name = asked.limit.limit.name.as_deref().unwrap_or_default();
            descriptor_status(self.gate.plan(), decision, Some(name))
        });
        let code = if is_refused(&decisions) { Code::OverLimit } else { Code::Ok };
        Ok(Some(RateLimitResponse {
            overall_code: code.into(),
            statuses: vec![status; asked.descriptors.len()],
            response_headers_to_add: tightest.map(|(asked, it)| self.headers(asked.actions, it)).unwrap_or_default(),
        }))
    }

    /// As the original, which has no limits for a domain that it doesn't know.
    fn admit_unknown_domain<'a>(&self, asked: &RateLimitRequest) -> Vec<DescriptorCheck<'a>> {
        self.unknown_domain.call_once(|| {
            let domain = tidegate_policy::printable(&asked.domain);
            tracing::warn!(
                %domain,
                "the rate limit service admits all calls of an unknown domain; known are `{POLICY_DOMAIN}` and those of rls.files"
            );
        });
        asked.descriptors.iter().map(|_| DescriptorCheck::Decided(DescriptorStatus::admitted())).collect()
    }

    /// Reads a descriptor of the policy's domain. If the client's request can't be counted, it is refused: after an error,
    /// Envoy would let it pass by default.
    fn question<'a>(
        &self,
        index: usize,
        descriptor: &'a Descriptor,
        hits_addend: u32,
        access: &AccessSlot,
    ) -> Result<DescriptorCheck<'a>, Status> {
        let invalid =
            |error: DecisionRequestError| Status::invalid_argument(format!("descriptor {index}: {}", error.message));
        if descriptor.limit.is_some() {
            let message = format!("descriptor {index}: the policy has the limits of the domain `{POLICY_DOMAIN}`");
            return Err(Status::invalid_argument(message));
        }
        let mut request = DecisionRequest::default();
        // A header that no entry has is one that the client hasn't sent.
        request.set_no_headers();
        for entry in &descriptor.entries {
            // The name that Envoy gives the client's address.
            let field = if entry.key == "remote_address" { "ip" } else { &entry.key };
            match request.set_text(field, entry.text()) {
                Ok(()) => {}
                Err(error) if field.strip_prefix(HEADER_FIELD).is_some_and(is_header_name) => {
                    return Ok(self.reject(RejectionReason::Head, &request.query(), &error.message, access));
                }
                // An operator may take it from a header.
                Err(error) if ["ip", "platform"].contains(&field) && !request.has(field) => {
                    return Ok(self.reject(RejectionReason::MissingPart, &request.query(), &error.message, access));
                }
                Err(error) => return Err(invalid(error)),
            }
        }
        let addend = descriptor.hits_addend.or((hits_addend > 0).then_some(hits_addend.into()));
        if let Some(addend) = addend {
            request.set_text("cost", addend.to_string().into()).map_err(invalid)?;
        }
        let hits = Hits::of(descriptor, addend);
        let query = request.query();
        if query.host.is_some_and(|host| !is_host(host.as_bytes())) {
            return Ok(self.reject(RejectionReason::Host, &query, "the host is no name or address", access));
        }
        validate(&self.gate, &self.parts.refusals, "/v1/check", &request, access).map_err(invalid)?;
        access.note(|entry| entry.note_question(&query));
        match self.gate.actions(&query) {
            Ok(actions) if meets_concurrency(self.gate.plan(), actions) => {
                Err(Status::failed_precondition(format!("descriptor {index}: {IN_FLIGHT}")))
            }
            Ok(actions) => Ok(DescriptorCheck::Ask { request, actions, hits, is_quota: false, name: None }),
            Err(error) if self.log_uncountable(&error, &query, access) => {
                Ok(DescriptorCheck::Decided(DescriptorStatus::refused()))
            }
            Err(error) => Err(self.status_of(&error)),
        }
    }

    /// The status of a descriptor with a value of the client's that can't be counted, which is logged.
    fn reject<'a>(
        &self,
        reason: RejectionReason,
        query: &Query<'_>,
        why: &str,
        access: &AccessSlot,
    ) -> DescriptorCheck<'a> {
        self.parts.refusals.log_rejection(self.gate.clock().now(), reason, query, why, access);
        DescriptorCheck::Decided(DescriptorStatus::refused())
    }

    /// Returns true if the client's request can't be counted, and logs that. A part that is missing may be one that the
    /// client has left out.
    fn log_uncountable(&self, error: &CheckError, query: &Query<'_>, access: &AccessSlot) -> bool {
        let reason = match error {
            CheckError::Key(KeyError::Uncountable(uncountable)) => uncountable.into(),
            CheckError::Key(KeyError::Missing(_) | KeyError::Platform(_)) => RejectionReason::MissingPart,
            _ => return false,
        };
        self.parts.refusals.log_rejection(self.gate.clock().now(), reason, query, &error.to_string(), access);
        true
    }

    /// Asks a limit that a descriptor states itself.
    async fn decide_inline(&self, inline: &InlineLimit) -> Result<CallerRateDecision, CheckError> {
        let InlineLimit { rate, name, quantity, .. } = inline;
        if *quantity == 0 {
            return self.gate.throttle(*rate, name, 0).await.map(|decided| {
                let is_limited = decided.remaining == 0;
                CallerRateDecision { is_limited, ..decided }
            });
        }
        let decided = self.gate.throttle(*rate, name, *quantity).await?;
        // As with other limits, hits that don't fit take what is left.
        if decided.is_limited && decided.remaining > 0 {
            self.gate.throttle(*rate, name, decided.remaining.cast_signed()).await?;
        }
        Ok(decided)
    }

    async fn decide_one(&self, query: &Query<'_>, hits: Hits) -> Result<Decision, CheckError> {
        match hits {
            Hits::Take => decide(&self.gate, &self.parts.metrics, query).await,
            Hits::TakeAll => {
                let decision = decide(&self.gate, &self.parts.metrics, query).await?;
                let left = decision.remaining.filter(|left| !decision.allowed && *left > 0);
                if left.is_some() {
                    Box::pin(self.gate.charge(&Query { cost: left, ..*query })).await?;
                }
                Ok(decision)
            }
            Hits::Peek => Box::pin(self.gate.status(&Query { cost: Some(1), ..*query })).await,
            Hits::Refund => {
                Box::pin(self.gate.refund(query)).await?;
                Box::pin(self.gate.status(&Query { cost: Some(0), ..*query })).await
            }
        }
    }
}

/// The same entries, borrowed.
fn borrow<'e>(entries: &'e Vec<(&'e str, Cow<'e, str>)>) -> Vec<(&'e str, &'e str)> {
    entries.iter().map(|(key, value)| (*key, &**value)).collect()
}

/// The entries of a descriptor: keys and values.
pub(super) fn entries(descriptor: &Descriptor) -> Vec<(&str, Cow<'_, str>)> {
    descriptor.entries.iter().map(|entry| (&*entry.key, entry.text())).collect()
}

/// The bytes of a descriptor's entries.
pub(super) fn size(descriptor: &Descriptor) -> usize {
    descriptor.entries.iter().map(|entry| entry.key.len() + entry.value.len()).sum()
}

fn is_header_name(name: &str) -> bool {
    http::HeaderName::from_bytes(name.as_bytes()).is_ok()
}

/// Sets `Retry-After` to this wait in seconds, unless it is longer.
fn add_wait(headers: &mut Vec<Entry>, wait: i64) {
    let name = RETRY_AFTER.as_str();
    match headers.iter_mut().find(|header| header.key == name) {
        Some(header) if header.text().parse::<i64>().is_ok_and(|known| known >= wait) => {}
        Some(header) => header.value = wait.to_string().into_bytes(),
        None => headers.push(Entry { key: name.to_owned(), value: wait.to_string().into_bytes() }),
    }
}
