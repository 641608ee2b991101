//! The list of nodes, as the dashboard and `/v1/fleet` show it.

use serde::Serialize;
use serde_json::{Value, json};
use tidegate::Span;

use super::record::NodeRecord;

/// All nodes that share the store.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FleetReport {
    /// False if the state belongs to this process alone.
    pub(crate) shared: bool,
    /// The same in words.
    pub(crate) message: Option<&'static str>,
    /// The store's kind and hosts.
    pub(crate) store: String,
    /// The seconds since the store last listed the nodes. `None` if it never has.
    pub(crate) listed_age: Option<u64>,
    /// The error of this node's last announcement, if it failed.
    pub(crate) error: Option<String>,
    /// The nodes, this one first, then silent ones.
    pub(crate) nodes: Vec<NodeReport>,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct NodeReport {
    /// The random number of the process, as 16 digits of base 16.
    pub(crate) id: String,
    pub(crate) name: String,
    /// Empty if the node's record can't be read.
    pub(crate) version: String,
    /// True for the node that reports.
    #[serde(rename = "this")]
    pub(crate) is_this: bool,
    pub(crate) state: NodeState,
    /// The seconds since the store last heard the node. `None` if it never has.
    pub(crate) age: Option<u64>,
    pub(crate) uptime: u64,
    pub(crate) decisions_per_second: Option<f64>,
    /// `None` if the state belongs to this process alone.
    pub(crate) link: Option<LinkReport>,
}

/// The state of a node, those that need attention first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NodeState {
    /// It has missed announcements.
    Silent,
    /// This node can't tell, because its own list is old.
    Unknown,
    /// It announces itself.
    Live,
}

impl NodeState {
    pub(crate) const ALL: [Self; 3] = [Self::Live, Self::Silent, Self::Unknown];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Silent => "silent",
            Self::Unknown => "unknown",
            Self::Live => "live",
        }
    }
}

/// A node's link to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LinkReport {
    /// False while the node decides without the store, or without a part of it.
    pub(crate) up: bool,
    /// The seconds for which that has been so.
    pub(crate) seconds: u64,
}

impl NodeReport {
    pub(super) fn new(node_id: u64, record: NodeRecord, age: Option<Span>, state: NodeState) -> Self {
        let id = format!("{node_id:016x}");
        Self {
            name: if record.name.is_empty() { id.clone() } else { record.name },
            id,
            version: record.version,
            is_this: false,
            state,
            age: age.map(Span::as_secs_ceil),
            uptime: record.uptime,
            decisions_per_second: record.decisions_per_second,
            link: Some(LinkReport { up: !record.is_link_down, seconds: record.link_seconds }),
        }
    }
}

impl FleetReport {
    /// The number of nodes in this state.
    pub(crate) fn count(&self, state: NodeState) -> usize {
        self.nodes.iter().filter(|node| node.state == state).count()
    }

    /// The numbers of nodes, without the nodes.
    pub(crate) fn summary(&self) -> Value {
        let counts: serde_json::Map<_, _> =
            NodeState::ALL.into_iter().map(|state| (state.name().to_owned(), self.count(state).into())).collect();
        json!({ "shared": self.shared, "nodes": counts })
    }
}

/// The sentence for a node whose state no other node shares.
pub(super) fn unshared_text(store: &str) -> &'static str {
    match store.starts_with("file:") {
        true => "This node keeps its state in a file: no other node shares it.",
        false => "This node keeps its state in memory: no other node shares it.",
    }
}
