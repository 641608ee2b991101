//! A second request beside one that is slow: the first good reply is the call's.
//!
//! What is slow is mostly one server's bad moment, which another request doesn't meet (J. Dean and L. A. Barroso, "The
//! Tail at Scale", Communications of the ACM 56(2), 2013).

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use tidegate_core::{Class, Clock};
use tidegate_store::Store;
use tokio::time::timeout;

use super::{Attempt, Ended, Happened, Live, Place, Provider, Upstream};

impl<S: Store, C: Clock> Provider<S, C> {
    /// Sends a request that a call has had its turn for and, if it has no reply after this time and does no harm twice,
    /// another beside it. The call then holds the request whose end this is; the other has given back what it held.
    pub(super) async fn race<U: Upstream>(
        &self,
        upstream: &mut U,
        after: Duration,
        attempt: Attempt,
        live: &mut Live<'_, S, C>,
        happened: &mut Happened,
    ) -> Ended<U::Reply> {
        let Some(mut twin) = upstream.twin() else { return upstream.send(attempt).await };
        let (ended, credential) = {
            let mut first = pin!(upstream.send(attempt));
            if let Ok(ended) = timeout(after, first.as_mut()).await {
                return ended;
            }
            let hedge = if twin.is_due() { self.0.hedge(live.place.call()) } else { None };
            let Some(hedge) = hedge else { return first.await };
            let mut beside = Live { hall: &self.0, place: Place::Held(hedge) };
            let (verdict, now) = match select(first.as_mut(), pin!(beside.turn(None, None))).await {
                Either::Left((ended, _)) => return ended,
                Either::Right((turn, _)) => turn,
            };
            let Ok(credential) = verdict else { return first.await };
            happened.attempts += 1;
            let attempt = self.attempt_of(beside.place.call(), credential, *happened, now);
            let mut second = pin!(twin.send(attempt));
            let ended = match select(first.as_mut(), second.as_mut()).await {
                Either::Left((ended, _)) if decides(&ended) => return ended,
                Either::Left((failed, _)) => {
                    live.place.call().change_places(beside.place.call());
                    self.0.beaten(beside.place.call(), &failed.reply);
                    drop(failed);
                    second.await
                }
                Either::Right((ended, _)) if decides(&ended) => {
                    live.place.call().change_places(beside.place.call());
                    ended
                }
                Either::Right((failed, _)) => {
                    self.0.beaten(beside.place.call(), &failed.reply);
                    drop(failed);
                    return first.await;
                }
            };
            (ended, credential)
        };
        *upstream = twin;
        happened.credential = credential;
        ended
    }
}

/// Whether the other request needn't be waited for: it could fare no better.
fn decides<T>(ended: &Ended<T>) -> bool {
    matches!(ended.reply.class, Class::Success | Class::Permanent)
}
