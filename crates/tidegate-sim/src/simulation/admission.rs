//! The calls that wait for a controller's permission to be sent.

use std::collections::VecDeque;

use tidegate_core::{Span, Time};

use super::controllers::{AttemptResult, Controller, EndedAttempt, new_controller};
use super::event::{CallId, CallState, ClientCall, SimEvent};
use super::node::ClientState;
use super::{RngStreams, Simulation};
use crate::setup::{ClientSpec, ControllerKind, PlainClientSpec, Setup};
use crate::stats::CallOutcome;

/// A controller and the calls that wait for it, in the order of their arrival: those of one client, or of all clients
/// together before the oracle.
#[derive(Debug)]
pub(super) struct Admission<'s> {
    controller: Box<dyn Controller + 's>,
    waiting: VecDeque<CallId>,
    max_waiting: usize,
    in_flight: u32,
    /// The moment of the next wake-up that is scheduled.
    wakes_at: Time,
}

/// The next step of the calls that wait.
#[derive(Clone, Copy, Debug)]
enum Turn {
    /// Send this call, as the `in_flight`-th in flight.
    Send { id: CallId, in_flight: u32 },
    /// Ask again then, or after the end of an attempt.
    Sleep(Time),
}

impl<'s> Admission<'s> {
    fn new(controller: Box<dyn Controller + 's>, max_waiting: usize) -> Self {
        Self { controller, waiting: VecDeque::new(), max_waiting, in_flight: 0, wakes_at: Time::NEVER }
    }

    /// Returns the number of calls that wait.
    fn waiting_calls(&self) -> u32 {
        self.waiting.len() as u32
    }

    /// Adds a call to those that wait. Returns false if there are too many.
    fn push(&mut self, id: CallId) -> bool {
        let has_room = self.waiting.len() < self.max_waiting;
        if has_room {
            self.waiting.push_back(id);
        }
        has_room
    }

    /// Removes a call. Returns false if it doesn't wait.
    fn remove(&mut self, id: CallId) -> bool {
        let place = self.waiting.iter().position(|waiting| *waiting == id);
        place.and_then(|place| self.waiting.remove(place)).is_some()
    }

    fn poll(&mut self, now: Time) -> Turn {
        let (Some(id), true) = (self.waiting.front().copied(), self.in_flight < self.controller.limit(now)) else {
            return Turn::Sleep(Time::NEVER);
        };
        let at = self.controller.next_send_at(now);
        if at > now {
            return Turn::Sleep(at);
        }
        self.waiting.pop_front();
        self.in_flight += 1;
        self.controller.record_send(now);
        Turn::Send { id, in_flight: self.in_flight }
    }

    /// Learns from the end of an attempt that was sent at this time, as the `in_flight`-th.
    pub(super) fn record_end(&mut self, (sent_at, in_flight): (Time, u32), result: AttemptResult, now: Time) {
        let in_flight_at_end = self.in_flight;
        self.controller.record_end(&EndedAttempt { sent_at, ended_at: now, in_flight, in_flight_at_end, result });
        self.in_flight -= 1;
    }
}

/// Creates the controllers of plain clients: one for each, or the oracle for all.
pub(super) fn admissions<'s>(setup: &'s Setup, clients: usize, streams: &mut RngStreams) -> Vec<Admission<'s>> {
    let ClientSpec::Plain(PlainClientSpec { control: Some(kind), queue, .. }) = &setup.client else {
        return Vec::new();
    };
    let count = if *kind == ControllerKind::Oracle { 1 } else { clients };
    let new_admission = |_| {
        let controller = new_controller(*kind, &setup.service, setup.starts_at, streams.next_rng());
        Admission::new(controller, *queue as usize * clients / count)
    };
    (0..count).map(new_admission).collect()
}

impl Simulation<'_> {
    /// Returns the index of the controller of a client's attempts, if it has one.
    pub(super) fn admission_of(&self, node: usize) -> Option<usize> {
        self.admissions.len().checked_sub(1).map(|last| node.min(last))
    }

    /// Sends an attempt of a plain client, or lets its call wait for its controller.
    pub(super) fn start_plain_attempt(&mut self, id: CallId) {
        let CallState { node, started_at, .. } = self.calls[id.index];
        let now = self.events.now;
        let ClientState::Plain(plain) = &self.nodes[node].client else { return };
        let time_left = plain.time_left(now.since(started_at));
        let Some(index) = self.admission_of(node) else { return self.send_plain_attempt(id) };
        if !self.admissions[index].push(id) {
            return self.finish_call(id, CallOutcome::Declined);
        }
        self.poll_admission(index);
        let waiting = self.admissions[index].waiting_calls();
        if waiting > 0 {
            self.stats.record(now, |bucket| bucket.waiting = bucket.waiting.max(waiting));
            if time_left < Span::MAX {
                // A call that is sent just before its deadline would cost the service work and yield nothing.
                let longest_wait = Span::from_micros(time_left.as_micros() / 2);
                self.events.schedule_after(longest_wait, SimEvent::CallExpires(id));
            }
        }
    }

    /// Sends the calls that a controller lets pass.
    pub(super) fn poll_admission(&mut self, index: usize) {
        let now = self.events.now;
        loop {
            match self.admissions[index].poll(now) {
                Turn::Send { id, in_flight } => {
                    if let ClientCall::Plain(retry) = &mut self.calls[id.index].client_call {
                        retry.admitted = (now, in_flight);
                    }
                    self.send_plain_attempt(id);
                }
                Turn::Sleep(at) => {
                    let wakes_at = &mut self.admissions[index].wakes_at;
                    if at < *wakes_at {
                        *wakes_at = at;
                        self.events.schedule(at, SimEvent::AdmissionWakes(index, at));
                    }
                    return;
                }
            }
        }
    }

    fn send_plain_attempt(&mut self, id: CallId) {
        let CallState { node, started_at, .. } = self.calls[id.index];
        let elapsed = self.events.now.since(started_at);
        let ClientState::Plain(plain) = &mut self.nodes[node].client else { return };
        let ClientCall::Plain(retry) = &mut self.calls[id.index].client_call else { return };
        let time_left = plain.time_left(elapsed);
        match plain.start_attempt(retry, time_left) {
            Some(reply_timeout) => self.send_attempt(id, reply_timeout, Span::ZERO),
            None => self.finish_call(id, CallOutcome::Declined),
        }
    }

    pub(super) fn wake_admission(&mut self, index: usize, at: Time) {
        if self.admissions[index].wakes_at == at {
            self.admissions[index].wakes_at = Time::NEVER;
            self.poll_admission(index);
        }
    }

    /// Ends a call whose time to wait is over, if it still waits for its controller.
    pub(super) fn expire_call(&mut self, id: CallId) {
        let Some(node) = self.call(id).map(|call| call.node) else { return };
        if self.admission_of(node).is_some_and(|index| self.admissions[index].remove(id)) {
            self.finish_call(id, CallOutcome::Failed);
        }
    }
}
