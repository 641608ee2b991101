//! The driver of alerts: it reads new events, measures counts, and sends the messages that are due.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tidegate::outbound::{Outbound, ProviderReport};
use tidegate::store::Store;
use tidegate::{DecisionOutcome, Gate, Span, Time};
use tidegate_core::Clock;
use tidegate_policy::alerts::{AlertConfig, AlertTrigger};
use tokio::time::MissedTickBehavior;

use super::group::{AlertEvent, Phase};
use super::meter::{Growth, Meter, Totals};
use super::{Alert, AlertSet};
use crate::events::{Change, ServerEvent, ServerEvents, client_text};
use crate::state_cell::StateCell;
use crate::states::Engine;

/// The interval of looks at events.
const INTERVAL: Duration = Duration::from_millis(250);
/// The number of intervals from one measurement of counts to the next.
const TICKS_PER_MEASUREMENT: u32 = 4;
/// The times over which floods, and shares of calls, are measured.
const FLOOD_WINDOW: Span = Span::from_secs(10);
const SHARE_WINDOW: Span = Span::from_secs(60);
/// The minimum number of calls of which a share says something.
const MIN_CALLS: u64 = 20;
/// The subject of events that are about the whole gate.
const GATE: &str = "gate";

/// Sends messages about events; never returns.
pub(crate) async fn run_alerts<S: Store, C: Clock + Clone>(
    engine: Arc<StateCell<Engine<S, C>>>,
    events: Arc<ServerEvents>,
) {
    let mut driver = Driver {
        alerts: Arc::clone(&engine.load().alerts),
        seen: 0,
        refusals: Meter::new(FLOOD_WINDOW),
        shadow: Meter::new(SHARE_WINDOW),
        retries: Meter::new(SHARE_WINDOW),
    };
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for number in (0..TICKS_PER_MEASUREMENT).cycle() {
        ticks.tick().await;
        let engine = engine.load();
        let now = engine.gate.clock().now();
        driver.follow(&engine.alerts, now);
        driver.read_events(&events, now);
        if number == 0 {
            driver.measure(&engine, now);
        }
        driver.send_due(now);
    }
}

struct Driver {
    alerts: Arc<AlertSet>,
    /// The number of the last event that was read.
    seen: u64,
    refusals: Meter,
    shadow: Meter,
    retries: Meter,
}

impl Driver {
    /// Takes over the alerts of another policy. Those that are gone, or have changed, first send what waits.
    fn follow(&mut self, alerts: &Arc<AlertSet>, now: Time) {
        if Arc::ptr_eq(&self.alerts, alerts) {
            return;
        }
        let stays = |alert: &&Arc<Alert>| alerts.0.iter().any(|next| Arc::ptr_eq(next, alert));
        for gone in self.alerts.0.iter().filter(|alert| !stays(alert)) {
            if let Some(message) = gone.group.lock().take_pending() {
                gone.send(&message, now);
            }
        }
        self.alerts = Arc::clone(alerts);
    }

    fn read_events(&mut self, events: &ServerEvents, now: Time) {
        let news = events.after(self.seen);
        self.seen = news.last;
        if news.missed > 0 && !self.alerts.0.is_empty() {
            tracing::warn!(missed = news.missed, "alerts don't report events that came too fast");
        }
        for event in &news.events {
            for alert in &self.alerts.0 {
                if let Some(event) = alert_event(event, &alert.config) {
                    alert.group.lock().record(now, event);
                }
            }
        }
    }

    /// Measures counts, and looks for the ends of providers' states.
    fn measure<S: Store, C: Clock + Clone>(&mut self, engine: &Engine<S, C>, now: Time) {
        use AlertTrigger::{AllCooling, BreakerOpen, Flood, Retries, Shadow};
        let has = |wanted: &[AlertTrigger]| {
            self.alerts.0.iter().any(|alert| wanted.iter().any(|trigger| alert.config.on.contains(trigger)))
        };
        if has(&[Flood]) {
            let growth = self.refusals.measure(now, refusals(&engine.gate));
            self.judge(now, Flood, growth.as_ref(), judge_flood);
        }
        if has(&[Shadow]) {
            let growth = self.shadow.measure(now, shadow_shares(&engine.gate));
            self.judge(now, Shadow, growth.as_ref(), judge_shadow);
        }
        if !has(&[BreakerOpen, AllCooling, Retries]) {
            return;
        }
        let providers = engine.providers.iter().flat_map(Outbound::providers);
        let reports: BTreeMap<String, ProviderReport> =
            providers.map(|provider| (provider.config().name.clone(), provider.local_report())).collect();
        let totals = |report: &ProviderReport| Totals { part: report.retries, whole: report.first_tries };
        let totals = reports.iter().map(|(name, report)| (name.clone(), totals(report))).collect();
        let growth = self.retries.measure(now, totals);
        self.judge(now, Retries, growth.as_ref(), judge_retries);
        self.end_states(now, BreakerOpen, |name| match reports.get(name).map(|report| report.breaker.state) {
            Some("open" | "half-open") => None,
            Some(state) => Some(format!("{name}: the circuit breaker is {state}")),
            None => Some(format!("{name} isn't in the policy any more")),
        });
        self.end_states(now, AllCooling, |name| {
            match reports.get(name).map(|report| report.credential_states.usable) {
                Some(0) => None,
                Some(_) => Some(format!("{name}: a credential is usable again")),
                None => Some(format!("{name} isn't in the policy any more")),
            }
        });
    }

