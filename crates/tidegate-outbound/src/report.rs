//! The state of a provider as a report, for metrics, dashboards and command lines.

use std::collections::BTreeMap;

use serde::Serialize;
use tidegate_core::call::{ProviderLimit, ProviderStats};
use tidegate_core::{
    Batch, Class, Clock, DurationHistogram, Key, Lane, Limit, LimitId, LimitKind, MAX_OPS, Op, Outcome, Time, Verb,
};
use tidegate_store::{Store, StoreResponse};

use crate::{CallErrorKind, Provider};

/// The maximum number of credentials that a report describes one by one.
const MAX_CREDENTIALS: usize = 100;

/// The state of a provider, as this process sees it. It serialises to JSON. Times are in seconds.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct ProviderReport {
    /// Its name.
    pub name: String,
    /// True while an operator has stopped its calls.
    pub paused: bool,
    /// Its circuit breaker.
    pub breaker: BreakerReport,
    /// Its lanes, least urgent first.
    pub lanes: Vec<LaneReport>,
    /// Its limits, beginning with those of all credentials.
    pub limits: Vec<LimitUsage>,
    /// Its credentials, at most the first hundred; empty if it has none.
    pub credentials: Vec<CredentialReport>,
    /// The number of credentials in each state. A provider without credentials has one anonymous credential.
    pub credential_states: CredentialStates,
    /// The number of scopes and routes that are closed now in this process, for all credentials or for one.
    pub closed_scopes: usize,
    /// The number of retries that can be spent now; `None` without a retry budget.
    pub retry_budget: Option<u64>,
    /// The present adaptive limit on calls in flight; `None` if it isn't used.
    pub adaptive_limit: Option<u32>,
    /// The present time between two calls by a pace, in seconds; `None` if only limits apply.
    pub pace_interval: Option<f64>,
    /// The number of first requests of calls that were sent.
    pub first_tries: u64,
    /// The number of further requests of calls that were sent: retries and hedges.
    pub retries: u64,
    /// The number of requests that have ended, by class.
    pub attempts: BTreeMap<&'static str, u64>,
    /// The number of calls that have failed, by reason. Reasons without a call are left out.
    pub failures: BTreeMap<&'static str, u64>,
    /// The time from sending a request to the head of its reply.
    pub reply_time: DurationReport,
    /// The counts with complete histograms.
    #[serde(skip)]
    pub stats: ProviderStats,
}

/// The state of a circuit breaker.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct BreakerReport {
    /// `closed`, `ramping`, `open` or `half-open`; `off` if the provider has no breaker.
    pub state: &'static str,
    /// The failures since the last reply that proves a working provider.
    pub failures: u32,
    /// Seconds, rounded up, until it admits a call; 0 if it does now.
    pub reset_in: u64,
}

/// The state of a lane.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct LaneReport {
    /// `background`, `user` or `webhook`.
    pub lane: &'static str,
    /// The number of calls that have started.
    pub calls: u64,
    /// The number of calls that wait in the queue.
    pub waiting: usize,
    /// The number of calls in flight.
    pub in_flight: u32,
    /// The time for which sent requests of its calls had waited in the queue, in whichever lane.
    pub wait: DurationReport,
}

/// The use of a limit.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct LimitUsage {
    /// The limit. `None` for a limit on calls in flight, which no store counts.
    #[serde(skip)]
    pub id: Option<LimitId>,
    /// The name of the limit.
    pub name: String,
    /// A description of what the limit allows.
    pub words: String,
    /// True if it is a calendar quota.
    #[serde(skip)]
    pub is_quota: bool,
    /// The index of the credential that it counts; `None` if it counts the calls of all.
    pub credential: Option<usize>,
    /// The capacity.
    pub limit: u64,
    /// The used part of the capacity.
    pub used: u64,
    /// The remaining part of the capacity.
    pub remaining: u64,
    /// Seconds, rounded up, until the full capacity is available again; 0 for a limit on calls in flight, whose ends are
    /// unknown.
    pub reset_after: u64,
}

