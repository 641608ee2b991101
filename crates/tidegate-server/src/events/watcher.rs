//! Finds the changes of state that nothing reports by itself: the store's, and the use of quotas.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tidegate::Time;
use tidegate::outbound::Provider;
use tidegate::store::Store;
use tidegate_core::{Clock, LimitId};
use tidegate_policy::alerts::{AlertConfig, AlertTrigger};

use super::{Change, ServerEvent, ServerEvents};
use crate::alerts::quota_percent;
use crate::state_cell::StateCell;
use crate::states::Engine;

/// The interval of looks at the store.
const STORE_INTERVAL: Duration = Duration::from_millis(500);
/// The interval of looks at quotas, which a store outside this process may have to be asked for.
const QUOTA_INTERVAL: Duration = Duration::from_secs(2);
/// The shares of a quota that are reported, in per cent, besides those of alerts.
const QUOTA_SHARES: [u64; 2] = [80, 100];

/// Publishes when the store is lost and when it is back; never returns.
pub(crate) async fn watch_store<S: Store, C: Clock>(engine: Arc<StateCell<Engine<S, C>>>, events: Arc<ServerEvents>) {
    let mut lost: Option<(Time, String)> = None;
    loop {
        tokio::time::sleep(STORE_INTERVAL).await;
        let gate = &engine.load().gate;
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

/// Publishes and logs when a share of a provider's quota is used; never returns.
pub(crate) async fn watch_quotas<S: Store, C: Clock + Clone>(
    engine: Arc<StateCell<Engine<S, C>>>,
    events: Arc<ServerEvents>,
) {
    // The reported share of each quota, by provider, limit and credential.
    let mut reported: HashMap<(String, LimitId, Option<usize>), u64> = HashMap::new();
    loop {
        tokio::time::sleep(QUOTA_INTERVAL).await;
        let Some(providers) = engine.load().providers.clone() else { continue };
        let shares = quota_shares(engine.load().policy.alerts());
        let limits = providers.config().limits();
        let has_quota =
            |provider: &&Provider<S, C>| provider.config().next_quota_end(limits, provider.clock().now()).is_some();
        // Those of providers that are gone aren't needed.
        reported.retain(|(name, ..), _| providers.provider(name).is_ok());
        for provider in providers.providers().iter().filter(has_quota) {
            let name = &provider.config().name;
            for usage in provider.quota_usage().await {
                let share = reported.entry((name.clone(), usage.id, usage.credential)).or_default();
                if let Some(percent) = newly_used_share(share, usage.used, usage.limit, &shares) {
                    let change = Change::QuotaUsed {
                        provider: name.clone(),
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

/// The shares that are reported, in per cent, smallest first.
fn quota_shares(alerts: &[AlertConfig]) -> Vec<u64> {
    let of_alerts = alerts.iter().filter(|alert| alert.on.contains(&AlertTrigger::Quota)).map(quota_percent);
    let mut shares: Vec<u64> = of_alerts.chain(QUOTA_SHARES).collect();
    shares.sort_unstable();
    shares
}

/// The share to report, if it is used now and wasn't reported in this period.
fn newly_used_share(reported: &mut u64, used: u64, limit: u64, shares: &[u64]) -> Option<u64> {
    let percent = used.saturating_mul(100) / limit.max(1);
    // Corrections of costs lower the share by less than a half, so the quota has started again.
    if percent < shares.first()? / 2 {
        *reported = 0;
    }
    let share = shares.iter().copied().rfind(|share| percent >= *share).filter(|share| share > reported)?;
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
            .map(|used| newly_used_share(&mut reported, used, 100, &QUOTA_SHARES))
            .into_iter()
            .flatten()
            .collect();
        assert_eq!(told, [80, 100, 80]);
    }
}
