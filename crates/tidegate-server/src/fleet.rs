//! The nodes that share the store: this node's announcements, and the list of all nodes.
//!
//! A node that can't reach the store can't announce itself: the others see it fall silent, and it knows only that its own
//! link is down. So each node reports its own link as it sees it, and the others as they were when the store last listed
//! them.

mod record;
mod report;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidegate::store::{Announcement, Store, StoreError};
use tidegate::{Gate, Span, Time};
use tidegate_core::Clock;
use tidegate_policy::StoreConfig;
use tidegate_runtime::random::random_u64;

use self::record::{NodeRecord, default_name};
pub(crate) use self::report::{FleetReport, LinkReport, NodeReport, NodeState};
use crate::state_cell::StateCell;
use crate::states::Engine;

/// The longest time between two announcements.
const MAX_INTERVAL: Span = Span::from_secs(5);
/// The number of announcements that a node sends, at least, before it would be forgotten.
const ANNOUNCEMENTS_PER_EXPIRY: u64 = 8;
/// The number of intervals without an announcement after which a node counts as silent.
const SILENT_INTERVALS: u64 = 3;
/// The maximum time for an announcement, and for the last one of a process.
const TIMEOUT: Duration = Duration::from_secs(2);

/// This node and its knowledge of the others.
pub(crate) struct FleetView {
    node_id: u64,
    name: String,
    /// The store's kind and hosts, without secrets.
    store: String,
    started_at: Time,
    interval: Span,
    /// The time for which the store keeps an announcement.
    kept_for: Span,
    knowledge: Mutex<Knowledge>,
}

#[derive(Debug, Default)]
struct Knowledge {
    /// False until the store has shown that other nodes share it.
    is_shared: bool,
    link: LinkState,
    /// The time of the last count of decisions, and their number.
    decisions: Option<(Time, u64)>,
    decisions_per_second: Option<f64>,
    listing: Option<Listing>,
    /// The error of the last announcement, if it failed.
    error: Option<String>,
    is_error_logged: bool,
}

/// The nodes that the store listed at a time.
#[derive(Debug)]
struct Listing {
    at: Time,
    /// The other nodes by their numbers, with the age of each announcement at that time.
    others: Vec<(u64, Span, NodeRecord)>,
}

/// The state of the link to the store, and since when it is so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LinkState {
    is_down: bool,
    since: Time,
}

impl LinkState {
    fn update(&mut self, is_down: bool, now: Time) {
        if self.is_down != is_down {
            *self = Self { is_down, since: now };
        }
    }
}

impl FleetView {
    pub(crate) fn new(config: &StoreConfig, started_at: Time) -> Self {
        let knowledge = Knowledge { link: LinkState { is_down: false, since: started_at }, ..Knowledge::default() };
        Self {
            node_id: random_u64(),
            name: config.node_name.clone().unwrap_or_else(default_name),
            store: config.url.to_string(),
            started_at,
            interval: MAX_INTERVAL.min(Span::from_micros(config.node_expiry.as_micros() / ANNOUNCEMENTS_PER_EXPIRY)),
            kept_for: config.node_expiry,
            knowledge: Mutex::new(knowledge),
        }
    }

    /// Announces this node again and again. Returns if no other node shares the store.
    pub(crate) async fn run<S: Store, C: Clock + Clone>(&self, engine: Arc<StateCell<Engine<S, C>>>) {
        loop {
            let (gate, has_counts) = {
                let engine = engine.load();
                (engine.gate.clone(), engine.policy.admin().metrics)
            };
            let record = self.present_record(&gate, has_counts);
            let Some(result) = self.announce(&gate, &record, self.kept_for).await else { return };
            self.record_result(result, gate.store().outage().is_some());
            tokio::time::sleep(self.interval.as_duration()).await;
        }
    }

