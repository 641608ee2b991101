//! The lock of a dispatcher during a step. Changes are published after the lock is released, because a log or an
//! observer may be slow.

use std::mem;
use std::ops::{Deref, DerefMut};

use tidegate_core::{Clock, Span, Time};
use tidegate_store::Store;
use tidegate_store::spin_lock::SpinLockGuard;

use super::{Dispatcher, ProviderInner};
use crate::events::{ProviderChange, ProviderEvent};

/// The lock for one step.
pub(super) struct StepGuard<'a, S: Store, C: Clock> {
    // The fields are dropped in this order: the lock is released first.
    dispatcher: SpinLockGuard<'a, Dispatcher>,
    unpublished: UnpublishedChanges<'a, S, C>,
}

impl<'a, S: Store, C: Clock> StepGuard<'a, S, C> {
    #[inline]
    pub(super) fn new(provider: &'a ProviderInner<S, C>, dispatcher: SpinLockGuard<'a, Dispatcher>) -> Self {
        Self { dispatcher, unpublished: UnpublishedChanges { provider, at: Time::ZERO, changes: Vec::new() } }
    }
}

impl<S: Store, C: Clock> Deref for StepGuard<'_, S, C> {
    type Target = Dispatcher;

    #[inline]
    fn deref(&self) -> &Dispatcher {
        &self.dispatcher
    }
}

impl<S: Store, C: Clock> DerefMut for StepGuard<'_, S, C> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Dispatcher {
        &mut self.dispatcher
    }
}

impl<S: Store, C: Clock> Drop for StepGuard<'_, S, C> {
    #[inline]
    fn drop(&mut self) {
        let Dispatcher { context, seen_transitions, changes, .. } = &*self.dispatcher;
        if context.state.breaker.transitions() != *seen_transitions || !changes.is_empty() {
            self.dispatcher.note_breaker_change();
            self.unpublished.at = self.dispatcher.last_step_at;
            self.unpublished.changes = mem::take(&mut self.dispatcher.changes);
        }
    }
}

impl Dispatcher {
    #[cold]
    fn note_breaker_change(&mut self) {
        let (breaker, now) = (&self.context.state.breaker, self.last_step_at);
        if mem::replace(&mut self.seen_transitions, breaker.transitions()) != breaker.transitions() {
            let reset_in = breaker.peek(now).err().map_or(Span::ZERO, |refusal| refusal.reset_in);
            let (state, failures) = (breaker.state(now), breaker.failures());
            self.changes.push(ProviderChange::Breaker { state, failures, reset_in });
        }
    }
}

struct UnpublishedChanges<'a, S: Store, C: Clock> {
    provider: &'a ProviderInner<S, C>,
    at: Time,
    changes: Vec<ProviderChange>,
}

impl<S: Store, C: Clock> Drop for UnpublishedChanges<'_, S, C> {
    #[inline]
    fn drop(&mut self) {
        if !self.changes.is_empty() {
            self.publish();
        }
    }
}

impl<S: Store, C: Clock> UnpublishedChanges<'_, S, C> {
    #[cold]
    fn publish(&mut self) {
        for change in self.changes.drain(..) {
            let provider = self.provider.config().name.clone();
            self.provider.events.publish(&ProviderEvent { at: self.at, provider, change });
        }
    }
}
