//! Lanes: order, bounds, floors, and agreement with a simple model over random operations.

mod asking;
mod bounds;
mod fairness;
mod model;
mod order;
mod scopes;
mod waits;

use std::collections::{HashMap, HashSet};

use tidegate_core::lanes::{MAX_FLOOR, MAX_WAITING};
use tidegate_core::time::MAX_CLOCK_LAG;
use tidegate_core::{
    Lane, LaneSpec, Lanes, LanesSpec, Limit, LimitKind, MAX_COST, QueueFullError, QueueStep, Rate, Refusal,
    RefusalScope, ScopedLane, Span, Ticket, Time, WaitReason,
};
use tidegate_testkit::fixtures::{TestLimiter, limit_id, test_time, window_limit};
use tidegate_testkit::property;
use tidegate_testkit::random::{self, RandomSource, case_count};

const BACKGROUND: usize = Lane::Background as usize;
const MICRO: Span = Span::from_micros(1);

fn waiting(max_waiting: u32) -> LanesSpec {
    LanesSpec { lanes: [LaneSpec { max_waiting, ..LaneSpec::default() }; 3], ..LanesSpec::default() }
}

fn displacing(max_waiting: u32) -> LanesSpec {
    let lane = LaneSpec { max_waiting, displaces: true, ..LaneSpec::default() };
    LanesSpec { lanes: [lane; 3], ..LanesSpec::default() }
}

fn enqueue(lanes: &mut Lanes, lane: Lane, now: Time) -> Ticket {
    lanes.enqueue(lane, 1, Time::NEVER, now).expect("room in the queue")
}

fn ask(lanes: &mut Lanes, now: Time) -> Ticket {
    match lanes.poll(now) {
        QueueStep::AskStore(ticket) => ticket,
        other => panic!("nobody is to ask: {other:?}"),
    }
}

/// A refusal that another event may end earlier.
fn refusal(until: Time, scope: RefusalScope) -> Refusal {
    Refusal { until, scope, ..Refusal::default() }
}

/// Grants every call that asks at `now` until none does, and returns them in order.
fn drain(lanes: &mut Lanes, now: Time) -> Vec<Ticket> {
    let mut order = Vec::new();
    while let QueueStep::AskStore(ticket) = lanes.poll(now) {
        let lane = lanes.grant(ticket, now).expect("a call that waits");
        lanes.record_end(lane);
        order.push(ticket);
    }
    order
}