impl LimitUsage {
    /// The used share of the capacity in per cent, rounded down. 100 if the capacity is 0.
    pub fn percent(&self) -> u64 {
        self.used.saturating_mul(100).checked_div(self.limit).unwrap_or(100)
    }
}

/// The state of a credential. It never contains the secret.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct CredentialReport {
    /// The source of the secret, such as `env:TOKEN_A`.
    pub source: String,
    /// `usable`, `full` (a limit of its own has no room), `cooling` (the provider has asked for a pause) or `rejected`.
    pub state: &'static str,
    /// Seconds, rounded up, until it is used again; 0 if it is used now.
    pub usable_in: u64,
    /// The number of its calls in flight.
    pub in_flight: u32,
}

/// The number of credentials in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CredentialStates {
    /// Those that calls use.
    pub usable: usize,
    /// Those that a limit of their own has no room for.
    pub full: usize,
    /// Those that the provider has asked a pause for.
    pub cooling: usize,
    /// Those that the provider has rejected.
    pub rejected: usize,
    /// Those of the cooling ones that the provider has throttled.
    #[serde(skip)]
    pub throttled: usize,
}

/// A summary of durations. Percentiles are estimated from a histogram: the true value is at most that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DurationReport {
    /// Their number.
    pub count: u64,
    /// Their mean in seconds; 0 if there are none.
    pub mean: f64,
    /// The median in seconds.
    pub p50: f64,
    /// The 90th percentile in seconds.
    pub p90: f64,
    /// The 99th percentile in seconds.
    pub p99: f64,
}

impl From<&DurationHistogram> for DurationReport {
    fn from(histogram: &DurationHistogram) -> Self {
        let count = histogram.count();
        let mean = if count == 0 { 0.0 } else { histogram.sum().as_secs_f64() / count as f64 };
        let [p50, p90, p99] = [500, 900, 990].map(|rank| histogram.percentile(rank).as_secs_f64());
        Self { count, mean, p50, p90, p99 }
    }
}

impl<S: Store, C: Clock> Provider<S, C> {
    /// The present state. A store outside this process is asked for the use of the limits; they are left out if it
    /// fails.
    pub async fn report(&self) -> ProviderReport {
        let mut cooldown_ends = Vec::new();
        for group in self.cooldowns().chunks(MAX_OPS) {
            self.add_cooldown_ends(&self.peek(group).await, &mut cooldown_ends);
        }
        let mut report = self.report_without_limits(&cooldown_ends);
        report.limits = self.limit_usage(|_| true).await;
        report.limits.append(&mut self.limits_in_flight());
        report.limits.sort_by_key(|usage| usage.credential.is_some());
        report
    }

    /// The present use of its calendar quotas. A store outside this process is asked for it; quotas are left out if it
    /// fails.
    pub async fn quota_usage(&self) -> Vec<LimitUsage> {
        self.limit_usage(|kind| matches!(kind, LimitKind::Quota(_))).await
    }

    /// The present state without the use of the limits, which a store may have to be asked for.
    pub fn local_report(&self) -> ProviderReport {
        let mut cooldown_ends = Vec::new();
        // A store that nodes share is asked for nothing, because its answer would come too late.
        for group in self.cooldowns().chunks(MAX_OPS).filter(|_| !self.config().shared) {
            match self.apply_peeks(group) {
                StoreResponse::Ready(outcomes) => self.add_cooldown_ends(outcomes.list(), &mut cooldown_ends),
                StoreResponse::Pending(_) => break,
            }
        }
        self.report_without_limits(&cooldown_ends)
    }

