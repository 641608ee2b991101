//! The changes of providers as events.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tidegate::Time;
use tidegate::outbound::{ProviderChange, ProviderEvent};
use tidegate_runtime::log_throttle::LogThrottle;

use super::{Change, ServerEvent, ServerEvents};

/// The maximum number of events of one kind about one provider in any second, so that a provider whose breaker opens and
/// closes all the time doesn't displace other events.
const MAX_EVENTS: u32 = 5;
/// The number of kinds of events about providers.
const KINDS: usize = 6;

/// Publishes changes of providers, of each kind and provider a limited number.
pub(crate) struct ProviderEventPublisher {
    events: Arc<ServerEvents>,
    /// By the name of the provider. A reload adds at most the providers of another policy.
    throttles: Mutex<HashMap<String, [LogThrottle; KINDS]>>,
}

impl ProviderEventPublisher {
    pub(crate) fn new(events: Arc<ServerEvents>) -> Self {
        Self { events, throttles: Mutex::default() }
    }

    /// Publishes a change, unless there were too many of its kind.
    pub(crate) fn publish(&self, event: &ProviderEvent) {
        let Some((kind, change)) = server_change(event) else { return };
        let mut throttles = self.throttles.lock();
        let own = throttles
            .entry(event.provider.clone())
            .or_insert_with(|| std::array::from_fn(|_| LogThrottle::new(MAX_EVENTS)));
        if let Some(unpublished) = own[kind].admit(event.at) {
            self.events.publish(ServerEvent::after_unpublished(event.at, change, unpublished));
        }
    }
}

/// The number of a change's kind, and the change. `None` if this server doesn't know it.
fn server_change(ProviderEvent { at, provider, change }: &ProviderEvent) -> Option<(usize, Change)> {
    let provider = provider.clone();
    let seconds_until = |until: Time| until.since(*at).as_secs_ceil();
    Some(match *change {
        ProviderChange::Breaker { state, failures, reset_in } => {
            (0, Change::Breaker { provider, state: state.name(), failures, reset_in: reset_in.as_secs_ceil() })
        }
        ProviderChange::CoolingDown { credential, until, all_cooling } => {
            (1, Change::CoolingDown { provider, credential, seconds: until.map(seconds_until), all_cooling })
        }
        ProviderChange::CredentialRejected { credential, until } => {
            (2, Change::CredentialRejected { provider, credential, seconds: seconds_until(until) })
        }
        ProviderChange::Paused => (3, Change::Paused { provider }),
        ProviderChange::Resumed => (4, Change::Resumed { provider }),
        ProviderChange::Reset => (5, Change::Reset { provider }),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use tidegate::Span;
    use tidegate_core::breaker::BreakerState;

    use super::*;
    use crate::events::server_events;

    #[test]
    fn a_flapping_provider_displaces_no_other_events() {
        let events = Arc::new(server_events(Time::from_secs(1)));
        let publisher = ProviderEventPublisher::new(Arc::clone(&events));
        let start = Time::from_secs(1_800_000_000);
        let publish = |provider: &str, at, change| {
            publisher.publish(&ProviderEvent { at, provider: provider.to_owned(), change });
        };
        let breaker = ProviderChange::Breaker { state: BreakerState::Open, failures: 1, reset_in: Span::ZERO };
        (0..950).for_each(|millis| publish("a", start + Span::from_millis(millis), breaker));
        publish("b", start, breaker);
        publish("a", start, ProviderChange::Paused);
        publish("a", start + Span::from_secs(2), breaker);
        let news = events.after(0);
        assert_eq!((news.events.len(), news.events[7].unpublished), (8, 945));
    }
}
