//! The changes that operators make to a provider.

use std::mem;
use std::sync::Arc;

use tidegate_core::{Batch, Clock, MAX_OPS, Op, Span, Verb};
use tidegate_store::{Store, StoreError, StoreResponse};

use super::{Dispatcher, ProviderChange, ProviderInner};

impl<S: Store, C: Clock> ProviderInner<S, C> {
    /// Stops calls, or lets them start again, also those that began by an earlier policy. Returns false if that is so
    /// already.
    pub(crate) fn set_paused(self: &Arc<Self>, paused: bool) -> bool {
        let change = if paused { ProviderChange::Paused } else { ProviderChange::Resumed };
        let has_changed = self.set_own_paused(paused, Some(change));
        let mut earlier = self.earlier.upgrade();
        while let Some(provider) = earlier {
            provider.set_own_paused(paused, None);
            earlier = provider.earlier.upgrade();
        }
        has_changed
    }

    fn set_own_paused(self: &Arc<Self>, paused: bool, published: Option<ProviderChange>) -> bool {
        self.change(|dispatcher| {
            let has_changed = mem::replace(&mut dispatcher.context.state.is_paused, paused) != paused;
            if has_changed && paused {
                self.fail_waiting_calls(dispatcher);
            }
            (has_changed, published.filter(|_| has_changed))
        })
    }

    /// Forgets failures, here and in the store.
    pub(crate) async fn reset(self: &Arc<Self>) -> Result<(), StoreError> {
        let closed_scopes = {
            let (dispatcher, _) = self.lock_for_step();
            let credentials = |own: Option<usize>| own.map_or(0..self.rules.credential_keys.len(), |own| own..own + 1);
            let closings = dispatcher.context.state.scope_closings();
            let keys = closings.flat_map(|(scope, own, _)| credentials(own).map(move |it| (scope, it)));
            keys.map(|(scope, credential)| self.rules.scope_key(credential, scope)).collect::<Vec<_>>()
        };
        // The store comes first. Otherwise a call could learn of an old cool-down again.
        for keys in [&*self.rules.credential_keys, &closed_scopes].into_iter().flat_map(|keys| keys.chunks(MAX_OPS)) {
            let mut batch =
                Batch::new(0).with_ops(keys.iter().map(|key| Op::new(self.rules.cooldown, Verb::Reset, *key, 1)));
            batch.set_affinity(self.rules.affinity());
            if let StoreResponse::Pending(answer) = self.store.apply(&batch, self.clock.now()) {
                answer.await?;
            }
        }
        let fresh = self.config().new_state(&self.rules);
        self.change(|dispatcher| {
            dispatcher.context.state.forget_failures(&self.rules, fresh.pace, fresh.adaptive_limit);
            dispatcher.published_changes.clear();
            ((), Some(ProviderChange::Reset))
        });
        Ok(())
    }

    /// Continues with the adaptive limit of an earlier process.
    pub(crate) fn resume_adaptive_limit(self: &Arc<Self>, learnt: (u32, Span)) {
        self.change(|dispatcher| {
            dispatcher.context.state.resume_adaptive_limit(&self.rules, learnt, self.clock.now());
            ((), None)
        });
    }

    /// Makes a change, dispatches the calls that are due after it, and publishes it.
    fn change<T>(self: &Arc<Self>, change: impl FnOnce(&mut Dispatcher) -> (T, Option<ProviderChange>)) -> T {
        let (mut guard, now) = self.lock_for_step();
        let dispatcher = &mut *guard;
        let (done, published) = change(dispatcher);
        dispatcher.changes.extend(published);
        self.dispatch(dispatcher, None, now);
        drop(guard);
        self.publish_changes();
        done
    }

    fn fail_waiting_calls(&self, dispatcher: &mut Dispatcher) {
        let waiting = dispatcher.waiting_calls.iter().filter(|(_, waiting_call)| waiting_call.result.is_none());
        for index in waiting.map(|(index, _)| index).collect::<Vec<_>>() {
            let failure = dispatcher.waiting_calls[index].call.handle_pause(&mut dispatcher.context.state);
            dispatcher.set_result(index, Err(self.error_kind(failure)));
        }
    }
}
