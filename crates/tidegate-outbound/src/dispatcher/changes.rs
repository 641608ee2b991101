//! The changes of a provider and its credentials, as events and reports tell them.

use std::mem;

use tidegate_core::call::DISABLE_TIME;
use tidegate_core::{AdaptiveLimit, Batch, BudgetSpec, Clock, Key, Lane, Op, Span, Time, Verb};
use tidegate_store::{Store, StoreResponse};

use super::super::events::{ProviderChange, ProviderEvent};
use super::super::report::{BreakerReport, CredentialReport, DispatcherSnapshot};
use super::{Dispatcher, ProviderInner, StepContext};

/// The shortest cool-down that is told. The entry about a cool-down whose end only the store knows is shorter.
const MIN_TOLD_WAIT: Span = Span::from_millis(1);

/// The time after a cool-down of unknown length began in which another one isn't told.
const UNKNOWN_COOLDOWN: Span = Span::from_secs(1);

/// A period in which a credential isn't used.
#[derive(Clone, Copy, Default)]
pub(super) struct CredentialChange {
    until: Time,
    /// True if the provider has rejected it; false if it has throttled it.
    is_rejected: bool,
}

impl<S: Store, C: Clock> ProviderInner<S, C> {
    /// Publishes the changes of the last steps. The lock isn't held meanwhile, because a log or an observer may be slow.
    #[cold]
    pub(super) fn publish_changes(&self) {
        let (changes, at) = {
            let dispatcher = &mut *self.dispatcher.lock();
            let (breaker, now) = (&dispatcher.context.state.breaker, dispatcher.last_step_at);
            let mut changes = mem::take(&mut dispatcher.changes);
            if mem::replace(&mut dispatcher.published_transitions, breaker.transitions()) != breaker.transitions() {
                let reset_in = breaker.peek(now).err().map_or(Span::ZERO, |refusal| refusal.reset_in);
                let (state, failures) = (breaker.state(now), breaker.failures());
                changes.push(ProviderChange::Breaker { state, failures, reset_in });
            }
            (changes, now)
        };
        for change in changes {
            self.events.publish(&ProviderEvent { at, provider: self.config().name.clone(), change });
        }
    }

    /// Notes the credentials that the last step has disabled or let cool down, after its updates were submitted.
    pub(super) fn note_credential_changes(&self, dispatcher: &mut Dispatcher, now: Time) {
        let Dispatcher { context: StepContext { state, .. }, published_changes, changes, .. } = dispatcher;
        let pool = &mut state.pool;
        let ops = state.store_requests.updates().into_iter().flat_map(Batch::ops);
        let closes = |verb| matches!(verb, Verb::Disable | Verb::Throttle { .. } | Verb::Debit);
        for op in ops.filter(|op| op.limit == self.rules.cooldown && closes(op.verb)) {
            let Some(credential) = self.rules.credential_keys.iter().position(|key| *key == op.key) else { continue };
            published_changes.resize(self.rules.credential_keys.len(), CredentialChange::default());
            let last = &mut published_changes[credential];
            if op.verb == Verb::Disable {
                *last = CredentialChange { until: now + DISABLE_TIME, is_rejected: true };
                changes.push(ProviderChange::CredentialRejected { credential, until: last.until });
                continue;
            }
            let known_end = pool.cooling_until(credential).max(self.first_cooldown_end(&[op.key], now));
            let until = known_end.filter(|until| *until > now + MIN_TOLD_WAIT);
            // Replies to requests that were under way together let the credential cool down once.
            if until.unwrap_or(now) > last.until {
                *last = CredentialChange { until: until.unwrap_or(now + UNKNOWN_COOLDOWN), is_rejected: false };
                let all_cooling = !pool.has_other_open(credential, now);
                changes.push(ProviderChange::CoolingDown { credential, until, all_cooling });
            }
        }
    }

    /// The parts of a report that need the lock. `cooldown_ends` are those that the store knows.
    pub(crate) fn dispatcher_snapshot(&self, cooldown_ends: &[Time]) -> DispatcherSnapshot {
        let (dispatcher, now) = (self.dispatcher.lock(), self.clock.now());
        let Dispatcher { context: StepContext { state, .. }, published_changes, .. } = &*dispatcher;
        let mut throttled_credentials = 0;
        let mut credential_report = |credential: usize| {
            let change: CredentialChange = published_changes.get(credential).copied().unwrap_or_default();
            let told = change.until.max(cooldown_ends.get(credential).copied().unwrap_or_default());
            let told = Some(told).filter(|until| *until > now);
            let is_rejected = change.is_rejected && change.until > now;
            throttled_credentials += usize::from(told.is_some() && !is_rejected);
            let is_known = |until: &Time| *until > now + MIN_TOLD_WAIT;
            let cooling = state.pool.cooling_until(credential).filter(is_known).max(told);
            let full = state.pool.full_until(credential).map(|(_, until)| until).filter(is_known);
            CredentialReport::new(full, cooling, is_rejected, state.pool.in_flight(credential), now)
        };
        let credentials = (0..state.pool.size()).map(&mut credential_report).collect();
        DispatcherSnapshot {
            breaker: BreakerReport {
                state: if self.config().breaker.is_some() { state.breaker.state(now).name() } else { "off" },
                failures: state.breaker.failures(),
                reset_in: state.breaker.peek(now).err().map_or(0, |refusal| refusal.reset_in.as_secs_ceil()),
            },
            is_paused: state.is_paused,
            waiting: Lane::ALL.map(|lane| state.lanes.waiting(lane)),
            in_flight: Lane::ALL.map(|lane| state.lanes.in_flight(lane)),
            credentials,
            throttled_credentials,
            closed_scopes: state.scope_closings().filter(|(_, _, until)| *until > now).count(),
            retry_budget: (self.rules.budget != BudgetSpec::UNLIMITED).then(|| state.budget.remaining()),
            adaptive_limit: state.adaptive_limit.as_ref().map(AdaptiveLimit::limit),
            pace_interval: state.pace_interval().map(|interval| interval.as_secs_f64()),
            stats: state.stats.clone(),
        }
    }

    /// The end of the first cool-down, if all credentials are cooling. A store that answers at once knows it exactly.
    #[cold]
    pub(crate) fn cooling_until(&self) -> Option<Time> {
        let (known, now) = {
            let (mut dispatcher, now) = self.lock_for_step();
            let StepContext { state, rng, .. } = &mut dispatcher.context;
            (state.cooling_until(now, rng)?, now)
        };
        let first = self.first_cooldown_end(&self.rules.credential_keys, now);
        let until = first.map_or(known, |first| first.max(known));
        (until > now + MIN_TOLD_WAIT && !until.is_never()).then_some(until)
    }

    /// The end of the first of these credentials' cool-downs, if the store answers at once.
    fn first_cooldown_end(&self, credential_keys: &[Key], now: Time) -> Option<Time> {
        let mut batch = Batch::new(0);
        batch.set_affinity(self.rules.affinity());
        for key in credential_keys {
            // Of a larger pool than a batch holds, the first are asked for.
            if batch.push(Op::new(self.rules.cooldown, Verb::Peek, *key, 1)).is_err() {
                break;
            }
        }
        match self.store.apply(&batch, now) {
            StoreResponse::Ready(outcomes) => outcomes.list().iter().map(|outcome| outcome.retry_at).min(),
            StoreResponse::Pending(_) => None,
        }
    }
}
