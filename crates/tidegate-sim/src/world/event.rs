//! What happens in a world, and what it is about.

use tidegate_core::retry::Reach;
use tidegate_core::{Batch, Class, Outcomes, Span, Ticket, Time};

use super::plain::Tried;
use crate::service::{Answer, Asks, JobId};

/// Names a call. Once it is over its name means nothing any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallId {
    pub(super) index: usize,
    pub(super) number: u64,
}

/// A call under way.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) number: u64,
    pub(super) node: usize,
    pub(super) begun_at: Time,
    pub(super) attempt: u32,
    /// How long the attempt's reply is waited for; nothing if none is.
    pub(super) patience: Span,
    /// A time-out earlier than this says nothing of the service.
    pub(super) enough: Span,
    /// Under which the service has the attempt.
    pub(super) job: Option<JobId>,
    pub(super) mind: Mind,
}

#[derive(Debug)]
pub(super) enum Mind {
    Plain(Tried),
    /// Where the machine holds it.
    Machine(usize),
}

/// A request on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) call: CallId,
    pub(super) attempt: u32,
    pub(super) node: usize,
}

#[derive(Debug)]
pub(super) enum Event {
    /// A client makes a call.
    Calls(usize),
    Arrives(Request, Asks),
    Served(JobId),
    Replied(Request, Answer),
    TimesOut(Request),
    Again(CallId),
    /// The gate renews the permits that are held.
    Renews,
    /// A machine's timer rings, if it is still set for this moment.
    Wakes(usize, Time),
    StoreHears(Box<Question>),
    StoreAnswers(Box<Question>, Option<Box<Outcomes>>),
    StoreIsTold(Box<Batch>),
}

/// What a shared store is asked.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) node: usize,
    pub(super) asker: (usize, Ticket),
    pub(super) batch: Box<Batch>,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    pub(super) class: Class,
    pub(super) reach: Reach,
    pub(super) retry_after: Option<Span>,
}

pub(super) fn ended_by(answer: Answer) -> Ended {
    let (class, reach, retry_after) = match answer {
        Answer::Done | Answer::Row { .. } => (Class::Success, Reach::Answered, None),
        Answer::Conflict | Answer::Failed => (Class::Transient, Reach::Answered, None),
        Answer::Throttled { retry_after } => (Class::Throttled, Reach::Answered, retry_after),
        Answer::Refused => (Class::Transient, Reach::Unsent, None),
    };
    Ended { class, reach, retry_after }
}
