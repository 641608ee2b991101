//! Finds the changes of state that nothing reports by itself: the store's, and the use of quotas.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tidegate::outbound::{Outbound, Provider};
use tidegate::store::Store;
use tidegate::{Gate, Time};
use tidegate_core::{Clock, LimitId};

use super::{Change, ServerEvent, ServerEvents};

/// The interval of looks at the store.
const STORE_INTERVAL: Duration = Duration::from_millis(500);
/// The interval of looks at quotas, which a store outside this process may have to be asked for.
const QUOTA_INTERVAL: Duration = Duration::from_secs(2);
/// The shares of a quota that are reported, in per cent.
const QUOTA_SHARES: [u64; 2] = [80, 100];
/// The share, in per cent, below which a quota must have started again. Corrections of costs lower it by less.
const RESTARTED_SHARE: u64 = 40;

/// Publishes when the store is lost and when it is back; never returns.
pub(crate) async fn watch_store<S: Store, C: Clock>(gate: Gate<S, C>, events: Arc<ServerEvents>) {
    let mut lost: Option<(Time, String)> = None;
    loop {
        tokio::time::sleep(STORE_INTERVAL).await;
        let at = gate.clock().now();
        let change = match (gate.store().outage(), lost.take()) {
            (Some(store), None) => {
                lost = Some((at, store.to_owned()));
                Change::StoreLost { store: store.to_owned() }
            }
            (None, Some((since, store))) => Change::StoreBack { store, seconds: at.since(since).as_secs_ceil() },
            (_, still_lost) => {
                lost = still_lost;
                continue;
            }
        };
        events.publish(ServerEvent::new(at, change));
    }
}

/// Publishes and logs when a share of a provider's quota is used. Ends at once if there are no quotas.
pub(crate) async fn watch_quotas<S: Store, C: Clock + Clone>(providers: Outbound<S, C>, events: Arc<ServerEvents>) {
    // The reported share of each quota, by provider, limit and credential.
    let mut reported: HashMap<(usize, LimitId, Option<usize>), u64> = HashMap::new();
    let config = providers.config();
    let has_quota = |provider: &&Provider<S, C>| {
        provider.config().next_quota_end(config.limits(), provider.clock().now()).is_some()
    };
    let with_quotas: Vec<&Provider<S, C>> = providers.providers().iter().filter(has_quota).collect();
    while !with_quotas.is_empty() {
        tokio::time::sleep(QUOTA_INTERVAL).await;
        for provider in &with_quotas {
            for usage in provider.quota_usage().await {
                let share = reported.entry((provider.index(), usage.id, usage.credential)).or_default();
                if let Some(percent) = newly_used_share(share, usage.used, usage.limit) {
                    let change = Change::QuotaUsed {
                        provider: provider.config().name.clone(),
                        limit: usage.name,
                        credential: usage.credential,
                        percent,
                        resets_in: usage.reset_after,
                    };
                    tracing::warn!("{change}");
                    events.publish(ServerEvent::new(provider.clock().now(), change));
                }
            }
        }
    }
}

/// The share to report, if it is used now and wasn't reported in this period.
fn newly_used_share(reported: &mut u64, used: u64, limit: u64) -> Option<u64> {
    let percent = used.saturating_mul(100) / limit.max(1);
    if percent < RESTARTED_SHARE {
        *reported = 0;
    }
    let share = QUOTA_SHARES.into_iter().rfind(|share| percent >= *share).filter(|share| share > reported)?;
    *reported = share;
    Some(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_share_is_reported_once_a_period() {
        let mut reported = 0;
        let told: Vec<_> = [79, 80, 79, 81, 100, 99, 100, 3, 85]
            .map(|used| newly_used_share(&mut reported, used, 100))
            .into_iter()
            .flatten()
            .collect();
        assert_eq!(told, [80, 100, 80]);
    }
}