    /// Tells the other nodes that this one has ended, as far as the store answers.
    pub(crate) async fn withdraw<S: Store, C: Clock + Clone>(&self, gate: &Gate<S, C>) {
        if gate.store().outage().is_some() {
            return;
        }
        let record = self.present_record(gate, false);
        if let Some(Err(error)) = self.announce(gate, &record, Span::ZERO).await {
            tracing::debug!(%error, "the other nodes list this one until it is forgotten");
        }
    }

    /// Sends an announcement. `None` if no other node shares the store.
    async fn announce<S: Store, C: Clock>(
        &self,
        gate: &Gate<S, C>,
        record: &NodeRecord,
        kept_for: Span,
    ) -> Option<Result<Listing, StoreError>> {
        let announcement = match Announcement::new(self.node_id, kept_for, record.to_bytes()) {
            Ok(announcement) => announcement,
            Err(error) => return Some(Err(error)),
        };
        let answer = gate.store().announce(announcement, gate.clock().now())?;
        self.knowledge.lock().is_shared = true;
        let answer = tokio::time::timeout(TIMEOUT, answer).await.unwrap_or(Err(StoreError::Timeout(TIMEOUT)));
        Some(answer.map(|nodes| {
            let others = nodes.into_iter().filter(|node| node.node_id != self.node_id);
            let others = others.map(|node| (node.node_id, node.age, NodeRecord::from_bytes(&node.record)));
            Listing { at: gate.clock().now(), others: others.collect() }
        }))
    }

    /// This node as the others are to know it.
    fn present_record<S: Store, C: Clock + Clone>(&self, gate: &Gate<S, C>, has_counts: bool) -> NodeRecord {
        let now = gate.clock().now();
        let total = has_counts.then(|| gate.decision_counts().iter().map(|found| found.count).sum());
        let mut knowledge = self.knowledge.lock();
        knowledge.link.update(gate.store().outage().is_some(), now);
        let before = std::mem::replace(&mut knowledge.decisions, total.map(|total| (now, total)));
        if let (Some((since, before)), Some(total)) = (before, total)
            && now > since
        {
            // A policy may have fewer counters than the one before.
            let decided = total.saturating_sub(before) as f64;
            knowledge.decisions_per_second = Some(decided / now.since(since).as_secs_f64());
        }
        self.own_record(&knowledge, now)
    }

    fn own_record(&self, knowledge: &Knowledge, now: Time) -> NodeRecord {
        NodeRecord {
            name: self.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime: now.since(self.started_at).as_secs_ceil(),
            interval_ms: self.interval.as_micros() / 1000,
            decisions_per_second: knowledge.decisions_per_second,
            is_link_down: knowledge.link.is_down,
            link_seconds: now.since(knowledge.link.since).as_secs_ceil(),
        }
    }

    /// Keeps the result of an announcement. Logs once why announcements fail although the store answers.
    fn record_result(&self, result: Result<Listing, StoreError>, is_store_lost: bool) {
        let mut knowledge = self.knowledge.lock();
        match result {
            Ok(listing) => {
                knowledge.listing = Some(listing);
                (knowledge.error, knowledge.is_error_logged) = (None, false);
            }
            Err(error) => {
                // The first failure may be the beginning of an outage.
                let has_failed_before = knowledge.error.replace(error.to_string()).is_some();
                if has_failed_before && !is_store_lost && !knowledge.is_error_logged {
                    knowledge.is_error_logged = true;
                    tracing::warn!(%error, "this node can't announce itself in the store: other nodes don't see it");
                }
            }
        }
    }

