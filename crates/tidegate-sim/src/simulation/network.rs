//! Messages between clients and the service, with the gate in front of it.

use rand::RngExt;
use tidegate_core::Span;

use super::Simulation;
use super::event::{SimEvent, SimRequest};
use crate::service::{RequestKind, ServiceReply};
use crate::setup::TimeRange;

impl Simulation<'_> {
    pub(super) fn send_to_service(&mut self, request: SimRequest, asks: RequestKind) {
        if let Some(way) = self.network_delay(request.node) {
            self.events.schedule(self.events.now() + way, SimEvent::RequestArrives(request, asks));
        }
    }

    pub(super) fn send_reply(&mut self, request: SimRequest, answer: ServiceReply) {
        if let Some(way) = self.network_delay(request.node) {
            self.events.schedule(self.events.now() + way, SimEvent::ReplyArrives(request, answer));
        }
    }

    /// Returns the delay of a message between a client and the service; `None` if it is lost.
    pub(super) fn network_delay(&mut self, node: usize) -> Option<Span> {
        let elapsed = self.events.now().since(self.setup.starts_at);
        let network = &self.setup.network;
        let rng = &mut self.nodes[node].network_rng;
        let way = network.delay.sample(rng);
        let lost = rng.random::<f64>() < network.loss.value_at(elapsed);
        let is_partitioned = TimeRange::any_contains(&network.partitions, elapsed);
        (!lost && !is_partitioned).then_some(way)
    }
}