    /// `cooldown_ends` are those that the store knows, such as restored ones that no call has met.
    fn report_without_limits(&self, cooldown_ends: &[Time]) -> ProviderReport {
        let (config, inner) = (self.config(), &*self.0);
        let failures = CallErrorKind::REASONS.into_iter().zip(self.failures());
        let dispatcher = inner.dispatcher_snapshot(cooldown_ends);
        let mut credential_states =
            CredentialStates { throttled: dispatcher.throttled_credentials, ..CredentialStates::default() };
        for credential in &dispatcher.credentials {
            match credential.state {
                "usable" => credential_states.usable += 1,
                "full" => credential_states.full += 1,
                "cooling" => credential_states.cooling += 1,
                _ => credential_states.rejected += 1,
            }
        }
        let sources = config.credentials.iter().map(ToString::to_string);
        let mut credentials = dispatcher.credentials;
        credentials.truncate(config.credentials.len().min(MAX_CREDENTIALS));
        for (credential, source) in credentials.iter_mut().zip(sources) {
            credential.source = source;
        }
        let stats = dispatcher.stats;
        let lanes = Lane::ALL.map(|lane| LaneReport {
            lane: lane.name(),
            calls: stats.calls[lane as usize],
            waiting: dispatcher.waiting[lane as usize],
            in_flight: dispatcher.in_flight[lane as usize],
            wait: (&stats.waits[lane as usize]).into(),
        });
        ProviderReport {
            name: config.name.clone(),
            paused: dispatcher.is_paused,
            breaker: dispatcher.breaker,
            lanes: lanes.into(),
            limits: Vec::new(),
            credentials,
            credential_states,
            closed_scopes: dispatcher.closed_scopes,
            retry_budget: dispatcher.retry_budget,
            adaptive_limit: dispatcher.adaptive_limit,
            pace_interval: dispatcher.pace_interval,
            first_tries: stats.first_tries(),
            retries: stats.retries,
            attempts: Class::ALL.map(|class| (class.name(), stats.attempts[class as usize])).into(),
            failures: failures.filter(|(_, count)| *count > 0).collect(),
            reply_time: (&stats.reply_times).into(),
            stats,
        }
    }

    async fn limit_usage(&self, is_wanted: impl Fn(&LimitKind) -> bool) -> Vec<LimitUsage> {
        let limits = self.0.outbound_config.limits();
        let kind = |limit| limits.get(limit).map(Limit::kind);
        let mut wanted = self.counted_limits();
        wanted.retain(|(limit, ..)| kind(*limit).is_some_and(&is_wanted));
        let mut usage = Vec::new();
        for group in wanted.chunks(MAX_OPS) {
            for ((limit, _, credential), outcome) in group.iter().zip(self.peek(group).await) {
                let info = self.0.outbound_config.limit_info(*limit);
                usage.push(LimitUsage {
                    id: Some(*limit),
                    name: info.name.clone(),
                    words: info.description.clone(),
                    is_quota: matches!(kind(*limit), Some(LimitKind::Quota(_))),
                    credential: *credential,
                    limit: outcome.limit,
                    used: outcome.used,
                    remaining: outcome.remaining,
                    reset_after: outcome.reset_at.since(self.0.clock.now()).as_secs_ceil(),
                });
            }
        }
        usage
    }

    /// The limits on calls in flight, which calls wait for in the queue.
    fn limits_in_flight(&self) -> Vec<LimitUsage> {
        let rules = &self.0.rules;
        let usage = |part: &str, credential, limit: u32, used: u32| LimitUsage {
            id: None,
            name: format!("{}{part}.in_flight", self.config().name),
            words: format!("at most {limit} at the same time"),
            is_quota: false,
            credential,
            limit: limit.into(),
            used: used.into(),
            remaining: limit.saturating_sub(used).into(),
            reset_after: 0,
        };
        self.inspect(|state, _| {
            let in_flight = Lane::ALL.map(|lane| state.lanes.in_flight(lane));
            let lanes = Lane::ALL.map(|lane| {
                let (lane, name) = (lane as usize, format!(".{}", lane.name()));
                usage(&name, None, rules.lanes.lanes[lane].max_in_flight, in_flight[lane])
            });
            let own = (0..state.pool.size().min(MAX_CREDENTIALS)).map(|index| {
                usage(".credential", Some(index), rules.max_in_flight_per_credential, state.pool.in_flight(index))
            });
            let all = usage("", None, rules.lanes.max_in_flight, in_flight.iter().sum());
            [all].into_iter().chain(lanes).chain(own).filter(|usage| usage.limit < u32::MAX.into()).collect()
        })
    }