    /// All nodes, this one first.
    pub(crate) fn report(&self, is_store_lost: bool, now: Time) -> FleetReport {
        let mut knowledge = self.knowledge.lock();
        knowledge.link.update(is_store_lost, now);
        let own = self.own_record(&knowledge, now);
        let listed_at = knowledge.listing.as_ref().map(|listing| listing.at);
        let mut this = NodeReport::new(self.node_id, own, listed_at.map(|at| now.since(at)), NodeState::Live);
        this.is_this = true;
        if !knowledge.is_shared {
            (this.link, this.age) = (None, Some(0));
        }
        let listing_age = listed_at.map(|at| now.since(at));
        let is_stale = listing_age.is_some_and(|age| age > self.interval.times(SILENT_INTERVALS));
        let others = knowledge.listing.iter().flat_map(|listing| &listing.others).map(|(node_id, age, record)| {
            let state = match is_stale {
                true => NodeState::Unknown,
                false if *age > record.interval().times(SILENT_INTERVALS) => NodeState::Silent,
                false => NodeState::Live,
            };
            NodeReport::new(*node_id, record.clone(), Some(*age + listing_age.unwrap_or_default()), state)
        });
        let mut others: Vec<NodeReport> = others.collect();
        others.sort_by(|one, other| (one.state, &one.name, &one.id).cmp(&(other.state, &other.name, &other.id)));
        let nodes = std::iter::once(this).chain(others).collect();
        FleetReport {
            shared: knowledge.is_shared,
            message: (!knowledge.is_shared).then(|| report::unshared_text(&self.store)),
            store: self.store.clone(),
            listed_age: listing_age.map(Span::as_secs_ceil),
            error: knowledge.error.clone(),
            nodes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_policy::{Policy, PolicySources};

    fn view() -> FleetView {
        let text = "[store]\nurl = \"redis://h\"\nnode_name = \"a\"\n";
        let policy = Policy::load(PolicySources::new().file("t", text)).unwrap();
        let view = FleetView::new(policy.store(), Time::from_secs(100));
        view.knowledge.lock().is_shared = true;
        view
    }

    fn other(name: &str) -> NodeRecord {
        NodeRecord { name: name.to_owned(), interval_ms: 5000, ..NodeRecord::default() }
    }

    fn states(report: &FleetReport) -> Vec<(&str, NodeState, Option<u64>)> {
        report.nodes.iter().map(|node| (node.name.as_str(), node.state, node.age)).collect()
    }

    #[test]
    fn silent_nodes_are_told_from_an_old_list() {
        use NodeState::{Live, Silent, Unknown};
        let view = view();
        assert_eq!(states(&view.report(false, Time::from_secs(101))), [("a", Live, None)]);
        let others = [(1, 0, "live"), (2, 16, "silent"), (3, 15, "late")];
        let others = others.map(|(id, age, name)| (id, Span::from_secs(age), other(name))).into();
        view.record_result(Ok(Listing { at: Time::from_secs(110), others }), false);
        let report = view.report(false, Time::from_secs(112));
        let expected =
            [("a", Live, Some(2)), ("silent", Silent, Some(18)), ("late", Live, Some(17)), ("live", Live, Some(2))];
        assert_eq!(states(&report), expected);
        assert_eq!((report.count(Live), report.count(Silent)), (3, 1));
        // Without the store, this node can't tell if the others are silent.
        let report = view.report(true, Time::from_secs(130));
        let expected = [
            ("a", Live, Some(20)),
            ("late", Unknown, Some(35)),
            ("live", Unknown, Some(20)),
            ("silent", Unknown, Some(36)),
        ];
        assert_eq!(states(&report), expected);
        let report = view.report(true, Time::from_secs(140));
        assert_eq!(report.nodes[0].link, Some(LinkReport { up: false, seconds: 10 }));
        let report = view.report(false, Time::from_secs(141));
        assert_eq!(report.nodes[0].link, Some(LinkReport { up: true, seconds: 0 }));
    }

    #[test]
    fn short_expiry_means_short_intervals() {
        let interval = |expiry: &str| {
            let text = format!("[store]\nnode_expiry = \"{expiry}\"\n");
            let policy = Policy::load(PolicySources::new().file("t", &text)).unwrap();
            FleetView::new(policy.store(), Time::ZERO).interval
        };
        assert_eq!(["2s", "20s", "10m"].map(interval), [250, 2500, 5000].map(Span::from_millis));
    }
}