    /// Begins and ends states by measured counts.
    fn judge(
        &self,
        now: Time,
        trigger: AlertTrigger,
        growth: Option<&Growth>,
        judge: impl Fn(&AlertConfig, &str, Totals, Span) -> Judgement,
    ) {
        let Some(Growth { elapsed, counts }) = growth else { return };
        for alert in self.alerts.0.iter().filter(|alert| alert.config.on.contains(&trigger)) {
            let mut group = alert.group.lock();
            for (subject, totals) in counts {
                let Judgement { level, text } = judge(&alert.config, subject, *totals, *elapsed);
                let phase = match level {
                    Level::High => Phase::Begins,
                    Level::Between => continue,
                    Level::Low => Phase::Ends,
                };
                group.record(now, AlertEvent { trigger, subject: subject.clone(), text, others: 0, phase });
            }
        }
        self.end_states(now, trigger, |subject| {
            (!counts.contains_key(subject)).then(|| format!("{subject} isn't in the policy any more"))
        });
    }

    /// Ends the states for which there is a text.
    fn end_states(&self, now: Time, trigger: AlertTrigger, end: impl Fn(&str) -> Option<String>) {
        for alert in &self.alerts.0 {
            let mut group = alert.group.lock();
            for subject in group.active_subjects(trigger) {
                if let Some(text) = end(&subject) {
                    group.record(now, AlertEvent { trigger, subject, text, others: 0, phase: Phase::Ends });
                }
            }
        }
    }

    fn send_due(&self, now: Time) {
        for alert in &self.alerts.0 {
            let due = alert.group.lock().poll(now);
            if let Some(message) = due {
                alert.send(&message, now);
            }
        }
    }
}

/// The event as this alert sees it. `None` if it doesn't report it.
fn alert_event(event: &ServerEvent, alert: &AlertConfig) -> Option<AlertEvent> {
    use AlertTrigger::{AllCooling, Blocked, BreakerOpen, CredentialOut, Quota, ReloadFailed, StoreFull, StoreLost};
    let (trigger, subject, phase) = match &event.change {
        Change::Blocked { limit, client, shadow: false, .. } => {
            (Blocked, format!("{limit} {}", client_text(client)), Phase::Happened)
        }
        Change::Breaker { provider, state: "open", .. } => (BreakerOpen, provider.clone(), Phase::Begins),
        Change::CoolingDown { provider, all_cooling: true, .. } => (AllCooling, provider.clone(), Phase::Begins),
        Change::CredentialRejected { provider, credential, .. } => {
            (CredentialOut, format!("{provider} {credential}"), Phase::Happened)
        }
        Change::StoreLost { .. } => (StoreLost, GATE.to_owned(), Phase::Begins),
        Change::StoreBack { .. } => (StoreLost, GATE.to_owned(), Phase::Ends),
        Change::StoreFull { .. } => (StoreFull, GATE.to_owned(), Phase::Happened),
        Change::QuotaUsed { provider, limit, credential, percent, .. }
            if *percent >= 100 || *percent == quota_percent(alert) =>
        {
            (Quota, format!("{provider} {limit} {credential:?} {percent}"), Phase::Happened)
        }
        Change::ReloadFailed { .. } => (ReloadFailed, GATE.to_owned(), Phase::Begins),
        Change::Reloaded { .. } => (ReloadFailed, GATE.to_owned(), Phase::Ends),
        _ => return None,
    };
    // Those of a provider may be events of another trigger.
    let others = if trigger == Blocked { event.unpublished } else { 0 };
    let text = event.change.to_string();
    alert.on.contains(&trigger).then_some(AlertEvent { trigger, subject, text, others, phase })
}

/// The share of a quota that an alert reports, in per cent.
pub(crate) fn quota_percent(alert: &AlertConfig) -> u64 {
    u64::from(alert.quota / 10).max(1)
}

/// A measured value beside its threshold.
struct Judgement {
    level: Level,
    text: String,
}

enum Level {
    /// Above the threshold.
    High,
    /// Not above the threshold, but above half of it, so that a state doesn't begin and end all the time.
    Between,
    Low,
}

impl Level {
    fn of(value: u64, threshold: u64) -> Self {
        if value > threshold {
            Self::High
        } else if value.saturating_mul(2) > threshold {
            Self::Between
        } else {
            Self::Low
        }
    }

    /// The level of a share of these calls. Few calls begin no state.
    fn of_share(value: u64, threshold: u64, calls: u64) -> Self {
        match Self::of(value, threshold) {
            Self::High if calls < MIN_CALLS => Self::Between,
            level => level,
        }
    }
}

