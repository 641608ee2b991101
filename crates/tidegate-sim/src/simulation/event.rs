//! The events of a simulation, and their subjects.

use tidegate_core::retry::Delivery;
use tidegate_core::{Batch, Class, Outcomes, Span, Ticket, Time};

use super::plain_client::RetryState;
use crate::service::{JobId, RequestKind, ServiceReply};

/// The identity of a call. It is invalid once the call has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallId {
    pub(super) index: usize,
    pub(super) sequence: u64,
}

/// The state of a call.
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

/// A request that was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimRequest {
    pub(super) call: CallId,
    pub(super) attempt: u32,
    pub(super) node: usize,
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
    /// The gate renews the permits that are held.
    GateRenewsPermits,
    /// A client's timer fires, if it is still set for this moment.
    ClientWakes(usize, Time),
    StoreRequestArrives(Box<SharedStoreRequest>),
    StoreReplyArrives(Box<SharedStoreRequest>, Option<Box<Outcomes>>),
    StoreNotificationArrives(Box<Batch>),
}

/// A request to a shared store.
#[derive(Debug)]
pub(super) struct SharedStoreRequest {
    pub(super) node: usize,
    pub(super) waiting_call: (usize, Ticket),
    pub(super) batch: Box<Batch>,
}

/// The result of an attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttemptResult {
    pub(super) class: Class,
    pub(super) reach: Delivery,
    pub(super) retry_after: Option<Span>,
}

pub(super) fn attempt_result(answer: ServiceReply) -> AttemptResult {
    let (class, reach, retry_after) = match answer {
        ServiceReply::Done | ServiceReply::Row { .. } => (Class::Success, Delivery::Answered, None),
        ServiceReply::Conflict | ServiceReply::Failed => (Class::Transient, Delivery::Answered, None),
        ServiceReply::Throttled { retry_after } => (Class::Throttled, Delivery::Answered, retry_after),
        ServiceReply::ConnectionRefused => (Class::Transient, Delivery::Unsent, None),
    };
    AttemptResult { class, reach, retry_after }
}
