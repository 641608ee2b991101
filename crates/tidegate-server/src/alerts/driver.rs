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
use crate::events::{Change, ServerEvent};
use crate::state_cell::StateCell;
use crate::states::{Engine, SharedParts};

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
    parts: Arc<SharedParts>,
) {
    let mut driver = Driver {
        alerts: Arc::clone(&engine.load().alerts),
        seen: 0,
        known_blocks: 0,
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
        driver.read_events(&parts, now);
        if number == 0 {
            driver.measure(&engine, parts.metrics.is_last_reload_ok(), now);
        }
        driver.send_due(now);
    }
}

struct Driver {
    alerts: Arc<AlertSet>,
    /// The number of the last event that was read.
    seen: u64,
    /// The number of begun blocks that alerts know of, by an event or only by their number.
    known_blocks: u64,
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
        let stays = |alert: &&Arc<Alert>| alerts.alerts.iter().any(|next| Arc::ptr_eq(next, alert));
        for gone in self.alerts.alerts.iter().filter(|alert| !stays(alert)) {
            gone.send_pending(now);
            if let Some(next) = alerts.find(&gone.config.name) {
                next.follow(gone);
            }
        }
        self.alerts = Arc::clone(alerts);
        // Limits and providers come with the counts of earlier policies, and go with them.
        self.shadow.clear();
        self.retries.clear();
    }

    fn read_events(&mut self, parts: &SharedParts, now: Time) {
        // Before the events, so that no block is only known by its number whose event is read.
        let begun_blocks = parts.refusals.begun_blocks();
        let news = parts.events.after(self.seen);
        self.seen = news.last;
        if news.missed > 0 && !self.alerts.alerts.is_empty() {
            tracing::warn!(missed = news.missed, "alerts don't report events that came too fast");
        }
        for event in &news.events {
            if matches!(event.change, Change::Blocked { shadow: false, .. }) {
                self.known_blocks += 1;
            }
            for alert in &self.alerts.alerts {
                if let Some(event) = alert_event(event, &alert.config) {
                    alert.group.lock().record(now, event);
                }
            }
        }
        let others = begun_blocks.saturating_sub(self.known_blocks);
        self.known_blocks += others;
        for alert in self.alerts_on(AlertTrigger::Blocked) {
            alert.group.lock().count_unnamed(others);
        }
    }

    /// The alerts that report this.
    fn alerts_on(&self, trigger: AlertTrigger) -> impl Iterator<Item = &Arc<Alert>> {
        self.alerts.alerts.iter().filter(move |alert| alert.config.on.contains(&trigger))
    }

    /// Begins and ends states by what is. Events tell of them sooner, but aren't all published.
    fn measure<S: Store, C: Clock + Clone>(&mut self, engine: &Engine<S, C>, is_last_reload_ok: bool, now: Time) {
        use AlertTrigger::{AllCooling, BreakerOpen, Flood, ReloadFailed, Retries, Shadow, StoreLost};
        self.judge(now, StoreLost, &of_gate(engine.gate.store().outage()), |_, _, outage| judge_store(*outage));
        self.judge(now, ReloadFailed, &of_gate(is_last_reload_ok), |_, _, is_ok| judge_reload(*is_ok));
        let has = |trigger| self.alerts_on(trigger).next().is_some();
        let (has_flood, has_shadow, has_retries) = (has(Flood), has(Shadow), has(Retries));
        let has_provider = has_retries || has(BreakerOpen) || has(AllCooling);
        let refusals = has_flood.then(|| of_gate(refusals(&engine.gate)));
        if let Some(Growth { elapsed, counts }) = self.refusals.measure_or_clear(now, refusals) {
            self.judge(now, Flood, &counts, |alert, _, refusals| judge_flood(alert, *refusals, elapsed));
        }
        let shadow = has_shadow.then(|| shadow_shares(&engine.gate));
        if let Some(Growth { elapsed, counts }) = self.shadow.measure_or_clear(now, shadow) {
            self.judge(now, Shadow, &counts, |alert, limit, calls| judge_shadow(alert, limit, calls).over(elapsed));
        }
        let providers = engine.providers.iter().flat_map(Outbound::providers).filter(|_| has_provider);
        let reports: BTreeMap<String, ProviderReport> =
            providers.map(|provider| (provider.config().name.clone(), provider.local_report())).collect();
        let totals = |report: &ProviderReport| Totals { part: report.retries, whole: report.first_tries };
        let totals = has_retries.then(|| reports.iter().map(|(name, report)| (name.clone(), totals(report))).collect());
        if let Some(Growth { elapsed, counts }) = self.retries.measure_or_clear(now, totals) {
            self.judge(now, Retries, &counts, |alert, name, calls| judge_retries(alert, name, calls).over(elapsed));
        }
        self.judge(now, BreakerOpen, &reports, judge_breaker);
        self.judge(now, AllCooling, &reports, judge_credentials);
    }

    /// Begins and ends the states of these subjects, and ends those of others.
    fn judge<T>(
        &self,
        now: Time,
        trigger: AlertTrigger,
        subjects: &BTreeMap<String, T>,
        judge: impl Fn(&AlertConfig, &str, &T) -> Judgement,
    ) {
        for alert in self.alerts_on(trigger) {
            let mut group = alert.group.lock();
            for (subject, found) in subjects {
                let Judgement { level, text } = judge(&alert.config, subject, found);
                let phase = match level {
                    Level::High => Phase::Begins,
                    Level::Between => continue,
                    Level::Low => Phase::Ends,
                };
                group.record(now, AlertEvent { trigger, subject: subject.clone(), text, phase });
            }
            for subject in group.active_subjects(trigger) {
                if !subjects.contains_key(&subject) {
                    let text = format!("{subject} isn't in the policy any more");
                    group.record(now, AlertEvent { trigger, subject, text, phase: Phase::Ends });
                }
            }
        }
    }

    fn send_due(&self, now: Time) {
        for alert in &self.alerts.alerts {
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
        Change::Blocked { limit, key, shadow: false, .. } => (Blocked, format!("{limit} {key:?}"), Phase::Happened),
        Change::Breaker { provider, state: "open", .. } => (BreakerOpen, provider.clone(), Phase::Begins),
        Change::CoolingDown { provider, all_cooling: true, .. } => (AllCooling, provider.clone(), Phase::Begins),
        Change::CredentialRejected { provider, credential, .. } => {
            (CredentialOut, format!("{provider} {credential}"), Phase::Happened)
        }
        Change::StoreLost { .. } => (StoreLost, GATE.to_owned(), Phase::Begins),
        Change::StoreFull { .. } => (StoreFull, GATE.to_owned(), Phase::Happened),
        Change::QuotaUsed { provider, limit, credential, percent, reported, .. } => {
            let is_news = |share: &u64| *reported < *share && *share <= *percent;
            let share = [100, quota_percent(alert)].into_iter().find(is_news)?;
            (Quota, format!("{provider} {limit} {credential:?} {share}"), Phase::Happened)
        }
        Change::ReloadFailed { .. } => (ReloadFailed, GATE.to_owned(), Phase::Begins),
        _ => return None,
    };
    let text = event.change.to_string();
    alert.on.contains(&trigger).then_some(AlertEvent { trigger, subject, text, phase })
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

impl Judgement {
    fn high(text: String) -> Self {
        Self { level: Level::High, text }
    }

    fn low(text: impl Into<String>) -> Self {
        Self { level: Level::Low, text: text.into() }
    }

    /// A judgement about the calls of this time. Less than a window, as after a reload, ends no state.
    fn over(mut self, elapsed: Span) -> Self {
        if elapsed < SHARE_WINDOW && matches!(self.level, Level::Low) {
            self.level = Level::Between;
        }
        self
    }
}

/// A measurement of the gate as a whole, by its subject.
fn of_gate<T>(value: T) -> BTreeMap<String, T> {
    BTreeMap::from([(GATE.to_owned(), value)])
}

fn judge_store(outage: Option<&str>) -> Judgement {
    match outage {
        Some(store) => Judgement::high(Change::StoreLost { store: store.to_owned() }.to_string()),
        None => Judgement::low("the store answers again"),
    }
}

fn judge_reload(is_ok: bool) -> Judgement {
    match is_ok {
        true => Judgement::low("the policy was reloaded"),
        false => Judgement::high("the last reload failed, so the policy before it goes on".to_owned()),
    }
}

fn judge_breaker(_: &AlertConfig, provider: &str, report: &ProviderReport) -> Judgement {
    let state = report.breaker.state;
    let level = match state {
        "open" => Level::High,
        "half-open" | "ramping" => Level::Between,
        _ => Level::Low,
    };
    Judgement { level, text: format!("{provider}: the circuit breaker is {state}") }
}

fn judge_credentials(_: &AlertConfig, provider: &str, report: &ProviderReport) -> Judgement {
    let states = report.credential_states;
    match states.usable {
        // Credentials whose own limits have no room are usual.
        0 if states.rejected + states.throttled > 0 => {
            Judgement::high(format!("{provider}: no credential is usable, so calls wait"))
        }
        0 => Judgement { level: Level::Between, text: String::new() },
        _ => Judgement::low(format!("{provider}: a credential is usable again")),
    }
}

fn judge_flood(alert: &AlertConfig, refusals: Totals, elapsed: Span) -> Judgement {
    // Before the first window is over, it also has the time before the start, without refusals.
    let micros = elapsed.max(FLOOD_WINDOW).as_micros();
    let refused = refusals.part.saturating_mul(1_000_000);
    let text = format!("{} requests per second are refused, as a mean over ten seconds", refused / micros);
    Judgement { level: Level::of(refused, alert.flood.saturating_mul(micros)), text }
}

fn judge_shadow(alert: &AlertConfig, limit: &str, calls: &Totals) -> Judgement {
    let Totals { part, whole } = *calls;
    let text = format!("the shadow limit {limit} would refuse {part} of {whole} calls in the last minute");
    Judgement {
        level: Level::of_share(part.saturating_mul(1000), whole.saturating_mul(alert.shadow.into()), whole),
        text,
    }
}

fn judge_retries(alert: &AlertConfig, provider: &str, calls: &Totals) -> Judgement {
    let Totals { part, whole } = *calls;
    let text = format!("{provider}: {part} retries of {whole} calls in the last minute");
    let threshold = whole.saturating_mul(u64::from(alert.retries).saturating_sub(1000));
    Judgement { level: Level::of_share(part.saturating_mul(1000), threshold, whole), text }
}

/// The refused requests of the gate.
fn refusals<S: Store, C: Clock>(gate: &Gate<S, C>) -> Totals {
    Totals { part: gate.decision_total(DecisionOutcome::Refused), whole: 0 }
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
        let blocked_client = |key, shadow| Change::Blocked {
            limit: "login".to_owned(),
            ip: None,
            client: serde_json::Map::new(),
            key: tidegate_core::Key::new(1, key),
            seconds: 2,
            strikes: 1,
            by_operator: false,
            shadow,
        };
        let blocked = |shadow| blocked_client(1, shadow);
        let quota = |reported, percent| Change::QuotaUsed {
            provider: "api".to_owned(),
            limit: "day".to_owned(),
            credential: None,
            percent,
            reported,
            resets_in: 60,
        };
        for (change, expected) in [
            (blocked(false), Some((AlertTrigger::Blocked, Phase::Happened))),
            (blocked(true), None),
            (Change::StoreLost { store: store() }, Some((AlertTrigger::StoreLost, Phase::Begins))),
            (Change::StoreBack { store: store(), seconds: 5 }, None),
            (
                Change::StoreFull { used: 1, exhausted: 0, unblocked: 0, shared: 0 },
                Some((AlertTrigger::StoreFull, Phase::Happened)),
            ),
            (quota(0, 50), Some((AlertTrigger::Quota, Phase::Happened))),
            (quota(0, 80), Some((AlertTrigger::Quota, Phase::Happened))),
            (quota(50, 80), None),
            (quota(80, 100), Some((AlertTrigger::Quota, Phase::Happened))),
            (quota(100, 120), None),
            (Change::ReloadFailed { error: String::new() }, None),
        ] {
            let event = ServerEvent::new(Time::from_secs(1), change);
            let found = alert_event(&event, all).map(|event| (event.trigger, event.phase));
            assert_eq!(found, expected, "{:?}", event.change);
            assert_eq!(alert_event(&event, none), None);
        }
        let subject = |key| {
            let event = ServerEvent::new(Time::from_secs(1), blocked_client(key, false));
            alert_event(&event, all).unwrap().subject
        };
        assert_ne!(subject(1), subject(2), "clients that are shown alike");
    }

    #[test]
    fn rates_and_shares_are_those_of_a_window() {
        let text = "[alert.a]\nlog = true\non = [\"flood\", \"shadow\"]\n";
        let policy = Policy::load(PolicySources::new().file("t", text)).unwrap();
        let alert = &policy.alerts()[0];
        let flood =
            |refused, seconds| judge_flood(alert, Totals { part: refused, whole: 0 }, Span::from_secs(seconds)).level;
        assert!(matches!(flood(150, 1), Level::Low), "15 a second over ten seconds");
        assert!(matches!(flood(1001, 2), Level::High));
        assert!(matches!(flood(1001, 10), Level::High));
        assert!(matches!(flood(1001, 11), Level::Between));
        let shadow =
            |part, seconds| judge_shadow(alert, "a", &Totals { part, whole: 100 }).over(Span::from_secs(seconds)).level;
        assert!(matches!(shadow(5, 1), Level::High));
        assert!(matches!(shadow(0, 59), Level::Between), "not yet known to be over");
        assert!(matches!(shadow(0, 60), Level::Low));
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
