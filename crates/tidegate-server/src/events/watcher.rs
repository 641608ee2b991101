//! Finds the changes of state that nothing reports by itself: the store's, and the use of quotas.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tidegate::outbound::{LimitUsage, Outbound};
use tidegate::store::Store;
use tidegate::{Gate, Time};
use tidegate_core::{Clock, LimitId};

use super::{Change, ServerEvent, ServerEvents};

/// The interval of looks at the store.
const INTERVAL: Duration = Duration::from_millis(500);
/// The number of intervals between two looks at quotas, which a store outside this process may have to be asked for.
const QUOTA_INTERVALS: u32 = 4;
/// The shares of a quota that are reported, in per cent.
const QUOTA_SHARES: [u64; 2] = [80, 100];

/// Watches the store and the quotas of a server.
pub(crate) struct StateWatcher<S: Store, C: Clock> {
    gate: Gate<S, C>,
    providers: Option<Outbound<S, C>>,
    events: Arc<ServerEvents>,
    /// The time since which the store is away, and its name.
    lost_store: Option<(Time, String)>,
    /// The reported share of each quota, by provider, limit and credential.
    quota_shares: HashMap<(usize, LimitId, Option<usize>), u64>,
}

impl<S: Store, C: Clock + Clone> StateWatcher<S, C> {
    pub(crate) fn new(gate: Gate<S, C>, providers: Option<Outbound<S, C>>, events: Arc<ServerEvents>) -> Self {
        Self { gate, providers, events, lost_store: None, quota_shares: HashMap::new() }
    }

    /// Looks at every interval; never returns.
    pub(crate) async fn run(mut self) {
        let has_quotas = self.providers.as_ref().is_some_and(|providers| {
            let (config, now) = (providers.config(), self.gate.clock().now());
            config.providers().iter().any(|provider| provider.next_quota_end(config.limits(), now).is_some())
        });
        for round in (0..QUOTA_INTERVALS).cycle() {
            tokio::time::sleep(INTERVAL).await;
            self.look_at_store();
            if has_quotas && round == 0 {
                self.look_at_quotas().await;
            }
        }
    }

    fn publish(&self, change: Change) {
        self.events.publish(ServerEvent { at: self.gate.clock().now(), change });
    }

    fn look_at_store(&mut self) {
        match (self.gate.store().outage(), &self.lost_store) {
            (Some(store), None) => {
                self.lost_store = Some((self.gate.clock().now(), store.to_owned()));
                self.publish(Change::StoreLost { store: store.to_owned() });
            }
            (None, Some((since, store))) => {
                let seconds = self.gate.clock().now().since(*since).as_secs_ceil();
                self.publish(Change::StoreBack { store: store.clone(), seconds });
                self.lost_store = None;
            }
            _ => {}
        }
    }

    async fn look_at_quotas(&mut self) {
        let Some(providers) = self.providers.clone() else { return };
        for (index, provider) in providers.providers().iter().enumerate() {
            for usage in provider.report().await.limits.iter().filter(|usage| usage.is_quota) {
                self.look_at_quota(index, &provider.config().name, usage);
            }
        }
    }

    fn look_at_quota(&mut self, index: usize, provider: &str, usage: &LimitUsage) {
        let used = usage.used.saturating_mul(100) / usage.limit.max(1);
        let share = QUOTA_SHARES.into_iter().rfind(|share| used >= *share).unwrap_or(0);
        let reported = self.quota_shares.entry((index, usage.id, usage.credential)).or_default();
        if share > std::mem::replace(reported, share) {
            let change = Change::QuotaUsed {
                provider: provider.to_owned(),
                limit: usage.name.clone(),
                credential: usage.credential,
                percent: share,
                resets_in: usage.reset_after,
            };
            tracing::warn!("{change}");
            self.publish(change);
        }
    }
}