    /// The cool-downs with the keys of their credentials.
    fn cooldowns(&self) -> Vec<CountedLimit> {
        self.0.rules.credential_keys.iter().map(|key| (self.0.rules.cooldown, *key, None)).collect()
    }

    /// Adds the end of each of these cool-downs; the epoch if the credential is usable.
    fn add_cooldown_ends(&self, outcomes: &[Outcome], ends: &mut Vec<Time>) {
        let now = self.0.clock.now();
        let Some(LimitKind::Cooldown(cooldown)) = self.0.store.limits().get(self.0.rules.cooldown).map(Limit::kind)
        else {
            return;
        };
        let closing = |at: Time| if cooldown.is_closing(at, now) { at } else { Time::ZERO };
        ends.extend(outcomes.iter().map(|outcome| closing(outcome.retry_at)));
    }

    /// The limits with their keys and credentials.
    fn counted_limits(&self) -> Vec<CountedLimit> {
        let rules = &self.0.rules;
        let shared = rules.provider_limits.iter().chain(rules.lane_limits.iter().flatten());
        // The counts of scopes have keys that only calls know.
        let shared = shared.filter(|limit| !limit.by_scope);
        let shared = shared.map(|ProviderLimit { limit, .. }| (*limit, rules.key, None));
        let credentials = rules.credential_keys.iter().enumerate().take(MAX_CREDENTIALS);
        let own = credentials.flat_map(|(index, key)| {
            let own = rules.credential_limits.iter().filter(|limit| !limit.by_scope);
            own.map(move |ProviderLimit { limit, .. }| (*limit, *key, Some(index)))
        });
        shared.chain(own).collect()
    }

    /// The state of at most [`MAX_OPS`] limits; empty if the store fails.
    async fn peek(&self, limits: &[CountedLimit]) -> Vec<Outcome> {
        let outcomes = match self.apply_peeks(limits) {
            StoreResponse::Ready(outcomes) => outcomes,
            StoreResponse::Pending(later) => match later.await {
                Ok(outcomes) => outcomes,
                Err(_) => return Vec::new(),
            },
        };
        outcomes.list().to_vec()
    }

    fn apply_peeks(&self, limits: &[CountedLimit]) -> StoreResponse<S::Future> {
        let mut batch = Batch::new(0);
        batch.set_affinity(self.0.rules.affinity());
        for (limit, key, _) in limits {
            if batch.push(Op::new(*limit, Verb::Peek, *key, 1)).is_err() {
                break;
            }
        }
        self.0.store.apply(&batch, self.0.clock.now())
    }
}

/// A limit or a cool-down, its key, and the credential that it counts.
type CountedLimit = (LimitId, Key, Option<usize>);

/// The parts of a report that are read under the dispatcher's lock.
pub(crate) struct DispatcherSnapshot {
    pub(crate) breaker: BreakerReport,
    pub(crate) is_paused: bool,
    pub(crate) waiting: [usize; Lane::ALL.len()],
    pub(crate) in_flight: [u32; Lane::ALL.len()],
    /// The state of each credential, without its source.
    pub(crate) credentials: Vec<CredentialReport>,
    /// The number of credentials that the provider has throttled.
    pub(crate) throttled_credentials: usize,
    pub(crate) closed_scopes: usize,
    pub(crate) retry_budget: Option<u64>,
    pub(crate) adaptive_limit: Option<u32>,
    pub(crate) pace_interval: Option<f64>,
    pub(crate) stats: ProviderStats,
}

impl CredentialReport {
    /// The report of a credential that is full and cooling until these times. The state is the one that lasts longer.
    pub(crate) fn new(full: Option<Time>, cooling: Option<Time>, is_rejected: bool, in_flight: u32, now: Time) -> Self {
        let usable_in = full.max(cooling).map_or(0, |until| until.since(now).as_secs_ceil());
        let state = match usable_in {
            0 => "usable",
            _ if is_rejected => "rejected",
            _ if full > cooling => "full",
            _ => "cooling",
        };
        Self { source: String::new(), state, usable_in, in_flight }
    }
}