fn judge_flood(alert: &AlertConfig, _: &str, refusals: Totals, elapsed: Span) -> Judgement {
    let per_second = refusals.part.saturating_mul(1_000_000) / elapsed.as_micros().max(1);
    let text = format!("{per_second} requests per second are refused");
    Judgement { level: Level::of(per_second, alert.flood), text }
}

fn judge_shadow(alert: &AlertConfig, limit: &str, calls: Totals, _: Span) -> Judgement {
    let Totals { part, whole } = calls;
    let text = format!("the shadow limit {limit} would refuse {part} of {whole} calls in the last minute");
    Judgement {
        level: Level::of_share(part.saturating_mul(1000), whole.saturating_mul(alert.shadow.into()), whole),
        text,
    }
}

fn judge_retries(alert: &AlertConfig, provider: &str, calls: Totals, _: Span) -> Judgement {
    let Totals { part, whole } = calls;
    let text = format!("{provider}: {part} retries of {whole} calls in the last minute");
    let threshold = whole.saturating_mul(u64::from(alert.retries).saturating_sub(1000));
    Judgement { level: Level::of_share(part.saturating_mul(1000), threshold, whole), text }
}

/// The refused requests of the gate.
fn refusals<S: Store, C: Clock>(gate: &Gate<S, C>) -> BTreeMap<String, Totals> {
    let refused = gate.decision_counts().into_iter().filter(|found| found.outcome == DecisionOutcome::Refused);
    BTreeMap::from([(GATE.to_owned(), Totals { part: refused.map(|found| found.count).sum(), whole: 0 })])
}

/// For each shadow limit, the calls that it would have refused, and those of its action, or of all.
fn shadow_shares<S: Store, C: Clock>(gate: &Gate<S, C>) -> BTreeMap<String, Totals> {
    let (plan, counts) = (gate.plan(), gate.decision_counts());
    let shadow = plan.active_limits().filter(|(_, limit)| limit.is_shadow());
    let totals = shadow.map(|(id, _)| {
        let info = plan.limit_info(id);
        let of_action = counts.iter().filter(|found| info.action().is_none_or(|action| found.action == Some(action)));
        let is_refusal = |outcome| outcome == DecisionOutcome::Shadow;
        let part = counts.iter().filter(|found| found.limit == Some(id) && is_refusal(found.outcome));
        let part = part.map(|found| found.count).sum();
        (info.name().to_owned(), Totals { part, whole: of_action.map(|found| found.count).sum() })
    });
    totals.collect()
}

#[cfg(test)]
mod tests {
    use tidegate_policy::{Policy, PolicySources};

    use super::*;

    #[test]
    fn each_event_belongs_to_a_state() {
        let text = "[alert.all]\nlog = true\nquota = 0.5\non = [\"blocked\", \"store_lost\", \"store_full\", \"quota\"]\n\
                    [alert.none]\nlog = true\non = \"flood\"\n";
        let policy = Policy::load(PolicySources::new().file("t", text)).unwrap();
        let [all, none] = policy.alerts() else { panic!("two alerts") };
        let store = || "redis".to_owned();
        let blocked = |shadow| Change::Blocked {
            limit: "login".to_owned(),
            ip: None,
            client: serde_json::Map::new(),
            seconds: 2,
            strikes: 1,
            by_operator: false,
            shadow,
        };
        let quota = |percent| Change::QuotaUsed {
            provider: "api".to_owned(),
            limit: "day".to_owned(),
            credential: None,
            percent,
            resets_in: 60,
        };
        for (change, expected) in [
            (blocked(false), Some((AlertTrigger::Blocked, Phase::Happened, 7))),
            (blocked(true), None),
            (Change::StoreLost { store: store() }, Some((AlertTrigger::StoreLost, Phase::Begins, 0))),
            (Change::StoreBack { store: store(), seconds: 5 }, Some((AlertTrigger::StoreLost, Phase::Ends, 0))),
            (
                Change::StoreFull { used: 1, exhausted: 0, unblocked: 0, shared: 0 },
                Some((AlertTrigger::StoreFull, Phase::Happened, 0)),
            ),
            (quota(50), Some((AlertTrigger::Quota, Phase::Happened, 0))),
            (quota(80), None),
            (quota(100), Some((AlertTrigger::Quota, Phase::Happened, 0))),
            (Change::ReloadFailed { error: String::new() }, None),
        ] {
            let event = ServerEvent::after_unpublished(Time::from_secs(1), change, 7);
            let found = alert_event(&event, all).map(|event| (event.trigger, event.phase, event.others));
            assert_eq!(found, expected, "{:?}", event.change);
            assert_eq!(alert_event(&event, none), None);
        }
    }

    #[test]
    fn few_calls_are_no_share() {
        for (value, threshold, calls, expected) in [
            (11, 10, 20, "high"),
            (11, 10, 19, "between"),
            (10, 10, 20, "between"),
            (5, 10, 20, "low"),
            (0, 0, 0, "low"),
        ] {
            let found = match Level::of_share(value, threshold, calls) {
                Level::High => "high",
                Level::Between => "between",
                Level::Low => "low",
            };
            assert_eq!(found, expected, "{value} {threshold} {calls}");
        }
    }
}
