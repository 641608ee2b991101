//! The events of a simulation, and their subjects.

use tidegate_core::call::AttemptReport;
use tidegate_core::retry::Delivery;
use tidegate_core::{Batch, Class, Outcomes, Span, Ticket, Time, Verdict};

use super::plain_client::RetryState;
use crate::service::{JobId, RequestKind, ServiceReply};

/// The identity of a call. It is invalid once the call has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallId {
    pub(super) index: usize,
    pub(super) sequence: u64,
}

#[derive(Debug)]
pub(super) struct CallState {
    pub(super) sequence: u64,
    pub(super) node: usize,
    pub(super) started_at: Time,
    pub(super) attempt: u32,
    /// The time for which the attempt's reply is awaited; zero if none is awaited.
    pub(super) reply_timeout: Span,
    /// A timeout that is shorter than this says nothing about the service.
    pub(super) conclusive_after: Span,
    /// The job under which the service holds the attempt.
    pub(super) job: Option<JobId>,
    pub(super) client_call: ClientCall,
}

#[derive(Debug)]
pub(super) enum ClientCall {
    Plain(RetryState),
    /// The call's slot in its client.
    Tidegate(usize),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SimRequest {
    pub(super) call: CallId,
    pub(super) attempt: u32,
    pub(super) node: usize,
}

impl SimRequest {
    /// Returns the holder of its permit at the gate, which is unique for each attempt of each call of a run.
    pub(super) fn permit_holder(self) -> u64 {
        (self.call.sequence << 20) | u64::from(self.attempt)
    }
}

#[derive(Debug)]
pub(super) enum SimEvent {
    /// A client makes a call.
    ClientCalls(usize),
    RequestArrives(SimRequest, RequestKind),
    JobFinishes(JobId),
    ReplyArrives(SimRequest, ServiceReply),
    AttemptTimesOut(SimRequest),
    CallResumes(CallId),
    /// The time for which a call may wait for its controller is over.
    CallExpires(CallId),
    /// A controller is asked again, if that is still planned for this moment.
    AdmissionWakes(usize, Time),
    /// The number of workers changes.
    WorkersChange,
    /// The gate renews the permits that are held.
    GateRenewsPermits,
    /// A client's timer fires, if it is still set for this moment.
    ClientWakes(usize, Time),
    StoreRequestArrives(Box<SharedStoreRequest>),
    /// The reply of the store, or `None` if the request or the reply was lost.
    StoreReplyArrives(Box<SharedStoreRequest>, Option<Box<Outcomes>>),
    StoreNotificationArrives(Box<Batch>),
}

#[derive(Debug)]
pub(super) struct SharedStoreRequest {
    pub(super) node: usize,
    pub(super) waiting_call: (usize, Ticket),
    pub(super) batch: Box<Batch>,
}

/// Returns the report of an attempt with this reply.
pub(super) fn attempt_report(reply: ServiceReply) -> AttemptReport {
    let (class, delivery, retry_after) = match reply {
        ServiceReply::Done | ServiceReply::Row { .. } => (Class::Success, Delivery::Answered, None),
        ServiceReply::Conflict | ServiceReply::Failed => (Class::Transient, Delivery::Answered, None),
        ServiceReply::Throttled { retry_after } => (Class::Throttled, Delivery::Answered, retry_after),
        ServiceReply::ConnectionRefused => (Class::Transient, Delivery::Unsent, None),
    };
    let verdict = Verdict { wait: retry_after, ..Verdict::new(class) };
    AttemptReport { is_repeatable: true, ..AttemptReport::from_verdict(verdict, delivery) }
}
