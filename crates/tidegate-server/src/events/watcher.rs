//! Finds the changes of state that nothing reports by itself: the store's, and the use of quotas.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tidegate::Time;
use tidegate::outbound::Provider;
use tidegate::store::Store;
use tidegate_core::{Clock, LimitId, Span};
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
    // By provider, limit and credential.
    let mut reported: HashMap<(String, Option<LimitId>, Option<usize>), ReportedShare> = HashMap::new();
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
                let now = provider.clock().now();
                let ends = now + Span::from_secs(usage.reset_after);
                let known = reported.entry((name.clone(), usage.id, usage.credential)).or_default();
                if let Some((before, percent)) = known.newly_used(usage.percent(), &shares, now, ends) {
                    let change = Change::QuotaUsed {
                        provider: name.clone(),
                        limit: usage.name,
                        credential: usage.credential,
                        percent,
                        reported: before,
                        resets_in: usage.reset_after,
                    };
                    tracing::warn!("{change}");
                    events.publish(ServerEvent::new(now, change));
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

/// The share of a quota that was reported last in a period.
#[derive(Default)]
struct ReportedShare {
    percent: u64,
    period_ends: Time,
}

impl ReportedShare {
    /// The share that was reported before, and the one to report: the highest that is used, if it is higher. The present
    /// period ends at `ends`.
    fn newly_used(&mut self, percent: u64, shares: &[u64], now: Time, ends: Time) -> Option<(u64, u64)> {
        // Corrections of costs lower the share, too, so only the time tells that the quota has started again.
        if now >= self.period_ends {
            *self = Self { percent: 0, period_ends: ends };
        }
        self.period_ends = self.period_ends.min(ends);
        let share = shares.iter().copied().rfind(|share| percent >= *share).filter(|share| *share > self.percent)?;
        Some((std::mem::replace(&mut self.percent, share), share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_share_is_reported_once_a_period() {
        let at = |second: u64| Time::from_secs(1_800_000_000 + second);
        for (shares, looks, expected) in [
            // The second of each look, and the used share. A period has 100 seconds.
            (
                &[80, 100][..],
                &[(0, 79), (2, 80), (4, 79), (6, 81), (8, 100), (10, 99), (12, 30), (14, 100), (100, 3), (102, 85)][..],
                &[(0, 80), (80, 100), (0, 80)][..],
            ),
            // A jump over several shares tells which was the last one before.
            (&[50, 80, 95, 100], &[(0, 49), (2, 81), (4, 99), (6, 100)], &[(0, 80), (80, 95), (95, 100)]),
            (&[50, 80, 100], &[(0, 100)], &[(0, 100)]),
            // A small share is reported in each period.
            (&[1, 80, 100], &[(0, 1), (2, 2), (100, 0), (102, 1), (201, 1)], &[(0, 1), (0, 1), (0, 1)]),
        ] {
            let mut reported = ReportedShare::default();
            let looks = looks.iter();
            let told = looks.filter_map(|&(second, percent)| {
                reported.newly_used(percent, shares, at(second), at((second / 100 + 1) * 100))
            });
            assert_eq!(told.collect::<Vec<_>>(), expected);
        }
    }
}
