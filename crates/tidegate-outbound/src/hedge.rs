//! Hedging: a second request in parallel with a slow one. The first good reply is the call's.
//!
//! A slow reply is mostly due to one server's bad moment, which another request avoids (J. Dean and L. A. Barroso, "The
//! Tail at Scale", Communications of the ACM 56(2), 2013).

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use tidegate_core::{Class, Clock};
use tidegate_store::Store;
use tokio::time::timeout;

use super::dispatcher::CallSlot;
use super::provider::CallGuard;
use super::{Attempt, AttemptOutcome, CallStats, Provider, Upstream};

impl<S: Store, C: Clock> Provider<S, C> {
    /// Sends a request of a call. If it has no reply after `after` and a second request is safe, sends a hedge in
    /// parallel. Afterwards the call holds the request with the returned outcome; the other has released what it held.
    pub(super) async fn send_hedged<U: Upstream>(
        &self,
        upstream: &mut U,
        after: Duration,
        attempt: Attempt,
        call_guard: &mut CallGuard<'_, S, C>,
        stats: &mut CallStats,
    ) -> AttemptOutcome<U::Reply> {
        let Some(mut second_upstream) = upstream.clone_for_hedge() else { return upstream.send(attempt).await };
        let (outcome, credential) = {
            let mut first = pin!(upstream.send(attempt));
            if let Ok(outcome) = timeout(after, first.as_mut()).await {
                return outcome;
            }
            let hedge = if second_upstream.can_hedge() { self.0.new_hedge(call_guard.slot.call()) } else { None };
            let Some(hedge) = hedge else { return first.await };
            let mut hedge_guard = CallGuard { provider: &self.0, slot: CallSlot::Owned(hedge) };
            let (result, now) = match select(first.as_mut(), pin!(hedge_guard.wait_for_turn(None, None))).await {
                Either::Left((ended, _)) => return ended,
                Either::Right((turn, _)) => turn,
            };
            let Ok(credential) = result else { return first.await };
            stats.attempts += 1;
            let attempt = self.new_attempt(hedge_guard.slot.call(), credential, *stats, now);
            let mut second = pin!(second_upstream.send(attempt));
            let outcome = match select(first.as_mut(), second.as_mut()).await {
                Either::Left((ended, _)) if is_decisive(&ended) => return ended,
                Either::Left((failed, _)) => {
                    call_guard.slot.call().swap_request(hedge_guard.slot.call());
                    self.0.hedge_lost(hedge_guard.slot.call(), &failed.report);
                    drop(failed);
                    second.await
                }
                Either::Right((ended, _)) if is_decisive(&ended) => {
                    call_guard.slot.call().swap_request(hedge_guard.slot.call());
                    ended
                }
                Either::Right((failed, _)) => {
                    self.0.hedge_lost(hedge_guard.slot.call(), &failed.report);
                    drop(failed);
                    return first.await;
                }
            };
            (outcome, credential)
        };
        *upstream = second_upstream;
        stats.credential = credential;
        outcome
    }
}

/// True if the outcome is final: waiting for the other request can't give a better one.
fn is_decisive<T>(outcome: &AttemptOutcome<T>) -> bool {
    matches!(outcome.report.verdict.class, Class::Success | Class::Permanent)
}
